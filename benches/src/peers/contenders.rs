//! The contenders: their requirements, and one round's measurement of each.

use super::PeerFigure::{Bulk64kGbps, CpuSecondsPerGb, CyclesPerMessage, RoundTrip64Us};
use super::cost::CpuUse;
use super::default_daemon::{LinkSettings, start_default_daemon};
use super::namespaces::{NamespacePair, SERVER_ADDRESS, VethSettings};
use super::run_program::{run_measured, run_to_end};
use super::testpmd;
use super::{MeasuredValues, PeerFigure};
use crate::args::PeersOptions;
use crate::own_daemon::{OwnDaemon, sibling_program};
use crate::running_program::RunningProgram;
use anyhow::{anyhow, bail};
use serde_json::Value;
use std::process::Command;
use std::time::Duration;

/// Bytes of a message in bulk transfers.
const BULK_SIZE: &str = "65536";
/// Bytes of a message in round trips.
const SMALL_SIZE: &str = "64";
/// Round trips of programs that take a count instead of a duration.
const ROUND_TRIPS: &str = "20000";
/// Bulk messages of programs that take a count instead of a duration.
const BULK_MESSAGES: &str = "20000";
/// Small messages in a stream, of programs that take a count instead of a duration.
const SMALL_MESSAGES: &str = "1000000";
/// [`BULK_SIZE`] and [`SMALL_SIZE`] as numbers.
const BULK_BYTES: f64 = 65536.0;
const SMALL_BYTES: f64 = 64.0;
/// TCP port of our own ping-pong.
const PING_PONG_PORT: u16 = 7177;

/// One implementation in the comparison.
pub(super) struct Contender {
    /// Human-readable name and set-up.
    pub(super) name: String,
    /// Checksums computed, cores, and how the ends wait while their CPU time is measured.
    pub(super) differs: String,
    /// Programs that must be installed, each with its Debian package.
    pub(super) needs: Vec<(&'static str, &'static str)>,
    /// Runs one measurement.
    pub(super) measure: Box<dyn FnMut() -> anyhow::Result<MeasuredValues>>,
}

impl Contender {
    /// Describes the first required program that is not installed, if any.
    pub(super) fn find_missing_program(&self) -> Option<String> {
        let (program, package) = self
            .needs
            .iter()
            .find(|(program, _)| !is_installed(program))?;
        Some(format!(
            "{program} is not installed; it is in the package {package}"
        ))
    }
}

fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

const NAMESPACE_PROGRAMS: [(&str, &str); 3] = [
    ("ip", "iproute2"),
    ("ethtool", "ethtool"),
    ("taskset", "util-linux"),
];

/// All contenders in the order of measurement. `cores`: that of the initiating side, and that of
/// the other side.
pub(super) fn all_contenders(options: &PeersOptions, cores: [usize; 2]) -> Vec<Contender> {
    let time = options.secs;
    let veth = |mtu, offloads| VethSettings { mtu, offloads };
    let link = |mtu| LinkSettings { mtu, crc: true };
    // With CRC first: without one, siwd leaves out work that an iWARP peer may require.
    let mut all = vec![
        own_devices("siwd, CRC, MTU of the default", link(None), cores, time),
        own_devices("siwd, CRC, MTU 1500", link(Some(1500)), cores, time),
        own_devices("siwd, default", LinkSettings::default(), cores, time),
        own_drop_in("siwd, ib_write_bw unmodified", cores, time),
    ];
    for (set_up, settings) in [
        ("all offloads, MTU 1500", veth(1500, true)),
        ("no offloads, MTU 1500", veth(1500, false)),
        ("all offloads, MTU 9000", veth(9000, true)),
        ("no offloads, MTU 9000", veth(9000, false)),
    ] {
        all.push(kernel_tcp(set_up, settings, cores, time));
    }
    all.push(ucx_tcp(veth(1500, true), cores));
    all.push(libfabric_tcp(veth(1500, true), cores));
    all.extend(testpmd::contenders(cores, time));
    all
}

