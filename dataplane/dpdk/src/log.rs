//! Redirects the EAL's log: each line becomes a `tracing` event, and the last warnings of each
//! thread are kept, since DPDK reports the reason of most failures only there.

use parking_lot::Mutex;
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::ffi::c_char;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// RTE_LOG_ERR and RTE_LOG_WARNING of rte_log.h; lower is more severe.
const ERR: u32 = 4;
const WARNING: u32 = 5;
const INFO: u32 = 7;

const KEPT: usize = 4;
/// Time after which a line is logged again that DPDK has repeated meanwhile: drivers say at each poll of a
/// link that its peer is absent.
const REPETITION: Duration = Duration::from_secs(60);
/// Lines that are remembered.
const REMEMBERED: usize = 64;

/// Lines of the last minute, to log each once.
#[derive(Default)]
struct Repetitions(HashMap<String, Repetition>);

struct Repetition {
    logged: Instant,
    left_out: u64,
}

impl Repetitions {
    /// Returns `None` for a line that was logged within [`REPETITION`], and otherwise the number of times
    /// that it was left out before.
    fn pass(&mut self, line: &str, now: Instant) -> Option<u64> {
        if let Some(known) = self.0.get_mut(line) {
            if now.duration_since(known.logged) < REPETITION {
                known.left_out += 1;
                return None;
            }
            known.logged = now;
            return Some(std::mem::take(&mut known.left_out));
        }
        if self.0.len() >= REMEMBERED {
            self.0
                .retain(|_, known| now.duration_since(known.logged) < REPETITION);
        }
        // With more different lines than that, the limit of the log has to do.
        if self.0.len() < REMEMBERED {
            let (logged, left_out) = (now, 0);
            self.0
                .insert(line.to_owned(), Repetition { logged, left_out });
        }
        Some(0)
    }
}

static REPETITIONS: LazyLock<Mutex<Repetitions>> = LazyLock::new(Mutex::default);

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
        if QUOTING.try_with(Cell::get).unwrap_or(false) || level > INFO {
            tracing::debug!(target: "dpdk", "{line}");
        } else {
            log_line(level, line);
        }
        if level <= WARNING {
            keep_line(line);
        }
    }
}

/// Logs a line, unless it repeats a recent one.
fn log_line(level: u32, line: &str) {
    let passed = {
        let mut lines = REPETITIONS.lock();
        lines.pass(line, Instant::now())
    };
    let Some(repeated) = passed else {
        return tracing::debug!(target: "dpdk", "{line}");
    };
    let repeated = (repeated > 0).then_some(repeated);
    match level {
        0..=ERR => tracing::error!(target: "dpdk", repeated, "{line}"),
        WARNING => tracing::warn!(target: "dpdk", repeated, "{line}"),
        _ => tracing::info!(target: "dpdk", repeated, "{line}"),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_line_is_logged_once_a_minute_with_the_number_left_out() {
        let (mut lines, start) = (Repetitions::default(), Instant::now());
        assert_eq!(lines.pass("port 0 is down", start), Some(0));
        for _ in 0..240 {
            assert_eq!(lines.pass("port 0 is down", start), None);
        }
        assert_eq!(lines.pass("another line", start), Some(0));
        assert_eq!(lines.pass("port 0 is down", start + REPETITION), Some(240));
        assert_eq!(lines.pass("port 0 is down", start + REPETITION), None);
        // Lines that are all different are remembered only for a while.
        for number in 0..1000 {
            assert_eq!(lines.pass(&format!("line {number}"), start), Some(0));
        }
        assert!(lines.0.len() <= REMEMBERED);
    }
}
