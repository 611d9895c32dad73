//! Every kind of link that a configuration in config/ describes, brought up for real, with Linux or
//! a second siwd at the other end.

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use crate::common::net::{Netns, lacks_network, missing_program, siw_ping, tshark_fields};
use crate::common::*;

/// A file of config/ with normal pages and an existing core: tests share the machine.
pub fn config(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../config")
        .join(name);
    let text = std::fs::read_to_string(path).unwrap();
    let text = replaced(&text, "cores = [1]", "");
    replaced(
        &text,
        "hugepages = \"auto\"",
        "hugepages = \"never\"\nbuffers = 4096",
    )
}

/// Replaces text that must be present.
fn replaced(text: &str, from: &str, to: &str) -> String {
    assert!(
        text.contains(from),
        "{from:?} is not in the configuration:\n{text}"
    );
    text.replace(from, to)
}

fn ip(a: &str) -> IpAddr {
    a.parse().unwrap()
}

fn ping_at(server: &Daemon, client: &Daemon, addr: &str, size: usize) -> Output {
    let mut s = siw_ping(server, &format!("-s -a {addr} --timeout 30"));
    let mut s = s
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut err = BufReader::new(s.stderr.take().unwrap());
    let mut line = String::new();
    err.read_line(&mut line).unwrap();
    let args = format!("-c -a {addr} -C 3 -V -v --timeout 30 -S {size}");
    let out = siw_ping(client, &args).output().unwrap();
    if !out.status.success() {
        let _ = s.kill();
    }
    assert_eq!(
        s.wait().unwrap().success(),
        out.status.success(),
        "the server: {line}"
    );
    out
}

/// Pings between two daemons and compares the data.
pub fn pings(server: &Daemon, client: &Daemon, addr: &str, size: usize) {
    let out = ping_at(server, client, addr, size);
    let err = String::from_utf8_lossy(&out.stderr);
    assert!(
        out.status.success() && err.is_empty(),
        "{addr}, {size} bytes: {err}"
    );
    let text = String::from_utf8_lossy(&out.stdout);
    assert_eq!(
        text.lines().filter(|l| l.contains("rdma-ping-")).count(),
        3,
        "{text}"
    );
}

/// Checks that Linux in this namespace reaches siwd and gets a refusal from a closed port.
pub fn linux_reaches(ns: &Netns, siwd: &str) {
    ns.wait_ping(ip(siwd));
    let closed = SocketAddr::new(ip(siwd), 9);
    let error = ns
        .run(|| TcpStream::connect_timeout(&closed, PATIENCE))
        .unwrap_err();
    assert_eq!(
        error.kind(),
        std::io::ErrorKind::ConnectionRefused,
        "{siwd}: {error}"
    );
}

#[test]
fn the_configurations_that_need_special_hardware_pass_their_check() {
    for name in [
        "pci.toml",
        "shared-nic.toml",
        "loopback.toml",
        "tap.toml",
        "af_packet.toml",
        "vhost-user.toml",
    ] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../config")
            .join(name);
        let out = std::process::Command::new(env!("CARGO_BIN_EXE_siwd"))
            .arg("--config")
            .arg(path)
            .arg("--check")
            .output()
            .unwrap();
        let err = String::from_utf8_lossy(&out.stderr);
        // This machine lacks what some of them name.
        assert!(
            matches!(out.status.code(), Some(0 | 3 | 4)),
            "{name}: {err}"
        );
    }
}

#[test]
fn the_tap_configuration_lets_linux_ping_siwd_and_get_resets() {
    skip_if!(lacks_network());
    let ns = Netns::new();
    let siwd = ns.siwd(&config("tap.toml"), &[]);
    // According to the comments of the file.
    ns.address("siwtap0", "10.77.0.2/24");
    ns.address("siwtap0", "fd77::2/64");
    ns.ip("link set siwtap0 up");
    linux_reaches(&ns, "10.77.0.1");
    linux_reaches(&ns, "fd77::1");
    assert!(
        ns.ping(ip("10.77.0.1"), 1400, PATIENCE),
        "nearly a whole frame"
    );
    assert!(
        ns.ping(ip("fd77::1"), 1400, PATIENCE),
        "nearly a whole frame"
    );
    assert!(siwd.stop().success());
    assert!(
        !ns.ip("link").contains("siwtap0"),
        "the interface goes with the daemon"
    );
}

