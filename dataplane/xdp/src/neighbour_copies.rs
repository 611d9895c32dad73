//! Copies of the frames from which siwd learns a neighbour's Ethernet address (ARP replies and
//! neighbour advertisements), on an interface whose addresses it shares with the kernel. These frames
//! go to the kernel, and an XDP program cannot send a frame two ways; but the kernel copies each frame
//! that it receives to packet sockets. So siwd sends its own requests, the kernel answers the requests
//! of others, and both receive the replies.
//!
//! Each family has a packet socket with a filter, so that it costs other traffic next to nothing. Its
//! ring is in memory shared with the kernel (TPACKET_V2 of packet(7)): checking for a frame is one
//! load.

use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::{Error, Result, XdpInterface};

/// Bytes of a slot of the ring; the expected frames have at most 120.
const SLOT_BYTES: usize = 512;
/// Slots of a ring, two pages.
const SLOTS: usize = 64;
const RING_BYTES: usize = SLOT_BYTES * SLOTS;

const ETHERNET_BYTES: u32 = 14;
const ARP_OPERATION: u32 = ETHERNET_BYTES + 6;
const ARP_REPLY: u32 = 2;
const IPV6_NEXT_HEADER: u32 = ETHERNET_BYTES + 6;
const NEXT_HEADER_ICMPV6: u32 = 58;
const ICMPV6_TYPE: u32 = ETHERNET_BYTES + 40;
const NEIGHBOUR_ADVERTISEMENT: u32 = 136;

/// The copies, for both families if both are used.
pub struct NeighbourCopies {
    rings: Vec<PacketRing>,
}

struct PacketRing {
    slots: NonNull<u8>,
    next: usize,
    socket: OwnedFd,
}

// SAFETY: memory shared with the kernel, bound to no thread.
unsafe impl Send for PacketRing {}

impl NeighbourCopies {
    /// Receives copies on the interface from now on, for the families of `addresses`.
    ///
    /// # Errors
    /// A capability is missing.
    pub fn open(interface: &XdpInterface, addresses: &[IpAddr]) -> Result<NeighbourCopies> {
        let mut rings = Vec::new();
        if addresses.iter().any(IpAddr::is_ipv4) {
            let wanted = Filter {
                protocol: libc::ETH_P_ARP,
                conditions: vec![(HALF, ARP_OPERATION, ARP_REPLY)],
            };
            rings.push(PacketRing::open(interface, &wanted)?);
        }
        if addresses.iter().any(IpAddr::is_ipv6) {
            let wanted = Filter {
                protocol: libc::ETH_P_IPV6,
                conditions: vec![
                    (BYTE, IPV6_NEXT_HEADER, NEXT_HEADER_ICMPV6),
                    (BYTE, ICMPV6_TYPE, NEIGHBOUR_ADVERTISEMENT),
                ],
            };
            rings.push(PacketRing::open(interface, &wanted)?);
        }
        Ok(NeighbourCopies { rings })
    }

    /// Returns whether a frame waits.
    #[inline]
    pub fn has_frame(&self) -> bool {
        self.rings.iter().any(PacketRing::has_frame)
    }

    /// Passes the next frame to `take`; returns false if there is none.
    #[inline]
    pub fn take_frame(&mut self, take: impl FnOnce(&[u8])) -> bool {
        match self.rings.iter_mut().find(|ring| ring.has_frame()) {
            Some(ring) => {
                ring.take_frame(take);
                true
            }
            None => false,
        }
    }

    /// Descriptors that are readable while a frame waits.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.rings.iter().map(|ring| ring.socket.as_fd())
    }
}

/// Sizes of classic BPF's loads.
const BYTE: u16 = 0x10;
const HALF: u16 = 0x08;
const LOAD_ABSOLUTE: u16 = 0x20;
const JUMP_EQUAL: u16 = 0x05 | 0x10;
const RETURN: u16 = 0x06;

/// Matches frames of an Ethernet type with given values in given fields.
struct Filter {
    protocol: libc::c_int,
    /// Size, offset and value of each field.
    conditions: Vec<(u16, u32, u32)>,
}

impl Filter {
    fn instructions(&self) -> Vec<libc::sock_filter> {
        let instruction = |code, if_false, k| libc::sock_filter {
            code,
            jt: 0,
            jf: if_false,
            k,
        };
        let mut code = Vec::new();
        for (index, (size, offset, value)) in self.conditions.iter().enumerate() {
            // Distance to the refusal: over the remaining conditions and the acceptance.
            let left = self.conditions.len() - index - 1;
            code.push(instruction(LOAD_ABSOLUTE | size, 0, *offset));
            code.push(instruction(JUMP_EQUAL, left as u8 * 2 + 1, *value));
        }
        code.push(instruction(RETURN, 0, SLOT_BYTES as u32));
        code.push(instruction(RETURN, 0, 0));
        code
    }
}

