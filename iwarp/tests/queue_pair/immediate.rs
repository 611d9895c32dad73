//! Immediate Data (RFC 7306 section 6): alone, after a Write, and joined with a Send.
use crate::common::*;
use siw_iwarp::*;
use siw_shm::wqe::{SendData, SendWr};
use siw_shm::{Access, Opcode, WcFlags, WcOpcode, WcStatus, WrFlags};

const VA: u64 = 0x10_0000;

#[test]
fn write_with_immediate_is_a_write_and_immediate_data() {
    for n in [0, 1, 5000] {
        let (mut initiator, mut responder) = pair();
        let (initiator_key, initiator_mem) = initiator.env.mr(VA, 8192, Access::NONE);
        let (responder_key, responder_mem) = responder.env.mr(VA, 8192, REMOTE);
        initiator_mem.write(0, &pattern(n, 3)).expect("in range");
        responder.env.post_recv(7, &[]);
        responder.env.post_recv(8, &[]);
        // An earlier Write does not count toward the length.
        initiator.env.post(&remote(
            Opcode::Write,
            1,
            &[sge(VA, 9, initiator_key)],
            VA + 8000,
            responder_key,
        ));
        let s = [sge(VA, n, initiator_key)];
        initiator.env.post(&SendWr::write_with_imm(
            2,
            SendData::Sges(&s),
            VA,
            responder_key.0,
            0x0102_0304,
        ));
        let s = [sge(VA, 4, initiator_key)];
        initiator.env.post(&SendWr {
            flags: WrFlags::SIGNALED | WrFlags::SOLICITED,
            ..SendWr::write_with_imm(3, SendData::Sges(&s), VA + 8100, responder_key.0, 5)
        });
        let frames: Vec<Vec<u8>> = std::iter::from_fn(|| initiator.pull()).collect();
        for fpdu in &frames {
            responder.give(fpdu);
        }
        let imm: Vec<_> = frames
            .iter()
            .filter(|fpdu| ulpdu(fpdu)[1] & 0x0f > 7)
            .collect();
        assert_eq!(ulpdu(imm[0])[..2], [0x41, 0x48]);
        assert_eq!(ulpdu(imm[0])[18..], [1, 2, 3, 4, 0, 0, 0, 0]);
        assert_eq!(ulpdu(imm[1])[..2], [0x41, 0x49]);
        assert_eq!(
            (untagged_of(imm[0]).msn.0, untagged_of(imm[1]).msn.0),
            (1, 2)
        );
        // The completion waits for the acknowledgement of the last message.
        let last = initiator.unacked.pop_back().expect("sent");
        initiator.ack_all();
        assert_eq!(initiator.env.statuses().len(), 2);
        initiator.qp.on_record_acked(&last);
        initiator.qp.complete_acked(&mut initiator.env);
        assert_eq!(
            initiator.env.statuses(),
            [1, 2, 3].map(|i| (i, WcStatus::SUCCESS))
        );
        let wc = initiator.env.sent[1].expect("signaled");
        assert_eq!((wc.opcode, wc.byte_len as usize), (WcOpcode::RDMA_WRITE, n));
        assert_eq!(contents(&responder_mem, n), pattern(n, 3));
        let got: Vec<_> = responder
            .env
            .received
            .iter()
            .map(|wc| (wc.wr_id, wc.opcode, wc.flags, wc.imm, wc.byte_len as usize))
            .collect();
        let (op, with) = (WcOpcode::RECV_RDMA_WITH_IMM, WcFlags::WITH_IMM);
        assert_eq!(
            got,
            [
                (7, op, with, 0x0102_0304, n),
                (8, op, with | WcFlags::SOLICITED, 5, 4)
            ]
        );
    }
}

/// One receive work request and one completion for both messages.
#[test]
fn send_with_immediate_completes_one_receive() {
    for n in [0, 3, 5000] {
        let (mut initiator, mut responder) = pair();
        let (initiator_key, initiator_mem) = initiator.env.mr(VA, 8192, Access::NONE);
        let (responder_key, responder_mem) = responder.env.mr(VA, 8192, REMOTE);
        initiator_mem.write(0, &pattern(n, 3)).expect("in range");
        responder.env.post_recv(7, &[sge(VA, 8192, responder_key)]);
        responder
            .env
            .post_recv(8, &[sge(VA + 5000, 10, responder_key)]);
        let s = [sge(VA, n, initiator_key)];
        initiator.env.post(&SendWr {
            flags: WrFlags::SIGNALED | WrFlags::SOLICITED,
            ..SendWr::send_with_imm(1, SendData::Sges(&s), 0xfeed)
        });
        initiator.env.post(&SendWr::send(2, SendData::Inline(b"x")));
        run(&mut initiator, &mut responder);
        assert_eq!(
            initiator.env.statuses(),
            [(1, WcStatus::SUCCESS), (2, WcStatus::SUCCESS)]
        );
        let got: Vec<_> = responder
            .env
            .received
            .iter()
            .map(|wc| (wc.wr_id, wc.opcode, wc.flags, wc.imm, wc.byte_len as usize))
            .collect();
        assert_eq!(
            got,
            [
                (
                    7,
                    WcOpcode::RECV,
                    WcFlags::WITH_IMM | WcFlags::SOLICITED,
                    0xfeed,
                    n
                ),
                (8, WcOpcode::RECV, WcFlags::NONE, 0, 1)
            ]
        );
        assert_eq!(contents(&responder_mem, n), pattern(n, 3));
    }
}

