//! The send sequence variables of a connection (RFC 9293 section 3.3.1), and the other variables of its
//! send side that every segment accesses.

use crate::base::sequence::SeqNr;
use crate::base::state::TcpState;
use crate::congestion::RecoveryPhase;
use crate::congestion::window::{CongestionWindow, Flight};
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::rtt::RoundTrip;
use crate::wire::segment::Segment;

/// Boolean state of a send side, one bit each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SendFlags(u8);

impl SendFlags {
    pub const NONE: SendFlags = SendFlags(0);
    /// Segments are SACKed or lost, or a recovery is in progress: no fast path.
    pub const RECOVERING: SendFlags = SendFlags(1 << 0);
    /// The persist timer fired: part of a record may be sent.
    pub const MAY_SPLIT_RECORD: SendFlags = SendFlags(1 << 1);
    /// The path was seen to reorder (RACK.reordering_seen).
    pub const REORDERING_SEEN: SendFlags = SendFlags(1 << 2);
    /// The next new segment carries CWR (RFC 3168 section 6.1.2).
    pub const SEND_CWR: SendFlags = SendFlags(1 << 3);
    /// Sent entries of the send buffer may cover several segments.
    pub const MULTI_SEGMENT: SendFlags = SendFlags(1 << 4);
    /// New segments wait for the pacer.
    pub const WAITS_FOR_PACER: SendFlags = SendFlags(1 << 5);
}

/// The variables of a send side that every segment accesses, one cache line. Part of
/// [`Sender`](crate::connection::sender::Sender).
#[repr(C)]
pub(crate) struct SendVariables {
    /// SND.UNA: our first unacknowledged sequence number.
    pub una: SeqNr,
    /// SND.NXT: the next sequence number that we will send.
    pub nxt: SeqNr,
    /// SND.WND: the peer's window in bytes, scaled.
    pub wnd: u32,
    /// SND.WL1, SND.WL2: sequence and acknowledgement number of the segment that set SND.WND.
    pub wl1: SeqNr,
    pub wl2: SeqNr,
    /// The largest window the peer ever offered.
    pub max_wnd: u32,
    /// Written by [`crate::congestion`] alone.
    pub window: CongestionWindow,
    /// Payload bytes deemed on the wire (RFC 6675).
    pub pipe: u32,
    /// Payload bytes queued and never sent.
    pub unsent: u32,
    /// The tick at which the current series of timeouts began; 0: none.
    pub stalled_since: u32,
    /// Consecutive timeouts, each of which doubles the timeout (RFC 6298 section 5.5).
    pub backoff: u8,
    /// Duplicate ACKs since new data was acknowledged, counted without SACK only.
    pub dup_acks: u8,
    pub phase: RecoveryPhase,
    pub flags: SendFlags,
    pub rtt: RoundTrip,
}

const _: () = assert!(size_of::<SendVariables>() == 64, "one cache line");

impl SendVariables {
    /// Returns the variables before the handshake.
    pub(crate) fn new() -> Self {
        SendVariables {
            una: SeqNr(0),
            nxt: SeqNr(0),
            wnd: 0,
            wl1: SeqNr(0),
            wl2: SeqNr(0),
            max_wnd: 0,
            window: CongestionWindow::CLOSED,
            pipe: 0,
            unsent: 0,
            stalled_since: 0,
            backoff: 0,
            dup_acks: 0,
            phase: RecoveryPhase::Open,
            flags: SendFlags::NONE,
            rtt: RoundTrip::default(),
        }
    }

    /// Returns whether `flag` is set.
    #[inline]
    pub(crate) fn has(&self, flag: SendFlags) -> bool {
        self.flags.0 & flag.0 != 0
    }

    /// Sets `flag`.
    #[inline]
    pub(crate) fn set(&mut self, flag: SendFlags) {
        self.flags.0 |= flag.0;
    }

    /// Clears `flag`.
    #[inline]
    pub(crate) fn clear(&mut self, flag: SendFlags) {
        self.flags.0 &= !flag.0;
    }

    /// Sequence space in flight, SYN and FIN included.
    #[inline]
    pub(crate) fn flight(&self) -> u32 {
        self.nxt - self.una
    }

    /// Returns whether everything that was sent is acknowledged.
    #[inline]
    pub(crate) fn is_all_acked(&self) -> bool {
        self.una == self.nxt
    }

    /// Returns the sequence number of a segment without data, an ACK or a reset: SND.NXT, unless the
    /// peer's window has shrunk below it. A closed window accepts RCV.NXT alone (RFC 9293 section
    /// 3.10.7.4, first), which is SND.UNA: the peer refused what is in flight. Windows do not limit
    /// a SYN.
    #[inline]
    pub(crate) fn bare_seq(&self, state: TcpState) -> SeqNr {
        match state {
            TcpState::SynSent | TcpState::SynReceived => self.nxt,
            _ => self.nxt.min(self.una + self.wnd),
        }
    }

    /// Returns the state in flight for congestion control. `emss`: payload bytes of a full segment.
    #[inline]
    pub(crate) fn flight_state(&self, emss: u16) -> Flight {
        Flight {
            una: self.una,
            next: self.nxt,
            pipe: self.pipe,
            mss: u32::from(emss),
            srtt: self.rtt.srtt,
        }
    }

    /// Bytes that the windows allow beyond what is queued; see `Stack::send_room`.
    #[inline]
    pub(crate) fn room(&self) -> u32 {
        let congestion = self.window.available(self.pipe);
        let peer = self.wnd.saturating_sub(self.flight());
        congestion.min(peer).saturating_sub(self.unsent)
    }

    /// Returns whether nothing is in flight, queued, or waiting for an answer, so that an acknowledgement
    /// has no effect.
    #[inline]
    pub(crate) fn is_idle(&self, tcb: &Tcb) -> bool {
        self.is_all_acked()
            && self.unsent == 0
            && tcb.timer().is_none()
            && !tcb.has(ConnectionFlags::ECN | ConnectionFlags::FIN_QUEUED)
    }

    /// Returns whether data is unacknowledged or waits to be sent.
    #[inline]
    pub(crate) fn is_busy(&self, tcb: &Tcb) -> bool {
        tcb.state != TcpState::Closed
            && (!self.is_all_acked() || self.unsent > 0 || tcb.is_fin_pending())
    }

    /// Takes the peer's window from an acceptable segment (RFC 9293 section 3.10.7.4, fifth). A
    /// retransmitted segment below SND.WL1 counts too if it acknowledges new data: otherwise the older
    /// window would be applied to the new SND.UNA and move the right edge too far. `shift`: the window
    /// scale factor of the peer.
    #[inline]
    pub(crate) fn update_window(&mut self, seg: &Segment, shift: u8) {
        if self.wl1.lt(seg.seq)
            || (self.wl1 == seg.seq && self.wl2.le(seg.ack))
            || seg.ack.gt(self.una)
        {
            self.wnd = u32::from(seg.window) << shift;
            self.max_wnd = self.max_wnd.max(self.wnd);
            self.wl1 = seg.seq;
            self.wl2 = seg.ack;
        }
    }

    /// Moves `len` bytes of new segments from the queue to the wire.
    #[inline]
    pub(crate) fn move_to_pipe(&mut self, len: u32) {
        self.pipe += len;
        self.unsent -= len;
    }

    /// Clears `WAITS_FOR_PACER` if the congestion window is no longer paced.
    #[inline]
    pub(crate) fn forget_pacing(&mut self) {
        if self.has(SendFlags::WAITS_FOR_PACER) && !self.window.is_paced() {
            self.clear(SendFlags::WAITS_FOR_PACER);
        }
    }
}
