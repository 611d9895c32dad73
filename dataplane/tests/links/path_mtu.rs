//! Path MTU discovery across TCP and iWARP: an MTU found by TCP applies from the next FPDU on, and
//! each FPDU fills a segment of the current size, whatever happens to the path (RFC 5044 section
//! 5.1, RFC 8899).

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use crate::common::net::{Netns, lacks_network};
use crate::common::peer::{C, S, fpdu, request, send, untagged};
use crate::common::raw::{ACK, RawTcp, Wire, checksum};
use crate::common::*;
use siw::{CmEvent, CmListener, ConnectOptions, RecvWr, SendData, SendWr, WcStatus};

const MAC: [u8; 6] = [2, 0, 0, 0x77, 0, 1];
const LEN: usize = 1 << 20;
/// IPv4 and TCP headers without timestamps.
const HEADERS: usize = 40;

/// A path and the host at its end: longer frames than `mtu` are dropped, the others are
/// acknowledged, with SACK.
struct Path {
    tcp: RawTcp,
    mtu: usize,
    /// Frames dropped.
    swallowed: Vec<Vec<u8>>,
    /// Sequence number at which the stream of FPDUs began.
    start: u32,
    stream: Vec<u8>,
    /// Payload beyond a hole, by position.
    ahead: BTreeMap<usize, Vec<u8>>,
    /// Bytes in whole FPDUs, and number of complete messages.
    whole: usize,
    messages: usize,
    /// Position and length of each segment that passed, in the order of arrival.
    segments: Vec<(usize, usize)>,
}

impl Path {
    fn new(tcp: RawTcp) -> Path {
        Path {
            start: tcp.expected,
            tcp,
            mtu: usize::MAX,
            swallowed: Vec::new(),
            stream: Vec::new(),
            ahead: BTreeMap::new(),
            whole: 0,
            messages: 0,
            segments: Vec::new(),
        }
    }

    /// A segment's payload and its position in the stream.
    fn payload(&self, f: &[u8]) -> Option<(usize, Vec<u8>)> {
        if f.len() < 54 || f[12..14] != [8, 0] || f[23] != 6 {
            return None;
        }
        let total = usize::from(u16::from_be_bytes([f[16], f[17]]));
        let t = &f[34..14 + total];
        let seq = u32::from_be_bytes(t[4..8].try_into().unwrap());
        let payload = t[usize::from(t[12] >> 4) * 4..].to_vec();
        Some((seq.wrapping_sub(self.start) as usize, payload))
    }

    /// Receives frames until `enough` holds; panics after the time limit.
    fn run(&mut self, what: &str, mut enough: impl FnMut(&Path) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !enough(self) {
            assert!(Instant::now() < end, "{what}");
            self.take(Duration::from_millis(100));
        }
    }

    /// Receives the next frame, if one arrives in time.
    fn take(&mut self, wait: Duration) {
        let Some(f) = self.tcp.wire.recv(Instant::now() + wait) else {
            return;
        };
        let Some((at, payload)) = self.payload(&f) else {
            return;
        };
        if payload.is_empty() {
            // A probe has the number of the last acknowledged byte (RFC 9293 section 3.8.4).
            if (at as u32).wrapping_add(1) == self.stream.len() as u32 {
                self.tcp.emit(self.tcp.next, ACK, &[], b"");
            }
            return;
        }
        if f.len() > self.mtu.saturating_add(14) {
            self.swallowed.push(f);
            return;
        }
        self.segments.push((at, payload.len()));
        if at + payload.len() > self.stream.len() {
            self.ahead.insert(at, payload);
        }
        while let Some(e) = self.ahead.first_entry()
            && *e.key() <= self.stream.len()
        {
            let (at, p) = e.remove_entry();
            if let Some(new) = p.get(self.stream.len() - at..) {
                self.stream.extend(new);
            }
        }
        while let Some(&[a, b, control, ..]) = self.stream.get(self.whole..) {
            let n = usize::from(u16::from_be_bytes([a, b]));
            let end = self.whole + (2 + n).next_multiple_of(4) + 4;
            if end > self.stream.len() {
                break;
            }
            self.whole = end;
            self.messages += usize::from(control & 0x40 != 0);
        }
        self.tcp.expected = self.start.wrapping_add(self.stream.len() as u32);
        // SACK blocks of contiguous data, the one with the latest segment first (RFC 2018 section
        // 4).
        let mut blocks: Vec<(usize, usize)> = Vec::new();
        for (&from, p) in &self.ahead {
            match blocks.last_mut() {
                Some((_, to)) if *to == from => *to += p.len(),
                _ => blocks.push((from, from + p.len())),
            }
        }
        blocks.sort_by_key(|b| !(b.0..b.1).contains(&at));
        blocks.truncate(3);
        let mut options = Vec::new();
        if !blocks.is_empty() {
            options.extend([1, 1, 5, 2 + 8 * blocks.len() as u8]);
            for edge in blocks.iter().flat_map(|b| [b.0, b.1]) {
                options.extend(self.start.wrapping_add(edge as u32).to_be_bytes());
            }
        }
        self.tcp.emit(self.tcp.next, ACK, &options, b"");
    }

