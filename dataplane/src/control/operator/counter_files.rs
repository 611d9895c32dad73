//! Counters in the files next to the control socket, with the names of the kernel's RDMA drivers. The
//! control thread asks the workers for their counters at the configured interval; a thread writes them,
//! because the file system can be slow.

use std::sync::mpsc::{self, SyncSender, TrySendError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use siw_sysfs::{CounterWriter, DeviceCounters, PortCounters};

use crate::control::threads::workers::WorkerSet;
use crate::device_view::DeviceView;
use crate::ids::CommandToken;
use crate::worker::messages::{Command, PortStats, WorkerStats};

/// Periodic updates of the counters.
pub(in crate::control) struct CounterFiles {
    interval: Duration,
    next_round: Instant,
    round: Option<Round>,
    /// Dropped to end the thread.
    to_writer: Option<SyncSender<Vec<DeviceCounters>>>,
    writer: Option<JoinHandle<()>>,
}

/// A request for the counters of all workers.
struct Round {
    token: CommandToken,
    /// Workers that have not answered.
    left: usize,
    /// The devices of the time of the request, by index: an answer may be from before a device was added with
    /// the index of a deleted one.
    instances: Vec<u64>,
}

impl Drop for CounterFiles {
    fn drop(&mut self) {
        self.to_writer = None;
        // The files are removed afterwards.
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

impl CounterFiles {
    /// Starts the thread that writes the counters of these devices. The first update follows at once.
    ///
    /// # Errors
    /// The operating system cannot create a thread.
    pub fn start(writer: CounterWriter, interval: Duration) -> std::io::Result<CounterFiles> {
        // One update waits at most: a slow file system gets fewer of them.
        let (to_writer, updates) = mpsc::sync_channel::<Vec<DeviceCounters>>(1);
        let write = move || {
            while let Ok(ports) = updates.recv() {
                writer.write(&ports);
            }
        };
        let thread = std::thread::Builder::new().name("siwd-counters".into());
        Ok(CounterFiles {
            interval,
            next_round: Instant::now(),
            round: None,
            to_writer: Some(to_writer),
            writer: Some(thread.spawn(write)?),
        })
    }

    /// Time until the next round; `None` during a round, whose end wakes the control thread.
    pub fn time_until_round(&self) -> Option<Duration> {
        let left = self.next_round.saturating_duration_since(Instant::now());
        self.round.is_none().then_some(left)
    }

    /// Asks the workers for their counters if an update is due.
    pub fn run(&mut self, workers: &mut WorkerSet, devices: &[DeviceView]) {
        let now = Instant::now();
        if self.round.is_none() && now >= self.next_round {
            self.next_round = now + self.interval;
            let token = workers.next_token(None);
            self.round = Some(Round {
                token,
                left: workers.worker_count(),
                instances: devices.iter().map(|device| device.instance).collect(),
            });
            workers.post_to_all(|| Command::Stats { token });
        }
    }

    /// Counts a worker's answer; the last one passes the counters to the thread.
    pub fn on_worker_stats(
        &mut self,
        token: CommandToken,
        stats: &[WorkerStats],
        devices: &[DeviceView],
    ) {
        let Some(round) = self.round.as_mut().filter(|round| round.token == token) else {
            return;
        };
        round.left = round.left.saturating_sub(1);
        if round.left > 0 {
            return;
        }
        let instances = std::mem::take(&mut round.instances);
        self.round = None;
        let Some(to_writer) = &self.to_writer else {
            return;
        };
        let devices = devices.iter().zip(instances).enumerate();
        // The files of a device that is gone keep its last counters: its workers forget them.
        let counted = devices
            .filter(|(_, (device, instance))| !device.is_gone && device.instance == *instance);
        let ports = counted.map(|(number, (device, _))| {
            let sum = sum_of_device(stats, number);
            DeviceCounters {
                name: device.name.clone(),
                instance: device.instance,
                counters: port_counters(device, &sum),
            }
        });
        match to_writer.try_send(ports.collect()) {
            Ok(()) | Err(TrySendError::Full(_)) => {}
            Err(TrySendError::Disconnected(_)) => {
                tracing::warn!("the counters in files are no longer updated");
                self.to_writer = None;
            }
        }
    }
}

/// Counters of a device's port, of which `stats` are the sums over all workers.
fn port_counters(device: &DeviceView, stats: &PortStats) -> PortCounters {
    let (net, tcp) = (&stats.tcp.net, &stats.tcp.tcp);
    let mib = |name| {
        let found = stats
            .tcp
            .mib_counters()
            .find(|(counter, _)| *counter == name);
        found.map_or(0, |(_, value)| value)
    };
    PortCounters {
        octets_received: tcp.in_bytes,
        octets_sent: tcp.out_bytes,
        segments_received: tcp.in_segs,
        segments_sent: tcp.out_segs,
        receive_errors: net.csum_errors
            + net.offload_drops()
            + net.in_errs
            + tcp.bad_options
            + net.header_errors,
        send_discards: stats.frames_refused,
        frames_received: stats.frames_received,
        frames_sent: stats.frames_sent,
        group_frames_received: net.group_frames_in,
        group_frames_sent: net.group_frames_out,
        link_downs: device.link_downs,
        tcp_out_segs: mib("TcpOutSegs"),
        tcp_retrans_segs: mib("TcpRetransSegs"),
    }
}

/// Counters of a device, summed over all workers.
pub(in crate::control) fn sum_of_device(stats: &[WorkerStats], device: usize) -> PortStats {
    let mut sum = PortStats::default();
    let ports = stats.iter().flat_map(|worker| &worker.devices);
    for port in ports.filter(|port| port.device == device) {
        sum.merge(port);
    }
    sum
}
