//! In-order received bytes of a connection, in the owned buffers in which they arrived. The upper
//! layer parses them in place and consumes them, without a copy.

use std::collections::VecDeque;

use siw_net::RecvBuf;

/// Prefetch distance: how many pieces ahead of a reader the bytes of a piece are prefetched.
const PIECES_AHEAD: usize = 2;

/// In-order received bytes of one connection, in owned buffers.
pub struct ReceiveQueue<B> {
    bufs: VecDeque<B>,
    /// Bytes in `bufs`: at most the largest window, 1 GiB.
    bytes: u32,
    /// Number of pool buffers in `bufs`, whose frames may occupy several.
    buffers: u32,
}

impl<B: RecvBuf> ReceiveQueue<B> {
    /// Returns an empty queue.
    pub(crate) fn new() -> Self {
        ReceiveQueue {
            bufs: VecDeque::new(),
            bytes: 0,
            buffers: 0,
        }
    }

    /// Prefetches the entry of the first buffer.
    #[inline]
    pub(crate) fn prefetch(&self) {
        B::prefetch(self.bufs.as_slices().0.as_ptr());
    }

    /// Appends a buffer, which must not be empty: the fast path of readers relies on that.
    #[inline]
    pub(crate) fn push(&mut self, buffer: B) {
        self.bytes += buffer.remaining() as u32;
        self.buffers += buffer.buffer_count() as u32;
        self.bufs.push_back(buffer);
    }

    /// Appends a copy of the buffer's bytes to the last buffer of the queue. Returns `false` if there
    /// is no room.
    #[cold]
    pub(crate) fn absorb(&mut self, buffer: &B) -> bool {
        let fits = self
            .bufs
            .back_mut()
            .is_some_and(|last| last.try_absorb(buffer));
        if fits {
            self.bytes += buffer.remaining() as u32;
        }
        fits
    }

    /// Drops what lies behind the first `keep` bytes and behind the first piece of the first buffer.
    #[cold]
    pub(crate) fn forget_from(&mut self, keep: usize) {
        let first = self.bufs.front().map_or(0, |buffer| buffer.chunk().len());
        let mut left = keep.max(first);
        let (mut kept, mut buffers) = (0, 0);
        self.bufs.retain_mut(|buffer| {
            if left == 0 {
                return false;
            }
            if left < buffer.remaining() {
                buffer.truncate(left);
            }
            left -= buffer.remaining();
            kept += buffer.remaining() as u32;
            buffers += buffer.buffer_count() as u32;
            true
        });
        (self.bytes, self.buffers) = (kept, buffers);
    }

    /// Returns the number of pool buffers.
    pub(crate) fn buffer_count(&self) -> usize {
        self.buffers as usize
    }

    /// Drops all buffers, and frees the memory of the queue.
    pub(crate) fn clear(&mut self) {
        self.bufs = VecDeque::new();
        (self.bytes, self.buffers) = (0, 0);
    }

    /// Returns whether the queue is empty and still holds memory.
    pub(crate) fn holds_memory(&self) -> bool {
        self.bufs.is_empty() && self.bufs.capacity() > 0
    }

    /// Frees the memory of an empty queue.
    pub(crate) fn release_memory(&mut self) {
        if self.bufs.is_empty() {
            self.bufs = VecDeque::new();
        }
    }

    /// Returns the number of in-order bytes not yet consumed.
    #[inline]
    pub fn len_bytes(&self) -> usize {
        self.bytes as usize
    }

    /// Returns whether no bytes wait to be consumed.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Returns all pieces in order; none is empty.
    #[inline]
    pub fn chunks(&self) -> impl Iterator<Item = &[u8]> {
        self.bufs
            .iter()
            .flat_map(|buffer| buffer.chunks())
            .filter(|chunk| !chunk.is_empty())
    }

    /// Returns the bytes of the first piece; empty if there are none.
    #[inline]
    pub fn first_chunk(&self) -> &[u8] {
        self.bufs.front().map_or(&[][..], |buffer| buffer.chunk())
    }

