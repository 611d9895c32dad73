//! One seed, one story: two stacks, an impaired network that changes while they talk, and what
//! must hold whatever happens: what is delivered is a prefix of what was sent, all of it arrives,
//! both ends close, retransmissions keep their boundaries, memory stays bounded.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use siw_tcp::sim::{Impairment, Rng};
use siw_tcp::{CongestionControl, Events, StackConfig, TsoLimits};

use super::capture::Capture;
use super::quiet::caught;
use super::{Transfer, configs, micros};

/// A fault put in on purpose, to see that it is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A byte of the payload changes on the way and the checksum is made right again.
    Forge,
    /// From some moment on one host hears nothing more.
    Silence,
    /// A retransmission is as if it had been cut elsewhere.
    Recut,
    /// The reader never reads, though the receive limits say that it must be icmp_error apart.
    Hoard,
}

/// What happened in a good run.
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
    pub fn add(&mut self, o: &ScenarioOutcome) {
        self.bytes += o.bytes;
        self.frames += o.frames;
        self.lost += o.lost;
        self.retransmits += o.retransmits;
        self.timeouts += o.timeouts;
        self.shrunk += o.shrunk;
        self.too_big += o.too_big;
        self.narrowed += o.narrowed;
        self.pruned += o.pruned;
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
        if let Some(p) = &self.pcapng {
            write!(f, "\nwhat the network carried: {}", p.display())?;
        }
        Ok(())
    }
}

fn link(rng: &mut Rng) -> Impairment {
    let mut l = Impairment::perfect(micros(5 + rng.below(2000)));
    if rng.chance(0.7) {
        l.loss = rng.below(300) as f64 / 1000.0 * if rng.chance(0.5) { 0.1 } else { 1.0 };
    }
    if rng.chance(0.3) {
        l.burst = (0.02, 0.2);
    }
    if rng.chance(0.5) {
        l.reorder = rng.below(200) as f64 / 1000.0;
        l.jitter = micros(rng.below(300));
    }
    if rng.chance(0.4) {
        l.duplicate = rng.below(200) as f64 / 1000.0;
    }
    if rng.chance(0.4) {
        l.corrupt = rng.below(100) as f64 / 1000.0;
    }
    if rng.chance(0.3) {
        l.rate = 50_000_000 + rng.below(10_000_000_000);
        l.queue = 20 + rng.below(200) as usize;
        l.mark = rng.below(40) as usize;
    }
    if rng.chance(0.25) {
        l.shrink = rng.below(300) as f64 / 1000.0;
    }
    l
}

fn stack(rng: &mut Rng, c: &mut StackConfig) {
    c.congestion = if rng.chance(0.5) {
        CongestionControl::Cubic
    } else if rng.chance(0.5) {
        CongestionControl::NewReno
    } else {
        CongestionControl::Dctcp
    };
    c.ecn = rng.chance(0.5);
    if rng.chance(0.3) {
        c.tx_checksum = false;
        c.tso = Some(TsoLimits {
            max_segments: 2 + rng.below(60) as u16,
            max_bytes: 5_000 + rng.below(60_000) as u32,
        });
    }
    c.recv_window = 16384 << rng.below(8);
    if rng.chance(0.2) {
        c.max_recv_buffers = 64 + rng.below(200) as usize;
    }
    if rng.chance(0.2) {
        c.max_held_buffers = 64 + rng.below(200) as usize;
    }
    c.timestamps = !rng.chance(0.2);
    c.sack = !rng.chance(0.2);
    c.user_timeout = Duration::from_secs(3600);
    c.syn_retries = 30;
    c.rto_initial = Duration::from_millis(50);
    c.rto_max = Duration::from_secs(2);
    c.neighbours.probes = 50;
    c.neighbours.retransmit = Duration::from_millis(20);
    c.time_wait = Duration::from_secs(60);
}

/// When the path's MTU changes, and to what (IP packet; 0: as wide as ever).
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

