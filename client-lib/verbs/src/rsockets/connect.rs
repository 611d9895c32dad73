//! Creating, binding, connecting and accepting rsockets.

use super::options::Options;
use super::socket::{
    Attempt, Connecting, EarlyConnection, Listening, Patience, Phase, Rsocket, RsocketState,
    add_to_descriptor, new_bell, new_descriptor, ring,
};
use super::stream::Stream;
use super::table;
use super::wire::ConnectionData;
use crate::rdmacm::devices::Devices;
use crate::status::log_failure;
use crate::waiting::Call;
use rustix::fd::{AsRawFd, OwnedFd};
use siw::{
    BindOptions, CmBinding, CmChannel, CmEvent, CmListener, ConnectOptions, ConnectionInfo,
    ConnectionRequest, Error, ListenOptions,
};
use std::collections::VecDeque;
use std::ffi::c_int;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

/// RDMA Reads that each side may have outstanding. rsockets use none, but one is needed to set up a
/// connection whose first message is a READ (RFC 6581 section 9).
const READS: u32 = 1;
/// Interval of looking for the own request at a listener of the same process.
const OWN_LISTENER_CHECK: Duration = Duration::from_millis(1);
/// Maximum number of connections accepted before raccept(3) is called.
const MAX_EARLY: usize = 16;
/// Linux's value for a backlog of 0 or less.
const DEFAULT_BACKLOG: u32 = 1024;

fn errno_of(call: &str, error: &Error) -> c_int {
    log_failure(call, error);
    error.errno().max(1)
}

fn open_devices() -> Result<&'static Devices, c_int> {
    Devices::open().map_err(|error| errno_of("rsocket", &error))
}

/// rsocket(3)
pub fn create_rsocket(domain: c_int, kind: c_int, protocol: c_int) -> Result<c_int, c_int> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    let is_known = matches!(domain, libc::AF_INET | libc::AF_INET6)
        && kind & !flags == libc::SOCK_STREAM
        && matches!(protocol, 0 | libc::IPPROTO_TCP);
    if !is_known {
        // Datagrams need unreliable queue pairs, which iWARP does not have.
        return Err(libc::ENOTSUP);
    }
    open_devices()?;
    let nonblocking = kind & libc::SOCK_NONBLOCK != 0;
    let socket = Rsocket::new(Phase::New, domain, Options::default(), nonblocking);
    Ok(table::insert(new_descriptor()?, Arc::new(socket)))
}

/// Checks whether connections to the address go over siwd; with `own`, whether it is an address of
/// siwd.
pub fn is_reachable(addr: SocketAddr, own: bool) -> bool {
    let ip = addr.ip();
    if ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() {
        return false;
    }
    let Ok(devices) = Devices::open() else {
        return false;
    };
    if own {
        return devices.has_address(ip);
    }
    devices.client.resolve_address(addr, None, None).is_ok()
}

/// The wildcard address of a family.
pub fn any_address(family: c_int) -> SocketAddr {
    if family == libc::AF_INET6 {
        (Ipv6Addr::UNSPECIFIED, 0).into()
    } else {
        (Ipv4Addr::UNSPECIFIED, 0).into()
    }
}

impl RsocketState {
    /// rbind(3)
    pub fn bind(&mut self, addr: SocketAddr) -> Result<(), c_int> {
        if !matches!(self.phase, Phase::New) {
            return Err(libc::EINVAL);
        }
        let options = BindOptions {
            device: None,
            reuse: self.options.reuse(),
            v6_only: self.options.v6_only(),
            datagrams: false,
        };
        let binding = CmBinding::new(&open_devices()?.client, addr, &options)
            .map_err(|error| errno_of("rbind", &error))?;
        self.local = Some(binding.local_addr());
        self.phase = Phase::Bound(binding);
        Ok(())
    }

