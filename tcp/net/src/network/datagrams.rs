//! UDP datagrams of the iWARP port mapper (those of RoCEv2: `roce.rs`). They are few and short, and
//! leave no state here: the owner of the stack takes them after each burst and answers or drops them.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::collections::VecDeque;

use crate::link::control_queue::{Origin, append_ip_header};
use crate::link::neighbours::{NO_CONNECTION, NeighbourLookup};
use crate::network::Network;
use crate::quota_owner::QuotaOwner;
use crate::stats::NetStats;
use crate::time::Instant;
use crate::wire::bytes::read_u16;
use crate::wire::checksum::OnesComplementSum;
use crate::wire::constants::{
    CHECKSUM_RIGHT, ETHERTYPE_IPV4, ETHERTYPE_IPV6, IPV4_HEADER_LEN, IPV6_HEADER_LEN,
    PORT_MAPPER_PORT, PROTOCOL_UDP,
};

/// Bytes of a UDP header.
pub(super) const UDP_HEADER_LEN: usize = 8;
/// Longest message of the port mapper.
const PAYLOAD_MAX: usize = 64;
/// Maximum number of events until the owner takes them.
const EVENTS_MAX: usize = 64;
/// Port unreachable (RFC 792, RFC 4443 section 3.1).
const PORT_UNREACHABLE_V4: [u8; 2] = [3, 3];
const PORT_UNREACHABLE_V6: [u8; 2] = [1, 4];

/// A received datagram.
#[derive(Debug, Clone, Copy)]
pub struct Datagram {
    /// Its sender.
    pub from: SocketAddr,
    /// Our address that it was sent to.
    pub to: IpAddr,
    /// Another worker received it, too, and answers it.
    pub is_copy: bool,
    pub(super) src_mac: [u8; 6],
    payload: [u8; PAYLOAD_MAX],
    len: usize,
}

impl Datagram {
    /// Its payload.
    pub fn payload(&self) -> &[u8] {
        &self.payload[..self.len]
    }
}

/// A message for the port mapper.
#[derive(Debug, Clone, Copy)]
pub enum PortMapperEvent {
    /// A datagram to our port.
    Received(Datagram),
    /// The host at this address has no port mapper.
    Unreachable(IpAddr),
}

/// Whether a datagram was queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DatagramOutcome {
    /// It leaves with the next `poll`.
    Queued,
    /// The neighbour is not resolved yet; try again.
    Unresolved,
    /// There is no route, or no room.
    Dropped,
}

/// Messages for the port mapper, until taken.
#[derive(Default)]
pub(super) struct PortMapperInbox(pub VecDeque<PortMapperEvent>);

impl PortMapperInbox {
    /// Takes a packet to one of our addresses if it is a datagram to the port mapper. Returns `false` for
    /// other packets. `packet` begins with the IP header.
    pub(super) fn take_datagram(
        &mut self,
        net: &mut Network,
        origin: &Origin,
        packet: &[u8],
    ) -> bool {
        let udp = udp_to_port(packet, PORT_MAPPER_PORT);
        let Some(udp) = udp.filter(|_| net.config.port_mapper) else {
            return false;
        };
        // The classification counted it as a protocol without a user.
        net.stats.unknown_protocols -= 1;
        if !net.is_own_address(origin.dst) || !net.can_be_peer(origin.src, origin.src_mac) {
            net.stats.martians += 1;
            return true;
        }
        let len = usize::from(read_u16(udp, 4));
        let (Some(data), port) = (udp.get(UDP_HEADER_LEN..len), read_u16(udp, 0)) else {
            net.stats.in_errs += 1;
            return true;
        };
        if data.len() > PAYLOAD_MAX || port == 0 {
            net.stats.in_errs += 1;
            return true;
        }
        let has_checksum = read_u16(udp, 6) != 0;
        let sum = udp_checksum(origin.src, origin.dst, &udp[..len]);
        if has_checksum && sum != CHECKSUM_RIGHT || !has_checksum && origin.dst.is_ipv6() {
            let pseudo = pseudo_header_sum(origin.src, origin.dst, len);
            let stats = &mut net.stats;
            stats.count_wrong_checksum(read_u16(udp, 6), pseudo.value());
            return true;
        }
        let mut datagram = Datagram {
            from: SocketAddr::new(origin.src, port),
            to: origin.dst,
            is_copy: net.control_queue.silent,
            src_mac: origin.src_mac,
            payload: [0; PAYLOAD_MAX],
            len: data.len(),
        };
        datagram.payload[..data.len()].copy_from_slice(data);
        self.push(&mut net.stats, PortMapperEvent::Received(datagram));
        true
    }

    /// Processes an ICMP error that quotes `quoted`, a packet of ours from its IP header on, if that is a
    /// datagram to a port mapper. `head`: type and code.
    pub(super) fn take_error(&mut self, net: &mut Network, head: &[u8], quoted: &[u8]) {
        if !net.config.port_mapper || udp_to_port(quoted, PORT_MAPPER_PORT).is_none() {
            return;
        }
        let target: IpAddr = if quoted[0] >> 4 == 4 {
            let octets = [quoted[16], quoted[17], quoted[18], quoted[19]];
            Ipv4Addr::from(octets).into()
        } else {
            let mut octets = [0; 16];
            octets.copy_from_slice(&quoted[24..IPV6_HEADER_LEN]);
            Ipv6Addr::from(octets).into()
        };
        let no_port = if target.is_ipv4() {
            PORT_UNREACHABLE_V4
        } else {
            PORT_UNREACHABLE_V6
        };
        if head.starts_with(&no_port) {
            self.push(&mut net.stats, PortMapperEvent::Unreachable(target));
        }
    }

