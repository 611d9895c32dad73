//! Devices: the configuration's links become DPDK ports, with one worker port for each worker.

use std::sync::Arc;
use std::time::Duration;

use dpdk::{Eal, Mempool, Offloads, Port, PortConfig, RxQueue, TxQueue};
use siw_iwarp::ddp::Msn;
use siw_iwarp::mpa::{CrcPolicy as MpaCrc, MarkerPolicy, MpaConfig, RtrKinds};
use siw_iwarp::{OutOfOrder, TerminateOrder};
use siw_tcp::{
    Home, IpCidr, ReassemblyConfig, Route, SYMMETRIC_RSS_KEY, StackConfig, Steering, Tso,
};

use crate::config::{
    ChecksumPolicy, CrcPolicy, DeviceConfig, Link, MacAddress, MarkersName, OutOfOrderName,
    RtrName, TerminateName, TsoPolicy,
};
use crate::control::DeviceView;
use crate::worker::WorkerPortConfig;

/// Descriptors of a ring pair: enough for a few bursts, few enough to stay in the cache.
const PAIR_RING: u32 = 1024;

/// Longest frame beside its IP packet: Ethernet, VLAN tag, checksum.
const FRAME_OVERHEAD: u16 = 32;
/// What the kernel puts in front of each frame in a ring (`TPACKET2_HDRLEN`), without the
/// address.
const RING_HEADER: u16 = 32;
const TAP_DRIVER: &str = "net_tap";
/// Drivers whose peer, on the same machine, hands over what it has not cut.
const VIRTIO_DRIVERS: [&str; 2] = ["net_virtio_user", "net_vhost"];

/// Wire segments of a super-segment: 64 KB of plain Ethernet, and what a tap cuts at most.
const TSO_SEGMENTS: u16 = 44;
const TSO_BYTES: u32 = 64_000;

/// Receive windows where the configuration names none.
const WINDOW: u32 = 1 << 20;
const PAIR_WINDOW: u32 = 256 << 10;
/// Segments that a connection of a pair may send at once after silence.
const PAIR_INITIAL_WINDOW: u32 = 256;

/// A started port and what its ports need to know.
pub struct Device {
    pub config: DeviceConfig,
    pub port: Port,
    pub mac: [u8; 6],
    pub pair: bool,
    caps: dpdk::PortCaps,
    driver: String,
    queues: Vec<Option<(RxQueue, TxQueue)>>,
    /// Who of the device's workers owns a connection.
    steering: Arc<Steering>,
}

/// Opens and starts every port.
///
/// # Errors
/// A text that names the device and what it lacks.
pub fn open(
    eal: &Eal,
    configs: &[DeviceConfig],
    pool: &Mempool,
    workers: usize,
) -> Result<Vec<Device>, String> {
    let mut pairs: Vec<(String, Port)> = Vec::new();
    let mut devices = Vec::new();
    for config in configs {
        let name = &config.name.get_ref().0;
        let fail = |e: dpdk::Error| format!("device {name}: {e}");
        // Queue `i` of one end of a pair is joined to queue `i` of the other.
        let ends = |o: &&DeviceConfig| {
            o.name == config.name || (o.pair.is_some() && o.pair == config.pair)
        };
        let wanted = configs
            .iter()
            .filter(ends)
            .filter_map(|o| o.queues.as_ref())
            .map(|q| usize::from(*q.get_ref()))
            .fold(workers, usize::min) as u16;
        let (port, pair) = match config.link() {
            Link::Pair(pair) => match pairs.iter().position(|(n, _)| *n == pair) {
                Some(at) => (pairs.swap_remove(at).1, true),
                None => {
                    // Device names of rings are global in DPDK and short.
                    let label = format!("siw_{}", pairs.len() + devices.len());
                    let (a, b) = Port::create_ring_pair(eal, &label, workers as u16, PAIR_RING)
                        .map_err(fail)?;
                    pairs.push((pair, b));
                    (a, true)
                }
            },
            Link::Vdev(args) => {
                let args = with_ring_frames(config, args);
                (Port::attach_vdev(eal, &args).map_err(fail)?, false)
            }
            Link::Pci(addr) => (Port::attach_pci(eal, &addr).map_err(fail)?, false),
        };
        devices.push(start(config, port, pair, pool, wanted)?);
    }
    Ok(devices)
}

/// Bytes that a packet buffer must hold for the device.
pub fn buffer_room(config: &DeviceConfig) -> u16 {
    let ring = match config.link() {
        Link::Vdev(args) => ring_frame(config, &args).map_or(0, |f| f - RING_HEADER),
        _ => 0,
    };
    (config.mtu.get_ref() + FRAME_OVERHEAD).max(2048).max(ring)
}

