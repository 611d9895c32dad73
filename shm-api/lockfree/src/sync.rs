//! One facade for the atomics and locks of the standard library and of loom, used by the whole
//! crate: the code that loom explores is the code that ships. No other file asks for `cfg(loom)`.

#[cfg(loom)]
pub use loom::{
    hint::spin_loop,
    sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering, fence},
    sync::{Mutex, MutexGuard},
};
#[cfg(not(loom))]
pub use std::{
    hint::spin_loop,
    sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering, fence},
    sync::{Mutex, MutexGuard},
};

/// Asks the CPU to load the cache line at `address`; harmless whatever the address is.
#[inline]
pub fn prefetch_line(address: *const u8) {
    // SAFETY: a prefetch is a hint that never faults, even when nothing is mapped at the address.
    unsafe { core::arch::x86_64::_mm_prefetch(address.cast(), core::arch::x86_64::_MM_HINT_T0) };
}
