//! A client that writes garbage into its own queues: the client and its streams end, and no others.

use crate::common::raw_client::RawClient;
use crate::common::*;
use siw::{CmEvent, SendData, SendWr};

#[test]
fn impossible_ring_indices_close_that_client_and_no_other() {
    let d = Daemon::loopback();
    let (a, b) = pair(&d, 4096);
    let end = End::new(&d.context(), 4096);
    let h = RawClient::connected(&d, &end, false);
    h.ring(0x8000_0000);
    // The daemon has closed the connection.
    assert!(h.conn.recv_packet().is_err());
    assert!(matches!(
        end.cm.get_event(Some(PATIENCE)).unwrap(),
        CmEvent::Established(_)
    ));
    assert!(matches!(
        end.cm.get_event(Some(PATIENCE)).unwrap(),
        CmEvent::Disconnected(_)
    ));
    ping(&a, &b);
}

#[test]
fn garbage_work_requests_end_their_queue_pair_and_nothing_else() {
    let d = Daemon::loopback();
    let (a, b) = pair(&d, 4096);
    for seed in 1..20 {
        let end = End::new(&d.context(), 4096);
        let h = RawClient::connected(&d, &end, false);
        let at = h.qp.mem.offset as usize + siw_shm::work_queue::HEADER;
        let mut slots = pattern(seed, 64 * 8);
        if seed % 2 == 0 {
            // A valid opcode and slot count before garbage addresses and keys.
            slots[..4].copy_from_slice(&[1, 1, 1, 1]);
        }
        h.queues.write(at, &slots).unwrap();
        h.ring(8);
        // Its peer gets the disconnect, whatever the garbage was.
        loop {
            match end.cm.get_event(Some(PATIENCE)).unwrap() {
                CmEvent::Disconnected(_) => break,
                CmEvent::Established(_) => {}
                other => panic!("{other:?}"),
            }
        }
    }
    ping(&a, &b);
}

#[test]
fn a_hostile_shared_receive_queue_ends_its_own_streams_only() {
    use std::sync::atomic::Ordering::SeqCst;
    let d = Daemon::loopback();
    let (a, b) = pair(&d, 4096);
    for seed in 1..20 {
        let end = End::new(&d.context(), 4096);
        let h = RawClient::connected(&d, &end, true);
        let at = h.srq.mem.offset as usize;
        let mut slots = pattern(seed, 64 * 16);
        if seed % 2 == 0 {
            // A receive of one element with garbage address and key.
            slots[..4].copy_from_slice(&[0x80, 0, 1, 1]);
        }
        let first = at + siw_shm::shared_receive_queue::HEADER;
        h.queues.write(first, &slots).unwrap();
        let tail = [1, 16, 17, u32::MAX][seed as usize % 4];
        h.queues.atomic_u32(at).unwrap().store(tail, SeqCst);
        end.qp
            .post_send(&[SendWr::send(1, SendData::Inline(b"x"))])
            .unwrap();
        loop {
            match end.cm.get_event(Some(PATIENCE)).unwrap() {
                CmEvent::Disconnected(_) => break,
                CmEvent::Established(_) => {}
                other => panic!("{other:?}"),
            }
        }
        // An impossible index makes the daemon close the client.
        if tail > 16 {
            assert!(h.conn.recv_packet().is_err());
        }
        ping(&a, &b);
    }
}
