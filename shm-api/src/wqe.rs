//! Work queue elements: the 64-byte slots that applications write into send and
//! receive queues, and their validated private form.
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
//! Atomics: arg0 is the summand or the new value, arg1 what to compare with. Masks
//! other than those of plain 64-bit operations follow in a second slot, in the
//! same order.
//!
//! The client library builds them with [`SendDesc`]; the worker copies a slot
//! once and validates the copy.

use crate::atomic::AtomicArgs;
use bytemuck::{Pod, Zeroable};
use core::mem::{offset_of, size_of};

/// Bytes of a slot.
pub const SLOT: usize = 64;
/// Most SGEs of one work request.
pub const MAX_SGE: usize = 16;
/// Most bytes of inline data.
pub const MAX_INLINE: usize = 256;
/// Inline bytes that fit in the header slot.
pub const INLINE_IN_HEADER: usize = 32;
/// Most slots of one work request.
pub const MAX_SLOTS: usize = 5;

/// One slot as it is in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(64))]
pub struct Slot(pub [u64; 8]);

/// Scatter/gather element: `length` bytes at virtual address `addr` of the
/// memory region with key `lkey`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Pod, Zeroable)]
#[repr(C)]
pub struct Sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// Header slot as it is in shared memory.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub struct WqeHeader {
    pub opcode: u8,
    pub flags: u8,
    pub num_sge: u8,
    pub slots: u8,
    /// Immediate data, or the key to invalidate (at the peer, or here for LocalInv).
    pub imm: u32,
    pub wr_id: u64,
    pub remote_addr: u64,
    pub rkey: u32,
    /// Total bytes; the daemon recomputes it unless the data is inline.
    pub length: u32,
    pub sge0: Sge,
    /// Atomics: add or swap operand, compare operand.
    pub args: [u64; 2],
}

const _: () = assert!(size_of::<Slot>() == SLOT && size_of::<WqeHeader>() == SLOT);
const _: () = assert!(size_of::<Sge>() == 16);
const _: () = assert!(offset_of!(WqeHeader, wr_id) == 8 && offset_of!(WqeHeader, rkey) == 24);
const _: () = assert!(offset_of!(WqeHeader, sge0) == SLOT - INLINE_IN_HEADER);
const _: () = assert!(1 + (MAX_SGE - 1).div_ceil(4) == MAX_SLOTS);
const _: () = assert!((MAX_INLINE - INLINE_IN_HEADER).div_ceil(SLOT) < MAX_SLOTS);

/// What a work request does. Zero is no opcode: a slot never written is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Opcode {
    Write = 1,
    Read = 2,
    Send = 3,
    SendWithInv = 4,
    WriteWithImm = 5,
    SendWithImm = 6,
    FetchAdd = 7,
    CmpSwap = 8,
    LocalInv = 9,
    /// Fast registration of pages ([`crate::FastReg`]).
    RegMr = 10,
    /// Binds or unbinds a memory window ([`crate::BindMw`]).
    BindMw = 11,
    ReadWithInv = 12,
}

/// Opcode byte of a receive work request.
pub const OPCODE_RECV: u8 = 0x80;

impl Opcode {
    /// The opcode with that number.
    #[inline]
    pub fn from_u8(v: u8) -> Option<Opcode> {
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
        ALL.get(usize::from(v).wrapping_sub(1)).copied()
    }

    /// Whether it changes a key of this side, and sends nothing.
    #[inline]
    pub fn is_local(self) -> bool {
        matches!(self, Opcode::LocalInv | Opcode::RegMr | Opcode::BindMw)
    }

    /// Whether it takes [`Data::Local`].
    #[inline]
    fn takes_local(self) -> bool {
        matches!(self, Opcode::RegMr | Opcode::BindMw)
    }

    /// Whether it is an operation of RFC 7306 on one 64-bit word.
    #[inline]
    pub fn is_atomic(self) -> bool {
        matches!(self, Opcode::FetchAdd | Opcode::CmpSwap)
    }

