//! Converts events of the daemon to events of rdma_cm (rdma_get_cm_event(3)): the identifier of an
//! event, its kind, status and parameters, and the identifier that has to acknowledge it.

use super::id::{IdObject, RegisteredId, with_registered};
use super::sockaddr::write_address;
use crate::abi::*;
use siw::{CmEvent, ConnectionInfo, ConnectionRequest};
use std::ffi::{c_char, c_int};
use std::sync::atomic::Ordering;

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
}

impl QueuedEvent {
    /// Creates an event without parameters.
    pub fn plain(id: RegisteredId, kind: rdma_cm_event_type, status: c_int) -> QueuedEvent {
        QueuedEvent::Plain(PlainEvent {
            id,
            kind,
            status,
            info: None,
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

/// An event as programs see it.
#[repr(C)]
pub struct EventObject {
    pub abi: rdma_cm_event,
    /// Identifier that counts it: the listener of a request, else the identifier of the event.
    owner: RegisteredId,
    /// Memory that `param` points to.
    _private_data: Box<[u8]>,
}

/// Returns the identifier of the cookie; for requests it is the listener.
fn id_of(info: &ConnectionInfo) -> RegisteredId {
    RegisteredId(info.cookie)
}

/// Queues an event of the daemon on the current channel of its identifier.
pub fn dispatch(event: CmEvent) {
    let (kind, info) = match event {
        CmEvent::ConnectRequest(request) => {
            let listener = id_of(request.connection_info());
            // Dropped, and thereby rejected, if the listener was destroyed or does not admit the
            // peer.
            let mut request = Some(request);
            with_registered(listener, |id| {
                if let Some(request) = request.take_if(|request| id.admits(request)) {
                    id.push_event(QueuedEvent::Request { listener, request });
                }
            });
            return;
        }
        CmEvent::RequestCancelled { .. } => return,
        CmEvent::DeviceRemoval { cookie, .. } => {
            with_registered(RegisteredId(cookie), |id| {
                id.push_plain(RDMA_CM_EVENT_DEVICE_REMOVAL);
            });
            return;
        }
        CmEvent::Established(info) => (RDMA_CM_EVENT_ESTABLISHED, info),
        CmEvent::Rejected(info) => (RDMA_CM_EVENT_REJECTED, info),
        CmEvent::Unreachable(info) => (RDMA_CM_EVENT_UNREACHABLE, info),
        CmEvent::ConnectError(info) => (RDMA_CM_EVENT_CONNECT_ERROR, info),
        CmEvent::Disconnected(info) => (RDMA_CM_EVENT_DISCONNECTED, info),
    };
    with_registered(id_of(&info), |id| {
        let status = match kind {
            RDMA_CM_EVENT_ESTABLISHED => {
                id.connected.store(true, Ordering::Release);
                0
            }
            RDMA_CM_EVENT_DISCONNECTED => {
                // The library may have created this event itself already.
                if !id.connected.swap(false, Ordering::AcqRel) {
                    return;
                }
                0
            }
            _ => -info.errno.max(1),
        };
        id.push_event(QueuedEvent::Plain(PlainEvent {
            id: id.registered(),
            kind,
            status,
            info: Some(Box::new(info)),
        }));
    });
}

/// Parameters of the connection: those that the peer requests, or the negotiated ones.
fn connection_parameters(info: &ConnectionInfo, private_data: &[u8]) -> rdma_conn_param {
    let depth = |depth: u32| u8::try_from(depth).unwrap_or(u8::MAX);
    rdma_conn_param {
        private_data: if private_data.is_empty() {
            std::ptr::null()
        } else {
            private_data.as_ptr().cast()
        },
        private_data_len: u8::try_from(private_data.len()).unwrap_or(u8::MAX),
        responder_resources: depth(info.ird),
        initiator_depth: depth(info.ord),
        flow_control: 0,
        retry_count: 0,
        rnr_retry_count: 0,
        srq: 0,
        qp_num: 0,
    }
}

fn new_event(owner: RegisteredId, info: Option<&ConnectionInfo>) -> Box<EventObject> {
    // SAFETY: the struct is made of numbers and pointers.
    let mut abi: rdma_cm_event = unsafe { std::mem::zeroed() };
    let private_data: Box<[u8]> = info.map_or_else(Box::default, |info| {
        info.private_data.clone().into_boxed_slice()
    });
    if let Some(info) = info {
        abi.param.conn = connection_parameters(info, &private_data);
    }
    Box::new(EventObject {
        abi,
        owner,
        _private_data: private_data,
    })
}

/// Converts a queued event for the program; None if its identifier was destroyed.
pub fn deliver(event: QueuedEvent) -> Option<Box<EventObject>> {
    match event {
        QueuedEvent::Plain(plain) => {
            let mut event = new_event(plain.id, plain.info.as_deref());
            event.abi.event = plain.kind;
            event.abi.status = plain.status;
            with_registered(plain.id, |id| {
                if id.is_closing() {
                    return None;
                }
                event.abi.id = id.as_abi();
                if plain.kind == RDMA_CM_EVENT_ESTABLISHED
                    && let Some(info) = &plain.info
                {
                    id.store_addresses(info);
                }
                id.events.deliver();
                Some(())
            })??;
            Some(event)
        }
        QueuedEvent::Request { listener, request } => {
            let mut event = new_event(listener, Some(request.connection_info()));
            event.abi.event = RDMA_CM_EVENT_CONNECT_REQUEST;
            // It may have to create a channel, which must not be done under the lock.
            event.abi.id = IdObject::new_child(listener, request)?;
            with_registered(listener, |id| {
                event.abi.listen_id = id.as_abi();
                id.events.deliver();
            })?;
            Some(event)
        }
    }
}

impl IdObject {
    /// Stores the addresses of a connection in its identifier.
    pub fn store_addresses(&self, info: &ConnectionInfo) {
        let route = self.route();
        // SAFETY: the identifier's own fields, each with room for any address.
        unsafe {
            if let Some(local) = info.local {
                write_address(local, &raw mut (*route).addr.__bindgen_anon_1);
            }
            if let Some(peer) = info.peer {
                write_address(peer, &raw mut (*route).addr.__bindgen_anon_2);
            }
        }
    }
}

/// rdma_ack_cm_event(3)
pub unsafe fn ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    if event.is_null() {
        crate::status::fail_errno(libc::EINVAL);
        return -1;
    }
    // SAFETY: `get_cm_event` boxed it; the manual page forbids any later use.
    let object = unsafe { Box::from_raw(event.cast::<EventObject>()) };
    with_registered(object.owner, |id| id.events.acknowledge(1));
    drop(object);
    0
}

/// rdma_event_str(3)
pub unsafe fn event_text(kind: rdma_cm_event_type) -> *const c_char {
    let text = match kind {
        RDMA_CM_EVENT_ADDR_RESOLVED => c"RDMA_CM_EVENT_ADDR_RESOLVED",
        RDMA_CM_EVENT_ADDR_ERROR => c"RDMA_CM_EVENT_ADDR_ERROR",
        RDMA_CM_EVENT_ROUTE_RESOLVED => c"RDMA_CM_EVENT_ROUTE_RESOLVED",
        RDMA_CM_EVENT_ROUTE_ERROR => c"RDMA_CM_EVENT_ROUTE_ERROR",
        RDMA_CM_EVENT_CONNECT_REQUEST => c"RDMA_CM_EVENT_CONNECT_REQUEST",
        RDMA_CM_EVENT_CONNECT_RESPONSE => c"RDMA_CM_EVENT_CONNECT_RESPONSE",
        RDMA_CM_EVENT_CONNECT_ERROR => c"RDMA_CM_EVENT_CONNECT_ERROR",
        RDMA_CM_EVENT_UNREACHABLE => c"RDMA_CM_EVENT_UNREACHABLE",
        RDMA_CM_EVENT_REJECTED => c"RDMA_CM_EVENT_REJECTED",
        RDMA_CM_EVENT_ESTABLISHED => c"RDMA_CM_EVENT_ESTABLISHED",
        RDMA_CM_EVENT_DISCONNECTED => c"RDMA_CM_EVENT_DISCONNECTED",
        RDMA_CM_EVENT_DEVICE_REMOVAL => c"RDMA_CM_EVENT_DEVICE_REMOVAL",
        RDMA_CM_EVENT_MULTICAST_JOIN => c"RDMA_CM_EVENT_MULTICAST_JOIN",
        RDMA_CM_EVENT_MULTICAST_ERROR => c"RDMA_CM_EVENT_MULTICAST_ERROR",
        RDMA_CM_EVENT_ADDR_CHANGE => c"RDMA_CM_EVENT_ADDR_CHANGE",
        RDMA_CM_EVENT_TIMEWAIT_EXIT => c"RDMA_CM_EVENT_TIMEWAIT_EXIT",
        _ => c"UNKNOWN EVENT",
    };
    text.as_ptr()
}
