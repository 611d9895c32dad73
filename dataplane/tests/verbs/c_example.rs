//! The C examples against the daemon: messages and memory, shared receive queues, queue pair
//! states.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::Daemon;

/// Builds an example against the header and the shared library; None without a compiler.
fn build(name: &str, temp: &Path) -> Option<PathBuf> {
    let found = Command::new("cc").arg("--version").output();
    if !found.is_ok_and(|output| output.status.success()) {
        println!("skipped: no C compiler (cc) on this machine");
        return None;
    }
    let client_lib = Path::new(env!("CARGO_MANIFEST_DIR")).join("../client-lib");
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(client_lib.join("include"));
    // The test runs from target/PROFILE/deps; the shared library is built next to it.
    let exe = std::env::current_exe().unwrap();
    let deps = exe.parent().unwrap();
    let lib = [deps.to_path_buf(), deps.parent().unwrap().to_path_buf()]
        .into_iter()
        .find(|d| d.join("libsiw.so").exists())
        .expect("cargo builds libsiw.so with the tests");
    let bin = temp.join(name);
    let out = cc
        .arg(client_lib.join(format!("examples/{name}.c")))
        .arg("-o")
        .arg(&bin)
        .arg("-L")
        .arg(&lib)
        .arg(format!("-Wl,-rpath,{}", lib.display()))
        .arg("-lsiw")
        .output()
        .unwrap();
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
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
