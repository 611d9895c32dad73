//! WRITE, READ and SEND end to end: application, shared memory, worker, iWARP, TCP, DPDK rings, and
//! back up.

use crate::common::*;
use siw::{CmEvent, ConnectOptions, Opcode, RecvWr, SendData, SendWr, WcOpcode, WcStatus, WrFlags};

#[test]
fn a_write_of_every_awkward_size_arrives_byte_for_byte() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 256 * 1024);
    a.fill(7);
    for len in [
        0, 1, 3, 4, 63, 64, 65, 511, 512, 513, 1427, 1428, 1429, 2856, 65_536, 200_000,
    ] {
        b.mr.write(0, &vec![0; len + 64]).unwrap();
        let wr = SendWr {
            opcode: Opcode::Write,
            flags: WrFlags::SIGNALED,
            wr_id: len as u64,
            imm: 0,
            remote_addr: b.mr.addr(),
            rkey: b.mr.rkey(),
            data: SendData::Sges(&[a.mr.sge(0, len)]),
        };
        a.qp.post_send(&[wr]).unwrap();
        let wc = a.wc();
        assert_eq!((wc.status, wc.wr_id), (WcStatus::SUCCESS, len as u64));
        assert_eq!(b.read(0, len), a.read(0, len), "{len} bytes");
        assert_eq!(b.read(len, 64), vec![0; 64], "nothing beyond {len} bytes");
    }
}

#[test]
fn a_read_brings_the_peers_bytes() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 256 * 1024);
    b.fill(11);
    for len in [0, 1, 64, 1428, 1429, 100_000] {
        let wr = SendWr {
            opcode: Opcode::Read,
            flags: WrFlags::SIGNALED,
            wr_id: 5,
            imm: 0,
            remote_addr: b.mr.addr(),
            rkey: b.mr.rkey(),
            data: SendData::Sges(&[a.mr.sge(0, len)]),
        };
        a.qp.post_send(&[wr]).unwrap();
        let wc = a.wc();
        assert_eq!(
            (wc.status, wc.opcode),
            (WcStatus::SUCCESS, WcOpcode::RDMA_READ)
        );
        assert_eq!(a.read(0, len), b.read(0, len));
    }
}

#[test]
fn sends_meet_receives_in_order_and_say_their_length() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 256 * 1024);
    a.fill(3);
    let sizes = [0usize, 5, 64, 1424, 1425, 30_000];
    for (i, _) in sizes.iter().enumerate() {
        let sge = [b.mr.sge(i * 32_768, 32_768)];
        b.qp.post_recv(&[RecvWr {
            wr_id: i as u64,
            sges: &sge,
        }])
        .unwrap();
    }
    for (i, len) in sizes.iter().enumerate() {
        let sge = [a.mr.sge(i, *len)];
        a.qp.post_send(&[SendWr::send(100 + i as u64, SendData::Sges(&sge))])
            .unwrap();
    }
    for (i, len) in sizes.iter().enumerate() {
        let wc = b.wc();
        assert_eq!((wc.status, wc.wr_id), (WcStatus::SUCCESS, i as u64));
        assert_eq!(wc.byte_len as usize, *len);
        assert_eq!(b.read(i * 32_768, *len), a.read(i, *len));
    }
}

#[test]
fn a_send_with_invalidate_takes_the_key_away() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let victim = b.pd.alloc_mr(4096, ALL).unwrap();
    b.qp.post_recv(&[RecvWr {
        wr_id: 1,
        sges: &[b.mr.sge(0, 64)],
    }])
    .unwrap();
    let inv = SendWr {
        opcode: Opcode::SendWithInv,
        flags: WrFlags::SIGNALED,
        wr_id: 1,
        imm: victim.rkey(),
        remote_addr: 0,
        rkey: 0,
        data: SendData::Sges(&[a.mr.sge(0, 8)]),
    };
    a.qp.post_send(&[inv]).unwrap();
    let wc = b.wc();
    assert_eq!((wc.status, wc.imm), (WcStatus::SUCCESS, victim.rkey()));
    assert_eq!(a.wc().status, WcStatus::SUCCESS);
    let write = SendWr {
        opcode: Opcode::Write,
        flags: WrFlags::SIGNALED,
        wr_id: 2,
        imm: 0,
        remote_addr: victim.addr(),
        rkey: victim.rkey(),
        data: SendData::Sges(&[a.mr.sge(0, 8)]),
    };
    a.qp.post_send(&[write]).unwrap();
    assert_ne!(
        a.wc().status,
        WcStatus::SUCCESS,
        "the key must not work any more"
    );
}

