//! Lists of C buffers (`struct iovec`), consumed from the beginning.

use std::slice;

/// Buffers to read from.
pub struct SourceBuffers<'a> {
    list: &'a [libc::iovec],
    /// Bytes consumed of the first buffer.
    done: usize,
    left: usize,
}

/// Buffers to fill.
pub struct DestinationBuffers<'a>(SourceBuffers<'a>);

/// Total length of all buffers.
fn sum(list: &[libc::iovec]) -> usize {
    list.iter()
        .fold(0, |sum: usize, part| sum.saturating_add(part.iov_len))
}

impl<'a> SourceBuffers<'a> {
    /// # Safety
    /// Each buffer is valid for its length, for as long as the result is used.
    pub unsafe fn new(list: &'a [libc::iovec]) -> SourceBuffers<'a> {
        SourceBuffers {
            list,
            done: 0,
            left: sum(list),
        }
    }

    /// Number of bytes left.
    pub fn left(&self) -> usize {
        self.left
    }

    /// Skips the first bytes.
    pub fn skip(&mut self, count: usize) {
        let mut left = count;
        while left > 0 {
            let (_, length) = self.take_raw(left);
            if length == 0 {
                return;
            }
            left -= length;
        }
    }

    /// Takes the next contiguous bytes, at most `most`: pointer and length.
    fn take_raw(&mut self, most: usize) -> (*mut u8, usize) {
        while let Some((first, rest)) = self.list.split_first() {
            let there = first.iov_len - self.done;
            if there == 0 {
                self.list = rest;
                self.done = 0;
                continue;
            }
            let taken = there.min(most);
            let start = first.iov_base.cast::<u8>().wrapping_add(self.done);
            self.done += taken;
            self.left -= taken;
            return (start, taken);
        }
        (std::ptr::NonNull::dangling().as_ptr(), 0)
    }

    /// Takes the next contiguous bytes, at most `most`. Empty only at the end.
    pub fn take(&mut self, most: usize) -> &'a [u8] {
        let (start, length) = self.take_raw(most);
        // SAFETY: as the caller of `new` promised.
        unsafe { slice::from_raw_parts(start, length) }
    }

    /// Copies the next bytes.
    pub fn copy_to(&mut self, to: &mut [u8]) {
        let mut done = 0;
        while done < to.len() {
            let piece = self.take(to.len() - done);
            if piece.is_empty() {
                return;
            }
            to[done..done + piece.len()].copy_from_slice(piece);
            done += piece.len();
        }
    }
}

impl<'a> DestinationBuffers<'a> {
    /// # Safety
    /// As for [`SourceBuffers::new`]; the buffers are not used elsewhere.
    pub unsafe fn new(list: &'a [libc::iovec]) -> DestinationBuffers<'a> {
        // SAFETY: as the caller promised.
        DestinationBuffers(unsafe { SourceBuffers::new(list) })
    }

    /// Number of bytes left to fill.
    pub fn left(&self) -> usize {
        self.0.left()
    }

    /// Skips the first bytes.
    pub fn skip(&mut self, count: usize) {
        self.0.skip(count);
    }

    /// Takes room for the next bytes, at most `most`. Empty only at the end.
    pub fn take(&mut self, most: usize) -> &'a mut [u8] {
        let (start, length) = self.0.take_raw(most);
        // SAFETY: as the caller of `new` promised.
        unsafe { slice::from_raw_parts_mut(start, length) }
    }
}
