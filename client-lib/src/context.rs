//! The connection to the daemon: control calls, devices, doorbells, liveness of the daemon,
//! asynchronous events. Every other object holds an `Arc` of it.

use crate::Error;
use crate::app_memory::fork::watch_forks;
use crate::app_memory::process::process_generation;
use crate::app_memory::state::AppMemory;
use crate::arena_pool::ArenaPool;
use crate::deadline::Deadline;
use crate::high_descriptors::{KeptDescriptor, dup_high, to_high};
use crate::locking::ProcessMutex;
use crate::releaser::Releaser;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use siw_shm::control::{
    self, ClientHello, ControlSocket, DeviceReply, HelloReply, Limits, ListObjects, ListPosition,
    LoadFaults, MIN_VERSION, Message, ObjectList, Operate, OperatorAction, PLAN_PART, PORT_ACTIVE,
    ProtoError, QUERY_WATCH, QueryDevice, QueueRef, ReadStats, RecvError, StartCapture, StartTrace,
    VERSION,
};
use siw_shm::device_identity::{GidTable, RawGid, gid_of_ip, gid_of_mac};
use siw_shm::doorbell::{WORKER_LINE, ring_len, ring_offset};
use siw_shm::persona::Persona;
use siw_shm::{DoorbellProducer, SharedMemory, WorkerPageView};
use std::collections::{HashMap, VecDeque};
use std::io::ErrorKind;
use std::net::IpAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// A client of one daemon. Clones share the connection.
#[derive(Clone)]
pub struct Context(pub(crate) Arc<ClientInner>);

pub(crate) struct ClientInner {
    /// Serialises request and reply. Never taken while holding a spin lock: a call may last as long
    /// as [`CALL_TIMEOUT`].
    calls: ProcessMutex<Calls>,
    /// Requests without a reply that the control socket had no room for yet, oldest first. Held for
    /// moments only.
    outbox: ProcessMutex<VecDeque<Vec<u8>>>,
    /// Completion queues of destroyed queue pairs that were not idle, by the number of the queue pair.
    stale_completions: ProcessMutex<HashMap<u32, Vec<Weak<dyn StaleCompletions>>>>,
    conn: KeptDescriptor<ControlSocket>,
    hello: HelloReply,
    page: WorkerPageView,
    workers: Vec<(DoorbellProducer, KeptDescriptor)>,
    async_events: KeptDescriptor<ControlSocket>,
    alive: AtomicBool,
    waits_in_destructors: AtomicBool,
    hides_descriptors: bool,
    opened: Instant,
    /// Time of the last check of the control socket while polling, in microseconds since `opened`.
    checked_at: AtomicU64,
    /// Generation of the process that opened it: calls of a child would interleave with those of
    /// its parent.
    generation: u32,
    /// Registered memory of the application.
    pub(crate) app_memory: AppMemory,
    /// Its arenas.
    pub(crate) arena_pool: ArenaPool,
    /// Destructors that wait for the daemon.
    pub(crate) releaser: Releaser,
}

/// A completion queue, as its context sees it.
pub(crate) trait StaleCompletions: Send + Sync {
    /// Discards the completions of a queue pair that was destroyed.
    fn discard_of(&self, qp_num: u32);
}

/// State that has to change together with the requests that the daemon has answered.
struct Calls {
    /// Sequence number of the last request.
    seq: u32,
    /// Queue memory by the daemon's number: the descriptor comes with the first reply that names
    /// it.
    regions: HashMap<u32, Arc<SharedMemory>>,
}

/// Time within which the daemon has to answer a call; see [`Context::set_call_timeout`].
pub const CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// A device of the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Index among the devices of the daemon, from 0.
    pub index: u32,
    /// Name in the configuration.
    pub name: String,
    /// DPDK driver.
    pub driver: String,
    /// Ethernet address.
    pub mac: [u8; 6],
    /// IP addresses of the device.
    pub ips: Vec<IpAddr>,
    /// MTU: bytes of the longest IP packet.
    pub mtu: u32,
    /// Speed of the link in Mb/s; 0 when unknown.
    pub link_mbps: u32,
    /// The link is up.
    pub active: bool,
    /// FPDUs have CRCs by default.
    pub crc: bool,
    /// Highest MPA revision.
    pub mpa_rev: u8,
    /// `CAP_` bits of [`siw_shm::control`]: capabilities beyond WRITE, READ and SEND.
    pub capabilities: u64,
    /// Kind of device that the drop-in libibverbs shows to programs by default.
    pub persona: Persona,
}

/// Asynchronous event of an object or of the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AsyncEvent {
    /// None for an event kind that only newer daemons know.
    pub kind: Option<control::AsyncEventKind>,
    /// QP number, CQ id or device index.
    pub object: u32,
    /// Human-readable description.
    pub reason: String,
}

impl Context {
    /// Connects to the daemon: at `socket`, else $SIWD_SOCKET, else
    /// $XDG_RUNTIME_DIR/siwd/siwd.sock if an ordinary user has that socket, else
    /// /run/siwd/siwd.sock.
    pub fn open(socket: Option<&Path>) -> Result<Context, Error> {
        Self::open_with_timeout(socket, CALL_TIMEOUT)
    }

