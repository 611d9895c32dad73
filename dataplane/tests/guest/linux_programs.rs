//! The same program at both ends: over siwd by `siwrun`, and, in a guest, over the kernel's siw
//! with the distribution's libraries.

use crate::common::Daemon;
use crate::common::guest::{GUEST_PATIENCE, Guest, lacks_guest};
use crate::common::net::Netns;
use crate::common::programs::{Program, await_kernel_listener, is_installed, start_listening};
use crate::common::python::python_programs;

const CONFIG: &str = r#"
[dpdk]
hugepages = "never"
buffers = 8192
[[device]]
name = "siw0"
devargs = "net_af_packet0,iface=lab0"
mac = "02:00:00:77:00:01"
addresses = ["10.77.0.1/24"]
[device.mpa]
preset = "siw"
# The guest may pause for a while.
request_timeout_ms = 60000
reply_timeout_ms = 60000
"#;

/// A program, its arguments at both ends, the arguments that make an end a client, and the server's
/// port.
struct Pair {
    name: &'static str,
    arguments: &'static str,
    server: &'static str,
    client: &'static str,
    port: u16,
    package: &'static str,
    /// Output of a client on the kernel that started too early. perftest's client makes two
    /// connections and does not wait until its server listens for the second: the kernel reports a
    /// refusal at once.
    refused: Option<&'static str>,
    /// Output of a client that succeeded.
    expected: &'static str,
}

const fn perftest(name: &'static str) -> Pair {
    Pair {
        name,
        arguments: "-R -F -n 200 -s 4096",
        server: "",
        client: "",
        port: 18515,
        package: "perftest",
        refused: Some("Connection refused"),
        expected: "4096 200",
    }
}

const PAIRS: [Pair; 6] = [
    Pair {
        name: "rping",
        arguments: "-C 5 -S 4096 -v -V",
        server: "-s -a",
        client: "-c -a",
        port: 7174,
        package: "rdmacm-utils",
        refused: None,
        expected: "ping data: rdma-ping-4",
    },
    perftest("ib_write_bw"),
    // Its server sends first.
    perftest("ib_write_lat"),
    perftest("ib_read_lat"),
    perftest("ib_send_bw"),
    Pair {
        name: "rstream",
        arguments: "-T b -T v -S 4096 -C 4 -I 10",
        server: "-b",
        client: "-s",
        port: 7471,
        package: "rdmacm-utils",
        refused: None,
        expected: "custom",
    },
];

/// Whether a line of the output contains these words in sequence.
fn says(output: &str, words: &str) -> bool {
    output.lines().any(|line| {
        let line: Vec<&str> = line.split_whitespace().collect();
        line.join(" ").contains(words)
    })
}

impl Pair {
    fn server_line(&self, ip: &str) -> String {
        let Pair {
            name, arguments, ..
        } = self;
        match self.server {
            "" => format!("{name} {arguments}"),
            option => format!("{name} {arguments} {option} {ip}"),
        }
    }

    fn client_line(&self, ip: &str) -> String {
        let Pair {
            name,
            arguments,
            client,
            ..
        } = self;
        format!("{name} {arguments} {client} {ip}")
    }

    fn kernel_connects(&self, siwd: &Daemon, guest: &Guest) {
        let client = self.client_line("10.77.0.1");
        let mut cut_short = 0;
        for attempt in 1.. {
            let mut server = start_listening(siwd, &self.server_line("10.77.0.1"));
            let done = guest.start(&client).wait(GUEST_PATIENCE);
            if done.status == Some(0) {
                assert!(says(&done.out, self.expected), "{}: {done:?}", self.name);
                server.succeed();
                return;
            }
            let has_ended = server.has_ended();
            server.kill();
            let (name, said) = (self.name, server.said());
            println!(
                "{name}: attempt {attempt}: {done:?}; the server ended: {has_ended}, it said: {said}"
            );
            let was_early = self.refused.is_some_and(|word| done.err.contains(word));
            // Seen once, for an unknown reason: everything was measured, but the connection over
            // which perftest ends was lost. A second occurrence is an error.
            let was_cut_short = !was_early && says(&done.out, self.expected);
            cut_short += u32::from(was_cut_short);
            let may_retry = was_early || (was_cut_short && cut_short == 1);
            assert!(may_retry && attempt < 40, "{name}: {done:?}");
        }
    }

