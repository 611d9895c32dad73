//! One ring of an AF_XDP socket: entries in memory that is shared with the kernel, a counter of
//! entries produced and a counter of entries consumed. Each side writes one of the two counters.
//!
//! Orderings: the producer writes entries and then its counter with release, which the consumer
//! loads with acquire; the consumer reads entries and then writes its counter with release, which the
//! producer loads with acquire before it overwrites them. The kernel sets the flag that asks for a
//! wake-up call and then looks at the producer's counter once more; this side writes the counter and
//! then reads the flag, with a full fence between, so that one of the two sees the other's write.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use crate::{Error, Result};

/// Memory of a ring, mapped from its socket. The mapping keeps the socket open.
struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: memory shared with the kernel, bound to no thread.
unsafe impl Send for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `Shared::map_memory`, and no longer used.
        unsafe {
            libc::munmap(self.start.as_ptr().cast(), self.bytes);
        }
    }
}

/// The parts of a ring, inside of its mapping.
struct Shared<T> {
    producer: NonNull<AtomicU32>,
    consumer: NonNull<AtomicU32>,
    flags: NonNull<AtomicU32>,
    entries: NonNull<T>,
    /// Number of entries, a power of two, minus one.
    mask: u32,
    _mapping: Mapping,
}

// SAFETY: as for the mapping that the pointers lead into.
unsafe impl<T: Send> Send for Shared<T> {}

/// Kinds of rings, as `linux/if_xdp.h` numbers their mappings.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RingKind {
    Receive,
    Transmit,
    Fill,
    Completion,
}

impl RingKind {
    fn page_offset(self) -> libc::off_t {
        match self {
            RingKind::Receive => libc::XDP_PGOFF_RX_RING,
            RingKind::Transmit => libc::XDP_PGOFF_TX_RING,
            RingKind::Fill => libc::XDP_UMEM_PGOFF_FILL_RING as libc::off_t,
            RingKind::Completion => libc::XDP_UMEM_PGOFF_COMPLETION_RING as libc::off_t,
        }
    }

    fn offsets(self, all: &libc::xdp_mmap_offsets) -> libc::xdp_ring_offset {
        match self {
            RingKind::Receive => all.rx,
            RingKind::Transmit => all.tx,
            RingKind::Fill => all.fr,
            RingKind::Completion => all.cr,
        }
    }
}

impl<T> Shared<T> {
    /// `entries`: the power of two that the ring was created with.
    fn map_memory(
        socket: BorrowedFd<'_>,
        kind: RingKind,
        entries: u32,
        offsets: &libc::xdp_mmap_offsets,
    ) -> Result<Self> {
        let at = kind.offsets(offsets);
        let bytes = at.desc as usize + entries as usize * size_of::<T>();
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                socket.as_raw_fd(),
                kind.page_offset(),
            )
        };
        let start = match NonNull::new(start.cast::<u8>()) {
            Some(start) if start.as_ptr().cast() != libc::MAP_FAILED => start,
            _ => return Err(Error::last_call("mapping a ring of an AF_XDP socket")),
        };
        // SAFETY: the kernel gave offsets within the mapping, aligned for the fields at them.
        unsafe {
            Ok(Self {
                producer: start.add(at.producer as usize).cast(),
                consumer: start.add(at.consumer as usize).cast(),
                flags: start.add(at.flags as usize).cast(),
                entries: start.add(at.desc as usize).cast(),
                mask: entries - 1,
                _mapping: Mapping { start, bytes },
            })
        }
    }

    #[inline]
    fn producer_counter(&self) -> &AtomicU32 {
        // SAFETY: within the mapping, which lives as long as `self`.
        unsafe { self.producer.as_ref() }
    }

    #[inline]
    fn consumer_counter(&self) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { self.consumer.as_ref() }
    }

    #[inline]
    fn ring_flags(&self) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { self.flags.as_ref() }
    }

    #[inline]
    fn entry_at(&self, index: u32) -> NonNull<T> {
        // SAFETY: the mask keeps the index below the number of entries.
        unsafe { self.entries.add((index & self.mask) as usize) }
    }
}

