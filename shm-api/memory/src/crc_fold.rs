//! CRC32c by carry-less multiplication of 512-bit vectors, for CPUs that have AVX-512 and
//! VPCLMULQDQ: the kernel behind [`crate::crc`] for FPDU-sized buffers.
//!
//! The message is processed 64 bytes at a time as four 128-bit lanes. A lane A that lies D bits
//! before the end of the data contributes A * x^D; multiplying its two halves by the constants
//! x^(D+32) and x^(D-32) modulo P moves it forward by D bits without a division. Finally one lane is
//! left, whose remainder two CRC32 instructions compute. (Gopal et al., Fast CRC Computation for
//! Generic Polynomials Using PCLMULQDQ, Intel 2009.)

use core::arch::x86_64::*;
use core::sync::atomic::{AtomicU8, Ordering};

/// Minimum buffer length of the kernel.
pub(crate) const MIN_LEN: usize = 256;

/// P without its highest term, bit-reflected (RFC 3720 appendix B.4).
const POLYNOMIAL: u32 = 0x82F6_3B78;

/// `remainder`, bit-reflected, times x^`exponent` mod P.
pub(crate) const fn times_power_of_x(remainder: u32, exponent: u32) -> u32 {
    let mut product = remainder;
    let mut i = 0;
    while i < exponent {
        product = (product >> 1) ^ (POLYNOMIAL & (product & 1).wrapping_neg());
        i += 1;
    }
    product
}

/// x^n mod P, bit-reflected, and shifted as reflected products require.
const fn power_of_x(exponent: u32) -> i64 {
    (times_power_of_x(0x8000_0000, exponent) as i64) << 1
}

/// Constants that move a lane forward by D bits: for its low half, and for its high half.
const fn forward_by(distance: u32) -> (i64, i64) {
    (power_of_x(distance + 32), power_of_x(distance - 32))
}

const BY_2048: (i64, i64) = forward_by(2048);
const BY_512: (i64, i64) = forward_by(512);
const BY_384: (i64, i64) = forward_by(384);
const BY_256: (i64, i64) = forward_by(256);
const BY_128: (i64, i64) = forward_by(128);

/// Returns whether this CPU supports [`update_folded`] and the other functions built of its steps.
/// Cached in one place, because it is needed for every FPDU.
#[inline]
pub(crate) fn is_available() -> bool {
    static ANSWER: AtomicU8 = AtomicU8::new(0);
    const YES: u8 = 2;
    match ANSWER.load(Ordering::Relaxed) {
        0 => {
            let yes = detect_features();
            ANSWER.store(1 + u8::from(yes), Ordering::Relaxed);
            yes
        }
        answer => answer == YES,
    }
}

#[cold]
fn detect_features() -> bool {
    std::arch::is_x86_feature_detected!("avx512f")
        && std::arch::is_x86_feature_detected!("avx512bw")
        && std::arch::is_x86_feature_detected!("vpclmulqdq")
        && std::arch::is_x86_feature_detected!("pclmulqdq")
        && std::arch::is_x86_feature_detected!("sse4.2")
}

#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn broadcast_constants(constants: (i64, i64)) -> __m512i {
    _mm512_set_epi64(
        constants.1,
        constants.0,
        constants.1,
        constants.0,
        constants.1,
        constants.0,
        constants.1,
        constants.0,
    )
}

/// `acc` moved forward, plus `next`.
#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn fold_lanes(acc: __m512i, constants: __m512i, next: __m512i) -> __m512i {
    let low = _mm512_clmulepi64_epi128::<0x00>(acc, constants);
    let high = _mm512_clmulepi64_epi128::<0x11>(acc, constants);
    // 0x96: exclusive or of all three operands.
    _mm512_ternarylogic_epi64::<0x96>(low, high, next)
}

/// Bytes of a vector.
pub(crate) const LINE_LEN: usize = 64;

/// Four lines.
pub(crate) const QUAD_LEN: usize = 4 * LINE_LEN;

