//! Properties of a network interface, by ioctl: sysfs shows the interfaces of the namespace that it
//! was mounted in, which need not be that of the process.

use std::ffi::CString;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::attached::read_attached_program;
use crate::{Error, Result};

/// An interface in its state at the look-up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct XdpInterface {
    /// Its name.
    pub name: String,
    /// Its number.
    pub index: u32,
    /// Its Ethernet address.
    pub mac: [u8; 6],
    /// Bytes of IP packet in a frame.
    pub mtu: u32,
    /// Receive queues, each of which needs a socket.
    pub rx_queues: u32,
    /// True if the interface is up.
    pub is_up: bool,
    /// True if its link carries frames.
    pub is_running: bool,
    /// Mb/s; `None` if the driver does not know it.
    pub mbps: Option<u32>,
    /// The NIC strips the VLAN tag from received frames, so that XDP does not see it.
    pub strips_vlan: bool,
}

/// Offloads of an interface that change the frames that programs below the kernel's stack see.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct InterfaceOffloads {
    /// Packets that the kernel sends may have no checksum.
    pub leaves_checksums: bool,
    /// Packets that the kernel sends may be longer than the MTU (TSO).
    pub leaves_segmentation: bool,
    /// The kernel merges received segments before packet sockets get them (GRO).
    pub merges_segments: bool,
}

const ETHTOOL_GTXCSUM: u32 = 0x16;
const ETHTOOL_GTSO: u32 = 0x1e;
const ETHTOOL_GFLAGS: u32 = 0x25;
const ETHTOOL_GGRO: u32 = 0x2b;
const ETHTOOL_GCHANNELS: u32 = 0x3c;
const ETHTOOL_GSET: u32 = 0x01;
const ETHTOOL_FLAG_RX_VLAN: u32 = 1 << 8;
const UNKNOWN_SPEED: u32 = u32::MAX;

#[repr(C)]
#[derive(Default)]
struct EthtoolValue {
    command: u32,
    data: u32,
}

/// `struct ethtool_channels`
#[repr(C)]
#[derive(Default)]
struct EthtoolChannels {
    command: u32,
    max_rx: u32,
    max_tx: u32,
    max_other: u32,
    max_combined: u32,
    rx: u32,
    tx: u32,
    other: u32,
    combined: u32,
}

/// `struct ethtool_cmd`; the speed is in two halves.
#[repr(C)]
#[derive(Default)]
struct EthtoolSettings {
    command: u32,
    supported: u32,
    advertising: u32,
    speed_low: u16,
    duplex_to_debug: [u8; 6],
    max_packets: [u32; 2],
    speed_high: u16,
    rest: [u8; 14],
}

impl XdpInterface {
    /// Finds the interface of this name in the network namespace of the calling thread.
    ///
    /// # Errors
    /// No interface has this name.
    pub fn find_by_name(name: &str) -> Result<XdpInterface> {
        if name.is_empty() || name.len() >= libc::IFNAMSIZ || name.contains(['/', '\0', ' ']) {
            return Err(Error::InvalidName(name.to_owned()));
        }
        let text = CString::new(name).map_err(|_| Error::InvalidName(name.to_owned()))?;
        // SAFETY: a C string that lives through the call.
        let index = unsafe { libc::if_nametoindex(text.as_ptr()) };
        if index == 0 {
            return Err(Error::NoInterface(name.to_owned()));
        }
        let query = Query::open_socket(&text)?;
        let mut flags = query.new_request();
        query.ask_kernel(
            libc::SIOCGIFFLAGS,
            &mut flags,
            "reading the interface's flags",
        )?;
        let mut mtu = query.new_request();
        query.ask_kernel(libc::SIOCGIFMTU, &mut mtu, "reading the interface's MTU")?;
        let mut address = query.new_request();
        query.ask_kernel(
            libc::SIOCGIFHWADDR,
            &mut address,
            "reading the interface's address",
        )?;
        // SAFETY: each request was answered, which sets the member that is read here.
        let (flags, mtu, address) = unsafe {
            (
                i32::from(flags.ifr_ifru.ifru_flags),
                mtu.ifr_ifru.ifru_mtu,
                address.ifr_ifru.ifru_hwaddr.sa_data,
            )
        };
        let mut mac = [0; 6];
        for (to, from) in mac.iter_mut().zip(address) {
            *to = from as u8;
        }
        Ok(XdpInterface {
            name: name.to_owned(),
            index,
            mac,
            mtu: mtu.unsigned_abs(),
            rx_queues: query.rx_queues(),
            is_up: flags & libc::IFF_UP != 0,
            is_running: flags & libc::IFF_RUNNING != 0,
            mbps: query.read_speed(),
            strips_vlan: query.strips_vlan(),
        })
    }
}

