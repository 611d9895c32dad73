//! Memory keys (STags): one table that all workers read lock-free at the moment
//! of every access (RFC 5042 section 6), changed by the control thread alone.
//!
//! An STag is a 24-bit table index and an 8-bit key (RFC 5040 section 2.1). Indices
//! are drawn at random among the longest unused ones, keys walk a secret
//! permutation of all 256 values per index: unpredictable and slowly reused.
//! Zero is never an STag.

use crate::epoch::{Table, TableReader, Ticket};
use crate::region::{OutOfBounds, Region};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Steering tag, lkey, rkey: the same thing in iWARP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Stag(pub u32);

impl Stag {
    #[inline]
    fn index(self) -> usize {
        (self.0 >> 8) as usize
    }
}

/// What a memory region may be used for; bits of `enum ibv_access_flags`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Access(pub u32);

impl Access {
    /// Local reads: always allowed.
    pub const NONE: Access = Access(0);
    pub const LOCAL_WRITE: Access = Access(1);
    pub const REMOTE_WRITE: Access = Access(2);
    pub const REMOTE_READ: Access = Access(4);
    pub const REMOTE_ATOMIC: Access = Access(8);
    pub const MW_BIND: Access = Access(16);
    pub const ZERO_BASED: Access = Access(32);
    /// All bits that exist.
    pub const ALL: Access = Access(63);

    /// Whether all bits of `o` are set.
    #[inline]
    pub fn contains(self, o: Access) -> bool {
        self.0 & o.0 == o.0
    }
}

impl std::ops::BitOr for Access {
    type Output = Access;
    fn bitor(self, o: Access) -> Access {
        Access(self.0 | o.0)
    }
}

/// Why an access is refused; maps to the Terminate codes of RFC 5040 section 4.8
/// and RFC 5041 section 6.2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    #[error("invalid STag")]
    Stag,
    #[error("access rights violation")]
    Access,
    #[error("STag belongs to another protection domain")]
    Pd,
    #[error("STag is not associated with this stream")]
    Stream,
    #[error("base or bounds violation")]
    Bounds,
    #[error("tagged offset wraps")]
    Wrap,
}

/// A registered memory region, daemon side.
#[derive(Debug)]
pub struct Mr {
    stag: Stag,
    pd: u32,
    qp: Option<u32>,
    access: Access,
    base: u64,
    len: u64,
    region: Arc<Region>,
    offset: u64,
    invalidated: AtomicBool,
}

impl Mr {
    /// `len` bytes at `offset` of `region`, addressed by peers and work requests
    /// from `base` on. `pd` is unique in the daemon; `qp` limits the key to one
    /// stream. Refuses ranges outside of the region and addresses that wrap.
    pub fn new(
        region: Arc<Region>,
        offset: u64,
        len: u64,
        base: u64,
        pd: u32,
        qp: Option<u32>,
        access: Access,
    ) -> Result<Mr, OutOfBounds> {
        let base = if access.contains(Access::ZERO_BASED) {
            0
        } else {
            base
        };
        let end = offset.checked_add(len).ok_or(OutOfBounds)?;
        if end > region.len() as u64 || base.checked_add(len).is_none() {
            return Err(OutOfBounds);
        }
        Ok(Mr {
            stag: Stag(0),
            pd,
            qp,
            access,
            base,
            len,
            region,
            offset,
            invalidated: AtomicBool::new(false),
        })
    }

