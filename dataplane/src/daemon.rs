//! Start and stop: what the host must have is looked at first, then ports, workers and the
//! control socket come up in this order, and go in the opposite one.

use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use crossbeam::queue::ArrayQueue;
use dpdk::{Eal, EalConfig, Mempool};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use siw_memory::KeyTable;
use siw_shm::WorkerPage;
use siw_shm::control::ControlSocket;

use crate::capture::{Capture, CaptureError};
use crate::config::{Config, EalLog, HugepagePolicy};
use crate::control::links::LinkMonitor;
use crate::control::{ControlParts, ControlThread};
use crate::device::{self, SharedStackConfig};
use crate::host::{self, HostError};
use crate::worker::{Mailbox, Worker, WorkerConfig, forward};

/// The daemon cannot start, or could not go on.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Host(#[from] HostError),
    #[error(transparent)]
    Dpdk(#[from] dpdk::Error),
    #[error(transparent)]
    Capture(#[from] CaptureError),
    #[error("control socket {path}: {reason}")]
    Socket { path: String, reason: String },
    #[error("{0}")]
    Device(String),
    #[error("{what}: {source}")]
    Os {
        what: &'static str,
        source: std::io::Error,
    },
}

fn os_error(what: &'static str) -> impl Fn(nix::errno::Errno) -> StartError {
    move |error| StartError::Os {
        what,
        source: error.into(),
    }
}

/// Commands and events that fit between a worker and the control thread.
const MAILBOX_CAPACITY: usize = 4096;
/// What DPDK needs beside the packet buffers.
const EAL_OVERHEAD_MB: u32 = 32;

/// Runs until SIGTERM or SIGINT.
///
/// # Errors
/// A resource is missing, named with the command that provides it; nothing was touched then.
pub fn run_daemon(config: Config, json: bool) -> Result<(), StartError> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    // Before any thread exists, so that all inherit the mask.
    signals
        .thread_block()
        .map_err(os_error("signals cannot be blocked"))?;
    let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)
        .map_err(os_error("signals cannot be received"))?;

    let cores = worker_cores(&config);
    let claims = host::claim_cores(&host::lock_folder(), &cores, config.workers.idle)?;
    refuse_second_daemon(&config.control.socket)?;

    let configs: Vec<_> = config
        .devices
        .iter()
        .map(|device| device.get_ref().clone())
        .collect();
    let room = configs
        .iter()
        .map(device::buffer_room)
        .max()
        .unwrap_or(2048);
    let (eal, hugepages) = start_eal(&config, room, cores[0])?;
    let pool = Mempool::new(&eal, "siwd", config.dpdk.buffers, 256, room, None)?;
    let mut devices =
        device::open_devices(&eal, &configs, &pool, cores.len()).map_err(StartError::Device)?;

    let names: Vec<String> = configs
        .iter()
        .map(|device| device.name.get_ref().0.clone())
        .collect();
    let capture = config
        .capture
        .as_ref()
        .map(|capture_config| Capture::start_writing(capture_config, &names))
        .transpose()?;

    let table = KeyTable::new(key_slots(&config), cores.len() + 1);
    let page = WorkerPage::create_sealed(cores.len() as u32).map_err(|error| StartError::Os {
        what: "shared memory cannot be made",
        source: error,
    })?;
    let control_wake = Arc::new(new_event_fd()?);
    let control_asleep = WorkerPage::create_sealed(1)
        .map_err(|source| StartError::Os {
            what: "shared memory cannot be made",
            source,
        })?
        .sleep_flag(0)
        .map(Arc::new)
        .ok_or_else(|| StartError::Device("no memory for a flag".into()))?;
    let mut threads = Vec::new();
    let keys = SharedStackConfig::generate(
        config.limits.connections as usize,
        config.dpdk.buffers,
        cores.len() * config.devices.len(),
    );
    let too_many = || StartError::Device("too many workers".into());
    let mailboxes = (0..cores.len() as u32)
        .map(|index| {
            Ok(Arc::new(Mailbox {
                commands: ArrayQueue::new(MAILBOX_CAPACITY),
                events: ArrayQueue::new(MAILBOX_CAPACITY),
                frames: ArrayQueue::new(forward::FORWARD_QUEUE_DEPTH),
                worker_wake: new_event_fd()?,
                worker_asleep: page.sleep_flag(index).ok_or_else(too_many)?,
                control_wake: control_wake.clone(),
                control_asleep: control_asleep.clone(),
            }))
        })
        .collect::<Result<Vec<_>, StartError>>()?;
    let all: Arc<[Arc<Mailbox>]> = mailboxes.clone().into();
    for (index, core) in cores.iter().copied().enumerate() {
        let (Some(reader), Some(sleeping)) =
            (table.register_reader(), page.sleep_flag(index as u32))
        else {
            return Err(too_many());
        };
        let ports = devices
            .iter_mut()
            .enumerate()
            .filter_map(|(device_index, device)| {
                let mut worker_port = device.worker_port(device_index, index, &keys)?;
                worker_port.tap = capture.as_ref().map(Capture::new_handle);
                Some(worker_port)
            })
            .collect();
        let worker = WorkerConfig {
            index,
            core,
            idle: config.workers.idle,
            spin: Duration::from_micros(config.workers.spin_us.into()),
            ports,
            pool: pool.clone(),
            keys: reader,
            sleeping,
            mailbox: all[index].clone(),
            all: all.clone(),
        };
        threads.push(start_worker(&eal, worker)?);
    }

    let socket = config.control.socket.clone();
    let listener = bind_control_socket(&config)?;
    let links = devices
        .iter()
        .map(|device| (!device.link.in_process).then(|| device.port.share()));
    let links = LinkMonitor::new(links.collect());
    let views: Vec<_> = devices
        .iter()
        .map(device::OpenDevice::client_view)
        .collect();
    let summary = ready_line(&config, &cores, hugepages, json);
    let dma_ports: Vec<_> = devices
        .iter()
        .map(|device| device.port.share())
        .filter(dpdk::Port::needs_dma_map)
        .collect();
    let map_arena = {
        let eal = eal.clone();
        move |region: &Arc<siw_shm::SharedMemory>| {
            if dma_ports.is_empty() {
                return Ok(None);
            }
            let memory: Arc<dyn dpdk::ExtMemory> = region.clone();
            let mut external =
                dpdk::ExternalRegion::register(&eal, memory, region.len(), region.page_size())
                    .map_err(|error| error.to_string())?;
            for port in &dma_ports {
                external.map_for(port).map_err(|error| error.to_string())?;
            }
            Ok(Some(external))
        }
    };
    let mut control = ControlThread::new(ControlParts {
        socket,
        listener,
        signals,
        wake: control_wake,
        asleep: control_asleep,
        limits: config.limits.clone(),
        devices: views,
        links,
        mailboxes,
        keys: table,
        page,
        hugepages,
        map_arena: Box::new(map_arena),
    })
    .map_err(os_error("the control thread cannot start"))?;

    println!("{summary}");
    let _ = std::io::Write::flush(&mut std::io::stdout());
    host::notify_service_manager("READY=1");
    control.run();
    for thread in threads {
        if thread.join().is_err() {
            tracing::error!("a worker failed");
        }
    }
    drop(control);
    // Frames may wait in them, whose pool goes next.
    drop(all);
    drop(capture);
    for device in devices {
        device.port.close();
    }
    drop(pool);
    drop(eal);
    drop(claims);
    tracing::info!("stopped");
    Ok(())
}

