//! librdmacm: rdma_cm(7) over the connection management of the crate `siw`.
//!
//! | file | what it is |
//! |---|---|
//! | `exports.rs` | the table of symbols |
//! | `devices.rs` | the process's connection to the daemon, and a context for each device |
//! | `queue.rs`, `channel.rs`, `late_events.rs` | waiting events; event channels; events that come at a time |
//! | `id.rs` | identifiers, and the table of them |
//! | `events.rs` | passes events of the daemon to identifiers, and those of channels to the program |
//! | `lifecycle.rs` | creating, destroying, migrating identifiers |
//! | `address.rs` | binding, resolving, options |
//! | `connect.rs` | connecting, listening, accepting, rejecting, disconnecting; datagram services likewise |
//! | `streaming.rs` | connections that carry TCP bytes before MPA (siw_rdma.h) |
//! | `multicast.rs` | multicast groups |
//! | `queues.rs` | queue pairs and shared receive queues of identifiers |
//! | `endpoint.rs`, `addrinfo.rs` | rdma_create_ep(3), rdma_get_request(3), rdma_getaddrinfo(3) |
//! | `lookup.rs` | rdma_resolve_addrinfo(3), rdma_write_cm_event(3) |
//! | `sockaddr.rs`, `unsupported.rs` | C addresses; features that iWARP does not have |
//!
//! All identifiers of a process use one connection to the daemon, so that a listener on all devices
//! can pass its requests to queue pairs of any of them.

mod address;
mod addrinfo;
mod channel;
mod connect;
pub mod devices;
mod endpoint;
mod events;
mod exports;
mod faulty;
mod id;
mod late_events;
mod lifecycle;
mod lookup;
mod multicast;
mod queue;
mod queues;
pub mod sockaddr;
mod streaming;
mod unsupported;
