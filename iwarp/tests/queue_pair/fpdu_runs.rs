//! Messages and segments handed out as runs: stream, checks and completions are the same as one by
//! one.
use crate::common::*;
use siw_iwarp::*;
use siw_memory::scatter::{Extent, ExtentMemory};
use siw_memory::{RegisteredMemory, Stag};
use siw_shm::{Access, Opcode, SharedMemory, WcStatus, WrFlags};
use std::sync::Arc;

const AT: u64 = 0x1000;

/// An end with `len` bytes of registered memory at [`AT`].
fn end_with_memory(len: usize) -> (End, Stag) {
    let (end, _) = pair();
    let (key, memory) = end.env.mr(AT, len, Access::NONE);
    memory.write(0, &pattern(len, 3)).expect("in range");
    (end, key)
}

/// Posts messages of these kinds and lengths, from consecutive memory.
fn post_all(end: &mut End, key: Stag, messages: &[(Opcode, usize, WrFlags)]) {
    let mut from = AT;
    for (id, &(opcode, len, flags)) in messages.iter().enumerate() {
        let sges = [sge(from, len, key)];
        let request = remote(opcode, id as u64, &sges, 0x9000 + from, Stag(77));
        end.env.post(&request.with_flags(flags));
        from += len as u64;
    }
}

fn shapes(runs: &[FpduRun]) -> Vec<(u16, u32, bool)> {
    let shape = |run: &FpduRun| (run.count(), run.unit_len(), run.ends_messages());
    runs.iter().map(shape).collect()
}

#[test]
fn messages_alike_are_one_run() {
    let (mut end, key) = end_with_memory(1 << 20);
    let (signaled, silent) = (WrFlags::SIGNALED, WrFlags::NONE);
    let mut messages = vec![(Opcode::Write, 64, silent); 10];
    messages.extend([(Opcode::Write, 65, signaled); 2]);
    messages.push((Opcode::Write, 65, WrFlags(silent.0 | WrFlags::FENCE.0)));
    messages.extend([(Opcode::Send, 65, signaled); 3]);
    messages.push((Opcode::Send, 0, signaled));
    messages.push((Opcode::WriteWithImm, 65, signaled));
    messages.extend([(Opcode::Write, 10_000, signaled); 2]);
    post_all(&mut end, key, &messages);
    let (runs, _) = end.pull_runs(usize::MAX, 100);
    assert_eq!(
        shapes(&runs),
        [
            (10, 84, true),
            (2, 88, true),
            (1, 88, true),
            (3, 92, true),
            (1, 24, true),
            (1, 88, true),
            (1, 32, true),
            // 10,000 bytes are seven full segments and one with the rest.
            (1, 1448, false),
            (6, 1448, false),
            (1, 24, true),
            (1, 1448, false),
            (6, 1448, false),
            (1, 24, true),
        ]
    );
}

#[test]
fn a_run_is_limited_by_room_by_what_is_asked_for_and_by_the_depth() {
    let (mut end, key) = end_with_memory(1 << 16);
    post_all(&mut end, key, &[(Opcode::Write, 64, WrFlags::NONE); 80]);
    let mut counts = |room, most| {
        let (runs, _) = end.pull_runs(room, most);
        runs.iter().map(|run| run.count()).collect::<Vec<_>>()
    };
    assert_eq!(counts(84 * 5 + 83, 100), [5]);
    // The sixth was taken out of the ring and waited for room.
    assert_eq!(counts(usize::MAX, 7), [1, 6]);
    assert_eq!(counts(usize::MAX, 7), [7]);
    // The queue has 64 places, 19 of which are taken.
    assert_eq!(counts(usize::MAX, 100), [45]);
    assert_eq!(counts(usize::MAX, 100), [0u16; 0]);
}

#[test]
fn the_stream_is_that_of_single_fpdus() {
    let kinds = [
        Opcode::Write,
        Opcode::Send,
        Opcode::Write,
        Opcode::SendWithInv,
    ];
    let lens = [64, 64, 64, 1, 1428, 1429, 5000, 0, 100];
    let messages: Vec<_> = (0..60)
        .map(|i| {
            let flags = [WrFlags::NONE, WrFlags::SIGNALED, WrFlags::SOLICITED][i / 3 % 3];
            (kinds[i / 7 % 4], lens[i / 5 % 9], flags)
        })
        .collect();
    for crc in [true, false] {
        let ends = [(); 2].map(|()| {
            let end = End::new(NegotiatedParameters {
                crc,
                ..negotiated(true)
            });
            let (key, memory) = end.env.mr(AT, 1 << 18, Access::NONE);
            memory.write(0, &pattern(1 << 18, 3)).expect("in range");
            (end, key)
        });
        let streams = ends.map(|(mut end, key)| {
            post_all(&mut end, key, &messages);
            (end, key)
        });
        let [(mut alone, _), (mut together, _)] = streams;
        let one_by_one = alone.pull_all();
        let (runs, bytes) = together.pull_runs(usize::MAX, 1000);
        // The keys are drawn at random, but are not sent.
        assert_eq!(bytes, one_by_one);
        assert!(runs.iter().any(|run| run.count() > 4));
        // Any units of a run, built into frames with little room.
        for run in &runs {
            let whole = together.build_units(run, 0..run.count()).expect("built");
            let unit = run.unit_len() as usize;
            for start in 0..run.count() {
                let part = together
                    .build_units(run, start..run.count())
                    .expect("built");
                assert_eq!(part, whole[usize::from(start) * unit..]);
            }
        }
        alone.ack_all();
        for run in &runs {
            together.qp.on_fpdus_acked(run, 0..run.count());
            together.qp.complete_acked(&mut together.env);
        }
        assert_eq!(together.env.statuses(), alone.env.statuses());
        assert_eq!(together.env.sent.len(), 60, "one completion each");
    }
}

