//! The transmission control block (RFC 9293 section 3.3.1): the variables of a connection that every
//! segment accesses, in two cache lines, and the small types that they use. The rest of a connection is
//! in [`crate::connection`].

pub(crate) mod flags;
pub(crate) mod rtt;
pub(crate) mod timer;

use crate::base::sequence::SeqNr;
use crate::base::state::TcpState;
use crate::congestion::RecoveryPhase;
use crate::congestion::window::{CongestionWindow, Flight};
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::rtt::RoundTrip;
use crate::tcb::timer::Timer;
use crate::wire::segment::Segment;

/// The window scale factors of both directions (RFC 7323 section 2.3), each at most 14.
#[derive(Clone, Copy, Default)]
pub(crate) struct WindowScales(u8);

impl WindowScales {
    /// `send`: shift of the peer's windows, `receive`: shift of ours.
    pub(crate) fn new(send: u8, receive: u8) -> Self {
        WindowScales(send << 4 | receive)
    }

    /// Returns the shift of the peer's windows.
    #[inline]
    pub(crate) fn send(self) -> u8 {
        self.0 >> 4
    }

    /// Returns the shift of our windows.
    #[inline]
    pub(crate) fn receive(self) -> u8 {
        self.0 & 15
    }

    /// Returns whether the ends agreed on window scaling, with a factor other than 0.
    #[inline]
    pub(crate) fn is_scaled(self) -> bool {
        self.0 != 0
    }
}

/// The variables that every segment accesses, 128 bytes.
#[repr(C, align(64))]
pub(crate) struct Tcb {
    /// RCV.NXT: the next sequence number that the peer will send.
    pub rcv_nxt: SeqNr,
    /// SND.UNA: our first unacknowledged sequence number.
    pub snd_una: SeqNr,
    /// SND.NXT: the next sequence number that we will send.
    pub snd_nxt: SeqNr,
    /// SND.WND: the peer's window in bytes, scaled.
    pub snd_wnd: u32,
    /// SND.WL1, SND.WL2: sequence and acknowledgement number of the segment that set SND.WND.
    pub snd_wl1: SeqNr,
    pub snd_wl2: SeqNr,
    /// Right edge of the window we advertised; never moves left.
    pub rcv_adv: SeqNr,
    /// Last.ACK.sent (RFC 7323 section 4.3).
    pub last_ack_sent: SeqNr,
    /// TS.Recent (RFC 7323 section 4.3).
    pub ts_recent: u32,
    /// Written by [`crate::congestion`] alone.
    pub window: CongestionWindow,
    /// Payload bytes deemed on the wire (RFC 6675).
    pub pipe: u32,
    /// Payload bytes queued and never sent.
    pub unsent: u32,
    pub flags: ConnectionFlags,
    pub state: TcpState,
    pub scales: WindowScales,
    /// Segments received since our last ACK.
    pub unacked_segs: u8,
    /// Purpose of the running timer; see [`timer`].
    timer: Option<Timer>,
    /// Eff.snd.MSS (RFC 9293 section 3.7.1): payload bytes of a full segment.
    pub emss: u16,
    /// [`crate::Events`] not yet reported to the owner.
    pub events: u16,
    // Second cache line.
    /// When the running timer fires, in ns.
    timer_at: u64,
    /// When the delayed ACK is due, in ns; 0: none is pending.
    pub ack_at: u64,
    /// Position of the connection in the timer wheel, in ns; `u64::MAX`: not in the wheel.
    pub wheel_at: u64,
    /// The user value of the owner.
    pub user: u64,
    /// When the last segment of the peer was received, in ns.
    pub last_rx: u64,
    pub rtt: RoundTrip,
    /// The largest window the peer ever offered.
    pub max_snd_wnd: u32,
    /// Consecutive timeouts, each of which doubles the timeout (RFC 6298 section 5.5).
    pub backoff: u8,
    pub dup_acks: u8,
    /// Keepalive probes without an answer.
    pub probes: u8,
    pub phase: RecoveryPhase,
}

const _: () = assert!(size_of::<Tcb>() == 128, "two cache lines");

