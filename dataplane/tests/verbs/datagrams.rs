//! Queue pairs of datagrams (UD) over RoCEv2: between devices, within one, and wrong ones.

use std::net::IpAddr;
use std::time::Duration;

use siw::{
    Ah, AhAttr, AsyncEventKind, CONTROLLED_QKEY, Error, GRH_LEN, QpInit, QpState, RecvWr, SendData,
    SendWr, SrqInit, Wc, WcFlags, WcOpcode, WcStatus,
};

use crate::common::*;

const QKEY: u32 = 0x1111_1111;
/// Payload of the pair's longest datagrams: the path MTU below its MTU.
const LONGEST: usize = 1024;

fn init() -> QpInit {
    QpInit {
        max_send_sge: 2,
        max_recv_sge: 2,
        ..QpInit::default()
    }
}

/// A queue pair of datagrams on a device.
fn datagram_end(daemon: &Daemon, device: u32) -> End {
    let end = End::with(&daemon.context(), 16_384, &init());
    end.qp.start_datagrams(device, QKEY).unwrap();
    assert_eq!(end.qp.state(), Some(QpState::Rts));
    assert_eq!(end.qp.query().unwrap().state, Some(QpState::Rts));
    end
}

fn ah(end: &End, device: u32, to: &str) -> Ah {
    let attr = AhAttr {
        timeout: Some(Duration::from_secs(5)),
        ..AhAttr::new(device, to.parse().unwrap())
    };
    end.ctx.create_ah(&attr).unwrap()
}

fn post_receive(end: &End, wr_id: u64, at: usize, len: usize) {
    let sges = &[end.mr.sge(at, len)];
    end.qp.post_recv(&[RecvWr { wr_id, sges }]).unwrap();
}

fn send<'a>(data: &'a [u8], ah: &Ah, to: &End) -> SendWr<'a> {
    SendWr::send(1, SendData::Inline(data)).with_destination(ah.number(), to.qp.qp_num(), QKEY)
}

/// Number of drops by a reason, when it is no longer less than `least`.
fn drops(end: &End, reason: &str, least: u64) -> u64 {
    let deadline = std::time::Instant::now() + PATIENCE;
    loop {
        let text = end.ctx.read_stats().unwrap();
        let statistics: serde_json::Value = serde_json::from_str(&text).unwrap();
        let rows = statistics["drops"].as_array().unwrap().iter();
        let row = rows.clone().find(|row| row["reason"] == reason);
        let count = row.unwrap_or_else(|| panic!("no {reason}"))["count"].as_u64();
        if count.unwrap() >= least {
            return count.unwrap();
        }
        assert!(
            std::time::Instant::now() < deadline,
            "{reason}: {:?}",
            rows.filter(|row| row["count"] != 0).collect::<Vec<_>>()
        );
    }
}

#[test]
fn a_datagram_crosses_with_its_header_its_sender_and_immediate_data() {
    let daemon = Daemon::loopback();
    let (a, b) = (datagram_end(&daemon, 0), datagram_end(&daemon, 1));
    assert!(a.qp.qp_num() > 1);
    for (from, to) in [("10.77.0.1", "10.77.0.2"), ("fd77::1", "fd77::2")] {
        let ah = ah(&a, 0, to);
        for (len, imm) in [
            (0, None),
            (1, Some(7)),
            (63, None),
            (LONGEST, Some(u32::MAX)),
        ] {
            a.fill(len as u64 + 1);
            post_receive(&b, 9, 0, GRH_LEN + LONGEST);
            let first = len / 3;
            let sges = [a.mr.sge(100, first), a.mr.sge(4000, len - first)];
            let data = SendData::Sges(&sges);
            let request = match imm {
                None => SendWr::send(5, data),
                Some(imm) => SendWr::send_with_imm(5, data, imm),
            };
            let request = request.with_destination(ah.number(), b.qp.qp_num(), QKEY);
            a.qp.post_send(&[request]).unwrap();
            let sent = a.wc();
            assert_eq!((sent.wr_id, sent.status), (5, WcStatus::SUCCESS));
            assert_eq!(sent.opcode, WcOpcode::SEND);
            let got = b.wc();
            assert_eq!((got.wr_id, got.status), (9, WcStatus::SUCCESS));
            assert_eq!(got.byte_len as usize, GRH_LEN + len);
            assert_eq!(got.src_qp, a.qp.qp_num());
            assert!(got.flags.contains(WcFlags::GRH));
            assert_eq!(got.flags.contains(WcFlags::WITH_IMM), imm.is_some());
            assert_eq!(got.flags.contains(WcFlags::IPV4), !to.contains(':'));
            assert_eq!(got.imm, imm.unwrap_or(0));
            let grh = b.read(0, GRH_LEN);
            let (ends, next) = match from.parse().unwrap() {
                IpAddr::V4(from) => ([&from.octets()[..], &[10, 77, 0, 2]].concat(), grh[29]),
                IpAddr::V6(from) => {
                    let to: std::net::Ipv6Addr = to.parse().unwrap();
                    ([from.octets(), to.octets()].concat(), grh[6])
                }
            };
            assert_eq!((grh[GRH_LEN - ends.len()..].to_vec(), next), (ends, 17));
            let expected = [a.read(100, first), a.read(4000, len - first)].concat();
            assert_eq!(b.read(GRH_LEN, len), expected, "{len} bytes to {to}");
        }
    }
    assert!(daemon.stop().success());
}

