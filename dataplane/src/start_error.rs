//! Reasons why the daemon cannot start.

use crate::capture::CaptureError;
use crate::config::ConfigError;
use crate::host::HostError;

/// The daemon cannot start or cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration cannot be read, or has a mistake.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The host lacks a core, or another daemon has it.
    #[error(transparent)]
    Host(#[from] HostError),
    /// DPDK refused, or lacks memory.
    #[error(transparent)]
    Dpdk(#[from] dpdk::Error),
    /// The capture file cannot be written.
    #[error(transparent)]
    Capture(#[from] CaptureError),
    /// The control socket cannot be served.
    #[error("control socket {path}: {reason}")]
    Socket {
        /// Path of the socket.
        path: String,
        /// Cause and remedy.
        reason: String,
    },
    /// A device or a worker cannot be set up; the text names it.
    #[error("{0}")]
    Device(String),
    /// A call to the operating system failed.
    #[error("{what}: {source}")]
    Os {
        /// Operation that failed.
        what: &'static str,
        /// Why.
        source: std::io::Error,
    },
}
