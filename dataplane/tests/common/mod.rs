//! A real daemon for a test, with its own socket and folder, stopped by process id.
#![allow(dead_code, reason = "each test binary uses its part")]

pub mod attacker;
pub mod c_programs;
pub mod flood;
pub mod guest;
pub mod impaired_link;
pub mod matrix;
#[macro_use]
pub mod net;
pub mod peer;
pub mod programs;
pub mod python;
pub mod raw;
pub mod raw_client;
pub mod stream;
pub mod typing;

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use siw::{
    Access, CmChannel, CmEvent, CmListener, ConnectOptions, Context, Cq, Mr, Pd, Qp, QpInit,
    SendData, SendWr, Wc, WcStatus,
};
use tempfile::TempDir;

/// Time limit of every step of a test; only a hang exceeds it.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub const LOOPBACK: &str = r#"
[workers]
idle = "adaptive"
[dpdk]
hugepages = "never"
buffers = 4096
[[device]]
name = "siw0"
pair = "lo"
addresses = ["10.77.0.1/24", "fd77::1/64"]
[[device]]
name = "siw1"
pair = "lo"
addresses = ["10.77.0.2/24", "fd77::2/64"]
"#;

/// Reason why two workers cannot run here; `None` if they can.
pub fn two_cores() -> Option<String> {
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    (count < 2).then(|| "two workers need two processors".into())
}

pub struct Daemon {
    pub child: Child,
    pub socket: PathBuf,
    pub dir: TempDir,
    pub ready: String,
    logged: mpsc::Receiver<String>,
}

/// Starts `siwd` with a configuration and arguments, without waiting for it.
pub fn spawn(dir: &Path, config: &str, args: &[&str]) -> Child {
    daemon_command(dir, config, args).spawn().unwrap()
}

/// The command that starts `siwd` with a configuration and arguments.
pub fn daemon_command(dir: &Path, config: &str, args: &[&str]) -> Command {
    let file = dir.join("siwd.toml");
    std::fs::write(&file, config).unwrap();
    let mut c = Command::new(env!("CARGO_BIN_EXE_siwd"));
    c.arg("--config")
        .arg(file)
        .arg("--socket")
        .arg(dir.join("siwd.sock"))
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    c
}

/// Runs a `siwd` that is expected to exit by itself; returns status, stdout, stderr.
pub fn run(config: &str, args: &[&str]) -> (ExitStatus, String, String) {
    let dir = tempfile::tempdir().unwrap();
    let out = spawn(dir.path(), config, args).wait_with_output().unwrap();
    (
        out.status,
        String::from_utf8_lossy(&out.stdout).into_owned(),
        String::from_utf8_lossy(&out.stderr).into_owned(),
    )
}

impl Daemon {
    pub fn loopback() -> Daemon {
        Daemon::start(LOOPBACK, &[])
    }

    pub fn start(config: &str, args: &[&str]) -> Daemon {
        let dir = tempfile::tempdir().unwrap();
        let child = spawn(dir.path(), config, args);
        Daemon::wait_ready(dir, child)
    }

    /// Takes over a child that prints the ready line.
    pub fn wait_ready(dir: TempDir, mut child: Child) -> Daemon {
        let stdout = child.stdout.take().unwrap();
        let mut stderr = child.stderr.take().unwrap();
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            let mut lines = BufReader::new(stdout).lines();
            let _ = tell.send(lines.next());
            lines.for_each(drop);
        });
        let (log, logged) = mpsc::channel();
        std::thread::spawn(move || {
            let mut text = String::new();
            let _ = stderr.read_to_string(&mut text);
            let _ = log.send(text);
        });
        let ready = match told.recv_timeout(PATIENCE) {
            Ok(Some(Ok(line))) => line,
            _ => {
                let _ = child.kill();
                let _ = child.wait();
                panic!(
                    "siwd did not become ready: {}",
                    logged.recv_timeout(PATIENCE).unwrap_or_default()
                );
            }
        };
        Daemon {
            socket: dir.path().join("siwd.sock"),
            child,
            dir,
            ready,
            logged,
        }
    }

    pub fn context(&self) -> Context {
        Context::open(Some(&self.socket)).unwrap()
    }

    /// A TCP counter, summed over all workers and devices.
    pub fn tcp_counter(&self, name: &str) -> u64 {
        let text = self.context().read_stats().unwrap();
        let all: serde_json::Value = serde_json::from_str(&text).unwrap();
        let workers = all["workers"].as_array().unwrap().iter();
        workers
            .flat_map(|w| w["devices"].as_array().unwrap())
            .map(|d| d["tcp"][name].as_u64().unwrap())
            .sum()
    }

    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        let pid = nix::unistd::Pid::from_raw(self.child.id() as i32);
        nix::sys::signal::kill(pid, signal).unwrap();
    }

    /// Stops the whole process until the guard is dropped. The process has stopped when this
    /// returns.
    pub fn pause(&self) -> Paused {
        let pid = nix::unistd::Pid::from_raw(self.child.id() as i32);
        self.signal(nix::sys::signal::Signal::SIGSTOP);
        let untraced = nix::sys::wait::WaitPidFlag::WUNTRACED;
        match nix::sys::wait::waitpid(pid, Some(untraced)) {
            Ok(nix::sys::wait::WaitStatus::Stopped(..)) => Paused(pid),
            other => panic!("the daemon did not stop: {other:?}"),
        }
    }

    /// Kills the daemon, as if it crashed.
    pub fn kill(&mut self) {
        self.signal(nix::sys::signal::Signal::SIGKILL);
        wait(&mut self.child);
    }

    /// Sends SIGTERM and returns the exit status.
    pub fn stop(mut self) -> ExitStatus {
        self.signal(nix::sys::signal::Signal::SIGTERM);
        let how = wait(&mut self.child);
        let said = self.logged.recv_timeout(PATIENCE).unwrap_or_default();
        if !how.success() {
            println!("siwd ended with {how}; it said: {said}");
        }
        check_system_calls(&said);
        how
    }

    /// Sends SIGTERM and returns the log.
    pub fn stop_and_read_log(mut self) -> String {
        self.signal(nix::sys::signal::Signal::SIGTERM);
        wait(&mut self.child);
        let said = self.logged.recv_timeout(PATIENCE).unwrap();
        check_system_calls(&said);
        said
    }
}

