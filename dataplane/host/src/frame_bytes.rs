//! Conversion of frames between a port and the TAP: VLAN tags, and checksums that the port left
//! out.

use siw_net::checksum::OnesComplementSum;

/// Length of the two Ethernet addresses.
const ADDRESSES: usize = 12;
const VLAN_TAG: usize = 4;
const ETHERNET_HEADER: usize = 14;
const IPV4_HEADER: usize = 20;
const IPV6_HEADER: usize = 40;
const ETHERTYPE_VLAN: u16 = 0x8100;
const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const PROTOCOL_TCP: u8 = 6;
const PROTOCOL_UDP: u8 = 17;

fn read_u16(bytes: &[u8], at: usize) -> Option<u16> {
    let field = bytes.get(at..at + 2)?;
    Some(u16::from_be_bytes([field[0], field[1]]))
}

/// Removes the device's VLAN tag from a frame; the stack has already checked the VLAN number.
pub(super) fn remove_vlan_tag(frame: &mut Vec<u8>) {
    if read_u16(frame, ADDRESSES) == Some(ETHERTYPE_VLAN) && frame.len() >= ADDRESSES + VLAN_TAG {
        frame.drain(ADDRESSES..ADDRESSES + VLAN_TAG);
    }
}

/// Inserts a VLAN tag into a frame that starts at offset [`VLAN_ROOM`] of `room`; the tagged frame
/// starts at offset 0.
pub(super) fn insert_vlan_tag(room: &mut [u8], vlan: u16) {
    if room.len() >= VLAN_TAG + ADDRESSES {
        room.copy_within(VLAN_TAG..VLAN_TAG + ADDRESSES, 0);
        room[ADDRESSES..ADDRESSES + 2].copy_from_slice(&ETHERTYPE_VLAN.to_be_bytes());
        room[ADDRESSES + 2..ADDRESSES + VLAN_TAG].copy_from_slice(&vlan.to_be_bytes());
    }
}

/// Headroom that [`insert_vlan_tag`] needs before a frame.
pub(super) const VLAN_ROOM: usize = VLAN_TAG;

/// Completes the checksum of an untagged TCP or UDP packet whose checksum field holds the
/// pseudo-header sum: virtual links deliver this for packets that were never on a wire. Other
/// frames stay unchanged.
pub(super) fn complete_l4_checksum(frame: &mut [u8]) -> Option<()> {
    let (protocol, start, end) = match read_u16(frame, ADDRESSES)? {
        ETHERTYPE_IPV4 => {
            let ip = frame.get(ETHERNET_HEADER..ETHERNET_HEADER + IPV4_HEADER)?;
            let header = usize::from(ip[0] & 15) * 4;
            let total = usize::from(read_u16(ip, 2)?);
            (
                ip[9],
                ETHERNET_HEADER + header,
                ETHERNET_HEADER.checked_add(total)?,
            )
        }
        ETHERTYPE_IPV6 => {
            let ip = frame.get(ETHERNET_HEADER..ETHERNET_HEADER + IPV6_HEADER)?;
            let start = ETHERNET_HEADER + IPV6_HEADER;
            (ip[6], start, start + usize::from(read_u16(ip, 4)?))
        }
        _ => return None,
    };
    let field = start
        + match protocol {
            PROTOCOL_TCP => 16,
            PROTOCOL_UDP => 6,
            _ => return None,
        };
    let mut sum = OnesComplementSum::new();
    sum.add(frame.get(start..end)?);
    // A UDP checksum of zero means none (RFC 768).
    let value = match !sum.value() {
        0 if protocol == PROTOCOL_UDP => 0xffff,
        value => value,
    };
    frame
        .get_mut(field..field + 2)?
        .copy_from_slice(&value.to_be_bytes());
    Some(())
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use siw_tcp_sim::forge::{Ends, Tcp};

    use super::*;

    fn ends(addresses: [&str; 2]) -> Ends {
        Ends {
            mac: [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]],
            ip: addresses.map(|text| text.parse::<IpAddr>().unwrap()),
        }
    }

    #[test]
    fn a_tag_that_is_inserted_is_removed_again() {
        let frame = ends(["10.0.0.1", "10.0.0.2"]).udp([1, 2], b"a datagram");
        let mut room = vec![0; VLAN_ROOM];
        room.extend_from_slice(&frame);
        insert_vlan_tag(&mut room, 7);
        assert_eq!(room[12..18], [0x81, 0, 0, 7, 8, 0]);
        remove_vlan_tag(&mut room);
        assert_eq!(room, frame);
        // A frame without a tag stays unchanged, however short.
        remove_vlan_tag(&mut room);
        assert_eq!(room, frame);
        remove_vlan_tag(&mut vec![0x81; 14]);
        insert_vlan_tag(&mut [0; 3], 7);
    }

    #[test]
    fn partial_checksums_are_completed() {
        for addresses in [["10.0.0.1", "10.0.0.2"], ["fd00::1", "fd00::2"]] {
            let end = ends(addresses);
            let segment = Tcp {
                ports: [1, 2],
                payload: b"odd",
                ..Tcp::default()
            };
            let header = if addresses[0].contains(':') { 54 } else { 34 };
            for (whole, field) in [
                (end.tcp(&segment), header + 16),
                (end.udp([5, 6], b"data"), header + 6),
            ] {
                // Initial value of the field: the pseudo-header sum.
                let mut sum = OnesComplementSum::new();
                sum.add(&whole[header..]);
                // The sum of all words and the pseudo header is ffff, so the pseudo-header sum is
                // its complement.
                let pseudo = !sum.value();
                let mut partial = whole.clone();
                partial[field..field + 2].copy_from_slice(&pseudo.to_be_bytes());
                complete_l4_checksum(&mut partial).unwrap();
                assert_eq!(partial, whole);
            }
            let mut echo = end.icmp([8, 0], [0; 4], &[1; 8]);
            let before = echo.clone();
            assert_eq!(complete_l4_checksum(&mut echo), None);
            assert_eq!(echo, before);
        }
        for length in 0..60 {
            let whole = ends(["fd00::1", "fd00::2"]).udp([1, 2], b"");
            complete_l4_checksum(&mut whole[..length].to_vec());
        }
    }
}
