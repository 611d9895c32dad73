//! What happens when a connection's deadlines pass. The wheel brings the connection here; it
//! looks at its own deadlines and goes back to the wheel for the earliest.

use crate::base::buffer::RecvBuf;
use crate::base::events::Events;
use crate::base::state::TcpState;
use crate::base::time::timestamp_at;
use crate::base::time::{nanos, ticks};
use crate::connection::context::ConnectionContext;
use crate::connection::{Connection, Hot, flag};
use crate::wire::segment;
use crate::wire::template::SegmentFields;

/// After so long a silence, in ns, an idle connection gives back the memory of its queues: longer
/// than it takes to serve ten thousand others in turn.
const REST: u64 = 1_000_000_000;

impl Hot {
    /// (Re)starts the retransmission timer (RFC 6298 section 5).
    #[inline]
    pub(crate) fn restart_rto(&mut self, cx: &mut ConnectionContext<'_>) {
        self.flags &= !(flag::PERSIST | flag::PTO | flag::REO);
        let mut after = self.rtt.rto(&cx.shared.rto, self.backoff);
        // RFC 8985 section 7.2: with SACK, a round trip measured, no recovery and no probe out,
        // the tail is probed first, in the timeout's place when that comes sooner.
        if self.flags & (flag::SACK | flag::RECOVERING) == flag::SACK
            && self.rtt.srtt > 0
            && self.backoff == 0
            && self.snd_una != self.snd_nxt
        {
            let probe = self
                .rtt
                .pto(&cx.shared.rto, self.flight() <= u32::from(self.emss));
            after = after.min(probe);
            self.flags |= flag::PTO;
        }
        self.rto_at = cx.now.0 + after;
        cx.arm(self, self.rto_at);
    }
}

impl<B: RecvBuf, R> Connection<B, R> {
    /// Returns `true` when the connection ended and nobody owns it.
    pub(crate) fn on_timer(&mut self, cx: &mut ConnectionContext<'_>) -> bool {
        self.hot.wheel_at = u64::MAX;
        if self.hot.ack_at != 0 && cx.now.0 >= self.hot.ack_at {
            self.hot.ack_at = 0;
            cx.shared.stats.delayed_acks += 1;
            cx.owe(&mut self.hot, flag::NEED_ACK);
        }
        if self.hot.rto_at != 0 && cx.now.0 >= self.hot.rto_at {
            self.hot.rto_at = 0;
            self.on_rto(cx);
        }
        let mut next = self.keepalive(cx);
        if self.hot.has(flag::PACED) {
            match self.recovery.as_ref().map(|r| r.pace_at) {
                Some(at) if at > cx.now.0 => next = next.min(at),
                _ => cx.owe(&mut self.hot, 0),
            }
        }
        for at in [self.hot.ack_at, self.hot.rto_at] {
            if at != 0 {
                next = next.min(at);
            }
        }
        if self.hot.rto_at == 0 && self.holds_memory() {
            // Who speaks again in a moment would only have to ask for it again.
            let rested = self.hot.last_rx.saturating_add(REST);
            if cx.now.0 >= rested || self.hot.state == TcpState::Closed {
                self.shrink();
            } else {
                next = next.min(rested);
            }
        }
        if next != u64::MAX {
            cx.arm(&mut self.hot, next);
        }
        self.hot.state == TcpState::Closed && self.hot.has(flag::RELEASED)
    }

    fn on_rto(&mut self, cx: &mut ConnectionContext<'_>) {
        match self.hot.state {
            TcpState::Closed => {}
            TcpState::TimeWait => self.closed(cx),
            TcpState::FinWait2 => {
                // Only an orphan is timed here: its peer never closed.
                self.closed(cx);
            }
            TcpState::SynSent | TcpState::SynReceived => {
                if self.hot.backoff >= cx.shared.config.syn_retries {
                    cx.shared.stats.attempt_fails += 1;
                    self.fail(cx, Events::TIMED_OUT);
                    return;
                }
                self.hot.backoff += 1;
                cx.owe(&mut self.hot, flag::NEED_SYN);
                self.hot.restart_rto(cx);
            }
            _ if self.hot.has(flag::PERSIST) => {
                if self.given_up(cx) {
                    self.give_up(cx);
                    return;
                }
                self.hot.backoff = self.hot.backoff.saturating_add(1);
                let what = if self.hot.snd_wnd > 0 {
                    flag::CUT
                } else {
                    flag::NEED_PROBE
                };
                cx.owe(&mut self.hot, what);
                self.hot.restart_rto(cx);
                self.hot.flags |= flag::PERSIST;
            }
            _ if self.hot.has(flag::REO) => self.reordering_timeout(cx),
            _ if self.hot.has(flag::PTO) => {
                if self.probe_unanswered(cx) {
                    return;
                }
                cx.owe(&mut self.hot, flag::NEED_TLP);
                // The timeout proper, should the probe not leave.
                self.hot.flags &= !flag::PTO;
                self.hot.rto_at = cx.now.0 + self.hot.rtt.rto(&cx.shared.rto, 0);
            }
            _ => self.retransmission_timeout(cx),
        }
    }

