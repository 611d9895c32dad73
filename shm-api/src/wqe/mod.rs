//! Work queue elements: the 64-byte slots that applications write into send and receive queues, and
//! their validated private form.
//!
//! ```text
//!  header slot                                   further slots
//!  0  opcode flags num_sge slots  imm/inv_rkey   4 SGEs of 16 bytes each
//!  8  wr_id                                        or
//! 16  remote_addr                                64 bytes of inline data
//! 24  rkey  length
//! 32  sge0 { addr, length, lkey }  \ inline data
//! 48  arg0 arg1 (atomics)          / starts here
//! ```
//!
//! Datagrams: the address handle is in the place of rkey, the number of the destination's queue pair in
//! the low half of remote_addr, and the Q_Key in its high half.
//!
//! Atomics: arg0 is the value to add or the new value, arg1 the value to compare. Masks other than
//! those of plain 64-bit operations follow in a second slot, in the same order.
//!
//! The client library builds the slots with [`SendWr`] and [`RecvWr`]; the worker copies a slot once
//! and validates the copy ([`SendWqe`], [`RecvWqe`]).

mod recv;
mod send;

pub use recv::{RecvWqe, RecvWr};
pub use send::{PlainSend, SendData, SendWqe, SendWr};

use bytemuck::{Pod, Zeroable};
use core::mem::{offset_of, size_of};

/// Bytes of a slot.
pub const SLOT_LEN: usize = 64;
/// Maximum number of SGEs of one work request.
pub const MAX_SGE: usize = 16;
/// Maximum number of bytes of inline data.
pub const MAX_INLINE: usize = 256;
/// Inline bytes that fit in the header slot.
pub const INLINE_IN_HEADER: usize = 32;
/// Maximum number of slots of one work request.
pub const MAX_SLOTS: usize = 5;

/// One slot in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(64))]
pub struct WqeSlot(pub [u64; 8]);

/// Scatter/gather element: `length` bytes at virtual address `addr` of the
/// memory region with key `lkey`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Pod, Zeroable)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[repr(C)]
pub struct Sge {
    /// Virtual address, or offset for ZERO_BASED regions.
    pub addr: u64,
    /// Length in bytes.
    pub length: u32,
    /// Key of the memory region.
    pub lkey: u32,
}

/// Header slot in shared memory.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub struct WqeHeader {
    /// An [`Opcode`], or [`OPCODE_RECV`].
    pub opcode: u8,
    /// [`WrFlags`].
    pub flags: u8,
    /// Number of elements; 1 for atomics and local requests, 0 with inline data.
    pub num_sge: u8,
    /// Number of slots of the request, including this one.
    pub slots: u8,
    /// Immediate data, or the key to invalidate (at the peer, or here for LocalInv).
    pub imm: u32,
    /// Returned in the completion.
    pub wr_id: u64,
    /// Address at the peer, or operand of a local request.
    pub remote_addr: u64,
    /// Key of the memory at the peer.
    pub rkey: u32,
    /// Total bytes; the daemon recomputes it unless the data is inline.
    pub length: u32,
    /// The first element, or the beginning of inline data.
    pub sge0: Sge,
    /// Atomics: add or swap operand, compare operand.
    pub args: [u64; 2],
}

const _: () = assert!(size_of::<WqeSlot>() == SLOT_LEN && size_of::<WqeHeader>() == SLOT_LEN);
const _: () = assert!(size_of::<Sge>() == 16);
const _: () = assert!(offset_of!(WqeHeader, wr_id) == 8 && offset_of!(WqeHeader, rkey) == 24);
const _: () = assert!(offset_of!(WqeHeader, flags) == 1 && offset_of!(WqeHeader, num_sge) == 2);
const _: () = assert!(offset_of!(WqeHeader, slots) == 3 && offset_of!(WqeHeader, imm) == 4);
const _: () = assert!(offset_of!(WqeHeader, remote_addr) == 16 && offset_of!(Sge, length) == 8);
const _: () = assert!(offset_of!(WqeHeader, sge0) == SLOT_LEN - INLINE_IN_HEADER);
const _: () = assert!(1 + (MAX_SGE - 1).div_ceil(4) == MAX_SLOTS);
const _: () = assert!((MAX_INLINE - INLINE_IN_HEADER).div_ceil(SLOT_LEN) < MAX_SLOTS);

