//! The worker's private copies of unfinished send work requests.
//!
//! Entries are compact: up to two scatter/gather elements or 32 inline bytes lie in the entry, larger
//! contents in a slab that grows to the number in use. An idle queue pair has no allocation, and
//! steady state allocates nothing. The requester adds entries, acknowledgements and responses mark
//! them, completion removes them.

use crate::environment::ExtBufRef;
use crate::record::MessageSlot;
use serde::{Deserialize, Serialize};
use siw_shm::prefetch::prefetch_line;
use siw_shm::wqe::{MAX_INLINE, MAX_SGE};
use siw_shm::{AtomicArgs, Opcode, PlainSend, SendWqe, Sge, WcStatus, WrFlags};
use std::collections::VecDeque;

const SMALL_SGES: usize = 2;
const SMALL_INLINE: usize = 32;
const LARGE_SGES: usize = MAX_SGE;
/// [`SendEntry::large`] of an entry without a place in the slab.
const NOT_LARGE: u32 = u32::MAX;

const _: () = assert!(MAX_INLINE <= LARGE_SGES * size_of::<Sge>());

/// One send work request.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct SendEntry {
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
    /// MSN of its (first) untagged message; valid from its first segment on.
    pub msn: u32,
    /// None after it was restored: frames that referred to its payload do not outlive the port that had
    /// them, and its retransmissions are copied.
    #[serde(skip, default = "no_reference")]
    pub ext_buf_ref: ExtBufRef,
    /// Index of its place in the slab.
    large: u32,
    pub opcode: Opcode,
    flags: WrFlags,
    sge_count: u8,
    /// Number of Read Requests, or Immediate Data messages, sent for it.
    pub messages_sent: u8,
    /// If not success: it fails as soon as its turn to complete comes.
    pub status: WcStatus,
    /// Its last segment is acknowledged.
    pub is_acked: bool,
    /// Its response has been placed.
    pub is_answered: bool,
}

fn no_reference() -> ExtBufRef {
    ExtBufRef::NONE
}

impl SendEntry {
    fn new(wqe: &SendWqe) -> Self {
        SendEntry {
            wr_id: wqe.wr_id,
            remote_addr: wqe.remote_addr,
            small: [Sge::default(); SMALL_SGES],
            length: wqe.length,
            rkey: wqe.rkey,
            imm: wqe.imm,
            sent: 0,
            msn: 0,
            ext_buf_ref: ExtBufRef::NONE,
            large: NOT_LARGE,
            opcode: wqe.opcode,
            flags: wqe.flags,
            sge_count: 0,
            messages_sent: 0,
            status: WcStatus::SUCCESS,
            is_acked: false,
            is_answered: false,
        }
    }

    /// Returns whether it completes visibly even on success.
    #[inline]
    pub fn is_signaled(&self) -> bool {
        self.flags.contains(WrFlags::SIGNALED)
    }

    /// Returns whether it waits until no earlier Read or atomic is outstanding.
    #[inline]
    pub fn is_fenced(&self) -> bool {
        self.flags.contains(WrFlags::FENCE)
    }

    /// Returns whether part of it has been handed to TCP.
    #[inline]
    pub fn is_started(&self) -> bool {
        self.sent > 0 || self.messages_sent > 0
    }

    /// Returns whether it requests a solicited event at the peer.
    #[inline]
    pub fn is_solicited(&self) -> bool {
        self.flags.contains(WrFlags::SOLICITED)
    }

    /// Returns whether its payload is inline in the work request.
    #[inline]
    pub fn is_inline(&self) -> bool {
        self.flags.contains(WrFlags::INLINE)
    }

    /// Its only element, if stored in the entry.
    #[inline(always)]
    fn only_sge(&self) -> Option<&Sge> {
        (self.sge_count == 1 && self.large == NOT_LARGE).then_some(&self.small[0])
    }

    /// The element that all of its payload is copied from, if there is only one.
    #[inline(always)]
    pub fn copied_sge(&self) -> Option<&Sge> {
        self.only_sge()
            .filter(|_| self.ext_buf_ref == ExtBufRef::NONE)
    }

    /// Returns whether it is finished on the wire.
    #[inline]
    pub fn is_done(&self) -> bool {
        self.is_acked && (!self.opcode.awaits_response() || self.is_answered)
    }
}

/// The entries, numbered by posting order. Fields that every message accesses come first.
#[derive(Debug, Default, Serialize, Deserialize)]
#[repr(C)]
pub(crate) struct WorkRequestQueue {
    base: MessageSlot,
    /// Number of entries with a place in the slab.
    large_count: u32,
    entries: VecDeque<SendEntry>,
    slab: Vec<[Sge; LARGE_SGES]>,
    free_in_slab: Vec<u32>,
}

