//! Management datagrams (MADs): queue pair 1 of a device, which is in the worker that has this number
//! ([`Steering::owner_of_datagrams`]). Received ones are checked here, within a budget for each sender, and go
//! to the control thread, which knows the datagram services; its answers and requests leave from here.
//!
//! ```text
//! on_mad() -> Event::Sidr -> control/connection/services.rs -> Command::SendMad -> send_mad() -> port
//! ```
//!
//! [`Steering::owner_of_datagrams`]: siw_net::Steering::owner_of_datagrams

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use siw_iwarp::RxStream;
use siw_net::{DatagramError, DatagramPath, Instant, RecvBuf, RoceDatagram};
use siw_roce::{
    DEFAULT_PKEY, MAD_LEN, MAD_QKEY, MAD_QPN, MAX_QPN, PKEY_MASK, SidrMessage, SidrReply, UdHeader,
};

use super::connections::Connections;
use super::datagrams::{NoRecords, UDP_LEN, has_right_icrc, reason_of, seal, source_port};
use super::deadlines::DeadlineOwner;
use super::drop_reasons::DropReason;
use super::messages::{Event, MadToSend, NO_CLIENT};
use crate::datapath::output::PortSink;
use crate::datapath::rx_frame::{FrameBytes, RxFrame};
use crate::ids::Qpn;

/// Number of budgets, among which senders are divided by a secret hash.
const BUDGETS: usize = 64;
/// MADs of one budget in a second, and of all: the control thread needs some microseconds for each.
const MADS_PER_SECOND: u32 = 2048;
const ALL_MADS_PER_SECOND: u32 = 8192;
/// Maximum number of MADs that wait for their neighbour or for room in the port.
const WAITING_MAX: usize = 512;
/// Maximum time of that wait.
const PATIENCE: Duration = Duration::from_secs(1);
/// Shortest and longest pause between two looks at a neighbour; each is twice the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(16);
/// Bytes of an IPv4 header without options.
const IPV4_LEN: usize = 20;
/// TTL or hop limit.
const HOP_LIMIT: u8 = 64;

/// Events that are permitted in a second.
#[derive(Clone, Copy)]
pub(super) struct Budget {
    pub(super) since: Instant,
    pub(super) left: u32,
}

impl Budget {
    pub(super) fn take(&mut self, now: Instant, per_second: u32) -> bool {
        if now - self.since >= Duration::from_secs(1) {
            *self = Budget {
                since: now,
                left: per_second,
            };
        }
        let may = self.left > 0;
        self.left -= u32::from(may);
        may
    }
}

/// The MADs of a worker.
pub(super) struct Mads {
    budgets: [Budget; BUDGETS],
    of_all: Budget,
    secret: RandomState,
    /// Packet sequence number of the next MAD.
    psn: u32,
    /// MADs that could not be sent yet, with the end of their wait.
    waiting: VecDeque<(Instant, Box<MadToSend>)>,
    pause: Duration,
}

impl Default for Mads {
    fn default() -> Mads {
        let (since, left) = (Instant::ZERO, ALL_MADS_PER_SECOND);
        let of_all = Budget { since, left };
        let left = MADS_PER_SECOND;
        Mads {
            budgets: [Budget { since, left }; BUDGETS],
            of_all,
            secret: RandomState::new(),
            psn: 0,
            waiting: VecDeque::new(),
            pause: FIRST_PAUSE,
        }
    }
}

impl Mads {
    fn admit(&mut self, now: Instant, from: IpAddr) -> bool {
        let index = self.secret.hash_one(from) as usize % BUDGETS;
        self.budgets[index].take(now, MADS_PER_SECOND) && self.of_all.take(now, ALL_MADS_PER_SECOND)
    }
}

/// Outcome of an attempt to send.
enum Attempt {
    Sent,
    /// The neighbour is being solicited, or the port is full.
    Waits,
    Lost,
}

/// Source and destination of an IP header.
pub(super) fn addresses(ip: &[u8]) -> Option<(IpAddr, IpAddr)> {
    if ip.len() == IPV4_LEN {
        let from: [u8; 4] = ip.get(12..16)?.try_into().ok()?;
        let to: [u8; 4] = ip.get(16..20)?.try_into().ok()?;
        return Some((Ipv4Addr::from(from).into(), Ipv4Addr::from(to).into()));
    }
    let from: [u8; 16] = ip.get(8..24)?.try_into().ok()?;
    let to: [u8; 16] = ip.get(24..40)?.try_into().ok()?;
    Some((Ipv6Addr::from(from).into(), Ipv6Addr::from(to).into()))
}

impl Connections {
    /// Processes a datagram to queue pair 1.
    #[cold]
    pub(super) fn on_mad(
        &mut self,
        now: Instant,
        port: usize,
        datagram: &RoceDatagram<RxFrame>,
    ) -> Result<(), DropReason> {
        let RoceDatagram { packet, ip_len, .. } = datagram;
        let before = ip_len + UDP_LEN;
        let head = packet.chunk();
        let transport = head.get(before..).unwrap_or(&[]);
        let transport_len = packet.remaining() - before;
        let (header, at, len) = UdHeader::parse(transport, transport_len).map_err(reason_of)?;
        let ends = addresses(head.get(..*ip_len).unwrap_or(&[]));
        let (remote, local) = ends.ok_or(DropReason::UdMalformed)?;
        // Before the ICRC, whose computation costs more.
        if !self.mads.admit(now, remote) {
            return Err(DropReason::MadFlood);
        }
        if !has_right_icrc(packet, *ip_len) {
            return Err(DropReason::UdIcrc);
        }
        if header.pkey & PKEY_MASK != DEFAULT_PKEY & PKEY_MASK {
            return Err(DropReason::UdPkey);
        }
        if header.qkey != MAD_QKEY {
            return Err(DropReason::UdQkey);
        }
        if len != MAD_LEN {
            return Err(DropReason::MadUnsupported);
        }
        let mut mad = [0; MAD_LEN];
        FrameBytes(packet).peek(before + at, &mut mad);
        let message = SidrMessage::parse(&mad).map_err(|_| DropReason::MadUnsupported)?;
        let device = self.ports[port].device;
        if let SidrMessage::Unserved(reply) = message {
            self.drops.count(DropReason::SidrUnserved);
            self.send_mad(now, answer(device, (local, remote), &reply));
            return Ok(());
        }
        self.post_event(Event::Sidr {
            device,
            local,
            remote,
            message: Box::new(message),
        });
        Ok(())
    }