#[test]
fn datagrams_reach_their_own_device_and_their_own_queue_pair() {
    let daemon = Daemon::loopback();
    let (a, b) = (datagram_end(&daemon, 0), datagram_end(&daemon, 0));
    let ah = ah(&a, 0, "10.77.0.1");
    for to in [&b, &a] {
        post_receive(to, 2, 0, 100);
        a.qp.post_send(&[send(b"to self", &ah, to)]).unwrap();
        let mut done = [a.wc(), to.wc()];
        done.sort_by_key(|wc| wc.wr_id);
        assert_eq!(done[1].byte_len as usize, GRH_LEN + 7);
        assert!(done.iter().all(|wc| wc.status == WcStatus::SUCCESS));
        assert_eq!(to.read(GRH_LEN, 7), b"to self");
    }
    assert!(daemon.stop().success());
}

/// Queue pairs are spread over the workers by their numbers, and all reach each other.
#[test]
fn queue_pairs_of_all_workers_reach_each_other() {
    skip_if!(two_cores());
    let config = LOOPBACK.replace("[workers]", "[workers]\ncores = [0, 1]");
    let daemon = Daemon::start(&config, &[]);
    let ends: Vec<_> = [0, 0, 1, 1]
        .map(|device| datagram_end(&daemon, device))
        .into();
    let handles =
        |end: &End, device| ["10.77.0.1", "10.77.0.2"].map(|address| ah(end, device, address));
    for (number, from) in ends.iter().enumerate() {
        let handles = handles(from, number as u32 / 2);
        for (other, to) in ends.iter().enumerate() {
            post_receive(to, 2, 0, 100);
            from.qp
                .post_send(&[send(b"hello", &handles[other / 2], to)])
                .unwrap();
            let mut done = [from.wc(), to.wc()];
            done.sort_by_key(|wc| wc.wr_id);
            assert_eq!(done.map(|wc| wc.status), [WcStatus::SUCCESS; 2]);
            assert_eq!(done[1].src_qp, from.qp.qp_num());
        }
    }
    assert!(daemon.stop().success());
}

#[test]
fn wrong_datagrams_are_dropped_and_counted_by_their_reason() {
    let daemon = Daemon::loopback();
    let (a, b) = (datagram_end(&daemon, 0), datagram_end(&daemon, 1));
    let ah = ah(&a, 0, "10.77.0.2");
    let send_to = |qpn, qkey| {
        let request = SendWr::send(1, SendData::Inline(b"lost"));
        let request = request.with_destination(ah.number(), qpn, qkey);
        a.qp.post_send(&[request]).unwrap();
        assert_eq!(a.wc().status, WcStatus::SUCCESS);
    };
    send_to(b.qp.qp_num(), QKEY);
    assert_eq!(drops(&a, "UD_NO_RECEIVE", 1), 1);
    post_receive(&b, 3, 0, 100);
    send_to(b.qp.qp_num(), QKEY + 1);
    assert_eq!(drops(&a, "UD_QKEY", 1), 1);
    send_to(99_999, QKEY);
    // A queue pair of the other device.
    send_to(a.qp.qp_num(), QKEY);
    assert_eq!(drops(&a, "UD_UNKNOWN_QP", 2), 2);
    // The Q_Key of the sending queue pair.
    send_to(b.qp.qp_num(), CONTROLLED_QKEY | 5);
    assert_eq!((b.wc().wr_id, b.qp.state()), (3, Some(QpState::Rts)));
    // A new Q_Key.
    b.qp.start_datagrams(1, 0x22).unwrap();
    post_receive(&b, 4, 0, 100);
    send_to(b.qp.qp_num(), QKEY);
    assert_eq!(drops(&a, "UD_QKEY", 2), 2);
    send_to(b.qp.qp_num(), 0x22);
    assert_eq!(b.wc().wr_id, 4);
    assert!(daemon.stop().success());
}

