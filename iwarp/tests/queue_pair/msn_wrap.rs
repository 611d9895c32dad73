//! Conformance 57: a stream of 2^32 messages is too long for a test, so this one starts near the
//! wrap.
use crate::common::*;
use siw_iwarp::ddp::Msn;
use siw_iwarp::*;
use siw_shm::wqe::{SendData, SendWr};

/// One end of a stream whose first message in every queue has the last MSN.
fn end_at_last_msn(initiator: bool) -> End {
    let mut end = End::new(negotiated(initiator));
    end.qp = QueuePair::new(init_attr());
    end.qp.set_first_msn(Msn(u32::MAX));
    end.qp.set_rts(negotiated(initiator), EMSS);
    end
}

/// RFC 5041 section 4.3: the MSN after 0xFFFFFFFF is 0, in every queue.
#[test]
fn c57_msns_wrap_to_zero_on_both_sides() {
    let (mut sender, mut receiver) = (end_at_last_msn(true), end_at_last_msn(false));
    let read = |wr_id| SendWr::read(wr_id, &[], 0, 1);
    sender.env.post(&read(1));
    sender
        .env
        .post(&SendWr::send_with_imm(2, SendData::Sges(&[]), 1));
    sender.env.post(&read(3));
    sender.env.post(&SendWr::send(4, SendData::Sges(&[])));
    receiver.env.post_recv(5, &[]);
    receiver.env.post_recv(6, &[]);
    let mut messages = Vec::new();
    while let Some(fpdu) = sender.pull() {
        let header = untagged_of(&fpdu);
        messages.push((header.control.opcode(), header.msn));
        receiver.give(&fpdu);
    }
    let want = [
        (1, Msn(u32::MAX)),
        (8, Msn(u32::MAX)),
        (3, Msn(0)),
        (1, Msn(0)),
        (3, Msn(1)),
    ];
    assert_eq!(messages, want);
    assert_eq!(receiver.qp.state(), RdmapState::Rts);
    let completed: Vec<u64> = receiver.env.received.iter().map(|cqe| cqe.wr_id).collect();
    assert_eq!(completed, [5, 6]);
}
