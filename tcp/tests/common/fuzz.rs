//! The bodies of the fuzz targets; on stable they run as property tests (`tests/stack/fuzz_bodies.rs`).

use std::time::Duration;

use siw_net::{ConnId, FrameInfo, Instant, RxChecksum, VecBuf};
use siw_tcp::{Events, Stack, TcpState};
use siw_tcp_sim::forge::fix_ipv4;
use siw_tcp_sim::{Pattern, VecSink, host_config};

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
    let mut config = host_config(1);
    config.tcp.max_recv_buffers = HELD;
    config.tcp.max_held_buffers = 2 * HELD;
    config.tcp.max_connections = 8;
    config.net.reassembly.max_datagrams = 4;
    config.net.reassembly.max_fragments = FRAGMENTS;
    config.net.reassembly.timeout = Duration::from_millis(20);
    config.tcp.recv_window = 20_000;
    Stack::new(config, Instant::from_millis(1)).expect("a valid configuration")
}

/// Raw frames as a port delivers them: arbitrary bytes, with checksums reported as good.
pub fn frames(data: &[u8]) {
    let mut host = stack();
    let mut now = Instant::from_millis(1);
    host.listen(None, 80, 4, 0).expect("free");
    let mut sink = VecSink::default();
    let mut rest = data;
    while let [count, tail @ ..] = rest {
        let (frame, next) = tail.split_at(tail.len().min(usize::from(*count)));
        rest = next;
        let mut frame = frame.to_vec();
        // Mostly to our address, so that the frames are processed further.
        if count & 1 == 0 && frame.len() >= 14 {
            frame[..6].copy_from_slice(&[2, 0, 0, 0, 0, 2]);
            frame[12] = if count & 2 == 0 { 8 } else { 0x86 };
            frame[13] = if count & 2 == 0 { 0 } else { 0xdd };
        }
        // Valid enough to be processed beyond the IP header: extension headers and fragments of few
        // datagrams from one neighbour.
        if count & 17 == 16 && frame.len() >= 54 {
            let len = (frame.len() - 14) as u16;
            if count & 2 == 0 {
                frame[14] = 0x45;
                frame[16..18].copy_from_slice(&len.to_be_bytes());
                frame[18] = 0;
                frame[26..34].copy_from_slice(&[10, 0, 0, 9, 10, 0, 0, 2]);
                fix_ipv4(&mut frame[14..34]);
            } else {
                frame[14] = 0x60;
                frame[18..20].copy_from_slice(&(len - 40).to_be_bytes());
                frame[20] = [0, 43, 44, 60][usize::from(frame[20] & 3)];
                frame[22..54].fill(0);
                (frame[22], frame[37], frame[38], frame[53]) = (0xfd, 9, 0xfd, 2);
            }
        }
        let checksum = match count & 12 {
            0 => RxChecksum::Unknown,
            _ => RxChecksum::Good,
        };
        host.receive_burst(now, std::iter::once((frame.into(), info(checksum))));
        host.poll(now, &mut sink);
        while host.next_event().is_some() {}
        now = now + Duration::from_millis(u64::from(count & 7));
        assert!(host.connection_count() <= 8 && host.held_buffers() <= 2 * HELD + 8);
        assert!(host.held_fragments() <= FRAGMENTS);
    }
    assert!(sink.frames.len() <= 8 * data.len() + 8, "no storm");
}

/// State of the peer of the stack under test.
struct Peer {
    stack: Host,
    sink: VecSink,
    now: Instant,
    /// Initial sequence numbers: `iss` of the peer, `irs` of the stack.
    iss: u32,
    irs: u32,
    /// The stack's last ACK and right edge, as offsets from `iss`.
    acked: u32,
    edge: u32,
    /// End of the data that the stack sent, as an offset from `irs`.
    sent: u32,
    last: Seg,
    ts: u32,
    /// Bytes that the owner of the stack pushed.
    pushed: u64,
    read: u64,
    id: Option<ConnId>,
    /// A SYN reopened the four-tuple: the recorded state no longer applies.
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

