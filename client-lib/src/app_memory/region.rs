//! A registered region of application memory.

use super::process::ONE_AT_A_TIME;
use super::vma::MappedFileId;
use crate::context::ClientInner;
use crate::locking::lock_unpoisoned;
use crate::memory::Arena;
use crate::slices::{RegionKeys, region_methods};
use crate::{Access, Error, Failed, Pd};
use siw_shm::control::{
    DEREG_UNBIND_WINDOWS, DeregMr, ExtentMethod, FreeArena, MemoryExtent, REREG_ACCESS, ReregMr,
};
use std::ops::Range;
use std::sync::Arc;

/// A part of a region in a file that pages were remapped to.
#[derive(Debug)]
pub(super) struct RemappedPart {
    pub file: MappedFileId,
    pub bytes: Range<u64>,
    /// Address of the first byte.
    pub address: usize,
}

impl RemappedPart {
    /// Its addresses.
    pub fn pages(&self) -> Range<usize> {
        self.address..self.address + (self.bytes.end - self.bytes.start) as usize
    }

    /// The pieces before, in and behind a range of pages, without empty ones.
    pub fn split_at(&self, pages: &Range<usize>) -> impl Iterator<Item = RemappedPart> + use<> {
        let (whole, first, file) = (self.pages(), self.bytes.start, self.file);
        let inner =
            pages.start.clamp(whole.start, whole.end)..pages.end.clamp(whole.start, whole.end);
        let pieces = [
            whole.start..inner.start,
            inner.start..inner.end.max(inner.start),
            inner.end.max(inner.start)..whole.end,
        ];
        pieces
            .into_iter()
            .filter(|piece| !piece.is_empty())
            .map(move |piece| {
                let start = first + (piece.start - whole.start) as u64;
                RemappedPart {
                    file,
                    bytes: start..start + piece.len() as u64,
                    address: piece.start,
                }
            })
    }
}

/// Owner of registered memory when its registration ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MemoryOwner {
    /// The program, whose threads may use it meanwhile.
    Program,
    /// A buffer of [`OwnedMr`](crate::OwnedMr), which nobody uses.
    Buffer,
}

/// Parts of a region.
#[derive(Default)]
pub(super) struct Parts {
    /// Addresses of the region.
    pub range: Range<usize>,
    pub extents: Vec<MemoryExtent>,
    /// Parts in files of remapped pages, where their registrations are counted.
    pub remapped: Vec<RemappedPart>,
    /// Arenas kept alive.
    pub arenas: Vec<Arc<Arena>>,
    /// Numbers of mappings that the daemon has for this region only.
    pub imports: Vec<u32>,
    /// Reason why memory is copied, or not remapped for another reason.
    pub reason: String,
}

impl Parts {
    pub fn add_reason(&mut self, reason: &str) {
        if !self.reason.contains(reason) {
            let separator = if self.reason.is_empty() { "" } else { "; " };
            self.reason = format!("{}{separator}{reason}", self.reason);
        }
    }

    pub fn push_extent(&mut self, extent: MemoryExtent) {
        if let Some(last) = self.extents.last_mut()
            && last.arena == extent.arena
            && last.method == extent.method
            && last.offset + last.len == extent.offset
        {
            last.len += extent.len;
            return;
        }
        self.extents.push(extent);
    }
}

/// Frees the daemon's mappings of a region.
pub(super) fn free_imports(ctx: &ClientInner, parts: &Parts) {
    for arena in &parts.imports {
        ctx.post_unanswered(&FreeArena {
            arena: *arena,
            reserved: 0,
        });
    }
}

/// A registered region of application memory. Dropping deregisters it and unbinds the windows that
/// are bound to it. This waits for the daemon, because the memory is the caller's again afterwards (the
/// buffer of an [`OwnedMr`](crate::OwnedMr) is not). If the daemon does not confirm it, private pages are still taken out of its
/// reach where possible; other memory may stay reachable for peers. [`AppMr::dereg`] reports this.
pub struct AppMr {
    pub(super) pd: Pd,
    pub(super) address: usize,
    pub(super) len: usize,
    pub(super) iova: u64,
    pub(super) access: Access,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
    pub(super) parts: Box<Parts>,
    pub(super) owner: MemoryOwner,
    pub(super) gone: bool,
}

