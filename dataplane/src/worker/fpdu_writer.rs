//! Records of queue pairs in frames: FPDUs become header bytes and references to registered memory.
//!
//! ```text
//! PortSink::append -> FpduWriter::write_record -> QueuePair::build_fpdu -> FrameAssembler -> TxFrame
//! ```

use std::sync::Arc;

use dpdk::MbufCache;
use siw_iwarp::{BuildError, ExtBufRef, FpduRecord, FrameBuilder, TxRecord};
use siw_memory::RegisteredMemory;
use siw_shm::SharedMemory;
use siw_tcp::FrameMeta;

use super::conn_owner::ConnOwner;
use super::context::WorkerContext;
use super::ext_bufs::ExtBufRefs;
use super::worker_qp::{QpSlot, QpTable};
use crate::datapath::frame_sink::{RecordWriter, TxFrame};

/// Payload of at most this many bytes is copied into the header's buffer: below it a copy
/// costs less than a second buffer and its reference.
pub(super) const COPY_MAX: u32 = 512;

/// Bytes that are copied into one fresh buffer where a reference cannot be taken.
const COPY_PIECE: usize = 1024;

/// Buffers that one frame may need: header, and a reference with a trailer for each piece of
/// more than [`COPY_MAX`] bytes.
const BUFFERS_NEEDED: usize = 40;

/// A record that could not be built: its queue pair has to end.
pub(super) struct BuildFailure {
    pub(super) slot: QpSlot,
    pub(super) record: FpduRecord,
    pub(super) error: BuildError,
}

/// Writes the records of queue pairs into frames.
pub(super) struct FpduWriter<'a> {
    context: &'a mut WorkerContext,
    queue_pairs: &'a QpTable,
}

impl<'a> FpduWriter<'a> {
    #[inline]
    pub(super) fn new(context: &'a mut WorkerContext, queue_pairs: &'a QpTable) -> FpduWriter<'a> {
        FpduWriter {
            context,
            queue_pairs,
        }
    }
}

impl RecordWriter<TxRecord> for FpduWriter<'_> {
    #[inline]
    fn buffers_needed(_meta: &FrameMeta) -> usize {
        BUFFERS_NEEDED
    }

    #[inline]
    fn write_record(
        &mut self,
        frame: &mut TxFrame,
        cache: &mut MbufCache,
        user: u64,
        record: &TxRecord,
        offset: u32,
        len: u32,
    ) {
        if frame.meta.tso_segsz > 0 {
            // Each record is a wire segment.
            frame.references = 0;
        }
        let fpdu = match record {
            TxRecord::Stream(bytes) => {
                let part = bytes.get(offset as usize..offset as usize + len as usize);
                let part = part.unwrap_or(&[]);
                if let Some(room) = frame.reserve_room(cache, part.len()) {
                    room.copy_from_slice(part);
                }
                return;
            }
            TxRecord::Fpdu(fpdu) => fpdu,
        };
        let found = ConnOwner::from(user)
            .queue_pair()
            .and_then(|slot| Some((slot, self.queue_pairs.get(slot)?)));
        let Some((slot, queue_pair)) = found else {
            frame.is_broken = true;
            return;
        };
        let WorkerContext {
            keys,
            ext_bufs,
            flat_record,
            build_failures,
            ..
        } = &mut *self.context;
        let mut assembler = FrameAssembler {
            frame,
            cache,
            ext_bufs,
        };
        let is_whole = offset == 0 && len as usize == fpdu.wire_len();
        let built = if is_whole {
            queue_pair.protocol.build_fpdu(keys, fpdu, &mut assembler)
        } else {
            flat_record.clear();
            let mut flat = FlatRecord {
                bytes: flat_record,
                is_broken: false,
            };
            let built = queue_pair.protocol.build_fpdu(keys, fpdu, &mut flat);
            let part = flat.bytes.get(offset as usize..(offset + len) as usize);
            match part {
                Some(part) if !flat.is_broken => assembler.append_bytes(part),
                _ => assembler.frame.is_broken = true,
            }
            built
        };
        frame.bytes_left = frame.bytes_left.saturating_sub(len);
        if let Err(error) = built {
            frame.is_broken = true;
            build_failures.push(BuildFailure {
                slot,
                record: *fpdu,
                error,
            });
        }
    }
}

