//! The bound of the loopback link on this machine: one thread sends on one port
//! of a ring pair, receives on the other and frees, with nothing in between.
//!
//! `cargo run --release -p dpdk --example raw [seconds] [core]`

use dpdk::{
    BURST, ChainBuilder, Eal, EalConfig, ExtMemory, ExtTracker, Mbuf, MbufCache, Mempool,
    OwnedMemory, Port, PortConfig, RxBatch, TrackerPool, TxBatch, hugepage_sizes,
    pin_current_thread, tsc_hz, tsc_now,
};
use std::error::Error;
use std::sync::Arc;

const PAYLOAD: u16 = 1448;
const HEADER: u16 = 66;
const WORKING_SET: u64 = 1 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let secs: f64 = args.next().map_or(Ok(2.0), |s| s.parse())?;
    let core: usize = args.next().map_or(Ok(0), |s| s.parse())?;
    let free_kb: u64 = hugepage_sizes().iter().map(|h| h.free * h.page_kb).sum();
    let eal = Eal::init(EalConfig {
        hugepages: free_kb >= 128 * 1024,
        memory_mb: 128,
        main_core: core,
        log_level: "error".into(),
        ..EalConfig::default()
    })?;
    pin_current_thread(core)?;
    let _registered = eal.register_thread()?;
    let pool = Mempool::new(&eal, "raw", 8191, 256, 2048, None)?;
    let (mut a, mut b) = Port::create_ring_pair(&eal, "raw", 1, 1024)?;
    for port in [&mut a, &mut b] {
        port.configure(&PortConfig::default(), std::slice::from_ref(&pool))?;
    }
    let (_, tx) = a.start()?.remove(0);
    let (rx, _) = b.start()?.remove(0);
    let (mut tx, mut rx) = (tx.ok_or("no tx queue")?, rx.ok_or("no rx queue")?);
    let mut cache = MbufCache::new(&pool);
    let memory: Arc<dyn ExtMemory> = Arc::new(OwnedMemory::new(WORKING_SET as usize));
    let mut trackers = TrackerPool::new(16);
    let tracker = trackers.alloc(memory).ok_or("no tracker")?;

    let plain = |cache: &mut MbufCache, _: &ExtTracker, _: u64| {
        let mut m = cache.alloc()?;
        m.append(HEADER + PAYLOAD)?;
        Some(m)
    };
    let external = |cache: &mut MbufCache, tracker: &ExtTracker, offset: u64| {
        let mut header = cache.alloc()?;
        header.append(HEADER)?;
        let mut payload = cache.alloc()?;
        if !tracker.attach(&mut payload, offset, PAYLOAD) {
            return None;
        }
        let mut chain = ChainBuilder::new(header);
        chain.push(payload).ok()?;
        Some(chain.finish())
    };
    println!(
        "{}, {} pages, core {core}, payload {PAYLOAD} B",
        Eal::version(),
        if free_kb >= 128 * 1024 {
            "huge"
        } else {
            "normal"
        }
    );
    let mut run = |name: &str, build: &dyn Fn(&mut MbufCache, &ExtTracker, u64) -> Option<Mbuf>| {
        let (mut out, mut inn) = (TxBatch::new(), RxBatch::new());
        let (mut frames, mut bytes, mut offset) = (0u64, 0u64, 0u64);
        let start = tsc_now();
        let end = start + (secs * tsc_hz() as f64) as u64;
        let mut now = start;
        while now < end {
            for _ in 0..BURST {
                let Some(m) = build(&mut cache, &tracker, offset) else {
                    break;
                };
                if out.push(m).is_err() {
                    break;
                }
                offset += u64::from(PAYLOAD);
                if offset + u64::from(PAYLOAD) > WORKING_SET {
                    offset = 0;
                }
            }
            tx.tx_burst(&mut out);
            rx.rx_burst(&mut inn);
            for m in inn.drain() {
                frames += 1;
                bytes += u64::from(m.pkt_len() - u32::from(HEADER));
                cache.free(m);
            }
            now = tsc_now();
        }
        let secs = (now - start) as f64 / tsc_hz() as f64;
        println!(
            "{name:>14}: {:7.1} Gb/s payload, {:6.2} M frames/s, {:5.1} ns a frame",
            bytes as f64 * 8.0 / secs / 1e9,
            frames as f64 / secs / 1e6,
            secs * 1e9 / frames.max(1) as f64,
        );
    };
    run("one buffer", &plain);
    run("header+extbuf", &external);
    trackers.free(tracker);
    Ok(())
}