    /// As [`Self::open`], with another timeout than [`CALL_TIMEOUT`], also for connecting; see
    /// [`Self::set_call_timeout`].
    pub fn open_with_timeout(socket: Option<&Path>, timeout: Duration) -> Result<Context, Error> {
        let path = control::socket_path(socket).map_err(|foreign| Error::Open {
            path: foreign.path.display().to_string(),
            source: std::io::Error::new(ErrorKind::PermissionDenied, foreign),
        })?;
        let conn = ControlSocket::connect_within(&path, timeout).map_err(|source| Error::Open {
            path: path.display().to_string(),
            source,
        })?;
        Self::from_conn(conn)
    }

    /// Opens a context over a connected socket.
    pub fn from_conn(conn: ControlSocket) -> Result<Context, Error> {
        let name = std::env::args_os().next().unwrap_or_default();
        let name = Path::new(&name)
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        watch_forks();
        let conn = match dup_high(conn.as_fd()) {
            Some(fd) => ControlSocket::from(fd),
            None => conn,
        };
        let hello = ClientHello::new(&name);
        // Sent as a packet of the oldest version, which every supported daemon can read.
        conn.set_version(MIN_VERSION);
        let (hello, fds) = conn.call_and_wait(1, &hello, &[])?;
        let agreed = u16::try_from(hello.version).unwrap_or(u16::MAX);
        if !(MIN_VERSION..=VERSION).contains(&agreed) {
            return Err(ProtoError::Version { theirs: agreed }.into());
        }
        conn.set_version(agreed);
        let worker_count = hello.n_workers;
        if worker_count == 0 || worker_count > 64 || fds.len() != worker_count as usize + 3 {
            return Err(ProtoError::MissingFd.into());
        }
        let mut fds = fds.into_iter();
        let mut next = || fds.next().ok_or(Error::Proto(ProtoError::MissingFd));
        let page = SharedMemory::map_read_only(next()?, worker_count as usize * WORKER_LINE)?;
        let capacity = hello.doorbell_capacity;
        if !capacity.is_power_of_two() || capacity > siw_shm::doorbell::MAX_CAPACITY {
            return Err(Error::Invalid(
                "siwd announced a doorbell ring whose size is not a power of two",
            ));
        }
        let bells = SharedMemory::map_fd(next()?, worker_count as usize * ring_len(capacity))?;
        let bells = Arc::new(bells.without_descriptor());
        let async_events = ControlSocket::from(next()?);
        async_events.set_nonblocking(false)?;
        let mut workers = Vec::with_capacity(worker_count as usize);
        for worker in 0..worker_count {
            let bell =
                DoorbellProducer::new(bells.clone(), ring_offset(worker, capacity), capacity)?;
            workers.push((bell, KeptDescriptor::at_high_number(next()?)?));
        }
        Ok(Context(Arc::new(ClientInner {
            calls: ProcessMutex::new(Calls {
                seq: 1,
                regions: HashMap::new(),
            }),
            stale_completions: ProcessMutex::new(HashMap::new()),
            outbox: ProcessMutex::new(VecDeque::new()),
            conn: KeptDescriptor::new(conn)?,
            hello,
            page: WorkerPageView::new(Arc::new(page.without_descriptor()), worker_count)?,
            workers,
            async_events: KeptDescriptor::new(async_events)?,
            alive: AtomicBool::new(true),
            waits_in_destructors: AtomicBool::new(false),
            hides_descriptors: false,
            opened: Instant::now(),
            checked_at: AtomicU64::new(0),
            generation: process_generation(),
            app_memory: AppMemory::default(),
            arena_pool: ArenaPool::default(),
            releaser: Releaser::default(),
        })))
    }

    /// Sets the time within which the daemon has to answer a call, [`CALL_TIMEOUT`] by default. A
    /// call that takes longer fails with [`Error::Timeout`] and ends the context, because it is unknown
    /// whether the daemon has carried out the request. All further calls return
    /// [`Error::DaemonGone`] at once, and the daemon frees the objects of this client.
    pub fn set_call_timeout(&self, timeout: Duration) -> Result<(), Error> {
        Ok(self.0.conn.set_call_timeout(timeout)?)
    }

    /// Makes destructors wait for the daemon from now on, as the functions of libibverbs do: what they
    /// free is free, and cannot be accessed by peers, when they return.
    #[doc(hidden)]
    pub fn wait_in_destructors(&self) {
        self.0.waits_in_destructors.store(true, Ordering::Relaxed);
    }

    /// Moves the descriptors of events to numbers that programs do not use: the drop-in libraries give
    /// programs others. For a context that has no objects yet.
    #[doc(hidden)]
    pub fn hide_descriptors(&mut self) {
        let Some(inner) = Arc::get_mut(&mut self.0) else {
            return;
        };
        inner.hides_descriptors = true;
        if let Some(high) = dup_high(inner.async_events.as_fd()) {
            let events = ControlSocket::from(high);
            events.set_version(inner.async_events.agreed_version());
            if let Ok(events) = KeptDescriptor::new(events) {
                inner.async_events = events;
            }
        }
    }