    /// Whether an answer of the peer, beyond an acknowledgement, completes it.
    #[inline]
    pub fn awaits_answer(self) -> bool {
        matches!(self, Opcode::Read | Opcode::ReadWithInv) || self.is_atomic()
    }

    /// Whether it carries data from local memory to the peer, so that inline
    /// data makes sense.
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

/// Flags of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WrFlags(pub u8);

impl WrFlags {
    pub const NONE: WrFlags = WrFlags(0);
    /// A completion is wanted even when it succeeds.
    pub const SIGNALED: WrFlags = WrFlags(1);
    /// The peer's completion is a solicited event (Send with SE).
    pub const SOLICITED: WrFlags = WrFlags(2);
    /// Starts only after all earlier reads and atomics completed.
    pub const FENCE: WrFlags = WrFlags(4);
    /// The data is in the work request.
    pub const INLINE: WrFlags = WrFlags(8);
    const ALL: u8 = 15;

    /// Whether all bits of `f` are set.
    #[inline]
    pub fn contains(self, f: WrFlags) -> bool {
        self.0 & f.0 == f.0
    }
}

impl std::ops::BitOr for WrFlags {
    type Output = WrFlags;
    fn bitor(self, o: WrFlags) -> WrFlags {
        WrFlags(self.0 | o.0)
    }
}

/// Why a work request was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WqeError {
    #[error("opcode {0} does not exist")]
    BadOpcode(u8),
    #[error("unknown flag bits {0:#04x}")]
    BadFlags(u8),
    #[error("the request says {said} slots, its contents take {takes}")]
    BadSlotCount { said: u8, takes: u8 },
    #[error("{0} scatter/gather elements, at most 16 are allowed")]
    TooManySge(usize),
    #[error("{0} bytes of inline data, at most 256 are allowed")]
    InlineTooLong(usize),
    #[error("inline data makes no sense with this opcode")]
    InlineNotAllowed,
    #[error("operands belong to FetchAdd and CmpSwap, which take one element of 8 bytes")]
    BadAtomic,
    #[error("what BIND_MW and REG_MR take belongs to them alone")]
    BadLocal,
    #[error("the elements add up to 4 GiB or more")]
    LengthOverflow,
    #[error("the ring ends in the middle of the request")]
    Truncated,
}

#[inline]
fn slots_for_sges(n: usize) -> usize {
    1 + n.saturating_sub(1).div_ceil(4)
}

#[inline]
fn slots_for_inline(n: usize) -> usize {
    1 + n.saturating_sub(INLINE_IN_HEADER).div_ceil(SLOT)
}

/// Slots that the largest request with these limits takes.
pub fn slots_per_request(max_sge: usize, max_inline: usize) -> usize {
    slots_for_sges(max_sge).max(slots_for_inline(max_inline))
}

/// Where a request's data comes from.
#[derive(Debug, Clone, Copy)]
pub enum Data<'a> {
    Sges(&'a [Sge]),
    Inline(&'a [u8]),
    /// An atomic: where the old value goes, and the operands.
    Atomic(Sge, AtomicArgs),
    /// What BIND_MW and REG_MR work on; see [`crate::local_wqe`].
    Local(Sge),
}

/// A send work request on its way into the ring.
#[derive(Debug, Clone, Copy)]
pub struct SendDesc<'a> {
    pub opcode: Opcode,
    /// INLINE is set by the encoder.
    pub flags: WrFlags,
    pub wr_id: u64,
    /// Immediate data or the key to invalidate.
    pub imm: u32,
    pub remote_addr: u64,
    pub rkey: u32,
    pub data: Data<'a>,
}

impl<'a> SendDesc<'a> {
    /// SEND, signaled.
    pub fn send(wr_id: u64, data: Data<'a>) -> Self {
        let opcode = Opcode::Send;
        let flags = WrFlags::SIGNALED;
        SendDesc {
            opcode,
            flags,
            wr_id,
            imm: 0,
            remote_addr: 0,
            rkey: 0,
            data,
        }
    }

