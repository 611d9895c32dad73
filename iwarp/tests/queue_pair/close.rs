//! Ends of a stream: every posted work request completes exactly once, in order, however the stream
//! ends.
use crate::common::*;
use siw_iwarp::rdmap::ReadRequestHeader;
use siw_iwarp::*;
use siw_memory::Stag;
use siw_shm::wqe::SendData;
use siw_shm::{Access, Opcode, WcStatus};

fn loaded() -> End {
    let mut initiator = End::new(negotiated(true));
    initiator.send_by_reference();
    let (key, _) = initiator.env.mr(0, 1 << 16, REMOTE);
    initiator
        .env
        .post(&remote(Opcode::Write, 1, &[sge(0, 100, key)], 0, Stag(1)));
    initiator
        .env
        .post(&remote(Opcode::Read, 2, &[sge(0, 100, key)], 0, Stag(1)));
    initiator
        .env
        .post(&remote(Opcode::Write, 3, &[sge(0, 60000, key)], 0, Stag(1)));
    initiator
        .env
        .post(&wr(Opcode::Send, 4, SendData::Inline(b"x")));
    initiator.env.post_recv(11, &[sge(0, 100, key)]);
    initiator.env.post_recv(12, &[]);
    initiator
}

fn ids(v: &[(u64, WcStatus)]) -> Vec<u64> {
    v.iter().map(|s| s.0).collect()
}

#[test]
fn reset_flushes_everything_once_and_in_order() {
    for pulled in 0..10 {
        for acked in 0..=pulled {
            let mut initiator = loaded();
            for _ in 0..pulled {
                initiator.pull().expect("there is more");
            }
            for _ in 0..acked {
                let r = initiator.unacked.pop_front().expect("pulled");
                initiator.qp.on_record_acked(&r);
                initiator.qp.complete_acked(&mut initiator.env);
            }
            initiator.give(&send(1, 0, false, &[1; 10])[..pulled * 4]);
            initiator
                .qp
                .on_tcp_closed(&mut initiator.env, CloseReason::Reset);
            initiator
                .qp
                .on_tcp_closed(&mut initiator.env, CloseReason::Reset);
            initiator.qp.flush_queues(&mut initiator.env);
            assert_eq!(ids(&initiator.env.statuses()), [1, 2, 3, 4]);
            assert_eq!(ids(&initiator.env.recv_statuses()), [11, 12]);
            let ok = initiator
                .env
                .statuses()
                .iter()
                .filter(|s| s.1 == WcStatus::SUCCESS)
                .count();
            assert_eq!(ok, usize::from(acked > 0), "pulled {pulled} acked {acked}");
            assert_eq!(initiator.qp.state(), RdmapState::Error);
            assert_eq!(initiator.qp.requested_close(), None);
            assert!(initiator.env.live.is_empty(), "no tracker leaks");
            assert!(initiator.pull().is_none());
        }
    }
}

#[test]
fn answered_read_in_front_succeeds_in_the_flush() {
    let mut initiator = End::new(negotiated(true));
    let (key, _) = initiator.env.mr(0, 4096, REMOTE);
    for i in 0..3 {
        initiator
            .env
            .post(&remote(Opcode::Read, i, &[sge(0, 8, key)], 0, Stag(1)));
    }
    initiator.pull_all();
    initiator.give(&read_response(true, key.0, 0, &[1; 8]));
    initiator.ack_all();
    initiator
        .qp
        .on_tcp_closed(&mut initiator.env, CloseReason::Reset);
    assert_eq!(
        initiator.env.statuses(),
        [
            (0, WcStatus::SUCCESS),
            (1, WcStatus::WR_FLUSH_ERR),
            (2, WcStatus::WR_FLUSH_ERR)
        ]
    );
}

