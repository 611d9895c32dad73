//! Received frames as TCP holds them: mbuf chains that go back to the worker's cache when
//! they are consumed.

use std::cell::RefCell;

use dpdk::{Checksum, Mbuf, MbufCache, Segments};
use siw_iwarp::RxStream;
use siw_tcp::{RecvBuf, RxChecksum, RxQueue};

thread_local! {
    /// Buffers dropped since the last [`recycle`]; frames are dropped deep inside TCP, where
    /// the cache cannot be reached.
    static DROPPED: RefCell<Vec<Mbuf>> = const { RefCell::new(Vec::new()) };
}

/// Gives dropped frames back to the cache. Once a batch.
#[inline]
pub fn recycle(cache: &mut MbufCache) {
    DROPPED.with_borrow_mut(|d| {
        for m in d.drain(..) {
            cache.free(m);
        }
    });
}

/// What a port that checks says about a frame, IP and TCP together (RFC 1122 section 3.2.1.2: the
/// IP header's checksum is the host's to verify, whatever lies behind it).
#[inline]
pub fn port_says(m: &Mbuf) -> RxChecksum {
    match (m.rx_l4_checksum(), m.rx_ip_checksum()) {
        (Checksum::Bad, _) | (_, Checksum::Bad) => RxChecksum::Bad,
        (Checksum::Good | Checksum::NotNeeded, _) => RxChecksum::Good,
        (Checksum::Unknown, _) => RxChecksum::Unknown,
    }
}

/// A received frame, or what is left of it.
pub struct RxFrame(Option<Mbuf>);

impl RxFrame {
    /// Takes the chain over.
    #[inline]
    pub fn new(mbuf: Mbuf) -> RxFrame {
        RxFrame(Some(mbuf))
    }
}

impl Drop for RxFrame {
    #[inline]
    fn drop(&mut self) {
        if let Some(m) = self.0.take() {
            // During thread exit the list may be gone already: then DPDK frees the mbuf.
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

impl RecvBuf for RxFrame {
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

/// TCP's receive queue as iWARP reads it.
pub struct Stream<'a>(pub &'a mut RxQueue<RxFrame>);

impl RxStream for Stream<'_> {
    #[inline]
    fn available(&self) -> usize {
        self.0.len_bytes()
    }

    #[inline]
    fn peek(&self, off: usize, out: &mut [u8]) {
        self.0.peek(off, out);
    }

    #[inline]
    fn for_each(&self, off: usize, len: usize, f: impl FnMut(&[u8])) {
        self.0.for_each(off, len, f);
    }

    #[inline]
    fn contiguous(&self, off: usize, len: usize) -> Option<&[u8]> {
        self.0.contiguous(off, len)
    }

    #[inline]
    fn consume(&mut self, n: usize) {
        self.0.consume(n);
    }
}

/// A segment that TCP holds behind a hole.
pub struct Held<'a>(pub &'a RxFrame);

impl RxStream for Held<'_> {
    fn available(&self) -> usize {
        self.0.remaining()
    }

    fn peek(&self, off: usize, out: &mut [u8]) {
        let mut at = 0;
        self.for_each(off, out.len(), |s| {
            out[at..at + s.len()].copy_from_slice(s);
            at += s.len();
        });
    }

    fn for_each(&self, mut off: usize, mut len: usize, mut f: impl FnMut(&[u8])) {
        for c in self.0.chunks() {
            if off >= c.len() {
                off -= c.len();
                continue;
            }
            let n = len.min(c.len() - off);
            if n > 0 {
                f(&c[off..off + n]);
            }
            len -= n;
            off = 0;
            if len == 0 {
                return;
            }
        }
    }

    fn consume(&mut self, _n: usize) {}
}