    /// Start positions of the dropped segments.
    fn lost(&self) -> BTreeSet<usize> {
        let swallowed = self.swallowed.iter();
        swallowed.map(|f| self.payload(f).unwrap().0).collect()
    }

    /// Sends the ICMP error of a router for which this frame was too big (RFC 1191 section 4).
    fn too_big(&self, frame: &[u8], mtu: u16) {
        let mut icmp = vec![3, 4, 0, 0, 0, 0];
        icmp.extend(mtu.to_be_bytes());
        icmp.extend(&frame[14..14 + 28]);
        let sum = checksum(&[&icmp]);
        icmp[2..4].copy_from_slice(&sum);
        let mut ip = vec![0x45, 0];
        ip.extend((20 + icmp.len() as u16).to_be_bytes());
        ip.extend([0, 0, 0, 0, 64, 1, 0, 0, 10, 77, 0, 254, 10, 77, 0, 1]);
        let sum = checksum(&[&ip]);
        ip[10..12].copy_from_slice(&sum);
        let ethernet = [&MAC[..], &[2, 0xee, 0, 0, 0, 254], &[8, 0]].concat();
        self.tcp.wire.send(&[ethernet, ip, icmp].concat());
    }

    /// The FPDUs of the stream: position, length on the wire, ULPDU. Checks their CRCs.
    fn fpdus(&self) -> Vec<(usize, usize, &[u8])> {
        let (mut at, mut all) = (0, Vec::new());
        while let Some(head) = self.stream.get(at..at + 2) {
            let n = usize::from(u16::from_be_bytes([head[0], head[1]]));
            let len = (2 + n).next_multiple_of(4) + 4;
            let Some(whole) = self.stream.get(at..at + len) else {
                break;
            };
            assert_eq!(fpdu(&whole[2..2 + n]), whole, "an FPDU at {at}");
            all.push((at, len, &whole[2..2 + n]));
            at += len;
        }
        all
    }

    /// Checks that each segment that passed from `from` on carries one whole FPDU.
    fn assert_aligned(&self, from: usize) {
        let lens: BTreeMap<usize, usize> = self.fpdus().iter().map(|f| (f.0, f.1)).collect();
        let mut seen = 0;
        for &(at, len) in self.segments.iter().filter(|s| s.0 >= from) {
            assert_eq!(lens.get(&at), Some(&len), "a segment at {at}");
            seen += 1;
        }
        assert!(seen > 20, "{seen} segments");
    }
}

struct Bench {
    app: End,
    path: Path,
    _listener: CmListener,
    siwd: Daemon,
    _ns: Netns,
}

