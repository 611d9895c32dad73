//! Datagrams of RoCEv2. Received ones wait here until the owner of the stack takes them after each burst;
//! for those that it sends, the stack builds the headers up to UDP.

use core::net::IpAddr;
use std::collections::VecDeque;

use crate::buffer::RecvBuf;
use crate::frame_sink::{FrameMeta, FrameSink, PayloadPiece, TxChecksum};
use crate::link::control_queue::Origin;
use crate::link::groups::mac_of_group;
use crate::link::neighbours::{NO_CONNECTION, NeighbourLookup};
use crate::network::Network;
use crate::network::datagrams::{UDP_HEADER_LEN, udp_to_port};
use crate::quota_owner::QuotaOwner;
use crate::time::Instant;
use crate::wire::bytes::read_u16;
use crate::wire::checksum::OnesComplementSum;
use crate::wire::constants::{
    ETHERNET_HEADER_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6, ETHERTYPE_VLAN, IPV4_DONT_FRAGMENT,
    IPV4_HEADER_LEN, IPV4_PLAIN_FIRST_BYTE, IPV6_FIRST_BYTE, IPV6_HEADER_LEN, PROTOCOL_UDP,
    ROCE_PORT, TAGGED_HEADER_LEN, VLAN_ID_MASK,
};

/// Maximum number of datagrams until the owner takes them: many bursts of a port.
const DATAGRAMS_MAX: usize = 1024;
/// Bytes of the longest headers up to UDP.
const HEADERS_MAX: usize = TAGGED_HEADER_LEN + IPV6_HEADER_LEN + UDP_HEADER_LEN;

/// A received datagram of RoCEv2.
pub struct RoceDatagram<B> {
    /// The packet, from the IP header to the end of UDP.
    pub packet: B,
    /// Bytes of the IP header, which has no options: 20 (IPv4) or 40 (IPv6).
    pub ip_len: usize,
    /// The group that it was sent to.
    pub group: Option<IpAddr>,
    /// Another worker received it, too.
    pub is_copy: bool,
    /// Bytes of Ethernet's header before the packet.
    stripped: usize,
}

impl<B: RecvBuf> RoceDatagram<B> {
    /// Returns the frame as received, without Ethernet's padding, for another worker; `None` if this kind
    /// of buffer does not support it.
    pub fn into_frame(mut self) -> Option<B> {
        self.packet.retreat(self.stripped).then_some(self.packet)
    }
}

/// Received datagrams, until taken.
pub(super) struct RoceInbox<B>(pub VecDeque<RoceDatagram<B>>);

impl<B> Default for RoceInbox<B> {
    fn default() -> Self {
        RoceInbox(VecDeque::new())
    }
}

impl<B: RecvBuf> RoceInbox<B> {
    /// Takes a packet to one of our addresses if it is a datagram of RoCEv2, or returns it. `stripped`:
    /// bytes of Ethernet's header before it; 0 for a reassembled packet. The owner checks the ICRC, which
    /// covers more than UDP's checksum, so the latter is ignored.
    pub(super) fn take_datagram(
        &mut self,
        net: &mut Network,
        origin: &Origin,
        mut packet: B,
        stripped: usize,
    ) -> Result<(), B> {
        let head = packet.chunk();
        let Some(udp) = udp_to_port(head, ROCE_PORT) else {
            return Err(packet);
        };
        let (ip_len, udp_len) = (head.len() - udp.len(), usize::from(read_u16(udp, 4)));
        let has_options = ip_len != IPV4_HEADER_LEN && ip_len != IPV6_HEADER_LEN;
        // The classification counted it as a protocol without a user.
        net.stats.unknown_protocols -= 1;
        let is_to_us = net.is_own_address(origin.dst) || net.groups.has(origin.dst);
        if !is_to_us || !net.can_be_peer(origin.src, origin.src_mac) {
            net.stats.martians += 1;
        } else if stripped == 0
            || has_options
            || udp_len < UDP_HEADER_LEN
            || ip_len + udp_len > packet.remaining()
        {
            net.stats.in_errs += 1;
        } else if self.0.len() >= DATAGRAMS_MAX {
            net.stats.control_drops += 1;
        } else {
            packet.truncate(ip_len + udp_len);
            self.0.push_back(RoceDatagram {
                packet,
                ip_len,
                group: origin.dst.is_multicast().then_some(origin.dst),
                is_copy: net.control_queue.silent,
                stripped,
            });
        }
        Ok(())
    }
}

