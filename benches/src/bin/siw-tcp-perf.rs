//! `siw-tcp-perf`: compares siw-tcp with raw frames, and measures it under loss; prints a line of
//! JSON. Called by the groups `tcp` and `tcp-kernel` of `./benches/figures`; `siw-perf` needs siwd and cannot
//! measure TCP alone.
#![forbid(unsafe_code)]

use anyhow::{anyhow, bail};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Args, Parser, Subcommand};
use dpdk::{MbufCache, PortConfig};
use serde_json::{Value, json};
use siw_bench::daemon::Process;
use siw_bench::tcp::forward::{ImpairedLink, Loss};
use siw_bench::tcp::link::{BenchDpdk, PortEnd};
use siw_bench::tcp::pair::{PairLink, StackPair, StackPairConfig};
use siw_bench::tcp::raw::{self, BufferSource};
use siw_bench::tcp::{BenchClock, MSS};
use siw_ports::Port;
use siw_tcp::{CongestionControl, TsoLimits};

/// Time slices in which the parts of a measurement take turns, so that other load on the machine
/// disturbs all parts alike.
const SLICES: usize = 9;

#[derive(Debug, Parser)]
#[command(version, about = "Measures siw-tcp with both ends in one thread")]
struct TcpPerfOptions {
    #[command(subcommand)]
    what: TcpPerfCommand,
}

#[derive(Debug, Subcommand)]
enum TcpPerfCommand {
    /// Over a ring pair: one flow, one flow with idle connections, and many flows in turn, also
    /// with single segments; compared with raw frames of a header and a reference to memory.
    Stream {
        /// Number of connections, idle or active in turn.
        #[arg(long, default_value_t = 10_000)]
        connections: usize,
        /// Maximum segments per turn of these connections, like the limit of siwd's workers for a
        /// queue pair.
        #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u8).range(1..=64))]
        turn: u8,
        #[arg(long, default_value_t = 4.0)]
        secs: f64,
        /// Run only one part, for a profiler.
        #[arg(long, value_parser = ["raw", "one", "idle", "active", "alone"])]
        only: Option<String>,
    },
    /// Super-segments from a virtio_user port to its vhost backend, compared with raw ones.
    Tso {
        #[arg(long, default_value_t = 4.0)]
        secs: f64,
        /// Run only one part, for a profiler.
        #[arg(long, value_parser = ["raw", "tcp"])]
        only: Option<String>,
    },
    /// Flows over a link with loss and delay.
    Impaired {
        #[command(flatten)]
        link: ImpairmentOptions,
        /// Use the link between these two interfaces, which has its own impairments.
        #[arg(long, num_args = 2, value_names = ["LEFT", "RIGHT"])]
        between: Option<Vec<String>>,
        #[arg(long, default_value_t = 1)]
        flows: usize,
        #[arg(long, default_value_t = 5.0)]
        secs: f64,
    },
    /// Memory of an idle connection in bytes: by its types' sizes, and by the growth of the
    /// process.
    State {
        #[arg(long, default_value_t = 20_000)]
        connections: usize,
    },
    /// Provides an impaired link between two interfaces for other stacks, until its standard input
    /// closes.
    Forward {
        left: String,
        right: String,
        #[command(flatten)]
        link: ImpairmentOptions,
    },
}

