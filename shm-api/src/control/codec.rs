//! Encodes structs into packets and decodes them. Structs are copied out of packets, after lengths
//! and numbers were checked.

use super::messages::{for_each_message, *};
use bytemuck::{Pod, Zeroable, bytes_of};
use core::mem::size_of;

/// An invalid packet.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProtoError {
    /// Too short for a header, or without its magic number.
    #[error("not a siwd packet ({0} bytes)")]
    NotSiwd(usize),
    #[error(
        "protocol version {theirs} is not supported, only {MIN_VERSION} to {VERSION}: update the older one of client library and siwd"
    )]
    /// The peer's version is not supported by this side.
    Version {
        /// Version in the header.
        theirs: u16,
    },
    /// The length in the header differs from the received length.
    #[error("packet length is {said} bytes in the header, but {got} were received")]
    Length {
        /// Bytes according to the header.
        said: u32,
        /// Bytes received.
        got: usize,
    },
    /// Unknown message number.
    #[error("message kind {0} is unknown")]
    Kind(u16),
    /// The body does not have the length of its message.
    #[error("message kind {kind} needs {want} bytes, but {got} were received")]
    Size {
        /// Number of the message.
        kind: u16,
        /// Bytes that the message requires.
        want: usize,
        /// Bytes received.
        got: usize,
    },
    /// The body is longer than this side knows, and the excess bytes are not all zero.
    #[error("message kind {kind} has fields unknown to this side (version {VERSION})")]
    Unknown {
        /// Number of the message.
        kind: u16,
    },
    /// The reply does not belong to the last request.
    #[error("the reply belongs to another request")]
    OutOfOrder,
    /// The packet is longer than any message.
    #[error("the packet is longer than any message: is the peer siwd?")]
    TooLong,
    /// A file descriptor is missing.
    #[error("the reply lacks a file descriptor")]
    MissingFd,
}

