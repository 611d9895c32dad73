//! The other ends of the control socket: credentials of processes, and the users that they count as.

use std::path::Path;
use std::sync::LazyLock;

use nix::sys::socket::{getsockopt, sockopt};
use nix::sys::stat::fstat;
use nix::sys::statfs::fstatfs;
use nix::unistd::User;
use siw_shm::control::{ControlSocket, RecvError};

/// Subordinate uids by owner (subuid(5)).
pub const SUBORDINATE_UIDS: &str = "/etc/subuid";

/// Process, user and group that connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerCredentials {
    /// Process id; 0 for a process outside the daemon's pid namespace.
    pub pid: u32,
    /// Identity that no other process has.
    pub process: Option<ProcessIdentity>,
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// The process runs as root or the user of the daemon, and not in a container: it could end the daemon.
    pub owns_daemon: bool,
}

impl PeerCredentials {
    /// Credentials that the operating system recorded at the peer's connect (SO_PEERCRED).
    ///
    /// # Errors
    /// The operating system refuses.
    pub fn of(conn: &ControlSocket) -> std::io::Result<PeerCredentials> {
        let credentials = getsockopt(conn, sockopt::PeerCredentials)?;
        let pid = u32::try_from(credentials.pid()).unwrap_or(0);
        let uid = credentials.uid();
        let is_owner = uid == 0 || uid == nix::unistd::geteuid().as_raw();
        Ok(PeerCredentials {
            pid,
            process: ProcessIdentity::of(conn, pid),
            uid,
            gid: credentials.gid(),
            owns_daemon: is_owner && pid != 0 && Namespaces::hold(pid),
        })
    }
}

/// The identity of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessIdentity {
    /// Inode of its pidfd, which no other process of this boot has. Since Linux 6.9.
    Inode(u64),
    /// Process id in the daemon's pid namespace.
    Pid(u32),
}

/// `PID_FS_MAGIC` of `linux/magic.h`. On older kernels all pidfds have the same inode.
const PIDFD_FILES: i64 = 0x5049_4446;

impl ProcessIdentity {
    /// None for a process outside the daemon's pid namespace, on a kernel whose pidfds have no identity:
    /// all those processes have the id 0.
    fn of(conn: &ControlSocket, pid: u32) -> Option<ProcessIdentity> {
        let inode = || {
            let pidfd = getsockopt(conn, sockopt::PeerPidfd).ok()?;
            let files = fstatfs(&pidfd).ok()?.filesystem_type();
            let status = (files.0 == PIDFD_FILES).then(|| fstat(&pidfd));
            Some(ProcessIdentity::Inode(status?.ok()?.st_ino))
        };
        inode().or_else(|| (pid != 0).then_some(ProcessIdentity::Pid(pid)))
    }
}

/// Where a process is in the trees of namespaces, as this process sees it. Other than the namespaces
/// themselves (/proc/PID/ns), it needs no right to trace the process.
#[derive(Debug, PartialEq, Eq)]
struct Namespaces {
    /// Number of nested pid namespaces that the process is in, from this one on.
    pids: usize,
    /// Mapping of its user namespace (user_namespaces(7)).
    uid_map: String,
}

impl Namespaces {
    /// Checks that a process is in the user and pid namespaces of this one, which stay the same.
    fn hold(pid: u32) -> bool {
        static OWN: LazyLock<Option<Namespaces>> = LazyLock::new(|| Namespaces::of("self"));
        OWN.is_some() && Namespaces::of(&pid.to_string()) == *OWN
    }

    /// Looks at a process, by its name in /proc. None if it has ended.
    fn of(process: &str) -> Option<Namespaces> {
        let read = |file| std::fs::read_to_string(format!("/proc/{process}/{file}")).ok();
        Some(Namespaces {
            pids: count_pids(&read("status")?)?,
            uid_map: read("uid_map")?,
        })
    }
}

/// Number of pids of a process, one in each pid namespace (proc_pid_status(5)).
fn count_pids(status: &str) -> Option<usize> {
    let pids = status
        .lines()
        .find_map(|line| line.strip_prefix("NSpid:"))?;
    Some(pids.split_whitespace().count())
}

/// A range of subordinate uids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SubordinateUids {
    first: u32,
    count: u32,
    owner: u32,
}

