//! Checks names and links in the documents of this repository. `deploy/style-report` builds and
//! runs it.
//!
//! Links are checked here because Debian has no package of lychee, and building it takes longer
//! than this program's whole check.

mod documents;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};

const USAGE: &str = "\
usage: deploy/style-report --check [--root FOLDER]
  Lists what documents name that does not exist, and broken links, as `path:line name`. Status 1
  if there are any.";

/// Folders without hand-written files.
const SKIPPED_FOLDERS: [&str; 3] = ["target", ".git", "out"];

/// Returns the folder to check.
fn parse_options(mut arguments: impl Iterator<Item = String>) -> anyhow::Result<PathBuf> {
    let mut root = PathBuf::from(".");
    let mut check = false;
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--check" => check = true,
            "--root" => root = arguments.next().context("--root needs a value")?.into(),
            "-h" | "--help" => bail!(USAGE),
            _ => bail!("no option `{argument}`\n{USAGE}"),
        }
    }
    if !check {
        bail!(USAGE);
    }
    Ok(root)
}

/// Paths of all files below `root`, relative to it.
fn list_files(root: &Path) -> anyhow::Result<Vec<String>> {
    let mut found = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let absolute = root.join(&folder);
        let entries =
            std::fs::read_dir(&absolute).with_context(|| absolute.display().to_string())?;
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let kind = entry.file_type()?;
            if kind.is_dir() && !SKIPPED_FOLDERS.contains(&name.as_str()) {
                folders.push(folder.join(name));
            } else if kind.is_file() {
                found.push(folder.join(name).to_string_lossy().into_owned());
            }
        }
    }
    found.sort();
    Ok(found)
}

fn run() -> anyhow::Result<ExitCode> {
    let root = parse_options(std::env::args().skip(1))?;
    let found = documents::check_documents(&root, &list_files(&root)?);
    for place in &found {
        println!("{}:{} {}", place.path, place.line, place.name);
    }
    Ok(if found.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn main() -> ExitCode {
    run().unwrap_or_else(|error| {
        eprintln!("{error:#}");
        ExitCode::from(2)
    })
}
