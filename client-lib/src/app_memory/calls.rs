//! madvise(2), mmap(2), mremap(2), munmap(2), free(3) and realloc(3) on memory that is or was registered,
//! for the drop-in library, which overrides them.
//!
//! Pages are a shared mapping of a file of the daemon while they are registered, and stay one after
//! that in a process with means to pin pages (`pins`), or as idle pages (`idle`). On a shared mapping
//! MADV_DONTNEED does not discard content, which allocators rely on for calloc(3), MADV_FREE fails, and
//! a mapping that grows shows the next pages of its file, which belong to other addresses. Here the
//! calls do what they do with private memory whose pages the kernel's ibv_reg_mr(3) has pinned:
//! discarded pages are replaced by private ones of zeroes, and a region keeps the old ones.
//!
//! An allocator may call these with its locks held, and threads that hold locks of this library
//! allocate. So nothing here allocates, or takes another lock than `MAPPINGS`; except where idle pages
//! exist, which is only so with the allocator of the C library, whose own calls do not come here.
//!
//! Programs with caches of registrations (UCX, Open MPI, libfabric) hook the C library's functions of these
//! names, some by replacing their code. So each call ends in the function that comes next (`next`), and
//! one that is carried out by system calls of this library is announced by a call of `next` without
//! effect. A hook may call back into this library: `next` is called without `MAPPINGS`.

use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io;
use std::ops::{Deref, Range};
use std::os::fd::{IntoRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::mm::{MapFlags, MremapFlags, ProtFlags};
use rustix::thread::futex;
use siw_shm::shared_memory::PAGE;

use super::attributes;
use super::cancel::CancelGuard;
use super::descriptors::is_remapped_file;
use super::idle;
use super::vma::{Mapping, Vma, find_mapping, list_vmas};
use super::windows::WINDOW;

/// Serialises changes of mappings of the daemon's files with those of the program. Its holders
/// allocate no memory, since an allocator may be waiting for it.
pub(super) static MAPPINGS: MappingLock = MappingLock(AtomicU32::new(FREE));

/// Number of calls of mremap(2) that may have moved mappings of the daemon's files. Changes while
/// [`MAPPINGS`] is held.
static MOVES: AtomicU32 = AtomicU32::new(0);
/// Attempts of [`list_unmoved`], each of which takes about a microsecond for a mapping.
const LIST_ATTEMPTS: usize = 4;

const FREE: u32 = 0;
const HELD: u32 = 1;
const HELD_AND_AWAITED: u32 = 2;

/// Lock that a child of fork(2) can free although the thread that holds it does not exist there.
pub(super) struct MappingLock(AtomicU32);

/// Frees the lock when dropped.
pub(super) struct HeldMappings<'a>(&'a AtomicU32);

impl MappingLock {
    pub fn lock(&self) -> HeldMappings<'_> {
        let taken = Ordering::Acquire;
        let free = self
            .0
            .compare_exchange(FREE, HELD, taken, Ordering::Relaxed);
        if free.is_err() {
            while self.0.swap(HELD_AND_AWAITED, taken) != FREE {
                let _ = futex::wait(&self.0, futex::Flags::PRIVATE, HELD_AND_AWAITED, None);
            }
        }
        HeldMappings(&self.0)
    }

    /// Frees it in a child of fork(2).
    pub fn reset_in_child(&self) {
        self.0.store(FREE, Ordering::Release);
    }
}

impl Drop for HeldMappings<'_> {
    fn drop(&mut self) {
        if self.0.swap(FREE, Ordering::Release) == HELD_AND_AWAITED {
            let _ = futex::wake(self.0, futex::Flags::PRIVATE, 1);
        }
    }
}

