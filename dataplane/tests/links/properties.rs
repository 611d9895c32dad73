//! Properties that hold on every link, by a table of links: each test is a property, and states its
//! exceptions.

use std::process::Command;
use std::time::{Duration, Instant};

use siw::{SendData, SendWr, WcStatus};
use siw_xdp::{ClaimKind, XdpSteering};

use crate::common::net::{Netns, lacks_network, missing_program};
use crate::common::*;

/// One row: a link in a namespace with a veth pair.
#[derive(Clone)]
struct Link {
    name: &'static str,
    /// The keys of its device.
    keys: &'static str,
    /// The interface of the kernel that it uses, which exists without siwd.
    interface: Option<&'static str>,
    needs_xdp: bool,
    /// Replaces FOLDER in the keys.
    folder: String,
}

const LINKS: [Link; 5] = [
    Link {
        name: "pair",
        keys: "pair = \"lo\"",
        interface: None,
        needs_xdp: false,
        folder: String::new(),
    },
    Link {
        name: "af_packet",
        keys: "devargs = \"net_af_packet0,iface=veth0\"\nmac = \"02:00:00:77:00:01\"",
        interface: Some("veth0"),
        needs_xdp: false,
        folder: String::new(),
    },
    Link {
        name: "tap",
        keys: "devargs = \"net_tap0,iface=siwtap0\"",
        interface: None,
        needs_xdp: false,
        folder: String::new(),
    },
    Link {
        name: "vhost",
        keys: "devargs = \"net_vhost0,iface=FOLDER/vhost.sock\"",
        interface: None,
        needs_xdp: false,
        folder: String::new(),
    },
    Link {
        name: "af_xdp",
        keys: "af_xdp = \"veth0\"",
        interface: Some("veth0"),
        needs_xdp: true,
        folder: String::new(),
    },
];

impl Link {
    fn config(&self, more: &str) -> String {
        let pair = "[[device]]\nname = \"siw1\"\npair = \"lo\"\naddresses = [\"10.77.0.2/24\"]\n";
        let pair = if self.name == "pair" { pair } else { "" };
        format!(
            "[dpdk]\nhugepages = \"never\"\nbuffers = 8192\n{pair}[[device]]\nname = \"siw0\"\n{}\n\
             addresses = [\"10.77.0.1/24\"]\n{more}\n",
            self.keys.replace("FOLDER", &self.folder)
        )
    }
}

fn lacks() -> Option<String> {
    lacks_network().or_else(|| missing_program("ethtool"))
}

/// Name of a link that a property does not hold for, and the reason.
type Exception = (&'static str, &'static str);

const PAIR: Exception = ("pair", "memory of siwd");

/// Exceptions of properties of the kernel's interfaces.
const WITHOUT_INTERFACE: [Exception; 3] = [
    PAIR,
    ("tap", "siwd creates the interface"),
    ("vhost", "no interface of the kernel"),
];

/// Runs the test for each link that this machine has, apart from exceptions, in a namespace of its own.
fn on_each(exceptions: &[Exception], test: impl Fn(&Link, &Netns)) {
    let xdp_lack = XdpSteering::load(ClaimKind::Addresses, None, 1).err();
    for link in &LINKS {
        if let (true, Some(lack)) = (link.needs_xdp, &xdp_lack) {
            println!("without {}: {lack}", link.name);
            continue;
        }
        if let Some((name, reason)) = exceptions.iter().find(|(name, _)| *name == link.name) {
            println!("{name}: exception: {reason}");
            continue;
        }
        println!("link {}", link.name);
        let (ns, folder) = (Netns::new(), tempfile::tempdir().unwrap());
        ns.veth(1500);
        let link = Link {
            folder: folder.path().display().to_string(),
            ..link.clone()
        };
        test(&link, &ns);
    }
}

/// A refused start or check: its status and log.
fn refusal(ns: &Netns, config: &str, args: &[&str]) -> (i32, String) {
    let (status, _, log) = ns.run(|| run(config, args));
    (status.code().unwrap_or(0), log)
}

#[test]
fn a_healthy_start_logs_no_error() {
    skip_if!(lacks());
    on_each(&[], |link, ns| {
        let dir = tempfile::tempdir().unwrap();
        let child = ns.run(|| spawn(dir.path(), &link.config(""), &[]));
        let daemon = Daemon::wait_ready(dir, child);
        let log = daemon.stop_and_read_log();
        assert!(!log.contains("ERROR"), "{}: {log}", link.name);
    });
}

