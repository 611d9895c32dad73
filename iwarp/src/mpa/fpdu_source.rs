//! Streams that yield whole FPDUs, either plain or with markers hidden.

use super::fpdu::{self, FpduInfo, LEN_FIELD};
use super::marker::{INTERVAL, MARKER_LEN, MarkerGaps, MarkerPosition, decode_marker};
use crate::ddp::MAX_HDR_LEN;
use crate::rdmap::terminate::TerminateCode;
use crate::stream::RxStream;
use siw_memory::RegisteredMemory;

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
        fpdu::peek_fpdu(self.0)
    }

    #[inline]
    fn verify(&self, fpdu: &FpduInfo, crc: bool) -> Result<(), TerminateCode> {
        if !crc {
            return Ok(());
        }
        let is_right = match self.0.contiguous(0, fpdu.wire_len) {
            Some(octets) => fpdu::is_crc_right(octets),
            None => fpdu::is_stream_crc_right(self.0, fpdu.wire_len),
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
        const HEAD_LEN: usize = LEN_FIELD + MAX_HDR_LEN;
        let until_marker = self.marker_position.until_marker();
        // A marker seldom falls into a header.
        let mut head = [0; HEAD_LEN];
        match self.rx.contiguous(self.leading_marker_len(), HEAD_LEN) {
            Some(slice) if until_marker == 0 || until_marker >= HEAD_LEN => {
                head.copy_from_slice(slice);
            }
            _ => {
                let mut info = fpdu::peek_fpdu(self)?;
                info.stream_len = self.marker_position.marked_len(info.wire_len);
                return Some(info);
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
            if crc && !fpdu::is_crc_right(octets) {
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
        if crc && !fpdu::is_stream_crc_right(self.rx, stream_len) {
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
    use crate::mpa::marker::insert_markers;
    use crate::stream::ByteStream;

    #[test]
    fn data_is_read_around_markers_in_any_chunks() {
        let data: Vec<u8> = (0..3000u32).map(|i| i as u8).collect();
        for start in [0u16, 4, 256, 504, 508] {
            let wire = insert_markers(&data, MarkerPosition::START.advanced_by(usize::from(start)));
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
