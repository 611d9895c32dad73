//! Registered memory as the daemon sees it: which memory a key (STag) stands for and who may
//! access it, the copies between frames and memory with their CRC32c, and where the queues of a
//! client lie. Applications do not link this crate.
//!
//! ```text
//!  control thread --- insert, deregister ---> KeyTable
//!  worker ----------- check_access, bind ---> KeyReader, then copy through RegisteredMemory
//!  control thread --- alloc, free ----------> QueueAllocator
//! ```
//! Workers look keys up without a lock at the moment of every access (RFC 5042 section 6);
//! what was deregistered is freed once no worker can still use it ([`siw_lockfree::epoch`]).
#![warn(missing_docs)]

pub mod binding;
pub mod crc;
pub mod crc_copy;
mod crc_fold;
mod crc_plain;
mod crc_streams;
pub mod gap_copy;
pub mod key_table;
pub mod queue_allocator;
pub mod registered_memory;
pub mod scatter;

pub use key_table::{DeregError, KeyReader, KeyTable, Retired, Stag};
pub use registered_memory::{KeyError, RegisteredMemory};
pub use scatter::{Extent, ExtentMemory, ProcessMemory};
