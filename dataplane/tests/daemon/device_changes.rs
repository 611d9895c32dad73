//! `siwctl device add` and `del`: devices of a running daemon change while others carry traffic.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use serde_json::Value;
use siw::{
    AsyncEventKind, CmChannel, CmEvent, CmListener, ConnectOptions, Context, SendData, SendWr,
    WcStatus,
};

use super::client_faults::{as_user, open_to_all};
use super::reload::rewrite;
use super::siwctl::{shown, shown_json, siwctl};
use crate::common::net::{Netns, lacks_network, missing_program};
use crate::common::{Daemon, End, LOOPBACK, PATIENCE, StopOnDrop, pair, pair_on, pattern, ping};

/// A second pair.
pub const SECOND_PAIR: &str = r#"
[[device]]
name = "siw2"
pair = "second"
addresses = ["10.78.0.1/24"]
[[device]]
name = "siw3"
pair = "second"
addresses = ["10.78.0.2/24"]
"#;

fn with_second_pair() -> String {
    format!("{LOOPBACK}{SECOND_PAIR}")
}

/// Executes a change that is refused; returns the reason.
fn refused(daemon: &Daemon, args: &[&str]) -> String {
    let (status, out, error) = siwctl(daemon, &[&["device"], args].concat());
    assert_eq!(status, Some(1), "{args:?}: {out}");
    error
}

fn names(daemon: &Daemon) -> Vec<String> {
    let rows = shown_json(daemon, &["show", "devices"]);
    let name = |row: &Value| row["ifname"].as_str().unwrap().to_owned();
    rows.iter().map(name).collect()
}

fn sysfs(daemon: &Daemon, name: &str) -> PathBuf {
    let folder = daemon.dir.path().join("siwd.sock.sysfs/class/infiniband");
    folder.join(name).join("ports/1/state")
}

/// Writes different bytes again and again from one end to the other, and compares them.
fn transfer(a: &End, b: &End, rounds: &AtomicU64, is_over: &AtomicBool) {
    let len = a.mr.len();
    while !is_over.load(Ordering::Relaxed) {
        let round = rounds.load(Ordering::Relaxed) + 1;
        a.fill(round);
        let sge = [a.mr.sge(0, len)];
        let write = SendWr::write(round, SendData::Sges(&sge), b.mr.addr(), b.mr.rkey());
        a.qp.post_send(&[write]).unwrap();
        assert_eq!(a.wc().status, WcStatus::SUCCESS);
        assert!(b.read(0, len) == pattern(round, len), "round {round}");
        rounds.store(round, Ordering::Relaxed);
    }
}

/// Waits until the transfer has finished another two rounds: one of them began after the call.
fn await_rounds(rounds: &AtomicU64) {
    let (before, start) = (rounds.load(Ordering::Relaxed), Instant::now());
    while rounds.load(Ordering::Relaxed) < before + 2 {
        assert!(start.elapsed() < PATIENCE, "the transfer stands still");
        std::thread::yield_now();
    }
}

/// Two ends connected over the second pair.
pub fn second_pair(daemon: &Daemon) -> (End, End) {
    pair_on(daemon, 4096, "siw2", "10.78.0.2:0")
}

