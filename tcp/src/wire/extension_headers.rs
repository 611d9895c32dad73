//! IPv6 extension headers (RFC 8200 section 4), walked over where they lie. Off the straight path:
//! a packet whose first next-header field names what we speak never comes here.

use crate::wire::icmp_error::IcmpError;

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
pub(crate) const FRAGMENT: u8 = 44;
pub(crate) const ICMPV6: u8 = 58;
const DESTINATION: u8 = 60;
/// Where the IPv6 header says what follows it.
pub(crate) const NEXT: usize = 6;
/// Extension headers of one packet; more are nobody's (RFC 8504 section 5.3).
const MOST: usize = 8;

/// A header of this kind can be walked over or into.
pub(crate) fn known(next: u8) -> bool {
    matches!(next, HOP_BY_HOP | ROUTING | FRAGMENT | DESTINATION)
}

/// Where a walk ends.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Walk {
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
pub(crate) fn walk(packet: &[u8], mut next: u8, mut at: usize, mut named: usize) -> Walk {
    let tell = |code, pointer, group| Walk::Tell {
        error: IcmpError::parameter(code, pointer),
        group,
    };
    for _ in 0..=MOST {
        match next {
            // Anywhere else than first it is unrecognised (section 4.1).
            HOP_BY_HOP if named != NEXT => return tell(1, named, false),
            HOP_BY_HOP | DESTINATION | ROUTING => {}
            _ => return Walk::At { next, at, named },
        }
        let Some(header) = header_at(packet, at) else {
            return Walk::Drop;
        };
        if next != ROUTING {
            match options(header) {
                Options::Good => {}
                Options::Drop => return Walk::Drop,
                Options::Tell { option, group } => return tell(2, at + option, group),
            }
        } else if header[3] != 0 {
            // Segments are left and no type is known, type 0 least of all (section 4.4, RFC 5095).
            return tell(0, at + 2, false);
        }
        (next, named) = (header[0], at);
        at += header.len();
    }
    Walk::Drop
}

/// A whole extension header with the usual length field.
fn header_at(packet: &[u8], at: usize) -> Option<&[u8]> {
    let len = (usize::from(*packet.get(at + 1)?) + 1) * 8;
    packet.get(at..at + len)
}

