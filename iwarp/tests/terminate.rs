//! A scripted peer breaks the rules: each Terminate code of RFC 5040, 5041 and 5044 that a queue pair
//! can send, by its number in the conformance list.
mod common;
use common::*;
use siw_iwarp::rdmap::ReadRequestHeader;
use siw_iwarp::*;
use siw_memory::Stag;
use siw_shm::wqe::SendData;
use siw_shm::{Access, Opcode, WcStatus};

const VA: u64 = 0x10_0000;
const LEN: usize = 4096;

/// A responder with remote memory at VA and one receive work request of 100 bytes.
struct Victim {
    end: End,
    key: u32,
    mem: std::sync::Arc<siw_shm::SharedMemory>,
}

fn victim() -> Victim {
    let mut end = End::new(negotiated(false));
    let (key, mem) = end.env.mr(VA, LEN, REMOTE);
    end.env.post_recv(1, &[sge(VA, 100, key)]);
    Victim {
        end,
        key: key.0,
        mem,
    }
}

impl Victim {
    /// Gives the frame, expects the Terminate, and that memory did not change.
    fn refuses(mut self, frame: &[u8], code: &str) -> rdmap::terminate::ReceivedTerminate {
        self.end.give(frame);
        let t = self.end.expect_terminate(code);
        assert_eq!(contents(&self.mem, LEN), vec![0; LEN], "nothing placed");
        // Conformance 37, 79: a second error is neither reported nor processed.
        self.end.give(&write(self.key, VA, &[1]));
        self.end.give(&write(self.key ^ 1, VA, &[1]));
        assert!(self.end.pull().is_none());
        assert_eq!(contents(&self.mem, LEN), vec![0; LEN]);
        assert_eq!(self.end.rx.available(), 0, "discarded up to the FIN");
        t
    }
}

fn read(v: &Victim) -> ReadRequestHeader {
    ReadRequestHeader {
        sink_stag: 5,
        sink_to: 6,
        size: 8,
        src_stag: v.key,
        src_to: VA,
    }
}

#[test]
fn c27_a_bad_crc_is_2_0_02_without_headers_and_nothing_is_placed() {
    let v = victim();
    let mut f = write(v.key, VA, &[1; 64]);
    let n = f.len();
    f[n - 10] ^= 1;
    let t = v.refuses(&f, "2/0/02");
    assert!(t.ddp.is_none() && t.read.is_none());
}

#[test]
fn c30_a_ulpdu_shorter_than_its_header_is_2_0_03() {
    for u in [
        &[][..],
        &[0xc1],
        &[0xc1, 0x40, 0, 0],
        &[0x41, 0x43, 0, 0, 0, 0],
    ] {
        victim().refuses(&raw(&[u]), "2/0/03");
    }
}

#[test]
fn c29_non_zero_pad_is_ignored_but_counts_into_the_crc() {
    let mut v = victim();
    let mut f = write(v.key, VA, &[9; 5]);
    let n = f.len();
    assert_eq!(f[n - 7..n - 4], [0; 3], "three octets of pad");
    f[n - 5] = 0xee;
    let sum = crc32c::crc32c(&f[..n - 4]);
    f[n - 4..].copy_from_slice(&sum.to_le_bytes());
    v.end.give(&f);
    assert_eq!(contents(&v.mem, 6), [9, 9, 9, 9, 9, 0]);
}

#[test]
fn c38_c51_a_wrong_ddp_version_is_1_1_04_or_1_2_06() {
    let v = victim();
    let key = v.key;
    let f = raw(&[&[0xc2, 0x40], &key.to_be_bytes(), &VA.to_be_bytes(), &[1]]);
    let t = v.refuses(&f, "1/1/04");
    assert_eq!(t.ddp, Some(hdr18(ulpdu(&f))));
    victim().refuses(&untagged([0x40, 0x43], 0, 0, 1, 0, &[1]), "1/2/06");
}

#[test]
fn c39_reserved_bits_are_ignored() {
    let mut v = victim();
    let f = raw(&[&[0xfd, 0x70], &v.key.to_be_bytes(), &VA.to_be_bytes(), &[3]]);
    v.end.give(&f);
    assert_eq!(contents(&v.mem, 1), [3]);
}

