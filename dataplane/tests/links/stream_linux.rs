//! Our TCP against the kernel's, over interfaces that each test creates: `siw-stream` on one side,
//! plain sockets on the other.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::Duration;

use nix::sys::socket::{setsockopt, sockopt};

use crate::common::net::{Netns, lacks_network, missing_program};
use crate::common::stream::*;

const MIB: u64 = 1 << 20;

fn lacks() -> Option<String> {
    lacks_network().or_else(|| missing_program("ethtool"))
}

/// Linux connects and sends; Linux connects and reads; then both at once.
fn bulk(ns: &Netns, endpoint: Endpoint, ip: &str, bytes: u64) {
    let to = dial(ns, ip, 2000).unwrap();
    write_pattern(&to, bytes);
    to.shutdown(Shutdown::Write).unwrap();
    assert_eq!(
        (&to).read(&mut [0]).unwrap(),
        0,
        "it closes after it has read"
    );
    let from = dial(ns, ip, 2001).unwrap();
    read_pattern(&from, bytes);
    drop(from);
    let both = dial(ns, ip, 2002).unwrap();
    std::thread::scope(|s| {
        s.spawn(|| {
            write_pattern(&both, bytes);
            both.shutdown(Shutdown::Write).unwrap();
        });
        read_pattern(&both, bytes);
    });
    drop(both);
    let o = endpoint.stop();
    assert!(o.success);
    assert_eq!((o.count("accepted"), o.count("closed")), (3, 3));
    assert_eq!(o.count("bytes_checked"), 2 * bytes);
    assert_eq!(o.count("bytes_out"), 2 * bytes);
    assert_eq!(o.count("bad_streams"), 0);
    assert_eq!(o.tcp("csum_errors"), 0);
}

fn offers(bytes: u64) -> String {
    format!("--listen check:2000 --listen source:2001 --listen exchange:2002 --bytes {bytes}")
}

#[test]
fn linux_sends_and_reads_bulk_streams_without_a_wrong_byte() {
    skip_if!(lacks());
    let (ns, bytes) = (network(1500), 24 * MIB + 7);
    let e = Endpoint::start(&ns, &offers(bytes));
    bulk(&ns, e, OURS, bytes);
}

#[test]
fn bulk_streams_pass_over_ipv6() {
    skip_if!(lacks());
    let (ns, bytes) = (network(1500), 8 * MIB + 5);
    let e = Endpoint::start(&ns, &offers(bytes));
    bulk(&ns, e, OURS6, bytes);
}

#[test]
fn bulk_streams_pass_in_jumbo_frames() {
    skip_if!(lacks());
    let (ns, bytes) = (network(9000), 24 * MIB + 3);
    let e = Endpoint::start(&ns, &format!("--mtu 9000 {}", offers(bytes)));
    bulk(&ns, e, OURS, bytes);
}

#[test]
fn bulk_streams_pass_through_a_tap() {
    skip_if!(lacks());
    let (ns, bytes) = (Netns::new(), 8 * MIB + 1);
    let e = Endpoint::on(&ns, "net_tap0,iface=siwtap0", &offers(bytes));
    ns.address("siwtap0", "10.77.0.2/24");
    ns.ip("link set siwtap0 up");
    bulk(&ns, e, OURS, bytes);
}

#[test]
fn we_connect_to_linux_and_exchange_streams() {
    skip_if!(lacks());
    for (mtu, ip, bytes) in [
        (1500, LINUX, 8 * MIB + 1),
        (1500, LINUX6, 2 * MIB + 3),
        (9000, LINUX, 8 * MIB + 5),
        (9000, LINUX6, 2 * MIB + 7),
    ] {
        let ns = network(mtu);
        let listener = ns.run(|| TcpListener::bind((ip, 0)).unwrap());
        let to = listener.local_addr().unwrap();
        let e = Endpoint::start(
            &ns,
            &format!("--mtu {mtu} --connect {to} --role exchange --bytes {bytes}"),
        );
        let (s, _) = listener.accept().unwrap();
        patient(&s);
        std::thread::scope(|t| {
            t.spawn(|| {
                write_pattern(&s, bytes);
                s.shutdown(Shutdown::Write).unwrap();
            });
            read_pattern(&s, bytes);
        });
        let o = e.wait();
        assert!(o.success);
        assert_eq!((o.count("connected"), o.count("closed")), (1, 1));
        assert_eq!(
            (o.count("bytes_checked"), o.count("bytes_out")),
            (bytes, bytes)
        );
    }
}