#[derive(Debug, Args)]
struct ImpairmentOptions {
    /// Round-trip time of the link in microseconds.
    #[arg(long, default_value_t = 100.0)]
    rtt: f64,
    /// Loss probability of a data segment.
    #[arg(long, default_value_t = 0.01)]
    loss: f64,
    /// Instead of --loss: number of segments lost close together, once in --every segments.
    #[arg(long)]
    burst: Option<u64>,
    #[arg(long, default_value_t = 500)]
    every: u64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl ImpairmentOptions {
    fn new_forwarder(&self, ends: [PortEnd; 2]) -> ImpairedLink {
        let rtt = Duration::from_nanos((self.rtt.clamp(0.0, 1e7) * 1e3) as u64);
        let loss = match self.burst {
            Some(lost) => Loss::Burst {
                lost,
                every: self.every.max(1),
            },
            None => Loss::Random(self.loss),
        };
        ImpairedLink::new(ends, rtt, loss, self.seed)
    }
}

fn main() -> ExitCode {
    let code = match run_command(&TcpPerfOptions::parse().what) {
        Ok(line) => {
            println!("{line}");
            0
        }
        Err(error) => {
            eprintln!("siw-tcp-perf: {error}");
            2
        }
    };
    // A vhost port's threads outlive it, and must not run during exit handlers.
    dpdk::exit_process(code)
}

fn run_command(what: &TcpPerfCommand) -> anyhow::Result<Value> {
    let machine = BenchDpdk::start_eal()?;
    match what {
        TcpPerfCommand::Stream {
            connections,
            turn,
            secs,
            only,
        } => measure_streams(
            &machine,
            (*connections, usize::from(*turn)),
            *secs,
            only.as_deref(),
        ),
        TcpPerfCommand::State { connections } => measure_connection_state(&machine, *connections),
        TcpPerfCommand::Tso { secs, only } => measure_tso(&machine, *secs, only.as_deref()),
        TcpPerfCommand::Impaired {
            link,
            between,
            flows,
            secs,
        } => measure_impaired_link(&machine, link, between.as_deref(), *flows, *secs),
        TcpPerfCommand::Forward { left, right, link } => {
            forward_until_closed(&machine, left, right, link)
        }
    }
}

const ONE: StackPairConfig = StackPairConfig {
    connections: 1,
    tso: None,
    software_checksum: false,
    congestion: CongestionControl::Cubic,
};

/// The median, which ignores the fastest and the most disturbed slices.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn measure_streams(
    machine: &BenchDpdk,
    (connections, turn): (usize, usize),
    secs: f64,
    only: Option<&str>,
) -> anyhow::Result<Value> {
    let mut ends = machine.open_ring_pair("tcp")?;
    let (mut source, _trackers) = machine.new_source(true)?;
    let clock = BenchClock::new();
    let mut pairs = Vec::new();
    for connections in [1, connections, connections] {
        let config = StackPairConfig { connections, ..ONE };
        let mut pair = StackPair::new(clock, &config)?;
        let mut link = PairLink {
            ends: &mut ends,
            source: &mut source,
            forward: None,
        };
        pair.open_connections(&mut link, connections)?;
        pairs.push(pair);
    }
    // Parts: raw frames, one flow, one flow with idle connections, all in turn; then round trips,
    // raw frames from cached buffers, all in turn with single segments.
    let slice = Duration::from_secs_f64(secs.clamp(0.1, 600.0) / (8 * SLICES) as f64);
    let mut parts: [Vec<f64>; 8] = Default::default();
    let wanted = |part: &str| only.is_none_or(|only| only == part);
    for _ in 0..SLICES {
        if wanted("raw") {
            let mut raw =
                |buffers| raw::measure_raw_stream(&mut ends, &mut source, MSS, buffers, slice);
            parts[0].push(raw(BufferSource::Pool));
            parts[6].push(raw(BufferSource::Cache));
        }
        let mut link = PairLink {
            ends: &mut ends,
            source: &mut source,
            forward: None,
        };
        let rest = Duration::from_millis(2);
        let streams = [
            ("one", 0, 1),
            ("idle", 1, 2),
            ("active", 2, 3),
            ("alone", 2, 7),
        ];
        for (part, pair, to) in streams {
            if !wanted(part) {
                continue;
            }
            let pair = &mut pairs[pair];
            parts[to].push(match part {
                "active" => pair.measure_round_robin(&mut link, (connections, turn), slice),
                "alone" => pair.measure_round_robin(&mut link, (connections, 1), slice),
                _ => pair.measure_stream(&mut link, 1, slice),
            });
            pair.drain_link(&mut link, rest);
        }
        for index in 0..2 {
            if only.is_none() {
                parts[4 + index].push(pairs[index].measure_round_trip(&mut link, slice)?);
                pairs[index].drain_link(&mut link, rest);
            }
        }
    }
    let ratio = |part: &[f64], reference: &[f64], high: bool| {
        // Compares slice by slice, since neighbouring slices share their disturbances.
        let mut ratios: Vec<f64> = part
            .iter()
            .zip(reference)
            .map(|(value, reference)| value / reference)
            .collect();
        if !high {
            ratios.iter_mut().for_each(|value| *value = 1.0 / *value);
        }
        median(&mut ratios)
    };
    let idle_stream = ratio(&parts[2], &parts[1], true);
    let idle_rtt = ratio(&parts[5], &parts[4], true);
    let active = ratio(&parts[3], &parts[1], true);
    let of_raw = ratio(&parts[1], &parts[0], true);
    let of_cached = ratio(&parts[1], &parts[6], true);
    let alone = ratio(&parts[7], &parts[1], true);
    let [raw, one, idle, many, rtt, rtt_idle, cached, single] =
        parts.each_mut().map(|part| median(part));
    Ok(json!({
        "raw_gbps": raw, "gbps": one, "ratio": of_raw,
        "raw_cached_gbps": cached, "cached_ratio": of_cached,
        "idle_gbps": idle, "idle_cost_percent": 100.0 * (1.0 - idle_stream),
        "active_gbps": many, "active_ratio": active,
        "alone_gbps": single, "alone_ratio": alone,
        "rtt_ns": rtt, "idle_rtt_ns": rtt_idle,
        "idle_rtt_cost_percent": 100.0 * (idle_rtt - 1.0),
        "timeouts": pairs.iter().map(|part| part.sender_stats().tcp.timeouts).sum::<u64>(),
        "retransmits": pairs.iter().map(|part| part.sender_stats().tcp.retrans_segs).sum::<u64>(),
    }))
}

