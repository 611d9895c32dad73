//! All lock-free code of the project: the synchronisation steps of the shared-memory rings and of
//! the table of memory keys, free of any memory layout.
//!
//! | module | what is synchronised | used by |
//! |---|---|---|
//! | [`spsc`] | a ring with one producer and one consumer | send and receive queues |
//! | [`shared_ring`] | a ring with one producer and many consumers | shared receive queues |
//! | [`completion`] | a ring of completions, the arming of its event | completion queues |
//! | [`doorbell`] | doorbell slots, and a worker that goes to sleep | doorbell rings |
//! | [`epoch`] | a table that workers read without locks | the key table |
//! | [`address_table`] | to whom an address belongs, asked by a signal handler | the guard against faults |
//! | [`key_cell`] | fields that change in place while others read them | memory windows, fast registration |
//!
//! Callers hand in the atomic words, wherever they live: siw-shm those in shared memory, loom its
//! own. Everything is written against the [`sync`] facade, so that the code which loom explores is
//! the code that ships: `RUSTFLAGS="--cfg loom" cargo test -p siw-lockfree --release`. Each step
//! says what it pairs with.
#![warn(missing_docs)]

pub mod address_table;
pub mod completion;
pub mod doorbell;
pub mod epoch;
pub mod key_cell;
pub mod shared_ring;
pub mod spsc;
pub mod sync;
