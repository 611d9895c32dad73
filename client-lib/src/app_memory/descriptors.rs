//! Descriptors of mapped memory of this process, to be sent to the daemon.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use super::vma::{MappedFileId, Vma};
use crate::locking::lock_unpoisoned;
use rustix::fs::{Mode, OFlags};
use siw_shm::shared_memory::PAGE;

/// A file that private pages were remapped to.
pub(super) struct RemappedFile {
    pub id: MappedFileId,
    /// Registrations of each page, of all contexts.
    users: Vec<u32>,
}

/// Files that private pages were remapped to, of all contexts, including closed ones: pages stay
/// remapped while any region has them, and another context can register them too.
static REMAPPED_FILES: Mutex<Vec<RemappedFile>> = Mutex::new(Vec::new());

/// Maximum number of [`REMAPPED_FILES`] that [`is_remapped_file`] finds.
const MAX_KNOWN_FILES: usize = 4096;
/// Inodes of [`REMAPPED_FILES`], which no lock protects.
static KNOWN_INODES: [AtomicU64; MAX_KNOWN_FILES] = [const { AtomicU64::new(0) }; MAX_KNOWN_FILES];
/// The device of all files made by memfd_create(2).
static KNOWN_DEVICE: AtomicU64 = AtomicU64::new(0);
/// Number of places of [`KNOWN_INODES`] ever used.
static KNOWN_LEN: AtomicUsize = AtomicUsize::new(0);

/// Checks whether pages were remapped to a file, as [`is_remapped`] does, without a lock.
pub(super) fn is_remapped_file(id: MappedFileId) -> bool {
    let (device, inode) = id.to_numbers();
    let known = &KNOWN_INODES[..KNOWN_LEN.load(Ordering::Acquire)];
    device == KNOWN_DEVICE.load(Ordering::Acquire)
        && known
            .iter()
            .any(|known| known.load(Ordering::Acquire) == inode)
}

/// The locked list of files.
pub(super) type RemappedFiles = MutexGuard<'static, Vec<RemappedFile>>;

pub(super) fn lock_files() -> RemappedFiles {
    lock_unpoisoned(&REMAPPED_FILES)
}

/// Lists a file of `len` bytes that pages are remapped to.
pub(super) fn list_file(id: MappedFileId, len: usize) {
    let file = RemappedFile {
        id,
        users: vec![0; len / PAGE],
    };
    let mut files = lock_unpoisoned(&REMAPPED_FILES);
    let (device, inode) = id.to_numbers();
    KNOWN_DEVICE.store(device, Ordering::Release);
    if let Some(place) = KNOWN_INODES
        .iter()
        .position(|known| known.load(Ordering::Relaxed) == 0)
    {
        KNOWN_INODES[place].store(inode, Ordering::Release);
        KNOWN_LEN.fetch_max(place + 1, Ordering::Release);
    }
    files.push(file);
}

/// Forgets a file without remapped pages.
pub(super) fn drop_file(id: MappedFileId) {
    let mut files = lock_unpoisoned(&REMAPPED_FILES);
    files.retain(|file| file.id != id);
    let (_, inode) = id.to_numbers();
    let known = KNOWN_INODES
        .iter()
        .find(|known| known.load(Ordering::Relaxed) == inode);
    if let Some(known) = known {
        known.store(0, Ordering::Release);
    }
}

/// Checks whether pages were remapped to a file.
pub(super) fn is_remapped(id: MappedFileId) -> bool {
    let files = lock_unpoisoned(&REMAPPED_FILES);
    files.iter().any(|file| file.id == id)
}

impl RemappedFile {
    fn pages_of(&self, bytes: &Range<u64>) -> Range<usize> {
        let end = (bytes.end as usize).div_ceil(PAGE).min(self.users.len());
        (bytes.start as usize / PAGE).min(end)..end
    }
}

/// Adds a registration of a part of a file.
pub(super) fn add_user(id: MappedFileId, bytes: &Range<u64>) {
    let mut files = lock_unpoisoned(&REMAPPED_FILES);
    if let Some(file) = files.iter_mut().find(|file| file.id == id) {
        for page in file.pages_of(bytes) {
            file.users[page] += 1;
        }
    }
}