    fn kernel_serves(&self, siwd: &Daemon, guest: &Guest) {
        let client = self.client_line("10.77.0.2");
        let said = kernel_serves(
            siwd,
            guest,
            &self.server_line("10.77.0.2"),
            self.port,
            &client,
        );
        assert!(says(&said, self.expected), "{}: {said}", self.name);
    }
}

/// Runs a server in the guest and a client of it; returns the output of the client.
fn kernel_serves(siwd: &Daemon, guest: &Guest, server: &str, port: u16, client: &str) -> String {
    let running = guest.start(server);
    guest.run(&format!("wait-listen {port}"));
    let said = Program::start(siwd, client).succeed();
    // The server ends with its client. If it is killed at that moment, it may hit a race in the
    // kernel (a BUG in cm_work_handler() of iw_cm).
    running.wait(GUEST_PATIENCE);
    said
}

#[test]
fn programs_meet_themselves_on_the_kernel() {
    skip_if!(lacks_guest());
    if !PAIRS
        .iter()
        .all(|pair| is_installed(pair.name, pair.package))
    {
        return;
    }
    let ns = Netns::new();
    let guest = Guest::boot(&ns, &["--ip", "10.77.0.2/24"]);
    let siwd = ns.siwd(CONFIG, &[]);
    for pair in &PAIRS {
        pair.kernel_connects(&siwd, &guest);
        pair.kernel_serves(&siwd, &guest);
    }
}

/// Command line of fio's rdma engine. The server is the one with `--rw=read` and without a host
/// name, for any operation.
fn fio(what: &str) -> String {
    format!("fio --ioengine=rdma --port=8899 --bs=64k --size=1m --thread {what}")
}

#[test]
fn fio_meets_itself_on_the_kernel() {
    skip_if!(lacks_guest());
    if !is_installed("fio", "fio") {
        return;
    }
    let ns = Netns::new();
    let guest = Guest::boot(&ns, &["--ip", "10.77.0.2/24", "--large", "--memory", "768"]);
    let siwd = ns.siwd(CONFIG, &[]);
    let server = fio("--name=server --rw=read");
    let client = |verb: &str, ip: &str| {
        fio(&format!(
            "--name=client --rw=write --verb={verb} --hostname={ip}"
        ))
    };
    let check = |verb: &str, said: &str| {
        assert!(said.contains("err= 0"), "{verb}: {said}");
        assert!(said.contains("(1024KiB/"), "{verb} moved less: {said}");
    };
    for verb in ["write", "read", "send"] {
        let kernel = |line: &str| guest.start(line);
        let ours = start_listening(&siwd, &format!("--rnr wait {server}"));
        let done = kernel(&client(verb, "10.77.0.1")).wait(GUEST_PATIENCE);
        assert_eq!(done.status, Some(0), "{verb}: {done:?}");
        check(verb, &done.out);
        ours.succeed();
        // Linux siw ends a connection whose message finds no receive, and fio posts its receives
        // late.
        if verb == "send" {
            continue;
        }
        let client = client(verb, "10.77.0.2");
        check(verb, &kernel_serves(&siwd, &guest, &server, 8899, &client));
    }
}

/// The kernel's NVMe target with a file as its namespace.
const NVME_TARGET: &str = "
    set -e
    modprobe nvmet-rdma
    mountpoint -q /sys/kernel/config || mount -t configfs none /sys/kernel/config
    dd if=/dev/zero of=/disk bs=1M count=16 2>/dev/null
    cd /sys/kernel/config/nvmet
    mkdir subsystems/nqn.2026-11.test:disk ports/1
    echo 1 >subsystems/nqn.2026-11.test:disk/attr_allow_any_host
    mkdir subsystems/nqn.2026-11.test:disk/namespaces/1
    cd subsystems/nqn.2026-11.test:disk/namespaces/1
    echo -n /disk >device_path
    echo 1 >buffered_io
    echo 1 >enable
    cd ../../../../ports/1
    echo rdma >addr_trtype
    echo ipv4 >addr_adrfam
    echo 10.77.0.2 >addr_traddr
    echo 4420 >addr_trsvcid
    ln -s ../../subsystems/nqn.2026-11.test:disk subsystems/nqn.2026-11.test:disk
