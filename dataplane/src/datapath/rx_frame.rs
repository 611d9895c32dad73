//! Received frames as TCP holds them: mbuf chains that go back to the worker's cache when
//! they are consumed.

use std::cell::RefCell;

use dpdk::{ChecksumStatus, Mbuf, MbufCache, Segments};
use siw_iwarp::RxStream;
use siw_net::{RecvBuf, RxChecksum};
use siw_tcp::ReceiveQueue;

thread_local! {
    /// Buffers dropped since the last [`recycle_dropped_frames`]; frames are dropped deep inside
    /// TCP, where the cache cannot be reached.
    static DROPPED: RefCell<Vec<Mbuf>> = const { RefCell::new(Vec::new()) };
}

/// Returns dropped frames to the cache. Called once per batch.
#[inline]
pub fn recycle_dropped_frames(cache: &mut MbufCache) {
    if DROPPED.with_borrow(|dropped| !dropped.is_empty()) {
        recycle_all(cache);
    }
}

#[inline(never)]
fn recycle_all(cache: &mut MbufCache) {
    DROPPED.with_borrow_mut(|dropped| cache.free_all(dropped.drain(..)));
}

/// Result of a port that verifies checksums. The host must verify the IP header's checksum whatever
/// the payload is (RFC 1122 section 3.2.1.2), and not every port checks both.
#[inline]
fn port_verdict(mbuf: &Mbuf) -> RxChecksum {
    use ChecksumStatus::{Bad, Good, NotNeeded, Unknown};
    match (mbuf.rx_ip_checksum(), mbuf.rx_l4_checksum()) {
        (Bad, _) | (_, Bad) => RxChecksum::Bad,
        (_, Unknown) => RxChecksum::Unknown,
        (Unknown, Good | NotNeeded) => RxChecksum::TcpGood,
        (Good | NotNeeded, Good | NotNeeded) => RxChecksum::Good,
    }
}

/// State of a frame's checksums as known before any computation. `is_trusted`: the link cannot damage
/// frames, so all are good; `port_checks`: the port's result is used.
#[inline]
pub fn known_checksum(mbuf: &Mbuf, is_trusted: bool, port_checks: bool) -> RxChecksum {
    match (is_trusted, port_checks) {
        (true, _) => RxChecksum::Good,
        (_, true) => port_verdict(mbuf),
        _ => RxChecksum::Unknown,
    }
}

/// A received frame, or the rest of one that was partly consumed.
pub struct RxFrame(Option<Mbuf>);

impl RxFrame {
    /// Takes ownership of the chain.
    #[inline]
    pub fn new(mbuf: Mbuf) -> RxFrame {
        RxFrame(Some(mbuf))
    }

    /// Returns the chain to the caller.
    pub fn into_mbuf(mut self) -> Option<Mbuf> {
        self.0.take()
    }
}

impl Drop for RxFrame {
    #[inline]
    fn drop(&mut self) {
        if let Some(mbuf) = self.0.take() {
            // During thread exit the list may be destroyed already: then DPDK frees the mbuf.
            let _ = DROPPED.try_with(|dropped| dropped.borrow_mut().push(mbuf));
        }
    }
}

/// The non-empty pieces of a frame.
pub struct FrameChunks<'a>(Option<Segments<'a>>);

impl<'a> Iterator for FrameChunks<'a> {
    type Item = &'a [u8];
    #[inline]
    fn next(&mut self) -> Option<&'a [u8]> {
        self.0.as_mut()?.find(|segment| !segment.is_empty())
    }
}

impl RecvBuf for RxFrame {
    type Chunks<'a> = FrameChunks<'a>;

    #[inline]
    fn remaining(&self) -> usize {
        self.0.as_ref().map_or(0, |mbuf| mbuf.pkt_len() as usize)
    }

    #[inline]
    fn buffer_count(&self) -> usize {
        self.0.as_ref().map_or(1, |mbuf| mbuf.nb_segs().into())
    }

    #[inline]
    fn chunk(&self) -> &[u8] {
        match self.0.as_ref().map_or(&[][..], Mbuf::data) {
            [] => self.chunks().next().unwrap_or(&[]),
            first => first,
        }
    }

