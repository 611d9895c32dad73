//! Records with verifiable contents, and a sink that collects frames as a port would send them.

use std::collections::VecDeque;

use crate::base::frame_sink::{FrameMeta, FrameSink, PayloadPiece, TxChecksum};
use crate::wire::checksum::{self, OnesComplementSum};

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
        ((at ^ salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 51) as u8
    }
}

impl RecordBytes for Pattern {
    fn read(&self, offset: u32, len: u32, out: &mut Vec<u8>) {
        let from = self.start + u64::from(offset);
        out.extend((from..from + u64::from(len)).map(|at| Pattern::byte(self.salt, at)));
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
