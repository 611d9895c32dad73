//! Payload that arrives beyond a gap is placed at once and delivered in order (RFC 5041 section 5.2,
//! RFC 5040 section 5.5).

use crate::common::*;
use siw_iwarp::mpa::marker::MarkerPosition;
use siw_iwarp::rdmap::ReadRequestHeader;
use siw_iwarp::*;
use siw_shm::{Opcode, WcStatus};

const BASE: u64 = 0x10_0000;
const LEN: usize = 16 * 1024;

fn end(policy: OutOfOrderPolicy) -> End {
    let mut end = End::new(negotiated(false));
    end.qp = QueuePair::new(init_attr());
    end.qp.set_out_of_order(policy);
    end.qp.set_rts(negotiated(false), EMSS);
    end
}

/// An end that has received its first FPDU.
fn begun(policy: OutOfOrderPolicy) -> End {
    let mut end = end(policy);
    end.give(&write(0, 0, b""));
    end
}

/// Passes a segment that begins `offset` octets beyond the data received in order.
fn show(end: &mut End, offset: usize, bytes: &[u8]) -> u32 {
    end.qp
        .receive_out_of_order(&mut end.env, offset, &ByteStream::from(bytes))
}

#[test]
fn write_beyond_a_gap_is_placed_at_once() {
    let mut end = begun(OutOfOrderPolicy::Aligned);
    let (key, region) = end.env.mr(BASE, LEN, REMOTE);
    end.env.post_recv(1, &[]);
    let data = pattern(1000, 3);
    let first = write(key.0, BASE, &data);
    let second = write(key.0, BASE + 1000, &data);
    let third = send(1, 0, true, b"");
    assert_eq!(show(&mut end, first.len(), &second), 1);
    assert_eq!(show(&mut end, first.len() + second.len(), &third), 0);
    let mem = contents(&region, 2000);
    assert!(mem[..1000].iter().all(|b| *b == 0) && mem[1000..] == data);
    assert!(end.env.received.is_empty());
    end.give(&[first, second, third].concat());
    assert_eq!(contents(&region, 1000), data);
    assert_eq!(end.env.recv_statuses(), [(1, WcStatus::SUCCESS)]);
}

#[test]
fn early_payload_is_not_placed_twice() {
    let mut end = begun(OutOfOrderPolicy::Aligned);
    let (key, region) = end.env.mr(BASE, LEN, REMOTE);
    let first = write(key.0, BASE, &[1; 8]);
    let second = write(key.0, BASE + 8, &[2; 8]);
    assert_eq!(show(&mut end, first.len(), &second), 1);
    // The application uses the memory: the old bytes must not be placed there again.
    region.write(8, &[9; 8]).expect("in range");
    assert_eq!(show(&mut end, first.len(), &second), 0);
    end.give(&first);
    end.give(&second);
    assert_eq!(contents(&region, 16), [[1; 8], [9; 8]].concat());
    // The next FPDU is placed normally.
    end.give(&write(key.0, BASE + 8, &[3; 8]));
    assert_eq!(contents(&region, 16)[8..], [3; 8]);
}

#[test]
fn different_fpdu_at_an_early_position_is_placed() {
    let mut end = begun(OutOfOrderPolicy::Aligned);
    let (key, region) = end.env.mr(BASE, LEN, REMOTE);
    let first = write(key.0, BASE, &[1; 8]);
    assert_eq!(
        show(&mut end, first.len(), &write(key.0, BASE + 8, &[2; 8])),
        1
    );
    end.give(&first);
    end.give(&write(key.0, BASE + 16, &[4; 8]));
    assert_eq!(contents(&region, 24), [[1; 8], [2; 8], [4; 8]].concat());
}

#[test]
fn early_placement_needs_crc_and_the_first_fpdu() {
    for (policy, crc, first) in [
        (OutOfOrderPolicy::Off, true, true),
        (OutOfOrderPolicy::Markers, true, true), // no markers in this stream
        (OutOfOrderPolicy::Aligned, false, true),
        (OutOfOrderPolicy::Aligned, true, false),
    ] {
        let mut end = End::new(negotiated(false));
        end.qp = QueuePair::new(init_attr());
        end.qp.set_out_of_order(policy);
        let negotiated_markers = NegotiatedParameters {
            crc,
            ..negotiated(false)
        };
        end.qp.set_rts(negotiated_markers, EMSS);
        if first {
            end.give(&write(0, 0, b""));
        }
        let (key, region) = end.env.mr(BASE, LEN, REMOTE);
        assert_eq!(show(&mut end, 100, &write(key.0, BASE, &[7; 64])), 0);
        assert_eq!(contents(&region, 64), [0; 64]);
    }
}

