//! Programs from the Python package index, in virtual environments of the tests.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::programs::{is_installed, is_lacking_by_list};

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