/// Operation of a work request. Zero is not an opcode, so a slot that was never written is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[repr(u8)]
pub enum Opcode {
    /// RDMA WRITE.
    Write = 1,
    /// RDMA READ.
    Read = 2,
    /// SEND.
    Send = 3,
    /// SEND that invalidates a key of the peer.
    SendWithInv = 4,
    /// RDMA WRITE that completes a receive request of the peer with immediate data.
    WriteWithImm = 5,
    /// SEND with immediate data.
    SendWithImm = 6,
    /// Adds to a word at the peer (RFC 7306).
    FetchAdd = 7,
    /// Compares and swaps a word at the peer (RFC 7306).
    CmpSwap = 8,
    /// Invalidates a key of this side.
    LocalInv = 9,
    /// Fast registration of pages ([`crate::FastReg`]).
    RegMr = 10,
    /// Binds or unbinds a memory window ([`crate::BindMw`]).
    BindMw = 11,
    /// RDMA READ that invalidates the key of its sink afterwards.
    ReadWithInv = 12,
}

/// Opcode byte of a receive work request.
pub const OPCODE_RECV: u8 = 0x80;

impl Opcode {
    /// The opcode with this number.
    #[inline]
    pub fn from_u8(number: u8) -> Option<Opcode> {
        use Opcode::*;
        const ALL: [Opcode; 12] = [
            Write,
            Read,
            Send,
            SendWithInv,
            WriteWithImm,
            SendWithImm,
            FetchAdd,
            CmpSwap,
            LocalInv,
            RegMr,
            BindMw,
            ReadWithInv,
        ];
        ALL.get(usize::from(number).wrapping_sub(1)).copied()
    }

    /// Returns whether it only changes a local key and sends nothing.
    #[inline]
    pub fn is_local(self) -> bool {
        matches!(self, Opcode::LocalInv | Opcode::RegMr | Opcode::BindMw)
    }

    /// Returns whether it takes [`SendData::Local`].
    #[inline]
    fn takes_local(self) -> bool {
        matches!(self, Opcode::RegMr | Opcode::BindMw)
    }

    /// Returns whether it is an atomic operation of RFC 7306 on one 64-bit word.
    #[inline]
    pub fn is_atomic(self) -> bool {
        matches!(self, Opcode::FetchAdd | Opcode::CmpSwap)
    }

    /// Returns whether it completes with a response of the peer rather than an acknowledgement.
    #[inline]
    pub fn awaits_response(self) -> bool {
        matches!(self, Opcode::Read | Opcode::ReadWithInv) || self.is_atomic()
    }

    /// Returns whether it carries data from local memory to the peer, so that inline data is
    /// possible.
    #[inline]
    pub fn sends_data(self) -> bool {
        !matches!(
            self,
            Opcode::Read
                | Opcode::ReadWithInv
                | Opcode::FetchAdd
                | Opcode::CmpSwap
                | Opcode::LocalInv
                | Opcode::RegMr
                | Opcode::BindMw
        )
    }
}

/// A work request as the client library writes it: [`SendWr`] or [`RecvWr`].
pub trait WorkRequest {
    /// Number of slots of the request. Fails for requests that could not be parsed back.
    fn slot_count(&self) -> Result<u32, WqeError>;

    /// Passes the slots to `put(i, slot)` in order. Call [`Self::slot_count`] first.
    fn encode_slots(&self, put: impl FnMut(u32, &WqeSlot));

    /// The words of a single-slot request with one element, without the operands after it, which are
    /// not read; `None` for other requests.
    fn plain_words(&self) -> Option<[u64; PLAIN_WORDS]>;
}

/// Number of words of a slot up to and including its first element.
pub const PLAIN_WORDS: usize = offset_of!(WqeHeader, args) / 8;

/// Encodes [`WorkRequest::plain_words`]; `remote` is the address and key of memory at the peer.
#[inline(always)]
fn encode_plain(
    (opcode, flags, imm): (u8, WrFlags, u32),
    wr_id: u64,
    remote: (u64, u32),
    sge: Sge,
) -> [u64; PLAIN_WORDS] {
    let join = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    [
        join(u32::from_le_bytes([opcode, flags.0, 1, 1]), imm),
        wr_id,
        remote.0,
        join(remote.1, sge.length),
        sge.addr,
        join(sge.length, sge.lkey),
    ]
}