    /// RDMA WRITE, signaled.
    pub fn write(wr_id: u64, data: Data<'a>, remote_addr: u64, rkey: u32) -> Self {
        SendDesc {
            opcode: Opcode::Write,
            remote_addr,
            rkey,
            ..Self::send(wr_id, data)
        }
    }

    /// RDMA READ into `sges`, signaled.
    pub fn read(wr_id: u64, sges: &'a [Sge], remote_addr: u64, rkey: u32) -> Self {
        let data = Data::Sges(sges);
        SendDesc {
            opcode: Opcode::Read,
            remote_addr,
            rkey,
            ..Self::send(wr_id, data)
        }
    }

    /// RDMA WRITE that completes a receive work request with `imm`.
    pub fn write_with_imm(
        wr_id: u64,
        data: Data<'a>,
        remote_addr: u64,
        rkey: u32,
        imm: u32,
    ) -> Self {
        SendDesc {
            opcode: Opcode::WriteWithImm,
            imm,
            ..Self::write(wr_id, data, remote_addr, rkey)
        }
    }

    /// SEND with immediate data.
    pub fn send_with_imm(wr_id: u64, data: Data<'a>, imm: u32) -> Self {
        SendDesc {
            opcode: Opcode::SendWithImm,
            imm,
            ..Self::send(wr_id, data)
        }
    }

    /// Adds to the 64-bit word at `remote_addr`; the old value goes to `sge`.
    pub fn fetch_add(wr_id: u64, sge: Sge, remote_addr: u64, rkey: u32, add: u64) -> Self {
        SendDesc {
            opcode: Opcode::FetchAdd,
            remote_addr,
            rkey,
            ..Self::send(wr_id, Data::Atomic(sge, AtomicArgs::fetch_add(add)))
        }
    }

    /// Writes `swap` to the 64-bit word at `remote_addr` if it holds `compare`; the
    /// old value goes to `sge` either way.
    pub fn cmp_swap(
        wr_id: u64,
        sge: Sge,
        remote_addr: u64,
        rkey: u32,
        compare: u64,
        swap: u64,
    ) -> Self {
        SendDesc {
            opcode: Opcode::CmpSwap,
            remote_addr,
            rkey,
            ..Self::send(
                wr_id,
                Data::Atomic(sge, AtomicArgs::cmp_swap(compare, swap)),
            )
        }
    }

    /// RDMA READ into one element, whose key is invalidated when the data is there.
    pub fn read_with_inv(wr_id: u64, sge: &'a [Sge; 1], remote_addr: u64, rkey: u32) -> Self {
        SendDesc {
            opcode: Opcode::ReadWithInv,
            ..Self::read(wr_id, sge, remote_addr, rkey)
        }
    }

    /// Invalidates a key of this side, after everything posted before it completed.
    pub fn local_inv(wr_id: u64, key: u32) -> Self {
        SendDesc {
            opcode: Opcode::LocalInv,
            imm: key,
            ..Self::send(wr_id, Data::Sges(&[]))
        }
    }

    /// The same with other flags.
    pub fn flags(self, flags: WrFlags) -> Self {
        SendDesc { flags, ..self }
    }
}

