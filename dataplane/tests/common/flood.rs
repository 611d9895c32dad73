//! A flood of every kind of hostile frame, mixed by a seed, next to a connection that it must not
//! harm.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use siw_tcp_sim::Rng;
use siw_tcp_sim::forge::{Ends, Tcp, fix_ipv4};

use super::PATIENCE;
use super::attacker::{Attacker, STRANGER};
use super::raw::{ACK, FIN, PSH, RST, SYN};

/// Frames sent between two checks of the clock and the connection.
const BURST: usize = 64;
/// Distance in sequence space beyond any window.
const FAR: u32 = 1 << 30;

/// The target of the flood, as seen by an attacker on the link who knows the four-tuple, but not
/// the data of the connection.
#[derive(Clone)]
pub struct Victim {
    /// The peer's address, then the device's.
    pub ends: Ends,
    /// The device's IPv6 address.
    pub ip6: IpAddr,
    /// The peer's port, then the device's.
    pub ports: [u16; 2],
    /// The port on which the device listens.
    pub listening: u16,
    pub stream: Option<Stream>,
}

/// Sequence space and timestamps of the connection, for frames that are almost acceptable.
#[derive(Clone)]
pub struct Stream {
    /// Initial sequence numbers of the peer and of the device.
    pub first: [u32; 2],
    /// One of the peer's timestamps.
    pub timestamp: u32,
    /// Bytes echoed to the peer: a lower bound for the bytes sent.
    pub echoed: Arc<AtomicU64>,
}

/// Number of frames sent of each of the [`KINDS`].
pub type Sent = [u64; KINDS.len()];

pub const KINDS: [&str; 16] = [
    "SYN to a listener",
    "SYN to a closed port",
    "ACK of no connection",
    "odd flags of no connection",
    "data out of the window",
    "data in the window, ACK of what was never sent",
    "SYN on the connection",
    "reset beside the next byte",
    "garbage in options",
    "old data, other bytes",
    "fragment",
    "martian",
    "ARP and neighbour discovery",
    "unknown protocol",
    "ICMP",
    "broken frame",
];

/// Generates the frames.
pub struct Mixer {
    rng: Rng,
    victim: Victim,
    pub sent: Sent,
}

impl Mixer {
    pub fn new(seed: u64, victim: Victim) -> Mixer {
        Mixer {
            rng: Rng::new(seed),
            victim,
            sent: [0; KINDS.len()],
        }
    }

    fn word(&mut self) -> u32 {
        self.rng.next_u64() as u32
    }

    /// Endpoints of a frame from a stranger: on the link or beyond, of either family.
    fn stranger(&mut self) -> Ends {
        let r = self.rng.next_u64();
        let [a, b] = [(r >> 8) as u8, (r >> 16) as u8];
        let (from, to) = match r % 4 {
            0 => (
                IpAddr::from([10, 77, 0, 20 + a % 200]),
                self.victim.ends.ip[1],
            ),
            1 => (
                IpAddr::from([198, 51, b, 1 + a % 250]),
                self.victim.ends.ip[1],
            ),
            2 => {
                let mut o = [0; 16];
                o[..2].copy_from_slice(&[0xfd, 0x77]);
                o[8..].copy_from_slice(&(r | 1 << 40).to_be_bytes());
                (IpAddr::from(o), self.victim.ip6)
            }
            _ => {
                let mut o = [0; 16];
                o[..4].copy_from_slice(&[0x20, 1, 0xd, 0xb8]);
                o[8..].copy_from_slice(&r.to_be_bytes());
                (IpAddr::from(o), self.victim.ip6)
            }
        };
        Ends {
            mac: [STRANGER, self.victim.ends.mac[1]],
            ip: [from, to],
        }
    }

    fn strange(&mut self, port: u16, flags: u8) -> Vec<u8> {
        let e = self.stranger();
        let t = Tcp {
            ports: [1 + self.rng.below(65_535) as u16, port],
            seq: self.word(),
            ack: self.word(),
            flags,
            window: self.word() as u16,
            options: &[2, 4, 5, 0xb4],
            payload: b"",
        };
        e.tcp(&t)
    }