#[test]
fn lengths_beyond_the_limits_end_the_queue_pair() {
    let daemon = Daemon::loopback();
    let (a, b) = (datagram_end(&daemon, 0), datagram_end(&daemon, 1));
    let ah = ah(&a, 0, "10.77.0.2");
    post_receive(&b, 3, 0, GRH_LEN + 3);
    post_receive(&b, 4, 0, 100);
    a.qp.post_send(&[send(b"four", &ah, &b)]).unwrap();
    assert_eq!(a.wc().status, WcStatus::SUCCESS);
    let (short, flushed) = (b.wc(), b.wc());
    assert_eq!((short.wr_id, short.status), (3, WcStatus::LOC_LEN_ERR));
    assert_eq!((flushed.wr_id, flushed.status), (4, WcStatus::WR_FLUSH_ERR));
    let event = b.ctx.get_async_event(Some(PATIENCE)).unwrap();
    assert_eq!(event.kind, Some(AsyncEventKind::QpFatal));
    assert_eq!(b.qp.state(), Some(QpState::Error));

    let sges = [a.mr.sge(0, LONGEST + 1)];
    let long = SendWr::send(7, SendData::Sges(&sges));
    let long = long.with_destination(ah.number(), b.qp.qp_num(), QKEY);
    a.qp.post_send(&[long]).unwrap();
    assert_eq!(a.wc().status, WcStatus::LOC_LEN_ERR);
    let event = a.ctx.get_async_event(Some(PATIENCE)).unwrap();
    assert_eq!(event.kind, Some(AsyncEventKind::QpFatal));
    // The queue pair can be used again after a reset.
    assert!(a.qp.start_datagrams(0, QKEY).is_err());
    for (end, device) in [(&a, 0), (&b, 1)] {
        end.qp.reset().unwrap();
        end.qp.start_datagrams(device, QKEY).unwrap();
    }
    post_receive(&b, 5, 0, 100);
    a.qp.post_send(&[send(b"four", &ah, &b)]).unwrap();
    assert_eq!((a.wc().wr_id, b.wc().wr_id), (1, 5));
    assert!(daemon.stop().success());
}

fn errno(error: Error) -> i32 {
    error.errno()
}

#[test]
fn requests_with_wrong_handles_or_operations_fail() {
    let daemon = Daemon::loopback();
    let others = datagram_end(&daemon, 0);
    let foreign = ah(&others, 0, "10.77.0.2");
    let failing = |request: SendWr<'_>, status: WcStatus| {
        let end = datagram_end(&daemon, 0);
        end.qp.post_send(&[request]).unwrap();
        assert_eq!(end.wc().status, status, "{request:?}");
    };
    let to = SendWr::send(1, SendData::Inline(b"x"));
    let wrong = WcStatus::LOC_QP_OP_ERR;
    failing(to.with_destination(foreign.number(), 5, QKEY), wrong);
    failing(to.with_destination(77_777, 5, QKEY), wrong);
    failing(SendWr::write(1, SendData::Inline(b"x"), 0, 0), wrong);
    let end = datagram_end(&daemon, 0);
    let own = ah(&end, 0, "10.77.0.2");
    let sges = [siw::Sge {
        addr: end.mr.addr(),
        length: 8,
        lkey: end.mr.lkey() ^ 0x5500,
    }];
    let request = SendWr::send(1, SendData::Sges(&sges));
    end.qp
        .post_send(&[request.with_destination(own.number(), 5, QKEY)])
        .unwrap();
    assert_eq!(end.wc().status, WcStatus::LOC_PROT_ERR);
    // A connected queue pair sends no datagrams.
    let (a, _b) = pair(&daemon, 4096);
    assert_eq!(
        errno(a.qp.start_datagrams(0, QKEY).unwrap_err()),
        nix::libc::EISCONN
    );
    assert!(daemon.stop().success());
}

#[test]
fn address_handles_are_refused_with_the_reason() {
    let daemon = Daemon::loopback();
    let end = datagram_end(&daemon, 0);
    let refusal = |attr: AhAttr| errno(end.ctx.create_ah(&attr).unwrap_err());
    let to = |address: &str| AhAttr {
        timeout: Some(Duration::from_millis(50)),
        ..AhAttr::new(0, address.parse().unwrap())
    };
    assert_eq!(refusal(to("10.77.0.99")), nix::libc::ETIMEDOUT);
    assert_eq!(refusal(to("192.0.2.1")), nix::libc::EHOSTUNREACH);
    assert_eq!(refusal(to("0.0.0.0")), nix::libc::EINVAL);
    let from_elsewhere = AhAttr {
        local: Some("10.77.0.2".parse().unwrap()),
        ..to("10.77.0.2")
    };
    assert_eq!(refusal(from_elsewhere), nix::libc::EADDRNOTAVAIL);
    let no_device = AhAttr {
        device: 7,
        ..to("10.77.0.2")
    };
    assert_eq!(refusal(no_device), nix::libc::ENODEV);
    // Many handles, also of clients that leave, and numbers that are used again.
    for _ in 0..3 {
        let context = daemon.context();
        let handles: Vec<_> = (0..700)
            .map(|_| context.create_ah(&to("10.77.0.1")).unwrap())
            .collect();
        let mut numbers: Vec<_> = handles.iter().map(Ah::number).collect();
        numbers.dedup();
        assert_eq!(numbers.len(), handles.len());
    }
    assert!(daemon.stop().success());
}