/// Workers are confined by default: a link or a driver that needs more system calls shows here.
fn check_system_calls(log: &str) {
    assert!(!log.contains("system call that it may not make"), "{log}");
}

/// See [`Daemon::pause`].
pub struct Paused(nix::unistd::Pid);

impl Drop for Paused {
    fn drop(&mut self) {
        let _ = nix::sys::signal::kill(self.0, nix::sys::signal::Signal::SIGCONT);
    }
}

/// A thread of a child process, stopped until this is dropped. Must be dropped by the thread that
/// stopped it.
pub struct StoppedThread(nix::unistd::Pid);

impl StoppedThread {
    /// Stops the thread with this name, which may still be starting. Prints a message and returns
    /// `None` where that is not permitted.
    pub fn stop(pid: u32, name: &str) -> Option<StoppedThread> {
        use nix::sys::{ptrace, wait};
        let find = || {
            let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
            threads.flatten().find_map(|thread| {
                let found = std::fs::read_to_string(thread.path().join("comm")).ok()?;
                (found.trim() == name).then(|| thread.file_name().to_str()?.parse().ok())?
            })
        };
        let end = Instant::now() + PATIENCE;
        let tid = loop {
            match find() {
                Some(tid) => break tid,
                None => assert!(Instant::now() < end, "no thread {name}"),
            }
            std::thread::yield_now();
        };
        let thread = nix::unistd::Pid::from_raw(tid);
        let seized = ptrace::seize(thread, ptrace::Options::empty());
        Self::may_trace(seized.and_then(|()| ptrace::interrupt(thread)))?;
        wait::waitpid(thread, Some(wait::WaitPidFlag::__WALL)).unwrap();
        Some(StoppedThread(thread))
    }

    /// Stops the thread that the process's main thread creates because of `cause`, before its first
    /// instruction. Prints a message and returns `None` where that is not permitted.
    pub fn stop_new(pid: u32, cause: impl FnOnce()) -> Option<StoppedThread> {
        use nix::sys::{ptrace, wait};
        let all = Some(wait::WaitPidFlag::__WALL);
        let main = nix::unistd::Pid::from_raw(pid as i32);
        Self::may_trace(ptrace::seize(main, ptrace::Options::PTRACE_O_TRACECLONE))?;
        cause();
        let status = wait::waitpid(main, all).unwrap();
        let clone = ptrace::Event::PTRACE_EVENT_CLONE as i32;
        assert!(
            matches!(status, wait::WaitStatus::PtraceEvent(_, _, event) if event == clone),
            "{status:?}"
        );
        let thread = nix::unistd::Pid::from_raw(ptrace::getevent(main).unwrap() as i32);
        wait::waitpid(thread, all).unwrap();
        ptrace::detach(main, None).unwrap();
        Some(StoppedThread(thread))
    }

