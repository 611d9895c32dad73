//! The daemon's requirements on its host, checked before anything is changed: cores, hugepages, and
//! the readiness protocol of the service manager.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::unistd::{AccessFlags, Gid, Pid};

use tracing_subscriber::EnvFilter;
use tracing_subscriber::Layer;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::IdlePolicy;
use crate::control::account::quotas::HostCapacity;
use crate::log_limit::LogLimit;

/// A host resource is missing; the text says which, and the command that provides it.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The core does not exist or the daemon may not run there.
    #[error(
        "core {core} cannot be used: this process may run on cores {allowed}; change [workers] cores, or start siwd with `taskset -c {core} siwd ...`"
    )]
    NoSuchCore {
        /// The core asked for.
        core: usize,
        /// The cores allowed.
        allowed: String,
    },
    /// Another daemon polls on the core.
    #[error(
        "core {core} is busy: siwd process {holder} has it and one of the two polls; name another core in [workers] cores, or set idle = \"adaptive\" in both"
    )]
    BusyCore {
        /// The core.
        core: usize,
        /// Process id of the holder, from its lock file.
        holder: String,
    },
    /// Another daemon has the NIC.
    #[error(
        "{address} is in use: siwd process {holder} has it; one NIC serves one daemon, so stop that one or name another NIC"
    )]
    BusyNic {
        /// Its PCI address.
        address: String,
        /// Process id of the holder, from its lock file.
        holder: String,
    },
    /// Another daemon has the interface.
    #[error(
        "interface {interface} is in use: siwd process {holder} has it; one interface serves one daemon, so stop that one or name another interface"
    )]
    BusyInterface {
        /// Its name.
        interface: String,
        /// Process id of the holder, from its lock file.
        holder: String,
    },
    /// Another daemon has the socket of a vhost device.
    #[error(
        "socket {socket} is in use: siwd process {holder} has it; stop that one or name another socket"
    )]
    BusySocket {
        /// Its path.
        socket: String,
        /// Process id of the holder, from its lock file.
        holder: String,
    },
    /// Another process has the socket of a vhost device.
    #[error("{0}")]
    ServedSocket(String),
    /// The daemon may open too few files for its own use.
    #[error(
        "siwd may open {limit} files, and needs {needed} for itself: set LimitNOFILE= of the unit, or ulimit -Hn, to 65536"
    )]
    TooFewFiles {
        /// The hard limit of open files.
        limit: u64,
        /// Open files of a daemon without clients, at most.
        needed: u64,
    },
    /// The machine has too little memory for the packet buffers.
    #[error(
        "[dpdk] buffers need {needed_mb} MiB of memory, and {available_mb} MiB are available: lower buffers, or set hugepages = \"require\" and reserve hugepages"
    )]
    TooLittleMemory {
        /// MiB that DPDK is given.
        needed_mb: u64,
        /// MiB that the kernel can provide.
        available_mb: u64,
    },
    /// The idle states of a core cannot be limited.
    #[error(
        "core {core}: its idle states cannot be limited: {path}: {source}; this needs root, a writable /sys (often read-only in a container), and a kernel with PM QoS; otherwise leave resume_latency_us out of [workers]"
    )]
    ResumeLatency {
        /// The core.
        core: usize,
        /// The file of its limit.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// The lock file of a core or a NIC cannot be used.
    #[error(
        "lock {path}: {source}; make the folder writable for this user, or set XDG_RUNTIME_DIR to a folder of this user"
    )]
    Lock {
        /// The lock file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
}

/// Cores that this process may use.
pub fn allowed_cores() -> Vec<usize> {
    let Ok(set) = sched_getaffinity(Pid::from_raw(0)) else {
        return vec![0];
    };
    (0..CpuSet::count())
        .filter(|core| set.is_set(*core).unwrap_or(false))
        .collect()
}

/// Pins the calling thread to one core.
pub fn pin_thread_to(core: usize) -> Result<(), HostError> {
    let mut set = CpuSet::new();
    set.set(core)
        .and_then(|()| sched_setaffinity(Pid::from_raw(0), &set))
        .map_err(|_| no_such_core(core))
}

/// Keeps the calling thread off these cores, if it may run on others.
pub fn avoid_cores(cores: &[usize]) {
    let mut others = CpuSet::new();
    let allowed = allowed_cores();
    let free = allowed.iter().filter(|core| !cores.contains(core));
    if free.filter(|core| others.set(**core).is_ok()).count() > 0 {
        let _ = sched_setaffinity(Pid::from_raw(0), &others);
    }
}

