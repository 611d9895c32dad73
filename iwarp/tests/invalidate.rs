//! Local invalidation: LOCAL_INV, and READ_WITH_INV.
mod common;
use common::*;
use siw_memory::Stag;
use siw_shm::wqe::{SendData, SendWr};
use siw_shm::{Access, Opcode, WcOpcode, WcStatus};

const VA: u64 = 0x10_0000;

/// What was posted before may be sent again, so the key works until it is complete.
#[test]
fn a_local_invalidate_waits_for_what_was_posted_before_it() {
    let (mut a, mut b) = pair();
    let (ka, _) = a.env.mr(VA, 64, Access::LOCAL_WRITE);
    let (kb, _) = b.env.mr(VA, 64, REMOTE);
    a.env
        .post(&remote(Opcode::Write, 1, &[sge(VA, 64, ka)], VA, kb));
    a.env.post(&SendWr::local_inv(2, ka.0));
    a.env.post(&remote(Opcode::Write, 3, &[], 0, kb));
    let f = a.pull_all();
    assert!(a.env.keys.lookup(ka).is_some());
    b.give(&f);
    a.ack_all();
    assert!(a.pull().is_some(), "the Write behind it");
    assert!(a.env.keys.lookup(ka).is_none(), "invalidated");
    a.ack_all();
    assert_eq!(a.env.statuses(), [1, 2, 3].map(|i| (i, WcStatus::SUCCESS)));
    assert_eq!(a.env.sent[1].expect("signaled").opcode, WcOpcode::LOCAL_INV);
    a.env
        .post(&remote(Opcode::Write, 4, &[sge(VA, 1, ka)], VA, kb));
    a.expect_terminate("0/0/00");
    assert_eq!(a.env.statuses()[3], (4, WcStatus::LOC_PROT_ERR));
}

#[test]
fn a_local_invalidate_of_a_foreign_or_unknown_key_fails() {
    let mut a = End::new(negotiated(true));
    let (other, _) = a.env.mr_in(VA, 64, REMOTE, PD + 1, None);
    let (stream, _) = a.env.mr_in(VA, 64, REMOTE, PD, Some(99));
    for key in [other, stream, Stag(0), Stag(other.0 ^ 1)] {
        let mut a2 = End::new(negotiated(true));
        std::mem::swap(&mut a.env, &mut a2.env);
        a2.env.sent.clear();
        a2.env.post(&SendWr::local_inv(1, key.0));
        a2.expect_terminate("0/0/00");
        assert_eq!(a2.env.statuses(), [(1, WcStatus::LOC_PROT_ERR)]);
        std::mem::swap(&mut a.env, &mut a2.env);
    }
    assert!(a.env.keys.lookup(other).is_some() && a.env.keys.lookup(stream).is_some());
}

#[test]
fn a_read_with_invalidate_leaves_the_data_and_takes_the_key() {
    for n in [1, 5000] {
        let (mut a, mut b) = pair();
        let (ka, ma) = a.env.mr(VA, 8192, Access::LOCAL_WRITE);
        let (kb, mb) = b.env.mr(VA, 8192, REMOTE);
        mb.write(0, &pattern(n, 1)).expect("in range");
        let s = [sge(VA, n, ka)];
        a.env.post(&SendWr::read_with_inv(1, &s, VA, kb.0));
        run(&mut a, &mut b);
        assert_eq!(a.env.statuses(), [(1, WcStatus::SUCCESS)]);
        assert_eq!(a.env.sent[0].expect("signaled").opcode, WcOpcode::RDMA_READ);
        assert_eq!(contents(&ma, n), pattern(n, 1));
        assert!(a.env.keys.lookup(ka).is_none());
    }
}

#[test]
fn a_read_with_invalidate_takes_one_element() {
    let mut a = End::new(negotiated(true));
    let (k, _) = a.env.mr(VA, 64, Access::LOCAL_WRITE);
    let s = [sge(VA, 8, k), sge(VA + 8, 8, k)];
    a.env.post(&SendWr {
        rkey: 1,
        ..wr(Opcode::ReadWithInv, 1, SendData::Sges(&s))
    });
    a.expect_terminate("0/0/00");
    assert_eq!(a.env.statuses(), [(1, WcStatus::LOC_QP_OP_ERR)]);
}
