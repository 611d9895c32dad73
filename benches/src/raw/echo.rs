//! Replies to ARP requests (RFC 826) and ICMP echo requests (RFC 792), built in place from the
//! requests.

use super::frames::swap_macs;
use super::options::ETHERNET_HEADER;
use std::net::Ipv4Addr;

const ETHERTYPE_IPV4: [u8; 2] = [0x08, 0x00];
const ETHERTYPE_ARP: [u8; 2] = [0x08, 0x06];
/// Hardware type Ethernet, protocol type IPv4, and their address lengths; the operation follows.
const ARP_FIXED: [u8; 6] = [0, 1, 8, 0, 6, 4];
const ARP_REQUEST: [u8; 2] = [0, 1];
const ARP_REPLY: [u8; 2] = [0, 2];
const PROTOCOL_ICMP: u8 = 1;
const ICMP_ECHO_REQUEST: u8 = 8;
const ICMP_ECHO_REPLY: u8 = 0;
/// Fragment flags and offset: all bits except "do not fragment" are zero in an unfragmented packet.
const FRAGMENT_BITS: u8 = 0xbf;

/// Turns a request for one of `addresses` into its reply; false for every other frame.
pub(super) fn answer_request(frame: &mut [u8], mac: [u8; 6], addresses: &[Ipv4Addr]) -> bool {
    match frame.get(12..14) {
        Some(ethertype) if ethertype == ETHERTYPE_ARP => answer_arp(frame, mac, addresses),
        Some(ethertype) if ethertype == ETHERTYPE_IPV4 => answer_echo(frame, mac, addresses),
        _ => false,
    }
}

fn is_ours(octets: &[u8], addresses: &[Ipv4Addr]) -> bool {
    addresses.iter().any(|address| address.octets() == *octets)
}

fn answer_arp(frame: &mut [u8], mac: [u8; 6], addresses: &[Ipv4Addr]) -> bool {
    let Some(arp) = frame.get(ETHERNET_HEADER..ETHERNET_HEADER + 28) else {
        return false;
    };
    let is_request = arp[..6] == ARP_FIXED && arp[6..8] == ARP_REQUEST;
    if !is_request || !is_ours(&arp[24..28], addresses) {
        return false;
    }
    let mut reply = [0; 28];
    reply[..6].copy_from_slice(&ARP_FIXED);
    reply[6..8].copy_from_slice(&ARP_REPLY);
    reply[8..14].copy_from_slice(&mac);
    reply[14..18].copy_from_slice(&arp[24..28]);
    // The target of the reply is the sender of the request.
    reply[18..28].copy_from_slice(&arp[8..18]);
    frame[ETHERNET_HEADER..ETHERNET_HEADER + 28].copy_from_slice(&reply);
    swap_macs(frame);
    frame[6..12].copy_from_slice(&mac);
    true
}

fn answer_echo(frame: &mut [u8], mac: [u8; 6], addresses: &[Ipv4Addr]) -> bool {
    let to_us = frame[..6] == mac;
    let Some(packet) = frame.get_mut(ETHERNET_HEADER..) else {
        return false;
    };
    let header_len = packet
        .first()
        .map_or(0, |first| usize::from(first & 0xf) * 4);
    if header_len < 20 || packet.len() < header_len + 8 || packet[0] >> 4 != 4 {
        return false;
    }
    let is_whole = packet[6] & FRAGMENT_BITS == 0 && packet[7] == 0;
    let is_echo = packet[9] == PROTOCOL_ICMP && packet[header_len] == ICMP_ECHO_REQUEST;
    if !(to_us && is_whole && is_echo && is_ours(&packet[16..20], addresses)) {
        return false;
    }
    // Swapping the addresses does not change the header checksum.
    packet[12..20].rotate_left(4);
    packet[header_len] = ICMP_ECHO_REPLY;
    let checksum = &mut packet[header_len + 2..header_len + 4];
    // One word became smaller by 0x0800, so the checksum grows by it (RFC 1624).
    let before = u16::from_be_bytes([checksum[0], checksum[1]]);
    let (sum, carry) = before.overflowing_add(u16::from(ICMP_ECHO_REQUEST) << 8);
    checksum.copy_from_slice(&(sum + u16::from(carry)).to_be_bytes());
    swap_macs(frame)
}

