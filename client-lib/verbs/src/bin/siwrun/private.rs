//! `siwrun --private`: runs a program beside a siwd of its own, which belongs to this user, needs no
//! privilege, and ends with the program.
//!
//! Everything that the daemon creates is in one folder, which is removed at the end. A folder whose
//! lock nobody holds was left by a killed siwrun, and the next one removes it.

use crate::running::{RunError, exit_code, prepare_child, run_for, run_program};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant, SystemTime};
use std::{env, thread};

/// The embedded loopback of siwd, which a private daemon runs without hugepages, for one user.
const LOOPBACK: &str = include_str!("../../../../../config/loopback.toml");
/// The tables of siwd have the size of their limits: these take 14 MB in place of 54.
const LIMITS: &str = "
[limits]
clients = 256
clients_per_user = 256
memory_regions_per_client = 4096
memory_regions_per_user = 1048576
";
const PREFIX: &str = "siwrun-private-";
/// Longest path of a Unix socket, with its final zero byte (unix(7)).
const SOCKET_PATH_SIZE: usize = 108;
/// Beginning of the line that siwd prints when it is ready.
const READY: &str = "siwd ready:";
const START_LIMIT: Duration = Duration::from_secs(60);
/// Time that a daemon may take to end.
const STOP_LIMIT: Duration = Duration::from_secs(5);
/// Lines of the daemon's log shown after a failure.
const LINES_SHOWN: usize = 40;
/// Exit code when the daemon ended before the program (EX_UNAVAILABLE of sysexits.h).
const DAEMON_ENDED: u8 = 69;

#[derive(Debug, thiserror::Error)]
pub enum PrivateError {
    #[error(
        "siwd is neither in the folder of siwrun nor in $PATH; build it with cargo build -p siwd, or \
         specify it with --siwd"
    )]
    NoDaemon,
    #[error("cannot create a folder for the private siwd in {folder}: {error}")]
    Folder { folder: PathBuf, error: io::Error },
    #[error(
        "the path {0} of a private socket is too long: set $XDG_RUNTIME_DIR or $TMPDIR to a shorter \
         folder"
    )]
    LongPath(PathBuf),
    #[error("the private siwd did not start: {status}\n{log}")]
    NotStarted { status: String, log: String },
    #[error(transparent)]
    Run(#[from] RunError),
}

/// Folder of one siwrun, locked while it runs.
struct OwnFolder {
    path: PathBuf,
    _lock: Flock<File>,
}

impl Drop for OwnFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Path of the daemon's socket.
fn socket_in(folder: &Path) -> PathBuf {
    folder.join("siwd.sock")
}

fn open_lock(folder: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600);
    options.open(folder.join("lock"))
}

/// Returns whether the siwrun that created a folder has ended without removing it.
fn is_abandoned(folder: &Path) -> bool {
    let Ok(metadata) = fs::symlink_metadata(folder) else {
        return false;
    };
    let is_own = metadata.uid() == rustix::process::getuid().as_raw();
    // A new folder has no lock for a moment.
    let age = metadata
        .modified()
        .ok()
        .and_then(|time| SystemTime::now().duration_since(time).ok());
    let is_old = age.is_some_and(|age| age > Duration::from_secs(5));
    metadata.is_dir()
        && is_own
        && is_old
        && open_lock(folder)
            .is_ok_and(|file| Flock::lock(file, FlockArg::LockExclusiveNonblock).is_ok())
}

