//! Files of arenas, by which another context of the same process finds their memory.
//!
//! Once the daemon has sealed a file ([`SharedMemory::own_pages`]), a received descriptor of it
//! cannot be mapped for writing. The daemon's own mapping is duplicated instead, for the process that
//! the file was made for: holders of the descriptor in other processes may only read the file.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Weak};

use nix::sys::stat::fstat;
use parking_lot::{Mutex, MutexGuard};
use siw_shm::SharedMemory;

use crate::control::client::peers::PeerCredentials;

/// Device and inode.
pub(in crate::control) type FileId = (u64, u64);

/// An arena by its file.
pub(in crate::control) struct ArenaFile {
    owner: PeerCredentials,
    region: Weak<SharedMemory>,
}

/// Files of all arenas that the daemon made.
#[derive(Clone, Default)]
pub struct ArenaFiles(Arc<Mutex<BTreeMap<FileId, ArenaFile>>>);

/// An entry, removed when dropped, by any thread. It is dropped before the arena: another file may
/// have the same inode afterwards.
pub struct ListedFile {
    files: ArenaFiles,
    id: FileId,
}

fn id_of(fd: BorrowedFd<'_>) -> Option<FileId> {
    let status = fstat(fd).ok()?;
    Some((status.st_dev, status.st_ino))
}

impl ArenaFiles {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<FileId, ArenaFile>> {
        self.0.lock()
    }

    /// Adds an arena of a client.
    pub(in crate::control) fn list(
        &self,
        region: &Arc<SharedMemory>,
        owner: PeerCredentials,
    ) -> Option<ListedFile> {
        let id = id_of(region.memfd()?)?;
        let region = Arc::downgrade(region);
        self.lock().insert(id, ArenaFile { owner, region });
        let files = self.clone();
        Some(ListedFile { files, id })
    }

    /// Finds the arena behind a descriptor that a process has sent.
    pub(in crate::control) fn find(
        &self,
        fd: impl AsFd,
        sender: PeerCredentials,
    ) -> Option<Arc<SharedMemory>> {
        self.find_by_id(id_of(fd.as_fd())?, sender)
    }

    /// Finds an arena that was made for the process.
    pub(in crate::control) fn find_by_id(
        &self,
        id: FileId,
        sender: PeerCredentials,
    ) -> Option<Arc<SharedMemory>> {
        let files = self.lock();
        let found = files.get(&id)?;
        let is_owner = found.owner.process.is_some()
            && (found.owner.process, found.owner.uid) == (sender.process, sender.uid);
        found.region.upgrade().filter(|_| is_owner)
    }
}

impl Drop for ListedFile {
    fn drop(&mut self) {
        self.files.lock().remove(&self.id);
    }
}
