//! Fragments made by Linux and its routers are reassembled. Over a tap: for DPDK's AF_PACKET
//! sockets the kernel itself would reassemble them.

use std::net::Shutdown;
use std::time::Duration;

use crate::common::net::{Netns, lacks_network};
use crate::common::stream::*;

const MIB: u64 = 1 << 20;

/// Starts the endpoint on a tap whose other side has Linux's addresses.
fn on_tap(args: &str) -> (Netns, Endpoint) {
    let ns = Netns::new();
    let e = Endpoint::on(&ns, "net_tap0,iface=siwtap0", args);
    ns.ip("link set siwtap0 addrgenmode none");
    ns.address("siwtap0", "10.77.0.2/24");
    ns.address("siwtap0", "fd77::2/64");
    ns.ip("link set siwtap0 up");
    ns.wait_ping(OURS.parse().unwrap());
    ns.wait_ping(OURS6.parse().unwrap());
    (ns, e)
}

#[test]
fn pings_of_all_lengths_are_answered_whole() {
    skip_if!(lacks_network());
    let (ns, e) = on_tap("--listen discard:2000");
    let mut long = 0;
    for (to, most) in [(OURS, 65_507), (OURS6, 65_527)] {
        for data in [1400, 1473, 3000, 20_001, most] {
            let answered = ns.ping(to.parse().unwrap(), data, Duration::from_secs(5));
            assert!(answered, "{data} bytes to {to}");
            long += u64::from(data > 1472);
        }
    }
    let o = e.stop();
    assert_eq!(o.tcp("reassembly_oks"), long, "{}", o.result);
    assert!(o.tcp("reassembly_required") >= 2 * (65_507 / 1480));
    assert_eq!(o.tcp("reassembly_fails"), 0, "{}", o.result);
    assert_eq!(o.mib("IpReasmOKs"), long);
}

#[test]
fn a_stream_arrives_whole_that_a_router_cuts_into_fragments() {
    skip_if!(lacks_network());
    let far = Netns::new();
    let (router, e) = on_tap(&format!(
        "--gateway {LINUX} --listen exchange:2000 --bytes {MIB}"
    ));
    router.ip("link add far0 type veth peer name far1");
    router.give("far1", &far);
    far.ip("link set far1 arp on");
    router.ip("link set far0 up");
    router.address("far0", "10.79.0.1/24");
    far.address("far1", "10.79.0.2/24");
    far.ip("route add default via 10.79.0.1");
    router.ip("link set siwtap0 mtu 600");
    let set = |ns: &Netns, name: &str| {
        ns.run(|| std::fs::write(format!("/proc/sys/net/ipv4/{name}"), "1").unwrap());
    };
    set(&router, "conf/all/forwarding");
    // Disables path MTU discovery, as when ICMP is blocked: the segments stay large.
    set(&far, "ip_no_pmtu_disc");
    let s = dial(&far, OURS, 2000).unwrap();
    std::thread::scope(|t| {
        t.spawn(|| {
            write_pattern(&s, MIB);
            s.shutdown(Shutdown::Write).unwrap();
        });
        read_pattern(&s, MIB);
    });
    drop(s);
    let o = e.stop();
    assert!(o.success, "{}", o.result);
    assert_eq!((o.count("closed"), o.count("bytes_checked")), (1, MIB));
    // A segment of 1460 bytes arrives in three fragments.
    assert!(o.tcp("reassembly_oks") > MIB / 1460 / 2, "{}", o.result);
    assert!(o.tcp("reassembly_required") > 2 * o.tcp("reassembly_oks"));
}