#[cfg(test)]
mod tests {
    use super::super::frames::sum_words;
    use super::*;

    const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const PEER: [u8; 6] = [2, 0, 0, 0, 0, 9];
    const OURS: [Ipv4Addr; 1] = [Ipv4Addr::new(10, 0, 0, 1)];

    fn arp_request(target: [u8; 4]) -> Vec<u8> {
        let mut frame = [[0xff; 6], PEER].concat();
        frame.extend(ETHERTYPE_ARP);
        frame.extend(ARP_FIXED);
        frame.extend(ARP_REQUEST);
        frame.extend(PEER);
        frame.extend([10, 0, 0, 9]);
        frame.extend([0; 6]);
        frame.extend(target);
        frame
    }

    fn echo_request(data: &[u8]) -> Vec<u8> {
        let mut frame = [MAC, PEER].concat();
        frame.extend(ETHERTYPE_IPV4);
        frame.extend([
            0x45,
            0,
            0,
            28 + data.len() as u8,
            0,
            7,
            0x40,
            0,
            64,
            1,
            0,
            0,
        ]);
        frame.extend([10, 0, 0, 9, 10, 0, 0, 1]);
        frame.extend([ICMP_ECHO_REQUEST, 0, 0, 0, 0x12, 0x34, 0, 1]);
        frame.extend(data);
        let sum = (!sum_words(&frame[34..])).to_be_bytes();
        frame[36..38].copy_from_slice(&sum);
        frame
    }

    #[test]
    fn who_asks_for_our_address_learns_it() {
        let mut frame = arp_request([10, 0, 0, 1]);
        assert!(answer_request(&mut frame, MAC, &OURS));
        assert_eq!((&frame[..6], &frame[6..12]), (&PEER[..], &MAC[..]));
        assert_eq!(frame[20..22], ARP_REPLY);
        assert_eq!(
            (&frame[22..28], &frame[28..32]),
            (&MAC[..], &[10, 0, 0, 1][..])
        );
        assert_eq!(
            (&frame[32..38], &frame[38..42]),
            (&PEER[..], &[10, 0, 0, 9][..])
        );
        assert!(!answer_request(&mut arp_request([10, 0, 0, 2]), MAC, &OURS));
    }

    #[test]
    fn an_echo_reply_has_the_data_and_a_right_checksum() {
        for data in [&b"four"[..], &[0xff; 56], &[0; 8]] {
            let mut frame = echo_request(data);
            assert!(answer_request(&mut frame, MAC, &OURS));
            assert_eq!((&frame[..6], &frame[6..12]), (&PEER[..], &MAC[..]));
            assert_eq!(frame[26..34], [10, 0, 0, 1, 10, 0, 0, 9]);
            assert_eq!(frame[34], ICMP_ECHO_REPLY);
            assert_eq!(frame[42..], *data);
            assert_eq!(sum_words(&frame[34..]), 0xffff, "{data:?}");
        }
    }

    #[test]
    fn other_frames_and_short_ones_get_no_answer() {
        let whole = echo_request(b"data");
        for len in 0..42 {
            assert!(!answer_request(&mut whole[..len].to_vec(), MAC, &OURS));
            assert!(!answer_request(
                &mut arp_request([10, 0, 0, 1])[..len.min(41)].to_vec(),
                MAC,
                &OURS
            ));
        }
        let changed = |at: usize, value: u8| {
            let mut frame = whole.clone();
            frame[at] = value;
            answer_request(&mut frame, MAC, &OURS)
        };
        // Another host, a fragment, another protocol, a reply.
        assert!(!changed(0, 0xff) && !changed(20, 0x20) && !changed(21, 1));
        assert!(!changed(23, 17) && !changed(34, 0) && !changed(33, 2));
        assert!(changed(22, 3));
    }
}
