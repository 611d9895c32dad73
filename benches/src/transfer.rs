//! `siw-perf bw`, `lat` and `rate`: measures each combination of sizes, depths and queue pairs as
//! often as requested, with the bounds of the machine, and detects disturbances.

use crate::args::{PerfEndpoints, TransferMode, TransferOptions};
use crate::bandwidth::BulkLoad;
use crate::bounds::{Bounds, Framing, RawLink};
use crate::daemon::{
    Process, Retransmissions, WorkerCounters, WorkerUse, settings_of, takes_super_segments,
};
use crate::end::{Role, TransferEnd, find_device, open_context};
use crate::live::LiveView;
use crate::machine::{ConditionsWatch, MachineRecord, pin_thread};
use crate::measurement::{Measurement, RunOptions};
use crate::plan::{MeasurementPlan, Mode, Operation};
use crate::report::{PerfReport, TransferPath};
use crate::{bandwidth, latency, session};
use anyhow::anyhow;
use dpdk::EalConfig;
use siw::{Context, DeviceInfo};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

/// Time after which an idle worker sleeps and does not disturb other measurements.
const WORKER_SLEEP_TIME: Duration = Duration::from_millis(20);

/// Measures the transfers that the options describe. `on_report` is called with each result,
/// including disturbed ones. With `bulk`, that transfer runs concurrently with round trips. With
/// --listen, another process measures, and nothing is reported.
pub fn run_transfers(
    options: &TransferOptions,
    mode: TransferMode,
    bulk: Option<MeasurementPlan>,
    mut on_report: impl FnMut(&PerfReport),
) -> anyhow::Result<()> {
    let plans = options.to_plans(mode)?;
    let all_ends = options.endpoints()?;
    let ctx = open_context(options.socket.as_deref())?;
    let mut runner = TransferRunner::new(options, bulk, ctx, &all_ends[0])?;
    if let PerfEndpoints::Listen(addr) = all_ends[0] {
        return runner.serve(addr);
    }
    for ends in &all_ends {
        for plan in &plans {
            runner.measure_rounds(plan, ends, &mut on_report)?;
        }
    }
    Ok(())
}

/// State shared by several measurements.
struct TransferRunner<'a> {
    options: &'a TransferOptions,
    /// Bulk transfer concurrent with round trips.
    bulk: Option<MeasurementPlan>,
    ctx: Context,
    /// The target's daemon, if it is another one.
    target_ctx: Option<Context>,
    machine: MachineRecord,
    /// The client's core and the worker's.
    cores: Option<[usize; 2]>,
    /// The cores of this process before its threads were pinned.
    allowed: Vec<usize>,
    /// Reused between measurements, since DPDK's environment can be started only once.
    link: Option<RawLink>,
    /// Reason why there is no link.
    link_error: Option<anyhow::Error>,
}

/// Two connected ends; only the first if the other one is in another process.
struct ConnectedEnds {
    initiator: TransferEnd,
    target: Option<TransferEnd>,
    path: TransferPath,
    /// True if the link is the daemon's embedded ring pair.
    ring: bool,
    ipv6: bool,
}

