//! Transmit path: TCP's segments become mbuf chains, and leave by the port's queue, through another
//! worker that has one, or by loopback.
//!
//! ```text
//! Stack::flush -> PortSink::send_frame -> RecordWriter::write_record: the payload
//!                         '-> PortOutput::send_frame -> transmit_batch
//! ```
//! Everything is generic over the writer, so that a record is written into the frame by direct calls.

use std::sync::Arc;
use std::time::Duration;

use dpdk::{ChainBuilder, Mbuf, MbufCache, TxBatch, TxOffload};
use siw_net::{
    FrameInfo, FrameMeta, FrameSink, Instant, PayloadPiece, RxChecksum, TxChecksum, checksum,
};
use siw_ports::{TransmitQueue, TxQueue};

use super::inbox::ProxyTx;
use super::loss::{CONFIGURED_LOSS, MEANING_OF_LOSS};
use super::rx_frame::RxFrame;
use super::wire_faults::{
    INJECTED_LOSS, MEANING_OF_INJECTED_LOSS, Verdict, WireFaultCounts, WireFaults, copy_frame,
};
use crate::capture::{Direction, FrameRecord};
use crate::frame_taps::FrameTaps;
use crate::link_traits::{COPY_MAX, LinkTraits, PayloadPolicy};
use crate::trace::{TraceEvent, TraceRecord, TraceStep, TraceTap, TracedFrame};

/// Time in which a port accepts no frame and that no congestion explains: its first frame is one that it never
/// sends.
const STALL: Duration = Duration::from_secs(1);

/// Buffers that one frame may need: a header, and a reference with a trailer for each piece of more
/// than [`COPY_MAX`] bytes. A frame is begun only when the cache has them, so that an exhausted pool
/// delays frames instead of truncating them.
const BUFFERS_NEEDED: usize = 40;

/// Buffers that a super-segment may need: each FPDU of copied payload lies in one.
const BUFFERS_NEEDED_BY_TSO: usize = 64;

#[inline]
fn buffers_needed(meta: &FrameMeta) -> usize {
    if meta.tso_segsz > 0 {
        BUFFERS_NEEDED_BY_TSO
    } else {
        BUFFERS_NEEDED
    }
}

/// Name of the step of a trace in which a plan injects another fault than a loss.
const INJECTED_FAULT: &str = "injected_fault";

/// Writes records of connections into frames.
pub trait RecordWriter<R> {
    /// Appends `len` bytes of `record` from `offset` on. `user`: the connection's owner.
    fn write_record(
        &mut self,
        frame: &mut TxFrame<'_>,
        cache: &mut MbufCache,
        user: u64,
        record: &R,
        offset: u32,
        len: u32,
    );
}

/// A frame under construction.
pub struct TxFrame<'a> {
    /// Its buffers so far.
    pub chain: ChainBuilder,
    /// Properties that TCP gives the frame.
    pub meta: &'a FrameMeta,
    /// Wire segment of the last reference to registered memory, and the number of references in it.
    references: (u32, u16),
    /// Maximum number of references per wire segment.
    references_max: u16,
    /// Maximum number of buffers in the whole frame.
    chain_max: u16,
    /// The port computes wrong checksums if any buffer but the last has an odd length.
    even_segments: bool,
    /// Payload is copied although its message is sent by reference: it was sent before on a link that
    /// releases memory with the acknowledgement, which may be for an earlier transmission and does not
    /// show that this frame has left the port.
    copies_references: bool,
    /// The frame is incomplete: it is dropped, as if the network had lost it.
    pub is_broken: bool,
}

