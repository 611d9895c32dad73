//! Received fragments: each is checked and kept in [`ReassemblyTable`], and the complete datagram is
//! received like any other. Workers that share a device all get every fragment, since only a complete
//! datagram identifies its worker; ICMP errors are sent by the worker that received the first fragment
//! from the device.
//!
//! [`ReassemblyTable`]: crate::ip::reassembly::ReassemblyTable

use core::net::{IpAddr, Ipv6Addr};

use crate::buffer::RecvBuf;
use crate::ip::reassembly::{
    DatagramKey, Fragment, FragmentOutcome, ReassembledDatagram, ReassemblyTable,
};
use crate::link::control_queue::Origin;
use crate::network::Network;
use crate::time::Instant;
use crate::wire::bytes::{read_u16, read_u32, read_u64};
use crate::wire::constants::{PROTOCOL_ICMPV6, PROTOCOL_TCP};
use crate::wire::extension_headers::{self, WalkEnd};
use crate::wire::flow_key::FlowKey;
use crate::wire::frame::{self, FrameContent};
use crate::wire::icmp_error::IcmpError;

const ICMP: u8 = 1;
/// Length in bytes of the longest datagram, without the IPv6 header.
const LONGEST: usize = 65_535;

/// Parses the headers of a fragment, which were checked before. In IPv6 `header` is the offset of the
/// fragment header.
fn parse(packet: &[u8], header: Option<usize>) -> Option<Fragment> {
    let Some(at) = header else {
        let field = read_u16(packet.get(..20)?, 6);
        let addr = |at| IpAddr::from(read_u32(packet, at).to_be_bytes());
        return Some(Fragment {
            key: DatagramKey {
                src: addr(12),
                dst: addr(16),
                id: read_u16(packet, 4).into(),
                protocol: packet[9],
            },
            at: usize::from(packet[0] & 15) * 4,
            start: u32::from(field & 0x1fff) * 8,
            more: field & 0x2000 != 0,
            next: packet[9],
            named: 9,
            ecn: packet[1] & 3,
        });
    };
    let half = |at| u128::from(read_u64(packet, at));
    let addr = |at| Ipv6Addr::from_bits(half(at) << 64 | half(at + 8)).into();
    let header = packet.get(at..at + 8)?;
    Some(Fragment {
        key: DatagramKey {
            src: addr(8),
            dst: addr(24),
            id: read_u32(header, 4),
            protocol: 0,
        },
        at: at + 8,
        start: u32::from(read_u16(header, 2) & 0xfff8),
        more: header[3] & 1 != 0,
        next: header[0],
        named: at,
        ecn: packet[1] >> 4 & 3,
    })
}

/// Checks that a fragment can be part of a datagram; the error is the ICMP error to send, if any.
/// `packet`: the beginning of the packet, `len`: its whole length.
fn check(fragment: &Fragment, packet: &[u8], len: usize) -> Result<(), Option<IcmpError>> {
    let part = len - fragment.at;
    if part == 0 {
        return Err(None);
    }
    let end = fragment.start as usize + part;
    let holds = |at: usize, n: usize| packet.len() >= at + n;
    // The TCP header must be complete, options included (RFC 1858 section 3), since it is read from the
    // first buffer alone.
    let tcp = |at: usize| holds(at, 20) && holds(at, usize::from(packet[at + 12] >> 4) * 4);
    if fragment.key.dst.is_ipv4() {
        let first_ok = fragment.start != 0
            || match fragment.next {
                PROTOCOL_TCP => tcp(fragment.at),
                ICMP => holds(fragment.at, 8),
                _ => true,
            };
        // A fragment at this offset would overwrite the TCP flags (RFC 3128).
        let over_flags = fragment.next == PROTOCOL_TCP && fragment.start == 8;
        let whole = !fragment.more || part.is_multiple_of(8);
        let sound = whole && fragment.at + end <= LONGEST && first_ok && !over_flags;
        return if sound { Ok(()) } else { Err(None) };
    }
    if fragment.more && !part.is_multiple_of(8) {
        return Err(Some(IcmpError::parameter_problem(0, 4)));
    }
    // The fragment header does not count.
    if fragment.at - 8 - 40 + end > LONGEST {
        return Err(Some(IcmpError::parameter_problem(0, fragment.at - 8 + 2)));
    }
    if fragment.start == 0 {
        // All headers must be in the first fragment (RFC 7112).
        let complete = match extension_headers::find_upper_layer(packet, fragment.next, fragment.at)
        {
            Some((PROTOCOL_TCP, at)) => tcp(at),
            Some((PROTOCOL_ICMPV6, at)) => holds(at, 8),
            Some(_) => true,
            None => false,
        };
        if !complete {
            return Err(Some(IcmpError::parameter_problem(3, 0)));
        }
    }
    Ok(())
}

