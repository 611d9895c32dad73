//! The path of the control socket: of a daemon by default, and where a client finds it.

use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Path at which a daemon of root listens by default.
pub const SYSTEM_SOCKET: &str = "/run/siwd/siwd.sock";
/// Environment variable that names the socket for clients.
pub const SOCKET_ENV: &str = "SIWD_SOCKET";
/// Environment variable with the folder of the user's sockets (XDG Base Directory Specification).
const RUNTIME_ENV: &str = "XDG_RUNTIME_DIR";

/// The socket in this user's folder belongs to another user, whose daemon could read and change the
/// memory that a client registers.
#[derive(Debug, thiserror::Error)]
#[error("it belongs to user {owner}")]
pub struct ForeignSocket {
    /// Path of the socket.
    pub path: PathBuf,
    /// Uid of its owner.
    pub owner: u32,
}

/// Path at which a daemon of this process's user listens by default: [`own_socket`], else
/// [`SYSTEM_SOCKET`].
pub fn default_socket() -> PathBuf {
    own_socket().unwrap_or_else(|| SYSTEM_SOCKET.into())
}

/// Path of an ordinary user's socket, `$XDG_RUNTIME_DIR/siwd/siwd.sock`. `None` for root, and if the
/// variable is not set to an absolute path: services of systemd do not have it.
pub fn own_socket() -> Option<PathBuf> {
    let is_root = rustix::process::geteuid().is_root();
    own_socket_in(is_root, std::env::var_os(RUNTIME_ENV))
}

fn own_socket_in(is_root: bool, runtime: Option<OsString>) -> Option<PathBuf> {
    runtime
        .map(PathBuf::from)
        .filter(|folder| !is_root && folder.is_absolute())
        .map(|folder| folder.join("siwd/siwd.sock"))
}

/// The socket of a client, in this order: `explicit`; [`SOCKET_ENV`]; [`own_socket`], if there is a file;
/// [`SYSTEM_SOCKET`].
///
/// # Errors
/// [`ForeignSocket`] for [`own_socket`], because the caller has not named it.
pub fn socket_path(explicit: Option<&Path>) -> Result<PathBuf, ForeignSocket> {
    let named = std::env::var_os(SOCKET_ENV).filter(|value| !value.is_empty());
    match (explicit, named) {
        (Some(path), _) => Ok(path.to_owned()),
        (None, Some(path)) => Ok(path.into()),
        (None, None) => find_socket(own_socket(), rustix::process::geteuid().as_raw()),
    }
}

fn find_socket(own: Option<PathBuf>, user: u32) -> Result<PathBuf, ForeignSocket> {
    let found = own.and_then(|path| {
        let metadata = path.symlink_metadata().ok()?;
        Some((path, metadata.uid()))
    });
    match found {
        None => Ok(SYSTEM_SOCKET.into()),
        Some((path, owner)) if owner == user => Ok(path),
        Some((path, owner)) => Err(ForeignSocket { path, owner }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ordinary_user_has_a_socket_in_the_runtime_folder() {
        let own = |is_root, folder: Option<&str>| own_socket_in(is_root, folder.map(Into::into));
        let path = Path::new("/run/user/7/siwd/siwd.sock");
        assert_eq!(own(false, Some("/run/user/7")).as_deref(), Some(path));
        for (is_root, folder) in [
            (true, Some("/run/user/0")),
            (false, None),
            (false, Some("")),
            (false, Some("relative")),
        ] {
            assert_eq!(own(is_root, folder), None, "{folder:?}");
        }
    }

    #[test]
    fn a_client_finds_its_users_socket_before_the_systems() {
        let path = std::env::temp_dir().join(format!("siwd-own-socket-{}", std::process::id()));
        let user = rustix::process::geteuid().as_raw();
        let find = |user| find_socket(Some(path.clone()), user);
        assert_eq!(find(user).unwrap(), Path::new(SYSTEM_SOCKET));
        std::fs::write(&path, "").unwrap();
        let (own, other) = (find(user), find(user + 1));
        std::fs::remove_file(&path).unwrap();
        assert_eq!(own.unwrap(), path);
        assert_eq!(other.unwrap_err().owner, user);
        assert_eq!(find_socket(None, user).unwrap(), Path::new(SYSTEM_SOCKET));
    }
}