/// CRC32c of earlier bytes with CRC `crc`, followed by `data` of at least [`MIN_LEN`] bytes.
///
/// # Safety
/// [`is_available`] returned true.
#[target_feature(enable = "avx512f,vpclmulqdq,pclmulqdq,sse4.2")]
pub(crate) unsafe fn update_folded(crc: u32, data: &[u8]) -> u32 {
    let load = |line: &[u8; LINE_LEN]| {
        // SAFETY: an unaligned load of 64 bytes from a reference to 64 bytes.
        unsafe { _mm512_loadu_si512(line.as_ptr().cast()) }
    };
    let load_quad = |quad: &[[u8; LINE_LEN]; 4]| {
        [
            load(&quad[0]),
            load(&quad[1]),
            load(&quad[2]),
            load(&quad[3]),
        ]
    };
    let (lines, tail) = data.as_chunks::<LINE_LEN>();
    let (quads, rest) = lines.as_chunks::<4>();
    let Some((first, quads)) = quads.split_first() else {
        debug_assert!(false, "shorter than MIN_LEN");
        return crc;
    };
    let mut folded_quad = begin_fold(!crc, load_quad(first));
    for quad in quads {
        folded_quad = fold_quad(folded_quad, load_quad(quad));
    }
    let mut folded = join_quad(folded_quad);
    for line in rest {
        folded = fold_line(folded, load(line));
    }
    !continue_short(fold_remainder(folded), tail)
}

/// Starts with the first four lines of a message, after earlier bytes with remainder `crc`.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn begin_fold(crc: u32, quad: [__m512i; 4]) -> [__m512i; 4] {
    // The running CRC is added to the first four bytes.
    let crc = _mm512_zextsi128_si512(_mm_cvtsi32_si128(crc as i32));
    let [first, second, third, fourth] = quad;
    [_mm512_xor_si512(first, crc), second, third, fourth]
}

/// Folds in the next four lines.
#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq")]
pub(crate) fn fold_quad(quad: [__m512i; 4], next: [__m512i; 4]) -> [__m512i; 4] {
    let constants = broadcast_constants(BY_2048);
    [
        fold_lanes(quad[0], constants, next[0]),
        fold_lanes(quad[1], constants, next[1]),
        fold_lanes(quad[2], constants, next[2]),
        fold_lanes(quad[3], constants, next[3]),
    ]
}

/// Folds four adjacent lines into one.
#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq")]
pub(crate) fn join_quad(quad: [__m512i; 4]) -> __m512i {
    let folded = fold_line(quad[0], quad[1]);
    let folded = fold_line(folded, quad[2]);
    fold_line(folded, quad[3])
}

/// Folds in one more line.
#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq")]
pub(crate) fn fold_line(folded: __m512i, next: __m512i) -> __m512i {
    fold_lanes(folded, broadcast_constants(BY_512), next)
}

/// The remainder of everything that was folded into `folded`.
#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq,pclmulqdq,sse4.2")]
pub(crate) fn fold_remainder(folded: __m512i) -> u32 {
    // Four lanes into one: the last stays, the others are moved forward to it.
    let constants = _mm512_set_epi64(
        0, 0, BY_128.1, BY_128.0, BY_256.1, BY_256.0, BY_384.1, BY_384.0,
    );
    let low = _mm512_clmulepi64_epi128::<0x00>(folded, constants);
    let high = _mm512_clmulepi64_epi128::<0x11>(folded, constants);
    let products = _mm512_xor_si512(low, high);
    let lane = _mm_xor_si128(
        _mm_xor_si128(
            _mm512_extracti32x4_epi32::<0>(products),
            _mm512_extracti32x4_epi32::<1>(products),
        ),
        _mm_xor_si128(
            _mm512_extracti32x4_epi32::<2>(products),
            _mm512_extracti32x4_epi32::<3>(folded),
        ),
    );
    let remainder = _mm_crc32_u64(0, _mm_cvtsi128_si64(lane) as u64);
    _mm_crc32_u64(remainder, _mm_extract_epi64::<1>(lane) as u64) as u32
}

/// The remainder of `data` after earlier bytes with remainder `crc`; for short data.
#[inline]
#[target_feature(enable = "sse4.2")]
pub(crate) fn continue_short(crc: u32, data: &[u8]) -> u32 {
    let (words, bytes) = data.as_chunks::<8>();
    let mut remainder = u64::from(crc);
    for word in words {
        remainder = _mm_crc32_u64(remainder, u64::from_le_bytes(*word));
    }
    let (words, bytes) = bytes.as_chunks::<4>();
    let mut remainder = remainder as u32;
    for word in words {
        remainder = _mm_crc32_u32(remainder, u32::from_le_bytes(*word));
    }
    for byte in bytes {
        remainder = _mm_crc32_u8(remainder, *byte);
    }
    remainder
}
