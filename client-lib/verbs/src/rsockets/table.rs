//! The rsockets of the process by descriptor.
//!
//! A program can close or replace a descriptor without this library: the C library does so in
//! fclose(3), and system calls do not pass through it at all. Therefore the open file behind each
//! number carries a [`Mark`], which is checked whenever the preloaded library decides what a number
//! is: one with another file is no rsocket any more, and its rsocket is closed. Programs that call
//! rsockets themselves close them by rclose(3), and do without this system call.

use super::socket::Rsocket;
use crate::mark::Mark;
use crate::per_process::PerProcess;
use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

struct Entry {
    descriptor: OwnedFd,
    socket: Arc<Rsocket>,
}

type Entries = Vec<Option<Entry>>;

static TABLE: PerProcess<RwLock<Entries>> = PerProcess::new();

/// Set by the preloaded library.
static CHECKS_MARKS: AtomicBool = AtomicBool::new(false);

/// Enables the checks of marks in look-ups that precede any dispatch.
pub fn enable_checks() {
    if !checks_marks() {
        CHECKS_MARKS.store(true, Ordering::Relaxed);
    }
}

/// Checks whether programs close descriptors as they close those of the kernel.
pub fn checks_marks() -> bool {
    CHECKS_MARKS.load(Ordering::Relaxed)
}

/// Finds the rsocket of a descriptor.
pub fn find(descriptor: c_int) -> Option<Arc<Rsocket>> {
    let index = usize::try_from(descriptor).ok()?;
    let table = TABLE.find()?.read().unwrap_or_else(PoisonError::into_inner);
    Some(table.get(index)?.as_ref()?.socket.clone())
}

/// Finds the rsocket of a number that may belong to another file by now.
pub fn find_checked(descriptor: c_int) -> Option<Arc<Rsocket>> {
    let socket = find(descriptor)?;
    if !checks_marks() || Mark::of(descriptor) == Some(socket.mark) {
        return Some(socket);
    }
    drop_stale(descriptor, &socket);
    end_if_last(socket);
    None
}

/// Tells the user, once, that a descriptor which is no rsocket of this process was one of its parent:
/// the calls of the kernel that follow fail with errors that do not show it.
pub fn report_inherited(descriptor: c_int) {
    static IS_REPORTED: AtomicBool = AtomicBool::new(false);
    let is_inherited = || {
        let table = TABLE.inherited()?.try_read().ok()?;
        let entry = table.get(usize::try_from(descriptor).ok()?)?.as_ref()?;
        (Mark::of(descriptor) == Some(entry.socket.mark)).then_some(())
    };
    if is_inherited().is_some() && !IS_REPORTED.swap(true, Ordering::Relaxed) {
        siw::print_line(format_args!(
            "siw-verbs: descriptor {descriptor} is an rsocket of the parent process, and fails in this child of fork(2): run servers that fork without --rsockets"
        ));
    }
}

/// Removes the entry of a number that belongs to another file now, unless that has happened.
#[cold]
fn drop_stale(descriptor: c_int, socket: &Arc<Rsocket>) {
    let index = usize::try_from(descriptor).unwrap_or(usize::MAX);
    let mut table = TABLE.get().write().unwrap_or_else(PoisonError::into_inner);
    let is_same = |entry: &mut Entry| Arc::ptr_eq(&entry.socket, socket);
    let Some(entry) = table
        .get_mut(index)
        .and_then(|entry| entry.take_if(is_same))
    else {
        return;
    };
    drop(table);
    forget_entry(descriptor, entry);
}

/// Ends the use of a number that the program has closed already: it must not be closed again.
fn forget_entry(descriptor: c_int, entry: Entry) {
    std::mem::forget(entry.descriptor);
    entry.socket.watchers.forget(descriptor);
    end_if_last(entry.socket);
}

/// Ends the stream if no other descriptor, and no call of another thread, uses it.
pub fn end_if_last(socket: Arc<Rsocket>) {
    let Some(socket) = Arc::into_inner(socket) else {
        return;
    };
    if socket.has_events() {
        socket.end_stream();
    } else {
        // The program has closed the descriptors of this library too; their numbers may be those of
        // its files.
        std::mem::forget(socket);
    }
}

/// Returns all rsockets of the process.
pub fn all() -> Vec<Arc<Rsocket>> {
    let table = TABLE.get().read().unwrap_or_else(PoisonError::into_inner);
    let entries = table.iter().flatten();
    entries.map(|entry| entry.socket.clone()).collect()
}

/// Returns a descriptor of an rsocket.
pub fn descriptor_of(socket: &Rsocket) -> Option<RawFd> {
    let table = TABLE.get().read().unwrap_or_else(PoisonError::into_inner);
    let mut entries = table.iter().flatten();
    let entry = entries.find(|entry| std::ptr::eq(&*entry.socket, socket))?;
    Some(entry.descriptor.as_raw_fd())
}

/// Closes the rsockets whose descriptors the program has closed in another way.
pub fn close_stale() {
    let count = {
        let table = TABLE.get().read().unwrap_or_else(PoisonError::into_inner);
        table.len()
    };
    for descriptor in 0..count {
        find_checked(descriptor as c_int);
    }
}

/// Adds a descriptor of an rsocket.
pub fn insert(descriptor: OwnedFd, socket: Arc<Rsocket>) -> RawFd {
    let number = descriptor.as_raw_fd();
    let index = usize::try_from(number).unwrap_or(0);
    socket.mark.set(number);
    let mut table = TABLE.get().write().unwrap_or_else(PoisonError::into_inner);
    if table.len() <= index {
        table.resize_with(index + 1, || None);
    }
    let stale = table[index].replace(Entry { descriptor, socket });
    drop(table);
    // The descriptor of an old entry was closed without this library.
    if let Some(stale) = stale {
        forget_entry(number, stale);
    }
    number
}

/// Removes a descriptor, which is closed when the result is dropped. None if the number belongs to another
/// file now.
pub fn remove(descriptor: c_int) -> Option<(OwnedFd, Arc<Rsocket>)> {
    let socket = find(descriptor)?;
    if Mark::of(descriptor) != Some(socket.mark) {
        drop_stale(descriptor, &socket);
        end_if_last(socket);
        return None;
    }
    drop(socket);
    let mut table = TABLE.get().write().unwrap_or_else(PoisonError::into_inner);
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
