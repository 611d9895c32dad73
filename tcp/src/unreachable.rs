//! Answers to IP packets whose protocol nobody here speaks, as scanners send them.

use core::net::IpAddr;

use smoltcp::wire::Icmpv6Packet;

use crate::checksum::Sum;
use crate::control::{Control, Origin, ipv4_header, ipv6_header};
use crate::{Instant, RecvBuf, Stats};

/// Destination unreachable, protocol unreachable (RFC 792).
const PROTOCOL_UNREACHABLE: [u8; 8] = [3, 2, 0, 0, 0, 0, 0, 0];
/// Parameter problem, unrecognised next header, which the sixth byte of the IPv6 header names
/// (RFC 4443 section 3.4).
const UNKNOWN_NEXT_HEADER: [u8; 8] = [4, 1, 0, 0, 0, 0, 0, 6];
/// What of the packet an error quotes at most: to stay below 576 bytes (RFC 1812 section
/// 4.3.2.3), and below 1280 (RFC 4443 section 2.4 (c)).
const QUOTE_V4: usize = 576 - 20 - 8;
const QUOTE_V6: usize = 1280 - 40 - 8;

impl Control {
    /// RFC 1122 section 3.2.2.1, RFC 8200 section 4. `b` is the packet, from a peer to one of our
    /// addresses.
    pub(crate) fn unknown_protocol<B: RecvBuf>(
        &mut self,
        now: Instant,
        o: &Origin,
        b: &B,
        stats: &mut Stats,
    ) {
        if self.silent || !self.may_answer(now, stats) {
            return;
        }
        let quote = |most| &b.chunk()[..b.chunk().len().min(most)];
        let (frame, l3) = match (o.src, o.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                let quoted = quote(QUOTE_V4);
                let mut f = self.frame(o.src_mac, 0x0800);
                ipv4_header(&mut f, dst, src, 8 + quoted.len());
                let at = f.len();
                f.extend_from_slice(&PROTOCOL_UNREACHABLE);
                f.extend_from_slice(quoted);
                let mut sum = Sum::new();
                sum.add(&f[at..]);
                f[at + 2..at + 4].copy_from_slice(&(!sum.value()).to_be_bytes());
                (f, 20)
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                let quoted = quote(QUOTE_V6);
                let mut f = self.frame(o.src_mac, 0x86dd);
                ipv6_header(&mut f, dst, src, 8 + quoted.len());
                let at = f.len();
                f.extend_from_slice(&UNKNOWN_NEXT_HEADER);
                f.extend_from_slice(quoted);
                Icmpv6Packet::new_unchecked(&mut f[at..]).fill_checksum(&dst, &src);
                (f, 40)
            }
            _ => return,
        };
        stats.icmp_out += 1;
        stats.icmp_unreachables_out += 1;
        self.queue(frame, l3, o.dst.is_ipv6(), stats);
    }
}
