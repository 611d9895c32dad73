//! Arenas that [`Pd::alloc_mr`](crate::Pd::alloc_mr) shares among regions. NICs, DPDK and the
//! kernel limit the number of separate memory areas, so a client has a few large ones: the first is
//! small, each further one longer than those before, up to [`LONGEST_ARENA`].
//!
//! Deregistering a region frees its block. An arena is freed with its last block.

use crate::app_memory::vma::MappedFileId;
use crate::context::ClientInner;
use crate::locking::{Inherited, ProcessMutex};
use crate::memory::Arena;
use crate::{Context, Error};
use siw_shm::shared_memory::PAGE;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Arc, Weak};

/// Length of the first arena of a client.
const FIRST_ARENA: usize = 256 << 10;
/// Length of the second arena: a hugepage.
const SECOND_ARENA: usize = 2 << 20;
/// Maximum length of a shared arena.
const LONGEST_ARENA: usize = 64 << 20;
/// Maximum length of a region in a shared arena; longer regions get an arena of their own.
const LONGEST_SHARING: usize = LONGEST_ARENA / 8;
/// Arenas of at least this length use hugepages if available.
const HUGE_FROM: usize = 1 << 20;
/// Minimum alignment of regions, so that no two share a cache line. A region shorter than a page is
/// aligned to its length, rounded up to a power of two.
const LEAST_ALIGNMENT: usize = 64;

/// The arenas of one context.
#[derive(Default)]
pub(crate) struct ArenaPool {
    /// All arenas, by file. Dropping an arena removes it: while this lock is held, no other lock is
    /// taken and no arena is dropped.
    by_file: ProcessMutex<HashMap<MappedFileId, Weak<Arena>>>,
    /// Arenas that regions share.
    arenas: ProcessMutex<Vec<SharedArena>>,
    retired: ProcessMutex<Retired>,
}

/// Bytes of blocks whose regions are being deregistered.
#[derive(Default)]
struct Retired {
    /// The daemon has not confirmed the deregistration.
    unconfirmed: Vec<RetiredBytes>,
    /// The daemon has confirmed it: the bytes are free.
    confirmed: Vec<RetiredBytes>,
}

/// The arena is freed with its last block also while its bytes are in this list.
type RetiredBytes = (Weak<Arena>, Range<usize>);

impl ArenaPool {
    /// Adds an arena: regions in it need no copy.
    pub(crate) fn add(&self, id: MappedFileId, arena: &Arc<Arena>) {
        if let Ok(mut by_file) = self.by_file.lock() {
            by_file.insert(id, Arc::downgrade(arena));
        }
    }

    /// The arena in a file.
    pub(crate) fn find(&self, id: MappedFileId) -> Option<Arc<Arena>> {
        let by_file = self.by_file.lock().ok()?;
        by_file.get(&id).and_then(Weak::upgrade)
    }

    /// Removes a dropped arena.
    pub(crate) fn remove(&self, id: MappedFileId) {
        if let Ok(mut by_file) = self.by_file.lock() {
            by_file.remove(&id);
        }
    }

    /// Frees a block once the daemon has answered a later request than the one that deregisters its
    /// region, which has been posted.
    pub(crate) fn retire(&self, mut block: ArenaBlock) {
        let range = std::mem::take(&mut block.range);
        let bytes = (Arc::downgrade(&block.arena), range);
        if let Ok(mut retired) = self.retired.lock() {
            retired.unconfirmed.push(bytes);
        }
    }

    /// Number of retired blocks that the daemon confirms with the answer to a request that is sent
    /// from now on.
    pub(crate) fn unconfirmed(&self) -> usize {
        let retired = self.retired.lock();
        retired.map_or(0, |retired| retired.unconfirmed.len())
    }

    /// The daemon has confirmed the first `count` retired blocks.
    pub(crate) fn confirm(&self, count: usize) {
        if count > 0
            && let Ok(mut retired) = self.retired.lock()
        {
            let Retired {
                unconfirmed,
                confirmed,
            } = &mut *retired;
            confirmed.extend(unconfirmed.drain(..count));
        }
    }

    fn take_confirmed(&self) -> Result<Vec<RetiredBytes>, Inherited> {
        Ok(std::mem::take(&mut self.retired.lock()?.confirmed))
    }
}

/// A shared arena, kept alive by its blocks.
struct SharedArena {
    arena: Weak<Arena>,
    /// Requested length, from which the length of the next arena is derived.
    len: usize,
    space: ArenaSpace,
}

/// Memory for one region; freed when dropped.
pub(crate) struct ArenaBlock {
    arena: Arc<Arena>,
    range: Range<usize>,
}

