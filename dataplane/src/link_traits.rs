//! What a worker has to know of the link below a device: one value, made from what the driver is
//! known for, what the port granted and what the configuration allows.

use dpdk::{DriverTraits, PortCaps};

use crate::config::ChecksumPolicy;

/// What a device's link can do, as it is configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkTraits {
    /// The far end is in this daemon: memory, no wire. Nothing announces its frames, and each ring
    /// joins the same worker's ends.
    pub in_process: bool,
    /// Nobody computes checksums: nothing can damage frames in memory.
    pub no_checksums: bool,
    /// The port verifies the checksums of received frames.
    pub rx_checksum: bool,
    /// The port can wake a sleeping worker.
    pub rx_interrupt: bool,
    /// The port computes TCP checksums.
    pub tx_checksum: bool,
    /// The port fills in the IPv4 header checksums of what it cuts.
    pub tx_ip_checksum: bool,
    /// The port cuts TCP segments (TSO), and computes their checksums.
    pub tso: bool,
    /// The port sends chains of segments; without, frames are copied into one buffer.
    pub multi_segs: bool,
    /// The port reads registered memory where it lies.
    pub external_buffers: bool,
    /// Every segment but the last must have an even length, or the port's checksums are wrong.
    pub even_segments: bool,
    /// Segments that the port takes in a frame that it sends as it is.
    pub max_segments: u16,
    /// Segments that the port takes in a packet that it cuts.
    pub max_tso_segments: u16,
}

impl LinkTraits {
    /// `driver` knows the kind of link, `granted` is the outcome of the port's configuration.
    pub fn new(driver: &DriverTraits, granted: &PortCaps, checksum: ChecksumPolicy) -> LinkTraits {
        let offloads = granted.offloads;
        let port_may_checksum = checksum != ChecksumPolicy::Software && !driver.in_process;
        let tx_checksum = offloads.tx_checksum && port_may_checksum;
        LinkTraits {
            in_process: driver.in_process,
            no_checksums: driver.in_process && checksum != ChecksumPolicy::Software,
            rx_checksum: offloads.rx_checksum && port_may_checksum,
            rx_interrupt: offloads.rx_interrupt && !driver.in_process,
            tx_checksum,
            tx_ip_checksum: offloads.tx_ip_checksum,
            tso: offloads.tso && tx_checksum,
            multi_segs: offloads.multi_segs || driver.in_process,
            external_buffers: driver.external_buffers,
            even_segments: driver.even_segments && tx_checksum,
            max_segments: granted.tx_mtu_seg_max,
            max_tso_segments: granted.tx_seg_max,
        }
    }

    /// Whether TCP has to compute checksums itself.
    pub fn needs_software_checksum(&self) -> bool {
        !(self.tx_checksum || self.no_checksums)
    }

    /// Whether received frames may belong to another worker.
    pub fn needs_steering(&self) -> bool {
        !self.in_process
    }
}
