//! What a queue pair hands to TCP, and where the bytes of it are built.
//!
//! TCP keeps records, not bytes: a [`FpduRecord`] says which part of which message an FPDU carries.
//! [`QueuePair::build_fpdu`](crate::QueuePair::build_fpdu) makes its bytes whenever TCP sends it, so
//! that a retransmission has the same boundaries and nothing is buffered twice.

use crate::environment::ExtBufRef;
use crate::mpa::fpdu;
use crate::mpa::marker::MarkerPosition;
use siw_shm::SharedMemory;
use std::sync::Arc;

/// A record of the send queue of TCP: kept until it is acknowledged, built when it is sent.
#[derive(Debug, Clone)]
pub enum TxRecord {
    /// FPDUs; [`QueuePair::build_fpdu`](crate::QueuePair::build_fpdu) makes the bytes of each.
    Fpdus(FpduRun),
    /// Bytes as they are: an MPA frame, or a Terminate sent without a queue pair.
    Stream(Box<[u8]>),
}

/// What an FPDU carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FpduKind {
    /// A segment of a send-queue work request (Write, Send kinds, Read and Atomic Requests).
    Request,
    /// The Immediate Data message of a send-queue work request (RFC 7306 section 6).
    Immediate,
    /// A segment of a Read Response, or an Atomic Response.
    Response,
    /// The ready-to-receive message (RFC 6581 section 9.2), or a Write of nothing like it.
    Rtr,
    /// The Terminate message.
    Terminate,
}

/// Number of a message in its queue: of a work request in the send queue, or of a Read or Atomic in
/// the queue of responses, as [`FpduKind`] says. Numbers wrap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct MessageSlot(pub u32);

impl MessageSlot {
    /// Messages that lie between `base` and this one.
    #[inline]
    pub(crate) fn index_from(self, base: MessageSlot) -> usize {
        self.0.wrapping_sub(base.0) as usize
    }

    /// The slot `count` messages behind this one.
    #[inline]
    pub(crate) fn advanced_by(self, count: usize) -> MessageSlot {
        MessageSlot(self.0.wrapping_add(count as u32))
    }
}

/// One FPDU by reference: which message, and which part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FpduRecord {
    /// What it carries.
    pub kind: FpduKind,
    /// It is the last segment of its message.
    pub is_last: bool,
    /// ULPDU_Length field: octets of DDP header and payload.
    pub ulpdu_len: u16,
    /// The message.
    pub slot: MessageSlot,
    /// Offset of the payload in the message, in bytes.
    pub offset: u32,
    /// Where in the stream it starts, as far as markers are concerned.
    pub marker_position: MarkerPosition,
}

impl FpduRecord {
    /// Octets that it takes in the stream, markers included.
    #[inline]
    pub fn wire_len(&self) -> usize {
        self.marker_position
            .marked_len(fpdu::wire_len(self.ulpdu_len))
    }
}

/// FPDUs of one length that follow one another: a single one; segments of one message; or messages of one
/// kind that are one FPDU each, of work requests that follow one another. Several have no markers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FpduRun {
    first: FpduRecord,
    count: u16,
    /// Octets of payload in each, if there are several.
    payload_len: u16,
}

impl From<FpduRecord> for FpduRun {
    #[inline]
    fn from(first: FpduRecord) -> Self {
        FpduRun {
            first,
            count: 1,
            payload_len: 0,
        }
    }
}

impl FpduRun {
    /// `count` FPDUs, each with `payload_len` octets of payload, that begin with `first`.
    #[inline]
    pub(crate) fn new(first: FpduRecord, count: u16, payload_len: u16) -> Self {
        debug_assert!(count <= 1 || !first.marker_position.has_markers());
        FpduRun {
            first,
            count,
            payload_len,
        }
    }

    /// What each carries.
    #[inline]
    pub fn kind(&self) -> FpduKind {
        self.first.kind
    }

    /// How many FPDUs there are.
    #[inline]
    pub fn count(&self) -> u16 {
        self.count
    }

    /// Each ends a message; else none does.
    #[inline]
    pub fn ends_messages(&self) -> bool {
        self.first.is_last
    }

    /// Octets that each takes in the stream, markers included.
    #[inline]
    pub fn unit_len(&self) -> u32 {
        self.first.wire_len() as u32
    }

    /// The FPDU with this number, from 0 on.
    #[inline]
    pub fn get(&self, index: u16) -> FpduRecord {
        let mut record = self.first;
        if record.is_last {
            record.slot = record.slot.advanced_by(index.into());
        } else {
            record.offset += u32::from(index) * u32::from(self.payload_len);
        }
        record
    }

    /// Octets of payload in each, if there are several.
    #[inline]
    pub(crate) fn payload_len(&self) -> u16 {
        self.payload_len
    }
}

/// An FPDU that may leave now: see [`QueuePair::next_record`](crate::QueuePair::next_record).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutgoingFpdu {
    /// What TCP keeps, and hands to [`QueuePair::build_fpdu`](crate::QueuePair::build_fpdu) whenever
    /// it sends it.
    pub record: FpduRecord,
    /// [`FpduRecord::wire_len`], which is known already.
    pub wire_len: u32,
}

/// A frame under construction. Calls come in wire order.
pub trait FrameBuilder {
    /// Appends a copy of `bytes`: headers, pad, CRC, inline payload.
    fn append_bytes(&mut self, bytes: &[u8]);

    /// Appends a reference to `len` bytes at `offset` of `region`, counted for `ext_buf_ref`, instead
    /// of a copy. False, with nothing appended: the caller copies them, into what
    /// [`reserve`](Self::reserve) gives. Whoever transmits the frame reads them after the CRC was
    /// computed, so this is only asked for memory that must not change until the message completes.
    fn append_reference(
        &mut self,
        region: &Arc<SharedMemory>,
        offset: usize,
        len: usize,
        ext_buf_ref: ExtBufRef,
    ) -> bool;

    /// Of the next `want` bytes, how many [`reserve`](Self::reserve) gives in one piece: all, or
    /// enough for payload behind a marker if one is due; none, if the frame is dropped anyway.
    fn contiguous_room(&mut self, want: usize) -> usize;

    /// Appends `len` bytes that the caller writes: payload that is copied. `None`, if there is no
    /// room for them, has the frame dropped.
    fn reserve(&mut self, len: usize) -> Option<&mut [u8]>;

    /// As [`reserve`](Self::reserve), for a whole FPDU that is copied, if there is room for it in one
    /// piece. `None`, with nothing appended: it goes part by part.
    fn reserve_in_one_piece(&mut self, len: usize) -> Option<&mut [u8]>;

    /// As [`reserve_in_one_piece`](Self::reserve_in_one_piece), for as many FPDUs of `len` bytes as there is
    /// room for, `most` at most.
    fn reserve_fpdus(&mut self, len: usize, most: usize) -> Option<&mut [u8]> {
        let _ = most;
        self.reserve_in_one_piece(len)
    }

    /// Takes the last `len` bytes of what [`reserve_fpdus`](Self::reserve_fpdus) gave out of the frame again.
    fn withdraw(&mut self, len: usize);
}
