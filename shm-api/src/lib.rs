//! The shared-memory ABI between `siwd` and the applications it serves.
//!
//! ```text
//!  application (client-lib)                         siwd
//!  ------------------------                         ----
//!  SqProducer  --- work queue in a Region --------> SqConsumer   (worker)
//!  SrqProducer --- shared receive queue ----------> SrqConsumer  (any worker)
//!  DoorbellProducer --- (client, worker) ring ----> DoorbellConsumer
//!  CqConsumer  <-- one ring per worker ------------ CqProducer   (worker)
//!  control::Conn <== SOCK_SEQPACKET + fds ========> control::Conn (control thread)
//! ```
//!
//! The daemon creates every mapping and does not trust the application: each
//! index read from shared memory is checked, each work request is copied once
//! and validated from the private copy. All lock-free code of the project is in
//! [`lockfree`] and [`key_table`], written against the [`sync`] facade so that
//! loom can explore it (`RUSTFLAGS="--cfg loom" cargo test -p siw-shm --release`).
//!
//! Everything in shared memory and on the control socket is little-endian
//! x86-64 `repr(C)` with asserted sizes and offsets.

pub mod epoch;
pub mod key_cell;
pub mod lockfree;
pub mod sync;

#[cfg(not(loom))]
pub mod atomic;
#[cfg(not(loom))]
pub mod binding;
#[cfg(not(loom))]
pub mod completion_queue;
#[cfg(not(loom))]
pub mod control;
#[cfg(not(loom))]
pub mod crc;
#[cfg(not(loom))]
mod crc_fold;
#[cfg(not(loom))]
pub mod doorbell;
#[cfg(not(loom))]
pub mod key_table;
#[cfg(not(loom))]
pub mod local_wqe;
#[cfg(not(loom))]
pub mod memory_region;
#[cfg(not(loom))]
pub mod queue_alloc;
#[cfg(not(loom))]
pub mod region;
#[cfg(not(loom))]
pub mod shared_receive_queue;
#[cfg(not(loom))]
pub mod spin;
#[cfg(not(loom))]
pub mod stripes;
#[cfg(not(loom))]
pub mod weave;
#[cfg(not(loom))]
pub mod work_queue;
#[cfg(not(loom))]
pub mod wqe;

#[cfg(not(loom))]
pub use atomic::AtomicArgs;
#[cfg(not(loom))]
pub use completion_queue::{
    CqConsumer, CqGeometry, CqOverflow, CqProducer, Cqe, WcFlags, WcOpcode, WcStatus,
};
#[cfg(not(loom))]
pub use doorbell::{DoorbellConsumer, DoorbellProducer, WorkerPage, WorkerPageView};
#[cfg(not(loom))]
pub use key_table::{DeregError, KeyTable, Reader, Retired, Stag};
#[cfg(not(loom))]
pub use local_wqe::{BindMw, FastReg};
#[cfg(not(loom))]
pub use memory_region::{Access, KeyError, Mr, WindowType};
#[cfg(not(loom))]
pub use region::{OutOfBounds, Region};
#[cfg(not(loom))]
pub use shared_receive_queue::{LowWater, SrqConsumer, SrqGeometry, SrqProducer, SrqRing};
#[cfg(not(loom))]
pub use stripes::Stripes;
#[cfg(not(loom))]
pub use weave::Weave;
#[cfg(not(loom))]
pub use work_queue::{QpGeometry, RingError, RqConsumer, RqProducer, SqConsumer, SqProducer};
#[cfg(not(loom))]
pub use wqe::{Data, Opcode, RecvDesc, RecvWqe, SendDesc, SendWqe, Sge, WqeError, WrFlags};
