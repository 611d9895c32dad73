//! `siw-perf`: bandwidth and latency over siwd, beside the bounds of the machine.
#![forbid(unsafe_code)]

use clap::Parser;
use dpdk::EalConfig;
use siw_bench::args::{PerfEndpoints, PerfOptions};
use siw_bench::bounds::{Bound, Bounds, Framing};
use siw_bench::daemon::Retransmissions;
use siw_bench::end::{Role, TransferEnd, find_device, open_context};
use siw_bench::measurement::Measurement;
use siw_bench::plan::{MeasurementPlan, Mode};
use siw_bench::report::{PerfReport, TransferPath};
use siw_bench::{bandwidth, latency, session};
use std::process::ExitCode;
use std::time::Duration;

fn main() -> ExitCode {
    let args = PerfOptions::parse();
    match run_perf(&args) {
        Ok(Some(report)) if args.json => println!("{}", report.to_json()),
        Ok(Some(report)) => print!("{report}"),
        Ok(None) => {}
        Err(error) => {
            eprintln!("siw-perf: {error}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn run_perf(args: &PerfOptions) -> Result<Option<PerfReport>, String> {
    let plan = args.to_plan()?;
    let ends = args.endpoints()?;
    let ctx = open_context(args.socket.as_deref())?;
    // With two processes the kernel chooses the cores, unless --core names one.
    let first = matches!(ends, PerfEndpoints::Both { .. }).then(|| EalConfig::default().main_core);
    if let Some(core) = args.core.or(first) {
        dpdk::pin_current_thread(core).map_err(|error| format!("--core: {error}"))?;
    }
    match ends {
        PerfEndpoints::Both { from, to } => {
            let (from, to) = (find_device(&ctx, &from)?, find_device(&ctx, &to)?);
            let other = open_context(args.socket.as_deref())?;
            let mut initiator = TransferEnd::new(&ctx, &plan, Role::Initiator)?;
            let mut target = TransferEnd::new(&other, &plan, Role::Target)?;
            let crc = session::connect_locally(&mut initiator, &from, &mut target, &to)?;
            let path = TransferPath {
                from: from.name.clone(),
                to: to.name.clone(),
                driver: from.driver.clone(),
                mtu: from.mtu.min(to.mtu),
                crc,
            };
            // Frames to a device's own address never reach a port.
            let ring = from.name != to.name && from.driver.contains("ring");
            let ipv6 = !from.ips.iter().any(|ip| ip.is_ipv4());
            measure_with_bounds(args, &plan, &initiator, Some(&target), path, ring, ipv6).map(Some)
        }
        PerfEndpoints::Connect { to, from } => {
            let from_device = from
                .as_deref()
                .map(|name| find_device(&ctx, name))
                .transpose()?;
            let mut initiator = TransferEnd::new(&ctx, &plan, Role::Initiator)?;
            let info = session::connect_to_peer(&mut initiator, from_device.as_ref(), to)?;
            let local = session::local_device(&ctx, from.as_deref(), &info)?;
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
            measure_with_bounds(args, &plan, &initiator, None, path, false, to.is_ipv6()).map(Some)
        }
        PerfEndpoints::Listen(addr) => {
            let end = session::accept_all(&ctx, addr)?;
            match end.plan.mode {
                Mode::Bw => bandwidth::serve_bandwidth(&end)?,
                Mode::Lat => latency::serve_latency(&end)?,
            }
            Ok(None)
        }
    }
}

fn measure_with_bounds(
    args: &PerfOptions,
    plan: &MeasurementPlan,
    initiator: &TransferEnd,
    target: Option<&TransferEnd>,
    path: TransferPath,
    ring: bool,
    ipv6: bool,
) -> Result<PerfReport, String> {
    let mut notes = Vec::new();
    let mut bounds = None;
    if !args.no_bounds {
        let framing = Framing::new(path.mtu, ipv6, plan.op);
        if !ring {
            notes.push("raw frames are measured for the embedded pair only".into());
        }
        bounds = match Bounds::new(*plan, framing, initiator.huge, ring, path.crc) {
            Ok(bounds) => Some(bounds),
            // DPDK may lack memory here while the daemon has it.
            Err(error) if ring => {
                notes.push(error);
                Some(Bounds::new(
                    *plan,
                    framing,
                    initiator.huge,
                    false,
                    path.crc,
                )?)
            }
            Err(error) => return Err(error),
        };
    }
    let before = bounds.as_mut().map(Bounds::measure_all).transpose()?;
    let retransmissions = || {
        initiator
            .ctx
            .read_stats()
            .map(|stats| Retransmissions::from_statistics(&stats))
            .unwrap_or_default()
    };
    let earlier = retransmissions();
    let measured = measure_transfer(plan, initiator, target, args.secs)?;
    let tcp = retransmissions().growth_since(earlier);
    let after = match &mut bounds {
        Some(bounds) => {
            // Until then the worker sleeps, and leaves the machine to the bounds.
            std::thread::sleep(Duration::from_millis(20));
            Some(bounds.measure_all()?)
        }
        None => None,
    };
    let bound = before
        .unwrap_or_default()
        .better_of(after.unwrap_or(Bound::default()));
    Ok(PerfReport::new(plan, path, &measured, bound, tcp, notes))
}

fn measure_transfer(
    plan: &MeasurementPlan,
    initiator: &TransferEnd,
    target: Option<&TransferEnd>,
    time: Duration,
) -> Result<Measurement, String> {
    match plan.mode {
        Mode::Bw => bandwidth::measure_bandwidth(initiator, target, time),
        Mode::Lat => latency::measure_latency(initiator, target, time),
    }
}
