//! Received frames: mbuf chains that return to the thread's cache once a turn.

use std::cell::RefCell;

use dpdk::{Mbuf, MbufCache, Segments};
use siw_tcp::RecvBuf;

thread_local! {
    /// Dropped inside of a stack, where the cache cannot be reached.
    static DROPPED: RefCell<Vec<Mbuf>> = const { RefCell::new(Vec::new()) };
}

/// Gives dropped frames back to the cache.
#[inline]
pub(super) fn recycle(cache: &mut MbufCache) {
    DROPPED.with_borrow_mut(|d| cache.free_all(d.drain(..)));
}

pub struct Frame(Option<Mbuf>);

impl Frame {
    #[inline]
    pub(super) fn new(mbuf: Mbuf) -> Frame {
        Frame(Some(mbuf))
    }
}

impl Drop for Frame {
    #[inline]
    fn drop(&mut self) {
        if let Some(m) = self.0.take() {
            let _ = DROPPED.try_with(|d| d.borrow_mut().push(m));
        }
    }
}

/// The pieces of a frame that hold bytes.
pub struct Chunks<'a>(Option<Segments<'a>>);

impl<'a> Iterator for Chunks<'a> {
    type Item = &'a [u8];
    #[inline]
    fn next(&mut self) -> Option<&'a [u8]> {
        self.0.as_mut()?.find(|s| !s.is_empty())
    }
}

impl RecvBuf for Frame {
    type Chunks<'a> = Chunks<'a>;

    #[inline]
    fn remaining(&self) -> usize {
        self.0.as_ref().map_or(0, |m| m.pkt_len() as usize)
    }
    #[inline]
    fn chunk(&self) -> &[u8] {
        self.chunks().next().unwrap_or(&[])
    }
    #[inline]
    fn chunks(&self) -> Chunks<'_> {
        Chunks(self.0.as_ref().map(Mbuf::segments))
    }
    #[inline]
    fn advance(&mut self, n: usize) {
        if let Some(m) = &mut self.0 {
            let ok = m.advance(n as u32);
            debug_assert!(ok);
        }
    }
    #[inline]
    fn truncate(&mut self, n: usize) {
        if let Some(m) = &mut self.0 {
            m.truncate(n as u32);
        }
    }

    #[inline]
    fn prefetch<T>(at: *const T) {
        dpdk::prefetch(at.cast());
    }
}
