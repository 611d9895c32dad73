//! The kernel's view of this machine's NICs: driver, location, and whether an IOMMU translates for
//! them. Read from sysfs, without access to a device.

use std::fs;
use std::path::{Path, PathBuf};

use crate::{Error, log};

/// The folder of all PCI devices.
const PCI_DEVICES: &str = "/sys/bus/pci/devices";
/// PCI class codes of network controllers begin with this byte.
const CLASS_NETWORK: u32 = 0x02;
/// The kernel's name for a device's group in vfio's no-IOMMU mode.
const NO_IOMMU_GROUP: &str = "vfio-noiommu";
/// Address width assumed for an IOMMU whose width the kernel does not report.
const USUAL_IOMMU_WIDTH: u8 = 48;

/// A network controller on the PCI bus.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PciDevice {
    /// `0000:03:00.0`
    pub address: String,
    /// PCI vendor number.
    pub vendor: u16,
    /// PCI device number.
    pub device: u16,
    /// The kernel driver that the device is bound to.
    pub driver: Option<String>,
    /// The NUMA node of the device, if the machine has several.
    pub numa_node: Option<u32>,
    /// Number of its IOMMU group.
    pub iommu_group: Option<String>,
    /// Address width in bits of the IOMMU that translates for the device; `None`: no IOMMU does.
    pub iommu_width: Option<u8>,
    /// Its network interfaces, while it is bound to a network driver of the kernel.
    pub interfaces: Vec<NetworkInterface>,
}

/// A network interface of the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkInterface {
    /// `eth0`
    pub name: String,
    /// True if the link is up.
    pub up: bool,
    /// Speed of the link in Mb/s, if the kernel knows it.
    pub mbps: Option<u32>,
}

/// State of a device with regard to its use by DPDK.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PciReadiness {
    /// Bound to a user-space driver.
    Bound,
    /// DPDK works alongside the kernel's driver, which must stay bound.
    Bifurcated,
    /// Bound to a kernel driver.
    KernelDriver,
    /// Not bound to any driver.
    Unbound,
}

impl PciDevice {
    /// Finds the device at this address (`0000:03:00.0` or `03:00.0`); `None` if there is none.
    pub fn at_address(address: &str) -> Option<PciDevice> {
        PciDevice::from_sysfs(Path::new(PCI_DEVICES), &full_address(address))
    }

    /// The address with its domain, without devargs.
    pub fn full_address(address: &str) -> String {
        full_address(address)
    }

    /// Returns true if there is a device at this address.
    pub(crate) fn is_present(address: &str) -> bool {
        Path::new(PCI_DEVICES).join(full_address(address)).exists()
    }

    /// Every network controller, in address order.
    pub fn list_network() -> Vec<PciDevice> {
        let mut addresses: Vec<String> = fs::read_dir(PCI_DEVICES)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        addresses.sort();
        let folder = Path::new(PCI_DEVICES);
        addresses
            .iter()
            .filter(|address| {
                let class = read_hex(&folder.join(address).join("class"));
                class.is_some_and(|class| class >> 16 == CLASS_NETWORK)
            })
            .filter_map(|address| PciDevice::from_sysfs(folder, address))
            .collect()
    }

    fn from_sysfs(folder: &Path, address: &str) -> Option<PciDevice> {
        let path = folder.join(address);
        let number = |file: &str| read_hex(&path.join(file)).map(|value| value as u16);
        let group = link_name(&path.join("iommu_group"));
        let group_name = read_text(&path.join("iommu_group/name"));
        let translated = group.is_some() && group_name.as_deref() != Some(NO_IOMMU_GROUP);
        Some(PciDevice {
            address: address.to_owned(),
            vendor: number("vendor")?,
            device: number("device")?,
            driver: link_name(&path.join("driver")),
            numa_node: read_text(&path.join("numa_node")).and_then(|node| node.parse().ok()),
            iommu_group: group,
            iommu_width: translated.then(|| iommu_width(&path)),
            interfaces: interfaces(&path),
        })
    }

