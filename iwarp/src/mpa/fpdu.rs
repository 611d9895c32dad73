//! FPDU framing (RFC 5044 section 4): length, pad, CRC and maximum ULPDU size.
//!
//! The sender uses it to size FPDUs and to append pad and CRC. The receiver finds and verifies FPDUs in
//! the stream through an `FpduSource`, which hides markers. Other lengths here exclude markers;
//! [`crate::mpa::marker`] adds them.

use crate::ddp::MAX_HDR_LEN;
use crate::mpa::marker::{
    self, INTERVAL, MARKER_LEN, MAX_MULPDU, MIN_MULPDU, MarkerGaps, MarkerPosition, decode_marker,
};
use crate::rdmap::terminate::TerminateCode;
use crate::stream::RxStream;
use siw_memory::{RegisteredMemory, crc};

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
    emss.saturating_sub(6 + emss % 4)
        .clamp(MIN_MULPDU, MAX_MULPDU) as u16
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
    rx.for_each_slice(0, wire_len, |slice| {
        crc = crc::crc32c_append(crc, slice);
    });
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

/// A stream that yields whole FPDUs; its markers, if any, are invisible.
pub(crate) trait FpduSource: RxStream {
    /// Returns the FPDU at the start; `None` until it is complete.
    fn next_fpdu(&self) -> Option<FpduInfo>;

    /// Checks CRC and markers of the FPDU at the start.
    fn verify(&self, fpdu: &FpduInfo, crc: bool) -> Result<(), TerminateCode>;

    /// Consumes the FPDU at the start.
    fn take(&mut self, fpdu: &FpduInfo);
}

/// A stream without markers.
pub(crate) struct PlainStream<'a, R>(pub &'a mut R);

impl<R: RxStream> RxStream for PlainStream<'_, R> {
    #[inline]
    fn available(&self) -> usize {
        self.0.available()
    }
    #[inline]
    fn peek(&self, offset: usize, out: &mut [u8]) {
        self.0.peek(offset, out);
    }
    #[inline]
    fn for_each_slice(&self, offset: usize, len: usize, visit: impl FnMut(&[u8])) {
        self.0.for_each_slice(offset, len, visit);
    }
    #[inline]
    fn contiguous(&self, offset: usize, len: usize) -> Option<&[u8]> {
        self.0.contiguous(offset, len)
    }
    #[inline]
    fn copy_to_memory(
        &self,
        offset: usize,
        len: usize,
        mr: &RegisteredMemory,
        region_off: u64,
    ) -> bool {
        self.0.copy_to_memory(offset, len, mr, region_off)
    }
    #[inline]
    fn consume(&mut self, len: usize) {
        self.0.consume(len);
    }
}

impl<R: RxStream> FpduSource for PlainStream<'_, R> {
    #[inline]
    fn next_fpdu(&self) -> Option<FpduInfo> {
        peek_fpdu(self.0)
    }

    #[inline]
    fn verify(&self, fpdu: &FpduInfo, crc: bool) -> Result<(), TerminateCode> {
        if !crc {
            return Ok(());
        }
        let is_right = match self.0.contiguous(0, fpdu.wire_len) {
            Some(octets) => is_crc_right(octets),
            None => is_stream_crc_right(self.0, fpdu.wire_len),
        };
        is_right.then_some(()).ok_or(TerminateCode::MPA_CRC)
    }

    #[inline]
    fn take(&mut self, fpdu: &FpduInfo) {
        self.0.consume(fpdu.stream_len);
    }
}

/// A stream with markers, presented without them.
pub(crate) struct UnmarkedStream<'a, R> {
    rx: &'a mut R,
    /// Position of the first unconsumed octet.
    pub marker_position: MarkerPosition,
}

impl<'a, R: RxStream> UnmarkedStream<'a, R> {
    /// `marker_position`: position of the first octet of `rx`.
    pub fn new(rx: &'a mut R, marker_position: MarkerPosition) -> Self {
        Self {
            rx,
            marker_position,
        }
    }

    /// Octets of a marker in front of the length field of the next FPDU; the FPDUPTR of later markers
    /// does not count them.
    #[inline]
    fn leading_marker_len(&self) -> usize {
        if self.marker_position.until_marker() == 0 {
            MARKER_LEN
        } else {
            0
        }
    }
}

