//! `[[device]]`: a device's link, addresses, routes and offloads.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Range;

use dpdk::DriverTraits;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use siw_ports::XdpLink;
use siw_shm::persona::Persona;
use toml::Spanned;

use super::{
    Cidr, DeviceName, InterfaceName, MAX_WORKERS, MacAddress, MpaSettings, NeighbourSettings,
    PciAddress, PortRange, TcpSettings,
};

/// Whether an FPDU carries a CRC32c (RFC 5044, section 7.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CrcSetting {
    /// Not requested; used when the peer requests it.
    Off,
    /// Requested.
    On,
    /// Requested. A reply without it is refused, and no application can turn it off.
    Required,
}

/// TCP checksum computation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ChecksumPolicy {
    /// By the port if it can. On the embedded pair checksums are left out, because its frames never
    /// leave memory (captures still show valid checksums). Otherwise by siwd.
    Auto,
    /// Always by siwd.
    Software,
}

/// TCP segmentation offload (TSO) by the port; a pair carries super-segments unsegmented.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TsoPolicy {
    /// If the port supports it.
    Auto,
    /// Always; a port without TSO is an error.
    On,
    /// Never.
    Off,
}

/// Use of the iWARP port mapper.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PortMapPolicy {
    /// Connects ask the peer's mapper, and requests for siwd's listeners are answered.
    #[default]
    Auto,
    /// Neither.
    Off,
}

/// Kind of device that programs see by default through the drop-in libibverbs. Connections are iWARP under each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PersonaSetting {
    /// An RNIC.
    #[default]
    Iwarp,
    /// A RoCE v2 device, for programs that refuse RNICs.
    Roce,
    /// An InfiniBand device with LIDs, for programs that refuse Ethernet.
    Ib,
    /// A device of an unspecified kind.
    Unspecified,
}

impl From<PersonaSetting> for Persona {
    fn from(setting: PersonaSetting) -> Persona {
        match setting {
            PersonaSetting::Iwarp => Persona::Iwarp,
            PersonaSetting::Roce => Persona::Roce,
            PersonaSetting::Ib => Persona::Ib,
            PersonaSetting::Unspecified => Persona::Unspecified,
        }
    }
}

/// Transmit path of the payload of WRITE and SEND.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TxPayloadPolicy {
    /// The faster way measured for this kind of link, provided that it can never invalidate a CRC:
    /// by reference for long messages without CRC on a pair with a large MTU, by copy for all
    /// others.
    Auto,
    /// Copied into the frame, in one pass with the CRC.
    Copy,
    /// Sent directly from registered memory; a link without support for it is an error.
    Reference,
}

/// Copy mode of an AF_XDP socket between the interface and siwd's packet buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum XdpCopySetting {
    /// Zero-copy if the NIC's driver supports it, otherwise copies by the kernel.
    Auto,
    /// Copies by the kernel.
    Copy,
    /// DMA by the NIC (zero-copy); a driver without it is an error.
    ZeroCopy,
}

/// Default number of descriptors of a ring.
const DESCRIPTORS: u16 = 1024;
/// Range of descriptor counts: every NIC supports the minimum, and none exceeds the maximum.
const MIN_DESCRIPTORS: u16 = 32;
const MAX_DESCRIPTORS: u16 = 16_384;
/// Largest jumbo-frame MTU that NICs and switches commonly support.
const MAX_WIRE_MTU: u16 = 9000;
/// A pair of rings passes pointers, so the limit is the length field of the IP header.
const MAX_PAIR_MTU: u16 = u16::MAX;

/// Neighbours of a device with a fixed Ethernet address.
pub(crate) const MAX_PERMANENT_NEIGHBOURS: usize = 256;

/// Share of lost frames with which connections still make progress.
const MAX_LOSS: f64 = 0.5;

