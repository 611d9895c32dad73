//! Devices: the configuration's links become ports, with one worker port for each worker.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use dpdk::{DriverTraits, Eal, Mempool, Offloads, PortConfig};
use rustix::rand::GetRandomFlags;
use siw_host::ports::HostPorts;
use siw_host::{HostPath, HostSettings};
use siw_iwarp::ddp::Msn;
use siw_iwarp::mpa::{MarkerPolicy, MpaConfig, MpaCrcPolicy, RtrKinds};
use siw_iwarp::{OutOfOrderPolicy, TerminateBitOrder};
use siw_net::{
    IpCidr, LearnedRoutes, NetConfig, ReassemblyConfig, Route, SYMMETRIC_RSS_KEY, Steering,
    WorkerSteering,
};
use siw_ports::{Port, RxQueue, TxQueue, XdpLink};
use siw_shm::device_identity::GidTable;
use siw_tcp::{StackConfig, TcpConfig, TsoLimits};

use crate::config::{
    CrcSetting, DeviceConfig, LEAST_WINDOW, LinkSource, MacAddress, MarkersName, OutOfOrderName,
    PortMapPolicy, RtrName, TerminateName, TsoPolicy, TxPayloadPolicy,
};
use crate::datapath::port::WorkerPortConfig;
use crate::device_view::DeviceView;
use crate::link_traits::LinkTraits;
use crate::offloads::{asked_offloads, log_offloads, log_steering};
use crate::prepared::StartedDpdk;
use crate::vhost_socket;
use crate::xdp_device::{share_ports, xdp_link};

/// Descriptors of a ring pair: enough for a few bursts, few enough to stay in the cache.
const PAIR_RING: u32 = 256;

/// Maximum bytes of a frame in addition to its IP packet: Ethernet, VLAN tag, checksum.
const FRAME_OVERHEAD: u16 = 32;
/// Bytes of an 802.1Q tag.
pub(crate) const VLAN_TAG: u16 = 4;

/// Maximum wire segments of a super-segment: 64 KB of plain Ethernet, which is also the limit of a
/// tap.
const TSO_SEGMENTS: u16 = 44;
const TSO_BYTES: u32 = 64_000;

/// Receive windows if the configuration names none.
const WINDOW: u32 = 1 << 20;
/// A connection on a long path may grow its window to 32 MiB: 100 ms at 2.5 Gb/s.
const WINDOW_DOUBLINGS: u8 = 5;
const PAIR_WINDOW: u32 = 256 << 10;
const _: () = assert!(WINDOW >= LEAST_WINDOW && PAIR_WINDOW >= LEAST_WINDOW);
/// Least received buffers of a stack. The 188 that are not for IP fragments offer a window of
/// [`LEAST_WINDOW`].
const LEAST_HELD_BUFFERS: usize = 200;

/// Segments that a connection of a pair may send at once after an idle period.
const PAIR_INITIAL_WINDOW: u32 = 256;

/// A started port, and its properties that the workers need.
pub struct OpenDevice {
    /// The device's table of the configuration.
    pub config: DeviceConfig,
    /// The started port.
    pub port: Port,
    /// The MAC address of the port.
    pub mac: [u8; 6],
    /// Capabilities of the port and its link.
    pub link: LinkTraits,
    driver: String,
    queues: Vec<Option<(RxQueue, TxQueue)>>,
    /// Assignment of connections to the device's workers.
    steering: Arc<Steering>,
    /// Division of TCP ports with the kernel, if both have the device's addresses.
    pub host_ports: Option<Arc<HostPorts>>,
    /// The kernel's interface, until its thread starts.
    pub host: Option<HostPath>,
}

/// Opens and starts every port.
///
/// # Errors
/// A text that names the device and the problem.
pub fn open_devices(
    dpdk: &StartedDpdk,
    configs: &[DeviceConfig],
    workers: usize,
) -> Result<Vec<OpenDevice>, String> {
    let mut pairs = SecondEnds::default();
    let mut devices = Vec::new();
    for config in configs {
        devices.push(open_device(dpdk, configs, config, workers, &mut pairs)?);
    }
    Ok(devices)
}

/// Second ends, by name, of the pairs of which one end is a device.
pub type SecondEnds = HashMap<String, Port>;