/// Addresses and IP fields of a datagram to send.
#[derive(Debug, Clone, Copy)]
pub struct DatagramPath {
    /// Source address, one of ours.
    pub from: IpAddr,
    /// Destination, of the same family.
    pub to: IpAddr,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// Flow label of IPv6, 20 bits.
    pub flow_label: u32,
    /// UDP's source port.
    pub source_port: u16,
}

/// Reason why a datagram cannot be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DatagramError {
    /// There is no route, or the addresses are of different families.
    #[error("there is no route to the destination")]
    NoRoute,
    /// The neighbour is being solicited.
    #[error("the neighbour has not answered yet")]
    Unresolved,
    /// The packet is longer than the MTU.
    #[error("the datagram is longer than the MTU allows")]
    TooLong,
}

/// Headers of a datagram, from Ethernet to UDP.
pub struct DatagramHeaders {
    bytes: [u8; HEADERS_MAX],
    l2_len: usize,
    l3_len: usize,
    self_addressed: bool,
}

impl DatagramHeaders {
    /// The IP header.
    pub fn ip(&self) -> &[u8] {
        &self.bytes[self.l2_len..][..self.l3_len]
    }

    /// The UDP header.
    pub fn udp(&self) -> &[u8] {
        &self.bytes[self.l2_len + self.l3_len..][..UDP_HEADER_LEN]
    }

    /// The multicast group that the datagram is sent to.
    #[inline]
    pub fn group(&self) -> Option<IpAddr> {
        if self.bytes[0] & 1 == 0 {
            return None;
        }
        let ip = self.ip();
        match self.l3_len {
            IPV4_HEADER_LEN => Some(IpAddr::from([ip[16], ip[17], ip[18], ip[19]])),
            _ => {
                let mut octets = [0; 16];
                octets.copy_from_slice(&ip[24..40]);
                Some(IpAddr::from(octets))
            }
        }
    }

    /// Those of the local copy of a datagram to a group, which returns to this stack.
    pub fn into_local_copy(mut self) -> DatagramHeaders {
        self.self_addressed = true;
        self
    }

    fn len(&self) -> usize {
        self.l2_len + self.l3_len + UDP_HEADER_LEN
    }
}

impl Network {
    /// Returns the Ethernet address for packets to `to`.
    fn resolve(
        &mut self,
        now: Instant,
        owner: QuotaOwner,
        to: IpAddr,
    ) -> Result<[u8; 6], DatagramError> {
        if self.is_own_address(to) {
            return Ok(self.config.mac);
        }
        if to.is_multicast() {
            return Ok(mac_of_group(to));
        }
        let hop = self.next_hop(to).ok_or(DatagramError::NoRoute)?;
        let neighbours = &mut self.neighbours;
        match neighbours.lookup(hop, NO_CONNECTION, false, Some(owner), now) {
            NeighbourLookup::Found(mac) => Ok(mac),
            NeighbourLookup::Wait | NeighbourLookup::Full => Err(DatagramError::Unresolved),
        }
    }

    /// Returns the worker that has a queue pair of datagrams, if several share the device.
    #[inline]
    pub fn owner_of_datagrams(&self, qpn: u32) -> Option<usize> {
        let home = self.config.steering.as_ref()?;
        Some(home.steering.owner_of_datagrams(qpn))
    }

    /// Returns whether this is the first of the workers that share the device.
    pub fn is_first_worker(&self) -> bool {
        let home = self.config.steering.as_ref();
        home.is_none_or(|home| home.worker == 0)
    }

    /// Number of workers that share the device.
    pub fn worker_count(&self) -> usize {
        let home = self.config.steering.as_ref();
        home.map_or(1, |home| home.steering.worker_count())
    }

    /// Returns the largest IP packet of the device, in bytes.
    pub fn mtu(&self) -> usize {
        self.config.mtu.into()
    }