/// One `[[device]]`.
#[derive(Debug, Clone, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceConfig {
    /// Verbs device name: siw0.
    #[schemars(with = "DeviceName")]
    pub name: Spanned<DeviceName>,
    /// Two devices that name the same pair are joined by two DPDK rings.
    pub pair: Option<String>,
    /// A DPDK device by its devargs: "net_tap0,iface=siwtap0", "auxiliary:mlx5_core.sf.2". Together
    /// with `pci`: arguments for the driver of that NIC, "mprq_en=1".
    pub devargs: Option<String>,
    /// A PCI NIC that DPDK can drive (`siwd devices`): "0000:03:00.0".
    pub pci: Option<PciAddress>,
    /// A network interface that stays with the kernel (AF_XDP): siwd receives the frames to the
    /// device's addresses, the kernel all others.
    #[schemars(with = "Option<InterfaceName>")]
    pub af_xdp: Option<Spanned<InterfaceName>>,
    /// Copy mode of `af_xdp`.
    #[serde(default = "default_xdp_copy")]
    pub xdp_copy: XdpCopySetting,
    /// The device shares its addresses with the kernel: siwd owns only the TCP ports of its
    /// listeners and connects.
    #[serde(default)]
    pub xdp_share: bool,
    /// Ethernet address; absent: that of the port, or one derived from the name.
    pub mac: Option<MacAddress>,
    /// Addresses with prefix length: "10.77.0.1/24", "fd77::1/64".
    #[schemars(with = "Vec<Cidr>")]
    pub addresses: Spanned<Vec<Cidr>>,
    /// IPv4 router for other networks.
    #[schemars(with = "Option<Ipv4Addr>")]
    pub gateway: Option<Spanned<Ipv4Addr>>,
    /// IPv6 router for other networks.
    #[schemars(with = "Option<Ipv6Addr>")]
    pub gateway6: Option<Spanned<Ipv6Addr>>,
    /// Networks behind routers other than the gateway; the longest prefix wins.
    #[serde(default)]
    pub routes: Vec<RouteConfig>,
    /// IP bytes in a frame: 1280 (576 without IPv6) to 9000, on a pair up to 65535.
    #[serde(default = "default_mtu")]
    #[schemars(with = "u16")]
    pub mtu: Spanned<u16>,
    /// 802.1Q tag, 1 to 4094.
    #[schemars(with = "Option<u16>")]
    pub vlan: Option<Spanned<u16>>,
    /// Number of workers that serve the device; absent: all. Workers beyond the port's queues
    /// receive and send through the other workers.
    #[schemars(with = "Option<u16>")]
    pub queues: Option<Spanned<u16>>,
    /// Kind of device that programs see by default; `siwrun --persona` overrides it for one program.
    #[serde(default)]
    pub persona: PersonaSetting,
    /// Use of the iWARP port mapper.
    #[serde(default)]
    pub port_map: PortMapPolicy,
    /// Checksum computation.
    #[serde(default = "default_checksum")]
    pub checksum: ChecksumPolicy,
    /// TSO: the port segments super-segments of whole FPDUs, or, as a pair does, carries them
    /// unsegmented. Requires checksum offload.
    #[serde(default = "default_tso")]
    #[schemars(with = "TsoPolicy")]
    pub tso: Spanned<TsoPolicy>,
    /// Share of the frames that a pair loses at random, from 0 to 0.5.
    #[serde(default = "default_loss")]
    #[schemars(with = "f64")]
    pub loss: Spanned<f64>,
    /// Transmit path of payload.
    #[serde(default = "default_tx_payload")]
    pub tx_payload: TxPayloadPolicy,
    /// Descriptors of each receive ring; absent: 1024. The driver may adjust it.
    #[schemars(with = "Option<u16>")]
    pub rx_descriptors: Option<Spanned<u16>>,
    /// Descriptors of each transmit ring; absent: 1024. The driver may adjust it.
    #[schemars(with = "Option<u16>")]
    pub tx_descriptors: Option<Spanned<u16>>,
    /// Number of free descriptors at which a receive ring is refilled; absent: the driver's
    /// default.
    #[schemars(with = "Option<u16>")]
    pub rx_free_threshold: Option<Spanned<u16>>,
    /// Number of free descriptors below which sent buffers are freed; absent: the driver's default.
    #[schemars(with = "Option<u16>")]
    pub tx_free_threshold: Option<Spanned<u16>>,
    /// Name of the TAP interface that siwd creates to share the device with the kernel; absent:
    /// siwd uses the device alone.
    #[schemars(with = "Option<InterfaceName>")]
    pub host_interface: Option<Spanned<InterfaceName>>,
    /// Addresses of the TAP interface; absent: those of the device, which the kernel then shares.
    #[schemars(with = "Option<Vec<Cidr>>")]
    pub host_addresses: Option<Spanned<Vec<Cidr>>>,
    /// TCP ports for siwd's connects from shared addresses. siwd keeps the kernel from using them.
    #[serde(default = "default_host_ports")]
    #[schemars(with = "PortRange")]
    pub host_ports: Spanned<PortRange>,
    /// Follow the kernel's routes and neighbours on the interface.
    #[serde(default)]
    pub host_routes: bool,
    /// Open the device again when its interface is removed and one of the same name appears. Devices with
    /// `af_xdp` and AF_PACKET devices have such an interface. The interface of a tap device is made again.
    #[serde(default = "default_reattach")]
    pub reattach: bool,
    /// `[device.mpa]`
    #[serde(default)]
    pub mpa: MpaSettings,
    /// `[device.tcp]`
    #[serde(default)]
    pub tcp: TcpSettings,
    /// `[device.neighbours]`
    #[serde(default)]
    pub neighbours: NeighbourSettings,
}