#[test]
fn a_connection_to_the_devices_own_address_works() {
    let daemon = Daemon::loopback();
    for to in ["10.77.0.1:0", "[fd77::1]:0"] {
        let (a, b) = (
            End::new(&daemon.context(), 65_536),
            End::new(&daemon.context(), 65_536),
        );
        connect(&a, &b, "siw0", to.parse().unwrap());
        a.fill(5);
        write(&a, &b, 60_000);
        assert_eq!(a.wc().status, WcStatus::SUCCESS);
        assert_eq!(a.read(0, 60_000), b.read(0, 60_000));
    }
}

#[test]
fn connections_run_over_ipv6_without_crc_and_with_mpa_revision_1() {
    let daemon = Daemon::loopback();
    for (crc, rev) in [(Some(false), None), (None, Some(1)), (Some(true), Some(1))] {
        let opt = ConnectOptions {
            crc,
            mpa_rev: rev,
            ..Default::default()
        };
        let (a, b) = (
            End::new(&daemon.context(), 65_536),
            End::new(&daemon.context(), 65_536),
        );
        connect_with(&a, &b, "siw0", "[fd77::2]:0".parse().unwrap(), &opt);
        a.fill(9);
        write(&a, &b, 50_000);
        assert_eq!(a.wc().status, WcStatus::SUCCESS);
        assert_eq!(a.read(0, 50_000), b.read(0, 50_000));
    }
}