#[test]
fn two_daemons_take_turns_on_one_tap_name() {
    skip_if!(lacks_network());
    let ns = Netns::new();
    for _ in 0..2 {
        let siwd = ns.siwd(&config("tap.toml"), &[]);
        ns.address("siwtap0", "10.77.0.2/24");
        ns.ip("link set siwtap0 up");
        ns.wait_ping(ip("10.77.0.1"));
        assert!(siwd.stop().success());
    }
}

#[test]
fn a_tap_without_a_configured_address_draws_one_of_its_own() {
    skip_if!(lacks_network());
    let ns = Netns::new();
    let text = replaced(&config("tap.toml"), "mac = \"02:00:00:77:00:01\"", "");
    let _siwd = ns.siwd(&text, &[]);
    ns.address("siwtap0", "10.77.0.2/24");
    ns.ip("link set siwtap0 up");
    ns.wait_ping(ip("10.77.0.1"));
}

#[test]
fn the_af_packet_configuration_lets_linux_ping_siwd_over_a_veth_pair() {
    skip_if!(lacks_network().or_else(|| missing_program("ethtool")));
    let ns = Netns::new();
    ns.veth(1500);
    ns.address("veth1", "10.77.0.2/24");
    let _siwd = ns.siwd(&config("af_packet.toml"), &[]);
    linux_reaches(&ns, "10.77.0.1");
    assert!(ns.ping(ip("10.77.0.1"), 1400, PATIENCE));
}

/// A second daemon's end of the veth pair, with other names and addresses.
pub fn other_end(text: &str) -> String {
    let text = replaced(text, "veth0", "veth1");
    let text = replaced(&text, "02:00:00:77:00:01", "02:00:00:77:00:02");
    replaced(&text, "10.77.0.1/24", "10.77.0.2/24")
}

#[test]
fn two_daemons_ping_each_other_over_a_veth_pair() {
    skip_if!(lacks_network().or_else(|| missing_program("ethtool")));
    let ns = Netns::new();
    ns.veth(1500);
    ns.ip("link set veth1 arp off");
    let text = config("af_packet.toml");
    let (a, b) = (ns.siwd(&text, &[]), ns.siwd(&other_end(&text), &[]));
    pings(&b, &a, "10.77.0.2", 64);
    pings(&a, &b, "10.77.0.1", 300_000);
}

#[test]
fn jumbo_frames_are_filled_over_veth() {
    skip_if!(
        lacks_network()
            .or_else(|| missing_program("ethtool"))
            .or_else(|| missing_program("tshark"))
    );
    let ns = Netns::new();
    ns.veth(9000);
    ns.ip("link set veth1 arp off");
    let text = replaced(&config("af_packet.toml"), "mtu = 1500", "mtu = 9000");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("jumbo.pcapng");
    let a = ns.siwd(&text, &["--capture", file.to_str().unwrap()]);
    let b = ns.siwd(&other_end(&text), &[]);
    pings(&b, &a, "10.77.0.2", 100_000);
    drop(b);
    assert!(a.stop().success());
    let sizes: Vec<usize> = tshark_fields(&file, "tcp.len > 0", &["ip.len"])
        .iter()
        .map(|r| r[0].parse().unwrap())
        .collect();
    let most = sizes.iter().copied().max().unwrap();
    // FPDU lengths are multiples of four: at most three bytes of each frame stay unused.
    assert!(
        (8997..=9000).contains(&most),
        "the longest packet has {most} bytes"
    );
    crate::common::net::judge(&file);
}

#[test]
fn a_tap_that_cannot_carry_jumbo_frames_says_what_it_can() {
    skip_if!(lacks_network());
    let ns = Netns::new();
    let text = replaced(&config("tap.toml"), "mtu = 1500", "mtu = 9000");
    let (status, _, err) = ns.run(|| run(&text, &[]));
    assert_eq!(status.code(), Some(1));
    assert!(
        err.contains("siwd.toml:") && err.contains("mtu 9000: this link carries at most 1500"),
        "{err}"
    );
}

