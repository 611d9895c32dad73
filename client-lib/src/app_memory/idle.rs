//! Idle pages: pages without a registration that stay mappings of the daemon's files, so that the next
//! registration of the same memory only has to find them. The drop-in library does this for long runs,
//! where copying would take long: it overrides the calls by which the program would notice a
//! difference ([`super::calls`]).
//!
//! The pages go back to private memory when the process forks, when their context closes, and when the
//! program has taken back a part of their file, by munmap(2), free(3), MADV_DONTNEED or mmap(2) with
//! MAP_FIXED: a file can be freed only as a whole. Where pages may be pinned ([`super::pins`]) they stay
//! as they are.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError, Weak};

use super::calls::list_unmoved;
use super::process::ONE_AT_A_TIME;
use super::region::RemappedPart;
use super::state::State;
use super::vma::{MappedFileId, Vma};
use super::{descriptors, pins, restore};
use crate::context::ClientInner;
use crate::locking::lock_unpoisoned;

/// Least length of a run of pages that stays. Shorter ones are copied within about a millisecond, and
/// would leave a program that registers many buffers with many mappings.
pub(super) const LEAST: usize = 4 << 20;

/// Contexts that may have idle pages.
static CONTEXTS: Mutex<Vec<Weak<ClientInner>>> = Mutex::new(Vec::new());
/// A context may have idle pages.
static HAS_IDLE: AtomicBool = AtomicBool::new(false);

/// Checks whether a run of pages of this length stays.
pub(super) fn may_stay(len: usize) -> bool {
    len >= LEAST
}

/// Checks whether the process may have idle pages, without a lock.
pub(super) fn may_exist() -> bool {
    HAS_IDLE.load(Ordering::Acquire)
}

/// Records that a context may have idle pages.
pub(super) fn note_context(ctx: &Arc<ClientInner>) {
    let mut contexts = lock_unpoisoned(&CONTEXTS);
    let this = Arc::downgrade(ctx);
    if !contexts.iter().any(|known| known.ptr_eq(&this)) {
        contexts.push(this);
    }
    HAS_IDLE.store(true, Ordering::Release);
}

/// Gives back all idle pages of the process, as far as possible.
pub(super) fn give_back_all() {
    let mut is_left = false;
    for_each_context(lock_unpoisoned(&ONE_AT_A_TIME), |state, ctx| {
        is_left |= !state.give_back_idle();
        state.free_idle_files(ctx);
    });
    HAS_IDLE.store(is_left, Ordering::Release);
}

/// Frees the files of which the program has taken back pages. Called after such a call of the program,
/// outside of its allocator's locks; a registration that is under way finds the pages instead.
pub(super) fn reclaim_taken() {
    let one_at_a_time = match ONE_AT_A_TIME.try_lock() {
        Ok(one) => one,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return,
    };
    if let Ok(Some(all)) = list_unmoved() {
        for_each_context(one_at_a_time, |state, ctx| state.reclaim_files(ctx, &all));
    }
}

/// Calls a function for each context with idle pages, of which it forgets those that have ended. `lock`
/// is that of [`ONE_AT_A_TIME`].
fn for_each_context(lock: MutexGuard<'_, ()>, mut call: impl FnMut(&mut State, &Arc<ClientInner>)) {
    let live: Vec<_> = {
        let mut contexts = lock_unpoisoned(&CONTEXTS);
        contexts.retain(|context| context.strong_count() > 0);
        contexts.iter().filter_map(Weak::upgrade).collect()
    };
    for ctx in &live {
        call(&mut lock_unpoisoned(&ctx.app_memory.state), ctx);
    }
    // The end of a context takes the lock.
    drop(lock);
    drop(live);
}

impl State {
    /// Gives back the idle pages of this context; returns false if some are left.
    pub(super) fn give_back_idle(&mut self) -> bool {
        let files = self.windows.file_ids().into_iter();
        let idle: Vec<_> = files.flat_map(|file| self.idle_pages(file)).collect();
        idle.is_empty()
            || !pins::may_exist() && self.give_back_parts(&idle, restore::Access::Any, true)
    }

    /// Used pages of a file that no region of any context has.
    fn idle_pages(&self, file: MappedFileId) -> Vec<RemappedPart> {
        let used = self.windows.used_pages(file);
        let parts = used.into_iter().flat_map(|pages| {
            let unused = descriptors::list_unused(file, &pages.bytes);
            unused.into_iter().map(move |bytes| RemappedPart {
                file,
                address: pages.address + (bytes.start - pages.bytes.start) as usize,
                bytes,
            })
        });
        parts.collect()
    }

    /// Frees the files without a registration of which some pages are no longer mapped, after giving
    /// back their other pages.
    fn reclaim_files(&mut self, ctx: &Arc<ClientInner>, all: &[Vma]) {
        for file in self.windows.unregistered_files() {
            let used = self.windows.used_pages(file);
            let mapped = self.windows.mapped_parts(file, all);
            let is_mapped = |bytes: &Range<u64>| {
                let mut parts = mapped.iter();
                parts.any(|part| part.start <= bytes.start && bytes.end <= part.end)
            };
            if used.iter().all(|pages| is_mapped(&pages.bytes)) {
                continue;
            }
            let mut is_unmapped = mapped.is_empty();
            if !is_unmapped && !pins::may_exist() {
                let idle = self.idle_pages(file);
                self.give_back_parts(&idle, restore::Access::Any, true);
                let left = list_unmoved().ok().flatten();
                let is_empty = |all: Vec<Vma>| self.windows.mapped_parts(file, &all).is_empty();
                is_unmapped = left.is_some_and(is_empty);
            }
            if is_unmapped {
                for pages in used {
                    self.windows.mark_unused(file, &pages.bytes);
                }
            }
        }
        self.free_idle_files(ctx);
    }
}
