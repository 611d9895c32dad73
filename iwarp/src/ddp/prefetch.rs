//! Prefetches payload of the FPDUs that follow the one at hand.
//!
//! Why this is a file of its own: sender and receiver walk through a message in the same way, an FPDU
//! at a time with other work in between. A message that the caches do not hold costs both of them a
//! wait for each line, unless the lines are under way before the FPDU's turn: the processor's own
//! prefetchers start anew at every page, and the copy of one FPDU is too short for them to get ahead.

use siw_memory::RegisteredMemory;
use std::ops::Range;

/// How many FPDUs are prefetched ahead. With one, the lines come too late; with four, short messages
/// lose more than long ones gain.
const FPDUS_AHEAD: u32 = 3;

/// Payload of an FPDU for which it pays: of longer ones the processor has seen the stride after the
/// first lines, and more lines under way at a time only stall it.
const LONGEST: u32 = 2048;

/// Prefetches what comes soon in a message, of which an FPDU with `len` bytes of payload at `off` of
/// `mr` is at hand. `rest`: bytes of the message behind it, or more.
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

/// The bytes to prefetch, counted from the end of the FPDU at hand: each line of a message once, if
/// its FPDUs have the same length.
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
