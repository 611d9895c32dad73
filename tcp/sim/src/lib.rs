//! A simulated network in virtual time: two stacks joined by links that lose, reorder, duplicate,
//! corrupt and delay frames, determined by one seed. For tests of this crate and of crates that use it.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::time::Duration;

pub mod byte_ranges;
mod flow_state;
pub mod forge;
mod impairment;
mod mangle;
mod peers;
mod rng;
pub mod seeds;
mod shared_path;
mod sink;
pub mod wire_oracle;
pub mod wire_view;

pub use impairment::Impairment;
pub use mangle::mark;
pub use rng::Rng;
pub use shared_path::{PathShares, SharedPath};
pub use sink::{Pattern, RecordBytes, VecSink, append_payload};

use siw_net::{FrameInfo, FrameMeta, Instant, IpCidr, RecvBuf, RxChecksum, VecBuf};
use siw_tcp::{Stack, StackConfig};

use crate::wire_oracle::WireOracle;

struct SimLink {
    what: Impairment,
    in_burst: bool,
    free_at: u64,
    /// When the frames that wait or are being sent will have left.
    departures: VecDeque<u64>,
}

/// A data segment as sent, to verify that retransmissions keep segment boundaries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SentSegment {
    /// The host that sent it.
    pub from: usize,
    /// Sequence number of the first payload byte.
    pub seq: u32,
    /// Bytes of payload.
    pub payload: u32,
    /// The stack marked the frame as a retransmission.
    pub retransmission: bool,
}

type Arrival = Reverse<(u64, u64, usize)>;

/// Two stacks and the links between them.
pub struct SimNet<R> {
    /// The virtual time.
    pub now: Instant,
    /// The two stacks.
    pub hosts: [Stack<VecBuf, R>; 2],
    /// Decides the fate of frames.
    pub rng: Rng,
    links: [SimLink; 2],
    arrivals: BinaryHeap<Arrival>,
    /// Frames on the wire, and whether each is intact.
    frames: BTreeMap<u64, (Vec<u8>, bool)>,
    /// Offset of each host's clock ahead of `now`.
    clock_offsets: [Duration; 2],
    /// A host that is down receives nothing, sends nothing and runs no timers.
    is_up: [bool; 2],
    /// Checks every frame, if present.
    pub oracle: Option<WireOracle>,
    serial: u64,
    /// Frames that the stacks have sent and the links have not carried yet.
    pub sinks: [VecSink; 2],
    /// Called with (sender, frame); returns `false` to drop the frame.
    #[allow(clippy::type_complexity)]
    pub filter: Option<Box<dyn FnMut(usize, &[u8]) -> bool>>,
    /// Called with every frame that a host sends (`true`) or receives: (time, host, sent, frame).
    #[allow(clippy::type_complexity)]
    pub tap: Option<Box<dyn FnMut(Instant, usize, bool, &[u8])>>,
    /// Every TCP segment with payload, if present.
    pub log: Option<Vec<SentSegment>>,
    /// Frames dropped by the filter, by loss, by a full queue or for undetectable damage.
    pub lost: u64,
    /// Frames that were damaged.
    pub damaged: u64,
    /// Frames that arrived at a host that was down.
    pub unheard: u64,
    /// Frames that arrived at a host that was up.
    pub arrived: u64,
    /// Frames that the hosts sent onto a link.
    pub carried: u64,
    /// Frames marked Congestion Experienced.
    pub marked: u64,
    /// Segments whose window was reduced.
    pub shrunk: u64,
    /// Segments that arrived as part of a super-segment.
    pub coalesced: u64,
    /// D-SACK blocks that were removed.
    pub dsacks_stripped: u64,
    /// Packets longer than the MTU of a link.
    pub too_big: u64,
    /// To test the tests: in every `forge`-th frame, a payload byte is changed and the checksum
    /// corrected; 0: never.
    pub forge: u64,
}

/// Default configuration of `host`: 10.0.0.1/24 and fd00::1/64 for host 0, .2 and ::2 for host 1.
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
    config.tcp.isn_key = [number; 16];
    config.tcp.hash_key = [0x40 + number; 16];
    config.tcp.max_connections = 1024;
    config
}

impl<R: RecordBytes> SimNet<R> {
    /// Creates two hosts and a link from each to the other.
    pub fn new(seed: u64, configs: [StackConfig; 2], links: [Impairment; 2]) -> Self {
        Self::with_clocks(seed, configs, links, [Duration::ZERO; 2])
    }