    /// Classifies the device by the driver that it is bound to.
    pub fn readiness(&self) -> PciReadiness {
        match &self.driver {
            Some(driver) if is_user_space_driver(driver) => PciReadiness::Bound,
            Some(_) if is_bifurcated(self.vendor, self.device) => PciReadiness::Bifurcated,
            Some(_) => PciReadiness::KernelDriver,
            None => PciReadiness::Unbound,
        }
    }

    /// Returns true if DPDK would drive the device and no IOMMU translates for it, so that it reads
    /// memory by physical addresses.
    pub fn needs_physical_addresses(&self) -> bool {
        self.readiness() == PciReadiness::Bound && self.iommu_width.is_none()
    }

    /// The command that makes the device usable; `None` if it already is.
    pub fn command_to_bind(&self) -> Option<String> {
        let address = &self.address;
        match self.readiness() {
            PciReadiness::Bound | PciReadiness::Bifurcated => None,
            _ if is_bifurcated(self.vendor, self.device) => Some(format!(
                "echo {address} > /sys/bus/pci/drivers_probe   (it has to be bound to its kernel driver)"
            )),
            _ if self.iommu_width.is_some() => Some(format!(
                "modprobe vfio-pci && dpdk-devbind.py --bind=vfio-pci {address}"
            )),
            // Either enable the IOMMU, or do without its protection.
            _ => Some(format!(
                "modprobe vfio-pci && echo 1 > /sys/module/vfio/parameters/enable_unsafe_noiommu_mode \
                 && dpdk-devbind.py --bind=vfio-pci {address}   (no IOMMU: boot with intel_iommu=on or \
                 amd_iommu=on where the machine has one; where the kernel has no such mode: \
                 modprobe uio_pci_generic && dpdk-devbind.py --bind=uio_pci_generic {address})"
            )),
        }
    }

    /// Reason why attaching the device fails, and the remedy; empty if sysfs does not explain it.
    pub(crate) fn attach_hint(&self) -> String {
        let address = &self.address;
        let in_use = self.interfaces.iter().find(|interface| interface.up);
        match (self.readiness(), self.command_to_bind()) {
            (PciReadiness::Bifurcated, _) => format!(
                "; it stays with its kernel driver {}: the RDMA libraries of the vendor (rdma-core) \
                 and DPDK's driver for it have to be installed",
                self.driver.as_deref().unwrap_or_default()
            ),
            (PciReadiness::Bound, _) => self
                .group_in_use()
                .or_else(|| self.user_space_holder())
                .or_else(|| self.refused_by_iommu())
                .map_or(String::new(), |why| format!("; {why}")),
            (PciReadiness::KernelDriver, Some(command)) => format!(
                "; it is bound to the kernel driver {}{}: {command}",
                self.driver.as_deref().unwrap_or_default(),
                in_use.map_or(String::new(), |interface| format!(
                    ", and its interface {} is up",
                    interface.name
                ))
            ),
            (_, Some(command)) => format!("; {address} is not bound to a driver: {command}"),
            (_, None) => String::new(),
        }
    }

    /// Finds another process that drives the device, by the open file of its IOMMU group.
    fn user_space_holder(&self) -> Option<String> {
        let group = self.iommu_group.as_deref()?;
        let files = [
            format!("/dev/vfio/{group}"),
            format!("/dev/vfio/noiommu-{group}"),
        ];
        let own = std::process::id().to_string();
        let mut processes = fs::read_dir("/proc").ok()?.flatten().filter_map(|entry| {
            let pid = entry.file_name().into_string().ok()?;
            (pid != own && pid.bytes().all(|byte| byte.is_ascii_digit())).then_some(pid)
        });
        let pid = processes.find(|pid| {
            let open = fs::read_dir(format!("/proc/{pid}/fd"));
            let mut targets = open
                .into_iter()
                .flatten()
                .flatten()
                .filter_map(|entry| fs::read_link(entry.path()).ok());
            targets.any(|target| files.iter().any(|file| target == Path::new(file)))
        })?;
        let name = read_text(&Path::new("/proc").join(&pid).join("comm"));
        Some(format!(
            "process {pid} ({}) drives it: end that one first",
            name.unwrap_or_default()
        ))
    }

