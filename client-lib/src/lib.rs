//! RDMA verbs for applications of `siwd`, over shared memory.
//!
//! ```no_run
//! use siw::{Access, ConnectOptions, Context, Cq, QpInit, SendWr, Wc};
//! # fn main() -> Result<(), siw::Error> {
//! let ctx = Context::open(None)?;
//! let pd = ctx.alloc_pd()?;
//! let mr = pd.alloc_mr(4096, Access::LOCAL_WRITE)?;
//! let cq = Cq::new(&ctx, 64, None)?;
//! let qp = pd.create_qp(&cq, &cq, &QpInit::default())?;
//! let (_conn, _info) = qp.connect_blocking(
//!     "10.0.0.2:7174".parse().unwrap(),
//!     &ConnectOptions::default(),
//! )?;
//! qp.post_send(&[SendWr::send(1, siw::Data::Sges(&[mr.sge(0, 64)]))]).map_err(|e| e.error)?;
//! let mut wc = [Wc::default(); 8];
//! let n = cq.wait(&mut wc, None)?;
//! # let _ = n; Ok(()) }
//! ```
//!
//! Objects free themselves when dropped and keep alive what they need. Posting and
//! polling allocate nothing, take a spin lock that is free in practice, and make a
//! system call only to wake a sleeping worker. When the daemon goes away every
//! blocked call returns [`Error::DaemonGone`], and polling does after the last
//! completion was taken.
#![deny(unsafe_code)]

mod cm;
mod context;
mod cq;
mod cq_resize;
mod credit;
mod drain;
mod error;
mod fast_mr;
mod memory;
mod qp;
mod srq;
mod window;

#[allow(unsafe_code)]
#[doc(hidden)]
pub mod capi;

pub use cm::{
    CmChannel, CmEvent, CmListener, ConnectOptions, ConnectionInfo, ConnectionRequest,
    ListenOptions, Markers, OutOfOrder, PeerPreset, ReadyToReceive, TerminateOrder,
};
pub use context::{AsyncEvent, Context, DeviceInfo};
pub use cq::{CompletionChannel, Cq};
pub use drain::DRAIN_WR_ID;
pub use error::{Error, PostError};
pub use fast_mr::FastMr;
pub use memory::{Arena, Mr, Pd, ReregChange};
pub use qp::{Qp, QpAttr, QpInit, VerbsQpState};
pub use siw_shm::control::{AsyncEventKind, Limits, QpState};
pub use siw_shm::{
    Access, AtomicArgs, Opcode, RecvWr, SendData, SendWr, Sge, Wc, WcFlags, WcOpcode, WcStatus,
    WrFlags,
};
pub use srq::{Srq, SrqAttr, SrqInit};
pub use window::{Mw, MwBind, WindowType, inc_rkey};
