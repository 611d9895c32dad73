//! Received frames as the stack sees them: owned handles over one or more segments of memory.
//! The daemon implements the trait on mbuf chains; tests use [`VecBuf`].

/// A received frame, owned. All headers (Ethernet to the last TCP option) are contiguous in the
/// first chunk; a frame whose headers are not is dropped as malformed.
pub trait RecvBuf {
    type Chunks<'a>: Iterator<Item = &'a [u8]>
    where
        Self: 'a;
    /// Bytes left in the whole chain.
    fn remaining(&self) -> usize;
    /// The first contiguous piece; empty only when nothing remains.
    fn chunk(&self) -> &[u8];
    /// All pieces, in order.
    fn chunks(&self) -> Self::Chunks<'_>;
    /// Drops the first `n` bytes; the stack never asks for more than remain.
    fn advance(&mut self, count: usize);
    /// Keeps the first `n` bytes; the stack never asks for more than remain.
    fn truncate(&mut self, count: usize);
    /// Appends another frame's bytes, copied or chained; gives it back when this kind of buffer
    /// cannot, as by default. What is joined has the first buffer of before, and takes not much
    /// more memory than its bytes. Datagrams of fragments are made so, off the fast path.
    fn try_append(&mut self, tail: Self) -> Result<(), Self>
    where
        Self: Sized,
    {
        Err(tail)
    }
    /// Asks the CPU for the cache line at an address that need not be valid. Whoever receives in
    /// bursts for many connections gives the instruction, which this crate, without `unsafe`,
    /// cannot; by default nothing happens.
    #[inline]
    fn prefetch<T>(_at: *const T) {}
}

/// A frame in one `Vec`, for tests and simulations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VecBuf {
    data: Vec<u8>,
    start: usize,
}

impl VecBuf {
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
