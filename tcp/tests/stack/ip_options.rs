//! IPv4 packets with options (RFC 791 section 3.1): a source route or a malformed option drops the
//! packet, other options are ignored.

use crate::common::wire::{Lab, PSH, pattern};
use siw_net::{FrameInfo, RxChecksum};
use siw_tcp_sim::forge::fix_ipv4_header;

/// Inserts options into the IPv4 header of a frame without VLAN tag.
fn with_options(frame: &[u8], options: &[u8]) -> Vec<u8> {
    let mut changed = frame[..34].to_vec();
    changed.extend_from_slice(options);
    changed.extend_from_slice(&frame[34..]);
    let header = 20 + options.len();
    changed[14] = 0x40 | (header / 4) as u8;
    let total = (changed.len() - 14) as u16;
    changed[16..18].copy_from_slice(&total.to_be_bytes());
    fix_ipv4_header(&mut changed[14..], header);
    changed
}

/// Gives host 1 a segment whose packet has these options; returns whether its data arrived, and the
/// counts of source-routed and of malformed packets.
fn receive(options: &[u8]) -> (bool, u64, u64) {
    let mut lab = Lab::new();
    let [_, server] = lab.connect();
    let mut segment = lab.forge(0);
    segment.flags |= PSH;
    segment.payload = pattern(100);
    let info = FrameInfo {
        checksum: RxChecksum::Unknown,
        rss_hash: 0,
    };
    let frame = with_options(&segment.frame(), options).into();
    let now = lab.net.now;
    lab.net.hosts[1].receive_burst(now, std::iter::once((frame, info)));
    let has_arrived = lab.read(1, server) == pattern(100);
    let stats = lab.net.hosts[1].stats();
    (
        has_arrived,
        stats.net.source_routed,
        stats.net.header_errors,
    )
}

#[test]
fn harmless_options_are_ignored() {
    let harmless: [&[u8]; 5] = [
        &[1, 1, 1, 0],
        // Record route, router alert, timestamp, and anything after the end of the list.
        &[7, 7, 4, 0, 0, 0, 0, 0],
        &[148, 4, 0, 0],
        &[68, 8, 5, 0, 0, 0, 0, 0],
        &[0, 131, 99, 1],
    ];
    for options in harmless {
        assert_eq!(receive(options), (true, 0, 0), "{options:?}");
    }
}

#[test]
fn source_routes_are_dropped_and_counted() {
    for kind in [131, 137] {
        for options in [[kind, 7, 4, 10, 0, 0, 9, 0], [1, kind, 3, 4, 0, 0, 0, 0]] {
            assert_eq!(receive(&options), (false, 1, 0), "{options:?}");
        }
    }
}

#[test]
fn malformed_options_are_dropped_and_counted() {
    for options in [[7, 0, 0, 0], [7, 1, 0, 0], [7, 5, 4, 0], [1, 1, 1, 7]] {
        assert_eq!(receive(&options), (false, 0, 1), "{options:?}");
    }
}
