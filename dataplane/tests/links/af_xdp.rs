//! Devices on interfaces that the kernel keeps using: RDMA between two siwd over a veth pair, with
//! kernel traffic between both ends at the same time.

use std::alloc::Layout;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::net::{Netns, judge, lacks_network, missing_program, siw_ping};
use crate::common::typing::{Typist, echo};
use crate::common::*;
use nix::sys::signal::Signal;
use siw::{AsyncEventKind, CmEvent, CmListener, RecvWr, SendData, SendWr, WcStatus};
use siw_xdp::{ClaimKind, CopyMode, SocketConfig, Umem, XdpInterface, XdpSocket, XdpSteering};

/// Two hosts joined by a veth pair with the ends `veth0` and `veth1`. The kernel addresses are
/// 10.77.0.101 and .102, fd77::101 and ::102.
pub struct Hosts {
    pub left: Netns,
    pub right: Netns,
}

impl Hosts {
    pub fn new(queues: usize) -> Hosts {
        let (left, right) = (Netns::new(), Netns::new());
        left.ip(&format!(
            "link add veth0 numrxqueues {queues} numtxqueues {queues} type veth \
             peer name veth1 numrxqueues {queues} numtxqueues {queues}"
        ));
        left.give("veth1", &right);
        for (host, name, last) in [(&left, "veth0", 101), (&right, "veth1", 102)] {
            if queues > 1 {
                host.command("ethtool", &format!("-L {name} rx {queues} tx {queues}"));
            }
            host.ip(&format!("link set {name} up arp on"));
            host.address(name, &format!("10.77.0.{last}/24"));
            host.address(name, &format!("fd77::{last}/64"));
        }
        let hosts = Hosts { left, right };
        hosts.left.wait_ping(kernel_of_right());
        hosts
    }

    /// Starts a daemon at each end; siw0 has 10.77.0.1 and fd77::1, or 10.77.0.2 and fd77::2.
    fn start_daemons(&self, more: &str) -> (Daemon, Daemon) {
        let left = self.left.siwd(&config("veth0", 1, more), &[]);
        let right = self.right.siwd(&config("veth1", 2, more), &[]);
        (left, right)
    }

    /// Whether an XDP program is attached to `veth0`.
    fn has_program(&self) -> bool {
        self.left.ip("link show dev veth0").contains("xdp")
    }
}

fn kernel_of_right() -> IpAddr {
    "10.77.0.102".parse().unwrap()
}

/// Configuration of a host. `last` is the last part of its addresses, `more` holds further keys of
/// the device.
pub fn config(interface: &str, last: u8, more: &str) -> String {
    format!(
        r#"
[dpdk]
hugepages = "never"
buffers = 8192
[[device]]
name = "siw0"
af_xdp = "{interface}"
addresses = ["10.77.0.{last}/24", "fd77::{last}/64"]
{more}
"#
    )
}

/// config/af_xdp.toml on `veth0`, with normal pages and an existing core.
fn example_file() -> String {
    let text = include_str!("../../../config/af_xdp.toml");
    let pages = "hugepages = \"never\"\nbuffers = 4096";
    text.replace("\"eth0\"", "\"veth0\"")
        .replace("cores = [1]", "")
        .replace("hugepages = \"auto\"", pages)
}

/// Reason why the tests of this file cannot run here.
pub fn lacks_af_xdp() -> Option<String> {
    let lack = lacks_network().or_else(|| missing_program("ethtool"));
    lack.or_else(|| match XdpSteering::load(ClaimKind::Addresses, None, 1) {
        Ok(_) => None,
        Err(error) => Some(error.to_string()),
    })
}

/// Traffic between the two kernels that runs until it is stopped.
struct KernelTraffic<'a> {
    hosts: &'a Hosts,
    is_over: AtomicBool,
    pings: AtomicU64,
    streamed: AtomicU64,
    lines: AtomicU64,
}

impl<'a> KernelTraffic<'a> {
    fn new(hosts: &'a Hosts) -> Self {
        Self {
            hosts,
            is_over: AtomicBool::new(false),
            pings: AtomicU64::new(0),
            streamed: AtomicU64::new(0),
            lines: AtomicU64::new(0),
        }
    }

