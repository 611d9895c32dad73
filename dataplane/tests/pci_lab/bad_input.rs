//! Devices that cannot be used: each gets its own error, with the command that helps.

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

    // The machine below virtio carries 1500 bytes and says so: a longer MTU is refused.
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
