//! Errors of ICMP that we send about packets nothing can be done with, as scanners send them.

use core::net::IpAddr;

use smoltcp::wire::Icmpv6Packet;

use crate::base::stats::StackStats;
use crate::base::time::Instant;
use crate::link::control_queue::{Control, Origin, ipv4_header, ipv6_header};
use crate::wire::checksum::OnesComplementSum;
use crate::wire::icmp_error::IcmpError;

/// What of the packet an error quotes at most: to stay below 576 bytes (RFC 1812 section
/// 4.3.2.3), and below 1280 (RFC 4443 section 2.4 (c)).
pub(crate) const QUOTE_V4: usize = 576 - 20 - 8;
pub(crate) const QUOTE_V6: usize = 1280 - 40 - 8;

impl Control {
    /// Tells the sender of `packet`, which is from a peer to one of our addresses (RFC 1122 section
    /// 3.2.2, RFC 4443 section 2.4).
    pub(crate) fn icmp_error(
        &mut self,
        now: Instant,
        origin: &Origin,
        error: IcmpError,
        packet: &[u8],
        stats: &mut StackStats,
    ) {
        if self.silent || !self.may_answer(now, stats) {
            return;
        }
        let quote = |most| &packet[..packet.len().min(most)];
        let IcmpError { kind, code, word } = error;
        let mut head = [kind, code, 0, 0, 0, 0, 0, 0];
        head[4..].copy_from_slice(&word.to_be_bytes());
        let (frame, l3) = match (origin.src, origin.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                let quoted = quote(QUOTE_V4);
                let mut frame = self.frame(origin.src_mac, 0x0800);
                ipv4_header(&mut frame, dst, src, 8 + quoted.len());
                let at = frame.len();
                frame.extend_from_slice(&head);
                frame.extend_from_slice(quoted);
                let mut sum = OnesComplementSum::new();
                sum.add(&frame[at..]);
                frame[at + 2..at + 4].copy_from_slice(&(!sum.value()).to_be_bytes());
                stats.icmp_unreachables_out += u64::from(kind == 3);
                stats.icmp_time_exceeded_out += u64::from(kind == 11);
                (frame, 20)
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                let quoted = quote(QUOTE_V6);
                let mut frame = self.frame(origin.src_mac, 0x86dd);
                ipv6_header(&mut frame, dst, src, 8 + quoted.len());
                let at = frame.len();
                frame.extend_from_slice(&head);
                frame.extend_from_slice(quoted);
                Icmpv6Packet::new_unchecked(&mut frame[at..]).fill_checksum(&dst, &src);
                stats.icmp_parameter_problems_out += u64::from(kind == 4);
                stats.icmp_time_exceeded_out += u64::from(kind == 3);
                (frame, 40)
            }
            _ => return,
        };
        stats.icmp_out += 1;
        self.queue(frame, l3, origin.dst.is_ipv6(), stats);
    }
}
