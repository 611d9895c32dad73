//! Silences expected panics, so that a panic in a log means a failure. For tests that break a property
//! on purpose, or break it again to capture it.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// This thread expects to panic.
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs `apply` on this thread and returns the panic message, if it panics. The panic is printed as
/// usual unless `quiet`; panics of other threads are always printed.
pub fn caught<T>(quiet: bool, apply: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let printing = take_hook();
        set_hook(Box::new(move |info| {
            if !QUIET.get() {
                printing(info);
            }
        }));
    });
    let before = QUIET.replace(quiet);
    let result = catch_unwind(AssertUnwindSafe(apply));
    QUIET.set(before);
    result.map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        text.unwrap_or_default()
    })
}