impl ArenaBlock {
    /// Allocates `len` zeroed bytes.
    pub(crate) fn alloc(ctx: &Arc<ClientInner>, len: usize) -> Result<ArenaBlock, Error> {
        // A child of fork(2) would share the memory with its parent.
        ctx.check_process()?;
        if len == 0 || len > LONGEST_SHARING {
            let arena = Arena::alloc(&Context(ctx.clone()), len, true)?;
            return Ok(ArenaBlock {
                arena,
                range: 0..len,
            });
        }
        if let Some(block) = Self::alloc_shared(ctx, len)? {
            return Ok(block);
        }
        if ctx.arena_pool.unconfirmed() > 0 {
            ctx.confirm_posted()?;
            if let Some(block) = Self::alloc_shared(ctx, len)? {
                return Ok(block);
            }
        }
        let mut arenas = ctx.arena_pool.arenas.lock()?;
        let longest = arenas.iter().map(|shared| shared.len).max();
        let (arena, ordered) = alloc_arena(ctx, next_arena_len(longest, len), len)?;
        let mut space = ArenaSpace::new(arena.len());
        let (range, _) = space
            .take(len)
            .ok_or(Error::Invalid("siwd provided less memory than announced"))?;
        arenas.push(SharedArena {
            arena: Arc::downgrade(&arena),
            len: ordered,
            space,
        });
        Ok(ArenaBlock { arena, range })
    }

    /// Allocates from the arenas that exist.
    fn alloc_shared(ctx: &Arc<ClientInner>, len: usize) -> Result<Option<ArenaBlock>, Error> {
        let mut arenas = ctx.arena_pool.arenas.lock()?;
        for (arena, range) in ctx.arena_pool.take_confirmed()? {
            give_back(&mut arenas, &arena, range);
        }
        arenas.retain(|shared| shared.arena.strong_count() > 0);
        for shared in arenas.iter_mut() {
            let Some(arena) = shared.arena.upgrade() else {
                continue;
            };
            if let Some((range, used)) = shared.space.take(len) {
                drop(arenas);
                let block = ArenaBlock { arena, range };
                block.arena.fill_zero(&used)?;
                return Ok(Some(block));
            }
        }
        Ok(None)
    }

    pub(crate) fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    pub(crate) fn range(&self) -> Range<usize> {
        self.range.clone()
    }
}

impl Drop for ArenaBlock {
    fn drop(&mut self) {
        let ctx = self.arena.ctx();
        if self.range.is_empty() {
            return;
        }
        let Ok(mut arenas) = ctx.arena_pool.arenas.lock() else {
            return;
        };
        let (arena, range) = (Arc::downgrade(&self.arena), self.range.clone());
        give_back(&mut arenas, &arena, range);
    }
}

/// Frees bytes of a shared arena, which is forgotten with its last block.
fn give_back(arenas: &mut Vec<SharedArena>, arena: &Weak<Arena>, range: Range<usize>) {
    let position = arenas.iter().position(|shared| shared.arena.ptr_eq(arena));
    if let Some(index) = position {
        arenas[index].space.give_back(range);
        if arenas[index].space.is_unused() {
            arenas.remove(index);
        }
    }
}

/// Allocates an arena of `wanted` bytes, or of `least` if a limit refuses that; returns the length
/// used.
fn alloc_arena(
    ctx: &Arc<ClientInner>,
    wanted: usize,
    least: usize,
) -> Result<(Arc<Arena>, usize), Error> {
    let context = Context(ctx.clone());
    match Arena::alloc(&context, wanted, wanted >= HUGE_FROM) {
        Err(Error::Refused { errno, .. }) if errno == libc::ENOMEM && least < wanted => {
            Arena::alloc(&context, least, least >= HUGE_FROM).map(|arena| (arena, least))
        }
        made => made.map(|arena| (arena, wanted)),
    }
}

/// Length of the next arena, when the longest so far is `longest` and `len` bytes are wanted.
fn next_arena_len(longest: Option<usize>, len: usize) -> usize {
    let next = match longest {
        None => FIRST_ARENA,
        Some(longest) => (longest * 2).clamp(SECOND_ARENA, LONGEST_ARENA),
    };
    next.max(len.next_power_of_two())
}

/// Free bytes of an arena.
struct ArenaSpace {
    len: usize,
    /// Free ranges, length by offset; no two are adjacent.
    free: BTreeMap<usize, usize>,
    /// Bytes from here on were never allocated, so they are zero.
    untouched_from: usize,
}

