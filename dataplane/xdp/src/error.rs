//! Errors: each names the missing resource and the command that helps.

/// Result of the calls of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why AF_XDP cannot be used on an interface.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No interface has this name.
    #[error("there is no interface `{0}`: see ip link")]
    NoInterface(String),

    /// The name is not a valid name of an interface.
    #[error("`{0}` cannot be the name of an interface: 1 to 15 bytes, see ip link")]
    InvalidName(String),

    /// The interface is down.
    #[error("the interface `{0}` is down: ip link set {0} up")]
    Down(String),

    /// The interface strips VLAN tags from frames.
    #[error(
        "the interface `{0}` strips VLAN tags from received frames before XDP sees them: \
         ethtool -K {0} rxvlan off"
    )]
    StripsVlan(String),

    /// A capability is missing.
    #[error(
        "{what} needs the capabilities CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF: run siwd as root, or \
         grant them with AmbientCapabilities= in its service unit, or with \
         setcap cap_net_raw,cap_net_admin,cap_bpf,cap_ipc_lock+ep on its program"
    )]
    Permission {
        /// The operation that was refused.
        what: &'static str,
    },

    /// The interface has an XDP program already.
    #[error(
        "the interface `{interface}` has an XDP program already{program}: stop the program that attached it, or \
         remove it with ip link set dev {interface} xdp off"
    )]
    ProgramAttached {
        /// The interface.
        interface: String,
        /// The program's number in parentheses, if the kernel reports it.
        program: String,
    },

    /// Another AF_XDP socket has the queue.
    #[error(
        "queue {queue} of the interface `{interface}` has an AF_XDP socket already: stop the other \
         program that uses it"
    )]
    QueueInUse {
        /// The interface.
        interface: String,
        /// Its receive queue.
        queue: u32,
    },

    /// The memory that the process may lock is too small for the packet buffers.
    #[error(
        "the packet buffers ({mib} MiB) cannot be locked for AF_XDP: raise the limit with \
         LimitMEMLOCK=infinity in the service unit or ulimit -l unlimited, or configure fewer buffers"
    )]
    LockedMemory {
        /// MiB that were to be locked.
        mib: usize,
    },

    /// The kernel refused the program.
    #[error("the kernel refuses the XDP program: {reason}\n{log}")]
    Program {
        /// The error of the system call.
        reason: std::io::Error,
        /// End of the verifier's log.
        log: String,
    },

    /// The program has a jump that no instruction can express; a defect of this crate.
    #[error("the XDP program cannot be assembled: {0}")]
    Assembly(&'static str),

    /// Any other system call failed.
    #[error("{what}: {source}")]
    Call {
        /// The operation that failed.
        what: String,
        /// The error of the system call.
        source: std::io::Error,
    },
}

impl Error {
    /// The error of the system call that just failed; [`Error::Permission`] if a permission is
    /// missing.
    pub(crate) fn last_call(what: &'static str) -> Error {
        let source = std::io::Error::last_os_error();
        match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => Error::Permission { what },
            _ => Error::Call {
                what: what.to_owned(),
                source,
            },
        }
    }
}
