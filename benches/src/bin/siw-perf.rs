//! `siw-perf`: bandwidth and latency over siwd, beside the bounds of the machine.
#![forbid(unsafe_code)]

use clap::Parser;
use dpdk::EalConfig;
use siw_bench::args::{Args, Ends};
use siw_bench::bounds::{Bound, Bounds, Framing};
use siw_bench::daemon::Repeats;
use siw_bench::end::{End, Role, device, open};
use siw_bench::measurement::Measured;
use siw_bench::plan::{Mode, Plan};
use siw_bench::report::{Path, Report};
use siw_bench::{bandwidth, latency, session};
use std::process::ExitCode;
use std::time::Duration;

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(Some(report)) if args.json => println!("{}", report.json()),
        Ok(Some(report)) => print!("{report}"),
        Ok(None) => {}
        Err(e) => {
            eprintln!("siw-perf: {e}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn run(args: &Args) -> Result<Option<Report>, String> {
    let plan = args.plan()?;
    let ends = args.ends()?;
    let ctx = open(args.socket.as_deref())?;
    // Two processes find their places themselves.
    let first = matches!(ends, Ends::Both { .. }).then(|| EalConfig::default().main_core);
    if let Some(core) = args.core.or(first) {
        dpdk::pin_current_thread(core).map_err(|e| format!("--core: {e}"))?;
    }
    match ends {
        Ends::Both { from, to } => {
            let (from, to) = (device(&ctx, &from)?, device(&ctx, &to)?);
            let other = open(args.socket.as_deref())?;
            let mut a = End::new(&ctx, &plan, Role::Initiator)?;
            let mut b = End::new(&other, &plan, Role::Target)?;
            let crc = session::both(&mut a, &from, &mut b, &to)?;
            let path = Path {
                from: from.name.clone(),
                to: to.name.clone(),
                driver: from.driver.clone(),
                mtu: from.mtu.min(to.mtu),
                crc,
            };
            // Frames to a device's own address never reach a port.
            let ring = from.name != to.name && from.driver.contains("ring");
            let ipv6 = !from.ips.iter().any(|ip| ip.is_ipv4());
            measure(args, &plan, &a, Some(&b), path, ring, ipv6).map(Some)
        }
        Ends::Connect { to, from } => {
            let from_device = from.as_deref().map(|n| device(&ctx, n)).transpose()?;
            let mut a = End::new(&ctx, &plan, Role::Initiator)?;
            let info = session::connect(&mut a, from_device.as_ref(), to)?;
            let local = session::local_device(&ctx, from.as_deref(), &info)?;
            let path = Path {
                from: local.as_ref().map_or_else(String::new, |d| d.name.clone()),
                to: to.to_string(),
                driver: local
                    .as_ref()
                    .map_or_else(String::new, |d| d.driver.clone()),
                mtu: local.as_ref().map_or(1500, |d| d.mtu),
                crc: info.crc,
            };
            measure(args, &plan, &a, None, path, false, to.is_ipv6()).map(Some)
        }
        Ends::Listen(addr) => {
            let end = session::listen(&ctx, addr)?;
            match end.plan.mode {
                Mode::Bw => bandwidth::serve(&end)?,
                Mode::Lat => latency::serve(&end)?,
            }
            Ok(None)
        }
    }
}

fn measure(
    args: &Args,
    plan: &Plan,
    a: &End,
    b: Option<&End>,
    path: Path,
    ring: bool,
    ipv6: bool,
) -> Result<Report, String> {
    let mut notes = Vec::new();
    let mut bounds = None;
    if !args.no_bounds {
        let framing = Framing::new(path.mtu, ipv6, plan.op);
        if !ring {
            notes.push("raw frames are measured for the embedded pair only".into());
        }
        bounds = match Bounds::new(*plan, framing, a.huge, ring, path.crc) {
            Ok(b) => Some(b),
            // DPDK may lack memory here while the daemon has it.
            Err(e) if ring => {
                notes.push(e);
                Some(Bounds::new(*plan, framing, a.huge, false, path.crc)?)
            }
            Err(e) => return Err(e),
        };
    }
    let before = bounds.as_mut().map(Bounds::measure).transpose()?;
    let repeats = || {
        a.ctx
            .read_stats()
            .map(|s| Repeats::of(&s))
            .unwrap_or_default()
    };
    let earlier = repeats();
    let measured = transfer(plan, a, b, args.secs)?;
    let tcp = repeats().since(earlier);
    let after = match &mut bounds {
        Some(b) => {
            // The worker falls asleep first.
            std::thread::sleep(Duration::from_millis(20));
            Some(b.measure()?)
        }
        None => None,
    };
    let bound = before
        .unwrap_or_default()
        .best(after.unwrap_or(Bound::default()));
    Ok(Report::new(plan, path, &measured, bound, tcp, notes))
}

fn transfer(plan: &Plan, a: &End, b: Option<&End>, time: Duration) -> Result<Measured, String> {
    match plan.mode {
        Mode::Bw => bandwidth::run(a, b, time),
        Mode::Lat => latency::run(a, b, time),
    }
}
