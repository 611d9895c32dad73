//! The send queue drain of ibv_modify_qp(3): started work requests complete, no others start.
use crate::common::*;
use siw_iwarp::*;
use siw_memory::Stag;
use siw_shm::wqe::SendData;
use siw_shm::{Opcode, WcStatus, WrFlags};

fn drained(e: &End) -> usize {
    let is = |v: &&QpEvent| **v == QpEvent::SqDrained;
    e.env.events.iter().filter(is).count()
}

#[test]
fn message_under_way_is_finished_and_the_next_one_waits() {
    let mut initiator = End::new(negotiated(true));
    let (key, _) = initiator.env.mr(0, 1 << 16, REMOTE);
    initiator
        .env
        .post(&remote(Opcode::Write, 1, &[sge(0, 5000, key)], 0, Stag(1)));
    initiator
        .env
        .post(&wr(Opcode::Send, 2, SendData::Inline(b"later")));
    initiator.pull().expect("the first segment");
    assert!(initiator.qp.drain_send_queue(&mut initiator.env));
    assert_eq!(initiator.qp.drain_state(), DrainState::Draining);
    while initiator.pull().is_some() {}
    assert!(initiator.env.statuses().is_empty());
    assert!(!initiator.qp.has_output());
    initiator.ack_all();
    assert_eq!(initiator.env.statuses(), [(1, WcStatus::SUCCESS)]);
    assert_eq!(
        (initiator.qp.drain_state(), drained(&initiator)),
        (DrainState::Drained, 1)
    );
    assert!(initiator.pull().is_none());
    assert!(initiator.qp.resume_send_queue());
    assert!(initiator.pull().is_some());
    initiator.ack_all();
    assert_eq!(initiator.env.statuses().len(), 2);
    assert_eq!(drained(&initiator), 1);
}

#[test]
fn read_under_way_delays_sq_drained() {
    let (mut initiator, mut responder) = pair();
    let (key, _) = initiator.env.mr(0, 4096, REMOTE);
    let (r, _) = responder.env.mr(0, 4096, REMOTE);
    initiator
        .env
        .post(&remote(Opcode::Read, 1, &[sge(0, 100, key)], 0, r));
    let fenced = WrFlags::SIGNALED | WrFlags::FENCE;
    initiator
        .env
        .post(&wr(Opcode::Send, 2, SendData::Inline(b"x")).with_flags(fenced));
    let request = initiator.pull().expect("the Read Request");
    assert!(initiator.pull().is_none(), "the fence holds the Send");
    initiator.ack_all();
    assert!(initiator.qp.drain_send_queue(&mut initiator.env));
    assert_eq!(drained(&initiator), 0);
    responder.give(&request);
    let response = responder.pull_all();
    initiator.give(&response);
    assert_eq!(initiator.env.statuses(), [(1, WcStatus::SUCCESS)]);
    assert_eq!(drained(&initiator), 1);
    assert!(
        initiator.pull().is_none(),
        "drained: the Send waits though its fence is open"
    );
    initiator.qp.resume_send_queue();
    assert!(initiator.pull().is_some());
}

#[test]
fn idle_send_queue_is_drained_at_once() {
    let mut initiator = End::new(negotiated(true));
    assert!(initiator.qp.drain_send_queue(&mut initiator.env));
    assert_eq!(drained(&initiator), 1);
    initiator
        .env
        .post(&wr(Opcode::Send, 2, SendData::Inline(b"x")));
    assert!(initiator.pull().is_none());
    initiator.qp.modify_to_error(&mut initiator.env);
    assert_eq!(initiator.env.statuses(), [(2, WcStatus::WR_FLUSH_ERR)]);
    assert!(
        !initiator.qp.drain_send_queue(&mut initiator.env) && !initiator.qp.resume_send_queue()
    );
}
