//! Events of NICs in use: links that go down and come back, NICs that are removed.

use serde_json::json;

use crate::lab::{Lab, lacks_lab};
use crate::{alone, skip_if};

const OUTPUT: &str = "/tmp/outages";

fn set_link(lab: &Lab, nic: &str, up: bool) {
    lab.tell_emulator("set_link", &json!({ "name": nic, "up": up }));
}

/// The addresses of all present NICs, in order.
fn nic_addresses(lab: &Lab) -> Vec<String> {
    let listed = lab.guest.run("nics list");
    let first_word = |line: &str| line.split(' ').next().unwrap().to_owned();
    listed.lines().map(first_word).collect()
}

/// Two pairs with one siwd. Events of the first pair do not affect the second.
#[test]
fn links_that_fail_and_nics_that_are_pulled_are_events() {
    skip_if!(lacks_lab());
    let _alone = alone();
    let lab = Lab::boot(&["--hotplug", "--pair", "virtio", "--pair", "vmxnet3"]);
    lab.guest.run("nics bind vfio-pci");
    let nics = nic_addresses(&lab);
    assert_eq!(nics.len(), 4, "{nics:?}");
    lab.start_siwd_on(&nics, "", "rx_descriptors = 256\ntx_descriptors = 256");
    for (network, kind) in ["virtio", "vmxnet3"].into_iter().enumerate() {
        let (from, nic) = (network * 2, network * 2);
        let command = format!("outages /run/siwd/siwd.sock siw{from} 10.77.{network}.2");
        lab.start_in_background(&command, OUTPUT);
        lab.await_line(OUTPUT, "moved");
        // A short link outage is reported and does not end the connection.
        set_link(&lab, &format!("nic{nic}"), false);
        lab.await_line(OUTPUT, &format!("event PortErr {from} the link is down"));
        let stats = lab.guest.run(&format!("siwctl stat --device siw{from}"));
        assert!(stats.contains("(link down)"), "{kind}: {stats}");
        set_link(&lab, &format!("nic{nic}"), true);
        lab.await_line(OUTPUT, &format!("event PortActive {from} the link is up"));
        let seen = lab.await_line(OUTPUT, "moved again");
        assert!(!seen.contains("ended"), "{kind}: {seen}");
        // The NIC is removed: the connection ends, and the daemon reports it.
        lab.tell_emulator("device_del", &json!({ "id": format!("nic{nic}") }));
        lab.await_line(
            OUTPUT,
            &format!("event DeviceFatal {from} the device was removed"),
        );
        let seen = lab.await_line(OUTPUT, "ended");
        assert!(
            seen.contains("a message failed") && seen.contains("disconnected"),
            "{kind}: {seen}"
        );
        assert!(
            seen.contains("refused: ") && seen.contains("was removed"),
            "{kind}: {seen}"
        );
        assert!(
            seen.contains(&format!("listener: device {from} was removed")),
            "{kind}: {seen}"
        );
        assert!(seen.contains("ended 0"), "{kind}: {seen}");
        // The kernel has waited for siwd to release the NIC, and then removed it.
        lab.guest.run(&format!(
            "n=0; while [ -e /sys/bus/pci/devices/{} ]; do n=$((n + 1)); [ $n -lt 400 ] || exit 1; sleep 0.05; done",
            nics[nic]
        ));
        let stats = lab.guest.run(&format!("siwctl stat --device siw{from}"));
        assert!(stats.contains("(link removed)"), "{kind}: {stats}");
        if network == 0 {
            lab.ping_in(1, "the other pair", 10, 1000);
        }
    }
    let log = lab.stop_siwd();
    for part in [
        "the link is down",
        "the device was removed from the machine",
        "the device is closed",
        "stopped",
    ] {
        assert!(log.contains(part), "{part}: {log}");
    }
    lab.assert_no_iommu_faults();
}
