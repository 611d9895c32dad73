//! Copies memory into a frame and leaves a marker wherever the stream wants one: payload of FPDUs
//! with MPA markers (RFC 5044 section 4.3). Called by [`crate::Region::weave`]
//! for the sender.
//!
//! Markers cut a full FPDU into pieces of half a kilobyte. A CRC of each piece, and a copy or a
//! reference of each, cost twice what the FPDU costs without markers. Here one pass reads every
//! line of the payload once, blends markers in, stores the line, and folds it into the CRC.

#[cfg(target_arch = "x86_64")]
use super::crc_fold::{self, LINE};
use crate::crc;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Where the markers of a piece of payload stand, and what they say.
#[derive(Debug, Clone, Copy)]
pub struct Weave {
    /// Octets of payload in front of the first marker; not more than lie between two.
    pub first: usize,
    /// Octets from the start of the FPDU to the start of this piece: what the FPDUPTR of a marker
    /// there would be.
    pub back: usize,
}

impl Weave {
    /// Distance of markers.
    pub const INTERVAL: usize = 512;
    /// Octets of a marker: 16 reserved bits, 16 bits FPDUPTR.
    pub const MARKER: usize = 4;
    /// Octets between two markers.
    pub const DATA: usize = Self::INTERVAL - Self::MARKER;

    /// Octets that `len` octets take together with the markers in front of and between them.
    #[inline]
    pub fn woven_len(self, len: usize) -> usize {
        if len <= self.first {
            len
        } else {
            len + Self::MARKER * (1 + (len - self.first - 1) / Self::DATA)
        }
    }

    /// Of how many octets [`Weave::woven_len`] is at most `woven`.
    #[inline]
    pub fn payload_len(self, woven: usize) -> usize {
        match woven.checked_sub(self.first) {
            None => woven,
            Some(rest) => {
                let last = (rest % Self::INTERVAL).saturating_sub(Self::MARKER);
                self.first + rest / Self::INTERVAL * Self::DATA + last
            }
        }
    }

    /// Octets of payload between `len` of them, which are `woven` with their markers, and the next
    /// marker.
    #[inline]
    pub fn until_marker(self, len: usize, woven: usize) -> usize {
        let markers = (woven - len) / Self::MARKER;
        self.first + markers * Self::DATA - len
    }

    /// Whether `woven` is [`Weave::woven_len`] of `len`; it takes no division to see that.
    #[inline]
    pub fn is_woven(self, len: usize, woven: usize) -> bool {
        let Some(more) = woven.checked_sub(len) else {
            return false;
        };
        let end = self.first.saturating_add(more / Self::MARKER * Self::DATA);
        more.is_multiple_of(Self::MARKER) && len <= end && (more == 0 || len > end - Self::DATA)
    }

    /// The marker at octet `at` of the woven ones.
    #[inline]
    fn marker(self, at: usize) -> [u8; Self::MARKER] {
        let p = ((self.back + at) as u16).to_be_bytes();
        [0, 0, p[0], p[1]]
    }
}

/// Weaves `len` octets at `src` into `dst`, which is [`Weave::woven_len`] long. With the running CRC
/// of what goes before, returns that of all; without, zero.
///
/// # Safety
///
/// `src` is valid for reads of `len` octets and does not overlap `dst`.
#[inline]
pub(crate) unsafe fn weave(
    src: *const u8,
    len: usize,
    dst: &mut [u8],
    how: Weave,
    crc: Option<u32>,
) -> u32 {
    debug_assert_eq!(dst.len(), how.woven_len(len));
    #[cfg(target_arch = "x86_64")]
    if let Some(crc) = crc
        && dst.len() >= crc_fold::LEAST
        && how.first.is_multiple_of(4)
        && crc_fold::available()
    {
        // SAFETY: the processor has what it needs; the rest is the caller's promise.
        return unsafe { weave_avx512(src, dst, how, crc) };
    }
    // SAFETY: the caller's promise.
    unsafe { weave_pieces(src, len, dst, how) };
    crc.map_or(0, |c| crc::update(c, dst))
}

/// # Safety
///
/// As [`weave`].
unsafe fn weave_pieces(src: *const u8, len: usize, dst: &mut [u8], how: Weave) {
    let (mut from, mut at, mut until) = (0, 0, how.first);
    while from < len {
        if until == 0 {
            if let Some(m) = dst.get_mut(at..at + Weave::MARKER) {
                m.copy_from_slice(&how.marker(at));
            }
            at += Weave::MARKER;
            until = Weave::DATA;
        }
        let n = until.min(len - from);
        let Some(to) = dst.get_mut(at..at + n) else {
            return;
        };
        // SAFETY: `from + n <= len`.
        unsafe { std::ptr::copy_nonoverlapping(src.add(from), to.as_mut_ptr(), n) };
        from += n;
        at += n;
        until -= n;
    }
}

