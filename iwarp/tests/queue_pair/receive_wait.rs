//! Messages that wait for a receive work request, where this is configured, instead of the Terminate
//! of RFC 5041 section 7.1.

use crate::common::*;
use siw_iwarp::RdmapState;
use siw_shm::{Opcode, SendData, WcStatus};

#[test]
fn a_send_without_a_receive_waits_and_what_follows_it_too() {
    let (mut initiator, mut responder) = pair();
    responder.qp.set_receive_wait(1000);
    let (sink, _) = responder.env.mr(0, 4096, REMOTE);
    for number in [1, 2] {
        let send = wr(Opcode::Send, number, SendData::Inline(b"hello"));
        initiator.env.post(&send);
    }
    let bytes = initiator.pull_all();
    responder.give(&bytes);
    assert!(responder.qp.awaits_receive());
    responder.give(&[]);
    assert!(responder.qp.awaits_receive() && responder.pull().is_none());
    assert_eq!(responder.qp.state(), RdmapState::Rts);
    responder.env.post_recv(1, &[sge(0, 5, sink)]);
    responder.give(&[]);
    assert_eq!(responder.env.recv_statuses(), [(1, WcStatus::SUCCESS)]);
    assert!(responder.qp.awaits_receive(), "the second one");
    responder.env.post_recv(2, &[sge(8, 5, sink)]);
    responder.give(&[]);
    assert!(!responder.qp.awaits_receive());
    let both = [(1, WcStatus::SUCCESS), (2, WcStatus::SUCCESS)];
    assert_eq!(responder.env.recv_statuses(), both);
    initiator.ack_all();
    assert_eq!(initiator.env.statuses(), both);
}

#[test]
fn a_wait_that_ends_in_vain_sends_a_terminate() {
    let (mut initiator, mut responder) = pair();
    responder.qp.set_receive_wait(1000);
    let send = wr(Opcode::Send, 1, SendData::Inline(b"hello"));
    initiator.env.post(&send);
    let bytes = initiator.pull_all();
    responder.give(&bytes);
    assert!(responder.qp.awaits_receive());
    responder.qp.set_receive_wait(0);
    responder.give(&[]);
    assert!(!responder.qp.awaits_receive());
    assert_eq!(responder.qp.state(), RdmapState::Terminate);
}
