//! Random work requests of two queue pairs, and the expected memory contents.

use super::*;
use proptest::prelude::*;

pub const SLICE: usize = 4096;
pub const MEM: usize = 4 * SLICE + 8;

/// Returns whether the operation completes a receive work request of the peer.
pub fn takes_recv(o: &Op) -> bool {
    matches!(o.kind, 1 | 3 | 4)
}

#[derive(Debug, Clone)]
pub struct Op {
    pub kind: u8,
    pub from: usize,
    pub to: usize,
    pub len: usize,
    pub inline: bool,
    pub signaled: bool,
    pub fence: bool,
    pub split: usize,
}

pub fn op() -> impl Strategy<Value = Op> {
    (
        0u8..7,
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

pub struct Side {
    pub end: End,
    pub key: Stag,
    pub mem: Arc<SharedMemory>,
    pub model: Vec<u8>,
    /// Segments in flight to the peer: cut and delayed but never lost, as TCP guarantees.
    pub wire: VecDeque<u8>,
    pub frames: Vec<(FpduRecord, Vec<u8>)>,
    pub posted: Vec<(u64, bool)>,
}

pub fn side(initiator: bool) -> Side {
    side_with(initiator, [false; 2])
}

/// `markers`: whether the initiator and the responder, respectively, send them.
pub fn side_with(initiator: bool, markers: [bool; 2]) -> Side {
    let mut end = End::new(NegotiatedParameters {
        ird: 2,
        ord: 2,
        rtr: initiator.then_some(mpa::RtrKind::Read),
        markers_in: markers[usize::from(initiator)],
        markers_out: markers[usize::from(!initiator)],
        ..negotiated(initiator)
    });
    end.send_by_reference();
    let (key, mem) = end.env.mr(0x4000, MEM, Access(REMOTE.0 | 8));
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
/// [2*SLICE, 3*SLICE) target of the peer's Writes, [3*SLICE, 4*SLICE) receive buffers, and one word
/// for the peer's atomics. This makes the model independent of timing; Reads take from the peer's
/// source slice.
pub fn post(me: &mut Side, peer: &mut Side, ops: &[Op]) {
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
            SendData::Inline(src)
        } else {
            SendData::Sges(&two)
        };
        match o.kind {
            0 | 3 => {
                let imm = o.kind == 3;
                if imm {
                    peer.end.env.post_recv(id, &[]);
                }
                let op = [Opcode::Write, Opcode::WriteWithImm][usize::from(imm)];
                let at = 2 * SLICE + o.to;
                me.end.env.post(&SendWr {
                    flags,
                    remote_addr: VA + at as u64,
                    rkey: peer.key.0,
                    imm: id as u32,
                    ..wr(op, id, data)
                });
                peer.model[at..at + o.len].copy_from_slice(src);
            }
            1 | 4 => {
                let op = [Opcode::Send, Opcode::SendWithImm][usize::from(o.kind == 4)];
                let at = 3 * SLICE + o.to;
                peer.end
                    .env
                    .post_recv(id, &[sge(VA + at as u64, o.len, peer.key)]);
                me.end.env.post(&SendWr {
                    flags,
                    imm: id as u32,
                    ..wr(op, id, data)
                });
                peer.model[at..at + o.len].copy_from_slice(src);
            }
            5 | 6 => {
                let (at, word) = (SLICE + o.to.min(SLICE - 8), 4 * SLICE);
                let old = peer.model[word..].try_into().map(u64::from_ne_bytes);
                let old = old.expect("eight octets");
                let args = AtomicArgs {
                    add_or_swap: 0x0123_4567_89ab_cdef ^ o.from as u64,
                    add_or_swap_mask: o.split as u64 * 0x11_0101,
                    compare: o.to as u64,
                    compare_mask: o.len as u64 & 1,
                };
                let (op, new) = if o.kind == 5 {
                    (Opcode::FetchAdd, args.fetch_add_result(old))
                } else {
                    (Opcode::CmpSwap, args.cmp_swap_result(old).unwrap_or(old))
                };
                me.end.env.post(&SendWr {
                    flags,
                    remote_addr: VA + word as u64,
                    rkey: peer.key.0,
                    ..wr(
                        op,
                        id,
                        SendData::Atomic(sge(VA + at as u64, 8, me.key), args),
                    )
                });
                me.model[at..at + 8].copy_from_slice(&old.to_ne_bytes());
                peer.model[word..].copy_from_slice(&new.to_ne_bytes());
            }
            _ => {
                let at = SLICE + o.to;
                let sink = [
                    sge(VA + at as u64, cut, me.key),
                    sge(VA + (at + cut) as u64, o.len - cut, me.key),
                ];
                me.end.env.post(&SendWr {
                    flags,
                    remote_addr: VA + o.from as u64,
                    rkey: peer.key.0,
                    ..wr(Opcode::Read, id, SendData::Sges(&sink))
                });
                let from = peer.model[o.from..o.from + o.len].to_vec();
                me.model[at..at + o.len].copy_from_slice(&from);
            }
        }
        me.posted.push((id, o.signaled));
    }
}

pub fn check_order(s: &Side, all: bool) {
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
