//! Configuration requested of a port, and the capabilities that it grants.

use crate::{Error, Mempool, Result};
use dpdk_sys as sys;
use std::ops::RangeInclusive;

/// Bytes of a frame around its IP packet: Ethernet header, VLAN tag and FCS.
const FRAME_OVERHEAD: u32 = 22;

/// Work that a NIC may do. Each requested offload is granted if the port supports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offloads {
    /// Verify IPv4 and TCP checksums of received packets.
    pub rx_checksum: bool,
    /// Fill in IPv4 and TCP checksums.
    pub tx_checksum: bool,
    /// Granted together with `tx_checksum`: fill in the IPv4 header checksum of each packet that
    /// requests it. It need not be requested.
    pub tx_ip_checksum: bool,
    /// Segment large TCP packets (TSO).
    pub tso: bool,
    /// Merge received TCP segments.
    pub lro: bool,
    /// Receive frames longer than a buffer into chains.
    pub scatter: bool,
    /// Send chains.
    pub multi_segs: bool,
    /// Strip the VLAN tag from received packets.
    pub vlan_strip: bool,
    /// Accept packets of the VLANs given to [`crate::Port::accept_vlan`]: some devices drop tagged
    /// packets of all other VLANs, and of every VLAN until one is given.
    pub vlan_filter: bool,
    /// Insert a VLAN tag into packets that request one.
    pub vlan_insert: bool,
    /// Spread flows over the queues by hash, and deliver the hash.
    pub rss: bool,
    /// Wake a sleeping worker when packets arrive.
    pub rx_interrupt: bool,
}

impl Offloads {
    /// No offload: software does all the work.
    pub const NONE: Self = Self {
        rx_checksum: false,
        tx_checksum: false,
        tx_ip_checksum: false,
        tso: false,
        lro: false,
        scatter: false,
        multi_segs: false,
        vlan_strip: false,
        vlan_filter: false,
        vlan_insert: false,
        rss: false,
        rx_interrupt: false,
    };

    /// Names of the offloads that are set.
    pub fn names(&self) -> Vec<&'static str> {
        let all = [
            ("rx_checksum", self.rx_checksum),
            ("tx_checksum", self.tx_checksum),
            ("tx_ip_checksum", self.tx_ip_checksum),
            ("tso", self.tso),
            ("lro", self.lro),
            ("scatter", self.scatter),
            ("multi_segs", self.multi_segs),
            ("vlan_strip", self.vlan_strip),
            ("vlan_filter", self.vlan_filter),
            ("vlan_insert", self.vlan_insert),
            ("rss", self.rss),
            ("rx_interrupt", self.rx_interrupt),
        ];
        all.into_iter()
            .filter(|(_, set)| *set)
            .map(|(name, _)| name)
            .collect()
    }

    /// Every offload except LRO, which merges segments before TCP sees them, and VLAN handling,
    /// which only a device with a VLAN needs.
    pub const USUAL: Self = Self {
        rx_checksum: true,
        tx_checksum: true,
        tso: true,
        scatter: true,
        multi_segs: true,
        rss: true,
        rx_interrupt: true,
        ..Self::NONE
    };
}

impl Default for Offloads {
    fn default() -> Self {
        Self::USUAL
    }
}

/// Requested configuration of a port.
#[derive(Debug, Clone)]
pub struct PortConfig {
    /// Receive queues.
    pub rx_queues: u16,
    /// Transmit queues.
    pub tx_queues: u16,
    /// Descriptors of each receive queue; adjusted to the port's limits.
    pub rx_desc: u16,
    /// Descriptors of each transmit queue; adjusted to the port's limits.
    pub tx_desc: u16,
    /// Bytes of a frame's IP packet.
    pub mtu: u16,
    /// Toeplitz key for RSS, repeated or cut to the port's key length; `None` keeps the driver's
    /// key.
    pub rss_key: Option<[u8; 40]>,
    /// Free descriptors at which the port refills a receive ring; 0: the driver's default.
    pub rx_free_threshold: u16,
    /// Free descriptors below which the port frees transmitted packets; 0: the driver's default.
    pub tx_free_threshold: u16,
    /// Requested offloads.
    pub offloads: Offloads,
}