#[test]
fn linux_closes_one_direction_and_still_reads_everything_from_the_other() {
    skip_if!(lacks());
    let ns = network(1500);
    let e = Endpoint::start(&ns, "--listen echo:2000");
    let bytes = 4 * MIB + 9;
    let s = dial(&ns, OURS, 2000).unwrap();
    std::thread::scope(|t| {
        t.spawn(|| {
            write_pattern(&s, bytes);
            s.shutdown(Shutdown::Write).unwrap();
        });
        read_pattern(&s, bytes);
    });
    let o = e.stop();
    assert_eq!((o.count("closed"), o.count("bytes_in")), (1, bytes));
}

#[test]
fn we_close_one_direction_and_still_read_everything_from_the_other() {
    skip_if!(lacks());
    let ns = network(1500);
    let e = Endpoint::start(&ns, "--listen exchange:2000 --bytes 3000001");
    let s = dial(&ns, OURS, 2000).unwrap();
    // Linux reads to our FIN before it sends a byte.
    read_pattern(&s, 3_000_001);
    write_pattern(&s, 3_000_001);
    drop(s);
    let o = e.stop();
    assert!(o.success);
    assert_eq!(
        (o.count("closed"), o.count("bytes_checked")),
        (1, 3_000_001)
    );
}

#[test]
fn whoever_connected_each_side_may_close_its_direction_first() {
    skip_if!(lacks());
    let (ns, bytes) = (network(1500), 1_000_003);
    for ours_first in [true, false] {
        let listener = ns.run(|| TcpListener::bind((LINUX, 0)).unwrap());
        let to = listener.local_addr().unwrap();
        let args = format!("--connect {to} --role exchange --bytes {bytes}");
        let e = Endpoint::start(&ns, &args);
        let (s, _) = listener.accept().unwrap();
        patient(&s);
        let write = || {
            write_pattern(&s, bytes);
            s.shutdown(Shutdown::Write).unwrap();
        };
        if ours_first {
            read_pattern(&s, bytes);
            write();
        } else {
            // Linux writes first; the receive windows hold data that is not read yet.
            write();
            read_pattern(&s, bytes);
        }
        drop(s);
        let o = e.wait();
        assert!(o.success);
        assert_eq!((o.count("closed"), o.count("bytes_checked")), (1, bytes));
    }
}

#[test]
fn a_reset_ends_the_connection_on_the_other_side_whoever_sends_it() {
    skip_if!(lacks());
    let ns = network(1500);
    let e = Endpoint::start(&ns, "--listen echo:2000 --listen reset:2001");
    let mut s = dial(&ns, OURS, 2000).unwrap();
    s.write_all(b"x").unwrap();
    s.read_exact(&mut [0]).unwrap();
    let hard = nix::libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    setsockopt(&s, sockopt::Linger, &hard).unwrap();
    drop(s);
    let mut s = dial(&ns, OURS, 2001).unwrap();
    s.write_all(b"x").unwrap();
    let error = s.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    let o = e.stop();
    assert_eq!((o.count("reset_by_peer"), o.count("aborted")), (1, 1));
    assert_eq!(o.tcp("in_rsts"), 1);
}

#[test]
fn nobody_at_a_port_is_told_at_once_to_either_side() {
    skip_if!(lacks());
    let ns = network(1500);
    for (ours, linux) in [(OURS, LINUX), (OURS6, LINUX6)] {
        let e = Endpoint::start(&ns, "--listen echo:2000");
        let error = dial(&ns, ours, 2001).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        assert_eq!(e.stop().tcp("out_rsts"), 1);

        // Bound, but not listening.
        let free = ns.run(|| TcpListener::bind((linux, 0)).unwrap().local_addr().unwrap());
        let o = Endpoint::start(&ns, &format!("--connect {free} --role echo")).wait();
        assert!(!o.success, "a connect that fails is the program's failure");
        assert_eq!(o.count("refused"), 1);
    }
}

