//! A deliberately small pool of packet buffers and peers that make the daemon hold all of them:
//! packets without a buffer are dropped and retransmitted, other connections continue, and all
//! buffers come back.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::common::attacker::{Counters, IP, MAC};
use crate::common::net::{Netns, lacks_network, missing_program};
use crate::common::raw::{RawTcp, Wire};
use crate::common::stream::*;
use crate::common::*;
use nix::sys::socket::{setsockopt, sockopt};
use siw::{CmChannel, CmEvent, CmListener, ListenOptions, SendData, SendWr, WcStatus};

const PORT: u16 = 7174;
const BUFFERS: u64 = 512;

fn lacks() -> Option<String> {
    lacks_network().or_else(|| missing_program("ethtool"))
}

/// Starts a daemon with a device on the link and an internal pair of devices, all with one pool.
fn siwd(ns: &Netns) -> Daemon {
    let config = format!(
        r#"
[workers]
idle = "adaptive"
[dpdk]
hugepages = "never"
buffers = {BUFFERS}
[[device]]
name = "siw0"
devargs = "net_af_packet0,iface=veth0"
mac = "02:00:00:77:00:01"
addresses = ["{IP}/24"]
mtu = 1500
[[device]]
name = "siw1"
pair = "lo"
addresses = ["10.78.0.1/24"]
[[device]]
name = "siw2"
pair = "lo"
addresses = ["10.78.0.2/24"]
"#
    );
    ns.siwd(&config, &[])
}

fn free(daemon: &Daemon) -> u64 {
    Counters::of(daemon).get("buffers_free")
}

fn wait_free(daemon: &Daemon, least: u64) {
    let end = Instant::now() + PATIENCE;
    while free(daemon) < least {
        assert!(Instant::now() < end, "{} of {least} buffers", free(daemon));
    }
}

/// Performs one WRITE between the two inner devices; the data is compared.
fn write(a: &End, b: &End, n: u64) {
    let len = a.mr.len();
    a.fill(n);
    let sge = [a.mr.sge(0, len)];
    let wr = SendWr::write(n, SendData::Sges(&sge), b.mr.addr(), b.mr.rkey());
    a.qp.post_send(&[wr]).unwrap();
    assert_eq!((a.wc().status, n), (WcStatus::SUCCESS, n));
    assert!(b.read(0, len) == a.read(0, len));
}

fn inner_pair(daemon: &Daemon) -> (End, End) {
    pair_on(daemon, 200_000, "siw1", "10.78.0.2:0")
}

#[test]
fn what_is_held_out_of_order_is_bounded_and_others_go_on() {
    skip_if!(lacks());
    let ns = Netns::new();
    ns.veth(1500);
    let d = siwd(&ns);
    let cm = CmChannel::new(&d.context()).unwrap();
    let to: SocketAddr = format!("{IP}:{PORT}").parse().unwrap();
    let opt = ListenOptions {
        backlog: 64,
        request_timeout: Some(2 * PATIENCE),
        ..Default::default()
    };
    let _listener = CmListener::new_with_options(&cm, to, &opt).unwrap();
    let (a, b) = inner_pair(&d);
    write(&a, &b, 1);
    let before = free(&d);
    let request = crate::common::peer::request(crate::common::peer::C, 1, &pattern(4, 300));
    let SocketAddr::V4(to) = to else {
        unreachable!()
    };
    // Each peer sends every other byte, the first byte last.
    let mut peers: Vec<_> = (0..8)
        .map(|i| {
            let ip = Ipv4Addr::new(10, 77, 0, 10 + i);
            let mut p = RawTcp::connect(Wire::open(&ns, "veth1", ip), MAC, to);
            for at in (1..request.len()).step_by(2) {
                p.send_ahead(at, &request[at..at + 1]);
            }
            // An answer shows that the daemon has processed everything before it.
            p.segment();
            p
        })
        .collect();
    let end = Instant::now() + PATIENCE;
    while Counters::of(&d).get("TcpExtTCPRcvQDrop") == 0 {
        assert!(Instant::now() < end, "nothing was dropped");
    }
    let held = before - free(&d);
    println!("{held} of {before} buffers are held");
    assert!((100..BUFFERS * 3 / 4).contains(&held), "{held} are held");
    for n in 2..10 {
        write(&a, &b, n);
    }
    // The peers fill their holes, one after the other.
    for p in &mut peers {
        p.send(&request);
        match cm.get_event(Some(PATIENCE)).unwrap() {
            CmEvent::ConnectRequest(r) => {
                assert_eq!(r.connection_info().private_data, pattern(4, 300));
                r.reject(b"").unwrap();
            }
            other => panic!("{other:?}"),
        }
    }
    wait_free(&d, before);
    write(&a, &b, 99);
    drop((peers, a, b));
    assert!(d.stop().success());
}