    /// rlisten(3)
    pub fn listen(&mut self, descriptor: c_int, backlog: c_int) -> Result<(), c_int> {
        match self.phase {
            Phase::Listening(_) => return Ok(()),
            Phase::New => self.bind(any_address(self.family))?,
            Phase::Bound(_) => {}
            _ => return Err(libc::EINVAL),
        }
        let channel =
            CmChannel::new(&open_devices()?.client).map_err(|error| errno_of("rlisten", &error))?;
        let Phase::Bound(binding) = std::mem::replace(&mut self.phase, Phase::New) else {
            return Err(libc::EINVAL);
        };
        let backlog = u32::try_from(backlog).ok().filter(|backlog| *backlog > 0);
        let options = ListenOptions {
            backlog: backlog.unwrap_or(DEFAULT_BACKLOG),
            ..ListenOptions::default()
        };
        match CmListener::from_binding(&channel, binding, &options) {
            Ok(listener) => {
                let bell = new_bell()?;
                add_to_descriptor(table::borrow(descriptor), &channel)?;
                add_to_descriptor(table::borrow(descriptor), &*bell)?;
                self.local = Some(listener.local_addr());
                self.phase = Phase::Listening(Listening {
                    _listener: listener,
                    channel: Arc::new(channel),
                    requests: VecDeque::new(),
                    early: VecDeque::new(),
                    kernel: None,
                    bell,
                    error: 0,
                    is_channel_watched: true,
                });
                Ok(())
            }
            Err(failed) => {
                self.phase = Phase::Bound(failed.object);
                Err(errno_of("rlisten", &failed.error))
            }
        }
    }

    /// Starts rconnect(3).
    fn start_connect(&mut self, descriptor: c_int, to: SocketAddr) -> Result<(), c_int> {
        match &self.phase {
            // After a failure that was reported, a connect begins anew (connect(2)).
            Phase::New | Phase::Bound(_) | Phase::Failed => {}
            Phase::Connecting(_) => return Err(libc::EALREADY),
            Phase::Stream(_) | Phase::Listening(_) => return Err(libc::EISCONN),
        }
        self.is_connect_reported = false;
        let connecting = self
            .new_connecting(to)
            .map_err(|error| errno_of("rconnect", &error))?;
        add_to_descriptor(table::borrow(descriptor), &*connecting.channel)?;
        add_to_descriptor(table::borrow(descriptor), &*connecting.stream.channel)?;
        self.peer = Some(to);
        // A bound port stays reserved until the connection has it.
        self.phase = Phase::Connecting(connecting);
        Ok(())
    }

    fn new_connecting(&mut self, to: SocketAddr) -> Result<Connecting, Error> {
        let devices = Devices::open()?;
        let wanted = self.local.filter(|local| !local.ip().is_unspecified());
        let found = devices.client.resolve_address(to, wanted, None)?;
        let mut local = found.local;
        if let Some(bound) = self.local {
            local.set_port(bound.port());
        }
        let channel = CmChannel::new(&devices.client)?;
        let stream = Stream::new(devices, &self.options.sizes)?;
        let data = stream.connection_data().encode();
        let options = ConnectOptions {
            device: Some(found.device),
            src: Some(local),
            private_data: &data,
            ord: READS,
            ird: READS,
            ..ConnectOptions::default()
        };
        let bell = new_bell().map_err(std::io::Error::from_raw_os_error)?;
        stream.qp.connect(&channel, to, &options)?;
        Ok(Connecting {
            stream,
            channel: Arc::new(channel),
            bell,
        })
    }

    /// Processes the answer to a connect, if it has arrived.
    pub fn progress_connect(&mut self) {
        let Phase::Connecting(connecting) = &self.phase else {
            return;
        };
        let event = match connecting.channel.get_event(Some(Duration::ZERO)) {
            Ok(event) => event,
            Err(Error::Timeout) => return,
            Err(error) => return self.fail_connect(errno_of("rconnect", &error)),
        };
        match event {
            CmEvent::Established(info) => self.on_established(&info),
            CmEvent::Rejected(info)
            | CmEvent::Unreachable(info)
            | CmEvent::ConnectError(info)
            | CmEvent::Disconnected(info) => {
                log_failure("rconnect", &info.reason);
                self.fail_connect(info.errno.max(1));
            }
            CmEvent::ConnectRequest(_)
            | CmEvent::RequestCancelled { .. }
            | CmEvent::DeviceRemoval { .. } => {}
        }
    }

