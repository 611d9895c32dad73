//! Changes that ports and peers of other kinds make to the frames of a receiver: receive coalescing, and
//! ACKs without D-SACK blocks.

use siw_net::checksum::OnesComplementSum;

use crate::wire_view::{ACK, TcpView, tcp_view};

/// PSH, as on the wire.
const PSH: u8 = 8;
/// Largest IP packet.
const LONGEST: usize = 65_535;

/// Returns the offset of the IP header of a frame with a TCP segment.
fn ip_offset(view: &TcpView<'_>) -> usize {
    view.tcp_offset - if view.source.is_ipv4() { 20 } else { 40 }
}

/// Writes the lengths and checksums of a frame with a TCP segment, whose IP header has no options.
fn complete(frame: &mut [u8], ip: usize, tcp: usize) {
    let (ip_len, tcp_len) = ((frame.len() - ip) as u16, (frame.len() - tcp) as u16);
    let addresses = if tcp - ip == 20 {
        frame[ip + 2..ip + 4].copy_from_slice(&ip_len.to_be_bytes());
        frame[ip + 10..ip + 12].fill(0);
        let mut sum = OnesComplementSum::new();
        sum.add(&frame[ip..tcp]);
        frame[ip + 10..ip + 12].copy_from_slice(&(!sum.value()).to_be_bytes());
        ip + 12
    } else {
        frame[ip + 4..ip + 6].copy_from_slice(&tcp_len.to_be_bytes());
        ip + 8
    };
    frame[tcp + 16..tcp + 18].fill(0);
    let mut sum = OnesComplementSum::new();
    sum.add(&frame[addresses..tcp]);
    sum.add_word(6);
    sum.add_word(tcp_len);
    sum.add(&frame[tcp..]);
    frame[tcp + 16..tcp + 18].copy_from_slice(&(!sum.value()).to_be_bytes());
}

/// Appends the payload of `next` to `first` if it is the consecutive segment, with equal headers, as
/// GRO and LRO do. Returns whether it did.
fn append_segment(first: &mut Vec<u8>, next: &[u8]) -> bool {
    let (Some(view), Some(next_view)) = (tcp_view(first), tcp_view(next)) else {
        return false;
    };
    let (ip, tcp) = (ip_offset(&view), view.tcp_offset);
    let payload = first.len() - view.payload.len();
    let same = |range: core::ops::Range<usize>| first.get(range.clone()) == next.get(range);
    // Without identification, length and checksum.
    let same_ip = if view.source.is_ipv4() {
        same(0..ip + 2) && same(ip + 6..ip + 10) && same(ip + 12..tcp)
    } else {
        same(0..ip + 4) && same(ip + 6..tcp)
    };
    // Without sequence number, flags and checksum.
    let same_tcp = same(tcp..tcp + 4)
        && same(tcp + 8..tcp + 13)
        && same(tcp + 14..tcp + 16)
        && same(tcp + 18..payload);
    let is_next = view.seq.wrapping_add(view.payload.len() as u32) == next_view.seq;
    let is_data = |view: &TcpView<'_>| !view.payload.is_empty();
    if !(same_ip && same_tcp && is_next && is_data(&view) && is_data(&next_view))
        || view.flags != ACK
        || next_view.flags & !PSH != ACK
        || first.len() - ip + next_view.payload.len() > LONGEST
    {
        return false;
    }
    let flags = next_view.flags;
    let added = next_view.payload.to_vec();
    first[tcp + 13] = flags;
    first.extend(added);
    complete(first, ip, tcp);
    true
}

/// Joins consecutive segments of a burst to super-segments, as a port or driver that coalesces received
/// frames. Damaged frames (`false`) stay as they are. Returns the frames, and how many were joined to
/// another.
pub fn coalesce(burst: Vec<(Vec<u8>, bool)>) -> (Vec<Vec<u8>>, u64) {
    let (mut frames, mut joined) = (Vec::<(Vec<u8>, bool)>::new(), 0);
    for (frame, intact) in burst {
        if intact
            && let Some((last, true)) = frames.last_mut()
            && append_segment(last, &frame)
        {
            joined += 1;
            continue;
        }
        frames.push((frame, intact));
    }
    (frames.into_iter().map(|(frame, _)| frame).collect(), joined)
}

