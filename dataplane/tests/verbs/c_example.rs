//! The C examples against the daemon: messages and memory, shared receive queues, queue pair
//! states.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{Daemon, c_library};

/// Builds an example of the client library; see [`build_program`].
fn build(name: &str, temp: &Path) -> Option<PathBuf> {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../client-lib/examples");
    build_program(&examples.join(format!("{name}.c")), temp)
}

/// Builds a program against the installed library; None without a compiler.
fn build_program(source: &Path, temp: &Path) -> Option<PathBuf> {
    let found = Command::new("cc").arg("--version").output();
    if !found.is_ok_and(|output| output.status.success()) {
        println!("skipped: no C compiler (cc) on this machine");
        return None;
    }
    let client_lib = Path::new(env!("CARGO_MANIFEST_DIR")).join("../client-lib");
    let installed = Command::new(client_lib.join("install"))
        .arg("--build")
        .arg(c_library())
        .arg(temp)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&installed.stderr);
    assert!(installed.status.success(), "{said}");
    let config = std::fs::read_to_string(temp.join("lib/pkgconfig/siw.pc")).unwrap();
    let flags = |key: &str| {
        let line = config.lines().find_map(|line| line.strip_prefix(key));
        let prefix = temp.to_str().unwrap();
        let words = line.unwrap().split_whitespace();
        let words = words.map(|word| {
            let word = word.replace("${includedir}", &format!("{prefix}/include"));
            word.replace("${libdir}", &format!("{prefix}/lib"))
        });
        words.collect::<Vec<String>>()
    };
    let bin = temp.join("program");
    let out = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror"])
        .args(flags("Cflags: "))
        .arg(source)
        .arg("-o")
        .arg(&bin)
        .args(flags("Libs: "))
        .arg(format!("-Wl,-rpath,{}/lib", temp.display()))
        .output()
        .unwrap();
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    let symbols = Command::new("nm").arg("-D").arg(&bin).output().unwrap();
    let symbols = String::from_utf8_lossy(&symbols.stdout);
    assert!(symbols.contains("siw_open@libsiw.so.0"), "{symbols}");
    Some(bin)
}

/// Removes LD_LIBRARY_PATH: cargo's value may contain an older library than the one linked to.
fn program(bin: &Path) -> Command {
    let mut command = Command::new(bin);
    command.env_remove("LD_LIBRARY_PATH");
    command
}

fn says_ok(bin: &Path, daemon: &Daemon) {
    let out = program(bin).arg(&daemon.socket).output().unwrap();
    assert_eq!(
        (
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr)
        ),
        ("ok\n".into(), "".into())
    );
}

#[test]
fn the_c_example_runs_between_two_devices() {
    let temp = tempfile::tempdir().unwrap();
    let Some(bin) = build("ping", temp.path()) else {
        return;
    };
    says_ok(&bin, &Daemon::loopback());
    let out = program(&bin)
        .arg(temp.path().join("nobody"))
        .output()
        .unwrap();
    let err = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(
        !out.status.success() && err.contains("cannot reach siwd"),
        "{err}"
    );
}

#[test]
fn a_c_program_shares_a_receive_queue_and_drains_its_send_queue() {
    let temp = tempfile::tempdir().unwrap();
    if let Some(bin) = build("shared", temp.path()) {
        says_ok(&bin, &Daemon::loopback());
    }
}

#[test]
fn a_c_program_uses_atomics_windows_and_fast_registration() {
    let temp = tempfile::tempdir().unwrap();
    let Some(bin) = build("windows", temp.path()) else {
        return;
    };
    says_ok(&bin, &Daemon::loopback());
}

#[test]
fn a_c_program_sends_datagrams_to_a_host_and_to_a_group() {
    let temp = tempfile::tempdir().unwrap();
    if let Some(bin) = build("datagrams", temp.path()) {
        says_ok(&bin, &Daemon::loopback());
    }
}

#[test]
fn a_c_program_finds_a_datagram_service_and_sends_to_it() {
    let temp = tempfile::tempdir().unwrap();
    if let Some(bin) = build("services", temp.path()) {
        says_ok(&bin, &Daemon::loopback());
    }
}

/// realloc(3) grows a block by mremap(2), also in a program that may have pages pinned.
#[test]
fn blocks_of_c_programs_are_private_after_their_registration() {
    let temp = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/verbs/returned_blocks.c");
    let Some(bin) = build_program(&source, temp.path()) else {
        return;
    };
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let daemon = Daemon::loopback();
    let mut command = program(&bin);
    let out = command.arg(&daemon.socket).arg(file.path()).output();
    let out = out.unwrap();
    assert!(out.status.success(), "{out:?}");
    println!("{}", String::from_utf8_lossy(&out.stdout));
}
