//! The control protocol over real sockets, with garbage and foreign versions.

use bytemuck::Zeroable;
use proptest::prelude::*;
use rustix::fd::{AsFd, OwnedFd};
use siw_shm::control::codec::{self, encode_request};
use siw_shm::control::*;
use siw_shm::shared_memory::{PageSize, SharedMemory};

fn new_hello() -> ClientHello {
    ClientHello::new("test")
}

fn new_descriptor() -> OwnedFd {
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
    let caller = std::thread::spawn(move || {
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
    let packet = loop {
        match daemon.recv_packet() {
            Ok(packet) => break packet,
            Err(RecvError::WouldBlock) => std::thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    };
    let (seq, request) = Request::decode(&packet.bytes).unwrap();
    assert!(matches!(request, Request::AllocArena(arena) if arena.len == 4096));
    let reply = ArenaReply {
        arena: 1,
        huge: 0,
        len: 4096,
    };
    daemon
        .send_reply::<AllocArena>(seq, &reply, &[new_descriptor().as_fd()])
        .unwrap();
    let (got, fds) = caller.join().unwrap().unwrap();
    assert_eq!((got, fds.len()), (reply, 1));
}

#[test]
fn a_refusal_carries_errno_and_reason() {
    let (daemon, client) = ControlSocket::new_pair().unwrap();
    daemon
        .send_refusal(3, 1, 12, "too many protection domains")
        .unwrap();
    let error = client
        .call_and_wait(
            1,
            &AllocPd {
                device: 0,
                reserved: 0,
            },
            &[],
        )
        .unwrap_err();
    assert_eq!(error.to_errno(), 12);
    assert!(
        error.to_string().contains("too many protection domains"),
        "{error}"
    );
}

#[test]
fn a_long_reason_is_cut_at_a_character() {
    let long = "ä".repeat(100);
    let packet = codec::encode_error(3, 1, 22, &long);
    let error = codec::decode_reply::<AllocPd>(1, &packet).unwrap_err();
    assert!(matches!(error, CallError::Refused { reason, .. } if reason == "ä".repeat(60)));
}

#[test]
fn another_version_is_refused_in_words_that_the_client_can_read() {
    let mut packet = encode_request(5, &new_hello());
    packet[4] = 99;
    let error = Request::decode(&packet).unwrap_err();
    assert_eq!(error, ProtoError::Version { theirs: 99 });
    assert_eq!(codec::peek_header(&packet), Some((1, 5)));
    let mut reply = codec::encode_error(1, 5, 93, &error.to_string());
    reply[4] = 98;
    let error = codec::decode_reply::<ClientHello>(5, &reply).unwrap_err();
    assert_eq!(error.to_errno(), 93);
    assert!(error.to_string().contains("protocol version 99"), "{error}");
    let mut ok = codec::encode_reply::<ClientHello>(5, &HelloReply::zeroed());
    ok[4] = 98;
    let error = codec::decode_reply::<ClientHello>(5, &ok).unwrap_err();
    assert!(error.to_string().contains("98"), "{error}");
}

#[test]
fn both_sides_meet_at_the_highest_version_that_both_speak() {
    let of = |version: u32, min_version: u32| {
        ClientHello {
            version,
            min_version,
            ..new_hello()
        }
        .common_version()
    };
    let (lowest, highest) = (u32::from(MIN_VERSION), u32::from(VERSION));
    assert_eq!(of(highest, lowest), Some(VERSION));
    assert_eq!(of(highest + 7, lowest), Some(VERSION));
    assert_eq!(of(highest + 7, highest), Some(VERSION));
    assert_eq!(of(highest + 7, highest + 1), None);
    assert_eq!(of(lowest, lowest - 1), Some(MIN_VERSION));
    assert_eq!(of(lowest - 1, lowest - 2), None);
    // Invalid ranges.
    assert_eq!(of(lowest, highest + 1), None);
    assert_eq!(of(u32::MAX, u32::MAX), None);
    assert_eq!(of(0, 0), None);
}

/// A packet whose body is extended or truncated to `len` bytes.
fn with_body(len: usize, tail: u8) -> Vec<u8> {
    let mut packet = encode_request(5, &new_hello());
    packet.resize(24 + len, tail);
    let total = packet.len() as u32;
    packet[8..12].copy_from_slice(&total.to_le_bytes());
    packet
}

#[test]
fn a_shorter_request_is_refused() {
    let len = size_of::<ClientHello>();
    assert!(Request::decode(&with_body(len, 0)).is_ok());
    let error = Request::decode(&with_body(len - 1, 0)).unwrap_err();
    assert!(matches!(error, ProtoError::Size { .. }), "{error}");
}

#[test]
fn a_longer_request_of_a_newer_library_is_taken_when_it_adds_nothing() {
    let longer = size_of::<ClientHello>() + 16;
    assert!(Request::decode(&with_body(longer, 0)).is_ok());
    let error = Request::decode(&with_body(longer, 1)).unwrap_err();
    assert_eq!(error, ProtoError::Unknown { kind: 1 });
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
    let packet = codec::encode_reply::<AllocPd>(4, &IdReply { id: 1, reserved: 0 });
    let bad = |reply: Result<IdReply, CallError>| {
        matches!(reply, Err(CallError::Proto(ProtoError::OutOfOrder)))
    };
    assert!(bad(codec::decode_reply::<AllocPd>(5, &packet)));
    assert!(bad(codec::decode_reply::<CreateChannel>(4, &packet)));
    assert!(codec::decode_reply::<AllocPd>(4, &packet).is_ok());
}

#[test]
fn a_reply_longer_than_any_message_is_named_so() {
    let (daemon, client) = ControlSocket::new_pair().unwrap();
    let long = vec![0; MAX_PACKET + 1];
    rustix::net::send(daemon.as_fd(), &long, rustix::net::SendFlags::empty()).unwrap();
    let called = client.call_and_wait(1, &new_hello(), &[]);
    assert!(
        matches!(called, Err(CallError::Proto(ProtoError::TooLong))),
        "{called:?}"
    );
}

#[test]
fn a_closed_peer_is_an_error_and_not_a_hang() {
    let (daemon, client) = ControlSocket::new_pair().unwrap();
    drop(daemon);
    assert!(matches!(
        client.call_and_wait(1, &new_hello(), &[]),
        Err(CallError::Closed)
    ));
    let (daemon, client) = ControlSocket::new_pair().unwrap();
    drop(client);
    assert!(matches!(daemon.recv_packet(), Err(RecvError::Closed)));
}

#[test]
fn no_descriptor_leaks_from_packets_nobody_wants() {
    let (daemon, client) = ControlSocket::new_pair().unwrap();
    let probe = new_descriptor();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    for _ in 0..3 {
        client
            .send_packet(b"garbage", &[writer.as_fd(), writer.as_fd()])
            .unwrap();
        let packet = daemon.recv_packet().unwrap();
        assert_eq!(packet.fds.len(), 2);
        assert!(Request::decode(&packet.bytes).is_err());
    }
    // This side cannot send oversized packets; one from a foreign sender is cut and refused,
    // descriptors included.
    let big = vec![0u8; MAX_PACKET + 1];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = rustix::net::SendAncillaryBuffer::new(&mut space);
    let one = [writer.as_fd()];
    ancillary.push(rustix::net::SendAncillaryMessage::ScmRights(&one));
    rustix::net::sendmsg(
        &client,
        &[std::io::IoSlice::new(&big)],
        &mut ancillary,
        rustix::net::SendFlags::empty(),
    )
    .unwrap();
    assert!(matches!(daemon.recv_packet(), Err(RecvError::Truncated)));
    assert!(client.send_packet(&big, &[]).is_err());
    drop(writer);
    // End of file: every copy of the write end is closed.
    rustix::io::ioctl_fionbio(&reader, true).unwrap();
    assert_eq!(rustix::io::read(&reader, &mut [0u8; 1]), Ok(0));
    drop(probe);
}

#[test]
fn events_cross_and_foreign_kinds_are_refused() {
    let event = CmEventMessage {
        cookie: 42,
        ..CmEventMessage::new(CmEventKind::Established)
    };
    let packet = encode_event(KIND_CM_EVENT, &event);
    assert_eq!(
        decode_event::<CmEventMessage>(KIND_CM_EVENT, &packet),
        Ok(event)
    );
    assert_eq!(
        decode_event::<AsyncEventMessage>(KIND_ASYNC_EVENT, &packet),
        Err(ProtoError::Kind(KIND_CM_EVENT))
    );
    let asynchronous = AsyncEventMessage::new(AsyncEventKind::QpFatal, 3, "why");
    assert_eq!(asynchronous.reason.to_text(), "why");
    assert_eq!(
        AsyncEventKind::from_u32(asynchronous.kind),
        Some(AsyncEventKind::QpFatal)
    );
}

#[test]
fn addresses_survive_both_ways() {
    for text in ["10.0.0.1:7174", "[fe80::1]:80", "0.0.0.0:0"] {
        let address: std::net::SocketAddr = text.parse().unwrap();
        assert_eq!(Addr::from(address).to_socket_addr(), Some(address));
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

/// A peer that closes with unread input resets the connection: the descriptors in its last packet are
/// left in the socket.
#[test]
fn descriptors_of_a_peer_that_reset_the_connection_are_not_received() {
    let (daemon, client) = ControlSocket::new_pair().unwrap();
    let fd = new_descriptor();
    let request = encode_request(1, &new_hello());
    client.send_packet(&request, &[fd.as_fd()]).unwrap();
    daemon.send_packet(b"unread", &[]).unwrap();
    drop(client);
    daemon.refuse_input();
    for _ in 0..2 {
        let received = daemon.recv_from_client();
        assert!(
            matches!(received, Err(RecvError::Descriptors)),
            "{received:?}"
        );
    }
    let (daemon, _client) = ControlSocket::new_pair().unwrap();
    let received = daemon.recv_from_client();
    assert!(
        matches!(received, Err(RecvError::WouldBlock)),
        "{received:?}"
    );
}

proptest! {
    #[test]
    fn garbage_packets_are_refused_without_panic(
        bytes in proptest::collection::vec(any::<u8>(), 0..700),
        kind in 0u16..120, keep_header in any::<bool>(),
    ) {
        let mut packet = bytes;
        if keep_header && packet.len() >= 24 {
            let len = packet.len() as u32;
            packet[..4].copy_from_slice(&MAGIC.to_le_bytes());
            packet[4..6].copy_from_slice(&VERSION.to_le_bytes());
            packet[6..8].copy_from_slice(&kind.to_le_bytes());
            packet[8..12].copy_from_slice(&len.to_le_bytes());
        }
        let _ = Request::decode(&packet);
        let _ = codec::decode_reply::<ClientHello>(0, &packet);
        let _ = codec::decode_reply::<AllocPd>(0, &packet);
        let _ = decode_event::<CmEventMessage>(KIND_CM_EVENT, &packet);
        let _ = codec::peek_header(&packet);
    }
}