enum Options {
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
fn options(header: &[u8]) -> Options {
    let mut i = 2;
    while let Some(&kind) = header.get(i) {
        if kind == 0 {
            i += 1;
            continue;
        }
        let Some(&len) = header.get(i + 1) else {
            return Options::Drop;
        };
        let end = i + 2 + usize::from(len);
        if end > header.len() {
            return Options::Drop;
        }
        match kind >> 6 {
            0 => {}
            1 => return Options::Drop,
            action => {
                return Options::Tell {
                    option: i,
                    group: action == 2,
                };
            }
        }
        i = end;
    }
    Options::Good
}

/// What a packet carries behind its extension headers, whatever these say, and where; a fragment
/// header when it is a part of a datagram. `None`: not all of them are there.
#[cold]
pub(crate) fn carried(packet: &[u8], mut next: u8, mut at: usize) -> Option<(u8, usize)> {
    for _ in 0..=MOST {
        match next {
            HOP_BY_HOP | DESTINATION | ROUTING => {
                let header = header_at(packet, at)?;
                next = header[0];
                at += header.len();
            }
            FRAGMENT if atomic(packet.get(at..at + 8)?) => {
                next = packet[at];
                at += 8;
            }
            _ => return Some((next, at)),
        }
    }
    None
}

/// A fragment header of a packet that is whole (RFC 6946): neither an offset nor more to come.
pub(crate) fn atomic(header: &[u8]) -> bool {
    u16::from_be_bytes([header[2], header[3]]) & 0xfff9 == 0
}

/// What is carried from this header on tells of an error, so that nobody may answer it with one (RFC
/// 4443 section 2.4 (e)): errors are below 128, and a redirect is 137.
pub(crate) fn errs(packet: &[u8], next: u8, at: usize) -> bool {
    match carried(packet, next, at) {
        Some((ICMPV6, at)) => matches!(packet.get(at), Some(0..=127 | 137)),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(first: u8, headers: &[&[u8]]) -> Vec<u8> {
        let mut p = vec![0; 40];
        p[NEXT] = first;
        headers.iter().for_each(|h| p.extend_from_slice(h));
        p
    }

    fn walked(p: &[u8]) -> Walk {
        walk(p, p[NEXT], 40, NEXT)
    }

    fn told(code: u8, pointer: usize, group: bool) -> Walk {
        Walk::Tell {
            error: IcmpError::parameter(code, pointer),
            group,
        }
    }

    #[test]
    fn headers_are_walked_over_and_the_field_that_names_the_next_is_remembered() {
        let routing = [60, 2, 0, 0].map(|b| b).to_vec();
        let routing = [routing, vec![0; 20]].concat();
        let p = packet(
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
        let end = Walk::At { next: 6, at, named };
        assert_eq!(walked(&p), end);
        assert_eq!(carried(&p, 0, 40), Some((6, at)));
        // Cut anywhere in them: dropped.
        for n in 41..at {
            assert_eq!(walked(&p[..n]), Walk::Drop, "{n}");
            assert_eq!(carried(&p[..n], 0, 40), None, "{n}");
        }
        let end = Walk::At {
            next: 44,
            at: 40,
            named: 6,
        };
        assert_eq!(walked(&packet(44, &[])), end);
    }

    #[test]
    fn options_are_skipped_or_refused_by_their_highest_bits_rfc_8200_4_2() {
        let with = |kind: u8| walked(&packet(60, &[&[6, 0, 0, kind, 3, 0, 0, 0]]));
        assert!(matches!(with(0x3e), Walk::At { next: 6, .. }));
        assert_eq!(with(0x7e), Walk::Drop);
        assert_eq!(with(0xbe), told(2, 40 + 3, true));
        assert_eq!(with(0xfe), told(2, 40 + 3, false));
        // Beyond its header, or without a length.
        assert_eq!(
            walked(&packet(60, &[&[6, 0, 0, 1, 4, 0, 0, 0]])),
            Walk::Drop
        );
        assert_eq!(
            walked(&packet(60, &[&[6, 0, 1, 3, 0, 0, 0, 1]])),
            Walk::Drop
        );
    }

    #[test]
    fn routing_with_segments_left_a_late_hop_by_hop_header_and_too_many_are_refused() {
        // RFC 5095, and types that nobody knows.
        for kind in [0, 2, 4, 253] {
            let h = [6, 0, kind, 1, 0, 0, 0, 0];
            assert_eq!(walked(&packet(43, &[&h])), told(0, 42, false));
        }
        let late = packet(60, &[&[0, 0, 1, 4, 0, 0, 0, 0], &[6, 0, 1, 4, 0, 0, 0, 0]]);
        assert_eq!(walked(&late), told(1, 40, false));
        let skipped: &[u8] = &[60, 0, 1, 4, 0, 0, 0, 0];
        let last: &[u8] = &[6, 0, 1, 4, 0, 0, 0, 0];
        let many = |n: usize| packet(60, &[vec![skipped; n - 1], vec![last]].concat());
        assert!(matches!(walked(&many(MOST)), Walk::At { next: 6, .. }));
        assert_eq!(walked(&many(MOST + 1)), Walk::Drop);
        assert!(carried(&many(MOST), 60, 40).is_some());
        assert!(carried(&many(MOST + 1), 60, 40).is_none());
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
            assert_eq!(errs(&packet(58, &[&[kind, 0]]), 58, 40), is);
            assert_eq!(errs(&packet(60, &[skip, &[kind, 0]]), 60, 40), is);
            let atomic: &[u8] = &[58, 0, 0, 0, 0, 0, 0, 9];
            assert_eq!(errs(&packet(44, &[atomic, &[kind, 0]]), 44, 40), is);
        }
        assert!(!errs(&packet(60, &[]), 60, 40));
        assert!(!errs(&packet(6, &[&[1, 0]]), 6, 40));
    }
}
