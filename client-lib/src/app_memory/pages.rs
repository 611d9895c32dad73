//! Pages of a mapping that may be replaced, and those that must not.

use super::fork;
use super::remap;
use super::vma::{Vma, list_vmas};
use siw_shm::Access;
use siw_shm::shared_memory::PAGE;
use std::ffi::c_void;
use std::ops::Range;

/// Alignment of the heaps that glibc's malloc(3) makes for threads (HEAP_MAX_SIZE).
const ARENA_ALIGNMENT: usize = 64 << 20;

/// Reads words of the program's allocator at an address. The kernel reads them, if a seccomp filter does
/// not deny it: AddressSanitizer would report a read by this library.
///
/// # Safety
/// The words are mapped and can be read.
pub(super) unsafe fn read_words(address: usize, words: &mut [usize]) {
    let length = size_of_val(words);
    let local = libc::iovec {
        iov_base: words.as_mut_ptr().cast(),
        iov_len: length,
    };
    let remote = libc::iovec {
        iov_base: address as *mut c_void,
        iov_len: length,
    };
    // SAFETY: writes at most the local vector; the kernel checks the other one.
    let read = unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0) };
    if read != length as isize {
        for (place, word) in words.iter_mut().enumerate() {
            // SAFETY: the caller's promise; any bits are a valid number.
            *word = unsafe { (address as *const usize).add(place).read_volatile() };
        }
    }
}

/// Checks for the state of a malloc(3) arena, in the first page of its first heap. `page` has to be a
/// readable page of this process.
fn holds_arena_state(page: usize) -> bool {
    if !page.is_multiple_of(ARENA_ALIGNMENT) {
        return false;
    }
    let mut first = [0];
    // SAFETY: the caller has found the page mapped and readable.
    unsafe { read_words(page, &mut first) };
    // `heap_info` begins with the address of the arena, which follows it in the first heap.
    (page + 1..page + PAGE).contains(&first[0])
}

fn is_readable(address: usize) -> bool {
    list_vmas(&(address..address + 1)).is_ok_and(|vmas| vmas.iter().any(|vma| vma.readable))
}

/// Checks for memory of a heap that glibc's malloc(3) has made for a thread, which is mapped with
/// MAP_NORESERVE: such a heap begins with the address of its arena, in the first page of a heap, and its
/// own size.
pub(super) fn is_in_thread_heap(address: usize) -> bool {
    let start = address / ARENA_ALIGNMENT * ARENA_ALIGNMENT;
    if !is_readable(start) {
        return false;
    }
    let mut words = [0; 3];
    // SAFETY: the page is mapped and readable.
    unsafe { read_words(start, &mut words) };
    let [arena, _, size] = words;
    (1..PAGE).contains(&(arena % ARENA_ALIGNMENT))
        && (PAGE..=ARENA_ALIGNMENT).contains(&size)
        && address < start + size
}

/// The pages of a readable range that have the state of a malloc(3) arena.
pub(super) fn arena_states(range: &Range<usize>) -> impl Iterator<Item = usize> + use<> {
    let first = range.start.next_multiple_of(ARENA_ALIGNMENT);
    let pages = (first..range.end).step_by(ARENA_ALIGNMENT);
    pages.filter(|page| holds_arena_state(*page))
}

/// Splits bytes of a mapping into pieces: pages with the state of a malloc(3) arena that must not be
/// replaced, with the reason; and the bytes between them. Unless a child of fork(2) has its copies
/// when the system call returns, glibc writes to that state in the child before.
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
        let is_kept = |page: usize| {
            is_heap
                && mapped.contains(&page)
                && holds_arena_state(page)
                && !fork::copies_during_call()
        };
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

/// Whole pages of a region to which no other memory of the program belongs, by what malloc(3) of glibc
/// shows: those inside, and the first and last page of a chunk that is a mapping of its own and has
/// nothing but the region.
pub(super) fn own_pages(range: &Range<usize>) -> Range<usize> {
    let mut own = range.start.next_multiple_of(PAGE)..range.end / PAGE * PAGE;
    let (first, end) = (range.start / PAGE * PAGE, range.end.next_multiple_of(PAGE));
    // The program may have unmapped the memory.
    if is_readable(first)
        && let Some(chunk_end) = remap::mapped_chunk_end(first)
    {
        own.start = first;
        if chunk_end == end {
            own.end = end;
        }
    }
    own.start..own.end.max(own.start)
}

/// Reason for copying private pages of a file, such as static data, in a program with several threads:
/// userfaultfd(2) does not support them.
pub(super) const PAGES_OF_FILE: &str = "private mapping of a file";

/// Reason why pages of a mapping cannot be replaced for this access, or should not; None if they can.
pub(super) fn why_not_remapped(vma: &Vma, access: Access) -> Option<&'static str> {
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
    let needs_parked_threads =
        vma.writable && !vma.is_private_anonymous() && !remap::is_only_thread();
    if needs_parked_threads && !access.needs_shared_memory() {
        return Some(PAGES_OF_FILE);
    }
    if vma.name.starts_with("[v") {
        return Some("memory of the kernel");
    }
    None
}
