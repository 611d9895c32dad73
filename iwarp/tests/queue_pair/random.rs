//! Two queue pairs, random work requests, random cuts of the stream: memory equals a model, and
//! completions come in order, exactly one each.
use crate::common::model::*;
use crate::common::*;
use proptest::prelude::*;
use siw_iwarp::*;
use siw_shm::{WcFlags, WcOpcode, WcStatus};

/// One step of `from`: sends up to `count` FPDUs, one by one or in runs, delivers `cut` bytes to `to`,
/// acknowledges `acks` records.
fn step(from: &mut Side, to: &mut Side, count: usize, cut: usize, acks: usize) -> bool {
    let mut moved = false;
    if cut.is_multiple_of(2) {
        let (runs, bytes) = from.end.pull_runs(usize::MAX, count as u32);
        from.wire.extend(&bytes);
        let mut rest = &bytes[..];
        for run in &runs {
            for unit in 0..run.count() {
                let frame = rest.split_off(..run.unit_len() as usize).expect("built");
                from.frames.push((run.get(unit), frame.to_vec()));
                from.end.unacked.push_back(run.get(unit));
                moved = true;
            }
        }
    } else {
        for _ in 0..count {
            let Some(frame) = from.end.pull() else { break };
            from.wire.extend(&frame);
            let record = *from.end.unacked.back().expect("pulled");
            from.frames.push((record, frame));
            moved = true;
        }
    }
    // A retransmission is identical to the segment.
    if let Some((record, expected)) = from.frames.get(cut % from.frames.len().max(1)) {
        let mut frame = Frame::default();
        from.end
            .build_fpdu(record, &mut frame)
            .expect("not acknowledged");
        assert!(&frame.bytes == expected, "same bytes");
    }
    let delivered = cut.min(from.wire.len());
    let bytes: Vec<u8> = from.wire.drain(..delivered).collect();
    moved |= delivered > 0;
    to.end.give(&bytes);
    // Only data that has arrived can be acknowledged.
    let arrived = {
        let total: usize = from.frames.iter().map(|frame| frame.1.len()).sum();
        let mut left = total - from.wire.len();
        from.frames
            .iter()
            .take_while(|frame| {
                let fits = frame.1.len() <= left;
                left = left.saturating_sub(frame.1.len());
                fits
            })
            .count()
    };
    for _ in 0..acks.min(arrived) {
        let (record, _) = from.frames.remove(0);
        from.end.unacked.pop_front();
        from.end.qp.on_record_acked(&record);
        from.end.qp.complete_acked(&mut from.end.env);
        moved = true;
    }
    moved
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn memory_equals_the_model_and_completions_are_in_order(
        x in prop::collection::vec(op(), 0..24),
        y in prop::collection::vec(op(), 0..24),
        steps in prop::collection::vec((0usize..4, 0usize..4000, 0usize..4, any::<bool>()), 0..80),
        kill in prop::option::of(0usize..80),
        markers in any::<[bool; 2]>(),
    ) {
        let (mut a, mut b) = (side_with(true, markers), side_with(false, markers));
        post(&mut a, &mut b, &x);
        post(&mut b, &mut a, &y);
        for (i, &(count, cut, acks, who)) in steps.iter().enumerate() {
            if kill == Some(i) {
                for s in [&mut a, &mut b] {
                    s.end.qp.on_tcp_closed(&mut s.end.env, CloseReason::Reset);
                    check_order(s, true);
                    prop_assert!(s.end.env.live.is_empty());
                    let first_bad = s.end.env.sent.iter().flatten()
                        .position(|part| part.status != WcStatus::SUCCESS);
                    if let Some(progress) = first_bad {
                        prop_assert!(s.end.env.sent.iter().flatten().skip(progress)
                            .all(|part| part.status == WcStatus::WR_FLUSH_ERR));
                    }
                }
                prop_assert_eq!(a.end.env.received.len(), y.iter().filter(|o| takes_recv(o)).count());
                return Ok(());
            }
            if who { step(&mut a, &mut b, count, cut, acks); } else { step(&mut b, &mut a, count, cut, acks); }
            check_order(&a, false);
            check_order(&b, false);
        }
        while step(&mut a, &mut b, 8, 9000, 8) | step(&mut b, &mut a, 8, 9000, 8) {}
        for s in [&a, &b] {
            prop_assert_eq!(s.end.qp.state(), RdmapState::Rts);
            check_order(s, true);
            prop_assert!(s.end.env.sent.iter().flatten().all(|part| part.status == WcStatus::SUCCESS));
            prop_assert!(contents(&s.mem, MEM) == s.model, "memory equals the model");
            prop_assert!(s.end.env.live.is_empty());
            prop_assert!(s.end.env.received.iter().all(|part| part.status == WcStatus::SUCCESS));
            let ids: Vec<u64> = s.end.env.received.iter().map(|part| part.wr_id).collect();
            let mut sorted = ids.clone();
            sorted.sort_unstable();
            prop_assert_eq!(ids, sorted);
            for part in &s.end.env.received {
                let with = part.flags.contains(WcFlags::WITH_IMM);
                prop_assert!(!with || u64::from(part.imm) == part.wr_id);
                prop_assert!(with || part.opcode == WcOpcode::RECV);
            }
        }
    }

    /// Any octets with a valid CRC: no panic, memory outside the region untouched, at most one
    /// Terminate.
    #[test]
    fn hostile_peer_gets_at_most_one_terminate(
        frames in prop::collection::vec((prop::collection::vec(any::<u8>(), 0..80), 0u8..13, any::<bool>()), 1..12),
        cut in 1usize..200,
    ) {
        let mut victim = side(false);
        victim.end.env.post_recv(1, &[sge(0x4000, 64, victim.key)]);
        let mut bytes = Vec::new();
        for (mut segment, opcode, is_tagged) in frames {
            if segment.len() >= 18 {
                // Get past the first checks more often than random input would.
                segment[0] = if is_tagged { 0xc1 } else { 0x41 };
                segment[1] = 0x40 | opcode;
                if is_tagged {
                    segment[2..6].copy_from_slice(&victim.key.0.to_be_bytes());
                    segment[6..12].fill(0);
                } else {
                    segment[6..13].fill(0);
                    segment[9] = match opcode { 1 | 10 => 1, 7 => 2, 11 => 3, _ => 0 };
                    segment[13] &= 3;
                    segment[14..18].fill(0);
                }
            }
            bytes.extend(raw(&[&segment]));
        }
        let mut terminates = 0;
        for part in bytes.chunks(cut) {
            victim.end.give(part);
            while let Some(frame) = victim.end.pull() {
                terminates += usize::from(ulpdu(&frame)[1] == 0x47);
            }
        }
        prop_assert!(terminates <= 1);
        victim.end.qp.on_tcp_closed(&mut victim.end.env, CloseReason::Closed);
        prop_assert_eq!(victim.end.env.received.len(), 1);
    }
}
