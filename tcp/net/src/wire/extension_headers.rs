//! IPv6 extension headers (RFC 8200 section 4), checked and skipped in place. Off the fast path:
//! packets whose IPv6 header is directly followed by TCP are not processed here.

use crate::wire::constants::PROTOCOL_ICMPV6;
use crate::wire::icmp_error::IcmpError;

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
pub const FRAGMENT: u8 = 44;
const DESTINATION: u8 = 60;
/// Offset of the next-header field of an IPv6 header.
pub const NEXT_HEADER_OFFSET: usize = 6;
/// Maximum number of extension headers accepted in one packet (RFC 8504 section 5.3).
const MAX_HEADERS: usize = 8;

/// Returns whether this next-header number is that of an extension header known here.
pub fn is_extension_header(next: u8) -> bool {
    matches!(next, HOP_BY_HOP | ROUTING | FRAGMENT | DESTINATION)
}

/// Result of a walk over extension headers.
#[derive(Debug, PartialEq, Eq)]
pub enum WalkEnd {
    /// A header that is not an extension header, or a fragment header: its number, its offset, and the
    /// offset of the next-header field that names it.
    Reached { next: u8, at: usize, named: usize },
    /// The packet must be discarded silently.
    Discard,
    /// The error must be reported to the sender, with `group` even if the packet was sent to a group.
    Report { error: IcmpError, group: bool },
}

/// Walks from a header of number `next` at the offset `at`; the next-header field at `named` contains
/// the number. `packet` begins with the IPv6 header.
#[cold]
pub fn walk_extension_headers(
    packet: &[u8],
    mut next: u8,
    mut at: usize,
    mut named: usize,
) -> WalkEnd {
    let report = |code, pointer, group| WalkEnd::Report {
        error: IcmpError::parameter_problem(code, pointer),
        group,
    };
    for _ in 0..=MAX_HEADERS {
        match next {
            // A hop-by-hop header that is not first is unrecognised (section 4.1).
            HOP_BY_HOP if named != NEXT_HEADER_OFFSET => return report(1, named, false),
            HOP_BY_HOP | DESTINATION | ROUTING => {}
            _ => return WalkEnd::Reached { next, at, named },
        }
        let Some(header) = extension_header_at(packet, at) else {
            return WalkEnd::Discard;
        };
        if next != ROUTING {
            match check_options(header) {
                OptionsVerdict::Accept => {}
                OptionsVerdict::Discard => return WalkEnd::Discard,
                OptionsVerdict::Report { option, group } => return report(2, at + option, group),
            }
        } else if header[3] != 0 {
            // Segments are left, and no routing type is known here; type 0 is deprecated (section 4.4,
            // RFC 5095).
            return report(0, at + 2, false);
        }
        (next, named) = (header[0], at);
        at += header.len();
    }
    WalkEnd::Discard
}

/// Returns the extension header at an offset if it is complete. Its second byte is the length in units
/// of eight bytes, not counting the first unit.
fn extension_header_at(packet: &[u8], at: usize) -> Option<&[u8]> {
    let len = (usize::from(*packet.get(at + 1)?) + 1) * 8;
    packet.get(at..at + len)
}

/// Result of checking the options of a header.
enum OptionsVerdict {
    Accept,
    Discard,
    /// Send an ICMP error. `option`: offset of the option in its header; `group`: even if the packet was
    /// sent to a group.
    Report {
        option: usize,
        group: bool,
    },
}

/// Checks the options of a hop-by-hop or destination header. Only padding is known here: for other
/// options, the two highest bits of the type determine the action (section 4.2).
fn check_options(header: &[u8]) -> OptionsVerdict {
    let mut offset = 2;
    while let Some(&kind) = header.get(offset) {
        if kind == 0 {
            offset += 1;
            continue;
        }
        let Some(&len) = header.get(offset + 1) else {
            return OptionsVerdict::Discard;
        };
        let end = offset + 2 + usize::from(len);
        if end > header.len() {
            return OptionsVerdict::Discard;
        }
        match kind >> 6 {
            0 => {}
            1 => return OptionsVerdict::Discard,
            action => {
                return OptionsVerdict::Report {
                    option: offset,
                    group: action == 2,
                };
            }
        }
        offset = end;
    }
    OptionsVerdict::Accept
}

