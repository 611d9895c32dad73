//! The daemon's allocator: mimalloc, which keeps the state of each queue pair together, in huge pages if
//! the host provides them.
//!
//! By itself mimalloc returns free memory in the thread that happens to allocate when a delay is over:
//! all of it at once, which took the control thread up to 9 ms and could stop a worker for as long. In
//! a daemon without work nothing allocates, and the memory stays. So the delay here is longer than any
//! daemon runs, and siwd has a helper thread call [`return_free_memory`].

#![deny(missing_docs)]

use std::ffi::c_long;
use std::hint::black_box;
use std::sync::Once;

use libmimalloc_sys as mi;
pub use mimalloc::MiMalloc;

/// Overhead of one allocation in bytes: size classes leave a fifth unused at most.
pub const ALLOCATION: usize = 32;

/// `mi_option_purge_delay` of mimalloc.h, before an option that the crate names.
const PURGE_DELAY: mi::mi_option_t = mi::mi_option_use_numa_nodes - 1;

/// Free memory stays in the process until [`return_free_memory`]. The first call is for the start of
/// the process, before it has other threads; later ones do nothing.
pub fn keep_free_memory() {
    static IS_KEPT: Once = Once::new();
    IS_KEPT.call_once(|| {
        // In milliseconds: half a year. mimalloc multiplies it by a small number.
        let delay = c_long::from(i32::MAX) * 8;
        // SAFETY: the option exists (a test reads its default), any value is allowed, and no other
        // thread reads it yet.
        unsafe { mi::mi_option_set(PURGE_DELAY, delay) };
    });
}

/// Returns the free memory of all threads to the operating system. It takes about 5 ms for 100 MB;
/// other threads allocate and free meanwhile.
pub fn return_free_memory() {
    // In a thread that has never allocated, mimalloc does nothing.
    drop(black_box(Box::new(0_u8)));
    // SAFETY: any thread may call it at any time.
    unsafe { mi::mi_collect(true) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[global_allocator]
    static ALLOCATOR: MiMalloc = MiMalloc;

    fn private_kilobytes() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("RssAnon:"));
        let kilobytes = line.and_then(|line| line.split_whitespace().nth(1));
        kilobytes.unwrap().parse().unwrap()
    }

    #[test]
    fn a_thread_returns_what_others_have_freed() {
        // SAFETY: reads a number.
        let default = unsafe { mi::mi_option_get(PURGE_DELAY) };
        assert_eq!(default, 1000, "mi_option_purge_delay has another number");
        keep_free_memory();
        let before = private_kilobytes();
        let regions: Vec<Vec<u8>> = (0..256).map(|_| vec![1; 300 << 10]).collect();
        drop(regions);
        std::thread::spawn(return_free_memory).join().unwrap();
        let kept = private_kilobytes().saturating_sub(before);
        assert!(kept < 4 << 10, "{kept} KiB of 75 MiB are still there");
    }
}
