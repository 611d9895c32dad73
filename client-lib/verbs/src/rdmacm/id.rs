//! Identifiers (rdma_create_id(3)): the C struct, its state, and the table by which events find
//! them. Synchronous ones have a channel of their own, on which each call waits for its event.

use super::addrinfo::AddressInfo;
use super::channel::{EventChannel, EventChannelObject};
use super::faulty::on_device;
use super::queue::{PeerRequest, QueuedEvent, RegisteredId};
use super::sockaddr::write_address;
use super::streaming::{Acceptance, Stream};
use crate::abi::*;
use crate::ibverbs::context::ContextObject;
use crate::ibverbs::qp::QpObject;
use crate::ibverbs::users::EventCount;
use crate::per_process::PerProcess;
use crate::status::{errno_of, fail_errno, fail_with, log_failure};
use siw::{
    AddressResolution, CmBinding, CmListener, ConnectionInfo, Error, Persona, ProcessMutex, Qp,
    ResolvedAddress, SERVICE_QKEY, ServiceSearch,
};
use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

/// Time of a connection in TIMEWAIT, as on RoCE devices of Linux (`cm_enter_timewait`, with a packet life time of
/// 16).
const TIME_WAIT: Duration = Duration::from_millis(512);

/// An identifier as programs see it. The program may read its fields, and this library may write
/// them, in calls that programs do not make concurrently for one identifier.
#[repr(C)]
pub struct IdObject {
    abi: UnsafeCell<rdma_cm_id>,
    number: RegisteredId,
    /// Generation of the process that created it.
    generation: u32,
    /// Delivered events; destroying waits until all are acknowledged.
    pub events: EventCount,
    /// A connection was established, and its end has not been reported.
    pub connected: AtomicBool,
    pub(super) closing: AtomicBool,
    channel: ProcessMutex<ChannelOf>,
    state: ProcessMutex<IdState>,
}

/// Event channel of an identifier.
pub(super) struct ChannelOf {
    pub channel: Arc<EventChannel>,
    /// For a synchronous identifier: the same channel, used by no other identifier.
    pub own: Option<Box<EventChannelObject>>,
}

/// Progress of an identifier that connects (rdma_resolve_addr(3), rdma_resolve_route(3)).
#[derive(Default, Clone, Copy, PartialEq, Eq)]
pub enum Resolved {
    #[default]
    Nothing,
    /// The neighbour is being searched.
    Pending,
    Address,
    Route,
}

/// A search for the neighbour of a destination, and what is needed to start it again.
pub struct Resolution {
    pub search: AddressResolution,
    pub from: ResolvedAddress,
    pub end: Instant,
}

/// State of an identifier.
#[derive(Default)]
pub struct IdState {
    pub binding: Option<CmBinding>,
    pub listener: Option<CmListener>,
    /// A request that has not been answered.
    pub request: Option<PeerRequest>,
    /// SIW_OPTION_STREAMING of siw_rdma.h: its connections begin in streaming mode.
    pub is_streaming: bool,
    /// The connection while it is in streaming mode.
    pub stream: Option<Stream>,
    /// Answer to the MPA request that is awaited at the end of the streaming mode.
    pub accepting: Option<Acceptance>,
    /// Private data of the MPA request that was answered so, for RDMA_CM_EVENT_ESTABLISHED.
    pub request_data: Vec<u8>,
    /// The search for the datagram service that it connects to.
    pub search: Option<ServiceSearch>,
    /// Multicast groups that it is in.
    pub groups: Vec<IpAddr>,
    /// The Q_Key of its datagrams, once it is fixed; see [`IdState::fix_qkey`].
    qkey: Option<u32>,
    /// RDMA Reads and atomics that the request offers: IRD and ORD of this side.
    pub offered: (u32, u32),
    /// Bound or resolved address.
    pub local: Option<SocketAddr>,
    pub destination: Option<SocketAddr>,
    pub resolved: Resolved,
    /// The search for the neighbour while `resolved` is pending.
    pub resolution: Option<Resolution>,
    /// The daemon's device index.
    pub device: Option<u32>,
    /// Number of a queue pair that the program created itself (`qp_num` of `struct
    /// rdma_conn_param`).
    pub qp_num: u32,
    /// Number and serial of the queue pair of rdma_create_qp(3). Programs may have destroyed it with
    /// ibv_destroy_qp(3), which leaves a dangling pointer in the C struct.
    pub own_queue_pair: Option<(u32, u64)>,
    /// It connects without a queue pair of its own (rdma_create_qp(3)): the program is told of the
    /// peer's response and then establishes the connection by rdma_establish(3).
    pub awaits_response: bool,
    pub reuse: bool,
    pub v6_only: bool,
    /// Bound to a loopback address: only peers with an address of siwd may connect.
    pub loopback_only: bool,
    /// Result of rdma_resolve_addrinfo(3) that the program has not taken.
    pub looked_up: Option<AddressInfo>,
    /// Attributes for the connections of rdma_create_ep(3) with RAI_PASSIVE.
    pub init_attr: Option<InitAttr>,
}