fn no_such_core(core: usize) -> HostError {
    let allowed: Vec<String> = allowed_cores().iter().map(ToString::to_string).collect();
    HostError::NoSuchCore {
        core,
        allowed: allowed.join(","),
    }
}

/// The claim of one worker on its core, exclusive if the worker polls, shared if it sleeps; or the
/// claim of the daemon on a NIC.
pub struct HostClaim {
    path: PathBuf,
    #[allow(dead_code, reason = "held for its lock")]
    lock: Option<Flock<File>>,
}

impl HostClaim {
    /// Returns true if this is the lock with that path.
    pub fn is_at(&self, path: &Path) -> bool {
        self.path == path
    }
}

/// Purpose of a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockUse {
    /// Keep it while the daemon runs; the lock file names this process.
    Hold,
    /// Find out whether it is free; the lock file stays as it is.
    Check,
}

/// Folder of the locks of all daemons of the machine that may write there.
const MACHINE_FOLDER: &str = "/run/siwd";

/// Folder of the locks of cores and NICs: one for the machine, or one of a user who may not write
/// there.
pub fn lock_folder() -> PathBuf {
    let machine = PathBuf::from(MACHINE_FOLDER);
    if fs::create_dir_all(&machine).is_ok()
        && nix::unistd::access(&machine, AccessFlags::W_OK).is_ok()
    {
        return machine;
    }
    // As for the socket, a path that is not absolute counts as none.
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    match runtime.filter(|folder| folder.is_absolute()) {
        Some(folder) => folder.join("siwd"),
        // All users may write there: a folder of one name could be another user's.
        None => std::env::temp_dir().join(format!("siwd-{}", nix::unistd::geteuid())),
    }
}

/// Creates the folder of the locks, if it is missing, for this user alone to write. A folder of another
/// user, who could replace the files, is refused.
fn make_lock_folder(folder: &Path) -> Result<(), HostError> {
    let lock_error = |source| HostError::Lock {
        path: folder.display().to_string(),
        source,
    };
    let mut builder = fs::DirBuilder::new();
    let made = builder.recursive(true).mode(0o755).create(folder);
    made.map_err(lock_error)?;
    let found = folder.symlink_metadata().map_err(lock_error)?;
    let owner = found.uid();
    let is_ours = owner == nix::unistd::geteuid().as_raw() || folder == Path::new(MACHINE_FOLDER);
    if !found.is_dir() || !is_ours {
        let why = "it is a symbolic link, or another user's";
        return Err(lock_error(std::io::Error::other(why)));
    }
    Ok(())
}

/// Checks that this process may run on these cores.
///
/// # Errors
/// [`HostError::NoSuchCore`] with the allowed cores.
pub fn check_cores(cores: &[usize]) -> Result<(), HostError> {
    let allowed = allowed_cores();
    match cores.iter().find(|core| !allowed.contains(core)) {
        Some(core) => Err(no_such_core(*core)),
        None => Ok(()),
    }
}

/// The id of a group by its name.
///
/// # Errors
/// The group does not exist; the text says how to create it.
pub fn find_group(name: &str) -> Result<Gid, String> {
    let found = nix::unistd::Group::from_name(name).ok().flatten();
    found
        .map(|group| group.gid)
        .ok_or_else(|| format!("group {name:?} does not exist; create it with: groupadd {name}"))
}

/// Claims every core for this process.
///
/// # Errors
/// [`HostError::NoSuchCore`] or [`HostError::BusyCore`]; nothing is held then.
pub fn claim_cores(
    folder: &Path,
    cores: &[usize],
    idle: IdlePolicy,
    purpose: LockUse,
) -> Result<Vec<HostClaim>, HostError> {
    check_cores(cores)?;
    make_lock_folder(folder)?;
    cores
        .iter()
        .map(|core| claim_core(folder, *core, idle, purpose))
        .collect()
}

fn claim_core(
    folder: &Path,
    core: usize,
    idle: IdlePolicy,
    purpose: LockUse,
) -> Result<HostClaim, HostError> {
    let how = match idle {
        IdlePolicy::Poll => FlockArg::LockExclusiveNonblock,
        IdlePolicy::Adaptive => FlockArg::LockSharedNonblock,
    };
    lock_for_process(&folder.join(format!("core-{core}.lock")), how, purpose)?
        .map_err(|holder| HostError::BusyCore { core, holder })
}

