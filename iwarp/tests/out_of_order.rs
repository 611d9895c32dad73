//! Payload that arrives beyond a hole is placed at once and delivered in its turn (RFC 5041
//! section 5.2, RFC 5040 section 5.5).

mod common;

use common::*;
use siw_iwarp::mpa::marker::MarkerPosition;
use siw_iwarp::rdmap::ReadRequestHeader;
use siw_iwarp::*;
use siw_shm::{Opcode, WcStatus};

const BASE: u64 = 0x10_0000;
const LEN: usize = 16 * 1024;

fn end(policy: OutOfOrderPolicy) -> End {
    let mut e = End::new(negotiated(false));
    e.qp = QueuePair::new(init_attr());
    e.qp.set_out_of_order(policy);
    e.qp.set_rts(negotiated(false), EMSS);
    e
}

/// The end has received its first FPDU.
fn begun(policy: OutOfOrderPolicy) -> End {
    let mut e = end(policy);
    e.give(&write(0, 0, b""));
    e
}

/// Shows a segment that begins `offset` octets beyond what was received in order.
fn show(e: &mut End, offset: usize, bytes: &[u8]) -> u32 {
    e.qp.receive_out_of_order(&mut e.env, offset, &ByteStream::from(bytes))
}

#[test]
fn a_write_beyond_a_hole_is_in_memory_at_once_and_its_send_completes_only_in_order() {
    let mut e = begun(OutOfOrderPolicy::Aligned);
    let (key, region) = e.env.mr(BASE, LEN, REMOTE);
    e.env.post_recv(1, &[]);
    let data = pattern(1000, 3);
    let first = write(key.0, BASE, &data);
    let second = write(key.0, BASE + 1000, &data);
    let third = send(1, 0, true, b"");
    assert_eq!(show(&mut e, first.len(), &second), 1);
    assert_eq!(show(&mut e, first.len() + second.len(), &third), 0);
    let mem = contents(&region, 2000);
    assert!(mem[..1000].iter().all(|b| *b == 0) && mem[1000..] == data);
    assert!(e.env.received.is_empty());
    e.give(&[first, second, third].concat());
    assert_eq!(contents(&region, 1000), data);
    assert_eq!(e.env.recv_statuses(), [(1, WcStatus::SUCCESS)]);
}

#[test]
fn what_was_placed_early_is_not_placed_again_in_its_turn_or_by_a_duplicate() {
    let mut e = begun(OutOfOrderPolicy::Aligned);
    let (key, region) = e.env.mr(BASE, LEN, REMOTE);
    let first = write(key.0, BASE, &[1; 8]);
    let second = write(key.0, BASE + 8, &[2; 8]);
    assert_eq!(show(&mut e, first.len(), &second), 1);
    // The application uses it: nobody may put the old bytes there again.
    region.write(8, &[9; 8]).expect("in range");
    assert_eq!(show(&mut e, first.len(), &second), 0);
    e.give(&first);
    e.give(&second);
    assert_eq!(contents(&region, 16), [[1; 8], [9; 8]].concat());
    // The next one is an ordinary one again.
    e.give(&write(key.0, BASE + 8, &[3; 8]));
    assert_eq!(contents(&region, 16)[8..], [3; 8]);
}

#[test]
fn a_different_fpdu_in_the_place_of_an_early_one_is_placed() {
    let mut e = begun(OutOfOrderPolicy::Aligned);
    let (key, region) = e.env.mr(BASE, LEN, REMOTE);
    let first = write(key.0, BASE, &[1; 8]);
    assert_eq!(
        show(&mut e, first.len(), &write(key.0, BASE + 8, &[2; 8])),
        1
    );
    e.give(&first);
    e.give(&write(key.0, BASE + 16, &[4; 8]));
    assert_eq!(contents(&region, 24), [[1; 8], [2; 8], [4; 8]].concat());
}

#[test]
fn nothing_is_placed_early_without_crc_before_the_first_fpdu_or_when_it_is_off() {
    for (policy, crc, first) in [
        (OutOfOrderPolicy::Off, true, true),
        (OutOfOrderPolicy::Markers, true, true), // no markers in this stream
        (OutOfOrderPolicy::Aligned, false, true),
        (OutOfOrderPolicy::Aligned, true, false),
    ] {
        let mut e = End::new(negotiated(false));
        e.qp = QueuePair::new(init_attr());
        e.qp.set_out_of_order(policy);
        let n = NegotiatedParameters {
            crc,
            ..negotiated(false)
        };
        e.qp.set_rts(n, EMSS);
        if first {
            e.give(&write(0, 0, b""));
        }
        let (key, region) = e.env.mr(BASE, LEN, REMOTE);
        assert_eq!(show(&mut e, 100, &write(key.0, BASE, &[7; 64])), 0);
        assert_eq!(contents(&region, 64), [0; 64]);
    }
}

