//! Work requests of send queues, in the form written by the client library and in the form read by
//! the worker.

use super::{
    INLINE_IN_HEADER, MAX_INLINE, MAX_SGE, Opcode, PLAIN_WORDS, SLOT_LEN, Sge, WorkQueueElement,
    WorkRequest, WqeError, WqeHeader, WqePayload, WqeSlot, WrFlags, check_slots, element_of,
    encode_plain, encode_sges, is_plain, parse_element, parse_sges, slots_for_inline,
    slots_for_sges,
};
use crate::atomic::AtomicArgs;
use bytemuck::Zeroable;

/// Data of a send request.
#[derive(Debug, Clone, Copy)]
pub enum SendData<'a> {
    /// Registered memory.
    Sges(&'a [Sge]),
    /// Bytes stored inside the work request.
    Inline(&'a [u8]),
    /// An atomic: the destination of the old value, and the operands.
    Atomic(Sge, AtomicArgs),
    /// Operands of BIND_MW and REG_MR; see [`crate::local_wqe`].
    Local(Sge),
}

/// A send work request to be written into the ring.
#[derive(Debug, Clone, Copy)]
pub struct SendWr<'a> {
    /// Operation.
    pub opcode: Opcode,
    /// INLINE is set by the encoder.
    pub flags: WrFlags,
    /// Set by the application; returned in the completion.
    pub wr_id: u64,
    /// Immediate data or the key to invalidate.
    pub imm: u32,
    /// Address at the peer, for READ, WRITE and atomics.
    pub remote_addr: u64,
    /// Key of the memory at the peer.
    pub rkey: u32,
    /// Data to send, or destination of a result.
    pub data: SendData<'a>,
}

impl<'a> SendWr<'a> {
    /// A signaled SEND.
    pub fn send(wr_id: u64, data: SendData<'a>) -> Self {
        let opcode = Opcode::Send;
        let flags = WrFlags::SIGNALED;
        SendWr {
            opcode,
            flags,
            wr_id,
            imm: 0,
            remote_addr: 0,
            rkey: 0,
            data,
        }
    }

    /// A signaled RDMA WRITE.
    pub fn write(wr_id: u64, data: SendData<'a>, remote_addr: u64, rkey: u32) -> Self {
        SendWr {
            opcode: Opcode::Write,
            remote_addr,
            rkey,
            ..Self::send(wr_id, data)
        }
    }

    /// A signaled RDMA READ into `sges`.
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

    /// RDMA READ into one element, whose key is invalidated when the data has arrived.
    pub fn read_with_inv(wr_id: u64, sge: &'a [Sge; 1], remote_addr: u64, rkey: u32) -> Self {
        SendWr {
            opcode: Opcode::ReadWithInv,
            ..Self::read(wr_id, sge, remote_addr, rkey)
        }
    }

    /// Invalidates a local key after everything posted before it has completed.
    pub fn local_inv(wr_id: u64, key: u32) -> Self {
        SendWr {
            opcode: Opcode::LocalInv,
            imm: key,
            ..Self::send(wr_id, SendData::Sges(&[]))
        }
    }

    /// Sends to queue pair `qpn` at the host of address handle `ah` with Q_Key `qkey`; for queue pairs of
    /// datagrams. The request is a SEND, with or without immediate data.
    pub fn with_destination(self, ah: u32, qpn: u32, qkey: u32) -> Self {
        SendWr {
            rkey: ah,
            remote_addr: u64::from(qkey) << 32 | u64::from(qpn),
            ..self
        }
    }

    /// Replaces the flags.
    pub fn with_flags(self, flags: WrFlags) -> Self {
        SendWr { flags, ..self }
    }
}

