//! What can go wrong, in words that name the missing resource and the command
//! that provides it. The daemon prints these texts as they are.

use std::ffi::CStr;

/// What a call of this crate returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed, in words that an operator can act on. `log` is what DPDK logged
/// meanwhile, ready to be appended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// [`crate::Eal::init`] was called before in this process.
    #[error("DPDK's environment can be initialised only once in a process")]
    AlreadyInitialised,

    /// Fewer hugepages are free than the configured memory needs.
    #[error(
        "not enough hugepages: {needed_pages} of {page_kb} KiB are needed, {free_pages} are free; \
         reserve them with: echo {suggested} > {path}   (or use normal pages: hugepages = \"never\" in [dpdk])"
    )]
    Hugepages {
        /// Pages that the memory takes.
        needed_pages: u64,
        /// Pages of the smallest size that are free.
        free_pages: u64,
        /// Size of a page in KiB.
        page_kb: u64,
        /// What the counter must become: pages in use by others stay theirs.
        suggested: u64,
        /// The counter in sysfs.
        path: String,
    },

    /// The process may not run on the core.
    #[error("core {core} cannot be used: this process may run on cores {allowed}")]
    Core {
        /// The core.
        core: usize,
        /// The cores that the process may run on.
        allowed: String,
    },

    /// The environment refused its arguments, or lacks memory or permission.
    #[error("DPDK's environment failed to initialise: {reason}{log}")]
    Eal {
        /// Why, in the words of the operating system or of this crate.
        reason: String,
        /// What DPDK logged.
        log: String,
    },

    /// An AF_XDP port cannot be used.
    #[error(transparent)]
    Xdp(#[from] siw_xdp::Error),

    /// An argument is out of range or malformed.
    #[error("{what} `{value}` is not usable: {why}")]
    Invalid {
        /// What it was.
        what: &'static str,
        /// The value.
        value: String,
        /// What would be right.
        why: String,
    },

    /// A pool of buffers could not be allocated.
    #[error(
        "mempool `{name}`: {count} buffers of {buffer_bytes} bytes ({total_mib} MiB) could not be \
         allocated ({reason}); reserve more hugepages, raise the memory given to DPDK, or ask for \
         fewer buffers{log}"
    )]
    Mempool {
        /// The pool's name.
        name: String,
        /// Buffers that were asked for.
        count: u32,
        /// Bytes of one buffer with its mbuf.
        buffer_bytes: usize,
        /// MiB of all of them.
        total_mib: usize,
        /// Why, in the words of the operating system or of this crate.
        reason: String,
        /// What DPDK logged.
        log: String,
    },

    /// The thread is registered already, or there are too many.
    #[error("this thread could not be registered with DPDK ({reason}); at most 128 threads can be")]
    ThreadRegister {
        /// Why, in the words of the operating system or of this crate.
        reason: String,
    },

    /// As many pieces of external memory are known as a limit allows.
    #[error(
        "NICs cannot be given more memory to read: all {limit} of {what} are in use; let \
         applications use fewer and larger arenas, {remedy}, or set tx_payload = \"copy\", which \
         gives them none"
    )]
    TooManyRegions {
        /// What is limited.
        what: &'static str,
        /// How many there are.
        limit: u64,
        /// What raises the limit.
        remedy: String,
    },

    /// A device could not be attached; `hint` says what is most often missing.
    #[error("device `{device}` could not be attached: {reason}{hint}{log}")]
    Device {
        /// The devargs.
        device: String,
        /// Why, in the words of the operating system or of this crate.
        reason: String,
        /// What to look at.
        hint: String,
        /// What DPDK logged.
        log: String,
    },

    /// A call on a port failed.
    #[error("port `{port}`: {what} failed: {reason}{log}")]
    Port {
        /// DPDK's name of the port.
        port: String,
        /// What it was.
        what: &'static str,
        /// The error number.
        errno: i32,
        /// Why, in the words of the operating system or of this crate.
        reason: String,
        /// What DPDK logged.
        log: String,
    },

    /// The port cannot be changed while workers hold queues of it.
    #[error("port `{port}`: {queues} queues are still in use; drop them first")]
    QueuesInUse {
        /// DPDK's name of the port.
        port: String,
        /// Queues in use.
        queues: usize,
    },

    /// The device of the port was removed.
    #[error("port `{port}`: its device was removed")]
    Removed {
        /// DPDK's name of the port.
        port: String,
    },

    /// Memory outside of DPDK could not be made known to it, or to a NIC.
    #[error("external memory at {addr:#x} ({len} bytes) could not be {what}: {reason}{log}")]
    ExternalMemory {
        /// Where it begins.
        addr: usize,
        /// Its bytes.
        len: usize,
        /// What it was.
        what: &'static str,
        /// Why, in the words of the operating system or of this crate.
        reason: String,
        /// What DPDK logged.
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
