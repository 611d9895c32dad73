//! Byte streams between `siw-stream` and the Linux kernel in the lab guest, whose netem delays,
//! reorders, drops and duplicates frames of both directions.

use crate::common::guest::{GUEST_PATIENCE, Guest, lacks_guest};
use crate::common::net::Netns;
use crate::common::stream::*;

const PORT: &str = "net_af_packet0,iface=lab0";
const CONNECTIONS: u64 = 4;

/// A tenth of the frames overtakes those delayed by 4 ms. Incoming frames pass through ifb0, since
/// netem handles outgoing frames only.
const NETEM: &str = "set -e; how='limit 20000 delay 4ms reorder 10% loss 1% duplicate 1%'
    modprobe ifb numifbs=1; ip link set ifb0 up
    tc qdisc add dev eth0 root netem $how
    tc qdisc add dev ifb0 root netem $how
    tc qdisc add dev eth0 ingress
    tc filter add dev eth0 ingress matchall action mirred egress redirect dev ifb0";

/// Frames that netem dropped on this interface of the guest.
fn dropped(guest: &Guest, dev: &str) -> u64 {
    let text = guest.run(&format!("tc -s qdisc show dev {dev} root"));
    let (_, rest) = text.split_once("(dropped ").expect("no statistics");
    rest.split_once(',').unwrap().0.parse().unwrap()
}

/// Checks the byte count of every connection in the output of the guest's program; returns its
/// retransmissions.
fn retransmitted(out: &str, bytes: u64) -> u64 {
    let done = out.lines().filter_map(|l| l.strip_prefix("done "));
    let done: Vec<(u64, u64)> = done
        .map(|l| l.split_once(' ').unwrap())
        .map(|(n, again)| (n.parse().unwrap(), again.parse().unwrap()))
        .collect();
    assert_eq!(done.len() as u64, CONNECTIONS, "{out}");
    assert!(done.iter().all(|d| d.0 == bytes), "{out}");
    done.iter().map(|d| d.1).sum()
}

/// Counts of impairments, both sides together.
#[derive(Debug, Default)]
struct Trouble {
    /// Segments retransmitted.
    ours: u64,
    theirs: u64,
    /// Segments that arrived out of order here.
    early: u64,
    dsacks: u64,
}

impl Trouble {
    fn add(&mut self, o: &Outcome, theirs: u64, bytes: u64, who: &str) {
        let all = CONNECTIONS * bytes;
        assert!(o.success, "{who}: {}", o.result);
        assert_eq!(o.count("closed"), CONNECTIONS, "{who}: {}", o.result);
        assert_eq!(o.count("bytes_checked"), all, "{who}: {}", o.result);
        assert_eq!(o.count("bytes_out"), all, "{who}: {}", o.result);
        assert_eq!(o.count("bad_streams"), 0, "{who}");
        println!(
            "{who}: {} s, retransmitted {} and {theirs}, out of order {}",
            o.result["seconds"],
            o.tcp("retrans_segs"),
            o.tcp("ofo_queue"),
        );
        self.ours += o.tcp("retrans_segs");
        self.theirs += theirs;
        self.early += o.tcp("ofo_queue");
        self.dsacks += o.tcp("dsacks_in");
    }
}

/// Runs a test in which the guest opens the connections.
fn linux_connects(ns: &Netns, guest: &Guest, us: &str, bytes: u64, order: &str) -> (Outcome, u64) {
    let e = Endpoint::on(ns, PORT, &format!("--listen exchange:2000 --bytes {bytes}"));
    let command = format!("stream connect {us} 2000 {SEED} {bytes} {CONNECTIONS} {order}");
    let done = guest.start(&command).wait(GUEST_PATIENCE);
    assert_eq!(done.status, Some(0), "{command}: {done:?}");
    (e.stop(), retransmitted(&done.out, bytes))
}

/// Runs a test in which `siw-stream` opens the connections.
fn we_connect(ns: &Netns, guest: &Guest, them: &str, bytes: u64, order: &str) -> (Outcome, u64) {
    let command = format!("stream listen {them} 2000 {SEED} {bytes} {CONNECTIONS} {order}");
    let server = guest.start(&command);
    guest.run("wait-listen 2000");
    let to = std::net::SocketAddr::new(them.parse().unwrap(), 2000);
    let args = format!("--connect {to} --role exchange --count {CONNECTIONS} --bytes {bytes}");
    let o = Endpoint::on(ns, PORT, &args).wait();
    let done = server.wait(GUEST_PATIENCE);
    assert_eq!(done.status, Some(0), "{command}: {done:?}");
    (o, retransmitted(&done.out, bytes))
}

#[test]
fn streams_of_both_sides_arrive_whole_through_the_netem_of_linux() {
    skip_if!(lacks_guest());
    let ns = Netns::new();
    let guest = Guest::boot(&ns, &["--ip", "10.77.0.2/24", "--ip6", "fd77::2/64"]);
    guest.run(NETEM);
    let mut trouble = Trouble::default();
    for (us, them) in [(OURS, LINUX), (OURS6, LINUX6)] {
        // Both directions at once; then one direction that continues after the other was closed,
        // from a side that had to wait with a full window.
        for (order, bytes) in [
            ("both", 4 << 20),
            ("write-first", 512 << 10),
            ("read-first", 512 << 10),
        ] {
            let (o, theirs) = linux_connects(&ns, &guest, us, bytes, order);
            trouble.add(&o, theirs, bytes, &format!("to {us}, {order}"));
            let (o, theirs) = we_connect(&ns, &guest, them, bytes, order);
            trouble.add(&o, theirs, bytes, &format!("to {them}, {order}"));
        }
    }
    // Each direction lost and reordered frames, and each side had to recover.
    for dev in ["eth0", "ifb0"] {
        assert!(dropped(&guest, dev) > 20, "{dev}: {trouble:?}");
    }
    assert!(trouble.ours > 20 && trouble.theirs > 20, "{trouble:?}");
    assert!(trouble.early > 100 && trouble.dsacks > 0, "{trouble:?}");
    assert!(guest.counter("TcpExt", "TCPOFOQueue") > 100, "{trouble:?}");
}