/// Claims a NIC for this process: not every user-space driver refuses a second user.
///
/// # Errors
/// [`HostError::BusyNic`].
pub fn claim_nic(folder: &Path, address: &str, purpose: LockUse) -> Result<HostClaim, HostError> {
    make_lock_folder(folder)?;
    let how = FlockArg::LockExclusiveNonblock;
    let path = folder.join(format!("nic-{address}.lock"));
    lock_for_process(&path, how, purpose)?.map_err(|holder| HostError::BusyNic {
        address: address.to_owned(),
        holder,
    })
}

/// Claims an interface of the kernel in this network namespace for this process: two daemons on it
/// would answer each other's peers.
///
/// # Errors
/// [`HostError::BusyInterface`].
pub fn claim_interface(
    folder: &Path,
    interface: &str,
    purpose: LockUse,
) -> Result<HostClaim, HostError> {
    make_lock_folder(folder)?;
    let path = interface_lock(folder, interface);
    let how = FlockArg::LockExclusiveNonblock;
    lock_for_process(&path, how, purpose)?.map_err(|holder| HostError::BusyInterface {
        interface: interface.to_owned(),
        holder,
    })
}

/// Path of the lock of an interface in this network namespace.
pub fn interface_lock(folder: &Path, interface: &str) -> PathBuf {
    let namespace = fs::metadata("/proc/thread-self/ns/net").map_or(0, |found| found.ino());
    folder.join(format!("interface-{namespace}-{interface}.lock"))
}

/// Claims the socket of a vhost device for this process: DPDK replaces the file of a socket in use, and
/// the first daemon would wait for its peer in vain.
///
/// # Errors
/// [`HostError::BusySocket`].
pub fn claim_vhost_socket(
    folder: &Path,
    socket: &Path,
    purpose: LockUse,
) -> Result<HostClaim, HostError> {
    make_lock_folder(folder)?;
    let parent = socket.parent().and_then(|parent| fs::metadata(parent).ok());
    let (device, inode) = parent.map_or((0, 0), |parent| (parent.dev(), parent.ino()));
    let file = socket.file_name().unwrap_or_default().to_string_lossy();
    let name = format!("vhost-{device}-{inode}-{file}.lock");
    let how = FlockArg::LockExclusiveNonblock;
    lock_for_process(&folder.join(name), how, purpose)?.map_err(|holder| HostError::BusySocket {
        socket: socket.display().to_string(),
        holder,
    })
}

/// Waits until no other daemon is between its count of free hugepages and their allocation. `None`:
/// the lock cannot be used, and the start continues without it.
pub fn lock_hugepages(folder: &Path) -> Option<HostClaim> {
    make_lock_folder(folder).ok()?;
    let path = folder.join("hugepages.lock");
    let lock = lock_for_process(&path, FlockArg::LockExclusive, LockUse::Hold);
    lock.ok()?.ok()
}

/// Checks that a file can be created in a folder, which is created if it is missing; leaves nothing
/// behind.
///
/// # Errors
/// The cause.
pub fn check_folder(folder: &Path) -> io::Result<()> {
    let mut created = Vec::new();
    let mut missing = folder;
    while !missing.as_os_str().is_empty() && !missing.exists() {
        created.push(missing);
        match missing.parent() {
            Some(parent) => missing = parent,
            None => break,
        }
    }
    let outcome = fs::create_dir_all(folder).and_then(|()| {
        let probe = folder.join(format!(".siwd-check-{}", std::process::id()));
        File::create_new(&probe)?;
        fs::remove_file(probe)
    });
    for folder in created {
        let _ = fs::remove_dir(folder);
    }
    outcome
}

/// Mode of a file that is for this daemon alone.
pub(crate) const OWN_FILE: u32 = 0o600;