    /// Like [`new`](Self::new), with host clocks ahead of the network's by `clock_offsets`, as on
    /// machines started at different times. [`SimNet::clock`] returns the time of a host.
    pub fn with_clocks(
        seed: u64,
        configs: [StackConfig; 2],
        links: [Impairment; 2],
        clock_offsets: [Duration; 2],
    ) -> Self {
        let now = Instant::from_millis(1_000_000);
        let mut offsets = clock_offsets.into_iter();
        let hosts = configs.map(|config| {
            let start = now + offsets.next().unwrap_or_default();
            Stack::new(config, start).expect("a valid configuration")
        });
        SimNet {
            now,
            hosts,
            clock_offsets,
            is_up: [true; 2],
            oracle: None,
            rng: Rng::new(seed),
            links: links.map(|what| SimLink {
                what,
                in_burst: false,
                free_at: 0,
                departures: VecDeque::new(),
            }),
            arrivals: BinaryHeap::new(),
            frames: BTreeMap::new(),
            serial: 0,
            sinks: [VecSink::default(), VecSink::default()],
            filter: None,
            tap: None,
            log: None,
            lost: 0,
            damaged: 0,
            unheard: 0,
            arrived: 0,
            carried: 0,
            marked: 0,
            shrunk: 0,
            coalesced: 0,
            dsacks_stripped: 0,
            too_big: 0,
            forge: 0,
        }
    }

    /// Creates two default hosts and perfect links with a delay of 50 us.
    pub fn perfect() -> Self {
        let link = Impairment::perfect(Duration::from_micros(50));
        Self::new(1, [host_config(0), host_config(1)], [link; 2])
    }

    /// Changes the link from this host.
    pub fn set_link(&mut self, from: usize, what: Impairment) {
        self.links[from].what = what;
    }

    /// Returns the time on this host's clock, the `now` of every call to its stack.
    pub fn clock(&self, host: usize) -> Instant {
        self.now + self.clock_offsets[host]
    }

    /// Stops a host, or resumes it with its old stack.
    pub fn set_up(&mut self, host: usize, is_up: bool) {
        self.is_up[host] = is_up;
    }

    /// Restarts a host as after a crash: its stack starts empty.
    pub fn restart(&mut self, host: usize, config: StackConfig) {
        let now = self.clock(host);
        self.hosts[host] = Stack::new(config, now).expect("a valid configuration");
        self.sinks[host] = VecSink::default();
        self.is_up[host] = true;
    }

    fn carry(&mut self, to: usize, at: u64, frame: Vec<u8>) {
        self.carry_damaged(to, at, frame, true);
    }

    fn carry_damaged(&mut self, to: usize, at: u64, frame: Vec<u8>, intact: bool) {
        let moderation = self.links[1 - to].what.coalesce.as_nanos() as u64;
        let at = match moderation {
            0 => at,
            _ => at.next_multiple_of(moderation),
        };
        self.serial += 1;
        self.frames.insert(self.serial, (frame, intact));
        self.arrivals.push(Reverse((at, self.serial, to)));
    }

    /// Delivers a frame at once as if `from` had sent it.
    pub fn inject(&mut self, from: usize, frame: Vec<u8>) {
        let at = self.now.0;
        self.carry(1 - from, at, frame);
    }

    fn transmit(&mut self, from: usize, frame: Vec<u8>, meta: &FrameMeta) {
        let stats = self.hosts[from].stats();
        let sent = (self.oracle.as_mut())
            .and_then(|oracle| oracle.on_sent(self.now, from, &frame, &stats));
        let copies = self.send_over_link(from, frame, meta);
        if let Some(sent) = sent
            && let Some(oracle) = &mut self.oracle
        {
            oracle.on_way(&sent, copies);
        }
    }

    /// Delivers a frame as if `from` had sent it, after the delay of the link.
    pub fn inject_on_path(&mut self, from: usize, frame: Vec<u8>) {
        let at = self.now + self.links[from].what.delay;
        self.carry(1 - from, at.0, frame);
    }

