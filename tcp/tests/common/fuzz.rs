//! The bodies of the fuzz targets; on stable they run as property tests (`tests/fuzz_bodies.rs`).

use std::time::Duration;

use siw_tcp::sim::forge::fix_ipv4;
use siw_tcp::sim::{Pattern, VecSink, host_config};
use siw_tcp::{ConnId, Events, FrameInfo, Instant, RxChecksum, Stack, TcpState, VecBuf};

use super::wire::{ACK, FIN, RST, SYN, Seg};

const SALT: u64 = 77;
const HELD: usize = 64;
const FRAGMENTS: usize = 16;

type Host = Stack<VecBuf, Pattern>;

fn info(checksum: RxChecksum) -> FrameInfo {
    FrameInfo {
        checksum,
        rss_hash: 0,
    }
}

fn stack() -> Host {
    let mut c = host_config(1);
    c.max_recv_buffers = HELD;
    c.max_held_buffers = 2 * HELD;
    c.max_connections = 8;
    c.reassembly.max_datagrams = 4;
    c.reassembly.max_fragments = FRAGMENTS;
    c.reassembly.timeout = Duration::from_millis(20);
    c.recv_window = 20_000;
    Stack::new(c, Instant::from_millis(1)).expect("a valid configuration")
}

/// Raw frames, as a port delivers them: any bytes, checksums held for good.
pub fn frames(data: &[u8]) {
    let mut s = stack();
    let mut now = Instant::from_millis(1);
    s.listen(None, 80, 4, 0).expect("free");
    let mut sink = VecSink::default();
    let mut rest = data;
    while let [n, tail @ ..] = rest {
        let (frame, next) = tail.split_at(tail.len().min(usize::from(*n)));
        rest = next;
        let mut f = frame.to_vec();
        // Mostly to us, so that there is something to look at.
        if n & 1 == 0 && f.len() >= 14 {
            f[..6].copy_from_slice(&[2, 0, 0, 0, 0, 2]);
            f[12] = if n & 2 == 0 { 8 } else { 0x86 };
            f[13] = if n & 2 == 0 { 0 } else { 0xdd };
        }
        // Sound enough for what lies behind the IP header to be looked at: extension headers and
        // fragments of few datagrams from one neighbour.
        if n & 17 == 16 && f.len() >= 54 {
            let len = (f.len() - 14) as u16;
            if n & 2 == 0 {
                f[14] = 0x45;
                f[16..18].copy_from_slice(&len.to_be_bytes());
                f[18] = 0;
                f[26..34].copy_from_slice(&[10, 0, 0, 9, 10, 0, 0, 2]);
                fix_ipv4(&mut f[14..34]);
            } else {
                f[14] = 0x60;
                f[18..20].copy_from_slice(&(len - 40).to_be_bytes());
                f[20] = [0, 43, 44, 60][usize::from(f[20] & 3)];
                f[22..54].fill(0);
                (f[22], f[37], f[38], f[53]) = (0xfd, 9, 0xfd, 2);
            }
        }
        let checksum = match n & 12 {
            0 => RxChecksum::Unknown,
            _ => RxChecksum::Good,
        };
        s.receive_burst(now, std::iter::once((f.into(), info(checksum))));
        s.poll(now, &mut sink);
        while s.next_event().is_some() {}
        now = now + Duration::from_millis(u64::from(n & 7));
        assert!(s.connection_count() <= 8 && s.held_buffers() <= 2 * HELD + 8);
        assert!(s.held_fragments() <= FRAGMENTS);
    }
    assert!(sink.frames.len() <= 8 * data.len() + 8, "no storm");
}

/// What the peer of the stack under test knows and believes.
struct Peer {
    stack: Host,
    sink: VecSink,
    now: Instant,
    /// Our and its initial sequence numbers.
    iss: u32,
    irs: u32,
    /// Its last ACK and right edge, as offsets from `iss`.
    acked: u32,
    edge: u32,
    /// The end of what it sent, as an offset from `irs`.
    sent: u32,
    last: Seg,
    ts: u32,
    /// Bytes it was given to send.
    pushed: u64,
    read: u64,
    id: Option<ConnId>,
    /// A SYN opened the four-tuple anew: what was known means nothing.
    over: bool,
}