#[test]
fn c40_c41_unknown_stag_and_stale_key_are_1_1_00() {
    for stag in [0, 0xdead_be00] {
        let f = write(stag, VA, &[1]);
        let t = victim().refuses(&f, "1/1/00");
        assert_eq!(t.ddp, Some(hdr18(ulpdu(&f))), "the header is quoted (81)");
        assert!(t.read.is_none());
    }
    let v = victim();
    let stale = v.key ^ 0xff;
    v.refuses(&write(stale, VA, &[1]), "1/1/00");
}

#[test]
fn c42_an_invalidated_stag_is_1_1_00() {
    let v = victim();
    v.end
        .env
        .keys
        .invalidate_key(Stag(v.key), PD, 3)
        .expect("known");
    let key = v.key;
    v.refuses(&write(key, VA, &[1]), "1/1/00");
}

#[test]
fn c42_nothing_is_placed_after_deregistration_in_mid_message() {
    let mut v = victim();
    v.end.give(&raw(&[
        &[0x81, 0x40],
        &v.key.to_be_bytes(),
        &VA.to_be_bytes(),
        &[1; 8],
    ]));
    v.end.env.table.remove(Stag(v.key)).expect("known");
    v.end.give(&write(v.key, VA + 8, &[1; 8]));
    v.end.expect_terminate("1/1/00");
    assert_eq!(contents(&v.mem, 9)[8], 0);
}

#[test]
fn c43_c44_memory_of_another_pd_or_stream_is_1_1_02() {
    let v = victim();
    let (k, m) = v.end.env.mr_in(VA, 64, REMOTE, PD + 1, None);
    v.refuses(&write(k.0, VA, &[1]), "1/1/02");
    assert_eq!(contents(&m, 1), [0]);
    let v = victim();
    let (k, m) = v.end.env.mr_in(VA, 64, REMOTE, PD, Some(99));
    v.refuses(&write(k.0, VA, &[1]), "1/1/02");
    assert_eq!(contents(&m, 1), [0]);
}

#[test]
fn c45_c46_c47_bounds_and_wrap_are_byte_granular() {
    let end = VA + LEN as u64;
    for (to, n, code) in [
        (VA - 1, 1, "1/1/01"),
        (end, 1, "1/1/01"),
        (end - 3, 4, "1/1/01"),
        (0, 1, "1/1/01"),
        (u64::MAX, 2, "1/1/03"),
        (u64::MAX - 2, 4, "1/1/03"),
    ] {
        let v = victim();
        let f = write(v.key, to, &vec![1; n]);
        v.refuses(&f, code);
    }
    let mut v = victim();
    v.end.give(&write(v.key, end - 4, &[7; 4]));
    assert_eq!(contents(&v.mem, LEN)[LEN - 4..], [7; 4]);
    assert!(v.end.pull().is_none());
}

#[test]
fn c48_a_write_without_write_access_is_0_1_02() {
    let v = victim();
    let (k, _) = v.end.env.mr(VA, 64, Access::REMOTE_READ);
    let t = v.refuses(&write(k.0, VA, &[1]), "0/1/02");
    assert!(t.ddp.is_some() && t.read.is_none());
}

#[test]
fn c49_c50_zero_length_needs_no_key_and_a_gap_is_legal() {
    let mut v = victim();
    v.end.give(&write(0xffff_ffff, u64::MAX, &[]));
    v.end.give(&raw(&[
        &[0x81, 0x40],
        &v.key.to_be_bytes(),
        &VA.to_be_bytes(),
        &[1],
    ]));
    v.end.give(&write(v.key, VA + 5, &[2]));
    assert_eq!(contents(&v.mem, 6), [1, 0, 0, 0, 0, 2]);
    assert!(v.end.pull().is_none());
}

#[test]
fn c52_c53_wrong_queues_are_1_2_01() {
    victim().refuses(&untagged([0x41, 0x43], 0, 4, 1, 0, &[1]), "1/2/01");
    victim().refuses(&untagged([0x41, 0x43], 0, u32::MAX, 1, 0, &[1]), "1/2/01");
    victim().refuses(&untagged([0x41, 0x43], 0, 1, 1, 0, &[1]), "1/2/01");
    victim().refuses(&untagged([0x41, 0x41], 0, 0, 1, 0, &[0; 28]), "1/2/01");
    victim().refuses(&untagged([0x41, 0x47], 0, 0, 1, 0, &[0; 4]), "1/2/01");
}

