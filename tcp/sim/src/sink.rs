//! Records with verifiable contents, and a sink that collects frames as a port would send them.

use std::collections::VecDeque;

use siw_net::{
    FrameMeta, FrameSink, PayloadPiece, TxChecksum,
    checksum::{self, OnesComplementSum},
};

/// A record that the simulated sink can read.
pub trait RecordBytes {
    /// Appends the bytes `[offset, offset + len)` of the record to `out`.
    fn read(&self, offset: u32, len: u32, out: &mut Vec<u8>);
}

impl RecordBytes for Vec<u8> {
    fn read(&self, offset: u32, len: u32, out: &mut Vec<u8>) {
        out.extend_from_slice(&self[offset as usize..(offset + len) as usize]);
    }
}

/// Part of an endless pattern, starting at a stream position: large transfers can be verified
/// without storing them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// Selects the pattern.
    pub salt: u64,
    /// Stream position of the record's first byte.
    pub start: u64,
}

impl Pattern {
    /// Returns the byte of the pattern at a stream position.
    pub fn byte(salt: u64, at: u64) -> u8 {
        Self::top_byte((at ^ salt).wrapping_mul(Self::FACTOR))
    }

    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

    fn top_byte(product: u64) -> u8 {
        (product >> 51) as u8
    }

    /// Writes the bytes of the pattern from the stream position `start` on. The products of eight
    /// positions differ by constants, so that one multiplication serves them all.
    fn fill(salt: u64, start: u64, out: &mut [u8]) {
        let head = (start.wrapping_neg() % 8).min(out.len() as u64);
        let (head, rest) = out.split_at_mut(head as usize);
        let (blocks, tail) = rest.as_chunks_mut::<8>();
        let mut at = start;
        for byte in head {
            *byte = Self::byte(salt, at);
            at += 1;
        }
        let steps: [u64; 8] =
            core::array::from_fn(|i| (i as u64 ^ salt & 7).wrapping_mul(Self::FACTOR));
        for block in blocks {
            let product = ((at ^ salt) & !7).wrapping_mul(Self::FACTOR);
            *block = steps.map(|step| Self::top_byte(product.wrapping_add(step)));
            at += 8;
        }
        for byte in tail {
            *byte = Self::byte(salt, at);
            at += 1;
        }
    }

    /// Returns the stream position of the first byte that differs from the pattern; `start` is that of
    /// the first byte.
    pub fn first_difference(salt: u64, start: u64, bytes: &[u8]) -> Option<u64> {
        let mut expected = [0; 256];
        let mut at = start;
        for part in bytes.chunks(expected.len()) {
            let expected = &mut expected[..part.len()];
            Self::fill(salt, at, expected);
            if *expected != *part {
                let first = part.iter().zip(expected).position(|(is, want)| is != want);
                return first.map(|first| at + first as u64);
            }
            at += part.len() as u64;
        }
        None
    }
}

impl RecordBytes for Pattern {
    fn read(&self, offset: u32, len: u32, out: &mut Vec<u8>) {
        let before = out.len();
        out.resize(before + len as usize, 0);
        let from = self.start + u64::from(offset);
        Self::fill(self.salt, from, &mut out[before..]);
    }
}

/// Appends the bytes of all pieces to a frame.
pub fn append_payload<'a, R: RecordBytes + 'a>(
    frame: &mut Vec<u8>,
    payload: impl IntoIterator<Item = PayloadPiece<'a, R>>,
) {
    for piece in payload {
        match piece {
            PayloadPiece::Bytes(bytes) => frame.extend_from_slice(bytes),
            PayloadPiece::Record {
                record,
                offset,
                len,
                ..
            } => record.read(offset, len, frame),
        }
    }
}

/// Collects whole frames and completes checksums in software.
#[derive(Default)]
pub struct VecSink {
    /// Complete frames not taken yet, oldest first.
    pub frames: VecDeque<(Vec<u8>, FrameMeta)>,
    /// Largest payload of a frame so far, in bytes.
    pub largest: u32,
    /// Number of frames that are still accepted; `None`: unlimited.
    pub space: Option<usize>,
    /// Super-segments do not leave, as on a port that segments them wrongly.
    pub loses_super_segments: bool,
}

