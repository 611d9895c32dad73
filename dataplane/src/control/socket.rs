//! The control socket in the file system: bound before ports start, so that a daemon that nobody
//! could reach touches no port, and removed at the end.

use std::fs::{File, OpenOptions, Permissions};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use siw_shm::control::ControlSocket;

use crate::config::ControlSocketConfig;
use crate::daemon::StartError;
use crate::host;

/// Clients that may wait to be accepted.
const BACKLOG: i32 = 128;

/// The socket that clients connect to. Its path is removed when this is dropped; who waits to be
/// accepted then is left to the end of the process, since a client may have sent descriptors that
/// take long to close.
pub struct BoundSocket {
    path: PathBuf,
    listener: ManuallyDrop<OwnedFd>,
    /// Held as long as the path is this daemon's.
    #[allow(dead_code, reason = "held for its lock")]
    lock: Flock<File>,
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
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(|error| {
                fail(format!("its folder cannot be made: {error}; {OTHER_PLACE}"))
            })?;
        }
        // Two daemons that find the same stale socket must not remove each other's.
        let lock = lock_path(&path).map_err(fail)?;
        refuse_second_daemon(&path).map_err(fail)?;
        let listener = ControlSocket::listen_at(&path, BACKLOG)
            .map_err(|error| fail(format!("{error}; {OTHER_PLACE}")))?;
        let bound = BoundSocket {
            path: path.clone(),
            listener: ManuallyDrop::new(listener),
            lock,
        };
        if let Some(gid) = group {
            nix::unistd::chown(&path, None, Some(gid))
                .map_err(|error| fail(format!("group {gid}: {error}")))?;
        }
        std::fs::set_permissions(&path, Permissions::from_mode(config.mode.0))
            .map_err(|error| fail(error.to_string()))?;
        Ok(bound)
    }

    /// Where clients find it.
    pub fn path(&self) -> &Path {
        &self.path
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

/// Locks the place of the socket, by a file beside it that stays: whoever removed it would take the
/// lock of the next daemon away.
fn lock_path(path: &Path) -> Result<Flock<File>, String> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(nix::libc::O_NOFOLLOW)
        .open(&name)
        .map_err(|error| format!("{} cannot be made: {error}; {OTHER_PLACE}", name.display()))?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(lock),
        Err((_, Errno::EWOULDBLOCK)) => {
            let holder = ControlSocket::connect_to(path).map_or_else(
                // It does not answer yet, or not any more.
                |_| "another siwd, which is starting or stopping, has it".to_owned(),
                |conn| serves_it(&conn),
            );
            Err(format!("{holder}; {STOP_IT}"))
        }
        Err((_, error)) => Err(format!("{}: {error}; {OTHER_PLACE}", name.display())),
    }
}

const STOP_IT: &str = "stop that one, or give this one another [control] socket";

fn serves_it(conn: &ControlSocket) -> String {
    let pid = conn.peer_credentials().map_or(0, |peer| peer.0);
    format!("another siwd (process {pid}) serves it")
}

/// A socket that somebody answers on belongs to a running daemon; one that nobody answers on
/// was left by one that was killed, and is removed.
fn refuse_second_daemon(path: &Path) -> Result<(), String> {
    match ControlSocket::connect_to(path) {
        // An older one, which locks nothing.
        Ok(conn) => Err(format!("{}; {STOP_IT}", serves_it(&conn))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
            let is_socket = path
                .symlink_metadata()
                .is_ok_and(|found| found.file_type().is_socket());
            if !is_socket {
                return Err(format!(
                    "something that is no socket is there; {OTHER_PLACE}"
                ));
            }
            std::fs::remove_file(path)
                .map_err(|error| format!("a stale socket cannot be removed: {error}"))
        }
        Err(error) => Err(format!("{error}; {OTHER_PLACE}")),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    /// Each round leaves a stale socket behind, as a killed daemon does.
    #[test]
    fn of_daemons_that_start_at_once_one_gets_the_path() {
        let dir = tempfile::tempdir().unwrap();
        let config = ControlSocketConfig {
            socket: dir.path().join("siwd.sock"),
            ..ControlSocketConfig::default()
        };
        for round in 0..300 {
            drop(ControlSocket::listen_at(&config.socket, 1).unwrap());
            let start = Barrier::new(3);
            let bound: Vec<_> = std::thread::scope(|scope| {
                let bind = || {
                    start.wait();
                    BoundSocket::bind(&config)
                };
                let threads = [(); 3].map(|()| scope.spawn(bind));
                threads.map(|thread| thread.join().unwrap()).into()
            });
            let refused = bound.iter().filter_map(|bound| bound.as_ref().err());
            for why in refused.map(ToString::to_string) {
                assert!(why.contains("another siwd"), "{why}");
            }
            let served = bound.iter().filter(|bound| bound.is_ok()).count();
            assert_eq!(served, 1, "in round {round}");
            let client = ControlSocket::connect_to(&config.socket);
            assert!(client.is_ok(), "its socket is gone in round {round}");
            drop(bound);
            assert!(!config.socket.exists());
        }
    }

    #[test]
    fn what_is_no_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("precious");
        std::fs::write(&socket, "text").unwrap();
        let config = ControlSocketConfig {
            socket: socket.clone(),
            ..ControlSocketConfig::default()
        };
        let refused = BoundSocket::bind(&config).err().unwrap().to_string();
        assert!(refused.contains("no socket"), "{refused}");
        assert_eq!(std::fs::read(&socket).unwrap(), b"text");
    }
}
