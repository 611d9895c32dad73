//! The state of a queue pair as published by the daemon, for any thread of its client.

use super::{
    FAILED_RECEIVES, FAILED_SENDS, OFF_FAILED, OFF_PENDING, OFF_QP_STATE,
    OFF_RECEIVES_BEFORE_FAILURE, OFF_SENDS_BEFORE_FAILURE, OFF_WORKER, OFF_WR_DONE, STATE_LINE_LEN,
    WorkQueueMemory,
};
use crate::ring_memory::RingMemory;
use crate::shared_memory::{OutOfBounds, SharedMemory};
use core::sync::atomic::Ordering;
use siw_lockfree::doorbell;
use std::sync::Arc;

/// The state of a QP as published by the daemon.
pub struct SqWatch {
    queue: WorkQueueMemory,
    state_line: RingMemory,
}

impl SqWatch {
    /// A view of the QP with this send queue and the state line at `offset` of `memory`.
    pub(super) fn new(
        queue: WorkQueueMemory,
        memory: Arc<SharedMemory>,
        offset: usize,
    ) -> Result<SqWatch, OutOfBounds> {
        let state_line = RingMemory::new(memory, offset, STATE_LINE_LEN)?;
        Ok(SqWatch { queue, state_line })
    }

    /// The QP state that the daemon last wrote (`control::QpState` as u32).
    #[inline]
    pub fn qp_state(&self) -> u32 {
        // SAFETY: a multiple of 4 inside the line.
        let word = unsafe { self.state_line.word_at(OFF_QP_STATE) };
        // Pairs with the Release in `set_qp_state`: the worker index was written before.
        word.load(Ordering::Acquire)
    }

    /// Index of the worker whose doorbell ring the QP uses. Read it after [`Self::qp_state`]: the
    /// daemon writes it before RTS.
    #[inline]
    pub fn worker_index(&self) -> u32 {
        // SAFETY: as in `qp_state`.
        let word = unsafe { self.state_line.word_at(OFF_WORKER) };
        // Relaxed: ordered by the Acquire in `qp_state`.
        word.load(Ordering::Relaxed)
    }

    /// Marks the QP as pending without new requests; see [`crate::RqProducer::publish_posted`].
    #[inline]
    pub fn mark_pending(&self) -> bool {
        doorbell::mark_pending(self.queue.header_word(OFF_PENDING))
    }

    /// Send requests finished so far, modulo 2^32.
    #[inline]
    pub fn wr_done(&self) -> u32 {
        // Pairs with the Release in `complete_requests`.
        self.queue.header_word(OFF_WR_DONE).load(Ordering::Acquire)
    }

    /// Number of sends finished before the first one that failed, modulo 2^32. `None`: none of those
    /// that a previous [`Self::wr_done`] counted has failed.
    pub fn sends_before_failure(&self) -> Option<u32> {
        self.before_failure(FAILED_SENDS, OFF_SENDS_BEFORE_FAILURE)
    }

    /// As [`Self::sends_before_failure`], for receives.
    pub fn receives_before_failure(&self) -> Option<u32> {
        self.before_failure(FAILED_RECEIVES, OFF_RECEIVES_BEFORE_FAILURE)
    }

    fn before_failure(&self, flag: u32, offset: usize) -> Option<u32> {
        // SAFETY: multiples of 4 inside the line.
        let (failed, before) = unsafe {
            (
                self.state_line.word_at(OFF_FAILED),
                self.state_line.word_at(offset),
            )
        };
        // Pairs with the Release in `store_state`: the number was written before the flag, and the
        // flag before the count of finished requests.
        let has_failed = failed.load(Ordering::Acquire) & flag != 0;
        has_failed.then(|| before.load(Ordering::Relaxed))
    }
}