impl<R: RxStream> RxStream for UnmarkedStream<'_, R> {
    #[inline]
    fn available(&self) -> usize {
        self.marker_position.unmarked_len(self.rx.available())
    }

    #[inline]
    fn peek(&self, offset: usize, out: &mut [u8]) {
        // A marker seldom falls into a header.
        let start = self.marker_position.stream_offset(offset);
        if self.marker_position.advanced_by(start).until_marker() >= out.len() {
            return self.rx.peek(start, out);
        }
        let mut at = 0;
        self.for_each_slice(offset, out.len(), |slice| {
            if let Some(part) = out.get_mut(at..at + slice.len()) {
                part.copy_from_slice(slice);
            }
            at += slice.len();
        });
    }

    #[inline]
    fn for_each_slice(&self, offset: usize, len: usize, mut visit: impl FnMut(&[u8])) {
        let (mut at, mut left) = (self.marker_position.stream_offset(offset), len);
        while left > 0 {
            // `at` is never inside a marker, so there are octets before the next one.
            let piece_len = match self.marker_position.advanced_by(at).until_marker() {
                0 => return,
                until_marker => until_marker.min(left),
            };
            self.rx.for_each_slice(at, piece_len, &mut visit);
            left -= piece_len;
            at += piece_len + MARKER_LEN;
        }
    }

    #[inline]
    fn copy_to_memory(
        &self,
        offset: usize,
        len: usize,
        mr: &RegisteredMemory,
        mut region_off: u64,
    ) -> bool {
        let start = self.marker_position.stream_offset(offset);
        let position = self.marker_position.advanced_by(start);
        if let Some(slice) = self.rx.contiguous(start, position.marked_len(len)) {
            let gaps = MarkerGaps {
                first: position.until_marker(),
            };
            if mr.write_without_gaps_at(region_off, len, slice, gaps) {
                return true;
            }
        }
        let mut is_written = true;
        self.for_each_slice(offset, len, |slice| {
            is_written &= mr.write_at(region_off, slice).is_ok();
            region_off += slice.len() as u64;
        });
        is_written
    }

    #[inline]
    fn consume(&mut self, len: usize) {
        let stream_len = self.marker_position.marked_len(len);
        self.rx.consume(stream_len);
        self.marker_position = self.marker_position.advanced_by(stream_len);
    }
}

impl<R: RxStream> FpduSource for UnmarkedStream<'_, R> {
    #[inline]
    fn next_fpdu(&self) -> Option<FpduInfo> {
        let until_marker = self.marker_position.until_marker();
        // A marker seldom falls into a header.
        let mut head = [0; HEAD_LEN];
        match self.rx.contiguous(self.leading_marker_len(), HEAD_LEN) {
            Some(slice) if until_marker == 0 || until_marker >= HEAD_LEN => {
                head.copy_from_slice(slice);
            }
            _ => {
                let mut info = peek_fpdu(self)?;
                info.stream_len = self.marker_position.marked_len(info.wire_len);
                return Some(info);
            }
        }
        let ulpdu_len = u16::from_be_bytes([head[0], head[1]]);
        let wire_len = wire_len(ulpdu_len);
        let stream_len = self.marker_position.marked_len(wire_len);
        if self.rx.available() < stream_len {
            return None;
        }
        let mut hdr = [0; MAX_HDR_LEN];
        hdr.copy_from_slice(&head[LEN_FIELD..]);
        Some(FpduInfo {
            ulpdu_len,
            wire_len,
            stream_len,
            hdr,
        })
    }

    #[inline]
    fn verify(&self, fpdu: &FpduInfo, crc: bool) -> Result<(), TerminateCode> {
        let stream_len = fpdu.stream_len;
        let fpdu_start = self.leading_marker_len();
        let is_right = |at: usize, marker: [u8; MARKER_LEN]| {
            decode_marker(marker) == at.saturating_sub(fpdu_start)
        };
        let mut at = self.marker_position.until_marker();
        if let Some(octets) = self.rx.contiguous(0, stream_len) {
            if crc && !is_crc_right(octets) {
                return Err(TerminateCode::MPA_CRC);
            }
            while let Some(marker) = octets.get(at..).and_then(|rest| rest.first_chunk()) {
                if !is_right(at, *marker) {
                    return Err(TerminateCode::MPA_LENGTH);
                }
                at += INTERVAL;
            }
            return Ok(());
        }
        if crc && !is_stream_crc_right(self.rx, stream_len) {
            return Err(TerminateCode::MPA_CRC);
        }
        while at < stream_len {
            let mut marker = [0; MARKER_LEN];
            self.rx.peek(at, &mut marker);
            if !is_right(at, marker) {
                return Err(TerminateCode::MPA_LENGTH);
            }
            at += INTERVAL;
        }
        Ok(())
    }

    #[inline]
    fn take(&mut self, fpdu: &FpduInfo) {
        self.rx.consume(fpdu.stream_len);
        self.marker_position = self.marker_position.advanced_by(fpdu.stream_len);
    }
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

    #[test]
    fn data_is_read_around_markers_in_any_chunks() {
        let data: Vec<u8> = (0..3000u32).map(|i| i as u8).collect();
        for start in [0u16, 4, 256, 504, 508] {
            let wire = marker::insert_markers(
                &data,
                MarkerPosition::START.advanced_by(usize::from(start)),
            );
            for chunk in [1, 3, 511, 4096] {
                let mut stream = ByteStream::new();
                for part in wire.chunks(chunk) {
                    stream.push(part);
                }
                let mut unmarked = UnmarkedStream::new(
                    &mut stream,
                    MarkerPosition::START.advanced_by(usize::from(start)),
                );
                assert_eq!(unmarked.available(), data.len());
                for (offset, len) in [(0, 3000), (0, 20), (507, 3), (1000, 1999), (2999, 1)] {
                    let mut read = vec![0; len];
                    unmarked.peek(offset, &mut read);
                    assert!(
                        read == data[offset..offset + len],
                        "{start} {chunk} {offset} {len}"
                    );
                }
                unmarked.consume(1000);
                let mut read = [0; 8];
                unmarked.peek(0, &mut read);
                assert_eq!(read, data[1000..1008]);
            }
        }
    }
}
