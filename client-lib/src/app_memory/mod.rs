//! Registration of existing application memory of any kind, at any byte ([`Pd::reg_memory`]):
//! `ibv_reg_mr(3)` as programs know it.
//!
//! | memory | how the daemon accesses it |
//! |---|---|
//! | of an [`Arena`](crate::Arena) | already mapped |
//! | private: malloc, mmap, static data | the private pages are replaced by pages of a daemon's file, at the same addresses ([`remap`]), until their last registration ends ([`restore`]) |
//! | shared mappings of files in memory | it maps the file, from a descriptor sent to it |
//! | anything else | it copies by system calls, through a descriptor of /proc/self/mem |
//!
//! A region may consist of several of these. The mappings of the process show the kind of each
//! page: a page remapped for an earlier region is recognised as a page of the daemon and used as it
//! is.

mod attributes;
pub mod calls;
mod cancel;
#[cfg(target_arch = "x86_64")]
mod clone_trap;
mod descriptors;
mod duplicate;
pub(crate) mod fork;
mod idle;
mod owned;
mod pages;
mod park;
mod pins;
pub(crate) mod process;
mod region;
mod remap;
mod restore;
pub(crate) mod state;
pub(crate) mod vma;
mod windows;

use crate::context::ClientInner;
use crate::locking::lock_unpoisoned;
use crate::{Access, Error, Failed, Pd};
use attributes::Attributes;
pub use cancel::CancelGuard;
use duplicate::MappedFile;
pub use fork::watch_forks;
pub use owned::{OwnedMr, StableBuffer};
use pages::{PAGES_OF_FILE, split_at_arena_states, why_not_remapped};
use process::ONE_AT_A_TIME;
pub use process::process_generation;
pub use region::AppMr;
use region::{MemoryOwner, Parts, RemappedPart, free_imports};
use rustix::io::Errno;
use rustix::mm::ProtFlags;
use siw_shm::SharedMemory;
use siw_shm::control::{
    AddExtents, AllocArena, ExtentMethod, FEATURE_OWN_FILES, FreeArena, IMPORT_FILE,
    IMPORT_PROCESS, ImportMemory, ImportOwnFile, MAX_EXTENTS, MemoryExtent, ProtoError, RegMemory,
    Text,
};
use siw_shm::shared_memory::PAGE;
use state::State;
use std::collections::VecDeque;
use std::io;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use vma::{MappedFileId, Vma, list_vmas};
use windows::{WINDOW, WINDOWS_PER_FILE, WindowPlace, Windows};

/// Reason for copying private pages of a program with several threads, instead of replacing them in
/// a way that makes system calls of other threads fail.
const UNPRIVILEGED: &str = "threads, and no access to /dev/userfaultfd";

/// Reason for copying pages that the kernel or a device may still write to at their old place.
const PINNED: &str = "pinned pages";

/// Time to wait for I/O into pages that are to be replaced. Afterwards they are copied.
const WAIT_TO_REPLACE: Duration = Duration::from_millis(2);
/// As [`WAIT_TO_REPLACE`], where pages cannot be copied; afterwards the region is refused.
const LONGEST_WAIT: Duration = Duration::from_millis(200);

/// Reason for copying private pages of a program with several threads that must not use
/// userfaultfd(2).
const DENIED: &str = "threads, and userfaultfd is denied";

/// Explanation of [`DENIED`] where the memory cannot be copied, nor the threads be stopped.
const HOW_TO_PERMIT: &str = "a program with threads that block signals needs userfaultfd(2) to \
    register memory, and seccomp profiles of containers deny it. Give it /dev/userfaultfd, readable and writable for \
    its user (docker run --device /dev/userfaultfd)";

/// Parts of [`remap::FROZEN_AT_ONCE`] for each thread that replaces pages; starting one takes about as
/// long as a tenth of a part.
const PARTS_PER_THREAD: usize = 4;
/// Maximum number of threads that replace pages. More would mostly wait for the lock of the address space.
const MOST_THREADS: usize = 8;
/// Stack of such a thread.
const HELPER_STACK: usize = 256 << 10;

/// Longest reason sent to the daemon.
const REASON_LEN: usize = 63;