#[test]
fn private_data_travels_both_ways_and_a_reject_brings_its_own() {
    let daemon = Daemon::loopback();
    let (a, b) = (
        End::new(&daemon.context(), 4096),
        End::new(&daemon.context(), 4096),
    );
    let listener =
        siw::CmListener::new(&b.cm, None, "10.77.0.2:0".parse().unwrap(), 8, 77).unwrap();
    let opt = ConnectOptions {
        private_data: b"who is there",
        cookie: 4,
        ..Default::default()
    };
    a.qp.connect(&a.cm, listener.local_addr(), &opt).unwrap();
    let CmEvent::ConnectRequest(request) = b.cm.get_event(Some(PATIENCE)).unwrap() else {
        panic!("no request");
    };
    assert_eq!(request.connection_info().private_data, b"who is there");
    assert_eq!(request.connection_info().cookie, 77);
    request.reject(b"nobody").unwrap();
    match a.cm.get_event(Some(PATIENCE)).unwrap() {
        CmEvent::Rejected(info) => {
            assert_eq!(info.private_data, b"nobody");
            assert_eq!(info.cookie, 4);
        }
        other => panic!("{other:?}"),
    }
    // The same queue pair may connect again.
    a.qp.connect(&a.cm, listener.local_addr(), &opt).unwrap();
    let CmEvent::ConnectRequest(request) = b.cm.get_event(Some(PATIENCE)).unwrap() else {
        panic!("no request");
    };
    let answer = ConnectOptions {
        private_data: b"me",
        ..Default::default()
    };
    request.accept(&b.qp, None, &answer).unwrap();
    match a.cm.get_event(Some(PATIENCE)).unwrap() {
        CmEvent::Established(info) => assert_eq!(info.private_data, b"me"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn connecting_where_nobody_listens_is_told_at_once() {
    let daemon = Daemon::loopback();
    let a = End::new(&daemon.context(), 4096);
    a.qp.connect(
        &a.cm,
        "10.77.0.2:9".parse().unwrap(),
        &ConnectOptions::default(),
    )
    .unwrap();
    match a.cm.get_event(Some(PATIENCE)).unwrap() {
        CmEvent::Rejected(info) => assert!(info.reason.contains("nothing listens"), "{info:?}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_disconnect_reaches_both_sides_and_flushes_what_is_posted() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    b.qp.post_recv(&[RecvWr {
        wr_id: 9,
        sges: &[b.mr.sge(0, 64)],
    }])
    .unwrap();
    a.qp.disconnect().unwrap();
    for end in [&a, &b] {
        match end.cm.get_event(Some(PATIENCE)).unwrap() {
            CmEvent::Disconnected(_) => {}
            other => panic!("{other:?}"),
        }
    }
    let wc = b.wc();
    assert_eq!((wc.status, wc.wr_id), (WcStatus::WR_FLUSH_ERR, 9));
}

#[test]
fn an_unknown_remote_key_ends_the_connection_with_a_protection_error() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let wr = SendWr {
        opcode: Opcode::Write,
        flags: WrFlags::SIGNALED,
        wr_id: 1,
        imm: 0,
        remote_addr: b.mr.addr(),
        rkey: b.mr.rkey() ^ 0x55,
        data: SendData::Sges(&[a.mr.sge(0, 8)]),
    };
    a.qp.post_send(&[wr]).unwrap();
    let wc = a.wc();
    assert_ne!(wc.status, WcStatus::SUCCESS);
    let event = b.ctx.get_async_event(Some(PATIENCE)).unwrap();
    assert_eq!(event.object, b.qp.qp_num());
}

#[test]
fn an_unknown_local_key_and_a_length_beyond_the_region_are_protection_errors() {
    let daemon = Daemon::loopback();
    for bad in 0..2 {
        let (a, b) = pair(&daemon, 4096);
        let mut sge = a.mr.sge(0, 64);
        if bad == 0 {
            sge.lkey ^= 0x5500;
        } else {
            sge.length = 1 << 30;
        }
        a.qp.post_send(&[SendWr {
            opcode: Opcode::Write,
            flags: WrFlags::NONE,
            wr_id: 3,
            imm: 0,
            remote_addr: b.mr.addr(),
            rkey: b.mr.rkey(),
            data: SendData::Sges(&[sge]),
        }])
        .unwrap();
        let wc = a.wc();
        assert_eq!((wc.status, wc.wr_id), (WcStatus::LOC_PROT_ERR, 3));
    }
}

#[test]
fn a_send_without_a_receive_ends_the_connection() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    a.qp.post_send(&[SendWr::send(1, SendData::Sges(&[a.mr.sge(0, 8)]))])
        .unwrap();
    // TCP has acknowledged the bytes, so the send itself may complete; both ends close.
    for end in [&a, &b] {
        match end.cm.get_event(Some(PATIENCE)).unwrap() {
            CmEvent::Disconnected(_) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn an_armed_queue_wakes_its_reader_once() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let channel = siw::CompletionChannel::new(&b.ctx).unwrap();
    let cq = siw::Cq::new(&b.ctx, 16, Some((&channel, 42))).unwrap();
    let qp = b.pd.create_qp(&cq, &cq, &siw::QpInit::default()).unwrap();
    let c = End::new(&a.ctx, 4096);
    let listener = siw::CmListener::new(&b.cm, None, "10.77.0.2:0".parse().unwrap(), 8, 0).unwrap();
    c.qp.connect(&c.cm, listener.local_addr(), &ConnectOptions::default())
        .unwrap();
    let CmEvent::ConnectRequest(request) = b.cm.get_event(Some(PATIENCE)).unwrap() else {
        panic!("no request");
    };
    request
        .accept(&qp, None, &ConnectOptions::default())
        .unwrap();
    assert!(matches!(
        c.cm.get_event(Some(PATIENCE)).unwrap(),
        CmEvent::Established(_)
    ));
    for i in 0..3 {
        qp.post_recv(&[RecvWr {
            wr_id: i,
            sges: &[b.mr.sge(0, 64)],
        }])
        .unwrap();
    }
    cq.req_notify(false).unwrap();
    c.qp.post_send(&[SendWr::send(1, SendData::Sges(&[c.mr.sge(0, 8)]))])
        .unwrap();
    assert_eq!(channel.get_event(Some(PATIENCE)).unwrap(), 42);
    let mut wc = [siw::Wc::default(); 4];
    assert_eq!(cq.poll(&mut wc).unwrap(), 1);
    // Not armed, so the next completion raises no event.
    c.qp.post_send(&[SendWr::send(2, SendData::Sges(&[c.mr.sge(0, 8)]))])
        .unwrap();
    assert_eq!(cq.poll_spin(&mut wc, PATIENCE).unwrap(), 1);
    assert!(channel.get_event(Some(std::time::Duration::ZERO)).is_err());
}

#[test]
fn many_connections_at_once_keep_their_data_apart() {
    let daemon = Daemon::loopback();
    let (ca, cb) = (daemon.context(), daemon.context());
    let pairs: Vec<(End, End)> = (0..32)
        .map(|i| {
            let (a, b) = (End::new(&ca, 32_768), End::new(&cb, 32_768));
            connect(&a, &b, "siw0", "10.77.0.2:0".parse().unwrap());
            a.fill(i + 1);
            (a, b)
        })
        .collect();
    for (a, b) in &pairs {
        write(a, b, 32_768);
    }
    for (a, b) in &pairs {
        assert_eq!(a.wc().status, WcStatus::SUCCESS);
        assert_eq!(a.read(0, 32_768), b.read(0, 32_768));
    }
}

#[test]
fn immediate_data_arrives_with_a_write_and_with_a_send() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 65_536);
    a.fill(21);
    for wr_id in 0..2 {
        let sge = [b.mr.sge(0, 64)];
        b.qp.post_recv(&[RecvWr { wr_id, sges: &sge }]).unwrap();
    }
    let sge = [a.mr.sge(0, 40_000)];
    let data = SendData::Sges(&sge);
    let wr = SendWr::write_with_imm(1, data, b.mr.addr() + 64, b.mr.rkey(), 0xdead_beef);
    a.qp.post_send(&[wr]).unwrap();
    let wc = b.wc();
    assert_eq!(
        (wc.status, wc.opcode, wc.wr_id),
        (WcStatus::SUCCESS, WcOpcode::RECV_RDMA_WITH_IMM, 0)
    );
    assert_eq!(wc.imm, 0xdead_beef);
    assert_eq!(b.read(64, 25_000), a.read(0, 25_000));
    let sge = [a.mr.sge(100, 32)];
    a.qp.post_send(&[SendWr::send_with_imm(2, SendData::Sges(&sge), 7)])
        .unwrap();
    let wc = b.wc();
    assert_eq!((wc.opcode, wc.imm, wc.byte_len), (WcOpcode::RECV, 7, 32));
    assert_eq!(b.read(0, 32), a.read(100, 32));
}

