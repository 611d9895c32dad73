//! In-order received bytes of a connection, in the owned buffers they arrived in. The upper layer
//! parses them in place and consumes.

use std::collections::VecDeque;

use crate::base::buffer::RecvBuf;

/// In-order received bytes of one connection, in owned buffers.
pub struct ReceiveQueue<B> {
    bufs: VecDeque<B>,
    /// At most the largest window, 1 GiB.
    bytes: u32,
    /// Buffers of this connection, held ones out of order included, that the stack's total counts.
    pub(crate) counted: u32,
}

impl<B: RecvBuf> ReceiveQueue<B> {
    pub(crate) fn new() -> Self {
        ReceiveQueue {
            bufs: VecDeque::new(),
            bytes: 0,
            counted: 0,
        }
    }

    /// Asks for where the next buffer is noted.
    #[inline]
    pub(crate) fn prefetch(&self) {
        B::prefetch(self.bufs.as_slices().0.as_ptr());
    }

    /// `b` is not empty.
    #[inline]
    pub(crate) fn push(&mut self, b: B) {
        self.bytes += b.remaining() as u32;
        self.bufs.push_back(b);
    }

    pub(crate) fn buffers(&self) -> usize {
        self.bufs.len()
    }

    pub(crate) fn clear(&mut self) {
        self.bufs = VecDeque::new();
        self.bytes = 0;
    }

    /// Of an empty queue.
    pub(crate) fn holds_memory(&self) -> bool {
        self.bufs.is_empty() && self.bufs.capacity() > 0
    }

    pub(crate) fn shrink(&mut self) {
        if self.bufs.is_empty() {
            self.bufs = VecDeque::new();
        }
    }

    /// Bytes in order and not yet consumed.
    #[inline]
    pub fn len_bytes(&self) -> usize {
        self.bytes as usize
    }

    /// Whether no bytes wait to be consumed.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// All pieces in order; none is empty.
    #[inline]
    pub fn chunks(&self) -> impl Iterator<Item = &[u8]> {
        self.bufs
            .iter()
            .flat_map(|b| b.chunks())
            .filter(|c| !c.is_empty())
    }

    /// Calls `f` with the pieces of `[offset, offset + len)`; returns how many bytes it saw, less
    /// than `len` only when that much is not here.
    #[inline]
    pub fn for_each_chunk(&self, mut offset: usize, len: usize, mut f: impl FnMut(&[u8])) -> usize {
        let mut left = len;
        for b in &self.bufs {
            let n = b.remaining();
            if offset >= n {
                offset -= n;
                continue;
            }
            for c in b.chunks() {
                if offset >= c.len() {
                    offset -= c.len();
                    continue;
                }
                let take = (c.len() - offset).min(left);
                if take > 0 {
                    f(&c[offset..offset + take]);
                }
                left -= take;
                offset = 0;
                if left == 0 {
                    return len;
                }
            }
        }
        len - left
    }

    /// The bytes of `[offset, offset + len)` when they lie in the first piece, as nearly always.
    #[inline]
    pub fn contiguous_slice(&self, offset: usize, len: usize) -> Option<&[u8]> {
        self.bufs.front()?.chunk().get(offset..offset + len)
    }

    /// Copies from `offset`; `false` (and `out` untouched) when not all of it is here.
    #[inline]
    pub fn copy_to_slice(&self, offset: usize, out: &mut [u8]) -> bool {
        if offset
            .checked_add(out.len())
            .is_none_or(|end| end > self.len_bytes())
        {
            return false;
        }
        // Nearly always the bytes are contiguous in the first buffer.
        if let Some(c) = self
            .bufs
            .front()
            .and_then(|b| b.chunk().get(offset..offset + out.len()))
        {
            out.copy_from_slice(c);
            return true;
        }
        let mut at = 0;
        self.for_each_chunk(offset, out.len(), |c| {
            out[at..at + c.len()].copy_from_slice(c);
            at += c.len();
        });
        true
    }

    /// Drops the first `n` bytes (at most what is here) and so opens the window; it is advertised
    /// lazily, by the next data, ACK or `poll`. Returns how many were dropped.
    #[inline]
    pub fn consume(&mut self, n: usize) -> usize {
        let n = n.min(self.len_bytes());
        let mut left = n;
        while left > 0 {
            let Some(b) = self.bufs.front_mut() else {
                break;
            };
            let have = b.remaining();
            if left < have {
                b.advance(left);
                break;
            }
            left -= have;
            self.bufs.pop_front();
        }
        self.bytes -= n as u32;
        n
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::buffer::VecBuf;

    #[test]
    fn pieces_are_walked_peeked_and_consumed_across_buffers() {
        let mut q = ReceiveQueue::<VecBuf>::new();
        for p in [&b"abc"[..], b"defg", b"h"] {
            q.push(p.to_vec().into());
        }
        let mut out = [0; 4];
        assert!(q.copy_to_slice(2, &mut out));
        assert_eq!(&out, b"cdef");
        assert!(!q.copy_to_slice(5, &mut out));
        assert!(!q.copy_to_slice(usize::MAX, &mut out));
        let mut seen = vec![];
        assert_eq!(q.for_each_chunk(1, 100, |c| seen.extend_from_slice(c)), 7);
        assert_eq!(seen, b"bcdefgh");
        assert_eq!(q.consume(4), 4);
        assert_eq!(q.chunks().collect::<Vec<_>>(), [&b"efg"[..], b"h"]);
        assert_eq!(q.consume(100), 4);
        assert!(q.is_empty() && q.buffers() == 0);
    }
}
