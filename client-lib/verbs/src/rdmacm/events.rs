//! Events on their way to the program (rdma_get_cm_event(3)): those of the daemon go to the queue of
//! their identifier's channel; those of a queue are converted for the program: the identifier of an
//! event, its kind, status and parameters, and the identifier that has to acknowledge it.

use super::address::on_search_ended;
use super::channel::{EventChannel, EventChannelObject};
use super::faulty::{on_established, rejects_request};
use super::id::{IdObject, fail, for_each_registered, with_registered};
use super::queue::{
    DatagramParameters, PeerRequest, PlainEvent, QueuedEvent, RDMA_CM_EVENT_ADDRINFO_ERROR,
    RDMA_CM_EVENT_ADDRINFO_RESOLVED, RDMA_CM_EVENT_USER, RegisteredId,
};
use super::streaming::accept_if_turned;
use crate::abi::*;
use crate::ibverbs::address_vector::vector_between;
use crate::ibverbs::context::ContextObject;
use crate::status::{explain, fail_errno, fail_with, log_failure};
use crate::waiting::{Call, Held};
use rustix::fd::AsFd;
use siw::{CmEvent, ConnectionInfo, Error, RdmaCmEvent, ServiceReply};
use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// An event as programs see it.
#[repr(C)]
pub struct EventObject {
    pub abi: rdma_cm_event,
    /// Identifier that counts it: the listener of a request, else the identifier of the event.
    owner: RegisteredId,
    /// Memory that `param` points to.
    private_data: Box<[u8]>,
}

/// Returns the identifier of the cookie; for requests it is the listener.
fn id_of(info: &ConnectionInfo) -> RegisteredId {
    RegisteredId(info.cookie)
}

