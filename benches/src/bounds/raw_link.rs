//! Raw frames over a ring pair like the daemon's embedded one, both ends in one thread: the cost of
//! the link itself. Used by [`super::Bounds`].

use super::framing::{BOUND_TIME, CRC_BYTES, Framing, Piece, PieceWalk};
use crate::measurement::{gigabits_per_second, new_histogram};
use crate::plan::MeasurementPlan;
use crate::raw::PayloadWay;
use anyhow::{anyhow, bail};
use dpdk::{
    BURST, ChainBuilder, Eal, EalConfig, ExtMemory, ExtTracker, Mbuf, MbufCache, Mempool, Port,
    PortConfig, RegisteredThread, RxBatch, RxQueue, TrackerPool, TxBatch, TxQueue, hugepage_sizes,
};
use siw_shm::SharedMemory;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

/// Longest frame that fits into one buffer by copying.
pub(super) const COPIED_FRAME_MAX: usize = BUFFER_ROOM as usize;
/// Data room of a packet buffer in bytes.
const BUFFER_ROOM: u16 = 2048;
/// Payload bytes in one burst of the path: what is between sender and receiver stays in the cache.
const BURST_BYTES: usize = 64 << 10;
/// Parts into which the measurement of the path is divided; the fastest counts.
const PATH_PARTS: u32 = 5;
/// Memory of this process's EAL in MiB.
const EAL_MB: u32 = 48;

/// A ring pair like the daemon's embedded one.
pub struct RawLink {
    forward_queues: (TxQueue, RxQueue),
    backward_queues: (TxQueue, RxQueue),
    cache: MbufCache,
    trackers: TrackerPool,
    _ports: (Port, Port),
    _registered: RegisteredThread,
}

impl RawLink {
    /// Starts DPDK's environment, once per process. Must be called on the measuring thread, which
    /// is registered with the environment.
    pub fn new() -> anyhow::Result<RawLink> {
        let free_kb: u64 = hugepage_sizes()
            .iter()
            .map(|size| size.free * size.page_kb)
            .sum();
        let fail = |error: dpdk::Error| anyhow!("the raw link cannot be measured: {error}");
        let eal = Eal::init(EalConfig {
            file_prefix: format!("siw-perf-{}", std::process::id()),
            hugepages: free_kb >= u64::from(EAL_MB) * 1024,
            memory_mb: EAL_MB,
            log_level: "error".into(),
            ..EalConfig::default()
        })
        .map_err(fail)?;
        let registered = eal.register_thread().map_err(fail)?;
        let pool = Mempool::new(&eal, "siw-perf", 8191, 256, BUFFER_ROOM, None).map_err(fail)?;
        let (mut left, mut right) =
            Port::create_ring_pair(&eal, "siwperf", 1, 1024).map_err(fail)?;
        for port in [&mut left, &mut right] {
            port.configure(&PortConfig::default(), std::slice::from_ref(&pool))
                .map_err(fail)?;
        }
        let queues = |port: &mut Port| {
            let (rx, tx) = port.start().map_err(fail)?.remove(0);
            anyhow::Ok((
                rx.ok_or_else(|| anyhow!("the ring has no receive queue"))?,
                tx.ok_or_else(|| anyhow!("the ring has no transmit queue"))?,
            ))
        };
        let (left_rx, left_tx) = queues(&mut left)?;
        let (right_rx, right_tx) = queues(&mut right)?;
        Ok(RawLink {
            forward_queues: (left_tx, right_rx),
            backward_queues: (right_tx, left_rx),
            cache: MbufCache::new(&pool),
            trackers: TrackerPool::new(4),
            _ports: (left, right),
            _registered: registered,
        })
    }

