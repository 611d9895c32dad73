//! Two stacks, one at each end of a link, driven by one thread as the daemon's worker drives its
//! ports: receive, events, new records, remaining output, transmit; the clock is read once per
//! turn.

use anyhow::{anyhow, bail};
use std::time::Duration;

use hdrhistogram::Histogram;
use siw_net::{ConnId, FrameInfo, Instant, IpCidr};
use siw_ports::{ReceiveQueue, TransmitQueue};
use siw_tcp::{CongestionControl, Events, Stack, StackConfig, StackStats, TsoLimits};

use super::forward::ImpairedLink;
use super::link::{MEMORY_BYTES, PortEnd, SourceMemory};
use super::sink::{PairSink, RecordLen};
use super::{BenchClock, MSS};
use crate::measurement::{gigabits_per_second, new_histogram};
use siwd::datapath::rx_frame::{RxFrame, recycle_dropped_frames};

const PORT: u16 = 7;
/// Segments sent in one turn by one connection or by many together.
const SEGMENTS_PER_TURN: usize = 64;

/// Load of the sending side in a turn.
#[derive(Clone, Copy)]
enum SenderLoad {
    Nothing,
    /// This many connections, each up to its window.
    Full(usize),
    /// Number of connections in turn and segments of each, [`SEGMENTS_PER_TURN`] segments in all.
    RoundRobin(usize, usize),
}

/// A link, and two stacks with the connections between them.
pub struct StackPair {
    hosts: [Stack<RxFrame, RecordLen>; 2],
    conns: Vec<ConnId>,
    clock: BenchClock,
    opened: [usize; 2],
    received: u64,
    /// The second host echoes the bytes that it receives.
    echo: bool,
    /// Bytes that the first host received back.
    echoed: u64,
    next: usize,
    at: usize,
    /// Maximum segments that one connection queues in a turn, in two records: a stream hands over
    /// more than one segment at a time.
    segments_per_turn: usize,
}

/// Parameters of a pair.
#[derive(Debug, Clone)]
pub struct StackPairConfig {
    /// Maximum number of connections.
    pub connections: usize,
    /// TSO limits of the port; `None`: no super-segments.
    pub tso: Option<TsoLimits>,
    /// The stacks compute checksums.
    pub software_checksum: bool,
    /// The sender's congestion control.
    pub congestion: CongestionControl,
}

impl StackPair {
    /// See [`Stack::CONNECTION_BYTES`].
    pub const CONNECTION_BYTES: usize = Stack::<RxFrame, RecordLen>::CONNECTION_BYTES;
    /// See [`Stack::HOT_BYTES`].
    pub const HOT_BYTES: usize = Stack::<RxFrame, RecordLen>::HOT_BYTES;

    /// Creates two stacks that can reach each other, without connections.
    pub fn new(clock: BenchClock, config: &StackPairConfig) -> anyhow::Result<StackPair> {
        let stack = |n: u8| {
            let addr = std::net::Ipv4Addr::new(10, 77, 1, n);
            let mut stack_config =
                StackConfig::new([2, 0, 0, 77, 1, n], vec![IpCidr::new(addr.into(), 24)]);
            stack_config.tcp.isn_key = [n; 16];
            stack_config.tcp.hash_key = [0x40 + n; 16];
            stack_config.tcp.max_connections = config.connections.max(1024);
            stack_config.tcp.tx_checksum = config.software_checksum;
            stack_config.tcp.tso = config.tso;
            stack_config.tcp.congestion = config.congestion;
            Stack::new(stack_config, clock.read_clock()).map_err(anyhow::Error::new)
        };
        let mut hosts = [stack(1)?, stack(2)?];
        hosts[1].listen(None, PORT, 4096, 0)?;
        Ok(StackPair {
            hosts,
            conns: Vec::with_capacity(config.connections),
            clock,
            opened: [0; 2],
            received: 0,
            echo: false,
            echoed: 0,
            next: 0,
            at: 0,
            // Two super-segments of maximum size.
            segments_per_turn: config.tso.map_or(SEGMENTS_PER_TURN, |limits| {
                2 * usize::from(limits.max_segments)
            }),
        })
    }

