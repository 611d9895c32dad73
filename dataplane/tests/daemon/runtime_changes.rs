//! Changes of operators to a running daemon: exported as a configuration, and told by the next start if it
//! has undone them.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;
use siw::{CmEvent, CmListener, ConnectOptions};

use super::siwctl::{shown, siwctl};
use crate::common::{Daemon, End, LOOPBACK, PATIENCE, pair_on, ping, spawn, wait};

/// Changes of every kind that a configuration can have, and the same as the next start tells them.
const CHANGES: [(&[&str], &str); 8] = [
    (
        &["limits", "set", "clients", "77"],
        "siwctl limits set clients 77",
    ),
    (
        &["limits", "set", "memory_per_user", "1 GiB"],
        "siwctl limits set memory_per_user 1073741824",
    ),
    (
        &["addr", "add", "10.77.0.9/24", "--device", "siw1"],
        "siwctl addr add 10.77.0.9/24 --device siw1",
    ),
    (
        &["addr", "del", "fd77::2", "--device", "siw1"],
        "siwctl addr del fd77::2/64 --device siw1",
    ),
    (
        &[
            "route",
            "add",
            "10.80.0.0/16",
            "--via",
            "10.77.0.2",
            "--device",
            "siw0",
        ],
        "siwctl route add 10.80.0.0/16 --via 10.77.0.2 --device siw0",
    ),
    (
        &[
            "route",
            "add",
            "fd80::/48",
            "--via",
            "fd77::2",
            "--device",
            "siw0",
        ],
        "siwctl route add fd80::/48 --via fd77::2 --device siw0",
    ),
    (
        &[
            "neigh",
            "add",
            "10.77.0.7",
            "--lladdr",
            "02:00:00:00:00:07",
            "--device",
            "siw0",
        ],
        "siwctl neigh add 10.77.0.7 --lladdr 02:00:00:00:00:07 --device siw0",
    ),
    (&["log", "siwd=debug"], "siwctl log siwd=debug"),
];

fn change_everything(daemon: &Daemon) {
    for (args, _) in CHANGES {
        shown(daemon, args);
    }
}

/// Waits for the end of a daemon and starts the next one in its folder.
fn restart(mut daemon: Daemon, config: &str) -> Daemon {
    wait(&mut daemon.child);
    let dir = std::mem::replace(&mut daemon.dir, tempfile::tempdir().unwrap());
    let child = spawn(dir.path(), config, &[]);
    Daemon::wait_ready(dir, child)
}

/// Stops a daemon; returns the changes that its start told as undone.
fn told_at_the_start(daemon: Daemon) -> Vec<String> {
    let log = daemon.stop_and_read_log();
    let lines = log.lines();
    let told = lines.filter_map(|line| line.split_once("undone a change of an operator: "));
    told.map(|(_, command)| command.to_owned()).collect()
}

fn every_change() -> Vec<String> {
    CHANGES.map(|(_, told)| told.to_owned()).to_vec()
}

#[test]
fn the_next_start_tells_once_what_a_killed_or_stopped_daemon_had_changed() {
    for signal in [Signal::SIGKILL, Signal::SIGTERM] {
        let daemon = Daemon::loopback();
        change_everything(&daemon);
        daemon.signal(signal);
        let mut next = restart(daemon, LOOPBACK);
        let dir = std::mem::replace(&mut next.dir, tempfile::tempdir().unwrap());
        let (mut told, mut all) = (told_at_the_start(next), every_change());
        told.sort();
        all.sort();
        assert_eq!(told, all, "{signal}");
        let child = spawn(dir.path(), LOOPBACK, &[]);
        let third = Daemon::wait_ready(dir, child);
        assert_eq!(told_at_the_start(third), [""; 0], "told once");
    }
}

#[test]
fn changes_that_were_taken_back_or_written_into_the_configuration_are_not_told() {
    let daemon = Daemon::loopback();
    let file = daemon.dir.path().join("siwd.sock.changes");
    shown(
        &daemon,
        &["addr", "add", "10.77.0.9/24", "--device", "siw1"],
    );
    shown(&daemon, &["limits", "set", "clients", "77"]);
    assert!(file.exists());
    shown(&daemon, &["addr", "flush", "--device", "siw1"]);
    shown(&daemon, &["limits", "set", "clients", "default"]);
    assert!(!file.exists(), "nothing is changed any more");
    change_everything(&daemon);
    let exported = shown(&daemon, &["config", "export"]);
    daemon.signal(Signal::SIGKILL);
    let next = restart(daemon, &exported);
    assert_eq!(told_at_the_start(next), ["siwctl log siwd=debug"]);
}