/// Queues an event of the daemon on the current channel of its identifier.
fn dispatch(event: RdmaCmEvent) {
    let event = match event {
        RdmaCmEvent::Connection(event) => event,
        RdmaCmEvent::AddressResolved(info) => {
            return dispatch_search_end(RDMA_CM_EVENT_ADDR_RESOLVED, info);
        }
        RdmaCmEvent::AddressError(info) => {
            return dispatch_search_end(RDMA_CM_EVENT_ADDR_ERROR, info);
        }
        RdmaCmEvent::ServiceRequest(request) => {
            return dispatch_request(PeerRequest::Service(request));
        }
        RdmaCmEvent::ServiceReply(reply) => return dispatch_service_reply(reply),
        RdmaCmEvent::StreamOpened(stream) => {
            return dispatch_request(PeerRequest::Streaming(stream));
        }
        // The connection takes its events from a channel of its own.
        RdmaCmEvent::StreamReady { .. } => return,
    };
    let (kind, info) = match event {
        CmEvent::ConnectRequest(request) => {
            if let Some(request) = accept_if_turned(request) {
                dispatch_request(PeerRequest::Connection(request));
            }
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
    let mut info = info;
    with_registered(id_of(&info), |id| {
        if kind == RDMA_CM_EVENT_ESTABLISHED && info.private_data.is_empty() {
            info.private_data = std::mem::take(&mut id.lock_state().request_data);
        }
        let (kind, status) = match kind {
            RDMA_CM_EVENT_ESTABLISHED => {
                id.connected.store(true, Ordering::Release);
                // By rdma_get_cm_event(3), an active side without a queue pair gets the first.
                // Devices of Linux for iWARP always report the second, for which programs written for
                // InfiniBand and RoCE do not wait.
                match id.lock_state().awaits_response {
                    true => (RDMA_CM_EVENT_CONNECT_RESPONSE, 0),
                    false => (RDMA_CM_EVENT_ESTABLISHED, 0),
                }
            }
            RDMA_CM_EVENT_DISCONNECTED => {
                // The library may have created this event itself already.
                if !id.connected.swap(false, Ordering::AcqRel) {
                    return;
                }
                (kind, 0)
            }
            _ => (kind, -info.errno.max(1)),
        };
        id.push_event(QueuedEvent::Plain(PlainEvent {
            id: id.registered(),
            kind,
            status,
            info: Some(Box::new(info)),
            datagram: None,
            argument: 0,
        }));
        if matches!(
            kind,
            RDMA_CM_EVENT_ESTABLISHED | RDMA_CM_EVENT_CONNECT_RESPONSE
        ) {
            on_established(id);
        }
    });
}

/// Queues a request of a peer for its listener.
fn dispatch_request(request: PeerRequest) {
    let listener = id_of(request.info());
    if let Some(data) = rejects_request(&request) {
        if let PeerRequest::Connection(request) = request {
            // The peer may have given up.
            let _ = request.reject(&data);
        }
        return;
    }
    // Dropped, and thereby rejected, if the listener was destroyed or does not admit the peer.
    let mut request = Some(request);
    with_registered(listener, |id| {
        if let Some(request) = request.take_if(|request| id.admits(request)) {
            id.push_event(QueuedEvent::Request { listener, request });
        }
    });
}

/// The queue pair and the address of a service that has named them.
fn destination_of(id: &IdObject, reply: &ServiceReply) -> Option<DatagramParameters> {
    let (local, peer) = reply.info.local.zip(reply.info.peer)?;
    // SAFETY: the identifier's own field.
    let verbs = unsafe { (*id.as_abi()).verbs };
    if verbs.is_null() {
        return None;
    }
    // SAFETY: a context of this library, which is open for good.
    let context = unsafe { ContextObject::from_abi(verbs) };
    let vector = vector_between(context, local.ip(), peer.ip());
    // The program fails to make an address handle of zeros.
    let vector = vector
        .inspect_err(|error| log_failure("the address vector of a datagram service", error))
        .ok()?;
    Some(DatagramParameters {
        vector,
        qp_num: reply.qp_num,
        qkey: reply.qkey,
        argument: 0,
    })
}

/// Queues the outcome of rdma_connect(3) to a datagram service.
fn dispatch_service_reply(reply: ServiceReply) {
    with_registered(id_of(&reply.info), |id| {
        let mut state = id.lock_state();
        if let Some(search) = state.search.take() {
            search.forget();
        }
        let (kind, status) = match (reply.sidr_status, reply.info.errno) {
            (0, 0) if state.fix_qkey(Some(reply.qkey)).is_some() => (RDMA_CM_EVENT_ESTABLISHED, 0),
            (0, 0) => {
                explain(
                    &"the datagram service has another Q_Key than the queue pair of this identifier",
                );
                (RDMA_CM_EVENT_ADDR_ERROR, -libc::EINVAL)
            }
            (0, errno) => (RDMA_CM_EVENT_UNREACHABLE, -errno),
            // As in Linux, the status of the peer's answer.
            (sidr_status, _) => (RDMA_CM_EVENT_UNREACHABLE, sidr_status.into()),
        };
        drop(state);
        let destination = (kind == RDMA_CM_EVENT_ESTABLISHED).then(|| destination_of(id, &reply));
        id.push_event(QueuedEvent::Plain(PlainEvent {
            id: id.registered(),
            kind,
            status,
            info: Some(Box::new(reply.info)),
            datagram: destination.flatten().map(Box::new),
            argument: 0,
        }));
    });
}

/// Queues the outcome of rdma_resolve_addr(3).
fn dispatch_search_end(kind: rdma_cm_event_type, mut info: ConnectionInfo) {
    with_registered(id_of(&info), |id| {
        let is_awaited = on_search_ended(&mut id.lock_state(), &mut info);
        if is_awaited {
            id.push_event(QueuedEvent::Plain(PlainEvent {
                id: id.registered(),
                kind,
                status: -info.errno,
                info: Some(Box::new(info)),
                datagram: None,
                argument: 0,
            }));
        }
    });
}

/// Parameters of datagrams: the private data of a request or reply, or the argument of the program, and the
/// destination.
fn datagram_parameters(
    destination: Option<&DatagramParameters>,
    private_data: &[u8],
) -> rdma_ud_param {
    // SAFETY: the struct is made of numbers and a pointer.
    let mut param: rdma_ud_param = unsafe { std::mem::zeroed() };
    if let Some(destination) = destination {
        param.ah_attr = destination.vector;
        (param.qp_num, param.qkey) = (destination.qp_num, destination.qkey);
        param.private_data = destination.argument as *const c_void;
    }
    if !private_data.is_empty() {
        param.private_data = private_data.as_ptr().cast();
        param.private_data_len = u8::try_from(private_data.len()).unwrap_or(u8::MAX);
    }
    param
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
        private_data,
    })
}