impl Pd {
    /// Registers `len` bytes at `address` of this process, of any kind of memory. Peers and work
    /// requests address them by that address, or from 0 with ZERO_BASED.
    ///
    /// The memory still belongs to the application: it is read and written as before, and other
    /// data on the same pages is unaffected. [`Pd::register`] is the safe form for owned buffers.
    ///
    /// After its last registration the memory is private again. In a process that uses AIO, io_uring,
    /// O_DIRECT or device files, the first and last page stay shared with the daemon if other data of the
    /// program is on them. Then MADV_DONTNEED keeps their content, and mremap(2) must not grow a range that
    /// ends with them. Attributes set by madvise(2) or mlock(2) are kept with the drop-in library only.
    ///
    /// # Errors
    /// `EFAULT`: not all of it is mapped, or it is read-only and `access` has LOCAL_WRITE.
    /// `EOPNOTSUPP`: remote atomics in memory that is copied, without DEVICE_ATOMIC.
    /// `ENOMEM`: a limit of the daemon.
    ///
    /// # Safety
    /// Until [`AppMr::dereg`] has succeeded:
    /// - The memory is not freed, unmapped, moved by mremap(2), or used for other data. The end of
    ///   the [`AppMr`] alone is not enough: if the daemon does not confirm the deregistration in a
    ///   destructor, peers may still have access. (If this call fails with [`Error::Timeout`] or
    ///   [`Error::DaemonGone`], this holds until the daemon has ended or has noticed the end of this
    ///   client.)
    /// - No Rust reference to memory that work requests, or peers with the key, may change exists
    ///   while they may change it; with a right to write, other accesses of this process are
    ///   volatile or atomic, or ordered by completions.
    /// - Bytes that others write are valid for the type under which the program reads them.
    /// - When the deregistration begins, no I/O of the kernel or of a device into the memory is under way
    ///   that writes to pinned pages (AIO, io_uring, O_DIRECT).
    pub unsafe fn reg_memory(
        &self,
        address: *mut u8,
        len: usize,
        access: Access,
    ) -> Result<AppMr, Error> {
        // SAFETY: the caller's promise.
        unsafe { self.reg_memory_iova(address, len, address as u64, access) }
    }

    /// As [`Self::reg_memory`], addressed from `iova` on (ibv_reg_mr_iova(3)).
    ///
    /// # Safety
    /// As for [`Self::reg_memory`].
    pub unsafe fn reg_memory_iova(
        &self,
        address: *mut u8,
        len: usize,
        iova: u64,
        access: Access,
    ) -> Result<AppMr, Error> {
        let address = address as usize;
        let end = address.checked_add(len).filter(|_| len > 0);
        let range = address
            ..end.ok_or(Error::Invalid(
                "the region is empty, or wraps around the address space",
            ))?;
        let ctx = self.ctx();
        let _one = lock_unpoisoned(&ONE_AT_A_TIME);
        let mut state = lock_unpoisoned(&ctx.app_memory.state);
        let parts = state.prepare_range(ctx, &range, access)?;
        let reply = register_parts(self, &parts, len, iova, access);
        let (lkey, rkey) = match reply {
            Ok(keys) => keys,
            Err(error) => {
                free_imports(ctx, &parts);
                state.release_region(ctx, &parts, MemoryOwner::Program, ctx.known_alive());
                return Err(error);
            }
        };
        Ok(AppMr {
            pd: self.clone(),
            address,
            len,
            iova,
            access,
            lkey,
            rkey,
            parts: Box::new(parts),
            owner: MemoryOwner::Program,
            gone: false,
        })
    }

    /// Registers a buffer, which belongs to the region until it is deregistered. Otherwise as
    /// [`Pd::reg_memory`].
    ///
    /// # Errors
    /// The buffer comes back if the daemon refused. After [`Error::Timeout`] and
    /// [`Error::DaemonGone`] it is unknown whether the buffer is registered, and it is leaked.
    pub fn register<O: StableBuffer>(
        &self,
        buffer: O,
        access: Access,
    ) -> Result<OwnedMr<O>, Failed<Option<O>>> {
        let mut buffer = MaybeUninit::new(buffer);
        // SAFETY: initialised by the line above.
        let (start, len) = unsafe { buffer.assume_init_mut() }.bytes();
        // SAFETY: by the contract of `StableBuffer` the bytes stay where they are as long as the
        // buffer is not dropped. `OwnedMr` neither accesses nor drops it before the region is
        // deregistered.
        match unsafe { self.reg_memory(start, len, access) } {
            Ok(mut region) => {
                region.owner = MemoryOwner::Buffer;
                Ok(OwnedMr {
                    region: ManuallyDrop::new(region),
                    buffer: Some(buffer),
                })
            }
            Err(error) => {
                let is_refused = self.ctx().known_alive();
                // SAFETY: initialised above. The daemon has answered each request, so the buffer
                // is not registered.
                let object = is_refused.then(|| unsafe { buffer.assume_init() });
                Err(Failed { object, error })
            }
        }
    }
}

