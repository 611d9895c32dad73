//! Station of the lab on a link: sends and receives Ethernet frames, answers ARP or neighbor solicitations
//! and echo requests for its address, and hands TCP segments to the connection that they belong to.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use etherparse::{
    ArpHardwareId, ArpOperation, ArpPacket, EtherType, Ethernet2Header, IpEcn, IpFragOffset,
    IpNumber, Ipv4Header, Ipv6Header, TcpHeader, UdpHeader,
};
use parking_lot::{Condvar, Mutex};

use crate::impair::{Counts, Places, Profile, Way};

/// Splitmix64: derives the random values of an instance from the seed of the run.
pub fn mix(seed: u64, name: &str) -> u64 {
    let mut value = name.bytes().fold(seed, |v, octet| {
        (v ^ u64::from(octet)).wrapping_mul(0x0100_0000_01B3)
    });
    value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    value = (value ^ value >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    value = (value ^ value >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ value >> 31
}

pub type Mac = [u8; 6];

/// Places of the ports in a TCP header.
const SOURCE: usize = 0;
const DESTINATION: usize = 2;

const BROADCAST: Mac = [0xFF; 6];

const NEIGHBOR_SOLICITATION: u8 = 135;
const NEIGHBOR_ADVERTISEMENT: u8 = 136;

/// Longest sleep of the receiving thread, and so the delay of its end.
const RECEIVE_WAIT: Duration = Duration::from_millis(50);

pub trait FrameSender: Send {
    fn send(&mut self, frame: &[u8]) -> io::Result<()>;
}

pub trait FrameReceiver: Send {
    /// The next frame; `None` after a while without one.
    fn receive(&mut self) -> io::Result<Option<Vec<u8>>>;
}

pub type Link = (Box<dyn FrameSender>, Box<dyn FrameReceiver>);

struct PacketSender(Box<dyn pnet_datalink::DataLinkSender>);
struct PacketReceiver(Box<dyn pnet_datalink::DataLinkReceiver>);

impl FrameSender for PacketSender {
    fn send(&mut self, frame: &[u8]) -> io::Result<()> {
        self.0.send_to(frame, None).unwrap_or(Ok(()))
    }
}

impl FrameReceiver for PacketReceiver {
    fn receive(&mut self) -> io::Result<Option<Vec<u8>>> {
        match self.0.next() {
            Ok(frame) => Ok(Some(frame.to_vec())),
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
                ) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

/// Opens an AF_PACKET socket on an interface of this network namespace.
pub fn packet_link(interface: &str) -> Result<Link> {
    let all = pnet_datalink::interfaces();
    let Some(found) = all.iter().find(|i| i.name == interface) else {
        let names: Vec<_> = all.iter().map(|i| i.name.as_str()).collect();
        bail!(
            "interface {interface} does not exist; there are {}",
            names.join(", ")
        );
    };
    if !found.is_up() {
        bail!("interface {interface} is down (ip link set {interface} up)");
    }
    let config = pnet_datalink::Config {
        read_timeout: Some(RECEIVE_WAIT),
        read_buffer_size: 65_536,
        write_buffer_size: 65_536,
        promiscuous: true,
        ..Default::default()
    };
    match pnet_datalink::channel(found, config) {
        Ok(pnet_datalink::Channel::Ethernet(sender, receiver)) => Ok((
            Box::new(PacketSender(sender)),
            Box::new(PacketReceiver(receiver)),
        )),
        Ok(_) => bail!("interface {interface} is no Ethernet"),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            bail!(
                "no permission for a packet socket on {interface}: run as root or with CAP_NET_RAW"
            )
        }
        Err(error) => Err(error).with_context(|| format!("cannot open interface {interface}")),
    }
}

struct MemorySender(Sender<Vec<u8>>);
struct MemoryReceiver(Receiver<Vec<u8>>);

impl FrameSender for MemorySender {
    fn send(&mut self, frame: &[u8]) -> io::Result<()> {
        // The other end may be gone already.
        let _ = self.0.send(frame.to_vec());
        Ok(())
    }
}

impl FrameReceiver for MemoryReceiver {
    fn receive(&mut self) -> io::Result<Option<Vec<u8>>> {
        match self.0.recv_timeout(RECEIVE_WAIT) {
            Ok(frame) => Ok(Some(frame)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }
}

/// Both ends of a link within this process.
pub fn memory_link() -> (Link, Link) {
    let (to_b, at_b) = channel();
    let (to_a, at_a) = channel();
    (
        (Box::new(MemorySender(to_b)), Box::new(MemoryReceiver(at_a))),
        (Box::new(MemorySender(to_a)), Box::new(MemoryReceiver(at_b))),
    )
}

/// TCP segment as received, with its frame.
#[derive(Debug, Clone)]
pub struct Received {
    pub at: Instant,
    pub from: SocketAddr,
    pub from_mac: Mac,
    pub header: TcpHeader,
    pub payload: Vec<u8>,
    pub frame: Vec<u8>,
}

/// UDP datagram as received, with its frame.
#[derive(Debug, Clone)]
pub struct Datagram {
    pub at: Instant,
    pub from: SocketAddr,
    pub payload: Vec<u8>,
    pub frame: Vec<u8>,
}

#[derive(Default)]
struct Routes {
    datagrams: HashMap<u16, Sender<Datagram>>,
    connections: HashMap<(u16, SocketAddr), Sender<Received>>,
    listeners: HashMap<u16, Sender<Received>>,
}

pub struct Station {
    pub mac: Mac,
    pub ip: IpAddr,
    sender: Mutex<Box<dyn FrameSender>>,
    routes: Mutex<Routes>,
    neighbours: Mutex<HashMap<IpAddr, Mac>>,
    neighbour_found: Condvar,
    next_port: AtomicU16,
    /// Identification of the next fragmented packet.
    next_fragment: AtomicU16,
    stop: AtomicBool,
    starting: Mutex<bool>,
    started: Condvar,
    /// Impaired paths, by the station's port.
    paths: Mutex<HashMap<u16, Arc<Path>>>,
}

/// Both directions of a connection's impaired path.
struct Path {
    out: Mutex<Way>,
    back: Mutex<Way>,
}

/// Impairs the segments of a port until it is dropped.
pub struct Impaired {
    station: Arc<Station>,
    port: u16,
    path: Arc<Path>,
}

impl Impaired {
    /// Segments from the station, and to it.
    pub fn counts(&self) -> (Counts, Counts) {
        (
            self.path.out.lock().counts(),
            self.path.back.lock().counts(),
        )
    }
}

impl Drop for Impaired {
    fn drop(&mut self) {
        let mut paths = self.station.paths.lock();
        if paths
            .get(&self.port)
            .is_some_and(|path| Arc::ptr_eq(path, &self.path))
        {
            paths.remove(&self.port);
        }
    }
}

/// Far end of the way out: the link.
struct ToLink(Arc<Station>);
/// Far end of the way back: the station.
struct ToStation(Arc<Station>);

impl FrameSender for ToLink {
    fn send(&mut self, frame: &[u8]) -> io::Result<()> {
        self.0.sender.lock().send(frame)
    }
}

impl FrameSender for ToStation {
    fn send(&mut self, frame: &[u8]) -> io::Result<()> {
        let _ = self.0.on_frame(frame.to_vec());
        Ok(())
    }
}

/// Permission to send an MPA Request. `rping -s` mixes up two requests that arrive before it has accepted
/// the first, and then answers neither.
pub struct StartUp(Arc<Station>);

impl Drop for StartUp {
    fn drop(&mut self) {
        *self.0.starting.lock() = false;
        self.0.started.notify_one();
    }
}

/// Ends the receiving thread of a station when dropped.
pub struct StationGuard {
    pub station: Arc<Station>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for StationGuard {
    fn drop(&mut self) {
        self.station.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Unusual headers around a segment of TCP.
#[derive(Debug, Clone, Copy, Default)]
pub struct Dress {
    /// 802.1Q tag with a priority and VLAN 0.
    pub is_tagged: bool,
    /// Congestion Experienced.
    pub is_congested: bool,
    /// Options: of IPv4, or the hop-by-hop and destination options of IPv6.
    pub is_extended: bool,
}

impl Dress {
    pub fn is_plain(self) -> bool {
        !(self.is_tagged || self.is_congested || self.is_extended)
    }
}

/// IP packet for this link.
struct Packet<'a> {
    from_mac: Mac,
    from: IpAddr,
    to: IpAddr,
    protocol: IpNumber,
    payload: &'a [u8],
}

fn octets_of(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

/// Complement of the sum of 16-bit words (RFC 1071).
pub(crate) fn complement(octets: &[u8]) -> u16 {
    let words = octets.chunks(2).map(|pair| {
        let low = pair.get(1).copied().unwrap_or(0);
        u64::from(u16::from_be_bytes([pair[0], low]))
    });
    let mut sum: u64 = words.sum();
    while sum > 0xFFFF {
        sum = (sum >> 16) + (sum & 0xFFFF);
    }
    !(sum as u16)
}

/// Checksum of a message with the pseudo header of IPv4 or IPv6; zero over a message with a right one.
pub(crate) fn checksum(from: IpAddr, to: IpAddr, protocol: IpNumber, message: &[u8]) -> u16 {
    let mut octets = octets_of(from);
    octets.extend(octets_of(to));
    octets.extend((message.len() as u32).to_be_bytes());
    octets.extend([0, 0, 0, protocol.0]);
    octets.extend(message);
    complement(&octets)
}

impl Station {
    pub fn start(link: Link, ip: IpAddr, first_port: u16) -> StationGuard {
        let (sender, mut receiver) = link;
        let octets = *octets_of(ip).last_chunk::<4>().unwrap_or(&[0; 4]);
        let station = Arc::new(Station {
            mac: [0x02, 0x1A, octets[0], octets[1], octets[2], octets[3]],
            ip,
            sender: Mutex::new(sender),
            routes: Mutex::default(),
            neighbours: Mutex::default(),
            neighbour_found: Condvar::new(),
            next_port: AtomicU16::new(first_port),
            next_fragment: AtomicU16::new(first_port),
            stop: AtomicBool::new(false),
            starting: Mutex::new(false),
            started: Condvar::new(),
            paths: Mutex::default(),
        });
        let shared = station.clone();
        let thread = std::thread::spawn(move || {
            while !shared.stop.load(Ordering::Relaxed) {
                match receiver.receive() {
                    Ok(Some(frame)) => match shared.path_of(&frame, DESTINATION) {
                        Some(path) => path.back.lock().pass(frame),
                        // A frame that is not for this station, or malformed, is ignored.
                        None => {
                            let _ = shared.on_frame(frame);
                        }
                    },
                    Ok(None) => {}
                    Err(_) => break,
                }
            }
        });
        StationGuard {
            station,
            thread: Some(thread),
        }
    }

    pub fn send(&self, frame: &[u8]) {
        if let Some(path) = self.path_of(frame, SOURCE) {
            return path.out.lock().pass(frame.to_vec());
        }
        // A full queue loses the frame, as a network may; retransmission repairs it.
        let _ = self.sender.lock().send(frame);
    }

    /// The impaired path of a frame whose port at `place` of the TCP header has one.
    fn path_of(&self, frame: &[u8], place: usize) -> Option<Arc<Path>> {
        let paths = self.paths.lock();
        if paths.is_empty() {
            return None;
        }
        let at = Places::of(frame)?.tcp + place;
        let port = u16::from_be_bytes([frame[at], frame[at + 1]]);
        paths.get(&port).cloned()
    }

    /// Impairs the segments that leave `port` as from the left, and those that come to it as from the right.
    pub fn impair(self: &Arc<Self>, port: u16, profile: &Profile, seed: u64) -> Impaired {
        let out = Box::new(ToLink(self.clone()));
        let back = Box::new(ToStation(self.clone()));
        let path = Arc::new(Path {
            out: Mutex::new(Way::start(&profile.left, mix(seed, "left"), out)),
            back: Mutex::new(Way::start(&profile.right, mix(seed, "right"), back)),
        });
        self.paths.lock().insert(port, path.clone());
        Impaired {
            station: self.clone(),
            port,
            path,
        }
    }

    /// Waits until no other stream awaits a Reply.
    pub fn begin_start_up(self: &Arc<Self>, patience: Duration) -> Option<StartUp> {
        let mut starting = self.starting.lock();
        let waited = self
            .started
            .wait_while_for(&mut starting, |starting| *starting, patience);
        if waited.timed_out() {
            return None;
        }
        *starting = true;
        Some(StartUp(self.clone()))
    }

    /// A local port that no connection of this run used.
    pub fn port(&self) -> u16 {
        loop {
            let port = self.next_port.fetch_add(1, Ordering::Relaxed);
            if port >= 20_000 {
                return port;
            }
            self.next_port.store(20_000, Ordering::Relaxed);
        }
    }

    fn on_frame(&self, frame: Vec<u8>) -> Option<()> {
        let (ethernet, rest) = Ethernet2Header::from_slice(&frame).ok()?;
        let packet = match ethernet.ether_type {
            EtherType::ARP => return self.on_arp(rest),
            EtherType::IPV4 => {
                let (ip, rest) = Ipv4Header::from_slice(rest).ok()?;
                Packet {
                    from_mac: ethernet.source,
                    from: Ipv4Addr::from(ip.source).into(),
                    to: Ipv4Addr::from(ip.destination).into(),
                    protocol: ip.protocol,
                    payload: rest.get(..usize::from(ip.payload_len().ok()?))?,
                }
            }
            EtherType::IPV6 => {
                let (ip, rest) = Ipv6Header::from_slice(rest).ok()?;
                Packet {
                    from_mac: ethernet.source,
                    from: Ipv6Addr::from(ip.source).into(),
                    to: Ipv6Addr::from(ip.destination).into(),
                    protocol: ip.next_header,
                    payload: rest.get(..usize::from(ip.payload_length))?,
                }
            }
            _ => return None,
        };
        if packet.protocol == IpNumber::IPV6_ICMP {
            return self.on_icmp6(&packet);
        }
        if ethernet.destination != self.mac || packet.to != self.ip {
            return None;
        }
        match packet.protocol {
            IpNumber::TCP => self.on_tcp(&packet, &frame),
            IpNumber::UDP => self.on_udp(&packet, &frame),
            IpNumber::ICMP => self.on_icmp(&packet),
            _ => None,
        }
    }

    fn on_arp(&self, octets: &[u8]) -> Option<()> {
        let arp = ArpPacket::from_slice(octets).ok()?;
        let sender_mac: Mac = arp.sender_hw_addr().try_into().ok()?;
        let sender_ip: [u8; 4] = arp.sender_protocol_addr().try_into().ok()?;
        if arp.target_protocol_addr() != octets_of(self.ip) {
            return None;
        }
        self.learn(Ipv4Addr::from(sender_ip).into(), sender_mac);
        if arp.operation == ArpOperation::REQUEST {
            self.send_arp(ArpOperation::REPLY, sender_mac, sender_mac, &sender_ip);
        }
        Some(())
    }

    fn learn(&self, ip: IpAddr, mac: Mac) {
        self.neighbours.lock().insert(ip, mac);
        self.neighbour_found.notify_all();
    }

    fn send_arp(&self, operation: ArpOperation, to: Mac, target: Mac, ip: &[u8; 4]) {
        let arp = ArpPacket::new(
            ArpHardwareId::ETHERNET,
            EtherType::IPV4,
            operation,
            &self.mac,
            &octets_of(self.ip),
            &target,
            ip,
        );
        if let Ok(arp) = arp {
            self.send(&self.ethernet(to, EtherType::ARP, &arp.to_bytes()));
        }
    }

    /// Echo requests and neighbor discovery of IPv6 (RFC 4861 sections 4.3 and 4.4).
    fn on_icmp6(&self, packet: &Packet) -> Option<()> {
        let payload = packet.payload;
        match *payload.first()? {
            NEIGHBOR_SOLICITATION if payload.get(8..24)? == octets_of(self.ip) => {
                self.learn(packet.from, packet.from_mac);
                self.send_neighbor(
                    NEIGHBOR_ADVERTISEMENT,
                    packet.from_mac,
                    packet.from,
                    self.ip,
                );
            }
            NEIGHBOR_ADVERTISEMENT => {
                let target: [u8; 16] = payload.get(8..24)?.try_into().ok()?;
                self.learn(Ipv6Addr::from(target).into(), packet.from_mac);
            }
            128 if packet.to == self.ip => {
                let mut reply = payload.to_vec();
                reply[0] = 129;
                self.send_icmp6(packet.from_mac, packet.from, reply);
            }
            _ => {}
        }
        Some(())
    }

    /// A solicitation or advertisement of `target` with this station's link-layer address.
    fn send_neighbor(&self, kind: u8, mac: Mac, to: IpAddr, target: IpAddr) {
        let mut octets = vec![0; 8];
        octets[0] = kind;
        let option = if kind == NEIGHBOR_ADVERTISEMENT {
            // Solicited, and overrides what the neighbor knows.
            octets[4] = 0x60;
            2
        } else {
            1
        };
        octets.extend(octets_of(target));
        octets.extend([option, 1]);
        octets.extend(self.mac);
        self.send_icmp6(mac, to, octets);
    }

    fn send_icmp6(&self, mac: Mac, to: IpAddr, mut octets: Vec<u8>) {
        self.sum(to, IpNumber::IPV6_ICMP, &mut octets, 2);
        self.send(&self.packet(mac, to, IpNumber::IPV6_ICMP, &octets));
    }

    /// Writes the checksum with the pseudo header of IP into two octets of a message to `to`.
    pub fn sum(&self, to: IpAddr, protocol: IpNumber, octets: &mut [u8], at: usize) {
        octets[at..at + 2].fill(0);
        let sum = checksum(self.ip, to, protocol, octets);
        octets[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    }

    fn ethernet(&self, to: Mac, ether_type: EtherType, payload: &[u8]) -> Vec<u8> {
        let header = Ethernet2Header {
            source: self.mac,
            destination: to,
            ether_type,
        };
        let mut frame = header.to_bytes().to_vec();
        frame.extend(payload);
        // The least length of an Ethernet frame without its check sequence.
        frame.resize(frame.len().max(60), 0);
        frame
    }

    /// A frame with an IP packet, in IPv4 with Don't Fragment set.
    pub fn packet(&self, mac: Mac, to: IpAddr, protocol: IpNumber, payload: &[u8]) -> Vec<u8> {
        match to {
            IpAddr::V4(to) => self.ipv4(mac, to, protocol, payload, |ip| ip.dont_fragment = true),
            IpAddr::V6(to) => self.ipv6(mac, to, protocol, payload),
        }
    }

    /// A frame with an IP packet and an unusual header.
    pub fn dressed(
        &self,
        mac: Mac,
        to: IpAddr,
        protocol: IpNumber,
        payload: &[u8],
        dress: Dress,
    ) -> Vec<u8> {
        /// ECN field: Congestion Experienced (RFC 3168 section 5).
        const CONGESTED: u8 = 3;
        /// An option of six octets that says nothing (PadN, RFC 8200 section 4.2), in the eight octets of an
        /// extension header.
        const PADDED: [u8; 7] = [0, 1, 4, 0, 0, 0, 0];
        let mut frame = match to {
            IpAddr::V4(to) => self.ipv4(mac, to, protocol, payload, |ip| {
                ip.dont_fragment = true;
                if dress.is_extended {
                    // Four octets of NOPs (RFC 791 section 3.1).
                    ip.options = [1; 4].into();
                    ip.total_len += 4;
                }
                if dress.is_congested {
                    ip.ecn = IpEcn::THREE;
                }
            }),
            IpAddr::V6(to) if dress.is_extended => {
                let mut octets = vec![IpNumber::IPV6_DESTINATION_OPTIONS.0];
                octets.extend(PADDED);
                octets.push(protocol.0);
                octets.extend(PADDED);
                octets.extend(payload);
                self.ipv6(mac, to, IpNumber::IPV6_HEADER_HOP_BY_HOP, &octets)
            }
            IpAddr::V6(to) => self.ipv6(mac, to, protocol, payload),
        };
        if dress.is_congested && to.is_ipv6() {
            // The traffic class lies across the first two octets.
            frame[15] |= CONGESTED << 4;
        }
        if dress.is_tagged {
            // IEEE 802.1Q: a priority, and no VLAN.
            let tag = [0x81, 0x00, 0xA0, 0x00];
            frame.splice(12..12, tag);
        }
        frame
    }

    /// Sends the ICMP error of a router whose next link has the given MTU (RFC 1191, RFC 8201); `packet` is the one
    /// that was too big. Returns the frame.
    pub fn send_too_big(&self, mac: Mac, to: IpAddr, mtu: u32, packet: &[u8]) -> Vec<u8> {
        let octets = if to.is_ipv4() {
            let mut octets = vec![3, 4, 0, 0, 0, 0];
            octets.extend((mtu as u16).to_be_bytes());
            octets.extend(packet);
            let sum = complement(&octets).to_be_bytes();
            octets[2..4].copy_from_slice(&sum);
            octets
        } else {
            let mut octets = vec![2, 0, 0, 0];
            octets.extend(mtu.to_be_bytes());
            octets.extend(packet);
            self.sum(to, IpNumber::IPV6_ICMP, &mut octets, 2);
            octets
        };
        let protocol = if to.is_ipv4() {
            IpNumber::ICMP
        } else {
            IpNumber::IPV6_ICMP
        };
        let frame = self.packet(mac, to, protocol, &octets);
        self.send(&frame);
        frame
    }

    fn ipv4(
        &self,
        mac: Mac,
        to: Ipv4Addr,
        protocol: IpNumber,
        payload: &[u8],
        change: impl Fn(&mut Ipv4Header),
    ) -> Vec<u8> {
        let from = match self.ip {
            IpAddr::V4(from) => from.octets(),
            IpAddr::V6(_) => [0; 4],
        };
        let length = payload.len() as u16;
        let mut ip = Ipv4Header::new(length, 64, protocol, from, to.octets()).unwrap_or_default();
        change(&mut ip);
        ip.header_checksum = ip.calc_header_checksum();
        let mut packet = ip.to_bytes().to_vec();
        packet.extend(payload);
        self.ethernet(mac, EtherType::IPV4, &packet)
    }

    fn ipv6(&self, mac: Mac, to: Ipv6Addr, next_header: IpNumber, payload: &[u8]) -> Vec<u8> {
        let source = match self.ip {
            IpAddr::V4(from) => from.to_ipv6_mapped().octets(),
            IpAddr::V6(from) => from.octets(),
        };
        let ip = Ipv6Header {
            payload_length: payload.len() as u16,
            next_header,
            // Neighbor discovery wants 255 (RFC 4861 section 7.1).
            hop_limit: 255,
            source,
            destination: to.octets(),
            ..Ipv6Header::default()
        };
        let mut packet = ip.to_bytes().to_vec();
        packet.extend(payload);
        self.ethernet(mac, EtherType::IPV6, &packet)
    }

    /// An IP packet in two fragments, the second one first.
    pub fn fragments(
        &self,
        mac: Mac,
        to: IpAddr,
        protocol: IpNumber,
        payload: &[u8],
    ) -> Vec<Vec<u8>> {
        const UNIT: usize = 8;
        let identification = self.next_fragment.fetch_add(1, Ordering::Relaxed);
        let middle = (payload.len() / 2)
            .next_multiple_of(UNIT)
            .min(payload.len());
        let units = (middle / UNIT) as u16;
        let (first, second) = payload.split_at(middle);
        [(second, units, false), (first, 0, true)]
            .map(|(part, offset, more)| match to {
                IpAddr::V4(to) => self.ipv4(mac, to, protocol, part, |ip| {
                    ip.identification = identification;
                    ip.fragment_offset = IpFragOffset::try_new(offset).unwrap_or_default();
                    ip.more_fragments = more;
                }),
                IpAddr::V6(to) => {
                    let mut octets = vec![protocol.0, 0];
                    octets.extend((offset << 3 | u16::from(more)).to_be_bytes());
                    octets.extend(u32::from(identification).to_be_bytes());
                    octets.extend(part);
                    self.ipv6(mac, to, IpNumber::IPV6_FRAGMENTATION_HEADER, &octets)
                }
            })
            .into()
    }

    fn on_icmp(&self, packet: &Packet) -> Option<()> {
        if packet.payload.first() != Some(&8) {
            return None;
        }
        let mut reply = packet.payload.to_vec();
        reply[0] = 0;
        reply.get_mut(2..4)?.fill(0);
        let sum = complement(&reply).to_be_bytes();
        reply[2..4].copy_from_slice(&sum);
        self.send(&self.packet(packet.from_mac, packet.from, IpNumber::ICMP, &reply));
        Some(())
    }

    fn on_tcp(&self, packet: &Packet, frame: &[u8]) -> Option<()> {
        if checksum(packet.from, packet.to, packet.protocol, packet.payload) != 0 {
            return None;
        }
        let (header, payload) = TcpHeader::from_slice(packet.payload).ok()?;
        let from = SocketAddr::new(packet.from, header.source_port);
        let port = header.destination_port;
        let received = Received {
            at: Instant::now(),
            from,
            from_mac: packet.from_mac,
            payload: payload.to_vec(),
            header,
            frame: frame.to_vec(),
        };
        let routes = self.routes.lock();
        let to = routes.connections.get(&(port, from));
        let to = to.or_else(|| routes.listeners.get(&port).filter(|_| received.header.syn))?;
        // Its connection may have ended.
        let _ = to.send(received);
        Some(())
    }

    fn on_udp(&self, packet: &Packet, frame: &[u8]) -> Option<()> {
        let (header, payload) = UdpHeader::from_slice(packet.payload).ok()?;
        let sum = checksum(packet.from, packet.to, packet.protocol, packet.payload);
        if header.checksum != 0 && sum != 0 {
            return None;
        }
        let payload = payload.get(..usize::from(header.length).checked_sub(UdpHeader::LEN)?)?;
        let datagram = Datagram {
            at: Instant::now(),
            from: SocketAddr::new(packet.from, header.source_port),
            payload: payload.to_vec(),
            frame: frame.to_vec(),
        };
        let routes = self.routes.lock();
        // Its case may have ended.
        let _ = routes
            .datagrams
            .get(&header.destination_port)?
            .send(datagram);
        Some(())
    }

    /// Sends a UDP datagram and returns its frame.
    pub fn send_datagram(&self, port: u16, mac: Mac, to: SocketAddr, payload: &[u8]) -> Vec<u8> {
        let header = UdpHeader {
            source_port: port,
            destination_port: to.port(),
            length: (UdpHeader::LEN + payload.len()) as u16,
            checksum: 0,
        };
        let mut octets = header.to_bytes().to_vec();
        octets.extend(payload);
        self.sum(to.ip(), IpNumber::UDP, &mut octets, 6);
        let frame = self.packet(mac, to.ip(), IpNumber::UDP, &octets);
        self.send(&frame);
        frame
    }

    /// Receives the datagrams for a port.
    pub fn receive_datagrams(&self, port: u16) -> Receiver<Datagram> {
        let (to, received) = channel();
        self.routes.lock().datagrams.insert(port, to);
        received
    }

    pub fn ignore_datagrams(&self, port: u16) {
        self.routes.lock().datagrams.remove(&port);
    }

    /// Resolves the MAC address of a neighbour.
    pub fn resolve(&self, ip: IpAddr, patience: Duration) -> Option<Mac> {
        let deadline = Instant::now() + patience;
        let mut neighbours = self.neighbours.lock();
        loop {
            if let Some(mac) = neighbours.get(&ip) {
                return Some(*mac);
            }
            if Instant::now() >= deadline {
                return None;
            }
            match ip {
                IpAddr::V4(ip) => {
                    self.send_arp(ArpOperation::REQUEST, BROADCAST, [0; 6], &ip.octets());
                }
                IpAddr::V6(v6) => {
                    // The solicited-node multicast address (RFC 4291 section 2.7.1).
                    let [.., a, b, c] = v6.octets();
                    let group = [0xFF, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xFF, a, b, c];
                    let mac = [0x33, 0x33, 0xFF, a, b, c];
                    let group = Ipv6Addr::from(group).into();
                    self.send_neighbor(NEIGHBOR_SOLICITATION, mac, group, ip);
                }
            }
            let wait = Duration::from_millis(200);
            self.neighbour_found.wait_for(&mut neighbours, wait);
        }
    }

    pub fn attach(&self, port: u16, peer: SocketAddr, to: Sender<Received>) {
        self.routes.lock().connections.insert((port, peer), to);
    }

    pub fn detach(&self, port: u16, peer: SocketAddr) {
        self.routes.lock().connections.remove(&(port, peer));
    }

    /// Receives the SYNs for a port.
    pub fn listen(&self, port: u16) -> Receiver<Received> {
        let (to, received) = channel();
        self.routes.lock().listeners.insert(port, to);
        received
    }

    pub fn unlisten(&self, port: u16) {
        self.routes.lock().listeners.remove(&port);
    }
}
