//! Attributes of a device for the control thread and its clients.

use std::net::IpAddr;
use std::sync::Arc;

use siw_host::ports::HostPorts;
use siw_net::{LearnedRoutes, Steering};
use siw_shm::device_identity::{GidTable, interface_index};
use siw_shm::persona::Persona;

use crate::config::{Cidr, DeviceConfig, PermanentNeighbour};

/// Attributes of one device: reported to clients, and used to select a device for a connection.
#[derive(Debug, Clone)]
pub struct DeviceView {
    /// Number that no other device of the process has, not even an earlier one of the same name and index.
    pub instance: u64,
    /// Name in the configuration, such as `siw0`.
    pub name: String,
    /// The device's table of the configuration.
    pub config: Arc<DeviceConfig>,
    /// Effective settings of the configuration and the link, as shown to operators.
    pub settings: serde_json::Value,
    /// Name of the DPDK driver, such as `net_ring`.
    pub driver: String,
    /// MAC address of the port.
    pub mac: [u8; 6],
    /// Kind of device that programs see by default.
    pub persona: Persona,
    /// Kernel interface on the device's link, if there is one.
    pub interface: Option<String>,
    /// The device's own addresses, each with its on-link network.
    pub addresses: Vec<Cidr>,
    /// GIDs of these addresses and of the MAC address.
    pub gids: GidTable,
    /// Networks behind routers on the link.
    pub routes: Vec<Cidr>,
    /// The device has an IPv4 default route.
    pub gateway: bool,
    /// The device has an IPv6 default route.
    pub gateway6: bool,
    /// Largest IP packet, in bytes.
    pub mtu: u16,
    /// Link speed in Mb/s at the last poll; 0 if the port reports none.
    pub link_mbps: u32,
    /// Receive queues of an AF_XDP interface without a socket, at the last poll.
    pub unserved_queues: u32,
    /// The link was up at the last poll.
    pub link_up: bool,
    /// Number of times that the link went down.
    pub link_downs: u64,
    /// The device was removed from the machine, or is unusable for another reason.
    pub is_gone: bool,
    /// An operator deleted the device: it is gone, and lists leave it out.
    pub is_deleted: bool,
    /// Connections request CRC by default.
    pub crc: bool,
    /// Applications cannot turn off CRC.
    pub crc_required: bool,
    /// MPA revision that initiators request: 1 or 2 (RFC 5044, RFC 6581).
    pub mpa_rev: u8,
    /// Maximum number of outstanding inbound RDMA READs and atomics of a queue pair.
    pub max_ird: u16,
    /// Maximum number of outstanding outbound RDMA READs and atomics of a queue pair.
    pub max_ord: u16,
    /// Workers that serve the device.
    pub workers: Vec<usize>,
    /// Assignment of connections to these workers.
    pub steering: Arc<Steering>,
    /// Division of TCP ports with the kernel, for a device that shares addresses with it.
    pub host_ports: Option<Arc<HostPorts>>,
    /// Routes learned from the kernel, in addition to the configured ones.
    pub learned_routes: LearnedRoutes,
    /// Neighbours with a fixed Ethernet address, of the configuration and of operators.
    pub permanent_neighbours: Vec<PermanentNeighbour>,
}

impl DeviceView {
    /// Attributes for the files that programs read; `index` is the device's.
    pub fn to_sysfs(&self, index: usize) -> siw_sysfs::Device {
        siw_sysfs::Device {
            name: self.name.clone(),
            index,
            instance: self.instance,
            driver: self.driver.clone(),
            mac: self.mac,
            persona: self.persona,
            addresses: self.addresses.iter().map(|cidr| cidr.addr).collect(),
            gids: self.gids.clone(),
            mtu: self.mtu,
            link_up: self.link_up,
            link_mbps: self.link_mbps,
            link_downs: self.link_downs,
        }
    }

    /// Returns true for the number of the interface that represents the device, or of the kernel's
    /// interface on its link; `index` is the device's.
    pub fn has_interface_number(&self, index: usize, number: u32) -> bool {
        let of_kernel = || {
            let name = self.interface.as_deref()?;
            nix::net::if_::if_nametoindex(name).ok()
        };
        number == interface_index(index as u32) || of_kernel() == Some(number)
    }

    /// Returns true if one of the addresses is IPv6 link-local.
    pub fn has_link_local(&self) -> bool {
        let mut addresses = self.addresses.iter();
        addresses.any(|cidr| matches!(cidr.addr, IpAddr::V6(ip) if ip.is_unicast_link_local()))
    }
}
