//! Atomics (RFC 7306 section 5), at the level of octets and between two queue pairs.
mod common;
use common::*;
use siw_iwarp::rdmap::atomic_header::{AtomicOp, AtomicRequestHeader, AtomicResponseHeader};
use siw_iwarp::*;
use siw_memory::Stag;
use siw_shm::wqe::{SendData, SendWr};
use siw_shm::{Access, AtomicArgs, Opcode, SharedMemory, WcOpcode, WcStatus, WrFlags};
use std::sync::Arc;

const VA: u64 = 0x10_0000;
const ATOMIC: Access = Access(1 | 2 | 4 | 8);

fn word(r: &SharedMemory) -> u64 {
    r.atomic_u64(0)
        .expect("aligned")
        .load(std::sync::atomic::Ordering::SeqCst)
}

fn set(r: &SharedMemory, v: u64) {
    r.write(0, &v.to_ne_bytes()).expect("in range");
}

/// A responder whose memory at VA starts with `v`.
fn responder(v: u64) -> (End, Stag, Arc<SharedMemory>) {
    let end = End::new(negotiated(false));
    let (key, mem) = end.env.mr(VA, 64, ATOMIC);
    set(&mem, v);
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

fn atomic(msn: u32, r: &AtomicRequestHeader) -> Vec<u8> {
    untagged([0x41, 0x4a], 0, 1, msn, 0, &r.to_bytes())
}

fn response(msn: u32, id: u32, original: u64) -> Vec<u8> {
    let p = AtomicResponseHeader { id, original }.to_bytes();
    untagged([0x41, 0x4b], 0, 3, msn, 0, &p)
}

/// RFC 7306 sections 5.1 and 5.2: big endian on the wire, native in memory on both sides.
#[test]
fn fetch_add_and_cmp_swap_work_between_two_queue_pairs() {
    let (mut a, mut b) = pair();
    let (ka, ma) = a.env.mr(VA, 64, Access::LOCAL_WRITE);
    let (kb, mb) = b.env.mr(VA, 64, ATOMIC);
    set(&mb, 0x0102_0304_0506_0708);
    let s = |i: u64| sge(VA + 8 * i, 8, ka);
    a.env.post(&SendWr::fetch_add(1, s(0), VA, kb.0, 0x10));
    a.env.post(&SendWr::cmp_swap(
        2,
        s(1),
        VA,
        kb.0,
        0x0102_0304_0506_0718,
        99,
    ));
    a.env.post(&SendWr::cmp_swap(3, s(2), VA, kb.0, 1, 2));
    let masked = AtomicArgs {
        add_or_swap: 0xff,
        add_or_swap_mask: 0x80,
        compare: 0,
        compare_mask: 0,
    };
    a.env.post(&SendWr {
        remote_addr: VA,
        rkey: kb.0,
        ..wr(Opcode::FetchAdd, 4, SendData::Atomic(s(3), masked))
    });
    run(&mut a, &mut b);
    let want: Vec<u8> = [0x0102_0304_0506_0708u64, 0x0102_0304_0506_0718, 99, 99]
        .iter()
        .flat_map(|v| v.to_ne_bytes())
        .collect();
    assert_eq!(contents(&ma, 32), want);
    // 99 + 0xff in a field of eight bits.
    assert_eq!(word(&mb), (99 + 0xff) & 0xff);
    assert_eq!(
        a.env.statuses(),
        [1, 2, 3, 4].map(|i| (i, WcStatus::SUCCESS))
    );
    let ops: Vec<_> = a
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

/// Conformance 84: neither an odd address nor odd memory behind an even one.
#[test]
fn c84_an_unaligned_atomic_is_0_2_07_and_changes_nothing() {
    for off in 1..8 {
        let (mut b, key, mem) = responder(5);
        b.give(&atomic(
            1,
            &request(key, VA + off, AtomicArgs::fetch_add(1)),
        ));
        b.expect_terminate("0/2/07");
        assert_eq!(contents(&mem, 16)[8..], [0; 8]);
        assert_eq!(word(&mem), 5);
    }
    let mut b = End::new(negotiated(false));
    let (key, mem) = b.env.mr(VA - 4, 64, ATOMIC);
    b.give(&atomic(1, &request(key, VA, AtomicArgs::fetch_add(1))));
    b.expect_terminate("0/2/07");
    assert_eq!(contents(&mem, 64), [0; 64]);
}

/// Conformance 85.
#[test]
fn c85_an_unknown_atomic_opcode_is_0_2_06() {
    for op in [1u8, 3, 15] {
        let (mut b, key, mem) = responder(5);
        let mut r = request(key, VA, AtomicArgs::fetch_add(1)).to_bytes();
        r[3] = op;
        b.give(&untagged([0x41, 0x4a], 0, 1, 1, 0, &r));
        b.expect_terminate("0/2/06");
        assert_eq!(word(&mem), 5);
    }
}

#[test]
fn an_atomic_needs_its_right_its_key_its_bounds_and_its_length() {
    let cases: [(u64, u32, &str); 4] = [
        (VA, 0x100, "0/1/00"),
        (VA + 64, 0, "0/1/01"),
        (VA - 8, 0, "0/1/01"),
        (u64::MAX - 7, 0, "0/1/04"),
    ];
    for (to, other, code) in cases {
        let (mut b, key, mem) = responder(5);
        let mut r = request(key, to, AtomicArgs::fetch_add(1));
        r.stag ^= other;
        b.give(&atomic(1, &r));
        let code = if to == u64::MAX - 7 {
            &["0/1/01", "0/1/04"][..]
        } else {
            &[code][..]
        };
        let t = parse_terminate(&b.pull().expect("a Terminate"));
        assert!(code.contains(&t.code.to_string().as_str()), "{}", t.code);
        assert!(t.ddp.is_some() && t.read.is_none());
        assert_eq!(word(&mem), 5);
    }
    let mut b = End::new(negotiated(false));
    let (key, _) = b.env.mr(VA, 64, REMOTE);
    b.give(&atomic(1, &request(key, VA, AtomicArgs::fetch_add(1))));
    b.expect_terminate("0/1/02");
    let (mut b, key, _) = responder(5);
    let r = request(key, VA, AtomicArgs::fetch_add(1)).to_bytes();
    b.give(&untagged([0x41, 0x4a], 0, 1, 1, 0, &r[..51]));
    b.expect_terminate("0/2/ff");
    let (mut b, key, _) = responder(5);
    let r = request(key, VA, AtomicArgs::fetch_add(1));
    b.give(&untagged([0x41, 0x4a], 0, 0, 1, 0, &r.to_bytes()));
    b.expect_terminate("1/2/01");
}

/// Reads and atomics share MSNs and the IRD.
#[test]
fn c74_atomics_count_against_ird_together_with_reads() {
    let (mut b, key, mem) = responder(0);
    for msn in 1..=4 {
        if msn == 2 {
            let r = rdmap::ReadRequestHeader {
                sink_stag: 1,
                sink_to: 0,
                size: 8,
                src_stag: key.0,
                src_to: VA,
            };
            b.give(&read_request(msn, &r));
        } else {
            b.give(&atomic(msn, &request(key, VA, AtomicArgs::fetch_add(1))));
        }
    }
    assert_eq!(word(&mem), 0, "not done before it is its turn");
    b.give(&atomic(5, &request(key, VA, AtomicArgs::fetch_add(1))));
    b.expect_terminate("1/2/02");
}

/// Conformance 87: the response has the MSN of its own queue, and the identifier of its request.
#[test]
fn c87_responses_count_from_one_and_reflect_the_identifier() {
    let (mut b, key, _) = responder(7);
    for (msn, id) in [(1, 0xaaaa), (2, 0xbbbb)] {
        let r = AtomicRequestHeader {
            id,
            ..request(key, VA, AtomicArgs::fetch_add(1))
        };
        b.give(&atomic(msn, &r));
        let f = b.pull().expect("a response");
        let h = untagged_of(&f);
        assert_eq!(
            (ulpdu(&f)[..2].to_vec(), h.qn, h.msn.0),
            (vec![0x41, 0x4b], 3, msn)
        );
        let p: &[u8; 12] = ulpdu(&f)[18..].try_into().expect("12 octets");
        let want = AtomicResponseHeader {
            id,
            original: 6 + u64::from(msn),
        };
        assert_eq!(AtomicResponseHeader::parse(p), want);
        // Resent as it was, and done once.
        let mut again = Frame::default();
        let rec = *b.unacked.back().expect("pulled");
        b.qp.build_fpdu(&b.env.keys, &rec, &mut again)
            .expect("kept");
        assert_eq!(again.bytes, f);
    }
}

fn requester() -> (End, Arc<SharedMemory>) {
    let mut a = End::new(negotiated(true));
    let (k, mem) = a.env.mr(VA, 64, Access::LOCAL_WRITE);
    a.env.post(&SendWr::fetch_add(1, sge(VA, 8, k), 0, 9, 1));
    a.pull_all();
    a.ack_all();
    (a, mem)
}

/// Conformance 87, from the other side.
#[test]
fn c87_a_response_that_answers_nothing_ends_the_stream() {
    for (f, code, status) in [
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
        let (mut a, mem) = requester();
        a.give(&f);
        a.expect_terminate(code);
        a.qp.on_tcp_closed(&mut a.env, CloseReason::Closed);
        assert_eq!(a.env.statuses(), [(1, status)]);
        assert_eq!(contents(&mem, 8), [0; 8]);
    }
    let (mut a, mem) = requester();
    a.give(&response(1, 1, 7));
    assert_eq!(a.env.statuses(), [(1, WcStatus::SUCCESS)]);
    assert_eq!(word(&mem), 7);
    a.give(&response(2, 2, 7));
    a.expect_terminate("0/2/06");
}

/// Conformance 88, on the wire (the arithmetic has its test beside it).
#[test]
fn c88_a_masked_add_carries_within_its_fields() {
    let (mut b, key, mem) = responder(0x00ff_ffff_00ff_ffff);
    let args = AtomicArgs {
        add_or_swap_mask: 0x8000_0000_8000_0000,
        ..AtomicArgs::fetch_add(0xff00_0001_ff00_0001)
    };
    b.give(&atomic(1, &request(key, VA, args)));
    b.pull_all();
    assert_eq!(word(&mem), 0);
}

/// Conformance 89: Read, atomic, Read: each Read sees the word as of its place in the sequence.
#[test]
fn c89_reads_and_atomics_are_done_in_the_order_of_their_requests() {
    let (mut a, mut b) = pair();
    let (ka, ma) = a.env.mr(VA, 64, Access::LOCAL_WRITE);
    let (kb, mb) = b.env.mr(VA, 64, ATOMIC);
    set(&mb, 10);
    let s = |i: u64| [sge(VA + 8 * i, 8, ka)];
    a.env.post(&remote(Opcode::Read, 1, &s(0), VA, kb));
    a.env.post(&SendWr::fetch_add(2, s(1)[0], VA, kb.0, 1));
    a.env.post(&remote(Opcode::Read, 3, &s(2), VA, kb));
    a.env.post(&SendWr::cmp_swap(4, s(3)[0], VA, kb.0, 11, 20));
    // All requests are there before the first answer.
    b.give(&a.pull_all());
    a.ack_all();
    let kinds: Vec<u8> = std::iter::from_fn(|| b.pull())
        .map(|f| {
            a.give(&f);
            ulpdu(&f)[1]
        })
        .collect();
    assert_eq!(kinds, [0x42, 0x4b, 0x42, 0x4b]);
    let want: Vec<u8> = [10u64, 10, 11, 11]
        .iter()
        .flat_map(|v| v.to_ne_bytes())
        .collect();
    assert_eq!(contents(&ma, 32), want);
    assert_eq!(word(&mb), 20);
    assert_eq!(a.env.statuses().len(), 4);
}

/// A key that goes away between the request and its turn.
#[test]
fn an_atomic_whose_memory_went_away_is_refused_at_its_turn() {
    let (mut b, key, mem) = responder(5);
    b.give(&atomic(1, &request(key, VA, AtomicArgs::fetch_add(1))));
    b.env.table.remove(key).expect("there");
    b.expect_terminate("0/1/00");
    assert_eq!(word(&mem), 5);
}

#[test]
fn an_atomic_of_another_length_or_without_ord_fails_locally() {
    for (len, ord, status) in [
        (7, 4, WcStatus::LOC_LEN_ERR),
        (16, 4, WcStatus::LOC_LEN_ERR),
        (8, 0, WcStatus::LOC_QP_OP_ERR),
    ] {
        let mut a = End::new(NegotiatedParameters {
            ord,
            ..negotiated(true)
        });
        let (k, _) = a.env.mr(VA, 64, Access::LOCAL_WRITE);
        a.env.post(&SendWr::fetch_add(1, sge(VA, len, k), 0, 9, 1));
        a.expect_terminate("0/0/00");
        assert_eq!(a.env.statuses(), [(1, status)]);
    }
}

/// A fence waits for an atomic, and a Terminate that quotes one blames it.
#[test]
fn fences_and_terminates_know_atomics() {
    let mut a = End::new(negotiated(true));
    let (k, _) = a.env.mr(VA, 64, Access::LOCAL_WRITE);
    a.env.post(&SendWr::fetch_add(1, sge(VA, 8, k), 0, 9, 1));
    a.env.post(&SendWr {
        flags: WrFlags::FENCE,
        ..remote(Opcode::Write, 2, &[], 0, Stag(1))
    });
    let f = a.pull().expect("the atomic");
    assert!(a.pull().is_none(), "fenced");
    let mut t = vec![0x01, 0x01, 0xc0, 0];
    t.extend((ulpdu(&f).len() as u16).to_be_bytes());
    t.extend(&ulpdu(&f)[..18]);
    a.give(&untagged([0x41, 0x47], 0, 2, 1, 0, &t));
    a.qp.on_tcp_closed(&mut a.env, CloseReason::Closed);
    assert_eq!(
        a.env.statuses(),
        [(1, WcStatus::REM_ACCESS_ERR), (2, WcStatus::WR_FLUSH_ERR)]
    );
}
