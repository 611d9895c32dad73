//! Bulk transfers during a flood of all kinds of hostile frames, mixed by a seed, from another host
//! on the link: no byte lost or altered, no connection ended, no memory leaked.
//!
//! The flood lasts 3 seconds; `SIW_FLOOD_SECONDS=30 cargo test --release -p siwd --test
//! hostile_flood -- --test-threads 1` runs the long one, `SIW_SEED=N` another mix.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::attacker::{Attacker, Counters};
use crate::common::flood::{KINDS, Mixer, Sent, Stream, Victim, flood};
use crate::common::net::{Netns, lacks_network, missing_program};
use crate::common::stream::*;
use crate::common::*;
use siw::{CmListener, RecvWr, SendData, SendWr, WcStatus};
use siw_stream::StreamPattern;
use siw_tcp_sim::forge::Ends;

fn lacks() -> Option<String> {
    lacks_network().or_else(|| missing_program("ethtool"))
}

fn number(name: &str, default: u64) -> u64 {
    let n = std::env::var(name).ok().and_then(|s| s.parse().ok());
    let n = n.unwrap_or(default);
    println!("{name}={n}");
    n
}

fn flood_time() -> Duration {
    Duration::from_secs(number("SIW_FLOOD_SECONDS", 3))
}

fn word(f: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(f[at..at + 4].try_into().unwrap())
}

/// Describes the connection opened by this SYN; `stream` holds its answer and the count of echoed
/// bytes.
fn victim(syn: &[u8], stream: Option<(&[u8], Arc<AtomicU64>)>) -> Victim {
    let port = |at: usize| u16::from_be_bytes([syn[at], syn[at + 1]]);
    let ip = |at: usize| <[u8; 4]>::try_from(&syn[at..at + 4]).unwrap().into();
    let ends = Ends {
        mac: [syn[6..12].try_into().unwrap(), syn[..6].try_into().unwrap()],
        ip: [ip(26), ip(30)],
    };
    let timestamp = syn[54..].windows(2).position(|w| w == [8, 10]);
    Victim {
        ends,
        ip6: OURS6.parse().unwrap(),
        ports: [port(34), port(36)],
        listening: port(36),
        stream: stream.map(|(answer, echoed)| Stream {
            first: [word(syn, 38), word(answer, 38)],
            timestamp: word(syn, 54 + timestamp.expect("timestamps") + 2),
            echoed,
        }),
    }
}

