//! Errors of RDMA Read: requests that must not be answered, unsolicited responses.
use crate::common::tested_responder::*;
use crate::common::*;
use siw_iwarp::rdmap::ReadRequestHeader;
use siw_iwarp::*;
use siw_memory::Stag;
use siw_shm::{Access, Opcode, WcStatus};

#[test]
fn c65_unsolicited_read_response_is_0_2_06() {
    let responder = new_responder();
    let key = responder.key;
    responder.refuses(&read_response(true, key, VA, &[1]), "0/2/06");
}

/// An initiator with one Read of 3000 bytes outstanding.
fn reader() -> (End, Stag, std::sync::Arc<siw_shm::SharedMemory>) {
    let mut initiator = End::new(negotiated(true));
    let (key, mem) = initiator.env.mr(VA, LEN, REMOTE);
    initiator.env.post(&remote(
        Opcode::Read,
        42,
        &[sge(VA, 3000, key)],
        0x77,
        Stag(9),
    ));
    initiator.pull().expect("request");
    initiator.ack_all();
    (initiator, key, mem)
}

#[test]
fn c66_response_that_does_not_match_is_1_1_00_or_1_1_01() {
    type Make = fn(u32) -> Vec<u8>;
    let cases: [(Make, &str); 6] = [
        (|key| read_response(true, key ^ 1, VA, &[1; 3000]), "1/1/00"),
        (|key| read_response(false, key, VA + 1, &[1; 8]), "1/1/01"),
        (|key| read_response(true, key, VA, &[1; 8]), "1/1/01"),
        (|key| read_response(false, key, VA, &[1; 3000]), "1/1/01"),
        (|key| read_response(true, key, VA, &[1; 3001]), "1/1/01"),
        (|key| read_response(true, key, VA, &[]), "1/1/01"),
    ];
    for (make, code) in cases {
        let (mut initiator, key, mem) = reader();
        initiator.give(&make(key.0));
        initiator.expect_terminate(code);
        assert_eq!(contents(&mem, LEN), vec![0; LEN]);
        assert!(initiator.env.statuses().is_empty() || initiator.env.statuses().len() == 1);
        initiator
            .qp
            .on_tcp_closed(&mut initiator.env, CloseReason::Closed);
        assert_eq!(initiator.env.statuses(), [(42, WcStatus::BAD_RESP_ERR)]);
    }
}

#[test]
fn sink_that_was_deregistered_fails_the_read_locally() {
    let (mut initiator, key, mem) = reader();
    initiator.give(&read_response(false, key.0, VA, &[1; 1000]));
    initiator.env.table.remove(key).expect("known");
    initiator.give(&read_response(true, key.0, VA + 1000, &[1; 2000]));
    initiator.expect_terminate("1/1/00");
    assert_eq!(contents(&mem, 1001)[1000], 0);
    initiator
        .qp
        .on_tcp_closed(&mut initiator.env, CloseReason::Closed);
    assert_eq!(initiator.env.statuses(), [(42, WcStatus::LOC_PROT_ERR)]);
}

#[test]
fn c67_read_request_of_another_length_is_0_2_ff() {
    for len in [0, 27, 29, 52] {
        new_responder().refuses(&untagged([0x41, 0x41], 0, 1, 1, 0, &vec![0; len]), "0/2/ff");
    }
}

