//! Boolean state of a connection, one bit each. That of the send side alone is in
//! [`SendFlags`](super::send_variables::SendFlags).

use core::ops::{BitAnd, BitAndAssign, BitOr, BitOrAssign, BitXorAssign, Not};

/// A set of flags of one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ConnectionFlags(u32);

impl ConnectionFlags {
    pub const NONE: ConnectionFlags = ConnectionFlags(0);
    /// An ACK must be sent.
    pub const NEED_ACK: ConnectionFlags = ConnectionFlags(1 << 0);
    /// Our SYN or SYN-ACK must be sent.
    pub const NEED_SYN: ConnectionFlags = ConnectionFlags(1 << 1);
    /// A window probe must be sent.
    pub const NEED_PROBE: ConnectionFlags = ConnectionFlags(1 << 2);
    /// A keepalive probe must be sent.
    pub const NEED_KEEPALIVE: ConnectionFlags = ConnectionFlags(1 << 3);
    /// In the list of connections that `poll` processes.
    pub const IN_OUTPUT_LIST: ConnectionFlags = ConnectionFlags(1 << 4);
    /// Counted in `SharedState::active`.
    pub const COUNTED_ACTIVE: ConnectionFlags = ConnectionFlags(1 << 5);
    /// No owner: no events, freed when closed.
    pub const RELEASED: ConnectionFlags = ConnectionFlags(1 << 6);
    /// The owner closed its direction: FIN follows the queued records.
    pub const FIN_QUEUED: ConnectionFlags = ConnectionFlags(1 << 7);
    /// Our FIN was sent.
    pub const FIN_SENT: ConnectionFlags = ConnectionFlags(1 << 8);
    /// The peer's FIN arrived, and everything before it.
    pub const FIN_RECEIVED: ConnectionFlags = ConnectionFlags(1 << 9);
    /// Timestamps are agreed (RFC 7323).
    pub const TIMESTAMPS: ConnectionFlags = ConnectionFlags(1 << 10);
    /// Selective acknowledgements are agreed (RFC 2018).
    pub const SACK: ConnectionFlags = ConnectionFlags(1 << 11);
    /// The other end is an address of this device.
    pub const SELF_ADDRESSED: ConnectionFlags = ConnectionFlags(1 << 12);
    /// Passive open.
    pub const PASSIVE: ConnectionFlags = ConnectionFlags(1 << 13);
    /// Counted in its listener's backlog.
    pub const IN_BACKLOG: ConnectionFlags = ConnectionFlags(1 << 14);
    /// In the flow table.
    pub const IN_FLOW_TABLE: ConnectionFlags = ConnectionFlags(1 << 15);
    /// The peer's FIN arrived, possibly ahead of data.
    pub const FIN_SEEN: ConnectionFlags = ConnectionFlags(1 << 16);
    /// A tail loss probe must be sent (RFC 8985 section 7.3).
    pub const NEED_TAIL_PROBE: ConnectionFlags = ConnectionFlags(1 << 17);
    /// Marks must be echoed: an ECN-setup SYN or SYN-ACK was sent and answered (RFC 3168 section
    /// 6.1.1). Whether data may be sent ECN-capable is decided separately.
    pub const ECN: ConnectionFlags = ConnectionFlags(1 << 18);
    /// Our ACKs carry ECE (RFC 3168 section 6.1.3).
    pub const SEND_ECE: ConnectionFlags = ConnectionFlags(1 << 19);
    /// DCTCP.CE (RFC 8257 section 3.2): the last data segment was marked.
    pub const LAST_WAS_MARKED: ConnectionFlags = ConnectionFlags(1 << 20);
    /// `emss` is below the value that the ends agreed on.
    pub const NARROW_PATH: ConnectionFlags = ConnectionFlags(1 << 21);
    /// Established, and counted in its listener's `ready`.
    pub const COUNTED_READY: ConnectionFlags = ConnectionFlags(1 << 22);
    /// A reset must be sent. The connection is in CLOSED, and its slot stays in use until the reset
    /// has left.
    pub const NEED_RESET: ConnectionFlags = ConnectionFlags(1 << 23);
    /// The owner answers messages at once, so their ACKs wait for the answers.
    pub const ANSWERS: ConnectionFlags = ConnectionFlags(1 << 24);

    /// The owner does not read for a while: its buffers are counted apart from those of others.
    pub const UNREAD: ConnectionFlags = ConnectionFlags(1 << 31);

    /// Output other than data is pending.
    pub const NEED_MASK: ConnectionFlags = ConnectionFlags(
        Self::NEED_ACK.0
            | Self::NEED_SYN.0
            | Self::NEED_PROBE.0
            | Self::NEED_KEEPALIVE.0
            | Self::NEED_TAIL_PROBE.0,
    );

    /// One of these is set while a timer runs that few connections need: path MTU, orphan.
    pub const RARE_TIMERS: ConnectionFlags =
        ConnectionFlags(Self::NARROW_PATH.0 | Self::RELEASED.0);

    /// Returns whether any of `other` is set.
    #[inline]
    pub(crate) const fn intersects(self, other: ConnectionFlags) -> bool {
        self.0 & other.0 != 0
    }

    /// Clears all of `other`.
    #[inline]
    pub(crate) fn remove(&mut self, other: ConnectionFlags) {
        self.0 &= !other.0;
    }

    /// `const` form of `|`.
    #[inline]
    pub(crate) const fn union(self, other: ConnectionFlags) -> ConnectionFlags {
        ConnectionFlags(self.0 | other.0)
    }
}

impl BitOr for ConnectionFlags {
    type Output = ConnectionFlags;
    #[inline]
    fn bitor(self, other: ConnectionFlags) -> ConnectionFlags {
        ConnectionFlags(self.0 | other.0)
    }
}

impl BitAnd for ConnectionFlags {
    type Output = ConnectionFlags;
    #[inline]
    fn bitand(self, other: ConnectionFlags) -> ConnectionFlags {
        ConnectionFlags(self.0 & other.0)
    }
}

impl Not for ConnectionFlags {
    type Output = ConnectionFlags;
    #[inline]
    fn not(self) -> ConnectionFlags {
        ConnectionFlags(!self.0)
    }
}

impl BitOrAssign for ConnectionFlags {
    #[inline]
    fn bitor_assign(&mut self, other: ConnectionFlags) {
        self.0 |= other.0;
    }
}

impl BitAndAssign for ConnectionFlags {
    #[inline]
    fn bitand_assign(&mut self, other: ConnectionFlags) {
        self.0 &= other.0;
    }
}

impl BitXorAssign for ConnectionFlags {
    #[inline]
    fn bitxor_assign(&mut self, other: ConnectionFlags) {
        self.0 ^= other.0;
    }
}
