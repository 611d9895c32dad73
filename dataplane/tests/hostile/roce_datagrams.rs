//! Datagrams of RoCEv2 on a link, against frames and an ICRC that this file makes by itself: what siwd
//! sends, what it accepts, and the counter of each kind of wrong datagram, management datagrams (MADs) among
//! them.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::net::{Netns, lacks_network};
use crate::common::raw::Wire;
use crate::common::*;
use siw::{
    Access, AhAttr, GRH_LEN, PairOptions, QpInit, RecvWr, SendData, SendWr, WcFlags, WcStatus,
};

const OURS: [u8; 4] = [10, 77, 0, 1];
const OUR_MAC: [u8; 6] = [2, 0, 0, 0x77, 0, 1];
const PEER: [u8; 4] = [10, 77, 0, 9];
const QKEY: u32 = 0x0102_0304;
const ETHERNET: usize = 14;
/// Offsets in a frame.
const IP: usize = ETHERNET;
const UDP: usize = IP + 20;
const BTH: usize = UDP + 8;
const CONFIG: &str = r#"
[workers]
idle = "adaptive"
[dpdk]
hugepages = "never"
buffers = 4096
[[device]]
name = "siw0"
devargs = "net_af_packet0,iface=veth0"
mac = "02:00:00:77:00:01"
addresses = ["10.77.0.1/24"]
mtu = 1500
"#;

/// CRC-32 of Ethernet, bit by bit.
fn crc32(bytes: impl Iterator<Item = u8>) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0xedb8_8320 & 0u32.wrapping_sub(crc & 1));
        }
    }
    !crc
}

/// The ICRC of a frame without it.
fn icrc(frame: &[u8]) -> [u8; 4] {
    let variant = [IP + 1, IP + 8, IP + 10, IP + 11, UDP + 6, UDP + 7, BTH + 4];
    let covered = frame.iter().enumerate().skip(IP);
    let masked = covered.map(|(at, byte)| if variant.contains(&at) { 0xff } else { *byte });
    crc32([0xff; 8].into_iter().chain(masked)).to_le_bytes()
}

