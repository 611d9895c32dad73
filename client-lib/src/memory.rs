//! Protection domains, arenas and memory regions. The application reads and writes
//! registered memory by bounds-checked copies, or by raw pointer: a peer may write
//! it at any time.

use crate::app_memory::vma::MappedFileId;
use crate::arena_pool::ArenaBlock;
use crate::context::ClientInner;
use crate::high_descriptors::KeptDescriptor;
use crate::slices::{RegionKeys, region_methods};
use crate::{Access, Context, Error, Failed};
use siw_shm::SharedMemory;
use siw_shm::control::{
    ANY_DEVICE, AllocArena, AllocPd, DEREG_UNBIND_WINDOWS, DeallocPd, DeregMr, FreeArena,
    ProtoError, REREG_ACCESS, REREG_PD, REREG_TRANSLATION, RegMr, ReregMr,
};
use std::ops::Range;
use std::sync::Arc;

/// Protection domain: memory regions work with the QPs of their own PD only.
#[derive(Clone)]
pub struct Pd(Arc<PdInner>);

struct PdInner {
    ctx: Arc<ClientInner>,
    id: u32,
}

impl Drop for PdInner {
    fn drop(&mut self) {
        self.ctx.free_object(&DeallocPd {
            pd: self.id,
            reserved: 0,
        });
    }
}

impl Context {
    /// Allocates a protection domain.
    pub fn alloc_pd(&self) -> Result<Pd, Error> {
        let (reply, _) = self.0.call_daemon(&AllocPd {
            device: ANY_DEVICE,
            reserved: 0,
        })?;
        let (ctx, id) = (self.0.clone(), reply.id);
        Ok(Pd(Arc::new(PdInner { ctx, id })))
    }
}

impl Pd {
    pub(crate) fn ctx(&self) -> &Arc<ClientInner> {
        &self.0.ctx
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.id
    }

    /// Allocates zeroed memory of the daemon with a region of its own: the zero-copy path. It is
    /// aligned to a page or, if shorter, to its length rounded up to a power of two, at least 64.
    ///
    /// Regions of up to 8 MiB share a few arenas. Deregistering the region frees its memory for
    /// other regions: deregister other registrations of the same memory first.
    pub fn alloc_mr(&self, len: usize, access: Access) -> Result<Mr, Error> {
        let block = ArenaBlock::alloc(&self.0.ctx, len)?;
        let mut mr = self.reg_mr(block.arena(), block.range(), access)?;
        mr.block = Some(block);
        Ok(mr)
    }

    /// Registers a part of an arena. Peers and work requests address it by its address in this
    /// process ([`Mr::addr`]), or from 0 with ZERO_BASED.
    pub fn reg_mr(
        &self,
        arena: &Arc<Arena>,
        range: Range<usize>,
        access: Access,
    ) -> Result<Mr, Error> {
        let iova = arena.as_ptr().wrapping_add(range.start) as u64;
        self.reg_mr_iova(arena, range, iova, access)
    }

    /// As [`Self::reg_mr`], addressed from `iova` on (ibv_reg_mr_iova(3)).
    pub fn reg_mr_iova(
        &self,
        arena: &Arc<Arena>,
        range: Range<usize>,
        iova: u64,
        access: Access,
    ) -> Result<Mr, Error> {
        self.0.ctx.check_same(&arena.ctx, "arena")?;
        let len = range_len(arena, &range)?;
        let (reply, _) = self.0.ctx.call_daemon(&RegMr {
            pd: self.0.id,
            arena: arena.id,
            offset: range.start as u64,
            len: len as u64,
            va: iova,
            access: access.0,
            reserved: 0,
        })?;
        Ok(Mr {
            iova,
            access,
            lkey: reply.lkey,
            rkey: reply.rkey,
            offset: range.start,
            len,
            arena: arena.clone(),
            block: None,
            pd: self.clone(),
            gone: false,
        })
    }
}

/// Length of a range; an error unless it lies in the arena.
pub(crate) fn range_len(arena: &Arena, range: &Range<usize>) -> Result<usize, Error> {
    let len = range
        .end
        .checked_sub(range.start)
        .ok_or(Error::Invalid("the range is reversed"))?;
    arena.region.ptr_at(range.start, len)?;
    Ok(len)
}