fn registration_error(errno: i32, reason: impl Into<String>) -> Error {
    Error::Registration {
        errno,
        reason: reason.into(),
    }
}

/// Has the daemon make a region of the parts; returns its keys.
fn register_parts(
    pd: &Pd,
    parts: &Parts,
    len: usize,
    iova: u64,
    access: Access,
) -> Result<(u32, u32), Error> {
    let mut rest = &parts.extents[..];
    while rest.len() > MAX_EXTENTS {
        let (now, later) = rest.split_at(MAX_EXTENTS);
        let mut extents = [MemoryExtent::default(); MAX_EXTENTS];
        extents.copy_from_slice(now);
        pd.ctx().call_daemon(&AddExtents {
            count: MAX_EXTENTS as u32,
            reserved: 0,
            extents,
        })?;
        rest = later;
    }
    let mut extents = [MemoryExtent::default(); MAX_EXTENTS];
    extents[..rest.len()].copy_from_slice(rest);
    let reason = parts.reason.get(..REASON_LEN).unwrap_or(&parts.reason);
    let (reply, _) = pd.ctx().call_daemon(&RegMemory {
        pd: pd.id(),
        access: access.0,
        len: len as u64,
        va: iova,
        count: rest.len() as u32,
        reserved: 0,
        reason: Text::new(reason),
        extents,
    })?;
    Ok((reply.lkey, reply.rkey))
}

/// Has the daemon map the file behind a part of a shared mapping, if possible.
fn import_mapping(ctx: &ClientInner, vma: &Vma, bytes: &Range<usize>) -> Option<MemoryExtent> {
    let first = vma.offset_of(bytes.start);
    let pages_of = |page: u64| {
        let offset = first / page * page;
        (offset, (first + bytes.len() as u64).next_multiple_of(page))
    };
    let remapped = vma.file.filter(|id| descriptors::is_remapped(*id));
    let (reply, offset) = if let Some(id) = remapped {
        // The daemon made it, for another context of this process.
        let (offset, end) = pages_of(PAGE as u64);
        let (major, minor) = id.device();
        let import = ImportOwnFile {
            device_major: major,
            device_minor: minor,
            inode: id.inode(),
            writable: vma.writable.into(),
            reserved: 0,
            offset,
            len: end - offset,
        };
        let known = ctx.has_feature(FEATURE_OWN_FILES);
        (known.then(|| ctx.call_daemon(&import))?.ok()?.0, offset)
    } else {
        let fd = descriptors::open_mapped_file(vma)?;
        let (offset, end) = pages_of(SharedMemory::file_page_size(fd.as_fd()).ok()?);
        let import = ImportMemory {
            kind: IMPORT_FILE,
            writable: vma.writable.into(),
            offset,
            len: end - offset,
        };
        (ctx.call_with_fd(&import, fd.as_fd()).ok()?, offset)
    };
    Some(MemoryExtent {
        arena: reply.id,
        method: ExtentMethod::Shared as u32,
        offset: first - offset,
        len: bytes.len() as u64,
    })
}

/// Splits bytes at the edges of kept ranges of pages; true for those in them.
fn split_at_kept(bytes: &Range<usize>, kept: &[Range<usize>]) -> Vec<(Range<usize>, bool)> {
    let mut kept = kept.to_vec();
    kept.sort_unstable_by_key(|pages| pages.start);
    let mut pieces = Vec::new();
    let mut at = bytes.start;
    for pages in kept {
        let (start, end) = (pages.start.max(at), pages.end.min(bytes.end));
        if start > at {
            pieces.push((at..start, false));
        }
        if end > start {
            pieces.push((start..end, true));
        }
        at = end.max(at);
    }
    if at < bytes.end {
        pieces.push((at..bytes.end, false));
    }
    pieces
}

/// Extends a range to whole pages.
fn whole_pages(range: &Range<usize>) -> Range<usize> {
    range.start / PAGE * PAGE..range.end.next_multiple_of(PAGE)
}

