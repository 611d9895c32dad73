//! MPA markers (RFC 5044 section 4.3): four octets at every multiple of 512 octets of the stream,
//! counted from the first octet after the MPA frames, each of which tells how far back its FPDU
//! starts.
//!
//! The receiver reads through [`Unmarked`], which hides them; the sender puts them in while it
//! builds. A marker belongs to the FPDU whose next octet follows it: one that falls between two
//! FPDUs counts, with pointer zero, into the CRC of the second, one behind the pad into the CRC of
//! the first.

use crate::ddp::MAX_HDR_LEN;
use crate::mpa::fpdu::{self, Frame, LEN_FIELD};
use crate::rdmap::terminate::TerminateCode;
use crate::stream::RxStream;
use siw_memory::RegisteredMemory;
use siw_memory::gap_copy::{GAP_LEN, Gaps};

/// Distance of markers.
pub const INTERVAL: usize = 512;
/// A marker: 16 reserved bits, 16 bits FPDUPTR.
pub const MARKER_LEN: usize = GAP_LEN;
/// Octets between two markers.
pub const DATA_LEN: usize = INTERVAL - MARKER_LEN;

/// The markers of a stretch of stream, as the memory's copy routines see them.
pub(crate) type MarkerGaps = Gaps<INTERVAL>;

/// Octets of stream that `len` octets take together with the markers before and between them, when
/// `until_marker` octets lie in front of the first marker.
#[inline]
pub(crate) fn marked_len(until_marker: usize, len: usize) -> usize {
    if len <= until_marker {
        len
    } else {
        len + MARKER_LEN * (1 + (len - until_marker - 1) / DATA_LEN)
    }
}

/// How many of `marked_len` octets of stream are not of markers: the most of which [`marked_len`]
/// does not exceed that.
#[inline]
pub(crate) fn unmarked_len(until_marker: usize, marked_len: usize) -> usize {
    match marked_len.checked_sub(until_marker) {
        None => marked_len,
        Some(rest) => {
            let last = (rest % INTERVAL).saturating_sub(MARKER_LEN);
            until_marker + rest / INTERVAL * DATA_LEN + last
        }
    }
}

/// Where the markers of a piece of payload stand, and what they say.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MarkerLayout {
    /// Octets of payload in front of the first marker, at most [`DATA_LEN`].
    pub until_marker: usize,
    /// Octets from the start of the FPDU to the start of this piece: what the FPDUPTR of a marker
    /// there would be.
    pub fpdu_offset: usize,
}

impl MarkerLayout {
    /// Octets that `len` octets of payload take together with the markers before and between them.
    #[inline]
    pub fn marked_len(self, len: usize) -> usize {
        marked_len(self.until_marker, len)
    }

    /// Octets of payload that fit, with their markers, in `marked_len` octets.
    #[inline]
    pub fn payload_len(self, marked_len: usize) -> usize {
        unmarked_len(self.until_marker, marked_len)
    }

    /// Octets of payload between `len` of them, which take `marked_len` with their markers, and the
    /// next marker.
    #[inline]
    pub fn until_marker_after(self, len: usize, marked_len: usize) -> usize {
        let markers = (marked_len - len) / MARKER_LEN;
        self.until_marker + markers * DATA_LEN - len
    }

    /// The same places as the memory's copy routines take them.
    #[inline]
    pub fn gaps(self) -> MarkerGaps {
        MarkerGaps {
            first: self.until_marker,
        }
    }

    /// The marker that stands `offset` octets behind the start of this piece.
    #[inline]
    pub fn marker_at(self, offset: usize) -> [u8; MARKER_LEN] {
        encode_marker(self.fpdu_offset + offset)
    }
}

/// Where in the marker grid the next octet of a stream lies, or that the stream has no markers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MarkerPosition(u16);

impl MarkerPosition {
    /// The stream carries no markers.
    pub const NO_MARKERS: MarkerPosition = MarkerPosition(u16::MAX);
    /// A marker comes next: the start of every stream that has them.
    pub const START: MarkerPosition = MarkerPosition(0);