impl WorkRequestQueue {
    /// Bytes at the start that every message accesses.
    pub const HOT_BYTES: usize = std::mem::offset_of!(WorkRequestQueue, slab);

    /// Returns whether every work request is completed.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Number of work requests that are not completed.
    #[inline]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Prefetches the place that the next work request is copied to, if the queue is empty: pushing
    /// then reuses the memory of the first entry.
    #[inline]
    pub fn prefetch_for_pushing(&mut self) {
        if self.entries.is_empty() && self.entries.capacity() > 0 {
            self.entries.clear();
            let start = self.entries.as_slices().0.as_ptr().cast::<u8>();
            prefetch_line(start);
            prefetch_line(start.wrapping_add(64));
        }
    }

    /// Prefetches the oldest work request, which is to be completed.
    #[inline]
    pub fn prefetch_front(&self) {
        if let Some(entry) = self.entries.front() {
            let start = (&raw const *entry).cast::<u8>();
            prefetch_line(start);
            prefetch_line(start.wrapping_add(size_of::<SendEntry>() - 1));
        }
    }

    /// Copies in a single-segment message that is handed to TCP at once. `msn`: MSN if it is a Send.
    #[inline(always)]
    pub fn push_sent(&mut self, request: &PlainSend, msn: u32) {
        self.entries.push_back(SendEntry {
            wr_id: request.wr_id,
            remote_addr: request.remote_addr,
            small: [request.sge, Sge::default()],
            length: request.sge.length,
            rkey: request.rkey,
            imm: request.imm,
            sent: request.sge.length,
            msn,
            ext_buf_ref: ExtBufRef::NONE,
            large: NOT_LARGE,
            opcode: request.opcode,
            flags: request.flags,
            sge_count: 1,
            messages_sent: 0,
            status: WcStatus::SUCCESS,
            is_acked: false,
            is_answered: false,
        });
    }

    /// Slot of the next work request.
    #[inline]
    pub fn next_slot(&self) -> MessageSlot {
        self.base.advanced_by(self.entries.len())
    }

    /// Copies a work request into the queue.
    #[inline(never)]
    pub fn push(&mut self, wqe: &SendWqe) -> MessageSlot {
        let slot = self.next_slot();
        let mut entry = SendEntry::new(wqe);
        if let Some(data) = wqe.inline_data() {
            if data.len() <= SMALL_INLINE {
                let small = bytemuck::cast_slice_mut::<Sge, u8>(&mut entry.small);
                small[..data.len()].copy_from_slice(data);
            } else {
                entry.large = self.alloc_in_slab();
                let large = &mut self.slab[entry.large as usize];
                let large = bytemuck::cast_slice_mut::<Sge, u8>(large);
                large[..data.len()].copy_from_slice(data);
            }
        } else if let (Some(args), Some(sge)) = (wqe.atomic_args(), wqe.sges().first()) {
            entry.sge_count = 1;
            entry.large = self.alloc_in_slab();
            let large = &mut self.slab[entry.large as usize];
            large[0] = *sge;
            let operands = bytemuck::cast_slice_mut::<Sge, u64>(&mut large[1..3]);
            operands.copy_from_slice(&[
                args.add_or_swap,
                args.add_or_swap_mask,
                args.compare,
                args.compare_mask,
            ]);
        } else {
            let sges = wqe.sges();
            entry.sge_count = sges.len() as u8;
            if sges.len() <= SMALL_SGES {
                entry.small[..sges.len()].copy_from_slice(sges);
            } else {
                entry.large = self.alloc_in_slab();
                self.slab[entry.large as usize][..sges.len()].copy_from_slice(sges);
            }
        }
        self.entries.push_back(entry);
        slot
    }

    fn alloc_in_slab(&mut self) -> u32 {
        self.large_count += 1;
        self.free_in_slab.pop().unwrap_or_else(|| {
            self.slab.push([Sge::default(); LARGE_SGES]);
            (self.slab.len() - 1) as u32
        })
    }

    /// Returns the work request in this slot, unless it is completed.
    #[inline]
    pub fn get(&self, slot: MessageSlot) -> Option<&SendEntry> {
        self.entries.get(slot.index_from(self.base))
    }

    /// Mutable variant of [`get`](Self::get).
    #[inline]
    pub fn get_mut(&mut self, slot: MessageSlot) -> Option<&mut SendEntry> {
        self.entries.get_mut(slot.index_from(self.base))
    }

    /// Returns the work requests in the `count` slots from `slot` on that are not completed.
    #[inline]
    pub fn range_mut(
        &mut self,
        slot: MessageSlot,
        count: usize,
    ) -> impl Iterator<Item = &mut SendEntry> {
        let len = self.entries.len();
        let start = slot.index_from(self.base);
        let end = start.saturating_add(count).min(len);
        self.entries.range_mut(start.min(end)..end)
    }

