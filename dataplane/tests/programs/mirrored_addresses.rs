//! Programs that use siwd's addresses as addresses of the kernel: `siwrun` presents them as
//! addresses of network interfaces and makes kernel sockets use a loopback address instead.

use crate::common::programs::{
    Program, await_kernel_listener, free_port, is_installed, start_at_host,
};
use crate::common::{Daemon, two_cores};

/// A TCP connection and a UDP datagram of the kernel, at both addresses of a device.
const SOCKETS: &str = r#"
import socket
for host in ("10.77.0.2", "fd77::2"):
    listener = socket.create_server((host, 0), family=socket.getaddrinfo(host, 0)[0][0])
    client = socket.create_connection((host, listener.getsockname()[1]))
    accepted, _ = listener.accept()
    client.sendall(b"stream")
    assert accepted.recv(100) == b"stream"
    receiver = socket.socket(listener.family, socket.SOCK_DGRAM)
    receiver.bind((host, 0))
    sender = socket.socket(listener.family, socket.SOCK_DGRAM)
    sender.sendto(b"datagram", (host, receiver.getsockname()[1]))
    assert receiver.recv(100) == b"datagram"
    sender.sendmsg([b"message"], [], 0, (host, receiver.getsockname()[1]))
    assert receiver.recv(100) == b"message"
print("all arrived")
"#;

#[test]
fn kernel_sockets_work_at_addresses_of_siwd() {
    if !is_installed("python3", "python3") {
        return;
    }
    let daemon = Daemon::loopback();
    let script = daemon.dir.path().join("sockets.py");
    std::fs::write(&script, SOCKETS).unwrap();
    let line = format!("python3 {}", script.display());
    assert!(
        Program::start(&daemon, &line)
            .succeed()
            .contains("all arrived")
    );
    // Without the library the kernel does not have these addresses.
    let (status, said) = Program::start(&daemon, &format!("--no-mirror {line}")).finish();
    assert!(!status.success(), "{said}");
    assert!(said.contains("Cannot assign requested address"), "{said}");
}

/// Interface queries of older programs, by ioctl(2).
const INTERFACES: &str = r#"
import array, fcntl, socket, struct
SIOCGIFNAME, SIOCGIFCONF, SIOCGIFFLAGS, SIOCGIFADDR = 0x8910, 0x8912, 0x8913, 0x8915
SIOCGIFBRDADDR, SIOCGIFNETMASK, SIOCGIFMTU, SIOCGIFHWADDR = 0x8919, 0x891b, 0x8921, 0x8927
SIOCGIFINDEX = 0x8933
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

def ask(code, name, fields):
    reply = fcntl.ioctl(sock, code, struct.pack("16s24x", name.encode()))
    return struct.unpack_from(fields, reply, 16)

def ask_ip(code, name):
    return socket.inet_ntoa(ask(code, name, "=HH4s")[2])

index = socket.if_nametoindex("siw1")
assert socket.if_indextoname(index) == "siw1"
assert ask(SIOCGIFINDEX, "siw1", "i") == (index,)
assert fcntl.ioctl(sock, SIOCGIFNAME, struct.pack("16si20x", b"", index)).startswith(b"siw1\0")
assert ask_ip(SIOCGIFADDR, "siw1") == "10.77.0.2"
assert ask_ip(SIOCGIFNETMASK, "siw1") == "255.255.255.0"
assert ask_ip(SIOCGIFBRDADDR, "siw1") == "10.77.0.255"
assert ask(SIOCGIFMTU, "siw1", "i")[0] >= 1500
family, mac = ask(SIOCGIFHWADDR, "siw1", "=H6s")
assert family == 1 and any(mac)
UP_AND_RUNNING = 0x41
assert ask(SIOCGIFFLAGS, "siw1", "H")[0] & UP_AND_RUNNING == UP_AND_RUNNING
assert ask_ip(SIOCGIFADDR, "lo") == "127.0.0.1"

def interfaces(room):
    buffer = array.array("B", bytes(room))
    request = struct.pack("iP", room, buffer.buffer_info()[0])
    length = struct.unpack_from("i", fcntl.ioctl(sock, SIOCGIFCONF, request))[0]
    rows = [buffer[at : at + 40].tobytes() for at in range(0, length, 40)]
    return {row[:16].rstrip(b"\0").decode(): socket.inet_ntoa(row[20:24]) for row in rows}

everything = interfaces(4096)
assert everything["siw0"] == "10.77.0.1" and everything["siw1"] == "10.77.0.2", everything
assert everything["lo"] == "127.0.0.1", everything
# Buffers with room for all but one, and for none.
assert "siw1" not in interfaces(40 * len(everything) - 1)
length = struct.unpack_from("i", fcntl.ioctl(sock, SIOCGIFCONF, struct.pack("iP", 0, 0)))[0]
assert length == 40 * len(everything), length

for code in (SIOCGIFADDR, SIOCGIFFLAGS):
    try:
        ask(code, "nobody", "i")
        raise SystemExit("an interface that does not exist")
    except OSError as error:
        assert error.errno == 19, error
print("all as expected")
"#;