impl Tcb {
    /// Creates the block of a connection that is being opened, with segments of `emss` bytes.
    pub(crate) fn new(emss: u16) -> Self {
        Tcb {
            rcv_nxt: SeqNr(0),
            snd_una: SeqNr(0),
            snd_nxt: SeqNr(0),
            snd_wnd: 0,
            snd_wl1: SeqNr(0),
            snd_wl2: SeqNr(0),
            rcv_adv: SeqNr(0),
            last_ack_sent: SeqNr(0),
            ts_recent: 0,
            window: CongestionWindow::CLOSED,
            pipe: 0,
            unsent: 0,
            flags: ConnectionFlags::IN_FLOW_TABLE,
            state: TcpState::SynSent,
            scales: WindowScales::default(),
            unacked_segs: 0,
            timer: None,
            emss,
            events: 0,
            timer_at: 0,
            ack_at: 0,
            wheel_at: u64::MAX,
            user: 0,
            last_rx: 0,
            rtt: RoundTrip::default(),
            max_snd_wnd: 0,
            backoff: 0,
            dup_acks: 0,
            probes: 0,
            phase: RecoveryPhase::Open,
        }
    }

    /// Returns whether any of these flags is set.
    #[inline]
    pub(crate) fn has(&self, flags: ConnectionFlags) -> bool {
        self.flags.intersects(flags)
    }

    /// Sequence space in flight, SYN and FIN included.
    #[inline]
    pub(crate) fn flight(&self) -> u32 {
        self.snd_nxt - self.snd_una
    }

    /// Returns the sequence number of a segment without data, an ACK or a reset: SND.NXT, unless the
    /// peer's window has shrunk below it. A closed window accepts RCV.NXT alone (RFC 9293 section
    /// 3.10.7.4, first), which is SND.UNA: the peer refused what is in flight. Windows do not limit
    /// a SYN.
    #[inline]
    pub(crate) fn bare_seq(&self) -> SeqNr {
        match self.state {
            TcpState::SynSent | TcpState::SynReceived => self.snd_nxt,
            _ => self.snd_nxt.min(self.snd_una + self.snd_wnd),
        }
    }

    /// Returns the state in flight for congestion control.
    #[inline]
    pub(crate) fn flight_state(&self) -> Flight {
        Flight {
            una: self.snd_una,
            next: self.snd_nxt,
            pipe: self.pipe,
            mss: u32::from(self.emss),
            srtt: self.rtt.srtt,
        }
    }

    /// Returns the state in flight before an ACK of `newly` bytes.
    pub(crate) fn flight_before(&self, newly: u32) -> Flight {
        Flight {
            una: self.snd_una - newly,
            ..self.flight_state()
        }
    }

    /// Bytes that the windows allow beyond what is queued; see `Stack::send_room`.
    #[inline]
    pub(crate) fn room(&self) -> u32 {
        let congestion = self.window.available(self.pipe);
        let peer = self.snd_wnd.saturating_sub(self.flight());
        congestion.min(peer).saturating_sub(self.unsent)
    }

    /// Returns whether nothing is in flight, queued, or waiting for an answer, so that an acknowledgement has
    /// no effect.
    #[inline]
    pub(crate) fn is_sender_idle(&self) -> bool {
        self.snd_una == self.snd_nxt
            && self.unsent == 0
            && self.timer.is_none()
            && !self.has(ConnectionFlags::ECN | ConnectionFlags::FIN_QUEUED)
    }

    /// Takes the peer's window from an acceptable segment (RFC 9293 section 3.10.7.4, fifth). A
    /// retransmitted segment below SND.WL1 counts too if it acknowledges new data: otherwise the older
    /// window would be applied to the new SND.UNA and move the right edge too far.
    #[inline]
    pub(crate) fn update_send_window(&mut self, seg: &Segment) {
        if self.snd_wl1.lt(seg.seq)
            || (self.snd_wl1 == seg.seq && self.snd_wl2.le(seg.ack))
            || seg.ack.gt(self.snd_una)
        {
            self.snd_wnd = u32::from(seg.window) << self.scales.send();
            self.max_snd_wnd = self.max_snd_wnd.max(self.snd_wnd);
            self.snd_wl1 = seg.seq;
            self.snd_wl2 = seg.ack;
        }
    }