/// Runs siw-perf once with a daemon; returns the result line, and the CPU use of both.
fn siw_perf(
    daemon: &OwnDaemon,
    arguments: &[&str],
    time: Duration,
) -> anyhow::Result<(Value, CpuUse)> {
    let mut command = Command::new(sibling_program("siw-perf"));
    command
        .args(arguments)
        .args([
            "--no-bounds",
            "--json",
            "--secs",
            &time.as_secs_f64().to_string(),
            "--socket",
        ])
        .arg(daemon.socket());
    let (text, used) = run_measured(&mut command, &[daemon.pid()])?;
    let result = serde_json::from_str(text.trim())
        .map_err(|error| anyhow!("siw-perf printed no result: {error}"))?;
    Ok((result, used))
}

fn number(value: &Value, name: &str) -> anyhow::Result<f64> {
    value
        .as_f64()
        .ok_or_else(|| anyhow!("the result has no {name}"))
}

/// Applications of client-lib, both in one process, with a siwd that has one worker.
fn own_devices(
    name: &str,
    link: LinkSettings,
    [client, worker]: [usize; 2],
    time: Duration,
) -> Contender {
    let measure = move || {
        let daemon = start_default_daemon(worker, link)?;
        let core = client.to_string();
        let on_core = ["--core", &core[..]];
        let run = |arguments: &[&str]| siw_perf(&daemon, &[arguments, &on_core[..]].concat(), time);
        let bulk = ["bw", "--size", BULK_SIZE, "--depth", "16"];
        let (spinning, _) = run(&bulk)?;
        let (small, _) = run(&["lat", "--size", SMALL_SIZE])?;
        let mut values = vec![
            (Bulk64kGbps, number(&spinning["gbps"], "gbps")?),
            (
                RoundTrip64Us,
                number(&small["lat_us"]["p50"], "lat_us.p50")?,
            ),
        ];
        // A spinning client would use its whole core at any bandwidth.
        let (bulk, used) = run(&[&bulk[..], &["--events"]].concat())?;
        let gbps = number(&bulk["gbps"], "gbps")?;
        values.push((CpuSecondsPerGb, used.seconds_per_gb(gbps)));
        let (small, used) = run(&["rate", "--size", SMALL_SIZE, "--events"])?;
        let gbps = number(&small["gbps"], "gbps")?;
        values.push((CyclesPerMessage, used.cycles_per_message(gbps, SMALL_BYTES)));
        Ok(values)
    };
    let checksums = match link.crc {
        true => "CRC32c of each FPDU",
        false => "no checksum",
    };
    Contender {
        name: name.into(),
        differs: format!(
            "{checksums}; one core for both ends' application, one for siwd; cost: waiting for events"
        ),
        needs: vec![],
        measure: Box::new(measure),
    }
}

/// perftest over the drop-in libraries: two processes on the client's core, since our client is one
/// process.
fn own_drop_in(name: &str, [client, worker]: [usize; 2], time: Duration) -> Contender {
    let measure = move || {
        let daemon = start_default_daemon(worker, LinkSettings::default())?;
        let program = |device: &str| {
            let mut command = Command::new("taskset");
            command
                .args(["-c", &client.to_string()])
                .arg(sibling_program("siwrun"))
                .args([
                    "ib_write_bw",
                    "-R",
                    "-F",
                    "--report_gbits",
                    "-s",
                    BULK_SIZE,
                    "-d",
                    device,
                ])
                .args(["-D", &time.as_secs().max(2).to_string()])
                .env("SIWD_SOCKET", daemon.socket());
            command
        };
        let _server = RunningProgram::start(&mut program("siw1"))?;
        // The server does not report when it listens, so a failed early connect is repeated.
        let mut last = anyhow!("ib_write_bw was not started");
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(100));
            match run_to_end(program("siw0").arg("10.77.0.2")) {
                Ok(text) => return Ok(vec![(Bulk64kGbps, perftest_gbps(&text)?)]),
                Err(error) => last = error,
            }
        }
        Err(last)
    };
    Contender {
        name: name.into(),
        differs: "no checksum; one core for both programs, one for siwd".into(),
        needs: vec![("ib_write_bw", "perftest"), ("taskset", "util-linux")],
        measure: Box::new(measure),
    }
}

