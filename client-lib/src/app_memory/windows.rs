//! Places of remapped pages of this process in the daemon's memory.
//!
//! Addresses are divided into windows of 2 MiB. A window gets 2 MiB of a file in memory when its
//! first page is registered, and each page has a fixed place there. Consecutive pages are therefore
//! consecutive in the file too, and the kernel merges their mappings: thousands of small
//! registrations in one heap are a few mappings and extents, and need one descriptor. When the last
//! registration of a page ends it becomes private again, and its place is free. Pages that could not
//! be given back stay remapped; windows that are no longer mapped are found when windows run short.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use siw_shm::shared_memory::PAGE;

use super::duplicate::MappedFile;
use super::vma::{MappedFileId, Vma};

/// Bytes of a window.
pub(super) const WINDOW: usize = 2 << 20;
const WORDS: usize = WINDOW / PAGE / 64;
/// Maximum number of windows of one file, 32 MiB: idle files are freed as a whole.
pub(super) const WINDOWS_PER_FILE: usize = 16;
/// Bytes of idle windows that are kept for the next registration.
const KEPT_IDLE: usize = WINDOWS_PER_FILE * WINDOW;
/// Number of windows in use at the first search for unmapped windows.
const FIRST_SWEEP: usize = 64;

/// Number of a file of a context, never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FileNumber(u32);

/// 2 MiB of a file.
#[derive(Debug, Default)]
struct Window {
    /// Number of the address window that uses it; None if free.
    address: Option<usize>,
    /// Pages that have ever been mapped.
    used: [u64; WORDS],
    /// Number of registrations with pages in it.
    registrations: u32,
}

impl Window {
    fn is_idle(&self) -> bool {
        self.registrations == 0 && self.used == [0; WORDS]
    }
}

/// A window by its file and its place there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct WindowIndex {
    file: FileNumber,
    index: usize,
}

impl WindowIndex {
    fn offset(self) -> u64 {
        (self.index * WINDOW) as u64
    }
}

/// A file in memory of the daemon.
#[derive(Debug)]
pub(super) struct WindowFile {
    pub id: MappedFileId,
    /// The daemon's number for it.
    pub arena: u32,
    pub mapped: MappedFile,
    windows: Vec<Window>,
}

/// Used pages of a file, at the addresses at which they were registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct UsedPages {
    pub bytes: Range<u64>,
    pub address: usize,
}

/// The windows of one context.
#[derive(Debug, Default)]
pub(super) struct Windows {
    files: BTreeMap<FileNumber, WindowFile>,
    /// Current window of each address window.
    by_address: HashMap<usize, WindowIndex>,
    free: BTreeSet<WindowIndex>,
    last_file: u32,
    next_sweep: usize,
}

/// Destination of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WindowPlace {
    pub file: FileNumber,
    pub offset: u64,
}

fn window_of(address: usize) -> usize {
    address / WINDOW
}

/// Bits of the pages of a range that lies in one window.
fn page_bits(range: &Range<usize>) -> impl Iterator<Item = (usize, u64)> {
    let first = range.start % WINDOW / PAGE;
    (first..first + range.len() / PAGE).map(|page| (page / 64, 1u64 << (page % 64)))
}

impl Windows {
    pub fn file_at(&self, number: FileNumber) -> Option<&WindowFile> {
        self.files.get(&number)
    }

    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Files with a page in `all`, the mappings of the whole process.
    pub fn mapped_files(&self, all: &[Vma]) -> Vec<MappedFileId> {
        let is_used = |file: &&WindowFile| is_mapped(file, 0..u64::MAX, all);
        self.files
            .values()
            .filter(is_used)
            .map(|file| file.id)
            .collect()
    }

    /// The file with this identity.
    pub fn find_file(&self, id: MappedFileId) -> Option<&WindowFile> {
        self.files.values().find(|file| file.id == id)
    }

    fn find_file_mut(&mut self, id: MappedFileId) -> Option<&mut WindowFile> {
        self.files.values_mut().find(|file| file.id == id)
    }

    fn window_mut(&mut self, at: WindowIndex) -> Option<&mut Window> {
        self.files.get_mut(&at.file)?.windows.get_mut(at.index)
    }