    /// Returns whether data or our FIN may be sent in this state.
    #[inline]
    pub(crate) fn can_send_data(&self) -> bool {
        matches!(
            self.state,
            TcpState::Established
                | TcpState::CloseWait
                | TcpState::FinWait1
                | TcpState::Closing
                | TcpState::LastAck
        )
    }

    /// Returns whether the owner closed its direction and our FIN waits to be sent.
    #[inline]
    pub(crate) fn is_fin_pending(&self) -> bool {
        self.flags & (ConnectionFlags::FIN_QUEUED | ConnectionFlags::FIN_SENT)
            == ConnectionFlags::FIN_QUEUED
    }

    /// Forbids splitting a record for a small window.
    ///
    /// Why it tests first: the flag is rarely set, and clearing it stores one byte of the flags, for
    /// which the next load of all flags would have to wait.
    #[inline]
    pub(crate) fn forbid_splitting(&mut self) {
        if self.has(ConnectionFlags::MAY_SPLIT_RECORD) {
            self.flags &= !ConnectionFlags::MAY_SPLIT_RECORD;
        }
    }

    /// Clears `WAITS_FOR_PACER` if the congestion window is no longer paced.
    #[inline]
    pub(crate) fn forget_pacing(&mut self) {
        if self.has(ConnectionFlags::WAITS_FOR_PACER) && !self.window.is_paced() {
            self.flags.remove(ConnectionFlags::WAITS_FOR_PACER);
        }
    }

    /// Records that a frame with an ACK was sent: `edge`, the right edge of the advertised window,
    /// must be honoured from now on, and no other ACK is due.
    #[inline]
    pub(crate) fn on_ack_sent(&mut self, edge: SeqNr) {
        self.rcv_adv = self.rcv_adv.max(edge);
        self.last_ack_sent = self.rcv_nxt;
        self.unacked_segs = 0;
        self.ack_at = 0;
    }

    /// Drops ACKs and keepalive probes that cannot be sent, as if the link had lost them: the peer
    /// retransmits its segment, and the keepalive timer the probe.
    pub(crate) fn drop_unsent_acks(&mut self) {
        self.flags.remove(ConnectionFlags::NEED_MASK);
    }

    /// Returns whether data is unacknowledged or waits to be sent.
    #[inline]
    pub(crate) fn is_busy(&self) -> bool {
        self.state != TcpState::Closed
            && (self.snd_una != self.snd_nxt || self.unsent > 0 || self.is_fin_pending())
    }

    /// Returns whether the connection has ended, has no owner, and has nothing left to send.
    #[inline]
    pub(crate) fn is_done(&self) -> bool {
        self.state == TcpState::Closed
            && self.has(ConnectionFlags::RELEASED)
            && !self.has(ConnectionFlags::NEED_RESET)
    }

    /// Returns the purpose of the connection's timer (RFC 8985 section 8), if it runs.
    #[inline]
    pub(crate) fn timer(&self) -> Option<Timer> {
        self.timer
    }

    /// Returns when the timer fires, in ns; `None`: it does not run.
    #[inline]
    pub(crate) fn timer_at(&self) -> Option<u64> {
        self.timer.map(|_| self.timer_at)
    }

    /// Returns whether the timer runs for this purpose.
    #[inline]
    pub(crate) fn is_timer(&self, timer: Timer) -> bool {
        self.timer == Some(timer)
    }

    /// Sets the timer to fire at `at` (ns) for `timer`, replacing any earlier purpose. The caller
    /// registers the time with the wheel.
    #[inline]
    pub(crate) fn set_timer(&mut self, timer: Timer, at: u64) {
        (self.timer, self.timer_at) = (Some(timer), at);
    }

    /// Disarms the timer.
    #[inline]
    pub(crate) fn stop_timer(&mut self) {
        self.timer = None;
    }
}
