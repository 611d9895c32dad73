//! A NIC of siwd that the kernel shares by a TAP interface: Linux's ping and TCP work at the RDMA
//! address, each TCP port has one owner, and nothing is left behind after the end of siwd.
//!
//! ```text
//! namespace near:  kernel -- rdma0 (TAP) -- siwd -- AF_PACKET -- veth0
//! namespace far:   kernel -- veth1 -- AF_PACKET -- another siwd
//! ```

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::net::{Netns, lacks_network, missing_program};
use crate::common::typing::{Typist, echo};
use crate::common::*;
use siw::{AhAttr, CmListener, GRH_LEN, MULTICAST_QPN, RecvWr, SendData, SendWr, WcStatus};

/// Addresses of the kernels and daemons; the near kernel and its siwd have the same ones.
const SHARED: &str = "10.77.0.1";
const SHARED6: &str = "fd77::1";
const FAR_KERNEL: &str = "10.77.0.2";
const FAR_KERNEL6: &str = "fd77::2";
const FAR_SIWD: &str = "10.77.0.3";

fn lacks() -> Option<String> {
    lacks_network()
        .or_else(|| missing_program("ethtool"))
        .or_else(|| missing_program("ping"))
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn config(interface: &str, mac: u8, lines: &str) -> String {
    format!(
        "[dpdk]\nhugepages = \"never\"\nbuffers = 8192\n[[device]]\nname = \"siw0\"\n\
         devargs = \"net_af_packet0,iface={interface}\"\nmac = \"02:00:00:77:00:{mac:02x}\"\n{lines}\n"
    )
}

fn near_config(lines: &str) -> String {
    let addresses = format!("addresses = [\"{SHARED}/24\", \"{SHARED6}/64\"]");
    let host = "host_interface = \"rdma0\"\nhost_ports = \"61000-61199\"";
    config("veth0", 1, &format!("{addresses}\n{host}\n{lines}"))
}

/// The two namespaces, joined by a veth pair whose ends the daemons take.
struct Network {
    near: Netns,
    far: Netns,
}

impl Network {
    fn new(mtu: u32) -> Network {
        let (near, far) = (Netns::new(), Netns::new());
        near.veth(mtu);
        // A NIC owned by siwd has no kernel interface, so this interface must not deliver its
        // frames to the kernel too.
        near.run(|| {
            for (setting, value) in [
                ("ipv4/conf/veth0/rp_filter", "1"),
                ("ipv6/conf/veth0/disable_ipv6", "1"),
            ] {
                std::fs::write(format!("/proc/sys/net/{setting}"), value).unwrap();
            }
        });
        near.give("veth1", &far);
        far.ip("link set veth1 arp on");
        far.address("veth1", &format!("{FAR_KERNEL}/24"));
        far.address("veth1", &format!("{FAR_KERNEL6}/64"));
        Network { near, far }
    }

    /// Starts the daemon that shares its NIC.
    fn near_siwd(&self, lines: &str) -> Daemon {
        let siwd = self.near.siwd(&near_config(lines), &[]);
        self.far.wait_ping(ip(SHARED));
        siwd
    }

    /// Starts the daemon at the other end, with an address of its own.
    fn far_siwd(&self) -> Daemon {
        let addresses = format!("addresses = [\"{FAR_SIWD}/24\"]");
        self.far.siwd(&config("veth1", 3, &addresses), &[])
    }

    /// Exchanges `bytes` in each direction over a TCP stream of the kernels, to a listener of
    /// `server` at `address`.
    fn exchange(server: &Netns, address: &str, client: &Netns, bytes: usize) {
        let listener = server.run(|| TcpListener::bind((address, 0)).unwrap());
        let to = listener.local_addr().unwrap();
        let stream = client.run(|| TcpStream::connect_timeout(&to, PATIENCE).unwrap());
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let sent = pattern(7, bytes);
        std::thread::scope(|scope| {
            scope.spawn(|| echo(listener.accept().unwrap().0));
            scope.spawn(|| {
                (&stream).write_all(&sent).unwrap();
                stream.shutdown(std::net::Shutdown::Write).unwrap();
            });
            let mut back = Vec::new();
            (&stream).read_to_end(&mut back).unwrap();
            assert!(back == sent, "{address}: {} of {bytes} bytes", back.len());
        });
    }
}

/// A counter of the daemon's only device.
fn counter(daemon: &Daemon, name: &str) -> u64 {
    let out = Command::new(client_program("siwctl"))
        .arg("stat")
        .arg("--socket")
        .arg(&daemon.socket)
        .arg("--json")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let stats: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let value = stats["devices"][0]["merged"][name].as_u64();
    value.unwrap_or_else(|| panic!("no {name} in {stats}"))
}

#[test]
fn linux_and_rdma_use_one_address_at_the_same_time() {
    skip_if!(lacks());
    let net = Network::new(1500);
    let (near, far) = (net.near_siwd(""), net.far_siwd());
    let ends = || {
        (
            End::new(&near.context(), 1 << 20),
            End::new(&far.context(), 1 << 20),
        )
    };
    // siwd listens on the shared address, and connects from it.
    let (inward, outward) = (ends(), ends());
    connect(
        &inward.1,
        &inward.0,
        "siw0",
        format!("{SHARED}:0").parse().unwrap(),
    );
    connect(
        &outward.0,
        &outward.1,
        "siw0",
        format!("{FAR_SIWD}:0").parse().unwrap(),
    );
    let is_over = AtomicBool::new(false);
    let shell = net.near.run(|| TcpListener::bind((SHARED, 0)).unwrap());
    let shell_address = shell.local_addr().unwrap();
    let (rounds, lines) = std::thread::scope(|scope| {
        scope.spawn(|| echo(shell.accept().unwrap().0));
        let typing = scope.spawn(|| {
            let mut typist =
                Typist::new(net.far.run(|| TcpStream::connect(shell_address).unwrap()));
            while !is_over.load(Ordering::Relaxed) {
                typist.type_line();
            }
            typist.lines()
        });
        let rdma = scope.spawn(|| {
            let mut rounds = 0u32;
            while !is_over.load(Ordering::Relaxed) {
                ping(&inward.0, &inward.1);
                ping(&inward.1, &inward.0);
                ping(&outward.0, &outward.1);
                rounds += 1;
            }
            rounds
        });
        let guard = StopOnDrop(&is_over);
        Network::exchange(&net.near, SHARED, &net.far, 8 << 20);
        Network::exchange(&net.near, SHARED6, &net.far, 1 << 20);
        Network::exchange(&net.far, FAR_KERNEL, &net.near, 8 << 20);
        Network::exchange(&net.far, FAR_KERNEL6, &net.near, 1 << 20);
        for (from, to) in [
            (&net.far, SHARED),
            (&net.far, SHARED6),
            (&net.near, FAR_KERNEL),
            (&net.near, FAR_KERNEL6),
        ] {
            assert!(from.ping(ip(to), 56, PATIENCE), "{to}");
            // Fragments over IPv6 only: DPDK's AF_PACKET reassembles IPv4 and then truncates.
            if to.contains(':') {
                assert!(from.ping(ip(to), 4000, PATIENCE), "{to}");
            }
        }
        drop(guard);
        (rdma.join().unwrap(), typing.join().unwrap())
    });
    assert!(rounds > 0 && lines > 0, "{rounds} rounds, {lines} lines");
    // One answer to each echo, although two stacks have the address.
    let said = net.far.command("ping", &format!("-c 3 -i 0.1 {SHARED}"));
    assert!(
        said.contains("3 received") && !said.contains("DUP"),
        "{said}"
    );
    // The peer's kernel refuses a port without a listener, and the error arrives.
    let closed = SocketAddr::new(ip(SHARED), 9);
    let refused = net
        .far
        .run(|| TcpStream::connect_timeout(&closed, PATIENCE))
        .unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    assert_eq!(
        counter(&near, "TcpOutRsts"),
        0,
        "the kernel said so, not siwd"
    );
    assert!(near.stop().success() && far.stop().success());
    assert!(!net.near.ip("link").contains("rdma0"));
}

#[test]
fn a_port_belongs_to_linux_or_to_siwd() {
    skip_if!(lacks());
    let net = Network::new(1500);
    let (near, far) = (net.near_siwd(""), net.far_siwd());
    let end = End::new(&near.context(), 4096);
    let at = |port: u16| SocketAddr::new(ip(SHARED), port);
    let bind = |to: SocketAddr| net.near.run(|| TcpListener::bind(to));
    // Linux owns the port first.
    let linux = bind(at(0)).unwrap();
    let port = linux.local_addr().unwrap().port();
    for to in [at(port), SocketAddr::new(ip("0.0.0.0"), port)] {
        let refused = CmListener::new(&end.cm, None, to, 8, 0).err().unwrap();
        let text = refused.to_string();
        assert!(
            text.contains(&format!("TCP port {port}")) && text.contains("ss -tanp"),
            "{text}"
        );
    }
    drop(linux);
    // Now siwd owns it, on one address or on all.
    let listener = CmListener::new(&end.cm, None, at(port), 8, 0).unwrap();
    let anywhere = CmListener::new(&end.cm, None, "0.0.0.0:0".parse().unwrap(), 8, 0).unwrap();
    for to in [
        at(port),
        at(anywhere.local_addr().port()),
        SocketAddr::new(ip(SHARED6), anywhere.local_addr().port()),
        // Ports reserved for siwd's connects.
        at(61_000),
        at(61_199),
    ] {
        let refused = bind(to).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::AddrInUse, "{to}");
    }
    // Linux picks other ports for its own connects.
    let remote = net.far.run(|| TcpListener::bind((FAR_KERNEL, 0)).unwrap());
    let to = remote.local_addr().unwrap();
    let stream = net.near.run(|| TcpStream::connect(to).unwrap());
    let drawn = stream.local_addr().unwrap().port();
    assert!(drawn != port && !(61_000..=61_199).contains(&drawn));
    drop((listener, anywhere));
    let end_of_wait = Instant::now() + PATIENCE;
    while bind(at(port)).is_err() {
        assert!(Instant::now() < end_of_wait, "siwd gives the port back");
        std::thread::yield_now();
    }
    assert!(near.stop().success() && far.stop().success());
}