    /// Sends a MAD, or keeps it until its neighbour has answered.
    #[cold]
    pub(super) fn send_mad(&mut self, now: Instant, mad: Box<MadToSend>) {
        match self.try_to_send(now, &mad) {
            Attempt::Sent => {}
            Attempt::Waits if self.mads.waiting.len() < WAITING_MAX => {
                if self.mads.waiting.is_empty() {
                    self.mads.pause = FIRST_PAUSE;
                    self.deadlines
                        .insert(now + FIRST_PAUSE, DeadlineOwner::Mads);
                }
                self.mads.waiting.push_back((now + PATIENCE, mad));
            }
            Attempt::Waits | Attempt::Lost => self.drops.count(DropReason::UdNotSent),
        }
    }

    /// Tries again to send the MADs that wait.
    #[cold]
    pub(super) fn retry_mads(&mut self, now: Instant) {
        for _ in 0..self.mads.waiting.len() {
            let Some((end, mad)) = self.mads.waiting.pop_front() else {
                break;
            };
            match self.try_to_send(now, &mad) {
                Attempt::Sent => {}
                Attempt::Waits if now < end => self.mads.waiting.push_back((end, mad)),
                Attempt::Waits | Attempt::Lost => self.drops.count(DropReason::UdNotSent),
            }
        }
        if !self.mads.waiting.is_empty() {
            self.mads.pause = LONGEST_PAUSE.min(self.mads.pause * 2);
            let next = now + self.mads.pause;
            self.deadlines.insert(next, DeadlineOwner::Mads);
        }
    }

    fn try_to_send(&mut self, now: Instant, mad: &MadToSend) -> Attempt {
        let mut ports = self.ports.iter_mut();
        let Some(port) = ports.find(|port| port.device == mad.device && !port.is_removed()) else {
            return Attempt::Lost;
        };
        if !port.output.has_room_for_frame(&mut self.cache) {
            return Attempt::Waits;
        }
        let header = UdHeader {
            solicited: false,
            pkey: DEFAULT_PKEY,
            dest_qpn: MAD_QPN,
            psn: self.mads.psn,
            qkey: MAD_QKEY,
            src_qpn: MAD_QPN,
            immediate: None,
        };
        self.mads.psn = self.mads.psn.wrapping_add(1) & MAX_QPN;
        let len = self.datagrams.write(&header, &mad.bytes);
        let path = DatagramPath {
            from: mad.local,
            to: mad.remote,
            hop_limit: HOP_LIMIT,
            traffic_class: 0,
            flow_label: 0,
            source_port: source_port(Qpn(MAD_QPN)),
        };
        let network = match port.stack.roce_headers(now, mad.owner, &path, len) {
            Ok(network) => network,
            Err(DatagramError::Unresolved) => return Attempt::Waits,
            Err(DatagramError::NoRoute | DatagramError::TooLong) => return Attempt::Lost,
        };
        let datagram = self.datagrams.written(len);
        if seal(&network, datagram).is_none() {
            return Attempt::Lost;
        }
        let wall_time = self.clock.wall_time(now);
        let mut sink = PortSink::new(&mut port.output, &mut self.cache, NoRecords, wall_time);
        match port.stack.send_roce(&network, datagram, &mut sink) {
            true => Attempt::Sent,
            false => Attempt::Waits,
        }
    }
}

/// An answer that concerns no client.
fn answer(device: usize, (local, remote): (IpAddr, IpAddr), reply: &SidrReply) -> Box<MadToSend> {
    Box::new(MadToSend {
        device,
        local,
        remote,
        owner: NO_CLIENT,
        bytes: reply.build(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_one_sender_leaves_budget_to_most_others() {
        let mut mads = Mads::default();
        let now = Instant::from_millis(5000);
        let flooding: IpAddr = [10, 0, 0, 1].into();
        let admitted = (0..10_000).filter(|_| mads.admit(now, flooding)).count();
        assert_eq!(admitted, MADS_PER_SECOND as usize);
        let others = (2..=100u8).map(|last| IpAddr::from([10, 0, 0, last]));
        let served = others.filter(|other| mads.admit(now, *other)).count();
        assert!(served > 85, "{served}");
        let later = now + Duration::from_secs(1);
        assert!(mads.admit(later, flooding));
    }

    #[test]
    fn ends_are_read_from_headers_of_both_families() {
        let mut v4 = [0; 20];
        v4[12..].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        let ends = addresses(&v4).unwrap();
        assert_eq!(ends, ([10, 0, 0, 1].into(), [10, 0, 0, 2].into()));
        let mut v6 = [0; 40];
        (v6[23], v6[39]) = (1, 2);
        let ends = addresses(&v6).unwrap();
        assert_eq!(ends, ("::1".parse().unwrap(), "::2".parse().unwrap()));
        assert!(addresses(&v6[..39]).is_none());
    }
}
