//! Steering of flows to the workers that share a device. The NIC's RSS and this code agree: the
//! Toeplitz hash of the four-tuple selects a slot of the indirection table, and slot `i` belongs to
//! worker `i` modulo the number of workers.
//!
//! The key is symmetric, so that both directions of a flow belong to the same worker: a connection to
//! the device's own address stays within one worker, as does one between two devices of these workers.
//! Datagrams of RoCEv2 have no flow: queue pair number modulo the number of workers selects the worker.

use core::fmt;
use core::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use crate::flow::toeplitz::{SYMMETRIC_RSS_KEY, Toeplitz};
use crate::wire::bytes::read_u16;
use crate::wire::constants::{
    ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6, ETHERTYPE_VLAN, IPV4_FRAGMENT_MASK,
    IPV4_HEADER_LEN, IPV6_HEADER_LEN, PORT_MAPPER_PORT, PROTOCOL_ICMP, PROTOCOL_ICMPV6,
    PROTOCOL_TCP, PROTOCOL_UDP, ROCE_PORT,
};
use crate::wire::extension_headers;

/// Number of slots if the port has no indirection table.
const SLOTS: u32 = 512;
/// Place of the destination's queue pair number in a datagram of RoCEv2, from the UDP header on.
const ROCE_QPN: core::ops::Range<usize> = 13..16;

/// The workers that process a received frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// The worker that owns the connection.
    Worker(usize),
    /// The receiving worker answers; all others learn from a copy, which they do not answer.
    AllWorkers,
    /// The receiving worker.
    AnyWorker,
}

/// The steering rule of one device.
pub struct Steering {
    hash: Toeplitz,
    slots: u32,
    worker_count: u32,
}

impl fmt::Debug for Steering {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Steering({} slots, {})", self.slots, self.worker_count)
    }
}

impl Steering {
    /// Returns the rule for `workers` workers. `reta_size` is the length of the port's indirection
    /// table, or 0 if it has none.
    pub fn new(workers: usize, reta_size: u16) -> Steering {
        Steering {
            hash: Toeplitz::new(&SYMMETRIC_RSS_KEY),
            slots: if reta_size > 0 {
                reta_size.into()
            } else {
                SLOTS
            },
            worker_count: workers.max(1) as u32,
        }
    }

    /// Returns the number of workers that share the device.
    pub fn worker_count(&self) -> usize {
        self.worker_count as usize
    }

    /// Returns the indirection table to program into a port with RSS: one worker number per slot.
    pub fn indirection_table(&self) -> Vec<u16> {
        (0..self.slots)
            .map(|i| (i % self.worker_count) as u16)
            .collect()
    }

    #[inline]
    fn worker(&self, hash: u32) -> usize {
        (hash % self.slots % self.worker_count) as usize
    }

    /// Returns the worker that owns a connection; 0 if the addresses are of different families.
    pub fn owner_of(&self, local: SocketAddr, remote: SocketAddr) -> usize {
        let (sport, dport) = (remote.port(), local.port());
        match (remote.ip(), local.ip()) {
            (IpAddr::V4(s), IpAddr::V4(d)) => {
                self.worker(self.hash.tcp_v4(s.octets(), d.octets(), sport, dport))
            }
            (IpAddr::V6(s), IpAddr::V6(d)) => {
                self.worker(self.hash.tcp_v6(s.octets(), d.octets(), sport, dport))
            }
            _ => 0,
        }
    }

    /// Returns the worker that has the queue pair of datagrams with this number.
    #[inline]
    pub fn owner_of_datagrams(&self, qpn: u32) -> usize {
        (qpn % self.worker_count) as usize
    }

    /// Selects the workers for a UDP datagram.
    fn steer_udp(&self, udp: &[u8]) -> Option<Destination> {
        match read_u16(udp.get(..4)?, 2) {
            // Each worker has its own requests to port mappers.
            PORT_MAPPER_PORT => Some(Destination::AllWorkers),
            ROCE_PORT => {
                let number = udp.get(ROCE_QPN)?;
                let qpn = u32::from_be_bytes([0, number[0], number[1], number[2]]);
                Some(Destination::Worker(self.owner_of_datagrams(qpn)))
            }
            _ => None,
        }
    }

