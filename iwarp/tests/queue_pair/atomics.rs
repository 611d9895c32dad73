//! Atomics (RFC 7306 section 5), at octet level and between two queue pairs.
use crate::common::*;
use siw_iwarp::rdmap::ReadRequestHeader;
use siw_iwarp::rdmap::atomic_header::{AtomicOp, AtomicRequestHeader, AtomicResponseHeader};
use siw_iwarp::*;
use siw_memory::Stag;
use siw_shm::wqe::{SendData, SendWr};
use siw_shm::{Access, AtomicArgs, Opcode, SharedMemory, WcOpcode, WcStatus, WrFlags};
use std::sync::Arc;

const VA: u64 = 0x10_0000;
const ATOMIC: Access = Access(1 | 2 | 4 | 8);

fn word(region: &SharedMemory) -> u64 {
    region
        .atomic_u64(0)
        .expect("aligned")
        .load(std::sync::atomic::Ordering::SeqCst)
}

fn set(region: &SharedMemory, value: u64) {
    region.write(0, &value.to_ne_bytes()).expect("in range");
}

/// A responder whose memory at VA starts with `value`.
fn new_responder(value: u64) -> (End, Stag, Arc<SharedMemory>) {
    let end = End::new(negotiated(false));
    let (key, mem) = end.env.mr(VA, 64, ATOMIC);
    set(&mem, value);
    (end, key, mem)
}

fn request(key: Stag, to: u64, args: AtomicArgs) -> AtomicRequestHeader {
    AtomicRequestHeader {
        op: AtomicOp::FetchAdd,
        id: 0xcafe,
        stag: key.0,
        to,
        args,
    }
}

fn atomic(msn: u32, region: &AtomicRequestHeader) -> Vec<u8> {
    untagged([0x41, 0x4a], 0, 1, msn, 0, &region.to_bytes())
}

fn response(msn: u32, id: u32, original: u64) -> Vec<u8> {
    let payload = AtomicResponseHeader { id, original }.to_bytes();
    untagged([0x41, 0x4b], 0, 3, msn, 0, &payload)
}

/// RFC 7306 sections 5.1 and 5.2: big endian on the wire, native in memory on both sides.
#[test]
fn fetch_add_and_cmp_swap_work_between_two_queue_pairs() {
    let (mut initiator, mut responder) = pair();
    let (initiator_key, initiator_mem) = initiator.env.mr(VA, 64, Access::LOCAL_WRITE);
    let (responder_key, responder_mem) = responder.env.mr(VA, 64, ATOMIC);
    set(&responder_mem, 0x0102_0304_0506_0708);
    let s = |i: u64| sge(VA + 8 * i, 8, initiator_key);
    initiator
        .env
        .post(&SendWr::fetch_add(1, s(0), VA, responder_key.0, 0x10));
    initiator.env.post(&SendWr::cmp_swap(
        2,
        s(1),
        VA,
        responder_key.0,
        0x0102_0304_0506_0718,
        99,
    ));
    initiator
        .env
        .post(&SendWr::cmp_swap(3, s(2), VA, responder_key.0, 1, 2));
    let masked = AtomicArgs {
        add_or_swap: 0xff,
        add_or_swap_mask: 0x80,
        compare: 0,
        compare_mask: 0,
    };
    initiator.env.post(&SendWr {
        remote_addr: VA,
        rkey: responder_key.0,
        ..wr(Opcode::FetchAdd, 4, SendData::Atomic(s(3), masked))
    });
    run(&mut initiator, &mut responder);
    let want: Vec<u8> = [0x0102_0304_0506_0708u64, 0x0102_0304_0506_0718, 99, 99]
        .iter()
        .flat_map(|value| value.to_ne_bytes())
        .collect();
    assert_eq!(contents(&initiator_mem, 32), want);
    // 99 + 0xff in an eight-bit field.
    assert_eq!(word(&responder_mem), (99 + 0xff) & 0xff);
    assert_eq!(
        initiator.env.statuses(),
        [1, 2, 3, 4].map(|i| (i, WcStatus::SUCCESS))
    );
    let ops: Vec<_> = initiator
        .env
        .sent
        .iter()
        .flatten()
        .map(|c| (c.opcode, c.byte_len))
        .collect();
    assert_eq!(
        ops,
        [
            (WcOpcode::FETCH_ADD, 8),
            (WcOpcode::COMP_SWAP, 8),
            (WcOpcode::COMP_SWAP, 8),
            (WcOpcode::FETCH_ADD, 8)
        ]
    );
}

