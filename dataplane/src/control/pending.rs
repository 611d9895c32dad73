//! Requests whose reply has to wait for workers.

use std::sync::Arc;

use siw_memory::Retired;
use siw_shm::{CqGeometry, SharedMemory};

use super::memory::QuiescentReply;
use crate::ids::{CommandToken, CqId, Qpn, SrqId};

/// What a client's unanswered request waits for. `left` counts the workers that have not answered.
pub(super) enum PendingReply {
    /// All workers passed a barrier; then the completion queue's memory is free.
    FreeCq {
        cq: CqId,
        token: CommandToken,
        left: usize,
    },
    /// All workers passed a barrier: they write to the new rings.
    ResizeCq {
        cq: CqId,
        geometry: CqGeometry,
        token: CommandToken,
        left: usize,
    },
    /// The worker reports the queue pair's state: the answer to MODIFY_QP, or to QUERY_QP.
    QpInfo { token: CommandToken, modify: bool },
    /// The worker gives the queue pair up, which then is as new.
    ResetQp { qpn: Qpn },
    /// The worker gives the queue pair up.
    DestroyQp { qpn: Qpn },
    /// No worker can use the old key any more, and no port holds a frame of its memory, or its
    /// driver takes too long to release it.
    QuiescentKey {
        ticket: Retired,
        token: CommandToken,
        left: usize,
        /// Of these, workers whose ports do not release the frames in time.
        late: Vec<usize>,
        /// The memory that the frames refer to.
        regions: Vec<Arc<SharedMemory>>,
        then: QuiescentReply,
    },
    /// All workers passed a barrier; then the shared receive queue's memory is free.
    FreeSrq {
        srq: SrqId,
        token: CommandToken,
        left: usize,
    },
    /// A helper makes the arena, charged as `len` bytes.
    MakeArena { token: CommandToken, len: u64 },
    /// A helper frees the arena.
    FreeArena { token: CommandToken },
    /// Counters of all workers.
    Stats { token: CommandToken, left: usize },
}

/// A request that has no reply yet, and the sequence number that the reply will carry.
pub(super) struct DeferredRequest {
    pub seq: u32,
    pub what: PendingReply,
}
