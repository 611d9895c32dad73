//! Tables for the whole daemon: `[workers]`, `[limits]`, `[control]`, `[dpdk]` and `[capture]`.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use schemars::JsonSchema;
use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize, Serializer};
use toml::Spanned;

use super::{ByteSize, FileMode};

/// Behaviour of a worker without work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum IdlePolicy {
    /// Poll continuously: lowest latency, uses a whole core.
    Poll,
    /// Spin for a while, then sleep until a doorbell, a frame or a timer.
    Adaptive,
}

/// `[workers]`
#[derive(Debug, Clone, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct WorkersConfig {
    /// The cores that workers are pinned to, one worker each.
    #[schemars(with = "Vec<usize>")]
    pub cores: Spanned<Vec<usize>>,
    /// Behaviour of an idle worker.
    pub idle: IdlePolicy,
    /// Microseconds without work before an adaptive worker sleeps.
    pub spin_us: u32,
    /// Maximum exit latency, in microseconds, of the idle states of the workers' cores while siwd
    /// runs. 0: the cores do not halt; absent: the kernel's setting.
    pub resume_latency_us: Option<u32>,
    /// Restricts the system calls of workers.
    pub confine: bool,
}

impl Default for WorkersConfig {
    fn default() -> Self {
        WorkersConfig {
            cores: Spanned::new(0..0, vec![]),
            idle: IdlePolicy::Adaptive,
            spin_us: 50,
            resume_latency_us: None,
            confine: true,
        }
    }
}

/// `[limits]`: resources of one client, of all clients of a user (uid), and of all clients
/// together.
#[derive(Debug, Clone, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsConfig {
    /// Clients connected at once.
    #[serde(deserialize_with = "at_least_one")]
    pub clients: u32,
    /// Clients of one user connected at once.
    #[serde(deserialize_with = "at_least_one")]
    pub clients_per_user: u32,
    /// Queue pairs of one client; also the limit of its shared receive queues.
    #[serde(deserialize_with = "at_least_one")]
    pub queue_pairs_per_client: u32,
    /// Queue pairs of all clients of one user; also the limit of their shared receive queues.
    #[serde(deserialize_with = "at_least_one")]
    pub queue_pairs_per_user: u32,
    /// Completion queues of one client.
    #[serde(deserialize_with = "at_least_one")]
    pub completion_queues_per_client: u32,
    /// Completion queues of all clients of one user.
    #[serde(deserialize_with = "at_least_one")]
    pub completion_queues_per_user: u32,
    /// Memory regions and windows of one client.
    #[serde(deserialize_with = "at_least_one")]
    pub memory_regions_per_client: u32,
    /// Memory regions and windows of all clients of one user.
    #[serde(deserialize_with = "at_least_one")]
    pub memory_regions_per_user: u32,
    /// Bytes of arenas, queues, doorbells and siwd's own memory for one client, in total.
    pub memory_per_client: ByteSize,
    /// The same for all clients of one user; absent: three quarters of `memory`.
    pub memory_per_user: Option<ByteSize>,
    /// The same for all clients; absent: the memory of the machine.
    pub memory: Option<ByteSize>,
    /// Bytes of that memory that may be in hugepages, for all clients of one user; beyond it normal
    /// pages are used. Absent: half of the hugepages free after the daemon's start.
    pub hugepages_per_user: Option<ByteSize>,
    /// Sockets, pipes and shared memory objects that the daemon keeps open for one client.
    #[serde(deserialize_with = "at_least_one")]
    pub descriptors_per_client: u32,
    /// The same for all clients of one user; absent: half of the process's limit.
    pub descriptors_per_user: Option<u32>,
    /// Listeners of one client.
    #[serde(deserialize_with = "at_least_one")]
    pub listeners_per_client: u32,
    /// Listeners of all clients of one user.
    #[serde(deserialize_with = "at_least_one")]
    pub listeners_per_user: u32,
    /// Completion channels and connection-event channels of one client.
    #[serde(deserialize_with = "at_least_one")]
    pub event_channels_per_client: u32,
    /// The same for all clients of one user.
    #[serde(deserialize_with = "at_least_one")]
    pub event_channels_per_user: u32,
    /// Events queued in the daemon for a client that does not read them.
    #[serde(deserialize_with = "at_least_one")]
    pub events_per_client: u32,
    /// Latest events recorded of each queue pair, for `siwctl why`, also after its end; 0: none.
    #[serde(deserialize_with = "recorded_events")]
    pub recorded_events: u32,
    /// Connected and connecting queue pairs of all clients of one user; absent: half of
    /// `connections`.
    pub connections_per_user: Option<u32>,
    /// Connections on one worker, of all listeners of one user, that await an MPA request or the
    /// application's accept; absent: an eighth of `connections`.
    pub pending_connections_per_user: Option<u32>,
    /// Work requests in one queue.
    pub work_requests: u32,
    /// Entries in one completion queue.
    pub completions: u32,
    /// TCP connections of one worker on one device.
    #[serde(deserialize_with = "connections")]
    pub connections: u32,
}

