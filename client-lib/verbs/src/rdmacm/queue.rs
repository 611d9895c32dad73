//! Events that wait in the queue of a channel until the program takes them.

use crate::abi::rdma_cm_event_type;
use siw::{ConnectionInfo, ConnectionRequest};
use std::ffi::c_int;

// Kinds of events that older headers lack.
/// rdma_resolve_addrinfo(3) has found an address.
pub const RDMA_CM_EVENT_ADDRINFO_RESOLVED: rdma_cm_event_type = 16;
/// It has not.
pub const RDMA_CM_EVENT_ADDRINFO_ERROR: rdma_cm_event_type = 17;
/// An event of the program itself (rdma_write_cm_event(3)).
pub const RDMA_CM_EVENT_USER: rdma_cm_event_type = 18;

/// The number of an identifier, never reused; it is the cookie of its events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RegisteredId(pub u64);

/// An event in the queue of a channel.
pub enum QueuedEvent {
    /// An event of an existing identifier.
    Plain(PlainEvent),
    /// A connection request. The identifier of the connection is created when the program takes the
    /// event.
    Request {
        listener: RegisteredId,
        request: ConnectionRequest,
    },
}

/// A queued event without a new identifier.
pub struct PlainEvent {
    pub id: RegisteredId,
    pub kind: rdma_cm_event_type,
    /// 0, or a negative errno.
    pub status: c_int,
    /// Connection data of the event.
    pub info: Option<Box<ConnectionInfo>>,
    /// Argument of an event of the program itself.
    pub argument: u64,
}

impl QueuedEvent {
    /// Creates an event without parameters.
    pub fn plain(id: RegisteredId, kind: rdma_cm_event_type, status: c_int) -> QueuedEvent {
        QueuedEvent::Plain(PlainEvent {
            id,
            kind,
            status,
            info: None,
            argument: 0,
        })
    }

    /// Returns the identifier that has to acknowledge it.
    pub fn owner(&self) -> RegisteredId {
        match self {
            QueuedEvent::Plain(event) => event.id,
            QueuedEvent::Request { listener, .. } => *listener,
        }
    }
}