impl SendDesc<'_> {
    /// Slots it takes; refuses what could not be parsed back.
    #[inline]
    pub fn slots(&self) -> Result<u32, WqeError> {
        match self.data {
            Data::Atomic(_, a) if self.opcode.is_atomic() => Ok(slots_for_atomic(self.opcode, &a)),
            Data::Atomic(..) => Err(WqeError::BadAtomic),
            _ if self.opcode.is_atomic() => Err(WqeError::BadAtomic),
            Data::Local(_) if self.opcode.takes_local() => Ok(1),
            Data::Local(_) => Err(WqeError::BadLocal),
            _ if self.opcode.takes_local() => Err(WqeError::BadLocal),
            Data::Sges(s) if s.len() > MAX_SGE => Err(WqeError::TooManySge(s.len())),
            Data::Sges(s) => Ok(slots_for_sges(s.len()) as u32),
            Data::Inline(_) if !self.opcode.sends_data() => Err(WqeError::InlineNotAllowed),
            Data::Inline(d) if d.len() > MAX_INLINE => Err(WqeError::InlineTooLong(d.len())),
            Data::Inline(d) => Ok(slots_for_inline(d.len()) as u32),
        }
    }

    /// Hands the slots to `put(i, slot)` in order. Call [`Self::slots`] first.
    #[inline]
    pub fn encode(&self, mut put: impl FnMut(u32, &Slot)) {
        let mut h = WqeHeader {
            opcode: self.opcode as u8,
            flags: self.flags.0 & !WrFlags::INLINE.0,
            imm: self.imm,
            wr_id: self.wr_id,
            remote_addr: self.remote_addr,
            rkey: self.rkey,
            ..Zeroable::zeroed()
        };
        match self.data {
            Data::Sges(s) => encode_sges(h, s, put),
            Data::Local(sge) => {
                h.num_sge = 1;
                h.slots = 1;
                h.sge0 = sge;
                put(0, &bytemuck::cast(h));
            }
            Data::Atomic(sge, a) => {
                h.num_sge = 1;
                h.slots = slots_for_atomic(self.opcode, &a) as u8;
                h.length = sge.length;
                h.sge0 = sge;
                h.args = [a.add_or_swap, a.compare];
                put(0, &bytemuck::cast(h));
                if h.slots > 1 {
                    let (m, n) = (a.add_or_swap_mask, a.compare_mask);
                    put(1, &Slot([m, n, 0, 0, 0, 0, 0, 0]));
                }
            }
            Data::Inline(d) => {
                let d = &d[..d.len().min(MAX_INLINE)];
                h.flags |= WrFlags::INLINE.0;
                h.length = d.len() as u32;
                h.slots = slots_for_inline(d.len()) as u8;
                let mut slot: Slot = bytemuck::cast(h);
                let (first, rest) = d.split_at(d.len().min(INLINE_IN_HEADER));
                bytemuck::bytes_of_mut(&mut slot)[SLOT - INLINE_IN_HEADER..][..first.len()]
                    .copy_from_slice(first);
                put(0, &slot);
                for (i, chunk) in rest.chunks(SLOT).enumerate() {
                    let mut slot = Slot([0; 8]);
                    bytemuck::bytes_of_mut(&mut slot)[..chunk.len()].copy_from_slice(chunk);
                    put(i as u32 + 1, &slot);
                }
            }
        }
    }
}

/// Masks of the plain operations need no slot.
#[inline]
fn slots_for_atomic(op: Opcode, a: &AtomicArgs) -> u32 {
    1 + u32::from((a.add_or_swap_mask, a.compare_mask) != plain_masks(op))
}

#[inline]
fn plain_masks(op: Opcode) -> (u64, u64) {
    if op == Opcode::FetchAdd {
        (0, 0)
    } else {
        (u64::MAX, u64::MAX)
    }
}

#[inline]
fn encode_sges(mut h: WqeHeader, s: &[Sge], mut put: impl FnMut(u32, &Slot)) {
    let s = &s[..s.len().min(MAX_SGE)];
    h.num_sge = s.len() as u8;
    h.slots = slots_for_sges(s.len()) as u8;
    h.length = s.iter().fold(0u32, |n, e| n.wrapping_add(e.length));
    let mut rest: &[Sge] = &[];
    if let Some((first, more)) = s.split_first() {
        h.sge0 = *first;
        rest = more;
    }
    put(0, &bytemuck::cast(h));
    for (i, chunk) in rest.chunks(4).enumerate() {
        let mut four = [Sge::default(); 4];
        four[..chunk.len()].copy_from_slice(chunk);
        put(i as u32 + 1, &Slot(bytemuck::cast(four)));
    }
}

