//! Programs from the Python package index, in virtual environments of the tests.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::Daemon;
use super::programs::{Program, is_installed, is_lacking_by_list, received_bytes};

/// Runs a command; returns its output if it fails.
fn run(command: &mut Command) -> Result<(), String> {
    let out = command.output().map_err(|error| error.to_string())?;
    if out.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&out.stderr).into_owned())
}

/// Creates an environment and marks it as complete. `alone` comes without its dependencies.
fn install(folder: &Path, packages: &[&str], alone: Option<&str>) -> Result<(), String> {
    let _ = fs::remove_dir_all(folder);
    run(Command::new("python3").args(["-m", "venv"]).arg(folder))?;
    let pip = |arguments: &[&str]| {
        let mut pip = Command::new(folder.join("bin/pip"));
        run(pip
            .args(["install", "--quiet", "--no-input"])
            .args(arguments))
    };
    pip(packages)?;
    if let Some(package) = alone {
        pip(&["--no-deps", package])?;
    }
    fs::write(folder.join("complete"), "").map_err(|error| error.to_string())
}

/// The folder of the programs of an environment with these packages (`NAME==VERSION`). It is
/// created at the first use and kept in the target directory. Prints a message and returns `None`
/// where that fails.
pub fn python_programs(packages: &[&str]) -> Option<PathBuf> {
    environment(packages, None)
}

/// Like [`python_programs`], with one more package whose dependencies are only those of `packages`.
pub fn python_programs_with(packages: &[&str], alone: &str) -> Option<PathBuf> {
    environment(packages, Some(alone))
}

fn environment(packages: &[&str], alone: Option<&str>) -> Option<PathBuf> {
    if !is_installed("python3", "python3") {
        return None;
    }
    // env(1) would take a path that contains = for a variable.
    let all: Vec<&str> = alone.into_iter().chain(packages.iter().copied()).collect();
    let name = all.join("-").replace("==", "-");
    let root = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = root.join(&name);
    let lock = File::create(root.join(format!("{name}.lock"))).unwrap();
    lock.lock().unwrap();
    if !folder.join("complete").is_file()
        && let Err(reason) = install(&folder, packages, alone)
    {
        let name = all[0].split_once("==").map_or(all[0], |(name, _)| name);
        if is_lacking_by_list("pip", name) {
            return None;
        }
        println!("skipped: pip cannot install {}", all.join(", "));
        println!("{reason}");
        assert!(std::env::var_os("CI").is_none(), "CI has to install them");
        return None;
    }
    Some(folder.join("bin"))
}

/// A program of MPI in Python.
pub struct MpiRun<'a> {
    /// Those of the environment; one of them has `mpiexec`.
    pub packages: &'a [&'a str],
    /// Begin of the line for siwrun: its options, and a command such as env(1).
    pub begin: &'a str,
    pub program: &'a str,
    pub argument: &'a str,
    /// Bytes that each run moves over siwd at least.
    pub least_bytes: u64,
}

impl MpiRun<'_> {
    /// Runs the program with these numbers of processes, each of which has to say that it is right. Does nothing
    /// where the packages are missing.
    pub fn run(&self, counts: &[u32]) {
        let Some(programs) = python_programs(self.packages) else {
            return;
        };
        let daemon = Daemon::loopback();
        let script = daemon.dir.path().join("processes.py");
        fs::write(&script, self.program).unwrap();
        let programs = programs.display();
        let received = || received_bytes(&daemon, "siw0") + received_bytes(&daemon, "siw1");
        for &count in counts {
            let before = received();
            let line = format!(
                "{} {programs}/mpiexec -n {count} {programs}/python {} {}",
                self.begin,
                script.display(),
                self.argument
            );
            let said = Program::start(&daemon, &line).succeed();
            for rank in 0..count {
                let expected = format!("rank {rank} of {count} is right");
                assert!(said.contains(&expected), "{said}");
            }
            let moved = received() - before;
            assert!(moved > self.least_bytes, "{moved} bytes");
        }
    }
}
