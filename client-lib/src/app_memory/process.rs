//! State of the process that all contexts share.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

/// Serialises registrations in the whole process, across contexts: two that freeze the same pages
/// would wait for each other.
pub(super) static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Number of forks between the first process and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Returns a number that differs between a process and its children, once
/// [`watch_forks`](super::watch_forks) was called.
#[inline]
pub fn process_generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// Gives a child of fork(2) its generation.
pub(super) fn count_fork() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}
