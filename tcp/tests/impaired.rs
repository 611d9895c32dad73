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
        .and_then(|value| value.parse().ok());
    let count: u64 = seeds.unwrap_or(4000);
    let threads = 2;
    let parts: Vec<ScenarioOutcome> = std::thread::scope(|scope| {
        let run = |k| {
            move || {
                let mut sum = ScenarioOutcome::default();
                for seed in (k..count).step_by(threads) {
                    match scenario::run(seed, None, dir()) {
                        Ok(outcome) => sum.add(&outcome),
                        Err(frame) => panic!("{frame}"),
                    }
                }
                sum
            }
        };
        let all: Vec<_> = (0..threads as u64).map(|k| scope.spawn(run(k))).collect();
        all.into_iter()
            .map(|thread| thread.join().expect("no seed fails"))
            .collect()
    });
    let mut sum = ScenarioOutcome::default();
    parts.iter().for_each(|outcome| sum.add(outcome));
    println!("{count} seeds: {sum:?}");
    if count >= 400 {
        // The network did its worst.
        let all = [
            sum.lost,
            sum.timeouts,
            sum.shrunk,
            sum.too_big,
            sum.narrowed,
        ];
        assert!(all.iter().all(|&count| count > 0), "{sum:?}");
    }
}

#[test]
fn a_failure_prints_its_replay_and_writes_a_pcapng() {
    let faults = [
        (Fault::Forge, "byte "),
        (Fault::Silence, "wedged"),
        (Fault::Recut, "a retransmission at"),
        (Fault::KeepUnread, "buffers of 0"),
    ];
    for (fault, says) in faults {
        let dir = dir().join(format!("{fault:?}"));
        std::fs::create_dir_all(&dir).unwrap();
        // Not every seed meets every fault.
        let failure = (0..50).find_map(|seed| scenario::run(seed, Some(fault), &dir).err());
        let failure = failure.unwrap_or_else(|| panic!("{fault:?} is not noticed"));
        assert!(failure.why.contains(says), "{fault:?}: {}", failure.why);
        let replay = format!(
            "--example soak -- --transfers --seeds 1 --from {}",
            failure.seed
        );
        assert!(
            failure.replay.starts_with("cargo run -p siw-tcp") && failure.replay.ends_with(&replay)
        );
        let (said, file) = (failure.to_string(), failure.pcapng.expect("written"));
        assert!(said.contains(&failure.replay) && said.contains(&file.display().to_string()));
        let file = std::fs::File::open(file).unwrap();
        let mut reader = pcap_file::pcapng::PcapNgReader::new(file).unwrap();
        let (mut ways, mut last) = ([0; 4], std::time::Duration::ZERO);
        while let Some(block) = reader.next_block() {
            if let pcap_file::pcapng::Block::EnhancedPacket(segment) = block.unwrap() {
                use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketOption::Flags;
                let sent = segment
                    .options
                    .iter()
                    .any(|option| matches!(option, Flags(2)));
                ways[segment.interface_id as usize * 2 + usize::from(sent)] += 1;
                assert!(segment.timestamp >= last && segment.data.len() >= 42);
                last = segment.timestamp;
            }
        }
        // Both hosts' frames, both ways: at least a handshake.
        assert!(ways.iter().all(|&count| count > 0), "{fault:?}: {ways:?}");
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
    let mut configs = configs();
    configs
        .iter_mut()
        .for_each(|config| config.congestion = congestion);
    let size = 20_000_000;
    let mut transfer = Transfer::new(7, configs, [forward, link], [size, 0]);
    transfer.connect(false);
    let start = transfer.net.now;
    while transfer.sides[1].received < size {
        transfer.run(micros(1000));
    }
    let seconds = (transfer.net.now - start).as_secs_f64();
    (
        size as f64 * 8.0 / seconds / 1e9,
        transfer.net.hosts[0].stats().timeouts,
    )
}

#[test]
fn one_percent_loss_does_not_collapse_the_flow() {
    // Reno at p = 1%: 1.2 MSS / (RTT sqrt(p)) = 1.4 Gb/s at 100 us.
    for congestion in [CongestionControl::Cubic, CongestionControl::NewReno] {
        let (gbps, timeouts) = goodput(0.01, 100, congestion);
        println!("1% loss, 100 us RTT, {congestion:?}: {gbps:.2} Gb/s, {timeouts} timeouts");
        assert!(gbps > 0.7, "{congestion:?}: {gbps}");
        let (clean, _) = goodput(0.0, 100, congestion);
        println!("no loss: {clean:.2} Gb/s");
        assert!(clean > 8.0, "{congestion:?}: {clean}");
    }
}
