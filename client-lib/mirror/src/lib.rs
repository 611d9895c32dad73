//! Library preloaded by `siwrun`: adds the addresses of siwd's devices to those of the kernel.
//!
//! The kernel does not know siwd's addresses. Programs look for the address of an RDMA device among
//! those of network interfaces, and open their control connection to the same address that they
//! then use for RDMA. Therefore each device of siwd appears as a network interface with its name,
//! and a kernel socket at an address of siwd uses a loopback address that represents it. Addresses
//! that the kernel has too are left to the kernel.
//!
//! | file | what it is |
//! |---|---|
//! | `imports.rs` (of `siw-preload`), `next.rs` | the functions of the C library and of the drop-in library |
//! | `fork_lock.rs` (of `siw-preload`) | state that a child of fork(2) goes on using |
//! | `cancel.rs` (of `siw`) | keeps a cancellation of a thread pending |
//! | `devices.rs` | siwd's addresses, and the loopback address for each |
//! | `sockets.rs` | binding, connecting and sending |
//! | `interfaces.rs`, `interface_requests.rs` | getifaddrs(3); ioctl(2), if_nametoindex(3) |
//! | `netlink.rs` | netlink sockets: socket(2), and what is sent to them and received |
//! | `netlink_rdma.rs`, `netlink_dumps.rs` | answers for rdma(8); interfaces, addresses and routes |
//! | `netlink_messages.rs` | the form of requests and answers |
//! | `paths.rs` | redirects /sys/class/infiniband and /dev/infiniband to files that siwd writes |
//! | `tree_walks.rs` | walks of file trees that start there |
//!
//! Many of these calls are cancellation points (pthreads(7)). A cancelled thread is unwound through the
//! exported functions, which have nothing to drop while the C library runs, or keep the cancellation
//! pending.
#![allow(clippy::missing_safety_doc)]

#[path = "../../src/app_memory/cancel.rs"]
mod cancel;
mod devices;
#[path = "../../preload/src/fork_lock.rs"]
mod fork_lock;
#[path = "../../preload/src/imports.rs"]
mod imports;
mod interface_requests;
mod interfaces;
mod netlink;
mod netlink_dumps;
mod netlink_messages;
mod netlink_rdma;
mod next;
mod paths;
mod sockets;
mod tree_walks;
