//! Opening handshakes: our SYN or SYN-ACK, the options of the peer's, and the transition to
//! ESTABLISHED.

use siw_net::{FrameSink, RecvBuf};

use crate::base::events::Events;
use crate::base::sequence::SeqNr;
use crate::base::sink_full::SinkFull;
use crate::base::state::TcpState;
use crate::base::time::{since_timestamp, timestamp_at};
use crate::connection::Connection;
use crate::connection::context::{SharedState, TcpContext};
use crate::connection::input::SegmentVerdict;
use crate::connection::side_table::SideFlags;
use crate::tcb::WindowScales;
use crate::tcb::flags::ConnectionFlags;
use crate::wire::segment::{ACK, CWR, ECE, FIN, RST, SYN, Segment};
use crate::wire::template::SegmentFields;

/// The MSS of a peer that sends no MSS option (RFC 9293 section 3.7.1, MUST-15).
const MSS_DEFAULT_V4: u16 = 536;
const MSS_DEFAULT_V6: u16 = 1220;
/// A smaller MSS is raised to this value, because it would only multiply the packets that we send.
const MSS_FLOOR: u16 = 64;

/// Distance of the initial sequence number from an earlier connection's last, if the clock of
/// RFC 6528 has not passed it.
const ISN_STEP: u32 = 1 << 16;

/// The flags by which a SYN requests ECN and a SYN-ACK agrees (RFC 3168 section 6.1.1).
const ASK: u8 = ECE | CWR;
const ANSWER: u8 = ACK | ECE;

/// Returns the options of a SYN, in an order that is common among stacks, and their length.
pub(crate) fn syn_options(
    mss: u16,
    sack: bool,
    ts: Option<(u32, u32)>,
    scale: Option<u8>,
) -> ([u8; 20], usize) {
    let mut bytes = [1u8; 20];
    bytes[..2].copy_from_slice(&[2, 4]);
    bytes[2..4].copy_from_slice(&mss.to_be_bytes());
    let mut n = 4;
    if let Some((value, echo)) = ts {
        // SACK-permitted, or two NOPs, align the timestamps.
        if sack {
            bytes[n..n + 2].copy_from_slice(&[4, 2]);
        }
        bytes[n + 2..n + 4].copy_from_slice(&[8, 10]);
        bytes[n + 4..n + 8].copy_from_slice(&value.to_be_bytes());
        bytes[n + 8..n + 12].copy_from_slice(&echo.to_be_bytes());
        n += 12;
    } else if sack {
        bytes[n + 2..n + 4].copy_from_slice(&[4, 2]);
        n += 4;
    }
    if let Some(shift) = scale {
        bytes[n..n + 4].copy_from_slice(&[1, 3, 3, shift]);
        n += 4;
    }
    (bytes, n)
}

impl<B: RecvBuf, R> Connection<B, R> {
    /// Applies the sequence number, options and window of the peer's SYN.
    pub(crate) fn apply_peer_syn(&mut self, cx: &mut TcpContext<'_>, seg: &Segment) {
        let SharedState {
            config,
            net,
            recv_window,
            recv_wscale,
            side_table,
            ..
        } = &mut *cx.shared;
        let wscale = *recv_wscale;
        let tcb = &mut self.tcb;
        let (snd, rcv) = (&mut self.sender.snd, &mut self.receiver.rcv);
        rcv.nxt = seg.seq + 1;
        rcv.last_ack_sent = rcv.nxt;
        rcv.adv = rcv.nxt + (*recv_window).min(0xffff);
        let ipv6 = self.path.template.is_v6();
        let (overhead, default) = if ipv6 {
            (60, MSS_DEFAULT_V6)
        } else {
            (40, MSS_DEFAULT_V4)
        };
        let mut emss = seg
            .mss
            .unwrap_or(default)
            .max(MSS_FLOOR)
            .min(net.config.mtu - overhead);
        // A retransmitted SYN does not request ECN, as middleboxes may drop SYNs that do (RFC 3168
        // section 6.1.1.1). If it was sent, our data is not ECN-capable, but marks of the peer's
        // data must be echoed once the first SYN is answered (section 6.1.1).
        let is_ecn_setup = matches!(seg.flags & (ACK | ECE | CWR), ASK | ANSWER);
        tcb.flags &= !(ConnectionFlags::TIMESTAMPS | ConnectionFlags::SACK | ConnectionFlags::ECN);
        if is_ecn_setup && config.wants_ecn() {
            tcb.flags |= ConnectionFlags::ECN;
            let may_send_ect = seg.flags & ACK == 0 || snd.backoff == 0;
            let fields = side_table.fields_of(cx.id.index);
            fields.flags.set(SideFlags::MAY_SEND_ECT, may_send_ect);
        }
        if config.timestamps && seg.has_ts {
            tcb.flags |= ConnectionFlags::TIMESTAMPS;
            rcv.ts_recent = seg.ts_val;
            emss -= 12;
        }
        if config.sack && seg.sack_permitted {
            tcb.flags |= ConnectionFlags::SACK;
        }
        tcb.scales = match seg.wscale {
            Some(shift) => WindowScales::new(shift, wscale),
            None => WindowScales::default(),
        };
        tcb.emss = emss;
        snd.wnd = u32::from(seg.window); // a SYN's window is never scaled
        snd.max_wnd = snd.wnd;
        snd.wl1 = seg.seq;
        snd.wl2 = seg.ack;
        snd.window
            .set_initial(config.initial_window, u32::from(emss));
        self.sender.emss_agreed = emss;
    }

