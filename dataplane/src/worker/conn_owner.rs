//! Owner of a TCP connection, packed into the 64 bits that TCP carries for it.
use super::slots::{PendingSlot, QpSlot};
use crate::ids::CmListenerId;

/// The owner of a connection or listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ConnOwner {
    /// A queue pair.
    QueuePair(QpSlot),
    /// A connection whose MPA request has not been accepted yet.
    Pending(PendingSlot),
    /// A listener, by the daemon's number.
    Listener(CmListenerId),
    /// No owner: late events of a connection that was given up.
    Nobody,
}

impl ConnOwner {
    /// The slot, if a queue pair owns the connection.
    #[inline]
    pub(super) fn queue_pair(self) -> Option<QpSlot> {
        match self {
            ConnOwner::QueuePair(slot) => Some(slot),
            _ => None,
        }
    }
}

// The kind is in the upper half, the number in the lower.
const QUEUE_PAIR: u64 = 1;
const PENDING: u64 = 2;
const LISTENER: u64 = 3;

impl From<ConnOwner> for u64 {
    #[inline]
    fn from(owner: ConnOwner) -> u64 {
        let (kind, number) = match owner {
            ConnOwner::QueuePair(slot) => (QUEUE_PAIR, slot.0),
            ConnOwner::Pending(slot) => (PENDING, slot.0),
            ConnOwner::Listener(listener) => (LISTENER, listener.0),
            ConnOwner::Nobody => (0, 0),
        };
        kind << 32 | u64::from(number)
    }
}

impl From<u64> for ConnOwner {
    #[inline]
    fn from(packed: u64) -> ConnOwner {
        let number = packed as u32;
        match packed >> 32 {
            QUEUE_PAIR => ConnOwner::QueuePair(QpSlot(number)),
            PENDING => ConnOwner::Pending(PendingSlot(number)),
            LISTENER => ConnOwner::Listener(CmListenerId(number)),
            _ => ConnOwner::Nobody,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_survive_the_packing() {
        for owner in [
            ConnOwner::QueuePair(QpSlot(7)),
            ConnOwner::Pending(PendingSlot(u32::MAX)),
            ConnOwner::Listener(CmListenerId(0)),
            ConnOwner::Nobody,
        ] {
            assert_eq!(ConnOwner::from(u64::from(owner)), owner);
        }
    }
}
