//! Two queue pairs: every kind of message, every interesting size, byte for byte.
mod common;
use common::*;
use siw_iwarp::mpa::RtrKind;
use siw_iwarp::*;
use siw_shm::wqe::{SendData, SendWr};
use siw_shm::{Access, Opcode, WcFlags, WcOpcode, WcStatus, WrFlags};

const SIZES: [usize; 17] = [
    0,
    1,
    4,
    63,
    64,
    65,
    1423,
    1424,
    1425,
    1427,
    1428,
    1429,
    1447,
    1448,
    1449,
    65536,
    1 << 20,
];

#[test]
fn a_write_of_any_size_arrives_and_completes_when_acknowledged() {
    for n in SIZES {
        let (mut a, mut b) = pair();
        let (src, mem) = a.env.mr(0x1000, n.max(1), Access::NONE);
        let data = pattern(n, 5);
        mem.write(0, &data).expect("in range");
        let (dst, out) = b.env.mr(0x7f00_0000_1000, n.max(1), REMOTE);
        let s = [sge(0x1000, n, src)];
        a.env
            .post(&remote(Opcode::Write, 1, &s, 0x7f00_0000_1000, dst));
        let bytes = a.pull_all();
        assert!(a.env.sent.is_empty(), "not before the ACK");
        b.give(&bytes);
        a.ack_all();
        assert_eq!(a.env.statuses(), [(1, WcStatus::SUCCESS)]);
        assert_eq!(contents(&out, n), data, "size {n}");
        assert_eq!(b.env.received.len(), 0);
    }
}

/// Conformance 60: a zero-length Send consumes a receive work request.
#[test]
fn c60_a_send_of_any_size_fills_one_receive_work_request() {
    for n in SIZES {
        let (mut a, mut b) = pair();
        let (src, mem) = a.env.mr(0, n.max(1), Access::NONE);
        let data = pattern(n, 9);
        mem.write(0, &data).expect("in range");
        let (dst, out) = b.env.mr(64, n + 5, Access::LOCAL_WRITE);
        b.env.post_recv(77, &[sge(64, n + 5, dst)]);
        a.env
            .post(&wr(Opcode::Send, 1, SendData::Sges(&[sge(0, n, src)])));
        run(&mut a, &mut b);
        assert_eq!(a.env.statuses(), [(1, WcStatus::SUCCESS)]);
        assert_eq!(b.env.recv_statuses(), [(77, WcStatus::SUCCESS)]);
        let c = b.env.received[0];
        assert_eq!(
            (c.byte_len as usize, c.opcode, c.qp_num),
            (n, WcOpcode::RECV, 3)
        );
        assert_eq!(contents(&out, n), data, "size {n}");
    }
}

#[test]
fn a_read_of_any_size_completes_when_its_data_is_placed() {
    for n in SIZES {
        let (mut a, mut b) = pair();
        let (dst, out) = a.env.mr(0x5000, n.max(1), Access::LOCAL_WRITE);
        let (src, mem) = b.env.mr(0x9000, n.max(1), Access::REMOTE_READ);
        let data = pattern(n, 1);
        mem.write(0, &data).expect("in range");
        let s = [sge(0x5000, n, dst)];
        a.env.post(&remote(Opcode::Read, 4, &s, 0x9000, src));
        let req = a.pull_all();
        b.give(&req);
        a.ack_all();
        assert!(a.env.sent.is_empty(), "not before the response");
        run(&mut a, &mut b);
        assert_eq!(a.env.statuses(), [(4, WcStatus::SUCCESS)]);
        assert_eq!(a.env.sent[0].expect("signaled").opcode, WcOpcode::RDMA_READ);
        assert_eq!(contents(&out, n), data, "size {n}");
        assert!(b.env.sent.is_empty() && b.env.received.is_empty());
    }
}