/// A shared address gets the kernel's datagrams, and siwd's from its first queue pair of datagrams on.
#[test]
fn datagrams_of_rocev2_are_siwds_when_it_has_a_queue_pair_for_them() {
    const QKEY: u32 = 7;
    skip_if!(lacks());
    let net = Network::new(1500);
    let (near, far) = (net.near_siwd(""), net.far_siwd());
    let roce = SocketAddr::new(ip(SHARED), 4791);
    let linux = net.near.run(|| UdpSocket::bind(roce)).unwrap();
    linux.set_read_timeout(Some(PATIENCE)).unwrap();
    let from_far = net.far.run(|| UdpSocket::bind("0.0.0.0:0")).unwrap();
    from_far.send_to(b"for Linux", roce).unwrap();
    let mut message = [0; 16];
    assert_eq!(linux.recv(&mut message).unwrap(), 9);

    let ends = [&near, &far].map(|siwd| {
        let end = End::new(&siwd.context(), 4096);
        end.qp.start_datagrams(0, QKEY).unwrap();
        end
    });
    let addresses = [SHARED, FAR_SIWD];
    for (from, to) in [(0, 1), (1, 0)] {
        let sges = &[ends[to].mr.sge(0, 100)];
        ends[to].qp.post_recv(&[RecvWr { wr_id: 2, sges }]).unwrap();
        let attr = AhAttr {
            timeout: Some(Duration::from_secs(5)),
            ..AhAttr::new(0, ip(addresses[to]))
        };
        let ah = ends[from].ctx.create_ah(&attr).unwrap();
        let request = SendWr::send(1, SendData::Inline(b"datagram"));
        let request = request.with_destination(ah.number(), ends[to].qp.qp_num(), QKEY);
        ends[from].qp.post_send(&[request]).unwrap();
        assert_eq!(ends[from].wc().status, WcStatus::SUCCESS);
        let got = ends[to].wc();
        assert_eq!((got.wr_id, got.status), (2, WcStatus::SUCCESS));
        assert_eq!(ends[to].read(GRH_LEN, 8), b"datagram");
    }
}

