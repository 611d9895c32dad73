//! Constants of the wire formats that several modules use.

/// EtherType of IPv4 (IEEE 802.3), host order.
pub(crate) const ETHERTYPE_IPV4: u16 = 0x0800;
/// EtherType of ARP.
pub(crate) const ETHERTYPE_ARP: u16 = 0x0806;
/// The EtherType before a VLAN tag (IEEE 802.1Q).
pub(crate) const ETHERTYPE_VLAN: u16 = 0x8100;
/// EtherType of IPv6.
pub(crate) const ETHERTYPE_IPV6: u16 = 0x86dd;

/// Identifier bits of a VLAN tag; the others are priority and drop eligibility.
pub(crate) const VLAN_ID_MASK: u16 = 0x0fff;

/// Bytes of an Ethernet header.
pub(crate) const ETHERNET_HEADER_LEN: usize = 14;
/// Bytes of an Ethernet header with a VLAN tag.
pub(crate) const TAGGED_HEADER_LEN: usize = 18;
/// Bytes of an IPv4 header without options (RFC 791).
pub(crate) const IPV4_HEADER_LEN: usize = 20;
/// Bytes of an IPv6 header without extension headers (RFC 8200).
pub(crate) const IPV6_HEADER_LEN: usize = 40;
/// Bytes of a TCP header without options (RFC 9293).
pub(crate) const TCP_HEADER_LEN: usize = 20;

/// Bytes of the longest headers that a sink is asked for, TCP options included, rounded up.
pub(crate) const HEADER_MAX: usize = 128;

/// Version and header length of an IPv4 header without options.
pub(crate) const IPV4_PLAIN_FIRST_BYTE: u8 = 0x45;
/// The version in the first byte of an IPv6 header.
pub(crate) const IPV6_FIRST_BYTE: u8 = 0x60;
/// "More fragments" and the fragment offset of an IPv4 header: 0 in an unfragmented packet.
pub(crate) const IPV4_FRAGMENT_MASK: u16 = 0x3fff;
/// "Don't fragment", in the upper byte of the same field.
pub(crate) const IPV4_DONT_FRAGMENT: u8 = 0x40;

/// Protocol number of ICMP.
pub(crate) const PROTOCOL_ICMP: u8 = 1;
/// Protocol and next-header number of TCP.
pub(crate) const PROTOCOL_TCP: u8 = 6;
/// Protocol and next-header number of UDP.
pub(crate) const PROTOCOL_UDP: u8 = 17;
/// UDP port of the iWARP port mapper.
pub(crate) const PORT_MAPPER_PORT: u16 = 3935;
/// UDP port of RoCEv2.
pub(crate) const ROCE_PORT: u16 = 4791;
/// Next-header number of ICMPv6.
pub(crate) const PROTOCOL_ICMPV6: u8 = 58;

/// Congestion Experienced in the ECN field (RFC 3168 section 5).
pub(crate) const ECN_CE: u8 = 3;

/// The time to live of our packets (RFC 1700).
pub(crate) const DEFAULT_HOP_LIMIT: u8 = 64;

/// One's complement sum over data with a correct checksum (RFC 1071).
pub(crate) const CHECKSUM_RIGHT: u16 = 0xffff;
