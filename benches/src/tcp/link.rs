//! Two ports and what joins them, served by one thread.

use std::sync::Arc;

use dpdk::{
    ChecksumStatus, Eal, EalConfig, ExtMemory, MbufCache, Mempool, OwnedMemory, Port, PortConfig,
    RegisteredThread, RxBatch, RxQueue, TrackerPool, TxBatch, TxQueue, hugepage_sizes,
};
use siw_tcp::RxChecksum;

use super::sink::Source;

/// Payload is sent from memory of so many bytes: more than fits a core's L2 cache twice would
/// measure the memory instead.
pub const MEMORY: usize = 1 << 20;
const EAL_MB: u32 = 192;
const BUFFERS: u32 = 32_767;

/// DPDK, started once in a process, and a pool.
pub struct Machine {
    pub eal: Eal,
    pub pool: Mempool,
    _registered: RegisteredThread,
}

impl Machine {
    pub fn start() -> Result<Machine, String> {
        let free_kb: u64 = hugepage_sizes()
            .iter()
            .map(|size| size.free * size.page_kb)
            .sum();
        let eal = Eal::init(EalConfig {
            file_prefix: format!("siw-tcp-perf-{}", std::process::id()),
            hugepages: free_kb >= u64::from(EAL_MB) * 1024,
            memory_mb: EAL_MB,
            log_level: "error".into(),
            ..EalConfig::default()
        })
        .map_err(text)?;
        let registered = eal.register_thread().map_err(text)?;
        let pool = Mempool::new(&eal, "siw-tcp-perf", BUFFERS, 256, 2048, None).map_err(text)?;
        Ok(Machine {
            eal,
            pool,
            _registered: registered,
        })
    }

    /// Starts a port with a queue in each direction.
    pub fn open(&self, mut port: Port, config: &PortConfig) -> Result<End, String> {
        let caps = port
            .configure(config, std::slice::from_ref(&self.pool))
            .map_err(text)?;
        let (rx, tx) = port.start().map_err(text)?.remove(0);
        Ok(End {
            rx: rx.ok_or("a port has no receive queue")?,
            tx: tx.ok_or("a port has no transmit queue")?,
            inn: RxBatch::new(),
            out: TxBatch::new(),
            offload: caps.offloads.tx_checksum,
            tso: caps.offloads.tso,
            rx_checksum: caps.offloads.rx_checksum,
            trusted: false,
            _port: port,
        })
    }

    /// The ends of a link in memory, as the daemon's pairs are.
    pub fn rings(&self, name: &str) -> Result<[End; 2], String> {
        let (first, second) = Port::create_ring_pair(&self.eal, name, 1, 1024).map_err(text)?;
        let open = |port| {
            let mut end = self.open(port, &PortConfig::default())?;
            // Nothing can change a frame on its way.
            (end.offload, end.trusted) = (false, true);
            Ok::<_, String>(end)
        };
        Ok([open(first)?, open(second)?])
    }

    pub fn source(&self, external: bool) -> Result<(SourceMemory, TrackerPool), String> {
        let memory: Arc<dyn ExtMemory> = Arc::new(OwnedMemory::new(MEMORY));
        let mut trackers = TrackerPool::new(4);
        let tracker = trackers.alloc(memory).ok_or("no tracker is free")?;
        let source = Source {
            cache: MbufCache::new(&self.pool),
            tracker,
            external,
        };
        Ok((SourceMemory(source), trackers))
    }
}

/// What frames are made of.
pub struct SourceMemory(pub(super) Source);

/// One port.
pub struct End {
    pub(super) rx: RxQueue,
    pub(super) tx: TxQueue,
    pub(super) inn: RxBatch,
    pub(super) out: TxBatch,
    /// The port fills in checksums.
    pub offload: bool,
    pub tso: bool,
    pub rx_checksum: bool,
    /// Frames are good as they are.
    pub trusted: bool,
    _port: Port,
}

impl End {
    #[inline]
    pub(super) fn trust(&self) -> Trust {
        Trust {
            always: self.trusted,
            verdict: self.rx_checksum,
        }
    }
}

/// Whose word counts for the checksums of received frames.
#[derive(Debug, Clone, Copy)]
pub(super) struct Trust {
    always: bool,
    /// The port's.
    verdict: bool,
}

impl Trust {
    #[inline]
    pub(super) fn checksum(self, mbuf: &dpdk::Mbuf) -> RxChecksum {
        if self.always {
            return RxChecksum::Good;
        }
        if !self.verdict {
            return RxChecksum::Unknown;
        }
        match (mbuf.rx_ip_checksum(), mbuf.rx_l4_checksum()) {
            (ChecksumStatus::Bad, _) | (_, ChecksumStatus::Bad) => RxChecksum::Bad,
            (_, ChecksumStatus::Unknown) => RxChecksum::Unknown,
            (ChecksumStatus::Unknown, _) => RxChecksum::TcpGood,
            _ => RxChecksum::Good,
        }
    }
}

pub(super) fn text(e: dpdk::Error) -> String {
    e.to_string()
}
