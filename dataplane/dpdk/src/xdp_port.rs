//! A port on a NIC that stays with the kernel, using AF_XDP sockets: the pool's packet buffers are
//! the sockets' memory, so frames are neither copied nor converted on this side of the kernel.
//!
//! It does not use DPDK's AF_XDP driver, which leaves its XDP program on the NIC when the process
//! is killed (see the crate `siw_xdp`). [`Port`](crate::Port) hides the difference; a queue checks
//! once per burst which kind it is.
//!
//! ```text
//!   Port::attach_xdp   finds the interface, loads the program      nothing is attached yet
//!   Port::start        a socket for each receive queue of the NIC  then the program is attached
//!     queue 0: sockets 0, n, 2n ...   queue 1: sockets 1, n+1 ...  of n queues of the port
//! ```

use parking_lot::{Mutex, MutexGuard};
use std::net::IpAddr;

use siw_xdp::{
    AttachMode, Claim, ClaimKind, CopyMode, FrameMembership, NeighbourCopies, PACKET_HEADROOM,
    SocketConfig, SocketHandle, Umem, XdpInterface, XdpSocket, XdpSteering,
};

use crate::port_config::Offloads;
use crate::xdp_queue::{PoolMemory, QueueBuffers, XdpReceiver, XdpSender};
use crate::{
    DriverTraits, Error, LinkStatus, Mempool, PortCaps, PortConfig, PortCounters, PortInfo, Result,
};

/// Configuration of an AF_XDP port.
#[derive(Debug, Clone)]
pub struct XdpLink {
    /// The interface.
    pub interface: String,
    /// Kind of traffic that is claimed.
    pub kind: ClaimKind,
    /// The initial claims.
    pub claims: Vec<Claim>,
    /// Addresses shared with the kernel: it receives the answers to neighbour requests, and the
    /// port receives copies.
    pub shared_addresses: Vec<IpAddr>,
    /// The VLAN of claimed frames; `None`: untagged frames.
    pub vlan: Option<u16>,
    /// Copy mode of the sockets.
    pub copy_mode: CopyMode,
}

impl XdpLink {
    /// The largest MTU: a frame and the kernel's headroom have to fit into a page.
    pub const MAX_MTU: u16 = (MAX_CHUNK - PACKET_HEADROOM as u32 - FRAME_OVERHEAD) as u16;

    /// Buffer bytes needed for IP packets of `mtu` bytes, in addition to the buffer's own headroom.
    pub fn buffer_room(mtu: u16) -> u16 {
        mtu + FRAME_OVERHEAD as u16 + PACKET_HEADROOM - crate::HEADROOM
    }

    /// Traits of all AF_XDP links.
    pub fn driver_traits() -> &'static DriverTraits {
        DriverTraits::for_device(XDP_DRIVER)
    }
}

/// Name of the row of [`DriverTraits`].
pub(crate) const XDP_DRIVER: &str = "net_af_xdp";
/// Bytes around an IP packet: Ethernet header and VLAN tag; XDP does not see the FCS.
const FRAME_OVERHEAD: u32 = 18;
/// A chunk is at most a page.
const MAX_CHUNK: u32 = 4096;
/// The smallest MTU of IPv4.
const MIN_MTU: u32 = 68;
/// Entries of a ring: a power of two in this range.
const RING_ENTRIES: std::ops::RangeInclusive<u32> = 64..=16_384;

/// The AF_XDP part of a [`crate::Port`].
pub(crate) struct XdpPort {
    interface: XdpInterface,
    state: Mutex<XdpState>,
}

struct XdpState {
    steering: XdpSteering,
    copy_mode: CopyMode,
    shared_addresses: Vec<IpAddr>,
    config: Option<(PortConfig, Mempool)>,
    sockets: Vec<SocketHandle>,
    multicast: Option<FrameMembership>,
}

/// Receiving and sending half of a queue.
pub(crate) type XdpQueuePair = (XdpReceiver, XdpSender);