impl State {
    /// Makes memory accessible to the daemon.
    fn prepare_range(
        &mut self,
        ctx: &Arc<ClientInner>,
        range: &Range<usize>,
        access: Access,
    ) -> Result<Parts, Error> {
        let mut parts = Parts {
            range: range.clone(),
            ..Parts::default()
        };
        let vmas = list_vmas(range)?;
        check_vmas(&vmas, range, access)?;
        let pieces = vmas.iter().flat_map(|vma| {
            let bytes = vma.clip_to(range);
            split_at_arena_states(vma, bytes).map(move |(bytes, keep)| (vma, bytes, keep))
        });
        for (vma, bytes, keep) in pieces {
            if self.add_known(ctx, vma, &bytes, &mut parts) {
                continue;
            }
            let mut keep = keep.or_else(|| why_not_remapped(vma, access));
            let attributes = match keep {
                None => Attributes::of(vma, &bytes),
                Some(_) => Attributes::default(),
            };
            keep = keep.or(attributes.why_not_replaced);
            let freezer = match keep {
                None => self.choose_freezer(ctx, vma, access),
                Some(reason) => Err(reason.to_owned()),
            };
            let remapped = freezer.and_then(|freezer| {
                self.remap_pages(ctx, vma, attributes, &freezer, &whole_pages(&bytes), access)
                    .map(|kept| (kept, freezer.fails_system_calls()))
                    .map_err(|error| match freezer {
                        remap::Freezer::Park(_) if vma.is_private_anonymous() => DENIED.to_owned(),
                        remap::Freezer::Park(_) => PAGES_OF_FILE.to_owned(),
                        _ => format!("remap: {error}"),
                    })
            });
            let (kept, reason) = match remapped {
                Ok((kept, fails_system_calls)) => {
                    if fails_system_calls {
                        parts.add_reason(UNPRIVILEGED);
                    }
                    (kept, PINNED.to_owned())
                }
                Err(reason) => (vec![whole_pages(&bytes)], reason),
            };
            for (piece, is_kept) in split_at_kept(&bytes, &kept) {
                if !is_kept {
                    self.add_remapped(&piece, &mut parts);
                    continue;
                }
                let added = self.add_other(ctx, vma, &piece, &mut parts);
                parts.add_reason(&reason);
                if let Err(error) = added {
                    free_imports(ctx, &parts);
                    self.release_region(ctx, &parts, MemoryOwner::Program, true);
                    let why = if reason == DENIED {
                        HOW_TO_PERMIT
                    } else {
                        &reason
                    };
                    return Err(registration_error(error.errno(), format!("{why}: {error}")));
                }
            }
        }
        Ok(parts)
    }

    /// Adds memory that is not remapped: shared with the daemon if possible, else copied.
    fn add_other(
        &mut self,
        ctx: &ClientInner,
        vma: &Vma,
        bytes: &Range<usize>,
        parts: &mut Parts,
    ) -> Result<(), Error> {
        if vma.shared
            && let Some(extent) = import_mapping(ctx, vma, bytes)
        {
            parts.imports.push(extent.arena);
            if let Some(id) = vma.file.filter(|id| descriptors::is_remapped(*id)) {
                self.add_user(id, vma.offset_of(bytes.start), bytes, parts);
            }
            parts.push_extent(extent);
            return Ok(());
        }
        let arena = match self.process {
            Some(arena) => arena,
            None => self.import_process(ctx)?,
        };
        self.process = Some(arena);
        parts.push_extent(MemoryExtent {
            arena,
            method: ExtentMethod::Copy as u32,
            offset: bytes.start as u64,
            len: bytes.len() as u64,
        });
        Ok(())
    }

    /// Sends the daemon a descriptor by which it copies from and to this process.
    fn import_process(&mut self, ctx: &ClientInner) -> Result<u32, Error> {
        if let Some((errno, reason)) = &self.process_refused {
            return Err(registration_error(*errno, reason.clone()));
        }
        let fd = descriptors::open_process_memory()?;
        let import = ImportMemory {
            kind: IMPORT_PROCESS,
            writable: 1,
            offset: 0,
            len: 0,
        };
        match ctx.call_with_fd(&import, fd.as_fd()) {
            Ok(reply) => Ok(reply.id),
            Err(error) => {
                self.process_refused = Some((error.errno(), error.to_string()));
                Err(error)
            }
        }
    }