#[test]
fn many_elements_scatter_and_gather_across_fpdus() {
    let (mut a, mut b) = pair();
    let (src, mem) = a.env.mr(0, 8000, Access::NONE);
    let data = pattern(8000, 3);
    mem.write(0, &data).expect("in range");
    let (dst, out) = b.env.mr(0, 8000, Access::LOCAL_WRITE);
    // Gathered out of order, scattered in unequal pieces, empty elements in between.
    let from = [
        sge(4000, 4000, src),
        sge(0, 0, src),
        sge(0, 1, src),
        sge(1, 2999, src),
        sge(3000, 1000, src),
    ];
    let to = [
        sge(0, 1424, dst),
        sge(0, 0, dst),
        sge(1424, 1, dst),
        sge(1425, 6575, dst),
    ];
    b.env.post_recv(1, &to);
    a.env.post(&wr(Opcode::Send, 1, SendData::Sges(&from)));
    run(&mut a, &mut b);
    assert_eq!(b.env.recv_statuses(), [(1, WcStatus::SUCCESS)]);
    let mut want = data[4000..].to_vec();
    want.extend(&data[..4000]);
    assert!(contents(&out, 8000) == want);
}

#[test]
fn inline_data_needs_no_memory_key() {
    for n in [0, 1, 32, 33, 256] {
        let (mut a, mut b) = pair();
        let (dst, out) = b.env.mr(0, 256, REMOTE);
        let data = pattern(n, 2);
        a.env.post(&SendWr {
            rkey: dst.0,
            ..wr(Opcode::Write, 1, SendData::Inline(&data))
        });
        run(&mut a, &mut b);
        assert_eq!(a.env.statuses(), [(1, WcStatus::SUCCESS)]);
        assert_eq!(contents(&out, n), data);
    }
}

#[test]
fn sends_carry_solicited_and_invalidate() {
    let (mut a, mut b) = pair();
    let (key, _) = b.env.mr(0, 64, REMOTE);
    for i in 0..4 {
        b.env.post_recv(i, &[]);
    }
    for (i, (op, flags)) in [
        (Opcode::Send, WrFlags::NONE),
        (Opcode::Send, WrFlags::SOLICITED),
        (Opcode::SendWithInv, WrFlags::SOLICITED),
    ]
    .into_iter()
    .enumerate()
    {
        a.env.post(&SendWr {
            flags: flags | WrFlags::SIGNALED,
            imm: key.0,
            ..wr(op, i as u64, SendData::Sges(&[]))
        });
    }
    let opcodes: Vec<u8> = std::iter::from_fn(|| a.pull())
        .map(|f| {
            b.give(&f);
            ulpdu(&f)[1]
        })
        .collect();
    assert_eq!(opcodes, [0x43, 0x45, 0x46]);
    let flags: Vec<_> = b.env.received.iter().map(|c| (c.flags, c.imm)).collect();
    assert_eq!(
        flags,
        [
            (WcFlags::NONE, 0),
            (WcFlags::SOLICITED, 0),
            (WcFlags::SOLICITED | WcFlags::WITH_INV, key.0)
        ]
    );
    assert!(b.env.keys.lookup(key).is_none(), "invalidated");
}

#[test]
fn an_unsignalled_request_frees_its_slot_without_a_completion() {
    let (mut a, mut b) = pair();
    let (dst, _) = b.env.mr(0, 64, REMOTE);
    for i in 0..3 {
        a.env.post(&SendWr {
            flags: if i == 2 {
                WrFlags::SIGNALED
            } else {
                WrFlags::NONE
            },
            rkey: dst.0,
            ..wr(Opcode::Write, i, SendData::Inline(&[1, 2, 3]))
        });
    }
    run(&mut a, &mut b);
    assert_eq!(a.env.sent.len(), 3);
    assert_eq!(a.env.statuses(), [(2, WcStatus::SUCCESS)]);
}

