//! Atomic operations and immediate data (RFC 7306).

use crate::bench::Responder;
use crate::common::net::lacks_network;
use crate::common::peer::{AtomicRequest, Peer, ReadRequest, untagged, write};
use crate::skip_if;
use siw::{Access, Mr, WcFlags, WcStatus};

fn words(b: &Responder, values: &[u64]) -> Mr {
    let mr = b.app.pd.alloc_mr(4096, Access(15)).unwrap();
    for (i, v) in values.iter().enumerate() {
        mr.write(8 * i, &v.to_ne_bytes()).unwrap();
    }
    mr
}

fn word(mr: &Mr, n: usize) -> u64 {
    let mut b = [0; 8];
    mr.read(8 * n, &mut b).unwrap();
    u64::from_ne_bytes(b)
}

/// Reads the next Atomic Response: MSN, identifier, original value.
fn response(peer: &mut Peer) -> (u32, u32, u64) {
    let u = peer.take_fpdu();
    assert_eq!((&u[..2], u.len()), (&[0x41, 0x4b][..], 18 + 12));
    let at = |i: usize| u32::from_be_bytes(u[i..i + 4].try_into().unwrap());
    assert_eq!((at(6), at(14)), (3, 0), "queue 3, MO 0");
    let value = u64::from_be_bytes(u[22..30].try_into().unwrap());
    (at(10), at(18), value)
}

fn add(mr: &Mr, id: u32, n: usize, value: u64, mask: u64) -> AtomicRequest {
    AtomicRequest {
        id,
        stag: mr.rkey(),
        to: mr.addr() + 8 * n as u64,
        add_or_swap: value,
        mask,
        ..AtomicRequest::default()
    }
}

#[test]
fn c84_an_unaligned_atomic_is_answered_by_terminate_0_2_07_and_memory_stays() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mr = words(&b, &[1, 2]);
    let mut r = add(&mr, 1, 0, 5, 0);
    r.to += 4;
    b.refuses(&r.message(1), [0x02, 0x07]);
    assert_eq!((word(&mr, 0), word(&mr, 1)), (1, 2));
}

#[test]
fn c85_an_unknown_atomic_operation_is_answered_by_terminate_0_2_06_and_memory_stays() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mr = words(&b, &[1]);
    for op in [1, 3, 15] {
        let r = AtomicRequest {
            op,
            ..add(&mr, 1, 0, 5, 0)
        };
        b.refuses(&r.message(1), [0x02, 0x06]);
        b.app.qp.reset().unwrap();
    }
    assert_eq!(word(&mr, 0), 1);
}

#[test]
fn c86_immediate_data_of_another_length_is_answered_by_terminate_0_2_ff() {
    skip_if!(lacks_network());
    let b = Responder::new();
    for len in [7, 9] {
        let f = untagged([0x41, 0x48], 0, 0, 1, 0, &[1; 9][..len]);
        b.refuses(&f, [0x02, 0xff]);
        b.app.qp.reset().unwrap();
    }
}

#[test]
fn immediate_data_behind_a_write_completes_a_receive_with_both() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    b.recv(1, 0, 64);
    peer.send(&write(
        true,
        b.app.mr.rkey(),
        b.app.mr.addr() + 500,
        b"written",
    ));
    peer.send(&untagged(
        [0x41, 0x48],
        0,
        0,
        1,
        0,
        &[0, 0, 0, 0, 1, 2, 3, 4],
    ));
    let wc = b.app.wc();
    assert_eq!(
        (wc.wr_id, wc.status, wc.byte_len),
        (1, WcStatus::SUCCESS, 7)
    );
    assert_ne!(wc.flags.0 & WcFlags::WITH_IMM.0, 0);
    assert_eq!(b.app.read(500, 7), b"written");
}

#[test]
fn c87_responses_come_in_order_with_their_identifiers() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mr = words(&b, &[10, 20]);
    let mut peer = b.stream();
    let swap = |id, compare, value| AtomicRequest {
        op: 2,
        id,
        stag: mr.rkey(),
        to: mr.addr() + 8,
        add_or_swap: value,
        mask: u64::MAX,
        compare,
        compare_mask: u64::MAX,
    };
    peer.send(
        &[
            add(&mr, 0xcafe, 0, 5, 0).message(1),
            swap(7, 20, 21).message(2),
        ]
        .concat(),
    );
    assert_eq!(response(&mut peer), (1, 0xcafe, 10));
    assert_eq!(response(&mut peer), (2, 7, 20));
    // A comparison that fails changes nothing and returns the current value.
    peer.send(&swap(7, 20, 22).message(3));
    assert_eq!(response(&mut peer), (3, 7, 21));
    assert_eq!((word(&mr, 0), word(&mr, 1)), (15, 21));
}

#[test]
fn c88_a_masked_add_keeps_its_carries_within_the_fields() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mr = words(&b, &[0x0000_00ff_ffff_ffff]);
    let mut peer = b.stream();
    // The set bits of the mask end fields: two fields of 32 bits.
    peer.send(&add(&mr, 1, 0, 0x0000_0001_0000_0001, 0x8000_0000_8000_0000).message(1));
    assert_eq!(response(&mut peer).2, 0x0000_00ff_ffff_ffff);
    assert_eq!(word(&mr, 0), 0x0000_0100_0000_0000);
}

#[test]
fn c89_reads_and_atomics_are_done_in_the_order_of_their_requests() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mr = words(&b, &[1]);
    let mut peer = b.stream();
    let read = ReadRequest {
        sink_stag: 0x77,
        sink_to: 0,
        size: 8,
        src_stag: mr.rkey(),
        src_to: mr.addr(),
    };
    peer.send(
        &[
            read.message(1),
            add(&mr, 1, 0, 1, 0).message(2),
            read.message(3),
        ]
        .concat(),
    );
    // As with a Write after a Read, the first operation may see the effect of the second (RFC 5040
    // section 5.5).
    let first = peer.take_fpdu();
    assert!(first[14..] == 1u64.to_ne_bytes() || first[14..] == 2u64.to_ne_bytes());
    assert_eq!(response(&mut peer).2, 1);
    assert_eq!(peer.take_fpdu()[14..], 2u64.to_ne_bytes());
}
