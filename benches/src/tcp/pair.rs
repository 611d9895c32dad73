//! Two stacks, one behind each end of a link, driven by one thread as the daemon's worker drives
//! its ports: receive, events, new records, remaining output, transmit; the clock is read once a turn.

use std::time::Duration;

use hdrhistogram::Histogram;
use siw_tcp::{
    CongestionControl, ConnId, Events, FrameInfo, Instant, IpCidr, Stack, StackConfig, StackStats,
    TsoLimits,
};

use super::forward::Forwarder;
use super::link::{End, MEMORY, SourceMemory};
use super::sink::{PairSink, RecordLen};
use super::{Clock, MSS};
use crate::measurement::{gigabits_per_second, new_histogram};
use siwd::datapath::rx_frame::{RxFrame, recycle_dropped_frames};

const PORT: u16 = 7;
/// Segments of a turn, of one connection or of many together.
const TURN: usize = 64;
/// So many connections before its turn is one fetched.
const AHEAD: usize = 12;

/// What the sending side does in a turn.
#[derive(Clone, Copy)]
enum Load {
    Nothing,
    /// The first so many connections, as far as their windows allow.
    Full(usize),
    /// So many connections in turn, each so many segments, [`TURN`] segments in all.
    RoundRobin(usize, usize),
}

/// A link, and two stacks with the connections between them.
pub struct Pair {
    hosts: [Stack<RxFrame, RecordLen>; 2],
    conns: Vec<ConnId>,
    clock: Clock,
    opened: [usize; 2],
    received: u64,
    /// The second host answers with as many bytes.
    echo: bool,
    /// Bytes that came back.
    echoed: u64,
    next: usize,
    at: usize,
    /// Segments that one connection may queue in a turn, in two records: a stream hands over more
    /// than a segment at a time.
    turn: usize,
}

/// What makes a pair differ from another.
#[derive(Debug, Clone)]
pub struct PairConfig {
    pub connections: usize,
    pub tso: Option<TsoLimits>,
    /// The stacks compute checksums.
    pub software_checksum: bool,
    pub congestion: CongestionControl,
}

impl Pair {
    /// See [`Stack::CONNECTION_BYTES`].
    pub const CONNECTION_BYTES: usize = Stack::<RxFrame, RecordLen>::CONNECTION_BYTES;
    pub const HOT_BYTES: usize = Stack::<RxFrame, RecordLen>::HOT_BYTES;

    pub fn new(clock: Clock, config: &PairConfig) -> Result<Pair, String> {
        let stack = |n: u8| {
            let addr = std::net::Ipv4Addr::new(10, 77, 1, n);
            let mut stack_config =
                StackConfig::new([2, 0, 0, 77, 1, n], vec![IpCidr::new(addr.into(), 24)]);
            stack_config.isn_key = [n; 16];
            stack_config.hash_key = [0x40 + n; 16];
            stack_config.max_connections = config.connections.max(1024);
            stack_config.tx_checksum = config.software_checksum;
            stack_config.tso = config.tso;
            stack_config.congestion = config.congestion;
            Stack::new(stack_config, clock.now()).map_err(|e| e.to_string())
        };
        let mut hosts = [stack(1)?, stack(2)?];
        hosts[1]
            .listen(None, PORT, 4096, 0)
            .map_err(|e| e.to_string())?;
        Ok(Pair {
            hosts,
            conns: Vec::with_capacity(config.connections),
            clock,
            opened: [0; 2],
            received: 0,
            echo: false,
            echoed: 0,
            next: 0,
            at: 0,
            // Whole super-segments, two of the longest.
            turn: config
                .tso
                .map_or(TURN, |limits| 2 * usize::from(limits.max_segments)),
        })
    }

    /// Opens connections until there are so many.
    pub fn connect(&mut self, link: &mut PairLink<'_>, connections: usize) -> Result<(), String> {
        let end = std::time::Instant::now() + Duration::from_secs(20);
        while self.conns.len() < connections || self.opened != [connections; 2] {
            // The listener's backlog bounds those on their way.
            let now = self.clock.now();
            while self.conns.len() < connections && self.conns.len() < self.opened[1] + 256 {
                let to = (std::net::Ipv4Addr::new(10, 77, 1, 2), PORT).into();
                let conn = self.hosts[0].connect(now, None, None, to, 0);
                self.conns.push(conn.map_err(|e| e.to_string())?);
            }
            self.turn(link, Load::Nothing);
            if std::time::Instant::now() > end {
                return Err(format!(
                    "{:?} of {connections} connections are open after 20 s",
                    self.opened
                ));
            }
        }
        self.settle(link, Duration::from_millis(20));
        Ok(())
    }

    /// Lets what is on its way arrive.
    pub fn settle(&mut self, link: &mut PairLink<'_>, time: Duration) {
        let end = self.clock.now() + time;
        while self.turn(link, Load::Nothing) < end {}
    }