impl XdpPort {
    /// Finds the interface and loads the program. The interface does not change yet.
    pub(crate) fn prepare(link: &XdpLink) -> Result<XdpPort> {
        let interface = XdpInterface::find_by_name(&link.interface)?;
        interface.check_usable(link.vlan.is_some())?;
        let mut steering = XdpSteering::load(link.kind, link.vlan, interface.rx_queues)?;
        for claim in &link.claims {
            steering.add_claim(*claim)?;
        }
        Ok(XdpPort {
            interface,
            state: Mutex::new(XdpState {
                steering,
                copy_mode: link.copy_mode,
                shared_addresses: link.shared_addresses.clone(),
                config: None,
                sockets: Vec::new(),
                multicast: None,
            }),
        })
    }

    fn lock_state(&self) -> MutexGuard<'_, XdpState> {
        self.state.lock()
    }

    pub(crate) fn device_info(&self) -> PortInfo {
        PortInfo {
            driver: XDP_DRIVER.into(),
            min_mtu: MIN_MTU,
            max_mtu: u32::from(XdpLink::MAX_MTU).min(self.interface.mtu),
            // A worker beyond the NIC's number of queues would have no socket.
            max_rx_queues: self.interface.rx_queues.min(u32::from(u16::MAX)) as u16,
            max_tx_queues: self.interface.rx_queues.min(u32::from(u16::MAX)) as u16,
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

    pub(crate) fn configure(&self, config: &PortConfig, pool: &Mempool) -> Result<PortCaps> {
        let round = |descriptors: u16| {
            let entries = u32::from(descriptors).next_power_of_two();
            entries.clamp(*RING_ENTRIES.start(), *RING_ENTRIES.end()) as u16
        };
        let config = PortConfig {
            rx_desc: round(config.rx_desc),
            tx_desc: round(config.tx_desc),
            ..config.clone()
        };
        let frame = u32::from(config.mtu) + FRAME_OVERHEAD;
        let least = frame + u32::from(PACKET_HEADROOM);
        if u32::from(pool.buf_len()) < least {
            return Err(Error::Invalid {
                what: "length of packet buffers",
                value: pool.buf_len().to_string(),
                why: format!("AF_XDP needs {least} bytes at MTU {}", config.mtu),
            });
        }
        // Buffers for the rings, and some in flight.
        let in_rings = self.interface.rx_queues * u32::from(config.rx_desc)
            + u32::from(config.tx_queues) * u32::from(config.tx_desc);
        if pool.capacity() < in_rings + u32::from(config.rx_desc) {
            return Err(Error::Invalid {
                what: "number of packet buffers",
                value: pool.capacity().to_string(),
                why: format!(
                    "the rings of the {} queues of `{}` alone can hold {in_rings}: raise buffers in \
                     [dpdk], lower rx_descriptors, or ethtool -L {} combined 1",
                    self.interface.rx_queues, self.interface.name, self.interface.name
                ),
            });
        }
        let caps = PortCaps {
            offloads: Offloads {
                rx_interrupt: config.offloads.rx_interrupt,
                ..Offloads::NONE
            },
            mtu: config.mtu,
            max_mtu: self.device_info().max_mtu as u16,
            rx_desc: config.rx_desc,
            tx_desc: config.tx_desc,
            tx_seg_max: 1,
            tx_mtu_seg_max: 1,
            reta_size: 0,
            rss_key_set: false,
        };
        self.lock_state().config = Some((config, pool.clone()));
        Ok(caps)
    }

    /// Opens the sockets and attaches the program: claimed frames are received here from now on.
    pub(crate) fn start(&self) -> Result<Vec<XdpQueuePair>> {
        let mut state = self.lock_state();
        let Some((config, pool)) = state.config.clone() else {
            return Err(Error::Invalid {
                what: "port",
                value: self.interface.name.clone(),
                why: "it has to be configured before it is started".into(),
            });
        };
        let sockets = self.open_sockets(&config, &pool, state.copy_mode)?;
        let is_zero_copy = sockets.iter().all(XdpSocket::is_zero_copy);
        let queues = usize::from(config.rx_queues);
        let mut receivers: Vec<_> = (0..queues).map(|_| Vec::new()).collect();
        let mut senders: Vec<_> = (0..queues).map(|_| None).collect();
        state.sockets.clear();
        for (queue, socket) in sockets.into_iter().enumerate() {
            state
                .steering
                .add_socket(queue as u32, socket.socket_fd())?;
            let (receiver, sender, handle) = socket.split();
            state.sockets.push(handle);
            receivers[queue % queues].push(receiver);
            senders[queue % queues].get_or_insert(sender);
        }
        let mut copies = match state.shared_addresses.as_slice() {
            [] => None,
            shared => Some(NeighbourCopies::open(&self.interface, shared)?),
        };
        let mode = state.steering.attach(&self.interface)?;
        tracing::info!(
            interface = %self.interface.name,
            sockets = state.sockets.len(),
            program = match mode {
                AttachMode::Native => "in the driver",
                AttachMode::Generic => "in the generic path, slower: the driver does not support XDP here",
            },
            frames = if is_zero_copy { "zero-copy" } else { "copied by the kernel" },
            "AF_XDP port started"
        );
        let memory = PoolMemory::of_pool(&pool)?;
        receivers
            .into_iter()
            .zip(senders)
            .filter_map(|(receivers, sender)| Some((receivers, sender?)))
            .map(|(receivers, sender)| {
                let buffers = QueueBuffers::new(memory, &pool, is_zero_copy);
                let target = config.rx_desc.into();
                let receiver = XdpReceiver::new(receivers, copies.take(), buffers.clone(), target)?;
                Ok((receiver, XdpSender::new(sender, buffers)))
            })
            .collect()
    }

    /// Opens one socket for each receive queue of the NIC, since its hash may use any of them.
    fn open_sockets(
        &self,
        config: &PortConfig,
        pool: &Mempool,
        copy_mode: CopyMode,
    ) -> Result<Vec<XdpSocket>> {
        let memory = PoolMemory::of_pool(pool)?;
        // SAFETY: the queues keep the pool; each buffer is owned either by the kernel or by this
        // process, never by both.
        let umem = unsafe {
            Umem::new(
                memory.base,
                memory.bytes,
                u32::from(pool.buf_len()).min(MAX_CHUNK),
            )
        };
        let rings = SocketConfig {
            rx_entries: config.rx_desc.into(),
            tx_entries: config.tx_desc.into(),
            copy_mode,
        };
        let mut sockets: Vec<XdpSocket> = Vec::new();
        for queue in 0..self.interface.rx_queues {
            let socket = XdpSocket::open(&self.interface, queue, &umem, &rings, sockets.first())?;
            sockets.push(socket);
        }
        Ok(sockets)
    }

    pub(crate) fn set_allmulticast(&self, on: bool) -> Result<()> {
        self.lock_state().multicast = match on {
            true => Some(self.interface.join_all_multicast()?),
            false => None,
        };
        Ok(())
    }

    pub(crate) fn mac_address(&self) -> [u8; 6] {
        self.interface.mac
    }

    pub(crate) fn link_status(&self) -> Result<LinkStatus> {
        let now = XdpInterface::find_by_index(self.interface.index)?;
        Ok(LinkStatus {
            up: now.is_up && now.is_running,
            mbps: now.mbps.unwrap_or(0),
            mtu: Some(now.mtu),
            unserved_queues: now.rx_queues.saturating_sub(self.interface.rx_queues),
        })
    }

    /// Index of the interface.
    pub(crate) fn interface_index(&self) -> u32 {
        self.interface.index
    }

    /// Returns true if the interface was removed.
    pub(crate) fn is_gone(&self) -> bool {
        !XdpInterface::exists(self.interface.index)
    }

    /// Reads the loss counters; the queues keep no shared counts of packets.
    pub(crate) fn read_counters(&self) -> Result<PortCounters> {
        let mut sum = PortCounters::default();
        for socket in &self.lock_state().sockets {
            let counters = socket.read_counters()?;
            sum.rx_missed += counters.rx_ring_full;
            sum.rx_errors += counters.rx_dropped;
            sum.rx_no_buffer += counters.fill_ring_empty;
            sum.tx_errors += counters.tx_invalid;
        }
        Ok(sum)
    }

    /// Receives frames to this address and port from now on.
    pub(crate) fn add_claim(&self, claim: Claim) -> Result<()> {
        Ok(self.lock_state().steering.add_claim(claim)?)
    }

    /// Leaves frames to this address and port to the kernel again.
    pub(crate) fn remove_claim(&self, claim: Claim) -> Result<()> {
        Ok(self.lock_state().steering.remove_claim(claim)?)
    }
}