/// Lists all mappings of the process. A list is read piece by piece, so a mapping that moves meanwhile
/// could be missing; such a list is read again. None if mappings move all the time.
///
/// # Errors
/// /proc is not mounted.
pub(super) fn list_unmoved() -> io::Result<Option<Vec<Vma>>> {
    let count_moves = || {
        let _held = MAPPINGS.lock();
        MOVES.load(Ordering::Relaxed)
    };
    for _ in 0..LIST_ATTEMPTS {
        let before = count_moves();
        let all = list_vmas(&(0..usize::MAX))?;
        if count_moves() == before {
            return Ok(Some(all));
        }
    }
    Ok(None)
}

const FILTER_BITS: usize = 1 << 16;
/// A bit for each residue of the number of an address window, set before a page in such a window is
/// remapped: most calls concern other memory.
static REMAPPED_WINDOWS: [AtomicU64; FILTER_BITS / 64] =
    [const { AtomicU64::new(0) }; FILTER_BITS / 64];
/// Number of bits set.
static REMAPPED_COUNT: AtomicU32 = AtomicU32::new(0);

fn windows_of(range: &Range<usize>) -> impl Iterator<Item = (usize, u64)> {
    let (first, last) = (range.start / WINDOW, range.end.saturating_sub(1) / WINDOW);
    (first..=last).take(FILTER_BITS).map(|window| {
        let bit = window % FILTER_BITS;
        (bit / 64, 1 << (bit % 64))
    })
}

/// Records that pages of a range are going to be mappings of the daemon's files.
pub(super) fn mark_remapped(range: &Range<usize>) {
    for (word, bit) in windows_of(range) {
        if REMAPPED_WINDOWS[word].fetch_or(bit, Ordering::SeqCst) & bit == 0 {
            REMAPPED_COUNT.fetch_add(1, Ordering::SeqCst);
        }
    }
}

fn may_be_remapped(range: &Range<usize>) -> bool {
    REMAPPED_COUNT.load(Ordering::SeqCst) > 0
        && windows_of(range)
            .any(|(word, bit)| REMAPPED_WINDOWS[word].load(Ordering::SeqCst) & bit != 0)
}

fn is_ours(mapping: &Mapping) -> bool {
    mapping.shared && mapping.file.is_some_and(is_remapped_file)
}

/// The mapping that holds an address. `maps` is /proc/self/maps.
fn mapping_at(maps: &File, address: usize) -> Result<Option<Mapping>, Errno> {
    Ok(find_mapping(maps, address)?.filter(|found| found.range.start <= address))
}

/// /proc/self/maps. Its reader cannot be cancelled.
pub(super) struct Maps {
    file: File,
    _guard: CancelGuard,
}

impl Deref for Maps {
    type Target = File;
    fn deref(&self) -> &File {
        &self.file
    }
}

impl Maps {
    /// Gives the descriptor away.
    pub fn into_descriptor(self) -> RawFd {
        self.file.into_raw_fd()
    }
}

pub(super) fn open_maps() -> Result<Maps, Errno> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = rustix::fs::open(c"/proc/self/maps", flags, Mode::empty())?;
    Ok(Maps {
        file: file.into(),
        _guard: CancelGuard::new(),
    })
}

/// madvise(2) of the C library.
pub type Madvise = unsafe extern "C" fn(*mut c_void, usize, c_int) -> c_int;
/// mmap(2) of the C library.
pub type Mmap = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, c_int, i64) -> *mut c_void;
/// mremap(2) of the C library.
pub type Mremap = unsafe extern "C" fn(*mut c_void, usize, usize, c_int, ...) -> *mut c_void;
/// munmap(2) of the C library.
pub type Munmap = unsafe extern "C" fn(*mut c_void, usize) -> c_int;

