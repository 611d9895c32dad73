//! Checks each frame that two stacks exchange against the RFCs, using only the frames and whether
//! they arrived: it shares no code and no state with the stacks.
//!
//! | rule | source |
//! |---|---|
//! | no data is sent beyond the right edge of a window advertisement that arrived | RFC 9293 3.8.6 |
//! | neither the right edge nor the acknowledgement number moves left | RFC 9293 3.8.6.2.1, 3.4 |
//! | ACK and SACK cover only data that arrived | RFC 9293 3.4, RFC 2018 3, RFC 2883 4 |
//! | payload is the data that the owner pushed, in retransmissions too, and ends at the FIN | RFC 9293 3.4, 3.6 |
//! | a retransmission has the boundaries of the first transmission | records, RFC 5044 5 |
//! | timestamps never decrease, and echoes repeat received timestamps | RFC 7323 4, 5.4 |
//!
//! It also knows which retransmissions were needed, that is, no earlier copy of the bytes arrives. A
//! reduction of the congestion window may be undone only if no retransmission of its recovery was
//! needed (RFC 3708, RFC 3522). It also counts retransmissions whose ACK may have been delayed
//! because the peer had to resolve its neighbour first.
//!
//! Three weaknesses of SYN cookies (RFC 4987 section 3.6), which other systems share, are no violations:
//! a SYN-ACK to a late SYN with ECN, after one to the SYN that repeats it without ECN, has a timestamp
//! that is up to half a unit of the cookie's clock older; a late copy of the segment that returned a
//! cookie opens a connection anew once the listener's host has forgotten it; and a late copy of the SYN is
//! then answered with the sequence number of the first answer.
//!
//! A receiver without timestamps cannot know that a late segment below its window belongs to an earlier
//! connection between the same endpoints: it reports it as a duplicate (RFC 2883 section 4, RFC 9293
//! section 3.10.7.4).

use std::collections::{HashMap, HashSet};
use std::hash::BuildHasherDefault;

use ahash::AHasher;

use siw_net::Instant;
use siw_tcp::StackStats;

use crate::flow_state::{Flow, FlowSide, NeighbourSearch, SentAgain};
use crate::sink::Pattern;
use crate::wire_view::{ACK, ECE, FIN, NeighbourMessage, RST, SYN, TcpView, tcp_view};

pub use crate::flow_state::{FlowEnds, RecoveryEpisode, SentRange};

