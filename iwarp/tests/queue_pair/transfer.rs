//! Two queue pairs: every kind of message and every relevant size, compared byte for byte.
use crate::common::*;
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
fn write_of_any_size_completes_when_acknowledged() {
    for len in SIZES {
        let (mut initiator, mut responder) = pair();
        let (src, mem) = initiator.env.mr(0x1000, len.max(1), Access::NONE);
        let data = pattern(len, 5);
        mem.write(0, &data).expect("in range");
        let (dst, out) = responder.env.mr(0x7f00_0000_1000, len.max(1), REMOTE);
        let sges = [sge(0x1000, len, src)];
        initiator
            .env
            .post(&remote(Opcode::Write, 1, &sges, 0x7f00_0000_1000, dst));
        let bytes = initiator.pull_all();
        assert!(initiator.env.sent.is_empty(), "not before the ACK");
        responder.give(&bytes);
        initiator.ack_all();
        assert_eq!(initiator.env.statuses(), [(1, WcStatus::SUCCESS)]);
        assert_eq!(contents(&out, len), data, "size {len}");
        assert_eq!(responder.env.received.len(), 0);
    }
}

/// A responder waits for the initiator's first FPDU, unless it is told that this initiator waits, too.
#[test]
fn a_responder_sends_first_only_if_it_is_told_to() {
    let (mut initiator, mut responder) = (End::new(negotiated(true)), End::new(negotiated(false)));
    let (dst, out) = initiator.env.mr(64, 4, Access::LOCAL_WRITE);
    initiator.env.post_recv(77, &[sge(64, 4, dst)]);
    let word = SendData::Inline(b"word");
    responder.env.post(&wr(Opcode::Send, 1, word));
    assert!(responder.qp.is_awaiting_first_fpdu());
    assert!(responder.pull_all().is_empty());
    responder.qp.send_before_first_fpdu();
    assert!(!responder.qp.is_awaiting_first_fpdu() && !responder.qp.has_received());
    run(&mut responder, &mut initiator);
    assert_eq!(initiator.env.recv_statuses(), [(77, WcStatus::SUCCESS)]);
    assert_eq!(contents(&out, 4), b"word");
    assert_eq!(responder.env.statuses(), [(1, WcStatus::SUCCESS)]);
}

/// Conformance 60: a zero-length Send consumes a receive work request.
#[test]
fn c60_send_of_any_size_fills_one_receive_work_request() {
    for len in SIZES {
        let (mut initiator, mut responder) = pair();
        let (src, mem) = initiator.env.mr(0, len.max(1), Access::NONE);
        let data = pattern(len, 9);
        mem.write(0, &data).expect("in range");
        let (dst, out) = responder.env.mr(64, len + 5, Access::LOCAL_WRITE);
        responder.env.post_recv(77, &[sge(64, len + 5, dst)]);
        initiator
            .env
            .post(&wr(Opcode::Send, 1, SendData::Sges(&[sge(0, len, src)])));
        run(&mut initiator, &mut responder);
        assert_eq!(initiator.env.statuses(), [(1, WcStatus::SUCCESS)]);
        assert_eq!(responder.env.recv_statuses(), [(77, WcStatus::SUCCESS)]);
        let wc = responder.env.received[0];
        assert_eq!(
            (wc.byte_len as usize, wc.opcode, wc.qp_num),
            (len, WcOpcode::RECV, 3)
        );
        assert_eq!(contents(&out, len), data, "size {len}");
    }
}

#[test]
fn read_of_any_size_completes_when_its_data_is_placed() {
    for len in SIZES {
        let (mut initiator, mut responder) = pair();
        let (dst, out) = initiator.env.mr(0x5000, len.max(1), Access::LOCAL_WRITE);
        let (src, mem) = responder.env.mr(0x9000, len.max(1), Access::REMOTE_READ);
        let data = pattern(len, 1);
        mem.write(0, &data).expect("in range");
        let sges = [sge(0x5000, len, dst)];
        initiator
            .env
            .post(&remote(Opcode::Read, 4, &sges, 0x9000, src));
        let req = initiator.pull_all();
        responder.give(&req);
        initiator.ack_all();
        assert!(initiator.env.sent.is_empty(), "not before the response");
        run(&mut initiator, &mut responder);
        assert_eq!(initiator.env.statuses(), [(4, WcStatus::SUCCESS)]);
        assert_eq!(
            initiator.env.sent[0].expect("signaled").opcode,
            WcOpcode::RDMA_READ
        );
        assert_eq!(contents(&out, len), data, "size {len}");
        assert!(responder.env.sent.is_empty() && responder.env.received.is_empty());
    }
}

