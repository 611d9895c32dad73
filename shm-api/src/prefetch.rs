//! Hints to the CPU to fetch cache lines before they are needed.

/// Prefetches this number of cache lines starting at an address, which need not be valid.
#[inline(always)]
pub fn prefetch_lines(pointer: *const u8, lines: usize) {
    for line in 0..lines {
        prefetch_line(pointer.wrapping_add(line * 64));
    }
}

/// Prefetches the cache line at an address, which need not be valid.
#[inline]
pub fn prefetch_line(pointer: *const u8) {
    // SAFETY: a hint; never faults.
    unsafe { core::arch::x86_64::_mm_prefetch(pointer.cast(), core::arch::x86_64::_MM_HINT_T0) };
}

/// Prefetches a line for writing. Another core may own the line: without the prefetch, the store
/// would wait for it, and with it all later stores.
#[inline]
pub fn prefetch_line_to_write(pointer: *const u8) {
    // SAFETY: a hint; never faults. Processors without it ignore it.
    unsafe {
        core::arch::asm!("prefetchw [{}]", in(reg) pointer, options(nostack, preserves_flags));
    }
}