/// Takes a lock, or returns the process that holds it.
fn lock_for_process(
    path: &Path,
    how: FlockArg,
    purpose: LockUse,
) -> Result<Result<HostClaim, String>, HostError> {
    let lock_error = |source| HostError::Lock {
        path: path.display().to_string(),
        source,
    };
    let held = purpose == LockUse::Hold;
    let claim = |lock| HostClaim {
        path: path.to_owned(),
        lock,
    };
    if !held && !path.exists() {
        return Ok(Ok(claim(None)));
    }
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(held)
        .truncate(false)
        .mode(OWN_FILE)
        .custom_flags(nix::libc::O_NOFOLLOW)
        .open(path)
        .map_err(lock_error)?;
    // A file of an older version: whoever may open it may hold its lock.
    file.set_permissions(fs::Permissions::from_mode(OWN_FILE))
        .map_err(lock_error)?;
    match Flock::lock(file, how) {
        Ok(lock) if !held => Ok(Ok(claim(Some(lock)))),
        Ok(mut lock) => {
            let _ = lock.set_len(0);
            let _ = lock.rewind();
            let _ = write!(*lock, "{}", std::process::id());
            Ok(Ok(claim(Some(lock))))
        }
        Err((mut file, nix::errno::Errno::EWOULDBLOCK)) => {
            let mut holder = String::new();
            let _ = file.read_to_string(&mut holder);
            Ok(Err(holder))
        }
        Err((_, error)) => Err(lock_error(error.into())),
    }
}

/// Bytes in free hugepages of the default size that are not reserved.
pub fn free_hugepage_bytes() -> u64 {
    let Ok(text) = fs::read_to_string("/proc/meminfo") else {
        return 0;
    };
    let field = |name: &str| -> u64 {
        text.lines()
            .find_map(|line| line.strip_prefix(name))
            .and_then(|line| line.split_whitespace().next())
            .and_then(|number| number.parse().ok())
            .unwrap_or(0)
    };
    let free = field("HugePages_Free:").saturating_sub(field("HugePages_Rsvd:"));
    free * field("Hugepagesize:") * 1024
}

/// Sets the mode of new files and folders apart from whoever starts the daemon: clients of all users
/// must reach the socket's folder, and what is not for them has a mode of its own (`OWN_FILE`).
pub fn set_own_umask() {
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o022));
}

/// Leaves memory shared with others out of core dumps: registered memory, queues and packet buffers
/// hold the data of clients, and make a dump as long as they are. Private anonymous memory and ELF
/// headers remain (core(5)).
pub fn keep_payload_out_of_dumps() {
    const PRIVATE_AND_HEADERS: &str = "0x11";
    if let Err(error) = std::fs::write("/proc/self/coredump_filter", PRIVATE_AND_HEADERS) {
        tracing::debug!("core dumps may contain clients' data: {error}");
    }
}

/// Raises the limit of open files to the hard limit. Returns the limit in force.
pub fn raise_file_limit() -> u64 {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else {
        return 1024;
    };
    match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
        Ok(()) => hard,
        Err(error) => {
            tracing::warn!("siwd may open only {soft} files: {error}");
            soft
        }
    }
}

/// Checks that this process may open the files of a daemon with this number of workers and devices.
///
/// # Errors
/// The hard limit, which a start makes the limit in force, is lower.
pub fn check_file_limit(workers: usize, devices: usize) -> Result<(), HostError> {
    /// DPDK, the control socket and its threads.
    const BASE: u64 = 64;
    const PER_WORKER: u64 = 8;
    /// Sockets and interrupts of a port, netlink, sysfs files.
    const PER_DEVICE: u64 = 16;
    let needed = BASE + PER_WORKER * workers as u64 + PER_DEVICE * devices as u64;
    match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((_, limit)) if limit < needed => Err(HostError::TooFewFiles { limit, needed }),
        _ => Ok(()),
    }
}

/// Returns whether this process may lock any amount of memory.
pub fn may_lock_memory() -> bool {
    let is_unlimited =
        getrlimit(Resource::RLIMIT_MEMLOCK).is_ok_and(|(soft, _)| soft == nix::libc::RLIM_INFINITY);
    is_unlimited || dpdk::Capability::IpcLock.is_effective() == Some(true)
}

/// Warning about memory of clients that the kernel may swap out.
pub fn swap_warning() -> Option<String> {
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    // The first line has the names of the columns.
    let has_swap = swaps.lines().count() > 1;
    (has_swap && !may_lock_memory()).then(|| {
        "the kernel may swap out memory of clients, and workers wait when they access it: \
         set LimitMEMLOCK=infinity (ulimit -l unlimited), or turn swap off"
            .to_owned()
    })
}

