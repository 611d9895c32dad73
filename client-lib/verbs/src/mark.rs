//! Marks that tell open files apart.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};

/// Identity of an open file, kept by the kernel as the signal number of fcntl(2) F_SETSIG, which
/// has no effect without O_ASYNC. Reading it is the cheapest system call that tells two files
/// apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark(c_int);

const F_SETSIG: c_int = 10;
const F_GETSIG: c_int = 11;

impl Mark {
    /// Real-time signals of the C library's users; programs leave the value at 0 or use one of the
    /// first.
    const ALL: std::ops::Range<c_int> = 34..65;

    /// Returns the next mark. Only files that were given 31 times apart have the same one.
    pub fn next() -> Mark {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed) % Mark::ALL.len() as u32;
        Mark(Mark::ALL.end - 1 - count as c_int)
    }

    /// Reads the mark of the file with that number, if it has one.
    pub fn of(descriptor: c_int) -> Option<Mark> {
        // SAFETY: the command only reads state of the file. By system call number, because a
        // preloaded library may define fcntl.
        let mark = unsafe { libc::syscall(libc::SYS_fcntl, descriptor, F_GETSIG) };
        let mark = c_int::try_from(mark).ok()?;
        Mark::ALL.contains(&mark).then_some(Mark(mark))
    }

    /// Marks the file with that number.
    pub fn set(self, descriptor: c_int) {
        // SAFETY: the command only writes state of the file.
        unsafe { libc::syscall(libc::SYS_fcntl, descriptor, F_SETSIG, self.0) };
    }
}