fn immediate(msn: u32, payload: &[u8]) -> Vec<u8> {
    untagged([0x41, 0x48], 0, 0, msn, 0, payload)
}

/// Conformance 86.
#[test]
fn c86_immediate_data_of_another_length_is_0_2_ff() {
    for n in [0, 4, 7, 9, 16] {
        let mut responder = End::new(negotiated(false));
        responder.env.post_recv(1, &[]);
        responder.give(&immediate(1, &vec![0; n]));
        responder.expect_terminate("0/2/ff");
        assert!(responder.env.received.is_empty());
    }
    let mut responder = End::new(negotiated(false));
    responder.env.post_recv(1, &[]);
    responder.give(&untagged([0x01, 0x48], 0, 0, 1, 0, &[0; 8]));
    responder.expect_terminate("0/2/ff");
}

/// Immediate Data is a message of queue 0 in every respect: MSN, buffer, order among Sends.
#[test]
fn immediate_data_obeys_the_rules_of_queue_0() {
    let cases: [(Vec<u8>, &str); 5] = [
        (immediate(1, &[0; 8]), "1/2/02"),
        (immediate(2, &[0; 8]), "1/2/03"),
        (untagged([0x41, 0x48], 0, 0, 1, 4, &[0; 8]), "1/2/04"),
        (untagged([0x41, 0x48], 0, 1, 1, 0, &[0; 8]), "1/2/01"),
        (raw(&[&[0xc1, 0x48], &[0; 12], &[0; 8]]), "0/2/06"),
    ];
    for (fpdu, code) in cases {
        let mut responder = End::new(negotiated(false));
        responder.give(&fpdu);
        responder.expect_terminate(code);
    }
    let mut responder = End::new(negotiated(false));
    let (key, _) = responder.env.mr(VA, 64, REMOTE);
    responder.env.post_recv(1, &[sge(VA, 64, key)]);
    responder.give(&send(1, 0, false, &[1]));
    responder.give(&immediate(1, &[0; 8]));
    responder.expect_terminate("0/2/06");
}

/// A Terminate about Immediate Data fails its work request.
#[test]
fn refused_immediate_fails_its_write() {
    let (mut initiator, mut responder) = pair();
    let (responder_key, _) = responder.env.mr(VA, 64, REMOTE);
    initiator.env.post(&SendWr::write_with_imm(
        1,
        SendData::Inline(b"abc"),
        VA,
        responder_key.0,
        1,
    ));
    initiator
        .env
        .post(&SendWr::send_with_imm(2, SendData::Inline(b"abc"), 1));
    let frames = initiator.pull_all();
    responder.give(&frames);
    initiator.ack_all();
    // The acknowledgement came before this Terminate: only requests that are not complete can fail.
    initiator.give(&responder.pull_all());
    assert_eq!(
        initiator
            .qp
            .received_terminate()
            .expect("received")
            .to_string(),
        "1/2/02"
    );
    let (mut initiator, mut responder) = pair();
    let (responder_key, _) = responder.env.mr(VA, 64, REMOTE);
    initiator.env.post(&SendWr::write_with_imm(
        1,
        SendData::Inline(b"abc"),
        VA,
        responder_key.0,
        1,
    ));
    responder.give(&initiator.pull_all());
    initiator.give(&responder.pull_all());
    initiator
        .qp
        .on_tcp_closed(&mut initiator.env, CloseReason::Closed);
    assert_eq!(initiator.env.statuses(), [(1, WcStatus::RNR_RETRY_EXC_ERR)]);
}

/// Immediate Data of RFC 7306 alone: all of its octets belong to the application, whatever their
/// value.
#[test]
fn immediate_data_of_others_is_delivered_whatever_its_octets() {
    let mut responder = End::new(NegotiatedParameters {
        joins_immediate: false,
        ..negotiated(false)
    });
    let (key, _) = responder.env.mr(VA, 64, REMOTE);
    responder.env.post_recv(1, &[]);
    responder.env.post_recv(2, &[sge(VA, 64, key)]);
    responder.give(&untagged([0x41, 0x48], 0, 0, 1, 0, b"\x01\x02\x03\x04send"));
    assert_eq!(responder.env.received.len(), 1);
    let wc = responder.env.received[0];
    assert_eq!(
        (wc.opcode, wc.imm),
        (WcOpcode::RECV_RDMA_WITH_IMM, 0x0102_0304)
    );
    responder.give(&send(2, 0, true, b"hello"));
    let wc = responder.env.received[1];
    assert_eq!((wc.opcode, wc.byte_len), (WcOpcode::RECV, 5));
    assert!(!wc.flags.contains(WcFlags::WITH_IMM));
    assert_eq!(responder.qp.found_error(), None);
}

#[test]
fn send_with_immediate_needs_a_peer_that_agreed() {
    let mut initiator = End::new(NegotiatedParameters {
        joins_immediate: false,
        ..negotiated(true)
    });
    initiator.env.post(&SendWr {
        imm: 7,
        ..wr(Opcode::SendWithImm, 1, SendData::Inline(b"x"))
    });
    let fpdu = initiator.pull().expect("a Terminate leaves");
    assert_eq!(parse_terminate(&fpdu).code.to_string(), "0/0/00");
    assert_eq!(initiator.env.statuses(), [(1, WcStatus::LOC_QP_OP_ERR)]);
}