/// The average bandwidth: the fourth number on the only line that begins with the size.
fn perftest_gbps(text: &str) -> anyhow::Result<f64> {
    let line = text
        .lines()
        .map(str::split_whitespace)
        .find_map(|mut words| {
            (words.next() == Some(BULK_SIZE))
                .then(|| words.nth(2))
                .flatten()
        });
    line.and_then(|word| word.parse().ok())
        .ok_or_else(|| anyhow!("ib_write_bw printed no bandwidth"))
}

/// The kernel's TCP over veth: iperf3 with CUBIC, and our own ping-pong with both ends spinning.
fn kernel_tcp(
    set_up: &str,
    settings: VethSettings,
    [client, server]: [usize; 2],
    time: Duration,
) -> Contender {
    let measure = move || {
        let link = NamespacePair::create(settings)?;
        let iperf = |size: &str| {
            let mut command = link.server(server, "iperf3");
            let listening = RunningProgram::start(command.args(["-s", "-1"]))?;
            link.wait_for_listener(5201)?;
            let mut command = link.client(client, "iperf3");
            command.args(["-c", SERVER_ADDRESS, "-C", "cubic", "-l", size, "-J", "-t"]);
            command.arg(time.as_secs().max(1).to_string());
            let (text, used) = run_measured(&mut command, &[listening.pid()])?;
            anyhow::Ok((iperf_gbps(&text)?, used))
        };
        let (gbps, used) = iperf(BULK_SIZE)?;
        let mut values = vec![
            (Bulk64kGbps, gbps),
            (CpuSecondsPerGb, used.seconds_per_gb(gbps)),
        ];
        let (gbps, used) = iperf(SMALL_SIZE)?;
        values.push((CyclesPerMessage, used.cycles_per_message(gbps, SMALL_BYTES)));
        let own = sibling_program("siw-perf").to_string_lossy().into_owned();
        let address = format!("{SERVER_ADDRESS}:{PING_PONG_PORT}");
        let mut command = link.server(server, &own);
        let _server = RunningProgram::start(command.args(["tcp-ping-pong", "--listen", &address]))?;
        link.wait_for_listener(PING_PONG_PORT)?;
        let mut command = link.client(client, &own);
        command.args(["tcp-ping-pong", "--connect", &address, "--secs"]);
        let text = run_to_end(command.arg(time.as_secs_f64().to_string()))?;
        let us = text
            .trim()
            .parse()
            .map_err(|_| anyhow!("no time in {text:?}"))?;
        values.push((RoundTrip64Us, us));
        Ok(values)
    };
    let checksums = match settings.offloads {
        true => "no checksum (left to the device, which computes none)",
        false => "TCP checksum of each segment",
    };
    let mut needs = vec![("iperf3", "iperf3"), ("ss", "iproute2")];
    needs.extend(NAMESPACE_PROGRAMS);
    Contender {
        name: format!("kernel TCP, {set_up}"),
        differs: format!("{checksums}; one core for each end; cost: blocking calls"),
        needs,
        measure: Box::new(measure),
    }
}

fn iperf_gbps(text: &str) -> anyhow::Result<f64> {
    let json: Value = serde_json::from_str(text).map_err(|error| anyhow!("iperf3: {error}"))?;
    if let Some(error) = json["error"].as_str() {
        bail!("iperf3: {error}");
    }
    number(&json["end"]["sum_received"]["bits_per_second"], "rate").map(|rate| rate / 1e9)
}