    /// Limits of this client.
    pub fn limits(&self) -> Limits {
        self.0.hello.limits
    }

    /// Version of the control protocol that this library and the daemon agreed on.
    pub fn protocol_version(&self) -> u32 {
        self.0.hello.version
    }

    /// Name and version of the daemon.
    pub fn daemon_version(&self) -> String {
        self.0.hello.daemon.to_text()
    }

    /// Queries all devices that the daemon had when this context was opened, without those that an operator
    /// has removed.
    pub fn query_devices(&self) -> Result<Vec<DeviceInfo>, Error> {
        let mut devices = Vec::new();
        // Devices that were added after this connection was made have the following indices.
        for index in 0.. {
            let device = match self.0.call_daemon(&QueryDevice { index, flags: 0 }) {
                Ok((device, _)) => device,
                Err(Error::Refused { errno, .. })
                    if errno == libc::ENODEV && index >= self.0.hello.n_devices =>
                {
                    break;
                }
                Err(error) => return Err(error),
            };
            if device.is_deleted == 0 {
                devices.push(DeviceInfo::from(&device));
            }
        }
        Ok(devices)
    }

    /// Queries a device by index.
    pub fn query_device(&self, index: u32) -> Result<DeviceInfo, Error> {
        let (device, _) = self.0.call_daemon(&QueryDevice { index, flags: 0 })?;
        Ok(DeviceInfo::from(&device))
    }

    /// As [`Self::query_device`]; from now on the context gets no asynchronous events of other devices. An
    /// older daemon sends them all the same.
    pub fn watch_device(&self, index: u32) -> Result<DeviceInfo, Error> {
        let (device, _) = self.0.call_daemon(&QueryDevice {
            index,
            flags: QUERY_WATCH,
        })?;
        Ok(DeviceInfo::from(&device))
    }

    /// GIDs of a device by index (ibv_query_gid(3)). An entry keeps its index as long as the device has the
    /// address; `None` is a hole that a removed address has left.
    pub fn query_gids(&self, index: u32) -> Result<Vec<Option<RawGid>>, Error> {
        let (device, _) = self.0.call_daemon(&QueryDevice { index, flags: 0 })?;
        Ok(gid_table(&device).entries().to_vec())
    }

    /// Finds a device by name.
    pub fn device_by_name(&self, name: &str) -> Result<DeviceInfo, Error> {
        self.query_devices()?
            .into_iter()
            .find(|device| device.name == name)
            .ok_or(Error::Invalid("siwd has no device of that name"))
    }

    pub(crate) fn is_known_alive(&self) -> bool {
        self.0.known_alive()
    }

    /// Checks the control socket; false when the daemon has ended.
    pub fn is_alive(&self) -> bool {
        self.0.check_alive()
    }

    /// Checks that this process opened it: a child of fork(2) shares the descriptors with its parent,
    /// but none of its calls succeeds.
    pub fn is_of_this_process(&self) -> bool {
        self.0.check_process().is_ok()
    }