fn default_mtu() -> Spanned<u16> {
    Spanned::new(0..0, 1500)
}

fn default_loss() -> Spanned<f64> {
    Spanned::new(0..0, 0.0)
}

fn default_host_ports() -> Spanned<PortRange> {
    Spanned::new(0..0, PortRange::BEYOND_LINUX)
}

fn default_reattach() -> bool {
    true
}

fn default_tso() -> Spanned<TsoPolicy> {
    Spanned::new(0..0, TsoPolicy::Auto)
}

fn default_xdp_copy() -> XdpCopySetting {
    XdpCopySetting::Auto
}

fn default_tx_payload() -> TxPayloadPolicy {
    TxPayloadPolicy::Auto
}

fn default_checksum() -> ChecksumPolicy {
    ChecksumPolicy::Auto
}

/// A route: `{ to = "10.80.0.0/16", via = "10.77.0.254" }`.
#[derive(Debug, Clone, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RouteConfig {
    /// Destinations.
    pub to: Cidr,
    /// A router on one of the device's networks.
    #[schemars(with = "IpAddr")]
    pub via: Spanned<IpAddr>,
}

/// Link of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LinkSource {
    /// One end of a pair of rings.
    Pair(String),
    /// A DPDK virtual device by devargs.
    Vdev(String),
    /// A PCI NIC.
    Pci(String),
    /// A kernel interface, through AF_XDP.
    Xdp(String),
}

impl DeviceConfig {
    /// Link of this device; `check_settings` has verified that exactly one is named.
    pub fn link_source(&self) -> LinkSource {
        if let Some(pair) = &self.pair {
            LinkSource::Pair(pair.clone())
        } else if let Some(address) = &self.pci {
            let devargs = self.devargs.iter().map(|devargs| format!(",{devargs}"));
            LinkSource::Pci(devargs.fold(address.0.clone(), |whole, part| whole + &part))
        } else if let Some(interface) = &self.af_xdp {
            LinkSource::Xdp(interface.get_ref().0.clone())
        } else {
            LinkSource::Vdev(self.devargs.clone().unwrap_or_default())
        }
    }
}

impl DeviceConfig {
    /// Bus address of a PCI, auxiliary or VMBus device, for the list of devices that DPDK probes.
    /// `None` for links that are not bus devices.
    pub fn bus_device(&self) -> Option<String> {
        match self.link_source() {
            LinkSource::Pci(device) => Some(device),
            LinkSource::Vdev(devargs) if DriverTraits::is_on_bus(&devargs) => Some(devargs),
            _ => None,
        }
    }

    /// Returns true if opening the device waits for its peer.
    pub fn waits_for_peer(&self) -> bool {
        matches!(self.link_source(), LinkSource::Vdev(devargs) if DriverTraits::waits_for_peer(&devargs))
    }

