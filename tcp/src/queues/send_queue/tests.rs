//! Tests of the send queue: how records become segments, and what acknowledgements and cuts do to them.

use super::*;

fn queue(lens: &[u32]) -> TransmitQueue<usize> {
    let mut q = TransmitQueue::new();
    for (i, &l) in lens.iter().enumerate() {
        q.push_record(l, i, false);
    }
    q
}

fn pieces(q: &TransmitQueue<usize>, i: usize) -> Vec<(usize, u32, u32)> {
    let mut v = vec![];
    q.for_each_piece(&q.sent[i], |record, o, l| v.push((*record, o, l)));
    v
}

fn send_all(q: &mut TransmitQueue<usize>, emss: u32) -> (SeqNr, u32) {
    let (mut seq, mut pipe) = (SeqNr(u32::MAX - 100), 0);
    while let Some(plan) = q.plan_segment(emss, u32::MAX) {
        q.sent.push_back(q.make_segment(&plan, seq, false, 0));
        q.commit_plan(&plan);
        seq += plan.len;
        pipe += plan.len;
    }
    (seq, pipe)
}

#[test]
fn small_records_share_a_segment_and_none_straddles_two() {
    let mut q = queue(&[100, 200, 800, 300, 1000]);
    send_all(&mut q, 1200);
    assert_eq!(q.sent.len(), 3);
    assert_eq!(pieces(&q, 0), [(0, 0, 100), (1, 0, 200), (2, 0, 800)]);
    assert_eq!(pieces(&q, 1), [(3, 0, 300)]);
    assert_eq!(pieces(&q, 2), [(4, 0, 1000)]);
}

#[test]
fn a_record_above_emss_is_cut_and_its_tail_travels_alone() {
    let mut q = queue(&[2500, 100, 100]);
    send_all(&mut q, 1000);
    assert_eq!(pieces(&q, 0), [(0, 0, 1000)]);
    assert_eq!(pieces(&q, 1), [(0, 1000, 1000)]);
    assert_eq!(pieces(&q, 2), [(0, 2000, 500)]);
    assert_eq!(pieces(&q, 3), [(1, 0, 100), (2, 0, 100)]);
}

#[test]
fn a_smaller_emss_cuts_between_records_and_inside_them_only_when_it_must() {
    let mut q = queue(&[400, 500, 300, 1300, 200]);
    send_all(&mut q, 1400);
    assert_eq!(q.sent.len(), 3);
    let end = q.sent[2].end_seq();
    q.resegment_to(600);
    let all: Vec<_> = (0..q.sent.len()).map(|i| pieces(&q, i)).collect();
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
    for w in q.sent.make_contiguous().windows(2) {
        assert_eq!(w[0].end_seq(), w[1].seq);
    }
    assert_eq!(q.sent[6].end_seq(), end);
    assert_eq!(q.sent[6].flags & LOST, 0, "what fits may still arrive");
}

#[test]
fn a_frame_of_several_is_acknowledged_and_split_as_if_each_segment_left_alone() {
    // One long record, full ones, two that share a segment, and a short end.
    let lens = [3500, 1000, 1000, 400, 600, 1000, 300];
    let mut alone = queue(&lens);
    let mut train = queue(&lens);
    for q in [&mut alone, &mut train] {
        q.records[3].ends_message = true;
        q.records[6].ends_message = true;
    }
    let (end, mut pipe) = send_all(&mut alone, 1000);
    let tso = crate::config::TsoLimits {
        max_segments: 64,
        max_bytes: 60_000,
    };
    let mut seq = alone.sent[0].seq;
    while seq != end {
        let (segment, n) = train
            .take_multi_segment((1000, 60_000), &tso, seq, 0)
            .unwrap();
        assert_eq!(n, segment.len.div_ceil(1000));
        seq = segment.end_seq();
    }
    assert_eq!(train.sent.len(), 2, "the long record's tail ends a frame");
    let mut pipes = [pipe, pipe];
    for at in [500, 1000, 2700, 5500, 6400, 7800] {
        let una = alone.sent[0].seq + (at - (lens.iter().sum::<u32>() - pipe));
        let a = alone.ack_to(una, &mut pipes[0]);
        let b = train.ack_to(una, &mut pipes[1]);
        assert_eq!((a.delivered, a.records), (b.delivered, b.records), "{at}");
        assert_eq!(pipes[0], pipes[1]);
        pipe = pipes[0];
        let mut copy = queue(&lens);
        for (record, c) in copy.records.iter_mut().zip(&train.records) {
            record.ends_message = c.ends_message;
        }
        copy.sent = train.sent.clone();
        copy.split_multi_segments(0);
        let parts = |q: &TransmitQueue<usize>| {
            let whole = |(i, segment): (usize, &InFlightSegment)| {
                (segment.seq, segment.flags, segment.mss, pieces(q, i))
            };
            q.sent.iter().enumerate().map(whole).collect::<Vec<_>>()
        };
        assert_eq!(parts(&copy), parts(&alone), "{at}");
    }
    assert!(train.sent.is_empty() && pipe == 0);
}

#[test]
fn records_complete_in_order_when_their_last_segment_is_acknowledged() {
    let mut q = queue(&[2500, 100]);
    let (end, mut pipe) = send_all(&mut q, 1000);
    let first = q.sent[0].seq;
    let a = q.ack_to(first + 2499, &mut pipe);
    assert_eq!(
        (a.delivered, a.records),
        (2000, false),
        "a part of a segment does not count"
    );
    q.take_acked(|_| panic!("nothing is complete"));
    let a = q.ack_to(first + 2500, &mut pipe);
    assert!(a.records);
    let mut got = vec![];
    q.take_acked(|record| got.push(record));
    q.ack_to(end, &mut pipe);
    q.take_acked(|record| got.push(record));
    assert_eq!((got, pipe), (vec![0, 1], 0));
}
