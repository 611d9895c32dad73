//! Super-segments of whole FPDUs, segmented by the port: the peer sees no difference.

use crate::common::net::{Netns, judge, lacks_network, missing_program, tshark_fields};
use crate::common::*;
use siw::{QpInit, RecvWr, SendData, SendWr, WcStatus};

const BIG: usize = 3 << 20;

fn end(daemon: &Daemon) -> End {
    let init = QpInit {
        max_send_sge: 16,
        ..QpInit::default()
    };
    End::with(&daemon.context(), BIG, &init)
}

/// Exchanges a WRITE, a SEND and a READ of megabytes between two ends and compares every byte.
fn exchange(a: &End, b: &End) {
    let done = |end: &End| assert_eq!(end.wc().status, WcStatus::SUCCESS);
    let (whole, half) = (BIG - 12_345, BIG / 2);
    a.fill(1);
    let sge = [a.mr.sge(5, whole)];
    let wr = SendWr::write(1, SendData::Sges(&sge), b.mr.addr(), b.mr.rkey());
    a.qp.post_send(&[wr]).unwrap();
    done(a);
    assert!(a.read(5, whole) == b.read(0, whole), "WRITE");
    // Scattered, so that a segment has several pieces.
    let into = [b.mr.sge(7, half)];
    b.qp.post_recv(&[RecvWr {
        wr_id: 2,
        sges: &into,
    }])
    .unwrap();
    let parts: Vec<_> = (0..16).map(|i| a.mr.sge(i * 20_001, 700 + i)).collect();
    let len: usize = (0..16).map(|i| 700 + i).sum();
    a.qp.post_send(&[SendWr::send(2, SendData::Sges(&parts))])
        .unwrap();
    done(a);
    done(b);
    let sent: Vec<u8> = (0..16).flat_map(|i| a.read(i * 20_001, 700 + i)).collect();
    assert!(sent == b.read(7, len), "SEND");
    b.fill(3);
    let sge = [a.mr.sge(0, whole)];
    let wr = SendWr::read(3, &sge, b.mr.addr() + 3, b.mr.rkey());
    a.qp.post_send(&[wr]).unwrap();
    done(a);
    assert!(a.read(0, whole) == b.read(3, whole), "READ");
}

fn tso_frames(daemon: &Daemon) -> u64 {
    daemon.tcp_counter("tso_frames")
}

fn config(n: u8, devargs: &str, more: &str) -> String {
    format!(
        r#"
[[device]]
name = "siw{n}"
devargs = "{devargs}"
mac = "02:00:00:77:00:0{n}"
addresses = ["10.77.0.{n}/24"]
{more}
"#
    )
}

const DPDK: &str = "[dpdk]\nhugepages = \"never\"\nbuffers = 8192\n";

#[test]
fn a_virtio_user_port_hands_super_segments_to_the_vhost_port_behind_it() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("sock");
    let socket = socket.display();
    let back = config(1, &format!("net_vhost0,iface={socket},tso=1"), "");
    let back = Daemon::start(&format!("{DPDK}{back}"), &[]);
    let devargs = format!("net_virtio_user0,path={socket},queues=1,queue_size=256,mrg_rxbuf=1");
    let front = config(2, &devargs, "tso = \"on\"");
    let front = Daemon::start(&format!("{DPDK}{front}"), &[]);
    let (a, b) = (end(&front), end(&back));
    connect(&a, &b, "siw2", "10.77.0.1:0".parse().unwrap());
    exchange(&a, &b);
    exchange(&b, &a);
    assert!(tso_frames(&front) > 50);
    assert!(front.stop().success());
    assert!(back.stop().success());
}

#[test]
fn a_tap_cuts_super_segments_into_segments_of_one_fpdu() {
    skip_if!(lacks_network().or_else(|| missing_program("tshark")));
    let ns = Netns::new();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tso.pcapng");
    let more = "mtu = 1480\ntso = \"on\"";
    let text = format!(
        "{DPDK}{}{}",
        config(1, "net_tap0,iface=siwtap0", more),
        config(2, "net_tap1,iface=siwtap1", more)
    );
    let siwd = ns.siwd(&text, &["--capture", file.to_str().unwrap()]);
    ns.ip("link add br0 type bridge");
    for link in ["siwtap0", "siwtap1"] {
        ns.ip(&format!("link set {link} master br0"));
        ns.ip(&format!("link set {link} up"));
    }
    ns.ip("link set br0 up");
    let (a, b) = (end(&siwd), end(&siwd));
    connect(&a, &b, "siw1", "10.77.0.2:0".parse().unwrap());
    exchange(&a, &b);
    assert!(tso_frames(&siwd) > 50);
    drop((a, b));
    assert!(siwd.stop().success());
    judge(&file);
    // Segments on the wire: 1480 bytes less 40 of headers and 12 of timestamps.
    let full = tshark_fields(
        &file,
        "frame.p2p_dir == 1 && tcp.len >= 1424",
        &["tcp.len", "tcp.payload"],
    );
    assert!(full.len() > 2000, "{} full segments", full.len());
    for f in &full {
        // The ULPDU length that fills the segment: 1428 less length field and CRC.
        let length = u16::from_str_radix(&f[1][..4], 16).unwrap();
        assert_eq!((&*f[0], length), ("1428", 1422), "not one FPDU");
    }
}

