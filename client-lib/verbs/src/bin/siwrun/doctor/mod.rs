//! `siwrun doctor PROGRAM` reports before a program is run which parts of it will not work on siwd,
//! from its ELF file alone: nothing is started.
//!
//! | file | what it is |
//! |---|---|
//! | `archive.rs` | the ELF files in a wheel |
//! | `elf_file.rs` | needed libraries, symbols and versions of a file |
//! | `unsupported.rs` | exported functions that always fail |
//! | `examine.rs` | the comparison and its findings |

mod archive;
mod elf_file;
mod examine;
mod unsupported;

use archive::{for_each_elf_file, is_archive, is_wheel};
use clap::Parser;
use elf_file::{ElfFile, is_elf};
use examine::{DropIn, Finding, Severity, examine, is_about_rdma, is_rdma_library};
use serde::Serialize;
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs, io};

/// Reports the parts of a program that will not work on siwd, without running it. The exit code is
/// 0 if no problem was found, 1 if a part will not work, 2 if a file cannot be read.
#[derive(Parser)]
#[command(name = "siwrun doctor")]
struct DoctorArguments {
    /// Writes JSON.
    #[arg(long)]
    json: bool,
    /// A program, library, script, wheel or other zip archive, or a folder of these.
    program: PathBuf,
}

/// Findings of one file.
#[derive(Serialize)]
struct Report {
    path: PathBuf,
    findings: Vec<Finding>,
}

impl Report {
    /// Creates a report with the findings sorted by severity, the worst first.
    fn new(path: &Path, mut findings: Vec<Finding>) -> Report {
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        Report {
            path: path.to_path_buf(),
            findings,
        }
    }
}

/// Printed at the end, so that a report without findings is not taken for a guarantee.
const LIMITS: &str = "Not visible in a file: the QP types (UD, XRC) and access flags that a program uses, calls that headers\n\
                      make by the device's table of functions, and libraries that it loads while it runs.";

/// Looks up a bare name as execvp(3) does.
fn find_program(program: &Path) -> Result<PathBuf, String> {
    if program.components().count() > 1 || program.exists() {
        return Ok(program.to_path_buf());
    }
    let folders = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&folders)
        .map(|folder| folder.join(program))
        .find(|path| path.is_file())
        .ok_or_else(|| format!("{} was not found in PATH", program.display()))
}

fn read_file(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))
}

fn parse_file(path: &Path, data: &[u8], machine: Option<u16>) -> Result<ElfFile, String> {
    ElfFile::parse(data, machine).map_err(|why| format!("cannot examine {}: {why}", path.display()))
}

/// Interpreter named in the first line of a script, following `env`.
fn interpreter_of(data: &[u8]) -> Option<PathBuf> {
    let line = data
        .strip_prefix(b"#!")?
        .split(|byte| *byte == b'\n')
        .next()?;
    let line = String::from_utf8_lossy(line);
    let mut words = line.split_whitespace();
    let first = Path::new(words.next()?);
    let is_env = first.file_name() == Some(OsStr::new("env"));
    let named = words.find(|word| is_env && !word.starts_with('-'));
    Some(named.map_or_else(|| first.to_path_buf(), PathBuf::from))
}

/// Finds setuid and similar programs: ld.so ignores LD_PRELOAD for a program with other privileges
/// than its caller's.
fn find_other_rights(path: &Path, findings: &mut Vec<Finding>) -> io::Result<()> {
    let metadata = fs::metadata(path)?;
    let mode = metadata.permissions().mode();
    let own_user = rustix::process::getuid().as_raw();
    let own_group = rustix::process::getgid().as_raw();
    let changes_user = mode & 0o4000 != 0 && metadata.uid() != own_user;
    let changes_group = mode & 0o2010 == 0o2010 && metadata.gid() != own_group;
    let has_capabilities =
        own_user != 0 && rustix::fs::getxattr(path, "security.capability", &mut [0u8; 64]).is_ok();
    if changes_user || changes_group || has_capabilities {
        findings.push(Finding::new(
            Severity::Fatal,
            "it is setuid, setgid, or has file capabilities",
            "ld.so then ignores LD_PRELOAD and LD_LIBRARY_PATH",
            "run a copy without them (cp drops them), or run siwrun as the user that it switches to",
        ));
    }
    Ok(())
}

fn examine_file(path: &Path, data: &[u8], library: &DropIn) -> Result<Report, String> {
    let file = parse_file(path, data, Some(library.machine))?;
    let mut findings = examine(&file, data, library);
    if file.has_interpreter {
        find_other_rights(path, &mut findings).map_err(|error| {
            format!("cannot read the permissions of {}: {error}", path.display())
        })?;
    }
    Ok(Report::new(path, findings))
}

/// Folders in which ld.so looks for libraries of this machine, after RUNPATH and LD_LIBRARY_PATH.
const LIBRARY_FOLDERS: [&str; 5] = [
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/usr/local/lib",
];

/// Finds a needed library of a file in the folders that ld.so searches.
fn find_needed(name: &str, file: &ElfFile, path: &Path) -> Option<PathBuf> {
    let origin = fs::canonicalize(path).ok()?.parent()?.to_path_buf();
    let origin = origin.to_string_lossy();
    let own = file.search_path.clone().unwrap_or_default();
    let own = own
        .replace("$ORIGIN", &origin)
        .replace("${ORIGIN}", &origin);
    let given = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    env::split_paths(&own)
        .chain(env::split_paths(&given))
        .chain(LIBRARY_FOLDERS.map(PathBuf::from))
        .map(|folder| folder.join(name))
        .find(|candidate| candidate.is_file())
}

