//! Two queue pairs, random work requests, a random link: memory equals a model, and completions come
//! in order, exactly one each.
mod common;
use common::*;
use proptest::prelude::*;
use siw_iwarp::*;
use siw_shm::wqe::{Data, SendDesc};
use siw_shm::{Opcode, Region, Stag, WcStatus, WrFlags};
use std::collections::VecDeque;
use std::sync::Arc;

const MEM: usize = 16 * 1024;
const SLICE: usize = 4096;

#[derive(Debug, Clone)]
struct Op {
    kind: u8,
    from: usize,
    to: usize,
    len: usize,
    inline: bool,
    signaled: bool,
    fence: bool,
    split: usize,
}

fn op() -> impl Strategy<Value = Op> {
    (
        0u8..3,
        0..SLICE,
        0..SLICE,
        prop_oneof![0..9usize, 0..200usize, 1400..1500usize, 0..SLICE],
        any::<[bool; 3]>(),
        0..SLICE,
    )
        .prop_map(|(kind, from, to, len, b, split)| Op {
            kind,
            from: from.min(SLICE - len),
            to: to.min(SLICE - len),
            len,
            inline: b[0],
            signaled: b[1],
            fence: b[2],
            split,
        })
}

struct Side {
    end: End,
    key: Stag,
    mem: Arc<Region>,
    model: Vec<u8>,
    /// Segments on their way to the peer: not lost, for TCP is below, but cut and delayed.
    wire: VecDeque<u8>,
    frames: Vec<(Fpdu, Vec<u8>)>,
    posted: Vec<(u64, bool)>,
}

fn side(initiator: bool) -> Side {
    let mut end = End::new(Negotiated {
        ird: 2,
        ord: 2,
        rtr: initiator.then_some(mpa::RtrKind::Read),
        ..negotiated(initiator)
    });
    end.env.track = true;
    let (key, mem) = end.env.mr(0x4000, MEM, REMOTE);
    let model = pattern(MEM, u8::from(initiator));
    mem.write(0, &model).expect("in range");
    Side {
        end,
        key,
        mem,
        model,
        wire: VecDeque::new(),
        frames: Vec::new(),
        posted: Vec::new(),
    }
}

/// Memory of each side: [0, SLICE) source of its own requests, [SLICE, 2*SLICE) sink of its Reads,
/// [2*SLICE, 3*SLICE) target of the peer's Writes, [3*SLICE, 4*SLICE) receive buffers. So the model
/// does not depend on timing; Reads take from the peer's source slice.
fn post(me: &mut Side, peer: &mut Side, ops: &[Op]) {
    const VA: u64 = 0x4000;
    for (i, o) in ops.iter().enumerate() {
        let id = i as u64;
        let src = &me.model[o.from..o.from + o.len].to_vec();
        let cut = o.split.min(o.len);
        let two = [
            sge(VA + o.from as u64, cut, me.key),
            sge(VA + (o.from + cut) as u64, o.len - cut, me.key),
        ];
        let mut flags = if o.signaled {
            WrFlags::SIGNALED
        } else {
            WrFlags::NONE
        };
        if o.fence {
            flags = flags | WrFlags::FENCE;
        }
        let data = if o.inline && o.len <= 256 {
            Data::Inline(src)
        } else {
            Data::Sges(&two)
        };
        match o.kind {
            0 => {
                let at = 2 * SLICE + o.to;
                me.end.env.post(&SendDesc {
                    flags,
                    remote_addr: VA + at as u64,
                    rkey: peer.key.0,
                    ..wr(Opcode::Write, id, data)
                });
                peer.model[at..at + o.len].copy_from_slice(src);
            }
            1 => {
                let at = 3 * SLICE + o.to;
                peer.end
                    .env
                    .post_recv(id, &[sge(VA + at as u64, o.len, peer.key)]);
                me.end.env.post(&SendDesc {
                    flags,
                    ..wr(Opcode::Send, id, data)
                });
                peer.model[at..at + o.len].copy_from_slice(src);
            }
            _ => {
                let at = SLICE + o.to;
                let sink = [sge(VA + at as u64, o.len, me.key)];
                me.end.env.post(&SendDesc {
                    flags,
                    remote_addr: VA + o.from as u64,
                    rkey: peer.key.0,
                    ..wr(Opcode::Read, id, Data::Sges(&sink))
                });
                let from = peer.model[o.from..o.from + o.len].to_vec();
                me.model[at..at + o.len].copy_from_slice(&from);
            }
        }
        me.posted.push((id, o.signaled));
    }
}