#[test]
fn atomics_change_the_peers_word_and_bring_its_old_value() {
    let daemon = Daemon::loopback();
    let (a, b) = (
        End::new(&daemon.context(), 4096),
        End::new(&daemon.context(), 4096),
    );
    connect(&a, &b, "siw0", "10.77.0.2:0".parse().unwrap());
    let word = b.pd.alloc_mr(4096, siw::Access(15)).unwrap();
    word.write(0, &40u64.to_ne_bytes()).unwrap();
    let old = || u64::from_ne_bytes(a.read(0, 8).try_into().unwrap());
    let now = || {
        let mut v = [0; 8];
        word.read(0, &mut v).unwrap();
        u64::from_ne_bytes(v)
    };
    let sge = a.mr.sge(0, 8);
    a.qp.post_send(&[SendWr::fetch_add(1, sge, word.addr(), word.rkey(), 2)])
        .unwrap();
    assert_eq!((a.wc().status, old(), now()), (WcStatus::SUCCESS, 40, 42));
    a.qp.post_send(&[SendWr::cmp_swap(2, sge, word.addr(), word.rkey(), 42, 7)])
        .unwrap();
    assert_eq!((a.wc().status, old(), now()), (WcStatus::SUCCESS, 42, 7));
    a.qp.post_send(&[SendWr::cmp_swap(3, sge, word.addr(), word.rkey(), 42, 9)])
        .unwrap();
    assert_eq!((a.wc().status, old(), now()), (WcStatus::SUCCESS, 7, 7));
}

#[test]
fn markers_of_both_sides_change_no_byte() {
    let config = LOOPBACK.replace(
        "[[device]]\nname = \"siw1\"",
        "[device.mpa]\nmarkers = \"request\"\n[[device]]\nname = \"siw1\"",
    );
    let daemon = Daemon::start(
        &format!("{config}[device.mpa]\nmarkers = \"request\"\n"),
        &[],
    );
    let (a, b) = pair(&daemon, 200_000);
    a.fill(17);
    for len in [1, 500, 512, 1400, 1428, 100_000, 200_000] {
        b.mr.write(0, &vec![0; len]).unwrap();
        write(&a, &b, len);
        assert_eq!(a.wc().status, WcStatus::SUCCESS);
        assert_eq!(a.read(0, len), b.read(0, len), "{len} bytes");
    }
}

