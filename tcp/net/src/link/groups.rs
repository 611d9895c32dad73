//! IP multicast groups that we are in: membership reports to routers and switches, by IGMP version 2 (RFC 2236)
//! and MLD version 1 (RFC 2710), which those of the later versions serve as well.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::time::Duration;

use crate::config::IpCidr;
use crate::link::control_queue::ControlQueue;
use crate::siphash::Key;
use crate::stats::NetStats;
use crate::time::Instant;
use crate::wire::checksum::OnesComplementSum;
use crate::wire::constants::{
    CHECKSUM_RIGHT, ETHERTYPE_IPV4, ETHERTYPE_IPV6, IPV4_DONT_FRAGMENT, IPV4_HEADER_LEN,
    IPV6_FIRST_BYTE, IPV6_HEADER_LEN, PROTOCOL_ICMPV6,
};

pub(crate) const PROTOCOL_IGMP: u8 = 2;
const IGMP_QUERY: u8 = 0x11;
const IGMP_REPORT: u8 = 0x16;
const IGMP_LEAVE: u8 = 0x17;
const IGMP_LEN: usize = 8;
/// Header with the router alert option (RFC 2113), and with the precedence of network control.
const IPV4_ALERT_FIRST_BYTES: [u8; 2] = [0x46, 0xc0];
const IPV4_ALERT: [u8; 4] = [0x94, 4, 0, 0];
/// Type of a multicast listener query.
pub(crate) const MLD_QUERY: u8 = 130;
const MLD_REPORT: u8 = 131;
const MLD_DONE: u8 = 132;
const MLD_LEN: usize = 24;
/// Hop-by-hop options header with router alert (RFC 2711) and padding.
const IPV6_ALERT: [u8; 8] = [PROTOCOL_ICMPV6, 0, 5, 2, 0, 0, 1, 0];
const ALL_ROUTERS_V4: Ipv4Addr = Ipv4Addr::new(224, 0, 0, 2);
const ALL_ROUTERS_V6: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2);
/// Shortest time between the answers to two queries.
const ANSWER_PAUSE: Duration = Duration::from_millis(100);

/// Longest delay of the second report of a group that is entered (Unsolicited Report Interval: RFC 2236 section
/// 8.10, RFC 2710 section 7.10).
const REPORT_INTERVAL_NS: u64 = 10_000_000_000;

/// Groups of which queue pairs are members.
pub(crate) struct Groups {
    joined: Vec<IpAddr>,
    /// Times of the last answers, for IPv4 and for IPv6.
    answered: [Option<Instant>; 2],
    /// Second reports: their groups and times.
    repeats: Vec<(IpAddr, Instant)>,
    /// Time of the first one in ns; `u64::MAX` if there is none.
    next_repeat: u64,
    /// Draws the delays of second reports, with the number of the draw.
    secret: Key,
    draws: u64,
}

impl Groups {
    /// `secret`: makes the delays of reports differ between hosts.
    pub(crate) fn new(secret: Key) -> Groups {
        Groups {
            joined: Vec::new(),
            answered: [None; 2],
            repeats: Vec::new(),
            next_repeat: u64::MAX,
            secret,
            draws: 0,
        }
    }

