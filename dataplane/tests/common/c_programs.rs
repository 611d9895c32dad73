//! C programs of tests, compiled against the drop-in library.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::programs::{Program, is_installed};
use super::{Daemon, siwrun};

/// Compiles a C program with the flags of pkg-config. Returns its path and the folder of the
/// libraries.
pub fn compile(daemon: &Daemon, source: &Path) -> (PathBuf, PathBuf) {
    compile_with(daemon, source, &[])
}

/// As [`compile`], with flags that come first.
pub fn compile_with(daemon: &Daemon, source: &Path, first: &[String]) -> (PathBuf, PathBuf) {
    let folder = daemon.dir.path().join("links");
    let made = Command::new(siwrun())
        .arg("--links")
        .arg(&folder)
        .arg("--print-links")
        .status()
        .unwrap();
    assert!(made.success());
    let program = daemon.dir.path().join("program");
    let flags = Command::new("pkg-config")
        .args(["--cflags", "--libs", "libibverbs", "librdmacm"])
        .env("PKG_CONFIG_PATH", folder.join("pkgconfig"))
        .output()
        .unwrap();
    assert!(flags.status.success(), "{flags:?}");
    let flags = String::from_utf8(flags.stdout).unwrap();
    let compiled = Command::new("cc")
        .args(first)
        .args(["-Wall", "-Wextra", "-Werror", "-pthread", "-o"])
        .arg(&program)
        .arg(source)
        .args(flags.split_whitespace())
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{compiled:?}");
    (program, folder)
}

/// Whether gcc and pkg-config are installed.
pub fn can_compile() -> bool {
    is_installed("cc", "gcc") && is_installed("pkg-config", "pkg-config")
}

/// Runs a program of `tests/programs` with arguments on a daemon of its own; it has to say "done".
pub fn run_to_done(name: &str, arguments: &str) {
    if can_compile() {
        run("", name, arguments);
    }
}

/// As [`run_to_done`], with a persona. Returns the output.
pub fn run_to_done_as(persona: &str, name: &str) -> String {
    run(&format!("--persona {persona}"), name, "")
}

fn run(options: &str, name: &str, arguments: &str) -> String {
    let daemon = Daemon::loopback();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/programs/{name}.c"));
    let (program, _) = compile(&daemon, &source);
    let line = format!("{options} {} {arguments}", program.display());
    let said = Program::start(&daemon, &line).succeed();
    assert!(said.contains("done"), "{said}");
    said
}
