//! A simulated network in virtual time: two stacks joined by links that lose, reorder, duplicate,
//! corrupt and delay, all from one seed. For the tests of this crate and of those above it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::time::Duration;

pub mod forge;
mod mangle;

pub use mangle::mark;

use crate::base::buffer::{RecvBuf, VecBuf};
use crate::base::frame_info::{FrameInfo, RxChecksum};
use crate::base::frame_sink::{FrameMeta, FrameSink, TxChecksum};
use crate::base::time::Instant;
use crate::config::{IpCidr, StackConfig};
use crate::stack::Stack;
use crate::wire::checksum::{self, OnesComplementSum};

/// SplitMix64: good enough for dice, the same everywhere.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator; the same seed gives the same numbers.
    pub fn new(seed: u64) -> Self {
        Rng(seed)
    }
    /// The next number, uniform over all 64-bit numbers.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// In `0..n`; 0 for an empty range.
    pub fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 {
            0
        } else {
            self.next_u64() % bound
        }
    }
    /// True once in `1 / p` times.
    pub fn chance(&mut self, probability: f64) -> bool {
        ((self.next_u64() >> 11) as f64) < probability * (1u64 << 53) as f64
    }
}

/// A record whose bytes the simulated sink can read.
pub trait RecordBytes {
    /// Appends the bytes `[offset, offset + len)` of the record to `out`.
    fn read(&self, offset: u32, len: u32, out: &mut Vec<u8>);
}

impl RecordBytes for Vec<u8> {
    fn read(&self, offset: u32, len: u32, out: &mut Vec<u8>) {
        out.extend_from_slice(&self[offset as usize..(offset + len) as usize]);
    }
}

/// Part of an endless pattern that starts at a stream position: makes big transfers checkable
/// without storing them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// Tells patterns from one another.
    pub salt: u64,
    /// Position in the stream of the record's first byte.
    pub start: u64,
}

