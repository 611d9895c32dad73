//! Flows that share a bottleneck.

use std::time::Duration;

use siw_tcp_sim::{PathShares, SharedPath};

fn share(flows: usize, (rate, delay_us, queue): (u64, u64, usize), mtu: u16) -> PathShares {
    // Long enough for thousands of round trips.
    let half = Duration::from_millis(if rate > 1_000_000_000 { 200 } else { 1500 });
    let path = SharedPath {
        flows,
        rate,
        delay: Duration::from_micros(delay_us),
        queue,
        mtu,
        tso: true,
        delayed_ack: Duration::from_millis(1),
        coalesce: Duration::ZERO,
        before: half,
        measured: half,
    };
    let shares = path.measure();
    println!("{flows} flows, {rate}, {delay_us} us, {queue}, MTU {mtu}: {shares:.3?}");
    shares
}

#[test]
fn flows_share_a_bottleneck_fairly() {
    for (flows, path) in [
        (32, (10_000_000_000, 25, 256)),
        (32, (1_000_000_000, 50, 100)),
        (32, (1_000_000_000, 1000, 200)),
        (128, (1_000_000_000, 1000, 200)),
    ] {
        let shares = share(flows, path, 1500);
        assert!(shares.jain > 0.9 && shares.least > 0.5, "{shares:?}");
        assert!(shares.goodput > 0.9, "{shares:?}");
    }
}

/// The windows of all flows do not fit into the path: each flow waits for a timeout now and then.
#[test]
fn flows_whose_windows_exceed_the_path_share_it_fairly() {
    for path in [(10_000_000_000, 25, 256), (1_000_000_000, 50, 100)] {
        let shares = share(128, path, 1500);
        assert!(shares.jain > 0.9 && shares.least > 0.1, "{shares:?}");
        assert!(shares.goodput > 0.9, "{shares:?}");
    }
}

/// FPDUs do not fill a segment at these MTUs.
#[test]
fn one_flow_sends_super_segments_at_the_mtu_of_an_overlay() {
    for mtu in [1450, 8950] {
        let shares = share(1, (10_000_000_000, 25, 1000), mtu);
        assert!(shares.segments_per_frame > 1.5, "{shares:?}");
        assert!(shares.goodput > 0.9, "{shares:?}");
    }
}

/// `cargo run -p siw-tcp --release --example soak -- --shared` runs any number of them.
#[test]
fn flows_of_drawn_paths_share_them_fairly() {
    for seed in 0..4 {
        let path = SharedPath::draw(seed);
        if let Err(why) = path.measure().judge() {
            panic!("seed {seed}, {path:?}: {why}");
        }
    }
}
