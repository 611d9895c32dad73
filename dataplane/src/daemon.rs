//! Start and stop of the daemon. The host's resources are checked first ([`Prepared`]); then the
//! control socket, ports and workers are started in this order, and stopped in the opposite one.
//! Clients that connect early wait in the socket until the daemon is ready.

use std::io::PipeReader;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam::queue::ArrayQueue;
use dpdk::Eal;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use siw_memory::KeyTable;
use siw_seccomp::Confinement;
use siw_shm::doorbell::SleepFlag;
use siw_shm::{SharedMemory, WorkerPage};

use crate::capture::Capture;
use crate::config::{Config, ConfigSource, DeviceConfig};
use crate::control::client::peers::{SUBORDINATE_UIDS, SubordinateUsers};
use crate::control::client::socket::BoundSocket;
use crate::control::operator::captures::Captures;
use crate::control::operator::device_changes::{DeviceOpener, RunningDevice};
use crate::control::operator::reload::Configuration;
use crate::control::operator::runtime_changes::tell_lost_changes;
use crate::control::{Closer, ControlParts, ControlThread, MapArena, log_refused_calls};
use crate::datapath::clock::TscClock;
use crate::datapath::inbox::WorkerInbox;
use crate::device::{self, OpenDevice, SharedStackConfig};
use crate::frame_taps::FrameTaps;
use crate::host;
use crate::link_traits::PayloadPolicy;
use crate::prepared::{Prepared, StartedDpdk, look_up_operators};
use crate::start_error::StartError;
use crate::worker::{Mailbox, Worker, WorkerConfig};

fn os_error(what: &'static str) -> impl Fn(nix::errno::Errno) -> StartError {
    move |error| StartError::Os {
        what,
        source: error.into(),
    }
}

fn no_shared_memory(source: std::io::Error) -> StartError {
    StartError::Os {
        what: "shared memory cannot be created",
        source,
    }
}

fn too_many_workers() -> StartError {
    StartError::Device("too many workers".into())
}

/// Capacity of the queues of commands and events between a worker and the control thread.
const MAILBOX_CAPACITY: usize = 4096;
/// Packet buffers that DPDK keeps for each registered thread.
const POOL_CACHE: u32 = 256;

/// Runs the daemon until SIGTERM or SIGINT. SIGHUP reloads the configuration. A panic of any thread
/// ends the process.
///
/// # Errors
/// The configuration has a mistake, or a resource is missing; the error names the command that provides
/// it, and the host is unchanged.
pub fn run_daemon(source: ConfigSource, json: bool) -> Result<(), StartError> {
    let config = source.load()?;
    host::end_process_on_panic();
    host::set_own_umask();
    host::keep_payload_out_of_dumps();
    let signals = block_signals()?;
    let closer = Closer::start();
    let file_limit = host::raise_file_limit();
    if host::may_lock_memory() {
        siw_shm::shared_memory::lock_owned_pages();
    }
    let prepared = Prepared::new(config);
    prepared.check_host().into_result()?;
    let mut claims = prepared.claim_host(prepared.cores.len())?;
    let config = &prepared.config;
    let operators = look_up_operators(config)?;
    let socket = BoundSocket::bind(&config.control)?;

    let dpdk = prepared.start_dpdk("siwd", POOL_CACHE)?;
    let mut devices = open_devices(&dpdk, &prepared, &signals)?;
    for device in &mut devices {
        device.set_up_host_path().map_err(StartError::Device)?;
    }
    let names = prepared.device_names();
    let capture = config
        .capture
        .as_ref()
        .map(|capture_config| Capture::into_file(capture_config, &names))
        .transpose()?;

    let channels = WorkerChannels::new(&prepared)?;
    // After the start of DPDK, which probes hugepages with a handler of its own.
    let fault_wake = channels.control_wake.try_clone();
    fault_wake
        .and_then(siw_shm::fault_guard::install)
        .map_err(|source| StartError::Os {
            what: "the handler of faults on clients' memory cannot be installed",
            source,
        })?;
    // Measured here once, rather than at a worker's first FPDU.
    let method = siw_memory::crc::crc32c_method();
    tracing::debug!(method, "CRC32c");
    let confinement = config
        .workers
        .confine
        .then(|| install_confinement(&channels))
        .transpose()?;
    let opener = device_opener(&prepared, &dpdk, devices.len(), &channels)?;
    let threads = start_workers(
        config,
        &opener,
        &mut devices,
        capture.as_ref(),
        &channels,
        confinement,
    )?;
    let arena_readers = arena_readers(&devices);
    let nic_arenas = (!arena_readers.is_empty()).then(dpdk::external_regions_left);
    let summary = ready_line(&prepared, dpdk.hugepages, json);
    let capacity = host::client_capacity(
        file_limit,
        prepared.key_slots(),
        prepared.cores.len(),
        nic_arenas,
    );
    let settings = settings_json(&prepared, dpdk.hugepages);
    let ports_use_dma = devices
        .iter()
        .any(|device| device.port.dma_port().is_some());
    let claimed = std::mem::take(&mut claims.devices);
    let devices = devices.into_iter().zip(claimed).enumerate();
    let devices = devices
        .map(|(index, (device, claims))| RunningDevice::start(&opener, index, device, claims))
        .collect::<std::io::Result<Vec<_>>>()
        .map_err(|source| StartError::Os {
            what: "a host thread cannot start",
            source,
        })?;
    let parts = ControlParts {
        socket,
        signals,
        watchdog: host::watchdog_interval(),
        wake: channels.control_wake,
        asleep: channels.control_asleep,
        configuration: Configuration::new(source, config.clone(), capacity),
        captures: Captures::new(names, capture.as_ref().map(|capture| capture.tap().clone())),
        operators,
        closer,
        subordinates: SubordinateUsers::read_file(SUBORDINATE_UIDS.as_ref()),
        devices,
        opener,
        keys: channels.keys,
        page: channels.page,
        hugepages: dpdk.hugepages,
        ports_use_dma,
        settings,
        map_arena: arena_mapper(&prepared, &dpdk.eal, arena_readers),
    };
    let mut control =
        ControlThread::new(parts, channels.mailboxes.clone()).map_err(|source| StartError::Os {
            what: "the control thread cannot start",
            source,
        })?;

    tell_lost_changes(&config.control.socket, config);
    println!("{summary}");
    let _ = std::io::Write::flush(&mut std::io::stdout());
    host::notify_service_manager("READY=1");
    if !control.run() {
        // A thread hangs and still uses its resources: nothing may be freed, and nothing waits for it.
        dpdk::exit_process(1);
    }
    for thread in threads {
        if thread.join().is_err() {
            tracing::error!("a worker failed");
        }
    }
    log_refused_calls();
    control.let_clients_go();
    // Closes the ports.
    drop(control);
    // Frames may wait in the mailboxes; their pool is freed below.
    drop(channels.mailboxes);
    drop(capture);
    drop(dpdk);
    drop(claims);
    tracing::info!("stopped");
    Ok(())
}