    /// Polls, and checks each frame sent; returns the number of TCP segments and of resets.
    fn poll(&mut self) -> (usize, usize) {
        self.stack.poll(self.now, &mut self.sink);
        let (mut count, mut resets) = (0, 0);
        while let Some((frame, _)) = self.sink.frames.pop_front() {
            let Some(segment) = Seg::parse(1, &frame) else {
                continue;
            };
            count += 1;
            assert_eq!(segment.frame(), frame, "checksums and lengths are right");
            if segment.flags & RST != 0 {
                resets += 1;
                continue;
            }
            self.over |= segment.flags & SYN != 0 && self.id.is_some();
            if self.over {
                continue;
            }
            if segment.flags & SYN != 0 {
                if self.irs == 0 {
                    self.irs = segment.seq;
                    self.sent = 1;
                }
                self.last = segment;
                continue;
            }
            let ack = segment.ack.wrapping_sub(self.iss);
            assert!(
                ack >= self.acked,
                "the acknowledgement number moved left: {ack} < {}",
                self.acked
            );
            self.acked = ack;
            // No window scaling is agreed.
            let edge = ack + u32::from(segment.window);
            assert!(edge >= self.edge, "the right edge never moves left");
            self.edge = edge;
            let end = segment
                .seq
                .wrapping_sub(self.irs)
                .wrapping_add(segment.payload.len() as u32);
            let end = end.wrapping_add(u32::from(segment.flags & FIN != 0));
            assert!(end <= self.pushed as u32 + 2, "sent data was never pushed");
            let at = u64::from(segment.seq.wrapping_sub(self.irs).wrapping_sub(1));
            for (i, &byte) in segment.payload.iter().enumerate() {
                assert_eq!(byte, Pattern::byte(SALT, at + i as u64));
            }
            self.sent = self.sent.max(end);
            self.last = segment;
        }
        while let Some((id, _, events)) = self.stack.next_event() {
            if events.contains(Events::ACCEPTED) {
                self.id = self.id.or(Some(id));
            }
        }
        assert!(self.stack.held_buffers() <= HELD + HELD / 8 + 2);
        (count, resets)
    }

    fn give(&mut self, segment: &Seg) -> (usize, usize) {
        let frame = segment.frame();
        let now = self.now;
        self.stack.receive_burst(
            now,
            std::iter::once((frame.into(), info(RxChecksum::Unknown))),
        );
        self.poll()
    }
}