    /// A segment that claims to be from the peer.
    fn forged(&self, seq: u32, ack: u32, flags: u8, timestamp: bool, payload: &[u8]) -> Vec<u8> {
        let mut o = [1, 1, 8, 10, 0, 0, 0, 0, 0, 0, 0, 0];
        let stamp = self.victim.stream.as_ref().map_or(0, |s| s.timestamp);
        let future = stamp.wrapping_add(FAR);
        o[4..8].copy_from_slice(&future.to_be_bytes());
        let mut e = self.victim.ends;
        e.mac[0] = STRANGER;
        e.tcp(&Tcp {
            ports: self.victim.ports,
            seq,
            ack,
            flags,
            window: 0,
            options: if timestamp { &o } else { &[] },
            payload,
        })
    }

    /// Lower bounds of the peer's next sequence number and of its acknowledgment number.
    fn reached(&self) -> Option<(u32, u32)> {
        let s = self.victim.stream.as_ref()?;
        let n = s.echoed.load(Ordering::Relaxed) as u32;
        let at = |first: u32| first.wrapping_add(1).wrapping_add(n);
        Some((at(s.first[0]), at(s.first[1])))
    }

    pub fn frame(&mut self) -> Vec<u8> {
        let kind = self.rng.below(KINDS.len() as u64) as usize;
        let r = self.rng.next_u64();
        let listening = self.victim.listening;
        let frame = match (kind, self.reached()) {
            (0, _) => self.strange(listening, SYN),
            (1, _) => self.strange(1 + (r % 1000) as u16, SYN),
            (2, _) => self.strange(listening, ACK),
            (3, _) => {
                let flags = [
                    0,
                    FIN,
                    FIN | PSH | 0x20,
                    SYN | ACK,
                    RST,
                    RST | ACK,
                    SYN | FIN,
                ];
                self.strange(listening, flags[r as usize % flags.len()])
            }
            (4, Some((seq, ack))) => {
                let off = [FAR, FAR.wrapping_neg()][r as usize & 1];
                self.forged(seq.wrapping_add(off), ack, ACK, r & 2 == 0, &[0xee; 200])
            }
            // Sequence number of the next bytes, or of others in the window.
            (5, Some((seq, ack))) => {
                let seq = seq.wrapping_add((r >> 8) as u32 & 0xffff);
                self.forged(seq, ack.wrapping_add(FAR), ACK, r & 2 == 0, &[0xee; 200])
            }
            (6, Some((seq, _))) => self.forged(
                seq.wrapping_add((r >> 8) as u32 & 0xffff),
                0,
                SYN,
                r & 2 == 0,
                b"",
            ),
            // Odd offsets only: the peer's writes begin at multiples of four.
            (7, Some((seq, _))) => {
                let first = self
                    .victim
                    .stream
                    .as_ref()
                    .map_or(0, |s| s.first[0])
                    .wrapping_add(1);
                let off = seq
                    .wrapping_sub(first)
                    .wrapping_add((r >> 8) as u32 & 0xffff);
                self.forged(first.wrapping_add(off | 1), 0, RST, r & 2 == 0, b"")
            }
            (8, _) => {
                let o: Vec<u8> = match r % 3 {
                    0 => vec![254, 0, 0, 0],
                    1 => vec![8, 10, 0, 0],
                    _ => (0..40).map(|_| self.rng.next_u64() as u8).collect(),
                };
                let (seq, ack) = self.reached().unwrap_or((self.word(), 0));
                let mut e = self.victim.ends;
                e.mac[0] = STRANGER;
                e.tcp(&Tcp {
                    ports: self.victim.ports,
                    seq: seq.wrapping_add(FAR),
                    ack,
                    flags: ACK,
                    window: 0,
                    options: &o,
                    payload: b"",
                })
            }
            // All of it was received long ago.
            (9, Some((seq, ack))) => self.forged(
                seq.wrapping_sub(3000),
                ack.wrapping_sub(3000),
                ACK,
                r & 2 == 0,
                &[0xee; 1000],
            ),
            // There is no stream to imitate: no timestamp, or a SYN with any sequence number.
            (4 | 5 | 9, None) => {
                let (seq, ack) = (self.word(), self.word());
                self.forged(seq, ack, ACK, false, &[0xee; 200])
            }
            (6 | 7, None) => {
                let seq = self.word();
                self.forged(seq, 0, SYN, false, b"")
            }
            (10, _) => {
                let mut e = self.stranger();
                e.mac[1] = self.victim.ends.mac[1];
                if e.ip[0].is_ipv6() {
                    e.ip(44, &[6, 0, 0, 1, 0, 0, 0, r as u8])
                } else {
                    let mut f = e.udp([1, 2], &[0; 100]);
                    f[20..22].copy_from_slice(&(0x2000 | (r as u16 & 0x1fff)).to_be_bytes());
                    fix_ipv4(&mut f[14..34]);
                    f
                }
            }
            (11, _) => {
                let mut e = self.stranger();
                let odd: [IpAddr; 5] = if e.ip[0].is_ipv4() {
                    [
                        e.ip[1],
                        [127, 0, 0, 1].into(),
                        [0, 0, 0, 0].into(),
                        [224, 0, 0, 9].into(),
                        [10, 77, 0, 255].into(),
                    ]
                } else {
                    let group = [0xff02, 0, 0, 0, 0, 0, 0, 1];
                    [
                        e.ip[1],
                        [0, 0, 0, 0, 0, 0, 0, 1u16].into(),
                        group.into(),
                        group.into(),
                        group.into(),
                    ]
                };
                e.ip[0] = odd[r as usize % odd.len()];
                if r >> 8 & 1 == 0 {
                    e.icmp(
                        [if e.ip[0].is_ipv4() { 8 } else { 128 }, 0],
                        [0; 4],
                        b"smurf",
                    )
                } else {
                    let t = Tcp {
                        ports: [9, listening],
                        flags: SYN,
                        ..Tcp::default()
                    };
                    e.tcp(&t)
                }
            }
            (12, _) => {
                // Not the peer's address: entries follow such claims (RFC 826).
                let e = self.stranger();
                match (e.ip[0].is_ipv4(), r >> 8 & 1) {
                    (true, 0) => e.arp(1),
                    (true, _) => e.arp(2),
                    (false, 0) => e.solicit(),
                    _ => e.advertise(),
                }
            }
            (13, _) => {
                let e = self.stranger();
                let p = [17, 132, 47, 255][r as usize % 4];
                e.ip(p, &[0; 64])
            }
            (14, _) => self.icmp(r),
            _ => {
                let mut f = self.strange(listening, SYN);
                match r % 3 {
                    0 => f.truncate(14 + (r >> 8) as usize % (f.len() - 14)),
                    1 => {
                        // Flips a bit behind the Ethernet header; some bits are not covered by any
                        // checksum.
                        let at = 14 + (r >> 8) as usize % (f.len() - 14);
                        f[at] ^= 1 << (r >> 40 & 7);
                    }
                    _ => {
                        let garbage = self.rng.below(1400) as usize;
                        f.truncate(14);
                        f[13] ^= (r >> 8 & 1) as u8;
                        f.extend((0..garbage).map(|_| self.rng.next_u64() as u8));
                    }
                }
                f
            }
        };
        self.sent[kind] += 1;
        frame
    }

