//! GASNet's conduit for InfiniBand (ibv), in the library that Debian unstable has. Its processes exchange the LIDs and
//! numbers of their queue pairs.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::Daemon;
use crate::common::programs::{Program, is_installed, received_bytes};

/// Stands in for ssh(1) and runs the command here. Hosts are called by the device that their processes use.
const SHELL: &str = r#"#!/bin/sh
while :; do
    case $1 in
    -o) shift 2 ;;
    -*) shift ;;
    *) break ;;
    esac
done
GASNET_IBV_PORTS=$1
export GASNET_IBV_PORTS
shift
exec sh -c "$*"
"#;

/// The folder that has the packages of GASNet, with the library hwloc of this machine's suite in `hwloc`.
fn find_packages() -> Option<PathBuf> {
    const RUNNER: &str = "gasnetrun_ibv";
    if !is_installed(RUNNER, "nothing; deploy/programs unpacks it") || !is_installed("cc", "gcc") {
        return None;
    }
    let found = Command::new("which").arg(RUNNER).output().unwrap();
    let path = String::from_utf8(found.stdout).unwrap();
    let path = Path::new(path.trim()).canonicalize().unwrap();
    Some(path.ancestors().nth(3).unwrap().to_owned())
}

/// Compiles the program of the job against the conduit's static library.
fn compile(daemon: &Daemon, packages: &Path) -> PathBuf {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs");
    let program = daemon.dir.path().join("gasnet_transfers");
    let headers = packages.join("usr/include/x86_64-linux-gnu");
    let libraries = packages.join("usr/lib/x86_64-linux-gnu");
    let hwloc = packages.join("hwloc/usr/lib/x86_64-linux-gnu");
    let out = Command::new("cc")
        .args(["-O1", "-Wall", "-Wextra", "-Werror"])
        .args(["-D_GNU_SOURCE=1", "-D_REENTRANT", "-DGASNET_SEQ"])
        .arg("-isystem")
        .arg(&headers)
        .arg("-isystem")
        .arg(headers.join("ibv-conduit"))
        .arg("-o")
        .arg(&program)
        .args(["gasnet_transfers.c", "gasnet_stubs.c"].map(|name| sources.join(name)))
        .arg(libraries.join("libgasnet-ibv-seq.a"))
        .arg("-libverbs")
        .arg(hwloc.join("libhwloc.so.15"))
        .arg(format!("-Wl,-rpath,{}", hwloc.display()))
        .args(["-lpthread", "-lm"])
        .output()
        .unwrap();
    assert!(out.status.success(), "{out:?}");
    program
}

/// Writes the stand-in for ssh(1).
fn write_shell(daemon: &Daemon) -> PathBuf {
    let shell = daemon.dir.path().join("shell");
    std::fs::write(&shell, SHELL).unwrap();
    std::fs::set_permissions(&shell, std::fs::Permissions::from_mode(0o755)).unwrap();
    shell
}

#[test]
#[ignore = "a package of Debian unstable: deploy/programs unpacks it and runs the test"]
fn processes_transfer_by_the_ibv_conduit() {
    let Some(packages) = find_packages() else {
        return;
    };
    let daemon = Daemon::loopback();
    let program = compile(&daemon, &packages);
    let shell = write_shell(&daemon);
    // No shared memory between processes, and no attempt to register all memory of the machine, which takes long.
    let line = |options: &str, variables: &str, count: u32| {
        format!(
            "{options} --persona ib env GASNET_SSH_CMD={} GASNET_SSH_SERVERS=siw0,siw1 GASNET_MASTERIP=127.0.0.1 \
             GASNET_HOST_DETECT=hostname GASNET_SUPERNODE_MAXSIZE=1 GASNET_PHYSMEM_MAX=1G {variables} \
             gasnetrun_ibv -spawner=ssh -n {count} {}",
            shell.display(),
            program.display()
        )
    };
    let received = || ["siw0", "siw1"].map(|device| received_bytes(&daemon, device));
    for (variables, count) in [
        ("", 2),
        ("", 4),
        // Queue pairs are connected by datagrams, at the first use.
        ("GASNET_CONNECT_STATIC=0", 4),
        // Threads wait for completion events.
        ("GASNET_RCV_THREAD=1 GASNET_SND_THREAD=1", 2),
        ("GASNET_NUM_QPS=4", 2),
    ] {
        let before = received();
        let said = Program::start(&daemon, &line("", variables, count)).succeed();
        for rank in 0..count {
            let expected = format!("rank {rank} of {count} is right");
            assert!(said.contains(&expected), "{variables}: {said}");
        }
        for (before, after) in before.into_iter().zip(received()) {
            assert!(after - before > 32 << 20, "{before} to {after} bytes");
        }
    }
    let (status, said) = Program::start(&daemon, &line("--faults disconnected", "", 2)).finish();
    assert!(!status.success(), "{said}");
    assert!(said.contains("aborting on reap of failed"), "{said}");
}