impl Peer {
    fn seg(&self, flags: u8) -> Seg {
        Seg {
            from: 0,
            sport: 9000,
            dport: 80,
            seq: self.iss.wrapping_add(self.acked),
            ack: self.irs.wrapping_add(self.sent),
            flags,
            window: 30_000,
            options: vec![],
            payload: vec![],
        }
    }

    /// Polls, and checks each frame that leaves; returns how many TCP segments and resets.
    fn poll(&mut self) -> (usize, usize) {
        self.stack.poll(self.now, &mut self.sink);
        let (mut n, mut resets) = (0, 0);
        while let Some((f, _)) = self.sink.frames.pop_front() {
            let Some(s) = Seg::parse(1, &f) else { continue };
            n += 1;
            assert_eq!(s.frame(), f, "checksums and lengths are right");
            if s.flags & RST != 0 {
                resets += 1;
                continue;
            }
            self.over |= s.flags & SYN != 0 && self.id.is_some();
            if self.over {
                continue;
            }
            if s.flags & SYN != 0 {
                if self.irs == 0 {
                    self.irs = s.seq;
                    self.sent = 1;
                }
                self.last = s;
                continue;
            }
            let ack = s.ack.wrapping_sub(self.iss);
            assert!(
                ack >= self.acked,
                "what is acknowledged stays so: {ack} < {}",
                self.acked
            );
            self.acked = ack;
            // No window scaling is agreed.
            let edge = ack + u32::from(s.window);
            assert!(edge >= self.edge, "the right edge never moves left");
            self.edge = edge;
            let end = s
                .seq
                .wrapping_sub(self.irs)
                .wrapping_add(s.payload.len() as u32);
            let end = end.wrapping_add(u32::from(s.flags & FIN != 0));
            assert!(
                end <= self.pushed as u32 + 2,
                "only what it was given is sent"
            );
            let at = u64::from(s.seq.wrapping_sub(self.irs).wrapping_sub(1));
            for (i, &b) in s.payload.iter().enumerate() {
                assert_eq!(b, Pattern::byte(SALT, at + i as u64));
            }
            self.sent = self.sent.max(end);
            self.last = s;
        }
        while let Some((id, _, e)) = self.stack.next_event() {
            if e.contains(Events::ACCEPTED) {
                self.id = self.id.or(Some(id));
            }
        }
        assert!(self.stack.held_buffers() <= HELD + HELD / 8 + 2);
        (n, resets)
    }

    fn give(&mut self, s: &Seg) -> (usize, usize) {
        let frame = s.frame();
        let now = self.now;
        self.stack.receive_burst(
            now,
            std::iter::once((frame.into(), info(RxChecksum::Unknown))),
        );
        self.poll()
    }
}

