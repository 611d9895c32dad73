//! Streaming mode (RFC 5044 section 7.1.3): TCP bytes first, then MPA on the same connection, with Linux as
//! the peer.

use std::io::{ErrorKind, Read, Write};
use std::time::Duration;

use crate::bench::{CONFIG, Initiator, Responder, impatient};
use crate::common::net::lacks_network;
use crate::common::peer::{C, Peer, S, reply, request, send};
use crate::common::*;
use crate::skip_if;
use nix::libc;
use siw::{
    CmEvent, CmListener, ConnectOptions, Error, ListenOptions, SendData, SendWr, StreamOptions,
    StreamingConnection, WcStatus,
};

/// Octets of the streaming mode before MPA.
const LOGIN: &[u8] = b"login: 4 keys";

/// Replaces the listener of a responder by one whose connections begin in streaming mode.
fn streaming(mut b: Responder, options: ListenOptions) -> Responder {
    let options = ListenOptions {
        streaming: true,
        ..options
    };
    let at = "10.77.0.1:0".parse().unwrap();
    b.listener = CmListener::new_with_options(&b.app.cm, at, &options).unwrap();
    b
}

fn accepted(b: &Responder) -> (Peer, StreamingConnection) {
    let peer = b.peer();
    let stream = b.app.cm.accept_stream(Some(PATIENCE)).unwrap();
    (peer, stream)
}

fn take(stream: &mut StreamingConnection, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    stream.receive_exact(&mut bytes, Some(PATIENCE)).unwrap();
    bytes
}

fn errno<T: std::fmt::Debug>(result: Result<T, Error>) -> i32 {
    result.unwrap_err().errno()
}

/// Accepts the MPA request of a connection of the peer, and exchanges a message in each direction.
fn finish_as_responder(b: &Responder, peer: &mut Peer, stream: StreamingConnection) {
    stream.start_responder(&b.app.cm, 7).unwrap();
    let info = b.accept(b"ready");
    assert_eq!((&info.private_data[..], info.cookie), (&b"hello"[..], 7));
    let (_, _, data) = peer.take_mpa(b"MPA ID Rep Frame");
    assert_eq!(data, b"ready");
    b.established();
    b.recv(1, 0, 64);
    peer.send(&send(true, 1, 0, b"in FPDUs"));
    let wc = b.app.wc();
    assert_eq!((wc.status, wc.byte_len), (WcStatus::SUCCESS, 8));
    assert_eq!(b.app.read(0, 8), b"in FPDUs");
    let sge = [b.app.mr.sge(0, 8)];
    let wr = [SendWr::send(2, SendData::Sges(&sge))];
    b.app.qp.post_send(&wr).unwrap();
    assert_eq!(&peer.take_fpdu()[18..], b"in FPDUs");
    assert_eq!(b.app.wc().status, WcStatus::SUCCESS);
}

#[test]
fn an_mpa_request_behind_the_last_streaming_octet_is_not_read_as_streaming_bytes() {
    skip_if!(lacks_network());
    let b = streaming(Responder::new(), ListenOptions::default());
    let (mut peer, mut stream) = accepted(&b);
    assert_eq!(stream.local_addr(), Some(b.listener.local_addr()));
    stream.send_all(b"target ready", Some(PATIENCE)).unwrap();
    assert_eq!(peer.take(12), b"target ready");
    peer.send(&[LOGIN, &request(C, 1, b"hello")].concat());
    assert_eq!(take(&mut stream, LOGIN.len()), LOGIN);
    finish_as_responder(&b, &mut peer, stream);
}

#[test]
fn the_stream_is_the_same_wherever_the_segments_divide_it() {
    skip_if!(lacks_network());
    let b = streaming(Responder::new(), ListenOptions::default());
    let octets = [LOGIN, &request(C, 1, b"hello")].concat();
    for at in 1..octets.len() {
        let (mut peer, mut stream) = accepted(&b);
        peer.send(&octets[..at]);
        let early = LOGIN.len().min(at);
        assert_eq!(take(&mut stream, early), LOGIN[..early], "at {at}");
        peer.send(&octets[at..]);
        assert_eq!(take(&mut stream, LOGIN.len() - early), LOGIN[early..]);
        stream.start_responder(&b.app.cm, at as u64).unwrap();
        let CmEvent::ConnectRequest(wanted) = b.event() else {
            panic!("at {at}: no request");
        };
        let info = wanted.connection_info();
        assert_eq!(
            (&info.private_data[..], info.cookie),
            (&b"hello"[..], at as u64)
        );
        wanted.reject(b"next").unwrap();
        let (_, _, data) = peer.take_mpa(b"MPA ID Rep Frame");
        assert_eq!(data, b"next");
    }
    let (mut peer, mut stream) = accepted(&b);
    peer.send_bytewise(&octets);
    assert_eq!(take(&mut stream, LOGIN.len()), LOGIN);
    finish_as_responder(&b, &mut peer, stream);
}

