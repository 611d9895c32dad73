//! The rsockets of the process by descriptor.

use super::socket::Rsocket;
use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once, PoisonError, RwLock};

struct Entry {
    descriptor: OwnedFd,
    socket: Arc<Rsocket>,
}

static TABLE: RwLock<Vec<Option<Entry>>> = RwLock::new(Vec::new());

/// Set in a child of fork(2): the rsockets belong to its parent, whose queues it must not access.
static FORKED: AtomicBool = AtomicBool::new(false);

extern "C" fn on_fork_in_child() {
    FORKED.store(true, Ordering::Relaxed);
}

/// Checks that the process may use rsockets: a child of fork(2) may not.
pub fn is_usable() -> bool {
    !FORKED.load(Ordering::Relaxed)
}

/// Finds the rsocket of a descriptor.
pub fn find(descriptor: c_int) -> Option<Arc<Rsocket>> {
    if !is_usable() {
        return None;
    }
    let table = TABLE.read().unwrap_or_else(PoisonError::into_inner);
    let entry = table.get(usize::try_from(descriptor).ok()?)?.as_ref()?;
    Some(entry.socket.clone())
}

/// Checks whether the descriptor is an rsocket.
pub fn contains(descriptor: c_int) -> bool {
    let Ok(index) = usize::try_from(descriptor) else {
        return false;
    };
    if !is_usable() {
        return false;
    }
    let table = TABLE.read().unwrap_or_else(PoisonError::into_inner);
    table.get(index).is_some_and(Option::is_some)
}

/// Adds a descriptor of an rsocket.
pub fn insert(descriptor: OwnedFd, socket: Arc<Rsocket>) -> RawFd {
    static WATCH_FORKS: Once = Once::new();
    WATCH_FORKS.call_once(|| {
        // SAFETY: the handler only stores a flag. If registering it fails for lack of memory, a
        // child can access its parent's rsockets.
        unsafe { libc::pthread_atfork(None, None, Some(on_fork_in_child)) };
    });
    let number = descriptor.as_raw_fd();
    let index = usize::try_from(number).unwrap_or(0);
    let mut table = TABLE.write().unwrap_or_else(PoisonError::into_inner);
    if table.len() <= index {
        table.resize_with(index + 1, || None);
    }
    // The descriptor of an old entry was closed without this library; its number must not be closed
    // again.
    let stale = table[index].replace(Entry { descriptor, socket });
    drop(table);
    if let Some(stale) = stale {
        std::mem::forget(stale.descriptor);
    }
    number
}

/// Removes a descriptor, which is closed when the result is dropped.
pub fn remove(descriptor: c_int) -> Option<(OwnedFd, Arc<Rsocket>)> {
    if !is_usable() {
        return None;
    }
    let mut table = TABLE.write().unwrap_or_else(PoisonError::into_inner);
    let entry = table.get_mut(usize::try_from(descriptor).ok()?)?.take()?;
    Some((entry.descriptor, entry.socket))
}

/// Borrows the descriptor of an rsocket; the caller keeps it open meanwhile.
pub fn borrow(descriptor: c_int) -> BorrowedFd<'static> {
    // SAFETY: a descriptor that the program uses in this call, as with one of the kernel.
    unsafe { BorrowedFd::borrow_raw(descriptor) }
}

/// Adds another descriptor of an rsocket, made by dup(2).
///
/// # Safety
/// `number` is a descriptor without another owner.
pub unsafe fn insert_duplicate(number: c_int, socket: Arc<Rsocket>) {
    // SAFETY: as the caller promised.
    insert(unsafe { OwnedFd::from_raw_fd(number) }, socket);
}
