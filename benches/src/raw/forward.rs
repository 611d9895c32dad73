//! Forwarding loops of the modes: a thread serves one pair of queues of each port, burst by burst.

use super::echo::answer_request;
use super::frames::{
    ETHERNET_ADDRESSES, FrameAddresses, FrameDescription, FrameSource, frame_number, swap_macs,
};
use super::options::{PayloadWay, RawMode, RawRun};
use super::ports::{Lane, LanePort, PortIdentity};
use super::report::{FrameCount, PortCount};
use dpdk::{Mbuf, MbufCache, RxBatch, TxBatch};
use hdrhistogram::Histogram;
use siw_ports::{ReceiveQueue, RxQueue, TransmitQueue, TxQueue};
use siw_shm::SharedMemory;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time after which a frame counts as lost.
const ROUND_TRIP_TIMEOUT: Duration = Duration::from_millis(100);
/// After a run, frames in flight are received until none has arrived for this time.
const QUIET_TIME: Duration = Duration::from_millis(20);
/// Default destination: the second address of a network for benchmarking (RFC 2544).
const DEFAULT_DESTINATION: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 2);
/// Default destination MAC: a locally administered address.
const DEFAULT_TO_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0];

/// State of one thread.
pub(super) struct LaneRunner {
    source: FrameSource,
    /// In the order of the ports, like the following fields.
    counts: Vec<PortCount>,
    received: Vec<RxBatch>,
    outboxes: Vec<FrameOutbox>,
    lane: Lane,
    /// `None`: as many frames as possible are sent.
    pacer: Option<Pacer>,
}

/// Limits generated frames to a rate.
struct Pacer {
    begin: Instant,
    frames_per_second: f64,
    offered: u64,
}

impl Pacer {
    /// Number of frames that are due by now.
    #[inline]
    fn due(&self) -> u64 {
        let due = self.begin.elapsed().as_secs_f64() * self.frames_per_second;
        (due as u64).saturating_sub(self.offered)
    }
}

/// Round trips of one run.
pub(super) struct RoundTrips {
    pub(super) times: Histogram<u64>,
    pub(super) lost: u64,
}

impl LaneRunner {
    pub(super) fn new(lane: Lane) -> anyhow::Result<LaneRunner> {
        Ok(LaneRunner {
            source: FrameSource::new()?,
            counts: vec![PortCount::default(); lane.list.len()],
            received: lane.list.iter().map(|_| RxBatch::new()).collect(),
            outboxes: lane.list.iter().map(|_| FrameOutbox::default()).collect(),
            lane,
            pacer: None,
        })
    }

    /// The core of the thread.
    pub(super) fn core(&self) -> usize {
        self.lane.core
    }

    /// Memory of generated payload, which the ports' devices read.
    pub(super) fn memory(&self) -> &Arc<SharedMemory> {
        self.source.memory()
    }

    /// Counts of the lane's queues since the beginning.
    pub(super) fn counts(&self) -> &[PortCount] {
        &self.counts
    }

    /// Begins a run, in which `frames_per_second` frames are offered, or as many as possible.
    pub(super) fn begin(&mut self, run: &RawRun, frames_per_second: Option<f64>) {
        self.describe_frames(run);
        self.pacer = frames_per_second.map(|frames_per_second| Pacer {
            begin: Instant::now(),
            frames_per_second,
            offered: 0,
        });
        if run.mode.forwards() {
            self.send_first(run);
        }
    }

    /// One turn of a run.
    #[inline]
    pub(super) fn turn(&mut self, run: &RawRun, trips: &mut RoundTrips) {
        match run.mode {
            RawMode::TxOnly | RawMode::RxOnly => self.send_and_receive(run),
            RawMode::Io | RawMode::MacSwap => self.forward(run.mode),
            RawMode::IcmpEcho => self.answer(),
            RawMode::PingPong => self.measure_round_trip(trips),
        }
    }

