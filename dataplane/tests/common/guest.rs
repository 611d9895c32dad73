//! The lab's guests: Linux siw under QEMU on a tap (deploy/lab/linux-siw/guest), and a machine with
//! PCI NICs for siwd (deploy/lab/pci/guest). A guest ends with the test in any case: the script
//! watches a pipe that the test holds.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::net::{Netns, lacks_network, missing_program};

/// Time limit for the guest. It is emulated on a machine that runs other tests too, so only a hang
/// exceeds this.
pub const GUEST_PATIENCE: Duration = Duration::from_secs(180);

fn lab(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../deploy/lab")
        .join(file)
}

/// Reason why this machine cannot run the guest; `None` if it can.
pub fn lacks_guest() -> Option<String> {
    lacks_network().or_else(lacks_emulator)
}

/// The suite of Debian of a guest with a newer kernel than the one that most tests have.
pub const NEWER_SUITE: &str = "trixie";

/// Reason why this machine cannot run the guest of [`NEWER_SUITE`].
pub fn lacks_newer_guest() -> Option<String> {
    lacks_network()
        .or_else(lacks_programs)
        .or_else(|| lacks_build(&["--suite", NEWER_SUITE]))
}

/// Reason why this machine cannot run a guest without a tap.
pub fn lacks_emulator() -> Option<String> {
    lacks_programs().or_else(|| lacks_build(&[]))
}

fn lacks_programs() -> Option<String> {
    missing_program("qemu-system-x86_64").or_else(|| missing_program("python3"))
}

fn lacks_build(of: &[&str]) -> Option<String> {
    let mut build = Command::new(lab("linux-siw/build"));
    let built = build.args(of).arg("--check").status().unwrap();
    (!built.success()).then(|| {
        format!(
            "the Linux siw guest is not built, or not from these files (deploy/lab/linux-siw/build {})",
            of.join(" ")
        )
    })
}

pub struct Guest {
    script: Child,
    control: PathBuf,
    dir: TempDir,
}