/// Capacity of the host that is left for clients after the daemon has taken its own part.
/// `nic_arenas`: number of memory regions that NICs can still be given, if they read any.
pub fn client_capacity(
    file_limit: u64,
    memory_keys: usize,
    workers: usize,
    nic_arenas: Option<u64>,
) -> HostCapacity {
    let entries = |folder: &str| fs::read_dir(folder).map_or(0, Iterator::count) as u64;
    let lines = |file: &str| {
        let text = fs::read_to_string(file).unwrap_or_default();
        text.lines().count() as u64
    };
    let files = file_limit.saturating_sub(entries("/proc/self/fd"));
    let max_mappings = fs::read_to_string("/proc/sys/vm/max_map_count")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(DEFAULT_MAPPINGS);
    let mappings = max_mappings.saturating_sub(lines("/proc/self/maps"));
    // Each mapping of a client's memory is guarded as well.
    let guarded = siw_shm::fault_guard::MAX_GUARDED as u64;
    let left = files.min(mappings).min(guarded);
    HostCapacity {
        memory: meminfo_bytes("MemTotal:"),
        hugepages: free_hugepage_bytes(),
        // Keeps a reserve for descriptors that the daemon opens later: captures, drivers, refused
        // sockets.
        descriptors: left - (left / 4).min(SPARE_DESCRIPTORS),
        memory_keys: memory_keys as u64,
        workers: workers as u64,
        nic_arenas,
    }
}

/// MiB that the kernel can provide without swapping; `None` if it does not tell.
pub fn available_memory_mb() -> Option<u64> {
    match meminfo_bytes("MemAvailable:") {
        0 => None,
        bytes => Some(bytes >> 20),
    }
}

/// Linux's default of `vm.max_map_count`.
const DEFAULT_MAPPINGS: u64 = 65_530;
/// Descriptors that are reserved for the daemon.
const SPARE_DESCRIPTORS: u64 = 512;

/// Bytes of a field of /proc/meminfo that is in kB. Read without the crate `procfs`: no parser of the
/// daemon or the tools would become shorter, as each takes one or two fields.
fn meminfo_bytes(name: &str) -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kilobytes = text
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .and_then(|line| line.split_whitespace().next())
        .and_then(|number| number.parse::<u64>().ok());
    kilobytes.unwrap_or(0) * 1024
}

/// Reports a state to the service manager (sd_notify protocol) if there is one.
pub fn notify_service_manager(state: &str) {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    let Ok(socket) = UnixDatagram::unbound() else {
        return;
    };
    let sent = match path.to_string_lossy().strip_prefix('@') {
        Some(name) => {
            use std::os::linux::net::SocketAddrExt;
            std::os::unix::net::SocketAddr::from_abstract_name(name)
                .and_then(|address| socket.send_to_addr(state.as_bytes(), &address))
        }
        None => socket.send_to(state.as_bytes(), &path),
    };
    if let Err(error) = sent {
        tracing::warn!("{state} could not be reported to the service manager: {error}");
    }
}

/// Interval in which the service manager expects a sign of life (`WatchdogSec` of systemd,
/// sd_watchdog_enabled(3)); `None` without a watchdog.
pub fn watchdog_interval() -> Option<Duration> {
    let number = |name| std::env::var(name).ok()?.parse::<u64>().ok();
    let for_us = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
    let micros = number("WATCHDOG_USEC").filter(|micros| *micros > 0)?;
    for_us.then_some(Duration::from_micros(micros))
}

/// Makes a panic in any thread end the process, with the panic's message, the thread's name and status
/// 101. A daemon that lost a worker would look healthy and not serve its clients.
pub fn end_process_on_panic() {
    let print_panic = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        print_panic(panic);
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("without a name");
        eprintln!("siwd: the thread {name} failed: siwd ends");
        dpdk::exit_process(PANIC_STATUS)
    }));
}

/// Exit status after a panic, as of a Rust program whose main thread panics.
const PANIC_STATUS: i32 = 101;

/// Format of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// Lines for people.
    Text,
    /// A JSON object on each line, with the fields of the message.
    Json,
}

/// Sends the log at `levels`, the argument of `--log`, to stderr. May be called once per process.
pub fn log_to_stderr(levels: &str, format: LogFormat) -> Result<(), String> {
    let filter = parse_filter(levels).map_err(|error| format!("--log {error}"))?;
    let (filter, handle) = tracing_subscriber::reload::Layer::new(filter);
    let _ = LOG_FILTER.set(Box::new(move |filter| {
        handle.reload(filter).map_err(|error| error.to_string())
    }));
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()));
    let lines = match format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.with_ansi(false).json().flatten_event(true).boxed(),
    };
    tracing_subscriber::registry()
        .with(lines)
        .with(filter)
        .with(LogLimit::default())
        .init();
    Ok(())
}