/// Arbitrary segments of a peer on an established connection, interleaved with reads, writes, pauses
/// and a close by the stack's owner.
pub fn engine(data: &[u8]) {
    let mut words = data.iter().copied();
    let mut byte = || words.next();
    let mode = byte().unwrap_or(0);
    let mut peer = Peer {
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
    peer.stack.listen(None, 80, 4, 0).expect("free");
    // The neighbour entry comes from the ARP request that precedes the SYN-ACK.
    let mut syn = peer.seg(SYN);
    if mode & 2 != 0 {
        syn.options = vec![4, 2, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0];
    }
    peer.give(&syn);
    let arp: Vec<u8> = [
        &[
            2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 6, 0, 1, 8, 0, 6, 4, 0, 2,
        ][..],
        &[2, 0, 0, 0, 0, 1, 10, 0, 0, 1, 2, 0, 0, 0, 0, 2, 10, 0, 0, 2],
    ]
    .concat();
    let now = peer.now;
    peer.stack
        .receive_burst(now, std::iter::once((arp.into(), info(RxChecksum::Good))));
    peer.poll();
    peer.acked = 1;
    peer.edge = 1;
    let stamped = |segment: &Peer, seg: &mut Seg, kind: u8| {
        let echo = segment.last.ts().map_or(0, |stamps| stamps.0);
        seg.options = match kind & 3 {
            _ if mode & 2 == 0 => vec![],
            3 => vec![8, 0, 1, 1],
            _ => [
                &[1, 1, 8, 10][..],
                &segment.ts.to_be_bytes(),
                &echo.to_be_bytes(),
            ]
            .concat(),
        };
    };
    let mut first = peer.seg(ACK);
    stamped(&peer, &mut first, 0);
    peer.give(&first);
    let id = peer.id.expect("accepted");
    let mut gone = false;
    while let (Some(op), Some(first), Some(second)) = (byte(), byte(), byte()) {
        if peer.over {
            return;
        }
        match op & 15 {
            0..=8 => {
                let mut segment = peer.seg(ACK);
                let delta = i32::from(first as i8) * if op & 16 == 0 { 1 } else { 97 };
                // Mostly in order.
                let delta = if op & 0x60 == 0 { 0 } else { delta };
                let at = i64::from(peer.acked) + i64::from(delta);
                segment.seq = peer.iss.wrapping_add(at as u32);
                segment.payload = (0..u64::from(second) * 4)
                    .map(|i| Pattern::byte(SALT + 1, (at - 1 + i as i64) as u64))
                    .collect();
                segment.window = u16::from(second) << (first & 7);
                if op & 15 == 7 {
                    segment.ack = segment.ack.wrapping_add(i32::from(second as i8) as u32);
                }
                if op & 15 == 8 {
                    segment.flags = first & !RST;
                }
                peer.ts = peer.ts.wrapping_add(u32::from(first & 1));
                stamped(&peer, &mut segment, first >> 6);
                let (count, _) = peer.give(&segment);
                assert!(count <= 64, "{count} segments in answer to one");
            }
            9 => {
                peer.poll();
                let mut segment = peer.seg(RST | if second & 1 == 0 { ACK } else { 0 });
                segment.seq = segment.seq.wrapping_add(i32::from(first as i8) as u32);
                stamped(&peer, &mut segment, 0);
                let (count, resets) = peer.give(&segment);
                assert!(
                    count <= 1 && resets == 0,
                    "a reset is never answered with one"
                );
                let state = peer.stack.tcp_info(id).map(|info| info.state);
                let is_over = state.is_none_or(|state| state == TcpState::Closed);
                // At RCV.NXT it ends the connection (RFC 5961 section 3.2), except in TIME-WAIT
                // (RFC 1337). While an ACK is delayed, the peer's view of RCV.NXT lags behind: then a
                // challenge ACK answers.
                assert!(
                    first != 0 || is_over || count == 1 || state == Some(TcpState::TimeWait),
                    "a reset at the next sequence number is ignored in {state:?}"
                );
                gone |= is_over;
            }
            10 | 11 => {
                let step = u64::from(first) << (second & 15);
                peer.now = peer.now + Duration::from_micros(step);
                peer.poll();
            }
            12 => {
                if let Some(rx) = peer.stack.receive_queue(id) {
                    let count = rx.len_bytes().min(usize::from(first) * 16 + 1);
                    let mut at = peer.read;
                    rx.for_each_chunk(0, count, |chunk| {
                        for &byte in chunk {
                            assert_eq!(byte, Pattern::byte(SALT + 1, at), "byte {at}");
                            at += 1;
                        }
                    });
                    rx.consume(count);
                    peer.read = at;
                }
                peer.poll();
            }
            13 | 14 => {
                let len = u32::from(first) * 8 + 1;
                let record = Pattern {
                    salt: SALT,
                    start: peer.pushed,
                };
                if peer.pushed < 1 << 20
                    && peer
                        .stack
                        .push_record(id, len, record, second & 1 == 0)
                        .is_ok()
                {
                    peer.pushed += u64::from(len);
                }
                peer.poll();
                peer.stack.take_acked(id, |_| ());
            }
            _ => {
                if first > 200 {
                    let now = peer.now;
                    peer.stack.close(now, id);
                    peer.poll();
                }
            }
        }
    }
    let info = peer.stack.tcp_info(id);
    if let Some(info) = info {
        assert!(info.readable <= 20_000 && u64::from(info.in_flight) <= peer.pushed + 1);
        assert!(
            !gone || info.state == TcpState::Closed,
            "{info:?} after a reset"
        );
    }
    // In any case, without a peer the connection ends or has nothing pending.
    for _ in 0..400 {
        peer.now = peer.now + Duration::from_secs(1);
        peer.poll();
    }
    let info = peer.stack.tcp_info(id);
    assert!(info.is_none_or(
        |info| info.state == TcpState::Closed || (info.in_flight == 0 && info.unsent == 0)
    ));
}