/// A receive work request on its way into the ring.
#[derive(Debug, Clone, Copy)]
pub struct RecvDesc<'a> {
    pub wr_id: u64,
    pub sges: &'a [Sge],
}

impl RecvDesc<'_> {
    /// Slots it takes.
    #[inline]
    pub fn slots(&self) -> Result<u32, WqeError> {
        if self.sges.len() > MAX_SGE {
            return Err(WqeError::TooManySge(self.sges.len()));
        }
        Ok(slots_for_sges(self.sges.len()) as u32)
    }

    /// Hands the slots to `put(i, slot)` in order.
    #[inline]
    pub fn encode(&self, put: impl FnMut(u32, &Slot)) {
        let h = WqeHeader {
            opcode: OPCODE_RECV,
            wr_id: self.wr_id,
            ..Zeroable::zeroed()
        };
        encode_sges(h, self.sges, put);
    }
}

/// SGEs or inline bytes; they never occur together.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct Payload([u64; MAX_INLINE / 8]);

const _: () = assert!(size_of::<Payload>() == MAX_SGE * size_of::<Sge>());

/// A validated send work request in the worker's own memory.
#[derive(Clone, Copy)]
pub struct SendWqe {
    pub wr_id: u64,
    pub remote_addr: u64,
    /// Total bytes, the sum of the SGEs or the inline length.
    pub length: u32,
    pub rkey: u32,
    /// Immediate data, or the key to invalidate (SendWithInv).
    pub imm: u32,
    pub opcode: Opcode,
    pub flags: WrFlags,
    num_sge: u8,
    payload: Payload,
}

impl Default for SendWqe {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for SendWqe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SendWqe")
            .field("opcode", &self.opcode)
            .field("wr_id", &self.wr_id)
            .field("flags", &self.flags)
            .field("length", &self.length)
            .field("remote_addr", &self.remote_addr)
            .field("rkey", &self.rkey)
            .field("sges", &self.sges())
            .finish()
    }
}

impl SendWqe {
    /// A zero-length SEND, to be overwritten by `parse_into` or the setters.
    pub fn new() -> Self {
        SendWqe {
            wr_id: 0,
            remote_addr: 0,
            length: 0,
            rkey: 0,
            imm: 0,
            opcode: Opcode::Send,
            flags: WrFlags::NONE,
            num_sge: 0,
            payload: Payload([0; MAX_INLINE / 8]),
        }
    }

    /// The same request without a ring in between; for tests and in-process use.
    pub fn from_desc(d: &SendDesc<'_>) -> Result<SendWqe, WqeError> {
        let n = d.slots()? as usize;
        let mut slots = [Slot([0; 8]); MAX_SLOTS];
        d.encode(|i, s| slots[i as usize] = *s);
        SendWqe::parse(&slots[..n])
    }

    /// Local memory to gather from (WRITE, SEND) or to scatter to (READ); empty
    /// for inline data.
    #[inline]
    pub fn sges(&self) -> &[Sge] {
        &bytemuck::cast_slice::<u64, Sge>(&self.payload.0)[..usize::from(self.num_sge)]
    }

    /// Inline data, when the INLINE flag is set.
    #[inline]
    pub fn inline_data(&self) -> Option<&[u8]> {
        self.flags
            .contains(WrFlags::INLINE)
            .then(|| &bytemuck::cast_slice::<u64, u8>(&self.payload.0)[..self.length as usize])
    }

    /// Operands of an atomic.
    #[inline]
    pub fn atomic_args(&self) -> Option<AtomicArgs> {
        self.opcode.is_atomic().then(|| AtomicArgs {
            add_or_swap: self.payload.0[2],
            add_or_swap_mask: self.payload.0[3],
            compare: self.payload.0[4],
            compare_mask: self.payload.0[5],
        })
    }