#[test]
fn devices_come_and_go_beside_a_transfer() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 200_000);
    let early = daemon.context();
    let channel = CmChannel::new(&early).unwrap();
    let listener = CmListener::new(&channel, None, "0.0.0.0:0".parse().unwrap(), 8, 0).unwrap();
    let (rounds, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| transfer(&a, &b, &rounds, &is_over));
        let _stop = StopOnDrop(&is_over);
        await_rounds(&rounds);
        rewrite(&daemon, &with_second_pair());
        for name in ["siw2", "siw3"] {
            shown(&daemon, &["device", "add", name]);
            assert!(sysfs(&daemon, name).exists());
            await_rounds(&rounds);
        }
        assert_eq!(names(&daemon), ["siw0", "siw1", "siw2", "siw3"]);
        assert_eq!(shown(&daemon, &["reload"]), "no setting has changed\n");
        // A listener from before is on the new device, too.
        let (c, d) = (End::new(&daemon.context(), 4096), End::new(&early, 4096));
        let options = ConnectOptions {
            device: Some(c.ctx.device_by_name("siw2").unwrap().index),
            ..ConnectOptions::default()
        };
        let to = SocketAddr::new("10.78.0.2".parse().unwrap(), listener.local_addr().port());
        c.qp.connect(&c.cm, to, &options).unwrap();
        let CmEvent::ConnectRequest(request) = channel.get_event(Some(PATIENCE)).unwrap() else {
            panic!("no request");
        };
        let options = ConnectOptions::default();
        request.accept(&d.qp, None, &options).unwrap();
        for channel in [&channel, &c.cm] {
            let event = channel.get_event(Some(PATIENCE)).unwrap();
            assert!(matches!(event, CmEvent::Established(_)), "{event:?}");
        }
        ping(&c, &d);
        drop((c, d));
        // Contexts from before have the devices of now.
        assert_eq!(early.query_devices().unwrap().len(), 4);
        for _ in 0..3 {
            let (c, d) = second_pair(&daemon);
            ping(&c, &d);
            let index = d.ctx.device_by_name("siw3").unwrap().index;
            let error = refused(&daemon, &["del", "siw3"]);
            let pid = std::process::id();
            assert!(
                error.contains(&format!("device siw3 is used by process {pid}")),
                "{error}"
            );
            ping(&c, &d);
            await_rounds(&rounds);
            shown(&daemon, &["device", "del", "siw3", "--force"]);
            let event = d.ctx.get_async_event(Some(PATIENCE)).unwrap();
            assert_eq!(event.kind, Some(AsyncEventKind::DeviceFatal), "{event:?}");
            assert_eq!(event.object, index, "{event:?}");
            assert!(event.reason.contains("removed by an operator"), "{event:?}");
            let sge = [d.mr.sge(0, 64)];
            let write = SendWr::write(7, SendData::Sges(&sge), c.mr.addr(), c.mr.rkey());
            d.qp.post_send(&[write]).unwrap();
            assert_eq!(d.wc().status, WcStatus::WR_FLUSH_ERR);
            assert_eq!(names(&daemon), ["siw0", "siw1", "siw2"]);
            assert!(!sysfs(&daemon, "siw3").exists());
            let stat = shown(&daemon, &["stat"]);
            assert!(stat.contains("siw2") && !stat.contains("siw3"), "{stat}");
            let error = refused(&daemon, &["add", "siw3"]);
            assert!(
                error.contains("device siw2 is the other end of pair \"second\""),
                "{error}"
            );
            shown(&daemon, &["device", "del", "siw2", "--force"]);
            drop((c, d));
            await_rounds(&rounds);
            for name in ["siw3", "siw2"] {
                shown(&daemon, &["device", "add", name]);
            }
            await_rounds(&rounds);
        }
        let (c, d) = second_pair(&daemon);
        ping(&c, &d);
        await_rounds(&rounds);
    });
    ping(&a, &b);
    let ends = shown_json(&daemon, &["show", "ends"]);
    let device = |row: &Value| row["device"].as_str().unwrap_or_default().to_owned();
    assert!(
        ends.iter()
            .all(|row| !matches!(&*device(row), "siw0" | "siw1")),
        "{ends:?}"
    );
    let log = daemon.stop_and_read_log();
    for part in [
        "an operator has added the device",
        "the device is closed",
        "stopped",
    ] {
        assert!(log.contains(part), "{part}: {log}");
    }
}

