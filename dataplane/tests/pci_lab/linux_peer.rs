//! siwd on a PCI NIC against the Linux kernel's iWARP: two guests connected by a bridge.

use crate::common::guest::{GUEST_PATIENCE, Guest, lacks_guest};
use crate::common::net::Netns;
use crate::lab::{Lab, lacks_lab};
use crate::{alone, skip_if};

const PINGS: usize = 10;
/// Bytes of a ping: several segments.
const SIZE: usize = 5000;

#[test]
#[ignore = "two guests at once are too much for two busy cores: deploy/lab/pci/run --all runs it"]
fn linux_siw_and_siwd_on_a_pci_nic_understand_each_other() {
    skip_if!(lacks_lab().or_else(lacks_guest));
    let _alone = alone();
    let ns = Netns::new();
    let linux = Guest::boot(&ns, &["--ip", "10.77.0.2/24"]);
    ns.ip("tuntap add lab1 mode tap");
    ns.ip("link add bridge0 type bridge mcast_snooping 0");
    for device in ["lab0", "lab1"] {
        ns.ip(&format!("link set {device} master bridge0 up"));
    }
    ns.ip("link set bridge0 up");
    let lab = ns.run(|| Lab::boot(&["--tap", "virtio=lab1"]));
    lab.guest.run("nics bind vfio-pci");
    lab.start_siwd_on(&["0000:00:10.0".into()], "", "");

    // Linux initiates the connection. Its rping hangs without a listener.
    let server = lab
        .guest
        .start("siw-ping -s -a 10.77.0.1 -p 7174 -v 2>/tmp/server.log");
    lab.guest
        .run("until grep -q listening /tmp/server.log; do sleep 0.05; done");
    let rping = format!("rping -c -a 10.77.0.1 -p 7174 -C {PINGS} -S {SIZE} -v -V");
    let client = linux.start(&rping).wait(GUEST_PATIENCE);
    assert_eq!(client.status, Some(0), "rping: {client:?}{}", lab.log());
    assert!(
        client.out.contains(&format!("rdma-ping-{}", PINGS - 1)),
        "{client:?}"
    );
    let server = server.wait(GUEST_PATIENCE);
    assert_eq!(server.status, Some(0), "siw-ping: {server:?}");

    // siwd initiates the connection. Linux may miss the first message of a connection that it
    // accepted (see linux_siw.rs); then the attempt is repeated.
    let mut outcome = None;
    for _ in 0..8 {
        let server = linux.start(&format!(
            "rping -s -a 10.77.0.2 -p 7174 -C {PINGS} -S {SIZE} -v"
        ));
        linux.run("wait-listen 7174");
        let client = lab
            .guest
            .start(&format!(
                "siw-ping -c -a 10.77.0.2 -p 7174 -C {PINGS} -S {SIZE} -V --timeout 20"
            ))
            .wait(GUEST_PATIENCE);
        let is_done = client.status == Some(0);
        outcome = Some(client);
        if is_done {
            server.wait(GUEST_PATIENCE);
            break;
        }
        server.kill();
    }
    let outcome = outcome.unwrap();
    assert_eq!(
        outcome.status,
        Some(0),
        "siw-ping: {outcome:?}{}",
        lab.log()
    );
    let log = lab.stop_siwd();
    assert!(!log.contains("ERROR siwd"), "{log}");
    lab.assert_no_iommu_faults();
}
