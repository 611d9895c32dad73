//! The bytes of each message, so that a receiver can tell whether it has the right
//! one: a stream seeded by queue pair and message number.

use siw::Mr;

/// Bytes handled at a time.
const CHUNK: usize = 4096;

fn word(seed: u64, i: usize) -> u64 {
    // A step that changes every byte, mixed so that neighbours share nothing.
    let x = (seed ^ i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^ (x >> 29)
}

fn seed(qp: u32, message: u64) -> u64 {
    (u64::from(qp) + 1)
        .wrapping_mul(0xd6e8_feb8_6659_fd93)
        .wrapping_add(message)
        .rotate_left(31)
        .wrapping_mul(0xa076_1d64_78bd_642f)
}

/// The bytes of message `message` on queue pair `qp` from `at`, a multiple of 8, on.
pub fn bytes(qp: u32, message: u64, at: usize, out: &mut [u8]) {
    let seed = seed(qp, message);
    for (i, chunk) in out.chunks_mut(8).enumerate() {
        let w = word(seed, at / 8 + i).to_le_bytes();
        chunk.copy_from_slice(&w[..chunk.len()]);
    }
}

/// Puts a message into memory.
pub fn fill(mr: &Mr, off: usize, len: usize, qp: u32, message: u64) -> Result<(), siw::Error> {
    let mut buf = [0; CHUNK];
    for at in (0..len).step_by(CHUNK) {
        let part = &mut buf[..CHUNK.min(len - at)];
        bytes(qp, message, at, part);
        mr.write(off + at, part)?;
    }
    Ok(())
}

/// The first wrong byte of a message in memory.
pub fn mismatch(
    mr: &Mr,
    off: usize,
    len: usize,
    qp: u32,
    message: u64,
) -> Result<Option<usize>, siw::Error> {
    compare(len, qp, message, |at, part| mr.read(off + at, part))
}

fn compare<E>(
    len: usize,
    qp: u32,
    message: u64,
    mut read: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
) -> Result<Option<usize>, E> {
    let (mut want, mut have) = ([0; CHUNK], [0; CHUNK]);
    for at in (0..len).step_by(CHUNK) {
        let n = CHUNK.min(len - at);
        bytes(qp, message, at, &mut want[..n]);
        read(at, &mut have[..n])?;
        if want[..n] != have[..n] {
            let i = (0..n).find(|i| want[*i] != have[*i]);
            return Ok(i.map(|i| at + i));
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
            bytes(qp, message, at, &mut b);
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
        bytes(2, 9, 0, &mut message);
        let look = |m: &[u8], number| {
            compare(m.len(), 2, number, |at, part| {
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
        bytes(3, 7, 0, &mut whole);
        let mut part = [0; 51];
        bytes(3, 7, 128, &mut part);
        assert_eq!(part, whole[128..179]);
    }
}
