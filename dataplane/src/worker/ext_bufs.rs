//! Tracks the messages that still have buffers in a port. A frame refers to registered memory through
//! DPDK's external buffers; each message in flight has one counter of these references, with a tracker
//! from its first referenced byte on.

use std::sync::Arc;

use dpdk::{ExtMemory, ExtTracker, Mbuf, TrackerId, TrackerPool};
use siw_iwarp::ExtBufRef;
use siw_shm::SharedMemory;

use crate::ids::Qpn;

#[derive(Default)]
struct RefSlot {
    tracker: Option<ExtTracker>,
    /// Address of the region that the tracker keeps; another region of the same message is
    /// copied instead of referenced.
    region: usize,
    /// The message is acknowledged, and its queue pair waits until ports release its buffers.
    waits: Option<ReleaseWait>,
}

/// A queue pair that waits for the release of a message's buffers.
struct ReleaseWait {
    qpn: Qpn,
    /// Tracker of the message, which has ended: the message is not sent again.
    tracker: TrackerId,
}

/// A wait until the ports have released all buffers of given memory: first a search for the messages that
/// have such buffers, a bounded part at a time, then the wait for those found.
pub struct HeldFrames {
    /// The memory, in the order of its addresses; `None` when the search has ended.
    regions: Option<Arc<[Arc<SharedMemory>]>>,
    /// Next message to look at.
    next_slot: usize,
    /// Messages found whose buffers were not seen released yet, and their trackers.
    found: Vec<(ExtBufRef, TrackerId)>,
}

impl HeldFrames {
    /// Starts a search for messages that have buffers of these regions in a port. Regions are in the
    /// order of [`region_address`].
    pub fn of_regions(regions: Arc<[Arc<SharedMemory>]>) -> HeldFrames {
        debug_assert!(regions.is_sorted_by_key(region_address));
        HeldFrames {
            regions: Some(regions),
            next_slot: 0,
            found: Vec::new(),
        }
    }

    /// True while not all messages have been looked at.
    pub fn is_searching(&self) -> bool {
        self.regions.is_some()
    }

    /// True if the ports have released all buffers.
    pub fn is_empty(&self) -> bool {
        !self.is_searching() && self.found.is_empty()
    }
}

/// What tells regions apart, for [`HeldFrames::of_regions`].
pub(crate) fn region_address(region: &Arc<SharedMemory>) -> usize {
    Arc::as_ptr(region) as usize
}

/// The external buffer references of one worker's messages.
pub struct ExtBufRefs {
    slots: Vec<RefSlot>,
    free: Vec<u32>,
    trackers: TrackerPool,
    /// Messages whose release a queue pair waits for.
    waits: usize,
}

impl ExtBufRefs {
    /// Room for `capacity` messages with referenced memory in flight; further ones are copied.
    pub fn new(capacity: usize) -> ExtBufRefs {
        ExtBufRefs {
            slots: Vec::new(),
            free: Vec::new(),
            trackers: TrackerPool::new(capacity),
            waits: 0,
        }
    }

    /// Allocates a counter for a new message.
    #[inline]
    pub fn alloc(&mut self) -> ExtBufRef {
        if let Some(slot) = self.free.pop() {
            return ExtBufRef(slot);
        }
        self.slots.push(RefSlot::default());
        ExtBufRef((self.slots.len() - 1) as u32)
    }

    /// Frees the counter of a finished message. Its memory stays mapped until no port holds a buffer
    /// of it.
    #[inline]
    pub fn free(&mut self, ext_buf: ExtBufRef) {
        if let Some(slot) = self.slots.get_mut(ext_buf.0 as usize) {
            if let Some(tracker) = slot.tracker.take() {
                self.trackers.free(tracker);
            }
            self.waits -= usize::from(slot.waits.take().is_some());
            self.free.push(ext_buf.0);
        }
    }