    /// Whether a successful completion is wanted.
    #[inline]
    pub fn is_signaled(&self) -> bool {
        self.flags.contains(WrFlags::SIGNALED)
    }

    /// The key to invalidate at the peer.
    #[inline]
    pub fn inv_rkey(&self) -> Option<u32> {
        (self.opcode == Opcode::SendWithInv).then_some(self.imm)
    }

    /// Validates a private copy of the slots.
    pub fn parse(slots: &[Slot]) -> Result<SendWqe, WqeError> {
        let mut w = SendWqe::new();
        let first = slots.first().ok_or(WqeError::Truncated)?;
        let have = slots.len() as u32;
        w.parse_into(first, have, |i| slots[i as usize])?;
        Ok(w)
    }

    /// Validates `first` and, as far as it names more slots (never more than
    /// `have`), `more(i)` for i in 1.. . Returns the slots consumed. Only the
    /// used part of the payload is written. On error `wr_id` is still valid.
    #[inline]
    pub fn parse_into(
        &mut self,
        first: &Slot,
        have: u32,
        mut more: impl FnMut(u32) -> Slot,
    ) -> Result<u32, WqeError> {
        let h: WqeHeader = bytemuck::cast(*first);
        self.wr_id = h.wr_id;
        let opcode = Opcode::from_u8(h.opcode).ok_or(WqeError::BadOpcode(h.opcode))?;
        if h.flags & !WrFlags::ALL != 0 {
            return Err(WqeError::BadFlags(h.flags));
        }
        self.opcode = opcode;
        self.flags = WrFlags(h.flags);
        self.remote_addr = h.remote_addr;
        self.rkey = h.rkey;
        self.imm = h.imm;
        if opcode.is_atomic() {
            return self.parse_atomic(&h, have, more);
        }
        if opcode.takes_local() {
            return self.parse_local(&h, have);
        }
        if self.flags.contains(WrFlags::INLINE) {
            if !opcode.sends_data() {
                return Err(WqeError::InlineNotAllowed);
            }
            let n = h.length as usize;
            if n > MAX_INLINE {
                return Err(WqeError::InlineTooLong(n));
            }
            let takes = slots_for_inline(n);
            check_slots(h.slots, takes, have)?;
            self.num_sge = 0;
            self.length = h.length;
            // Whole words: the bytes past `length` are never shown.
            self.payload.0[..4].copy_from_slice(&first.0[4..]);
            for i in 1..takes {
                let from = 4 + (i - 1) * 8;
                let to = (from + 8).min(self.payload.0.len());
                self.payload.0[from..to].copy_from_slice(&more(i as u32).0[..to - from]);
            }
            Ok(takes as u32)
        } else {
            let (length, takes) = parse_sges(&h, have, &mut self.payload, more)?;
            self.num_sge = h.num_sge;
            self.length = length;
            Ok(takes)
        }
    }

    fn parse_local(&mut self, h: &WqeHeader, have: u32) -> Result<u32, WqeError> {
        if h.num_sge != 1 || self.flags.contains(WrFlags::INLINE) {
            return Err(WqeError::BadLocal);
        }
        check_slots(h.slots, 1, have)?;
        self.num_sge = 1;
        self.length = 0;
        let sge: [u64; 2] = bytemuck::cast(h.sge0);
        self.payload.0[..2].copy_from_slice(&sge);
        Ok(1)
    }

