//! One seed, one run: two stacks and an impaired network that changes during the run, and the
//! properties that must always hold: delivered data is a prefix of sent data, all of it arrives,
//! both ends close, retransmissions keep their boundaries, memory stays bounded.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use siw_tcp::{CongestionControl, Events, StackConfig, TsoLimits};
use siw_tcp_sim::{Impairment, Rng};

use super::capture::Capture;
use super::quiet::caught;
use super::{Transfer, configs, micros};

/// A deliberate fault, to verify that it is detected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A payload byte is changed in transit and the checksum corrected.
    Forge,
    /// From some time on, one host receives nothing.
    Silence,
    /// A retransmission appears to have different boundaries.
    Recut,
    /// The owner never reads, so that received data reaches the receive limits.
    KeepUnread,
}

/// Counters of a successful run.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScenarioOutcome {
    pub bytes: u64,
    pub frames: u64,
    pub lost: u64,
    pub retransmits: u64,
    pub timeouts: u64,
    pub shrunk: u64,
    pub too_big: u64,
    pub narrowed: u64,
    pub pruned: u64,
}

impl ScenarioOutcome {
    /// Name and value of each counter.
    pub fn rows(&self) -> [(&'static str, u64); 9] {
        [
            ("bytes", self.bytes),
            ("frames", self.frames),
            ("lost", self.lost),
            ("retransmits", self.retransmits),
            ("timeouts", self.timeouts),
            ("windows_shrunk", self.shrunk),
            ("packets_too_big", self.too_big),
            ("paths_narrowed", self.narrowed),
            ("buffers_pruned", self.pruned),
        ]
    }

    pub fn add(&mut self, outcome: &ScenarioOutcome) {
        self.bytes += outcome.bytes;
        self.frames += outcome.frames;
        self.lost += outcome.lost;
        self.retransmits += outcome.retransmits;
        self.timeouts += outcome.timeouts;
        self.shrunk += outcome.shrunk;
        self.too_big += outcome.too_big;
        self.narrowed += outcome.narrowed;
        self.pruned += outcome.pruned;
    }
}

/// A seed that broke a property.
#[derive(Debug)]
pub struct ScenarioFailure {
    pub seed: u64,
    pub why: String,
    pub replay: String,
    pub pcapng: Option<PathBuf>,
}

impl fmt::Display for ScenarioFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "seed {} failed: {}\nreplay: {}",
            self.seed, self.why, self.replay
        )?;
        if let Some(path) = &self.pcapng {
            write!(f, "\ncapture: {}", path.display())?;
        }
        Ok(())
    }
}

fn link(rng: &mut Rng) -> Impairment {
    let mut link = Impairment::perfect(micros(5 + rng.below(2000)));
    if rng.chance(0.7) {
        link.loss = rng.below(300) as f64 / 1000.0 * if rng.chance(0.5) { 0.1 } else { 1.0 };
    }
    if rng.chance(0.3) {
        link.burst = (0.02, 0.2);
    }
    if rng.chance(0.5) {
        link.reorder = rng.below(200) as f64 / 1000.0;
        link.jitter = micros(rng.below(300));
    }
    if rng.chance(0.4) {
        link.duplicate = rng.below(200) as f64 / 1000.0;
    }
    if rng.chance(0.4) {
        link.corrupt = rng.below(100) as f64 / 1000.0;
    }
    if rng.chance(0.3) {
        link.rate = 50_000_000 + rng.below(10_000_000_000);
        link.queue = 20 + rng.below(200) as usize;
        link.mark = rng.below(40) as usize;
    }
    if rng.chance(0.25) {
        link.shrink = rng.below(300) as f64 / 1000.0;
    }
    link
}

