//! Records that a queue pair hands to TCP, and the frame builder that their bytes go into.
//!
//! TCP keeps records, not bytes: an [`FpduRecord`] names the message, and the part of it, that an
//! FPDU carries. [`QueuePair::build_fpdus`](crate::QueuePair::build_fpdus) generates the bytes each
//! time TCP sends the FPDU, so a retransmission has the same FPDU boundaries and nothing is buffered
//! twice.

use crate::environment::ExtBufRef;
use crate::mpa::fpdu;
use crate::mpa::marker::MarkerPosition;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use siw_shm::SharedMemory;
use std::ops::Range;
use std::sync::Arc;

/// A record of TCP's send buffer: kept until acknowledged; its bytes are built at each transmission.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum TxRecord {
    /// FPDUs; [`QueuePair::build_fpdus`](crate::QueuePair::build_fpdus) makes their bytes.
    Fpdus(FpduRun),
    /// Literal bytes: an MPA frame, or a Terminate sent without a queue pair.
    Stream(Box<[u8]>),
}

/// Kind of message that an FPDU carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FpduKind {
    /// A segment of a send-queue work request (Write, Send kinds, Read and Atomic Requests).
    Request,
    /// The Immediate Data message of a send-queue work request (RFC 7306 section 6).
    Immediate,
    /// A segment of a Read Response, or an Atomic Response.
    Response,
    /// The ready-to-receive message (RFC 6581 section 9.2), or the zero-length Write that wakes a
    /// silent peer.
    Rtr,
    /// The Terminate message.
    Terminate,
}

/// Number of a message in its queue, which [`FpduKind`] selects: a work request of the send queue, or
/// a Read or Atomic of the response queue. Numbers wrap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct MessageSlot(pub u32);

impl MessageSlot {
    /// Number of messages from `base` to this one.
    #[inline]
    pub(crate) fn index_from(self, base: MessageSlot) -> usize {
        self.0.wrapping_sub(base.0) as usize
    }

    /// The slot `count` messages after this one.
    #[inline]
    pub(crate) fn advanced_by(self, count: usize) -> MessageSlot {
        MessageSlot(self.0.wrapping_add(count as u32))
    }
}

/// One FPDU by reference: a message and the part of it that the FPDU carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FpduRecord {
    /// Kind of message.
    pub kind: FpduKind,
    /// This is the last segment of its message.
    pub is_last: bool,
    /// ULPDU_Length field: octets of DDP header and payload.
    pub ulpdu_len: u16,
    /// Number of the message.
    pub slot: MessageSlot,
    /// Offset of the payload in the message, in bytes.
    pub offset: u32,
    /// Position of its first octet relative to the stream's markers.
    pub marker_position: MarkerPosition,
}

impl FpduRecord {
    /// Returns whether its payload, behind a header of `header_len` octets, lies within the first `sent` bytes
    /// of a message.
    pub(crate) fn is_part_of(&self, header_len: usize, sent: u32) -> bool {
        let payload_len = u32::from(self.ulpdu_len).checked_sub(header_len as u32);
        let end = payload_len.and_then(|len| self.offset.checked_add(len));
        end.is_some_and(|end| end <= sent)
    }

    /// Octets of the stream that the FPDU takes, markers included.
    #[inline]
    pub fn wire_len(&self) -> usize {
        self.marker_position
            .marked_len(fpdu::wire_len(self.ulpdu_len))
    }
}

/// Consecutive FPDUs of equal length: a single one, or segments of one message, or single-FPDU
/// messages of the same kind from consecutive work requests. A run of several FPDUs has no markers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub struct FpduRun {
    first: FpduRecord,
    count: u16,
    /// Octets of payload in each FPDU, if there are several.
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
    /// A run of `count` FPDUs with `payload_len` octets of payload each, starting with `first`.
    #[inline]
    pub(crate) fn new(first: FpduRecord, count: u16, payload_len: u16) -> Self {
        debug_assert!(count <= 1 || !first.marker_position.has_markers());
        FpduRun {
            first,
            count,
            payload_len,
        }
    }

    /// Kind of message that each FPDU carries.
    #[inline]
    pub fn kind(&self) -> FpduKind {
        self.first.kind
    }

    /// Number of FPDUs.
    #[inline]
    pub fn count(&self) -> u16 {
        self.count
    }

    /// Returns whether each FPDU ends a message; otherwise none does.
    #[inline]
    pub fn ends_messages(&self) -> bool {
        self.first.is_last
    }

    /// Octets of the stream that each FPDU takes, markers included.
    #[inline]
    pub fn unit_len(&self) -> u32 {
        self.first.wire_len() as u32
    }

    /// Returns the FPDU with this number, counted from 0.
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

    /// The FPDUs in `len` bytes from `offset` on, if these are whole FPDUs.
    #[inline]
    pub fn whole_units(&self, offset: u32, len: u32) -> Option<Range<u16>> {
        let unit_len = self.unit_len();
        if self.count == 1 {
            return (offset == 0 && len == unit_len).then_some(0..1);
        }
        let is_whole = offset.is_multiple_of(unit_len) && len.is_multiple_of(unit_len);
        is_whole.then(|| {
            let start = (offset / unit_len) as u16;
            start..start + (len / unit_len) as u16
        })
    }
}

impl Serialize for FpduRun {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        FpduRun::serialize(self, serializer)
    }
}

/// Refuses runs that `FpduRun::new` does not make.
impl<'de> Deserialize<'de> for FpduRun {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let run = FpduRun::deserialize(deserializer)?;
        let first = &run.first;
        let is_run = first.kind == FpduKind::Request
            && !first.marker_position.has_markers()
            && (1..first.ulpdu_len).contains(&run.payload_len);
        if run.count == 1 || run.count > 1 && is_run {
            Ok(run)
        } else {
            Err(de::Error::custom("no run of FPDUs is like this"))
        }
    }
}

/// An FPDU that may be sent now; see [`QueuePair::next_record`](crate::QueuePair::next_record).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutgoingFpdu {
    /// Record that TCP keeps, and passes to
    /// [`QueuePair::build_fpdus`](crate::QueuePair::build_fpdus) at each transmission.
    pub record: FpduRecord,
    /// [`FpduRecord::wire_len`], already computed.
    pub wire_len: u32,
}

/// A frame under construction. Calls come in wire order.
pub trait FrameBuilder {
    /// Appends room for the caller to write FPDUs of `len` bytes each: as many as fit into one piece,
    /// at most `most`. `None`: not even one fits here; nothing was appended, and the caller appends it
    /// part by part with [`reserve`](Self::reserve).
    fn reserve_fpdus(&mut self, len: usize, most: usize) -> Option<&mut [u8]>;

    /// Appends room for the caller to write a part of an FPDU: the next piece of the frame, of at least
    /// one byte and at most `want`. `None`: there is no room, and the frame will be dropped.
    fn reserve(&mut self, want: usize) -> Option<&mut [u8]>;

    /// Removes the last `len` bytes of the room that was appended last.
    fn withdraw(&mut self, len: usize);

    /// Appends a reference to `len` bytes at `offset` of `region`, counted for `ext_buf_ref`, instead
    /// of a copy. `false`: nothing was appended, and the caller copies the bytes into memory from
    /// [`reserve`](Self::reserve). The device reads the bytes after the CRC was computed, so this is
    /// called only for memory that must not change until the message completes.
    fn append_reference(
        &mut self,
        region: &Arc<SharedMemory>,
        offset: usize,
        len: usize,
        ext_buf_ref: ExtBufRef,
    ) -> bool;
}
