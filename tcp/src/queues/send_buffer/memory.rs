//! The memory of a send buffer: prefetch, reuse and release.

use std::collections::VecDeque;

use siw_net::RecvBuf;

use super::SendBuffer;

impl<R> SendBuffer<R> {
    fn is_empty(&self) -> bool {
        self.records.is_empty() && self.sent.is_empty()
    }

    /// Prefetches the first records and segments.
    #[inline]
    pub(crate) fn prefetch<B: RecvBuf>(&self) {
        B::prefetch(self.records.as_slices().0.as_ptr());
        B::prefetch(self.sent.as_slices().0.as_ptr());
    }

    /// Lets the next pushes reuse the memory from its beginning, if the queue is empty.
    #[inline]
    pub(crate) fn reuse_memory(&mut self) {
        if self.is_empty() {
            self.records.clear();
            self.sent.clear();
        }
    }

    /// Returns whether the queue is empty and still holds memory.
    pub(crate) fn holds_memory(&self) -> bool {
        self.is_empty() && self.records.capacity() + self.sent.capacity() > 0
    }

    /// Frees the memory of an empty queue.
    pub(crate) fn release_memory(&mut self) {
        if self.is_empty() {
            self.records = VecDeque::new();
            self.sent = VecDeque::new();
        }
    }
}