/// Sets up a connection in FPDU mode over a tap, on which the application may send.
fn bench() -> Bench {
    let ns = Netns::new();
    let siwd = ns.siwd(
        r#"
[dpdk]
hugepages = "never"
buffers = 4096
[[device]]
name = "siw0"
devargs = "net_tap0,iface=tap0"
mac = "02:00:00:77:00:01"
addresses = ["10.77.0.1/24"]
"#,
        &[],
    );
    ns.ip("link set tap0 up");
    let app = End::new(&siwd.context(), LEN);
    let any: SocketAddr = "10.77.0.1:0".parse().unwrap();
    let listener = CmListener::new(&app.cm, None, any, 8, 0).unwrap();
    let SocketAddr::V4(to) = listener.local_addr() else {
        panic!("IPv4")
    };
    let wire = Wire::open(&ns, "tap0", "10.77.0.9".parse().unwrap());
    let mut peer = RawTcp::connect(wire, MAC, to);
    peer.send(&request(S | C, 2, &[0, 4, 0, 4]));
    match app.cm.get_event(Some(PATIENCE)).unwrap() {
        CmEvent::ConnectRequest(r) => r.accept(&app.qp, None, &ConnectOptions::default()).unwrap(),
        other => panic!("{other:?}"),
    }
    peer.take(20 + 4);
    assert!(matches!(
        app.cm.get_event(Some(PATIENCE)).unwrap(),
        CmEvent::Established(_)
    ));
    let sge = [app.mr.sge(0, 64)];
    let wr = RecvWr {
        wr_id: 1,
        sges: &sge,
    };
    app.qp.post_recv(&[wr]).unwrap();
    peer.send(&send(true, 1, 0, b"first"));
    assert_eq!(app.wc().wr_id, 1);
    peer.await_ack();
    app.fill(5);
    Bench {
        app,
        path: Path::new(peer),
        _listener: listener,
        siwd,
        _ns: ns,
    }
}

impl Bench {
    /// Writes the whole memory to an arbitrary address of the peer.
    fn write(&self, wr_id: u64) {
        let sge = [self.app.mr.sge(0, LEN)];
        let wr = SendWr::write(wr_id, SendData::Sges(&sge), 0x1000, 0x77);
        self.app.qp.post_send(&[wr]).unwrap();
    }

    /// Checks that the `n` WRITEs arrived, byte by byte.
    fn assert_written(&self, n: usize) {
        let data = self.app.read(0, LEN);
        let mut at = 0;
        for (_, _, ulpdu) in self.path.fpdus() {
            let to = u64::from_be_bytes(ulpdu[6..14].try_into().unwrap());
            assert_eq!(to, 0x1000 + (at % LEN) as u64);
            let part = &ulpdu[14..];
            assert!(part == &data[at % LEN..at % LEN + part.len()], "byte {at}");
            at += part.len();
        }
        assert_eq!(at, n * LEN);
    }
}

#[test]
fn a_router_that_says_too_big_makes_the_next_fpdu_fit() {
    skip_if!(lacks_network());
    let mut b = bench();
    b.write(9);
    b.path
        .run("the transfer begins", |p| p.stream.len() > 100_000);
    let whole = 1500 - HEADERS;
    assert!(b.path.segments.iter().all(|s| s.1 == whole));
    // From here on the path is narrow; its router reports this once.
    b.path.mtu = 1000;
    b.path
        .run("a frame is too long", |p| !p.swallowed.is_empty());
    let first = b.path.swallowed[0].clone();
    // FPDUs sent by then have the old size and are retransmitted in smaller segments.
    let before = b.path.segments.len();
    b.path.too_big(&first, 1000);
    b.path
        .run("shorter segments are sent", |p| p.segments.len() > before);
    let swallowed = b.path.swallowed.len();
    let ends = b.path.swallowed.iter().map(|f| {
        let (at, payload) = b.path.payload(f).unwrap();
        at + payload.len()
    });
    let left = ends.max().unwrap();
    b.path.run("the transfer ends", |p| p.messages == 1);
    assert_eq!(
        b.path.swallowed.len(),
        swallowed,
        "no frame was too long again"
    );
    // No more FPDUs of the old size were built: behind those already queued, each FPDU has the new
    // size and a segment of its own; the last one is shorter.
    let new = b.path.fpdus();
    let long = new.iter().rfind(|f| f.1 > 1000 - HEADERS).unwrap();
    let old = left.max(long.0 + long.1);
    assert!(old - left <= 64 * whole, "{old} {left}");
    b.path.assert_aligned(old);
    let (last, new) = new.split_last().unwrap();
    assert!(last.1 <= 1000 - HEADERS);
    let new: Vec<_> = new.iter().filter(|f| f.0 >= old).map(|f| f.1).collect();
    assert!(new.len() > 100 && new.iter().all(|&n| n == 1000 - HEADERS));
    b.assert_written(1);
    assert_eq!(b.app.wc().status, WcStatus::SUCCESS);
    assert_eq!(b.siwd.tcp_counter("pmtu_reductions"), 1);
    drop(b.path);
    assert!(b.siwd.stop().success());
}