/// madvise(2). `next` is the function that the program would call without this library.
///
/// # Safety
/// As for the system call.
pub unsafe fn madvise(next: Madvise, address: usize, len: usize, advice: c_int) -> c_int {
    const DONTNEED_LOCKED: c_int = 24;
    let discards = matches!(
        advice,
        libc::MADV_DONTNEED | libc::MADV_FREE | DONTNEED_LOCKED
    );
    let sets = matches!(
        advice,
        libc::MADV_DONTFORK
            | libc::MADV_DONTDUMP
            | libc::MADV_HUGEPAGE
            | libc::MADV_NOHUGEPAGE
            | libc::MADV_MERGEABLE
            | libc::MADV_WIPEONFORK
    );
    if sets {
        attributes::note_change();
    }
    if discards
        && let Some(pages) = pages_from(address, len)
        && may_be_remapped(&pages)
    {
        let takes = may_have_idle(&pages);
        let discarded = {
            let _held = MAPPINGS.lock();
            discard_remapped(&pages)
        };
        if let Err(error) = discarded {
            return fail(error) as c_int;
        }
        if takes {
            let _guard = CancelGuard::new();
            keep_errno(idle::reclaim_taken);
        }
    }
    // SAFETY: the caller's promise.
    unsafe { next(address as *mut c_void, len, advice) }
}

/// Sets errno.
fn fail(error: Errno) -> isize {
    // SAFETY: the C library gives a valid pointer to this thread's errno.
    unsafe { *libc::__errno_location() = error.raw_os_error() };
    -1
}

/// Replaces pages of the daemon's files by private ones, in whose place nothing has been written.
fn discard_remapped(range: &Range<usize>) -> Result<(), Errno> {
    let maps = open_maps()?;
    let mut left = range.clone();
    while let Some(mapping) = find_ours(&maps, &left)? {
        let pages = mapping.clip_to(&left);
        left.start = pages.end;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        map_zeroes(&pages, mapping.prot(), flags)?;
    }
    Ok(())
}

/// The first mapping of the daemon's files in a range. `maps` is /proc/self/maps.
fn find_ours(maps: &File, range: &Range<usize>) -> Result<Option<Mapping>, Errno> {
    let mut at = range.start;
    while at < range.end {
        match find_mapping(maps, at)? {
            Some(mapping) if mapping.range.start >= range.end => break,
            Some(mapping) if is_ours(&mapping) => return Ok(Some(mapping)),
            Some(mapping) => at = mapping.range.end,
            None => break,
        }
    }
    Ok(None)
}

fn map_zeroes(pages: &Range<usize>, prot: ProtFlags, flags: MapFlags) -> Result<usize, Errno> {
    // SAFETY: with FIXED, the caller replaces pages whose content is not needed.
    let mapped = unsafe {
        rustix::mm::mmap_anonymous(pages.start as *mut c_void, pages.len(), prot, flags)?
    };
    Ok(mapped as usize)
}

/// mremap(2). `next` is the function that the program would call without this library.
///
/// # Safety
/// As for the system call.
pub unsafe fn mremap(
    next: Mremap,
    old: usize,
    len: usize,
    new_len: usize,
    flags: c_int,
    to: usize,
) -> isize {
    let known = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    let limit = usize::MAX / 4;
    let is_plain = REMAPPED_COUNT.load(Ordering::SeqCst) == 0
        || flags & !known != 0
        || !old.is_multiple_of(PAGE)
        || old.max(len).max(new_len) > limit
        || len == 0
        || new_len == 0;
    let from = old..old.saturating_add(len).saturating_add(PAGE - 1) / PAGE * PAGE;
    let is_ours = || find_parts(&from).is_ok_and(|parts| parts.is_ours());
    if is_plain || !may_be_remapped(&from) || !is_ours() {
        // SAFETY: the caller's promise.
        return unsafe { next(old as *mut c_void, len, new_len, flags, to) as isize };
    }
    let new_len = new_len.next_multiple_of(PAGE);
    announce(next, &from);
    // SAFETY: the caller's promise.
    let moved = unsafe { move_ours(&from, new_len, flags, to) };
    match moved {
        Ok(address) => {
            announce(next, &(address..address + new_len));
            address as isize
        }
        Err(error) => fail(error),
    }
}