/// Opens the devices. A signal ends the process while one waits for its peer, because DPDK's wait cannot be
/// interrupted.
fn open_devices(
    dpdk: &StartedDpdk,
    prepared: &Prepared,
    signals: &SignalFd,
) -> Result<Vec<OpenDevice>, StartError> {
    let open = || {
        let workers = prepared.cores.len();
        device::open_devices(dpdk, &prepared.devices, workers).map_err(StartError::Device)
    };
    if !prepared.devices.iter().any(DeviceConfig::waits_for_peer) {
        return open();
    }
    let (opened, is_opened) = std::io::pipe().map_err(|source| StartError::Os {
        what: "a pipe cannot be created",
        source,
    })?;
    let socket = &prepared.config.control.socket;
    std::thread::scope(|scope| {
        scope.spawn(move || end_on_signal(signals, &opened, socket));
        let devices = open();
        drop(is_opened);
        devices
    })
}

/// Ends the process at a signal other than SIGHUP, until the other end of the pipe is closed.
fn end_on_signal(signals: &SignalFd, opened: &PipeReader, socket: &Path) {
    loop {
        let mut fds = [
            PollFd::new(signals.as_fd(), PollFlags::POLLIN),
            PollFd::new(opened.as_fd(), PollFlags::POLLIN),
        ];
        if poll(&mut fds, PollTimeout::NONE).is_err() {
            continue;
        }
        if fds[1].any() == Some(true) {
            return;
        }
        if let Ok(Some(signal)) = signals.read_signal()
            && signal.ssi_signo != Signal::SIGHUP as u32
        {
            tracing::info!("stopped while a device waited for its peer");
            let _ = std::fs::remove_file(socket);
            dpdk::exit_process(0);
        }
    }
}

/// Delivers SIGTERM, SIGINT and SIGHUP through a descriptor from now on. Must be called before any
/// thread exists, so that all threads inherit the mask.
///
/// # Errors
/// The operating system refuses.
pub fn block_signals() -> Result<SignalFd, StartError> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    signals.add(Signal::SIGHUP);
    signals
        .thread_block()
        .map_err(os_error("signals cannot be blocked"))?;
    SignalFd::with_flags(&signals, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)
        .map_err(os_error("signals cannot be received"))
}

