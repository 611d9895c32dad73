//! Endings: everything that was posted completes exactly once, in order, whatever ends the stream.
mod common;
use common::*;
use siw_iwarp::*;
use siw_memory::Stag;
use siw_shm::wqe::SendData;
use siw_shm::{Access, Opcode, WcStatus};

fn loaded() -> End {
    let mut a = End::new(negotiated(true));
    a.env.track = true;
    let (k, _) = a.env.mr(0, 1 << 16, REMOTE);
    a.env
        .post(&remote(Opcode::Write, 1, &[sge(0, 100, k)], 0, Stag(1)));
    a.env
        .post(&remote(Opcode::Read, 2, &[sge(0, 100, k)], 0, Stag(1)));
    a.env
        .post(&remote(Opcode::Write, 3, &[sge(0, 60000, k)], 0, Stag(1)));
    a.env.post(&wr(Opcode::Send, 4, SendData::Inline(b"x")));
    a.env.post_recv(11, &[sge(0, 100, k)]);
    a.env.post_recv(12, &[]);
    a
}

fn ids(v: &[(u64, WcStatus)]) -> Vec<u64> {
    v.iter().map(|s| s.0).collect()
}

#[test]
fn a_reset_flushes_everything_once_and_in_order() {
    for pulled in 0..10 {
        for acked in 0..=pulled {
            let mut a = loaded();
            for _ in 0..pulled {
                a.pull().expect("there is more");
            }
            for _ in 0..acked {
                let r = a.unacked.pop_front().expect("pulled");
                a.qp.on_record_acked(&mut a.env, &r);
            }
            a.give(&send(1, 0, false, &[1; 10])[..pulled * 4]);
            a.qp.on_tcp_closed(&mut a.env, CloseReason::Reset);
            a.qp.on_tcp_closed(&mut a.env, CloseReason::Reset);
            a.qp.flush_queues(&mut a.env);
            assert_eq!(ids(&a.env.statuses()), [1, 2, 3, 4]);
            assert_eq!(ids(&a.env.recv_statuses()), [11, 12]);
            let ok = a
                .env
                .statuses()
                .iter()
                .filter(|s| s.1 == WcStatus::SUCCESS)
                .count();
            assert_eq!(ok, usize::from(acked > 0), "pulled {pulled} acked {acked}");
            assert_eq!(a.qp.state(), RdmapState::Error);
            assert_eq!(a.qp.requested_close(), None);
            a.qp.poll_releases(&mut a.env);
            assert!(a.env.live.is_empty(), "no tracker leaks");
            assert!(a.pull().is_none());
        }
    }
}

#[test]
fn an_answered_read_in_front_succeeds_in_the_flush() {
    let mut a = End::new(negotiated(true));
    let (k, _) = a.env.mr(0, 4096, REMOTE);
    for i in 0..3 {
        a.env
            .post(&remote(Opcode::Read, i, &[sge(0, 8, k)], 0, Stag(1)));
    }
    a.pull_all();
    a.give(&read_response(true, k.0, 0, &[1; 8]));
    a.ack_all();
    a.qp.on_tcp_closed(&mut a.env, CloseReason::Reset);
    assert_eq!(
        a.env.statuses(),
        [
            (0, WcStatus::SUCCESS),
            (1, WcStatus::WR_FLUSH_ERR),
            (2, WcStatus::WR_FLUSH_ERR)
        ]
    );
}

#[test]
fn work_posted_in_error_is_flushed_on_the_next_doorbell() {
    let mut a = loaded();
    a.qp.modify_to_error(&mut a.env);
    assert_eq!(a.qp.requested_close(), Some(CloseKind::Abort));
    assert_eq!(ids(&a.env.statuses()), [1, 2, 3, 4]);
    a.env.post(&wr(Opcode::Send, 5, SendData::Inline(b"x")));
    a.env.post_recv(13, &[]);
    a.qp.flush_queues(&mut a.env);
    assert_eq!(ids(&a.env.statuses()), [1, 2, 3, 4, 5]);
    assert_eq!(ids(&a.env.recv_statuses()), [11, 12, 13]);
    a.qp.on_tcp_closed(&mut a.env, CloseReason::Closed);
    assert_eq!(a.qp.requested_close(), None);
    assert_eq!(a.env.statuses().len(), 5);
}