impl<'a> TxFrame<'a> {
    #[inline(always)]
    fn new(chain: ChainBuilder, meta: &'a FrameMeta, output: &PortOutput) -> TxFrame<'a> {
        let link = &output.link;
        TxFrame {
            chain,
            meta,
            references: (0, 0),
            references_max: link.max_segments.saturating_sub(2) / 2,
            chain_max: if meta.tso_segsz > 0 {
                link.max_tso_segments
            } else {
                link.max_segments
            },
            even_segments: link.even_segments,
            copies_references: meta.retransmission
                && link.payload == PayloadPolicy::ReferenceUntilAck,
            is_broken: false,
        }
    }

    /// Payload bytes written.
    #[inline]
    fn written(&self) -> u32 {
        let FrameMeta {
            l2_len,
            l3_len,
            l4_len,
            ..
        } = *self.meta;
        self.chain.pkt_len() - u32::from(l2_len) - u32::from(l3_len) - u32::from(l4_len)
    }

    /// Appends a buffer that refers to `len` bytes, which `attach` returns. `false`: nothing was
    /// appended, because the frame takes no references, a copy costs less, or there is no room for the
    /// reference together with the buffer that follows it. The rest of the payload may be copied, which
    /// needs at most one buffer per kilobyte.
    #[inline]
    pub fn append_reference(&mut self, len: usize, attach: impl FnOnce() -> Option<Mbuf>) -> bool {
        if self.copies_references || len <= COPY_MAX as usize {
            return false;
        }
        if self.even_segments && (self.chain.pkt_len() as usize | len) & 1 != 0 {
            return false;
        }
        let written = self.written();
        let segment = match self.meta.tso_segsz {
            0 => 0,
            segment_len => written / u32::from(segment_len),
        };
        let before = match self.references {
            (last, count) if last == segment => count,
            _ => 0,
        };
        let rest = self.meta.payload_len.saturating_sub(written) / 1024 + 3;
        if before >= self.references_max
            || u32::from(self.chain.nb_segs()) + rest > u32::from(self.chain_max)
        {
            return false;
        }
        let Some(mbuf) = attach() else {
            return false;
        };
        if self.chain.push(mbuf).is_err() {
            self.is_broken = true;
        }
        self.references = (segment, before + 1);
        true
    }

    /// Appends room for the next piece of payload: at least one byte, at most `want`. Starts a new
    /// buffer if the last one is full or nearly full. On failure returns `None` and marks the frame as
    /// broken.
    #[inline]
    pub fn reserve(&mut self, cache: &mut MbufCache, want: usize) -> Option<&mut [u8]> {
        let tailroom = usize::from(self.chain.tailroom());
        let is_odd = self.even_segments && self.chain.pkt_len() & 1 != 0;
        let has_room = tailroom >= want.min(COPY_MAX as usize) || (is_odd && tailroom > 0);
        if !has_room && !self.add_buffer(cache) {
            return None;
        }
        let len = usize::from(self.chain.tailroom()).min(want);
        let room = self.chain.append_room(len as u16);
        if room.is_none() {
            self.is_broken = true;
        }
        room
    }

    /// Appends an empty buffer. On failure returns false and marks the frame as broken.
    #[inline]
    pub fn add_buffer(&mut self, cache: &mut MbufCache) -> bool {
        let added = cache
            .alloc()
            .is_some_and(|mbuf| self.chain.push(mbuf).is_ok());
        if !added {
            self.is_broken = true;
        }
        added
    }

    /// Appends `len` bytes, and calls `write` with the offset and the room of each piece.
    #[inline]
    pub fn fill_bytes(
        &mut self,
        cache: &mut MbufCache,
        len: usize,
        mut write: impl FnMut(usize, &mut [u8]),
    ) {
        let mut done = 0;
        while done < len {
            let Some(room) = self.reserve(cache, len - done) else {
                return;
            };
            write(done, room);
            done += room.len();
        }
    }

    /// Appends a copy of `bytes`; `None` marks the frame as broken.
    #[inline]
    pub fn append_bytes(&mut self, cache: &mut MbufCache, bytes: Option<&[u8]>) {
        match bytes {
            Some(bytes) => self.fill_bytes(cache, bytes.len(), |at, room| {
                room.copy_from_slice(&bytes[at..at + room.len()]);
            }),
            None => self.is_broken = true,
        }
    }
}

/// Sink for TCP's frames during one call into a stack.
pub struct PortSink<'a, W> {
    output: &'a mut PortOutput,
    cache: &'a mut MbufCache,
    writer: W,
    /// Nanoseconds since the epoch, for captures.
    wall_time: u64,
}