/// Resident memory of a process in KiB.
fn resident(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Checks that hold for the counters of any flood: each kind is counted, no counter exceeds the
/// number of frames sent, and answers respect their rate limits. `n` returns a counter by its MIB
/// name.
fn judge(n: impl Fn(&str) -> u64, sent: &Sent, time: Duration) {
    let of = |kind: &str| sent[KINDS.iter().position(|k| *k == kind).unwrap()];
    let seconds = time.as_secs() + 2;
    for (name, most) in [
        ("IpReasmReqds", of("fragment")),
        ("IpInAddrErrors", of("martian")),
        ("IpInUnknownProtos", of("unknown protocol")),
        ("SiwNoPorts", of("SYN to a closed port")),
        ("TcpExtSyncookiesSent", of("SYN to a listener")),
        ("SiwBadOptions", of("garbage in options")),
    ] {
        // A broken frame may look like any other kind.
        let most = most + of("broken frame") + of("odd flags of no connection");
        assert!(
            (1..=most).contains(&n(name)),
            "{name}: {} of {most}",
            n(name)
        );
    }
    for name in [
        "SiwNoConnection",
        "SiwOutOfWindow",
        "ArpIn",
        "NdpIn",
        "IcmpInMsgs",
    ] {
        assert!(n(name) > 0, "{name}");
    }
    assert!(n("TcpInErrs") > 0 && n("TcpInCsumErrors") > 0);
    for (name, rate) in [
        ("TcpOutRsts", 1000),
        ("IcmpOutMsgs", 1000),
        ("TcpExtTCPChallengeACK", 1500),
    ] {
        assert!(n(name) <= rate * seconds, "{name}: {} in {time:?}", n(name));
    }
    // Each frame is counted once, or twice if one of the counts is an error.
    let first = n("TcpInSegs")
        + n("TcpInCsumErrors")
        + n("SiwOffloadedChecksums")
        + n("SiwOffloadedSegments")
        + n("IpReasmReqds")
        + n("IpInUnknownProtos")
        + n("IpInHdrErrors")
        + n("SiwOtherAddress")
        + n("ArpIn")
        + n("IcmpInMsgs");
    let errors = n("TcpInErrs") + n("IpInAddrErrors") + n("TcpInCsumErrors");
    let frames = n("SiwFramesIn");
    assert!(
        frames <= first + errors && first <= frames + errors,
        "{frames} frames, {first} and {errors}"
    );
}

fn told(sent: &Sent, rounds: u64, time: Duration) {
    let all: u64 = sent.iter().sum();
    println!("{all} hostile frames in {time:?}, {rounds} rounds");
    assert!(sent.iter().all(|n| *n > 0), "{sent:?}");
}

#[test]
fn a_stream_echoed_beside_a_flood_of_everything_loses_no_byte() {
    skip_if!(lacks());
    let (time, seed) = (flood_time(), number("SIW_SEED", 21));
    let ns = network(1500);
    let e = Endpoint::start(&ns, "--listen echo:2000 --backlog 64");
    let attacker = Attacker::on(&ns, "veth1");
    let s = dial(&ns, OURS, 2000).unwrap();
    let [syn, answer] = attacker.syns();
    let echoed = Arc::new(AtomicU64::new(0));
    let mut mixer = Mixer::new(seed, victim(&syn, Some((&answer, echoed.clone()))));
    let over = AtomicBool::new(false);
    let pattern = StreamPattern::new(SEED);
    let memory = resident(e.pid());
    let begin = Instant::now();
    let written = std::thread::scope(|t| {
        let writer = t.spawn(|| {
            let mut block = vec![0; 64 << 10];
            let mut at = 0;
            while !over.load(Ordering::Relaxed) {
                pattern.fill(at, &mut block);
                (&s).write_all(&block).unwrap();
                at += block.len() as u64;
            }
            s.shutdown(Shutdown::Write).unwrap();
            at
        });
        let reader = t.spawn(|| {
            let mut block = vec![0; 64 << 10];
            let mut at = 0;
            loop {
                let n = (&s).read(&mut block).unwrap();
                if n == 0 {
                    return at;
                }
                let right = pattern.matching(at, &block[..n]);
                assert_eq!(right, n, "a wrong byte after {at}");
                at += n as u64;
                echoed.store(at, Ordering::Relaxed);
            }
        });
        let seen = || echoed.load(Ordering::Relaxed);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            flood(&attacker, &mut mixer, time, seen, 256 << 10, &over)
        }));
        over.store(true, Ordering::Relaxed);
        let written = writer.join().unwrap();
        assert_eq!(reader.join().unwrap(), written, "the stream's length");
        match result {
            Ok(rounds) => told(&mixer.sent, rounds, begin.elapsed()),
            Err(panic) => std::panic::resume_unwind(panic),
        }
        written
    });
    drop(s);
    let grown = resident(e.pid()).saturating_sub(memory);
    let o = e.stop();
    // The rate limits apply until the counters are read, which a busy machine delays.
    let took = begin.elapsed();
    println!("{written} bytes, {grown} KiB more, {}", o.result);
    assert_eq!((o.count("accepted"), o.count("closed")), (1, 1));
    assert_eq!(o.count("bytes_in"), written);
    assert_eq!(o.count("bytes_out"), written);
    assert_eq!(o.tcp("estab_resets") + o.tcp("abort_on_timeout"), 0);
    assert_eq!(o.count("buffers_free"), o.count("buffers"));
    assert!(grown < 16 << 10, "{grown} KiB");
    assert!(o.tcp("bad_acks") > 0 && o.tcp("syn_challenges") > 0 && o.tcp("dup_bytes_in") > 0);
    judge(|name| o.mib(name), &mixer.sent, took);
}

