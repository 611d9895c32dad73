//! Each NIC of a pair has a daemon of its own, so that only frames from the NIC wake it.

use crate::common::guest::GUEST_PATIENCE;
use crate::lab::{Lab, lacks_lab, pair_addresses};
use crate::{alone, skip_if};

const SECOND_SOCKET: &str = "/run/siwd/second.sock";

/// Connections, each made after both daemons have gone to sleep.
const CONNECTIONS: usize = 5;

/// Starts a second daemon, with the second NIC of a pair as 10.77.0.2.
fn start_second_siwd(lab: &Lab, nic: &str) {
    let config = format!(
        "[workers]\ncores = [0]\n[control]\nsocket = \"{SECOND_SOCKET}\"\n[dpdk]\nbuffers = 8192\n\
         [[device]]\nname = \"siw1\"\npci = \"{nic}\"\naddresses = [\"10.77.0.2/24\"]\n"
    );
    let config = config.replace('\n', "\\n");
    lab.guest
        .run(&format!("printf '{config}' >/tmp/second.toml"));
    lab.start_in_background("siwd --config /tmp/second.toml", "/tmp/second.log");
    lab.await_line("/tmp/second.log", "ready");
}

/// The drivers of e1000 and e1000e claim receive interrupts that never arrive: a worker that slept
/// until one came missed its neighbours' requests.
#[test]
fn daemons_with_a_nic_each_reach_each_other() {
    skip_if!(lacks_lab());
    let _alone = alone();
    let kinds = ["e1000", "e1000e", "vmxnet3", "virtio"];
    let mut args = Vec::new();
    for kind in kinds {
        args.extend(["--pair", kind]);
    }
    let lab = Lab::boot(&args);
    lab.guest.run("nics bind vfio-pci");
    for (pair, kind) in kinds.iter().enumerate() {
        let nics = pair_addresses(pair);
        lab.start_siwd_on(&nics[..1], "", "");
        start_second_siwd(&lab, &nics[1]);
        let done = lab
            .guest
            .start(&format!(
                "SIWD_SOCKET={SECOND_SOCKET} siw-ping -s -a 10.77.0.2 -P & server=$!; n=0; \
                 while ! siw-ping -c -a 10.77.0.2 -C 1 2>/dev/null; do \
                 n=$((n + 1)); [ $n -lt 20 ] || break; sleep 0.1; done; \
                 n=0; while [ $n -lt {CONNECTIONS} ] && siw-ping -c -a 10.77.0.2 -C 3 -S 20000 -V; do \
                 n=$((n + 1)); done; kill $server; [ $n = {CONNECTIONS} ]"
            ))
            .wait(GUEST_PATIENCE);
        assert_eq!(done.status, Some(0), "{kind}: {done:?}{}", lab.log());
        let log = lab.stop_siwd();
        assert!(!log.contains("ERROR siwd"), "{kind}: {log}");
    }
    lab.assert_no_iommu_faults();
}
