//! Ports of `siw-perf raw`, opened from a siwd configuration with siwd's own functions.

use anyhow::anyhow;
use dpdk::{ExternalRegion, IovaSpace, MbufCache, Port, RegisteredThread, RxQueue, TxQueue};
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
}

/// Source MAC address of a port's frames, and the addresses that it replies for.
pub(super) struct PortIdentity {
    pub(super) mac: [u8; 6],
    /// The device's IPv4 addresses.
    pub(super) addresses: Vec<Ipv4Addr>,
}

/// A port with its two queues.
pub(super) struct RawPort {
    pub(super) description: PortDescription,
    pub(super) identity: PortIdentity,
    pub(super) rx: RxQueue,
    pub(super) tx: TxQueue,
    pub(super) port: Port,
}

/// All ports and the objects that they need while open; dropped in this order.
pub(super) struct RawPorts {
    pub(super) list: Vec<RawPort>,
    pub(super) cache: MbufCache,
    _registered: RegisteredThread,
    space: IovaSpace,
    dpdk: StartedDpdk,
    _claims: ClaimedHost,
}

impl RawPorts {
    /// Starts DPDK on the calling thread, and opens the ports with one queue in each direction.
    pub(super) fn open(config: Config) -> anyhow::Result<RawPorts> {
        let prepared = Prepared::new(config);
        prepared.check_host().into_result()?;
        let claims = prepared.claim_host(1)?;
        let dpdk = prepared.start_dpdk("siw-perf-raw", POOL_CACHE)?;
        let core = prepared.cores.first().copied().unwrap_or(0);
        dpdk::pin_current_thread(core)?;
        let registered = dpdk.eal.register_thread()?;
        let devices = open_devices(&dpdk, &prepared.devices, 1).map_err(anyhow::Error::msg)?;
        let widths = prepared
            .pci_devices()
            .filter_map(|device| device.iommu_width);
        let space = IovaSpace::new(widths.min().unwrap_or(u8::MAX));
        let list = devices
            .into_iter()
            .map(RawPort::new)
            .collect::<Result<Vec<_>, _>>()?;
        Ok(RawPorts {
            list,
            cache: MbufCache::new(&dpdk.pool),
            _registered: registered,
            space,
            dpdk,
            _claims: claims,
        })
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
        if !self.list.iter().any(|port| port.port.needs_dma_map()) {
            return Ok(None);
        }
        let (len, page) = (memory.len(), memory.page_size());
        let mut region =
            ExternalRegion::register(&self.dpdk.eal, memory.clone(), len, page, &self.space)?;
        for port in &self.list {
            region.map_for(&port.port)?;
        }
        Ok(Some(region))
    }
}

impl RawPort {
    fn new(mut device: OpenDevice) -> anyhow::Result<RawPort> {
        let view = device.client_view();
        let (rx, tx) = device
            .take_queues(0)
            .ok_or_else(|| anyhow!("device {} has no queue", view.name))?;
        let traits = device.port.driver_traits();
        if !traits.in_process {
            // Frames may be addressed to any host; ports that accept all frames anyway refuse the
            // call.
            let _ = device.port.set_promiscuous(true);
        }
        let addresses = view.addresses.iter().filter_map(|cidr| match cidr.addr {
            IpAddr::V4(address) => Some(address),
            IpAddr::V6(_) => None,
        });
        Ok(RawPort {
            description: PortDescription {
                mtu: *device.config.mtu.get_ref(),
                in_process: traits.in_process,
                takes_references: traits.external_buffers
                    && device.link.multi_segs
                    && device.link.max_segments > 1,
                name: view.name,
                driver: view.driver,
            },
            identity: PortIdentity {
                mac: device.mac,
                addresses: addresses.collect(),
            },
            rx,
            tx,
            port: device.port,
        })
    }
}
