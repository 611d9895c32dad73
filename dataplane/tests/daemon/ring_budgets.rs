//! A client that posts endlessly, or more than it may: each turn of the worker over its queues is
//! bounded, other clients get their turns, and the daemon's memory does not grow.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::common::raw_client::RawClient;
use crate::common::*;
use siw::{SendData, SendWr, Wc, WcStatus, WrFlags};
use siw_shm::control::QpState;
use siw_shm::control::messages as m;
use siw_shm::work_queue::{HEADER, OFF_HEAD, OFF_TAIL};
use siw_shm::{Access, BindMw, SqProducer};

/// Fills each slot of the send queue with a one-slot request.
fn fill_ring(client: &RawClient, request: &SendWr<'_>) {
    let (at, slots) = (client.send_queue(), client.qp.sq_slots);
    let mut ring = SqProducer::new(client.queues.clone(), at, slots, slots).unwrap();
    for _ in 0..slots {
        ring.push(request).unwrap();
    }
    assert_eq!(
        ring.push(request),
        Err(siw_shm::work_queue::PushError::Full)
    );
}

/// A flag that [`SetOnDrop`] sets, also when the test panics.
struct StopFlag(AtomicBool);

struct SetOnDrop<'a>(&'a StopFlag);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.0.store(true, Ordering::Relaxed);
    }
}

/// Keeps the ring full while `meanwhile` runs: refills it whenever the worker has taken a request.
fn keep_full(client: &RawClient, meanwhile: impl FnOnce()) {
    let stop = StopFlag(AtomicBool::new(false));
    let (at, slots) = (client.send_queue(), client.qp.sq_slots);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let tail = client.queues.atomic_u32(at + OFF_TAIL).unwrap();
            let head = client.queues.atomic_u32(at + OFF_HEAD).unwrap();
            while !stop.0.load(Ordering::Relaxed) {
                let full = head.load(Ordering::Acquire).wrapping_add(slots);
                tail.store(full, Ordering::Release);
            }
        });
        let _stop = SetOnDrop(&stop);
        client.ring(slots);
        meanwhile();
    });
}

/// Exchanges messages between two ends in both directions.
fn exchange(a: &End, b: &End, count: u64) {
    for number in 0..count {
        for (from, to) in [(a, b), (b, a)] {
            let write = SendWr::write(
                number,
                SendData::Inline(b"beside"),
                to.mr.addr(),
                to.mr.rkey(),
            );
            from.qp.post_send(&[write]).unwrap();
            let mut completion = [Wc::default()];
            assert_eq!(from.cq.poll_spin(&mut completion, PATIENCE).unwrap(), 1);
            assert_eq!(completion[0].status, WcStatus::SUCCESS);
        }
    }
}

#[test]
fn local_operations_without_end_leave_others_their_turns() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let end = End::new(&daemon.context(), 4096);
    let mut client = RawClient::connected(&daemon, &end, false);
    let window = m::AllocMw {
        pd: client.pd,
        kind: 1,
    };
    let (window, _) = client.call(&window);
    // Unbinds an unbound window: succeeds each time, and completes silently.
    let unbind = BindMw {
        rkey: window.rkey,
        new_rkey: window.rkey,
        lkey: 0,
        addr: 0,
        length: 0,
        access: Access::NONE,
    };
    fill_ring(&client, &SendWr::bind_mw(1, &unbind).with_flags(WrFlags(0)));
    let head = client.queues.atomic_u32(client.send_queue() + OFF_HEAD);
    let head = head.unwrap();
    let until = Instant::now() + PATIENCE;
    keep_full(&client, || {
        // Waits until the worker has taken far more than one ring of requests.
        while head.load(Ordering::Acquire) < 16 * client.qp.sq_slots {
            assert!(Instant::now() < until, "the worker takes no requests");
            // The worker may have found the ring empty once, and then does not poll it any more.
            client.ring_again();
            exchange(&a, &b, 20);
        }
    });
    assert_eq!(client.completions().poll(&mut [Wc::default(); 4]), 0);
    assert!(daemon.stop().success());
}

#[test]
fn flushing_without_end_leaves_others_their_turns() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let mut client = RawClient::detached(&daemon, false);
    fill_ring(&client, &SendWr::send(1, SendData::Inline(b"never")));
    let error = m::ModifyQp {
        qp_num: client.qp.qp_num,
        state: QpState::Error as u32,
        flags: 0,
        denied_access: 0,
    };
    // The ring is full before the queue pair, which was never connected, moves to ERROR, and
    // afterwards.
    client.ring(client.qp.sq_slots);
    client.call(&error);
    keep_full(&client, || {
        for _ in 0..10 {
            client.ring_again();
            exchange(&a, &b, 20);
        }
    });
    assert!(daemon.stop().success());
}

#[test]
fn a_malformed_request_completes_once_and_in_its_turn() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let end = End::new(&daemon.context(), 4096);
    let client = RawClient::connected(&daemon, &end, false);
    let (at, slots) = (client.send_queue(), client.qp.sq_slots);
    let mut ring = SqProducer::new(client.queues.clone(), at, slots, slots).unwrap();
    for number in 1..=3 {
        let nothing = SendWr::write(number, SendData::Sges(&[]), 0, 0);
        ring.push(&nothing.with_flags(WrFlags::SIGNALED)).unwrap();
    }
    // An invalid opcode, with the work request id for its completion.
    let mut slot = [0u8; 64];
    slot[0] = 0x6e;
    slot[3] = 1;
    slot[8..16].copy_from_slice(&4u64.to_ne_bytes());
    client.queues.write(at + HEADER + 3 * 64, &slot).unwrap();
    client.ring(4);
    let mut completions = client.completions();
    let mut polled = Vec::new();
    let until = Instant::now() + PATIENCE;
    while polled.len() < 4 {
        assert!(Instant::now() < until, "{polled:?}");
        let mut room = [Wc::default(); 8];
        let count = completions.poll(&mut room);
        polled.extend(room[..count].iter().map(|wc| (wc.wr_id, wc.status)));
    }
    let numbers: Vec<u64> = polled.iter().map(|(number, _)| *number).collect();
    assert_eq!(numbers, [1, 2, 3, 4], "{polled:?}");
    assert_eq!(polled[3].1, WcStatus::LOC_QP_OP_ERR);
    // Further doorbells do not make the worker read it again.
    for _ in 0..20 {
        client.ring(4);
        exchange(&a, &b, 2);
    }
    assert_eq!(completions.poll(&mut [Wc::default(); 8]), 0);
    assert!(daemon.stop().success());
}