#[test]
fn wrong_changes_of_devices_are_refused_with_the_reason() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    for (args, reason) in [
        (&["add", "siw0"][..], "device siw0 runs already"),
        (
            &["add", "siw2"],
            "has no device \"siw2\": add its [[device]]",
        ),
        (&["del", "siw2"], "no device \"siw2\""),
        (&["del", "siw0"], "device siw0 is used by process"),
    ] {
        let error = refused(&daemon, args);
        assert!(error.contains(reason), "{args:?}: {error}");
    }
    for (from, to, reason) in [
        ("10.78.0.1/24", "10.78.0.1", "the prefix length is missing"),
        (
            "pair = \"second\"\naddresses = [\"10.78.0.1/24\"]",
            "pair = \"second\"\nmtu = 9000\naddresses = [\"10.78.0.1/24\"]",
            "needs packet buffers of 9032 bytes",
        ),
    ] {
        rewrite(&daemon, &with_second_pair().replacen(from, to, 1));
        let error = refused(&daemon, &["add", "siw2"]);
        assert!(error.contains(reason), "{to}: {error}");
    }
    let missing = "[[device]]\nname = \"siw2\"\ndevargs = \"net_af_packet0,iface=siwmissing\"\n\
                   addresses = [\"10.78.0.1/24\"]\n";
    rewrite(&daemon, &format!("{LOOPBACK}{missing}"));
    let error = refused(&daemon, &["add", "siw2"]);
    assert!(error.contains("siwmissing"), "{error}");
    // The file moves an address of a running device to another one.
    let moved = with_second_pair().replace("10.77.0.1/24", "10.79.0.1/24");
    rewrite(&daemon, &moved.replace("10.78.0.1/24", "10.77.0.1/24"));
    let error = refused(&daemon, &["add", "siw2"]);
    assert!(error.contains("address 10.77.0.1 is used twice"), "{error}");
    // An operator has given one away.
    rewrite(&daemon, &with_second_pair());
    shown(
        &daemon,
        &["addr", "add", "10.78.0.1/24", "--device", "siw1"],
    );
    let error = refused(&daemon, &["add", "siw2"]);
    assert!(
        error.contains("device siw1 has the address 10.78.0.1 already"),
        "{error}"
    );
    shown(&daemon, &["addr", "del", "10.78.0.1", "--device", "siw1"]);
    // A second end that waits for its device does not stay behind.
    shown(&daemon, &["device", "add", "siw2"]);
    shown(&daemon, &["device", "del", "siw2"]);
    shown(&daemon, &["device", "add", "siw3"]);
    shown(&daemon, &["device", "add", "siw2"]);
    let (c, d) = second_pair(&daemon);
    ping(&c, &d);
    ping(&a, &b);
    drop((c, d));
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    open_to_all(&daemon);
    let theirs = as_user(65_534, || Context::open(Some(&daemon.socket)).unwrap());
    let error = theirs.add_device("siw2").unwrap_err().to_string();
    assert!(error.contains("only operators can add devices"), "{error}");
    let error = theirs.remove_device(2, true).unwrap_err().to_string();
    assert!(
        error.contains("only operators can remove devices"),
        "{error}"
    );
}

/// A device on an interface of the kernel, which another process has meanwhile.
#[test]
fn an_interface_is_free_after_its_device_is_removed() {
    skip_if!(lacks_network().or_else(|| missing_program("ethtool")));
    let namespace = Netns::new();
    namespace.veth(1500);
    namespace.ip("link set veth1 arp off");
    let on = |device: &str, interface: &str, number: u8| {
        format!(
            "[[device]]\nname = \"{device}\"\ndevargs = \"net_af_packet{number},iface={interface}\"\n\
             mac = \"02:00:00:78:00:0{number}\"\naddresses = [\"10.78.0.{number}/24\"]\n"
        )
    };
    let daemon = namespace.siwd(LOOPBACK, &[]);
    rewrite(
        &daemon,
        &format!(
            "{LOOPBACK}{}{}",
            on("siw2", "veth0", 1),
            on("siw3", "veth1", 2)
        ),
    );
    let (a, b) = pair(&daemon, 4096);
    for _ in 0..2 {
        for name in ["siw2", "siw3"] {
            shown(&daemon, &["device", "add", name]);
        }
        let (c, d) = second_pair(&daemon);
        ping(&c, &d);
        for name in ["siw2", "siw3"] {
            shown(&daemon, &["device", "del", name, "--force"]);
        }
        let sge = [c.mr.sge(0, 64)];
        let write = SendWr::write(7, SendData::Sges(&sge), d.mr.addr(), d.mr.rkey());
        c.qp.post_send(&[write]).unwrap();
        assert_eq!(c.wc().status, WcStatus::WR_FLUSH_ERR);
        // Another daemon can have the interface.
        let config = format!(
            "[dpdk]\nhugepages = \"never\"\nbuffers = 4096\n{}",
            on("siw0", "veth0", 1)
        );
        let other = namespace.siwd(&config, &[]);
        let error = refused(&daemon, &["add", "siw2"]);
        assert!(error.contains("veth0"), "{error}");
        assert!(other.stop().success());
        ping(&a, &b);
    }
    assert!(daemon.stop().success());
}