    /// Name of the kernel interface with this device's addresses, or on its link.
    pub fn kernel_interface(&self) -> Option<String> {
        let shared = self.host_interface.as_ref();
        let shared = shared.map(|interface| interface.get_ref().0.clone());
        shared.or_else(|| match self.link_source() {
            LinkSource::Xdp(interface) => Some(interface),
            LinkSource::Vdev(devargs) if self.vlan.is_none() => {
                DriverTraits::interface_of(&devargs).map(Into::into)
            }
            _ => None,
        })
    }

    /// The existing interface of the kernel that the device uses, which can vanish and come back.
    pub fn existing_interface(&self) -> Option<String> {
        match self.link_source() {
            LinkSource::Xdp(interface) => Some(interface),
            LinkSource::Vdev(devargs) => {
                DriverTraits::existing_interface_of(&devargs).map(str::to_owned)
            }
            LinkSource::Pair(_) | LinkSource::Pci(_) => None,
        }
    }

    /// True if opening the device creates an interface of the kernel, which can be deleted.
    pub fn creates_interface(&self) -> bool {
        matches!(self.link_source(), LinkSource::Vdev(devargs)
            if DriverTraits::created_interface_of(&devargs).is_some())
    }

    /// Links of this device that no other device can have, by their names in messages. Devices with
    /// different VLANs can share an interface.
    pub(super) fn exclusive_links(&self) -> Vec<String> {
        match self.link_source() {
            LinkSource::Pair(_) => Vec::new(),
            LinkSource::Pci(address) => {
                vec![format!("NIC {}", dpdk::PciDevice::full_address(&address))]
            }
            LinkSource::Xdp(interface) => vec![format!("interface {interface:?}")],
            LinkSource::Vdev(devargs) => {
                let name = devargs.split(',').next().unwrap_or_default();
                let interface = DriverTraits::interface_of(&devargs);
                let interface = interface.map(|interface| match &self.vlan {
                    Some(vlan) => format!("VLAN {} of {interface:?}", vlan.get_ref()),
                    None => format!("interface {interface:?}"),
                });
                let name = (!name.is_empty()).then(|| format!("DPDK device {name:?}"));
                name.into_iter().chain(interface).collect()
            }
        }
    }

    /// Location of the link in the file.
    pub(super) fn link_span(&self) -> Range<usize> {
        self.af_xdp
            .as_ref()
            .map_or_else(|| self.name.span(), Spanned::span)
    }

