//! siwd and its programs as an ordinary user, who sets nothing up: the socket is in the user's runtime
//! folder, and every program finds it there.

use crate::common::programs::is_installed;
use crate::common::{Daemon, LOOPBACK, client_program, siwrun, wait};
use std::ffi::OsStr;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

/// An ordinary user with a runtime folder.
struct User {
    id: u32,
    runtime: TempDir,
    /// Copies of the programs and libraries: the user may be unable to reach the build folder.
    programs: TempDir,
}

impl User {
    fn new() -> User {
        let own = nix::unistd::geteuid();
        let id = if own.is_root() { 65_534 } else { own.as_raw() };
        let runtime = tempfile::tempdir().unwrap();
        chown(runtime.path(), Some(id), Some(id)).unwrap();
        let programs = tempfile::tempdir().unwrap();
        std::fs::set_permissions(programs.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let siwd: PathBuf = env!("CARGO_BIN_EXE_siwd").into();
        let libraries =
            ["libsiw_verbs.so", "libsiw_mirror.so"].map(|name| siwrun().with_file_name(name));
        let files = [siwd, siwrun().into(), client_program("siwctl")];
        for file in files.iter().chain(&libraries) {
            let copy = programs.path().join(file.file_name().unwrap());
            std::fs::copy(file, &copy).unwrap();
            std::fs::set_permissions(&copy, PermissionsExt::from_mode(0o755)).unwrap();
        }
        User {
            id,
            runtime,
            programs,
        }
    }

    /// The copy of a program of siwd's.
    fn own(&self, program: &str) -> Command {
        self.command(self.programs.path().join(program))
    }

    fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command
            .current_dir("/")
            .env("XDG_RUNTIME_DIR", self.runtime.path())
            .env_remove("SIWD_SOCKET")
            .stdin(Stdio::null());
        if nix::unistd::geteuid().is_root() {
            command.uid(self.id).gid(self.id);
        }
        command
    }

    /// The folder of the default socket, which another user may have made.
    fn make_folder(&self, owner: u32) -> PathBuf {
        let folder = self.runtime.path().join("siwd");
        std::fs::create_dir(&folder).unwrap();
        chown(&folder, Some(owner), Some(owner)).unwrap();
        folder
    }

    fn config(&self) -> PathBuf {
        let file = self.runtime.path().join("siwd.toml");
        std::fs::write(&file, LOOPBACK).unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).unwrap();
        file
    }

    /// Starts siwd with no more than a configuration file without a socket.
    fn start_daemon(self) -> (User, Daemon) {
        let mut command = self.own("siwd");
        command.arg("--config").arg(self.config());
        let child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut daemon = Daemon::wait_ready(tempfile::tempdir().unwrap(), child);
        daemon.socket = self.runtime.path().join("siwd/siwd.sock");
        (self, daemon)
    }
}

fn text(out: &Output) -> String {
    let both = [&out.stdout[..], &out.stderr].concat();
    String::from_utf8_lossy(&both).into_owned()
}

#[test]
fn programs_find_the_daemon_of_their_user() {
    if !is_installed("ibv_devices", "ibverbs-utils") || !is_installed("rping", "rdmacm-utils") {
        return;
    }
    let user = User::new();
    let (user, daemon) = user.start_daemon();
    assert_eq!(daemon.socket.metadata().unwrap().uid(), user.id);
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.child.id())).unwrap();
    let field = |name| status.lines().find(|line| line.starts_with(name)).unwrap();
    assert!(field("Uid:").contains(&user.id.to_string()), "{status}");
    assert!(field("CapEff:").ends_with("0000000000000000"), "{status}");

    for (program, arguments) in [
        ("siwrun", &["ibv_devices"][..]),
        ("siwctl", &["show", "devices"]),
        ("siwrun", &["ls", "/sys/class/infiniband"]),
    ] {
        let shown = user.own(program).args(arguments).output().unwrap();
        assert!(text(&shown).contains("siw1"), "{shown:?}");
    }

    let rping = |role: &str| {
        let mut command = user.own("siwrun");
        command.args(["rping", role, "-a", "10.77.0.2", "-C", "5", "-v"]);
        command
    };
    let mut server = rping("-s").stdout(Stdio::null()).spawn().unwrap();
    crate::common::programs::await_listeners(&daemon, 1);
    let client = rping("-c").output().unwrap();
    assert!(client.status.success(), "{client:?}");
    assert!(wait(&mut server).success());
    let socket = daemon.socket.clone();
    assert!(daemon.stop().success());
    assert!(!socket.exists());
}

/// Tries to start siwd; returns what it says.
fn refusal(command: &mut Command) -> String {
    let out = command.output().unwrap();
    assert_eq!(out.status.code(), Some(1), "{out:?}");
    text(&out)
}

#[test]
fn a_runtime_folder_that_siwd_cannot_use_is_named_with_the_remedy() {
    let user = User::new();
    let config = user.config();
    let start = || {
        let mut command = user.own("siwd");
        command.arg("--config").arg(&config);
        command
    };
    for said in [
        refusal(start().env_remove("XDG_RUNTIME_DIR")),
        refusal(start().env("XDG_RUNTIME_DIR", "")),
    ] {
        assert!(
            said.contains("/run/siwd/siwd.sock") && said.contains("XDG_RUNTIME_DIR to a folder"),
            "{said}"
        );
    }
    let said = refusal(start().env("XDG_RUNTIME_DIR", "/proc/no-such-folder"));
    assert!(
        said.contains("/proc/no-such-folder/siwd: ")
            && said.contains("XDG_RUNTIME_DIR to a folder"),
        "{said}"
    );
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: only root can make folders of another user");
        return;
    }
    let folder = user.make_folder(0);
    std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o777)).unwrap();
    let said = refusal(&mut start());
    let named = |said: &str| {
        said.contains("another user's") && said.contains("XDG_RUNTIME_DIR to a folder")
    };
    assert!(named(&said), "{said}");
    let checked = start().arg("--check").output().unwrap();
    assert_eq!(checked.status.code(), Some(3), "{checked:?}");
    assert!(named(&text(&checked)), "{checked:?}");
}

#[test]
fn a_socket_that_no_daemon_of_the_user_serves_is_named_with_the_remedy() {
    let user = User::new();
    let socket = user.make_folder(user.id).join("siwd.sock");
    drop(UnixListener::bind(&socket).unwrap());
    let ask = || {
        let out = user.own("siwctl").args(["show", "devices"]).output();
        let out = out.unwrap();
        assert!(!out.status.success(), "{out:?}");
        text(&out)
    };
    if nix::unistd::geteuid().is_root() {
        let said = ask();
        assert!(
            said.contains("belongs to user 0") && said.contains("set SIWD_SOCKET"),
            "{said}"
        );
        let doctor = user.own("siwctl").arg("doctor").output().unwrap();
        assert!(text(&doctor).contains("belongs to user 0"), "{doctor:?}");
        chown(&socket, Some(user.id), Some(user.id)).unwrap();
    }
    // What a killed siwd leaves.
    let said = ask();
    assert!(
        said.contains("no siwd serves this socket") && said.contains("start siwd"),
        "{said}"
    );
    let (_user, daemon) = user.start_daemon();
    daemon.context().query_devices().unwrap();
}