impl Default for LimitsConfig {
    fn default() -> Self {
        LimitsConfig {
            clients: 4096,
            clients_per_user: 2048,
            queue_pairs_per_client: 102_400,
            queue_pairs_per_user: 204_800,
            completion_queues_per_client: 102_400,
            completion_queues_per_user: 204_800,
            memory_regions_per_client: 1_024_000,
            memory_regions_per_user: 2_048_000,
            memory_per_client: ByteSize(8 << 30),
            memory_per_user: None,
            memory: None,
            hugepages_per_user: None,
            descriptors_per_client: 16_384,
            descriptors_per_user: None,
            listeners_per_client: 4096,
            listeners_per_user: 8192,
            event_channels_per_client: 8192,
            event_channels_per_user: 16_384,
            events_per_client: 8192,
            recorded_events: 32,
            connections_per_user: None,
            pending_connections_per_user: None,
            work_requests: 32_768,
            completions: 3_276_800,
            connections: 100_000,
        }
    }
}

impl LimitsConfig {
    /// These limits with another value of one of them, as text: a number, a size, or `default`.
    ///
    /// # Errors
    /// There is no such limit, or the value is invalid.
    pub(crate) fn with_setting(&self, key: &str, value: &str) -> Result<LimitsConfig, String> {
        let mut table = toml::Table::try_from(self).map_err(|error| error.to_string())?;
        let value = value.trim();
        match (value, value.parse()) {
            ("default", _) => drop(table.remove(key)),
            (_, Ok(number)) => drop(table.insert(key.to_owned(), toml::Value::Integer(number))),
            (text, Err(_)) => drop(table.insert(key.to_owned(), text.into())),
        }
        let limits: Result<LimitsConfig, toml::de::Error> = table.try_into();
        limits.map_err(|error| format!("{key} {value}: {}", error.message().trim()))
    }

    /// Pending connections that one worker allows for all listeners of one user.
    pub(crate) fn pending_connections_of_user(&self) -> u32 {
        let share = (self.connections / 8).max(1);
        self.pending_connections_per_user.unwrap_or(share)
    }
}

/// Refuses a limit of 0, which is always a mistake.
fn at_least_one<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    match u32::deserialize(deserializer)? {
        0 => Err(de::Error::custom("0: at least 1 is needed")),
        number => Ok(number),
    }
}

/// Most events that are recorded of a queue pair.
const MAX_RECORDED_EVENTS: u32 = 256;

/// Events recorded of a queue pair.
fn recorded_events<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    match u32::deserialize(deserializer)? {
        number @ 0..=MAX_RECORDED_EVENTS => Ok(number),
        other => Err(de::Error::custom(format!(
            "{other} events: 0 to {MAX_RECORDED_EVENTS} are allowed"
        ))),
    }
}

/// Connections of one worker on one device.
fn connections<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    match u32::deserialize(deserializer)? {
        number @ 1..=MAX_CONNECTIONS => Ok(number),
        other => Err(de::Error::custom(format!(
            "{other} connections: 1 to {MAX_CONNECTIONS} are allowed"
        ))),
    }
}

/// Largest connection table of a TCP stack.
const MAX_CONNECTIONS: u32 = 1 << 24;

/// Writes a path that need not be UTF-8.
fn path_text<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}

/// Path of a Unix socket.
fn socket_path<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathBuf, D::Error> {
    let path = PathBuf::deserialize(deserializer)?;
    check_socket_path(&path).map_err(de::Error::custom)?;
    Ok(path)
}