    /// Returns true if no port holds a buffer of this acknowledged message. Otherwise
    /// [`Self::pop_released`] returns `qpn` when the last one is released.
    #[inline]
    pub fn await_release(&mut self, ext_buf: ExtBufRef, qpn: Qpn) -> bool {
        let Some(slot) = self.slots.get_mut(ext_buf.0 as usize) else {
            return true;
        };
        if slot.waits.is_some() {
            return false;
        }
        let is_held = |tracker: &mut ExtTracker| tracker.outstanding_mbufs() > 0;
        let Some(tracker) = slot.tracker.take_if(is_held) else {
            return true;
        };
        let held = self.trackers.free_and_await(tracker, ext_buf.0);
        slot.waits = held.map(|tracker| ReleaseWait { qpn, tracker });
        self.waits += usize::from(slot.waits.is_some());
        slot.waits.is_none()
    }

    /// Takes back the memory of up to `most` messages that ports have released.
    #[inline]
    pub fn reclaim_released(&mut self, most: usize) {
        self.trackers.reclaim_released(most);
    }

    /// Queue pair whose wait ended with a release that [`Self::reclaim_released`] has found.
    #[inline]
    pub fn pop_released(&mut self) -> Option<Qpn> {
        while let Some(released) = self.trackers.pop_notice() {
            // The message may have been flushed meanwhile.
            if let Some(slot) = self.slots.get_mut(released.waiter as usize)
                && let Some(wait) = slot.waits.take_if(|wait| wait.tracker == released.tracker)
            {
                self.waits -= 1;
                return Some(wait.qpn);
            }
        }
        None
    }

    /// Points `mbuf` at registered memory on behalf of a message. Returns false if the payload must be
    /// copied instead.
    #[inline]
    pub fn attach(
        &mut self,
        ext_buf: ExtBufRef,
        region: &Arc<SharedMemory>,
        offset: u64,
        len: u16,
        mbuf: &mut Mbuf,
    ) -> bool {
        let Some(slot) = self.slots.get_mut(ext_buf.0 as usize) else {
            return false;
        };
        let address = Arc::as_ptr(region) as usize;
        if slot.tracker.is_none() {
            let memory: Arc<dyn ExtMemory> = region.clone();
            slot.tracker = self.trackers.alloc(memory);
            slot.region = address;
        }
        match &slot.tracker {
            Some(tracker) if slot.region == address => tracker.attach(mbuf, offset, len),
            _ => false,
        }
    }

    /// Looks at up to `most` further messages, and forgets those whose buffers the ports have released.
    /// Messages that start meanwhile may be found as well.
    pub fn continue_search(&self, held: &mut HeldFrames, most: usize) {
        if let Some(regions) = &held.regions {
            let is_named = |address| {
                regions
                    .binary_search_by_key(&address, region_address)
                    .is_ok()
            };
            let part = self
                .slots
                .iter()
                .enumerate()
                .skip(held.next_slot)
                .take(most);
            for (slot, message) in part {
                if let Some(tracker) = &message.tracker
                    && is_named(message.region)
                    && tracker.outstanding_mbufs() > 0
                {
                    let id = self.trackers.id_of(tracker);
                    held.found.push((ExtBufRef(slot as u32), id));
                }
            }
            held.next_slot += most;
            if held.next_slot < self.slots.len() {
                return;
            }
            // Those that have ended, some of them since the search began.
            let ended = self.trackers.ended_trackers_of(is_named);
            held.found.extend(ended.map(|id| (ExtBufRef::NONE, id)));
            // The control thread frees the memory.
            held.regions = None;
        }
        while let Some((message, id)) = held.found.last()
            && !self.is_held(*message, *id)
        {
            held.found.pop();
        }
    }

    fn is_held(&self, message: ExtBufRef, id: TrackerId) -> bool {
        let slot = self.slots.get(message.0 as usize);
        match slot.and_then(|slot| slot.tracker.as_ref()) {
            Some(tracker) if self.trackers.id_of(tracker) == id => tracker.outstanding_mbufs() > 0,
            // The message is done.
            _ => self.trackers.is_zombie(id),
        }
    }

    /// True if a queue pair waits for a release.
    #[inline]
    pub fn has_waits(&self) -> bool {
        self.waits > 0
    }