impl Default for PortConfig {
    fn default() -> Self {
        Self {
            rx_queues: 1,
            tx_queues: 1,
            rx_desc: 1024,
            tx_desc: 1024,
            mtu: 1500,
            rss_key: None,
            rx_free_threshold: 0,
            tx_free_threshold: 0,
            offloads: Offloads::USUAL,
        }
    }
}

/// Capabilities that a port granted. Software does the work of offloads that are false.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortCaps {
    /// `rx_interrupt` is the requested value until `start` has determined it.
    pub offloads: Offloads,
    /// Bytes of a frame's IP packet.
    pub mtu: u16,
    /// The largest MTU that the port can be configured with.
    pub max_mtu: u16,
    /// Descriptors of each receive queue.
    pub rx_desc: u16,
    /// Descriptors of each transmit queue.
    pub tx_desc: u16,
    /// Maximum segments of a packet that the port cuts (TSO); `u16::MAX` if it reports no limit.
    pub tx_seg_max: u16,
    /// Maximum segments of any other packet; `u16::MAX` if it reports no limit.
    pub tx_mtu_seg_max: u16,
    /// Entries of the RSS indirection table; 0 without RSS.
    pub reta_size: u16,
    /// True if the requested RSS key was read back from the port.
    pub rss_key_set: bool,
}

/// A port's driver and capabilities.
#[derive(Debug, Clone)]
pub struct PortInfo {
    /// DPDK's name of the driver.
    pub driver: String,
    /// The smallest MTU that the port accepts.
    pub min_mtu: u32,
    /// The largest MTU that the port accepts.
    pub max_mtu: u32,
    /// Maximum number of receive queues.
    pub max_rx_queues: u16,
    /// Maximum number of transmit queues.
    pub max_tx_queues: u16,
    /// Entries of the RSS indirection table; 0 without RSS.
    pub reta_size: u16,
    /// Maximum segments of a packet that the port cuts (TSO).
    pub tx_seg_max: u16,
    /// Maximum segments of any other packet.
    pub tx_mtu_seg_max: u16,
    pub(crate) rx_capa: u64,
    pub(crate) tx_capa: u64,
    pub(crate) rss_types: u64,
    pub(crate) hash_key_size: u16,
    pub(crate) max_lro_pkt_size: u32,
    pub(crate) min_rx_bufsize: u32,
}

impl PortInfo {
    /// Describes a port without offloads, whose packets are single buffers: one that is not DPDK's, with
    /// `queues` queues in each direction.
    pub fn without_offloads(driver: &str, mtu: RangeInclusive<u32>, queues: u16) -> PortInfo {
        PortInfo {
            driver: driver.to_owned(),
            min_mtu: *mtu.start(),
            max_mtu: *mtu.end(),
            max_rx_queues: queues,
            max_tx_queues: queues,
            reta_size: 0,
            tx_seg_max: 1,
            tx_mtu_seg_max: 1,
            rx_capa: 0,
            tx_capa: 0,
            rss_types: 0,
            hash_key_size: 0,
            max_lro_pkt_size: 0,
            min_rx_bufsize: 0,
        }
    }

    /// Checks a configuration of the port called `port`, and returns the offloads that the port offers
    /// of those requested.
    ///
    /// # Errors
    /// The number of queues, the MTU or the buffers of `pools` do not suit the port.
    pub fn negotiate(
        &self,
        port: &str,
        config: &PortConfig,
        pools: &[Mempool],
    ) -> Result<Offloads> {
        Ok(self.check_config(port, config, pools)?.granted)
    }