    /// Prefetches the first cache lines that a reader needs of the pieces after the first.
    #[inline]
    pub fn prefetch_next_pieces(&self) {
        if let Some(buffer) = self.bufs.front() {
            buffer.prefetch_second_piece();
        }
        if let Some(buffer) = self.bufs.get(2 * PIECES_AHEAD) {
            buffer.prefetch_description();
        }
        if let Some(buffer) = self.bufs.get(PIECES_AHEAD) {
            buffer.prefetch_bytes();
        }
    }

    /// Calls `visit` with the pieces of `[offset, offset + len)`; returns the number of bytes
    /// visited, which is less than `len` only if fewer are available.
    #[inline]
    pub fn for_each_chunk(
        &self,
        mut offset: usize,
        len: usize,
        mut visit: impl FnMut(&[u8]),
    ) -> usize {
        let mut left = len;
        for buffer in &self.bufs {
            let remaining = buffer.remaining();
            if offset >= remaining {
                offset -= remaining;
                continue;
            }
            for chunk in buffer.chunks() {
                if offset >= chunk.len() {
                    offset -= chunk.len();
                    continue;
                }
                let take = (chunk.len() - offset).min(left);
                if take > 0 {
                    visit(&chunk[offset..offset + take]);
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

    /// Returns the bytes of `[offset, offset + len)` if they lie in the first piece, as is nearly
    /// always the case.
    #[inline]
    pub fn contiguous_slice(&self, offset: usize, len: usize) -> Option<&[u8]> {
        self.bufs.front()?.chunk().get(offset..offset + len)
    }

    /// Copies from `offset`; returns `false` (and leaves `out` untouched) if not all bytes are
    /// available.
    #[inline]
    pub fn copy_to_slice(&self, offset: usize, out: &mut [u8]) -> bool {
        if offset
            .checked_add(out.len())
            .is_none_or(|end| end > self.len_bytes())
        {
            return false;
        }
        // The bytes are nearly always contiguous in the first buffer.
        if let Some(chunk) = self
            .bufs
            .front()
            .and_then(|buffer| buffer.chunk().get(offset..offset + out.len()))
        {
            out.copy_from_slice(chunk);
            return true;
        }
        let mut at = 0;
        self.for_each_chunk(offset, out.len(), |chunk| {
            out[at..at + chunk.len()].copy_from_slice(chunk);
            at += chunk.len();
        });
        true
    }

    /// Drops the first `count` bytes (at most those available) and so opens the window, which is
    /// advertised lazily, by the next data, ACK or `poll`. Returns the number of bytes dropped.
    #[inline]
    pub fn consume(&mut self, count: usize) -> usize {
        let count = count.min(self.len_bytes());
        let mut left = count;
        while left > 0 {
            let Some(buffer) = self.bufs.front_mut() else {
                break;
            };
            let have = buffer.remaining();
            self.buffers -= buffer.buffer_count() as u32;
            if left < have {
                buffer.consume(left);
                self.buffers += buffer.buffer_count() as u32;
                break;
            }
            left -= have;
            self.bufs.pop_front();
        }
        self.bytes -= count as u32;
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use siw_net::VecBuf;

    #[test]
    fn pieces_are_read_and_consumed_across_buffers() {
        let mut queue = ReceiveQueue::<VecBuf>::new();
        for p in [&b"abc"[..], b"defg", b"h"] {
            queue.push(p.to_vec().into());
        }
        let mut out = [0; 4];
        assert!(queue.copy_to_slice(2, &mut out));
        assert_eq!(&out, b"cdef");
        assert!(!queue.copy_to_slice(5, &mut out));
        assert!(!queue.copy_to_slice(usize::MAX, &mut out));
        let mut seen = vec![];
        assert_eq!(
            queue.for_each_chunk(1, 100, |chunk| seen.extend_from_slice(chunk)),
            7
        );
        assert_eq!(seen, b"bcdefgh");
        assert_eq!(queue.consume(4), 4);
        assert_eq!(queue.chunks().collect::<Vec<_>>(), [&b"efg"[..], b"h"]);
        assert_eq!(queue.consume(100), 4);
        assert!(queue.is_empty() && queue.buffer_count() == 0);
    }
}
