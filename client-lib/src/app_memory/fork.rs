//! fork(2): remapped pages are shared with the daemon, so a child would share them too, and its
//! writes would appear in its parent. Therefore the child gets private copies in their place, as if
//! the pages had stayed private. The child may use all its memory regardless of the parent's
//! registrations (`IBV_FORK_UNNEEDED`), and may end in any way. A child cannot use the contexts of
//! its parent: their calls fail in it.
//!
//! ```text
//! before   no registration begins or ends, and the system call is trapped (super::clone_trap)
//! clone    the child replaces the mappings; its parent's thread waits inside the system call, so
//!          it still holds the locks of the allocator and of handlers of pthread_atfork(3)
//! after    both return from fork()
//! ```
//! Other threads of the parent go on meanwhile, as with pages that the kernel has pinned. Data that
//! they change without a lock that fork() or the program's handlers hold may be newer in registered
//! memory than elsewhere; POSIX lets a child of a program with threads use no such data. The C
//! library does: free(3) adds to an arena's lists of small blocks without a lock. A list that names
//! blocks freed after the fork would be damaged, so the child gets the state of each arena as it was
//! just before the system call; in it such blocks are in use.
//!
//! Where the system call cannot be trapped (kernels before 5.11, other processors than x86-64,
//! seccomp filters), the child copies in a handler of pthread_atfork(3). Then glibc has released the
//! locks of malloc(3), so that a child which allocates memory may find the heap damaged if other
//! threads of its parent allocated during the copy; and threads whose stack is registered must not
//! fork. Pages with the state of an arena are not remapped there ([`super::pages`]).
//!
//! A child of vfork(2), posix_spawn(3) or clone(2) with CLONE_VM runs on its parent's memory
//! anyway, so no copies are made; neither are they for programs that call clone(2) directly.

use std::cell::Cell;
use std::os::fd::{BorrowedFd, IntoRawFd, RawFd};
use std::ptr::null_mut;
use std::sync::{MutexGuard, Once};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::calls::{MAPPINGS, open_maps};
use super::cancel::CancelGuard;
#[cfg(target_arch = "x86_64")]
use super::clone_trap::CloneTrap;
use super::descriptors::{self, RemappedFile, RemappedFiles};
use super::idle;
use super::pages::arena_states;
use super::process::{ONE_AT_A_TIME, count_fork};
use super::restore::{SharedPages, give_back_alone};
use super::vma::{Mapping, for_each_mapping};
use crate::locking::lock_unpoisoned;
use siw_shm::shared_memory::PAGE;

/// Checks whether a child has its copies when the system call of fork(2) returns, before glibc uses
/// the state of malloc(3) in it.
pub(super) fn copies_during_call() -> bool {
    CloneTrap::is_available()
}

/// A remapped page with the state of a malloc(3) arena.
struct ArenaState {
    page: usize,
    /// The page just before the system call, once `is_saved`.
    words: [Cell<u64>; PAGE / 8],
    is_saved: Cell<bool>,
}

/// State held by the forking thread: it blocks remapping, and passes the locks to the child.
struct ForkUnderWay {
    trap: Cell<Option<CloneTrap>>,
    /// The child has its copies.
    is_copied: Cell<bool>,
    pipe: Option<Pipe>,
    files: RemappedFiles,
    arena_states: Vec<ArenaState>,
    _one_at_a_time: MutexGuard<'static, ()>,
}

thread_local! {
    /// The fork of this thread, made by [`Box::into_raw`].
    static UNDER_WAY: Cell<*mut ForkUnderWay> = const { Cell::new(null_mut()) };
}

/// Installs the fork handlers.
pub fn watch_forks() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // SAFETY: three functions that stay valid: the library is never unloaded while they may
        // run, because glibc removes the handlers of an unloaded library.
        unsafe {
            libc::pthread_atfork(
                Some(before_fork),
                Some(after_in_parent),
                Some(after_in_child),
            )
        };
    });
}

