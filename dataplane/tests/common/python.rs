//! Programs from the Python package index, in virtual environments of the tests.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::programs::is_installed;

/// Runs a command; returns its output if it fails.
fn run(command: &mut Command) -> Result<(), String> {
    let out = command.output().map_err(|error| error.to_string())?;
    if out.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&out.stderr).into_owned())
}

/// Creates an environment and marks it as complete.
fn install(folder: &Path, packages: &[&str]) -> Result<(), String> {
    let _ = fs::remove_dir_all(folder);
    run(Command::new("python3").args(["-m", "venv"]).arg(folder))?;
    let mut pip = Command::new(folder.join("bin/pip"));
    run(pip
        .args(["install", "--quiet", "--no-input"])
        .args(packages))?;
    fs::write(folder.join("complete"), "").map_err(|error| error.to_string())
}

/// The folder of the programs of an environment with these packages (`NAME==VERSION`). It is
/// created at the first use and kept in the target directory. Prints a message and returns `None`
/// where that fails.
pub fn python_programs(packages: &[&str]) -> Option<PathBuf> {
    if !is_installed("python3", "python3") {
        return None;
    }
    // env(1) would take a path that contains = for a variable.
    let name = packages.join("-").replace("==", "-");
    let root = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = root.join(&name);
    let lock = File::create(root.join(format!("{name}.lock"))).unwrap();
    lock.lock().unwrap();
    if !folder.join("complete").is_file()
        && let Err(reason) = install(&folder, packages)
    {
        println!("skipped: pip cannot install {}", packages.join(", "));
        println!("{reason}");
        assert!(std::env::var_os("CI").is_none(), "CI has to install them");
        return None;
    }
    Some(folder.join("bin"))
}