/// Users that share the limits of one user: its subordinate uids, which it can take on in user
/// namespaces, count as that user. Looked up once at the start.
#[derive(Debug, Clone, Default)]
pub struct SubordinateUsers(Vec<SubordinateUids>);

impl SubordinateUsers {
    /// Reads a file in the format of subuid(5); without the file, no uid is subordinate.
    pub fn read_file(path: &Path) -> SubordinateUsers {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        Self::parse(&text, |name| {
            Some(User::from_name(name).ok()??.uid.as_raw())
        })
    }

    /// Root's ranges are left out: they hold containers of different users.
    fn parse(text: &str, find_uid: impl Fn(&str) -> Option<u32>) -> SubordinateUsers {
        let parse_line = |line: &str| {
            let mut fields = line.trim().split(':');
            let owner = fields.next()?;
            let range = SubordinateUids {
                first: fields.next()?.parse().ok()?,
                count: fields.next()?.parse().ok()?,
                owner: owner.parse().ok().or_else(|| find_uid(owner))?,
            };
            (range.owner != 0 && range.first != 0).then_some(range)
        };
        SubordinateUsers(text.lines().filter_map(parse_line).collect())
    }

    /// The user whose limits hold for a process with this uid.
    pub fn user_of(&self, uid: u32) -> u32 {
        let found = self.0.iter().find(|range| {
            uid.checked_sub(range.first)
                .is_some_and(|place| place < range.count)
        });
        found.map_or(uid, |range| range.owner)
    }
}

/// Packets of a disconnected client that are searched for descriptors.
const LAST_PACKETS: usize = 1024;

/// Returns true if the socket of a departed or refused client has unread descriptors: closing it
/// can then take long. Shuts down the socket's input first, so that nothing more can be sent to it.
pub(in crate::control) fn has_descriptors_waiting(conn: &ControlSocket) -> bool {
    conn.refuse_input();
    for _ in 0..LAST_PACKETS {
        match conn.recv_from_client() {
            Ok(_) | Err(RecvError::Truncated) => {}
            Err(RecvError::WouldBlock | RecvError::Closed) => return false,
            Err(_) => return true,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pids_in_nested_namespaces_are_counted() {
        let status = "Name:\tsiwctl\nNSpid:\t4711\t12\t1\nNSpgid:\t4711\n";
        assert_eq!(count_pids(status), Some(3));
        assert_eq!(count_pids("Name:\tsiwctl\n"), None);
        assert_eq!(
            Namespaces::of("self"),
            Namespaces::of(&std::process::id().to_string())
        );
    }

    #[test]
    fn connections_of_a_process_have_its_identity() {
        let connect = || {
            let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
            let socket = ControlSocket::from(std::os::fd::OwnedFd::from(socket));
            PeerCredentials::of(&socket).unwrap()
        };
        let peers = [connect(), connect()];
        assert_eq!(peers[0], peers[1]);
        assert_eq!(peers[0].pid, std::process::id());
        assert!(peers[0].process.is_some());
        // Without the inode of a pidfd, processes without a number have no identity.
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let socket = ControlSocket::from(std::os::fd::OwnedFd::from(socket));
        match ProcessIdentity::of(&socket, 0) {
            None => {}
            found => assert_eq!(found, peers[0].process),
        }
    }

    #[test]
    fn subordinate_uids_count_as_their_owner_unless_that_is_root() {
        let text = "# comment\nalice:100000:65536\nroot:200000:65536\n1001:300000:10\n\
                    nobody-known:400000:10\nbroken:x:10\n1002:4294967290:100\n";
        let users = SubordinateUsers::parse(text, |name| match name {
            "alice" => Some(1000),
            "root" => Some(0),
            _ => None,
        });
        let user_of = |uid| users.user_of(uid);
        assert_eq!((user_of(100_000), user_of(165_535)), (1000, 1000));
        assert_eq!((user_of(99_999), user_of(165_536)), (99_999, 165_536));
        assert_eq!((user_of(200_000), user_of(300_009)), (200_000, 1001));
        assert_eq!((user_of(300_010), user_of(400_001)), (300_010, 400_001));
        assert_eq!((user_of(0), user_of(u32::MAX)), (0, 1002));
        let none = SubordinateUsers::read_file("/nonexistent".as_ref());
        assert_eq!(none.user_of(100_000), 100_000);
    }
}