/// Number of pairs that the process has made.
static PAIRS_MADE: AtomicU32 = AtomicU32::new(0);
/// Number of views of devices that the process has made.
static VIEWS_MADE: AtomicU64 = AtomicU64::new(0);

/// Opens and starts the port of `config`, which is among `configs`.
///
/// # Errors
/// As [`open_devices`].
pub fn open_device(
    dpdk: &StartedDpdk,
    configs: &[DeviceConfig],
    config: &DeviceConfig,
    workers: usize,
    pairs: &mut SecondEnds,
) -> Result<OpenDevice, String> {
    let name = &config.name.get_ref().0;
    let fail = |error: siw_ports::Error| format!("device {name}: {error}");
    let wanted = queues_of(configs, config, workers);
    let port = match config.link_source() {
        LinkSource::Pair(pair) => match pairs.remove(&pair) {
            Some(second_end) => second_end,
            None => {
                // Device names of rings are global in DPDK, and short. The ends of an earlier pair may
                // not all be closed.
                let label = format!("siw_{}", PAIRS_MADE.fetch_add(1, Ordering::Relaxed));
                let (first_end, second_end) =
                    Port::create_ring_pair(&dpdk.eal, &label, workers as u16, PAIR_RING)
                        .map_err(fail)?;
                pairs.insert(pair, second_end);
                first_end
            }
        },
        LinkSource::Vdev(devargs) => {
            if let Some(socket) = DriverTraits::own_socket_of(&devargs) {
                vhost_socket::remove_stale(socket.as_ref())
                    .map_err(|why| format!("device {name}: {why}"))?;
                if DriverTraits::waits_for_peer(&devargs) {
                    tracing::warn!(device = %name, "waiting for its peer to connect to {socket}");
                }
            }
            Port::attach_vdev(&dpdk.eal, &vdev_args(config, &devargs)).map_err(fail)?
        }
        LinkSource::Pci(address) => Port::attach_pci(&dpdk.eal, &address).map_err(fail)?,
        LinkSource::Xdp(interface) => {
            let link = xdp_link(config, interface);
            Port::attach_xdp(&dpdk.eal, &link).map_err(fail)?
        }
    };
    let host_ports = share_ports(config, &port)?;
    let mut device = start_device(config, port, &dpdk.pool, wanted)?;
    device.host_ports = host_ports;
    Ok(device)
}

/// Opens the virtual devices as far as this has no effect on the machine, and compares their settings
/// with what the ports offer ([`Port::rehearse`]).
///
/// # Errors
/// A text that names the device and the problem.
pub fn rehearse_devices(
    eal: &Eal,
    configs: &[DeviceConfig],
    pool: &Mempool,
    workers: usize,
) -> Result<(), String> {
    let creates_interface = |config: &&DeviceConfig| {
        let devargs = config.devargs.as_deref().unwrap_or_default();
        DriverTraits::for_device(devargs).shares_mac_address
    };
    // Those that create interfaces change the thread's network namespace.
    let (last, first): (Vec<_>, Vec<_>) = configs.iter().partition(creates_interface);
    // All are open at once, as in a start.
    let mut ports = Vec::new();
    for config in first.into_iter().chain(last) {
        let name = &config.name.get_ref().0;
        let fail = |error: siw_ports::Error| format!("device {name}: {error}");
        let port = match config.link_source() {
            LinkSource::Vdev(devargs) => {
                Port::rehearse(eal, &vdev_args(config, &devargs)).map_err(fail)?
            }
            LinkSource::Xdp(interface) => {
                Some(Port::attach_xdp(eal, &xdp_link(config, interface)).map_err(fail)?)
            }
            LinkSource::Pair(_) | LinkSource::Pci(_) => None,
        };
        let Some(port) = port else { continue };
        let (wanted, traits) = (queues_of(configs, config, workers), port.driver_traits());
        let info = port.device_info().map_err(fail)?;
        let settings = port_config(config, traits, &info, wanted)?;
        let granted = port
            .negotiate(&settings, std::slice::from_ref(pool))
            .map_err(fail)?;
        check_granted(config, traits, &granted, &info.driver)?;
        ports.push(port);
    }
    Ok(())
}