/// Longest path of a Unix socket, without the NUL byte (unix(7)).
const MAX_SOCKET_PATH: usize = 107;

/// The path of the control socket is empty or too long.
#[derive(Debug, thiserror::Error)]
#[error(
    "control socket {0:?}: {len} bytes; the path of a Unix socket has 1 to {MAX_SOCKET_PATH}",
    len = .0.as_os_str().len()
)]
pub struct SocketPathError(PathBuf);

/// Checks that a Unix socket can have this path.
pub fn check_socket_path(path: &Path) -> Result<(), SocketPathError> {
    match path.as_os_str().len() {
        1..=MAX_SOCKET_PATH => Ok(()),
        _ => Err(SocketPathError(path.to_owned())),
    }
}

/// Milliseconds from a client's connect to its HELLO.
fn hello_timeout<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    match u32::deserialize(deserializer)? {
        millis @ 10..=600_000 => Ok(millis),
        other => Err(de::Error::custom(format!(
            "{other} milliseconds: 10 to 600000 are allowed"
        ))),
    }
}

/// Milliseconds between two updates of the counters in files.
fn sysfs_interval<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    match u32::deserialize(deserializer)? {
        millis @ 100..=60_000 => Ok(Some(millis)),
        other => Err(de::Error::custom(format!(
            "{other} milliseconds: 100 to 60000 are allowed"
        ))),
    }
}

/// Users whose registered memory workers may access although its page faults can block: files of the
/// client, into which it can punch holes, and the rest of its address space, which workers copy with
/// system calls (FUSE, userfaultfd).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ProcessMemoryPolicy {
    /// None: registration of memory that has to be copied is refused. Files of root and the daemon's own
    /// user are mapped, as with `Trusted`.
    Never,
    /// Root and the daemon's own user, in the daemon's user and pid namespaces: not in containers.
    Trusted,
    /// All users.
    All,
}

/// `[control]`
#[derive(Debug, Clone, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ControlSocketConfig {
    /// Path of the Unix socket that clients connect to; by default
    /// [`siw_shm::control::default_socket`].
    #[serde(deserialize_with = "socket_path", serialize_with = "path_text")]
    pub socket: PathBuf,
    /// Permission bits of the socket, as octal text ("0660").
    pub mode: FileMode,
    /// Group that owns the socket; absent means the daemon's.
    #[schemars(with = "Option<String>")]
    pub group: Option<Spanned<String>>,
    /// Group whose members can read the counters of all clients, like root and the daemon's own
    /// user in the daemon's user and pid namespaces.
    #[schemars(with = "Option<String>")]
    pub operators: Option<Spanned<String>>,
    /// Users whose memory is copied with system calls where it cannot be shared.
    pub process_memory: ProcessMemoryPolicy,
    /// Milliseconds after which a connection without a HELLO is closed.
    #[serde(deserialize_with = "hello_timeout")]
    pub hello_timeout_ms: u32,
    /// Milliseconds between two updates of the counters in the files next to the socket; absent: there
    /// are none.
    #[serde(deserialize_with = "sysfs_interval")]
    pub sysfs_counters_ms: Option<u32>,
}

impl ControlSocketConfig {
    /// Time after which a connection without a HELLO is closed.
    pub(crate) fn hello_timeout(&self) -> Duration {
        Duration::from_millis(self.hello_timeout_ms.into())
    }

    /// Time between two updates of the counters in the files next to the socket.
    pub(crate) fn sysfs_interval(&self) -> Option<Duration> {
        let millis = self.sysfs_counters_ms?;
        Some(Duration::from_millis(millis.into()))
    }
}

impl Default for ControlSocketConfig {
    fn default() -> Self {
        ControlSocketConfig {
            socket: siw_shm::control::default_socket(),
            mode: FileMode(0o660),
            group: None,
            operators: None,
            process_memory: ProcessMemoryPolicy::Trusted,
            hello_timeout_ms: 5000,
            sysfs_counters_ms: None,
        }
    }
}

/// Use of hugepages for the daemon's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum HugepagePolicy {
    /// Use them if enough are free, otherwise normal pages with a warning.
    Auto,
    /// Refuse to start without them.
    Require,
    /// Never use them.
    Never,
}