impl<'a, W> PortSink<'a, W> {
    /// A sink of a port; `writer` makes the bytes of records.
    #[inline]
    pub fn new(
        output: &'a mut PortOutput,
        cache: &'a mut MbufCache,
        writer: W,
        wall_time: u64,
    ) -> PortSink<'a, W> {
        PortSink {
            output,
            cache,
            writer,
            wall_time,
        }
    }
}

impl<W> PortSink<'_, W> {
    /// Starts a frame with headers of `len` bytes, which `fill` writes. `buffers` is the number of
    /// buffers that the frame may need. Returns `None` if there is no room now.
    ///
    /// Why it is fast: arguments and result fit into registers. A whole [`TxFrame`] would be copied
    /// right after its fields were stored, and wait for the stores.
    #[inline]
    fn start_frame(
        &mut self,
        len: usize,
        buffers: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> Option<ChainBuilder> {
        if self.output.batch.is_full() {
            self.output.transmit_batch();
            if self.output.batch.is_full() {
                return None;
            }
        }
        if !self.cache.reserve(buffers) {
            return None;
        }
        let mut chain = ChainBuilder::new(self.cache.alloc()?);
        let Some(room) = chain.append_room(len as u16) else {
            self.cache.free(chain.finish());
            return None;
        };
        fill(room);
        Some(chain)
    }
}

impl<R, W: RecordWriter<R>> FrameSink<R> for PortSink<'_, W> {
    #[inline]
    fn send_frame<'a>(
        &mut self,
        headers_len: usize,
        meta: &FrameMeta,
        fill: impl FnOnce(&mut [u8]),
        payload: impl IntoIterator<Item = PayloadPiece<'a, R>>,
    ) -> bool
    where
        R: 'a,
    {
        let Some(chain) = self.start_frame(headers_len, buffers_needed(meta), fill) else {
            return false;
        };
        let mut frame = TxFrame::new(chain, meta, self.output);
        for piece in payload {
            match piece {
                PayloadPiece::Bytes(bytes) => frame.append_bytes(self.cache, Some(bytes)),
                PayloadPiece::Record {
                    user,
                    record,
                    offset,
                    len,
                } => {
                    self.writer
                        .write_record(&mut frame, self.cache, user, record, offset, len);
                }
            }
        }
        let TxFrame {
            chain, is_broken, ..
        } = frame;
        let mbuf = chain.finish();
        if is_broken {
            // As if the network had lost it: TCP retransmits, or the connection ends.
            self.cache.free(mbuf);
        } else {
            self.output
                .send_frame(mbuf, meta, self.cache, self.wall_time);
        }
        true
    }
}

/// Transmit path of a port.
pub enum TxPath {
    /// The worker's own queue of the port.
    Queue(TxQueue),
    /// The port has no queue for this worker: another one sends.
    Proxy(ProxyTx),
    /// The port was removed: frames are dropped.
    Closed,
}

/// The sending half of a worker's port.
pub struct PortOutput {
    path: TxPath,
    /// Frames for the next burst.
    pub batch: TxBatch,
    /// Frames to this device's own address; they never reach the port.
    loopback: Vec<Mbuf>,
    /// Capabilities of the link.
    pub link: LinkTraits,
    /// Captures and trace in which frames are recorded.
    pub taps: Option<FrameTaps>,
    /// Faults that are injected on purpose; `None` without any.
    pub faults: Option<Box<WireFaults>>,
    /// The device's number in captures.
    pub interface: u32,
    /// Since when the port has accepted no frame.
    stalled_since: Option<Instant>,
    /// The stall was reported.
    has_told_stall: bool,
    /// Frames that left through the port or the proxy.
    pub frames_sent: u64,
    /// Frames copied into one segment because they had more segments than the port supports.
    pub frames_linearized: u64,
    /// Frames dropped because they do not fit into one buffer either.
    frames_too_long: u64,
    /// Frames lost on purpose, as the configuration says.
    pub frames_lost: u64,
    /// Numbers of the faults of plans that have ended.
    past_faults: WireFaultCounts,
    /// Frames that the kernel sent through the port.
    pub host_frames_sent: u64,
    /// Frames between port and kernel, in either direction, dropped for lack of room.
    pub host_frames_dropped: u64,
}