    /// Splits a range at window boundaries.
    pub fn split_range(range: &Range<usize>) -> Vec<Range<usize>> {
        let mut parts = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let end = ((window_of(at) + 1) * WINDOW).min(range.end);
            parts.push(at..end);
            at = end;
        }
        parts
    }

    /// Returns the place of a range of pages in one window, if the window has one, and whether some
    /// of the pages were mapped there before: then they may still be mapped, at other addresses.
    pub fn place_of(&self, range: &Range<usize>) -> Option<(WindowPlace, bool)> {
        let at = *self.by_address.get(&window_of(range.start))?;
        let window = self.files.get(&at.file)?.windows.get(at.index)?;
        let place = WindowPlace {
            file: at.file,
            offset: at.offset() + (range.start % WINDOW) as u64,
        };
        let was_used = page_bits(range).any(|(word, bit)| window.used[word] & bit != 0);
        Some((place, was_used))
    }

    /// Checks that the pages at a place may be overwritten: no registration uses them, and no
    /// mapping in `all`, the mappings of the whole process.
    pub fn is_unmapped(&self, place: WindowPlace, len: usize, all: &[Vma]) -> bool {
        let Some(file) = self.files.get(&place.file) else {
            return true;
        };
        let registered = file.windows.get(place.offset as usize / WINDOW);
        registered.is_none_or(|window| window.registrations == 0)
            && !is_mapped(file, place.offset..place.offset + len as u64, all)
    }

    /// Marks the pages of a range that lies in one window as mapped.
    pub fn mark_used(&mut self, range: &Range<usize>) {
        if let Some(at) = self.by_address.get(&window_of(range.start)).copied()
            && let Some(window) = self.window_mut(at)
        {
            for (word, bit) in page_bits(range) {
                window.used[word] |= bit;
            }
        }
    }

    /// Marks pages of a part of a file as no longer mapped: they were given back.
    pub fn mark_unused(&mut self, id: MappedFileId, bytes: &Range<u64>) {
        let Some(file) = self.find_file_mut(id) else {
            return;
        };
        for start in bytes.clone().step_by(PAGE) {
            let page = start as usize % WINDOW / PAGE;
            if let Some(window) = file.windows.get_mut(start as usize / WINDOW) {
                window.used[page / 64] &= !(1 << (page % 64));
            }
        }
    }

    /// Updates the registration count of the windows behind a part of a file.
    pub fn count_registration(&mut self, id: MappedFileId, bytes: &Range<u64>, is_new: bool) {
        let Some(file) = self.find_file_mut(id) else {
            return;
        };
        let first = (bytes.start / WINDOW as u64) as usize;
        let last = ((bytes.end.max(1) - 1) / WINDOW as u64) as usize;
        for window in file.windows.iter_mut().take(last + 1).skip(first) {
            window.registrations = if is_new {
                window.registrations + 1
            } else {
                window.registrations.saturating_sub(1)
            };
        }
    }

    /// All files.
    pub fn file_ids(&self) -> Vec<MappedFileId> {
        self.files.values().map(|file| file.id).collect()
    }

    /// Parts of a file that are mapped in `all`, the mappings of the whole process, in order and apart.
    pub fn mapped_parts(&self, id: MappedFileId, all: &[Vma]) -> Vec<Range<u64>> {
        let Some(file) = self.find_file(id) else {
            return Vec::new();
        };
        let mut parts: Vec<Range<u64>> = all
            .iter()
            .filter(|vma| vma.file == Some(id) && !file.mapped.holds(&vma.range))
            .map(|vma| vma.offset..vma.offset + vma.range.len() as u64)
            .collect();
        parts.sort_unstable_by_key(|part| part.start);
        let mut merged: Vec<Range<u64>> = Vec::new();
        for part in parts {
            match merged.last_mut() {
                Some(last) if part.start <= last.end => last.end = last.end.max(part.end),
                _ => merged.push(part),
            }
        }
        merged
    }

    /// Files without registrations that have used pages.
    pub fn unregistered_files(&self) -> Vec<MappedFileId> {
        let is_unregistered = |file: &&WindowFile| {
            let windows = || file.windows.iter();
            windows().all(|window| window.registrations == 0) && !windows().all(Window::is_idle)
        };
        self.files
            .values()
            .filter(is_unregistered)
            .map(|file| file.id)
            .collect()
    }

    /// Used pages of a file, in order.
    pub fn used_pages(&self, id: MappedFileId) -> Vec<UsedPages> {
        let mut found: Vec<UsedPages> = Vec::new();
        let Some(file) = self.find_file(id) else {
            return found;
        };
        for (index, window) in file.windows.iter().enumerate() {
            let Some(number) = window.address else {
                continue;
            };
            for page in 0..WINDOW / PAGE {
                if window.used[page / 64] & 1 << (page % 64) == 0 {
                    continue;
                }
                let start = (index * WINDOW + page * PAGE) as u64;
                let address = number * WINDOW + page * PAGE;
                match found.last_mut() {
                    Some(last)
                        if last.bytes.end == start
                            && last.address + (start - last.bytes.start) as usize == address =>
                    {
                        last.bytes.end += PAGE as u64;
                    }
                    _ => found.push(UsedPages {
                        bytes: start..start + PAGE as u64,
                        address,
                    }),
                }
            }
        }
        found
    }

    /// Assigns a place to each window of a range that has none. The error is the number of windows
    /// to be added first ([`Windows::add_file`]).
    pub fn assign_places(&mut self, range: &Range<usize>) -> Result<(), usize> {
        let wanted: Vec<usize> = (window_of(range.start)..=window_of(range.end - 1))
            .filter(|number| !self.by_address.contains_key(number))
            .collect();
        if wanted.len() > self.free.len() {
            return Err(wanted.len() - self.free.len());
        }
        // The lowest places first, in the order of addresses, so that adjacent windows become one
        // mapping.
        let mut next = self.find_run(wanted.len());
        for number in wanted {
            let at = match next {
                Some(at) => at,
                None => *self.free.first().ok_or(1usize)?,
            };
            self.free.remove(&at);
            next = next.map(|at| WindowIndex {
                index: at.index + 1,
                ..at
            });
            if let Some(window) = self.window_mut(at) {
                window.address = Some(number);
                window.used = [0; WORDS];
            }
            self.by_address.insert(number, at);
        }
        Ok(())
    }

    /// Finds the lowest consecutive free windows in one file, and returns the first of them.
    fn find_run(&self, len: usize) -> Option<WindowIndex> {
        let mut run: Option<(WindowIndex, usize)> = None;
        for &at in &self.free {
            let (first, count) = match run {
                Some((first, count))
                    if first.file == at.file && first.index + count == at.index =>
                {
                    (first, count + 1)
                }
                _ => (at, 1),
            };
            if count >= len {
                return Some(first);
            }
            run = Some((first, count));
        }
        None
    }

    /// Gives up the window of an address, because its pages are used elsewhere: the next
    /// [`Windows::assign_places`] finds another one.
    pub fn abandon_place(&mut self, address: usize) {
        self.by_address.remove(&window_of(address));
    }

    /// Number of windows of all files.
    fn count_windows(&self) -> usize {
        self.files.values().map(|file| file.windows.len()).sum()
    }

    /// Number of windows of the next file, when `missing` are needed, or more than fit in one file.
    pub fn next_file_windows(&self, missing: usize) -> usize {
        missing.max(self.count_windows()).min(WINDOWS_PER_FILE)
    }

    /// Adds the windows of a new file.
    pub fn add_file(&mut self, id: MappedFileId, arena: u32, mapped: MappedFile, len: usize) {
        self.last_file += 1;
        let number = FileNumber(self.last_file);
        let count = len / WINDOW;
        self.free.extend((0..count).map(|index| WindowIndex {
            file: number,
            index,
        }));
        let file = WindowFile {
            id,
            arena,
            mapped,
            windows: (0..count).map(|_| Window::default()).collect(),
        };
        self.files.insert(number, file);
    }

    /// Removes a file without registrations and remapped pages, if enough idle windows are left for the
    /// next registration; returns its identity and number.
    pub fn take_idle_file(&mut self) -> Option<(MappedFileId, u32)> {
        let idle_windows = |file: &WindowFile| {
            let windows = file.windows.iter();
            windows.filter(|window| window.is_idle()).count()
        };
        let idle: usize = self.files.values().map(idle_windows).sum();
        let (&number, _) = self.files.iter().rev().find(|(_, file)| {
            idle_windows(file) == file.windows.len()
                && (idle - file.windows.len()) * WINDOW >= KEPT_IDLE
        })?;
        self.remove_file(number)
    }

    fn remove_file(&mut self, number: FileNumber) -> Option<(MappedFileId, u32)> {
        self.free.retain(|at| at.file != number);
        self.by_address.retain(|_, at| at.file != number);
        let file = self.files.remove(&number)?;
        Some((file.id, file.arena))
    }

    /// Checks whether it is time to search for unused windows.
    pub fn wants_sweep(&self) -> bool {
        self.count_windows() - self.free.len() >= self.next_sweep.max(FIRST_SWEEP)
    }

    /// Frees the windows without a registration and without a mapping in `all`, the mappings of the
    /// whole process. Their pages stay in the file: the daemon maps whole files for a NIC that reads
    /// payload by DMA, and the NIC would continue to read the old pages if holes were punched and new
    /// ones allocated.
    pub fn sweep_windows(&mut self, all: &[Vma]) {
        for (&number, file) in &mut self.files {
            for index in 0..file.windows.len() {
                let at = WindowIndex {
                    file: number,
                    index,
                };
                let window = &file.windows[index];
                let bytes = at.offset()..at.offset() + WINDOW as u64;
                let is_idle = window.registrations == 0 && window.address.is_some();
                if !is_idle || is_mapped(file, bytes, all) {
                    continue;
                }
                let window = &mut file.windows[index];
                window.used = [0; WORDS];
                if let Some(address) = window.address.take()
                    && self.by_address.get(&address) == Some(&at)
                {
                    self.by_address.remove(&address);
                }
                self.free.insert(at);
            }
        }
        self.next_sweep = (self.count_windows() - self.free.len()) * 2;
    }
}

