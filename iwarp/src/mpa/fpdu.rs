//! FPDU framing (RFC 5044 section 4): length, pad, CRC and maximum ULPDU size.
//!
//! The receiver uses it to find and verify FPDUs in the stream, the sender to size them and to append
//! pad and CRC. Lengths here exclude markers; [`crate::mpa::marker`] adds them.

use crate::ddp::MAX_HDR_LEN;
use crate::mpa::marker::{self, MARKER_LEN, MarkerPosition};
use crate::stream::RxStream;
use siw_memory::crc;

/// Octets of the ULPDU_Length field.
pub const LEN_FIELD: usize = 2;
/// Octets of the CRC field; always there, zero when CRC is off (RFC 5044 section 4.4).
pub const CRC_LEN: usize = 4;
/// Octets of the longest FPDU, markers included. A receive window below this size can stall the
/// stream permanently.
pub const MAX_FPDU: usize =
    wire_len(u16::MAX) + MARKER_LEN * (wire_len(u16::MAX) / (marker::INTERVAL - MARKER_LEN) + 1);

/// Longest pad, in octets.
pub const MAX_PAD_LEN: usize = 3;

/// Zero octets that pad the length field and the ULPDU to a multiple of four.
#[inline]
pub const fn pad_len(ulpdu_len: u16) -> usize {
    (LEN_FIELD + ulpdu_len as usize).wrapping_neg() & 3
}

/// Octets of a whole FPDU.
#[inline]
pub const fn wire_len(ulpdu_len: u16) -> usize {
    LEN_FIELD + ulpdu_len as usize + pad_len(ulpdu_len) + CRC_LEN
}

/// MULPDU without markers: EMSS - (6 + EMSS mod 4), within 128..=64768 (RFC 5044 section 4.5).
#[inline]
pub fn mulpdu_for_emss(emss: u32) -> u16 {
    emss.saturating_sub(6 + emss % 4).clamp(128, 64768) as u16
}

/// CRC32c of any octets followed by their own CRC: one pass verifies an FPDU.
const RESIDUE: u32 = 0x4867_4bc7;

/// The FPDU at the start of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FpduInfo {
    pub ulpdu_len: u16,
    /// Octets of the FPDU, without markers.
    pub wire_len: usize,
    /// Octets of the stream that it takes, markers included.
    pub stream_len: usize,
    /// Octets after the length field: the DDP header, when the ULPDU is long enough.
    pub hdr: [u8; MAX_HDR_LEN],
}

/// Octets of the length field and the longest header.
pub(crate) const HEAD_LEN: usize = LEN_FIELD + MAX_HDR_LEN;

/// Returns the FPDU at the start of the stream; `None` until it is complete.
#[inline]
pub(crate) fn peek_fpdu(rx: &impl RxStream) -> Option<FpduInfo> {
    // The header nearly always lies in one piece.
    if let Some(head) = rx.contiguous(0, HEAD_LEN).and_then(<[u8]>::first_chunk) {
        return parse_head(head, rx.available());
    }
    let available = rx.available();
    let mut head = [0; HEAD_LEN];
    if available >= HEAD_LEN {
        rx.peek(0, &mut head);
    } else if available >= LEN_FIELD {
        rx.peek(0, &mut head[..available]);
    } else {
        return None;
    }
    parse_head(&head, available)
}

/// Returns the FPDU with this head, if it is complete within the `available` octets.
#[inline]
fn parse_head(head: &[u8; HEAD_LEN], available: usize) -> Option<FpduInfo> {
    let [high, low, hdr @ ..] = *head;
    let ulpdu_len = u16::from_be_bytes([high, low]);
    let wire_len = wire_len(ulpdu_len);
    (wire_len <= available).then_some(FpduInfo {
        ulpdu_len,
        wire_len,
        stream_len: wire_len,
        hdr,
    })
}

/// Returns whether the CRC of the FPDU at the start of the stream is correct (RFC 5044 section 4.4).
#[inline]
pub(crate) fn is_stream_crc_right(rx: &impl RxStream, wire_len: usize) -> bool {
    let mut crc = 0;
    rx.for_each_slice(0, wire_len, |slice| crc = crc::crc32c_append(crc, slice));
    crc == RESIDUE
}

/// Variant of [`is_stream_crc_right`] for an FPDU in one piece.
#[inline]
pub(crate) fn is_crc_right(fpdu: &[u8]) -> bool {
    crc::crc32c(fpdu) == RESIDUE
}

/// Encodes a whole FPDU in one piece, for the rare messages that are not built from records.
pub fn encode_fpdu(parts: &[&[u8]], with_crc: bool) -> Box<[u8]> {
    encode_fpdu_at(parts, with_crc, MarkerPosition::NO_MARKERS)
}

