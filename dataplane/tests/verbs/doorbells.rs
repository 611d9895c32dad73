//! Doorbell rings: their size, and the wait for a free slot.

use siw::{SendData, SendWr, WcStatus};
use siw_shm::control::ControlSocket;
use siw_shm::control::messages as m;

use crate::common::*;

/// Bytes of memory charged to each client, siwd's own included.
fn charged_memory(daemon: &Daemon) -> Vec<u64> {
    let statistics = daemon.context().read_stats().unwrap();
    let statistics: serde_json::Value = serde_json::from_str(&statistics).unwrap();
    let clients = statistics["clients"].as_array().unwrap().iter();
    // The heap is a part of it.
    clients
        .map(|client| client["memory_bytes"].as_u64().unwrap())
        .collect()
}

#[test]
fn a_client_without_objects_is_charged_at_most_128_kib() {
    let daemon = Daemon::loopback();
    let charged = charged_memory(&daemon);
    println!("a client without objects: {charged:?} bytes");
    assert!(charged[0] <= 128 << 10, "{charged:?}");
}

#[test]
fn a_library_that_does_not_wait_for_slots_gets_a_ring_that_is_never_full() {
    let daemon = Daemon::loopback();
    let hello = |features: u32| {
        let conn = ControlSocket::connect_to(&daemon.socket).unwrap();
        let hello = m::ClientHello {
            features,
            ..m::ClientHello::new("old")
        };
        let (reply, _fds) = conn.call_and_wait(1, &hello, &[]).unwrap();
        reply
    };
    let old = hello(m::FEATURES & !m::FEATURE_DOORBELL_WAIT);
    assert!(old.doorbell_capacity >= 2 * old.limits.max_qp);
    let new = hello(m::FEATURES);
    assert_eq!(new.doorbell_capacity, 4096);
}

/// While siwd stands still, its client posts to more queue pairs than its doorbell ring has slots. A ring
/// of the smallest size is made with a low limit, which is then raised.
#[test]
fn posts_to_more_queue_pairs_than_doorbell_slots_wait_for_siwd_and_all_complete() {
    const SLOTS: usize = 64;
    let limits = "[limits]\nqueue_pairs_per_client = 8\n";
    let daemon = Daemon::start(&format!("{LOOPBACK}{limits}"), &[]);
    let context = daemon.context();
    context
        .set_limit("queue_pairs_per_client", "default")
        .unwrap();
    let first = End::new(&context, 4096);
    let other = End::new(&daemon.context(), 4096);
    let mut pairs = Vec::new();
    for _ in 0..3 * SLOTS {
        let (a, b) = (first.another(), other.another());
        connect(&a, &b, "siw0", "10.77.0.2:0".parse().unwrap());
        pairs.push((a, b));
    }
    let paused = daemon.pause();
    let posted = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let (pairs, posted) = (&pairs, &posted);
        let poster = scope.spawn(move || {
            for (a, b) in pairs {
                let sge = [a.mr.sge(0, 64)];
                let write = SendWr::write(7, SendData::Sges(&sge), b.mr.addr(), b.mr.rkey());
                a.qp.post_send(&[write]).unwrap();
                posted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            }
        });
        let count = || posted.load(std::sync::atomic::Ordering::Relaxed);
        let start = std::time::Instant::now();
        while count() < SLOTS {
            assert!(start.elapsed() < PATIENCE, "{} posts", count());
            std::thread::yield_now();
        }
        drop(paused);
        poster.join().unwrap();
    });
    for (a, _) in &pairs {
        let done = a.wc();
        assert_eq!((done.wr_id, done.status), (7, WcStatus::SUCCESS));
    }
}