#[test]
fn the_interface_stays_as_it_was() {
    skip_if!(lacks());
    on_each(&WITHOUT_INTERFACE, |link, ns| {
        let interface = link.interface.unwrap();
        let address = || ns.run(|| address_and_flags(interface));
        let before = address();
        let daemon = ns.siwd(&link.config(""), &[]);
        assert_eq!(address().0, before.0, "{}: while siwd runs", link.name);
        assert!(daemon.stop().success());
        assert_eq!(address(), before, "{}: afterwards", link.name);
    });
}

/// Ethernet address of an interface, and the line of its flags and MTU.
fn address_and_flags(interface: &str) -> (String, String) {
    let out = Command::new("ip")
        .args(["-o", "-d", "link", "show", interface])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let word_after = |word: &str| {
        let rest = text.split_once(word).map_or("", |(_, rest)| rest);
        rest.split_whitespace().next().unwrap_or("").to_owned()
    };
    let flags = format!(
        "{} {} {}",
        text.split('>').next().unwrap_or(""),
        word_after(" mtu "),
        word_after(" promiscuity ")
    );
    (word_after("link/ether "), flags)
}

#[test]
fn an_mtu_above_the_interfaces_is_refused() {
    skip_if!(lacks());
    on_each(
        &[PAIR, ("vhost", "its peer has no limit that siwd sees")],
        |link, ns| {
            let config = link.config("mtu = 2000");
            let (check, text) = refusal(ns, &config, &["--check"]);
            // A tap's limit is that of its driver.
            let expected = if link.name == "tap" { 1 } else { 3 };
            assert_eq!(check, expected, "{}: {text}", link.name);
            assert!(text.contains("mtu 2000") && text.contains("1500"), "{text}");
            let (start, text) = refusal(ns, &config, &[]);
            assert!(start == 1 && text.contains("mtu 2000"), "{text}");
        },
    );
}

#[test]
fn an_interface_serves_one_daemon() {
    skip_if!(lacks());
    on_each(&[PAIR], |link, ns| {
        let daemon = ns.siwd(&link.config(""), &[]);
        let (check, text) = refusal(ns, &link.config(""), &["--check"]);
        assert_eq!(check, 3, "{}: {text}", link.name);
        let (start, text) = refusal(ns, &link.config(""), &[]);
        assert_eq!(start, 1, "{}: {text}", link.name);
        daemon.context().query_devices().unwrap();
        if link.needs_xdp {
            // The kernel detaches the program of a killed daemon after a grace period.
            return;
        }
        // A killed daemon does not keep it.
        let mut daemon = daemon;
        daemon.kill();
        let next = ns.siwd(&link.config(""), &[]);
        assert!(next.stop().success());
    });
}

#[test]
fn clients_learn_the_link_state() {
    skip_if!(lacks());
    on_each(&WITHOUT_INTERFACE, |link, ns| {
        let daemon = ns.siwd(&link.config(""), &[]);
        let ctx = daemon.context();
        for (state, expected) in [
            ("down", siw::AsyncEventKind::PortErr),
            ("up", siw::AsyncEventKind::PortActive),
        ] {
            ns.ip(&format!("link set veth1 {state}"));
            let event = ctx.get_async_event(Some(PATIENCE)).unwrap();
            assert_eq!(event.kind, Some(expected), "{}: {event:?}", link.name);
        }
    });
}

/// Two daemons at the ends of a veth pair that carries packets of 3000 bytes, and a connection between
/// them.
struct TwoEnds {
    daemons: [Daemon; 2],
    a: End,
    b: End,
}

fn two_ends(link: &Link, ns: &Netns) -> TwoEnds {
    for end in ["veth0", "veth1"] {
        ns.ip(&format!("link set {end} mtu 3000"));
    }
    let mine = link.config("mtu = 3000");
    let other = replace_each(
        &mine,
        &[
            ("veth0", "veth1"),
            ("10.77.0.1", "10.77.0.2"),
            ("02:00:00:77:00:01", "02:00:00:77:00:02"),
        ],
    );
    let daemons = [mine, other].map(|config| ns.siwd(&config, &[]));
    let [a, b] = [0, 1].map(|end| End::new(&daemons[end].context(), 1 << 20));
    connect(&a, &b, "siw0", "10.77.0.2:0".parse().unwrap());
    TwoEnds { daemons, a, b }
}

fn replace_each(text: &str, pairs: &[(&str, &str)]) -> String {
    let replace = |text: String, (from, to): &(&str, &str)| text.replace(from, to);
    pairs.iter().fold(text.to_owned(), replace)
}

/// Sends a message and waits for its completion.
fn write(from: &End, to: &End, len: usize) {
    let sge = [from.mr.sge(0, len)];
    let write = SendWr::write(1, SendData::Sges(&sge), to.mr.addr(), to.mr.rkey());
    from.qp.post_send(&[write]).unwrap();
    assert_eq!(from.wc().status, WcStatus::SUCCESS);
}