    /// Sends one ping after the other. A veth drops any sender's frames when its ring of 256 is
    /// full, so one ping in a hundred may be lost.
    fn keep_pinging(&self) {
        let mut lost = 0;
        while !self.is_over.load(Ordering::Relaxed) {
            let wait = Duration::from_secs(1);
            match self.hosts.left.ping(kernel_of_right(), 1400, wait) {
                true => self.pings.fetch_add(1, Ordering::Relaxed),
                false => {
                    lost += 1;
                    continue;
                }
            };
        }
        let answered = self.pings.load(Ordering::Relaxed);
        assert!(
            lost <= answered.div_ceil(100),
            "{lost} of {answered} are lost"
        );
    }

    /// Streams over one TCP connection. The data is echoed, which keeps the rings from overflowing,
    /// and compared.
    fn keep_streaming(&self, listener: &TcpListener) {
        let bytes = pattern(77, 64 << 10);
        let to = listener.local_addr().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut stream = listener.accept().unwrap().0;
                let mut received = vec![0; bytes.len()];
                while stream.read_exact(&mut received).is_ok() {
                    assert!(received == bytes, "the kernel's stream is damaged");
                    stream.write_all(&received).unwrap();
                }
            });
            let mut stream = self.hosts.left.run(|| TcpStream::connect(to)).unwrap();
            let mut echo = vec![0; bytes.len()];
            while !self.is_over.load(Ordering::Relaxed) {
                stream.write_all(&bytes).unwrap();
                stream.read_exact(&mut echo).unwrap();
                assert!(echo == bytes, "the kernel's echo is damaged");
                self.streamed
                    .fetch_add(echo.len() as u64, Ordering::Relaxed);
            }
        });
    }

    /// Simulates an interactive terminal session.
    fn keep_typing(&self, listener: &TcpListener) {
        let to = listener.local_addr().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| echo(listener.accept().unwrap().0));
            let mut typist = Typist::new(self.hosts.left.run(|| TcpStream::connect(to)).unwrap());
            while !self.is_over.load(Ordering::Relaxed) {
                typist.type_line();
                self.lines.store(typist.lines(), Ordering::Relaxed);
            }
        });
    }

    /// Runs `work` with kernel traffic at the same time, and checks that this traffic made
    /// progress.
    fn run_beside<T>(&self, work: impl FnOnce() -> T) -> T {
        let listen = || {
            let listener = || TcpListener::bind((kernel_of_right(), 0));
            self.hosts.right.run(listener).unwrap()
        };
        let (listener, shell) = (listen(), listen());
        std::thread::scope(|scope| {
            // Also when `work` panics.
            let _stop = StopOnDrop(&self.is_over);
            scope.spawn(|| self.keep_pinging());
            scope.spawn(|| self.keep_streaming(&listener));
            scope.spawn(|| self.keep_typing(&shell));
            let outcome = work();
            // At least one of each, however short `work` was.
            while self.pings.load(Ordering::Relaxed) == 0
                || self.streamed.load(Ordering::Relaxed) == 0
                || self.lines.load(Ordering::Relaxed) == 0
            {
                std::thread::yield_now();
            }
            outcome
        })
    }
}

/// Frames to groups are the kernel's, also with addresses of siwd's own: nothing steers them to siwd.
fn expect_no_groups(siwd: &Daemon) {
    let end = End::new(&siwd.context(), 4096);
    end.qp.start_datagrams(0, 7).unwrap();
    let refused = end.qp.attach_group([239, 7, 7, 7].into()).unwrap_err();
    assert!(refused.to_string().contains("AF_XDP"), "{refused}");
}

