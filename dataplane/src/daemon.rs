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
use crate::config::{Config, EalLog, Hugepages};
use crate::control::links::Links;
use crate::control::{Control, ControlConfig};
use crate::device::{self, Keys};
use crate::host::{self, HostError};
use crate::worker::{Mailbox, Worker, WorkerConfig, forward};

/// The daemon cannot start, or could not go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
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

fn os(what: &'static str) -> impl Fn(nix::errno::Errno) -> Error {
    move |e| Error::Os {
        what,
        source: e.into(),
    }
}

/// Commands and events that fit between a worker and the control thread.
const MAILBOX: usize = 4096;
/// What DPDK needs beside the packet buffers.
const EAL_OVERHEAD_MB: u32 = 32;

/// Runs until SIGTERM or SIGINT.
///
/// # Errors
/// A resource is missing, named with the command that provides it; nothing was touched then.
pub fn run(config: Config, json: bool) -> Result<(), Error> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    // Before any thread exists, so that all inherit the mask.
    signals
        .thread_block()
        .map_err(os("signals cannot be blocked"))?;
    let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)
        .map_err(os("signals cannot be received"))?;

    let cores = worker_cores(&config);
    let claims = host::claim_cores(&host::lock_folder(), &cores, config.workers.idle)?;
    refuse_second_daemon(&config.control.socket)?;

    let configs: Vec<_> = config.devices.iter().map(|d| d.get_ref().clone()).collect();
    let room = configs
        .iter()
        .map(device::buffer_room)
        .max()
        .unwrap_or(2048);
    let (eal, hugepages) = start_eal(&config, room, cores[0])?;
    let pool = Mempool::new(&eal, "siwd", config.dpdk.buffers, 256, room, None)?;
    let mut devices = device::open(&eal, &configs, &pool, cores.len()).map_err(Error::Device)?;

    let names: Vec<String> = configs.iter().map(|d| d.name.get_ref().0.clone()).collect();
    let capture = config
        .capture
        .as_ref()
        .map(|c| Capture::start(c, &names))
        .transpose()?;

    let table = KeyTable::new(key_slots(&config), cores.len() + 1);
    let page = WorkerPage::create_sealed(cores.len() as u32).map_err(|e| Error::Os {
        what: "shared memory cannot be made",
        source: e,
    })?;
    let control_wake = Arc::new(event_fd()?);
    let control_asleep = WorkerPage::create_sealed(1)
        .map_err(|source| Error::Os {
            what: "shared memory cannot be made",
            source,
        })?
        .sleep_flag(0)
        .map(Arc::new)
        .ok_or_else(|| Error::Device("no memory for a flag".into()))?;
    let mut threads = Vec::new();
    let keys = Keys::draw(
        config.limits.connections as usize,
        config.dpdk.buffers,
        cores.len() * config.devices.len(),
    );
    let too_many = || Error::Device("too many workers".into());
    let mailboxes = (0..cores.len() as u32)
        .map(|index| {
            Ok(Arc::new(Mailbox {
                commands: ArrayQueue::new(MAILBOX),
                events: ArrayQueue::new(MAILBOX),
                frames: ArrayQueue::new(forward::FORWARD_QUEUE_DEPTH),
                worker_wake: event_fd()?,
                worker_asleep: page.sleep_flag(index).ok_or_else(too_many)?,
                control_wake: control_wake.clone(),
                control_asleep: control_asleep.clone(),
            }))
        })
        .collect::<Result<Vec<_>, Error>>()?;
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
            .filter_map(|(d, device)| {
                let mut worker_port = device.worker_port(d, index, &keys)?;
                worker_port.tap = capture.as_ref().map(Capture::handle);
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
    let listener = bind(&config)?;
    let links = devices
        .iter()
        .map(|d| (!d.link.in_process).then(|| d.port.share()));
    let links = Links::new(links.collect());
    let views: Vec<_> = devices.iter().map(device::Device::view).collect();
    let summary = ready_line(&config, &cores, hugepages, json);
    let dma_ports: Vec<_> = devices
        .iter()
        .map(|d| d.port.share())
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
                    .map_err(|e| e.to_string())?;
            for p in &dma_ports {
                external.map_for(p).map_err(|e| e.to_string())?;
            }
            Ok(Some(external))
        }
    };
    let mut control = Control::new(ControlConfig {
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
    .map_err(os("the control thread cannot start"))?;

    println!("{summary}");
    let _ = std::io::Write::flush(&mut std::io::stdout());
    host::notify("READY=1");
    control.run();
    for t in threads {
        if t.join().is_err() {
            tracing::error!("a worker failed");
        }
    }
    drop(control);
    // Frames may wait in them, whose pool goes next.
    drop(all);
    drop(capture);
    for d in devices {
        d.port.close();
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

fn event_fd() -> Result<OwnedFd, Error> {
    EventFd::from_value_and_flags(0, EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)
        .map(OwnedFd::from)
        .map_err(os("no event descriptor"))
}

/// Starts DPDK with hugepages, or without where the configuration allows it.
pub(crate) fn start_eal(config: &Config, room: u16, core: usize) -> Result<(Eal, bool), Error> {
    let buffer = u64::from(room) + u64::from(dpdk::HEADROOM) + 256;
    let memory_mb = (u64::from(config.dpdk.buffers) * buffer / (1 << 20)) as u32 + EAL_OVERHEAD_MB;
    let pci: Vec<String> = config
        .devices
        .iter()
        .filter_map(|d| d.get_ref().pci.as_ref().map(|p| p.0.clone()))
        .collect();
    let free = host::free_hugepage_bytes();
    let enough = free >= u64::from(memory_mb) << 20;
    let hugepages = match config.dpdk.hugepages {
        Hugepages::Never => false,
        Hugepages::Require => true,
        Hugepages::Auto => {
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

fn start_worker(eal: &Eal, config: WorkerConfig) -> Result<std::thread::JoinHandle<()>, Error> {
    let (tell, told) = mpsc::channel::<Result<(), Error>>();
    let eal = eal.clone();
    let core = config.core;
    let thread = std::thread::Builder::new()
        .name(format!("siwd-worker-{}", config.index))
        .spawn(move || {
            let started = (|| {
                host::pin_to(core)?;
                let registered = eal.register_thread()?;
                let worker = Worker::new(config).map_err(Error::Device)?;
                Ok((registered, worker))
            })();
            match started {
                Ok((_registered, mut worker)) => {
                    let _ = tell.send(Ok(()));
                    worker.run();
                }
                Err(e) => {
                    let _ = tell.send(Err(e));
                }
            }
        })
        .map_err(|source| Error::Os {
            what: "a worker thread cannot start",
            source,
        })?;
    match told.recv() {
        Ok(Ok(())) => Ok(thread),
        Ok(Err(e)) => Err(e),
        Err(_) => Err(Error::Device("a worker thread failed at its start".into())),
    }
}

/// A socket that somebody answers on belongs to a living daemon; one that nobody answers on
/// is left from one that was killed.
fn refuse_second_daemon(path: &Path) -> Result<(), Error> {
    let fail = |reason: String| Error::Socket {
        path: path.display().to_string(),
        reason,
    };
    match ControlSocket::connect_to(path) {
        Ok(conn) => {
            let pid = conn.peer_credentials().map_or(0, |p| p.0);
            Err(fail(format!(
                "another siwd (process {pid}) serves it; stop that one, or give this one another [control] socket"
            )))
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(e) if e.kind() == std::io::ErrorKind::ConnectionRefused => std::fs::remove_file(path)
            .map_err(|e| fail(format!("a stale socket cannot be removed: {e}"))),
        Err(e) => Err(fail(format!(
            "{e}; name a place that siwd may write in [control] socket"
        ))),
    }
}

fn bind(config: &Config) -> Result<OwnedFd, Error> {
    let path = &config.control.socket;
    let fail = |reason: String| Error::Socket {
        path: path.display().to_string(),
        reason,
    };
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)
            .map_err(|e| fail(format!("its folder cannot be made: {e}")))?;
    }
    let listener = ControlSocket::listen_at(path, 128).map_err(|e| {
        fail(format!(
            "{e}; name a place that siwd may write in [control] socket"
        ))
    })?;
    let mode = std::fs::Permissions::from_mode(config.control.mode.0);
    std::fs::set_permissions(path, mode).map_err(|e| fail(e.to_string()))?;
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
            .map_err(|e| fail(format!("group {name:?}: {e}")))?;
    }
    Ok(listener)
}

fn ready_line(config: &Config, cores: &[usize], hugepages: bool, json: bool) -> String {
    let socket = config.control.socket.display().to_string();
    if json {
        let devices: Vec<_> = config
            .devices
            .iter()
            .map(|d| {
                let d = d.get_ref();
                let addresses: Vec<String> =
                    d.addresses.get_ref().iter().map(|a| a.addr.to_string()).collect();
                serde_json::json!({ "name": d.name.get_ref().0, "addresses": addresses, "mtu": d.mtu.get_ref() })
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
        .map(|d| {
            let d = d.get_ref();
            let first = d
                .addresses
                .get_ref()
                .first()
                .map_or(String::new(), |a| a.addr.to_string());
            format!("{} {first}", d.name.get_ref().0)
        })
        .collect();
    format!(
        "siwd ready: socket {socket}, cores {cores:?}, {}",
        devices.join(", ")
    )
}
