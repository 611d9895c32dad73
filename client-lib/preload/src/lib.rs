//! What `siwrun --rsockets` preloads: the calls of sockets, which go on to rsockets for sockets whose
//! address is one of siwd's, and to the C library for all other descriptors.
//!
//! A socket is the kernel's when it is made. Binding it to an address of siwd, or connecting it to
//! an address that siwd leads to, makes an rsocket of it, which takes the number of its descriptor.
//! A listener at the wildcard address stays the kernel's and is joined by an rsocket, so that it
//! accepts connections of both.
//!
//! | file | what it is |
//! |---|---|
//! | `imports.rs`, `next.rs` | the functions of the C library, and those of rsockets |
//! | `convert.rs` | how a socket becomes an rsocket |
//! | `dispatch.rs` | calls that both have, with the same arguments |
//! | `sockets.rs`, `transfer.rs`, `wait.rs` | the calls |
#![allow(clippy::missing_safety_doc)]

mod convert;
mod dispatch;
mod imports;
mod next;
mod sockets;
mod transfer;
mod wait;