#[test]
fn c54_an_empty_receive_queue_is_1_2_02() {
    let mut v = victim();
    v.end.env.rq.clear();
    let f = send(1, 0, true, &[1]);
    let t = v.refuses(&f, "1/2/02");
    assert_eq!(t.ddp, Some(hdr18(ulpdu(&f))));
}

#[test]
fn c55_c56_msn_replay_and_gap_are_1_2_03() {
    victim().refuses(&send(0, 0, true, &[1]), "1/2/03");
    victim().refuses(&send(2, 0, true, &[1]), "1/2/03");
    let mut v = victim();
    v.end.give(&send(1, 0, true, &[0]));
    v.end.env.post_recv(2, &[]);
    v.refuses(&send(1, 0, true, &[]), "1/2/03");
}

#[test]
fn c58_a_wrong_mo_is_1_2_04() {
    victim().refuses(&send(1, 4, true, &[1]), "1/2/04");
    for mo in [0, 3, 5] {
        let mut v = victim();
        v.end.give(&send(1, 0, false, &[0; 4]));
        v.refuses(&send(1, mo, true, &[1]), "1/2/04");
    }
}

#[test]
fn c59_a_message_longer_than_the_buffer_is_1_2_05_and_loc_len_err() {
    let mut v = victim();
    v.end.give(&send(1, 0, false, &[0; 100]));
    v.end.give(&send(1, 100, true, &[1]));
    v.end.expect_terminate("1/2/05");
    assert_eq!(v.end.env.recv_statuses(), [(1, WcStatus::LOC_LEN_ERR)]);
    victim().refuses(&send(1, 0, true, &[1; 101]), "1/2/05");
}

#[test]
fn c61_an_stag_in_a_plain_send_is_ignored() {
    let mut v = victim();
    v.end.give(&untagged([0x41, 0x43], v.key, 0, 1, 0, &[]));
    assert!(v.end.env.keys.lookup(Stag(v.key)).is_some());
    assert_eq!(v.end.env.recv_statuses(), [(1, WcStatus::SUCCESS)]);
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
        let f = untagged(ctl, 0, 0, 1, 0, &[1]);
        let t = victim().refuses(&f, code);
        assert_eq!(t.ddp, Some(hdr18(ulpdu(&f))));
    }
    let v = victim();
    let key = v.key;
    for (ctl, code) in [
        ([0xc1, 0x00], "0/2/05"),
        ([0xc1, 0x43], "0/2/06"),
        ([0xc1, 0x4f], "0/2/06"),
    ] {
        let f = raw(&[&ctl, &key.to_be_bytes(), &VA.to_be_bytes(), &[1]]);
        victim().refuses(&f, code);
    }
}

#[test]
fn a_message_that_changes_its_opcode_is_0_2_06() {
    let mut v = victim();
    v.end.give(&send(1, 0, false, &[0; 4]));
    v.refuses(&untagged([0x41, 0x45], 0, 0, 1, 4, &[1]), "0/2/06");
}

#[test]
fn c65_an_unsolicited_read_response_is_0_2_06() {
    let v = victim();
    let key = v.key;
    v.refuses(&read_response(true, key, VA, &[1]), "0/2/06");
}

/// An initiator with one Read of 3000 bytes outstanding.
fn reader() -> (End, Stag, std::sync::Arc<siw_shm::SharedMemory>) {
    let mut a = End::new(negotiated(true));
    let (k, m) = a.env.mr(VA, LEN, REMOTE);
    a.env.post(&remote(
        Opcode::Read,
        42,
        &[sge(VA, 3000, k)],
        0x77,
        Stag(9),
    ));
    a.pull().expect("request");
    a.ack_all();
    (a, k, m)
}

#[test]
fn c66_a_response_that_does_not_match_its_request_is_1_1_00_or_1_1_01() {
    type Make = fn(u32) -> Vec<u8>;
    let cases: [(Make, &str); 6] = [
        (|k| read_response(true, k ^ 1, VA, &[1; 3000]), "1/1/00"),
        (|k| read_response(false, k, VA + 1, &[1; 8]), "1/1/01"),
        (|k| read_response(true, k, VA, &[1; 8]), "1/1/01"),
        (|k| read_response(false, k, VA, &[1; 3000]), "1/1/01"),
        (|k| read_response(true, k, VA, &[1; 3001]), "1/1/01"),
        (|k| read_response(true, k, VA, &[]), "1/1/01"),
    ];
    for (make, code) in cases {
        let (mut a, k, m) = reader();
        a.give(&make(k.0));
        a.expect_terminate(code);
        assert_eq!(contents(&m, LEN), vec![0; LEN]);
        assert!(a.env.statuses().is_empty() || a.env.statuses().len() == 1);
        a.qp.on_tcp_closed(&mut a.env, CloseReason::Closed);
        assert_eq!(a.env.statuses(), [(42, WcStatus::BAD_RESP_ERR)]);
    }
}