impl AppMr {
    /// Address for work requests and peers.
    #[inline]
    pub fn addr(&self) -> u64 {
        if self.access.contains(Access::ZERO_BASED) {
            0
        } else {
            self.iova
        }
    }
    /// First byte in this process.
    pub fn as_ptr(&self) -> *mut u8 {
        self.address as *mut u8
    }
    /// Length in bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }
    /// Access rights.
    pub fn access(&self) -> Access {
        self.access
    }
    /// Its protection domain.
    pub fn pd(&self) -> &Pd {
        &self.pd
    }
    /// Key for own work requests.
    pub fn lkey(&self) -> u32 {
        self.lkey
    }
    /// Key to give to the peer.
    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    #[inline]
    fn keys(&self) -> RegionKeys {
        RegionKeys {
            addr: self.addr(),
            len: self.len,
            lkey: self.lkey,
            rkey: self.rkey,
        }
    }

    region_methods!();

    /// Methods by which the daemon accesses the memory, with the bytes of each.
    pub fn methods(&self) -> Vec<(ExtentMethod, u64)> {
        let sum = |method: ExtentMethod| {
            let extents = self.parts.extents.iter();
            let of_method = extents.filter(|extent| extent.method == method as u32);
            (method, of_method.map(|extent| extent.len).sum())
        };
        let all = ExtentMethod::ALL.map(sum);
        all.into_iter().filter(|(_, bytes)| *bytes > 0).collect()
    }

    /// Reason why some of it is not remapped; empty if all is.
    pub fn reason(&self) -> &str {
        &self.parts.reason
    }

    /// Changes the access rights and keeps the keys, if that is possible without registering anew:
    /// `EINVAL` if ZERO_BASED changes, or if LOCAL_WRITE or REMOTE_ATOMIC are added to memory that the daemon
    /// copies by system calls or may only read; `EBUSY` while windows are bound. When it returns no operation
    /// continues with the old rights.
    pub fn change_access(&mut self, access: Access) -> Result<(), Error> {
        self.pd.ctx().call_daemon(&ReregMr {
            lkey: self.lkey,
            flags: REREG_ACCESS,
            pd: 0,
            arena: 0,
            offset: 0,
            len: 0,
            va: 0,
            access: access.0,
            reserved: 0,
        })?;
        self.access = access;
        Ok(())
    }

    /// Deregisters it; EBUSY, with the region returned, while memory windows are bound to it
    /// (ibv_dereg_mr(3)).
    pub fn dereg(mut self) -> Result<(), Failed<AppMr>> {
        self.deregister().map_err(|error| Failed {
            object: self,
            error,
        })
    }

    /// As [`Self::dereg`]; afterwards it is only dropped.
    pub(crate) fn deregister(&mut self) -> Result<(), Error> {
        self.call_dereg(0)?;
        self.finish_region(true);
        Ok(())
    }

    /// As [`Self::deregister`], for a buffer: afterwards its pages are private memory.
    ///
    /// # Errors
    /// As [`Self::dereg`]; `ENOMEM` if the pages cannot be made private, then for ever.
    pub(super) fn return_buffer(&mut self) -> Result<(), Error> {
        let mut is_private = false;
        if !self.gone {
            self.call_dereg(0)?;
            is_private = self.finish_region(true);
        }
        if is_private {
            return Ok(());
        }
        let reason = "the region is deregistered, but the operating system has no memory to make \
            the pages of the buffer private; the buffer stays with the region";
        Err(super::registration_error(libc::ENOMEM, reason))
    }

    fn call_dereg(&self, flags: u32) -> Result<(), Error> {
        let lkey = self.lkey;
        self.pd.ctx().call_daemon(&DeregMr { lkey, flags })?;
        Ok(())
    }

    /// Deregisters it with its windows. Returns whether the daemon has confirmed that nobody can
    /// access the memory any more.
    pub(super) fn revoke(&mut self) -> bool {
        let is_revoked = self.call_dereg(DEREG_UNBIND_WINDOWS).is_ok();
        self.finish_region(is_revoked);
        is_revoked
    }

    /// Gives pages back after deregistration; see [`State::release_region`](super::State).
    fn finish_region(&mut self, is_revoked: bool) -> bool {
        self.gone = true;
        free_imports(self.pd.ctx(), &self.parts);
        let _one = lock_unpoisoned(&ONE_AT_A_TIME);
        let ctx = self.pd.ctx();
        let mut state = lock_unpoisoned(&ctx.app_memory.state);
        state.release_region(ctx, &self.parts, self.owner, is_revoked)
    }
}

impl Drop for AppMr {
    fn drop(&mut self) {
        if !self.gone {
            self.revoke();
        }
    }
}
