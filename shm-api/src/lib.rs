//! The shared-memory ABI between `siwd` and the applications it serves.
//!
//! ```text
//!  application (client-lib)                         siwd
//!  ------------------------                         ----
//!  SqProducer  --- work queue, shared memory -----> SqConsumer   (worker)
//!  SrqProducer --- shared receive queue ----------> SrqConsumer  (any worker)
//!  DoorbellProducer --- (client, worker) ring ----> DoorbellConsumer
//!  CqConsumer  <-- one ring per worker ------------ CqProducer   (worker)
//!  ControlSocket <== SOCK_SEQPACKET + fds ========> ControlSocket (control thread)
//! ```
//!
//! The daemon creates every mapping and does not trust the application: each index read from shared
//! memory is checked, and each work request is copied once and validated from the private copy. The
//! synchronisation steps are in [`siw_lockfree`], where loom explores them; code that only the daemon
//! needs (memory keys and the memory of queues) is in `siw-memory`.
//!
//! Everything in shared memory and on the control socket is little-endian
//! x86-64 `repr(C)` with asserted sizes and offsets.
//!
//! | to learn about | read |
//! |---|---|
//! | posting and taking work requests | [`work_queue`], [`wqe`], [`shared_receive_queue`] |
//! | completions and their events | [`work_completion`], [`completion_queue`] |
//! | waking a worker | [`doorbell`] |
//! | creating objects, connecting | [`control`] |
//! | a live upgrade of the daemon | `saved` (with the feature `serde`) |
//! | mappings | [`shared_memory`], and [`fault_guard`] for mappings whose pages a client can free |
#![warn(missing_docs)]

pub mod access;
pub mod atomic;
pub mod completion_queue;
pub mod control;
pub mod device_identity;
pub mod doorbell;
pub mod fault_guard;
pub mod local_wqe;
pub mod persona;
pub mod prefetch;
mod ring_memory;
#[cfg(feature = "serde")]
pub mod saved;
pub mod shared_memory;
pub mod shared_receive_queue;
pub mod spin;
pub mod work_completion;
pub mod work_queue;
pub mod wqe;

pub use access::{Access, WindowType};
pub use atomic::AtomicArgs;
pub use completion_queue::{CqConsumer, CqGeometry, CqOverflow, CqProducer};
pub use doorbell::{DoorbellConsumer, DoorbellProducer, WorkerPage, WorkerPageView};
pub use local_wqe::{BindMw, FastReg};
pub use shared_memory::{OutOfBounds, SharedMemory};
pub use shared_receive_queue::{LowWaterMark, SrqConsumer, SrqGeometry, SrqProducer, SrqRing};
pub use work_completion::{Wc, WcFlags, WcOpcode, WcStatus};
pub use work_queue::{QpGeometry, RingError, RqConsumer, RqProducer, SqConsumer, SqProducer};
pub use wqe::{
    Opcode, PlainSend, RecvWqe, RecvWr, SendData, SendWqe, SendWr, Sge, WqeError, WrFlags,
};
