//! fork(2): remapped pages are shared with the daemon, so a child would share them too, and its
//! writes would appear in its parent. Therefore the child gets private copies in their place before
//! fork() returns in either process, as if the pages had stayed private. The child may use all its
//! memory regardless of the parent's registrations (`IBV_FORK_UNNEEDED`), and may end in any way. A
//! child cannot use the contexts of its parent: their calls fail in it.
//!
//! A child of vfork(2), posix_spawn(3) or clone(2) with CLONE_VM runs on its parent's memory
//! anyway, so no copies are made; neither are they for programs that call clone(2) directly.

use std::cell::RefCell;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{MutexGuard, Once};

use super::descriptors::{self, RemappedFile, RemappedFiles};
use super::restore::{SharedPages, give_back_alone};
use super::vma::{Vma, list_vmas};
use crate::locking::lock_unpoisoned;

/// Number of forks between the first process and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Returns a number that differs between a process and its children.
#[inline]
pub(crate) fn process_generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// State held by the forking thread: it blocks remapping, and passes the locks to the child.
struct ForkUnderWay {
    _one_at_a_time: MutexGuard<'static, ()>,
    files: RemappedFiles,
    /// Mappings of `files`, listed before the fork: until the child has its copies, its allocations
    /// would change its parent's heap.
    mappings: Vec<Vma>,
    /// The child closes its end when it has its copies.
    pipe: Option<(OwnedFd, OwnedFd)>,
}

thread_local! {
    static UNDER_WAY: RefCell<Option<ForkUnderWay>> = const { RefCell::new(None) };
}

/// Installs the fork handlers.
pub(crate) fn watch_forks() {
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

extern "C" fn before_fork() {
    let one_at_a_time = lock_unpoisoned(&super::ONE_AT_A_TIME);
    let files = descriptors::lock_files();
    // Without a pipe the child copies while its parent continues.
    let pipe = (!files.is_empty())
        .then(|| rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).ok())
        .flatten();
    let is_remapped = |vma: &Vma| vma.shared && files.iter().any(|file| Some(file.id) == vma.file);
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
    // The variable no longer exists in threads that are exiting; they do not fork.
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
        // Reads the end of the file when the child closes it or ends.
        while rustix::io::read(&read, &mut byte) == Err(rustix::io::Errno::INTR) {}
    }
}

extern "C" fn after_in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    super::calls::MAPPINGS.reset_in_child();
    let Some(under_way) = take_under_way() else {
        return;
    };
    // No allocation or deallocation until all mappings are copied.
    for vma in &under_way.mappings {
        let found = under_way
            .files
            .iter()
            .find(|file| Some(file.id) == vma.file);
        if let Some(file) = found {
            copy_mapping(vma, file);
        }
    }
}

/// Replaces a mapping by a private copy.
fn copy_mapping(vma: &Vma, file: &RemappedFile) {
    let pages = SharedPages {
        pages: vma.range.clone(),
        file: file.fd.as_fd(),
        id: file.id,
        offset: vma.offset,
        prot: vma.prot(),
        neighbours: [None; 2],
    };
    // Without memory the child keeps sharing the pages.
    let _ = give_back_alone(&pages);
}