    /// Descriptor that becomes readable with asynchronous events and when the daemon ends.
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        self.0.async_events.as_fd()
    }

    /// Waits for the next asynchronous event; [`Error::Timeout`] when none comes in time,
    /// [`Error::DaemonGone`] after the last one.
    pub fn get_async_event(&self, timeout: Option<Duration>) -> Result<AsyncEvent, Error> {
        let packet = self.0.recv_event(&self.0.async_events, timeout)?;
        let error: control::AsyncEventMessage =
            control::decode_event(control::KIND_ASYNC_EVENT, &packet)?;
        Ok(AsyncEvent {
            kind: control::AsyncEventKind::from_u32(error.kind),
            object: error.object,
            reason: error.reason.to_text(),
        })
    }

    /// Waits until the daemon has freed the objects that were dropped so far: destructors do not wait.
    /// Peers cannot access dropped regions any more when it returns.
    pub fn await_releases(&self) -> Result<(), Error> {
        self.0.releaser.finish();
        self.0.confirm_posted()
    }

    /// The daemon's statistics as JSON.
    pub fn read_stats(&self) -> Result<String, Error> {
        let mut text = Vec::new();
        loop {
            let (reply, _) = self.0.call_daemon(&ReadStats {
                offset: text.len() as u32,
                reserved: 0,
            })?;
            let n = (reply.len as usize).min(reply.text.len());
            text.extend_from_slice(&reply.text[..n]);
            if n == 0 || text.len() >= reply.total as usize {
                return Ok(String::from_utf8_lossy(&text).into_owned());
            }
        }
    }

    /// Reads a list of the daemon's objects: one JSON object on each line. Operators get the objects of
    /// all clients, others those of their own user. Objects that are made or destroyed meanwhile may be
    /// missing.
    pub fn list_objects(&self, list: ObjectList) -> Result<String, Error> {
        self.list_objects_after(list, &mut ListPosition::default())
    }

    /// Reads the part of a list after a position, and moves the position to its end: the next call reads
    /// later entries, as of the list of ends.
    pub fn list_objects_after(
        &self,
        list: ObjectList,
        position: &mut ListPosition,
    ) -> Result<String, Error> {
        let mut text = Vec::new();
        let mut request = ListObjects {
            list: list as u32,
            reserved: 0,
            after: *position,
        };
        loop {
            let (reply, _) = self.0.call_daemon(&request)?;
            let len = (reply.len as usize).min(reply.text.len());
            text.extend_from_slice(&reply.text[..len]);
            *position = reply.next;
            if reply.is_last != 0 {
                return Ok(String::from_utf8_lossy(&text).into_owned());
            }
            request.after = reply.next;
        }
    }

    /// Moves a queue pair of any client of the same user, or for an operator of any user, to ERROR and
    /// resets its connection.
    ///
    /// # Errors
    /// There is no such queue pair, or it is not connected.
    pub fn end_queue_pair(&self, qp_num: u32) -> Result<(), Error> {
        self.operate(OperatorAction::EndQueuePair, qp_num.into(), "")
            .map(drop)
    }

    /// Disconnects a client of the same user, or for an operator of any user, with all its objects.
    ///
    /// # Errors
    /// There is no such client.
    pub fn end_client(&self, client: u64) -> Result<(), Error> {
        self.operate(OperatorAction::EndClient, client, "")
            .map(drop)
    }

    /// Replaces the filter of the daemon's log, such as `info` or `siwd=debug`.
    ///
    /// # Errors
    /// The filter is invalid, or the caller is not an operator.
    pub fn set_log_filter(&self, filter: &str) -> Result<(), Error> {
        self.operate(OperatorAction::SetLogFilter, 0, filter)
            .map(drop)
    }

    /// Has the daemon read its configuration again, and returns the outcome as JSON: the settings
    /// `applied` and those that need a `restart`, or the `error` because of which nothing has changed.
    ///
    /// # Errors
    /// The caller is not an operator.
    pub fn reload_configuration(&self) -> Result<String, Error> {
        self.operate(OperatorAction::Reload, 0, "")
    }

    /// Sets a limit of the configuration's table `[limits]` until the daemon's next reload or restart;
    /// `default`: its default. Returns the outcome as [`Context::reload_configuration`].
    ///
    /// # Errors
    /// The caller is not an operator, the limit does not exist or needs a restart, or the value is
    /// invalid.
    pub fn set_limit(&self, key: &str, value: &str) -> Result<String, Error> {
        self.operate(OperatorAction::SetLimit, 0, &format!("{key} {value}"))
    }

    /// Changes the routes of a device until the daemon's restart, in the words of ip-route(8):
    /// `add 10.80.0.0/16 via 10.77.0.254`, `del 10.80.0.0/16`, `flush`, `show` or `show FROM`. Returns the
    /// routes that operators have added as JSON: as many as fit into a reply, without the first FROM ones.
    ///
    /// # Errors
    /// The caller is not an operator, the device does not exist or follows the kernel's routes, or the
    /// route is invalid.
    pub fn change_routes(&self, device: u32, change: &str) -> Result<String, Error> {
        self.operate(OperatorAction::ChangeRoutes, device.into(), change)
    }

    /// Changes the addresses of a device until the daemon's restart, in the words of ip-address(8):
    /// `add 10.77.0.9/24`, `del 10.77.0.9`, `flush`, which removes those that were added, or `show`. Returns
    /// the addresses, as JSON.
    ///
    /// # Errors
    /// The caller is not an operator, the device does not exist or divides frames with the kernel by its
    /// addresses, the address is invalid, or a connection or listener uses it.
    pub fn change_addresses(&self, device: u32, change: &str) -> Result<String, Error> {
        self.operate(OperatorAction::ChangeAddresses, device.into(), change)
    }

    /// Sets or forgets the Ethernet addresses of a device's neighbours, in the words of ip-neighbour(8):
    /// `add 10.77.0.9 lladdr 02:00:00:00:00:09`, `del 10.77.0.9`, or `flush`.
    ///
    /// # Errors
    /// As [`Context::change_routes`].
    pub fn change_neighbours(&self, device: u32, change: &str) -> Result<(), Error> {
        self.operate(OperatorAction::ChangeNeighbours, device.into(), change)
            .map(drop)
    }

    /// Has the daemon read its configuration again, and open the device of this name: contexts that are
    /// opened from then on have it.
    ///
    /// # Errors
    /// The caller is not an operator, the device is not in the configuration or runs already, or it cannot
    /// be opened.
    pub fn add_device(&self, name: &str) -> Result<(), Error> {
        self.operate(OperatorAction::AddDevice, 0, name).map(drop)
    }

    /// Removes a device from the daemon. If processes use it, `force` ends its connections and reports
    /// DEVICE_FATAL.
    ///
    /// # Errors
    /// The caller is not an operator, the device does not exist, or processes use it.
    pub fn remove_device(&self, device: u32, force: bool) -> Result<(), Error> {
        let text = if force { control::FORCE } else { "" };
        self.operate(OperatorAction::RemoveDevice, device.into(), text)
            .map(drop)
    }

    /// Captures the frames that the request selects. Returns the number of the capture, and a stream of
    /// pcapng that ends with the capture, which ends with this context.
    ///
    /// # Errors
    /// The caller is not an operator, or the queue pair, client or device does not exist.
    pub fn start_capture(&self, request: &StartCapture) -> Result<(u32, OwnedFd), Error> {
        let (reply, fds) = self.0.call_daemon(request)?;
        let stream = fds.into_iter().next();
        Ok((reply.id, stream.ok_or(Error::Proto(ProtoError::MissingFd))?))
    }

    /// Traces the next frames and turns of queue pairs that the request selects. Returns the number of the
    /// trace, which [`Context::stop_capture`] ends, and a stream of lines of JSON.
    ///
    /// # Errors
    /// The caller is not an operator, another trace is running, or the queue pair, client or device does not
    /// exist.
    pub fn start_trace(&self, request: &StartTrace) -> Result<(u32, OwnedFd), Error> {
        let (reply, fds) = self.0.call_daemon(request)?;
        let stream = fds.into_iter().next();
        Ok((reply.id, stream.ok_or(Error::Proto(ProtoError::MissingFd))?))
    }

    /// Loads a fault plan into the daemon. `name`: its name there; `path`: its file, for messages; `seed`: in place
    /// of that of the plan. Returns the outcome as JSON, with an `error` if nothing was loaded.
    ///
    /// # Errors
    /// The caller is not an operator, or the text is longer than 32 KiB.
    pub fn load_faults(
        &self,
        name: &str,
        path: &str,
        text: &str,
        seed: Option<u64>,
    ) -> Result<String, Error> {
        let mut request = LoadFaults {
            total: u32::try_from(text.len()).unwrap_or(u32::MAX),
            offset: 0,
            len: 0,
            has_seed: seed.is_some().into(),
            seed: seed.unwrap_or(0),
            name: control::Text::new(name),
            path: control::Text::new(path),
            text: [0; PLAN_PART],
        };
        // An empty text is a part, too.
        let parts = text.as_bytes().chunks(PLAN_PART);
        let empty: &[u8] = &[];
        let parts = parts.chain(text.is_empty().then_some(empty));
        let mut outcome = String::new();
        for part in parts {
            request.len = part.len() as u32;
            request.text[..part.len()].copy_from_slice(part);
            let (reply, _) = self.0.call_daemon(&request)?;
            outcome = reply.read_text();
            request.offset += request.len;
        }
        Ok(outcome)
    }

    /// Ends a fault plan by its name, or without a name all of them. Returns the numbers of faults that they have
    /// injected, as JSON.
    ///
    /// # Errors
    /// The caller is not an operator, or there is no such plan.
    pub fn clear_faults(&self, name: &str) -> Result<String, Error> {
        self.operate(OperatorAction::ClearFaults, 0, name)
    }

    /// Ends a capture by its number, or with 0 all that were started so.
    ///
    /// # Errors
    /// The caller is not an operator, or there is no such capture.
    pub fn stop_capture(&self, number: u32) -> Result<(), Error> {
        self.operate(OperatorAction::StopCapture, number.into(), "")
            .map(drop)
    }

    /// Performs an action; returns its outcome.
    fn operate(&self, action: OperatorAction, target: u64, text: &str) -> Result<String, Error> {
        let request = Operate {
            action: action as u32,
            reserved: 0,
            target,
            text: control::Text::new(text),
        };
        let (reply, _) = self.0.call_daemon(&request)?;
        Ok(reply.read_text())
    }
}

