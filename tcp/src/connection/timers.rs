//! What happens when a connection's deadlines pass. The wheel brings the connection here; it
//! looks at its own deadlines and goes back to the wheel for the earliest.

use crate::base::buffer::RecvBuf;
use crate::base::events::Events;
use crate::base::state::TcpState;
use crate::base::time::Instant;
use crate::base::time::{nanos, ticks};
use crate::connection::context::Shared;
use crate::connection::{Conn, flag};
use crate::wire::segment;
use crate::wire::template::Fields;

/// After so long a silence, in ns, an idle connection gives back the memory of its queues: longer
/// than it takes to serve ten thousand others in turn.
const REST: u64 = 1_000_000_000;

impl Shared {
    /// Returns `true` when the connection ended and nobody owns it.
    pub(crate) fn on_timer<B: RecvBuf, R>(
        &mut self,
        index: u32,
        c: &mut Conn<B, R>,
        now: Instant,
    ) -> bool {
        c.hot.wheel_at = u64::MAX;
        if c.hot.ack_at != 0 && now.0 >= c.hot.ack_at {
            c.hot.ack_at = 0;
            self.stats.delayed_acks += 1;
            self.owe(index, &mut c.hot, flag::NEED_ACK);
        }
        if c.hot.rto_at != 0 && now.0 >= c.hot.rto_at {
            c.hot.rto_at = 0;
            self.on_rto(index, c, now);
        }
        let mut next = self.keepalive(index, c, now);
        if c.hot.has(flag::PACED) {
            match c.recovery.as_ref().map(|r| r.pace_at) {
                Some(at) if at > now.0 => next = next.min(at),
                _ => self.owe(index, &mut c.hot, 0),
            }
        }
        for at in [c.hot.ack_at, c.hot.rto_at] {
            if at != 0 {
                next = next.min(at);
            }
        }
        if c.hot.rto_at == 0 && c.holds_memory() {
            // Who speaks again in a moment would only have to ask for it again.
            let rested = c.hot.last_rx.saturating_add(REST);
            if now.0 >= rested || c.hot.state == TcpState::Closed {
                c.shrink();
            } else {
                next = next.min(rested);
            }
        }
        if next != u64::MAX {
            self.arm(index, &mut c.hot, next);
        }
        c.hot.state == TcpState::Closed && c.hot.has(flag::RELEASED)
    }

    fn on_rto<B: RecvBuf, R>(&mut self, index: u32, c: &mut Conn<B, R>, now: Instant) {
        match c.hot.state {
            TcpState::Closed => {}
            TcpState::TimeWait => self.closed(index, c),
            TcpState::FinWait2 => {
                // Only an orphan is timed here: its peer never closed.
                self.closed(index, c);
            }
            TcpState::SynSent | TcpState::SynReceived => {
                if c.hot.backoff >= self.config.syn_retries {
                    self.stats.attempt_fails += 1;
                    self.fail(index, c, Events::TIMED_OUT);
                    return;
                }
                c.hot.backoff += 1;
                self.owe(index, &mut c.hot, flag::NEED_SYN);
                self.restart_rto(index, &mut c.hot, now);
            }
            _ if c.hot.has(flag::PERSIST) => {
                if self.given_up(c, now) {
                    self.give_up(index, c, now);
                    return;
                }
                c.hot.backoff = c.hot.backoff.saturating_add(1);
                let what = if c.hot.snd_wnd > 0 {
                    flag::CUT
                } else {
                    flag::NEED_PROBE
                };
                self.owe(index, &mut c.hot, what);
                self.restart_rto(index, &mut c.hot, now);
                c.hot.flags |= flag::PERSIST;
            }
            _ if c.hot.has(flag::REO) => self.reordering_timeout(index, c, now),
            _ if c.hot.has(flag::PTO) => {
                if self.probe_unanswered(index, c, now) {
                    return;
                }
                self.owe(index, &mut c.hot, flag::NEED_TLP);
                // The timeout proper, should the probe not leave.
                c.hot.flags &= !flag::PTO;
                c.hot.rto_at = now.0 + c.hot.rtt.rto(&self.rto, 0);
            }
            _ => self.retransmission_timeout(index, c, now),
        }
    }

