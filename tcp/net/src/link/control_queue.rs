//! The queue of frames that belong to no connection: ARP, NDP, ICMP, resets. It is bounded, and its
//! buffers come from a pool. The packets are built and parsed with smoltcp's wire types.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::collections::VecDeque;

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    ArpOperation, ArpPacket, ArpRepr, EthernetAddress, Icmpv6Packet, Icmpv6Repr, Ipv4Packet,
    Ipv6Packet, NdiscNeighborFlags, NdiscRepr,
};

use crate::buffer::RecvBuf;
use crate::config::NetConfig;
use crate::frame_sink::{FrameMeta, FrameSink, PayloadPiece, TxChecksum};
use crate::link::ndp::{self, NDP_HOP_LIMIT};
use crate::link::neighbours::{ClaimKind, Solicitation};
use crate::rate_limits::TokenBucket;
use crate::siphash::Key;
use crate::stats::NetStats;
use crate::time::Instant;
use crate::wire::constants::{
    CHECKSUM_RIGHT, DEFAULT_HOP_LIMIT, ETHERNET_HEADER_LEN, ETHERTYPE_ARP, ETHERTYPE_IPV4,
    ETHERTYPE_IPV6, ETHERTYPE_VLAN, HEADER_MAX, IPV4_HEADER_LEN, IPV6_HEADER_LEN,
    TAGGED_HEADER_LEN, VLAN_ID_MASK,
};
use crate::wire::icmp_error::{ICMPV4_PARAMETER_PROBLEM, ICMPV4_TIME_EXCEEDED, ICMPV4_UNREACHABLE};

/// Maximum number of queued frames.
const QUEUE_MAX: usize = 256;
/// Maximum number of unused buffers in the pool.
const POOL_MAX: usize = 16;
const BROADCAST: [u8; 6] = [0xff; 6];
/// The multicast group of all nodes (RFC 4291 section 2.7.1).
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const ALL_NODES_MAC: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];
const ICMP_HEADER_LEN: usize = 8;
const ICMPV4_ECHO_REPLY: u8 = 0;
const ICMPV4_ECHO_REQUEST: u8 = 8;

/// The queue of control frames; see the module documentation.
pub(crate) struct ControlQueue {
    queue: VecDeque<(Vec<u8>, FrameMeta)>,
    pool: Vec<Vec<u8>>,
    mac: [u8; 6],
    vlan: Option<u16>,
    icmp: TokenBucket,
    /// The MTU of the link: our longest IP packet.
    pub(crate) mtu: usize,
    /// The number of fragmented packets so far, and the secret that makes their identifications
    /// hard to guess (RFC 7739).
    fragmented: u64,
    secret: Key,
    /// Suppresses answers: another worker answers the frame that is being processed.
    pub silent: bool,
}

/// The addresses of a received packet, for the answer.
pub(crate) struct Origin {
    pub src_mac: [u8; 6],
    pub src: IpAddr,
    pub dst: IpAddr,
}

impl ControlQueue {
    /// Returns an empty queue. `secret`: makes the identifications of fragmented packets hard to guess.
    pub(crate) fn new(config: &NetConfig, secret: Key, icmp: TokenBucket) -> Self {
        ControlQueue {
            queue: VecDeque::new(),
            pool: Vec::new(),
            mac: config.mac,
            vlan: config.vlan,
            icmp,
            mtu: config.mtu.into(),
            fragmented: 0,
            secret,
            silent: false,
        }
    }

    /// Returns whether no frame waits.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Returns an empty buffer from the pool.
    pub(crate) fn buffer(&mut self) -> Vec<u8> {
        let mut buffer = self.pool.pop().unwrap_or_default();
        buffer.clear();
        buffer
    }

    /// Returns a buffer to the pool.
    pub(crate) fn recycle(&mut self, buffer: Vec<u8>) {
        if self.pool.len() < POOL_MAX {
            self.pool.push(buffer);
        }
    }

    /// Returns the identification of the next fragmented packet.
    pub(crate) fn next_id(&mut self) -> u32 {
        self.fragmented += 1;
        self.secret.hash::<1, 3>(&[self.fragmented, u64::MAX]) as u32
    }

