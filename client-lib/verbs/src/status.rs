//! Results for C callers: a positive errno, or -1 or NULL with errno set. If `SIW_VERBS_LOG` is
//! set, the reason of a failure is also written to standard error.

use siw::Error;
use std::cell::Cell;
use std::ffi::{CStr, c_int};
use std::sync::OnceLock;
use std::time::Duration;

/// Sets errno of this thread.
pub fn set_errno(errno: c_int) {
    // SAFETY: the C library gives a valid pointer to this thread's errno.
    unsafe { *libc::__errno_location() = errno };
}

/// Logging of failed calls is enabled (`SIW_VERBS_LOG=1`, or `siwrun --verbose`). Allocates nothing:
/// the first call may be a madvise(2) of an allocator that starts and holds its locks.
#[inline]
pub fn logs_failures() -> bool {
    static WANTED: OnceLock<bool> = OnceLock::new();
    *WANTED.get_or_init(|| {
        // SAFETY: a name that ends with zero; the value ends with zero and is read at once.
        unsafe {
            let value = libc::getenv(c"SIW_VERBS_LOG".as_ptr());
            !value.is_null() && CStr::from_ptr(value) != c"0"
        }
    })
}

/// The call that this thread is executing, for the log.
#[derive(Clone, Copy)]
pub struct CurrentCall {
    name: &'static str,
    /// Its failure was logged with a reason.
    is_explained: bool,
}

thread_local! {
    // Without a destructor: it exists as long as the thread.
    static CURRENT: Cell<CurrentCall> = const {
        Cell::new(CurrentCall { name: "", is_explained: false })
    };
}

/// Notes the function that the program has called. Returns the call that it interrupts: this library
/// calls functions of the C library that preloaded libraries override, and those call this one.
#[inline]
pub fn begin_call(name: &'static str) -> Option<CurrentCall> {
    logs_failures().then(|| {
        CURRENT.replace(CurrentCall {
            name,
            is_explained: false,
        })
    })
}

/// Notes the end of a call.
#[inline]
pub fn end_call(interrupted: Option<CurrentCall>) {
    if let Some(interrupted) = interrupted {
        CURRENT.set(interrupted);
    }
}

/// Logs the reason of a failed call, if enabled.
#[cold]
pub fn log_failure(call: &str, reason: &dyn std::fmt::Display) {
    if logs_failures() {
        siw::print_line(format_args!("siw-verbs: {call}: {reason}"));
        let name = CURRENT.get().name;
        CURRENT.set(CurrentCall {
            name,
            is_explained: true,
        });
    }
}

/// Logs the reason why the current call fails.
#[cold]
pub fn explain(reason: &dyn std::fmt::Display) {
    log_failure(CURRENT.get().name, reason);
}

/// Logs the current call, which fails with `errno`, unless its reason was logged. A call that has only
/// found nothing yet, or no room, has not failed.
#[cold]
fn log_errno(errno: c_int) {
    let is_temporary = matches!(
        errno,
        libc::EAGAIN | libc::EINPROGRESS | libc::EALREADY | libc::EINTR | libc::ENOMEM
    );
    if !is_temporary && logs_failures() && !CURRENT.get().is_explained {
        explain(&std::io::Error::from_raw_os_error(errno));
    }
}

/// Reads the settings, which are the same for the life of the process.
pub fn read_environment() {
    logs_failures();
    wants_receive_waits();
    wake_interval();
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
    log_errno(errno);
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
    log_errno(errno);
    set_errno(errno);
    std::ptr::null_mut()
}
