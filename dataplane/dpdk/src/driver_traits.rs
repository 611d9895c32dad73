//! Link properties that drivers do not report, or report wrongly: one table by kind of link, and
//! the only place that knows drivers by name.
//!
//! | link | in process | external buffers | odd segments | own MAC address | interrupts | frees sent packets |
//! |---|---|---|---|---|---|---|
//! | ring pair | yes | yes | yes | none | none | when the peer frees it |
//! | tap | no | yes | no (checksums, TSO) | Linux has the same | always signals | at once |
//! | AF_PACKET | no | yes | yes | the interface's | none | at once |
//! | AF_XDP | no | no | yes | the interface's | always signals | when it sends more |
//! | vhost | no | yes | yes | yes | where the peer kicks | at once (it copies) |
//! | virtio_user | no | no | yes | yes | where the peer kicks | when it sends more |
//! | PCI NIC without an IOMMU | no | no | yes | yes | where the driver has them | when it sends more |
//! | PCI NIC | no | yes, mapped for DMA | yes | yes | where the driver has them | when it sends more |
//! | any other | no | no: nothing is known of it | yes | yes | where the driver has them | unknown |
//!
//! All of them send the packets of one queue in order, and all but the ring pair read a packet
//! while they send it: data that the peer has acknowledged is not read again, whenever the packet
//! is freed. The driver reports segment limits, MTU and offloads ([`crate::PortInfo`]) and grants
//! them ([`crate::PortCaps`]).

use crate::capability::Capability;
use crate::pci::{PciDevice, is_pci_address};
use crate::tap_interface::interface_exists;
use std::path::{Path, PathBuf};

/// One row of the table: properties that all links of a driver have in common.
#[derive(Debug, PartialEq, Eq)]
pub struct DriverTraits {
    /// DPDK's name of the driver, with which devargs begin; empty for all NICs on a bus.
    driver: &'static str,
    /// Both ends are queues of this process: frames cross by pointer, cannot be damaged on the way,
    /// and raise no interrupt.
    pub in_process: bool,
    /// Segments to send may lie in memory outside the packet buffers' pool. virtio_user would have
    /// to share that memory with its peer, which it cannot do. Drivers without a row may hold a
    /// packet beyond its acknowledgement.
    pub external_buffers: bool,
    /// The driver sums the checksum of each segment as if it began at an even byte: where the port
    /// computes checksums, every segment but the last must have an even length.
    pub even_segments: bool,
    /// DPDK gives both ends of the link one MAC address, which the other end must keep: the port
    /// needs another, and accepts every frame sent to it.
    pub shares_mac_address: bool,
    /// The peer is on the same machine and sends super-segments if the port accepts them (LRO).
    pub peer_sends_uncut: bool,
    /// The largest MTU that the driver accepts; the link may carry more.
    pub(crate) announced_mtu: u32,
    /// The largest MTU that can be configured on any device of this driver.
    pub max_mtu: u16,
    /// The driver has no TCP segmentation.
    pub never_cuts_tcp: bool,
    /// Which part of a start [`crate::Port::rehearse`] can repeat without an effect on the machine.
    pub(crate) rehearsal: Rehearsal,
    /// Limits of the driver's own TCP segmentation, if it has one.
    pub software_tso: Option<SoftwareTso>,
    /// Frames pass through an AF_PACKET socket ring, see [`Self::packet_ring_frame`].
    packet_ring: bool,
    /// The requirement most often missing when such a device cannot be attached.
    needs: Needs,
}

/// Limits of a driver that segments TCP in software.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SoftwareTso {
    /// Bytes that the driver adds to the MTU when it segments: Ethernet header and VLAN tag.
    pub header_room: u16,
    /// The largest MTU that can be configured, including that room.
    pub max_mtu: u16,
    /// The driver segments IPv4 packets only.
    pub ipv4_only: bool,
}

/// Part of a start that can be repeated without an effect on the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rehearsal {
    /// None: attaching takes over a NIC, opens files or connects to a peer. Only the driver is looked
    /// up.
    Parse,
    /// Attaching: the device opens nothing that others see before it is configured.
    Attach,
    /// Attaching in a network namespace of its own, where the device creates its interface.
    AttachInNamespace,
}

/// Requirement of a device on this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Needs {
    Nothing,
    /// `iface=` with the name of a network interface, and CAP_NET_RAW.
    Interface,
    /// /dev/net/tun and CAP_NET_ADMIN.
    TunDevice,
    /// `iface=` with the path of a Unix socket that the device creates.
    SocketPath,
    /// `path=` of the Unix socket or the device node of its peer.
    PeerSocket,
    /// A NIC bound to a driver for user space.
    UserSpaceDriver,
}

