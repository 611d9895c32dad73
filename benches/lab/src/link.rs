//! Station of the lab on a link: sends and receives Ethernet frames, answers ARP and echo requests for
//! its address, and hands TCP segments to the connection that they belong to.

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use etherparse::{
    ArpHardwareId, ArpOperation, ArpPacket, EtherType, Ethernet2Header, IpFragOffset, IpNumber,
    Ipv4Header, TcpHeader, UdpHeader,
};

pub type Mac = [u8; 6];

const BROADCAST: Mac = [0xFF; 6];

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
    pub from: SocketAddrV4,
    pub from_mac: Mac,
    pub ip: Ipv4Header,
    pub header: TcpHeader,
    pub payload: Vec<u8>,
    pub frame: Vec<u8>,
}

/// UDP datagram as received, with its frame.
#[derive(Debug, Clone)]
pub struct Datagram {
    pub at: Instant,
    pub from: SocketAddrV4,
    pub payload: Vec<u8>,
    pub frame: Vec<u8>,
}

#[derive(Default)]
struct Routes {
    datagrams: HashMap<u16, Sender<Datagram>>,
    connections: HashMap<(u16, SocketAddrV4), Sender<Received>>,
    listeners: HashMap<u16, Sender<Received>>,
}

pub struct Station {
    pub mac: Mac,
    pub ip: Ipv4Addr,
    sender: Mutex<Box<dyn FrameSender>>,
    routes: Mutex<Routes>,
    neighbours: Mutex<HashMap<Ipv4Addr, Mac>>,
    neighbour_found: Condvar,
    next_port: AtomicU16,
    /// Identification of the next fragmented packet.
    next_fragment: AtomicU16,
    stop: AtomicBool,
    starting: Mutex<bool>,
    started: Condvar,
}

/// Permission to send an MPA Request. `rping -s` mixes up two requests that arrive before it has accepted
/// the first, and then answers neither.
pub struct StartUp(Arc<Station>);