/// Devargs of a virtual device, with the frames of its packet ring.
fn vdev_args(config: &DeviceConfig, devargs: &str) -> String {
    match packet_ring_frame(config, devargs) {
        Some(frame) => DriverTraits::devargs_with_ring(devargs, frame),
        None => devargs.to_owned(),
    }
}

/// Number of queues that the device asks for in each direction.
fn queues_of(configs: &[DeviceConfig], config: &DeviceConfig, workers: usize) -> u16 {
    // Queue `i` of one end of a pair is joined to queue `i` of the other.
    let ends = |other: &&DeviceConfig| {
        other.name == config.name || (other.pair.is_some() && other.pair == config.pair)
    };
    configs
        .iter()
        .filter(ends)
        .filter_map(|other| other.queues.as_ref())
        .map(|queues| usize::from(*queues.get_ref()))
        .fold(workers, usize::min) as u16
}

/// Bytes that a packet buffer must hold for the device.
pub fn buffer_room(config: &DeviceConfig) -> u16 {
    let ring = match config.link_source() {
        LinkSource::Vdev(devargs) => {
            packet_ring_frame(config, &devargs).map_or(0, DriverTraits::packet_ring_room)
        }
        LinkSource::Xdp(_) => XdpLink::buffer_room(*config.mtu.get_ref()),
        _ => 0,
    };
    let frame = config.mtu.get_ref().saturating_add(FRAME_OVERHEAD);
    // The longest frames of a pair use a second buffer for their last bytes.
    frame.clamp(2048, u16::MAX - dpdk::HEADROOM).max(ring)
}

/// See [`DriverTraits::packet_ring_frame`].
fn packet_ring_frame(config: &DeviceConfig, devargs: &str) -> Option<u16> {
    let traits = DriverTraits::for_device(devargs);
    traits.packet_ring_frame(devargs, *config.mtu.get_ref(), FRAME_OVERHEAD)
}

/// Configuration of the device's port.
///
/// # Errors
/// A text that names the device and the setting that its driver cannot fulfil.
fn port_config(
    config: &DeviceConfig,
    traits: &DriverTraits,
    info: &dpdk::PortInfo,
    wanted: u16,
) -> Result<PortConfig, String> {
    let mtu = *config.mtu.get_ref();
    let queues = wanted
        .min(info.max_rx_queues)
        .min(info.max_tx_queues)
        .max(1);
    let asked = asked_offloads(config, traits)
        .map_err(|error| format!("device {}: {error}", config.name.get_ref().0))?;
    let tso_room = match traits.software_tso {
        Some(limits) if asked.tso => limits.header_room,
        _ => 0,
    };
    let threshold =
        |setting: &Option<toml::Spanned<u16>>| setting.as_ref().map_or(0, |value| *value.get_ref());
    let has_vlan = config.vlan.is_some() && !traits.in_process;
    Ok(PortConfig {
        rx_queues: queues,
        tx_queues: queues,
        mtu: port_mtu(mtu + tso_room, has_vlan, info),
        offloads: asked,
        rss_key: Some(SYMMETRIC_RSS_KEY),
        rx_desc: config.rx_ring_len(),
        tx_desc: config.tx_ring_len(),
        rx_free_threshold: threshold(&config.rx_free_threshold),
        tx_free_threshold: threshold(&config.tx_free_threshold),
    })
}

/// Checks that the port grants the offloads that the configuration requires.
///
/// # Errors
/// A text that names the device and the setting.
fn check_granted(
    config: &DeviceConfig,
    traits: &DriverTraits,
    granted: &Offloads,
    driver: &str,
) -> Result<(), String> {
    let name = &config.name.get_ref().0;
    if *config.tso.get_ref() == TsoPolicy::On && !granted.tso && !traits.in_process {
        return Err(format!(
            "device {name}: tso = \"on\", but the {driver} link cannot cut TCP segments; use \"auto\""
        ));
    }
    let takes_references = traits.external_buffers && (granted.multi_segs || traits.in_process);
    if config.tx_payload == TxPayloadPolicy::Reference && !takes_references {
        return Err(format!(
            "device {name}: tx_payload = \"reference\", but the {driver} link can send only from packet buffers; use \"auto\""
        ));
    }
    Ok(())
}

