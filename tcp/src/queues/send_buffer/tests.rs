//! Tests of the send buffer: segmentation of records, acknowledgements and resegmentation.

use super::*;

fn queue(lens: &[u32]) -> SendBuffer<usize> {
    let mut host = SendBuffer::new();
    for (i, &len) in lens.iter().enumerate() {
        host.push_record(len, i, false);
    }
    host
}

fn pieces(queue: &SendBuffer<usize>, i: usize) -> Vec<(usize, u32, u32)> {
    let segment = &queue.sent[i];
    let pieces = queue.pieces((segment.record, segment.offset), segment.len);
    pieces
        .map(|(record, offset, len)| (*record, offset, len))
        .collect()
}

fn send_all(queue: &mut SendBuffer<usize>, emss: u32) -> (SeqNr, u32) {
    let (mut seq, mut pipe) = (SeqNr(u32::MAX - 100), 0);
    while let Some(plan) = queue.plan_segment(emss, u32::MAX) {
        queue
            .sent
            .push_back(queue.make_segment(&plan, seq, false, 0));
        queue.commit_plan(&plan);
        seq += plan.len;
        pipe += plan.len;
    }
    (seq, pipe)
}

/// Returns a budget of at most `usable` bytes, whose segments have `size` bytes of `emss`.
fn budget(emss: u32, size: u32, usable: u32) -> SegmentBudget {
    SegmentBudget { emss, size, usable }
}

#[test]
fn small_records_share_segments_and_straddle_none() {
    let mut queue = queue(&[100, 200, 800, 300, 1000]);
    send_all(&mut queue, 1200);
    assert_eq!(queue.sent.len(), 3);
    assert_eq!(pieces(&queue, 0), [(0, 0, 100), (1, 0, 200), (2, 0, 800)]);
    assert_eq!(pieces(&queue, 1), [(3, 0, 300)]);
    assert_eq!(pieces(&queue, 2), [(4, 0, 1000)]);
}

#[test]
fn a_record_above_emss_is_cut_its_tail_is_alone() {
    let mut queue = queue(&[2500, 100, 100]);
    send_all(&mut queue, 1000);
    assert_eq!(pieces(&queue, 0), [(0, 0, 1000)]);
    assert_eq!(pieces(&queue, 1), [(0, 1000, 1000)]);
    assert_eq!(pieces(&queue, 2), [(0, 2000, 500)]);
    assert_eq!(pieces(&queue, 3), [(1, 0, 100), (2, 0, 100)]);
}

#[test]
fn a_smaller_emss_cuts_between_records_if_it_can() {
    let mut queue = queue(&[400, 500, 300, 1300, 200]);
    send_all(&mut queue, 1400);
    assert_eq!(queue.sent.len(), 3);
    let end = queue.sent[2].end_seq();
    queue.resegment_to(600);
    let all: Vec<_> = (0..queue.sent.len()).map(|i| pieces(&queue, i)).collect();
    assert_eq!(
        all,
        [
            vec![(0, 0, 400)],
            vec![(1, 0, 500)],
            vec![(2, 0, 300)],
            vec![(3, 0, 600)],
            vec![(3, 600, 600)],
            vec![(3, 1200, 100)],
            vec![(4, 0, 200)],
        ]
    );
    for pair in queue.sent.make_contiguous().windows(2) {
        assert_eq!(pair[0].end_seq(), pair[1].seq);
    }
    assert_eq!(queue.sent[6].end_seq(), end);
    assert_eq!(queue.sent[6].flags & LOST, 0, "what fits may still arrive");
}