/// Traits of a driver without a row of its own.
const OTHER: DriverTraits = DriverTraits {
    driver: "",
    in_process: false,
    external_buffers: false,
    even_segments: false,
    shares_mac_address: false,
    peer_sends_uncut: false,
    announced_mtu: u32::MAX,
    max_mtu: u16::MAX,
    never_cuts_tcp: false,
    rehearsal: Rehearsal::Parse,
    software_tso: None,
    packet_ring: false,
    needs: Needs::Nothing,
};

/// The two ends of [`crate::Port::create_ring_pair`].
pub(crate) static RING_PAIR: DriverTraits = DriverTraits {
    driver: "net_ring",
    in_process: true,
    external_buffers: true,
    ..OTHER
};

const PCI_NIC_ROW: DriverTraits = DriverTraits {
    external_buffers: true,
    needs: Needs::UserSpaceDriver,
    ..OTHER
};

static PCI_NIC: DriverTraits = PCI_NIC_ROW;

/// A NIC without an IOMMU: it reads physical addresses, which only DPDK's own memory has.
pub(crate) static PCI_NIC_PHYSICAL: DriverTraits = DriverTraits {
    external_buffers: false,
    ..PCI_NIC_ROW
};

static UNKNOWN: DriverTraits = OTHER;

static VIRTUAL: [DriverTraits; 6] = [
    DriverTraits {
        driver: "net_null",
        rehearsal: Rehearsal::Attach,
        ..OTHER
    },
    DriverTraits {
        driver: "net_tap",
        external_buffers: true,
        even_segments: true,
        shares_mac_address: true,
        max_mtu: 1500,
        rehearsal: Rehearsal::AttachInNamespace,
        software_tso: Some(SoftwareTso {
            header_room: 18,
            max_mtu: 1500,
            ipv4_only: true,
        }),
        needs: Needs::TunDevice,
        ..OTHER
    },
    DriverTraits {
        driver: "net_af_packet",
        external_buffers: true,
        // The driver reports the frame length of plain Ethernet, whatever its interface carries,
        // and never checks the MTU.
        announced_mtu: 1500,
        never_cuts_tcp: true,
        rehearsal: Rehearsal::Attach,
        packet_ring: true,
        needs: Needs::Interface,
        ..OTHER
    },
    DriverTraits {
        driver: "net_af_xdp",
        never_cuts_tcp: true,
        needs: Needs::Interface,
        ..OTHER
    },
    DriverTraits {
        driver: "net_virtio_user",
        needs: Needs::PeerSocket,
        peer_sends_uncut: true,
        ..OTHER
    },
    DriverTraits {
        driver: "net_vhost",
        external_buffers: true,
        peer_sends_uncut: true,
        rehearsal: Rehearsal::Attach,
        needs: Needs::SocketPath,
        ..OTHER
    },
];

/// Bytes that the kernel puts before each frame in an AF_PACKET socket ring (`TPACKET2_HDRLEN`),
/// without the address.
const PACKET_RING_HEADER: u16 = 32;
/// Largest MTU that fits into the ring's default frames.
const PACKET_RING_MTU: u16 = 1900;