    /// Returns whether reports are due.
    #[inline]
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        now.0 >= self.next_repeat
    }

    /// Returns the time of the next report.
    #[inline]
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        (self.next_repeat != u64::MAX).then_some(Instant(self.next_repeat))
    }

    /// Reports a group that was entered, now and once more after a random delay, since the first report may be
    /// lost (RFC 2236 section 3, RFC 2710 section 4).
    pub(crate) fn report(&mut self, now: Instant, group: IpAddr, reporter: &mut Reporter<'_>) {
        reporter.send(group, Membership::Report);
        self.draws += 1;
        let delay = self.secret.hash::<2, 4>(&[self.draws]) % REPORT_INTERVAL_NS;
        self.repeats.retain(|(other, _)| *other != group);
        self.repeats.push((group, Instant(now.0 + delay)));
        self.find_next_repeat();
    }

    /// Sends the reports that are due.
    #[cold]
    pub(crate) fn repeat_reports(&mut self, now: Instant, reporter: &mut Reporter<'_>) {
        self.repeats.retain(|(group, when)| {
            let is_due = *when <= now;
            if is_due {
                reporter.send(*group, Membership::Report);
            }
            !is_due
        });
        self.find_next_repeat();
    }

    fn find_next_repeat(&mut self) {
        let times = self.repeats.iter().map(|(_, when)| when.0);
        self.next_repeat = times.min().unwrap_or(u64::MAX);
    }

    /// Returns whether we are in any group.
    pub(crate) fn has_any(&self) -> bool {
        !self.joined.is_empty()
    }

    /// Returns whether packets to the group are received.
    #[inline]
    pub(crate) fn has(&self, group: IpAddr) -> bool {
        self.joined.contains(&group)
    }

    /// Enters a group.
    pub(crate) fn join(&mut self, group: IpAddr) {
        if !self.has(group) {
            self.joined.push(group);
        }
    }

    /// Leaves a group.
    pub(crate) fn leave(&mut self, group: IpAddr) {
        self.joined.retain(|joined| *joined != group);
        self.repeats.retain(|(other, _)| *other != group);
        self.find_next_repeat();
    }

    /// Answers an IGMP message, if it is a query with a right checksum.
    #[cold]
    pub(crate) fn on_igmp(&mut self, now: Instant, message: &[u8], reporter: &mut Reporter<'_>) {
        if let [IGMP_QUERY, _, _, _, a, b, c, d, ..] = *message
            && sum_of(message) == CHECKSUM_RIGHT
        {
            self.on_query(now, Ipv4Addr::new(a, b, c, d).into(), reporter);
        }
    }

    /// Answers a query for all groups of a family, or for one.
    #[cold]
    pub(crate) fn on_query(&mut self, now: Instant, asked: IpAddr, reporter: &mut Reporter<'_>) {
        let answered = &mut self.answered[usize::from(asked.is_ipv6())];
        let is_soon = answered.is_some_and(|last| now - last < ANSWER_PAUSE);
        // Another worker answers.
        if reporter.queue.silent || self.joined.is_empty() || is_soon {
            return;
        }
        *answered = Some(now);
        let is_asked = |group: &&IpAddr| {
            group.is_ipv4() == asked.is_ipv4() && (asked.is_unspecified() || asked == **group)
        };
        for group in self.joined.iter().filter(is_asked) {
            reporter.send(*group, Membership::Report);
        }
    }
}

/// Returns the Ethernet address of a group (RFC 1112 section 6.4, RFC 2464 section 7).
pub(crate) fn mac_of_group(group: IpAddr) -> [u8; 6] {
    match group {
        IpAddr::V4(group) => {
            let [_, b, c, d] = group.octets();
            [1, 0, 0x5e, b & 0x7f, c, d]
        }
        IpAddr::V6(group) => {
            let octets = group.octets();
            [0x33, 0x33, octets[12], octets[13], octets[14], octets[15]]
        }
    }
}

/// Membership message of a group.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Membership {
    Report,
    Leave,
}

/// Sends membership messages.
pub(crate) struct Reporter<'a> {
    pub queue: &'a mut ControlQueue,
    pub addresses: &'a [IpCidr],
    pub stats: &'a mut NetStats,
}