fn remove_abandoned(base: &Path) {
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        let is_ours = entry.file_name().to_string_lossy().starts_with(PREFIX);
        if is_ours && is_abandoned(&entry.path()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

impl OwnFolder {
    fn create() -> Result<OwnFolder, PrivateError> {
        let runtime = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let own = |folder: &PathBuf| {
            fs::metadata(folder)
                .is_ok_and(|found| found.uid() == rustix::process::getuid().as_raw())
        };
        let base = runtime.filter(own).unwrap_or_else(env::temp_dir);
        remove_abandoned(&base);
        let path = base.join(format!("{PREFIX}{}", std::process::id()));
        let socket = socket_in(&path);
        if socket.as_os_str().len() >= SOCKET_PATH_SIZE {
            return Err(PrivateError::LongPath(socket));
        }
        let created = DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .and_then(|()| open_lock(&path));
        let locked = created.and_then(|file| {
            Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| errno.into())
        });
        match locked {
            Ok(lock) => Ok(OwnFolder { path, _lock: lock }),
            Err(error) => Err(PrivateError::Folder {
                folder: base,
                error,
            }),
        }
    }
}

/// The embedded loopback for one user on the last core that this process may use.
fn private_config() -> String {
    let allowed = nix::sched::sched_getaffinity(Pid::from_raw(0));
    let is_allowed = |core: &usize| {
        allowed
            .as_ref()
            .is_ok_and(|set| set.is_set(*core) == Ok(true))
    };
    let core = (0..nix::sched::CpuSet::count()).rfind(is_allowed);
    LOOPBACK
        .replace("cores = [1]", &format!("cores = [{}]", core.unwrap_or(0)))
        .replace("mode = \"0660\"", "mode = \"0600\"")
        .replace("hugepages = \"auto\"", "hugepages = \"never\"")
        .replace("buffers = 4096", "buffers = 2048")
        + LIMITS
}

fn find_daemon(wanted: Option<PathBuf>) -> Result<PathBuf, PrivateError> {
    if let Some(path) = wanted {
        return Ok(path);
    }
    let own = env::current_exe().unwrap_or_default();
    let folder = own.parent().unwrap_or(Path::new("/"));
    let mut candidates = vec![folder.join("siwd"), folder.join("../sbin/siwd")];
    let path = env::var_os("PATH").unwrap_or_default();
    candidates.extend(env::split_paths(&path).map(|folder| folder.join("siwd")));
    let found = candidates.into_iter().find(|path| path.is_file());
    found.ok_or(PrivateError::NoDaemon)
}

/// Warnings, errors and panics in the daemon's log, the last ones.
fn complaints(log: &Path) -> Vec<String> {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let is_complaint = |line: &&str| !line.contains(" INFO ") && !line.contains(" DEBUG ");
    let lines: Vec<_> = text.lines().filter(is_complaint).collect();
    let from = lines.len().saturating_sub(LINES_SHOWN);
    lines[from..]
        .iter()
        .map(|line| (*line).to_owned())
        .collect()
}

/// A siwd of this process.
pub struct PrivateDaemon {
    siwd: Child,
    /// Open, because siwd may print more.
    _output: ChildStdout,
    log: PathBuf,
    // Dropped last: siwd uses it until it ends.
    folder: OwnFolder,
}

impl PrivateDaemon {
    /// Starts a daemon and waits until it is ready. The default configuration is the embedded
    /// loopback.
    pub fn start(
        siwd: Option<PathBuf>,
        config: Option<PathBuf>,
    ) -> Result<PrivateDaemon, PrivateError> {
        let program = find_daemon(siwd)?;
        let folder = OwnFolder::create()?;
        let in_folder = |error| PrivateError::Folder {
            folder: folder.path.clone(),
            error,
        };
        let file = match config {
            Some(file) => file,
            None => {
                let file = folder.path.join("siwd.toml");
                fs::write(&file, private_config()).map_err(in_folder)?;
                file
            }
        };
        let log = folder.path.join("siwd.log");
        let mut command = Command::new(&program);
        command
            .arg("--config")
            .arg(file)
            .arg("--socket")
            .arg(socket_in(&folder.path))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(&log).map_err(in_folder)?)
            // An interrupt from the terminal is for the program.
            .process_group(0);
        prepare_child(&mut command, true);
        let mut siwd = command
            .spawn()
            .map_err(|error| RunError::NotRun { program, error })?;
        let output = siwd.stdout.take();
        let mut daemon = PrivateDaemon {
            siwd,
            _output: output.unwrap_or_else(|| unreachable!("standard output is a pipe")),
            log,
            folder,
        };
        match daemon.await_ready() {
            Ok(()) => Ok(daemon),
            Err(status) => Err(PrivateError::NotStarted {
                status,
                log: complaints(&daemon.log).join("\n"),
            }),
        }
    }

    /// Waits for the line that siwd prints when it is ready; returns what happened instead. DPDK may
    /// print lines before it.
    fn await_ready(&mut self) -> Result<(), String> {
        let started = Instant::now();
        let mut output = BufReader::new(&mut self._output);
        let mut line = String::new();
        while !line.starts_with(READY) {
            if output.buffer().is_empty() {
                let left = START_LIMIT.saturating_sub(started.elapsed());
                let left = Timespec {
                    tv_sec: left.as_secs().cast_signed(),
                    tv_nsec: left.subsec_nanos().into(),
                };
                let mut fds = [PollFd::new(output.get_ref(), PollFlags::IN)];
                if poll(&mut fds, Some(&left)) == Ok(0) {
                    return Err(format!(
                        "it was not ready after {} s",
                        START_LIMIT.as_secs()
                    ));
                }
            }
            line.clear();
            if !matches!(output.read_line(&mut line), Ok(bytes) if bytes > 0) {
                return Err(match self.siwd.wait() {
                    Ok(status) => status.to_string(),
                    Err(error) => error.to_string(),
                });
            }
        }
        Ok(())
    }

    pub fn socket(&self) -> PathBuf {
        socket_in(&self.folder.path)
    }

    /// Runs a program beside the daemon, passes signals on to it, and returns its exit code; 128 and
    /// the number of the signal that ended it, as a shell does.
    pub fn run_program(mut self, mut command: Command) -> Result<u8, PrivateError> {
        let mut daemon_end = None;
        let status = run_program(&mut command, || {
            if daemon_end.is_none()
                && let Some(status) = self.siwd.try_wait().map_err(RunError::Wait)?
            {
                eprintln!("siwrun: the private siwd ended before the program: {status}");
                daemon_end = Some(status);
            }
            Ok(())
        })?;
        Ok(self.end(status, daemon_end))
    }

    /// Runs a program beside the daemon for at most that time, and stops both.
    pub fn run_for(
        self,
        mut command: Command,
        time: Duration,
    ) -> Result<Option<ExitStatus>, PrivateError> {
        Ok(run_for(&mut command, time)?)
    }

    /// Stops the daemon and reports its complaints if the program failed.
    fn end(mut self, program: ExitStatus, daemon: Option<ExitStatus>) -> u8 {
        self.stop();
        let complaints = complaints(&self.log);
        if (!program.success() || daemon.is_some()) && !complaints.is_empty() {
            eprintln!(
                "siwrun: the program ended with {program}; the private siwd said:\n{}",
                complaints.join("\n")
            );
        }
        match (daemon, exit_code(program)) {
            (Some(_), 0) => DAEMON_ENDED,
            (_, code) => code,
        }
    }

    fn stop(&mut self) {
        let _ = kill(Pid::from_raw(self.siwd.id().cast_signed()), Signal::SIGTERM);
        let until = Instant::now() + STOP_LIMIT;
        while matches!(self.siwd.try_wait(), Ok(None)) {
            if Instant::now() > until {
                let _ = self.siwd.kill();
                let _ = self.siwd.wait();
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for PrivateDaemon {
    fn drop(&mut self) {
        if matches!(self.siwd.try_wait(), Ok(None)) {
            self.stop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_is_changed_where_a_private_daemon_differs() {
        let text = private_config();
        for changed in [
            "cores = [1]  ",
            "\"0660\"",
            "hugepages = \"auto\"",
            "buffers = 4096",
        ] {
            assert_eq!(LOOPBACK.matches(changed).count(), 1, "{changed}");
        }
        assert!(text.contains("mode = \"0600\"") && text.contains("hugepages = \"never\""));
    }
}
