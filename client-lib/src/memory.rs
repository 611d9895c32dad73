//! Protection domains, arenas and memory regions. The application reads and writes
//! registered memory by bounds-checked copies, or by raw pointer: a peer may write
//! it at any time.

use crate::context::Inner;
use crate::{Access, Context, Error, Sge};
use siw_shm::Region;
use siw_shm::control::{AllocArena, DeallocPd, DeregMr, FreeArena, ProtoError, RegMr};
use std::ops::Range;
use std::sync::Arc;

/// Protection domain: memory regions work with the QPs of their own PD only.
#[derive(Clone)]
pub struct Pd(Arc<PdInner>);

struct PdInner {
    ctx: Arc<Inner>,
    id: u32,
}

impl Drop for PdInner {
    fn drop(&mut self) {
        self.ctx.call_quietly(&DeallocPd {
            pd: self.id,
            reserved: 0,
        });
    }
}

impl Pd {
    pub(crate) fn new(ctx: Arc<Inner>, id: u32) -> Pd {
        Pd(Arc::new(PdInner { ctx, id }))
    }

    pub(crate) fn ctx(&self) -> &Arc<Inner> {
        &self.0.ctx
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.id
    }

    /// Memory from the daemon, registered as a whole: the zero-copy way.
    pub fn alloc_mr(&self, len: usize, access: Access) -> Result<Mr, Error> {
        let arena = Arena::alloc(&Context(self.0.ctx.clone()), len, len >= 1 << 20)?;
        self.reg_mr(&arena, 0..len, access)
    }

    /// Registers a part of an arena. Peers and work requests name it by the address
    /// it has in this process ([`Mr::addr`]), or from 0 with ZERO_BASED.
    pub fn reg_mr(
        &self,
        arena: &Arc<Arena>,
        range: Range<usize>,
        access: Access,
    ) -> Result<Mr, Error> {
        let len = range
            .end
            .checked_sub(range.start)
            .ok_or(Error::Invalid("the range is reversed"))?;
        let ptr = arena.region.ptr_at(range.start, len)?;
        let (r, _) = self.0.ctx.call(&RegMr {
            pd: self.0.id,
            arena: arena.id,
            offset: range.start as u64,
            len: len as u64,
            va: ptr as u64,
            access: access.0,
            reserved: 0,
        })?;
        Ok(Mr {
            addr: if access.contains(Access::ZERO_BASED) {
                0
            } else {
                ptr as u64
            },
            lkey: r.lkey,
            rkey: r.rkey,
            offset: range.start,
            len,
            arena: arena.clone(),
            pd: self.clone(),
        })
    }
}

/// Shared memory to register parts of.
pub struct Arena {
    ctx: Arc<Inner>,
    id: u32,
    region: Region,
}

impl Arena {
    /// At least `len` bytes, from hugepages if wanted and available.
    pub fn alloc(ctx: &Context, len: usize, huge: bool) -> Result<Arc<Arena>, Error> {
        let (r, fds) = ctx.0.call(&AllocArena {
            len: len as u64,
            huge: huge.into(),
            reserved: 0,
        })?;
        let fd = fds.into_iter().next().ok_or(ProtoError::MissingFd)?;
        let actual = usize::try_from(r.len).unwrap_or(usize::MAX);
        let region = Region::map(fd, actual.max(len))?;
        Ok(Arc::new(Arena {
            ctx: ctx.0.clone(),
            id: r.arena,
            region,
        }))
    }

    /// Bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.region.len()
    }

    /// Whether hugepages back it.
    pub fn is_huge(&self) -> bool {
        self.region.is_huge()
    }

    /// First byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.region.as_ptr()
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        self.ctx.call_quietly(&FreeArena {
            arena: self.id,
            reserved: 0,
        });
    }
}

/// Registered memory. Dropping deregisters it: when that returns nobody touches it.
pub struct Mr {
    addr: u64,
    lkey: u32,
    rkey: u32,
    offset: usize,
    len: usize,
    arena: Arc<Arena>,
    pd: Pd,
}

impl Mr {
    /// Address for work requests and peers.
    pub fn addr(&self) -> u64 {
        self.addr
    }
    /// Key for own work requests.
    pub fn lkey(&self) -> u32 {
        self.lkey
    }
    /// Key to give to the peer.
    pub fn rkey(&self) -> u32 {
        self.rkey
    }
    /// Bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// First byte in this process. A peer may read and write it at any time.
    pub fn as_ptr(&self) -> *mut u8 {
        self.arena.as_ptr().wrapping_add(self.offset)
    }

    /// Names `len` bytes at `offset` for a work request; the daemon checks them.
    #[inline]
    pub fn sge(&self, offset: usize, len: usize) -> Sge {
        Sge {
            addr: self.addr + offset as u64,
            length: len as u32,
            lkey: self.lkey,
        }
    }

    fn check(&self, off: usize, len: usize) -> Result<usize, Error> {
        match off.checked_add(len) {
            Some(end) if end <= self.len => Ok(self.offset + off),
            _ => Err(Error::Invalid("outside of the memory region")),
        }
    }

    /// Copies `src` into it.
    pub fn write(&self, off: usize, src: &[u8]) -> Result<(), Error> {
        Ok(self.arena.region.write(self.check(off, src.len())?, src)?)
    }

    /// Copies out of it.
    pub fn read(&self, off: usize, dst: &mut [u8]) -> Result<(), Error> {
        Ok(self.arena.region.read(self.check(off, dst.len())?, dst)?)
    }

    /// One byte, read from memory each time: to spin on what a peer writes.
    #[inline]
    pub fn byte(&self, off: usize) -> Result<u8, Error> {
        let at = self.check(off, 1)?;
        let word = self.arena.region.atomic_u32(at & !3)?;
        let v = word.load(std::sync::atomic::Ordering::Acquire);
        Ok(v.to_le_bytes()[at & 3])
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        self.pd.ctx().call_quietly(&DeregMr {
            lkey: self.lkey,
            reserved: 0,
        });
    }
}