impl Reporter<'_> {
    /// Queues a membership message.
    pub(crate) fn send(&mut self, group: IpAddr, what: Membership) {
        match group {
            IpAddr::V4(group) => self.push_igmp(group, what),
            IpAddr::V6(group) => self.push_mld(group, what),
        }
    }

    fn push_igmp(&mut self, group: Ipv4Addr, what: Membership) {
        let mut own = self.addresses.iter().map(|cidr| cidr.addr);
        let source = own.find_map(|address| match address {
            IpAddr::V4(address) => Some(address),
            IpAddr::V6(_) => None,
        });
        let queue = &mut *self.queue;
        let Some(source) = source.filter(|_| queue.has_room(self.stats)) else {
            return;
        };
        let (to, kind) = match what {
            Membership::Report => (group, IGMP_REPORT),
            Membership::Leave => (ALL_ROUTERS_V4, IGMP_LEAVE),
        };
        let mut frame = queue.start_frame(mac_of_group(to.into()), ETHERTYPE_IPV4);
        let l2 = frame.len();
        let header = IPV4_HEADER_LEN + IPV4_ALERT.len();
        frame.extend_from_slice(&IPV4_ALERT_FIRST_BYTES);
        frame.extend_from_slice(&((header + IGMP_LEN) as u16).to_be_bytes());
        frame.extend_from_slice(&[0, 0]);
        frame.extend_from_slice(&[IPV4_DONT_FRAGMENT, 0]);
        // Time to live, protocol, checksum.
        frame.extend_from_slice(&[1, PROTOCOL_IGMP, 0, 0]);
        frame.extend_from_slice(&source.octets());
        frame.extend_from_slice(&to.octets());
        frame.extend_from_slice(&IPV4_ALERT);
        let sum = !sum_of(&frame[l2..]);
        frame[l2 + 10..l2 + 12].copy_from_slice(&sum.to_be_bytes());
        let mut message = [kind, 0, 0, 0, 0, 0, 0, 0];
        message[4..].copy_from_slice(&group.octets());
        let sum = !sum_of(&message);
        message[2..4].copy_from_slice(&sum.to_be_bytes());
        frame.extend_from_slice(&message);
        queue.push_frame(frame, header as u8, false, self.stats);
    }

    fn push_mld(&mut self, group: Ipv6Addr, what: Membership) {
        let mut own = self.addresses.iter().map(|cidr| cidr.addr);
        // The source is link-local or unspecified (RFC 3590).
        let source = own.find_map(|address| match address {
            IpAddr::V6(address) if address.is_unicast_link_local() => Some(address),
            _ => None,
        });
        let source = source.unwrap_or(Ipv6Addr::UNSPECIFIED);
        let queue = &mut *self.queue;
        if !queue.has_room(self.stats) {
            return;
        }
        let (to, kind) = match what {
            Membership::Report => (group, MLD_REPORT),
            Membership::Leave => (ALL_ROUTERS_V6, MLD_DONE),
        };
        let mut frame = queue.start_frame(mac_of_group(to.into()), ETHERTYPE_IPV6);
        let len = IPV6_ALERT.len() + MLD_LEN;
        frame.extend_from_slice(&[IPV6_FIRST_BYTE, 0, 0, 0]);
        frame.extend_from_slice(&(len as u16).to_be_bytes());
        // Hop-by-hop options, hop limit.
        frame.extend_from_slice(&[0, 1]);
        frame.extend_from_slice(&source.octets());
        frame.extend_from_slice(&to.octets());
        frame.extend_from_slice(&IPV6_ALERT);
        let mut message = [0; MLD_LEN];
        message[0] = kind;
        message[8..].copy_from_slice(&group.octets());
        let mut sum = OnesComplementSum::new();
        sum.add(&source.octets());
        sum.add(&to.octets());
        sum.add_word(MLD_LEN as u16);
        sum.add_word(PROTOCOL_ICMPV6.into());
        sum.add(&message);
        let sum = !sum.value();
        message[2..4].copy_from_slice(&sum.to_be_bytes());
        frame.extend_from_slice(&message);
        let l3_len = IPV6_HEADER_LEN + IPV6_ALERT.len();
        queue.push_frame(frame, l3_len as u8, true, self.stats);
    }
}

fn sum_of(bytes: &[u8]) -> u16 {
    let mut sum = OnesComplementSum::new();
    sum.add(bytes);
    sum.value()
}
