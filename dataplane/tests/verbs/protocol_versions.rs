//! A library and a daemon of different releases, by the rules of `siw_shm::control::messages`.

use std::os::fd::OwnedFd;

use crate::common::*;
use siw_shm::control::messages as m;
use siw_shm::control::{CallError, ControlSocket, Message, codec};

/// A library that sends packets of one version.
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

    /// Receives the reply, of exactly `len` bytes and in this library's version.
    fn reply<M: Message>(&self, len: usize) -> Result<(M::Reply, Vec<OwnedFd>), CallError> {
        let packet = self.conn.recv_packet().unwrap();
        let reply = codec::decode_reply::<M>(9, &packet.bytes)?;
        assert_eq!(packet.bytes[4..6], self.version.to_le_bytes());
        assert_eq!(packet.bytes.len(), 24 + len);
        Ok((reply, packet.fds))
    }

    fn call<M: Message>(&self, request: &M) -> (M::Reply, Vec<OwnedFd>) {
        self.send(request, size_of::<M>(), 0);
        self.reply::<M>(size_of::<M::Reply>()).unwrap()
    }
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
    let query = m::QueryDevice { index: 0, flags: 0 };
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
        version: u32::from(m::MIN_VERSION) - 1,
        min_version: 1,
        ..m::ClientHello::new("older")
    };
    refused(&OtherLibrary::new(&d, m::MIN_VERSION), &older);
    refused(&OtherLibrary::new(&d, m::MIN_VERSION - 1), &older);
    let context = d.context();
    assert_eq!(context.protocol_version(), u32::from(m::VERSION));
}