fn start_device(
    config: &DeviceConfig,
    mut port: Port,
    pool: &Mempool,
    wanted: u16,
) -> Result<OpenDevice, String> {
    let name = &config.name.get_ref().0;
    let fail = |error: siw_ports::Error| format!("device {name}: {error}");
    let info = port.device_info().map_err(fail)?;
    let traits = port.driver_traits();
    let in_process = traits.in_process;
    let settings = port_config(config, traits, &info, wanted)?;
    let (asked, queues) = (settings.offloads, settings.rx_queues);
    let caps = port
        .configure(&settings, std::slice::from_ref(pool))
        .map_err(fail)?;
    check_granted(config, traits, &caps.offloads, &info.driver)?;
    tracing::debug!(device = %name, driver = %info.driver, queues, ?caps, "port configured");
    // Neither end of a link accepts frames from its own address.
    let shared_mac = traits.shares_mac_address;
    let own_mac = match port.mac_address() {
        Ok(mac_address) if !shared_mac => mac_address,
        _ => [0; 6],
    };
    let mac = match config.mac {
        Some(MacAddress(mac_address)) => {
            if !in_process
                && !shared_mac
                && mac_address != own_mac
                && port.set_mac_address(mac_address).is_err()
            {
                // The link then delivers only its own address, unless promiscuous mode lets others
                // pass.
                if let Err(error) = port.set_promiscuous(true) {
                    tracing::warn!(device = %name, "neither the address nor promiscuous mode could be set: {error}");
                }
            }
            mac_address
        }
        None if in_process || own_mac == [0; 6] => derived_mac(name, config),
        None => own_mac,
    };
    let taken = port.start().map_err(fail)?;
    let caps = port.granted_caps().unwrap_or(caps);
    if !in_process {
        // NDP needs multicast; ports that always deliver it refuse the call.
        let _ = port.accept_all_multicast();
    }
    if let (Some(vlan), true) = (&config.vlan, caps.offloads.vlan_filter) {
        port.accept_vlan(*vlan.get_ref()).map_err(fail)?;
    }
    log_offloads(
        name,
        &info.driver,
        &dpdk::list_offloads(&asked, &info, &caps.offloads),
    );
    let steering = Steering::new(usize::from(wanted), caps.reta_size);
    log_steering(name, queues, wanted, &caps);
    if caps.reta_size > 0 && queues == wanted {
        // Without the table, the port's own decides, and workers forward misdirected frames.
        if let Err(error) = port.set_rss_table(&steering.indirection_table()) {
            tracing::warn!(device = %name, "workers will forward frames to each other: {error}");
        }
    }
    let queues = taken.into_iter().map(|(rx, tx)| Some((rx?, tx?))).collect();
    Ok(OpenDevice {
        config: config.clone(),
        port,
        mac,
        link: LinkTraits::new(
            traits,
            &caps,
            config.checksum,
            // A super-segment would be lost as a whole.
            if *config.loss.get_ref() > 0.0 {
                TsoPolicy::Off
            } else {
                *config.tso.get_ref()
            },
            config.tx_payload,
            *config.mtu.get_ref(),
        ),
        driver: info.driver,
        queues,
        steering: Arc::new(steering),
        host_ports: None,
        host: None,
    })
}

/// The MTU to configure on a port, so that it carries `mtu` bytes of IP packet and a VLAN tag. Drivers
/// that count the tag separately may accept no more than `mtu`, and still carry tagged frames.
fn port_mtu(mtu: u16, has_vlan: bool, info: &dpdk::PortInfo) -> u16 {
    let tagged = if has_vlan { mtu + VLAN_TAG } else { mtu };
    if u32::from(tagged) > info.max_mtu && u32::from(mtu) <= info.max_mtu {
        mtu
    } else {
        tagged
    }
}

/// A locally administered address that stays the same for the same device.
fn derived_mac(name: &str, config: &DeviceConfig) -> [u8; 6] {
    let mut crc = crc32c::crc32c(name.as_bytes());
    for cidr in config.addresses.get_ref() {
        crc = crc32c::crc32c_append(crc, cidr.addr.to_string().as_bytes());
    }
    let mut mac = [0x02, 0x51, 0, 0, 0, 0];
    mac[2..].copy_from_slice(&crc.to_be_bytes());
    mac
}