#[test]
fn sender_that_split_an_fpdu_is_not_trusted_to_align() {
    let mut end = begun(OutOfOrderPolicy::Aligned);
    let (key, region) = end.env.mr(BASE, LEN, REMOTE);
    let fpdu = write(key.0, BASE, &[1; 64]);
    end.give(&fpdu[..30]);
    end.give(&fpdu[30..]);
    assert_eq!(show(&mut end, 100, &write(key.0, BASE + 64, &[7; 64])), 0);
    assert_eq!(contents(&region, 128)[64..], [0; 64]);
}

#[test]
fn errors_beyond_a_gap_wait_for_their_turn() {
    let mut end = begun(OutOfOrderPolicy::Aligned);
    let (key, region) = end.env.mr(BASE, LEN, REMOTE);
    let first = write(key.0, BASE, &[1; 8]);
    let mut bad = write(key.0, BASE + 8, &[2; 8]);
    bad[20] ^= 1;
    assert_eq!(show(&mut end, first.len(), &bad), 0);
    let beyond = write(key.0, BASE + LEN as u64, &[2; 8]);
    assert_eq!(show(&mut end, first.len(), &beyond), 0);
    assert_eq!(contents(&region, 16), [0; 16]);
    assert_eq!(end.qp.state(), RdmapState::Rts);
    assert!(end.pull().is_none(), "no Terminate yet");
    end.give(&first);
    end.give(&beyond);
    end.expect_terminate("1/1/01");
}

#[test]
fn key_invalidated_after_early_placement_is_an_error() {
    let mut end = begun(OutOfOrderPolicy::Aligned);
    let (key, _region) = end.env.mr(BASE, LEN, REMOTE);
    let first = send(1, 0, true, b"");
    let second = write(key.0, BASE, &[2; 8]);
    end.env.post_recv(1, &[]);
    assert_eq!(show(&mut end, first.len(), &second), 1);
    end.give(&first);
    end.env
        .keys
        .invalidate_key(key, PD, init_attr().qpn)
        .expect("valid");
    end.give(&second);
    end.expect_terminate("1/1/00");
}

#[test]
fn rest_of_a_send_is_placed_early_and_later_sends_wait() {
    let mut end = begun(OutOfOrderPolicy::Aligned);
    let (key, region) = end.env.mr(BASE, LEN, REMOTE);
    end.env
        .post_recv(1, &[sge(BASE, 100, key), sge(BASE + 1000, 100, key)]);
    end.env.post_recv(2, &[sge(BASE + 2000, 100, key)]);
    end.give(&send(1, 0, false, &[1; 60]));
    let gap = send(1, 60, false, &[2; 60]);
    let rest = send(1, 120, true, &[3; 40]);
    assert_eq!(show(&mut end, gap.len(), &rest), 1);
    let next = send(2, 0, true, &[4; 10]);
    assert_eq!(show(&mut end, gap.len() + rest.len(), &next), 0);
    assert_eq!(contents(&region, 1060)[1020..], [3; 40]);
    assert!(end.env.received.is_empty());
    end.give(&[gap, rest, next].concat());
    let mem = contents(&region, 2010);
    assert_eq!(mem[..100], [[1; 60].as_slice(), &[2; 40]].concat());
    assert_eq!(mem[1000..1060], [[2; 20].as_slice(), &[3; 40]].concat());
    assert_eq!(mem[2000..], [4; 10]);
    let lengths: Vec<_> = end.env.received.iter().map(|wc| wc.byte_len).collect();
    assert_eq!(lengths, [160, 10]);
}

#[test]
fn read_response_beyond_a_gap_is_placed() {
    let mut end = begun(OutOfOrderPolicy::Aligned);
    let (key, region) = end.env.mr(BASE, LEN, REMOTE);
    let sink = [sge(BASE, 2000, key)];
    end.env.post(&remote(
        Opcode::Read,
        5,
        &sink,
        0x9000,
        siw_memory::Stag(0x777),
    ));
    let request = end.pull().expect("a Read Request");
    let request = ReadRequestHeader::parse(ulpdu(&request)[18..].try_into().expect("28 octets"));
    end.ack_all();
    let first = read_response(false, request.sink_stag, request.sink_to, &[1; 1000]);
    let second = read_response(true, request.sink_stag, request.sink_to + 1000, &[2; 1000]);
    let stray = read_response(true, request.sink_stag, request.sink_to + 1001, &[3; 1000]);
    assert_eq!(show(&mut end, first.len(), &stray), 0);
    assert_eq!(show(&mut end, first.len(), &second), 1);
    assert_eq!(contents(&region, 2000)[1000..], [2; 1000]);
    assert!(end.env.sent.is_empty());
    end.give(&first);
    end.give(&second);
    assert_eq!(end.env.statuses(), [(5, WcStatus::SUCCESS)]);
    assert_eq!(contents(&region, 1000), [1; 1000]);
}