    /// Returns what time it was.
    #[inline]
    fn turn(&mut self, link: &mut PairLink<'_>, load: Load) -> Instant {
        let now = self.clock.now();
        if let Some(forwarder) = &mut link.forward {
            forwarder.turn(now, &mut link.source.0.cache);
        }
        for host in 0..2 {
            self.receive(link, now, host);
        }
        // While they are warm, and before others are asked for.
        recycle_dropped_frames(&mut link.source.0.cache);
        match load {
            Load::Nothing => {}
            Load::Full(n) => {
                for i in 0..n {
                    self.send(link, now, i, self.turn);
                }
            }
            Load::RoundRobin(n, each) => {
                for _ in 0..TURN.div_ceil(each) {
                    let ahead = |distance: usize| self.conns[(self.next + distance) % n];
                    self.hosts[0].prefetch_connection(ahead(AHEAD));
                    self.hosts[0].prefetch_queues(ahead(AHEAD / 2));
                    self.next = (self.next + 1) % n;
                    self.send(link, now, self.next, each);
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
    fn receive(&mut self, link: &mut PairLink<'_>, now: Instant, host: usize) {
        let end = &mut link.ends[host];
        let trust = end.trust();
        end.rx.rx_burst(&mut end.inn);
        if !end.inn.is_empty() {
            for i in 0..end.inn.len() {
                end.inn.prefetch_packet(i);
            }
            let frames = end.inn.drain().map(|mut mbuf| {
                let checksum = trust.checksum(&mbuf);
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
    fn send(&mut self, link: &mut PairLink<'_>, now: Instant, i: usize, most: usize) {
        let id = self.conns[i];
        let mut room = self.hosts[0].send_room(id) / MSS;
        let mut left = most;
        while left > 0 && room > 0 {
            let segments = room.min(left).min(self.turn / 2);
            let bytes = segments * MSS;
            if self.at + bytes > MEMORY {
                self.at = 0;
            }
            let record = RecordLen(self.at as u32);
            // A turn is a message.
            if self.hosts[0]
                .push_record(
                    id,
                    bytes as u32,
                    record,
                    most < self.turn && left == segments,
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

    fn run(&mut self, link: &mut PairLink<'_>, time: Duration, load: Load) -> f64 {
        let end = self.clock.now() + time / 8;
        let mut start = self.turn(link, load);
        while start < end {
            start = self.turn(link, load);
        }
        let before = self.received;
        let end = start + time;
        loop {
            let now = self.turn(link, load);
            if now >= end {
                return gigabits_per_second(self.received - before, now - start);
            }
        }
    }

    /// Gb/s of payload that the first connections deliver together, each sending what it may.
    pub fn stream(&mut self, link: &mut PairLink<'_>, connections: usize, time: Duration) -> f64 {
        self.run(link, time, Load::Full(connections))
    }

    /// Gb/s of payload when the first connections send in turn, `each` segments at a time.
    pub fn round_robin(
        &mut self,
        link: &mut PairLink<'_>,
        (connections, each): (usize, usize),
        time: Duration,
    ) -> f64 {
        self.run(link, time, Load::RoundRobin(connections, each))
    }

    /// Median nanoseconds of 64 bytes there and back on the first connection.
    pub fn round_trip(&mut self, link: &mut PairLink<'_>, time: Duration) -> Result<f64, String> {
        let mut times: Histogram<u64> = new_histogram()?;
        self.echo = true;
        let id = self.conns[0];
        let begin = self.clock.now();
        let mut last = begin;
        while last - begin < time {
            let want = self.echoed + 64;
            self.hosts[0]
                .push_record(id, 64, RecordLen(0), true)
                .map_err(|_| "the connection does not take records")?;
            let mut sink = PairSink::new(&mut link.ends[0], &mut link.source.0);
            self.hosts[0].flush(last, id, &mut sink);
            while self.echoed < want {
                self.turn(link, Load::Nothing);
            }
            let now = self.clock.now();
            times.saturating_record((now - last).as_nanos() as u64);
            last = now;
        }
        self.echo = false;
        Ok(times.value_at_quantile(0.5) as f64)
    }

    /// The sender's counters.
    pub fn stats(&self) -> &StackStats {
        self.hosts[0].stats()
    }

    /// The sender's smoothed round-trip time on its first connection.
    pub fn srtt(&self) -> Option<Duration> {
        self.hosts[0].tcp_info(*self.conns.first()?)?.srtt
    }
}

/// What a pair sends over.
pub struct PairLink<'a> {
    pub ends: &'a mut [End; 2],
    pub source: &'a mut SourceMemory,
    /// Joins the far sides of the two ends.
    pub forward: Option<Forwarder>,
}