impl PortOutput {
    /// The sending half of the device with the number `interface` in captures.
    pub fn new(path: TxPath, interface: u32, link: LinkTraits) -> PortOutput {
        PortOutput {
            path,
            batch: TxBatch::new(),
            loopback: Vec::new(),
            link,
            taps: None,
            faults: None,
            interface,
            stalled_since: None,
            has_told_stall: false,
            frames_sent: 0,
            frames_linearized: 0,
            frames_too_long: 0,
            frames_lost: 0,
            past_faults: WireFaultCounts::default(),
            host_frames_sent: 0,
            host_frames_dropped: 0,
        }
    }

    /// True if frames wait for the next burst or for loopback.
    #[inline]
    pub fn has_frames(&self) -> bool {
        !self.batch.is_empty() || self.has_loopback()
    }

    /// True if frames to the device's own address wait.
    #[inline]
    pub fn has_loopback(&self) -> bool {
        !self.loopback.is_empty()
    }

    /// True if the kernel has not taken all frames of earlier bursts.
    #[inline]
    pub fn has_backlog(&self) -> bool {
        matches!(&self.path, TxPath::Queue(queue) if queue.has_backlog())
    }

    /// Returns whether there is room for one more frame. Sends the batch if it is full.
    #[inline]
    pub fn has_room_for_frame(&mut self, cache: &mut MbufCache) -> bool {
        if self.batch.is_full() {
            self.transmit_batch();
        }
        !self.batch.is_full() && cache.reserve(BUFFERS_NEEDED)
    }

    /// Hands the batch to the port; frames that do not fit stay in it.
    #[inline]
    pub fn transmit_batch(&mut self) {
        if !self.batch.is_empty() {
            self.transmit_frames();
        } else if let TxPath::Queue(queue) = &mut self.path {
            queue.retry_backlog();
        }
    }

    #[inline(never)]
    fn transmit_frames(&mut self) {
        let sent = match &mut self.path {
            TxPath::Queue(queue) => queue.tx_burst(&mut self.batch),
            TxPath::Proxy(proxy) => proxy.transmit_batch(&mut self.batch),
            TxPath::Closed => {
                self.drop_batch();
                0
            }
        };
        self.frames_sent += sent as u64;
        if sent > 0 {
            self.stalled_since = None;
        }
    }

    /// Drops the batch of a port of this worker that has accepted no frame for a second, as if the network had
    /// lost it: behind a frame that a driver never sends, no other one would ever leave. Returns true at the
    /// first time of a stall.
    #[cold]
    pub(super) fn drop_stalled(&mut self, now: Instant) -> bool {
        let TxPath::Queue(queue) = &mut self.path else {
            return false;
        };
        let Some(since) = self.stalled_since else {
            self.stalled_since = Some(now);
            self.has_told_stall = false;
            return false;
        };
        if now < since + STALL {
            return false;
        }
        let waiting = self.batch.len();
        queue.refuse_packets(&mut self.batch, waiting);
        self.stalled_since = Some(now);
        !std::mem::replace(&mut self.has_told_stall, true)
    }

    #[cold]
    fn drop_batch(&mut self) {
        while self.batch.pop().is_some() {}
    }

    /// Closes the path to a removed port: drops the waiting frames and all later ones.
    pub(super) fn close(&mut self) {
        self.path = TxPath::Closed;
        self.drop_batch();
        // Frames that wait refer to memory of clients.
        self.end_faults();
    }

    pub(super) fn is_closed(&self) -> bool {
        matches!(self.path, TxPath::Closed)
    }

    /// Takes the loopback frames as received frames. Their checksums are ours and count as good.
    pub fn take_loopback(&mut self) -> impl Iterator<Item = (RxFrame, FrameInfo)> + use<> {
        let info = FrameInfo {
            checksum: RxChecksum::Good,
            rss_hash: 0,
        };
        let frames = std::mem::take(&mut self.loopback);
        frames
            .into_iter()
            .map(move |mbuf| (RxFrame::new(mbuf), info))
    }

