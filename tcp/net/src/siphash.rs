//! SipHash (Aumasson, Bernstein 2012) over whole words: the keyed hash for initial sequence numbers
//! (SipHash-2-4, RFC 6528 section 3) and for other hashes that peers can observe.

#[inline(always)]
fn mix_round(state: &mut [u64; 4]) {
    state[0] = state[0].wrapping_add(state[1]);
    state[2] = state[2].wrapping_add(state[3]);
    state[1] = state[1].rotate_left(13) ^ state[0];
    state[3] = state[3].rotate_left(16) ^ state[2];
    state[0] = state[0].rotate_left(32);
    state[2] = state[2].wrapping_add(state[1]);
    state[0] = state[0].wrapping_add(state[3]);
    state[1] = state[1].rotate_left(17) ^ state[2];
    state[3] = state[3].rotate_left(21) ^ state[0];
    state[2] = state[2].rotate_left(32);
}

/// A secret key of 128 bits.
#[derive(Clone, Copy)]
pub struct Key(u64, u64);

impl Key {
    /// Returns the key of these bytes.
    pub fn new(key: &[u8; 16]) -> Self {
        let key = u128::from_le_bytes(*key);
        Key(key as u64, (key >> 64) as u64)
    }

    /// Hashes whole words, with `C` rounds per word and `D` final rounds.
    #[inline]
    pub fn hash<const C: usize, const D: usize>(self, words: &[u64]) -> u64 {
        self.hash_blocks::<C, D>(words, (words.len() as u64 * 8) << 56)
    }

    /// Hashes twelve bytes (2-4): one block less than for two words, because the last four bytes
    /// share a block with the length.
    #[inline]
    pub fn hash_twelve_bytes(self, word: u64, half: u32) -> u64 {
        self.hash_blocks::<2, 4>(&[word], 12 << 56 | u64::from(half))
    }

    /// Hashes `words` and `last`: the bytes that do not fill a word, with the length in the highest
    /// byte.
    #[inline]
    fn hash_blocks<const C: usize, const D: usize>(self, words: &[u64], last: u64) -> u64 {
        let mut state = [
            self.0 ^ 0x736f_6d65_7073_6575,
            self.1 ^ 0x646f_7261_6e64_6f6d,
            self.0 ^ 0x6c79_6765_6e65_7261,
            self.1 ^ 0x7465_6462_7974_6573,
        ];
        for &word in words.iter().chain(core::iter::once(&last)) {
            state[3] ^= word;
            for _ in 0..C {
                mix_round(&mut state);
            }
            state[0] ^= word;
        }
        state[2] ^= 0xff;
        for _ in 0..D {
            mix_round(&mut state);
        }
        state[0] ^ state[1] ^ state[2] ^ state[3]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn siphash_2_4_agrees_with_the_published_vector() {
        // Reference vectors: key 00..0f, message 00..07.
        let key: [u8; 16] = core::array::from_fn(|index| index as u8);
        let key = Key::new(&key);
        let message = u64::from_le_bytes([0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(key.hash::<2, 4>(&[message]), 0x93f5_f579_9a93_2462);
        assert_eq!(key.hash::<2, 4>(&[]), 0x726f_db47_dd0e_0e31);
        let half = u32::from_le_bytes([8, 9, 10, 11]);
        assert_eq!(key.hash_twelve_bytes(message, half), 0x751e_8fbc_860e_e5fb);
    }
}