impl ArenaSpace {
    fn new(len: usize) -> ArenaSpace {
        ArenaSpace {
            len,
            free: BTreeMap::from([(0, len)]),
            untouched_from: 0,
        }
    }

    /// Takes the first `len` free bytes; also returns the part of them that may have been used
    /// before.
    fn take(&mut self, len: usize) -> Option<(Range<usize>, Range<usize>)> {
        let alignment = len.next_power_of_two().clamp(LEAST_ALIGNMENT, PAGE);
        // The rest of the last cache line stays unused.
        let room = len.next_multiple_of(LEAST_ALIGNMENT);
        let (hole, hole_len, start) = self.free.iter().find_map(|(hole, hole_len)| {
            let start = hole.next_multiple_of(alignment);
            (start + room <= hole + hole_len).then_some((*hole, *hole_len, start))
        })?;
        self.free.remove(&hole);
        for (from, to) in [(hole, start), (start + room, hole + hole_len)] {
            if from < to {
                self.free.insert(from, to - from);
            }
        }
        let used_to = (start + len).min(self.untouched_from);
        self.untouched_from = self.untouched_from.max(start + len);
        Some((start..start + len, start..used_to.max(start)))
    }

    /// Frees a range from [`Self::take`].
    fn give_back(&mut self, range: Range<usize>) {
        let mut start = range.start;
        let mut end = start + range.len().next_multiple_of(LEAST_ALIGNMENT);
        if let Some((before, len)) = self.free.range(..start).next_back()
            && before + len == start
        {
            start = *before;
        }
        if let Some(len) = self.free.remove(&end) {
            end += len;
        }
        self.free.insert(start, end - start);
    }

    fn is_unused(&self) -> bool {
        self.free.get(&0) == Some(&self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arenas_grow_from_small_to_the_longest() {
        let mut lens = vec![next_arena_len(None, 64)];
        while lens.len() < 8 {
            lens.push(next_arena_len(lens.last().copied(), 64));
        }
        let mib = [2, 4, 8, 16, 32, 64, 64].map(|mib| mib << 20);
        assert_eq!(lens[0], 256 << 10);
        assert_eq!(lens[1..], mib);
        assert_eq!(next_arena_len(None, 3 << 20), 4 << 20);
        assert_eq!(next_arena_len(Some(4 << 20), 3 << 20), 8 << 20);
    }

    #[test]
    fn blocks_are_aligned_and_do_not_overlap() {
        let mut space = ArenaSpace::new(1 << 20);
        let mut taken: Vec<Range<usize>> = Vec::new();
        for len in [1, 8, 64, 65, 100, 4000, 4096, 4097, 70_000, 3, 128] {
            let (range, _) = space.take(len).unwrap();
            assert_eq!(range.len(), len);
            assert!(
                range
                    .start
                    .is_multiple_of(len.next_power_of_two().clamp(64, 4096))
            );
            let line = |range: &Range<usize>| range.start / 64..range.end.div_ceil(64);
            for other in &taken {
                let (a, b) = (line(&range), line(other));
                assert!(a.end <= b.start || b.end <= a.start, "{range:?} {other:?}");
            }
            taken.push(range);
        }
        assert!(space.take(1 << 20).is_none());
        // Freed in another order, the space is one range again.
        while !taken.is_empty() {
            let index = taken.len() * 7 / 11;
            assert!(!space.is_unused());
            space.give_back(taken.remove(index));
        }
        assert!(space.is_unused() && space.free.len() == 1);
    }

    #[test]
    fn bytes_that_were_used_are_told() {
        let mut space = ArenaSpace::new(64 << 10);
        let (first, _) = space.take(4096).unwrap();
        let (second, _) = space.take(4096).unwrap();
        space.give_back(second.clone());
        space.give_back(first);
        assert!(space.is_unused());
        let (again, used) = space.take(16_384).unwrap();
        assert_eq!((again.start, used), (0, 0..second.end));
        let (behind, used) = space.take(4096).unwrap();
        assert_eq!(behind.start, 16_384);
        assert!(used.is_empty());
    }

    #[test]
    fn holes_are_filled_first() {
        let mut space = ArenaSpace::new(64 << 10);
        let taken: Vec<_> = (0..16).map(|_| space.take(4096).unwrap().0).collect();
        assert!(space.take(1).is_none());
        space.give_back(taken[3].clone());
        space.give_back(taken[9].clone());
        assert!(space.take(8192).is_none());
        assert_eq!(space.take(4096).unwrap().0, taken[3]);
        assert_eq!(space.take(64).unwrap().0.start, taken[9].start);
        assert_eq!(space.take(64).unwrap().0.start, taken[9].start + 64);
    }
}
