//! Streaming mode between two ends of one daemon: both MPA roles on either side, limits, and clients that
//! leave.

use crate::common::*;
use nix::libc;
use siw::{
    CmChannel, CmEvent, CmListener, ConnectOptions, Error, ListenOptions, RecvWr, SendData, SendWr,
    StreamOptions, StreamingConnection, WcStatus,
};
use siw_shm::control::messages as m;
use siw_shm::control::{CallError, ControlSocket};

const LIMITED: &str = "[limits]\npending_connections_per_user = 2\n";

fn listen(end: &End) -> CmListener {
    let options = ListenOptions {
        streaming: true,
        ..ListenOptions::default()
    };
    let at = "10.77.0.2:0".parse().unwrap();
    CmListener::new_with_options(&end.cm, at, &options).unwrap()
}

fn open(end: &End, listener: &CmListener) -> Result<StreamingConnection, Error> {
    StreamingConnection::open(&end.ctx, listener.local_addr(), &StreamOptions::default())
}

fn established(channel: &CmChannel) {
    match channel.get_event(Some(PATIENCE)).unwrap() {
        CmEvent::Established(_) => {}
        other => panic!("{other:?}"),
    }
}

/// Sends one message over RDMA.
fn transfer(from: &End, to: &End) {
    let (there, here) = ([to.mr.sge(0, 64)], [from.mr.sge(64, 5)]);
    let receive = RecvWr {
        wr_id: 1,
        sges: &there,
    };
    to.qp.post_recv(&[receive]).unwrap();
    from.mr.write(64, b"bytes").unwrap();
    let wr = [SendWr::send(2, SendData::Sges(&here))];
    from.qp.post_send(&wr).unwrap();
    assert_eq!(from.wc().status, WcStatus::SUCCESS);
    let wc = to.wc();
    assert_eq!((wc.status, wc.byte_len), (WcStatus::SUCCESS, 5));
    assert_eq!(to.read(0, 5), b"bytes");
}

#[test]
fn two_ends_log_in_and_turn_to_rdma_in_either_role() {
    let daemon = Daemon::loopback();
    for opener_initiates in [true, false] {
        let a = End::new(&daemon.context(), 4096);
        let b = End::new(&daemon.context(), 4096);
        let listener = listen(&b);
        let mut near = open(&a, &listener).unwrap();
        let mut far = b.cm.accept_stream(Some(PATIENCE)).unwrap();
        // A connection outlives its listener.
        drop(listener);
        assert_eq!(near.peer_addr(), far.local_addr());
        let login = pattern(3, 100_000);
        std::thread::scope(|scope| {
            scope.spawn(|| near.send_all(&login, Some(PATIENCE)).unwrap());
            let mut received = vec![0; login.len()];
            far.receive_exact(&mut received, Some(PATIENCE)).unwrap();
            assert!(received == login);
        });
        let ends = [(&a, near), (&b, far)];
        let [(first, initiator), (second, responder)] = match (opener_initiates, ends) {
            (true, ends) => ends,
            (false, [near, far]) => [far, near],
        };
        let options = ConnectOptions {
            private_data: b"hello",
            ..ConnectOptions::default()
        };
        initiator
            .start_initiator(&first.qp, &first.cm, &options)
            .unwrap();
        let wanted = responder.await_request(Some(PATIENCE)).unwrap();
        assert_eq!(wanted.connection_info().private_data, b"hello");
        wanted
            .accept(&second.qp, Some(&second.cm), &ConnectOptions::default())
            .unwrap();
        established(&first.cm);
        established(&second.cm);
        transfer(first, second);
        transfer(second, first);
    }
}

