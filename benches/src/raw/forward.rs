//! The loops of the modes: one thread serves all ports, burst by burst.

use super::echo::answer_request;
use super::frames::{FrameAddresses, FrameSource, frame_number, swap_macs};
use super::options::{PayloadWay, RawMode, RawRun};
use super::ports::{RawPort, RawPorts};
use super::report::{FrameCount, Interval, PortCount, RawReport};
use crate::measurement::new_histogram;
use crate::report::Quantiles;
use dpdk::{ExternalRegion, Mbuf, MbufCache};
use hdrhistogram::Histogram;
use nix::sys::signalfd::SignalFd;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

/// A frame that is longer under way is lost.
const ROUND_TRIP_TIMEOUT: Duration = Duration::from_millis(100);
/// After a run, frames that are under way are received until none came for so long.
const QUIET_TIME: Duration = Duration::from_millis(20);
/// The other address of a network for tests of network devices (RFC 2544), where none is known.
const DEFAULT_DESTINATION: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 2);
/// Where frames go that nobody is named for: a locally administered address.
const DEFAULT_TO_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0];

/// All that a run needs.
pub(super) struct RawRunner {
    source: FrameSource,
    /// The ports' devices can read the source's memory.
    _region: Option<ExternalRegion>,
    counts: Vec<PortCount>,
    ports: RawPorts,
    signals: SignalFd,
    is_stopped: bool,
}

/// Round trips of one run.
struct RoundTrips {
    times: Histogram<u64>,
    lost: u64,
}

impl RawRunner {
    pub(super) fn new(ports: RawPorts, signals: SignalFd) -> Result<RawRunner, String> {
        let source = FrameSource::new()?;
        let references = ports
            .list
            .iter()
            .all(|port| port.description.takes_references);
        let region = match references {
            true => ports.map_memory(source.memory())?,
            false => None,
        };
        Ok(RawRunner {
            source,
            _region: region,
            counts: vec![PortCount::default(); ports.list.len()],
            ports,
            signals,
            is_stopped: false,
        })
    }

    /// The ports, in the order of counts.
    pub(super) fn ports(&self) -> &[RawPort] {
        &self.ports.list
    }

    /// Whether a signal asked to end.
    pub(super) fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// One run. `on_interval` is called with what each interval counted.
    pub(super) fn run(
        &mut self,
        run: &RawRun,
        mut on_interval: impl FnMut(&[RawPort], &Interval),
    ) -> Result<RawReport, String> {
        self.describe_frames(run);
        let mut trips = RoundTrips {
            times: new_histogram()?,
            lost: 0,
        };
        let before = self.read_counts();
        let begin = Instant::now();
        let mut last = (begin, before.clone());
        let mut series = Vec::new();
        if run.mode.forwards() {
            self.send_first(run);
        }
        loop {
            match run.mode {
                RawMode::TxOnly | RawMode::RxOnly => self.send_and_receive(run),
                RawMode::Io | RawMode::MacSwap => self.forward(run),
                RawMode::IcmpEcho => self.answer(run),
                RawMode::PingPong => self.measure_round_trip(&mut trips),
            }
            let now = Instant::now();
            let is_over = run.time.is_some_and(|time| now - begin >= time);
            if is_over || now - last.0 >= run.interval {
                let interval = self.interval_since(&last, begin, now);
                on_interval(&self.ports.list, &interval);
                series.push(interval.directions());
                last = (now, self.read_counts());
                self.is_stopped |= matches!(self.signals.read_signal(), Ok(Some(_)));
            }
            if is_over || self.is_stopped {
                break;
            }
        }
        let end = Instant::now();
        self.receive_rest();
        let whole = self.interval_since(&(begin, before), begin, end);
        let mut report = RawReport::new(run, &self.ports.list, &whole);
        report.series = series;
        if run.mode == RawMode::PingPong {
            report.round_trip_us = (!trips.times.is_empty()).then(|| Quantiles::from(&trips.times));
            report.lost = trips.lost;
        }
        Ok(report)
    }

    /// The counts, with what the drivers have lost of received frames.
    fn read_counts(&self) -> Vec<PortCount> {
        let with_drops = |(port, count): (&RawPort, &PortCount)| {
            let mut count = *count;
            if let Ok(counters) = port.port.read_counters() {
                count.rx.dropped = counters.rx_missed + counters.rx_no_buffer;
            }
            count
        };
        self.ports
            .list
            .iter()
            .zip(&self.counts)
            .map(with_drops)
            .collect()
    }

