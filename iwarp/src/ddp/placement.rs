//! The copy from the stream into registered memory: one pass over the received slices.

use crate::stream::RxStream;
use siw_memory::RegisteredMemory;

/// The region rejected bytes that its key had allowed: it is not writable for this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NotWritable;

/// Copies `len` bytes of the stream from `offset` to `region_off`, which
/// [`RegisteredMemory::check_access`] returned for this range.
#[inline]
pub(crate) fn place_payload(
    rx: &impl RxStream,
    offset: usize,
    len: usize,
    mr: &RegisteredMemory,
    region_off: u64,
) -> Result<(), NotWritable> {
    if rx.copy_to_memory(offset, len, mr, region_off) {
        Ok(())
    } else {
        Err(NotWritable)
    }
}