/// Waits until the kernel's receive queue has not grown for 2 s, which is enough for window probes
/// even after an unusually long round trip.
fn wait_until_full(s: &TcpStream) {
    let mut peeked = vec![0; 8 << 20];
    let (mut last, mut since) = (0, std::time::Instant::now());
    while since.elapsed() < Duration::from_secs(2) {
        let n = s.peek(&mut peeked).unwrap();
        if n != last {
            (last, since) = (n, std::time::Instant::now());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(last > 0);
}

/// Connects a socket of the kernel with a receive buffer that has its size from the beginning: if it
/// shrinks later, the kernel drops segments in a window that it has announced.
fn connect_with_buffer(size: usize) -> TcpStream {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, connect, socket};
    let s = socket(
        AddressFamily::Inet,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC,
        None,
    )
    .unwrap();
    setsockopt(&s, sockopt::RcvBuf, &size).unwrap();
    let to = std::net::SocketAddrV4::new(OURS.parse().unwrap(), 2000);
    connect(std::os::fd::AsRawFd::as_raw_fd(&s), &SockaddrIn::from(to)).unwrap();
    s.into()
}

#[test]
fn a_shut_window_of_linux_is_probed_and_the_stream_goes_on_when_it_opens() {
    skip_if!(lacks());
    let (ns, bytes) = (network(1500), 8 * MIB);
    let e = Endpoint::start(&ns, &format!("--listen source:2000 --bytes {bytes}"));
    let s = ns.run(|| connect_with_buffer(64 << 10));
    patient(&s);
    wait_until_full(&s);
    read_pattern(&s, bytes);
    drop(s);
    let o = e.stop();
    assert_eq!((o.count("closed"), o.count("bytes_out")), (1, bytes));
    assert!(o.tcp("zero_window_probes") > 0, "{}", o.result);
}

#[test]
fn linux_waits_while_our_window_is_shut_and_loses_nothing() {
    skip_if!(lacks());
    let (ns, bytes) = (network(1500), 8 * MIB);
    let e = Endpoint::start(
        &ns,
        &format!("--listen check:2000 --bytes {bytes} --window 128KiB --pause 1000"),
    );
    // The pause begins with the connection.
    let begin = std::time::Instant::now();
    let s = dial(&ns, OURS, 2000).unwrap();
    write_pattern(&s, bytes);
    assert!(
        begin.elapsed() > Duration::from_millis(900),
        "the kernel's buffer takes less than this stream"
    );
    s.shutdown(Shutdown::Write).unwrap();
    assert_eq!((&s).read(&mut [0]).unwrap(), 0);
    let o = e.stop();
    assert_eq!((o.count("closed"), o.count("bytes_checked")), (1, bytes));
    // The kernel's probes carry no data or old data.
    assert_eq!(o.count("bad_streams"), 0);
}

#[test]
fn a_thousand_connections_of_linux_are_served_at_once() {
    skip_if!(lacks());
    let ns = network(1500);
    let e = Endpoint::start(&ns, "--listen exchange:2000 --bytes 20000");
    let sockets: Vec<_> = ns.run(|| {
        (0..1000)
            .map(|_| TcpStream::connect((OURS, 2000)).unwrap())
            .collect()
    });
    for s in &sockets {
        patient(s);
        write_pattern(s, 20_000);
        s.shutdown(Shutdown::Write).unwrap();
    }
    sockets.iter().for_each(|s| read_pattern(s, 20_000));
    drop(sockets);
    let o = e.stop();
    assert!(o.success);
    assert_eq!((o.count("accepted"), o.count("closed")), (1000, 1000));
    assert_eq!(o.count("bytes_checked"), 1000 * 20_000);
}

#[test]
fn a_thousand_connections_to_linux_are_opened_at_once() {
    skip_if!(lacks());
    let ns = network(1500);
    let listener = ns.run(|| {
        let l = TcpListener::bind((LINUX, 0)).unwrap();
        // The kernel limits this backlog.
        nix::sys::socket::listen(&l, nix::sys::socket::Backlog::new(4096).unwrap()).unwrap();
        l
    });
    let to = listener.local_addr().unwrap();
    let e = Endpoint::start(
        &ns,
        &format!("--connect {to} --role exchange --count 1000 --bytes 20000"),
    );
    let sockets: Vec<_> = (0..1000).map(|_| listener.accept().unwrap().0).collect();
    for s in &sockets {
        patient(s);
        write_pattern(s, 20_000);
        s.shutdown(Shutdown::Write).unwrap();
    }
    sockets.iter().for_each(|s| read_pattern(s, 20_000));
    let o = e.wait();
    assert!(o.success);
    assert_eq!((o.count("connected"), o.count("closed")), (1000, 1000));
    assert_eq!(o.count("bytes_checked"), 1000 * 20_000);
}
