//! Linux as the peer of a device with all configurable settings of addresses, routes, VLAN and TCP,
//! and with frames whose checksums are wrong.

use std::io::Read;
use std::net::{Ipv4Addr, Shutdown, TcpListener};

use crate::common::impaired_link::{ImpairedLink, Impairment};
use crate::common::net::{Netns, lacks_network, missing_program};
use crate::common::raw::{ACK, PSH, RawTcp, Wire};
use crate::common::stream::*;

fn lacks() -> Option<String> {
    lacks_network().or_else(|| missing_program("ethtool"))
}

/// Linux sends and reads at the same time.
fn exchange(ns: &Netns, ip: &str, bytes: u64) {
    let s = dial(ns, ip, 2000).unwrap();
    std::thread::scope(|t| {
        t.spawn(|| {
            write_pattern(&s, bytes);
            s.shutdown(Shutdown::Write).unwrap();
        });
        read_pattern(&s, bytes);
    });
}

#[test]
fn linux_exchanges_streams_inside_a_vlan() {
    skip_if!(lacks());
    let bytes = 1_000_001;
    let how = Impairment {
        vlan: Some(9),
        ..Impairment::default()
    };
    let link = ImpairedLink::new(1504, how);
    let ns = &link.ns;
    ns.ip("link set veth3 mtu 1500");
    let device = "addresses = [\"10.77.0.1/24\", \"fd77::1/64\"]\nvlan = 9";
    let offer = format!("--listen exchange:2000 --bytes {bytes}");
    let e = Endpoint::configured(ns, device, &offer);
    ns.wait_ping(OURS.parse().unwrap());
    ns.wait_ping(OURS6.parse().unwrap());
    exchange(ns, OURS, bytes);
    exchange(ns, OURS6, bytes);
    let o = e.stop();
    assert!(o.success);
    assert_eq!(
        (o.count("closed"), o.count("bytes_checked")),
        (2, 2 * bytes)
    );
    assert!(o.tcp("arp_in") > 0 && o.tcp("ndp_in") > 0 && o.tcp("icmp_out") > 1);
}

#[test]
fn every_address_of_a_device_serves_and_connects_from_where_its_peer_is() {
    skip_if!(lacks());
    let (ns, bytes) = (network(1500), 100_001);
    ns.address("veth1", "10.78.0.2/24");
    ns.address("veth1", "fd78::2/64");
    let device = "addresses = [\"10.77.0.1/24\", \"10.78.0.1/24\", \"10.77.0.9/24\", \
                  \"fd77::1/64\", \"fd78::1/64\"]";
    let offer = format!("--listen exchange:2000 --bytes {bytes}");
    let e = Endpoint::configured(&ns, device, &offer);
    let all = ["10.77.0.1", "10.78.0.1", "10.77.0.9", "fd77::1", "fd78::1"];
    for ip in all {
        exchange(&ns, ip, bytes);
    }
    let o = e.stop();
    assert_eq!((o.count("accepted"), o.count("closed")), (5, 5));
    assert_eq!(o.count("bytes_checked"), 5 * bytes);
    for (linux, more, from) in [
        ("10.78.0.2", "", "10.78.0.1"),
        ("fd78::2", "", "fd78::1"),
        ("10.77.0.2", "--source 10.77.0.9", "10.77.0.9"),
    ] {
        let listener = ns.run(|| TcpListener::bind((linux, 0)).unwrap());
        let to = listener.local_addr().unwrap();
        let connect = format!("--connect {to} --role source --bytes 1000 {more}");
        let e = Endpoint::configured(&ns, device, connect.trim_end());
        let (s, peer) = listener.accept().unwrap();
        assert_eq!(peer.ip().to_string(), from);
        read_pattern(&s, 1000);
        drop(s);
        assert!(e.wait().success);
    }
}

#[test]
fn streams_to_other_networks_take_the_route_with_the_longest_prefix() {
    skip_if!(lacks());
    let ns = network(1500);
    ns.address("veth1", "10.78.0.2/24");
    for far in ["192.0.2.7", "192.0.2.200", "198.51.100.1"] {
        ns.address("lo", &format!("{far}/32"));
    }
    ns.address("lo", "2001:db8::7/128");
    let device = "addresses = [\"10.77.0.1/24\", \"10.78.0.1/24\", \"fd77::1/64\"]\n\
                  gateway = \"10.78.0.2\"\n\
                  routes = [{ to = \"192.0.2.0/24\", via = \"10.77.0.2\" }, \
                  { to = \"192.0.2.128/25\", via = \"10.78.0.2\" }, \
                  { to = \"2001:db8::/32\", via = \"fd77::2\" }]";
    // The source address is the one on the router's link.
    for (far, from) in [
        ("192.0.2.7", "10.77.0.1"),
        ("192.0.2.200", "10.78.0.1"),
        ("198.51.100.1", "10.78.0.1"),
        ("2001:db8::7", "fd77::1"),
    ] {
        let listener = ns.run(|| TcpListener::bind((far, 0)).unwrap());
        let to = listener.local_addr().unwrap();
        let e = Endpoint::configured(
            &ns,
            device,
            &format!("--connect {to} --role source --bytes 100000"),
        );
        let (s, peer) = listener.accept().unwrap();
        assert_eq!(peer.ip().to_string(), from, "to {far}");
        read_pattern(&s, 100_000);
        drop(s);
        assert!(e.wait().success);
    }
}