/// A ring that this process fills.
pub(crate) struct ProducerRing<T> {
    shared: Shared<T>,
    /// The next entry to write; the kernel knows of those before `published`.
    next: u32,
    published: u32,
    /// The kernel's counter of consumed entries when it was last read.
    consumed: u32,
}

impl<T> ProducerRing<T> {
    pub(crate) fn map_ring(
        socket: BorrowedFd<'_>,
        kind: RingKind,
        entries: u32,
        offsets: &libc::xdp_mmap_offsets,
    ) -> Result<Self> {
        Ok(Self {
            shared: Shared::map_memory(socket, kind, entries, offsets)?,
            next: 0,
            published: 0,
            consumed: 0,
        })
    }

    /// Number of entries that can be pushed. The kernel's counter, in a cache line that it writes, is
    /// read only if fewer than `wanted` entries are known to be free.
    #[inline]
    pub(crate) fn free_entries(&mut self, wanted: u32) -> u32 {
        let size = self.shared.mask + 1;
        let free = size - self.next.wrapping_sub(self.consumed);
        if free >= wanted {
            return free;
        }
        self.consumed = self.shared.consumer_counter().load(Ordering::Acquire);
        size - self.next.wrapping_sub(self.consumed)
    }

    /// Writes an entry; returns false if there is no room.
    #[inline]
    pub(crate) fn push(&mut self, value: T) -> bool {
        if self.free_entries(1) == 0 {
            return false;
        }
        // SAFETY: the kernel has consumed the slot's previous entry, and does not read the new one
        // until it is published.
        unsafe { self.shared.entry_at(self.next).write(value) };
        self.next = self.next.wrapping_add(1);
        true
    }

    /// Makes the pushed entries visible to the kernel, before [`Self::needs_wakeup`] reads its flag.
    #[inline]
    pub(crate) fn publish_entries(&mut self) {
        if self.published != self.next {
            self.published = self.next;
            // Release: the entries come before the counter.
            self.shared
                .producer_counter()
                .store(self.next, Ordering::Release);
            fence(Ordering::SeqCst);
        }
    }

    /// Number of entries that the kernel has not consumed.
    #[inline]
    pub(crate) fn unconsumed_entries(&mut self) -> u32 {
        self.consumed = self.shared.consumer_counter().load(Ordering::Acquire);
        self.next.wrapping_sub(self.consumed)
    }

    /// True if the kernel reads the ring only after a wake-up call.
    #[inline]
    pub(crate) fn needs_wakeup(&self) -> bool {
        self.shared.ring_flags().load(Ordering::Relaxed) & libc::XDP_RING_NEED_WAKEUP != 0
    }
}

/// A ring that the kernel fills.
pub(crate) struct ConsumerRing<T> {
    shared: Shared<T>,
    /// The next entry to read.
    next: u32,
    /// The kernel's counter of produced entries when it was last read.
    produced: u32,
}

impl<T: Copy> ConsumerRing<T> {
    pub(crate) fn map_ring(
        socket: BorrowedFd<'_>,
        kind: RingKind,
        entries: u32,
        offsets: &libc::xdp_mmap_offsets,
    ) -> Result<Self> {
        Ok(Self {
            shared: Shared::map_memory(socket, kind, entries, offsets)?,
            next: 0,
            produced: 0,
        })
    }

    /// Number of entries that can be popped. The kernel's counter is read only if no known entry is
    /// left.
    #[inline]
    pub(crate) fn available_entries(&mut self) -> u32 {
        let known = self.produced.wrapping_sub(self.next);
        if known != 0 {
            return known;
        }
        self.produced = self.shared.producer_counter().load(Ordering::Acquire);
        self.produced.wrapping_sub(self.next)
    }

    /// Reads an entry; the kernel may overwrite it after [`Self::release_entries`].
    #[inline]
    pub(crate) fn pop(&mut self) -> Option<T> {
        if self.available_entries() == 0 {
            return None;
        }
        // SAFETY: the kernel has produced the entry, and does not write it before it is released.
        let value = unsafe { self.shared.entry_at(self.next).read() };
        self.next = self.next.wrapping_add(1);
        Some(value)
    }

    /// Returns the entries that were read to the kernel.
    #[inline]
    pub(crate) fn release_entries(&mut self) {
        // Release: the entries were read before.
        self.shared
            .consumer_counter()
            .store(self.next, Ordering::Release);
    }
}
