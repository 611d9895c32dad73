//! A port on an interface of the kernel (AF_PACKET): DPDK's port, except for transmission and for the state
//! of the interface, which DPDK's driver does not report.
//!
//! DPDK's driver sends through a ring (`PACKET_TX_RING`). If the interface drops a frame of the ring,
//! as a veth does whose peer has a smaller MTU, the kernel offers the same frame again at each call and
//! never reaches the next one; frames that it refuses vanish without a count; and a full socket buffer
//! blocks the thread. Each queue therefore sends through a packet socket of its own: sendmmsg(2) reports
//! the fate of each frame.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use dpdk::{BURST, Mbuf, PortEvent, TxBatch};
use parking_lot::Mutex;
use siw_xdp::{FrameMembership, XdpInterface};

use crate::queue::TransmitQueue;
use crate::{Error, LinkStatus, PortQueues, Result, RxQueue, TxQueue};

/// Segments of the frames of one call: more than `BURST` frames of a header, a reference and a trailer
/// have.
const SEGMENTS: usize = 4 * BURST;

/// An AF_PACKET port.
pub(crate) struct PacketPort {
    pub(crate) dpdk: dpdk::Port,
    interface: Arc<PacketInterface>,
}

/// The interface of an AF_PACKET port.
struct PacketInterface {
    /// Its number, to which the driver's sockets are bound. Another interface that gets its name later has
    /// another number.
    index: u32,
    /// Frames go to its driver without queueing disciplines.
    bypasses_qdisc: bool,
    /// Frames that the interface receives for the port alone.
    memberships: Mutex<Vec<FrameMembership>>,
}

impl PacketPort {
    /// Adds to DPDK's port the interface of this name, which its devargs name.
    pub(crate) fn new(port: dpdk::Port, devargs: &str, name: &str) -> Result<PacketPort> {
        let interface = PacketInterface {
            index: XdpInterface::find_by_name(name)?.index,
            bypasses_qdisc: !devargs.contains("qdisc_bypass=0"),
            memberships: Mutex::default(),
        };
        Ok(PacketPort {
            dpdk: port,
            interface: Arc::new(interface),
        })
    }

    pub(crate) fn share(&self) -> PacketPort {
        PacketPort {
            dpdk: self.dpdk.share(),
            interface: self.interface.clone(),
        }
    }

    /// The interface in its present state.
    fn find_interface(&self) -> Result<XdpInterface> {
        Ok(XdpInterface::find_by_index(self.interface.index)?)
    }

    fn keep_membership(&self, membership: FrameMembership) {
        self.interface.memberships.lock().push(membership);
    }

    pub(crate) fn start(&mut self) -> Result<Vec<PortQueues>> {
        let queues = self.dpdk.start()?;
        let interface = self.find_interface()?;
        ignore_outgoing(&interface)?;
        let queues = queues.into_iter().map(|(rx, tx)| {
            let rx = rx.map(RxQueue::Dpdk);
            let open = |queue| PacketSender::open(queue, &interface, self.interface.bypasses_qdisc);
            let tx = tx.map(open).transpose()?;
            Ok((rx, tx.map(|sender| TxQueue::Packet(Box::new(sender)))))
        });
        queues.collect()
    }

    /// Receives frames to every multicast address while the port exists.
    pub(crate) fn accept_all_multicast(&self) -> Result<()> {
        self.keep_membership(self.find_interface()?.join_all_multicast()?);
        Ok(())
    }

    /// Receives all frames while the port exists: the interface keeps its own address.
    pub(crate) fn accept_all_addresses(&self) -> Result<()> {
        self.keep_membership(self.find_interface()?.join_all()?);
        Ok(())
    }

    /// Reads the state of the interface: the driver reports every one as up.
    pub(crate) fn link_status(&self) -> Result<LinkStatus> {
        let interface = self.find_interface()?;
        Ok(LinkStatus {
            up: interface.is_up && interface.is_running,
            mbps: interface.mbps.unwrap_or(0),
            mtu: Some(interface.mtu),
            unserved_queues: 0,
        })
    }

    /// Event of the device since the last call; the driver does not report the removal of the interface.
    pub(crate) fn take_event(&self) -> Option<PortEvent> {
        let event = self.dpdk.take_event();
        let is_gone = || self.dpdk.is_attached() && !XdpInterface::exists(self.interface.index);
        match event {
            Some(PortEvent::Removed) => event,
            _ if is_gone() => Some(PortEvent::Removed),
            _ => event,
        }
    }
}

/// A transmit queue of an AF_PACKET port.
pub struct PacketSender {
    /// DPDK's queue, which sends nothing. It keeps the port open, and counts refused packets.
    queue: dpdk::TxQueue,
    socket: OwnedFd,
    messages: Box<[libc::mmsghdr]>,
    segments: Box<[libc::iovec]>,
}

// SAFETY: the pointers in both arrays are written before each use.
unsafe impl Send for PacketSender {}

/// Fate of the frames at the front of a batch.
enum PacketOutcome {
    /// The interface took this many.
    Sent(usize),
    /// The interface refused or dropped the first.
    Refused,
    /// The interface is down or gone: it takes none.
    Down,
    /// The socket's buffer is full.
    Busy,
}

impl TransmitQueue for PacketSender {
    /// Sends until the batch is empty or the socket's buffer is full.
    #[inline(never)]
    fn tx_burst(&mut self, batch: &mut TxBatch) -> usize {
        let mut sent = 0;
        while !batch.is_empty() {
            match self.send_frames(batch.packets_mut()) {
                PacketOutcome::Sent(count) => {
                    sent += count;
                    batch.drain().take(count).for_each(drop);
                }
                PacketOutcome::Refused => self.queue.refuse_packets(batch, 1),
                PacketOutcome::Down => self.queue.refuse_packets(batch, batch.len()),
                PacketOutcome::Busy => break,
            }
        }
        sent
    }

