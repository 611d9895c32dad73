//! Places of remapped pages of this process in the daemon's memory.
//!
//! Addresses are divided into windows of 2 MiB. A window gets 2 MiB of a file in memory when its
//! first page is registered, and each page has a fixed place there. Consecutive pages are therefore
//! consecutive in the file too, and the kernel merges their mappings: thousands of small
//! registrations in one heap are a few mappings and extents, and need one descriptor. When the last
//! registration of a page ends it becomes private again, and its place is free. Pages that could not
//! be given back stay remapped; windows that are no longer mapped are found when windows run short.

use std::collections::HashMap;
use std::ops::Range;

use siw_shm::shared_memory::PAGE;

use super::duplicate::MappedFile;
use super::vma::{MappedFileId, Vma};

/// Bytes of a window.
pub(super) const WINDOW: usize = 2 << 20;
const WORDS: usize = WINDOW / PAGE / 64;
/// Maximum number of windows of one file, 32 MiB: idle files are freed as a whole.
pub(super) const WINDOWS_PER_FILE: usize = 16;
/// Bytes of files without remapped pages that are kept for the next registration, in short files.
const KEPT_IDLE: usize = 128 << 20;
/// Number of windows in use at the first search for unmapped windows.
const FIRST_SWEEP: usize = 64;

/// 2 MiB of a file.
#[derive(Debug)]
struct Window {
    file: usize,
    offset: u64,
    /// Number of the address window that uses it; None if free.
    address: Option<usize>,
    /// Pages that have ever been mapped.
    used: [u64; WORDS],
    /// Number of registrations with pages in it.
    registrations: u32,
}

/// A file in memory of the daemon.
#[derive(Debug)]
pub(super) struct WindowFile {
    pub id: MappedFileId,
    /// The daemon's number for it.
    pub arena: u32,
    pub mapped: MappedFile,
    first_window: usize,
}

/// The windows of one context.
#[derive(Debug, Default)]
pub(super) struct Windows {
    files: Vec<WindowFile>,
    windows: Vec<Window>,
    /// Index of the current window of each address window.
    by_address: HashMap<usize, usize>,
    free: Vec<usize>,
    next_sweep: usize,
}