/// Removes a registration of a part of a file; returns the runs of whole pages without any.
pub(super) fn remove_user(id: MappedFileId, bytes: &Range<u64>) -> Vec<Range<u64>> {
    let mut files = lock_unpoisoned(&REMAPPED_FILES);
    if let Some(file) = files.iter_mut().find(|file| file.id == id) {
        for page in file.pages_of(bytes) {
            file.users[page] = file.users[page].saturating_sub(1);
        }
    }
    unused_pages(&files, id, bytes)
}

/// The runs of whole pages of a part of a file that no region has.
pub(super) fn list_unused(id: MappedFileId, bytes: &Range<u64>) -> Vec<Range<u64>> {
    unused_pages(&lock_unpoisoned(&REMAPPED_FILES), id, bytes)
}

fn unused_pages(files: &[RemappedFile], id: MappedFileId, bytes: &Range<u64>) -> Vec<Range<u64>> {
    let mut unused: Vec<Range<u64>> = Vec::new();
    let Some(file) = files.iter().find(|file| file.id == id) else {
        return unused;
    };
    for page in file.pages_of(bytes) {
        if file.users[page] > 0 {
            continue;
        }
        let start = (page * PAGE) as u64;
        match unused.last_mut() {
            Some(last) if last.end == start => last.end += PAGE as u64,
            _ => unused.push(start..start + PAGE as u64),
        }
    }
    unused
}

/// Opens this process's memory.
pub(super) fn open_process_memory() -> io::Result<OwnedFd> {
    let file = File::options()
        .read(true)
        .write(true)
        .open("/proc/self/mem")?;
    Ok(file.into())
}

/// Opens the mapped file, if it is in memory: the daemon maps no other files.
pub(super) fn open_mapped_file(vma: &Vma) -> Option<OwnedFd> {
    let id = vma.file?;
    open_map_file(vma)
        .or_else(|| open_path(vma).filter(|fd| is_file(fd, id)))
        .or_else(|| find_open_file(vma, id))
        .filter(|fd| is_file(fd, id) && siw_shm::SharedMemory::is_memory_file(fd.as_fd()))
}

fn is_file(fd: &OwnedFd, id: MappedFileId) -> bool {
    MappedFileId::of_file(fd).is_ok_and(|found| found == id)
}

fn flags_of(vma: &Vma) -> OFlags {
    let access = if vma.writable {
        OFlags::RDWR
    } else {
        OFlags::RDONLY
    };
    access | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY
}

/// Opens the file through the mapping itself; for root only (proc_pid_map_files(5)).
fn open_map_file(vma: &Vma) -> Option<OwnedFd> {
    let (start, end) = (vma.range.start, vma.range.end);
    let path = format!("/proc/self/map_files/{start:x}-{end:x}");
    rustix::fs::open(path, flags_of(vma), Mode::empty()).ok()
}

/// Opens the file by its name, if it still has one.
fn open_path(vma: &Vma) -> Option<OwnedFd> {
    let has_name = vma.name.starts_with('/') && !vma.name.ends_with(" (deleted)");
    let path = has_name.then_some(&vma.name)?;
    rustix::fs::open(path, flags_of(vma), Mode::empty()).ok()
}

/// Looks for the file among the open descriptors of the process.
fn find_open_file(vma: &Vma, id: MappedFileId) -> Option<OwnedFd> {
    let entries = std::fs::read_dir("/proc/self/fd").ok()?;
    for entry in entries.flatten() {
        let is_same = rustix::fs::stat(entry.path())
            .is_ok_and(|status| MappedFileId::from_status(&status) == id);
        if !is_same {
            continue;
        }
        // Reopened, because the application's own descriptor may be read-only.
        if let Ok(fd) = rustix::fs::open(entry.path(), flags_of(vma), Mode::empty()) {
            return Some(fd);
        }
    }
    None
}