impl IdState {
    /// Fixes the Q_Key: that of a service, or the default one for `None`. Returns None if it was fixed to
    /// another one, as in Linux.
    pub fn fix_qkey(&mut self, wanted: Option<u32>) -> Option<u32> {
        let qkey = *self.qkey.get_or_insert(wanted.unwrap_or(SERVICE_QKEY));
        wanted.is_none_or(|wanted| wanted == qkey).then_some(qkey)
    }
}

/// Attributes for the queue pairs of connections to a listener.
#[derive(Clone, Copy)]
pub struct InitAttr(pub ibv_qp_init_attr);

// SAFETY: the objects it points to may be used from any thread.
unsafe impl Send for InitAttr {}

pub(super) struct IdPointer(*const IdObject);

// SAFETY: identifiers may be used from any thread; see `IdObject`.
unsafe impl Send for IdPointer {}

static REGISTERED: PerProcess<ProcessMutex<HashMap<RegisteredId, IdPointer>>> = PerProcess::new();
static LAST_NUMBER: AtomicU64 = AtomicU64::new(0);

pub(super) fn lock_registered() -> MutexGuard<'static, HashMap<RegisteredId, IdPointer>> {
    REGISTERED.get().lock_or_end_call()
}

/// Calls `with` for a registered identifier, which cannot be freed meanwhile. This includes an
/// identifier that `destroy_id` waits to free until its events are acknowledged.
pub fn with_registered<R>(number: RegisteredId, with: impl FnOnce(&IdObject) -> R) -> Option<R> {
    let all = lock_registered();
    // SAFETY: it is in the table, whose lock `destroy_id` takes before it frees the identifier.
    all.get(&number).map(|found| with(unsafe { &*found.0 }))
}

/// Calls `with` for every registered identifier; as [`with_registered`].
pub fn for_each_registered(with: impl Fn(&IdObject)) {
    for found in lock_registered().values() {
        // SAFETY: as in `with_registered`.
        with(unsafe { &*found.0 });
    }
}

impl IdObject {
    /// Creates an identifier on the channel, or a synchronous one.
    pub fn create(
        channel: *mut rdma_event_channel,
        context: *mut c_void,
        ps: rdma_port_space,
        qp_type: ibv_qp_type,
    ) -> Result<*mut rdma_cm_id, Error> {
        // SAFETY: the struct is made of numbers, pointers and addresses.
        let mut abi: rdma_cm_id = unsafe { std::mem::zeroed() };
        let channel = if channel.is_null() {
            let own = EventChannelObject::create()?;
            let channel = own.channel().clone();
            abi.channel = (&raw const *own).cast_mut().cast();
            ChannelOf {
                channel,
                own: Some(own),
            }
        } else {
            abi.channel = channel;
            // SAFETY: a channel of this library.
            let channel = unsafe { EventChannelObject::from_abi(channel) }
                .channel()
                .clone();
            ChannelOf { channel, own: None }
        };
        abi.context = context;
        abi.ps = ps;
        abi.qp_type = qp_type;
        let number = RegisteredId(LAST_NUMBER.fetch_add(1, Ordering::Relaxed) + 1);
        let object = Box::into_raw(Box::new(IdObject {
            abi: UnsafeCell::new(abi),
            number,
            generation: siw::process_generation(),
            events: EventCount::default(),
            connected: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            channel: ProcessMutex::new(channel),
            state: ProcessMutex::default(),
        }));
        lock_registered().insert(number, IdPointer(object));
        Ok(object.cast())
    }

    /// # Safety
    /// An identifier of this library.
    pub unsafe fn from_abi<'a>(id: *mut rdma_cm_id) -> &'a IdObject {
        // SAFETY: the struct of the header is the first field.
        unsafe { &*id.cast() }
    }

