//! Records in the queue, and their division into segments.

use std::collections::VecDeque;

/// A record as pushed by the upper layer.
pub(super) struct QueuedRecord<R> {
    /// The length of each unit in bytes, not 0.
    pub(super) unit_len: u32,
    /// Units, at least 1.
    pub(super) units: u16,
    /// Each unit ends a message.
    pub(super) ends_message: bool,
    pub(super) record: R,
}

impl<R> QueuedRecord<R> {
    /// Returns the length in bytes.
    #[inline]
    pub(super) fn len(&self) -> u32 {
        self.unit_len * u32::from(self.units)
    }

    /// Returns the position of an offset within its unit.
    #[inline]
    pub(super) fn offset_in_unit(&self, offset: u32) -> u32 {
        if self.units == 1 || offset == 0 {
            offset
        } else {
            offset % self.unit_len
        }
    }

    /// Returns the number of whole units in the first `len` bytes.
    #[inline]
    pub(super) fn units_in(&self, len: u32) -> u16 {
        (len / self.unit_len) as u16
    }

    /// Returns the number of bytes from `offset` on that can be divided into segments of `size`
    /// bytes: units of that length, or, if that is a full segment, the rest of a longer unit.
    #[inline]
    pub(super) fn equal_segments_in(&self, offset: u32, size: u32, emss: u32) -> u32 {
        if self.unit_len > emss && size == emss {
            self.unit_len - self.offset_in_unit(offset)
        } else if self.unit_len == size && self.offset_in_unit(offset) == 0 {
            self.len() - offset
        } else {
            0
        }
    }

    /// Returns how many of `room` bytes whole units fill from `offset` on, where a unit begins.
    #[inline]
    pub(super) fn whole_units(&self, offset: u32, room: u32) -> u32 {
        let left = self.len() - offset;
        if left <= room {
            left
        } else if self.units == 1 || room < self.unit_len {
            0
        } else {
            room - room % self.unit_len
        }
    }

    /// Returns whether a message ends within or at the end of the `len` bytes from `offset` on.
    #[inline]
    pub(super) fn ends_message_in(&self, offset: u32, len: u32) -> bool {
        self.ends_message && (offset + len == self.len() || len >= self.unit_len)
    }
}

/// The plan of the next new segment. Nothing changes until it is sent and
/// [`commit_plan`](super::SendBuffer::commit_plan) is called.
#[derive(Clone, Copy)]
pub(crate) struct SegmentPlan {
    pub len: u32,
    pub(super) ends_message: bool,
    /// The beginning of the segment after it.
    pub(super) next_record: u32,
    pub(super) next_offset: u32,
}

impl SegmentPlan {
    /// Adds the next `len` bytes of `record` to the segment.
    #[inline]
    pub(super) fn take<R>(&mut self, record: &QueuedRecord<R>, len: u32) {
        self.ends_message |= record.ends_message_in(self.next_offset, len);
        self.len += len;
        self.next_offset += len;
        if self.next_offset == record.len() {
            self.next_record = self.next_record.wrapping_add(1);
            self.next_offset = 0;
        }
    }
}

/// Returns the end of the `len` bytes from `offset` of record `record` on, and whether a message
/// ends in them.
#[inline]
pub(super) fn walk_records<R>(
    records: &VecDeque<QueuedRecord<R>>,
    base: u32,
    (mut record, mut offset): (u32, u32),
    mut len: u32,
) -> ((u32, u32), bool) {
    let mut push = false;
    while len > 0 {
        let Some(queued) = records.get(record.wrapping_sub(base) as usize) else {
            break;
        };
        let n = len.min(queued.len() - offset);
        push |= queued.ends_message_in(offset, n);
        len -= n;
        offset += n;
        if offset == queued.len() {
            (record, offset) = (record.wrapping_add(1), 0);
        }
    }
    ((record, offset), push)
}
