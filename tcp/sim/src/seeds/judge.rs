//! Checks after each step of a run, after each event of an owner, and at the end.

use std::time::Duration;

use siw_net::Instant;
use siw_tcp::{Events, StackConfig, TcpInfo, TcpState};

use crate::seeds::owner::ScriptedOwner;
use crate::seeds::plan::NetEvent;
use crate::seeds::run::{LATE_ACK, SeedRun};

/// Tolerance of a deadline: neighbours must be resolved, and timers are coarse.
const MARGIN: Duration = Duration::from_secs(6);

/// State of the checks between steps.
#[derive(Default)]
pub(super) struct RunJudge {
    /// Undone reductions of each host.
    undone: [u64; 2],
    /// For each connection and host: since when data has been waiting for an acknowledgement.
    pending_since: Vec<[Option<Instant>; 2]>,
}

impl RunJudge {
    /// Resets the counters of a restarted host.
    pub(super) fn on_restart(&mut self, host: usize) {
        self.undone[host] = 0;
    }
}

/// Returns how long a connection may take to give up its SYN.
fn handshake_limit(config: &StackConfig) -> Duration {
    let tries = (0..=u32::from(config.tcp.syn_retries)).map(|tried| {
        config
            .tcp
            .rto_initial
            .saturating_mul(1 << tried)
            .min(config.tcp.rto_max)
    });
    tries.sum::<Duration>() + MARGIN
}

impl SeedRun {
    /// Checks after each step that every frame was valid and nothing is overdue.
    pub(super) fn judge_step(&mut self) -> Result<(), String> {
        if let Some(oracle) = &mut self.net.oracle
            && let Some(why) = oracle.take_violation()
        {
            return Err(why);
        }
        for host in 0..2 {
            self.judge_undone(host)?;
        }
        if let Some(oracle) = &mut self.net.oracle {
            oracle.touched.clear();
        }
        let flows = self.flows.len();
        self.judge_mut().pending_since.resize(flows, [None; 2]);
        for index in 0..flows {
            for host in 0..2 {
                if let Some(owner) = &self.flows[index].owners[host]
                    && !self.is_dead[host]
                {
                    let pending = self.judge_owner(index, host, owner);
                    let pending = pending.map_err(|why| {
                        let ends = self.flows[index].ends;
                        let seconds = (self.net.now - self.start).as_secs_f64();
                        format!("host {host} at {seconds:.6} s, {ends:?}: {why}")
                    })?;
                    self.judge_mut().pending_since[index][host] = pending;
                }
            }
        }
        Ok(())
    }

    /// Checks one end of a connection. Returns since when data has been waiting for an acknowledgement.
    fn judge_owner(
        &self,
        index: usize,
        host: usize,
        owner: &ScriptedOwner,
    ) -> Result<Option<Instant>, String> {
        let (now, stack) = (self.net.now, &self.net.hosts[host]);
        let config = &self.plan.configs[host];
        let Some(oracle) = &self.net.oracle else {
            return Ok(None);
        };
        let flow = oracle.find_flow(&self.flows[index].ends);
        if oracle.is_reopened(&self.flows[index].ends) {
            return Ok(None);
        }
        let (heard_at, acked_at) = flow.map_or((owner.opened_at, owner.opened_at), |flow| {
            oracle.last_heard(flow, host)
        });
        let ending = config.tcp.user_timeout + config.tcp.rto_max + MARGIN;
        if let Some(released_at) = owner.released_at {
            let state = stack.state_of_slot(owner.id);
            let quiet = now - released_at.max(heard_at);
            let stuck = now - released_at.max(acked_at);
            let limit = ending + config.tcp.time_wait;
            return match state {
                None => Ok(None),
                Some(state) if quiet > limit => Err(format!(
                    "an orphan in {state:?} outlives a silence of {quiet:?}"
                )),
                Some(state) if stuck > limit + limit && state != TcpState::TimeWait => Err(
                    format!("an orphan in {state:?} lives on, {stuck:?} without progress"),
                ),
                Some(_) => Ok(None),
            };
        }
        let Some(info) = stack.tcp_info(owner.id) else {
            return Ok(None);
        };
        if info.state == TcpState::SynSent {
            let waited = now - owner.opened_at;
            if waited > handshake_limit(config) {
                return Err(format!("still in SYN-SENT after {waited:?}"));
            }
            return Ok(None);
        }
        // Among connections with the same endpoints, frames are attributed to the newest only.
        let is_judged = is_open(info.state) && !self.flows[index].is_reused;
        let (Some(flow), true) = (flow, is_judged) else {
            return Ok(None);
        };
        self.judge_round_trip(&info)?;
        let is_resolved = !stack.waits_for_neighbour(owner.id);
        if let Some(sent_at) = oracle.oldest_in_flight(flow, host)
            && is_resolved
        {
            let silence = now - sent_at.max(heard_at);
            if silence > 3 * info.rto + Duration::from_millis(50) {
                return Err(format!(
                    "data in flight is not sent again for {silence:?}: {info:?}"
                ));
            }
        }
        let is_pending = info.in_flight > 0 || info.unsent > 0;
        let since = self.pending_since(index, host).filter(|_| is_pending);
        let since = since.or(is_pending.then_some(now));
        if let Some(since) = since {
            let quiet = now - since.max(heard_at);
            if quiet > ending {
                return Err(format!(
                    "lives on, {quiet:?} after its peer was heard: {info:?}"
                ));
            }
        } else if let Some(keepalive) = &config.tcp.keepalive
            && info.state == TcpState::Established
        {
            let limit = keepalive.idle + keepalive.interval * u32::from(keepalive.probes);
            let quiet = now - heard_at;
            if quiet > limit + MARGIN {
                return Err(format!(
                    "keepalive does not end it after {quiet:?}: {info:?}"
                ));
            }
        }
        Ok(since)
    }