#[test]
fn an_end_that_connects_turns_to_the_initiator_behind_its_last_octet() {
    skip_if!(lacks_network());
    let a = Initiator::new();
    let options = StreamOptions::default();
    let mut stream = StreamingConnection::open(&a.app.ctx, a.to, &options).unwrap();
    let mut peer = Peer::accept(&a.listener);
    assert_eq!(stream.local_addr(), peer.0.peer_addr().ok());
    peer.send(b"your turn");
    assert_eq!(take(&mut stream, 9), b"your turn");
    stream.send_all(LOGIN, Some(PATIENCE)).unwrap();
    let options = ConnectOptions {
        private_data: b"hello",
        cookie: 3,
        ..Default::default()
    };
    stream
        .start_initiator(&a.app.qp, &a.app.cm, &options)
        .unwrap();
    assert_eq!(peer.take(LOGIN.len()), LOGIN);
    let (flags, revision, data) = peer.take_mpa(b"MPA ID Req Frame");
    assert_eq!((revision, &data[4..]), (2, &b"hello"[..]));
    peer.send(&reply(flags & (S | C), 2, &[0, 4, 0, 4]));
    let info = a.established();
    assert_eq!((info.cookie, info.local), (3, peer.0.peer_addr().ok()));
    let sge = [a.app.mr.sge(0, 4)];
    let wr = [SendWr::send(2, SendData::Sges(&sge))];
    a.app.qp.post_send(&wr).unwrap();
    assert_eq!(peer.take_fpdu()[..2], [0x41, 0x43]);
    assert_eq!(a.app.wc().status, WcStatus::SUCCESS);
}

#[test]
fn either_end_may_be_the_initiator() {
    skip_if!(lacks_network());
    // siwd connects and is the responder.
    let a = Initiator::new();
    let options = StreamOptions::default();
    let stream = StreamingConnection::open(&a.app.ctx, a.to, &options).unwrap();
    let mut peer = Peer::accept(&a.listener);
    peer.send(&request(C, 1, b"back"));
    let wanted = stream.await_request(Some(PATIENCE)).unwrap();
    assert_eq!(wanted.connection_info().private_data, b"back");
    let options = ConnectOptions::default();
    wanted.accept(&a.app.qp, Some(&a.app.cm), &options).unwrap();
    peer.take_mpa(b"MPA ID Rep Frame");
    a.established();
    // siwd is connected to and is the initiator.
    let b = streaming(Responder::new(), ListenOptions::default());
    let (mut peer, stream) = accepted(&b);
    stream
        .start_initiator(&b.app.qp, &b.app.cm, &options)
        .unwrap();
    let (flags, _, _) = peer.take_mpa(b"MPA ID Req Frame");
    peer.send(&reply(flags & (S | C), 2, &[0, 4, 0, 4]));
    b.established();
}

#[test]
fn a_window_of_zero_stops_the_sender_and_loses_nothing() {
    skip_if!(lacks_network());
    let b = streaming(Responder::new(), ListenOptions::default());
    let (mut peer, mut stream) = accepted(&b);
    // From the peer, which fills the windows while the application does not read.
    let sent = pattern(5, 64 << 20);
    peer.0
        .set_write_timeout(Some(Duration::from_millis(300)))
        .unwrap();
    let mut taken = 0;
    loop {
        match peer.0.write(&sent[taken..]) {
            Ok(count) => taken += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => panic!("after {taken} bytes: {error}"),
        }
    }
    assert!(taken < sent.len(), "the window stayed open");
    assert!(take(&mut stream, taken) == sent[..taken]);
    // To the peer, which does not read.
    let mut taken = 0;
    loop {
        // The windows are in use when nothing is taken for a while.
        match stream.send_all(&sent[taken..taken + 1024], Some(Duration::from_millis(300))) {
            Ok(()) => taken += 1024,
            Err(Error::Timeout) => break,
            Err(error) => panic!("after {taken} bytes: {error}"),
        }
    }
    let mut received = vec![0; taken];
    peer.0.read_exact(&mut received).unwrap();
    assert!(received == sent[..taken]);
    // Part of the last piece may have been taken.
    let mut rest = vec![0; 1024];
    peer.0
        .set_read_timeout(Some(Duration::from_millis(300)))
        .unwrap();
    let count = match peer.0.read(&mut rest) {
        Ok(count) => count,
        Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
        Err(error) => panic!("{error}"),
    };
    assert!(rest[..count] == sent[taken..taken + count]);
    peer.0.set_read_timeout(Some(PATIENCE)).unwrap();
    peer.send(&request(C, 1, b"hello"));
    finish_as_responder(&b, &mut peer, stream);
}