    /// Reason why vfio refuses the device although its IOMMU works.
    fn refused_by_iommu(&self) -> Option<String> {
        self.iommu_width?;
        let parameter = "/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts";
        let is_refused = read_text(Path::new(parameter)).as_deref() == Some("N");
        if is_refused && !are_interrupts_remapped(&read_text(Path::new("/proc/interrupts"))?) {
            return Some(format!(
                "its IOMMU does not remap interrupts, so vfio refuses it: enable that in \
                 the firmware, or, where everything on this machine is trusted: echo 1 > {parameter}"
            ));
        }
        // The container whose limit could be queried is already closed.
        let is_full = log::kept_lines().contains("(No space left on device)");
        is_full.then(|| too_few_maps().to_string())
    }

    /// Devices of the same IOMMU group that are bound to kernel drivers: vfio then refuses the
    /// group.
    fn group_in_use(&self) -> Option<String> {
        let members = Path::new(PCI_DEVICES)
            .join(&self.address)
            .join("iommu_group/devices");
        let holder = fs::read_dir(members)
            .ok()?
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|address| *address != self.address)
            .filter_map(|address| PciDevice::at_address(&address))
            .find(|other| other.readiness() == PciReadiness::KernelDriver)?;
        Some(format!(
            "its IOMMU group {} also contains {}, which is bound to the kernel driver {}: bind it to vfio-pci as well",
            self.iommu_group.as_deref().unwrap_or_default(),
            holder.address,
            holder.driver.as_deref().unwrap_or_default(),
        ))
    }
}

/// Returns true if an IOMMU checks the source of each interrupt (interrupt remapping): in
/// /proc/interrupts the kernel then prefixes the controllers' names with `IR-` (x86).
fn are_interrupts_remapped(interrupts: &str) -> bool {
    let mut words = interrupts.split_whitespace();
    words.any(|word| word.starts_with("IR-"))
}

/// Kernel drivers that hand a PCI device over to user space.
const USER_SPACE_DRIVERS: [&str; 3] = ["vfio-pci", "uio_pci_generic", "igb_uio"];
/// PCI vendor and device numbers of NICs that DPDK drives alongside their kernel driver; `None`:
/// all NICs of the vendor (Mellanox). Microsoft's is MANA.
const BIFURCATED: [(u16, Option<u16>); 2] = [(0x15b3, None), (0x1414, Some(0x00ba))];

fn is_user_space_driver(kernel_driver: &str) -> bool {
    USER_SPACE_DRIVERS.contains(&kernel_driver)
}

/// Returns true if DPDK drives this NIC while it stays bound to its kernel driver.
fn is_bifurcated(vendor: u16, device: u16) -> bool {
    BIFURCATED.iter().any(|(of_vendor, of_device)| {
        *of_vendor == vendor && of_device.is_none_or(|of| of == device)
    })
}

/// Error for vfio's limit on DMA mappings.
pub(crate) fn too_few_maps() -> Error {
    let text = std::fs::read_to_string(DMA_ENTRY_LIMIT).unwrap_or_default();
    let limit = text.trim().parse().unwrap_or(DEFAULT_DMA_ENTRIES);
    Error::TooManyRegions {
        what: "vfio's mappings (dma_entry_limit)",
        limit,
        remedy: format!(
            "allow more before siwd starts again: echo {} > {DMA_ENTRY_LIMIT}",
            (limit * 2).max(DEFAULT_DMA_ENTRIES)
        ),
    }
}

const DMA_ENTRY_LIMIT: &str = "/sys/module/vfio_iommu_type1/parameters/dma_entry_limit";
/// Linux's default limit.
const DEFAULT_DMA_ENTRIES: u64 = 65_535;

