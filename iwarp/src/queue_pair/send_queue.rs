//! The worker's private copy of send work requests that are not finished.
//!
//! Entries are compact: two SGEs or 32 inline bytes live in the entry, more of them in a slab that
//! grows to what is in use. Nothing is allocated for an idle queue pair, and nothing in steady
//! state. The sender fills it, acknowledgements and read responses mark it, completion empties it.

use crate::environment::ExtBufRef;
use siw_shm::wqe::{MAX_INLINE, MAX_SGE};
use siw_shm::{AtomicArgs, Opcode, SendWqe, Sge, WcStatus, WrFlags};
use std::collections::VecDeque;

const SMALL_SGES: usize = 2;
const SMALL_INLINE: usize = 32;
const BIG_SGES: usize = MAX_SGE;

const _: () = assert!(MAX_INLINE <= BIG_SGES * size_of::<Sge>());
const _: () = assert!(size_of::<Entry>() <= 88);

/// One send work request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    pub wr_id: u64,
    pub remote_addr: u64,
    small: [Sge; SMALL_SGES],
    /// Bytes of the message.
    pub length: u32,
    pub rkey: u32,
    /// STag to invalidate, or immediate data.
    pub imm: u32,
    /// Bytes handed to TCP.
    pub sent: u32,
    /// MSN of its (first) untagged message, from its first segment on.
    pub msn: u32,
    pub owner: ExtBufRef,
    big: u32,
    pub opcode: Opcode,
    flags: WrFlags,
    num_sge: u8,
    /// Read Requests, or Immediate Data messages, that went out for it.
    pub parts: u8,
    /// Other than success: fails as soon as it is its turn.
    pub status: WcStatus,
    /// The last segment is acknowledged.
    pub acked: bool,
    /// The read response is placed.
    pub answered: bool,
}

const NO_BIG: u32 = u32::MAX;

impl Entry {
    #[inline]
    pub fn signaled(&self) -> bool {
        self.flags.contains(WrFlags::SIGNALED)
    }

    #[inline]
    pub fn fence(&self) -> bool {
        self.flags.contains(WrFlags::FENCE)
    }

    /// Something of it is handed to TCP.
    #[inline]
    pub fn started(&self) -> bool {
        self.sent > 0 || self.parts > 0
    }

    #[inline]
    pub fn is_solicited(&self) -> bool {
        self.flags.contains(WrFlags::SOLICITED)
    }

    #[inline]
    pub fn is_inline(&self) -> bool {
        self.flags.contains(WrFlags::INLINE)
    }
}

/// The entries, numbered by posting order (wrapping).
#[derive(Debug, Default)]
pub(crate) struct SendQueue {
    base: u32,
    entries: VecDeque<Entry>,
    big: Vec<[Sge; BIG_SGES]>,
    free_big: Vec<u32>,
}

impl SendQueue {
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Copies a work request in; its number.
    #[inline]
    pub fn push(&mut self, w: &SendWqe) -> u32 {
        let mut e = Entry {
            wr_id: w.wr_id,
            remote_addr: w.remote_addr,
            small: [Sge::default(); SMALL_SGES],
            length: w.length,
            rkey: w.rkey,
            imm: w.imm,
            sent: 0,
            msn: 0,
            owner: ExtBufRef::NONE,
            big: NO_BIG,
            opcode: w.opcode,
            flags: w.flags,
            num_sge: 0,
            parts: 0,
            status: WcStatus::SUCCESS,
            acked: false,
            answered: false,
        };
        if let Some(d) = w.inline_data() {
            if d.len() <= SMALL_INLINE {
                bytemuck::cast_slice_mut::<Sge, u8>(&mut e.small)[..d.len()].copy_from_slice(d);
            } else {
                e.big = self.take_big();
                let b = &mut self.big[e.big as usize];
                bytemuck::cast_slice_mut::<Sge, u8>(b)[..d.len()].copy_from_slice(d);
            }
        } else if let (Some(a), Some(sge)) = (w.atomic_args(), w.sges().first()) {
            e.num_sge = 1;
            e.big = self.take_big();
            let words = bytemuck::cast_slice_mut::<Sge, u64>(&mut self.big[e.big as usize][1..3]);
            words.copy_from_slice(&[a.add_or_swap, a.add_or_swap_mask, a.compare, a.compare_mask]);
            self.big[e.big as usize][0] = *sge;
        } else {
            let s = w.sges();
            e.num_sge = s.len() as u8;
            if s.len() <= SMALL_SGES {
                e.small[..s.len()].copy_from_slice(s);
            } else {
                e.big = self.take_big();
                self.big[e.big as usize][..s.len()].copy_from_slice(s);
            }
        }
        let slot = self.base.wrapping_add(self.entries.len() as u32);
        self.entries.push_back(e);
        slot
    }

    fn take_big(&mut self) -> u32 {
        self.free_big.pop().unwrap_or_else(|| {
            self.big.push([Sge::default(); BIG_SGES]);
            (self.big.len() - 1) as u32
        })
    }

