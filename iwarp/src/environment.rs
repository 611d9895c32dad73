//! Interface between a queue pair and the worker that runs it.
//!
//! The daemon's worker implements [`QpEnv`] over its rings, its key table and its counts of external
//! buffers; tests implement it over plain memory. It is always a generic parameter, so the data path
//! has no dynamic dispatch.

use serde::{Deserialize, Serialize};
use siw_memory::KeyReader;
use siw_shm::{PlainSend, RecvWqe, SendWqe, Wc};

/// Identifies the reference count of one message whose payload is sent as external buffers (DPDK)
/// instead of copies: the references that a port still holds into its memory. The environment
/// allocates the numbers; the queue pair passes them on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ExtBufRef(pub u32);

impl ExtBufRef {
    /// No reference count: no part of the message is referenced in place.
    pub const NONE: ExtBufRef = ExtBufRef(u32::MAX);
}

/// An affiliated asynchronous event of a queue pair (ibv_get_async_event(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
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

/// A work queue holds contents that no correct client produces, so the client is broken or hostile.
/// The queue pair goes to ERROR and stops reading the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum RingFault {
    /// The ring indices are invalid: the daemon disconnects the client.
    #[error("the indices of the work queue are invalid; the client must recreate its queue pair")]
    InvalidIndex,
    /// A work request cannot be parsed. It completes in error in its turn.
    #[error("work request {wr_id:#x} cannot be parsed; the client must recreate its queue pair")]
    InvalidRequest {
        /// `wr_id` of the request's completion.
        wr_id: u64,
    },
}

/// Services that the worker provides to a queue pair.
pub trait QpEnv {
    /// The memory keys.
    fn keys(&self) -> &KeyReader;

    /// Takes one validated work request out of the send queue, into memory of the environment (one
    /// scratch buffer per worker is enough: the queue pair keeps a compact copy). `Ok(None)`: the
    /// ring is empty. A fault is returned once; after it the ring reads as empty.
    fn next_send(&mut self) -> Result<Option<&SendWqe>, RingFault>;

    /// Returns a copy of the request that [`next_send`](Self::next_send) would take, if it has the
    /// most common form; [`take_peeked_send`](Self::take_peeked_send) then removes it. `None`: call
    /// `next_send` instead, for an empty ring, a fault or any other form.
    fn peek_plain_send(&mut self) -> Option<PlainSend>;

    /// Removes the request that [`peek_plain_send`](Self::peek_plain_send) returned.
    fn take_peeked_send(&mut self);

    /// Takes one receive work request out of the receive queue or the shared receive queue, like
    /// [`next_send`](Self::next_send). A request that cannot be parsed has already completed when the
    /// fault is returned.
    fn next_recv(&mut self) -> Result<Option<&RecvWqe>, RingFault>;

    /// Variant of [`next_recv`](Self::next_recv) for flushing a queue pair in ERROR: returns nothing
    /// from a shared receive queue, because its requests belong to all of its queue pairs.
    fn next_flushed_recv(&mut self) -> Result<Option<&RecvWqe>, RingFault> {
        self.next_recv()
    }

    /// Announces that `count` calls of [`complete_send`](Self::complete_send) follow at once, each
    /// for a work request that succeeded. The environment does their common work here, once.
    fn announce_completions(&mut self, _count: u32) {}

    /// Finishes one send work request: called exactly once per request, in posting order. `None`: it
    /// was unsignaled and succeeded, so only its slot is freed.
    fn complete_send(&mut self, cqe: Option<&Wc>);

    /// Finishes one receive work request.
    fn complete_recv(&mut self, cqe: &Wc);

    /// Returns whether an acknowledged message with this reference count may complete now. `false`: a
    /// port may still read its memory; the environment then ensures that
    /// [`QueuePair::poll_releases`](crate::QueuePair::poll_releases) is called when that may have
    /// changed, even if nothing else happens to the queue pair. Never called with
    /// [`ExtBufRef::NONE`].
    fn is_released(&mut self, ext_buf_ref: ExtBufRef) -> bool;

    /// Allocates a reference count for a message that is longer than
    /// [`QueuePair::set_copied_up_to`](crate::QueuePair::set_copied_up_to) allows to copy.
    /// [`ExtBufRef::NONE`]: its payload is copied all the same.
    fn alloc_ext_buf_ref(&mut self) -> ExtBufRef {
        ExtBufRef::NONE
    }

    /// Frees the reference count of a finished message. If ports still hold references (the message
    /// was flushed, or this link may complete a message before its references are released), the
    /// environment keeps the memory mapped until they are released.
    fn free_ext_buf_ref(&mut self, ext_buf_ref: ExtBufRef) {
        let _ = ext_buf_ref;
    }

    /// A completion waits until no other worker uses an invalidated key: the environment calls
    /// [`QueuePair::poll_quiescence`](crate::QueuePair::poll_quiescence) in each batch until nothing
    /// waits any more.
    fn await_quiescence(&mut self) {}

    /// A message waits for a receive work request: the environment calls
    /// [`QueuePair::receive_in_order`](crate::QueuePair::receive_in_order) repeatedly while
    /// [`QueuePair::awaits_receive`](crate::QueuePair::awaits_receive).
    fn await_receive(&mut self) {}

    /// Posts an asynchronous event to the consumer.
    fn post_event(&mut self, event: QpEvent);
}