#[test]
fn c68_to_c72_read_source_is_checked_and_quoted() {
    let responder = new_responder();
    let (other_pd, _) = responder.end.env.mr_in(VA, 64, REMOTE, PD + 1, None);
    let (no_read, _) = responder
        .end
        .env
        .mr(VA, 64, Access::REMOTE_WRITE | Access::LOCAL_WRITE);
    let base = read_of(&responder);
    let (key, end) = (responder.key, VA + LEN as u64);
    for (stag, to, size, code) in [
        (0xdead_be00, VA, 8, "0/1/00"),
        (0, VA, 8, "0/1/00"),
        (key, VA - 1, 1, "0/1/01"),
        (key, end - 7, 8, "0/1/01"),
        (key, u64::MAX, 8, "0/1/04"),
    ] {
        let mut responder = new_responder();
        let request = ReadRequestHeader {
            src_stag: if stag == key { responder.key } else { stag },
            src_to: to,
            size,
            ..base
        };
        let fpdu = read_request(1, &request);
        responder.end.give(&fpdu);
        let terminate = responder.end.expect_terminate(code);
        assert_eq!(terminate.ddp, Some(hdr18(ulpdu(&fpdu))));
        assert_eq!(terminate.read, Some(request), "81: M, D and R");
    }
    let request = ReadRequestHeader {
        src_stag: no_read.0,
        ..base
    };
    let mut responder = responder;
    responder.end.give(&read_request(1, &request));
    responder.end.expect_terminate("0/1/02");
    let mut responder = new_responder();
    let (other2, _) = responder.end.env.mr_in(VA, 64, REMOTE, PD + 1, None);
    let _ = other_pd;
    let request = ReadRequestHeader {
        src_stag: other2.0,
        ..base
    };
    responder.end.give(&read_request(1, &request));
    responder.end.expect_terminate("0/1/03");
}

#[test]
fn c73_zero_length_read_is_answered_whatever_its_stags() {
    let mut responder = new_responder();
    let request = ReadRequestHeader {
        sink_stag: 0xabcd,
        sink_to: 0x1234,
        size: 0,
        src_stag: 0xffff_ffff,
        src_to: u64::MAX,
    };
    responder.end.give(&read_request(1, &request));
    let fpdu = responder.end.pull().expect("a response");
    assert_eq!(ulpdu(&fpdu)[..2], [0xc1, 0x42]);
    let h = tagged_of(&fpdu);
    assert_eq!((h.stag, h.to, ulpdu(&fpdu).len()), (0xabcd, 0x1234, 14));
}

#[test]
fn c74_more_reads_than_ird_are_1_2_02() {
    let mut responder = new_responder();
    let request = read_of(&responder);
    for msn in 1..=4 {
        responder.end.give(&read_request(msn, &request));
        assert_eq!(responder.end.qp.state(), RdmapState::Rts);
    }
    responder.end.give(&read_request(5, &request));
    responder.end.expect_terminate("1/2/02");
    // An answered request makes room, acknowledged or not.
    let mut responder = new_responder();
    let request = read_of(&responder);
    for msn in 1..=20 {
        responder.end.give(&read_request(msn, &request));
        responder.end.pull().expect("response");
    }
    assert_eq!(responder.end.qp.state(), RdmapState::Rts);
}

#[test]
fn read_requests_out_of_sequence_are_1_2_03() {
    let responder = new_responder();
    let request = read_of(&responder);
    responder.refuses(&read_request(2, &request), "1/2/03");
    let responder = new_responder();
    let request = read_of(&responder);
    responder.refuses(
        &untagged([0x41, 0x41], 0, 1, 1, 4, &request.to_bytes()),
        "1/2/04",
    );
}

#[test]
fn c82_read_is_quoted_at_its_current_position() {
    let mut responder = new_responder();
    let request = ReadRequestHeader {
        size: 4000,
        ..read_of(&responder)
    };
    responder.end.give(&read_request(1, &request));
    responder.end.pull().expect("first segment");
    responder
        .end
        .env
        .table
        .remove(Stag(responder.key))
        .expect("known");
    let fpdu = responder.end.pull().expect("Terminate");
    let terminate = parse_terminate(&fpdu);
    assert_eq!(terminate.code.to_string(), "0/1/00");
    let done = 1428;
    assert_eq!(
        terminate.read,
        Some(ReadRequestHeader {
            sink_to: 6 + done,
            src_to: VA + done,
            size: 4000 - done as u32,
            ..request
        })
    );
    assert!(responder.end.pull().is_none());
}
