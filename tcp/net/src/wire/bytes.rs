//! Reads big-endian words of headers. The caller has checked the length.

/// Reads the 16-bit word at the offset `at`.
#[inline]
pub fn read_u16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// Reads the 32-bit word at the offset `at`.
#[inline]
pub fn read_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Reads the 64-bit word at the offset `at`.
#[inline]
pub fn read_u64(bytes: &[u8], at: usize) -> u64 {
    u64::from(read_u32(bytes, at)) << 32 | u64::from(read_u32(bytes, at + 4))
}