    fn pending_since(&self, index: usize, host: usize) -> Option<Instant> {
        self.judge()
            .pending_since
            .get(index)
            .and_then(|hosts| hosts[host])
    }

    /// Checks that a round trip is at least as long as the path: a shorter sample was taken from another
    /// transmission (Karn's algorithm, RFC 6298 section 3).
    fn judge_round_trip(&self, info: &TcpInfo) -> Result<(), String> {
        let Some(measured) = info.srtt else {
            return Ok(());
        };
        if measured + measured / 16 + Duration::from_micros(2) < self.least_delay {
            let least = self.least_delay;
            return Err(format!(
                "a round trip of {measured:?} on a path of {least:?}"
            ));
        }
        Ok(())
    }

    /// Checks an undone reduction: the retransmissions of a connection that just received a frame must
    /// have been needless; after a timeout, at least the first of them (RFC 3522).
    fn judge_undone(&mut self, host: usize) -> Result<(), String> {
        let stats = self.net.hosts[host].stats();
        let (undone, timeouts) = (stats.tcp.spurious, stats.tcp.timeouts);
        let before = std::mem::replace(&mut self.judge_mut().undone[host], undone);
        if undone <= before {
            return Ok(());
        }
        let Some(oracle) = &self.net.oracle else {
            return Ok(());
        };
        if oracle.has_reopened() {
            return Ok(());
        }
        let heard = oracle.touched.iter().filter(|(_, to)| *to == host);
        let episodes: Vec<_> = heard
            .flat_map(|(flow, _)| oracle.last_episodes(*flow, host, self.net.now))
            .collect();
        let is_justified = episodes.iter().any(|episode| {
            !episode.needed || (timeouts > episode.timeouts_before && !episode.first_needed)
        });
        if is_justified {
            return Ok(());
        }
        let seconds = (self.net.now - self.start).as_secs_f64();
        Err(format!(
            "host {host} at {seconds:.6} s undoes a reduction whose retransmissions were needed: {episodes:?}"
        ))
    }

    /// Checks the events of an owner.
    pub(super) fn judge_events(
        &self,
        index: usize,
        host: usize,
        events: Events,
    ) -> Result<(), String> {
        let flow = &self.flows[index];
        let Some(owner) = &flow.owners[host] else {
            return Ok(());
        };
        let oracle = self.net.oracle.as_ref();
        let is_reopened = oracle.is_some_and(|oracle| oracle.is_reopened(&flow.ends));
        if is_reopened {
            return Ok(());
        }
        let peer = flow.owners[1 - host].as_ref();
        if events.contains(Events::PEER_FIN)
            && let Some(peer) = peer
            && let Some(info) = self.net.hosts[host].tcp_info(owner.id)
            && owner.opened_at <= peer.opened_at + MARGIN
        {
            let all = owner.received + info.readable as u64;
            if all != peer.pushed {
                let pushed = peer.pushed;
                return Err(format!(
                    "host {host} has {all} bytes and a FIN, pushed were {pushed}"
                ));
            }
        }
        let waited = self.net.now - owner.opened_at;
        if events.contains(Events::UNREACHABLE)
            && self.net.hosts[host].stats().net.neighbour_failures == 0
            && waited + MARGIN < handshake_limit(&self.plan.configs[host])
        {
            return Err(format!(
                "host {host} gives up a SYN after {waited:?} for an ICMP error"
            ));
        }
        let bad = Events::TIMED_OUT | Events::UNREACHABLE | Events::REFUSED | Events::RESET;
        if !self.plan.is_clean || !events.intersects(bad) {
            return Ok(());
        }
        // An earlier connection between the same endpoints may answer with a reset.
        if flow.is_reused && events.contains(Events::RESET) {
            return Ok(());
        }
        // TIME-WAIT of an earlier connection may outlast all SYN retransmissions. A SYN without timestamps
        // cannot replace it if its sequence number is not beyond the old one (RFC 9293 section 3.6.1), which
        // happens if the old connection sent faster than the clock of initial sequence numbers ticks; and
        // resets do not end TIME-WAIT (RFC 1337).
        let is_connected = (owner.events).intersects(Events::CONNECTED | Events::ACCEPTED);
        let (time_wait, rto_max) = (
            self.plan.configs[1 - host].tcp.time_wait,
            self.plan.configs[host].tcp.rto_max,
        );
        if flow.is_reused && !is_connected && waited <= time_wait + rto_max {
            return Ok(());
        }
        // An owner that has released its connection cannot take data, and waits neither for a reader nor,
        // once everything has arrived, for the FIN.
        let may_reset = !self.plan.is_varied
            || peer.is_none_or(|peer| owner.pushed != peer.received)
            || owner.events.contains(Events::PEER_FIN)
            || self.net.now < owner.reads_from + MARGIN;
        // An orphan is reset once its deadline has passed, even while its peer goes on reading: a slow
        // reader, or a sender without SACK that repairs one hole per round trip (RFC 6582 section 3.2)
        // after the peer's buffers refused most of a window. RFC 9293 section 3.6 does not bound how
        // long CLOSE goes on; the deadline is our setting, and absolute. A reset before it is an error.
        let peer_config = &self.plan.configs[1 - host];
        let is_overdue = |peer: &ScriptedOwner| {
            (peer.released_at).is_some_and(|at| self.net.now >= at + peer_config.tcp.orphan_timeout)
        };
        let expects_reset = peer.is_some_and(|peer| {
            peer.is_aborted || (peer.released_at.is_some() && may_reset) || is_overdue(peer)
        });
        // The peer gives up if an owner does not read for too long.
        let config = &self.plan.configs[host];
        let is_stopped = peer.is_some_and(|peer| {
            !peer.is_reading(self.net.now) || self.resumed_too_late(config, peer)
        });
        let gives_up = Events::RESET | Events::TIMED_OUT;
        if events.intersects(gives_up) && is_stopped {
            return Ok(());
        }
        if events.contains(Events::RESET) && expects_reset {
            return Ok(());
        }
        Err(format!(
            "host {host}: {events:?} on a path that loses nothing"
        ))
    }

