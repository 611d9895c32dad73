//! CRC32c by tables, eight bytes at a time (slicing-by-8, Kounavis and Berry 2005): for processors on
//! which the instructions that are made for CRCs are slower than loads, as emulated ones are.

/// P without its highest term, bit-reflected (RFC 3720 appendix B.4).
const POLYNOMIAL: u32 = 0x82F6_3B78;

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
pub(crate) fn continue_by_tables(crc: u32, data: &[u8]) -> u32 {
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