/// Conformance 84: neither an unaligned address nor unaligned memory at an aligned address.
#[test]
fn c84_unaligned_atomic_is_0_2_07_and_changes_nothing() {
    for off in 1..8 {
        let (mut responder, key, mem) = new_responder(5);
        responder.give(&atomic(
            1,
            &request(key, VA + off, AtomicArgs::fetch_add(1)),
        ));
        responder.expect_terminate("0/2/07");
        assert_eq!(contents(&mem, 16)[8..], [0; 8]);
        assert_eq!(word(&mem), 5);
    }
    let mut responder = End::new(negotiated(false));
    let (key, mem) = responder.env.mr(VA - 4, 64, ATOMIC);
    responder.give(&atomic(1, &request(key, VA, AtomicArgs::fetch_add(1))));
    responder.expect_terminate("0/2/07");
    assert_eq!(contents(&mem, 64), [0; 64]);
}

/// Conformance 85.
#[test]
fn c85_unknown_atomic_opcode_is_0_2_06() {
    for op in [1u8, 3, 15] {
        let (mut responder, key, mem) = new_responder(5);
        let mut region = request(key, VA, AtomicArgs::fetch_add(1)).to_bytes();
        region[3] = op;
        responder.give(&untagged([0x41, 0x4a], 0, 1, 1, 0, &region));
        responder.expect_terminate("0/2/06");
        assert_eq!(word(&mem), 5);
    }
}

#[test]
fn atomic_needs_right_key_bounds_and_length() {
    let cases: [(u64, u32, &str); 4] = [
        (VA, 0x100, "0/1/00"),
        (VA + 64, 0, "0/1/01"),
        (VA - 8, 0, "0/1/01"),
        (u64::MAX - 7, 0, "0/1/04"),
    ];
    for (to, other, code) in cases {
        let (mut responder, key, mem) = new_responder(5);
        let mut region = request(key, to, AtomicArgs::fetch_add(1));
        region.stag ^= other;
        responder.give(&atomic(1, &region));
        let code = if to == u64::MAX - 7 {
            &["0/1/01", "0/1/04"][..]
        } else {
            &[code][..]
        };
        let terminate = parse_terminate(&responder.pull().expect("a Terminate"));
        assert!(
            code.contains(&terminate.code.to_string().as_str()),
            "{}",
            terminate.code
        );
        assert!(terminate.ddp.is_some() && terminate.read.is_none());
        assert_eq!(word(&mem), 5);
    }
    let mut responder = End::new(negotiated(false));
    let (key, _) = responder.env.mr(VA, 64, REMOTE);
    responder.give(&atomic(1, &request(key, VA, AtomicArgs::fetch_add(1))));
    responder.expect_terminate("0/1/02");
    let (mut responder, key, _) = new_responder(5);
    let region = request(key, VA, AtomicArgs::fetch_add(1)).to_bytes();
    responder.give(&untagged([0x41, 0x4a], 0, 1, 1, 0, &region[..51]));
    responder.expect_terminate("0/2/ff");
    let (mut responder, key, _) = new_responder(5);
    let region = request(key, VA, AtomicArgs::fetch_add(1));
    responder.give(&untagged([0x41, 0x4a], 0, 0, 1, 0, &region.to_bytes()));
    responder.expect_terminate("1/2/01");
}

/// Reads and atomics share MSNs and the IRD.
#[test]
fn c74_atomics_count_against_ird_together_with_reads() {
    let (mut responder, key, mem) = new_responder(0);
    for msn in 1..=4 {
        if msn == 2 {
            let region = rdmap::ReadRequestHeader {
                sink_stag: 1,
                sink_to: 0,
                size: 8,
                src_stag: key.0,
                src_to: VA,
            };
            responder.give(&read_request(msn, &region));
        } else {
            responder.give(&atomic(msn, &request(key, VA, AtomicArgs::fetch_add(1))));
        }
    }
    assert_eq!(word(&mem), 0, "not done before it is its turn");
    // No receive work request would help.
    responder.qp.set_receive_wait(1000);
    responder.give(&atomic(5, &request(key, VA, AtomicArgs::fetch_add(1))));
    assert!(!responder.qp.awaits_receive());
    responder.expect_terminate("1/2/02");
}