#[test]
fn a_user_has_a_limited_number_of_connections_in_streaming_mode() {
    let daemon = Daemon::start(&format!("{LOOPBACK}{LIMITED}"), &[]);
    let a = End::new(&daemon.context(), 4096);
    let b = End::new(&daemon.context(), 4096);
    let listener = listen(&b);
    // Both ends of a connection are in the limit.
    let near = open(&a, &listener).unwrap();
    let far = b.cm.accept_stream(Some(PATIENCE)).unwrap();
    let refused = open(&a, &listener).unwrap_err();
    assert_eq!(refused.errno(), libc::ENOBUFS, "{refused}");
    near.reset().unwrap();
    far.reset().unwrap();
    let mut near = open(&a, &listener).unwrap();
    let mut far = b.cm.accept_stream(Some(PATIENCE)).unwrap();
    near.send_all(b"x", Some(PATIENCE)).unwrap();
    let mut byte = [0];
    far.receive_exact(&mut byte, Some(PATIENCE)).unwrap();
    assert_eq!(&byte, b"x");
}

#[test]
fn the_connections_of_a_client_that_leaves_are_reset() {
    let daemon = Daemon::loopback();
    let b = End::new(&daemon.context(), 4096);
    let listener = listen(&b);
    // A client that is killed closes nothing before its connection to the daemon.
    let conn = ControlSocket::connect_to(&daemon.socket).unwrap();
    conn.set_call_timeout(PATIENCE).unwrap();
    let hello = m::ClientHello::new("leaves");
    conn.call_and_wait(1, &hello, &[]).unwrap();
    let channel = m::CreateCmChannel { flags: 0 };
    let (channel, events) = conn.call_and_wait(2, &channel, &[]).unwrap();
    let opened = m::OpenStream {
        device: m::ANY_DEVICE,
        cm_channel: channel.id,
        timeout_ms: 0,
        idle_timeout_ms: 0,
        cookie: 5,
        dst: listener.local_addr().into(),
        src: m::Addr::NONE,
    };
    let (opened, _) = conn.call_and_wait(3, &opened, &[]).unwrap();
    let mut far = b.cm.accept_stream(Some(PATIENCE)).unwrap();
    let mut byte = [0];
    assert_eq!(far.try_receive(&mut byte).unwrap(), None);
    // Calls that make no sense are refused in words.
    let refused = |seq, request: m::ReceiveStream| {
        let error = conn.call_and_wait(seq, &request, &[]).unwrap_err();
        match error {
            CallError::Refused { errno, .. } => errno,
            other => panic!("{other}"),
        }
    };
    let (stream, len) = (opened.id, m::STREAM_BYTES as u32);
    let too_long = m::ReceiveStream {
        stream,
        len: len + 1,
    };
    assert_eq!(refused(4, too_long), libc::EINVAL);
    assert_eq!(
        refused(5, m::ReceiveStream { stream, len: 0 }),
        libc::EINVAL
    );
    let other = m::ReceiveStream {
        stream: stream + 9,
        len,
    };
    assert_eq!(refused(6, other), libc::ENOTCONN);
    drop((events, conn));
    let ended = far.receive(&mut byte, Some(PATIENCE)).unwrap_err();
    assert_eq!(ended.errno(), libc::ECONNRESET, "{ended}");
}

#[test]
fn a_connection_that_has_turned_is_no_stream_any_more() {
    let daemon = Daemon::loopback();
    let a = End::new(&daemon.context(), 4096);
    let b = End::new(&daemon.context(), 4096);
    let other = End::new(&daemon.context(), 4096);
    let listener = listen(&b);
    let near = open(&a, &listener).unwrap();
    let far = b.cm.accept_stream(Some(PATIENCE)).unwrap();
    // A queue pair of another context is refused, and the connection comes back.
    let failed = near
        .start_initiator(&other.qp, &a.cm, &ConnectOptions::default())
        .unwrap_err();
    assert!(matches!(failed.error, Error::OtherContext(_)));
    let mut near = failed.object;
    near.send_all(b"still here", Some(PATIENCE)).unwrap();
    // Bytes that were not read are no MPA request.
    far.start_responder(&b.cm, 0).unwrap();
    match b.cm.get_event(Some(PATIENCE)).unwrap() {
        CmEvent::ConnectError(info) => assert_eq!(info.errno, libc::EPROTO, "{info:?}"),
        other => panic!("{other:?}"),
    }
    let mut byte = [0];
    // The peer closes.
    let ended = near.receive(&mut byte, Some(PATIENCE));
    assert!(
        matches!(ended, Ok(0) | Err(Error::Refused { .. })),
        "{ended:?}"
    );
}