/// A validated work request in the worker's own memory: [`SendWqe`] or [`RecvWqe`].
pub trait WorkQueueElement: Default {
    /// `wr_id` of the request's completion; valid even after a failed parse.
    fn wr_id(&self) -> u64;

    /// Validates `first` and the further slots that it announces (never more than `available`),
    /// loaded by `more(i)` for i from 1 on. Returns the number of slots consumed. Writes only the
    /// used part of the payload.
    fn parse_into(
        &mut self,
        first: &WqeSlot,
        available: u32,
        more: impl FnMut(u32) -> WqeSlot,
    ) -> Result<u32, WqeError>;

    /// Variant of [`Self::parse_into`] for the most common requests: one slot with one element, not
    /// inline, with an ordinary opcode. `word(i)` loads the i-th 64-bit word of the slot; each is
    /// loaded once. `false`: the request has another form or is invalid, and the element is
    /// unchanged.
    fn parse_plain(&mut self, word: impl Fn(usize) -> u64) -> bool;
}

/// Returns whether the first word of a slot announces one slot with one element. `flags`: the allowed
/// flags.
#[inline(always)]
fn is_plain(first: u64, flags: WrFlags) -> bool {
    const ONE_ELEMENT_ONE_SLOT: u32 = u32::from_le_bytes([0, 0, 1, 1]);
    let looked_at = u32::from_le_bytes([0, !flags.0, 0xff, 0xff]);
    first as u32 & looked_at == ONE_ELEMENT_ONE_SLOT
}

/// Loads the element in the header slot.
#[inline(always)]
fn load_plain_sge(payload: &mut WqePayload, word: impl Fn(usize) -> u64) -> u32 {
    payload.0[0] = word(4);
    payload.0[1] = word(5);
    // `Sge::length` is the lower half of its second word.
    payload.0[1] as u32
}

/// Parses a new element from a private copy of the slots.
fn parse_element<E: WorkQueueElement>(slots: &[WqeSlot]) -> Result<E, WqeError> {
    let mut element = E::default();
    let first = slots.first().ok_or(WqeError::Truncated)?;
    element.parse_into(first, slots.len() as u32, |i| slots[i as usize])?;
    Ok(element)
}

/// The element that a worker would take after `request` was posted.
fn element_of<E: WorkQueueElement>(request: &impl WorkRequest) -> Result<E, WqeError> {
    let count = request.slot_count()? as usize;
    let mut slots = [WqeSlot([0; 8]); MAX_SLOTS];
    request.encode_slots(|i, slot| slots[i as usize] = *slot);
    parse_element(&slots[..count])
}

/// Flags of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct WrFlags(pub u8);

impl WrFlags {
    /// No flag.
    pub const NONE: WrFlags = WrFlags(0);
    /// The request generates a completion even when it succeeds.
    pub const SIGNALED: WrFlags = WrFlags(1);
    /// The peer's completion is a solicited event (Send with SE).
    pub const SOLICITED: WrFlags = WrFlags(2);
    /// The request starts only after all earlier reads and atomics completed.
    pub const FENCE: WrFlags = WrFlags(4);
    /// The data is in the work request.
    pub const INLINE: WrFlags = WrFlags(8);
    const ALL: u8 = 15;

    /// Returns whether all bits of `flags` are set.
    #[inline]
    pub fn contains(self, flags: WrFlags) -> bool {
        self.0 & flags.0 == flags.0
    }
}

impl std::ops::BitOr for WrFlags {
    type Output = WrFlags;
    fn bitor(self, other: WrFlags) -> WrFlags {
        WrFlags(self.0 | other.0)
    }
}

