//! siwd on PCI NICs, in a guest that emulates them: vfio with and without an IOMMU, uio. The frames
//! are recorded outside of siwd and the guest, and dissected.
//!
//! `deploy/lab/pci/run --all` runs the long selection.

#[path = "../common/mod.rs"]
mod common;

mod bad_input;
mod events;
mod lab;
mod linux_peer;
mod queues;
mod shared;
mod two_daemons;

use std::sync::{Mutex, MutexGuard, PoisonError};

use lab::{Lab, amount, lacks_lab, runs_everything};

/// MTU of jumbo frames.
const JUMBO: usize = 9000;

/// Segments that a pair may lose: an emulated NIC that is late drops frames.
const MAX_LOST: u64 = 20;
/// Segments that vmxnet3 may lose: its model cuts super-segments into IP fragments, until siwd sends
/// single segments.
const MAX_LOST_BY_VMXNET3: u64 = 500;

/// Runs all checks for one pair of NICs, with the settings of a user.
fn exercise_pair(lab: &Lab, pair: usize, who: &str) {
    lab.start_siwd(pair, "", "");
    lab.ping(who, 100);
    lab.transfer(who, &amount());
    let again = lab.lost_segments();
    println!("{who}: {again} segments were lost and sent again");
    let most = match who.starts_with("vmxnet3") {
        true => MAX_LOST_BY_VMXNET3,
        false => MAX_LOST,
    };
    assert!(
        again <= most,
        "{who}: {again} segments were lost and sent again{}",
        lab.log()
    );
    lab.kill_client();
    lab.stop_siwd();
    // Restart: the NIC works as before, with a VLAN, and with jumbo frames where its model supports
    // them.
    let (mtu, size) = match who.starts_with("e1000") {
        true => (JUMBO, 30_000),
        false => (1500, 10_000),
    };
    lab.start_siwd(pair, "", &format!("mtu = {mtu}\nvlan = 7"));
    lab.ping_in(0, who, 3, size);
    if mtu == JUMBO {
        let percent = lab.idle_percent();
        println!("{who}: {percent} % of a core while idle");
        // Under emulation a sleep of a millisecond is as expensive as many on a real core; a
        // spinning worker uses a whole core.
        assert!(percent <= 90, "{who}: {percent} % of a core while idle");
    }
    let log = lab.stop_siwd();
    assert!(!log.contains("ERROR siwd"), "{who}: {log}");
}

fn exercise_all(iommu: &str, driver: &str, kinds: &[&str]) {
    let mut args = vec!["--iommu", iommu];
    for kind in kinds {
        args.extend(["--pair", kind]);
    }
    let lab = Lab::boot(&args);
    lab.guest.run(&format!("nics bind {driver}"));
    for (pair, kind) in kinds.iter().enumerate() {
        exercise_pair(&lab, pair, &format!("{kind}, {driver}, IOMMU {iommu}"));
    }
    lab.assert_no_iommu_faults();
    for (pair, kind) in kinds.iter().enumerate() {
        lab.judge_pair(pair, JUMBO, *kind == "vmxnet3");
    }
}

/// Allows one guest at a time: each keeps both cores of a small machine busy.
static GUESTS: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    GUESTS.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn siwd_works_on_pci_nics_behind_an_iommu() {
    skip_if!(lacks_lab());
    let _alone = alone();
    exercise_all("48", "vfio-pci", &["e1000", "e1000e", "vmxnet3", "virtio"]);
}

#[test]
fn siwd_works_on_pci_nics_without_an_iommu() {
    skip_if!(lacks_lab());
    let _alone = alone();
    exercise_all("off", "vfio-pci", &["virtio-legacy"]);
    if runs_everything() {
        exercise_all(
            "off",
            "vfio-pci",
            &["e1000", "e1000e", "vmxnet3", "virtio", "virtio-packed"],
        );
        exercise_all("off", "uio_pci_generic", &["e1000", "e1000e"]);
    }
}

/// The driver supports queue interrupts with vfio only and does not check this itself.
#[test]
fn siwd_works_on_vmxnet3_without_queue_interrupts() {
    skip_if!(lacks_lab());
    let _alone = alone();
    exercise_all("off", "uio_pci_generic", &["vmxnet3"]);
}

/// Client memory lies above the IOMMU's address range; it is sent by reference nevertheless.
#[test]
fn registered_memory_is_sent_through_a_narrow_iommu() {
    skip_if!(lacks_lab());
    let _alone = alone();
    let lab = Lab::boot(&["--iommu", "39", "--pair", "virtio-packed"]);
    lab.guest.run("nics bind vfio-pci");
    for payload in ["reference", "copy"] {
        let device = format!("tx_payload = \"{payload}\"");
        lab.start_siwd(0, "", &device);
        lab.transfer(&format!("virtio-packed, IOMMU 39, {payload}"), &amount());
        lab.stop_siwd();
    }
    lab.assert_no_iommu_faults();
    lab.judge_pair(0, 1500, false);
}
