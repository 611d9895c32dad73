//! What a TCP connection belongs to, packed into the 64 bits that TCP carries for its owner.

use crate::ids::CmListenerId;

/// The owner of a connection or listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnOwner {
    /// A queue pair, by its slot in the worker.
    QueuePair(u32),
    /// A connection whose MPA request has not been accepted yet.
    Pending(u32),
    /// A listener, by the daemon's number.
    Listener(CmListenerId),
    /// Nobody: late events of a connection that was given up.
    Nobody,
}

impl ConnOwner {
    /// The slot of a queue pair.
    #[inline]
    pub fn qp(self) -> Option<u32> {
        match self {
            ConnOwner::QueuePair(slot) => Some(slot),
            _ => None,
        }
    }
}

impl From<ConnOwner> for u64 {
    #[inline]
    fn from(u: ConnOwner) -> u64 {
        match u {
            ConnOwner::QueuePair(n) => 1 << 32 | u64::from(n),
            ConnOwner::Pending(n) => 2 << 32 | u64::from(n),
            ConnOwner::Listener(n) => 3 << 32 | u64::from(n.0),
            ConnOwner::Nobody => 0,
        }
    }
}

impl From<u64> for ConnOwner {
    #[inline]
    fn from(v: u64) -> ConnOwner {
        let n = v as u32;
        match v >> 32 {
            1 => ConnOwner::QueuePair(n),
            2 => ConnOwner::Pending(n),
            3 => ConnOwner::Listener(CmListenerId(n)),
            _ => ConnOwner::Nobody,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_survive_the_packing() {
        for u in [
            ConnOwner::QueuePair(7),
            ConnOwner::Pending(u32::MAX),
            ConnOwner::Listener(CmListenerId(0)),
            ConnOwner::Nobody,
        ] {
            assert_eq!(ConnOwner::from(u64::from(u)), u);
        }
    }
}