/// Tells hooks of mremap(2) that pages move or have moved, by a call that changes nothing.
fn announce(next: Mremap, pages: &Range<usize>) {
    let (start, len) = (pages.start as *mut c_void, pages.len());
    keep_errno(|| {
        // SAFETY: the kernel leaves pages where they are whose number does not change.
        unsafe { next(start, len, len, 0) };
    });
}

/// mremap(2) of a range with mappings of the daemon's files.
///
/// # Safety
/// As for the system call.
unsafe fn move_ours(
    from: &Range<usize>,
    new_len: usize,
    flags: c_int,
    to: usize,
) -> Result<usize, Errno> {
    // While pages are given back, those beside them are a mapping of their own.
    let _held = MAPPINGS.lock();
    MOVES.fetch_add(1, Ordering::Relaxed);
    if let Ok(parts) = find_parts(from)
        && parts.must_move_singly(new_len > from.len())
    {
        return move_parts(&parts, from, new_len, flags, to);
    }
    let (old, len) = (from.start, from.len());
    // SAFETY: the caller's promise. A system call, since a hook could call this library back.
    let moved = unsafe { libc::syscall(libc::SYS_mremap, old, len, new_len, flags, to) };
    match moved {
        // SAFETY: the C library gives a valid pointer to this thread's errno.
        -1 => Err(Errno::from_raw_os_error(unsafe {
            *libc::__errno_location()
        })),
        address => {
            let address = address as usize;
            mark_remapped(&(address..address + new_len));
            Ok(address)
        }
    }
}

/// The program calls libibverbs, whose ibv_dereg_mr(3) may be called while I/O into the memory is under
/// way.
static IS_DROP_IN: AtomicBool = AtomicBool::new(false);
/// The drop-in library overrides the calls of this module for all of the program.
static ARE_OVERRIDDEN: AtomicBool = AtomicBool::new(false);

/// Declares that this library is part of the drop-in library.
pub fn declare_drop_in() {
    IS_DROP_IN.store(true, Ordering::Release);
}

pub(super) fn is_drop_in() -> bool {
    IS_DROP_IN.load(Ordering::Acquire)
}

/// Declares that all calls of this module are overridden for the whole program, and that its allocator is
/// that of the C library.
pub fn declare_overridden() {
    ARE_OVERRIDDEN.store(true, Ordering::Release);
}

/// Declares that calls of the program no longer come here. Gives back all idle pages.
pub fn declare_bypassed() {
    if ARE_OVERRIDDEN.swap(false, Ordering::AcqRel) {
        idle::give_back_all();
    }
}

pub(super) fn are_overridden() -> bool {
    ARE_OVERRIDDEN.load(Ordering::Acquire)
}

/// Checks for idle pages in a range.
fn may_have_idle(range: &Range<usize>) -> bool {
    let has_ours = || {
        let maps = open_maps().ok()?;
        find_ours(&maps, range).ok()?
    };
    idle::may_exist() && may_be_remapped(range) && has_ours().is_some()
}

/// The pages that a system call with this address and length concerns, if the address is that of a page.
fn pages_from(address: usize, len: usize) -> Option<Range<usize>> {
    let end = address.checked_add(len)?.checked_next_multiple_of(PAGE)?;
    (address.is_multiple_of(PAGE) && end > address).then_some(address..end)
}

/// munmap(2). `next` is the function that the program would call without this library.
///
/// # Safety
/// As for the system call.
pub unsafe fn munmap(next: Munmap, address: usize, len: usize) -> c_int {
    let takes = pages_from(address, len).is_some_and(|pages| may_have_idle(&pages));
    // SAFETY: the caller's promise.
    let done = unsafe { next(address as *mut c_void, len) };
    if takes && done == 0 {
        let _guard = CancelGuard::new();
        keep_errno(idle::reclaim_taken);
    }
    done
}