/// Members of a group get the datagrams of RoCEv2 to it, and the kernel's programs all others.
#[test]
fn groups_of_queue_pairs_and_of_linux_share_a_device() {
    const QKEY: u32 = 7;
    const GROUP: &str = "239.1.2.3";
    skip_if!(lacks());
    let net = Network::new(1500);
    let (near, far) = (net.near_siwd(""), net.far_siwd());
    let group: Ipv4Addr = GROUP.parse().unwrap();
    let linux = net.near.run(|| UdpSocket::bind("0.0.0.0:7000")).unwrap();
    linux.set_read_timeout(Some(PATIENCE)).unwrap();
    let shared: Ipv4Addr = SHARED.parse().unwrap();
    linux.join_multicast_v4(&group, &shared).unwrap();
    let ends = [&near, &far].map(|siwd| {
        let end = End::new(&siwd.context(), 4096);
        end.qp.start_datagrams(0, QKEY).unwrap();
        end
    });
    for end in &ends {
        end.qp.attach_group(ip(GROUP)).unwrap();
    }

    let to_linux = net.far.run(|| UdpSocket::bind((FAR_KERNEL, 0))).unwrap();
    to_linux.send_to(b"for Linux", (group, 7000)).unwrap();
    let mut message = [0; 16];
    assert_eq!(linux.recv(&mut message).unwrap(), 9);

    for from in [0, 1] {
        for end in &ends {
            let sges = &[end.mr.sge(0, 100)];
            end.qp.post_recv(&[RecvWr { wr_id: 2, sges }]).unwrap();
        }
        let ah = ends[from]
            .ctx
            .create_ah(&AhAttr::new(0, ip(GROUP)))
            .unwrap();
        let request = SendWr::send(1, SendData::Inline(b"to all"));
        let request = request.with_destination(ah.number(), MULTICAST_QPN, QKEY);
        ends[from].qp.post_send(&[request]).unwrap();
        // The sender is a member, too.
        let done = [ends[from].wc(), ends[from].wc(), ends[1 - from].wc()];
        assert!(done.iter().all(|wc| wc.status == WcStatus::SUCCESS));
        for end in &ends {
            assert_eq!(end.read(GRH_LEN, 6), b"to all");
        }
    }
}

