//! Stops the other threads of this process while pages are replaced, where userfaultfd(2) is not
//! permitted or would make their system calls fail. No privilege is needed.
//!
//! ```text
//! signal   each thread of /proc/self/task, until a scan finds all of them parked
//! park     in the signal handler, by futex(2), until they sleep in the kernel
//! replace  copy the pages into the file and map it
//! resume   all
//! ```
//! A system call that writes to the pages ends before its thread runs a signal handler, and a thread
//! that is parked starts none, so afterwards only the kernel's asynchronous I/O can write. That has
//! descriptors and mappings by which it is found ([`super::pins`]), as have the kernel threads of
//! io_uring. New threads are started by threads that are not parked yet: the scan is repeated until
//! all threads that it finds are.
//!
//! A sleeping thread writes nothing, and the kernel nothing for it (rseq(2)), so its own stack and
//! thread-local data may be on the pages.
//!
//! Threads cannot be stopped, and the registration is refused, while one blocks all signals or does
//! not run its handler in time: a debugger has stopped it, it waits for a disk or for a child of
//! vfork(2). A process that shares memory by clone(2) with CLONE_VM, other than by vfork(2) and
//! posix_spawn(3), is not found.
//!
//! System calls that never restart after a signal, like poll(2) and epoll_wait(2), may fail with
//! EINTR.

use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags, RawDir};
use rustix::io::Errno;
use rustix::thread::futex;

/// Maximum number of other threads.
const MAX_THREADS: usize = 1024;
/// Time for all threads to park.
const PATIENCE: Duration = Duration::from_millis(500);
/// Time between two scans.
const PAUSE: Duration = Duration::from_micros(200);
/// Signals that are tried, the highest first; those of the C library are below.
const SIGNALS: std::ops::RangeInclusive<c_int> = 40..=62;

/// Odd while threads are to be parked.
static ROUND: AtomicU32 = AtomicU32::new(0);
/// Number of entries of [`PARKED`].
static COUNT: AtomicU32 = AtomicU32::new(0);
/// Ids of parked threads.
static PARKED: [AtomicI32; MAX_THREADS] = [const { AtomicI32::new(0) }; MAX_THREADS];
/// The handler. It uses its stack, and no other memory but the statics above.
extern "C" fn park(_: c_int, _: *mut libc::siginfo_t, _: *mut c_void) {
    let round = ROUND.load(Ordering::Acquire);
    if round.is_multiple_of(2) {
        return;
    }
    let place = COUNT.fetch_add(1, Ordering::AcqRel) as usize;
    if let Some(slot) = PARKED.get(place) {
        slot.store(
            rustix::thread::gettid().as_raw_nonzero().get(),
            Ordering::Release,
        );
    }
    while ROUND.load(Ordering::Acquire) == round {
        let _ = futex::wait(&ROUND, futex::Flags::PRIVATE, round, None);
    }
}

/// Returns the signal with the handler [`park`], installing it if the program has not used that
/// signal.
fn reserve_signal() -> Result<c_int, Errno> {
    static RESERVED: AtomicI32 = AtomicI32::new(0);
    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = park;
    let action_of = |signal| {
        // SAFETY: the call fills the structure.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            let is_known = libc::sigaction(signal, std::ptr::null(), &mut action) == 0;
            is_known.then_some(action.sa_sigaction)
        }
    };
    let reserved = RESERVED.load(Ordering::Relaxed);
    if reserved != 0 && action_of(reserved) == Some(handler as usize) {
        return Ok(reserved);
    }
    for signal in SIGNALS.rev() {
        if action_of(signal) != Some(libc::SIG_DFL) {
            continue;
        }
        // SAFETY: the handler is async-signal-safe; the signal had no handler.
        let installed = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_ONSTACK;
            libc::sigfillset(&mut action.sa_mask);
            libc::sigaction(signal, &action, null_mut()) == 0
        };
        if installed {
            RESERVED.store(signal, Ordering::Relaxed);
            return Ok(signal);
        }
    }
    Err(Errno::BUSY)
}

/// All other threads are parked, until dropped.
pub(super) struct ParkedThreads(());

impl Drop for ParkedThreads {
    fn drop(&mut self) {
        ROUND.fetch_add(1, Ordering::AcqRel);
        let _ = futex::wake(&ROUND, futex::Flags::PRIVATE, i32::MAX as u32);
    }
}