/// Sets the lengths and the ICRC of a frame without ICRC.
fn finish(mut frame: Vec<u8>) -> Vec<u8> {
    let total = (frame.len() + 4 - IP) as u16;
    frame[IP + 2..IP + 4].copy_from_slice(&total.to_be_bytes());
    frame[UDP + 4..UDP + 6].copy_from_slice(&(total - 20).to_be_bytes());
    frame[IP + 10..IP + 12].fill(0);
    let sum: u32 = frame[IP..UDP]
        .chunks(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
        .sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    frame[IP + 10..IP + 12].copy_from_slice(&sum.to_be_bytes());
    let icrc = icrc(&frame);
    frame.extend(icrc);
    frame
}

/// A datagram to siwd without ICRC, with a payload of a multiple of four bytes.
fn datagram(peer_mac: [u8; 6], to: u32, payload: &[u8]) -> Vec<u8> {
    let mut frame = [OUR_MAC, peer_mac].concat();
    frame.extend([8, 0]);
    frame.extend([0x45, 0, 0, 0, 0x12, 0x34, 0x40, 0, 9, 17, 0, 0]);
    frame.extend([PEER, OURS].concat());
    frame.extend([0xc1, 0x23, 0x12, 0xb7, 0, 0, 0, 0]);
    frame.extend([0x64, 0, 0xff, 0xff]);
    frame.extend(to.to_be_bytes());
    frame.extend([0, 1, 2, 3]);
    frame.extend(QKEY.to_be_bytes());
    frame.extend([0, 0, 0x12, 0x34]);
    frame.extend(payload);
    frame
}

fn drops(end: &End, reason: &str) -> u64 {
    let text = end.ctx.read_stats().unwrap();
    let statistics: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mut rows = statistics["drops"].as_array().unwrap().iter();
    let row = rows.find(|row| row["reason"] == reason).unwrap();
    row["count"].as_u64().unwrap()
}

fn datagram_end(daemon: &Daemon) -> End {
    let end = End::with(&daemon.context(), 4096, &QpInit::default());
    end.qp.start_datagrams(0, QKEY).unwrap();
    end
}

struct Rig {
    daemon: Daemon,
    wire: Wire,
    end: End,
    _ns: Netns,
}

impl Rig {
    /// `cores`: those of the workers.
    fn new(cores: &str) -> Rig {
        let ns = Netns::new();
        ns.veth(1500);
        let cores = format!("[workers]\ncores = {cores}");
        let daemon = ns.siwd(&CONFIG.replace("[workers]", &cores), &[]);
        let wire = Wire::open(&ns, "veth1", Ipv4Addr::from(PEER));
        let end = datagram_end(&daemon);
        Rig {
            daemon,
            wire,
            end,
            _ns: ns,
        }
    }

    /// Posts a receive work request of 1000 bytes.
    fn post_receive(&self) {
        let sges = &[self.end.mr.sge(0, 1000)];
        self.end.qp.post_recv(&[RecvWr { wr_id: 4, sges }]).unwrap();
    }

    /// Sends a wrong datagram until its reason is counted, in case the link was not up at first.
    fn is_dropped(&self, frame: &[u8], reason: &str) {
        let before = drops(&self.end, reason);
        let end = Instant::now() + PATIENCE;
        while drops(&self.end, reason) == before {
            assert!(Instant::now() < end, "{reason} is not counted");
            self.wire.send(frame);
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// A datagram for the queue pair, without ICRC.
    fn datagram(&self, payload: &[u8]) -> Vec<u8> {
        datagram(self.wire.mac, self.end.qp.qp_num(), payload)
    }
}

#[test]
fn siwd_sends_datagrams_as_the_standard_says() {
    skip_if!(lacks_network());
    let Rig {
        daemon, wire, end, ..
    } = Rig::new("[]");
    let frame = std::thread::scope(|scope| {
        // Answers ARP.
        let peer = scope.spawn(|| {
            let until = Instant::now() + PATIENCE;
            loop {
                let frame = wire.recv(until).expect("a datagram");
                if frame[12..14] == [8, 0] && frame[IP + 9] == 17 {
                    return frame;
                }
            }
        });
        let attr = AhAttr {
            traffic_class: 0x68,
            hop_limit: 3,
            timeout: Some(Duration::from_secs(5)),
            ..AhAttr::new(0, Ipv4Addr::from(PEER).into())
        };
        let ah = end.ctx.create_ah(&attr).unwrap();
        let request = SendWr::send_with_imm(1, SendData::Inline(b"five!"), 0x0506_0708);
        let request = request.with_destination(ah.number(), 0x9a_bcde, 0x0a0b_0c0d);
        end.qp.post_send(&[request]).unwrap();
        assert_eq!(end.wc().status, WcStatus::SUCCESS);
        peer.join().unwrap()
    });
    assert_eq!(frame[..12], [wire.mac, OUR_MAC].concat());
    let length = BTH + 12 + 8 + 4 + 5 + 3 + 4;
    assert_eq!(frame.len(), length);
    assert_eq!(frame[IP..IP + 4], [0x45, 0x68, 0, (length - IP) as u8]);
    assert_eq!(frame[IP + 6..IP + 10], [0x40, 0, 3, 17], "DF, TTL, UDP");
    assert_eq!(frame[IP + 12..IP + 20], [OURS, PEER].concat());
    assert!(frame[UDP] >= 0xc0);
    assert_eq!(frame[UDP + 2..UDP + 4], 4791u16.to_be_bytes());
    assert_eq!(frame[UDP + 4..BTH], [0, (length - UDP) as u8, 0, 0]);
    assert_eq!(frame[BTH..BTH + 4], [0x65, 0x30, 0xff, 0xff]);
    assert_eq!(frame[BTH + 4..BTH + 9], [0, 0x9a, 0xbc, 0xde, 0]);
    assert_eq!(frame[BTH + 12..BTH + 16], [0x0a, 0x0b, 0x0c, 0x0d]);
    assert_eq!(frame[BTH + 16..BTH + 20], end.qp.qp_num().to_be_bytes());
    assert_eq!(frame[BTH + 20..BTH + 24], [5, 6, 7, 8]);
    assert_eq!(&frame[BTH + 24..length - 4], b"five!\0\0\0");
    assert_eq!(frame[length - 4..], icrc(&frame[..length - 4]));
    assert!(daemon.stop().success());
}

#[test]
fn datagrams_of_a_peer_arrive_and_wrong_ones_are_counted_by_name() {
    skip_if!(lacks_network());
    check_received(&Rig::new("[]"));
}

/// RC of RoCE adapters and rxe: the reason names it, and what the peer would need.
#[test]
fn a_queue_pair_with_a_peer_of_rc_over_roce_fails_with_that_reason() {
    skip_if!(lacks_network());
    let rig = Rig::new("[]");
    let connect = |peer_qp_num| {
        let end = End::new(&rig.daemon.context(), 4096);
        let options = PairOptions {
            device: 0,
            local: Ipv4Addr::from(OURS).into(),
            peer: Ipv4Addr::from(PEER).into(),
            peer_qp_num,
            ord: 1,
            ird: 1,
            denied_access: Access::NONE,
        };
        end.qp.connect_pair(&options).unwrap();
        end
    };
    let (silent, reliable) = (connect(5), connect(6));
    let mut send_only = datagram(rig.wire.mac, reliable.qp.qp_num(), &[7; 64]);
    send_only[BTH] = 0x04;
    rig.is_dropped(&finish(send_only), "UD_OPCODE");
    let is_over = AtomicBool::new(false);
    let reasons = std::thread::scope(|scope| {
        let _guard = StopOnDrop(&is_over);
        // Answers ARP, but no TCP.
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                rig.wire.recv(Instant::now() + Duration::from_millis(100));
            }
        });
        [&silent, &reliable].map(|end| {
            let event = end.ctx.get_async_event(Some(PATIENCE)).unwrap();
            event.reason.to_string()
        })
    });
    let needs_siwd = "siwd's RC is iWARP, so the peer has to run siwd";
    for (reason, expected) in reasons.iter().zip([
        "no queue pair 5 in RTR at 10.77.0.9 in time",
        "10.77.0.9 sends RC over RoCE",
    ]) {
        assert!(reason.contains(expected), "{reason}");
        assert!(reason.contains(needs_siwd), "{reason}");
    }
}