#[test]
fn a_vlan_device_speaks_in_its_vlan_and_hears_nothing_else() {
    skip_if!(
        lacks_network()
            .or_else(|| missing_program("ethtool"))
            .or_else(|| missing_program("tshark"))
    );
    let ns = Netns::new();
    ns.veth(1504);
    ns.ip("link set veth1 arp off");
    let text = replaced(
        &config("af_packet.toml"),
        "mtu = 1500",
        "mtu = 1500\nvlan = 100",
    );
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("vlan.pcapng");
    let a = ns.siwd(&text, &["--capture", file.to_str().unwrap()]);
    let b = ns.siwd(&other_end(&text), &[]);
    pings(&b, &a, "10.77.0.2", 20_000);
    drop(b);
    // siwd ignores untagged frames from Linux and frames of a daemon in another VLAN.
    let other = replaced(&other_end(&text), "vlan = 100", "vlan = 101");
    let c = ns.siwd(&other, &[]);
    let out = siw_ping(&c, "-c -a 10.77.0.1 -C 1 --timeout 8")
        .output()
        .unwrap();
    let err = String::from_utf8_lossy(&out.stderr);
    assert!(
        !out.status.success() && err.contains("no neighbour"),
        "{err}"
    );
    drop(c);
    ns.ip("link set veth1 arp on");
    ns.address("veth1", "10.77.0.2/24");
    assert!(!ns.ping(ip("10.77.0.1"), 56, Duration::from_secs(1)));
    assert!(a.stop().success());
    let mac = "eth.src == 02:00:00:77:00:01";
    let sent = tshark_fields(&file, mac, &["vlan.id"]);
    assert!(
        sent.len() > 10 && sent.iter().all(|r| r[0] == "100"),
        "{sent:?}"
    );
    let heard = tshark_fields(
        &file,
        "tcp && vlan.id == 100 && !(eth.src == 02:00:00:77:00:01)",
        &["tcp.len"],
    );
    assert!(heard.len() > 10, "the peer's frames are tagged too");
}

fn vhost(dir: &Path) -> (String, PathBuf) {
    let socket = dir.join("vhost0.sock");
    let text = config("vhost-user.toml");
    let iface = "iface=/run/siwd/vhost0.sock";
    (
        replaced(&text, iface, &format!("iface={}", socket.display())),
        socket,
    )
}

#[test]
fn the_vhost_user_configuration_opens_its_socket_and_removes_it() {
    let dir = tempfile::tempdir().unwrap();
    let (text, socket) = vhost(dir.path());
    let siwd = Daemon::start(&text, &[]);
    let end = Instant::now() + PATIENCE;
    while !socket.exists() {
        assert!(Instant::now() < end, "no socket");
        std::thread::yield_now();
    }
    assert!(siwd.stop().success());
    assert!(!socket.exists(), "the socket stays behind");
}

#[test]
fn a_daemon_on_virtio_user_pings_one_behind_vhost_user() {
    let dir = tempfile::tempdir().unwrap();
    let (text, socket) = vhost(dir.path());
    let back = Daemon::start(&text, &[]);
    let front = format!(
        r#"
[dpdk]
hugepages = "never"
buffers = 4096
[[device]]
name = "siw0"
devargs = "net_virtio_user0,path={},queues=1,queue_size=256"
mac = "02:00:00:77:00:02"
addresses = ["10.77.0.2/24"]
mtu = 1500
"#,
        socket.display()
    );
    let front = Daemon::start(&front, &[]);
    pings(&back, &front, "10.77.0.1", 64);
    pings(&front, &back, "10.77.0.2", 100_000);
    assert!(front.stop().success());
    // The back end survives its front end and serves the next one.
    assert!(back.stop().success());
}