/// Returns whether a datagram that begins with this fragment is an ICMP error, which must not be answered
/// with another (RFC 1122 section 3.2.2, RFC 4443 section 2.4 (e)).
fn is_icmp_error(fragment: &Fragment, packet: &[u8]) -> bool {
    match fragment.key.dst {
        IpAddr::V4(_) => {
            fragment.next == ICMP && matches!(packet.get(fragment.at), Some(3 | 4 | 5 | 11 | 12))
        }
        IpAddr::V6(_) => extension_headers::carries_icmp_error(packet, fragment.next, fragment.at),
    }
}

/// What a complete datagram carries.
pub(super) struct ReceivedDatagram<B> {
    pub content: FrameContent,
    /// Begins with the content, and may consist of several buffers.
    pub buffer: B,
    pub src_mac: [u8; 6],
    /// Another worker received the first fragment, and answers.
    pub is_copy: bool,
}

impl<B: RecvBuf> ReassemblyTable<B> {
    /// Receives a fragment, and returns the datagram that it completes. `buffer` begins with the IP
    /// header; in IPv6 `header` is the offset of the fragment header.
    #[cold]
    pub(super) fn receive(
        &mut self,
        net: &mut Network,
        now: Instant,
        header: Option<usize>,
        buffer: B,
        src_mac: [u8; 6],
    ) -> Option<ReceivedDatagram<B>> {
        let fragment = parse(buffer.chunk(), header)?;
        let (src, dst) = (fragment.key.src, fragment.key.dst);
        if !net.is_own_address(dst) {
            net.stats.not_for_us += 1;
            return None;
        }
        if !net.can_be_peer(src, src_mac) {
            net.stats.martians += 1;
            return None;
        }
        net.stats.reassembly_required += 1;
        if let Err(error) = check(&fragment, buffer.chunk(), buffer.remaining()) {
            net.stats.reassembly_fails += 1;
            if let Some(error) = error
                && !(fragment.start == 0 && is_icmp_error(&fragment, buffer.chunk()))
            {
                let origin = Origin { src_mac, src, dst };
                let stats = &mut net.stats;
                net.control_queue
                    .icmp_error(now, &origin, error, buffer.chunk(), stats);
            }
            return None;
        }
        let from = (src_mac, !net.control_queue.silent);
        let limits = &net.config.reassembly;
        let failed = &mut net.stats.reassembly_fails;
        match self.insert(now, &fragment, buffer, from, limits, failed) {
            FragmentOutcome::Kept => None,
            FragmentOutcome::Failed => {
                net.stats.reassembly_fails += 1;
                None
            }
            FragmentOutcome::Complete(whole) => {
                let (src_mac, is_copy) = (whole.first.src_mac, !whole.first.ours);
                let silent = core::mem::replace(&mut net.control_queue.silent, is_copy);
                let received = content_of(net, now, whole);
                net.control_queue.silent = silent;
                let (content, buffer) = received?;
                Some(ReceivedDatagram {
                    content,
                    buffer,
                    src_mac,
                    is_copy,
                })
            }
        }
    }

