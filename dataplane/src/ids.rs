//! Numbers of the daemon's objects, one type for each kind, so that none is taken for another.
//!
//! Clients name these objects by the bare number in their control messages; the control thread
//! wraps it when it takes a request apart, and unwraps it when it writes a reply.

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($number:ty)) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $number);

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        }

        impl $name {
            /// The number as a place in a table.
            #[inline]
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }
    };
}

id! {
    /// A connected client process; never used again.
    ClientId(u64)
}

impl ClientId {
    /// Under which faults on the client's memory are noted (`siw_shm::fault_guard`).
    pub fn fault_owner(self) -> u64 {
        self.0
    }

    /// The client of a noted fault.
    pub fn from_fault_owner(owner: u64) -> ClientId {
        ClientId(owner)
    }
}

id! {
    /// A queue pair number (`ibv_qp.qp_num`), unique in the daemon; numbers are reused late.
    Qpn(u32)
}
id! {
    /// A completion queue, unique in the daemon.
    CqId(u32)
}
id! {
    /// A shared receive queue, unique in the daemon.
    SrqId(u32)
}
id! {
    /// A protection domain, unique in the daemon; memory keys are checked for it.
    PdId(u32)
}
id! {
    /// A listener of the connection manager; it has one TCP listener in each worker and device
    /// that it listens on.
    CmListenerId(u32)
}
id! {
    /// Names a command that the control thread awaits the answer of.
    CommandToken(u64)
}
id! {
    /// A connection request that waits for its application's answer, unique in the daemon.
    ConnectRequestId(u32)
}
id! {
    /// An arena of one client.
    ArenaId(u32)
}
id! {
    /// A completion channel of one client.
    CompletionChannelId(u32)
}
id! {
    /// An event channel of the connection manager of one client.
    CmChannelId(u32)
}
