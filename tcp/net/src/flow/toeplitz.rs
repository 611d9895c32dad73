//! The Toeplitz hash of receive-side scaling (RSS) in software: for links without RSS, and for the
//! choice of a source port whose answers are steered to this worker (see `steering.rs`).

/// The key of the test vectors in Microsoft's RSS specification.
pub const DEFAULT_RSS_KEY: [u8; 40] = [
    0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0,
    0xd0, 0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c,
    0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
];

/// A key under which both directions of a flow have the same hash.
pub const SYMMETRIC_RSS_KEY: [u8; 40] = {
    let mut key = [0; 40];
    let mut i = 0;
    while i < 40 {
        key[i] = if i % 2 == 0 { 0x6d } else { 0x5a };
        i += 1;
    }
    key
};

const MAX_INPUT: usize = 36;

/// A key unrolled into a table for each byte of input: a hash is one lookup per byte.
pub struct Toeplitz {
    tables: Box<[[u32; 256]; MAX_INPUT]>,
}

impl Toeplitz {
    /// Unrolls a key.
    pub fn new(key: &[u8; 40]) -> Self {
        let mut tables = Box::new([[0u32; 256]; MAX_INPUT]);
        for (position, table) in tables.iter_mut().enumerate() {
            // Bit b of input byte i selects the 32 key bits that start at 8i+b.
            let mut window = [0u8; 8];
            window[..5].copy_from_slice(&key[position..position + 5]);
            let window = u64::from_be_bytes(window);
            for (byte, entry) in table.iter_mut().enumerate() {
                for bit in 0..8 {
                    if byte & (0x80 >> bit) != 0 {
                        *entry ^= (window << bit >> 32) as u32;
                    }
                }
            }
        }
        Self { tables }
    }

    /// Returns the hash of at most 36 bytes in network order; further bytes are ignored.
    #[inline]
    pub fn hash(&self, input: &[u8]) -> u32 {
        self.tables
            .iter()
            .zip(input)
            .fold(0, |hash, (table, &byte)| hash ^ table[usize::from(byte)])
    }

    /// Returns the hash of a received TCP/IPv4 segment: source first, as on the wire.
    #[inline]
    pub fn tcp_v4(&self, src: [u8; 4], dst: [u8; 4], sport: u16, dport: u16) -> u32 {
        let mut input = [0; 12];
        input[..4].copy_from_slice(&src);
        input[4..8].copy_from_slice(&dst);
        input[8..10].copy_from_slice(&sport.to_be_bytes());
        input[10..].copy_from_slice(&dport.to_be_bytes());
        self.hash(&input)
    }

    /// Returns the hash of a received TCP/IPv6 segment.
    #[inline]
    pub fn tcp_v6(&self, src: [u8; 16], dst: [u8; 16], sport: u16, dport: u16) -> u32 {
        let mut input = [0; 36];
        input[..16].copy_from_slice(&src);
        input[16..32].copy_from_slice(&dst);
        input[32..34].copy_from_slice(&sport.to_be_bytes());
        input[34..].copy_from_slice(&dport.to_be_bytes());
        self.hash(&input)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv6Addr;

    #[test]
    fn the_vectors_of_the_rss_specification_hold() {
        let toeplitz = Toeplitz::new(&DEFAULT_RSS_KEY);
        assert_eq!(
            toeplitz.tcp_v4([66, 9, 149, 187], [161, 142, 100, 80], 2794, 1766),
            0x51ccc178
        );
        assert_eq!(
            toeplitz.tcp_v4([199, 92, 111, 2], [65, 69, 140, 83], 14230, 4739),
            0xc626b0ea
        );
        let src: Ipv6Addr = "3ffe:2501:200:1fff::7".parse().unwrap();
        let dst: Ipv6Addr = "3ffe:2501:200:3::1".parse().unwrap();
        assert_eq!(
            toeplitz.tcp_v6(src.octets(), dst.octets(), 2794, 1766),
            0x40207d3d
        );
    }

    #[test]
    fn the_symmetric_key_hashes_both_directions_alike() {
        let toeplitz = Toeplitz::new(&SYMMETRIC_RSS_KEY);
        let (source, destination) = ([10, 0, 0, 1], [192, 168, 7, 9]);
        assert_eq!(
            toeplitz.tcp_v4(source, destination, 40000, 4420),
            toeplitz.tcp_v4(destination, source, 4420, 40000)
        );
    }

    #[test]
    fn input_beyond_the_key_is_ignored() {
        let toeplitz = Toeplitz::new(&DEFAULT_RSS_KEY);
        assert_eq!(toeplitz.hash(&[7; 36]), toeplitz.hash(&[7; 50]));
    }
}