#[test]
fn a_router_with_a_narrow_link_behind_it_says_so_and_streams_pass() {
    skip_if!(lacks());
    let (router, far) = (network(1500), Netns::new());
    router.ip("link add far0 type veth peer name far1");
    router.give("far1", &far);
    far.ip("link set far1 arp on");
    router.ip("link set far0 up");
    for (end, ns, n) in [("far0", &router, 1), ("far1", &far, 2)] {
        ns.address(end, &format!("10.79.0.{n}/24"));
        ns.address(end, &format!("fd79::{n}/64"));
        // Source address of a router's neighbour solicitations.
        ns.address(end, &format!("fe80::{n}/64"));
    }
    router.address("veth1", "fe80::7/64");
    far.ip("route add default via 10.79.0.1");
    far.ip("-6 route add default via fd79::1");
    // The far host's own link has a large MTU, so its SYN does not announce the smaller path MTU.
    router.ip("route replace 10.79.0.0/24 dev far0 mtu lock 1300");
    router.ip("-6 route replace fd79::/64 dev far0 proto kernel metric 256 mtu lock 1300");
    router.run(|| {
        for (switch, on) in [
            ("ipv4/conf/all/forwarding", "1"),
            ("ipv6/conf/all/forwarding", "1"),
            // The kernel also sees frames for the endpoint, and would forward them.
            ("ipv4/conf/veth0/forwarding", "0"),
            ("ipv6/conf/veth0/disable_ipv6", "1"),
        ] {
            std::fs::write(format!("/proc/sys/net/{switch}"), on).unwrap();
        }
    });
    let bytes = 500_001;
    let e = Endpoint::configured(
        &router,
        "addresses = [\"10.77.0.1/24\", \"fd77::1/64\"]\ngateway = \"10.77.0.2\"\n\
         gateway6 = \"fd77::2\"",
        &format!("--listen exchange:2000 --bytes {bytes}"),
    );
    exchange(&far, OURS, bytes);
    exchange(&far, OURS6, bytes);
    let o = e.stop();
    assert!(o.success);
    assert_eq!((o.count("closed"), o.count("bytes_out")), (2, 2 * bytes));
    assert!(o.tcp("pmtu_reductions") >= 2, "{}", o.result);
    assert_eq!(o.tcp("black_holes"), 0, "reported, not guessed");
}

#[test]
fn a_peer_that_falls_silent_is_given_up_as_configured() {
    skip_if!(lacks());
    let ends = |tcp: &str, service: &str| {
        let ns = network(1500);
        let device = format!("addresses = [\"10.77.0.1/24\"]\n[device.tcp]\n{tcp}");
        let e = Endpoint::configured(&ns, &device, &format!("--listen {service}:2000"));
        // The time is measured from here.
        let begin = std::time::Instant::now();
        let mut s = dial(&ns, OURS, 2000).unwrap();
        if service == "source" {
            s.read_exact(&mut [0; 1000]).unwrap();
        }
        // From now on no packet of Linux reaches the endpoint.
        ns.ip("route add blackhole 10.77.0.1/32");
        let mut rest = vec![0; 1 << 20];
        // The endpoint's reset ends the connection for Linux.
        while s.read(&mut rest).is_ok_and(|n| n > 0) {}
        let took = begin.elapsed();
        let o = e.stop();
        assert_eq!((o.count("timed_out"), o.tcp("abort_on_timeout")), (1, 1));
        (took.as_secs_f64(), o)
    };
    std::thread::scope(|t| {
        t.spawn(|| {
            let tcp = "keepalive_s = 1\nkeepalive_interval_s = 1\nkeepalive_probes = 2";
            let (took, o) = ends(tcp, "discard");
            assert_eq!(o.tcp("keepalive_probes"), 2);
            assert!((2.5..10.0).contains(&took), "{took}");
        });
        t.spawn(|| {
            let (took, o) = ends("user_timeout_s = 1", "source");
            assert!(o.tcp("timeouts") > 0, "{}", o.result);
            assert!((0.5..10.0).contains(&took), "{took}");
        });
    });
}

#[test]
fn a_frame_counts_only_when_the_port_finds_both_its_checksums_good() {
    skip_if!(lacks_network());
    let ns = Netns::new();
    let e = Endpoint::on(&ns, "net_tap0,iface=siwtap0", "--listen echo:2000");
    ns.ip("link set siwtap0 up");
    let wire = Wire::open(&ns, "siwtap0", Ipv4Addr::new(10, 77, 0, 66));
    let mut c = RawTcp::connect(wire, e.mac, "10.77.0.1:2000".parse().unwrap());
    // The identification of the IP header is not covered by TCP's checksum.
    for at in [18, 54] {
        let mut f = c.frame(c.next, ACK | PSH, &[], b"evil");
        f[at] ^= 1;
        c.wire.send(&f);
    }
    c.send(b"good");
    assert_eq!(c.take(4), b"good");
    drop(c);
    let o = e.stop();
    assert_eq!((o.tcp("csum_errors"), o.count("bytes_in")), (2, 4));
}