    /// Returns whether this owner resumed reading so late that a peer with this configuration gave up
    /// before it sent the refused data again. The user timeout counts acknowledged data (RFC 9293
    /// section 3.8.3), and no window update restarts the retransmission timer (RFC 6298 section 5),
    /// whose backoff is at most half of the time that it has waited.
    fn resumed_too_late(&self, config: &StackConfig, owner: &ScriptedOwner) -> bool {
        let backoff = config.tcp.rto_max.min(config.tcp.user_timeout / 2);
        owner.reads_from > owner.opened_at && self.net.now < owner.reads_from + backoff
    }

    /// Checks at the end that every timeout has a cause and an undisturbed path saw no retransmission.
    pub(super) fn judge_totals(&self) -> Result<(), String> {
        let jitters = |from: usize| {
            let link = &self.plan.links[from];
            !link.jitter.is_zero() || link.reorder > 0.0 || link.shrink > 0.0 || link.rate > 0
        };
        // A forged SYN is answered until its timeouts end, as is data on which a receiver reneged.
        use NetEvent::{Delay, FillBacklog, Renege};
        let delays = |(_, event): &(Duration, NetEvent)| {
            matches!(event, Delay { .. } | FillBacklog { .. } | Renege { .. })
        };
        if jitters(0) || jitters(1) || self.plan.events.iter().any(delays) {
            return Ok(());
        }
        // A peer may delay its ACK for longer than the timeout.
        let is_late = |config: &StackConfig| config.tcp.delayed_ack >= LATE_ACK;
        if self.plan.configs.iter().any(is_late) {
            return Ok(());
        }
        let net = &self.net;
        let refused: u64 = net
            .hosts
            .iter()
            .map(|host| host.stats().tcp.rcv_q_drop)
            .sum();
        let causes = net.lost + net.damaged + net.too_big + net.unheard + refused;
        let timeouts = self.outcome.timeouts;
        // A segment may wait for its neighbour and be given up meanwhile.
        if timeouts > causes * 3 / 2 + 4 * self.flows.len() as u64 {
            return Err(format!(
                "{timeouts} timeouts, and {causes} frames that did not arrive"
            ));
        }
        if self.plan.is_clean && refused == 0 && self.plan.events.is_empty() {
            for (host, stack) in net.hosts.iter().enumerate() {
                let stats = stack.stats();
                let repeated =
                    stats.tcp.retrans_segs - stats.tcp.tlp_probes.min(stats.tcp.retrans_segs);
                // No timer accounts for the peer's neighbour resolution before it answers.
                let held_up = net.oracle.as_ref().map_or(0, |oracle| oracle.held_up[host]);
                if repeated.max(stats.tcp.timeouts).max(stats.tcp.spurious) > held_up {
                    let timeouts = stats.tcp.timeouts;
                    return Err(format!(
                        "host {host} sent {repeated} segments again after {timeouts} timeouts, \
                         though nothing was lost"
                    ));
                }
            }
        }
        Ok(())
    }
}

/// Returns whether data is sent and acknowledged in this state.
fn is_open(state: TcpState) -> bool {
    matches!(
        state,
        TcpState::Established
            | TcpState::CloseWait
            | TcpState::FinWait1
            | TcpState::Closing
            | TcpState::LastAck
    )
}