impl WorkRequest for SendWr<'_> {
    #[inline]
    fn slot_count(&self) -> Result<u32, WqeError> {
        match self.data {
            SendData::Atomic(_, args) if self.opcode.is_atomic() => {
                Ok(slots_for_atomic(self.opcode, &args))
            }
            SendData::Atomic(..) => Err(WqeError::BadAtomic),
            _ if self.opcode.is_atomic() => Err(WqeError::BadAtomic),
            SendData::Local(_) if self.opcode.takes_local() => Ok(1),
            SendData::Local(_) => Err(WqeError::BadLocal),
            _ if self.opcode.takes_local() => Err(WqeError::BadLocal),
            SendData::Sges(sges) if sges.len() > MAX_SGE => Err(WqeError::TooManySge(sges.len())),
            SendData::Sges(sges) => Ok(slots_for_sges(sges.len()) as u32),
            SendData::Inline(_) if !self.opcode.sends_data() => Err(WqeError::InlineNotAllowed),
            SendData::Inline(bytes) if bytes.len() > MAX_INLINE => {
                Err(WqeError::InlineTooLong(bytes.len()))
            }
            SendData::Inline(bytes) => Ok(slots_for_inline(bytes.len()) as u32),
        }
    }

    #[inline]
    fn encode_slots(&self, mut put: impl FnMut(u32, &WqeSlot)) {
        let mut header = WqeHeader {
            opcode: self.opcode as u8,
            flags: self.flags.0 & !WrFlags::INLINE.0,
            imm: self.imm,
            wr_id: self.wr_id,
            remote_addr: self.remote_addr,
            rkey: self.rkey,
            ..Zeroable::zeroed()
        };
        match self.data {
            SendData::Sges(sges) => encode_sges(header, sges, put),
            SendData::Local(sge) => {
                header.num_sge = 1;
                header.slots = 1;
                header.sge0 = sge;
                put(0, &bytemuck::cast(header));
            }
            SendData::Atomic(sge, args) => {
                header.num_sge = 1;
                header.slots = slots_for_atomic(self.opcode, &args) as u8;
                header.length = sge.length;
                header.sge0 = sge;
                header.args = [args.add_or_swap, args.compare];
                put(0, &bytemuck::cast(header));
                if header.slots > 1 {
                    let (add_or_swap_mask, compare_mask) =
                        (args.add_or_swap_mask, args.compare_mask);
                    put(
                        1,
                        &WqeSlot([add_or_swap_mask, compare_mask, 0, 0, 0, 0, 0, 0]),
                    );
                }
            }
            SendData::Inline(bytes) => {
                let bytes = &bytes[..bytes.len().min(MAX_INLINE)];
                header.flags |= WrFlags::INLINE.0;
                header.length = bytes.len() as u32;
                header.slots = slots_for_inline(bytes.len()) as u8;
                let mut slot: WqeSlot = bytemuck::cast(header);
                let (first, rest) = bytes.split_at(bytes.len().min(INLINE_IN_HEADER));
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

    #[inline(always)]
    fn plain_words(&self) -> Option<[u64; PLAIN_WORDS]> {
        let SendData::Sges([sge]) = self.data else {
            return None;
        };
        if self.opcode.is_atomic() || self.opcode.takes_local() {
            return None;
        }
        let flags = WrFlags(self.flags.0 & !WrFlags::INLINE.0);
        let kind = (self.opcode as u8, flags, self.imm);
        let remote = (self.remote_addr, self.rkey);
        Some(encode_plain(kind, self.wr_id, remote, *sge))
    }
}

/// Masks of the plain operations need no slot.
#[inline]
fn slots_for_atomic(op: Opcode, args: &AtomicArgs) -> u32 {
    1 + u32::from((args.add_or_swap_mask, args.compare_mask) != plain_masks(op))
}

#[inline]
fn plain_masks(op: Opcode) -> (u64, u64) {
    if op == Opcode::FetchAdd {
        (0, 0)
    } else {
        (u64::MAX, u64::MAX)
    }
}

/// A copy of a validated send work request of the most common form: one slot with one element, not
/// inline, with an ordinary opcode.
#[derive(Debug, Clone, Copy)]
pub struct PlainSend {
    /// Set by the application; returned in the completion.
    pub wr_id: u64,
    /// Address at the peer.
    pub remote_addr: u64,
    /// Key of the memory at the peer.
    pub rkey: u32,
    /// Immediate data, or the key to invalidate (SendWithInv).
    pub imm: u32,
    /// Operation.
    pub opcode: Opcode,
    /// Flags.
    pub flags: WrFlags,
    /// Local memory.
    pub sge: Sge,
}

impl PlainSend {
    /// Parses a slot whose i-th 64-bit word is loaded by `word(i)`; each word is loaded once. `None`:
    /// the request has another form or is invalid.
    #[inline(always)]
    pub(crate) fn parse(word: impl Fn(usize) -> u64) -> Option<PlainSend> {
        const FLAGS: WrFlags = WrFlags(WrFlags::ALL & !WrFlags::INLINE.0);
        let first = word(0);
        let opcode = Opcode::from_u8(first as u8)?;
        if opcode.is_atomic() || opcode.takes_local() || !is_plain(first, FLAGS) {
            return None;
        }
        Some(PlainSend {
            wr_id: word(1),
            remote_addr: word(2),
            rkey: word(3) as u32,
            imm: (first >> 32) as u32,
            opcode,
            flags: WrFlags((first >> 8) as u8),
            sge: bytemuck::cast([word(4), word(5)]),
        })
    }
}

/// A validated send work request in the worker's own memory.
#[derive(Clone, Copy)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(remote = "Self")
)]
pub struct SendWqe {
    /// Set by the application; returned in the completion.
    pub wr_id: u64,
    /// Address at the peer.
    pub remote_addr: u64,
    /// Total bytes: the sum of the SGEs or the inline length.
    pub length: u32,
    /// Key of the memory at the peer.
    pub rkey: u32,
    /// Immediate data, or the key to invalidate (SendWithInv).
    pub imm: u32,
    /// Operation.
    pub opcode: Opcode,
    /// Flags.
    pub flags: WrFlags,
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
            payload: WqePayload([0; MAX_INLINE / 8]),
        }
    }

    /// The request as a [`PlainSend`], if it has that form.
    pub fn as_plain(&self) -> Option<PlainSend> {
        let sge = self.only_sge().filter(|_| !self.opcode.takes_local())?;
        Some(PlainSend {
            wr_id: self.wr_id,
            remote_addr: self.remote_addr,
            rkey: self.rkey,
            imm: self.imm,
            opcode: self.opcode,
            flags: self.flags,
            sge,
        })
    }

    /// Converts a request directly, without a ring; for tests and in-process use.
    pub fn from_wr(request: &SendWr<'_>) -> Result<SendWqe, WqeError> {
        element_of(request)
    }

    /// Validates a private copy of the slots.
    pub fn parse_slots(slots: &[WqeSlot]) -> Result<SendWqe, WqeError> {
        parse_element(slots)
    }

    /// Local memory to gather from (WRITE, SEND) or to scatter to (READ); empty
    /// for inline data.
    #[inline]
    pub fn sges(&self) -> &[Sge] {
        &bytemuck::cast_slice::<u64, Sge>(&self.payload.0)[..usize::from(self.num_sge)]
    }

    /// The only element, which most requests have; `None` for atomics, which also have operands.
    #[inline(always)]
    pub fn only_sge(&self) -> Option<Sge> {
        let is_plain = self.num_sge == 1 && !self.opcode.is_atomic();
        is_plain.then(|| bytemuck::cast([self.payload.0[0], self.payload.0[1]]))
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

    /// Address handle, queue pair number and Q_Key of a datagram's destination; see
    /// [`SendWr::with_destination`].
    #[inline]
    pub fn destination(&self) -> (u32, u32, u32) {
        let (qpn, qkey) = (self.remote_addr as u32, (self.remote_addr >> 32) as u32);
        (self.rkey, qpn, qkey)
    }

    /// Returns whether it completes visibly even on success.
    #[inline]
    pub fn is_signaled(&self) -> bool {
        self.flags.contains(WrFlags::SIGNALED)
    }

    /// The key to invalidate at the peer.
    #[inline]
    pub fn inv_rkey(&self) -> Option<u32> {
        (self.opcode == Opcode::SendWithInv).then_some(self.imm)
    }

    fn parse_local(&mut self, header: &WqeHeader, have: u32) -> Result<u32, WqeError> {
        if header.num_sge != 1 || self.flags.contains(WrFlags::INLINE) {
            return Err(WqeError::BadLocal);
        }
        check_slots(header.slots, 1, have)?;
        self.num_sge = 1;
        self.length = 0;
        let sge: [u64; 2] = bytemuck::cast(header.sge0);
        self.payload.0[..2].copy_from_slice(&sge);
        Ok(1)
    }

    fn parse_atomic(
        &mut self,
        header: &WqeHeader,
        have: u32,
        mut more: impl FnMut(u32) -> WqeSlot,
    ) -> Result<u32, WqeError> {
        if header.num_sge != 1 || self.flags.contains(WrFlags::INLINE) {
            return Err(WqeError::BadAtomic);
        }
        let takes = if header.slots == 2 { 2 } else { 1 };
        check_slots(header.slots, takes, have)?;
        let (add_or_swap_mask, compare_mask) = if takes == 2 {
            let masks = more(1);
            (masks.0[0], masks.0[1])
        } else {
            plain_masks(self.opcode)
        };
        self.num_sge = 1;
        self.length = header.sge0.length;
        let sge: [u64; 2] = bytemuck::cast(header.sge0);
        self.payload.0[..6].copy_from_slice(&[
            sge[0],
            sge[1],
            header.args[0],
            add_or_swap_mask,
            header.args[1],
            compare_mask,
        ]);
        Ok(takes as u32)
    }
}