/// Reason why a request has no usable reply.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The daemon refused the request.
    #[error("{reason} (errno {errno})")]
    Refused {
        /// A positive errno.
        errno: i32,
        /// Human-readable reason.
        reason: String,
    },
    /// The reply is invalid.
    #[error(transparent)]
    Proto(#[from] ProtoError),
    /// No reply within the time limit.
    #[error("siwd does not respond")]
    TimedOut,
    /// The daemon closed the connection.
    #[error("siwd closed the connection")]
    Closed,
    /// Any other error of the socket.
    #[error("control socket: {0}")]
    Io(#[from] std::io::Error),
}

impl CallError {
    /// The nearest errno.
    pub fn to_errno(&self) -> i32 {
        match self {
            CallError::Refused { errno, .. } => *errno,
            CallError::Proto(ProtoError::Version { .. }) => 93, // EPROTONOSUPPORT
            CallError::Proto(_) => 71,                          // EPROTO
            CallError::TimedOut => 110,                         // ETIMEDOUT
            CallError::Closed => 104,                           // ECONNRESET
            CallError::Io(error) => error.raw_os_error().unwrap_or(5), // EIO
        }
    }
}

fn encode_packet(kind: u16, seq: u32, status: i32, body: &[u8]) -> Vec<u8> {
    let header = Header {
        magic: MAGIC,
        version: VERSION,
        kind,
        len: (size_of::<Header>() + body.len()) as u32,
        seq,
        status,
        reserved: 0,
    };
    let mut packet = Vec::with_capacity(header.len as usize);
    packet.extend_from_slice(bytes_of(&header));
    packet.extend_from_slice(body);
    packet
}

/// Splits a packet into its checked header and body.
pub fn split_packet(packet: &[u8]) -> Result<(Header, &[u8]), ProtoError> {
    let (header, body) = packet
        .split_at_checked(size_of::<Header>())
        .ok_or(ProtoError::NotSiwd(packet.len()))?;
    let header: Header = bytemuck::pod_read_unaligned(header);
    if header.magic != MAGIC {
        return Err(ProtoError::NotSiwd(packet.len()));
    }
    if !(MIN_VERSION..=VERSION).contains(&header.version) {
        return Err(ProtoError::Version {
            theirs: header.version,
        });
    }
    if header.len as usize != packet.len() {
        return Err(ProtoError::Length {
            said: header.len,
            got: packet.len(),
        });
    }
    Ok((header, body))
}

/// Copies a body into the struct that this side knows; fields that a newer peer added are cut off.
fn body_as<T: Pod>(kind: u16, body: &[u8]) -> Result<T, ProtoError> {
    match body.get(..size_of::<T>()) {
        Some(known) => Ok(bytemuck::pod_read_unaligned(known)),
        None => Err(ProtoError::Size {
            kind,
            want: size_of::<T>(),
            got: body.len(),
        }),
    }
}

/// Decodes the body of a request: fields added by a newer library must be zero, otherwise the client
/// requests something that this side does not know.
fn request_as<M: Message>(body: &[u8]) -> Result<M, ProtoError> {
    let beyond = body.get(size_of::<M>()..).unwrap_or(&[]);
    if beyond.iter().any(|byte| *byte != 0) {
        return Err(ProtoError::Unknown { kind: M::KIND });
    }
    body_as(M::KIND, body)
}

/// Writes the negotiated version into the header of a packet.
pub fn stamp_version(packet: &mut [u8], version: u16) {
    let at = core::mem::offset_of!(Header, version);
    if let Some(place) = packet.get_mut(at..at + 2) {
        place.copy_from_slice(&version.to_le_bytes());
    }
}

/// Sequence number of requests without a reply: the client does not wait for them, and their result
/// is lost. Requests are still executed in the order in which they were sent.
pub const UNANSWERED: u32 = 0;

/// Client: encodes a request.
pub fn encode_request<M: Message>(seq: u32, message: &M) -> Vec<u8> {
    encode_packet(M::KIND, seq, 0, bytes_of(message))
}

/// Daemon: encodes the reply to a request of type `M`.
pub fn encode_reply<M: Message>(seq: u32, reply: &M::Reply) -> Vec<u8> {
    encode_packet(M::KIND, seq, 0, bytes_of(reply))
}

/// Daemon: encodes a refusal. `errno` is positive; `reason` is cut to 120 bytes.
pub fn encode_error(kind: u16, seq: u32, errno: i32, reason: &str) -> Vec<u8> {
    let errno = if errno == 0 { 5 } else { errno };
    encode_packet(
        kind,
        seq,
        errno,
        bytes_of(&ErrorReply {
            reason: Text::new(reason),
        }),
    )
}

/// Client: decodes the reply to the request `seq` of type `M`. Refusals can be decoded whatever the
/// daemon's version.
pub fn decode_reply<M: Message>(seq: u32, packet: &[u8]) -> Result<M::Reply, CallError> {
    let opened = split_packet(packet);
    // A daemon of another version refuses Hello in its own version: its reason is more informative
    // than ours.
    let (header, body) = match opened {
        Err(ProtoError::Version { .. }) => {
            let (header, body) = packet.split_at(size_of::<Header>());
            let header: Header = bytemuck::pod_read_unaligned(header);
            if header.status == 0 {
                return Err(ProtoError::Version {
                    theirs: header.version,
                }
                .into());
            }
            (header, body)
        }
        other => other?,
    };
    if header.status != 0 {
        let refusal: ErrorReply = body_as(header.kind, body)?;
        let reason = refusal.reason.to_text();
        return Err(CallError::Refused {
            errno: header.status,
            reason,
        });
    }
    if header.kind != M::KIND || header.seq != seq {
        return Err(ProtoError::OutOfOrder.into());
    }
    Ok(body_as(header.kind, body)?)
}

/// Encodes an event packet.
pub fn encode_event<E: Pod>(kind: u16, event: &E) -> Vec<u8> {
    encode_packet(kind, 0, 0, bytes_of(event))
}

/// Decodes the event in a packet of this kind.
pub fn decode_event<E: Pod>(kind: u16, packet: &[u8]) -> Result<E, ProtoError> {
    let (header, body) = split_packet(packet)?;
    if header.kind != kind {
        return Err(ProtoError::Kind(header.kind));
    }
    body_as(header.kind, body)
}

/// Kind and seq of a packet that could not be decoded: enough to refuse it.
pub fn peek_header(packet: &[u8]) -> Option<(u16, u32)> {
    let header: Header = bytemuck::pod_read_unaligned(packet.get(..size_of::<Header>())?);
    (header.magic == MAGIC).then_some((header.kind, header.seq))
}

macro_rules! requests {
    ($($kind:literal $name:ident -> $reply:ty;)*) => {
        /// Daemon: any request.
        #[derive(Debug, Clone, Copy)]
        pub enum Request { $(#[doc = concat!("[`", stringify!($name), "`].")] $name($name)),* }

        impl Request {
            /// Names of all requests, see [`Request::name`].
            pub const NAMES: &[&str] = &[$(stringify!($name)),*];

            /// Checks and copies a packet. On error, refuse the packet with [`encode_error`], using
            /// [`peek_header`].
            pub fn decode(p: &[u8]) -> Result<(u32, Request), ProtoError> {
                let (h, body) = split_packet(p)?;
                $(if h.kind == $name::KIND {
                    return Ok((h.seq, Request::$name(request_as(body)?)));
                })*
                Err(ProtoError::Kind(h.kind))
            }

            /// [`Message::KIND`] of the contained request.
            pub fn kind(&self) -> u16 {
                match self { $(Request::$name(_) => $name::KIND),* }
            }

            /// Name of the request, for logs.
            pub fn name(&self) -> &'static str {
                match self { $(Request::$name(_) => stringify!($name)),* }
            }
        }
    };
}

for_each_message!(requests);

impl CmEventMessage {
    /// An event with all fields zero except the kind.
    pub fn new(kind: CmEventKind) -> CmEventMessage {
        CmEventMessage {
            kind: kind as u32,
            ..Zeroable::zeroed()
        }
    }
}

impl AsyncEventMessage {
    /// An event about `object`.
    pub fn new(kind: AsyncEventKind, object: u32, reason: &str) -> AsyncEventMessage {
        AsyncEventMessage {
            kind: kind as u32,
            object,
            reason: Text::new(reason),
        }
    }
}
