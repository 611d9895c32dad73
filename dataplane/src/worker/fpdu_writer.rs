//! Writes records of queue pairs into frames: FPDUs become header bytes and references to registered
//! memory.
//!
//! ```text
//! PortSink::append -> FpduWriter::write_record -> QueuePair::build_fpdu -> FrameAssembler -> TxFrame
//! ```

use std::sync::Arc;

use dpdk::MbufCache;
use siw_iwarp::{BuildError, ExtBufRef, FpduRecord, FrameBuilder, TxRecord};
use siw_shm::SharedMemory;
use siw_tcp::FrameMeta;

use super::conn_owner::ConnOwner;
use super::context::WorkerContext;
use super::ext_bufs::ExtBufRefs;
use super::worker_qp::{QpSlot, QpTable, WorkerQp};
use crate::datapath::frame_sink::{RecordWriter, TxFrame};
use crate::link_traits::COPY_MAX;

/// Buffers that one frame may need: a header, and a reference with a trailer for each piece of more
/// than [`COPY_MAX`] bytes.
const BUFFERS_NEEDED: usize = 40;

/// Buffers that a super-segment may need: each FPDU of copied payload lies in one.
const BUFFERS_NEEDED_BY_TSO: usize = 64;

/// A record that could not be built; its queue pair has to end.
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
    fn buffers_needed(meta: &FrameMeta) -> usize {
        if meta.tso_segsz > 0 {
            BUFFERS_NEEDED_BY_TSO
        } else {
            BUFFERS_NEEDED
        }
    }

    #[inline(always)]
    fn write_record(
        &mut self,
        frame: &mut TxFrame,
        cache: &mut MbufCache,
        user: u64,
        record: &TxRecord,
        offset: u32,
        len: u32,
    ) {
        let run = match record {
            TxRecord::Stream(bytes) => {
                let part = bytes.get(offset as usize..offset as usize + len as usize);
                let part = part.unwrap_or(&[]);
                if let Some(room) = frame.reserve_room(cache, part.len()) {
                    room.copy_from_slice(part);
                }
                return;
            }
            TxRecord::Fpdus(run) => run,
        };
        let found = ConnOwner::from(user)
            .queue_pair()
            .and_then(|slot| Some((slot, self.queue_pairs.get(slot)?)));
        let Some((slot, queue_pair)) = found else {
            frame.is_broken = true;
            return;
        };
        let unit_len = run.unit_len();
        let (mut offset, mut left) = (offset, len);
        if left > unit_len && self.context.split_records.is_empty(slot) && offset % unit_len == 0 {
            let first = (offset / unit_len) as u16;
            let units = first..first + (left / unit_len) as u16;
            let mut assembler = FrameAssembler {
                frame,
                cache,
                ext_bufs: &mut self.context.ext_bufs,
            };
            let keys = &self.context.keys;
            let built = queue_pair
                .protocol
                .build_run(keys, run, units, &mut assembler);
            match built {
                Ok(built) => {
                    let len = u32::from(built) * unit_len;
                    (offset, left) = (offset + len, left - len);
                    frame.bytes_left = frame.bytes_left.saturating_sub(len);
                }
                Err((record, error)) => self.note_failure(frame, slot, &record, error),
            }
        }
        while left > 0 && !frame.is_broken {
            let (unit, from) = match run.count() {
                1 => (0, offset),
                _ => ((offset / unit_len) as u16, offset % unit_len),
            };
            let len = left.min(unit_len - from);
            let target = (&mut *frame, &mut *cache);
            self.write_fpdu((slot, queue_pair), target, &run.get(unit), (from, len));
            (offset, left) = (offset + len, left - len);
        }
    }
}

impl FpduWriter<'_> {
    /// Writes `len` bytes of an FPDU from `offset` on.
    #[inline(always)]
    fn write_fpdu(
        &mut self,
        (slot, queue_pair): (QpSlot, &WorkerQp),
        (frame, cache): (&mut TxFrame, &mut MbufCache),
        fpdu: &FpduRecord,
        (offset, len): (u32, u32),
    ) {
        if frame.meta.tso_segsz > 0 {
            // Each FPDU is a wire segment.
            frame.references = 0;
        }
        let is_whole = offset == 0 && len as usize == fpdu.wire_len();
        let built = if is_whole && self.context.split_records.is_empty(slot) {
            let mut assembler = FrameAssembler {
                frame,
                cache,
                ext_bufs: &mut self.context.ext_bufs,
            };
            let keys = &self.context.keys;
            queue_pair.protocol.build_fpdu(keys, fpdu, &mut assembler)
        } else {
            let part = (!is_whole).then_some((offset, len));
            let target = (&mut *frame, &mut *cache);
            write_part(self.context, (slot, queue_pair), target, fpdu, part)
        };
        frame.bytes_left = frame.bytes_left.saturating_sub(len);
        if let Err(error) = built {
            self.note_failure(frame, slot, fpdu, error);
        }
    }

    /// Drops the frame and records that the queue pair of the FPDU has to end.
    #[cold]
    fn note_failure(
        &mut self,
        frame: &mut TxFrame,
        slot: QpSlot,
        record: &FpduRecord,
        error: BuildError,
    ) {
        frame.is_broken = true;
        self.context.build_failures.push(BuildFailure {
            slot,
            record: *record,
            error,
        });
    }
}

