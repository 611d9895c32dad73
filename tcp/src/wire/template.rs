//! The headers of a connection's frames (Ethernet, VLAN, IP, TCP), built once and patched for each
//! segment.

use siw_net::bytes::{read_u32, read_u64};
use siw_net::checksum::fold_carries;
use siw_net::constants::{
    DEFAULT_HOP_LIMIT, ETHERNET_HEADER_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6, ETHERTYPE_VLAN,
    IPV4_DONT_FRAGMENT, IPV4_HEADER_LEN, IPV4_PLAIN_FIRST_BYTE, IPV6_FIRST_BYTE, IPV6_HEADER_LEN,
    PROTOCOL_TCP, TAGGED_HEADER_LEN, TCP_HEADER_LEN, VLAN_ID_MASK,
};
use siw_net::{FlowKey, FrameMeta, TxChecksum};

use crate::base::sequence::SeqNr;
use crate::wire::segment::TS_ALIGNED;

/// Bytes of the longest headers without TCP options: Ethernet, VLAN, IPv6, TCP.
const LEN: usize = TAGGED_HEADER_LEN + IPV6_HEADER_LEN + TCP_HEADER_LEN;

/// The headers of a connection with all constant fields.
pub(crate) struct Template {
    bytes: [u8; LEN],
    l2: u8,
    v6: bool,
    /// One's complement sum of the IPv4 header with a total length of 0.
    ip_sum: u32,
    /// One's complement sum of the pseudo-header with a length of 0.
    pseudo: u32,
}

/// The fields that differ between segments.
pub(crate) struct SegmentFields<'a> {
    pub seq: SeqNr,
    pub ack: SeqNr,
    pub flags: u8,
    pub window: u16,
    pub ts: Option<(u32, u32)>,
    /// Options other than timestamps, a multiple of 4 bytes.
    pub options: &'a [u8],
    pub payload: u32,
    /// Send as ECN-capable transport, ECT(0) (RFC 3168 section 5).
    pub ect: bool,
    /// A super-segment for TSO: its pseudo-header sum excludes the length, since each segment has its own.
    pub tso: bool,
}

/// Sum of the 16-bit words of a slice of even length.
fn sum_even_words(bytes: &[u8]) -> u32 {
    bytes
        .chunks_exact(2)
        .map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])))
        .sum()
}

impl Template {
    pub(crate) fn new(src: [u8; 6], dst: [u8; 6], vlan: Option<u16>, key: &FlowKey) -> Self {
        let (local, remote) = (key.local(), key.remote());
        let mut bytes = [0u8; LEN];
        bytes[..6].copy_from_slice(&dst);
        bytes[6..12].copy_from_slice(&src);
        let v6 = key.is_v6();
        let ethertype = if v6 { ETHERTYPE_IPV6 } else { ETHERTYPE_IPV4 };
        let l2 = if let Some(identifier) = vlan {
            bytes[12..14].copy_from_slice(&ETHERTYPE_VLAN.to_be_bytes());
            bytes[14..16].copy_from_slice(&(identifier & VLAN_ID_MASK).to_be_bytes());
            TAGGED_HEADER_LEN
        } else {
            ETHERNET_HEADER_LEN
        };
        bytes[l2 - 2..l2].copy_from_slice(&ethertype.to_be_bytes());
        let ip = &mut bytes[l2..];
        let mut pseudo = u32::from(PROTOCOL_TCP);
        let mut ip_sum = 0;
        match (local.ip(), remote.ip()) {
            (core::net::IpAddr::V4(source), core::net::IpAddr::V4(destination)) => {
                ip[0] = IPV4_PLAIN_FIRST_BYTE;
                // Don't fragment (RFC 1191): the identification may then be 0 (RFC 6864 section 4.1).
                ip[6] = IPV4_DONT_FRAGMENT;
                ip[8] = DEFAULT_HOP_LIMIT;
                ip[9] = PROTOCOL_TCP;
                ip[12..16].copy_from_slice(&source.octets());
                ip[16..20].copy_from_slice(&destination.octets());
                ip_sum = sum_even_words(&ip[..20]);
                pseudo += sum_even_words(&ip[12..20]);
            }
            (core::net::IpAddr::V6(source), core::net::IpAddr::V6(destination)) => {
                ip[0] = IPV6_FIRST_BYTE;
                ip[6] = PROTOCOL_TCP;
                ip[7] = DEFAULT_HOP_LIMIT;
                ip[8..24].copy_from_slice(&source.octets());
                ip[24..40].copy_from_slice(&destination.octets());
                pseudo += sum_even_words(&ip[8..40]);
            }
            // A FlowKey has addresses of one family.
            _ => {}
        }
        let tcp = &mut ip[if v6 { IPV6_HEADER_LEN } else { IPV4_HEADER_LEN }..];
        tcp[..2].copy_from_slice(&local.port().to_be_bytes());
        tcp[2..4].copy_from_slice(&remote.port().to_be_bytes());
        Template {
            bytes,
            l2: l2 as u8,
            v6,
            ip_sum,
            pseudo,
        }
    }

