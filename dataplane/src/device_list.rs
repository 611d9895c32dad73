//! `siwd devices`: the devices that siwd could use on this machine, and the commands that make them
//! usable. Read from sysfs; no device is touched and DPDK is not started.

use std::fmt::Write;
use std::path::Path;

use dpdk::{PciDevice, PciReadiness};
use serde_json::{Value, json};

/// Other buses with devices that DPDK drives, and the prefix of their names in devargs.
const OTHER_BUSES: [(&str, &str); 2] = [("auxiliary", "auxiliary:"), ("vmbus", "")];
/// Part of the kernel's names for sub-functions of a NIC.
const SUB_FUNCTION: &str = ".sf.";
/// Class of network devices on Hyper-V's bus.
const VMBUS_NETWORK: &str = "{f8615163-df3e-46c5-913f-f2d2f965ed0e}";

/// A device on a bus other than PCI's.
struct BusDevice {
    devargs: String,
    driver: Option<String>,
}

/// Describes all usable devices, as human-readable text or as JSON.
pub fn describe_devices(as_json: bool) -> String {
    let nics = PciDevice::list_network();
    let others = list_other_buses();
    if as_json {
        let nics = nics.iter().map(nic_json);
        let others = others.iter().map(
            |device| json!({ "devargs": device.devargs, "driver": device.driver, "ready": true }),
        );
        return json!({ "devices": nics.chain(others).collect::<Vec<_>>() }).to_string();
    }
    if nics.is_empty() && others.is_empty() {
        return "no network device on the PCI, auxiliary or VMBus bus; virtual links need none: see config/\n".into();
    }
    let mut text = String::new();
    for nic in &nics {
        // Writing into a string never fails.
        let _ = writeln!(text, "{}", nic_line(nic));
        if let Some(command) = nic.command_to_bind() {
            let _ = writeln!(text, "    to use it: {command}");
        }
        let up = nic.interfaces.iter().find(|interface| interface.up);
        if let (Some(interface), true) = (up, nic.readiness() == PciReadiness::KernelDriver) {
            let _ = writeln!(
                text,
                "    its interface {} is up: the kernel loses it, and connections through it end",
                interface.name
            );
        }
    }
    for device in &others {
        let driver = device.driver.as_deref().unwrap_or("none");
        let _ = writeln!(text, "devargs = \"{}\"   driver {driver}", device.devargs);
    }
    text
}

fn readiness_text(readiness: PciReadiness) -> &'static str {
    match readiness {
        PciReadiness::Bound => "ready",
        PciReadiness::Bifurcated => "ready, alongside its kernel driver",
        PciReadiness::KernelDriver => "bound to a kernel driver",
        PciReadiness::Unbound => "without a driver",
    }
}

fn nic_line(nic: &PciDevice) -> String {
    let node = nic.numa_node.map_or("-".into(), |node| node.to_string());
    let iommu = match (&nic.iommu_group, nic.iommu_width) {
        (Some(group), Some(width)) => format!("IOMMU group {group} ({width} bits)"),
        _ => "no IOMMU".into(),
    };
    let links: Vec<String> = nic
        .interfaces
        .iter()
        .map(|interface| {
            let state = if interface.up { "up" } else { "down" };
            let speed = interface
                .mbps
                .map_or(String::new(), |mbps| format!(" {mbps} Mb/s"));
            format!(", {} {state}{speed}", interface.name)
        })
        .collect();
    format!(
        "pci = \"{}\"   {:04x}:{:04x}, driver {}, NUMA node {node}, {iommu}{}: {}",
        nic.address,
        nic.vendor,
        nic.device,
        nic.driver.as_deref().unwrap_or("none"),
        links.concat(),
        readiness_text(nic.readiness())
    )
}

fn nic_json(nic: &PciDevice) -> Value {
    let interfaces: Vec<Value> = nic
        .interfaces
        .iter()
        .map(|interface| json!({ "name": interface.name, "up": interface.up, "mbps": interface.mbps }))
        .collect();
    json!({
        "pci": nic.address,
        "vendor": nic.vendor,
        "device": nic.device,
        "driver": nic.driver,
        "numa_node": nic.numa_node,
        "iommu_group": nic.iommu_group,
        "iommu_width": nic.iommu_width,
        "interfaces": interfaces,
        "ready": nic.command_to_bind().is_none(),
        "bifurcated": nic.readiness() == PciReadiness::Bifurcated,
        "command": nic.command_to_bind(),
    })
}

fn list_other_buses() -> Vec<BusDevice> {
    let mut found = Vec::new();
    for (bus, prefix) in OTHER_BUSES {
        let folder = Path::new("/sys/bus").join(bus).join("devices");
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            let class = std::fs::read_to_string(entry.path().join("class_id")).unwrap_or_default();
            if !name.contains(SUB_FUNCTION) && class.trim() != VMBUS_NETWORK {
                continue;
            }
            let driver = std::fs::read_link(entry.path().join("driver")).ok();
            let driver = driver.and_then(|path| Some(path.file_name()?.to_str()?.to_owned()));
            found.push(BusDevice {
                devargs: format!("{prefix}{name}"),
                driver,
            });
        }
    }
    found.sort_by(|first, second| first.devargs.cmp(&second.devargs));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nic(driver: Option<&str>) -> PciDevice {
        PciDevice {
            address: "0000:03:00.0".into(),
            vendor: 0x8086,
            device: 0x1572,
            driver: driver.map(str::to_owned),
            numa_node: Some(1),
            iommu_group: Some("17".into()),
            iommu_width: Some(39),
            interfaces: vec![dpdk::NetworkInterface {
                name: "eth0".into(),
                up: true,
                mbps: Some(10_000),
            }],
        }
    }

    #[test]
    fn a_line_names_all_that_matters() {
        let line = nic_line(&nic(Some("i40e")));
        for part in [
            "pci = \"0000:03:00.0\"",
            "8086:1572",
            "driver i40e",
            "NUMA node 1",
            "IOMMU group 17 (39 bits)",
            "eth0 up 10000 Mb/s",
            "bound to a kernel driver",
        ] {
            assert!(line.contains(part), "{part}: {line}");
        }
    }

    #[test]
    fn the_json_has_the_command_only_where_one_is_needed() {
        assert!(
            nic_json(&nic(Some("i40e")))["command"]
                .as_str()
                .unwrap()
                .contains("vfio-pci")
        );
        let ready = nic_json(&nic(Some("vfio-pci")));
        assert_eq!(
            (&ready["ready"], &ready["command"]),
            (&json!(true), &Value::Null)
        );
        let whole: Value = serde_json::from_str(&describe_devices(true)).unwrap();
        assert!(whole["devices"].is_array());
    }
}
