//! Ports and the link between them, served by one thread.

use anyhow::anyhow;
use std::sync::Arc;

use dpdk::{
    ChecksumStatus, Eal, EalConfig, ExtMemory, MbufCache, Mempool, OwnedMemory, PortConfig,
    RegisteredThread, RxBatch, TrackerPool, TxBatch, hugepage_sizes,
};
use siw_net::RxChecksum;
use siw_ports::{Port, RxQueue, TxQueue};

use super::sink::PayloadSource;

/// Size of the payload memory: if two copies exceeded a core's L2 cache, the benchmark would
/// measure memory instead.
pub const MEMORY_BYTES: usize = 1 << 20;
const EAL_MB: u32 = 192;
const POOL_BUFFERS: u32 = 32_767;

/// DPDK, started once per process, and a pool of packet buffers.
pub struct BenchDpdk {
    /// DPDK's environment.
    pub eal: Eal,
    /// Packet buffers of all ports.
    pub pool: Mempool,
    _registered: RegisteredThread,
}

impl BenchDpdk {
    /// Starts DPDK and registers the calling thread.
    pub fn start_eal() -> anyhow::Result<BenchDpdk> {
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
        })?;
        let registered = eal.register_thread()?;
        let pool = Mempool::new(&eal, "siw-tcp-perf", POOL_BUFFERS, 256, 2048, None)?;
        Ok(BenchDpdk {
            eal,
            pool,
            _registered: registered,
        })
    }

    /// Starts a port with one queue in each direction.
    pub fn open_port(&self, mut port: Port, config: &PortConfig) -> anyhow::Result<PortEnd> {
        let caps = port.configure(config, std::slice::from_ref(&self.pool))?;
        let (rx, tx) = port.start()?.remove(0);
        Ok(PortEnd {
            rx: rx.ok_or_else(|| anyhow!("a port has no receive queue"))?,
            tx: tx.ok_or_else(|| anyhow!("a port has no transmit queue"))?,
            received: RxBatch::new(),
            out: TxBatch::new(),
            offload: caps.offloads.tx_checksum,
            tso: caps.offloads.tso,
            rx_checksum: caps.offloads.rx_checksum,
            trusted: false,
            _port: port,
        })
    }

    /// Opens a ring pair like the daemon's embedded loopback.
    pub fn open_ring_pair(&self, name: &str) -> anyhow::Result<[PortEnd; 2]> {
        let (first, second) = Port::create_ring_pair(&self.eal, name, 1, 1024)?;
        let open = |port| {
            let mut end = self.open_port(port, &PortConfig::default())?;
            // Frames cannot be corrupted between the ends.
            (end.offload, end.trusted) = (false, true);
            anyhow::Ok(end)
        };
        Ok([open(first)?, open(second)?])
    }

    /// Creates the payload memory. `external`: send references to it, instead of unwritten buffer
    /// bytes.
    pub fn new_source(&self, external: bool) -> anyhow::Result<(SourceMemory, TrackerPool)> {
        let memory: Arc<dyn ExtMemory> = Arc::new(OwnedMemory::new(MEMORY_BYTES));
        let mut trackers = TrackerPool::new(4);
        let tracker = trackers
            .alloc(memory)
            .ok_or_else(|| anyhow!("no tracker is free"))?;
        let source = PayloadSource {
            cache: MbufCache::new(&self.pool),
            tracker,
            external,
        };
        Ok((SourceMemory(source), trackers))
    }
}

/// Buffers and payload memory of generated frames.
pub struct SourceMemory(pub(super) PayloadSource);

/// One port, with its received burst and its burst to send.
pub struct PortEnd {
    pub(super) rx: RxQueue,
    pub(super) tx: TxQueue,
    pub(super) received: RxBatch,
    pub(super) out: TxBatch,
    /// The port fills in checksums.
    pub offload: bool,
    /// The port segments super-segments (TSO).
    pub tso: bool,
    /// The port verifies checksums.
    pub rx_checksum: bool,
    /// Checksums need not be verified, since frames cannot be corrupted.
    pub trusted: bool,
    _port: Port,
}

impl PortEnd {
    #[inline]
    pub(super) fn checksum_trust(&self) -> ChecksumTrust {
        ChecksumTrust {
            always: self.trusted,
            verdict: self.rx_checksum,
        }
    }
}

/// Rule by which checksums of received frames count as correct.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChecksumTrust {
    /// They need not be verified.
    always: bool,
    /// The port verifies them.
    verdict: bool,
}

impl ChecksumTrust {
    #[inline]
    pub(super) fn checksum_of(self, mbuf: &dpdk::Mbuf) -> RxChecksum {
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
