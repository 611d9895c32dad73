//! State of registered application memory, of a context and of contexts that have ended.

use super::attributes::ReplacedAttributes;
use super::process::ONE_AT_A_TIME;
use super::vma::{MappedFileId, list_vmas};
use super::windows::Windows;
use crate::high_descriptors::dup_high;
use crate::locking::lock_unpoisoned;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Mutex;

/// Connection of a context that has ended.
struct KeptConnection {
    /// Files with pages that are still mapped.
    files: Vec<MappedFileId>,
    _descriptors: [OwnedFd; 2],
}

static KEPT_CONNECTIONS: Mutex<Vec<KeptConnection>> = Mutex::new(Vec::new());

/// Registered application memory of a context.
#[derive(Default)]
pub(crate) struct AppMemory {
    pub(super) state: Mutex<State>,
}

#[derive(Default)]
pub(super) struct State {
    pub windows: Windows,
    pub attributes: ReplacedAttributes,
    /// The daemon's number for the memory of this process, once it was sent.
    pub process: Option<u32>,
    /// Error if the daemon has refused the memory of this process; it is asked only once.
    pub process_refused: Option<(i32, String)>,
}

impl AppMemory {
    /// Keeps the connection of a context that ends, by duplicates of its descriptors, while pages are
    /// mappings of its files: the daemon knows the files as long as their client is connected, and
    /// other contexts may register the pages.
    pub(crate) fn keep_connection(&self, descriptors: [BorrowedFd<'_>; 2]) {
        // A child of fork(2) finds the lock of the list free.
        let _one = lock_unpoisoned(&ONE_AT_A_TIME);
        let mut kept = lock_unpoisoned(&KEPT_CONNECTIONS);
        let mut state = lock_unpoisoned(&self.state);
        state.give_back_idle();
        if kept.is_empty() && state.windows.is_empty() {
            return;
        }
        // Without /proc nothing is remapped.
        let all = list_vmas(&(0..usize::MAX)).unwrap_or_default();
        kept.retain(|one| {
            all.iter()
                .any(|vma| vma.file.is_some_and(|id| one.files.contains(&id)))
        });
        let files = state.windows.mapped_files(&all);
        if !files.is_empty()
            && let [Some(first), Some(second)] = descriptors.map(dup_high)
        {
            kept.push(KeptConnection {
                files,
                _descriptors: [first, second],
            });
        }
    }
}
