//! The control protocol over real sockets, with garbage and foreign versions.

use bytemuck::Zeroable;
use proptest::prelude::*;
use rustix::fd::{AsFd, OwnedFd};
use siw_shm::control::codec::{self, encode_request};
use siw_shm::control::*;
use siw_shm::shared_memory::{PageSize, SharedMemory};

fn hello() -> ClientHello {
    ClientHello::new("test")
}

fn fd() -> OwnedFd {
    SharedMemory::create_memfd("fd", 1, PageSize::Normal)
        .unwrap()
        .memfd()
        .unwrap()
        .try_clone_to_owned()
        .unwrap()
}

#[test]
fn a_request_and_its_reply_cross_with_descriptors() {
    let (daemon, client) = ControlSocket::new_pair().unwrap();
    let t = std::thread::spawn(move || {
        client.call_and_wait(
            7,
            &AllocArena {
                len: 4096,
                huge: 0,
                reserved: 0,
            },
            &[],
        )
    });
    let p = loop {
        match daemon.recv_packet() {
            Ok(p) => break p,
            Err(RecvError::WouldBlock) => std::thread::yield_now(),
            Err(e) => panic!("{e}"),
        }
    };
    let (seq, req) = Request::decode(&p.bytes).unwrap();
    assert!(matches!(req, Request::AllocArena(a) if a.len == 4096));
    let r = ArenaReply {
        arena: 1,
        huge: 0,
        len: 4096,
    };
    daemon
        .send_reply::<AllocArena>(seq, &r, &[fd().as_fd()])
        .unwrap();
    let (got, fds) = t.join().unwrap().unwrap();
    assert_eq!((got, fds.len()), (r, 1));
}

#[test]
fn a_refusal_carries_errno_and_reason() {
    let (daemon, client) = ControlSocket::new_pair().unwrap();
    daemon
        .send_refusal(3, 1, 12, "too many protection domains")
        .unwrap();
    let e = client
        .call_and_wait(
            1,
            &AllocPd {
                device: 0,
                reserved: 0,
            },
            &[],
        )
        .unwrap_err();
    assert_eq!(e.to_errno(), 12);
    assert!(e.to_string().contains("too many protection domains"), "{e}");
}

#[test]
fn a_long_reason_is_cut_at_a_character() {
    let long = "ä".repeat(100);
    let p = codec::encode_error(3, 1, 22, &long);
    let e = codec::decode_reply::<AllocPd>(1, &p).unwrap_err();
    assert!(matches!(e, CallError::Refused { reason, .. } if reason == "ä".repeat(60)));
}

#[test]
fn another_version_is_refused_in_words_that_the_client_can_read() {
    let mut p = encode_request(5, &hello());
    p[4] = 99;
    let e = Request::decode(&p).unwrap_err();
    assert_eq!(e, ProtoError::Version { theirs: 99 });
    assert_eq!(codec::peek_header(&p), Some((1, 5)));
    let mut reply = codec::encode_error(1, 5, 93, &e.to_string());
    reply[4] = 98;
    let e = codec::decode_reply::<ClientHello>(5, &reply).unwrap_err();
    assert_eq!(e.to_errno(), 93);
    assert!(e.to_string().contains("protocol version 99"), "{e}");
    let mut ok = codec::encode_reply::<ClientHello>(5, &HelloReply::zeroed());
    ok[4] = 98;
    let e = codec::decode_reply::<ClientHello>(5, &ok).unwrap_err();
    assert!(e.to_string().contains("98"), "{e}");
}