/// Datagrams for no queue pair, of operations that are not served, and for a queue pair without receive
/// work requests.
#[test]
fn a_flood_of_datagrams_leaves_connections_alone() {
    skip_if!(lacks_network());
    let rig = Rig::new("[]");
    let (a, b) = pair_on(&rig.daemon, 4096, "siw0", "10.77.0.1:0");
    let plain = rig.datagram(&[7; 1000]);
    let mut unknown = plain.clone();
    unknown[BTH + 5] = 0xff;
    let mut reliable = plain.clone();
    reliable[BTH] = 0x0a;
    let frames = [plain, unknown, reliable].map(finish);
    let is_over = AtomicBool::new(false);
    let pings = std::thread::scope(|scope| {
        let _guard = StopOnDrop(&is_over);
        let (is_over, frames, wire) = (&is_over, &frames, &rig.wire);
        scope.spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                frames.iter().for_each(|frame| wire.send(frame));
            }
        });
        let end = Instant::now() + Duration::from_secs(2);
        let mut pings = 0;
        while Instant::now() < end {
            ping(&a, &b);
            pings += 1;
        }
        pings
    });
    let counts = ["UD_NO_RECEIVE", "UD_UNKNOWN_QP", "UD_OPCODE"].map(|name| drops(&rig.end, name));
    println!("{pings} writes beside dropped datagrams: {counts:?}");
    assert!(pings > 100 && counts.iter().all(|count| *count > 100));
    assert!(rig.daemon.stop().success());
}

/// The port spreads frames over the workers by another rule than that of datagrams.
#[test]
fn two_workers_hand_datagrams_to_the_owner() {
    skip_if!(lacks_network().or_else(two_cores));
    // Queue pairs of both workers.
    let rig = Rig::new("[0, 1]");
    check_received(&rig);
    let end = datagram_end(&rig.daemon);
    assert_ne!(end.qp.qp_num() % 2, rig.end.qp.qp_num() % 2);
    check_received(&Rig { end, ..rig });
}