    fn interval_since(
        &self,
        (start, before): &(Instant, Vec<PortCount>),
        begin: Instant,
        now: Instant,
    ) -> Interval {
        let counts = self.read_counts();
        Interval {
            end: now - begin,
            length: now - *start,
            counts: counts
                .iter()
                .zip(before)
                .map(|(count, before)| count.since(*before))
                .collect(),
        }
    }

    fn describe_frames(&mut self, run: &RawRun) {
        let ports = &self.ports.list;
        let sender = sender_of(run.mode, ports.len());
        let from = &ports[sender];
        let to = ports.iter().enumerate().find(|(at, _)| *at != sender);
        let address = |port: &RawPort| port.addresses.first().copied();
        let addresses = FrameAddresses {
            from: from.mac,
            to: run
                .to_mac
                .or(to.map(|(_, port)| port.mac))
                .unwrap_or(DEFAULT_TO_MAC),
            source: address(from).unwrap_or(Ipv4Addr::UNSPECIFIED),
            destination: to
                .and_then(|(_, port)| address(port))
                .unwrap_or(DEFAULT_DESTINATION),
        };
        let way = run.payload.unwrap_or(PayloadWay::Copy);
        self.source.describe_frames(run.size, way, &addresses);
    }

    /// Fills the batch of a port with new frames, up to a burst.
    #[inline]
    fn fill_burst(&mut self, at: usize, burst: usize) {
        let port = &mut self.ports.list[at];
        while port.out.len() < burst {
            let Some(frame) = self.source.build_frame(&mut self.ports.cache) else {
                break;
            };
            if let Err(frame) = port.out.push(frame) {
                self.ports.cache.free(frame);
                break;
            }
        }
    }

    /// Sends what is in the batch of a port; what it does not take is dropped.
    #[inline]
    fn send_batch(&mut self, at: usize) {
        let port = &mut self.ports.list[at];
        let cache = &mut self.ports.cache;
        let offered = port.out.len();
        if offered == 0 {
            port.tx.retry_backlog();
            return;
        }
        let mut bytes: u64 = (0..offered)
            .filter_map(|index| port.out.peek(index))
            .map(|frame| u64::from(frame.pkt_len()))
            .sum();
        let sent = port.tx.tx_burst(&mut port.out);
        for frame in port.out.drain() {
            bytes -= u64::from(frame.pkt_len());
            cache.free(frame);
        }
        let count = &mut self.counts[at].tx;
        count.dropped += (offered - sent) as u64;
        if sent > 0 {
            count.frames += sent as u64;
            count.bytes += bytes;
        }
    }

    /// Receives up to a burst at a port, and hands each frame to `take`, which returns it to be freed
    /// or keeps it.
    #[inline]
    fn receive_burst(
        port: &mut RawPort,
        cache: &mut MbufCache,
        count: &mut FrameCount,
        mut take: impl FnMut(Mbuf, &mut MbufCache),
    ) -> usize {
        let received = port.rx.rx_burst(&mut port.received);
        for frame in port.received.drain() {
            count.frames += 1;
            count.bytes += u64::from(frame.pkt_len());
            take(frame, cache);
        }
        received
    }

    /// Receives at a port and frees.
    #[inline]
    fn receive_and_free(&mut self, at: usize) -> usize {
        let (port, cache) = (&mut self.ports.list[at], &mut self.ports.cache);
        let count = &mut self.counts[at].rx;
        Self::receive_burst(port, cache, count, |frame, cache| cache.free(frame))
    }

    /// A turn of txonly or rxonly.
    #[inline]
    fn send_and_receive(&mut self, run: &RawRun) {
        if run.payload.is_some() {
            let sender = sender_of(run.mode, self.ports.list.len());
            self.fill_burst(sender, run.burst);
            self.send_batch(sender);
        }
        for at in 0..self.ports.list.len() {
            self.receive_and_free(at);
        }
    }

    /// The frames that circulate where nobody else sends any.
    fn send_first(&mut self, run: &RawRun) {
        for _ in 0..run.tx_first {
            for at in 0..self.ports.list.len() {
                self.fill_burst(at, run.burst);
                self.send_batch(at);
            }
        }
    }

