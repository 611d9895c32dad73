//! Forwarding loops of the modes: one thread serves all ports, burst by burst.

use super::echo::answer_request;
use super::frames::{ETHERNET_ADDRESSES, FrameAddresses, FrameSource, frame_number, swap_macs};
use super::options::{PayloadWay, RawMode, RawRun};
use super::ports::{PortIdentity, RawPort, RawPorts};
use super::report::{FrameCount, Interval, PortCount, RawReport};
use crate::measurement::Quantiles;
use crate::measurement::new_histogram;
use dpdk::{ExternalRegion, Mbuf, MbufCache, RxBatch, RxQueue, TxBatch, TxQueue};
use hdrhistogram::Histogram;
use nix::sys::signalfd::SignalFd;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

/// Time after which a frame counts as lost.
const ROUND_TRIP_TIMEOUT: Duration = Duration::from_millis(100);
/// After a run, frames in flight are received until none has arrived for this time.
const QUIET_TIME: Duration = Duration::from_millis(20);
/// Default destination: the second address of a network for benchmarking (RFC 2544).
const DEFAULT_DESTINATION: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 2);
/// Default destination MAC: a locally administered address.
const DEFAULT_TO_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0];

/// State of a run.
pub(super) struct RawRunner {
    source: FrameSource,
    /// Keeps the source's memory readable for the ports' devices.
    _region: Option<ExternalRegion>,
    /// In the order of the ports, like the following fields.
    counts: Vec<PortCount>,
    received: Vec<RxBatch>,
    outboxes: Vec<FrameOutbox>,
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
    pub(super) fn new(ports: RawPorts, signals: SignalFd) -> anyhow::Result<RawRunner> {
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
            received: ports.list.iter().map(|_| RxBatch::new()).collect(),
            outboxes: ports.list.iter().map(|_| FrameOutbox::default()).collect(),
            ports,
            signals,
            is_stopped: false,
        })
    }

    /// The ports, in the order of the counts.
    pub(super) fn ports(&self) -> &[RawPort] {
        &self.ports.list
    }

    /// Returns true if a signal requested the end.
    pub(super) fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// Executes one run. `on_interval` is called with the counts of each interval.
    pub(super) fn run(
        &mut self,
        run: &RawRun,
        mut on_interval: impl FnMut(&[RawPort], &Interval),
    ) -> anyhow::Result<RawReport> {
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
                RawMode::Io | RawMode::MacSwap => self.forward(run.mode),
                RawMode::IcmpEcho => self.answer(),
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

    /// The counts, including received frames that the drivers lost.
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
        let address = |port: &RawPort| port.identity.addresses.first().copied();
        let addresses = FrameAddresses {
            from: from.identity.mac,
            to: run
                .to_mac
                .or(to.map(|(_, port)| port.identity.mac))
                .unwrap_or(DEFAULT_TO_MAC),
            source: address(from).unwrap_or(Ipv4Addr::UNSPECIFIED),
            destination: to
                .and_then(|(_, port)| address(port))
                .unwrap_or(DEFAULT_DESTINATION),
        };
        let way = run.payload.unwrap_or(PayloadWay::Copy);
        self.source.describe_frames(run.size, way, &addresses);
    }

    /// Fills a port's outbox with new frames, up to a burst.
    #[inline]
    fn fill_burst(&mut self, at: usize, burst: usize) {
        let outbox = &mut self.outboxes[at];
        while outbox.batch.len() < burst {
            let Some(frame) = self.source.build_frame(&mut self.ports.cache) else {
                break;
            };
            outbox.push_or_free(frame, &mut self.ports.cache);
        }
    }

    /// Sends a port's outbox; drops frames that the port does not take.
    #[inline]
    fn send_outbox(&mut self, at: usize) {
        let (tx, cache) = (&mut self.ports.list[at].tx, &mut self.ports.cache);
        self.outboxes[at].send(tx, cache, &mut self.counts[at].tx);
    }

    /// Receives frames from a port and frees them.
    #[inline]
    fn receive_and_free(&mut self, at: usize) -> usize {
        let RawPorts { list, cache, .. } = &mut self.ports;
        let count = &mut self.counts[at].rx;
        receive_burst(&mut list[at].rx, &mut self.received[at], count, |frame| {
            cache.free(frame);
        })
    }

    /// One turn of txonly or rxonly.
    #[inline]
    fn send_and_receive(&mut self, run: &RawRun) {
        if run.payload.is_some() {
            let sender = sender_of(run.mode, self.ports.list.len());
            self.fill_burst(sender, run.burst);
            self.send_outbox(sender);
        }
        for at in 0..self.ports.list.len() {
            self.receive_and_free(at);
        }
    }

    /// Sends the initial frames, which then circulate between the ports.
    fn send_first(&mut self, run: &RawRun) {
        for _ in 0..run.tx_first {
            for at in 0..self.ports.list.len() {
                self.fill_burst(at, run.burst);
                self.send_outbox(at);
            }
        }
    }

    /// One turn of io or macswap.
    #[inline]
    fn forward(&mut self, mode: RawMode) {
        let ports = self.ports.list.len();
        for from in 0..ports {
            let to = (from + 1) % ports;
            self.forward_burst(from, to, mode == RawMode::MacSwap);
        }
    }

    /// Receives a burst from one port directly into the outbox of another, and sends it.
    ///
    /// Fast because no frame is moved from one list to another.
    #[inline]
    fn forward_burst(&mut self, from: usize, to: usize, swaps: bool) {
        let RawPorts { list, cache, .. } = &mut self.ports;
        let FrameOutbox { batch, bytes } = &mut self.outboxes[to];
        let received = list[from].rx.rx_burst(batch);
        let mut can_swap = true;
        for frame in batch.packets_mut() {
            *bytes += u64::from(frame.pkt_len());
            can_swap &= !swaps || swap_macs(frame.data_mut());
        }
        let count = &mut self.counts[from].rx;
        count.frames += received as u64;
        count.bytes += *bytes;
        if !can_swap {
            let refused = drop_short_frames(&mut self.outboxes[to], cache);
            self.counts[to].tx.dropped += refused;
        }
        self.send_outbox(to);
    }

    /// Receives from one port and sends the frames for which `edit` returns true to another.
    /// Returns the number of frames freed instead.
    #[inline]
    fn pass_on(
        &mut self,
        from: usize,
        to: usize,
        mut edit: impl FnMut(&mut Mbuf, &PortIdentity) -> bool,
    ) -> u64 {
        let RawPorts { list, cache, .. } = &mut self.ports;
        let (outbox, count) = (&mut self.outboxes[to], &mut self.counts[from].rx);
        let RawPort { identity, rx, .. } = &mut list[from];
        let mut refused = 0;
        receive_burst(rx, &mut self.received[from], count, |mut frame| {
            if edit(&mut frame, identity) {
                outbox.push_or_free(frame, cache);
            } else {
                refused += 1;
                cache.free(frame);
            }
        });
        self.send_outbox(to);
        refused
    }

    /// One turn of icmpecho.
    fn answer(&mut self) {
        for at in 0..self.ports.list.len() {
            self.pass_on(at, at, |frame, identity| {
                answer_request(frame.data_mut(), identity.mac, &identity.addresses)
            });
        }
    }

    /// One round trip of a frame.
    fn measure_round_trip(&mut self, trips: &mut RoundTrips) {
        let begin = Instant::now();
        self.fill_burst(0, 1);
        let number = self.source.last_number();
        self.send_outbox(0);
        loop {
            // After the timeout the ports are polled once more: this thread may have been
            // interrupted.
            let is_late = begin.elapsed() >= ROUND_TRIP_TIMEOUT;
            if self.ports.list.len() > 1 {
                // The second port sends this frame back, and frees all others.
                self.pass_on(1, 1, |frame, _| {
                    frame_number(frame.data()) == Some(number) && swap_macs(frame.data_mut())
                });
            }
            let mut is_back = false;
            let RawPorts { list, cache, .. } = &mut self.ports;
            let (batch, count) = (&mut self.received[0], &mut self.counts[0].rx);
            receive_burst(&mut list[0].rx, batch, count, |frame| {
                is_back |= frame_number(frame.data()) == Some(number);
                cache.free(frame);
            });
            if is_back {
                let ns = begin.elapsed().as_nanos() as u64;
                trips.times.saturating_record(ns);
                return;
            }
            if is_late {
                trips.lost += 1;
                return;
            }
            self.ports.list[0].tx.retry_backlog();
        }
    }

    /// Receives the frames still in flight.
    fn receive_rest(&mut self) {
        let mut since = Instant::now();
        loop {
            // After the quiet time the ports are polled once more: this thread may have been
            // interrupted.
            let is_quiet = since.elapsed() >= QUIET_TIME;
            let mut received = 0;
            for at in 0..self.ports.list.len() {
                self.ports.list[at].tx.retry_backlog();
                received += self.receive_and_free(at);
            }
            if received > 0 && !self.is_stopped {
                since = Instant::now();
            } else if is_quiet {
                return;
            }
        }
    }
}