impl Pattern {
    /// The byte at a position of the stream.
    pub fn byte(salt: u64, at: u64) -> u8 {
        ((at ^ salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 51) as u8
    }
}

impl RecordBytes for Pattern {
    fn read(&self, offset: u32, len: u32, out: &mut Vec<u8>) {
        let from = self.start + u64::from(offset);
        out.extend((from..from + u64::from(len)).map(|at| Pattern::byte(self.salt, at)));
    }
}

/// Collects whole frames; completes checksums in software.
#[derive(Default)]
pub struct VecSink {
    /// Complete frames that were not taken yet, the oldest first.
    pub frames: VecDeque<(Vec<u8>, FrameMeta)>,
    open: Option<(Vec<u8>, FrameMeta, usize, OnesComplementSum)>,
    /// Most payload that one frame had.
    pub largest: u32,
    /// So many more frames are taken; `None`: all.
    pub space: Option<usize>,
}

impl VecSink {
    /// TCP segmentation offload, as a NIC does it.
    fn segment(&mut self, frame: &[u8], meta: FrameMeta, headers: usize) {
        let (l2, l3) = (usize::from(meta.l2_len), usize::from(meta.l3_len));
        let (head, payload) = frame.split_at(headers);
        let size = usize::from(meta.tso_segsz);
        assert!(payload.len() > size, "a super-segment has several segments");
        let tcp = l2 + l3;
        let seq = u32::from_be_bytes([head[tcp + 4], head[tcp + 5], head[tcp + 6], head[tcp + 7]]);
        let count = payload.len().div_ceil(size);
        for (index, part) in payload.chunks(size).enumerate() {
            let mut segment = head.to_vec();
            let tcp_len = (headers - tcp + part.len()) as u16;
            if meta.ipv6 {
                segment[l2 + 4..l2 + 6].copy_from_slice(&tcp_len.to_be_bytes());
            } else {
                segment[l2 + 2..l2 + 4].copy_from_slice(&(tcp_len + 20).to_be_bytes());
                segment[l2 + 10..l2 + 12].fill(0);
                let mut sum = OnesComplementSum::new();
                sum.add(&segment[l2..tcp]);
                segment[l2 + 10..l2 + 12].copy_from_slice(&(!sum.value()).to_be_bytes());
            }
            segment[tcp + 4..tcp + 8]
                .copy_from_slice(&seq.wrapping_add((index * size) as u32).to_be_bytes());
            if index + 1 < count {
                segment[tcp + 13] &= !0x09; // FIN and PSH go with the last
            }
            let mut length = OnesComplementSum::new();
            length.add(&segment[tcp + 16..tcp + 18]);
            length.add_word(tcp_len);
            segment[tcp + 16..tcp + 18].copy_from_slice(&length.value().to_be_bytes());
            let meta = FrameMeta {
                payload_len: part.len() as u32,
                tso_segsz: 0,
                ..meta
            };
            let mut sum = OnesComplementSum::new();
            sum.add(part);
            let done = checksum::complete_tcp_checksum(&segment, &meta, sum);
            segment[tcp + 16..tcp + 18].copy_from_slice(&done);
            segment.extend_from_slice(part);
            self.frames.push_back((segment, meta));
        }
    }
}

impl<R: RecordBytes> FrameSink<R> for VecSink {
    fn begin_frame(&mut self, headers: &[u8], meta: &FrameMeta) -> bool {
        assert!(self.open.is_none(), "begin inside a frame");
        match &mut self.space {
            Some(0) => return false,
            Some(left) => *left -= 1,
            None => {}
        }
        self.open = Some((
            headers.to_vec(),
            *meta,
            headers.len(),
            OnesComplementSum::new(),
        ));
        true
    }
    fn append_record(&mut self, _user: u64, record: &R, offset: u32, len: u32) {
        let (frame, _, _, sum) = self.open.as_mut().expect("append outside a frame");
        let at = frame.len();
        record.read(offset, len, frame);
        sum.add(&frame[at..]);
    }
    fn append_bytes(&mut self, bytes: &[u8]) {
        self.open
            .as_mut()
            .expect("bytes outside a frame")
            .0
            .extend_from_slice(bytes);
    }
    fn end_frame(&mut self) {
        let (mut frame, meta, headers, sum) = self.open.take().expect("end outside a frame");
        assert_eq!(
            frame.len(),
            headers + meta.payload_len as usize,
            "payload_len tells the truth"
        );
        self.largest = self.largest.max(meta.payload_len);
        if meta.tso_segsz > 0 {
            return self.segment(&frame, meta, headers);
        }
        // As a NIC does, or as the daemon's sink.
        if meta.checksum != TxChecksum::Complete && meta.l4_len > 0 {
            let done = checksum::complete_tcp_checksum(&frame[..headers], &meta, sum);
            let at = checksum::tcp_checksum_offset(&meta);
            frame[at..at + 2].copy_from_slice(&done);
        }
        self.frames.push_back((frame, meta));
    }
}

/// What a link does to frames.
#[derive(Clone, Copy, Debug)]
pub struct Impairment {
    /// Time that each frame needs.
    pub delay: Duration,
    /// Uniform extra delay up to this, which reorders.
    pub jitter: Duration,
    /// Probability that a frame is lost.
    pub loss: f64,
    /// Probability to enter a burst in which every other frame is lost, and to leave it.
    pub burst: (f64, f64),
    /// Probability to be held back by four delays.
    pub reorder: f64,
    /// Probability that a frame arrives twice.
    pub duplicate: f64,
    /// One bit flips behind the Ethernet header. ARP is spared: Ethernet's own CRC guards what
    /// has no other.
    pub corrupt: f64,
    /// Bits per second, 0: infinite.
    pub rate: u64,
    /// Frames waiting for `rate` before the tail is dropped.
    pub queue: usize,
    /// Frames waiting before ECN-capable ones are marked (RFC 3168); 0: never.
    pub mark: usize,
    /// Longest IP packet, 0: any. Longer ones vanish.
    pub mtu: u16,
    /// Probability that the sender gets an ICMP error about one that vanished (ICMP).
    pub icmp_error: f64,
    /// Probability that a segment's window is made smaller on its way, down to nothing.
    pub shrink: f64,
}

impl Impairment {
    /// A link that only delays.
    pub fn perfect(delay: Duration) -> Self {
        Impairment {
            delay,
            jitter: Duration::ZERO,
            loss: 0.0,
            burst: (0.0, 1.0),
            reorder: 0.0,
            duplicate: 0.0,
            corrupt: 0.0,
            rate: 0,
            queue: 1000,
            mark: 0,
            mtu: 0,
            icmp_error: 0.0,
            shrink: 0.0,
        }
    }
}

struct SimLink {
    what: Impairment,
    in_burst: bool,
    free_at: u64,
}

/// A data segment as it left: for the proof that retransmissions keep boundaries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SentSegment {
    /// The host that sent it.
    pub from: usize,
    /// Sequence number of the first payload byte.
    pub seq: u32,
    /// Bytes of payload.
    pub payload: u32,
    /// What the stack said: sent before.
    pub retransmission: bool,
}

