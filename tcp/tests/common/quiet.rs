//! Panics that are wanted print nothing: a log that shows a panic shows a failure. For whoever
//! breaks a property on purpose, or breaks it once more to capture it.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// Whether this thread expects to panic.
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f` on this thread; what it panicked with, if it did, as text. A panic is printed as
/// ever unless `quiet`; those of other threads are printed always.
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
