//! Memory windows (ibv_alloc_mw(3), ibv_bind_mw(3)): parts of a region with a key of their own for
//! peers, bound and unbound by work requests.

use crate::locking::{Inherited, ProcessMutex};
use crate::{Error, MwBind, Pd, PostError, Qp, SendWr, WrFlags};
use siw_shm::BindMw;
use siw_shm::control::{AllocMw, DeallocMw};
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicU32, Ordering};

pub use siw_shm::WindowType;

/// The next key of the same window or region (ibv_inc_rkey(3)).
pub fn inc_rkey(rkey: u32) -> u32 {
    (rkey & !0xff) | (rkey.wrapping_add(1) & 0xff)
}

/// A memory window. Dropping frees it: afterwards no peer can use it.
pub struct Mw {
    pd: Pd,
    window_type: WindowType,
    home: u32,
    rkey: AtomicU32,
    /// Held from the choice of a key until its bind is posted: each bind names the key of the one before.
    binding: ProcessMutex<()>,
}

impl Pd {
    /// Allocates an unbound window. Type 1 works on every queue pair of the protection domain, type
    /// 2 (2B) on the queue pair that it is bound through.
    pub fn alloc_mw(&self, kind: WindowType) -> Result<Mw, Error> {
        let (reply, _) = self.ctx().call_daemon(&AllocMw {
            pd: self.id(),
            kind: match kind {
                WindowType::One => 1,
                WindowType::Two => 2,
            },
        })?;
        Ok(Mw {
            pd: self.clone(),
            window_type: kind,
            home: reply.rkey,
            rkey: AtomicU32::new(reply.rkey),
            binding: ProcessMutex::new(()),
        })
    }
}

impl Mw {
    /// Key for peers, as of the last posted bind.
    pub fn rkey(&self) -> u32 {
        self.rkey.load(Ordering::Relaxed)
    }

    /// Its type.
    pub fn window_type(&self) -> WindowType {
        self.window_type
    }

    /// Posts a bind under the next key (ibv_bind_mw(3)); completes as BIND_MW. If the bind is
    /// refused, the queue pair ends with MW_BIND_ERR. Returns the new key, also available from
    /// [`Self::rkey`].
    pub fn post_bind(
        &self,
        qp: &Qp,
        wr_id: u64,
        flags: WrFlags,
        binding: &MwBind,
    ) -> Result<u32, PostError> {
        let _order = self.lock_binding()?;
        let new = inc_rkey(self.rkey());
        self.post_next_bind(qp, wr_id, flags, binding, new)?;
        Ok(new)
    }

    /// As [`Self::post_bind`], with a key whose low octet the caller chooses.
    pub fn post_bind_with_key(
        &self,
        qp: &Qp,
        wr_id: u64,
        flags: WrFlags,
        binding: &MwBind,
        new_rkey: u32,
    ) -> Result<(), PostError> {
        let _order = self.lock_binding()?;
        self.post_next_bind(qp, wr_id, flags, binding, new_rkey)
    }

    fn lock_binding(&self) -> Result<MutexGuard<'_, ()>, PostError> {
        let error = |inherited: Inherited| PostError {
            index: 0,
            error: inherited.into(),
        };
        self.binding.lock().map_err(error)
    }

    fn post_next_bind(
        &self,
        qp: &Qp,
        wr_id: u64,
        flags: WrFlags,
        binding: &MwBind,
        new_rkey: u32,
    ) -> Result<(), PostError> {
        self.pd
            .ctx()
            .check_same(qp.pd().ctx(), "queue pair")
            .map_err(|error| PostError { index: 0, error })?;
        qp.post_send(&[self
            .bind_request(wr_id, binding, new_rkey)
            .with_flags(flags)])?;
        self.rkey.store(new_rkey, Ordering::Relaxed);
        Ok(())
    }

    /// Builds the bind work request, to be posted among others; then call [`Self::on_bind_posted`].
    /// The caller lets no other bind of the window come in between.
    pub fn bind_request(&self, wr_id: u64, binding: &MwBind, new_rkey: u32) -> SendWr<'static> {
        SendWr::bind_mw(
            wr_id,
            &BindMw {
                rkey: self.rkey(),
                new_rkey,
                lkey: binding.lkey,
                addr: binding.addr,
                length: binding.length,
                access: binding.access,
            },
        )
    }

    /// Records that a bind with this key was posted.
    pub fn on_bind_posted(&self, rkey: u32) {
        self.rkey.store(rkey, Ordering::Relaxed);
    }
}

impl Drop for Mw {
    fn drop(&mut self) {
        self.pd.ctx().free_object(&DeallocMw {
            rkey: self.home,
            reserved: 0,
        });
    }
}
