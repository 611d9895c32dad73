//! The tables of the daemon as a whole: `[workers]`, `[limits]`, `[control]`, `[dpdk]` and
//! `[capture]`.

use std::ops::Range;
use std::path::PathBuf;

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};
use toml::Spanned;

use super::{ByteSize, FileMode};

/// How a worker behaves when nothing is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum IdlePolicy {
    /// Poll without end: lowest latency, one whole core.
    Poll,
    /// Spin for a while, then sleep until a doorbell, a frame or a timer.
    Adaptive,
}

/// `[workers]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WorkersConfig {
    /// The cores that workers are pinned to, one worker each.
    pub cores: Spanned<Vec<usize>>,
    /// What a worker does when idle.
    pub idle: IdlePolicy,
    /// Microseconds without work before an adaptive worker sleeps.
    pub spin_us: u32,
    /// Microseconds that the workers' cores may take to leave an idle state, while siwd runs; 0: they do
    /// not halt; absent: as the kernel has it.
    pub resume_latency_us: Option<u32>,
}

impl Default for WorkersConfig {
    fn default() -> Self {
        WorkersConfig {
            cores: Spanned::new(0..0, vec![]),
            idle: IdlePolicy::Adaptive,
            spin_us: 50,
            resume_latency_us: None,
        }
    }
}

/// `[limits]`: what a client, all clients of a user (uid), and all clients together may hold.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsConfig {
    /// Clients connected at once.
    #[serde(deserialize_with = "at_least_one")]
    pub clients: u32,
    /// Of these, clients of one user.
    #[serde(deserialize_with = "at_least_one")]
    pub clients_per_user: u32,
    /// Queue pairs of one client, and as many shared receive queues.
    #[serde(deserialize_with = "at_least_one")]
    pub queue_pairs_per_client: u32,
    /// The same for all clients of one user.
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
    /// Bytes of arenas, queues and doorbells of one client, together.
    pub memory_per_client: ByteSize,
    /// The same for all clients of one user; absent: three quarters of `memory`.
    pub memory_per_user: Option<ByteSize>,
    /// The same for all clients; absent: as much as the machine has.
    pub memory: Option<ByteSize>,
    /// Of that memory, bytes in hugepages of all clients of one user, beyond which normal pages are
    /// used; absent: half of what is free when the daemon has started.
    pub hugepages_per_user: Option<ByteSize>,
    /// Sockets, pipes and pieces of shared memory that the daemon keeps open for one client.
    #[serde(deserialize_with = "at_least_one")]
    pub descriptors_per_client: u32,
    /// The same for all clients of one user; absent: half of what the process may have.
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
    /// Events that wait in the daemon for a client that does not read them.
    #[serde(deserialize_with = "at_least_one")]
    pub events_per_client: u32,
    /// Connected and connecting queue pairs of all clients of one user; absent: half of
    /// `connections`.
    pub connections_per_user: Option<u32>,
    /// Connections that wait in one worker for an MPA request, or for an application to accept them,
    /// of all listeners of one user; absent: an eighth of `connections`.
    pub pending_connections_per_user: Option<u32>,
    /// Work requests in one queue.
    pub work_requests: u32,
    /// Entries in one completion queue.
    pub completions: u32,
    /// TCP connections of one worker on one device.
    #[serde(deserialize_with = "at_least_one")]
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
            connections_per_user: None,
            pending_connections_per_user: None,
            work_requests: 32_768,
            completions: 3_276_800,
            connections: 100_000,
        }
    }
}

impl LimitsConfig {
    /// Connections of one user's listeners that may wait in one worker.
    pub(crate) fn pending_connections_of_user(&self) -> u32 {
        let share = (self.connections / 8).max(1);
        self.pending_connections_per_user.unwrap_or(share)
    }
}

/// A limit that nobody could live with is a mistake.
fn at_least_one<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    match u32::deserialize(deserializer)? {
        0 => Err(de::Error::custom("0: at least 1 is needed")),
        number => Ok(number),
    }
}

/// Milliseconds that a client may take for its HELLO.
fn hello_timeout<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    match u32::deserialize(deserializer)? {
        millis @ 10..=600_000 => Ok(millis),
        other => Err(de::Error::custom(format!(
            "{other} milliseconds: 10 to 600000 are allowed"
        ))),
    }
}