fn measure_connection_state(machine: &BenchDpdk, connections: usize) -> anyhow::Result<Value> {
    let mut ends = machine.open_ring_pair("tcp")?;
    let (mut source, _trackers) = machine.new_source(true)?;
    let mut link = PairLink {
        ends: &mut ends,
        source: &mut source,
        forward: None,
    };
    let config = StackPairConfig { connections, ..ONE };
    let process = Process::new(std::process::id());
    // Excludes first-time allocations.
    StackPair::new(BenchClock::new(), &ONE)?.open_connections(&mut link, 500)?;
    let before = process.private_bytes()?;
    let mut pair = StackPair::new(BenchClock::new(), &config)?;
    pair.open_connections(&mut link, connections)?;
    let grown = process.private_bytes()?.saturating_sub(before);
    Ok(json!({
        "idle_bytes": StackPair::CONNECTION_BYTES, "hot_bytes": StackPair::HOT_BYTES,
        "grown_bytes": grown as f64 / (2 * connections) as f64,
    }))
}

fn measure_tso(machine: &BenchDpdk, secs: f64, only: Option<&str>) -> anyhow::Result<Value> {
    // Maximum that fits into an IP packet.
    const SEGMENTS: u16 = 44;
    let dir = std::env::temp_dir().join(format!("siw-tcp-perf-{}", std::process::id()));
    std::fs::create_dir(&dir).map_err(|error| anyhow!("{}: {error}", dir.display()))?;
    let socket = dir.join("sock");
    let socket = socket.display();
    let port = |args: String| Port::attach_vdev(&machine.eal, &args).map_err(anyhow::Error::new);
    let config = PortConfig {
        rx_desc: 256,
        tx_desc: 256,
        ..PortConfig::default()
    };
    let back = port(format!("net_vhost0,iface={socket},queues=1,tso=1"))?;
    let back = machine.open_port(back, &config)?;
    let front = port(format!(
        "net_virtio_user0,path={socket},queues=1,queue_size=256,mrg_rxbuf=1"
    ))?;
    let front = machine.open_port(front, &config)?;
    if !front.tso {
        bail!("the virtio_user port cuts no segments");
    }
    let mut ends = [front, back];
    let (mut source, _trackers) = machine.new_source(false)?;
    let clock = BenchClock::new();
    let bytes = u32::from(SEGMENTS) * MSS as u32;
    let config = StackPairConfig {
        tso: Some(TsoLimits {
            max_segments: SEGMENTS,
            max_bytes: bytes,
        }),
        ..ONE
    };
    let mut pair = StackPair::new(clock, &config)?;
    let slice = Duration::from_secs_f64(secs.clamp(0.1, 600.0) / (2 * SLICES) as f64);
    let mut link = PairLink {
        ends: &mut ends,
        source: &mut source,
        forward: None,
    };
    pair.open_connections(&mut link, 1)?;
    let (mut raws, mut tcps, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..SLICES {
        let mut raw = f64::NAN;
        if only != Some("tcp") {
            raw = raw::measure_raw_stream(
                link.ends,
                link.source,
                bytes as usize,
                BufferSource::Cache,
                slice,
            );
        }
        let mut tcp = f64::NAN;
        if only != Some("raw") {
            tcp = pair.measure_stream(&mut link, 1, slice);
            pair.drain_link(&mut link, Duration::from_millis(2));
        }
        ratios.push(tcp / raw);
        raws.push(raw);
        tcps.push(tcp);
    }
    let stats = pair.sender_stats();
    let frames = stats.tcp.tso_frames;
    let _ = std::fs::remove_dir_all(&dir);
    Ok(json!({
        "raw_gbps": median(&mut raws), "gbps": median(&mut tcps), "ratio": median(&mut ratios),
        "tso_frames": frames, "segments_per_frame": stats.tcp.out_segs as f64 / stats.net.frames_out as f64,
        "retransmits": stats.tcp.retrans_segs,
    }))
}

fn measure_impaired_link(
    machine: &BenchDpdk,
    link: &ImpairmentOptions,
    between: Option<&[String]>,
    flows: usize,
    secs: f64,
) -> anyhow::Result<Value> {
    let (mut ends, forward) = if let Some([left, right]) = between {
        (open_interfaces(machine, left, right)?, None)
    } else {
        let [left, left_far] = machine.open_ring_pair("left")?;
        let [right, right_far] = machine.open_ring_pair("right")?;
        (
            [left, right],
            Some(link.new_forwarder([left_far, right_far])),
        )
    };
    let (mut source, _trackers) = machine.new_source(between.is_none())?;
    let config = StackPairConfig {
        connections: flows,
        ..ONE
    };
    let mut pair = StackPair::new(BenchClock::new(), &config)?;
    let mut link = PairLink {
        ends: &mut ends,
        source: &mut source,
        forward,
    };
    pair.open_connections(&mut link, flows)?;
    let gbps = pair.measure_stream(
        &mut link,
        flows,
        Duration::from_secs_f64(secs.clamp(0.1, 600.0)),
    );
    let stats = pair.sender_stats();
    let (data, full) = link
        .forward
        .as_ref()
        .map_or((0, 0), ImpairedLink::count_frames);
    Ok(json!({
        "gbps": gbps, "mbps": 1e3 * gbps, "timeouts": stats.tcp.timeouts,
        "retransmits": stats.tcp.retrans_segs, "fast_recoveries": stats.tcp.fast_recovery,
        "tail_probes": stats.tcp.tlp_probes, "spurious": stats.tcp.spurious,
        "lost": link.forward.as_ref().map_or(0, |forwarder| forwarder.lost), "data": data, "full": full,
        "srtt_us": pair.smoothed_rtt().map(|duration| duration.as_secs_f64() * 1e6),
    }))
}

/// Packet sockets on two interfaces without other users.
fn open_interfaces(machine: &BenchDpdk, left: &str, right: &str) -> anyhow::Result<[PortEnd; 2]> {
    let open = |index: u8, iface: &str| {
        let args = format!(
            "net_af_packet{index},iface={iface},blocksz=65536,framesz=2048,framecnt=4096,qdisc_bypass=1"
        );
        let port =
            Port::attach_vdev(&machine.eal, &args).map_err(|error| anyhow!("{iface}: {error}"))?;
        let mut end = machine.open_port(port, &PortConfig::default())?;
        // Veth devices do not corrupt frames.
        (end.offload, end.trusted) = (false, true);
        anyhow::Ok(end)
    };
    Ok([open(0, left)?, open(1, right)?])
}

fn forward_until_closed(
    machine: &BenchDpdk,
    left: &str,
    right: &str,
    link: &ImpairmentOptions,
) -> anyhow::Result<Value> {
    let mut forward = link.new_forwarder(open_interfaces(machine, left, right)?);
    let mut cache = MbufCache::new(&machine.pool);
    let clock = BenchClock::new();
    println!("ready");
    // The parent process holds the other end of standard input.
    let gone = std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
    });
    let mut look = Instant::now();
    loop {
        if !forward.pass_frames(clock.read_clock(), &mut cache) {
            std::hint::spin_loop();
        }
        if look.elapsed() > Duration::from_millis(20) {
            if gone.is_finished() {
                break;
            }
            look = Instant::now();
        }
    }
    let (data, full) = forward.count_frames();
    Ok(json!({ "data": data, "lost": forward.lost, "full": full }))
}
