//! A safe wrapper for the part of DPDK that siwd uses. All DPDK-related `unsafe` of the project is
//! here; the daemon that uses this crate forbids it.
//!
//! ```text
//!   Eal ──┬── Mempool ── MbufCache (one a worker) ── Mbuf ── ChainBuilder
//!         │                                           │
//!         │              TrackerPool ── ExtTracker ───┘  (external buffers)
//!         └── Port ──┬── RxQueue ── RxBatch
//!                    └── TxQueue ── TxBatch
//! ```
//!
//! [`Eal`] is initialised once per process; pools and ports keep it alive. A worker thread pins
//! itself, calls [`Eal::register_thread`], and owns one [`RxQueue`] and one [`TxQueue`] of each
//! port. The data path crosses the FFI once per burst; buffers are allocated from and returned to
//! an [`MbufCache`].
//!
//! # Example
//! Sends a frame from one end of a ring pair to the other, without hugepages or privileges:
//! ```no_run
//! use dpdk::{Eal, EalConfig, MbufCache, Mempool, Port, PortConfig, RxBatch, TxBatch};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let eal = Eal::init(EalConfig {
//!     hugepages: false,
//!     memory_mb: 64,
//!     ..EalConfig::default()
//! })?;
//! // 1023 buffers of 2048 bytes, none kept for each thread, on any NUMA node.
//! let pool = Mempool::new(&eal, "frames", 1023, 0, 2048, None)?;
//! let (mut left, mut right) = Port::create_ring_pair(&eal, "pair", 1, 256)?;
//! for port in [&mut left, &mut right] {
//!     port.configure(&PortConfig::default(), std::slice::from_ref(&pool))?;
//! }
//! let (_, tx) = left.start()?.remove(0);
//! let (rx, _) = right.start()?.remove(0);
//! let (mut tx, mut rx) = (tx.ok_or("no queue")?, rx.ok_or("no queue")?);
//!
//! let mut cache = MbufCache::new(&pool);
//! let mut frame = cache.alloc().ok_or("no buffer is free")?;
//! assert!(frame.append_slice(b"an Ethernet frame"));
//! let mut out = TxBatch::new();
//! out.push(frame).map_err(|_| "the batch is full")?;
//! tx.tx_burst(&mut out);
//!
//! let mut received = RxBatch::new();
//! rx.rx_burst(&mut received);
//! for frame in received.drain() {
//!     assert_eq!(frame.data(), b"an Ethernet frame");
//!     cache.free(frame);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Diagnostics
//! [`Error`] names the missing resource and the command that provides it. DPDK's log becomes
//! `tracing` events, and its last lines are part of the errors that they explain. [`DriverTraits`]
//! is the only table of link properties by driver.

#![deny(missing_docs)]

mod batch;
mod cache;
mod capability;
mod chain;
mod driver_traits;
mod eal;
mod error;
mod ext;
mod ext_memory;
mod external_region;
mod hugepages;
mod iova_space;
mod log;
mod mbuf;
mod mempool;
mod offload;
mod pci;
mod pool_memory;
mod port;
mod port_config;
mod port_control;
mod port_events;
mod port_inner;
mod probe;
mod queue;
mod ring_pair;
mod tap_interface;
mod thread;
mod tsc;

pub use batch::{BURST, BatchDrain, MbufBatch, RxBatch, TxBatch};
pub use cache::MbufCache;
pub use capability::Capability;
pub use chain::{ChainBuilder, Segments, SplitChain};
pub use driver_traits::{DriverTraits, SoftwareTso};
pub use eal::{Eal, EalConfig, IovaMode, exit_process};
pub use error::{Error, Result};
pub use ext::{ExtTracker, Released, TrackerId, TrackerPool};
pub use ext_memory::{ExtMemory, ExtSlice, OwnedMemory};
pub use external_region::{ExternalRegion, external_regions_left};
pub use hugepages::{HugepageSize, check_free_hugepages, hugepage_sizes};
pub use iova_space::IovaSpace;
pub use mbuf::{Mbuf, prefetch};
pub use mempool::Mempool;
pub use offload::{ChecksumStatus, TxOffload};
pub use pci::{NetworkInterface, PciDevice, PciReadiness};
pub use pool_memory::{BufferPlace, PoolMemory};
pub use port::{Port, PortQueues};
pub use port_config::{
    LinkStatus, OffloadState, Offloads, PortCaps, PortConfig, PortCounters, PortInfo, list_offloads,
};
pub use port_events::PortEvent;
pub use queue::{RxQueue, TxQueue};
pub use thread::{RegisteredThread, allowed_cores, pin_current_thread};
pub use tsc::{tsc_hz, tsc_now};

/// Maximum number of ports of a process.
pub const MAX_PORTS: usize = dpdk_sys::RTE_MAX_ETHPORTS as usize;

/// Headroom of a fresh mbuf: free bytes before its data, for headers to prepend.
pub const HEADROOM: u16 = dpdk_sys::RTE_PKTMBUF_HEADROOM as u16;
