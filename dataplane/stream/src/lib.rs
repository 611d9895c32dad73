//! The byte-stream endpoint of tests: plain services over our TCP, without iWARP, so that any program
//! with a socket can be its peer. `main.rs` is the command line of the program `siw-stream`.
//!
//! ```text
//!  rx_burst -> Stack::receive_burst -> events -> StreamConnection: read, check, return
//!                                                      |
//!  tx_burst <- PortSink <- Stack::flush/poll <- push_record
//! ```
//! It uses ports and stacks like a worker of the daemon ([`siwd::datapath`]), with one worker:
//! bursts, one clock reading per batch, and no scans or allocations in steady state.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod connection;
mod endpoint;
mod pattern;
mod record;
mod report;
mod service;
mod shutdown;

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use siwd::capture::Capture;
use siwd::config::Config;
use siwd::datapath::idle::Idle;
use siwd::device::{self, SharedStackConfig};
use siwd::frame_taps::FrameTaps;
use siwd::prepared::Prepared;
use siwd::{daemon, host};

pub use pattern::StreamPattern;
pub use report::{StreamReport, StreamTotals};
pub use service::{ServiceOffer, StreamService};

use endpoint::Endpoint;

/// Connections to open.
#[derive(Debug, Clone)]
pub struct ConnectPlan {
    /// Destination.
    pub to: SocketAddr,
    /// Service on the connections.
    pub service: StreamService,
    /// Number of connections.
    pub count: u32,
    /// Source address; chosen by TCP if absent.
    pub source: Option<IpAddr>,
}

/// Plan of one run.
#[derive(Debug, Clone)]
pub struct StreamPlan {
    /// Services to listen for.
    pub offers: Vec<ServiceOffer>,
    /// Connections to open.
    pub connects: Option<ConnectPlan>,
    /// Backlog of each offer; further connections get SYN cookies.
    pub backlog: usize,
    /// Maximum number of connections.
    pub connections: usize,
    /// Bytes of the pattern in each stream; `None`: until the time is over.
    pub bytes: Option<u64>,
    /// Time after which everything closes.
    pub seconds: Option<f64>,
    /// Seed of the pattern that is sent and expected.
    pub seed: u64,
    /// Time after its opening during which a connection leaves received data unread.
    pub pause: Duration,
    /// Name of the device that connects; the first one if absent.
    pub device: Option<String>,
}

/// Runs until the opened connections have ended, with offers until SIGTERM or SIGINT, but at most
/// [`StreamPlan::seconds`]. `ready` is called once the ports are up.
///
/// # Errors
/// A text that describes the error.
pub fn run(
    config: &Config,
    plan: &StreamPlan,
    ready: impl FnOnce(&[device::OpenDevice]),
) -> Result<StreamReport, String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let signals = daemon::block_signals().map_err(|error| text(&error))?;

    let prepared = Prepared::new(config.clone());
    let core = *prepared.cores.first().ok_or("no core is available")?;
    let _claims = prepared.claim_host(1).map_err(|error| text(&error))?;
    let dpdk = prepared
        .start_dpdk("siw-stream", 0)
        .map_err(|error| text(&error))?;
    let mut devices = device::open_devices(&dpdk, &prepared.devices, 1)?;
    let names = prepared.device_names();
    let capture = config
        .capture
        .as_ref()
        .map(|capture| Capture::into_file(capture, &names))
        .transpose()
        .map_err(|error| text(&error))?;
    let taps = FrameTaps::new(capture.as_ref().map(|capture| capture.tap().clone()), None);
    let keys =
        SharedStackConfig::generate_secrets(plan.connections, config.dpdk.buffers, devices.len())
            .map_err(|error| text(&error))?;
    let ports = devices
        .iter_mut()
        .enumerate()
        .filter_map(|(index, device)| {
            let mut port = device.worker_port(index, 0, &keys)?;
            port.taps = taps.clone();
            Some(port)
        })
        .collect();

    host::pin_thread_to(core).map_err(|error| text(&error))?;
    let registered = dpdk.eal.register_thread().map_err(|error| text(&error))?;
    let spin = Duration::from_micros(config.workers.spin_us.into());
    let idle = Idle::new(config.workers.idle, spin);
    let mut endpoint = Endpoint::new(ports, &names, &dpdk.pool, plan, idle, signals)?;
    ready(&devices);
    endpoint.run()?;
    let report = endpoint.make_report();
    drop(endpoint);
    drop(registered);
    drop(capture);
    for device in devices {
        device.port.close();
    }
    Ok(report)
}
