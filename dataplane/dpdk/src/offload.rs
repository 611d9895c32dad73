//! Receive results of the NIC and transmit offload requests of a packet (rte_mbuf's `ol_flags` and
//! `tx_offload`).

use crate::Mbuf;
use dpdk_sys as sys;

/// The NIC's verdict on a checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChecksumStatus {
    /// Not checked: software has to.
    Unknown,
    /// The checksum is right.
    Good,
    /// The checksum is wrong.
    Bad,
    /// The packet carries no checksum, but its data is known to be intact: virtual links deliver
    /// segments whose checksum was never filled in.
    NotNeeded,
}

/// Work that the NIC does on a packet to send. Lengths are in bytes.
///
/// The TCP checksum field must hold the pseudo-header checksum: over the TCP length without TSO,
/// over length zero with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TxOffload {
    /// Ethernet header, including any VLAN tag in the packet.
    pub l2_len: u8,
    /// IP header, including options or extension headers.
    pub l3_len: u16,
    /// TCP header, including options.
    pub l4_len: u8,
    /// True for IPv6, false for IPv4.
    pub ipv6: bool,
    /// Fill in the IPv4 header checksum.
    pub ip_checksum: bool,
    /// Fill in the TCP checksum.
    pub tcp_checksum: bool,
    /// TCP payload bytes of each segment that the NIC makes (TSO); 0: no TSO.
    pub tso_segsz: u16,
}

impl Mbuf {
    /// The IPv4 header checksum of a received packet.
    #[inline]
    pub fn rx_ip_checksum(&self) -> ChecksumStatus {
        match self.raw_mbuf().ol_flags & sys::RTE_MBUF_F_RX_IP_CKSUM_MASK {
            sys::RTE_MBUF_F_RX_IP_CKSUM_GOOD => ChecksumStatus::Good,
            sys::RTE_MBUF_F_RX_IP_CKSUM_BAD => ChecksumStatus::Bad,
            sys::RTE_MBUF_F_RX_IP_CKSUM_NONE => ChecksumStatus::NotNeeded,
            _ => ChecksumStatus::Unknown,
        }
    }

    /// The TCP or UDP checksum of a received packet.
    #[inline]
    pub fn rx_l4_checksum(&self) -> ChecksumStatus {
        match self.raw_mbuf().ol_flags & sys::RTE_MBUF_F_RX_L4_CKSUM_MASK {
            sys::RTE_MBUF_F_RX_L4_CKSUM_GOOD => ChecksumStatus::Good,
            sys::RTE_MBUF_F_RX_L4_CKSUM_BAD => ChecksumStatus::Bad,
            sys::RTE_MBUF_F_RX_L4_CKSUM_NONE => ChecksumStatus::NotNeeded,
            _ => ChecksumStatus::Unknown,
        }
    }

    /// The RSS hash, if the NIC computed one.
    #[inline]
    pub fn rss_hash(&self) -> Option<u32> {
        let mbuf = self.raw_mbuf();
        (mbuf.ol_flags & sys::RTE_MBUF_F_RX_RSS_HASH != 0).then_some(mbuf.rss)
    }

    /// The VLAN tag control information that the NIC stripped from the packet.
    #[inline]
    pub fn rx_vlan(&self) -> Option<u16> {
        let mbuf = self.raw_mbuf();
        (mbuf.ol_flags & sys::RTE_MBUF_F_RX_VLAN_STRIPPED != 0).then_some(mbuf.vlan_tci)
    }

    /// Returns true if the NIC merged several TCP segments into this packet.
    #[inline]
    pub fn rx_lro(&self) -> bool {
        self.raw_mbuf().ol_flags & sys::RTE_MBUF_F_RX_LRO != 0
    }

    /// The port that received the packet.
    #[inline]
    pub fn rx_port(&self) -> u16 {
        self.raw_mbuf().port
    }