    /// Adds memory that the daemon already has.
    fn add_known(
        &mut self,
        ctx: &ClientInner,
        vma: &Vma,
        bytes: &Range<usize>,
        parts: &mut Parts,
    ) -> bool {
        let Some(id) = vma.file else {
            return false;
        };
        let (offset, len) = (vma.offset_of(bytes.start), bytes.len() as u64);
        let (arena, method) = if let Some(file) = self.windows.find_file(id) {
            let arena = file.arena;
            self.add_user(id, offset, bytes, parts);
            (arena, ExtentMethod::Remap)
        } else if let Some(arena) = ctx.arena_pool.find(id) {
            let number = arena.id();
            parts.arenas.push(arena);
            (number, ExtentMethod::Arena)
        } else {
            return false;
        };
        parts.push_extent(MemoryExtent {
            arena,
            method: method as u32,
            offset,
            len,
        });
        true
    }

    /// Adds pages that [`State::remap_pages`] has just remapped.
    fn add_remapped(&mut self, bytes: &Range<usize>, parts: &mut Parts) {
        for part in Windows::split_range(bytes) {
            let pages = whole_pages(&part);
            let Some((place, _)) = self.windows.place_of(&pages) else {
                continue;
            };
            let Some(file) = self.windows.file_at(place.file) else {
                continue;
            };
            let offset = place.offset + (part.start - pages.start) as u64;
            let len = part.len() as u64;
            let (id, arena) = (file.id, file.arena);
            self.add_user(id, offset, &part, parts);
            parts.push_extent(MemoryExtent {
                arena,
                method: ExtentMethod::Remap as u32,
                offset,
                len,
            });
        }
    }

    /// Chooses how to block other threads from the pages of a mapping while they are replaced; an
    /// error is the reason not to replace them.
    fn choose_freezer(
        &mut self,
        ctx: &ClientInner,
        vma: &Vma,
        access: Access,
    ) -> Result<remap::Freezer, String> {
        let freezer = if !vma.writable {
            remap::Freezer::Alone
        } else if !vma.is_private_anonymous() {
            if remap::is_only_thread() {
                remap::Freezer::Alone
            } else {
                remap::Freezer::Park(None)
            }
        } else {
            match remap::Freezer::open_best() {
                Ok(freezer) => freezer,
                Err(Errno::PERM | Errno::NOSYS) => remap::Freezer::Park(None),
                Err(error) => return Err(format!("remap: {error}")),
            }
        };
        if !freezer.finds_pinned() && pins::may_exist() {
            return Err(PINNED.to_owned());
        }
        // A slower region is better than system calls that fail elsewhere in the program.
        let reason = match &freezer {
            remap::Freezer::Park(_) => DENIED,
            other if other.fails_system_calls() => UNPRIVILEGED,
            _ => return Ok(freezer),
        };
        if !access.contains(Access::REMOTE_ATOMIC) && self.can_copy(ctx) {
            return Err(reason.to_owned());
        }
        Ok(match freezer {
            remap::Freezer::Protect(_) => remap::Freezer::Park(Some(Box::new(freezer))),
            other => other,
        })
    }

    /// Checks whether the daemon can copy from and to this process.
    fn can_copy(&mut self, ctx: &ClientInner) -> bool {
        if self.process.is_none() {
            self.process = self.import_process(ctx).ok();
        }
        self.process.is_some()
    }