/// Checks for a mapping of a part of a file, apart from that of the whole file.
fn is_mapped(file: &WindowFile, bytes: Range<u64>, all: &[Vma]) -> bool {
    all.iter().any(|vma| {
        let end = vma.offset + vma.range.len() as u64;
        vma.file == Some(file.id)
            && vma.offset < bytes.end
            && end > bytes.start
            && !file.mapped.holds(&vma.range)
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use super::*;
    use crate::app_memory::vma::list_vmas;

    fn make_file() -> (MappedFileId, MappedFile) {
        let (id, mapped, _) = make_open_file();
        (id, mapped)
    }

    fn make_open_file() -> (MappedFileId, MappedFile, OwnedFd) {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let fd = rustix::fs::memfd_create("windows-test", flags).expect("memfd");
        let len = 8 * WINDOW;
        rustix::fs::ftruncate(&fd, len as u64).expect("room");
        let id = MappedFileId::of_file(&fd).expect("fstat");
        (id, MappedFile::map(&fd, len).expect("addresses"), fd)
    }

    #[test]
    fn neighbours_lie_side_by_side_and_pages_keep_their_place() {
        let mut windows = Windows::default();
        let base = 7 * WINDOW;
        let range = base + WINDOW - PAGE..base + WINDOW + PAGE;
        assert_eq!(windows.assign_places(&range), Err(2));
        let (id, fd) = make_file();
        windows.add_file(id, 1, fd, 4 * WINDOW);
        assert_eq!(windows.free.len(), 4);
        assert_eq!(windows.assign_places(&range), Ok(()));
        let parts = Windows::split_range(&range);
        assert_eq!(parts.len(), 2);
        let (first, was_used) = windows.place_of(&parts[0]).expect("assigned");
        let (second, _) = windows.place_of(&parts[1]).expect("assigned");
        assert_eq!(second.offset - first.offset, PAGE as u64);
        assert!(!was_used);
        windows.mark_used(&parts[0]);
        assert_eq!(windows.place_of(&parts[0]), Some((first, true)));
        assert_eq!(
            windows.assign_places(&range),
            Ok(()),
            "it has its place already"
        );
    }

    #[test]
    fn what_is_registered_or_mapped_is_not_swept() {
        let mut windows = Windows::default();
        let (id, fd) = make_file();
        windows.add_file(id, 1, fd, 2 * WINDOW);
        for number in [10, 20] {
            let range = number * WINDOW..number * WINDOW + PAGE;
            windows.assign_places(&range).expect("two are free");
            windows.mark_used(&range);
        }
        let (place, _) = windows
            .place_of(&(10 * WINDOW..10 * WINDOW + PAGE))
            .expect("assigned");
        let bytes = place.offset..place.offset + 16;
        windows.count_registration(id, &bytes, true);
        windows.sweep_windows(&[]);
        assert_eq!(windows.free.len(), 1, "one is registered");
        assert!(!windows.is_unmapped(place, PAGE, &[]));
        windows.count_registration(id, &bytes, false);
        let file = &windows.files[&place.file].mapped;
        let used = file.duplicate(place.offset, PAGE).expect("addresses");
        let list_all = || list_vmas(&(0..usize::MAX)).expect("mappings");
        assert!(!windows.is_unmapped(place, PAGE, &list_all()));
        drop(used);
        // The mapping of the whole file does not count.
        assert!(windows.is_unmapped(place, PAGE, &list_all()));
        windows.sweep_windows(&list_all());
        assert_eq!(windows.free.len(), 2);
    }

    /// A NIC may have the pages mapped for DMA.
    #[test]
    fn swept_windows_keep_their_pages() {
        let mut windows = Windows::default();
        let (id, mapped, fd) = make_open_file();
        rustix::io::pwrite(&fd, &[7; PAGE], 0).expect("room");
        windows.add_file(id, 1, mapped, WINDOW);
        let range = 10 * WINDOW..10 * WINDOW + PAGE;
        windows.assign_places(&range).expect("one is free");
        windows.mark_used(&range);
        windows.sweep_windows(&[]);
        assert_eq!(windows.free.len(), 1);
        let status = rustix::fs::fstat(&fd).expect("fstat");
        assert!(status.st_blocks > 0, "the page was freed");
    }

    #[test]
    fn the_lowest_run_is_taken() {
        let mut windows = Windows::default();
        for arena in 0..2 {
            let (id, fd) = make_file();
            windows.add_file(id, arena, fd, 4 * WINDOW);
        }
        let place_of_run = |windows: &mut Windows, first: usize, len: usize| {
            let range = first * WINDOW..(first + len) * WINDOW;
            windows.assign_places(&range).expect("eight are free");
            let (place, _) = windows
                .place_of(&(range.start..range.start + PAGE))
                .expect("assigned");
            (place.file, place.offset / WINDOW as u64)
        };
        let (first, second) = (FileNumber(1), FileNumber(2));
        assert_eq!(place_of_run(&mut windows, 10, 1), (first, 0));
        // Four are consecutive in the second file only.
        assert_eq!(place_of_run(&mut windows, 20, 4), (second, 0));
        assert_eq!(place_of_run(&mut windows, 30, 2), (first, 1));
    }

    #[test]
    fn idle_files_are_kept_up_to_a_limit() {
        let mut windows = Windows::default();
        let ranges = [100, 200, 300].map(|number| number * WINDOW..number * WINDOW + PAGE);
        let ids: Vec<_> = ranges
            .iter()
            .map(|range| {
                let (id, file) = make_file();
                windows.add_file(id, 1, file, KEPT_IDLE);
                let whole = range.start..range.start + KEPT_IDLE;
                windows.assign_places(&whole).expect("a file is free");
                for part in Windows::split_range(&whole) {
                    windows.mark_used(&part);
                }
                id
            })
            .collect();
        assert_eq!(windows.take_idle_file(), None, "all have pages");
        let pages = |id| windows.used_pages(id)[0].bytes.clone();
        let used: Vec<_> = ids.iter().copied().map(pages).collect();
        windows.mark_unused(ids[1], &used[1]);
        assert_eq!(
            windows.take_idle_file(),
            None,
            "the next registration uses it"
        );
        windows.mark_unused(ids[0], &used[0]);
        assert_eq!(windows.take_idle_file(), Some((ids[1], 1)));
        assert_eq!(windows.take_idle_file(), None);
        assert_eq!(windows.used_pages(ids[2])[0].address, ranges[2].start);
        assert_eq!(windows.unregistered_files(), [ids[2]]);
    }
}