fn stack(rng: &mut Rng, config: &mut StackConfig) {
    config.tcp.congestion = if rng.chance(0.5) {
        CongestionControl::Cubic
    } else if rng.chance(0.5) {
        CongestionControl::NewReno
    } else {
        CongestionControl::Dctcp
    };
    config.tcp.ecn = rng.chance(0.5);
    if rng.chance(0.3) {
        config.tcp.tx_checksum = false;
        config.tcp.tso = Some(TsoLimits {
            max_segments: 2 + rng.below(60) as u16,
            max_bytes: 5_000 + rng.below(60_000) as u32,
        });
    }
    config.tcp.recv_window = 16384 << rng.below(8);
    if rng.chance(0.2) {
        config.tcp.max_recv_buffers = 64 + rng.below(200) as usize;
    }
    if rng.chance(0.2) {
        config.tcp.max_held_buffers = 64 + rng.below(200) as usize;
    }
    config.tcp.timestamps = !rng.chance(0.2);
    config.tcp.sack = !rng.chance(0.2);
    config.tcp.user_timeout = Duration::from_secs(3600);
    config.tcp.syn_retries = 30;
    config.tcp.rto_initial = Duration::from_millis(50);
    config.tcp.rto_max = Duration::from_secs(2);
    config.net.neighbours.probes = 50;
    config.net.neighbours.retransmit = Duration::from_millis(20);
    config.tcp.time_wait = Duration::from_secs(60);
}

/// Draws when the MTU of the path changes, and its new value (IP packet; 0: unlimited).
fn narrowings(rng: &mut Rng, v6: bool) -> Vec<(Duration, usize, u16, f64)> {
    if !rng.chance(0.3) {
        return vec![];
    }
    let icmp_error = if rng.chance(0.5) {
        1.0
    } else {
        rng.below(3) as f64 / 2.0
    };
    let mut at = Duration::ZERO;
    (0..1 + rng.below(4))
        .map(|_| {
            at += micros(rng.below(60_000));
            let floor = if v6 { 1280 } else { 576 };
            let mtu = match rng.below(5) {
                0 => 0,
                1 => floor,
                2 => 1280,
                _ => floor + rng.below(900) as u16,
            };
            (at, rng.below(2) as usize, mtu, icmp_error)
        })
        .collect()
}

