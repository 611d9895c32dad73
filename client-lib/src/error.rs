//! Errors of all calls, with the errno that the C API returns.

use siw_shm::control::{CallError, ProtoError};
use siw_shm::work_queue::PushError;
use siw_shm::{OutOfBounds, WqeError};
use std::io::ErrorKind;

/// Remedy of a socket that cannot be opened.
fn open_remedy(error: &std::io::Error) -> &'static str {
    match error.kind() {
        ErrorKind::NotFound => {
            "start siwd, or set SIWD_SOCKET to its socket (that of an ordinary user's siwd is \
             $XDG_RUNTIME_DIR/siwd/siwd.sock)"
        }
        ErrorKind::ConnectionRefused => {
            "no siwd serves this socket, an ended one left it: start siwd, or remove the file"
        }
        ErrorKind::PermissionDenied => {
            "set SIWD_SOCKET to a socket that this user may open, or become a member of the socket's \
             group"
        }
        _ if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
            "raise the limit of open files (RLIMIT_NOFILE)"
        }
        _ => "is it running?",
    }
}

/// Error of any call of this crate. `Debug` shows the same text as `Display`, so that an error
/// returned from `main` is readable.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No daemon at the socket, or no permission.
    #[error("cannot reach siwd at {path}: {source}; {remedy}", remedy = open_remedy(source))]
    Open {
        /// Path of the socket.
        path: String,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// The daemon refused a request.
    #[error("siwd: {reason} (errno {errno})")]
    Refused {
        /// Positive errno.
        errno: i32,
        /// Human-readable reason.
        reason: String,
    },
    /// The daemon ended or closed this client.
    #[error("siwd has ended, or closed this client (its asynchronous event has the reason)")]
    DaemonGone,
    /// Protocol mismatch with the daemon.
    #[error("protocol error of siwd: {0}")]
    Proto(#[from] ProtoError),
    /// Any other error of a socket or file descriptor.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// ENOMEM of ibv_post_send(3).
    #[error("the work queue is full")]
    QueueFull,
    /// EINVAL of ibv_post_send(3).
    #[error("work request: {0}")]
    Wqe(#[from] WqeError),
    /// Invalid parameter.
    #[error("{0}")]
    Invalid(&'static str),
    /// An object was passed to a call on an object of another [`crate::Context`].
    #[error("the {0} belongs to another context")]
    OtherContext(&'static str),
    /// Memory of the application that cannot be registered.
    #[error("{reason}")]
    Registration {
        /// Positive errno.
        errno: i32,
        /// Human-readable reason.
        reason: String,
    },
    /// Nothing happened in the given time, or the daemon did not answer
    /// ([`crate::Context::set_call_timeout`]).
    #[error("timed out")]
    Timeout,
    /// The daemon has marked the completion queue as overflowed.
    #[error("completion queue overflow: poll more often or create it larger")]
    CqOverflow,
    /// A connection attempt that failed.
    #[error("connect: {0}")]
    Connect(String),
}

impl Error {
    /// The errno of the C API, positive.
    pub fn errno(&self) -> i32 {
        match self {
            Error::Open { source, .. } => match source.kind() {
                ErrorKind::PermissionDenied => libc::EACCES,
                _ => source.raw_os_error().unwrap_or(libc::EIO),
            },
            Error::Refused { errno, .. } | Error::Registration { errno, .. } => *errno,
            Error::DaemonGone => libc::ENODEV,
            Error::Proto(ProtoError::Version { .. }) => libc::EPROTONOSUPPORT,
            Error::Proto(_) => libc::EPROTO,
            Error::Io(error) => error.raw_os_error().unwrap_or(libc::EIO),
            Error::QueueFull => libc::ENOMEM,
            Error::Wqe(_) | Error::Invalid(_) | Error::OtherContext(_) => libc::EINVAL,
            Error::Timeout => libc::ETIMEDOUT,
            Error::CqOverflow => libc::EOVERFLOW,
            Error::Connect(_) => libc::ECONNREFUSED,
        }
    }
}

impl From<CallError> for Error {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Refused { errno, reason } => Error::Refused { errno, reason },
            CallError::Proto(error) => Error::Proto(error),
            CallError::TimedOut => Error::Timeout,
            CallError::Closed => Error::DaemonGone,
            CallError::Io(error) => Error::Io(error),
        }
    }
}

impl From<PushError> for Error {
    fn from(error: PushError) -> Self {
        match error {
            PushError::Full => Error::QueueFull,
            PushError::Wqe(error) => Error::Wqe(error),
        }
    }
}

impl From<OutOfBounds> for Error {
    fn from(_: OutOfBounds) -> Self {
        Error::Invalid("outside of the memory region")
    }
}

impl From<rustix::io::Errno> for Error {
    fn from(error: rustix::io::Errno) -> Self {
        Error::Io(error.into())
    }
}

impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// Error of a call that takes an object by value: the object comes back. `?` converts it into an
/// [`Error`] and drops the object.
pub struct Failed<T> {
    /// The object, as it was before the call.
    pub object: T,
    /// Reason of the failure.
    pub error: Error,
}

impl<T> std::fmt::Display for Failed<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(&self.error, f)
    }
}

impl<T> std::fmt::Debug for Failed<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(&self.error, f)
    }
}

impl<T> std::error::Error for Failed<T> {}

impl<T> From<Failed<T>> for Error {
    fn from(failed: Failed<T>) -> Error {
        failed.error
    }
}

/// Error of posting a list of work requests: those before `index` were posted.
#[derive(thiserror::Error)]
#[error("work request {index} of the list: {error}")]
pub struct PostError {
    /// Index in the list; the requests before it are posted.
    pub index: usize,
    /// Why it was not posted.
    pub error: Error,
}

impl std::fmt::Debug for PostError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl From<PostError> for Error {
    fn from(posted: PostError) -> Error {
        posted.error
    }
}