#[test]
fn a_cut_fpdu_of_live_memory_keeps_the_bytes_of_its_crc() {
    skip_if!(lacks_network());
    let mut b = bench();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = StopOnDrop(&is_over);
        scope.spawn(|| scribble(&b.app.mr, &is_over));
        let read = [
            &7u32.to_be_bytes()[..],
            &0x1000u64.to_be_bytes(),
            &(LEN as u32).to_be_bytes(),
            &b.app.mr.rkey().to_be_bytes(),
            &b.app.mr.addr().to_be_bytes(),
        ]
        .concat();
        let path = &mut b.path;
        path.tcp.send(&untagged([0x41, 0x41], 0, 1, 1, 0, &read));
        path.run("the response begins", |p| p.stream.len() > 100_000);
        path.mtu = 1000;
        // The initial window is ten segments and none was lost, so more than ten can be in flight
        // without an acknowledgment.
        path.run("frames are too long", |p| p.lost().len() >= 4);
        let first = path.swallowed[0].clone();
        path.too_big(&first, 1000);
        path.run("the response ends", |p| p.messages == 1);
    });
    // `fpdus` checks every CRC.
    let lens: BTreeMap<usize, usize> = b.path.fpdus().iter().map(|f| (f.0, f.1)).collect();
    let parts = b.path.segments.iter();
    let parts = parts.filter(|s| lens.get(&s.0) != Some(&s.1)).count();
    let cut = b.path.lost().len();
    assert!(parts >= 2 * cut, "{parts} segments for {cut} FPDUs");
    drop(b.path);
    assert!(b.siwd.stop().success());
}

#[test]
fn a_path_that_swallows_long_frames_gets_fpdus_that_fit() {
    skip_if!(lacks_network());
    let mut b = bench();
    b.write(1);
    b.path
        .run("the transfer begins", |p| p.stream.len() > 100_000);
    b.path.mtu = 1400;
    let end = Instant::now() + PATIENCE;
    let mut writes = 1;
    let mut narrow = 0;
    // One more WRITE after the black hole was found.
    while narrow == 0 {
        assert!(Instant::now() < end, "no black hole was found");
        b.path.run("a WRITE arrives", |p| p.messages == writes);
        assert_eq!(b.app.wc().status, WcStatus::SUCCESS);
        if b.siwd.tcp_counter("black_holes") > 0 {
            narrow = b.path.stream.len();
        }
        writes += 1;
        b.write(writes as u64);
    }
    b.path
        .run("the last WRITE arrives", |p| p.messages == writes);
    assert_eq!(b.app.wc().status, WcStatus::SUCCESS);
    b.assert_written(writes);
    // Each FPDU of the new size is one segment.
    let lens: BTreeMap<usize, usize> = b.path.fpdus().iter().map(|f| (f.0, f.1)).collect();
    let after: Vec<_> = b.path.segments.iter().filter(|s| s.0 > narrow).collect();
    assert!(after.iter().any(|s| s.1 == 1200 - HEADERS));
    for s in after {
        assert!(s.1 <= 1200 - HEADERS, "a segment of {} bytes", s.1);
        assert_eq!(lens.get(&s.0), Some(&s.1), "the FPDU at {} was cut", s.0);
    }
    drop(b.path);
    assert!(b.siwd.stop().success());
}
