//! Verdicts of the XDP program on frames of every kind, by test runs in the kernel: without a socket,
//! a claimed frame is dropped, and every other passes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use siw_xdp::{Claim, ClaimKind, Error, Verdict, XdpSteering};

const OURS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const PEER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
const OTHER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 3);
const OURS6: Ipv6Addr = Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 1);
const PEER6: Ipv6Addr = Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 2);
const PORT: u16 = 4420;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;

/// Loads the program with these claims; `None` if the test has to be skipped.
fn load_steering(
    kind: ClaimKind,
    vlan: Option<u16>,
    claims: &[(IpAddr, u16)],
) -> Option<XdpSteering> {
    let mut steering = match XdpSteering::load(kind, vlan, 1) {
        Err(Error::Permission { .. }) => {
            println!("\nskipped: loading an XDP program needs CAP_BPF and CAP_NET_ADMIN");
            return None;
        }
        loaded => loaded.unwrap(),
    };
    for &(address, port) in claims {
        steering.add_claim(Claim { address, port }).unwrap();
    }
    Some(steering)
}

fn steering_of_addresses(vlan: Option<u16>) -> Option<XdpSteering> {
    load_steering(
        ClaimKind::Addresses,
        vlan,
        &[(OURS.into(), 0), (OURS6.into(), 0)],
    )
}

fn steering_of_ports() -> Option<XdpSteering> {
    load_steering(
        ClaimKind::Ports,
        None,
        &[(OURS.into(), PORT), (OURS6.into(), PORT)],
    )
}

fn ethernet(ethertype: u16, packet: &[u8]) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    frame.extend(ethertype.to_be_bytes());
    frame.extend(packet);
    frame
}

fn tagged(vlan: u16, ethertype: u16, packet: &[u8]) -> Vec<u8> {
    let mut inner = vlan.to_be_bytes().to_vec();
    inner.extend(ethertype.to_be_bytes());
    inner.extend(packet);
    ethernet(0x8100, &inner)
}

/// `fragment`: identification, and the field with flags and offset.
fn ipv4(
    from: Ipv4Addr,
    to: Ipv4Addr,
    protocol: u8,
    fragment: (u16, u16),
    options: usize,
    payload: &[u8],
) -> Vec<u8> {
    let mut packet = vec![0; 20 + options * 4];
    packet[0] = 0x45 + options as u8;
    packet[4..6].copy_from_slice(&fragment.0.to_be_bytes());
    packet[6..8].copy_from_slice(&fragment.1.to_be_bytes());
    packet[9] = protocol;
    packet[12..16].copy_from_slice(&from.octets());
    packet[16..20].copy_from_slice(&to.octets());
    packet.extend(payload);
    packet
}

fn ipv6(from: Ipv6Addr, to: Ipv6Addr, next_header: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; 40];
    packet[0] = 0x60;
    packet[6] = next_header;
    packet[8..24].copy_from_slice(&from.octets());
    packet[24..40].copy_from_slice(&to.octets());
    packet.extend(payload);
    packet
}

/// The ports, and the rest of a TCP header.
fn ports(source: u16, destination: u16) -> Vec<u8> {
    let mut header = source.to_be_bytes().to_vec();
    header.extend(destination.to_be_bytes());
    header.extend([0; 16]);
    header
}

fn icmp(kind: u8, quoted: &[u8]) -> Vec<u8> {
    let mut message = vec![kind, 0, 0, 0, 0, 0, 0, 0];
    message.extend(quoted);
    message
}

fn arp(operation: u16, sender: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
    let mut packet = vec![0, 1, 8, 0, 6, 4];
    packet.extend(operation.to_be_bytes());
    packet.extend([2, 0, 0, 0, 0, 2]);
    packet.extend(sender.octets());
    packet.extend([0; 6]);
    packet.extend(target.octets());
    packet
}

fn plain4(to: Ipv4Addr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    ethernet(0x0800, &ipv4(PEER, to, protocol, (0, 0x4000), 0, payload))
}

fn plain6(to: Ipv6Addr, next_header: u8, payload: &[u8]) -> Vec<u8> {
    ethernet(0x86dd, &ipv6(PEER6, to, next_header, payload))
}

fn assert_verdicts(steering: &XdpSteering, cases: &[(&str, Vec<u8>, Verdict)]) {
    for (what, frame, expected) in cases {
        assert_eq!(steering.judge_frame(frame).unwrap(), *expected, "{what}");
    }
}

use Verdict::{Drop as Claimed, Pass};