impl DriverTraits {
    /// Traits of both ends of [`crate::Port::create_ring_pair`].
    pub fn of_ring_pair() -> &'static DriverTraits {
        &RING_PAIR
    }

    /// The row of a device, by its devargs (`net_tap0,iface=tap0`, `0000:03:00.0`) or its driver.
    pub fn for_device(device: &str) -> &'static DriverTraits {
        if is_pci_address(device) {
            return &PCI_NIC;
        }
        let row = VIRTUAL.iter().find(|row| device.starts_with(row.driver));
        row.unwrap_or(&UNKNOWN)
    }

    /// Returns true if interrupts come from a device, through VFIO or UIO: only the first interrupt
    /// shows that they arrive.
    pub fn has_device_interrupts(&self) -> bool {
        self.needs == Needs::UserSpaceDriver
    }

    /// Returns true if the driver has a row of its own.
    pub fn is_known(&self) -> bool {
        !self.driver.is_empty() || self.needs == Needs::UserSpaceDriver
    }

    /// The kernel's interface that a virtual device is on or creates, by its devargs.
    pub fn interface_of(devargs: &str) -> Option<&str> {
        match DriverTraits::for_device(devargs).needs {
            Needs::Interface | Needs::TunDevice => value_of(devargs, "iface="),
            _ => None,
        }
    }

    /// The kernel's interface that a virtual device receives from, if it exists before the start.
    pub fn existing_interface_of(devargs: &str) -> Option<&str> {
        let traits = DriverTraits::for_device(devargs);
        value_of(devargs, "iface=").filter(|_| traits.needs == Needs::Interface)
    }

    /// The kernel's interface that a virtual device creates.
    pub fn created_interface_of(devargs: &str) -> Option<&str> {
        let traits = DriverTraits::for_device(devargs);
        value_of(devargs, "iface=").filter(|_| traits.needs == Needs::TunDevice)
    }

    /// The Unix socket that a virtual device creates, by its devargs; `None` if it connects to its
    /// peer's.
    pub fn own_socket_of(devargs: &str) -> Option<&str> {
        match DriverTraits::for_device(devargs).needs {
            Needs::SocketPath if value_of(devargs, "client=") != Some("1") => {
                value_of(devargs, "iface=")
            }
            Needs::PeerSocket if value_of(devargs, "server=") == Some("1") => {
                value_of(devargs, "path=")
            }
            _ => None,
        }
    }

    /// Returns true if attaching a device waits until its peer has connected to its socket.
    pub fn waits_for_peer(devargs: &str) -> bool {
        let is_front_end = DriverTraits::for_device(devargs).needs == Needs::PeerSocket;
        is_front_end && DriverTraits::own_socket_of(devargs).is_some()
    }

    /// Returns true for a device that connects to its peer once: it does not come back after its peer has
    /// ended.
    pub fn connects_once(devargs: &str) -> bool {
        let is_front_end = DriverTraits::for_device(devargs).needs == Needs::PeerSocket;
        is_front_end && DriverTraits::own_socket_of(devargs).is_none()
    }

    /// Checks that this machine has what a virtual device needs, as far as it shows without the
    /// device.
    ///
    /// # Errors
    /// The missing requirement.
    pub fn check_requirements(devargs: &str) -> std::result::Result<(), String> {
        let traits = DriverTraits::for_device(devargs);
        let hint = traits.attach_hint(devargs);
        if let Some(hint) = hint.strip_prefix("; ") {
            return Err(hint.to_owned());
        }
        if let Some(file) = bus_device_file(devargs)
            && !file.exists()
        {
            return Err(format!(
                "there is no {}: see `siwd devices`",
                file.display()
            ));
        }
        let folder = |path: &str| Path::new(path).parent().map(Path::to_path_buf);
        match traits.needs {
            Needs::SocketPath => {
                let path = value_of(devargs, "iface=").unwrap_or_default();
                match folder(path) {
                    Some(folder) if folder.as_os_str().is_empty() || folder.is_dir() => Ok(()),
                    _ => Err(format!("iface={path}: there is no such folder: create it")),
                }
            }
            Needs::PeerSocket => match value_of(devargs, "path=") {
                None => Err("it needs path=PATH of its peer's socket".into()),
                // It creates the socket itself.
                Some(_) if value_of(devargs, "server=") == Some("1") => Ok(()),
                Some(path) if Path::new(path).exists() => Ok(()),
                Some(path) => Err(format!(
                    "path={path}: there is no such socket: start its peer"
                )),
            },
            _ => Ok(()),
        }
    }

    /// Returns true if the devargs name a device on a bus other than PCI that DPDK has to scan: a
    /// sub-function on the auxiliary bus, or a Hyper-V device by its UUID.
    pub fn is_on_bus(devargs: &str) -> bool {
        let name = devargs.split(',').next().unwrap_or_default();
        let is_uuid = name.len() == 36
            && name.bytes().enumerate().all(|(index, byte)| match index {
                8 | 13 | 18 | 23 => byte == b'-',
                _ => byte.is_ascii_hexdigit(),
            });
        is_uuid || name.starts_with("auxiliary:") || name.starts_with("vmbus:")
    }

    /// Frame size that the device's packet ring needs for IP packets of `mtu` bytes with `overhead`
    /// bytes around them. By default the ring delivers only the first 1982
    /// bytes of longer frames, without an error (findings/af-packet-shortens-long-frames.sh).
    /// `None`: the default suffices, the devargs set the size, or the link has no packet ring.
    pub fn packet_ring_frame(&self, devargs: &str, mtu: u16, overhead: u16) -> Option<u16> {
        let is_set = devargs.contains("framesz=") || devargs.contains("blocksz=");
        (self.packet_ring && mtu > PACKET_RING_MTU && !is_set)
            .then(|| (mtu + overhead + PACKET_RING_HEADER * 2).next_multiple_of(1024))
    }

    /// Packet bytes that fit into a ring frame of `ring_frame` bytes.
    pub fn packet_ring_room(ring_frame: u16) -> u16 {
        ring_frame - PACKET_RING_HEADER
    }

    /// Devargs of a device whose packet ring has frames of `ring_frame` bytes.
    pub fn devargs_with_ring(devargs: &str, ring_frame: u16) -> String {
        // Blocks are whole pages; four frames of any of these sizes fill them without a gap.
        let block = u32::from(ring_frame) * 4;
        format!("{devargs},framesz={ring_frame},blocksz={block}")
    }

    /// The most frequent reason why attaching this device fails, if it applies to this machine:
    /// text to append to an error.
    pub(crate) fn attach_hint(&self, devargs: &str) -> String {
        let name = devargs.split(',').next().unwrap_or_default();
        let iface = value_of(devargs, "iface=");
        match (self.needs, iface) {
            (Needs::UserSpaceDriver, _) => PciDevice::at_address(name).map_or_else(
                || format!("; there is no PCI device {name}: siwd devices lists them"),
                |device| device.attach_hint(),
            ),
            (Needs::Interface, None) => "; it needs iface=NAME".into(),
            (Needs::Interface, Some(iface)) if !interface_exists(iface) => {
                format!("; there is no interface `{iface}`: see ip link")
            }
            // With the capability, the cause is another one, which the log names.
            (Needs::Interface, Some(_)) if Capability::NetRaw.is_effective() != Some(true) => {
                "; it needs CAP_NET_RAW (run as root)".into()
            }
            (Needs::TunDevice, _) if !Path::new("/dev/net/tun").exists() => {
                "; /dev/net/tun is missing: modprobe tun".into()
            }
            (Needs::TunDevice, _) if Capability::NetAdmin.is_effective() != Some(true) => {
                "; it needs CAP_NET_ADMIN (run as root)".into()
            }
            (Needs::SocketPath, None) => "; it needs iface=PATH of its socket".into(),
            _ => String::new(),
        }
    }
}

