//! Frames out: TCP's segments become mbuf chains, FPDUs become header bytes and references
//! to registered memory.
//!
//! ```text
//! Stack::flush -> begin(headers) -> append(record)* -> end -> TX batch -> tx_burst
//!                                      '-> QueuePair::build_fpdu -> append_bytes / append_memory
//! ```

use std::sync::Arc;

use dpdk::{ChainBuilder, Mbuf, MbufCache, TxBatch, TxOffload, TxQueue};
use siw_iwarp::{BuildError, ExtBufRef, FpduRecord, FrameBuilder, TxRecord};
use siw_memory::{KeyReader, RegisteredMemory};
use siw_shm::SharedMemory;
use siw_tcp::{FrameInfo, FrameMeta, FrameSink, RxChecksum, TxChecksum, checksum};

use super::conn_owner::ConnOwner;
use super::ext_bufs::ExtBufRefs;
use super::forward::ProxyTx;
use super::worker_qp::QpTable;
use crate::capture::{CaptureHandle, Direction};
use crate::datapath::rx_frame::RxFrame;
use crate::link_traits::LinkTraits;

/// Payload of at most this many bytes is copied into the header's buffer: below it a copy
/// costs less than a second buffer and its reference.
pub const COPY_MAX: u32 = 512;

/// Buffers that one frame may need: header, and a reference with a trailer for each piece of
/// more than [`COPY_MAX`] bytes.
const RESERVE: usize = 40;

/// Where a port's frames leave.
pub enum TxPath {
    Queue(TxQueue),
    /// The port has no queue for this worker: another one sends.
    Proxy(ProxyTx),
}

/// The sending half of a port.
pub struct PortOutput {
    exit: TxPath,
    pub batch: TxBatch,
    /// Frames to this device's own address; they never reach the port.
    pub loopback: Vec<Mbuf>,
    link: LinkTraits,
    pub tap: Option<CaptureHandle>,
    pub interface: u32,
    /// Frames sent since the worker last looked.
    pub sent: u64,
    scratch: Vec<u8>,
}

impl PortOutput {
    pub fn new(exit: TxPath, interface: u32, link: LinkTraits) -> PortOutput {
        PortOutput {
            exit,
            batch: TxBatch::new(),
            loopback: Vec::new(),
            link,
            tap: None,
            interface,
            sent: 0,
            scratch: Vec::new(),
        }
    }

    /// Hands the batch to the port; what does not fit stays.
    #[inline]
    pub fn burst(&mut self) {
        if !self.batch.is_empty() {
            let n = match &mut self.exit {
                TxPath::Queue(queue) => queue.tx_burst(&mut self.batch),
                TxPath::Proxy(through) => through.burst(&mut self.batch),
            };
            self.sent += n as u64;
        }
    }

    /// The loopback frames, as received: their checksums are our own.
    pub fn take_loopback(&mut self) -> impl Iterator<Item = (RxFrame, FrameInfo)> + use<> {
        let info = FrameInfo {
            checksum: RxChecksum::Good,
            rss_hash: 0,
        };
        let loopback = std::mem::take(&mut self.loopback);
        loopback.into_iter().map(move |m| (RxFrame::new(m), info))
    }

    /// A whole frame leaves with the next burst, or is looped back: with its checksum, or
    /// what the port needs to know to make it. `wall` is for captures, in nanoseconds since the
    /// epoch.
    #[inline]
    pub fn send(&mut self, mut mbuf: Mbuf, meta: &FrameMeta, cache: &mut MbufCache, wall: u64) {
        if meta.checksum == TxChecksum::Partial {
            complete_checksum(&mut mbuf, meta);
        }
        if let Some(tap) = &self.tap {
            let fix = meta.checksum == TxChecksum::Offload;
            tap.record_frame(self.interface, Direction::Outbound, wall, fix, |v| {
                for s in mbuf.segments() {
                    v.extend_from_slice(s);
                }
            });
        }
        if meta.self_addressed {
            self.loopback.push(mbuf);
            return;
        }
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
        if !self.link.multi_segs && mbuf.nb_segs() > 1 {
            let flat = mbuf.linearize(cache);
            cache.free(mbuf);
            match flat {
                Some(f) => mbuf = f,
                None => return,
            }
        }
        if let Err(back) = self.batch.push(mbuf) {
            cache.free(back);
        }
    }

