//! Frames of any kind, honest or not, for tests that play a hostile host. Checksums are right;
//! whoever wants a wrong one changes the frame.

use core::net::IpAddr;

use crate::wire::checksum::OnesComplementSum;

/// A TCP segment.
#[derive(Clone, Debug, Default)]
pub struct Tcp<'a> {
    pub ports: [u16; 2],
    pub seq: u32,
    pub ack: u32,
    pub flags: u8,
    pub window: u16,
    /// Filled up with zeros, the end of options, to whole words.
    pub options: &'a [u8],
    pub payload: &'a [u8],
}

/// Between whom frames go, as they claim: source first.
#[derive(Clone, Copy, Debug)]
pub struct Ends {
    pub mac: [[u8; 6]; 2],
    pub ip: [IpAddr; 2],
}

impl Ends {
    /// A frame with this payload.
    pub fn ethernet(&self, ethertype: u16, payload: &[u8]) -> Vec<u8> {
        let mut f = [self.mac[1], self.mac[0]].concat();
        f.extend_from_slice(&ethertype.to_be_bytes());
        f.extend_from_slice(payload);
        f
    }

    /// An IP packet; hop limit 255, as neighbour discovery demands.
    pub fn ip(&self, protocol: u8, payload: &[u8]) -> Vec<u8> {
        match self.ip {
            [IpAddr::V4(s), IpAddr::V4(d)] => {
                let mut p = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 255, protocol, 0, 0];
                p.extend_from_slice(&s.octets());
                p.extend_from_slice(&d.octets());
                p[2..4].copy_from_slice(&(20 + payload.len() as u16).to_be_bytes());
                fix_ipv4(&mut p);
                p.extend_from_slice(payload);
                self.ethernet(0x0800, &p)
            }
            [IpAddr::V6(s), IpAddr::V6(d)] => {
                let mut p = vec![0x60, 0, 0, 0, 0, 0, protocol, 255];
                p[4..6].copy_from_slice(&(payload.len() as u16).to_be_bytes());
                p.extend_from_slice(&s.octets());
                p.extend_from_slice(&d.octets());
                p.extend_from_slice(payload);
                self.ethernet(0x86dd, &p)
            }
            _ => panic!("addresses of two families"),
        }
    }

    /// The sum of the pseudo header (RFC 9293 section 3.1, RFC 8200 section 8.1).
    fn pseudo(&self, protocol: u8, len: usize) -> OnesComplementSum {
        let mut s = OnesComplementSum::new();
        for a in self.ip {
            match a {
                IpAddr::V4(a) => s.add(&a.octets()),
                IpAddr::V6(a) => s.add(&a.octets()),
            }
        }
        s.add_word(protocol.into());
        s.add_word(len as u16);
        s
    }

    pub fn tcp(&self, t: &Tcp<'_>) -> Vec<u8> {
        let mut p = [t.ports[0].to_be_bytes(), t.ports[1].to_be_bytes()].concat();
        p.extend_from_slice(&t.seq.to_be_bytes());
        p.extend_from_slice(&t.ack.to_be_bytes());
        let words = 5 + t.options.len().div_ceil(4);
        p.extend_from_slice(&[(words as u8) << 4, t.flags]);
        p.extend_from_slice(&t.window.to_be_bytes());
        p.extend_from_slice(&[0; 4]);
        p.extend_from_slice(t.options);
        p.resize(words * 4, 0);
        p.extend_from_slice(t.payload);
        let mut s = self.pseudo(6, p.len());
        s.add(&p);
        p[16..18].copy_from_slice(&(!s.value()).to_be_bytes());
        self.ip(6, &p)
    }

    /// An ICMP message of the addresses' family: type and code, the word behind the checksum, and
    /// what follows.
    pub fn icmp(&self, what: [u8; 2], word: [u8; 4], body: &[u8]) -> Vec<u8> {
        let mut p = vec![what[0], what[1], 0, 0];
        p.extend_from_slice(&word);
        p.extend_from_slice(body);
        let protocol = if self.ip[0].is_ipv4() { 1 } else { 58 };
        let mut s = match protocol {
            1 => OnesComplementSum::new(),
            _ => self.pseudo(58, p.len()),
        };
        s.add(&p);
        p[2..4].copy_from_slice(&(!s.value()).to_be_bytes());
        self.ip(protocol, &p)
    }

    /// A UDP datagram.
    pub fn udp(&self, ports: [u16; 2], payload: &[u8]) -> Vec<u8> {
        let mut p = [ports[0].to_be_bytes(), ports[1].to_be_bytes()].concat();
        p.extend_from_slice(&(8 + payload.len() as u16).to_be_bytes());
        p.extend_from_slice(&[0; 2]);
        p.extend_from_slice(payload);
        let mut s = self.pseudo(17, p.len());
        s.add(&p);
        p[6..8].copy_from_slice(&(!s.value()).to_be_bytes());
        self.ip(17, &p)
    }

    /// ARP (RFC 826): 1 asks where the second address is, 2 says where the first is.
    pub fn arp(&self, operation: u8) -> Vec<u8> {
        let [IpAddr::V4(s), IpAddr::V4(d)] = self.ip else {
            panic!("ARP is of IPv4");
        };
        let mut p = vec![0, 1, 8, 0, 6, 4, 0, operation];
        p.extend_from_slice(&self.mac[0]);
        p.extend_from_slice(&s.octets());
        p.extend_from_slice(&self.mac[1]);
        p.extend_from_slice(&d.octets());
        self.ethernet(0x0806, &p)
    }

    /// Neighbour solicitation of the second address (RFC 4861 section 4.3).
    pub fn solicit(&self) -> Vec<u8> {
        self.ndp(135, [0; 4], self.ip[1], 1)
    }

    /// Neighbour advertisement of the first address (RFC 4861 section 4.4): solicited, override.
    pub fn advertise(&self) -> Vec<u8> {
        self.ndp(136, [0x60, 0, 0, 0], self.ip[0], 2)
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

/// Sets the checksum of an IPv4 header without options that `p` begins with.
pub fn fix_ipv4(p: &mut [u8]) {
    p[10..12].fill(0);
    let mut s = OnesComplementSum::new();
    s.add(&p[..20]);
    p[10..12].copy_from_slice(&(!s.value()).to_be_bytes());
}

/// An IPv6 frame with extension headers before what it carries: the kind of each, and its bytes, of
/// which the first is set to what follows.
pub fn behind(frame: &[u8], headers: &[(u8, &[u8])]) -> Vec<u8> {
    let (head, payload) = frame.split_at(14 + 40);
    let mut f = head.to_vec();
    let kinds = headers.iter().map(|h| h.0).chain([head[20]]);
    let kinds: Vec<u8> = kinds.collect();
    f[20] = kinds[0];
    for ((_, h), next) in headers.iter().zip(&kinds[1..]) {
        let at = f.len();
        f.extend_from_slice(h);
        f[at] = *next;
    }
    f.extend_from_slice(payload);
    let len = (f.len() - 14 - 40) as u16;
    f[18..20].copy_from_slice(&len.to_be_bytes());
    f
}

/// A frame of either family as fragments that carry `most` bytes each at most, a multiple of eight,
/// in their order.
pub fn fragments(frame: &[u8], most: usize, id: u32) -> Vec<Vec<u8>> {
    let v6 = frame[14] >> 4 == 6;
    let (head, payload) = frame.split_at(14 + if v6 { 40 } else { 20 });
    let parts = payload.chunks(most).enumerate();
    let cut = |(i, part): (usize, &[u8])| {
        let more = i * most + part.len() < payload.len();
        let mut f = head.to_vec();
        if v6 {
            let offset = ((i * most) as u16 | u16::from(more)).to_be_bytes();
            f[18..20].copy_from_slice(&(8 + part.len() as u16).to_be_bytes());
            f[20] = 44;
            f.extend_from_slice(&[head[20], 0, offset[0], offset[1]]);
            f.extend_from_slice(&id.to_be_bytes());
        } else {
            let offset = (i * most / 8) as u16 | u16::from(more) << 13;
            f[16..18].copy_from_slice(&(20 + part.len() as u16).to_be_bytes());
            f[18..20].copy_from_slice(&(id as u16).to_be_bytes());
            f[20..22].copy_from_slice(&offset.to_be_bytes());
            fix_ipv4(&mut f[14..]);
        }
        f.extend_from_slice(part);
        f
    };
    parts.map(cut).collect()
}
