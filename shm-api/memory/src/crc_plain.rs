//! CRC32c without the instructions that are made for it: for processors on which those are slower than
//! other ones, as emulated ones are. Long data is shortened by shifts and XORs; tables do the rest,
//! eight bytes at a time (slicing-by-8, Kounavis and Berry 2005).
//!
//! A multiple of the polynomial changes no remainder, wherever it is added to a message. One with few
//! terms cancels a word of 64 bits by adding that word at a few later places: no memory is read but
//! the message, where tables read an entry for each byte, each through the emulated paging.

/// P without its highest term, bit-reflected (RFC 3720 appendix B.4).
const POLYNOMIAL: u32 = 0x82F6_3B78;

/// A multiple of the polynomial: one, and these powers of 1/x, as whole words and bits beyond. Words are
/// bit-reflected, so that later bits, of lower powers, are higher in a word. All lie beyond the word that
/// is cancelled.
const SPARSE_MULTIPLE: [(usize, u32); 5] = [(1, 37), (1, 41), (3, 27), (3, 63), (4, 41)];
/// Words behind the cancelled one that it is added to.
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

/// The remainder after earlier bytes with remainder `crc` and `data`.
#[inline(never)]
pub(crate) fn continue_without_instructions(crc: u32, data: &[u8]) -> u32 {
    let (words, bytes) = data.as_chunks::<8>();
    // The last words take what the cancelled ones leave.
    let cancelled = words.len().saturating_sub(REACH) / REACH * REACH;
    if cancelled == 0 {
        return continue_by_tables(crc, data);
    }
    let (groups, _) = words[..cancelled].as_chunks::<REACH>();
    let (last, rest) = words[cancelled..].split_at(REACH);
    // Entry `n % REACH`: what is added to word `n`. Why it is fast: the compiler unrolls both loops, and
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

/// [`continue_without_instructions`] by tables alone.
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