/// # Safety
///
/// As [`weave`]; `dst` has [`crc_fold::LEAST`] octets, the first marker stands at a multiple of
/// four, and the processor has what [`crc_fold::available`] asks for.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,vpclmulqdq,pclmulqdq,sse4.2")]
unsafe fn weave_avx512(src: *const u8, dst: &mut [u8], how: Weave, crc: u32) -> u32 {
    let end = dst.len();
    let to = dst.as_mut_ptr();
    let (mut at, mut marker, mut from) = (0, how.first, src);
    // The next line goes to `at`; `from` is where it lies as long as no marker is in it.
    let mut line = || {
        let x = if at + LINE <= marker {
            // SAFETY: a line of payload without a marker in it.
            unsafe { _mm512_loadu_si512(from.cast()) }
        } else {
            // SAFETY: the line ends within the piece.
            let x = unsafe { blend(from, marker - at, how.marker(marker), u64::MAX) };
            marker += Weave::INTERVAL;
            from = from.wrapping_sub(Weave::MARKER);
            x
        };
        // SAFETY: a line of `dst`: `fold` below asks for no more than it has.
        unsafe { _mm512_storeu_si512(to.add(at).cast(), x) };
        at += LINE;
        from = from.wrapping_add(LINE);
        x
    };
    let mut a = crc_fold::begin(!crc, [line(), line(), line(), line()]);
    for _ in 1..end / crc_fold::QUAD {
        a = crc_fold::fold_quad(a, [line(), line(), line(), line()]);
    }
    let mut x = crc_fold::join(a);
    for _ in 0..end / LINE % 4 {
        x = crc_fold::fold_line(x, line());
    }
    let remainder = crc_fold::remainder(x);
    let left = end - at;
    let within = (1 << left) - 1;
    let mut last = [0u8; LINE];
    // SAFETY: `left` octets of payload, and a marker if there is one; what `dst` has left; then a
    // line of `last`.
    unsafe {
        let x = if marker < end {
            blend(from, marker - at, how.marker(marker), within)
        } else {
            _mm512_maskz_loadu_epi8(within, from.cast())
        };
        _mm512_mask_storeu_epi8(to.add(at).cast(), within, x);
        _mm512_storeu_si512(last.as_mut_ptr().cast(), x);
    }
    !crc_fold::continue_short(remainder, &last[..left])
}

/// A line with a marker at its octet `at`, a multiple of four: payload from `from` on before it, and
/// payload that follows the marker behind it. Of octets that are not `within`, nothing is read.
///
/// # Safety
///
/// The payload is there.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn blend(from: *const u8, at: usize, marker: [u8; 4], within: u64) -> __m512i {
    let before = (1u64 << at) - 1;
    let behind = u64::MAX << at << Weave::MARKER;
    let x = _mm512_set1_epi32(i32::from_le_bytes(marker));
    // SAFETY: masks leave out what is not payload of this piece.
    unsafe {
        let x = _mm512_mask_loadu_epi8(x, before & within, from.cast());
        _mm512_mask_loadu_epi8(x, behind & within, from.wrapping_sub(Weave::MARKER).cast())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_place_has_its_markers_and_its_crc() {
        let src: Vec<u8> = (0..3000u32).map(|i| (i * 7 + i / 256) as u8).collect();
        for first in [0, 1, 2, 3, 60, 61, 62, 63, 64, 65, 200, 444, 507, 508] {
            for len in (1..1500).step_by(7).chain([508, 509, 512, 1424, 2999]) {
                let how = Weave { first, back: 16 };
                let mut want = Vec::new();
                let mut until = first;
                for b in &src[..len] {
                    if until == 0 {
                        let back = 16 + want.len() as u16;
                        want.extend([0, 0]);
                        want.extend(back.to_be_bytes());
                        until = 508;
                    }
                    want.push(*b);
                    until -= 1;
                }
                let n = how.woven_len(len);
                assert_eq!(n, want.len(), "{first} {len}");
                assert_eq!(how.payload_len(n), len, "{first} {len}");
                assert_eq!(how.until_marker(len, n), until, "{first} {len}");
                assert!((0..n + 9).all(|w| how.is_woven(len, w) == (w == n)));
                for crc in [None, Some(0), Some(0xdead_beef)] {
                    let mut dst = vec![0xaa; n + 2];
                    // A copy of its own: an access beyond it is one that valgrind sees.
                    let own = src[..len].to_vec();
                    // SAFETY: `len` octets to read.
                    let got = unsafe { weave(own.as_ptr(), len, &mut dst[1..=n], how, crc) };
                    assert!(dst[1..=n] == want[..], "{first} {len}");
                    assert_eq!((dst[0], dst[n + 1]), (0xaa, 0xaa));
                    let sum = crc.map_or(0, |c| ::crc32c::crc32c_append(c, &want));
                    assert_eq!(got, sum, "{first} {len}");
                }
            }
        }
    }

    #[test]
    fn room_that_is_too_small_takes_what_fits() {
        for first in [0, 1, 100, 508] {
            let how = Weave { first, back: 0 };
            for room in 0..1600 {
                let n = how.payload_len(room);
                assert!(how.woven_len(n) <= room && how.woven_len(n + 1) > room);
            }
        }
    }
}
