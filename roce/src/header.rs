//! BTH, DETH and immediate data of a datagram.

/// UDP port of RoCEv2.
pub const UDP_PORT: u16 = 4791;
/// Bytes of the longest headers of a datagram behind UDP.
pub const HEADERS_MAX: usize = BTH_LEN + DETH_LEN + IMMEDIATE_LEN;
/// The default P_Key, with full membership.
pub const DEFAULT_PKEY: u16 = 0xffff;
/// Bits of a P_Key without that of the membership.
pub const PKEY_MASK: u16 = 0x7fff;
/// Largest queue pair number on the wire.
pub const MAX_QPN: u32 = 0xff_ffff;
/// Destination of datagrams to a multicast group.
pub const MULTICAST_QPN: u32 = MAX_QPN;

/// Bytes of the base transport header.
pub const BTH_LEN: usize = 12;
const DETH_LEN: usize = 8;
const IMMEDIATE_LEN: usize = 4;
/// UD SEND Only, without and with immediate data.
const SEND_ONLY: u8 = 0x64;
const SEND_ONLY_WITH_IMMEDIATE: u8 = 0x65;
const SOLICITED: u8 = 0x80;
const VERSION: u8 = 0x0f;
/// Path MTUs of InfiniBand, in bytes of payload.
const PATH_MTUS: [usize; 5] = [4096, 2048, 1024, 512, 256];
/// Bytes around the payload in a packet: the longest IP header, UDP, the longest headers, pad and ICRC.
const AROUND_PAYLOAD: usize = 40 + 8 + HEADERS_MAX + 4;

/// Largest payload of a datagram on a link with this MTU in bytes: the path MTU of InfiniBand that fits.
pub fn path_mtu(link_mtu: usize) -> usize {
    let mut fitting = PATH_MTUS.into_iter();
    fitting
        .find(|mtu| mtu + AROUND_PAYLOAD <= link_mtu)
        .unwrap_or(PATH_MTUS[PATH_MTUS.len() - 1])
}

/// Pad bytes behind a payload of `len` bytes.
#[inline]
pub fn pad_of(len: usize) -> usize {
    len.wrapping_neg() & 3
}

/// Destination in a BTH; `None` if `transport`, the bytes behind UDP, are too few.
#[inline]
pub fn destination_qpn(transport: &[u8]) -> Option<u32> {
    let number = transport.get(5..8)?;
    Some(u32::from_be_bytes([0, number[0], number[1], number[2]]))
}

/// Checks for an operation of reliable connections (RC): the upper three bits of an opcode are the transport
/// (InfiniBand Architecture Specification, volume 1, section 9.2.1).
pub fn is_of_reliable_connection(opcode: u8) -> bool {
    opcode >> 5 == 0
}

/// Reason why received bytes are no datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UdError {
    /// Headers, pad and ICRC do not fit.
    #[error("the datagram is too short for its headers")]
    TooShort,
    /// A transport header version other than 0.
    #[error("the version of the transport header is {0}, not 0")]
    Version(u8),
    /// An operation other than UD SEND.
    #[error(
        "opcode {0:#04x} is not served: RC over RoCE is not, because siwd's reliable connections are iWARP"
    )]
    Opcode(u8),
}

/// Header fields of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UdHeader {
    /// The receiver's completion is a solicited event.
    pub solicited: bool,
    /// Partition key.
    pub pkey: u16,
    /// Destination queue pair, 24 bits.
    pub dest_qpn: u32,
    /// Packet sequence number, 24 bits; ignored by receivers.
    pub psn: u32,
    /// Queue key.
    pub qkey: u32,
    /// Sending queue pair, 24 bits.
    pub src_qpn: u32,
    /// Immediate data.
    pub immediate: Option<u32>,
}

impl UdHeader {
    /// Writes the headers before a payload of `payload_len` bytes. Returns their length.
    #[inline]
    pub fn write(&self, payload_len: usize, out: &mut [u8; HEADERS_MAX]) -> usize {
        out[0] = match self.immediate {
            None => SEND_ONLY,
            Some(_) => SEND_ONLY_WITH_IMMEDIATE,
        };
        let solicited = if self.solicited { SOLICITED } else { 0 };
        out[1] = solicited | (pad_of(payload_len) as u8) << 4;
        out[2..4].copy_from_slice(&self.pkey.to_be_bytes());
        out[4..8].copy_from_slice(&(self.dest_qpn & MAX_QPN).to_be_bytes());
        out[8..12].copy_from_slice(&(self.psn & MAX_QPN).to_be_bytes());
        out[12..16].copy_from_slice(&self.qkey.to_be_bytes());
        out[16..20].copy_from_slice(&(self.src_qpn & MAX_QPN).to_be_bytes());
        let Some(immediate) = self.immediate else {
            return BTH_LEN + DETH_LEN;
        };
        out[20..].copy_from_slice(&immediate.to_be_bytes());
        HEADERS_MAX
    }