impl ParkedThreads {
    /// Parks all threads but this one. The caller is the only one in the process, and has blocked
    /// its signals. Allocates no memory.
    ///
    /// # Errors
    /// They cannot all be parked. Those that were go on.
    pub fn park_all() -> Result<ParkedThreads, Errno> {
        let signal = reserve_signal()?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let tasks = rustix::fs::open(c"/proc/self/task", flags, Mode::empty())?;
        let until = Instant::now() + PATIENCE;
        // Parking threads in vain would disturb them.
        loop {
            let scan = scan_threads(&tasks, |name, _| !blocks_signal(&tasks, name, signal))?;
            if scan.holds_for_all {
                break;
            }
            pause(until)?;
        }
        COUNT.store(0, Ordering::Relaxed);
        PARKED
            .iter()
            .for_each(|slot| slot.store(0, Ordering::Relaxed));
        ROUND.fetch_add(1, Ordering::AcqRel);
        let parked = ParkedThreads(());
        let mut signalled = [0; MAX_THREADS];
        let process = rustix::process::getpid().as_raw_nonzero().get();
        loop {
            let scan = scan_threads(&tasks, |name, thread| {
                let known = COUNT.load(Ordering::Acquire) as usize;
                if PARKED
                    .iter()
                    .take(known)
                    .any(|slot| slot.load(Ordering::Acquire) == thread)
                {
                    return sleeps(&tasks, name);
                }
                if let Some(place) = free_place(&mut signalled, thread) {
                    *place = thread;
                    // SAFETY: a signal to a thread of this process, with the handler above.
                    unsafe { libc::syscall(libc::SYS_tgkill, process, thread, signal) };
                }
                false
            })?;
            if scan.count > MAX_THREADS {
                return Err(Errno::BUSY);
            }
            if scan.holds_for_all {
                return Ok(parked);
            }
            pause(until)?;
        }
    }
}

/// Place for a thread in the list of those signalled; none if it is there.
fn free_place(signalled: &mut [i32; MAX_THREADS], thread: i32) -> Option<&mut i32> {
    let place = signalled
        .iter()
        .position(|known| *known == 0 || *known == thread)?;
    (signalled[place] == 0).then(|| &mut signalled[place])
}

fn pause(until: Instant) -> Result<(), Errno> {
    if Instant::now() > until {
        return Err(Errno::TIMEDOUT);
    }
    let pause = rustix::time::Timespec::try_from(PAUSE).map_err(|_| Errno::INVAL)?;
    let _ = rustix::thread::nanosleep(&pause);
    Ok(())
}

struct Scan {
    count: usize,
    holds_for_all: bool,
}

/// Calls a function for each other thread of the process.
fn scan_threads(tasks: &OwnedFd, mut holds: impl FnMut(&CStr, i32) -> bool) -> Result<Scan, Errno> {
    let own = rustix::thread::gettid().as_raw_nonzero().get();
    rustix::fs::seek(tasks, rustix::fs::SeekFrom::Start(0))?;
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut entries = RawDir::new(tasks, &mut buffer);
    let mut scan = Scan {
        count: 0,
        holds_for_all: true,
    };
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let name = entry.file_name();
        let thread = name.to_str().ok().and_then(|name| name.parse().ok());
        if let Some(thread) = thread.filter(|thread| *thread != own) {
            scan.count += 1;
            scan.holds_for_all &= holds(name, thread);
        }
    }
    Ok(scan)
}

/// Reads the beginning of a file of a thread in /proc.
fn read_of_thread<'a>(
    tasks: &OwnedFd,
    thread: &CStr,
    file: &CStr,
    buffer: &'a mut [u8],
) -> Result<&'a [u8], Errno> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let folder = rustix::fs::openat(tasks, thread, flags, Mode::empty())?;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(&folder, file, flags, Mode::empty())?;
    let len = rustix::io::read(&file, &mut *buffer)?;
    Ok(&buffer[..len])
}

/// Checks whether a thread blocks a signal (proc_pid_status(5)); one that has ended does not.
fn blocks_signal(tasks: &OwnedFd, thread: &CStr, signal: c_int) -> bool {
    const FIELD: &[u8] = b"\nSigBlk:\t";
    let mut buffer = [0; 4096];
    let Ok(text) = read_of_thread(tasks, thread, c"status", &mut buffer) else {
        return false;
    };
    let field = text.windows(FIELD.len()).position(|bytes| bytes == FIELD);
    let digits = field.and_then(|at| text.get(at + FIELD.len()..at + FIELD.len() + 16));
    let mask = digits
        .and_then(|digits| std::str::from_utf8(digits).ok())
        .and_then(|digits| u64::from_str_radix(digits, 16).ok());
    mask.is_none_or(|mask| mask & 1 << (signal - 1) != 0)
}

/// Checks whether a thread sleeps (proc_pid_stat(5)). One that is parked makes no other system call
/// than futex(2).
fn sleeps(tasks: &OwnedFd, thread: &CStr) -> bool {
    let mut buffer = [0; 64];
    let Ok(text) = read_of_thread(tasks, thread, c"stat", &mut buffer) else {
        return false;
    };
    // The state follows the name, which has at most 15 characters, among them any.
    let name_end = text.iter().take(32).rposition(|byte| *byte == b')');
    name_end.is_some_and(|end| text.get(end + 2) == Some(&b'S'))
}