#[test]
fn a_sender_that_once_split_an_fpdu_is_no_longer_trusted_to_align() {
    let mut e = begun(OutOfOrderPolicy::Aligned);
    let (key, region) = e.env.mr(BASE, LEN, REMOTE);
    let w = write(key.0, BASE, &[1; 64]);
    e.give(&w[..30]);
    e.give(&w[30..]);
    assert_eq!(show(&mut e, 100, &write(key.0, BASE + 64, &[7; 64])), 0);
    assert_eq!(contents(&region, 128)[64..], [0; 64]);
}

#[test]
fn a_bad_crc_or_a_refused_access_beyond_a_hole_waits_for_its_turn() {
    let mut e = begun(OutOfOrderPolicy::Aligned);
    let (key, region) = e.env.mr(BASE, LEN, REMOTE);
    let first = write(key.0, BASE, &[1; 8]);
    let mut bad = write(key.0, BASE + 8, &[2; 8]);
    bad[20] ^= 1;
    assert_eq!(show(&mut e, first.len(), &bad), 0);
    let beyond = write(key.0, BASE + LEN as u64, &[2; 8]);
    assert_eq!(show(&mut e, first.len(), &beyond), 0);
    assert_eq!(contents(&region, 16), [0; 16]);
    assert_eq!(e.qp.state(), RdmapState::Rts);
    assert!(e.pull().is_none(), "no Terminate yet");
    e.give(&first);
    e.give(&beyond);
    e.expect_terminate("1/1/01");
}

#[test]
fn a_key_that_is_gone_when_its_turn_comes_is_an_error_all_the_same() {
    let mut e = begun(OutOfOrderPolicy::Aligned);
    let (key, _region) = e.env.mr(BASE, LEN, REMOTE);
    let first = send(1, 0, true, b"");
    let second = write(key.0, BASE, &[2; 8]);
    e.env.post_recv(1, &[]);
    assert_eq!(show(&mut e, first.len(), &second), 1);
    e.give(&first);
    e.env
        .keys
        .invalidate_key(key, PD, init_attr().qpn)
        .expect("valid");
    e.give(&second);
    e.expect_terminate("1/1/00");
}

#[test]
fn the_rest_of_a_send_goes_to_its_receive_buffer_and_other_sends_wait() {
    let mut e = begun(OutOfOrderPolicy::Aligned);
    let (key, region) = e.env.mr(BASE, LEN, REMOTE);
    e.env
        .post_recv(1, &[sge(BASE, 100, key), sge(BASE + 1000, 100, key)]);
    e.env.post_recv(2, &[sge(BASE + 2000, 100, key)]);
    e.give(&send(1, 0, false, &[1; 60]));
    let hole = send(1, 60, false, &[2; 60]);
    let rest = send(1, 120, true, &[3; 40]);
    assert_eq!(show(&mut e, hole.len(), &rest), 1);
    let next = send(2, 0, true, &[4; 10]);
    assert_eq!(show(&mut e, hole.len() + rest.len(), &next), 0);
    assert_eq!(contents(&region, 1060)[1020..], [3; 40]);
    assert!(e.env.received.is_empty());
    e.give(&[hole, rest, next].concat());
    let mem = contents(&region, 2010);
    assert_eq!(mem[..100], [[1; 60].as_slice(), &[2; 40]].concat());
    assert_eq!(mem[1000..1060], [[2; 20].as_slice(), &[3; 40]].concat());
    assert_eq!(mem[2000..], [4; 10]);
    let lengths: Vec<_> = e.env.received.iter().map(|c| c.byte_len).collect();
    assert_eq!(lengths, [160, 10]);
}

#[test]
fn a_read_response_beyond_a_hole_is_placed_when_it_answers_an_outstanding_read() {
    let mut e = begun(OutOfOrderPolicy::Aligned);
    let (key, region) = e.env.mr(BASE, LEN, REMOTE);
    let sink = [sge(BASE, 2000, key)];
    e.env.post(&remote(
        Opcode::Read,
        5,
        &sink,
        0x9000,
        siw_memory::Stag(0x777),
    ));
    let request = e.pull().expect("a Read Request");
    let r = ReadRequestHeader::parse(ulpdu(&request)[18..].try_into().expect("28 octets"));
    e.ack_all();
    let first = read_response(false, r.sink_stag, r.sink_to, &[1; 1000]);
    let second = read_response(true, r.sink_stag, r.sink_to + 1000, &[2; 1000]);
    let stray = read_response(true, r.sink_stag, r.sink_to + 1001, &[3; 1000]);
    assert_eq!(show(&mut e, first.len(), &stray), 0);
    assert_eq!(show(&mut e, first.len(), &second), 1);
    assert_eq!(contents(&region, 2000)[1000..], [2; 1000]);
    assert!(e.env.sent.is_empty());
    e.give(&first);
    e.give(&second);
    assert_eq!(e.env.statuses(), [(5, WcStatus::SUCCESS)]);
    assert_eq!(contents(&region, 1000), [1; 1000]);
}

