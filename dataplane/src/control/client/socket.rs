//! The control socket in the file system. It is bound before ports start, so that a daemon without
//! a socket touches no port, and removed at the end.

use std::fs::{File, OpenOptions, Permissions};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::unistd::Gid;
use siw_shm::control::ControlSocket;

use super::peers::PeerCredentials;
use crate::config::{ControlSocketConfig, FileMode};
use crate::host;
use crate::start_error::StartError;

/// Backlog of the control socket.
const BACKLOG: i32 = 128;

/// The listening control socket. Dropping it removes its path but leaves the descriptor open until
/// the process exits: waiting clients may have sent descriptors that are slow to close.
pub struct BoundSocket {
    path: PathBuf,
    listener: ManuallyDrop<OwnedFd>,
    /// Held while the path belongs to this daemon.
    #[allow(dead_code, reason = "held for its lock")]
    lock: Flock<File>,
}

impl BoundSocket {
    /// Creates the socket with its owner and permissions.
    ///
    /// # Errors
    /// Another daemon uses the path, the group does not exist, or the path cannot be written.
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
                fail(format!(
                    "cannot create its directory: {error}; {OTHER_PLACE}"
                ))
            })?;
        }
        await_ending_daemon(&path);
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
        bound.set_permissions(group, config.mode).map_err(fail)?;
        Ok(bound)
    }

    /// Sets the group and the mode of the socket.
    ///
    /// # Errors
    /// The operating system refuses.
    pub fn set_permissions(&self, group: Option<Gid>, mode: FileMode) -> Result<(), String> {
        if let Some(gid) = group {
            nix::unistd::chown(&self.path, None, Some(gid)).map_err(|error| match error {
                Errno::EPERM => format!(
                    "group {gid}: {error}; make siwd's user a member (SupplementaryGroups= of its \
                     unit), or set another [control] group"
                ),
                error => format!("group {gid}: {error}"),
            })?;
        }
        let mode = Permissions::from_mode(mode.0);
        std::fs::set_permissions(&self.path, mode).map_err(|error| error.to_string())
    }

    /// Checks that [`BoundSocket::bind`] would succeed now, and leaves the path as it is.
    ///
    /// # Errors
    /// As [`BoundSocket::bind`].
    pub fn check(config: &ControlSocketConfig) -> Result<(), StartError> {
        let path = &config.socket;
        let fail = |reason: String| StartError::Socket {
            path: path.display().to_string(),
            reason,
        };
        if let Some(group) = &config.group {
            host::find_group(group.get_ref()).map_err(fail)?;
        }
        let folder = path.parent().unwrap_or("/".as_ref());
        let here = folder.as_os_str().is_empty();
        host::check_folder(if here { ".".as_ref() } else { folder })
            .map_err(|error| fail(format!("{error}; {OTHER_PLACE}")))?;
        await_ending_daemon(path);
        if lock_name(path).exists() {
            drop(lock_path(path).map_err(fail)?);
        }
        find_stale_socket(path).map(drop).map_err(fail)
    }

    /// Path of the socket.
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
        // Only the daemon that bound the path removes it.
        let _ = std::fs::remove_file(&self.path);
    }
}

const OTHER_PLACE: &str = "set --socket or [control] socket to a path that siwd can write, or, as an \
     ordinary user, XDG_RUNTIME_DIR to a folder of this user";

/// Time that a killed daemon may take until its memory and its descriptors are freed.
const ENDING: Duration = Duration::from_secs(10);

/// Waits while a daemon that was killed, and has not ended yet, has the path.
fn await_ending_daemon(path: &Path) {
    let end = Instant::now() + ENDING;
    while let Ok(conn) = ControlSocket::connect_to(path)
        && is_ending(PeerCredentials::of(&conn).map_or(0, |peer| peer.pid))
        && Instant::now() < end
    {
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns true if a process was killed and its parent has not taken note of it yet (proc_pid_stat(5)).
fn is_ending(pid: u32) -> bool {
    /// Position of the flags after the state.
    const FLAGS: usize = 6;
    /// `PF_EXITING` of the kernel.
    const EXITING: u32 = 4;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name of the program before it may have spaces and brackets.
    let mut fields = stat
        .rsplit_once(')')
        .map_or("", |(_, rest)| rest)
        .split_whitespace();
    let is_dead = fields
        .clone()
        .next()
        .is_some_and(|state| matches!(state, "Z" | "X"));
    let flags = fields
        .nth(FLAGS)
        .and_then(|flags| flags.parse::<u32>().ok());
    is_dead || flags.is_some_and(|flags| flags & EXITING != 0)
}

fn lock_name(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    name.into()
}

/// Locks the path of the socket, with a lock file next to it that is never removed: a removal would
/// break the lock of the next daemon.
fn lock_path(path: &Path) -> Result<Flock<File>, String> {
    let name = lock_name(path);
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(nix::libc::O_NOFOLLOW)
        .open(&name)
        .map_err(|error| format!("cannot create {}: {error}; {OTHER_PLACE}", name.display()))?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(lock),
        Err((_, Errno::EWOULDBLOCK)) => {
            let holder = ControlSocket::connect_to(path).map_or_else(
                // It does not answer yet, or has stopped answering.
                |_| "another siwd, which is starting or stopping, uses it".to_owned(),
                |conn| serves_it(&conn),
            );
            Err(format!("{holder}; {STOP_IT}"))
        }
        Err((_, error)) => Err(format!("{}: {error}; {OTHER_PLACE}", name.display())),
    }
}

const STOP_IT: &str = "stop that one, or set another [control] socket for this one";

fn serves_it(conn: &ControlSocket) -> String {
    let pid = PeerCredentials::of(conn).map_or(0, |peer| peer.pid);
    format!("another siwd (process {pid}) serves it")
}

/// A socket with a listener belongs to a running daemon. One without a listener was left by a
/// killed daemon and is removed.
fn refuse_second_daemon(path: &Path) -> Result<(), String> {
    match find_stale_socket(path)? {
        false => Ok(()),
        true => std::fs::remove_file(path)
            .map_err(|error| format!("a stale socket cannot be removed: {error}")),
    }
}

/// Returns true if a killed daemon has left its socket at this path.
fn find_stale_socket(path: &Path) -> Result<bool, String> {
    match ControlSocket::connect_to(path) {
        // An older daemon, which takes no lock.
        Ok(conn) => Err(format!("{}; {STOP_IT}", serves_it(&conn))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
            let is_socket = path
                .symlink_metadata()
                .is_ok_and(|found| found.file_type().is_socket());
            match is_socket {
                true => Ok(true),
                false => Err(format!(
                    "the path exists and is not a socket; {OTHER_PLACE}"
                )),
            }
        }
        Err(error) => Err(format!("{error}; {OTHER_PLACE}")),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    /// Each round leaves a stale socket, like a killed daemon.
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
    fn a_killed_process_is_ending_until_it_is_gone() {
        let mut child = std::process::Command::new("sleep")
            .arg("600")
            .spawn()
            .unwrap();
        let pid = child.id();
        assert!(!is_ending(pid) && !is_ending(std::process::id()));
        child.kill().unwrap();
        let end = Instant::now() + ENDING;
        while !is_ending(pid) {
            assert!(Instant::now() < end);
        }
        child.wait().unwrap();
        assert!(!is_ending(pid));
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
        assert!(refused.contains("not a socket"), "{refused}");
        assert_eq!(std::fs::read(&socket).unwrap(), b"text");
    }
}