    fn describe_frames(&mut self, run: &RawRun) {
        let ports = &self.lane.list;
        let sender = sender_of(run.mode, ports.len());
        let from = &ports[sender];
        let to = ports.iter().enumerate().find(|(at, _)| *at != sender);
        let address = |port: &LanePort| port.identity.addresses.first().copied();
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
        self.source.describe_frames(&FrameDescription {
            sizes: run.size.list(),
            flows: run.flows,
            vlan: run.vlan,
            way: run.payload.unwrap_or(PayloadWay::Copy),
            addresses,
        });
    }

    /// Fills a port's outbox with new frames, up to a burst.
    #[inline]
    fn fill_burst(&mut self, at: usize, burst: usize) {
        let outbox = &mut self.outboxes[at];
        while outbox.batch.len() < burst {
            let Some(frame) = self.source.build_frame(&mut self.lane.cache) else {
                break;
            };
            outbox.push_or_free(frame, &mut self.lane.cache);
        }
    }

    /// Sends a port's outbox; drops frames that the port does not take.
    #[inline]
    fn send_outbox(&mut self, at: usize) {
        let (tx, cache) = (&mut self.lane.list[at].tx, &mut self.lane.cache);
        self.outboxes[at].send(tx, cache, &mut self.counts[at].tx);
    }

    /// Receives frames from a port and frees them.
    #[inline]
    fn receive_and_free(&mut self, at: usize) -> usize {
        let Lane { list, cache, .. } = &mut self.lane;
        let count = &mut self.counts[at].rx;
        receive_burst(&mut list[at].rx, &mut self.received[at], count, |frame| {
            cache.free(frame);
        })
    }

    /// One turn of txonly or rxonly.
    #[inline]
    fn send_and_receive(&mut self, run: &RawRun) {
        if run.payload.is_some() {
            let sender = sender_of(run.mode, self.lane.list.len());
            let burst = match &self.pacer {
                Some(pacer) => pacer.due().min(run.burst as u64) as usize,
                None => run.burst,
            };
            self.fill_burst(sender, burst);
            if let Some(pacer) = &mut self.pacer {
                pacer.offered += self.outboxes[sender].batch.len() as u64;
            }
            self.send_outbox(sender);
        }
        for at in 0..self.lane.list.len() {
            self.receive_and_free(at);
        }
    }

    /// Sends the initial frames, which then circulate between the ports.
    fn send_first(&mut self, run: &RawRun) {
        for _ in 0..run.tx_first {
            for at in 0..self.lane.list.len() {
                self.fill_burst(at, run.burst);
                self.send_outbox(at);
            }
        }
    }

    /// One turn of io or macswap.
    #[inline]
    fn forward(&mut self, mode: RawMode) {
        let ports = self.lane.list.len();
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
        let Lane { list, cache, .. } = &mut self.lane;
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
        let Lane { list, cache, .. } = &mut self.lane;
        let (outbox, count) = (&mut self.outboxes[to], &mut self.counts[from].rx);
        let LanePort { identity, rx, .. } = &mut list[from];
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
        for at in 0..self.lane.list.len() {
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
            if self.lane.list.len() > 1 {
                // The second port sends this frame back, and frees all others.
                self.pass_on(1, 1, |frame, _| {
                    frame_number(frame.data()) == Some(number) && swap_macs(frame.data_mut())
                });
            }
            let mut is_back = false;
            let Lane { list, cache, .. } = &mut self.lane;
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
            self.lane.list[0].tx.retry_backlog();
        }
    }

    /// Receives the frames still in flight, at least for the quiet time; with `is_hurried` not
    /// longer, even if more arrive.
    pub(super) fn receive_rest(&mut self, is_hurried: bool) {
        let mut since = Instant::now();
        loop {
            // After the quiet time the ports are polled once more: this thread may have been
            // interrupted.
            let is_quiet = since.elapsed() >= QUIET_TIME;
            let mut received = 0;
            for at in 0..self.lane.list.len() {
                self.lane.list[at].tx.retry_backlog();
                received += self.receive_and_free(at);
            }
            if received > 0 && !is_hurried {
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
pub(super) fn sender_of(mode: RawMode, ports: usize) -> usize {
    match mode {
        RawMode::RxOnly => ports - 1,
        _ => 0,
    }
}