#[test]
fn both_sides_meet_at_the_highest_version_that_both_speak() {
    let of = |version: u32, min_version: u32| {
        ClientHello {
            version,
            min_version,
            ..hello()
        }
        .common_version()
    };
    let (lowest, highest) = (u32::from(MIN_VERSION), u32::from(VERSION));
    assert_eq!(of(highest, lowest), Some(VERSION));
    assert_eq!(of(highest + 7, lowest), Some(VERSION));
    assert_eq!(of(highest + 7, highest), Some(VERSION));
    assert_eq!(of(highest + 7, highest + 1), None);
    assert_eq!(of(lowest, 0), Some(MIN_VERSION));
    assert_eq!(of(lowest, lowest - 1), Some(MIN_VERSION));
    assert_eq!(of(lowest - 1, 0), None);
    // A newer library that names one version, and nonsense.
    assert_eq!(of(highest + 1, 0), None);
    assert_eq!(of(lowest, highest), None);
    assert_eq!(of(u32::MAX, u32::MAX), None);
    assert_eq!(of(0, 0), None);
}

/// A packet with a body that was made longer, or shorter.
fn with_body(len: usize, tail: u8) -> Vec<u8> {
    let mut packet = encode_request(5, &hello());
    packet.resize(24 + len, tail);
    let total = packet.len() as u32;
    packet[8..12].copy_from_slice(&total.to_le_bytes());
    packet
}

#[test]
fn a_shorter_request_of_an_older_library_ends_in_zeros() {
    let oldest = <ClientHello as Message>::MIN_LEN;
    let (seq, request) = Request::decode(&with_body(oldest, 0)).unwrap();
    let Request::ClientHello(old) = request else {
        panic!("{request:?}");
    };
    assert_eq!((seq, old.min_version, old.features), (5, 0, 0));
    assert_eq!(old.name.to_text(), "test");
    let e = Request::decode(&with_body(oldest - 1, 0)).unwrap_err();
    assert!(matches!(e, ProtoError::Size { .. }), "{e}");
}

#[test]
fn a_longer_request_of_a_newer_library_is_taken_when_it_adds_nothing() {
    let longer = size_of::<ClientHello>() + 16;
    assert!(Request::decode(&with_body(longer, 0)).is_ok());
    let e = Request::decode(&with_body(longer, 1)).unwrap_err();
    assert_eq!(e, ProtoError::Unknown { kind: 1 });
}

#[test]
fn what_a_newer_daemon_adds_to_replies_and_events_is_cut_off() {
    let mut reply = codec::encode_reply::<AllocPd>(4, &IdReply { id: 7, reserved: 0 });
    let mut event = encode_event(
        KIND_ASYNC_EVENT,
        &AsyncEventMessage::new(AsyncEventKind::QpFatal, 3, "why"),
    );
    for packet in [&mut reply, &mut event] {
        packet.extend([9; 8]);
        let len = packet.len() as u32;
        packet[8..12].copy_from_slice(&len.to_le_bytes());
        codec::stamp_version(packet, MIN_VERSION);
    }
    assert_eq!(codec::decode_reply::<AllocPd>(4, &reply).unwrap().id, 7);
    let event: AsyncEventMessage = decode_event(KIND_ASYNC_EVENT, &event).unwrap();
    assert_eq!(event.object, 3);
}

#[test]
fn a_reply_to_something_else_is_not_taken() {
    let p = codec::encode_reply::<AllocPd>(4, &IdReply { id: 1, reserved: 0 });
    let bad =
        |r: Result<IdReply, CallError>| matches!(r, Err(CallError::Proto(ProtoError::OutOfOrder)));
    assert!(bad(codec::decode_reply::<AllocPd>(5, &p)));
    assert!(bad(codec::decode_reply::<CreateChannel>(4, &p)));
    assert!(codec::decode_reply::<AllocPd>(4, &p).is_ok());
}

#[test]
fn a_closed_peer_is_an_error_and_not_a_hang() {
    let (daemon, client) = ControlSocket::new_pair().unwrap();
    drop(daemon);
    assert!(matches!(
        client.call_and_wait(1, &hello(), &[]),
        Err(CallError::Closed)
    ));
    let (daemon, client) = ControlSocket::new_pair().unwrap();
    drop(client);
    assert!(matches!(daemon.recv_packet(), Err(RecvError::Closed)));
}

