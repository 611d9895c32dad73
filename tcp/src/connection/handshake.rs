//! Opening handshakes: what the peer's SYN says, and the way to ESTABLISHED.

use crate::base::buffer::RecvBuf;
use crate::base::events::Events;
use crate::base::state::TcpState;
use crate::config::StackConfig;
use crate::connection::Connection;
use crate::connection::context::ConnectionContext;
use crate::connection::input::Verdict;
use crate::tcb::WindowScales;
use crate::tcb::flags::ConnectionFlags;
use crate::wire::segment::{ACK, CWR, ECE, RST, SYN, Segment};

/// RFC 9293 section 3.7.1 (MUST-15): when the peer does not say.
const MSS_DEFAULT_V4: u16 = 536;
const MSS_DEFAULT_V6: u16 = 1220;
/// Smaller offers are attacks on our packet rate.
const MSS_FLOOR: u16 = 64;

/// How a SYN asks for ECN and a SYN-ACK agrees (RFC 3168 section 6.1.1).
const ASK: u8 = ECE | CWR;
const ANSWER: u8 = ACK | ECE;

impl<B: RecvBuf, R> Connection<B, R> {
    /// Takes over what the peer's SYN says.
    pub(crate) fn negotiate(&mut self, seg: &Segment, config: &StackConfig, wscale: u8) {
        let h = &mut self.tcb;
        h.rcv_nxt = seg.seq + 1;
        h.last_ack_sent = h.rcv_nxt;
        h.rcv_adv = h.rcv_nxt + config.recv_window.min(0xffff);
        let v6 = self.template.is_v6();
        let (overhead, default) = if v6 {
            (60, MSS_DEFAULT_V6)
        } else {
            (40, MSS_DEFAULT_V4)
        };
        let mut emss = seg
            .mss
            .unwrap_or(default)
            .max(MSS_FLOOR)
            .min(config.mtu - overhead);
        // A repeated SYN is sent without ECN, for what drops such SYNs (RFC 3168 section 6.1.1.1).
        let asks = match seg.flags & (ACK | ECE | CWR) {
            ASK => true,
            ANSWER => h.backoff == 0,
            _ => false,
        };
        h.flags &= !(ConnectionFlags::TIMESTAMPS | ConnectionFlags::SACK | ConnectionFlags::ECN);
        if asks && config.wants_ecn() {
            h.flags |= ConnectionFlags::ECN;
        }
        if config.timestamps && seg.has_ts {
            h.flags |= ConnectionFlags::TIMESTAMPS;
            h.ts_recent = seg.ts_val;
            emss -= 12;
        }
        if config.sack && seg.sack_permitted {
            h.flags |= ConnectionFlags::SACK;
        }
        h.scales = match seg.wscale {
            Some(s) => WindowScales::new(s, wscale),
            None => WindowScales::default(),
        };
        h.emss = emss;
        self.emss_agreed = emss;
        h.snd_wnd = u32::from(seg.window); // a SYN's window is never scaled
        h.max_snd_wnd = h.snd_wnd;
        h.snd_wl1 = seg.seq;
        h.snd_wl2 = seg.ack;
        h.window.open(config.initial_window, u32::from(emss));
    }
}

impl<B: RecvBuf, R> Connection<B, R> {
    pub(crate) fn syn_sent(&mut self, cx: &mut ConnectionContext<'_>, seg: &Segment) -> Verdict {
        let acked = seg.flags & ACK != 0;
        if acked && seg.ack != self.tcb.snd_nxt {
            return if seg.flags & RST != 0 {
                Verdict::Done
            } else {
                Verdict::Reset
            };
        }
        if seg.flags & RST != 0 {
            if acked {
                cx.shared.stats.in_rsts += 1;
                cx.shared.stats.attempt_fails += 1;
                self.fail(cx, Events::REFUSED);
            }
            return Verdict::Done;
        }
        if seg.flags & SYN == 0 {
            return Verdict::Done;
        }
        self.negotiate(seg, &cx.shared.config, cx.shared.recv_wscale);
        if acked {
            if let Some(v) = self.established(cx, seg) {
                return v;
            }
            cx.owe(&mut self.tcb, ConnectionFlags::NEED_ACK);
        } else {
            // Simultaneous open (RFC 9293 figure 8).
            self.tcb.state = TcpState::SynReceived;
            cx.owe(&mut self.tcb, ConnectionFlags::NEED_SYN);
        }
        Verdict::Done
    }

    /// Our SYN is acknowledged.
    pub(crate) fn established(
        &mut self,
        cx: &mut ConnectionContext<'_>,
        seg: &Segment,
    ) -> Option<Verdict> {
        if self.tcb.has(ConnectionFlags::PASSIVE)
            && !cx.shared.listeners.contains_key(&self.listener)
        {
            // Nobody listens any more.
            self.closed(cx);
            self.tcb.flags |= ConnectionFlags::RELEASED;
            return Some(Verdict::Reset);
        }
        self.known_path(cx);
        let h = &mut self.tcb;
        h.snd_una = seg.ack;
        let flight = h.flight_state();
        self.congestion
            .on_established(&mut h.window, &flight, cx.now.0);
        h.flags &= !ConnectionFlags::NEED_SYN;
        h.state = TcpState::Established;
        h.stop_timer();
        if h.backoff == 0 {
            h.rtt.sample(cx.now.0.saturating_sub(h.last_rx));
        }
        h.backoff = 0;
        h.last_rx = cx.now.0;
        cx.shared.stats.curr_estab += 1;
        if h.has(ConnectionFlags::IN_BACKLOG)
            && let Some(l) = cx.shared.listeners.get_mut(&self.listener)
        {
            h.flags |= ConnectionFlags::COUNTED_READY;
            l.ready += 1;
        }
        if h.has(ConnectionFlags::PASSIVE) {
            h.flags &= !ConnectionFlags::RELEASED;
            cx.shared.stats.passive_opens += 1;
            cx.event(h, Events::ACCEPTED);
        } else {
            cx.event(h, Events::CONNECTED | Events::WRITABLE);
        }
        if h.has(ConnectionFlags::FIN_QUEUED) {
            h.state = TcpState::FinWait1;
            cx.shared.stats.curr_estab -= 1;
        }
        self.update_active(cx);
        if let Some(k) = cx.shared.config.keepalive {
            let at = cx.now.0 + crate::base::time::nanos(k.idle);
            cx.arm(&mut self.tcb, at);
        }
        cx.owe(&mut self.tcb, ConnectionFlags::NONE);
        None
    }
}