    /// Asks the port to let go of what it has sent.
    pub fn release(&mut self) {
        if let TxPath::Queue(queue) = &mut self.exit {
            queue.done_cleanup(0);
        }
    }
}

/// A record that could not be built: its queue pair has to end.
pub struct BuildFailure {
    pub slot: u32,
    pub record: FpduRecord,
    pub error: BuildError,
}

/// Where TCP's frames go during one call into a stack.
pub struct Sink<'a> {
    pub out: &'a mut PortOutput,
    pub cache: &'a mut MbufCache,
    pub ext_bufs: &'a mut ExtBufRefs,
    pub keys: &'a KeyReader,
    pub qps: &'a QpTable,
    pub failures: &'a mut Vec<BuildFailure>,
    /// Nanoseconds since the epoch, for captures.
    pub wall: u64,
    frame: Option<Frame>,
}

struct Frame {
    chain: ChainBuilder,
    meta: FrameMeta,
    /// Payload bytes that are still to come, those of the record being built among them.
    left: u32,
    /// References in this wire segment.
    pieces: u16,
    /// As many as the port takes, and buffers of the whole frame.
    pieces_max: u16,
    chain_max: u16,
    even_buffers: bool,
    broken: bool,
}

impl Frame {
    /// A reference and what follows it in a buffer of its own still fit. What is left is
    /// copied otherwise, which needs a buffer for each kilobyte at most.
    #[inline]
    fn takes_reference(&self, len: usize) -> bool {
        if self.even_buffers && (self.chain.pkt_len() as usize | len) & 1 != 0 {
            return false;
        }
        let rest = self.left / 1024 + 3;
        self.pieces < self.pieces_max
            && u32::from(self.chain.nb_segs()) + rest <= u32::from(self.chain_max)
    }
}

impl<'a> Sink<'a> {
    #[allow(clippy::too_many_arguments, reason = "disjoint parts of the worker")]
    #[inline]
    pub fn new(
        out: &'a mut PortOutput,
        cache: &'a mut MbufCache,
        ext_bufs: &'a mut ExtBufRefs,
        keys: &'a KeyReader,
        qps: &'a QpTable,
        failures: &'a mut Vec<BuildFailure>,
        wall: u64,
    ) -> Sink<'a> {
        Sink {
            out,
            cache,
            ext_bufs,
            keys,
            qps,
            failures,
            wall,
            frame: None,
        }
    }
}

/// Appends to a frame under construction.
struct Builder<'a> {
    frame: &'a mut Frame,
    cache: &'a mut MbufCache,
    ext_bufs: &'a mut ExtBufRefs,
    external: bool,
}

