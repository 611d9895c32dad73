//! A connection's frame header, made once and patched per segment: Ethernet, VLAN, IP, TCP.

use crate::base::frame_sink::{FrameMeta, TxChecksum};
use crate::base::sequence::SeqNr;
use crate::wire::bytes::{read_u32, read_u64};
use crate::wire::checksum::fold_carries;
use crate::wire::flow_key::FlowKey;
use crate::wire::segment::TS_ALIGNED;

/// Ethernet + VLAN + IPv6 + TCP without options.
const LEN: usize = 14 + 4 + 40 + 20;
/// The same with all option space, rounded up.
pub(crate) const HEADER_MAX: usize = 128;

pub(crate) struct Template {
    bytes: [u8; LEN],
    l2: u8,
    v6: bool,
    /// IPv4 header sum with a total length of 0.
    ip_sum: u32,
    /// Pseudo-header sum with a length of 0.
    pseudo: u32,
}

/// What differs from segment to segment.
pub(crate) struct SegmentFields<'a> {
    pub seq: SeqNr,
    pub ack: SeqNr,
    pub flags: u8,
    pub window: u16,
    pub ts: Option<(u32, u32)>,
    /// Further options, a multiple of 4 bytes.
    pub options: &'a [u8],
    pub payload: u32,
    /// ECN-capable transport, ECT(0) (RFC 3168 section 5).
    pub ect: bool,
    /// A super-segment: its parts have lengths of their own.
    pub tso: bool,
}

/// Sum of 16-bit words of an even slice; cold.
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
        let ethertype: u16 = if v6 { 0x86dd } else { 0x0800 };
        let l2 = if let Some(identifier) = vlan {
            bytes[12..14].copy_from_slice(&0x8100u16.to_be_bytes());
            bytes[14..16].copy_from_slice(&(identifier & 0xfff).to_be_bytes());
            18
        } else {
            14
        };
        bytes[l2 - 2..l2].copy_from_slice(&ethertype.to_be_bytes());
        let ip = &mut bytes[l2..];
        let mut pseudo = 6;
        let mut ip_sum = 0;
        match (local.ip(), remote.ip()) {
            (core::net::IpAddr::V4(source), core::net::IpAddr::V4(destination)) => {
                ip[0] = 0x45;
                ip[6] = 0x40; // DF, RFC 1191; so the identification may be 0 (RFC 6864)
                ip[8] = 64;
                ip[9] = 6;
                ip[12..16].copy_from_slice(&source.octets());
                ip[16..20].copy_from_slice(&destination.octets());
                ip_sum = sum_even_words(&ip[..20]);
                pseudo += sum_even_words(&ip[12..20]);
            }
            (core::net::IpAddr::V6(source), core::net::IpAddr::V6(destination)) => {
                ip[0] = 0x60;
                ip[6] = 6;
                ip[7] = 64;
                ip[8..24].copy_from_slice(&source.octets());
                ip[24..40].copy_from_slice(&destination.octets());
                pseudo += sum_even_words(&ip[8..40]);
            }
            _ => {} // FlowKey has one family
        }
        let tcp = &mut ip[if v6 { 40 } else { 20 }..];
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

    pub(crate) fn is_v6(&self) -> bool {
        self.v6
    }

    /// This is the connection of `key`: saves a copy of the four-tuple beside the template.
    #[inline(always)]
    pub(crate) fn carries(&self, key: &FlowKey) -> bool {
        let l2 = usize::from(self.l2);
        if self.v6 {
            return key.is_v6() && FlowKey::read(&self.bytes[l2 + 8..l2 + 44]) == *key;
        }
        // One bounds check, two compares: this runs for every segment.
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

    /// The four-tuple, read back.
    pub(crate) fn key(&self) -> FlowKey {
        let ip = &self.bytes[usize::from(self.l2)..];
        FlowKey::read(if self.v6 { &ip[8..44] } else { &ip[12..24] })
    }

    pub(crate) fn set_destination(&mut self, mac: [u8; 6]) {
        self.bytes[..6].copy_from_slice(&mac);
    }

    /// Length of the headers and what the sink must know of them.
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

    /// Fills `out`, exactly as long as `meta` said. The TCP checksum field gets the pseudo-header
    /// sum, not complemented: what offload and [`crate::wire::checksum::finish`] want.
    #[inline]
    pub(crate) fn build(&self, out: &mut [u8], fields: &SegmentFields<'_>) {
        let l2 = usize::from(self.l2);
        let l3 = if self.v6 { 40 } else { 20 };
        let fixed = l2 + l3 + 20;
        // Overlapping copies of constant length instead of one of a variable length.
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

#[cfg(test)]
mod tests {
    use super::*;
    use smoltcp::wire::{EthernetFrame, Ipv4Packet, Ipv6Packet, TcpPacket};

    #[test]
    fn headers_are_what_smoltcp_reads() {
        for (l, r) in [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2")] {
            for vlan in [None, Some(7)] {
                let key = FlowKey::new(l.parse().unwrap(), 4000, r.parse().unwrap(), 5000).unwrap();
                let t = Template::new([2; 6], [4; 6], vlan, &key);
                let mut out = [0; HEADER_MAX];
                let f = SegmentFields {
                    seq: SeqNr(0xdead_beef),
                    ack: SeqNr(77),
                    flags: 0x18,
                    window: 999,
                    ts: Some((5, 6)),
                    options: &[1, 1, 1, 1],
                    payload: 5,
                    ect: vlan.is_some(),
                    tso: false,
                };
                let (n, meta) = t.meta(&f);
                t.build(&mut out[..n], &f);
                let mut frame = out[..n].to_vec();
                let mut sum = crate::wire::checksum::OnesComplementSum::new();
                sum.add(b"he");
                sum.add(b"llo");
                let at = crate::wire::checksum::tcp_checksum_offset(&meta);
                let done = crate::wire::checksum::complete_tcp_checksum(&frame, &meta, sum);
                frame[at..at + 2].copy_from_slice(&done);
                frame.extend_from_slice(b"hello");
                let e = EthernetFrame::new_checked(&frame[..]).unwrap();
                assert_eq!(u16::from(e.ethertype()) == 0x8100, vlan.is_some());
                let ip = &frame[usize::from(meta.l2_len)..];
                let (src, dst, tcp) = if meta.ipv6 {
                    let p = Ipv6Packet::new_checked(ip).unwrap();
                    (
                        p.src_addr().into(),
                        p.dst_addr().into(),
                        p.payload().to_vec(),
                    )
                } else {
                    let p = Ipv4Packet::new_checked(ip).unwrap();
                    assert!(p.verify_checksum());
                    (
                        p.src_addr().into(),
                        p.dst_addr().into(),
                        p.payload().to_vec(),
                    )
                };
                let t = TcpPacket::new_checked(&tcp[..]).unwrap();
                assert!(t.verify_checksum(&src, &dst));
                assert_eq!(t.seq_number().0 as u32, 0xdead_beef);
                assert_eq!(
                    (t.src_port(), t.dst_port(), t.window_len(), t.payload()),
                    (4000, 5000, 999, &b"hello"[..])
                );
            }
        }
    }
}