    #[inline]
    fn chunks(&self) -> FrameChunks<'_> {
        FrameChunks(self.0.as_ref().map(Mbuf::segments))
    }

    #[inline]
    fn advance(&mut self, n: usize) {
        if let Some(mbuf) = &mut self.0 {
            let is_long_enough = mbuf.advance(n as u32);
            debug_assert!(is_long_enough);
        }
    }

    /// Returns buffers as soon as they are read, while the caches still hold them.
    #[inline]
    fn consume(&mut self, count: usize) {
        let Some(mut mbuf) = self.0.take() else {
            return;
        };
        let mut left = count as u32;
        while left >= u32::from(mbuf.data_len()) {
            left -= u32::from(mbuf.data_len());
            let (first, rest) = mbuf.split_first();
            drop(RxFrame::new(first));
            let Some(rest) = rest else { return };
            mbuf = rest;
        }
        mbuf.adj(left as u16);
        self.0 = Some(mbuf);
    }

    #[cold]
    fn retreat(&mut self, n: usize) -> bool {
        let len = u16::try_from(n).ok();
        len.is_some_and(|len| self.0.as_mut().is_some_and(|mbuf| mbuf.retreat(len)))
    }

    #[inline]
    fn truncate(&mut self, n: usize) {
        if let Some(mbuf) = &mut self.0 {
            mbuf.truncate(n as u32);
        }
    }

    /// Copies a single buffer if the last one has room, as for small pieces; otherwise chains it.
    #[cold]
    fn try_append(&mut self, mut tail: RxFrame) -> Result<(), RxFrame> {
        let (Some(all), Some(more)) = (&mut self.0, tail.0.take()) else {
            return Ok(());
        };
        if more.nb_segs() == 1 && all.append_slice(more.data()) {
            tail.0 = Some(more);
            return Ok(());
        }
        all.append_chain(more).map_err(RxFrame::new)
    }

    fn try_absorb(&mut self, tail: &RxFrame) -> bool {
        match (&mut self.0, &tail.0) {
            (Some(all), Some(more)) => more.nb_segs() == 1 && all.append_slice(more.data()),
            _ => false,
        }
    }

    #[inline]
    fn prefetch<T>(at: *const T) {
        dpdk::prefetch(at.cast());
    }

    #[inline]
    fn prefetch_description(&self) {
        if let Some(mbuf) = &self.0 {
            mbuf.prefetch_description();
        }
    }

    #[inline]
    fn prefetch_bytes(&self) {
        if let Some(mbuf) = &self.0 {
            mbuf.prefetch();
        }
    }

    #[inline]
    fn prefetch_second_piece(&self) {
        if let Some(mbuf) = &self.0 {
            mbuf.prefetch_second_segment();
        }
    }
}

/// TCP's receive queue as iWARP reads it.
pub struct TcpByteStream<'a>(pub &'a mut ReceiveQueue<RxFrame>);

impl RxStream for TcpByteStream<'_> {
    #[inline]
    fn available(&self) -> usize {
        self.0.len_bytes()
    }

    #[inline]
    fn peek(&self, off: usize, out: &mut [u8]) {
        self.0.copy_to_slice(off, out);
    }

    #[inline]
    fn for_each_slice(&self, off: usize, len: usize, visit: impl FnMut(&[u8])) {
        self.0.for_each_chunk(off, len, visit);
    }

    #[inline]
    fn contiguous(&self, off: usize, len: usize) -> Option<&[u8]> {
        self.0.contiguous_slice(off, len)
    }

    #[inline]
    fn first_piece(&self) -> &[u8] {
        self.0.first_chunk()
    }

    #[inline]
    fn prefetch_next_pieces(&self) {
        self.0.prefetch_next_pieces();
    }

    #[inline]
    fn consume(&mut self, n: usize) {
        self.0.consume(n);
    }
}

/// The bytes of a frame: of a segment that TCP holds behind a gap, or of a datagram.
pub struct FrameBytes<'a>(pub &'a RxFrame);

impl RxStream for FrameBytes<'_> {
    fn available(&self) -> usize {
        self.0.remaining()
    }

    fn peek(&self, off: usize, out: &mut [u8]) {
        let mut at = 0;
        self.for_each_slice(off, out.len(), |slice| {
            out[at..at + slice.len()].copy_from_slice(slice);
            at += slice.len();
        });
    }

    fn for_each_slice(&self, mut off: usize, mut len: usize, mut visit: impl FnMut(&[u8])) {
        for chunk in self.0.chunks() {
            if off >= chunk.len() {
                off -= chunk.len();
                continue;
            }
            let taken = len.min(chunk.len() - off);
            if taken > 0 {
                visit(&chunk[off..off + taken]);
            }
            len -= taken;
            off = 0;
            if len == 0 {
                return;
            }
        }
    }

    fn consume(&mut self, _n: usize) {}
}

