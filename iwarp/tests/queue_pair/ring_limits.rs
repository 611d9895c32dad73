//! Rings of a client that ignores all limits: the queue pair takes no more work requests than it was
//! created for, and each of its turns ends.
use crate::common::*;
use siw_iwarp::*;
use siw_memory::RegisteredMemory;
use siw_shm::wqe::SendData;
use siw_shm::{BindMw, Opcode, SendWr, WcStatus, WindowType, WrFlags};

/// Requests to unbind a window that is not bound: they always succeed.
fn post_unbinds(end: &mut End, count: u64) {
    let window = RegisteredMemory::new_window(PD, WindowType::One);
    let key = end.env.table.insert(window).expect("room");
    let unbind = BindMw {
        rkey: key.0,
        new_rkey: key.0,
        lkey: 0,
        addr: 0,
        length: 0,
        access: siw_shm::Access::NONE,
    };
    for number in 0..count {
        end.env.post(&SendWr::bind_mw(100 + number, &unbind));
    }
}

#[test]
fn no_more_requests_are_taken_than_the_queue_is_deep() {
    let (mut initiator, responder) = pair();
    let (sink, _) = initiator.env.mr(0, 4096, REMOTE);
    let (source, _) = responder.env.mr(0, 4096, REMOTE);
    let sinks = [sge(0, 100, sink)];
    let read = remote(Opcode::Read, 1, &sinks, 0, source);
    initiator.env.post(&read);
    post_unbinds(&mut initiator, 1000);
    // The READ is never answered, and all other requests wait for its completion.
    for _ in 0..100 {
        initiator.pull_all();
        initiator.qp.take_yielded();
    }
    let taken = 1001 - initiator.env.sq.len();
    assert_eq!(taken, init_attr().max_send_wr as usize);
    assert!(initiator.env.statuses().is_empty());
    // The remaining requests are flushed too.
    initiator.qp.modify_to_error(&mut initiator.env);
    while initiator.qp.has_unflushed() {
        initiator.qp.flush_queues(&mut initiator.env);
    }
    assert_eq!(initiator.env.statuses().len(), 1001);
}

#[test]
fn a_turn_of_local_operations_ends() {
    let mut initiator = End::new(negotiated(true));
    post_unbinds(&mut initiator, 1000);
    initiator
        .env
        .post(&wr(Opcode::Send, 2, SendData::Inline(b"behind")));
    let mut turns = 0;
    while initiator.pull().is_none() {
        assert!(initiator.qp.take_yielded(), "there is more to do");
        turns += 1;
        let done = initiator.env.statuses().len();
        assert!(done <= 64 * turns, "{done} in {turns} turns");
    }
    assert!(turns > 10);
    assert!(!initiator.qp.take_yielded());
}

#[test]
fn a_turn_of_a_flush_ends() {
    let mut initiator = End::new(negotiated(true));
    for number in 0..500 {
        let send = wr(Opcode::Send, number, SendData::Inline(b""));
        initiator.env.post(&send);
        initiator.env.post_recv(number, &[]);
    }
    initiator.qp.modify_to_error(&mut initiator.env);
    let mut turns = 1;
    while initiator.qp.has_unflushed() {
        let done = (initiator.env.sent.len(), initiator.env.received.len());
        assert!(done.0 <= 64 * turns && done.1 <= 64 * turns, "{done:?}");
        turns += 1;
        initiator.qp.flush_queues(&mut initiator.env);
    }
    let all: Vec<_> = (0..500)
        .map(|number| (number, WcStatus::WR_FLUSH_ERR))
        .collect();
    assert_eq!(initiator.env.statuses(), all);
    assert_eq!(initiator.env.recv_statuses(), all);
}

#[test]
fn a_request_that_cannot_be_read_completes_in_its_turn() {
    let mut initiator = End::new(negotiated(true));
    let send = wr(Opcode::Send, 1, SendData::Inline(b"before"));
    initiator.env.post(&send.with_flags(WrFlags::SIGNALED));
    initiator.env.ring_fault = Some(RingFault::InvalidRequest { wr_id: 2 });
    initiator.pull().expect("the Send");
    initiator.expect_terminate("0/0/00");
    assert!(initiator.env.statuses().is_empty(), "1 is not acknowledged");
    initiator.ack_all();
    initiator
        .qp
        .on_tcp_closed(&mut initiator.env, CloseReason::Closed);
    let expected = [(1, WcStatus::SUCCESS), (2, WcStatus::LOC_QP_OP_ERR)];
    assert_eq!(initiator.env.statuses(), expected);
    // In ERROR it is flushed like the others.
    initiator.env.ring_fault = Some(RingFault::InvalidRequest { wr_id: 3 });
    initiator.qp.flush_queues(&mut initiator.env);
    assert_eq!(
        initiator.env.statuses()[2..],
        [(3, WcStatus::LOC_QP_OP_ERR)]
    );
}
