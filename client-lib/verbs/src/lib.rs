//! libibverbs.so.1 and librdmacm.so.1 on siwd: one shared object with the symbols, versions and
//! struct layouts of both, so that RDMA programs run on siwd as they are. `siwrun` puts it into
//! their way.
//!
//! | folder | what it is |
//! |---|---|
//! | `abi.rs`, `export.rs` | layouts of the distribution's headers, versioned symbols |
//! | `ibverbs/` | libibverbs: thin C objects around those of the crate `siw` |
//! | `rdmacm/` | librdmacm: rdma_cm |
//! | `rsockets/` | librdmacm: rsockets |
//! | `mirror.rs` | addresses of devices, for the library that `siwrun` preloads |
//!
//! An object is a `repr(C)` struct that begins with the struct of the header; C code holds a pointer
//! to it, and a call gets back from the pointer to the Rust object without a look-up.
//!
//! Functions take pointers as the manual pages describe them: valid, of this library, and not used
//! after the object was destroyed. That is what their `# Safety` sections would all say.
#![allow(clippy::missing_safety_doc)]

mod abi;
mod export;
mod ibverbs;
mod mirror;
mod rdmacm;
mod rsockets;
mod status;