/// Conformance 87: the response has the MSN of its own queue, and the identifier of its request.
#[test]
fn c87_responses_count_from_one_and_reflect_the_identifier() {
    let (mut responder, key, _) = new_responder(7);
    for (msn, id) in [(1, 0xaaaa), (2, 0xbbbb)] {
        let region = AtomicRequestHeader {
            id,
            ..request(key, VA, AtomicArgs::fetch_add(1))
        };
        responder.give(&atomic(msn, &region));
        let fpdu = responder.pull().expect("a response");
        let header = untagged_of(&fpdu);
        assert_eq!(
            (ulpdu(&fpdu)[..2].to_vec(), header.qn, header.msn.0),
            (vec![0x41, 0x4b], 3, msn)
        );
        let payload: &[u8; 12] = ulpdu(&fpdu)[18..].try_into().expect("12 octets");
        let want = AtomicResponseHeader {
            id,
            original: 6 + u64::from(msn),
        };
        assert_eq!(AtomicResponseHeader::parse(payload), want);
        // A retransmission is identical, and the atomic is executed once.
        let mut again = Frame::default();
        let rec = *responder.unacked.back().expect("pulled");
        responder.build_fpdu(&rec, &mut again).expect("kept");
        assert_eq!(again.bytes, fpdu);
    }
}

fn requester() -> (End, Arc<SharedMemory>) {
    let mut initiator = End::new(negotiated(true));
    let (key, mem) = initiator.env.mr(VA, 64, Access::LOCAL_WRITE);
    initiator
        .env
        .post(&SendWr::fetch_add(1, sge(VA, 8, key), 0, 9, 1));
    initiator.pull_all();
    initiator.ack_all();
    (initiator, mem)
}

/// Conformance 87, at the requester.
#[test]
fn c87_response_that_answers_nothing_ends_the_stream() {
    for (fpdu, code, status) in [
        (response(2, 1, 7), "1/2/03", WcStatus::BAD_RESP_ERR),
        (response(1, 2, 7), "0/2/ff", WcStatus::BAD_RESP_ERR),
        (
            untagged([0x41, 0x4b], 0, 3, 1, 0, &[0; 11]),
            "0/2/ff",
            WcStatus::BAD_RESP_ERR,
        ),
        (
            read_response(true, 1, 0, &[]),
            "0/2/06",
            WcStatus::WR_FLUSH_ERR,
        ),
    ] {
        let (mut initiator, mem) = requester();
        initiator.give(&fpdu);
        initiator.expect_terminate(code);
        initiator
            .qp
            .on_tcp_closed(&mut initiator.env, CloseReason::Closed);
        assert_eq!(initiator.env.statuses(), [(1, status)]);
        assert_eq!(contents(&mem, 8), [0; 8]);
    }
    let (mut initiator, mem) = requester();
    initiator.give(&response(1, 1, 7));
    assert_eq!(initiator.env.statuses(), [(1, WcStatus::SUCCESS)]);
    assert_eq!(word(&mem), 7);
    initiator.give(&response(2, 2, 7));
    initiator.expect_terminate("0/2/06");
}

/// Conformance 88, on the wire (the arithmetic has its own unit test).
#[test]
fn c88_masked_add_carries_within_its_fields() {
    let (mut responder, key, mem) = new_responder(0x00ff_ffff_00ff_ffff);
    let args = AtomicArgs {
        add_or_swap_mask: 0x8000_0000_8000_0000,
        ..AtomicArgs::fetch_add(0xff00_0001_ff00_0001)
    };
    responder.give(&atomic(1, &request(key, VA, args)));
    responder.pull_all();
    assert_eq!(word(&mem), 0);
}

/// Conformance 89: Read, atomic, Read: each Read sees the word at its position in the sequence, as each
/// response is sent before the next request has its turn.
#[test]
fn c89_reads_and_atomics_run_in_request_order() {
    let (mut initiator, mut responder) = pair();
    let (initiator_key, initiator_mem) = initiator.env.mr(VA, 64, Access::LOCAL_WRITE);
    let (responder_key, responder_mem) = responder.env.mr(VA, 64, ATOMIC);
    set(&responder_mem, 10);
    let s = |i: u64| [sge(VA + 8 * i, 8, initiator_key)];
    initiator
        .env
        .post(&remote(Opcode::Read, 1, &s(0), VA, responder_key));
    initiator
        .env
        .post(&SendWr::fetch_add(2, s(1)[0], VA, responder_key.0, 1));
    initiator
        .env
        .post(&remote(Opcode::Read, 3, &s(2), VA, responder_key));
    initiator
        .env
        .post(&SendWr::cmp_swap(4, s(3)[0], VA, responder_key.0, 11, 20));
    // All requests arrive before the first response.
    responder.give(&initiator.pull_all());
    initiator.ack_all();
    let kinds: Vec<u8> = std::iter::from_fn(|| responder.pull())
        .map(|fpdu| {
            initiator.give(&fpdu);
            ulpdu(&fpdu)[1]
        })
        .collect();
    assert_eq!(kinds, [0x42, 0x4b, 0x42, 0x4b]);
    let want: Vec<u8> = [10u64, 10, 11, 11]
        .iter()
        .flat_map(|value| value.to_ne_bytes())
        .collect();
    assert_eq!(contents(&initiator_mem, 32), want);
    assert_eq!(word(&responder_mem), 20);
    assert_eq!(initiator.env.statuses().len(), 4);
}

