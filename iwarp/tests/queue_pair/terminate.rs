//! A scripted peer breaks the rules: each Terminate code of RFC 5040, 5041 and 5044 that a queue pair
//! can send, by its number in the conformance list.
use crate::common::tested_responder::*;
use crate::common::*;
use siw_iwarp::*;
use siw_memory::Stag;
use siw_shm::wqe::SendData;
use siw_shm::{Access, Opcode, WcStatus};

#[test]
fn c27_bad_crc_is_2_0_02_and_places_nothing() {
    let responder = new_responder();
    let mut fpdu = write(responder.key, VA, &[1; 64]);
    let len = fpdu.len();
    fpdu[len - 10] ^= 1;
    let terminate = responder.refuses(&fpdu, "2/0/02");
    assert!(terminate.ddp.is_none() && terminate.read.is_none());
}

/// RFC 5044 section 7.1.2: a responder sends no FPDU before it has received one.
#[test]
fn a_terminate_of_a_responder_waits_for_the_first_fpdu() {
    let TestedResponder { mut end, key, mem } = new_responder();
    end.qp.send_terminate(TerminateCode::LOCAL_CATASTROPHIC);
    assert!(!end.qp.has_output() && end.pull().is_none());
    assert_eq!(end.qp.requested_close(), None);
    let first = write(key, VA, &[1; 64]);
    end.give(&first[..40]);
    assert!(end.pull().is_none(), "it is not whole");
    let progress = end.give(&first[40..]);
    assert!(progress.first_fpdu && progress.has_output);
    end.expect_terminate("0/0/00");
    assert_eq!(contents(&mem, LEN), vec![0; LEN], "nothing placed");
    assert_eq!(end.rx.available(), 0);
}

#[test]
fn a_terminate_that_waits_is_dropped_when_the_initiator_closes() {
    let TestedResponder { mut end, .. } = new_responder();
    end.qp.send_terminate(TerminateCode::LOCAL_CATASTROPHIC);
    end.qp.on_peer_fin(&mut end.env, 0);
    assert!(end.pull().is_none());
    assert_eq!(end.qp.requested_close(), Some(CloseKind::Graceful));
}

#[test]
fn c30_ulpdu_shorter_than_its_header_is_2_0_03() {
    for ulpdu_octets in [
        &[][..],
        &[0xc1],
        &[0xc1, 0x40, 0, 0],
        &[0x41, 0x43, 0, 0, 0, 0],
    ] {
        new_responder().refuses(&raw(&[ulpdu_octets]), "2/0/03");
    }
}

#[test]
fn c29_non_zero_pad_is_ignored_but_counts_into_the_crc() {
    let mut responder = new_responder();
    let mut fpdu = write(responder.key, VA, &[9; 5]);
    let len = fpdu.len();
    assert_eq!(fpdu[len - 7..len - 4], [0; 3], "three octets of pad");
    fpdu[len - 5] = 0xee;
    let sum = crc32c::crc32c(&fpdu[..len - 4]);
    fpdu[len - 4..].copy_from_slice(&sum.to_le_bytes());
    responder.end.give(&fpdu);
    assert_eq!(contents(&responder.mem, 6), [9, 9, 9, 9, 9, 0]);
}

#[test]
fn c38_c51_wrong_ddp_version_is_1_1_04_or_1_2_06() {
    let responder = new_responder();
    let key = responder.key;
    let fpdu = raw(&[&[0xc2, 0x40], &key.to_be_bytes(), &VA.to_be_bytes(), &[1]]);
    let terminate = responder.refuses(&fpdu, "1/1/04");
    assert_eq!(terminate.ddp, Some(hdr18(ulpdu(&fpdu))));
    new_responder().refuses(&untagged([0x40, 0x43], 0, 0, 1, 0, &[1]), "1/2/06");
}

#[test]
fn c39_reserved_bits_are_ignored() {
    let mut responder = new_responder();
    let fpdu = raw(&[
        &[0xfd, 0x70],
        &responder.key.to_be_bytes(),
        &VA.to_be_bytes(),
        &[3],
    ]);
    responder.end.give(&fpdu);
    assert_eq!(contents(&responder.mem, 1), [3]);
}

#[test]
fn c40_c41_unknown_stag_and_stale_key_are_1_1_00() {
    for stag in [0, 0xdead_be00] {
        let fpdu = write(stag, VA, &[1]);
        let terminate = new_responder().refuses(&fpdu, "1/1/00");
        assert_eq!(
            terminate.ddp,
            Some(hdr18(ulpdu(&fpdu))),
            "the header is quoted (81)"
        );
        assert!(terminate.read.is_none());
    }
    let responder = new_responder();
    let stale = responder.key ^ 0xff;
    responder.refuses(&write(stale, VA, &[1]), "1/1/00");
}

