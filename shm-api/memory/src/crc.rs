//! CRC32c of FPDUs (RFC 5044 section 5, RFC 3720 appendix B.4), called by iWARP
//! for every FPDU in both directions.
//!
//! | processor | kernel |
//! |---|---|
//! | AVX-512 and VPCLMULQDQ | 512-bit folding, `crc_fold.rs` (faster at FPDU size than crc-fast's own AVX-512 kernels) |
//! | SSE4.2 and PCLMULQDQ | the CRC32 instruction in three streams, `crc_streams.rs` |
//! | neither | crc-fast |
//!
//! The first two classes compute short buffers with the CRC32 instruction alone. Payload is in the
//! cache when its CRC is computed: it has just been copied, or written by the NIC. Nanoseconds on an
//! AMD EPYC (Zen 3, no AVX-512), data in the cache and in memory:
//!
//! | bytes | streams | crc-fast | instruction alone |
//! |---|---|---|---|
//! | 64 | 4.6, 12 | 13, 18 | 4.0, 11 |
//! | 1,400 | 62, 150 | 131, 187 | 153, 179 |
//! | 8,900 | 378, 1,450 | 590, 1,200 | 1,076, 1,170 |
//! | 65,536 | 2,790, 11,700 | 3,720, 5,330 | 7,900, 8,760 |
//!
//! Tests compare all of them with the crc32c crate.

use core::sync::atomic::{AtomicU8, Ordering};

use crc_fast::{CrcAlgorithm, Digest};
use siw_shm::{OutOfBounds, SharedMemory};

use crate::{crc_fold, crc_streams};

/// Running CRC32c over several pieces. Init and final xor are ~0; on the wire the
/// value is stored little-endian.
#[derive(Debug, Clone, Copy)]
pub struct Crc32c(u32);

impl Default for Crc32c {
    fn default() -> Self {
        Self::new()
    }
}

impl Crc32c {
    /// The CRC of an empty message, to be continued.
    #[inline]
    pub fn new() -> Self {
        Crc32c(0)
    }

    /// Adds bytes.
    #[inline]
    pub fn update(&mut self, data: &[u8]) -> &mut Self {
        self.0 = crc32c_append(self.0, data);
        self
    }

    /// Continues from the value of earlier bytes.
    #[inline]
    pub fn resume_from(value: u32) -> Self {
        Crc32c(value)
    }

    /// The finished CRC of all bytes so far.
    #[inline]
    pub fn value(&self) -> u32 {
        self.0
    }
}

/// A CRC32c implementation: its name, and a function with the arguments of [`crc32c_append`].
pub type CrcImplementation = (&'static str, fn(u32, &[u8]) -> u32);

/// All implementations that this processor supports, whichever [`crc32c_append`] would choose; for
/// measurements.
pub fn available_implementations() -> Vec<CrcImplementation> {
    let mut all: Vec<CrcImplementation> = vec![("crc-fast", update_portable)];
    if std::arch::is_x86_feature_detected!("sse4.2") {
        all.push(("SSE4.2 instruction", update_short));
    }
    if crc_streams::is_available() {
        all.push(("SSE4.2 in three streams", |crc, data| {
            // SAFETY: just checked.
            unsafe { crc_streams::update_in_parts(crc, data) }
        }));
    }
    if super::crc_fold::is_available() {
        all.push(("AVX-512 folding", crc32c_append));
    }
    all
}

/// CRC32c of `data`.
#[inline]
pub fn crc32c(data: &[u8]) -> u32 {
    crc32c_append(0, data)
}

/// CRC32c of earlier bytes whose CRC is `crc`, followed by `data` (0 for none):
/// `crc32c_append(crc32c(a), b) == crc32c(ab)`.
#[inline(always)]
pub fn crc32c_append(crc: u32, data: &[u8]) -> u32 {
    let kernel = chosen_kernel();
    if data.len() < SHORT && kernel <= INSTRUCTIONS {
        // SAFETY: the CPU has SSE4.2.
        return unsafe { !crc_fold::continue_short(!crc, data) };
    }
    update_long(kernel, crc, data)
}

#[inline(never)]
fn update_long(kernel: u8, crc: u32, data: &[u8]) -> u32 {
    match kernel {
        // SAFETY: the CPU has the features that the kernel needs.
        FOLD if data.len() >= FOLD_FROM => unsafe { crc_fold::update_folded(crc, data) },
        // SAFETY: as before.
        INSTRUCTIONS => unsafe { crc_streams::update_in_parts(crc, data) },
        // SAFETY: the CPU has SSE4.2.
        FOLD => unsafe { !crc_fold::continue_short(!crc, data) },
        _ => update_portable(crc, data),
    }
}

/// Shorter buffers use the SSE4.2 instruction if the CPU has it.
const SHORT: usize = if crc_streams::MIN_LEN < FOLD_FROM {
    crc_streams::MIN_LEN
} else {
    FOLD_FROM
};

/// AVX-512 folding, and SSE4.2 for short buffers.
pub(crate) const FOLD: u8 = 1;
/// SSE4.2 in three streams, and alone for short buffers.
pub(crate) const INSTRUCTIONS: u8 = 2;
/// crc-fast.
const PORTABLE: u8 = 3;

/// The kernel to use; cached, because it is needed for each FPDU.
#[inline]
pub(crate) fn chosen_kernel() -> u8 {
    static ANSWER: AtomicU8 = AtomicU8::new(0);
    match ANSWER.load(Ordering::Relaxed) {
        0 => {
            let kernel = choose_kernel();
            ANSWER.store(kernel, Ordering::Relaxed);
            kernel
        }
        kernel => kernel,
    }
}

/// The method used on this machine, for logs.
pub fn crc32c_method() -> &'static str {
    match chosen_kernel() {
        FOLD => "AVX-512",
        INSTRUCTIONS => "SSE4.2",
        _ => "crc-fast",
    }
}