    fn parse_atomic(
        &mut self,
        h: &WqeHeader,
        have: u32,
        mut more: impl FnMut(u32) -> Slot,
    ) -> Result<u32, WqeError> {
        if h.num_sge != 1 || self.flags.contains(WrFlags::INLINE) {
            return Err(WqeError::BadAtomic);
        }
        let takes = if h.slots == 2 { 2 } else { 1 };
        check_slots(h.slots, takes, have)?;
        let (m, n) = if takes == 2 {
            let s = more(1);
            (s.0[0], s.0[1])
        } else {
            plain_masks(self.opcode)
        };
        self.num_sge = 1;
        self.length = h.sge0.length;
        let sge: [u64; 2] = bytemuck::cast(h.sge0);
        self.payload.0[..6].copy_from_slice(&[sge[0], sge[1], h.args[0], m, h.args[1], n]);
        Ok(takes as u32)
    }
}

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
    h: &WqeHeader,
    have: u32,
    payload: &mut Payload,
    mut more: impl FnMut(u32) -> Slot,
) -> Result<(u32, u32), WqeError> {
    let n = usize::from(h.num_sge);
    if n > MAX_SGE {
        return Err(WqeError::TooManySge(n));
    }
    let takes = slots_for_sges(n);
    check_slots(h.slots, takes, have)?;
    if n == 0 {
        return Ok((0, 1));
    }
    let sges = bytemuck::cast_slice_mut::<u64, Sge>(&mut payload.0);
    sges[0] = h.sge0;
    for i in 1..takes {
        let four: [Sge; 4] = bytemuck::cast(more(i as u32).0);
        let from = 1 + (i - 1) * 4;
        let to = (from + 4).min(n);
        sges[from..to].copy_from_slice(&four[..to - from]);
    }
    let mut length = 0u32;
    for s in &sges[..n] {
        length = length
            .checked_add(s.length)
            .ok_or(WqeError::LengthOverflow)?;
    }
    Ok((length, takes as u32))
}

/// A validated receive work request in the worker's own memory.
#[derive(Clone, Copy)]
pub struct RecvWqe {
    pub wr_id: u64,
    /// Total bytes of all SGEs.
    pub length: u32,
    num_sge: u8,
    payload: Payload,
}

impl Default for RecvWqe {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for RecvWqe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RecvWqe")
            .field("wr_id", &self.wr_id)
            .field("sges", &self.sges())
            .finish()
    }
}

impl RecvWqe {
    /// A receive without memory, to be overwritten.
    pub fn new() -> Self {
        RecvWqe {
            wr_id: 0,
            length: 0,
            num_sge: 0,
            payload: Payload([0; MAX_INLINE / 8]),
        }
    }

    /// The same request without a ring in between.
    pub fn from_desc(d: &RecvDesc<'_>) -> Result<RecvWqe, WqeError> {
        let n = d.slots()? as usize;
        let mut slots = [Slot([0; 8]); MAX_SLOTS];
        d.encode(|i, s| slots[i as usize] = *s);
        RecvWqe::parse(&slots[..n])
    }

    /// Local memory to scatter to.
    #[inline]
    pub fn sges(&self) -> &[Sge] {
        &bytemuck::cast_slice::<u64, Sge>(&self.payload.0)[..usize::from(self.num_sge)]
    }

    /// Validates a private copy of the slots.
    pub fn parse(slots: &[Slot]) -> Result<RecvWqe, WqeError> {
        let mut w = RecvWqe::new();
        let first = slots.first().ok_or(WqeError::Truncated)?;
        w.parse_into(first, slots.len() as u32, |i| slots[i as usize])?;
        Ok(w)
    }

    /// As [`SendWqe::parse_into`].
    #[inline]
    pub fn parse_into(
        &mut self,
        first: &Slot,
        have: u32,
        more: impl FnMut(u32) -> Slot,
    ) -> Result<u32, WqeError> {
        let h: WqeHeader = bytemuck::cast(*first);
        self.wr_id = h.wr_id;
        if h.opcode != OPCODE_RECV {
            return Err(WqeError::BadOpcode(h.opcode));
        }
        if h.flags != 0 {
            return Err(WqeError::BadFlags(h.flags));
        }
        let (length, takes) = parse_sges(&h, have, &mut self.payload, more)?;
        self.num_sge = h.num_sge;
        self.length = length;
        Ok(takes)
    }
}