    /// Processes a segment in SYN-SENT (RFC 9293 section 3.10.7.3).
    pub(crate) fn on_segment_in_syn_sent(
        &mut self,
        cx: &mut TcpContext<'_>,
        seg: &Segment,
        buffer: B,
    ) -> SegmentVerdict {
        let acked = seg.flags & ACK != 0;
        if acked && seg.ack != self.sender.snd.nxt {
            if seg.flags & RST != 0 {
                return SegmentVerdict::Done;
            }
            if seg.flags & SYN == 0 {
                self.repeat_syn_after_reset(cx);
            }
            return SegmentVerdict::Reset;
        }
        if seg.flags & RST != 0 {
            if acked {
                cx.shared.stats.in_rsts += 1;
                cx.shared.stats.attempt_fails += 1;
                self.fail_connection(cx, Events::REFUSED);
            }
            return SegmentVerdict::Done;
        }
        if seg.flags & SYN == 0 {
            return SegmentVerdict::Done;
        }
        self.apply_peer_syn(cx, seg);
        if acked {
            if let Some(verdict) = self.on_established(cx, seg) {
                return verdict;
            }
            cx.schedule_output(&mut self.tcb, ConnectionFlags::NEED_ACK);
            if buffer.remaining() > 0 || seg.flags & FIN != 0 {
                // Data or a FIN follows the SYN (section 3.10.7.3, fourth).
                let mut rest = *seg;
                rest.seq += 1;
                rest.flags &= !SYN;
                return self.process_payload(cx, &rest, buffer);
            }
        } else {
            // Simultaneous open (RFC 9293 figure 8). Data after the SYN is not acknowledged, so the
            // peer retransmits it.
            self.tcb.state = TcpState::SynReceived;
            // Our SYN-ACK repeats the SYN: an answer does not tell them apart, so no round trip is
            // measured (Karn).
            self.sender.snd.backoff = self.sender.snd.backoff.max(1);
            cx.schedule_output(&mut self.tcb, ConnectionFlags::NEED_SYN);
        }
        SegmentVerdict::Done
    }

    /// Sends the SYN again, behind the reset that answers an ACK of an earlier connection (RFC 9293
    /// section 3.5.1, half-open connections): the reset ends that connection at the peer, which then
    /// accepts the SYN. Once per open, because the reset may be lost, and the segment may be forged.
    /// Nothing was lost: the SYN may request ECN again, its answer is an RTT sample, and the initial
    /// window stays.
    #[cold]
    fn repeat_syn_after_reset(&mut self, cx: &mut TcpContext<'_>) {
        let flags = &mut cx.shared.side_table.fields_of(cx.id.index).flags;
        if flags.has(SideFlags::SYN_AFTER_RESET) || self.tcb.has(ConnectionFlags::NEED_SYN) {
            return;
        }
        flags.set(SideFlags::SYN_AFTER_RESET, true);
        // `emit_syn` counts those whose timeout expired.
        cx.shared.stats.syn_retrans += u64::from(self.sender.snd.backoff == 0);
        cx.schedule_output(&mut self.tcb, ConnectionFlags::NEED_SYN);
        self.tcb.restart_retransmission_timer(&self.sender.snd, cx);
    }