#[test]
fn a_sink_that_was_deregistered_fails_the_read_locally() {
    let (mut a, k, m) = reader();
    a.give(&read_response(false, k.0, VA, &[1; 1000]));
    a.env.table.remove(k).expect("known");
    a.give(&read_response(true, k.0, VA + 1000, &[1; 2000]));
    a.expect_terminate("1/1/00");
    assert_eq!(contents(&m, 1001)[1000], 0);
    a.qp.on_tcp_closed(&mut a.env, CloseReason::Closed);
    assert_eq!(a.env.statuses(), [(42, WcStatus::LOC_PROT_ERR)]);
}

#[test]
fn c67_a_read_request_of_another_length_is_0_2_ff() {
    for n in [0, 27, 29, 52] {
        victim().refuses(&untagged([0x41, 0x41], 0, 1, 1, 0, &vec![0; n]), "0/2/ff");
    }
}

#[test]
fn c68_to_c72_a_read_source_is_checked_and_the_request_is_quoted() {
    let v = victim();
    let (other_pd, _) = v.end.env.mr_in(VA, 64, REMOTE, PD + 1, None);
    let (no_read, _) = v
        .end
        .env
        .mr(VA, 64, Access::REMOTE_WRITE | Access::LOCAL_WRITE);
    let base = read(&v);
    let (key, end) = (v.key, VA + LEN as u64);
    for (stag, to, size, code) in [
        (0xdead_be00, VA, 8, "0/1/00"),
        (0, VA, 8, "0/1/00"),
        (key, VA - 1, 1, "0/1/01"),
        (key, end - 7, 8, "0/1/01"),
        (key, u64::MAX, 8, "0/1/04"),
    ] {
        let mut v = victim();
        let r = ReadRequestHeader {
            src_stag: if stag == key { v.key } else { stag },
            src_to: to,
            size,
            ..base
        };
        let f = read_request(1, &r);
        v.end.give(&f);
        let t = v.end.expect_terminate(code);
        assert_eq!(t.ddp, Some(hdr18(ulpdu(&f))));
        assert_eq!(t.read, Some(r), "81: M, D and R");
    }
    let r = ReadRequestHeader {
        src_stag: no_read.0,
        ..base
    };
    let mut v = v;
    v.end.give(&read_request(1, &r));
    v.end.expect_terminate("0/1/02");
    let mut v = victim();
    let (other2, _) = v.end.env.mr_in(VA, 64, REMOTE, PD + 1, None);
    let _ = other_pd;
    let r = ReadRequestHeader {
        src_stag: other2.0,
        ..base
    };
    v.end.give(&read_request(1, &r));
    v.end.expect_terminate("0/1/03");
}

#[test]
fn c73_a_zero_length_read_is_answered_whatever_its_stags() {
    let mut v = victim();
    let r = ReadRequestHeader {
        sink_stag: 0xabcd,
        sink_to: 0x1234,
        size: 0,
        src_stag: 0xffff_ffff,
        src_to: u64::MAX,
    };
    v.end.give(&read_request(1, &r));
    let f = v.end.pull().expect("a response");
    assert_eq!(ulpdu(&f)[..2], [0xc1, 0x42]);
    let h = tagged_of(&f);
    assert_eq!((h.stag, h.to, ulpdu(&f).len()), (0xabcd, 0x1234, 14));
}

#[test]
fn c74_more_reads_than_ird_are_1_2_02() {
    let mut v = victim();
    let r = read(&v);
    for msn in 1..=4 {
        v.end.give(&read_request(msn, &r));
        assert_eq!(v.end.qp.state(), RdmapState::Rts);
    }
    v.end.give(&read_request(5, &r));
    v.end.expect_terminate("1/2/02");
    // One that is answered makes room, acknowledged or not.
    let mut v = victim();
    let r = read(&v);
    for msn in 1..=20 {
        v.end.give(&read_request(msn, &r));
        v.end.pull().expect("response");
    }
    assert_eq!(v.end.qp.state(), RdmapState::Rts);
}