impl From<&DeviceReply> for DeviceInfo {
    fn from(device: &DeviceReply) -> DeviceInfo {
        let ips = device.ips.iter().take(usize::from(device.n_ips));
        DeviceInfo {
            index: device.index,
            name: device.name.to_text(),
            driver: device.driver.to_text(),
            mac: device.mac,
            ips: ips
                .filter_map(|a| a.to_socket_addr())
                .map(|a| a.ip())
                .collect(),
            mtu: device.mtu,
            link_mbps: device.link_mbps,
            active: device.port_state == PORT_ACTIVE,
            crc: device.crc != 0,
            mpa_rev: device.mpa_rev,
            capabilities: device.caps,
            persona: Persona::from_number(device.persona),
        }
    }
}

/// The GIDs of a device; an older daemon reports no indices.
fn gid_table(device: &DeviceReply) -> GidTable {
    let addresses = device.ips.iter().take(usize::from(device.n_ips));
    let ips = addresses
        .filter_map(|addr| addr.to_socket_addr())
        .map(|addr| addr.ip());
    if device.mac_gid_index == 0 {
        return GidTable::new(device.mac, ips);
    }
    let mut table = GidTable::empty();
    for (ip, index) in ips.zip(device.gid_indices) {
        table.place(index, gid_of_ip(ip));
    }
    table.place(device.mac_gid_index, gid_of_mac(device.mac));
    table
}