/// Segments of a peer that does what it likes on an established connection, between reads,
/// writes, pauses and a close of the stack's owner.
pub fn engine(data: &[u8]) {
    let mut words = data.iter().copied();
    let mut byte = || words.next();
    let mode = byte().unwrap_or(0);
    let mut p = Peer {
        stack: stack(),
        sink: VecSink::default(),
        now: Instant::from_millis(1),
        iss: u32::MAX - 5000 * u32::from(mode & 1),
        irs: 0,
        acked: 0,
        edge: 0,
        sent: 0,
        last: Seg::default(),
        ts: 1,
        pushed: 0,
        read: 0,
        id: None,
        over: false,
    };
    p.stack.listen(None, 80, 4, 0).expect("free");
    // Its neighbour entry comes from the ARP request that the SYN-ACK waits for.
    let mut syn = p.seg(SYN);
    if mode & 2 != 0 {
        syn.options = vec![4, 2, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0];
    }
    p.give(&syn);
    let arp: Vec<u8> = [
        &[
            2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 6, 0, 1, 8, 0, 6, 4, 0, 2,
        ][..],
        &[2, 0, 0, 0, 0, 1, 10, 0, 0, 1, 2, 0, 0, 0, 0, 2, 10, 0, 0, 2],
    ]
    .concat();
    let now = p.now;
    p.stack
        .receive_burst(now, std::iter::once((arp.into(), info(RxChecksum::Good))));
    p.poll();
    p.acked = 1;
    p.edge = 1;
    let stamped = |p: &Peer, s: &mut Seg, kind: u8| {
        let echo = p.last.ts().map_or(0, |t| t.0);
        s.options = match kind & 3 {
            _ if mode & 2 == 0 => vec![],
            3 => vec![8, 0, 1, 1],
            _ => [&[1, 1, 8, 10][..], &p.ts.to_be_bytes(), &echo.to_be_bytes()].concat(),
        };
    };
    let mut first = p.seg(ACK);
    stamped(&p, &mut first, 0);
    p.give(&first);
    let id = p.id.expect("accepted");
    let mut gone = false;
    while let (Some(op), Some(a), Some(b)) = (byte(), byte(), byte()) {
        if p.over {
            return;
        }
        match op & 15 {
            0..=8 => {
                let mut s = p.seg(ACK);
                let delta = i32::from(a as i8) * if op & 16 == 0 { 1 } else { 97 };
                // Mostly in order.
                let delta = if op & 0x60 == 0 { 0 } else { delta };
                let at = i64::from(p.acked) + i64::from(delta);
                s.seq = p.iss.wrapping_add(at as u32);
                s.payload = (0..u64::from(b) * 4)
                    .map(|i| Pattern::byte(SALT + 1, (at - 1 + i as i64) as u64))
                    .collect();
                s.window = u16::from(b) << (a & 7);
                if op & 15 == 7 {
                    s.ack = s.ack.wrapping_add(i32::from(b as i8) as u32);
                }
                if op & 15 == 8 {
                    s.flags = a & !RST;
                }
                p.ts = p.ts.wrapping_add(u32::from(a & 1));
                stamped(&p, &mut s, a >> 6);
                let (n, _) = p.give(&s);
                assert!(n <= 64, "{n} segments in answer to one");
            }
            9 => {
                p.poll();
                let mut s = p.seg(RST | if b & 1 == 0 { ACK } else { 0 });
                s.seq = s.seq.wrapping_add(i32::from(a as i8) as u32);
                stamped(&p, &mut s, 0);
                let (n, resets) = p.give(&s);
                assert!(n <= 1 && resets == 0, "a reset is never answered with one");
                gone |= a == 0;
            }
            10 | 11 => {
                let step = u64::from(a) << (b & 15);
                p.now = p.now + Duration::from_micros(step);
                p.poll();
            }
            12 => {
                if let Some(rx) = p.stack.receive_queue(id) {
                    let n = rx.len_bytes().min(usize::from(a) * 16 + 1);
                    let mut at = p.read;
                    rx.for_each_chunk(0, n, |c| {
                        for &x in c {
                            assert_eq!(x, Pattern::byte(SALT + 1, at), "byte {at}");
                            at += 1;
                        }
                    });
                    rx.consume(n);
                    p.read = at;
                }
                p.poll();
            }
            13 | 14 => {
                let len = u32::from(a) * 8 + 1;
                let r = Pattern {
                    salt: SALT,
                    start: p.pushed,
                };
                if p.pushed < 1 << 20 && p.stack.push_record(id, len, r, b & 1 == 0).is_ok() {
                    p.pushed += u64::from(len);
                }
                p.poll();
                p.stack.take_acked(id, |_| ());
            }
            _ => {
                if a > 200 {
                    let now = p.now;
                    p.stack.close(now, id);
                    p.poll();
                }
            }
        }
    }
    let c = p.stack.tcp_info(id);
    if let Some(c) = c {
        assert!(c.readable <= 20_000 && u64::from(c.in_flight) <= p.pushed + 1);
        assert!(!gone || c.state == TcpState::Closed || p.acked > 0);
    }
    // Whatever happened: without a peer it ends, or owes nothing.
    for _ in 0..400 {
        p.now = p.now + Duration::from_secs(1);
        p.poll();
    }
    let c = p.stack.tcp_info(id);
    assert!(c.is_none_or(|c| c.state == TcpState::Closed || (c.in_flight == 0 && c.unsent == 0)));
}