#[test]
fn more_connections_than_buffers_each_with_half_a_word_only_delay_the_others() {
    skip_if!(lacks());
    let ns = Netns::new();
    ns.veth(1500);
    ns.address("veth1", "10.77.0.2/24");
    let d = siwd(&ns);
    let cm = CmChannel::new(&d.context()).unwrap();
    let to: SocketAddr = format!("{IP}:{PORT}").parse().unwrap();
    let patience = Duration::from_secs(5);
    let opt = ListenOptions {
        backlog: 64,
        request_timeout: Some(patience),
        ..Default::default()
    };
    let _listener = CmListener::new_with_options(&cm, to, &opt).unwrap();
    let (a, b) = inner_pair(&d);
    write(&a, &b, 1);
    let before = free(&d);
    // Each sends one byte of a request, which stays unread until the rest arrives.
    let begin = Instant::now();
    let mut half = Vec::new();
    while half.len() < BUFFERS as usize + 100 {
        match ns.run(|| TcpStream::connect_timeout(&to, Duration::from_millis(400))) {
            Ok(mut s) => match s.write_all(b"M") {
                Ok(()) => half.push(s),
                Err(_) => break,
            },
            // A timeout means that the pool is exhausted, unless the machine is just busy.
            Err(_) if free(&d) < before / 2 => break,
            Err(error) => assert!(begin.elapsed() < PATIENCE, "{error}"),
        }
    }
    let left = free(&d);
    println!(
        "{} connections in {:?}, {left} of {before} buffers left",
        half.len(),
        begin.elapsed()
    );
    assert!(left < before / 2, "{left} of {before}");
    // The remaining buffers suffice for the transfers of others, at the latest after the requests
    // timed out.
    for n in 2..10 {
        write(&a, &b, n);
    }
    wait_free(&d, before);
    for mut s in half {
        // Reset or closed. One of hundreds of resets may find no buffer; the connection then
        // answers the next segment with a reset.
        s.set_read_timeout(Some(Duration::from_millis(200)))
            .unwrap();
        let waits = |r: &std::io::Result<usize>| matches!(r, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock);
        let mut last = s.read(&mut [0]);
        if waits(&last) {
            let _ = s.write(b"P");
            patient(&s);
            last = s.read(&mut [0]);
        }
        assert!(!matches!(last, Ok(1)) && !waits(&last), "{last:?}");
    }
    // New connections are served again.
    let mut s = ns.run(|| TcpStream::connect(to).unwrap());
    patient(&s);
    s.write_all(&crate::common::peer::request(
        crate::common::peer::C,
        1,
        b"late",
    ))
    .unwrap();
    match cm.get_event(Some(PATIENCE)).unwrap() {
        CmEvent::ConnectRequest(r) => assert_eq!(r.connection_info().private_data, b"late"),
        other => panic!("{other:?}"),
    }
    write(&a, &b, 99);
    drop((a, b));
    assert!(d.stop().success());
}

#[test]
fn readers_that_stop_leave_room_for_one_that_reads_and_lose_nothing() {
    skip_if!(lacks());
    const SLOW: usize = 8;
    const BYTES: u64 = 1 << 20;
    let ns = network(1500);
    let e = Endpoint::start(
        &ns,
        &format!("--listen echo:2000 --buffers {BUFFERS} --window 256KiB"),
    );
    let sockets: Vec<_> = (0..SLOW)
        .map(|_| {
            let s = dial(&ns, OURS, 2000).unwrap();
            setsockopt(&s, sockopt::RcvBuf, &(16 << 10)).unwrap();
            s
        })
        .collect();
    std::thread::scope(|t| {
        for s in &sockets {
            // The echo blocks: data written stays with the endpoint.
            t.spawn(|| {
                write_pattern(s, BYTES);
                s.shutdown(Shutdown::Write).unwrap();
            });
        }
        // A client that reads gets all of its data, although the others hold buffers.
        let s = dial(&ns, OURS, 2000).unwrap();
        std::thread::scope(|u| {
            u.spawn(|| {
                write_pattern(&s, BYTES);
                s.shutdown(Shutdown::Write).unwrap();
            });
            read_pattern(&s, BYTES);
        });
        for s in &sockets {
            t.spawn(|| read_pattern(s, BYTES));
        }
    });
    drop(sockets);
    let o = e.stop();
    println!("{}", o.result);
    let n = SLOW as u64 + 1;
    assert_eq!((o.count("closed"), o.count("bytes_in")), (n, n * BYTES));
    assert!(o.tcp("rcv_q_drop") > 0, "they held all that they may");
    assert!(o.count("buffers_least_free") < BUFFERS / 2);
    assert_eq!(o.count("buffers_free"), o.count("buffers"));
}
