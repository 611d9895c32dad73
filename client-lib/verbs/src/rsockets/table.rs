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

/// This is a child of fork(2): the rsockets are its parent's, whose queues it must not touch.
static FORKED: AtomicBool = AtomicBool::new(false);

extern "C" fn on_fork_in_child() {
    FORKED.store(true, Ordering::Relaxed);
}

/// Whether a process can have rsockets: a child of fork(2) cannot.
pub fn is_usable() -> bool {
    !FORKED.load(Ordering::Relaxed)
}

/// The rsocket of a descriptor.
pub fn find(descriptor: c_int) -> Option<Arc<Rsocket>> {
    if !is_usable() {
        return None;
    }
    let table = TABLE.read().unwrap_or_else(PoisonError::into_inner);
    let entry = table.get(usize::try_from(descriptor).ok()?)?.as_ref()?;
    Some(entry.socket.clone())
}

/// The descriptor is an rsocket's.
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

/// From now on the descriptor is the rsocket's.
pub fn insert(descriptor: OwnedFd, socket: Arc<Rsocket>) -> RawFd {
    static WATCH_FORKS: Once = Once::new();
    WATCH_FORKS.call_once(|| {
        // SAFETY: the handler does nothing but store a flag. Without memory it is not called, and a
        // child then does what it must not.
        unsafe { libc::pthread_atfork(None, None, Some(on_fork_in_child)) };
    });
    let number = descriptor.as_raw_fd();
    let index = usize::try_from(number).unwrap_or(0);
    let mut table = TABLE.write().unwrap_or_else(PoisonError::into_inner);
    if table.len() <= index {
        table.resize_with(index + 1, || None);
    }
    // An old entry is one whose descriptor was closed behind the back of this library; the number
    // must not be closed again.
    let stale = table[index].replace(Entry { descriptor, socket });
    drop(table);
    if let Some(stale) = stale {
        std::mem::forget(stale.descriptor);
    }
    number
}

/// The descriptor is nobody's any more, and is closed when the result is dropped.
pub fn remove(descriptor: c_int) -> Option<(OwnedFd, Arc<Rsocket>)> {
    if !is_usable() {
        return None;
    }
    let mut table = TABLE.write().unwrap_or_else(PoisonError::into_inner);
    let entry = table.get_mut(usize::try_from(descriptor).ok()?)?.take()?;
    Some((entry.descriptor, entry.socket))
}

/// The descriptor of an rsocket whose caller keeps it open meanwhile.
pub fn borrow(descriptor: c_int) -> BorrowedFd<'static> {
    // SAFETY: a descriptor that the program uses in this call, as it does with the kernel's.
    unsafe { BorrowedFd::borrow_raw(descriptor) }
}

/// A further descriptor of an rsocket, which dup(2) made.
///
/// # Safety
/// `number` is a descriptor that nobody else owns.
pub unsafe fn insert_duplicate(number: c_int, socket: Arc<Rsocket>) {
    // SAFETY: as the caller promised.
    insert(unsafe { OwnedFd::from_raw_fd(number) }, socket);
}
