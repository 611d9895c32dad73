//! Properties under seeded impairment: what is delivered is a prefix of what was sent, all of it
//! arrives, both ends close, repetitions keep their boundaries, memory stays bounded.
//! `SIW_TCP_SEEDS=n` runs n seeds, `SIW_TCP_SEED=s` replays one.

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use common::{Transfer, configs, micros};
use siw_tcp::sim::{Impairment, Rng};
use siw_tcp::{Congestion, Events};

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
    l
}

fn scenario(seed: u64) {
    let mut rng = Rng::new(seed);
    let mut c = configs();
    let vlan = rng.chance(0.2).then_some(42);
    let mtu = [1500, 9000, 1280][rng.below(3) as usize];
    for c in &mut c {
        c.vlan = vlan;
        c.mtu = mtu;
        c.congestion = if rng.chance(0.5) {
            Congestion::Cubic
        } else if rng.chance(0.5) {
            Congestion::NewReno
        } else {
            Congestion::Dctcp
        };
        c.ecn = rng.chance(0.5);
        if rng.chance(0.3) {
            c.tx_checksum = false;
            c.tso = Some(siw_tcp::Tso {
                max_segments: 2 + rng.below(60) as u16,
                max_bytes: 5_000 + rng.below(60_000) as u32,
            });
        }
        c.recv_window = 16384 << rng.below(8);
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
    let goals = [
        rng.below(300_000),
        if rng.chance(0.5) {
            rng.below(300_000)
        } else {
            0
        },
    ];
    let links = [link(&mut rng), link(&mut rng)];
    let mut t = Transfer::new(seed, c, links, goals);
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
    t.connect(rng.chance(0.4));
    let done = t.run(Duration::from_secs(900));
    let show = |i: usize| {
        let s = &t.sides[i];
        format!(
            "host {i}: pushed {}/{} received {}/{} {:?} {:?}",
            s.pushed,
            s.goal,
            s.received,
            s.peer_goal,
            s.ended,
            s.id.and_then(|id| t.net.hosts[i].conn(id))
        )
    };
    assert!(
        done,
        "wedged at {:?} lost {}\n{}\n{}\n{links:?}",
        t.net.now,
        t.net.lost,
        show(0),
        show(1)
    );
    for i in 0..2 {
        assert!(
            !t.sides[i]
                .ended
                .intersects(Events::RESET | Events::TIMED_OUT),
            "{}",
            show(i)
        );
        assert!(t.sides[i].peer_fin);
    }
    t.check_boundaries();
}

#[test]
fn everything_arrives_in_order_and_both_ends_close_whatever_the_network_does() {
    let env = |n: &str| std::env::var(n).ok().and_then(|v| v.parse::<u64>().ok());
    if let Some(seed) = env("SIW_TCP_SEED") {
        return scenario(seed);
    }
    let n = env("SIW_TCP_SEEDS").unwrap_or(400);
    for seed in 0..n {
        if let Err(e) = catch_unwind(AssertUnwindSafe(|| scenario(seed))) {
            println!("replay: SIW_TCP_SEED={seed} cargo test -p siw-tcp --test impaired");
            std::panic::resume_unwind(e);
        }
    }
}

/// Goodput in Gb/s of 20 MB over a 10 Gb/s link.
fn goodput(loss: f64, rtt_us: u64, congestion: Congestion) -> (f64, u64) {
    let mut l = Impairment::perfect(micros(rtt_us / 2));
    l.rate = 10_000_000_000;
    l.queue = 500;
    let mut forward = l;
    forward.loss = loss;
    let mut c = configs();
    c.iter_mut().for_each(|c| c.congestion = congestion);
    let size = 20_000_000;
    let mut t = Transfer::new(7, c, [forward, l], [size, 0]);
    t.connect(false);
    let start = t.net.now;
    while t.sides[1].received < size {
        t.run(micros(1000));
    }
    let seconds = (t.net.now - start).as_secs_f64();
    (
        size as f64 * 8.0 / seconds / 1e9,
        t.net.hosts[0].stats().timeouts,
    )
}

#[test]
fn one_percent_loss_does_not_collapse_the_flow() {
    // Reno at p = 1%: 1.2 MSS / (RTT sqrt(p)) = 1.4 Gb/s at 100 us.
    for c in [Congestion::Cubic, Congestion::NewReno] {
        let (gbps, timeouts) = goodput(0.01, 100, c);
        println!("1% loss, 100 us RTT, {c:?}: {gbps:.2} Gb/s, {timeouts} timeouts");
        assert!(gbps > 0.7, "{c:?}: {gbps}");
        let (clean, _) = goodput(0.0, 100, c);
        println!("no loss: {clean:.2} Gb/s");
        assert!(clean > 8.0, "{c:?}: {clean}");
    }
}