type Arrival = Reverse<(u64, u64, usize)>;

/// Two stacks and the links between them.
pub struct SimNet<R> {
    /// The virtual time.
    pub now: Instant,
    /// The two stacks.
    pub hosts: [Stack<VecBuf, R>; 2],
    /// Decides what happens to frames.
    pub rng: Rng,
    links: [SimLink; 2],
    arrivals: BinaryHeap<Arrival>,
    frames: BTreeMap<u64, Vec<u8>>,
    serial: u64,
    /// What the stacks have sent and the links have not yet carried.
    pub sinks: [VecSink; 2],
    /// Frames for which this says `false` vanish: (sender, frame).
    #[allow(clippy::type_complexity)]
    pub filter: Option<Box<dyn FnMut(usize, &[u8]) -> bool>>,
    /// Is shown every frame that a host sends (`true`) or receives: (when, host, sent, frame).
    #[allow(clippy::type_complexity)]
    pub tap: Option<Box<dyn FnMut(Instant, usize, bool, &[u8])>>,
    /// Every TCP segment with payload, when wanted.
    pub log: Option<Vec<SentSegment>>,
    /// Frames that were lost.
    pub lost: u64,
    /// Frames that the hosts sent onto a link.
    pub carried: u64,
    /// Frames marked with congestion experienced.
    pub marked: u64,
    /// Windows that were made smaller, packets that were too big.
    pub shrunk: u64,
    /// Packets that were longer than the MTU of a link.
    pub too_big: u64,
    /// For tests of tests: in every so many frames a byte of the payload is forged and the
    /// checksum made right; 0: never.
    pub forge: u64,
}

/// Usual configuration of host `i`: 10.0.0.1/24 and fd00::1/64, or .2 and ::2.
pub fn host_config(host: usize) -> StackConfig {
    let number = host as u8 + 1;
    let addrs: [IpCidr; 2] = [
        IpCidr::new(std::net::Ipv4Addr::new(10, 0, 0, number).into(), 24),
        IpCidr::new(
            std::net::Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, number.into()).into(),
            64,
        ),
    ];
    let mut config = StackConfig::new([2, 0, 0, 0, 0, number], addrs.to_vec());
    config.isn_key = [number; 16];
    config.hash_key = [0x40 + number; 16];
    config.max_connections = 1024;
    config
}

impl<R: RecordBytes> SimNet<R> {
    /// Two hosts, and the link from each of them to the other.
    pub fn new(seed: u64, configs: [StackConfig; 2], links: [Impairment; 2]) -> Self {
        let now = Instant::from_millis(1_000_000);
        SimNet {
            now,
            hosts: configs.map(|c| Stack::new(c, now).expect("a valid configuration")),
            rng: Rng::new(seed),
            links: links.map(|what| SimLink {
                what,
                in_burst: false,
                free_at: 0,
            }),
            arrivals: BinaryHeap::new(),
            frames: BTreeMap::new(),
            serial: 0,
            sinks: [VecSink::default(), VecSink::default()],
            filter: None,
            tap: None,
            log: None,
            lost: 0,
            carried: 0,
            marked: 0,
            shrunk: 0,
            too_big: 0,
            forge: 0,
        }
    }

