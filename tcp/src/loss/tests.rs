//! Tests of loss detection on a queue of segments, without a connection.

use crate::base::sequence::SeqNr;
use crate::congestion::RecoveryPhase;
use crate::loss::rack::DetectedLosses;
use crate::loss::recovery::{NewlySacked, Recovery};
use crate::queues::send_buffer::{LOST, RETX, SACKED, SendBuffer};
use crate::tcb::send_variables::{SendFlags, SendVariables};
use crate::wire::segment::Segment;

const MSS: u32 = 1000;
/// Round-trip time and start time in ns.
const RTT: u64 = 1_000_000;
const START: u64 = 1_000_000_000;

/// A sender with segments in flight, one every microsecond.
struct Sender {
    snd: SendVariables,
    queue: SendBuffer<u32>,
    recovery: Recovery,
    now: u64,
}

impl Sender {
    fn new(first: SeqNr) -> Sender {
        let mut snd = SendVariables::new();
        (snd.una, snd.nxt) = (first, first);
        snd.rtt.add_sample(RTT);
        Sender {
            snd,
            queue: SendBuffer::new(),
            recovery: Recovery::new(first),
            now: START,
        }
    }

    fn send(&mut self, segments: u32) {
        for _ in 0..segments {
            self.queue.push_record(MSS, 0, false);
            let plan = self.queue.plan_segment(MSS, MSS).unwrap();
            let segment = self
                .queue
                .make_segment(&plan, self.snd.nxt, false, self.now);
            self.queue.commit_plan(&plan);
            self.queue.sent.push_back(segment);
            self.snd.nxt += MSS;
            self.snd.pipe += MSS;
            self.now += 1000;
        }
    }

    /// Processes a cumulative ACK of all data before `ack`.
    fn ack(&mut self, ack: SeqNr) {
        self.recovery
            .before_ack(&mut self.snd, &self.queue, ack, None, self.now);
        let acked = self.queue.ack_to(ack, &mut self.snd.pipe);
        self.queue.take_acked(drop);
        self.snd.una = ack;
        self.recovery
            .on_acked(ack, acked.sacked_segs, acked.lost_segs);
    }

    /// Processes SACK blocks, given as segment numbers counted from SND.UNA.
    fn sack(&mut self, blocks: &[(u32, u32)]) -> NewlySacked {
        let una = self.snd.una;
        let mut segment = Segment {
            ack: una,
            sacks: blocks.len() as u8,
            ..Segment::default()
        };
        for (entry, &(lo, hi)) in segment.sack.iter_mut().zip(blocks) {
            *entry = (una + lo * MSS, una + hi * MSS);
        }
        self.recovery
            .process_sack(&mut self.snd, &mut self.queue, &segment, self.now)
    }

    fn detect(&mut self) -> DetectedLosses {
        self.recovery
            .detect_losses(&mut self.snd, &mut self.queue, self.now)
    }

    /// Retransmits the next lost segment; returns its index.
    fn retransmit(&mut self) -> Option<usize> {
        let index = self.recovery.next_lost(&self.queue)?;
        self.recovery
            .on_retransmitted(&mut self.snd, &mut self.queue, index, self.now);
        Some(index)
    }

    fn lost(&self) -> Vec<usize> {
        let marks = self.queue.sent.iter().enumerate();
        marks
            .filter(|(_, segment)| segment.flags & LOST != 0)
            .map(|(index, _)| index)
            .collect()
    }

    /// Checks that the counts match the marks.
    fn check_counts(&self) {
        let count = |flag| {
            let marked = self.queue.sent.iter();
            marked.filter(move |segment| segment.flags & flag != 0)
        };
        let bytes: u32 = count(SACKED).map(|segment| segment.len).sum();
        let pipe: u32 = self
            .queue
            .sent
            .iter()
            .filter(|segment| segment.in_pipe())
            .map(|segment| segment.len)
            .sum();
        assert_eq!(self.recovery.sacked as usize, count(SACKED).count());
        assert_eq!(self.recovery.sacked_bytes, bytes);
        assert_eq!(self.recovery.lost as usize, count(LOST).count());
        assert_eq!(self.snd.pipe, pipe);
    }
}

#[test]
fn marks_do_not_depend_on_the_order_of_blocks() {
    for seed in 1..200u64 {
        let first = SeqNr(u32::MAX - 20_000);
        let mut sender = Sender::new(first);
        sender.send(40);
        let mut reported = [false; 40];
        let mut acked = 0;
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut draw = move |below: u32| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 16) as u32 % below
        };
        for _ in 0..60 {
            if draw(8) == 0 && acked < 30 {
                acked += draw(3);
                sender.ack(first + acked * MSS);
            }
            // A block in bytes: only whole segments count.
            let base = first + acked * MSS;
            let (lo, len) = (draw(38 * MSS), draw(9 * MSS));
            let lo_seq = first + lo;
            let segment = Segment {
                ack: base,
                sacks: 1,
                sack: [(lo_seq, lo_seq + len); 4],
                ..Segment::default()
            };
            if (lo + len) <= 40 * MSS {
                sender.recovery.process_sack(
                    &mut sender.snd,
                    &mut sender.queue,
                    &segment,
                    sender.now,
                );
                let (from, to) = (lo.max(acked * MSS).div_ceil(MSS), (lo + len) / MSS);
                for index in from..to {
                    reported[index as usize] = true;
                }
            }
            sender.check_counts();
            for (index, segment) in sender.queue.sent.iter().enumerate() {
                let expected = reported[acked as usize + index];
                assert_eq!(segment.flags & SACKED != 0, expected, "seed {seed}");
            }
        }
    }
}

