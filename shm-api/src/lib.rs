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
pub use shared::*;

/// All that works on real shared memory, whose atomics loom cannot stand in for: under loom there is
/// the code above alone. A folder of its own in the module tree only, seen from outside as the
/// crate's own.
#[cfg(not(loom))]
#[path = "."]
mod shared {
    pub mod atomic;
    pub mod binding;
    pub mod completion_queue;
    pub mod control;
    pub mod crc;
    mod crc_fold;
    pub mod doorbell;
    pub mod gap_copy;
    pub mod key_table;
    pub mod local_wqe;
    pub mod memory_region;
    pub mod queue_alloc;
    pub mod region;
    pub mod shared_receive_queue;
    pub mod spin;
    pub mod work_queue;
    pub mod wqe;

    pub use atomic::AtomicArgs;
    pub use completion_queue::{
        CqConsumer, CqGeometry, CqOverflow, CqProducer, Cqe, WcFlags, WcOpcode, WcStatus,
    };
    pub use doorbell::{DoorbellConsumer, DoorbellProducer, WorkerPage, WorkerPageView};
    pub use gap_copy::Gaps;
    pub use key_table::{DeregError, KeyTable, Reader, Retired, Stag};
    pub use local_wqe::{BindMw, FastReg};
    pub use memory_region::{Access, KeyError, Mr, WindowType};
    pub use region::{OutOfBounds, Region};
    pub use shared_receive_queue::{LowWater, SrqConsumer, SrqGeometry, SrqProducer, SrqRing};
    pub use work_queue::{QpGeometry, RingError, RqConsumer, RqProducer, SqConsumer, SqProducer};
    pub use wqe::{Data, Opcode, RecvDesc, RecvWqe, SendDesc, SendWqe, Sge, WqeError, WrFlags};
}