    /// Queues a complete frame for the next burst or for loopback. It has its checksum, or gets the
    /// metadata that the port needs to compute it. `wall_time` is for captures, in nanoseconds since
    /// the epoch.
    #[inline]
    pub fn send_frame(
        &mut self,
        mut mbuf: Mbuf,
        meta: &FrameMeta,
        cache: &mut MbufCache,
        wall_time: u64,
    ) {
        if meta.checksum == TxChecksum::Partial {
            complete_checksum(&mut mbuf, meta);
        }
        if self.faults.is_some() && !meta.self_addressed {
            return self.send_with_faults(mbuf, meta, cache, wall_time);
        }
        let lacks_checksum = meta.checksum == TxChecksum::Offload;
        self.record_sent(&mbuf, lacks_checksum, wall_time, None);
        if meta.self_addressed {
            self.loopback.push(mbuf);
            return;
        }
        if let Some(mbuf) = self.prepare_frame(mbuf, meta, cache)
            && let Err(rejected) = self.batch.push(mbuf)
        {
            cache.free(rejected);
        }
    }

    /// Gives a frame the metadata and the number of buffers that the port needs; `None`: it is dropped.
    #[inline]
    fn prepare_frame(
        &mut self,
        mut mbuf: Mbuf,
        meta: &FrameMeta,
        cache: &mut MbufCache,
    ) -> Option<Mbuf> {
        if meta.checksum == TxChecksum::Offload && self.link.tx_checksum {
            mbuf.set_tx_offload(TxOffload {
                l2_len: meta.l2_len,
                l3_len: u16::from(meta.l3_len),
                l4_len: meta.l4_len,
                ipv6: meta.ipv6,
                ip_checksum: meta.tso_segsz > 0 && self.link.tx_ip_checksum,
                tcp_checksum: true,
                tso_segsz: meta.tso_segsz,
            });
        }
        let max_segments = match meta.tso_segsz {
            0 => self.link.max_segments,
            _ => self.link.max_tso_segments,
        };
        if mbuf.nb_segs() > max_segments {
            return self.linearize(mbuf, cache);
        }
        Some(mbuf)
    }

    /// Sends a frame that faults may concern.
    #[cold]
    #[inline(never)]
    fn send_with_faults(
        &mut self,
        mbuf: Mbuf,
        meta: &FrameMeta,
        cache: &mut MbufCache,
        wall_time: u64,
    ) {
        let Some(faults) = &mut self.faults else {
            return;
        };
        let now = std::time::Instant::now();
        let lacks_checksum = meta.checksum == TxChecksum::Offload;
        if faults.loses_by_configuration() {
            let loss = SentFault {
                comment: None,
                step: (CONFIGURED_LOSS, Some(MEANING_OF_LOSS)),
            };
            self.frames_lost += 1;
            self.record_sent(&mbuf, lacks_checksum, wall_time, Some(loss));
            return cache.free(mbuf);
        }
        let verdict = faults.judge_sent(now, &mbuf);
        let fault = verdict.text.as_ref().map(|text| SentFault {
            comment: Some(text),
            step: match verdict.is_lost {
                true => (INJECTED_LOSS, Some(MEANING_OF_INJECTED_LOSS)),
                false => (INJECTED_FAULT, None),
            },
        });
        self.record_sent(&mbuf, lacks_checksum, wall_time, fault);
        if verdict.is_lost {
            return cache.free(mbuf);
        }
        let Some(mbuf) = self.prepare_frame(mbuf, meta, cache) else {
            return;
        };
        self.send_by_verdict(mbuf, &verdict, now, !lacks_checksum, cache);
    }

    /// Changes, repeats and delays a frame that is ready for the port. `mends_checksum`: its TCP checksum is
    /// complete.
    fn send_by_verdict(
        &mut self,
        mut mbuf: Mbuf,
        verdict: &Verdict,
        now: std::time::Instant,
        mends_checksum: bool,
        cache: &mut MbufCache,
    ) {
        let Some(faults) = &mut self.faults else {
            return;
        };
        let payload = verdict.payload.as_ref();
        if let Some(copy) = verdict.copy {
            let change = copy.altered.zip(payload);
            let due = now + verdict.hold + copy.late;
            if let Some(second) = copy_frame(&mbuf, change, mends_checksum, cache)
                && let Err(rejected) = faults.held_out.hold(due, second, cache)
            {
                faults.note_overflow();
                cache.free(rejected);
            }
        }
        // A frame that waits does not refer to memory of a client.
        let must_copy = verdict.altered.is_some() || !verdict.hold.is_zero();
        if must_copy
            && let Some(copy) =
                copy_frame(&mbuf, verdict.altered.zip(payload), mends_checksum, cache)
        {
            cache.free(std::mem::replace(&mut mbuf, copy));
        }
        let refused = match verdict.hold.is_zero() {
            true => self.batch.push(mbuf),
            false => {
                let held = faults.held_out.hold(now + verdict.hold, mbuf, cache);
                if held.is_err() {
                    faults.note_overflow();
                }
                held
            }
        };
        if let Err(rejected) = refused {
            cache.free(rejected);
        }
    }

