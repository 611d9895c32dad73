//! Tracks the messages that still have buffers in a port. A frame refers to registered memory through
//! DPDK's external buffers; each message in flight has one counter of these references, with a tracker
//! from its first referenced byte on.

use std::sync::Arc;

use dpdk::{ExtMemory, ExtTracker, Mbuf, TrackerId, TrackerPool};
use siw_iwarp::ExtBufRef;
use siw_shm::SharedMemory;

#[derive(Default)]
struct RefSlot {
    tracker: Option<ExtTracker>,
    /// Address of the region that the tracker keeps; another region of the same message is
    /// copied instead of referenced.
    region: usize,
}

/// Messages that had buffers of given memory in a port at one point in time, and their trackers.
#[derive(Default)]
pub struct HeldFrames(Vec<(ExtBufRef, TrackerId)>);

impl HeldFrames {
    /// True if the ports have released all of them.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The external buffer references of one worker's messages.
pub struct ExtBufRefs {
    slots: Vec<RefSlot>,
    free: Vec<u32>,
    trackers: TrackerPool,
}

impl ExtBufRefs {
    /// Room for `capacity` messages with referenced memory in flight; further ones are copied.
    pub fn new(capacity: usize) -> ExtBufRefs {
        ExtBufRefs {
            slots: Vec::new(),
            free: Vec::new(),
            trackers: TrackerPool::new(capacity),
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
            self.free.push(ext_buf.0);
        }
    }

    /// True if no port holds a buffer of this message.
    #[inline]
    pub fn is_released(&self, ext_buf: ExtBufRef) -> bool {
        self.slots
            .get(ext_buf.0 as usize)
            .and_then(|slot| slot.tracker.as_ref())
            .is_none_or(|tracker| tracker.outstanding_mbufs() == 0)
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

    /// Messages, including finished ones, that have buffers of these regions in a port now. Scans all
    /// slots: for the end of a registration, not for the data path.
    pub fn frames_held_of(&self, regions: &[Arc<SharedMemory>]) -> HeldFrames {
        let is_named = |address| {
            let mut regions = regions.iter();
            regions.any(|region| Arc::as_ptr(region) as usize == address)
        };
        let mut held = HeldFrames::default();
        for (slot, message) in self.slots.iter().enumerate() {
            if let Some(tracker) = &message.tracker
                && tracker.outstanding_mbufs() > 0
                && is_named(message.region)
            {
                let id = self.trackers.id_of(tracker);
                held.0.push((ExtBufRef(slot as u32), id));
            }
        }
        for region in regions {
            let ended = self.trackers.ended_trackers_of(Arc::as_ptr(region).cast());
            held.0.extend(ended.map(|id| (ExtBufRef::NONE, id)));
        }
        held
    }

    /// Removes the messages whose buffers the ports have released meanwhile.
    pub fn drop_released(&self, held: &mut HeldFrames) {
        held.0.retain(|(message, id)| {
            let slot = self.slots.get(message.0 as usize);
            match slot.and_then(|slot| slot.tracker.as_ref()) {
                Some(tracker) if self.trackers.id_of(tracker) == *id => {
                    tracker.outstanding_mbufs() > 0
                }
                // The message is done.
                _ => self.trackers.has_mbufs_out(*id),
            }
        });
    }

    /// True if a port still holds buffers of finished messages.
    #[inline]
    pub fn has_unreleased(&self) -> bool {
        self.trackers.zombie_count() > 0
    }

    /// Takes back the trackers of finished messages whose buffers the port has released. Called at
    /// intervals.
    pub fn sweep(&mut self) {
        self.trackers.sweep_released();
    }
}
