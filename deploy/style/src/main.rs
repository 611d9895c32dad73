//! Counts properties of this repository's Rust code that affect readability: names, comments,
//! documentation, import cycles and lengths. The counts have no limits. Checks names and links in
//! documents.
//!
//! `deploy/style-report` builds and runs it. Only non-test code is counted: no `#[cfg(test)]`
//! items, no `tests/`, `benches/` or `examples/` of a crate, no fuzz crates. Long files and the
//! language of comments are counted everywhere.

mod comments;
mod counts;
mod documents;
mod imports;
mod language;
mod report;
mod source;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, anyhow, bail};
use report::{Metric, StyleReport};

const USAGE: &str = "\
usage: deploy/style-report [OPTIONS]
  --json           the table as JSON
  --list METRIC    every finding as `path:line name`; METRIC is one of
                   bindings, functions, comments, docs, type-names, conventional-type-names,
                   circles, long-files, long-test-files, long-functions, documents, words,
                   openings
  --crate CRATE    only this crate, by folder (tcp/drill) or package name (siw-drill)
  --check          fails if a document names something that does not exist or has a broken link
  --rev REVISION   the code of that git revision instead of the working tree
  --root FOLDER    the code in that folder";

struct ReportOptions {
    json: bool,
    check: bool,
    list: Option<Metric>,
    krate: Option<String>,
    revision: Option<String>,
    root: PathBuf,
}

fn parse_options(mut arguments: impl Iterator<Item = String>) -> anyhow::Result<ReportOptions> {
    let mut options = ReportOptions {
        json: false,
        check: false,
        list: None,
        krate: None,
        revision: None,
        root: PathBuf::from("."),
    };
    while let Some(argument) = arguments.next() {
        let mut value = || {
            arguments
                .next()
                .with_context(|| format!("{argument} needs a value\n{USAGE}"))
        };
        match argument.as_str() {
            "--json" => options.json = true,
            "--check" => options.check = true,
            "--list" => {
                let name = value()?;
                let metric = Metric::from_name(&name);
                options.list =
                    Some(metric.with_context(|| format!("no metric `{name}`\n{USAGE}"))?);
            }
            "--crate" => options.krate = Some(value()?),
            "--rev" => options.revision = Some(value()?),
            "--root" => options.root = PathBuf::from(value()?),
            "-h" | "--help" => bail!(USAGE),
            _ => bail!("no option `{argument}`\n{USAGE}"),
        }
    }
    Ok(options)
}

/// A checkout of the repository at one revision, removed when dropped.
struct Checkout(PathBuf);

impl Checkout {
    fn new(repository: &Path, revision: &str) -> anyhow::Result<Checkout> {
        let folder = std::env::temp_dir().join(format!("style-report.{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        let checkout = Checkout(folder);
        let archive = checkout.0.join("archive.tar");
        let run = |command: &mut Command| match command.status() {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(anyhow!("{command:?} failed: {status}")),
            Err(error) => Err(anyhow!("{command:?} failed: {error}")),
        };
        let mut git = Command::new("git");
        git.arg("-C").arg(repository).args(["archive", "--output"]);
        run(git.arg(&archive).arg(revision))?;
        run(Command::new("tar")
            .arg("-xf")
            .arg(&archive)
            .arg("-C")
            .arg(&checkout.0))?;
        std::fs::remove_file(&archive)?;
        Ok(checkout)
    }
}

impl Drop for Checkout {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn run(options: &ReportOptions) -> anyhow::Result<ExitCode> {
    let checkout = match &options.revision {
        Some(revision) => Some(Checkout::new(&options.root, revision)?),
        None => None,
    };
    let root = checkout
        .as_ref()
        .map_or(options.root.as_path(), |checkout| &checkout.0);
    let report = StyleReport::measure(root)?;
    if let Some(krate) = &options.krate
        && !report.has_crate(krate)
    {
        bail!("no crate `{krate}` here");
    }
    let krate = options.krate.as_deref();
    let output = match options.list {
        Some(metric) => report.list_findings(metric, krate),
        None if options.json => format!("{}\n", report.to_json(krate)),
        None if options.check => report.list_findings(Metric::Documents, krate),
        None => report.to_table(krate),
    };
    // A pipe reader like `head` may close the pipe early.
    let _ = std::io::stdout().write_all(output.as_bytes());
    Ok(if options.check && !output.is_empty() {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

fn main() -> ExitCode {
    let result = parse_options(std::env::args().skip(1)).and_then(|options| run(&options));
    result.unwrap_or_else(|error| {
        eprintln!("{error:#}");
        ExitCode::from(2)
    })
}
