//! Send queues that the worker polls: their clients ring no doorbells.

use crate::common::{Daemon, End, LOOPBACK, pair};
use siw::*;

/// A worker that seldom sleeps. One that never sleeps would not share its core with other daemons.
fn spinning_daemon() -> Daemon {
    let adaptive = "idle = \"adaptive\"";
    let config = LOOPBACK.replace(adaptive, &format!("{adaptive}\nspin_us = 10000"));
    assert_ne!(config, LOOPBACK);
    Daemon::start(&config, &[])
}

/// Writes 64 bytes and waits for the completion.
fn write(from: &End, to: &End) {
    let sge = [from.mr.sge(0, 64)];
    let write = SendWr::write(1, SendData::Sges(&sge), to.mr.addr(), to.mr.rkey());
    from.qp.post_send(&[write]).unwrap();
    assert_eq!(from.wc().status, WcStatus::SUCCESS);
}

#[test]
fn a_busy_queue_needs_no_doorbells() {
    const ROUNDS: u64 = 100;
    if let Some(reason) = crate::common::two_cores() {
        println!("skipped: {reason}");
        return;
    }
    let daemon = spinning_daemon();
    let (a, b) = pair(&daemon, 4096);
    // Each write completes before the next is posted. A client that is descheduled meanwhile has to
    // ring: in at least one of many attempts most rounds need no doorbell.
    let needs_few = (0..200).any(|_| {
        let before = a.count_of_workers("doorbells");
        for _ in 0..ROUNDS {
            write(&a, &b);
        }
        a.count_of_workers("doorbells") - before < ROUNDS / 2
    });
    assert!(needs_few, "nearly each message needed a doorbell");
}

#[test]
fn more_queues_than_are_polled_lose_no_request() {
    for daemon in [Daemon::loopback(), spinning_daemon()] {
        let pairs: Vec<_> = (0..21).map(|_| pair(&daemon, 4096)).collect();
        for round in 0..100 {
            // Each pair is active in different rounds, so that queues become polled and then
            // unpolled again.
            let of_round = (0..).zip(&pairs);
            for (_, (a, b)) in of_round.filter(|(number, _)| round % (number + 1) == 0) {
                write(a, b);
            }
        }
    }
}

#[test]
fn receives_after_a_failure_of_a_polled_queue_are_flushed() {
    let daemon = spinning_daemon();
    for round in 0..50 {
        let (a, b) = pair(&daemon, 4096);
        write(&a, &b);
        write(&b, &a);
        a.qp.set_error().unwrap();
        for wr_id in [round, round + 1000] {
            let sges = &[a.mr.sge(0, 64)];
            a.qp.post_recv(&[RecvWr { wr_id, sges }]).unwrap();
            let flushed = a.wc();
            assert_eq!(
                (flushed.wr_id, flushed.status),
                (wr_id, WcStatus::WR_FLUSH_ERR)
            );
        }
        let sge = [a.mr.sge(0, 64)];
        let send = SendWr::send(7, SendData::Sges(&sge));
        a.qp.post_send(&[send]).unwrap();
        let flushed = a.wc();
        assert_eq!((flushed.wr_id, flushed.status), (7, WcStatus::WR_FLUSH_ERR));
    }
}