/// Mappings that a child gains by [`spare_mappings_for_children`].
const SPARE: usize = 16;

/// Makes mappings that a child of fork(2) does not have: in a process with as many as it may have
/// (vm.max_map_count), a child can still map what it needs to copy its memory.
pub(super) fn spare_mappings_for_children() {
    static SPARED: Once = Once::new();
    SPARED.call_once(|| {
        let (prot, flags) = (ProtFlags::empty(), MapFlags::PRIVATE);
        // SAFETY: a new mapping, which only takes addresses; the advice concerns it alone. Neighbours with
        // other advice are mappings of their own.
        unsafe {
            if let Ok(start) = rustix::mm::mmap_anonymous(null_mut(), SPARE * PAGE, prot, flags) {
                let _ = rustix::mm::madvise(start, SPARE * PAGE, Advice::LinuxDontFork);
                for place in (0..SPARE).step_by(2) {
                    let page = start.byte_add(place * PAGE);
                    let _ = rustix::mm::madvise(page, PAGE, Advice::Random);
                }
            }
        }
    });
}

extern "C" fn before_fork() {
    let _guard = CancelGuard::new();
    if idle::may_exist() {
        idle::give_back_all();
    }
    let one_at_a_time = lock_unpoisoned(&ONE_AT_A_TIME);
    let files = descriptors::lock_files();
    let has_files = !files.is_empty();
    let arena_states = match has_files {
        true => list_arena_states(&files),
        false => Vec::new(),
    };
    let under_way = Box::into_raw(Box::new(ForkUnderWay {
        trap: Cell::new(None),
        // Without a pipe the child copies while its parent continues.
        pipe: has_files.then(Pipe::open).flatten(),
        is_copied: Cell::new(!has_files),
        files,
        arena_states,
        _one_at_a_time: one_at_a_time,
    }));
    UNDER_WAY.set(under_way);
    if has_files {
        // SAFETY: it is freed when its trap has been dropped. `copy_around` keeps to the rules.
        unsafe {
            let trap = CloneTrap::arm(copy_around, under_way);
            (*under_way).trap.set(trap);
        }
    }
}

/// Finds the file of a mapping that pages were remapped to.
fn find_file<'a>(files: &'a [RemappedFile], mapping: &Mapping) -> Option<&'a RemappedFile> {
    let is_its_file = |file: &&RemappedFile| mapping.shared && Some(file.id) == mapping.file;
    files.iter().find(is_its_file)
}

/// The remapped pages with the state of an arena.
fn list_arena_states(files: &[RemappedFile]) -> Vec<ArenaState> {
    let mut found = Vec::new();
    if let Ok(maps) = open_maps() {
        let _ = for_each_mapping(&maps, |mapping| {
            if mapping.readable && find_file(files, mapping).is_some() {
                found.extend(arena_states(&mapping.range).map(ArenaState::new));
            }
        });
    }
    found
}

/// Makes the system call that forks; returns its result in the parent when the child has its copies.
fn copy_around(under_way: &ForkUnderWay, fork: &mut dyn FnMut() -> isize) -> isize {
    // Other threads are not in the middle of mremap(2) of several mappings.
    let _held = MAPPINGS.lock();
    for state in &under_way.arena_states {
        state.save();
    }
    let result = fork();
    if result == 0 {
        under_way.copy_in_child();
    } else {
        under_way.wait_in_parent();
    }
    result
}

fn take_under_way() -> Option<Box<ForkUnderWay>> {
    let under_way = UNDER_WAY.replace(null_mut());
    // SAFETY: from `Box::into_raw`, and taken once.
    (!under_way.is_null()).then(|| unsafe { Box::from_raw(under_way) })
}

extern "C" fn after_in_parent() {
    if let Some(under_way) = take_under_way() {
        drop(under_way.trap.take());
        under_way.wait_in_parent();
    }
}

extern "C" fn after_in_child() {
    count_fork();
    MAPPINGS.reset_in_child();
    if let Some(under_way) = take_under_way() {
        drop(under_way.trap.take());
        under_way.copy_in_child();
    }
}

