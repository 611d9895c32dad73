//! Connections of identifiers: rdma_connect(3), rdma_listen(3), rdma_accept(3), rdma_reject(3),
//! rdma_disconnect(3).

use super::address::bind;
use super::events::{complete, start_and_complete};
use super::faulty::fails_to_connect;
use super::id::{IdObject, Resolved, fail, find_queue_pair, note_own_moves, result_of};
use super::queue::PeerRequest;
use super::streaming::{Acceptance, close_stream, keep_open, reset_stream, take_open};
use crate::abi::*;
use crate::status;
use crate::waiting::Call;
use siw::{
    CmListener, ConnectOptions, ConnectionRequest, Error, ListenOptions, Qp, ResolvedAddress,
    SERVICE_QKEY, ServiceSearch,
};
use std::ffi::{c_int, c_void};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::Ordering;

/// Linux's value for a backlog of 0 or less.
const DEFAULT_BACKLOG: u32 = 1024;

/// Number of retries of a refused connect: perftest's client and server agree to connect, and then
/// the client resolves an address, which takes long elsewhere, while the server begins to listen.
const REFUSALS: u8 = 8;

/// Value of `rnr_retry_count` with which the peer repeats a SEND until there is a receive work
/// request (rdma_connect(3)). Smaller numbers have no effect: SENDs over TCP cannot be repeated.
const UNLIMITED_RNR_RETRIES: u8 = 7;

/// Connection parameters of the program.
struct Wanted<'a> {
    private_data: &'a [u8],
    /// Responder resources and initiator depth of this side; None for the maximum.
    ird: Option<u32>,
    ord: Option<u32>,
    qp_num: u32,
    /// SENDs of the peer wait for receive work requests.
    waits_for_receives: bool,
}

/// # Safety
/// NULL, or parameters as of rdma_connect(3).
unsafe fn read_parameters<'a>(param: *const rdma_conn_param) -> Wanted<'a> {
    if param.is_null() {
        return Wanted {
            private_data: &[],
            ird: None,
            ord: None,
            qp_num: 0,
            waits_for_receives: status::wants_receive_waits(),
        };
    }
    // SAFETY: as the caller promised.
    let param = unsafe { &*param };
    let depth = |depth: u8| (u32::from(depth) != RDMA_MAX_RESP_RES).then_some(depth.into());
    Wanted {
        // SAFETY: valid for its length.
        private_data: unsafe { bytes(param.private_data, param.private_data_len) },
        ird: depth(param.responder_resources),
        ord: depth(param.initiator_depth),
        qp_num: param.qp_num,
        waits_for_receives: status::wants_receive_waits()
            || param.rnr_retry_count >= UNLIMITED_RNR_RETRIES,
    }
}

/// # Safety
/// NULL, or `length` bytes.
unsafe fn bytes<'a>(data: *const c_void, length: u8) -> &'a [u8] {
    if data.is_null() {
        return &[];
    }
    // SAFETY: as the caller promised.
    unsafe { std::slice::from_raw_parts(data.cast(), length.into()) }
}

/// Returns `wanted`, which must not exceed `most`; without it, `default`.
fn choose_depth(wanted: Option<u32>, most: u32, default: u32) -> Result<u32, Error> {
    match wanted {
        Some(depth) if depth > most => Err(Error::Invalid(
            "responder_resources or initiator_depth exceeds the limit of the device",
        )),
        Some(depth) => Ok(depth),
        None => Ok(default.min(most)),
    }
}

fn no_queue_pair() -> Error {
    Error::Invalid("the identifier has no queue pair")
}

fn no_route() -> Error {
    Error::Invalid("the identifier has no route: resolve its address and its route first")
}

/// Searches the datagram service at the identifier's destination.
fn find_service(object: &IdObject, wanted: &Wanted<'_>) -> Result<(), Error> {
    let channel = object.channel();
    let mut state = object.lock_state();
    let resolved = (state.device, state.local, state.destination);
    let (Some(device), Some(local), Some(destination)) = resolved else {
        return Err(no_route());
    };
    if state.resolved != Resolved::Route || state.search.is_some() {
        return Err(no_route());
    }
    let from = ResolvedAddress { device, local };
    let cookie = object.registered().0;
    let data = wanted.private_data;
    let search = ServiceSearch::start(&channel.daemon, &from, destination, data, None, cookie)?;
    state.search = Some(search);
    Ok(())
}

