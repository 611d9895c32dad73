//! The Linux kernel's iWARP (siw), in a guest, with librdmacm's rping as the application: an
//! independent implementation as the peer.

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::common::guest::{Evidence, GUEST_PATIENCE, Guest, Running, lacks_guest};
use crate::common::net::{Netns, judge, missing_program, siw_ping, tshark_fields};
use crate::common::*;

const MAC: &str = "02:00:00:77:00:01";
const PINGS: usize = 4;
/// rping's default size, more than a segment, and rping's maximum: siw sends the latter by its
/// zero-copy path, with FPDUs that are not aligned to segments.
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
mac = "{MAC}"
addresses = ["10.77.0.1/24", "fd77::1/64"]
[device.mpa]
crc = "{crc}"
wake_silent_peer_ms = 50
# The guest may pause for a while.
request_timeout_ms = 60000
reply_timeout_ms = 60000
"#
    )
}

fn boot(ns: &Netns) -> Guest {
    Guest::boot(
        ns,
        &[
            "--ip",
            "10.77.0.2/24",
            "--ip6",
            "fd77::2/64",
            "--crc",
            "off",
        ],
    )
}

fn capture(ns: &Netns, crc: &str) -> (Daemon, PathBuf, Evidence) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("siw.pcapng");
    let siwd = ns.siwd(&config(crc), &["--capture", file.to_str().unwrap()]);
    (siwd, file, Evidence(dir))
}

/// The data of rping's ping number `n`.
fn ping_text(n: usize, size: usize) -> String {
    let mut s = format!("rdma-ping-{n}: ");
    let letters = (0..).map(|i| char::from(b'A' + ((n + i) % 58) as u8));
    s.extend(letters.take(size - s.len() - 1));
    s
}

/// Checks that every ping was printed in order with exactly its data.
fn assert_pings(out: &str, prefix: &str, size: usize, who: &str) {
    let lines: Vec<&str> = out.lines().filter_map(|l| l.strip_prefix(prefix)).collect();
    assert_eq!(
        lines.len(),
        PINGS,
        "{who}: {} pings of {size} bytes",
        lines.len()
    );
    for (n, line) in lines.iter().enumerate() {
        assert!(
            *line == ping_text(n, size),
            "{who}: data of ping {n} of {size} bytes is wrong"
        );
    }
}

/// A `siw-ping` whose output is read continuously, so that it never blocks.
struct Ping {
    child: Child,
    out: mpsc::Receiver<String>,
    err: mpsc::Receiver<String>,
}

impl Ping {
    fn start(daemon: &Daemon, args: &str) -> Ping {
        let mut c = siw_ping(daemon, args);
        c.stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = c.spawn().unwrap();
        let out = lines(child.stdout.take().unwrap());
        let err = lines(child.stderr.take().unwrap());
        Ping { child, out, err }
    }

    /// Starts a server and waits until it listens.
    fn server(daemon: &Daemon, args: &str) -> Ping {
        let ping = Ping::start(daemon, args);
        let line = ping.err.recv_timeout(GUEST_PATIENCE).unwrap();
        assert!(line.contains("listening"), "siw-ping {args}: {line}");
        ping
    }

    /// Waits for the first line of output, which must begin with `with`.
    fn begins(&self, with: &str) {
        let line = self.out.recv_timeout(GUEST_PATIENCE).unwrap();
        assert!(line.starts_with(with), "{line}");
    }

    /// Waits for its end; returns status, standard output, standard error.
    fn wait(mut self) -> (Option<i32>, String, String) {
        let end = Instant::now() + GUEST_PATIENCE;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < end, "siw-ping hangs");
            std::thread::sleep(Duration::from_millis(5));
        };
        (
            status.code(),
            self.out.iter().collect(),
            self.err.iter().collect(),
        )
    }
}

fn lines(from: impl Read + Send + 'static) -> mpsc::Receiver<String> {
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            let _ = tell.send(line + "\n");
        }
    });
    told
}