    /// Gb/s of payload in one direction, both ends in this thread.
    pub(super) fn measure_stream(
        &mut self,
        plan: &MeasurementPlan,
        framing: Framing,
        way: PayloadWay,
        src: &Arc<SharedMemory>,
    ) -> anyhow::Result<f64> {
        let memory: Arc<dyn ExtMemory> = src.clone();
        let tracker = self
            .trackers
            .alloc(memory)
            .ok_or_else(|| anyhow!("no tracker is free"))?;
        let (size, stride) = (plan.size as usize, plan.slot_stride());
        let set = plan.initiator_bytes();
        let (mut out, mut received) = (TxBatch::new(), RxBatch::new());
        let (mut slot, mut at, mut bytes, mut seen) = (0, 0, 0u64, 0u64);
        let header = vec![0x42u8; framing.header];
        let mut start = Instant::now();
        let mut warm = false;
        let result = loop {
            while !out.is_full() {
                let length = framing.payload.min(size - at);
                let payload = (src, slot + at, length);
                let Some(frame) = build_frame(&mut self.cache, &tracker, way, &header, payload)
                else {
                    break;
                };
                if out.push(frame).is_err() {
                    break;
                }
                at += length;
                if at == size {
                    at = 0;
                    slot = (slot + stride) % set;
                }
            }
            self.forward_queues.0.tx_burst(&mut out);
            self.forward_queues.1.rx_burst(&mut received);
            for mbuf in received.drain() {
                // The payload is the frame without headers and CRC.
                bytes += u64::from(mbuf.pkt_len()) - (framing.header + CRC_BYTES) as u64;
                seen ^= u64::from(mbuf.data()[framing.header - 1]);
                self.cache.free(mbuf);
            }
            let now = Instant::now();
            if !warm && now - start > BOUND_TIME / 8 {
                (warm, start, bytes) = (true, now, 0);
            } else if warm && now - start >= BOUND_TIME {
                break gigabits_per_second(bytes, now - start);
            }
        };
        black_box(seen);
        self.drain_rings(&mut out);
        self.trackers.free(tracker);
        Ok(result)
    }

    /// Gb/s of payload through all steps of a transfer on one core: `work` at the sender for each
    /// FPDU, segments of `fpdus` FPDUs over the ring, and `work` at the receiver. The payload in the
    /// segments is only referred to. The fastest of several parts counts.
    pub(super) fn measure_path<T, R>(
        &mut self,
        plan: &MeasurementPlan,
        framing: Framing,
        fpdus: usize,
        src: &Arc<SharedMemory>,
        mut work: PathWork<T, R>,
    ) -> anyhow::Result<f64>
    where
        T: FnMut(Piece) -> anyhow::Result<()>,
        R: FnMut(Piece) -> anyhow::Result<()>,
    {
        let memory: Arc<dyn ExtMemory> = src.clone();
        let tracker = self
            .trackers
            .alloc(memory)
            .ok_or_else(|| anyhow!("no tracker is free"))?;
        let mut sent = PieceWalk::new(plan, framing);
        let mut received = sent.clone();
        let segment = fpdus * framing.payload.min(plan.size as usize);
        let burst = (BURST_BYTES / segment).clamp(1, BURST);
        let header = vec![0x42u8; framing.header];
        let (mut out, mut arrived) = (TxBatch::new(), RxBatch::new());
        let (mut bytes, mut seen, mut best) = (0u64, 0u64, 0.0f64);
        let mut start = Instant::now();
        let mut part = 0;
        while part <= PATH_PARTS {
            for _ in 0..burst {
                let first = sent.clone().next_piece();
                let payload = (src, first.from, first.length);
                let way = PayloadWay::Reference;
                let Some(frame) = build_frame(&mut self.cache, &tracker, way, &header, payload)
                else {
                    break;
                };
                if let Err(frame) = out.push(frame) {
                    self.cache.free(frame);
                    break;
                }
                for _ in 0..fpdus {
                    (work.transmit)(sent.next_piece())?;
                }
            }
            self.forward_queues.0.tx_burst(&mut out);
            self.forward_queues.1.rx_burst(&mut arrived);
            for mbuf in arrived.drain() {
                for _ in 0..fpdus {
                    let piece = received.next_piece();
                    bytes += piece.length as u64;
                    (work.receive)(piece)?;
                }
                seen ^= u64::from(mbuf.data()[framing.header - 1]);
                self.cache.free(mbuf);
            }
            let now = Instant::now();
            if now - start >= BOUND_TIME / PATH_PARTS {
                // The first part warms up pages and caches.
                if part > 0 {
                    best = best.max(gigabits_per_second(bytes, now - start));
                }
                (part, start, bytes) = (part + 1, now, 0);
            }
        }
        black_box(seen);
        self.drain_rings(&mut out);
        self.trackers.free(tracker);
        Ok(best)
    }

