//! Work requests of send queues: as the client library writes them, and as the worker
//! reads them.

use super::{
    INLINE_IN_HEADER, MAX_INLINE, MAX_SGE, MAX_SLOTS, Opcode, SLOT_LEN, Sge, WqeError, WqeHeader,
    WqePayload, WqeSlot, WrFlags, check_slots, encode_sges, parse_sges, slots_for_inline,
    slots_for_sges,
};
use crate::atomic::AtomicArgs;
use bytemuck::Zeroable;

/// Where a request's data comes from.
#[derive(Debug, Clone, Copy)]
pub enum SendData<'a> {
    Sges(&'a [Sge]),
    Inline(&'a [u8]),
    /// An atomic: where the old value goes, and the operands.
    Atomic(Sge, AtomicArgs),
    /// What BIND_MW and REG_MR work on; see [`crate::local_wqe`].
    Local(Sge),
}

/// A send work request on its way into the ring.
#[derive(Debug, Clone, Copy)]
pub struct SendWr<'a> {
    pub opcode: Opcode,
    /// INLINE is set by the encoder.
    pub with_flags: WrFlags,
    pub wr_id: u64,
    /// Immediate data or the key to invalidate.
    pub imm: u32,
    pub remote_addr: u64,
    pub rkey: u32,
    pub data: SendData<'a>,
}

impl<'a> SendWr<'a> {
    /// SEND, signaled.
    pub fn send(wr_id: u64, data: SendData<'a>) -> Self {
        let opcode = Opcode::Send;
        let flags = WrFlags::SIGNALED;
        SendWr {
            opcode,
            with_flags: flags,
            wr_id,
            imm: 0,
            remote_addr: 0,
            rkey: 0,
            data,
        }
    }

    /// RDMA WRITE, signaled.
    pub fn write(wr_id: u64, data: SendData<'a>, remote_addr: u64, rkey: u32) -> Self {
        SendWr {
            opcode: Opcode::Write,
            remote_addr,
            rkey,
            ..Self::send(wr_id, data)
        }
    }

    /// RDMA READ into `sges`, signaled.
    pub fn read(wr_id: u64, sges: &'a [Sge], remote_addr: u64, rkey: u32) -> Self {
        let data = SendData::Sges(sges);
        SendWr {
            opcode: Opcode::Read,
            remote_addr,
            rkey,
            ..Self::send(wr_id, data)
        }
    }

    /// RDMA WRITE that completes a receive work request with `imm`.
    pub fn write_with_imm(
        wr_id: u64,
        data: SendData<'a>,
        remote_addr: u64,
        rkey: u32,
        imm: u32,
    ) -> Self {
        SendWr {
            opcode: Opcode::WriteWithImm,
            imm,
            ..Self::write(wr_id, data, remote_addr, rkey)
        }
    }

    /// SEND with immediate data.
    pub fn send_with_imm(wr_id: u64, data: SendData<'a>, imm: u32) -> Self {
        SendWr {
            opcode: Opcode::SendWithImm,
            imm,
            ..Self::send(wr_id, data)
        }
    }

    /// Adds to the 64-bit word at `remote_addr`; the old value goes to `sge`.
    pub fn fetch_add(wr_id: u64, sge: Sge, remote_addr: u64, rkey: u32, add: u64) -> Self {
        SendWr {
            opcode: Opcode::FetchAdd,
            remote_addr,
            rkey,
            ..Self::send(wr_id, SendData::Atomic(sge, AtomicArgs::fetch_add(add)))
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
        SendWr {
            opcode: Opcode::CmpSwap,
            remote_addr,
            rkey,
            ..Self::send(
                wr_id,
                SendData::Atomic(sge, AtomicArgs::cmp_swap(compare, swap)),
            )
        }
    }

    /// RDMA READ into one element, whose key is invalidated when the data is there.
    pub fn read_with_inv(wr_id: u64, sge: &'a [Sge; 1], remote_addr: u64, rkey: u32) -> Self {
        SendWr {
            opcode: Opcode::ReadWithInv,
            ..Self::read(wr_id, sge, remote_addr, rkey)
        }
    }

    /// Invalidates a key of this side, after everything posted before it completed.
    pub fn local_inv(wr_id: u64, key: u32) -> Self {
        SendWr {
            opcode: Opcode::LocalInv,
            imm: key,
            ..Self::send(wr_id, SendData::Sges(&[]))
        }
    }

    /// The same with other flags.
    pub fn with_flags(self, flags: WrFlags) -> Self {
        SendWr {
            with_flags: flags,
            ..self
        }
    }
}

impl SendWr<'_> {
    /// Slots it takes; refuses what could not be parsed back.
    #[inline]
    pub fn slot_count(&self) -> Result<u32, WqeError> {
        match self.data {
            SendData::Atomic(_, a) if self.opcode.is_atomic() => {
                Ok(slots_for_atomic(self.opcode, &a))
            }
            SendData::Atomic(..) => Err(WqeError::BadAtomic),
            _ if self.opcode.is_atomic() => Err(WqeError::BadAtomic),
            SendData::Local(_) if self.opcode.takes_local() => Ok(1),
            SendData::Local(_) => Err(WqeError::BadLocal),
            _ if self.opcode.takes_local() => Err(WqeError::BadLocal),
            SendData::Sges(s) if s.len() > MAX_SGE => Err(WqeError::TooManySge(s.len())),
            SendData::Sges(s) => Ok(slots_for_sges(s.len()) as u32),
            SendData::Inline(_) if !self.opcode.sends_data() => Err(WqeError::InlineNotAllowed),
            SendData::Inline(d) if d.len() > MAX_INLINE => Err(WqeError::InlineTooLong(d.len())),
            SendData::Inline(d) => Ok(slots_for_inline(d.len()) as u32),
        }
    }