#[test]
fn interfaces_answer_requests_of_ioctl() {
    if !is_installed("python3", "python3") {
        return;
    }
    let daemon = Daemon::loopback();
    let script = daemon.dir.path().join("interfaces.py");
    std::fs::write(&script, INTERFACES).unwrap();
    let line = format!("python3 {}", script.display());
    let said = Program::start(&daemon, &line).succeed();
    assert!(said.contains("all as expected"), "{said}");
}

/// The list in JSON in the output of a program; rdma(8) of iproute2 6.15 prints it in several lines.
fn json_of(said: &str) -> serde_json::Value {
    let list = said.find('[').zip(said.rfind(']'));
    let list = list.map_or("", |(first, last)| &said[first..=last]);
    serde_json::from_str(list).unwrap_or_else(|error| panic!("{error}: {said}"))
}

/// rdma(8) asks the kernel by netlink, which often has no RDMA, and never siwd's devices.
#[test]
fn the_program_rdma_lists_the_devices_with_each_persona() {
    if !is_installed("rdma", "iproute2") {
        return;
    }
    let daemon = Daemon::loopback();
    for (persona, protocol) in [("iwarp", "iw"), ("roce", "roce"), ("ib", "ib")] {
        let said =
            Program::start(&daemon, &format!("--persona {persona} rdma -j link show")).succeed();
        let links = json_of(&said);
        let [first, second] = &links.as_array().unwrap()[..] else {
            panic!("{links}");
        };
        for (link, name) in [(first, "siw0"), (second, "siw1")] {
            assert_eq!(
                (&link["ifname"], &link["netdev"]),
                (&name.into(), &name.into())
            );
            assert_eq!(
                (&link["port"], &link["state"]),
                (&1.into(), &"ACTIVE".into())
            );
            assert_eq!(link["physical_state"], "LINK_UP");
        }
        let line = format!("--persona {persona} rdma -d -j dev show siw1");
        let devices = json_of(&Program::start(&daemon, &line).succeed());
        let device = &devices[0];
        assert_eq!(device["ifname"], "siw1", "{devices}");
        if let Some(shown) = device.get("protocol") {
            assert_eq!(shown, protocol, "{devices}");
        }
        let file = "cat /sys/class/infiniband/siw1/node_guid";
        let shown = Program::start(&daemon, file).succeed();
        let guid = device["node_guid"].as_str().unwrap();
        assert!(shown.lines().any(|line| line == guid), "{guid}: {shown}");
    }
    // What siwd does not answer is an error, not silence.
    let (status, said) = Program::start(&daemon, "rdma system show").finish();
    assert!(status.success() && said.contains("netns shared"), "{said}");
    let (status, said) = Program::start(&daemon, "rdma link show nobody/1").finish();
    assert!(!status.success(), "{said}");
}

/// As libraries ask for the route to a GID: the first message of a dump, after a look at its length.
const ROUTES: &str = r#"
import socket, struct
GETROUTE, DUMP, OIF, DST = 26, 0x301, 4, 1

def routes(family, receive):
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    sock.bind((0, 0))
    head = struct.pack("=B11x", family)
    sock.sendmsg([struct.pack("=IHHII", 16 + len(head), GETROUTE, DUMP, 7, 0), head])
    found, at, data = {}, 0, receive(sock)
    while at < len(data):
        length, kind, flags, sequence, port = struct.unpack_from("=IHHII", data, at)
        assert sequence == 7 and port == sock.getsockname()[0]
        if kind == 24:
            prefix, part, attributes = data[at + 17], at + 28, {}
            while part < at + length:
                size, name = struct.unpack_from("=HH", data, part)
                attributes[name] = data[part + 4 : part + size]
                part += (size + 3) & ~3
            if DST in attributes and OIF in attributes:
                index = struct.unpack("=I", attributes[OIF])[0]
                found.setdefault(index, []).append((socket.inet_ntop(family, attributes[DST]), prefix))
        at += (length + 3) & ~3
    return found

def looks_first(sock):
    length = sock.recv_into(bytearray(1), 0, socket.MSG_PEEK | socket.MSG_TRUNC)
    data = sock.recv(length)
    assert len(data) == length
    return data

def has_no_room(sock):
    # siwd's part fits, the kernel's not: it comes next.
    first = sock.recv(400)
    return first + sock.recv(65536)

index = socket.if_nametoindex("siw1")
for receive in (looks_first, has_no_room, lambda sock: sock.recvmsg(65536)[0], lambda sock: sock.recvfrom(65536)[0]):
    v4, v6 = routes(socket.AF_INET, receive), routes(socket.AF_INET6, receive)
    assert ("10.77.0.0", 24) in v4[index], v4
    assert ("fd77::", 64) in v6[index], v6
    # The kernel's are there as well.
    kernel = [line.split() for line in open("/proc/net/route")][1:]
    for name, network, *_ in kernel:
        if network != "00000000":
            ip = socket.inet_ntoa(bytes.fromhex(network)[::-1])
            assert any(ip == found for found, _ in v4[socket.if_nametoindex(name)]), v4
print("all as expected")
"#;