/// Returns the salt of the pattern that `host` sends on a connection.
pub fn salt_of(ends: &FlowEnds, host: usize) -> u64 {
    let ports = u64::from(ends[0].port()) << 16 | u64::from(ends[1].port());
    (ports * 2 + host as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The endpoints of a frame are hashed several times for each step of a run.
type FastHasher = BuildHasherDefault<AHasher>;

/// Checks the frames of all connections between two hosts.
#[derive(Default)]
pub struct WireOracle {
    flows: Vec<Flow>,
    /// The newest connection for each pair of endpoints.
    current: HashMap<FlowEnds, usize, FastHasher>,
    /// The MTU of the path decreases in this run.
    path_narrows: bool,
    /// Hosts answer SYNs with cookies: a late copy of the segment that returned a cookie opens a connection
    /// anew after its reset, or after both ends have closed.
    pub sends_cookies: bool,
    /// Endpoints between which a connection may have been opened anew from old segments: their frames are
    /// no longer checked.
    reopened: HashSet<FlowEnds, FastHasher>,
    /// The first rule violation.
    violation: Option<String>,
    tail_probes: [u64; 2],
    /// The last neighbour resolution of each host.
    searches: [Option<NeighbourSearch>; 2],
    /// Retransmissions of each host whose ACK may have been delayed by a neighbour resolution of
    /// the peer.
    pub held_up: [u64; 2],
    /// Connections for which a frame arrived since this was last cleared, with the receiving host.
    pub touched: Vec<(usize, usize)>,
    /// Times that the sequence numbers of a connection wrapped.
    pub wraps: u64,
    /// Segments with payload, retransmissions included.
    pub segments: u64,
    /// Retransmissions of data of which no earlier copy arrives.
    pub needed: u64,
    /// Retransmissions of data of which an earlier copy arrives.
    pub needless: u64,
}

/// Half a unit of the clock in a cookie's timestamp, in ticks.
const COOKIE_HALF_UNIT: u32 = 32;

fn is_before(first: u32, second: u32) -> bool {
    (first.wrapping_sub(second) as i32) < 0
}

impl WireOracle {
    /// Creates an oracle. `path_narrows`: retransmissions may be split into smaller segments.
    pub fn new(path_narrows: bool) -> Self {
        WireOracle {
            path_narrows,
            ..WireOracle::default()
        }
    }

    /// Takes the first rule violation, if any.
    pub fn take_violation(&mut self) -> Option<String> {
        self.violation.take()
    }

    fn reject(&mut self, now: Instant, from: usize, view: &TcpView<'_>, why: String) {
        self.violation.get_or_insert_with(|| {
            let (source, destination) = (view.source, view.destination);
            format!(
                "host {from} at {} us, {source} > {destination}: {why}",
                now.0 / 1000
            )
        });
    }

    fn ends_of(from: usize, view: &TcpView<'_>) -> FlowEnds {
        if from == 0 {
            [view.source, view.destination]
        } else {
            [view.destination, view.source]
        }
    }

    /// Finds the connection of a frame that is sent; a SYN with another sequence number starts a new
    /// one.
    fn flow_of(&mut self, from: usize, view: &TcpView<'_>) -> Option<usize> {
        let ends = Self::ends_of(from, view);
        let known = self.current.get(&ends).copied();
        if view.flags & (SYN | RST) == SYN {
            let is_answer = view.flags & ACK != 0;
            let is_stale = |flow: usize| {
                let peer_iss = self.flows[flow].sides[1 - from].iss;
                is_answer && peer_iss.is_some_and(|iss| view.ack != iss.wrapping_add(1))
            };
            if known.is_some_and(is_stale) {
                self.note_answer_to_earlier(known?, from, view);
                return None;
            }
            if self.sends_cookies
                && is_answer
                && let Some(flow) = known.map(|flow| &mut self.flows[flow])
                && flow.sides[from].is_over(&flow.sides[1 - from])
            {
                flow.answered_anew = Some((from, view.seq));
                return None; // it answers a late SYN of a connection that is over
            }
            let is_same = |flow: &usize| {
                let iss = self.flows[*flow].sides[from].iss;
                iss.is_none_or(|iss| iss == view.seq)
            };
            if let Some(flow) = known.filter(is_same) {
                return Some(flow);
            }
            if is_answer {
                let flow = &mut self.flows[known?];
                if flow.sides[1 - from].last_ack.is_some() {
                    flow.answered_anew = Some((from, view.seq));
                    return None;
                }
                // The SYN-ACK of a connection that replaced an earlier half-open one. The host remembers
                // the peer's data and timestamps.
                self.flows[known?].replaced =
                    self.flows[known?].sides[from].iss.map(|iss| (from, iss));
                let side = &mut self.flows[known?].sides[from];
                *side = FlowSide {
                    edge: side.edge,
                    received: std::mem::take(&mut side.received),
                    newest_peer_tsval: side.newest_peer_tsval,
                    ..FlowSide::default()
                };
                return known;
            }
            let sides = [FlowSide::default(), FlowSide::default()];
            let is_recut = self.path_narrows;
            self.flows.push(Flow {
                ends,
                earlier: known,
                sides,
                is_recut,
                answered_anew: None,
                replaced: None,
            });
            self.current.insert(ends, self.flows.len() - 1);
            return Some(self.flows.len() - 1);
        }
        // A host that has not answered the newest SYN still uses the connection before it. One that
        // answered anew has forgotten the connection that is checked here.
        let is_open = |&flow: &usize| self.flows[flow].sides[from].iss.is_some();
        let used = known.filter(is_open).or(self.flows[known?].earlier);
        used.filter(|&flow| {
            let flow = &self.flows[flow];
            let forgot = flow.answered_anew.is_some_and(|(host, _)| host == from);
            flow.sides[from].iss.is_some() && !forgot
        })
    }

    /// Notes a SYN-ACK for the SYN of a connection before this one. If the host had answered that SYN
    /// before, it has forgotten that connection and answers a late copy.
    fn note_answer_to_earlier(&mut self, newest: usize, from: usize, view: &TcpView<'_>) {
        let Some(earlier) = self.flows[newest].earlier else {
            return;
        };
        let flow = &mut self.flows[earlier];
        let answered = flow.sides[1 - from].iss;
        let is_its_syn = answered.is_some_and(|iss| view.ack == iss.wrapping_add(1));
        if is_its_syn && flow.sides[from].iss.is_some_and(|iss| iss != view.seq) {
            flow.answered_anew = Some((from, view.seq));
        }
    }

    /// Finds the connection of a frame that arrives: the newest between its endpoints, or the one
    /// before it if the frame does not follow the newest SYN, or follows it though the other end has sent
    /// no SYN yet: the newest may begin in the midst of the sequence numbers of the one before it.
    fn arrived_flow_of(&self, from: usize, view: &TcpView<'_>) -> Option<usize> {
        let newest = *self.current.get(&Self::ends_of(from, view))?;
        let flow = &self.flows[newest];
        let is_answered = flow.sides[1 - from].iss.is_some();
        let follows = |iss: u32| {
            view.seq == iss && view.flags & SYN != 0 || is_answered && !is_before(view.seq, iss)
        };
        if flow.sides[from].iss.is_some_and(follows) {
            return Some(newest);
        }
        flow.earlier.or(Some(newest))
    }

    /// Notes that a host restarts: its counters start at zero.
    pub fn on_restart(&mut self, host: usize) {
        (self.tail_probes[host], self.searches[host]) = (0, None);
        for flow in &mut self.flows {
            flow.sides[host].timeouts = 0;
            flow.sides[host].reductions = 0;
        }
    }

    /// Checks a frame that a host sends. Returns the argument for [`WireOracle::on_way`].
    pub fn on_sent(
        &mut self,
        now: Instant,
        from: usize,
        frame: &[u8],
        stats: &StackStats,
    ) -> Option<SentRange> {
        let is_tail_probe = stats.tcp.tlp_probes > self.tail_probes[from];
        if NeighbourMessage::of(frame) == Some(NeighbourMessage::Search) {
            self.searches[from] = Some(NeighbourSearch::Asked);
        }
        let view = tcp_view(frame)?;
        if self.reopened.contains(&Self::ends_of(from, &view)) {
            return None;
        }
        let index = self.flow_of(from, &view)?;
        self.flows[index].is_recut |= stats.tcp.black_holes + stats.tcp.pmtu_reductions > 0;
        // The peer answers a SYN-ACK that was in transit when its sender replaced the connection.
        let is_replaced = self.flows[index].replaced.is_some_and(|(host, iss)| {
            host != from && view.flags & ACK != 0 && view.ack == iss.wrapping_add(1)
        });
        if is_replaced || (self.sends_cookies && view.flags & RST != 0) {
            self.reopened.insert(Self::ends_of(from, &view));
            return None;
        }
        if view.flags & RST != 0 {
            return None;
        }
        if let Err(why) = self.judge_acknowledgement(index, from, &view) {
            self.reject(now, from, &view, why);
        }
        let side = &mut self.flows[index].sides[from];
        if view.flags & SYN != 0 {
            side.iss = Some(view.seq);
            side.window_scale = view.window_scale;
            side.sent = side.sent.max(1);
            side.acked_at = now;
        }
        let start = view.seq.wrapping_sub(side.iss?);
        let end = start.wrapping_add(view.span());
        let duplicate = Self::unmarked_duplicate(&view).and_then(|(low, high)| {
            let iss = self.flows[index].sides[1 - from].iss?;
            Some((low.wrapping_sub(iss), high.wrapping_sub(iss)))
        });
        if view.span() == 0 {
            return duplicate.map(|_| SentRange {
                flow: index,
                from,
                start,
                end,
                retransmission: None,
                duplicate,
            });
        }
        self.segments += u64::from(!view.payload.is_empty());
        if let Err(why) = self.judge_text(index, from, &view, start) {
            self.reject(now, from, &view, why);
        }
        let mut retransmission = None;
        let side = &mut self.flows[index].sides[from];
        let timeouts = std::mem::replace(&mut side.timeouts, stats.tcp.timeouts);
        let reductions = stats.tcp.timeouts + stats.tcp.fast_recovery;
        let reductions_before = std::mem::replace(&mut side.reductions, reductions);
        if start < side.sent && view.flags & SYN == 0 {
            let before = side.note_sent_again(start, end, now);
            let has_searched = self.searches[1 - from].is_some_and(|search| match search {
                NeighbourSearch::Asked => true,
                NeighbourSearch::AnsweredAt(at) => before.is_some_and(|before| at >= before),
            });
            let held_up = side.is_held_up(has_searched, end, stats.tcp.timeouts);
            self.held_up[from] += u64::from(held_up);
            retransmission = Some(SentAgain {
                needed: !side.arriving.covers(start, end),
                is_tail_probe: end == side.sent && is_tail_probe,
                is_cut: side.segments.get(&start) != Some(&end),
                timeouts_before: timeouts,
                timeouts: stats.tcp.timeouts,
                reductions_before,
                reductions,
                at: now,
            });
        } else if view.flags & SYN == 0 {
            let crosses = view.seq.checked_add(view.span()).is_none();
            self.wraps += u64::from(crosses);
            side.segments.insert(start, end);
            side.outstanding.push_back((start, end, now));
            side.sent = end;
        } else {
            self.wraps += u64::from(view.seq == u32::MAX);
        }
        self.tail_probes[from] = stats.tcp.tlp_probes;
        Some(SentRange {
            flow: index,
            from,
            start,
            end,
            retransmission,
            duplicate,
        })
    }

    /// Returns the D-SACK block of a segment without timestamps. If the network duplicates this segment,
    /// the receiver of the block counts the duplicate report twice.
    fn unmarked_duplicate(view: &TcpView<'_>) -> Option<(u32, u32)> {
        if view.sack_count == 0 || view.timestamps.is_some() {
            return None;
        }
        let (low, high) = view.sack[0];
        let around = view.sack[1];
        let is_inside =
            view.sack_count > 1 && !is_before(low, around.0) && !is_before(around.1, high);
        (!is_before(view.ack, high) || is_inside).then_some((low, high))
    }

    /// Notes that the frame passed to [`WireOracle::on_sent`] arrives `copies` times. Where the network
    /// duplicates retransmissions, a segment may be reported as a duplicate as often as it was
    /// retransmitted, whether or not the original arrived: then the retransmissions look needless to
    /// their sender (RFC 3708 section 3). The same happens where the network duplicates the report.
    pub fn on_way(&mut self, sent: &SentRange, copies: u32) {
        if let Some((low, high)) = sent.duplicate.filter(|_| copies > 1) {
            let peer = &mut self.flows[sent.flow].sides[1 - sent.from];
            for (_, range) in peer.sent_again.range_mut(low..high.max(low)) {
                range.copies += copies - 1;
            }
            peer.judge_episode();
        }
        let side = &mut self.flows[sent.flow].sides[sent.from];
        if copies > 0 && sent.start != sent.end {
            side.arriving.insert(sent.start, sent.end);
        }
        let Some(again) = &sent.retransmission else {
            return;
        };
        self.needed += u64::from(again.needed);
        self.needless += u64::from(!again.needed);
        let goes_on = side.episode.is_some_and(|episode| {
            side.acked < episode.recover && episode.reductions == again.reductions
        });
        // A tail loss probe starts no recovery, nor does a part of a segment that was too long for
        // the path. A host that waits for its neighbour sends the probe of one connection together with
        // what another sends again after a timeout: the last segment may then be either.
        let is_probe = again.is_tail_probe && again.reductions == again.reductions_before;
        let reduced = side.episode.map_or(0, |episode| episode.reductions) != again.reductions;
        if !goes_on && (is_probe || (again.is_cut && !reduced)) {
            return;
        }
        if !goes_on {
            side.sent_again.clear();
            let may_go_on = side.episode.is_some_and(|episode| {
                side.acked < episode.recover && episode.timeouts == again.timeouts
            });
            let begun = RecoveryEpisode {
                recover: side.sent,
                first_needed: again.needed && copies < 2,
                needed: false,
                may_be_probe: again.is_tail_probe,
                timeouts_before: again.timeouts_before,
                timeouts: again.timeouts,
                may_go_on,
                reductions: again.reductions,
                began_at: again.at,
            };
            let before = side.episode.replace(begun);
            if !(may_go_on && before.is_some_and(|before| before.may_go_on)) {
                side.episode_before = before;
            }
        }
        let range = side.sent_again.entry(sent.start).or_default();
        range.needed |= again.needed;
        range.times += 1;
        range.copies += copies;
        side.judge_episode();
    }

    /// Checks the acknowledgement, window, SACK blocks and timestamps of a segment.
    fn judge_acknowledgement(
        &mut self,
        index: usize,
        from: usize,
        view: &TcpView<'_>,
    ) -> Result<(), String> {
        let reports_earlier = self.reports_earlier_data(index, from, view);
        let [zero, one] = &mut self.flows[index].sides;
        let (side, peer) = if from == 0 { (zero, one) } else { (one, zero) };
        if let Some((value, echo)) = view.timestamps {
            let may_be_cookie =
                self.sends_cookies && view.flags & (SYN | ACK | ECE) == SYN | ACK | ECE;
            match side.last_tsval.filter(|last| is_before(value, *last)) {
                Some(last) if may_be_cookie && last.wrapping_sub(value) <= COOKIE_HALF_UNIT => {}
                Some(last) => return Err(format!("timestamp {value} after {last}")),
                None => side.last_tsval = Some(value),
            }
            let newest = side.newest_peer_tsval;
            if view.flags & ACK != 0 && newest.is_some_and(|newest| is_before(newest, echo)) {
                return Err(format!(
                    "echoes timestamp {echo}, received were up to {newest:?}"
                ));
            }
        }
        let Some(peer_iss) = peer.iss.filter(|_| view.flags & ACK != 0) else {
            return Ok(());
        };
        let ack = view.ack.wrapping_sub(peer_iss);
        let arrived = side.received.end_from(0);
        if ack > arrived {
            return Err(format!("acknowledges {ack}, arrived is {arrived}"));
        }
        if side.last_ack.is_some_and(|last| ack < last) {
            return Err(format!("acknowledges {ack} after {:?}", side.last_ack));
        }
        side.last_ack = Some(ack);
        let both = side.window_scale.is_some() && peer.window_scale.is_some();
        let shift = match side.window_scale {
            Some(shift) if both && view.flags & SYN == 0 => shift,
            _ => 0,
        };
        let edge = ack + (u32::from(view.window) << shift);
        // The window of a SYN is not scaled, so its right edge may be smaller.
        if edge < side.last_edge && view.flags & SYN == 0 {
            let last = side.last_edge;
            return Err(format!("the right edge moves left: {edge} after {last}"));
        }
        side.last_edge = side.last_edge.max(edge);
        for (place, (low, high)) in view.sack[..view.sack_count].iter().enumerate() {
            let (low, high) = (low.wrapping_sub(peer_iss), high.wrapping_sub(peer_iss));
            let is_known = side.received.covers(low, high) || (place == 0 && reports_earlier);
            if low >= high || !is_known {
                return Err(format!(
                    "SACK {low}..{high} covers data that did not arrive"
                ));
            }
            if place > 0 && high <= ack {
                return Err(format!(
                    "SACK {low}..{high} below the acknowledgement {ack}"
                ));
            }
        }
        Ok(())
    }

    /// Returns whether the first SACK block of a segment without timestamps reports data that arrived for
    /// the connection before this one between the same endpoints, and lies below this one.
    fn reports_earlier_data(&self, index: usize, from: usize, view: &TcpView<'_>) -> bool {
        let iss_of = |flow: usize| self.flows[flow].sides[1 - from].iss;
        let Some(earlier) = self.flows[index].earlier else {
            return false;
        };
        let (Some(iss), Some(earlier_iss)) = (iss_of(index), iss_of(earlier)) else {
            return false;
        };
        let (low, high) = view.sack[0];
        let received = &self.flows[earlier].sides[from].received;
        view.sack_count > 0
            && view.timestamps.is_none()
            && !is_before(iss, high)
            && received.covers(
                low.wrapping_sub(earlier_iss),
                high.wrapping_sub(earlier_iss),
            )
    }

    /// Checks the payload and the FIN of a segment, and that the payload is within the window.
    fn judge_text(
        &mut self,
        index: usize,
        from: usize,
        view: &TcpView<'_>,
        start: u32,
    ) -> Result<(), String> {
        let Flow {
            ends,
            sides,
            is_recut,
            ..
        } = &mut self.flows[index];
        let side = &mut sides[from];
        let payload_end = start + view.payload.len() as u32;
        if view.flags & SYN != 0 {
            return Ok(());
        }
        // A FIN occupies no receive buffer.
        if payload_end > side.edge {
            let (edge, len) = (side.edge, view.payload.len());
            return Err(format!(
                "{len} bytes at {start} go beyond the right edge {edge}"
            ));
        }
        let salt = salt_of(ends, from);
        let first = u64::from(start) - 1;
        if let Some(at) = Pattern::first_difference(salt, first, view.payload) {
            return Err(format!(
                "byte {at} of the stream differs from the pushed byte"
            ));
        }
        if view.flags & FIN != 0 {
            if side.fin_at.is_some_and(|fin| fin != payload_end) {
                return Err(format!("FIN at {payload_end} after {:?}", side.fin_at));
            }
            side.fin_at = Some(payload_end);
        }
        if side.fin_at.is_some_and(|fin| payload_end > fin) {
            return Err(format!("text up to {payload_end} beyond the FIN"));
        }
        if start > side.sent {
            return Err(format!("{start} is sent before {}", side.sent));
        }
        if start < side.sent && !*is_recut {
            let end = start + view.span();
            let whole = side.segments.range(..=start).next_back();
            if whole != Some((&start, &end)) {
                return Err(format!("{start}..{end} is sent again, first was {whole:?}"));
            }
        }
        Ok(())
    }

    /// Notes that a frame arrives intact, before the host processes it.
    pub fn on_arrival(&mut self, now: Instant, to: usize, frame: &[u8]) {
        if NeighbourMessage::of(frame) == Some(NeighbourMessage::Answer)
            && let Some(search @ NeighbourSearch::Asked) = &mut self.searches[to]
        {
            *search = NeighbourSearch::AnsweredAt(now);
        }
        let Some(view) = tcp_view(frame) else { return };
        let from = 1 - to;
        let Some(index) = self.arrived_flow_of(from, &view) else {
            return;
        };
        if self.flows[index].is_of_new_answer(from, &view) {
            return;
        }
        let [zero, one] = &mut self.flows[index].sides;
        let (side, peer) = if to == 0 { (zero, one) } else { (one, zero) };
        let Some(peer_iss) = peer.iss else { return };
        self.touched.push((index, to));
        side.heard_at = now;
        if view.flags & RST != 0 {
            return;
        }
        let start = view.seq.wrapping_sub(peer_iss);
        if start > i32::MAX as u32 {
            return; // of an older connection between the same endpoints, or a probe below SND.UNA
        }
        let repeats_handshake = start == 1
            && view.flags & (SYN | ACK) == ACK
            && side.iss.is_some_and(|iss| view.ack == iss.wrapping_add(1));
        if self.sends_cookies && repeats_handshake && side.is_over(peer) {
            self.reopened.insert(self.flows[index].ends);
            return;
        }
        side.received.insert(start, start + view.span());
        if let Some((value, _)) = view.timestamps
            && side
                .newest_peer_tsval
                .is_none_or(|newest| is_before(newest, value))
        {
            side.newest_peer_tsval = Some(value);
        }
        let Some(iss) = side.iss.filter(|_| view.flags & ACK != 0) else {
            if view.flags & SYN != 0 {
                // A SYN acknowledges nothing yet; a late duplicate takes back nothing.
                side.edge = side.edge.max(1 + u32::from(view.window));
            }
            return;
        };
        let ack = view.ack.wrapping_sub(iss);
        if ack > side.sent {
            return;
        }
        if ack > side.acked {
            (side.acked, side.acked_at) = (ack, now);
            while side
                .outstanding
                .front()
                .is_some_and(|segment| segment.1 <= ack)
            {
                side.outstanding.pop_front();
            }
        }
        let both = side.window_scale.is_some() && peer.window_scale.is_some();
        let shift = match peer.window_scale {
            Some(shift) if both && view.flags & SYN == 0 => shift,
            _ => 0,
        };
        side.edge = side.edge.max(ack + (u32::from(view.window) << shift));
    }

    /// Returns the newest connection between these endpoints.
    pub fn find_flow(&self, ends: &FlowEnds) -> Option<usize> {
        self.current.get(ends).copied()
    }

    /// Returns whether a connection between these endpoints may have been opened anew from old segments.
    pub fn is_reopened(&self, ends: &FlowEnds) -> bool {
        self.reopened.contains(ends)
    }

    /// Returns whether there is such a connection.
    pub fn has_reopened(&self) -> bool {
        !self.reopened.is_empty()
    }

    /// Returns the last recovery episode of one end of a connection before the frames that arrived at
    /// `now`; those may already have started another. If it may be a tail loss probe, or the one before it
    /// may go on, that one follows.
    pub fn last_episodes(
        &self,
        flow: usize,
        host: usize,
        now: Instant,
    ) -> impl Iterator<Item = RecoveryEpisode> + use<> {
        let side = &self.flows[flow].sides[host];
        let before = side.episode_before;
        let last = match side.episode {
            Some(episode) if episode.began_at >= now => [before.or(Some(episode)), None],
            Some(episode) if episode.may_be_probe || episode.may_go_on => [Some(episode), before],
            episode => [episode, None],
        };
        last.into_iter().flatten()
    }

    /// Returns when the oldest data in flight from `host` was last sent. `None`: no data is in
    /// flight.
    pub fn oldest_in_flight(&self, flow: usize, host: usize) -> Option<Instant> {
        let oldest = self.flows[flow].sides[host].outstanding.front()?;
        Some(oldest.2)
    }

    /// Returns when a frame of the connection, or of the one before it between the same endpoints, last
    /// arrived at `host`, and when one last acknowledged new data.
    pub fn last_heard(&self, flow: usize, host: usize) -> (Instant, Instant) {
        let times = |flow: usize| {
            let side = &self.flows[flow].sides[host];
            (side.heard_at, side.acked_at)
        };
        let (heard_at, acked_at) = times(flow);
        match self.flows[flow].earlier.map(times) {
            Some((heard, acked)) => (heard_at.max(heard), acked_at.max(acked)),
            None => (heard_at, acked_at),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::forge::{Ends, Tcp};

    const ISS: [u32; 2] = [1000, 9000];

    /// Two hosts whose segments the oracle checks; each arrives at once.
    struct Wire {
        oracle: WireOracle,
        stats: [StackStats; 2],
        now: Instant,
    }

    impl Wire {
        fn new() -> Wire {
            let mut oracle = WireOracle::new(false);
            oracle.sends_cookies = true;
            Wire {
                oracle,
                stats: [StackStats::default(), StackStats::default()],
                now: Instant::from_millis(1),
            }
        }

        /// Builds a segment; `at` and `ack` count from the SYNs.
        fn segment(
            from: usize,
            (at, ack): (u32, u32),
            flags: u8,
            ts: Option<u32>,
            len: u32,
        ) -> Vec<u8> {
            let options = ts.map_or(vec![], |value| {
                [&[1, 1, 8, 10][..], &value.to_be_bytes(), &[0; 4]].concat()
            });
            Self::segment_with(from, (at, ack), flags, &options, len)
        }

        fn segment_with(
            from: usize,
            (at, ack): (u32, u32),
            flags: u8,
            options: &[u8],
            len: u32,
        ) -> Vec<u8> {
            let mut mac = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];
            let mut ip = ["10.0.0.1", "10.0.0.2"].map(|address| address.parse().unwrap());
            let mut ports = [7, 80];
            let ends = [0, 1].map(|host| SocketAddr::new(ip[host], ports[host]));
            if from == 1 {
                mac.reverse();
                ip.reverse();
                ports.reverse();
            }
            let first = u64::from(at.saturating_sub(1));
            let payload: Vec<_> = (first..first + u64::from(len))
                .map(|position| Pattern::byte(salt_of(&ends, from), position))
                .collect();
            Ends { mac, ip }.tcp(&Tcp {
                ports,
                seq: ISS[from] + at,
                ack: if flags & ACK == 0 {
                    0
                } else {
                    ISS[1 - from] + ack
                },
                flags,
                window: 1000,
                options,
                payload: &payload,
            })
        }

        fn send(&mut self, from: usize, frame: &[u8]) -> Option<String> {
            self.send_copies(from, frame, 1);
            self.oracle.on_arrival(self.now, 1 - from, frame);
            self.oracle.take_violation()
        }

        /// Sends a frame of which `copies` arrive later.
        fn send_copies(&mut self, from: usize, frame: &[u8], copies: u32) {
            self.now = self.now + core::time::Duration::from_millis(1);
            let sent = self
                .oracle
                .on_sent(self.now, from, frame, &self.stats[from]);
            if let Some(sent) = sent {
                self.oracle.on_way(&sent, copies);
            }
        }

        fn pass(&mut self, from: usize, places: (u32, u32), flags: u8, len: u32) {
            let frame = Self::segment(from, places, flags, None, len);
            assert_eq!(self.send(from, &frame), None);
        }

        fn shake_hands(&mut self) {
            self.pass(0, (0, 0), SYN, 0);
            self.pass(1, (0, 1), SYN | ACK, 0);
            self.pass(0, (1, 1), ACK, 0);
        }
    }

    #[test]
    fn only_a_late_syn_with_ecn_may_be_answered_with_an_older_timestamp() {
        let mut wire = Wire::new();
        wire.pass(0, (0, 0), SYN, 0);
        let mut answer = |value, flags| {
            let frame = Wire::segment(1, (0, 1), SYN | ACK | flags, Some(value), 0);
            wire.send(1, &frame).is_none()
        };
        assert!(answer(100, 0) && answer(68, ECE) && answer(100, 0));
        assert!(!answer(99, 0), "a SYN without ECN");
        assert!(!answer(67, ECE), "more than half a unit");
        wire.oracle.sends_cookies = false;
        let frame = Wire::segment(1, (0, 1), SYN | ACK | ECE, Some(68), 0);
        assert!(wire.send(1, &frame).is_some(), "no cookie");
    }

    #[test]
    fn a_late_copy_of_the_returned_cookie_reopens_only_what_is_over() {
        for is_over in [false, true] {
            let mut wire = Wire::new();
            wire.shake_hands();
            wire.pass(0, (1, 1), ACK | FIN, 10);
            wire.pass(1, (1, 12), ACK | FIN, 20);
            if is_over {
                wire.pass(0, (12, 22), ACK, 0);
            }
            let late = Wire::segment(0, (1, 1), ACK, None, 0);
            wire.oracle.on_arrival(wire.now, 1, &late);
            // The host that forgot the connection sends its data again, and knows of no FIN.
            let again = Wire::segment(1, (1, 1), ACK, None, 20);
            assert_eq!(wire.send(1, &again).is_none(), is_over);
            assert_eq!(wire.oracle.has_reopened(), is_over);
        }
    }

    #[test]
    fn a_late_syn_is_answered_with_the_same_cookie_only_after_the_end() {
        for is_over in [false, true] {
            let mut wire = Wire::new();
            wire.shake_hands();
            wire.pass(0, (1, 1), ACK | FIN, 10);
            wire.pass(1, (1, 12), ACK | FIN, 20);
            if is_over {
                wire.pass(0, (12, 22), ACK, 0);
            }
            let answer = Wire::segment(1, (0, 1), SYN | ACK, None, 0);
            assert_eq!(wire.send(1, &answer).is_none(), is_over);
            // The first end still waits in TIME-WAIT and says so.
            wire.pass(0, (12, 22), ACK, 0);
        }
    }

    #[test]
    fn an_answer_to_a_late_syn_says_nothing_about_the_connection_it_once_opened() {
        for is_new in [false, true] {
            let mut wire = Wire::new();
            wire.shake_hands();
            wire.pass(0, (1, 1), ACK, 10);
            wire.pass(1, (1, 11), ACK, 0);
            wire.pass(0, (5000, 0), SYN, 0);
            let at = if is_new { 700 } else { 0 };
            wire.pass(1, (at, 1), SYN | ACK, 0);
            let confirms = Wire::segment(1, (at + 1, 1), ACK, None, 0);
            assert_eq!(wire.send(1, &confirms).is_none(), is_new);
        }
    }

    /// The next connection begins at 50 in the sequence numbers of the one before it.
    #[test]
    fn old_data_above_a_new_syn_belongs_to_the_old_connection_until_that_is_answered() {
        let mut wire = Wire::new();
        wire.shake_hands();
        let late = Wire::segment(0, (1, 1), ACK, None, 100);
        wire.send_copies(0, &late[..], 1);
        let later = Wire::segment(0, (101, 1), ACK, None, 100);
        wire.send_copies(0, &later, 1);
        wire.pass(0, (50, 0), SYN, 0);
        for frame in [&late, &later] {
            wire.oracle.on_arrival(wire.now, 1, frame);
        }
        wire.pass(1, (1, 201), ACK, 0);
        let beyond = Wire::segment(1, (1, 202), ACK, None, 0);
        assert!(wire.send(1, &beyond).is_some());
    }

    #[test]
    fn only_data_of_the_connection_before_may_be_reported_below_the_first_byte() {
        let sack = |low: u32, high: u32| {
            let [low, high] = [low, high].map(|at| (ISS[0] + at).to_be_bytes());
            [&[1, 1, 5, 10][..], &low, &high].concat()
        };
        for (low, high, is_right) in [(1, 11, true), (5, 11, true), (11, 21, false)] {
            let mut wire = Wire::new();
            wire.shake_hands();
            wire.pass(0, (1, 1), ACK, 10);
            wire.pass(0, (5000, 0), SYN, 0);
            wire.pass(1, (3000, 5001), SYN | ACK, 0);
            wire.pass(0, (5001, 3001), ACK, 0);
            let report = Wire::segment_with(1, (3001, 5001), ACK, &sack(low, high), 0);
            assert_eq!(wire.send(1, &report).is_none(), is_right, "{low}..{high}");
        }
    }

    /// Another connection's fast recovery in the midst of what a timeout sends again.
    #[test]
    fn a_fast_recovery_elsewhere_does_not_end_the_episode_of_a_timeout() {
        for is_timeout in [false, true] {
            let mut wire = Wire::new();
            wire.shake_hands();
            let lost = Wire::segment(0, (11, 1), ACK, None, 10);
            wire.pass(0, (1, 1), ACK, 10);
            wire.send_copies(0, &lost, 0);
            wire.stats[0].tcp.timeouts = 1;
            wire.pass(0, (1, 1), ACK, 10);
            wire.stats[0].tcp.fast_recovery = u64::from(!is_timeout);
            wire.stats[0].tcp.timeouts += u64::from(is_timeout);
            assert_eq!(wire.send(0, &lost), None);
            let later = wire.now + core::time::Duration::from_millis(1);
            let episodes: Vec<_> = wire.oracle.last_episodes(0, 0, later).collect();
            assert!(episodes[0].needed);
            assert_eq!(episodes.len(), 2 - usize::from(is_timeout));
            assert!(episodes[1..].iter().all(|episode| !episode.first_needed));
        }
    }

    /// Data that was sent after the search, but is taken for lost with data from before.
    #[test]
    fn a_timeout_of_data_that_a_search_held_up_covers_all_that_is_in_flight() {
        for other_timeouts in [0, 1] {
            let mut wire = Wire::new();
            wire.shake_hands();
            wire.pass(0, (1, 1), ACK, 10);
            wire.oracle.searches[1] = Some(NeighbourSearch::AnsweredAt(wire.now));
            wire.now = wire.now + core::time::Duration::from_millis(1);
            wire.pass(0, (11, 1), ACK, 10);
            wire.stats[0].tcp.timeouts = 1;
            wire.pass(0, (1, 1), ACK, 10);
            assert_eq!(wire.oracle.held_up, [1, 0]);
            wire.stats[0].tcp.timeouts += other_timeouts;
            wire.pass(0, (11, 1), ACK, 10);
            assert_eq!(wire.oracle.held_up, [2 - other_timeouts, 0]);
        }
    }

    /// A SYN with a newer timestamp is answered without a cookie, and a late copy of the first follows.
    #[test]
    fn an_answer_to_a_late_syn_echoes_the_newest_timestamp() {
        let mut wire = Wire::new();
        let mut syn = |value| {
            let frame = Wire::segment(0, (0, 0), SYN, Some(value), 0);
            wire.send(0, &frame);
        };
        syn(100);
        syn(200);
        let answer = |at: u32, echo: u32| {
            let stamps = [5u32, echo].map(u32::to_be_bytes).concat();
            let options = [&[1, 1, 8, 10][..], &stamps].concat();
            Wire::segment_with(1, (at, 1), SYN | ACK, &options, 0)
        };
        for (at, echo) in [(0, 100), (3000, 200)] {
            assert_eq!(wire.send(1, &answer(at, echo)), None);
        }
        let late = Wire::segment(0, (0, 0), SYN, Some(100), 0);
        wire.send(0, &late);
        assert_eq!(wire.send(1, &answer(3000, 200)), None);
        assert!(wire.send(1, &answer(3000, 201)).is_some());
    }

    /// A host that waited for its neighbour sends several connections' segments at once.
    #[test]
    fn a_timeout_beside_the_probe_of_another_connection_begins_an_episode() {
        for timeouts in [0, 1] {
            let mut wire = Wire::new();
            wire.shake_hands();
            wire.pass(0, (1, 1), ACK, 10);
            (wire.stats[0].tcp.tlp_probes, wire.stats[0].tcp.timeouts) = (1, timeouts);
            wire.pass(0, (1, 1), ACK, 10);
            let later = wire.now + core::time::Duration::from_millis(1);
            let episodes: Vec<_> = wire.oracle.last_episodes(0, 0, later).collect();
            assert_eq!(episodes.len() as u64, timeouts);
            assert!(episodes.iter().all(|episode| !episode.needed));
        }
    }
}