    /// Returns a buffer that begins with our Ethernet header.
    pub(crate) fn start_frame(&mut self, dst: [u8; 6], ethertype: u16) -> Vec<u8> {
        let mut frame = self.buffer();
        frame.extend_from_slice(&dst);
        frame.extend_from_slice(&self.mac);
        if let Some(identifier) = self.vlan {
            frame.extend_from_slice(&ETHERTYPE_VLAN.to_be_bytes());
            frame.extend_from_slice(&(identifier & VLAN_ID_MASK).to_be_bytes());
        }
        frame.extend_from_slice(&ethertype.to_be_bytes());
        frame
    }

    /// Returns the size of our Ethernet headers.
    pub(crate) fn ethernet_header_len(&self) -> usize {
        if self.vlan.is_some() {
            TAGGED_HEADER_LEN
        } else {
            ETHERNET_HEADER_LEN
        }
    }

    /// Queues a complete frame, or drops and counts it if the queue is full.
    pub(crate) fn push_frame(
        &mut self,
        frame: Vec<u8>,
        l3_len: u8,
        ipv6: bool,
        stats: &mut NetStats,
    ) {
        if self.queue.len() >= QUEUE_MAX {
            stats.control_drops += 1;
            self.recycle(frame);
            return;
        }
        stats.group_frames_out += u64::from(frame[0] & 1);
        let meta = FrameMeta {
            l2_len: self.ethernet_header_len() as u8,
            l3_len,
            l4_len: 0,
            ipv6,
            checksum: TxChecksum::Complete,
            self_addressed: frame[..6] == self.mac,
            retransmission: false,
            payload_len: 0,
            tso_segsz: 0,
            connection: None,
        };
        self.queue.push_back((frame, meta));
    }

    /// Sends the queued frames; returns `false` if the sink is full.
    pub(crate) fn flush<R>(&mut self, tx: &mut impl FrameSink<R>, stats: &mut NetStats) -> bool {
        while let Some((frame, meta)) = self.queue.front_mut() {
            let (head, rest) = frame.split_at(frame.len().min(HEADER_MAX));
            meta.payload_len = rest.len() as u32;
            let fill = |out: &mut [u8]| out.copy_from_slice(head);
            let payload = (!rest.is_empty()).then_some(PayloadPiece::Bytes(rest));
            if !tx.send_frame(head.len(), meta, fill, payload) {
                return false;
            }
            stats.frames_out += 1;
            if let Some((frame, _)) = self.queue.pop_front() {
                self.recycle(frame);
            }
        }
        true
    }

    /// Returns whether there is room for an answer; if not, it is counted as dropped.
    pub(crate) fn has_room(&self, stats: &mut NetStats) -> bool {
        self.has_room_for(1, stats)
    }

    /// Returns whether there is room for an answer of `frames` frames; if not, it is counted as
    /// dropped.
    pub(crate) fn has_room_for(&self, frames: usize, stats: &mut NetStats) -> bool {
        let room = self.queue.len() + frames <= QUEUE_MAX;
        stats.control_drops += u64::from(!room);
        room
    }

    /// Returns whether an ICMP answer may be sent: there is room, and its rate limit (RFC 1812
    /// section 4.3.2.8, RFC 4443 section 2.4 (f)) permits it. If not, it is counted as dropped.
    pub(crate) fn may_answer(&mut self, now: Instant, stats: &mut NetStats) -> bool {
        let may = self.has_room(stats);
        if may && !self.icmp.try_take(now) {
            stats.control_drops += 1;
            return false;
        }
        may
    }

    /// Returns whether half of the queue is full, the part available to answers without a rate
    /// limit.
    pub(crate) fn is_half_full(&self) -> bool {
        self.queue.len() >= QUEUE_MAX / 2
    }

    fn push_arp(&mut self, to: [u8; 6], repr: &ArpRepr, stats: &mut NetStats) {
        let mut frame = self.start_frame(to, ETHERTYPE_ARP);
        let l2 = frame.len();
        frame.resize(l2 + repr.buffer_len(), 0);
        repr.emit(&mut ArpPacket::new_unchecked(&mut frame[l2..]));
        stats.arp_out += 1;
        self.push_frame(frame, 0, false, stats);
    }