/// WRITE, READ and SEND of several sizes; the data is compared.
fn transfer_everything(left: &Daemon, right: &Daemon, to: &str) {
    const MEMORY: usize = 1 << 20;
    let (a, b) = (
        End::new(&left.context(), MEMORY),
        End::new(&right.context(), MEMORY),
    );
    connect(&a, &b, "siw0", SocketAddr::new(to.parse().unwrap(), 0));
    for (round, len) in [1, 64, 1428, 1429, 65_536, MEMORY].into_iter().enumerate() {
        a.fill(round as u64 * 2 + 1);
        b.mr.write(0, &vec![0; MEMORY]).unwrap();
        let local = [a.mr.sge(0, len)];
        let write = SendWr::write(1, SendData::Sges(&local), b.mr.addr(), b.mr.rkey());
        a.qp.post_send(&[write]).unwrap();
        assert_eq!(a.wc().status, WcStatus::SUCCESS);
        assert!(b.read(0, len) == a.read(0, len), "WRITE of {len}");

        b.fill(round as u64 * 2 + 2);
        let read = SendWr::read(2, &local, b.mr.addr(), b.mr.rkey());
        a.qp.post_send(&[read]).unwrap();
        assert_eq!(a.wc().status, WcStatus::SUCCESS);
        assert!(b.read(0, len) == a.read(0, len), "READ of {len}");

        a.fill(round as u64 * 3 + 1);
        let room = [b.mr.sge(0, len)];
        b.qp.post_recv(&[RecvWr {
            wr_id: 3,
            sges: &room,
        }])
        .unwrap();
        a.qp.post_send(&[SendWr::send(3, SendData::Sges(&local))])
            .unwrap();
        assert_eq!(a.wc().status, WcStatus::SUCCESS);
        assert_eq!(b.wc().status, WcStatus::SUCCESS);
        assert!(b.read(0, len) == a.read(0, len), "SEND of {len}");
    }
}

#[test]
fn rdma_runs_beside_pings_and_streams_of_the_kernel() {
    skip_if!(lacks_af_xdp());
    let hosts = Hosts::new(1);
    let (left, right) = hosts.start_daemons("");
    assert!(hosts.has_program());
    KernelTraffic::new(&hosts).run_beside(|| {
        transfer_everything(&left, &right, "10.77.0.2");
        transfer_everything(&right, &left, "fd77::1");
    });
    expect_no_groups(&left);
    assert!(left.stop().success() && right.stop().success());
    assert!(!hosts.has_program());
}

#[test]
fn the_kernel_of_a_peer_reaches_siwd_and_its_own_kind() {
    skip_if!(lacks_af_xdp());
    let hosts = Hosts::new(1);
    // With TX checksum offload on, the kernel would leave checksums to the device, and an AF_XDP
    // socket does not fill them in.
    hosts.right.command("ethtool", "-K veth1 tx off");
    hosts.right.address("veth1", "192.0.2.12/24");
    hosts.right.address("veth1", "2001:db8::12/64");
    let left = hosts.left.siwd(&example_file(), &[]);
    for address in ["192.0.2.11", "2001:db8::11"] {
        let siwd: IpAddr = address.parse().unwrap();
        hosts.right.wait_ping(siwd);
        assert!(
            hosts.right.ping(siwd, 1400, PATIENCE),
            "nearly a whole frame"
        );
        let closed = SocketAddr::new(siwd, 9);
        let error = hosts
            .right
            .run(|| TcpStream::connect_timeout(&closed, PATIENCE))
            .unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
    }
    for address in ["10.77.0.101", "fd77::101"] {
        assert!(hosts.right.ping(address.parse().unwrap(), 56, PATIENCE));
    }
    assert!(left.stop().success());
}

#[test]
fn a_killed_siwd_leaves_the_interface_as_it_was() {
    skip_if!(lacks_af_xdp());
    let hosts = Hosts::new(1);
    let (mut left, right) = hosts.start_daemons("");
    KernelTraffic::new(&hosts).run_beside(|| {
        transfer_everything(&left, &right, "10.77.0.2");
        left.signal(Signal::SIGKILL);
        crate::common::wait(&mut left.child);
        let end = Instant::now() + PATIENCE;
        // Detaching waits for a grace period of the kernel.
        while hosts.has_program() {
            assert!(Instant::now() < end, "the program is still attached");
            std::thread::yield_now();
        }
    });
    // The next daemon finds the interface free.
    let again = hosts.left.siwd(&config("veth0", 1, ""), &[]);
    transfer_everything(&again, &right, "fd77::2");
}