#[test]
fn a_close_in_streaming_mode_ends_each_direction_by_itself() {
    skip_if!(lacks_network());
    let b = streaming(Responder::new(), ListenOptions::default());
    let (mut peer, mut stream) = accepted(&b);
    peer.send(b"last");
    peer.fin();
    assert_eq!(take(&mut stream, 4), b"last");
    let mut byte = [0];
    assert_eq!(stream.receive(&mut byte, Some(PATIENCE)).unwrap(), 0);
    stream.send_all(b"answer", Some(PATIENCE)).unwrap();
    stream.close_sending().unwrap();
    assert_eq!(errno(stream.try_send(b"more")), libc::EPIPE);
    assert_eq!(peer.rest(), b"answer");
    let failed = stream.start_responder(&b.app.cm, 0).unwrap_err();
    assert_eq!(failed.error.errno(), libc::EPIPE);
    assert_eq!(failed.object.connection_info().errno, 0);
    // Dropped, it is closed in order.
    let (mut peer, mut stream) = accepted(&b);
    stream.send_all(b"bye", Some(PATIENCE)).unwrap();
    drop(stream);
    assert_eq!(peer.rest(), b"bye");
    // Reset, by either end.
    let (mut peer, stream) = accepted(&b);
    stream.reset().unwrap();
    let error = peer.0.read(&mut byte).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    let (peer, mut stream) = accepted(&b);
    assert_eq!(stream.try_receive(&mut byte).unwrap(), None);
    peer.reset();
    let reset = errno(stream.receive(&mut byte, Some(PATIENCE)));
    assert_eq!(reset, libc::ECONNRESET);
    assert_eq!(errno(stream.try_receive(&mut byte)), libc::ENOTCONN);
    assert_eq!(errno(stream.try_send(b"x")), libc::ENOTCONN);
}

#[test]
fn a_peer_that_sends_no_mpa_request_is_given_up() {
    skip_if!(lacks_network());
    let b = streaming(Responder::with(&impatient()), ListenOptions::default());
    let heard = |stream: StreamingConnection| {
        stream.start_responder(&b.app.cm, 9).unwrap();
        match b.event() {
            CmEvent::ConnectError(info) | CmEvent::Unreachable(info) => (info.cookie, info.errno),
            other => panic!("{other:?}"),
        }
    };
    let (mut peer, stream) = accepted(&b);
    assert_eq!(heard(stream), (9, libc::ETIMEDOUT), "a silent peer");
    peer.rest();
    // FPDUs, or a frame of the wrong kind, before the request.
    let (mut peer, stream) = accepted(&b);
    peer.send(&send(true, 1, 0, b"too early"));
    assert_eq!(heard(stream), (9, libc::EPROTO));
    peer.rest();
    let (mut peer, stream) = accepted(&b);
    peer.send(&reply(C, 1, b""));
    assert_eq!(heard(stream), (9, libc::EPROTO));
    let (mut peer, stream) = accepted(&b);
    peer.send(&[request(C, 1, b"hello"), send(true, 1, 0, b"")].concat());
    assert_eq!(heard(stream), (9, libc::EPROTO));
    // Its end, before the request and within it.
    for part in [0, 13] {
        let (mut peer, stream) = accepted(&b);
        peer.send(&request(C, 1, b"hello")[..part]);
        peer.fin();
        assert_eq!(heard(stream), (9, libc::ECONNRESET), "after {part} octets");
    }
    // An initiator whose peer goes on with streaming bytes.
    let (mut peer, stream) = accepted(&b);
    let options = ConnectOptions::default();
    stream
        .start_initiator(&b.app.qp, &b.app.cm, &options)
        .unwrap();
    peer.take_mpa(b"MPA ID Req Frame");
    peer.send(b"more of the login, which is over");
    match b.event() {
        CmEvent::ConnectError(info) => assert_eq!(info.errno, libc::EPROTO),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_connection_without_bytes_is_reset_after_its_time() {
    skip_if!(lacks_network());
    let options = ListenOptions {
        accept_timeout: Some(Duration::from_millis(400)),
        ..Default::default()
    };
    let b = streaming(Responder::with(CONFIG), options);
    let (mut peer, mut stream) = accepted(&b);
    let mut byte = [0];
    let timed_out = errno(stream.receive(&mut byte, Some(PATIENCE)));
    assert_eq!(timed_out, libc::ETIMEDOUT);
    let error = peer.0.read(&mut byte).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

#[test]
fn a_connection_that_nobody_accepts_fails_with_its_reason() {
    skip_if!(lacks_network());
    let Initiator {
        app,
        listener,
        to,
        ns: _ns,
        _siwd,
    } = Initiator::new();
    drop(listener);
    let options = StreamOptions::default();
    let refused = StreamingConnection::open(&app.ctx, to, &options);
    assert_eq!(errno(refused), libc::ECONNREFUSED);
    let nobody = "10.77.0.9:7".parse().unwrap();
    let options = StreamOptions {
        timeout: Some(Duration::from_millis(200)),
        ..options
    };
    let failed = errno(StreamingConnection::open(&app.ctx, nobody, &options));
    assert!(
        [libc::ETIMEDOUT, libc::EHOSTUNREACH].contains(&failed),
        "{failed}"
    );
    let elsewhere = "203.0.113.7:7".parse().unwrap();
    let failed = errno(StreamingConnection::open(&app.ctx, elsewhere, &options));
    assert_eq!(failed, libc::EHOSTUNREACH);
}
