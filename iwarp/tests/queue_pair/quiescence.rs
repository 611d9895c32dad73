//! Invalidations with other workers: they complete when no worker can be in the middle of an access
//! any more (RFC 5040 section 8.1.1), and no later request overtakes them.
use crate::common::*;
use siw_memory::{KeyReader, RegisteredMemory};
use siw_shm::wqe::SendData;
use siw_shm::{Access, BindMw, Opcode, SendWr, WcFlags, WcStatus, WindowType};

/// Another worker, in the middle of a batch.
fn other_worker(end: &End) -> KeyReader {
    end.env.table.register_reader().expect("the second")
}

#[test]
fn a_local_invalidation_waits_for_other_workers() {
    let mut initiator = End::new(negotiated(true));
    let (key, _) = initiator.env.mr(0, 4096, REMOTE);
    let mut other = other_worker(&initiator);
    initiator.env.post(&SendWr::local_inv(1, key.0));
    initiator
        .env
        .post(&wr(Opcode::Send, 2, SendData::Inline(b"behind")));
    assert!(initiator.pull().is_none(), "the Send waits");
    assert!(initiator.env.keys.lookup(key).is_none(), "invalid at once");
    assert!(initiator.qp.poll_quiescence(&mut initiator.env));
    assert!(initiator.env.statuses().is_empty());
    other.report_quiescent();
    assert!(!initiator.qp.poll_quiescence(&mut initiator.env));
    assert_eq!(initiator.env.statuses(), [(1, WcStatus::SUCCESS)]);
    assert!(initiator.pull().is_some(), "the Send");
    // A sleeping worker is not waited for.
    let (key, _) = initiator.env.mr(0, 4096, REMOTE);
    other.go_offline();
    initiator.ack_all();
    initiator.env.post(&SendWr::local_inv(3, key.0));
    assert!(initiator.pull().is_none());
    assert_eq!(
        initiator.env.statuses().last(),
        Some(&(3, WcStatus::SUCCESS))
    );
}

#[test]
fn a_bind_waits_when_it_ends_another_binding() {
    let mut initiator = End::new(negotiated(true));
    let (region, _) = initiator.env.mr(0, 4096, Access(31));
    let window = RegisteredMemory::new_window(PD, WindowType::One);
    let window = initiator.env.table.insert(window).expect("room");
    let mut other = other_worker(&initiator);
    let bind = |length| BindMw {
        rkey: window.0,
        new_rkey: window.0,
        lkey: region.0,
        addr: 0,
        length,
        access: Access::REMOTE_WRITE,
    };
    initiator.env.post(&SendWr::bind_mw(1, &bind(64)));
    assert!(initiator.pull().is_none());
    assert_eq!(initiator.env.statuses(), [(1, WcStatus::SUCCESS)]);
    for (number, length) in [(2, 32), (3, 0)] {
        initiator.env.post(&SendWr::bind_mw(number, &bind(length)));
        assert!(initiator.pull().is_none());
        assert_eq!(initiator.env.statuses().len() as u64, number - 1);
        other.report_quiescent();
        assert!(!initiator.qp.poll_quiescence(&mut initiator.env));
        let last = initiator.env.statuses().pop();
        assert_eq!(last, Some((number, WcStatus::SUCCESS)));
    }
}

#[test]
fn a_send_with_invalidate_is_delivered_after_other_workers_let_go() {
    let (mut initiator, mut responder) = pair();
    let (key, _) = responder.env.mr(0, 4096, REMOTE);
    let mut other = other_worker(&responder);
    responder.env.post_recv(1, &[]);
    responder.env.post_recv(2, &[]);
    let mut invalidating = wr(Opcode::SendWithInv, 1, SendData::Inline(b""));
    invalidating.imm = key.0;
    initiator.env.post(&invalidating);
    initiator
        .env
        .post(&wr(Opcode::Send, 2, SendData::Inline(b"")));
    let bytes = initiator.pull_all();
    responder.give(&bytes);
    assert!(responder.env.keys.lookup(key).is_none(), "invalid at once");
    assert!(responder.qp.is_delivery_delayed());
    assert!(responder.env.received.is_empty());
    assert!(responder.qp.poll_quiescence(&mut responder.env));
    other.report_quiescent();
    assert!(!responder.qp.poll_quiescence(&mut responder.env));
    assert_eq!(responder.env.recv_statuses(), [(1, WcStatus::SUCCESS)]);
    assert!(responder.env.received[0].flags.contains(WcFlags::WITH_INV));
    responder.give(&[]);
    let both = [(1, WcStatus::SUCCESS), (2, WcStatus::SUCCESS)];
    assert_eq!(responder.env.recv_statuses(), both);
}

#[test]
fn a_read_with_invalidate_completes_after_other_workers_let_go() {
    let (mut initiator, mut responder) = pair();
    let (sink, _) = initiator.env.mr(0, 4096, REMOTE);
    let (source, _) = responder.env.mr(0, 4096, REMOTE);
    let mut other = other_worker(&initiator);
    let sinks = [sge(0, 100, sink)];
    let read = remote(Opcode::ReadWithInv, 1, &sinks, 0, source);
    initiator.env.post(&read);
    let request = initiator.pull_all();
    responder.give(&request);
    initiator.ack_all();
    let response = responder.pull_all();
    initiator.give(&response);
    assert!(initiator.env.keys.lookup(sink).is_none(), "invalid at once");
    assert!(initiator.env.statuses().is_empty());
    other.report_quiescent();
    assert!(!initiator.qp.poll_quiescence(&mut initiator.env));
    assert_eq!(initiator.env.statuses(), [(1, WcStatus::SUCCESS)]);
}
