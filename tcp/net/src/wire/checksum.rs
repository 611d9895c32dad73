//! The Internet checksum (RFC 1071) over data in pieces, for the stack and for sinks.

/// A one's complement sum in progress. Pieces may have odd lengths: a piece at an odd offset is summed
/// as if it started at an even one, and its bytes are then swapped (RFC 1071 section 2 (B)).
#[derive(Clone, Copy, Debug, Default)]
pub struct OnesComplementSum {
    acc: u64,
    odd: bool,
}

impl OnesComplementSum {
    /// The sum of no data.
    pub const fn new() -> Self {
        OnesComplementSum { acc: 0, odd: false }
    }

    /// Adds the next bytes of the stream.
    #[inline]
    pub fn add(&mut self, data: &[u8]) {
        let sum = u64::from(fold_carries(sum_words(data)));
        self.acc += if self.odd {
            u64::from((sum as u16).swap_bytes())
        } else {
            sum
        };
        self.odd ^= data.len() & 1 == 1;
    }

    /// Adds a 16-bit word in host order that is not part of the data, such as a field of the
    /// pseudo-header.
    #[inline]
    pub fn add_word(&mut self, word: u16) {
        self.acc += u64::from(word);
    }

    /// Returns the sum in host order, not complemented.
    #[inline]
    pub fn value(self) -> u16 {
        fold_carries(self.acc)
    }
}

/// Completes a checksum: `headers` are those of [`crate::FrameSink::send_frame`] and have the
/// pseudo-header sum in its TCP checksum field; `payload` is the sum of all payload pieces. Returns the
/// two bytes to write at `l2_len + l3_len + 16`, the offset of the field.
#[inline]
pub fn complete_tcp_checksum(
    headers: &[u8],
    meta: &crate::frame_sink::FrameMeta,
    payload: OnesComplementSum,
) -> [u8; 2] {
    let l4 = usize::from(meta.l2_len) + usize::from(meta.l3_len);
    let mut sum = OnesComplementSum::new();
    sum.add(headers.get(l4..).unwrap_or(&[]));
    sum.add_word(payload.value());
    (!sum.value()).to_be_bytes()
}

/// Offset in the frame of the TCP checksum, which [`complete_tcp_checksum`] computes.
#[inline]
pub fn tcp_checksum_offset(meta: &crate::frame_sink::FrameMeta) -> usize {
    usize::from(meta.l2_len) + usize::from(meta.l3_len) + 16
}

/// Folds to 16 bits with end-around carry.
#[inline]
pub fn fold_carries(mut value: u64) -> u16 {
    value = (value & 0xffff_ffff) + (value >> 32);
    value = (value & 0xffff_ffff) + (value >> 32);
    value = (value & 0xffff) + (value >> 16);
    value = (value & 0xffff) + (value >> 16);
    value as u16
}

/// Sum of big-endian 16-bit words, odd tail padded with zero, as an unfolded value.
///
/// Why it is fast: the sum is taken in native byte order (RFC 1071 section 2 (B)) and in 64-bit words,
/// each an addition and an addition of its carry, in two independent sums; carries are folded once at
/// the end. Wider registers would have to be split to keep carries: no gain, and three times as slow on
/// an emulated processor.
#[inline]
fn sum_words(data: &[u8]) -> u64 {
    let (mut even, mut odd) = (0u128, 0u128);
    let (blocks, rest) = data.as_chunks::<32>();
    for block in blocks {
        let (words, _) = block.as_chunks::<8>();
        for pair in words.as_chunks::<2>().0 {
            even += u128::from(u64::from_ne_bytes(pair[0]));
            odd += u128::from(u64::from_ne_bytes(pair[1]));
        }
    }
    let total = even + odd;
    // The high half counts carries out of the low half, each worth one.
    let low = total as u64;
    let mut sum = (low & 0xffff_ffff) + (low >> 32) + (total >> 64) as u64;
    let (words, tail) = rest.as_chunks::<4>();
    for word in words {
        sum += u64::from(u32::from_ne_bytes(*word));
    }
    if !tail.is_empty() {
        let mut word = [0u8; 4];
        word[..tail.len()].copy_from_slice(tail);
        sum += u64::from(u32::from_ne_bytes(word));
    }
    u64::from(u16::from_be(fold_carries(sum)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference(data: &[u8]) -> u16 {
        let mut sum = 0u32;
        for word in data.chunks(2) {
            sum += u32::from(u16::from_be_bytes([word[0], *word.get(1).unwrap_or(&0)]));
            sum = (sum & 0xffff) + (sum >> 16);
        }
        sum as u16
    }

    fn equal(left: u16, right: u16) -> bool {
        // 0 and 0xffff are both zero in one's complement.
        left == right || (left.is_multiple_of(0xffff) && right.is_multiple_of(0xffff))
    }

    #[test]
    fn pieces_of_any_length_sum_like_the_whole() {
        let data: Vec<u8> = (0..4000u32)
            .map(|index| (index.wrapping_mul(2654435761) >> 13) as u8)
            .collect();
        for len in [
            0, 1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, 1447, 1448, 3999,
        ] {
            let whole = reference(&data[..len]);
            for cut in [0, 1, 2, 7, 64, 65, 700] {
                let cut = cut.min(len);
                for cut2 in [cut, (cut + 1).min(len), (cut + 33).min(len)] {
                    let mut sum = OnesComplementSum::new();
                    sum.add(&data[..cut]);
                    sum.add(&data[cut..cut2]);
                    sum.add(&data[cut2..len]);
                    assert!(equal(sum.value(), whole), "len {len} cuts {cut} {cut2}");
                }
            }
        }
        let ones = vec![0xff; 65535];
        let mut sum = OnesComplementSum::new();
        sum.add(&ones);
        assert!(equal(sum.value(), reference(&ones)));
    }
}