/// The configured cores, or the last one that this process may use.
pub(crate) fn worker_cores(config: &Config) -> Vec<usize> {
    let cores = config.workers.cores.get_ref();
    if cores.is_empty() {
        host::allowed_cores().last().copied().into_iter().collect()
    } else {
        cores.clone()
    }
}

fn key_slots(config: &Config) -> usize {
    let most = u64::from(config.limits.memory_regions_per_client)
        .saturating_mul(u64::from(config.limits.clients));
    most.min(4 << 20) as usize
}

fn new_event_fd() -> Result<OwnedFd, StartError> {
    EventFd::from_value_and_flags(0, EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)
        .map(OwnedFd::from)
        .map_err(os_error("no event descriptor"))
}

/// Starts DPDK with hugepages, or without where the configuration allows it.
pub(crate) fn start_eal(
    config: &Config,
    room: u16,
    core: usize,
) -> Result<(Eal, bool), StartError> {
    let buffer = u64::from(room) + u64::from(dpdk::HEADROOM) + 256;
    let memory_mb = (u64::from(config.dpdk.buffers) * buffer / (1 << 20)) as u32 + EAL_OVERHEAD_MB;
    let pci: Vec<String> = config
        .devices
        .iter()
        .filter_map(|device| {
            device
                .get_ref()
                .pci
                .as_ref()
                .map(|address| address.0.clone())
        })
        .collect();
    let free = host::free_hugepage_bytes();
    let enough = free >= u64::from(memory_mb) << 20;
    let hugepages = match config.dpdk.hugepages {
        HugepagePolicy::Never => false,
        HugepagePolicy::Require => true,
        HugepagePolicy::Auto => {
            if !enough {
                tracing::warn!(
                    "{memory_mb} MiB of hugepages are wanted, {} MiB are free: using normal pages, which is slower; \
                     reserve them with: echo {} > /proc/sys/vm/nr_hugepages",
                    free >> 20,
                    memory_mb.div_ceil(2) + 64,
                );
            }
            enough
        }
    };
    let log_level = match config.dpdk.log {
        EalLog::Error => "error",
        EalLog::Warning => "warning",
        EalLog::Notice => "notice",
        EalLog::Info => "info",
        EalLog::Debug => "debug",
    };
    let eal = Eal::init(EalConfig {
        hugepages,
        memory_mb,
        no_pci: pci.is_empty(),
        pci_allow: pci,
        log_level: log_level.into(),
        main_core: core,
        ..EalConfig::default()
    })?;
    Ok((eal, hugepages))
}