    /// Classifies a received frame by its first bytes, which begin with the Ethernet header. A
    /// frame that is not a complete TCP segment may go to any worker: the stack counts and drops
    /// it.
    #[inline]
    pub fn classify_frame(&self, frame: &[u8]) -> Destination {
        self.look_inside(frame).unwrap_or(Destination::AnyWorker)
    }

    #[inline]
    fn look_inside(&self, frame: &[u8]) -> Option<Destination> {
        let mut at = 12;
        let mut ethertype = read_u16(frame.get(at..at + 2)?, 0);
        if ethertype == ETHERTYPE_VLAN {
            at = 16;
            ethertype = read_u16(frame.get(at..at + 2)?, 0);
        }
        let ip = &frame[at + 2..];
        match ethertype {
            ETHERTYPE_IPV4 => {
                let head = ip.get(..IPV4_HEADER_LEN)?;
                let len = usize::from(head[0] & 15) * 4;
                if read_u16(head, 6) & IPV4_FRAGMENT_MASK != 0 {
                    return Some(Destination::AllWorkers);
                }
                match head[9] {
                    PROTOCOL_TCP => {
                        let mut input = [0; 12];
                        input[..8].copy_from_slice(&head[12..20]);
                        input[8..].copy_from_slice(ip.get(len..len + 4)?);
                        Some(Destination::Worker(self.worker(self.hash.hash(&input))))
                    }
                    // Destination unreachable, time exceeded, parameter problem (RFC 792).
                    PROTOCOL_ICMP => {
                        matches!(ip.get(len)?, 3 | 11 | 12).then_some(Destination::AllWorkers)
                    }
                    PROTOCOL_UDP => self.steer_udp(ip.get(len..)?),
                    _ => None,
                }
            }
            ETHERTYPE_IPV6 => {
                let head = ip.get(..IPV6_HEADER_LEN)?;
                let (next, at) = match head[6] {
                    next if extension_headers::is_extension_header(next) => {
                        extension_headers::find_upper_layer(ip, next, 40)?
                    }
                    next => (next, 40),
                };
                match next {
                    PROTOCOL_TCP => {
                        let mut input = [0; 36];
                        input[..32].copy_from_slice(&head[8..40]);
                        input[32..].copy_from_slice(ip.get(at..at + 4)?);
                        Some(Destination::Worker(self.worker(self.hash.hash(&input))))
                    }
                    // Errors are below 128 (RFC 4443 section 2.1); neighbour solicitation and
                    // advertisement (RFC 4861 section 4).
                    PROTOCOL_ICMPV6 => matches!(ip.get(at)?, 0..=127 | 135 | 136)
                        .then_some(Destination::AllWorkers),
                    PROTOCOL_UDP => self.steer_udp(ip.get(at..)?),
                    extension_headers::FRAGMENT => Some(Destination::AllWorkers),
                    _ => None,
                }
            }
            ETHERTYPE_ARP => Some(Destination::AllWorkers),
            _ => None,
        }
    }
}

/// The position of one worker among those that share a device.
#[derive(Clone, Debug)]
pub struct WorkerSteering {
    /// The steering rule shared by all workers of the device.
    pub steering: Arc<Steering>,
    /// The number of this worker in the steering rule.
    pub worker: usize,
}