    /// The start of a stream with or without markers.
    #[inline]
    pub fn start(markers: bool) -> Self {
        if markers {
            Self::START
        } else {
            Self::NO_MARKERS
        }
    }

    /// The stream carries markers.
    #[inline]
    pub fn has_markers(self) -> bool {
        self != Self::NO_MARKERS
    }

    /// Octets from here to the next marker.
    #[inline]
    pub fn until_marker(self) -> usize {
        (INTERVAL - usize::from(self.0) % INTERVAL) % INTERVAL
    }

    /// The marker_position `n` octets of stream (markers included) further.
    #[inline]
    pub fn advanced_by(self, n: usize) -> Self {
        if self.has_markers() {
            MarkerPosition(((usize::from(self.0) + n) % INTERVAL) as u16)
        } else {
            self
        }
    }

    /// Octets of stream that `n` octets and the markers before and between them take.
    #[inline]
    pub fn marked_len(self, n: usize) -> usize {
        if self.has_markers() {
            marked_len(self.until_marker(), n)
        } else {
            n
        }
    }

    /// How many of `n` octets of stream are not of markers.
    #[inline]
    fn unmarked_len(self, n: usize) -> usize {
        unmarked_len(self.until_marker(), n)
    }

    /// Where the octet number `n` that is not of a marker lies in the stream.
    #[inline]
    fn offset_of(self, n: usize) -> usize {
        // Headers and what follows them are seldom behind the second marker.
        let before = self.until_marker();
        if n < before {
            n
        } else if n - before < DATA_LEN {
            n + MARKER_LEN
        } else {
            self.marked_len(n + 1) - 1
        }
    }
}

/// MULPDU of a stream with markers: room for as many as a segment can meet (RFC 5044 section 4.5).
#[inline]
pub fn mulpdu_for_emss(emss: u32) -> u16 {
    let markers = MARKER_LEN as u32 * emss.div_ceil(INTERVAL as u32);
    emss.saturating_sub(6 + markers + emss % 4)
        .clamp(128, 64768) as u16
}

/// The marker that stands `back` octets behind the start of its FPDU's length field.
#[inline]
pub fn encode_marker(back: usize) -> [u8; MARKER_LEN] {
    let p = (back as u16).to_be_bytes();
    [0, 0, p[0], p[1]]
}

/// A stream out of which whole FPDUs are taken; markers, if any, are invisible in it.
pub(crate) trait FpduSource: RxStream {
    /// The FPDU at the start; `None` until all of it is there.
    fn next_fpdu(&self) -> Option<Frame>;

    /// CRC and markers of the FPDU at the start.
    fn verify(&self, f: &Frame, crc: bool) -> Result<(), TerminateCode>;

    /// Consumes it.
    fn take(&mut self, f: &Frame);
}

/// A stream without markers.
pub(crate) struct Plain<'a, R>(pub &'a mut R);

impl<R: RxStream> RxStream for Plain<'_, R> {
    #[inline]
    fn available(&self) -> usize {
        self.0.available()
    }
    #[inline]
    fn peek(&self, off: usize, out: &mut [u8]) {
        self.0.peek(off, out);
    }
    #[inline]
    fn for_each_slice(&self, off: usize, len: usize, f: impl FnMut(&[u8])) {
        self.0.for_each_slice(off, len, f);
    }
    #[inline]
    fn contiguous(&self, off: usize, len: usize) -> Option<&[u8]> {
        self.0.contiguous(off, len)
    }
    #[inline]
    fn copy_to_memory(
        &self,
        off: usize,
        len: usize,
        mr: &RegisteredMemory,
        region_off: u64,
    ) -> bool {
        self.0.copy_to_memory(off, len, mr, region_off)
    }
    #[inline]
    fn consume(&mut self, n: usize) {
        self.0.consume(n);
    }
}