    /// Handles a repeated SYN in SYN-RECEIVED: our SYN-ACK was lost, or they crossed. The SYN-ACK
    /// is retransmitted as by its timer, with backoff, and no more often than the timer would: a
    /// peer that repeats its SYN constantly gets no more answers than a silent one. The round trip
    /// is then not measured (Karn).
    pub(crate) fn on_repeated_syn(&mut self, cx: &mut TcpContext<'_>, seg: &Segment) {
        // A peer that also sent a SYN without ECN gets no ECN-capable data (RFC 3168 section 6.1.1).
        let fields = cx.shared.side_table.fields_of(cx.id.index);
        if seg.flags & (ECE | CWR) != ASK {
            fields.flags.set(SideFlags::MAY_SEND_ECT, false);
        }
        let (tcb, snd) = (&mut self.tcb, &mut self.sender.snd);
        let timeout = snd
            .rtt
            .retransmission_timeout(&cx.shared.rto_limits, snd.backoff);
        // `last_rx`: the time at which the last SYN-ACK was sent.
        let too_soon = snd.backoff > 0 && cx.now.0.saturating_sub(tcb.last_rx) < timeout / 2;
        if too_soon
            || snd.backoff >= cx.shared.config.syn_retries
            || tcb.has(ConnectionFlags::NEED_SYN)
        {
            return;
        }
        snd.backoff += 1;
        cx.count_repeated_syn();
        cx.schedule_output(tcb, ConnectionFlags::NEED_SYN);
        tcb.restart_retransmission_timer(snd, cx);
    }

    /// Enters ESTABLISHED after our SYN was acknowledged. `Some`: the connection ended instead.
    pub(crate) fn on_established(
        &mut self,
        cx: &mut TcpContext<'_>,
        seg: &Segment,
    ) -> Option<SegmentVerdict> {
        if self.tcb.has(ConnectionFlags::PASSIVE) && !cx.shared.listeners.contains(self.listener) {
            // The listener was closed in the meantime.
            self.enter_closed(cx);
            self.tcb.flags |= ConnectionFlags::RELEASED;
            return Some(SegmentVerdict::Reset);
        }
        self.apply_path_mtu(cx);
        let (tcb, snd) = (&mut self.tcb, &mut self.sender.snd);
        let repeated = cx.shared.side_table.repeats(cx.id.index);
        if repeated.retransmissions.handshake > 0 {
            // Our SYN or SYN-ACK was lost: one segment at first (RFC 5681 section 3.1).
            snd.window.set_initial(1, u32::from(tcb.emss));
            snd.rtt.on_syn_lost();
            // The echo identifies the SYN that was answered (RFC 7323 section 4.1). The minimum of
            // RFC 6298 (5.7) is for a round trip that is not known; a path on which the timeout was
            // spurious gives a sample that is as long.
            if tcb.has(ConnectionFlags::TIMESTAMPS)
                && seg.has_ts
                && let Some(since) = since_timestamp(seg.ts_ecr, self.path.timestamp_offset, cx.now)
            {
                snd.rtt.add_coarse_sample(since, &cx.shared.rto_limits);
            }
        }
        snd.una = seg.ack;
        let flight = snd.flight_state(tcb.emss);
        self.sender
            .congestion
            .on_established(&mut snd.window, &flight, cx.now.0);
        tcb.flags &= !ConnectionFlags::NEED_SYN;
        tcb.state = TcpState::Established;
        tcb.stop_timer();
        if snd.backoff == 0 {
            snd.rtt.add_sample(cx.now.0.saturating_sub(tcb.last_rx));
        }
        snd.backoff = 0;
        tcb.last_rx = cx.now.0;
        cx.shared.stats.curr_estab += 1;
        if tcb.has(ConnectionFlags::IN_BACKLOG)
            && let Some(entry) = cx.shared.listeners.get_mut(self.listener)
        {
            tcb.flags |= ConnectionFlags::COUNTED_READY;
            entry.ready += 1;
        }
        if tcb.has(ConnectionFlags::PASSIVE) {
            tcb.flags &= !ConnectionFlags::RELEASED;
            cx.shared.stats.passive_opens += 1;
            cx.raise_event(tcb, Events::ACCEPTED);
        } else {
            cx.raise_event(tcb, Events::CONNECTED | Events::WRITABLE);
        }
        if tcb.has(ConnectionFlags::FIN_QUEUED) {
            tcb.state = TcpState::FinWait1;
            cx.shared.stats.curr_estab -= 1;
        }
        cx.update_active_count(&mut self.tcb, &self.sender.snd);
        if let Some(keepalive) = cx.shared.config.keepalive {
            let at = cx.now.0 + siw_net::to_nanos(keepalive.idle);
            cx.schedule_timer(&mut self.tcb, at);
        }
        cx.schedule_output(&mut self.tcb, ConnectionFlags::NONE);
        None
    }