#[test]
fn work_posted_in_error_is_flushed_on_the_next_doorbell() {
    let mut initiator = loaded();
    initiator.qp.modify_to_error(&mut initiator.env);
    assert_eq!(initiator.qp.requested_close(), Some(CloseKind::Abort));
    assert_eq!(ids(&initiator.env.statuses()), [1, 2, 3, 4]);
    initiator
        .env
        .post(&wr(Opcode::Send, 5, SendData::Inline(b"x")));
    initiator.env.post_recv(13, &[]);
    initiator.qp.flush_queues(&mut initiator.env);
    assert_eq!(ids(&initiator.env.statuses()), [1, 2, 3, 4, 5]);
    assert_eq!(ids(&initiator.env.recv_statuses()), [11, 12, 13]);
    initiator
        .qp
        .on_tcp_closed(&mut initiator.env, CloseReason::Closed);
    assert_eq!(initiator.qp.requested_close(), None);
    assert_eq!(initiator.env.statuses().len(), 5);
}

#[test]
fn disconnect_with_an_empty_send_queue_goes_to_idle() {
    let (mut initiator, mut responder) = pair();
    let (key, _) = responder.env.mr(0, 64, REMOTE);
    initiator.env.post(&siw_shm::wqe::SendWr {
        rkey: key.0,
        ..wr(Opcode::Write, 1, SendData::Inline(b"x"))
    });
    initiator.env.post_recv(7, &[]);
    run(&mut initiator, &mut responder);
    initiator.qp.disconnect();
    assert_eq!(initiator.qp.state(), RdmapState::Closing);
    assert_eq!(initiator.qp.requested_close(), Some(CloseKind::Graceful));
    responder
        .qp
        .on_peer_fin(&mut responder.env, responder.rx.available());
    assert_eq!(responder.qp.requested_close(), Some(CloseKind::Graceful));
    initiator.qp.on_peer_fin(&mut initiator.env, 0);
    for end in [&mut initiator, &mut responder] {
        end.qp.on_tcp_closed(&mut end.env, CloseReason::Closed);
        assert_eq!(end.qp.state(), RdmapState::Idle);
        assert!(end.env.events.is_empty());
    }
    assert_eq!(initiator.env.recv_statuses(), [(7, WcStatus::WR_FLUSH_ERR)]);
    // The queue pair can be used again.
    initiator.qp.set_rts(negotiated(true), EMSS);
    assert_eq!(initiator.qp.state(), RdmapState::Rts);
}

#[test]
fn disconnect_finishes_the_message_under_way() {
    let mut initiator = loaded();
    for _ in 0..4 {
        initiator
            .pull()
            .expect("up to the middle of the long Write");
    }
    initiator.qp.disconnect();
    assert_eq!(
        initiator.qp.requested_close(),
        None,
        "the message ends first"
    );
    let n = initiator.pull_all().len();
    assert!(n > 50000);
    assert_eq!(initiator.qp.requested_close(), Some(CloseKind::Graceful));
    initiator.ack_all();
    initiator
        .qp
        .on_tcp_closed(&mut initiator.env, CloseReason::Closed);
    assert_eq!(initiator.qp.state(), RdmapState::Error);
    assert_eq!(
        initiator.env.statuses(),
        [
            (1, WcStatus::SUCCESS),
            (2, WcStatus::WR_FLUSH_ERR),
            (3, WcStatus::WR_FLUSH_ERR),
            (4, WcStatus::WR_FLUSH_ERR)
        ]
    );
}

/// Conformance 36.
#[test]
fn c36_fin_inside_of_an_fpdu_or_message_is_a_lost_stream() {
    let mut initiator = loaded();
    let fpdu = write(1, 0, &[1; 8]);
    initiator.give(&fpdu[..10]);
    initiator
        .qp
        .on_peer_fin(&mut initiator.env, initiator.rx.available());
    assert_eq!(initiator.qp.state(), RdmapState::Error);
    assert_eq!(
        initiator.qp.found_error(),
        Some(TerminateCode::MPA_TCP_LOST)
    );
    assert_eq!(initiator.qp.requested_close(), Some(CloseKind::Abort));
    assert_eq!(ids(&initiator.env.statuses()), [1, 2, 3, 4]);
    assert!(initiator.pull().is_none(), "reported locally only");

    let mut initiator = loaded();
    initiator.give(&send(1, 0, false, &[1; 8]));
    initiator.qp.on_peer_fin(&mut initiator.env, 0);
    assert_eq!(initiator.qp.state(), RdmapState::Error);
    assert_eq!(
        initiator.env.recv_statuses(),
        [(11, WcStatus::WR_FLUSH_ERR), (12, WcStatus::WR_FLUSH_ERR)]
    );
}

