//! A private network for a test: an unnamed namespace that vanishes with the last process in it, so
//! that interfaces can have the names used in the configuration files.

use std::fs::File;
use std::io::IoSlice;
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn, SockaddrIn6, recvfrom,
    sendmsg, setsockopt, socket, sockopt,
};
use nix::sys::time::TimeVal;

use super::{Daemon, spawn};

/// Reason why this machine cannot run tests with interfaces; `None` if it can.
pub fn lacks_network() -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("interfaces need root".into());
    }
    if !Path::new("/dev/net/tun").exists() {
        return Some("/dev/net/tun is missing (modprobe tun)".into());
    }
    missing_program("ip")
}

/// Reason why a program cannot be used.
pub fn missing_program(name: &str) -> Option<String> {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let found = path.split(':').any(|d| Path::new(d).join(name).is_file());
    (!found).then(|| format!("{name} is not installed"))
}

/// Ends the test early, with the line that deploy/test looks for.
#[macro_export]
macro_rules! skip_if {
    ($why:expr) => {
        if let Some(why) = $why {
            println!("\nskipped: {why}");
            return;
        }
    };
}

pub struct Netns(File);

impl Netns {
    pub fn new() -> Netns {
        let file = std::thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            File::open("/proc/thread-self/ns/net").unwrap()
        })
        .join()
        .unwrap();
        let ns = Netns(file);
        ns.ip("link set lo up");
        ns
    }

    /// Runs `f` in the namespace; sockets and processes created there stay in it.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|s| {
            let t = s.spawn(|| {
                setns(&self.0, CloneFlags::CLONE_NEWNET).unwrap();
                f()
            });
            match t.join() {
                Ok(v) => v,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// Runs an `ip` command.
    pub fn ip(&self, args: &str) -> String {
        self.command("ip", args)
    }

    /// Runs a program, which must succeed, with arguments separated by spaces.
    pub fn command(&self, program: &str, args: &str) -> String {
        self.run(|| {
            let out = Command::new(program)
                .args(args.split(' '))
                .env(
                    "PATH",
                    std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin",
                )
                .output()
                .unwrap_or_else(|error| panic!("{program}: {error}"));
            assert!(
                out.status.success(),
                "{program} {args}: {}",
                String::from_utf8_lossy(&out.stderr)
            );
            String::from_utf8_lossy(&out.stdout).into_owned()
        })
    }

    /// Starts `siwd` in this namespace and waits until it is ready.
    pub fn siwd(&self, config: &str, args: &[&str]) -> Daemon {
        let dir = tempfile::tempdir().unwrap();
        let child = self.run(|| spawn(dir.path(), config, args));
        Daemon::wait_ready(dir, child)
    }

    /// Makes a veth pair as siwd's configuration expects it: up, silent, without offloads.
    pub fn veth(&self, mtu: u32) {
        self.ip(&format!(
            "link add veth0 mtu {mtu} type veth peer name veth1 mtu {mtu}"
        ));
        for end in ["veth0", "veth1"] {
            self.command(
                "ethtool",
                &format!("-K {end} tso off gso off gro off rx off tx off"),
            );
            self.ip(&format!("link set {end} addrgenmode none"));
        }
        self.ip("link set veth0 up arp off");
        self.ip("link set veth1 up");
    }

    /// Moves an interface into another namespace and brings it up, silent.
    pub fn give(&self, dev: &str, to: &Netns) {
        let path = format!("/proc/{}/fd/{}", std::process::id(), to.0.as_raw_fd());
        self.ip(&format!("link set {dev} netns {path}"));
        to.ip(&format!("link set {dev} addrgenmode none"));
        to.ip(&format!("link set {dev} up arp off"));
    }

    /// Gives Linux an address, usable at once.
    pub fn address(&self, dev: &str, cidr: &str) {
        let nodad = if cidr.contains(':') { " nodad" } else { "" };
        self.ip(&format!("addr add {cidr} dev {dev}{nodad}"));
    }

    /// Sends one ICMP echo from Linux with `data` bytes; returns false if no answer came in time.
    pub fn ping(&self, to: IpAddr, data: usize, wait: Duration) -> bool {
        self.run(|| ping(to, data, wait))
    }

    /// Pings until an answer arrives: links and neighbours need a moment after the start.
    pub fn wait_ping(&self, to: IpAddr) {
        let end = Instant::now() + super::PATIENCE;
        while !self.ping(to, 56, Duration::from_millis(500)) {
            assert!(Instant::now() < end, "no echo reply from {to}");
        }
    }
}