    fn on_established(&mut self, info: &ConnectionInfo) {
        let Some(peer) = ConnectionData::decode(&info.private_data) else {
            log_failure("rconnect", &"the peer is not an rsocket");
            return self.fail_connect(libc::EPROTO);
        };
        let Phase::Connecting(connecting) = std::mem::replace(&mut self.phase, Phase::Failed)
        else {
            return;
        };
        self.local = info.local.or(self.local);
        self.peer = info.peer.or(self.peer);
        ring(&connecting.bell);
        let mut stream = connecting.stream;
        stream.open(&peer);
        stream.progress();
        self.phase = Phase::Stream(stream);
    }

    fn fail_connect(&mut self, errno: c_int) {
        if let Phase::Connecting(connecting) = &self.phase {
            ring(&connecting.bell);
        }
        self.phase = Phase::Failed;
        self.error = errno;
    }
}

impl Rsocket {
    /// Adds a listener of the kernel, whose connections this one accepts too.
    pub fn join(&self, descriptor: c_int, kernel: OwnedFd) -> Result<(), c_int> {
        let mut state = self.lock();
        let Phase::Listening(listening) = &mut state.phase else {
            return Err(libc::EINVAL);
        };
        let io_error = rustix::io::Errno::raw_os_error;
        let kernel = siw::to_high(kernel);
        rustix::io::ioctl_fionbio(&kernel, true).map_err(io_error)?;
        add_to_descriptor(table::borrow(descriptor), &kernel)?;
        listening.kernel = Some(Arc::new(kernel));
        Ok(())
    }

    /// rconnect(3). A connect that a signal ends continues, and a second call waits for it, as with
    /// connect(2).
    pub fn connect(
        self: &Arc<Self>,
        call: &mut Call,
        descriptor: c_int,
        to: SocketAddr,
    ) -> Result<(), c_int> {
        let mut state = self.lock();
        state.progress();
        let is_second = match state.phase {
            Phase::Connecting(_) => true,
            Phase::Failed => state.error != 0,
            // The first call after a connection is complete reports that, the next ones EISCONN.
            Phase::Stream(_) => !state.is_connect_reported,
            _ => false,
        };
        if !is_second {
            state.start_connect(descriptor, to)?;
        }
        drop(state);
        if matches!(self.patience(0, None), Patience::None) {
            let mut state = self.lock();
            state.progress();
            return match &state.phase {
                Phase::Connecting(_) if is_second => Err(libc::EALREADY),
                Phase::Connecting(_) => Err(libc::EINPROGRESS),
                _ => connect_outcome(&mut state),
            };
        }
        let listener = find_own_listener(to);
        if let Some(listener) = &listener
            && call.has_timed_out()
        {
            // A thread that connects to its own listener cannot accept meanwhile.
            listener.accept_early();
        }
        let patience = match listener {
            Some(_) => Patience::Interval(OWN_LISTENER_CHECK),
            None => Patience::Unlimited,
        };
        self.attempt(call, patience, |state| match &state.phase {
            Phase::Connecting(_) => Attempt::Wait,
            _ => Attempt::Done(connect_outcome(state)),
        })?
    }

    /// Accepts a pending connection for a later raccept(3), unless a thread waits to do that.
    ///
    /// The lock is held until the connection is queued: a thread that looks for one meanwhile would
    /// find neither the request nor the connection, and no event would wake it.
    fn accept_early(&self) {
        let mut state = self.lock();
        if self.is_awaited(&state) {
            return;
        }
        state.progress();
        let options = state.options.clone();
        let Phase::Listening(listening) = &mut state.phase else {
            return;
        };
        if listening.early.len() >= MAX_EARLY {
            return;
        }
        let Some(request) = listening.requests.pop_front() else {
            return;
        };
        match accept_request(request, &listening.channel, &options) {
            Ok(connection) => {
                listening.early.push_back(connection);
                drop(state);
                self.watchers.wake();
            }
            Err(NotAccepted { request, error }) => {
                log_failure("raccept", &error);
                listening.requests.extend(request);
            }
        }
    }

