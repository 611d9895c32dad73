//! Properties under seeded impairment (see `common/scenario.rs`), and that a violated one is reported.
//! `SIW_TCP_SEEDS=n` runs n seeds; `cargo run -p siw-tcp --release --example soak` runs more.

mod common;

use std::path::Path;

use common::scenario::{self, Fault, ScenarioOutcome};
use common::{Transfer, configs, micros};
use siw_tcp::CongestionControl;
use siw_tcp::sim::Impairment;

fn dir() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}

#[test]
fn all_data_arrives_whatever_the_network_does() {
    let seeds = std::env::var("SIW_TCP_SEEDS")
        .ok()
        .and_then(|v| v.parse().ok());
    let n: u64 = seeds.unwrap_or(4000);
    let threads = 2;
    let parts: Vec<ScenarioOutcome> = std::thread::scope(|s| {
        let run = |k| {
            move || {
                let mut sum = ScenarioOutcome::default();
                for seed in (k..n).step_by(threads) {
                    match scenario::run(seed, None, dir()) {
                        Ok(o) => sum.add(&o),
                        Err(f) => panic!("{f}"),
                    }
                }
                sum
            }
        };
        let all: Vec<_> = (0..threads as u64).map(|k| s.spawn(run(k))).collect();
        all.into_iter()
            .map(|t| t.join().expect("no seed fails"))
            .collect()
    });
    let mut sum = ScenarioOutcome::default();
    parts.iter().for_each(|o| sum.add(o));
    println!("{n} seeds: {sum:?}");
    if n >= 400 {
        // The network did its worst.
        let all = [
            sum.lost,
            sum.timeouts,
            sum.shrunk,
            sum.too_big,
            sum.narrowed,
        ];
        assert!(all.iter().all(|&n| n > 0), "{sum:?}");
    }
}

#[test]
fn a_failure_prints_its_replay_and_writes_a_pcapng() {
    let faults = [
        (Fault::Forge, "byte "),
        (Fault::Silence, "wedged"),
        (Fault::Recut, "a retransmission at"),
        (Fault::Hoard, "buffers of 0"),
    ];
    for (fault, says) in faults {
        let dir = dir().join(format!("{fault:?}"));
        std::fs::create_dir_all(&dir).unwrap();
        // Not every seed meets every fault.
        let f = (0..50).find_map(|seed| scenario::run(seed, Some(fault), &dir).err());
        let f = f.unwrap_or_else(|| panic!("{fault:?} is not noticed"));
        assert!(f.why.contains(says), "{fault:?}: {}", f.why);
        let replay = format!("--example soak -- --seeds 1 --from {}", f.seed);
        assert!(f.replay.starts_with("cargo run -p siw-tcp") && f.replay.ends_with(&replay));
        let (said, file) = (f.to_string(), f.pcapng.expect("written"));
        assert!(said.contains(&f.replay) && said.contains(&file.display().to_string()));
        let file = std::fs::File::open(file).unwrap();
        let mut reader = pcap_file::pcapng::PcapNgReader::new(file).unwrap();
        let (mut ways, mut last) = ([0; 4], std::time::Duration::ZERO);
        while let Some(block) = reader.next_block() {
            if let pcap_file::pcapng::Block::EnhancedPacket(p) = block.unwrap() {
                use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketOption::Flags;
                let sent = p.options.iter().any(|o| matches!(o, Flags(2)));
                ways[p.interface_id as usize * 2 + usize::from(sent)] += 1;
                assert!(p.timestamp >= last && p.data.len() >= 42);
                last = p.timestamp;
            }
        }
        // Both hosts' frames, both ways: at least a handshake.
        assert!(ways.iter().all(|&n| n > 0), "{fault:?}: {ways:?}");
    }
}

#[test]
fn failures_on_purpose_print_no_panic() {
    let test = "a_failure_prints_its_replay_and_writes_a_pcapng";
    let mut again = std::process::Command::new(std::env::current_exe().unwrap());
    let done = again.args(["--exact", test, "--nocapture"]).output();
    let done = done.unwrap();
    let log = String::from_utf8_lossy(&[done.stdout, done.stderr].concat()).into_owned();
    assert!(done.status.success() && log.contains("1 passed"), "{log}");
    assert!(!log.contains("panicked"), "{log}");
}

/// Goodput in Gb/s of 20 MB over a 10 Gb/s link.
fn goodput(loss: f64, rtt_us: u64, congestion: CongestionControl) -> (f64, u64) {
    let mut link = Impairment::perfect(micros(rtt_us / 2));
    link.rate = 10_000_000_000;
    link.queue = 500;
    let mut forward = link;
    forward.loss = loss;
    let mut c = configs();
    c.iter_mut().for_each(|c| c.congestion = congestion);
    let size = 20_000_000;
    let mut t = Transfer::new(7, c, [forward, link], [size, 0]);
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
    for c in [CongestionControl::Cubic, CongestionControl::NewReno] {
        let (gbps, timeouts) = goodput(0.01, 100, c);
        println!("1% loss, 100 us RTT, {c:?}: {gbps:.2} Gb/s, {timeouts} timeouts");
        assert!(gbps > 0.7, "{c:?}: {gbps}");
        let (clean, _) = goodput(0.0, 100, c);
        println!("no loss: {clean:.2} Gb/s");
        assert!(clean > 8.0, "{c:?}: {clean}");
    }
}