/// With markers, the first FPDU of a segment is found wherever it begins.
#[test]
fn markers_find_fpdus_of_an_unaligned_segment() {
    let negotiated_markers = NegotiatedParameters {
        markers_in: true,
        ..negotiated(false)
    };
    let mut found = 0;
    for cut in (0..1400).step_by(100) {
        let mut end = End::new(negotiated_markers);
        end.qp = QueuePair::new(init_attr());
        end.qp.set_out_of_order(OutOfOrderPolicy::Markers);
        end.qp.set_rts(negotiated_markers, EMSS);
        let (key, region) = end.env.mr(BASE, LEN, REMOTE);
        let mut stream = Vec::new();
        let mut starts = Vec::new();
        for index in 0..8u64 {
            starts.push(stream.len());
            let fpdu = mpa::fpdu::encode_fpdu_at(
                &[
                    &[0xc1, 0x40],
                    &key.0.to_be_bytes(),
                    &(BASE + index * 700).to_be_bytes(),
                    &pattern(700, index as u8),
                ],
                true,
                MarkerPosition::START.advanced_by(stream.len()),
            );
            stream.extend(fpdu);
        }
        let in_order = starts[1];
        end.give(&stream[..in_order]);
        let held = &stream[in_order + cut..];
        let placed = show(&mut end, cut, held);
        found += placed;
        for index in 8 - u64::from(placed)..8 {
            let at = index as usize * 700;
            assert_eq!(
                contents(&region, LEN)[at..at + 700],
                pattern(700, index as u8)
            );
        }
        assert!(placed >= 5, "cut {cut}: {placed}");
        end.give(&stream[in_order..]);
        for index in 0..8usize {
            let mem = contents(&region, LEN);
            assert_eq!(
                mem[index * 700..(index + 1) * 700],
                pattern(700, index as u8)
            );
        }
        assert_eq!(end.qp.state(), RdmapState::Rts);
    }
    assert!(found > 0);
}

/// For any order of arrival, memory and completions are the same as in order.
#[test]
fn any_order_of_arrival_ends_alike() {
    for seed in 1..300u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut rand = move |negotiated_markers: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as usize % negotiated_markers
        };
        let mut end = begun(OutOfOrderPolicy::Aligned);
        let (key, region) = end.env.mr(BASE, LEN, REMOTE);
        let mut want = vec![0; LEN];
        let mut segments = Vec::new();
        let mut msn = 1;
        for index in 0..20u8 {
            let len = 1 + rand(600);
            let data = pattern(len, index);
            if rand(3) == 0 {
                let to = index as usize * 700;
                end.env
                    .post_recv(u64::from(index), &[sge(BASE + to as u64, 700, key)]);
                want[to..to + len].copy_from_slice(&data);
                let cut = rand(len);
                segments.push(send(msn, 0, false, &data[..cut]));
                segments.push(send(msn, cut as u32, true, &data[cut..]));
                msn += 1;
            } else {
                let to = index as usize * 700;
                want[to..to + len].copy_from_slice(&data);
                segments.push(write(key.0, BASE + to as u64, &data));
            }
        }
        let mut next = 0;
        let mut shown = 0;
        while next < segments.len() {
            // Some of the segments beyond the next one, in any order, some of them twice.
            for _ in 0..rand(6) {
                let pick = next + 1 + rand(segments.len() - next);
                if pick < segments.len() {
                    let offset = segments[next..pick].iter().map(Vec::len).sum();
                    shown += show(&mut end, offset, &segments[pick].clone());
                }
            }
            let negotiated_markers = 1 + rand(3.min(segments.len() - next));
            for segment in &segments[next..next + negotiated_markers] {
                end.rx.push(segment);
            }
            end.qp.receive_in_order(&mut end.env, &mut end.rx);
            next += negotiated_markers;
        }
        assert_eq!(end.qp.state(), RdmapState::Rts, "seed {seed}");
        assert_eq!(contents(&region, LEN), want, "seed {seed}");
        assert_eq!(end.env.received.len(), msn as usize - 1);
        assert!(seed > 5 || shown > 0);
    }
}