    /// A turn of io or macswap.
    #[inline]
    fn forward(&mut self, run: &RawRun) {
        let ports = self.ports.list.len();
        for from in 0..ports {
            let to = (from + 1) % ports;
            let [mut received, mut out] = {
                let receiver = &mut self.ports.list[from];
                let received = std::mem::take(&mut receiver.received);
                [received, std::mem::take(&mut self.ports.list[to].out)]
            };
            let count = &mut self.counts[from].rx;
            self.ports.list[from].rx.rx_burst(&mut received);
            let mut unwritable = 0;
            for mut frame in received.drain() {
                count.frames += 1;
                count.bytes += u64::from(frame.pkt_len());
                if run.mode == RawMode::MacSwap && !swap_macs(frame.data_mut()) {
                    unwritable += 1;
                    self.ports.cache.free(frame);
                } else if let Err(frame) = out.push(frame) {
                    unwritable += 1;
                    self.ports.cache.free(frame);
                }
            }
            self.ports.list[from].received = received;
            self.ports.list[to].out = out;
            self.counts[to].tx.dropped += unwritable;
            self.send_batch(to);
        }
    }

    /// A turn of icmpecho.
    fn answer(&mut self, _run: &RawRun) {
        for at in 0..self.ports.list.len() {
            let port = &mut self.ports.list[at];
            let count = &mut self.counts[at].rx;
            port.rx.rx_burst(&mut port.received);
            for mut frame in port.received.drain() {
                count.frames += 1;
                count.bytes += u64::from(frame.pkt_len());
                let is_answer = answer_request(frame.data_mut(), port.mac, &port.addresses);
                let rest = match is_answer {
                    true => port.out.push(frame).err(),
                    false => Some(frame),
                };
                if let Some(frame) = rest {
                    self.ports.cache.free(frame);
                }
            }
            self.send_batch(at);
        }
    }

    /// One frame there and back.
    fn measure_round_trip(&mut self, trips: &mut RoundTrips) {
        let begin = Instant::now();
        self.fill_burst(0, 1);
        let number = self.source.last_number();
        self.send_batch(0);
        while begin.elapsed() < ROUND_TRIP_TIMEOUT {
            if self.ports.list.len() > 1 {
                self.return_frames(number);
            }
            let (port, cache) = (&mut self.ports.list[0], &mut self.ports.cache);
            let count = &mut self.counts[0].rx;
            let mut is_back = false;
            Self::receive_burst(port, cache, count, |frame, cache| {
                is_back |= frame_number(frame.data()) == Some(number);
                cache.free(frame);
            });
            if is_back {
                let ns = begin.elapsed().as_nanos() as u64;
                trips.times.saturating_record(ns);
                return;
            }
            self.ports.list[0].tx.retry_backlog();
        }
        trips.lost += 1;
    }

    /// The second port sends the frame of the round trip back, with its addresses exchanged.
    #[inline]
    fn return_frames(&mut self, number: u64) {
        let (port, cache) = (&mut self.ports.list[1], &mut self.ports.cache);
        let count = &mut self.counts[1].rx;
        port.rx.rx_burst(&mut port.received);
        for mut frame in port.received.drain() {
            count.frames += 1;
            count.bytes += u64::from(frame.pkt_len());
            let is_ours = frame_number(frame.data()) == Some(number);
            let rest = match is_ours && swap_macs(frame.data_mut()) {
                true => port.out.push(frame).err(),
                false => Some(frame),
            };
            if let Some(frame) = rest {
                cache.free(frame);
            }
        }
        self.send_batch(1);
    }

    /// Receives what is still under way.
    fn receive_rest(&mut self) {
        let mut since = Instant::now();
        while since.elapsed() < QUIET_TIME {
            for at in 0..self.ports.list.len() {
                self.ports.list[at].tx.retry_backlog();
                if self.receive_and_free(at) > 0 && !self.is_stopped {
                    since = Instant::now();
                }
            }
        }
    }
}

/// The port that makes frames: of rxonly on a pair of rings the one that is not measured.
fn sender_of(mode: RawMode, ports: usize) -> usize {
    match mode {
        RawMode::RxOnly => ports - 1,
        _ => 0,
    }
}