    #[inline]
    pub(crate) fn is_v6(&self) -> bool {
        self.v6
    }

    /// Returns whether this is the connection of `key`. The headers themselves are compared, so that no
    /// separate copy of the four-tuple is needed.
    #[inline(always)]
    pub(crate) fn carries(&self, key: &FlowKey) -> bool {
        let l2 = usize::from(self.l2);
        if self.v6 {
            return key.is_v6() && FlowKey::read(&self.bytes[l2 + 8..l2 + 44]) == *key;
        }
        // This runs for every received segment: one bounds check, two compares.
        let Some(addresses_and_ports) = self
            .bytes
            .get(l2 + 12..)
            .and_then(|addresses_and_ports| addresses_and_ports.first_chunk::<12>())
        else {
            return false;
        };
        key.is_v4(
            read_u64(addresses_and_ports, 0),
            read_u32(addresses_and_ports, 8),
        )
    }

    /// Returns the four-tuple of the connection.
    #[inline]
    pub(crate) fn key(&self) -> FlowKey {
        let ip = &self.bytes[usize::from(self.l2)..];
        FlowKey::read(if self.v6 { &ip[8..44] } else { &ip[12..24] })
    }

    #[inline]
    pub(crate) fn set_destination(&mut self, mac: [u8; 6]) {
        self.bytes[..6].copy_from_slice(&mac);
    }

    /// Returns the header length of a segment, and its metadata for the sink.
    #[inline]
    pub(crate) fn meta(&self, fields: &SegmentFields<'_>) -> (usize, FrameMeta) {
        let l3 = if self.v6 { 40 } else { 20 };
        let l4 = 20 + if fields.ts.is_some() { 12 } else { 0 } + fields.options.len();
        let meta = FrameMeta {
            l2_len: self.l2,
            l3_len: l3,
            l4_len: l4 as u8,
            ipv6: self.v6,
            checksum: TxChecksum::Offload,
            self_addressed: false,
            retransmission: false,
            payload_len: fields.payload,
            tso_segsz: 0,
            connection: None,
        };
        (usize::from(self.l2) + usize::from(l3) + l4, meta)
    }

    /// Writes the headers into `out`, which has exactly the length that [`Template::meta`] returns. The TCP
    /// checksum field gets the pseudo-header sum, not complemented, as checksum offload and
    /// [`siw_net::checksum::complete_tcp_checksum`] require.
    #[inline]
    pub(crate) fn build(&self, out: &mut [u8], fields: &SegmentFields<'_>) {
        let l2 = usize::from(self.l2);
        let l3 = if self.v6 { 40 } else { 20 };
        let fixed = l2 + l3 + 20;
        // Overlapping copies of constant length, which compile to a few vector moves, instead of one of
        // variable length, which would be a call.
        out[..32].copy_from_slice(&self.bytes[..32]);
        if fixed > 64 {
            out[32..64].copy_from_slice(&self.bytes[32..64]);
        }
        out[fixed - 32..fixed].copy_from_slice(&self.bytes[fixed - 32..fixed]);
        let packet = &mut out[l2..];
        let l4 = packet.len() - l3;
        let tcp_len = l4 as u32 + fields.payload;
        if self.v6 {
            packet[1] |= u8::from(fields.ect) << 5;
            packet[4..6].copy_from_slice(&(tcp_len as u16).to_be_bytes());
        } else {
            let total = tcp_len + 20;
            let tos = u32::from(fields.ect) << 1;
            packet[1] = tos as u8;
            packet[2..4].copy_from_slice(&(total as u16).to_be_bytes());
            packet[10..12].copy_from_slice(
                &(!fold_carries(u64::from(self.ip_sum + total + tos))).to_be_bytes(),
            );
        }
        let tcp = &mut packet[l3..];
        let tcp = &mut tcp[..l4];
        tcp[4..8].copy_from_slice(&fields.seq.0.to_be_bytes());
        tcp[8..12].copy_from_slice(&fields.ack.0.to_be_bytes());
        tcp[12] = (l4 as u8 / 4) << 4;
        tcp[13] = fields.flags;
        tcp[14..16].copy_from_slice(&fields.window.to_be_bytes());
        let summed = if fields.tso { 0 } else { tcp_len };
        tcp[16..18].copy_from_slice(
            &fold_carries(u64::from(self.pseudo) + u64::from(summed)).to_be_bytes(),
        );
        let mut at = 20;
        if let Some((val, ecr)) = fields.ts {
            tcp[20..24].copy_from_slice(&TS_ALIGNED.to_be_bytes());
            tcp[24..28].copy_from_slice(&val.to_be_bytes());
            tcp[28..32].copy_from_slice(&ecr.to_be_bytes());
            at = 32;
        }
        if !fields.options.is_empty() {
            tcp[at..].copy_from_slice(fields.options);
        }
    }
}