/// What a ring of AF_PACKET sockets must be told to take frames of this MTU: its own default
/// drops what is longer than 1982 bytes, without a word. `None`: the default, or the user's word.
fn ring_frame(config: &DeviceConfig, args: &str) -> Option<u16> {
    let mtu = *config.mtu.get_ref();
    let own = args.contains("framesz=") || args.contains("blocksz=");
    (args.starts_with("net_af_packet") && mtu > 1900 && !own)
        .then(|| (mtu + FRAME_OVERHEAD + RING_HEADER * 2).next_multiple_of(1024))
}

fn with_ring_frames(config: &DeviceConfig, args: String) -> String {
    match ring_frame(config, &args) {
        // Blocks are whole pages, and four of any such frame fill them without a gap.
        Some(f) => format!("{args},framesz={f},blocksz={}", u32::from(f) * 4),
        None => args,
    }
}

fn start(
    config: &DeviceConfig,
    mut port: Port,
    pair: bool,
    pool: &Mempool,
    wanted: u16,
) -> Result<Device, String> {
    let name = &config.name.get_ref().0;
    let fail = |e: dpdk::Error| format!("device {name}: {e}");
    let info = port.info().map_err(fail)?;
    let mtu = *config.mtu.get_ref();
    let queues = wanted
        .min(info.max_rx_queues)
        .min(info.max_tx_queues)
        .max(1);
    let software = config.checksum == ChecksumPolicy::Software;
    let tso =
        wants_tso(config, &info, software, pair).map_err(|e| format!("device {name}: {e}"))?;
    let tap_room = if tso && info.driver == TAP_DRIVER {
        TAP_TSO_ROOM
    } else {
        0
    };
    let caps = port
        .configure(
            &PortConfig {
                rx_queues: queues,
                tx_queues: queues,
                mtu: mtu + tap_room + if config.vlan.is_some() && !pair { 4 } else { 0 },
                offloads: Offloads {
                    tx_checksum: !software,
                    rx_checksum: !software,
                    tso,
                    lro: VIRTIO_DRIVERS.contains(&&*info.driver)
                        && *config.tso.get_ref() != TsoPolicy::Off,
                    rx_interrupt: !pair,
                    ..Offloads::USUAL
                },
                rss_key: Some(SYMMETRIC_RSS_KEY),
                ..PortConfig::default()
            },
            std::slice::from_ref(pool),
        )
        .map_err(fail)?;
    if *config.tso.get_ref() == TsoPolicy::On && !caps.offloads.tso {
        return Err(format!(
            "device {name}: tso = \"on\", but the {} link cannot cut TCP segments; use \"auto\"",
            info.driver
        ));
    }
    tracing::debug!(device = %name, driver = %info.driver, queues, ?caps, "port configured");
    // DPDK gives a tap one address for both ends of the wire, but Linux must keep its own:
    // neither takes frames from its own address. A tap passes all that is sent to it.
    let shared_mac = info.driver == TAP_DRIVER;
    let own_mac = match port.mac() {
        Ok(m) if !shared_mac => m,
        _ => [0; 6],
    };
    let mac = match config.mac {
        Some(MacAddress(m)) => {
            if !pair && !shared_mac && m != own_mac && port.set_mac(m).is_err() {
                // The link delivers only its own address then, unless it is told otherwise.
                if let Err(e) = port.set_promiscuous(true) {
                    tracing::warn!(device = %name, "neither the address nor promiscuous mode could be set: {e}");
                }
            }
            m
        }
        None if pair || own_mac == [0; 6] => drawn_mac(name, config),
        None => own_mac,
    };
    let taken = port.start().map_err(fail)?;
    let caps = port.caps().unwrap_or(caps);
    if !pair {
        // NDP needs multicast; ports that always deliver it refuse the call.
        let _ = port.set_allmulticast(true);
    }
    let steering = Steering::new(usize::from(wanted), caps.reta_size);
    if caps.reta_size > 0 && queues == wanted {
        // Without it the port's own table decides, and workers sort what comes to the wrong one.
        if let Err(e) = port.set_rss_table(&steering.table()) {
            tracing::warn!(device = %name, "workers will forward frames to each other: {e}");
        }
    }
    let queues = taken.into_iter().map(|(rx, tx)| Some((rx?, tx?))).collect();
    Ok(Device {
        config: config.clone(),
        port,
        mac,
        pair,
        caps,
        driver: info.driver,
        queues,
        steering: Arc::new(steering),
    })
}

/// What a tap counts to the MTU when it cuts: Ethernet header and VLAN tag.
const TAP_TSO_ROOM: u16 = 18;
/// The longest MTU of a DPDK tap.
const TAP_MTU: u16 = 1500;