    fn arp_request(&self, source: Ipv4Addr, target: Ipv4Addr) -> ArpRepr {
        ArpRepr::EthernetIpv4 {
            operation: ArpOperation::Request,
            source_hardware_addr: EthernetAddress(self.mac),
            source_protocol_addr: source,
            target_hardware_addr: EthernetAddress([0; 6]),
            target_protocol_addr: target,
        }
    }

    /// Announces an address of ours on the link (RFC 5227 section 2.3, RFC 4861 section 7.2.6).
    pub(crate) fn announce_address(&mut self, addr: IpAddr, stats: &mut NetStats) {
        match addr {
            IpAddr::V4(addr) => {
                let repr = self.arp_request(addr, addr);
                self.push_arp(BROADCAST, &repr, stats);
            }
            IpAddr::V6(addr) => {
                let advert = Icmpv6Repr::Ndisc(NdiscRepr::NeighborAdvert {
                    flags: NdiscNeighborFlags::OVERRIDE,
                    target_addr: addr,
                    lladdr: Some(EthernetAddress(self.mac).into()),
                });
                self.push_icmpv6(ALL_NODES_MAC, addr, ALL_NODES, &advert, stats);
                stats.ndp_out += 1;
            }
        }
    }

    /// Asks whether another host has an address of ours (RFC 5227 section 2.1.1, RFC 4862 section
    /// 5.4.2).
    pub(crate) fn probe_address(&mut self, addr: IpAddr, stats: &mut NetStats) {
        match addr {
            IpAddr::V4(addr) => {
                let repr = self.arp_request(Ipv4Addr::UNSPECIFIED, addr);
                self.push_arp(BROADCAST, &repr, stats);
            }
            IpAddr::V6(addr) => {
                let (mac, group) = solicited_node_group(addr);
                let repr = Icmpv6Repr::Ndisc(NdiscRepr::NeighborSolicit {
                    target_addr: addr,
                    lladdr: None,
                });
                self.push_icmpv6(mac, Ipv6Addr::UNSPECIFIED, group, &repr, stats);
                stats.ndp_out += 1;
            }
        }
    }

    /// Queues an ARP or NDP solicitation from our address `source`.
    pub(crate) fn push_solicitation(
        &mut self,
        solicitation: &Solicitation,
        source: IpAddr,
        stats: &mut NetStats,
    ) {
        match (solicitation.target, source) {
            (IpAddr::V4(target), IpAddr::V4(source)) => {
                let repr = self.arp_request(source, target);
                self.push_arp(solicitation.to.unwrap_or(BROADCAST), &repr, stats);
            }
            (IpAddr::V6(target), IpAddr::V6(source)) => {
                // RFC 4861 section 7.2.2: to the solicited-node multicast address.
                let (mac, ip) = match solicitation.to {
                    Some(mac) => (mac, target),
                    None => solicited_node_group(target),
                };
                let repr = Icmpv6Repr::Ndisc(NdiscRepr::NeighborSolicit {
                    target_addr: target,
                    lladdr: Some(EthernetAddress(self.mac).into()),
                });
                self.push_icmpv6(mac, source, ip, &repr, stats);
                stats.ndp_out += 1;
            }
            _ => {}
        }
    }

    fn push_icmpv6(
        &mut self,
        mac: [u8; 6],
        src: Ipv6Addr,
        dst: Ipv6Addr,
        repr: &Icmpv6Repr<'_>,
        stats: &mut NetStats,
    ) {
        let mut frame = self.start_frame(mac, ETHERTYPE_IPV6);
        let len = repr.buffer_len();
        append_ipv6_header(&mut frame, src, dst, len);
        let at = frame.len();
        frame.resize(at + len, 0);
        repr.emit(
            &src,
            &dst,
            &mut Icmpv6Packet::new_unchecked(&mut frame[at..]),
            &ChecksumCapabilities::default(),
        );
        self.queue_long(frame, true, stats);
    }

