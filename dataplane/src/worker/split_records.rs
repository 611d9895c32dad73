//! FPDUs that are sent in parts. After a decrease of the path MTU, or to a peer whose window is
//! smaller than an FPDU, TCP sends a record in parts. They belong to one FPDU with one CRC, so they
//! have to come from one read of registered memory: the FPDU is built once, and its bytes are kept
//! until they are acknowledged. This is rare, so it may allocate; it takes no more memory than TCP has
//! bytes in flight.

use std::collections::HashMap;

use siw_iwarp::{FpduKind, FpduRecord, MessageSlot};

use super::slots::QpSlot;

/// Identifies an FPDU among those of a queue pair in flight.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct FpduKey {
    kind: FpduKind,
    slot: MessageSlot,
    offset: u32,
}

impl FpduKey {
    fn new(record: &FpduRecord) -> FpduKey {
        FpduKey {
            kind: record.kind,
            slot: record.slot,
            offset: record.offset,
        }
    }
}

/// Bytes of FPDUs that were sent in parts and are not acknowledged. Divided by queue pair, so that
/// those of one queue pair cost the others nothing.
#[derive(Default)]
pub(super) struct SplitRecords {
    /// By queue pair slot; shorter than the table of queue pairs.
    by_queue_pair: Vec<HashMap<FpduKey, Box<[u8]>>>,
}

impl SplitRecords {
    /// True if the queue pair has no FPDU in parts in flight, which is nearly always the case.
    #[inline]
    pub(super) fn is_empty(&self, queue_pair: QpSlot) -> bool {
        self.by_queue_pair
            .get(queue_pair.0 as usize)
            .is_none_or(HashMap::is_empty)
    }

    /// Bytes of an FPDU of which a part was sent before.
    pub(super) fn get(&self, queue_pair: QpSlot, record: &FpduRecord) -> Option<&[u8]> {
        let records = self.by_queue_pair.get(queue_pair.0 as usize)?;
        let bytes = records.get(&FpduKey::new(record))?;
        Some(bytes)
    }

    /// Keeps the bytes of an FPDU before its first part is sent; all later parts come from them.
    pub(super) fn insert(&mut self, queue_pair: QpSlot, record: &FpduRecord, bytes: &[u8]) {
        let place = queue_pair.0 as usize;
        if self.by_queue_pair.len() <= place {
            self.by_queue_pair.resize_with(place + 1, HashMap::new);
        }
        self.by_queue_pair[place].insert(FpduKey::new(record), bytes.into());
    }

    /// Removes an acknowledged FPDU.
    pub(super) fn remove(&mut self, queue_pair: QpSlot, record: &FpduRecord) {
        if let Some(records) = self.by_queue_pair.get_mut(queue_pair.0 as usize) {
            records.remove(&FpduKey::new(record));
        }
    }

    /// Removes the FPDUs of a queue pair whose stream has ended.
    pub(super) fn remove_queue_pair(&mut self, queue_pair: QpSlot) {
        if let Some(records) = self.by_queue_pair.get_mut(queue_pair.0 as usize) {
            *records = HashMap::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use siw_iwarp::mpa::marker::MarkerPosition;

    use super::*;

    #[test]
    fn records_of_one_queue_pair_are_not_looked_for_at_others() {
        let record = |offset| FpduRecord {
            kind: FpduKind::Request,
            is_last: false,
            ulpdu_len: 100,
            slot: MessageSlot(3),
            offset,
            marker_position: MarkerPosition::NO_MARKERS,
        };
        let (other, own) = (QpSlot(4), QpSlot(5));
        let mut records = SplitRecords::default();
        for offset in 0..1000 {
            records.insert(own, &record(offset), &[offset as u8]);
        }
        for queue_pair in [QpSlot(0), other, QpSlot(6)] {
            assert!(records.is_empty(queue_pair));
            assert_eq!(records.get(queue_pair, &record(7)), None);
            records.remove(queue_pair, &record(7));
            records.remove_queue_pair(queue_pair);
        }
        assert_eq!(records.get(own, &record(7)), Some(&[7][..]));
        records.remove(own, &record(7));
        assert_eq!(records.get(own, &record(7)), None);
        assert!(!records.is_empty(own));
        records.remove_queue_pair(own);
        assert!(records.is_empty(own));
    }
}