/// RFC 5040 section 5.5: completions in posting order, also when a Read is answered late.
#[test]
fn completions_keep_the_posting_order() {
    let (mut a, mut b) = pair();
    let (l, _) = a.env.mr(0, 4096, Access::LOCAL_WRITE);
    let (r, _) = b.env.mr(0, 4096, REMOTE);
    let s = [sge(0, 100, l)];
    a.env.post(&remote(Opcode::Write, 1, &s, 0, r));
    a.env.post(&remote(Opcode::Read, 2, &s, 0, r));
    a.env.post(&remote(Opcode::Write, 3, &s, 0, r));
    let x = a.pull_all();
    b.give(&x);
    a.ack_all();
    assert_eq!(a.env.statuses(), [(1, WcStatus::SUCCESS)]);
    run(&mut a, &mut b);
    let ids: Vec<u64> = a.env.statuses().iter().map(|s| s.0).collect();
    assert_eq!(ids, [1, 2, 3]);
}

#[test]
fn the_ord_limit_stalls_the_send_queue() {
    let mut a = End::new(NegotiatedParameters {
        ord: 2,
        ..negotiated(true)
    });
    let mut b = End::new(negotiated(false));
    let (l, _) = a.env.mr(0, 4096, Access::LOCAL_WRITE);
    let (r, _) = b.env.mr(0, 4096, REMOTE);
    let s = [sge(0, 8, l)];
    for i in 0..5 {
        a.env.post(&remote(Opcode::Read, i, &s, 0, r));
    }
    let first = a.pull_all();
    assert_eq!(a.unacked.len(), 2);
    assert!(!a.qp.has_output(), "stalled");
    b.give(&first);
    a.ack_all();
    let one = b.pull().expect("first response");
    assert!(a.give(&one).has_output);
    let third = a.pull().expect("one place is free");
    assert!(a.pull().is_none());
    b.give(&third);
    run(&mut a, &mut b);
    assert_eq!(a.env.statuses().len(), 5);
}

#[test]
fn a_fence_waits_for_outstanding_reads() {
    let (mut a, mut b) = pair();
    let (l, _) = a.env.mr(0, 4096, Access::LOCAL_WRITE);
    let (r, _) = b.env.mr(0, 4096, REMOTE);
    let s = [sge(0, 8, l)];
    a.env.post(&remote(Opcode::Read, 1, &s, 0, r));
    a.env.post(&SendWr {
        flags: WrFlags::FENCE | WrFlags::SIGNALED,
        ..remote(Opcode::Write, 2, &s, 0, r)
    });
    let x = a.pull_all();
    assert_eq!(a.unacked.len(), 1, "only the Read left");
    b.give(&x);
    a.ack_all();
    run(&mut a, &mut b);
    assert_eq!(
        a.env.statuses(),
        [(1, WcStatus::SUCCESS), (2, WcStatus::SUCCESS)]
    );
}

#[test]
fn responses_and_requests_take_turns_message_by_message() {
    let (mut a, mut b) = pair();
    let (l, _) = a.env.mr(0, 8192, REMOTE);
    let (r, _) = b.env.mr(0, 8192, REMOTE);
    let s = [sge(0, 3000, l)];
    for i in 0..2 {
        a.env.post(&remote(Opcode::Read, i, &s, 0, r));
    }
    let x = a.pull_all();
    b.give(&x);
    let w = [sge(0, 3000, r)];
    for i in 0..3 {
        b.env.post(&remote(Opcode::Write, i, &w, 0, l));
    }
    let order: Vec<u8> = std::iter::from_fn(|| b.pull())
        .map(|f| ulpdu(&f)[1] & 15)
        .collect();
    assert_eq!(order, [0, 0, 0, 2, 2, 2, 0, 0, 0, 2, 2, 2, 0, 0, 0]);
}

/// Conformance 19, RFC 5044 section 7.1.2.
#[test]
fn c19_a_responder_keeps_quiet_until_the_first_fpdu_arrived() {
    let (mut a, mut b) = pair();
    let (key, _) = a.env.mr(0, 64, REMOTE);
    b.env.post(&SendWr {
        rkey: key.0,
        ..wr(Opcode::Write, 1, SendData::Inline(&[1]))
    });
    assert!(b.pull().is_none());
    a.env.post(&SendWr {
        rkey: 1,
        ..wr(Opcode::Write, 1, SendData::Sges(&[]))
    });
    let x = a.pull_all();
    let p = b.give(&x);
    assert!(p.first_fpdu);
    assert!(b.pull().is_some());
    assert!(!b.give(&write(1, 0, &[])).first_fpdu, "told once");
}