    /// Returns whether this is the oldest work request that is not completed.
    #[inline]
    pub fn is_front(&self, slot: MessageSlot) -> bool {
        slot == self.base
    }

    /// The oldest work request that is not completed.
    #[inline]
    pub fn front(&self) -> Option<&SendEntry> {
        self.entries.front()
    }

    /// Removes the oldest work request.
    #[inline]
    pub fn remove_front(&mut self) {
        self.remove_first(1);
    }

    /// Removes the `count` oldest work requests, or all if there are fewer.
    #[inline]
    pub fn remove_first(&mut self, count: usize) {
        let count = count.min(self.entries.len());
        if self.large_count > 0 {
            for entry in self.entries.range(..count) {
                if entry.large != NOT_LARGE {
                    self.large_count -= 1;
                    self.free_in_slab.push(entry.large);
                }
            }
        }
        self.entries.drain(..count);
        self.base = self.base.advanced_by(count);
    }

    /// All work requests that are not completed, oldest first.
    #[inline]
    pub fn iter(&self) -> impl Iterator<Item = &SendEntry> {
        self.entries.iter()
    }

    /// Mutable variant of [`iter`](Self::iter).
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut SendEntry> {
        self.entries.iter_mut()
    }

    #[inline]
    fn elements<'a>(&'a self, entry: &'a SendEntry) -> &'a [Sge] {
        if entry.large == NOT_LARGE {
            &entry.small
        } else {
            &self.slab[entry.large as usize]
        }
    }

    /// Elements of a message with scatter/gather elements.
    #[inline]
    pub fn sges<'a>(&'a self, entry: &'a SendEntry) -> &'a [Sge] {
        &self.elements(entry)[..usize::from(entry.sge_count)]
    }

    /// Bytes of an inline message.
    #[inline]
    pub fn inline_data<'a>(&'a self, entry: &'a SendEntry) -> &'a [u8] {
        bytemuck::cast_slice::<Sge, u8>(self.elements(entry))
            .get(..entry.length as usize)
            .unwrap_or(&[])
    }

    /// Returns the data sink of the Read Request for the bytes from `offset` on, and its index among
    /// the Read Requests of its work request. Each non-empty element has its own Read Request,
    /// because a Read Request names one tagged buffer (RFC 5040 section 4.4).
    pub fn read_sink(&self, entry: &SendEntry, offset: u32) -> (u32, Sge) {
        let sges = self.sges(entry);
        if entry.length == 0 {
            let sge = sges.first().copied().unwrap_or_default();
            return (0, Sge { length: 0, ..sge });
        }
        let mut start = 0u32;
        let filled = sges.iter().filter(|sge| sge.length > 0);
        for (nth, sge) in filled.enumerate() {
            if start == offset {
                return (nth as u32, *sge);
            }
            start = start.wrapping_add(sge.length);
        }
        (0, Sge::default())
    }

    /// Operands of an atomic.
    pub fn atomic_args(&self, entry: &SendEntry) -> Option<AtomicArgs> {
        let large = self.slab.get(entry.large as usize)?;
        let operands = bytemuck::cast_slice::<Sge, u64>(&large[1..3]);
        Some(AtomicArgs {
            add_or_swap: operands[0],
            add_or_swap_mask: operands[1],
            compare: operands[2],
            compare_mask: operands[3],
        })
    }
}

/// Checks of a queue that was restored.
impl WorkRequestQueue {
    /// Returns whether each place of the slab has one user, and each entry is one that work requests have.
    pub fn is_consistent(&self) -> bool {
        let large = self.entries.iter().map(|entry| entry.large);
        let large: Vec<u32> = large.filter(|large| *large != NOT_LARGE).collect();
        let mut is_used = vec![false; self.slab.len()];
        let users = large.iter().chain(&self.free_in_slab);
        let have_places = users.clone().all(|place| {
            let used = is_used.get_mut(*place as usize);
            used.is_some_and(|used| !std::mem::replace(used, true))
        });
        have_places
            && users.count() == self.slab.len()
            && large.len() == self.large_count as usize
            && self.entries.iter().all(|entry| self.is_sound(entry))
    }