#[test]
fn a_killed_daemon_leaves_no_interface_and_no_port() {
    skip_if!(lacks());
    let net = Network::new(1500);
    let mut near = net.near_siwd("");
    assert!(net.near.ip("link").contains("rdma0"));
    let shown = net.near.ip("addr show rdma0");
    for part in ["02:00:00:77:00:01", "mtu 1500", SHARED, SHARED6, "UP"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    near.kill();
    assert!(!net.near.ip("link").contains("rdma0"));
    // A second start directly afterwards.
    let near = net.near_siwd("");
    assert!(near.stop().success());
    assert!(!net.near.ip("link").contains("rdma0"));
}

#[test]
fn a_flood_for_the_kernel_leaves_rdma_its_worker() {
    const FLOOD: Duration = Duration::from_millis(1500);
    skip_if!(lacks());
    let net = Network::new(1500);
    let (near, far) = (net.near_siwd(""), net.far_siwd());
    let (a, b) = (
        End::new(&near.context(), 4096),
        End::new(&far.context(), 4096),
    );
    connect(&b, &a, "siw0", format!("{SHARED}:0").parse().unwrap());
    let before = counter(&near, "SiwHostFrames");
    let is_over = AtomicBool::new(false);
    let (sent, rounds) = std::thread::scope(|scope| {
        let flood = scope.spawn(|| {
            let socket = net.far.run(|| UdpSocket::bind((FAR_KERNEL, 0)).unwrap());
            socket.connect((SHARED, 9)).unwrap();
            let mut sent = 0u64;
            while !is_over.load(Ordering::Relaxed) {
                // A send may fail because of an ICMP error, which is equally good.
                sent += u64::from(socket.send(&[0; 18]).is_ok());
            }
            sent
        });
        let guard = StopOnDrop(&is_over);
        let begin = Instant::now();
        let mut rounds = 0u64;
        while begin.elapsed() < FLOOD || (rounds <= 20 && begin.elapsed() < PATIENCE) {
            ping(&a, &b);
            ping(&b, &a);
            rounds += 1;
        }
        drop(guard);
        (flood.join().unwrap(), rounds)
    });
    let handed = counter(&near, "SiwHostFrames") - before;
    println!("{sent} datagrams sent, {handed} handed to the kernel, {rounds} rounds of RDMA");
    assert!(sent > 1000 && handed > 0);
    assert!(
        rounds > 20,
        "{rounds} rounds of RDMA during {sent} datagrams"
    );
    // The kernel can be reached again.
    net.far.wait_ping(ip(SHARED));
    assert!(near.stop().success() && far.stop().success());
}

#[test]
fn the_interface_shows_the_devices_vlan_without_tags() {
    skip_if!(lacks());
    let net = Network::new(1504);
    net.far.ip("addr flush dev veth1");
    // Two workers, of which one has no queue of the port: the other sends for it and for the
    // kernel.
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let cores = if processors > 1 { "[0, 1]" } else { "[0]" };
    let workers = format!("[workers]\ncores = {cores}\nidle = \"adaptive\"\n");
    let near = net.near.siwd(&(workers + &near_config("vlan = 7")), &[]);
    // Only the TAP interface of this kernel belongs to the VLAN.
    let far = format!(
        "addresses = [\"{FAR_KERNEL}/24\", \"{FAR_KERNEL6}/64\"]\nvlan = 7\n\
         host_interface = \"rdma0\"\nhost_ports = \"61000-61099\""
    );
    let far = net.far.siwd(&config("veth1", 3, &far), &[]);
    net.far.wait_ping(ip(SHARED));
    Network::exchange(&net.near, SHARED, &net.far, 1 << 20);
    Network::exchange(&net.far, FAR_KERNEL6, &net.near, 1 << 20);
    assert!(
        net.near.ping(ip(FAR_KERNEL), 1472, PATIENCE),
        "a whole frame"
    );
    // Deleting the interface does not affect siwd.
    net.near.ip("link delete rdma0");
    assert!(counter(&near, "SiwHostFrames") > 0);
    assert!(near.stop().success() && far.stop().success());
}

#[test]
fn the_interface_has_a_carrier_while_the_link_is_up() {
    skip_if!(lacks());
    let ns = Netns::new();
    let config = near_config("").replace("net_af_packet0,iface=veth0", "net_tap0,iface=siwtap0");
    let siwd = ns.siwd(&config, &[]);
    for (state, shown) in [
        ("down", "NO-CARRIER"),
        ("up", "LOWER_UP"),
        ("down", "NO-CARRIER"),
    ] {
        ns.ip(&format!("link set siwtap0 {state}"));
        let end = Instant::now() + PATIENCE;
        while !ns.ip("link show rdma0").contains(shown) {
            assert!(Instant::now() < end, "{}", ns.ip("link show rdma0"));
            std::thread::yield_now();
        }
    }
    assert!(siwd.stop().success());
}

#[test]
fn other_addresses_of_the_kernel_need_no_sharing() {
    skip_if!(lacks());
    let net = Network::new(1500);
    let lines = "host_addresses = [\"10.77.0.11/24\"]";
    let near = net.near.siwd(&near_config(lines), &[]);
    net.far.wait_ping(ip("10.77.0.11"));
    Network::exchange(&net.near, "10.77.0.11", &net.far, 1 << 20);
    // The address belongs to siwd alone: siwd answers, and the kernel does not own its ports.
    net.far.wait_ping(ip(SHARED));
    let closed = SocketAddr::new(ip(SHARED), 9);
    let refused = net
        .far
        .run(|| TcpStream::connect_timeout(&closed, PATIENCE))
        .unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    assert_eq!(counter(&near, "TcpOutRsts"), 1);
    // An address that the administrator adds.
    net.near.address("rdma0", "10.77.0.12/24");
    net.far.wait_ping(ip("10.77.0.12"));
    assert!(near.stop().success());
}

/// Runs `siwd` in the namespace until it ends by itself with this status; returns its output.
fn said(ns: &Netns, config: &str, program: &[&str], args: &[&str], status: i32) -> String {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("siwd.toml");
    std::fs::write(&file, config).unwrap();
    let siwd = env!("CARGO_BIN_EXE_siwd");
    let words: Vec<&str> = program.iter().copied().chain([siwd]).collect();
    let out = ns.run(|| {
        Command::new(words[0])
            .args(&words[1..])
            .arg("--config")
            .arg(&file)
            .args(args)
            .stdin(Stdio::null())
            .output()
            .unwrap()
    });
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(status), "{text}");
    text
}