/// One step of `a`: send up to `n` FPDUs, deliver `cut` bytes to `b`, acknowledge `acks` records.
fn step(a: &mut Side, b: &mut Side, n: usize, cut: usize, acks: usize) -> bool {
    let mut moved = false;
    for _ in 0..n {
        let Some(f) = a.end.pull() else { break };
        a.wire.extend(&f);
        let rec = *a.end.unacked.back().expect("pulled");
        a.frames.push((rec, f));
        moved = true;
    }
    // A retransmission is the same segment again.
    if let Some((rec, want)) = a.frames.get(cut % a.frames.len().max(1)) {
        let mut f = Frame::default();
        a.end
            .qp
            .build(&a.end.env.keys, rec, &mut f)
            .expect("not acknowledged");
        assert!(&f.bytes == want, "same bytes");
    }
    let k = cut.min(a.wire.len());
    let bytes: Vec<u8> = a.wire.drain(..k).collect();
    moved |= k > 0;
    b.end.give(&bytes);
    // Only what has arrived can be acknowledged.
    let arrived = {
        let total: usize = a.frames.iter().map(|f| f.1.len()).sum();
        let mut left = total - a.wire.len();
        a.frames
            .iter()
            .take_while(|f| {
                let fits = f.1.len() <= left;
                left = left.saturating_sub(f.1.len());
                fits
            })
            .count()
    };
    for _ in 0..acks.min(arrived) {
        let (rec, _) = a.frames.remove(0);
        a.end.unacked.pop_front();
        a.end.qp.acked(&mut a.end.env, &rec);
        moved = true;
    }
    moved
}

fn check_order(s: &Side, all: bool) {
    let sent = &s.end.env.sent;
    assert!(sent.len() <= s.posted.len());
    if all {
        assert_eq!(sent.len(), s.posted.len(), "each exactly once");
    }
    for (c, (id, signaled)) in sent.iter().zip(&s.posted) {
        match c {
            Some(c) => {
                assert_eq!(c.wr_id, *id);
                assert!(*signaled || c.status != WcStatus::SUCCESS);
            }
            None => assert!(!signaled),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn memory_equals_the_model_and_completions_are_in_order(
        x in prop::collection::vec(op(), 0..24),
        y in prop::collection::vec(op(), 0..24),
        steps in prop::collection::vec((0usize..4, 0usize..4000, 0usize..4, any::<bool>()), 0..80),
        kill in prop::option::of(0usize..80),
    ) {
        let (mut a, mut b) = (side(true), side(false));
        post(&mut a, &mut b, &x);
        post(&mut b, &mut a, &y);
        for (i, &(n, cut, acks, who)) in steps.iter().enumerate() {
            if kill == Some(i) {
                for s in [&mut a, &mut b] {
                    s.end.qp.tcp_closed(&mut s.end.env, CloseReason::Reset);
                    s.end.qp.poll_releases(&mut s.end.env);
                    check_order(s, true);
                    prop_assert!(s.end.env.live.is_empty());
                    let first_bad = s.end.env.sent.iter().flatten()
                        .position(|c| c.status != WcStatus::SUCCESS);
                    if let Some(p) = first_bad {
                        prop_assert!(s.end.env.sent.iter().flatten().skip(p)
                            .all(|c| c.status == WcStatus::WR_FLUSH_ERR));
                    }
                }
                prop_assert_eq!(a.end.env.received.len(), y.iter().filter(|o| o.kind == 1).count());
                return Ok(());
            }
            if who { step(&mut a, &mut b, n, cut, acks); } else { step(&mut b, &mut a, n, cut, acks); }
            check_order(&a, false);
            check_order(&b, false);
        }
        while step(&mut a, &mut b, 8, 9000, 8) | step(&mut b, &mut a, 8, 9000, 8) {}
        for s in [&a, &b] {
            prop_assert_eq!(s.end.qp.state(), QpState::Rts);
            check_order(s, true);
            prop_assert!(s.end.env.sent.iter().flatten().all(|c| c.status == WcStatus::SUCCESS));
            prop_assert!(contents(&s.mem, MEM) == s.model, "memory equals the model");
            prop_assert!(s.end.env.live.is_empty());
            prop_assert!(s.end.env.received.iter().all(|c| c.status == WcStatus::SUCCESS));
            let ids: Vec<u64> = s.end.env.received.iter().map(|c| c.wr_id).collect();
            let mut sorted = ids.clone();
            sorted.sort_unstable();
            prop_assert_eq!(ids, sorted);
        }
    }

    /// Any octets behind a sound CRC: no panic, memory outside of the region untouched, at most one
    /// Terminate.
    #[test]
    fn a_hostile_peer_gets_at_most_one_terminate(
        frames in prop::collection::vec((prop::collection::vec(any::<u8>(), 0..80), 0u8..8, any::<bool>()), 1..12),
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
                else { u[6..13].fill(0); u[9] = match op { 1 => 1, 7 => 2, _ => 0 }; u[13] &= 3; u[14..18].fill(0); }
            }
            bytes.extend(raw(&[&u]));
        }
        let mut terminates = 0;
        for c in bytes.chunks(cut) {
            v.end.give(c);
            while let Some(f) = v.end.pull() {
                terminates += usize::from(ulpdu(&f)[1] == 0x47);
            }
        }
        prop_assert!(terminates <= 1);
        v.end.qp.tcp_closed(&mut v.end.env, CloseReason::Closed);
        prop_assert_eq!(v.end.env.received.len(), 1);
    }
}