impl Drop for StartUp {
    fn drop(&mut self) {
        *locked(&self.0.starting) = false;
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

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Station {
    pub fn start(link: Link, ip: Ipv4Addr, first_port: u16) -> StationGuard {
        let (sender, mut receiver) = link;
        let octets = ip.octets();
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
        });
        let shared = station.clone();
        let thread = std::thread::spawn(move || {
            while !shared.stop.load(Ordering::Relaxed) {
                match receiver.receive() {
                    Ok(Some(frame)) => {
                        // A frame that is not for this station, or malformed, is ignored.
                        let _ = shared.on_frame(frame);
                    }
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
        // A full queue loses the frame, as a network may; retransmission repairs it.
        let _ = locked(&self.sender).send(frame);
    }

    /// Waits until no other stream awaits a Reply.
    pub fn begin_start_up(self: &Arc<Self>, patience: Duration) -> Option<StartUp> {
        let starting = locked(&self.starting);
        let free = self
            .started
            .wait_timeout_while(starting, patience, |starting| *starting);
        let (mut starting, waited) = free.unwrap_or_else(PoisonError::into_inner);
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
        match ethernet.ether_type {
            EtherType::ARP => self.on_arp(rest),
            EtherType::IPV4 if ethernet.destination == self.mac => {
                let (ip, rest) = Ipv4Header::from_slice(rest).ok()?;
                let payload = rest.get(..usize::from(ip.payload_len().ok()?))?;
                if Ipv4Addr::from(ip.destination) != self.ip {
                    return None;
                }
                match ip.protocol {
                    IpNumber::TCP => self.on_tcp(ethernet.source, ip, payload, &frame),
                    IpNumber::UDP => self.on_udp(&ip, payload, &frame),
                    IpNumber::ICMP => self.on_icmp(ethernet.source, &ip, payload),
                    _ => None,
                }
            }
            _ => None,
        }
    }

    fn on_arp(&self, octets: &[u8]) -> Option<()> {
        let arp = ArpPacket::from_slice(octets).ok()?;
        let sender_mac: Mac = arp.sender_hw_addr().try_into().ok()?;
        let sender_ip: [u8; 4] = arp.sender_protocol_addr().try_into().ok()?;
        if arp.target_protocol_addr() != self.ip.octets() {
            return None;
        }
        locked(&self.neighbours).insert(sender_ip.into(), sender_mac);
        self.neighbour_found.notify_all();
        if arp.operation == ArpOperation::REQUEST {
            self.send_arp(
                ArpOperation::REPLY,
                sender_mac,
                sender_mac,
                sender_ip.into(),
            );
        }
        Some(())
    }

    fn send_arp(&self, operation: ArpOperation, to: Mac, target: Mac, ip: Ipv4Addr) {
        let arp = ArpPacket::new(
            ArpHardwareId::ETHERNET,
            EtherType::IPV4,
            operation,
            &self.mac,
            &self.ip.octets(),
            &target,
            &ip.octets(),
        );
        if let Ok(arp) = arp {
            self.send(&self.ethernet(to, EtherType::ARP, &arp.to_bytes()));
        }
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

    /// A frame with an IPv4 packet, Don't Fragment set.
    pub fn ipv4(&self, mac: Mac, to: Ipv4Addr, protocol: IpNumber, payload: &[u8]) -> Vec<u8> {
        self.ipv4_with(mac, to, protocol, payload, |ip| ip.dont_fragment = true)
    }

    fn ipv4_with(
        &self,
        mac: Mac,
        to: Ipv4Addr,
        protocol: IpNumber,
        payload: &[u8],
        change: impl Fn(&mut Ipv4Header),
    ) -> Vec<u8> {
        let length = payload.len() as u16;
        let mut ip = Ipv4Header::new(length, 64, protocol, self.ip.octets(), to.octets())
            .unwrap_or_default();
        change(&mut ip);
        ip.header_checksum = ip.calc_header_checksum();
        let mut packet = ip.to_bytes().to_vec();
        packet.extend(payload);
        self.ethernet(mac, EtherType::IPV4, &packet)
    }

    /// An IPv4 packet in two fragments, the second one first.
    pub fn ipv4_fragments(
        &self,
        mac: Mac,
        to: Ipv4Addr,
        protocol: IpNumber,
        payload: &[u8],
    ) -> Vec<Vec<u8>> {
        const UNIT: usize = 8;
        let identification = self.next_fragment.fetch_add(1, Ordering::Relaxed);
        let middle = (payload.len() / 2)
            .next_multiple_of(UNIT)
            .min(payload.len());
        let offset = IpFragOffset::try_new((middle / UNIT) as u16).unwrap_or_default();
        let second = self.ipv4_with(mac, to, protocol, &payload[middle..], |ip| {
            ip.identification = identification;
            ip.fragment_offset = offset;
        });
        let first = self.ipv4_with(mac, to, protocol, &payload[..middle], |ip| {
            ip.identification = identification;
            ip.more_fragments = true;
        });
        vec![second, first]
    }

    fn on_icmp(&self, from: Mac, ip: &Ipv4Header, payload: &[u8]) -> Option<()> {
        if payload.first() != Some(&8) {
            return None;
        }
        let mut reply = payload.to_vec();
        reply[0] = 0;
        reply.get_mut(2..4)?.fill(0);
        let sum = etherparse::checksum::Sum16BitWords::new()
            .add_slice(&reply)
            .ones_complement();
        reply[2..4].copy_from_slice(&sum.to_ne_bytes());
        self.send(&self.ipv4(from, ip.source.into(), IpNumber::ICMP, &reply));
        Some(())
    }

    fn on_tcp(&self, from_mac: Mac, ip: Ipv4Header, octets: &[u8], frame: &[u8]) -> Option<()> {
        let (header, payload) = TcpHeader::from_slice(octets).ok()?;
        if header.calc_checksum_ipv4(&ip, payload).ok()? != header.checksum {
            return None;
        }
        let from = SocketAddrV4::new(ip.source.into(), header.source_port);
        let port = header.destination_port;
        let received = Received {
            at: Instant::now(),
            from,
            from_mac,
            ip,
            payload: payload.to_vec(),
            header,
            frame: frame.to_vec(),
        };
        let routes = locked(&self.routes);
        let to = routes.connections.get(&(port, from));
        let to = to.or_else(|| routes.listeners.get(&port).filter(|_| received.header.syn))?;
        // Its connection may have ended.
        let _ = to.send(received);
        Some(())
    }

    fn on_udp(&self, ip: &Ipv4Header, octets: &[u8], frame: &[u8]) -> Option<()> {
        let (header, payload) = UdpHeader::from_slice(octets).ok()?;
        let payload = payload.get(..usize::from(header.length).checked_sub(UdpHeader::LEN)?)?;
        let sum = header.calc_checksum_ipv4(ip, payload).ok()?;
        if header.checksum != 0 && header.checksum != sum {
            return None;
        }
        let datagram = Datagram {
            at: Instant::now(),
            from: SocketAddrV4::new(ip.source.into(), header.source_port),
            payload: payload.to_vec(),
            frame: frame.to_vec(),
        };
        let routes = locked(&self.routes);
        // Its case may have ended.
        let _ = routes
            .datagrams
            .get(&header.destination_port)?
            .send(datagram);
        Some(())
    }

    /// Sends a UDP datagram and returns its frame.
    pub fn send_datagram(&self, port: u16, mac: Mac, to: SocketAddrV4, payload: &[u8]) -> Vec<u8> {
        let (source, destination) = (self.ip.octets(), to.ip().octets());
        let header = UdpHeader {
            source_port: port,
            destination_port: to.port(),
            length: (UdpHeader::LEN + payload.len()) as u16,
            checksum: 0,
        };
        let sum = header.calc_checksum_ipv4_raw(source, destination, payload);
        let header = UdpHeader {
            checksum: sum.unwrap_or(0),
            ..header
        };
        let mut octets = header.to_bytes().to_vec();
        octets.extend(payload);
        let frame = self.ipv4(mac, *to.ip(), IpNumber::UDP, &octets);
        self.send(&frame);
        frame
    }

    /// Receives the datagrams for a port.
    pub fn receive_datagrams(&self, port: u16) -> Receiver<Datagram> {
        let (to, received) = channel();
        locked(&self.routes).datagrams.insert(port, to);
        received
    }

    pub fn ignore_datagrams(&self, port: u16) {
        locked(&self.routes).datagrams.remove(&port);
    }

    /// Resolves the MAC address of a neighbour.
    pub fn resolve(&self, ip: Ipv4Addr, patience: Duration) -> Option<Mac> {
        let deadline = Instant::now() + patience;
        let mut neighbours = locked(&self.neighbours);
        loop {
            if let Some(mac) = neighbours.get(&ip) {
                return Some(*mac);
            }
            if Instant::now() >= deadline {
                return None;
            }
            self.send_arp(ArpOperation::REQUEST, BROADCAST, [0; 6], ip);
            let wait = Duration::from_millis(200);
            neighbours = match self.neighbour_found.wait_timeout(neighbours, wait) {
                Ok((guard, _)) => guard,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }

    pub fn attach(&self, port: u16, peer: SocketAddrV4, to: Sender<Received>) {
        locked(&self.routes).connections.insert((port, peer), to);
    }

    pub fn detach(&self, port: u16, peer: SocketAddrV4) {
        locked(&self.routes).connections.remove(&(port, peer));
    }

    /// Receives the SYNs for a port.
    pub fn listen(&self, port: u16) -> Receiver<Received> {
        let (to, received) = channel();
        locked(&self.routes).listeners.insert(port, to);
        received
    }

    pub fn unlisten(&self, port: u16) {
        locked(&self.routes).listeners.remove(&port);
    }
}
