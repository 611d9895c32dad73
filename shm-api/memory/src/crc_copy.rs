//! Copies out of shared memory with the CRC32c of the copied bytes, in a single pass.
//!
//! The owner of registered memory may write to it at any time. If a copy and a CRC each read the
//! memory, they can disagree, and the peer then treats the frame as damaged. Here each byte is read
//! once: the stored bytes and the CRC come from the same load, or the CRC is computed over the
//! private copy. This is also faster than two passes, since the bytes pass through the cache once.

use crate::crc_fold::{self, LINE_LEN};
use crate::{crc, crc_streams};
use siw_shm::shared_memory::copy_bytes;
use siw_shm::{OutOfBounds, SharedMemory};
use std::arch::x86_64::*;
use std::ops::Range;

/// Copies `dst.len()` bytes at `offset` of `region` into `dst`; returns the CRC32c of earlier bytes
/// with CRC `crc` followed by the bytes in `dst`.
#[inline]
pub fn read_with_crc(
    region: &SharedMemory,
    offset: usize,
    dst: &mut [u8],
    crc: u32,
) -> Result<u32, OutOfBounds> {
    let src = region.ptr_at(offset, dst.len())?;
    // SAFETY: src is readable for dst.len() bytes, and no Rust reference points into the region, so
    // the two cannot overlap. Bytes that the peer changes meanwhile are read once: copy and CRC
    // agree.
    Ok(unsafe { copy_with_crc(src, dst, crc) })
}

/// Copies `place.len()` bytes at `offset` of `region` to `place` of `bytes`; returns the CRC32c of
/// all of `bytes` afterwards.
///
/// Why it is fast: short copies finish before their CRC begins, so a single CRC covers everything.
///
/// # Panics
/// `place` does not lie within `bytes`.
#[inline(always)]
pub fn read_between_with_crc(
    region: &SharedMemory,
    offset: usize,
    bytes: &mut [u8],
    place: Range<usize>,
) -> Result<u32, OutOfBounds> {
    if !has_single_pass(place.len()) {
        region.read(offset, &mut bytes[place])?;
        return Ok(crc::crc32c(bytes));
    }
    let crc = crc::crc32c(&bytes[..place.start]);
    let end = place.end;
    let crc = read_with_crc(region, offset, &mut bytes[place], crc)?;
    Ok(crc::crc32c_append(crc, &bytes[end..]))
}

/// Returns whether a copy of `len` bytes and its CRC are faster in a single pass than in two, by the
/// kernel of this processor.
#[inline]
fn has_single_pass(len: usize) -> bool {
    match crc::chosen_kernel() {
        crc::FOLD => len >= crc_fold::MIN_LEN,
        crc::INSTRUCTIONS => len >= crc_streams::MIN_COPY,
        _ => false,
    }
}

/// Copies `dst.len()` bytes at `src` into `dst`, and continues `crc` over them.
///
/// # Safety
///
/// `src` is valid for reads of `dst.len()` bytes and does not overlap `dst`.
#[inline]
unsafe fn copy_with_crc(src: *const u8, dst: &mut [u8], crc: u32) -> u32 {
    if has_single_pass(dst.len()) {
        return match crc::chosen_kernel() {
            // SAFETY: the processor has the features of the chosen kernel; the rest is the caller's
            // promise.
            crc::FOLD => unsafe { copy_with_crc_avx512(src, dst, crc) },
            // SAFETY: as before.
            _ => unsafe { crc_streams::copy_in_parts(crc, src, dst.as_mut_ptr(), dst.len()) },
        };
    }
    // SAFETY: the caller's promise.
    unsafe { copy_bytes(src, dst.as_mut_ptr(), dst.len()) };
    crc::crc32c_append(crc, dst)
}