    /// Opens connections until there are `connections`.
    pub fn open_connections(
        &mut self,
        link: &mut PairLink<'_>,
        connections: usize,
    ) -> anyhow::Result<()> {
        let end = std::time::Instant::now() + Duration::from_secs(20);
        while self.conns.len() < connections || self.opened != [connections; 2] {
            // Opens at most as many at a time as fit into the listener's backlog.
            let now = self.clock.read_clock();
            while self.conns.len() < connections && self.conns.len() < self.opened[1] + 256 {
                let to = (std::net::Ipv4Addr::new(10, 77, 1, 2), PORT).into();
                let conn = self.hosts[0].connect(now, None, None, to, 0);
                self.conns.push(conn?);
            }
            self.run_turn(link, SenderLoad::Nothing);
            if std::time::Instant::now() > end {
                bail!(
                    "{:?} of {connections} connections are open after 20 s",
                    self.opened
                );
            }
        }
        self.drain_link(link, Duration::from_millis(20));
        Ok(())
    }

    /// Runs turns without new data for `time`, so that everything sent arrives.
    pub fn drain_link(&mut self, link: &mut PairLink<'_>, time: Duration) {
        let end = self.clock.read_clock() + time;
        while self.run_turn(link, SenderLoad::Nothing) < end {}
    }

    /// Runs one turn of both hosts, and returns the time at which it began.
    #[inline]
    fn run_turn(&mut self, link: &mut PairLink<'_>, load: SenderLoad) -> Instant {
        let now = self.clock.read_clock();
        if let Some(forwarder) = &mut link.forward {
            forwarder.pass_frames(now, &mut link.source.0.cache);
        }
        for host in 0..2 {
            self.receive_frames(link, now, host);
        }
        // Recycles frames while they are in the cache, and before other buffers are allocated.
        recycle_dropped_frames(&mut link.source.0.cache);
        match load {
            SenderLoad::Nothing => {}
            SenderLoad::Full(n) => {
                for i in 0..n {
                    self.send_segments(link, now, i, self.segments_per_turn);
                }
            }
            SenderLoad::RoundRobin(n, each) => {
                for _ in 0..SEGMENTS_PER_TURN.div_ceil(each) {
                    self.next = (self.next + 1) % n;
                    self.send_segments(link, now, self.next, each);
                }
            }
        }
        for host in 0..2 {
            let end = &mut link.ends[host];
            let mut sink = PairSink::new(end, &mut link.source.0);
            self.hosts[host].poll(now, &mut sink);
            if !end.out.is_empty() {
                end.tx.tx_burst(&mut end.out);
            }
        }
        now
    }

    #[inline]
    fn receive_frames(&mut self, link: &mut PairLink<'_>, now: Instant, host: usize) {
        let end = &mut link.ends[host];
        let trust = end.checksum_trust();
        end.rx.rx_burst(&mut end.received);
        if !end.received.is_empty() {
            for i in 0..end.received.len() {
                end.received.prefetch_packet(i);
            }
            let frames = end.received.drain().map(|mut mbuf| {
                let checksum = trust.checksum_of(&mbuf);
                mbuf.clear_offload();
                let info = FrameInfo {
                    checksum,
                    rss_hash: 0,
                };
                (RxFrame::new(mbuf), info)
            });
            self.hosts[host].receive_burst(now, frames);
        }
        while let Some((id, _, e)) = self.hosts[host].next_event() {
            if e.intersects(Events::CONNECTED | Events::ACCEPTED) {
                self.opened[host] += 1;
            }
            if e.contains(Events::READABLE)
                && let Some(rx) = self.hosts[host].receive_queue(id)
            {
                let n = rx.len_bytes();
                rx.consume(n);
                if host == 1 {
                    self.received += n as u64;
                    if self.echo {
                        let _ = self.hosts[1].push_record(id, n as u32, RecordLen(0), true);
                        let mut sink = PairSink::new(&mut link.ends[1], &mut link.source.0);
                        self.hosts[1].flush(now, id, &mut sink);
                    }
                } else {
                    self.echoed += n as u64;
                }
            }
            if e.contains(Events::ACKED) {
                self.hosts[host].take_acked(id, |record| {
                    std::hint::black_box(record);
                });
            }
        }
    }

