//! Which work requests still have buffers in a port: one owner per message in flight, with
//! a tracker from its first referenced byte on.

use std::sync::Arc;

use dpdk::{ExtMemory, ExtTracker, Mbuf, TrackerPool};
use siw_iwarp::ExtBufRef;
use siw_shm::SharedMemory;

#[derive(Default)]
struct RefSlot {
    tracker: Option<ExtTracker>,
    /// Address of the region that the tracker keeps; another region of the same message is
    /// copied instead of referenced.
    region: usize,
}

/// The external buffer references of one worker.
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

    /// A fresh owner.
    #[inline]
    pub fn alloc(&mut self) -> ExtBufRef {
        if let Some(i) = self.free.pop() {
            return ExtBufRef(i);
        }
        self.slots.push(RefSlot::default());
        ExtBufRef((self.slots.len() - 1) as u32)
    }

    /// The message is done.
    #[inline]
    pub fn free(&mut self, owner: ExtBufRef) {
        if let Some(o) = self.slots.get_mut(owner.0 as usize) {
            if let Some(t) = o.tracker.take() {
                self.trackers.free(t);
            }
            self.free.push(owner.0);
        }
    }

    /// No port holds a buffer of this message any more.
    #[inline]
    pub fn released(&self, owner: ExtBufRef) -> bool {
        self.slots
            .get(owner.0 as usize)
            .and_then(|o| o.tracker.as_ref())
            .is_none_or(|t| t.outstanding_mbufs() == 0)
    }

    /// Points `mbuf` at registered memory on behalf of a message. False: copy instead.
    #[inline]
    pub fn attach(
        &mut self,
        owner: ExtBufRef,
        region: &Arc<SharedMemory>,
        offset: u64,
        len: u16,
        mbuf: &mut Mbuf,
    ) -> bool {
        let Some(o) = self.slots.get_mut(owner.0 as usize) else {
            return false;
        };
        let id = Arc::as_ptr(region) as usize;
        if o.tracker.is_none() {
            let memory: Arc<dyn ExtMemory> = region.clone();
            o.tracker = self.trackers.alloc(memory);
            o.region = id;
        }
        match &o.tracker {
            Some(t) if o.region == id => t.attach(mbuf, offset, len),
            _ => false,
        }
    }

    /// Takes back trackers of ended messages whose buffers have come home. Now and then.
    pub fn sweep(&mut self) {
        self.trackers.sweep_released();
    }

    /// Trackers whose buffers a port still holds although their message is over.
    pub fn unreleased(&self) -> usize {
        self.trackers.zombie_count()
    }
}