/// Destination of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WindowPlace {
    pub file: usize,
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
    pub fn file_at(&self, index: usize) -> Option<&WindowFile> {
        self.files.get(index)
    }

    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Files with a page in `all`, the mappings of the whole process.
    pub fn mapped_files(&self, all: &[Vma]) -> Vec<MappedFileId> {
        let is_used = |file: &&WindowFile| is_mapped(file, 0..u64::MAX, all);
        self.files
            .iter()
            .filter(is_used)
            .map(|file| file.id)
            .collect()
    }

    /// The file with this identity.
    pub fn find_file(&self, id: MappedFileId) -> Option<&WindowFile> {
        self.files.iter().find(|file| file.id == id)
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
        let index = *self.by_address.get(&window_of(range.start))?;
        let window = &self.windows[index];
        let place = WindowPlace {
            file: window.file,
            offset: window.offset + (range.start % WINDOW) as u64,
        };
        let was_used = page_bits(range).any(|(word, bit)| window.used[word] & bit != 0);
        Some((place, was_used))
    }

    /// Checks that the pages at a place may be overwritten: no registration uses them, and no
    /// mapping in `all`, the mappings of the whole process.
    pub fn is_unmapped(&self, place: WindowPlace, len: usize, all: &[Vma]) -> bool {
        let file = &self.files[place.file];
        let of_window = |window: &&Window| {
            window.file == place.file
                && window.offset == place.offset / WINDOW as u64 * WINDOW as u64
        };
        let registered = self.windows.iter().find(of_window);
        registered.is_none_or(|window| window.registrations == 0)
            && !is_mapped(file, place.offset..place.offset + len as u64, all)
    }

    /// Marks the pages of a range that lies in one window as mapped.
    pub fn mark_used(&mut self, range: &Range<usize>) {
        if let Some(index) = self.by_address.get(&window_of(range.start)) {
            for (word, bit) in page_bits(range) {
                self.windows[*index].used[word] |= bit;
            }
        }
    }

    /// Marks pages of a part of a file as no longer mapped: they were given back.
    pub fn mark_unused(&mut self, id: MappedFileId, bytes: &Range<u64>) {
        let Some(file) = self.files.iter().find(|file| file.id == id) else {
            return;
        };
        let first = file.first_window;
        for start in bytes.clone().step_by(PAGE) {
            let page = start as usize % WINDOW / PAGE;
            let index = first + start as usize / WINDOW;
            self.windows[index].used[page / 64] &= !(1 << (page % 64));
        }
    }

    /// Updates the registration count of the windows behind a part of a file.
    pub fn count_registration(&mut self, id: MappedFileId, bytes: &Range<u64>, is_new: bool) {
        let Some(file) = self.files.iter().find(|file| file.id == id) else {
            return;
        };
        let first = file.first_window + (bytes.start / WINDOW as u64) as usize;
        let last = file.first_window + ((bytes.end.max(1) - 1) / WINDOW as u64) as usize;
        for window in self.windows.iter_mut().take(last + 1).skip(first) {
            window.registrations = if is_new {
                window.registrations + 1
            } else {
                window.registrations.saturating_sub(1)
            };
        }
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
        self.free.sort_unstable_by(|a, b| b.cmp(a));
        let start = self.find_run(wanted.len());
        for (i, number) in wanted.into_iter().enumerate() {
            let index = match start {
                Some(first) => {
                    let index = first + i;
                    self.free.retain(|free| *free != index);
                    index
                }
                None => match self.free.pop() {
                    Some(index) => index,
                    None => return Err(1),
                },
            };
            self.windows[index].address = Some(number);
            self.windows[index].used = [0; WORDS];
            self.by_address.insert(number, index);
        }
        Ok(())
    }

    /// Finds the lowest consecutive free windows in one file, and returns the first of them. The last
    /// file is given back when it is idle, so the others are used before it.
    fn find_run(&self, len: usize) -> Option<usize> {
        let mut run: Range<usize> = 0..0;
        // Sorted from high to low.
        for &index in self.free.iter().rev() {
            let follows = run.end == index
                && !run.is_empty()
                && self.windows[index].file == self.windows[run.start].file;
            run = if follows {
                run.start..index + 1
            } else {
                index..index + 1
            };
            if run.len() >= len {
                return Some(run.start);
            }
        }
        None
    }

    /// Gives up the window of an address, because its pages are used elsewhere: the next
    /// [`Windows::assign_places`] finds another one.
    pub fn abandon_place(&mut self, address: usize) {
        self.by_address.remove(&window_of(address));
    }

    /// Number of windows of the next file, when `missing` are needed, or more than fit in one file.
    pub fn next_file_windows(&self, missing: usize) -> usize {
        missing.max(self.windows.len()).min(WINDOWS_PER_FILE)
    }

    /// Adds the windows of a new file.
    pub fn add_file(&mut self, id: MappedFileId, arena: u32, mapped: MappedFile, len: usize) {
        let (file, first_window) = (self.files.len(), self.windows.len());
        for i in 0..len / WINDOW {
            self.free.push(self.windows.len());
            self.windows.push(Window {
                file,
                offset: (i * WINDOW) as u64,
                address: None,
                used: [0; WORDS],
                registrations: 0,
            });
        }
        self.files.push(WindowFile {
            id,
            arena,
            mapped,
            first_window,
        });
    }

    /// Removes the last file if it has no remapped pages, and it is long or others like it suffice
    /// for the next registration; returns its identity and number.
    pub fn take_idle_file(&mut self) -> Option<(MappedFileId, u32)> {
        let is_idle = |window: &Window| window.registrations == 0 && window.used == [0; WORDS];
        let first = self.files.last()?.first_window;
        let (others, of_file) = self.windows.split_at(first);
        if !of_file.iter().all(is_idle) {
            return None;
        }
        let idle = others.iter().filter(|window| is_idle(window)).count();
        if idle * WINDOW < KEPT_IDLE && of_file.len() * WINDOW <= KEPT_IDLE {
            return None;
        }
        self.free.retain(|index| *index < first);
        self.by_address.retain(|_, index| *index < first);
        self.windows.truncate(first);
        let file = self.files.pop()?;
        Some((file.id, file.arena))
    }

    /// Checks whether it is time to search for unused windows.
    pub fn wants_sweep(&self) -> bool {
        self.windows.len() - self.free.len() >= self.next_sweep.max(FIRST_SWEEP)
    }

    /// Frees the windows without a registration and without a mapping in `all`, the mappings of the
    /// whole process. Their pages stay in the file: the daemon maps whole files for a NIC that reads
    /// payload by DMA, and the NIC would continue to read the old pages if holes were punched and new
    /// ones allocated.
    pub fn sweep_windows(&mut self, all: &[Vma]) {
        for index in 0..self.windows.len() {
            let window = &self.windows[index];
            let file = &self.files[window.file];
            let bytes = window.offset..window.offset + WINDOW as u64;
            let is_idle = window.registrations == 0 && window.address.is_some();
            if !is_idle || is_mapped(file, bytes, all) {
                continue;
            }
            if let Some(number) = self.windows[index].address.take()
                && self.by_address.get(&number) == Some(&index)
            {
                self.by_address.remove(&number);
            }
            self.free.push(index);
        }
        self.next_sweep = (self.windows.len() - self.free.len()) * 2;
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
    use std::os::fd::AsFd;

    use super::*;
    use crate::app_memory::vma::list_vmas;

    fn make_file() -> (MappedFileId, MappedFile) {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let fd = rustix::fs::memfd_create("windows-test", flags).expect("memfd");
        let len = 8 * WINDOW;
        rustix::fs::ftruncate(&fd, len as u64).expect("room");
        let id = MappedFileId::of_file(&fd).expect("fstat");
        (id, MappedFile::map(fd, len).expect("addresses"))
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
        let file = &windows.files[place.file].mapped;
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
        let (id, fd) = make_file();
        rustix::io::pwrite(&fd, &[7; PAGE], 0).expect("room");
        let duplicate = fd.as_fd().try_clone_to_owned().expect("descriptor");
        windows.add_file(id, 1, fd, WINDOW);
        let range = 10 * WINDOW..10 * WINDOW + PAGE;
        windows.assign_places(&range).expect("one is free");
        windows.mark_used(&range);
        windows.sweep_windows(&[]);
        assert_eq!(windows.free.len(), 1);
        let status = rustix::fs::fstat(&duplicate).expect("fstat");
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
        assert_eq!(place_of_run(&mut windows, 10, 1), (0, 0));
        // Four are consecutive in the second file only.
        assert_eq!(place_of_run(&mut windows, 20, 4), (1, 0));
        assert_eq!(place_of_run(&mut windows, 30, 2), (0, 1));
    }

    #[test]
    fn idle_files_are_kept_up_to_a_limit() {
        let mut windows = Windows::default();
        let (first, fd) = make_file();
        windows.add_file(first, 1, fd, KEPT_IDLE);
        let range = 10 * WINDOW..10 * WINDOW + PAGE;
        windows.assign_places(&range).expect("many are free");
        windows.mark_used(&range);
        let (place, _) = windows.place_of(&range).expect("assigned");
        let (second, fd) = make_file();
        windows.add_file(second, 2, fd, 2 * WINDOW);
        assert_eq!(
            windows.take_idle_file(),
            None,
            "less than the limit is idle"
        );
        windows.mark_unused(first, &(place.offset..place.offset + PAGE as u64));
        assert_eq!(windows.take_idle_file(), Some((second, 2)));
        assert_eq!(
            windows.take_idle_file(),
            None,
            "the next registration uses it"
        );
        assert_eq!(windows.assign_places(&range), Ok(()));
    }
}
