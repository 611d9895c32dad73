//! packetdrill's shared-object interface over siwd's TCP: `packetdrill --so_filename=` this library
//! runs packetdrill's own scripts against [`siw_tcp::Stack`], in real time.
//!
//! packetdrill loads the library and calls [`packetdrill_interface_init`] with the text of
//! `--so_flags`. From then on it makes system calls through the table instead of the kernel, passes IP
//! packets to `netdev_send` and receives those of the stack from `netdev_receive`. Blocking calls come
//! from a second thread. The flags are those of `apply_engine_flags` in `siw_drill`. An active open needs
//! the `local_ip=` flag, since the stack cannot learn its address otherwise before the SYN.
//!
//! ```text
//! init(flags, table) -> Adapter { Mutex<AdapterState { host, ... }>, start }
//!     each call: lock, advance the host's clock to the present, act
//!     a blocking call: retried until it succeeds or fails
//! ```
#![warn(missing_docs)]

mod adapter;
mod address;
mod table;

pub use table::{Interface, packetdrill_interface_init};
