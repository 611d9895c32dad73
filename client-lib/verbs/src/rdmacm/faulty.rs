//! Faults of the plan at rdma_cm: events in place of the real ones, and events at a time.

use super::id::{IdObject, Resolved, find_queue_pair, with_registered};
use super::queue::{PeerRequest, PlainEvent, QueuedEvent, RegisteredId};
use crate::abi::*;
use crate::faults::{cm_fault, device_fault, loaded_plan};
use crate::status::log_failure;
use siw::ConnectionInfo;
use siw_faults::{CmEvent, Kind, Site};
use std::ffi::c_int;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Moves the queue pair of an identifier whose device is removed to the error state.
pub(super) fn end_queue_pair(id: RegisteredId) {
    let found = with_registered(id, |id| {
        // SAFETY: an identifier of this library, which is not freed meanwhile.
        unsafe { find_queue_pair(id.as_abi()) }
    });
    if let Some(qp) = found.flatten() {
        let _ = qp.set_error();
    }
}

impl IdObject {
    /// Queues an event of the plan after a time.
    fn push_late(&self, delay: Duration, event: QueuedEvent) {
        if delay.is_zero() {
            return self.push_event(event);
        }
        let time = Instant::now() + delay;
        if let Err(error) = self.channel().push_at(time, event) {
            log_failure("an event of the fault plan", &error);
        }
    }

    /// Name in messages.
    fn fault_name(&self) -> String {
        let state = self.lock_state();
        match (state.local, state.destination) {
            (_, Some(peer)) => format!("the identifier that connects to {peer}"),
            (Some(local), None) => format!("the identifier at {local}"),
            (None, None) => "an identifier".to_owned(),
        }
    }
}

/// A failure of rdma_connect(3).
fn failure(id: &IdObject, kind: rdma_cm_event_type, errno: c_int, data: &[u8]) -> QueuedEvent {
    let state = id.lock_state();
    let info = ConnectionInfo {
        cookie: id.registered().0,
        errno,
        local: state.local,
        peer: state.destination,
        private_data: data.to_vec(),
        ..ConnectionInfo::default()
    };
    QueuedEvent::Plain(PlainEvent {
        id: id.registered(),
        kind,
        status: -errno,
        info: Some(Box::new(info)),
        datagram: None,
        argument: 0,
    })
}

/// Has rdma_resolve_addr(3) fail by the plan. Returns whether it does.
pub fn fails_to_resolve_address(id: &IdObject, destination: SocketAddr) -> bool {
    if loaded_plan().is_none() {
        return false;
    }
    let name = format!("rdma_resolve_addr of {destination}");
    match cm_fault(Site::ResolveAddress, Some(destination.port()), &name) {
        Some(Kind::AddrError { errno }) => {
            id.push_event(QueuedEvent::plain(
                id.registered(),
                RDMA_CM_EVENT_ADDR_ERROR,
                -errno,
            ));
            true
        }
        _ => false,
    }
}

/// Has rdma_resolve_route(3) fail by the plan. Returns whether it does.
pub fn fails_to_resolve_route(id: &IdObject) -> bool {
    if loaded_plan().is_none() {
        return false;
    }
    let port = id.lock_state().destination.map(|peer| peer.port());
    match cm_fault(Site::ResolveRoute, port, &id.fault_name()) {
        Some(Kind::RouteError { errno }) => {
            id.push_event(QueuedEvent::plain(
                id.registered(),
                RDMA_CM_EVENT_ROUTE_ERROR,
                -errno,
            ));
            true
        }
        _ => false,
    }
}

/// Has rdma_connect(3) of a connection fail by the plan. Returns whether it does.
pub fn fails_to_connect(id: &IdObject) -> bool {
    if loaded_plan().is_none() {
        return false;
    }
    let port = id.lock_state().destination.map(|peer| peer.port());
    let Some(kind) = cm_fault(Site::Connect, port, &id.fault_name()) else {
        return false;
    };
    let (delay, event) = match kind {
        Kind::Reject { private_data, .. } => (
            Duration::ZERO,
            failure(
                id,
                RDMA_CM_EVENT_REJECTED,
                libc::ECONNREFUSED,
                &private_data,
            ),
        ),
        Kind::Unreachable { errno, delay } => {
            (delay, failure(id, RDMA_CM_EVENT_UNREACHABLE, errno, &[]))
        }
        Kind::ConnectTimeout { delay } => (
            delay,
            failure(id, RDMA_CM_EVENT_UNREACHABLE, libc::ETIMEDOUT, &[]),
        ),
        Kind::ConnectError { errno } => (
            Duration::ZERO,
            failure(id, RDMA_CM_EVENT_CONNECT_ERROR, errno, &[]),
        ),
        _ => return false,
    };
    id.push_late(delay, event);
    true
}

/// Private data with which the plan rejects a request to a listener.
pub fn rejects_request(request: &PeerRequest) -> Option<Vec<u8>> {
    loaded_plan()?;
    request.connection()?;
    let info = request.info();
    let port = info.local.map(|local| local.port());
    let name = match info.peer {
        Some(peer) => format!("the request of {peer}"),
        None => "a request".to_owned(),
    };
    match cm_fault(Site::Request, port, &name)? {
        Kind::Reject { private_data, .. } => Some(private_data),
        _ => None,
    }
}

/// Queues the events that the plan has follow a connection.
pub fn on_established(id: &IdObject) {
    if loaded_plan().is_none() {
        return;
    }
    let state = id.lock_state();
    // Connections to a listener have its port.
    let port = match state.resolved {
        Resolved::Route => state.destination,
        _ => state.local,
    };
    let port = port.map(|end| end.port());
    drop(state);
    if let Some(Kind::Storm { event, burst }) = cm_fault(Site::Established, port, &id.fault_name())
    {
        let kind = match event {
            CmEvent::AddrChange => RDMA_CM_EVENT_ADDR_CHANGE,
            CmEvent::TimewaitExit => RDMA_CM_EVENT_TIMEWAIT_EXIT,
        };
        for _ in 0..burst {
            id.push_plain(kind);
        }
    }
}

/// Has the device of an identifier removed by the plan, after a time. `device` is its name.
pub fn on_device(id: &IdObject, device: &str) {
    if let Some(Kind::DeviceRemoval { delay }) = device_fault(device) {
        let event = QueuedEvent::plain(id.registered(), RDMA_CM_EVENT_DEVICE_REMOVAL, 0);
        // Not before the identifier has told of its address.
        id.push_late(delay.max(Duration::from_millis(1)), event);
    }
}