impl XdpInterface {
    /// Finds the interface with this number in the network namespace of the calling thread.
    ///
    /// # Errors
    /// No interface has this number.
    pub fn find_by_index(index: u32) -> Result<XdpInterface> {
        let name = name_of(index);
        XdpInterface::find_by_name(
            &name.ok_or_else(|| Error::NoInterface(format!("number {index}")))?,
        )
    }

    /// Reads the offloads that are on; those that the driver does not report count as off.
    ///
    /// # Errors
    /// The operating system provides no socket.
    pub fn read_offloads(&self) -> Result<InterfaceOffloads> {
        let name = CString::new(self.name.as_str());
        let query = Query::open_socket(&name.map_err(|_| Error::InvalidName(self.name.clone()))?)?;
        let is_on = |command| query.read_value(command) != 0;
        Ok(InterfaceOffloads {
            leaves_checksums: is_on(ETHTOOL_GTXCSUM),
            leaves_segmentation: is_on(ETHTOOL_GTSO),
            merges_segments: is_on(ETHTOOL_GGRO),
        })
    }

    /// Returns whether the network namespace of the calling thread has an interface with this number. An
    /// interface keeps its number while it is renamed, and gets another in another namespace.
    pub fn exists(index: u32) -> bool {
        name_of(index).is_some()
    }

    /// The error of an interface that has an XDP program; `None` if it has none.
    pub(crate) fn attached_error(&self) -> Option<Error> {
        let id = read_attached_program(self.index)?;
        Some(Error::ProgramAttached {
            interface: self.name.clone(),
            program: format!(" (number {id}, see bpftool prog)"),
        })
    }

    /// Checks that AF_XDP can work on the interface now; `has_vlan`: with VLAN tags in frames.
    ///
    /// # Errors
    /// The interface is down, strips the tags, or has an XDP program.
    pub fn check_usable(&self, has_vlan: bool) -> Result<()> {
        if !self.is_up {
            return Err(Error::Down(self.name.clone()));
        }
        if has_vlan && self.strips_vlan {
            return Err(Error::StripsVlan(self.name.clone()));
        }
        self.attached_error().map_or(Ok(()), Err)
    }
}

/// The name of the interface with this number, in the network namespace of the calling thread.
fn name_of(index: u32) -> Option<String> {
    let mut name = [0; libc::IFNAMSIZ];
    // SAFETY: the buffer has the length that the call requires.
    let found = unsafe { libc::if_indextoname(index, name.as_mut_ptr()) };
    if found.is_null() {
        return None;
    }
    let bytes = name.iter().take_while(|byte| **byte != 0);
    let bytes: Vec<u8> = bytes.map(|byte| *byte as u8).collect();
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Keeps the reception of frames enabled on an interface that the kernel did not request from the NIC.
/// The kernel ends it with the process.
#[derive(Debug)]
pub struct FrameMembership {
    _socket: OwnedFd,
}

impl XdpInterface {
    /// Has the NIC receive all multicast frames, among them neighbour solicitations; the kernel counts
    /// the requests.
    ///
    /// # Errors
    /// A capability is missing.
    pub fn join_all_multicast(&self) -> Result<FrameMembership> {
        self.join(libc::PACKET_MR_ALLMULTI)
    }

    /// Has the NIC receive all frames (promiscuous mode); the kernel counts the requests.
    ///
    /// # Errors
    /// A capability is missing.
    pub fn join_all(&self) -> Result<FrameMembership> {
        self.join(libc::PACKET_MR_PROMISC)
    }

    fn join(&self, kind: libc::c_int) -> Result<FrameMembership> {
        // SAFETY: takes no address; the result is checked.
        let descriptor =
            unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        if descriptor < 0 {
            return Err(Error::last_call("opening a packet socket"));
        }
        // SAFETY: just opened, and not owned elsewhere.
        let socket = unsafe { OwnedFd::from_raw_fd(descriptor) };
        let request = libc::packet_mreq {
            mr_ifindex: self.index as libc::c_int,
            mr_type: kind as u16,
            mr_alen: 0,
            mr_address: [0; 8],
        };
        // SAFETY: the request lives through the call and has the length given.
        let result = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_ADD_MEMBERSHIP,
                (&raw const request).cast(),
                size_of_val(&request) as libc::socklen_t,
            )
        };
        if result < 0 {
            return Err(Error::last_call("receiving all frames"));
        }
        Ok(FrameMembership { _socket: socket })
    }
}