#[test]
fn what_the_interface_lacks_is_named_with_the_remedy() {
    skip_if!(lacks().or_else(|| missing_program("setpriv")));
    let ns = Netns::new();
    ns.veth(1500);
    let good = near_config("");
    let without = [
        "setpriv",
        "--bounding-set=-net_admin",
        "--inh-caps=-net_admin",
    ];
    for (args, status) in [(&["--check"][..], 3), (&[], 1)] {
        let text = said(&ns, &good, &without, args, status);
        assert!(
            text.contains("CAP_NET_ADMIN") && text.contains("rdma0"),
            "{text}"
        );
    }
    ns.ip("link add rdma0 type veth peer name rdma1");
    for (args, status) in [(&["--check"][..], 3), (&[], 1)] {
        let text = said(&ns, &good, &[], args, status);
        assert!(
            text.contains("exists already") && text.contains("ip link delete rdma0"),
            "{text}"
        );
    }
    for (from, to, expected) in [
        (
            "\"rdma0\"",
            "\"a-name-too-long-for-linux\"",
            "interface \"a-name",
        ),
        ("61000-61199", "61199-61000", "the first and the last"),
        (
            "host_interface = \"rdma0\"",
            "host_addresses = []",
            "host_interface",
        ),
        (
            "host_interface = \"rdma0\"",
            "host_routes = true",
            "host_interface",
        ),
    ] {
        assert!(good.contains(from));
        let text = said(&ns, &good.replace(from, to), &[], &["--check"], 1);
        assert!(
            text.contains("siwd.toml:") && text.contains(expected),
            "{text}"
        );
    }
}