/// Result of a command in the guest.
#[derive(Debug)]
pub struct Done {
    /// `None` if it was killed after its time limit.
    pub status: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Guest {
    /// Makes the tap lab0 in the namespace, wide enough for all MTUs, and boots the guest on it.
    pub fn boot(ns: &Netns, args: &[&str]) -> Guest {
        let script = lab("linux-siw/tap");
        ns.command(script.to_str().unwrap(), "up lab0 --mtu 9000");
        ns.run(|| Guest::start_script(lab("linux-siw/guest"), &["--tap", "lab0"], args))
    }

    /// Boots a guest with PCI NICs; `args` are those of deploy/lab/pci/guest.
    pub fn boot_pci(args: &[&str]) -> Guest {
        Guest::start_script(lab("pci/guest"), &[], args)
    }

    /// Sends QEMU a QMP command such as `set_link`; the guest was booted with `--qmp` and this
    /// path.
    pub fn tell_emulator(qmp: &Path, command: &str, arguments: &serde_json::Value) {
        let socket = UnixStream::connect(qmp).unwrap();
        socket.set_read_timeout(Some(GUEST_PATIENCE)).unwrap();
        let mut lines = BufReader::new(&socket).lines();
        lines.next().unwrap().unwrap();
        for request in [
            serde_json::json!({ "execute": "qmp_capabilities" }),
            serde_json::json!({ "execute": command, "arguments": arguments }),
        ] {
            (&socket).write_all(request.to_string().as_bytes()).unwrap();
            // Events may precede the answer.
            let answer = lines
                .by_ref()
                .map(|line| serde_json::from_str::<serde_json::Value>(&line.unwrap()).unwrap())
                .find(|answer| answer.get("event").is_none())
                .unwrap();
            assert!(answer.get("return").is_some(), "{command}: {answer}");
        }
    }

    fn start_script(path: PathBuf, first: &[&str], args: &[&str]) -> Guest {
        let dir = tempfile::tempdir().unwrap();
        let control = dir.path().join("control");
        let mut script = Command::new(path)
            .args(first)
            .args(["--until-eof", "--boot-timeout", "180"])
            .arg("--control")
            .arg(&control)
            .arg("--pid-file")
            .arg(dir.path().join("qemu.pid"))
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let stdout = script.stdout.take().unwrap();
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            let _ = BufReader::new(stdout).read_line(&mut line);
            let _ = tell.send(line);
        });
        let guest = Guest {
            script,
            control,
            dir,
        };
        let line = told.recv_timeout(GUEST_PATIENCE).unwrap_or_default();
        assert_eq!(line, "READY\n", "the guest did not boot");
        guest
    }

    /// A shell command of this machine that runs `command`, which has no single quotes, in the guest.
    pub fn shell_command(&self, command: &str) -> String {
        let script = lab("linux-siw/guest");
        let (script, control) = (script.display(), self.control.display());
        format!("{script} exec --control {control} '{command}'")
    }

    /// Starts a shell command in the guest.
    pub fn start(&self, command: &str) -> Running {
        let mut socket = UnixStream::connect(&self.control).unwrap();
        socket.write_all(format!("{command}\n").as_bytes()).unwrap();
        let writer = socket.try_clone().unwrap();
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            let _ = tell.send(follow(socket));
        });
        Running {
            command: command.into(),
            writer,
            told,
        }
    }

    /// Runs a shell command that must succeed. Returns its standard output.
    pub fn run(&self, command: &str) -> String {
        let done = self.start(command).wait(GUEST_PATIENCE);
        assert_eq!(done.status, Some(0), "{command}: {done:?}");
        done.out
    }

    /// A counter of the kernel, by its table and name in `/proc/net/snmp` or `/proc/net/netstat`.
    pub fn counter(&self, table: &str, name: &str) -> u64 {
        let text = self.run(&format!(
            "cat /proc/net/snmp /proc/net/netstat | grep '^{table}: '"
        ));
        let (names, values) = text.split_once('\n').unwrap();
        let at = names.split(' ').position(|n| n == name).unwrap();
        values.split(' ').nth(at).unwrap().trim().parse().unwrap()
    }

    /// Kills the guest like a power failure: no FIN, no RST.
    pub fn kill(&mut self) {
        let pid = std::fs::read_to_string(self.dir.path().join("qemu.pid")).unwrap();
        let pid = nix::unistd::Pid::from_raw(pid.trim().parse().unwrap());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        drop(self.script.stdin.take());
        let end = Instant::now() + Duration::from_secs(10);
        while self.script.try_wait().ok().flatten().is_none() {
            if Instant::now() > end {
                // QEMU dies with the script.
                let _ = self.script.kill();
                let _ = self.script.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A command that runs in the guest.
pub struct Running {
    command: String,
    writer: UnixStream,
    told: mpsc::Receiver<Option<Done>>,
}

impl Running {
    /// Waits for its end; kills it with its session after `time`.
    pub fn wait(self, time: Duration) -> Done {
        let done = match self.told.recv_timeout(time) {
            Err(mpsc::RecvTimeoutError::Timeout) => return self.kill(),
            Ok(done) => done,
            Err(error) => panic!("{}: {error}", self.command),
        };
        done.unwrap_or_else(|| panic!("{}: the guest is gone", self.command))
    }

    /// Ends it with SIGKILL; returns the output until then.
    pub fn kill(self) -> Done {
        let _ = self.writer.shutdown(Shutdown::Write);
        match self.told.recv_timeout(GUEST_PATIENCE) {
            Ok(Some(done)) => done,
            _ => panic!("{}: the guest is gone", self.command),
        }
    }
}

/// Reads records `out N` and `err N` with their bytes, until `exit N` or `killed`.
fn follow(socket: UnixStream) -> Option<Done> {
    let mut socket = BufReader::new(socket);
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let status = loop {
        let mut line = String::new();
        socket.read_line(&mut line).ok().filter(|n| *n > 0)?;
        let (word, rest) = line
            .trim_end()
            .split_once(' ')
            .unwrap_or((line.trim_end(), ""));
        let into = match word {
            "out" => &mut out,
            "err" => &mut err,
            "exit" => break Some(rest.parse().ok()?),
            "killed" => break None,
            _ => return None,
        };
        let at = into.len();
        into.resize(at + rest.parse::<usize>().ok()?, 0);
        socket.read_exact(&mut into[at..]).ok()?;
    };
    Some(Done {
        status,
        out: String::from_utf8_lossy(&out).into_owned(),
        err: String::from_utf8_lossy(&err).into_owned(),
    })
}

/// The folder of a capture, kept when the test fails: failures in a guest are hard to reproduce.
pub struct Evidence(pub TempDir);

impl Drop for Evidence {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.disable_cleanup(true);
            println!("the capture stays in {}", self.0.path().display());
        }
    }
}
