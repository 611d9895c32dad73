//! `siwd --check` passes what a start accepts and refuses what a start refuses, with a status that
//! says whether the file or the machine is at fault.

use std::io::{BufRead, BufReader, Read};

use crate::common::net::{Netns, lacks_network};
use crate::common::*;

/// Exit statuses of `--check`.
const OK: i32 = 0;
const FILE: i32 = 1;
const MACHINE: i32 = 3;
const WARNINGS: i32 = 4;

const DPDK: &str = "[dpdk]\nhugepages = \"never\"\nbuffers = 4096\n";

/// A device with this link and further lines.
fn device(number: usize, link: &str) -> String {
    format!("[[device]]\nname = \"siw{number}\"\n{link}\naddresses = [\"10.78.{number}.1/24\"]\n")
}

fn one(link: &str) -> String {
    format!("{DPDK}{}", device(0, link))
}

fn two(first: &str, second: &str) -> String {
    format!("{DPDK}{}{}", device(0, first), device(1, second))
}

/// The loopback with another table in front.
fn with(table: &str) -> String {
    format!("{table}\n{LOOPBACK}").replace("[workers]\nidle = \"adaptive\"\n", "")
}

fn with_dpdk(lines: &str) -> String {
    LOOPBACK.replace("buffers = 4096", lines)
}

/// Runs `siwd` without the socket that tests usually give it.
fn siwd(config: &str, args: &[&str]) -> (tempfile::TempDir, std::process::Command) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("siwd.toml");
    let socket = dir.path().join("siwd.sock");
    let control = format!("[control]\nsocket = \"{}\"\n", socket.display());
    let text = match config.contains("[control]") {
        true => config.replace("SOCKET", &socket.display().to_string()),
        false => format!("{control}{config}"),
    };
    std::fs::write(&file, text).unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_siwd"));
    command.arg("--config").arg(file).args(args);
    (dir, command)
}

/// Starts a daemon and ends it; returns whether it became ready, and its log.
fn starts(config: &str) -> (bool, String) {
    let (_dir, mut command) = siwd(config, &["--log", "warn"]);
    let mut child = command
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let _ = stdout.read_line(&mut line);
    let ready = line.contains("siwd ready");
    if ready {
        let pid = nix::unistd::Pid::from_raw(child.id() as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    }
    let mut log = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut log)
        .unwrap();
    let _ = std::io::copy(&mut stdout, &mut std::io::sink());
    child.wait().unwrap();
    (ready, log)
}