/// With markers the first FPDU of a segment is found wherever it begins.
#[test]
fn markers_find_the_fpdus_of_a_segment_that_is_not_aligned() {
    let n = NegotiatedParameters {
        markers_in: true,
        ..negotiated(false)
    };
    let mut found = 0;
    for cut in (0..1400).step_by(100) {
        let mut e = End::new(n);
        e.qp = QueuePair::new(init_attr());
        e.qp.set_out_of_order(OutOfOrderPolicy::Markers);
        e.qp.set_rts(n, EMSS);
        let (key, region) = e.env.mr(BASE, LEN, REMOTE);
        let mut stream = Vec::new();
        let mut starts = Vec::new();
        for i in 0..8u64 {
            starts.push(stream.len());
            let w = mpa::fpdu::encode_fpdu_at(
                &[
                    &[0xc1, 0x40],
                    &key.0.to_be_bytes(),
                    &(BASE + i * 700).to_be_bytes(),
                    &pattern(700, i as u8),
                ],
                true,
                MarkerPosition::START.advanced_by(stream.len()),
            );
            stream.extend(w);
        }
        let in_order = starts[1];
        e.give(&stream[..in_order]);
        let held = &stream[in_order + cut..];
        let placed = show(&mut e, cut, held);
        found += placed;
        for i in 8 - u64::from(placed)..8 {
            let at = i as usize * 700;
            assert_eq!(contents(&region, LEN)[at..at + 700], pattern(700, i as u8));
        }
        assert!(placed >= 5, "cut {cut}: {placed}");
        e.give(&stream[in_order..]);
        for i in 0..8usize {
            let mem = contents(&region, LEN);
            assert_eq!(mem[i * 700..(i + 1) * 700], pattern(700, i as u8));
        }
        assert_eq!(e.qp.state(), RdmapState::Rts);
    }
    assert!(found > 0);
}

/// Whatever is shown, in whatever order, memory and completions end as they do in order.
#[test]
fn any_order_of_arrival_ends_with_the_same_memory_and_the_same_completions() {
    for seed in 1..300u64 {
        let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut rand = move |n: usize| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 11) as usize % n
        };
        let mut e = begun(OutOfOrderPolicy::Aligned);
        let (key, region) = e.env.mr(BASE, LEN, REMOTE);
        let mut want = vec![0; LEN];
        let mut segments = Vec::new();
        let mut msn = 1;
        for i in 0..20u8 {
            let len = 1 + rand(600);
            let data = pattern(len, i);
            if rand(3) == 0 {
                let to = i as usize * 700;
                e.env
                    .post_recv(u64::from(i), &[sge(BASE + to as u64, 700, key)]);
                want[to..to + len].copy_from_slice(&data);
                let cut = rand(len);
                segments.push(send(msn, 0, false, &data[..cut]));
                segments.push(send(msn, cut as u32, true, &data[cut..]));
                msn += 1;
            } else {
                let to = i as usize * 700;
                want[to..to + len].copy_from_slice(&data);
                segments.push(write(key.0, BASE + to as u64, &data));
            }
        }
        let mut next = 0;
        let mut shown = 0;
        while next < segments.len() {
            // What lies beyond the next segment, some of it, in any order, some of it twice.
            for _ in 0..rand(6) {
                let pick = next + 1 + rand(segments.len() - next);
                if pick < segments.len() {
                    let offset = segments[next..pick].iter().map(Vec::len).sum();
                    shown += show(&mut e, offset, &segments[pick].clone());
                }
            }
            let n = 1 + rand(3.min(segments.len() - next));
            for s in &segments[next..next + n] {
                e.rx.push(s);
            }
            e.qp.receive_in_order(&mut e.env, &mut e.rx);
            next += n;
        }
        assert_eq!(e.qp.state(), RdmapState::Rts, "seed {seed}");
        assert_eq!(contents(&region, LEN), want, "seed {seed}");
        assert_eq!(e.env.received.len(), msn as usize - 1);
        assert!(seed > 5 || shown > 0);
    }
}
