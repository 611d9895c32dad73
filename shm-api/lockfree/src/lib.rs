//! All lock-free code of the project: the synchronisation steps of the shared-memory rings and of the
//! table of memory keys, independent of any memory layout.
//!
//! | module | synchronizes | used by |
//! |---|---|---|
//! | [`spsc`] | a ring with one producer and one consumer | send and receive queues |
//! | [`shared_ring`] | a ring with one producer and many consumers | shared receive queues |
//! | [`completion`] | a ring of completions, the arming of its event | completion queues |
//! | [`doorbell`] | doorbell slots, and a worker that goes to sleep | doorbell rings |
//! | [`epoch`] | a table that workers read without locks | the key table |
//! | [`address_table`] | address ranges, looked up by a signal handler | the guard against faults |
//! | [`key_cell`] | fields that change in place while others read them | memory windows, fast registration |
//!
//! Callers pass in the atomic words, wherever they are stored: siw-shm uses words in shared memory,
//! loom its own. All code uses the [`sync`] facade, so loom explores the same code that ships:
//! `RUSTFLAGS="--cfg loom" cargo test -p siw-lockfree --release`. A comment at each step names the
//! step that it pairs with.
#![warn(missing_docs)]

pub mod address_table;
pub mod completion;
pub mod doorbell;
pub mod epoch;
pub mod key_cell;
pub mod shared_ring;
pub mod spsc;
pub mod sync;