impl<'a> TransferRunner<'a> {
    /// Pins the calling thread if both ends are in this process or a core is given.
    fn new(
        options: &'a TransferOptions,
        bulk: Option<MeasurementPlan>,
        ctx: Context,
        ends: &PerfEndpoints,
    ) -> anyhow::Result<TransferRunner<'a>> {
        // With two processes, the kernel chooses the cores unless --core is given.
        let both = matches!(ends, PerfEndpoints::Both { .. });
        let first = both.then(|| EalConfig::default().main_core);
        let core = options.core.or(first);
        let allowed = dpdk::allowed_cores();
        if let Some(core) = core {
            dpdk::pin_current_thread(core).map_err(|error| anyhow!("--core: {error}"))?;
        }
        let worker = options.worker_core.or_else(|| {
            let workers = WorkerCounters::from_statistics(&ctx.read_stats().unwrap_or_default());
            workers.first().map(|worker| worker.core)
        });
        let cores = match (core, worker) {
            (Some(core), Some(worker)) if core != worker && allowed.contains(&worker) => {
                Some([core, worker])
            }
            _ => None,
        };
        Ok(TransferRunner {
            options,
            bulk,
            ctx,
            target_ctx: options
                .target_socket
                .as_deref()
                .map(|socket| open_context(Some(socket)))
                .transpose()?,
            machine: MachineRecord::read(),
            cores,
            allowed,
            link: None,
            link_error: None,
        })
    }

    /// Serves one measurement of another process.
    fn serve(&self, addr: SocketAddr) -> anyhow::Result<()> {
        let (crc, markers) = self.options.mpa_choices()[0];
        let options = session::listen_options(crc, markers);
        let end = session::accept_all(&self.ctx, addr, &options)?;
        match end.plan.mode {
            Mode::Bw => bandwidth::serve_bandwidth(&end),
            Mode::Lat => latency::serve_latency(&end),
        }
    }

    fn connect(
        &self,
        plan: &MeasurementPlan,
        ends: &PerfEndpoints,
    ) -> anyhow::Result<ConnectedEnds> {
        match ends {
            PerfEndpoints::Both { from, to } => {
                let target_ctx = self.target_ctx.as_ref().unwrap_or(&self.ctx);
                let (from, to) = (find_device(&self.ctx, from)?, find_device(target_ctx, to)?);
                self.connect_locally(plan, &from, &to)
            }
            PerfEndpoints::Connect { to, from } => self.connect_to_peer(plan, *to, from.as_deref()),
            PerfEndpoints::Listen(_) => Err(anyhow!("a listening end does not connect")),
        }
    }

    fn connect_locally(
        &self,
        plan: &MeasurementPlan,
        from: &DeviceInfo,
        to: &DeviceInfo,
    ) -> anyhow::Result<ConnectedEnds> {
        let options = self.options;
        let target_socket = options.target_socket.as_ref().or(options.socket.as_ref());
        let other = open_context(target_socket.map(PathBuf::as_path))?;
        let mut initiator = TransferEnd::new(&self.ctx, plan, Role::Initiator)?;
        let mut target = TransferEnd::new(&other, plan, Role::Target)?;
        let crc = session::connect_locally(&mut initiator, from, &mut target, to)?;
        Ok(ConnectedEnds {
            initiator,
            target: Some(target),
            path: TransferPath {
                from: from.name.clone(),
                to: to.name.clone(),
                driver: from.driver.clone(),
                mtu: from.mtu.min(to.mtu),
                crc,
            },
            // Frames to a device's own address never reach a port.
            ring: self.target_ctx.is_none() && from.name != to.name && from.driver.contains("ring"),
            ipv6: !from.ips.iter().any(|ip| ip.is_ipv4()),
        })
    }

    fn connect_to_peer(
        &self,
        plan: &MeasurementPlan,
        to: SocketAddr,
        from: Option<&str>,
    ) -> anyhow::Result<ConnectedEnds> {
        let device = from.map(|name| find_device(&self.ctx, name)).transpose()?;
        let mut initiator = TransferEnd::new(&self.ctx, plan, Role::Initiator)?;
        let info = session::connect_to_peer(&mut initiator, device.as_ref(), to)?;
        let local = session::local_device(&self.ctx, from, &info)?;
        let path = TransferPath {
            from: local
                .as_ref()
                .map_or_else(String::new, |device| device.name.clone()),
            to: to.to_string(),
            driver: local
                .as_ref()
                .map_or_else(String::new, |device| device.driver.clone()),
            mtu: local.as_ref().map_or(1500, |device| device.mtu),
            crc: info.crc,
        };
        Ok(ConnectedEnds {
            initiator,
            target: None,
            path,
            ring: false,
            ipv6: to.is_ipv6(),
        })
    }

    /// Measures one transfer for the requested number of rounds.
    fn measure_rounds(
        &mut self,
        plan: &MeasurementPlan,
        ends: &PerfEndpoints,
        on_report: &mut impl FnMut(&PerfReport),
    ) -> anyhow::Result<()> {
        let mut left = self.options.rounds;
        // Disturbed rounds are repeated, but the machine may never become quiet.
        let mut repetitions = if left > 1 { left } else { 0 };
        let mut round = 0;
        while left > 0 {
            round += 1;
            let mut report = self.measure(plan, ends)?;
            report.round = round;
            on_report(&report);
            if report.conditions.disturbed.is_some() && repetitions > 0 {
                repetitions -= 1;
            } else {
                left -= 1;
            }
        }
        Ok(())
    }

    /// Measures one transfer, with its bounds before and after.
    fn measure(
        &mut self,
        plan: &MeasurementPlan,
        ends: &PerfEndpoints,
    ) -> anyhow::Result<PerfReport> {
        let bulk = self
            .bulk
            .map(|plan| self.connect(&plan, ends))
            .transpose()?;
        let idle = match self.options.idle_qps {
            0 => None,
            count => Some(self.connect(&idle_plan(count), ends)?),
        };
        let mut transfers = (0..self.options.threads)
            .map(|_| self.connect_both_directions(plan, ends))
            .collect::<Result<Vec<_>, _>>()?;
        let first = &transfers[0].forward;
        let (path, crc) = (first.path.clone(), first.path.crc);
        let mut notes = Vec::new();
        let mut bounds = match self.options.no_bounds || plan.op.is_atomic() {
            true => None,
            false => Some(self.take_bounds(plan, first, &mut notes)?),
        };
        // By then the new connections are idle, and the worker sleeps.
        std::thread::sleep(WORKER_SLEEP_TIME);
        let watch = ConditionsWatch::begin(self.cores);
        let bound_before = bounds.as_mut().map(Bounds::measure_all).transpose()?;
        let use_before = ProcessorUse::read(self);
        let (measured, bulk_gbps) = self.measure_transfer(plan, &mut transfers, bulk.as_ref())?;
        let use_after = ProcessorUse::read(self);
        std::thread::sleep(WORKER_SLEEP_TIME);
        let bound_after = bounds.as_mut().map(Bounds::measure_all).transpose()?;
        let conditions = watch.end();
        if let Some(bounds) = bounds {
            self.link = bounds.into_link();
        }
        let bound = bound_before
            .unwrap_or_default()
            .better_of(bound_after.unwrap_or_default());
        let tcp = use_after
            .retransmissions()
            .growth_since(use_before.retransmissions());
        if plan.crc.is_some_and(|asked| asked != crc) {
            notes.push("a device's configuration overrides --crc".into());
        }
        let mut report = PerfReport::new(plan, path, &measured, bound, tcp, notes);
        report.add_workers(use_before.workers_until(&use_after, &measured));
        report.application_percent = use_before.application_percent_until(&use_after);
        if let Some(interval) = self.options.interval {
            report.add_series(&measured, interval);
        }
        if self.options.histogram {
            report.add_histogram(&measured);
        }
        report.bulk_gbps = bulk_gbps;
        report.pause_us = self
            .options
            .pause
            .map_or(0, |pause| pause.as_micros() as u64);
        report.idle_qps = idle.map_or(0, |_| self.options.idle_qps);
        report.threads = self.options.threads;
        report.qps = plan.qps * self.options.threads;
        report.bidirectional = self.options.bidirectional;
        report.add_conditions(conditions);
        report.link_loss_ppm = self.options.link_loss.unwrap_or(0);
        report.settings = settings_of(&use_after.statistics);
        report.machine = self.machine.clone();
        Ok(report)
    }

    /// Connects the ends of one thread.
    fn connect_both_directions(
        &self,
        plan: &MeasurementPlan,
        ends: &PerfEndpoints,
    ) -> anyhow::Result<ThreadTransfers> {
        let backward = match (self.options.bidirectional, ends) {
            (true, PerfEndpoints::Both { from, to }) => {
                let (from, to) = (to.clone(), from.clone());
                Some(self.connect(plan, &PerfEndpoints::Both { from, to })?)
            }
            _ => None,
        };
        Ok(ThreadTransfers {
            forward: self.connect(plan, ends)?,
            backward,
        })
    }

    /// Measures the bounds of a transfer. Raw frames are measured if the link is a ring pair and
    /// DPDK has enough memory.
    fn take_bounds(
        &mut self,
        plan: &MeasurementPlan,
        ends: &ConnectedEnds,
        notes: &mut Vec<String>,
    ) -> anyhow::Result<Bounds> {
        if !ends.ring {
            notes.push("raw frames are measured for the embedded pair only".into());
        } else if self.link.is_none() && self.link_error.is_none() {
            match RawLink::new() {
                Ok(link) => self.link = Some(link),
                Err(error) => self.link_error = Some(error),
            }
        }
        if ends.ring
            && let Some(error) = &self.link_error
        {
            notes.push(error.to_string());
        }
        let framing = Framing::new(ends.path.mtu, ends.ipv6, plan.op);
        let link = if ends.ring { self.link.take() } else { None };
        let statistics = self.ctx.read_stats().unwrap_or_default();
        let tso = takes_super_segments(settings_of(&statistics).as_ref(), &ends.path.from);
        let choices = [ends.path.crc, tso];
        Bounds::new(*plan, framing, ends.initiator.huge, link, choices)
    }

    /// The measurement, and the bandwidth of the concurrent bulk transfer.
    fn measure_transfer(
        &self,
        plan: &MeasurementPlan,
        transfers: &mut [ThreadTransfers],
        bulk: Option<&ConnectedEnds>,
    ) -> anyhow::Result<(Measurement, Option<f64>)> {
        if plan.mode == Mode::Bw {
            let measured = match transfers {
                [only] => only.measure_bandwidth(&mut self.run_options(plan, true)?),
                several => self.measure_by_threads(plan, several),
            };
            return measured.map(|measured| (measured, None));
        }
        let mut run = self.run_options(plan, true)?;
        let ends = &transfers[0].forward;
        let target = ends.target.as_ref();
        let Some((bulk, bulk_target)) = bulk.and_then(|bulk| Some((bulk, bulk.target.as_ref()?)))
        else {
            return latency::measure_latency(&ends.initiator, target, &mut run, None)
                .map(|measured| (measured, None));
        };
        let mut load = BulkLoad::start(&bulk.initiator, bulk_target)?;
        load.begin_counting();
        let measured =
            latency::measure_latency(&ends.initiator, target, &mut run, Some(&mut load))?;
        let gbps = load.gbps();
        load.finish()?;
        Ok((measured, Some(gbps)))
    }

    /// Duration and live view of a run.
    fn run_options(&self, plan: &MeasurementPlan, live: bool) -> anyhow::Result<RunOptions> {
        let interval = self.options.interval;
        Ok(RunOptions {
            limits: self.options.limits(),
            interval,
            pause: self.options.pause,
            live: match live && self.options.live {
                true => Some(LiveView::new(&self.ctx, plan, interval)?),
                false => None,
            },
        })
    }

    /// Runs each thread on a core of its own, as long as there are cores other than the worker's.
    fn measure_by_threads(
        &self,
        plan: &MeasurementPlan,
        transfers: &mut [ThreadTransfers],
    ) -> anyhow::Result<Measurement> {
        // The live view shows the first thread.
        let mut runs = Vec::new();
        for index in 0..transfers.len() {
            runs.push(self.run_options(plan, index == 0)?);
        }
        let mut cores = self.allowed.clone();
        if let Some([own, worker]) = self.cores {
            cores.retain(|core| *core != worker && *core != own);
            cores.insert(0, own);
        }
        let results: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = transfers
                .iter_mut()
                .zip(runs)
                .zip(cores.iter().cycle())
                .map(|((transfer, mut run), core)| {
                    scope.spawn(move || {
                        pin_thread(*core)?;
                        transfer.measure_bandwidth(&mut run)
                    })
                })
                .collect();
            let join = |thread: ScopedJoinHandle<'_, _>| {
                let outcome = thread.join();
                outcome.unwrap_or_else(|_| Err(anyhow!("a thread of the measurement panicked")))
            };
            threads.into_iter().map(join).collect()
        });
        let mut all = None::<Measurement>;
        for result in results {
            let measured = result?;
            match &mut all {
                Some(all) => all.merge(&measured)?,
                None => all = Some(measured),
            }
        }
        all.ok_or_else(|| anyhow!("no thread measured"))
    }
}

