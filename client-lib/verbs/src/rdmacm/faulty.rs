//! Faults of the plan at rdma_cm: events in place of the real ones, and events at a time.

use super::channel::EventChannel;
use super::id::{IdObject, Resolved, find_queue_pair, with_registered};
use super::queue::{PeerRequest, PlainEvent, QueuedEvent, RegisteredId};
use crate::abi::*;
use crate::alarm::Alarm;
use crate::faults::{cm_fault, device_fault, loaded_plan};
use siw::{ConnectionInfo, ProcessMutex};
use siw_faults::{CmEvent, Kind, Site};
use std::ffi::c_int;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Events of a channel that come at a time.
pub struct LateEvents {
    /// Makes the descriptor of the channel readable.
    pub alarm: Alarm,
    events: ProcessMutex<Vec<(Instant, QueuedEvent)>>,
}

impl LateEvents {
    /// Creates the list of a new channel; None without a plan.
    pub fn new() -> std::io::Result<Option<LateEvents>> {
        if loaded_plan().is_none() {
            return Ok(None);
        }
        Ok(Some(LateEvents {
            alarm: Alarm::new()?,
            events: ProcessMutex::default(),
        }))
    }

    /// Adds an event.
    fn push(&self, time: Instant, event: QueuedEvent) {
        self.events.lock_or_end_call().push((time, event));
        self.alarm.set_no_later(time);
    }

    /// Takes the events whose time has come, the earliest first.
    fn take_due(&self, now: Instant) -> Vec<QueuedEvent> {
        if !self.alarm.is_due(now) {
            return Vec::new();
        }
        let mut events = self.events.lock_or_end_call();
        events.sort_by_key(|(time, _)| *time);
        let due = events.partition_point(|(time, _)| *time <= now);
        let taken = events.drain(..due).map(|(_, event)| event).collect();
        self.alarm.set(events.first().map(|(time, _)| *time));
        taken
    }

    /// Takes out the events of an identifier.
    pub fn take_of(&self, owner: RegisteredId) -> Vec<(Instant, QueuedEvent)> {
        let mut events = self.events.lock_or_end_call();
        let of_owner = events.extract_if(.., |(_, event)| event.owner() == owner);
        let taken = of_owner.collect();
        // The descriptor is readable only when there is an event.
        self.alarm.set(events.iter().map(|(time, _)| *time).min());
        taken
    }
}

impl EventChannel {
    /// Queues the events whose time has come.
    pub fn queue_late_events(&self) {
        let Some(late) = &self.late else {
            return;
        };
        for event in late.take_due(Instant::now()) {
            if let QueuedEvent::Plain(plain) = &event
                && plain.kind == RDMA_CM_EVENT_DEVICE_REMOVAL
            {
                end_queue_pair(plain.id);
            }
            self.push(event);
        }
    }

    /// Moves the late events of an identifier here.
    pub fn take_late_events(&self, from: &EventChannel, owner: RegisteredId) {
        let (Some(late), Some(from)) = (&self.late, &from.late) else {
            return;
        };
        for (time, event) in from.take_of(owner) {
            late.push(time, event);
        }
    }

    /// Forgets the late events of an identifier.
    pub fn drop_late_events(&self, owner: RegisteredId) {
        if let Some(late) = &self.late {
            drop(late.take_of(owner));
        }
    }
}

/// Moves the queue pair of an identifier whose device is removed to the error state.
fn end_queue_pair(id: RegisteredId) {
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
        let channel = self.channel();
        match &channel.late {
            Some(late) if !delay.is_zero() => late.push(Instant::now() + delay, event),
            _ => self.push_event(event),
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