/// # Safety
/// An identifier of this library.
unsafe fn start_connect(id: *mut rdma_cm_id, wanted: &Wanted<'_>) -> Result<(), Error> {
    // SAFETY: as the caller promised.
    let object = unsafe { IdObject::from_abi(id) };
    if object.is_datagram() {
        return find_service(object, wanted);
    }
    let mut state = object.lock_state();
    state.qp_num = wanted.qp_num;
    // SAFETY: as the caller promised.
    state.awaits_response = unsafe { (*id).qp.is_null() };
    let is_moved_by_program = state.awaits_response;
    drop(state);
    // SAFETY: as the caller promised.
    let qp = unsafe { find_queue_pair(id) }.ok_or_else(no_queue_pair)?;
    if is_moved_by_program {
        // SAFETY: as the caller promised.
        unsafe { note_own_moves(id) };
    }
    let channel = object.channel();
    let limits = channel.devices.client.limits();
    let mut state = object.lock_state();
    let has_route = state.resolved == Resolved::Route || state.stream.is_some();
    let destination = state.destination.filter(|_| has_route);
    let destination = destination.ok_or_else(no_route)?;
    let options = ConnectOptions {
        device: state.device,
        src: state.local,
        private_data: wanted.private_data,
        ord: choose_depth(wanted.ord, limits.max_ord, limits.max_ord)?,
        ird: choose_depth(wanted.ird, limits.max_ird, limits.max_ird)?,
        cookie: object.registered().0,
        refusals: REFUSALS,
        wait_for_receives: wanted.waits_for_receives,
        ..ConnectOptions::default()
    };
    let stream = match state.is_streaming {
        true => Some(take_open(&mut state)?),
        false => None,
    };
    drop(state);
    if fails_to_connect(object) {
        return Ok(());
    }
    let Some(stream) = stream else {
        return qp.connect(&channel.daemon, destination, &options);
    };
    let started = stream.start_initiator(&qp, &channel.daemon, &options);
    started.map_err(|failed| keep_open(object, failed))
}

/// rdma_connect(3)
pub unsafe fn connect(call: &mut Call, id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int {
    // SAFETY: by the contract of the manual page.
    let start = || unsafe { start_connect(id, &read_parameters(param)) };
    // SAFETY: an identifier of this library.
    unsafe { start_and_complete(call, id, || result_of("rdma_connect", start())) }
}

fn start_listening(object: &IdObject, backlog: c_int) -> Result<(), Error> {
    if object.lock_state().local.is_none() {
        bind(object, SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)))?;
    }
    let channel = object.channel();
    let mut state = object.lock_state();
    let binding = state.binding.take().ok_or(Error::Invalid(
        "the identifier is already listening, or not bound to a port",
    ))?;
    let options = ListenOptions {
        streaming: state.is_streaming,
        backlog: u32::try_from(backlog)
            .ok()
            .filter(|n| *n > 0)
            .unwrap_or(DEFAULT_BACKLOG),
        cookie: object.registered().0,
        ..ListenOptions::default()
    };
    match CmListener::from_binding(&channel.daemon, binding, &options) {
        Ok(listener) => {
            state.listener = Some(listener);
            Ok(())
        }
        Err(failed) => {
            state.binding = Some(failed.object);
            Err(failed.error)
        }
    }
}

/// rdma_listen(3)
pub unsafe fn listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int {
    // SAFETY: an identifier of this library.
    let object = unsafe { IdObject::from_abi(id) };
    result_of("rdma_listen", start_listening(object, backlog))
}

fn no_request() -> Error {
    Error::Invalid("there is no request to accept")
}

/// Tells a peer the queue pair of a datagram service.
fn accept_service_request(object: &IdObject, qp: &Qp, data: &[u8]) -> Result<(), Error> {
    let mut state = object.lock_state();
    let Some(PeerRequest::Service(request)) = state.request.take() else {
        return Err(no_request());
    };
    let qkey = state.fix_qkey(None).unwrap_or(SERVICE_QKEY);
    drop(state);
    request.accept(qp, qkey, data).map_err(|failed| {
        object.lock_state().request = Some(PeerRequest::Service(failed.object));
        name_departed_peer(failed.error)
    })
}

/// # Safety
/// An identifier of this library.
unsafe fn start_accept(id: *mut rdma_cm_id, wanted: &Wanted<'_>) -> Result<(), Error> {
    // SAFETY: as the caller promised.
    let object = unsafe { IdObject::from_abi(id) };
    object.lock_state().qp_num = wanted.qp_num;
    // SAFETY: as the caller promised.
    let qp = unsafe { find_queue_pair(id) }.ok_or_else(no_queue_pair)?;
    if object.is_datagram() {
        return accept_service_request(object, &qp, wanted.private_data);
    }
    let channel = object.channel();
    let mut state = object.lock_state();
    if state.stream.is_some() {
        let stream = take_open(&mut state)?;
        state.accepting = Some(Acceptance {
            qp,
            private_data: wanted.private_data.to_vec(),
            ird: wanted.ird,
            ord: wanted.ord,
            waits_for_receives: wanted.waits_for_receives,
        });
        drop(state);
        let started = stream.start_responder(&channel.daemon, object.registered().0);
        return started.map_err(|failed| keep_open(object, failed));
    }
    let Some(PeerRequest::Connection(request)) = state.request.take() else {
        return Err(no_request());
    };
    drop(state);
    accept_request(object, &qp, wanted, request)
}