#[test]
fn no_descriptor_leaks_from_packets_nobody_wants() {
    let (daemon, client) = ControlSocket::new_pair().unwrap();
    let probe = fd();
    let (r, w) = rustix::pipe::pipe().unwrap();
    for _ in 0..3 {
        client
            .send_packet(b"garbage", &[w.as_fd(), w.as_fd()])
            .unwrap();
        let p = daemon.recv_packet().unwrap();
        assert_eq!(p.fds.len(), 2);
        assert!(Request::decode(&p.bytes).is_err());
    }
    // Oversized packets cannot be sent by us; a foreign sender's is cut and refused,
    // descriptors included.
    let big = vec![0u8; MAX_PACKET + 1];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut anc = rustix::net::SendAncillaryBuffer::new(&mut space);
    let one = [w.as_fd()];
    anc.push(rustix::net::SendAncillaryMessage::ScmRights(&one));
    rustix::net::sendmsg(
        &client,
        &[std::io::IoSlice::new(&big)],
        &mut anc,
        rustix::net::SendFlags::empty(),
    )
    .unwrap();
    assert!(matches!(daemon.recv_packet(), Err(RecvError::Truncated)));
    assert!(client.send_packet(&big, &[]).is_err());
    drop(w);
    // End of file: every copy of the write end is closed.
    rustix::io::ioctl_fionbio(&r, true).unwrap();
    assert_eq!(rustix::io::read(&r, &mut [0u8; 1]), Ok(0));
    drop(probe);
}

#[test]
fn events_cross_and_foreign_kinds_are_refused() {
    let e = CmEventMessage {
        cookie: 42,
        ..CmEventMessage::new(CmEventKind::Established)
    };
    let p = encode_event(KIND_CM_EVENT, &e);
    assert_eq!(decode_event::<CmEventMessage>(KIND_CM_EVENT, &p), Ok(e));
    assert_eq!(
        decode_event::<AsyncEventMessage>(KIND_ASYNC_EVENT, &p),
        Err(ProtoError::Kind(KIND_CM_EVENT))
    );
    let a = AsyncEventMessage::new(AsyncEventKind::QpFatal, 3, "why");
    assert_eq!(a.reason.to_text(), "why");
    assert_eq!(
        AsyncEventKind::from_u32(a.kind),
        Some(AsyncEventKind::QpFatal)
    );
}

#[test]
fn addresses_survive_both_ways() {
    for s in ["10.0.0.1:7174", "[fe80::1]:80", "0.0.0.0:0"] {
        let a: std::net::SocketAddr = s.parse().unwrap();
        assert_eq!(Addr::from(a).to_socket_addr(), Some(a));
    }
    assert_eq!(Addr::NONE.to_socket_addr(), None);
    assert!(PrivateData::new(&[0; 512]).is_some());
    assert!(PrivateData::new(&[0; 513]).is_none());
    let lying = PrivateData {
        len: u32::MAX,
        data: [1; 512],
    };
    assert_eq!(lying.as_bytes().len(), 512);
}

proptest! {
    #[test]
    fn garbage_packets_are_refused_without_panic(
        bytes in proptest::collection::vec(any::<u8>(), 0..700),
        kind in 0u16..120, keep_header in any::<bool>(),
    ) {
        let mut p = bytes;
        if keep_header && p.len() >= 24 {
            let len = p.len() as u32;
            p[..4].copy_from_slice(&MAGIC.to_le_bytes());
            p[4..6].copy_from_slice(&VERSION.to_le_bytes());
            p[6..8].copy_from_slice(&kind.to_le_bytes());
            p[8..12].copy_from_slice(&len.to_le_bytes());
        }
        let _ = Request::decode(&p);
        let _ = codec::decode_reply::<ClientHello>(0, &p);
        let _ = codec::decode_reply::<AllocPd>(0, &p);
        let _ = decode_event::<CmEventMessage>(KIND_CM_EVENT, &p);
        let _ = codec::peek_header(&p);
    }
}
