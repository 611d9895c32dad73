//! Control of a port while workers use its queues: address, filters, link, counters, RSS table.

use crate::{LinkStatus, Port, PortCounters, Result, log};
use dpdk_sys as sys;

/// A link's speed that the driver does not know (`RTE_ETH_SPEED_NUM_UNKNOWN`).
const UNKNOWN_SPEED: u32 = u32::MAX;

impl Port {
    /// Turns reception of frames to every address on or off.
    ///
    /// # Errors
    /// The driver refuses or lacks the function, see [`crate::Error::is_unsupported`].
    pub fn set_promiscuous(&self, on: bool) -> Result<()> {
        self.check_call("setting promiscuous mode", |id| {
            // SAFETY: a port number of ours.
            unsafe {
                if on {
                    sys::rte_eth_promiscuous_enable(id)
                } else {
                    sys::rte_eth_promiscuous_disable(id)
                }
            }
        })
    }

    /// Turns reception of frames to every multicast address on or off.
    ///
    /// # Errors
    /// The driver refuses or lacks the function, see [`crate::Error::is_unsupported`].
    pub fn set_allmulticast(&self, on: bool) -> Result<()> {
        self.check_call("setting all-multicast mode", |id| {
            // SAFETY: a port number of ours.
            unsafe {
                if on {
                    sys::rte_eth_allmulticast_enable(id)
                } else {
                    sys::rte_eth_allmulticast_disable(id)
                }
            }
        })
    }

    /// Accepts tagged frames of this VLAN. The port must have granted `vlan_filter`
    /// ([`crate::Offloads`]).
    ///
    /// # Errors
    /// The driver refuses or lacks the function, see [`crate::Error::is_unsupported`].
    pub fn accept_vlan(&self, vlan: u16) -> Result<()> {
        self.check_call("accepting a VLAN", |id| {
            // SAFETY: a port number of ours.
            unsafe { sys::rte_eth_dev_vlan_filter(id, vlan, 1) }
        })
    }

    /// The address that the port receives frames for.
    ///
    /// # Errors
    /// The driver refuses or lacks the function, see [`crate::Error::is_unsupported`].
    pub fn mac_address(&self) -> Result<[u8; 6]> {
        let mut addr = sys::rte_ether_addr::default();
        self.check_call("reading the MAC address", |id| {
            // SAFETY: the address is written within the call.
            unsafe { sys::rte_eth_macaddr_get(id, &mut addr) }
        })?;
        Ok(addr.addr_bytes)
    }

    /// Sets the address that the port receives frames for.
    ///
    /// # Errors
    /// The driver refuses or lacks the function, see [`crate::Error::is_unsupported`].
    pub fn set_mac_address(&self, mac: [u8; 6]) -> Result<()> {
        let mut addr = sys::rte_ether_addr { addr_bytes: mac };
        self.check_call("setting the MAC address", |id| {
            // SAFETY: the address is read within the call.
            unsafe { sys::rte_eth_dev_default_mac_addr_set(id, &mut addr) }
        })
    }

    /// Reads link state and speed without waiting for the link.
    ///
    /// # Errors
    /// The driver refuses or lacks the function, see [`crate::Error::is_unsupported`].
    pub fn link_status(&self) -> Result<LinkStatus> {
        let (mut up, mut mbps) = (false, 0);
        self.check_call("reading the link status", |id| {
            // SAFETY: both are written within the call.
            unsafe { sys::siw_port_link(id, &mut up, &mut mbps) }
        })?;
        Ok(LinkStatus {
            up,
            mbps: if mbps == UNKNOWN_SPEED { 0 } else { mbps },
        })
    }

    /// Counters since the port started.
    ///
    /// # Errors
    /// The driver refuses or lacks the function, see [`crate::Error::is_unsupported`].
    pub fn read_counters(&self) -> Result<PortCounters> {
        let mut counters = sys::siw_port_stats::default();
        self.check_call("reading the counters", |id| {
            // SAFETY: the counters are written within the call.
            unsafe { sys::siw_port_stats_get(id, &mut counters) }
        })?;
        Ok(PortCounters {
            rx_packets: counters.ipackets,
            tx_packets: counters.opackets,
            rx_bytes: counters.ibytes,
            tx_bytes: counters.obytes,
            rx_missed: counters.imissed,
            rx_errors: counters.ierrors,
            tx_errors: counters.oerrors,
            rx_no_buffer: counters.rx_nombuf,
        })
    }

    /// Reads the RSS key back and compares it: some drivers ignore it without an error.
    pub(crate) fn has_rss_key(&self, key: &[u8]) -> bool {
        let mut found = [0u8; u8::MAX as usize];
        let mut len = key.len().min(found.len()) as u8;
        // SAFETY: `found` has room for `len` bytes, and is written within the call.
        let rc = unsafe { sys::siw_port_rss_key_get(self.id(), found.as_mut_ptr(), &mut len) };
        rc == 0 && found.get(..key.len()) == Some(key)
    }

    /// Returns true if a thread can wait for a queue's interrupt. This arms none to find out:
    /// drivers report success also where a queue has no vector, as with uio_pci_generic, and
    /// vmxnet3's driver then writes outside the NIC's registers.
    pub(crate) fn interrupts_work(&self) -> bool {
        let _quote = log::quote_lines();
        // SAFETY: queue 0 of a started port exists.
        unsafe { sys::rte_eth_dev_rx_intr_ctl_q_get_fd(self.id(), 0) >= 0 }
    }

    /// Sends flows whose hash is `i` modulo the table's length to queue `table[i]`. The length must
    /// be the port's `reta_size`.
    ///
    /// # Errors
    /// The driver refuses or lacks the function, see [`crate::Error::is_unsupported`].
    pub fn set_rss_table(&self, table: &[u16]) -> Result<()> {
        self.check_call("setting the RSS table", |id| {
            // SAFETY: the table is read within the call; the shim checks its length, which fits
            // into 16 bits because no table has more than 512 entries.
            unsafe {
                sys::siw_port_reta_set(id, table.as_ptr(), table.len().min(u16::MAX.into()) as u16)
            }
        })
    }
}