/// Appends the bytes of an FPDU to a frame.
struct FrameAssembler<'a> {
    frame: &'a mut TxFrame,
    cache: &'a mut MbufCache,
    ext_bufs: &'a mut ExtBufRefs,
}

impl FrameAssembler<'_> {
    /// References memory in place, or copies it.
    #[inline]
    fn append_region(
        &mut self,
        region: &Arc<SharedMemory>,
        at: usize,
        len: usize,
        ext_buf: ExtBufRef,
    ) {
        let frame = &mut *self.frame;
        if frame.takes_references && len > COPY_MAX as usize && frame.has_room_for_reference(len) {
            // The message counts the reference; without a buffer the frame is dropped, and TCP
            // retransmits.
            let Some(mut mbuf) = self.cache.alloc() else {
                frame.is_broken = true;
                return;
            };
            if self
                .ext_bufs
                .attach(ext_buf, region, at as u64, len as u16, &mut mbuf)
            {
                if frame.chain.push(mbuf).is_err() {
                    frame.is_broken = true;
                }
                frame.references += 1;
                return;
            }
            self.cache.free(mbuf);
        }
        self.copy_region(region, at, len);
    }

    #[inline]
    fn copy_region(&mut self, region: &Arc<SharedMemory>, at: usize, len: usize) {
        let (mut at, mut left) = (at, len);
        while left > 0 {
            let piece = match usize::from(self.frame.chain.tailroom()) {
                0 => left.min(COPY_PIECE),
                tailroom => left.min(tailroom),
            };
            let Some(room) = self.frame.reserve_room(self.cache, piece) else {
                return;
            };
            if region.read(at, room).is_err() {
                self.frame.is_broken = true;
                return;
            }
            at += piece;
            left -= piece;
        }
    }
}

impl FrameBuilder for FrameAssembler<'_> {
    #[inline]
    fn append_bytes(&mut self, bytes: &[u8]) {
        if let Some(room) = self.frame.reserve_room(self.cache, bytes.len()) {
            room.copy_from_slice(bytes);
        }
    }

    #[inline]
    fn append_memory(
        &mut self,
        mr: &RegisteredMemory,
        region_offset: u64,
        len: u32,
        ext_buf: ExtBufRef,
    ) {
        let (mut offset, mut left) = (region_offset, len as usize);
        while left > 0 {
            // One piece, unless pages were registered that do not lie side by side.
            let Ok((region, at, piece)) = mr.piece_at(offset, left) else {
                self.frame.is_broken = true;
                return;
            };
            self.append_region(region, at, piece, ext_buf);
            offset += piece as u64;
            left -= piece;
        }
    }

    #[inline]
    fn contiguous_room(&mut self, want: usize) -> usize {
        let tailroom = usize::from(self.frame.chain.tailroom());
        let is_odd = self.frame.even_segments && self.frame.chain.pkt_len() & 1 != 0;
        if tailroom >= want.min(COPY_MAX as usize) || (is_odd && tailroom > 0) {
            return tailroom.min(want);
        }
        // The buffer is full, or as good as full.
        if !self.frame.add_buffer(self.cache) {
            return 0;
        }
        usize::from(self.frame.chain.tailroom()).min(want)
    }

    #[inline]
    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        self.frame.reserve_room(self.cache, len)
    }
}

/// Collects a record in plain memory, for the rare segment that holds a part of one.
struct FlatRecord<'a> {
    bytes: &'a mut Vec<u8>,
    is_broken: bool,
}

impl FrameBuilder for FlatRecord<'_> {
    fn append_bytes(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    fn append_memory(
        &mut self,
        mr: &RegisteredMemory,
        region_offset: u64,
        len: u32,
        _ext_buf: ExtBufRef,
    ) {
        let at = self.bytes.len();
        self.bytes.resize(at + len as usize, 0);
        if mr.read_at(region_offset, &mut self.bytes[at..]).is_err() {
            self.is_broken = true;
        }
    }

    fn contiguous_room(&mut self, want: usize) -> usize {
        want
    }

    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        let at = self.bytes.len();
        self.bytes.resize(at + len, 0);
        self.bytes.get_mut(at..)
    }
}