/// Returns true for `0000:03:00.0` or `03:00.0`, optionally followed by a comma and devargs.
pub(crate) fn is_pci_address(name: &str) -> bool {
    let address = name.split(',').next().unwrap_or_default();
    let hex = |part: &str, len: usize| {
        part.len() == len && part.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    let Some((bus, function)) = address.rsplit_once('.') else {
        return false;
    };
    let mut parts = bus.rsplit(':');
    hex(function, 1)
        && parts.next().is_some_and(|part| hex(part, 2))
        && parts.next().is_some_and(|part| hex(part, 2))
        && parts.next().is_none_or(|part| hex(part, 4))
        && parts.next().is_none()
}

/// Adds the domain if it is missing (domain 0) and removes devargs.
pub(crate) fn full_address(address: &str) -> String {
    let address = address.split(',').next().unwrap_or_default().to_lowercase();
    if address.matches(':').count() == 1 {
        return format!("0000:{address}");
    }
    address
}

/// Address width of an Intel IOMMU: the maximum guest address width in its capability register
/// (VT-d specification, section 11.4.2), which encodes the width minus 1.
fn iommu_width(device: &Path) -> u8 {
    let capabilities = read_text(&device.join("iommu/intel-iommu/cap"));
    let register = capabilities.and_then(|text| u64::from_str_radix(&text, 16).ok());
    register.map_or(USUAL_IOMMU_WIDTH, |register| {
        ((register >> 16) & 0x3f) as u8 + 1
    })
}

fn interfaces(device: &Path) -> Vec<NetworkInterface> {
    // A virtio NIC has its interface one level below.
    let below: Vec<PathBuf> = fs::read_dir(device)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.starts_with("virtio"))
        })
        .chain([device.to_path_buf()])
        .collect();
    let mut found: Vec<NetworkInterface> = below
        .iter()
        .filter_map(|path| fs::read_dir(path.join("net")).ok())
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let path = entry.path();
            Some(NetworkInterface {
                name: entry.file_name().into_string().ok()?,
                up: read_text(&path.join("operstate")).as_deref() == Some("up"),
                mbps: read_text(&path.join("speed")).and_then(|speed| speed.parse().ok()),
            })
        })
        .collect();
    found.sort_by(|first, second| first.name.cmp(&second.name));
    found
}

fn read_text(path: &Path) -> Option<String> {
    fs::read_to_string(path)
        .ok()
        .map(|text| text.trim().to_owned())
}

