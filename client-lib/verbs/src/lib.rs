//! libibverbs.so.1 and librdmacm.so.1 on siwd: one shared object with the symbols, versions and
//! struct layouts of both, so that RDMA programs run on siwd unmodified. `siwrun` makes programs
//! load it.
//!
//! | folder | what it is |
//! |---|---|
//! | `abi.rs`, `export.rs` | layouts of the distribution's headers, versioned symbols |
//! | `ibverbs/` | libibverbs: thin C objects around those of the crate `siw` |
//! | `rdmacm/` | librdmacm: rdma_cm |
//! | `rsockets/` | librdmacm: rsockets |
//! | `descriptor.rs`, `mark.rs` | descriptors of events; marks that tell open files apart |
//! | `memory_calls.rs` | overrides madvise(2), mmap(2), mremap(2), munmap(2), free(3) and realloc(3) |
//! | `waiting.rs` | calls that wait: signals and cancellation |
//! | `per_process.rs` | state that a child of fork(2) does not share |
//! | `faults.rs`, `ibverbs/faulty/`, `alarm.rs` | faults of the plan that `siwrun --faults` gives |
//! | `persona.rs` | the kind of device that the program sees |
//! | `mirror.rs` | addresses of devices, for the library that `siwrun` preloads |
//!
//! An object is a `repr(C)` struct that begins with the struct of the header; C code holds a
//! pointer to it, from which a call gets the Rust object without a look-up.
//!
//! Pointer arguments have the contract of the manual pages: valid, of this library, and not used
//! after the object was destroyed. Separate `# Safety` sections would repeat this.
#![allow(clippy::missing_safety_doc)]

mod abi;
mod alarm;
mod descriptor;
mod export;
mod faults;
mod ibverbs;
mod mark;
mod memory_calls;
mod mirror;
mod per_process;
mod persona;
mod rdmacm;
mod rsockets;
mod status;
mod waiting;
