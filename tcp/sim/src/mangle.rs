//! Changes that nodes on the path make to frames: ECN marks, smaller windows, and ICMP errors.

use siw_net::{
    FrameMeta,
    checksum::{OnesComplementSum, tcp_checksum_offset},
};

use crate::Rng;

/// Returns the offset of the IP header; `None`: not an IP frame.
fn ip_at(frame: &[u8]) -> Option<usize> {
    let l2 = if frame.get(12..14)? == [0x81, 0] {
        18
    } else {
        14
    };
    matches!(frame.get(l2 - 2..l2)?, [8, 0] | [0x86, 0xdd]).then_some(l2)
}

/// Marks a packet Congestion Experienced if it is ECN-capable (RFC 3168 section 5).
pub fn mark(frame: &mut [u8]) -> bool {
    let Some(l2) = ip_at(frame) else { return false };
    if frame[l2] >> 4 == 4 && frame[l2 + 1] & 3 != 0 {
        frame[l2 + 1] |= 3;
        frame[l2 + 10..l2 + 12].fill(0);
        let mut sum = OnesComplementSum::new();
        sum.add(&frame[l2..l2 + 20]);
        let sum = !sum.value();
        frame[l2 + 10..l2 + 12].copy_from_slice(&sum.to_be_bytes());
        true
    } else if frame[l2] >> 4 == 6 && frame[l2 + 1] & 0x30 != 0 {
        frame[l2 + 1] |= 0x30;
        true
    } else {
        false
    }
}

/// Flips up to `most` bits behind the Ethernet header, either adjacent or anywhere.
pub fn damage(frame: &mut [u8], rng: &mut Rng, most: u32) {
    let bits = (frame.len() as u64 - 14) * 8;
    let mut at = rng.below(bits);
    frame[14 + at as usize / 8] ^= 1 << (at % 8);
    if most <= 1 {
        return;
    }
    let together = rng.chance(0.5);
    for _ in 0..rng.below(most.into()) {
        at = if together {
            (at + 1) % bits
        } else {
            rng.below(bits)
        };
        frame[14 + at as usize / 8] ^= 1 << (at % 8);
    }
}

/// Reduces the window of a TCP segment that is neither SYN nor RST to `share`/256 of its value and
/// updates the checksum (RFC 1624). Returns whether the window became smaller.
pub fn shrink_window(frame: &mut [u8], share: u8) -> bool {
    let Some(l2) = ip_at(frame) else { return false };
    let (protocol, tcp) = match frame[l2] >> 4 {
        4 => (frame[l2 + 9], l2 + 4 * usize::from(frame[l2] & 15)),
        _ => (frame[l2 + 6], l2 + 40),
    };
    if protocol != 6 || frame.len() < tcp + 20 || frame[tcp + 13] & 6 != 0 {
        return false;
    }
    let word = |frame: &[u8], at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
    let old = word(frame, tcp + 14);
    let new = (u32::from(old) * u32::from(share) / 256) as u16;
    let mut sum = OnesComplementSum::new();
    for word in [!word(frame, tcp + 16), !old, new] {
        sum.add_word(word);
    }
    frame[tcp + 14..tcp + 16].copy_from_slice(&new.to_be_bytes());
    frame[tcp + 16..tcp + 18].copy_from_slice(&(!sum.value()).to_be_bytes());
    new < old
}

/// Returns the length of the IP packet in `frame`; 0: not IP.
pub fn packet_len(frame: &[u8]) -> usize {
    ip_at(frame).map_or(0, |l2| frame.len() - l2)
}

/// Builds the "packet too big" error of a router with a narrow link (RFC 1191 section 4, RFC 4443
/// section 3.2), with the destination of the packet as its source address.
pub fn too_big(frame: &[u8], mtu: u16) -> Option<Vec<u8>> {
    let l2 = ip_at(frame)?;
    let mut out = [&frame[6..12], &frame[..6], &frame[12..l2]].concat();
    let packet = &frame[l2..];
    let mut icmp;
    let mut sum = OnesComplementSum::new();
    if packet[0] >> 4 == 4 {
        icmp = vec![3, 4, 0, 0, 0, 0];
        icmp.extend(mtu.to_be_bytes());
        icmp.extend_from_slice(packet.get(..28)?);
        let mut ip = vec![0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 1, 0, 0];
        ip[2..4].copy_from_slice(&(20 + icmp.len() as u16).to_be_bytes());
        ip.extend_from_slice(&packet[16..20]);
        ip.extend_from_slice(&packet[12..16]);
        let mut head = OnesComplementSum::new();
        head.add(&ip);
        ip[10..12].copy_from_slice(&(!head.value()).to_be_bytes());
        out.extend(ip);
    } else {
        icmp = vec![2, 0, 0, 0, 0, 0];
        icmp.extend(mtu.to_be_bytes());
        icmp.extend_from_slice(packet.get(..60)?);
        let mut ip = vec![0x60, 0, 0, 0, 0, icmp.len() as u8, 58, 64];
        ip.extend_from_slice(&packet[24..40]);
        ip.extend_from_slice(&packet[8..24]);
        sum.add(&ip[8..]);
        sum.add_word(58);
        sum.add_word(icmp.len() as u16);
        out.extend(ip);
    }
    sum.add(&icmp);
    icmp[2..4].copy_from_slice(&(!sum.value()).to_be_bytes());
    out.extend(icmp);
    Some(out)
}

/// Changes the last payload byte of a TCP segment and corrects the checksum.
pub fn forge(frame: &mut [u8], meta: &FrameMeta) {
    if meta.l4_len == 0 {
        return;
    }
    if let Some(byte) = frame.last_mut() {
        *byte ^= 0x55;
    }
    let ip = usize::from(meta.l2_len);
    let tcp = ip + usize::from(meta.l3_len);
    let at = tcp_checksum_offset(meta);
    frame[at..at + 2].fill(0);
    let mut sum = OnesComplementSum::new();
    sum.add(&frame[ip + if meta.ipv6 { 8 } else { 12 }..tcp]);
    sum.add_word(6);
    sum.add_word((frame.len() - tcp) as u16);
    sum.add(&frame[tcp..]);
    frame[at..at + 2].copy_from_slice(&(!sum.value()).to_be_bytes());
}