#[test]
fn the_kernels_routes_and_neighbours_are_siwds() {
    skip_if!(lacks());
    let net = Network::new(1500);
    let (near, far) = (net.near_siwd("host_routes = true"), net.far_siwd());
    // A network behind a router: the other daemon has an address in it. The administrator sets the
    // neighbour entry of that router, as no host answers for its address.
    drop(far);
    let beyond = "addresses = [\"192.0.2.3/24\"]\ngateway = \"192.0.2.1\"";
    let far = net.far.siwd(&config("veth1", 3, beyond), &[]);
    let (a, b) = (
        End::new(&near.context(), 4096),
        End::new(&far.context(), 4096),
    );
    let listener = CmListener::new(&b.cm, None, "192.0.2.3:0".parse().unwrap(), 8, 0).unwrap();
    let unreachable =
        a.qp.connect(
            &a.cm,
            listener.local_addr(),
            &siw::ConnectOptions::default(),
        )
        .unwrap_err();
    assert!(
        unreachable.to_string().contains("192.0.2.3"),
        "{unreachable}"
    );
    net.near
        .ip("neigh add 10.77.0.254 lladdr 02:00:00:77:00:03 dev rdma0 nud permanent");
    net.near
        .ip("route add 192.0.2.0/24 via 10.77.0.254 dev rdma0");
    // The return path: the far daemon asks for its router, an address of the near kernel in another
    // network.
    net.near.address("rdma0", "192.0.2.1/32");
    let end = Instant::now() + PATIENCE;
    while let Err(error) = a.qp.connect(
        &a.cm,
        listener.local_addr(),
        &siw::ConnectOptions::default(),
    ) {
        assert!(Instant::now() < end, "{error}");
        std::thread::yield_now();
    }
    match b.cm.get_event(Some(PATIENCE)).unwrap() {
        siw::CmEvent::ConnectRequest(request) => request
            .accept(&b.qp, None, &siw::ConnectOptions::default())
            .unwrap(),
        other => panic!("{other:?}"),
    }
    for end in [&b, &a] {
        match end.cm.get_event(Some(PATIENCE)).unwrap() {
            siw::CmEvent::Established(_) => {}
            other => panic!("{other:?}"),
        }
    }
    ping(&a, &b);
    ping(&b, &a);
    assert!(near.stop().success() && far.stop().success());
}

/// A fault plan that would take frames of the kernel is refused.
#[test]
fn fault_plans_spare_the_frames_of_the_kernel() {
    skip_if!(lacks_network());
    let network = Network::new(1500);
    let daemon = network.near.siwd(&near_config(""), &[]);
    let load = |more: &str| {
        let path = daemon.dir.path().join("plan.toml");
        std::fs::write(&path, format!("[[fault]]\nkind = \"wire_drop\"\n{more}\n")).unwrap();
        let out = std::process::Command::new(client_program("siwctl"))
            .args(["fault", "load", path.to_str().unwrap(), "--name", more])
            .arg("--socket")
            .arg(&daemon.socket)
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&out.stderr).into_owned();
        (out.status.success(), error)
    };
    for more in [
        "probability = 0.1",
        "device = \"siw0\"",
        "direction = \"in\"",
        "host = \"10.77.0.9\"",
    ] {
        let (is_loaded, error) = load(more);
        assert!(!is_loaded, "{more}");
        assert!(
            error.contains(":2:8: siw0 shares its frames with the kernel"),
            "{error}"
        );
    }
    for more in ["direction = \"out\"", "port = 7174", "user = 0"] {
        let (is_loaded, error) = load(more);
        assert!(is_loaded, "{more}: {error}");
    }
}
