//! Message contents, a stream seeded by queue pair and message number, so that a receiver can
//! verify that it has the right message.

use siw::Mr;

/// Bytes handled at a time.
const CHUNK: usize = 4096;

/// Word `index` of the stream with this seed.
fn pattern_word(seed: u64, index: usize) -> u64 {
    // A multiplication that changes every byte, mixed so that neighbouring words differ throughout.
    let mixed = (seed ^ index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ (mixed >> 29)
}

/// The seed of a message's stream.
fn message_seed(qp: u32, message: u64) -> u64 {
    (u64::from(qp) + 1)
        .wrapping_mul(0xd6e8_feb8_6659_fd93)
        .wrapping_add(message)
        .rotate_left(31)
        .wrapping_mul(0xa076_1d64_78bd_642f)
}

/// Generates the bytes of message `message` on queue pair `qp` from offset `at`, a multiple of 8,
/// on.
pub fn write_bytes(qp: u32, message: u64, at: usize, out: &mut [u8]) {
    let seed = message_seed(qp, message);
    for (index, chunk) in out.chunks_mut(8).enumerate() {
        let word = pattern_word(seed, at / 8 + index).to_le_bytes();
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
}

/// Writes a message's contents into memory.
pub fn fill_memory(
    mr: &Mr,
    offset: usize,
    len: usize,
    qp: u32,
    message: u64,
) -> Result<(), siw::Error> {
    let mut buf = [0; CHUNK];
    for at in (0..len).step_by(CHUNK) {
        let part = &mut buf[..CHUNK.min(len - at)];
        write_bytes(qp, message, at, part);
        mr.write(offset + at, part)?;
    }
    Ok(())
}

/// Offset of the first wrong byte of a message in memory, if any.
pub fn find_mismatch(
    mr: &Mr,
    offset: usize,
    len: usize,
    qp: u32,
    message: u64,
) -> Result<Option<usize>, siw::Error> {
    find_mismatch_with(len, qp, message, |at, part| mr.read(offset + at, part))
}

fn find_mismatch_with<E>(
    len: usize,
    qp: u32,
    message: u64,
    mut read: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
) -> Result<Option<usize>, E> {
    let (mut want, mut have) = ([0; CHUNK], [0; CHUNK]);
    for at in (0..len).step_by(CHUNK) {
        let length = CHUNK.min(len - at);
        write_bytes(qp, message, at, &mut want[..length]);
        read(at, &mut have[..length])?;
        if want[..length] != have[..length] {
            let index = (0..length).find(|index| want[*index] != have[*index]);
            return Ok(index.map(|index| at + index));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_queue_pairs_and_offsets_have_different_bytes() {
        let part = |qp, message, at| {
            let mut b = [0; 64];
            write_bytes(qp, message, at, &mut b);
            b
        };
        let first = part(0, 0, 0);
        for other in [part(1, 0, 0), part(0, 1, 0), part(0, 0, 64)] {
            let same = first.iter().zip(&other).filter(|(a, b)| a == b).count();
            assert!(same < 8, "{same} of 64 bytes are the same");
        }
        assert_eq!(first, part(0, 0, 0));
    }

    #[test]
    fn one_wrong_byte_anywhere_is_found() {
        let mut message = vec![0; 10_001];
        write_bytes(2, 9, 0, &mut message);
        let look = |m: &[u8], number| {
            find_mismatch_with(m.len(), 2, number, |at, part| {
                part.copy_from_slice(&m[at..at + part.len()]);
                Ok::<_, ()>(())
            })
        };
        assert_eq!(look(&message, 9), Ok(None));
        assert!(
            look(&message, 8).is_ok_and(|at| at.is_some()),
            "another message"
        );
        for at in [0, 4095, 4096, 10_000] {
            message[at] ^= 1;
            assert_eq!(look(&message, 9), Ok(Some(at)));
            message[at] ^= 1;
        }
    }

    #[test]
    fn a_part_equals_the_same_part_of_the_whole() {
        let mut whole = [0; 256];
        write_bytes(3, 7, 0, &mut whole);
        let mut part = [0; 51];
        write_bytes(3, 7, 128, &mut part);
        assert_eq!(part, whole[128..179]);
    }
}
