//! CRC32c by a table, as MPA uses it (RFC 5044 section 4.4): reflected polynomial 0x1EDC6F41, initial value
//! and final exclusive or of all ones. On the wire its least significant byte goes first.

const TABLE: [u32; 256] = table();

const fn table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        let mut value = index as u32;
        let mut bit = 0;
        while bit < 8 {
            value = if value & 1 == 1 {
                value >> 1 ^ 0x82F6_3B78
            } else {
                value >> 1
            };
            bit += 1;
        }
        table[index] = value;
        index += 1;
    }
    table
}

/// CRC32c of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc: u32, byte| {
        crc >> 8 ^ TABLE[usize::from(crc as u8 ^ byte)]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The check value of the algorithm, and a test vector of iSCSI (RFC 3720 appendix B.4).
    #[test]
    fn known_answers() {
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        assert_eq!(crc32c(&[0; 32]).to_le_bytes(), [0xAA, 0x36, 0x91, 0x8A]);
        assert_eq!(crc32c(&[0xFF; 32]).to_le_bytes(), [0x43, 0xAB, 0xA8, 0x62]);
    }
}
