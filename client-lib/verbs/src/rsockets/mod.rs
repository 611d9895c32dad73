//! rsockets (rsocket(7)): streams with the calls of sockets, over queue pairs.
//!
//! | file | what it is |
//! |---|---|
//! | `exports.rs` | the table of symbols; C addresses and results |
//! | `table.rs`, `socket.rs` | rsockets by descriptor; states, and waiting in calls |
//! | `connect.rs` | creating, binding, listening, connecting, accepting |
//! | `stream.rs`, `send.rs`, `receive.rs` | a connected rsocket: buffers, messages, credits |
//! | `wire.rs`, `memory.rs` | messages to the peer; memory layout |
//! | `transfer.rs`, `vectors.rs` | sending, receiving, ending; lists of buffers |
//! | `closing.rs` | closed streams with unacknowledged data |
//! | `poll.rs`, `epoll.rs`, `watchers.rs` | waiting for several |
//! | `preload.rs` | additional functions for the preloaded library |
//! | `options.rs`, `option_calls.rs` | options, and their calls |
//! | `mappings.rs`, `iomap.rs` | memory that the peer writes directly |
//!
//! A child of fork(2) has none of its parent's rsockets: every call fails with EBADF in it, and the
//! parent's connections are unaffected. It can create rsockets of its own. Datagrams (SOCK_DGRAM) are not supported: they need
//! unreliable queue pairs.

mod closing;
mod connect;
mod epoll;
mod exports;
mod iomap;
mod mappings;
mod memory;
mod option_calls;
mod options;
mod poll;
mod preload;
mod receive;
mod send;
mod socket;
mod stream;
mod table;
mod transfer;
mod vectors;
mod watchers;
mod wire;

pub use socket::SocketWait;