    fn push(&mut self, stats: &mut NetStats, event: PortMapperEvent) {
        if self.0.len() < EVENTS_MAX {
            self.0.push_back(event);
        } else {
            stats.control_drops += 1;
        }
    }
}

impl Network {
    /// Answers a datagram, unless the rate limit of answers is reached.
    pub fn answer_datagram(&mut self, now: Instant, datagram: &Datagram, payload: &[u8]) {
        if self.datagrams.try_take(now) {
            self.push_datagram(datagram.src_mac, datagram.to, datagram.from, payload);
        } else {
            self.stats.control_drops += 1;
        }
    }

    /// Sends a datagram to the port mapper of the host at `to`.
    pub fn send_to_port_mapper(
        &mut self,
        now: Instant,
        owner: QuotaOwner,
        from: IpAddr,
        to: IpAddr,
        payload: &[u8],
    ) -> DatagramOutcome {
        let Some(hop) = self.next_hop(to) else {
            return DatagramOutcome::Dropped;
        };
        let neighbours = &mut self.neighbours;
        match neighbours.lookup(hop, NO_CONNECTION, false, Some(owner), now) {
            NeighbourLookup::Found(mac) => {
                let to = SocketAddr::new(to, PORT_MAPPER_PORT);
                if self.push_datagram(mac, from, to, payload) {
                    DatagramOutcome::Queued
                } else {
                    DatagramOutcome::Dropped
                }
            }
            NeighbourLookup::Wait => DatagramOutcome::Unresolved,
            NeighbourLookup::Full => DatagramOutcome::Dropped,
        }
    }

    /// Queues a datagram from our port mapper. Returns `false` if the queue is full.
    fn push_datagram(
        &mut self,
        mac: [u8; 6],
        from: IpAddr,
        to: SocketAddr,
        payload: &[u8],
    ) -> bool {
        let stats = &mut self.stats;
        let queue = &mut self.control_queue;
        if !queue.has_room(stats) {
            return false;
        }
        let (ethertype, l3_len) = match from {
            IpAddr::V4(_) => (ETHERTYPE_IPV4, IPV4_HEADER_LEN),
            IpAddr::V6(_) => (ETHERTYPE_IPV6, IPV6_HEADER_LEN),
        };
        let mut frame = queue.start_frame(mac, ethertype);
        let len = UDP_HEADER_LEN + payload.len();
        if !append_ip_header(&mut frame, from, to.ip(), PROTOCOL_UDP, len) {
            queue.recycle(frame);
            return false;
        }
        let at = frame.len();
        for field in [PORT_MAPPER_PORT, to.port(), len as u16, 0] {
            frame.extend_from_slice(&field.to_be_bytes());
        }
        frame.extend_from_slice(payload);
        let sum = !udp_checksum(from, to.ip(), &frame[at..]);
        // Zero means "no checksum" (RFC 768).
        let sum = if sum == 0 { 0xffff } else { sum };
        frame[at + 6..at + UDP_HEADER_LEN].copy_from_slice(&sum.to_be_bytes());
        queue.push_frame(frame, l3_len as u8, from.is_ipv6(), stats);
        true
    }
}

/// Returns the UDP header and payload of a packet to this port. Packets with extension headers are none.
pub(super) fn udp_to_port(packet: &[u8], port: u16) -> Option<&[u8]> {
    let (protocol, header) = match packet.first()? >> 4 {
        4 => (*packet.get(9)?, usize::from(packet[0] & 15) * 4),
        6 => (*packet.get(6)?, IPV6_HEADER_LEN),
        _ => return None,
    };
    let udp = packet.get(header.max(IPV4_HEADER_LEN)..)?;
    let is_udp = protocol == PROTOCOL_UDP && udp.len() >= UDP_HEADER_LEN;
    (is_udp && read_u16(udp, 2) == port).then_some(udp)
}

/// Sum over the pseudo-header and the datagram.
fn udp_checksum(src: IpAddr, dst: IpAddr, udp: &[u8]) -> u16 {
    let mut sum = pseudo_header_sum(src, dst, udp.len());
    sum.add(udp);
    sum.value()
}

/// Sum of the pseudo-header of a datagram of `len` bytes (RFC 768; RFC 8200 section 8.1).
fn pseudo_header_sum(src: IpAddr, dst: IpAddr, len: usize) -> OnesComplementSum {
    let mut sum = OnesComplementSum::new();
    for address in [src, dst] {
        match address {
            IpAddr::V4(address) => sum.add(&address.octets()),
            IpAddr::V6(address) => sum.add(&address.octets()),
        }
    }
    sum.add_word(PROTOCOL_UDP.into());
    sum.add_word(len as u16);
    sum
}
