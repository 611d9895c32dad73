//! Devices that cannot be used: each gets an error of its own, with the command that solves it.

use crate::common::guest::GUEST_PATIENCE;
use crate::lab::{Lab, lacks_lab};
use crate::{alone, skip_if};

#[test]
fn a_nic_that_cannot_be_used_is_named_with_the_command_that_helps() {
    skip_if!(lacks_lab());
    let _alone = alone();
    let lab = Lab::boot(&["--iommu", "off", "--pair", "e1000", "--pair", "virtio-mtu"]);
    lab.guest.run("nics bind none");
    let unbound = lab.try_siwd(0, "", "");
    assert_eq!(unbound.status, Some(1));
    assert!(
        unbound
            .out
            .contains("device siw0: 0000:00:10.0 is bound to no driver")
            && unbound.out.contains("enable_unsafe_noiommu_mode"),
        "{}",
        unbound.out
    );
    let listed = lab.guest.run("siwd devices");
    assert!(
        listed.contains("pci = \"0000:00:10.0\"") && listed.contains("without a driver"),
        "{listed}"
    );

    lab.guest.run("nics bind uio_pci_generic");
    let listed = lab.guest.run("siwd devices --json");
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    let first = &listed["devices"][0];
    assert_eq!(first["driver"], "uio_pci_generic", "{listed}");
    assert_eq!(
        (&first["ready"], &first["iommu_width"]),
        (&true.into(), &serde_json::Value::Null)
    );
    let no_iommu = lab.try_siwd(0, "iova = \"va\"", "");
    assert!(
        no_iommu.out.contains("has no IOMMU, which iova = \"va\""),
        "{}",
        no_iommu.out
    );
    lab.start_siwd(0, "", "");
    lab.ping("e1000, uio_pci_generic", 3);
    let log = lab.stop_siwd();
    assert!(
        log.contains("physical addresses") && log.contains("offloads device=siw0"),
        "{log}"
    );

    let absent = lab.try_siwd_on(&["0000:00:1f.7".into()], "", "");
    assert!(
        absent.out.contains("there is no PCI device 0000:00:1f.7"),
        "{}",
        absent.out
    );
    let memory = "hugepages = \"require\"\nbuffers = 400000";
    let hugepages = lab.try_siwd(0, memory, "");
    assert!(
        hugepages.out.contains("not enough hugepages") && hugepages.out.contains("echo "),
        "{}",
        hugepages.out
    );

    // The emulator's link below virtio reports an MTU of 1500 bytes: a longer MTU is refused.
    lab.guest.run("nics bind vfio-pci");
    let too_long = lab.try_siwd(1, "", "mtu = 9000");
    assert!(
        too_long
            .out
            .contains("device siw0: MTU `9000` is not usable")
            && too_long.out.contains("takes 46 to 1500"),
        "{}",
        too_long.out
    );
}

/// An IOMMU that vfio considers unsafe, a NIC used by another process, fewer queues than workers.
#[test]
fn what_keeps_a_bound_nic_from_starting_is_named() {
    skip_if!(lacks_lab());
    let _alone = alone();
    let lab = Lab::boot(&["--no-intremap", "--pair", "e1000", "--pair", "virtio"]);
    lab.guest.run("nics bind vfio-pci");
    let parameters = "/sys/module/vfio_iommu_type1/parameters";
    let refused = lab.try_siwd(0, "", "");
    let command = format!("echo 1 > {parameters}/allow_unsafe_interrupts");
    assert!(
        refused.status == Some(1)
            && refused
                .out
                .contains("device siw0: device `0000:00:10.0` could not be attached")
            && refused.out.contains("does not remap interrupts")
            && refused.out.contains(&command),
        "{}",
        refused.out
    );
    lab.guest.run(&command);

    lab.guest
        .run(&format!("echo 0 > {parameters}/dma_entry_limit"));
    let limited = lab.try_siwd(0, "", "");
    assert!(
        limited
            .out
            .contains("all 0 of vfio's mappings (dma_entry_limit) are in use")
            && limited.out.contains("/dma_entry_limit"),
        "{}",
        limited.out
    );
    lab.guest
        .run(&format!("echo 65535 > {parameters}/dma_entry_limit"));

    // More workers than the NIC has queues: they forward frames to each other, as the log reports.
    let short_rings = "rx_descriptors = 256\ntx_descriptors = 256";
    lab.start_siwd(1, "[workers]\ncores = [0, 1]", short_rings);
    lab.ping("virtio, two workers", 3);
    let second = lab.guest.start(
        "sed 's/siwd.sock/second.sock/;s/cores = .*/cores = [1]/' /tmp/siwd.toml >/tmp/second.toml; \
         siwd --config /tmp/second.toml --socket /run/siwd/second.sock 2>&1",
    );
    let second = second.wait(GUEST_PATIENCE);
    assert!(
        second.status == Some(1) && second.out.contains("0000:00:12.0"),
        "{}",
        second.out
    );
    let log = lab.stop_siwd();
    assert!(log.contains("the port has 1 queues for 2 workers"), "{log}");

    // The other process is not a siwd and does not take siwd's lock.
    lab.guest.run(
        "group=$(basename $(readlink /sys/bus/pci/devices/0000:00:10.0/iommu_group)); \
         setsid sh -c \"exec 4<>/dev/vfio/$group; echo open >/tmp/holder; exec sleep 1000\" </dev/null >/dev/null 2>&1 & \
         while [ ! -s /tmp/holder ]; do sleep 0.05; done",
    );
    let held = lab.try_siwd(0, "", "");
    assert!(
        held.out.contains("(sleep) drives it: end that one first"),
        "{}",
        held.out
    );
    lab.guest
        .run("kill $(pidof sleep); while pidof sleep; do :; done");
    lab.start_siwd(0, "", "");
    lab.ping("e1000, free again", 3);
    lab.stop_siwd();
}
