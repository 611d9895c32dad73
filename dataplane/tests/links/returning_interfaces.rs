//! Interfaces of the kernel that are renamed, moved, removed and made anew below a running siwd.

use std::net::IpAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use siw::AsyncEventKind::{self, DeviceFatal, PortActive, PortErr};

use super::af_xdp::lacks_af_xdp;
use crate::common::net::{Netns, lacks_network, missing_program};
use crate::common::*;

const LINKS: [&str; 2] = [
    "devargs = \"net_af_packet0,iface=veth0\"\nmac = \"02:00:00:77:00:01\"",
    "af_xdp = \"veth0\"",
];

fn config(link: &str, more: &str) -> String {
    format!(
        "[workers]\nidle = \"adaptive\"\n[dpdk]\nhugepages = \"never\"\nbuffers = 4096\n\
         [[device]]\nname = \"siw0\"\n{link}\naddresses = [\"10.77.0.1/24\"]\n{more}\n"
    )
}

fn siwd_address() -> IpAddr {
    "10.77.0.1".parse().unwrap()
}

/// A veth pair whose other end is Linux with an address.
fn make_pair(ns: &Netns) {
    ns.veth(1500);
    ns.address("veth1", "10.77.0.2/24");
}

/// A step of a change, and the event that clients get for it.
type Step = (fn(&Netns, &Netns), Option<AsyncEventKind>);

const DOWN: Step = (|ns, _| drop(ns.ip("link set veth0 down")), Some(PortErr));

/// Changes of the interface: their steps, in a namespace with another one beside it.
const CHANGES: [(&str, &[Step]); 5] = [
    (
        "down and up",
        &[
            DOWN,
            (|ns, _| drop(ns.ip("link set veth0 up")), Some(PortActive)),
        ],
    ),
    (
        "renamed",
        &[
            DOWN,
            (
                |ns, _| {
                    ns.ip("link set veth0 name other0");
                    ns.ip("link set other0 up");
                },
                Some(PortActive),
            ),
        ],
    ),
    (
        "moved to another namespace and back",
        &[
            (|ns, other| ns.give("veth0", other), Some(DeviceFatal)),
            (|ns, other| other.give("veth0", ns), None),
        ],
    ),
    (
        "deleted, later made anew",
        &[
            (|ns, _| drop(ns.ip("link del veth0")), Some(DeviceFatal)),
            (|ns, _| make_pair(ns), None),
        ],
    ),
    (
        "deleted and made anew at once",
        &[(
            |ns, _| {
                ns.ip("link del veth0");
                make_pair(ns);
            },
            Some(DeviceFatal),
        )],
    ),
];

fn lacks(link: &str) -> Option<String> {
    match link.starts_with("af_xdp") {
        true => lacks_af_xdp(),
        false => lacks_network().or_else(|| missing_program("ethtool")),
    }
}

/// Whatever happens to the interface, clients get the events of the table, and frames pass again.
#[test]
fn a_device_follows_the_changes_of_its_interface() {
    for link in LINKS {
        skip_if!(lacks(link));
        for (what, steps) in CHANGES {
            let (ns, other) = (Netns::new(), Netns::new());
            make_pair(&ns);
            let siwd = ns.siwd(&config(link, ""), &[]);
            ns.wait_ping(siwd_address());
            let client = siwd.context();
            for (apply, event) in steps {
                apply(&ns, &other);
                if let Some(kind) = event {
                    let event = client.get_async_event(Some(PATIENCE)).unwrap();
                    assert_eq!(event.kind, Some(*kind), "{link}, {what}: {event:?}");
                }
            }
            let changed = Instant::now();
            ns.wait_ping(siwd_address());
            println!("{link}, {what}: {:?}", changed.elapsed());
            let devices = siwd.context().query_devices().unwrap();
            let mut devices = devices.iter().filter(|device| device.name == "siw0");
            assert!(devices.next_back().unwrap().active, "{link}, {what}");
            assert!(siwd.stop().success(), "{link}, {what}");
        }
    }
}