/// The number in a file that writes it as `0x8086`.
fn read_hex(path: &Path) -> Option<u32> {
    let text = read_text(path)?;
    u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

/// The last component of a symbolic link's target.
fn link_name(path: &Path) -> Option<String> {
    let target = fs::read_link(path).ok()?;
    target.file_name()?.to_str().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// Creates a device folder like those in sysfs.
    fn write_device(root: &Path, vendor: &str, driver: Option<&str>, group_name: Option<&str>) {
        let path = root.join("0000:03:00.0");
        fs::create_dir_all(path.join("iommu/intel-iommu")).unwrap();
        for (file, text) in [
            ("vendor", vendor),
            ("device", "0x1017\n"),
            ("numa_node", "-1\n"),
        ] {
            fs::write(path.join(file), text).unwrap();
        }
        if let Some(driver) = driver {
            symlink(
                format!("../../../bus/pci/drivers/{driver}"),
                path.join("driver"),
            )
            .unwrap();
        }
        if let Some(name) = group_name {
            let group = root.join("groups/7");
            fs::create_dir_all(&group).unwrap();
            if !name.is_empty() {
                fs::write(group.join("name"), name).unwrap();
            }
            symlink(group, path.join("iommu_group")).unwrap();
        }
    }

    fn device(vendor: &str, driver: Option<&str>, group: Option<&str>) -> PciDevice {
        let root = std::env::temp_dir().join(format!(
            "siwd-pci-{}-{:?}-{}",
            std::process::id(),
            std::thread::current().id(),
            driver.unwrap_or("none")
        ));
        let _ = fs::remove_dir_all(&root);
        write_device(&root, vendor, driver, group);
        fs::write(
            root.join("0000:03:00.0/iommu/intel-iommu/cap"),
            "d2008c22260606\n",
        )
        .unwrap();
        let found = PciDevice::from_sysfs(&root, "0000:03:00.0").unwrap();
        let _ = fs::remove_dir_all(&root);
        found
    }

    #[test]
    fn addresses_get_their_domain() {
        assert_eq!(full_address("3B:00.0"), "0000:3b:00.0");
        assert_eq!(full_address("0001:3b:00.0,mprq_en=1"), "0001:3b:00.0");
        assert_eq!(PciDevice::at_address("ffff:ff:1f.7"), None);
    }

    #[test]
    fn a_narrow_iommu_is_recognised() {
        let narrow = device("0x8086\n", Some("vfio-pci"), Some(""));
        // Bits 21 to 16 of the register are 0x26: addresses of 39 bits.
        assert_eq!(narrow.iommu_width, Some(39));
        assert_eq!(narrow.iommu_group.as_deref(), Some("7"));
        assert_eq!(narrow.numa_node, None);
        assert_eq!(narrow.readiness(), PciReadiness::Bound);
        assert!(!narrow.needs_physical_addresses());
        assert_eq!(narrow.command_to_bind(), None);
    }

    #[test]
    fn without_an_iommu_addresses_are_physical() {
        for (driver, group) in [
            ("vfio-pci", Some("vfio-noiommu\n")),
            ("uio_pci_generic", None),
        ] {
            let bare = device("0x8086\n", Some(driver), group);
            assert_eq!(bare.iommu_width, None, "{driver}");
            assert!(bare.needs_physical_addresses(), "{driver}");
        }
    }

    #[test]
    fn a_bifurcated_nic_keeps_its_kernel_driver() {
        let bifurcated = device("0x15b3\n", Some("mlx5_core"), Some(""));
        assert_eq!(bifurcated.readiness(), PciReadiness::Bifurcated);
        assert_eq!(bifurcated.command_to_bind(), None);
        assert!(
            !bifurcated.attach_hint().contains("vfio"),
            "{}",
            bifurcated.attach_hint()
        );
    }

    #[test]
    fn the_command_fits_what_has_the_device() {
        let kernel = device("0x8086\n", Some("ixgbe"), Some(""));
        let command = kernel.command_to_bind().unwrap();
        assert!(command.contains("--bind=vfio-pci 0000:03:00.0") && !command.contains("noiommu"));
        assert!(kernel.attach_hint().contains("kernel driver ixgbe"));
        let unbound = device("0x8086\n", None, None);
        assert!(
            unbound
                .command_to_bind()
                .unwrap()
                .contains("enable_unsafe_noiommu_mode")
        );
        assert!(unbound.attach_hint().contains("not bound to a driver"));
    }

    #[test]
    fn remapped_interrupts_are_told_by_their_controllers() {
        let plain =
            " 24:   0  5  PCI-MSI 16384-edge  virtio0-config\n  1: 9 0 IO-APIC 1-edge i8042\n";
        let remapped = " 24:   0  5  IR-PCI-MSI-0000:00:01.0 0-edge  virtio0-config\n";
        assert!(!are_interrupts_remapped(plain) && are_interrupts_remapped(remapped));
    }

    #[test]
    fn pci_addresses_are_told_from_virtual_devices() {
        for yes in ["0000:03:00.0", "03:00.1", "0000:3b:00.0,mprq_en=1"] {
            assert!(is_pci_address(yes), "{yes}");
        }
        for no in ["net_tap0", "net_ring_a.0", "0000:03:00", "0:03:00.0", ""] {
            assert!(!is_pci_address(no), "{no}");
        }
    }
}