    /// True if memory of acknowledged or finished messages is still to be taken back from ports, or a
    /// wait for it to end.
    #[inline]
    pub fn has_unreleased(&self) -> bool {
        self.has_waits() || self.trackers.zombie_count() > 0
    }
}

#[cfg(test)]
mod tests {
    use dpdk::Mempool;

    use super::*;
    use crate::datapath::test_environment;

    const MESSAGES: usize = 200;

    fn new_frame(
        ext_bufs: &mut ExtBufRefs,
        message: ExtBufRef,
        memory: &Arc<SharedMemory>,
        pool: &Mempool,
    ) -> Mbuf {
        let mut frame = Mbuf::alloc(pool).unwrap();
        assert!(ext_bufs.attach(message, memory, 64, 1000, &mut frame));
        frame
    }

    #[test]
    fn a_release_wakes_the_queue_pair_that_waits_for_it_and_no_other() {
        let pool = Mempool::new(test_environment(), "woken", 255, 0, 2048, None).unwrap();
        let memory = Arc::new(SharedMemory::new_anonymous(8192).unwrap());
        let mut ext_bufs = ExtBufRefs::new(MESSAGES);
        let messages: Vec<_> = (0..MESSAGES).map(|_| ext_bufs.alloc()).collect();
        let mut frames: Vec<_> = messages
            .iter()
            .map(|message| Some(new_frame(&mut ext_bufs, *message, &memory, &pool)))
            .collect();
        for (number, message) in messages.iter().enumerate() {
            assert!(!ext_bufs.await_release(*message, Qpn(number as u32)));
        }
        assert!(ext_bufs.has_waits());
        for number in [7, 150, 0] {
            ext_bufs.reclaim_released(MESSAGES);
            assert_eq!(ext_bufs.pop_released(), None, "nothing was released");
            frames[number] = None;
            ext_bufs.reclaim_released(MESSAGES);
            assert_eq!(ext_bufs.pop_released(), Some(Qpn(number as u32)));
            assert_eq!(ext_bufs.pop_released(), None);
            assert!(ext_bufs.await_release(messages[number], Qpn(number as u32)));
        }
        // A batch takes a bounded number of releases.
        frames.clear();
        let mut woken = 0;
        while ext_bufs.has_waits() {
            ext_bufs.reclaim_released(10);
            let now = std::iter::from_fn(|| ext_bufs.pop_released()).count();
            assert!((1..=10).contains(&now));
            woken += now;
        }
        assert_eq!(woken, MESSAGES - 3);
        assert!(!ext_bufs.has_unreleased());
        assert_eq!(Arc::strong_count(&memory), 1);
    }

    #[test]
    fn the_release_of_a_flushed_message_wakes_nothing() {
        let pool = Mempool::new(test_environment(), "flushed", 255, 0, 2048, None).unwrap();
        let memory = Arc::new(SharedMemory::new_anonymous(8192).unwrap());
        let mut ext_bufs = ExtBufRefs::new(2);
        let flushed = ext_bufs.alloc();
        let late = new_frame(&mut ext_bufs, flushed, &memory, &pool);
        assert!(!ext_bufs.await_release(flushed, Qpn(1)));
        ext_bufs.free(flushed);
        assert!(!ext_bufs.has_waits() && ext_bufs.has_unreleased());
        let next = ext_bufs.alloc();
        assert_eq!(next, flushed, "reused");
        let frame = new_frame(&mut ext_bufs, next, &memory, &pool);
        assert!(!ext_bufs.await_release(next, Qpn(2)));
        drop(late);
        ext_bufs.reclaim_released(2);
        assert_eq!(ext_bufs.pop_released(), None);
        assert!(!ext_bufs.await_release(next, Qpn(2)));
        drop(frame);
        ext_bufs.reclaim_released(2);
        assert_eq!(ext_bufs.pop_released(), Some(Qpn(2)));
        assert!(!ext_bufs.has_waits() && !ext_bufs.has_unreleased());
    }
}
