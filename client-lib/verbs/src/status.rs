//! Results for C callers: a positive errno, or -1 or NULL with errno set. If `SIW_VERBS_LOG` is
//! set, the reason of a failure is also written to standard error.

use siw::Error;
use std::ffi::c_int;
use std::sync::OnceLock;
use std::time::Duration;

/// Sets errno of this thread.
pub fn set_errno(errno: c_int) {
    // SAFETY: the C library gives a valid pointer to this thread's errno.
    unsafe { *libc::__errno_location() = errno };
}

/// Logs the reason of a failed call, if enabled (`SIW_VERBS_LOG=1`, or `siwrun --verbose`).
#[cold]
pub fn log_failure(call: &str, reason: &dyn std::fmt::Display) {
    static WANTED: OnceLock<bool> = OnceLock::new();
    if *WANTED.get_or_init(|| std::env::var_os("SIW_VERBS_LOG").is_some_and(|value| value != "0")) {
        eprintln!("siw-verbs: {call}: {reason}");
    }
}

/// Checks whether SENDs of peers wait for receive work requests (`SIW_RNR=wait`, or `siwrun --rnr
/// wait`), like those of an InfiniBand sender with rnr_retry.
pub fn wants_receive_waits() -> bool {
    static WANTED: OnceLock<bool> = OnceLock::new();
    *WANTED.get_or_init(|| std::env::var_os("SIW_RNR").is_some_and(|value| value == "wait"))
}

/// Time after which programs asleep in ibv_get_cq_event(3) get an event without a completion
/// (`SIW_WAKE_AFTER_MS`, or `siwrun --wake-after MS`): some wait for data that a WRITE of their
/// peer brings, and a WRITE raises no event.
pub fn wake_interval() -> Option<Duration> {
    static WANTED: OnceLock<Option<Duration>> = OnceLock::new();
    *WANTED.get_or_init(|| {
        let value = std::env::var("SIW_WAKE_AFTER_MS").ok()?;
        let milliseconds: u32 = value.parse().ok()?;
        (milliseconds > 0).then(|| Duration::from_millis(milliseconds.into()))
    })
}

/// Returns the errno of a result, for `int` functions of libibverbs; also sets errno.
pub fn errno_of(call: &str, result: Result<(), Error>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(error) => fail_with(call, &error),
    }
}

/// Returns the errno of an error; also sets errno.
#[cold]
pub fn fail_with(call: &str, error: &Error) -> c_int {
    // A non-blocking call that has found nothing yet has not failed.
    let would_block =
        matches!(error, Error::Io(error) if error.kind() == std::io::ErrorKind::WouldBlock);
    if !would_block {
        log_failure(call, error);
    }
    let errno = error.errno().max(1);
    set_errno(errno);
    errno
}

/// Sets and returns an errno without a further reason.
#[cold]
pub fn fail_errno(errno: c_int) -> c_int {
    set_errno(errno);
    errno
}

/// Returns a new object for C, or NULL with errno set.
pub fn pointer_of<T>(call: &str, result: Result<Box<T>, Error>) -> *mut T {
    match result {
        Ok(object) => Box::into_raw(object),
        Err(error) => {
            fail_with(call, &error);
            std::ptr::null_mut()
        }
    }
}

/// Returns NULL, with errno set.
#[cold]
pub fn null_with<T>(errno: c_int) -> *mut T {
    set_errno(errno);
    std::ptr::null_mut()
}
