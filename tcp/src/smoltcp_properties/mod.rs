//! Property tests of this crate's wire code against smoltcp's independently written wire types: TCP
//! headers of arbitrary bytes are accepted exactly when smoltcp accepts them and have the same values
//! (each exception is listed at its test), smoltcp reads the frames of this crate's templates, and the
//! fast path reads frames as all checks do.

mod ip;
mod tcp;

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;
use smoltcp::wire::{EthernetAddress, EthernetFrame, EthernetProtocol};

/// The Ethernet address of the stack under test.
const OWN_MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x01];
/// The Ethernet address of its peer.
const PEER_MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x02];
/// EtherType of a frame with a VLAN tag (IEEE 802.1Q), which smoltcp does not parse.
const ETHERTYPE_VLAN: u16 = 0x8100;
const ETHERNET_HEADER: usize = 14;
const VLAN_TAG: usize = 4;

/// Generates two addresses of one family.
fn address_pairs() -> impl Strategy<Value = (IpAddr, IpAddr)> {
    prop_oneof![
        any::<(u32, u32)>().prop_map(|(source, destination)| (
            Ipv4Addr::from_bits(source).into(),
            Ipv4Addr::from_bits(destination).into()
        )),
        any::<(u128, u128)>().prop_map(|(source, destination)| (
            Ipv6Addr::from_bits(source).into(),
            Ipv6Addr::from_bits(destination).into()
        )),
    ]
}

/// Generates no VLAN tag, or one with this identifier.
fn vlan_tags() -> impl Strategy<Value = Option<u16>> {
    proptest::option::of(1..4095u16)
}

/// Builds a frame from `source` with an Ethernet header by smoltcp, and with a VLAN tag if requested.
fn ethernet_frame(
    source: [u8; 6],
    destination: [u8; 6],
    vlan: Option<u16>,
    protocol: EthernetProtocol,
    body: &[u8],
) -> Vec<u8> {
    let mut bytes = vec![0; ETHERNET_HEADER + body.len()];
    let mut frame = EthernetFrame::new_unchecked(&mut bytes);
    frame.set_src_addr(EthernetAddress(source));
    frame.set_dst_addr(EthernetAddress(destination));
    frame.set_ethertype(protocol);
    frame.payload_mut().copy_from_slice(body);
    if let Some(identifier) = vlan {
        let mut tag = ETHERTYPE_VLAN.to_be_bytes().to_vec();
        tag.extend(identifier.to_be_bytes());
        bytes.splice(12..12, tag);
    }
    bytes
}

/// Returns the Ethernet header and the payload of a frame; its VLAN tag must be `vlan`.
fn open_ethernet(frame: &[u8], vlan: Option<u16>) -> (EthernetFrame<Vec<u8>>, &[u8]) {
    let mut untagged = frame.to_vec();
    let mut header = ETHERNET_HEADER;
    if let Some(identifier) = vlan {
        let tag: Vec<u8> = untagged.drain(12..12 + VLAN_TAG).collect();
        assert_eq!(tag[..2], ETHERTYPE_VLAN.to_be_bytes());
        assert_eq!(tag[2..], identifier.to_be_bytes());
        header += VLAN_TAG;
    }
    let ethernet = EthernetFrame::new_checked(untagged).expect("an Ethernet header");
    (ethernet, &frame[header..])
}