/// Replaces the filter of the process's log, like the log itself one for the process.
type ReplaceFilter = dyn Fn(EnvFilter) -> Result<(), String> + Send + Sync;
static LOG_FILTER: OnceLock<Box<ReplaceFilter>> = OnceLock::new();

fn parse_filter(levels: &str) -> Result<EnvFilter, String> {
    EnvFilter::try_new(levels)
        .map_err(|error| format!("{levels:?}: {error}; write error, warn, info, debug or trace"))
}

/// Changes the filter of the log.
///
/// # Errors
/// The filter is invalid, or this process does not log by [`log_to_stderr`].
pub fn set_log_filter(levels: &str) -> Result<(), String> {
    let filter = parse_filter(levels)?;
    let replace = LOG_FILTER.get().ok_or("this process has no log")?;
    replace(filter)
}

/// The NUMA node of a core, if the kernel reports it.
pub fn numa_node_of_core(core: usize) -> Option<u32> {
    let folder = std::fs::read_dir(format!("/sys/devices/system/cpu/cpu{core}")).ok()?;
    folder.flatten().find_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        name.strip_prefix("node")?.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_are_for_the_daemon_alone_and_follow_no_symbolic_link() {
        let folder = tempfile::tempdir().unwrap();
        let precious = folder.path().join("precious");
        fs::write(&precious, "text").unwrap();
        let locks = folder.path().join("locks");
        fs::create_dir(&locks).unwrap();
        std::os::unix::fs::symlink(&precious, locks.join("nic-0000:03:00.0.lock")).unwrap();
        let refused = claim_nic(&locks, "0000:03:00.0", LockUse::Hold)
            .err()
            .unwrap();
        assert!(matches!(refused, HostError::Lock { .. }), "{refused}");
        assert_eq!(fs::read(&precious).unwrap(), b"text");
        // A lock that an older version left readable for all.
        let open_to_all = locks.join("nic-0000:03:00.1.lock");
        fs::write(&open_to_all, "").unwrap();
        fs::set_permissions(&open_to_all, fs::Permissions::from_mode(0o666)).unwrap();
        let _claim = claim_nic(&locks, "0000:03:00.1", LockUse::Hold).unwrap();
        let mode = fs::metadata(&open_to_all).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let linked = folder.path().join("linked");
        std::os::unix::fs::symlink(&locks, &linked).unwrap();
        assert!(claim_nic(&linked, "0000:03:00.2", LockUse::Hold).is_err());
    }

    #[test]
    fn a_nic_serves_one_daemon() {
        let folder = tempfile::tempdir().unwrap();
        let first = claim_nic(folder.path(), "0000:03:00.0", LockUse::Hold).unwrap();
        claim_nic(folder.path(), "0000:03:00.1", LockUse::Hold).unwrap();
        let error = claim_nic(folder.path(), "0000:03:00.0", LockUse::Hold)
            .err()
            .unwrap();
        let expected = format!(
            "0000:03:00.0 is in use: siwd process {}",
            std::process::id()
        );
        assert!(error.to_string().starts_with(&expected), "{error}");
        drop(first);
        claim_nic(folder.path(), "0000:03:00.0", LockUse::Hold).unwrap();
    }

    #[test]
    fn a_core_outside_the_affinity_is_refused_with_the_allowed_ones() {
        let dir = tempfile::tempdir().unwrap();
        let e = claim_cores(dir.path(), &[1000], IdlePolicy::Poll, LockUse::Hold)
            .err()
            .unwrap()
            .to_string();
        assert!(
            e.contains("core 1000") && e.contains("may run on cores"),
            "{e}"
        );
    }

    #[test]
    fn a_polled_core_is_busy_for_a_second_daemon_and_says_who_has_it() {
        let dir = tempfile::tempdir().unwrap();
        let core = allowed_cores()[0];
        let first = claim_cores(dir.path(), &[core], IdlePolicy::Poll, LockUse::Hold).unwrap();
        let e = claim_cores(dir.path(), &[core], IdlePolicy::Adaptive, LockUse::Hold)
            .err()
            .unwrap()
            .to_string();
        assert!(e.contains(&std::process::id().to_string()), "{e}");
        drop(first);
        let a = claim_cores(dir.path(), &[core], IdlePolicy::Adaptive, LockUse::Hold).unwrap();
        let b = claim_cores(dir.path(), &[core], IdlePolicy::Adaptive, LockUse::Hold).unwrap();
        drop((a, b));
    }
}