    /// RFC 6298 (5.4) to (5.6), RFC 5681 section 3.1.
    fn retransmission_timeout<B: RecvBuf, R>(
        &mut self,
        index: u32,
        c: &mut Conn<B, R>,
        now: Instant,
    ) {
        if c.tx.sent.is_empty() {
            // What was to leave found no neighbour; try again.
            self.owe(index, &mut c.hot, 0);
            return;
        }
        if self.given_up(c, now) {
            self.give_up(index, c, now);
            return;
        }
        self.stats.timeouts += 1;
        c.timeouts += 1;
        if c.hot.has(flag::NARROW) {
            self.probe_timed_out(index, c, now);
        }
        self.suspect_black_hole(index, c, now);
        c.start_recovery();
        let h = &mut c.hot;
        let mss = u32::from(h.emss);
        if let Some(r) = &mut c.recovery {
            r.timeout(h, &mut c.cc, &mut c.tx, c.cwv.in_use(h).bytes, now.0);
        }
        c.cwv.begin(h, now.0);
        // One segment, beside those that may still arrive.
        h.cwnd = h.pipe + mss;
        h.backoff = h.backoff.saturating_add(1);
        h.dup_acks = 0;
        self.owe(index, h, 0);
        self.restart_rto(index, h, now);
    }

    /// The user timeout passed without progress (RFC 9293 section 3.8.3).
    fn given_up<B: RecvBuf, R>(&self, c: &mut Conn<B, R>, now: Instant) -> bool {
        if c.stalled_since == 0 {
            c.stalled_since = ticks(c.tx.sent.front().map_or(now.0, |s| s.at)).max(1);
        }
        // A peer that shrank its window below what is in flight and still answers is not dead
        // (RFC 9293 section 3.8.6, SHLD-17).
        let heard = if c.hot.snd_wnd < c.hot.flight() {
            c.hot.last_rx
        } else {
            0
        };
        let stalled = u64::from(ticks(now.0).wrapping_sub(c.stalled_since)) << 20;
        stalled.min(now.0.saturating_sub(heard)) >= nanos(self.config.user_timeout)
    }

    fn give_up<B: RecvBuf, R>(&mut self, index: u32, c: &mut Conn<B, R>, now: Instant) {
        self.stats.abort_on_timeout += 1;
        self.send_reset(c, now);
        self.fail(index, c, Events::TIMED_OUT);
    }

    /// The connection ends badly.
    pub(crate) fn fail<B: RecvBuf, R>(&mut self, index: u32, c: &mut Conn<B, R>, why: Events) {
        self.closed(index, c);
        self.event(index, &mut c.hot, why | Events::CLOSED);
    }

    /// A reset from a synchronised connection, with timestamps where they are agreed (RFC 7323
    /// section 3.2); lost when the neighbour is not known now.
    pub(crate) fn send_reset<B: RecvBuf, R>(&mut self, c: &mut Conn<B, R>, now: Instant) {
        if c.neighbour_generation == 0
            || matches!(
                c.hot.state,
                TcpState::SynSent | TcpState::Closed | TcpState::TimeWait
            )
        {
            return;
        }
        let f = Fields {
            seq: c.hot.snd_nxt.min(c.hot.snd_una + c.hot.snd_wnd.max(1)),
            ack: c.hot.rcv_nxt,
            flags: segment::RST | segment::ACK,
            window: 0,
            ts: c
                .hot
                .has(flag::TIMESTAMPS)
                .then(|| (Self::ts_now(now, c.ts_offset), c.hot.ts_recent)),
            options: &[],
            payload: 0,
            ect: false,
            tso: false,
        };
        self.stats.out_rsts += 1;
        self.control.tcp(&c.template, &f, &mut self.stats);
    }

    /// Returns the keepalive deadline, u64::MAX without one.
    fn keepalive<B: RecvBuf, R>(&mut self, index: u32, c: &mut Conn<B, R>, now: Instant) -> u64 {
        let Some(k) = self.config.keepalive else {
            return u64::MAX;
        };
        let open = matches!(
            c.hot.state,
            TcpState::Established | TcpState::CloseWait | TcpState::FinWait2
        );
        if !open {
            return u64::MAX;
        }
        let (idle, interval) = (nanos(k.idle), nanos(k.interval));
        let due = |c: &Conn<B, R>| {
            c.hot.last_rx.saturating_add(idle) + u64::from(c.hot.probes) * interval
        };
        // Data in flight has its own timer.
        if now.0 >= due(c) && c.hot.snd_una == c.hot.snd_nxt {
            if c.hot.probes >= k.probes {
                self.give_up(index, c, now);
                return u64::MAX;
            }
            c.hot.probes += 1;
            self.owe(index, &mut c.hot, flag::NEED_KEEPALIVE);
        }
        due(c).max(now.0 + 1)
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
