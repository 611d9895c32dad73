//! The Unix socket that a vhost-user or virtio-user device creates. A process that was killed leaves its
//! socket behind: then `net_virtio_user` cannot be attached. `net_vhost` replaces any socket, also that of
//! a running process.

use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use nix::sys::socket::{getsockopt, sockopt};

/// What is at the path of a socket.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SocketState {
    /// Nothing.
    Free,
    /// A socket that nobody listens on.
    Stale,
    /// A socket of a running process, with its id, 0 if it is unknown.
    Served(i32),
}

/// Looks at the path of a socket, with a connection that is closed at once.
///
/// # Errors
/// A text: the path is something else, or inaccessible.
pub(crate) fn look_at(path: &Path) -> Result<SocketState, String> {
    let fail = |why: &str| Err(format!("{}: {why}", path.display()));
    match path.symlink_metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(SocketState::Free),
        Err(error) => return fail(&error.to_string()),
        Ok(found) if !found.file_type().is_socket() => {
            return fail("the path exists and is not a socket: name another one");
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Ok(conn) => {
            let peer = getsockopt(&conn, sockopt::PeerCredentials);
            Ok(SocketState::Served(peer.map_or(0, |peer| peer.pid())))
        }
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(SocketState::Stale),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(SocketState::Free),
        // A backlog that is full, or a socket of another type: somebody has it.
        Err(error) if error.kind() != ErrorKind::PermissionDenied => Ok(SocketState::Served(0)),
        Err(error) => fail(&error.to_string()),
    }
}

/// Removes the socket of a process that was killed.
///
/// # Errors
/// A text: a running process has the socket, or it cannot be removed.
pub(crate) fn remove_stale(path: &Path) -> Result<(), String> {
    match look_at(path)? {
        SocketState::Free => Ok(()),
        SocketState::Served(pid) => Err(refuse(path, pid)),
        SocketState::Stale => {
            tracing::warn!(
                "{}: removed the socket of a process that was killed",
                path.display()
            );
            let removed = std::fs::remove_file(path);
            removed.map_err(|error| {
                format!(
                    "{}: a socket that nobody serves cannot be removed: {error}",
                    path.display()
                )
            })
        }
    }
}

/// The reason why a socket that is served cannot be taken.
pub(crate) fn refuse(path: &Path, pid: i32) -> String {
    let holder = match pid {
        0 => "another process".to_owned(),
        pid => format!("process {pid}"),
    };
    format!(
        "{}: {holder} serves this socket: stop it, or name another socket",
        path.display()
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_socket_that_nobody_serves_is_removed_and_all_else_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vhost.sock");
        assert_eq!(look_at(&path), Ok(SocketState::Free));
        let listener = UnixListener::bind(&path).unwrap();
        let own = std::process::id() as i32;
        assert_eq!(look_at(&path), Ok(SocketState::Served(own)));
        let refused = remove_stale(&path).unwrap_err();
        assert!(
            refused.contains(&format!("process {own} serves")),
            "{refused}"
        );
        drop(listener);
        assert_eq!(look_at(&path), Ok(SocketState::Stale));
        remove_stale(&path).unwrap();
        assert!(!path.exists());
        std::fs::write(&path, "text").unwrap();
        assert!(remove_stale(&path).unwrap_err().contains("not a socket"));
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(folder.path().join("other"), &path).unwrap();
        assert!(remove_stale(&path).is_err(), "follows no link");
    }
}