    fn may_trace(attempt: nix::Result<()>) -> Option<()> {
        match attempt {
            Ok(()) => Some(()),
            Err(nix::errno::Errno::EPERM) => {
                println!("skipped: this process may not trace its child");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }
}

impl Drop for StoppedThread {
    fn drop(&mut self) {
        let _ = nix::sys::ptrace::detach(self.0, None);
    }
}

pub fn wait(child: &mut Child) -> ExitStatus {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        assert!(Instant::now() < end, "the process did not end");
        std::thread::yield_now();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.child.try_wait().ok().flatten().is_none() {
            self.signal(nix::sys::signal::Signal::SIGTERM);
            let end = Instant::now() + Duration::from_secs(10);
            while self.child.try_wait().ok().flatten().is_none() {
                if Instant::now() > end {
                    let _ = self.child.kill();
                    let _ = self.child.wait();
                    break;
                }
                std::thread::yield_now();
            }
        }
        if std::thread::panicking()
            && let Ok(log) = self.logged.recv_timeout(PATIENCE)
        {
            println!("siwd said: {log}");
        }
    }
}

/// Signals other threads of a test to end when it is dropped, also by a panic.
pub struct StopOnDrop<'a>(pub &'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Overwrites all of the memory repeatedly until `is_over`; returns the number of rounds.
pub fn scribble(memory: &Mr, is_over: &AtomicBool) -> u64 {
    let mut rounds = 0u64;
    while !is_over.load(Ordering::Relaxed) {
        rounds += 1;
        memory.write(0, &vec![rounds as u8; memory.len()]).unwrap();
    }
    rounds
}

/// The path of `siw-ping`, built with the profile of this test.
pub fn siw_ping() -> &'static Path {
    static PATH: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();
    PATH.get_or_init(|| client_program("siw-ping"))
}

/// The path of a program of the client library, built with the profile of this test.
pub fn client_program(name: &str) -> PathBuf {
    build_of_package("siw-programs", "--bin", name).join(name)
}

/// The path of `siwrun`, built with the profile of this test, with its libraries next to it.
pub fn siwrun() -> &'static Path {
    static PATH: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();
    PATH.get_or_init(|| {
        for library in ["siw-preload", "siw-mirror"] {
            build_of_package(library, "--lib", "--all-features");
        }
        build_of_package("siw-verbs", "--lib", "--bins").join("siwrun")
    })
}

/// The path of `siw-perf`, built with the profile of this test.
pub fn siw_perf() -> PathBuf {
    build_of_package("siw-bench", "--bin", "siw-perf").join("siw-perf")
}

/// The path of siw-lab, built with the profile of this test.
pub fn siw_lab() -> PathBuf {
    build_of_package("siw-lab", "--bin", "siw-lab").join("siw-lab")
}

/// The path of a Rust example of the client library, built with the profile of this test.
pub fn client_example(name: &str) -> PathBuf {
    build_of_package("siw", "--example", name)
        .join("examples")
        .join(name)
}

/// The folder with libsiw.so, built with the profile of this test.
pub fn c_library() -> &'static Path {
    build_of_package("siw-c", "--lib", "")
}

/// The path of an example of this package, built with the profile of this test.
pub fn daemon_example(name: &str) -> PathBuf {
    build_of_package("siwd", "--example", name)
        .join("examples")
        .join(name)
}

/// The path of the endpoint of byte streams, built with the profile of this test.
pub fn stream_program() -> PathBuf {
    build_of_package("siw-stream", "--bin", "siw-stream").join("siw-stream")
}

/// The path of the program that attacks a daemon, built with the profile of this test.
pub fn hostile_client() -> &'static Path {
    static PATH: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();
    PATH.get_or_init(|| {
        let name = "siw-hostile-client";
        build_of_package(name, "--bin", name).join(name)
    })
}

/// Builds a target of another package; returns the folder of this profile.
fn build_of_package(package: &str, kind: &str, name: &str) -> &'static Path {
    // For its tests, cargo builds the programs of this package only.
    let folder = Path::new(env!("CARGO_BIN_EXE_siwd")).parent().unwrap();
    let profile = match folder.file_name().and_then(|n| n.to_str()) {
        Some("debug") | None => "dev",
        Some(p) => p,
    };
    let mut target_dir = folder.parent().unwrap();
    // With an explicit target, cargo appends the target's folder itself.
    let target = std::env::var_os("CARGO_BUILD_TARGET");
    if target.is_some() && target.as_deref() == target_dir.file_name() {
        target_dir = target_dir.parent().unwrap();
    }
    let out = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--package", package, kind])
        .args(Some(name).filter(|name| !name.is_empty()))
        .args(name.starts_with("tokio_").then_some("--features=tokio"))
        .args(["--profile", profile, "--target-dir"])
        .arg(target_dir)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    folder
}

/// One side of a connection.
pub struct End {
    pub ctx: Context,
    pub pd: Pd,
    pub cq: Cq,
    pub cm: CmChannel,
    pub qp: Qp,
    pub mr: Mr,
}

