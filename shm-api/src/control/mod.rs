//! The control protocol between applications and the daemon: one SOCK_SEQPACKET
//! connection per client, one request and one reply per packet, fds by SCM_RIGHTS.
//!
//! [`messages`] holds the fixed structs, [`codec`] turns packets into them and
//! back, [`socket`] moves packets. Events come over sockets of their own: one per CM
//! channel (`CmEvent`) and one for asynchronous events
//! (`AsyncEvent`), framed in the same way.

pub mod codec;
// The fields are named as in verbs; those that need more explanation have it.
#[allow(missing_docs)]
pub mod messages;
pub mod socket;

pub use codec::{CallError, ProtoError, Request, decode_event, encode_event};
pub use messages::*;
pub use socket::{ControlPacket, ControlSocket, RecvError, event_stream};

/// Where the daemon listens unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/siwd/siwd.sock";
/// Environment variable that overrides [`DEFAULT_SOCKET`] for clients.
pub const SOCKET_ENV: &str = "SIWD_SOCKET";

/// The socket path a client uses: `explicit`, else the environment, else the default.
pub fn socket_path(explicit: Option<&std::path::Path>) -> std::path::PathBuf {
    match explicit {
        Some(path) => path.to_owned(),
        None => std::env::var_os(SOCKET_ENV)
            .filter(|value| !value.is_empty())
            .map_or_else(|| DEFAULT_SOCKET.into(), Into::into),
    }
}
