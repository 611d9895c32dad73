//! `siwrun --private`: a siwd for one program, without privileges, that leaves nothing behind.

use crate::common::programs::is_installed;
use crate::common::siwrun;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// `siwrun --private` for a shell command, with its files in `folder`.
fn private(folder: &Path, options: &[&str], script: &str) -> Command {
    let mut command = Command::new(siwrun());
    command
        .args(["--private", "--siwd", env!("CARGO_BIN_EXE_siwd")])
        .args(options)
        .args(["--", "sh", "-c", script])
        .env("XDG_RUNTIME_DIR", folder)
        .env_remove("SIWD_SOCKET");
    command
}

fn run_private(options: &[&str], script: &str) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let out = private(folder.path(), options, script).output().unwrap();
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert!(left.is_empty(), "{left:?} was left: {out:?}");
    out
}

fn says(bytes: &[u8], text: &str) -> bool {
    String::from_utf8_lossy(bytes).contains(text)
}

#[test]
fn a_program_has_devices_and_its_exit_code_is_returned() {
    if !is_installed("ibv_devices", "ibverbs-utils") {
        return;
    }
    let out = run_private(&[], "ibv_devices; test -S \"$SIWD_SOCKET\"; exit 7");
    assert_eq!(out.status.code(), Some(7), "{out:?}");
    assert!(says(&out.stdout, "siw0") && says(&out.stdout, "siw1"));
    let out = run_private(&[], "kill -KILL $$");
    assert_eq!(out.status.code(), Some(128 + 9), "{out:?}");
}

#[test]
fn several_private_daemons_run_at_once() {
    if !is_installed("rping", "rdmacm-utils") {
        return;
    }
    // The client may start before its server listens.
    let script = "rping -s -a 10.77.0.2 -C 3 & \
                  for i in $(seq 100); do rping -c -a 10.77.0.2 -C 3 && break; sleep 0.05; done; wait $!";
    let runs: Vec<_> = (0..3)
        .map(|_| std::thread::spawn(move || run_private(&[], script)))
        .collect();
    for run in runs {
        let out = run.join().unwrap();
        assert!(out.status.success(), "{out:?}");
    }
}

#[test]
fn an_error_of_siwd_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("wrong.toml");
    std::fs::write(&config, "[workers]\ncores = [\n").unwrap();
    let out = run_private(&["--config", config.to_str().unwrap()], "true");
    assert_eq!(out.status.code(), Some(127));
    assert!(
        says(&out.stderr, "did not start") && says(&out.stderr, "wrong.toml"),
        "{out:?}"
    );
    // A daemon that ends before its program makes the run fail.
    let out = run_private(&[], "kill -KILL $(pgrep -P $PPID -x siwd); sleep 0.1");
    assert_eq!(out.status.code(), Some(69), "{out:?}");
    assert!(says(&out.stderr, "ended before the program"), "{out:?}");
    let out = Command::new(siwrun())
        .args(["--private", "--siwd", "/nowhere/siwd", "true"])
        .env("XDG_RUNTIME_DIR", folder.path())
        .output()
        .unwrap();
    assert_eq!(out.status.code(), Some(127));
    assert!(says(&out.stderr, "/nowhere/siwd"), "{out:?}");
    let long = folder.path().join("x".repeat(100));
    std::fs::create_dir(&long).unwrap();
    let out = private(&long, &[], "true").output().unwrap();
    assert_eq!(out.status.code(), Some(127));
    assert!(
        says(&out.stderr, "too long") && says(&out.stderr, "TMPDIR"),
        "{out:?}"
    );
}

/// Runs a program that prints the process number of its siwd and waits.
fn start_waiting(folder: &Path) -> (Child, String) {
    let mut child = private(folder, &[], "pgrep -P $PPID -x siwd; exec sleep 60")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap())
        .read_line(&mut line)
        .unwrap();
    (child, line.trim().to_owned())
}

fn await_end(process: &str) {
    let until = Instant::now() + Duration::from_secs(20);
    let folder = format!("/proc/{process}");
    // Its parent is gone or does not collect its status.
    let is_running = || {
        std::fs::read_to_string(format!("{folder}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
    };
    while is_running() {
        assert!(Instant::now() < until, "process {process} runs on");
        std::thread::yield_now();
    }
}

#[test]
fn everything_ends_with_siwrun() {
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;
    let folder = tempfile::tempdir().unwrap();
    let (mut child, siwd) = start_waiting(folder.path());
    let pid = Pid::from_raw(child.id().cast_signed());
    kill(pid, Signal::SIGTERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(128 + 15));
    await_end(&siwd);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);

    let (mut child, siwd) = start_waiting(folder.path());
    child.kill().unwrap();
    child.wait().unwrap();
    await_end(&siwd);
    // The next run removes what this one left.
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    for entry in &left {
        let path = entry.as_ref().unwrap().path();
        let long_ago = std::time::SystemTime::now() - Duration::from_secs(60);
        std::fs::File::open(path)
            .unwrap()
            .set_modified(long_ago)
            .unwrap();
    }
    assert_eq!(left.len(), 1);
    assert!(
        private(folder.path(), &[], "true")
            .status()
            .unwrap()
            .success()
    );
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