/// UCX put operations over its TCP transport.
fn ucx_tcp(settings: VethSettings, [client, server]: [usize; 2]) -> Contender {
    let measure = move || {
        let link = NamespacePair::create(settings)?;
        let run = |test: &str, size: &str, count: &str, wait: &str| {
            let only_tcp = |command: &mut Command| {
                command.env("UCX_TLS", "tcp").env("UCX_NET_DEVICES", "eth0");
            };
            let mut command = link.server(server, "ucx_perftest");
            only_tcp(&mut command);
            let listening = RunningProgram::start(command.args(["-E", wait]))?;
            link.wait_for_listener(13337)?;
            let mut command = link.client(client, "ucx_perftest");
            only_tcp(&mut command);
            command.args([SERVER_ADDRESS, "-t", test, "-s", size, "-n", count]);
            command.args(["-E", wait, "-w", "200", "-f", "-v"]);
            run_measured(&mut command, &[listening.pid()])
        };
        // ucx_perftest reports mebibytes, and half of a round trip.
        let gbps = |text: &str| {
            ucx_column(text, "overall_bw").map(|rate| rate * f64::from(1 << 20) * 8.0 / 1e9)
        };
        let (bulk, _) = run("ucp_put_bw", BULK_SIZE, BULK_MESSAGES, "poll")?;
        let (small, _) = run("ucp_put_lat", SMALL_SIZE, ROUND_TRIPS, "poll")?;
        let half = ucx_column(&small, "50.0_percentile_lat")?;
        let mut values = vec![(Bulk64kGbps, gbps(&bulk)?), (RoundTrip64Us, 2.0 * half)];
        let (bulk, used) = run("ucp_put_bw", BULK_SIZE, BULK_MESSAGES, "sleep")?;
        values.push((CpuSecondsPerGb, used.seconds_per_gb(gbps(&bulk)?)));
        let (small, used) = run("ucp_put_bw", SMALL_SIZE, SMALL_MESSAGES, "sleep")?;
        let cycles = used.cycles_per_message(gbps(&small)?, SMALL_BYTES);
        values.push((CyclesPerMessage, cycles));
        Ok(values)
    };
    let mut needs = vec![("ucx_perftest", "ucx-utils")];
    needs.extend(NAMESPACE_PROGRAMS);
    Contender {
        name: "UCX tcp, put".into(),
        differs:
            "no checksum (left to the device); one core for each end; cost: asleep while waiting"
                .into(),
        needs,
        measure: Box::new(measure),
    }
}

/// A column of the last line of ucx_perftest's CSV output.
fn ucx_column(text: &str, name: &str) -> anyhow::Result<f64> {
    let mut lines = text.lines().filter(|line| line.contains(','));
    let header = lines.next().unwrap_or_default();
    let values = lines.next_back().unwrap_or_default();
    let column = header.split(',').position(|column| column == name);
    column
        .and_then(|column| values.split(',').nth(column)?.parse().ok())
        .ok_or_else(|| anyhow!("ucx_perftest printed no {name}"))
}