    /// Pointer for struct fields that hold an identifier, and for access to the fields of this one.
    pub fn as_abi(&self) -> *mut rdma_cm_id {
        self.abi.get()
    }

    /// True in a child of fork(2) of the process that created it.
    pub fn is_inherited(&self) -> bool {
        self.generation != siw::process_generation()
    }

    /// Its addresses.
    pub fn route(&self) -> *mut rdma_route {
        // SAFETY: the pointer is valid; no reference is made.
        unsafe { &raw mut (*self.as_abi()).route }
    }

    /// Its number.
    pub fn registered(&self) -> RegisteredId {
        self.number
    }

    pub(super) fn lock_channel(&self) -> MutexGuard<'_, ChannelOf> {
        self.channel.lock_or_end_call()
    }

    /// Locks its state.
    pub fn lock_state(&self) -> MutexGuard<'_, IdState> {
        self.state.lock_or_end_call()
    }

    /// Its current event channel.
    pub fn channel(&self) -> Arc<EventChannel> {
        self.lock_channel().channel.clone()
    }

    /// True if it is of the port space of datagram services.
    pub fn is_datagram(&self) -> bool {
        // SAFETY: a valid pointer; the field does not change.
        unsafe { (*self.as_abi()).ps == RDMA_PS_UDP }
    }

    /// True if its calls wait for their events.
    pub fn is_sync(&self) -> bool {
        self.lock_channel().own.is_some()
    }

    /// Adds an event to its channel. On InfiniBand and RoCE a disconnection is followed by the end of
    /// TIMEWAIT.
    pub fn push_event(&self, event: QueuedEvent) {
        if self.is_closing() {
            return;
        }
        let waits = event.kind() == Some(RDMA_CM_EVENT_DISCONNECTED) && self.has_time_wait();
        let of_channel = self.lock_channel();
        of_channel.channel.push(event);
        // A call of a synchronous identifier would take it for its own event.
        if waits && of_channel.own.is_none() {
            let exit = QueuedEvent::plain(self.number, RDMA_CM_EVENT_TIMEWAIT_EXIT, 0);
            if let Err(error) = of_channel.channel.push_at(Instant::now() + TIME_WAIT, exit) {
                log_failure("RDMA_CM_EVENT_TIMEWAIT_EXIT", &error);
            }
        }
    }

    /// True if it is of a device that programs do not take for an iWARP device.
    fn has_time_wait(&self) -> bool {
        // SAFETY: a valid pointer; the context is open for good.
        unsafe {
            let verbs = (*self.as_abi()).verbs;
            !verbs.is_null() && ContextObject::from_abi(verbs).device().persona() != Persona::Iwarp
        }
    }

    /// Checks whether the peer of a request may connect.
    pub fn admits(&self, request: &PeerRequest) -> bool {
        let peer = request.info().peer;
        !self.lock_state().loopback_only
            || peer.is_some_and(|peer| self.channel().devices.has_address(peer.ip()))
    }

    /// True if it uses the device, and does not listen.
    pub fn is_bound_to(&self, device: u32) -> bool {
        let state = self.lock_state();
        state.device == Some(device) && state.listener.is_none()
    }

    /// True while it is being destroyed: it gets no more events.
    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Adds an event without parameters.
    pub fn push_plain(&self, kind: rdma_cm_event_type) {
        self.push_event(QueuedEvent::plain(self.number, kind, 0));
    }

    /// Creates the identifier for a request, with the settings of its listener.
    pub fn new_child(listener: RegisteredId, request: PeerRequest) -> Option<*mut rdma_cm_id> {
        let of_listener = with_registered(listener, |id| {
            // SAFETY: a valid pointer; these fields do not change while it listens.
            let (channel, context, ps, qp_type) = unsafe {
                let abi = &*id.as_abi();
                (abi.channel, abi.context, abi.ps, abi.qp_type)
            };
            (!id.is_closing()).then_some((channel, context, ps, qp_type, id.is_sync()))
        });
        let (channel, context, ps, qp_type, is_sync) = of_listener??;
        let channel = if is_sync {
            std::ptr::null_mut()
        } else {
            channel
        };
        let child = IdObject::create(channel, context, ps, qp_type)
            .inspect_err(|error| {
                fail_with("rdma_get_cm_event", error);
            })
            .ok()?;
        // SAFETY: just made.
        let object = unsafe { IdObject::from_abi(child) };
        let channel = object.channel();
        if is_sync {
            // If that fails, a cancellation of the request does not reach the identifier.
            let _ = request
                .connection()
                .map(|request| request.migrate(&channel.daemon));
        }
        let info = request.info();
        object.store_addresses(info);
        // SAFETY: a valid pointer that is not shared yet.
        let abi = unsafe { &mut *child };
        abi.verbs = channel
            .devices
            .context(request.device())
            .unwrap_or_default_null();
        abi.port_num = 1;
        if !abi.verbs.is_null() {
            let pd = channel.devices.default_pd(abi.verbs);
            abi.pd = pd.unwrap_or_default_null();
            // SAFETY: a context of this library, which is open for good.
            let context = unsafe { ContextObject::from_abi(abi.verbs) };
            on_device(object, &context.device().info().name);
        }
        let mut state = object.lock_state();
        state.device = Some(request.device());
        state.local = info.local;
        state.destination = info.peer;
        state.offered = (info.ird, info.ord);
        match request {
            PeerRequest::Streaming(stream) => {
                state.is_streaming = true;
                state.stream = Some(Stream::Open(stream));
            }
            request => state.request = Some(request),
        }
        drop(state);
        Some(child)
    }

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

    /// Reports the end of the daemon: every identifier of the channel that has a device loses it.
    pub fn report_removal(channel: &EventChannel) {
        for found in lock_registered().values() {
            // SAFETY: it is in the table, whose lock is held.
            let id = unsafe { &*found.0 };
            let is_meant = std::ptr::eq(Arc::as_ptr(&id.channel()), channel);
            if is_meant && id.lock_state().device.is_some() {
                id.push_plain(RDMA_CM_EVENT_DEVICE_REMOVAL);
            }
        }
    }
}

