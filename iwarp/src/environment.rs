//! What a queue pair needs from its surroundings, and what it hands to TCP.
//!
//! The daemon's worker implements [`QpEnv`] over its rings, key table and trackers, and
//! [`FrameBuilder`] over mbufs; tests implement both over plain memory. Everything is a generic
//! parameter: no dynamic dispatch on the data path.

use crate::mpa::fpdu;
use crate::mpa::marker::MarkerPosition;
use siw_memory::{KeyReader, RegisteredMemory};
use siw_shm::{RecvWqe, SendWqe, Wc};

/// Counts the references that a port still holds into the buffers of one work request or one read
/// response. The environment gives the numbers out; the queue pair passes them on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ExtBufRef(pub u32);

impl ExtBufRef {
    /// Nobody counts: nothing of this record is referenced in place.
    pub const NONE: ExtBufRef = ExtBufRef(u32::MAX);
}

/// A record of the send queue of TCP: kept until it is acknowledged, (re)built on demand.
#[derive(Debug, Clone)]
pub enum TxRecord {
    /// One FPDU; [`QueuePair::build_fpdu`](crate::QueuePair::build_fpdu) makes its bytes.
    Fpdu(FpduRecord),
    /// Bytes as they are: an MPA frame, or a Terminate sent without a queue pair.
    Stream(Box<[u8]>),
}

/// What an FPDU carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FpduKind {
    /// A segment of a send-queue work request (Write, Send kinds, Read and Atomic Requests).
    Request,
    /// The Immediate Data message of a send-queue work request (RFC 7306).
    Immediate,
    /// A segment of a Read Response, or an Atomic Response.
    Response,
    /// The ready-to-receive message of RFC 6581.
    Rtr,
    /// The Terminate message.
    Terminate,
}

/// One FPDU by reference: which message, which part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FpduRecord {
    /// What it carries.
    pub kind: FpduKind,
    /// Last segment of its message.
    pub is_last: bool,
    /// ULPDU_Length field: DDP header and payload.
    pub ulpdu_len: u16,
    /// Sequence number of the work request or of the read response in its queue.
    pub slot: u32,
    /// Offset of the payload in the message.
    pub offset: u32,
    /// Where in the stream it starts, as far as markers are concerned.
    pub marker_position: MarkerPosition,
}

impl FpduRecord {
    /// Its length on the wire, markers included.
    #[inline]
    pub fn wire_len(&self) -> usize {
        self.marker_position
            .marked_len(fpdu::wire_len(self.ulpdu_len))
    }
}

/// Where a record is built. Calls come in wire order.
pub trait FrameBuilder {
    /// Bytes to copy: headers, pad, CRC, inline payload.
    fn append_bytes(&mut self, b: &[u8]);

    /// `len` bytes of registered memory from `region_off`: referenced in place (counted for
    /// `owner`), or copied when they are few.
    fn append_memory(&mut self, mr: &RegisteredMemory, region_off: u64, len: u32, owner: ExtBufRef);

    /// Of the next `want` bytes, how many [`reserve`](Self::reserve gives in one piece: all, or enough
    /// for payload behind a marker if one is due; none, if the frame is dropped anyway.
    fn contiguous_room(&mut self, want: usize) -> usize;

    /// Room for `len` bytes that the caller writes: payload with markers in it, which is copied.
    /// `None`, if there is none, has the frame dropped.
    fn reserve(&mut self, len: usize) -> Option<&mut [u8]>;
}

/// An affiliated asynchronous event of a queue pair (ibv_get_async_event(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QpEvent {
    /// IBV_EVENT_QP_FATAL: a local or stream error ended the queue pair.
    QpFatal,
    /// IBV_EVENT_QP_REQ_ERR: the peer broke the protocol, or said that we did.
    QpReqErr,
    /// IBV_EVENT_QP_ACCESS_ERR: a remote protection error, found here or told by the peer.
    QpAccessErr,
    /// IBV_EVENT_SQ_DRAINED.
    SqDrained,
}

/// A work queue holds something that cannot be meant: the client is broken or hostile. The queue
/// pair goes to ERROR; the daemon closes the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "work queue is in a state that no correct client produces; the client must recreate its queue pair"
)]
pub struct RingFault;

/// What a queue pair needs from its worker.
pub trait QpEnv {
    /// The memory keys.
    fn keys(&self) -> &KeyReader;

    /// Takes one validated work request out of the send queue, into memory of the environment (one
    /// scratch for a whole worker will do: the queue pair keeps a compact copy). `Ok(None)`: the ring
    /// is empty.
    fn next_send(&mut self) -> Result<Option<&SendWqe>, RingFault>;

    /// Takes one receive work request out of the receive queue (or the SRQ), likewise.
    fn next_recv(&mut self) -> Result<Option<&RecvWqe>, RingFault>;

    /// As [`next_recv`](Self::next_recv), for the flush of a queue pair in ERROR: a shared receive
    /// queue gives nothing then, its requests are everybody's.
    fn next_flushed_recv(&mut self) -> Result<Option<&RecvWqe>, RingFault> {
        self.next_recv()
    }

    /// One more send work request is finished: called exactly once for each, in posting order.
    /// `None`: it was unsignalled and succeeded, only its slot is free again.
    fn complete_send(&mut self, cqe: Option<&Wc>);

    /// One more receive work request is finished.
    fn complete_recv(&mut self, cqe: &Wc);

    /// The port has let go of every buffer of this owner. Never called with [`ExtBufRef::NONE`].
    fn is_released(&self, owner: ExtBufRef) -> bool;

    /// A tracker for a message of `len` bytes that may reference registered memory;
    /// [`ExtBufRef::NONE`] where nothing needs counting, such as messages that are always copied.
    fn alloc_ext_buf_ref(&mut self, len: u32) -> ExtBufRef {
        let _ = len;
        ExtBufRef::NONE
    }

    /// The tracker is done: released, and its message finished.
    fn free_ext_buf_ref(&mut self, owner: ExtBufRef) {
        let _ = owner;
    }

    /// Tells the consumer.
    fn post_event(&mut self, event: QpEvent);
}
