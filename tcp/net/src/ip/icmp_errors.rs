//! ICMP errors about packets that cannot be processed.

use core::net::IpAddr;

use smoltcp::wire::Icmpv6Packet;

use crate::link::control_queue::{ControlQueue, Origin, append_ipv4_header, append_ipv6_header};
use crate::stats::NetStats;
use crate::time::Instant;
use crate::wire::checksum::OnesComplementSum;
use crate::wire::constants::{ETHERTYPE_IPV4, ETHERTYPE_IPV6, IPV4_HEADER_LEN, IPV6_HEADER_LEN};
use crate::wire::icmp_error::{
    ICMPV4_TIME_EXCEEDED, ICMPV4_UNREACHABLE, ICMPV6_PARAMETER_PROBLEM, ICMPV6_TIME_EXCEEDED,
    IcmpError,
};

/// Size of an ICMP header.
const ICMP_HEADER_LEN: usize = 8;
/// Maximum number of bytes of the packet that an error quotes: an IPv4 error stays within 576 bytes
/// (RFC 1812 section 4.3.2.3), an IPv6 error within 1280 (RFC 4443 section 2.4 (c)).
pub(crate) const QUOTE_V4: usize = 576 - IPV4_HEADER_LEN - ICMP_HEADER_LEN;
pub(crate) const QUOTE_V6: usize = 1280 - IPV6_HEADER_LEN - ICMP_HEADER_LEN;

impl ControlQueue {
    /// Sends an ICMP error to the sender of `packet`, whose source may be a peer's address and
    /// whose destination is ours (RFC 1122 section 3.2.2, RFC 4443 section 2.4).
    pub(crate) fn icmp_error(
        &mut self,
        now: Instant,
        origin: &Origin,
        error: IcmpError,
        packet: &[u8],
        stats: &mut NetStats,
    ) {
        if self.silent || !self.may_answer(now, stats) {
            return;
        }
        let quote = |max_len| &packet[..packet.len().min(max_len)];
        let IcmpError { kind, code, word } = error;
        let mut head = [kind, code, 0, 0, 0, 0, 0, 0];
        head[4..].copy_from_slice(&word.to_be_bytes());
        let (frame, l3) = match (origin.src, origin.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                let quoted = quote(QUOTE_V4);
                let mut frame = self.start_frame(origin.src_mac, ETHERTYPE_IPV4);
                append_ipv4_header(&mut frame, dst, src, ICMP_HEADER_LEN + quoted.len());
                let at = frame.len();
                frame.extend_from_slice(&head);
                frame.extend_from_slice(quoted);
                let mut sum = OnesComplementSum::new();
                sum.add(&frame[at..]);
                frame[at + 2..at + 4].copy_from_slice(&(!sum.value()).to_be_bytes());
                stats.icmp_unreachables_out += u64::from(kind == ICMPV4_UNREACHABLE);
                stats.icmp_time_exceeded_out += u64::from(kind == ICMPV4_TIME_EXCEEDED);
                (frame, IPV4_HEADER_LEN as u8)
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                let quoted = quote(QUOTE_V6);
                let mut frame = self.start_frame(origin.src_mac, ETHERTYPE_IPV6);
                append_ipv6_header(&mut frame, dst, src, ICMP_HEADER_LEN + quoted.len());
                let at = frame.len();
                frame.extend_from_slice(&head);
                frame.extend_from_slice(quoted);
                Icmpv6Packet::new_unchecked(&mut frame[at..]).fill_checksum(&dst, &src);
                stats.icmp_parameter_problems_out += u64::from(kind == ICMPV6_PARAMETER_PROBLEM);
                stats.icmp_time_exceeded_out += u64::from(kind == ICMPV6_TIME_EXCEEDED);
                (frame, IPV6_HEADER_LEN as u8)
            }
            _ => return,
        };
        stats.icmp_out += 1;
        self.push_frame(frame, l3, origin.dst.is_ipv6(), stats);
    }
}