fn check_received(rig: &Rig) {
    let plain = rig.datagram(b"payload!");
    let whole = finish(plain.clone());
    rig.is_dropped(&whole, "UD_NO_RECEIVE");

    let changed = |at: usize, bytes: &[u8]| {
        let mut frame = plain.clone();
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        finish(frame)
    };
    rig.post_receive();
    for at in [IP + 4, UDP, BTH + 3, BTH + 9, BTH + 21] {
        let mut wrong = whole.clone();
        wrong[at] ^= 0x10;
        if at < UDP {
            // With a right checksum of the IP header, and the ICRC of another packet.
            let icrc = wrong.split_off(wrong.len() - 4);
            wrong = finish(wrong);
            wrong.truncate(wrong.len() - 4);
            wrong.extend(icrc);
        }
        rig.is_dropped(&wrong, "UD_ICRC");
    }
    rig.is_dropped(&changed(BTH + 2, &[0x12, 0x34]), "UD_PKEY");
    rig.is_dropped(&changed(BTH + 12, &[9]), "UD_QKEY");
    rig.is_dropped(&changed(BTH + 5, &[1, 2, 3]), "UD_UNKNOWN_QP");
    // RC SEND Only, to a queue pair of datagrams and to none.
    rig.is_dropped(&changed(BTH, &[0x04]), "UD_OPCODE");
    rig.is_dropped(
        &changed(BTH, &[0x04, 0, 0xff, 0xff, 0, 1, 2, 3]),
        "UD_OPCODE",
    );
    rig.is_dropped(&changed(BTH + 1, &[1]), "UD_MALFORMED");
    for len in [0, 4, 11, 12, 19] {
        rig.is_dropped(&finish(plain[..BTH + len].to_vec()), "UD_MALFORMED");
    }

    // The queue pair and its request are untouched. Routers may change TTL, DSCP, ECN; a limited member of
    // the partition may send to a full one.
    let mut accepted = vec![whole.clone(), changed(BTH + 2, &[0x7f, 0xff])];
    let mut marked = plain.clone();
    (marked[IP + 1], marked[IP + 8], marked[BTH + 4]) = (0x2b, 1, 0xc0);
    accepted.push(finish(marked));
    for frame in accepted {
        rig.wire.send(&frame);
        let got = rig.end.wc();
        assert_eq!((got.status, got.src_qp), (WcStatus::SUCCESS, 0x1234));
        assert_eq!(got.byte_len as usize, GRH_LEN + 8);
        assert!(got.flags.contains(WcFlags::GRH));
        assert_eq!(rig.end.read(20, 20), frame[IP..UDP]);
        assert_eq!(rig.end.read(GRH_LEN, 8), b"payload!");
        rig.post_receive();
    }
}

/// A SIDR_REQ of rdma_cm to queue pair 1, without ICRC. `port_space` and `port` make the service id.
fn sidr_request(peer_mac: [u8; 6], id: u32, port_space: u16, port: u16) -> Vec<u8> {
    let mut mad = [0; 256];
    mad[..4].copy_from_slice(&[1, 7, 2, 3]);
    mad[8..16].copy_from_slice(b"transact");
    mad[16..18].copy_from_slice(&[0, 0x17]);
    mad[24..28].copy_from_slice(&id.to_be_bytes());
    mad[28..30].copy_from_slice(&[0xff, 0xff]);
    mad[36..38].copy_from_slice(&port_space.to_be_bytes());
    mad[38..40].copy_from_slice(&port.to_be_bytes());
    mad[41] = 0x40;
    mad[42..44].copy_from_slice(&[0x12, 0x34]);
    mad[56..60].copy_from_slice(&PEER);
    mad[72..76].copy_from_slice(&OURS);
    mad[76..80].copy_from_slice(b"data");
    let mut frame = datagram(peer_mac, 1, &mad);
    frame[BTH + 12..BTH + 16].copy_from_slice(&[0x80, 1, 0, 0]);
    frame[BTH + 16..BTH + 20].copy_from_slice(&[0, 0, 0, 1]);
    frame
}

/// Sends a frame until a MAD comes back; returns it. Answers ARP.
fn answer_to(rig: &Rig, frame: &[u8]) -> Vec<u8> {
    let until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        rig.wire.send(frame);
        let soon = Instant::now() + Duration::from_millis(200);
        while let Some(got) = rig.wire.recv(soon) {
            if got[12..14] == [8, 0] && got[IP + 9] == 17 {
                assert_eq!(got.len(), BTH + 20 + 256 + 4);
                assert_eq!(got[BTH..BTH + 4], [0x64, 0, 0xff, 0xff]);
                assert_eq!(got[BTH + 4..BTH + 8], [0, 0, 0, 1]);
                assert_eq!(got[BTH + 12..BTH + 16], [0x80, 1, 0, 0]);
                assert_eq!(got[BTH + 16..BTH + 20], [0, 0, 0, 1]);
                let end = got.len() - 4;
                assert_eq!(got[end..], icrc(&got[..end]));
                return got[BTH + 20..end].to_vec();
            }
        }
    }
    panic!("no answer");
}