impl ArenaState {
    fn new(page: usize) -> ArenaState {
        ArenaState {
            page,
            words: [const { Cell::new(0) }; PAGE / 8],
            is_saved: Cell::new(false),
        }
    }

    /// Saves the page before the system call.
    fn save(&self) {
        for (place, word) in self.words.iter().enumerate() {
            // SAFETY: the first heap of an arena stays mapped. Any value that other threads write
            // meanwhile is a valid number.
            word.set(unsafe { (self.page as *const u64).add(place).read_volatile() });
        }
        self.is_saved.set(true);
    }

    /// Puts the saved content into the child's own page.
    fn restore(&self) {
        if !self.is_saved.get() {
            return;
        }
        for (place, word) in self.words.iter().enumerate() {
            // SAFETY: the page is writable, and the child has one thread.
            unsafe {
                (self.page as *mut u64)
                    .add(place)
                    .write_volatile(word.get())
            };
        }
    }
}

impl ForkUnderWay {
    /// Waits until the child has its copies, or has ended, unless it is known to have them.
    fn wait_in_parent(&self) {
        if let Some(pipe) = &self.pipe
            && !self.is_copied.get()
        {
            pipe.wait();
        }
        self.is_copied.set(true);
    }

    /// Replaces the mappings of the daemon's files by private copies, unless that has been done.
    /// Until then memory is shared with the parent: nothing is written but the stack.
    fn copy_in_child(&self) {
        if self.is_copied.get() {
            return;
        }
        if let Some(pipe) = &self.pipe {
            // Frees a descriptor for the list of mappings.
            close(pipe.read);
        }
        // Where /proc is not mounted nothing has been remapped.
        if let Ok(maps) = open_maps() {
            let _ = for_each_mapping(&maps, |mapping| self.copy_mapping(mapping));
            close(maps.into_descriptor());
        }
        if let Some(pipe) = &self.pipe {
            close(pipe.write);
        }
        self.is_copied.set(true);
    }

    fn copy_mapping(&self, mapping: &Mapping) {
        if let Some(file) = find_file(&self.files, mapping) {
            let pages = SharedPages {
                pages: mapping.range.clone(),
                id: file.id,
                offset: mapping.offset,
                prot: mapping.prot(),
                is_not_reserved: false,
                neighbours: [None; 2],
            };
            // Without memory the child keeps sharing the pages.
            if give_back_alone(&pages).is_ok() {
                let inside = |state: &&ArenaState| mapping.range.contains(&state.page);
                self.arena_states
                    .iter()
                    .filter(inside)
                    .for_each(ArenaState::restore);
            }
        }
    }
}

/// A pipe whose writing end the child closes when it has its copies.
struct Pipe {
    read: RawFd,
    write: RawFd,
}

impl Pipe {
    fn open() -> Option<Pipe> {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).ok()?;
        Some(Pipe {
            read: read.into_raw_fd(),
            write: write.into_raw_fd(),
        })
    }

    /// Waits until no process has the writing end; closes the pipe.
    fn wait(&self) {
        close(self.write);
        let mut byte = [0];
        // SAFETY: open until it is closed below.
        let read = unsafe { BorrowedFd::borrow_raw(self.read) };
        while rustix::io::read(read, &mut byte) == Err(Errno::INTR) {}
        close(self.read);
    }
}

/// Closes a descriptor without the C library, whose function the preloaded library overrides.
fn close(fd: RawFd) {
    // SAFETY: the caller owns the descriptor, and does not use it again.
    unsafe { rustix::io::close(fd) };
}

/// There is no way to trap the system call.
#[cfg(not(target_arch = "x86_64"))]
struct CloneTrap;

#[cfg(not(target_arch = "x86_64"))]
impl CloneTrap {
    fn is_available() -> bool {
        false
    }

    unsafe fn arm<T>(_: fn(&T, &mut dyn FnMut() -> isize) -> isize, _: *const T) -> Option<Self> {
        None
    }
}