/// Memory of a queue: received with this reply, or with an earlier one.
fn map_queue_memory(
    regions: &mut HashMap<u32, Arc<SharedMemory>>,
    place: &QueueRef,
    fds: Vec<OwnedFd>,
) -> Result<Arc<SharedMemory>, Error> {
    if place.fd == 0 {
        return Ok(regions
            .get(&place.region)
            .ok_or(ProtoError::MissingFd)?
            .clone());
    }
    let fd = fds.into_iter().next().ok_or(ProtoError::MissingFd)?;
    let len = usize::try_from(place.region_len).map_err(|_| ProtoError::MissingFd)?;
    let memory = Arc::new(SharedMemory::map_fd(fd, len)?.without_descriptor());
    if place.dedicated == 0 {
        regions.insert(place.region, memory.clone());
    }
    Ok(memory)
}

impl Drop for ClientInner {
    fn drop(&mut self) {
        if self.known_alive() && self.check_process().is_ok() {
            let descriptors = [self.conn.as_fd(), self.async_events.as_fd()];
            self.app_memory.keep_connection(descriptors);
        }
    }
}

impl ClientInner {
    /// Checks that the caller is the process that opened the context, not a child of it.
    ///
    /// # Errors
    /// [`Error::DaemonGone`] in a child: it has no connection to the daemon.
    pub(crate) fn check_process(&self) -> Result<(), Error> {
        if self.generation == process_generation() {
            Ok(())
        } else {
            Err(Error::DaemonGone)
        }
    }

    /// Checks that the number of the control socket is still that of the socket. A program may have closed
    /// it, or replaced it by a file of its own, which must not get a request.
    ///
    /// # Errors
    /// EBADF, once. The connection has ended.
    fn check_socket(&self) -> Result<(), Error> {
        if self.conn.is_open() {
            return Ok(());
        }
        self.alive.store(false, Ordering::Release);
        Err(rustix::io::Errno::BADF.into())
    }

    /// Places the descriptor of a new channel.
    pub(crate) fn place_channel(&self, fd: OwnedFd) -> OwnedFd {
        if self.hides_descriptors {
            to_high(fd)
        } else {
            fd
        }
    }

    /// Checks that an object belongs to this context: requests name objects by numbers, which another
    /// context uses for objects of its own.
    pub(crate) fn check_same(
        &self,
        owner: &ClientInner,
        object: &'static str,
    ) -> Result<(), Error> {
        if std::ptr::eq(self, owner) {
            Ok(())
        } else {
            Err(Error::OtherContext(object))
        }
    }

    /// Sends a request and waits for its reply.
    /// True if the daemon knows an optional feature, too.
    pub(crate) fn has_feature(&self, feature: u32) -> bool {
        self.hello.features & feature != 0
    }

    pub(crate) fn call_daemon<M: Message>(
        &self,
        message: &M,
    ) -> Result<(M::Reply, Vec<OwnedFd>), Error> {
        self.exchange(&mut *self.calls.lock()?, message)
    }

    /// As [`Self::call_daemon`], with a descriptor for the daemon.
    pub(crate) fn call_with_fd<M: Message>(
        &self,
        message: &M,
        fd: BorrowedFd<'_>,
    ) -> Result<M::Reply, Error> {
        let mut calls = self.calls.lock()?;
        let (reply, _) = self.exchange_fds(&mut calls, message, &[fd])?;
        Ok(reply)
    }

    fn exchange<M: Message>(
        &self,
        calls: &mut Calls,
        message: &M,
    ) -> Result<(M::Reply, Vec<OwnedFd>), Error> {
        self.exchange_fds(calls, message, &[])
    }

