//! Several workers on one NIC: each worker receives the frames of its connections, directly from a
//! NIC that steers them by hash, otherwise forwarded by the worker that received them.

use crate::common::guest::lacks_guest;
use crate::common::net::Netns;
use crate::lab::{Lab, amount, lacks_lab};
use crate::{alone, skip_if};

/// A namespace with two taps of two queues each, joined by a bridge.
fn joined_taps() -> Netns {
    let ns = Netns::new();
    ns.ip("link add bridge0 type bridge mcast_snooping 0");
    for tap in ["lab0", "lab1"] {
        ns.ip(&format!("tuntap add {tap} mode tap multi_queue"));
        ns.ip(&format!("link set {tap} master bridge0 up"));
    }
    ns.ip("link set bridge0 up");
    ns
}

/// Frames received by workers, and frames forwarded between workers.
fn received_and_forwarded(lab: &Lab) -> (u64, u64) {
    let text = lab.guest.run("siwctl stat --all --json");
    let stats: serde_json::Value = serde_json::from_str(&text).unwrap();
    let devices = stats["devices"].as_array().unwrap();
    let received = devices
        .iter()
        .map(|device| device["merged"]["rx_frames"].as_u64().unwrap())
        .sum();
    (
        received,
        stats["merged"]["frames_forwarded"].as_u64().unwrap(),
    )
}

#[test]
fn flows_come_to_their_workers_on_several_queues() {
    skip_if!(lacks_lab().or_else(lacks_guest));
    let _alone = alone();
    let ns = joined_taps();
    let args = [
        "--tap",
        "virtio-mq=lab0",
        "--tap",
        "virtio-mq=lab1",
        "--pair",
        "vmxnet3",
    ];
    let lab = ns.run(|| Lab::boot(&args));
    lab.guest.run("nics bind vfio-pci");
    let rings = "rx_descriptors = 256\ntx_descriptors = 256";
    // The pair comes first on the bus, then the taps.
    for (pair, kind, steers) in [(1, "virtio-mq", true), (0, "vmxnet3", false)] {
        lab.start_siwd(pair, "[workers]\ncores = [0, 1]", rings);
        lab.transfer(&format!("{kind}, two workers"), &amount());
        let (received, forwarded) = received_and_forwarded(&lab);
        let log = lab.stop_siwd();
        println!("{kind}: {forwarded} of {received} frames were forwarded");
        assert!(received > 1000, "{kind}: {received}");
        if steers {
            assert!(
                log.contains("the port steers frames to their workers"),
                "{log}"
            );
            assert!(
                forwarded * 100 < received,
                "{kind}: {forwarded} of {received}"
            );
        } else {
            // vmxnet3's model puts all frames into the first queue, regardless of the driver's
            // settings.
            assert!(
                forwarded * 10 > received,
                "{kind}: {forwarded} of {received}"
            );
        }
    }
    lab.assert_no_iommu_faults();
}
