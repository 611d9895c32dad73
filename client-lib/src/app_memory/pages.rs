//! Pages of a mapping that may be replaced, and those that must not.

use super::remap;
use super::vma::Vma;
use siw_shm::shared_memory::PAGE;
use std::ops::Range;

/// Alignment of the heaps that glibc's malloc(3) makes for threads (HEAP_MAX_SIZE).
const ARENA_ALIGNMENT: usize = 64 << 20;

/// Checks for the state of a malloc(3) arena, in the first page of its first heap. In a child of
/// fork(2) glibc writes to it before any handler runs, so the page cannot be shared with the child
/// even for that long. `page` has to be a readable page of this process.
fn holds_arena_state(page: usize) -> bool {
    if !page.is_multiple_of(ARENA_ALIGNMENT) {
        return false;
    }
    // SAFETY: the caller has found the page mapped and readable; any bits are a valid number.
    let first = unsafe { (page as *const usize).read_volatile() };
    // `heap_info` begins with the address of the arena, which follows it in the first heap.
    (page + 1..page + PAGE).contains(&first)
}

/// Splits bytes of a mapping into pieces: pages with the state of a malloc(3) arena, which are not
/// replaced, with the reason; and the bytes between them.
pub(super) fn split_at_arena_states(
    vma: &Vma,
    bytes: Range<usize>,
) -> impl Iterator<Item = (Range<usize>, Option<&'static str>)> + use<> {
    let is_heap = vma.writable && vma.is_private_anonymous();
    let mapped = vma.range.clone();
    let mut at = bytes.start;
    std::iter::from_fn(move || {
        if at >= bytes.end {
            return None;
        }
        let page = at / PAGE * PAGE;
        let is_kept = |page: usize| is_heap && mapped.contains(&page) && holds_arena_state(page);
        let (end, reason) = if is_kept(page) {
            (page + PAGE, Some("state of malloc"))
        } else {
            let first = (page + PAGE).next_multiple_of(ARENA_ALIGNMENT);
            let mut pages = (first..bytes.end).step_by(ARENA_ALIGNMENT);
            (pages.find(|page| is_kept(*page)).unwrap_or(bytes.end), None)
        };
        let piece = at..end.min(bytes.end);
        at = piece.end;
        Some((piece, reason))
    })
}

/// Reason why pages of a mapping cannot be replaced; None if they can.
pub(super) fn why_not_remapped(vma: &Vma) -> Option<&'static str> {
    let local = 0u8;
    if vma.shared {
        return Some("shared mapping");
    }
    if vma.executable {
        return Some("executable memory");
    }
    if vma.name.starts_with("[stack") || vma.range.contains(&(&raw const local as usize)) {
        return Some("stack");
    }
    // userfaultfd(2) does not support these mappings.
    if vma.writable && !vma.is_private_anonymous() && !remap::is_only_thread() {
        return Some("private mapping of a file");
    }
    if vma.name.starts_with("[v") {
        return Some("memory of the kernel");
    }
    None
}
