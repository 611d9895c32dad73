//! Memory windows and fast registrations, tested by a scripted peer: a key bound to one stream is
//! refused on others, the peer cannot invalidate a shared key, and nothing is placed after a key
//! was invalidated, even in the middle of a message.

use crate::bench::{Responder, quoting};
use crate::common::net::lacks_network;
use crate::common::peer::{ReadRequest, send, untagged, write};
use crate::common::*;
use crate::skip_if;
use siw::{
    Access, AsyncEventKind, Mr, Mw, MwBind, Qp, SendWr, WcOpcode, WcStatus, WindowType, WrFlags,
};

const BINDABLE: Access = Access(31);

/// Binds a window and waits for the completion.
fn bind(e: &End, qp: &Qp, mw: &Mw, to: &MwBind) -> u32 {
    let key = mw.post_bind(qp, 7, WrFlags::SIGNALED, to).unwrap();
    let wc = e.wc();
    assert_eq!(
        (wc.status, wc.opcode),
        (WcStatus::SUCCESS, WcOpcode::BIND_MW)
    );
    key
}

fn contents(mr: &Mr, at: usize, len: usize) -> Vec<u8> {
    let mut v = vec![0; len];
    mr.read(at, &mut v).unwrap();
    v
}

#[test]
fn c44_a_window_of_another_stream_is_answered_by_terminate_1_1_02() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let (end, mut own) = b.second();
    let mr = b.app.pd.alloc_mr(4096, BINDABLE).unwrap();
    let mw = b.app.pd.alloc_mw(WindowType::Two).unwrap();
    let all = Access::REMOTE_READ | Access::REMOTE_WRITE;
    let key = bind(&end, &end.qp, &mw, &mr.window(0..64, all).unwrap());
    let f = write(true, key, mr.addr(), b"not yours");
    b.refuses(&f, [0x11, 0x02]);
    assert_eq!(contents(&mr, 0, 9), [0; 9]);
    // The stream to which it is bound may write through it.
    own.send(&f);
    own.send(&send(true, 1, 0, b""));
    assert_eq!(own.rest(), quoting([0x12, 0x02], &send(true, 1, 0, b"")));
    assert_eq!(contents(&mr, 0, 9), b"not yours");
}

#[test]
fn c69_a_read_through_a_window_of_another_stream_is_answered_by_terminate_0_1_03() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let (end, _own) = b.second();
    let mr = b.app.pd.alloc_mr(4096, BINDABLE).unwrap();
    let mw = b.app.pd.alloc_mw(WindowType::Two).unwrap();
    let to = mr.window(0..64, Access::REMOTE_READ).unwrap();
    let key = bind(&end, &end.qp, &mw, &to);
    let r = ReadRequest {
        sink_stag: 1,
        sink_to: 0,
        size: 8,
        src_stag: key,
        src_to: mr.addr(),
    };
    b.refuses(&r.message(1), [0x01, 0x03]);
}

#[test]
fn c45_c46_a_window_ends_at_its_own_bytes_and_not_at_its_regions() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let (end, _own) = b.second();
    let mr = b.app.pd.alloc_mr(4096, BINDABLE).unwrap();
    let one = b.app.pd.alloc_mw(WindowType::One).unwrap();
    let to = mr.window(100..110, Access::REMOTE_WRITE).unwrap();
    let key = bind(&end, &end.qp, &one, &to);
    for (at, n) in [(99, 2), (105, 6), (110, 1), (0, 1)] {
        let f = write(true, key, mr.addr() + at, &vec![9; n]);
        b.refuses(&f, [0x11, 0x01]);
        b.app.qp.reset().unwrap();
    }
    assert_eq!(contents(&mr, 0, 4096), vec![0; 4096]);
    // The key permits remote writes only: a Read is refused.
    let r = ReadRequest {
        sink_stag: 1,
        sink_to: 0,
        size: 8,
        src_stag: key,
        src_to: to.addr,
    };
    b.refuses(&r.message(1), [0x01, 0x02]);
}