    /// Processes an ARP packet and answers a request for one of our addresses. Returns the sender's
    /// claim.
    pub(crate) fn receive_arp(
        &mut self,
        packet: &[u8],
        own: impl Fn(IpAddr) -> bool,
        stats: &mut NetStats,
    ) -> Option<NeighbourClaim> {
        stats.arp_in += 1;
        let repr = ArpPacket::new_checked(packet).and_then(|packet| ArpRepr::parse(&packet));
        let Ok(ArpRepr::EthernetIpv4 {
            operation,
            source_hardware_addr,
            source_protocol_addr,
            target_protocol_addr,
            ..
        }) = repr
        else {
            stats.in_errs += 1;
            return None;
        };
        let sender = IpAddr::V4(source_protocol_addr);
        if source_hardware_addr.is_multicast() {
            return None;
        }
        if own(sender) {
            let mac = source_hardware_addr.0;
            return (mac != self.mac).then_some(NeighbourClaim::OurAddress(sender, mac));
        }
        // RFC 5227 section 2.1.1: a probe comes from 0.0.0.0 and claims no address.
        let is_claim =
            !source_protocol_addr.is_unspecified() && !source_protocol_addr.is_multicast();
        let claim = |kind| {
            is_claim.then_some(NeighbourClaim::Neighbour(
                sender,
                source_hardware_addr.0,
                kind,
            ))
        };
        if source_protocol_addr == target_protocol_addr {
            return claim(ClaimKind::Announcement);
        }
        if !own(target_protocol_addr.into()) {
            return claim(ClaimKind::Overheard);
        }
        if operation == ArpOperation::Request && !self.silent && self.has_room(stats) {
            let repr = ArpRepr::EthernetIpv4 {
                operation: ArpOperation::Reply,
                source_hardware_addr: EthernetAddress(self.mac),
                source_protocol_addr: target_protocol_addr,
                target_hardware_addr: source_hardware_addr,
                target_protocol_addr: source_protocol_addr,
            };
            self.push_arp(source_hardware_addr.0, &repr, stats);
        }
        claim(match operation {
            ArpOperation::Reply => ClaimKind::Reply,
            _ => ClaimKind::Solicitation,
        })
    }

    /// Processes an ICMP message and answers an echo request (RFC 792). Returns whether it is an
    /// error, whose quoted packet the caller must process.
    pub(crate) fn receive_icmpv4<B: RecvBuf>(
        &mut self,
        now: Instant,
        origin: &Origin,
        message: &B,
        stats: &mut NetStats,
    ) -> bool {
        stats.icmp_in += 1;
        let (IpAddr::V4(src), IpAddr::V4(dst)) = (origin.src, origin.dst) else {
            return false;
        };
        let mut sum = crate::wire::checksum::OnesComplementSum::new();
        message.chunks().for_each(|chunk| sum.add(chunk));
        let head = message.chunk();
        if head.len() < ICMP_HEADER_LEN || sum.value() != CHECKSUM_RIGHT {
            stats.csum_errors += 1;
            return false;
        }
        if head[0] != ICMPV4_ECHO_REQUEST {
            return matches!(
                head[0],
                ICMPV4_UNREACHABLE | ICMPV4_TIME_EXCEEDED | ICMPV4_PARAMETER_PROBLEM
            );
        }
        if self.silent || !self.may_answer(now, stats) {
            return false;
        }
        let mut reply = self.start_frame(origin.src_mac, ETHERTYPE_IPV4);
        append_ipv4_header(&mut reply, dst, src, message.remaining());
        let at = reply.len();
        message
            .chunks()
            .for_each(|chunk| reply.extend_from_slice(chunk));
        reply[at] = ICMPV4_ECHO_REPLY;
        reply[at + 2..at + 4].fill(0);
        let mut sum = crate::wire::checksum::OnesComplementSum::new();
        sum.add(&reply[at..]);
        reply[at + 2..at + 4].copy_from_slice(&(!sum.value()).to_be_bytes());
        stats.icmp_out += 1;
        self.queue_long(reply, false, stats);
        false
    }

