//! A siwd over a tap, an application that uses it, and helpers for the scripted peer.

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use crate::common::net::Netns;
use crate::common::peer::{C, Peer, S, request, terminate};
use crate::common::*;
use siw::{AsyncEventKind, CmEvent, CmListener, ConnectOptions, ConnectionInfo, RecvWr, WcStatus};

/// Time for which no event or data may arrive, where none is expected.
pub const SILENCE: Duration = Duration::from_millis(200);

/// Base configuration. It ends in `[device.mpa]`, so that tests can add settings. Its time limits
/// suit a slow machine.
pub const CONFIG: &str = r#"
[dpdk]
hugepages = "never"
buffers = 4096
[[device]]
name = "siw0"
devargs = "net_tap0,iface=tap0"
mac = "02:00:00:77:00:01"
addresses = ["10.77.0.1/24", "fd77::1/64"]
[device.mpa]
request_timeout_ms = 30000
reply_timeout_ms = 30000
"#;

/// The base configuration with time limits short enough for a test to wait for.
pub fn impatient() -> String {
    CONFIG.replace("30000", "700")
}

/// siwd with a listening application; Linux is at the other end of the link.
pub struct Responder {
    pub app: End,
    pub listener: CmListener,
    pub ns: Netns,
    _siwd: Daemon,
}

impl Responder {
    pub fn new() -> Responder {
        Responder::with(CONFIG)
    }

    pub fn with(config: &str) -> Responder {
        let ns = Netns::new();
        let siwd = ns.siwd(config, &[]);
        ns.address("tap0", "10.77.0.2/24");
        ns.address("tap0", "fd77::2/64");
        ns.ip("link set tap0 up");
        ns.wait_ping("10.77.0.1".parse().unwrap());
        let app = End::new(&siwd.context(), 65_536);
        let any: SocketAddr = "10.77.0.1:0".parse().unwrap();
        let listener = CmListener::new(&app.cm, None, any, 8, 0).unwrap();
        Responder {
            app,
            listener,
            ns,
            _siwd: siwd,
        }
    }

    pub fn peer(&self) -> Peer {
        Peer::connect(&self.ns, self.listener.local_addr())
    }

    /// Establishes a connection of MPA revision 2 with CRC, in FPDU mode on both sides.
    pub fn stream(&self) -> Peer {
        let mut peer = self.peer();
        peer.send(&request(S | C, 2, &[0, 4, 0, 4]));
        self.accept(b"");
        let (flags, rev, _) = peer.take_mpa(b"MPA ID Rep Frame");
        assert_eq!((flags, rev), (S | C, 2));
        self.established();
        peer
    }

    /// Accepts the next connection request; returns its connection information.
    pub fn accept(&self, private_data: &[u8]) -> ConnectionInfo {
        let CmEvent::ConnectRequest(r) = self.event() else {
            panic!("no request")
        };
        let info = r.connection_info().clone();
        let opt = ConnectOptions {
            private_data,
            ..Default::default()
        };
        r.accept(&self.app.qp, None, &opt).unwrap();
        info
    }

    pub fn established(&self) -> ConnectionInfo {
        match self.event() {
            CmEvent::Established(i) => i,
            other => panic!("{other:?}"),
        }
    }

    pub fn disconnected(&self) {
        match self.event() {
            CmEvent::Disconnected(_) => {}
            other => panic!("{other:?}"),
        }
    }

    pub fn event(&self) -> CmEvent {
        self.app.cm.get_event(Some(PATIENCE)).unwrap()
    }

    /// Checks that the application gets no connection event.
    pub fn nothing_heard(&self) {
        let heard = self.app.cm.get_event(Some(SILENCE));
        assert!(matches!(heard, Err(siw::Error::Timeout)), "{heard:?}");
    }

    pub fn recv(&self, wr_id: u64, at: usize, len: usize) {
        let sge = [self.app.mr.sge(at, len)];
        self.app
            .qp
            .post_recv(&[RecvWr { wr_id, sges: &sge }])
            .unwrap();
    }

    /// Checks the end of a connection by an error: one asynchronous event, a disconnect, the
    /// receive flushed.
    pub fn broken(&self, kind: AsyncEventKind) {
        self.broken_by(&[kind]);
    }

    /// Like [`broken`](Self::broken), where any of several errors may be detected first.
    pub fn broken_by(&self, kinds: &[AsyncEventKind]) {
        let event = self.app.ctx.get_async_event(Some(PATIENCE)).unwrap();
        let is_one = event.kind.is_some_and(|kind| kinds.contains(&kind));
        assert!(is_one, "{event:?}");
        assert_eq!(event.object, self.app.qp.qp_num(), "{event:?}");
        self.disconnected();
        let wc = self.app.wc();
        assert_eq!((wc.status, wc.wr_id), (WcStatus::WR_FLUSH_ERR, 99));
    }

