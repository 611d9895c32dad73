//! The send queue drain of ibv_modify_qp(3): what is started completes, nothing else starts.
mod common;
use common::*;
use siw_iwarp::*;
use siw_memory::Stag;
use siw_shm::wqe::SendData;
use siw_shm::{Opcode, WcStatus, WrFlags};

fn drained(e: &End) -> usize {
    let is = |v: &&QpEvent| **v == QpEvent::SqDrained;
    e.env.events.iter().filter(is).count()
}

#[test]
fn a_message_under_way_is_finished_and_the_next_one_waits() {
    let mut a = End::new(negotiated(true));
    let (k, _) = a.env.mr(0, 1 << 16, REMOTE);
    a.env
        .post(&remote(Opcode::Write, 1, &[sge(0, 5000, k)], 0, Stag(1)));
    a.env.post(&wr(Opcode::Send, 2, SendData::Inline(b"later")));
    a.pull().expect("the first segment");
    assert!(a.qp.drain_send_queue(&mut a.env));
    assert_eq!(a.qp.drain_state(), DrainState::Draining);
    while a.pull().is_some() {}
    assert!(a.env.statuses().is_empty());
    assert!(!a.qp.has_output());
    a.ack_all();
    assert_eq!(a.env.statuses(), [(1, WcStatus::SUCCESS)]);
    assert_eq!((a.qp.drain_state(), drained(&a)), (DrainState::Drained, 1));
    assert!(a.pull().is_none());
    assert!(a.qp.resume_send_queue());
    assert!(a.pull().is_some());
    a.ack_all();
    assert_eq!(a.env.statuses().len(), 2);
    assert_eq!(drained(&a), 1);
}

#[test]
fn a_read_under_way_holds_the_event_back_and_a_fenced_request_does_not() {
    let (mut a, mut b) = pair();
    let (k, _) = a.env.mr(0, 4096, REMOTE);
    let (r, _) = b.env.mr(0, 4096, REMOTE);
    a.env
        .post(&remote(Opcode::Read, 1, &[sge(0, 100, k)], 0, r));
    let fenced = WrFlags::SIGNALED | WrFlags::FENCE;
    a.env
        .post(&wr(Opcode::Send, 2, SendData::Inline(b"x")).with_flags(fenced));
    let request = a.pull().expect("the Read Request");
    assert!(a.pull().is_none(), "the fence holds the Send");
    a.ack_all();
    assert!(a.qp.drain_send_queue(&mut a.env));
    assert_eq!(drained(&a), 0);
    b.give(&request);
    let response = b.pull_all();
    a.give(&response);
    assert_eq!(a.env.statuses(), [(1, WcStatus::SUCCESS)]);
    assert_eq!(drained(&a), 1);
    assert!(
        a.pull().is_none(),
        "drained: the Send waits though its fence is open"
    );
    a.qp.resume_send_queue();
    assert!(a.pull().is_some());
}

#[test]
fn an_idle_send_queue_is_drained_at_once_and_outside_of_rts_nothing_is() {
    let mut a = End::new(negotiated(true));
    assert!(a.qp.drain_send_queue(&mut a.env));
    assert_eq!(drained(&a), 1);
    a.env.post(&wr(Opcode::Send, 2, SendData::Inline(b"x")));
    assert!(a.pull().is_none());
    a.qp.modify_to_error(&mut a.env);
    assert_eq!(a.env.statuses(), [(2, WcStatus::WR_FLUSH_ERR)]);
    assert!(!a.qp.drain_send_queue(&mut a.env) && !a.qp.resume_send_queue());
}