/// Transfers driven by one application thread.
struct ThreadTransfers {
    forward: ConnectedEnds,
    /// Transfer from the target's device to the initiator's.
    backward: Option<ConnectedEnds>,
}

impl ThreadTransfers {
    fn measure_bandwidth(&mut self, run: &mut RunOptions) -> anyhow::Result<Measurement> {
        let (initiator, target) = (&self.forward.initiator, self.forward.target.as_ref());
        let backward = self.backward.as_ref();
        let Some((ends, other_target)) =
            backward.and_then(|ends| Some((ends, ends.target.as_ref()?)))
        else {
            return bandwidth::measure_bandwidth(initiator, target, run, None);
        };
        let mut load = BulkLoad::start(&ends.initiator, other_target)?;
        let mut measured = bandwidth::measure_bandwidth(initiator, target, run, Some(&mut load))?;
        measured.verified += load.finish()?;
        Ok(measured)
    }
}

/// Statistics of the daemons and CPU time of this process at one moment.
struct ProcessorUse {
    /// Statistics of the daemon, or of the initiator's.
    statistics: String,
    /// Statistics of the target's daemon, if it is another one.
    target_statistics: Option<String>,
    application: Option<Duration>,
    /// Time and time-stamp counter before and after the reading.
    since: (Instant, u64),
    until: (Instant, u64),
}

