//! The daemon's side of registered memory: the memory and access rights of each key (STag), the
//! copies between frames and memory with their CRC32c, and the allocation of a client's queues.
//! Applications do not link this crate.
//!
//! ```text
//!  control thread --- insert, deregister ---> KeyTable
//!  worker ----------- check_access, bind ---> KeyReader, then copy through RegisteredMemory
//!  control thread --- alloc, free ----------> QueueAllocator
//! ```
//! Workers look up keys without a lock on every access (RFC 5042 section 6); deregistered memory is
//! freed once no worker can use it any more ([`siw_lockfree::epoch`]).
#![warn(missing_docs)]

pub mod binding;
pub mod crc;
pub mod crc_copy;
mod crc_fold;
mod crc_streams;
pub mod gap_copy;
pub mod key_table;
pub mod queue_allocator;
pub mod registered_memory;
pub mod scatter;

pub use key_table::{DeregError, KeyReader, KeyTable, Retired, Stag};
pub use registered_memory::{KeyError, RegisteredMemory};
pub use scatter::{Extent, ExtentMemory, ProcessMemory};
