//! A peer that stops reading: it keeps the queue pair or any other resource of siwd for a bounded
//! time, and a close leaves it the data that its TCP has acknowledged.

use crate::bench::Responder;
use crate::common::net::lacks_network;
use crate::common::peer::{Peer, write};
use crate::skip_if;
use siw::{SendData, SendWr, WcStatus};
use std::io::Read;
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

/// A pause in which a peer does not read. A close that takes longer than two seconds was once reset.
const PAUSE: Duration = Duration::from_millis(2500);

/// RFC 9293 section 3.6: the peer's program reads at its own pace after our FIN, which its TCP
/// acknowledged (FIN-WAIT-2).
#[test]
fn a_slow_reader_gets_acknowledged_data_after_a_disconnect() {
    skip_if!(lacks_network());
    for destroys in [false, true] {
        let bench = Responder::new();
        let (end, mut peer) = bench.second();
        let part = [bench.app.mr.sge(0, 32_768)];
        let wr = SendWr::write(1, SendData::Sges(&part), 0x1000, 1);
        end.qp.post_send(&[wr]).unwrap();
        assert_eq!(end.wc().status, WcStatus::SUCCESS, "the peer's TCP has it");
        end.qp.disconnect().unwrap();
        if destroys {
            drop(end);
        }
        std::thread::sleep(PAUSE);
        let reset = peer.0.take_error().unwrap();
        assert!(reset.is_none(), "{reset:?}, destroyed: {destroys}");
        let mut stream = Vec::new();
        peer.0.read_to_end(&mut stream).unwrap();
        assert!(stream.len() > 32_768, "{}", stream.len());
    }
}

/// The deadline of a close moves with each acknowledgement.
#[test]
fn a_slow_reader_gets_the_message_under_way_at_a_disconnect() {
    skip_if!(lacks_network());
    let bench = Responder::new();
    let small = "4096 8192 8192";
    bench
        .ns
        .run(|| std::fs::write("/proc/sys/net/ipv4/tcp_rmem", small))
        .unwrap();
    let mut peer = bench.stream_of(&bench.app);
    let whole = [bench.app.mr.sge(0, 65_536)];
    let wr = SendWr::write(1, SendData::Sges(&whole), 0x1000, 1);
    bench.app.qp.post_send(&[wr]).unwrap();
    let mut first = [0; 4096];
    peer.0.read_exact(&mut first).unwrap();
    bench.app.qp.disconnect().unwrap();
    let (mut len, mut part) = (first.len(), [0; 2048]);
    loop {
        if len > 58_000 {
            std::thread::sleep(PAUSE);
        }
        match peer.0.read(&mut part).unwrap() {
            0 => break,
            count => len += count,
        }
    }
    assert!(len > 65_536, "{len}");
    drop(peer);
    bench.disconnected();
    assert_eq!(bench.app.wc().status, WcStatus::SUCCESS);
}