    fn refuse_packets(&mut self, batch: &mut TxBatch, count: usize) {
        self.queue.refuse_packets(batch, count);
    }

    fn refused_packets(&self) -> u64 {
        self.queue.refused_packets()
    }

    /// Packets are freed when they are sent.
    fn done_cleanup(&mut self) -> usize {
        0
    }
}

impl PacketSender {
    /// Opens a socket that sends on the interface and receives nothing. `bypasses_qdisc`: frames go to
    /// the driver without queueing disciplines.
    fn open(
        queue: dpdk::TxQueue,
        interface: &XdpInterface,
        bypasses_qdisc: bool,
    ) -> Result<PacketSender> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: takes no address; the result is checked.
        let descriptor = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
        if descriptor < 0 {
            return Err(call_error("opening a packet socket"));
        }
        // SAFETY: just opened, and not owned elsewhere.
        let socket = unsafe { OwnedFd::from_raw_fd(descriptor) };
        set_option(
            socket.as_raw_fd(),
            libc::PACKET_QDISC_BYPASS,
            c_int::from(bypasses_qdisc),
        )?;
        // SAFETY: a C structure of numbers, for which zeros are valid.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_ifindex = interface.index as c_int;
        // SAFETY: the address lives through the call and has the length given.
        let result = unsafe {
            libc::bind(
                socket.as_raw_fd(),
                (&raw const address).cast(),
                size_of_val(&address) as libc::socklen_t,
            )
        };
        if result < 0 {
            return Err(call_error("binding a packet socket"));
        }
        // SAFETY: a C structure of numbers and pointers, for which zeros are valid.
        let message: libc::mmsghdr = unsafe { std::mem::zeroed() };
        let segment = libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        Ok(PacketSender {
            queue,
            socket,
            messages: vec![message; BURST].into(),
            segments: vec![segment; SEGMENTS].into(),
        })
    }

    /// Offers the packets to the interface; they stay the caller's.
    fn send_frames(&mut self, packets: &[Mbuf]) -> PacketOutcome {
        let mut used = 0;
        let mut count = 0;
        for (message, packet) in self.messages.iter_mut().zip(packets) {
            let first = used;
            let mut left = packet.segments();
            for (place, segment) in self.segments[first..].iter_mut().zip(&mut left) {
                *place = libc::iovec {
                    iov_base: segment.as_ptr().cast_mut().cast(),
                    iov_len: segment.len(),
                };
                used += 1;
            }
            if left.next().is_some() {
                // The rest of the burst follows in the next call.
                break;
            }
            message.msg_hdr.msg_iov = &raw mut self.segments[first];
            message.msg_hdr.msg_iovlen = used - first;
            count += 1;
        }
        if count == 0 {
            return PacketOutcome::Refused;
        }
        loop {
            // SAFETY: the first `count` messages refer to segments of `packets`, which live through the call and
            // are only read.
            let sent = unsafe {
                libc::sendmmsg(
                    self.socket.as_raw_fd(),
                    self.messages.as_mut_ptr(),
                    count,
                    libc::MSG_DONTWAIT,
                )
            };
            if sent > 0 {
                return PacketOutcome::Sent(sent as usize);
            }
            match std::io::Error::last_os_error().raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EAGAIN) => return PacketOutcome::Busy,
                Some(libc::ENETDOWN | libc::ENXIO | libc::ENODEV) => return PacketOutcome::Down,
                // EMSGSIZE: longer than the interface's MTU. ENOBUFS: dropped by its driver, as by a
                // veth whose peer has a smaller MTU. EFAULT: registered memory without a page.
                _ => return PacketOutcome::Refused,
            }
        }
    }
}

/// Keeps the packet sockets that DPDK's driver has on the interface from receiving the frames that
/// other sockets send, such as a [`PacketSender`].
fn ignore_outgoing(interface: &XdpInterface) -> Result<()> {
    let folder = std::fs::read_dir("/proc/self/fd").map_err(|source| siw_xdp::Error::Call {
        what: "listing open descriptors".into(),
        source,
    })?;
    let descriptors = folder
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<RawFd>().ok());
    for descriptor in descriptors {
        if receives_all_of(descriptor, interface.index) {
            set_option(descriptor, libc::PACKET_IGNORE_OUTGOING, 1)?;
        }
    }
    Ok(())
}

/// Returns true if the descriptor is a packet socket that receives all frames of the interface.
fn receives_all_of(descriptor: RawFd, interface: u32) -> bool {
    let mut address = MaybeUninit::<libc::sockaddr_ll>::zeroed();
    let mut len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: at most `len` bytes are written; other kinds of descriptors fail.
    let result = unsafe { libc::getsockname(descriptor, address.as_mut_ptr().cast(), &mut len) };
    // SAFETY: a C structure of numbers, for which zeros are valid.
    let address = unsafe { address.assume_init() };
    result == 0
        && address.sll_family == libc::AF_PACKET as u16
        && address.sll_ifindex == interface as c_int
        && u16::from_be(address.sll_protocol) == libc::ETH_P_ALL as u16
}

fn set_option(descriptor: RawFd, option: c_int, value: c_int) -> Result<()> {
    // SAFETY: the value lives through the call and has the length given.
    let result = unsafe {
        libc::setsockopt(
            descriptor,
            libc::SOL_PACKET,
            option,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    if result < 0 {
        return Err(call_error("setting an option of a packet socket"));
    }
    Ok(())
}

fn call_error(what: &str) -> Error {
    Error::Kernel(siw_xdp::Error::Call {
        what: what.into(),
        source: std::io::Error::last_os_error(),
    })
}
