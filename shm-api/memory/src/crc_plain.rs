//! CRC32c without the instructions made for it, for processors on which they are slower than others,
//! such as emulated ones. Long data is shortened by shifts and XORs; tables do the rest, eight bytes
//! at a time (slicing-by-8, Kounavis and Berry 2005).
//!
//! Adding a multiple of the polynomial to a message at any position does not change its remainder. A
//! multiple with few terms cancels a 64-bit word by adding that word at a few later positions. This
//! reads no memory other than the message, whereas tables read an entry for each byte, each through
//! the emulated paging.

/// P without its highest term, bit-reflected (RFC 3720 appendix B.4).
const POLYNOMIAL: u32 = 0x82F6_3B78;

/// A multiple of the polynomial: the constant term 1 and these powers of 1/x, as whole words and
/// additional bits. Words are bit-reflected, so later bits, of lower powers, are higher in a word.
/// All terms lie beyond the cancelled word.
const SPARSE_MULTIPLE: [(usize, u32); 5] = [(1, 37), (1, 41), (3, 27), (3, 63), (4, 41)];
/// Maximum distance in words from the cancelled word to a word that it is added to.
const REACH: usize = 5;

/// Entry `b` of table `n`: the remainder of byte `b` followed by `n` zero bytes.
static TABLES: [[u32; 256]; 8] = make_tables();

const fn make_tables() -> [[u32; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut remainder = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            remainder = (remainder >> 1) ^ (POLYNOMIAL & (remainder & 1).wrapping_neg());
            bit += 1;
        }
        tables[0][byte] = remainder;
        byte += 1;
    }
    let mut table = 1;
    while table < 8 {
        let mut byte = 0;
        while byte < 256 {
            let before = tables[table - 1][byte];
            tables[table][byte] = (before >> 8) ^ tables[0][(before & 0xff) as usize];
            byte += 1;
        }
        table += 1;
    }
    tables
}

/// The remainder of `data` after earlier bytes with remainder `crc`.
#[inline(never)]
pub(crate) fn continue_without_instructions(crc: u32, data: &[u8]) -> u32 {
    let (words, bytes) = data.as_chunks::<8>();
    // The last words receive what the cancelled ones leave over.
    let cancelled = words.len().saturating_sub(REACH) / REACH * REACH;
    if cancelled == 0 {
        return continue_by_tables(crc, data);
    }
    let (groups, _) = words[..cancelled].as_chunks::<REACH>();
    let (last, rest) = words[cancelled..].split_at(REACH);
    // Entry `n % REACH` is added to word `n`. Why it is fast: the compiler unrolls both loops and
    // keeps the entries in registers.
    let mut pending = [0; REACH];
    pending[0] = u64::from(crc);
    for group in groups {
        for (place, word) in group.iter().enumerate() {
            let value = u64::from_le_bytes(*word) ^ std::mem::take(&mut pending[place]);
            for (ahead, shift) in SPARSE_MULTIPLE {
                pending[(place + ahead) % REACH] ^= value << shift;
                if shift > 0 {
                    pending[(place + ahead + 1) % REACH] ^= value >> (64 - shift);
                }
            }
        }
    }
    let mut remainder = 0;
    for (word, added) in last.iter().zip(pending) {
        let sum = u64::from_le_bytes(*word) ^ added;
        remainder = continue_by_tables(remainder, &sum.to_le_bytes());
    }
    continue_by_tables(continue_by_tables(remainder, rest.as_flattened()), bytes)
}

/// Variant of [`continue_without_instructions`] that uses only the tables.
#[inline]
fn continue_by_tables(crc: u32, data: &[u8]) -> u32 {
    let (words, bytes) = data.as_chunks::<8>();
    let mut remainder = crc;
    for word in words {
        let next = (u64::from_le_bytes(*word) ^ u64::from(remainder)).to_le_bytes();
        remainder = 0;
        for (byte, table) in next.iter().zip(TABLES.iter().rev()) {
            remainder ^= table[usize::from(*byte)];
        }
    }
    for byte in bytes {
        let index = (remainder as u8) ^ byte;
        remainder = (remainder >> 8) ^ TABLES[0][usize::from(index)];
    }
    remainder
}
