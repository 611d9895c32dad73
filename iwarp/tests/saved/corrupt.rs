//! State that was damaged is refused, or is a state that a queue pair can have: it may break its stream, but
//! nothing else.

use crate::common::model::*;
use crate::common::*;
use proptest::prelude::*;
use siw_iwarp::{CloseReason, FpduRecord, QueuePair, RxStream};

/// Sends an FPDU, and delivers some octets: part of an FPDU, mostly.
fn pass_some(from: &mut Side, to: &mut Side, step: usize) {
    if let Some(bytes) = from.end.pull() {
        from.wire.extend(&bytes);
    }
    let len = from.wire.len().min(300 + 211 * step);
    let bytes: Vec<u8> = from.wire.drain(..len).collect();
    to.end.give(&bytes);
}

/// Two sides with messages of all kinds under way, after `steps` steps.
fn sides_under_way(ops: &[Op], steps: usize) -> (Side, Side) {
    let (mut one, mut other) = (side(true), side(false));
    post(&mut one, &mut other, ops);
    for step in 0..steps {
        pass_some(&mut one, &mut other, step);
        pass_some(&mut other, &mut one, step);
    }
    (one, other)
}

/// Continues with a queue pair for a while, whatever it does.
fn continue_with(qp: QueuePair, records: Vec<FpduRecord>, mut side: Side, bytes: &[u8]) {
    side.end.qp = qp;
    side.end.env.live.clear();
    let End { qp, env, rx, .. } = &mut side.end;
    let mut frame = Frame::default();
    for record in &records {
        let _ = qp.build_fpdus(&env.keys, &(*record).into(), 0..1, &mut frame);
    }
    rx.push(bytes);
    qp.receive_in_order(env, rx);
    for _ in 0..100 {
        let Some(fpdu) = qp.next_record(env, 100_000) else {
            break;
        };
        let _ = qp.build_fpdus(&env.keys, &fpdu.record.into(), 0..1, &mut frame);
    }
    let _ = qp.next_records(env, 100_000, 100, |_, _| {});
    for record in &records {
        qp.on_record_acked(record);
        qp.complete_acked(env);
    }
    let left = rx.available();
    qp.on_peer_fin(env, left);
    qp.on_tcp_closed(env, CloseReason::Closed);
    for _ in 0..10 {
        qp.flush_queues(env);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn damaged_state_is_refused_or_harmless(
        ops in prop::collection::vec(op(), 1..12),
        steps in 0usize..8,
        damage in any::<prop::sample::Index>(),
        bit in 0u8..8,
        is_cut in prop::bool::weighted(0.1),
    ) {
        let (one, other) = sides_under_way(&ops, steps);
        let mut state = postcard::to_stdvec(&one.end.qp).expect("it can be saved");
        let at = damage.index(state.len());
        if is_cut {
            state.truncate(at);
        } else {
            state[at] ^= 1 << bit;
        }
        let restored: Result<QueuePair, _> = postcard::from_bytes(&state);
        prop_assert!(!is_cut || restored.is_err());
        let records: Vec<FpduRecord> = one.end.unacked.iter().copied().collect();
        let knows_all = |qp: &QueuePair| {
            let mut runs = records.iter().map(|record| (*record).into());
            runs.all(|run| qp.knows_record(&run))
        };
        if let Some(qp) = restored.ok().filter(knows_all) {
            let bytes: Vec<u8> = other.wire.iter().copied().collect();
            continue_with(qp, records, one, &bytes);
        }
    }
}