/// Changes made by [`Mr::rereg`] (ibv_rereg_mr(3)); `None` leaves the setting as it is.
#[derive(Debug, Clone, Copy, Default)]
pub struct ReregChange<'a> {
    /// Another part (offset, length) of this or another arena, addressed by its address in this
    /// process.
    pub range: Option<(&'a Arc<Arena>, usize, usize)>,
    /// Another protection domain.
    pub pd: Option<&'a Pd>,
    /// Other access rights.
    pub access: Option<Access>,
}

/// Shared memory to register parts of.
pub struct Arena {
    ctx: Arc<ClientInner>,
    id: u32,
    file: MappedFileId,
    /// By which another context of the process registers parts of it.
    _descriptor: KeptDescriptor,
    region: SharedMemory,
}

impl Arena {
    /// Allocates at least `len` bytes, from hugepages if requested and available.
    pub fn alloc(ctx: &Context, len: usize, huge: bool) -> Result<Arc<Arena>, Error> {
        let (reply, fds) = ctx.0.call_daemon(&AllocArena {
            len: len as u64,
            huge: huge.into(),
            reserved: 0,
        })?;
        let actual = usize::try_from(reply.len).unwrap_or(usize::MAX);
        let mapped = fds
            .into_iter()
            .next()
            .ok_or(Error::Proto(ProtoError::MissingFd))
            .and_then(|fd| {
                let kept = KeptDescriptor::at_high_number(fd)?;
                let region = SharedMemory::map_fd(kept.try_clone()?, actual.max(len))?;
                let file = MappedFileId::of_file(&kept)?;
                Ok((file, kept, region.without_descriptor()))
            });
        let (file, descriptor, region) = mapped.inspect_err(|_| {
            ctx.0.free_object(&FreeArena {
                arena: reply.arena,
                reserved: 0,
            });
        })?;
        let arena = Arc::new(Arena {
            ctx: ctx.0.clone(),
            id: reply.arena,
            file,
            _descriptor: descriptor,
            region,
        });
        ctx.0.arena_pool.add(file, &arena);
        Ok(arena)
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.region.len()
    }

    /// True if backed by hugepages.
    pub fn is_huge(&self) -> bool {
        self.region.is_huge()
    }

    /// First byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.region.as_ptr()
    }

    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    pub(crate) fn ctx(&self) -> &Arc<ClientInner> {
        &self.ctx
    }

    /// Zeroes a range.
    pub(crate) fn fill_zero(&self, range: &Range<usize>) -> Result<(), Error> {
        Ok(self.region.fill_zero(range.start, range.len())?)
    }

    /// Copies `src` to `offset`; works with and without a registration.
    pub fn write(&self, offset: usize, src: &[u8]) -> Result<(), Error> {
        Ok(self.region.write(offset, src)?)
    }

    /// Copies from `offset` into `dst`.
    pub fn read(&self, offset: usize, dst: &mut [u8]) -> Result<(), Error> {
        Ok(self.region.read(offset, dst)?)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        self.ctx.arena_pool.remove(self.file);
        self.ctx.free_object(&FreeArena {
            arena: self.id,
            reserved: 0,
        });
    }
}

/// Registered memory. Dropping deregisters it and unbinds the windows that are bound to it, without
/// waiting: nobody gets the memory before the daemon has done so ([`Context::await_releases`]).
/// [`Mr::dereg`] waits, and is refused while windows are bound.
pub struct Mr {
    /// Address without ZERO_BASED.
    iova: u64,
    access: Access,
    lkey: u32,
    rkey: u32,
    offset: usize,
    len: usize,
    arena: Arc<Arena>,
    /// Memory from [`Pd::alloc_mr`], freed with the region.
    block: Option<ArenaBlock>,
    pd: Pd,
    /// Already deregistered.
    gone: bool,
}

impl Mr {
    /// Address for work requests and peers.
    #[inline]
    pub fn addr(&self) -> u64 {
        if self.access.contains(Access::ZERO_BASED) {
            0
        } else {
            self.iova
        }
    }
    /// Access rights.
    pub fn access(&self) -> Access {
        self.access
    }
    /// The arena that holds it, from [`Mr::arena_offset`] on; regions of [`Pd::alloc_mr`] share
    /// arenas.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }
    /// Offset in the arena.
    pub fn arena_offset(&self) -> usize {
        self.offset
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
    /// Length in bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// First byte in this process. A peer may read and write it at any time.
    pub fn as_ptr(&self) -> *mut u8 {
        self.arena.as_ptr().wrapping_add(self.offset)
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

    fn check_range(&self, offset: usize, len: usize) -> Result<usize, Error> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(self.offset + offset),
            _ => Err(Error::Invalid("outside of the memory region")),
        }
    }

