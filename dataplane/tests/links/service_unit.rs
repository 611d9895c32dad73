//! The unit deploy/siwd.service: its exposure, and siwd on each kind of link with no more than the unit
//! leaves. There is no systemd here: setpriv and a seccomp filter stand for it.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::libc;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

use crate::common::net::{Netns, lacks_network, missing_program};
use crate::common::*;
use crate::{af_xdp, links};

const UNIT: &str = include_str!("../../../deploy/siwd.service");
/// The user of the service.
const USER: u32 = 65_534;
/// The distribution's Python, which every user can run.
const PYTHON: &str = "/usr/bin/python3";
/// Numbers of system calls.
const NUMBERS: &str = "/usr/include/x86_64-linux-gnu/asm/unistd_64.h";

/// All values of a setting of the unit.
fn values(key: &str) -> Vec<&'static str> {
    let lines = UNIT.lines();
    let settings = lines.filter_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    settings.flat_map(str::split_whitespace).collect()
}

/// Reason why the unit cannot be tested here.
fn lacks_systemd() -> Option<String> {
    missing_program("systemd-analyze").map(|why| format!("{why} (package systemd)"))
}

/// Reason why siwd cannot be confined here as the unit does.
fn lacks_confinement() -> Option<String> {
    let lack = lacks_network().or_else(lacks_systemd);
    let lack = lack.or_else(|| missing_program("setpriv"));
    lack.or_else(|| {
        (!Path::new(NUMBERS).exists()).then(|| format!("{NUMBERS} is not there (linux-libc-dev)"))
    })
}

/// Adds the names of system calls of a set such as `@system-service`.
fn expand(set: &str, names: &mut BTreeSet<String>) {
    if !set.starts_with('@') {
        names.insert(set.to_owned());
        return;
    }
    let out = Command::new("systemd-analyze")
        .args(["syscall-filter", set])
        .output()
        .unwrap();
    assert!(out.status.success(), "{out:?}");
    let text = String::from_utf8(out.stdout).unwrap();
    let members = text.lines().skip(1).map(str::trim);
    for member in members.filter(|member| !member.is_empty() && !member.starts_with('#')) {
        expand(member, names);
    }
}

/// Names of the system calls that the unit allows.
fn allowed_calls() -> BTreeSet<String> {
    let (mut allowed, mut refused) = (BTreeSet::new(), BTreeSet::new());
    for line in UNIT.lines() {
        let Some(sets) = line.strip_prefix("SystemCallFilter=") else {
            continue;
        };
        let (sets, names) = match sets.strip_prefix('~') {
            Some(sets) => (sets, &mut refused),
            None => (sets, &mut allowed),
        };
        for set in sets.split_whitespace() {
            expand(set, names);
        }
    }
    // setpriv needs them before siwd runs.
    for call in ["setresuid", "setresgid", "setgroups"] {
        assert!(refused.remove(call), "{call}");
    }
    &allowed - &refused
}

fn argument(index: u8, operator: SeccompCmpOp, value: libc::c_int) -> SeccompRule {
    let value = value.cast_unsigned().into();
    let condition = SeccompCondition::new(index, SeccompCmpArgLen::Dword, operator, value);
    SeccompRule::new(vec![condition.unwrap()]).unwrap()
}

fn address_family(name: &str) -> libc::c_int {
    match name {
        "AF_UNIX" => libc::AF_UNIX,
        "AF_NETLINK" => libc::AF_NETLINK,
        "AF_PACKET" => libc::AF_PACKET,
        "AF_XDP" => libc::AF_XDP,
        "AF_INET" => libc::AF_INET,
        "AF_INET6" => libc::AF_INET6,
        other => panic!("{other}"),
    }
}

/// SystemCallFilter, RestrictAddressFamilies and MemoryDenyWriteExecute of the unit.
fn filter() -> BpfProgram {
    let numbers = std::fs::read_to_string(NUMBERS).unwrap();
    let number = |name: &str| {
        let define = format!("#define __NR_{name} ");
        let line = numbers.lines().find_map(|line| line.strip_prefix(&define));
        line.map(|text| text.trim().parse::<i64>().unwrap())
    };
    let names = allowed_calls();
    let calls = names.iter().filter_map(|name| number(name));
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = calls.map(|call| (call, vec![])).collect();
    assert!(rules.len() > 150, "{names:?}");
    let families = values("RestrictAddressFamilies").into_iter();
    let families = families.map(|name| argument(0, SeccompCmpOp::Eq, address_family(name)));
    rules.insert(libc::SYS_socket, families.collect());
    assert_eq!(values("MemoryDenyWriteExecute"), ["yes"]);
    let both = libc::PROT_WRITE | libc::PROT_EXEC;
    let masked = SeccompCmpOp::MaskedEq(both.cast_unsigned().into());
    let protections = [0, libc::PROT_WRITE, libc::PROT_EXEC];
    let not_both = protections.map(|value| argument(2, masked.clone(), value));
    rules.insert(libc::SYS_mmap, not_both.into());
    let masked = SeccompCmpOp::MaskedEq(libc::PROT_EXEC.cast_unsigned().into());
    rules.insert(libc::SYS_mprotect, vec![argument(2, masked, 0)]);
    let refusal = SeccompAction::Errno(libc::EPERM.cast_unsigned());
    SeccompFilter::new(rules, refusal, SeccompAction::Allow, TargetArch::x86_64)
        .and_then(TryInto::try_into)
        .unwrap()
}