impl Drop for Ping {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn rping_connects(siwd: &Daemon, guest: &Guest, addr: &str, size: usize, who: &str) {
    let server = Ping::server(siwd, &format!("-s -a {addr} -v"));
    let done = guest
        .start(&format!(
            "rping -c -a {addr} -p 7174 -C {PINGS} -S {size} -v -V"
        ))
        .wait(GUEST_PATIENCE);
    assert_eq!(done.status, Some(0), "{who}: {}", done.err);
    assert_pings(&done.out, "ping data: ", size, &format!("{who}, rping"));
    let (status, out, err) = server.wait();
    assert_eq!((status, &err[..]), (Some(0), ""), "{who}");
    assert_pings(
        &out,
        "server ping data: ",
        size,
        &format!("{who}, siw-ping"),
    );
}

/// Starts a `siw-ping` client with rping's server in the guest and waits for the first ping.
fn first_ping(siwd: &Daemon, guest: &Guest, rping: &str, args: &str) -> (Running, Ping, String) {
    let server = guest.start(rping);
    guest.run("wait-listen 7174");
    let ping = Ping::start(siwd, &format!("-c {args} -v"));
    let first = ping.out.recv_timeout(GUEST_PATIENCE).unwrap();
    (server, ping, first)
}

fn siw_ping_connects(siwd: &Daemon, guest: &Guest, addr: &str, size: usize, who: &str) {
    let rping = format!("rping -s -a {addr} -p 7174 -C {PINGS} -S {size} -v");
    let args = format!("-a {addr} -C {PINGS} -S {size} -V");
    let (server, ping, first) = first_ping(siwd, guest, &rping, &args);
    let (status, out, err) = ping.wait();
    assert_eq!((status, &err[..]), (Some(0), ""), "{who}");
    assert_pings(
        &(first + &out),
        "ping data: ",
        size,
        &format!("{who}, siw-ping"),
    );
    let done = server.wait(GUEST_PATIENCE);
    // All pings are checked below. After an orderly end rping's server may still return -1: its
    // event thread may find the channel closed by the main thread, or the main thread may see that
    // the wait for pings ended.
    let after_the_end = [
        "server DISCONNECT EVENT...",
        "wait for RDMA_READ_ADV state 10",
        "rdma_get_cm_event: Bad file descriptor",
    ];
    let left = done.err.starts_with(after_the_end[0])
        && done.err.lines().all(|line| after_the_end.contains(&line));
    assert!(
        done.status == Some(0) || (done.status == Some(255) && left),
        "{who}: {done:?}"
    );
    assert_pings(
        &done.out,
        "server ping data: ",
        size,
        &format!("{who}, rping"),
    );
}

#[test]
fn rping_and_siw_ping_understand_each_other_both_ways_with_and_without_crc_over_ipv4_and_ipv6() {
    skip_if!(lacks_guest().or_else(|| missing_program("tshark")));
    let ns = Netns::new();
    let guest = boot(&ns);
    // CRC requested by neither side, by siwd, by the guest.
    for (ours, theirs) in [("off", 0), ("on", 0), ("off", 1)] {
        guest.run(&format!(
            "echo {theirs} >/sys/module/siw/parameters/mpa_crc_required"
        ));
        let (siwd, file, _dir) = capture(&ns, ours);
        for (us, them) in [("10.77.0.1", "10.77.0.2"), ("fd77::1", "fd77::2")] {
            for size in SIZES {
                let who = format!("CRC {ours}/{theirs}, {us}, {size}");
                rping_connects(&siwd, &guest, us, size, &who);
                siw_ping_connects(&siwd, &guest, them, size, &who);
            }
        }
        assert!(siwd.stop().success());
        let verdict = judge(&file);
        let replies = tshark_fields(&file, "iwarp_mpa.rep", &["eth.src", "iwarp_mpa.crc_flag"]);
        let count = |ours| replies.iter().filter(|r| (r[0] == MAC) == ours).count();
        assert!(count(true) > 0 && count(false) > 0, "{replies:?}");
        // Selected by bytes, since tshark may not recognize each connection as MPA.
        let filter = "frame contains \"MPA ID Rep Frame\"";
        let mut streams = tshark_fields(&file, filter, &["eth.src", "tcp.stream"]);
        streams.sort();
        streams.dedup();
        let of = |ours| streams.iter().filter(|r| (r[0] == MAC) == ours).count();
        assert_eq!(
            of(true),
            2 * SIZES.len(),
            "connections that siwd answered, {replies:?}"
        );
        assert!(
            of(false) >= 2 * SIZES.len(),
            "connections that siw answered, {replies:?}"
        );
        if replies.len() < streams.len() {
            println!(
                "tshark took {} of {} replies for MPA",
                replies.len(),
                streams.len()
            );
        }
        for r in &replies {
            // siw as the responder does not ask for CRC, regardless of its own setting.
            let crc = ours == "on" || (theirs == 1 && r[0] == MAC);
            assert_eq!(
                r[1],
                if crc { "1" } else { "0" },
                "CRC {ours}/{theirs}: {replies:?}"
            );
        }
        // Each ping has at least a READ with its response, a WRITE and four SENDs.
        let with_crc = replies.iter().filter(|r| r[1] == "1").count();
        let pings = with_crc.min(4 * SIZES.len()) * PINGS;
        assert!(
            verdict.good_crcs >= pings * 7,
            "{} good CRCs",
            verdict.good_crcs
        );
        assert_eq!(verdict.good_crcs > 0, with_crc > 0);
    }
}

#[test]
fn connections_that_cannot_be_and_peers_that_vanish_are_clear_errors() {
    skip_if!(lacks_guest());
    let ns = Netns::new();
    let mut guest = boot(&ns);
    let siwd = ns.siwd(&config("on"), &[]);

    // No listener at either end. (rping reports the error and then waits for ever.)
    let done = guest
        .start("rping -c -a 10.77.0.1 -p 7999 -C 1")
        .wait(Duration::from_secs(15));
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
    server.begins("server ping data: rdma-ping-0");
    client.kill();
    // A server ignores an orderly end between two pings. An end within a ping is an error whose
    // text depends on the step: a READ refused, a request flushed, a connection broken.
    let (status, _, err) = server.wait();
    assert!(
        status == Some(0) || (status == Some(1) && err.starts_with("siw-ping: ")),
        "{status:?} {err}"
    );

    // The guest's server is killed.
    let rping = "rping -s -a 10.77.0.2 -p 7174";
    let (server, ping, _) = first_ping(&siwd, &guest, rping, "-a 10.77.0.2");
    server.kill();
    let (status, _, err) = ping.wait();
    assert_eq!(status, Some(1));
    assert!(
        err.contains("closed the connection early") || err.contains("broke"),
        "{err}"
    );

    // The whole machine vanishes silently.
    let (_server, ping, _) = first_ping(&siwd, &guest, rping, "-a 10.77.0.2");
    guest.kill();
    let (status, _, err) = ping.wait();
    assert_eq!(status, Some(1));
    assert!(
        err.contains("timed out waiting for") || err.contains("stopped answering"),
        "{err}"
    );
    assert!(siwd.stop().success());
}