    /// Copies `src` to `offset`.
    pub fn write(&self, offset: usize, src: &[u8]) -> Result<(), Error> {
        Ok(self
            .arena
            .region
            .write(self.check_range(offset, src.len())?, src)?)
    }

    /// Copies from `offset` into `dst`.
    pub fn read(&self, offset: usize, dst: &mut [u8]) -> Result<(), Error> {
        Ok(self
            .arena
            .region
            .read(self.check_range(offset, dst.len())?, dst)?)
    }

    /// Reads one byte from memory, to spin on data that a peer writes.
    #[inline]
    pub fn read_byte(&self, offset: usize) -> Result<u8, Error> {
        let at = self.check_range(offset, 1)?;
        let word = self.arena.region.atomic_u32(at & !3)?;
        let value = word.load(std::sync::atomic::Ordering::Acquire);
        Ok(value.to_le_bytes()[at & 3])
    }
}

impl Mr {
    /// Deregisters it and registers it with these changes, in one call. It gets new keys, and when
    /// the call returns no worker accesses memory through the old ones. EBUSY while windows are
    /// bound. After an error that names a limit or a lost daemon the region is deregistered; after
    /// other errors it is unchanged.
    pub fn rereg(&mut self, change: &ReregChange<'_>) -> Result<(), Error> {
        let (mut flags, mut arena, mut offset, mut len) = (0, &self.arena, self.offset, self.len);
        let mut iova = self.iova;
        if let Some((other, from, other_len)) = change.range {
            range_len(other, &(from..from.saturating_add(other_len)))?;
            (arena, offset, len) = (other, from, other_len);
            iova = other.as_ptr().wrapping_add(from) as u64;
            flags |= REREG_TRANSLATION;
        }
        let pd = change.pd.unwrap_or(&self.pd);
        if change.pd.is_some() {
            flags |= REREG_PD;
        }
        let access = change.access.unwrap_or(self.access);
        if change.access.is_some() {
            flags |= REREG_ACCESS;
        }
        let ctx = self.pd.ctx();
        ctx.check_same(pd.ctx(), "protection domain")?;
        ctx.check_same(&arena.ctx, "arena")?;
        let (reply, _) = self.pd.ctx().call_daemon(&ReregMr {
            lkey: self.lkey,
            flags,
            pd: pd.0.id,
            arena: arena.id,
            offset: offset as u64,
            len: len as u64,
            va: iova,
            access: access.0,
            reserved: 0,
        })?;
        let (arena, pd) = (arena.clone(), pd.clone());
        (self.lkey, self.rkey, self.iova, self.access) = (reply.lkey, reply.rkey, iova, access);
        (self.arena, self.pd, self.offset, self.len) = (arena, pd, offset, len);
        // The old block is freed unless the region still lies in its arena.
        self.block
            .take_if(|block| !Arc::ptr_eq(block.arena(), &self.arena));
        Ok(())
    }

    /// Deregisters it; EBUSY, with the region returned, while memory windows are bound to it
    /// (ibv_dereg_mr(3)).
    pub fn dereg(mut self) -> Result<(), Failed<Mr>> {
        self.deregister().map_err(|error| Failed {
            object: self,
            error,
        })
    }

    /// As [`Self::dereg`]; afterwards it is only dropped.
    pub(crate) fn deregister(&mut self) -> Result<(), Error> {
        self.call_dereg(0)?;
        self.gone = true;
        Ok(())
    }

    fn call_dereg(&self, flags: u32) -> Result<(), Error> {
        let lkey = self.lkey;
        self.pd.ctx().call_daemon(&DeregMr { lkey, flags })?;
        Ok(())
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        let ctx = self.pd.ctx();
        if self.gone || ctx.check_process().is_err() {
            return;
        }
        ctx.free_object(&DeregMr {
            lkey: self.lkey,
            flags: DEREG_UNBIND_WINDOWS,
        });
        if let Some(block) = self.block.take() {
            ctx.arena_pool.retire(block);
        }
    }
}