    /// RFC 6298 (5.4) to (5.6), RFC 5681 section 3.1.
    fn retransmission_timeout(&mut self, cx: &mut ConnectionContext<'_>) {
        if self.tx.sent.is_empty() {
            // What was to leave found no neighbour; try again.
            cx.owe(&mut self.hot, 0);
            return;
        }
        if self.given_up(cx) {
            self.give_up(cx);
            return;
        }
        cx.shared.stats.timeouts += 1;
        self.timeouts += 1;
        if self.hot.has(flag::NARROW) {
            self.probe_timed_out(cx);
        }
        self.suspect_black_hole(cx);
        self.start_recovery();
        let h = &mut self.hot;
        let mss = u32::from(h.emss);
        if let Some(r) = &mut self.recovery {
            r.timeout(
                h,
                &mut self.cc,
                &mut self.tx,
                self.cwv.in_use(h).bytes,
                cx.now.0,
            );
        }
        self.cwv.begin(h, cx.now.0);
        // One segment, beside those that may still arrive.
        h.cwnd = h.pipe + mss;
        h.backoff = h.backoff.saturating_add(1);
        h.dup_acks = 0;
        cx.owe(h, 0);
        h.restart_rto(cx);
    }

    /// The user timeout passed without progress (RFC 9293 section 3.8.3).
    fn given_up(&mut self, cx: &mut ConnectionContext<'_>) -> bool {
        if self.stalled_since == 0 {
            self.stalled_since = ticks(self.tx.sent.front().map_or(cx.now.0, |s| s.at)).max(1);
        }
        // A peer that shrank its window below what is in flight and still answers is not dead
        // (RFC 9293 section 3.8.6, SHLD-17).
        let heard = if self.hot.snd_wnd < self.hot.flight() {
            self.hot.last_rx
        } else {
            0
        };
        let stalled = u64::from(ticks(cx.now.0).wrapping_sub(self.stalled_since)) << 20;
        stalled.min(cx.now.0.saturating_sub(heard)) >= nanos(cx.shared.config.user_timeout)
    }

    fn give_up(&mut self, cx: &mut ConnectionContext<'_>) {
        cx.shared.stats.abort_on_timeout += 1;
        self.send_reset(cx);
        self.fail(cx, Events::TIMED_OUT);
    }

    /// The connection ends badly.
    pub(crate) fn fail(&mut self, cx: &mut ConnectionContext<'_>, why: Events) {
        self.closed(cx);
        cx.event(&mut self.hot, why | Events::CLOSED);
    }

    /// A reset from a synchronised connection, with timestamps where they are agreed (RFC 7323
    /// section 3.2); lost when the neighbour is not known now.
    pub(crate) fn send_reset(&mut self, cx: &mut ConnectionContext<'_>) {
        if self.neighbour_generation == 0
            || matches!(
                self.hot.state,
                TcpState::SynSent | TcpState::Closed | TcpState::TimeWait
            )
        {
            return;
        }
        let f = SegmentFields {
            seq: self
                .hot
                .snd_nxt
                .min(self.hot.snd_una + self.hot.snd_wnd.max(1)),
            ack: self.hot.rcv_nxt,
            flags: segment::RST | segment::ACK,
            window: 0,
            ts: self
                .hot
                .has(flag::TIMESTAMPS)
                .then(|| (timestamp_at(cx.now, self.ts_offset), self.hot.ts_recent)),
            options: &[],
            payload: 0,
            ect: false,
            tso: false,
        };
        cx.shared.stats.out_rsts += 1;
        cx.shared
            .control
            .tcp(&self.template, &f, &mut cx.shared.stats);
    }

    /// Returns the keepalive deadline, u64::MAX without one.
    fn keepalive(&mut self, cx: &mut ConnectionContext<'_>) -> u64 {
        let Some(k) = cx.shared.config.keepalive else {
            return u64::MAX;
        };
        let open = matches!(
            self.hot.state,
            TcpState::Established | TcpState::CloseWait | TcpState::FinWait2
        );
        if !open {
            return u64::MAX;
        }
        let (idle, interval) = (nanos(k.idle), nanos(k.interval));
        let due = |h: &Hot| h.last_rx.saturating_add(idle) + u64::from(h.probes) * interval;
        // Data in flight has its own timer.
        if cx.now.0 >= due(&self.hot) && self.hot.snd_una == self.hot.snd_nxt {
            if self.hot.probes >= k.probes {
                self.give_up(cx);
                return u64::MAX;
            }
            self.hot.probes += 1;
            cx.owe(&mut self.hot, flag::NEED_KEEPALIVE);
        }
        due(&self.hot).max(cx.now.0 + 1)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::sim::{Impairment, SimNet, host_config, read_all};

    #[test]
    fn queues_keep_their_memory_through_pauses_and_give_it_back_after_a_rest() {
        let link = Impairment::perfect(Duration::from_micros(50));
        let hosts = [host_config(0), host_config(1)];
        let mut net = SimNet::<Vec<u8>>::new(3, hosts, [link; 2]);
        let now = net.now;
        net.hosts[1].listen(None, 80, 4, 0).unwrap();
        let to = "10.0.0.2:80".parse().unwrap();
        let a = net.hosts[0].connect(now, None, None, to, 0).unwrap();
        net.run(Duration::from_millis(5), |_| false);
        let b = net.hosts[1].next_event().unwrap().0;
        let holds = |net: &SimNet<Vec<u8>>| net.hosts[0].conns[a.index as usize].holds_memory();
        for turn in 0..10 {
            let record = b"a turn".to_vec();
            net.hosts[0].push_record(a, 6, record, true).unwrap();
            net.flush(0, a);
            net.run(Duration::from_millis(1), |_| false);
            assert_eq!(read_all(&mut net.hosts[1], b), b"a turn");
            net.hosts[0].take_acked(a, drop);
            // Longer than any timer of what was sent; others have their turns meanwhile.
            net.run(Duration::from_millis(60), |_| false);
            assert!(holds(&net), "turn {turn}");
        }
        net.run(Duration::from_millis(2000), |_| false);
        assert!(!holds(&net));
    }
}