/// Writes a record of a queue pair that may have split records: its `part` (offset and length), or the whole record.
#[cold]
fn write_part(
    context: &mut WorkerContext,
    (slot, queue_pair): (QpSlot, &WorkerQp),
    (frame, cache): (&mut TxFrame, &mut MbufCache),
    fpdu: &FpduRecord,
    part: Option<(u32, u32)>,
) -> Result<(), BuildError> {
    let WorkerContext {
        keys,
        ext_bufs,
        split_records,
        flat_record,
        ..
    } = context;
    let mut assembler = FrameAssembler {
        frame,
        cache,
        ext_bufs,
    };
    let (offset, len) = part.unwrap_or((0, fpdu.wire_len() as u32));
    if let Some(bytes) = split_records.get(slot, fpdu) {
        assembler.append_part(bytes, offset, len);
        return Ok(());
    }
    if part.is_none() {
        return queue_pair.protocol.build_fpdu(keys, fpdu, &mut assembler);
    }
    flat_record.clear();
    let mut flat = FlatRecord { bytes: flat_record };
    queue_pair.protocol.build_fpdu(keys, fpdu, &mut flat)?;
    split_records.insert(slot, fpdu, flat_record);
    assembler.append_part(flat_record, offset, len);
    Ok(())
}

/// Appends the bytes of an FPDU to a frame.
struct FrameAssembler<'a> {
    frame: &'a mut TxFrame,
    cache: &'a mut MbufCache,
    ext_bufs: &'a mut ExtBufRefs,
}

impl FrameAssembler<'_> {
    /// Appends a part of an FPDU that was built earlier.
    #[cold]
    fn append_part(&mut self, fpdu: &[u8], offset: u32, len: u32) {
        match fpdu.get(offset as usize..(offset + len) as usize) {
            Some(part) => self.append_bytes(part),
            None => self.frame.is_broken = true,
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
    fn append_reference(
        &mut self,
        region: &Arc<SharedMemory>,
        offset: usize,
        len: usize,
        ext_buf: ExtBufRef,
    ) -> bool {
        let frame = &mut *self.frame;
        if !frame.takes_references || len <= COPY_MAX as usize || !frame.has_room_for_reference(len)
        {
            return false;
        }
        // If no buffer is free, the caller's copy fails as well; the frame is dropped, and TCP
        // retransmits.
        let Some(mut mbuf) = self.cache.alloc() else {
            return false;
        };
        let is_attached =
            self.ext_bufs
                .attach(ext_buf, region, offset as u64, len as u16, &mut mbuf);
        if !is_attached {
            self.cache.free(mbuf);
            return false;
        }
        if frame.chain.push(mbuf).is_err() {
            frame.is_broken = true;
        }
        frame.references += 1;
        true
    }

    #[inline]
    fn contiguous_room(&mut self, want: usize) -> usize {
        let tailroom = usize::from(self.frame.chain.tailroom());
        let is_odd = self.frame.even_segments && self.frame.chain.pkt_len() & 1 != 0;
        if tailroom >= want.min(COPY_MAX as usize) || (is_odd && tailroom > 0) {
            return tailroom.min(want);
        }
        // The buffer is full or nearly full.
        if !self.frame.add_buffer(self.cache) {
            return 0;
        }
        usize::from(self.frame.chain.tailroom()).min(want)
    }

    #[inline]
    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        self.frame.reserve_room(self.cache, len)
    }

    /// Each FPDU of a super-segment lies within one buffer: it is built in one piece, and the peer on
    /// a ring pair reads it in one piece.
    #[inline(always)]
    fn reserve_in_one_piece(&mut self, len: usize) -> Option<&mut [u8]> {
        let frame = &mut *self.frame;
        let has_room = usize::from(frame.chain.tailroom()) >= len;
        if !has_room && (frame.meta.tso_segsz == 0 || !frame.add_buffer(self.cache)) {
            return None;
        }
        frame.chain.append_room(len as u16)
    }

    #[inline(always)]
    fn reserve_fpdus(&mut self, len: usize, most: usize) -> Option<&mut [u8]> {
        let frame = &mut *self.frame;
        if usize::from(frame.chain.tailroom()) < len
            && (frame.meta.tso_segsz == 0 || !frame.add_buffer(self.cache))
        {
            return None;
        }
        let fit = usize::from(frame.chain.tailroom()) / len;
        frame.chain.append_room((most.min(fit) * len) as u16)
    }

    #[cold]
    fn withdraw(&mut self, len: usize) {
        let is_withdrawn = u16::try_from(len).is_ok_and(|len| self.frame.chain.withdraw(len));
        self.frame.is_broken |= !is_withdrawn;
    }
}

/// Collects a record in plain memory, for the rare segment that holds only a part of one: see
/// `split_records.rs`.
struct FlatRecord<'a> {
    bytes: &'a mut Vec<u8>,
}

impl FrameBuilder for FlatRecord<'_> {
    fn append_bytes(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    fn append_reference(
        &mut self,
        _region: &Arc<SharedMemory>,
        _offset: usize,
        _len: usize,
        _ext_buf: ExtBufRef,
    ) -> bool {
        false
    }

    fn contiguous_room(&mut self, want: usize) -> usize {
        want
    }

    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        let at = self.bytes.len();
        self.bytes.resize(at + len, 0);
        self.bytes.get_mut(at..)
    }

    fn reserve_in_one_piece(&mut self, len: usize) -> Option<&mut [u8]> {
        self.reserve(len)
    }

    fn withdraw(&mut self, len: usize) {
        self.bytes.truncate(self.bytes.len().saturating_sub(len));
    }
}