";

/// Writes blocks of several sizes, reads them into other memory, and compares.
const NVME_INITIATOR: &str = r#"
import nvmeof

SIZES = (4096, 65_536, 1 << 20)

with nvmeof.Controller.connect("10.77.0.2", "nqn.2026-11.test:disk", queue_depth=16) as controller:
    disk = controller.namespace(1)
    assert disk.info.size_lbas * disk.lba_size == 16 << 20
    for size in SIZES:
        data = bytes((n * 13 + size) % 253 for n in range(size))
        with controller.allocate(size) as written, controller.allocate(size) as read:
            written.write(data)
            disk.write(written, 8)
            disk.flush()
            disk.read(read, 8)
            assert read.read() == data, size
print("all blocks are right")
"#;

#[test]
fn an_nvme_initiator_uses_a_target_of_the_kernel() {
    skip_if!(lacks_guest());
    let packages = ["nvmeof==2026.10.22", "ibverbs==2026.10.22"];
    let Some(programs) = python_programs(&packages) else {
        return;
    };
    let ns = Netns::new();
    let guest = Guest::boot(&ns, &["--ip", "10.77.0.2/24"]);
    guest.run(NVME_TARGET);
    let siwd = ns.siwd(CONFIG, &[]);
    let script = siwd.dir.path().join("initiator.py");
    std::fs::write(&script, NVME_INITIATOR).unwrap();
    let python = programs.join("python");
    let line = format!("timeout 60 {} {}", python.display(), script.display());
    let said = Program::start(&siwd, &line).succeed();
    assert!(said.contains("all blocks are right"), "{said}");
    // The first bytes of the last write, eight blocks into the disk.
    let disk = guest.run("od -An -tu1 -j32768 -N4 /disk");
    let disk: Vec<&str> = disk.split_whitespace().collect();
    assert_eq!(disk, ["144", "157", "170", "183"]);
}

/// siwd with a NIC that its kernel shares, for programs that also use TCP at the RDMA address.
fn shared_siwd(ns: &Netns) -> Daemon {
    // A NIC owned by siwd has no kernel interface, so this interface must not deliver its frames to
    // the kernel too.
    ns.run(|| std::fs::write("/proc/sys/net/ipv4/conf/lab0/rp_filter", "1").unwrap());
    let shared = "host_interface = \"rdma0\"\nhost_ports = \"61000-61199\"\n[device.mpa]";
    ns.siwd(&CONFIG.replace("[device.mpa]", shared), &[])
}

/// qperf's tests that work with the queue pairs and operations of Linux siw.
const QPERF: [(&str, &str); 2] = [("rc_lat", "latency"), ("rc_bi_bw", "bw")];

#[test]
fn qperf_meets_itself_on_the_kernel() {
    skip_if!(lacks_guest());
    if !is_installed("qperf", "qperf") {
        return;
    }
    let ns = Netns::new();
    let guest = Guest::boot(&ns, &["--ip", "10.77.0.2/24"]);
    let siwd = shared_siwd(&ns);
    let names = QPERF.map(|(test, _)| test).join(" ");
    let client = |ip: &str| format!("qperf {ip} -lp 19765 -t 1 -cm 1 {names}");
    let check = |said: &str| {
        for (test, figure) in QPERF {
            let (_, after) = said.split_once(&format!("{test}:")).expect(test);
            let line = after.lines().find(|line| line.contains('='));
            // Excludes "bw = 0 bytes/sec", which qperf prints when nothing arrives.
            let has_result =
                line.is_some_and(|line| line.contains(figure) && !line.contains("= 0 "));
            assert!(has_result, "{said}");
        }
    };
    // qperf servers keep running after a test.
    let kernel = guest.start("qperf -lp 19765");
    guest.run("wait-listen 19765");
    let said = Program::start_in(&ns, &siwd, &client("10.77.0.2")).succeed();
    check(&said);
    kernel.kill();
    let mut ours = Program::start_in(&ns, &siwd, "qperf -lp 19765");
    await_kernel_listener(&mut ours, 19765);
    let done = guest.start(&client("10.77.0.1")).wait(GUEST_PATIENCE);
    assert_eq!(done.status, Some(0), "{done:?}");
    check(&done.out);
}
