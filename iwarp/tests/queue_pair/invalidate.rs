//! Local invalidation: LOCAL_INV, and READ_WITH_INV.
use crate::common::*;
use siw_memory::Stag;
use siw_shm::wqe::{SendData, SendWr};
use siw_shm::{Access, Opcode, WcOpcode, WcStatus};

const VA: u64 = 0x10_0000;

/// Earlier requests may be retransmitted, so the key stays valid until they are complete.
#[test]
fn local_invalidate_waits_for_requests_before_it() {
    let (mut initiator, mut responder) = pair();
    let (initiator_key, _) = initiator.env.mr(VA, 64, Access::LOCAL_WRITE);
    let (responder_key, _) = responder.env.mr(VA, 64, REMOTE);
    initiator.env.post(&remote(
        Opcode::Write,
        1,
        &[sge(VA, 64, initiator_key)],
        VA,
        responder_key,
    ));
    initiator.env.post(&SendWr::local_inv(2, initiator_key.0));
    initiator
        .env
        .post(&remote(Opcode::Write, 3, &[], 0, responder_key));
    let fpdu = initiator.pull_all();
    assert!(initiator.env.keys.lookup(initiator_key).is_some());
    responder.give(&fpdu);
    initiator.ack_all();
    assert!(initiator.pull().is_some(), "the Write behind it");
    assert!(
        initiator.env.keys.lookup(initiator_key).is_none(),
        "invalidated"
    );
    initiator.ack_all();
    assert_eq!(
        initiator.env.statuses(),
        [1, 2, 3].map(|i| (i, WcStatus::SUCCESS))
    );
    assert_eq!(
        initiator.env.sent[1].expect("signaled").opcode,
        WcOpcode::LOCAL_INV
    );
    initiator.env.post(&remote(
        Opcode::Write,
        4,
        &[sge(VA, 1, initiator_key)],
        VA,
        responder_key,
    ));
    initiator.expect_terminate("0/0/00");
    assert_eq!(initiator.env.statuses()[3], (4, WcStatus::LOC_PROT_ERR));
}

#[test]
fn local_invalidate_of_a_foreign_or_unknown_key_fails() {
    let mut initiator = End::new(negotiated(true));
    let (other, _) = initiator.env.mr_in(VA, 64, REMOTE, PD + 1, None);
    let (stream, _) = initiator.env.mr_in(VA, 64, REMOTE, PD, Some(99));
    for key in [other, stream, Stag(0), Stag(other.0 ^ 1)] {
        let mut a2 = End::new(negotiated(true));
        std::mem::swap(&mut initiator.env, &mut a2.env);
        a2.env.sent.clear();
        a2.env.post(&SendWr::local_inv(1, key.0));
        a2.expect_terminate("0/0/00");
        assert_eq!(a2.env.statuses(), [(1, WcStatus::LOC_PROT_ERR)]);
        std::mem::swap(&mut initiator.env, &mut a2.env);
    }
    assert!(
        initiator.env.keys.lookup(other).is_some() && initiator.env.keys.lookup(stream).is_some()
    );
}

#[test]
fn read_with_invalidate_invalidates_its_sink() {
    for n in [1, 5000] {
        let (mut initiator, mut responder) = pair();
        let (initiator_key, initiator_mem) = initiator.env.mr(VA, 8192, Access::LOCAL_WRITE);
        let (responder_key, responder_mem) = responder.env.mr(VA, 8192, REMOTE);
        responder_mem.write(0, &pattern(n, 1)).expect("in range");
        let s = [sge(VA, n, initiator_key)];
        initiator
            .env
            .post(&SendWr::read_with_inv(1, &s, VA, responder_key.0));
        run(&mut initiator, &mut responder);
        assert_eq!(initiator.env.statuses(), [(1, WcStatus::SUCCESS)]);
        assert_eq!(
            initiator.env.sent[0].expect("signaled").opcode,
            WcOpcode::RDMA_READ
        );
        assert_eq!(contents(&initiator_mem, n), pattern(n, 1));
        assert!(initiator.env.keys.lookup(initiator_key).is_none());
    }
}

#[test]
fn read_with_invalidate_takes_one_element() {
    let mut initiator = End::new(negotiated(true));
    let (key, _) = initiator.env.mr(VA, 64, Access::LOCAL_WRITE);
    let s = [sge(VA, 8, key), sge(VA + 8, 8, key)];
    initiator.env.post(&SendWr {
        rkey: 1,
        ..wr(Opcode::ReadWithInv, 1, SendData::Sges(&s))
    });
    initiator.expect_terminate("0/0/00");
    assert_eq!(initiator.env.statuses(), [(1, WcStatus::LOC_QP_OP_ERR)]);
}
