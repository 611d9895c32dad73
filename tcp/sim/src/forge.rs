//! Builds frames of any kind, valid or not, for tests that play a hostile host. Checksums are correct;
//! a test that needs a wrong one changes the frame.

use core::net::{IpAddr, Ipv6Addr};

use siw_net::checksum::OnesComplementSum;

/// A TCP segment.
#[derive(Clone, Debug, Default)]
pub struct Tcp<'a> {
    /// Source and destination port.
    pub ports: [u16; 2],
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgment number.
    pub ack: u32,
    /// Flags as on the wire (FIN is 1).
    pub flags: u8,
    /// Window, not scaled.
    pub window: u16,
    /// Options, padded with zeros (end of option list) to a multiple of four bytes.
    pub options: &'a [u8],
    /// Payload.
    pub payload: &'a [u8],
}

/// Addresses that frames carry, which may be forged: source first.
#[derive(Clone, Copy, Debug)]
pub struct Ends {
    /// Ethernet addresses.
    pub mac: [[u8; 6]; 2],
    /// IP addresses, of one family.
    pub ip: [IpAddr; 2],
}

impl Ends {
    /// Builds a frame with this payload.
    pub fn ethernet(&self, ethertype: u16, payload: &[u8]) -> Vec<u8> {
        let mut frame = [self.mac[1], self.mac[0]].concat();
        frame.extend_from_slice(&ethertype.to_be_bytes());
        frame.extend_from_slice(payload);
        frame
    }

    /// Builds an IP packet. The hop limit is 255, as neighbour discovery requires.
    pub fn ip(&self, protocol: u8, payload: &[u8]) -> Vec<u8> {
        match self.ip {
            [IpAddr::V4(source), IpAddr::V4(destination)] => {
                let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 255, protocol, 0, 0];
                packet.extend_from_slice(&source.octets());
                packet.extend_from_slice(&destination.octets());
                packet[2..4].copy_from_slice(&(20 + payload.len() as u16).to_be_bytes());
                fix_ipv4(&mut packet);
                packet.extend_from_slice(payload);
                self.ethernet(0x0800, &packet)
            }
            [IpAddr::V6(source), IpAddr::V6(destination)] => {
                let mut packet = vec![0x60, 0, 0, 0, 0, 0, protocol, 255];
                packet[4..6].copy_from_slice(&(payload.len() as u16).to_be_bytes());
                packet.extend_from_slice(&source.octets());
                packet.extend_from_slice(&destination.octets());
                packet.extend_from_slice(payload);
                self.ethernet(0x86dd, &packet)
            }
            _ => panic!("addresses of two families"),
        }
    }

    /// Computes the pseudo-header sum (RFC 9293 section 3.1, RFC 8200 section 8.1).
    fn pseudo_header_sum(&self, protocol: u8, len: usize) -> OnesComplementSum {
        let mut sum = OnesComplementSum::new();
        for address in self.ip {
            match address {
                IpAddr::V4(address) => sum.add(&address.octets()),
                IpAddr::V6(address) => sum.add(&address.octets()),
            }
        }
        sum.add_word(protocol.into());
        sum.add_word(len as u16);
        sum
    }

    /// Builds a frame with a TCP segment.
    pub fn tcp(&self, segment: &Tcp<'_>) -> Vec<u8> {
        let mut bytes = [
            segment.ports[0].to_be_bytes(),
            segment.ports[1].to_be_bytes(),
        ]
        .concat();
        bytes.extend_from_slice(&segment.seq.to_be_bytes());
        bytes.extend_from_slice(&segment.ack.to_be_bytes());
        let words = 5 + segment.options.len().div_ceil(4);
        bytes.extend_from_slice(&[(words as u8) << 4, segment.flags]);
        bytes.extend_from_slice(&segment.window.to_be_bytes());
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(segment.options);
        bytes.resize(words * 4, 0);
        bytes.extend_from_slice(segment.payload);
        let mut sum = self.pseudo_header_sum(6, bytes.len());
        sum.add(&bytes);
        bytes[16..18].copy_from_slice(&(!sum.value()).to_be_bytes());
        self.ip(6, &bytes)
    }

    /// Builds an ICMP message of the addresses' family from type and code, the 32-bit word after the
    /// checksum, and the rest of the message.
    pub fn icmp(&self, what: [u8; 2], word: [u8; 4], body: &[u8]) -> Vec<u8> {
        let mut message = vec![what[0], what[1], 0, 0];
        message.extend_from_slice(&word);
        message.extend_from_slice(body);
        let protocol = if self.ip[0].is_ipv4() { 1 } else { 58 };
        let mut sum = match protocol {
            1 => OnesComplementSum::new(),
            _ => self.pseudo_header_sum(58, message.len()),
        };
        sum.add(&message);
        message[2..4].copy_from_slice(&(!sum.value()).to_be_bytes());
        self.ip(protocol, &message)
    }

    /// Builds a UDP datagram.
    pub fn udp(&self, ports: [u16; 2], payload: &[u8]) -> Vec<u8> {
        let mut datagram = [ports[0].to_be_bytes(), ports[1].to_be_bytes()].concat();
        datagram.extend_from_slice(&(8 + payload.len() as u16).to_be_bytes());
        datagram.extend_from_slice(&[0; 2]);
        datagram.extend_from_slice(payload);
        let mut sum = self.pseudo_header_sum(17, datagram.len());
        sum.add(&datagram);
        datagram[6..8].copy_from_slice(&(!sum.value()).to_be_bytes());
        self.ip(17, &datagram)
    }

    /// Builds an ARP packet (RFC 826): operation 1 requests the MAC address of the second IP address,
    /// 2 announces that of the first.
    pub fn arp(&self, operation: u8) -> Vec<u8> {
        let [IpAddr::V4(sender), IpAddr::V4(target)] = self.ip else {
            panic!("ARP is of IPv4");
        };
        let mut packet = vec![0, 1, 8, 0, 6, 4, 0, operation];
        packet.extend_from_slice(&self.mac[0]);
        packet.extend_from_slice(&sender.octets());
        packet.extend_from_slice(&self.mac[1]);
        packet.extend_from_slice(&target.octets());
        self.ethernet(0x0806, &packet)
    }

    /// Builds a neighbour solicitation for the second address (RFC 4861 section 4.3).
    pub fn solicit(&self) -> Vec<u8> {
        self.ndp(135, [0; 4], self.ip[1], 1)
    }

    /// Builds a neighbour advertisement of the first address (RFC 4861 section 4.4) with the flags
    /// solicited and override.
    pub fn advertise(&self) -> Vec<u8> {
        self.ndp(136, [0x60, 0, 0, 0], self.ip[0], 2)
    }

    /// Builds an unsolicited neighbour advertisement of the first address with these flags (RFC 4861
    /// section 7.2.6).
    pub fn announce(&self, flags: u8) -> Vec<u8> {
        self.ndp(136, [flags, 0, 0, 0], self.ip[0], 2)
    }

    /// Builds a neighbour solicitation for `target` with these options (RFC 4861 sections 4.3, 4.6).
    pub fn solicitation(&self, target: Ipv6Addr, options: &[u8]) -> Vec<u8> {
        let body = [&target.octets()[..], options].concat();
        self.icmp([135, 0], [0; 4], &body)
    }

    /// Builds a neighbour advertisement of `target` with these flags and options (RFC 4861 sections
    /// 4.4, 4.6).
    pub fn advertisement(&self, flags: u8, target: Ipv6Addr, options: &[u8]) -> Vec<u8> {
        let body = [&target.octets()[..], options].concat();
        self.icmp([136, 0], [flags, 0, 0, 0], &body)
    }

    fn ndp(&self, kind: u8, flags: [u8; 4], target: IpAddr, option: u8) -> Vec<u8> {
        let IpAddr::V6(target) = target else {
            panic!("NDP is of IPv6");
        };
        let mut body = target.octets().to_vec();
        body.extend_from_slice(&[option, 1]);
        body.extend_from_slice(&self.mac[0]);
        self.icmp([kind, 0], flags, &body)
    }
}

