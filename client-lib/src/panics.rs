//! Panics in functions that C programs call.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs the body of a function with C's calling convention; None if it panicked. A panic that leaves
/// such a function aborts the process. The locks of this crate stay usable after one
/// (`client-lib/src/locking.rs`).
#[inline]
pub fn contain_panic<R>(call: &'static str, body: impl FnOnce() -> R) -> Option<R> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(result) => Some(result),
        Err(payload) => {
            report_panic(call);
            // Dropping the payload may panic again.
            std::mem::forget(payload);
            None
        }
    }
}

/// Names the call; the panic hook has written the message.
#[cold]
fn report_panic(call: &str) {
    eprintln!("siw: {call} failed by an internal error; please report the message above");
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