    /// Clears the sender's offload requests and the NIC's receive results: a packet on a ring pair
    /// arrives with the sender's flags. The result for a TCP or UDP checksum stays: a receiver of
    /// the forwarded packet has to know whether the checksum is filled in.
    #[inline]
    pub fn clear_offload(&mut self) {
        let mbuf = self.raw_mbuf_mut();
        mbuf.ol_flags &=
            sys::RTE_MBUF_F_EXTERNAL | sys::RTE_MBUF_F_INDIRECT | sys::RTE_MBUF_F_RX_L4_CKSUM_MASK;
        mbuf.tx_offload = 0;
    }

    /// Requests checksums and segmentation from the NIC. The port must have granted them, see
    /// [`crate::PortCaps`].
    #[inline]
    pub fn set_tx_offload(&mut self, offload: TxOffload) {
        let mut flags = if offload.ipv6 {
            sys::RTE_MBUF_F_TX_IPV6
        } else {
            sys::RTE_MBUF_F_TX_IPV4
        };
        if offload.ip_checksum && !offload.ipv6 {
            flags |= sys::RTE_MBUF_F_TX_IP_CKSUM;
        }
        if offload.tcp_checksum || offload.tso_segsz != 0 {
            flags |= sys::RTE_MBUF_F_TX_TCP_CKSUM;
        }
        if offload.tso_segsz != 0 {
            flags |= sys::RTE_MBUF_F_TX_TCP_SEG;
        }
        let mask = |bits: u64| (1u64 << bits) - 1;
        let mbuf = self.raw_mbuf_mut();
        mbuf.ol_flags |= flags;
        mbuf.tx_offload = (u64::from(offload.l2_len) & mask(sys::RTE_MBUF_L2_LEN_BITS))
            | (u64::from(offload.l3_len) & mask(sys::RTE_MBUF_L3_LEN_BITS))
                << sys::RTE_MBUF_L3_LEN_OFS
            | (u64::from(offload.l4_len) & mask(sys::RTE_MBUF_L4_LEN_BITS))
                << sys::RTE_MBUF_L4_LEN_OFS
            | u64::from(offload.tso_segsz) << sys::RTE_MBUF_TSO_SEGSZ_OFS;
    }

    /// The request made by [`Self::set_tx_offload`], if any.
    pub fn tx_offload(&self) -> Option<TxOffload> {
        let mbuf = self.raw_mbuf();
        if mbuf.ol_flags & (sys::RTE_MBUF_F_TX_IPV4 | sys::RTE_MBUF_F_TX_IPV6) == 0 {
            return None;
        }
        let field = |ofs: u64, bits: u64| mbuf.tx_offload >> ofs & ((1 << bits) - 1);
        let tso = mbuf.ol_flags & sys::RTE_MBUF_F_TX_TCP_SEG != 0;
        Some(TxOffload {
            l2_len: field(0, sys::RTE_MBUF_L2_LEN_BITS) as u8,
            l3_len: field(sys::RTE_MBUF_L3_LEN_OFS, sys::RTE_MBUF_L3_LEN_BITS) as u16,
            l4_len: field(sys::RTE_MBUF_L4_LEN_OFS, sys::RTE_MBUF_L4_LEN_BITS) as u8,
            ipv6: mbuf.ol_flags & sys::RTE_MBUF_F_TX_IPV6 != 0,
            ip_checksum: mbuf.ol_flags & sys::RTE_MBUF_F_TX_IP_CKSUM != 0,
            tcp_checksum: mbuf.ol_flags & sys::RTE_MBUF_F_TX_L4_MASK
                == sys::RTE_MBUF_F_TX_TCP_CKSUM,
            tso_segsz: if tso {
                field(sys::RTE_MBUF_TSO_SEGSZ_OFS, sys::RTE_MBUF_TSO_SEGSZ_BITS) as u16
            } else {
                0
            },
        })
    }

    /// Requests that the NIC insert a VLAN tag.
    #[inline]
    pub fn set_tx_vlan(&mut self, tci: u16) {
        let mbuf = self.raw_mbuf_mut();
        mbuf.ol_flags |= sys::RTE_MBUF_F_TX_VLAN;
        mbuf.vlan_tci = tci;
    }
}