#[test]
fn read_requests_out_of_sequence_are_1_2_03() {
    let v = victim();
    let r = read(&v);
    v.refuses(&read_request(2, &r), "1/2/03");
    let v = victim();
    let r = read(&v);
    v.refuses(&untagged([0x41, 0x41], 0, 1, 1, 4, &r.to_bytes()), "1/2/04");
}

#[test]
fn c75_c76_c77_invalidation_of_what_the_peer_may_not_invalidate() {
    type Key = fn(&Victim) -> u32;
    let cases: [(Key, &str); 4] = [
        (|_| 0xdead_be00, "0/2/09"),
        (
            |v| v.end.env.mr_in(VA, 64, REMOTE, PD + 1, None).0.0,
            "0/1/09",
        ),
        (
            |v| v.end.env.mr_in(VA, 64, REMOTE, PD, Some(99)).0.0,
            "0/1/09",
        ),
        (|v| v.end.env.mr(VA, 64, Access::LOCAL_WRITE).0.0, "0/2/09"),
    ];
    for (key, code) in cases {
        let mut v = victim();
        let k = key(&v);
        let known = v.end.env.keys.lookup(Stag(k)).is_some();
        v.end.give(&untagged([0x41, 0x44], k, 0, 1, 0, &[]));
        v.end.expect_terminate(code);
        assert_eq!(v.end.env.recv_statuses(), [(1, WcStatus::REM_INV_REQ_ERR)]);
        assert_eq!(v.end.env.keys.lookup(Stag(k)).is_some(), known);
    }
}

#[test]
fn c82_a_source_that_goes_away_in_mid_read_is_quoted_at_the_current_position() {
    let mut v = victim();
    let r = ReadRequestHeader {
        size: 4000,
        ..read(&v)
    };
    v.end.give(&read_request(1, &r));
    v.end.pull().expect("first segment");
    v.end.env.table.remove(Stag(v.key)).expect("known");
    let f = v.end.pull().expect("Terminate");
    let t = parse_terminate(&f);
    assert_eq!(t.code.to_string(), "0/1/00");
    let done = 1428;
    assert_eq!(
        t.read,
        Some(ReadRequestHeader {
            sink_to: 6 + done,
            src_to: VA + done,
            size: 4000 - done as u32,
            ..r
        })
    );
    assert!(v.end.pull().is_none());
}

#[test]
fn c83_a_local_error_is_0_0_00_and_completes_with_loc_prot_err() {
    let mut a = End::new(negotiated(true));
    let (k, _) = a.env.mr(VA, 64, Access::NONE);
    a.env
        .post(&remote(Opcode::Write, 1, &[sge(VA, 64, k)], 0, Stag(1)));
    a.env
        .post(&remote(Opcode::Write, 2, &[sge(VA, 65, k)], 0, Stag(1)));
    a.env
        .post(&remote(Opcode::Write, 3, &[sge(VA, 1, k)], 0, Stag(1)));
    a.pull().expect("the good one");
    let t = a.expect_terminate("0/0/00");
    assert!(t.ddp.is_none());
    assert!(a.env.sent.is_empty(), "not before the one in front");
    a.ack_all();
    a.qp.on_tcp_closed(&mut a.env, CloseReason::Closed);
    assert_eq!(
        a.env.statuses(),
        [
            (1, WcStatus::SUCCESS),
            (2, WcStatus::LOC_PROT_ERR),
            (3, WcStatus::WR_FLUSH_ERR)
        ]
    );
    assert_eq!(a.qp.state(), RdmapState::Error);
    assert_eq!(a.env.events, [QpEvent::QpFatal]);
}