impl Builder<'_> {
    #[inline]
    fn space(&mut self, n: usize) -> Option<&mut [u8]> {
        if usize::from(self.frame.chain.tailroom()) < n {
            let pushed = self
                .cache
                .alloc()
                .is_some_and(|m| self.frame.chain.push(m).is_ok());
            if !pushed {
                self.frame.broken = true;
                return None;
            }
        }
        let room = self.frame.chain.append_room(n as u16);
        if room.is_none() {
            self.frame.broken = true;
        }
        room
    }

    /// References memory in place, or copies it.
    #[inline]
    fn piece(&mut self, region: &Arc<SharedMemory>, at: usize, len: usize, owner: ExtBufRef) {
        if self.external && len > COPY_MAX as usize && self.frame.takes_reference(len) {
            // The owner counts the reference; without a buffer the frame is dropped and
            // repeated later.
            let Some(mut m) = self.cache.alloc() else {
                self.frame.broken = true;
                return;
            };
            if self
                .ext_bufs
                .attach(owner, region, at as u64, len as u16, &mut m)
            {
                if self.frame.chain.push(m).is_err() {
                    self.frame.broken = true;
                }
                self.frame.pieces += 1;
                return;
            }
            self.cache.free(m);
        }
        let (mut at, mut left) = (at, len);
        while left > 0 {
            let have = usize::from(self.frame.chain.tailroom());
            let n = if have == 0 {
                left.min(1024)
            } else {
                left.min(have)
            };
            let Some(room) = self.space(n) else { return };
            if region.read(at, room).is_err() {
                self.frame.broken = true;
                return;
            }
            at += n;
            left -= n;
        }
    }
}

impl FrameBuilder for Builder<'_> {
    #[inline]
    fn append_bytes(&mut self, b: &[u8]) {
        if let Some(room) = self.space(b.len()) {
            room.copy_from_slice(b);
        }
    }

    #[inline]
    fn append_memory(&mut self, mr: &RegisteredMemory, off: u64, len: u32, owner: ExtBufRef) {
        let (mut off, mut left) = (off, len as usize);
        while left > 0 {
            // One piece, unless pages were registered that do not lie side by side.
            let Ok((region, at, n)) = mr.piece_at(off, left) else {
                self.frame.broken = true;
                return;
            };
            self.piece(region, at, n, owner);
            off += n as u64;
            left -= n;
        }
    }

    #[inline]
    fn contiguous_room(&mut self, want: usize) -> usize {
        let have = usize::from(self.frame.chain.tailroom());
        let odd = self.frame.even_buffers && self.frame.chain.pkt_len() & 1 != 0;
        if have >= want.min(COPY_MAX as usize) || (odd && have > 0) {
            return have.min(want);
        }
        // The buffer is full, or as good as full.
        let Some(next) = self.cache.alloc() else {
            self.frame.broken = true;
            return 0;
        };
        if self.frame.chain.push(next).is_err() {
            self.frame.broken = true;
            return 0;
        }
        usize::from(self.frame.chain.tailroom()).min(want)
    }

    #[inline]
    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        self.space(len)
    }
}

/// Collects a record in plain memory, for the rare segment that holds a part of one.
struct Scratch<'a>(&'a mut Vec<u8>, bool);

impl FrameBuilder for Scratch<'_> {
    fn append_bytes(&mut self, b: &[u8]) {
        self.0.extend_from_slice(b);
    }
    fn append_memory(
        &mut self,
        mr: &RegisteredMemory,
        region_off: u64,
        len: u32,
        _owner: ExtBufRef,
    ) {
        let at = self.0.len();
        self.0.resize(at + len as usize, 0);
        if mr.read_at(region_off, &mut self.0[at..]).is_err() {
            self.1 = true;
        }
    }
    fn contiguous_room(&mut self, want: usize) -> usize {
        want
    }
    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        let at = self.0.len();
        self.0.resize(at + len, 0);
        self.0.get_mut(at..)
    }
}

