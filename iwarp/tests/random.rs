//! Two queue pairs, random work requests, a random cut of the stream: memory equals a model, and
//! completions come in order, exactly one each.
mod common;
use common::model::*;
use common::*;
use proptest::prelude::*;
use siw_iwarp::*;
use siw_shm::{WcFlags, WcOpcode, WcStatus};

/// One step of `a`: send up to `n` FPDUs, deliver `cut` bytes to `b`, acknowledge `acks` records.
fn step(a: &mut Side, b: &mut Side, count: usize, cut: usize, acks: usize) -> bool {
    let mut moved = false;
    for _ in 0..count {
        let Some(frame) = a.end.pull() else { break };
        a.wire.extend(&frame);
        let rec = *a.end.unacked.back().expect("pulled");
        a.frames.push((rec, frame));
        moved = true;
    }
    // A retransmission is the same segment again.
    if let Some((rec, want)) = a.frames.get(cut % a.frames.len().max(1)) {
        let mut frame = Frame::default();
        a.end
            .qp
            .build_fpdu(&a.end.env.keys, rec, &mut frame)
            .expect("not acknowledged");
        assert!(&frame.bytes == want, "same bytes");
    }
    let k = cut.min(a.wire.len());
    let bytes: Vec<u8> = a.wire.drain(..k).collect();
    moved |= k > 0;
    b.end.give(&bytes);
    // Only what has arrived can be acknowledged.
    let arrived = {
        let total: usize = a.frames.iter().map(|frame| frame.1.len()).sum();
        let mut left = total - a.wire.len();
        a.frames
            .iter()
            .take_while(|frame| {
                let fits = frame.1.len() <= left;
                left = left.saturating_sub(frame.1.len());
                fits
            })
            .count()
    };
    for _ in 0..acks.min(arrived) {
        let (rec, _) = a.frames.remove(0);
        a.end.unacked.pop_front();
        a.end.qp.on_record_acked(&mut a.end.env, &rec);
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

    /// Any octets behind a sound CRC: no panic, memory outside of the region untouched, at most one
    /// Terminate.
    #[test]
    fn hostile_peer_gets_at_most_one_terminate(
        frames in prop::collection::vec((prop::collection::vec(any::<u8>(), 0..80), 0u8..13, any::<bool>()), 1..12),
        cut in 1usize..200,
    ) {
        let mut v = side(false);
        v.end.env.post_recv(1, &[sge(0x4000, 64, v.key)]);
        let mut bytes = Vec::new();
        for (mut u, op, t) in frames {
            if u.len() >= 18 {
                // Make it past the first checks more often than chance would.
                u[0] = if t { 0xc1 } else { 0x41 };
                u[1] = 0x40 | op;
                if t { u[2..6].copy_from_slice(&v.key.0.to_be_bytes()); u[6..12].fill(0); }
                else { u[6..13].fill(0); u[9] = match op { 1 | 10 => 1, 7 => 2, 11 => 3, _ => 0 }; u[13] &= 3; u[14..18].fill(0); }
            }
            bytes.extend(raw(&[&u]));
        }
        let mut terminates = 0;
        for part in bytes.chunks(cut) {
            v.end.give(part);
            while let Some(frame) = v.end.pull() {
                terminates += usize::from(ulpdu(&frame)[1] == 0x47);
            }
        }
        prop_assert!(terminates <= 1);
        v.end.qp.on_tcp_closed(&mut v.end.env, CloseReason::Closed);
        prop_assert_eq!(v.end.env.received.len(), 1);
    }
}