#[test]
fn repeated_blocks_cost_no_walk_of_what_they_cover() {
    // Every other segment of a large window is missing; then ACKs repeat blocks over half of it, in turn.
    let mut sender = Sender::new(SeqNr(5));
    let half = 20_000;
    sender.send(2 * half);
    sender.sack(&[(half, 2 * half)]);
    for hole in (1..1000).step_by(2) {
        sender.sack(&[(hole, hole + 1)]);
    }
    let began = std::time::Instant::now();
    let rounds = 200_000;
    for round in 0..rounds {
        // No two in a row are equal, so remembering the last blocks does not help.
        let shift = 1 + round % 7;
        let found = sender.sack(&[
            (half + shift, 2 * half),
            (half, 2 * half - shift),
            (half + 2 * shift, 2 * half - 2 * shift),
        ]);
        assert_eq!(found, NewlySacked::default());
    }
    // Walking the segments takes half a minute; range lookups take a tenth of a second.
    let took = began.elapsed();
    assert!(took < std::time::Duration::from_secs(5), "{took:?}");
    sender.check_counts();
}

#[test]
fn a_d_sack_after_2_gib_widens_the_reordering_window() {
    let mut sender = Sender::new(SeqNr(u32::MAX - 5));
    sender.send(1);
    sender.recovery.rack.on_dsack(&sender.snd);
    // More than half of the sequence space is acknowledged before the next.
    for _ in 0..5 {
        sender.snd.nxt += (1 << 29) - 1000;
        let una = sender.snd.nxt;
        sender.queue.sent.clear();
        sender.snd.pipe = 0;
        sender.snd.una = una;
        sender.recovery.on_acked(una, 0, 0);
    }
    sender.send(4);
    sender.recovery.rack.on_dsack(&sender.snd);
    // The window is now three quarters of the minimum RTT; without the second D-SACK it would be
    // half.
    sender.snd.set(SendFlags::REORDERING_SEEN);
    sender.now = sender.queue.sent[3].at + RTT;
    sender.sack(&[(3, 4)]);
    let due = sender.detect().due;
    assert_eq!(due, sender.queue.sent[0].at + RTT + 3 * (RTT / 4));
}

#[test]
fn marks_that_are_withdrawn_are_judged_again() {
    // A timeout marks all segments; the first ACK shows that it was spurious, but the third segment
    // is lost.
    let mut sender = Sender::new(SeqNr(77));
    sender.send(6);
    sender.now += 10 * RTT;
    sender
        .recovery
        .mark_after_timeout(&mut sender.snd, &mut sender.queue, true, sender.now);
    assert_eq!(sender.retransmit(), Some(0));
    assert_eq!(sender.lost(), [1, 2, 3, 4, 5]);
    sender.now += RTT / 2;
    sender.ack(SeqNr(77) + 2 * MSS);
    let withdrawn_at = sender.now;
    sender.snd.phase = RecoveryPhase::Open;
    sender
        .recovery
        .withdraw_lost_marks(&mut sender.snd, &mut sender.queue, withdrawn_at);
    assert!(sender.lost().is_empty());
    sender.check_counts();
    sender.sack(&[(1, 4)]);
    // It has the same time to arrive as if it were sent now.
    let due = sender.detect().due;
    assert!(sender.lost().is_empty());
    assert!(due >= withdrawn_at, "a later judgement is due");
    sender.now = due;
    sender.detect();
    assert_eq!(sender.lost(), [0]);
    sender.check_counts();
}

#[test]
fn a_lost_retransmission_is_judged_again() {
    let mut sender = Sender::new(SeqNr(77));
    sender.send(6);
    sender.now += RTT;
    sender.sack(&[(1, 4)]);
    sender.snd.phase = RecoveryPhase::Recovery;
    sender.now += 2 * RTT;
    sender.detect();
    assert_eq!(sender.retransmit(), Some(0));
    // A timeout marks the retransmission, the marks are withdrawn, and later data is delivered.
    sender.now += 10 * RTT;
    sender
        .recovery
        .mark_after_timeout(&mut sender.snd, &mut sender.queue, true, sender.now);
    sender.snd.phase = RecoveryPhase::Open;
    sender
        .recovery
        .withdraw_lost_marks(&mut sender.snd, &mut sender.queue, sender.now);
    sender.send(2);
    sender.now += RTT;
    sender.sack(&[(7, 8)]);
    let due = sender.detect().due;
    sender.now = due.max(sender.now) + RTT;
    sender.detect();
    assert!(sender.lost().contains(&0), "{:?}", sender.lost());
    assert_ne!(sender.queue.sent[0].flags & RETX, 0);
    sender.check_counts();
}

#[test]
fn what_a_peer_reneged_on_is_lost() {
    let mut sender = Sender::new(SeqNr(9));
    sender.send(6);
    sender.now += RTT;
    sender.sack(&[(0, 2), (3, 5)]);
    sender.now += 2 * RTT;
    sender
        .recovery
        .mark_after_timeout(&mut sender.snd, &mut sender.queue, true, sender.now);
    sender.check_counts();
    assert_eq!(sender.recovery.sacked, 0);
    for index in [0, 1, 3, 4] {
        assert!(sender.lost().contains(&index), "{:?}", sender.lost());
    }
    // Segments reported again are marked again.
    let again = NewlySacked {
        segments: 2,
        bytes: 2 * MSS,
    };
    assert_eq!(sender.sack(&[(3, 5)]), again);
    sender.check_counts();
}
