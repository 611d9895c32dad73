//! What a queue pair needs from its surroundings.
//!
//! The daemon's worker implements [`QpEnv`] over its rings, its key table and its counts of external
//! buffers; tests implement it over plain memory. It is a generic parameter everywhere: no dynamic
//! dispatch on the data path.

use siw_memory::KeyReader;
use siw_shm::{PlainSend, RecvWqe, SendWqe, Wc};

/// Names the count of references that a port still holds into the memory of one message: payload
/// that leaves as external buffers (DPDK) instead of copies. The environment gives the numbers out;
/// the queue pair passes them on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ExtBufRef(pub u32);

impl ExtBufRef {
    /// Nothing is counted: no part of the message is referenced in place.
    pub const NONE: ExtBufRef = ExtBufRef(u32::MAX);
}

/// An affiliated asynchronous event of a queue pair (ibv_get_async_event(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QpEvent {
    /// IBV_EVENT_QP_FATAL: a local error or an error of the stream ended the queue pair.
    QpFatal,
    /// IBV_EVENT_QP_REQ_ERR: the peer broke the protocol, or reported that this side did.
    QpReqErr,
    /// IBV_EVENT_QP_ACCESS_ERR: a remote protection error, found here or reported by the peer.
    QpAccessErr,
    /// IBV_EVENT_SQ_DRAINED.
    SqDrained,
}

/// A work queue holds what no correct client produces: the client is broken or hostile. The queue pair
/// goes to ERROR, and nothing more is read from the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RingFault {
    /// The indices are impossible: the daemon closes the client.
    #[error(
        "the indices of the work queue are impossible; the client must recreate its queue pair"
    )]
    InvalidIndex,
    /// A work request cannot be read. It completes in error when it is its turn.
    #[error("work request {wr_id:#x} cannot be read; the client must recreate its queue pair")]
    InvalidRequest {
        /// Identifies the request in its completion.
        wr_id: u64,
    },
}

/// What a queue pair needs from its worker.
pub trait QpEnv {
    /// The memory keys.
    fn keys(&self) -> &KeyReader;

    /// Takes one validated work request out of the send queue, into memory of the environment (one
    /// scratch for a whole worker will do: the queue pair keeps a compact copy). `Ok(None)`: the ring
    /// is empty. A fault is returned once; the ring is empty from then on.
    fn next_send(&mut self) -> Result<Option<&SendWqe>, RingFault>;

    /// A copy of what [`next_send`](Self::next_send) would take, if it is of the kind that is posted most;
    /// [`take_peeked_send`](Self::take_peeked_send) takes it out. `None`: `next_send` tells what is there.
    fn peek_plain_send(&mut self) -> Option<PlainSend>;

    /// Takes out what [`peek_plain_send`](Self::peek_plain_send) returned.
    fn take_peeked_send(&mut self);

    /// Takes one receive work request out of the receive queue, or out of the shared receive queue,
    /// likewise; but one that cannot be read has completed when the fault is returned.
    fn next_recv(&mut self) -> Result<Option<&RecvWqe>, RingFault>;

    /// As [`next_recv`](Self::next_recv), for the flush of a queue pair in ERROR: a shared receive
    /// queue gives nothing then, since its requests belong to all of its queue pairs.
    fn next_flushed_recv(&mut self) -> Result<Option<&RecvWqe>, RingFault> {
        self.next_recv()
    }

    /// So many calls of [`complete_send`](Self::complete_send) follow at once, each for a work request
    /// that succeeded: what they have in common is done here, once.
    fn announce_completions(&mut self, _count: u32) {}

    /// One more send work request is finished: called exactly once for each, in posting order.
    /// `None`: it was unsignalled and succeeded, only its slot is free again.
    fn complete_send(&mut self, cqe: Option<&Wc>);

    /// One more receive work request is finished.
    fn complete_recv(&mut self, cqe: &Wc);

    /// The message that is counted here is acknowledged: may it complete now? False: a port may still
    /// read the memory, and the environment sees to it that
    /// [`QueuePair::poll_releases`](crate::QueuePair::poll_releases) is called when that may have
    /// changed, whether or not anything else happens to the queue pair. Never called with
    /// [`ExtBufRef::NONE`].
    fn is_released(&mut self, ext_buf_ref: ExtBufRef) -> bool;

    /// A count for a message of `len` bytes that may be sent from registered memory where it lies;
    /// [`ExtBufRef::NONE`] where it is copied into frames.
    fn alloc_ext_buf_ref(&mut self, len: u32) -> ExtBufRef {
        let _ = len;
        ExtBufRef::NONE
    }

    /// [`alloc_ext_buf_ref`](Self::alloc_ext_buf_ref) counts no messages of this length.
    fn copies_payload(&self, len: u32) -> bool {
        let _ = len;
        true
    }

    /// The message is finished. Where ports still hold references, because it was flushed or because
    /// a reference does not outlive the acknowledgement on this link, the environment keeps the memory
    /// mapped until they are gone.
    fn free_ext_buf_ref(&mut self, ext_buf_ref: ExtBufRef) {
        let _ = ext_buf_ref;
    }

    /// A completion waits until no other worker uses a key any more that was invalidated:
    /// [`QueuePair::poll_quiescence`](crate::QueuePair::poll_quiescence) is to be called in each batch
    /// until it says that nothing waits.
    fn await_quiescence(&mut self) {}

    /// A message waits for a receive work request:
    /// [`QueuePair::receive_in_order`](crate::QueuePair::receive_in_order) is to be called again and
    /// again while [`QueuePair::awaits_receive`](crate::QueuePair::awaits_receive).
    fn await_receive(&mut self) {}

    /// Posts an asynchronous event to the consumer.
    fn post_event(&mut self, event: QpEvent);
}