    /// Checks ranges and contradictions; `whole` is the location of the table.
    pub(super) fn check_settings(&self, whole: Range<usize>) -> Result<(), (Range<usize>, String)> {
        let name = &self.name.get_ref().0;
        let links = [
            self.pair.is_some(),
            self.devargs.is_some() && self.pci.is_none(),
            self.pci.is_some(),
            self.af_xdp.is_some(),
        ];
        let count = links.iter().filter(|named| **named).count();
        if count != 1 {
            return Err((
                whole,
                format!(
                    "device {name:?} names {count} links: give exactly one of pair = \"NAME\", devargs = \"net_...\", pci = \"0000:03:00.0\", af_xdp = \"eth0\""
                ),
            ));
        }
        self.check_af_xdp()?;
        if self.addresses.get_ref().is_empty() {
            return Err((
                self.addresses.span(),
                format!("device {name:?} needs at least one address"),
            ));
        }
        let six = self
            .addresses
            .get_ref()
            .iter()
            .any(|cidr| cidr.addr.is_ipv6());
        let least = if six { 1280 } else { 576 };
        let mtu = *self.mtu.get_ref();
        let most = if self.pair.is_some() {
            MAX_PAIR_MTU
        } else {
            MAX_WIRE_MTU
        };
        if !(least..=most).contains(&mtu) {
            return Err((
                self.mtu.span(),
                format!("mtu {mtu}: {least} to {most} are allowed here"),
            ));
        }
        let loss = *self.loss.get_ref();
        if !(0.0..=MAX_LOSS).contains(&loss) {
            return Err((
                self.loss.span(),
                format!("loss {loss}: 0 to {MAX_LOSS} are allowed"),
            ));
        }
        if loss > 0.0 && self.pair.is_none() {
            return Err((
                self.loss.span(),
                "loss: only the embedded pair loses frames on purpose; use tc-netem(8) in the network of other links".into(),
            ));
        }
        if let Some(vlan) = &self.vlan
            && !(1..=4094).contains(vlan.get_ref())
        {
            return Err((
                vlan.span(),
                format!("vlan {}: 1 to 4094 are allowed", vlan.get_ref()),
            ));
        }
        if let Some(queues) = &self.queues
            && !(1..=MAX_WORKERS as u16).contains(queues.get_ref())
        {
            return Err((
                queues.span(),
                format!(
                    "queues {}: 1 to {} are allowed",
                    queues.get_ref(),
                    MAX_WORKERS
                ),
            ));
        }
        self.check_driver()?;
        self.check_rings()?;
        self.check_host_path()?;
        if *self.tso.get_ref() == TsoPolicy::On && self.checksum == ChecksumPolicy::Software {
            return Err((
                self.tso.span(),
                "tso \"on\": the port must compute the checksums of its segments; use checksum = \"auto\"".into(),
            ));
        }
        let addresses = self.addresses.get_ref();
        for (index, address) in addresses.iter().enumerate() {
            if addresses[..index]
                .iter()
                .any(|earlier| earlier.addr == address.addr)
            {
                return Err((
                    self.addresses.span(),
                    format!("address {} is given twice", address.addr),
                ));
            }
        }
        for cidr in addresses {
            if let Some(why) = reserved_in(cidr, cidr.addr) {
                return Err((
                    self.addresses.span(),
                    format!("address {}/{}: {why}", cidr.addr, cidr.prefix),
                ));
            }
        }
        let gateways = [
            self.gateway
                .as_ref()
                .map(|gateway| (IpAddr::V4(*gateway.get_ref()), gateway.span())),
            self.gateway6
                .as_ref()
                .map(|gateway| (IpAddr::V6(*gateway.get_ref()), gateway.span())),
        ];
        for (router, span) in gateways.into_iter().flatten() {
            self.check_neighbour("router", router, router, span)?;
        }
        for route in &self.routes {
            let (via, span) = (*route.via.get_ref(), route.via.span());
            self.check_neighbour("router", via, route.to.addr, span)?;
        }
        self.check_permanent_neighbours()?;
        self.tcp.check_ranges()?;
        self.neighbours.check_ranges()?;
        self.mpa.check_ranges()
    }

    /// Checks the settings against the properties of the driver.
    fn check_driver(&self) -> Result<(), (Range<usize>, String)> {
        let traits = match self.link_source() {
            LinkSource::Pair(_) => DriverTraits::of_ring_pair(),
            LinkSource::Xdp(_) => XdpLink::driver_traits(),
            LinkSource::Pci(devargs) | LinkSource::Vdev(devargs) => {
                DriverTraits::for_device(&devargs)
            }
        };
        let fail = |span, message| Err((span, message));
        if self.devargs.as_deref() == Some("") {
            return fail(
                self.name.span(),
                "devargs is empty: name a DPDK device".into(),
            );
        }
        if *self.mtu.get_ref() > traits.max_mtu {
            return fail(
                self.mtu.span(),
                format!(
                    "mtu {}: this link carries at most {}",
                    self.mtu.get_ref(),
                    traits.max_mtu
                ),
            );
        }
        if *self.tso.get_ref() == TsoPolicy::On && traits.never_cuts_tcp {
            return fail(
                self.tso.span(),
                "tso \"on\": this link cannot cut TCP segments; use \"auto\"".into(),
            );
        }
        if self.tx_payload == TxPayloadPolicy::Reference
            && traits.is_known()
            && !traits.external_buffers
        {
            return fail(
                self.name.span(),
                "tx_payload \"reference\": this link sends only from packet buffers; use \"auto\""
                    .into(),
            );
        }
        Ok(())
    }

