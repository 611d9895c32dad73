//! Waits for other workers end with the process that had them.

use crate::common::*;
use siw_memory::RegisteredMemory;
use siw_shm::wqe::{SendData, SendWr};
use siw_shm::{Access, BindMw, Opcode, WcFlags, WcStatus, WindowType};

#[test]
fn a_local_invalidation_completes_after_the_restart() {
    let mut initiator = End::new(negotiated(true));
    let (key, _) = initiator.env.mr(0, 4096, REMOTE);
    let _other = initiator.env.table.register_reader().expect("the second");
    initiator.env.post(&SendWr::local_inv(1, key.0));
    let behind = wr(Opcode::Send, 2, SendData::Inline(b"behind"));
    initiator.env.post(&behind);
    assert!(initiator.pull().is_none(), "the other worker uses the key");
    assert!(initiator.qp.poll_quiescence(&mut initiator.env));
    initiator.restart();
    assert!(!initiator.qp.poll_quiescence(&mut initiator.env));
    assert_eq!(initiator.env.statuses(), [(1, WcStatus::SUCCESS)]);
    assert!(initiator.pull().is_some(), "the Send");
}

#[test]
fn a_send_with_invalidate_is_delivered_after_the_restart() {
    let (mut initiator, mut responder) = pair();
    let (key, _) = responder.env.mr(0, 4096, REMOTE);
    let _other = responder.env.table.register_reader().expect("the second");
    responder.env.post_recv(7, &[]);
    initiator.env.post(&SendWr {
        imm: key.0,
        ..wr(Opcode::SendWithInv, 1, SendData::Inline(b""))
    });
    let bytes = initiator.pull_all();
    responder.give(&bytes);
    assert!(responder.qp.is_delivery_delayed());
    responder.restart();
    assert!(responder.qp.is_delivery_delayed());
    assert!(!responder.qp.poll_quiescence(&mut responder.env));
    let received = &responder.env.received[..];
    assert!(received.len() == 1 && received[0].wr_id == 7);
    assert!(received[0].flags.contains(WcFlags::WITH_INV) && received[0].imm == key.0);
}

#[test]
fn windows_of_a_stream_are_still_known_after_the_restart() {
    let mut initiator = End::new(negotiated(true));
    let (region, _) = initiator.env.mr(0, 4096, Access(31));
    let window = RegisteredMemory::new_window(PD, WindowType::Two);
    let window = initiator.env.table.insert(window).expect("room");
    initiator.env.post(&SendWr::bind_mw(
        1,
        &BindMw {
            rkey: window.0,
            new_rkey: window.0 ^ 1,
            lkey: region.0,
            addr: 0,
            length: 64,
            access: Access::REMOTE_WRITE,
        },
    ));
    assert!(initiator.pull().is_none());
    initiator.restart();
    assert_eq!(initiator.qp.take_bound_windows(), [window]);
}
