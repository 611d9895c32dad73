//! The tables of the daemon as a whole: `[workers]`, `[limits]`, `[control]`, `[dpdk]` and
//! `[capture]`.

use std::path::PathBuf;

use serde::Deserialize;
use toml::Spanned;

use super::{ByteSize, FileMode};

/// How a worker behaves when nothing is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
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
}

impl Default for WorkersConfig {
    fn default() -> Self {
        WorkersConfig {
            cores: Spanned::new(0..0, vec![]),
            idle: IdlePolicy::Adaptive,
            spin_us: 50,
        }
    }
}

/// `[limits]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsConfig {
    /// Clients connected at once.
    pub clients: u32,
    /// Queue pairs of one client.
    pub queue_pairs_per_client: u32,
    /// Completion queues of one client.
    pub completion_queues_per_client: u32,
    /// Memory regions of one client.
    pub memory_regions_per_client: u32,
    /// Arena bytes of one client.
    pub memory_per_client: ByteSize,
    /// Work requests in one queue.
    pub work_requests: u32,
    /// Entries in one completion queue.
    pub completions: u32,
    /// TCP connections of one worker on one device.
    pub connections: u32,
}

impl Default for LimitsConfig {
    fn default() -> Self {
        LimitsConfig {
            clients: 1024,
            queue_pairs_per_client: 102_400,
            completion_queues_per_client: 102_400,
            memory_regions_per_client: 1_024_000,
            memory_per_client: ByteSize(8 << 30),
            work_requests: 32_768,
            completions: 3_276_800,
            connections: 100_000,
        }
    }
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
}

impl Default for ControlSocketConfig {
    fn default() -> Self {
        ControlSocketConfig {
            socket: PathBuf::from("/run/siwd/siwd.sock"),
            mode: FileMode(0o660),
            group: None,
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
}

impl Default for DpdkConfig {
    fn default() -> Self {
        DpdkConfig {
            hugepages: HugepagePolicy::Require,
            buffers: 16_384,
            log: EalLog::Error,
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
