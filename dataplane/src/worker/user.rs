//! What a TCP connection belongs to, packed into the 64 bits that TCP carries for its owner.

use crate::ids::CmListenerId;

/// The owner of a connection or listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum User {
    /// A queue pair, by its slot in the worker.
    Qp(u32),
    /// A connection whose MPA request has not been accepted yet.
    Inbound(u32),
    /// A listener, by the daemon's number.
    Listener(CmListenerId),
    /// Nobody: late events of a connection that was given up.
    Nobody,
}

impl User {
    /// The slot of a queue pair.
    #[inline]
    pub fn qp(self) -> Option<u32> {
        match self {
            User::Qp(slot) => Some(slot),
            _ => None,
        }
    }
}

impl From<User> for u64 {
    #[inline]
    fn from(u: User) -> u64 {
        match u {
            User::Qp(n) => 1 << 32 | u64::from(n),
            User::Inbound(n) => 2 << 32 | u64::from(n),
            User::Listener(n) => 3 << 32 | u64::from(n.0),
            User::Nobody => 0,
        }
    }
}

impl From<u64> for User {
    #[inline]
    fn from(v: u64) -> User {
        let n = v as u32;
        match v >> 32 {
            1 => User::Qp(n),
            2 => User::Inbound(n),
            3 => User::Listener(CmListenerId(n)),
            _ => User::Nobody,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_survive_the_packing() {
        for u in [
            User::Qp(7),
            User::Inbound(u32::MAX),
            User::Listener(CmListenerId(0)),
            User::Nobody,
        ] {
            assert_eq!(User::from(u64::from(u)), u);
        }
    }
}