/// RFC 6581 section 9: the ready-to-receive message goes first and disturbs no numbering.
#[test]
fn each_kind_of_rtr_opens_the_stream() {
    for kind in [RtrKind::Write, RtrKind::Read, RtrKind::Send] {
        let n = |i| NegotiatedParameters {
            rtr: Some(kind),
            ..negotiated(i)
        };
        let (mut a, mut b) = (End::new(n(true)), End::new(n(false)));
        let (la, ma) = a.env.mr(0, 4096, REMOTE);
        let (lb, mb) = b.env.mr(0, 4096, REMOTE);
        ma.write(0, b"from a").expect("in range");
        mb.write(100, b"from b").expect("in range");
        b.env.post_recv(5, &[sge(0, 64, lb)]);
        b.env
            .post(&remote(Opcode::Write, 1, &[sge(100, 6, lb)], 100, la));
        a.env
            .post(&wr(Opcode::Send, 1, SendData::Sges(&[sge(0, 6, la)])));
        a.env
            .post(&remote(Opcode::Read, 2, &[sge(200, 6, la)], 100, lb));
        assert!(a.qp.has_output(), "the RTR leaves without a doorbell");
        let first = a.pull().expect("RTR");
        let u = ulpdu(&first);
        match kind {
            RtrKind::Write => assert_eq!((u.len(), &u[..2]), (14, &[0xc1, 0x40][..])),
            RtrKind::Read => assert_eq!((u.len(), &u[..2]), (46, &[0x41, 0x41][..])),
            RtrKind::Send => assert_eq!((u.len(), &u[..2]), (18, &[0x41, 0x43][..])),
        }
        if kind != RtrKind::Send {
            assert_ne!(tagged_of(&first).stag | u32::from(kind == RtrKind::Read), 0);
        }
        assert!(b.give(&first).first_fpdu);
        run(&mut a, &mut b);
        run(&mut a, &mut b);
        assert_eq!(a.env.statuses().len(), 2, "{kind:?}");
        assert_eq!(b.env.statuses(), [(1, WcStatus::SUCCESS)]);
        assert_eq!(b.env.recv_statuses(), [(5, WcStatus::SUCCESS)]);
        assert_eq!(&contents(&ma, 256)[100..106], b"from b");
        assert_eq!(&contents(&ma, 256)[200..206], b"from b");
        assert_eq!(&contents(&mb, 6), b"from a");
    }
}

/// Conformance 34, 35: the stream may be cut anywhere.
#[test]
fn c34_c35_fpdus_are_taken_from_any_cut_of_the_stream() {
    for cut in [1, 2, 3, 7, 64, 1447, 1449, 4000] {
        let mut b = End::new(negotiated(false));
        let mut a = End::new(negotiated(true));
        let (src, mem) = a.env.mr(0, 5000, Access::NONE);
        mem.write(0, &pattern(5000, 8)).expect("in range");
        let (dst, out) = b.env.mr(0, 5000, REMOTE);
        b.env.post_recv(1, &[sge(0, 11, dst)]);
        let s = [sge(0, 5000, src)];
        a.env.post(&remote(Opcode::Write, 1, &s, 0, dst));
        a.env
            .post(&wr(Opcode::Send, 2, SendData::Inline(b"hello world")));
        let bytes = a.pull_all();
        for c in bytes.chunks(cut) {
            b.give(c);
        }
        assert_eq!(b.env.recv_statuses(), [(1, WcStatus::SUCCESS)], "cut {cut}");
        assert_eq!(&contents(&out, 11), b"hello world");
        assert!(contents(&out, 5000)[11..] == pattern(5000, 8)[11..]);
        assert_eq!(b.rx.available(), 0);
    }
}