impl OpenDevice {
    /// Sets up the kernel's part of a device that has `host_interface`.
    ///
    /// # Errors
    /// A text that names the device and the missing resource.
    pub fn set_up_host_path(&mut self) -> Result<(), String> {
        let Some(settings) = host_settings(&self.config) else {
            return Ok(());
        };
        let name = &self.config.name.get_ref().0;
        let host = HostPath::set_up(settings, self.mac, *self.config.mtu.get_ref())
            .map_err(|error| format!("device {name}: {error}"))?;
        tracing::info!(
            device = %name,
            interface = host.tap.name(),
            ports = host.ports.connect_ports().len(),
            "the kernel shares the device"
        );
        self.host_ports = Some(host.ports.clone());
        self.host = Some(host);
        Ok(())
    }

    /// The device as clients see it.
    pub fn client_view(&self) -> DeviceView {
        let link = self.port.link_status().ok();
        let addresses = self.config.addresses.get_ref().clone();
        DeviceView {
            instance: VIEWS_MADE.fetch_add(1, Ordering::Relaxed),
            name: self.config.name.get_ref().0.clone(),
            config: Arc::new(self.config.clone()),
            settings: self.settings_json(),
            driver: self.driver.clone(),
            mac: self.mac,
            persona: self.config.persona.into(),
            interface: self.config.kernel_interface(),
            routes: self.config.routes.iter().map(|route| route.to).collect(),
            gateway: self.config.gateway.is_some(),
            gateway6: self.config.gateway6.is_some(),
            gids: GidTable::new(self.mac, addresses.iter().map(|cidr| cidr.addr)),
            addresses,
            mtu: *self.config.mtu.get_ref(),
            link_mbps: link.as_ref().map_or(0, |status| status.mbps),
            is_gone: false,
            is_deleted: false,
            unserved_queues: 0,
            link_up: self.link.in_process || link.is_none_or(|status| status.up),
            link_downs: 0,
            crc: self.config.mpa.crc != CrcSetting::Off,
            crc_required: self.config.mpa.crc == CrcSetting::Required,
            mpa_rev: *self.config.mpa.revision.get_ref(),
            max_ird: *self.config.mpa.ird.get_ref(),
            max_ord: *self.config.mpa.ord.get_ref(),
            workers: (0..self.steering.worker_count()).collect(),
            steering: self.steering.clone(),
            host_ports: self.host_ports.clone(),
            learned_routes: LearnedRoutes::default(),
            permanent_neighbours: self.config.neighbours.permanent.get_ref().clone(),
        }
    }

    /// Effective settings of the device's configuration and link.
    fn settings_json(&self) -> serde_json::Value {
        let DeviceConfig { mtu, mpa, .. } = &self.config;
        serde_json::json!({
            "device": self.config.name.get_ref().0,
            "driver": self.driver,
            "mtu": mtu.get_ref(),
            "crc": mpa.crc,
            "tso": self.link.tso,
            "checksums": match self.link {
                LinkTraits { no_checksums: true, .. } => "none",
                LinkTraits { tx_checksum: true, .. } => "port",
                _ => "software",
            },
            "payload": self.link.payload_name(),
            "workers": self.steering.worker_count(),
        })
    }

    /// Takes the queues of one worker, for programs that use the port without siwd's TCP.
    pub fn take_queues(&mut self, worker: usize) -> Option<(RxQueue, TxQueue)> {
        self.queues.get_mut(worker)?.take()
    }

    /// The port of one worker, if the worker serves the device. Workers beyond the port's queues
    /// receive and send through workers that have one.
    pub fn worker_port(
        &mut self,
        device: usize,
        worker: usize,
        keys: &SharedStackConfig,
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
        let mut stack = self.stack_config(keys, self.link.needs_software_checksum());
        stack.tcp.tso = self.link.tso.then(|| self.super_segments());
        stack.net.gratuitous_arp = !self.link.in_process && worker == 0;
        stack.net.port_mapper = self.config.port_map == PortMapPolicy::Auto;
        stack.net.steering = home;
        stack.net.host = self.host_ports.as_ref().map(|ports| ports.stack_share());
        Some(WorkerPortConfig {
            device,
            queues,
            stack,
            mpa: self.mpa_config(),
            accept_timeout: Duration::from_millis(self.config.mpa.accept_timeout_ms.into()),
            link: self.link,
            loss: *self.config.loss.get_ref(),
            taps: None,
            host: self.host.as_ref().map(|host| host.queue.clone()),
        })
    }