    /// Echo requests, and errors that quote the connection with a sequence number out of range.
    fn icmp(&mut self, r: u64) -> Vec<u8> {
        let e = self.stranger();
        if r & 1 == 0 || e.ip[0].is_ipv6() {
            return e.icmp(
                [if e.ip[0].is_ipv4() { 8 } else { 128 }, 0],
                [0, 1, 0, 1],
                b"flood",
            );
        }
        let v = &self.victim;
        let back = Ends {
            mac: v.ends.mac,
            ip: [v.ends.ip[1], v.ends.ip[0]],
        };
        let quoted = back.tcp(&Tcp {
            ports: [v.ports[1], v.ports[0]],
            seq: self
                .reached()
                .map_or(r as u32, |(_, ack)| ack.wrapping_add(FAR)),
            ..Tcp::default()
        });
        // Packet too big (MTU 68); port unreachable, protocol unreachable.
        let (what, mtu) = [([3, 4], 68), ([3, 3], 0), ([3, 2], 0)][(r >> 8) as usize % 3];
        e.icmp(what, [0, 0, 0, mtu], &quoted[14..42])
    }
}

/// Floods for `time`, and until the connection made progress in the last round. `progress` counts
/// the bytes carried; a round ends once that count has grown by `step`.
pub fn flood(
    attacker: &Attacker,
    mixer: &mut Mixer,
    time: Duration,
    progress: impl Fn() -> u64,
    step: u64,
    over: &AtomicBool,
) -> u64 {
    let end = Instant::now() + time;
    let mut rounds = 0;
    while Instant::now() < end {
        let goal = progress() + step;
        let patience = Instant::now() + PATIENCE;
        while progress() < goal {
            assert!(Instant::now() < patience, "the connection stands still");
            assert!(!over.load(Ordering::Relaxed), "the connection ended early");
            for _ in 0..BURST {
                attacker.send(&mixer.frame());
            }
        }
        rounds += 1;
    }
    rounds
}