/// Finds the header after the extension headers, without checking their content: its number and its
/// offset. In a fragment that is the fragment header. `None`: the packet ends before it, or has too many
/// headers.
#[cold]
pub fn find_upper_layer(packet: &[u8], mut next: u8, mut at: usize) -> Option<(u8, usize)> {
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

/// Returns whether a fragment header is that of an unfragmented datagram (RFC 6946): the offset is 0 and
/// no more fragments follow.
pub fn is_atomic_fragment(header: &[u8]) -> bool {
    u16::from_be_bytes([header[2], header[3]]) & 0xfff9 == 0
}

/// Returns whether the packet carries an ICMPv6 error or a redirect (137), which must not be answered with an
/// error (RFC 4443 section 2.4 (e)). Errors have types below 128.
pub fn carries_icmp_error(packet: &[u8], next: u8, at: usize) -> bool {
    match find_upper_layer(packet, next, at) {
        Some((PROTOCOL_ICMPV6, at)) => matches!(packet.get(at), Some(0..=127 | 137)),
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

    fn reported(code: u8, pointer: usize, group: bool) -> WalkEnd {
        WalkEnd::Report {
            error: IcmpError::parameter_problem(code, pointer),
            group,
        }
    }

    #[test]
    fn a_walk_reports_the_field_that_names_the_last() {
        let routing = [60, 2, 0, 0].map(|byte| byte).to_vec();
        let routing = [routing, vec![0; 20]].concat();
        let packet = packet_of(
            0,
            &[
                // A router alert, to be skipped according to its type; then padding of two bytes.
                &[43, 0, 5, 2, 0, 0, 1, 0],
                &routing,
                &[6, 0, 0, 0, 0, 1, 1, 0],
                &[0; 20],
            ],
        );
        let (at, named) = (40 + 8 + 24 + 8, 40 + 8 + 24);
        let end = WalkEnd::Reached { next: 6, at, named };
        assert_eq!(walked(&packet), end);
        assert_eq!(find_upper_layer(&packet, 0, 40), Some((6, at)));
        // Truncated anywhere in the headers: discarded.
        for len in 41..at {
            assert_eq!(walked(&packet[..len]), WalkEnd::Discard, "{len}");
            assert_eq!(find_upper_layer(&packet[..len], 0, 40), None, "{len}");
        }
        let end = WalkEnd::Reached {
            next: 44,
            at: 40,
            named: 6,
        };
        assert_eq!(walked(&packet_of(44, &[])), end);
    }

    #[test]
    fn option_types_decide_what_happens_rfc_8200_4_2() {
        let with = |kind: u8| walked(&packet_of(60, &[&[6, 0, 0, kind, 3, 0, 0, 0]]));
        assert!(matches!(with(0x3e), WalkEnd::Reached { next: 6, .. }));
        assert_eq!(with(0x7e), WalkEnd::Discard);
        assert_eq!(with(0xbe), reported(2, 40 + 3, true));
        assert_eq!(with(0xfe), reported(2, 40 + 3, false));
        // Beyond its header, or without a length.
        assert_eq!(
            walked(&packet_of(60, &[&[6, 0, 0, 1, 4, 0, 0, 0]])),
            WalkEnd::Discard
        );
        assert_eq!(
            walked(&packet_of(60, &[&[6, 0, 1, 3, 0, 0, 0, 1]])),
            WalkEnd::Discard
        );
    }

    #[test]
    fn misplaced_or_too_many_headers_are_refused() {
        // RFC 5095, and unknown types.
        for kind in [0, 2, 4, 253] {
            let header = [6, 0, kind, 1, 0, 0, 0, 0];
            assert_eq!(walked(&packet_of(43, &[&header])), reported(0, 42, false));
        }
        let late = packet_of(60, &[&[0, 0, 1, 4, 0, 0, 0, 0], &[6, 0, 1, 4, 0, 0, 0, 0]]);
        assert_eq!(walked(&late), reported(1, 40, false));
        let skipped: &[u8] = &[60, 0, 1, 4, 0, 0, 0, 0];
        let last: &[u8] = &[6, 0, 1, 4, 0, 0, 0, 0];
        let many = |count: usize| packet_of(60, &[vec![skipped; count - 1], vec![last]].concat());
        assert!(matches!(
            walked(&many(MAX_HEADERS)),
            WalkEnd::Reached { next: 6, .. }
        ));
        assert_eq!(walked(&many(MAX_HEADERS + 1)), WalkEnd::Discard);
        assert!(find_upper_layer(&many(MAX_HEADERS), 60, 40).is_some());
        assert!(find_upper_layer(&many(MAX_HEADERS + 1), 60, 40).is_none());
    }

    #[test]
    fn icmp_errors_are_found_behind_any_headers() {
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