/// An end that has received three Read Requests of `size` bytes of the returned key's memory.
fn asked_for_reads(size: u32) -> (End, Stag) {
    let mut responder = End::new(negotiated(false));
    let (key, memory) = responder.env.mr(0, 4096, REMOTE);
    memory.write(0, &pattern(4096, 3)).expect("in range");
    for msn in 1..=3 {
        let read = ReadRequestHeader {
            sink_stag: 7,
            sink_to: 0x1000,
            size,
            src_stag: key.0,
            src_to: 0,
        };
        responder.give(&read_request(msn, &read));
    }
    (responder, key)
}

/// RFC 5041 section 6.2.1: the peer's FIN ends its direction only, and what is still to be sent goes
/// before the own FIN.
#[test]
fn reads_before_the_peers_fin_are_answered_before_the_own_fin() {
    for (size, segments) in [(8, 1), (3000, 3)] {
        let (mut responder, _) = asked_for_reads(size);
        responder.qp.on_peer_fin(&mut responder.env, 0);
        assert_eq!(responder.qp.state(), RdmapState::Closing);
        let mut payload = Vec::new();
        for nth in 1..=3 * segments {
            assert!(responder.qp.has_output());
            assert_eq!(responder.qp.requested_close(), None);
            assert!(responder.pull_room(20).is_none(), "TCP has no room");
            let fpdu = responder.pull().expect("a response is left");
            let header = tagged_of(&fpdu);
            assert_eq!(header.stag, 7);
            assert_eq!(header.control.is_last(), nth % segments == 0);
            payload.extend_from_slice(&ulpdu(&fpdu)[14..]);
        }
        assert_eq!(payload, pattern(size as usize, 3).repeat(3));
        assert!(!responder.qp.has_output() && responder.pull().is_none());
        assert_eq!(
            responder.qp.requested_close(),
            Some(CloseKind::Graceful),
            "the FIN follows"
        );
        responder.ack_all();
        let reason = CloseReason::Closed;
        responder.qp.on_tcp_closed(&mut responder.env, reason);
        assert_eq!(responder.qp.state(), RdmapState::Idle);
        assert!(responder.env.events.is_empty());
    }
}

#[test]
fn requests_under_way_and_responses_end_before_the_own_fin_and_no_request_starts() {
    let (mut responder, key) = asked_for_reads(8);
    for number in 1..=2 {
        responder.env.post(&remote(
            Opcode::Write,
            number,
            &[sge(0, 3000, key)],
            0,
            Stag(1),
        ));
    }
    // The first segments of what comes first: a Write or a response.
    while responder
        .pull()
        .is_some_and(|fpdu| tagged_of(&fpdu).stag == 7)
    {}
    responder.qp.on_peer_fin(&mut responder.env, 0);
    responder.pull_all();
    assert_eq!(responder.qp.requested_close(), Some(CloseKind::Graceful));
    responder.ack_all();
    responder
        .qp
        .on_tcp_closed(&mut responder.env, CloseReason::Closed);
    assert_eq!(
        responder.env.statuses(),
        [(1, WcStatus::SUCCESS), (2, WcStatus::WR_FLUSH_ERR)]
    );
}

#[test]
fn a_response_whose_key_is_gone_after_the_peers_fin_ends_in_a_reset() {
    let (mut responder, key) = asked_for_reads(8);
    responder.qp.on_peer_fin(&mut responder.env, 0);
    responder.env.table.remove(key).expect("known");
    assert!(responder.pull().is_none());
    assert_eq!(responder.qp.state(), RdmapState::Error);
    assert_eq!(responder.qp.requested_close(), Some(CloseKind::Abort));
}