fn start_worker(
    eal: &Eal,
    config: WorkerConfig,
) -> Result<std::thread::JoinHandle<()>, StartError> {
    let (tell, told) = mpsc::channel::<Result<(), StartError>>();
    let eal = eal.clone();
    let core = config.core;
    let thread = std::thread::Builder::new()
        .name(format!("siwd-worker-{}", config.index))
        .spawn(move || {
            let started = (|| {
                host::pin_thread_to(core)?;
                let registered = eal.register_thread()?;
                let worker = Worker::new(config).map_err(StartError::Device)?;
                Ok((registered, worker))
            })();
            match started {
                Ok((_registered, mut worker)) => {
                    let _ = tell.send(Ok(()));
                    worker.run();
                }
                Err(error) => {
                    let _ = tell.send(Err(error));
                }
            }
        })
        .map_err(|source| StartError::Os {
            what: "a worker thread cannot start",
            source,
        })?;
    match told.recv() {
        Ok(Ok(())) => Ok(thread),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(StartError::Device(
            "a worker thread failed at its start".into(),
        )),
    }
}

/// A socket that somebody answers on belongs to a living daemon; one that nobody answers on
/// is left from one that was killed.
fn refuse_second_daemon(path: &Path) -> Result<(), StartError> {
    let fail = |reason: String| StartError::Socket {
        path: path.display().to_string(),
        reason,
    };
    match ControlSocket::connect_to(path) {
        Ok(conn) => {
            let pid = conn.peer_credentials().map_or(0, |peer| peer.0);
            Err(fail(format!(
                "another siwd (process {pid}) serves it; stop that one, or give this one another [control] socket"
            )))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path)
                .map_err(|error| fail(format!("a stale socket cannot be removed: {error}")))
        }
        Err(error) => Err(fail(format!(
            "{error}; name a place that siwd may write in [control] socket"
        ))),
    }
}

fn bind_control_socket(config: &Config) -> Result<OwnedFd, StartError> {
    let path = &config.control.socket;
    let fail = |reason: String| StartError::Socket {
        path: path.display().to_string(),
        reason,
    };
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)
            .map_err(|error| fail(format!("its folder cannot be made: {error}")))?;
    }
    let listener = ControlSocket::listen_at(path, 128).map_err(|error| {
        fail(format!(
            "{error}; name a place that siwd may write in [control] socket"
        ))
    })?;
    let mode = std::fs::Permissions::from_mode(config.control.mode.0);
    std::fs::set_permissions(path, mode).map_err(|error| fail(error.to_string()))?;
    if let Some(group) = &config.control.group {
        let name = group.get_ref();
        let gid = nix::unistd::Group::from_name(name)
            .ok()
            .flatten()
            .ok_or_else(|| {
                fail(format!(
                    "group {name:?} does not exist; create it with: groupadd {name}"
                ))
            })?
            .gid;
        nix::unistd::chown(path, None, Some(gid))
            .map_err(|error| fail(format!("group {name:?}: {error}")))?;
    }
    Ok(listener)
}

fn ready_line(config: &Config, cores: &[usize], hugepages: bool, json: bool) -> String {
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