/// Removes the D-SACK block of a segment (RFC 2883 section 4), as if sent by a receiver that knows only
/// RFC 2018. Returns whether there was one.
pub fn strip_dsack(frame: &mut [u8]) -> bool {
    let Some(view) = tcp_view(frame).filter(|view| view.sack_count > 0) else {
        return false;
    };
    let is_before = |first: u32, second: u32| (first.wrapping_sub(second) as i32) < 0;
    let ((low, high), around) = (view.sack[0], view.sack[1]);
    let is_inside = view.sack_count > 1 && !is_before(low, around.0) && !is_before(around.1, high);
    if is_before(view.ack, high) && !is_inside {
        return false;
    }
    let (ip, tcp, count) = (ip_offset(&view), view.tcp_offset, view.sack_count);
    let end = tcp + usize::from(frame[tcp + 12] >> 4) * 4;
    let mut at = tcp + 20;
    while at < end && frame[at] != 5 {
        at += match frame[at] {
            1 => 1,
            _ => usize::from(frame[at + 1]).max(2),
        };
    }
    let blocks_end = at + 2 + 8 * count;
    if count == 1 {
        frame[at..blocks_end].fill(1);
    } else {
        frame[at + 1] -= 8;
        frame.copy_within(at + 10..blocks_end, at + 2);
        frame[blocks_end - 8..blocks_end].fill(1);
    }
    complete(frame, ip, tcp);
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forge::{Ends, Tcp};
    use crate::wire_view::has_valid_checksums;

    fn ends(ip: [&str; 2]) -> Ends {
        Ends {
            mac: [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]],
            ip: ip.map(|address| address.parse().unwrap()),
        }
    }

    fn segment(seq: u32, flags: u8, payload: &[u8]) -> Tcp<'_> {
        Tcp {
            ports: [7, 80],
            seq,
            ack: 100,
            flags,
            window: 77,
            options: &[],
            payload,
        }
    }

    #[test]
    fn consecutive_segments_become_one() {
        for ip in [["10.0.0.1", "10.0.0.2"], ["fd00::1", "fd00::2"]] {
            let ends = ends(ip);
            let burst = [
                (5, ACK, "abc"),
                (8, ACK | PSH, "de"),
                (10, ACK, "f"),
                (12, ACK, "h"),
            ];
            let burst = burst.map(|(seq, flags, payload)| {
                (ends.tcp(&segment(seq, flags, payload.as_bytes())), true)
            });
            let (frames, joined) = coalesce(burst.to_vec());
            assert_eq!((frames.len(), joined), (3, 1));
            let view = tcp_view(&frames[0]).unwrap();
            assert_eq!((view.seq, view.payload), (5, &b"abcde"[..]));
            assert_eq!(view.flags, ACK | PSH);
            assert!(frames.iter().all(|frame| has_valid_checksums(frame)));
        }
    }

    #[test]
    fn only_the_dsack_block_is_removed() {
        let ends = ends(["10.0.0.1", "10.0.0.2"]);
        let stripped = |blocks: &[(u32, u32)]| {
            let mut options = vec![1, 1, 5, 2 + 8 * blocks.len() as u8];
            for (low, high) in blocks {
                options.extend(low.to_be_bytes());
                options.extend(high.to_be_bytes());
            }
            let mut frame = ends.tcp(&Tcp {
                options: &options,
                ..segment(5, ACK, &[])
            });
            let is_stripped = strip_dsack(&mut frame);
            assert!(has_valid_checksums(&frame));
            let view = tcp_view(&frame).unwrap();
            (is_stripped, view.sack[..view.sack_count].to_vec())
        };
        assert_eq!(stripped(&[(200, 300)]), (false, vec![(200, 300)]));
        assert_eq!(stripped(&[(50, 60)]), (true, vec![]));
        assert_eq!(stripped(&[(50, 60), (200, 300)]), (true, vec![(200, 300)]));
        assert_eq!(
            stripped(&[(210, 220), (200, 300), (400, 500)]),
            (true, vec![(200, 300), (400, 500)])
        );
    }
}
