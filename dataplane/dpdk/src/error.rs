//! Errors whose texts name the missing resource and the command that provides it. The daemon prints
//! these texts unchanged.

use std::ffi::CStr;

/// Result of the functions of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error in words that an operator can act on. `log` is the text that DPDK logged during the
/// call, ready to be appended.
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
        /// Pages needed for the memory.
        needed_pages: u64,
        /// Pages of the smallest size that are free.
        free_pages: u64,
        /// Size of a page in KiB.
        page_kb: u64,
        /// New value for the counter; it leaves pages used by other processes to them.
        suggested: u64,
        /// Path of the counter in sysfs.
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

    /// DPDK looks for processors in sysfs.
    #[error(
        "DPDK does not find core {core}, because {path} is missing: mount /sys \
         (mount -t sysfs sysfs /sys), in a chroot or container too"
    )]
    Sysfs {
        /// The core.
        core: usize,
        /// The file by which DPDK finds the core.
        path: String,
    },

    /// The environment refused its arguments, or lacks memory or permission.
    #[error("DPDK's environment failed to initialise: {reason}{log}")]
    Eal {
        /// The reason, in the words of the operating system or of this crate.
        reason: String,
        /// DPDK's log lines.
        log: String,
    },

    /// An argument is out of range or malformed.
    #[error("{what} `{value}` is not usable: {why}")]
    Invalid {
        /// Name of the argument.
        what: &'static str,
        /// The value.
        value: String,
        /// The values that are accepted.
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
        /// Buffers requested.
        count: u32,
        /// Bytes of one buffer with its mbuf.
        buffer_bytes: usize,
        /// MiB of all buffers together.
        total_mib: usize,
        /// The reason, in the words of the operating system or of this crate.
        reason: String,
        /// DPDK's log lines.
        log: String,
    },

    /// The thread is already registered, or too many threads are.
    #[error("this thread could not be registered with DPDK ({reason}); at most 128 threads can be")]
    ThreadRegister {
        /// The reason, in the words of the operating system or of this crate.
        reason: String,
    },

    /// A limit on the number of external memory regions is reached.
    #[error(
        "no more memory can be mapped for NICs: all {limit} of {what} are in use; let \
         applications use fewer and larger arenas, {remedy}, or set tx_payload = \"copy\", which \
         needs none"
    )]
    TooManyRegions {
        /// The limited resource.
        what: &'static str,
        /// The limit.
        limit: u64,
        /// How to raise the limit.
        remedy: String,
    },

    /// A device could not be attached; `hint` names the requirement most often missing.
    #[error("device `{device}` could not be attached: {reason}{hint}{log}")]
    Device {
        /// The devargs.
        device: String,
        /// The reason, in the words of the operating system or of this crate.
        reason: String,
        /// Requirement most often missing.
        hint: String,
        /// DPDK's log lines.
        log: String,
    },

    /// A call on a port failed.
    #[error("port `{port}`: {what} failed: {reason}{log}")]
    Port {
        /// DPDK's name of the port.
        port: String,
        /// The operation.
        what: &'static str,
        /// The error number.
        errno: i32,
        /// The reason, in the words of the operating system or of this crate.
        reason: String,
        /// DPDK's log lines.
        log: String,
    },

    /// The port cannot be changed while workers hold its queues.
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

    /// Memory outside DPDK could not be registered with it or mapped for a NIC.
    #[error("external memory at {addr:#x} ({len} bytes) could not be {what}: {reason}{log}")]
    ExternalMemory {
        /// Start address.
        addr: usize,
        /// Length in bytes.
        len: usize,
        /// The operation.
        what: &'static str,
        /// The reason, in the words of the operating system or of this crate.
        reason: String,
        /// DPDK's log lines.
        log: String,
    },
}

impl Error {
    /// Returns true if the port's driver does not implement the function: a ring pair, for example,
    /// has no address filter and accepts every frame.
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

/// The positive error number of a negative return code. For the bare -1 that many functions return,
/// it is the thread-local error number.
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
