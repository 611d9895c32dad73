//! Hints to the CPU to fetch cache lines before they are needed.

/// Prefetches eight cache lines from an address on.
#[inline(always)]
pub(crate) fn prefetch_block(at: *mut u8) {
    for line in 0..8 {
        prefetch_line(at.wrapping_add(line * 64));
    }
}

/// Prefetches the cache line at an address, which need not be valid.
#[inline]
pub fn prefetch_line(pointer: *const u8) {
    // SAFETY: a hint; never faults.
    unsafe { core::arch::x86_64::_mm_prefetch(pointer.cast(), core::arch::x86_64::_MM_HINT_T0) };
}

/// The same for a line that is going to be written, which another core may have: the store would wait for
/// it, and all stores behind that one.
#[inline]
pub fn prefetch_line_to_write(pointer: *const u8) {
    // SAFETY: a hint; never faults. Processors without it do nothing.
    unsafe {
        core::arch::asm!("prefetchw [{}]", in(reg) pointer, options(nostack, preserves_flags));
    }
}
