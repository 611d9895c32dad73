//! Writes records of queue pairs into frames: FPDUs become header bytes and references to registered
//! memory.
//!
//! ```text
//! PortSink -> FpduWriter::write_record -> QueuePair::build_fpdus -> FrameAssembler -> TxFrame
//! ```

use std::sync::Arc;

use dpdk::MbufCache;
use siw_iwarp::{BuildError, ExtBufRef, FpduRecord, FpduRun, FrameBuilder, TxRecord};
use siw_shm::SharedMemory;

use super::conn_owner::ConnOwner;
use super::context::{BuildFailure, WorkerContext};
use super::ext_bufs::ExtBufRefs;
use super::slots::QpSlot;
use super::worker_qp::{QpTable, WorkerQp};
use crate::datapath::output::{RecordWriter, TxFrame};

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
    #[inline(always)]
    fn write_record(
        &mut self,
        frame: &mut TxFrame<'_>,
        cache: &mut MbufCache,
        user: u64,
        record: &TxRecord,
        offset: u32,
        len: u32,
    ) {
        let run = match record {
            TxRecord::Stream(bytes) => {
                let part = bytes.get(offset as usize..offset as usize + len as usize);
                return frame.append_bytes(cache, part);
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
        let units = run.whole_units(offset, len);
        let built = match units.filter(|_| self.context.split_records.is_empty(slot)) {
            Some(units) => {
                let mut assembler = FrameAssembler {
                    frame,
                    cache,
                    ext_bufs: &mut self.context.ext_bufs,
                };
                let keys = &self.context.keys;
                queue_pair
                    .protocol
                    .build_fpdus(keys, run, units, &mut assembler)
            }
            None => {
                let target = (&mut *frame, cache);
                write_parts(self.context, (slot, queue_pair), target, run, (offset, len))
            }
        };
        if let Err((record, error)) = built {
            self.note_failure(frame, slot, record, error);
        }
    }
}

impl FpduWriter<'_> {
    /// Drops the frame and records that the queue pair of the FPDU has to end.
    #[cold]
    fn note_failure(
        &mut self,
        frame: &mut TxFrame<'_>,
        slot: QpSlot,
        record: FpduRecord,
        error: BuildError,
    ) {
        frame.is_broken = true;
        self.context.build_failures.push(BuildFailure {
            slot,
            record,
            error,
        });
    }
}

/// Writes `len` bytes of a run from `offset` on, if the run or others of its queue pair are sent in
/// parts.
#[cold]
fn write_parts(
    context: &mut WorkerContext,
    (slot, queue_pair): (QpSlot, &WorkerQp),
    (frame, cache): (&mut TxFrame<'_>, &mut MbufCache),
    run: &FpduRun,
    (mut offset, mut len): (u32, u32),
) -> Result<(), (FpduRecord, BuildError)> {
    let unit_len = run.unit_len();
    while len > 0 && !frame.is_broken {
        let (unit, from) = ((offset / unit_len) as u16, offset % unit_len);
        let part_len = len.min(unit_len - from);
        let target = (&mut *frame, &mut *cache);
        write_part(
            context,
            (slot, queue_pair),
            target,
            (run, unit),
            (from, part_len),
        )?;
        (offset, len) = (offset + part_len, len - part_len);
    }
    Ok(())
}

/// Writes `len` bytes of an FPDU from `offset` on: from its kept bytes, if a part of it was sent before.
fn write_part(
    context: &mut WorkerContext,
    (slot, queue_pair): (QpSlot, &WorkerQp),
    (frame, cache): (&mut TxFrame<'_>, &mut MbufCache),
    (run, unit): (&FpduRun, u16),
    (offset, len): (u32, u32),
) -> Result<(), (FpduRecord, BuildError)> {
    let WorkerContext {
        keys,
        ext_bufs,
        split_records,
        flat_record,
        ..
    } = context;
    let fpdu = run.get(unit);
    let part = offset as usize..(offset + len) as usize;
    if let Some(bytes) = split_records.get(slot, &fpdu) {
        frame.append_bytes(cache, bytes.get(part));
        return Ok(());
    }
    let units = unit..unit + 1;
    if len == run.unit_len() {
        let mut assembler = FrameAssembler {
            frame,
            cache,
            ext_bufs,
        };
        let protocol = &queue_pair.protocol;
        return protocol.build_fpdus(keys, run, units, &mut assembler);
    }
    flat_record.clear();
    let mut flat = FlatRecord { bytes: flat_record };
    queue_pair
        .protocol
        .build_fpdus(keys, run, units, &mut flat)?;
    split_records.insert(slot, &fpdu, flat_record);
    frame.append_bytes(cache, flat_record.get(part));
    Ok(())
}

/// Appends the bytes of an FPDU to a frame.
struct FrameAssembler<'a, 'm> {
    frame: &'a mut TxFrame<'m>,
    cache: &'a mut MbufCache,
    ext_bufs: &'a mut ExtBufRefs,
}

impl FrameBuilder for FrameAssembler<'_, '_> {
    /// Each FPDU of a super-segment lies within one buffer: it is built in one piece, and the peer on
    /// a ring pair reads it in one piece.
    #[inline(always)]
    fn reserve_fpdus(&mut self, len: usize, most: usize) -> Option<&mut [u8]> {
        let frame = &mut *self.frame;
        if usize::from(frame.chain.tailroom()) < len
            && (frame.meta.tso_segsz == 0 || !frame.add_buffer(self.cache))
        {
            return None;
        }
        let tailroom = usize::from(frame.chain.tailroom());
        let count = if most == 1 {
            1
        } else {
            most.min(tailroom / len)
        };
        let room = frame.chain.append_room((count * len) as u16);
        room.filter(|room| !room.is_empty())
    }

    #[inline]
    fn reserve(&mut self, want: usize) -> Option<&mut [u8]> {
        self.frame.reserve(self.cache, want)
    }

    #[cold]
    fn withdraw(&mut self, len: usize) {
        let is_withdrawn = u16::try_from(len).is_ok_and(|len| self.frame.chain.withdraw(len));
        self.frame.is_broken |= !is_withdrawn;
    }

    #[inline]
    fn append_reference(
        &mut self,
        region: &Arc<SharedMemory>,
        offset: usize,
        len: usize,
        ext_buf: ExtBufRef,
    ) -> bool {
        let FrameAssembler {
            frame,
            cache,
            ext_bufs,
        } = self;
        // If no buffer is free, the caller's copy fails as well; the frame is dropped, and TCP
        // retransmits.
        frame.append_reference(len, || {
            let mut mbuf = cache.alloc()?;
            if ext_bufs.attach(ext_buf, region, offset as u64, len as u16, &mut mbuf) {
                return Some(mbuf);
            }
            cache.free(mbuf);
            None
        })
    }
}

/// Collects a record in plain memory, for the rare segment that holds only a part of one: see
/// `split_records.rs`.
struct FlatRecord<'a> {
    bytes: &'a mut Vec<u8>,
}

impl FrameBuilder for FlatRecord<'_> {
    fn reserve_fpdus(&mut self, len: usize, most: usize) -> Option<&mut [u8]> {
        self.reserve(len * most)
    }

    fn reserve(&mut self, want: usize) -> Option<&mut [u8]> {
        let at = self.bytes.len();
        self.bytes.resize(at + want, 0);
        self.bytes.get_mut(at..)
    }

    fn withdraw(&mut self, len: usize) {
        self.bytes.truncate(self.bytes.len().saturating_sub(len));
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
}
