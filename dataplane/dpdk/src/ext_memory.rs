//! Memory outside DPDK that mbufs may point to, such as the arenas that applications register. The
//! owner of the mapping implements the trait.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::{self, NonNull};

/// A range of external memory.
#[derive(Debug, Clone, Copy)]
pub struct ExtSlice {
    /// The address for the CPU.
    pub ptr: NonNull<u8>,
    /// The address for a NIC: equal to `ptr` unless I/O addresses are physical or come from an
    /// [`crate::IovaSpace`].
    pub iova: u64,
}

/// Memory that stays mapped while this value lives.
///
/// # Safety
/// The range returned by [`Self::slice`] stays readable for `len` bytes while the implementing
/// value lives. Other processes may write to it at any time; no `&mut` to it may exist.
pub unsafe trait ExtMemory: Send + Sync {
    /// The `len` bytes from `offset` on, or `None` if they are not all inside the memory or not
    /// contiguous.
    fn slice(&self, offset: u64, len: usize) -> Option<ExtSlice>;

    /// Sets the I/O address at which devices read the first byte; later slices use it. Returns
    /// false if the memory supports only its own address.
    fn set_io_address(&self, _address: u64) -> bool {
        false
    }
}

// SAFETY: a region stays mapped while it lives, is readable throughout, and is only ever
// accessed by raw copies.
unsafe impl ExtMemory for siw_shm::SharedMemory {
    #[inline]
    fn slice(&self, offset: u64, len: usize) -> Option<ExtSlice> {
        let ptr = self.ptr_at(usize::try_from(offset).ok()?, len).ok()?;
        Some(ExtSlice {
            ptr: NonNull::new(ptr)?,
            iova: self.io_address().wrapping_add(offset),
        })
    }

    fn set_io_address(&self, address: u64) -> bool {
        siw_shm::SharedMemory::set_io_address(self, address);
        true
    }
}

/// Ordinary process memory as external memory: for benches, tests, and frames built by the daemon.
pub struct OwnedMemory {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory belongs to this value; every access is a raw copy.
unsafe impl Send for OwnedMemory {}
// SAFETY: as above.
unsafe impl Sync for OwnedMemory {}

impl OwnedMemory {
    /// Allocates `len` zeroed bytes, page-aligned, rounded up to whole pages of 4 KiB.
    pub fn new(len: usize) -> Self {
        let len = len.max(1).next_multiple_of(4096);
        let layout = Layout::from_size_align(len, 4096).expect("a size below isize::MAX");
        // SAFETY: the size is not zero.
        let ptr = unsafe { alloc_zeroed(layout) };
        let ptr = NonNull::new(ptr).unwrap_or_else(|| std::alloc::handle_alloc_error(layout));
        Self { ptr, layout }
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.layout.size()
    }

    /// Always false: the memory has at least one page.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Copies `bytes` to `offset`; false if they do not fit. As with all registered memory,
    /// concurrent readers see old, new or mixed bytes.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> bool {
        if offset
            .checked_add(bytes.len())
            .is_none_or(|end| end > self.len())
        {
            return false;
        }
        // SAFETY: within the allocation, which no `&mut` refers to.
        unsafe { ptr::copy(bytes.as_ptr(), self.ptr.as_ptr().add(offset), bytes.len()) };
        true
    }
}

// SAFETY: the allocation lives as long as the value and is readable throughout.
unsafe impl ExtMemory for OwnedMemory {
    #[inline]
    fn slice(&self, offset: u64, len: usize) -> Option<ExtSlice> {
        let offset = usize::try_from(offset).ok()?;
        if offset.checked_add(len)? > self.len() {
            return None;
        }
        // SAFETY: `offset` is within the allocation.
        let ptr = unsafe { self.ptr.add(offset) };
        Some(ExtSlice {
            ptr,
            iova: ptr.as_ptr() as u64,
        })
    }
}

impl Drop for OwnedMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) }
    }
}