#[test]
fn local_mistakes_of_each_kind_fail_their_work_request() {
    type Post = fn(&mut End);
    let cases: [(Post, WcStatus); 4] = [
        (
            |a| {
                a.env.post(&wr(
                    Opcode::Send,
                    1,
                    SendData::Sges(&[sge(VA, 1, Stag(0x500))]),
                ))
            },
            WcStatus::LOC_PROT_ERR,
        ),
        (
            |a| {
                let (k, _) = a.env.mr_in(VA, 64, REMOTE, PD + 1, None);
                a.env
                    .post(&wr(Opcode::Send, 1, SendData::Sges(&[sge(VA, 1, k)])));
            },
            WcStatus::LOC_PROT_ERR,
        ),
        (
            |a| {
                let (k, _) = a.env.mr(VA, 64, Access::REMOTE_WRITE);
                a.env
                    .post(&remote(Opcode::Read, 1, &[sge(VA, 1, k)], 0, Stag(1)));
            },
            WcStatus::LOC_PROT_ERR,
        ),
        (
            |a| {
                a.qp = QueuePair::new(init_attr());
                a.qp.set_rts(
                    NegotiatedParameters {
                        ord: 0,
                        ..negotiated(true)
                    },
                    EMSS,
                );
                a.env.post(&remote(Opcode::Read, 1, &[], 0, Stag(1)));
            },
            WcStatus::LOC_QP_OP_ERR,
        ),
    ];
    for (post, status) in cases {
        let mut a = End::new(negotiated(true));
        post(&mut a);
        a.expect_terminate("0/0/00");
        assert_eq!(a.env.statuses(), [(1, status)]);
    }
    let mut v = victim();
    v.end.env.rq.clear();
    v.end.env.post_recv(8, &[sge(VA, 10, Stag(0x500))]);
    v.end.give(&send(1, 0, true, &[1]));
    v.end.expect_terminate("0/0/00");
    assert_eq!(v.end.env.recv_statuses(), [(8, WcStatus::LOC_PROT_ERR)]);
}

#[test]
fn a_ring_in_nonsense_state_ends_the_queue_pair() {
    let mut a = End::new(negotiated(true));
    a.env.ring_fault = true;
    a.expect_terminate("0/0/00");
    a.qp.on_tcp_closed(&mut a.env, CloseReason::Closed);
    assert_eq!(a.qp.state(), RdmapState::Error);
}

#[test]
fn c80_the_first_error_wins_when_several_arrive_together() {
    let mut v = victim();
    let mut bytes = write(0xdead_be00, VA, &[1]);
    bytes.extend(untagged([0x41, 0x4f], 0, 0, 1, 0, &[]));
    bytes.extend(write(v.key, VA, &[1]));
    v.end.give(&bytes);
    v.end.expect_terminate("1/1/00");
    assert_eq!(contents(&v.mem, 1), [0]);
    assert_eq!(v.end.env.events, [QpEvent::QpAccessErr]);
}

// What a peer's Terminate does to us.

fn term(payload: &[u8]) -> Vec<u8> {
    untagged([0x41, 0x47], 0, 2, 1, 0, payload)
}

/// An initiator with WRITE, SEND, READ and WRITE outstanding, none acknowledged; and the FPDUs.
fn busy() -> (End, Vec<Vec<u8>>) {
    let mut a = End::new(negotiated(true));
    let (k, _) = a.env.mr(VA, LEN, REMOTE);
    let s = [sge(VA, 16, k)];
    a.env.post(&remote(Opcode::Write, 1, &s, 0x100, Stag(0x11)));
    a.env.post(&wr(Opcode::Send, 2, SendData::Sges(&s)));
    a.env.post(&remote(Opcode::Read, 3, &s, 0x300, Stag(0x33)));
    a.env.post(&remote(Opcode::Write, 4, &s, 0x400, Stag(0x44)));
    a.env.post_recv(9, &[]);
    let f = std::iter::from_fn(|| a.pull()).collect();
    (a, f)
}