    /// Drops datagrams whose reassembly timed out. If the first fragment was received, an ICMP error is
    /// sent to the source (RFC 792, RFC 4443 section 3.3).
    #[cold]
    pub(super) fn give_up(&mut self, net: &mut Network, now: Instant) {
        while let Some((key, first, head)) = self.take_expired(now) {
            net.stats.reassembly_timeouts += 1;
            net.stats.reassembly_fails += 1;
            let Some(head) = head else { continue };
            let packet = head.chunk();
            let header = key.dst.is_ipv6().then_some(first.named);
            if parse(packet, header).is_none_or(|fragment| is_icmp_error(&fragment, packet)) {
                continue;
            }
            let origin = Origin {
                src_mac: first.src_mac,
                src: key.src,
                dst: key.dst,
            };
            let error = IcmpError::reassembly_time_exceeded(key.dst.is_ipv6());
            net.control_queue
                .icmp_error(now, &origin, error, packet, &mut net.stats);
        }
    }
}

/// Returns the content of a reassembled datagram. `None`: it has none for us, and was answered if
/// required.
fn content_of<B: RecvBuf>(
    net: &mut Network,
    now: Instant,
    whole: ReassembledDatagram<B>,
) -> Option<(FrameContent, B)> {
    let stats = &mut net.stats;
    let (src, dst) = (whole.key.src, whole.key.dst);
    let src_mac = whole.first.src_mac;
    // Our MSS keeps segments within our MTU, and a connection counts a segment as one buffer, so a
    // longer segment is rejected.
    let too_long = whole.at + whole.len() > usize::from(net.config.mtu);
    let (next, at, named) = if dst.is_ipv4() {
        (whole.first.next, whole.at, 9)
    } else {
        let packet = whole.head.chunk();
        match extension_headers::walk_extension_headers(
            packet,
            whole.first.next,
            whole.at,
            whole.first.named,
        ) {
            WalkEnd::Reached { next, at, named } => (next, at, named),
            WalkEnd::Discard => {
                stats.header_errors += 1;
                return None;
            }
            WalkEnd::Report { error, .. } => {
                stats.header_errors += 1;
                if !extension_headers::carries_icmp_error(packet, whole.first.next, whole.at) {
                    let origin = Origin { src_mac, src, dst };
                    net.control_queue
                        .icmp_error(now, &origin, error, packet, stats);
                }
                return None;
            }
        }
    };
    let ce = whole.ce;
    let what = match (src, dst) {
        _ if next == PROTOCOL_TCP && too_long => {
            stats.reassembly_fails += 1;
            return None;
        }
        (IpAddr::V4(src), IpAddr::V4(dst)) if next == ICMP => FrameContent::Icmpv4 { src, dst },
        // Neighbour discovery must not be fragmented (RFC 6980): a hop limit of 0 fails its check for 255.
        (IpAddr::V6(src), IpAddr::V6(dst)) if next == PROTOCOL_ICMPV6 => FrameContent::Icmpv6 {
            src,
            dst,
            hop_limit: 0,
        },
        _ if next == PROTOCOL_TCP => {
            let stats = &whole.head.chunk()[at..];
            let ports = (read_u16(stats, 2), read_u16(stats, 0));
            let key = FlowKey::new(dst, ports.0, src, ports.1)?;
            FrameContent::Tcp { key, ce }
        }
        _ => {
            stats.reassembly_oks += 1;
            stats.unknown_protocols += 1;
            let error = match dst {
                IpAddr::V4(_) => IcmpError::PROTOCOL,
                IpAddr::V6(_) => IcmpError::parameter_problem(1, named),
            };
            if next != frame::NO_NEXT_HEADER || dst.is_ipv4() {
                let origin = Origin { src_mac, src, dst };
                let packet = whole.head.chunk();
                net.control_queue
                    .icmp_error(now, &origin, error, packet, stats);
            }
            return None;
        }
    };
    let Some(buffer) = whole.join_buffers(at) else {
        stats.reassembly_fails += 1;
        return None;
    };
    stats.reassembly_oks += 1;
    Some((what, buffer))
}
