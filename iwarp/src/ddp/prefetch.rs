//! Prefetching of payload for the FPDUs that follow the current one.
//!
//! Sender and receiver share this code: both walk through a message one FPDU at a time, with other
//! work in between. For a message that is not in the caches, each line would cost them a miss unless
//! its load was issued before the FPDU's turn: the processor's own prefetchers restart at every page,
//! and the copy of one FPDU is too short for them to get ahead.

use siw_memory::RegisteredMemory;
use std::ops::Range;

/// Number of FPDUs to prefetch ahead. With one, the lines arrive too late; with four, short messages
/// lose more than long ones gain.
const FPDUS_AHEAD: u32 = 3;

/// Longest FPDU payload for which prefetching pays: in longer ones the processor detects the stride
/// after the first lines, and more outstanding loads only stall it.
const LONGEST: u32 = 2048;

/// Prefetches payload for the next FPDUs of a message whose current FPDU has `len` bytes of payload
/// at `off` of `mr`. `rest`: bytes of the message after it, or more.
#[inline]
pub(crate) fn prefetch_behind(
    mr: &RegisteredMemory,
    off: u64,
    len: u32,
    rest: u32,
    is_first: bool,
) {
    let behind = range_behind(rest, len, is_first);
    mr.prefetch_at(off + u64::from(len) + u64::from(behind.start), behind.len());
}

/// Range to prefetch, counted from the end of the current FPDU. Covers each line of a message once if
/// its FPDUs have equal length.
#[inline]
fn range_behind(rest: u32, len: u32, is_first: bool) -> Range<u32> {
    if len > LONGEST {
        return 0..0;
    }
    let end = len * FPDUS_AHEAD;
    let start = if is_first { 0 } else { end - len };
    start..end.min(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ranges of a whole message, counted from its start.
    fn ranges_of(total: u32, len: u32) -> Vec<Range<u32>> {
        let starts = (0..total).step_by(len as usize);
        let ranges = starts.filter_map(|start| {
            let part = len.min(total - start);
            let next = start + part;
            let behind = range_behind(total - next, part, start == 0);
            (part == len && !behind.is_empty()).then(|| next + behind.start..next + behind.end)
        });
        ranges.collect()
    }

    #[test]
    fn each_byte_behind_the_first_fpdu_is_prefetched_once_three_fpdus_ahead() {
        for total in [1429, 2856, 2857, 65_536, 1 << 20] {
            let mut end = 1428;
            for (nth, range) in ranges_of(total, 1428).into_iter().enumerate() {
                assert_eq!(range.start, end, "{total}");
                end = range.end;
                assert_eq!(end, total.min(1428 * (nth as u32 + 4)));
            }
            assert_eq!(end, total);
        }
    }

    #[test]
    fn nothing_is_prefetched_of_long_fpdus_and_behind_the_end() {
        assert!(ranges_of(30_000, 8928).is_empty());
        assert!(range_behind(u32::MAX, u32::MAX, false).is_empty());
        assert!(range_behind(0, 1428, false).is_empty());
        assert!(range_behind(0, 0, true).is_empty());
    }
}