    /// Puts the frames that have waited long enough into the batch.
    #[cold]
    pub(super) fn send_due(&mut self, now: std::time::Instant) {
        while !self.batch.is_full()
            && let Some(faults) = &mut self.faults
            && let Some(mbuf) = faults.held_out.take_due(now)
        {
            // There is room.
            let _ = self.batch.push(mbuf);
        }
    }

    /// Drops the faults, and frames that wait; their numbers stay.
    pub(super) fn end_faults(&mut self) {
        if let Some(faults) = self.faults.take() {
            self.past_faults.merge(&faults.counts);
        }
    }

    /// Numbers of the faults of plans so far.
    pub fn fault_counts(&self) -> WireFaultCounts {
        let mut counts = self.past_faults;
        if let Some(faults) = &self.faults {
            counts.merge(&faults.counts);
        }
        counts
    }

    #[inline]
    fn record_sent(
        &self,
        mbuf: &Mbuf,
        lacks_checksum: bool,
        wall_time: u64,
        fault: Option<SentFault<'_>>,
    ) {
        if let Some(taps) = &self.taps {
            let frame = FrameRecord {
                interface: self.interface,
                direction: Direction::Outbound,
                time: wall_time,
                lacks_checksum,
                comment: fault.as_ref().and_then(|fault| fault.comment),
            };
            taps.record_frame(&frame, mbuf);
            if let Some(trace) = taps.trace() {
                let step = fault.map(|fault| fault.step);
                trace_sent(trace, self.interface, wall_time, mbuf, step);
            }
        }
    }

    /// Copies a frame with more segments than the port supports into one buffer. Returns `None` if
    /// there is no buffer or the frame does not fit; it is dropped, and TCP sends its segments again
    /// one by one.
    #[cold]
    fn linearize(&mut self, mbuf: Mbuf, cache: &mut MbufCache) -> Option<Mbuf> {
        let flat = mbuf.linearize(cache);
        cache.free(mbuf);
        match flat {
            Some(_) => self.frames_linearized += 1,
            None => self.frames_too_long += 1,
        }
        flat
    }

    /// Frames dropped because the port can never send them.
    pub fn frames_refused(&self) -> u64 {
        let by_driver = match &self.path {
            TxPath::Queue(queue) => queue.refused_packets(),
            TxPath::Proxy(_) | TxPath::Closed => 0,
        };
        by_driver + self.frames_too_long
    }

    /// Queues a frame that another worker prepared. A full port drops it, as a full NIC ring does.
    pub(super) fn send_for_other(&mut self, mbuf: Mbuf, cache: &mut MbufCache) {
        if self.batch.is_full() {
            self.transmit_batch();
        }
        if let Err(rejected) = self.batch.push(mbuf) {
            cache.free(rejected);
        }
    }

    /// Queues a frame that the kernel sends, with its checksums. If the port is full, drops and counts
    /// it.
    pub(super) fn send_for_host(&mut self, mbuf: Mbuf, cache: &mut MbufCache, wall_time: u64) {
        self.record_sent(&mbuf, false, wall_time, None);
        if self.batch.is_full() {
            self.transmit_batch();
        }
        match self.batch.push(mbuf) {
            Ok(()) => self.host_frames_sent += 1,
            Err(rejected) => {
                self.host_frames_dropped += 1;
                cache.free(rejected);
            }
        }
    }

    /// Has the port free the buffers of sent frames.
    pub fn release_sent_buffers(&mut self) {
        if let TxPath::Queue(queue) = &mut self.path {
            queue.done_cleanup();
        }
    }
}

