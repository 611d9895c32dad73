//! Registered buffers that belong to their region: the safe form of [`Pd::reg_memory`](crate::Pd::reg_memory).

use super::AppMr;
use crate::Error;
use crate::error::Failed;
use crate::slices::{RegionKeys, region_methods};
use siw_shm::shared_memory::copy_bytes;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::sync::atomic::{AtomicU8, Ordering};

/// An owned buffer of plain numbers that stays at one address, as needed by [`Pd::register`](crate::Pd::register).
///
/// # Safety
/// [`Self::bytes`] returns the same range each time, also after the value was moved. The range is
/// readable, writable and initialised, any content of it is valid, and nothing else refers to it as
/// long as the value is not accessed, even if it is never dropped.
pub unsafe trait StableBuffer: Send + 'static {
    /// First byte and length.
    fn bytes(&mut self) -> (*mut u8, usize);
}

macro_rules! stable_buffers {
    ($($number:ty)*) => {$(
        // SAFETY: the elements are on the heap, and numbers may have any content.
        unsafe impl StableBuffer for Vec<$number> {
            fn bytes(&mut self) -> (*mut u8, usize) {
                (self.as_mut_ptr().cast(), size_of_val(&self[..]))
            }
        }

        // SAFETY: as for `Vec`.
        unsafe impl StableBuffer for Box<[$number]> {
            fn bytes(&mut self) -> (*mut u8, usize) {
                (self.as_mut_ptr().cast(), size_of_val(&self[..]))
            }
        }

        // SAFETY: as for `Vec`.
        unsafe impl<const LEN: usize> StableBuffer for Box<[$number; LEN]> {
            fn bytes(&mut self) -> (*mut u8, usize) {
                (self.as_mut_ptr().cast(), size_of_val(&self[..]))
            }
        }

        // SAFETY: borrowed for ever; numbers may have any content.
        unsafe impl StableBuffer for &'static mut [$number] {
            fn bytes(&mut self) -> (*mut u8, usize) {
                (self.as_mut_ptr().cast(), size_of_val(&self[..]))
            }
        }
    )*};
}

stable_buffers!(u8 u16 u32 u64 u128 usize i8 i16 i32 i64 i128 isize f32 f64);

/// A registered buffer of the application. Peers may write to it at any time, so it is read and
/// written by copies; [`OwnedMr::dereg`] returns the buffer.
///
/// Dropping deregisters it, unbinds the windows that are bound to it, and frees the buffer, on a
/// thread, because the daemon has to confirm that peers cannot write to it any more. If it does not,
/// the buffer is leaked.
pub struct OwnedMr<O: StableBuffer> {
    pub(super) region: ManuallyDrop<AppMr>,
    /// None once the buffer was returned or freed. `MaybeUninit`, because a `Box` that is moved
    /// asserts that nothing else accesses its content.
    pub(super) buffer: Option<MaybeUninit<O>>,
}

impl<O: StableBuffer> OwnedMr<O> {
    /// Address for work requests and peers.
    #[inline]
    pub fn addr(&self) -> u64 {
        self.region.addr()
    }

    /// Key for own work requests.
    pub fn lkey(&self) -> u32 {
        self.region.lkey()
    }

    /// Key to give to the peer.
    pub fn rkey(&self) -> u32 {
        self.region.rkey()
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.region.len()
    }

    /// The region: rights, methods of access, protection domain.
    pub fn region(&self) -> &AppMr {
        &self.region
    }

    #[inline]
    fn keys(&self) -> RegionKeys {
        RegionKeys {
            addr: self.addr(),
            len: self.len(),
            lkey: self.lkey(),
            rkey: self.rkey(),
        }
    }

    region_methods!();

    fn range_at(&self, offset: usize, len: usize) -> Result<*mut u8, Error> {
        match offset.checked_add(len) {
            Some(end) if end <= self.region.len() => Ok(self.region.as_ptr().wrapping_add(offset)),
            _ => Err(Error::Invalid("outside of the memory region")),
        }
    }

    /// Copies `source` to `offset`.
    pub fn write(&self, offset: usize, source: &[u8]) -> Result<(), Error> {
        let destination = self.range_at(offset, source.len())?;
        // SAFETY: the range lies in the buffer, to which no reference exists; `copy_bytes` allows
        // concurrent accesses.
        unsafe { copy_bytes(source.as_ptr(), destination, source.len()) };
        Ok(())
    }

    /// Copies from `offset` into `destination`.
    pub fn read(&self, offset: usize, destination: &mut [u8]) -> Result<(), Error> {
        let source = self.range_at(offset, destination.len())?;
        // SAFETY: as in `write`, in the other direction.
        unsafe { copy_bytes(source, destination.as_mut_ptr(), destination.len()) };
        Ok(())
    }

    /// Reads one byte from memory, to spin on data that a peer writes.
    #[inline]
    pub fn read_byte(&self, offset: usize) -> Result<u8, Error> {
        let byte = self.range_at(offset, 1)?;
        // SAFETY: the byte lies in the buffer, to which no reference exists.
        Ok(unsafe { AtomicU8::from_ptr(byte) }.load(Ordering::Acquire))
    }

    /// Deregisters it and returns the buffer, which is private memory again.
    ///
    /// # Errors
    /// The region comes back: `EBUSY` while memory windows are bound to it; `ENOMEM` if it is
    /// deregistered but its pages cannot be made private, for lack of memory or of mappings
    /// (vm.max_map_count). Then the buffer can still be read, and is never freed.
    pub fn dereg(mut self) -> Result<O, Failed<OwnedMr<O>>> {
        let tried = match self.region.return_buffer() {
            Ok(()) => self.buffer.take().ok_or(Error::Invalid("no buffer")),
            Err(error) => Err(error),
        };
        match tried {
            Ok(buffer) => {
                // SAFETY: initialised by `Pd::register`, and taken once. The daemon has confirmed
                // that nobody accesses it any more.
                Ok(unsafe { buffer.assume_init() })
            }
            Err(error) => Err(Failed {
                object: self,
                error,
            }),
        }
    }
}

impl<O: StableBuffer> Drop for OwnedMr<O> {
    fn drop(&mut self) {
        // SAFETY: taken here only.
        let mut region = unsafe { ManuallyDrop::take(&mut self.region) };
        let Some(buffer) = self.buffer.take() else {
            return;
        };
        let ctx = region.pd.ctx().clone();
        ctx.releaser.run(Box::new(move || {
            if !region.gone && region.revoke() {
                // SAFETY: as in `dereg`.
                drop(unsafe { buffer.assume_init() });
            }
        }));
    }
}