#[test]
fn frames_arrive_at_whatever_queue_the_interface_chooses() {
    skip_if!(lacks_af_xdp().or_else(|| {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        (cores < 2).then(|| "one core only".into())
    }));
    let hosts = Hosts::new(4);
    let two_workers = |interface, last| {
        let text = config(
            interface,
            last,
            "rx_descriptors = 256\ntx_descriptors = 256",
        );
        format!("[workers]\ncores = [0, 1]\n{text}")
    };
    let left = hosts.left.siwd(&two_workers("veth0", 1), &[]);
    let right = hosts.right.siwd(&two_workers("veth1", 2), &[]);
    KernelTraffic::new(&hosts).run_beside(|| {
        for _ in 0..4 {
            transfer_everything(&left, &right, "10.77.0.2");
        }
    });
}

/// `ethtool -L` under way: the new queues have no socket.
#[test]
fn queues_that_the_interface_gets_later_are_reported() {
    skip_if!(lacks_af_xdp());
    let ns = Netns::new();
    let queues = "numrxqueues 2 numtxqueues 2";
    ns.ip(&format!(
        "link add veth0 {queues} type veth peer name veth1 {queues}"
    ));
    for end in ["veth0", "veth1"] {
        ns.command("ethtool", &format!("-L {end} rx 1 tx 1"));
        ns.ip(&format!("link set {end} up"));
    }
    let daemon = ns.siwd(&config("veth0", 1, ""), &[]);
    let ctx = daemon.context();
    let wait_for = |unserved: u64| {
        let end = Instant::now() + PATIENCE;
        let count = || {
            let statistics: serde_json::Value =
                serde_json::from_str(&ctx.read_stats().unwrap()).unwrap();
            statistics["total"][0]["unserved_queues"].as_u64().unwrap()
        };
        while count() != unserved {
            assert!(Instant::now() < end, "unserved queues stay {}", count());
        }
    };
    wait_for(0);
    ns.command("ethtool", "-L veth0 rx 2");
    wait_for(1);
    ns.command("ethtool", "-L veth0 rx 1");
    wait_for(0);
    let log = daemon.stop_and_read_log();
    assert!(
        log.contains("1 more receive queues") && log.contains("ethtool -L"),
        "{log}"
    );
    assert!(log.contains("all receive queues"), "{log}");
}