    /// Two default hosts over perfect links of 50 us.
    pub fn perfect() -> Self {
        let link = Impairment::perfect(Duration::from_micros(50));
        Self::new(1, [host_config(0), host_config(1)], [link; 2])
    }

    /// Changes the link from this host.
    pub fn set_link(&mut self, from: usize, what: Impairment) {
        self.links[from].what = what;
    }

    fn carry(&mut self, to: usize, at: u64, frame: Vec<u8>) {
        self.serial += 1;
        self.frames.insert(self.serial, frame);
        self.arrivals.push(Reverse((at, self.serial, to)));
    }

    /// Puts a frame onto the wire as if `from` had sent it.
    pub fn inject(&mut self, from: usize, frame: Vec<u8>) {
        let at = self.now.0;
        self.carry(1 - from, at, frame);
    }

    fn transmit(&mut self, from: usize, mut frame: Vec<u8>, meta: &FrameMeta) {
        if let Some(log) = &mut self.log
            && meta.l4_len > 0
            && meta.payload_len > 0
        {
            let at = usize::from(meta.l2_len) + usize::from(meta.l3_len) + 4;
            let seq = u32::from_be_bytes([frame[at], frame[at + 1], frame[at + 2], frame[at + 3]]);
            log.push(SentSegment {
                from,
                seq,
                payload: meta.payload_len,
                retransmission: meta.retransmission,
            });
        }
        if meta.self_addressed {
            return self.carry(from, self.now.0, frame);
        }
        self.carried += 1;
        if let Some(tap) = &mut self.tap {
            tap(self.now, from, true, &frame);
        }
        if self
            .filter
            .as_mut()
            .is_some_and(|passes| !passes(from, &frame))
        {
            self.lost += 1;
            return;
        }
        let impairment = self.links[from].what;
        if impairment.mtu > 0 && mangle::packet_len(&frame) > usize::from(impairment.mtu) {
            self.too_big += 1;
            if self.rng.chance(impairment.icmp_error)
                && let Some(answer) = mangle::too_big(&frame, impairment.mtu)
            {
                self.carry(
                    from,
                    self.now.0 + impairment.delay.as_nanos() as u64,
                    answer,
                );
            }
            return;
        }
        if self.forge > 0 && self.carried.is_multiple_of(self.forge) && meta.payload_len > 0 {
            mangle::forge(&mut frame, meta);
        }
        let link = &mut self.links[from];
        let rng = &mut self.rng;
        if impairment.shrink > 0.0 && rng.chance(impairment.shrink) {
            let share = if rng.chance(0.3) { 0 } else { rng.below(256) };
            self.shrunk += u64::from(mangle::shrink_window(&mut frame, share as u8));
        }
        link.in_burst = if link.in_burst {
            !rng.chance(impairment.burst.1)
        } else {
            rng.chance(impairment.burst.0)
        };
        if rng.chance(impairment.loss) || (link.in_burst && rng.chance(0.5)) {
            self.lost += 1;
            return;
        }
        let mut leave = self.now.0;
        let bits = (frame.len() as u64 + 24) * 8;
        if let Some(time) = (bits * 1_000_000_000).checked_div(impairment.rate) {
            let start = leave.max(link.free_at);
            if start - leave > time * impairment.queue as u64 {
                self.lost += 1;
                return;
            }
            if impairment.mark > 0 && start - leave > time * impairment.mark as u64 {
                self.marked += u64::from(mark(&mut frame));
            }
            link.free_at = start + time;
            leave = start + time;
        }
        let delay = impairment.delay.as_nanos() as u64;
        let mut at = leave + delay + rng.below(impairment.jitter.as_nanos() as u64 + 1);
        if rng.chance(impairment.reorder) {
            at += 4 * delay;
        }
        let again = rng
            .chance(impairment.duplicate)
            .then(|| at + rng.below(2 * delay + 1));
        let arp = frame[12..14] == [8, 6] || frame[12..14] == [0x81, 0] && frame[16..18] == [8, 6];
        if rng.chance(impairment.corrupt) && !arp {
            let bit = rng.below((frame.len() as u64 - 14) * 8);
            frame[14 + bit as usize / 8] ^= 1 << (bit % 8);
        }
        if let Some(at) = again {
            self.carry(1 - from, at, frame.clone());
        }
        self.carry(1 - from, at, frame);
    }

