//! Validation of received neighbour solicitations and advertisements (RFC 4861 section 7.1).

use core::net::Ipv6Addr;

/// ICMPv6 types (RFC 4861 section 4).
pub(crate) const ROUTER_SOLICITATION: u8 = 133;
pub(crate) const NEIGHBOUR_SOLICITATION: u8 = 135;
pub(crate) const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
pub(crate) const REDIRECT: u8 = 137;

/// The hop limit that proves that a message comes from this link.
pub(crate) const NDP_HOP_LIMIT: u8 = 255;

/// Bytes before the options; the target address is the last field (sections 4.3 and 4.4).
const HEADER_LEN: usize = 24;
/// Offset of the target address.
const TARGET_AT: usize = 8;
/// The flag S of an advertisement, in the first byte after the checksum.
const SOLICITED: u8 = 0x40;
/// Type of the option with the sender's Ethernet address (section 4.6.1).
const SOURCE_LINK_LAYER_ADDRESS: u8 = 1;
/// Unit of the length of options in bytes (section 4.6).
const OPTION_UNIT: usize = 8;

/// Returns whether an ICMPv6 message is part of neighbour discovery.
pub(crate) fn is_neighbour_discovery(message: &[u8]) -> bool {
    let kind = message.first();
    kind.is_some_and(|kind| (ROUTER_SOLICITATION..=REDIRECT).contains(kind))
}

/// Returns whether a message from `src` to `dst` passes the checks of sections 7.1.1 and 7.1.2, except
/// for its checksum, if it is a neighbour solicitation or advertisement. Those that fail must be
/// silently discarded. Messages of other types pass.
pub(crate) fn is_valid(message: &[u8], hop_limit: u8, src: Ipv6Addr, dst: Ipv6Addr) -> bool {
    let Some(&kind) = message.first() else {
        return false;
    };
    if !matches!(kind, NEIGHBOUR_SOLICITATION | NEIGHBOUR_ADVERTISEMENT) {
        return true;
    }
    let Some((header, options)) = message.split_at_checked(HEADER_LEN) else {
        return false;
    };
    let is_to_group = header[TARGET_AT] == 0xff;
    if hop_limit != NDP_HOP_LIMIT || header[1] != 0 || is_to_group {
        return false;
    }
    let Some(has_source_address) = find_source_address(options) else {
        return false;
    };
    match kind {
        // Duplicate address detection (RFC 4862 section 5.4.2).
        NEIGHBOUR_SOLICITATION if src.is_unspecified() => {
            is_solicited_node_group(dst) && !has_source_address
        }
        NEIGHBOUR_SOLICITATION => true,
        _ => !dst.is_multicast() || header[4] & SOLICITED == 0,
    }
}

/// Returns whether the options include the sender's Ethernet address; `None` if an option has no
/// length, or one beyond the end of the message.
fn find_source_address(mut options: &[u8]) -> Option<bool> {
    let mut is_found = false;
    while !options.is_empty() {
        let [kind, units, ..] = *options else {
            return None;
        };
        let len = usize::from(units) * OPTION_UNIT;
        if len == 0 || len > options.len() {
            return None;
        }
        is_found |= kind == SOURCE_LINK_LAYER_ADDRESS;
        options = &options[len..];
    }
    Some(is_found)
}

/// Returns whether the address is in ff02::1:ff00:0/104 (RFC 4291 section 2.7.1).
fn is_solicited_node_group(address: Ipv6Addr) -> bool {
    address.octets()[..13] == [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff]
}
