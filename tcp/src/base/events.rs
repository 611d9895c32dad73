//! Events of a connection since its owner last polled.

use core::fmt;
use core::ops::{BitOr, BitOrAssign};

/// A set of events; [`crate::Stack::next_event`] returns each connection at most once, with all its
/// events OR-ed together.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Events(pub u16);

impl Events {
    /// No event.
    pub const NONE: Events = Events(0);
    /// Our `connect` completed.
    pub const CONNECTED: Events = Events(1 << 0);
    /// A listener's new connection is established; `user` is still the listener's.
    pub const ACCEPTED: Events = Events(1 << 1);
    /// In-order bytes are in the receive queue.
    pub const READABLE: Events = Events(1 << 2);
    /// Records, or units of a run, were fully acknowledged: `take_acked` or `take_acked_units`
    /// returns them.
    pub const ACKED: Events = Events(1 << 3);
    /// `send_room` rose from less than a segment to at least one.
    pub const WRITABLE: Events = Events(1 << 4);
    /// The peer closed its direction; everything before its FIN is in the receive queue.
    pub const PEER_FIN: Events = Events(1 << 5);
    /// The peer reset the connection.
    pub const RESET: Events = Events(1 << 6);
    /// Retransmission or keepalive gave up, or the user timeout expired.
    pub const TIMED_OUT: Events = Events(1 << 7);
    /// The peer answered our SYN with a reset.
    pub const REFUSED: Events = Events(1 << 8);
    /// While connecting, the neighbour did not answer or an ICMP error reported the peer
    /// unreachable.
    pub const UNREACHABLE: Events = Events(1 << 9);
    /// The connection has ended for its owner (it may linger in TIME-WAIT); `release` it. Raised
    /// with, or after, every other terminal event.
    pub const CLOSED: Events = Events(1 << 10);
    /// `effective_mss` changed: size new records accordingly.
    pub const MSS_CHANGED: Events = Events(1 << 11);

    /// Segments beyond a hole arrived and were kept: `Stack::for_each_out_of_order` visits them.
    /// Only with [`crate::TcpConfig::show_out_of_order`].
    pub const OUT_OF_ORDER: Events = Events(1 << 12);

    const NAMES: [&'static str; 13] = [
        "CONNECTED",
        "ACCEPTED",
        "READABLE",
        "ACKED",
        "WRITABLE",
        "PEER_FIN",
        "RESET",
        "TIMED_OUT",
        "REFUSED",
        "UNREACHABLE",
        "CLOSED",
        "MSS_CHANGED",
        "OUT_OF_ORDER",
    ];

    /// Returns whether all of `other` are set.
    #[inline]
    pub const fn contains(self, other: Events) -> bool {
        self.0 & other.0 == other.0
    }
    /// Returns whether any of `other` is set.
    #[inline]
    pub const fn intersects(self, other: Events) -> bool {
        self.0 & other.0 != 0
    }
    /// Returns whether no event is set.
    #[inline]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
    /// `const` form of `|`.
    pub const fn union(self, other: Events) -> Events {
        Events(self.0 | other.0)
    }
}

impl BitOr for Events {
    type Output = Events;
    #[inline]
    fn bitor(self, other: Events) -> Events {
        Events(self.0 | other.0)
    }
}

impl BitOrAssign for Events {
    #[inline]
    fn bitor_assign(&mut self, other: Events) {
        self.0 |= other.0;
    }
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut first = true;
        for (i, name) in Self::NAMES.iter().enumerate() {
            if self.0 & (1 << i) != 0 {
                if !first {
                    f.write_str("|")?;
                }
                f.write_str(name)?;
                first = false;
            }
        }
        if first {
            f.write_str("NONE")?;
        }
        Ok(())
    }
}
