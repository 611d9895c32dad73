//! Ports of `siw-perf raw`, opened from a siwd configuration with siwd's own functions.

use anyhow::anyhow;
use dpdk::{ExternalRegion, IovaSpace, MbufCache, RegisteredThread};
use siw_ports::{Port, RxQueue, TxQueue};
use siw_shm::SharedMemory;
use siwd::config::Config;
use siwd::device::{OpenDevice, open_devices};
use siwd::prepared::{ClaimedHost, Prepared, StartedDpdk};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Packet buffers in DPDK's cache for the thread.
const POOL_CACHE: u32 = 256;
/// Time between two checks of the links.
const LINK_POLL: Duration = Duration::from_millis(10);

/// Properties of a port that determine the possible runs.
#[derive(Debug, Clone)]
pub(super) struct PortDescription {
    pub(super) name: String,
    pub(super) driver: String,
    pub(super) mtu: u16,
    pub(super) in_process: bool,
    pub(super) takes_references: bool,
    /// Speed of the link in Mb/s; `None` for rings, and if the port does not know it.
    pub(super) link_mbps: Option<u32>,
}

/// Source MAC address of a port's frames, and the addresses that it replies for.
#[derive(Debug, Clone)]
pub(super) struct PortIdentity {
    pub(super) mac: [u8; 6],
    /// The device's IPv4 addresses.
    pub(super) addresses: Vec<Ipv4Addr>,
}

/// A port, without its queues.
pub(super) struct RawPort {
    pub(super) description: PortDescription,
    identity: PortIdentity,
    pub(super) port: Port,
}

/// One pair of queues of a port.
pub(super) struct LanePort {
    pub(super) identity: PortIdentity,
    pub(super) rx: RxQueue,
    pub(super) tx: TxQueue,
}

/// What one thread works on: a pair of queues of each port, in the order of the ports.
pub(super) struct Lane {
    /// The core of the thread.
    pub(super) core: usize,
    pub(super) list: Vec<LanePort>,
    pub(super) cache: MbufCache,
}

/// All ports and the objects that they need while open; dropped in this order.
pub(super) struct RawPorts {
    /// Until they are taken.
    lanes: Vec<Lane>,
    pub(super) list: Vec<RawPort>,
    _registered: RegisteredThread,
    space: IovaSpace,
    pub(super) dpdk: StartedDpdk,
    _claims: ClaimedHost,
}

impl RawPorts {
    /// Starts DPDK on the calling thread, and opens the ports with one queue in each direction for each
    /// of the first `threads` cores of the configuration.
    pub(super) fn open(config: Config, threads: usize) -> anyhow::Result<RawPorts> {
        let prepared = Prepared::new(config);
        prepared.check_host().into_result()?;
        let claims = prepared.claim_host(threads)?;
        let dpdk = prepared.start_dpdk("siw-perf-raw", POOL_CACHE)?;
        let cores: Vec<usize> = (0..threads)
            .map(|lane| prepared.cores.get(lane).copied().unwrap_or(0))
            .collect();
        dpdk::pin_current_thread(cores[0])?;
        let registered = dpdk.eal.register_thread()?;
        let mut devices =
            open_devices(&dpdk, &prepared.devices, threads).map_err(anyhow::Error::msg)?;
        let widths = prepared
            .pci_devices()
            .filter_map(|device| device.iommu_width);
        let space = IovaSpace::new(widths.min().unwrap_or(u8::MAX));
        let lanes = cores.iter().enumerate().map(|(index, core)| {
            let list = devices
                .iter_mut()
                .map(|device| LanePort::new(device, index));
            anyhow::Ok(Lane {
                core: *core,
                list: list.collect::<anyhow::Result<_>>()?,
                cache: MbufCache::new(&dpdk.pool),
            })
        });
        let lanes = lanes.collect::<anyhow::Result<_>>()?;
        Ok(RawPorts {
            lanes,
            list: devices.into_iter().map(RawPort::new).collect(),
            _registered: registered,
            space,
            dpdk,
            _claims: claims,
        })
    }

    /// The queues, once.
    pub(super) fn take_lanes(&mut self) -> Vec<Lane> {
        std::mem::take(&mut self.lanes)
    }

    /// Reads the speeds of the links, which ports know once their links are up.
    pub(super) fn read_link_speeds(&mut self) {
        for port in &mut self.list {
            let status = port.port.link_status().ok();
            let mbps = status.filter(|status| status.up).map(|status| status.mbps);
            port.description.link_mbps =
                mbps.filter(|mbps| !port.description.in_process && !matches!(*mbps, 0 | u32::MAX));
        }
    }

    /// Descriptions of all ports.
    pub(super) fn describe_all(&self) -> Vec<PortDescription> {
        let describe = |port: &RawPort| port.description.clone();
        self.list.iter().map(describe).collect()
    }

    /// Waits until every link is up, for at most `limit`: a port may not know its state.
    pub(super) fn wait_for_links(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        for port in &self.list {
            let is_up = || {
                let status = port.port.link_status();
                port.description.in_process || status.is_ok_and(|status| status.up)
            };
            while !is_up() && Instant::now() < deadline {
                sleep(LINK_POLL);
            }
            if !is_up() {
                eprintln!("siw-perf: the link of {} is down", port.description.name);
            }
        }
    }

    /// Makes `memory` readable for the ports' devices while the result lives.
    pub(super) fn map_memory(
        &self,
        memory: &Arc<SharedMemory>,
    ) -> anyhow::Result<Option<ExternalRegion>> {
        let readers = self.list.iter().filter_map(|port| port.port.dma_port());
        let readers: Vec<dpdk::Port> = readers.collect();
        if readers.is_empty() {
            return Ok(None);
        }
        let (len, page) = (memory.len(), memory.page_size());
        let mut region =
            ExternalRegion::register(&self.dpdk.eal, memory.clone(), len, page, &self.space)?;
        for port in &readers {
            region.map_for(port)?;
        }
        Ok(Some(region))
    }
}

/// Addresses of a device's frames.
fn identity_of(device: &OpenDevice) -> PortIdentity {
    let view = device.client_view();
    let addresses = view.addresses.iter().filter_map(|cidr| match cidr.addr {
        IpAddr::V4(address) => Some(address),
        IpAddr::V6(_) => None,
    });
    PortIdentity {
        mac: device.mac,
        addresses: addresses.collect(),
    }
}

impl LanePort {
    /// Takes the queues of thread `index`.
    fn new(device: &mut OpenDevice, index: usize) -> anyhow::Result<LanePort> {
        let (rx, tx) = device.take_queues(index).ok_or_else(|| {
            let name = device.client_view().name;
            anyhow!("device {name} has {index} queues; --cores: name at most {index}")
        })?;
        Ok(LanePort {
            identity: identity_of(device),
            rx,
            tx,
        })
    }
}

impl RawPort {
    /// The port's Ethernet address.
    pub(super) fn mac(&self) -> [u8; 6] {
        self.identity.mac
    }

    fn new(device: OpenDevice) -> RawPort {
        let view = device.client_view();
        let traits = device.port.driver_traits();
        if !traits.in_process {
            // Frames may be addressed to any host; ports that accept all frames anyway refuse the
            // call.
            let _ = device.port.set_promiscuous(true);
        }
        RawPort {
            description: PortDescription {
                mtu: *device.config.mtu.get_ref(),
                in_process: traits.in_process,
                takes_references: traits.external_buffers
                    && device.link.multi_segs
                    && device.link.max_segments > 1,
                link_mbps: None,
                name: view.name,
                driver: view.driver,
            },
            identity: identity_of(&device),
            port: device.port,
        }
    }
}
