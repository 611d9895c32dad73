//! Immediate Data (RFC 7306 section 6), alone, behind a Write, and joined with a Send.
mod common;
use common::*;
use siw_iwarp::*;
use siw_shm::wqe::{SendData, SendWr};
use siw_shm::{Access, Opcode, WcFlags, WcOpcode, WcStatus, WrFlags};

const VA: u64 = 0x10_0000;

#[test]
fn a_write_with_immediate_is_a_write_and_immediate_data() {
    for n in [0, 1, 5000] {
        let (mut a, mut b) = pair();
        let (ka, ma) = a.env.mr(VA, 8192, Access::NONE);
        let (kb, mb) = b.env.mr(VA, 8192, REMOTE);
        ma.write(0, &pattern(n, 3)).expect("in range");
        b.env.post_recv(7, &[]);
        b.env.post_recv(8, &[]);
        // A Write before it does not count into the length.
        a.env
            .post(&remote(Opcode::Write, 1, &[sge(VA, 9, ka)], VA + 8000, kb));
        let s = [sge(VA, n, ka)];
        a.env.post(&SendWr::write_with_imm(
            2,
            SendData::Sges(&s),
            VA,
            kb.0,
            0x0102_0304,
        ));
        let s = [sge(VA, 4, ka)];
        a.env.post(&SendWr {
            flags: WrFlags::SIGNALED | WrFlags::SOLICITED,
            ..SendWr::write_with_imm(3, SendData::Sges(&s), VA + 8100, kb.0, 5)
        });
        let frames: Vec<Vec<u8>> = std::iter::from_fn(|| a.pull()).collect();
        for f in &frames {
            b.give(f);
        }
        let imm: Vec<_> = frames.iter().filter(|f| ulpdu(f)[1] & 0x0f > 7).collect();
        assert_eq!(ulpdu(imm[0])[..2], [0x41, 0x48]);
        assert_eq!(ulpdu(imm[0])[18..], [1, 2, 3, 4, 0, 0, 0, 0]);
        assert_eq!(ulpdu(imm[1])[..2], [0x41, 0x49]);
        assert_eq!(
            (untagged_of(imm[0]).msn.0, untagged_of(imm[1]).msn.0),
            (1, 2)
        );
        // The completion waits for the acknowledgement of the last message.
        let last = a.unacked.pop_back().expect("sent");
        a.ack_all();
        assert_eq!(a.env.statuses().len(), 2);
        a.qp.on_record_acked(&mut a.env, &last);
        assert_eq!(a.env.statuses(), [1, 2, 3].map(|i| (i, WcStatus::SUCCESS)));
        let c = a.env.sent[1].expect("signaled");
        assert_eq!((c.opcode, c.byte_len as usize), (WcOpcode::RDMA_WRITE, n));
        assert_eq!(contents(&mb, n), pattern(n, 3));
        let got: Vec<_> = b
            .env
            .received
            .iter()
            .map(|c| (c.wr_id, c.opcode, c.flags, c.imm, c.byte_len as usize))
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
fn a_send_with_immediate_completes_one_receive() {
    for n in [0, 3, 5000] {
        let (mut a, mut b) = pair();
        let (ka, ma) = a.env.mr(VA, 8192, Access::NONE);
        let (kb, mb) = b.env.mr(VA, 8192, REMOTE);
        ma.write(0, &pattern(n, 3)).expect("in range");
        b.env.post_recv(7, &[sge(VA, 8192, kb)]);
        b.env.post_recv(8, &[sge(VA + 5000, 10, kb)]);
        let s = [sge(VA, n, ka)];
        a.env.post(&SendWr {
            flags: WrFlags::SIGNALED | WrFlags::SOLICITED,
            ..SendWr::send_with_imm(1, SendData::Sges(&s), 0xfeed)
        });
        a.env.post(&SendWr::send(2, SendData::Inline(b"x")));
        run(&mut a, &mut b);
        assert_eq!(
            a.env.statuses(),
            [(1, WcStatus::SUCCESS), (2, WcStatus::SUCCESS)]
        );
        let got: Vec<_> = b
            .env
            .received
            .iter()
            .map(|c| (c.wr_id, c.opcode, c.flags, c.imm, c.byte_len as usize))
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
        assert_eq!(contents(&mb, n), pattern(n, 3));
    }
}

fn immediate(msn: u32, payload: &[u8]) -> Vec<u8> {
    untagged([0x41, 0x48], 0, 0, msn, 0, payload)
}

/// Conformance 86.
#[test]
fn c86_immediate_data_of_another_length_is_0_2_ff() {
    for n in [0, 4, 7, 9, 16] {
        let mut b = End::new(negotiated(false));
        b.env.post_recv(1, &[]);
        b.give(&immediate(1, &vec![0; n]));
        b.expect_terminate("0/2/ff");
        assert!(b.env.received.is_empty());
    }
    let mut b = End::new(negotiated(false));
    b.env.post_recv(1, &[]);
    b.give(&untagged([0x01, 0x48], 0, 0, 1, 0, &[0; 8]));
    b.expect_terminate("0/2/ff");
}

/// It is a message of queue 0: its MSN, its buffer, its place between Sends.
#[test]
fn immediate_data_obeys_the_rules_of_queue_0() {
    let cases: [(Vec<u8>, &str); 5] = [
        (immediate(1, &[0; 8]), "1/2/02"),
        (immediate(2, &[0; 8]), "1/2/03"),
        (untagged([0x41, 0x48], 0, 0, 1, 4, &[0; 8]), "1/2/04"),
        (untagged([0x41, 0x48], 0, 1, 1, 0, &[0; 8]), "1/2/01"),
        (raw(&[&[0xc1, 0x48], &[0; 12], &[0; 8]]), "0/2/06"),
    ];
    for (f, code) in cases {
        let mut b = End::new(negotiated(false));
        b.give(&f);
        b.expect_terminate(code);
    }
    let mut b = End::new(negotiated(false));
    let (k, _) = b.env.mr(VA, 64, REMOTE);
    b.env.post_recv(1, &[sge(VA, 64, k)]);
    b.give(&send(1, 0, false, &[1]));
    b.give(&immediate(1, &[0; 8]));
    b.expect_terminate("0/2/06");
}

/// A Terminate about Immediate Data blames its work request.
#[test]
fn a_refused_immediate_fails_its_write() {
    let (mut a, mut b) = pair();
    let (kb, _) = b.env.mr(VA, 64, REMOTE);
    a.env.post(&SendWr::write_with_imm(
        1,
        SendData::Inline(b"abc"),
        VA,
        kb.0,
        1,
    ));
    a.env
        .post(&SendWr::send_with_imm(2, SendData::Inline(b"abc"), 1));
    let frames = a.pull_all();
    b.give(&frames);
    a.ack_all();
    // The acknowledgement came too early for this Terminate: only what is not complete can fail.
    a.give(&b.pull_all());
    assert_eq!(
        a.qp.received_terminate().expect("told").to_string(),
        "1/2/02"
    );
    let (mut a, mut b) = pair();
    let (kb, _) = b.env.mr(VA, 64, REMOTE);
    a.env.post(&SendWr::write_with_imm(
        1,
        SendData::Inline(b"abc"),
        VA,
        kb.0,
        1,
    ));
    b.give(&a.pull_all());
    a.give(&b.pull_all());
    a.qp.on_tcp_closed(&mut a.env, CloseReason::Closed);
    assert_eq!(a.env.statuses(), [(1, WcStatus::REM_OP_ERR)]);
}