impl VecSink {
    /// Performs TCP segmentation offload as a NIC does.
    fn segment(&mut self, frame: &[u8], meta: FrameMeta, headers: usize) {
        let (l2, l3) = (usize::from(meta.l2_len), usize::from(meta.l3_len));
        let (head, payload) = frame.split_at(headers);
        let size = usize::from(meta.tso_segsz);
        assert!(payload.len() > size, "a super-segment has several segments");
        let tcp = l2 + l3;
        let seq = u32::from_be_bytes([head[tcp + 4], head[tcp + 5], head[tcp + 6], head[tcp + 7]]);
        let count = payload.len().div_ceil(size);
        for (index, part) in payload.chunks(size).enumerate() {
            let mut segment = head.to_vec();
            let tcp_len = (headers - tcp + part.len()) as u16;
            if meta.ipv6 {
                segment[l2 + 4..l2 + 6].copy_from_slice(&tcp_len.to_be_bytes());
            } else {
                segment[l2 + 2..l2 + 4].copy_from_slice(&(tcp_len + 20).to_be_bytes());
                segment[l2 + 10..l2 + 12].fill(0);
                let mut sum = OnesComplementSum::new();
                sum.add(&segment[l2..tcp]);
                segment[l2 + 10..l2 + 12].copy_from_slice(&(!sum.value()).to_be_bytes());
            }
            segment[tcp + 4..tcp + 8]
                .copy_from_slice(&seq.wrapping_add((index * size) as u32).to_be_bytes());
            if index + 1 < count {
                segment[tcp + 13] &= !0x09; // FIN and PSH are kept in the last segment only
            }
            let mut length = OnesComplementSum::new();
            length.add(&segment[tcp + 16..tcp + 18]);
            length.add_word(tcp_len);
            segment[tcp + 16..tcp + 18].copy_from_slice(&length.value().to_be_bytes());
            let meta = FrameMeta {
                payload_len: part.len() as u32,
                tso_segsz: 0,
                ..meta
            };
            let mut sum = OnesComplementSum::new();
            sum.add(part);
            let done = checksum::complete_tcp_checksum(&segment, &meta, sum);
            segment[tcp + 16..tcp + 18].copy_from_slice(&done);
            segment.extend_from_slice(part);
            self.frames.push_back((segment, meta));
        }
    }
}

impl<R: RecordBytes> FrameSink<R> for VecSink {
    fn send_frame<'a>(
        &mut self,
        headers_len: usize,
        meta: &FrameMeta,
        fill: impl FnOnce(&mut [u8]),
        payload: impl IntoIterator<Item = PayloadPiece<'a, R>>,
    ) -> bool
    where
        R: 'a,
    {
        match &mut self.space {
            Some(0) => return false,
            Some(left) => *left -= 1,
            None => {}
        }
        let mut frame = vec![0; headers_len];
        fill(&mut frame);
        append_payload(&mut frame, payload);
        assert_eq!(
            frame.len(),
            headers_len + meta.payload_len as usize,
            "payload_len tells the truth"
        );
        self.largest = self.largest.max(meta.payload_len);
        if meta.tso_segsz > 0 {
            if !self.loses_super_segments {
                self.segment(&frame, *meta, headers_len);
            }
            return true;
        }
        // As a NIC or the sink of the daemon does.
        if meta.checksum != TxChecksum::Complete && meta.l4_len > 0 {
            let (headers, payload) = frame.split_at(headers_len);
            let mut sum = OnesComplementSum::new();
            sum.add(payload);
            let done = checksum::complete_tcp_checksum(headers, meta, sum);
            let at = checksum::tcp_checksum_offset(meta);
            frame[at..at + 2].copy_from_slice(&done);
        }
        self.frames.push_back((frame, *meta));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_the_same_by_byte_and_by_block() {
        for (salt, start) in [
            (0, 0),
            (5, 3),
            (u64::MAX - 6, 8),
            (0x1234_5677, (1 << 40) - 5),
        ] {
            for len in [0, 1, 5, 8, 20, 300] {
                let mut bytes = vec![7];
                let pattern = Pattern {
                    salt,
                    start: start - start % 3,
                };
                pattern.read((start % 3) as u32, len, &mut bytes);
                let mut bytes = bytes.split_off(1);
                assert_eq!(bytes.len(), len as usize);
                let is_right = |(&byte, at)| byte == Pattern::byte(salt, at);
                assert!(bytes.iter().zip(start..).all(is_right));
                assert_eq!(Pattern::first_difference(salt, start, &bytes), None);
                if let Some(last) = bytes.last_mut() {
                    *last ^= 1;
                    let at = start + u64::from(len) - 1;
                    assert_eq!(Pattern::first_difference(salt, start, &bytes), Some(at));
                }
            }
        }
    }
}
