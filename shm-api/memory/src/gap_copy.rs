//! Copies between memory and a byte sequence that has gaps of four bytes at a fixed spacing.
//!
//! [`read_with_gaps`] copies memory into a frame and fills each gap on the way;
//! [`write_without_gaps`] copies a frame into memory and skips the gaps. The caller defines the
//! purpose of the gaps: iWARP keeps the markers of its streams in them.
//!
//! Gaps cut a frame into pieces of some hundred bytes. A copy and a CRC for each piece would cost
//! twice as much as for a frame without gaps, since memcpy never reaches its aligned loop. Here one
//! pass reads each vector of the source once, blends the gap in, stores the vector, and folds it into
//! the CRC. In the other direction, all stores except the first and the last of a piece are aligned.

#[cfg(target_arch = "x86_64")]
use super::crc_fold::{self, LINE_LEN};
use crate::crc;
use siw_shm::shared_memory::{POLLED_WORD, copy_to_polled};
use siw_shm::{OutOfBounds, SharedMemory};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Length of a gap: one 32-bit lane of a vector.
pub const GAP_LEN: usize = 4;

/// Positions of the gaps in a byte sequence: they begin `SPACING` bytes apart.
///
/// `SPACING` is a multiple of four and at least 128, so that no vector overlaps two gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gaps<const SPACING: usize> {
    /// Bytes of data before the first gap.
    pub first: usize,
}

impl<const SPACING: usize> Gaps<SPACING> {
    /// Bytes of data between two gaps.
    pub const DATA_LEN: usize = {
        assert!(SPACING >= 128 && SPACING.is_multiple_of(4));
        SPACING - GAP_LEN
    };

    /// Returns whether `len` bytes of data take `total` bytes with the gaps before and between them.
    /// The unsafe copies below rely on this check. It needs no division.
    #[inline]
    fn is_total_len(self, len: usize, total: usize) -> bool {
        let Some(gap_bytes) = total.checked_sub(len) else {
            return false;
        };
        let data_before = gap_bytes / GAP_LEN * Self::DATA_LEN;
        let end = self.first.saturating_add(data_before);
        gap_bytes.is_multiple_of(GAP_LEN)
            && len <= end
            && (gap_bytes == 0 || len > end - Self::DATA_LEN)
    }

    /// Visits the pieces of data in a sequence of `total` bytes: offset in the sequence, offset in
    /// the data, length.
    #[inline]
    fn for_each_piece(self, total: usize, mut visit: impl FnMut(usize, usize, usize)) {
        let (mut from, mut to, mut piece_len) = (0, 0, self.first.min(total));
        while from < total {
            visit(from, to, piece_len);
            from += piece_len + GAP_LEN;
            to += piece_len;
            piece_len = Self::DATA_LEN.min(total.saturating_sub(from));
            if piece_len == 0 {
                return;
            }
        }
    }
}

/// Copies the `len` bytes of data in `src` to `offset` of `region` without the gaps. If the length of
/// `src` is not that of data and gaps together, nothing is written and an error is returned.
#[inline]
pub fn write_without_gaps<const SPACING: usize>(
    region: &SharedMemory,
    offset: usize,
    len: usize,
    src: &[u8],
    gaps: Gaps<SPACING>,
) -> Result<(), OutOfBounds> {
    let dst = region.ptr_at(offset, len)?;
    if !region.is_writable() {
        return Err(OutOfBounds);
    }
    // SAFETY: dst is valid for len writable bytes. No Rust reference to the region's bytes exists, so
    // the two cannot overlap. A peer process that accesses the same bytes sees torn data at worst.
    match unsafe { copy_without_gaps(src, dst, len, gaps) } {
        true => Ok(()),
        false => Err(OutOfBounds),
    }
}

/// Copies `len` bytes from `offset` of `region` into `dst`, with gaps that `fill` provides for each
/// offset in `dst`; returns the running CRC32c over all of `dst`, if one was passed in. If the length
/// of `dst` is not that of data and gaps together, nothing is copied and an error is returned.
#[inline]
pub fn read_with_gaps<const SPACING: usize>(
    region: &SharedMemory,
    offset: usize,
    len: usize,
    dst: &mut [u8],
    gaps: Gaps<SPACING>,
    fill: impl Fn(usize) -> [u8; GAP_LEN],
    crc: Option<u32>,
) -> Result<u32, OutOfBounds> {
    let src = region.ptr_at(offset, len)?;
    // SAFETY: src is readable for len bytes, and no Rust reference points into the region. Bytes that
    // the peer changes meanwhile are read once: copy and CRC agree.
    unsafe { copy_with_gaps(src, len, dst, gaps, fill, crc) }.ok_or(OutOfBounds)
}