impl ProcessorUse {
    fn read(runner: &TransferRunner<'_>) -> ProcessorUse {
        let now = || (Instant::now(), dpdk::tsc_now());
        let read = |ctx: &Context| ctx.read_stats().unwrap_or_default();
        ProcessorUse {
            since: now(),
            statistics: read(&runner.ctx),
            target_statistics: runner.target_ctx.as_ref().map(read),
            application: Process::new(std::process::id()).cpu_time().ok(),
            until: now(),
        }
    }

    fn retransmissions(&self) -> Retransmissions {
        let target = self.target_statistics.as_deref();
        let target = target.map_or_else(Default::default, Retransmissions::from_statistics);
        Retransmissions::from_statistics(&self.statistics).plus(target)
    }

    /// The longest time between two readings: no worker can have run longer.
    fn time_until(&self, after: &ProcessorUse) -> Duration {
        after.until.0 - self.since.0
    }

    /// Work of each worker of both daemons. The readings include the warm-up, and so does the number
    /// of messages.
    fn workers_until(&self, after: &ProcessorUse, measured: &Measurement) -> Vec<WorkerUse> {
        let time = self.time_until(after);
        let ticks = after.until.1.wrapping_sub(self.since.1);
        let tsc_ghz = ticks as f64 / time.as_nanos().max(1) as f64;
        let used = |before: &str, after: &str, end: Option<Role>| -> Vec<WorkerUse> {
            let before = WorkerCounters::from_statistics(before);
            let after = WorkerCounters::from_statistics(after);
            let pairs = before.iter().zip(&after);
            let messages = measured.all_messages;
            let between = |(before, after)| WorkerUse {
                end,
                ..WorkerUse::between(before, after, time, messages, tsc_ghz)
            };
            pairs.map(between).collect()
        };
        let (Some(target_before), Some(target_after)) =
            (&self.target_statistics, &after.target_statistics)
        else {
            return used(&self.statistics, &after.statistics, None);
        };
        let mut workers = used(&self.statistics, &after.statistics, Some(Role::Initiator));
        workers.extend(used(target_before, target_after, Some(Role::Target)));
        workers
    }

    /// CPU time of this process's threads in percent of a core.
    fn application_percent_until(&self, after: &ProcessorUse) -> Option<f64> {
        let ran = after.application?.saturating_sub(self.application?);
        let share = ran.as_secs_f64() / self.time_until(after).as_secs_f64().max(1e-9);
        Some((share * 1000.0).round() / 10.0)
    }
}

/// Plan for connected idle queue pairs.
fn idle_plan(count: u32) -> MeasurementPlan {
    MeasurementPlan::for_bandwidth(Operation::Write, 64, 1, count)
}
