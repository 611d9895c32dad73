//! The same program at both ends: over siwd by `siwrun`, and over the kernel's siw with the
//! distribution's libraries, in a guest.

mod common;

use std::process::ExitStatus;
use std::time::Duration;

use common::Daemon;
use common::guest::{GUEST_PATIENCE, Guest, lacks_guest};
use common::net::Netns;
use common::programs::{Program, is_installed, start_listening};

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
# The guest may stand still for a while.
request_timeout_ms = 60000
reply_timeout_ms = 60000
"#;

/// A program, its arguments at both ends, how an end becomes a client, and where its server listens.
struct Pair {
    name: &'static str,
    arguments: &'static str,
    server: &'static str,
    client: &'static str,
    port: u16,
    package: &'static str,
    /// What a client on the kernel says that came too early. That of perftest makes two connections and
    /// does not wait until its server listens for the second: the kernel reports a refusal at once.
    refused: Option<&'static str>,
    /// What a client says of its success.
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

const PAIRS: [Pair; 5] = [
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

/// A line has these words.
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
        for attempt in 1.. {
            let server = start_listening(siwd, &self.server_line("10.77.0.1"));
            let done = guest.start(&client).wait(GUEST_PATIENCE);
            if done.status == Some(0) {
                assert!(says(&done.out, self.expected), "{}: {done:?}", self.name);
                server.succeed();
                return;
            }
            println!("{}: attempt {attempt}: {done:?}", self.name);
            let was_early = self.refused.is_some_and(|word| done.err.contains(word));
            assert!(was_early && attempt < 40, "{}: {done:?}", self.name);
        }
    }

    fn kernel_serves(&self, siwd: &Daemon, guest: &Guest) {
        kernel_serves(guest, &self.server_line("10.77.0.2"), self.port, || {
            let client = format!("timeout 8 {}", self.client_line("10.77.0.2"));
            let (status, said) = Program::start(siwd, &client).finish();
            let has_figures = says(&said, self.expected);
            assert!(has_figures || !status.success(), "{}: {said}", self.name);
            (status, said)
        });
    }
}

/// Runs a client of a server in the guest. siw does not look at a message that comes just after its MPA
/// reply until more comes (linux_siw.rs): a client that waits for its answer is ended, by timeout(1), and
/// started again.
fn kernel_serves(
    guest: &Guest,
    server: &str,
    port: u16,
    run_client: impl Fn() -> (ExitStatus, String),
) {
    let mut reasons = Vec::new();
    for _ in 0..5 {
        let running = guest.start(server);
        guest.run(&format!("wait-listen {port}"));
        let (status, said) = run_client();
        // It ends with its client. Killed just then, it may meet a race of the kernel's (a BUG in
        // cm_work_handler() of iw_cm).
        let served = running.wait(Duration::from_secs(5));
        if status.success() {
            return;
        }
        assert_eq!(status.code(), Some(124), "of {server}: {said}, {served:?}");
        reasons.push(said);
    }
    panic!("{server}: {}", reasons.join("\n"));
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

/// fio's rdma engine. Its server is the one with `--rw=read` and without a host name, whatever moves.
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
        // Linux siw ends a connection whose message finds no receive, and fio posts them late.
        if verb == "send" {
            continue;
        }
        kernel_serves(&guest, &server, 8899, || {
            let (status, said) =
                Program::start(&siwd, &format!("timeout 8 {}", client(verb, "10.77.0.2"))).finish();
            if status.success() {
                check(verb, &said);
            }
            (status, said)
        });
    }
}
