//! Received frames as the stack sees them: owned handles to one or more pieces of memory. The daemon
//! implements the trait for chains of mbufs; tests use [`VecBuf`].

/// A received frame, owned. All headers (Ethernet to the last TCP option) must be contiguous in the
/// first chunk; otherwise the frame is dropped as malformed.
pub trait RecvBuf {
    /// The contiguous pieces of a frame, in order.
    type Chunks<'a>: Iterator<Item = &'a [u8]>
    where
        Self: 'a;
    /// Returns the bytes left in the whole chain.
    fn remaining(&self) -> usize;
    /// Returns the number of pool buffers that the frame occupies; at least 1.
    #[inline]
    fn buffer_count(&self) -> usize {
        1
    }
    /// Returns the first contiguous piece; empty only if no bytes remain.
    fn chunk(&self) -> &[u8];
    /// Returns all pieces, in order.
    fn chunks(&self) -> Self::Chunks<'_>;
    /// Drops the first `count` bytes; `count` is at most `remaining()`.
    fn advance(&mut self, count: usize);
    /// Restores the last `count` bytes that [`advance`](RecvBuf::advance) dropped from the first
    /// piece. Returns `false`, the default, if this kind of buffer does not support it. Used for
    /// frames of another owner, off the fast path.
    fn retreat(&mut self, _count: usize) -> bool {
        false
    }
    /// Drops the first `count` bytes, fewer than remain, for good: the memory that held them may be
    /// freed before the rest.
    #[inline]
    fn consume(&mut self, count: usize) {
        self.advance(count);
    }
    /// Keeps the first `count` bytes; `count` is at most `remaining()`.
    fn truncate(&mut self, count: usize);
    /// Appends the bytes of another frame, copied or chained. Returns the frame as an error, the
    /// default, if this kind of buffer does not support it. Used to reassemble IP datagrams, off
    /// the fast path; the result should not occupy much more memory than its bytes.
    fn try_append(&mut self, tail: Self) -> Result<(), Self>
    where
        Self: Sized,
    {
        Err(tail)
    }
    /// Appends a copy of the bytes of `tail` in memory that this frame already occupies. Returns
    /// `false`, the default, if there is no room, which must not happen while the frame fills less
    /// than a standard buffer of 2 KiB less headers. Used for small segments of a connection that
    /// holds many buffers, off the fast path.
    fn try_absorb(&mut self, _tail: &Self) -> bool {
        false
    }
    /// Prefetches the cache line at an address, which need not be valid. This crate has no `unsafe`
    /// code, so the implementation issues the instruction. The default does nothing.
    #[inline]
    fn prefetch<T>(_at: *const T) {}
    /// Prefetches the descriptor of the first piece. [`prefetch_bytes`](RecvBuf::prefetch_bytes)
    /// then prefetches the first bytes of that piece. The default does nothing.
    #[inline]
    fn prefetch_description(&self) {}
    /// See [`prefetch_description`](RecvBuf::prefetch_description).
    #[inline]
    fn prefetch_bytes(&self) {}
    /// Prefetches the first cache line read of the second piece. The default does nothing.
    #[inline]
    fn prefetch_second_piece(&self) {}
}

/// A frame in one `Vec`, for tests and simulations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VecBuf {
    data: Vec<u8>,
    start: usize,
}

impl VecBuf {
    /// The bytes that are left.
    pub fn as_slice(&self) -> &[u8] {
        &self.data[self.start..]
    }
}

impl From<Vec<u8>> for VecBuf {
    fn from(data: Vec<u8>) -> Self {
        VecBuf { data, start: 0 }
    }
}

impl RecvBuf for VecBuf {
    type Chunks<'a> = core::iter::Once<&'a [u8]>;
    #[inline]
    fn remaining(&self) -> usize {
        self.data.len() - self.start
    }
    #[inline]
    fn chunk(&self) -> &[u8] {
        self.as_slice()
    }
    #[inline]
    fn chunks(&self) -> Self::Chunks<'_> {
        core::iter::once(self.as_slice())
    }
    #[inline]
    fn advance(&mut self, count: usize) {
        assert!(count <= self.remaining());
        self.start += count;
    }
    fn retreat(&mut self, count: usize) -> bool {
        let is_dropped = count <= self.start;
        self.start -= if is_dropped { count } else { 0 };
        is_dropped
    }
    #[inline]
    fn truncate(&mut self, count: usize) {
        assert!(count <= self.remaining());
        self.data.truncate(self.start + count);
    }
    fn try_append(&mut self, tail: Self) -> Result<(), Self> {
        self.data.extend_from_slice(tail.as_slice());
        Ok(())
    }

    fn try_absorb(&mut self, tail: &Self) -> bool {
        // The room of a frame in a packet buffer.
        const ROOM: usize = 2048;
        let fits = self.data.len() + tail.as_slice().len() <= ROOM;
        if fits {
            self.data.extend_from_slice(tail.as_slice());
        }
        fits
    }
}