#[test]
fn a_super_segment_is_acked_and_split_like_segments() {
    // One long record, full ones, two that share a segment, and a short one at the end.
    let lens = [3500, 1000, 1000, 400, 600, 1000, 300];
    let mut alone = queue(&lens);
    let mut combined = queue(&lens);
    for queue in [&mut alone, &mut combined] {
        queue.records[3].ends_message = true;
        queue.records[6].ends_message = true;
    }
    let (end, mut pipe) = send_all(&mut alone, 1000);
    let tso = crate::config::TsoLimits {
        max_segments: 64,
        max_bytes: 60_000,
    };
    let mut seq = alone.sent[0].seq;
    while seq != end {
        let (segment, count) = combined
            .take_multi_segment(&budget(1000, 1000, 60_000), &tso, seq, 0)
            .unwrap();
        assert_eq!(count, segment.len.div_ceil(1000));
        seq = segment.end_seq();
    }
    assert_eq!(
        combined.sent.len(),
        2,
        "the long record's tail ends a frame"
    );
    let mut pipes = [pipe, pipe];
    for at in [500, 1000, 2700, 5500, 6400, 7800] {
        let una = alone.sent[0].seq + (at - (lens.iter().sum::<u32>() - pipe));
        let acked_alone = alone.ack_to(una, &mut pipes[0]);
        let acked_together = combined.ack_to(una, &mut pipes[1]);
        assert_eq!(
            (acked_alone.delivered, acked_alone.records),
            (acked_together.delivered, acked_together.records),
            "{at}"
        );
        assert_eq!(pipes[0], pipes[1]);
        pipe = pipes[0];
        let mut copy = queue(&lens);
        for (record, original) in copy.records.iter_mut().zip(&combined.records) {
            record.ends_message = original.ends_message;
        }
        copy.sent = combined.sent.clone();
        copy.split_multi_segments(0);
        let parts = |queue: &SendBuffer<usize>| {
            let whole = |(i, segment): (usize, &InFlightSegment)| {
                let flags = segment.flags & !SUPER_SEGMENT;
                (segment.seq, flags, segment.mss, pieces(queue, i))
            };
            queue.sent.iter().enumerate().map(whole).collect::<Vec<_>>()
        };
        assert_eq!(parts(&copy), parts(&alone), "{at}");
    }
    assert!(combined.sent.is_empty() && pipe == 0);
}

#[test]
fn records_complete_in_order_with_their_last_segment() {
    let mut queue = queue(&[2500, 100]);
    let (end, mut pipe) = send_all(&mut queue, 1000);
    let first = queue.sent[0].seq;
    let acked = queue.ack_to(first + 2499, &mut pipe);
    assert_eq!(
        (acked.delivered, acked.records),
        (2000, false),
        "a part of a segment does not count"
    );
    queue.take_acked(|_| panic!("nothing is complete"));
    let acked = queue.ack_to(first + 2500, &mut pipe);
    assert!(acked.records);
    let mut got = vec![];
    queue.take_acked(|record| got.push(record));
    queue.ack_to(end, &mut pipe);
    queue.take_acked(|record| got.push(record));
    assert_eq!((got, pipe), (vec![0, 1], 0));
}

/// Returns the lengths of the queue's segments, and whether each ends a message.
fn segments(queue: &SendBuffer<usize>) -> Vec<(u32, bool)> {
    let segments = queue.sent.iter();
    segments
        .map(|segment| (segment.len, segment.flags & PUSH != 0))
        .collect()
}

#[test]
fn segments_are_divided_between_units_of_a_run() {
    let mut queue = SendBuffer::new();
    queue.push_record(100, 0, false);
    queue.push_run((84, 20), 1, true);
    queue.push_run((100, 3), 2, false);
    let (end, mut pipe) = send_all(&mut queue, 1000);
    // 100 + 10 * 84, 10 * 84 + 100, 2 * 100.
    assert_eq!(segments(&queue), [(940, true), (940, true), (200, false)]);
    assert_eq!(pieces(&queue, 1), [(1, 840, 840), (2, 0, 100)]);
    assert_eq!(pieces(&queue, 2), [(2, 100, 200)]);

    let first = queue.sent[0].seq;
    let mut got = vec![];
    assert!(queue.ack_to(first + 940, &mut pipe).records);
    queue.take_acked_units(|record, units| got.push((*record, units)));
    assert_eq!(got, [(0, 0..1), (1, 0..10)]);
    assert!(!queue.ack_to(first + 1000, &mut pipe).records);
    queue.take_acked_units(|_, _| panic!("nothing is complete"));
    got.clear();
    assert!(queue.ack_to(first + 1880, &mut pipe).records);
    queue.take_acked_units(|record, units| got.push((*record, units)));
    assert_eq!(got, [(1, 10..20), (2, 0..1)]);
    got.clear();
    assert!(queue.ack_to(end, &mut pipe).records);
    queue.take_acked_units(|record, units| got.push((*record, units)));
    assert_eq!((got, pipe), (vec![(2, 1..3)], 0));
}