#[test]
fn a_received_terminate_blames_the_work_request_that_it_quotes() {
    for (code, at, read, status) in [
        (TerminateCode::DDP_STAG, 0, false, WcStatus::REM_ACCESS_ERR),
        (TerminateCode::DDP_NO_BUFFER, 1, false, WcStatus::REM_OP_ERR),
        (
            TerminateCode::DDP_TOO_LONG,
            1,
            false,
            WcStatus::REM_INV_REQ_ERR,
        ),
        (
            TerminateCode::RDMAP_ACCESS,
            2,
            true,
            WcStatus::REM_ACCESS_ERR,
        ),
        (TerminateCode::RDMAP_OPCODE, 2, false, WcStatus::REM_OP_ERR),
        (
            TerminateCode::RDMAP_ACCESS,
            3,
            false,
            WcStatus::REM_ACCESS_ERR,
        ),
    ] {
        let (mut a, frames) = busy();
        let u = ulpdu(&frames[at]);
        let by = rdmap::terminate::OffendingSegment {
            ulpdu_len: u.len() as u16,
            hdr: hdr18(u),
            read: read.then(|| ReadRequestHeader::parse(u[18..46].try_into().expect("28"))),
        };
        let p = rdmap::terminate::TerminatePayload::new(code, Some(&by));
        a.give(&term(p.as_bytes()));
        assert_eq!(a.qp.state(), RdmapState::Terminate);
        assert_eq!(a.qp.received_terminate(), Some(code));
        assert!(a.pull().is_none(), "no Terminate in return");
        assert_eq!(a.qp.requested_close(), Some(CloseKind::Graceful));
        a.ack_all();
        a.qp.on_tcp_closed(&mut a.env, CloseReason::Closed);
        let mut want = Vec::new();
        for i in 0..4 {
            want.push((
                i as u64 + 1,
                match i {
                    i if i == at => status,
                    // The Read in front of the last Write was never answered.
                    i if i < at && i != 2 => WcStatus::SUCCESS,
                    _ => WcStatus::WR_FLUSH_ERR,
                },
            ));
        }
        assert_eq!(a.env.statuses(), want, "{code}");
        assert_eq!(a.env.recv_statuses(), [(9, WcStatus::WR_FLUSH_ERR)]);
        assert_eq!(a.qp.state(), RdmapState::Error);
    }
}

#[test]
fn a_read_that_linux_siw_refuses_is_blamed_although_siw_quotes_its_length_for_its_msn() {
    let (mut a, frames) = busy();
    // RDMAP, remote protection, STag; M, D and R; no segment length; the header of the request.
    let mut p = vec![0x10, 0, 0x07, 0, 0, 0];
    p.extend(&ulpdu(&frames[2])[..46]);
    p[16..20].copy_from_slice(&16u32.to_be_bytes());
    a.give(&term(&p));
    assert_eq!(a.qp.received_terminate(), Some(TerminateCode::RDMAP_STAG));
    a.ack_all();
    a.qp.on_tcp_closed(&mut a.env, CloseReason::Closed);
    let statuses: Vec<WcStatus> = a.env.statuses().iter().map(|s| s.1).collect();
    let want = [
        WcStatus::SUCCESS,
        WcStatus::SUCCESS,
        WcStatus::REM_ACCESS_ERR,
        WcStatus::WR_FLUSH_ERR,
    ];
    assert_eq!(statuses, want);
}

#[test]
fn siw_sets_the_read_header_bit_without_a_read_header() {
    let (mut a, frames) = busy();
    let mut p = vec![0x10, 9, 0x07, 0, 0, 0];
    p.extend(&ulpdu(&frames[1])[..18]);
    a.give(&term(&p));
    let code = a.qp.received_terminate().expect("sound");
    assert_eq!(code, TerminateCode::RDMAP_CANNOT_INVALIDATE_PROT);
}

#[test]
fn a_terminate_without_headers_blames_the_oldest() {
    for p in [[0x20, 2, 0, 0], [0x02, 2, 0, 0], [0x23, 2, 0, 0]] {
        let (mut a, _) = busy();
        a.give(&term(&p));
        assert_eq!(a.qp.received_terminate(), Some(TerminateCode::MPA_CRC));
        assert_eq!(a.env.statuses(), [(1, WcStatus::GENERAL_ERR)]);
        a.qp.on_tcp_closed(&mut a.env, CloseReason::Reset);
        assert_eq!(a.env.statuses().len(), 4);
    }
}

#[test]
fn c78_a_malformed_terminate_is_a_local_error() {
    for f in [
        term(&[]),
        term(&[0x11, 0]),
        term(&[0x11, 0, 0xc0, 0, 0, 30]),
        untagged([0x41, 0x47], 0, 2, 2, 0, &[0x11, 0, 0, 0]),
    ] {
        let (mut a, _) = busy();
        a.give(&f);
        assert_eq!(a.qp.state(), RdmapState::Terminate);
        assert_eq!(a.qp.received_terminate(), None);
        assert!(a.pull().is_none());
        assert_eq!(a.env.events, [QpEvent::QpFatal]);
        a.qp.on_tcp_closed(&mut a.env, CloseReason::Closed);
        assert_eq!(a.env.statuses().len(), 4);
    }
}