#[test]
fn management_datagrams_are_answered_as_the_standard_says_and_wrong_ones_counted() {
    skip_if!(lacks_network());
    let rig = Rig::new("[]");
    let ctx = rig.daemon.context();
    let cm = siw::CmChannel::new(&ctx).unwrap();
    let bound = siw::CmBinding::new(
        &ctx,
        "0.0.0.0:7174".parse().unwrap(),
        &siw::BindOptions {
            datagrams: true,
            ..siw::BindOptions::default()
        },
    );
    let options = siw::ListenOptions::default();
    let listener = siw::CmListener::from_binding(&cm, bound.unwrap(), &options);
    let _listener = listener.map_err(|failed| failed.error).unwrap();
    let mac = rig.wire.mac;

    // Nothing serves the port, and the port space.
    for (port_space, port) in [(0x0111, 9), (0x0106, 7174), (0x0002, 7174)] {
        let asked = sidr_request(mac, 0x0a0b_0c0d, port_space, port);
        let mad = answer_to(&rig, &finish(asked.clone()));
        assert_eq!(mad[..4], [1, 7, 2, 3]);
        assert_eq!(mad[8..18], *b"transact\0\x18");
        assert_eq!(mad[24..29], [0x0a, 0x0b, 0x0c, 0x0d, 1]);
        assert_eq!(mad[36..44], asked[BTH + 20 + 32..BTH + 20 + 40]);
    }

    // The service answers once; the request that comes again gets the same answer.
    let whole = finish(sidr_request(mac, 77, 0x0111, 7174));
    rig.wire.send(&whole);
    let request = match cm.get_rdma_cm_event(Some(PATIENCE)).unwrap() {
        siw::RdmaCmEvent::ServiceRequest(request) => request,
        other => panic!("{other:?}"),
    };
    let peer = std::net::SocketAddr::from((PEER, 0x1234));
    assert_eq!(request.info().peer, Some(peer));
    assert_eq!(request.info().private_data[..5], *b"data\0");
    let own = End::with(&ctx, 4096, &QpInit::default());
    request.accept(&own.qp, 0x0102_0304, b"answer").unwrap();
    for _ in 0..2 {
        let mad = answer_to(&rig, &whole);
        assert_eq!(mad[24..30], [0, 0, 0, 77, 0, 0]);
        assert_eq!(mad[32..36], (own.qp.qp_num() << 8).to_be_bytes());
        assert_eq!(mad[36..48], [0, 0, 0, 0, 1, 0x11, 0x1c, 6, 1, 2, 3, 4]);
        assert_eq!(mad[120..127], *b"answer\0");
    }
    let none = cm.get_rdma_cm_event(Some(Duration::from_millis(100)));
    assert!(matches!(none, Err(siw::Error::Timeout)), "{none:?}");

    // Wrong ones.
    let changed = |at: usize, byte: u8| {
        let mut frame = sidr_request(mac, 1, 0x0111, 7174);
        frame[BTH + at] = byte;
        finish(frame)
    };
    rig.is_dropped(&changed(12, 0), "UD_QKEY");
    rig.is_dropped(&changed(2, 0x12), "UD_PKEY");
    rig.is_dropped(&changed(0, 4), "UD_OPCODE");
    // Base version, class (subnet administration), class version, method, attribute.
    for (at, byte) in [(0, 2), (1, 3), (2, 1), (3, 1), (17, 0x10)] {
        rig.is_dropped(&changed(20 + at, byte), "MAD_UNSUPPORTED");
    }
    let mut short = sidr_request(mac, 1, 0x0111, 7174);
    short.truncate(short.len() - 4);
    rig.is_dropped(&finish(short), "MAD_UNSUPPORTED");
    let mut wrong = changed(20 + 24, 9);
    wrong[BTH + 30] ^= 1;
    rig.is_dropped(&wrong, "UD_ICRC");
    assert!(rig.daemon.stop().success());
}

#[test]
fn a_flood_of_management_datagrams_is_cut_and_leaves_connections_alone() {
    skip_if!(lacks_network());
    let rig = Rig::new("[]");
    let (a, b) = pair_on(&rig.daemon, 4096, "siw0", "10.77.0.1:0");
    let frame = finish(sidr_request(rig.wire.mac, 5, 0x0111, 9));
    let is_over = AtomicBool::new(false);
    let pings = std::thread::scope(|scope| {
        let _guard = StopOnDrop(&is_over);
        let (is_over, frame, wire) = (&is_over, &frame, &rig.wire);
        scope.spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                wire.send(frame);
            }
        });
        let end = Instant::now() + Duration::from_secs(2);
        let mut pings = 0;
        while Instant::now() < end {
            ping(&a, &b);
            pings += 1;
        }
        pings
    });
    let dropped = drops(&rig.end, "MAD_FLOOD");
    println!("{pings} writes beside a flood, of which {dropped} were dropped");
    assert!(pings > 100 && dropped > 100);
    assert!(rig.daemon.stop().success());
}
