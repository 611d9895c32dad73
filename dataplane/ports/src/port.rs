//! A port of any kind: attach, configure, start, then take the queues and hand each worker its own.

use std::sync::Arc;

use dpdk::{
    DriverTraits, Eal, Mempool, Offloads, PortCaps, PortConfig, PortCounters, PortEvent, PortInfo,
};
use siw_xdp::Claim;

use crate::packet_port::PacketPort;
use crate::xdp_port::{XdpLink, XdpPort};
use crate::{Error, Result, RxQueue, TxQueue};

/// A receive and a transmit queue; `None` where the port has fewer queues in that direction.
pub type PortQueues = (Option<RxQueue>, Option<TxQueue>);

/// A port. It is stopped and closed when all its handles and queues are dropped.
pub struct Port {
    kind: Kind,
}

enum Kind {
    Dpdk(dpdk::Port),
    Packet(PacketPort),
    Xdp(Arc<XdpPort>),
}

/// The state of a port's link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkStatus {
    /// True if the link carries frames.
    pub up: bool,
    /// Mb/s; 0 if the port does not know.
    pub mbps: u32,
    /// Largest IP packet that the kernel's interface carries at present; `None` for other ports.
    pub mtu: Option<u32>,
    /// Receive queues that an AF_XDP interface got after the start: they have no socket, and claimed
    /// frames that arrive there are lost.
    pub unserved_queues: u32,
}

impl Port {
    /// Creates a virtual device from DPDK's devargs, such as `net_af_packet0,iface=eth0`, and
    /// adopts its port.
    ///
    /// # Errors
    /// DPDK's driver refuses the device, or the interface that it names does not exist.
    pub fn attach_vdev(eal: &Eal, devargs: &str) -> Result<Port> {
        Port::of_vdev(dpdk::Port::attach_vdev(eal, devargs)?, devargs)
    }

    /// Repeats the part of [`Port::attach_vdev`] that has no effect on the machine, and returns the
    /// port if that part creates one. The calling thread may be in another network
    /// namespace afterwards.
    ///
    /// # Errors
    /// The device could not be attached: its driver is missing, or refuses the devargs.
    pub fn rehearse(eal: &Eal, devargs: &str) -> Result<Option<Port>> {
        let port = dpdk::Port::rehearse(eal, devargs)?;
        port.map(|port| Port::of_vdev(port, devargs)).transpose()
    }

    fn of_vdev(port: dpdk::Port, devargs: &str) -> Result<Port> {
        let kind = match DriverTraits::existing_interface_of(devargs) {
            Some(interface) => Kind::Packet(PacketPort::new(port, devargs, interface)?),
            None => Kind::Dpdk(port),
        };
        Ok(Port { kind })
    }

    /// Attaches the NIC at a PCI address (`0000:03:00.0`, optionally followed by a comma and
    /// devargs). The environment must have been started with `no_pci: false`.
    ///
    /// # Errors
    /// There is no such NIC, or DPDK's driver refuses it.
    pub fn attach_pci(eal: &Eal, address: &str) -> Result<Port> {
        let port = dpdk::Port::attach_pci(eal, address)?;
        Ok(Port {
            kind: Kind::Dpdk(port),
        })
    }

    /// Creates a port with AF_XDP sockets on an interface that stays with the kernel. The interface does
    /// not change before the port is started.
    ///
    /// # Errors
    /// The interface cannot be used, or a capability is missing.
    pub fn attach_xdp(eal: &Eal, link: &XdpLink) -> Result<Port> {
        let port = XdpPort::prepare(eal, link)?;
        Ok(Port {
            kind: Kind::Xdp(Arc::new(port)),
        })
    }

    /// Creates a pair of ports joined by rings; see [`dpdk::Port::create_ring_pair`].
    ///
    /// # Errors
    /// The name or the number of queues is out of range, or DPDK lacks memory.
    pub fn create_ring_pair(
        eal: &Eal,
        name: &str,
        queues: u16,
        ring_size: u32,
    ) -> Result<(Port, Port)> {
        let (first, second) = dpdk::Port::create_ring_pair(eal, name, queues, ring_size)?;
        let of_dpdk = |port| Port {
            kind: Kind::Dpdk(port),
        };
        Ok((of_dpdk(first), of_dpdk(second)))
    }

    /// Creates another handle to the same port.
    pub fn share(&self) -> Port {
        let kind = match &self.kind {
            Kind::Dpdk(port) => Kind::Dpdk(port.share()),
            Kind::Packet(port) => Kind::Packet(port.share()),
            Kind::Xdp(port) => Kind::Xdp(port.clone()),
        };
        Port { kind }
    }

    /// DPDK's port; `None` for an AF_XDP port.
    fn dpdk_port(&self) -> Option<&dpdk::Port> {
        match &self.kind {
            Kind::Dpdk(port) => Some(port),
            Kind::Packet(port) => Some(&port.dpdk),
            Kind::Xdp(_) => None,
        }
    }

