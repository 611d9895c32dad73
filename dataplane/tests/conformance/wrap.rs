//! Message numbers beyond 0xFFFFFFFF (RFC 5041 section 4.3): the streams begin near that number,
//! set by `first_msn` of the device, since a test cannot send 2^32 messages.

use crate::bench::{CONFIG, Responder, quoting};
use crate::common::net::lacks_network;
use crate::common::peer::{AtomicRequest, ReadRequest, send, untagged};
use crate::skip_if;
use siw::{Access, AsyncEventKind, SendData, SendWr, WcStatus};

/// The last number before the wrap and the two after it.
const NUMBERS: [u32; 3] = [u32::MAX, 0, 1];

#[test]
fn c57_after_the_last_message_number_comes_zero_in_every_queue() {
    skip_if!(lacks_network());
    let b = Responder::with(&format!("{CONFIG}first_msn = {}\n", u32::MAX));
    let mr = b.app.pd.alloc_mr(4096, Access(15)).unwrap();
    let mut peer = b.stream();
    (0..3).for_each(|i| b.recv(i, 0, 64));
    b.recv(99, 0, 64);

    // Queues 0 and 1 of the peer, and queue 3 with siwd's answers.
    for (i, msn) in (0..).zip(NUMBERS) {
        peer.send(&send(true, msn, 0, b"across"));
        let wc = b.app.wc();
        assert_eq!((wc.status, wc.wr_id), (WcStatus::SUCCESS, i));
    }
    let read = ReadRequest {
        sink_stag: 0x77,
        sink_to: 0,
        size: 8,
        src_stag: mr.rkey(),
        src_to: mr.addr(),
    };
    let add = AtomicRequest {
        id: 7,
        stag: mr.rkey(),
        to: mr.addr(),
        add_or_swap: 1,
        ..Default::default()
    };
    for (i, (msn, answer)) in [(u32::MAX, u32::MAX), (1, 0)].into_iter().enumerate() {
        peer.send(&add.message(msn));
        let u = peer.take_fpdu();
        assert_eq!(u[..2], [0x41, 0x4b]);
        assert_eq!(u[10..14], answer.to_be_bytes());
        assert_eq!(u[22..30], (i as u64).to_be_bytes());
        peer.send(&read.message(msn.wrapping_add(1)));
        assert_eq!(peer.take_fpdu()[..2], [0xc1, 0x42]);
    }

    // Queues 0 and 1 of siwd.
    let sge = [b.app.mr.sge(0, 4)];
    for msn in NUMBERS {
        b.app
            .qp
            .post_send(&[
                SendWr::send(5, SendData::Sges(&sge)),
                SendWr::read(6, &sge, 0x1000, 0x2000),
            ])
            .unwrap();
        for control in [[0x41, 0x43], [0x41, 0x41]] {
            let u = peer.take_fpdu();
            assert_eq!(
                (&u[..2], &u[10..14]),
                (&control[..], &msn.to_be_bytes()[..])
            );
        }
    }

    // A number from before the wrap is still refused as old.
    let f = untagged([0x41, 0x43], 0, 0, u32::MAX, 0, b"again");
    peer.send(&f);
    assert_eq!(peer.rest(), quoting([0x12, 0x03], &f));
    drop(peer);
    let e = b.app.ctx.get_async_event(Some(crate::common::PATIENCE));
    assert_eq!(e.unwrap().kind, Some(AsyncEventKind::QpReqErr));
}