    /// Checks that no setting conflicts with `af_xdp`.
    fn check_af_xdp(&self) -> Result<(), (Range<usize>, String)> {
        let Some(interface) = &self.af_xdp else {
            return match self.xdp_share {
                true => Err((
                    self.name.span(),
                    "xdp_share: addresses are shared through an interface that af_xdp has to name"
                        .into(),
                )),
                false => Ok(()),
            };
        };
        if let Some(vlan) = self.vlan.as_ref().filter(|_| self.xdp_share) {
            return Err((
                vlan.span(),
                "vlan: with xdp_share the addresses are those of the interface itself; leave vlan out".into(),
            ));
        }
        if self.mac.is_some() {
            return Err((
                interface.span(),
                "mac: the kernel and siwd have the address of the interface on af_xdp; leave mac out".into(),
            ));
        }
        let mtu = *self.mtu.get_ref();
        if mtu > XdpLink::MAX_MTU {
            return Err((
                self.mtu.span(),
                format!(
                    "mtu {mtu}: at most {} on af_xdp, where a frame must fit into a page",
                    XdpLink::MAX_MTU
                ),
            ));
        }
        Ok(())
    }

    /// Checks the settings of the TAP interface shared with the kernel.
    fn check_host_path(&self) -> Result<(), (Range<usize>, String)> {
        let Some(interface) = &self.host_interface else {
            return match &self.host_addresses {
                Some(addresses) => Err((
                    addresses.span(),
                    "host_addresses: requires host_interface, which names the interface"
                        .into(),
                )),
                None if self.host_routes && self.af_xdp.is_none() => Err((
                    self.name.span(),
                    "host_routes: requires an interface of the kernel, named by host_interface or af_xdp".into(),
                )),
                None => Ok(()),
            };
        };
        if self.pair.is_some() {
            return Err((
                interface.span(),
                "host_interface: a pair has no NIC to share with the kernel".into(),
            ));
        }
        if self.af_xdp.is_some() {
            return Err((
                interface.span(),
                "host_interface: the interface of af_xdp stays with the kernel; remove this setting".into(),
            ));
        }
        let addresses = self.host_addresses.as_ref();
        let listed = addresses.map_or(&[][..], |addresses| addresses.get_ref());
        for (index, address) in listed.iter().enumerate() {
            if listed[..index]
                .iter()
                .any(|earlier| earlier.addr == address.addr)
            {
                return Err((
                    addresses.map_or(0..0, Spanned::span),
                    format!("address {} is given twice", address.addr),
                ));
            }
        }
        Ok(())
    }