    /// As [`Self::negotiate`], with DPDK's flags of the granted offloads.
    pub(crate) fn check_config(
        &self,
        port: &str,
        config: &PortConfig,
        pools: &[Mempool],
    ) -> Result<NegotiatedOffloads> {
        let invalid = |what: &'static str, value: u32, why: String| Error::Invalid {
            what,
            value: value.to_string(),
            why: format!("port `{port}` {why}"),
        };
        for (what, asked, max) in [
            (
                "number of receive queues",
                config.rx_queues,
                self.max_rx_queues,
            ),
            (
                "number of transmit queues",
                config.tx_queues,
                self.max_tx_queues,
            ),
        ] {
            if asked == 0 || asked > max {
                return Err(invalid(what, asked.into(), format!("has 1 to {max}")));
            }
        }
        let mtu = u32::from(config.mtu);
        if mtu < self.min_mtu || mtu > self.max_mtu {
            let why = format!(
                "takes {} to {}: set mtu to one of these",
                self.min_mtu, self.max_mtu
            );
            return Err(invalid("MTU", mtu, why));
        }
        if pools.is_empty() {
            return Err(invalid("number of pools", 0, "needs one".into()));
        }
        let negotiated = negotiate_offloads(config, self);
        let frame = mtu + FRAME_OVERHEAD;
        let least = self
            .min_rx_bufsize
            .max(if negotiated.granted.scatter { 0 } else { frame });
        let smallest = pools.iter().map(Mempool::data_room).min().unwrap_or(0);
        if u32::from(smallest) < least {
            let why = format!("needs buffers with a data room of {least} at MTU {mtu}");
            return Err(invalid("data room", smallest.into(), why));
        }
        Ok(negotiated)
    }
}

/// Counters since the port started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PortCounters {
    /// Packets received.
    pub rx_packets: u64,
    /// Packets sent.
    pub tx_packets: u64,
    /// Bytes of received packets.
    pub rx_bytes: u64,
    /// Bytes of sent packets.
    pub tx_bytes: u64,
    /// Packets lost because the receive ring was full.
    pub rx_missed: u64,
    /// Packets that arrived damaged.
    pub rx_errors: u64,
    /// Packets that could not be sent.
    pub tx_errors: u64,
    /// Receptions that failed because the pool was empty.
    pub rx_no_buffer: u64,
}

/// The state of a port's link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkStatus {
    /// True if the link carries frames.
    pub up: bool,
    /// Mb/s; 0 if the port does not know.
    pub mbps: u32,
}

/// State of one offload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OffloadState {
    /// Its name.
    pub name: &'static str,
    /// It was requested.
    pub asked: bool,
    /// The driver reports support for it; `None`: only an attempt can tell.
    pub offered: Option<bool>,
    /// It is in use.
    pub enabled: bool,
}

/// Lists each offload with its request, the driver's offer, and its use.
pub fn list_offloads(asked: &Offloads, info: &PortInfo, granted: &Offloads) -> Vec<OffloadState> {
    let offers_rx = |flags: u64| Some(info.rx_capa & flags == flags);
    let offers_tx = |flags: u64| Some(info.tx_capa & flags == flags);
    let row = |name, asked, offered, enabled| OffloadState {
        name,
        asked,
        offered,
        enabled,
    };
    vec![
        row(
            "rx_checksum",
            asked.rx_checksum,
            offers_rx(sys::RTE_ETH_RX_OFFLOAD_TCP_CKSUM),
            granted.rx_checksum,
        ),
        row(
            "tx_checksum",
            asked.tx_checksum,
            offers_tx(sys::RTE_ETH_TX_OFFLOAD_TCP_CKSUM),
            granted.tx_checksum,
        ),
        row(
            "tx_ip_checksum",
            asked.tx_checksum,
            offers_tx(sys::RTE_ETH_TX_OFFLOAD_IPV4_CKSUM),
            granted.tx_ip_checksum,
        ),
        row(
            "tso",
            asked.tso,
            offers_tx(sys::RTE_ETH_TX_OFFLOAD_TCP_TSO),
            granted.tso,
        ),
        row(
            "lro",
            asked.lro,
            offers_rx(sys::RTE_ETH_RX_OFFLOAD_TCP_LRO),
            granted.lro,
        ),
        row(
            "scatter",
            asked.scatter,
            offers_rx(sys::RTE_ETH_RX_OFFLOAD_SCATTER),
            granted.scatter,
        ),
        row(
            "vlan_filter",
            asked.vlan_filter,
            offers_rx(sys::RTE_ETH_RX_OFFLOAD_VLAN_FILTER),
            granted.vlan_filter,
        ),
        row(
            "multi_segs",
            asked.multi_segs,
            offers_tx(sys::RTE_ETH_TX_OFFLOAD_MULTI_SEGS),
            granted.multi_segs,
        ),
        row(
            "rss",
            asked.rss,
            Some(info.rss_types & RSS_TYPES != 0),
            granted.rss,
        ),
        row(
            "rx_interrupt",
            asked.rx_interrupt,
            None,
            granted.rx_interrupt,
        ),
    ]
}