    /// Returns a request to the queue of the listener; returns the error of accept(2).
    fn put_back(&self, failed: NotAccepted) -> c_int {
        if let Phase::Listening(listening) = &mut self.lock().phase
            && let Some(request) = failed.request
        {
            listening.requests.push_front(request);
        }
        accept_error(errno_of("raccept", &failed.error))
    }

    /// raccept(3): returns a new socket with its descriptor. Without an address it is a socket of
    /// the kernel.
    pub fn accept(
        self: &Arc<Self>,
        call: &mut Call,
        flags: c_int,
    ) -> Result<(c_int, Option<SocketAddr>), c_int> {
        if flags & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) != 0 {
            return Err(libc::EINVAL);
        }
        let patience = self.patience(0, None);
        let accepted = self.attempt(call, patience, |state| match &mut state.phase {
            Phase::Listening(listening) => listening.accept(flags),
            _ => Attempt::Done(Err(libc::EINVAL)),
        })?;
        let (options, family) = {
            let state = self.lock();
            self.pass_requests_on(&state);
            (state.options.clone(), state.family)
        };
        let (descriptor, connection) = match accepted? {
            Accepted::Request(descriptor, request, channel) => {
                let accepted = accept_request(request, &channel, &options);
                let connection = accepted.map_err(|failed| self.put_back(failed))?;
                (descriptor, connection)
            }
            Accepted::BeforeAccept(descriptor, connection) => (descriptor, connection),
            Accepted::Kernel(fd) => return Ok((fd, None)),
        };
        let EarlyConnection {
            stream,
            local,
            peer,
        } = connection;
        add_to_descriptor(&descriptor, &*stream.channel)?;
        let nonblocking = flags & libc::SOCK_NONBLOCK != 0;
        let socket = Rsocket::new(Phase::Stream(stream), family, options, nonblocking);
        {
            let mut state = socket.lock();
            (state.local, state.peer) = (local, peer);
            state.is_connect_reported = true;
        }
        Ok((table::insert(descriptor, Arc::new(socket)), peer))
    }
}

fn connect_outcome(state: &mut RsocketState) -> Result<(), c_int> {
    match &state.phase {
        Phase::Stream(_) => {
            state.is_connect_reported = true;
            Ok(())
        }
        _ => Err(match state.take_error() {
            0 => libc::ECONNABORTED,
            errno => errno,
        }),
    }
}

/// A request that could not be accepted.
struct NotAccepted {
    /// It is pending still.
    request: Option<ConnectionRequest>,
    error: Error,
}

/// Accepts a connection. Its events go to the channel of the listener, which ignores them:
/// completions show the state of a stream. A connection whose peer has left reads as ended, as one of
/// the kernel does.
fn accept_request(
    request: ConnectionRequest,
    channel: &CmChannel,
    options: &Options,
) -> Result<EarlyConnection, NotAccepted> {
    let info = request.connection_info();
    let (local, peer) = (info.local, info.peer);
    let Some(data) = ConnectionData::decode(&info.private_data) else {
        let error = Error::Refused {
            errno: libc::ECONNABORTED,
            reason: "rejected a peer that is not an rsocket".into(),
        };
        let request = None;
        return Err(NotAccepted { request, error });
    };
    let stream = Devices::open().and_then(|devices| Stream::new(devices, &options.sizes));
    let mut stream = match stream {
        Ok(stream) => stream,
        Err(error) => {
            let request = Some(request);
            return Err(NotAccepted { request, error });
        }
    };
    let answer_data = stream.connection_data().encode();
    let answer = ConnectOptions {
        private_data: &answer_data,
        ord: READS,
        ird: READS,
        ..ConnectOptions::default()
    };
    match request.accept(&stream.qp, Some(channel), &answer) {
        Ok(()) => {
            stream.open(&data);
            stream.progress();
        }
        // The request was cancelled.
        Err(failed) if failed.error.errno() == libc::ENOENT => {}
        Err(failed) => {
            // A lack of resources ends.
            let ends = accept_error(failed.error.errno()) != libc::ECONNABORTED;
            let (request, error) = (ends.then_some(failed.object), failed.error);
            return Err(NotAccepted { request, error });
        }
    }
    Ok(EarlyConnection {
        stream,
        local,
        peer,
    })
}

