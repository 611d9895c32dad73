//! The path MTU: reported by ICMP (RFC 1191, 8201), or inferred from the repeated loss of full
//! segments (RFC 8899 section 4.3), and shared by all connections to a destination. A path is
//! assumed to carry the MSS agreed by both ends until it proves narrower; from then on `search` and
//! `probe` search upward for the largest size that it carries.

use crate::base::events::Events;
use crate::base::time::to_long_ticks;
use crate::connection::context::TcpContext;
use crate::connection::path::PathState;
use crate::connection::sender::Sender;
use crate::pmtu::search::{PathSearch, RAISE_TICKS};
use crate::queues::send_queue::{InFlightSegment, SACKED};
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;

/// A smaller MTU reported by a router, below that of any link in use, is rejected: it would only
/// multiply the packets that we send (RFC 5927 section 7).
pub(crate) const MIN_V4: u16 = 552;
/// The minimum link MTU of IPv6 (RFC 8201 section 4).
pub(crate) const MIN_V6: u16 = 1280;
/// BASE_PLPMTU (RFC 8899 section 5.1.2), and the size that every IPv4 host accepts (RFC 791).
const BASE: u16 = 1200;
const BASE_V4: u16 = 576;
/// Consecutive timeouts that make a black hole likely.
const SUSPICIOUS: u8 = 2;

/// Returns the next-hop MTU of an ICMPv4 error. Routers from before RFC 1191 report 0; the result
/// is then the next plateau (RFC 1191 section 7) below `quoted`, the length of the packet that was
/// too big.
pub(crate) fn from_v4(mtu: u16, quoted: u16) -> u16 {
    const PLATEAUS: [u16; 5] = [8166, 4352, 2002, 1492, 1006];
    if mtu != 0 {
        return mtu;
    }
    let below = PLATEAUS.into_iter().find(|&plateau| plateau < quoted);
    below.unwrap_or(MIN_V4)
}

/// Returns when a connection whose path became narrow at `now_ticks` first tries a larger size:
/// at once if it can probe. Without SACK the loss of a probe is detected late or by a timeout,
/// so full segments are tried again after ten minutes instead (RFC 1191 section 6.3).
fn first_look(tcb: &Tcb, now_ticks: u64) -> u64 {
    if tcb.has(ConnectionFlags::SACK) {
        now_ticks
    } else {
        now_ticks + RAISE_TICKS
    }
}

impl PathState {
    fn headers(&self, tcb: &Tcb) -> u16 {
        let ip = if self.template.is_v6() { 60 } else { 40 };
        let ts = if tcb.has(ConnectionFlags::TIMESTAMPS) {
            12
        } else {
            0
        };
        ip + ts
    }

    /// Returns the payload of a segment in an IP packet of `mtu` bytes.
    pub(crate) fn emss_for(&self, tcb: &Tcb, mtu: u16) -> u16 {
        mtu.saturating_sub(self.headers(tcb)).max(1)
    }

    /// Returns the length of the IP packet of a segment with `payload` bytes.
    pub(crate) fn mtu_of(&self, tcb: &Tcb, payload: u16) -> u16 {
        payload.saturating_add(self.headers(tcb))
    }

    /// Applies the known MTU of its path to a new connection.
    pub(crate) fn apply_path_mtu(&mut self, tcb: &mut Tcb, cx: &mut TcpContext<'_>) {
        if cx.shared.paths.0.is_empty() {
            return;
        }
        let now_ticks = to_long_ticks(cx.now.0);
        let to = self.remote();
        if let Some(search) = cx.shared.paths.0.get(&to) {
            if now_ticks >= search.until {
                cx.shared.paths.0.remove(&to);
            } else if self.emss_for(tcb, search.plpmtu) < tcb.emss {
                tcb.emss = self.emss_for(tcb, search.plpmtu);
                tcb.flags |= ConnectionFlags::NARROW_PATH;
                self.schedule_search(tcb, cx, first_look(tcb, now_ticks));
            }
        }
    }

    /// Limits segments to `emss` bytes from now on; longer ones in flight are resegmented and
    /// retransmitted.
    pub(crate) fn narrow<R>(
        &mut self,
        tcb: &mut Tcb,
        sender: &mut Sender<R>,
        cx: &mut TcpContext<'_>,
        emss: u16,
    ) {
        tcb.emss = emss;
        tcb.flags |= ConnectionFlags::NARROW_PATH;
        self.schedule_search(tcb, cx, first_look(tcb, to_long_ticks(cx.now.0)));
        cx.raise_event(tcb, Events::MSS_CHANGED);
        sender.split_multi_segments(tcb);
        if sender
            .send_queue
            .sent
            .iter()
            .any(|segment| segment.len > u32::from(emss))
        {
            sender.resegment_and_resend(tcb, cx);
        }
    }

    /// Checks for a black hole at a retransmission timeout: after several in a row, a router may be
    /// dropping full segments without an ICMP error (RFC 8899 section 4.3).
    pub(crate) fn suspect_black_hole<R>(
        &mut self,
        tcb: &mut Tcb,
        sender: &mut Sender<R>,
        cx: &mut TcpContext<'_>,
    ) {
        if sender.timeouts_in_row() < SUSPICIOUS {
            return;
        }
        sender.split_multi_segments(tcb);
        let (first, at) = sender
            .send_queue
            .sent
            .front()
            .map_or((0, 0), |segment| (segment.len, segment.at));
        let least = self.template.is_v6() || sender.timeouts_in_row() >= 2 * SUSPICIOUS;
        let mtu = match (self.template.is_v6(), least) {
            (true, _) => MIN_V6,
            (false, false) => BASE,
            (false, true) => BASE_V4,
        };
        let base = self.emss_for(tcb, mtu);
        // Not if the peer shrank its window: then the peer itself refuses the retransmissions. And
        // not if a segment longer than `base`, sent no earlier, was SACKed.
        let shut = tcb.snd_wnd < tcb.flight() && tcb.last_rx >= at;
        let passes = |segment: &InFlightSegment| {
            segment.flags & SACKED != 0 && segment.len > u32::from(base) && segment.at >= at
        };
        if first > u32::from(base)
            && base < tcb.emss
            && !shut
            && !sender.send_queue.sent.iter().any(passes)
        {
            // In an outage no packet arrives. A probe without payload goes with the retransmission:
            // if only the probe is answered, the path carries short packets only.
            if !sender
                .recovery
                .as_ref()
                .is_some_and(|recovery| recovery.is_answered)
            {
                cx.schedule_output(tcb, ConnectionFlags::NEED_PROBE);
                return;
            }
            cx.shared.stats.black_holes += 1;
            let now_ticks = to_long_ticks(cx.now.0);
            let to = self.remote();
            let cut = (cx.id, tcb.snd_nxt);
            cx.shared.paths.learn(
                to,
                PathSearch::from_black_hole(mtu, least, cut, now_ticks),
                now_ticks,
            );
            self.narrow(tcb, sender, cx, base);
        }
    }
}