#[test]
fn packets_to_a_claimed_address_are_siwds() {
    let Some(steering) = steering_of_addresses(None) else {
        return;
    };
    let later_fragment = ipv4(PEER, OURS, TCP, (7, 100), 0, &[0; 40]);
    assert_verdicts(
        &steering,
        &[
            ("TCP", plain4(OURS, TCP, &ports(1, 2)), Claimed),
            ("ping", plain4(OURS, ICMP, &icmp(8, &[])), Claimed),
            ("a fragment", ethernet(0x0800, &later_fragment), Claimed),
            ("another's TCP", plain4(OTHER, TCP, &ports(1, 2)), Pass),
            ("IPv6 TCP", plain6(OURS6, TCP, &ports(1, 2)), Claimed),
            ("another's IPv6", plain6(PEER6, TCP, &ports(1, 2)), Pass),
            ("broadcast", plain4(Ipv4Addr::BROADCAST, UDP, &[0; 8]), Pass),
            ("a cut header", plain4(OURS, TCP, &[])[..33].to_vec(), Pass),
            ("LLDP", ethernet(0x88cc, &[0; 46]), Pass),
        ],
    );
}

#[test]
fn resolution_of_a_claimed_address_is_siwds() {
    let Some(steering) = steering_of_addresses(None) else {
        return;
    };
    let solicited_node: Ipv6Addr = "ff02::1:ff00:1".parse().unwrap();
    let all_nodes: Ipv6Addr = "ff02::1".parse().unwrap();
    let solicitation = |target: Ipv6Addr| {
        let mut message = icmp(135, &target.octets());
        message.extend([1, 1, 2, 0, 0, 0, 0, 2]);
        message
    };
    assert_verdicts(
        &steering,
        &[
            ("a request", ethernet(0x0806, &arp(1, PEER, OURS)), Claimed),
            ("a reply", ethernet(0x0806, &arp(2, PEER, OURS)), Claimed),
            (
                "another host's",
                ethernet(0x0806, &arp(1, OURS, OTHER)),
                Claimed,
            ),
            ("the kernel's", ethernet(0x0806, &arp(1, PEER, OTHER)), Pass),
            ("gratuitous", ethernet(0x0806, &arp(1, PEER, PEER)), Pass),
            (
                "a solicitation",
                plain6(solicited_node, ICMPV6, &solicitation(OURS6)),
                Claimed,
            ),
            (
                "one for the kernel",
                plain6(solicited_node, ICMPV6, &solicitation(PEER6)),
                Pass,
            ),
            (
                "another host's advertisement",
                plain6(all_nodes, ICMPV6, &icmp(136, &OURS6.octets())),
                Claimed,
            ),
            (
                "an advertisement to all nodes",
                plain6(all_nodes, ICMPV6, &icmp(136, &PEER6.octets())),
                Pass,
            ),
            (
                "an advertisement",
                plain6(OURS6, ICMPV6, &icmp(136, &[0; 16])),
                Claimed,
            ),
        ],
    );
}

/// VLAN 0 is a priority without a VLAN (IEEE 802.1Q).
#[test]
fn a_priority_tag_counts_as_none() {
    let packet = ipv4(PEER, OURS, TCP, (0, 0x4000), 0, &ports(1, PORT));
    let request = arp(1, PEER, OURS);
    for steering in [steering_of_addresses(None), steering_of_ports()] {
        let Some(steering) = steering else { return };
        assert_verdicts(
            &steering,
            &[
                ("a priority", tagged(0xa000, 0x0800, &packet), Claimed),
                ("a VLAN", tagged(0xa001, 0x0800, &packet), Pass),
                ("a tag alone", tagged(0, 0x0800, &[]), Pass),
            ],
        );
    }
    if let Some(steering) = steering_of_addresses(None) {
        let frame = tagged(0, 0x0806, &request);
        assert_verdicts(&steering, &[("a request", frame, Claimed)]);
    }
}

#[test]
fn only_the_devices_vlan_is_claimed() {
    let packet = ipv4(PEER, OURS, TCP, (0, 0x4000), 0, &ports(1, 2));
    let Some(steering) = steering_of_addresses(Some(7)) else {
        return;
    };
    assert_verdicts(
        &steering,
        &[
            ("its VLAN", tagged(7, 0x0800, &packet), Claimed),
            ("with a priority", tagged(0xe007, 0x0800, &packet), Claimed),
            ("ARP", tagged(7, 0x0806, &arp(1, PEER, OURS)), Claimed),
            ("another VLAN", tagged(8, 0x0800, &packet), Pass),
            ("no tag", ethernet(0x0800, &packet), Pass),
        ],
    );
    let Some(steering) = steering_of_addresses(None) else {
        return;
    };
    let tag = tagged(7, 0x0800, &packet);
    assert_verdicts(&steering, &[("a tag where none is expected", tag, Pass)]);
}

