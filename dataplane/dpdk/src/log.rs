//! Redirects the EAL's log: each line becomes a `tracing` event, and the last warnings of each
//! thread are kept, since DPDK reports the reason of most failures only there.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ffi::c_char;

/// RTE_LOG_ERR and RTE_LOG_WARNING of rte_log.h; lower is more severe.
const ERR: u32 = 4;
const WARNING: u32 = 5;
const NOTICE: u32 = 6;
const INFO: u32 = 7;

const KEPT: usize = 4;

thread_local! {
    static QUOTING: Cell<bool> = const { Cell::new(false) };
    static LAST: RefCell<VecDeque<String>> = const { RefCell::new(VecDeque::new()) };
}

/// Redirects the log; called once, before the EAL starts.
pub(crate) fn capture_eal_log() {
    // SAFETY: the callback is a plain function, valid for the whole process.
    let rc = unsafe { dpdk_sys::siw_log_capture(Some(on_log_line)) };
    if rc != 0 {
        tracing::warn!("the log of DPDK could not be redirected; it goes to stderr");
    }
}

unsafe extern "C" fn on_log_line(level: u32, text: *const c_char, len: usize) {
    // SAFETY: the shim passes a buffer of `len` bytes that is valid for the call.
    let bytes = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), len) };
    for line in String::from_utf8_lossy(bytes).lines() {
        let line = line.trim();
        if line.is_empty() {
            continue;
        }
        match level {
            _ if QUOTING.try_with(Cell::get).unwrap_or(false) => {
                tracing::debug!(target: "dpdk", "{line}");
            }
            0..=ERR => tracing::error!(target: "dpdk", "{line}"),
            WARNING => tracing::warn!(target: "dpdk", "{line}"),
            NOTICE | INFO => tracing::info!(target: "dpdk", "{line}"),
            _ => tracing::debug!(target: "dpdk", "{line}"),
        }
        if level <= WARNING {
            keep_line(line);
        }
    }
}

fn keep_line(line: &str) {
    // Fails only while the thread is ending, when its thread-local storage is destroyed.
    let _ = LAST.try_with(|last| {
        if let Ok(mut last) = last.try_borrow_mut() {
            if last.len() == KEPT {
                last.pop_front();
            }
            last.push_back(line.to_owned());
        }
    });
}

/// While it exists, this thread is in a call of DPDK whose error quotes the log. The lines are events
/// of level debug: drivers log errors about functions that they lack also where the call succeeds.
pub(crate) struct Quote(());

/// Forgets the earlier lines, see [`forget_lines`], and keeps those of the next call for its error.
pub(crate) fn quote_lines() -> Quote {
    forget_lines();
    QUOTING.set(true);
    Quote(())
}

impl Drop for Quote {
    fn drop(&mut self) {
        let _ = QUOTING.try_with(|quoting| quoting.set(false));
    }
}

/// Clears this thread's earlier warnings and error number, so that an error quotes only its own.
pub(crate) fn forget_lines() {
    // SAFETY: writes a thread-local of DPDK.
    unsafe { dpdk_sys::siw_errno_clear() };
    LAST.with_borrow_mut(VecDeque::clear);
}

/// DPDK's warnings on this thread since [`forget_lines`], ready to be appended to an error text.
pub(crate) fn kept_lines() -> String {
    LAST.with_borrow(|last| {
        last.iter()
            .map(|line| format!("\n  DPDK: {line}"))
            .collect()
    })
}