    /// Sends a frame over the link. Returns how many intact copies will arrive.
    fn send_over_link(&mut self, from: usize, mut frame: Vec<u8>, meta: &FrameMeta) -> u32 {
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
            self.carry(from, self.now.0, frame);
            return 1;
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
            return 0;
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
            return 0;
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
        if impairment.strips_dsack {
            self.dsacks_stripped += u64::from(peers::strip_dsack(&mut frame));
        }
        link.in_burst = if link.in_burst {
            !rng.chance(impairment.burst.1)
        } else {
            rng.chance(impairment.burst.0)
        };
        if rng.chance(impairment.loss) || (link.in_burst && rng.chance(0.5)) {
            self.lost += 1;
            return 0;
        }
        let mut leave = self.now.0;
        let bits = (frame.len() as u64 + 24) * 8;
        if let Some(time) = (bits * 1_000_000_000).checked_div(impairment.rate) {
            let has_left = |at: &u64| *at <= leave;
            while link.departures.front().is_some_and(has_left) {
                link.departures.pop_front();
            }
            let ahead = link.departures.len();
            if ahead > impairment.queue {
                self.lost += 1;
                return 0;
            }
            if impairment.mark > 0 && ahead > impairment.mark {
                self.marked += u64::from(mark(&mut frame));
            }
            link.free_at = leave.max(link.free_at) + time;
            leave = link.free_at;
            link.departures.push_back(leave);
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
        let mut intact = true;
        if rng.chance(impairment.corrupt) && !arp {
            mangle::damage(&mut frame, rng, impairment.corrupt_bits);
            intact = false;
            self.damaged += 1;
            if impairment.corrupt_bits > 1 && wire_view::has_valid_checksums(&frame) {
                self.lost += 1;
                return 0;
            }
        }
        let copies = u32::from(intact) * (1 + u32::from(again.is_some()));
        if let Some(at) = again {
            self.carry_damaged(1 - from, at, frame.clone(), intact);
        }
        self.carry_damaged(1 - from, at, frame, intact);
        copies
    }

    /// Puts the frames collected in the sinks on the wire.
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
            if self.is_up[host] {
                let now = self.clock(host);
                self.hosts[host].poll(now, &mut self.sinks[host]);
            }
        }
        self.drain_sinks();
    }

    /// Flushes one connection.
    pub fn flush(&mut self, host: usize, id: siw_net::ConnId) {
        let now = self.clock(host);
        self.hosts[host].flush(now, id, &mut self.sinks[host]);
        self.drain_sinks();
    }

    fn next_time(&self) -> Option<u64> {
        let frame = self.arrivals.peek().map(|Reverse((at, _, _))| *at);
        let timers = (0..2).filter(|&host| self.is_up[host]).filter_map(|host| {
            let deadline = self.hosts[host].next_deadline()?;
            let ahead = self.clock_offsets[host].as_nanos() as u64;
            Some(deadline.0.saturating_sub(ahead))
        });
        frame.into_iter().chain(timers).min()
    }

    /// Polls both stacks, then advances to the next event and delivers the frames that arrive.
    /// Returns `false` if no event is pending or `limit` is reached.
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
        let mut bursts: [Vec<(Vec<u8>, bool)>; 2] = [vec![], vec![]];
        while let Some(&Reverse((at, serial, to))) = self.arrivals.peek() {
            if at > self.now.0 {
                break;
            }
            self.arrivals.pop();
            if let Some((frame, intact)) = self.frames.remove(&serial) {
                if !self.is_up[to] {
                    self.unheard += 1;
                    continue;
                }
                self.arrived += 1;
                if let Some(tap) = &mut self.tap {
                    tap(self.now, to, false, &frame);
                }
                if intact && let Some(oracle) = &mut self.oracle {
                    oracle.on_arrival(self.now, to, &frame);
                }
                bursts[to].push((frame, intact));
            }
        }
        let info = FrameInfo {
            checksum: RxChecksum::Unknown,
            rss_hash: 0,
        };
        for (host, burst) in bursts.into_iter().enumerate() {
            if !burst.is_empty() {
                let now = self.clock(host);
                let burst: Vec<_> = if self.links[1 - host].what.coalesce.is_zero() {
                    burst.into_iter().map(|(frame, _)| frame).collect()
                } else {
                    let (frames, joined) = peers::coalesce(burst);
                    self.coalesced += joined;
                    frames
                };
                let burst = burst.into_iter().map(|frame| (frame.into(), info));
                self.hosts[host].receive_burst(now, burst);
            }
        }
        true
    }

    /// Steps until `done` holds or `time` has passed; returns whether `done` holds.
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

    /// Number of frames on the wire, in both directions.
    pub fn in_transit(&self) -> usize {
        self.frames.len()
    }
}

/// Reads and consumes all received bytes.
pub fn read_all<R>(host: &mut Stack<VecBuf, R>, id: siw_net::ConnId) -> Vec<u8> {
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