/// Errors of accept(2) for those of the daemon. Programs end on others.
fn accept_error(errno: c_int) -> c_int {
    match errno {
        libc::ECONNABORTED | libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM => errno,
        libc::EPERM | libc::EPROTO => errno,
        // Limits of the daemon.
        libc::EDQUOT | libc::ENOSPC | libc::EAGAIN => libc::ENOBUFS,
        _ => libc::ECONNABORTED,
    }
}

/// Finds a listener of this process at the address.
fn find_own_listener(to: SocketAddr) -> Option<Arc<Rsocket>> {
    let is_there = |local: SocketAddr| {
        local.port() == to.port() && (local.ip().is_unspecified() || local.ip() == to.ip())
    };
    table::all().into_iter().find(|socket| {
        let state = socket.lock();
        matches!(state.phase, Phase::Listening(_)) && state.local.is_some_and(is_there)
    })
}

/// An accepted connection, with the descriptor of its rsocket.
enum Accepted {
    BeforeAccept(OwnedFd, EarlyConnection),
    Request(OwnedFd, ConnectionRequest, Arc<CmChannel>),
    /// A connection of the kernel's listener that was added by `join`.
    Kernel(c_int),
}

impl Listening {
    fn accept(&mut self, flags: c_int) -> Attempt<Result<Accepted, c_int>> {
        if !(self.early.is_empty() && self.requests.is_empty()) {
            // Before the connection is taken: after EMFILE it is pending still.
            let descriptor = match new_descriptor() {
                Ok(descriptor) => descriptor,
                Err(errno) => return Attempt::Done(Err(errno)),
            };
            if let Some(connection) = self.early.pop_front() {
                return Attempt::Done(Ok(Accepted::BeforeAccept(descriptor, connection)));
            }
            if let Some(request) = self.requests.pop_front() {
                let channel = self.channel.clone();
                return Attempt::Done(Ok(Accepted::Request(descriptor, request, channel)));
            }
        }
        let Some(kernel) = &self.kernel else {
            return match self.error {
                0 => Attempt::Wait,
                errno => Attempt::Done(Err(errno)),
            };
        };
        let (fd, null) = (kernel.as_raw_fd(), std::ptr::null_mut::<libc::sockaddr>());
        // SAFETY: a non-blocking listener; no address is requested.
        let accepted = unsafe { libc::syscall(libc::SYS_accept4, fd, null, null, flags) };
        match c_int::try_from(accepted) {
            Ok(accepted) if accepted >= 0 => Attempt::Done(Ok(Accepted::Kernel(accepted))),
            _ => match std::io::Error::last_os_error().raw_os_error() {
                Some(libc::EAGAIN) | None => Attempt::Wait,
                Some(errno) => Attempt::Done(Err(errno)),
            },
        }
    }

    /// Takes requests from the channel until one is queued; its descriptor shows whether there are
    /// more.
    pub fn take_requests(&mut self) {
        while self.requests.is_empty() && self.error == 0 {
            match self.channel.get_event(Some(Duration::ZERO)) {
                Ok(CmEvent::ConnectRequest(request)) => self.requests.push_back(request),
                Ok(CmEvent::RequestCancelled { request: number }) => {
                    self.requests.retain(|request| request.id() != number);
                }
                Ok(_) => {}
                Err(Error::Timeout) => return,
                Err(error) => self.error = errno_of("raccept", &error),
            }
        }
    }
}