#[test]
fn c42_invalidated_stag_is_1_1_00() {
    let responder = new_responder();
    responder
        .end
        .env
        .keys
        .invalidate_key(Stag(responder.key), PD, 3)
        .expect("known");
    let key = responder.key;
    responder.refuses(&write(key, VA, &[1]), "1/1/00");
}

#[test]
fn c42_deregistration_in_mid_message_stops_placement() {
    let mut responder = new_responder();
    responder.end.give(&raw(&[
        &[0x81, 0x40],
        &responder.key.to_be_bytes(),
        &VA.to_be_bytes(),
        &[1; 8],
    ]));
    responder
        .end
        .env
        .table
        .remove(Stag(responder.key))
        .expect("known");
    responder.end.give(&write(responder.key, VA + 8, &[1; 8]));
    responder.end.expect_terminate("1/1/00");
    assert_eq!(contents(&responder.mem, 9)[8], 0);
}

#[test]
fn c43_c44_memory_of_another_pd_or_stream_is_1_1_02() {
    let responder = new_responder();
    let (key, mem) = responder.end.env.mr_in(VA, 64, REMOTE, PD + 1, None);
    responder.refuses(&write(key.0, VA, &[1]), "1/1/02");
    assert_eq!(contents(&mem, 1), [0]);
    let responder = new_responder();
    let (key, mem) = responder.end.env.mr_in(VA, 64, REMOTE, PD, Some(99));
    responder.refuses(&write(key.0, VA, &[1]), "1/1/02");
    assert_eq!(contents(&mem, 1), [0]);
}

#[test]
fn c45_c46_c47_bounds_and_wrap_are_byte_granular() {
    let end = VA + LEN as u64;
    for (to, len, code) in [
        (VA - 1, 1, "1/1/01"),
        (end, 1, "1/1/01"),
        (end - 3, 4, "1/1/01"),
        (0, 1, "1/1/01"),
        (u64::MAX, 2, "1/1/03"),
        (u64::MAX - 2, 4, "1/1/03"),
    ] {
        let responder = new_responder();
        let fpdu = write(responder.key, to, &vec![1; len]);
        responder.refuses(&fpdu, code);
    }
    let mut responder = new_responder();
    responder.end.give(&write(responder.key, end - 4, &[7; 4]));
    assert_eq!(contents(&responder.mem, LEN)[LEN - 4..], [7; 4]);
    assert!(responder.end.pull().is_none());
}

#[test]
fn c48_write_without_write_access_is_0_1_02() {
    let responder = new_responder();
    let (key, _) = responder.end.env.mr(VA, 64, Access::REMOTE_READ);
    let terminate = responder.refuses(&write(key.0, VA, &[1]), "0/1/02");
    assert!(terminate.ddp.is_some() && terminate.read.is_none());
}

#[test]
fn c49_c50_zero_length_needs_no_key_and_a_gap_is_legal() {
    let mut responder = new_responder();
    responder.end.give(&write(0xffff_ffff, u64::MAX, &[]));
    responder.end.give(&raw(&[
        &[0x81, 0x40],
        &responder.key.to_be_bytes(),
        &VA.to_be_bytes(),
        &[1],
    ]));
    responder.end.give(&write(responder.key, VA + 5, &[2]));
    assert_eq!(contents(&responder.mem, 6), [1, 0, 0, 0, 0, 2]);
    assert!(responder.end.pull().is_none());
}

#[test]
fn c52_c53_wrong_queues_are_1_2_01() {
    new_responder().refuses(&untagged([0x41, 0x43], 0, 4, 1, 0, &[1]), "1/2/01");
    new_responder().refuses(&untagged([0x41, 0x43], 0, u32::MAX, 1, 0, &[1]), "1/2/01");
    new_responder().refuses(&untagged([0x41, 0x43], 0, 1, 1, 0, &[1]), "1/2/01");
    new_responder().refuses(&untagged([0x41, 0x41], 0, 0, 1, 0, &[0; 28]), "1/2/01");
    new_responder().refuses(&untagged([0x41, 0x47], 0, 0, 1, 0, &[0; 4]), "1/2/01");
}

#[test]
fn c54_empty_receive_queue_is_1_2_02() {
    let mut responder = new_responder();
    responder.end.env.rq.clear();
    let fpdu = send(1, 0, true, &[1]);
    let terminate = responder.refuses(&fpdu, "1/2/02");
    assert_eq!(terminate.ddp, Some(hdr18(ulpdu(&fpdu))));
}

#[test]
fn c55_c56_msn_replay_and_gap_are_1_2_03() {
    new_responder().refuses(&send(0, 0, true, &[1]), "1/2/03");
    new_responder().refuses(&send(2, 0, true, &[1]), "1/2/03");
    let mut responder = new_responder();
    responder.end.give(&send(1, 0, true, &[0]));
    responder.end.env.post_recv(2, &[]);
    responder.refuses(&send(1, 0, true, &[]), "1/2/03");
}

