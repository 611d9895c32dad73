//! Measures flows over one bottleneck in virtual time, and prints a line of JSON: fairness, a long
//! path, many senders of one switch port, and MTUs at which FPDUs do not fill a segment. Called by
//! the group `tcp` of `./benches/figures`.

use std::time::Duration;

use siw_tcp_sim::{PathShares, SharedPath};

const FAIR: SharedPath = SharedPath {
    flows: 32,
    rate: 10_000_000_000,
    delay: Duration::from_micros(25),
    queue: 256,
    mtu: 1500,
    tso: true,
    delayed_ack: Duration::from_millis(1),
    coalesce: Duration::ZERO,
    before: Duration::from_millis(200),
    measured: Duration::from_millis(200),
};

fn main() {
    let run = |name: &str, path: SharedPath| -> PathShares {
        let shares = path.measure();
        eprintln!("{name}: {shares:.3?}");
        shares
    };
    let few = run("32 flows", FAIR);
    let many = run("128 flows", SharedPath { flows: 128, ..FAIR });
    let long = SharedPath {
        flows: 1,
        rate: 1_000_000_000,
        delay: Duration::from_millis(50),
        queue: 8192,
        before: Duration::from_secs(5),
        measured: Duration::from_secs(3),
        ..FAIR
    };
    let long = run("long fat path", long);
    // A switch port with a shallow queue.
    let incast = SharedPath {
        flows: 64,
        queue: 64,
        ..FAIR
    };
    let incast = run("incast", incast);
    let single = SharedPath {
        flows: 1,
        queue: 1000,
        ..FAIR
    };
    let mtu_1450 = run(
        "MTU 1450",
        SharedPath {
            mtu: 1450,
            ..single
        },
    );
    let mtu_8950 = run(
        "MTU 8950",
        SharedPath {
            mtu: 8950,
            ..single
        },
    );
    println!(
        "{{\"jain_32\": {}, \"least_32\": {}, \"jain_128\": {}, \"least_128\": {}, \
         \"long_path_goodput\": {}, \"incast_goodput\": {}, \"mtu_1450_segments_per_frame\": {}, \
         \"mtu_8950_segments_per_frame\": {}}}",
        few.jain,
        few.least,
        many.jain,
        many.least,
        long.goodput,
        incast.goodput,
        mtu_1450.segments_per_frame,
        mtu_8950.segments_per_frame,
    );
}