#[test]
fn a_listener_of_linux_and_siwd_meet_on_the_tap_over_a_gateway_address() {
    skip_if!(lacks_network());
    let ns = Netns::new();
    let text = replaced(
        &config("tap.toml"),
        "mtu = 1500",
        "mtu = 1500\ngateway = \"10.77.0.2\"",
    );
    let siwd = ns.siwd(&text, &[]);
    ns.address("siwtap0", "10.77.0.2/24");
    ns.ip("link set siwtap0 up");
    ns.address("lo", "192.0.2.7/32");
    ns.wait_ping(ip("10.77.0.1"));
    // A network behind the gateway.
    let listener = ns.run(|| TcpListener::bind("192.0.2.7:0")).unwrap();
    let app = End::new(&siwd.context(), 4096);
    app.qp
        .connect(
            &app.cm,
            listener.local_addr().unwrap(),
            &siw::ConnectOptions::default(),
        )
        .unwrap();
    let (_, from) = listener.accept().unwrap();
    assert_eq!(from.ip(), ip("10.77.0.1"));
}

/// The thread that asks the driver stands still, as in a call that takes long.
#[test]
fn a_driver_that_takes_long_to_tell_the_state_of_its_link_holds_up_no_client() {
    skip_if!(lacks_network());
    let ns = Netns::new();
    let siwd = ns.siwd(&config("tap.toml"), &[]);
    let client = siwd.context();
    let Some(stopped) = StoppedThread::stop(siwd.child.id(), "siwd-link") else {
        return;
    };
    ns.ip("link set siwtap0 down");
    for _ in 0..3 {
        drop(client.alloc_pd().unwrap());
    }
    assert!(client.query_device(0).unwrap().active);
    drop(stopped);
    let event = client.get_async_event(Some(PATIENCE)).unwrap();
    assert_eq!(event.kind, Some(siw::AsyncEventKind::PortErr));
    drop(client);
    assert!(siwd.stop().success());
}

#[test]
fn a_link_that_goes_down_and_up_is_told_to_every_client() {
    skip_if!(lacks_network());
    let ns = Netns::new();
    let siwd = ns.siwd(&config("tap.toml"), &[]);
    let clients = [siwd.context(), siwd.context()];
    let active = |c: &siw::Context| c.query_device(0).unwrap().active;
    for (state, kind) in [
        ("down", siw::AsyncEventKind::PortErr),
        ("up", siw::AsyncEventKind::PortActive),
        ("down", siw::AsyncEventKind::PortErr),
    ] {
        ns.ip(&format!("link set siwtap0 {state}"));
        for c in &clients {
            let event = c.get_async_event(Some(PATIENCE)).unwrap();
            assert_eq!((event.kind, event.object), (Some(kind), 0), "{event:?}");
            assert_eq!(active(c), state == "up");
        }
    }
    let statistics = clients[0].read_stats().unwrap();
    let statistics: serde_json::Value = serde_json::from_str(&statistics).unwrap();
    assert_eq!(statistics["total"][0]["link_downs"], 2, "{statistics}");
}

#[test]
fn the_speed_of_a_link_that_knows_none_is_unknown() {
    skip_if!(lacks_network().or_else(|| missing_program("ethtool")));
    let ns = Netns::new();
    ns.ip("link add bridge0 type bridge");
    ns.ip("link set bridge0 up arp off");
    let siwd = ns.siwd(
        &replaced(&config("af_packet.toml"), "veth0", "bridge0"),
        &[],
    );
    let context = siwd.context();
    assert_eq!(context.query_device(0).unwrap().link_mbps, 0);
    let statistics = context.read_stats().unwrap();
    let statistics: serde_json::Value = serde_json::from_str(&statistics).unwrap();
    assert_eq!(statistics["total"][0]["link_mbps"], 0, "{statistics}");
    // As the kernel has it (ib_get_eth_speed): InfiniBand has no value for an unknown speed.
    let tree = siw_shm::device_identity::sysfs_tree_of(&siwd.socket);
    let rate = tree.join("class/infiniband/siw0/ports/1/rate");
    let rate = std::fs::read_to_string(rate).unwrap();
    assert_eq!(rate.trim_end(), "2.5 Gb/sec (1X SDR)");
}