    /// Limits of the super-segments that the port takes: a header, and two buffers for each FPDU.
    fn super_segments(&self) -> TsoLimits {
        let by_buffers = self.link.max_tso_segments.saturating_sub(1) / 2;
        TsoLimits {
            max_segments: by_buffers.clamp(2, TSO_SEGMENTS),
            max_bytes: TSO_BYTES,
        }
    }

    fn out_of_order_mode(&self) -> OutOfOrderPolicy {
        match self.config.mpa.out_of_order {
            OutOfOrderName::Off => OutOfOrderPolicy::Off,
            OutOfOrderName::Markers => OutOfOrderPolicy::Markers,
            OutOfOrderName::Aligned => OutOfOrderPolicy::Aligned,
        }
    }

    fn mpa_config(&self) -> MpaConfig {
        let settings = &self.config.mpa;
        MpaConfig {
            revision: *settings.revision.get_ref(),
            crc: match settings.crc {
                CrcSetting::Off => MpaCrcPolicy::IfAsked,
                CrcSetting::On => MpaCrcPolicy::Asked,
                CrcSetting::Required => MpaCrcPolicy::Required,
            },
            markers: match settings.markers {
                MarkersName::Never => MarkerPolicy::Never,
                MarkersName::Accept => MarkerPolicy::Accept,
                MarkersName::Request => MarkerPolicy::Request,
            },
            peer_to_peer: !settings.rtr.is_empty(),
            rtr_kinds: RtrKinds {
                send: settings.rtr.contains(&RtrName::Send),
                write: settings.rtr.contains(&RtrName::Write),
                read: settings.rtr.contains(&RtrName::Read),
            },
            max_ird: *settings.ird.get_ref(),
            max_ord: *settings.ord.get_ref(),
            max_private_data: *settings.private_data.get_ref(),
            depths_in_private_data: settings.depths_in_private_data,
            fallback_to_rev1: settings.fallback,
            immediate_with_send: settings.immediate_with_send,
            terminate_bit_order: match settings.terminate {
                TerminateName::Rfc => TerminateBitOrder::Rfc,
                TerminateName::Siw => TerminateBitOrder::Siw,
            },
            out_of_order: self.out_of_order_mode(),
            first_msn: Msn(settings.first_msn),
            receive_wait_ms: settings.receive_wait_ms,
            wake_silent_peer_ms: settings.wake_silent_peer_ms,
            request_timeout_ms: settings.request_timeout_ms,
            reply_timeout_ms: settings.reply_timeout_ms,
        }
    }

    fn stack_config(&self, keys: &SharedStackConfig, tx_checksum: bool) -> StackConfig {
        let config = &self.config;
        let addrs = config
            .addresses
            .get_ref()
            .iter()
            .map(|cidr| IpCidr::new(cidr.addr, cidr.prefix))
            .collect();
        let (fragments, max_held_buffers) = keys.divide_held_buffers();
        let net = NetConfig {
            gateway_v4: config.gateway.as_ref().map(|gateway| *gateway.get_ref()),
            gateway_v6: config.gateway6.as_ref().map(|gateway| *gateway.get_ref()),
            mtu: *config.mtu.get_ref(),
            vlan: config.vlan.as_ref().map(|vlan| *vlan.get_ref()),
            routes: config
                .routes
                .iter()
                .map(|route| Route {
                    to: IpCidr::new(route.to.addr, route.to.prefix),
                    via: *route.via.get_ref(),
                })
                .collect(),
            reassembly: ReassemblyConfig {
                max_fragments: fragments,
                ..ReassemblyConfig::default()
            },
            neighbours: config.neighbours.neighbour_config(),
            ..NetConfig::new(self.mac, addrs)
        };
        let mut tcp = TcpConfig {
            // A listener may want it even if its device does not.
            show_out_of_order: true,
            isn_key: keys.isn_key,
            hash_key: keys.hash_key,
            max_connections: keys.max_connections,
            max_held_buffers,
            tx_checksum,
            ..TcpConfig::default()
        };
        // A pair has no queue between its ends that a first burst could overrun.
        let (window, doublings, initial_window) = if self.link.in_process {
            (PAIR_WINDOW, 0, PAIR_INITIAL_WINDOW)
        } else {
            (WINDOW, WINDOW_DOUBLINGS, tcp.initial_window)
        };
        tcp.recv_window_doublings = doublings;
        config.tcp.apply_to_stack(window, initial_window, &mut tcp);
        StackConfig { net, tcp }
    }
}