    /// Median round trip of a message in microseconds.
    pub(super) fn measure_round_trip(
        &mut self,
        plan: &MeasurementPlan,
        framing: Framing,
        way: PayloadWay,
        src: &Arc<SharedMemory>,
    ) -> anyhow::Result<f64> {
        let memory: Arc<dyn ExtMemory> = src.clone();
        let tracker = self
            .trackers
            .alloc(memory)
            .ok_or_else(|| anyhow!("no tracker is free"))?;
        let header = vec![0x42u8; framing.header];
        let (mut out, mut received) = (TxBatch::new(), RxBatch::new());
        let mut times = new_histogram()?;
        let begin = Instant::now();
        let mut last = begin;
        while last - begin < BOUND_TIME {
            for (tx, rx) in [
                (&mut self.forward_queues.0, &mut self.forward_queues.1),
                (&mut self.backward_queues.0, &mut self.backward_queues.1),
            ] {
                let mut left = plan.size as usize;
                for (at, length) in framing.payload_ranges(plan.size as usize) {
                    let payload = (src, at, length);
                    let frame = build_frame(&mut self.cache, &tracker, way, &header, payload);
                    if let Some(frame) = frame {
                        let _ = out.push(frame);
                    }
                    if out.len() == BURST || at + length == plan.size as usize {
                        while !out.is_empty() {
                            tx.tx_burst(&mut out);
                        }
                        rx.rx_burst(&mut received);
                        for mbuf in received.drain() {
                            left -= mbuf.pkt_len() as usize - framing.header - CRC_BYTES;
                            self.cache.free(mbuf);
                        }
                    }
                }
                if left != 0 {
                    bail!("frames were lost on the ring");
                }
            }
            let now = Instant::now();
            times.saturating_record((now - last).as_nanos() as u64);
            last = now;
        }
        self.trackers.free(tracker);
        Ok(times.value_at_quantile(0.5) as f64 / 1e3)
    }

    /// Frees the frames that are still in flight.
    fn drain_rings(&mut self, out: &mut TxBatch) {
        while let Some(mbuf) = out.pop() {
            self.cache.free(mbuf);
        }
        let mut received = RxBatch::new();
        while self.forward_queues.1.rx_burst(&mut received) > 0 {
            for mbuf in received.drain() {
                self.cache.free(mbuf);
            }
        }
    }
}

/// The work on one FPDU's payload at both ends of a path.
pub(super) struct PathWork<T, R> {
    /// At the sender.
    pub(super) transmit: T,
    /// At the receiver.
    pub(super) receive: R,
}

/// A frame with the payload bytes `offset..offset + length` of the memory; `None` while buffers or
/// references are exhausted.
#[inline]
fn build_frame(
    cache: &mut MbufCache,
    tracker: &ExtTracker,
    way: PayloadWay,
    header: &[u8],
    (src, offset, length): (&Arc<SharedMemory>, usize, usize),
) -> Option<Mbuf> {
    let mut chain = ChainBuilder::new(cache.alloc()?);
    chain.append_slice(header);
    if way == PayloadWay::Reference {
        let mut payload = cache.alloc()?;
        if !tracker.attach(&mut payload, offset as u64, length as u16) {
            return None;
        }
        chain.push(payload).ok()?;
        chain.push(cache.alloc()?).ok()?;
    } else {
        src.read(offset, chain.append_room(length as u16)?).ok()?;
    }
    chain.append_slice(&[0; CRC_BYTES]);
    Some(chain.finish())
}
