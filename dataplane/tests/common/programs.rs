//! Programs from the distribution, run by `siwrun` on a test's daemon.

use std::io::Read;
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::Instant;

use super::net::Netns;
use super::{Daemon, PATIENCE, client_program, siwrun};

/// A running program, ended when dropped. Its output is read continuously, so that it never blocks
/// on a full pipe.
pub struct Program {
    child: Child,
    name: String,
    outputs: Vec<JoinHandle<String>>,
}

/// Reads until the program closes its end.
fn collect(mut pipe: impl Read + Send + 'static) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = pipe.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

impl Drop for Program {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Whether the package of the program is installed; prints a message if it is not.
pub fn is_installed(program: &str, package: &str) -> bool {
    let found = Command::new("which").arg(program).output().unwrap();
    if !found.status.success() {
        skip_for_lack_of(program, package);
    }
    found.status.success()
}

/// Prints why a test is skipped that needs a part of a package.
///
/// # Panics
///
/// In CI, unless `deploy/lacking.list` says that this suite has no such package.
pub fn skip_for_lack_of(part: &str, package: &str) {
    if is_lacking_by_list(part, package) {
        return;
    }
    println!("skipped: {part} is not installed (apt-get install {package})");
    assert!(std::env::var_os("CI").is_none(), "CI has to have {part}");
}

/// Checks whether `deploy/lacking.list` says that this suite has no such package; then prints that the test is
/// skipped.
pub fn is_lacking_by_list(part: &str, package: &str) -> bool {
    let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let named = |line: &str| line.strip_prefix("VERSION_CODENAME=").map(str::to_owned);
    let suite = release.lines().find_map(named).unwrap_or_default();
    let lacking = format!("{suite} {package}");
    let mut list = include_str!("../../../deploy/lacking.list").lines();
    let is_lacking = list.any(|line| line == lacking);
    if is_lacking {
        println!("skipped: {part}: {suite} lacks the package {package}");
    }
    is_lacking
}

/// Checks whether UCX is installed with its transports of InfiniBand, which not every suite's UCX has.
pub fn has_infiniband_of_ucx() -> bool {
    if !is_installed("ucx_info", "ucx-utils") {
        return false;
    }
    let built = Command::new("ucx_info").arg("-b").output().unwrap();
    let has_it = String::from_utf8_lossy(&built.stdout)
        .lines()
        .any(|line| line.starts_with("#define HAVE_TL_RC "));
    if !has_it {
        skip_for_lack_of("UCX with InfiniBand", "libuct-ib");
    }
    has_it
}

/// ucx_perftest for two processes of the tests; where it is built with MPI, without that.
pub fn ucx_perftest() -> &'static str {
    let help = Command::new("ucx_perftest").arg("-h").output().unwrap();
    let knows_mpi = [help.stdout, help.stderr]
        .iter()
        .any(|text| String::from_utf8_lossy(text).contains("-P <0|1>"));
    if knows_mpi {
        "ucx_perftest -P 0"
    } else {
        "ucx_perftest"
    }
}

impl Program {
    /// Starts a command line.
    pub fn start(daemon: &Daemon, line: &str) -> Program {
        let child = Program::command(daemon, line).spawn().unwrap();
        Program::watch(child, line)
    }

    /// Like [`start`](Self::start), in a network namespace of the kernel.
    pub fn start_in(ns: &Netns, daemon: &Daemon, line: &str) -> Program {
        let mut command = Program::command(daemon, line);
        let child = ns.run(move || command.spawn()).unwrap();
        Program::watch(child, line)
    }

    fn command(daemon: &Daemon, line: &str) -> Command {
        let mut command = Command::new(siwrun());
        command.arg("--verbose").arg("--socket").arg(&daemon.socket);
        command.arg("--links").arg(daemon.dir.path().join("links"));
        command.args(line.split_whitespace());
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Its own process group: its children are killed too, as they keep the pipes open.
            .process_group(0);
        command
    }

    fn watch(mut child: Child, line: &str) -> Program {
        let outputs = vec![
            collect(child.stdout.take().unwrap()),
            collect(child.stderr.take().unwrap()),
        ];
        Program {
            child,
            name: line.to_owned(),
            outputs,
        }
    }

    /// Waits until it ends by itself; returns its status and all output.
    pub fn finish(mut self) -> (ExitStatus, String) {
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if Instant::now() > deadline {
                self.kill();
                let said = self.said();
                panic!("{} does not end; it said:\n{said}", self.name);
            }
            std::thread::park_timeout(std::time::Duration::from_millis(2));
        };
        let said = self.said();
        (status, said)
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Kills the program and the processes that it forked.
    pub fn kill(&mut self) {
        if !matches!(self.child.try_wait(), Ok(None)) {
            return;
        }
        let group = nix::unistd::Pid::from_raw(self.child.id() as i32);
        let _ = nix::sys::signal::killpg(group, nix::sys::signal::Signal::SIGKILL);
        let _ = self.child.wait();
    }

    /// All output of a program that has ended: standard output, then standard error.
    pub fn said(&mut self) -> String {
        let outputs = self.outputs.drain(..);
        outputs.map(|output| output.join().unwrap()).collect()
    }

    /// Waits for a program that must succeed; returns its output.
    pub fn succeed(self) -> String {
        let name = self.name.clone();
        let (status, said) = self.finish();
        assert!(status.success(), "{name}: {status}, it said:\n{said}");
        said
    }
}

/// TCP bytes that a device of the daemon received, including those from itself.
pub fn received_bytes(daemon: &Daemon, device: &str) -> u64 {
    let out = Command::new(client_program("siwctl"))
        .arg("stat")
        .args(["--json", "--device", device, "--socket"])
        .arg(&daemon.socket)
        .output()
        .unwrap();
    let statistics: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let counters = &statistics["devices"][0]["merged"];
    counters["SiwTcpInBytes"].as_u64().unwrap()
}

fn count_listeners(ctx: &siw::Context) -> u64 {
    let statistics: serde_json::Value = serde_json::from_str(&ctx.read_stats().unwrap()).unwrap();
    statistics["listeners"].as_u64().unwrap()
}

/// Waits until the daemon has `count` listeners.
pub fn await_listeners(daemon: &Daemon, count: u64) {
    let ctx = daemon.context();
    let start = Instant::now();
    while count_listeners(&ctx) < count {
        assert!(start.elapsed() < PATIENCE, "no listener");
    }
}

/// Starts a server on a daemon without other listeners, and waits until it listens.
pub fn start_listening(daemon: &Daemon, line: &str) -> Program {
    let mut server = Program::start(daemon, line);
    let ctx = daemon.context();
    let start = Instant::now();
    while count_listeners(&ctx) == 0 {
        let has_ended = server.child.try_wait().unwrap().is_some();
        if has_ended || start.elapsed() > PATIENCE {
            server.kill();
            panic!("{line} does not listen; it said:\n{}", server.said());
        }
    }
    server
}

/// Runs a server and a client that both end by themselves; returns the output of each.
pub fn run_pair(server: &str, client: &str) -> (String, String) {
    let daemon = Daemon::loopback();
    let server = start_listening(&daemon, server);
    let client = Program::start(&daemon, client).succeed();
    (server.succeed(), client)
}

/// A free TCP port of the kernel.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    listener.local_addr().unwrap().port()
}