impl WorkQueueElement for SendWqe {
    #[inline]
    fn wr_id(&self) -> u64 {
        self.wr_id
    }

    #[inline]
    fn parse_into(
        &mut self,
        first: &WqeSlot,
        have: u32,
        mut more: impl FnMut(u32) -> WqeSlot,
    ) -> Result<u32, WqeError> {
        let header: WqeHeader = bytemuck::cast(*first);
        self.wr_id = header.wr_id;
        let opcode = Opcode::from_u8(header.opcode).ok_or(WqeError::BadOpcode(header.opcode))?;
        if header.flags & !WrFlags::ALL != 0 {
            return Err(WqeError::BadFlags(header.flags));
        }
        self.opcode = opcode;
        self.flags = WrFlags(header.flags);
        self.remote_addr = header.remote_addr;
        self.rkey = header.rkey;
        self.imm = header.imm;
        if opcode.is_atomic() {
            return self.parse_atomic(&header, have, more);
        }
        if opcode.takes_local() {
            return self.parse_local(&header, have);
        }
        if self.flags.contains(WrFlags::INLINE) {
            if !opcode.sends_data() {
                return Err(WqeError::InlineNotAllowed);
            }
            let len = header.length as usize;
            if len > MAX_INLINE {
                return Err(WqeError::InlineTooLong(len));
            }
            let takes = slots_for_inline(len);
            check_slots(header.slots, takes, have)?;
            self.num_sge = 0;
            self.length = header.length;
            // Whole words: the bytes beyond `length` are never exposed.
            self.payload.0[..4].copy_from_slice(&first.0[4..]);
            for i in 1..takes {
                let from = 4 + (i - 1) * 8;
                let to = (from + 8).min(self.payload.0.len());
                self.payload.0[from..to].copy_from_slice(&more(i as u32).0[..to - from]);
            }
            Ok(takes as u32)
        } else {
            let (length, takes) = parse_sges(&header, have, &mut self.payload, more)?;
            self.num_sge = header.num_sge;
            self.length = length;
            Ok(takes)
        }
    }