    /// Processes an ICMPv6 message: answers echo requests (RFC 4443 section 4) and neighbour
    /// solicitations. Invalid messages of neighbour discovery are counted and discarded (RFC 4861
    /// section 7.1).
    pub(crate) fn receive_icmpv6<B: RecvBuf>(
        &mut self,
        now: Instant,
        origin: &Origin,
        hop_limit: u8,
        message: &B,
        own: impl Fn(IpAddr) -> bool,
        stats: &mut NetStats,
    ) -> Icmpv6Outcome {
        stats.icmp_in += 1;
        let (IpAddr::V6(src), IpAddr::V6(dst)) = (origin.src, origin.dst) else {
            return Icmpv6Outcome::Done;
        };
        let mut flat = self.buffer();
        message
            .chunks()
            .for_each(|chunk| flat.extend_from_slice(chunk));
        let parsed = Icmpv6Packet::new_checked(&flat[..])
            .ok()
            .filter(|packet| packet.verify_checksum(&src, &dst));
        let Some(packet) = parsed else {
            stats.csum_errors += 1;
            return Icmpv6Outcome::Done;
        };
        if packet.msg_type().is_error() {
            return Icmpv6Outcome::Error;
        }
        if !ndp::is_valid(&flat, hop_limit, src, dst) {
            stats.martians += 1;
            return Icmpv6Outcome::Done;
        }
        let Ok(repr) = Icmpv6Repr::parse(&src, &dst, &packet, &ChecksumCapabilities::default())
        else {
            return Icmpv6Outcome::Done;
        };
        let mac_of = |address: Option<smoltcp::wire::RawHardwareAddress>| {
            let message = address?;
            <[u8; 6]>::try_from(message.as_bytes()).ok()
        };
        match repr {
            Icmpv6Repr::EchoRequest {
                ident,
                seq_no,
                data,
            } if own(dst.into()) && !src.is_unspecified() => {
                if self.silent || !self.may_answer(now, stats) {
                    return Icmpv6Outcome::Done;
                }
                let reply = Icmpv6Repr::EchoReply {
                    ident,
                    seq_no,
                    data,
                };
                self.push_icmpv6(origin.src_mac, dst, src, &reply, stats);
                stats.icmp_out += 1;
            }
            Icmpv6Repr::Ndisc(_) if hop_limit != NDP_HOP_LIMIT => stats.martians += 1,
            Icmpv6Repr::Ndisc(NdiscRepr::NeighborSolicit {
                target_addr,
                lladdr,
            }) => {
                stats.ndp_in += 1;
                if !own(target_addr.into()) {
                    return Icmpv6Outcome::Done;
                }
                let mut flags = NdiscNeighborFlags::OVERRIDE;
                let (mac, to) = if src.is_unspecified() {
                    (ALL_NODES_MAC, ALL_NODES)
                } else {
                    flags |= NdiscNeighborFlags::SOLICITED;
                    (origin.src_mac, src)
                };
                let advert = Icmpv6Repr::Ndisc(NdiscRepr::NeighborAdvert {
                    flags,
                    target_addr,
                    lladdr: Some(EthernetAddress(self.mac).into()),
                });
                if !self.silent && self.has_room(stats) {
                    self.push_icmpv6(mac, target_addr, to, &advert, stats);
                    stats.ndp_out += 1;
                }
                if !src.is_unspecified()
                    && let Some(mac) = mac_of(lladdr)
                {
                    let claim = NeighbourClaim::Neighbour(src.into(), mac, ClaimKind::Solicitation);
                    return Icmpv6Outcome::Claim(claim);
                }
            }
            Icmpv6Repr::Ndisc(NdiscRepr::NeighborAdvert {
                flags,
                target_addr,
                lladdr,
            }) => {
                stats.ndp_in += 1;
                let named = mac_of(lladdr);
                let mac = named.unwrap_or(origin.src_mac);
                let target = IpAddr::V6(target_addr);
                if !own(target) {
                    let kind = ClaimKind::Advertisement {
                        is_solicited: flags.contains(NdiscNeighborFlags::SOLICITED),
                        // The flag is about the address in the option.
                        overrides: flags.contains(NdiscNeighborFlags::OVERRIDE) && named.is_some(),
                    };
                    return Icmpv6Outcome::Claim(NeighbourClaim::Neighbour(target, mac, kind));
                }
                if mac != self.mac {
                    return Icmpv6Outcome::Claim(NeighbourClaim::OurAddress(target, mac));
                }
            }
            _ => {}
        }
        Icmpv6Outcome::Done
    }
}

