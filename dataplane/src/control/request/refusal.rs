//! Refusals of requests.

use nix::libc;
use siw_host::ports::ClaimError;
use siw_memory::key_table::KeyTableFull;
use siw_memory::{DeregError, KeyError};
use siw_shm::control::ControlSocket;
use siw_shm::control::codec::UNANSWERED;

/// Refusal of a request: an errno, and a text for the client's log.
#[derive(Debug)]
pub struct Refusal {
    errno: i32,
    reason: String,
}

impl From<ClaimError> for Refusal {
    fn from(error: ClaimError) -> Refusal {
        Refusal::new(error.errno(), error.to_string())
    }
}

impl Refusal {
    /// Creates a refusal with this errno and text.
    pub fn new(errno: i32, reason: impl Into<String>) -> Refusal {
        Refusal {
            errno,
            reason: reason.into(),
        }
    }

    /// Human-readable reason.
    pub(in crate::control) fn reason(&self) -> &str {
        &self.reason
    }

    /// Refusal: shared memory cannot be allocated.
    pub fn no_shared_memory(error: std::io::Error) -> Refusal {
        let errno = error.raw_os_error().unwrap_or(libc::ENOMEM);
        Refusal::new(errno, format!("no shared memory: {error}"))
    }

    /// Refusal: an object is outside of its shared memory.
    pub(in crate::control) fn outside_memory(error: siw_shm::OutOfBounds) -> Refusal {
        Refusal::new(libc::EINVAL, error.to_string())
    }

    /// Refusal: a report does not fit the request that awaits it, which is a bug.
    pub(in crate::control) fn unexpected_report() -> Refusal {
        Refusal::new(libc::EIO, "siwd mistook a report: please report this bug")
    }

    /// Sends the refusal as the reply to a request.
    pub(in crate::control) fn send(&self, conn: &ControlSocket, kind: u16, seq: u32) {
        if seq != UNANSWERED {
            let _ = conn.send_refusal(kind, seq, self.errno, &self.reason);
        }
    }

    /// Returns true if the request may succeed once queue pairs that are being destroyed are freed.
    pub(in crate::control) fn may_be_temporary(&self) -> bool {
        matches!(self.errno, libc::EBUSY | libc::ENOMEM)
    }

    /// Refusal: the client has no such object.
    pub(in crate::control) fn no_such(what: &str, id: u32) -> Refusal {
        Refusal::new(libc::ENOENT, format!("no {what} {id} of this client"))
    }

    /// Refusal: the object cannot be destroyed while others use it.
    pub(in crate::control) fn in_use(what: &str, users: u32) -> Refusal {
        Refusal::new(
            libc::EBUSY,
            format!("{what} has {users} users: destroy them first"),
        )
    }
}

impl From<KeyError> for Refusal {
    fn from(error: KeyError) -> Refusal {
        Refusal::new(libc::EINVAL, error.to_string())
    }
}

impl From<KeyTableFull> for Refusal {
    fn from(error: KeyTableFull) -> Refusal {
        Refusal::new(libc::ENOMEM, error.to_string())
    }
}

impl From<DeregError> for Refusal {
    fn from(error: DeregError) -> Refusal {
        let errno = match error {
            DeregError::Unknown => libc::ENOENT,
            DeregError::Bound(_) => libc::EBUSY,
        };
        Refusal::new(errno, error.to_string())
    }
}