#[test]
fn an_fpdu_waits_until_all_of_it_fits() {
    let (mut a, b) = pair();
    let (src, _) = a.env.mr(0, 5000, Access::NONE);
    let (dst, _) = b.env.mr(0, 5000, REMOTE);
    a.env
        .post(&remote(Opcode::Write, 1, &[sge(0, 2000, src)], 0, dst));
    assert!(a.pull_room(1447).is_none());
    assert_eq!(a.pull_room(1448).map(|f| f.len()), Some(1448));
    assert!(a.qp.has_output());
    assert!(a.pull_room(100).is_none());
    let f = a.pull().expect("the rest");
    assert_eq!(ulpdu(&f).len() - 14, 2000 - 1428);
}

#[test]
fn a_record_is_rebuilt_identically_until_it_is_acknowledged() {
    let (mut a, b) = pair();
    let (src, mem) = a.env.mr(0, 5000, Access::NONE);
    mem.write(0, &pattern(5000, 8)).expect("in range");
    let (dst, _) = b.env.mr(0, 5000, REMOTE);
    a.env
        .post(&remote(Opcode::Write, 1, &[sge(0, 5000, src)], 0, dst));
    let first: Vec<Vec<u8>> = std::iter::from_fn(|| a.pull()).collect();
    a.qp.set_emss(512);
    for (rec, want) in a.unacked.iter().zip(&first) {
        let mut f = Frame::default();
        a.qp.build_fpdu(&a.env.keys, rec, &mut f)
            .expect("still there");
        assert!(&f.bytes == want);
    }
    let rec = a.unacked[0];
    a.ack_all();
    let mut f = Frame::default();
    assert_eq!(
        a.qp.build_fpdu(&a.env.keys, &rec, &mut f),
        Err(BuildError::MessageCompleted)
    );
}

#[test]
fn a_send_completes_only_when_the_port_released_its_buffers() {
    let (mut a, mut b) = pair();
    a.env.track = true;
    a.env.held = true;
    let (src, _) = a.env.mr(0, 64, Access::NONE);
    let (dst, _) = b.env.mr(0, 64, REMOTE);
    a.env
        .post(&remote(Opcode::Write, 1, &[sge(0, 64, src)], 0, dst));
    a.env.post(&remote(Opcode::Write, 2, &[], 0, dst));
    run(&mut a, &mut b);
    assert!(a.env.sent.is_empty());
    assert!(a.qp.is_awaiting_release());
    assert!(a.qp.poll_releases(&mut a.env));
    a.env.held = false;
    assert!(!a.qp.poll_releases(&mut a.env));
    assert_eq!(a.env.statuses().len(), 2);
    assert!(a.env.live.is_empty());
}

#[test]
fn an_idle_queue_pair_is_small() {
    let n = std::mem::size_of::<QueuePair>();
    println!(
        "QueuePair: {n} bytes, FpduRecord: {}",
        std::mem::size_of::<FpduRecord>()
    );
    assert!(n <= 512, "{n}");
    assert!(std::mem::size_of::<TxRecord>() <= 48);
}

/// Conformance 28.
#[test]
fn c28_without_crc_the_field_is_zero_and_garbage_is_accepted() {
    let n = |i| NegotiatedParameters {
        crc: false,
        ..negotiated(i)
    };
    let (mut a, mut b) = (End::new(n(true)), End::new(n(false)));
    let (dst, out) = b.env.mr(0, 64, REMOTE);
    a.env.post(&SendWr {
        rkey: dst.0,
        ..wr(Opcode::Write, 1, SendData::Inline(b"xyz"))
    });
    let mut f = a.pull().expect("leaves");
    let at = f.len() - 4;
    assert_eq!(f[at..], [0; 4]);
    f[at..].copy_from_slice(&[1, 2, 3, 4]);
    b.give(&f);
    assert_eq!(contents(&out, 3), b"xyz");
}