#[test]
fn a_device_without_reattach_stays_removed() {
    for link in LINKS {
        skip_if!(lacks(link));
        let ns = Netns::new();
        make_pair(&ns);
        let siwd = ns.siwd(&config(link, "reattach = false"), &[]);
        let client = siwd.context();
        ns.ip("link del veth0");
        let event = client.get_async_event(Some(PATIENCE)).unwrap();
        assert_eq!(event.kind, Some(DeviceFatal), "{event:?}");
        make_pair(&ns);
        // The operator adds it again.
        let ctl = |args: &[&str]| {
            let mut command = Command::new(client_program("siwctl"));
            let out = command.arg("--socket").arg(&siwd.socket).args(args);
            let out = out.output().unwrap();
            let error = String::from_utf8_lossy(&out.stderr);
            assert!(out.status.success(), "{args:?}: {error}");
        };
        ctl(&["device", "del", "siw0"]);
        assert!(!ns.ping(siwd_address(), 56, Duration::from_millis(200)));
        ctl(&["device", "add", "siw0"]);
        ns.wait_ping(siwd_address());
    }
}

const TAP: &str = "devargs = \"net_tap0,iface=siwtap0\"\nmac = \"02:00:00:77:00:01\"";

/// Gives Linux an address on the interface of a tap, which appears some time after the call.
fn use_tap(ns: &Netns) {
    let start = Instant::now();
    while !ns.ip("-o link show").contains("siwtap0") {
        assert!(start.elapsed() < PATIENCE, "no interface");
    }
    ns.ip("link set siwtap0 up");
    ns.address("siwtap0", "10.77.0.2/24");
}

/// The driver of a tap makes its interface, and does not notice its end.
#[test]
fn a_tap_makes_its_interface_again_after_its_deletion() {
    skip_if!(lacks_network());
    let ns = Netns::new();
    let siwd = ns.siwd(&config(TAP, ""), &[]);
    use_tap(&ns);
    for _ in 0..3 {
        ns.wait_ping(siwd_address());
        let client = siwd.context();
        let deleted = Instant::now();
        ns.ip("link del siwtap0");
        let event = client.get_async_event(Some(PATIENCE)).unwrap();
        assert_eq!(event.kind, Some(DeviceFatal), "{event:?}");
        use_tap(&ns);
        println!("made again after {:?}", deleted.elapsed());
    }
    ns.wait_ping(siwd_address());
    assert!(siwd.stop().success());
}

/// A program in another namespace uses the interface there.
#[test]
fn a_tap_works_on_when_its_interface_moves() {
    skip_if!(lacks_network());
    let (ns, other) = (Netns::new(), Netns::new());
    let siwd = ns.siwd(&config(TAP, ""), &[]);
    let client = siwd.context();
    ns.give("siwtap0", &other);
    other.ip("link set siwtap0 arp on");
    other.address("siwtap0", "10.77.0.2/24");
    other.wait_ping(siwd_address());
    // Longer than the pause between two looks at the link.
    while let Ok(event) = client.get_async_event(Some(Duration::from_millis(600))) {
        assert!(
            matches!(event.kind, Some(PortErr | PortActive)),
            "{event:?}"
        );
    }
    other.wait_ping(siwd_address());
    assert!(siwd.stop().success());
    // Without `reattach`, a deletion is reported, and that is all.
    let siwd = ns.siwd(&config(TAP, "reattach = false"), &[]);
    let client = siwd.context();
    ns.ip("link del siwtap0");
    let event = client.get_async_event(Some(PATIENCE)).unwrap();
    assert_eq!(event.kind, Some(DeviceFatal), "{event:?}");
    assert!(siwd.stop().success());
    assert!(!ns.ip("-o link show").contains("siwtap0"));
}