#[test]
fn a_pair_carries_super_segments_unless_they_are_off_or_have_checksums() {
    skip_if!(missing_program("tshark"));
    let dir = tempfile::tempdir().unwrap();
    for (n, (more, is_carried)) in [
        ("", true),
        ("tso = \"on\"", true),
        ("tso = \"off\"", false),
        ("checksum = \"software\"", false),
    ]
    .into_iter()
    .enumerate()
    {
        let file = dir.path().join(format!("{n}.pcapng"));
        let device = |n| config(n, "", &format!("mtu = 1500\n{more}"));
        let text = format!("{DPDK}{}{}", device(1), device(2));
        let text = text.replace("devargs = \"\"", "pair = \"super\"");
        let siwd = Daemon::start(&text, &["--capture", file.to_str().unwrap()]);
        let (a, b) = (end(&siwd), end(&siwd));
        connect(&a, &b, "siw1", "10.77.0.2:0".parse().unwrap());
        exchange(&a, &b);
        if is_carried {
            assert!(tso_frames(&siwd) > 50, "{more}");
        } else {
            assert_eq!(tso_frames(&siwd), 0, "{more}");
        }
        drop((a, b));
        assert!(siwd.stop().success());
        judge(&file);
        let long = tshark_fields(&file, "tcp.len > 1460", &["tcp.len"]);
        assert_eq!(!long.is_empty(), is_carried, "{more}");
        let most = long.iter().map(|len| len[0].parse::<u32>().unwrap()).max();
        assert!(most.unwrap_or(0) <= 64_000, "{most:?}");
    }
}

#[test]
fn a_super_segment_of_long_segments_is_no_longer_than_a_packet() {
    skip_if!(missing_program("tshark"));
    let dir = tempfile::tempdir().unwrap();
    // At an MTU of 33,024 bytes, two segments exceed the maximum packet length.
    for (mtu, segments) in [(9000, 7), (33_024, 1)] {
        let file = dir.path().join(format!("{mtu}.pcapng"));
        let device = |n| config(n, "", &format!("mtu = {mtu}"));
        let text = format!("{DPDK}{}{}", device(1), device(2));
        let text = text.replace("devargs = \"\"", "pair = \"long\"");
        let siwd = Daemon::start(&text, &["--capture", file.to_str().unwrap()]);
        let (a, b) = (end(&siwd), end(&siwd));
        connect(&a, &b, "siw1", "10.77.0.2:0".parse().unwrap());
        exchange(&a, &b);
        // A pair does not lose frames. When the worker gets no processor time for a while, TCP sends
        // a probe or times out though nothing was lost.
        let again = siwd.tcp_counter("retrans_segs");
        let timers = siwd.tcp_counter("tlp_probes") + siwd.tcp_counter("timeouts");
        assert!(again <= 2 * timers, "{mtu}: {again}, {timers} timers");
        assert_eq!(siwd.tcp_counter("lost_retransmit"), 0, "{mtu}");
        drop((a, b));
        assert!(siwd.stop().success());
        judge(&file);
        let lens = tshark_fields(&file, "tcp.len > 0", &["tcp.len"]);
        let most = lens.iter().map(|len| len[0].parse::<u32>().unwrap()).max();
        let most = most.expect("some data");
        assert!(most <= 64_000 && most > (mtu - 100) * segments, "{most}");
    }
}

#[test]
fn a_port_that_cannot_cut_says_so_when_it_has_to() {
    skip_if!(lacks_network().or_else(|| missing_program("ethtool")));
    let ns = Netns::new();
    ns.veth(1500);
    let text = config(1, "net_af_packet0,iface=veth0", "tso = \"on\"");
    let (status, _, err) = ns.run(|| run(&format!("{DPDK}{text}"), &[]));
    assert_eq!(status.code(), Some(1));
    assert!(
        err.contains("siwd.toml:") && err.contains("tso \"on\""),
        "{err}"
    );
    let six = config(1, "net_tap0,iface=siwtap0", "mtu = 1480\ntso = \"on\"")
        .replace("/24\"", "/24\", \"fd77::1/64\"");
    let (status, _, err) = ns.run(|| run(&format!("{DPDK}{six}"), &[]));
    assert_eq!(status.code(), Some(1));
    assert!(err.contains("cuts IPv4 segments only"), "{err}");
}