/// Secrets and limits that every stack shares.
#[derive(Clone)]
pub struct SharedStackConfig {
    /// Key of the initial sequence numbers (RFC 6528).
    pub isn_key: [u8; 16],
    /// Key of the flow table's hash.
    pub hash_key: [u8; 16],
    /// Maximum connections of one device in one worker.
    pub max_connections: usize,
    /// Maximum received buffers that the connections of one stack may hold together.
    pub max_held_buffers: usize,
}

impl SharedStackConfig {
    /// Generates secrets with the operating system's random numbers; right after boot, blocks until it
    /// has some. Three quarters of the `buffers` of the pool are shared by `stacks` stacks; the rest
    /// is for the ports. Each stack may hold at least enough for the longest FPDU.
    ///
    /// # Errors
    /// The operating system provides no random numbers.
    pub fn generate_secrets(
        connections: usize,
        buffers: u32,
        stacks: usize,
    ) -> std::io::Result<SharedStackConfig> {
        Ok(SharedStackConfig {
            isn_key: random_key()?,
            hash_key: random_key()?,
            max_connections: connections,
            max_held_buffers: (buffers as usize / 4 * 3 / stacks.max(1)).max(LEAST_HELD_BUFFERS),
        })
    }

    /// Returns how many buffers of a stack IP fragments may hold, and how many connections.
    fn divide_held_buffers(&self) -> (usize, usize) {
        let fragments = (self.max_held_buffers / 16).min(512);
        (fragments, self.max_held_buffers - fragments)
    }
}

fn random_key() -> std::io::Result<[u8; 16]> {
    let mut key = [0; 16];
    let mut filled = 0;
    while filled < key.len() {
        match rustix::rand::getrandom(&mut key[filled..], GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(key)
}

/// Settings of the kernel's part of a device; `None` if only siwd uses it.
fn host_settings(config: &DeviceConfig) -> Option<HostSettings> {
    let interface = config.host_interface.as_ref()?.get_ref().0.clone();
    let own = config.addresses.get_ref();
    let addresses = match &config.host_addresses {
        Some(addresses) => addresses.get_ref(),
        None => own,
    };
    let is_own = |address: &IpAddr| own.iter().any(|cidr| cidr.addr == *address);
    Some(HostSettings {
        interface,
        shared: addresses
            .iter()
            .map(|cidr| cidr.addr)
            .filter(is_own)
            .collect(),
        addresses: addresses
            .iter()
            .map(|cidr| IpCidr::new(cidr.addr, cidr.prefix))
            .collect(),
        ports: config.host_ports.get_ref().0.clone(),
        routes: config.host_routes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_one_of_many_stacks_holds_an_fpdu() {
        let shares = SharedStackConfig::generate_secrets(8, 1024, 64).expect("random numbers");
        let (_, max_held_buffers) = shares.divide_held_buffers();
        let config = TcpConfig {
            max_held_buffers,
            ..TcpConfig::default()
        };
        let window = config.initial_receive_window();
        assert!(window >= LEAST_WINDOW, "{window}");
    }

    #[test]
    fn secrets_are_whole_and_drawn_anew_each_time() {
        let draw = || SharedStackConfig::generate_secrets(8, 1024, 1).expect("random numbers");
        let drawn: Vec<_> = (0..16).map(|_| draw()).collect();
        let keys: Vec<_> = drawn
            .iter()
            .flat_map(|secrets| [secrets.isn_key, secrets.hash_key])
            .collect();
        for (index, key) in keys.iter().enumerate() {
            assert!(!keys[..index].contains(key), "{key:02x?} twice");
        }
        // Every octet varies: none was left at its initial value.
        for octet in 0..16 {
            assert!(keys.iter().any(|key| key[octet] != keys[0][octet]));
        }
    }
}
