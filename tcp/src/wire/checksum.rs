//! The Internet checksum (RFC 1071) over slices in pieces, for stack and sinks.

/// One's complement sum in progress. Pieces may have odd lengths: a piece that starts at an odd
/// offset is summed as if at an even one and then byte-swapped (RFC 1071 section 2 (B)).
#[derive(Clone, Copy, Debug, Default)]
pub struct OnesComplementSum {
    acc: u64,
    odd: bool,
}

impl OnesComplementSum {
    pub const fn new() -> Self {
        OnesComplementSum { acc: 0, odd: false }
    }

    /// Adds the next bytes of the stream.
    #[inline]
    pub fn add(&mut self, data: &[u8]) {
        let s = u64::from(fold(sum_bytes(data)));
        self.acc += if self.odd {
            u64::from((s as u16).swap_bytes())
        } else {
            s
        };
        self.odd ^= data.len() & 1 == 1;
    }

    /// Adds a host-order 16-bit word that is no part of the stream (pseudo-header fields).
    #[inline]
    pub fn add_word(&mut self, w: u16) {
        self.acc += u64::from(w);
    }

    /// The sum in host order, not complemented.
    #[inline]
    pub fn value(self) -> u16 {
        fold(self.acc)
    }
}

/// Completes a checksum: `headers` is what `FrameSink::begin` got, with the pseudo-header sum in
/// its TCP checksum field; `payload` is the sum of all payload pieces. Returns the two bytes to
/// write at `l2_len + l3_len + 16`, the field's place in a TCP header.
#[inline]
pub fn complete_tcp_checksum(
    headers: &[u8],
    meta: &crate::base::frame_sink::FrameMeta,
    payload: OnesComplementSum,
) -> [u8; 2] {
    let l4 = usize::from(meta.l2_len) + usize::from(meta.l3_len);
    let mut sum = OnesComplementSum::new();
    sum.add(headers.get(l4..).unwrap_or(&[]));
    sum.add_word(payload.value());
    (!sum.value()).to_be_bytes()
}

/// Offset of the checksum field [`finish`] fills.
#[inline]
pub fn tcp_checksum_offset(meta: &crate::base::frame_sink::FrameMeta) -> usize {
    usize::from(meta.l2_len) + usize::from(meta.l3_len) + 16
}

/// Folds to 16 bits with end-around carry.
#[inline]
pub(crate) fn fold(mut v: u64) -> u16 {
    v = (v & 0xffff_ffff) + (v >> 32);
    v = (v & 0xffff_ffff) + (v >> 32);
    v = (v & 0xffff) + (v >> 16);
    v = (v & 0xffff) + (v >> 16);
    v as u16
}

/// Sum of big-endian 16-bit words, odd tail padded with zero, as an unfolded value.
/// 32-bit lanes into 64-bit accumulators: vectorises, and cannot overflow below 2^32 words.
#[inline]
fn sum_bytes(data: &[u8]) -> u64 {
    let mut lanes = [0u64; 16];
    let mut blocks = data.chunks_exact(64);
    for b in &mut blocks {
        for (lane, w) in lanes.iter_mut().zip(b.chunks_exact(4)) {
            *lane += u64::from(u32::from_ne_bytes([w[0], w[1], w[2], w[3]]));
        }
    }
    let mut sum: u64 = lanes.iter().sum();
    let mut words = blocks.remainder().chunks_exact(4);
    for w in &mut words {
        sum += u64::from(u32::from_ne_bytes([w[0], w[1], w[2], w[3]]));
    }
    let tail = words.remainder();
    if !tail.is_empty() {
        let mut w = [0u8; 4];
        w[..tail.len()].copy_from_slice(tail);
        sum += u64::from(u32::from_ne_bytes(w));
    }
    u64::from(u16::from_be(fold(sum)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference(data: &[u8]) -> u16 {
        let mut s = 0u32;
        for w in data.chunks(2) {
            s += u32::from(u16::from_be_bytes([w[0], *w.get(1).unwrap_or(&0)]));
            s = (s & 0xffff) + (s >> 16);
        }
        s as u16
    }

    fn equal(a: u16, b: u16) -> bool {
        // 0 and 0xffff are both zero in one's complement.
        a == b || (a.is_multiple_of(0xffff) && b.is_multiple_of(0xffff))
    }

    #[test]
    fn pieces_of_any_length_sum_like_the_whole_rfc_1071() {
        let data: Vec<u8> = (0..4000u32)
            .map(|i| (i.wrapping_mul(2654435761) >> 13) as u8)
            .collect();
        for len in [
            0, 1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, 1447, 1448, 3999,
        ] {
            let whole = reference(&data[..len]);
            for cut in [0, 1, 2, 7, 64, 65, 700] {
                let cut = cut.min(len);
                for cut2 in [cut, (cut + 1).min(len), (cut + 33).min(len)] {
                    let mut s = OnesComplementSum::new();
                    s.add(&data[..cut]);
                    s.add(&data[cut..cut2]);
                    s.add(&data[cut2..len]);
                    assert!(equal(s.value(), whole), "len {len} cuts {cut} {cut2}");
                }
            }
        }
        let ones = vec![0xff; 65535];
        let mut s = OnesComplementSum::new();
        s.add(&ones);
        assert!(equal(s.value(), reference(&ones)));
    }
}