/// Runs a seed; panics where a property breaks. `capture` is given what the network carried.
fn story(seed: u64, fault: Option<Fault>, capture: &mut Option<Capture>) -> ScenarioOutcome {
    let mut rng = Rng::new(seed);
    let mut c = configs();
    let vlan = rng.chance(0.2).then_some(42);
    let mtu = [1500, 9000, 1280][rng.below(3) as usize];
    for c in &mut c {
        c.vlan = vlan;
        c.mtu = mtu;
        stack(&mut rng, c);
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
    let limits = c.each_ref().map(|c| {
        let (own, all) = (c.max_recv_buffers, c.max_held_buffers);
        (own + own / 8 + 1).min(all.saturating_add(all / 8).saturating_add(2))
    });
    let mut t = Transfer::new(seed, c, links, goals);
    if capture.is_some() {
        *capture = Some(Capture::of(&mut t.net));
    }
    for s in &mut t.sides {
        s.record = if rng.chance(0.3) {
            1 + rng.below(20_000) as u32
        } else {
            0
        };
        s.read_step = if rng.chance(0.2) {
            1000 + rng.below(5000) as usize
        } else {
            0
        };
    }
    let v6 = rng.chance(0.4);
    let mut changes = narrowings(&mut rng, v6).into_iter().peekable();
    match fault {
        Some(Fault::Forge) => t.net.forge = 400,
        Some(Fault::Silence) => {
            let mut n = 0;
            t.net.filter = Some(Box::new(move |from, _| {
                n += 1;
                from == 0 || n < 30
            }));
        }
        Some(Fault::Hoard) => t.sides.iter_mut().for_each(|s| s.read_step = usize::MAX),
        _ => {}
    }
    t.connect(v6);
    let start = t.net.now;
    let mut held = [0; 2];
    let mut links = links;
    let done = t.run_watching(Duration::from_secs(900), |net| {
        while let Some((_, host, mtu, icmp_error)) =
            changes.next_if(|(at, ..)| net.now >= start + *at)
        {
            (links[host].mtu, links[host].icmp_error) = (mtu, icmp_error);
            net.set_link(host, links[host]);
        }
        for h in 0..2 {
            held[h] = held[h].max(net.hosts[h].held_buffers());
            let limit = if fault == Some(Fault::Hoard) {
                0
            } else {
                limits[h]
            };
            assert!(
                held[h] <= limit,
                "host {h} holds {} buffers of {limit}",
                held[h]
            );
        }
    });
    let show = |i: usize| {
        let s = &t.sides[i];
        format!(
            "host {i}: pushed {}/{} received {}/{} {:?} {:?}",
            s.pushed,
            s.goal,
            s.received,
            s.peer_goal,
            s.ended,
            s.id.and_then(|id| t.net.hosts[i].tcp_info(id))
        )
    };
    assert!(
        done,
        "wedged at {:?} lost {}\n{}\n{}\n{links:?}",
        t.net.now - start,
        t.net.lost,
        show(0),
        show(1)
    );
    for i in 0..2 {
        let bad = Events::RESET | Events::TIMED_OUT;
        assert!(!t.sides[i].ended.intersects(bad), "{}", show(i));
        assert!(t.sides[i].peer_fin);
    }
    if fault == Some(Fault::Recut)
        && let Some(s) = t
            .net
            .log
            .as_mut()
            .and_then(|l| l.iter_mut().find(|s| s.retransmission))
    {
        s.seq = s.seq.wrapping_add(1);
    }
    t.check_boundaries();
    let mut o = ScenarioOutcome {
        bytes: goals[0] + goals[1],
        frames: t.net.carried,
        lost: t.net.lost,
        shrunk: t.net.shrunk,
        too_big: t.net.too_big,
        ..ScenarioOutcome::default()
    };
    for h in &t.net.hosts {
        let s = h.stats();
        o.retransmits += s.retrans_segs;
        o.timeouts += s.timeouts;
        o.narrowed += s.black_holes + s.pmtu_reductions;
        o.pruned += s.rcv_pruned;
    }
    o
}

/// Runs a seed. When a property breaks, runs it again and writes what the network carried into
/// `dir`. What broke by itself prints its panic, once; what `fault` broke prints nothing.
pub fn run(
    seed: u64,
    fault: Option<Fault>,
    dir: &Path,
) -> Result<ScenarioOutcome, ScenarioFailure> {
    let why = match caught(fault.is_some(), || story(seed, fault, &mut None)) {
        Ok(o) => return Ok(o),
        Err(why) => why,
    };
    let mut capture = Some(Capture::default());
    let _ = caught(true, || story(seed, fault, &mut capture));
    let path = dir.join(format!("siw-tcp-seed-{seed}.pcapng"));
    let pcapng = capture.map(|c| c.write(&path).map(|_| path.clone()));
    let pcapng = pcapng.transpose().unwrap_or_else(|e| {
        eprintln!("{}: {e}", path.display());
        None
    });
    Err(ScenarioFailure {
        seed,
        why,
        replay: format!("cargo run -p siw-tcp --release --example soak -- --seeds 1 --from {seed}"),
        pcapng,
    })
}
