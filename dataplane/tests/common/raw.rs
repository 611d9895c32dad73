//! A TCP peer that sends single frames, for cases that no Linux socket produces: segments in any
//! order, with any bytes. It has an address of its own, unknown to Linux, and answers ARP for it.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Instant;

use nix::libc;
use nix::sys::socket::{
    AddressFamily, LinkAddr, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrLike, bind, recv,
    send, setsockopt, socket, sockopt,
};
use nix::sys::time::TimeVal;

use super::PATIENCE;
use super::net::Netns;

pub const FIN: u8 = 1;
pub const SYN: u8 = 2;
pub const RST: u8 = 4;
pub const PSH: u8 = 8;
pub const ACK: u8 = 16;

/// The test's end of an Ethernet link.
pub struct Wire {
    socket: OwnedFd,
    pub mac: [u8; 6],
    ip: Ipv4Addr,
}

/// Opens a socket that receives and sends whole frames of an interface in this namespace.
pub fn packet_socket(ns: &Netns, interface: &str) -> OwnedFd {
    ns.run(|| {
        let s = socket(
            AddressFamily::Packet,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::EthAll,
        )
        .unwrap();
        let to = libc::sockaddr_ll {
            sll_family: libc::AF_PACKET as u16,
            sll_protocol: (libc::ETH_P_ALL as u16).to_be(),
            sll_ifindex: nix::net::if_::if_nametoindex(interface).unwrap() as i32,
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        };
        // SAFETY: `to` is a whole sockaddr_ll of family AF_PACKET and outlives the call.
        let to = unsafe {
            LinkAddr::from_raw(
                (&raw const to).cast(),
                Some(size_of::<libc::sockaddr_ll>() as u32),
            )
        };
        bind(s.as_raw_fd(), &to.unwrap()).unwrap();
        s
    })
}

impl Wire {
    /// Opens an interface of this namespace with an unused address.
    pub fn open(ns: &Netns, interface: &str, ip: Ipv4Addr) -> Wire {
        let socket = packet_socket(ns, interface);
        let ip4 = ip.octets();
        Wire {
            socket,
            mac: [0x02, 0xee, ip4[0], ip4[1], ip4[2], ip4[3]],
            ip,
        }
    }

    pub fn send(&self, frame: &[u8]) {
        assert_eq!(
            send(self.socket.as_raw_fd(), frame, MsgFlags::empty()),
            Ok(frame.len())
        );
    }

    /// The next frame for this address. Answers ARP requests meanwhile.
    pub fn recv(&self, until: Instant) -> Option<Vec<u8>> {
        let mut b = vec![0; 65_536];
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let t = TimeVal::new(
                left.as_secs() as i64,
                i64::from(left.subsec_micros()).max(1),
            );
            setsockopt(&self.socket, sockopt::ReceiveTimeout, &t).unwrap();
            let Ok(n) = recv(self.socket.as_raw_fd(), &mut b, MsgFlags::empty()) else {
                continue;
            };
            let f = &b[..n];
            if n >= 42
                && f[12..14] == [8, 6]
                && f[20..22] == [0, 1]
                && f[38..42] == self.ip.octets()
            {
                let mut a = f[6..12].to_vec();
                a.extend(self.mac);
                a.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 2]);
                a.extend(self.mac);
                a.extend(self.ip.octets());
                a.extend(&f[22..32]);
                self.send(&a);
            } else if n >= 14 && f[..6] == self.mac {
                return Some(f.to_vec());
            }
        }
    }
}

/// A received segment.
#[derive(Debug, Clone)]
pub struct Segment {
    pub seq: u32,
    pub ack: u32,
    pub flags: u8,
    pub options: Vec<u8>,
    pub payload: Vec<u8>,
}

/// A connection without timers: a lost segment is not retransmitted unless the test does so.
pub struct RawTcp {
    pub wire: Wire,
    to: SocketAddrV4,
    to_mac: [u8; 6],
    port: u16,
    first: u32,
    /// Sequence number of the next byte to send.
    pub next: u32,
    /// Sequence number of the next byte from the peer.
    pub expected: u32,
    /// Acknowledgment number from the peer.
    pub acked: u32,
    /// Received bytes, read with [`take`](Self::take).
    stream: Vec<u8>,
}

impl RawTcp {
    /// Connects; `mac` is the device's MAC address.
    pub fn connect(wire: Wire, mac: [u8; 6], to: SocketAddrV4) -> RawTcp {
        let first = 0x7fff_ff00;
        let mut c = RawTcp {
            wire,
            to,
            to_mac: mac,
            port: 40_000,
            first,
            next: first + 1,
            expected: 0,
            acked: first,
            stream: Vec::new(),
        };
        // MSS 1460, SACK permitted.
        c.emit(first, SYN, &[2, 4, 5, 0xb4, 4, 2, 1, 1], b"");
        let s = c.segment();
        assert_eq!((s.flags & (SYN | ACK), s.ack), (SYN | ACK, first + 1));
        c.expected = s.seq.wrapping_add(1);
        c.acked = s.ack;
        c.emit(c.next, ACK, &[], b"");
        c
    }

