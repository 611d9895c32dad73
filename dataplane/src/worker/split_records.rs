//! FPDUs that are sent in parts. After a decrease of the path MTU, or to a peer whose window is
//! smaller than an FPDU, TCP sends a record in parts. They belong to one FPDU with one CRC, so they
//! have to come from one read of registered memory: the FPDU is built once, and its bytes are kept
//! until they are acknowledged. This is rare, so it may allocate; it takes no more memory than TCP has
//! bytes in flight.

use std::collections::HashMap;

use siw_iwarp::{FpduKind, FpduRecord, MessageSlot};

use super::worker_qp::QpSlot;

/// Identifies an FPDU among those in flight.
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

/// Bytes of FPDUs that were sent in parts and are not acknowledged.
#[derive(Default)]
pub(super) struct SplitRecords(HashMap<FpduKey, Box<[u8]>>);

impl SplitRecords {
    /// True if no FPDU in parts is in flight, which is nearly always the case.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Bytes of an FPDU of which a part was sent before.
    pub(super) fn get(&self, queue_pair: QpSlot, record: &FpduRecord) -> Option<&[u8]> {
        let bytes = self.0.get(&FpduKey::new(queue_pair, record))?;
        Some(bytes)
    }

    /// Keeps the bytes of an FPDU before its first part is sent; all later parts come from them.
    pub(super) fn insert(&mut self, queue_pair: QpSlot, record: &FpduRecord, bytes: &[u8]) {
        self.0
            .insert(FpduKey::new(queue_pair, record), bytes.into());
    }

    /// Removes an acknowledged FPDU.
    pub(super) fn remove(&mut self, queue_pair: QpSlot, record: &FpduRecord) {
        self.0.remove(&FpduKey::new(queue_pair, record));
    }

    /// Removes the FPDUs of a queue pair whose stream has ended.
    pub(super) fn remove_queue_pair(&mut self, queue_pair: QpSlot) {
        if !self.0.is_empty() {
            self.0.retain(|key, _| key.queue_pair != queue_pair);
        }
    }
}
