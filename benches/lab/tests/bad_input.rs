//! Wrong input and missing targets: a message that names the fault, and exit status 2.

use std::path::Path;
use std::process::{Command, Output, Stdio};

const LAB: &str = env!("CARGO_BIN_EXE_siw-lab");

fn lab(folder: &Path, line: &str) -> Output {
    Command::new(LAB)
        .current_dir(folder)
        .args(line.split_whitespace())
        .output()
        .unwrap()
}

#[track_caller]
fn refuses(got: &Output, message: &str) {
    let said = String::from_utf8_lossy(&got.stderr);
    let code = got.status.code();
    assert!(
        code == Some(2) && said.contains(message),
        "{code:?}: {said}"
    );
}

#[test]
fn a_wrong_command_line_is_refused() {
    let lines = [
        ("run", "no target"),
        ("run --target 10.0.0.9", "--interface is missing"),
        (
            "run --target 10.0.0.9 --interface nonesuch0 --address 10.0.0.8",
            "interface nonesuch0 does not exist",
        ),
        (
            "run --target 8.8.8.8 --interface lo --address 10.0.0.8",
            "not a private address",
        ),
        (
            "run --target 10.0.0.9 --interface lo --address 127.0.0.1",
            "belongs to this machine",
        ),
        (
            "run --via reference --case XYZ-1",
            "case XYZ-1 does not exist",
        ),
        (
            "run --via reference --group xyz",
            "group xyz does not exist",
        ),
        (
            "run --via reference --level never",
            "level never does not exist",
        ),
        (
            "run --via reference --expect /nonesuch.toml",
            "cannot read /nonesuch.toml",
        ),
        (
            "run --target 10.0.0.9 --interface lo --address fd00::8",
            "different address families",
        ),
        (
            "run --target 2001:db8::1 --interface lo --address fd00::8",
            "not a private address",
        ),
        ("run --target 10.0.0.9 --ipv6", "--ipv6 is for --via"),
        ("run --via reference --link tap", "--link is for --via siwd"),
        (
            "run --via siwd --siwd /nonesuch",
            "/nonesuch does not exist",
        ),
        (
            "run --via reference --agent 10.0.0.9:7470",
            "--agent is for a target with RDMA verbs",
        ),
        ("run --target 300.1.1.1", "invalid value"),
        ("explain XYZ-1", "case XYZ-1 does not exist"),
        ("check-cases /nonesuch", "cannot read /nonesuch"),
        ("replay /nonesuch", "cannot read /nonesuch/run.json"),
        (
            "compare /nonesuch /nonesuch",
            "cannot read /nonesuch/run.json",
        ),
        ("matrix /nonesuch", "cannot read /nonesuch"),
        ("matrix .", "no folder with a run.json below ."),
        ("check /nonesuch", "cannot read /nonesuch"),
    ];
    let folder = tempfile::tempdir().unwrap();
    for (line, message) in lines {
        refuses(&lab(folder.path(), line), message);
    }
}

#[test]
fn wrong_files_are_refused_by_name_and_line() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write(
        "X-1.case",
        "case X-1 \"t\"\nrfc 1 2 MUST \"s\"\nsend wrote\nwant close\n",
    );
    let message = "X-1.case:3: send wrote is unknown";
    refuses(&lab(folder.path(), "check-cases X-1.case"), message);
    refuses(
        &lab(folder.path(), "run --via reference --cases ."),
        message,
    );

    write("text.pcapng", "This is no capture.");
    refuses(
        &lab(folder.path(), "check text.pcapng"),
        "text.pcapng is no capture",
    );
    write("cut.pcapng", "\n\r\r\n");
    refuses(
        &lab(folder.path(), "check cut.pcapng"),
        "cut.pcapng is no capture",
    );

    write("peer.toml", "peer = 1");
    let line = "run --via reference --expect peer.toml";
    refuses(&lab(folder.path(), line), "peer.toml has an error");

    std::fs::create_dir(folder.path().join("run")).unwrap();
    write("run/run.json", "{\"version\": 77}");
    refuses(&lab(folder.path(), "replay run"), "has version 77");
    write("run/run.json", "version");
    refuses(&lab(folder.path(), "compare run run"), "is no report");
}

/// Runs a script in a network namespace of its own with the interfaces `lab0` and `there0`, connected to
/// each other. `None`: the machine has no namespaces.
fn in_namespace(folder: &Path, script: &str) -> Option<Output> {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: namespaces need root");
        return None;
    }
    let links = "ip link add lab0 type veth peer name there0 2>/dev/null || exit 77
        ip link set lab0 up arp off && ip link set there0 up && ip address add 10.9.0.1/24 dev there0";
    let got = Command::new("unshare")
        .args(["--net", "sh", "-c", &format!("{links}\n{script}")])
        .env("LAB", LAB)
        .current_dir(folder)
        .output();
    match got {
        Ok(got) if got.status.code() != Some(77) => Some(got),
        _ => {
            println!("skipped: no network namespace, or no veth pair");
            None
        }
    }
}

#[test]
fn an_absent_target_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let script = "$LAB run --target 10.9.0.99 --interface lab0 --address 10.9.0.2";
    if let Some(got) = in_namespace(folder.path(), script) {
        refuses(&got, "10.9.0.99 does not answer ARP");
    }
}

#[test]
fn a_target_without_rping_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let script = "$LAB run --target 10.9.0.1 --interface lab0 --address 10.9.0.2 --patience 1";
    if let Some(got) = in_namespace(folder.path(), script) {
        refuses(&got, "it has to run `rping -s -P -p 7174`");
    }
}

#[test]
fn a_link_that_is_down_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let script = "ip link set lab0 down
        $LAB run --target 10.9.0.1 --interface lab0 --address 10.9.0.2";
    if let Some(got) = in_namespace(folder.path(), script) {
        refuses(&got, "interface lab0 is down");
    }
}

#[test]
fn a_missing_permission_is_told() {
    // The program is copied to where another user reaches it.
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("siw-lab");
    std::fs::copy(LAB, &copy).unwrap();
    let everybody = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(folder.path(), everybody).unwrap();
    let script = "setpriv --reuid 65534 --regid 65534 --clear-groups \\
        ./siw-lab run --target 10.9.0.1 --interface lab0 --address 10.9.0.2";
    if let Some(got) = in_namespace(folder.path(), script) {
        refuses(&got, "run as root or with CAP_NET_RAW");
    }
}

#[test]
fn a_reader_that_has_seen_enough_ends_the_program_quietly() {
    let mut child = Command::new(LAB)
        .args(["list", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let out = child.wait_with_output().unwrap();
    let error = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && error.is_empty(), "{error}");
}