    #[inline]
    fn index(&self, slot: u32) -> usize {
        slot.wrapping_sub(self.base) as usize
    }

    #[inline]
    pub fn get(&self, slot: u32) -> Option<&Entry> {
        self.entries.get(self.index(slot))
    }

    #[inline]
    pub fn get_mut(&mut self, slot: u32) -> Option<&mut Entry> {
        let i = self.index(slot);
        self.entries.get_mut(i)
    }

    /// It is the oldest that is not completed.
    #[inline]
    pub fn is_front(&self, slot: u32) -> bool {
        slot == self.base
    }

    #[inline]
    pub fn front(&self) -> Option<&Entry> {
        self.entries.front()
    }

    #[inline]
    pub fn pop_front(&mut self) -> Option<Entry> {
        let e = self.entries.pop_front()?;
        self.base = self.base.wrapping_add(1);
        if e.big != NO_BIG {
            self.free_big.push(e.big);
        }
        Some(e)
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Entry> {
        self.entries.iter_mut()
    }

    /// Memory of a message with SGEs.
    #[inline]
    pub fn sges<'a>(&'a self, e: &'a Entry) -> &'a [Sge] {
        let all: &[Sge] = if e.big == NO_BIG {
            &e.small
        } else {
            &self.big[e.big as usize]
        };
        &all[..usize::from(e.num_sge)]
    }

    /// The data sink of the Read Request that asks for the bytes from `offset` on, and its place among
    /// the requests of its work request: there is one for each element that is not empty, because a
    /// Read Request names one tagged buffer (RFC 5040 section 4.4).
    pub fn read_sink(&self, e: &Entry, offset: u32) -> (u32, Sge) {
        let sges = self.sges(e);
        if e.length == 0 {
            let s = sges.first().copied().unwrap_or_default();
            return (0, Sge { length: 0, ..s });
        }
        let mut at = 0u32;
        let full = sges.iter().filter(|s| s.length > 0);
        for (i, s) in full.enumerate() {
            if at == offset {
                return (i as u32, *s);
            }
            at = at.wrapping_add(s.length);
        }
        (0, Sge::default())
    }

    /// Operands of an atomic.
    pub fn atomic_args(&self, e: &Entry) -> Option<AtomicArgs> {
        let b = self.big.get(e.big as usize)?;
        let w = bytemuck::cast_slice::<Sge, u64>(&b[1..3]);
        Some(AtomicArgs {
            add_or_swap: w[0],
            add_or_swap_mask: w[1],
            compare: w[2],
            compare_mask: w[3],
        })
    }

    /// Bytes of an inline message.
    #[inline]
    pub fn inline<'a>(&'a self, e: &'a Entry) -> &'a [u8] {
        let all: &[Sge] = if e.big == NO_BIG {
            &e.small
        } else {
            &self.big[e.big as usize]
        };
        bytemuck::cast_slice::<Sge, u8>(all)
            .get(..e.length as usize)
            .unwrap_or(&[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use siw_shm::wqe::{SendData, SendWr};

    fn wqe(data: SendData<'_>) -> SendWqe {
        SendWqe::from_wr(&SendWr {
            opcode: Opcode::Send,
            flags: WrFlags::SIGNALED,
            wr_id: 9,
            imm: 0,
            remote_addr: 0,
            rkey: 0,
            data,
        })
        .expect("valid")
    }

    #[test]
    fn entries_keep_short_and_long_contents() {
        let mut q = SendQueue::default();
        let bytes: Vec<u8> = (0..200).collect();
        let sges: Vec<Sge> = (0..5)
            .map(|i| Sge {
                addr: i,
                length: 1,
                lkey: 7,
            })
            .collect();
        for n in [0, 1, 32, 33, 200] {
            let s = q.push(&wqe(SendData::Inline(&bytes[..n])));
            let e = q.get(s).expect("there");
            assert_eq!(q.inline(e), &bytes[..n]);
            assert!(e.is_inline() && e.signaled());
        }
        for n in [0, 1, 2, 3, 5] {
            let s = q.push(&wqe(SendData::Sges(&sges[..n])));
            assert_eq!(q.sges(q.get(s).expect("there")), &sges[..n]);
        }
        assert_eq!(q.big.len(), 4);
        while q.pop_front().is_some() {}
        q.push(&wqe(SendData::Inline(&bytes)));
        assert_eq!(q.big.len(), 4, "the slab is reused");
    }

    #[test]
    fn numbers_go_on_after_entries_left_and_wrap() {
        let mut q = SendQueue {
            base: u32::MAX,
            ..SendQueue::default()
        };
        let w = wqe(SendData::Sges(&[]));
        assert_eq!(q.push(&w), u32::MAX);
        assert_eq!(q.push(&w), 0);
        q.pop_front();
        assert!(q.get(u32::MAX).is_none());
        assert!(q.get(0).is_some());
        assert!(q.get(1).is_none());
    }
}