#[test]
fn many_elements_scatter_and_gather_across_fpdus() {
    let (mut initiator, mut responder) = pair();
    let (src, mem) = initiator.env.mr(0, 8000, Access::NONE);
    let data = pattern(8000, 3);
    mem.write(0, &data).expect("in range");
    let (dst, out) = responder.env.mr(0, 8000, Access::LOCAL_WRITE);
    // Gathered out of order, scattered into unequal pieces, with empty elements in between.
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
    responder.env.post_recv(1, &to);
    initiator
        .env
        .post(&wr(Opcode::Send, 1, SendData::Sges(&from)));
    run(&mut initiator, &mut responder);
    assert_eq!(responder.env.recv_statuses(), [(1, WcStatus::SUCCESS)]);
    let mut want = data[4000..].to_vec();
    want.extend(&data[..4000]);
    assert!(contents(&out, 8000) == want);
}

#[test]
fn inline_data_needs_no_memory_key() {
    for len in [0, 1, 32, 33, 256] {
        let (mut initiator, mut responder) = pair();
        let (dst, out) = responder.env.mr(0, 256, REMOTE);
        let data = pattern(len, 2);
        initiator.env.post(&SendWr {
            rkey: dst.0,
            ..wr(Opcode::Write, 1, SendData::Inline(&data))
        });
        run(&mut initiator, &mut responder);
        assert_eq!(initiator.env.statuses(), [(1, WcStatus::SUCCESS)]);
        assert_eq!(contents(&out, len), data);
    }
}

#[test]
fn sends_carry_solicited_and_invalidate() {
    let (mut initiator, mut responder) = pair();
    let (key, _) = responder.env.mr(0, 64, REMOTE);
    for i in 0..4 {
        responder.env.post_recv(i, &[]);
    }
    for (i, (op, flags)) in [
        (Opcode::Send, WrFlags::NONE),
        (Opcode::Send, WrFlags::SOLICITED),
        (Opcode::SendWithInv, WrFlags::SOLICITED),
    ]
    .into_iter()
    .enumerate()
    {
        initiator.env.post(&SendWr {
            flags: flags | WrFlags::SIGNALED,
            imm: key.0,
            ..wr(op, i as u64, SendData::Sges(&[]))
        });
    }
    let opcodes: Vec<u8> = std::iter::from_fn(|| initiator.pull())
        .map(|fpdu| {
            responder.give(&fpdu);
            ulpdu(&fpdu)[1]
        })
        .collect();
    assert_eq!(opcodes, [0x43, 0x45, 0x46]);
    let flags: Vec<_> = responder
        .env
        .received
        .iter()
        .map(|wc| (wc.flags, wc.imm))
        .collect();
    assert_eq!(
        flags,
        [
            (WcFlags::NONE, 0),
            (WcFlags::SOLICITED, 0),
            (WcFlags::SOLICITED | WcFlags::WITH_INV, key.0)
        ]
    );
    assert!(responder.env.keys.lookup(key).is_none(), "invalidated");
}

#[test]
fn unsignalled_request_frees_its_slot_only() {
    let (mut initiator, mut responder) = pair();
    let (dst, _) = responder.env.mr(0, 64, REMOTE);
    for i in 0..3 {
        initiator.env.post(&SendWr {
            flags: if i == 2 {
                WrFlags::SIGNALED
            } else {
                WrFlags::NONE
            },
            rkey: dst.0,
            ..wr(Opcode::Write, i, SendData::Inline(&[1, 2, 3]))
        });
    }
    run(&mut initiator, &mut responder);
    assert_eq!(initiator.env.sent.len(), 3);
    assert_eq!(initiator.env.statuses(), [(2, WcStatus::SUCCESS)]);
}

/// RFC 5040 section 5.5: completions in posting order, also when a Read is answered late.
#[test]
fn completions_keep_the_posting_order() {
    let (mut initiator, mut responder) = pair();
    let (l, _) = initiator.env.mr(0, 4096, Access::LOCAL_WRITE);
    let (request, _) = responder.env.mr(0, 4096, REMOTE);
    let sges = [sge(0, 100, l)];
    initiator
        .env
        .post(&remote(Opcode::Write, 1, &sges, 0, request));
    initiator
        .env
        .post(&remote(Opcode::Read, 2, &sges, 0, request));
    initiator
        .env
        .post(&remote(Opcode::Write, 3, &sges, 0, request));
    let first = initiator.pull_all();
    responder.give(&first);
    initiator.ack_all();
    assert_eq!(initiator.env.statuses(), [(1, WcStatus::SUCCESS)]);
    run(&mut initiator, &mut responder);
    let ids: Vec<u64> = initiator.env.statuses().iter().map(|sges| sges.0).collect();
    assert_eq!(ids, [1, 2, 3]);
}

