//! Deferred requests, whose reply waits for workers or helpers.

use std::sync::Arc;

use siw_memory::{Retired, Stag};
use siw_shm::control::messages::ModifySrq;
use siw_shm::{CqGeometry, SharedMemory};

use super::quotas::Charge;
use super::regions::ArenaOrigin;
use crate::ids::{CommandToken, CqId, Qpn, SrqId};

/// Condition that a deferred reply waits for. `left` counts the workers that have not reported.
pub(super) enum PendingReply {
    /// All workers pass a barrier.
    Barrier {
        token: CommandToken,
        left: usize,
        then: AfterBarrier,
    },
    /// The worker reports the queue pair's state, for MODIFY_QP or QUERY_QP.
    QpInfo { token: CommandToken, modify: bool },
    /// The worker releases the queue pair, which is then reset.
    ResetQp { qpn: Qpn },
    /// The worker releases the queue pair.
    DestroyQp { qpn: Qpn },
    /// No worker can use the old key any more, and no port holds a frame of its memory, except for
    /// ports whose driver takes too long to release it.
    QuiescentKey {
        ticket: Retired,
        token: CommandToken,
        left: usize,
        /// Workers among them whose ports do not release the frames in time.
        late: Vec<usize>,
        /// The memory that the frames refer to.
        regions: Vec<Arc<SharedMemory>>,
        then: QuiescentReply,
    },
    /// A helper makes or maps the arena.
    MakeArena {
        token: CommandToken,
        charge: Charge<4>,
        origin: ArenaOrigin,
    },
    /// A helper frees the arena.
    FreeArena { token: CommandToken },
    /// A worker describes its connections.
    Connections { token: CommandToken },
    /// All workers report their counters.
    Stats { token: CommandToken, left: usize },
    /// The configuration is being read again.
    Reload,
    /// A device is being opened.
    AddDevice,
    /// The port of a removed device is being closed.
    RemoveDevice { device: usize },
    /// The statistics are being written.
    WriteStats,
}

/// What follows when all workers have passed a barrier.
pub(super) enum AfterBarrier {
    /// The memory of the completion queue is freed.
    FreeCq(CqId),
    /// The workers write to the new rings of the completion queue.
    ResizeCq { cq: CqId, geometry: CqGeometry },
    /// The memory of the shared receive queue is freed.
    FreeSrq(SrqId),
    /// The workers have left the rings without requests: the shared receive queue is resized.
    ResizeSrq(ModifySrq),
    /// No reply: the commands of earlier requests are executed.
    ReadOn,
}

impl PendingReply {
    /// Counts a worker's answer with this token. Returns the number of missing ones; `None` if the
    /// reply waits for something else.
    pub fn count_answer(&mut self, of: CommandToken) -> Option<usize> {
        match self {
            PendingReply::Barrier { token, left, .. }
            | PendingReply::QuiescentKey { token, left, .. }
            | PendingReply::Stats { token, left }
                if *token == of =>
            {
                *left = left.saturating_sub(1);
                Some(*left)
            }
            _ => None,
        }
    }
}

/// Reply to send when no worker uses a key any more.
pub(super) enum QuiescentReply {
    Dereg {
        lkey: Stag,
    },
    /// The reply carries the new key.
    Rereg {
        lkey: Stag,
    },
    /// With the charge of the window.
    DeallocMw(Charge<2>),
}

/// A request without a reply so far, and the sequence number of its reply.
pub(super) struct DeferredRequest {
    pub seq: u32,
    pub what: PendingReply,
}
