//! Programs in the background, stopped when their handles are dropped.

use anyhow::anyhow;
use rustix::process::{Pid, Signal, kill_process};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Time limit from asking a program to end until it exits.
const STOP_TIME_LIMIT: Duration = Duration::from_secs(5);
/// Time between two checks of a running program.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// A running program, killed and reaped when dropped.
pub(crate) struct RunningProgram(Child);

impl RunningProgram {
    /// Starts a program in the background; its output is discarded.
    pub(crate) fn start(command: &mut Command) -> anyhow::Result<RunningProgram> {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        child
            .map(RunningProgram)
            .map_err(|error| describe_start(command, &error))
    }

    /// Starts a program whose standard output is read; its errors go to `stderr`.
    pub(crate) fn start_piped(
        command: &mut Command,
        stderr: Stdio,
    ) -> anyhow::Result<RunningProgram> {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn();
        child
            .map(RunningProgram)
            .map_err(|error| describe_start(command, &error))
    }

    /// Asks the program to end and waits for it; if it does not, it is killed when dropped.
    pub(crate) fn stop(&mut self) {
        let Some(pid) = Pid::from_raw(self.0.id() as i32) else {
            return;
        };
        let deadline = Instant::now() + STOP_TIME_LIMIT;
        let _ = kill_process(pid, Signal::TERM);
        while matches!(self.0.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(LOOK_INTERVAL);
        }
    }

    /// The program's process id.
    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }

    /// The child process, with its pipes.
    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for RunningProgram {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Describes a program that could not be started.
pub(crate) fn describe_start(command: &Command, error: &std::io::Error) -> anyhow::Error {
    anyhow!("{}: {error}", command.get_program().to_string_lossy())
}