    /// Hands the slots to `put(i, slot)` in order. Call [`Self::slots`] first.
    #[inline]
    pub fn encode_slots(&self, mut put: impl FnMut(u32, &WqeSlot)) {
        let mut h = WqeHeader {
            opcode: self.opcode as u8,
            flags: self.with_flags.0 & !WrFlags::INLINE.0,
            imm: self.imm,
            wr_id: self.wr_id,
            remote_addr: self.remote_addr,
            rkey: self.rkey,
            ..Zeroable::zeroed()
        };
        match self.data {
            SendData::Sges(s) => encode_sges(h, s, put),
            SendData::Local(sge) => {
                h.num_sge = 1;
                h.slots = 1;
                h.sge0 = sge;
                put(0, &bytemuck::cast(h));
            }
            SendData::Atomic(sge, a) => {
                h.num_sge = 1;
                h.slots = slots_for_atomic(self.opcode, &a) as u8;
                h.length = sge.length;
                h.sge0 = sge;
                h.args = [a.add_or_swap, a.compare];
                put(0, &bytemuck::cast(h));
                if h.slots > 1 {
                    let (m, n) = (a.add_or_swap_mask, a.compare_mask);
                    put(1, &WqeSlot([m, n, 0, 0, 0, 0, 0, 0]));
                }
            }
            SendData::Inline(d) => {
                let d = &d[..d.len().min(MAX_INLINE)];
                h.flags |= WrFlags::INLINE.0;
                h.length = d.len() as u32;
                h.slots = slots_for_inline(d.len()) as u8;
                let mut slot: WqeSlot = bytemuck::cast(h);
                let (first, rest) = d.split_at(d.len().min(INLINE_IN_HEADER));
                bytemuck::bytes_of_mut(&mut slot)[SLOT_LEN - INLINE_IN_HEADER..][..first.len()]
                    .copy_from_slice(first);
                put(0, &slot);
                for (i, chunk) in rest.chunks(SLOT_LEN).enumerate() {
                    let mut slot = WqeSlot([0; 8]);
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
    pub with_flags: WrFlags,
    num_sge: u8,
    payload: WqePayload,
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
            .field("flags", &self.with_flags)
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
            with_flags: WrFlags::NONE,
            num_sge: 0,
            payload: WqePayload([0; MAX_INLINE / 8]),
        }
    }

    /// The same request without a ring in between; for tests and in-process use.
    pub fn from_wr(d: &SendWr<'_>) -> Result<SendWqe, WqeError> {
        let n = d.slot_count()? as usize;
        let mut slots = [WqeSlot([0; 8]); MAX_SLOTS];
        d.encode_slots(|i, s| slots[i as usize] = *s);
        SendWqe::parse_slots(&slots[..n])
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
        self.with_flags
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
        self.with_flags.contains(WrFlags::SIGNALED)
    }

    /// The key to invalidate at the peer.
    #[inline]
    pub fn inv_rkey(&self) -> Option<u32> {
        (self.opcode == Opcode::SendWithInv).then_some(self.imm)
    }

    /// Validates a private copy of the slots.
    pub fn parse_slots(slots: &[WqeSlot]) -> Result<SendWqe, WqeError> {
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
        first: &WqeSlot,
        have: u32,
        mut more: impl FnMut(u32) -> WqeSlot,
    ) -> Result<u32, WqeError> {
        let h: WqeHeader = bytemuck::cast(*first);
        self.wr_id = h.wr_id;
        let opcode = Opcode::from_u8(h.opcode).ok_or(WqeError::BadOpcode(h.opcode))?;
        if h.flags & !WrFlags::ALL != 0 {
            return Err(WqeError::BadFlags(h.flags));
        }
        self.opcode = opcode;
        self.with_flags = WrFlags(h.flags);
        self.remote_addr = h.remote_addr;
        self.rkey = h.rkey;
        self.imm = h.imm;
        if opcode.is_atomic() {
            return self.parse_atomic(&h, have, more);
        }
        if opcode.takes_local() {
            return self.parse_local(&h, have);
        }
        if self.with_flags.contains(WrFlags::INLINE) {
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
        if h.num_sge != 1 || self.with_flags.contains(WrFlags::INLINE) {
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
        mut more: impl FnMut(u32) -> WqeSlot,
    ) -> Result<u32, WqeError> {
        if h.num_sge != 1 || self.with_flags.contains(WrFlags::INLINE) {
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