    /// Sends one segment with any sequence number.
    pub fn emit(&self, seq: u32, flags: u8, options: &[u8], payload: &[u8]) {
        self.wire.send(&self.frame(seq, flags, options, payload));
    }

    /// Builds the frame of a segment, with correct checksums.
    pub fn frame(&self, seq: u32, flags: u8, options: &[u8], payload: &[u8]) -> Vec<u8> {
        let mut t = self.port.to_be_bytes().to_vec();
        t.extend(self.to.port().to_be_bytes());
        t.extend(seq.to_be_bytes());
        t.extend(self.expected.to_be_bytes());
        t.extend([
            (5 + options.len() as u8 / 4) << 4,
            flags,
            0xff,
            0xff,
            0,
            0,
            0,
            0,
        ]);
        t.extend(options);
        t.extend(payload);
        let mut pseudo = self.wire.ip.octets().to_vec();
        pseudo.extend(self.to.ip().octets());
        pseudo.extend([0, 6]);
        pseudo.extend((t.len() as u16).to_be_bytes());
        let sum = checksum(&[&pseudo, &t]);
        t[16..18].copy_from_slice(&sum);
        let mut ip = vec![0x45, 0];
        ip.extend((20 + t.len() as u16).to_be_bytes());
        ip.extend([0, 0, 0x40, 0, 64, 6, 0, 0]);
        ip.extend(self.wire.ip.octets());
        ip.extend(self.to.ip().octets());
        let sum = checksum(&[&ip]);
        ip[10..12].copy_from_slice(&sum);
        let mut f = self.to_mac.to_vec();
        f.extend(self.wire.mac);
        f.extend([8, 0]);
        f.extend(ip);
        f.extend(t);
        f
    }

    /// Sends the next bytes of the stream.
    pub fn send(&mut self, payload: &[u8]) {
        self.emit(self.next, ACK | PSH, &[], payload);
        self.next = self.next.wrapping_add(payload.len() as u32);
    }

    /// Sends bytes `ahead` bytes beyond the next ones; the stream position does not change.
    pub fn send_ahead(&self, ahead: usize, payload: &[u8]) {
        self.emit(
            self.next.wrapping_add(ahead as u32),
            ACK | PSH,
            &[],
            payload,
        );
    }

    /// Receives the next segment of this connection.
    pub fn segment(&mut self) -> Segment {
        let end = Instant::now() + PATIENCE;
        loop {
            let f = self.wire.recv(end).expect("a segment");
            if f.len() < 54 || f[12..14] != [8, 0] || f[23] != 6 {
                continue;
            }
            let total = usize::from(u16::from_be_bytes([f[16], f[17]]));
            let t = &f[34..14 + total];
            let word = |i: usize| u32::from_be_bytes(t[i..i + 4].try_into().unwrap());
            let header = usize::from(t[12] >> 4) * 4;
            if t[2..4] != self.port.to_be_bytes() {
                continue;
            }
            let s = Segment {
                seq: word(4),
                ack: word(8),
                flags: t[13],
                options: t[20..header].to_vec(),
                payload: t[header..].to_vec(),
            };
            assert_eq!(s.flags & RST, 0, "the connection was reset");
            self.acked = s.ack;
            if !s.payload.is_empty() {
                if s.seq == self.expected {
                    self.expected = self.expected.wrapping_add(s.payload.len() as u32);
                    self.stream.extend(&s.payload);
                }
                self.emit(self.next, ACK, &[], b"");
            }
            return s;
        }
    }

    /// Receives the next `n` bytes of the peer's stream.
    pub fn take(&mut self, n: usize) -> Vec<u8> {
        while self.stream.len() < n {
            self.segment();
        }
        self.stream.drain(..n).collect()
    }

    /// Waits until everything sent in order is acknowledged.
    pub fn await_ack(&mut self) {
        while self.acked != self.next {
            self.segment();
        }
    }
}

impl Drop for RawTcp {
    fn drop(&mut self) {
        debug_assert_ne!(self.first, self.next);
        if !std::thread::panicking() {
            self.emit(self.next, RST | ACK, &[], b"");
        }
    }
}

/// The Internet checksum over all parts (RFC 1071).
pub fn checksum(parts: &[&[u8]]) -> [u8; 2] {
    let mut sum: u32 = parts
        .iter()
        .flat_map(|p| p.chunks(2))
        .map(|c| u32::from(c[0]) << 8 | c.get(1).map_or(0, |b| u32::from(*b)))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!(sum as u16)).to_be_bytes()
}