/// Whether the port is asked for TSO. Taps cut in software, IPv4 only, and only what is shorter
/// than their MTU with the Ethernet header.
fn wants_tso(
    config: &DeviceConfig,
    info: &dpdk::PortInfo,
    software: bool,
    pair: bool,
) -> Result<bool, String> {
    let policy = *config.tso.get_ref();
    if software || pair || policy == TsoPolicy::Off {
        return Ok(false);
    }
    if info.driver != TAP_DRIVER {
        return Ok(true);
    }
    let most = TAP_MTU - TAP_TSO_ROOM - if config.vlan.is_some() { 4 } else { 0 };
    let six = config.addresses.get_ref().iter().any(|a| a.addr.is_ipv6());
    match policy {
        TsoPolicy::On if six => Err(
            "tso = \"on\": a tap cuts IPv4 only; leave the IPv6 addresses out, or use \"auto\""
                .into(),
        ),
        TsoPolicy::On if *config.mtu.get_ref() > most => Err(format!(
            "tso = \"on\": a tap cuts at an mtu of at most {most}; use that, or \"auto\""
        )),
        _ => Ok(!six && *config.mtu.get_ref() <= most),
    }
}

/// A locally administered address that stays the same for the same device.
fn drawn_mac(name: &str, config: &DeviceConfig) -> [u8; 6] {
    let mut crc = crc32c::crc32c(name.as_bytes());
    for a in config.addresses.get_ref() {
        crc = crc32c::crc32c_append(crc, a.addr.to_string().as_bytes());
    }
    let [a, b, c, d] = crc.to_be_bytes();
    [0x02, 0x51, a, b, c, d]
}

impl Device {
    /// What clients see.
    pub fn view(&self) -> DeviceView {
        let link = self.port.link_status().ok();
        let addresses = self.config.addresses.get_ref().clone();
        DeviceView {
            name: self.config.name.get_ref().0.clone(),
            driver: self.driver.clone(),
            mac: self.mac,
            routes: self.config.routes.iter().map(|r| r.to).collect(),
            gateway: self.config.gateway.is_some(),
            gateway6: self.config.gateway6.is_some(),
            addresses,
            mtu: *self.config.mtu.get_ref(),
            link_mbps: link.as_ref().map_or(0, |l| l.mbps),
            link_up: self.pair || link.is_none_or(|l| l.up),
            crc: self.config.mpa.crc != CrcPolicy::Off,
            crc_required: self.config.mpa.crc == CrcPolicy::Required,
            mpa_rev: *self.config.mpa.revision.get_ref(),
            max_ird: *self.config.mpa.ird.get_ref(),
            max_ord: *self.config.mpa.ord.get_ref(),
            workers: (0..self.steering.workers()).collect(),
            steering: self.steering.clone(),
        }
    }

    /// The port as one worker has it, if it serves the device. Workers beyond the port's queues receive
    /// and send through those that have one.
    pub fn worker_port(
        &mut self,
        device: usize,
        worker: usize,
        keys: &Keys,
    ) -> Option<WorkerPortConfig> {
        let workers = self.steering.workers();
        if worker >= workers {
            return None;
        }
        let home = (workers > 1).then(|| Home {
            steering: self.steering.clone(),
            worker,
        });
        let has = self.queues.len();
        let queues = match self.queues.get_mut(worker) {
            Some(own) => Ok(own.take()?),
            None => Err(worker % has),
        };
        let offloads = self.caps.offloads;
        let software = self.config.checksum == ChecksumPolicy::Software;
        let offload = offloads.tx_checksum && !software && !self.pair;
        let no_checksum = self.pair && !software;
        let tso = (offload && offloads.tso).then(|| self.super_segments());
        Some(WorkerPortConfig {
            device,
            queues,
            // Each ring of a pair joins the same worker's ends, and flows are symmetric.
            sorts: !self.pair,
            stack: StackConfig {
                gratuitous_arp: !self.pair && worker == 0,
                home,
                tso,
                ..self.stack(keys, !(offload || no_checksum))
            },
            mpa: self.mpa(),
            accept_timeout: Duration::from_millis(self.config.mpa.accept_timeout_ms.into()),
            pair: self.pair,
            trusted: no_checksum,
            multi_segs: offloads.multi_segs || self.pair,
            // virtio_user would have to tell its far end about the memory, which it cannot.
            external: self.driver != "net_virtio_user",
            tx_offload: offload,
            tx_ip_checksum: offloads.tx_ip_checksum,
            // A tap adds each buffer's sum as if it began at an even byte.
            even_buffers: offload && self.driver == TAP_DRIVER,
            chain_max: (self.caps.tx_mtu_seg_max, self.caps.tx_seg_max),
            rx_checksum: offloads.rx_checksum && !software && !self.pair,
            rx_interrupt: offloads.rx_interrupt && !self.pair,
            tap: None,
        })
    }

