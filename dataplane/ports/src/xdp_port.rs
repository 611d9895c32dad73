//! A port on a NIC that stays with the kernel, using AF_XDP sockets: the pool's packet buffers are
//! the sockets' memory, so frames are neither copied nor converted on this side of the kernel.
//!
//! It does not use DPDK's AF_XDP driver, which leaves its XDP program on the NIC when the process
//! is killed (see the crate `siw_xdp`).
//!
//! ```text
//!   XdpPort::prepare   finds the interface, loads the program      nothing is attached yet
//!   XdpPort::start     a socket for each receive queue of the NIC  then the program is attached
//!     queue 0: sockets 0, n, 2n ...   queue 1: sockets 1, n+1 ...  of n queues of the port
//! ```

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use dpdk::{
    DriverTraits, Eal, Mempool, Offloads, PoolMemory, PortCaps, PortConfig, PortCounters,
    PortEvent, PortInfo,
};
use parking_lot::{Mutex, MutexGuard};
use siw_xdp::{
    AttachMode, Claim, ClaimKind, CopyMode, FrameMembership, NeighbourCopies, PACKET_HEADROOM,
    SocketConfig, SocketHandle, Umem, XdpInterface, XdpSocket, XdpSteering,
};

use crate::xdp_queue::{QueueBuffers, XdpReceiver, XdpSender};
use crate::{Error, LinkStatus, PortQueues, Result, RxQueue, TxQueue};

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
        mtu + FRAME_OVERHEAD as u16 + PACKET_HEADROOM - dpdk::HEADROOM
    }

    /// Traits of all AF_XDP links.
    pub fn driver_traits() -> &'static DriverTraits {
        DriverTraits::for_device(XDP_DRIVER)
    }
}

/// Name of the row of [`DriverTraits`].
const XDP_DRIVER: &str = "net_af_xdp";
/// Bytes around an IP packet: Ethernet header and VLAN tag; XDP does not see the FCS.
const FRAME_OVERHEAD: u32 = 18;
/// A chunk is at most a page.
const MAX_CHUNK: u32 = 4096;
/// The smallest MTU of IPv4.
const MIN_MTU: u32 = 68;
/// Entries of a ring: a power of two in this range.
const RING_ENTRIES: std::ops::RangeInclusive<u32> = 64..=16_384;

/// An AF_XDP port.
pub(crate) struct XdpPort {
    pub(crate) name: String,
    interface: XdpInterface,
    /// Packets dropped because the interface refused them. Each queue holds it: the port cannot be
    /// changed while there are any.
    refused: Arc<AtomicU64>,
    /// [`Self::detach`] was called.
    is_detached: AtomicBool,
    state: Mutex<XdpState>,
    /// Declared last: the pool of the state lives in it.
    _eal: Eal,
}

struct XdpState {
    steering: XdpSteering,
    copy_mode: CopyMode,
    shared_addresses: Vec<IpAddr>,
    config: Option<(PortConfig, Mempool)>,
    granted_caps: Option<PortCaps>,
    sockets: Vec<SocketHandle>,
    multicast: Option<FrameMembership>,
}

impl XdpPort {
    /// Finds the interface and loads the program. The interface does not change yet.
    ///
    /// # Errors
    /// The interface cannot be used, or a capability is missing.
    pub(crate) fn prepare(eal: &Eal, link: &XdpLink) -> Result<XdpPort> {
        let interface = XdpInterface::find_by_name(&link.interface)?;
        interface.check_usable(link.vlan.is_some())?;
        let mut steering = XdpSteering::load(link.kind, link.vlan, interface.rx_queues)?;
        for claim in &link.claims {
            steering.add_claim(*claim)?;
        }
        Ok(XdpPort {
            name: format!("af_xdp:{}", link.interface),
            interface,
            refused: Arc::default(),
            is_detached: AtomicBool::new(false),
            state: Mutex::new(XdpState {
                steering,
                copy_mode: link.copy_mode,
                shared_addresses: link.shared_addresses.clone(),
                config: None,
                granted_caps: None,
                sockets: Vec::new(),
                multicast: None,
            }),
            _eal: eal.clone(),
        })
    }