/// mmap(2). `next` is the function that the program would call without this library.
///
/// # Safety
/// As for the system call.
pub unsafe fn mmap(
    next: Mmap,
    address: usize,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> isize {
    if flags & (libc::MAP_NORESERVE | libc::MAP_LOCKED) != 0 {
        attributes::note_change();
    }
    let takes = flags & libc::MAP_FIXED != 0
        && pages_from(address, len).is_some_and(|pages| may_have_idle(&pages));
    // SAFETY: the caller's promise.
    let mapped = unsafe { next(address as *mut c_void, len, prot, flags, fd, offset) as isize };
    if takes && mapped != -1 {
        let _guard = CancelGuard::new();
        keep_errno(idle::reclaim_taken);
    }
    mapped
}

/// Records that the program locks memory (mlock(2)).
pub fn note_lock() {
    attributes::note_change();
}

/// Checks whether free(3) gives up idle pages: a chunk that malloc(3) of glibc has mapped.
///
/// # Safety
/// `block` is a block of the program's allocator.
pub unsafe fn gives_up_idle(block: usize) -> bool {
    // SAFETY: the caller's promise.
    idle::may_exist() && unsafe { is_mapped_chunk_of_ours(block) }
}

/// Frees the daemon's files of pages that the program has given up.
pub fn reclaim_given_up() {
    let _guard = CancelGuard::new();
    keep_errno(idle::reclaim_taken);
}

fn keep_errno(call: impl FnOnce()) {
    // SAFETY: the C library gives a valid pointer to this thread's errno.
    let errno = unsafe { *libc::__errno_location() };
    call();
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Mappings of a range.
struct Parts {
    /// /proc/self/maps
    maps: Maps,
    count: usize,
    /// Number of mappings of the daemon's files.
    ours: usize,
    /// The range consists of private anonymous memory and the daemon's files.
    is_memory: bool,
    /// Access of the last mapping.
    prot: ProtFlags,
}

impl Parts {
    /// Checks whether a call with this range is more than one with private memory.
    fn is_ours(&self) -> bool {
        self.ours > 0 || self.is_memory && self.count > 1
    }

    /// Checks whether the kernel, which moves one mapping only, cannot move the range.
    fn must_move_singly(&self, grows: bool) -> bool {
        self.is_memory && (self.count > 1 || self.ours > 0 && grows)
    }
}

fn find_parts(range: &Range<usize>) -> Result<Parts, Errno> {
    let mut parts = Parts {
        maps: open_maps()?,
        count: 0,
        ours: 0,
        is_memory: true,
        prot: ProtFlags::empty(),
    };
    let mut at = range.start;
    while at < range.end {
        let found = find_mapping(&parts.maps, at)?;
        let Some(mapping) = found.filter(|found| found.range.start < range.end) else {
            parts.is_memory = false;
            break;
        };
        let is_ours = is_ours(&mapping);
        parts.is_memory &= mapping.range.start <= at && (is_ours || mapping.is_private_anonymous());
        parts.count += 1;
        parts.ours += usize::from(is_ours);
        parts.prot = mapping.prot();
        at = mapping.range.end;
    }
    Ok(parts)
}

/// Bit in the size of a chunk of glibc that is a mapping of its own.
pub(super) const IS_MMAPPED: usize = 2;

/// Checks whether realloc(3) would grow or move a block by mremap(2) although it is in the daemon's
/// files: a chunk that malloc(3) of glibc has mapped. The C library makes that call without
/// [`mremap`], and the mapping would grow over pages of other addresses.
///
/// # Safety
/// `block` is a block of the program's allocator.
pub unsafe fn must_be_copied(block: usize) -> bool {
    // SAFETY: the caller's promise.
    unsafe { is_mapped_chunk_of_ours(block) }
}

/// Checks for a block in a chunk that malloc(3) of glibc has mapped, in the daemon's files.
///
/// # Safety
/// `block` is a block of the program's allocator.
unsafe fn is_mapped_chunk_of_ours(block: usize) -> bool {
    const WORD: usize = size_of::<usize>();
    let page = block / PAGE * PAGE;
    // The header of a block at the start of a page is in the page before, which is private: mremap(2)
    // does not grow a range of two mappings.
    if block - page < 2 * WORD || !may_be_remapped(&(page..page + PAGE)) {
        return false;
    }
    // SAFETY: it is in the page of the block. Another allocator has something else there.
    let size = unsafe { ((block - WORD) as *const usize).read_volatile() };
    size & IS_MMAPPED != 0
        && open_maps()
            .and_then(|maps| mapping_at(&maps, page))
            .is_ok_and(|found| found.is_some_and(|found| is_ours(&found)))
}

/// Moves and resizes a range of several mappings, as mremap(2) does with one.
fn move_parts(
    parts: &Parts,
    from: &Range<usize>,
    new_len: usize,
    flags: c_int,
    to: usize,
) -> Result<usize, Errno> {
    let (maps, prot) = (&parts.maps, parts.prot);
    let private = MapFlags::PRIVATE;
    let may_move = flags & libc::MREMAP_MAYMOVE != 0;
    let kept = from.start..from.start + from.len().min(new_len);
    let dest = if flags & libc::MREMAP_FIXED != 0 {
        let dest = to..to.checked_add(new_len).ok_or(Errno::INVAL)?;
        if !may_move || !to.is_multiple_of(PAGE) || dest.start < from.end && from.start < dest.end {
            return Err(Errno::INVAL);
        }
        map_zeroes(&dest, prot, private | MapFlags::FIXED)?
    } else {
        if new_len <= from.len() {
            unmap(&(kept.end..from.end))?;
            return Ok(from.start);
        }
        let behind = from.end..from.start + new_len;
        match map_zeroes(&behind, prot, private | MapFlags::FIXED_NOREPLACE) {
            Ok(place) if place == behind.start => return Ok(from.start),
            // A kernel that does not know the flag.
            Ok(place) => unmap(&(place..place + behind.len()))?,
            Err(_) => {}
        }
        if !may_move {
            return Err(Errno::NOMEM);
        }
        map_zeroes(&(0..new_len), prot, private)?
    };
    mark_remapped(&(dest..dest + new_len));
    if let Err((error, moved)) = move_each(maps, &kept, dest) {
        let back = dest..dest + moved;
        if move_each(maps, &back, from.start).is_err() {
            // The program's memory cannot be put back.
            std::process::abort();
        }
        unmap(&(dest..dest + new_len))?;
        return Err(error);
    }
    unmap(&(kept.end..from.end))?;
    Ok(dest)
}

fn unmap(pages: &Range<usize>) -> Result<(), Errno> {
    if pages.is_empty() {
        return Ok(());
    }
    // SAFETY: the pages are discarded, as the caller of mremap(2) asked for, or were made here.
    unsafe { rustix::mm::munmap(pages.start as *mut c_void, pages.len()) }
}

/// Moves each mapping of a range; an error comes with the bytes moved before it.
fn move_each(maps: &File, from: &Range<usize>, to: usize) -> Result<(), (Errno, usize)> {
    let mut at = from.start;
    while at < from.end {
        let moved = at - from.start;
        let found = mapping_at(maps, at).map_err(|error| (error, moved))?;
        let mapping = found.ok_or((Errno::FAULT, moved))?;
        let len = mapping.range.end.min(from.end) - at;
        let (source, place) = (at as *mut c_void, (to + moved) as *mut c_void);
        // SAFETY: the destination was reserved for these pages, and the caller of mremap(2) gives
        // up their old addresses.
        unsafe { rustix::mm::mremap_fixed(source, len, len, MremapFlags::MAYMOVE, place) }
            .map_err(|error| (error, moved))?;
        at += len;
    }
    Ok(())
}