#[test]
fn a_vlan_device_lives_beside_the_untagged_kernel() {
    skip_if!(lacks_af_xdp().or_else(|| missing_program("tshark")));
    let hosts = Hosts::new(1);
    for (host, name) in [(&hosts.left, "veth0"), (&hosts.right, "veth1")] {
        host.command("ethtool", &format!("-K {name} rxvlan off"));
        host.ip(&format!("link set {name} mtu 1504"));
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("vlan.pcapng");
    let capture = ["--capture", file.to_str().unwrap()];
    let left = hosts.left.siwd(&config("veth0", 1, "vlan = 7"), &capture);
    let right = hosts.right.siwd(&config("veth1", 2, "vlan = 7"), &[]);
    KernelTraffic::new(&hosts).run_beside(|| transfer_everything(&left, &right, "10.77.0.2"));
    assert!(
        !hosts
            .right
            .ping("10.77.0.1".parse().unwrap(), 56, Duration::from_millis(200))
    );
    assert!(left.stop().success());
    assert!(judge(&file).good_crcs > 0);
}

/// Runs a daemon that must exit with status 1; returns its error output.
fn refusal_of(host: &Netns, text: &str, args: &[&str]) -> String {
    let (status, _, error) = host.run(|| run(text, args));
    assert_eq!(status.code(), Some(1), "{error}");
    error
}

#[test]
fn an_interface_that_cannot_be_used_is_named_with_what_helps() {
    skip_if!(lacks_af_xdp());
    let hosts = Hosts::new(1);
    let host = &hosts.left;
    let check = ["--check"];
    for (text, args, words) in [
        (
            config("no-such", 1, ""),
            &[][..],
            ["no interface `no-such`", "ip link"],
        ),
        (
            config("much-too-long-a-name", 1, ""),
            &check,
            ["much-too-long", "ip link"],
        ),
        (
            config("veth0", 1, "mtu = 3000"),
            &[],
            ["mtu 3000", "ip link set veth0 mtu 3000"],
        ),
        (
            config("veth0", 1, "mtu = 9000"),
            &check,
            ["mtu 9000", "3822"],
        ),
        (
            config("veth0", 1, "vlan = 7"),
            &[],
            ["VLAN", "ethtool -K veth0 rxvlan off"],
        ),
        (
            config("veth0", 1, "xdp_copy = \"zero-copy\""),
            &[],
            ["zero-copy", "auto"],
        ),
        (
            config("veth0", 1, "mac = \"02:00:00:00:00:01\""),
            &check,
            ["mac", "leave mac out"],
        ),
        (
            config("veth0", 1, "rx_descriptors = 16384"),
            &[],
            ["buffers 8192", "rx_descriptors"],
        ),
    ] {
        let error = refusal_of(host, &text, args);
        for word in words {
            assert!(error.contains(word), "{word:?} is not in: {error}");
        }
        assert!(!hosts.has_program());
    }
    // The check of a correct file that refers to things missing on this host has another status.
    let (status, _, error) = host.run(|| run(&config("no-such", 1, ""), &check));
    assert!(
        status.code() == Some(3) && error.contains("no interface `no-such`"),
        "{error}"
    );
    let pair = LOOPBACK.replacen("pair = \"lo\"", "pair = \"lo\"\nxdp_share = true", 1);
    assert!(refusal_of(host, &pair, &check).contains("af_xdp has to name"));
    host.ip("link set veth0 down");
    let error = refusal_of(host, &config("veth0", 1, ""), &[]);
    assert!(error.contains("ip link set veth0 up"), "{error}");
}

#[test]
fn an_interface_that_is_taken_is_left_to_its_user() {
    skip_if!(lacks_af_xdp());
    let hosts = Hosts::new(1);
    let text = config("veth0", 1, "");
    let first = hosts.left.siwd(&text, &[]);
    let error = refusal_of(&hosts.left, &text, &[]);
    assert!(
        error.contains("`veth0` has an XDP program already (number "),
        "{error}"
    );
    assert!(hosts.has_program() && first.stop().success());

    let _other = hosts.left.run(|| {
        let mut other = XdpSteering::load(ClaimKind::Addresses, None, 1).unwrap();
        other
            .attach(&XdpInterface::find_by_name("veth0").unwrap())
            .unwrap();
        other
    });
    let error = refusal_of(&hosts.left, &text, &[]);
    let helps = "ip link set dev veth0 xdp off";
    assert!(
        error.contains("has an XDP program already") && error.contains(helps),
        "{error}"
    );
    assert!(hosts.has_program());
}

#[test]
fn a_missing_capability_is_named() {
    skip_if!(lacks_af_xdp().or_else(|| missing_program("setpriv")));
    let hosts = Hosts::new(1);
    let dir = tempfile::tempdir().unwrap();
    let daemon = daemon_command(dir.path(), &config("veth0", 1, ""), &[]);
    let output = hosts.left.run(|| {
        Command::new("setpriv")
            .args(["--bounding-set=-all", "--inh-caps=-all"])
            .arg(daemon.get_program())
            .args(daemon.get_args())
            .output()
            .unwrap()
    });
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(
        error.contains("CAP_BPF") && error.contains("setcap"),
        "{error}"
    );
}

#[test]
fn iperf3_and_siw_ping_share_an_interface() {
    skip_if!(lacks_af_xdp().or_else(|| missing_program("iperf3")));
    let hosts = Hosts::new(1);
    let (left, right) = hosts.start_daemons("");
    let mut server = hosts.right.run(|| {
        let mut command = Command::new("iperf3");
        command.args(["-s", "-1", "--forceflush"]);
        command.stdout(Stdio::piped()).spawn().unwrap()
    });
    // The server prints a line once it listens.
    let mut lines = BufReader::new(server.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("listening")));
    let client = hosts.left.run(|| {
        let mut command = Command::new("iperf3");
        command.args(["-c", "10.77.0.102", "-t", "1", "-J"]);
        command.stdout(Stdio::piped()).spawn().unwrap()
    });
    let mut passive = siw_ping(&right, "-s -a 10.77.0.2 --timeout 30")
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first_line = String::new();
    let mut said = BufReader::new(passive.stderr.take().unwrap());
    said.read_line(&mut first_line).unwrap();
    let args = "-c -a 10.77.0.2 -C 100 -V --timeout 30 -S 4096";
    let pings = siw_ping(&left, args).output().unwrap();
    let text = String::from_utf8_lossy(&pings.stderr);
    assert!(
        pings.status.success() && passive.wait().unwrap().success(),
        "{text}"
    );
    let report = client.wait_with_output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&report.stdout).unwrap();
    lines.for_each(drop);
    assert!(server.wait().unwrap().success());
    let received = &report["end"]["sum_received"]["bytes"];
    assert!(
        received.as_u64().is_some_and(|bytes| bytes > 1 << 20),
        "{report}"
    );
}