#[cold]
fn choose_kernel() -> u8 {
    if crc_fold::is_available() {
        FOLD
    } else if crc_streams::is_available() {
        INSTRUCTIONS
    } else {
        PORTABLE
    }
}

/// [`crc32c_append`] over `len` bytes at `offset` of shared memory.
#[inline]
pub fn crc32c_append_shared(
    crc: u32,
    region: &SharedMemory,
    offset: usize,
    len: usize,
) -> Result<u32, OutOfBounds> {
    let start = region.ptr_at(offset, len)?;
    // SAFETY: start is readable for len bytes, and the slice lives for this call only. Applications
    // that obey verbs do not write to the bytes meanwhile, as a slice requires; one that does gets a
    // wrong checksum of its own data. The bytes are used only in arithmetic, never as an index or a
    // length.
    Ok(crc32c_append(crc, unsafe {
        std::slice::from_raw_parts(start, len)
    }))
}

/// Below this length, the SSE4.2 instruction is faster than folding.
const FOLD_FROM: usize = crc_fold::MIN_LEN;

/// Uses the SSE4.2 instruction if the CPU has it.
fn update_short(crc: u32, data: &[u8]) -> u32 {
    if std::arch::is_x86_feature_detected!("sse4.2") {
        // SAFETY: the CPU has SSE4.2.
        return unsafe { !crc_fold::continue_short(!crc, data) };
    }
    update_portable(crc, data)
}

/// Uses crc-fast, which selects by CPU features.
#[inline(never)]
fn update_portable(crc: u32, data: &[u8]) -> u32 {
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!crc));
    digest.update(data);
    digest.finalize() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_form_equals_the_whole() {
        let data: Vec<u8> = (0..5000u32).map(|i| (i * 7 + (i >> 8)) as u8).collect();
        let lens = [
            0, 1, 7, 8, 9, 20, 64, 255, 256, 257, 319, 320, 511, 512, 575, 1428, 1460, 5000,
        ];
        for len in lens {
            let whole = ::crc32c::crc32c(&data[..len]);
            assert_eq!(crc32c(&data[..len]), whole, "len {len}");
            for cut in [0, 1, len / 3, len / 2, len] {
                let cut = cut.min(len);
                let mut c = Crc32c::new();
                c.update(&data[..cut]).update(&data[cut..len]);
                assert_eq!(c.value(), whole, "len {len} cut {cut}");
            }
        }
    }

    #[test]
    fn every_way_of_computing_gives_the_same() {
        let data: Vec<u8> = (0..3000u32).map(|i| ((i * i) >> 3) as u8).collect();
        let has_fold = crc_fold::is_available();
        for len in 256..data.len() {
            for crc in [0, 1, 0xdead_beef, u32::MAX] {
                let want = ::crc32c::crc32c_append(crc, &data[..len]);
                let part = &data[..len];
                assert_eq!(crc32c_append(crc, part), want, "len {len}");
                assert_eq!(update_portable(crc, part), want, "len {len}");
                if has_fold {
                    // SAFETY: the CPU has the features that the kernel needs.
                    let folded = unsafe { crc_fold::update_folded(crc, part) };
                    assert_eq!(folded, want, "len {len}");
                }
                assert_eq!(update_short(crc, part), want, "len {len}");
                if crc_streams::is_available() {
                    // SAFETY: the CPU has the features that the kernel needs.
                    let by_parts = unsafe { crc_streams::update_in_parts(crc, part) };
                    assert_eq!(by_parts, want, "len {len}");
                }
            }
        }
    }

    /// RFC 5044 section 7.3 figures 5 and 6: a Send of 24 zero bytes, first after a
    /// marker, then with one in the middle.
    #[test]
    fn the_example_fpdus_of_rfc_5044_have_their_published_crcs() {
        let fpdu = |msn: u8| {
            let mut f = vec![
                0, 0x2a, 0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, msn, 0, 0, 0, 0,
            ];
            f.extend([0; 24]);
            f
        };
        let mut fig5 = Crc32c::new();
        fig5.update(&[0, 0, 0, 0]).update(&fpdu(1));
        assert_eq!(fig5.value().to_le_bytes(), [0x52, 0x23, 0x99, 0x83]);
        let mut fig6 = Crc32c::new();
        fig6.update(&fpdu(2)[..20])
            .update(&[0, 0, 0, 0x14])
            .update(&fpdu(2)[20..]);
        assert_eq!(fig6.value().to_le_bytes(), [0x84, 0x92, 0x58, 0x98]);
    }
}