/// The file of a device on a bus other than PCI.
fn bus_device_file(devargs: &str) -> Option<PathBuf> {
    if !DriverTraits::is_on_bus(devargs) {
        return None;
    }
    let name = devargs.split(',').next().unwrap_or_default();
    let (bus, name) = name.split_once(':').unwrap_or(("vmbus", name));
    Some(Path::new("/sys/bus").join(bus).join("devices").join(name))
}

/// The value of a key of devargs.
fn value_of<'text>(devargs: &'text str, key: &str) -> Option<&'text str> {
    devargs.split(',').find_map(|part| part.strip_prefix(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devargs_and_drivers_find_their_row() {
        assert!(DriverTraits::for_device("net_tap0,iface=x").shares_mac_address);
        assert!(DriverTraits::for_device("net_tap").even_segments);
        assert!(!DriverTraits::for_device("net_virtio_user0,path=/s").external_buffers);
        assert_eq!(DriverTraits::for_device("net_other0"), &OTHER);
        for (devargs, socket, waits, once) in [
            ("net_vhost0,iface=/s", Some("/s"), false, false),
            ("net_vhost0,iface=/s,client=1", None, false, false),
            ("net_virtio_user0,path=/s", None, false, true),
            ("net_virtio_user0,path=/s,server=1", Some("/s"), true, false),
            ("net_tap0,iface=x", None, false, false),
        ] {
            assert_eq!(DriverTraits::own_socket_of(devargs), socket, "{devargs}");
            assert_eq!(DriverTraits::waits_for_peer(devargs), waits, "{devargs}");
            assert_eq!(DriverTraits::connects_once(devargs), once, "{devargs}");
        }
        assert_eq!(
            DriverTraits::for_device("0000:03:00.0").needs,
            Needs::UserSpaceDriver
        );
    }

    #[test]
    fn packet_rings_get_frames_that_hold_a_long_mtu() {
        let traits = DriverTraits::for_device("net_af_packet0,iface=x");
        assert_eq!(traits.packet_ring_frame("iface=x", 1500, 32), None);
        assert_eq!(
            traits.packet_ring_frame("iface=x,framesz=2048", 9000, 32),
            None
        );
        let frame = traits.packet_ring_frame("iface=x", 9000, 32).unwrap();
        assert_eq!(frame, 9216);
        assert!(DriverTraits::packet_ring_room(frame) >= 9032);
        assert_eq!(
            DriverTraits::devargs_with_ring("a", frame),
            "a,framesz=9216,blocksz=36864"
        );
    }
}
