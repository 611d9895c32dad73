//! The received byte stream as TCP holds it.
//!
//! The daemon implements [`RxStream`] over its TCP receive queue of owned buffers; tests use
//! [`ByteStream`]. MPA and the FPDU parser read through it, so that nothing is copied before it is
//! placed.

use siw_memory::RegisteredMemory;
use std::collections::VecDeque;

/// In-order stream bytes that the connection has not consumed yet.
///
/// Offsets count from the first unconsumed byte. A range that ends beyond
/// [`available`](Self::available) is a bug of the caller: implementations may stop short, but must
/// not panic.
pub trait RxStream {
    /// Number of bytes that can be read.
    fn available(&self) -> usize;

    /// Copies `out.len()` bytes starting at `offset`.
    fn peek(&self, offset: usize, out: &mut [u8]);

    /// Passes the bytes of `offset..offset + len` to `visit`, in order, one call per slice of the
    /// stream.
    fn for_each_slice(&self, offset: usize, len: usize, visit: impl FnMut(&[u8]));

    /// Returns the bytes of `offset..offset + len` if they are contiguous and quickly found, which is
    /// nearly always so. `None`: the caller uses [`for_each_slice`](Self::for_each_slice).
    fn contiguous(&self, _offset: usize, _len: usize) -> Option<&[u8]> {
        None
    }

    /// Returns the bytes of the first piece; empty if they are not quickly found.
    fn first_piece(&self) -> &[u8] {
        &[]
    }

    /// Prefetches the lines of the following pieces that are read first.
    #[inline]
    fn prefetch_next_pieces(&self) {}

    /// Copies the bytes of `offset..offset + len` to `region_off` of `mr`, an offset that
    /// [`RegisteredMemory::check_access`] returned. `false`: they may not be written there.
    #[inline]
    fn copy_to_memory(
        &self,
        offset: usize,
        len: usize,
        mr: &RegisteredMemory,
        region_off: u64,
    ) -> bool {
        if let Some(bytes) = self.contiguous(offset, len) {
            return mr.write_at(region_off, bytes).is_ok();
        }
        let mut at = region_off;
        let mut is_written = true;
        self.for_each_slice(offset, len, |slice| {
            is_written &= mr.write_at(at, slice).is_ok();
            at += slice.len() as u64;
        });
        is_written
    }

    /// Removes the first `len` bytes; their buffers go back to the pool.
    fn consume(&mut self, len: usize);
}

/// The first piece of a stream, as a stream of its own.
///
/// Why it is fast: reading the FPDUs of the piece needs no lookup in the queue of buffers.
pub(crate) struct StreamPiece<'a>(pub &'a [u8]);

impl RxStream for StreamPiece<'_> {
    #[inline]
    fn available(&self) -> usize {
        self.0.len()
    }

    #[inline]
    fn peek(&self, offset: usize, out: &mut [u8]) {
        if let Some(bytes) = self.contiguous(offset, out.len()) {
            out.copy_from_slice(bytes);
        }
    }

    #[inline]
    fn for_each_slice(&self, offset: usize, len: usize, mut visit: impl FnMut(&[u8])) {
        visit(self.contiguous(offset, len).unwrap_or(&[]));
    }

    #[inline]
    fn contiguous(&self, offset: usize, len: usize) -> Option<&[u8]> {
        self.0.get(offset..)?.get(..len)
    }

    #[inline]
    fn consume(&mut self, len: usize) {
        self.0 = self.0.get(len..).unwrap_or(&[]);
    }
}

/// The rest of a stream from an offset on, as a stream of its own. Consuming only moves the offset.
pub(crate) struct StreamTail<'a, R> {
    pub rx: &'a R,
    pub start: usize,
}

impl<R: RxStream> RxStream for StreamTail<'_, R> {
    fn available(&self) -> usize {
        self.rx.available().saturating_sub(self.start)
    }

    fn peek(&self, offset: usize, out: &mut [u8]) {
        self.rx.peek(self.start + offset, out);
    }

    fn for_each_slice(&self, offset: usize, len: usize, visit: impl FnMut(&[u8])) {
        self.rx.for_each_slice(self.start + offset, len, visit);
    }

    fn contiguous(&self, offset: usize, len: usize) -> Option<&[u8]> {
        self.rx.contiguous(self.start + offset, len)
    }

    fn consume(&mut self, len: usize) {
        self.start += len;
    }
}

/// A stream in plain memory, kept in the chunks in which it arrived.
#[derive(Debug, Default, Clone)]
pub struct ByteStream {
    chunks: VecDeque<Vec<u8>>,
    head: usize,
    len: usize,
}

impl ByteStream {
    /// An empty stream.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends one arrival.
    pub fn push(&mut self, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.len += bytes.len();
            self.chunks.push_back(bytes.to_vec());
        }
    }

    /// Copies all remaining bytes into one vector.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut out = vec![0; self.len];
        self.peek(0, &mut out);
        out
    }
}

impl From<&[u8]> for ByteStream {
    fn from(bytes: &[u8]) -> Self {
        let mut stream = Self::new();
        stream.push(bytes);
        stream
    }
}

impl RxStream for ByteStream {
    fn available(&self) -> usize {
        self.len
    }

    fn peek(&self, offset: usize, out: &mut [u8]) {
        let mut at = 0;
        self.for_each_slice(offset, out.len(), |slice| {
            out[at..at + slice.len()].copy_from_slice(slice);
            at += slice.len();
        });
    }

    fn for_each_slice(&self, offset: usize, len: usize, mut visit: impl FnMut(&[u8])) {
        let mut skip = self.head + offset;
        let mut left = len;
        for chunk in &self.chunks {
            if left == 0 {
                return;
            }
            if skip >= chunk.len() {
                skip -= chunk.len();
                continue;
            }
            let piece_len = left.min(chunk.len() - skip);
            visit(&chunk[skip..skip + piece_len]);
            left -= piece_len;
            skip = 0;
        }
    }

    fn contiguous(&self, offset: usize, len: usize) -> Option<&[u8]> {
        let at = self.head + offset;
        self.chunks.front()?.get(at..at + len)
    }

    fn first_piece(&self) -> &[u8] {
        let first = self.chunks.front();
        first
            .and_then(|chunk| chunk.get(self.head..))
            .unwrap_or(&[])
    }

    fn consume(&mut self, len: usize) {
        let len = len.min(self.len);
        self.len -= len;
        self.head += len;
        while let Some(chunk) = self.chunks.front() {
            if self.head < chunk.len() {
                break;
            }
            self.head -= chunk.len();
            self.chunks.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_stream_reads_across_its_chunks() {
        let mut stream = ByteStream::new();
        stream.push(&[1, 2, 3]);
        stream.push(&[4]);
        stream.push(&[5, 6]);
        let mut out = [0; 4];
        stream.peek(1, &mut out);
        assert_eq!(out, [2, 3, 4, 5]);
        stream.consume(4);
        assert_eq!(stream.available(), 2);
        assert_eq!(stream.to_vec(), [5, 6]);
        stream.consume(9);
        assert_eq!(stream.available(), 0);
    }
}