/// # Safety
///
/// Same as for [`copy_with_crc`]; in addition, `dst` has at least [`crc_fold::MIN_LEN`] bytes, and
/// [`crc_fold::is_available`] returned true.
#[target_feature(enable = "avx512f,avx512bw,vpclmulqdq,pclmulqdq,sse4.2")]
unsafe fn copy_with_crc_avx512(src: *const u8, dst: &mut [u8], crc: u32) -> u32 {
    let len = dst.len();
    let to = dst.as_mut_ptr();
    let copy_line = |at: usize| {
        // SAFETY: `at + LINE_LEN <= len` in each call below.
        unsafe {
            let line = _mm512_loadu_si512(src.add(at).cast());
            _mm512_storeu_si512(to.add(at).cast(), line);
            line
        }
    };
    let copy_quad = |at: usize| {
        [
            copy_line(at),
            copy_line(at + LINE_LEN),
            copy_line(at + 2 * LINE_LEN),
            copy_line(at + 3 * LINE_LEN),
        ]
    };
    let mut quad = crc_fold::begin_fold(!crc, copy_quad(0));
    let mut done = crc_fold::QUAD_LEN;
    while done + crc_fold::QUAD_LEN <= len {
        quad = crc_fold::fold_quad(quad, copy_quad(done));
        done += crc_fold::QUAD_LEN;
    }
    let mut folded = crc_fold::join_quad(quad);
    while done + LINE_LEN <= len {
        folded = crc_fold::fold_line(folded, copy_line(done));
        done += LINE_LEN;
    }
    let remainder = crc_fold::fold_remainder(folded);
    let left = len - done;
    if left == 0 {
        return !remainder;
    }
    let within = (1u64 << left) - 1;
    let mut last = [0u8; LINE_LEN];
    // SAFETY: the mask selects `left` bytes, which both ends have; then one vector of `last`.
    unsafe {
        let line = _mm512_maskz_loadu_epi8(within, src.add(done).cast());
        _mm512_mask_storeu_epi8(to.add(done).cast(), within, line);
        _mm512_storeu_si512(last.as_mut_ptr().cast(), line);
    }
    !crc_fold::continue_short(remainder, &last[..left])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn sample_bytes(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 7 + i / 256) as u8).collect()
    }

    #[test]
    fn copy_and_crc_agree_with_two_passes_at_every_length() {
        let data = sample_bytes(3000);
        for len in (0..700).chain([1424, 1428, 1460, 2047, 2048, 2999]) {
            for crc in [0, 1, 0xdead_beef] {
                // A separate copy, so that valgrind detects any access beyond it.
                let own = data[..len].to_vec();
                let mut dst = vec![0xaa; len + 2];
                // SAFETY: `len` bytes are readable.
                let got = unsafe { copy_with_crc(own.as_ptr(), &mut dst[1..=len], crc) };
                assert_eq!(got, ::crc32c::crc32c_append(crc, &own), "{len}");
                if crc_streams::is_available() {
                    // The kernel of other processors too.
                    dst[1..=len].fill(0);
                    let to = dst[1..=len].as_mut_ptr();
                    // SAFETY: as before, and both have `len` bytes.
                    let streams = unsafe { crc_streams::copy_in_parts(crc, own.as_ptr(), to, len) };
                    assert_eq!(streams, got, "{len}");
                }
                assert!(dst[1..=len] == own[..], "{len}");
                assert_eq!((dst[0], dst[len + 1]), (0xaa, 0xaa), "{len}");
            }
        }
    }

    #[test]
    fn crc_covers_what_lies_around_the_copy() {
        let region = SharedMemory::new_anonymous(4096).expect("memory");
        region.write(5, &sample_bytes(2000)).expect("in range");
        for len in [0, 1, 64, 255, 256, 1424, 2000] {
            for behind in [0, 3] {
                let mut bytes = vec![9; 16 + len + behind];
                let crc = read_between_with_crc(&region, 5, &mut bytes, 16..16 + len);
                assert_eq!(bytes[16..16 + len], sample_bytes(2000)[..len]);
                assert!(bytes[..16].iter().all(|byte| *byte == 9));
                assert_eq!(crc, Ok(::crc32c::crc32c(&bytes)), "{len}");
            }
        }
    }

    #[test]
    fn crc_is_that_of_the_copy_while_the_memory_changes() {
        let region = Arc::new(SharedMemory::new_anonymous(4096).expect("memory"));
        let is_over = Arc::new(AtomicBool::new(false));
        let writer = {
            let (region, is_over) = (region.clone(), is_over.clone());
            std::thread::spawn(move || {
                let mut round = 0u8;
                while !is_over.load(Ordering::Relaxed) {
                    round = round.wrapping_add(1);
                    region.write(0, &[round; 2048]).expect("in range");
                }
            })
        };
        let mut dst = [0; 2048];
        for round in 0..40_000 {
            let len = [40, 255, 256, 1000, 1428, 2048][round % 6];
            let crc = read_with_crc(&region, 0, &mut dst[..len], 7).expect("in range");
            assert_eq!(crc, ::crc32c::crc32c_append(7, &dst[..len]), "{len}");
        }
        is_over.store(true, Ordering::Relaxed);
        writer.join().expect("the writer ends");
    }

    #[test]
    fn nothing_is_read_beyond_the_region() {
        let region = SharedMemory::new_anonymous(4096).expect("memory");
        let mut dst = [0; 300];
        assert!(read_with_crc(&region, 4096 - 300, &mut dst, 0).is_ok());
        assert!(read_with_crc(&region, 4096 - 299, &mut dst, 0).is_err());
    }
}