/// `[dpdk]`
#[derive(Debug, Clone, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DpdkConfig {
    /// Hugepage policy for packet buffers and arenas.
    pub hugepages: HugepagePolicy,
    /// Total number of packet buffers; DPDK may round it up.
    #[serde(deserialize_with = "at_least_one")]
    pub buffers: u32,
    /// EAL log level: emergency .. debug.
    pub log: EalLog,
    /// Addresses that NICs use for DMA.
    pub iova: IovaSetting,
    /// Answer DPDK's telemetry tools (dpdk-telemetry.py).
    pub telemetry: bool,
    /// Additional EAL arguments, appended to siwd's own.
    #[schemars(with = "Vec<String>")]
    pub eal_args: Spanned<Vec<String>>,
}

/// Addresses that NICs use for DMA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum IovaSetting {
    /// Physical addresses if one of the NICs has no IOMMU, virtual addresses otherwise.
    Auto,
    /// Virtual addresses, translated by an IOMMU.
    Va,
    /// Physical addresses; registered memory is then never sent by reference.
    Pa,
}

/// Long EAL arguments that siwd sets itself, and those with which DPDK ends the process.
const OWN_EAL_ARGS: [&str; 15] = [
    "lcores",
    "file-prefix",
    "log-level",
    "socket-mem",
    "in-memory",
    "single-file-segments",
    "no-huge",
    "no-shconf",
    "no-pci",
    "no-telemetry",
    "iova-mode",
    "proc-type",
    "allow",
    "block",
    "help",
];
/// The same of one letter.
const OWN_EAL_LETTERS: &str = "lcmabh";

impl DpdkConfig {
    /// Refuses arguments that contradict siwd's own.
    pub(super) fn check_settings(&self) -> Result<(), (Range<usize>, String)> {
        let wrong = |arg: &&String| is_own_eal_arg(arg) || arg.contains('\0');
        match self.eal_args.get_ref().iter().find(wrong) {
            Some(arg) => Err((
                self.eal_args.span(),
                format!(
                    "eal_args {arg:?}: siwd sets this argument itself, or cannot run with it; see buffers, hugepages, iova, log, [workers] cores, and pci and devargs of a device"
                ),
            )),
            None => Ok(()),
        }
    }
}

/// Returns true for an argument of [`OWN_EAL_ARGS`], also abbreviated (getopt_long(3)), and for one of
/// [`OWN_EAL_LETTERS`], also with its value attached.
fn is_own_eal_arg(arg: &str) -> bool {
    let name = arg.split('=').next().unwrap_or_default();
    match (name.strip_prefix("--"), name.strip_prefix('-')) {
        (Some(long), _) => !long.is_empty() && OWN_EAL_ARGS.iter().any(|own| own.starts_with(long)),
        (None, Some(short)) => short
            .chars()
            .next()
            .is_some_and(|letter| OWN_EAL_LETTERS.contains(letter)),
        (None, None) => false,
    }
}

impl Default for DpdkConfig {
    fn default() -> Self {
        DpdkConfig {
            hugepages: HugepagePolicy::Require,
            buffers: 16_384,
            log: EalLog::Error,
            iova: IovaSetting::Auto,
            telemetry: false,
            eal_args: Spanned::new(0..0, vec![]),
        }
    }
}

/// DPDK's own log level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum EalLog {
    /// Errors only.
    Error,
    /// Warnings too.
    Warning,
    /// Notices too.
    Notice,
    /// Information too.
    Info,
    /// Everything.
    Debug,
}

/// `[capture]`
#[derive(Debug, Clone, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CaptureConfig {
    /// The pcapng file to write (replaced at start).
    #[serde(serialize_with = "path_text")]
    pub file: PathBuf,
    /// Stop writing after this many bytes.
    #[serde(default = "default_capture_limit")]
    pub limit: ByteSize,
}

impl CaptureConfig {
    /// A capture to this file; without a limit, of the default size.
    pub fn new(file: PathBuf, limit: Option<ByteSize>) -> CaptureConfig {
        CaptureConfig {
            file,
            limit: limit.unwrap_or_else(default_capture_limit),
        }
    }
}

fn default_capture_limit() -> ByteSize {
    ByteSize(256 << 20)
}