/// Appends the IP header of a packet of another protocol than ICMP. Returns `false` if the addresses are
/// of different versions.
pub(crate) fn append_ip_header(
    frame: &mut Vec<u8>,
    src: IpAddr,
    dst: IpAddr,
    protocol: u8,
    len: usize,
) -> bool {
    let l2 = frame.len();
    match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            append_ipv4_header(frame, src, dst, len);
            let mut ip = Ipv4Packet::new_unchecked(&mut frame[l2..]);
            ip.set_next_header(protocol.into());
            ip.fill_checksum();
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            append_ipv6_header(frame, src, dst, len);
            let mut ip = Ipv6Packet::new_unchecked(&mut frame[l2..]);
            ip.set_next_header(protocol.into());
            ip.set_hop_limit(DEFAULT_HOP_LIMIT);
        }
        _ => return false,
    }
    true
}

/// Appends the IPv4 header of an ICMP message of `len` bytes.
pub(crate) fn append_ipv4_header(frame: &mut Vec<u8>, src: Ipv4Addr, dst: Ipv4Addr, len: usize) {
    let l2 = frame.len();
    frame.resize(l2 + IPV4_HEADER_LEN, 0);
    let mut ip = Ipv4Packet::new_unchecked(&mut frame[l2..]);
    ip.set_version(4);
    ip.set_header_len(IPV4_HEADER_LEN as u8);
    ip.set_total_len((IPV4_HEADER_LEN + len) as u16);
    ip.set_dont_frag(true);
    ip.set_hop_limit(DEFAULT_HOP_LIMIT);
    ip.set_next_header(smoltcp::wire::IpProtocol::Icmp);
    ip.set_src_addr(src);
    ip.set_dst_addr(dst);
    ip.fill_checksum();
}

/// Appends the IPv6 header of an ICMP message of `len` bytes.
pub(crate) fn append_ipv6_header(frame: &mut Vec<u8>, src: Ipv6Addr, dst: Ipv6Addr, len: usize) {
    let l2 = frame.len();
    frame.resize(l2 + IPV6_HEADER_LEN, 0);
    let mut ip = Ipv6Packet::new_unchecked(&mut frame[l2..]);
    ip.set_version(6);
    ip.set_payload_len(len as u16);
    ip.set_next_header(smoltcp::wire::IpProtocol::Icmpv6);
    ip.set_hop_limit(NDP_HOP_LIMIT);
    ip.set_src_addr(src);
    ip.set_dst_addr(dst);
}

/// The action that an ICMPv6 message requires of the caller.
pub(crate) enum Icmpv6Outcome {
    Done,
    /// An error, whose quoted packet the caller must process.
    Error,
    Claim(NeighbourClaim),
}

/// The claim of a host that it has an address.
pub(crate) enum NeighbourClaim {
    /// IP address, Ethernet address, and the kind of the message.
    Neighbour(IpAddr, [u8; 6], ClaimKind),
    /// One of our addresses, and the Ethernet address of the host that claims it, too.
    OurAddress(IpAddr, [u8; 6]),
}

/// The solicited-node multicast group of an address, after its Ethernet address (RFC 4291 section
/// 2.7.1).
fn solicited_node_group(address: Ipv6Addr) -> ([u8; 6], Ipv6Addr) {
    let octets = address.octets();
    let group = Ipv6Addr::new(
        0xff02,
        0,
        0,
        0,
        0,
        1,
        0xff00 | u16::from(octets[13]),
        u16::from_be_bytes([octets[14], octets[15]]),
    );
    let mac = [0x33, 0x33, 0xff, octets[13], octets[14], octets[15]];
    (mac, group)
}