#[cfg(test)]
mod tests {
    use dpdk::{ChainBuilder, Mempool};
    use siw_net::{FrameInfo, FrameMeta, FrameSink, Instant, PayloadPiece, VecBuf};
    use siw_tcp::{Events, Stack, TsoLimits};
    use siw_tcp_sim::{Pattern, VecSink, append_payload, host_config};

    use super::*;

    /// A link that carries super-segments whole.
    #[derive(Default)]
    struct Whole {
        frames: Vec<Vec<u8>>,
    }

    impl FrameSink<Pattern> for Whole {
        fn send_frame<'a>(
            &mut self,
            headers_len: usize,
            _: &FrameMeta,
            fill: impl FnOnce(&mut [u8]),
            payload: impl IntoIterator<Item = PayloadPiece<'a, Pattern>>,
        ) -> bool {
            let mut frame = vec![0; headers_len];
            fill(&mut frame);
            append_payload(&mut frame, payload);
            self.frames.push(frame);
            true
        }
    }

    /// The frame as a port with LRO delivers it: headers in the first buffer, the rest in buffers of
    /// `sizes` bytes, some of them empty.
    fn chain(frame: &[u8], cache: &mut MbufCache, sizes: &[usize]) -> Mbuf {
        let buffer = |cache: &mut MbufCache, b: &[u8]| {
            let mut m = cache.alloc().unwrap();
            assert!(m.append_slice(b));
            m
        };
        let (head, mut rest) = frame.split_at(frame.len().min(100));
        let mut c = ChainBuilder::new(buffer(cache, head));
        for n in sizes.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (now, later) = rest.split_at((*n).min(rest.len()));
            assert!(c.push(buffer(cache, now)).is_ok());
            rest = later;
        }
        c.finish()
    }

    const BUFFERS: u32 = 4095;
    const MERGED_SEGMENTS: u64 = 6;
    const MERGED_BYTES: u64 = 40 * 1448;

    /// Receives merged segments of 58 KB, in chains of many buffers, in the order of `arrive`. The
    /// bytes are read as they were sent, in place, and all buffers return to the pool.
    fn received(pool: &Mempool, arrive: &[usize], sizes: &[usize]) {
        let now = Instant::from_millis(1000);
        let mut cache = MbufCache::new(pool);
        let mut sender = host_config(0);
        sender.tcp.tx_checksum = false;
        sender.tcp.initial_window = 1000;
        sender.tcp.tso = Some(TsoLimits {
            max_segments: 40,
            max_bytes: 64_000,
        });
        let mut sender = Stack::<VecBuf, Pattern>::new(sender, now).unwrap();
        let mut receiver = Stack::<RxFrame, Pattern>::new(host_config(1), now).unwrap();
        receiver.listen(None, 80, 4, 0).unwrap();
        let to = "10.0.0.2:80".parse().unwrap();
        let id = sender.connect(now, None, None, to, 0).unwrap();
        let info = FrameInfo {
            checksum: RxChecksum::Good,
            rss_hash: 0,
        };
        let (mut there, mut back) = (Whole::default(), VecSink::default());
        let mut on_accepted = None;
        for _ in 0..4 {
            sender.poll(now, &mut there);
            for f in there.frames.drain(..) {
                let m = chain(&f, &mut cache, sizes);
                receiver.receive_burst(now, std::iter::once((RxFrame::new(m), info)));
            }
            while let Some((id, _, e)) = receiver.next_event() {
                if e.contains(Events::ACCEPTED) {
                    on_accepted = Some(id);
                }
            }
            receiver.poll(now, &mut back);
            let frames = back.frames.drain(..).map(|(f, _)| (VecBuf::from(f), info));
            sender.receive_burst(now, frames);
        }
        let on_accepted = on_accepted.expect("a connection");
        for start in (0..MERGED_SEGMENTS * 40).map(|n| n * 1448) {
            let r = Pattern { salt: 5, start };
            sender.push_record(id, 1448, r, false).unwrap();
        }
        sender.flush(now, id, &mut there);
        let merged = std::mem::take(&mut there.frames);
        assert_eq!(merged.len() as u64, MERGED_SEGMENTS);
        let mut lie = Vec::new();
        for i in arrive {
            let m = chain(&merged[*i], &mut cache, sizes);
            assert!(m.nb_segs() > 20);
            lie.extend(m.segments().map(<[u8]>::as_ptr_range));
            receiver.receive_burst(now, std::iter::once((RxFrame::new(m), info)));
        }
        if arrive.len() as u64 == MERGED_SEGMENTS {
            assert_eq!(receiver.held_buffers(), lie.len(), "each buffer counts");
        }
        let rx = receiver.receive_queue(on_accepted).unwrap();
        let all = rx.len_bytes();
        assert_eq!(all as u64, MERGED_SEGMENTS * MERGED_BYTES);
        let mut at = 0;
        let seen = rx.for_each_chunk(0, all, |c| {
            let here = c.as_ptr_range();
            assert!(
                lie.iter()
                    .any(|m| m.start <= here.start && here.end <= m.end)
            );
            for b in c {
                assert_eq!(*b, Pattern::byte(5, at), "byte {at}");
                at += 1;
            }
        });
        assert_eq!(seen, all);
        let dropped_before = DROPPED.with_borrow(Vec::len);
        // Read buffers are returned, also those of a partly read segment.
        let before = receiver.held_buffers();
        let rx = receiver.receive_queue(on_accepted).unwrap();
        assert_eq!(
            rx.consume(MERGED_BYTES as usize / 2),
            MERGED_BYTES as usize / 2
        );
        receiver.poll(now, &mut back);
        let freed = before - receiver.held_buffers();
        assert!(freed >= 10, "{freed} of {before}");
        assert_eq!(DROPPED.with_borrow(Vec::len), dropped_before + freed);
        // Consumed in steps that end inside of buffers.
        let rx = receiver.receive_queue(on_accepted).unwrap();
        while rx.consume(9999) > 0 {}
        receiver.poll(now, &mut back);
        assert_eq!(receiver.held_buffers(), 0);
        drop(receiver);
        recycle_dropped_frames(&mut cache);
        drop(cache);
        assert_eq!(pool.available_buffers(), BUFFERS);
    }

    /// Joins pieces of a datagram into one frame; small ones are copied behind the data before them.
    fn joined(pool: &Mempool) {
        let mut cache = MbufCache::new(pool);
        let byte = |i: usize| (i % 251) as u8;
        let mut at = 0;
        let mut piece = |n: usize| {
            let bytes: Vec<u8> = (at..at + n).map(byte).collect();
            at += n;
            bytes
        };
        let small = |cache: &mut MbufCache, b: &[u8]| {
            let mut m = cache.alloc().unwrap();
            assert!(m.append_slice(b));
            RxFrame::new(m)
        };
        let mut all = small(&mut cache, &piece(100));
        for _ in 0..100 {
            let tail = small(&mut cache, &piece(8));
            assert!(all.try_append(tail).is_ok());
        }
        assert_eq!(all.chunks().count(), 1, "copied");
        for _ in 0..3 {
            let tail = small(&mut cache, &piece(1480));
            assert!(all.try_append(tail).is_ok());
        }
        let long = piece(5000);
        let tail = RxFrame::new(chain(&long, &mut cache, &[2000]));
        assert!(all.try_append(tail).is_ok());
        let got: Vec<u8> = all.chunks().flatten().copied().collect();
        assert_eq!(all.remaining(), at);
        assert!(got == (0..at).map(byte).collect::<Vec<_>>());
        let buffers = all.0.as_ref().unwrap().nb_segs();
        assert!(buffers <= 8, "{buffers} buffers");
        drop(all);
        recycle_dropped_frames(&mut cache);
        drop(cache);
        assert_eq!(pool.available_buffers(), BUFFERS);
    }

    #[test]
    fn chains_of_merged_segments_are_read_in_place_in_order_and_out_of_it() {
        let eal = crate::datapath::test_environment();
        let pool = Mempool::new(eal, "chains", BUFFERS, 0, 2048, None).unwrap();
        received(&pool, &[0, 1, 2, 3, 4, 5], &[2048]);
        received(&pool, &[0, 1, 2, 3, 4, 5], &[1, 2047, 0, 700, 1448]);
        received(&pool, &[1, 5, 0, 3, 2, 4], &[1448]);
        // Some arrive twice, before and after their turn.
        received(&pool, &[2, 2, 0, 0, 4, 1, 1, 3, 3, 5], &[999, 0, 1001]);
        joined(&pool);
    }
}