/// Converts a queued event for the program; None if its identifier was destroyed.
fn deliver(event: QueuedEvent) -> Option<Box<EventObject>> {
    match event {
        QueuedEvent::Plain(plain) => {
            let mut event = new_event(plain.id, plain.info.as_deref());
            event.abi.event = plain.kind;
            event.abi.status = plain.status;
            if plain.kind == RDMA_CM_EVENT_USER {
                // SAFETY: `arg` of the union, which older headers lack, is at its start, and shorter
                // than the others.
                unsafe {
                    (&raw mut event.abi.param)
                        .cast::<u64>()
                        .write(plain.argument)
                };
            }
            with_registered(plain.id, |id| {
                if id.is_closing() {
                    return None;
                }
                event.abi.id = id.as_abi();
                if id.is_datagram() && plain.kind != RDMA_CM_EVENT_USER {
                    let destination = plain.datagram.as_deref();
                    event.abi.param.ud = datagram_parameters(destination, &event.private_data);
                }
                let has_addresses = matches!(
                    plain.kind,
                    RDMA_CM_EVENT_ESTABLISHED
                        | RDMA_CM_EVENT_CONNECT_RESPONSE
                        | RDMA_CM_EVENT_ADDR_RESOLVED
                );
                if let Some(info) = plain.info.as_ref().filter(|_| has_addresses) {
                    id.store_addresses(info);
                }
                id.events.deliver();
                Some(())
            })??;
            Some(event)
        }
        QueuedEvent::Request { listener, request } => {
            let mut event = new_event(listener, Some(request.info()));
            event.abi.event = RDMA_CM_EVENT_CONNECT_REQUEST;
            let is_service = matches!(request, PeerRequest::Service(_));
            // It may have to create a channel, which must not be done under the lock.
            event.abi.id = IdObject::new_child(listener, request)?;
            with_registered(listener, |id| {
                event.abi.listen_id = id.as_abi();
                if is_service {
                    event.abi.param.ud = datagram_parameters(None, &event.private_data);
                }
                id.events.deliver();
            })?;
            Some(event)
        }
    }
}