#[test]
fn a_narrower_path_and_a_narrow_window_cut_runs_between_units_if_they_can() {
    let mut queue = SendBuffer::new();
    queue.push_run((300, 6), 0, true);
    send_all(&mut queue, 1000);
    assert_eq!(segments(&queue), [(900, true), (900, true)]);
    queue.resegment_to(700);
    let lens = |queue: &SendBuffer<usize>| {
        let segments = queue.sent.iter();
        segments.map(|segment| segment.len).collect::<Vec<_>>()
    };
    assert_eq!(lens(&queue), [600, 300, 600, 300]);
    queue.resegment_to(200);
    assert_eq!(
        lens(&queue),
        [200, 100, 200, 100, 200, 100, 200, 100, 200, 100, 200, 100]
    );

    // A part of a unit: the rest is sent alone.
    let mut queue = SendBuffer::new();
    queue.push_run((300, 3), 0, true);
    let plan = queue.plan_part(100);
    queue.commit_plan(&plan);
    let plan = queue.plan_segment(1000, 1000).unwrap();
    assert_eq!(plan.len, 200);
    queue.commit_plan(&plan);
    assert_eq!(queue.plan_segment(1000, 1000).unwrap().len, 600);
    assert_eq!(queue.plan_segment(1000, 500).unwrap().len, 300);
    assert_eq!(
        queue.plan_segment(1000, 100).unwrap().len,
        300,
        "the caller waits"
    );
}

#[test]
fn full_segments_of_a_run_are_taken_at_once() {
    let tso = crate::config::TsoLimits {
        max_segments: 64,
        max_bytes: 60_000,
    };
    let mut queue = SendBuffer::new();
    queue.push_run((1000, 10), 0, false);
    queue.push_run((84, 30), 1, true);
    let seq = SeqNr(7);
    let (whole, count) = queue
        .take_multi_segment(&budget(1000, 1000, 4500), &tso, seq, 0)
        .expect("a segment");
    assert_eq!((whole.len, count, queue.next_offset), (4000, 4, 4000));
    let (whole, count) = queue
        .take_multi_segment(&budget(1000, 1000, 60_000), &tso, whole.end_seq(), 0)
        .expect("a segment");
    // Units of 84 bytes do not fill a segment exactly, so the first shorter segment is the last.
    assert_eq!((whole.len, count), (6000 + 924, 7));
    assert_eq!((queue.next_record, queue.next_offset), (1, 924));
}

#[test]
fn a_super_segment_has_no_more_bytes_than_a_frame_may_have() {
    let tso = crate::config::TsoLimits {
        max_segments: 64,
        max_bytes: 60_000,
    };
    let seq = SeqNr(7);
    let mut long = SendBuffer::new();
    long.push_run((9000, 20), 0, false);
    for offset in [54_000, 108_000, 162_000] {
        let (frame, count) = long
            .take_multi_segment(&budget(9000, 9000, 1_000_000), &tso, seq, 0)
            .expect("a segment");
        assert_eq!((frame.len, count, long.next_offset), (54_000, 6, offset));
    }
    let mut longest = SendBuffer::new();
    longest.push_run((65_000, 2), 0, false);
    let taken = longest.take_multi_segment(&budget(65_000, 65_000, 1_000_000), &tso, seq, 0);
    let (frame, count) = taken.expect("a segment");
    assert_eq!((frame.len, count, frame.mss), (65_000, 1, 0));
}

#[test]
fn units_shorter_than_a_segment_are_taken_at_once() {
    let tso = crate::config::TsoLimits {
        max_segments: 64,
        max_bytes: 60_000,
    };
    let mut queue = SendBuffer::new();
    queue.push_run((996, 10), 0, false);
    queue.push_run((996, 1), 1, false);
    queue.push_run((1000, 2), 2, false);
    let seq = SeqNr(7);
    let (whole, count) = queue
        .take_multi_segment(&budget(999, 996, 60_000), &tso, seq, 0)
        .expect("a segment");
    // A longer unit begins a frame of its own.
    assert_eq!((whole.len, count, whole.mss), (11 * 996, 11, 996));
    assert_eq!((queue.next_record, queue.next_offset), (2, 0));
    queue.split_multi_segments(0);
    assert!(queue.sent.iter().all(|segment| segment.len == 996));
    assert_eq!(queue.sent.len(), 11);
}
