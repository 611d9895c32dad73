//! fork(2): remapped pages are shared with the daemon, so a child would share them too, and what it
//! wrote would appear in its parent. The child gets private copies of them in their place, before
//! fork() returns in either process: as if the pages had stayed private. So a child may go on using
//! its memory whatever of it its parent registered (`IBV_FORK_UNNEEDED`), and may end as it likes.
//! A child has no use of the contexts of its parent: their calls fail in it.
//!
//! A child of vfork(2), posix_spawn(3) or clone(2) with CLONE_VM is on its parent's memory in any
//! case, and nothing is done; neither is it for programs that call clone(2) themselves.

use std::cell::RefCell;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{MutexGuard, Once};

use rustix::mm::{MapFlags, ProtFlags};

use super::descriptors::{self, RemappedFiles};
use super::vma::{Vma, list_vmas};
use crate::context::lock_unpoisoned;

/// How many forks lie between this process and the first one.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// A number that is another one in each child.
#[inline]
pub(crate) fn process_generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// What the thread that forks holds meanwhile: nobody remaps, and the child has the locks.
struct ForkUnderWay {
    _one_at_a_time: MutexGuard<'static, ()>,
    files: RemappedFiles,
    /// The mappings of `files`. Listed before the fork: until the child has its copies, what it
    /// allocates would change its parent's heap.
    mappings: Vec<Vma>,
    /// The child's end is closed when the child has its copies.
    pipe: Option<(OwnedFd, OwnedFd)>,
}

thread_local! {
    static UNDER_WAY: RefCell<Option<ForkUnderWay>> = const { RefCell::new(None) };
}

/// Does what has to be done at each fork from now on.
pub(crate) fn watch_forks() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // SAFETY: three functions that stay: the library is never unloaded while they may run, as
        // glibc removes handlers of libraries that are.
        unsafe {
            libc::pthread_atfork(
                Some(before_fork),
                Some(after_in_parent),
                Some(after_in_child),
            )
        };
    });
}

extern "C" fn before_fork() {
    let one_at_a_time = lock_unpoisoned(&super::ONE_AT_A_TIME);
    let files = descriptors::lock_files();
    // Without a pipe the child copies while its parent goes on.
    let pipe = (!files.is_empty())
        .then(|| rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).ok())
        .flatten();
    let is_remapped = |vma: &Vma| vma.shared && files.iter().any(|(id, _)| Some(*id) == vma.file);
    let mappings = match files.is_empty() {
        true => Vec::new(),
        false => list_vmas(&(0..usize::MAX)).unwrap_or_default(),
    };
    let mappings = mappings.into_iter().filter(is_remapped).collect();
    let under_way = ForkUnderWay {
        _one_at_a_time: one_at_a_time,
        files,
        mappings,
        pipe,
    };
    // Threads on their way out have no such place any more: they do not fork.
    let _ = UNDER_WAY.try_with(|place| place.borrow_mut().replace(under_way));
}

fn take_under_way() -> Option<ForkUnderWay> {
    UNDER_WAY.try_with(|place| place.borrow_mut().take()).ok()?
}

extern "C" fn after_in_parent() {
    let Some(under_way) = take_under_way() else {
        return;
    };
    if let Some((read, write)) = under_way.pipe {
        drop(write);
        let mut byte = [0];
        // The end of the file, when the child closes it, or ends.
        while rustix::io::read(&read, &mut byte) == Err(rustix::io::Errno::INTR) {}
    }
}

extern "C" fn after_in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    let Some(under_way) = take_under_way() else {
        return;
    };
    // Nothing is allocated or freed before all are copied.
    for vma in &under_way.mappings {
        let found = under_way.files.iter().find(|(id, _)| Some(*id) == vma.file);
        if let Some((_, fd)) = found {
            copy_mapping(vma, fd);
        }
    }
}

/// Puts a private copy in the place of a mapping.
fn copy_mapping(vma: &Vma, fd: &OwnedFd) {
    let mut prot = ProtFlags::empty();
    prot.set(ProtFlags::READ, vma.readable);
    prot.set(ProtFlags::WRITE, vma.writable);
    let (address, len) = (vma.range.start as *mut std::ffi::c_void, vma.range.len());
    let flags = MapFlags::PRIVATE | MapFlags::FIXED;
    // SAFETY: the same pages as before, until they are written to: then they are copied.
    let mapped = unsafe { rustix::mm::mmap(address, len, prot, flags, fd.as_fd(), vma.offset) };
    if mapped.is_ok() && vma.writable {
        super::remap::populate_pages(&vma.range);
    }
}
