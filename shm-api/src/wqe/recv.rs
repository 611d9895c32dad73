//! Work requests of receive queues and shared receive queues.

use super::{
    MAX_INLINE, MAX_SGE, OPCODE_RECV, PLAIN_WORDS, Sge, WorkQueueElement, WorkRequest, WqeError,
    WqeHeader, WqePayload, WqeSlot, WrFlags, element_of, encode_plain, encode_sges, is_plain,
    load_plain_sge, parse_element, parse_sges, slots_for_sges,
};
use bytemuck::Zeroable;

/// A receive work request to be written into the ring.
#[derive(Debug, Clone, Copy)]
pub struct RecvWr<'a> {
    /// Set by the application; returned in the completion.
    pub wr_id: u64,
    /// Memory that a message is scattered to.
    pub sges: &'a [Sge],
}

impl WorkRequest for RecvWr<'_> {
    #[inline]
    fn slot_count(&self) -> Result<u32, WqeError> {
        if self.sges.len() > MAX_SGE {
            return Err(WqeError::TooManySge(self.sges.len()));
        }
        Ok(slots_for_sges(self.sges.len()) as u32)
    }

    #[inline]
    fn encode_slots(&self, put: impl FnMut(u32, &WqeSlot)) {
        let header = WqeHeader {
            opcode: OPCODE_RECV,
            wr_id: self.wr_id,
            ..Zeroable::zeroed()
        };
        encode_sges(header, self.sges, put);
    }

    #[inline(always)]
    fn plain_words(&self) -> Option<[u64; PLAIN_WORDS]> {
        let [sge] = self.sges else {
            return None;
        };
        let kind = (OPCODE_RECV, WrFlags::NONE, 0);
        Some(encode_plain(kind, self.wr_id, (0, 0), *sge))
    }
}

/// A validated receive work request in the worker's own memory.
#[derive(Clone, Copy)]
pub struct RecvWqe {
    /// Set by the application; returned in the completion.
    pub wr_id: u64,
    /// Total bytes of all SGEs.
    pub length: u32,
    num_sge: u8,
    payload: WqePayload,
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
    /// A receive request without memory, to be overwritten.
    pub fn new() -> Self {
        RecvWqe {
            wr_id: 0,
            length: 0,
            num_sge: 0,
            payload: WqePayload([0; MAX_INLINE / 8]),
        }
    }

    /// Converts a request directly, without a ring.
    pub fn from_wr(request: &RecvWr<'_>) -> Result<RecvWqe, WqeError> {
        element_of(request)
    }

    /// Validates a private copy of the slots.
    pub fn parse_slots(slots: &[WqeSlot]) -> Result<RecvWqe, WqeError> {
        parse_element(slots)
    }

    /// Local memory to scatter to.
    #[inline]
    pub fn sges(&self) -> &[Sge] {
        &bytemuck::cast_slice::<u64, Sge>(&self.payload.0)[..usize::from(self.num_sge)]
    }
}

impl WorkQueueElement for RecvWqe {
    #[inline]
    fn wr_id(&self) -> u64 {
        self.wr_id
    }

    #[inline]
    fn parse_into(
        &mut self,
        first: &WqeSlot,
        available: u32,
        more: impl FnMut(u32) -> WqeSlot,
    ) -> Result<u32, WqeError> {
        let header: WqeHeader = bytemuck::cast(*first);
        self.wr_id = header.wr_id;
        if header.opcode != OPCODE_RECV {
            return Err(WqeError::BadOpcode(header.opcode));
        }
        if header.flags != 0 {
            return Err(WqeError::BadFlags(header.flags));
        }
        let (length, slots) = parse_sges(&header, available, &mut self.payload, more)?;
        self.num_sge = header.num_sge;
        self.length = length;
        Ok(slots)
    }

    #[inline(always)]
    fn parse_plain(&mut self, word: impl Fn(usize) -> u64) -> bool {
        let first = word(0);
        if first as u8 != OPCODE_RECV || !is_plain(first, WrFlags::NONE) {
            return false;
        }
        self.wr_id = word(1);
        self.num_sge = 1;
        self.length = load_plain_sge(&mut self.payload, word);
        true
    }
}