#[test]
fn a_device_shared_with_the_kernel_takes_its_interfaces_along() {
    skip_if!(lacks_network());
    let namespace = Netns::new();
    let daemon = namespace.siwd(LOOPBACK, &[]);
    let shared = "[[device]]\nname = \"siw2\"\ndevargs = \"net_tap2,iface=siwtap2\"\n\
                  addresses = [\"10.78.0.1/24\"]\nhost_interface = \"siwkernel2\"\n\
                  host_ports = \"61000-61007\"\nhost_routes = true\n";
    rewrite(&daemon, &format!("{LOOPBACK}{shared}"));
    let (a, b) = pair(&daemon, 4096);
    let interfaces = ["siwtap2", "siwkernel2"];
    for _ in 0..2 {
        shown(&daemon, &["device", "add", "siw2"]);
        let links = namespace.ip("-o link show");
        assert!(
            interfaces.iter().all(|name| links.contains(name)),
            "{links}"
        );
        // It follows the kernel's routes.
        let route = ["route", "add", "10.80.0.0/16", "--via", "10.78.0.9"];
        let (status, out, error) = siwctl(&daemon, &[&route[..], &["--device", "siw2"]].concat());
        assert_eq!(status, Some(1), "{out}");
        assert!(error.contains("follows the kernel"), "{error}");
        shown(&daemon, &["device", "del", "siw2"]);
        let links = namespace.ip("-o link show");
        assert!(
            !interfaces.iter().any(|name| links.contains(name)),
            "{links}"
        );
        ping(&a, &b);
    }
    assert!(daemon.stop().success());
}

/// Removes and adds a device with a client that ends with it.
pub fn add_again(daemon: &Daemon, names: &[&str]) {
    let client = daemon.context();
    for name in names {
        let index = client.device_by_name(name).unwrap().index;
        client.remove_device(index, true).unwrap();
    }
    drop(client);
    let client = daemon.context();
    for name in names {
        client.add_device(name).unwrap();
    }
}

/// Threads, mappings and descriptors of the daemon.
fn holdings(daemon: &Daemon) -> [usize; 3] {
    let folder = PathBuf::from(format!("/proc/{}", daemon.child.id()));
    let entries = |name: &str| std::fs::read_dir(folder.join(name)).unwrap().count();
    let maps = std::fs::read_to_string(folder.join("maps")).unwrap();
    [entries("task"), maps.lines().count(), entries("fd")]
}

#[test]
fn devices_that_are_added_again_and_again_leave_nothing_behind() {
    let daemon = Daemon::start(&with_second_pair(), &[]);
    // Of a client that stays, and knows the other devices only.
    let (a, b) = pair(&daemon, 4096);
    let again = |cycles: usize| (0..cycles).for_each(|_| add_again(&daemon, &["siw2", "siw3"]));
    again(10);
    let before = holdings(&daemon);
    again(60);
    let after = holdings(&daemon);
    // Threads that end, and memory that the allocator keeps, come and go.
    for (what, (before, after)) in ["threads", "mappings", "descriptors"]
        .iter()
        .zip(before.into_iter().zip(after))
    {
        assert!(after <= before + 12, "{what}: {before}, later {after}");
    }
    let indices = ["siw2", "siw3"].map(|name| daemon.context().device_by_name(name).unwrap().index);
    assert!(indices.iter().all(|index| *index < 8), "{indices:?}");
    let (c, d) = second_pair(&daemon);
    ping(&c, &d);
    ping(&a, &b);
}

#[test]
fn the_index_of_a_device_is_not_used_again_while_a_client_knows_it() {
    let daemon = Daemon::start(&with_second_pair(), &[]);
    let early = daemon.context();
    let known = early.device_by_name("siw2").unwrap().index;
    for _ in 0..3 {
        add_again(&daemon, &["siw2", "siw3"]);
        assert_ne!(
            daemon.context().device_by_name("siw2").unwrap().index,
            known
        );
    }
    assert!(early.query_device(known).is_ok(), "the device that it knew");
    drop(early);
    // The daemon learns of a client's end some time after it.
    let start = Instant::now();
    while daemon.context().device_by_name("siw2").unwrap().index != known {
        assert!(start.elapsed() < PATIENCE, "the index stays unused");
        add_again(&daemon, &["siw2", "siw3"]);
    }
    let (c, d) = second_pair(&daemon);
    ping(&c, &d);
}