impl<R: RxStream> FpduSource for Plain<'_, R> {
    #[inline]
    fn next_fpdu(&self) -> Option<Frame> {
        fpdu::next(self.0)
    }

    #[inline]
    fn verify(&self, f: &Frame, crc: bool) -> Result<(), TerminateCode> {
        if crc && !fpdu::crc_ok(self.0, f.wire_len) {
            return Err(TerminateCode::MPA_CRC);
        }
        Ok(())
    }

    #[inline]
    fn take(&mut self, f: &Frame) {
        self.0.consume(f.stream_len);
    }
}

/// A stream with markers, seen without them.
pub(crate) struct Unmarked<'a, R> {
    rx: &'a mut R,
    /// Of the first octet that is not consumed.
    pub marker_position: MarkerPosition,
}

impl<'a, R: RxStream> Unmarked<'a, R> {
    pub fn new(rx: &'a mut R, marker_position: MarkerPosition) -> Self {
        Self {
            rx,
            marker_position,
        }
    }
}

impl<R: RxStream> RxStream for Unmarked<'_, R> {
    #[inline]
    fn available(&self) -> usize {
        self.marker_position.unmarked_len(self.rx.available())
    }

    #[inline]
    fn peek(&self, off: usize, out: &mut [u8]) {
        // A header is seldom cut by a marker.
        let start = self.marker_position.offset_of(off);
        if self.marker_position.advanced_by(start).until_marker() >= out.len() {
            return self.rx.peek(start, out);
        }
        let mut at = 0;
        self.for_each_slice(off, out.len(), |s| {
            if let Some(o) = out.get_mut(at..at + s.len()) {
                o.copy_from_slice(s);
            }
            at += s.len();
        });
    }

    #[inline]
    fn for_each_slice(&self, off: usize, len: usize, mut f: impl FnMut(&[u8])) {
        let (mut at, mut left) = (self.marker_position.offset_of(off), len);
        while left > 0 {
            // `at` is never that of a marker, so there is something before the next one.
            let n = match self.marker_position.advanced_by(at).until_marker() {
                0 => return,
                n => n.min(left),
            };
            self.rx.for_each_slice(at, n, &mut f);
            left -= n;
            at += n + MARKER_LEN;
        }
    }

    #[inline]
    fn copy_to_memory(
        &self,
        off: usize,
        len: usize,
        mr: &RegisteredMemory,
        mut region_off: u64,
    ) -> bool {
        let at = self.marker_position.offset_of(off);
        let marker_position = self.marker_position.advanced_by(at);
        if let Some(s) = self.rx.contiguous(at, marker_position.marked_len(len)) {
            let gaps = MarkerGaps {
                first: marker_position.until_marker(),
            };
            if mr.write_without_gaps_at(region_off, len, s, gaps) {
                return true;
            }
        }
        let mut ok = true;
        self.for_each_slice(off, len, |s| {
            ok &= mr.write_at(region_off, s).is_ok();
            region_off += s.len() as u64;
        });
        ok
    }

    #[inline]
    fn consume(&mut self, n: usize) {
        let n = self.marker_position.marked_len(n);
        self.rx.consume(n);
        self.marker_position = self.marker_position.advanced_by(n);
    }
}

