//! IPv6 extension headers (RFC 8200 section 4), walked over where they lie. Off the straight path:
//! a packet whose first next-header field names what we speak never comes here.

use crate::wire::icmp_error::IcmpError;

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
pub(crate) const FRAGMENT: u8 = 44;
pub(crate) const ICMPV6: u8 = 58;
const DESTINATION: u8 = 60;
/// Where the IPv6 header says what follows it.
pub(crate) const NEXT_HEADER_OFFSET: usize = 6;
/// Extension headers of one packet; more are nobody's (RFC 8504 section 5.3).
const MAX_HEADERS: usize = 8;

/// A header of this kind can be walked over or into.
pub(crate) fn is_extension_header(next: u8) -> bool {
    matches!(next, HOP_BY_HOP | ROUTING | FRAGMENT | DESTINATION)
}

/// Where a walk ends.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum WalkEnd {
    /// At what is no extension header, or at a fragment header: its kind, where it begins, and where
    /// the field is that names it.
    At { next: u8, at: usize, named: usize },
    /// At something that the packet is dropped for without a word.
    Drop,
    /// At something that its sender is told; with `group` also when it sent to a group.
    Tell { error: IcmpError, group: bool },
}

/// Walks from a header of kind `next` at `at`, which the byte at `named` names. `packet` begins with
/// the IPv6 header.
#[cold]
pub(crate) fn walk_extension_headers(
    packet: &[u8],
    mut next: u8,
    mut at: usize,
    mut named: usize,
) -> WalkEnd {
    let tell = |code, pointer, group| WalkEnd::Tell {
        error: IcmpError::parameter_problem(code, pointer),
        group,
    };
    for _ in 0..=MAX_HEADERS {
        match next {
            // Anywhere else than first it is unrecognised (section 4.1).
            HOP_BY_HOP if named != NEXT_HEADER_OFFSET => return tell(1, named, false),
            HOP_BY_HOP | DESTINATION | ROUTING => {}
            _ => return WalkEnd::At { next, at, named },
        }
        let Some(header) = extension_header_at(packet, at) else {
            return WalkEnd::Drop;
        };
        if next != ROUTING {
            match check_options(header) {
                OptionsVerdict::Good => {}
                OptionsVerdict::Drop => return WalkEnd::Drop,
                OptionsVerdict::Tell { option, group } => return tell(2, at + option, group),
            }
        } else if header[3] != 0 {
            // Segments are left and no type is known, type 0 least of all (section 4.4, RFC 5095).
            return tell(0, at + 2, false);
        }
        (next, named) = (header[0], at);
        at += header.len();
    }
    WalkEnd::Drop
}

/// A whole extension header with the usual length field.
fn extension_header_at(packet: &[u8], at: usize) -> Option<&[u8]> {
    let len = (usize::from(*packet.get(at + 1)?) + 1) * 8;
    packet.get(at..at + len)
}

enum OptionsVerdict {
    Good,
    Drop,
    /// Where the option is in its header; `group`: whoever the packet was for.
    Tell {
        option: usize,
        group: bool,
    },
}

/// Options are skipped or refused as their highest bits say (section 4.2): of those that are no
/// padding, none changes anything here.
fn check_options(header: &[u8]) -> OptionsVerdict {
    let mut offset = 2;
    while let Some(&kind) = header.get(offset) {
        if kind == 0 {
            offset += 1;
            continue;
        }
        let Some(&len) = header.get(offset + 1) else {
            return OptionsVerdict::Drop;
        };
        let end = offset + 2 + usize::from(len);
        if end > header.len() {
            return OptionsVerdict::Drop;
        }
        match kind >> 6 {
            0 => {}
            1 => return OptionsVerdict::Drop,
            action => {
                return OptionsVerdict::Tell {
                    option: offset,
                    group: action == 2,
                };
            }
        }
        offset = end;
    }
    OptionsVerdict::Good
}

/// What a packet carries behind its extension headers, whatever these say, and where; a fragment
/// header when it is a part of a datagram. `None`: not all of them are there.
#[cold]
pub(crate) fn find_upper_layer(packet: &[u8], mut next: u8, mut at: usize) -> Option<(u8, usize)> {
    for _ in 0..=MAX_HEADERS {
        match next {
            HOP_BY_HOP | DESTINATION | ROUTING => {
                let header = extension_header_at(packet, at)?;
                next = header[0];
                at += header.len();
            }
            FRAGMENT if is_atomic_fragment(packet.get(at..at + 8)?) => {
                next = packet[at];
                at += 8;
            }
            _ => return Some((next, at)),
        }
    }
    None
}

/// A fragment header of a packet that is whole (RFC 6946): neither an offset nor more to come.
pub(crate) fn is_atomic_fragment(header: &[u8]) -> bool {
    u16::from_be_bytes([header[2], header[3]]) & 0xfff9 == 0
}

