//! The timers of a connection.
//!
//! A single timer per connection, [`Tcb::timer`](super::Tcb::timer), serves every wait for the peer or
//! the neighbour, since these waits exclude each other (RFC 8985 section 8). The other timers run
//! independently. The timer wheel has one entry per connection, at the earliest of all its deadlines;
//! when the entry fires, the connection checks which timers are due.

/// A deadline of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Timer {
    /// The retransmission timeout (RFC 6298), also of a SYN. It ends a connection whose timeouts
    /// outlast the user timeout (RFC 9293 section 3.8.3).
    Retransmission,
    /// The probe timeout (RFC 8985 section 7.2).
    TailLossProbe,
    /// RACK's reordering timer (RFC 8985 section 6.2 step 5).
    Reordering,
    /// The next probe of a zero window (RFC 9293 section 3.8.6.1).
    Persist,
    /// Data waits, nothing is in flight, and the neighbour does not answer: neighbour resolution is
    /// retried, or the user timeout ends the connection.
    NeighbourResolution,
    /// The end of TIME-WAIT (RFC 9293 section 3.6.1).
    TimeWait,
    /// The end of a connection without an owner, whatever the peer answers.
    Orphan,
    /// The delayed ACK (RFC 9293 section 3.8.6.3).
    DelayedAck,
    /// The next keepalive probe (RFC 9293 section 3.8.4).
    Keepalive,
    /// The time at which the pacer releases new segments.
    Pacing,
    /// The time at which a connection on a narrow path sends segments of the agreed size again (RFC
    /// 1191 section 6.3).
    PathMtu,
    /// The time at which an idle connection releases the memory of its queues.
    IdleMemory,
}