/// Connections of the workers with the control thread, with each other and with clients.
struct WorkerChannels {
    /// The workers' sleep flags, which clients map.
    page: WorkerPage,
    /// One per worker, in order.
    mailboxes: Arc<[Arc<Mailbox>]>,
    control_wake: Arc<OwnedFd>,
    control_asleep: Arc<SleepFlag>,
    /// The keys of all registered memory.
    keys: Arc<KeyTable>,
}

impl WorkerChannels {
    fn new(prepared: &Prepared) -> Result<WorkerChannels, StartError> {
        let workers = prepared.cores.len();
        let page = WorkerPage::create_sealed(workers as u32).map_err(no_shared_memory)?;
        let control_wake = Arc::new(new_event_fd()?);
        let control_asleep = WorkerPage::create_sealed(1)
            .map_err(no_shared_memory)?
            .sleep_flag(0)
            .map(Arc::new)
            .ok_or_else(|| {
                StartError::Device("no memory for the sleep flag of the control thread".into())
            })?;
        let mailboxes = (0..workers as u32)
            .map(|index| {
                let sleep_flag = page.sleep_flag(index).ok_or_else(too_many_workers)?;
                Ok(Arc::new(Mailbox {
                    commands: ArrayQueue::new(MAILBOX_CAPACITY),
                    events: ArrayQueue::new(MAILBOX_CAPACITY),
                    has_ended: AtomicBool::new(false),
                    inbox: Arc::new(WorkerInbox::new(new_event_fd()?, sleep_flag)),
                    control_wake: control_wake.clone(),
                    control_asleep: control_asleep.clone(),
                }))
            })
            .collect::<Result<Vec<_>, StartError>>()?;
        Ok(WorkerChannels {
            page,
            mailboxes: mailboxes.into(),
            control_wake,
            control_asleep,
            // The control thread reads keys too.
            keys: KeyTable::new(prepared.key_slots(), workers + 1),
        })
    }
}

/// Installs the handler of system calls that workers may not make; it wakes the control thread.
fn install_confinement(channels: &WorkerChannels) -> Result<Confinement, StartError> {
    let wake = channels.control_wake.try_clone();
    wake.and_then(Confinement::install)
        .map_err(|source| StartError::Os {
            what: "the handler of refused system calls cannot be installed",
            source,
        })
}

/// Everything that devices need of the daemon.
fn device_opener(
    prepared: &Prepared,
    dpdk: &StartedDpdk,
    devices: usize,
    channels: &WorkerChannels,
) -> Result<DeviceOpener, StartError> {
    let config = &prepared.config;
    let stacks = SharedStackConfig::generate_secrets(
        config.limits.connections as usize,
        config.dpdk.buffers,
        prepared.cores.len() * devices,
    );
    let mailboxes = channels.mailboxes.iter();
    Ok(DeviceOpener {
        dpdk: dpdk.clone(),
        cores: prepared.cores.clone(),
        buffer_room: prepared.buffer_room,
        stacks: stacks.map_err(|source| StartError::Os {
            what: "the secrets of the TCP stacks cannot be generated",
            source,
        })?,
        clock: TscClock::start(),
        inboxes: mailboxes.map(|mailbox| mailbox.inbox.clone()).collect(),
    })
}

/// Starts a thread for each core, with its queues of every device.
fn start_workers(
    config: &Config,
    opener: &DeviceOpener,
    devices: &mut [OpenDevice],
    capture: Option<&Capture>,
    channels: &WorkerChannels,
    confinement: Option<Confinement>,
) -> Result<Vec<JoinHandle<()>>, StartError> {
    let taps = FrameTaps::new(capture.map(|capture| capture.tap().clone()), None);
    let mut threads = Vec::new();
    for (index, core) in opener.cores.iter().copied().enumerate() {
        let sleeping = channels.page.sleep_flag(index as u32);
        let (Some(reader), Some(sleeping)) = (channels.keys.register_reader(), sleeping) else {
            return Err(too_many_workers());
        };
        let ports = devices
            .iter_mut()
            .enumerate()
            .filter_map(|(device_index, device)| {
                let mut worker_port = device.worker_port(device_index, index, &opener.stacks)?;
                worker_port.taps = taps.clone();
                Some(worker_port)
            })
            .collect();
        let worker = WorkerConfig {
            index,
            core,
            idle: config.workers.idle,
            spin: Duration::from_micros(config.workers.spin_us.into()),
            clock: opener.clock.clone(),
            ports,
            pool: opener.dpdk.pool.clone(),
            keys: reader,
            sleeping,
            max_pending_per_user: config.limits.pending_connections_of_user() as usize,
            mailbox: channels.mailboxes[index].clone(),
            inboxes: opener.inboxes.clone(),
        };
        threads.push(start_worker(&opener.dpdk.eal, worker, confinement)?);
    }
    Ok(threads)
}