    fn exchange_fds<M: Message>(
        &self,
        calls: &mut Calls,
        message: &M,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(M::Reply, Vec<OwnedFd>), Error> {
        if !self.alive.load(Ordering::Relaxed) {
            return Err(Error::DaemonGone);
        }
        self.check_socket()?;
        // The daemon has carried out what was posted before this request when it answers.
        let retired = self.arena_pool.unconfirmed();
        calls.seq = calls.seq.wrapping_add(1).max(1);
        let reply = self.send_outbox().and_then(|()| {
            let reply = self.conn.call_and_wait(calls.seq, message, fds);
            Ok(reply?)
        });
        if matches!(reply, Ok(_) | Err(Error::Refused { .. })) {
            self.arena_pool.confirm(retired);
        } else {
            // After any error except a refusal, replies and requests may be out of step.
            self.give_up_daemon();
        }
        reply
    }

    /// Sends a request that creates a queue. `install` maps it before any other call: a later reply
    /// may name the same memory without a descriptor, and the queue's number has to be known when
    /// its first completion comes. If `install` fails, `undo` gives the request that destroys the
    /// queue.
    pub(crate) fn create_queue<M: Message, T, U: Message>(
        &self,
        message: &M,
        place: impl FnOnce(&M::Reply) -> QueueRef,
        install: impl FnOnce(&M::Reply, Arc<SharedMemory>) -> Result<T, Error>,
        undo: impl FnOnce(&M::Reply) -> U,
    ) -> Result<(M::Reply, T), Error> {
        let mut calls = self.calls.lock()?;
        let (reply, fds) = self.exchange(&mut calls, message)?;
        let installed = map_queue_memory(&mut calls.regions, &place(&reply), fds)
            .and_then(|memory| install(&reply, memory));
        match installed {
            Ok(queue) => Ok((reply, queue)),
            Err(error) => {
                // The first error is the one to report.
                let _ = self.exchange(&mut calls, &undo(&reply));
                Err(error)
            }
        }
    }

    /// Sends a request that replaces the memory of a queue.
    pub(crate) fn replace_queue<M: Message, T>(
        &self,
        message: &M,
        place: impl FnOnce(&M::Reply) -> QueueRef,
        install: impl FnOnce(&M::Reply, Arc<SharedMemory>) -> Result<T, Error>,
    ) -> Result<(M::Reply, T), Error> {
        let mut calls = self.calls.lock()?;
        let (reply, fds) = self.exchange(&mut calls, message)?;
        let installed = map_queue_memory(&mut calls.regions, &place(&reply), fds)
            .and_then(|memory| install(&reply, memory));
        // The daemon uses memory that this process cannot reach, and this cannot be undone.
        let installed = installed.inspect_err(|_| self.give_up_daemon())?;
        Ok((reply, installed))
    }

    /// Frees an object of the daemon, for destructors: without waiting, unless
    /// [`Context::wait_in_destructors`] was called.
    pub(crate) fn free_object<M: Message>(self: &Arc<Self>, message: &M) {
        if self.waits_in_destructors.load(Ordering::Relaxed) {
            let _ = self.call_daemon(message);
        } else {
            self.free_without_waiting(message);
        }
    }

    /// Frees an object of the daemon without waiting: what the socket has no room for is sent by a
    /// thread.
    pub(crate) fn free_without_waiting<M: Message>(self: &Arc<Self>, message: &M) {
        if !self.enqueue_unanswered(message) {
            let client = self.clone();
            self.releaser.run(Box::new(move || {
                let _ = client.send_outbox();
            }));
        }
    }

    /// Sends a request without a reply: the daemon carries it out before any later one. Waits only
    /// for room in the control socket.
    pub(crate) fn post_unanswered<M: Message>(&self, message: &M) {
        if !self.enqueue_unanswered(message) && self.send_outbox().is_err() {
            self.give_up_daemon();
        }
    }

    /// Puts a request without a reply into the outbox, and sends what the socket has room for. Returns
    /// false if something is left, because the daemon is busy or stalled.
    fn enqueue_unanswered<M: Message>(&self, message: &M) -> bool {
        if !self.alive.load(Ordering::Relaxed) || self.check_socket().is_err() {
            return true;
        }
        // A child of fork(2) has nothing to free.
        let Ok(mut outbox) = self.outbox.lock() else {
            return true;
        };
        outbox.push_back(self.conn.encode_unanswered(message));
        self.send_waiting(&mut outbox)
    }

    /// Waits until the daemon has carried out the requests that were posted.
    pub(crate) fn confirm_posted(&self) -> Result<(), Error> {
        match self.call_daemon(&QueryDevice { index: 0, flags: 0 }) {
            // There need not be a device.
            Ok(_) | Err(Error::Refused { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Sends the requests of the outbox for which the socket has room. Returns true if none is left.
    fn send_waiting(&self, outbox: &mut VecDeque<Vec<u8>>) -> bool {
        while let Some(packet) = outbox.front() {
            match self.conn.try_send(packet) {
                Ok(true) => drop(outbox.pop_front()),
                Ok(false) => return false,
                Err(_) => {
                    self.give_up_daemon();
                    outbox.clear();
                }
            }
        }
        true
    }

    /// Sends all requests of the outbox, and waits for room if necessary.
    fn send_outbox(&self) -> Result<(), Error> {
        while !self.send_waiting(&mut *self.outbox.lock()?) {
            self.conn.await_room()?;
        }
        Ok(())
    }

    /// Notes that the daemon may still add completions of a queue pair to these queues: it is being
    /// destroyed.
    pub(crate) fn note_stale_completions(
        &self,
        qp_num: u32,
        queues: impl Iterator<Item = Weak<dyn StaleCompletions>>,
    ) {
        if let Ok(mut stale) = self.stale_completions.lock() {
            stale.entry(qp_num).or_default().extend(queues);
        }
    }

    /// Discards completions of earlier queue pairs with the number of a new one. The daemon adds no
    /// more of them: it reuses a number only after its worker has released the queue pair.
    pub(crate) fn discard_stale_completions(&self, qp_num: u32) {
        let stale = self.stale_completions.lock();
        let stale = stale.ok().and_then(|mut stale| stale.remove(&qp_num));
        for queue in stale.into_iter().flatten() {
            if let Some(queue) = queue.upgrade() {
                queue.discard_of(qp_num);
            }
        }
    }

    /// Ends the connection to the daemon. If the daemon still runs, it sees the end of the
    /// connection and frees the objects of this client.
    #[cold]
    fn give_up_daemon(&self) {
        self.alive.store(false, Ordering::Release);
        // A child of fork(2), in which a signal handler has returned, would end its parent's connection.
        if self.check_process().is_ok() && self.check_socket().is_ok() {
            self.conn.shut_down();
        }
    }

    /// Tells a worker that a QP has work.
    #[inline]
    pub(crate) fn ring_doorbell(&self, worker: u32, qp_num: u32) {
        let Some((bell, eventfd)) = self.workers.get(worker as usize) else {
            return;
        };
        bell.ring_doorbell(qp_num, || self.await_doorbell_slot(worker, eventfd));
        self.wake_sleeping_worker(worker, eventfd);
    }

    /// Lets a worker take doorbells of a full ring. Returns false if the daemon has ended.
    #[cold]
    fn await_doorbell_slot(&self, worker: u32, eventfd: &KeptDescriptor) -> bool {
        self.wake_sleeping_worker(worker, eventfd);
        std::thread::yield_now();
        self.check_alive()
    }

    #[inline]
    fn wake_sleeping_worker(&self, worker: u32, eventfd: &KeptDescriptor) {
        if self.page.must_wake(worker) {
            // The counter is full only if the worker has already been woken.
            let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
        }
    }

    /// Last known liveness of the daemon.
    #[inline]
    pub(crate) fn known_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    /// Checks the control socket: a system call, for slow paths.
    pub(crate) fn check_alive(&self) -> bool {
        self.stays_alive(Duration::ZERO)
    }

    /// Waits for the end of the control socket. Returns whether it is still open after `timeout`.
    #[cold]
    pub(crate) fn stays_alive(&self, timeout: Duration) -> bool {
        if self.check_process().is_err() || self.check_socket().is_err() {
            return false;
        }
        let deadline = Deadline::after(Some(timeout));
        while self.known_alive() {
            let mut fds = [PollFd::new(&self.conn, PollFlags::RDHUP)];
            match poll(&mut fds, deadline.to_timespec().as_ref()) {
                Err(rustix::io::Errno::INTR) => {}
                Ok(n) if n > 0 => self.alive.store(false, Ordering::Release),
                _ => break,
            }
        }
        self.known_alive()
    }

    /// Calls [`Self::check_alive`] unless a poller has done so within `interval`.
    pub(crate) fn check_alive_every(&self, interval: Duration) {
        let now = self.opened.elapsed().as_micros() as u64;
        // Two threads that check at the same time do no harm.
        let last = self.checked_at.load(Ordering::Relaxed);
        if now.saturating_sub(last) >= interval.as_micros() as u64 {
            self.checked_at.store(now, Ordering::Relaxed);
            self.check_alive();
        }
    }

    /// Waits until `fd` is readable. Pending data takes precedence over the end of the daemon.
    pub(crate) fn wait_readable(
        &self,
        fd: BorrowedFd<'_>,
        timeout: Option<Duration>,
    ) -> Result<(), Error> {
        self.check_process()?;
        let deadline = Deadline::after(timeout);
        loop {
            let mut fds = [
                PollFd::from_borrowed_fd(fd, PollFlags::IN),
                PollFd::new(&self.conn, PollFlags::RDHUP),
            ];
            match poll(&mut fds, deadline.to_timespec().as_ref()) {
                Ok(0) => return Err(Error::Timeout),
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            if fds[0].revents().contains(PollFlags::IN) {
                return Ok(());
            }
            if !fds[1].revents().is_empty() || !fds[0].revents().is_empty() {
                self.check_alive();
                return Err(Error::DaemonGone);
            }
        }
    }

    /// Receives one packet from an event socket.
    pub(crate) fn recv_event(
        &self,
        from: &ControlSocket,
        timeout: Option<Duration>,
    ) -> Result<Vec<u8>, Error> {
        let deadline = Deadline::after(timeout);
        loop {
            if let Some(packet) = self.try_recv_event(from)? {
                return Ok(packet);
            }
            self.wait_readable(from.as_fd(), deadline.left())?;
        }
    }

    /// As [`Self::recv_event`], without waiting.
    pub(crate) fn try_recv_event(&self, from: &ControlSocket) -> Result<Option<Vec<u8>>, Error> {
        // A child of fork(2) would take the events of its parent.
        self.check_process()?;
        match from.try_recv_packet() {
            Ok(packet) => Ok(Some(packet.bytes)),
            Err(RecvError::WouldBlock) => Ok(None),
            Err(RecvError::Closed) => {
                self.check_alive();
                Err(Error::DaemonGone)
            }
            Err(RecvError::Truncated | RecvError::Descriptors | RecvError::DescriptorsLost) => {
                Err(ProtoError::NotSiwd(0).into())
            }
            Err(RecvError::Io(error)) => Err(error.into()),
        }
    }

    /// Duplicates the descriptor of the connection to the daemon, which becomes readable when the
    /// daemon ends or is given up.
    #[cfg(feature = "tokio")]
    pub(crate) fn dup_connection(&self) -> std::io::Result<OwnedFd> {
        Ok(to_high(rustix::io::fcntl_dupfd_cloexec(
            self.conn.as_fd(),
            0,
        )?))
    }
}