#[test]
fn each_part_that_is_acknowledged_completes() {
    let (mut end, key) = end_with_memory(1 << 16);
    post_all(&mut end, key, &[(Opcode::Send, 64, WrFlags::SIGNALED); 20]);
    let (runs, _) = end.pull_runs(usize::MAX, 100);
    assert_eq!(shapes(&runs), [(20, 88, true)]);
    for (units, completed) in [(0..7, 7), (7..8, 8), (8..20, 20)] {
        end.qp.on_fpdus_acked(&runs[0], units);
        end.qp.complete_acked(&mut end.env);
        assert_eq!(end.env.statuses().len(), completed);
    }
    let ids = end.env.statuses().into_iter().map(|(id, _)| id);
    assert!(ids.eq(0..20));
}

#[test]
fn a_request_with_a_wrong_key_fails_behind_the_run_before_it() {
    let (mut end, key) = end_with_memory(1 << 16);
    for (id, key) in [key, key, key, Stag(1), key].into_iter().enumerate() {
        let sges = [sge(AT, 64, key)];
        end.env
            .post(&remote(Opcode::Write, id as u64, &sges, 0, Stag(77)));
    }
    let (runs, _) = end.pull_runs(usize::MAX, 100);
    assert_eq!(shapes(&runs)[0], (3, 84, true));
    assert_eq!(end.qp.state(), RdmapState::Terminate);
    end.qp.on_fpdus_acked(&runs[0], 0..3);
    end.qp.complete_acked(&mut end.env);
    let success = |id| (id, WcStatus::SUCCESS);
    assert_eq!(
        end.env.statuses(),
        [
            success(0),
            success(1),
            success(2),
            (3, WcStatus::LOC_PROT_ERR)
        ]
    );
}

#[test]
fn memory_that_goes_meanwhile_breaks_the_frame() {
    let (mut end, key) = end_with_memory(1 << 16);
    let (other, _) = end.env.mr(AT, 4096, Access::NONE);
    for (id, key) in [key, key, other, key].into_iter().enumerate() {
        let sges = [sge(AT, 64, key)];
        end.env
            .post(&remote(Opcode::Write, id as u64, &sges, 0, Stag(77)));
    }
    let (runs, _) = end.pull_runs(usize::MAX, 100);
    assert_eq!(shapes(&runs), [(4, 84, true)]);
    end.env.table.deregister(other).expect("known");
    let mut frame = Frame::default();
    let built = end
        .qp
        .build_fpdus(&end.env.keys, &runs[0], 1..4, &mut frame);
    let (record, error) = built.expect_err("the key is gone");
    assert_eq!(
        (record, error),
        (runs[0].get(2), BuildError::KeyDeregistered)
    );
    end.qp.on_build_failure(&mut end.env, &record, error);
    assert_eq!(end.qp.state(), RdmapState::Error);
}

#[test]
fn memory_in_several_pieces_is_copied_piece_by_piece() {
    let (mut end, key) = end_with_memory(1 << 16);
    let region = Arc::new(SharedMemory::new_anonymous(8192).expect("memory"));
    region.write(0, &pattern(8192, 9)).expect("in range");
    // Two pages, the second first.
    let extents = [4096, 0].map(|offset| Extent {
        memory: ExtentMemory::Shared(region.clone()),
        offset,
        len: 4096,
    });
    let scattered = RegisteredMemory::new_scattered(extents.into(), 8192, AT, PD, Access::NONE);
    let scattered = end
        .env
        .table
        .insert(scattered.expect("in range"))
        .expect("room");
    for (from, key) in [(AT, key), (AT + 4096 - 30, scattered), (AT, key)] {
        let sges = [sge(from, 64, key)];
        end.env.post(&remote(Opcode::Write, 1, &sges, 0, Stag(77)));
    }
    let (runs, bytes) = end.pull_runs(usize::MAX, 100);
    assert_eq!(shapes(&runs), [(3, 84, true)]);
    let expected = pattern(8192, 9);
    assert_eq!(bytes[84 + 16..][..30], expected[8192 - 30..]);
    assert_eq!(bytes[84 + 46..][..34], expected[..34]);
}