/// Variant of [`encode_fpdu`] for a position in a stream that may carry markers.
pub fn encode_fpdu_at(
    parts: &[&[u8]],
    with_crc: bool,
    marker_position: MarkerPosition,
) -> Box<[u8]> {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    let ulpdu_len = u16::try_from(len).unwrap_or(u16::MAX);
    let mut out = Vec::with_capacity(wire_len(ulpdu_len));
    out.extend_from_slice(&ulpdu_len.to_be_bytes());
    for part in parts {
        out.extend_from_slice(part);
    }
    out.resize(out.len() + pad_len(ulpdu_len), 0);
    if marker_position.has_markers() {
        out = marker::insert_markers(&out, marker_position);
    }
    let crc = if with_crc { crc::crc32c(&out) } else { 0 };
    out.extend_from_slice(&crc.to_le_bytes());
    out.into_boxed_slice()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::ByteStream;

    /// RFC 3720 appendix B.4, which RFC 5044 section 4.4 refers to: 32 octets of zeroes give aa 36 91
    /// 8a on the wire.
    #[test]
    fn crc_is_crc32c_least_significant_octet_first() {
        assert_eq!(
            crc::crc32c(&[0; 32]).to_le_bytes(),
            [0xaa, 0x36, 0x91, 0x8a]
        );
        let fpdu = encode_fpdu(&[&[0x41, 0x43], &[0; 40]], true);
        assert_eq!((fpdu.len(), &fpdu[..2]), (48, &[0, 0x2a][..]));
        assert_eq!(fpdu[44..], crc32c::crc32c(&fpdu[..44]).to_le_bytes());
        assert_eq!(
            encode_fpdu(&[&[0; 42]], false)[44..],
            [0; 4],
            "zero when off"
        );
    }

    #[test]
    fn pad_brings_fpdus_to_a_multiple_of_four() {
        for (ulpdu, pad) in [(0, 2), (1, 1), (2, 0), (3, 3), (1442, 0), (1443, 3)] {
            assert_eq!(pad_len(ulpdu), pad);
            assert_eq!(wire_len(ulpdu) % 4, 0);
        }
        for at in (0..512).step_by(4) {
            let len = MarkerPosition::START
                .advanced_by(at)
                .marked_len(wire_len(u16::MAX));
            assert!(len <= MAX_FPDU && len + 8 > MAX_FPDU);
        }
    }

    /// RFC 5044 section 4.5; EMSS 1448 gives 1442 [seen on the wire from siw].
    #[test]
    fn mulpdu_fills_a_segment_and_never_exceeds_it() {
        assert_eq!(mulpdu_for_emss(1448), 1442);
        assert_eq!(mulpdu_for_emss(1460), 1454);
        assert_eq!(mulpdu_for_emss(8948), 8942);
        for emss in 140..9100 {
            let len = wire_len(mulpdu_for_emss(emss));
            assert!(
                len <= emss as usize && len + 4 > emss as usize,
                "{emss}: {len}"
            );
        }
        assert_eq!(mulpdu_for_emss(100), 128);
        assert_eq!(mulpdu_for_emss(70_000), 64768);
    }

    /// Conformance 34, 35.
    #[test]
    fn c34_c35_fpdu_is_found_when_all_of_it_is_there() {
        let fpdu = encode_fpdu(&[&[7; 21]], true);
        let mut stream = ByteStream::new();
        for octet in &fpdu[..fpdu.len() - 1] {
            assert_eq!(peek_fpdu(&stream), None);
            stream.push(&[*octet]);
        }
        stream.push(&fpdu[fpdu.len() - 1..]);
        stream.push(&[0, 9]);
        let info = peek_fpdu(&stream).expect("complete");
        assert_eq!((info.ulpdu_len, info.wire_len), (21, fpdu.len()));
        assert!(is_stream_crc_right(&stream, info.wire_len));
    }

    /// Conformance 27, 29: the CRC covers the pad octets, whatever their value.
    #[test]
    fn c27_every_flipped_bit_breaks_the_crc() {
        let fpdu = encode_fpdu(&[&[7; 21]], true);
        for i in LEN_FIELD * 8..fpdu.len() * 8 {
            let mut damaged = fpdu.to_vec();
            damaged[i / 8] ^= 1 << (i % 8);
            let stream = ByteStream::from(&damaged[..]);
            let info = peek_fpdu(&stream).expect("complete");
            assert!(!is_stream_crc_right(&stream, info.wire_len), "bit {i}");
        }
    }
}