#[test]
fn c58_wrong_mo_is_1_2_04() {
    new_responder().refuses(&send(1, 4, true, &[1]), "1/2/04");
    for mo in [0, 3, 5] {
        let mut responder = new_responder();
        responder.end.give(&send(1, 0, false, &[0; 4]));
        responder.refuses(&send(1, mo, true, &[1]), "1/2/04");
    }
}

#[test]
fn c59_message_longer_than_its_buffer_is_1_2_05() {
    let mut responder = new_responder();
    responder.end.give(&send(1, 0, false, &[0; 100]));
    responder.end.give(&send(1, 100, true, &[1]));
    responder.end.expect_terminate("1/2/05");
    assert_eq!(
        responder.end.env.recv_statuses(),
        [(1, WcStatus::LOC_LEN_ERR)]
    );
    new_responder().refuses(&send(1, 0, true, &[1; 101]), "1/2/05");
}

#[test]
fn c61_stag_in_a_plain_send_is_ignored() {
    let mut responder = new_responder();
    responder
        .end
        .give(&untagged([0x41, 0x43], responder.key, 0, 1, 0, &[]));
    assert!(responder.end.env.keys.lookup(Stag(responder.key)).is_some());
    assert_eq!(responder.end.env.recv_statuses(), [(1, WcStatus::SUCCESS)]);
}

#[test]
fn c62_c63_c64_version_opcode_and_tag_bit() {
    for (ctl, code) in [
        ([0x41, 0x03], "0/2/05"),
        ([0x41, 0x83], "0/2/05"),
        ([0x41, 0x4f], "0/2/06"),
        ([0x41, 0x4c], "0/2/06"),
        ([0x41, 0x40], "0/2/06"),
    ] {
        let fpdu = untagged(ctl, 0, 0, 1, 0, &[1]);
        let terminate = new_responder().refuses(&fpdu, code);
        assert_eq!(terminate.ddp, Some(hdr18(ulpdu(&fpdu))));
    }
    let responder = new_responder();
    let key = responder.key;
    for (ctl, code) in [
        ([0xc1, 0x00], "0/2/05"),
        ([0xc1, 0x43], "0/2/06"),
        ([0xc1, 0x4f], "0/2/06"),
    ] {
        let fpdu = raw(&[&ctl, &key.to_be_bytes(), &VA.to_be_bytes(), &[1]]);
        new_responder().refuses(&fpdu, code);
    }
}

#[test]
fn message_that_changes_its_opcode_is_0_2_06() {
    let mut responder = new_responder();
    responder.end.give(&send(1, 0, false, &[0; 4]));
    responder.refuses(&untagged([0x41, 0x45], 0, 0, 1, 4, &[1]), "0/2/06");
}

#[test]
fn c75_c76_c77_refused_invalidation() {
    type Key = fn(&TestedResponder) -> u32;
    let cases: [(Key, &str); 4] = [
        (|_| 0xdead_be00, "0/2/09"),
        (
            |responder| responder.end.env.mr_in(VA, 64, REMOTE, PD + 1, None).0.0,
            "0/1/09",
        ),
        (
            |responder| responder.end.env.mr_in(VA, 64, REMOTE, PD, Some(99)).0.0,
            "0/1/09",
        ),
        (
            |responder| responder.end.env.mr(VA, 64, Access::LOCAL_WRITE).0.0,
            "0/2/09",
        ),
    ];
    for (key, code) in cases {
        let mut responder = new_responder();
        let key = key(&responder);
        let known = responder.end.env.keys.lookup(Stag(key)).is_some();
        responder
            .end
            .give(&untagged([0x41, 0x44], key, 0, 1, 0, &[]));
        responder.end.expect_terminate(code);
        assert_eq!(
            responder.end.env.recv_statuses(),
            [(1, WcStatus::REM_INV_REQ_ERR)]
        );
        assert_eq!(responder.end.env.keys.lookup(Stag(key)).is_some(), known);
    }
}

#[test]
fn c83_local_error_is_0_0_00_and_loc_prot_err() {
    let mut initiator = End::new(negotiated(true));
    let (key, _) = initiator.env.mr(VA, 64, Access::NONE);
    initiator
        .env
        .post(&remote(Opcode::Write, 1, &[sge(VA, 64, key)], 0, Stag(1)));
    initiator
        .env
        .post(&remote(Opcode::Write, 2, &[sge(VA, 65, key)], 0, Stag(1)));
    initiator
        .env
        .post(&remote(Opcode::Write, 3, &[sge(VA, 1, key)], 0, Stag(1)));
    initiator.pull().expect("the good one");
    let terminate = initiator.expect_terminate("0/0/00");
    assert!(terminate.ddp.is_none());
    assert!(initiator.env.sent.is_empty(), "not before the one in front");
    initiator.ack_all();
    initiator
        .qp
        .on_tcp_closed(&mut initiator.env, CloseReason::Closed);
    assert_eq!(
        initiator.env.statuses(),
        [
            (1, WcStatus::SUCCESS),
            (2, WcStatus::LOC_PROT_ERR),
            (3, WcStatus::WR_FLUSH_ERR)
        ]
    );
    assert_eq!(initiator.qp.state(), RdmapState::Error);
    assert_eq!(initiator.env.events, [QpEvent::QpFatal]);
}