/// CPU time that the calling thread has used.
pub fn thread_cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.try_into().unwrap()
}

pub const ALL: Access = Access(7);

impl End {
    pub fn new(ctx: &Context, memory: usize) -> End {
        End::with(ctx, memory, &QpInit::default())
    }

    pub fn with(ctx: &Context, memory: usize, init: &QpInit) -> End {
        let pd = ctx.alloc_pd().unwrap();
        let cq = Cq::new(ctx, 1024, None).unwrap();
        let qp = pd.create_qp(&cq, &cq, init).unwrap();
        let mr = pd.alloc_mr(memory, ALL).unwrap();
        let cm = CmChannel::new(ctx).unwrap();
        End {
            ctx: ctx.clone(),
            pd,
            cq,
            cm,
            qp,
            mr,
        }
    }

    /// Creates another queue pair in the same protection domain.
    pub fn another(&self) -> End {
        let cq = Cq::new(&self.ctx, 64, None).unwrap();
        End {
            ctx: self.ctx.clone(),
            pd: self.pd.clone(),
            qp: self.pd.create_qp(&cq, &cq, &QpInit::default()).unwrap(),
            cq,
            cm: CmChannel::new(&self.ctx).unwrap(),
            mr: self.pd.alloc_mr(64, ALL).unwrap(),
        }
    }

    /// Waits for the next completion.
    pub fn wc(&self) -> Wc {
        let mut wc = [Wc::default()];
        match self.cq.wait(&mut wc, Some(PATIENCE)) {
            Ok(1) => wc[0],
            other => panic!("no completion: {other:?}"),
        }
    }

    /// The sum of a counter over all workers.
    pub fn count_of_workers(&self, name: &str) -> u64 {
        let text = self.ctx.read_stats().unwrap();
        let statistics: serde_json::Value = serde_json::from_str(&text).unwrap();
        let workers = statistics["workers"].as_array().unwrap();
        let counts = workers.iter().map(|worker| worker[name].as_u64().unwrap());
        counts.sum()
    }

    /// Fills the memory with a pattern of this seed.
    pub fn fill(&self, seed: u64) {
        let bytes: Vec<u8> = pattern(seed, self.mr.len());
        self.mr.write(0, &bytes).unwrap();
    }

    pub fn read(&self, off: usize, len: usize) -> Vec<u8> {
        let mut v = vec![0; len];
        self.mr.read(off, &mut v).unwrap();
        v
    }
}

pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed | 1;
    (0..len)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x as u8
        })
        .collect()
}

/// Listens on `to`, connects from `from`, and waits until both sides are established.
pub fn connect(a: &End, b: &End, from: &str, to: SocketAddr) {
    connect_with(a, b, from, to, &ConnectOptions::default());
}

pub fn connect_with(a: &End, b: &End, from: &str, to: SocketAddr, opt: &ConnectOptions<'_>) {
    let listener = CmListener::new(&b.cm, None, to, 8, 0).unwrap();
    let device = a.ctx.device_by_name(from).unwrap();
    let opt = ConnectOptions {
        device: Some(device.index),
        ..*opt
    };
    a.qp.connect(&a.cm, listener.local_addr(), &opt).unwrap();
    match b.cm.get_event(Some(PATIENCE)).unwrap() {
        CmEvent::ConnectRequest(r) => r.accept(&b.qp, None, &ConnectOptions::default()).unwrap(),
        other => panic!("{other:?}"),
    }
    for end in [b, a] {
        match end.cm.get_event(Some(PATIENCE)).unwrap() {
            CmEvent::Established(_) => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Two ends connected from siw0 to siw1 over the ring pair.
pub fn pair(daemon: &Daemon, memory: usize) -> (End, End) {
    pair_on(daemon, memory, "siw0", "10.77.0.2:0")
}

/// Two ends, connected from a device to an address.
pub fn pair_on(daemon: &Daemon, memory: usize, device: &str, to: &str) -> (End, End) {
    let (a, b) = (
        End::new(&daemon.context(), memory),
        End::new(&daemon.context(), memory),
    );
    connect(&a, &b, device, to.parse().unwrap());
    (a, b)
}

/// Checks that a connection still works: transfers 4096 bytes.
pub fn ping(a: &End, b: &End) {
    a.fill(99);
    let sge = [a.mr.sge(0, 4096)];
    let write = SendWr::write(1, SendData::Sges(&sge), b.mr.addr(), b.mr.rkey());
    a.qp.post_send(&[write]).unwrap();
    assert_eq!(a.wc().status, WcStatus::SUCCESS);
    assert_eq!(a.read(0, 4096), b.read(0, 4096));
}