/// Whether the kernel has a listener on the port, in the network namespace of a process, according
/// to proc_pid_net(5). A test connection would be taken for the client.
fn is_listening(process: u32, port: u16) -> bool {
    const LISTEN: &str = "0A";
    let suffix = format!(":{port:04X}");
    let tables = ["tcp", "tcp6"].map(|name| {
        let path = format!("/proc/{process}/net/{name}");
        std::fs::read_to_string(path).unwrap_or_default()
    });
    tables.iter().flat_map(|table| table.lines()).any(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let has_port = fields.next().is_some_and(|local| local.ends_with(&suffix));
        has_port && fields.nth(1) == Some(LISTEN)
    })
}

/// Waits until the program listens on the port in the kernel, or has ended.
pub fn await_kernel_listener(server: &mut Program, port: u16) {
    let deadline = Instant::now() + PATIENCE;
    while !is_listening(server.id(), port) && server.child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < deadline, "no listener on port {port}");
        std::thread::park_timeout(std::time::Duration::from_millis(2));
    }
}

/// Starts a server and a client that exchange their parameters over a kernel TCP connection to
/// `host`, on the port passed as `-p`.
pub fn start_at_host(
    daemon: &Daemon,
    server: &str,
    client: &str,
    host: &str,
) -> (Program, Program) {
    let port = free_port();
    let mut server = Program::start(daemon, &format!("{server} -p {port}"));
    await_kernel_listener(&mut server, port);
    let client = Program::start(daemon, &format!("{client} -p {port} {host}"));
    (server, client)
}

/// Like [`start_at_host`], over 127.0.0.1.
pub fn start_over_tcp(daemon: &Daemon, server: &str, client: &str) -> (Program, Program) {
    start_at_host(daemon, server, client, "127.0.0.1")
}

/// Runs a pair as [`start_over_tcp`] does, of programs that end by themselves; returns the output
/// of each.
pub fn run_over_tcp(daemon: &Daemon, server: &str, client: &str) -> (String, String) {
    let (server, client) = start_over_tcp(daemon, server, client);
    let client = client.succeed();
    (server.succeed(), client)
}