    #[inline]
    fn send_segments(&mut self, link: &mut PairLink<'_>, now: Instant, i: usize, most: usize) {
        let id = self.conns[i];
        let mut room = self.hosts[0].send_room(id) / MSS;
        let mut left = most;
        while left > 0 && room > 0 {
            let segments = room.min(left).min(self.segments_per_turn / 2);
            let bytes = segments * MSS;
            if self.at + bytes > MEMORY_BYTES {
                self.at = 0;
            }
            let record = RecordLen(self.at as u32);
            // The data that a connection sends in its turn forms one message.
            if self.hosts[0]
                .push_record(
                    id,
                    bytes as u32,
                    record,
                    most < self.segments_per_turn && left == segments,
                )
                .is_err()
            {
                break;
            }
            self.at += bytes;
            room -= segments;
            left -= segments;
        }
        if left < most {
            let mut sink = PairSink::new(&mut link.ends[0], &mut link.source.0);
            self.hosts[0].flush(now, id, &mut sink);
        }
    }

    fn measure_load(&mut self, link: &mut PairLink<'_>, time: Duration, load: SenderLoad) -> f64 {
        let end = self.clock.read_clock() + time / 8;
        let mut start = self.run_turn(link, load);
        while start < end {
            start = self.run_turn(link, load);
        }
        let before = self.received;
        let end = start + time;
        loop {
            let now = self.run_turn(link, load);
            if now >= end {
                return gigabits_per_second(self.received - before, now - start);
            }
        }
    }

    /// Gb/s of payload that the first `connections` connections deliver together, each sending up
    /// to its window.
    pub fn measure_stream(
        &mut self,
        link: &mut PairLink<'_>,
        connections: usize,
        time: Duration,
    ) -> f64 {
        self.measure_load(link, time, SenderLoad::Full(connections))
    }

    /// Gb/s of payload when the first connections send in turn, `each` segments at a time.
    pub fn measure_round_robin(
        &mut self,
        link: &mut PairLink<'_>,
        (connections, each): (usize, usize),
        time: Duration,
    ) -> f64 {
        self.measure_load(link, time, SenderLoad::RoundRobin(connections, each))
    }

    /// Median round trip of 64 bytes on the first connection in nanoseconds.
    pub fn measure_round_trip(
        &mut self,
        link: &mut PairLink<'_>,
        time: Duration,
    ) -> anyhow::Result<f64> {
        let mut times: Histogram<u64> = new_histogram()?;
        self.echo = true;
        let id = self.conns[0];
        let begin = self.clock.read_clock();
        let mut last = begin;
        while last - begin < time {
            let want = self.echoed + 64;
            self.hosts[0]
                .push_record(id, 64, RecordLen(0), true)
                .map_err(|_| anyhow!("the connection does not take records"))?;
            let mut sink = PairSink::new(&mut link.ends[0], &mut link.source.0);
            self.hosts[0].flush(last, id, &mut sink);
            while self.echoed < want {
                self.run_turn(link, SenderLoad::Nothing);
            }
            let now = self.clock.read_clock();
            times.saturating_record((now - last).as_nanos() as u64);
            last = now;
        }
        self.echo = false;
        Ok(times.value_at_quantile(0.5) as f64)
    }

    /// The sender's counters.
    pub fn sender_stats(&self) -> StackStats {
        self.hosts[0].stats()
    }

    /// The sender's smoothed round-trip time on its first connection.
    pub fn smoothed_rtt(&self) -> Option<Duration> {
        self.hosts[0].tcp_info(*self.conns.first()?)?.srtt
    }
}

/// The link that a pair sends over.
pub struct PairLink<'a> {
    /// The ports of the two hosts.
    pub ends: &'a mut [PortEnd; 2],
    /// The memory that payload is sent from.
    pub source: &'a mut SourceMemory,
    /// The impaired link between the two ends; none if they are joined directly.
    pub forward: Option<ImpairedLink>,
}