#[test]
fn netlink_dumps_have_the_routes_and_interfaces_of_siwd() {
    if !is_installed("python3", "python3") || !is_installed("ip", "iproute2") {
        return;
    }
    let daemon = Daemon::loopback();
    let script = daemon.dir.path().join("routes.py");
    std::fs::write(&script, ROUTES).unwrap();
    let line = format!("python3 {}", script.display());
    let said = Program::start(&daemon, &line).succeed();
    assert!(said.contains("all as expected"), "{said}");
    let said = Program::start(&daemon, "ip -brief address show").succeed();
    let line = said.lines().find(|line| line.starts_with("siw1 "));
    let line = line.unwrap_or_else(|| panic!("{said}"));
    assert!(
        line.contains(" UP ") && line.contains("10.77.0.2/24"),
        "{line}"
    );
    assert!(said.lines().any(|line| line.starts_with("lo ")), "{said}");
    let said = Program::start(&daemon, "ip route show table main").succeed();
    assert!(said.contains("10.77.0.0/24 dev siw0"), "{said}");
    // Without the library there is nothing of it.
    let said = Program::start(&daemon, "--no-mirror ip -brief address show").succeed();
    assert!(!said.contains("siw1"), "{said}");
}

#[test]
fn perftest_connects_by_a_kernel_socket() {
    if !is_installed("ib_write_bw", "perftest") {
        return;
    }
    let daemon = Daemon::loopback();
    for program in ["ib_write_bw", "ib_read_lat"] {
        let start = || {
            start_at_host(
                &daemon,
                &format!("{program} -d siw1 -n 200 -s 4096"),
                &format!("{program} -d siw0 -n 200 -s 4096"),
                "10.77.0.2",
            )
        };
        let (mut server, mut client) = start();
        let mut outcome = client.finish();
        // perftest compares two clocks after the transfer, and gives no results where a busy machine
        // delayed it meanwhile.
        for _ in 0..2 {
            if outcome.1.contains("Correlation coefficient") {
                server.finish();
                (server, client) = start();
                outcome = client.finish();
            }
        }
        let (status, said) = outcome;
        assert!(status.success(), "{program}: {status}, it said:\n{said}");
        server.succeed();
        // The results line begins with size and number of operations.
        let has_result = said
            .lines()
            .any(|line| line.split_whitespace().take(2).eq(["4096", "200"]));
        assert!(has_result, "{said}");
    }
}

/// Runs qperf's tests for RC queue pairs connected by rdma_cm, given with the names of their
/// results. Without rdma_cm, qperf supports LIDs only, which Ethernet does not have.
fn run_qperf(daemon: &Daemon, tests: &[(&str, &str)]) {
    let port = free_port();
    // The server keeps running after a test.
    let mut server = Program::start(daemon, &format!("qperf -lp {port}"));
    await_kernel_listener(&mut server, port);
    let names: Vec<&str> = tests.iter().map(|(test, _)| *test).collect();
    let names = names.join(" ");
    let line = format!("qperf 10.77.0.2 -lp {port} -t 1 -cm 1 {names}");
    let said = Program::start(daemon, &line).succeed();
    for (test, figure) in tests {
        let (_, after) = said.split_once(&format!("{test}:")).expect(test);
        let line = after.lines().find(|line| line.contains('='));
        assert!(line.is_some_and(|line| line.contains(figure)), "{said}");
    }
}

#[test]
fn qperf_runs_its_tests_of_reliable_connections() {
    if !is_installed("qperf", "qperf") {
        return;
    }
    let tests = [
        ("rc_bw", "bw"),
        ("rc_bi_bw", "bw"),
        ("rc_lat", "latency"),
        ("rc_rdma_read_bw", "bw"),
        ("rc_rdma_read_lat", "latency"),
        ("rc_rdma_write_bw", "bw"),
        ("rc_rdma_write_lat", "latency"),
        ("rc_rdma_write_poll_lat", "latency"),
        ("rc_compare_swap_mr", "msg_rate"),
        ("rc_fetch_add_mr", "msg_rate"),
        ("ver_rc_compare_swap", "msg_rate"),
        ("ver_rc_fetch_add", "msg_rate"),
    ];
    run_qperf(&Daemon::loopback(), &tests);
}

/// Runs without a configuration file: the link is so fast that receives are posted late.
#[test]
fn qperf_runs_on_the_embedded_loopback_as_it_is() {
    skip_if!(two_cores());
    if !is_installed("qperf", "qperf") {
        return;
    }
    let daemon = Daemon::start(include_str!("../../../config/loopback.toml"), &[]);
    run_qperf(&daemon, &[("rc_bw", "bw"), ("rc_rdma_write_bw", "bw")]);
}

#[test]
fn libfabric_finds_the_devices() {
    if !is_installed("fi_info", "libfabric-bin") {
        return;
    }
    let daemon = Daemon::loopback();
    let said = Program::start(&daemon, "fi_info -p verbs").succeed();
    for expected in ["domain: siw0", "domain: siw1", "FI_PROTO_IWARP"] {
        assert!(said.contains(expected), "{expected} is not in\n{said}");
    }
}