/// Starts a daemon at each end with the kernel's addresses there.
fn start_sharing_daemons(hosts: &Hosts) -> (Daemon, Daemon) {
    let sharing = |interface, last| {
        config(
            interface,
            last,
            "xdp_share = true\nhost_ports = \"61000-61031\"",
        )
    };
    let left = hosts.left.siwd(&sharing("veth0", 101), &[]);
    let right = hosts.right.siwd(&sharing("veth1", 102), &[]);
    (left, right)
}

#[test]
fn one_address_serves_the_kernel_and_rdma() {
    skip_if!(lacks_af_xdp());
    let hosts = Hosts::new(1);
    let (left, right) = start_sharing_daemons(&hosts);
    KernelTraffic::new(&hosts).run_beside(|| {
        transfer_everything(&left, &right, "10.77.0.102");
        transfer_everything(&right, &left, "fd77::101");
    });
    // The kernel refuses a connect to a port that siwd does not have.
    let closed = SocketAddr::new(kernel_of_right(), 9);
    let error = hosts
        .left
        .run(|| TcpStream::connect_timeout(&closed, PATIENCE))
        .unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
    expect_no_groups(&left);
    assert!(left.stop().success() && right.stop().success());
}

#[test]
fn no_port_of_a_shared_address_is_used_twice() {
    skip_if!(lacks_af_xdp());
    let hosts = Hosts::new(1);
    let (left, right) = start_sharing_daemons(&hosts);
    let bind = |port| {
        hosts
            .right
            .run(|| TcpListener::bind((kernel_of_right(), port)))
    };
    let (a, b) = (
        End::new(&left.context(), 4096),
        End::new(&right.context(), 4096),
    );
    let taken = bind(0).unwrap();
    let of_kernel = taken.local_addr().unwrap();
    let error = CmListener::new(&b.cm, None, of_kernel, 8, 0).err();
    assert!(error.is_some_and(|error| error.to_string().contains("used by a program")));
    drop(taken);
    let listener = CmListener::new(&b.cm, None, of_kernel, 8, 0).unwrap();
    let in_use = |port| bind(port).unwrap_err().kind();
    assert_eq!(in_use(of_kernel.port()), std::io::ErrorKind::AddrInUse);
    assert_eq!(in_use(61_000), std::io::ErrorKind::AddrInUse);
    drop(listener);
    // A connection keeps the port of its listener after the listener is destroyed.
    connect(&a, &b, "siw0", of_kernel);
    assert_eq!(in_use(of_kernel.port()), std::io::ErrorKind::AddrInUse);
    ping(&a, &b);
    drop((a, b));
    let end = Instant::now() + PATIENCE;
    while bind(of_kernel.port()).is_err() {
        assert!(Instant::now() < end, "the port is never the kernel's again");
        std::thread::yield_now();
    }
}

#[test]
fn links_that_fall_and_interfaces_that_go_are_events() {
    skip_if!(lacks_af_xdp());
    let hosts = Hosts::new(1);
    let (left, right) = hosts.start_daemons("");
    let (a, b) = (
        End::new(&left.context(), 4096),
        End::new(&right.context(), 4096),
    );
    connect(&a, &b, "siw0", "10.77.0.2:0".parse().unwrap());
    let expect = |kind| {
        let event = a.ctx.get_async_event(Some(PATIENCE)).unwrap();
        assert_eq!(event.kind, Some(kind), "{event:?}");
        event.reason
    };
    hosts.right.ip("link set veth1 down");
    expect(AsyncEventKind::PortErr);
    hosts.right.ip("link set veth1 up");
    expect(AsyncEventKind::PortActive);
    ping(&a, &b);
    hosts.left.ip("link del veth0");
    assert!(expect(AsyncEventKind::DeviceFatal).contains("removed"));
    let event = a.cm.get_event(Some(PATIENCE)).unwrap();
    assert!(matches!(event, CmEvent::Disconnected(_)), "{event:?}");
    // The daemon keeps running; further devices would continue to work.
    assert!(left.stop().success());
}

