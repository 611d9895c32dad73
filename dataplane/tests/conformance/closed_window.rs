//! A peer that stops reading: what is still due to it does not keep the queue pair for ever, nor
//! anything else of siwd.

use crate::bench::Responder;
use crate::common::net::lacks_network;
use crate::common::peer::{Peer, write};
use crate::skip_if;
use siw::{SendData, SendWr, WcStatus};
use std::time::Duration;

/// Work requests that together are far longer than any window.
const WRITES: u64 = 60;

/// A stream whose peer reads nothing any more, with its window closed by RDMA Writes.
fn stream_with_closed_window(bench: &Responder) -> Peer {
    let peer = bench.stream_of(&bench.app);
    let whole = [bench.app.mr.sge(0, 65_536)];
    for id in 0..WRITES {
        let wr = SendWr::write(id, SendData::Sges(&whole), 0x1000, 1);
        bench.app.qp.post_send(&[wr]).unwrap();
    }
    // What the peer's kernel buffers is taken within this time.
    std::thread::sleep(Duration::from_millis(500));
    peer
}

/// The connection is given up: the application hears of it, and its work requests are flushed.
fn expect_given_up(bench: &Responder) {
    bench.disconnected();
    let statuses: Vec<_> = (0..WRITES).map(|_| bench.app.wc().status).collect();
    assert_eq!(statuses.last(), Some(&WcStatus::WR_FLUSH_ERR));
    bench.goes_on();
}

#[test]
fn a_terminate_without_window_is_given_up() {
    skip_if!(lacks_network());
    let bench = Responder::new();
    let mut peer = stream_with_closed_window(&bench);
    // No key is behind this STag: a Terminate is due.
    peer.send(&write(true, 0x0bad_5100, 0, b"x"));
    expect_given_up(&bench);
}

#[test]
fn a_message_without_window_is_given_up_after_disconnect() {
    skip_if!(lacks_network());
    let bench = Responder::new();
    let _peer = stream_with_closed_window(&bench);
    // The Write under way is sent to its end first (RFC 5040 section 6.2), if the peer lets it.
    bench.app.qp.disconnect().unwrap();
    expect_given_up(&bench);
}
