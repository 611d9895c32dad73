//! One environment for all tests of a binary, on normal pages: it needs neither privileges nor
//! reserved hugepages.
#![allow(dead_code)]

use dpdk::{
    Eal, EalConfig, ExtMemory, Mbuf, MbufCache, Mempool, OwnedMemory, Port, PortConfig, RxQueue,
    TxQueue,
};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

pub fn config() -> EalConfig {
    EalConfig {
        file_prefix: format!("siwd-test-{}", std::process::id()),
        hugepages: false,
        memory_mb: 192,
        log_level: "warning".into(),
        ..EalConfig::default()
    }
}

pub fn eal() -> &'static Eal {
    static EAL: OnceLock<Eal> = OnceLock::new();
    EAL.get_or_init(|| Eal::init(config()).expect("DPDK starts on normal pages"))
}

/// Returns a name that is unique in this process.
pub fn unique(prefix: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{prefix}{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

pub fn pool(count: u32) -> Mempool {
    Mempool::new(eal(), &unique("p"), count, 0, 2048, None).expect("a pool")
}

/// A page of memory whose byte `i` is `i % 251`.
pub fn pattern() -> Arc<OwnedMemory> {
    let memory = OwnedMemory::new(64 * 1024);
    let bytes: Vec<u8> = (0..memory.len()).map(|i| (i % 251) as u8).collect();
    assert!(memory.write(0, &bytes));
    Arc::new(memory)
}

pub fn as_ext(memory: &Arc<OwnedMemory>) -> Arc<dyn ExtMemory> {
    memory.clone()
}

pub fn filled(cache: &mut MbufCache, bytes: &[u8]) -> Mbuf {
    let mut m = cache.alloc().expect("a buffer");
    assert!(m.append_slice(bytes));
    m
}

pub fn bytes(m: &Mbuf) -> Vec<u8> {
    m.segments().flatten().copied().collect()
}

/// Configures a port with `queues` queues, starts it and takes them.
pub fn start(port: &mut Port, pool: &Mempool, queues: u16) -> Vec<(RxQueue, TxQueue)> {
    let config = PortConfig {
        rx_queues: queues,
        tx_queues: queues,
        ..PortConfig::default()
    };
    port.configure(&config, std::slice::from_ref(pool)).unwrap();
    let queues = port.start().unwrap();
    queues
        .into_iter()
        .map(|(rx, tx)| (rx.unwrap(), tx.unwrap()))
        .collect()
}