/// Runs a seed; panics if a property is violated. `capture` records the frames of the network.
fn run_seed(seed: u64, fault: Option<Fault>, capture: &mut Option<Capture>) -> ScenarioOutcome {
    let mut rng = Rng::new(seed);
    let mut configs = configs();
    let vlan = rng.chance(0.2).then_some(42);
    let mtu = [1500, 9000, 1280][rng.below(3) as usize];
    for config in &mut configs {
        config.net.vlan = vlan;
        config.net.mtu = mtu;
        stack(&mut rng, config);
    }
    let goals = [
        rng.below(300_000),
        if rng.chance(0.5) {
            rng.below(300_000)
        } else {
            0
        },
    ];
    let links = [link(&mut rng), link(&mut rng)];
    let limits = configs.each_ref().map(|config| {
        let (own, all) = (config.tcp.max_recv_buffers, config.tcp.max_held_buffers);
        (own + own / 8 + 1).min(all.saturating_add(all / 8).saturating_add(2))
    });
    let mut transfer = Transfer::new(seed, configs, links, goals);
    if capture.is_some() {
        *capture = Some(Capture::of(&mut transfer.net));
    }
    for side in &mut transfer.sides {
        side.record = if rng.chance(0.3) {
            1 + rng.below(20_000) as u32
        } else {
            0
        };
        side.read_step = if rng.chance(0.2) {
            1000 + rng.below(5000) as usize
        } else {
            0
        };
    }
    let v6 = rng.chance(0.4);
    let mut changes = narrowings(&mut rng, v6).into_iter().peekable();
    match fault {
        Some(Fault::Forge) => transfer.net.forge = 400,
        Some(Fault::Silence) => {
            let mut count = 0;
            transfer.net.filter = Some(Box::new(move |from, _| {
                count += 1;
                from == 0 || count < 30
            }));
        }
        Some(Fault::KeepUnread) => transfer
            .sides
            .iter_mut()
            .for_each(|side| side.read_step = usize::MAX),
        _ => {}
    }
    transfer.connect(v6);
    let start = transfer.net.now;
    let mut held = [0; 2];
    let mut links = links;
    let done = transfer.run_watching(Duration::from_secs(900), |net| {
        while let Some((_, host, mtu, icmp_error)) =
            changes.next_if(|(at, ..)| net.now >= start + *at)
        {
            (links[host].mtu, links[host].icmp_error) = (mtu, icmp_error);
            net.set_link(host, links[host]);
        }
        for host in 0..2 {
            held[host] = held[host].max(net.hosts[host].held_buffers());
            let limit = if fault == Some(Fault::KeepUnread) {
                0
            } else {
                limits[host]
            };
            assert!(
                held[host] <= limit,
                "host {host} holds {} buffers of {limit}",
                held[host]
            );
        }
    });
    let show = |i: usize| {
        let side = &transfer.sides[i];
        format!(
            "host {i}: pushed {}/{} received {}/{} {:?} {:?}",
            side.pushed,
            side.goal,
            side.received,
            side.peer_goal,
            side.ended,
            side.id.and_then(|id| transfer.net.hosts[i].tcp_info(id))
        )
    };
    assert!(
        done,
        "wedged at {:?} lost {}\n{}\n{}\n{links:?}",
        transfer.net.now - start,
        transfer.net.lost,
        show(0),
        show(1)
    );
    for i in 0..2 {
        let bad = Events::RESET | Events::TIMED_OUT;
        assert!(!transfer.sides[i].ended.intersects(bad), "{}", show(i));
        assert!(transfer.sides[i].peer_fin);
    }
    if fault == Some(Fault::Recut)
        && let Some(segment) = transfer
            .net
            .log
            .as_mut()
            .and_then(|log| log.iter_mut().find(|segment| segment.retransmission))
    {
        segment.seq = segment.seq.wrapping_add(1);
    }
    transfer.check_boundaries();
    let mut outcome = ScenarioOutcome {
        bytes: goals[0] + goals[1],
        frames: transfer.net.carried,
        lost: transfer.net.lost,
        shrunk: transfer.net.shrunk,
        too_big: transfer.net.too_big,
        ..ScenarioOutcome::default()
    };
    for host in &transfer.net.hosts {
        let stats = host.stats();
        outcome.retransmits += stats.tcp.retrans_segs;
        outcome.timeouts += stats.tcp.timeouts;
        outcome.narrowed += stats.tcp.black_holes + stats.tcp.pmtu_reductions;
        outcome.pruned += stats.tcp.rcv_pruned;
    }
    outcome
}

/// Runs a seed. If a property is violated, runs the seed again and writes the frames of the network
/// into `dir`. A genuine violation prints its panic once; one caused by `fault` prints nothing.
pub fn run(
    seed: u64,
    fault: Option<Fault>,
    dir: &Path,
) -> Result<ScenarioOutcome, ScenarioFailure> {
    let why = match caught(fault.is_some(), || run_seed(seed, fault, &mut None)) {
        Ok(outcome) => return Ok(outcome),
        Err(why) => why,
    };
    let mut capture = Some(Capture::default());
    let _ = caught(true, || run_seed(seed, fault, &mut capture));
    let path = dir.join(format!("siw-tcp-seed-{seed}.pcapng"));
    let pcapng = capture.map(|capture| capture.write(&path).map(|_| path.clone()));
    let pcapng = pcapng.transpose().unwrap_or_else(|error| {
        eprintln!("{}: {error}", path.display());
        None
    });
    Err(ScenarioFailure {
        seed,
        why,
        replay: format!(
            "cargo run -p siw-tcp --release --example soak -- --transfers --seeds 1 --from {seed}"
        ),
        pcapng,
    })
}
