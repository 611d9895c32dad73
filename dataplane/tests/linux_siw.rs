//! The Linux kernel's iWARP (siw), in a guest, with librdmacm's rping as the application:
//! a peer of which nothing was written here.

mod common;

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use common::guest::{GUEST_PATIENCE, Guest, lacks_guest};
use common::net::{Netns, judge, missing_program, siw_ping, tshark_fields};
use common::*;

const PINGS: usize = 4;
/// The shortest usual one, more than a segment, and the longest that rping takes: siw sends the
/// latter from its zero-copy path, with FPDUs that do not keep to segments.
const SIZES: [usize; 3] = [64, 4096, 65_535];

fn config(crc: &str) -> String {
    format!(
        r#"
[dpdk]
hugepages = "never"
buffers = 8192
[[device]]
name = "siw0"
devargs = "net_af_packet0,iface=lab0"
mac = "02:00:00:77:00:01"
addresses = ["10.77.0.1/24", "fd77::1/64"]
[device.mpa]
crc = "{crc}"
"#
    )
}

fn boot(ns: &Netns) -> Guest {
    Guest::boot(ns, &["--ip", "10.77.0.2/24", "--ip6", "fd77::2/64", "--crc", "off"])
}

fn capture(ns: &Netns, crc: &str) -> (Daemon, PathBuf, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("siw.pcapng");
    (ns.siwd(&config(crc), &["--capture", file.to_str().unwrap()]), file, dir)
}

/// What rping writes into ping number `n`.
fn ping_text(n: usize, size: usize) -> String {
    let mut s = format!("rdma-ping-{n}: ");
    let letters = (0..).map(|i| char::from(b'A' + ((n + i) % 58) as u8));
    s.extend(letters.take(size - s.len() - 1));
    s
}

/// Every ping was printed in order with exactly its data.
fn assert_pings(out: &str, prefix: &str, size: usize, who: &str) {
    let lines: Vec<&str> = out.lines().filter_map(|l| l.strip_prefix(prefix)).collect();
    assert_eq!(lines.len(), PINGS, "{who}: {} pings of {size} bytes", lines.len());
    for (n, line) in lines.iter().enumerate() {
        assert!(*line == ping_text(n, size), "{who}: data of ping {n} of {size} bytes is wrong");
    }
}

struct Ping(Child);

impl Ping {
    fn start(daemon: &Daemon, args: &str) -> Ping {
        let mut c = siw_ping(daemon, args);
        c.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Ping(c.spawn().unwrap())
    }

    /// A server that listens.
    fn server(daemon: &Daemon, args: &str) -> Ping {
        let mut ping = Ping::start(daemon, args);
        let mut err = BufReader::new(ping.0.stderr.take().unwrap());
        let mut line = String::new();
        err.read_line(&mut line).unwrap();
        assert!(line.contains("listening"), "siw-ping {args}: {line}");
        ping.0.stderr = Some(err.into_inner());
        ping
    }

    /// How it ended: status, standard output, standard error.
    fn wait(mut self) -> (Option<i32>, String, String) {
        let read = |mut from: Box<dyn Read + Send>| {
            std::thread::spawn(move || {
                let mut text = String::new();
                let _ = from.read_to_string(&mut text);
                text
            })
        };
        let out = read(Box::new(self.0.stdout.take().unwrap()));
        let err = read(Box::new(self.0.stderr.take().unwrap()));
        let end = Instant::now() + GUEST_PATIENCE;
        let status = loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < end, "siw-ping hangs");
            std::thread::sleep(Duration::from_millis(5));
        };
        (status.code(), out.join().unwrap(), err.join().unwrap())
    }
}

