//! Messages that wait for a receive work request, where this is configured, instead of the Terminate
//! of RFC 5041 section 7.1.

use crate::common::*;
use siw_iwarp::RdmapState;
use siw_memory::Stag;
use siw_shm::{Opcode, SendData, SharedMemory, WcStatus};
use std::sync::Arc;

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

/// A rendezvous: the consumer posts the receive for the peer's Send after its own Read has completed.
#[test]
fn responses_pass_a_send_that_waits() {
    let (mut reader, mut peer) = pair();
    reader.qp.set_receive_wait(1000);
    let (sink, _) = reader.env.mr(0, 4096, REMOTE);
    let (source, _) = peer.env.mr(0, 4096, REMOTE);
    // A responder may send once something has arrived.
    reader
        .env
        .post(&wr(Opcode::Send, 9, SendData::Inline(b"begin")));
    let (begin, _) = peer.env.mr(0, 4096, REMOTE);
    peer.env.post_recv(9, &[sge(0, 5, begin)]);
    let bytes = reader.pull_all();
    peer.give(&bytes);
    let part = [sge(100, 3000, sink)];
    reader.env.post(&remote(Opcode::Read, 11, &part, 0, source));
    let requests = reader.pull_all();
    for number in [1, 2] {
        let send = wr(Opcode::Send, number, SendData::Inline(b"hello"));
        peer.env.post(&send);
    }
    let mut bytes = peer.pull_all();
    peer.give(&requests);
    bytes.extend(peer.pull_all());
    // In two parts, the second of which begins within a response.
    let (first, second) = bytes.split_at(bytes.len() - 1000);
    reader.give(first);
    assert!(reader.qp.awaits_receive());
    reader.give(second);
    reader.ack_all();
    let sent = [(9, WcStatus::SUCCESS), (11, WcStatus::SUCCESS)];
    assert_eq!(reader.env.statuses(), sent);
    assert!(reader.qp.awaits_receive());
    for (number, at) in [(1, 0), (2, 8)] {
        reader.env.post_recv(number, &[sge(at, 5, sink)]);
    }
    reader.give(&[]);
    let both = [(1, WcStatus::SUCCESS), (2, WcStatus::SUCCESS)];
    assert_eq!(reader.env.recv_statuses(), both);
    assert!(!reader.qp.awaits_receive());
    // The stream goes on behind the responses.
    reader.env.post_recv(3, &[sge(16, 5, sink)]);
    peer.env
        .post(&wr(Opcode::Send, 3, SendData::Inline(b"third")));
    let bytes = peer.pull_all();
    reader.give(&bytes);
    assert_eq!(reader.env.recv_statuses().len(), 3);
    assert_eq!(reader.qp.state(), RdmapState::Rts);
}

/// A reader of `len` bytes whose peer's Send waits; also its sink and its memory.
fn waiting_reader(len: usize) -> (End, Stag, Arc<SharedMemory>) {
    let mut reader = End::new(negotiated(true));
    reader.qp.set_receive_wait(1000);
    let (sink, memory) = reader.env.mr(0, 4096, REMOTE);
    let part = [sge(100, len, sink)];
    let read = remote(Opcode::Read, 11, &part, 0, Stag(0x33));
    reader.env.post(&read);
    reader.pull_all();
    reader.ack_all();
    reader.give(&send(1, 0, true, b"hello"));
    assert!(reader.qp.awaits_receive());
    (reader, sink, memory)
}

#[test]
fn a_read_completes_after_the_writes_before_its_response() {
    let (mut reader, sink, memory) = waiting_reader(4);
    let mut behind = write(sink.0, 2000, b"flag");
    behind.extend(write(sink.0, 0, b""));
    behind.extend(read_response(true, sink.0, 100, b"data"));
    reader.give(&behind);
    assert_eq!(reader.env.statuses(), [(11, WcStatus::SUCCESS)]);
    assert_eq!(contents(&memory, 2004)[2000..], *b"flag");
    // The Write is not placed again in its turn: its target belongs to the consumer by then.
    memory.write(2000, b"used").expect("in range");
    reader.env.post_recv(1, &[sge(0, 5, sink)]);
    reader.give(&write(sink.0, 3000, b"next"));
    assert_eq!(reader.env.recv_statuses(), [(1, WcStatus::SUCCESS)]);
    assert_eq!(contents(&memory, 2004)[2000..], *b"used");
    assert_eq!(contents(&memory, 3004)[3000..], *b"next");
    assert_eq!(reader.qp.state(), RdmapState::Rts);
}

#[test]
fn a_read_waits_behind_a_write_that_is_refused() {
    let (mut reader, sink, _) = waiting_reader(4);
    let mut behind = write(sink.0, 5000, b"outside");
    behind.extend(read_response(true, sink.0, 100, b"data"));
    reader.give(&behind);
    assert_eq!(reader.env.statuses(), []);
    assert_eq!(reader.qp.state(), RdmapState::Rts, "in its turn");
    reader.env.post_recv(1, &[sge(0, 5, sink)]);
    reader.give(&[]);
    reader.expect_terminate("1/1/01");
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
