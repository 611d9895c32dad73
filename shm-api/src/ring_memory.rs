//! The memory of one ring: a checked part of a shared mapping. All rings of this crate access their
//! words and slots through it.

use crate::shared_memory::{OutOfBounds, SharedMemory};
use core::sync::atomic::{AtomicU32, AtomicU64};
use std::ptr::NonNull;
use std::sync::Arc;

/// Rings begin at a multiple of a cache line.
const ALIGNMENT: usize = 64;

/// First byte of a ring, and the mapping that contains it.
#[derive(Clone)]
pub(crate) struct RingMemory {
    base: NonNull<u8>,
    _shared_memory: Arc<SharedMemory>,
}

// SAFETY: the Arc keeps the mapping alive on any thread, and this type returns only atomics and raw
// pointers.
unsafe impl Send for RingMemory {}
// SAFETY: as above.
unsafe impl Sync for RingMemory {}

impl RingMemory {
    /// The ring of `len` bytes at `offset`, which must be 64-aligned and inside a writable mapping.
    pub(crate) fn new(
        memory: Arc<SharedMemory>,
        offset: usize,
        len: usize,
    ) -> Result<Self, OutOfBounds> {
        if !offset.is_multiple_of(ALIGNMENT) || !memory.is_writable() {
            return Err(OutOfBounds);
        }
        let base = NonNull::new(memory.ptr_at(offset, len)?).ok_or(OutOfBounds)?;
        Ok(RingMemory {
            base,
            _shared_memory: memory,
        })
    }

    /// Address of the byte at `offset`.
    #[inline]
    pub(crate) fn ptr_at(&self, offset: usize) -> *mut u8 {
        self.base.as_ptr().wrapping_add(offset)
    }

    /// The 32-bit word at `offset`.
    ///
    /// # Safety
    ///
    /// `offset` is a multiple of 4, and the word lies inside the length that [`Self::new`] checked.
    /// Only atomics and raw copies of ring entries access it.
    #[inline]
    pub(crate) unsafe fn word_at(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: aligned, since the mapping is page-aligned and the ring 64-aligned; inside, as the
        // caller promises; alive as long as the Arc.
        unsafe { AtomicU32::from_ptr(self.ptr_at(offset).cast()) }
    }

    /// The 64-bit word at `offset`.
    ///
    /// # Safety
    ///
    /// Same as for [`Self::word_at`], with a multiple of 8.
    #[inline]
    pub(crate) unsafe fn long_word_at(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: as in `word_at`.
        unsafe { AtomicU64::from_ptr(self.ptr_at(offset).cast()) }
    }
}

/// Where a ring is, as data.
#[cfg(feature = "serde")]
#[derive(serde::Serialize, serde::Deserialize)]
pub(crate) struct RingPlace {
    #[serde(with = "crate::saved")]
    memory: Arc<SharedMemory>,
    offset: usize,
}

#[cfg(feature = "serde")]
impl RingMemory {
    pub(crate) fn place(&self) -> RingPlace {
        let memory = self._shared_memory.clone();
        RingPlace {
            offset: self.base.addr().get() - memory.start_address(),
            memory,
        }
    }
}

#[cfg(feature = "serde")]
impl RingPlace {
    /// The ring of `len` bytes at this place, which is checked as that of a new ring.
    pub(crate) fn open(self, len: usize) -> Result<RingMemory, OutOfBounds> {
        RingMemory::new(self.memory, self.offset, len)
    }
}
