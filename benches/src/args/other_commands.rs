//! Options of the commands that measure more or other things than a single transfer: `peers`,
//! `one-side`, `conn`, `report`, `compare`, `limits` and `scale`.

use super::TransferOptions;
use crate::option_values::{parse_seconds, parse_size};
use clap::Args;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Options of the comparison with other implementations.
#[derive(Debug, Clone, Args)]
pub struct PeersOptions {
    /// Rounds; each measures every contender once.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,

    /// Seconds of each measurement.
    #[arg(long, value_name = "N", default_value = "2", value_parser = parse_seconds)]
    pub secs: Duration,

    /// The core of the initiating side, and that of the other side, siwd's worker or the server
    /// [default: the first two of this process].
    #[arg(long, value_name = "A,B", value_delimiter = ',', num_args = 2)]
    pub cores: Option<Vec<usize>>,

    /// Only contenders with one of these words in their names.
    #[arg(long, value_name = "WORD,..", value_delimiter = ',')]
    pub only: Vec<String>,

    /// Print the result as one line of JSON.
    #[arg(long)]
    pub json: bool,
}

/// Options of the measurement of each end alone.
#[derive(Debug, Clone, Args)]
pub struct OneSideOptions {
    /// Rounds; each measures every transfer once with either end on either side of the link.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,

    /// Seconds of each transfer.
    #[arg(long, short = 'D', visible_alias = "duration", value_name = "N", default_value = "2",
          value_parser = parse_seconds)]
    pub secs: Duration,

    /// Cores of the initiator's and of the target's worker [default: the first two of this process].
    #[arg(long, value_name = "A,B", value_delimiter = ',', num_args = 2)]
    pub cores: Option<Vec<usize>>,

    /// MTU of the link, at most 9000.
    #[arg(long, value_name = "N", default_value_t = 1500,
          value_parser = clap::value_parser!(u32).range(1280..=9000))]
    pub mtu: u32,

    /// Check all received data; wrong bytes are an error. Slower, but not at the cost of the workers.
    #[arg(long)]
    pub verify: bool,

    /// Print the result as one line of JSON.
    #[arg(long)]
    pub json: bool,
}

/// Options of the connection rate measurement.
#[derive(Debug, Clone, Args)]
pub struct ConnOptions {
    /// Device that connects.
    #[arg(long, value_name = "DEVICE", default_value = "siw0")]
    pub from: String,

    /// Device that listens.
    #[arg(long, value_name = "DEVICE", default_value = "siw1")]
    pub to: String,

    /// Connections in progress at a time.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub in_flight: u32,

    /// Seconds to measure.
    #[arg(long, value_name = "N", default_value = "3", value_parser = parse_seconds)]
    pub secs: Duration,

    /// Print the result as one line of JSON.
    #[arg(long)]
    pub json: bool,

    /// The daemon's control socket [default: $SIWD_SOCKET, that of this user, /run/siwd/siwd.sock].
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
}

/// Input and output of a report.
#[derive(Debug, Clone, Args)]
pub struct PageOptions {
    /// Files with the lines that bw, lat, rate, raw, limits and peers print with --json.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,

    /// Output file of the page.
    #[arg(long, value_name = "FILE", default_value = "siw-perf.html")]
    pub html: PathBuf,

    /// Also write tables in Markdown; `-` for standard output.
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
}

/// Options of a comparison.
#[derive(Debug, Clone, Args)]
pub struct CompareOptions {
    /// Results before the change.
    pub old: PathBuf,

    /// Results after the change.
    pub new: PathBuf,

    /// Percent by which a result may be worse without counting as a regression.
    #[arg(long, value_name = "N", default_value_t = 5.0)]
    pub tolerance: f64,

    /// Print the result as one line of JSON.
    #[arg(long)]
    pub json: bool,
}

/// One end of a ping-pong over the kernel's TCP.
#[derive(Debug, Clone, Args)]
pub struct PingPongOptions {
    /// Serve one connection.
    #[arg(
        long,
        value_name = "ADDR:PORT",
        conflicts_with = "connect",
        required_unless_present = "connect"
    )]
    pub listen: Option<SocketAddr>,

    /// Measure, and print the median in microseconds.
    #[arg(long, value_name = "ADDR:PORT")]
    pub connect: Option<SocketAddr>,

    /// Bytes of a message.
    #[arg(long, value_name = "N", default_value = "64", value_parser = parse_size)]
    pub size: u32,

    /// Seconds to measure.
    #[arg(long, value_name = "N", default_value = "1", value_parser = parse_seconds)]
    pub secs: Duration,
}

/// Options of the machine limits measurement.
#[derive(Debug, Clone, Args)]
pub struct LimitsOptions {
    /// Bytes processed at a time.
    #[arg(long, value_name = "N", default_value = "1428", value_parser = parse_size)]
    pub piece: u32,

    /// Two cores that exchange a cache line [default: the first two of this process].
    #[arg(long, value_name = "A,B", value_delimiter = ',', num_args = 2)]
    pub cores: Option<Vec<usize>>,

    /// Seconds of each round of each measurement.
    #[arg(long, value_name = "N", default_value = "0.05", value_parser = parse_seconds)]
    pub secs: Duration,

    /// Print the result as one line of JSON.
    #[arg(long)]
    pub json: bool,
}

/// Options of the queue pair scaling measurement.
#[derive(Debug, Clone, Args)]
pub struct ScaleOptions {
    /// Numbers of queue pairs to measure.
    #[arg(
        long,
        value_name = "N,..",
        value_delimiter = ',',
        default_value = "1,10,100,1000,10000"
    )]
    pub qps: Vec<u32>,

    /// Message size of the busy queue pair in bytes.
    #[arg(long, value_name = "N", default_value = "64K", value_parser = parse_size)]
    pub busy_size: u32,

    /// Message size in bytes of the queue pairs that are active in turn.
    #[arg(long, value_name = "N", default_value = "4K", value_parser = parse_size)]
    pub size: u32,

    /// Measure idle queue pairs only.
    #[arg(long, conflicts_with = "active")]
    pub idle: bool,

    /// Measure active queue pairs only.
    #[arg(long)]
    pub active: bool,

    /// Seconds of each measurement.
    #[arg(long, value_name = "N", default_value = "2", value_parser = parse_seconds)]
    pub secs: Duration,

    /// Initiator's device.
    #[arg(long, value_name = "DEVICE")]
    pub from: Option<String>,

    /// Target's device.
    #[arg(long, value_name = "DEVICE")]
    pub to: Option<String>,

    /// Print each result as one line of JSON, like bw.
    #[arg(long)]
    pub json: bool,

    /// The daemon's control socket [default: $SIWD_SOCKET, that of this user, /run/siwd/siwd.sock].
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
}

impl ScaleOptions {
    /// Options common to all measurements.
    pub(crate) fn base_options(&self) -> TransferOptions {
        TransferOptions {
            from: self.from.iter().cloned().collect(),
            to: self.to.iter().cloned().collect(),
            json: self.json,
            socket: self.socket.clone(),
            ..TransferOptions::without_bounds(self.secs)
        }
    }
}