/// Converts an error to a null pointer.
trait OrNull<T> {
    fn unwrap_or_default_null(self) -> *mut T;
}

impl<T> OrNull<T> for Result<*mut T, Error> {
    fn unwrap_or_default_null(self) -> *mut T {
        self.unwrap_or(std::ptr::null_mut())
    }
}

/// Returns the queue pair of the identifier, or the one whose number the program has given.
///
/// # Safety
/// An identifier of this library.
pub unsafe fn find_queue_pair(id: *mut rdma_cm_id) -> Option<Qp> {
    // SAFETY: as the caller promised; its fields are objects of this library. A queue pair of
    // rdma_create_qp(3) is only read while it is in the table of its context.
    unsafe {
        let state = IdObject::from_abi(id).lock_state();
        let (number, serial) = match (state.own_queue_pair, (*id).qp.is_null()) {
            (_, true) => (state.qp_num, None),
            (Some((number, serial)), false) => (number, Some(serial)),
            // The program has stored a queue pair of its own in the field.
            (None, false) => return Some(QpObject::from_abi((*id).qp).qp().clone()),
        };
        drop(state);
        if number == 0 || (*id).verbs.is_null() {
            return None;
        }
        let context = ContextObject::from_abi((*id).verbs);
        let of_object = |qp| {
            let object = QpObject::from_abi(qp);
            let is_same = serial.is_none_or(|serial| object.serial == serial);
            is_same.then(|| object.qp().clone())
        };
        context.objects().qps.find(number, of_object).flatten()
    }
}

/// Notes that the program itself moves the queue pair whose number it has given.
///
/// # Safety
/// An identifier of this library.
pub unsafe fn note_own_moves(id: *mut rdma_cm_id) {
    // SAFETY: as the caller promised; a context of this library. The queue pair is only read while it is in the
    // table of its context.
    unsafe {
        let number = IdObject::from_abi(id).lock_state().qp_num;
        if number != 0 && !(*id).verbs.is_null() {
            let context = ContextObject::from_abi((*id).verbs);
            let note = |qp| QpObject::from_abi(qp).set_moved_by_program();
            context.objects().qps.find(number, note);
        }
    }
}

/// Returns -1, with errno set.
pub fn fail(errno: c_int) -> c_int {
    fail_errno(errno);
    -1
}

/// Returns 0, or -1 with errno set.
pub fn result_of(call: &str, result: Result<(), Error>) -> c_int {
    if errno_of(call, result) == 0 { 0 } else { -1 }
}