impl FrameSink<TxRecord> for Sink<'_> {
    fn begin_frame(&mut self, headers: &[u8], meta: &FrameMeta) -> bool {
        self.begin_frame_with(headers.len(), meta, |room| room.copy_from_slice(headers))
    }

    #[inline]
    fn begin_frame_with(
        &mut self,
        len: usize,
        meta: &FrameMeta,
        fill: impl FnOnce(&mut [u8]),
    ) -> bool {
        if self.out.batch.is_full() {
            self.out.burst();
            if self.out.batch.is_full() {
                return false;
            }
        }
        if !self.cache.reserve(RESERVE) {
            return false;
        }
        let Some(head) = self.cache.alloc() else {
            return false;
        };
        let mut chain = ChainBuilder::new(head);
        let Some(room) = chain.append_room(len as u16) else {
            self.cache.free(chain.finish());
            return false;
        };
        fill(room);
        self.frame = Some(Frame {
            chain,
            meta: *meta,
            left: meta.payload_len,
            pieces: 0,
            pieces_max: self.out.link.max_segments.saturating_sub(2) / 2,
            chain_max: if meta.tso_segsz > 0 {
                self.out.link.max_tso_segments
            } else {
                self.out.link.max_segments
            },
            even_buffers: self.out.link.even_segments,
            broken: false,
        });
        true
    }

    #[inline]
    fn append_record(&mut self, user: u64, record: &TxRecord, offset: u32, len: u32) {
        let Some(frame) = &mut self.frame else { return };
        if frame.meta.tso_segsz > 0 {
            // Each record is a wire segment.
            frame.pieces = 0;
        }
        let mut builder = Builder {
            frame,
            cache: self.cache,
            ext_bufs: self.ext_bufs,
            external: self.out.link.external_buffers,
        };
        let fpdu = match record {
            TxRecord::Stream(bytes) => {
                let part = bytes.get(offset as usize..offset as usize + len as usize);
                builder.append_bytes(part.unwrap_or(&[]));
                return;
            }
            TxRecord::Fpdu(f) => f,
        };
        let Some(qp) = ConnOwner::from(user)
            .qp()
            .and_then(|slot| self.qps.get(slot))
        else {
            builder.frame.broken = true;
            return;
        };
        let built = if offset == 0 && len as usize == fpdu.wire_len() {
            qp.qp.build_fpdu(self.keys, fpdu, &mut builder)
        } else {
            self.out.scratch.clear();
            let mut scratch = Scratch(&mut self.out.scratch, false);
            let built = qp.qp.build_fpdu(self.keys, fpdu, &mut scratch);
            let part = scratch.0.get(offset as usize..(offset + len) as usize);
            match part {
                Some(part) if !scratch.1 => builder.append_bytes(part),
                _ => builder.frame.broken = true,
            }
            built
        };
        builder.frame.left = builder.frame.left.saturating_sub(len);
        if let Err(error) = built {
            builder.frame.broken = true;
            if let Some(slot) = ConnOwner::from(user).qp() {
                self.failures.push(BuildFailure {
                    slot,
                    record: *fpdu,
                    error,
                });
            }
        }
    }

    fn append_bytes(&mut self, b: &[u8]) {
        let Some(frame) = &mut self.frame else { return };
        Builder {
            frame,
            cache: self.cache,
            ext_bufs: self.ext_bufs,
            external: false,
        }
        .append_bytes(b);
    }

    #[inline]
    fn end_frame(&mut self) {
        let Some(Frame {
            chain,
            meta,
            broken,
            ..
        }) = self.frame.take()
        else {
            return;
        };
        let mbuf = chain.finish();
        if broken {
            // As if the network had lost it: TCP repeats, or the queue pair ends.
            self.cache.free(mbuf);
            return;
        }
        self.out.send(mbuf, &meta, self.cache, self.wall);
    }
}

fn complete_checksum(mbuf: &mut Mbuf, meta: &FrameMeta) {
    let headers = usize::from(meta.l2_len) + usize::from(meta.l3_len) + usize::from(meta.l4_len);
    let mut sum = checksum::OnesComplementSum::new();
    let mut skip = headers;
    for s in mbuf.segments() {
        let n = skip.min(s.len());
        sum.add(&s[n..]);
        skip -= n;
    }
    let data = mbuf.data_mut();
    let Some(head) = data.get(..headers) else {
        return;
    };
    let field = checksum::complete_tcp_checksum(head, meta, sum);
    let at = checksum::tcp_checksum_offset(meta);
    if let Some(place) = data.get_mut(at..at + 2) {
        place.copy_from_slice(&field);
    }
}