const RX_CHECKSUM: u64 = sys::RTE_ETH_RX_OFFLOAD_IPV4_CKSUM | sys::RTE_ETH_RX_OFFLOAD_TCP_CKSUM;
const RSS_TYPES: u64 = sys::RTE_ETH_RSS_IPV4
    | sys::RTE_ETH_RSS_IPV6
    | sys::RTE_ETH_RSS_NONFRAG_IPV4_TCP
    | sys::RTE_ETH_RSS_NONFRAG_IPV6_TCP;

/// The requested offloads that the port supports, and DPDK's flags for them.
pub(crate) struct NegotiatedOffloads {
    pub granted: Offloads,
    pub rx: u64,
    pub tx: u64,
    pub rss_types: u64,
}

fn negotiate_offloads(config: &PortConfig, info: &PortInfo) -> NegotiatedOffloads {
    let want = config.offloads;
    let (mut rx, mut tx) = (0, 0);
    let mut take_rx = |wanted: bool, flags: u64| {
        // The TCP checksum alone decides: some drivers compute no IPv4 checksum, and 20 bytes of
        // header cost software little.
        let has = wanted && info.rx_capa & flags == flags;
        rx |= if has { flags } else { 0 };
        has
    };
    let rx_checksum = take_rx(want.rx_checksum, RX_CHECKSUM)
        || take_rx(want.rx_checksum, sys::RTE_ETH_RX_OFFLOAD_TCP_CKSUM);
    let lro = take_rx(want.lro, sys::RTE_ETH_RX_OFFLOAD_TCP_LRO);
    let scatter = take_rx(want.scatter, sys::RTE_ETH_RX_OFFLOAD_SCATTER);
    let vlan_filter = take_rx(want.vlan_filter, sys::RTE_ETH_RX_OFFLOAD_VLAN_FILTER);
    let vlan_strip = take_rx(want.vlan_strip, sys::RTE_ETH_RX_OFFLOAD_VLAN_STRIP);

    let rss_types = info.rss_types & RSS_TYPES;
    let rss = want.rss && config.rx_queues > 1 && rss_types != 0;
    if rss {
        take_rx(true, sys::RTE_ETH_RX_OFFLOAD_RSS_HASH);
    }

    let mut take_tx = |wanted: bool, flags: u64| {
        let has = wanted && info.tx_capa & flags == flags;
        tx |= if has { flags } else { 0 };
        has
    };
    let multi_segs = take_tx(want.multi_segs, sys::RTE_ETH_TX_OFFLOAD_MULTI_SEGS);
    let tx_checksum = take_tx(want.tx_checksum, sys::RTE_ETH_TX_OFFLOAD_TCP_CKSUM);
    let tx_ip_checksum = tx_checksum && take_tx(true, sys::RTE_ETH_TX_OFFLOAD_IPV4_CKSUM);
    // A TSO packet is a chain, and its segments need checksums.
    let tso = tx_checksum && multi_segs && take_tx(want.tso, sys::RTE_ETH_TX_OFFLOAD_TCP_TSO);
    let vlan_insert = take_tx(want.vlan_insert, sys::RTE_ETH_TX_OFFLOAD_VLAN_INSERT);

    NegotiatedOffloads {
        granted: Offloads {
            rx_checksum,
            tx_checksum,
            tx_ip_checksum,
            tso,
            lro,
            scatter,
            multi_segs,
            vlan_strip,
            vlan_filter,
            vlan_insert,
            rss,
            rx_interrupt: want.rx_interrupt,
        },
        rx,
        tx,
        rss_types: if rss { rss_types } else { 0 },
    }
}