    /// Builds the headers of a datagram of RoCEv2 with `payload_len` bytes behind UDP. `owner`: the owner
    /// that an unresolved neighbour is charged to.
    ///
    /// # Errors
    /// The datagram cannot be sent now.
    #[inline]
    pub fn roce_headers(
        &mut self,
        now: Instant,
        owner: QuotaOwner,
        path: &DatagramPath,
        payload_len: usize,
    ) -> Result<DatagramHeaders, DatagramError> {
        let mac = self.resolve(now, owner, path.to)?;
        let config = &self.config;
        let udp_len = UDP_HEADER_LEN + payload_len;
        let mut headers = DatagramHeaders {
            bytes: [0; HEADERS_MAX],
            l2_len: ETHERNET_HEADER_LEN,
            l3_len: IPV4_HEADER_LEN,
            self_addressed: mac == config.mac,
        };
        let bytes = &mut headers.bytes;
        bytes[..6].copy_from_slice(&mac);
        bytes[6..12].copy_from_slice(&config.mac);
        if let Some(identifier) = config.vlan {
            bytes[12..14].copy_from_slice(&ETHERTYPE_VLAN.to_be_bytes());
            bytes[14..16].copy_from_slice(&(identifier & VLAN_ID_MASK).to_be_bytes());
            headers.l2_len = TAGGED_HEADER_LEN;
        }
        let l2 = headers.l2_len;
        let ethertype = match (path.from, path.to) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                let ip = &mut bytes[l2..][..IPV4_HEADER_LEN];
                (ip[0], ip[1]) = (IPV4_PLAIN_FIRST_BYTE, path.traffic_class);
                ip[2..4].copy_from_slice(&((IPV4_HEADER_LEN + udp_len) as u16).to_be_bytes());
                (ip[6], ip[8], ip[9]) = (IPV4_DONT_FRAGMENT, path.hop_limit, PROTOCOL_UDP);
                ip[12..16].copy_from_slice(&from.octets());
                ip[16..20].copy_from_slice(&to.octets());
                let mut sum = OnesComplementSum::new();
                sum.add(ip);
                let sum = !sum.value();
                ip[10..12].copy_from_slice(&sum.to_be_bytes());
                ETHERTYPE_IPV4
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                headers.l3_len = IPV6_HEADER_LEN;
                let ip = &mut bytes[l2..][..IPV6_HEADER_LEN];
                let first = u32::from(IPV6_FIRST_BYTE) << 24
                    | u32::from(path.traffic_class) << 20
                    | path.flow_label & 0xf_ffff;
                ip[..4].copy_from_slice(&first.to_be_bytes());
                ip[4..6].copy_from_slice(&(udp_len as u16).to_be_bytes());
                (ip[6], ip[7]) = (PROTOCOL_UDP, path.hop_limit);
                ip[8..24].copy_from_slice(&from.octets());
                ip[24..40].copy_from_slice(&to.octets());
                ETHERTYPE_IPV6
            }
            _ => return Err(DatagramError::NoRoute),
        };
        if headers.l3_len + udp_len > usize::from(config.mtu) {
            return Err(DatagramError::TooLong);
        }
        bytes[l2 - 2..l2].copy_from_slice(&ethertype.to_be_bytes());
        // Without a checksum: the ICRC covers more (annex A17.3.2).
        let udp = &mut bytes[l2 + headers.l3_len..][..UDP_HEADER_LEN];
        udp[..2].copy_from_slice(&path.source_port.to_be_bytes());
        udp[2..4].copy_from_slice(&ROCE_PORT.to_be_bytes());
        udp[4..6].copy_from_slice(&(udp_len as u16).to_be_bytes());
        Ok(headers)
    }

    /// Sends a datagram of RoCEv2: these headers, then `payload`, of the length that they announce.
    /// Returns `false` if the sink has no room.
    #[inline]
    pub fn send_roce<R>(
        &mut self,
        headers: &DatagramHeaders,
        payload: &[u8],
        sink: &mut impl FrameSink<R>,
    ) -> bool {
        let meta = FrameMeta {
            l2_len: headers.l2_len as u8,
            l3_len: headers.l3_len as u8,
            l4_len: UDP_HEADER_LEN as u8,
            ipv6: headers.l3_len == IPV6_HEADER_LEN,
            checksum: TxChecksum::Complete,
            self_addressed: headers.self_addressed,
            retransmission: false,
            payload_len: payload.len() as u32,
            tso_segsz: 0,
            connection: None,
        };
        let len = headers.len();
        let fill = |room: &mut [u8]| room.copy_from_slice(&headers.bytes[..len]);
        let sent = sink.send_frame(len, &meta, fill, [PayloadPiece::Bytes(payload)]);
        self.stats.frames_out += u64::from(sent);
        sent
    }
}