#[test]
fn reads_before_the_own_disconnect_stay_unanswered() {
    let (mut responder, _) = asked_for_reads(8);
    responder.qp.disconnect();
    responder.qp.on_peer_fin(&mut responder.env, 0);
    assert!(responder.pull().is_none());
    assert_eq!(responder.qp.requested_close(), Some(CloseKind::Graceful));
}

#[test]
fn key_that_goes_in_mid_message_aborts_the_stream() {
    let mut initiator = End::new(negotiated(true));
    let (key, _) = initiator.env.mr(0, 1 << 16, Access::NONE);
    initiator
        .env
        .post(&remote(Opcode::Write, 1, &[sge(0, 60000, key)], 0, Stag(1)));
    initiator
        .env
        .post(&wr(Opcode::Send, 2, SendData::Inline(b"x")));
    initiator.pull().expect("first");
    initiator.env.table.remove(key).expect("known");
    let record = initiator
        .qp
        .next_record(&mut initiator.env, 9000)
        .expect("second")
        .record;
    let mut fpdu = Frame::default();
    let end = initiator
        .build_fpdu(&record, &mut fpdu)
        .expect_err("no key");
    assert_eq!(end, BuildError::KeyDeregistered);
    initiator
        .qp
        .on_build_failure(&mut initiator.env, &record, end);
    assert_eq!(initiator.qp.requested_close(), Some(CloseKind::Abort));
    assert_eq!(
        initiator.env.statuses(),
        [(1, WcStatus::LOC_PROT_ERR), (2, WcStatus::WR_FLUSH_ERR)]
    );
}

#[test]
fn flush_does_not_wait_for_the_port() {
    let mut initiator = loaded();
    initiator.env.held = true;
    initiator.pull_all();
    initiator
        .qp
        .on_tcp_closed(&mut initiator.env, CloseReason::Reset);
    assert_eq!(initiator.env.statuses().len(), 4);
    assert!(initiator.env.live.is_empty(), "the environment waits");
}

#[test]
fn error_after_our_fin_aborts_instead_of_terminating() {
    let mut initiator = End::new(negotiated(true));
    initiator.qp.disconnect();
    initiator.give(&write(0xdead_be00, 0, &[1]));
    assert_eq!(initiator.qp.state(), RdmapState::Error);
    assert!(initiator.pull().is_none());
    assert_eq!(initiator.qp.requested_close(), Some(CloseKind::Abort));
}

#[test]
fn work_posted_while_a_clean_close_ends_is_flushed() {
    let (mut initiator, _) = pair();
    initiator.qp.flush_queues(&mut initiator.env);
    initiator.qp.disconnect();
    initiator
        .qp
        .on_tcp_closed(&mut initiator.env, CloseReason::Closed);
    assert_eq!(initiator.qp.state(), RdmapState::Idle);
    // Its consumer still considered it connected.
    initiator
        .env
        .post(&wr(Opcode::Send, 9, SendData::Inline(b"late")));
    initiator.env.post_recv(5, &[]);
    initiator.qp.flush_queues(&mut initiator.env);
    assert_eq!(initiator.env.statuses(), [(9, WcStatus::WR_FLUSH_ERR)]);
    assert_eq!(initiator.qp.state(), RdmapState::Error);
    assert_eq!(initiator.env.recv_statuses().len(), 1);
}

#[test]
fn receives_of_an_idle_queue_pair_wait_for_the_next_connection() {
    let (mut initiator, _) = pair();
    initiator.qp.disconnect();
    initiator
        .qp
        .on_tcp_closed(&mut initiator.env, CloseReason::Closed);
    initiator.env.post_recv(5, &[]);
    initiator.qp.flush_queues(&mut initiator.env);
    assert_eq!(initiator.qp.state(), RdmapState::Idle);
    assert!(initiator.env.recv_statuses().is_empty());
    assert_eq!(initiator.env.rq.len(), 1);
}