/// PROTOCOL.md section 5.1: TCP has the record of the response, and its payload is copied later.
#[test]
fn a_read_response_that_is_sent_late_shows_a_later_atomic() {
    let (mut responder, key, mem) = new_responder(5);
    let read = ReadRequestHeader {
        sink_stag: 1,
        sink_to: 0,
        size: 8,
        src_stag: key.0,
        src_to: VA,
    };
    responder.give(&read_request(1, &read));
    responder.give(&atomic(2, &request(key, VA, AtomicArgs::fetch_add(1))));
    let room = usize::MAX;
    let first = responder.qp.next_record(&mut responder.env, room);
    let second = responder.qp.next_record(&mut responder.env, room);
    assert!(second.is_some());
    assert_eq!(word(&mem), 6, "executed in its turn");
    let mut frame = Frame::default();
    let record = first.expect("the response of the Read").record;
    responder.build_fpdu(&record, &mut frame).expect("built");
    assert_eq!(ulpdu(&frame.bytes)[14..], 6u64.to_ne_bytes());
}

/// A key that is removed between the request and its turn.
#[test]
fn atomic_whose_memory_went_away_is_refused_at_its_turn() {
    let (mut responder, key, mem) = new_responder(5);
    responder.give(&atomic(1, &request(key, VA, AtomicArgs::fetch_add(1))));
    responder.env.table.remove(key).expect("there");
    responder.expect_terminate("0/1/00");
    assert_eq!(word(&mem), 5);
}

#[test]
fn atomic_of_another_length_or_without_ord_fails() {
    for (len, ord, status) in [
        (7, 4, WcStatus::LOC_LEN_ERR),
        (16, 4, WcStatus::LOC_LEN_ERR),
        (8, 0, WcStatus::LOC_QP_OP_ERR),
    ] {
        let mut initiator = End::new(NegotiatedParameters {
            ord,
            ..negotiated(true)
        });
        let (key, _) = initiator.env.mr(VA, 64, Access::LOCAL_WRITE);
        initiator
            .env
            .post(&SendWr::fetch_add(1, sge(VA, len, key), 0, 9, 1));
        initiator.expect_terminate("0/0/00");
        assert_eq!(initiator.env.statuses(), [(1, status)]);
    }
}

/// A fence waits for an atomic, and a Terminate that quotes one fails it.
#[test]
fn fences_and_terminates_know_atomics() {
    let mut initiator = End::new(negotiated(true));
    let (key, _) = initiator.env.mr(VA, 64, Access::LOCAL_WRITE);
    initiator
        .env
        .post(&SendWr::fetch_add(1, sge(VA, 8, key), 0, 9, 1));
    initiator.env.post(&SendWr {
        flags: WrFlags::FENCE,
        ..remote(Opcode::Write, 2, &[], 0, Stag(1))
    });
    let fpdu = initiator.pull().expect("the atomic");
    assert!(initiator.pull().is_none(), "fenced");
    let mut terminate = vec![0x01, 0x01, 0xc0, 0];
    terminate.extend((ulpdu(&fpdu).len() as u16).to_be_bytes());
    terminate.extend(&ulpdu(&fpdu)[..18]);
    initiator.give(&untagged([0x41, 0x47], 0, 2, 1, 0, &terminate));
    initiator
        .qp
        .on_tcp_closed(&mut initiator.env, CloseReason::Closed);
    assert_eq!(
        initiator.env.statuses(),
        [(1, WcStatus::REM_ACCESS_ERR), (2, WcStatus::WR_FLUSH_ERR)]
    );
}