impl Drop for Ping {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn rping_connects(siwd: &Daemon, guest: &Guest, addr: &str, size: usize, who: &str) {
    let server = Ping::server(siwd, &format!("-s -a {addr} -v"));
    let done = guest
        .start(&format!("rping -c -a {addr} -p 7174 -C {PINGS} -S {size} -v -V"))
        .wait(GUEST_PATIENCE);
    assert_eq!(done.status, Some(0), "{who}: {}", done.err);
    assert_pings(&done.out, "ping data: ", size, &format!("{who}, rping"));
    let (status, out, err) = server.wait();
    assert_eq!((status, &err[..]), (Some(0), ""), "{who}");
    assert_pings(&out, "server ping data: ", size, &format!("{who}, siw-ping"));
}

fn siw_ping_connects(siwd: &Daemon, guest: &Guest, addr: &str, size: usize, who: &str) {
    let server = guest.start(&format!("rping -s -a {addr} -p 7174 -C {PINGS} -v"));
    guest.run("wait-listen 7174");
    let (status, out, err) =
        Ping::start(siwd, &format!("-c -a {addr} -C {PINGS} -S {size} -v -V")).wait();
    assert_eq!((status, &err[..]), (Some(0), ""), "{who}");
    assert_pings(&out, "ping data: ", size, &format!("{who}, siw-ping"));
    let done = server.wait(GUEST_PATIENCE);
    assert_eq!(done.status, Some(0), "{who}: {}", done.err);
    assert_pings(&done.out, "server ping data: ", size, &format!("{who}, rping"));
}

#[test]
fn rping_and_siw_ping_understand_each_other_both_ways_with_and_without_crc_over_ipv4_and_ipv6() {
    skip_if!(lacks_guest().or_else(|| missing_program("tshark")));
    let ns = Netns::new();
    let guest = boot(&ns);
    // Who asks for CRC: nobody, siwd, the guest.
    for (ours, theirs) in [("off", 0), ("on", 0), ("off", 1)] {
        let crc = ours == "on" || theirs == 1;
        guest.run(&format!("echo {theirs} >/sys/module/siw/parameters/mpa_crc_required"));
        let (siwd, file, _dir) = capture(&ns, ours);
        let mut connections = 0;
        for (us, them) in [("10.77.0.1", "10.77.0.2"), ("fd77::1", "fd77::2")] {
            for size in SIZES {
                let who = format!("CRC {ours}/{theirs}, {us}, {size}");
                rping_connects(&siwd, &guest, us, size, &who);
                siw_ping_connects(&siwd, &guest, them, size, &who);
                connections += 2;
            }
        }
        assert!(siwd.stop().success());
        let verdict = judge(&file);
        let replies = tshark_fields(&file, "iwarp_mpa.rep", &["iwarp_mpa.crc_flag"]);
        assert_eq!(replies.len(), connections, "MPA replies in the capture");
        let on = if crc { "1" } else { "0" };
        assert!(replies.iter().all(|r| r[0] == on), "CRC negotiated: {replies:?}");
        if crc {
            // Each ping is at least a READ with its response, a WRITE and four SENDs.
            assert!(verdict.good_crcs >= connections * PINGS * 7, "{}", verdict.good_crcs);
        } else {
            assert_eq!(verdict.good_crcs, 0);
        }
    }
}

#[test]
fn connections_that_cannot_be_and_peers_that_vanish_are_clear_errors() {
    skip_if!(lacks_guest());
    let ns = Netns::new();
    let mut guest = boot(&ns);
    let siwd = ns.siwd(&config("on"), &[]);

    // Nobody listens, at either end. (rping reports and then waits for ever.)
    let done = guest.start("rping -c -a 10.77.0.1 -p 7999 -C 1").wait(Duration::from_secs(15));
    assert!(done.err.contains("Connection refused"), "{done:?}");
    let (status, _, err) = Ping::start(&siwd, "-c -a 10.77.0.2 -p 7999 -C 1").wait();
    assert_eq!(status, Some(1));
    assert!(err.contains("nothing listens"), "{err}");
    let (status, _, err) = Ping::start(&siwd, "-c -a 10.77.0.200 -C 1").wait();
    assert_eq!(status, Some(1));
    assert!(err.contains("no neighbour answers"), "{err}");

    // The guest's client is killed between two pings: its kernel closes the connection.
    let server = Ping::server(&siwd, "-s -a 10.77.0.1 -v");
    let client = guest.start("rping -c -a 10.77.0.1 -p 7174 -v");
    let mut server = server;
    let mut pings = BufReader::new(server.0.stdout.take().unwrap());
    let mut line = String::new();
    pings.read_line(&mut line).unwrap();
    assert!(line.starts_with("server ping data: rdma-ping-0"), "{line}");
    server.0.stdout = Some(pings.into_inner());
    client.kill();
    // An orderly end between two pings is no error to a server; one within a ping is.
    let (status, _, err) = server.wait();
    assert!(status == Some(0) || err.contains("connection broke"), "{status:?} {err}");

    // The guest's server is killed.
    let server = guest.start("rping -s -a 10.77.0.2 -p 7174");
    guest.run("wait-listen 7174");
    let mut client = Ping::start(&siwd, "-c -a 10.77.0.2 -v");
    let mut pings = BufReader::new(client.0.stdout.take().unwrap());
    line.clear();
    pings.read_line(&mut line).unwrap();
    assert!(line.starts_with("ping data: rdma-ping-0"), "{line}");
    client.0.stdout = Some(pings.into_inner());
    server.kill();
    let (status, _, err) = client.wait();
    assert_eq!(status, Some(1));
    assert!(err.contains("closed the connection early") || err.contains("broke"), "{err}");

    // The whole machine goes away, without a word.
    let _server = guest.start("rping -s -a 10.77.0.2 -p 7175");
    guest.run("wait-listen 7175");
    let mut client = Ping::start(&siwd, "-c -a 10.77.0.2 -p 7175 -v --timeout 3");
    let mut pings = BufReader::new(client.0.stdout.take().unwrap());
    line.clear();
    pings.read_line(&mut line).unwrap();
    client.0.stdout = Some(pings.into_inner());
    guest.kill();
    let (status, _, err) = client.wait();
    assert_eq!(status, Some(1));
    assert!(err.contains("timed out waiting for"), "{err}");
    assert!(siwd.stop().success());
}