    /// Its key; zero before it is in the table.
    #[inline]
    pub fn stag(&self) -> Stag {
        self.stag
    }
    #[inline]
    pub fn pd(&self) -> u32 {
        self.pd
    }
    /// The only stream that may use it, if limited.
    #[inline]
    pub fn qp(&self) -> Option<u32> {
        self.qp
    }
    #[inline]
    pub fn access(&self) -> Access {
        self.access
    }
    /// First address.
    #[inline]
    pub fn base(&self) -> u64 {
        self.base
    }
    /// Bytes.
    #[inline]
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.len
    }
    /// The memory it lies in; cloning the Arc keeps it mapped while a NIC reads it.
    #[inline]
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }
    /// Offset of `base` in the region.
    #[inline]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Everything but validity of the key: PD, stream, access, then wrap before
    /// bounds. Returns the offset in the region. Zero-length accesses are not
    /// checked by iWARP: the caller skips the call.
    #[inline]
    pub fn check(
        &self,
        addr: u64,
        len: u32,
        need: Access,
        pd: u32,
        qp: u32,
    ) -> Result<u64, KeyError> {
        if self.pd != pd {
            return Err(KeyError::Pd);
        }
        if self.qp.is_some_and(|q| q != qp) {
            return Err(KeyError::Stream);
        }
        if !self.access.contains(need) {
            return Err(KeyError::Access);
        }
        self.check_range(addr, len)
    }

    /// The range alone.
    #[inline]
    pub fn check_range(&self, addr: u64, len: u32) -> Result<u64, KeyError> {
        let end = addr.checked_add(u64::from(len)).ok_or(KeyError::Wrap)?;
        // base + len does not wrap: checked at registration.
        if addr < self.base || end > self.base + self.len {
            return Err(KeyError::Bounds);
        }
        Ok(self.offset + (addr - self.base))
    }

    /// Whether `len` bytes at `off` of the region lie in this MR.
    #[inline]
    fn inside(&self, off: u64, len: usize) -> Result<usize, OutOfBounds> {
        let rel = off.checked_sub(self.offset).ok_or(OutOfBounds)?;
        match rel.checked_add(len as u64) {
            Some(end) if end <= self.len => Ok(off as usize),
            _ => Err(OutOfBounds),
        }
    }

    /// Places bytes at a region offset obtained from [`Mr::check`].
    #[inline]
    pub fn write_at(&self, off: u64, src: &[u8]) -> Result<(), OutOfBounds> {
        self.region.write(self.inside(off, src.len())?, src)
    }

    /// Reads bytes at a region offset obtained from [`Mr::check`].
    #[inline]
    pub fn read_at(&self, off: u64, dst: &mut [u8]) -> Result<(), OutOfBounds> {
        self.region.read(self.inside(off, dst.len())?, dst)
    }

    /// The word at a region offset obtained from [`Mr::check`]: inside, 8-aligned in
    /// memory, and writable, or an error.
    #[inline]
    pub fn atomic_at(&self, off: u64) -> Result<&AtomicU64, OutOfBounds> {
        if !self.region.is_writable() {
            return Err(OutOfBounds);
        }
        self.region.atomic_u64(self.inside(off, 8)?)
    }

    /// Continues a CRC32c over bytes at a region offset.
    #[inline]
    pub fn crc32c(&self, off: u64, len: usize, crc: u32) -> Result<u32, OutOfBounds> {
        self.region.crc32c(self.inside(off, len)?, len, crc)
    }

    /// Address in this process of a region offset, for gather lists of a NIC.
    #[inline]
    pub fn ptr_at(&self, off: u64, len: usize) -> Result<*const u8, OutOfBounds> {
        self.region
            .ptr_at(self.inside(off, len)?, len)
            .map(<*mut u8>::cast_const)
    }
}

/// No free STag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the memory key table is full")]
pub struct KeyTableFull;

/// Returned by [`KeyTable::remove`]: ask [`KeyTable::is_quiescent`] with it.
pub type Retired = Ticket;

struct Keys {
    /// Unused indices, the longest unused first.
    free: VecDeque<u32>,
    /// How often each index was used, modulo 256.
    uses: Vec<u8>,
    secret: RandomState,
}

impl Keys {
    fn draw(&mut self) -> Option<Stag> {
        let among = (self.free.len() / 2).max(1) as u64;
        let pick = (random_u64() % among) as usize;
        if pick < self.free.len() {
            self.free.swap(0, pick);
        }
        let index = self.free.pop_front()?;
        let n = self.uses[index as usize];
        self.uses[index as usize] = n.wrapping_add(1);
        // An odd factor and any start walk through all 256 keys.
        let h = self.secret.hash_one(index);
        let key = n.wrapping_mul((h as u8) | 1).wrapping_add((h >> 8) as u8);
        Some(Stag(index << 8 | u32::from(key)))
    }
}

fn random_u64() -> u64 {
    let mut b = [0; 8];
    if rustix::rand::getrandom(&mut b, rustix::rand::GetRandomFlags::empty()) == Ok(8) {
        return u64::from_ne_bytes(b);
    }
    RandomState::new().hash_one(0u8)
}

/// The table. The control thread inserts and removes; workers look up.
pub struct KeyTable {
    table: Arc<Table<Mr>>,
    keys: Mutex<Keys>,
}

