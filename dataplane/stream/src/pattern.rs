//! The test pattern of a stream: a function of a seed and the stream offset alone. The sender keeps
//! no data for retransmissions, and the receiver checks data in place.

/// Pattern of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamPattern {
    seed: u64,
}

impl StreamPattern {
    /// Creates a pattern; different seeds give unrelated streams.
    pub fn new(seed: u64) -> StreamPattern {
        StreamPattern { seed }
    }

    /// The eight bytes at `8 * index`: the finaliser of SplitMix64 over a Weyl sequence.
    #[inline]
    fn word_at(self, index: u64) -> [u8; 8] {
        let mut hash = self
            .seed
            .wrapping_add((index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (hash ^ (hash >> 31)).to_le_bytes()
    }

    /// Calls `visit` for the pattern's words in `len` bytes at offset `at`: the range within these
    /// bytes, and the contents.
    #[inline]
    fn for_each_word(
        self,
        at: u64,
        len: usize,
        mut visit: impl FnMut(std::ops::Range<usize>, &[u8]),
    ) {
        let mut done = 0;
        while done < len {
            let position = at + done as u64;
            let skip = (position & 7) as usize;
            let taken = (8 - skip).min(len - done);
            let word = self.word_at(position >> 3);
            visit(done..done + taken, &word[skip..skip + taken]);
            done += taken;
        }
    }

    /// Writes the pattern at offset `at`.
    #[inline]
    pub fn fill(self, at: u64, out: &mut [u8]) {
        self.for_each_word(at, out.len(), |range, bytes| {
            out[range].copy_from_slice(bytes);
        });
    }

    /// Number of leading bytes of `data` that match the pattern at offset `at`.
    #[inline]
    pub fn matching(self, at: u64, data: &[u8]) -> usize {
        let mut good = 0;
        self.for_each_word(at, data.len(), |range, expected| {
            if good == range.start {
                let pairs = data[range].iter().zip(expected);
                good += pairs.take_while(|(got, expected)| got == expected).count();
            }
        });
        good
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_the_same_however_it_is_cut() {
        let p = StreamPattern::new(7);
        let mut whole = vec![0; 4099];
        p.fill(3, &mut whole);
        for cut in [1, 7, 8, 9, 1448] {
            let mut at = 0;
            for piece in whole.chunks(cut) {
                assert_eq!(p.matching(3 + at, piece), piece.len());
                at += piece.len() as u64;
            }
        }
    }

    #[test]
    fn the_first_wrong_byte_is_found_wherever_it_lies() {
        let p = StreamPattern::new(1);
        let mut data = vec![0; 40];
        p.fill(5, &mut data);
        for i in 0..data.len() {
            data[i] ^= 1;
            assert_eq!(p.matching(5, &data), i);
            data[i] ^= 1;
        }
        assert!(StreamPattern::new(2).matching(5, &data) < 8);
    }
}