#[test]
fn ord_limit_stalls_the_send_queue() {
    let mut initiator = End::new(NegotiatedParameters {
        ord: 2,
        ..negotiated(true)
    });
    let mut responder = End::new(negotiated(false));
    let (l, _) = initiator.env.mr(0, 4096, Access::LOCAL_WRITE);
    let (request, _) = responder.env.mr(0, 4096, REMOTE);
    let sges = [sge(0, 8, l)];
    for i in 0..5 {
        initiator
            .env
            .post(&remote(Opcode::Read, i, &sges, 0, request));
    }
    let first = initiator.pull_all();
    assert_eq!(initiator.unacked.len(), 2);
    assert!(!initiator.qp.has_output(), "stalled");
    responder.give(&first);
    initiator.ack_all();
    let one = responder.pull().expect("first response");
    assert!(initiator.give(&one).has_output);
    let third = initiator.pull().expect("one place is free");
    assert!(initiator.pull().is_none());
    responder.give(&third);
    run(&mut initiator, &mut responder);
    assert_eq!(initiator.env.statuses().len(), 5);
}

#[test]
fn fence_waits_for_outstanding_reads() {
    let (mut initiator, mut responder) = pair();
    let (l, _) = initiator.env.mr(0, 4096, Access::LOCAL_WRITE);
    let (request, _) = responder.env.mr(0, 4096, REMOTE);
    let sges = [sge(0, 8, l)];
    initiator
        .env
        .post(&remote(Opcode::Read, 1, &sges, 0, request));
    initiator.env.post(&SendWr {
        flags: WrFlags::FENCE | WrFlags::SIGNALED,
        ..remote(Opcode::Write, 2, &sges, 0, request)
    });
    let first = initiator.pull_all();
    assert_eq!(initiator.unacked.len(), 1, "only the Read left");
    responder.give(&first);
    initiator.ack_all();
    run(&mut initiator, &mut responder);
    assert_eq!(
        initiator.env.statuses(),
        [(1, WcStatus::SUCCESS), (2, WcStatus::SUCCESS)]
    );
}

#[test]
fn responses_and_requests_take_turns_message_by_message() {
    let (mut initiator, mut responder) = pair();
    let (l, _) = initiator.env.mr(0, 8192, REMOTE);
    let (request, _) = responder.env.mr(0, 8192, REMOTE);
    let sges = [sge(0, 3000, l)];
    for i in 0..2 {
        initiator
            .env
            .post(&remote(Opcode::Read, i, &sges, 0, request));
    }
    let first = initiator.pull_all();
    responder.give(&first);
    let w = [sge(0, 3000, request)];
    for i in 0..3 {
        responder.env.post(&remote(Opcode::Write, i, &w, 0, l));
    }
    let order: Vec<u8> = std::iter::from_fn(|| responder.pull())
        .map(|fpdu| ulpdu(&fpdu)[1] & 15)
        .collect();
    assert_eq!(order, [0, 0, 0, 2, 2, 2, 0, 0, 0, 2, 2, 2, 0, 0, 0]);
}

/// Conformance 19, RFC 5044 section 7.1.2.
#[test]
fn c19_responder_waits_for_the_first_fpdu() {
    let (mut initiator, mut responder) = pair();
    let (key, _) = initiator.env.mr(0, 64, REMOTE);
    responder.env.post(&SendWr {
        rkey: key.0,
        ..wr(Opcode::Write, 1, SendData::Inline(&[1]))
    });
    assert!(responder.pull().is_none());
    initiator.env.post(&SendWr {
        rkey: 1,
        ..wr(Opcode::Write, 1, SendData::Sges(&[]))
    });
    let first = initiator.pull_all();
    let progress = responder.give(&first);
    assert!(progress.first_fpdu);
    assert!(responder.pull().is_some());
    assert!(
        !responder.give(&write(1, 0, &[])).first_fpdu,
        "reported once"
    );
}