/// Receives from a port and passes each frame to `take`. Returns the number of frames.
#[inline]
fn receive_burst(
    rx: &mut RxQueue,
    batch: &mut RxBatch,
    count: &mut FrameCount,
    mut take: impl FnMut(Mbuf),
) -> usize {
    let received = rx.rx_burst(batch);
    for frame in batch.drain() {
        count.bytes += u64::from(frame.pkt_len());
        take(frame);
    }
    count.frames += received as u64;
    received
}

/// Frames to be sent by a port.
#[derive(Default)]
struct FrameOutbox {
    batch: TxBatch,
    /// Bytes of the frames in the batch.
    bytes: u64,
}

impl FrameOutbox {
    #[inline]
    fn push_or_free(&mut self, frame: Mbuf, cache: &mut MbufCache) {
        let bytes = u64::from(frame.pkt_len());
        match self.batch.push(frame) {
            Ok(()) => self.bytes += bytes,
            Err(frame) => cache.free(frame),
        }
    }

    /// Sends the whole batch, and frees frames that the port does not take.
    #[inline]
    fn send(&mut self, tx: &mut TxQueue, cache: &mut MbufCache, count: &mut FrameCount) {
        let offered = self.batch.len();
        if offered == 0 {
            tx.retry_backlog();
            return;
        }
        let sent = tx.tx_burst(&mut self.batch);
        let mut bytes = std::mem::take(&mut self.bytes);
        for frame in self.batch.drain() {
            bytes -= u64::from(frame.pkt_len());
            cache.free(frame);
        }
        count.dropped += (offered - sent) as u64;
        if sent > 0 {
            count.frames += sent as u64;
            count.bytes += bytes;
        }
    }
}

/// Frees the frames too short for two Ethernet addresses; returns their number.
#[cold]
fn drop_short_frames(outbox: &mut FrameOutbox, cache: &mut MbufCache) -> u64 {
    let count = outbox.batch.len();
    let mut refused = 0;
    for _ in 0..count {
        let Some(frame) = outbox.batch.pop() else {
            break;
        };
        if frame.data().len() >= ETHERNET_ADDRESSES {
            let _ = outbox.batch.push(frame);
        } else {
            refused += 1;
            outbox.bytes -= u64::from(frame.pkt_len());
            cache.free(frame);
        }
    }
    refused
}

/// The port that generates frames: for rxonly on a ring pair the one that is not measured.
fn sender_of(mode: RawMode, ports: usize) -> usize {
    match mode {
        RawMode::RxOnly => ports - 1,
        _ => 0,
    }
}
