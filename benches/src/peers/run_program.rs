//! Runs programs of contenders to their end with a time limit, and reads their output.

use super::cost::{CpuSampler, CpuUse};
use crate::running_program::describe_start;
use anyhow::{anyhow, bail};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Time limit of one program.
const TIME_LIMIT: Duration = Duration::from_secs(60);
/// Time between two checks of a running program.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// Runs a program to its end. Returns its output, or its error text.
pub(super) fn run_to_end(command: &mut Command) -> anyhow::Result<String> {
    run_with(command, |_| {})
}

/// Runs a program to its end. Returns its output, and the CPU use of it and of the processes
/// `others` together in the middle of the run.
pub(super) fn run_measured(
    command: &mut Command,
    others: &[u32],
) -> anyhow::Result<(String, CpuUse)> {
    let mut sampler = None;
    let text = run_with(command, |pid| {
        let all = others.iter().copied().chain([pid]);
        sampler.get_or_insert_with(|| CpuSampler::new(all)).sample();
    })?;
    let used = sampler
        .and_then(CpuSampler::finish)
        .ok_or_else(|| anyhow!("the run was too short to measure its CPU time"))?;
    Ok((text, used))
}

/// Runs a program to its end, calling `on_look` with its process id at intervals meanwhile.
fn run_with(command: &mut Command, on_look: impl FnMut(u32)) -> anyhow::Result<String> {
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let child = child.map_err(|error| describe_start(command, &error))?;
    let output = wait_with_limit(child, on_look)?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(text);
    }
    let complaint = String::from_utf8_lossy(&output.stderr);
    let last = complaint
        .lines()
        .chain(text.lines())
        .rfind(|line| !line.trim().is_empty());
    Err(anyhow!(
        "{} failed ({}): {}",
        command.get_program().to_string_lossy(),
        output.status,
        last.unwrap_or("it printed nothing")
    ))
}

fn wait_with_limit(mut child: Child, mut on_look: impl FnMut(u32)) -> anyhow::Result<Output> {
    // Threads drain the pipes, since a program may print more than a pipe holds.
    let drain = |pipe: Option<Box<dyn std::io::Read + Send>>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            if let Some(mut pipe) = pipe {
                let _ = pipe.read_to_end(&mut bytes);
            }
            bytes
        })
    };
    let stdout = drain(child.stdout.take().map(|pipe| Box::new(pipe) as _));
    let stderr = drain(child.stderr.take().map(|pipe| Box::new(pipe) as _));
    let deadline = Instant::now() + TIME_LIMIT;
    let status = loop {
        match child.try_wait()? {
            Some(status) => break status,
            None if Instant::now() > deadline => {
                let _ = child.kill();
                let _ = child.wait();
                bail!("no end after {} s", TIME_LIMIT.as_secs());
            }
            None => {
                on_look(child.id());
                std::thread::sleep(LOOK_INTERVAL);
            }
        }
    };
    Ok(Output {
        status,
        stdout: stdout.join().unwrap_or_default(),
        stderr: stderr.join().unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::running_program::RunningProgram;

    #[test]
    fn a_program_that_fails_says_why() {
        let error = run_to_end(Command::new("sh").args(["-c", "echo wrong >&2; exit 3"]));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("wrong") && error.contains('3'), "{error}");
        let error = run_to_end(&mut Command::new("no-such-program"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("no-such-program"), "{error}");
    }

    #[test]
    fn the_cpu_time_of_both_programs_counts() {
        let mut spin = Command::new("sh");
        spin.args(["-c", "while :; do :; done"]);
        let other = RunningProgram::start(&mut spin).unwrap();
        let mut sleep = Command::new("sleep");
        let (_, used) = run_measured(sleep.arg("0.6"), &[other.pid()]).unwrap();
        assert!(used.cores > 0.05 && used.cores < 3.0, "{used:?}");
        assert!(used.tsc_ghz > 0.0, "{used:?}");
        let error = run_measured(&mut Command::new("true"), &[]).unwrap_err();
        assert!(error.to_string().contains("too short"), "{error}");
    }

    #[test]
    fn more_than_a_pipe_holds_is_read() {
        let text = run_to_end(Command::new("head").args(["-c", "300000", "/dev/zero"])).unwrap();
        assert_eq!(text.len(), 300_000);
    }
}