    fn lock_state(&self) -> MutexGuard<'_, XdpState> {
        self.state.lock()
    }

    /// Locks the state for a change of the port that requires all queues to be dropped. Queues are
    /// handed out under the same lock, so none appears between this check and the change.
    fn lock_unused(&self) -> Result<MutexGuard<'_, XdpState>> {
        let state = self.lock_state();
        match Arc::strong_count(&self.refused) - 1 {
            0 => Ok(state),
            queues => Err(dpdk::Error::QueuesInUse {
                port: self.name.clone(),
                queues,
            }
            .into()),
        }
    }

    fn is_attached(&self) -> bool {
        !self.is_detached.load(Ordering::Acquire)
    }

    fn describe(&self) -> PortInfo {
        PortInfo::without_offloads(
            XDP_DRIVER,
            MIN_MTU..=u32::from(XdpLink::MAX_MTU).min(self.interface.mtu),
            // A worker beyond the NIC's number of queues would have no socket.
            self.interface.rx_queues.min(u32::from(u16::MAX)) as u16,
        )
    }

    pub(crate) fn device_info(&self) -> Result<PortInfo> {
        match self.is_attached() {
            true => Ok(self.describe()),
            false => Err(dpdk::Error::Removed {
                port: self.name.clone(),
            }
            .into()),
        }
    }

    /// Checks and keeps a configuration. The pool of all queues is the first of `pools`.
    pub(crate) fn configure(&self, config: &PortConfig, pools: &[Mempool]) -> Result<PortCaps> {
        let mut state = self.lock_unused()?;
        let info = self.device_info()?;
        info.negotiate(&self.name, config, pools)?;
        let Some(pool) = pools.first() else {
            return Err(self.invalid_port("it needs a pool of packet buffers"));
        };
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
            return Err(dpdk::Error::Invalid {
                what: "length of packet buffers",
                value: pool.buf_len().to_string(),
                why: format!("AF_XDP needs {least} bytes at MTU {}", config.mtu),
            }
            .into());
        }
        // Buffers for the rings, and some in flight.
        let in_rings = self.interface.rx_queues * u32::from(config.rx_desc)
            + u32::from(config.tx_queues) * u32::from(config.tx_desc);
        if pool.capacity() < in_rings + u32::from(config.rx_desc) {
            return Err(dpdk::Error::Invalid {
                what: "number of packet buffers",
                value: pool.capacity().to_string(),
                why: format!(
                    "the rings of the {} queues of `{}` alone can hold {in_rings}: raise buffers in \
                     [dpdk], lower rx_descriptors, or ethtool -L {} combined 1",
                    self.interface.rx_queues, self.interface.name, self.interface.name
                ),
            }
            .into());
        }
        let caps = PortCaps {
            offloads: Offloads {
                rx_interrupt: config.offloads.rx_interrupt,
                ..Offloads::NONE
            },
            mtu: config.mtu,
            max_mtu: info.max_mtu as u16,
            rx_desc: config.rx_desc,
            tx_desc: config.tx_desc,
            tx_seg_max: 1,
            tx_mtu_seg_max: 1,
            reta_size: 0,
            rss_key_set: false,
        };
        state.config = Some((config, pool.clone()));
        state.granted_caps = Some(caps);
        Ok(caps)
    }

    pub(crate) fn granted_caps(&self) -> Option<PortCaps> {
        self.lock_state().granted_caps
    }

    fn invalid_port(&self, why: &str) -> Error {
        let invalid = dpdk::Error::Invalid {
            what: "port",
            value: self.name.clone(),
            why: why.to_owned(),
        };
        invalid.into()
    }

    /// Opens the sockets and attaches the program: claimed frames are received here from now on.
    pub(crate) fn start(&self) -> Result<Vec<PortQueues>> {
        let mut state = self.lock_unused()?;
        let Some((config, pool)) = state.config.clone() else {
            return Err(self.invalid_port("it has to be configured before it is started"));
        };
        let memory = PoolMemory::of_pool(&pool)?;
        let sockets = self.open_sockets(&config, &memory, state.copy_mode)?;
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
        receivers
            .into_iter()
            .zip(senders)
            .filter_map(|(receivers, sender)| Some((receivers, sender?)))
            .map(|(receivers, sender)| {
                let buffers = QueueBuffers::new(&memory, is_zero_copy);
                let (target, port) = (config.rx_desc.into(), self.refused.clone());
                let receiver =
                    XdpReceiver::new(receivers, copies.take(), buffers.clone(), target, port)?;
                let sender = XdpSender::new(sender, buffers, self.refused.clone());
                Ok((
                    Some(RxQueue::Xdp(Box::new(receiver))),
                    Some(TxQueue::Xdp(Box::new(sender))),
                ))
            })
            .collect()
    }

    /// Opens one socket for each receive queue of the NIC, since its hash may use any of them.
    fn open_sockets(
        &self,
        config: &PortConfig,
        memory: &PoolMemory,
        copy_mode: CopyMode,
    ) -> Result<Vec<XdpSocket>> {
        // SAFETY: the queues keep the pool; each buffer is owned either by the kernel or by this
        // process, never by both.
        let umem = unsafe {
            Umem::new(
                memory.base(),
                memory.bytes(),
                u32::from(memory.pool().buf_len()).min(MAX_CHUNK),
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

    /// Receives frames to every multicast address while the port exists.
    pub(crate) fn accept_all_multicast(&self) -> Result<()> {
        self.lock_state().multicast = Some(self.interface.join_all_multicast()?);
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

    /// Reports the removal of the interface.
    pub(crate) fn take_event(&self) -> Option<PortEvent> {
        let is_gone = self.is_attached() && !XdpInterface::exists(self.interface.index);
        is_gone.then_some(PortEvent::Removed)
    }

    /// Ends the use of the port, which is closed with its last handle. Fails while queues are in use.
    pub(crate) fn detach(&self) -> Result<()> {
        let _state = self.lock_unused()?;
        self.is_detached.store(true, Ordering::Release);
        Ok(())
    }

    /// Packets dropped on transmission because the interface refused them, on all queues.
    pub(crate) fn refused_packets(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
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
