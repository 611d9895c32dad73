//! Guards memory whose pages a client can free: the daemon survives a fault, and learns the memory's
//! owner.
//!
//! A client holds the memfds of its memory, and can free their pages (fallocate(2) with
//! FALLOC_FL_PUNCH_HOLE, madvise(2) with MADV_REMOVE) until the daemon owns them
//! ([`SharedMemory::own_pages`](crate::SharedMemory::own_pages)): F_SEAL_WRITE cannot be set while the
//! client has the memory mapped for writing, and F_SEAL_FUTURE_WRITE must not be set before. Memory that
//! the client maps again and again, and its own files, are never owned. The daemon's next access allocates the page again; if no page is available, as in an
//! exhausted pool of hugepages, the access raises SIGBUS. The handler then replaces the whole mapping
//! by zeroed private memory and records its owner, and the thread continues. A SIGBUS anywhere else
//! remains fatal.
//!
//! System calls on this memory fail with EFAULT and raise no signal.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use siw_lockfree::address_table::{AddressRange, AddressTable};

/// Maximum number of guarded mappings: a process cannot have many more anyway (vm.max_map_count).
pub const MAX_GUARDED: usize = 1 << 16;

/// State that the handler needs; never freed.
struct FaultGuard {
    mappings: AddressTable,
    /// By index in the table: whether the mapping faulted since the last [`take_faulty_owners`].
    is_faulty: Box<[AtomicBool]>,
    any_faulty: AtomicBool,
    /// An event descriptor that is written after a fault.
    wake: OwnedFd,
    /// The previous action for SIGBUS.
    previous: libc::sigaction,
}

static GUARD: AtomicPtr<FaultGuard> = AtomicPtr::new(null_mut());

fn installed_guard() -> Option<&'static FaultGuard> {
    let guard = GUARD.load(Ordering::Acquire);
    // SAFETY: null, or a leaked box that is shared only.
    unsafe { guard.as_ref() }
}

/// A mapping in the table. Drop it before the mapping is unmapped.
#[derive(Debug)]
pub(crate) struct GuardedMapping(usize);

impl GuardedMapping {
    /// Adds the mapping of `len` bytes at `start`, which must be a whole mapping.
    ///
    /// # Errors
    /// [`MAX_GUARDED`] mappings are already guarded.
    pub(crate) fn enter(start: usize, len: usize, owner: u64) -> io::Result<Option<Self>> {
        let Some(guard) = installed_guard() else {
            return Ok(None);
        };
        let range = AddressRange {
            start: start as u64,
            len: len as u64,
            owner,
        };
        let full = || io::Error::other("too many shared memory mappings exist");
        let index = guard.mappings.insert_range(range).ok_or_else(full)?;
        guard.is_faulty[index].store(false, Ordering::Relaxed);
        Ok(Some(GuardedMapping(index)))
    }

    /// Owner that it was entered with.
    #[cfg(feature = "serde")]
    pub(crate) fn owner(&self) -> Option<u64> {
        let range = installed_guard()?.mappings.range_at(self.0);
        range.map(|range| range.owner)
    }
}

impl Drop for GuardedMapping {
    fn drop(&mut self) {
        if let Some(guard) = installed_guard() {
            guard.mappings.remove_range(self.0);
        }
    }
}

/// Installs the SIGBUS handler, once per process. `wake`: an event descriptor (eventfd(2),
/// non-blocking) that is written after a fault on guarded memory.
///
/// # Errors
/// The operating system refuses, or a guard is already installed.
pub fn install(wake: OwnedFd) -> io::Result<()> {
    // SAFETY: all zeroes are a sigaction: the default action with an empty mask.
    let mut previous: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: reads the current action into a local structure.
    if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut previous) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let guard = Box::into_raw(Box::new(FaultGuard {
        mappings: AddressTable::new(MAX_GUARDED),
        is_faulty: (0..MAX_GUARDED).map(|_| AtomicBool::new(false)).collect(),
        any_faulty: AtomicBool::new(false),
        wake,
        previous,
    }));
    let (release, relaxed) = (Ordering::Release, Ordering::Relaxed);
    if GUARD
        .compare_exchange(null_mut(), guard, release, relaxed)
        .is_err()
    {
        // SAFETY: it came from the box above and was never published.
        drop(unsafe { Box::from_raw(guard) });
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    // SAFETY: as above.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = on_bus_error;
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler only does what is async-signal-safe: atomics and system calls.
    if unsafe { libc::sigaction(libc::SIGBUS, &action, null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Returns the owners of guarded memory that faulted since the last call, as passed to
/// [`SharedMemory::guard_for`](crate::SharedMemory::guard_for).
pub fn take_faulty_owners() -> Vec<u64> {
    let Some(guard) = installed_guard() else {
        return Vec::new();
    };
    // Pairs with the Release in the handler: the marks are set.
    if !guard.any_faulty.load(Ordering::Relaxed) || !guard.any_faulty.swap(false, Ordering::Acquire)
    {
        return Vec::new();
    }
    let mut owners: Vec<u64> = guard
        .is_faulty
        .iter()
        .enumerate()
        .filter(|(_, is_faulty)| is_faulty.load(Ordering::Relaxed))
        .filter_map(|(index, is_faulty)| {
            is_faulty.store(false, Ordering::Relaxed);
            guard.mappings.range_at(index).map(|range| range.owner)
        })
        .collect();
    owners.sort_unstable();
    owners.dedup();
    owners
}

/// The SIGBUS handler: takes no lock, allocates nothing, and preserves errno.
extern "C" fn on_bus_error(signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    let Some(guard) = installed_guard() else {
        return;
    };
    // SAFETY: the kernel hands in a whole siginfo_t; SIGBUS has an address.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as u64) };
    // SAFETY: the errno of this thread, which the interrupted code may read.
    let errno = unsafe { *libc::__errno_location() };
    let is_memory = matches!(code, libc::BUS_ADRERR | libc::BUS_MCEERR_AR);
    let found = guard.mappings.find_range(address).filter(|_| is_memory);
    if found.is_some_and(|(index, range)| guard.replace_mapping(index, range)) {
        // SAFETY: as above.
        unsafe { *libc::__errno_location() = errno };
        return;
    }
    // Not guarded: the instruction faults again, under the previous action.
    // SAFETY: restores the action that `install` got from the same call.
    unsafe { libc::sigaction(signal, &guard.previous, null_mut()) };
}

impl FaultGuard {
    /// Replaces the mapping by zeroed memory, so that it cannot fault again, and marks it as faulty.
    /// `false`: the system call failed.
    fn replace_mapping(&self, index: usize, range: AddressRange) -> bool {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let (start, len) = (range.start as *mut libc::c_void, range.len as usize);
        // SAFETY: the range is one whole mapping of shared memory. The interrupted thread uses it, so
        // it is neither unmapped nor removed from the table meanwhile. It is accessed by raw copies
        // and atomics only, for which any content is valid.
        let replaced = unsafe { libc::mmap(start, len, access, kind, -1, 0) };
        if replaced == libc::MAP_FAILED {
            return false;
        }
        self.is_faulty[index].store(true, Ordering::Relaxed);
        // Pairs with the Acquire in `take_faulty_owners`.
        self.any_faulty.store(true, Ordering::Release);
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight bytes of a local array; the descriptor is never closed.
        unsafe { libc::write(self.wake.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        true
    }
}