/// Copies `len` bytes at `src` into `dst`. `fill` provides the contents of each gap, given its offset
/// in `dst`. With the running CRC32c of earlier bytes, returns the CRC of those bytes and all of
/// `dst`; without one, returns zero. `None`: the length of `dst` is not that of data and gaps
/// together.
///
/// # Safety
///
/// `src` is valid for reads of `len` bytes and does not overlap `dst`.
#[inline]
unsafe fn copy_with_gaps<const SPACING: usize>(
    src: *const u8,
    len: usize,
    dst: &mut [u8],
    gaps: Gaps<SPACING>,
    fill: impl Fn(usize) -> [u8; GAP_LEN],
    crc: Option<u32>,
) -> Option<u32> {
    if !gaps.is_total_len(len, dst.len()) {
        return None;
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(crc) = crc
        && dst.len() >= crc_fold::MIN_LEN
        && gaps.first.is_multiple_of(GAP_LEN)
        && crc_fold::is_available()
    {
        // SAFETY: the processor has the required features; the lengths agree; the rest is the
        // caller's promise.
        return Some(unsafe { copy_with_gaps_avx512(src, dst, gaps, fill, crc) });
    }
    // SAFETY: the lengths agree; the rest is the caller's promise.
    unsafe { copy_with_gaps_portable(src, len, dst, gaps, fill) };
    Some(crc.map_or(0, |crc| crc::crc32c_append(crc, dst)))
}

/// # Safety
///
/// Same as for [`copy_with_gaps`].
unsafe fn copy_with_gaps_portable<const SPACING: usize>(
    src: *const u8,
    len: usize,
    dst: &mut [u8],
    gaps: Gaps<SPACING>,
    fill: impl Fn(usize) -> [u8; GAP_LEN],
) {
    let (mut from, mut at, mut until_gap) = (0, 0, gaps.first);
    while from < len {
        if until_gap == 0 {
            if let Some(gap) = dst.get_mut(at..at + GAP_LEN) {
                gap.copy_from_slice(&fill(at));
            }
            at += GAP_LEN;
            until_gap = Gaps::<SPACING>::DATA_LEN;
        }
        let piece_len = until_gap.min(len - from);
        let Some(to) = dst.get_mut(at..at + piece_len) else {
            return;
        };
        // SAFETY: `from + piece_len <= len`.
        unsafe { std::ptr::copy_nonoverlapping(src.add(from), to.as_mut_ptr(), piece_len) };
        from += piece_len;
        at += piece_len;
        until_gap -= piece_len;
    }
}

/// # Safety
///
/// Same as for [`copy_with_gaps`]; in addition, the lengths agree, `dst` has at least
/// [`crc_fold::MIN_LEN`] bytes, the first gap begins at a multiple of four, and
/// [`crc_fold::is_available`] returned true.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,vpclmulqdq,pclmulqdq,sse4.2")]
unsafe fn copy_with_gaps_avx512<const SPACING: usize>(
    src: *const u8,
    dst: &mut [u8],
    gaps: Gaps<SPACING>,
    fill: impl Fn(usize) -> [u8; GAP_LEN],
    crc: u32,
) -> u32 {
    let end = dst.len();
    let to = dst.as_mut_ptr();
    let (mut at, mut gap, mut from) = (0, gaps.first, src);
    // The next vector goes to `at`; `from` points to its bytes, provided that no gap is among them.
    let mut next_line = || {
        let line = if at + LINE_LEN <= gap {
            // SAFETY: a vector of data without a gap.
            unsafe { _mm512_loadu_si512(from.cast()) }
        } else {
            // SAFETY: the vector ends within `dst`, and its data within the bytes that the caller
            // promised.
            let line = unsafe { blend_gap(from, gap - at, fill(gap), u64::MAX) };
            gap += SPACING;
            from = from.wrapping_sub(GAP_LEN);
            line
        };
        // SAFETY: a vector of `dst`: the calls below request no more vectors than it has.
        unsafe { _mm512_storeu_si512(to.add(at).cast(), line) };
        at += LINE_LEN;
        from = from.wrapping_add(LINE_LEN);
        line
    };
    let first_quad = [next_line(), next_line(), next_line(), next_line()];
    let mut quad = crc_fold::begin_fold(!crc, first_quad);
    for _ in 1..end / crc_fold::QUAD_LEN {
        let next_quad = [next_line(), next_line(), next_line(), next_line()];
        quad = crc_fold::fold_quad(quad, next_quad);
    }
    let mut folded = crc_fold::join_quad(quad);
    for _ in 0..end / LINE_LEN % 4 {
        folded = crc_fold::fold_line(folded, next_line());
    }
    let remainder = crc_fold::fold_remainder(folded);
    let left = end - at;
    let within = (1 << left) - 1;
    let mut last = [0u8; LINE_LEN];
    // SAFETY: `left` bytes of data, and a gap if there is one; the rest of `dst`; then a vector of
    // `last`.
    unsafe {
        let line = if gap < end {
            blend_gap(from, gap - at, fill(gap), within)
        } else {
            _mm512_maskz_loadu_epi8(within, from.cast())
        };
        _mm512_mask_storeu_epi8(to.add(at).cast(), within, line);
        _mm512_storeu_si512(last.as_mut_ptr().cast(), line);
    }
    !crc_fold::continue_short(remainder, &last[..left])
}

/// Builds a vector with a gap at its byte `at`, a multiple of four: the data at `from` up to the gap,
/// and the data that follows it after the gap. Reads only the bytes selected by `within`.
///
/// # Safety
///
/// The selected data is readable.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn blend_gap(from: *const u8, at: usize, gap: [u8; GAP_LEN], within: u64) -> __m512i {
    let before = (1u64 << at) - 1;
    let behind = u64::MAX << at << GAP_LEN;
    let line = _mm512_set1_epi32(i32::from_le_bytes(gap));
    // SAFETY: the masks exclude everything that is not data of this vector.
    unsafe {
        let line = _mm512_mask_loadu_epi8(line, before & within, from.cast());
        _mm512_mask_loadu_epi8(line, behind & within, from.wrapping_sub(GAP_LEN).cast())
    }
}