    /// What the sinks of flushes collected goes onto the wire.
    pub fn drain_sinks(&mut self) {
        for from in 0..2 {
            while let Some((frame, meta)) = self.sinks[from].frames.pop_front() {
                self.transmit(from, frame, &meta);
            }
        }
    }

    /// Polls both stacks.
    pub fn poll(&mut self) {
        for host in 0..2 {
            self.hosts[host].poll(self.now, &mut self.sinks[host]);
        }
        self.drain_sinks();
    }

    /// Flushes one connection.
    pub fn flush(&mut self, host: usize, id: crate::base::ids::ConnId) {
        self.hosts[host].flush(self.now, id, &mut self.sinks[host]);
        self.drain_sinks();
    }

    fn next_time(&self) -> Option<u64> {
        let frame = self.arrivals.peek().map(|Reverse((at, _, _))| *at);
        let timers = self
            .hosts
            .iter()
            .filter_map(|host| host.next_deadline())
            .map(|deadline| deadline.0);
        frame.into_iter().chain(timers).min()
    }

    /// Polls, then goes to the next moment at which something happens and delivers what arrives.
    /// `false`: nothing will ever happen, or `limit` is reached.
    pub fn step(&mut self, limit: Instant) -> bool {
        self.poll();
        let Some(next) = self.next_time() else {
            return false;
        };
        if next > limit.0 {
            self.now = self.now.max(limit);
            return false;
        }
        self.now = self.now.max(Instant(next));
        let mut bursts: [Vec<VecBuf>; 2] = [vec![], vec![]];
        while let Some(&Reverse((at, serial, to))) = self.arrivals.peek() {
            if at > self.now.0 {
                break;
            }
            self.arrivals.pop();
            if let Some(frame) = self.frames.remove(&serial) {
                if let Some(tap) = &mut self.tap {
                    tap(self.now, to, false, &frame);
                }
                bursts[to].push(frame.into());
            }
        }
        let info = FrameInfo {
            checksum: RxChecksum::Unknown,
            rss_hash: 0,
        };
        for (host, burst) in self.hosts.iter_mut().zip(bursts) {
            if !burst.is_empty() {
                host.receive_burst(self.now, burst.into_iter().map(|frame| (frame, info)));
            }
        }
        true
    }

    /// Steps until `done` or for `time`; returns whether it was done.
    pub fn run(&mut self, time: Duration, mut done: impl FnMut(&mut Self) -> bool) -> bool {
        let limit = self.now + time;
        loop {
            if done(self) {
                return true;
            }
            if !self.step(limit) {
                return done(self);
            }
        }
    }

    /// Frames that are on the wire towards `host`.
    pub fn in_transit(&self) -> usize {
        self.frames.len()
    }
}

/// Reads everything in order and consumes it.
pub fn read_all<R>(host: &mut Stack<VecBuf, R>, id: crate::base::ids::ConnId) -> Vec<u8> {
    let Some(rx) = host.receive_queue(id) else {
        return vec![];
    };
    let mut bytes = Vec::with_capacity(rx.len_bytes());
    rx.chunks().for_each(|chunk| bytes.extend_from_slice(chunk));
    let count = bytes.len();
    rx.consume(count);
    bytes
}

const _: fn() = || {
    fn is_buf<B: RecvBuf>() {}
    is_buf::<VecBuf>();
};
