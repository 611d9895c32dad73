//! Devices: the configuration's links become DPDK ports, with one worker port for each worker.

use std::sync::Arc;
use std::time::Duration;

use dpdk::{DriverTraits, Eal, Mempool, Offloads, Port, PortConfig, RxQueue, TxQueue};
use siw_iwarp::ddp::Msn;
use siw_iwarp::mpa::{MarkerPolicy, MpaConfig, MpaCrcPolicy, RtrKinds};
use siw_iwarp::{OutOfOrderPolicy, TerminateBitOrder};
use siw_tcp::{
    IpCidr, ReassemblyConfig, Route, SYMMETRIC_RSS_KEY, StackConfig, Steering, TsoLimits,
    WorkerSteering,
};

use crate::config::{
    ChecksumPolicy, CrcPolicy, DeviceConfig, Link, MacAddress, MarkersName, OutOfOrderName,
    RtrName, TerminateName, TsoPolicy,
};
use crate::control::DeviceView;
use crate::link_traits::LinkTraits;
use crate::worker::WorkerPortConfig;

/// Descriptors of a ring pair: enough for a few bursts, few enough to stay in the cache.
const PAIR_RING: u32 = 1024;

/// Longest frame beside its IP packet: Ethernet, VLAN tag, checksum.
const FRAME_OVERHEAD: u16 = 32;
/// Bytes of an 802.1Q tag.
const VLAN_TAG: u16 = 4;

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
    pub link: LinkTraits,
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
        let port = match config.link() {
            Link::Pair(pair) => match pairs.iter().position(|(n, _)| *n == pair) {
                Some(at) => pairs.swap_remove(at).1,
                None => {
                    // Device names of rings are global in DPDK and short.
                    let label = format!("siw_{}", pairs.len() + devices.len());
                    let (a, b) = Port::create_ring_pair(eal, &label, workers as u16, PAIR_RING)
                        .map_err(fail)?;
                    pairs.push((pair, b));
                    a
                }
            },
            Link::Vdev(devargs) => {
                let devargs = match packet_ring_frame(config, &devargs) {
                    Some(frame) => DriverTraits::devargs_with_ring(&devargs, frame),
                    None => devargs,
                };
                Port::attach_vdev(eal, &devargs).map_err(fail)?
            }
            Link::Pci(address) => Port::attach_pci(eal, &address).map_err(fail)?,
        };
        devices.push(start(config, port, pool, wanted)?);
    }
    Ok(devices)
}

/// Bytes that a packet buffer must hold for the device.
pub fn buffer_room(config: &DeviceConfig) -> u16 {
    let ring = match config.link() {
        Link::Vdev(devargs) => {
            packet_ring_frame(config, &devargs).map_or(0, DriverTraits::packet_ring_room)
        }
        _ => 0,
    };
    (config.mtu.get_ref() + FRAME_OVERHEAD).max(2048).max(ring)
}

/// See [`DriverTraits::packet_ring_frame`].
fn packet_ring_frame(config: &DeviceConfig, devargs: &str) -> Option<u16> {
    let traits = DriverTraits::of(devargs);
    traits.packet_ring_frame(devargs, *config.mtu.get_ref(), FRAME_OVERHEAD)
}

