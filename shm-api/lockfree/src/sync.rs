//! One facade for the atomics and locks of the standard library and of loom, used by the whole crate,
//! so loom explores the code that ships. No other file uses `cfg(loom)`.

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