impl EventChannel {
    /// Passes all events of the daemon on this channel to their identifiers.
    pub fn drain_daemon(&self) -> Result<(), Error> {
        loop {
            match self.daemon.get_rdma_cm_event(Some(Duration::ZERO)) {
                Ok(report) => self.take_report(report),
                Err(Error::Timeout) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    /// Processes an event of the daemon on this channel.
    fn take_report(&self, report: RdmaCmEvent) {
        match report {
            // The peer gave up before the program took the request.
            RdmaCmEvent::Connection(CmEvent::RequestCancelled { request: number }) => {
                drop(self.take_matching(|event| {
                    matches!(event, QueuedEvent::Request { request, .. }
                        if request.connection().is_some_and(|request| request.id() == number))
                }));
            }
            // Listeners have an event of their own.
            RdmaCmEvent::Connection(CmEvent::DeviceRemoval { device, cookie: 0 }) => {
                for_each_registered(|id| {
                    if id.is_bound_to(device) && std::ptr::eq(&*id.channel(), self) {
                        id.push_plain(RDMA_CM_EVENT_DEVICE_REMOVAL);
                    }
                });
            }
            report => dispatch(report),
        }
    }

    /// Takes the next event, if there is one. Reports of the daemon may leave none: the socket is empty
    /// when this returns `None`.
    fn next_event(&self) -> Result<Option<QueuedEvent>, Error> {
        self.queue_late_events();
        loop {
            if let Some(event) = self.pop() {
                return Ok(Some(event));
            }
            match self.daemon.get_rdma_cm_event(Some(Duration::ZERO)) {
                Ok(report) => self.take_report(report),
                Err(Error::Timeout) => return Ok(None),
                Err(Error::DaemonGone) if !self.gone_reported.swap(true, Ordering::AcqRel) => {
                    IdObject::report_removal(self);
                }
                Err(error) => {
                    if matches!(error, Error::DaemonGone) {
                        // Pollers of the descriptor have been told; otherwise it would stay readable.
                        self.descriptor.silence(self.daemon.as_fd());
                    }
                    return Err(error);
                }
            }
        }
    }

    /// Takes the next event, without waiting.
    fn take_event(&self) -> Result<Option<Box<EventObject>>, Error> {
        while let Some(event) = self.next_event()? {
            if let Some(event) = deliver(event) {
                return Ok(Some(event));
            }
        }
        Ok(None)
    }

    /// Takes the next event.
    ///
    /// # Errors
    /// EAGAIN if the program has set O_NONBLOCK, or the call has to wait.
    pub fn get_event(self: &Arc<Self>, call: &mut Call) -> Result<Box<EventObject>, Error> {
        drop(call.take_held());
        if self.is_inherited() {
            return Err(Error::DaemonGone);
        }
        let interrupted = call.check_interrupted();
        if let Some(event) = self.take_event()? {
            return Ok(event);
        }
        interrupted.map_err(std::io::Error::from_raw_os_error)?;
        self.descriptor.check_open()?;
        if !self.descriptor.is_nonblocking() {
            let held = Held::Other(Box::new(self.clone()));
            call.wait_for_descriptors(&[self.descriptor.number()], None, false, held);
        }
        Err(std::io::Error::from_raw_os_error(libc::EAGAIN).into())
    }
}

/// Ends a call of a synchronous identifier: waits for its event, which is stored in the identifier.
/// No effect for other identifiers.
///
/// # Safety
/// An identifier of this library.
pub unsafe fn complete(call: &mut Call, id: *mut rdma_cm_id) -> c_int {
    // SAFETY: as the caller promised.
    let object = unsafe { IdObject::from_abi(id) };
    if !object.is_sync() {
        return 0;
    }
    // SAFETY: the identifier's own field, which the program does not use in other threads
    // meanwhile.
    unsafe {
        release_event(id);
        let event = match object.channel().get_event(call) {
            Ok(event) => Box::into_raw(event).cast::<rdma_cm_event>(),
            Err(_) if call.must_wait() => return -1,
            Err(error) => {
                fail_with("waiting for the event of a synchronous call", &error);
                return -1;
            }
        };
        (*id).event = event;
        match ((*event).status, (*event).event) {
            (0, _) => 0,
            (_, RDMA_CM_EVENT_REJECTED) => fail(libc::ECONNREFUSED),
            (status, _) => fail(status.abs()),
        }
    }
}

/// A call of a synchronous identifier: `start` returns 0 if an event follows.
///
/// # Safety
/// An identifier of this library.
pub unsafe fn start_and_complete(
    call: &mut Call,
    id: *mut rdma_cm_id,
    start: impl FnOnce() -> c_int,
) -> c_int {
    if !call.has_begun {
        let failed = start();
        if failed != 0 {
            return failed;
        }
        call.has_begun = true;
    }
    // SAFETY: as the caller promised.
    unsafe { complete(call, id) }
}

/// Acknowledges the event of a synchronous identifier.
///
/// # Safety
/// An identifier of this library.
pub unsafe fn release_event(id: *mut rdma_cm_id) {
    // SAFETY: as the caller promised; the field is NULL or from `get_cm_event`.
    unsafe {
        let event = std::mem::replace(&mut (*id).event, std::ptr::null_mut());
        if !event.is_null() {
            ack_cm_event(event);
        }
    }
}

/// rdma_destroy_event_channel(3)
pub unsafe fn destroy_event_channel(channel: *mut rdma_event_channel) {
    // SAFETY: `EventChannelObject::create` boxed it; the manual page forbids any later use.
    let object = unsafe { Box::from_raw(channel.cast::<EventChannelObject>()) };
    if !object.channel().is_inherited() {
        // Requests that nobody can take any more are rejected.
        let _ = object.channel().drain_daemon();
        drop(object.channel().take_matching(|_| true));
        drop(object.channel().take_late_events(None));
    }
}

/// rdma_get_cm_event(3)
pub unsafe fn get_cm_event(
    call: &mut Call,
    channel: *mut rdma_event_channel,
    event: *mut *mut rdma_cm_event,
) -> c_int {
    if channel.is_null() || event.is_null() {
        fail_errno(libc::EINVAL);
        return -1;
    }
    // Programs destroy channels that another thread waits on. That thread goes on waiting, like a
    // read of a descriptor that is closed meanwhile.
    let waited_on = call.take_other::<Arc<EventChannel>>().unwrap_or_else(|| {
        // SAFETY: a channel of this library.
        let object = unsafe { EventChannelObject::from_abi(channel) };
        object.channel().clone()
    });
    match waited_on.get_event(call) {
        Ok(got) => {
            // SAFETY: a pointer to write.
            unsafe { event.write(Box::into_raw(got).cast()) };
            0
        }
        Err(error) => {
            fail_with("rdma_get_cm_event", &error);
            -1
        }
    }
}

/// rdma_ack_cm_event(3)
pub unsafe fn ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    if event.is_null() {
        fail_errno(libc::EINVAL);
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
        RDMA_CM_EVENT_ADDRINFO_RESOLVED => c"RDMA_CM_EVENT_ADDRINFO_RESOLVED",
        RDMA_CM_EVENT_ADDRINFO_ERROR => c"RDMA_CM_EVENT_ADDRINFO_ERROR",
        RDMA_CM_EVENT_USER => c"RDMA_CM_EVENT_USER",
        _ => c"UNKNOWN EVENT",
    };
    text.as_ptr()
}