/// libfabric's TCP provider: fi_pingpong, which measures round trips only, so that its costs are
/// those of one message in flight.
fn libfabric_tcp(settings: VethSettings, [client, server]: [usize; 2]) -> Contender {
    let measure = move || {
        let link = NamespacePair::create(settings)?;
        let run = |size: &str, count: &str| {
            let options = [
                "-p", "tcp", "-e", "msg", "-m", "msg", "-I", count, "-S", size,
            ];
            let mut command = link.server(server, "fi_pingpong");
            let listening = RunningProgram::start(command.args(options))?;
            link.wait_for_listener(47592)?;
            let mut command = link.client(client, "fi_pingpong");
            command.args(options).arg(SERVER_ADDRESS);
            let (text, used) = run_measured(&mut command, &[listening.pid()])?;
            anyhow::Ok((pingpong_us(&text)?, used))
        };
        // The reported time is that of one direction, and so of one message.
        let gbps = |us: f64, size: f64| size * 8.0 / us / 1e3;
        let (half, used) = run(SMALL_SIZE, ROUND_TRIPS)?;
        let cycles = used.cycles_per_message(gbps(half, SMALL_BYTES), SMALL_BYTES);
        let mut values = vec![(RoundTrip64Us, 2.0 * half), (CyclesPerMessage, cycles)];
        let (us, used) = run(BULK_SIZE, BULK_MESSAGES)?;
        values.push((CpuSecondsPerGb, used.seconds_per_gb(gbps(us, BULK_BYTES))));
        Ok(values)
    };
    let mut needs = vec![("fi_pingpong", "libfabric-bin")];
    needs.extend(NAMESPACE_PROGRAMS);
    Contender {
        name: "libfabric tcp, messages".into(),
        differs:
            "no checksum (left to the device); one core for each end; cost: one message in flight"
                .into(),
        needs,
        measure: Box::new(measure),
    }
}

/// The column `usec/xfer` of fi_pingpong's table.
fn pingpong_us(text: &str) -> anyhow::Result<f64> {
    let mut lines = text.lines().skip_while(|line| !line.contains("usec/xfer"));
    let column = lines.next().and_then(|header| {
        header
            .split_whitespace()
            .position(|name| name == "usec/xfer")
    });
    let values = lines.next().unwrap_or_default();
    column
        .and_then(|column| values.split_whitespace().nth(column)?.parse().ok())
        .ok_or_else(|| anyhow!("fi_pingpong printed no time"))
}

/// The best median among contenders whose name begins with `prefix`.
pub(super) fn best_of<'a>(
    results: impl Iterator<Item = &'a super::PeerResult>,
    figure: PeerFigure,
    prefix: &str,
) -> Option<f64> {
    let medians = results
        .filter(|result| result.figure == figure && result.name.starts_with(prefix))
        .map(|result| result.median);
    match figure.less_is_better() {
        true => medians.reduce(f64::min),
        false => medians.reduce(f64::max),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_other_programs_are_read() {
        let ucx = "iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw\n\
                   20000,12.745,230.519,241.270,271.13,259.05\n";
        assert_eq!(ucx_column(ucx, "overall_bw").unwrap(), 259.05);
        assert_eq!(ucx_column(ucx, "50.0_percentile_lat").unwrap(), 12.745);
        assert!(ucx_column("", "overall_bw").is_err());
        let fabric = "bytes   #sent   #ack     total       time     MB/sec    usec/xfer\n\
                      64      5k      =5k      625k        0.99s      0.65      99.06\n";
        assert_eq!(pingpong_us(fabric).unwrap(), 99.06);
        let iperf = r#"{"end":{"sum_received":{"bits_per_second":2.5e9}}}"#;
        assert_eq!(iperf_gbps(iperf).unwrap(), 2.5);
        assert!(
            iperf_gbps(r#"{"error":"refused"}"#)
                .unwrap_err()
                .to_string()
                .contains("refused")
        );
        let perftest =
            " #bytes #iterations BW peak[Gb/sec] BW average[Gb/sec]\n 65536 5000 0.00 24.5 0.05\n";
        assert_eq!(perftest_gbps(perftest).unwrap(), 24.5);
    }

    #[test]
    fn a_missing_program_is_named_with_its_package() {
        let contender = Contender {
            name: "example".into(),
            differs: String::new(),
            needs: vec![("sh", "dash"), ("no-such-program", "no-such-package")],
            measure: Box::new(|| Err(anyhow!("not to be called"))),
        };
        let missing = contender.find_missing_program().unwrap();
        assert!(missing.contains("no-such-program") && missing.contains("no-such-package"));
    }
}
