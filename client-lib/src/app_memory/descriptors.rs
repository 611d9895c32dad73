//! Descriptors of mapped memory of this process, to be sent to the daemon.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard};

use super::vma::{MappedFileId, Vma};
use crate::context::lock_unpoisoned;
use rustix::fs::{Mode, OFlags};

/// Files that private pages were remapped to, of all contexts, including closed ones: the pages
/// stay remapped, and another context can register them through these descriptors.
static REMAPPED_FILES: Mutex<Vec<(MappedFileId, OwnedFd)>> = Mutex::new(Vec::new());

/// The locked list of files.
pub(super) type RemappedFiles = MutexGuard<'static, Vec<(MappedFileId, OwnedFd)>>;

pub(super) fn lock_files() -> RemappedFiles {
    lock_unpoisoned(&REMAPPED_FILES)
}

/// Keeps the descriptor of a file that pages are remapped to.
pub(super) fn keep_file(id: MappedFileId, fd: BorrowedFd<'_>) -> io::Result<()> {
    let fd = fd.try_clone_to_owned()?;
    lock_unpoisoned(&REMAPPED_FILES).push((id, fd));
    Ok(())
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
    let kept = lock_unpoisoned(&REMAPPED_FILES)
        .iter()
        .find(|(of, _)| *of == id)
        .and_then(|(_, fd)| fd.try_clone().ok());
    kept.or_else(|| open_map_file(vma))
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
