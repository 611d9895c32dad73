//! What the NIC found out about a received packet, and what it is asked to do
//! with one to send (rte_mbuf's `ol_flags` and `tx_offload`).

use crate::Mbuf;
use dpdk_sys as sys;

/// The NIC's word about a checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChecksumStatus {
    /// Not looked at: software has to.
    Unknown,
    Good,
    Bad,
    /// Not in the packet, yet the data is known to be intact (virtual links
    /// hand over segments whose checksum was never filled in).
    NotNeeded,
}

/// Work that the NIC does on a packet to send. Lengths are in bytes.
///
/// The pseudo-header checksum has to stand in the TCP checksum field: over the
/// TCP length without TSO, over length zero with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TxOffload {
    /// Ethernet header, with any VLAN tag that is in the packet.
    pub l2_len: u8,
    pub l3_len: u16,
    /// TCP header with options.
    pub l4_len: u8,
    /// True for IPv6, false for IPv4.
    pub ipv6: bool,
    /// Fill in the IPv4 header checksum.
    pub ip_checksum: bool,
    /// Fill in the TCP checksum.
    pub tcp_checksum: bool,
    /// TCP payload bytes of each segment to cut; 0: no TSO.
    pub tso_segsz: u16,
}

impl Mbuf {
    /// The IPv4 header checksum of a received packet.
    #[inline]
    pub fn rx_ip_checksum(&self) -> ChecksumStatus {
        match self.raw().ol_flags & sys::RTE_MBUF_F_RX_IP_CKSUM_MASK {
            sys::RTE_MBUF_F_RX_IP_CKSUM_GOOD => ChecksumStatus::Good,
            sys::RTE_MBUF_F_RX_IP_CKSUM_BAD => ChecksumStatus::Bad,
            sys::RTE_MBUF_F_RX_IP_CKSUM_NONE => ChecksumStatus::NotNeeded,
            _ => ChecksumStatus::Unknown,
        }
    }

    /// The TCP or UDP checksum of a received packet.
    #[inline]
    pub fn rx_l4_checksum(&self) -> ChecksumStatus {
        match self.raw().ol_flags & sys::RTE_MBUF_F_RX_L4_CKSUM_MASK {
            sys::RTE_MBUF_F_RX_L4_CKSUM_GOOD => ChecksumStatus::Good,
            sys::RTE_MBUF_F_RX_L4_CKSUM_BAD => ChecksumStatus::Bad,
            sys::RTE_MBUF_F_RX_L4_CKSUM_NONE => ChecksumStatus::NotNeeded,
            _ => ChecksumStatus::Unknown,
        }
    }

    /// The RSS hash, when the NIC computed one.
    #[inline]
    pub fn rss_hash(&self) -> Option<u32> {
        let m = self.raw();
        (m.ol_flags & sys::RTE_MBUF_F_RX_RSS_HASH != 0).then_some(m.rss)
    }

    /// The VLAN tag control information that the NIC took out of the packet.
    #[inline]
    pub fn rx_vlan(&self) -> Option<u16> {
        let m = self.raw();
        (m.ol_flags & sys::RTE_MBUF_F_RX_VLAN_STRIPPED != 0).then_some(m.vlan_tci)
    }

    /// Whether the NIC merged several TCP segments into this one.
    #[inline]
    pub fn rx_lro(&self) -> bool {
        self.raw().ol_flags & sys::RTE_MBUF_F_RX_LRO != 0
    }

    /// The port that received the packet.
    #[inline]
    pub fn rx_port(&self) -> u16 {
        self.raw().port
    }

    /// Forgets what the sender asked of its NIC or a NIC said on receipt: a
    /// packet that a ring pair carries arrives with the sender's flags.
    #[inline]
    pub fn clear_offload(&mut self) {
        let m = self.raw_mut();
        m.ol_flags &= sys::RTE_MBUF_F_EXTERNAL | sys::RTE_MBUF_F_INDIRECT;
        m.tx_offload = 0;
    }

    /// Asks the NIC for checksums and segmentation. The port must have granted
    /// them, see [`crate::PortCaps`].
    #[inline]
    pub fn set_tx_offload(&mut self, o: TxOffload) {
        let mut flags = if o.ipv6 {
            sys::RTE_MBUF_F_TX_IPV6
        } else {
            sys::RTE_MBUF_F_TX_IPV4
        };
        if o.ip_checksum && !o.ipv6 {
            flags |= sys::RTE_MBUF_F_TX_IP_CKSUM;
        }
        if o.tcp_checksum || o.tso_segsz != 0 {
            flags |= sys::RTE_MBUF_F_TX_TCP_CKSUM;
        }
        if o.tso_segsz != 0 {
            flags |= sys::RTE_MBUF_F_TX_TCP_SEG;
        }
        let mask = |bits: u64| (1u64 << bits) - 1;
        let m = self.raw_mut();
        m.ol_flags |= flags;
        m.tx_offload = (u64::from(o.l2_len) & mask(sys::RTE_MBUF_L2_LEN_BITS))
            | (u64::from(o.l3_len) & mask(sys::RTE_MBUF_L3_LEN_BITS)) << sys::RTE_MBUF_L3_LEN_OFS
            | (u64::from(o.l4_len) & mask(sys::RTE_MBUF_L4_LEN_BITS)) << sys::RTE_MBUF_L4_LEN_OFS
            | u64::from(o.tso_segsz) << sys::RTE_MBUF_TSO_SEGSZ_OFS;
    }

    /// What [`Self::set_tx_offload`] asked for; `None` when nothing was.
    pub fn tx_offload(&self) -> Option<TxOffload> {
        let m = self.raw();
        if m.ol_flags & (sys::RTE_MBUF_F_TX_IPV4 | sys::RTE_MBUF_F_TX_IPV6) == 0 {
            return None;
        }
        let field = |ofs: u64, bits: u64| m.tx_offload >> ofs & ((1 << bits) - 1);
        let tso = m.ol_flags & sys::RTE_MBUF_F_TX_TCP_SEG != 0;
        Some(TxOffload {
            l2_len: field(0, sys::RTE_MBUF_L2_LEN_BITS) as u8,
            l3_len: field(sys::RTE_MBUF_L3_LEN_OFS, sys::RTE_MBUF_L3_LEN_BITS) as u16,
            l4_len: field(sys::RTE_MBUF_L4_LEN_OFS, sys::RTE_MBUF_L4_LEN_BITS) as u8,
            ipv6: m.ol_flags & sys::RTE_MBUF_F_TX_IPV6 != 0,
            ip_checksum: m.ol_flags & sys::RTE_MBUF_F_TX_IP_CKSUM != 0,
            tcp_checksum: m.ol_flags & sys::RTE_MBUF_F_TX_L4_MASK == sys::RTE_MBUF_F_TX_TCP_CKSUM,
            tso_segsz: if tso {
                field(sys::RTE_MBUF_TSO_SEGSZ_OFS, sys::RTE_MBUF_TSO_SEGSZ_BITS) as u16
            } else {
                0
            },
        })
    }

    /// Asks the NIC to insert a VLAN tag.
    #[inline]
    pub fn set_tx_vlan(&mut self, tci: u16) {
        let m = self.raw_mut();
        m.ol_flags |= sys::RTE_MBUF_F_TX_VLAN;
        m.vlan_tci = tci;
    }
}