fn start(
    config: &DeviceConfig,
    mut port: Port,
    pool: &Mempool,
    wanted: u16,
) -> Result<Device, String> {
    let name = &config.name.get_ref().0;
    let fail = |e: dpdk::Error| format!("device {name}: {e}");
    let info = port.info().map_err(fail)?;
    let traits = port.driver_traits();
    let in_process = traits.in_process;
    let mtu = *config.mtu.get_ref();
    let queues = wanted
        .min(info.max_rx_queues)
        .min(info.max_tx_queues)
        .max(1);
    let software = config.checksum == ChecksumPolicy::Software;
    let tso = wants_tso(config, traits).map_err(|e| format!("device {name}: {e}"))?;
    let tso_room = match traits.software_tso {
        Some(limits) if tso => limits.header_room,
        _ => 0,
    };
    let caps = port
        .configure(
            &PortConfig {
                rx_queues: queues,
                tx_queues: queues,
                mtu: mtu
                    + tso_room
                    + if config.vlan.is_some() && !in_process {
                        VLAN_TAG
                    } else {
                        0
                    },
                offloads: Offloads {
                    tx_checksum: !software,
                    rx_checksum: !software,
                    tso,
                    lro: traits.peer_sends_uncut && *config.tso.get_ref() != TsoPolicy::Off,
                    rx_interrupt: !in_process,
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
    // Neither end of a link takes frames from its own address.
    let shared_mac = traits.shares_mac_address;
    let own_mac = match port.mac() {
        Ok(m) if !shared_mac => m,
        _ => [0; 6],
    };
    let mac = match config.mac {
        Some(MacAddress(m)) => {
            if !in_process && !shared_mac && m != own_mac && port.set_mac(m).is_err() {
                // The link delivers only its own address then, unless it is told otherwise.
                if let Err(e) = port.set_promiscuous(true) {
                    tracing::warn!(device = %name, "neither the address nor promiscuous mode could be set: {e}");
                }
            }
            m
        }
        None if in_process || own_mac == [0; 6] => drawn_mac(name, config),
        None => own_mac,
    };
    let taken = port.start().map_err(fail)?;
    let caps = port.caps().unwrap_or(caps);
    if !in_process {
        // NDP needs multicast; ports that always deliver it refuse the call.
        let _ = port.set_allmulticast(true);
    }
    let steering = Steering::new(usize::from(wanted), caps.reta_size);
    if caps.reta_size > 0 && queues == wanted {
        // Without it the port's own table decides, and workers sort what comes to the wrong one.
        if let Err(e) = port.set_rss_table(&steering.indirection_table()) {
            tracing::warn!(device = %name, "workers will forward frames to each other: {e}");
        }
    }
    let queues = taken.into_iter().map(|(rx, tx)| Some((rx?, tx?))).collect();
    Ok(Device {
        config: config.clone(),
        port,
        mac,
        link: LinkTraits::new(traits, &caps, config.checksum),
        driver: info.driver,
        queues,
        steering: Arc::new(steering),
    })
}

/// Whether the port is asked for TSO.
///
/// # Errors
/// The configuration wants it, and the driver cannot cut what the device sends.
fn wants_tso(config: &DeviceConfig, traits: &DriverTraits) -> Result<bool, String> {
    let policy = *config.tso.get_ref();
    let software_checksum = config.checksum == ChecksumPolicy::Software;
    if software_checksum || traits.in_process || policy == TsoPolicy::Off {
        return Ok(false);
    }
    let Some(limits) = traits.software_tso else {
        return Ok(true);
    };
    let vlan_tag = if config.vlan.is_some() { VLAN_TAG } else { 0 };
    let max_mtu = limits.max_mtu - limits.header_room - vlan_tag;
    let has_ipv6 = config.addresses.get_ref().iter().any(|a| a.addr.is_ipv6());
    let wrong_family = limits.ipv4_only && has_ipv6;
    match policy {
        TsoPolicy::On if wrong_family => Err(
            "tso = \"on\": this link cuts IPv4 segments only; leave the IPv6 addresses out, or use \"auto\""
                .into(),
        ),
        TsoPolicy::On if *config.mtu.get_ref() > max_mtu => Err(format!(
            "tso = \"on\": this link cuts segments at an mtu of at most {max_mtu}; use that, or \"auto\""
        )),
        _ => Ok(!wrong_family && *config.mtu.get_ref() <= max_mtu),
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
            link_up: self.link.in_process || link.is_none_or(|l| l.up),
            crc: self.config.mpa.crc != CrcPolicy::Off,
            crc_required: self.config.mpa.crc == CrcPolicy::Required,
            mpa_rev: *self.config.mpa.revision.get_ref(),
            max_ird: *self.config.mpa.ird.get_ref(),
            max_ord: *self.config.mpa.ord.get_ref(),
            workers: (0..self.steering.worker_count()).collect(),
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
        let workers = self.steering.worker_count();
        if worker >= workers {
            return None;
        }
        let home = (workers > 1).then(|| WorkerSteering {
            steering: self.steering.clone(),
            worker,
        });
        let has = self.queues.len();
        let queues = match self.queues.get_mut(worker) {
            Some(own) => Ok(own.take()?),
            None => Err(worker % has),
        };
        let tso = self.link.tso.then(|| self.super_segments());
        Some(WorkerPortConfig {
            device,
            queues,
            stack: StackConfig {
                gratuitous_arp: !self.link.in_process && worker == 0,
                steering: home,
                tso,
                ..self.stack(keys, self.link.needs_software_checksum())
            },
            mpa: self.mpa(),
            accept_timeout: Duration::from_millis(self.config.mpa.accept_timeout_ms.into()),
            link: self.link,
            tap: None,
        })
    }

    /// What the port takes at once: a header, and two buffers for each FPDU.
    fn super_segments(&self) -> TsoLimits {
        let by_buffers = self.link.max_tso_segments.saturating_sub(1) / 2;
        TsoLimits {
            max_segments: by_buffers.clamp(2, TSO_SEGMENTS),
            max_bytes: TSO_BYTES,
        }
    }

    fn out_of_order(&self) -> OutOfOrderPolicy {
        match self.config.mpa.out_of_order {
            OutOfOrderName::Off => OutOfOrderPolicy::Off,
            OutOfOrderName::Markers => OutOfOrderPolicy::Markers,
            OutOfOrderName::Aligned => OutOfOrderPolicy::Aligned,
        }
    }

    fn mpa(&self) -> MpaConfig {
        let m = &self.config.mpa;
        MpaConfig {
            revision: *m.revision.get_ref(),
            crc: match m.crc {
                CrcPolicy::Off => MpaCrcPolicy::IfAsked,
                CrcPolicy::On => MpaCrcPolicy::Asked,
                CrcPolicy::Required => MpaCrcPolicy::Required,
            },
            markers: match m.markers {
                MarkersName::Never => MarkerPolicy::Never,
                MarkersName::Accept => MarkerPolicy::Accept,
                MarkersName::Request => MarkerPolicy::Request,
            },
            peer_to_peer: !m.rtr.is_empty(),
            rtr_kinds: RtrKinds {
                send: m.rtr.contains(&RtrName::Send),
                write: m.rtr.contains(&RtrName::Write),
                read: m.rtr.contains(&RtrName::Read),
            },
            max_ird: *m.ird.get_ref(),
            max_ord: *m.ord.get_ref(),
            max_private_data: *m.private_data.get_ref(),
            fallback_to_rev1: m.fallback,
            terminate_bit_order: match m.terminate {
                TerminateName::Rfc => TerminateBitOrder::Rfc,
                TerminateName::Siw => TerminateBitOrder::Siw,
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
        let (window, initial_window) = if self.link.in_process {
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
