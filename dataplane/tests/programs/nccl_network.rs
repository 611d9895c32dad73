//! NCCL's network layer for InfiniBand and RoCE (net_ib), in the libraries of the Python package index. It needs no
//! GPU for host memory: `nccl_net.c` calls it as NCCL does.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::Daemon;
use crate::common::programs::{Program, is_installed, received_bytes};
use crate::common::python::python_programs;

/// The library in the environment of these programs.
fn find_library(programs: &Path) -> PathBuf {
    let folders = std::fs::read_dir(programs.parent().unwrap().join("lib")).unwrap();
    folders
        .map(|folder| folder.unwrap().path())
        .map(|folder| folder.join("site-packages/nvidia/nccl/lib/libnccl.so.2"))
        .find(|library| library.is_file())
        .expect("the package has libnccl.so.2")
}

/// Compiles the program that calls the library. It is not linked with libibverbs, which NCCL loads.
fn compile(daemon: &Daemon) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/nccl_net.c");
    let program = daemon.dir.path().join("nccl_net");
    let out = Command::new("cc")
        .args(["-O1", "-Wall", "-Wextra", "-Werror", "-o"])
        .args([&program, &source])
        .output()
        .unwrap();
    assert!(out.status.success(), "{out:?}");
    program
}

/// A line that lets the processes transfer messages. Their handshakes go over the kernel's loopback.
fn line(program: &Path, library: &Path, options: &str, variables: &str) -> String {
    format!(
        "{options} env NCCL_SOCKET_IFNAME=lo NCCL_DEBUG=WARN {variables} {} {}",
        program.display(),
        library.display()
    )
}

/// Lets NCCL of a package transfer messages with each kind of device that it takes.
fn transfer_messages(package: &str) {
    if !is_installed("cc", "gcc") {
        return;
    }
    let Some(programs) = python_programs(&[package]) else {
        return;
    };
    let library = find_library(&programs);
    let daemon = Daemon::loopback();
    let program = compile(&daemon);
    let received = || ["siw0", "siw1"].map(|device| received_bytes(&daemon, device));
    for (persona, variables) in [
        ("roce", ""),
        (
            "roce",
            "NCCL_IB_QPS_PER_CONNECTION=4 NCCL_IB_SPLIT_DATA_ON_QPS=1",
        ),
        ("ib", ""),
        ("iwarp", ""),
    ] {
        let before = received();
        let options = format!("--persona {persona}");
        let line = line(&program, &library, &options, variables);
        let said = Program::start(&daemon, &line).succeed();
        assert!(said.contains("all messages are right"), "{said}");
        // NCCL names with a warning all that it does without.
        assert!(!said.contains("NCCL WARN"), "{said}");
        for (before, after) in before.into_iter().zip(received()) {
            assert!(after - before > 64 << 20, "{before} to {after} bytes");
        }
    }
    // NCCL's error 6 is that of its peer.
    let line = line(
        &program,
        &library,
        "--persona roce --faults disconnected",
        "",
    );
    let (status, said) = Program::start(&daemon, &line).finish();
    assert!(!status.success(), "{said}");
    assert!(
        said.contains("Got CQE with error") && said.contains("NCCL's error 6"),
        "{said}"
    );
}

#[test]
#[ignore = "a download of 290 MB: deploy/programs runs it"]
fn messages_of_nccl_2_30_arrive() {
    transfer_messages("nvidia-nccl-cu12==2.30.7");
}

#[test]
#[ignore = "a download of 340 MB: deploy/programs runs it"]
fn messages_of_the_newest_nccl_arrive() {
    transfer_messages("nvidia-nccl-cu12==2.32.3");
}
