//! A safe wrapper over the part of DPDK that siwd uses. All of the project's
//! DPDK `unsafe` lives here; the daemon above forbids it.
//!
//! ```text
//!   Eal ──┬── Mempool ── MbufCache (one a worker) ── Mbuf ── ChainBuilder
//!         │                                           │
//!         │              TrackerPool ── ExtTracker ───┘  (external buffers)
//!         └── Port ──┬── RxQueue ── RxBatch
//!                    └── TxQueue ── TxBatch
//! ```
//!
//! [`Eal`] is initialised once a process; pools and ports hold it alive. A
//! worker thread pins itself, calls [`Eal::register_thread`], and owns one
//! [`RxQueue`] and one [`TxQueue`] of each port. The per-packet path crosses the
//! FFI once a burst; buffers come from and go back to an [`MbufCache`].

mod batch;
mod cache;
mod chain;
mod driver_traits;
mod eal;
mod error;
mod ext;
mod ext_memory;
mod hugepages;
mod log;
mod mbuf;
mod mempool;
mod offload;
mod port;
mod port_config;
mod port_control;
mod probe;
mod queue;
mod ring_pair;
mod thread;
mod tsc;

pub use batch::{BURST, BatchDrain, MbufBatch, RxBatch, TxBatch};
pub use cache::MbufCache;
pub use chain::{ChainBuilder, Segments, SplitChain};
pub use driver_traits::{DriverTraits, SoftwareTso};
pub use eal::{Eal, EalConfig, exit_process};
pub use error::{Error, Result};
pub use ext::{ExtTracker, TrackerPool};
pub use ext_memory::{ExtMemory, ExtSlice, ExternalRegion, OwnedMemory};
pub use hugepages::{HugepageSize, check_free_hugepages, hugepage_sizes};
pub use mbuf::{Mbuf, prefetch};
pub use mempool::Mempool;
pub use offload::{ChecksumStatus, TxOffload};
pub use port::{Port, PortInfo};
pub use port_config::{Offloads, PortCaps, PortConfig};
pub use port_control::{LinkStatus, PortCounters};
pub use queue::{RxQueue, TxQueue};
pub use thread::{RegisteredThread, pin_current_thread};
pub use tsc::{tsc_hz, tsc_now};

/// Bytes that a fresh mbuf keeps free before its data, for headers to prepend.
pub const HEADROOM: u16 = dpdk_sys::RTE_PKTMBUF_HEADROOM as u16;