impl PacketRing {
    fn open(interface: &XdpInterface, filter: &Filter) -> Result<PacketRing> {
        // Not bound to a protocol yet, so that nothing arrives before the filter is attached.
        // SAFETY: takes no address; the result is checked.
        let descriptor =
            unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        if descriptor < 0 {
            return Err(Error::last_call("opening a packet socket"));
        }
        // SAFETY: just opened, and not owned elsewhere.
        let socket = unsafe { OwnedFd::from_raw_fd(descriptor) };
        let mut code = filter.instructions();
        let program = libc::sock_fprog {
            len: code.len() as u16,
            filter: code.as_mut_ptr(),
        };
        set_option(&socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)?;
        let version = libc::tpacket_versions::TPACKET_V2 as libc::c_int;
        set_option(&socket, libc::SOL_PACKET, libc::PACKET_VERSION, &version)?;
        let request = libc::tpacket_req {
            tp_block_size: RING_BYTES as u32,
            tp_block_nr: 1,
            tp_frame_size: SLOT_BYTES as u32,
            tp_frame_nr: SLOTS as u32,
        };
        set_option(&socket, libc::SOL_PACKET, libc::PACKET_RX_RING, &request)?;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let slots = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                RING_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                socket.as_raw_fd(),
                0,
            )
        };
        let slots = match NonNull::new(slots.cast::<u8>()) {
            Some(slots) if slots.as_ptr().cast() != libc::MAP_FAILED => slots,
            _ => return Err(Error::last_call("mapping the ring of a packet socket")),
        };
        let ring = PacketRing {
            slots,
            next: 0,
            socket,
        };
        ring.bind(interface, filter.protocol)?;
        Ok(ring)
    }

    fn bind(&self, interface: &XdpInterface, protocol: libc::c_int) -> Result<()> {
        // SAFETY: a C structure of numbers, for which zeros are valid.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = (protocol as u16).to_be();
        address.sll_ifindex = interface.index as libc::c_int;
        // SAFETY: the address lives through the call and has the length given.
        let result = unsafe {
            libc::bind(
                self.socket.as_raw_fd(),
                (&raw const address).cast(),
                size_of_val(&address) as libc::socklen_t,
            )
        };
        if result < 0 {
            return Err(Error::last_call("binding a packet socket"));
        }
        Ok(())
    }

    fn header(&self) -> NonNull<libc::tpacket2_hdr> {
        // SAFETY: `next` is below SLOTS, so that the slot lies within the mapping.
        unsafe { self.slots.add(self.next * SLOT_BYTES).cast() }
    }

    fn status(&self) -> &AtomicU32 {
        // SAFETY: the first field of the header is a u32, aligned, and shared with the kernel.
        unsafe { self.header().cast().as_ref() }
    }

    #[inline]
    fn has_frame(&self) -> bool {
        // Acquire: the kernel wrote the frame before.
        self.status().load(Ordering::Acquire) & libc::TP_STATUS_USER != 0
    }

    fn take_frame(&mut self, take: impl FnOnce(&[u8])) {
        // SAFETY: the kernel does not access a slot of this status. Offset and length are checked
        // against the slot.
        let frame = unsafe {
            let header = self.header().as_ref();
            let offset = usize::from(header.tp_mac).min(SLOT_BYTES);
            let bytes = (header.tp_snaplen as usize).min(SLOT_BYTES - offset);
            let start = self.header().cast::<u8>().add(offset);
            std::slice::from_raw_parts(start.as_ptr(), bytes)
        };
        take(frame);
        // Release: the frame was read before.
        self.status()
            .store(libc::TP_STATUS_KERNEL, Ordering::Release);
        self.next = (self.next + 1) % SLOTS;
    }
}

impl Drop for PacketRing {
    fn drop(&mut self) {
        // SAFETY: mapped by `open`, and no longer used.
        unsafe {
            libc::munmap(self.slots.as_ptr().cast(), RING_BYTES);
        }
    }
}

fn set_option<T>(
    socket: &OwnedFd,
    level: libc::c_int,
    option: libc::c_int,
    value: &T,
) -> Result<()> {
    // SAFETY: the value lives through the call and has the length given.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            std::ptr::from_ref(value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    };
    if result < 0 {
        return Err(Error::last_call("setting up a packet socket"));
    }
    Ok(())
}