fn ping(to: IpAddr, data: usize, wait: Duration) -> bool {
    let (family, protocol, echo, reply) = match to {
        IpAddr::V4(_) => (AddressFamily::Inet, SockProtocol::Icmp, 8, 0),
        IpAddr::V6(_) => (AddressFamily::Inet6, SockProtocol::IcmpV6, 128, 129),
    };
    let s = socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol).unwrap();
    let id = (nix::unistd::gettid().as_raw() as u16).to_be_bytes();
    let mut packet = vec![echo, 0, 0, 0, id[0], id[1], 0, 1];
    packet.extend(super::pattern(u64::from(id[1]) + 1, data));
    if to.is_ipv4() {
        let sum = internet_checksum(&packet).to_be_bytes();
        packet[2..4].copy_from_slice(&sum);
    }
    let iov = [IoSlice::new(&packet)];
    let sent = match to {
        IpAddr::V4(a) => {
            let a = SockaddrIn::from(std::net::SocketAddrV4::new(a, 0));
            sendmsg(s.as_raw_fd(), &iov, &[], MsgFlags::empty(), Some(&a))
        }
        IpAddr::V6(a) => {
            let a = SockaddrIn6::from(std::net::SocketAddrV6::new(a, 0, 0, 0));
            sendmsg(s.as_raw_fd(), &iov, &[], MsgFlags::empty(), Some(&a))
        }
    };
    if sent.is_err() {
        // No route yet.
        return false;
    }
    let end = Instant::now() + wait;
    let mut buffer = vec![0u8; 65_536];
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        let timeout = TimeVal::new(
            left.as_secs() as i64,
            i64::from(left.subsec_micros()).max(1),
        );
        setsockopt(&s, sockopt::ReceiveTimeout, &timeout).unwrap();
        let Ok((n, _)) = recvfrom::<()>(s.as_raw_fd(), &mut buffer) else {
            continue;
        };
        // IPv4 raw sockets deliver the IP header too.
        let at = if to.is_ipv4() {
            usize::from(buffer[0] & 15) * 4
        } else {
            0
        };
        let icmp = &buffer[at..n];
        if icmp.len() >= 8 && icmp[0] == reply && icmp[4..] == packet[4..] {
            return true;
        }
    }
}