impl<R: RxStream> FpduSource for Unmarked<'_, R> {
    #[inline]
    fn next_fpdu(&self) -> Option<Frame> {
        const HEAD: usize = LEN_FIELD + MAX_HDR_LEN;
        let first = self.marker_position.until_marker();
        let start = if first == 0 { MARKER_LEN } else { 0 };
        // A header is seldom cut by a marker.
        let mut head = [0; HEAD];
        match self.rx.contiguous(start, HEAD) {
            Some(h) if first == 0 || first >= HEAD => head.copy_from_slice(h),
            _ => {
                let mut f = fpdu::next(self)?;
                f.stream_len = self.marker_position.marked_len(f.wire_len);
                return Some(f);
            }
        }
        let ulpdu_len = u16::from_be_bytes([head[0], head[1]]);
        let wire_len = fpdu::wire_len(ulpdu_len);
        let stream_len = self.marker_position.marked_len(wire_len);
        if self.rx.available() < stream_len {
            return None;
        }
        let mut hdr = [0; MAX_HDR_LEN];
        hdr.copy_from_slice(&head[LEN_FIELD..]);
        Some(Frame {
            ulpdu_len,
            wire_len,
            stream_len,
            hdr,
        })
    }

    #[inline]
    fn verify(&self, f: &Frame, crc: bool) -> Result<(), TerminateCode> {
        let total = f.stream_len;
        let first = self.marker_position.until_marker();
        // A marker in front of the length field does not shift what the others count from.
        let start = if first == 0 { MARKER_LEN } else { 0 };
        let right = |at: usize, m: [u8; MARKER_LEN]| {
            // Reserved bits and the two lowest of the pointer do not matter (conformance 32, 33).
            let back = usize::from(u16::from_be_bytes([m[2], m[3]]) & !3);
            back == at.saturating_sub(start)
        };
        let mut at = first;
        if let Some(s) = self.rx.contiguous(0, total) {
            if crc && !fpdu::crc_is_right(s) {
                return Err(TerminateCode::MPA_CRC);
            }
            while let Some(m) = s.get(at..).and_then(|m| m.first_chunk()) {
                if !right(at, *m) {
                    return Err(TerminateCode::MPA_LENGTH);
                }
                at += INTERVAL;
            }
            return Ok(());
        }
        if crc && !fpdu::crc_ok(self.rx, total) {
            return Err(TerminateCode::MPA_CRC);
        }
        while at < total {
            let mut m = [0; MARKER_LEN];
            self.rx.peek(at, &mut m);
            if !right(at, m) {
                return Err(TerminateCode::MPA_LENGTH);
            }
            at += INTERVAL;
        }
        Ok(())
    }

    #[inline]
    fn take(&mut self, f: &Frame) {
        self.rx.consume(f.stream_len);
        self.marker_position = self.marker_position.advanced_by(f.stream_len);
    }
}