/// What is carried from this header on tells of an error, so that nobody may answer it with one (RFC
/// 4443 section 2.4 (e)): errors are below 128, and a redirect is 137.
pub(crate) fn carries_icmp_error(packet: &[u8], next: u8, at: usize) -> bool {
    match find_upper_layer(packet, next, at) {
        Some((ICMPV6, at)) => matches!(packet.get(at), Some(0..=127 | 137)),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet_of(first: u8, headers: &[&[u8]]) -> Vec<u8> {
        let mut packet = vec![0; 40];
        packet[NEXT_HEADER_OFFSET] = first;
        headers
            .iter()
            .for_each(|header| packet.extend_from_slice(header));
        packet
    }

    fn walked(packet: &[u8]) -> WalkEnd {
        walk_extension_headers(packet, packet[NEXT_HEADER_OFFSET], 40, NEXT_HEADER_OFFSET)
    }

    fn told(code: u8, pointer: usize, group: bool) -> WalkEnd {
        WalkEnd::Tell {
            error: IcmpError::parameter_problem(code, pointer),
            group,
        }
    }

    #[test]
    fn headers_are_walked_over_and_the_field_that_names_the_next_is_remembered() {
        let routing = [60, 2, 0, 0].map(|byte| byte).to_vec();
        let routing = [routing, vec![0; 20]].concat();
        let packet = packet_of(
            0,
            &[
                // A router alert, skipped by its bits; a padding of two.
                &[43, 0, 5, 2, 0, 0, 1, 0],
                &routing,
                &[6, 0, 0, 0, 0, 1, 1, 0],
                &[0; 20],
            ],
        );
        let (at, named) = (40 + 8 + 24 + 8, 40 + 8 + 24);
        let end = WalkEnd::At { next: 6, at, named };
        assert_eq!(walked(&packet), end);
        assert_eq!(find_upper_layer(&packet, 0, 40), Some((6, at)));
        // Cut anywhere in them: dropped.
        for len in 41..at {
            assert_eq!(walked(&packet[..len]), WalkEnd::Drop, "{len}");
            assert_eq!(find_upper_layer(&packet[..len], 0, 40), None, "{len}");
        }
        let end = WalkEnd::At {
            next: 44,
            at: 40,
            named: 6,
        };
        assert_eq!(walked(&packet_of(44, &[])), end);
    }

    #[test]
    fn options_are_skipped_or_refused_by_their_highest_bits_rfc_8200_4_2() {
        let with = |kind: u8| walked(&packet_of(60, &[&[6, 0, 0, kind, 3, 0, 0, 0]]));
        assert!(matches!(with(0x3e), WalkEnd::At { next: 6, .. }));
        assert_eq!(with(0x7e), WalkEnd::Drop);
        assert_eq!(with(0xbe), told(2, 40 + 3, true));
        assert_eq!(with(0xfe), told(2, 40 + 3, false));
        // Beyond its header, or without a length.
        assert_eq!(
            walked(&packet_of(60, &[&[6, 0, 0, 1, 4, 0, 0, 0]])),
            WalkEnd::Drop
        );
        assert_eq!(
            walked(&packet_of(60, &[&[6, 0, 1, 3, 0, 0, 0, 1]])),
            WalkEnd::Drop
        );
    }

    #[test]
    fn routing_with_segments_left_a_late_hop_by_hop_header_and_too_many_are_refused() {
        // RFC 5095, and types that nobody knows.
        for kind in [0, 2, 4, 253] {
            let header = [6, 0, kind, 1, 0, 0, 0, 0];
            assert_eq!(walked(&packet_of(43, &[&header])), told(0, 42, false));
        }
        let late = packet_of(60, &[&[0, 0, 1, 4, 0, 0, 0, 0], &[6, 0, 1, 4, 0, 0, 0, 0]]);
        assert_eq!(walked(&late), told(1, 40, false));
        let skipped: &[u8] = &[60, 0, 1, 4, 0, 0, 0, 0];
        let last: &[u8] = &[6, 0, 1, 4, 0, 0, 0, 0];
        let many = |count: usize| packet_of(60, &[vec![skipped; count - 1], vec![last]].concat());
        assert!(matches!(
            walked(&many(MAX_HEADERS)),
            WalkEnd::At { next: 6, .. }
        ));
        assert_eq!(walked(&many(MAX_HEADERS + 1)), WalkEnd::Drop);
        assert!(find_upper_layer(&many(MAX_HEADERS), 60, 40).is_some());
        assert!(find_upper_layer(&many(MAX_HEADERS + 1), 60, 40).is_none());
    }

    #[test]
    fn errors_are_known_behind_any_headers() {
        let skip: &[u8] = &[58, 0, 1, 4, 0, 0, 0, 0];
        for (kind, is) in [
            (1, true),
            (127, true),
            (128, false),
            (135, false),
            (137, true),
        ] {
            assert_eq!(
                carries_icmp_error(&packet_of(58, &[&[kind, 0]]), 58, 40),
                is
            );
            assert_eq!(
                carries_icmp_error(&packet_of(60, &[skip, &[kind, 0]]), 60, 40),
                is
            );
            let atomic: &[u8] = &[58, 0, 0, 0, 0, 0, 0, 9];
            assert_eq!(
                carries_icmp_error(&packet_of(44, &[atomic, &[kind, 0]]), 44, 40),
                is
            );
        }
        assert!(!carries_icmp_error(&packet_of(60, &[]), 60, 40));
        assert!(!carries_icmp_error(&packet_of(6, &[&[1, 0]]), 6, 40));
    }
}
