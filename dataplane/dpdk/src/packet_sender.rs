//! Transmission on an AF_PACKET port: a packet socket of its own for each queue.
//!
//! DPDK's driver sends through a ring (`PACKET_TX_RING`). If the interface drops a frame of the ring,
//! as a veth does whose peer has a smaller MTU, the kernel offers the same frame again at each call and
//! never reaches the next one; frames that it refuses vanish without a count; and a full socket buffer
//! blocks the thread. sendmmsg(2) reports the fate of each frame.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use dpdk_sys as sys;
use siw_xdp::XdpInterface;

use crate::{BURST, Error, Result};

/// Segments of the frames of one call: more than `BURST` frames of a header, a reference and a trailer
/// have.
const SEGMENTS: usize = 4 * BURST;

/// The sending half of a queue.
pub(crate) struct PacketSender {
    socket: OwnedFd,
    messages: Box<[libc::mmsghdr]>,
    segments: Box<[libc::iovec]>,
}

// SAFETY: the pointers in both arrays are written before each use.
unsafe impl Send for PacketSender {}

/// Fate of the frames at the front of a batch.
pub(crate) enum PacketOutcome {
    /// The interface took this many.
    Sent(usize),
    /// The interface refused or dropped the first.
    Refused,
    /// The interface is down or gone: it takes none.
    Down,
    /// The socket's buffer is full.
    Busy,
}

impl PacketSender {
    /// Opens a socket that sends on the interface and receives nothing. `bypasses_qdisc`: frames go to
    /// the driver without queueing disciplines.
    pub(crate) fn open(interface: &XdpInterface, bypasses_qdisc: bool) -> Result<PacketSender> {
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
            socket,
            messages: vec![message; BURST].into(),
            segments: vec![segment; SEGMENTS].into(),
        })
    }

    /// Offers the packets to the interface; they stay the caller's.
    ///
    /// # Safety
    /// Each entry is a valid packet.
    pub(crate) unsafe fn send_frames(&mut self, packets: &[*mut sys::rte_mbuf]) -> PacketOutcome {
        let mut used = 0;
        let mut count = 0;
        for (message, packet) in self.messages.iter_mut().zip(packets) {
            let first = used;
            let mut segment = *packet;
            while !segment.is_null() && used < SEGMENTS {
                // SAFETY: the caller's promise holds for each segment of the packet.
                let mbuf = unsafe { &*segment };
                self.segments[used] = libc::iovec {
                    // SAFETY: the data begin within the segment's buffer.
                    iov_base: unsafe { mbuf.buf_addr.byte_add(usize::from(mbuf.data_off)) },
                    iov_len: usize::from(mbuf.data_len),
                };
                used += 1;
                segment = mbuf.next;
            }
            if !segment.is_null() {
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
            // SAFETY: the first `count` messages refer to segments that live through the call.
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
pub(crate) fn ignore_outgoing(interface: &XdpInterface) -> Result<()> {
    let folder = std::fs::read_dir("/proc/self/fd").map_err(|source| {
        Error::Xdp(siw_xdp::Error::Call {
            what: "listing open descriptors".into(),
            source,
        })
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
    Error::Xdp(siw_xdp::Error::Call {
        what: what.into(),
        source: std::io::Error::last_os_error(),
    })
}