    /// Replaces private pages by pages of the daemon. `pages` belong to one mapping. Returns those
    /// that are pinned, and stay in place.
    fn remap_pages(
        &mut self,
        ctx: &Arc<ClientInner>,
        vma: &Vma,
        attributes: Attributes,
        freezer: &remap::Freezer,
        pages: &Range<usize>,
        access: Access,
    ) -> Result<Vec<Range<usize>>, Error> {
        self.find_places(ctx, pages)?;
        let mut prot = ProtFlags::READ;
        if vma.writable {
            prot |= ProtFlags::WRITE;
        }
        calls::mark_remapped(pages);
        // Windows with consecutive places are replaced together.
        let mut joined: VecDeque<(Range<usize>, WindowPlace)> = VecDeque::new();
        for part in Windows::split_range(pages) {
            let Some((place, _)) = self.windows.place_of(&part) else {
                return Err(Error::Invalid("a window without a place"));
            };
            match joined.back_mut() {
                Some((before, at))
                    if at.file == place.file
                        && at.offset + before.len() as u64 == place.offset
                        && before.len() + part.len() <= remap::FROZEN_AT_ONCE =>
                {
                    before.end = part.end;
                }
                _ => joined.push_back((part, place)),
            }
        }
        let mut replaced = self.replace_at_once(freezer, &joined, prot);
        let (mut kept, mut until) = (Vec::new(), None);
        while let Some((part, place)) = joined.pop_front() {
            let Some(file) = self.windows.file_at(place.file) else {
                continue;
            };
            let done = replaced.pop_front().unwrap_or_else(|| {
                remap::replace_pages(freezer, &part, &file.mapped, place.offset, prot)
            });
            // After an error, some of the pages may have been replaced.
            let done = done.inspect_err(|_| {
                let others = joined.iter().map(|(other, _)| other);
                for window in std::iter::once(&part)
                    .chain(others)
                    .flat_map(Windows::split_range)
                {
                    self.windows.mark_used(&window);
                }
            })?;
            for (run, is_kept) in done.runs(&part) {
                if !is_kept {
                    self.finish_remapped(vma, attributes, &run);
                    continue;
                }
                let until = match until {
                    Some(until) => until,
                    None => *until.insert(Instant::now() + self.time_to_replace(ctx, access)),
                };
                if Instant::now() < until {
                    let offset = place.offset + (run.start - part.start) as u64;
                    joined.push_back((run, WindowPlace { offset, ..place }));
                } else {
                    kept.push(run);
                }
            }
            let is_waiting = joined.iter().all(|(left, _)| part.contains(&left.start));
            if is_waiting && !joined.is_empty() {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        Ok(kept)
    }

    /// Replaces the parts of long memory on several threads; returns the results in their order, or none
    /// for short memory.
    fn replace_at_once(
        &self,
        freezer: &remap::Freezer,
        parts: &VecDeque<(Range<usize>, WindowPlace)>,
        prot: ProtFlags,
    ) -> VecDeque<io::Result<remap::KeptPages>> {
        let count = parts.len() / PARTS_PER_THREAD;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let count = count.min(cores).min(MOST_THREADS);
        if count < 2 || !freezer.lets_threads_help() {
            return VecDeque::new();
        }
        let orders = parts.iter().map(|(part, place)| {
            let mapped = self.windows.file_at(place.file).map(|file| &file.mapped);
            (part, place.offset, mapped, OnceLock::new())
        });
        let orders: Vec<_> = orders.collect();
        let next = AtomicUsize::new(0);
        // Allocates no memory: another thread may have frozen the allocator's.
        let replace = || {
            while let Some((part, offset, mapped, result)) =
                orders.get(next.fetch_add(1, Ordering::Relaxed))
            {
                if let Some(mapped) = mapped {
                    let done = remap::replace_pages(freezer, part, mapped, *offset, prot);
                    let _ = result.set(done);
                }
            }
        };
        std::thread::scope(|scope| {
            // Handlers of the program's signals do not run in these threads.
            let blocked = remap::BlockedSignals::block_all();
            for _ in 1..count {
                let helper = std::thread::Builder::new().stack_size(HELPER_STACK);
                // Without another thread this one does all.
                let _ = helper.spawn_scoped(scope, replace);
            }
            drop(blocked);
            replace();
        });
        let missing = || Err(io::ErrorKind::NotFound.into());
        let results = orders.into_iter().map(|(.., result)| result);
        results
            .map(|result| result.into_inner().unwrap_or_else(missing))
            .collect()
    }

    /// Time to wait for pinned pages.
    fn time_to_replace(&mut self, ctx: &ClientInner, access: Access) -> Duration {
        if access.needs_shared_memory() || !self.can_copy(ctx) {
            LONGEST_WAIT
        } else {
            WAIT_TO_REPLACE
        }
    }

    /// Prepares pages that have just been replaced.
    fn finish_remapped(&mut self, vma: &Vma, attributes: Attributes, pages: &Range<usize>) {
        for window in Windows::split_range(pages) {
            self.windows.mark_used(&window);
        }
        if vma.writable {
            let _ = duplicate::populate_pages(pages);
        }
        self.attributes.set(pages, attributes);
        attributes.apply_to(pages);
        remap::split_mapped_chunk(pages);
    }

    /// Assigns places to all windows of a range of pages without overwriting mapped pages.
    fn find_places(&mut self, ctx: &Arc<ClientInner>, pages: &Range<usize>) -> Result<(), Error> {
        let parts = Windows::split_range(pages);
        let was_used = |windows: &Windows, part: &Range<usize>| {
            windows.place_of(part).filter(|(_, was_used)| *was_used)
        };
        let wants_sweep = self.windows.wants_sweep();
        if wants_sweep
            || parts
                .iter()
                .any(|part| was_used(&self.windows, part).is_some())
        {
            // Pages that were remapped before and are private now: they were unmapped, or moved by
            // mremap(2).
            let all = calls::list_unmoved()?;
            for part in &parts {
                if let Some((place, _)) = was_used(&self.windows, part)
                    && !all
                        .as_ref()
                        .is_some_and(|all| self.windows.is_unmapped(place, part.len(), all))
                {
                    self.windows.abandon_place(part.start);
                }
            }
            if let Some(all) = all.filter(|_| wants_sweep) {
                self.windows.sweep_windows(&all);
            }
        }
        while let Err(missing) = self.windows.assign_places(pages) {
            let least = missing.min(WINDOWS_PER_FILE);
            let ahead = self.windows.next_file_windows(missing);
            let added = self.add_file(ctx, ahead * WINDOW);
            if added.is_err() && ahead > least {
                self.add_file(ctx, least * WINDOW)?;
            } else {
                added?;
            }
        }
        Ok(())
    }

    /// Gets another file from the daemon.
    fn add_file(&mut self, ctx: &Arc<ClientInner>, len: usize) -> Result<(), Error> {
        let (reply, fds) = ctx.call_daemon(&AllocArena {
            len: len as u64,
            huge: 0,
            reserved: 0,
        })?;
        let fd = fds.into_iter().next().ok_or(ProtoError::MissingFd)?;
        let id = MappedFileId::of_file(&fd)?;
        let arena = reply.arena;
        fork::spare_mappings_for_children();
        let mapped = MappedFile::map(&fd, len).inspect_err(|_| {
            ctx.post_unanswered(&FreeArena { arena, reserved: 0 });
        })?;
        descriptors::list_file(id, len);
        self.windows.add_file(id, arena, mapped, len);
        Ok(())
    }

    /// Counts a registration of remapped memory.
    fn add_user(
        &mut self,
        file: MappedFileId,
        offset: u64,
        memory: &Range<usize>,
        parts: &mut Parts,
    ) {
        let bytes = offset..offset + memory.len() as u64;
        descriptors::add_user(file, &bytes);
        self.windows.count_registration(file, &bytes, true);
        parts.remapped.push(RemappedPart {
            file,
            bytes,
            address: memory.start,
        });
    }

    /// Removes the registrations of a region, and gives back the pages without any, or leaves them to
    /// the next registration (see [`idle`]). Unless the region is revoked, peers may still access its
    /// places in the daemon's files: these stay registered, so that no other memory is moved there. The
    /// caller holds [`ONE_AT_A_TIME`]. Returns whether all pages that belong to the region alone are
    /// private.
    fn release_region(
        &mut self,
        ctx: &Arc<ClientInner>,
        parts: &Parts,
        owner: MemoryOwner,
        is_revoked: bool,
    ) -> bool {
        let mut unused: Vec<RemappedPart> = Vec::new();
        for part in &parts.remapped {
            if is_revoked {
                self.windows
                    .count_registration(part.file, &part.bytes, false);
            }
            let first_page = part.address / PAGE * PAGE;
            let first = part.bytes.start / PAGE as u64 * PAGE as u64;
            for bytes in descriptors::remove_user(part.file, &part.bytes) {
                let address = first_page + (bytes.start - first) as usize;
                match unused.last_mut() {
                    Some(last)
                        if last.file == part.file
                            && last.bytes.end == bytes.start
                            && last.pages().end == address =>
                    {
                        last.bytes.end = bytes.end;
                    }
                    _ => unused.push(RemappedPart {
                        file: part.file,
                        bytes,
                        address,
                    }),
                }
            }
        }
        if unused.is_empty() {
            return true;
        }
        if calls::are_overridden() {
            let count = unused.len();
            unused.retain(|part| !idle::may_stay(part.pages().len()));
            if unused.len() < count {
                idle::note_context(ctx);
            }
        }
        let (own, pinnable) = if calls::is_drop_in() {
            (Vec::new(), unused)
        } else {
            let own_pages = pages::own_pages(&parts.range);
            unused
                .iter()
                .flat_map(|part| part.split_at(&own_pages))
                .partition(|part| own_pages.start <= part.address && part.address < own_pages.end)
        };
        let mut is_private = true;
        if !own.is_empty() {
            let access = match owner {
                MemoryOwner::Buffer => restore::Access::Sole,
                MemoryOwner::Program => restore::Access::Unpinned,
            };
            is_private = self.give_back_parts(&own, access, is_revoked);
        }
        if !pinnable.is_empty() && !pins::may_exist() {
            self.give_back_parts(&pinnable, restore::Access::Any, is_revoked);
        }
        self.free_idle_files(ctx);
        is_private
    }

    /// Gives pages back and frees their places; returns whether all of them are private.
    fn give_back_parts(
        &mut self,
        parts: &[RemappedPart],
        access: restore::Access,
        is_revoked: bool,
    ) -> bool {
        let mut left: usize = parts.iter().map(|part| part.pages().len()).sum();
        for (file, bytes) in self.give_back(parts, access) {
            left -= (bytes.end - bytes.start) as usize;
            if is_revoked {
                self.windows.mark_unused(file, &bytes);
            }
        }
        left == 0
    }

    /// Frees files without remapped pages.
    fn free_idle_files(&mut self, ctx: &Arc<ClientInner>) {
        while let Some((id, arena)) = self.windows.take_idle_file() {
            descriptors::drop_file(id);
            ctx.free_without_waiting(&FreeArena { arena, reserved: 0 });
        }
    }

    /// Makes remapped pages private again, as far as they are still mapped where they were
    /// registered. Returns their places in files.
    fn give_back(
        &mut self,
        unused: &[RemappedPart],
        access: restore::Access,
    ) -> Vec<(MappedFileId, Range<u64>)> {
        let files = descriptors::lock_files();
        let mut found = Vec::new();
        let mut list = Vec::new();
        for part in unused {
            let pages = part.pages();
            if !files.iter().any(|file| file.id == part.file) {
                continue;
            }
            let around = pages.start.saturating_sub(PAGE)..pages.end.saturating_add(PAGE);
            let vmas = list_vmas(&around).unwrap_or_default();
            let is_private = |page: usize| {
                let mut holds = vmas.iter().filter(|vma| vma.range.contains(&page));
                holds.any(|vma| vma.is_private_anonymous())
            };
            for vma in &vmas {
                let here = vma.clip_to(&pages);
                let offset = part.bytes.start + here.start.saturating_sub(pages.start) as u64;
                let is_there = !here.is_empty()
                    && vma.shared
                    && vma.file == Some(part.file)
                    && vma.offset_of(here.start) == offset;
                if !is_there {
                    continue;
                }
                found.push((part.file, offset, here.clone()));
                for (piece, attributes) in self.attributes.split(&here) {
                    let before = piece
                        .start
                        .checked_sub(PAGE)
                        .filter(|page| is_private(*page));
                    let behind = Some(piece.end).filter(|page| is_private(*page));
                    list.push(restore::SharedPages {
                        offset: offset + (piece.start - here.start) as u64,
                        pages: piece,
                        id: part.file,
                        prot: vma.prot(),
                        is_not_reserved: attributes.is_not_reserved,
                        neighbours: [before, behind],
                    });
                }
            }
        }
        let given = restore::give_back(&list, access);
        for pages in &given {
            for (piece, attributes) in self.attributes.split(pages) {
                attributes.apply_to(&piece);
            }
            self.attributes.remove(pages);
        }
        drop(list);
        drop(files);
        let place_of = |pages: &Range<usize>| {
            let (file, offset, whole) = found
                .iter()
                .find(|(.., whole)| whole.contains(&pages.start))?;
            let start = offset + (pages.start - whole.start) as u64;
            Some((*file, start..start + pages.len() as u64))
        };
        given.iter().filter_map(place_of).collect()
    }
}

/// Checks that the whole range is mapped and allows the access.
fn check_vmas(vmas: &[Vma], range: &Range<usize>, access: Access) -> Result<(), Error> {
    let mut at = range.start;
    for vma in vmas {
        if vma.range.start > at {
            break;
        }
        if !vma.readable {
            let why = format!("the memory at {at:#x} cannot be read");
            return Err(registration_error(libc::EFAULT, why));
        }
        if !vma.writable && access.contains(Access::LOCAL_WRITE) {
            let why = format!("the memory at {at:#x} is read-only, and LOCAL_WRITE was asked for");
            return Err(registration_error(libc::EFAULT, why));
        }
        at = vma.range.end;
    }
    if at < range.end {
        let why = format!("nothing is mapped at {at:#x}");
        return Err(registration_error(libc::EFAULT, why));
    }
    Ok(())
}
