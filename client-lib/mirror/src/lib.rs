//! What `siwrun` preloads: the addresses of siwd's devices among those of the kernel.
//!
//! The kernel does not know siwd's addresses. Programs look for the address of an RDMA device among
//! those of network interfaces, and open their control connection to the very address that they then
//! use for RDMA. So each device of siwd shows as a network interface of its name, and a socket of the
//! kernel at an address of siwd is one at a loopback address that stands for it. An address that the
//! kernel has too is left to the kernel.
//!
//! | file | what it is |
//! |---|---|
//! | `imports.rs` (of `siw-preload`), `next.rs` | the functions of the C library and of the drop-in library |
//! | `devices.rs` | siwd's addresses, and the loopback address that stands for each |
//! | `sockets.rs` | binding, connecting and sending |
//! | `interfaces.rs`, `interface_requests.rs` | getifaddrs(3); ioctl(2), if_nametoindex(3) |
//! | `paths.rs` | /sys/class/infiniband and /dev/infiniband, which lead to files that siwd writes |
//! | `tree_walks.rs` | walks of file trees that begin there |
#![allow(clippy::missing_safety_doc)]

mod devices;
#[path = "../../preload/src/imports.rs"]
mod imports;
mod interface_requests;
mod interfaces;
mod next;
mod paths;
mod sockets;
mod tree_walks;
