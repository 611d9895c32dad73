//! A running siwd places payload that arrives beyond a hole and delivers it in order (RFC 5041
//! section 5.2), but only on devices configured for this.

use std::net::SocketAddr;
use std::time::Instant;

use crate::common::net::{Netns, lacks_network};
use crate::common::peer::{C, S, request, send, write};
use crate::common::raw::{RawTcp, Wire};
use crate::common::*;
use siw::{CmEvent, CmListener, ConnectOptions, RecvWr, WcStatus};

const MAC: [u8; 6] = [2, 0, 0, 0x77, 0, 1];

struct Bench {
    app: End,
    peer: RawTcp,
    _listener: CmListener,
    siwd: Daemon,
    _ns: Netns,
}

/// A connection in FPDU mode that has received its first FPDU.
fn bench(policy: &str) -> Bench {
    let ns = Netns::new();
    let siwd = ns.siwd(
        &format!(
            r#"
[dpdk]
hugepages = "never"
buffers = 4096
[[device]]
name = "siw0"
devargs = "net_tap0,iface=tap0"
mac = "02:00:00:77:00:01"
addresses = ["10.77.0.1/24"]
[device.mpa]
out_of_order = "{policy}"
"#
        ),
        &[],
    );
    ns.ip("link set tap0 up");
    let app = End::new(&siwd.context(), 65_536);
    let any: SocketAddr = "10.77.0.1:0".parse().unwrap();
    let listener = CmListener::new(&app.cm, None, any, 8, 0).unwrap();
    let SocketAddr::V4(to) = listener.local_addr() else {
        panic!("IPv4")
    };
    let wire = Wire::open(&ns, "tap0", "10.77.0.9".parse().unwrap());
    let mut peer = RawTcp::connect(wire, MAC, to);
    peer.send(&request(S | C, 2, &[0, 4, 0, 4]));
    match app.cm.get_event(Some(PATIENCE)).unwrap() {
        CmEvent::ConnectRequest(request) => request
            .accept(&app.qp, None, &ConnectOptions::default())
            .unwrap(),
        other => panic!("{other:?}"),
    }
    peer.take(20 + 4);
    assert!(matches!(
        app.cm.get_event(Some(PATIENCE)).unwrap(),
        CmEvent::Established(_)
    ));
    for wr_id in [1, 2] {
        let sge = [app.mr.sge(0, 64)];
        app.qp.post_recv(&[RecvWr { wr_id, sges: &sge }]).unwrap();
    }
    peer.send(&send(true, 1, 0, b"first"));
    assert_eq!((app.wc().wr_id, peer.acked != peer.next), (1, true));
    peer.await_ack();
    Bench {
        app,
        peer,
        _listener: listener,
        siwd,
        _ns: ns,
    }
}

fn placed(b: &Bench) -> u64 {
    let text = b.siwd.context().read_stats().unwrap();
    let v: serde_json::Value = serde_json::from_str(&text).unwrap();
    v["workers"][0]["placed_out_of_order"].as_u64().unwrap()
}

#[test]
fn payload_beyond_a_hole_is_placed_at_once_and_completes_in_its_turn() {
    skip_if!(lacks_network());
    let mut b = bench("aligned");
    let (key, base) = (b.app.mr.rkey(), b.app.mr.addr());
    let data = pattern(7, 1000);
    let hole = write(true, key, base + 1000, &data);
    let beyond = write(true, key, base + 2000, &data);
    let last = send(true, 2, 0, b"all is there");
    b.peer.send_ahead(hole.len(), &beyond);
    b.peer.send_ahead(hole.len() + beyond.len(), &last);
    let end = Instant::now() + PATIENCE;
    while b.app.read(2000, 1000) != data {
        assert!(Instant::now() < end, "not placed");
        std::thread::yield_now();
    }
    assert_eq!(b.app.read(1000, 1000), [0; 1000]);
    let mut wc = [siw::Wc::default()];
    assert_eq!(b.app.cq.poll(&mut wc).unwrap(), 0, "delivery waits");
    b.peer.send(&hole);
    b.peer.next += (beyond.len() + last.len()) as u32;
    let wc = b.app.wc();
    assert_eq!(
        (wc.wr_id, wc.status, wc.byte_len),
        (2, WcStatus::SUCCESS, 12)
    );
    assert_eq!(b.app.read(1000, 2000), [&data[..], &data].concat());
    b.peer.await_ack();
    assert_eq!(placed(&b), 1);
}

#[test]
fn a_device_that_places_in_order_leaves_memory_alone_until_the_hole_is_filled() {
    skip_if!(lacks_network());
    for policy in ["off", "markers"] {
        let mut b = bench(policy);
        let (key, base) = (b.app.mr.rkey(), b.app.mr.addr());
        let hole = send(true, 2, 0, b"");
        let beyond = write(true, key, base + 2000, &[7; 100]);
        b.peer.send_ahead(hole.len(), &beyond);
        // A SACK block shows that siwd has received it.
        while !b.peer.segment().options.contains(&5) {}
        assert_eq!(b.app.read(2000, 100), [0; 100], "{policy}");
        b.peer.send(&hole);
        b.peer.next += beyond.len() as u32;
        b.peer.await_ack();
        assert_eq!(b.app.wc().wr_id, 2);
        assert_eq!(b.app.read(2000, 100), [7; 100]);
        assert_eq!(placed(&b), 0);
    }
}

#[test]
fn a_configuration_that_names_no_such_policy_is_refused() {
    let bad = "[[device]]\nname = \"siw0\"\npair = \"x\"\naddresses = [\"10.1.1.1/24\"]\n[device.mpa]\nout_of_order = \"always\"\n";
    let (status, _, stderr) = run(bad, &["--check"]);
    assert!(!status.success());
    assert!(stderr.contains("aligned"), "{stderr}");
}
