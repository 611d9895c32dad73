//! A peer that stops reading: data still due to it does not keep the queue pair or any other
//! resource of siwd for ever.

use crate::bench::Responder;
use crate::common::net::lacks_network;
use crate::common::peer::{Peer, write};
use crate::skip_if;
use siw::{SendData, SendWr, WcStatus};
use std::time::Duration;

/// Number of work requests, which together far exceed any window.
const WRITES: u64 = 60;

/// A stream whose peer has stopped reading and whose window is closed by RDMA Writes.
fn stream_with_closed_window(bench: &Responder) -> Peer {
    let peer = bench.stream_of(&bench.app);
    let whole = [bench.app.mr.sge(0, 65_536)];
    for id in 0..WRITES {
        let wr = SendWr::write(id, SendData::Sges(&whole), 0x1000, 1);
        bench.app.qp.post_send(&[wr]).unwrap();
    }
    // Time in which the peer's kernel fills its buffers.
    std::thread::sleep(Duration::from_millis(500));
    peer
}

/// Checks that the connection was given up: the application gets the disconnect, and its work
/// requests are flushed.
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
    // No region has this STag: siwd has to send a Terminate.
    peer.send(&write(true, 0x0bad_5100, 0, b"x"));
    expect_given_up(&bench);
}

#[test]
fn a_message_without_window_is_given_up_after_disconnect() {
    skip_if!(lacks_network());
    let bench = Responder::new();
    let _peer = stream_with_closed_window(&bench);
    // The Write in progress is completed first (RFC 5040 section 6.2), if the peer opens its
    // window.
    bench.app.qp.disconnect().unwrap();
    expect_given_up(&bench);
}