/// Configuration of the device at this end of the link.
fn config(interface: &str, n: u8) -> String {
    format!(
        r#"
[workers]
idle = "adaptive"
[dpdk]
hugepages = "never"
buffers = 4096
[[device]]
name = "siw0"
devargs = "net_af_packet0,iface={interface}"
mac = "02:00:00:77:00:0{n}"
addresses = ["10.77.0.{n}/24", "fd77::{n}/64"]
mtu = 1500
"#
    )
}

#[test]
fn messages_between_two_daemons_beside_a_flood_of_everything_arrive_whole() {
    skip_if!(lacks());
    const SIZE: usize = 256 << 10;
    let (time, seed) = (flood_time(), number("SIW_SEED", 22));
    let ns = Netns::new();
    ns.veth(1500);
    ns.ip("link set veth1 arp off");
    let to = ns.siwd(&config("veth0", 1), &[]);
    let from = ns.siwd(&config("veth1", 2), &[]);
    let attacker = Attacker::on(&ns, "veth1");
    // Frames that siwd sends are captured at the receiving end.
    let listener = Attacker::on(&ns, "veth0");
    let (a, b) = (
        End::new(&from.context(), SIZE),
        End::new(&to.context(), SIZE),
    );
    connect(&a, &b, "siw0", "10.77.0.1:0".parse().unwrap());
    let [syn] = listener.syns();
    let mut victim = victim(&syn, None);
    let to_flood = CmListener::new(&b.cm, None, "10.77.0.1:0".parse().unwrap(), 8, 0).unwrap();
    victim.listening = to_flood.local_addr().port();
    let mut mixer = Mixer::new(seed, victim);
    let before = Counters::of(&to);
    let memory = resident(to.child.id());
    let (over, carried) = (AtomicBool::new(false), AtomicU64::new(0));
    let begin = Instant::now();
    let messages = std::thread::scope(|t| {
        let bulk = t.spawn(|| {
            let mut n = 0;
            while !over.load(Ordering::Relaxed) {
                n += 1;
                a.fill(seed + n);
                let sge = [b.mr.sge(0, 1)];
                let told = RecvWr {
                    wr_id: n,
                    sges: &sge,
                };
                b.qp.post_recv(&[told]).unwrap();
                let sge = [a.mr.sge(0, SIZE)];
                let write = SendWr::write(n, SendData::Sges(&sge), b.mr.addr(), b.mr.rkey());
                let tell = SendWr::send(n, SendData::Sges(&[]));
                a.qp.post_send(&[write, tell]).unwrap();
                for wc in [b.wc(), a.wc(), a.wc()] {
                    assert_eq!((wc.status, wc.wr_id), (WcStatus::SUCCESS, n));
                }
                assert!(b.read(0, SIZE) == a.read(0, SIZE), "message {n} differs");
                carried.store(n, Ordering::Relaxed);
            }
            n
        });
        let seen = || carried.load(Ordering::Relaxed);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            flood(&attacker, &mut mixer, time, seen, 1, &over)
        }));
        over.store(true, Ordering::Relaxed);
        let messages = bulk.join().unwrap();
        match result {
            Ok(rounds) => told(&mixer.sent, rounds, begin.elapsed()),
            Err(panic) => std::panic::resume_unwind(panic),
        }
        messages
    });
    let now = Counters::of(&to);
    // The rate limits apply until the counters are read, which a busy machine delays.
    let took = begin.elapsed();
    let grown = resident(to.child.id()).saturating_sub(memory);
    println!("{messages} messages, {grown} KiB more");
    judge(|name| now.since(&before, name), &mixer.sent, took);
    for name in ["TcpEstabResets", "TcpExtTCPAbortOnTimeout"] {
        assert_eq!(now.since(&before, name), 0, "{name}");
    }
    assert!(now.since(&before, "TcpExtTCPSYNChallenge") > 0);
    assert!(grown < 16 << 10, "{grown} KiB");
    // Buffers held because of the flood come back, and the pair still works.
    let end = Instant::now() + PATIENCE;
    while Counters::of(&to).get("buffers_free") < before.get("buffers_free") {
        assert!(Instant::now() < end, "buffers are held");
    }
    drop((to_flood, a, b));
    assert!(from.stop().success() && to.stop().success());
}