/// Everything that an export has to bring back, without the names of sockets.
fn state(daemon: &Daemon) -> Value {
    let mut exported: Value =
        serde_json::from_str(&shown(daemon, &["config", "export", "--json"])).unwrap();
    exported["control"]["socket"].take();
    let devices = shown(daemon, &["show", "devices", "--json"]);
    let devices: Value = serde_json::from_str(&devices).unwrap();
    let addresses = shown(daemon, &["addr", "show", "--device", "siw1", "--json"]);
    let addresses: Value = serde_json::from_str(&addresses).unwrap();
    let addresses: Vec<Value> = addresses
        .as_array()
        .unwrap()
        .iter()
        .filter(|row| row["state"] != "removed")
        .map(|row| row["address"].clone())
        .collect();
    let names: Vec<&Value> = devices
        .as_array()
        .unwrap()
        .iter()
        .map(|device| &device["name"])
        .collect();
    serde_json::json!({ "config": exported, "devices": names, "addresses": addresses })
}

fn check(folder: &Path, config: &str) {
    let file = folder.join("exported.toml");
    std::fs::write(&file, config).unwrap();
    let socket = folder.join("other.sock");
    let out = Command::new(env!("CARGO_BIN_EXE_siwd"))
        .args(["--check".as_ref(), "--config".as_ref(), file.as_os_str()])
        .args(["--socket".as_ref(), socket.as_os_str()])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(matches!(out.status.code(), Some(0 | 4)), "{said}\n{config}");
}

#[test]
fn the_exported_configuration_passes_check_and_starts_a_daemon_with_the_same_state() {
    // More routes than fit into one reply, and a device that is removed.
    let extra = "[[device]]\nname = \"siw2\"\npair = \"x\"\naddresses = [\"10.78.0.1/24\"]\n\
                 [[device]]\nname = \"siw3\"\npair = \"x\"\naddresses = [\"10.78.0.2/24\"]\n\
                 [device.mpa]\npreset = \"siw\"\n";
    let daemon = Daemon::start(&format!("{LOOPBACK}{extra}"), &[]);
    change_everything(&daemon);
    let operator = daemon.context();
    for third in 0..200 {
        let route = format!("add 10.90.{third}.0/24 via 10.77.0.2");
        operator.change_routes(0, &route).unwrap();
    }
    drop(operator);
    let show = ["route", "show", "--device", "siw0"];
    assert_eq!(shown(&daemon, &show).matches("10.90.").count(), 200);
    for device in ["siw2", "siw3"] {
        shown(&daemon, &["device", "del", device]);
    }
    let exported = shown(&daemon, &["config", "export"]);
    assert_eq!(exported.matches("10.90.").count(), 200);
    check(daemon.dir.path(), &exported);
    let before = state(&daemon);
    assert!(
        before["config"]["device"][1]["addresses"]
            .to_string()
            .contains("10.77.0.9/24")
    );
    let same = Daemon::start(&exported, &[]);
    assert_eq!(state(&same), before);
    let routes = shown(&same, &["route", "show", "--device", "siw0"]);
    assert_eq!(routes, "", "they are of the configuration now");
    let (status, _, error) = siwctl(
        &same,
        &["addr", "add", "10.77.0.255/24", "--device", "siw1"],
    );
    assert_eq!(
        status,
        Some(1),
        "an address that --check would refuse: {error}"
    );
}

/// The Ethernet address is wrong, so that frames to it are lost until the neighbour is deleted.
#[test]
fn the_ethernet_address_of_a_permanent_neighbour_is_used_without_arp() {
    let config = format!(
        "{LOOPBACK}[device.neighbours]\npermanent = [{{ address = \"10.77.0.1\", mac = \"02:00:00:00:00:99\" }}]\n"
    );
    let daemon = Daemon::start(&config, &[]);
    let exported = shown(&daemon, &["config", "export"]);
    assert!(exported.contains("02:00:00:00:00:99"), "{exported}");
    let (a, b) = (
        End::new(&daemon.context(), 4096),
        End::new(&daemon.context(), 4096),
    );
    let listener = CmListener::new(&b.cm, None, "10.77.0.1:0".parse().unwrap(), 8, 0).unwrap();
    let connect = |end: &End, timeout| {
        let options = ConnectOptions {
            device: Some(1),
            timeout: Some(timeout),
            ..ConnectOptions::default()
        };
        end.qp
            .connect(&end.cm, listener.local_addr(), &options)
            .unwrap();
        end.cm.get_event(Some(PATIENCE)).unwrap()
    };
    let event = connect(&a, Duration::from_millis(500));
    assert!(matches!(event, CmEvent::Unreachable(_)), "{event:?}");
    shown(&daemon, &["neigh", "del", "10.77.0.1", "--device", "siw1"]);
    let exported = shown(&daemon, &["config", "export"]);
    assert!(!exported.contains("02:00:00:00:00:99"), "{exported}");
    let (c, d) = pair_on(&daemon, 4096, "siw1", "10.77.0.1:0");
    ping(&c, &d);
}
