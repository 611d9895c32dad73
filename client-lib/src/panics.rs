//! Panics in functions that C programs call.

use crate::locking::Inherited;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs the body of a function with C's calling convention; None if it panicked, or if a lock of
/// `client-lib/src/locking.rs` ended it in a child of fork(2). A panic that leaves
/// such a function aborts the process. The locks of this crate stay usable after one
/// (`client-lib/src/locking.rs`).
#[inline]
pub fn contain_panic<R>(call: &'static str, body: impl FnOnce() -> R) -> Option<R> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(result) => Some(result),
        Err(payload) => {
            if !payload.is::<Inherited>() {
                report_panic(call);
            }
            // Dropping the payload may panic again.
            std::mem::forget(payload);
            None
        }
    }
}

/// Writes a line to standard error, without the lock of the standard library: another thread may have held
/// it when this process was forked.
#[cold]
pub fn print_line(text: std::fmt::Arguments<'_>) {
    // A line that cannot be written has no other place.
    let _ = rustix::io::write(std::io::stderr().as_fd(), format!("{text}\n").as_bytes());
}

/// Names the call; the panic hook has written the message.
#[cold]
fn report_panic(call: &str) {
    print_line(format_args!(
        "siw: {call} failed by an internal error; please report the message above"
    ));
}

#[cfg(test)]
mod tests {
    use super::contain_panic;

    #[test]
    fn a_panic_becomes_a_failure() {
        assert_eq!(contain_panic("call", || 7), Some(7));
        let panicking = || -> i32 { std::panic::resume_unwind(Box::new("panic of a test")) };
        assert_eq!(contain_panic("call", panicking), None);
    }
}