/// RFC 6581 section 9: the ready-to-receive message comes first and does not affect any numbering.
#[test]
fn each_kind_of_rtr_opens_the_stream() {
    for kind in [RtrKind::Write, RtrKind::Read, RtrKind::Send] {
        let len = |i| NegotiatedParameters {
            rtr: Some(kind),
            ..negotiated(i)
        };
        let (mut initiator, mut responder) = (End::new(len(true)), End::new(len(false)));
        let (la, initiator_mem) = initiator.env.mr(0, 4096, REMOTE);
        let (lb, responder_mem) = responder.env.mr(0, 4096, REMOTE);
        initiator_mem.write(0, b"from a").expect("in range");
        responder_mem.write(100, b"from b").expect("in range");
        responder.env.post_recv(5, &[sge(0, 64, lb)]);
        responder
            .env
            .post(&remote(Opcode::Write, 1, &[sge(100, 6, lb)], 100, la));
        initiator
            .env
            .post(&wr(Opcode::Send, 1, SendData::Sges(&[sge(0, 6, la)])));
        initiator
            .env
            .post(&remote(Opcode::Read, 2, &[sge(200, 6, la)], 100, lb));
        assert!(
            initiator.qp.has_output(),
            "the RTR leaves without a doorbell"
        );
        let first = initiator.pull().expect("RTR");
        let u = ulpdu(&first);
        match kind {
            RtrKind::Write => assert_eq!((u.len(), &u[..2]), (14, &[0xc1, 0x40][..])),
            RtrKind::Read => assert_eq!((u.len(), &u[..2]), (46, &[0x41, 0x41][..])),
            RtrKind::Send => assert_eq!((u.len(), &u[..2]), (18, &[0x41, 0x43][..])),
        }
        if kind != RtrKind::Send {
            assert_ne!(tagged_of(&first).stag | u32::from(kind == RtrKind::Read), 0);
        }
        assert!(responder.give(&first).first_fpdu);
        run(&mut initiator, &mut responder);
        run(&mut initiator, &mut responder);
        assert_eq!(initiator.env.statuses().len(), 2, "{kind:?}");
        assert_eq!(responder.env.statuses(), [(1, WcStatus::SUCCESS)]);
        assert_eq!(responder.env.recv_statuses(), [(5, WcStatus::SUCCESS)]);
        assert_eq!(&contents(&initiator_mem, 256)[100..106], b"from b");
        assert_eq!(&contents(&initiator_mem, 256)[200..206], b"from b");
        assert_eq!(&contents(&responder_mem, 6), b"from a");
    }
}

/// RFC 6581 section 9.2: only the first FPDU is the ready-to-receive message.
#[test]
fn an_empty_send_behind_the_first_fpdu_takes_a_receive() {
    let mut responder = End::new(NegotiatedParameters {
        rtr: Some(RtrKind::Send),
        ..negotiated(false)
    });
    responder.env.post_recv(5, &[]);
    responder.give(&write(1, 0, &[]));
    responder.give(&send(1, 0, true, &[]));
    assert_eq!(responder.env.recv_statuses(), [(5, WcStatus::SUCCESS)]);
}

/// Conformance 34, 35: the stream may be cut anywhere.
#[test]
fn c34_c35_fpdus_are_taken_from_any_cut_of_the_stream() {
    for cut in [1, 2, 3, 7, 64, 1447, 1449, 4000] {
        let mut responder = End::new(negotiated(false));
        let mut initiator = End::new(negotiated(true));
        let (src, mem) = initiator.env.mr(0, 5000, Access::NONE);
        mem.write(0, &pattern(5000, 8)).expect("in range");
        let (dst, out) = responder.env.mr(0, 5000, REMOTE);
        responder.env.post_recv(1, &[sge(0, 11, dst)]);
        let sges = [sge(0, 5000, src)];
        initiator.env.post(&remote(Opcode::Write, 1, &sges, 0, dst));
        initiator
            .env
            .post(&wr(Opcode::Send, 2, SendData::Inline(b"hello world")));
        let bytes = initiator.pull_all();
        for wc in bytes.chunks(cut) {
            responder.give(wc);
        }
        assert_eq!(
            responder.env.recv_statuses(),
            [(1, WcStatus::SUCCESS)],
            "cut {cut}"
        );
        assert_eq!(&contents(&out, 11), b"hello world");
        assert!(contents(&out, 5000)[11..] == pattern(5000, 8)[11..]);
        assert_eq!(responder.rx.available(), 0);
    }
}

#[test]
fn fpdu_waits_until_all_of_it_fits() {
    let (mut initiator, responder) = pair();
    let (src, _) = initiator.env.mr(0, 5000, Access::NONE);
    let (dst, _) = responder.env.mr(0, 5000, REMOTE);
    initiator
        .env
        .post(&remote(Opcode::Write, 1, &[sge(0, 2000, src)], 0, dst));
    assert!(initiator.pull_room(1447).is_none());
    assert_eq!(initiator.pull_room(1448).map(|fpdu| fpdu.len()), Some(1448));
    assert!(initiator.qp.has_output());
    assert!(initiator.pull_room(100).is_none());
    let fpdu = initiator.pull().expect("the rest");
    assert_eq!(ulpdu(&fpdu).len() - 14, 2000 - 1428);
}

