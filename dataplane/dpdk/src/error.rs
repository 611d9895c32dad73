//! What can go wrong, in words that name the missing resource and the command
//! that provides it. The daemon prints these texts as they are.

use std::ffi::CStr;

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("DPDK's environment can be initialised only once in a process")]
    AlreadyInitialised,

    #[error(
        "not enough hugepages: {needed_pages} of {page_kb} KiB are needed, {free_pages} are free; \
         reserve them with: echo {suggested} > {path}   (or configure `hugepages = false`)"
    )]
    Hugepages {
        needed_pages: u64,
        free_pages: u64,
        page_kb: u64,
        /// What the counter must become: pages in use by others stay theirs.
        suggested: u64,
        path: String,
    },

    #[error("core {core} cannot be used: this process may run on cores {allowed}")]
    Core { core: usize, allowed: String },

    #[error("DPDK's environment failed to initialise: {reason}{log}")]
    Eal { reason: String, log: String },

    #[error("{what} `{value}` is not usable: {why}")]
    Invalid {
        what: &'static str,
        value: String,
        why: String,
    },

    #[error(
        "mempool `{name}`: {count} buffers of {buffer_bytes} bytes ({total_mib} MiB) could not be \
         allocated ({reason}); reserve more hugepages, raise the memory given to DPDK, or ask for \
         fewer buffers{log}"
    )]
    Mempool {
        name: String,
        count: u32,
        buffer_bytes: usize,
        total_mib: usize,
        reason: String,
        log: String,
    },

    #[error("this thread could not be registered with DPDK ({reason}); at most 128 threads can be")]
    ThreadRegister { reason: String },

    #[error("device `{device}` could not be attached: {reason}{hint}{log}")]
    Device {
        device: String,
        reason: String,
        hint: String,
        log: String,
    },

    #[error("port `{port}`: {what} failed: {reason}{log}")]
    Port {
        port: String,
        what: &'static str,
        errno: i32,
        reason: String,
        log: String,
    },

    #[error("port `{port}`: {queues} queues are still in use; drop them first")]
    QueuesInUse { port: String, queues: usize },

    #[error("external memory at {addr:#x} ({len} bytes) could not be {what}: {reason}{log}")]
    ExternalMemory {
        addr: usize,
        len: usize,
        what: &'static str,
        reason: String,
        log: String,
    },
}

impl Error {
    /// Whether the port's driver has no such function at all: a ring pair has no
    /// address filter to set, for example, and takes every frame.
    pub fn is_unsupported(&self) -> bool {
        matches!(self, Self::Port { errno, .. } if *errno == libc::ENOTSUP)
    }
}

/// The text of a positive error number.
pub(crate) fn errno_text(errno: i32) -> String {
    // SAFETY: rte_strerror returns a NUL-terminated string that stays valid
    // until the next call from this thread; it is copied at once.
    let text = unsafe { CStr::from_ptr(dpdk_sys::rte_strerror(errno)) };
    format!("{} (errno {errno})", text.to_string_lossy())
}

/// DPDK's thread-local error number of the last failed call.
pub(crate) fn rte_errno() -> i32 {
    // SAFETY: reads a thread-local of DPDK.
    unsafe { dpdk_sys::siw_errno() }
}

/// The positive error number of a negative return code, taking the thread-local
/// one when the code is the bare -1 that many functions return.
pub(crate) fn errno_of(rc: i32) -> i32 {
    match (rc, rte_errno()) {
        (-1, errno) if errno != 0 => errno,
        _ => rc.unsigned_abs() as i32,
    }
}

pub(crate) fn failure_reason(rc: i32) -> String {
    if rc == -1 && rte_errno() == 0 {
        return "the driver refused".into();
    }
    errno_text(errno_of(rc))
}
