//! Results as C callers get them: a positive errno, -1 or NULL with errno set, and the reason of a
//! failure in a line on standard error if `SIW_VERBS_LOG` is set, since an errno says little.

use siw::Error;
use std::ffi::c_int;
use std::sync::OnceLock;
use std::time::Duration;

/// Sets errno of this thread.
pub fn set_errno(errno: c_int) {
    // SAFETY: the C library gives a valid pointer to this thread's errno.
    unsafe { *libc::__errno_location() = errno };
}

/// Writes why a call failed, if the user wants to know (`SIW_VERBS_LOG=1`, or `siwrun --verbose`).
#[cold]
pub fn log_failure(call: &str, reason: &dyn std::fmt::Display) {
    static WANTED: OnceLock<bool> = OnceLock::new();
    if *WANTED.get_or_init(|| std::env::var_os("SIW_VERBS_LOG").is_some_and(|value| value != "0")) {
        eprintln!("siw-verbs: {call}: {reason}");
    }
}

/// Whether SENDs of peers are to wait for receive work requests (`SIW_RNR=wait`, or `siwrun --rnr
/// wait`), as a sender of InfiniBand makes them by rnr_retry.
pub fn wants_receive_waits() -> bool {
    static WANTED: OnceLock<bool> = OnceLock::new();
    *WANTED.get_or_init(|| std::env::var_os("SIW_RNR").is_some_and(|value| value == "wait"))
}

/// After how long programs asleep in ibv_get_cq_event(3) get an event all the same
/// (`SIW_WAKE_AFTER_MS`, or `siwrun --wake-after MS`): some wait for what a WRITE of their peer brings,
/// and no WRITE raises an event.
pub fn wake_interval() -> Option<Duration> {
    static WANTED: OnceLock<Option<Duration>> = OnceLock::new();
    *WANTED.get_or_init(|| {
        let value = std::env::var("SIW_WAKE_AFTER_MS").ok()?;
        let milliseconds: u32 = value.parse().ok()?;
        (milliseconds > 0).then(|| Duration::from_millis(milliseconds.into()))
    })
}

/// The errno of a result: what `int` functions of libibverbs return, which also set errno.
pub fn errno_of(call: &str, result: Result<(), Error>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(error) => fail_with(call, &error),
    }
}

/// The same of an error alone.
#[cold]
pub fn fail_with(call: &str, error: &Error) -> c_int {
    // A call that does not block, and found nothing yet, has not failed.
    let would_block =
        matches!(error, Error::Io(error) if error.kind() == std::io::ErrorKind::WouldBlock);
    if !would_block {
        log_failure(call, error);
    }
    let errno = error.errno().max(1);
    set_errno(errno);
    errno
}

/// An errno that has no further reason.
#[cold]
pub fn fail_errno(errno: c_int) -> c_int {
    set_errno(errno);
    errno
}

/// A new object for C, or NULL with errno set.
pub fn pointer_of<T>(call: &str, result: Result<Box<T>, Error>) -> *mut T {
    match result {
        Ok(object) => Box::into_raw(object),
        Err(error) => {
            fail_with(call, &error);
            std::ptr::null_mut()
        }
    }
}

/// NULL, with errno set.
#[cold]
pub fn null_with<T>(errno: c_int) -> *mut T {
    set_errno(errno);
    std::ptr::null_mut()
}
