//! CRC32c with the SSE4.2 instruction, over three parts of the data in parallel, for CPUs that have
//! it and PCLMULQDQ: the kernel behind [`crate::crc`] for FPDU-sized buffers without AVX-512.
//!
//! The CRC32 instruction has a latency of three cycles and a throughput of one per cycle: three
//! independent parts keep the unit busy. At the end, a carry-less multiplication moves the remainders
//! of the first two parts forward over the data after them. (Gopal et al., Fast CRC Computation for
//! iSCSI Polynomial Using CRC32 Instruction, Intel 2011.)

use core::arch::x86_64::*;

use crate::crc_fold::{continue_short, times_power_of_x};

/// Shortest buffer for which splitting pays.
pub(crate) const MIN_LEN: usize = 160;

/// Maximum length of each part in 64-bit words: longer data is processed in rounds.
const LONGEST_PART: usize = 128;

/// Entry `n`: the constant that moves a remainder forward over `n` words.
static FORWARD_BY_WORDS: [i64; 2 * LONGEST_PART + 1] = make_constants();

const fn make_constants() -> [i64; 2 * LONGEST_PART + 1] {
    let mut constants = [0; 2 * LONGEST_PART + 1];
    // The product of two remainders is added to the last word, whose CRC32 instruction multiplies it
    // by x^32, so the first entry is x^(64-32).
    let mut power = times_power_of_x(0x8000_0000, 32);
    let mut words = 1;
    while words < constants.len() {
        constants[words] = (power as i64) << 1;
        power = times_power_of_x(power, 64);
        words += 1;
    }
    constants
}

/// Returns whether this CPU supports [`update_in_parts`].
pub(crate) fn is_available() -> bool {
    std::arch::is_x86_feature_detected!("sse4.2")
        && std::arch::is_x86_feature_detected!("pclmulqdq")
}

/// CRC32c of earlier bytes with CRC `crc`, followed by `data`.
///
/// # Safety
/// [`is_available`] returned true.
#[target_feature(enable = "sse4.2,pclmulqdq")]
pub(crate) unsafe fn update_in_parts(crc: u32, data: &[u8]) -> u32 {
    let mut remainder = !crc;
    let mut rest = data;
    while rest.len() >= MIN_LEN {
        let (words, _) = rest.as_chunks::<8>();
        let part = (words.len() / 3).min(LONGEST_PART);
        remainder = continue_by_parts(remainder, words, part);
        rest = &rest[3 * part * 8..];
    }
    !continue_short(remainder, rest)
}

/// The remainder of three parts of `part` words, at least one, from the start of `words`, after
/// earlier bytes with remainder `crc`.
#[inline]
#[target_feature(enable = "sse4.2,pclmulqdq")]
fn continue_by_parts(crc: u32, words: &[[u8; 8]], part: usize) -> u32 {
    const UNROLLED: usize = 8;
    let add = |remainder: u64, word: &[u8; 8]| _mm_crc32_u64(remainder, u64::from_le_bytes(*word));
    let (first, rest) = words.split_at(part);
    let (second, rest) = rest.split_at(part);
    let (Some((first_last, first)), Some((second_last, second)), Some((third_last, third))) = (
        first.split_last(),
        second.split_last(),
        rest[..part].split_last(),
    ) else {
        return crc;
    };
    let (mut of_first, mut of_second, mut of_third) = (u64::from(crc), 0, 0);
    let (firsts, first_rest) = first.as_chunks::<UNROLLED>();
    let (seconds, second_rest) = second.as_chunks::<UNROLLED>();
    let (thirds, third_rest) = third.as_chunks::<UNROLLED>();
    for ((first, second), third) in firsts.iter().zip(seconds).zip(thirds) {
        for at in 0..UNROLLED {
            of_first = add(of_first, &first[at]);
            of_second = add(of_second, &second[at]);
            of_third = add(of_third, &third[at]);
        }
    }
    for ((first, second), third) in first_rest.iter().zip(second_rest).zip(third_rest) {
        of_first = add(of_first, first);
        of_second = add(of_second, second);
        of_third = add(of_third, third);
    }
    let forward = |remainder: u64, words: usize| {
        let constant = _mm_cvtsi64_si128(FORWARD_BY_WORDS[words]);
        _mm_clmulepi64_si128::<0x00>(_mm_cvtsi64_si128(remainder as i64), constant)
    };
    let products = _mm_xor_si128(
        forward(add(of_first, first_last), 2 * part),
        forward(add(of_second, second_last), part),
    );
    // The remainders of the other parts are added to the last word.
    let last = u64::from_le_bytes(*third_last) ^ _mm_cvtsi128_si64(products) as u64;
    _mm_crc32_u64(of_third, last) as u32
}