#[test]
fn c77_neither_a_shared_window_nor_a_region_with_windows_is_the_peers_to_invalidate() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let (end, _own) = b.second();
    let mr = b.app.pd.alloc_mr(4096, BINDABLE).unwrap();
    let one = b.app.pd.alloc_mw(WindowType::One).unwrap();
    let to = mr.window(0..64, Access::REMOTE_READ).unwrap();
    let key = bind(&end, &end.qp, &one, &to);
    for stag in [key, mr.rkey()] {
        let mut peer = b.stream();
        b.recv(98, 0, 64);
        b.recv(99, 0, 64);
        let f = untagged([0x41, 0x44], stag, 0, 1, 0, b"");
        peer.send(&f);
        assert_eq!(peer.rest(), quoting([0x02, 0x09], &f));
        let wc = b.app.wc();
        assert_eq!((wc.wr_id, wc.status), (98, WcStatus::REM_INV_REQ_ERR));
        b.app.ctx.get_async_event(Some(PATIENCE)).unwrap();
        b.disconnected();
        b.app.wc();
        b.app.qp.reset().unwrap();
    }
}

#[test]
fn c42_a_window_that_goes_within_a_message_takes_the_rest_of_it_along() {
    skip_if!(lacks_network());
    let b = Responder::new();
    for how in 0..3 {
        let mut peer = b.stream();
        b.begin(&mut peer);
        b.recv(98, 0, 16);
        b.recv(99, 0, 16);
        let mr = b.app.pd.alloc_mr(4096, BINDABLE).unwrap();
        let kind = [WindowType::Two, WindowType::One, WindowType::Two][how];
        let mw = b.app.pd.alloc_mw(kind).unwrap();
        let to = mr.window(0..64, Access::REMOTE_WRITE).unwrap();
        let key = bind(&b.app, &b.app.qp, &mw, &to);
        peer.send(&write(false, key, mr.addr(), b"first half"));
        peer.send(&send(true, 1, 0, b""));
        assert_eq!(b.app.wc().wr_id, 98);
        match how {
            0 => {
                b.app.qp.post_send(&[SendWr::local_inv(1, key)]).unwrap();
                assert_eq!(b.app.wc().opcode, WcOpcode::LOCAL_INV);
            }
            // The same bytes under another key.
            1 => {
                bind(&b.app, &b.app.qp, &mw, &to);
            }
            _ => {
                drop(mw);
                b.app.ctx.await_releases().unwrap();
            }
        }
        let f = write(true, key, mr.addr() + 10, b"second half");
        peer.send(&f);
        assert_eq!(peer.rest(), quoting([0x11, 0x00], &f));
        drop(peer);
        b.broken(AsyncEventKind::QpAccessErr);
        assert_eq!(contents(&mr, 0, 21), b"first half\0\0\0\0\0\0\0\0\0\0\0");
        b.app.qp.reset().unwrap();
    }
}

#[test]
fn c42_a_fast_key_that_is_invalidated_within_a_message_takes_the_rest_of_it_along() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    b.begin(&mut peer);
    b.recv(98, 0, 16);
    b.recv(99, 0, 16);
    let arena = siw::Arena::alloc(&b.app.ctx, 8192, false).unwrap();
    let mut fast = b.app.pd.alloc_fast_mr(&arena, 2).unwrap();
    fast.map_ranges(&[0..4096, 4096..5000], 12).unwrap();
    let key = siw::inc_rkey(fast.key());
    let wr = fast.register_request(1, key, 0x5000, ALL).unwrap();
    b.app.qp.post_send(&[wr]).unwrap();
    assert_eq!(b.app.wc().status, WcStatus::SUCCESS);
    peer.send(&write(false, key, 0x5000, b"first half"));
    peer.send(&send(true, 1, 0, b""));
    assert_eq!(b.app.wc().wr_id, 98);
    b.app.qp.post_send(&[SendWr::local_inv(1, key)]).unwrap();
    assert_eq!(b.app.wc().opcode, WcOpcode::LOCAL_INV);
    let f = write(true, key, 0x500a, b"second half");
    peer.send(&f);
    assert_eq!(peer.rest(), quoting([0x11, 0x00], &f));
    drop(peer);
    b.broken(AsyncEventKind::QpAccessErr);
    let mut now = [0; 21];
    arena.read(0, &mut now).unwrap();
    assert_eq!(&now, b"first half\0\0\0\0\0\0\0\0\0\0\0");
}