/// Puts markers into octets as they go to the wire. For FPDUs in one piece; the fast path has its
/// own in the builder.
pub fn insert_markers(fpdu_without_crc: &[u8], marker_position: MarkerPosition) -> Vec<u8> {
    let mut out =
        Vec::with_capacity(marker_position.marked_len(fpdu_without_crc.len()) + MARKER_LEN);
    let mut start = 0;
    let mut rest = fpdu_without_crc;
    loop {
        if marker_position.has_markers()
            && marker_position.advanced_by(out.len()).until_marker() == 0
        {
            out.extend_from_slice(&encode_marker(out.len() - start));
            if start == 0 && rest.len() == fpdu_without_crc.len() {
                start = MARKER_LEN;
            }
        }
        if rest.is_empty() {
            return out;
        }
        let n = match marker_position.has_markers() {
            true => marker_position
                .advanced_by(out.len())
                .until_marker()
                .min(rest.len()),
            false => rest.len(),
        };
        out.extend_from_slice(&rest[..n]);
        rest = &rest[n..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::ByteStream;

    #[test]
    fn positions_agree_with_a_stream_counted_octet_by_octet() {
        for start in (0..512).step_by(4) {
            let marker_position = MarkerPosition(start);
            let marker = |at: usize| (usize::from(start) + at) % 512 < 4;
            // A stream never begins inside of a marker.
            let mut data = 0;
            for at in 0..2000 {
                assert_eq!(
                    marker_position.unmarked_len(at),
                    data,
                    "marker_position {start} at {at}"
                );
                if !marker(at) {
                    assert_eq!(marker_position.offset_of(data), at);
                    data += 1;
                    assert_eq!(marker_position.marked_len(data), at + 1);
                }
            }
        }
        assert_eq!(MarkerPosition::NO_MARKERS.marked_len(5000), 5000);
    }

    #[test]
    fn layout_gives_the_most_payload_that_fits() {
        for until_marker in [0, 1, 2, 3, 60, 100, 200, 444, 507, 508] {
            let layout = MarkerLayout {
                until_marker,
                fpdu_offset: 16,
            };
            for room in 0..2600 {
                let n = layout.payload_len(room);
                assert!(layout.marked_len(n) <= room && layout.marked_len(n + 1) > room);
            }
            let (mut marked_len, mut until) = (0, until_marker);
            for len in 1..3000 {
                if until == 0 {
                    marked_len += MARKER_LEN;
                    until = DATA_LEN;
                }
                marked_len += 1;
                until -= 1;
                assert_eq!(layout.marked_len(len), marked_len);
                assert_eq!(layout.payload_len(marked_len), len);
                assert_eq!(layout.until_marker_after(len, marked_len), until);
            }
        }
    }

    /// RFC 5044 section 4.5.
    #[test]
    fn mulpdu_leaves_room_for_every_marker_a_segment_can_meet() {
        assert_eq!(mulpdu_for_emss(1448), 1448 - (6 + 12));
        for emss in 160..9100 {
            let n = usize::from(mulpdu_for_emss(emss));
            for start in (0..512).step_by(4) {
                let len = MarkerPosition(start).marked_len(fpdu::wire_len(n as u16));
                assert!(len <= emss as usize, "{emss} at {start}: {len}");
            }
        }
    }

    /// RFC 5044 figures 5 and 6: the first FPDU of a stream behind its marker, and the second, of the
    /// next message, with a marker 20 octets into it.
    #[test]
    fn the_crc_covers_markers_as_in_the_examples_of_the_rfc() {
        let mut f = vec![0; 44];
        f[1] = 0x2a;
        f[2..4].copy_from_slice(&[0x41, 0x43]);
        f[15] = 1;
        let crc = |b: &[u8]| siw_memory::crc::crc32c(b).to_le_bytes();
        let m = insert_markers(&f, MarkerPosition::START);
        assert_eq!((m.len(), &m[..4]), (48, &[0; 4][..]));
        assert_eq!(crc(&m), [0x52, 0x23, 0x99, 0x83]);
        f[15] = 2;
        let m = insert_markers(&f, MarkerPosition(512 - 20));
        assert_eq!((m.len(), &m[20..24]), (48, &[0, 0, 0, 20][..]));
        assert_eq!(crc(&m), [0x84, 0x92, 0x58, 0x98]);
    }

    #[test]
    fn a_marker_between_fpdus_has_pointer_zero_and_one_behind_the_pad_is_in_the_crc() {
        let f = [7; 44];
        let front = insert_markers(&f, MarkerPosition::START);
        assert_eq!((front.len(), &front[..4]), (48, &[0; 4][..]));
        let behind = insert_markers(&f, MarkerPosition(512 - 44));
        assert_eq!((behind.len(), &behind[44..]), (48, &[0, 0, 0, 44][..]));
        let after = insert_markers(&f, MarkerPosition(512 - 48));
        assert_eq!(
            after.len(),
            44,
            "a marker behind the CRC is of the next FPDU"
        );
    }

    #[test]
    fn data_is_read_around_markers_whatever_the_chunks() {
        let data: Vec<u8> = (0..3000u32).map(|i| i as u8).collect();
        for start in [0u16, 4, 256, 504, 508] {
            let wire = insert_markers(&data, MarkerPosition(start));
            for chunk in [1, 3, 511, 4096] {
                let mut s = ByteStream::new();
                for c in wire.chunks(chunk) {
                    s.push(c);
                }
                let mut u = Unmarked::new(&mut s, MarkerPosition(start));
                assert_eq!(u.available(), data.len());
                for (off, len) in [(0, 3000), (0, 20), (507, 3), (1000, 1999), (2999, 1)] {
                    let mut b = vec![0; len];
                    u.peek(off, &mut b);
                    assert!(b == data[off..off + len], "{start} {chunk} {off} {len}");
                }
                u.consume(1000);
                let mut b = [0; 8];
                u.peek(0, &mut b);
                assert_eq!(b, data[1000..1008]);
            }
        }
    }
}
