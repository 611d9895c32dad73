//! Fragmentation of packets longer than the link's MTU: replies to fragmented echo requests (RFC
//! 1122 section 3.2.2.6, RFC 4443 section 4.2). No other packets that we send are longer. It is needed: ICMPv6
//! echo replies MUST return all data (RFC 4443 section 4.2).

use smoltcp::wire::{IpProtocol, Ipv4Packet, Ipv6Packet};

use crate::link::control_queue::ControlQueue;
use crate::stats::NetStats;
use crate::wire::constants::{IPV4_HEADER_LEN, IPV6_HEADER_LEN, PROTOCOL_ICMPV6};
use crate::wire::extension_headers::FRAGMENT;

/// Size of an IPv6 fragment header (RFC 8200 section 4.5).
const FRAGMENT_HEADER_LEN: usize = 8;

impl ControlQueue {
    /// Queues a frame with an ICMP message, fragmented if it exceeds the MTU.
    pub(crate) fn queue_long(&mut self, frame: Vec<u8>, ipv6: bool, stats: &mut NetStats) {
        let (header, extra): (usize, _) = if ipv6 {
            (IPV6_HEADER_LEN, FRAGMENT_HEADER_LEN)
        } else {
            (IPV4_HEADER_LEN, 0)
        };
        let l2 = self.ethernet_header_len();
        if frame.len() <= l2 + self.mtu {
            return self.push_frame(frame, header as u8, ipv6, stats);
        }
        let (head, payload) = frame.split_at(l2 + header);
        // All fragments but the last are multiples of eight bytes.
        let max_payload = (self.mtu - header - extra) & !7;
        if !self.has_room_for(payload.len().div_ceil(max_payload), stats) {
            return;
        }
        let id = self.next_id();
        for (index, part) in payload.chunks(max_payload).enumerate() {
            let at = index * max_payload;
            let more = at + part.len() < payload.len();
            let mut fragment = self.buffer();
            fragment.extend_from_slice(head);
            if ipv6 {
                let mut ip = Ipv6Packet::new_unchecked(&mut fragment[l2..]);
                ip.set_payload_len((extra + part.len()) as u16);
                ip.set_next_header(IpProtocol::from(FRAGMENT));
                let [high, low] = (at as u16 | u16::from(more)).to_be_bytes();
                fragment.extend_from_slice(&[PROTOCOL_ICMPV6, 0, high, low]);
                fragment.extend_from_slice(&id.to_be_bytes());
            } else {
                let mut ip = Ipv4Packet::new_unchecked(&mut fragment[l2..]);
                ip.set_total_len((header + part.len()) as u16);
                ip.set_ident(id as u16);
                ip.set_dont_frag(false);
                ip.set_more_frags(more);
                ip.set_frag_offset(at as u16);
                ip.fill_checksum();
            }
            fragment.extend_from_slice(part);
            self.push_frame(fragment, (header + extra) as u8, ipv6, stats);
        }
        self.recycle(frame);
    }
}