fn count_of_device(daemon: &Daemon, name: &str) -> u64 {
    let text = daemon.context().read_stats().unwrap();
    let statistics: serde_json::Value = serde_json::from_str(&text).unwrap();
    statistics["total"][0][name].as_u64().unwrap()
}

/// A long frame is refused by the interface itself, or dropped by the peer's end.
#[test]
fn frames_that_an_interface_no_longer_takes_do_not_stop_the_device() {
    skip_if!(lacks());
    for narrow in ["veth0", "veth1"] {
        on_each(&WITHOUT_INTERFACE, |link, ns| {
            let TwoEnds { daemons, a, b } = two_ends(link, ns);
            write(&a, &b, 100_000);
            ns.ip(&format!("link set {narrow} mtu 1500"));
            // The long message gets through in shorter segments, and short traffic meanwhile.
            let sge = [a.mr.sge(0, 100_000)];
            let long = SendWr::write(1, SendData::Sges(&sge), b.mr.addr(), b.mr.rkey());
            a.qp.post_send(&[long]).unwrap();
            let (c, d) = (a.another(), b.another());
            connect(&c, &d, "siw0", "10.77.0.2:0".parse().unwrap());
            // The log is written at the next look at the links, four times a second.
            let end = Instant::now() + Duration::from_secs(1);
            while Instant::now() < end {
                write(&c, &d, 64);
                write(&d, &c, 64);
            }
            assert_eq!(a.wc().status, WcStatus::SUCCESS);
            write(&a, &b, 100_000);
            // AF_XDP does not compare frames with the MTU of its own interface: the peer gets them.
            let gets_through = link.needs_xdp && narrow == "veth0";
            let refused = count_of_device(&daemons[0], "tx_refused");
            assert_eq!(refused == 0, gets_through, "{}: {refused}", link.name);
            ns.ip(&format!("link set {narrow} mtu 3000"));
            write(&a, &b, 100_000);
            let [first, _] = daemons;
            let log = first.stop_and_read_log();
            let refusals = log.matches("the interface refused frames").count();
            assert_eq!(refusals, usize::from(!gets_through), "{}: {log}", link.name);
            let narrowed = log.matches("MTU is now 1500").count();
            assert_eq!(
                narrowed,
                usize::from(narrow == "veth0"),
                "{}: {log}",
                link.name
            );
        });
    }
}

/// Waits for a counter of the device's stacks.
fn wait_for_count(daemon: &Daemon, name: &str) {
    let end = Instant::now() + PATIENCE;
    let ctx = daemon.context();
    let count = || {
        let statistics: serde_json::Value =
            serde_json::from_str(&ctx.read_stats().unwrap()).unwrap();
        statistics["workers"][0]["devices"][0]["tcp"][name]
            .as_u64()
            .unwrap()
    };
    while count() == 0 {
        assert!(Instant::now() < end, "{name} stays 0");
    }
}

/// Both hosts are told, for IPv4 and IPv6: a second siwd, and a Linux host that announces nothing.
#[test]
fn a_second_host_with_an_address_is_reported() {
    skip_if!(lacks());
    for address in ["10.77.0.1/24", "fd77::1/64"] {
        on_each(&WITHOUT_INTERFACE, |link, ns| {
            let mine = link.config("").replace("10.77.0.1/24", address);
            let second = [
                ("veth0", "veth1"),
                ("02:00:00:77:00:01", "02:00:00:77:00:02"),
            ];
            let daemons =
                [mine.clone(), replace_each(&mine, &second)].map(|config| ns.siwd(&config, &[]));
            let macs = [0, 1].map(|end| device_mac(&daemons[end]));
            for daemon in &daemons {
                wait_for_count(daemon, "address_conflicts");
            }
            let [first, second] = daemons.map(|daemon| daemon.stop_and_read_log());
            for (log, other) in [(first, &macs[1]), (second, &macs[0])] {
                let found = log.contains("another host on the link has this address");
                assert!(
                    found && log.contains(other.as_str()),
                    "{}: {log}",
                    link.name
                );
            }

            ns.address("veth1", address);
            let daemon = ns.siwd(&mine, &[]);
            wait_for_count(&daemon, "address_conflicts");
            let log = daemon.stop_and_read_log();
            let linux = ns.run(|| address_and_flags("veth1")).0;
            assert!(log.contains(&linux), "{}: {log}", link.name);
        });
    }
}

/// Ethernet address of the first device, as text.
fn device_mac(daemon: &Daemon) -> String {
    let devices = daemon.context().query_devices().unwrap();
    devices[0].mac.map(|byte| format!("{byte:02x}")).join(":")
}