#[test]
fn datagrams_take_requests_of_a_shared_receive_queue() {
    let daemon = Daemon::loopback();
    let a = datagram_end(&daemon, 0);
    let b = End::new(&daemon.context(), 4096);
    let srq_init = SrqInit {
        max_wr: 8,
        max_sge: 1,
        ..SrqInit::default()
    };
    let srq = b.pd.create_srq(&srq_init).unwrap();
    let qp =
        b.pd.create_qp_with_srq(&b.cq, &b.cq, &srq, &init())
            .unwrap();
    qp.start_datagrams(1, QKEY).unwrap();
    let sges = &[b.mr.sge(0, 100)];
    srq.post_recv(&[RecvWr { wr_id: 6, sges }]).unwrap();
    let ah = ah(&a, 0, "10.77.0.2");
    let request = SendWr::send(1, SendData::Inline(b"shared"));
    let request = request.with_destination(ah.number(), qp.qp_num(), QKEY);
    a.qp.post_send(&[request]).unwrap();
    let got: Wc = b.wc();
    assert_eq!((got.wr_id, got.qp_num), (6, qp.qp_num()));
    assert_eq!(b.read(GRH_LEN, 6), b"shared");
    qp.set_error().unwrap();
    let event = b.ctx.get_async_event(Some(PATIENCE)).unwrap();
    assert_eq!(event.kind, Some(AsyncEventKind::QpLastWqeReached));
    assert!(daemon.stop().success());
}

#[test]
fn the_removal_of_a_device_ends_its_queue_pairs_of_datagrams() {
    let daemon = Daemon::loopback();
    let (a, b) = (datagram_end(&daemon, 0), datagram_end(&daemon, 1));
    let ah = ah(&a, 0, "10.77.0.2");
    post_receive(&a, 8, 0, 100);
    daemon.context().remove_device(0, true).unwrap();
    let flushed = a.wc();
    assert_eq!((flushed.wr_id, flushed.status), (8, WcStatus::WR_FLUSH_ERR));
    loop {
        let event = a.ctx.get_async_event(Some(PATIENCE)).unwrap();
        if event.kind == Some(AsyncEventKind::QpFatal) {
            break;
        }
    }
    a.qp.post_send(&[send(b"late", &ah, &b)]).unwrap();
    assert_eq!(a.wc().status, WcStatus::WR_FLUSH_ERR);
    assert_eq!(b.qp.query().unwrap().state, Some(QpState::Rts));
    a.qp.reset().unwrap();
    let refused = errno(a.qp.start_datagrams(0, QKEY).unwrap_err());
    assert_eq!(refused, nix::libc::ENODEV);
    assert!(daemon.stop().success());
}

/// More datagrams than rings and port have room for: each request completes, and what arrives is whole.
#[test]
fn a_flood_of_datagrams_completes_every_request() {
    const COUNT: u64 = 20_000;
    let daemon = Daemon::loopback();
    let (a, b) = (datagram_end(&daemon, 0), datagram_end(&daemon, 1));
    let ah = ah(&a, 0, "10.77.0.2");
    for wr_id in 0..64 {
        post_receive(&b, wr_id, wr_id as usize * 128, 128);
    }
    let (mut posted, mut completed, mut received) = (0, 0, 0u64);
    let mut found = [Wc::default(); 32];
    while completed < COUNT {
        while posted < COUNT
            && a.qp
                .post_send(&[send(&u64::to_ne_bytes(posted), &ah, &b)])
                .is_ok()
        {
            posted += 1;
        }
        let count = a.cq.poll(&mut found).unwrap();
        assert!(
            found[..count]
                .iter()
                .all(|wc| wc.status == WcStatus::SUCCESS)
        );
        completed += count as u64;
        let count = b.cq.poll(&mut found).unwrap();
        for wc in &found[..count] {
            assert_eq!(
                (wc.status, wc.byte_len as usize),
                (WcStatus::SUCCESS, GRH_LEN + 8)
            );
            let at = wc.wr_id as usize * 128;
            let number = u64::from_ne_bytes(b.read(at + GRH_LEN, 8).try_into().unwrap());
            assert!(number < COUNT);
            received += 1;
            post_receive(&b, wc.wr_id, at, 128);
        }
    }
    println!("{received} of {COUNT} datagrams were received");
    assert!(received > 0);
    assert!(daemon.stop().success());
}
