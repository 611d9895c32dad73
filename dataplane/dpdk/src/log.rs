//! Takes over the EAL's log: each line becomes a `tracing` event, and the last
//! warnings are kept, since DPDK puts the reason of most failures only there.

use std::collections::VecDeque;
use std::ffi::c_char;
use std::sync::Mutex;

/// RTE_LOG_ERR and RTE_LOG_WARNING of rte_log.h; lower is graver.
const ERR: u32 = 4;
const WARNING: u32 = 5;
const NOTICE: u32 = 6;
const INFO: u32 = 7;

const KEPT: usize = 4;

static LAST: Mutex<VecDeque<String>> = Mutex::new(VecDeque::new());

/// Redirects the log; called once, before the EAL starts.
pub(crate) fn capture() {
    // SAFETY: the callback is a plain function that lives for ever.
    let rc = unsafe { dpdk_sys::siw_log_capture(Some(line)) };
    if rc != 0 {
        tracing::warn!("the log of DPDK could not be redirected; it goes to stderr");
    }
}

unsafe extern "C" fn line(level: u32, text: *const c_char, len: usize) {
    // SAFETY: the shim passes a buffer of `len` bytes that is valid for the call.
    let bytes = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), len) };
    for line in String::from_utf8_lossy(bytes).lines() {
        let line = line.trim();
        if line.is_empty() {
            continue;
        }
        match level {
            0..=ERR => tracing::error!(target: "dpdk", "{line}"),
            WARNING => tracing::warn!(target: "dpdk", "{line}"),
            NOTICE | INFO => tracing::info!(target: "dpdk", "{line}"),
            _ => tracing::debug!(target: "dpdk", "{line}"),
        }
        if level <= WARNING
            && let Ok(mut last) = LAST.lock()
        {
            if last.len() == KEPT {
                last.pop_front();
            }
            last.push_back(line.to_owned());
        }
    }
}

/// Forgets earlier warnings, so that an error quotes only its own.
pub(crate) fn forget() {
    if let Ok(mut last) = LAST.lock() {
        last.clear();
    }
}

/// What DPDK said since [`forget`], ready to be appended to an error text.
pub(crate) fn said() -> String {
    match LAST.lock() {
        Ok(last) if !last.is_empty() => {
            let lines: Vec<&str> = last.iter().map(String::as_str).collect();
            format!("\n  DPDK: {}", lines.join("\n  DPDK: "))
        }
        _ => String::new(),
    }
}