    /// Checks descriptor counts, and that thresholds are below them.
    fn check_rings(&self) -> Result<(), (Range<usize>, String)> {
        let pairs = [
            (&self.rx_descriptors, &self.rx_free_threshold, "rx"),
            (&self.tx_descriptors, &self.tx_free_threshold, "tx"),
        ];
        for (descriptors, threshold, direction) in pairs {
            let count = descriptors
                .as_ref()
                .map_or(DESCRIPTORS, |count| *count.get_ref());
            if let Some(configured) = descriptors
                && !(MIN_DESCRIPTORS..=MAX_DESCRIPTORS).contains(&count)
            {
                return Err((
                    configured.span(),
                    format!(
                        "{direction}_descriptors {count}: {MIN_DESCRIPTORS} to {MAX_DESCRIPTORS} are allowed"
                    ),
                ));
            }
            if let Some(threshold) = threshold
                && !(1..count).contains(threshold.get_ref())
            {
                return Err((
                    threshold.span(),
                    format!(
                        "{direction}_free_threshold {}: 1 to {} are allowed, below {direction}_descriptors",
                        threshold.get_ref(),
                        count - 1
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Packet buffers held by the rings of a NIC served by `workers` workers; 0 for links whose
    /// rings hold none.
    pub fn ring_buffers(&self, workers: usize) -> u32 {
        if self.pci.is_none() && self.af_xdp.is_none() {
            return 0;
        }
        let queues = self.queues.as_ref().map_or(workers, |queues| {
            usize::from(*queues.get_ref()).min(workers)
        });
        queues as u32 * (u32::from(self.rx_ring_len()) + u32::from(self.tx_ring_len()))
    }

    /// Requested number of descriptors of each receive ring.
    pub fn rx_ring_len(&self) -> u16 {
        self.rx_descriptors
            .as_ref()
            .map_or(DESCRIPTORS, |count| *count.get_ref())
    }

    /// Requested number of descriptors of each transmit ring.
    pub fn tx_ring_len(&self) -> u16 {
        self.tx_descriptors
            .as_ref()
            .map_or(DESCRIPTORS, |count| *count.get_ref())
    }

    /// Checks neighbours with a fixed Ethernet address.
    fn check_permanent_neighbours(&self) -> Result<(), (Range<usize>, String)> {
        let (neighbours, span) = (
            self.neighbours.permanent.get_ref(),
            self.neighbours.permanent.span(),
        );
        if self.host_routes && !neighbours.is_empty() {
            let why = "permanent: the device follows the kernel (host_routes): use ip neigh";
            return Err((span, why.into()));
        }
        if neighbours.len() > MAX_PERMANENT_NEIGHBOURS {
            let why = format!("permanent: at most {MAX_PERMANENT_NEIGHBOURS} neighbours");
            return Err((span, why));
        }
        for (index, neighbour) in neighbours.iter().enumerate() {
            let address = neighbour.address;
            self.check_neighbour("neighbour", address, address, span.clone())?;
            let mut earlier = neighbours[..index].iter();
            if earlier.any(|earlier| earlier.address == address) {
                return Err((span, format!("neighbour {address} is given twice")));
            }
        }
        Ok(())
    }

    /// A router or another neighbour must be on one of the device's networks, or be IPv6 link-local.
    fn check_neighbour(
        &self,
        what: &str,
        router: IpAddr,
        to: IpAddr,
        span: Range<usize>,
    ) -> Result<(), (Range<usize>, String)> {
        let near = self.addresses.get_ref().iter().any(|cidr| match router {
            IpAddr::V6(address) if address.is_unicast_link_local() => cidr.addr.is_ipv6(),
            _ => {
                cidr.addr != router && siw_net::IpCidr::new(cidr.addr, cidr.prefix).contains(router)
            }
        });
        let mut addresses = self.addresses.get_ref().iter();
        if let Some(why) = addresses.find_map(|cidr| reserved_in(cidr, router)) {
            return Err((span, format!("{what} {router}: {why}")));
        }
        if near && router.is_ipv4() == to.is_ipv4() {
            return Ok(());
        }
        Err((
            span,
            format!(
                "{what} {router}: it must be on one of the device's own networks (or fe80::/10), of the destination's family, and not the device itself"
            ),
        ))
    }
}

/// Returns the reason why no host can have an address on the network of `cidr`; `None` if one can. Networks
/// of one or two addresses have neither a network nor a broadcast address (RFC 3021).
pub(crate) fn reserved_in(cidr: &Cidr, address: IpAddr) -> Option<&'static str> {
    let (IpAddr::V4(own), IpAddr::V4(address)) = (cidr.addr, address) else {
        return None;
    };
    if cidr.prefix > 30 {
        return None;
    }
    let hosts = u32::MAX.checked_shr(cidr.prefix.into()).unwrap_or(0);
    if (own.to_bits() ^ address.to_bits()) & !hosts != 0 {
        return None;
    }
    match address.to_bits() & hosts {
        0 => Some("it is the address of the network, not of a host (RFC 1122 section 3.2.1.3)"),
        part if part == hosts => {
            Some("it is the broadcast address of the network (RFC 1122 section 3.2.1.3)")
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_and_broadcast_addresses_are_of_no_host() {
        let reserved = |cidr: &str, address: &str| {
            reserved_in(&cidr.parse().unwrap(), address.parse().unwrap()).is_some()
        };
        for (cidr, address, expected) in [
            ("10.0.0.1/24", "10.0.0.0", true),
            ("10.0.0.1/24", "10.0.0.255", true),
            ("10.0.0.1/24", "10.0.1.255", false),
            ("10.0.0.1/23", "10.0.0.255", false),
            ("10.0.0.1/23", "10.0.1.0", false),
            ("10.0.0.1/23", "10.0.1.255", true),
            ("10.0.0.1/30", "10.0.0.3", true),
            ("10.0.0.0/31", "10.0.0.0", false),
            ("10.0.0.0/31", "10.0.0.1", false),
            ("10.0.0.0/32", "10.0.0.0", false),
            ("fd00::/64", "fd00::", false),
        ] {
            assert_eq!(reserved(cidr, address), expected, "{address} in {cidr}");
        }
    }
}