    fn is_sound(&self, entry: &SendEntry) -> bool {
        if usize::from(entry.sge_count) > self.elements(entry).len() || entry.sent > entry.length {
            return false;
        }
        let mut sum = 0;
        // A Read Request was sent for each element before `sent`.
        let mut is_at_element = entry.sent == 0;
        for sge in self.sges(entry) {
            sum += u64::from(sge.length);
            is_at_element |= sum == u64::from(entry.sent);
        }
        let has_elements = !entry.is_inline() && entry.sge_count > 0 && !entry.opcode.is_local();
        let is_read = matches!(entry.opcode, Opcode::Read | Opcode::ReadWithInv);
        usize::from(entry.messages_sent) <= LARGE_SGES
            && (!has_elements || sum == u64::from(entry.length))
            && (!is_read || is_at_element)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use siw_shm::wqe::{SendData, SendWr};

    fn send_wqe(data: SendData<'_>) -> SendWqe {
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
        let mut queue = WorkRequestQueue::default();
        let bytes: Vec<u8> = (0..200).collect();
        let sges: Vec<Sge> = (0..5)
            .map(|i| Sge {
                addr: i,
                length: 1,
                lkey: 7,
            })
            .collect();
        for len in [0, 1, 32, 33, 200] {
            let slot = queue.push(&send_wqe(SendData::Inline(&bytes[..len])));
            let entry = queue.get(slot).expect("there");
            assert_eq!(queue.inline_data(entry), &bytes[..len]);
            assert!(entry.is_inline() && entry.is_signaled());
        }
        for len in [0, 1, 2, 3, 5] {
            let slot = queue.push(&send_wqe(SendData::Sges(&sges[..len])));
            assert_eq!(queue.sges(queue.get(slot).expect("there")), &sges[..len]);
        }
        assert_eq!(queue.slab.len(), 4);
        while queue.front().is_some() {
            queue.remove_front();
        }
        queue.push(&send_wqe(SendData::Inline(&bytes)));
        assert_eq!(queue.slab.len(), 4, "the slab is used again");
    }

    #[test]
    fn a_damaged_queue_is_found_inconsistent() {
        let sges = [3, 0, 5].map(|length| Sge {
            length,
            ..Sge::default()
        });
        let queue = || {
            let mut queue = WorkRequestQueue::default();
            queue.push(&send_wqe(SendData::Sges(&sges)));
            let mut read = send_wqe(SendData::Sges(&sges[1..]));
            read.opcode = Opcode::Read;
            queue.push(&read);
            queue.push(&send_wqe(SendData::Inline(&[1; 40])));
            assert!(queue.is_consistent());
            queue
        };
        let damages: [fn(&mut WorkRequestQueue); 11] = [
            |queue| queue.large_count = 1,
            |queue| queue.entries[0].large = 2,
            |queue| queue.entries[0].large = queue.entries[2].large,
            |queue| queue.entries[0].large = NOT_LARGE,
            |queue| queue.free_in_slab.push(0),
            |queue| queue.slab.push([Sge::default(); LARGE_SGES]),
            |queue| queue.entries[1].sge_count = 3,
            |queue| queue.entries[0].sge_count = 17,
            |queue| queue.entries[0].sent = 9,
            |queue| queue.entries[0].length = 9,
            |queue| queue.entries[1].sent = 4,
        ];
        for (number, damage) in damages.into_iter().enumerate() {
            let mut queue = queue();
            damage(&mut queue);
            assert!(!queue.is_consistent(), "damage {number}");
        }
        let mut queue = queue();
        (queue.entries[0].sent, queue.entries[1].sent) = (8, 5);
        assert!(queue.is_consistent(), "everything is sent");
    }

    #[test]
    fn slots_wrap_and_outlive_completed_entries() {
        let mut queue = WorkRequestQueue {
            base: MessageSlot(u32::MAX),
            ..WorkRequestQueue::default()
        };
        let wqe = send_wqe(SendData::Sges(&[]));
        assert_eq!(queue.push(&wqe), MessageSlot(u32::MAX));
        assert_eq!(queue.push(&wqe), MessageSlot(0));
        queue.remove_front();
        assert!(queue.get(MessageSlot(u32::MAX)).is_none());
        assert!(queue.get(MessageSlot(0)).is_some());
        assert!(queue.get(MessageSlot(1)).is_none());
    }

    #[test]
    fn entries_stay_where_they_are_while_there_are_some() {
        let mut queue = WorkRequestQueue::default();
        queue.prefetch_for_pushing();
        let wqe = |wr_id| {
            let mut wqe = send_wqe(SendData::Sges(&[]));
            wqe.wr_id = wr_id;
            wqe
        };
        for round in 0..10 {
            queue.push(&wqe(round));
            queue.prefetch_for_pushing();
            queue.push(&wqe(round + 100));
            assert_eq!(queue.front().map(|entry| entry.wr_id), Some(round));
            queue.remove_front();
            queue.prefetch_for_pushing();
            assert_eq!(queue.front().map(|entry| entry.wr_id), Some(round + 100));
            queue.remove_front();
            queue.prefetch_for_pushing();
            assert!(queue.is_empty());
        }
    }
}
