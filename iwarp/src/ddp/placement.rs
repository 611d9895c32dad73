//! The copy from the stream into registered memory: one pass over the received slices.

use crate::stream::RxStream;
use siw_memory::RegisteredMemory;

/// The region refused bytes that its key had allowed: it is not writable for this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NotWritable;

/// Copies `len` bytes of the stream from `offset` to `region_off`, which [`RegisteredMemory::check`] gave for this
/// range.
#[inline]
pub(crate) fn place_payload(
    rx: &impl RxStream,
    offset: usize,
    len: usize,
    mr: &RegisteredMemory,
    region_off: u64,
) -> Result<(), NotWritable> {
    let is_written = rx.copy_to_memory(offset, len, mr, region_off);
    prefetch_next(mr, region_off + len as u64, len);
    if is_written { Ok(()) } else { Err(NotWritable) }
}

/// The segments of a message arrive front to back: the next FPDU goes where this one ends.
///
/// Out of line, because the receive path that this would be inlined into has no register to spare:
/// the counter of the loop would lie on the stack, and every line of the cache cost a store and a load.
#[inline(never)]
fn prefetch_next(mr: &RegisteredMemory, region_off: u64, len: usize) {
    mr.prefetch_at(region_off, len);
}