/// Compares the check of each configuration with the expected status and with a start.
fn compare(cases: &[(&str, String, i32)]) {
    let mut wrong = Vec::new();
    for (name, config, expected) in cases {
        let (_dir, mut command) = siwd(config, &["--check", "--json"]);
        let out = command.output().unwrap();
        let stderr = String::from_utf8_lossy(&out.stderr);
        let json: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap_or_default();
        let (ready, log) = starts(config);
        let passes = matches!(*expected, OK | WARNINGS);
        if out.status.code() != Some(*expected) || json["ok"] != passes || ready != passes {
            wrong.push(format!(
                "{name}: expected {expected}, check {:?} {json} {stderr}, ready {ready} {log}",
                out.status.code()
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_check_agrees_with_a_start_about_the_daemon() {
    let long = format!("[control]\nsocket = \"/tmp/{}\"\n", "s".repeat(120));
    let ports: String = (0..33)
        .map(|number| device(number, &format!("devargs = \"net_null{number}\"")))
        .collect();
    let mut cases = vec![
        ("loopback", LOOPBACK.to_owned(), OK),
        ("many normal pages", with_dpdk("buffers = 20000"), OK),
        ("null", one("devargs = \"net_null0\""), OK),
        ("no buffers", with_dpdk("buffers = 0"), FILE),
        (
            "too many buffers",
            with_dpdk("buffers = 4000000000"),
            MACHINE,
        ),
        ("long socket", with(&long), FILE),
        ("empty socket", with("[control]\nsocket = \"\""), FILE),
        (
            "connections",
            with("[limits]\nconnections = 4000000000"),
            FILE,
        ),
        (
            "operators",
            with("[control]\nsocket = \"SOCKET\"\noperators = \"no-such\""),
            MACHINE,
        ),
        (
            "group",
            with("[control]\nsocket = \"SOCKET\"\ngroup = \"no-such\""),
            MACHINE,
        ),
        (
            "socket below a file",
            with("[control]\nsocket = \"/etc/passwd/s\""),
            MACHINE,
        ),
        (
            "socket is a file",
            with("[control]\nsocket = \"/etc/passwd\""),
            MACHINE,
        ),
        (
            "socket is a folder",
            with("[control]\nsocket = \"/tmp\""),
            MACHINE,
        ),
        (
            "socket in /proc",
            with("[control]\nsocket = \"/proc/nope/s\""),
            MACHINE,
        ),
        (
            "capture into a folder",
            with("[capture]\nfile = \"/tmp\""),
            MACHINE,
        ),
        (
            "capture nowhere",
            with("[capture]\nfile = \"/no/such/x\""),
            MACHINE,
        ),
        ("core", with("[workers]\ncores = [1000]"), MACHINE),
        (
            "core of no machine",
            with("[workers]\ncores = [5000]"),
            MACHINE,
        ),
        ("empty devargs", one("devargs = \"\""), FILE),
        ("unknown driver", one("devargs = \"net_nosuch0\""), MACHINE),
        (
            "no sub-function",
            one("devargs = \"auxiliary:mlx5_core.sf.2\""),
            MACHINE,
        ),
        (
            "vhost without socket",
            one("devargs = \"net_vhost0\""),
            MACHINE,
        ),
        (
            "vhost folder",
            one("devargs = \"net_vhost0,iface=/no/such/s\""),
            MACHINE,
        ),
        (
            "virtio without peer",
            one("devargs = \"net_virtio_user0\""),
            MACHINE,
        ),
        (
            "virtio peer",
            one("devargs = \"net_virtio_user0,path=/no/such\""),
            MACHINE,
        ),
        ("no NIC", one("pci = \"0000:99:00.0\""), MACHINE),
        (
            "a NIC twice",
            two("pci = \"0000:99:00.0\"", "pci = \"99:00.0\"").replace("4096", "16384"),
            FILE,
        ),
        (
            "a device twice",
            two("devargs = \"net_null0\"", "devargs = \"net_null0\""),
            FILE,
        ),
        ("33 ports", format!("{DPDK}{ports}"), FILE),
        ("tso", one("devargs = \"net_null0\"\ntso = \"on\""), MACHINE),
        ("no interface", one("af_xdp = \"nope0\""), MACHINE),
        (
            "references",
            one("af_xdp = \"lo\"\ntx_payload = \"reference\""),
            FILE,
        ),
        (
            "eal plug-in",
            with_dpdk("buffers = 4096\neal_args = [\"-d\", \"/no/such.so\"]"),
            MACHINE,
        ),
        (
            "eal argument",
            with_dpdk("buffers = 4096\neal_args = [\"--no-such\"]"),
            MACHINE,
        ),
    ];
    for own in [
        "--help",
        "-h",
        "-l4",
        "-m1",
        "--allow=0000:00:03.0",
        "--lcor=0",
        "a\\u0000b",
    ] {
        let lines = format!("buffers = 4096\neal_args = [\"{own}\"]");
        cases.push(("own eal argument", with_dpdk(&lines), FILE));
    }
    compare(&cases);
}

#[test]
fn a_check_agrees_with_a_start_about_interfaces() {
    skip_if!(lacks_network());
    let ns = Netns::new();
    ns.ip("link add veth0 type veth peer name veth1");
    ns.ip("link set veth0 up");
    ns.ip("link set veth1 up");
    ns.ip("link add down0 type bridge");
    for name in ["veth0", "veth1", "down0"] {
        let off = format!("-K {name} tso off gso off gro off tx off");
        ns.command("ethtool", &off);
    }
    ns.ip("link add veth2 type veth peer name veth3");
    ns.ip("link set veth2 up");
    ns.ip("link set veth3 up");
    let packet = "devargs = \"net_af_packet0,iface=veth0\"";
    let cases = [
        ("af_packet", one(packet), OK),
        (
            "offloads of the peer, af_packet",
            one("devargs = \"net_af_packet0,iface=veth2\""),
            WARNINGS,
        ),
        (
            "interface that is down",
            one("devargs = \"net_af_packet0,iface=down0\""),
            WARNINGS,
        ),
        ("tap", one("devargs = \"net_tap0,iface=siwtap0\""), OK),
        (
            "mtu of the interface",
            one(&format!("{packet}\nmtu = 9000")),
            MACHINE,
        ),
        (
            "no interface named",
            one("devargs = \"net_af_packet0\""),
            MACHINE,
        ),
        (
            "no such interface",
            one("devargs = \"net_af_packet0,iface=nope0\""),
            MACHINE,
        ),
        (
            "unknown key",
            one("devargs = \"net_af_packet0,iface=veth0,bogus=1\""),
            MACHINE,
        ),
        (
            "an interface twice",
            two(packet, "devargs = \"net_af_packet1,iface=veth0\""),
            FILE,
        ),
        (
            "a tap twice",
            two(
                "devargs = \"net_tap0,iface=t0\"",
                "devargs = \"net_tap1,iface=t0\"",
            ),
            FILE,
        ),
        (
            "tap with a long name",
            one("devargs = \"net_tap0,iface=averyveryverylongname0\""),
            MACHINE,
        ),
        (
            "tap over a veth",
            one("devargs = \"net_tap0,iface=veth0\""),
            MACHINE,
        ),
        (
            "mtu of a tap",
            one("devargs = \"net_tap0,iface=t0\"\nmtu = 9000"),
            FILE,
        ),
        ("tso", one(&format!("{packet}\ntso = \"on\"")), FILE),
        ("xdp mtu", one("af_xdp = \"veth0\"\nmtu = 3000"), MACHINE),
        (
            "host interface",
            one(&format!("{packet}\nhost_interface = \"veth1\"")),
            MACHINE,
        ),
    ];
    ns.run(|| compare(&cases));
    // The check leaves nothing behind.
    let links = ns.ip("-o link");
    assert!(!links.contains("siwtap0"), "{links}");
}

#[test]
fn a_check_names_what_another_daemon_has() {
    let daemon = Daemon::loopback();
    let out = spawn(daemon.dir.path(), LOOPBACK, &["--check", "--json"])
        .wait_with_output()
        .unwrap();
    let (status, err) = (out.status, String::from_utf8_lossy(&out.stderr));
    let out = String::from_utf8_lossy(&out.stdout);
    assert_eq!(status.code(), Some(MACHINE), "{out}");
    assert!(
        err.contains(&format!("process {}", daemon.child.id())),
        "{err}"
    );
    daemon.context().query_devices().unwrap();
    if siwd::host::free_hugepage_bytes() < 16 << 20 {
        let auto = LOOPBACK.replace("\"never\"", "\"auto\"");
        let (status, out, err) = run(&auto, &["--check", "--json"]);
        assert_eq!(status.code(), Some(WARNINGS), "{out}");
        assert!(
            out.contains("\"ok\":true") && err.contains("nr_hugepages"),
            "{out}{err}"
        );
    }
}

#[test]
fn a_check_names_the_command_for_an_interface() {
    skip_if!(lacks_network());
    let ns = Netns::new();
    ns.ip("link add veth0 type veth peer name veth1");
    ns.ip("link set veth0 up");
    ns.ip("link set veth1 up");
    ns.ip("link add bridge0 type bridge");
    let warnings = |link: &str| -> String {
        let (_dir, mut command) = siwd(&one(link), &["--check", "--json"]);
        let out = ns.run(|| command.output().unwrap());
        let json: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        json["warnings"].to_string()
    };
    for link in [
        "devargs = \"net_af_packet0,iface=veth0\"",
        "af_xdp = \"veth0\"",
    ] {
        let text = warnings(link);
        assert!(text.contains("ethtool -K veth1 tx off"), "{text}");
    }
    let text = warnings("devargs = \"net_af_packet0,iface=bridge0\"");
    assert!(text.contains("ip link set bridge0 up"), "{text}");
    assert!(text.contains("ethtool -K bridge0 gro off"), "{text}");
}

#[test]
fn a_check_names_a_limit_of_open_files_that_is_too_low() {
    let (_dir, command) = siwd(LOOPBACK, &["--check", "--json"]);
    let mut limited = std::process::Command::new("prlimit");
    limited.arg("--nofile=16:16").arg(command.get_program());
    let out = limited.args(command.get_args()).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert_eq!(out.status.code(), Some(MACHINE), "{text}");
    assert!(text.contains("LimitNOFILE="), "{text}");
}
