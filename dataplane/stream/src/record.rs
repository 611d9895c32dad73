//! Records queued at TCP for a stream, and how they are copied into frames.

use dpdk::MbufCache;

use crate::pattern::StreamPattern;
use siwd::datapath::output::{RecordWriter, TxFrame};

/// Data queued at TCP for a connection.
pub(super) enum StreamRecord {
    /// `len` bytes of the pattern from offset `at`.
    Pattern { at: u64, len: u32 },
    /// Bytes to echo.
    Block(Vec<u8>),
}

impl StreamRecord {
    pub(super) fn len(&self) -> u32 {
        match self {
            StreamRecord::Pattern { len, .. } => *len,
            StreamRecord::Block(block) => block.len() as u32,
        }
    }
}

/// Writes the records of streams into frames.
#[derive(Clone, Copy)]
pub(super) struct StreamWriter {
    pub(super) pattern: StreamPattern,
}

impl RecordWriter<StreamRecord> for StreamWriter {
    #[inline]
    fn write_record(
        &mut self,
        frame: &mut TxFrame<'_>,
        cache: &mut MbufCache,
        _user: u64,
        record: &StreamRecord,
        offset: u32,
        len: u32,
    ) {
        match record {
            StreamRecord::Pattern { at, .. } => {
                let start = at + u64::from(offset);
                frame.fill_bytes(cache, len as usize, |done, room| {
                    self.pattern.fill(start + done as u64, room);
                });
            }
            StreamRecord::Block(block) => {
                let part = block.get(offset as usize..(offset + len) as usize);
                frame.append_bytes(cache, part);
            }
        }
    }
}
