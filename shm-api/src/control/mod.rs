//! The control protocol between applications and the daemon: one SOCK_SEQPACKET
//! connection per client, one request and one reply per packet, fds by SCM_RIGHTS.
//!
//! [`messages`] holds the fixed structs, [`codec`] converts between them and packets, [`socket`]
//! transfers packets. Events use separate sockets: one per CM channel (`CmEvent`) and one for
//! asynchronous events (`AsyncEvent`), with the same framing.

pub mod codec;
// The fields are named as in verbs; those that need more explanation have a comment.
#[allow(missing_docs)]
pub mod messages;
pub mod socket;

pub use codec::{CallError, ProtoError, Request, decode_event, encode_event};
pub use messages::*;
pub use socket::{ControlPacket, ControlSocket, EVENT_STREAM_BYTES, RecvError, event_stream};

/// Path at which the daemon listens by default.
pub const DEFAULT_SOCKET: &str = "/run/siwd/siwd.sock";
/// Environment variable that overrides [`DEFAULT_SOCKET`] for clients.
pub const SOCKET_ENV: &str = "SIWD_SOCKET";

/// The socket path of a client: `explicit`, else the environment variable, else the default.
pub fn socket_path(explicit: Option<&std::path::Path>) -> std::path::PathBuf {
    match explicit {
        Some(path) => path.to_owned(),
        None => std::env::var_os(SOCKET_ENV)
            .filter(|value| !value.is_empty())
            .map_or_else(|| DEFAULT_SOCKET.into(), Into::into),
    }
}
