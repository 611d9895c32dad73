//! Properties that hold on every link, by a table of links.

use std::process::Command;

use siw_xdp::{ClaimKind, XdpSteering};

use crate::common::net::{Netns, lacks_network, missing_program};
use crate::common::*;

/// One row: a link in a namespace with a veth pair.
struct Link {
    name: &'static str,
    /// The keys of its device.
    keys: &'static str,
    /// The interface of the kernel that it uses, which exists without siwd.
    interface: Option<&'static str>,
    needs_xdp: bool,
}

const LINKS: [Link; 4] = [
    Link {
        name: "pair",
        keys: "pair = \"lo\"",
        interface: None,
        needs_xdp: false,
    },
    Link {
        name: "af_packet",
        keys: "devargs = \"net_af_packet0,iface=veth0\"\nmac = \"02:00:00:77:00:01\"",
        interface: Some("veth0"),
        needs_xdp: false,
    },
    Link {
        name: "tap",
        keys: "devargs = \"net_tap0,iface=siwtap0\"",
        interface: None,
        needs_xdp: false,
    },
    Link {
        name: "af_xdp",
        keys: "af_xdp = \"veth0\"",
        interface: Some("veth0"),
        needs_xdp: true,
    },
];

impl Link {
    fn config(&self, more: &str) -> String {
        let pair = "[[device]]\nname = \"siw1\"\npair = \"lo\"\naddresses = [\"10.77.0.2/24\"]\n";
        let pair = if self.name == "pair" { pair } else { "" };
        format!(
            "[dpdk]\nhugepages = \"never\"\nbuffers = 8192\n{pair}[[device]]\nname = \"siw0\"\n{}\n\
             addresses = [\"10.77.0.1/24\"]\n{more}\n",
            self.keys
        )
    }
}

fn lacks() -> Option<String> {
    lacks_network().or_else(|| missing_program("ethtool"))
}

/// Runs the test for each link that this machine has, in a namespace of its own.
fn on_each(test: impl Fn(&Link, &Netns)) {
    let xdp_lack = XdpSteering::load(ClaimKind::Addresses, None, 1).err();
    for link in &LINKS {
        if let (true, Some(lack)) = (link.needs_xdp, &xdp_lack) {
            println!("without {}: {lack}", link.name);
            continue;
        }
        println!("link {}", link.name);
        let ns = Netns::new();
        ns.veth(1500);
        test(link, &ns);
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
    on_each(|link, ns| {
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
    on_each(|link, ns| {
        let Some(interface) = link.interface else {
            return;
        };
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
    on_each(|link, ns| {
        if link.name == "pair" {
            return;
        }
        let config = link.config("mtu = 2000");
        let (check, text) = refusal(ns, &config, &["--check"]);
        // A tap's limit is that of its driver.
        let expected = if link.name == "tap" { 1 } else { 3 };
        assert_eq!(check, expected, "{}: {text}", link.name);
        assert!(text.contains("mtu 2000") && text.contains("1500"), "{text}");
        let (start, text) = refusal(ns, &config, &[]);
        assert!(start == 1 && text.contains("mtu 2000"), "{text}");
    });
}

#[test]
fn an_interface_serves_one_daemon() {
    skip_if!(lacks());
    on_each(|link, ns| {
        if link.name == "pair" {
            return;
        }
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
    on_each(|link, ns| {
        if link.interface.is_none() {
            return;
        }
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
