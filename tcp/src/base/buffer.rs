//! Received frames as the stack sees them: owned handles to one or more pieces of memory. The daemon
//! implements the trait for chains of mbufs; tests use [`VecBuf`].

/// A received frame, owned. All headers (Ethernet to the last TCP option) are contiguous in the
/// first chunk; a frame whose headers are not is dropped as malformed.
pub trait RecvBuf {
    /// The contiguous pieces of a frame, in order.
    type Chunks<'a>: Iterator<Item = &'a [u8]>
    where
        Self: 'a;
    /// Bytes left in the whole chain.
    fn remaining(&self) -> usize;
    /// Buffers of the pool that it holds; at least 1.
    #[inline]
    fn buffer_count(&self) -> usize {
        1
    }
    /// The first contiguous piece; empty only when nothing remains.
    fn chunk(&self) -> &[u8];
    /// All pieces, in order.
    fn chunks(&self) -> Self::Chunks<'_>;
    /// Drops the first `count` bytes; the stack never asks for more than remain.
    fn advance(&mut self, count: usize);
    /// Puts back the last `count` bytes that [`advance`](RecvBuf::advance) dropped, which lay in the
    /// first piece. `false`: this kind of buffer cannot, which is the default. Used for frames that
    /// are somebody else's, off the fast path.
    fn retreat(&mut self, _count: usize) -> bool {
        false
    }
    /// Drops the first `count` bytes, fewer than remain, which are not asked for again: what held them
    /// may be freed before the rest.
    #[inline]
    fn consume(&mut self, count: usize) {
        self.advance(count);
    }
    /// Keeps the first `count` bytes; the stack never asks for more than remain.
    fn truncate(&mut self, count: usize);
    /// Appends the bytes of another frame, copied or chained. Returns it as an error if this kind of
    /// buffer cannot, which is the default. Used to reassemble IP datagrams, off the fast path; the
    /// result should not hold much more memory than its bytes.
    fn try_append(&mut self, tail: Self) -> Result<(), Self>
    where
        Self: Sized,
    {
        Err(tail)
    }
    /// Prefetches the cache line at an address, which need not be valid. This crate has no `unsafe`
    /// code, so the implementation issues the instruction; by default nothing happens.
    #[inline]
    fn prefetch<T>(_at: *const T) {}
    /// Prefetches what describes the first piece, and then, by another call, its first bytes; by default
    /// nothing happens.
    #[inline]
    fn prefetch_description(&self) {}
    /// See [`prefetch_description`](RecvBuf::prefetch_description).
    #[inline]
    fn prefetch_bytes(&self) {}
    /// Prefetches what is read first of the second piece; by default nothing happens.
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
}
