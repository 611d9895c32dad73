//! Queue pairs that are connected without rdma_cm: the program specifies the peer's queue pair by
//! address and number, and the access rights of the peer (ibv_modify_qp(3)).

use crate::{Access, Error, Qp};
use siw_shm::control::{Addr, MODIFY_ACCESS, ModifyQp, PairQp};
use std::net::IpAddr;

/// The other end of a queue pair that is connected without rdma_cm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PairOptions {
    /// Device index.
    pub device: u32,
    /// An address of the device.
    pub local: IpAddr,
    /// The peer's address.
    pub peer: IpAddr,
    /// The peer's QP number.
    pub peer_qp_num: u32,
    /// Reads this side may have outstanding.
    pub ord: u32,
    /// Reads the peer may have outstanding.
    pub ird: u32,
    /// Rights of [`Access::REMOTE`] denied to the peer, even if a key grants them.
    pub denied_access: Access,
}

impl Qp {
    /// Connects it with the specified queue pair of the peer, without rdma_cm (ibv_modify_qp(3) to
    /// RTR); the peer program does the same, unless the queue pair names itself and gets its own
    /// messages. Work requests may be posted at once: they are sent
    /// when the connection is established. If it fails they are flushed, and the asynchronous event
    /// QP_FATAL has the reason.
    ///
    /// # Errors
    /// `EADDRNOTAVAIL`: `local` is not an address of the device. `EHOSTUNREACH`: no route to the
    /// peer. `EISCONN`: it is or was connected.
    pub fn connect_pair(&self, pair: &PairOptions) -> Result<(), Error> {
        self.0.pd.ctx().call_daemon(&PairQp {
            qp_num: self.qp_num(),
            peer_qp_num: pair.peer_qp_num,
            device: pair.device,
            ord: pair.ord,
            ird: pair.ird,
            denied_access: pair.denied_access.0,
            local: Addr::from(pair.local),
            peer: Addr::from(pair.peer),
        })?;
        self.allow_early_sends(true);
        Ok(())
    }

    /// Sets the rights of [`Access::REMOTE`] denied to the peer, even if a key grants them;
    /// initially none (`qp_access_flags` of ibv_modify_qp(3) has the allowed ones).
    pub fn deny_access(&self, denied: Access) -> Result<(), Error> {
        self.0.pd.ctx().call_daemon(&ModifyQp {
            qp_num: self.qp_num(),
            state: 0,
            flags: MODIFY_ACCESS,
            denied_access: denied.0,
        })?;
        Ok(())
    }
}