/// Accepts the MPA request that ends the streaming mode of a connection, as the program has asked for.
pub(super) fn accept_turned(
    object: &IdObject,
    acceptance: &Acceptance,
    request: ConnectionRequest,
) -> Result<(), Error> {
    let info = request.connection_info();
    let mut state = object.lock_state();
    state.offered = (info.ird, info.ord);
    state.request_data = info.private_data.clone();
    drop(state);
    let wanted = Wanted {
        private_data: &acceptance.private_data,
        ird: acceptance.ird,
        ord: acceptance.ord,
        qp_num: 0,
        waits_for_receives: acceptance.waits_for_receives,
    };
    accept_request(object, &acceptance.qp, &wanted, request)
}

fn accept_request(
    object: &IdObject,
    qp: &Qp,
    wanted: &Wanted<'_>,
    request: ConnectionRequest,
) -> Result<(), Error> {
    let channel = object.channel();
    let limits = channel.devices.client.limits();
    let offered = object.lock_state().offered;
    // A peer of MPA revision 1 offers no depths: it accepts any.
    let offer = |depth: u32, most| if depth == 0 { most } else { depth };
    let offered_ird = offer(offered.0, limits.max_ird);
    let offered_ord = offer(offered.1, limits.max_ord);
    let options = ConnectOptions {
        private_data: wanted.private_data,
        ord: choose_depth(wanted.ord, limits.max_ord, offered_ord)?,
        ird: choose_depth(wanted.ird, limits.max_ird, offered_ird)?,
        cookie: object.registered().0,
        wait_for_receives: wanted.waits_for_receives,
        ..ConnectOptions::default()
    };
    match request.accept(qp, Some(&channel.daemon), &options) {
        Ok(()) => Ok(()),
        Err(failed) => {
            object.lock_state().request = Some(PeerRequest::Connection(failed.object));
            Err(name_departed_peer(failed.error))
        }
    }
}

/// Converts the error of an answer to a request that its peer has given up.
fn name_departed_peer(error: Error) -> Error {
    match error {
        Error::Refused {
            errno: libc::ENOENT,
            ..
        } => Error::Refused {
            errno: libc::ECONNRESET,
            reason: "the peer has given up the connection".into(),
        },
        error => error,
    }
}

/// rdma_accept(3)
pub unsafe fn accept(call: &mut Call, id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int {
    // SAFETY: by the contract of the manual page.
    let start = || unsafe { start_accept(id, &read_parameters(param)) };
    // SAFETY: an identifier of this library.
    if unsafe { IdObject::from_abi(id) }.is_datagram() {
        // No event follows.
        return result_of("rdma_accept", start());
    }
    // SAFETY: an identifier of this library.
    unsafe { start_and_complete(call, id, || result_of("rdma_accept", start())) }
}

/// rdma_reject(3)
pub unsafe fn reject(id: *mut rdma_cm_id, data: *const c_void, length: u8) -> c_int {
    // SAFETY: an identifier of this library.
    let object = unsafe { IdObject::from_abi(id) };
    if let Some(reset) = reset_stream(object) {
        return result_of("rdma_reject", reset);
    }
    let request = object.lock_state().request.take();
    let rejected = match request {
        Some(request) => {
            // SAFETY: valid for its length.
            let data = unsafe { bytes(data, length) };
            let rejected = match request {
                PeerRequest::Connection(request) => {
                    request.reject(data).map_err(|failed| failed.error)
                }
                PeerRequest::Service(request) => {
                    request.reject(data).map_err(|failed| failed.error)
                }
                PeerRequest::Streaming(stream) => stream.reset(),
            };
            rejected.map_err(name_departed_peer)
        }
        None => Err(Error::Invalid("there is no request to reject")),
    };
    result_of("rdma_reject", rejected)
}

/// rdma_disconnect(3)
pub unsafe fn disconnect(call: &mut Call, id: *mut rdma_cm_id) -> c_int {
    // SAFETY: an identifier of this library.
    let object = unsafe { IdObject::from_abi(id) };
    if !call.has_begun {
        if close_stream(object) {
            return 0;
        }
        // SAFETY: as above.
        let ended = match unsafe { find_queue_pair(id) } {
            // Programs wait for the flush of receives that they post while the connection ends.
            Some(qp) => qp.disconnect_for_good().map_err(|error| match error {
                Error::Refused { reason, .. } => Error::Refused {
                    errno: libc::EINVAL,
                    reason,
                },
                error => error,
            }),
            None => Err(no_queue_pair()),
        };
        let was_connected = object.connected.load(Ordering::Acquire);
        let result = result_of("rdma_disconnect", ended);
        if result != 0 || !was_connected {
            return result;
        }
        call.has_begun = true;
    }
    // SAFETY: as above.
    unsafe { complete(call, id) }
}

/// rdma_establish(3): over iWARP, connections are established without this call, which programs make
/// after RDMA_CM_EVENT_CONNECT_RESPONSE.
pub unsafe fn establish(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: an identifier of this library.
    let object = unsafe { IdObject::from_abi(id) };
    if object.connected.load(Ordering::Acquire) {
        0
    } else {
        fail(libc::EINVAL)
    }
}

/// rdma_notify(3): ignored, because the connection is established without it.
pub unsafe fn notify(_id: *mut rdma_cm_id, _event: ibv_event_type) -> c_int {
    0
}