#[test]
fn both_nibble_orders_are_told_apart_for_every_code() {
    let quoted = rdmap::terminate::OffendingSegment {
        ulpdu_len: 15,
        hdr: hdr18(ulpdu(&write(1, 2, &[3]))),
        read: None,
    };
    for (l, t, codes) in [
        (0u8, 1u8, &[0u8, 1, 2, 3, 4, 9, 0xff][..]),
        (0, 2, &[5, 6, 7, 8, 9, 0xff]),
        (1, 1, &[0, 1, 2, 3, 4]),
        (1, 2, &[1, 2, 3, 4, 5, 6]),
        (2, 0, &[1, 2, 3, 4, 5, 6, 7]),
        (0, 0, &[0]),
    ] {
        for &code in codes {
            let c = TerminateCode {
                layer: l,
                error_type: t,
                code,
            };
            let p = rdmap::terminate::TerminatePayload::new(c, Some(&quoted));
            let mut b = p.as_bytes().to_vec();
            let r = rdmap::terminate::ReceivedTerminate::parse(&b).expect("sound");
            assert_eq!((r.code, r.is_siw_order), (c, false));
            b[0] = b[0].rotate_left(4);
            let r = rdmap::terminate::ReceivedTerminate::parse(&b).expect("sound");
            let same = l == t;
            // 1/2 and 2/1: only one of them is registered.
            assert_eq!((r.code, r.is_siw_order), (c, !same), "{c}");
            // siw's control bits are at the other end: they tell even 1/1.
            let p = p.in_bit_order(rdmap::terminate::TerminateBitOrder::Siw);
            let r = rdmap::terminate::ReceivedTerminate::parse(p.as_bytes()).expect("sound");
            let quotes = p.as_bytes().len() > 4;
            assert_eq!((r.code, r.is_siw_order), (c, quotes || !same), "{c}");
            assert_eq!(r.ddp, quotes.then_some(quoted.hdr));
        }
    }
}

/// Conformance 37, 79: after the first error nothing is processed, reported, completed or sent but the
/// one Terminate.
#[test]
fn c37_c79_nothing_happens_after_the_first_error() {
    let mut v = victim();
    v.end
        .env
        .post(&wr(Opcode::Send, 5, SendData::Inline(b"later")));
    let mut bytes = write(v.key ^ 0x100, VA, &[1]);
    bytes.extend(send(9, 0, true, &[2]));
    bytes.extend(send(1, 0, true, &[3; 10]));
    bytes.extend(write(v.key, VA, &[4]));
    v.end.give(&bytes);
    v.end.expect_terminate("1/1/00");
    v.end.give(&read_request(1, &read(&v)));
    assert!(v.end.pull().is_none());
    assert_eq!(contents(&v.mem, LEN), vec![0; LEN]);
    assert!(v.end.env.received.is_empty());
    assert_eq!(v.end.env.events.len(), 1, "told once");
}

/// Conformance 81: RFC 5040 figure 10, which headers a Terminate quotes, for each layer and type.
#[test]
fn c81_the_header_control_bits_follow_figure_10() {
    let by = rdmap::terminate::OffendingSegment {
        ulpdu_len: 46,
        hdr: hdr18(&[0x41; 18]),
        read: Some(ReadRequestHeader::default()),
    };
    for (layer, error_type, hct, len) in [
        (0, 0, 0x00, 4),
        (0, 1, 0xe0, 4 + 2 + 18 + 28),
        (0, 2, 0xe0, 4 + 2 + 18 + 28),
        (1, 0, 0x00, 4),
        (1, 1, 0xc0, 4 + 2 + 18),
        (1, 2, 0xc0, 4 + 2 + 18),
        (2, 0, 0x00, 4),
    ] {
        let code = TerminateCode {
            layer,
            error_type,
            code: 1,
        };
        let p = rdmap::terminate::TerminatePayload::new(code, Some(&by));
        let b = p.as_bytes();
        assert_eq!(
            (b[0], b[2], b[3], b.len()),
            (layer << 4 | error_type, hct, 0, len)
        );
        if hct & 0x80 != 0 {
            assert_eq!(b[4..6], [0, 46], "the length of the ULPDU");
        }
        let alone = rdmap::terminate::TerminatePayload::new(code, None);
        assert_eq!(alone.as_bytes()[2], 0, "nothing to quote");
    }
}

#[test]
fn a_user_terminate_leaves_and_closes() {
    let (mut a, _) = busy();
    a.qp.send_terminate(TerminateCode::LOCAL_CATASTROPHIC);
    a.expect_terminate("0/0/00");
    a.qp.send_terminate(TerminateCode::MPA_CRC);
    assert!(a.pull().is_none());
}
