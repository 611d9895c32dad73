//! Numbers of the daemon's objects, one type per kind, so that they cannot be confused.
//!
//! Clients name these objects by bare numbers in their control messages; the control thread wraps a
//! number when it parses a request, and unwraps it when it writes a reply.

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
            /// The number as a table index.
            #[inline]
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }
    };
}

id! {
    /// A connected client process; numbers are never reused.
    ClientId(u64)
}

impl ClientId {
    /// Owner under which faults on the client's memory are recorded (`siw_shm::fault_guard`).
    pub fn fault_owner(self) -> u64 {
        self.0
    }

    /// The client of a recorded fault.
    pub fn from_fault_owner(owner: u64) -> ClientId {
        ClientId(owner)
    }
}

id! {
    /// A queue pair number (`ibv_qp.qp_num`), unique in the daemon; numbers are reused late.
    Qpn(u32)
}
id! {
    /// An address resolution (rdma_resolve_addr(3)) in progress, of one client.
    ResolutionId(u32)
}
id! {
    /// An address handle, the destination of datagrams, unique in the daemon.
    AhId(u32)
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
    /// A protection domain, unique in the daemon; memory keys are checked against it.
    PdId(u32)
}
id! {
    /// A listener of the connection manager; it has one TCP listener in each worker and device
    /// that it listens on.
    CmListenerId(u32)
}
/// A command or helper's order whose answer the control thread awaits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommandToken {
    /// Client that waits for the answer; `None` if siwd itself does.
    pub client: Option<ClientId>,
    /// Unique among all tokens.
    pub number: u64,
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