/// The NICs that read arenas by DMA.
fn arena_readers(devices: &[OpenDevice]) -> Vec<dpdk::Port> {
    devices
        .iter()
        // Payload that is copied lies in DPDK's own memory.
        .filter(|device| device.link.payload != PayloadPolicy::Copy)
        .filter_map(|device| device.port.dma_port())
        .collect()
}

/// Returns a function that maps arenas for the NICs that read them.
fn arena_mapper(prepared: &Prepared, eal: &Eal, ports: Vec<dpdk::Port>) -> Arc<MapArena> {
    let eal = eal.clone();
    // The narrowest IOMMU decides: an address has to suit all of them.
    let widths = prepared
        .pci_devices()
        .filter_map(|device| device.iommu_width);
    let space = dpdk::IovaSpace::new(widths.min().unwrap_or(u8::MAX));
    Arc::new(move |region: &Arc<SharedMemory>| {
        if ports.is_empty() {
            return Ok(None);
        }
        let memory: Arc<dyn dpdk::ExtMemory> = region.clone();
        let mut external =
            dpdk::ExternalRegion::register(&eal, memory, region.len(), region.page_size(), &space)
                .map_err(|error| error.to_string())?;
        for port in &ports {
            external.map_for(port).map_err(|error| error.to_string())?;
        }
        Ok(Some(external))
    })
}

fn new_event_fd() -> Result<OwnedFd, StartError> {
    EventFd::from_value_and_flags(0, EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)
        .map(OwnedFd::from)
        .map_err(os_error("an event descriptor cannot be created"))
}

/// Starts one worker's thread; returns when the worker runs, or could not be built.
fn start_worker(
    eal: &Eal,
    config: WorkerConfig,
    confinement: Option<Confinement>,
) -> Result<JoinHandle<()>, StartError> {
    let (report, outcome) = mpsc::channel::<Result<(), StartError>>();
    let eal = eal.clone();
    let core = config.core;
    let thread = std::thread::Builder::new()
        .name(format!("siwd-worker-{}", config.index))
        .spawn(move || {
            let started = (|| {
                host::pin_thread_to(core)?;
                let registered = eal.register_thread()?;
                let worker = Worker::new(config).map_err(StartError::Device)?;
                if let Some(confinement) = confinement {
                    confinement.confine_thread().map_err(|error| {
                        StartError::Device(format!(
                            "{error}; [workers] confine = false leaves them as they are"
                        ))
                    })?;
                }
                Ok((registered, worker))
            })();
            match started {
                Ok((_registered, mut worker)) => {
                    let _ = report.send(Ok(()));
                    worker.run();
                }
                Err(error) => {
                    let _ = report.send(Err(error));
                }
            }
        })
        .map_err(|source| StartError::Os {
            what: "a worker thread cannot start",
            source,
        })?;
    match outcome.recv() {
        Ok(Ok(())) => Ok(thread),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(StartError::Device("a worker thread failed to start".into())),
    }
}

/// Line that is printed once the daemon serves.
fn ready_line(prepared: &Prepared, hugepages: bool, json: bool) -> String {
    let (config, cores) = (&prepared.config, &prepared.cores);
    let socket = config.control.socket.display().to_string();
    if json {
        let devices: Vec<_> = config
            .devices
            .iter()
            .map(|device| {
                let device = device.get_ref();
                let addresses: Vec<String> =
                    device.addresses.get_ref().iter().map(|cidr| cidr.addr.to_string()).collect();
                serde_json::json!({ "name": device.name.get_ref().0, "addresses": addresses, "mtu": device.mtu.get_ref() })
            })
            .collect();
        return serde_json::json!({
            "ready": true,
            "socket": socket,
            "cores": cores,
            "hugepages": hugepages,
            "devices": devices,
        })
        .to_string();
    }
    let devices: Vec<String> = config
        .devices
        .iter()
        .map(|device| {
            let device = device.get_ref();
            let first = device
                .addresses
                .get_ref()
                .first()
                .map_or(String::new(), |cidr| cidr.addr.to_string());
            format!("{} {first}", device.name.get_ref().0)
        })
        .collect();
    format!(
        "siwd ready: socket {socket}, cores {cores:?}, {}",
        devices.join(", ")
    )
}

/// The effective settings that determine siwd's performance.
fn settings_json(prepared: &Prepared, hugepages: bool) -> serde_json::Value {
    let workers = &prepared.config.workers;
    serde_json::json!({
        "cores": prepared.cores,
        "idle": workers.idle,
        "spin_us": workers.spin_us,
        "resume_latency_us": workers.resume_latency_us,
        "confine": workers.confine,
        "hugepages": hugepages,
        "dpdk": Eal::version(),
    })
}