    /// Parses the headers of a datagram with `len` bytes behind UDP, of which `head` has the first ones.
    /// Returns the fields, and the offset and length of the payload.
    ///
    /// # Errors
    /// The bytes are no complete UD SEND.
    #[inline]
    pub fn parse(head: &[u8], len: usize) -> Result<(UdHeader, usize, usize), UdError> {
        let bth: &[u8; BTH_LEN] = head.first_chunk().ok_or(UdError::TooShort)?;
        let headers = match bth[0] {
            SEND_ONLY => BTH_LEN + DETH_LEN,
            SEND_ONLY_WITH_IMMEDIATE => HEADERS_MAX,
            other => return Err(UdError::Opcode(other)),
        };
        if bth[1] & VERSION != 0 {
            return Err(UdError::Version(bth[1] & VERSION));
        }
        let pad = usize::from(bth[1] >> 4 & 3);
        let head = head.get(..headers).ok_or(UdError::TooShort)?;
        let around = headers + pad + crate::ICRC_LEN;
        let payload_len = len.checked_sub(around).ok_or(UdError::TooShort)?;
        let word =
            |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let header = UdHeader {
            solicited: bth[1] & SOLICITED != 0,
            pkey: u16::from_be_bytes([bth[2], bth[3]]),
            dest_qpn: word(4) & MAX_QPN,
            psn: word(8) & MAX_QPN,
            qkey: word(12),
            src_qpn: word(16) & MAX_QPN,
            immediate: (headers == HEADERS_MAX).then(|| word(20)),
        };
        Ok((header, headers, payload_len))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header() -> UdHeader {
        UdHeader {
            solicited: true,
            pkey: DEFAULT_PKEY,
            dest_qpn: 0x12_3456,
            psn: 0xab_cdef,
            qkey: 0x1111_1111,
            src_qpn: 0x65_4321,
            immediate: Some(0xdead_beef),
        }
    }

    #[test]
    fn the_headers_have_the_layout_of_the_specification() {
        let mut out = [0; HEADERS_MAX];
        assert_eq!(header().write(5, &mut out), 24);
        let expected = [
            0x65, 0xb0, 0xff, 0xff, 0, 0x12, 0x34, 0x56, 0, 0xab, 0xcd, 0xef, 0x11, 0x11, 0x11,
            0x11, 0, 0x65, 0x43, 0x21, 0xde, 0xad, 0xbe, 0xef,
        ];
        assert_eq!(out, expected);
        assert_eq!(destination_qpn(&out), Some(0x12_3456));
        let plain = UdHeader {
            immediate: None,
            solicited: false,
            ..header()
        };
        assert_eq!(plain.write(8, &mut out), 20);
        assert_eq!(out[..2], [0x64, 0]);
    }

    #[test]
    fn wrong_datagrams_are_refused_with_their_reason() {
        let mut bytes = [0; 64];
        let mut out = [0; HEADERS_MAX];
        header().write(5, &mut out);
        bytes[..24].copy_from_slice(&out);
        let (parsed, at, len) = UdHeader::parse(&bytes, 24 + 5 + 3 + 4).unwrap();
        assert_eq!((parsed, at, len), (header(), 24, 5));
        assert_eq!(UdHeader::parse(&bytes, 30), Err(UdError::TooShort));
        assert_eq!(UdHeader::parse(&bytes[..23], 64), Err(UdError::TooShort));
        bytes[1] |= 1;
        assert_eq!(UdHeader::parse(&bytes, 64), Err(UdError::Version(1)));
        bytes[0] = 0x04;
        assert_eq!(UdHeader::parse(&bytes, 64), Err(UdError::Opcode(4)));
        assert!(is_of_reliable_connection(4) && !is_of_reliable_connection(SEND_ONLY));
    }

    #[test]
    fn the_payload_is_at_most_a_path_mtu_of_infiniband() {
        let expected = [
            (576, 256),
            (1500, 1024),
            (2200, 2048),
            (4200, 4096),
            (9000, 4096),
        ];
        for (link, path) in expected {
            assert_eq!(path_mtu(link), path, "link MTU {link}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_or_refused(bytes: Vec<u8>, len in 0usize..5000) {
            if let Ok((header, at, payload)) = UdHeader::parse(&bytes, len) {
                prop_assert!(at + payload <= len);
                let mut out = [0; HEADERS_MAX];
                prop_assert_eq!(header.write(payload, &mut out), at);
            }
        }
    }
}
