//! Constants of the wire formats that several modules use.

/// EtherType of IPv4 (IEEE 802.3), host order.
pub const ETHERTYPE_IPV4: u16 = 0x0800;
/// EtherType of ARP.
pub const ETHERTYPE_ARP: u16 = 0x0806;
/// The EtherType before a VLAN tag (IEEE 802.1Q).
pub const ETHERTYPE_VLAN: u16 = 0x8100;
/// EtherType of IPv6.
pub const ETHERTYPE_IPV6: u16 = 0x86dd;

/// Identifier bits of a VLAN tag; the others are priority and drop eligibility.
pub const VLAN_ID_MASK: u16 = 0x0fff;

/// Bytes of an Ethernet header.
pub const ETHERNET_HEADER_LEN: usize = 14;
/// Bytes of an Ethernet header with a VLAN tag.
pub const TAGGED_HEADER_LEN: usize = 18;
/// Bytes of an IPv4 header without options (RFC 791).
pub const IPV4_HEADER_LEN: usize = 20;
/// Bytes of an IPv6 header without extension headers (RFC 8200).
pub const IPV6_HEADER_LEN: usize = 40;
/// Bytes of a TCP header without options (RFC 9293).
pub const TCP_HEADER_LEN: usize = 20;

/// Bytes of the longest headers that a sink is asked for, TCP options included, rounded up.
pub const HEADER_MAX: usize = 128;

/// Version and header length of an IPv4 header without options.
pub const IPV4_PLAIN_FIRST_BYTE: u8 = 0x45;
/// The version in the first byte of an IPv6 header.
pub const IPV6_FIRST_BYTE: u8 = 0x60;
/// "More fragments" and the fragment offset of an IPv4 header: 0 in an unfragmented packet.
pub const IPV4_FRAGMENT_MASK: u16 = 0x3fff;
/// "Don't fragment", in the upper byte of the same field.
pub const IPV4_DONT_FRAGMENT: u8 = 0x40;

/// Protocol number of ICMP.
pub const PROTOCOL_ICMP: u8 = 1;
/// Protocol and next-header number of TCP.
pub const PROTOCOL_TCP: u8 = 6;
/// Protocol and next-header number of UDP.
pub const PROTOCOL_UDP: u8 = 17;
/// UDP port of the iWARP port mapper.
pub const PORT_MAPPER_PORT: u16 = 3935;
/// UDP port of RoCEv2.
pub const ROCE_PORT: u16 = 4791;
/// Next-header number of ICMPv6.
pub const PROTOCOL_ICMPV6: u8 = 58;

/// Congestion Experienced in the ECN field (RFC 3168 section 5).
pub const ECN_CE: u8 = 3;

/// The time to live of our packets (RFC 1700).
pub const DEFAULT_HOP_LIMIT: u8 = 64;

/// One's complement sum over data with a correct checksum (RFC 1071).
pub const CHECKSUM_RIGHT: u16 = 0xffff;