#[test]
fn receives_are_flushed_after_the_last_connection() {
    for is_late in [false, true] {
        let (mut initiator, _) = pair();
        if !is_late {
            initiator.qp.end_in_error(&mut initiator.env);
            assert_eq!(initiator.qp.state(), RdmapState::Rts);
        }
        initiator.qp.disconnect();
        initiator
            .qp
            .on_tcp_closed(&mut initiator.env, CloseReason::Closed);
        if is_late {
            assert_eq!(initiator.qp.state(), RdmapState::Idle);
            initiator.qp.end_in_error(&mut initiator.env);
        }
        assert_eq!(initiator.qp.state(), RdmapState::Error);
        assert!(initiator.env.events.is_empty());
        initiator.env.post_recv(5, &[]);
        initiator.qp.flush_queues(&mut initiator.env);
        assert_eq!(initiator.env.recv_statuses(), [(5, WcStatus::WR_FLUSH_ERR)]);
    }
}

#[test]
fn a_paired_queue_pair_fails_with_its_next_send_alone() {
    for reason in [
        CloseReason::Closed,
        CloseReason::Reset,
        CloseReason::TimedOut,
    ] {
        let mut initiator = End::paired(negotiated(true));
        initiator.env.post_recv(7, &[]);
        initiator
            .env
            .post(&wr(Opcode::Send, 1, SendData::Inline(b"x")));
        initiator.pull_all();
        initiator.ack_all();
        initiator.qp.on_peer_fin(&mut initiator.env, 0);
        initiator.qp.on_tcp_closed(&mut initiator.env, reason);
        assert_eq!(initiator.env.statuses(), [(1, WcStatus::SUCCESS)]);
        assert_eq!(initiator.env.recv_statuses(), []);
        assert!(initiator.env.events.is_empty());
        initiator.qp.flush_queues(&mut initiator.env);
        assert_eq!(initiator.qp.state(), RdmapState::Idle);
        for number in [2, 3] {
            initiator
                .env
                .post(&wr(Opcode::Send, number, SendData::Inline(b"x")));
        }
        initiator.qp.flush_queues(&mut initiator.env);
        assert_eq!(
            initiator.env.statuses()[1..],
            [(2, WcStatus::RETRY_EXC_ERR), (3, WcStatus::WR_FLUSH_ERR)]
        );
        assert_eq!(initiator.env.recv_statuses(), [(7, WcStatus::WR_FLUSH_ERR)]);
        assert_eq!(initiator.qp.state(), RdmapState::Error);
    }
}

#[test]
fn a_paired_queue_pair_keeps_what_is_unacknowledged_until_it_is_flushed() {
    let mut initiator = End::paired(negotiated(true));
    for number in [1, 2] {
        initiator
            .env
            .post(&wr(Opcode::Send, number, SendData::Inline(b"x")));
    }
    initiator.pull_all();
    initiator
        .qp
        .on_tcp_closed(&mut initiator.env, CloseReason::Reset);
    assert_eq!(initiator.env.statuses(), []);
    assert!(initiator.qp.has_outstanding_sends());
    assert_eq!(initiator.qp.state(), RdmapState::Idle);
    initiator.qp.flush_queues(&mut initiator.env);
    assert_eq!(
        initiator.env.statuses(),
        [(1, WcStatus::RETRY_EXC_ERR), (2, WcStatus::WR_FLUSH_ERR)]
    );
    assert!(initiator.env.events.is_empty());
    assert_eq!(initiator.qp.state(), RdmapState::Error);
}

#[test]
fn a_peer_that_stops_answering_fails_the_first_request() {
    let mut initiator = loaded();
    initiator.pull_all();
    initiator
        .qp
        .on_tcp_closed(&mut initiator.env, CloseReason::TimedOut);
    let flushed = [2, 3, 4].map(|number| (number, WcStatus::WR_FLUSH_ERR));
    assert_eq!(initiator.env.statuses()[0], (1, WcStatus::RETRY_EXC_ERR));
    assert_eq!(initiator.env.statuses()[1..], flushed);
}
