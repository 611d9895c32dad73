//! Library preloaded by `siwrun --rsockets`: it overrides socket calls, and uses rsockets for
//! sockets with an address of siwd, and the C library for all other descriptors.
//!
//! A socket belongs to the kernel when it is created. Binding it to an address of siwd, or
//! connecting it to an address that siwd routes to, replaces it by an rsocket with the same
//! descriptor number. A listener at the wildcard address becomes part of an rsocket, which accepts
//! connections of both.
//!
//! | file | what it is |
//! |---|---|
//! | `imports.rs`, `next.rs` | the functions of the C library, and those of rsockets |
//! | `convert.rs` | conversion of a socket to an rsocket |
//! | `fork_lock.rs` | state that a child of fork(2) goes on using |
//! | `cancel.rs` (of `siw`) | keeps a cancellation of a thread pending |
//! | `dispatch.rs` | calls that both have, with the same arguments |
//! | `sockets.rs`, `transfer.rs`, `wait.rs` | the calls |
//! | `stdio.rs` | streams of the C library, and its ways to close descriptors |
//!
//! Many of these calls are cancellation points (pthreads(7)). A cancelled thread is unwound through the
//! exported functions, which have nothing to drop while a call of the C library or of rsockets runs.
#![allow(clippy::missing_safety_doc)]

#[path = "../../src/app_memory/cancel.rs"]
mod cancel;
mod convert;
mod dispatch;
mod fork_lock;
mod imports;
mod next;
mod sockets;
mod stdio;
mod transfer;
mod wait;
