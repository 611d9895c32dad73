//! Handles of the C API: boxed Rust objects.
//!
//! Builds with debug assertions know all live handles, and do not reuse the memory of freed ones: a
//! call with a handle that was destroyed, or that is of another type, fails, and a second destruction
//! ends the program. Other builds trust the caller.

use super::{Error, fail_with, null_pointer};
use std::ffi::c_int;

#[cfg(debug_assertions)]
mod live {
    use crate::Error;
    use crate::locking::ProcessMutex;
    use std::any::TypeId;
    use std::collections::HashMap;
    use std::sync::LazyLock;

    /// Types of the live handles by address. A child of fork(2) checks none: another thread of its
    /// parent may have been changing the table.
    static LIVE: LazyLock<ProcessMutex<HashMap<usize, TypeId>>> =
        LazyLock::new(ProcessMutex::default);

    pub fn insert<T: 'static>(handle: *mut T) {
        if let Ok(mut live) = LIVE.lock() {
            live.insert(handle as usize, TypeId::of::<T>());
        }
    }

    fn check_in<T: 'static>(live: &HashMap<usize, TypeId>, handle: *const T) -> Result<(), Error> {
        match live.get(&(handle as usize)) {
            Some(of) if *of == TypeId::of::<T>() => Ok(()),
            Some(_) => Err(Error::Invalid("the handle is of another type")),
            None => Err(Error::Invalid("the handle was destroyed")),
        }
    }

    pub fn check<T: 'static>(handle: *const T) -> Result<(), Error> {
        LIVE.lock().map_or(Ok(()), |live| check_in(&live, handle))
    }

    /// Removes it under one lock: of two threads that destroy a handle, one gets an error.
    pub fn remove<T: 'static>(handle: *const T) -> Result<(), Error> {
        let Ok(mut live) = LIVE.lock() else {
            return Ok(());
        };
        check_in(&live, handle)?;
        live.remove(&(handle as usize));
        Ok(())
    }
}

/// Checks a handle, in builds with debug assertions.
fn check_live<T: 'static>(_handle: *const T) -> Result<(), Error> {
    #[cfg(debug_assertions)]
    live::check(_handle)?;
    Ok(())
}

/// Makes a handle of an object.
pub(super) fn new_handle<T: 'static>(object: T) -> *mut T {
    let handle = Box::into_raw(Box::new(object));
    #[cfg(debug_assertions)]
    live::insert(handle);
    handle
}

/// Makes a handle of a new object and stores it through an out pointer.
///
/// # Safety
/// NULL or valid for writing.
pub(super) unsafe fn store_boxed<T: 'static>(out: *mut *mut T, value: Result<T, Error>) -> c_int {
    if out.is_null() {
        return fail_with(null_pointer());
    }
    match value {
        Ok(object) => {
            // SAFETY: not NULL, valid by the caller's contract.
            unsafe { out.write(new_handle(object)) };
            0
        }
        Err(error) => fail_with(error),
    }
}

/// Borrows a handle's object.
///
/// # Safety
/// NULL or from [`new_handle`], and not freed during the borrow.
pub(super) unsafe fn borrow_handle<'a, T: 'static>(handle: *const T) -> Result<&'a T, Error> {
    // SAFETY: by the caller's contract.
    unsafe { borrow_optional(handle) }?.ok_or_else(null_pointer)
}

/// As [`borrow_handle`]; NULL is None.
///
/// # Safety
/// As [`borrow_handle`].
pub(super) unsafe fn borrow_optional<'a, T: 'static>(
    handle: *const T,
) -> Result<Option<&'a T>, Error> {
    if handle.is_null() {
        return Ok(None);
    }
    check_live(handle)?;
    // SAFETY: by the caller's contract.
    Ok(unsafe { handle.as_ref() })
}

/// As [`borrow_handle`], for a call that changes the object.
///
/// # Safety
/// As [`borrow_handle`], and not used elsewhere meanwhile.
pub(super) unsafe fn borrow_handle_mut<'a, T: 'static>(handle: *mut T) -> Result<&'a mut T, Error> {
    if handle.is_null() {
        return Err(null_pointer());
    }
    check_live(handle)?;
    // SAFETY: by the caller's contract.
    unsafe { handle.as_mut() }.ok_or_else(null_pointer)
}

/// Ends a handle and returns its object.
///
/// # Safety
/// NULL or from [`new_handle`], and not used afterwards.
pub(super) unsafe fn take_handle<T: 'static>(handle: *mut T) -> Result<T, Error> {
    if handle.is_null() {
        return Err(null_pointer());
    }
    #[cfg(debug_assertions)]
    live::remove(handle)?;
    #[cfg(debug_assertions)]
    // SAFETY: from a box by the caller's contract. The box is leaked, so its address is no other
    // handle's.
    let object = unsafe { handle.read() };
    #[cfg(not(debug_assertions))]
    // SAFETY: by the caller's contract.
    let object = *unsafe { Box::from_raw(handle) };
    Ok(object)
}

/// Frees a handle; NULL is ignored.
///
/// # Safety
/// As [`take_handle`].
pub(super) unsafe fn free_handle<T: 'static>(handle: *mut T) {
    if handle.is_null() {
        return;
    }
    // SAFETY: by the caller's contract.
    match unsafe { take_handle(handle) } {
        Ok(object) => drop(object),
        Err(error) => {
            crate::print_line(format_args!("libsiw: destruction of {handle:p}: {error}"));
            std::process::abort();
        }
    }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    #[test]
    fn destroyed_handles_and_those_of_another_type_are_refused() {
        let handle = new_handle(7u32);
        // SAFETY: a handle; with debug assertions also the wrong uses are checked.
        unsafe {
            assert_eq!(*borrow_handle(handle).unwrap(), 7);
            let other: Result<&u64, _> = borrow_handle(handle.cast());
            assert!(other.unwrap_err().to_string().contains("another type"));
            assert_eq!(take_handle(handle).unwrap(), 7);
            for _ in 0..100 {
                // Its place is not given to another handle.
                free_handle(new_handle(8u32));
                assert!(borrow_handle(handle).is_err());
            }
            assert!(borrow_handle_mut(handle).is_err());
            assert!(take_handle(handle).is_err());
            assert!(borrow_optional(std::ptr::null::<u32>()).unwrap().is_none());
        }
    }

    #[test]
    fn a_second_destruction_ends_the_program() {
        const CHILD: &str = "SIW_TEST_SECOND_DESTRUCTION";
        if std::env::var_os(CHILD).is_some() {
            let handle = new_handle(7u32);
            // SAFETY: the second call is checked, as above.
            unsafe {
                free_handle(handle);
                free_handle(handle);
            }
            return;
        }
        let name = "capi::handles::tests::a_second_destruction_ends_the_program";
        let mut child = Command::new(std::env::current_exe().unwrap());
        let output = child.args([name, "--exact", "--nocapture"]).env(CHILD, "1");
        let output = output.output().unwrap();
        assert_eq!(output.status.signal(), Some(libc::SIGABRT));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("the handle was destroyed"), "{said}");
    }
}