#[test]
fn local_mistakes_of_each_kind_fail_their_work_request() {
    type Post = fn(&mut End);
    let cases: [(Post, WcStatus); 4] = [
        (
            |initiator| {
                initiator.env.post(&wr(
                    Opcode::Send,
                    1,
                    SendData::Sges(&[sge(VA, 1, Stag(0x500))]),
                ))
            },
            WcStatus::LOC_PROT_ERR,
        ),
        (
            |initiator| {
                let (key, _) = initiator.env.mr_in(VA, 64, REMOTE, PD + 1, None);
                initiator
                    .env
                    .post(&wr(Opcode::Send, 1, SendData::Sges(&[sge(VA, 1, key)])));
            },
            WcStatus::LOC_PROT_ERR,
        ),
        (
            |initiator| {
                let (key, _) = initiator.env.mr(VA, 64, Access::REMOTE_WRITE);
                initiator
                    .env
                    .post(&remote(Opcode::Read, 1, &[sge(VA, 1, key)], 0, Stag(1)));
            },
            WcStatus::LOC_PROT_ERR,
        ),
        (
            |initiator| {
                initiator.qp = QueuePair::new(init_attr());
                initiator.qp.set_rts(
                    NegotiatedParameters {
                        ord: 0,
                        ..negotiated(true)
                    },
                    EMSS,
                );
                initiator
                    .env
                    .post(&remote(Opcode::Read, 1, &[], 0, Stag(1)));
            },
            WcStatus::LOC_QP_OP_ERR,
        ),
    ];
    for (post, status) in cases {
        let mut initiator = End::new(negotiated(true));
        post(&mut initiator);
        initiator.expect_terminate("0/0/00");
        assert_eq!(initiator.env.statuses(), [(1, status)]);
    }
    let mut responder = new_responder();
    responder.end.env.rq.clear();
    responder.end.env.post_recv(8, &[sge(VA, 10, Stag(0x500))]);
    responder.end.give(&send(1, 0, true, &[1]));
    responder.end.expect_terminate("0/0/00");
    assert_eq!(
        responder.end.env.recv_statuses(),
        [(8, WcStatus::LOC_PROT_ERR)]
    );
}

#[test]
fn invalid_ring_ends_the_queue_pair() {
    let mut initiator = End::new(negotiated(true));
    initiator.env.ring_fault = Some(RingFault::InvalidIndex);
    initiator.expect_terminate("0/0/00");
    initiator
        .qp
        .on_tcp_closed(&mut initiator.env, CloseReason::Closed);
    assert_eq!(initiator.qp.state(), RdmapState::Error);
}

#[test]
fn c80_first_of_several_errors_is_reported() {
    let mut responder = new_responder();
    let mut bytes = write(0xdead_be00, VA, &[1]);
    bytes.extend(untagged([0x41, 0x4f], 0, 0, 1, 0, &[]));
    bytes.extend(write(responder.key, VA, &[1]));
    responder.end.give(&bytes);
    responder.end.expect_terminate("1/1/00");
    assert_eq!(contents(&responder.mem, 1), [0]);
    assert_eq!(responder.end.env.events, [QpEvent::QpAccessErr]);
}

/// Conformance 37, 79: after the first error, nothing is processed, reported, completed or sent,
/// except the one Terminate.
#[test]
fn c37_c79_nothing_happens_after_the_first_error() {
    let mut responder = new_responder();
    responder
        .end
        .env
        .post(&wr(Opcode::Send, 5, SendData::Inline(b"later")));
    let mut bytes = write(responder.key ^ 0x100, VA, &[1]);
    bytes.extend(send(9, 0, true, &[2]));
    bytes.extend(send(1, 0, true, &[3; 10]));
    bytes.extend(write(responder.key, VA, &[4]));
    responder.end.give(&bytes);
    responder.end.expect_terminate("1/1/00");
    responder.end.give(&read_request(1, &read_of(&responder)));
    assert!(responder.end.pull().is_none());
    assert_eq!(contents(&responder.mem, LEN), vec![0; LEN]);
    assert!(responder.end.env.received.is_empty());
    assert_eq!(responder.end.env.events.len(), 1, "reported once");
}
