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
mod socket_path;

pub use codec::{CallError, ProtoError, Request, decode_event, encode_event};
pub use messages::*;
pub use socket::{ControlPacket, ControlSocket, EVENT_STREAM_BYTES, RecvError, event_stream};
pub use socket_path::{
    ForeignSocket, SOCKET_ENV, SYSTEM_SOCKET, default_socket, own_socket, socket_path,
};