    /// What the port takes at once: a header, and two buffers for each FPDU.
    fn super_segments(&self) -> Tso {
        let by_buffers = self.caps.tx_seg_max.saturating_sub(1) / 2;
        Tso {
            max_segments: by_buffers.clamp(2, TSO_SEGMENTS),
            max_bytes: TSO_BYTES,
        }
    }

    fn out_of_order(&self) -> OutOfOrder {
        match self.config.mpa.out_of_order {
            OutOfOrderName::Off => OutOfOrder::Off,
            OutOfOrderName::Markers => OutOfOrder::Markers,
            OutOfOrderName::Aligned => OutOfOrder::Aligned,
        }
    }

    fn mpa(&self) -> MpaConfig {
        let m = &self.config.mpa;
        MpaConfig {
            rev: *m.revision.get_ref(),
            crc: match m.crc {
                CrcPolicy::Off => MpaCrc::IfAsked,
                CrcPolicy::On => MpaCrc::Asked,
                CrcPolicy::Required => MpaCrc::Required,
            },
            markers: match m.markers {
                MarkersName::Never => MarkerPolicy::Never,
                MarkersName::Accept => MarkerPolicy::Accept,
                MarkersName::Request => MarkerPolicy::Request,
            },
            peer_to_peer: !m.rtr.is_empty(),
            rtr: RtrKinds {
                send: m.rtr.contains(&RtrName::Send),
                write: m.rtr.contains(&RtrName::Write),
                read: m.rtr.contains(&RtrName::Read),
            },
            max_ird: *m.ird.get_ref(),
            max_ord: *m.ord.get_ref(),
            max_private_data: *m.private_data.get_ref(),
            fallback_to_rev1: m.fallback,
            terminate: match m.terminate {
                TerminateName::Rfc => TerminateOrder::Rfc,
                TerminateName::Siw => TerminateOrder::Siw,
            },
            out_of_order: self.out_of_order(),
            first_msn: Msn(m.first_msn),
            request_timeout_ms: m.request_timeout_ms,
            reply_timeout_ms: m.reply_timeout_ms,
        }
    }

    fn stack(&self, keys: &Keys, tx_checksum: bool) -> StackConfig {
        let c = &self.config;
        let addrs = c
            .addresses
            .get_ref()
            .iter()
            .map(|a| IpCidr::new(a.addr, a.prefix))
            .collect();
        // Of the same buffers.
        let fragments = (keys.held / 16).min(512);
        let mut config = StackConfig {
            gateway_v4: c.gateway.as_ref().map(|g| *g.get_ref()),
            gateway_v6: c.gateway6.as_ref().map(|g| *g.get_ref()),
            mtu: *c.mtu.get_ref(),
            vlan: c.vlan.as_ref().map(|v| *v.get_ref()),
            // A listener may want it though its device does not.
            show_out_of_order: true,
            routes: c
                .routes
                .iter()
                .map(|r| Route {
                    to: IpCidr::new(r.to.addr, r.to.prefix),
                    via: *r.via.get_ref(),
                })
                .collect(),
            isn_key: keys.isn,
            hash_key: keys.hash,
            max_connections: keys.connections,
            max_held_buffers: keys.held - fragments,
            reassembly: ReassemblyConfig {
                max_fragments: fragments,
                ..ReassemblyConfig::default()
            },
            tx_checksum,
            neighbours: c.neighbours.table(),
            ..StackConfig::new(self.mac, addrs)
        };
        // A pair has no queue between its ends that a first burst could overrun.
        let (window, initial_window) = if self.pair {
            (PAIR_WINDOW, PAIR_INITIAL_WINDOW)
        } else {
            (WINDOW, config.initial_window)
        };
        c.tcp.apply(window, initial_window, &mut config);
        config
    }
}

/// Secrets and bounds that every stack shares.
pub struct Keys {
    pub isn: [u8; 16],
    pub hash: [u8; 16],
    pub connections: usize,
    /// Received buffers that one stack's connections may hold together.
    pub held: usize,
}

impl Keys {
    /// Fresh secrets. `buffers` of the pool are shared by `stacks`; a quarter is for the ports.
    pub fn draw(connections: usize, buffers: u32, stacks: usize) -> Keys {
        let random = || {
            let mut key = [0u8; 16];
            for half in key.chunks_exact_mut(8) {
                // Seeded by the operating system for each instance.
                let n = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0u8);
                half.copy_from_slice(&n.to_ne_bytes());
            }
            key
        };
        Keys {
            isn: random(),
            hash: random(),
            connections,
            held: (buffers as usize / 4 * 3 / stacks.max(1)).max(72),
        }
    }
}
