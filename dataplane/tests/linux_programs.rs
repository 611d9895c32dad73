//! The same program at both ends: over siwd by `siwrun`, and over the kernel's siw with the
//! distribution's libraries, in a guest.

mod common;

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
    /// Its client may run on the kernel. That of perftest makes two connections and does not wait
    /// until its server listens for the second: the kernel reports a refusal at once.
    both_roles: bool,
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
        both_roles: false,
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
        both_roles: true,
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
        both_roles: true,
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
        let server = start_listening(siwd, &self.server_line("10.77.0.1"));
        let done = guest
            .start(&self.client_line("10.77.0.1"))
            .wait(GUEST_PATIENCE);
        assert_eq!(done.status, Some(0), "{}: {done:?}", self.name);
        assert!(says(&done.out, self.expected), "{}: {done:?}", self.name);
        server.succeed();
    }

    /// siw does not look at a message that comes just after its MPA reply until more comes
    /// (linux_siw.rs): a client that waits for its answer is ended, and started again.
    fn kernel_serves(&self, siwd: &Daemon, guest: &Guest) {
        let mut reasons = Vec::new();
        for _ in 0..5 {
            let server = guest.start(&self.server_line("10.77.0.2"));
            guest.run(&format!("wait-listen {}", self.port));
            let client = format!("timeout 8 {}", self.client_line("10.77.0.2"));
            let (status, said) = Program::start(siwd, &client).finish();
            server.kill();
            if status.success() && says(&said, self.expected) {
                return;
            }
            // timeout(1) ended it.
            assert_eq!(status.code(), Some(124), "{}: {said}", self.name);
            reasons.push(said);
        }
        panic!("{}: {}", self.name, reasons.join("\n"));
    }
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
        if pair.both_roles {
            pair.kernel_connects(&siwd, &guest);
        }
        pair.kernel_serves(&siwd, &guest);
    }
}