#[test]
fn the_kernels_routes_on_the_interface_are_followed() {
    skip_if!(lacks_af_xdp());
    let hosts = Hosts::new(1);
    hosts.left.ip("route add 10.80.0.0/24 via 10.77.0.2");
    let left = hosts
        .left
        .siwd(&config("veth0", 1, "host_routes = true"), &[]);
    let text = config("veth1", 2, "");
    let text = text.replace("\"10.77.0.2/24\"", "\"10.77.0.2/24\", \"10.80.0.1/24\"");
    let right = hosts.right.siwd(&text, &[]);
    transfer_everything(&left, &right, "10.80.0.1");
}

/// A worker sleeps until an interrupt of any of its devices, however many there are.
#[test]
fn each_of_many_devices_wakes_its_worker() {
    const DEVICES: usize = 18;
    skip_if!(lacks_af_xdp());
    let ns = Netns::new();
    let mut text =
        "[workers]\nidle = \"adaptive\"\n[dpdk]\nhugepages = \"never\"\nbuffers = 12288\n"
            .to_owned();
    for number in 0..DEVICES {
        ns.ip(&format!(
            "link add own{number} type veth peer name far{number}"
        ));
        for name in ["own", "far"] {
            ns.ip(&format!("link set {name}{number} addrgenmode none"));
            ns.ip(&format!("link set {name}{number} up"));
        }
        ns.address(&format!("far{number}"), &format!("10.{number}.0.2/24"));
        text += &format!(
            "[[device]]\nname = \"siw{number}\"\naf_xdp = \"own{number}\"\n\
             addresses = [\"10.{number}.0.1/24\"]\nrx_descriptors = 256\ntx_descriptors = 256\n"
        );
    }
    let _siwd = ns.siwd(&text, &[]);
    for number in [0, DEVICES - 1] {
        let to = format!("10.{number}.0.1").parse().unwrap();
        ns.wait_ping(to);
        for _ in 0..5 {
            let sent = Instant::now();
            assert!(ns.ping(to, 56, PATIENCE));
            let waited = sent.elapsed();
            assert!(waited < Duration::from_secs(1), "siw{number}: {waited:?}");
        }
    }
}

/// A socket of this process on the only queue of an interface.
fn hold_queue(interface: &str) -> XdpSocket {
    const BYTES: usize = 1 << 20;
    let layout = Layout::from_size_align(BYTES, 4096).unwrap();
    // SAFETY: the layout has a size. The memory is never freed, and only the kernel uses it.
    let umem = unsafe {
        let base = NonNull::new(std::alloc::alloc_zeroed(layout)).unwrap();
        Umem::new(base, BYTES, 4096)
    };
    let config = SocketConfig {
        rx_entries: 64,
        tx_entries: 64,
        copy_mode: CopyMode::Copy,
    };
    let interface = XdpInterface::find_by_name(interface).unwrap();
    XdpSocket::open(&interface, 0, &umem, &config, None).unwrap()
}

/// The kernel frees the queue of a closed socket some time later.
#[test]
fn a_device_can_be_added_while_the_kernel_still_frees_its_queue() {
    skip_if!(lacks_af_xdp());
    let hosts = Hosts::new(1);
    let siwd = hosts.left.siwd(&config("veth0", 1, ""), &[]);
    let client = siwd.context();
    let remove = || {
        let index = client.device_by_name("siw0").unwrap().index;
        client.remove_device(index, true).unwrap();
    };
    for _ in 0..20 {
        remove();
        client.add_device("siw0").unwrap();
    }
    remove();
    let held = hosts.left.run(|| hold_queue("veth0"));
    let error = client.add_device("siw0").unwrap_err().to_string();
    assert!(error.contains("stop the other program"), "{error}");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(300));
            drop(held);
        });
        client.add_device("siw0").unwrap();
    });
    hosts.right.wait_ping("10.77.0.1".parse().unwrap());
    assert!(siwd.stop().success());
}
