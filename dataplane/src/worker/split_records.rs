//! FPDUs that leave in parts: a path that became narrow, or a peer whose window is shorter than an
//! FPDU, has TCP send a part of a record at a time. The parts are of one FPDU with one CRC, so they
//! have to come from one read of registered memory: the FPDU is built once, and its bytes are kept
//! until they are acknowledged. That is rare, so it may allocate; it takes no more than the bytes that
//! TCP has in flight.

use std::collections::HashMap;

use siw_iwarp::{FpduKind, FpduRecord, MessageSlot};

use super::worker_qp::QpSlot;

/// Names an FPDU among those in flight.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct FpduKey {
    queue_pair: QpSlot,
    kind: FpduKind,
    slot: MessageSlot,
    offset: u32,
}

impl FpduKey {
    fn new(queue_pair: QpSlot, record: &FpduRecord) -> FpduKey {
        FpduKey {
            queue_pair,
            kind: record.kind,
            slot: record.slot,
            offset: record.offset,
        }
    }
}

/// The bytes of FPDUs that were sent in parts and are not acknowledged.
#[derive(Default)]
pub(super) struct SplitRecords(HashMap<FpduKey, Box<[u8]>>);

impl SplitRecords {
    /// None is in flight, as nearly always.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The bytes of an FPDU, if a part of it was sent before.
    pub(super) fn get(&self, queue_pair: QpSlot, record: &FpduRecord) -> Option<&[u8]> {
        let bytes = self.0.get(&FpduKey::new(queue_pair, record))?;
        Some(bytes)
    }

    /// A part of an FPDU is about to be sent: all later ones come from these bytes.
    pub(super) fn insert(&mut self, queue_pair: QpSlot, record: &FpduRecord, bytes: &[u8]) {
        self.0
            .insert(FpduKey::new(queue_pair, record), bytes.into());
    }

    /// The FPDU is acknowledged.
    pub(super) fn remove(&mut self, queue_pair: QpSlot, record: &FpduRecord) {
        self.0.remove(&FpduKey::new(queue_pair, record));
    }

    /// The stream of the queue pair is over.
    pub(super) fn remove_queue_pair(&mut self, queue_pair: QpSlot) {
        if !self.0.is_empty() {
            self.0.retain(|key, _| key.queue_pair != queue_pair);
        }
    }
}