#[test]
fn two_workers_share_the_connections_and_one_completion_queue_serves_both() {
    let allowed = std::thread::available_parallelism().map_or(1, usize::from);
    if allowed < 2 {
        println!("skipped: one core, two are needed");
        return;
    }
    let daemon = Daemon::start(
        &LOOPBACK.replace("[workers]", "[workers]\ncores = [0, 1]"),
        &[],
    );
    let (ca, cb) = (daemon.context(), daemon.context());
    let first = End::new(&ca, 4096);
    let ends: Vec<(End, End)> = (0..8)
        .map(|_| {
            let mut a = End::new(&ca, 65_536);
            a.qp =
                a.pd.create_qp(&first.cq, &first.cq, &siw::QpInit::default())
                    .unwrap();
            let b = End::new(&cb, 65_536);
            connect(&a, &b, "siw0", "10.77.0.2:0".parse().unwrap());
            a.fill(u64::from(a.qp.qp_num()));
            (a, b)
        })
        .collect();
    for (a, b) in &ends {
        write(a, b, 65_536);
    }
    for _ in &ends {
        assert_eq!(first.wc().status, WcStatus::SUCCESS);
    }
    for (a, b) in &ends {
        assert_eq!(a.read(0, 65_536), b.read(0, 65_536));
    }
    let stats: serde_json::Value = serde_json::from_str(&ca.read_stats().unwrap()).unwrap();
    for w in 0..2 {
        assert_eq!(stats["workers"][w]["queue_pairs"], 8, "{stats}");
    }
}

/// The timestamps in the segments of a connection never decrease, regardless of the code path:
/// data, acknowledgements, window updates (RFC 7323 section 5).
#[test]
fn bulk_reads_lose_no_segment_to_old_timestamps() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 1 << 20);
    b.fill(31);
    for _ in 0..16 {
        let sge = [a.mr.sge(0, 1 << 20)];
        let wr = SendWr::read(1, &sge, b.mr.addr(), b.mr.rkey());
        a.qp.post_send(&[wr; 8]).unwrap();
        for _ in 0..8 {
            assert_eq!(a.wc().status, WcStatus::SUCCESS);
        }
    }
    assert_eq!(a.read(0, 1 << 20), b.read(0, 1 << 20));
    let stats: serde_json::Value = serde_json::from_str(&a.ctx.read_stats().unwrap()).unwrap();
    for device in stats["workers"][0]["devices"].as_array().unwrap() {
        assert_eq!(device["tcp"]["paws_drops"], 0, "{stats}");
    }
}

/// RFC 5044 section 7.1.2: without an RTR message the responder does not send until the initiator's
/// first FPDU.
#[test]
fn what_a_responder_posts_early_leaves_with_the_initiators_first_fpdu() {
    let daemon = Daemon::loopback();
    let (a, b) = (
        End::new(&daemon.context(), 4096),
        End::new(&daemon.context(), 4096),
    );
    let sge = [a.mr.sge(0, 64)];
    a.qp.post_recv(&[RecvWr {
        wr_id: 9,
        sges: &sge,
    }])
    .unwrap();
    let opt = ConnectOptions {
        mpa_rev: Some(1),
        ..Default::default()
    };
    connect_with(&a, &b, "siw0", "10.77.0.2:0".parse().unwrap(), &opt);
    b.qp.post_send(&[SendWr::send(1, SendData::Inline(b"early"))])
        .unwrap();
    // An answer to a later request shows that the worker has seen the doorbell.
    b.ctx.read_stats().unwrap();
    write(&a, &b, 8);
    for _ in 0..2 {
        let wc = a.wc();
        assert_eq!(wc.status, WcStatus::SUCCESS);
    }
    assert_eq!(a.read(0, 5), b"early");
}

fn write(a: &End, b: &End, len: usize) {
    let wr = SendWr {
        opcode: Opcode::Write,
        flags: WrFlags::SIGNALED,
        wr_id: 1,
        imm: 0,
        remote_addr: b.mr.addr(),
        rkey: b.mr.rkey(),
        data: SendData::Sges(&[a.mr.sge(0, len)]),
    };
    a.qp.post_send(&[wr]).unwrap();
}