/// Examines the libraries that a file needs, recursively, and reports those related to RDMA. `seen`
/// has the names of examined libraries.
fn examine_needed(
    path: &Path,
    data: &[u8],
    library: &DropIn,
    seen: &mut BTreeSet<String>,
    all: &mut Vec<Report>,
) -> Result<(), String> {
    let file = parse_file(path, data, Some(library.machine))?;
    for name in &file.needed {
        if is_rdma_library(name) || !seen.insert(name.clone()) {
            continue;
        }
        let Some(found) = find_needed(name, &file, path) else {
            continue;
        };
        let data = read_file(&found)?;
        if is_about_rdma(&data) {
            all.push(examine_file(&found, &data, library)?);
        }
        examine_needed(&found, &data, library, seen, all)?;
    }
    Ok(())
}

/// Examines a program or library with the libraries that it needs; for a script, the interpreter.
fn examine_program(path: &Path, library: &DropIn, all: &mut Vec<Report>) -> Result<(), String> {
    let data = read_file(path)?;
    if is_archive(&data) {
        return examine_archive(path, &data, library, all);
    }
    let Some(interpreter) = interpreter_of(&data) else {
        all.push(examine_file(path, &data, library)?);
        return examine_needed(path, &data, library, &mut BTreeSet::new(), all);
    };
    let interpreter = find_program(&interpreter)?;
    let data = read_file(&interpreter)?;
    let mut report = examine_file(&interpreter, &data, library)?;
    report.findings.push(Finding::new(
        Severity::Note,
        format!(
            "{} is a script of {}",
            path.display(),
            interpreter.display()
        ),
        "the interpreter was examined; the modules that it loads are not visible in it",
        "also run siwrun doctor on the folder of its packages",
    ));
    all.push(report);
    examine_needed(&interpreter, &data, library, &mut BTreeSet::new(), all)
}

/// Examines every ELF file in an archive that is related to RDMA.
fn examine_archive(
    path: &Path,
    data: &[u8],
    library: &DropIn,
    all: &mut Vec<Report>,
) -> Result<(), String> {
    for_each_elf_file(path, data, |inner, data| {
        if is_about_rdma(data) {
            let file = parse_file(inner, data, Some(library.machine))?;
            all.push(Report::new(inner, examine(&file, data, library)));
        }
        Ok(())
    })
}

/// Examines every ELF file below a folder, or in a wheel there, that is related to RDMA. Symbolic
/// links are not followed.
fn examine_folder(folder: &Path, library: &DropIn, all: &mut Vec<Report>) -> Result<(), String> {
    let explain = |error: io::Error| format!("cannot read {}: {error}", folder.display());
    let entries: io::Result<Vec<_>> = fs::read_dir(folder).map_err(explain)?.collect();
    let mut entries = entries.map_err(explain)?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let kind = entry.file_type().map_err(explain)?;
        let path = entry.path();
        if kind.is_dir() {
            examine_folder(&path, library, all)?;
        } else if kind.is_file() && is_wheel(&path) {
            examine_archive(&path, &read_file(&path)?, library, all)?;
        } else if kind.is_file() {
            let data = read_file(&path)?;
            if is_elf(&data) && is_about_rdma(&data) {
                all.push(examine_file(&path, &data, library)?);
            }
        }
    }
    Ok(())
}

fn print_text(reports: &[Report], is_fine: bool) {
    for report in reports {
        println!("{}", report.path.display());
        for finding in &report.findings {
            let mark = match finding.severity {
                Severity::Fatal => "WILL NOT WORK",
                Severity::Partial => "fails in part",
                Severity::Note => "note",
            };
            println!("  {mark}: {}", finding.what);
            println!("    why: {}", finding.why);
            println!("    do:  {}", finding.advice);
        }
    }
    let verdict = if is_fine {
        "No problem was found."
    } else {
        "Parts of this will not work on siwd: see above."
    };
    println!("{verdict}\n{LIMITS}");
}

fn diagnose(arguments: &DoctorArguments, library: &Path) -> Result<bool, String> {
    let data = read_file(library)?;
    let library = DropIn::new(parse_file(library, &data, None)?);
    let program = find_program(&arguments.program)?;
    let mut reports = Vec::new();
    if program.is_dir() {
        examine_folder(&program, &library, &mut reports)?;
    } else {
        examine_program(&program, &library, &mut reports)?;
    }
    if reports.is_empty() {
        return Err(format!(
            "{} has no ELF files that contain the name libibverbs or librdmacm",
            program.display()
        ));
    }
    let mut findings = reports.iter().flat_map(|report| &report.findings);
    let is_fine = findings.all(|finding| finding.severity == Severity::Note);
    if arguments.json {
        let document = serde_json::json!({ "works": is_fine, "files": reports });
        println!("{document:#}");
    } else {
        print_text(&reports, is_fine);
    }
    Ok(is_fine)
}

/// Runs the doctor. `words` is the command line from `doctor` on.
pub fn run(words: Vec<OsString>, library: &Path) -> ExitCode {
    match diagnose(&DoctorArguments::parse_from(words), library) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(reason) => {
            eprintln!("siwrun doctor: {reason}");
            ExitCode::from(2)
        }
    }
}