/// Reason why a work request was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WqeError {
    /// The opcode does not exist.
    #[error("opcode {0} does not exist")]
    BadOpcode(u8),
    /// A flag bit does not exist.
    #[error("unknown flag bits {0:#04x}")]
    BadFlags(u8),
    /// The slot count does not fit the contents.
    #[error("the request announces {said} slots, but its contents take {takes}")]
    BadSlotCount {
        /// Number of slots in the header.
        said: u8,
        /// Number of slots that the contents take.
        takes: u8,
    },
    /// More than [`MAX_SGE`] elements.
    #[error("{0} scatter/gather elements, at most 16 are allowed")]
    TooManySge(usize),
    /// More than [`MAX_INLINE`] bytes of inline data.
    #[error("{0} bytes of inline data, at most 256 are allowed")]
    InlineTooLong(usize),
    /// Inline data with an opcode that does not send data.
    #[error("inline data is not allowed with this opcode")]
    InlineNotAllowed,
    /// Operands with an opcode that is not an atomic, or a malformed atomic.
    #[error(
        "operands are only allowed with FetchAdd and CmpSwap, which take one element of 8 bytes"
    )]
    BadAtomic,
    /// A malformed local request, or its operands with another opcode.
    #[error("malformed BIND_MW or REG_MR, or their operands with another opcode")]
    BadLocal,
    /// The lengths of the elements overflow.
    #[error("the elements add up to 4 GiB or more")]
    LengthOverflow,
    /// The ring ends before the request does.
    #[error("the ring ends in the middle of the request")]
    Truncated,
}

#[inline]
fn slots_for_sges(count: usize) -> usize {
    1 + count.saturating_sub(1).div_ceil(4)
}

#[inline]
fn slots_for_inline(len: usize) -> usize {
    1 + len.saturating_sub(INLINE_IN_HEADER).div_ceil(SLOT_LEN)
}

/// Number of slots of the largest request within these limits.
pub fn slots_per_request(max_sge: usize, max_inline: usize) -> usize {
    slots_for_sges(max_sge).max(slots_for_inline(max_inline))
}

#[inline]
fn encode_sges(mut header: WqeHeader, sges: &[Sge], mut put: impl FnMut(u32, &WqeSlot)) {
    let sges = &sges[..sges.len().min(MAX_SGE)];
    header.num_sge = sges.len() as u8;
    header.slots = slots_for_sges(sges.len()) as u8;
    header.length = sges
        .iter()
        .fold(0u32, |total, sge| total.wrapping_add(sge.length));
    let mut rest: &[Sge] = &[];
    if let Some((first, more)) = sges.split_first() {
        header.sge0 = *first;
        rest = more;
    }
    put(0, &bytemuck::cast(header));
    for (i, chunk) in rest.chunks(4).enumerate() {
        let mut four = [Sge::default(); 4];
        four[..chunk.len()].copy_from_slice(chunk);
        put(i as u32 + 1, &WqeSlot(bytemuck::cast(four)));
    }
}

/// SGEs or inline bytes; they never occur together.
#[derive(Clone, Copy)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[repr(C, align(16))]
struct WqePayload([u64; MAX_INLINE / 8]);

const _: () = assert!(size_of::<WqePayload>() == MAX_SGE * size_of::<Sge>());

#[inline]
fn check_slots(said: u8, takes: usize, have: u32) -> Result<(), WqeError> {
    if usize::from(said) != takes {
        return Err(WqeError::BadSlotCount {
            said,
            takes: takes as u8,
        });
    }
    if takes as u32 > have {
        return Err(WqeError::Truncated);
    }
    Ok(())
}

#[inline]
fn parse_sges(
    header: &WqeHeader,
    have: u32,
    payload: &mut WqePayload,
    mut more: impl FnMut(u32) -> WqeSlot,
) -> Result<(u32, u32), WqeError> {
    let count = usize::from(header.num_sge);
    if count > MAX_SGE {
        return Err(WqeError::TooManySge(count));
    }
    let takes = slots_for_sges(count);
    check_slots(header.slots, takes, have)?;
    if count == 0 {
        return Ok((0, 1));
    }
    let sges = bytemuck::cast_slice_mut::<u64, Sge>(&mut payload.0);
    sges[0] = header.sge0;
    for i in 1..takes {
        let four: [Sge; 4] = bytemuck::cast(more(i as u32).0);
        let from = 1 + (i - 1) * 4;
        let to = (from + 4).min(count);
        sges[from..to].copy_from_slice(&four[..to - from]);
    }
    let mut length = 0u32;
    for sge in &sges[..count] {
        length = length
            .checked_add(sge.length)
            .ok_or(WqeError::LengthOverflow)?;
    }
    Ok((length, takes as u32))
}