/// Sets the checksum of the IPv4 header without options at the start of `packet`.
pub fn fix_ipv4(packet: &mut [u8]) {
    fix_ipv4_header(packet, 20);
}

/// Sets the checksum of the IPv4 header of `len` bytes at the start of `packet`.
pub fn fix_ipv4_header(packet: &mut [u8], len: usize) {
    packet[10..12].fill(0);
    let mut sum = OnesComplementSum::new();
    sum.add(&packet[..len]);
    packet[10..12].copy_from_slice(&(!sum.value()).to_be_bytes());
}

/// Inserts extension headers between the IPv6 header of a frame and its payload. Each entry has the
/// type and the bytes of a header; the first byte is overwritten with the next-header number.
pub fn behind(frame: &[u8], headers: &[(u8, &[u8])]) -> Vec<u8> {
    let (head, payload) = frame.split_at(14 + 40);
    let mut changed = head.to_vec();
    let kinds = headers.iter().map(|header| header.0).chain([head[20]]);
    let kinds: Vec<u8> = kinds.collect();
    changed[20] = kinds[0];
    for ((_, header), next) in headers.iter().zip(&kinds[1..]) {
        let at = changed.len();
        changed.extend_from_slice(header);
        changed[at] = *next;
    }
    changed.extend_from_slice(payload);
    let len = (changed.len() - 14 - 40) as u16;
    changed[18..20].copy_from_slice(&len.to_be_bytes());
    changed
}

/// Splits an IP packet of either family into fragments in order, each with at most `most` bytes of
/// payload, a multiple of eight.
pub fn fragments(frame: &[u8], most: usize, id: u32) -> Vec<Vec<u8>> {
    let v6 = frame[14] >> 4 == 6;
    let (head, payload) = frame.split_at(14 + if v6 { 40 } else { 20 });
    let parts = payload.chunks(most).enumerate();
    let cut = |(index, part): (usize, &[u8])| {
        let more = index * most + part.len() < payload.len();
        let mut fragment = head.to_vec();
        if v6 {
            let offset = ((index * most) as u16 | u16::from(more)).to_be_bytes();
            fragment[18..20].copy_from_slice(&(8 + part.len() as u16).to_be_bytes());
            fragment[20] = 44;
            fragment.extend_from_slice(&[head[20], 0, offset[0], offset[1]]);
            fragment.extend_from_slice(&id.to_be_bytes());
        } else {
            let offset = (index * most / 8) as u16 | u16::from(more) << 13;
            fragment[16..18].copy_from_slice(&(20 + part.len() as u16).to_be_bytes());
            fragment[18..20].copy_from_slice(&(id as u16).to_be_bytes());
            fragment[20..22].copy_from_slice(&offset.to_be_bytes());
            fix_ipv4(&mut fragment[14..]);
        }
        fragment.extend_from_slice(part);
        fragment
    };
    parts.map(cut).collect()
}
