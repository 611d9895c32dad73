//! Runs a program as a child of siwrun, which passes signals on to it.

use nix::sys::signal::{SigSet, Signal, kill, killpg};
use nix::sys::signalfd::SignalFd;
use nix::unistd::Pid;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("cannot run {program}: {error}", program = program.display())]
    NotRun { program: PathBuf, error: io::Error },
    #[error("cannot wait for signals: {0}")]
    Signals(nix::Error),
    #[error("cannot wait for the program: {0}")]
    Wait(io::Error),
}

/// Has a child end with this process, and gives it back the signals that this process blocks. With
/// `small_pages` its memory is what it uses, not whole huge pages.
pub fn prepare_child(command: &mut Command, small_pages: bool) {
    let parent = nix::unistd::getpid();
    let prepare = move || {
        nix::sys::prctl::set_pdeathsig(Signal::SIGTERM)?;
        SigSet::all().thread_unblock()?;
        if nix::unistd::getppid() != parent {
            return Err(io::Error::other("siwrun has ended"));
        }
        if small_pages {
            nix::sys::prctl::set_thp_disable(true)?;
        }
        Ok(())
    };
    // SAFETY: prctl(2), getppid(2) and pthread_sigmask(3) are safe after fork(2).
    unsafe { command.pre_exec(prepare) };
}

/// Signals that a program gets in place of siwrun, and that of a child's end.
const SIGNALS: [Signal; 5] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
    Signal::SIGCHLD,
];

/// Blocks the signals of this process, which reads them from the descriptor.
fn open_signals() -> Result<SignalFd, RunError> {
    let signals: SigSet = SIGNALS.into_iter().collect();
    signals.thread_block().map_err(RunError::Signals)?;
    SignalFd::new(&signals).map_err(RunError::Signals)
}

/// Runs a program in a process group of its own, and kills the group when the program has ended, or after the time.
/// None: it did not end in time. A signal of this process ends the program and this process.
pub fn run_for(command: &mut Command, time: Duration) -> Result<Option<ExitStatus>, RunError> {
    let signals = open_signals()?;
    let deadline = Instant::now() + time;
    prepare_child(command, false);
    command.process_group(0);
    let mut program = command.spawn().map_err(|error| RunError::NotRun {
        program: command.get_program().into(),
        error,
    })?;
    let group = Pid::from_raw(program.id().cast_signed());
    let status = loop {
        if let Some(status) = program.try_wait().map_err(RunError::Wait)? {
            break Some(status);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break None;
        }
        let left = Timespec {
            tv_sec: left.as_secs().cast_signed(),
            tv_nsec: left.subsec_nanos().into(),
        };
        let mut fds = [PollFd::new(&signals, PollFlags::IN)];
        if poll(&mut fds, Some(&left)) != Ok(1) {
            continue;
        }
        let read = signals.read_signal().map_err(RunError::Signals)?;
        if let Some(signal) = read
            && signal.ssi_signo.cast_signed() != Signal::SIGCHLD as i32
        {
            let _ = killpg(group, Signal::SIGKILL);
            std::process::exit(128 + signal.ssi_signo.cast_signed());
        }
    };
    let _ = killpg(group, Signal::SIGKILL);
    let _ = program.wait();
    Ok(status)
}

/// Runs a program, passes signals on to it, and waits for its end. `look` is called at the start and each time a
/// child of this process has ended.
pub fn run_program(
    command: &mut Command,
    mut look: impl FnMut() -> Result<(), RunError>,
) -> Result<ExitStatus, RunError> {
    let signals = open_signals()?;
    prepare_child(command, false);
    let mut program = command.spawn().map_err(|error| RunError::NotRun {
        program: command.get_program().into(),
        error,
    })?;
    loop {
        if let Some(status) = program.try_wait().map_err(RunError::Wait)? {
            return Ok(status);
        }
        look()?;
        let Some(signal) = signals.read_signal().map_err(RunError::Signals)? else {
            continue;
        };
        // The terminal sends its signals to the program, too.
        let is_from_process = signal.ssi_code <= 0;
        let number = signal.ssi_signo.cast_signed();
        if number != Signal::SIGCHLD as i32
            && is_from_process
            && let Ok(signal) = Signal::try_from(number)
        {
            let _ = kill(Pid::from_raw(program.id().cast_signed()), signal);
        }
    }
}

/// Exit code of a program as a shell has it: 128 and the number of the signal that ended it.
pub fn exit_code(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => u8::try_from(code).unwrap_or(1),
        (None, Some(signal)) => 128 + u8::try_from(signal).unwrap_or(0),
        (None, None) => 1,
    }
}
