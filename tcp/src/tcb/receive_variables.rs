//! The receive sequence variables of a connection (RFC 9293 section 3.3.1).

use crate::base::sequence::SeqNr;

/// The receive variables that every segment accesses. Part of
/// [`Receiver`](crate::connection::receiver::Receiver).
#[repr(C)]
pub(crate) struct ReceiveVariables {
    /// RCV.NXT: the next sequence number that the peer will send.
    pub nxt: SeqNr,
    /// Right edge of the window we advertised, RCV.NXT + RCV.WND; never moves left.
    pub adv: SeqNr,
    /// Last.ACK.sent (RFC 7323 section 4.3).
    pub last_ack_sent: SeqNr,
    /// TS.Recent (RFC 7323 section 4.3).
    pub ts_recent: u32,
}

impl ReceiveVariables {
    /// Returns the variables before the peer's SYN.
    pub(crate) fn new() -> Self {
        ReceiveVariables {
            nxt: SeqNr(0),
            adv: SeqNr(0),
            last_ack_sent: SeqNr(0),
            ts_recent: 0,
        }
    }

    /// Returns RCV.WND, the bytes that the peer may still send.
    #[inline]
    pub(crate) fn window(&self) -> u32 {
        self.adv.distance_from(self.nxt).max(0) as u32
    }
}