fn internet_checksum(bytes: &[u8]) -> u16 {
    let mut sum: u32 = bytes
        .chunks(2)
        .map(|c| u32::from(c[0]) << 8 | c.get(1).map_or(0, |b| u32::from(*b)))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// `siw-ping` connected to this daemon, with arguments separated by spaces.
pub fn siw_ping(daemon: &Daemon, args: &str) -> Command {
    let mut command = Command::new(super::siw_ping());
    command
        .args(args.split(' '))
        .arg("--socket")
        .arg(&daemon.socket);
    command
}

/// Fields of the frames of a capture that match `filter`: one frame a line, values separated by
/// tabs.
pub fn tshark_fields(capture: &Path, filter: &str, fields: &[&str]) -> Vec<Vec<String>> {
    let mut c = tshark(capture, filter);
    c.args(["-T", "fields", "-E", "occurrence=a", "-E", "separator=/t"]);
    for f in fields {
        c.args(["-e", f]);
    }
    // Since tshark 4.2, flags are words.
    output(&mut c)
        .replace("True", "1")
        .replace("False", "0")
        .lines()
        .map(|l| l.split('\t').map(str::to_owned).collect())
        .collect()
}

/// Writes the frames of a capture that match a display filter to another.
pub fn write_matching(capture: &Path, filter: &str, to: &Path) {
    output(tshark(capture, filter).arg("-w").arg(to));
}

/// tshark's dissection of iWARP as text, with one line for each other layer.
pub fn tshark_text(capture: &Path, filter: &str) -> String {
    output(tshark(capture, filter).args(["-O", "iwarp_mpa,iwarp_ddp_rdmap"]))
}

fn tshark(capture: &Path, filter: &str) -> Command {
    let mut command = Command::new("tshark");
    for name in not_iwarp() {
        command.args(["--disable-protocol", name]);
    }
    // Checksums are verified, since siwd computes them.
    command
        .args(["-o", "tcp.check_checksum:TRUE"])
        .args(["-o", "ip.check_checksum:TRUE"])
        // Otherwise the stream would lack the bytes of retransmissions.
        .args(["-o", "tcp.reassemble_out_of_order:TRUE", "-2", "-r"])
        .arg(capture);
    if !filter.is_empty() {
        command.args(["-Y", filter]);
    }
    command
}

/// Protocols other than iWARP that tshark may guess for a TCP stream, by its port or its bytes.
/// Ports are random, and with a port of X11 tshark would dissect the stream as X11, mostly
/// malformed.
fn not_iwarp() -> &'static [String] {
    static NAMES: std::sync::OnceLock<Vec<String>> = std::sync::OnceLock::new();
    NAMES.get_or_init(|| {
        let table = |which| output(Command::new("tshark").args(["-G", which]));
        // Lines of table, value, protocol; and of table, protocol, enabled.
        let (ports, guesses) = (table("decodes"), table("heuristic-decodes"));
        let ports = ports.lines().filter_map(|l| {
            let mut l = l.split('\t');
            (l.next() == Some("tcp.port")).then(|| l.nth(1))?
        });
        let guesses = guesses.lines().filter_map(|l| {
            let (table, rest) = l.split_once('\t')?;
            matches!(table, "tcp" | "iwarp_ddp_rdmap").then(|| rest.split('\t').next())?
        });
        let mut names: Vec<String> = ports.chain(guesses).map(String::from).collect();
        names.sort();
        names.dedup();
        names.retain(|n| n != "iwarp_mpa");
        assert!(
            names.len() > 100,
            "tshark's tables have another form: {names:?}"
        );
        names
    })
}

fn output(c: &mut Command) -> String {
    let out = c.output().unwrap();
    assert!(
        out.status.success(),
        "tshark: {}",
        String::from_utf8_lossy(&out.stderr)
    );
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// Checks that hold for every capture of siwd: no malformed frame, every checksum correct, and
/// every CRC that tshark finds is good.
pub struct Verdict {
    pub good_crcs: usize,
    pub text: String,
}

pub fn judge(capture: &Path) -> Verdict {
    let bad = tshark_fields(
        capture,
        // Linux may send 0xffff, the other zero of the checksum; siwd accepts it too.
        "_ws.malformed || ip.checksum.status == 0 || \
         (tcp.checksum.status == 0 && tcp.checksum != 0xffff)",
        &["frame.number", "_ws.col.Info"],
    );
    assert!(bad.is_empty(), "malformed frames or bad checksums: {bad:?}");
    let text = tshark_text(capture, "iwarp_mpa || iwarp_ddp_rdmap");
    let count = |what: &str| text.lines().filter(|l| l.contains(what)).count();
    assert_eq!(count("Bad CRC32"), 0, "bad CRCs in the capture");
    assert_eq!(count("Malformed"), 0);
    Verdict {
        good_crcs: count("Good CRC32"),
        text,
    }
}