impl KeyTable {
    /// For `capacity` keys (at most 2^24 - 1) and `max_readers` workers.
    pub fn new(capacity: usize, max_readers: usize) -> Arc<KeyTable> {
        let n = capacity.clamp(1, (1 << 24) - 1);
        Arc::new(KeyTable {
            table: Table::new(n + 1, max_readers),
            keys: Mutex::new(Keys {
                // Index 0 would give STag 0, which hardware refuses.
                free: (1..=n as u32).collect(),
                uses: vec![0; n + 1],
                secret: RandomState::new(),
            }),
        })
    }

    /// Gives the region a key; workers find it at once.
    pub fn insert(&self, mut mr: Mr) -> Result<Stag, KeyTableFull> {
        let stag = self
            .keys
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .draw()
            .ok_or(KeyTableFull)?;
        mr.stag = stag;
        self.table
            .set(stag.index(), Box::new(mr))
            .map_err(|_| KeyTableFull)?;
        Ok(stag)
    }

    /// Takes the key back; no lookup finds it any more. The deregistration may be
    /// answered when [`Self::is_quiescent`]; [`Self::try_reclaim`] frees the Mr.
    /// None for an unknown key.
    pub fn remove(&self, stag: Stag) -> Option<Retired> {
        let t = self.table.clear(stag.index(), |mr| mr.stag == stag)?;
        self.keys
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .free
            .push_back(stag.index() as u32);
        Some(t)
    }

    /// Control side: looks at a region.
    pub fn with<R>(&self, stag: Stag, f: impl FnOnce(&Mr) -> R) -> Option<R> {
        self.table
            .with(stag.index(), |mr| (mr.stag == stag).then(|| f(mr)))?
    }

    /// A worker's reader, online. None when `max_readers` exist.
    pub fn reader(&self) -> Option<Reader> {
        self.table.reader().map(Reader)
    }

    /// Whether no worker can touch what was removed with this ticket.
    pub fn is_quiescent(&self, t: Retired) -> bool {
        self.table.is_quiescent(t)
    }

    /// Frees regions that no worker can touch; returns how many still wait.
    pub fn try_reclaim(&self) -> usize {
        self.table.try_reclaim()
    }

    /// Waits until everything removed so far is freed. Not for workers.
    pub fn synchronize(&self) {
        while self.table.try_reclaim() > 0 {
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}

/// A worker's view of the table.
pub struct Reader(TableReader<Mr>);

impl Reader {
    /// The region with this key, valid until the next [`Self::quiesce`].
    #[inline]
    pub fn lookup(&self, stag: Stag) -> Option<&Mr> {
        let mr = self.0.get(stag.index())?;
        (mr.stag == stag && !mr.invalidated.load(Ordering::Acquire)).then_some(mr)
    }

    /// Lookup and [`Mr::check`] in one.
    #[inline]
    pub fn check(
        &self,
        stag: Stag,
        addr: u64,
        len: u32,
        need: Access,
        pd: u32,
        qp: u32,
    ) -> Result<(&Mr, u64), KeyError> {
        let mr = self.lookup(stag).ok_or(KeyError::Stag)?;
        let off = mr.check(addr, len, need, pd, qp)?;
        Ok((mr, off))
    }

    /// Send with Invalidate or local invalidate: the key stops working for all
    /// workers. The application still deregisters it.
    pub fn invalidate(&self, stag: Stag, pd: u32, qp: u32) -> Result<(), KeyError> {
        let mr = self.lookup(stag).ok_or(KeyError::Stag)?;
        if mr.pd != pd {
            return Err(KeyError::Pd);
        }
        if mr.qp.is_some_and(|q| q != qp) {
            return Err(KeyError::Stream);
        }
        mr.invalidated.store(true, Ordering::Release);
        Ok(())
    }

    /// Hints the cache about a key's slot.
    #[inline]
    pub fn prefetch(&self, stag: Stag) {
        self.0.prefetch(stag.index());
    }

    /// Batch boundary. Borrow rules see to it that no `&Mr` is held.
    #[inline]
    pub fn quiesce(&mut self) {
        self.0.quiesce();
    }

    /// Before the worker blocks: nobody waits for it.
    pub fn offline(&mut self) {
        self.0.offline();
    }

    /// After the worker blocked.
    pub fn online(&mut self) {
        self.0.online();
    }
}
