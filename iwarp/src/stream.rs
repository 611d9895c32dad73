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
/// [`available`](Self::available) is a bug of the caller: implementations may stop short, and must
/// not panic.
pub trait RxStream {
    /// Bytes that can be looked at.
    fn available(&self) -> usize;

    /// Copies `out.len()` bytes that start at `off`.
    fn peek(&self, off: usize, out: &mut [u8]);

    /// Hands the bytes of `off..off + len` to `f`, in order, in as many slices as the stream has.
    fn for_each_slice(&self, off: usize, len: usize, f: impl FnMut(&[u8]));

    /// The bytes of `off..off + len` when they lie in one piece and are quickly found, as nearly
    /// always; `None` makes the caller use [`for_each_slice`](Self::for_each_slice).
    fn contiguous(&self, _off: usize, _len: usize) -> Option<&[u8]> {
        None
    }

    /// Copies the bytes of `off..off + len` to a place of `mr` that [`Mr::check`] gave; `false`
    /// when they may not be written there.
    #[inline]
    fn copy_to_memory(
        &self,
        off: usize,
        len: usize,
        mr: &RegisteredMemory,
        region_off: u64,
    ) -> bool {
        let mut at = region_off;
        let mut ok = true;
        self.for_each_slice(off, len, |s| {
            ok &= mr.write_at(at, s).is_ok();
            at += s.len() as u64;
        });
        ok
    }

    /// Forgets the first `n` bytes; their buffers go back to the pool.
    fn consume(&mut self, n: usize);
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

    /// Everything that is left, in one piece.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut out = vec![0; self.len];
        self.peek(0, &mut out);
        out
    }
}

impl From<&[u8]> for ByteStream {
    fn from(bytes: &[u8]) -> Self {
        let mut s = Self::new();
        s.push(bytes);
        s
    }
}

impl RxStream for ByteStream {
    fn available(&self) -> usize {
        self.len
    }

    fn peek(&self, off: usize, out: &mut [u8]) {
        let mut at = 0;
        self.for_each_slice(off, out.len(), |s| {
            out[at..at + s.len()].copy_from_slice(s);
            at += s.len();
        });
    }

    fn for_each_slice(&self, off: usize, len: usize, mut f: impl FnMut(&[u8])) {
        let mut skip = self.head + off;
        let mut left = len;
        for c in &self.chunks {
            if left == 0 {
                return;
            }
            if skip >= c.len() {
                skip -= c.len();
                continue;
            }
            let n = left.min(c.len() - skip);
            f(&c[skip..skip + n]);
            left -= n;
            skip = 0;
        }
    }

    fn contiguous(&self, off: usize, len: usize) -> Option<&[u8]> {
        let at = self.head + off;
        self.chunks.front()?.get(at..at + len)
    }

    fn consume(&mut self, n: usize) {
        let n = n.min(self.len);
        self.len -= n;
        self.head += n;
        while let Some(c) = self.chunks.front() {
            if self.head < c.len() {
                break;
            }
            self.head -= c.len();
            self.chunks.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_stream_reads_across_its_chunks() {
        let mut s = ByteStream::new();
        s.push(&[1, 2, 3]);
        s.push(&[4]);
        s.push(&[5, 6]);
        let mut out = [0; 4];
        s.peek(1, &mut out);
        assert_eq!(out, [2, 3, 4, 5]);
        s.consume(4);
        assert_eq!(s.available(), 2);
        assert_eq!(s.to_vec(), [5, 6]);
        s.consume(9);
        assert_eq!(s.available(), 0);
    }
}