#[test]
fn a_disconnect_with_an_empty_send_queue_goes_to_idle() {
    let (mut a, mut b) = pair();
    let (k, _) = b.env.mr(0, 64, REMOTE);
    a.env.post(&siw_shm::wqe::SendWr {
        rkey: k.0,
        ..wr(Opcode::Write, 1, SendData::Inline(b"x"))
    });
    a.env.post_recv(7, &[]);
    run(&mut a, &mut b);
    a.qp.disconnect();
    assert_eq!(a.qp.state(), RdmapState::Closing);
    assert_eq!(a.qp.requested_close(), Some(CloseKind::Graceful));
    b.qp.on_peer_fin(&mut b.env, b.rx.available());
    assert_eq!(b.qp.requested_close(), Some(CloseKind::Graceful));
    a.qp.on_peer_fin(&mut a.env, 0);
    for e in [&mut a, &mut b] {
        e.qp.on_tcp_closed(&mut e.env, CloseReason::Closed);
        assert_eq!(e.qp.state(), RdmapState::Idle);
        assert!(e.env.events.is_empty());
    }
    assert_eq!(a.env.recv_statuses(), [(7, WcStatus::WR_FLUSH_ERR)]);
    // And may be used again.
    a.qp.set_rts(negotiated(true), EMSS);
    assert_eq!(a.qp.state(), RdmapState::Rts);
}

#[test]
fn a_disconnect_ends_the_message_under_way_and_flushes_the_rest() {
    let mut a = loaded();
    for _ in 0..4 {
        a.pull().expect("up to the middle of the long Write");
    }
    a.qp.disconnect();
    assert_eq!(a.qp.requested_close(), None, "the message ends first");
    let n = a.pull_all().len();
    assert!(n > 50000);
    assert_eq!(a.qp.requested_close(), Some(CloseKind::Graceful));
    a.ack_all();
    a.qp.on_tcp_closed(&mut a.env, CloseReason::Closed);
    assert_eq!(a.qp.state(), RdmapState::Error);
    assert_eq!(
        a.env.statuses(),
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
fn c36_a_fin_inside_of_an_fpdu_or_message_is_a_lost_stream() {
    let mut a = loaded();
    let f = write(1, 0, &[1; 8]);
    a.give(&f[..10]);
    a.qp.on_peer_fin(&mut a.env, a.rx.available());
    assert_eq!(a.qp.state(), RdmapState::Error);
    assert_eq!(a.qp.found_error(), Some(TerminateCode::MPA_TCP_LOST));
    assert_eq!(a.qp.requested_close(), Some(CloseKind::Abort));
    assert_eq!(ids(&a.env.statuses()), [1, 2, 3, 4]);
    assert!(a.pull().is_none(), "told locally only");

    let mut a = loaded();
    a.give(&send(1, 0, false, &[1; 8]));
    a.qp.on_peer_fin(&mut a.env, 0);
    assert_eq!(a.qp.state(), RdmapState::Error);
    assert_eq!(
        a.env.recv_statuses(),
        [(11, WcStatus::WR_FLUSH_ERR), (12, WcStatus::WR_FLUSH_ERR)]
    );
}

#[test]
fn a_key_that_goes_in_mid_message_aborts_the_stream() {
    let mut a = End::new(negotiated(true));
    let (k, _) = a.env.mr(0, 1 << 16, Access::NONE);
    a.env
        .post(&remote(Opcode::Write, 1, &[sge(0, 60000, k)], 0, Stag(1)));
    a.env.post(&wr(Opcode::Send, 2, SendData::Inline(b"x")));
    a.pull().expect("first");
    a.env.table.remove(k).expect("known");
    let rec = a.qp.next_record(&mut a.env, 9000).expect("second").record;
    let mut f = Frame::default();
    let e =
        a.qp.build_fpdu(&a.env.keys, &rec, &mut f)
            .expect_err("no key");
    assert_eq!(e, BuildError::KeyDeregistered);
    a.qp.on_build_failure(&mut a.env, &rec, e);
    assert_eq!(a.qp.requested_close(), Some(CloseKind::Abort));
    assert_eq!(
        a.env.statuses(),
        [(1, WcStatus::LOC_PROT_ERR), (2, WcStatus::WR_FLUSH_ERR)]
    );
}

#[test]
fn buffers_that_the_port_holds_outlive_the_flush_but_not_for_ever() {
    let mut a = loaded();
    a.env.held = true;
    a.pull_all();
    a.qp.on_tcp_closed(&mut a.env, CloseReason::Reset);
    assert_eq!(a.env.statuses().len(), 4);
    assert!(!a.env.live.is_empty());
    assert!(a.qp.poll_releases(&mut a.env));
    a.env.held = false;
    assert!(!a.qp.poll_releases(&mut a.env));
    assert!(a.env.live.is_empty());
}

#[test]
fn an_error_after_our_fin_aborts_instead_of_terminating() {
    let mut a = End::new(negotiated(true));
    a.qp.disconnect();
    a.give(&write(0xdead_be00, 0, &[1]));
    assert_eq!(a.qp.state(), RdmapState::Error);
    assert!(a.pull().is_none());
    assert_eq!(a.qp.requested_close(), Some(CloseKind::Abort));
}