    #[inline(always)]
    fn parse_plain(&mut self, word: impl Fn(usize) -> u64) -> bool {
        let Some(plain) = PlainSend::parse(word) else {
            return false;
        };
        self.opcode = plain.opcode;
        self.flags = plain.flags;
        self.num_sge = 1;
        self.imm = plain.imm;
        self.wr_id = plain.wr_id;
        self.remote_addr = plain.remote_addr;
        self.rkey = plain.rkey;
        self.length = plain.sge.length;
        let sge: [u64; 2] = bytemuck::cast(plain.sge);
        self.payload.0[..2].copy_from_slice(&sge);
        true
    }
}

#[cfg(feature = "serde")]
mod saved {
    use super::{MAX_INLINE, MAX_SGE, SendWqe};
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

    impl Serialize for SendWqe {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            SendWqe::serialize(self, serializer)
        }
    }

    /// Refuses lengths beyond the request.
    impl<'de> Deserialize<'de> for SendWqe {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            let wqe = SendWqe::deserialize(deserializer)?;
            let is_inline = wqe.flags.contains(super::WrFlags::INLINE);
            let fits = usize::from(wqe.num_sge) <= MAX_SGE
                && (!is_inline || wqe.length as usize <= MAX_INLINE);
            if fits {
                Ok(wqe)
            } else {
                Err(D::Error::custom("a work request is longer than possible"))
            }
        }
    }
}
