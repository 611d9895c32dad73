//! From the stream into registered memory: one pass over the received slices.

use crate::stream::RxStream;
use siw_memory::RegisteredMemory;

/// The region refused bytes that its key had allowed: it is not writable for this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NotWritable;

/// Copies `len` stream bytes from `at` to `mr_off`, which [`Mr::check`] gave for this range.
#[inline]
pub(crate) fn place(
    rx: &impl RxStream,
    at: usize,
    len: usize,
    mr: &RegisteredMemory,
    mr_off: u64,
) -> Result<(), NotWritable> {
    let ok = rx.copy_to_memory(at, len, mr, mr_off);
    // Messages are placed front to back: the next FPDU goes where this one ends.
    mr.prefetch_at(mr_off + len as u64, len);
    if ok { Ok(()) } else { Err(NotWritable) }
}