#[test]
fn record_is_rebuilt_identically_until_acknowledged() {
    let (mut initiator, responder) = pair();
    let (src, mem) = initiator.env.mr(0, 5000, Access::NONE);
    mem.write(0, &pattern(5000, 8)).expect("in range");
    let (dst, _) = responder.env.mr(0, 5000, REMOTE);
    initiator
        .env
        .post(&remote(Opcode::Write, 1, &[sge(0, 5000, src)], 0, dst));
    let first: Vec<Vec<u8>> = std::iter::from_fn(|| initiator.pull()).collect();
    initiator.qp.set_emss(512);
    for (rec, want) in initiator.unacked.iter().zip(&first) {
        let mut fpdu = Frame::default();
        initiator.build_fpdu(rec, &mut fpdu).expect("still there");
        assert!(&fpdu.bytes == want);
    }
    let rec = initiator.unacked[0];
    initiator.ack_all();
    let mut fpdu = Frame::default();
    assert_eq!(
        initiator.build_fpdu(&rec, &mut fpdu),
        Err(BuildError::MessageCompleted)
    );
}

#[test]
fn send_completes_when_the_port_released_its_buffers() {
    let (mut initiator, mut responder) = pair();
    initiator.send_by_reference();
    initiator.env.held = true;
    let (src, _) = initiator.env.mr(0, 64, Access::NONE);
    let (dst, _) = responder.env.mr(0, 64, REMOTE);
    initiator
        .env
        .post(&remote(Opcode::Write, 1, &[sge(0, 64, src)], 0, dst));
    initiator.env.post(&remote(Opcode::Write, 2, &[], 0, dst));
    run(&mut initiator, &mut responder);
    assert!(initiator.env.sent.is_empty());
    initiator.qp.poll_releases(&mut initiator.env);
    assert!(initiator.env.sent.is_empty());
    initiator.env.held = false;
    initiator.qp.poll_releases(&mut initiator.env);
    assert_eq!(initiator.env.statuses().len(), 2);
    assert!(initiator.env.live.is_empty());
}

/// Only the end of the Read shows that the following Write waits for the port.
#[test]
fn write_behind_a_read_asks_for_its_release_when_the_read_ends() {
    let (mut initiator, mut responder) = pair();
    initiator.send_by_reference();
    initiator.env.held = true;
    let (local, _) = initiator.env.mr(0, 64, REMOTE);
    let (peer, _) = responder.env.mr(0, 64, REMOTE);
    let sges = [sge(0, 64, local)];
    initiator.env.post(&remote(Opcode::Read, 1, &sges, 0, peer));
    initiator
        .env
        .post(&remote(Opcode::Write, 2, &sges, 0, peer));
    let requests = initiator.pull_all();
    responder.give(&requests);
    initiator.ack_all();
    assert!(!initiator.env.awaits_release && initiator.env.sent.is_empty());
    let response = responder.pull_all();
    initiator.give(&response);
    assert_eq!(initiator.env.statuses(), [(1, WcStatus::SUCCESS)]);
    assert!(initiator.env.awaits_release);
    initiator.env.held = false;
    initiator.qp.poll_releases(&mut initiator.env);
    assert_eq!(initiator.env.statuses().len(), 2);
}

#[test]
fn idle_queue_pair_is_small() {
    let len = std::mem::size_of::<QueuePair>();
    println!(
        "QueuePair: {len} bytes, FpduRecord: {}",
        std::mem::size_of::<FpduRecord>()
    );
    assert!(len <= 512, "{len}");
    assert!(std::mem::size_of::<TxRecord>() <= 48);
}

/// Conformance 28.
#[test]
fn c28_without_crc_the_field_is_zero_and_ignored() {
    let len = |i| NegotiatedParameters {
        crc: false,
        ..negotiated(i)
    };
    let (mut initiator, mut responder) = (End::new(len(true)), End::new(len(false)));
    let (dst, out) = responder.env.mr(0, 64, REMOTE);
    initiator.env.post(&SendWr {
        rkey: dst.0,
        ..wr(Opcode::Write, 1, SendData::Inline(b"xyz"))
    });
    let mut fpdu = initiator.pull().expect("leaves");
    let at = fpdu.len() - 4;
    assert_eq!(fpdu[at..], [0; 4]);
    fpdu[at..].copy_from_slice(&[1, 2, 3, 4]);
    responder.give(&fpdu);
    assert_eq!(contents(&out, 3), b"xyz");
}