/// A fault of a sent frame, as captures and traces record it.
#[derive(Clone, Copy)]
struct SentFault<'a> {
    comment: Option<&'a Arc<str>>,
    /// Name of the step of a trace, and its meaning if the frame is lost.
    step: (&'static str, Option<&'static str>),
}

/// Records a sent frame. `fault`: the step in which it meets a fault, with its meaning if the frame is lost.
#[cold]
fn trace_sent(
    trace: &TraceTap,
    interface: u32,
    time: u64,
    mbuf: &Mbuf,
    fault: Option<(&'static str, Option<&'static str>)>,
) {
    let frame = TracedFrame::new(mbuf.pkt_len(), mbuf.data());
    if !trace.selects_frame(interface, &frame) {
        return;
    }
    let fault = fault.map(|(name, drop)| TraceStep {
        name,
        count: 1,
        drop,
    });
    trace.add(TraceRecord {
        time,
        interface,
        event: TraceEvent::Sent,
        qpn: None,
        frame: Some(frame),
        steps: fault.into_iter().collect(),
    });
}

/// Computes the TCP checksum of a frame whose pseudo-header sum is in the field already.
fn complete_checksum(mbuf: &mut Mbuf, meta: &FrameMeta) {
    let headers = usize::from(meta.l2_len) + usize::from(meta.l3_len) + usize::from(meta.l4_len);
    let mut sum = checksum::OnesComplementSum::new();
    let mut skip = headers;
    for segment in mbuf.segments() {
        let skipped = skip.min(segment.len());
        sum.add(&segment[skipped..]);
        skip -= skipped;
    }
    let data = mbuf.data_mut();
    let Some(head) = data.get(..headers) else {
        return;
    };
    let value = checksum::complete_tcp_checksum(head, meta, sum);
    let offset = checksum::tcp_checksum_offset(meta);
    if let Some(field) = data.get_mut(offset..offset + 2) {
        field.copy_from_slice(&value);
    }
}

#[cfg(test)]
mod tests {
    use dpdk::{DriverTraits, Mempool, PortConfig};
    use siw_ports::Port;

    use super::*;
    use crate::config::{ChecksumPolicy, TsoPolicy, TxPayloadPolicy};
    use crate::datapath::test_environment;

    /// A ring pair whose other end nobody reads stands for a port that accepts no frame.
    #[test]
    fn a_port_that_accepts_no_frame_for_a_second_loses_those_that_wait() {
        let pool = Mempool::new(test_environment(), "stalled", 1023, 0, 2048, None).unwrap();
        let (mut near, far) = Port::create_ring_pair(test_environment(), "stalled", 1, 64).unwrap();
        let config = PortConfig {
            rx_queues: 1,
            tx_queues: 1,
            ..PortConfig::default()
        };
        near.configure(&config, std::slice::from_ref(&pool))
            .unwrap();
        let tx = near.start().unwrap().remove(0).1.unwrap();
        let link = LinkTraits::new(
            DriverTraits::of_ring_pair(),
            &near.granted_caps().unwrap(),
            ChecksumPolicy::Auto,
            TsoPolicy::Auto,
            TxPayloadPolicy::Auto,
            1500,
        );
        let mut output = PortOutput::new(TxPath::Queue(tx), 0, link);
        let fill = |output: &mut PortOutput| {
            while !output.batch.is_full() {
                assert!(output.batch.push(Mbuf::alloc(&pool).unwrap()).is_ok());
                output.transmit_batch();
            }
        };
        fill(&mut output);
        let sent = output.frames_sent;
        let start = Instant::from_millis(1000);
        let after = |ms| start + Duration::from_millis(ms);
        assert!(!output.drop_stalled(start));
        assert!(!output.drop_stalled(after(999)));
        assert!(output.batch.is_full());
        assert!(output.drop_stalled(after(1000)));
        assert!(output.batch.is_empty());
        fill(&mut output);
        assert!(!output.drop_stalled(after(2000)), "a stall is told once");
        assert!(output.batch.is_empty());
        assert_eq!(output.frames_sent, sent);
        drop((output, far));
    }
}