/// Whose registered memory workers may copy by system calls, which wait as long as the client's pages
/// do (FUSE, userfaultfd): memory that can be neither replaced nor mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProcessMemoryPolicy {
    /// Nobody's: registering such memory is refused.
    Never,
    /// That of root and of the daemon's own user.
    Trusted,
    /// Everybody's.
    All,
}

/// `[control]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ControlSocketConfig {
    /// Path of the Unix socket that clients connect to.
    pub socket: PathBuf,
    /// Permission bits of the socket, as octal text ("0660").
    pub mode: FileMode,
    /// Group that owns the socket; absent means the daemon's.
    pub group: Option<Spanned<String>>,
    /// Group whose members see the counters of all clients, as root and the daemon's own user do.
    pub operators: Option<Spanned<String>>,
    /// Whose memory is copied by system calls where it cannot be shared.
    pub process_memory: ProcessMemoryPolicy,
    /// Milliseconds after which a connection is closed that has not said HELLO.
    #[serde(deserialize_with = "hello_timeout")]
    pub hello_timeout_ms: u32,
}

impl Default for ControlSocketConfig {
    fn default() -> Self {
        ControlSocketConfig {
            socket: PathBuf::from("/run/siwd/siwd.sock"),
            mode: FileMode(0o660),
            group: None,
            operators: None,
            process_memory: ProcessMemoryPolicy::Trusted,
            hello_timeout_ms: 5000,
        }
    }
}

/// Whether hugepages back the daemon's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HugepagePolicy {
    /// Use them when enough are free, fall back to normal pages and say so.
    Auto,
    /// Refuse to start without them.
    Require,
    /// Never use them.
    Never,
}

/// `[dpdk]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DpdkConfig {
    /// Hugepage policy for packet buffers and arenas.
    pub hugepages: HugepagePolicy,
    /// Packet buffers in all; rounded up by DPDK.
    pub buffers: u32,
    /// EAL log level: emergency .. debug.
    pub log: EalLog,
    /// What NICs read memory by.
    pub iova: IovaSetting,
    /// More arguments of DPDK's environment, behind siwd's own.
    pub eal_args: Spanned<Vec<String>>,
}

/// What NICs read memory by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IovaSetting {
    /// Physical addresses if one of the NICs has no IOMMU, virtual ones otherwise.
    Auto,
    /// Virtual addresses: an IOMMU translates them.
    Va,
    /// Physical addresses: registered memory is never sent from where it lies.
    Pa,
}

/// Arguments of the environment that siwd sets itself, by what they begin with.
const OWN_EAL_ARGS: [&str; 16] = [
    "-l",
    "-c",
    "--lcores",
    "--file-prefix",
    "--log-level",
    "-m",
    "--socket-mem",
    "--in-memory",
    "--single-file-segments",
    "--no-huge",
    "--no-shconf",
    "--no-pci",
    "--iova-mode",
    "--proc-type",
    "-a",
    "-b",
];

impl DpdkConfig {
    /// Looks for arguments that contradict siwd's own.
    pub(super) fn check_settings(&self) -> Result<(), (Range<usize>, String)> {
        let taken = |arg: &&String| {
            let name = arg.split('=').next().unwrap_or_default();
            OWN_EAL_ARGS.contains(&name)
        };
        match self.eal_args.get_ref().iter().find(taken) {
            Some(arg) => Err((
                self.eal_args.span(),
                format!(
                    "eal_args {arg:?}: siwd sets this one itself; see buffers, hugepages, iova, log, [workers] cores, and pci and devargs of a device"
                ),
            )),
            None => Ok(()),
        }
    }
}

impl Default for DpdkConfig {
    fn default() -> Self {
        DpdkConfig {
            hugepages: HugepagePolicy::Require,
            buffers: 16_384,
            log: EalLog::Error,
            iova: IovaSetting::Auto,
            eal_args: Spanned::new(0..0, vec![]),
        }
    }
}

/// DPDK's own log level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
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
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaptureConfig {
    /// The pcapng file to write (replaced at start).
    pub file: PathBuf,
    /// Stop writing after this many bytes.
    #[serde(default = "default_capture_limit")]
    pub limit: ByteSize,
}

fn default_capture_limit() -> ByteSize {
    ByteSize(256 << 20)
}
