//! What the deadlines of a connection are for.
//!
//! One timer of each connection, [`Tcb::timer`](super::Tcb::timer), serves everything that waits for
//! the peer or the neighbour, since one excludes the other (RFC 8985 section 8). The others run
//! beside it. The timer wheel has one entry for each connection, at the earliest of all; when it
//! comes up, the connection looks which of them are due.

/// A deadline of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Timer {
    /// The retransmission timeout (RFC 6298), of a SYN too. A connection whose timeouts outlast the
    /// user timeout (RFC 9293 section 3.8.3) ends then.
    Retransmission,
    /// The probe timeout (RFC 8985 section 7.2).
    TailLossProbe,
    /// RACK's reordering timer (RFC 8985 section 6.2 step 5).
    Reordering,
    /// A zero window is probed (RFC 9293 section 3.8.6.1).
    Persist,
    /// Something is to be sent, nothing is in flight, and the neighbour does not answer: it is asked
    /// again, or the connection ends by the user timeout.
    NeighbourResolution,
    /// TIME-WAIT ends (RFC 9293 section 3.6.1).
    TimeWait,
    /// A connection without an owner ends, whatever the peer answers.
    Orphan,
    /// The delayed ACK (RFC 9293 section 3.8.6.3).
    DelayedAck,
    /// The next keepalive probe (RFC 9293 section 3.8.4).
    Keepalive,
    /// The pacer lets new segments leave.
    Pacing,
    /// The connection may take part in the MTU search of its narrow path again (RFC 8899).
    PathSearch,
    /// An idle connection gives back the memory of its queues.
    IdleMemory,
}
