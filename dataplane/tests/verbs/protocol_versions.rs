//! A library and a daemon of different releases: the packets of an older library are written here
//! byte by byte, those of a newer one use what the rules of `siw_shm::control::messages` permit.

use std::os::fd::OwnedFd;

use crate::common::raw_client::connection_parameters;
use crate::common::*;
use siw::{CmEvent, CmListener, ConnectOptions};
use siw_shm::control::messages as m;
use siw_shm::control::{CallError, ControlSocket, Message, codec};

/// A library that speaks one version and knows only the structs of that version.
struct OtherLibrary {
    conn: ControlSocket,
    version: u16,
}

impl OtherLibrary {
    fn new(d: &Daemon, version: u16) -> OtherLibrary {
        let conn = ControlSocket::connect_to(&d.socket).unwrap();
        OtherLibrary { conn, version }
    }

    /// Sends a request whose body is truncated or padded with `filler` to `len` bytes.
    fn send<M: Message>(&self, request: &M, len: usize, filler: u8) {
        let mut packet = codec::encode_request(9, request);
        packet.resize(24 + len, filler);
        let total = packet.len() as u32;
        packet[8..12].copy_from_slice(&total.to_le_bytes());
        codec::stamp_version(&mut packet, self.version);
        self.conn.send_packet(&packet, &[]).unwrap();
    }

    /// Receives the reply, of exactly `len` bytes and in this library's version: older libraries
    /// accept no other length.
    fn reply<M: Message>(&self, len: usize) -> Result<(M::Reply, Vec<OwnedFd>), CallError> {
        let packet = self.conn.recv_packet().unwrap();
        let reply = codec::decode_reply::<M>(9, &packet.bytes)?;
        assert_eq!(packet.bytes[4..6], self.version.to_le_bytes());
        assert_eq!(packet.bytes.len(), 24 + len);
        Ok((reply, packet.fds))
    }

    fn call<M: Message>(&self, request: &M) -> (M::Reply, Vec<OwnedFd>) {
        self.send(request, M::MIN_LEN, 0);
        self.reply::<M>(size_of::<M::Reply>()).unwrap()
    }
}

/// Connects like version 3: its HELLO had 72 bytes and one version, its reply 184.
#[test]
fn a_library_from_before_the_negotiation_connects() {
    let d = Daemon::loopback();
    let old = OtherLibrary::new(&d, 3);
    let hello = m::ClientHello {
        version: 3,
        ..m::ClientHello::new("old")
    };
    old.send(&hello, 72, 0);
    let (reply, _fds) = old.reply::<m::ClientHello>(184).unwrap();
    assert_eq!((reply.version, reply.features), (3, 0));
    let (pd, _) = old.call(&m::AllocPd {
        device: 0,
        reserved: 0,
    });
    let (cq, _cq_fds) = old.call(&m::CreateCq {
        cqe: 64,
        channel: 0,
        cookie: 0,
    });
    let (qp, _) = old.call(&m::CreateQp {
        pd: pd.id,
        send_cq: cq.cq,
        recv_cq: cq.cq,
        max_send_wr: 16,
        max_recv_wr: 16,
        max_send_sge: 4,
        max_recv_sge: 4,
        max_inline: 64,
        sq_sig_all: 1,
        srq: 0,
    });
    let (channel, mut fds) = old.call(&m::CreateCmChannel { reserved: 0 });
    let events = ControlSocket::from(fds.pop().unwrap());
    events.set_nonblocking(false).unwrap();
    let end = End::new(&d.context(), 4096);
    let listener = CmListener::new(&end.cm, None, "10.77.0.2:0".parse().unwrap(), 8, 0).unwrap();
    old.call(&m::Connect {
        qp_num: qp.qp_num,
        device: m::ANY_DEVICE,
        cm_channel: channel.id,
        timeout_ms: 0,
        cookie: 5,
        dst: listener.local_addr().into(),
        src: m::Addr::NONE,
        params: connection_parameters(1),
    });
    let CmEvent::ConnectRequest(request) = end.cm.get_event(Some(PATIENCE)).unwrap() else {
        panic!("no request");
    };
    request
        .accept(&end.qp, None, &ConnectOptions::default())
        .unwrap();
    // Its events are in its version, too.
    let event = events.recv_packet().unwrap().bytes;
    assert_eq!(event[4..6], 3u16.to_le_bytes());
    assert_eq!(event.len(), 24 + size_of::<m::CmEventMessage>());
    let event: m::CmEventMessage = codec::decode_event(m::KIND_CM_EVENT, &event).unwrap();
    assert_eq!(event.kind, m::CmEventKind::Established as u32);
    // A refusal is also in its version.
    old.send(
        &m::DestroyQp {
            qp_num: 0,
            reserved: 0,
        },
        8,
        0,
    );
    let refusal = old.conn.recv_packet().unwrap().bytes;
    assert_eq!(refusal[4..6], 3u16.to_le_bytes());
}

#[test]
fn a_newer_library_gets_the_highest_version_that_the_daemon_has() {
    let d = Daemon::loopback();
    let new = OtherLibrary::new(&d, m::VERSION);
    let hello = m::ClientHello {
        version: u32::from(m::VERSION) + 5,
        min_version: m::VERSION.into(),
        features: !0,
        ..m::ClientHello::new("new")
    };
    // A field that this daemon does not know, with the value zero.
    let longer = size_of::<m::ClientHello>() + 8;
    new.send(&hello, longer, 0);
    let (reply, _fds) = new
        .reply::<m::ClientHello>(size_of::<m::HelloReply>())
        .unwrap();
    assert_eq!(reply.version, u32::from(m::VERSION));
    assert_eq!(reply.features, m::FEATURES, "only features of the daemon");
    new.call(&m::AllocPd {
        device: 0,
        reserved: 0,
    });
    let query = m::QueryDevice {
        index: 0,
        reserved: 0,
    };
    new.send(&query, 16, 0);
    assert!(
        new.reply::<m::QueryDevice>(size_of::<m::DeviceReply>())
            .is_ok()
    );
}

#[test]
fn a_library_without_a_common_version_is_told_which_to_update() {
    let d = Daemon::loopback();
    let refused = |library: &OtherLibrary, hello: &m::ClientHello| {
        library.send(hello, size_of::<m::ClientHello>(), 0);
        let packet = library.conn.recv_packet().unwrap();
        match codec::decode_reply::<m::ClientHello>(9, &packet.bytes) {
            Err(CallError::Refused { errno, reason }) => {
                assert_eq!(errno, nix::libc::EPROTONOSUPPORT, "{reason}");
                assert!(reason.contains("update"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
    };
    let beyond = u32::from(m::VERSION) + 1;
    let newer = m::ClientHello {
        version: beyond,
        min_version: beyond,
        ..m::ClientHello::new("newer")
    };
    refused(&OtherLibrary::new(&d, m::VERSION), &newer);
    refused(&OtherLibrary::new(&d, m::VERSION + 1), &newer);
    let older = m::ClientHello {
        version: 2,
        min_version: 1,
        ..m::ClientHello::new("older")
    };
    refused(&OtherLibrary::new(&d, m::MIN_VERSION), &older);
    refused(&OtherLibrary::new(&d, 2), &older);
    let context = d.context();
    assert_eq!(context.protocol_version(), u32::from(m::VERSION));
}