    /// DPDK's port, for a function that only DPDK's drivers have.
    fn of_dpdk(&self, what: &'static str) -> Result<&dpdk::Port> {
        self.dpdk_port().ok_or_else(|| Error::Unsupported {
            port: self.name().to_owned(),
            what,
            why: "it is an AF_XDP port, whose interface stays with the kernel",
        })
    }

    fn of_xdp(&self, what: &'static str) -> Result<&XdpPort> {
        match &self.kind {
            Kind::Xdp(port) => Ok(port),
            Kind::Dpdk(_) | Kind::Packet(_) => Err(Error::Unsupported {
                port: self.name().to_owned(),
                what,
                why: "it is no AF_XDP port",
            }),
        }
    }

    /// Another handle to DPDK's port if its device reads memory by DMA, so that external memory has to
    /// be mapped for it.
    pub fn dma_port(&self) -> Option<dpdk::Port> {
        let port = self.dpdk_port().filter(|port| port.needs_dma_map());
        port.map(dpdk::Port::share)
    }

    /// Properties of links of this driver.
    pub fn driver_traits(&self) -> &'static DriverTraits {
        self.dpdk_port()
            .map_or_else(XdpLink::driver_traits, dpdk::Port::driver_traits)
    }

    /// Name of the device.
    pub fn name(&self) -> &str {
        match &self.kind {
            Kind::Dpdk(port) => port.name(),
            Kind::Packet(port) => port.dpdk.name(),
            Kind::Xdp(port) => &port.name,
        }
    }

    /// The driver's description of the device.
    ///
    /// # Errors
    /// The device was removed.
    pub fn device_info(&self) -> Result<PortInfo> {
        match &self.kind {
            Kind::Dpdk(port) => Ok(port.device_info()?),
            Kind::Packet(port) => Ok(port.dpdk.device_info()?),
            Kind::Xdp(port) => port.device_info(),
        }
    }

    /// Configures the port and leaves it stopped. Queue `i` receives into `pools[i]`; the last pool
    /// serves all further queues. Offloads that the port lacks are not granted. All queues of an AF_XDP
    /// port receive into `pools[0]`.
    ///
    /// # Errors
    /// The MTU, the number of queues or the buffers of the pools do not suit the port.
    pub fn configure(&mut self, config: &PortConfig, pools: &[Mempool]) -> Result<PortCaps> {
        match &mut self.kind {
            Kind::Dpdk(port) => Ok(port.configure(config, pools)?),
            Kind::Packet(port) => Ok(port.dpdk.configure(config, pools)?),
            Kind::Xdp(port) => port.configure(config, pools),
        }
    }

    /// Checks a configuration without applying it, and returns the offloads that the port offers of
    /// those requested.
    ///
    /// # Errors
    /// As [`Port::configure`], as far as the driver's own description tells.
    pub fn negotiate(&self, config: &PortConfig, pools: &[Mempool]) -> Result<Offloads> {
        Ok(self.device_info()?.negotiate(self.name(), config, pools)?)
    }

    /// Capabilities granted by the last [`Self::configure`] and [`Self::start`].
    pub fn granted_caps(&self) -> Option<PortCaps> {
        match &self.kind {
            Kind::Dpdk(port) => port.granted_caps(),
            Kind::Packet(port) => port.dpdk.granted_caps(),
            Kind::Xdp(port) => port.granted_caps(),
        }
    }

    /// Starts the port and returns its queues: as many pairs as the larger number of queues in a
    /// direction (a missing partner is `None`). Workers own them; the port cannot be stopped before
    /// they are dropped.
    ///
    /// # Errors
    /// The port is not configured, its queues are in use, or the driver or the kernel refuses.
    pub fn start(&mut self) -> Result<Vec<PortQueues>> {
        match &mut self.kind {
            Kind::Dpdk(port) => {
                let queues = port.start()?.into_iter();
                let queues = queues.map(|(rx, tx)| (rx.map(RxQueue::Dpdk), tx.map(TxQueue::Dpdk)));
                Ok(queues.collect())
            }
            Kind::Packet(port) => port.start(),
            Kind::Xdp(port) => port.start(),
        }
    }

    /// Closes the port and releases its device although other handles exist; their calls then fail. For
    /// a device that is being removed.
    ///
    /// # Errors
    /// Queues are in use.
    pub fn detach(&self) -> Result<()> {
        match &self.kind {
            Kind::Dpdk(port) => Ok(port.detach()?),
            Kind::Packet(port) => Ok(port.dpdk.detach()?),
            Kind::Xdp(port) => port.detach(),
        }
    }

    /// Drops this handle. The device closes when the last handle and queue are dropped.
    pub fn close(self) {}

    /// Packets dropped on transmission because the driver or its interface refused them, on all queues.
    pub fn refused_packets(&self) -> u64 {
        match &self.kind {
            Kind::Dpdk(port) => port.refused_packets(),
            Kind::Packet(port) => port.dpdk.refused_packets(),
            Kind::Xdp(port) => port.refused_packets(),
        }
    }

    /// Event of the device since the last call. Not every driver reports a removal, so the kernel's lists
    /// of devices and interfaces are checked too.
    pub fn take_event(&self) -> Option<PortEvent> {
        match &self.kind {
            Kind::Dpdk(port) => port.take_event(),
            Kind::Packet(port) => port.take_event(),
            Kind::Xdp(port) => port.take_event(),
        }
    }

    /// Turns reception of frames to every address on or off.
    ///
    /// # Errors
    /// The driver refuses or lacks the function.
    pub fn set_promiscuous(&self, on: bool) -> Result<()> {
        Ok(self.of_dpdk("promiscuous mode")?.set_promiscuous(on)?)
    }

    /// Receives frames to every multicast address from now on.
    ///
    /// # Errors
    /// The driver refuses or lacks the function.
    pub fn accept_all_multicast(&self) -> Result<()> {
        match &self.kind {
            Kind::Dpdk(port) => Ok(port.set_allmulticast(true)?),
            Kind::Packet(port) => port.accept_all_multicast(),
            Kind::Xdp(port) => port.accept_all_multicast(),
        }
    }

    /// Accepts tagged frames of this VLAN. The port must have granted `vlan_filter` ([`Offloads`]).
    ///
    /// # Errors
    /// The driver refuses or lacks the function.
    pub fn accept_vlan(&self, vlan: u16) -> Result<()> {
        Ok(self.of_dpdk("accepting a VLAN")?.accept_vlan(vlan)?)
    }

    /// The address that the port receives frames for.
    ///
    /// # Errors
    /// The driver refuses or lacks the function.
    pub fn mac_address(&self) -> Result<[u8; 6]> {
        match &self.kind {
            Kind::Dpdk(port) => Ok(port.mac_address()?),
            Kind::Packet(port) => Ok(port.dpdk.mac_address()?),
            Kind::Xdp(port) => Ok(port.mac_address()),
        }
    }

    /// Sets the address that the port receives frames for. The interface of an AF_PACKET port keeps its
    /// own, and receives all frames while the port exists.
    ///
    /// # Errors
    /// The driver refuses or lacks the function.
    pub fn set_mac_address(&self, mac: [u8; 6]) -> Result<()> {
        match &self.kind {
            Kind::Packet(port) => port.accept_all_addresses(),
            Kind::Dpdk(_) | Kind::Xdp(_) => {
                let port = self.of_dpdk("setting the MAC address")?;
                Ok(port.set_mac_address(mac)?)
            }
        }
    }

    /// Reads link state and speed without waiting for the link.
    ///
    /// # Errors
    /// The driver refuses or lacks the function.
    pub fn link_status(&self) -> Result<LinkStatus> {
        match &self.kind {
            Kind::Dpdk(port) => {
                let dpdk::LinkStatus { up, mbps } = port.link_status()?;
                Ok(LinkStatus {
                    up,
                    mbps,
                    mtu: None,
                    unserved_queues: 0,
                })
            }
            Kind::Packet(port) => port.link_status(),
            Kind::Xdp(port) => port.link_status(),
        }
    }

    /// Counters since the port started.
    ///
    /// # Errors
    /// The driver refuses or lacks the function.
    pub fn read_counters(&self) -> Result<PortCounters> {
        match &self.kind {
            Kind::Dpdk(port) => Ok(port.read_counters()?),
            Kind::Packet(port) => Ok(port.dpdk.read_counters()?),
            Kind::Xdp(port) => port.read_counters(),
        }
    }

    /// Sends flows whose hash is `i` modulo the table's length to queue `table[i]`. The length must
    /// be the port's `reta_size`.
    ///
    /// # Errors
    /// The driver refuses or lacks the function.
    pub fn set_rss_table(&self, table: &[u16]) -> Result<()> {
        Ok(self
            .of_dpdk("setting the RSS table")?
            .set_rss_table(table)?)
    }

    /// Index of the kernel interface that an AF_XDP port shares; `None` for other ports.
    pub fn xdp_interface(&self) -> Option<u32> {
        match &self.kind {
            Kind::Xdp(port) => Some(port.interface_index()),
            Kind::Dpdk(_) | Kind::Packet(_) => None,
        }
    }

    /// Receives frames to this address and port from now on. For AF_XDP ports only.
    ///
    /// # Errors
    /// The kernel refuses, or this is no AF_XDP port.
    pub fn add_claim(&self, claim: Claim) -> Result<()> {
        self.of_xdp("claiming frames")?.add_claim(claim)
    }

    /// Leaves frames to this address and port to the kernel again.
    ///
    /// # Errors
    /// As [`Self::add_claim`].
    pub fn remove_claim(&self, claim: Claim) -> Result<()> {
        self.of_xdp("claiming frames")?.remove_claim(claim)
    }
}