    /// Sends a message that is an error on a new stream. Expects a Terminate with the code and the
    /// headers according to figure 10 of RFC 5040, and the event at the application.
    pub fn refuses(&self, message: &[u8], code: [u8; 2]) {
        let mut peer = self.stream();
        self.recv(99, 0, 64);
        peer.send(message);
        assert_eq!(peer.rest(), quoting(code, message), "code {code:02x?}");
        drop(peer);
        self.broken(match code[0] {
            0x01 | 0x11 => AsyncEventKind::QpAccessErr,
            0x02 | 0x12 => AsyncEventKind::QpReqErr,
            _ => AsyncEventKind::QpFatal,
        });
    }

    /// Creates a second stream of the application, in the same protection domain, on which siwd may
    /// send.
    pub fn second(&self) -> (End, Peer) {
        let end = self.app.another();
        let peer = self.stream_of(&end);
        (end, peer)
    }

    /// Creates a stream of this queue pair, on which siwd may send.
    pub fn stream_of(&self, end: &End) -> Peer {
        let mut peer = self.peer();
        peer.send(&request(C, 1, b""));
        let CmEvent::ConnectRequest(r) = self.event() else {
            panic!("no request")
        };
        r.accept(&end.qp, None, &ConnectOptions::default()).unwrap();
        peer.take_mpa(b"MPA ID Rep Frame");
        self.established();
        self.begin(&mut peer);
        peer
    }

    /// Sends a zero-length Write, after which siwd may send.
    pub fn begin(&self, peer: &mut Peer) {
        peer.send(&crate::common::peer::write(true, 1, 0, b""));
    }

    /// Checks that siwd still accepts other connections.
    pub fn goes_on(&self) {
        let next = End::new(&self.app.ctx, 4096);
        let mut peer = self.peer();
        peer.send(&request(C, 1, b""));
        let CmEvent::ConnectRequest(r) = self.event() else {
            panic!("no request")
        };
        r.accept(&next.qp, None, &ConnectOptions::default())
            .unwrap();
        peer.take_mpa(b"MPA ID Rep Frame");
    }
}

/// The Terminate with this code about this FPDU. Layers above MPA quote the length of the segment
/// and its header; for a Read Request also the request.
pub fn quoting(code: [u8; 2], message: &[u8]) -> Vec<u8> {
    let tagged = message[2] & 0x80 != 0;
    match code[0] >> 4 {
        2 => terminate([code[0], code[1], 0, 0], b""),
        _ if tagged => terminate([code[0], code[1], 0xc0, 0], &message[..16]),
        0 if message[3] & 0xf == 1 && message[..2] == [0, 46] => {
            terminate([code[0], code[1], 0xe0, 0], &message[..48])
        }
        _ => terminate([code[0], code[1], 0xc0, 0], &message[..20]),
    }
}

/// siwd that connects to a listener of Linux.
pub struct Initiator {
    pub app: End,
    pub listener: TcpListener,
    pub to: SocketAddr,
    pub ns: Netns,
    pub _siwd: Daemon,
}

impl Initiator {
    pub fn new() -> Initiator {
        Initiator::at("10.77.0.2:0")
    }

    pub fn with(config: &str) -> Initiator {
        Initiator::start(config, "10.77.0.2:0")
    }

    pub fn at(addr: &str) -> Initiator {
        Initiator::start(CONFIG, addr)
    }

    fn start(config: &str, addr: &str) -> Initiator {
        let ns = Netns::new();
        let siwd = ns.siwd(config, &[]);
        ns.address("tap0", "10.77.0.2/24");
        ns.address("tap0", "fd77::2/64");
        ns.ip("link set tap0 up");
        ns.wait_ping("10.77.0.1".parse().unwrap());
        let listener = ns.run(|| TcpListener::bind(addr)).unwrap();
        let to = listener.local_addr().unwrap();
        let app = End::new(&siwd.context(), 65_536);
        Initiator {
            app,
            listener,
            to,
            ns,
            _siwd: siwd,
        }
    }

    pub fn connect(&self, opt: &ConnectOptions<'_>) {
        self.app.qp.connect(&self.app.cm, self.to, opt).unwrap();
    }

    /// Connects, takes the request, and answers with `bytes`.
    pub fn answer(&self, bytes: &[u8]) -> Peer {
        self.connect(&ConnectOptions::default());
        let mut peer = Peer::accept(&self.listener);
        peer.take_mpa(b"MPA ID Req Frame");
        peer.send(bytes);
        peer
    }

    pub fn event(&self) -> CmEvent {
        self.app.cm.get_event(Some(PATIENCE)).unwrap()
    }

    pub fn fails(&self, words: &str) {
        match self.event() {
            CmEvent::ConnectError(i) => assert!(i.reason.contains(words) && i.errno > 0, "{i:?}"),
            other => panic!("{other:?}"),
        }
    }

    pub fn established(&self) -> ConnectionInfo {
        match self.event() {
            CmEvent::Established(i) => i,
            other => panic!("{other:?}"),
        }
    }
}