    /// Starts an active or passive open: our SYN or SYN-ACK is to be sent.
    /// The initial sequence number is above `previous`, SND.NXT of an earlier connection with the
    /// same addresses (RFC 9293 section 3.6.1).
    pub(crate) fn start_handshake(&mut self, cx: &mut TcpContext<'_>, previous: Option<SeqNr>) {
        let key = self.path.template.key();
        let first = cx.shared.initial_sequence(&key, cx.now);
        let first = match previous {
            Some(previous) if !first.gt(previous) => previous + ISN_STEP,
            _ => first,
        };
        self.path.timestamp_offset = cx.shared.timestamp_offset(&key);
        let snd = &mut self.sender.snd;
        snd.una = first;
        snd.nxt = first + 1;
        snd.wl2 = first;
        self.sender.congestion.set_first_byte(snd.nxt);
        cx.schedule_output(&mut self.tcb, ConnectionFlags::NEED_SYN);
        self.tcb.restart_retransmission_timer(&self.sender.snd, cx);
        cx.update_active_count(&mut self.tcb, &self.sender.snd);
    }

    /// Sends our SYN or SYN-ACK.
    pub(crate) fn emit_syn(
        &mut self,
        cx: &mut TcpContext<'_>,
        sink: &mut impl FrameSink<R>,
    ) -> Result<(), SinkFull> {
        let answer = self.tcb.state == TcpState::SynReceived;
        // A SYN-ACK agrees only to options that the SYN offered; a SYN offers those that the
        // configuration enables.
        let (ts, sack, scale) = if answer {
            (
                self.tcb.has(ConnectionFlags::TIMESTAMPS),
                self.tcb.has(ConnectionFlags::SACK),
                self.tcb.scales.is_scaled(),
            )
        } else {
            (cx.shared.config.timestamps, cx.shared.config.sack, true)
        };
        let scale = scale.then_some(if answer {
            self.tcb.scales.receive()
        } else {
            cx.shared.recv_wscale
        });
        let ts = ts.then(|| {
            let echo = if answer {
                self.receiver.rcv.ts_recent
            } else {
                0
            };
            (timestamp_at(cx.now, self.path.timestamp_offset), echo)
        });
        let mss = cx.shared.net.config.mtu - if self.path.template.is_v6() { 60 } else { 40 };
        let (options, n) = syn_options(mss, sack, ts, scale);
        let window = cx.shared.recv_window.min(0xffff) as u16;
        let flags = match answer {
            true if self.tcb.has(ConnectionFlags::ECN) => SYN | ACK | ECE,
            true => SYN | ACK,
            false if cx.shared.config.wants_ecn() && self.sender.snd.backoff == 0 => {
                SYN | ECE | CWR
            }
            false => SYN,
        };
        let fields = SegmentFields {
            // Until our SYN is acknowledged, SND.UNA is its sequence number.
            seq: self.sender.snd.una,
            ack: if answer {
                self.receiver.rcv.nxt
            } else {
                SeqNr(0)
            },
            flags,
            window,
            ts: None,
            options: &options[..n],
            payload: 0,
            ect: false,
            tso: false,
        };
        let (n, mut meta) = self.path.template.meta(&fields);
        self.path.complete_meta(&self.tcb, cx, &mut meta);
        meta.retransmission = self.sender.snd.backoff > 0;
        if !sink.send_frame(n, &meta, |out| self.path.template.build(out, &fields), []) {
            return Err(SinkFull);
        }
        // Start of the RTT measurement of the handshake.
        self.tcb.last_rx = cx.now.0;
        if answer {
            let edge = self.receiver.rcv.nxt + u32::from(window);
            self.receiver.on_ack_sent(edge);
        }
        cx.shared.stats.syn_retrans += u64::from(self.sender.snd.backoff > 0);
        cx.shared.net.stats.frames_out += 1;
        cx.shared.stats.out_segs += 1;
        Ok(())
    }
}
