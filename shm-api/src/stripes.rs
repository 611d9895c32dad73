//! Copies a stretch of octets that leaves out something at a fixed distance: payload between MPA
//! markers (RFC 5044 section 4.3). Called by [`crate::Region::write_stripes`].
//!
//! Each piece is half a kilobyte, too short for the aligned loops of memcpy: unaligned stores cost
//! twice at every cache line. Here all stores but the first and the last of a piece are aligned.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m512i, _mm512_loadu_si512, _mm512_store_si512, _mm512_storeu_si512};

/// What lies between the octets that count.
#[derive(Debug, Clone, Copy)]
pub struct Stripes {
    /// Octets in front of the first gap.
    pub first: usize,
    /// Octets between gaps; at least one.
    pub stripe: usize,
    /// Octets of a gap.
    pub gap: usize,
}

impl Stripes {
    /// The pieces of `len` octets, gaps included: offset with gaps, offset without, length.
    #[inline]
    fn each(self, len: usize, mut f: impl FnMut(usize, usize, usize)) {
        let (mut from, mut to, mut n) = (0, 0, self.first.min(len));
        while from < len {
            f(from, to, n);
            from += n + self.gap;
            to += n;
            n = self.stripe.min(len.saturating_sub(from));
            if n == 0 {
                return;
            }
        }
    }

    /// Octets that count among `len`.
    #[inline]
    pub fn data_len(self, len: usize) -> usize {
        match len.checked_sub(self.first) {
            None => len,
            Some(rest) => {
                let every = self.stripe + self.gap;
                let last = (rest % every).saturating_sub(self.gap);
                self.first + rest / every * self.stripe + last
            }
        }
    }
}

/// Copies what counts of `len` octets at `src`; how many that are is [`Stripes::data_len`].
///
/// # Safety
///
/// `src` is valid for reads of `len` octets, `dst` for writes of `data_len(len)`, and the two do
/// not overlap.
#[inline]
pub(crate) unsafe fn copy(src: *const u8, len: usize, dst: *mut u8, stripes: Stripes) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has AVX-512F; the rest is the caller's promise.
        return unsafe { copy_avx512(src, len, dst, stripes) };
    }
    // SAFETY: `each` stays within `len` and `data_len(len)`; the rest is the caller's promise.
    stripes.each(len, |from, to, n| unsafe {
        std::ptr::copy_nonoverlapping(src.add(from), dst.add(to), n);
    });
}

/// # Safety
///
/// As [`copy`], on a processor with AVX-512F.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn copy_avx512(src: *const u8, len: usize, dst: *mut u8, stripes: Stripes) {
    const LINE: usize = 64;
    stripes.each(len, |from, to, n| {
        // SAFETY: `from + n <= len`, and `to + n` is at most what counts of it. With a line or
        // more, no access of a line reaches beyond the n octets.
        unsafe {
            let (s, d) = (src.add(from), dst.add(to));
            if n < LINE {
                return std::ptr::copy_nonoverlapping(s, d, n);
            }
            let head = _mm512_loadu_si512(s.cast::<__m512i>());
            let tail = _mm512_loadu_si512(s.add(n - LINE).cast::<__m512i>());
            _mm512_storeu_si512(d.cast::<__m512i>(), head);
            let mut i = LINE - d.addr() % LINE;
            while i + LINE <= n {
                let line = _mm512_loadu_si512(s.add(i).cast::<__m512i>());
                _mm512_store_si512(d.add(i).cast::<__m512i>(), line);
                i += LINE;
            }
            _mm512_storeu_si512(d.add(n - LINE).cast::<__m512i>(), tail);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_place_leaves_out_exactly_the_gaps() {
        let src: Vec<u8> = (0..2000u32).map(|i| (i * 7 + i / 256) as u8).collect();
        for first in [0, 1, 60, 63, 64, 65, 200, 507, 508] {
            let stripes = Stripes {
                first,
                stripe: 508,
                gap: 4,
            };
            for len in (0..1500).step_by(7).chain([508, 512, 513, 1024, 1448]) {
                let mut want = Vec::new();
                let mut at = 0;
                while at < len {
                    let n = if at == 0 { first } else { 508 };
                    want.extend(&src[at..(at + n).min(len)]);
                    at += n + 4;
                }
                let n = stripes.data_len(len);
                assert_eq!(n, want.len(), "{first} {len}");
                let mut dst = vec![0xaa; n + 130];
                let shift = (len + first) % 65;
                // SAFETY: 2000 octets to read, n + 130 - 64 to write.
                unsafe { copy(src.as_ptr(), len, dst.as_mut_ptr().add(shift), stripes) };
                assert_eq!(&dst[shift..shift + n], &want[..], "{first} {len}");
                assert!(
                    dst[..shift]
                        .iter()
                        .chain(&dst[shift + n..])
                        .all(|b| *b == 0xaa)
                );
            }
        }
    }
}