/// A socket for queries about one interface.
struct Query {
    socket: OwnedFd,
    name: [libc::c_char; libc::IFNAMSIZ],
}

impl Query {
    fn open_socket(name: &CString) -> Result<Query> {
        // SAFETY: takes no address; the result is checked.
        let descriptor =
            unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
        if descriptor < 0 {
            return Err(Error::last_call("opening a socket"));
        }
        let mut bytes = [0; libc::IFNAMSIZ];
        for (to, from) in bytes.iter_mut().zip(name.as_bytes()) {
            *to = *from as libc::c_char;
        }
        Ok(Query {
            // SAFETY: just opened, and not owned elsewhere.
            socket: unsafe { OwnedFd::from_raw_fd(descriptor) },
            name: bytes,
        })
    }

    fn new_request(&self) -> libc::ifreq {
        // SAFETY: a C structure of numbers and a union of numbers, for which zeros are valid.
        let mut request: libc::ifreq = unsafe { MaybeUninit::zeroed().assume_init() };
        request.ifr_name = self.name;
        request
    }

    fn ask_kernel(
        &self,
        number: libc::Ioctl,
        request: &mut libc::ifreq,
        what: &'static str,
    ) -> Result<()> {
        // SAFETY: each number used here reads and writes an ifreq.
        let result =
            unsafe { libc::ioctl(self.socket.as_raw_fd(), number, std::ptr::from_mut(request)) };
        if result < 0 {
            return Err(Error::last_call(what));
        }
        Ok(())
    }

    /// Asks the driver; returns false if it does not support the command.
    fn ask_driver<T>(&self, command: &mut T) -> bool {
        let mut request = self.new_request();
        request.ifr_ifru.ifru_data = std::ptr::from_mut(command).cast();
        // The commands used here write no more than their structures hold.
        self.ask_kernel(libc::SIOCETHTOOL, &mut request, "asking the driver")
            .is_ok()
    }

    /// Number of receive queues; one if the driver does not report it.
    fn rx_queues(&self) -> u32 {
        let mut channels = EthtoolChannels {
            command: ETHTOOL_GCHANNELS,
            ..EthtoolChannels::default()
        };
        if !self.ask_driver(&mut channels) {
            return 1;
        }
        (channels.combined + channels.rx).max(1)
    }

    fn read_speed(&self) -> Option<u32> {
        let mut settings = EthtoolSettings {
            command: ETHTOOL_GSET,
            ..EthtoolSettings::default()
        };
        if !self.ask_driver(&mut settings) {
            return None;
        }
        let mbps = u32::from(settings.speed_high) << 16 | u32::from(settings.speed_low);
        Some(mbps).filter(|mbps| *mbps != 0 && *mbps != UNKNOWN_SPEED)
    }

    fn strips_vlan(&self) -> bool {
        self.read_value(ETHTOOL_GFLAGS) & ETHTOOL_FLAG_RX_VLAN != 0
    }

    /// Reads a number by a command of `struct ethtool_value`; 0 if the driver does not support it.
    fn read_value(&self, command: u32) -> u32 {
        let mut value = EthtoolValue { command, data: 0 };
        match self.ask_driver(&mut value) {
            true => value.data,
            false => 0,
        }
    }
}
