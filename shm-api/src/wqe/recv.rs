//! Work requests of receive queues and shared receive queues.

use super::{
    MAX_INLINE, MAX_SGE, MAX_SLOTS, OPCODE_RECV, Sge, WqeError, WqeHeader, WqePayload, WqeSlot,
    encode_sges, parse_sges, slots_for_sges,
};
use bytemuck::Zeroable;

/// A receive work request on its way into the ring.
#[derive(Debug, Clone, Copy)]
pub struct RecvWr<'a> {
    pub wr_id: u64,
    pub sges: &'a [Sge],
}

impl RecvWr<'_> {
    /// Slots it takes.
    #[inline]
    pub fn slot_count(&self) -> Result<u32, WqeError> {
        if self.sges.len() > MAX_SGE {
            return Err(WqeError::TooManySge(self.sges.len()));
        }
        Ok(slots_for_sges(self.sges.len()) as u32)
    }

    /// Hands the slots to `put(i, slot)` in order.
    #[inline]
    pub fn encode_slots(&self, put: impl FnMut(u32, &WqeSlot)) {
        let h = WqeHeader {
            opcode: OPCODE_RECV,
            wr_id: self.wr_id,
            ..Zeroable::zeroed()
        };
        encode_sges(h, self.sges, put);
    }
}

/// A validated receive work request in the worker's own memory.
#[derive(Clone, Copy)]
pub struct RecvWqe {
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
    /// A receive without memory, to be overwritten.
    pub fn new() -> Self {
        RecvWqe {
            wr_id: 0,
            length: 0,
            num_sge: 0,
            payload: WqePayload([0; MAX_INLINE / 8]),
        }
    }

    /// The same request without a ring in between.
    pub fn from_wr(d: &RecvWr<'_>) -> Result<RecvWqe, WqeError> {
        let n = d.slot_count()? as usize;
        let mut slots = [WqeSlot([0; 8]); MAX_SLOTS];
        d.encode_slots(|i, s| slots[i as usize] = *s);
        RecvWqe::parse_slots(&slots[..n])
    }

    /// Local memory to scatter to.
    #[inline]
    pub fn sges(&self) -> &[Sge] {
        &bytemuck::cast_slice::<u64, Sge>(&self.payload.0)[..usize::from(self.num_sge)]
    }

    /// Validates a private copy of the slots.
    pub fn parse_slots(slots: &[WqeSlot]) -> Result<RecvWqe, WqeError> {
        let mut w = RecvWqe::new();
        let first = slots.first().ok_or(WqeError::Truncated)?;
        w.parse_into(first, slots.len() as u32, |i| slots[i as usize])?;
        Ok(w)
    }

    /// As [`SendWqe::parse_into`].
    #[inline]
    pub fn parse_into(
        &mut self,
        first: &WqeSlot,
        have: u32,
        more: impl FnMut(u32) -> WqeSlot,
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
