//! The C example against the daemon: a WRITE, a READ and a SEND from a C program.

mod common;

use std::path::Path;
use std::process::Command;

use common::Daemon;

#[test]
fn the_c_example_runs_between_two_devices() {
    let found = Command::new("cc").arg("--version").output();
    if !found.is_ok_and(|o| o.status.success()) {
        println!("skipped: no C compiler (cc) on this machine");
        return;
    }
    let client_lib = Path::new(env!("CARGO_MANIFEST_DIR")).join("../client-lib");
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(client_lib.join("include"));
    // The test runs from target/PROFILE/deps; the shared library is built beside it.
    let exe = std::env::current_exe().unwrap();
    let deps = exe.parent().unwrap();
    let lib = [deps.to_path_buf(), deps.parent().unwrap().to_path_buf()]
        .into_iter()
        .find(|d| d.join("libsiw.so").exists())
        .expect("cargo builds libsiw.so with the tests");
    let temp = tempfile::tempdir().unwrap();
    let bin = temp.path().join("ping");
    let out = cc
        .arg(client_lib.join("examples/ping.c"))
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
    let d = Daemon::loopback();
    let out = Command::new(&bin).arg(&d.socket).output().unwrap();
    assert_eq!(
        (
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr)
        ),
        ("ok\n".into(), "".into())
    );
    let out = Command::new(&bin)
        .arg(temp.path().join("nobody"))
        .output()
        .unwrap();
    let err = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(
        !out.status.success() && err.contains("cannot reach siwd"),
        "{err}"
    );
}