/// Copies the `len` bytes of data in `src` to `dst` without the gaps. `false`: the length of `src` is
/// not that of data and gaps together, and nothing was copied.
///
/// # Safety
///
/// `dst` is valid for writes of `len` bytes and does not overlap `src`.
#[inline]
unsafe fn copy_without_gaps<const SPACING: usize>(
    src: &[u8],
    dst: *mut u8,
    len: usize,
    gaps: Gaps<SPACING>,
) -> bool {
    if !gaps.is_total_len(len, src.len()) {
        return false;
    }
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has AVX-512F; the lengths agree; the rest is the caller's promise.
        unsafe { copy_without_gaps_avx512(src, dst, gaps) };
        return true;
    }
    // SAFETY: the pieces lie within `src`, and their total length is `len`.
    gaps.for_each_piece(src.len(), |from, to, piece_len| unsafe {
        copy_to_polled(src.as_ptr().add(from), dst.add(to), piece_len);
    });
    true
}

/// # Safety
///
/// Same as for [`copy_without_gaps`], with lengths that agree, on a processor with AVX-512F.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn copy_without_gaps_avx512<const SPACING: usize>(
    src: &[u8],
    dst: *mut u8,
    gaps: Gaps<SPACING>,
) {
    gaps.for_each_piece(src.len(), |from, to, piece_len| {
        // SAFETY: the piece lies within `src`, and its destination within the bytes of `dst`. For a
        // piece of at least one vector, no access of a whole vector reaches beyond the piece.
        unsafe {
            let is_last = from + piece_len == src.len();
            let (from, to) = (src.as_ptr().add(from), dst.add(to));
            if piece_len < LINE_LEN + POLLED_WORD {
                return copy_to_polled(from, to, piece_len);
            }
            // No vector stores the last word of the data.
            let polled_len = if is_last { POLLED_WORD } else { 0 };
            let piece_len = piece_len - polled_len;
            let head = _mm512_loadu_si512(from.cast::<__m512i>());
            let tail = _mm512_loadu_si512(from.add(piece_len - LINE_LEN).cast::<__m512i>());
            _mm512_storeu_si512(to.cast::<__m512i>(), head);
            let mut done = LINE_LEN - to.addr() % LINE_LEN;
            while done + LINE_LEN <= piece_len {
                let line = _mm512_loadu_si512(from.add(done).cast::<__m512i>());
                _mm512_store_si512(to.add(done).cast::<__m512i>(), line);
                done += LINE_LEN;
            }
            _mm512_storeu_si512(to.add(piece_len - LINE_LEN).cast::<__m512i>(), tail);
            if is_last {
                copy_to_polled(from.add(piece_len), to.add(piece_len), polled_len);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPACING: usize = 512;
    const DATA_LEN: usize = SPACING - GAP_LEN;

    fn sample_bytes(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 7 + i / 256) as u8).collect()
    }

    /// Contents of a gap at `offset` in these tests.
    fn fill(offset: usize) -> [u8; GAP_LEN] {
        (0x5a00_0000 + offset as u32).to_be_bytes()
    }

    /// `data` with gaps, built byte by byte.
    fn data_with_gaps(data: &[u8], first: usize) -> Vec<u8> {
        let (mut out, mut until_gap) = (Vec::new(), first);
        for byte in data {
            if until_gap == 0 {
                out.extend(fill(out.len()));
                until_gap = DATA_LEN;
            }
            out.push(*byte);
            until_gap -= 1;
        }
        out
    }

    #[test]
    fn copy_with_gaps_fills_gaps_and_continues_crc() {
        let src = sample_bytes(3000);
        for first in [0, 1, 2, 3, 60, 61, 62, 63, 64, 65, 200, 444, 507, 508] {
            for len in (1..1500).step_by(7).chain([508, 509, 512, 1424, 2999]) {
                let gaps = Gaps::<SPACING> { first };
                let want = data_with_gaps(&src[..len], first);
                let total = want.len();
                assert!((0..total + 9).all(|n| gaps.is_total_len(len, n) == (n == total)));
                for crc in [None, Some(0), Some(0xdead_beef)] {
                    let mut dst = vec![0xaa; total + 2];
                    // A separate copy, so that valgrind detects any access beyond it.
                    let own = src[..len].to_vec();
                    // SAFETY: `len` bytes are readable.
                    let got = unsafe {
                        copy_with_gaps(own.as_ptr(), len, &mut dst[1..=total], gaps, fill, crc)
                    };
                    assert!(dst[1..=total] == want[..], "{first} {len}");
                    assert_eq!((dst[0], dst[total + 1]), (0xaa, 0xaa));
                    let sum = crc.map_or(0, |crc| ::crc32c::crc32c_append(crc, &want));
                    assert_eq!(got, Some(sum), "{first} {len}");
                }
            }
        }
    }

    #[test]
    fn copy_without_gaps_leaves_out_exactly_the_gaps() {
        let data = sample_bytes(2000);
        for first in [0, 1, 60, 63, 64, 65, 200, 507, 508] {
            let gaps = Gaps::<SPACING> { first };
            for len in (0..1500).step_by(7).chain([508, 509, 512, 1016, 1424]) {
                let src = data_with_gaps(&data[..len], first);
                let mut dst = vec![0xaa; len + 130];
                let shift = (len + first) % 65;
                // SAFETY: at least `len` bytes are writable from `shift` on.
                assert!(unsafe { copy_without_gaps(&src, dst.as_mut_ptr().add(shift), len, gaps) });
                assert_eq!(&dst[shift..shift + len], &data[..len], "{first} {len}");
                let (before, behind) = (&dst[..shift], &dst[shift + len..]);
                assert!(before.iter().chain(behind).all(|byte| *byte == 0xaa));
            }
        }
    }

    #[test]
    fn lengths_that_disagree_copy_nothing() {
        let data = sample_bytes(1024);
        let gaps = Gaps::<SPACING> { first: 100 };
        let mut dst = [0xaa; 1024];
        // SAFETY: 600 bytes are readable and 600 writable.
        unsafe {
            let refused = copy_with_gaps(data.as_ptr(), 600, &mut dst[..600], gaps, fill, Some(0));
            assert_eq!(refused, None);
            assert!(!copy_without_gaps(
                &data[..600],
                dst.as_mut_ptr(),
                600,
                gaps
            ));
        }
        assert!(dst.iter().all(|byte| *byte == 0xaa));
    }
}