#[test]
fn segments_to_a_claimed_port_are_siwds() {
    let Some(steering) = steering_of_ports() else {
        return;
    };
    let with_options = ipv4(PEER, OURS, TCP, (0, 0x4000), 5, &ports(1, PORT));
    assert_verdicts(
        &steering,
        &[
            ("its port", plain4(OURS, TCP, &ports(1, PORT)), Claimed),
            (
                "behind IP options",
                ethernet(0x0800, &with_options),
                Claimed,
            ),
            ("ssh", plain4(OURS, TCP, &ports(PORT, 22)), Pass),
            ("UDP", plain4(OURS, UDP, &ports(1, PORT)), Pass),
            ("another address", plain4(OTHER, TCP, &ports(1, PORT)), Pass),
            ("ping", plain4(OURS, ICMP, &icmp(8, &[0; 40])), Pass),
            ("ARP", ethernet(0x0806, &arp(1, PEER, OURS)), Pass),
            ("IPv6", plain6(OURS6, TCP, &ports(1, PORT)), Claimed),
            ("IPv6 ssh", plain6(OURS6, TCP, &ports(PORT, 22)), Pass),
            (
                "a solicitation",
                plain6(OURS6, ICMPV6, &icmp(135, &[0; 60])),
                Pass,
            ),
        ],
    );
}

#[test]
fn errors_follow_the_packet_that_they_quote() {
    let Some(steering) = steering_of_ports() else {
        return;
    };
    let quoted = |port, options| ipv4(OURS, PEER, TCP, (0, 0), options, &ports(port, 9));
    let quoted6 = |port| ipv6(OURS6, PEER6, TCP, &ports(port, 9));
    let later = ipv4(OURS, PEER, TCP, (0, 9), 0, &ports(PORT, 9));
    assert_verdicts(
        &steering,
        &[
            (
                "too big",
                plain4(OURS, ICMP, &icmp(3, &quoted(PORT, 0))),
                Claimed,
            ),
            (
                "of a packet with options",
                plain4(OURS, ICMP, &icmp(3, &quoted(PORT, 3))),
                Claimed,
            ),
            (
                "time exceeded",
                plain4(OURS, ICMP, &icmp(11, &quoted(PORT, 0))),
                Claimed,
            ),
            (
                "of the kernel's",
                plain4(OURS, ICMP, &icmp(3, &quoted(22, 0))),
                Pass,
            ),
            (
                "of a later fragment",
                plain4(OURS, ICMP, &icmp(3, &later)),
                Pass,
            ),
            (
                "a cut one",
                plain4(OURS, ICMP, &icmp(3, &quoted(PORT, 0)[..20])),
                Pass,
            ),
            (
                "IPv6 too big",
                plain6(OURS6, ICMPV6, &icmp(2, &quoted6(PORT))),
                Claimed,
            ),
            (
                "IPv6 of the kernel's",
                plain6(OURS6, ICMPV6, &icmp(2, &quoted6(22))),
                Pass,
            ),
            (
                "IPv6 echo",
                plain6(OURS6, ICMPV6, &icmp(128, &quoted6(PORT))),
                Pass,
            ),
        ],
    );
}

#[test]
fn fragments_go_where_the_first_went() {
    let Some(steering) = steering_of_ports() else {
        return;
    };
    let first = |id, port| ipv4(PEER, OURS, TCP, (id, 0x2000), 0, &ports(1, port));
    let later = |id| ipv4(PEER, OURS, TCP, (id, 3), 0, &[0; 24]);
    let four = |packet: Vec<u8>| ethernet(0x0800, &packet);
    let six = |id: u32, field: u16, payload: &[u8]| {
        let mut header = vec![TCP, 0];
        header.extend(field.to_be_bytes());
        header.extend(id.to_be_bytes());
        header.extend(payload);
        plain6(OURS6, 44, &header)
    };
    assert_verdicts(
        &steering,
        &[
            ("ahead of the first", four(later(1)), Pass),
            ("the first", four(first(1, PORT)), Claimed),
            ("a later one", four(later(1)), Claimed),
            ("another packet's", four(later(2)), Pass),
            ("the kernel's", four(first(2, 22)), Pass),
            ("the kernel's later one", four(later(2)), Pass),
            ("the identification, used again", four(first(1, 22)), Pass),
            ("its later one", four(later(1)), Pass),
            ("IPv6 ahead", six(1, 8 << 3, &[0; 24]), Pass),
            ("IPv6 first", six(1, 1, &ports(1, PORT)), Claimed),
            ("IPv6 later", six(1, 8 << 3, &[0; 24]), Claimed),
            ("IPv6 other", six(2, 8 << 3, &[0; 24]), Pass),
            ("IPv6 atomic", six(3, 0, &ports(1, PORT)), Claimed),
        ],
    );
}

#[test]
fn a_claim_that_is_removed_is_the_kernels() {
    let Some(mut steering) = steering_of_ports() else {
        return;
    };
    let frame = plain4(OURS, TCP, &ports(1, PORT));
    assert_eq!(steering.judge_frame(&frame).unwrap(), Claimed);
    let claim = Claim {
        address: OURS.into(),
        port: PORT,
    };
    steering.remove_claim(claim).unwrap();
    assert_eq!(steering.judge_frame(&frame).unwrap(), Pass);
    assert_eq!(steering.claims().count(), 1);
}