/// A command with the user, the capabilities and the system calls of the unit. The filter holds for the
/// calling thread from now on.
fn confined(program: &Path, arguments: &Command) -> Command {
    let capabilities = |key| {
        let named = values(key).into_iter();
        let named = named.map(|name| name.strip_prefix("CAP_").unwrap().to_lowercase());
        named.fold("-all,+ipc_lock".to_owned(), |all, name| {
            format!("{all},+{name}")
        })
    };
    assert_eq!(values("NoNewPrivileges"), ["yes"]);
    assert_eq!(values("User"), ["siwd"]);
    let ambient = capabilities("AmbientCapabilities");
    // Stands for the limit, which a container may not raise.
    assert_eq!(values("LimitMEMLOCK"), ["infinity"]);
    let mut confined = Command::new("setpriv");
    confined
        .args([
            &format!("--reuid={USER}"),
            &format!("--regid={USER}"),
            "--clear-groups",
            "--no-new-privs",
            &format!("--bounding-set={}", capabilities("CapabilityBoundingSet")),
            &format!("--inh-caps={ambient}"),
            &format!("--ambient-caps={ambient}"),
        ])
        .arg(program)
        .args(arguments.get_args())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    seccompiler::apply_filter(&filter()).unwrap();
    confined
}

/// Starts siwd as the unit does.
fn start(ns: &Netns, config: &str) -> Daemon {
    let dir = tempfile::tempdir().unwrap();
    chown(dir.path(), Some(USER), Some(USER)).unwrap();
    let command = daemon_command(dir.path(), config, &[]);
    // A copy, because the user may be unable to reach the build folder.
    let program = dir.path().join("siwd");
    std::fs::copy(command.get_program(), &program).unwrap();
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    let child: Child = ns.run(|| confined(&program, &command).spawn().unwrap());
    Daemon::wait_ready(dir, child)
}

#[test]
fn its_exposure_is_at_most_3() {
    skip_if!(lacks_systemd());
    let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/siwd.service");
    let out = Command::new("systemd-analyze")
        .args(["security", "--offline=true", "--threshold=30"])
        .arg(unit)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{text}");
    println!("{}", text.trim_end().lines().last().unwrap());
}

#[test]
fn the_confinement_refuses_what_the_unit_forbids() {
    let python = || (!Path::new(PYTHON).exists()).then(|| format!("{PYTHON} is not there"));
    skip_if!(lacks_confinement().or_else(python));
    let tries = |script: &str| {
        let mut command = Command::new(PYTHON);
        command.args(["-c", script]);
        let out = std::thread::spawn(move || confined(PYTHON.as_ref(), &command).output().unwrap());
        let out = out.join().unwrap();
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        (out.status.success(), said)
    };
    let (works, said) = tries("import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)");
    assert!(works, "{said}");
    for script in [
        "import mmap; mmap.mmap(-1, 4096, prot=mmap.PROT_WRITE | mmap.PROT_EXEC)",
        "import socket; socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)",
        "open('/etc/shadow')",
        "import os; os.chroot('/')",
        "import time; time.clock_settime(time.CLOCK_REALTIME, time.time())",
        "import os; os.kill(1, 0)",
        "import ctypes; c = ctypes.CDLL(None, use_errno=True)
if c.mount(b'none', b'/mnt', b'tmpfs', 0, None): raise OSError(ctypes.get_errno(), 'Operation not permitted')",
    ] {
        let (works, said) = tries(script);
        assert!(!works && said.contains("ermi"), "{script}: {said}");
    }
}

#[test]
fn the_unit_leaves_what_the_loopback_needs() {
    skip_if!(lacks_confinement());
    let config = format!("{LOOPBACK}[control]\ngroup = \"nogroup\"\n");
    let daemon = start(&Netns::new(), &config);
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.child.id())).unwrap();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap().trim().to_owned()
    };
    assert!(field("Uid:").starts_with(&USER.to_string()), "{status}");
    assert_eq!(
        (field("NoNewPrivs:"), field("Seccomp:")),
        ("1".into(), "2".into())
    );
    assert_eq!(field("CapEff:"), field("CapBnd:"));
    let count = u64::from_str_radix(&field("CapBnd:"), 16)
        .unwrap()
        .count_ones();
    assert_eq!(count as usize, values("CapabilityBoundingSet").len() + 1);
    links::pings(&daemon, &daemon, "10.77.0.2", 100_000);
    assert!(daemon.stop().success());
}

#[test]
fn the_unit_leaves_what_packet_sockets_need() {
    skip_if!(lacks_confinement().or_else(|| missing_program("ethtool")));
    let ns = Netns::new();
    ns.veth(1500);
    ns.ip("link set veth1 arp off");
    let text = links::config("af_packet.toml");
    let (near, far) = (start(&ns, &text), start(&ns, &links::other_end(&text)));
    links::pings(&far, &near, "10.77.0.2", 100_000);
}

#[test]
fn the_unit_leaves_what_af_xdp_needs() {
    skip_if!(lacks_confinement().or_else(af_xdp::lacks_af_xdp));
    let hosts = af_xdp::Hosts::new(1);
    let near = start(&hosts.left, &af_xdp::config("veth0", 1, ""));
    let far = start(&hosts.right, &af_xdp::config("veth1", 2, ""));
    links::pings(&far, &near, "10.77.0.2", 100_000);
}

#[test]
fn the_unit_leaves_what_a_tap_needs() {
    skip_if!(lacks_confinement());
    let ns = Netns::new();
    let siwd = start(&ns, &links::config("tap.toml"));
    ns.address("siwtap0", "10.77.0.2/24");
    ns.ip("link set siwtap0 up");
    links::linux_reaches(&ns, "10.77.0.1");
    assert!(siwd.stop().success());
}
