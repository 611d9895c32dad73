//! Raw frames over a ring pair like the one inside of the daemon, both ends in one
//! thread: what the link itself costs. Called by `bounds.rs`.

use super::framing::{BOUND_TIME, Framing, TRAILER};
use crate::measurement::{gbps, histogram};
use crate::plan::Plan;
use dpdk::{
    BURST, ChainBuilder, Eal, EalConfig, ExtMemory, ExtTracker, Mbuf, MbufCache, Mempool, Port,
    PortConfig, RegisteredThread, RxBatch, RxQueue, TrackerPool, TxBatch, TxQueue, hugepage_sizes,
};
use siw_shm::SharedMemory;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

/// The daemon copies payload up to this into the header's buffer.
const COPY_MAX: usize = 512;
/// Memory of our own EAL.
const EAL_MB: u32 = 48;

/// A ring pair of our own, like the one inside of the daemon.
pub(super) struct Link {
    ab: (TxQueue, RxQueue),
    ba: (TxQueue, RxQueue),
    cache: MbufCache,
    trackers: TrackerPool,
    _ports: (Port, Port),
    _registered: RegisteredThread,
}

impl Link {
    pub(super) fn new() -> Result<Link, String> {
        let free_kb: u64 = hugepage_sizes().iter().map(|h| h.free * h.page_kb).sum();
        let fail = |e: dpdk::Error| format!("the raw link cannot be measured: {e}");
        let eal = Eal::init(EalConfig {
            file_prefix: format!("siw-perf-{}", std::process::id()),
            hugepages: free_kb >= u64::from(EAL_MB) * 1024,
            memory_mb: EAL_MB,
            log_level: "error".into(),
            ..EalConfig::default()
        })
        .map_err(fail)?;
        let registered = eal.register_thread().map_err(fail)?;
        let pool = Mempool::new(&eal, "siw-perf", 8191, 256, 2048, None).map_err(fail)?;
        let (mut a, mut b) = Port::create_ring_pair(&eal, "siwperf", 1, 1024).map_err(fail)?;
        for port in [&mut a, &mut b] {
            port.configure(&PortConfig::default(), std::slice::from_ref(&pool))
                .map_err(fail)?;
        }
        let queues = |port: &mut Port| {
            let (rx, tx) = port.start().map_err(fail)?.remove(0);
            Ok::<_, String>((
                rx.ok_or("the ring has no receive queue")?,
                tx.ok_or("the ring has no transmit queue")?,
            ))
        };
        let (a_rx, a_tx) = queues(&mut a)?;
        let (b_rx, b_tx) = queues(&mut b)?;
        Ok(Link {
            ab: (a_tx, b_rx),
            ba: (b_tx, a_rx),
            cache: MbufCache::new(&pool),
            trackers: TrackerPool::new(4),
            _ports: (a, b),
            _registered: registered,
        })
    }

    /// Gb/s of payload in one direction, both ends in this thread.
    pub(super) fn stream(
        &mut self,
        plan: &Plan,
        framing: Framing,
        src: &Arc<SharedMemory>,
    ) -> Result<f64, String> {
        let memory: Arc<dyn ExtMemory> = src.clone();
        let tracker = self.trackers.alloc(memory).ok_or("no tracker is free")?;
        let (size, stride) = (plan.size as usize, plan.stride());
        let set = plan.initiator_bytes();
        let (mut out, mut inn) = (TxBatch::new(), RxBatch::new());
        let (mut slot, mut at, mut bytes, mut seen) = (0, 0, 0u64, 0u64);
        let header = vec![0x42u8; framing.header];
        let mut start = Instant::now();
        let mut warm = false;
        let result = loop {
            while !out.is_full() {
                let n = framing.payload.min(size - at);
                let Some(frame) = frame(&mut self.cache, &tracker, src, &header, slot + at, n)
                else {
                    break;
                };
                if out.push(frame).is_err() {
                    break;
                }
                at += n;
                if at == size {
                    at = 0;
                    slot = (slot + stride) % set;
                }
            }
            self.ab.0.tx_burst(&mut out);
            self.ab.1.rx_burst(&mut inn);
            for m in inn.drain() {
                // The payload is what is neither headers nor CRC.
                bytes += u64::from(m.pkt_len()) - (framing.header + TRAILER) as u64;
                seen ^= u64::from(m.data()[framing.header - 1]);
                self.cache.free(m);
            }
            let now = Instant::now();
            if !warm && now - start > BOUND_TIME / 8 {
                (warm, start, bytes) = (true, now, 0);
            } else if warm && now - start >= BOUND_TIME {
                break gbps(bytes, now - start);
            }
        };
        black_box(seen);
        self.drain(&mut out);
        self.trackers.free(tracker);
        Ok(result)
    }

    /// Median microseconds of one message there and back.
    pub(super) fn round_trip(
        &mut self,
        plan: &Plan,
        framing: Framing,
        src: &Arc<SharedMemory>,
    ) -> Result<f64, String> {
        let memory: Arc<dyn ExtMemory> = src.clone();
        let tracker = self.trackers.alloc(memory).ok_or("no tracker is free")?;
        let header = vec![0x42u8; framing.header];
        let (mut out, mut inn) = (TxBatch::new(), RxBatch::new());
        let mut times = histogram()?;
        let begin = Instant::now();
        let mut last = begin;
        while last - begin < BOUND_TIME {
            for (tx, rx) in [
                (&mut self.ab.0, &mut self.ab.1),
                (&mut self.ba.0, &mut self.ba.1),
            ] {
                let mut left = plan.size as usize;
                for (at, n) in framing.pieces(plan.size as usize) {
                    if let Some(f) = frame(&mut self.cache, &tracker, src, &header, at, n) {
                        let _ = out.push(f);
                    }
                    if out.len() == BURST || at + n == plan.size as usize {
                        while !out.is_empty() {
                            tx.tx_burst(&mut out);
                        }
                        rx.rx_burst(&mut inn);
                        for m in inn.drain() {
                            left -= m.pkt_len() as usize - framing.header - TRAILER;
                            self.cache.free(m);
                        }
                    }
                }
                if left != 0 {
                    return Err("frames were lost on the ring".into());
                }
            }
            let now = Instant::now();
            times.saturating_record((now - last).as_nanos() as u64);
            last = now;
        }
        self.trackers.free(tracker);
        Ok(times.value_at_quantile(0.5) as f64 / 1e3)
    }

    fn drain(&mut self, out: &mut TxBatch) {
        while let Some(m) = out.pop() {
            self.cache.free(m);
        }
        let mut inn = RxBatch::new();
        while self.ab.1.rx_burst(&mut inn) > 0 {
            for m in inn.drain() {
                self.cache.free(m);
            }
        }
    }
}

/// A frame with the payload bytes `off..off + n` of the memory.
#[inline]
fn frame(
    cache: &mut MbufCache,
    tracker: &ExtTracker,
    src: &SharedMemory,
    header: &[u8],
    off: usize,
    n: usize,
) -> Option<Mbuf> {
    let mut chain = ChainBuilder::new(cache.alloc()?);
    chain.append_slice(header);
    if n > COPY_MAX {
        let mut payload = cache.alloc()?;
        if !tracker.attach(&mut payload, off as u64, n as u16) {
            return None;
        }
        chain.push(payload).ok()?;
        chain.push(cache.alloc()?).ok()?;
    } else {
        src.read(off, chain.append_room(n as u16)?).ok()?;
    }
    chain.append_slice(&[0; TRAILER]);
    Some(chain.finish())
}
