//! Events that wait in the queue of a channel until the program takes them.

use crate::abi::{ibv_ah_attr, rdma_cm_event_type};
use siw::{ConnectionInfo, ConnectionRequest, ServiceRequest, StreamingConnection};
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

/// A request of a peer, which waits for an answer.
pub enum PeerRequest {
    /// For a connection.
    Connection(ConnectionRequest),
    /// For the queue pair of a datagram service.
    Service(ServiceRequest),
    /// A connection in streaming mode, whose peer may make an MPA request later.
    Streaming(StreamingConnection),
}

impl PeerRequest {
    /// Addresses and private data.
    pub fn info(&self) -> &ConnectionInfo {
        match self {
            PeerRequest::Connection(request) => request.connection_info(),
            PeerRequest::Service(request) => request.info(),
            PeerRequest::Streaming(stream) => stream.connection_info(),
        }
    }

    /// The daemon's index of the device that it came to.
    pub fn device(&self) -> u32 {
        match self {
            PeerRequest::Connection(request) => request.device(),
            PeerRequest::Service(request) => request.device(),
            PeerRequest::Streaming(stream) => stream.device(),
        }
    }

    /// The request for a connection.
    pub fn connection(&self) -> Option<&ConnectionRequest> {
        match self {
            PeerRequest::Connection(request) => Some(request),
            PeerRequest::Service(_) | PeerRequest::Streaming(_) => None,
        }
    }
}

/// An event in the queue of a channel.
pub enum QueuedEvent {
    /// An event of an existing identifier.
    Plain(PlainEvent),
    /// A connection request. The identifier of the connection is created when the program takes the
    /// event.
    Request {
        listener: RegisteredId,
        request: PeerRequest,
    },
}

/// Destination of datagrams, in an event.
pub struct DatagramParameters {
    pub vector: ibv_ah_attr,
    pub qp_num: u32,
    pub qkey: u32,
    /// In place of private data: the program's own argument, an address.
    pub argument: u64,
}

/// A queued event without a new identifier.
pub struct PlainEvent {
    pub id: RegisteredId,
    pub kind: rdma_cm_event_type,
    /// 0, or a negative errno.
    pub status: c_int,
    /// Connection data of the event.
    pub info: Option<Box<ConnectionInfo>>,
    /// The queue pair of a datagram service or the group.
    pub datagram: Option<Box<DatagramParameters>>,
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
            datagram: None,
            argument: 0,
        })
    }

    /// Returns the kind of an event of an existing identifier.
    pub fn kind(&self) -> Option<rdma_cm_event_type> {
        match self {
            QueuedEvent::Plain(event) => Some(event.kind),
            QueuedEvent::Request { .. } => None,
        }
    }

    /// Returns the identifier that has to acknowledge it.
    pub fn owner(&self) -> RegisteredId {
        match self {
            QueuedEvent::Plain(event) => event.id,
            QueuedEvent::Request { listener, .. } => *listener,
        }
    }
}