impl WorkerSteering {
    /// Returns whether this worker receives the frames of a connection.
    #[inline]
    pub fn owns(&self, local: SocketAddr, remote: SocketAddr) -> bool {
        self.steering.owner_of(local, remote) == self.worker
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sock(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn tcp_v4(vlan: bool, src: [u8; 4], dst: [u8; 4], ports: [u16; 2]) -> Vec<u8> {
        let mut frame = vec![2; 12];
        if vlan {
            frame.extend_from_slice(&[0x81, 0, 0, 100]);
        }
        frame.extend_from_slice(&[8, 0]);
        let mut ip = [0u8; 20];
        ip[0] = 0x45;
        ip[9] = 6;
        ip[12..16].copy_from_slice(&src);
        ip[16..].copy_from_slice(&dst);
        frame.extend_from_slice(&ip);
        frame.extend_from_slice(&ports[0].to_be_bytes());
        frame.extend_from_slice(&ports[1].to_be_bytes());
        frame
    }

    #[test]
    fn frames_and_four_tuples_give_the_same_worker() {
        let steering = Steering::new(3, 128);
        let mut seen = [0; 3];
        for port in 50_000..50_300u16 {
            let (local, remote) = (
                SocketAddr::new([10, 0, 0, 1].into(), 7174),
                SocketAddr::new([10, 0, 0, 2].into(), port),
            );
            let owner = steering.owner_of(local, remote);
            assert_eq!(owner, steering.owner_of(remote, local));
            let frame = tcp_v4(port % 2 == 0, [10, 0, 0, 2], [10, 0, 0, 1], [port, 7174]);
            assert_eq!(steering.classify_frame(&frame), Destination::Worker(owner));
            seen[owner] += 1;
        }
        assert!(
            seen.iter().all(|count| *count > 60),
            "badly spread: {seen:?}"
        );
    }

    #[test]
    fn ipv6_flows_spread_and_are_symmetric() {
        let steering = Steering::new(2, 0);
        let mut seen = [0; 2];
        for port in 50_000..50_200u16 {
            let (address, remote) = (
                sock("[fd00::1]:7174"),
                SocketAddr::new("fd00::2".parse().unwrap(), port),
            );
            assert_eq!(
                steering.owner_of(address, remote),
                steering.owner_of(remote, address)
            );
            seen[steering.owner_of(address, remote)] += 1;
        }
        assert!(
            seen.iter().all(|count| *count > 60),
            "badly spread: {seen:?}"
        );
    }

    #[test]
    fn the_indirection_table_agrees_with_the_hash() {
        let steering = Steering::new(3, 128);
        let table = steering.indirection_table();
        assert_eq!(table.len(), 128);
        for (i, worker) in table.iter().enumerate() {
            assert_eq!(steering.worker(i as u32 + 128 * 77), usize::from(*worker));
        }
    }

    #[test]
    fn datagrams_of_rocev2_go_to_the_worker_of_their_queue_pair() {
        let steering = Steering::new(3, 0);
        let mut frame = tcp_v4(false, [10, 0, 0, 2], [10, 0, 0, 1], [0xc000, 4791]);
        frame[14 + 9] = 17;
        assert_eq!(steering.classify_frame(&frame), Destination::AnyWorker);
        frame.extend_from_slice(&[0; 4 + 5]);
        frame.extend_from_slice(&[1, 0, 7]);
        let owner = steering.owner_of_datagrams(0x01_0007);
        assert_eq!(owner, 65543 % 3);
        assert_eq!(steering.classify_frame(&frame), Destination::Worker(owner));
    }

    #[test]
    fn neighbours_and_errors_go_to_all_workers() {
        let steering = Steering::new(2, 0);
        let mut arp = vec![0xff; 12];
        arp.extend_from_slice(&[8, 6]);
        assert_eq!(steering.classify_frame(&arp), Destination::AllWorkers);
        let mut icmp = tcp_v4(false, [1; 4], [2; 4], [0, 0]);
        icmp[14 + 9] = 1;
        icmp[34] = 8;
        assert_eq!(steering.classify_frame(&icmp), Destination::AnyWorker);
        icmp[34] = 3;
        assert_eq!(steering.classify_frame(&icmp), Destination::AllWorkers);
        icmp[14 + 6] = 0x20;
        assert_eq!(
            steering.classify_frame(&icmp),
            Destination::AllWorkers,
            "a fragment"
        );
        for count in 0..arp.len() {
            steering.classify_frame(&arp[..count]);
        }
        let whole = tcp_v4(true, [1; 4], [2; 4], [9, 9]);
        for count in 0..whole.len() {
            assert_eq!(
                steering.classify_frame(&whole[..count]),
                Destination::AnyWorker
            );
        }
    }
}
