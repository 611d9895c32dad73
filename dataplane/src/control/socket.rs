//! The control socket in the file system: bound before ports start, so that a daemon that nobody
//! could reach touches no port, and removed at the end.

use std::fs::Permissions;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use siw_shm::control::ControlSocket;

use crate::config::ControlSocketConfig;
use crate::daemon::StartError;
use crate::host;

/// Clients that may wait to be accepted.
const BACKLOG: i32 = 128;

/// The socket that clients connect to. Its path is removed when this is dropped.
pub struct BoundSocket {
    path: PathBuf,
    listener: OwnedFd,
}

impl BoundSocket {
    /// Makes the socket with its owner and permissions.
    ///
    /// # Errors
    /// Another daemon has it, its group does not exist, or the place cannot be written.
    pub fn bind(config: &ControlSocketConfig) -> Result<BoundSocket, StartError> {
        let path = config.socket.clone();
        let fail = |reason: String| StartError::Socket {
            path: path.display().to_string(),
            reason,
        };
        let group = match &config.group {
            Some(group) => Some(host::find_group(group.get_ref()).map_err(fail)?),
            None => None,
        };
        refuse_second_daemon(&path).map_err(fail)?;
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(|error| {
                fail(format!("its folder cannot be made: {error}; {OTHER_PLACE}"))
            })?;
        }
        let listener = ControlSocket::listen_at(&path, BACKLOG)
            .map_err(|error| fail(format!("{error}; {OTHER_PLACE}")))?;
        let bound = BoundSocket {
            path: path.clone(),
            listener,
        };
        if let Some(gid) = group {
            nix::unistd::chown(&path, None, Some(gid))
                .map_err(|error| fail(format!("group {gid}: {error}")))?;
        }
        std::fs::set_permissions(&path, Permissions::from_mode(config.mode.0))
            .map_err(|error| fail(error.to_string()))?;
        Ok(bound)
    }

    /// The listening socket, non-blocking.
    pub fn listener(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for BoundSocket {
    fn drop(&mut self) {
        // Only the daemon that bound the path takes it away.
        let _ = std::fs::remove_file(&self.path);
    }
}

const OTHER_PLACE: &str = "name a place that siwd may write in [control] socket";

/// A socket that somebody answers on belongs to a running daemon; one that nobody answers on
/// was left by one that was killed, and is removed.
fn refuse_second_daemon(path: &Path) -> Result<(), String> {
    match ControlSocket::connect_to(path) {
        Ok(conn) => {
            let pid = conn.peer_credentials().map_or(0, |peer| peer.0);
            Err(format!(
                "another siwd (process {pid}) serves it; stop that one, or give this one another [control] socket"
            ))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path)
                .map_err(|error| format!("a stale socket cannot be removed: {error}"))
        }
        Err(error) => Err(format!("{error}; {OTHER_PLACE}")),
    }
}
