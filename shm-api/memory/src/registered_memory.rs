//! The objects that memory keys refer to: a registered region, a region that workers register by work
//! request, or a window on one of those. They are the entries of [`crate::key_table`]; workers check
//! accesses and copy through them, [`crate::binding`] changes them.

use crate::crc;
use crate::gap_copy::{self, Gaps};
use crate::key_table::Stag;
use crate::scatter::{Extent, ExtentList, ExtentMemory, PageList, Piece, ProcessMemory, Scatter};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use siw_lockfree::key_cell::{KeyCell, KeyWord};
use siw_shm::{Access, OutOfBounds, SharedMemory, WindowType};
use std::sync::Arc;

/// Reason why an access is refused; maps to the Terminate codes of RFC 5040 section 4.8 and RFC 5041
/// section 6.2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The key does not exist, or is currently invalid.
    #[error("invalid STag")]
    Stag,
    /// The key does not allow this kind of access.
    #[error("access rights violation")]
    Access,
    /// The key belongs to another protection domain.
    #[error("STag belongs to another protection domain")]
    Pd,
    /// The key is valid only for another queue pair.
    #[error("STag is not associated with this stream")]
    Stream,
    /// The range is not inside the memory.
    #[error("base or bounds violation")]
    Bounds,
    /// Address and length wrap at 2^64.
    #[error("tagged offset wraps")]
    Wrap,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum KeyKind {
    Fixed,
    Fast,
    Window(WindowType),
}

/// Where the operand of an atomic is.
enum Word<'a> {
    Shared(&'a AtomicU64),
    Process(&'a ProcessMemory, u64),
}

/// [`RegisteredMemory::allowed_qp`]: any stream of the protection domain.
const ANY: u64 = u64::MAX;
/// Value of the count of windows when no further window can be bound.
const LOCKED: u32 = u32::MAX;

/// A registered memory region or a window, daemon side.
#[derive(Debug, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub struct RegisteredMemory {
    #[serde(with = "saved_key")]
    key: KeyCell,
    home_key: Stag,
    pd: u32,
    key_kind: KeyKind,
    /// The only stream that may use it, or [`ANY`]. This field and the following ones change only
    /// under a claim of `key`, except for the rights of a region
    /// ([`crate::KeyTable::change_access`]).
    allowed_qp: AtomicU64,
    access_rights: AtomicU32,
    /// Windows: key of the region that the window is bound to.
    parent_key: AtomicU32,
    base_address: AtomicU64,
    len: AtomicU64,
    /// Offset of the first octet: in the region, in the first page, or (windows) its address in the
    /// parent.
    start_offset: AtomicU64,
    #[serde(with = "siw_shm::saved")]
    shared_memory: Option<Arc<SharedMemory>>,
    /// Layout of memory that is not contiguous.
    scatter: Option<Box<Scatter>>,
    /// Number of windows bound to it, or [`LOCKED`].
    windows: AtomicU32,
}

/// Location and allowed uses of an entry.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scope {
    pub allowed_qp: Option<u32>,
    pub access_rights: Access,
    pub base_address: u64,
    pub len: u64,
    pub start_offset: u64,
    pub parent_key: Stag,
}

impl RegisteredMemory {
    fn with_kind(kind: KeyKind, pd: u32, region: Option<Arc<SharedMemory>>) -> RegisteredMemory {
        RegisteredMemory {
            key: KeyCell::new(0, kind == KeyKind::Fixed),
            home_key: Stag(0),
            pd,
            key_kind: kind,
            allowed_qp: AtomicU64::new(ANY),
            access_rights: AtomicU32::new(0),
            parent_key: AtomicU32::new(0),
            base_address: AtomicU64::new(0),
            len: AtomicU64::new(0),
            start_offset: AtomicU64::new(0),
            shared_memory: region,
            scatter: None,
            windows: AtomicU32::new(0),
        }
    }

    /// Registers `len` bytes at `offset` of `region`, addressed by peers and work requests from
    /// `base` on. `pd` is unique in the daemon; `qp` limits the key to one stream. Refuses ranges
    /// outside the region and addresses that wrap.
    pub fn new(
        region: Arc<SharedMemory>,
        offset: u64,
        len: u64,
        base: u64,
        pd: u32,
        qp: Option<u32>,
        access: Access,
    ) -> Result<RegisteredMemory, OutOfBounds> {
        let base = if access.contains(Access::ZERO_BASED) {
            0
        } else {
            base
        };
        let end = offset.checked_add(len).ok_or(OutOfBounds)?;
        if end > region.len() as u64 || base.checked_add(len).is_none() {
            return Err(OutOfBounds);
        }
        let mr = RegisteredMemory::with_kind(KeyKind::Fixed, pd, Some(region));
        mr.set_scope(&Scope {
            allowed_qp: qp,
            access_rights: access,
            base_address: base,
            len,
            start_offset: offset,
            parent_key: Stag(0),
        });
        Ok(mr)
    }

    /// A region of at most `max_pages` pages of `region` that FAST_REG work requests fill
    /// (ib_alloc_mr). The application writes the page list, offsets in `region` as u64, at `list_at`
    /// of `list`. The key is valid from the first registration on.
    pub fn new_fast(
        region: Arc<SharedMemory>,
        max_pages: usize,
        list: Arc<SharedMemory>,
        list_at: usize,
        pd: u32,
    ) -> Result<RegisteredMemory, OutOfBounds> {
        list.ptr_at(list_at, max_pages.checked_mul(8).ok_or(OutOfBounds)?)?;
        let mut mr = RegisteredMemory::with_kind(KeyKind::Fast, pd, Some(region.clone()));
        let pages = PageList {
            list,
            list_at,
            offsets: (0..max_pages).map(|_| AtomicU64::new(0)).collect(),
            shift: AtomicU32::new(12),
        };
        mr.scatter = Some(Box::new(Scatter::Pages(pages, region)));
        Ok(mr)
    }

    /// A region of `len` bytes, the concatenation of `extents`, addressed from `base` on; otherwise
    /// like [`RegisteredMemory::new`]. Extents in a process are copied by system calls, and do not
    /// support atomic operations.
    ///
    /// # Errors
    /// An extent exceeds its memory, the extents do not add up to `len` bytes, or the addresses wrap.
    pub fn new_scattered(
        extents: Vec<Extent>,
        len: u64,
        base: u64,
        pd: u32,
        access: Access,
    ) -> Result<RegisteredMemory, OutOfBounds> {
        if let [extent] = &extents[..]
            && let ExtentMemory::Shared(memory) = &extent.memory
            && extent.len == len
        {
            return Self::new(memory.clone(), extent.offset, len, base, pd, None, access);
        }
        let zero = access.contains(Access::ZERO_BASED);
        let base = if zero { 0 } else { base };
        base.checked_add(len).ok_or(OutOfBounds)?;
        let extents = ExtentList::new(extents, len)?;
        let mut mr = RegisteredMemory::with_kind(KeyKind::Fixed, pd, None);
        mr.scatter = Some(Box::new(Scatter::Extents(extents)));
        mr.set_scope(&Scope {
            allowed_qp: None,
            access_rights: access,
            base_address: base,
            len,
            start_offset: 0,
            parent_key: Stag(0),
        });
        Ok(mr)
    }

    /// An unbound memory window.
    pub fn new_window(pd: u32, kind: WindowType) -> RegisteredMemory {
        RegisteredMemory::with_kind(KeyKind::Window(kind), pd, None)
    }

    /// Sets the key assigned on insertion into the table.
    pub(crate) fn set_home(&mut self, stag: Stag) {
        self.home_key = stag;
        self.key = KeyCell::new(stag.0, self.key_kind == KeyKind::Fixed);
    }

    /// The key that [`crate::KeyTable::insert`] assigned.
    #[inline]
    pub fn home_key(&self) -> Stag {
        self.home_key
    }

    /// The current key; zero before it is in the table.
    #[inline]
    pub fn current_key(&self) -> Stag {
        Stag(self.key.load_word().stag())
    }
    /// Protection domain.
    #[inline]
    pub fn pd(&self) -> u32 {
        self.pd
    }
    /// The only stream that may use it, if limited.
    #[inline]
    pub fn allowed_qp(&self) -> Option<u32> {
        u32::try_from(self.allowed_qp.load(Ordering::Relaxed)).ok()
    }
    /// The current access rights.
    #[inline]
    pub fn access_rights(&self) -> Access {
        Access(self.access_rights.load(Ordering::Relaxed))
    }
    /// First address.
    #[inline]
    pub fn base_address(&self) -> u64 {
        self.base_address.load(Ordering::Relaxed)
    }
    /// Length in bytes.
    #[inline]
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }
    /// The memory that contains it; `None` for windows and for several extents. Cloning the Arc
    /// keeps it mapped while a NIC reads it.
    #[inline]
    pub fn shared_memory(&self) -> Option<&Arc<SharedMemory>> {
        self.shared_memory.as_ref()
    }
    /// The offset that [`RegisteredMemory::check_access`] returns for the first byte.
    #[inline]
    pub fn start_offset(&self) -> u64 {
        self.start_offset.load(Ordering::Relaxed)
    }
    /// Number of windows bound to it.
    pub fn count_windows(&self) -> u32 {
        match self.windows.load(Ordering::Relaxed) {
            LOCKED => 0,
            count => count,
        }
    }

    #[inline]
    pub(crate) fn key_cell(&self) -> &KeyCell {
        &self.key
    }
    #[inline]
    pub(crate) fn key_kind(&self) -> KeyKind {
        self.key_kind
    }
    #[inline]
    pub(crate) fn is_fixed(&self) -> bool {
        self.key_kind == KeyKind::Fixed
    }
    pub(crate) fn parent_key(&self) -> Stag {
        Stag(self.parent_key.load(Ordering::Relaxed))
    }
    pub(crate) fn page_list(&self) -> Option<&PageList> {
        match self.scatter.as_deref() {
            Some(Scatter::Pages(pages, _)) => Some(pages),
            _ => None,
        }
    }
    #[inline]
    pub(crate) fn key_word(&self) -> KeyWord {
        self.key.load_word()
    }
    #[inline]
    pub(crate) fn is_valid(&self, stag: Stag) -> bool {
        self.key.load_word().is_valid_for(stag.0)
    }

    pub(crate) fn set_scope(&self, scope: &Scope) {
        self.allowed_qp
            .store(scope.allowed_qp.map_or(ANY, u64::from), Ordering::Relaxed);
        self.access_rights
            .store(scope.access_rights.0, Ordering::Relaxed);
        self.parent_key.store(scope.parent_key.0, Ordering::Relaxed);
        self.base_address
            .store(scope.base_address, Ordering::Relaxed);
        self.len.store(scope.len, Ordering::Relaxed);
        self.start_offset
            .store(scope.start_offset, Ordering::Relaxed);
    }

    /// Counts one more window before it is bound. `false`: the region is being removed.
    pub(crate) fn try_add_window(&self) -> bool {
        self.windows
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, |count| {
                (count < LOCKED - 1).then(|| count + 1)
            })
            .is_ok()
    }

    pub(crate) fn release_window(&self) {
        let _ = self
            .windows
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, |count| {
                (count != LOCKED && count > 0).then(|| count - 1)
            });
    }

    /// Prevents further binding of windows, if none is bound; returns the number of bound windows.
    pub(crate) fn lock_windows(&self) -> u32 {
        match self
            .windows
            .compare_exchange(0, LOCKED, Ordering::AcqRel, Ordering::Relaxed)
        {
            Ok(_) | Err(LOCKED) => 0,
            Err(count) => count,
        }
    }

    /// Changes the access rights, if no window is bound; returns the number of bound windows.
    pub(crate) fn change_access(&self, access: Access) -> u32 {
        let bound = self.lock_windows();
        if bound == 0 {
            self.access_rights.store(access.0, Ordering::Relaxed);
            self.unlock_windows();
        }
        bound
    }

    pub(crate) fn unlock_windows(&self) {
        let _ = self
            .windows
            .compare_exchange(LOCKED, 0, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Retires the key as the entry leaves the table; returns the region that the window was bound
    /// to, if any.
    pub(crate) fn retire_key(&self) -> Option<Stag> {
        let word = self.key.retire_key();
        let bound = matches!(self.key_kind, KeyKind::Window(_)) && word.is_valid();
        bound.then(|| self.parent_key())
    }

    /// Unbinds a window of this stream; returns the region that it was bound to.
    pub(crate) fn unbind_stream(&self, qp: u32) -> Option<Stag> {
        loop {
            let word = self.key.load_word();
            if !word.is_valid() || !word.is_settled() || self.allowed_qp() != Some(qp) {
                return None;
            }
            if self.key.try_claim(word) {
                let parent = self.parent_key();
                self.key.publish_key(word.stag(), false);
                return Some(parent);
            }
        }
    }

    /// Unbinds a window of this region; returns whether it was one.
    pub(crate) fn unbind_from(&self, region: Stag) -> bool {
        loop {
            let word = self.key.load_word();
            let is_bound = matches!(self.key_kind, KeyKind::Window(_)) && word.is_valid();
            if !is_bound || !word.is_settled() || self.parent_key() != region {
                return false;
            }
            if self.key.try_claim(word) {
                self.key.publish_key(word.stag(), false);
                return true;
            }
        }
    }

    /// Checks everything except the validity of the key: PD, stream, access, then wrap before bounds.
    /// Returns the offset of the bytes, for the accessors below. iWARP does not check zero-length
    /// accesses: the caller skips the call.
    #[inline(always)]
    pub fn check_access(
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
        let only = self.allowed_qp.load(Ordering::Relaxed);
        if only != ANY && only != u64::from(qp) {
            return Err(KeyError::Stream);
        }
        if !self.access_rights().contains(need) {
            return Err(KeyError::Access);
        }
        self.check_range(addr, u64::from(len))
    }

    /// Checks only the range.
    #[inline(always)]
    pub fn check_range(&self, addr: u64, len: u64) -> Result<u64, KeyError> {
        let end = addr.checked_add(len).ok_or(KeyError::Wrap)?;
        let base = self.base_address();
        // base + len does not wrap: checked when the scope was set.
        if addr < base || end > base.wrapping_add(self.len()) {
            return Err(KeyError::Bounds);
        }
        Ok(self.start_offset().wrapping_add(addr - base))
    }

    /// Checks that `len` bytes at `offset` lie in this region.
    #[inline(always)]
    fn check_offset(&self, offset: u64, len: usize) -> Result<(), OutOfBounds> {
        let rel = offset.checked_sub(self.start_offset()).ok_or(OutOfBounds)?;
        match rel.checked_add(len as u64) {
            Some(end) if end <= self.len() => Ok(()),
            _ => Err(OutOfBounds),
        }
    }

    /// The memory of a contiguous region, and the offset in it.
    #[inline]
    fn memory_range(&self, offset: u64, len: usize) -> Result<(&SharedMemory, usize), OutOfBounds> {
        self.check_offset(offset, len)?;
        let memory = self.shared_memory.as_deref().ok_or(OutOfBounds)?;
        Ok((memory, offset as usize))
    }

    /// Passes the pieces of `len` bytes at `offset` to `visit`. Out of line, so that contiguous
    /// memory, the usual case, pays no call.
    #[inline(never)]
    fn for_each_piece(
        &self,
        scatter: &Scatter,
        offset: u64,
        len: usize,
        visit: impl FnMut(Piece<'_>, std::ops::Range<usize>) -> Result<(), OutOfBounds>,
    ) -> Result<(), OutOfBounds> {
        self.check_offset(offset, len)?;
        scatter.for_each_piece(offset, len, visit)
    }

    /// Places bytes at an offset obtained from [`RegisteredMemory::check_access`].
    // As a call of its own it cost a message of 64 bytes 16 instructions.
    #[inline(always)]
    pub fn write_at(&self, offset: u64, src: &[u8]) -> Result<(), OutOfBounds> {
        let Some(scatter) = &self.scatter else {
            let (memory, at) = self.memory_range(offset, src.len())?;
            return memory.write(at, src);
        };
        self.for_each_piece(scatter, offset, src.len(), |piece, part| match piece {
            Piece::Shared(memory, at) => memory.write(at, &src[part]),
            Piece::Process(process, address) => process.write(address, &src[part]),
        })
    }

    /// Places the `len` bytes of data in `src`, without its gaps, at an offset obtained from
    /// [`RegisteredMemory::check_access`]. `false`: the destination is not contiguous, and nothing
    /// was written.
    #[inline]
    pub fn write_without_gaps_at<const SPACING: usize>(
        &self,
        offset: u64,
        len: usize,
        src: &[u8],
        gaps: Gaps<SPACING>,
    ) -> bool {
        let Ok((region, at)) = self.memory_range(offset, len) else {
            return false;
        };
        self.scatter.is_none() && gap_copy::write_without_gaps(region, at, len, src, gaps).is_ok()
    }

    /// Reads bytes at an offset obtained from [`RegisteredMemory::check_access`].
    #[inline]
    pub fn read_at(&self, offset: u64, dst: &mut [u8]) -> Result<(), OutOfBounds> {
        let Some(scatter) = &self.scatter else {
            let (memory, at) = self.memory_range(offset, dst.len())?;
            return memory.read(at, dst);
        };
        self.for_each_piece(scatter, offset, dst.len(), |piece, part| match piece {
            Piece::Shared(memory, at) => memory.read(at, &mut dst[part]),
            Piece::Process(process, address) => process.read(address, &mut dst[part]),
        })
    }

    /// Checks that the word at an offset obtained from [`RegisteredMemory::check_access`] is inside, 8-aligned
    /// in memory, and, as far as it is known, writable.
    #[inline]
    pub fn check_word_at(&self, offset: u64) -> Result<(), OutOfBounds> {
        match self.word_at(offset)? {
            Word::Shared(_) => Ok(()),
            Word::Process(_, address) if address.is_multiple_of(8) => Ok(()),
            Word::Process(..) => Err(OutOfBounds),
        }
    }

    /// Runs an operation on the word at an offset that passes [`RegisteredMemory::check_word_at`]; on a copy
    /// in memory of a process ([`ProcessMemory::update_word`]).
    #[inline]
    pub fn update_word_at<R>(
        &self,
        offset: u64,
        operation: impl FnOnce(&AtomicU64) -> R,
    ) -> Result<R, OutOfBounds> {
        match self.word_at(offset)? {
            Word::Shared(word) => Ok(operation(word)),
            Word::Process(process, address) => process.update_word(address, operation),
        }
    }

    #[inline]
    fn word_at(&self, offset: u64) -> Result<Word<'_>, OutOfBounds> {
        let (region, at, piece_len) = match &self.scatter {
            None => self.piece_at(offset, 8)?,
            Some(scatter) => {
                self.check_offset(offset, 8)?;
                match scatter.piece_at(offset, 8)? {
                    (Piece::Shared(region, at), piece_len) => (region, at, piece_len),
                    (Piece::Process(process, address), 8) => {
                        return Ok(Word::Process(process, address));
                    }
                    (Piece::Process(..), _) => return Err(OutOfBounds),
                }
            }
        };
        if !region.is_writable() || piece_len < 8 {
            return Err(OutOfBounds);
        }
        region.atomic_u64(at).map(Word::Shared)
    }

    /// Continues a CRC32c over bytes at an offset obtained from [`RegisteredMemory::check_access`].
    #[inline]
    pub fn crc32c_append_at(&self, offset: u64, len: usize, crc: u32) -> Result<u32, OutOfBounds> {
        let Some(scatter) = &self.scatter else {
            let (memory, at) = self.memory_range(offset, len)?;
            return crc::crc32c_append_shared(crc, memory, at, len);
        };
        let mut sum = crc;
        self.for_each_piece(scatter, offset, len, |piece, part| {
            match piece {
                Piece::Shared(memory, at) => {
                    sum = crc::crc32c_append_shared(sum, memory, at, part.len())?;
                }
                Piece::Process(process, address) => {
                    let mut bytes = vec![0; part.len()];
                    process.read(address, &mut bytes)?;
                    sum = crc::crc32c_append(sum, &bytes);
                }
            }
            Ok(())
        })?;
        Ok(sum)
    }

    /// Returns the region, the offset in it, and the number of the `len` bytes that are contiguous
    /// there: for gather lists of a NIC. Also fails for bytes in a process, which can only be copied
    /// ([`RegisteredMemory::read_piece`]).
    #[inline(always)]
    pub fn piece_at(
        &self,
        offset: u64,
        len: usize,
    ) -> Result<(&Arc<SharedMemory>, usize, usize), OutOfBounds> {
        let Some(scatter) = &self.scatter else {
            self.check_offset(offset, len)?;
            let region = self.shared_memory.as_ref().ok_or(OutOfBounds)?;
            return Ok((region, offset as usize, len));
        };
        self.check_offset(offset, len)?;
        match scatter.piece_at(offset, len)? {
            (Piece::Shared(region, at), piece_len) => Ok((region, at, piece_len)),
            (Piece::Process(..), _) => Err(OutOfBounds),
        }
    }

    /// Copies the contiguous bytes at the beginning of `dst.len()` bytes at `offset`; returns their
    /// number.
    #[cold]
    pub fn read_piece(&self, offset: u64, dst: &mut [u8]) -> Result<usize, OutOfBounds> {
        let piece_len = match &self.scatter {
            None => dst.len(),
            Some(scatter) => scatter.piece_at(offset, dst.len())?.1,
        };
        self.read_at(offset, &mut dst[..piece_len])?;
        Ok(piece_len)
    }

    /// Address in this process of `len` contiguous bytes.
    #[inline]
    pub fn ptr_at(&self, offset: u64, len: usize) -> Result<*const u8, OutOfBounds> {
        let (region, at, piece_len) = self.piece_at(offset, len)?;
        if piece_len < len {
            return Err(OutOfBounds);
        }
        region.ptr_at(at, len).map(<*mut u8>::cast_const)
    }

    /// Prefetches bytes that will be accessed soon; harmless outside the region.
    #[inline]
    pub fn prefetch_at(&self, offset: u64, len: usize) {
        match (&self.shared_memory, &self.scatter) {
            (Some(memory), None) => memory.prefetch_range(offset as usize, len),
            (_, Some(scatter)) => {
                if let Ok((Piece::Shared(memory, at), piece_len)) = scatter.piece_at(offset, len) {
                    memory.prefetch_range(at, piece_len);
                }
            }
            _ => {}
        }
    }
}

/// The key and its validity. No change is in progress while memory is saved, since no worker runs; an entry
/// that leaves the table has an invalid key.
mod saved_key {
    use super::{Deserialize, Deserializer, KeyCell, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(
        key: &KeyCell,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let word = key.load_word();
        (word.stag(), word.is_valid()).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<KeyCell, D::Error> {
        let (stag, valid) = <(u32, bool)>::deserialize(deserializer)?;
        Ok(KeyCell::new(stag, valid))
    }
}

impl Serialize for RegisteredMemory {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        RegisteredMemory::serialize(self, serializer)
    }
}

/// Refuses what no constructor makes: parts outside of their memory, and addresses that wrap.
impl<'de> Deserialize<'de> for RegisteredMemory {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let memory = RegisteredMemory::deserialize(deserializer)?;
        memory.check_layout().map_err(de::Error::custom)?;
        Ok(memory)
    }
}

impl RegisteredMemory {
    fn check_layout(&self) -> Result<(), OutOfBounds> {
        let (len, start) = (self.len(), self.start_offset());
        self.base_address().checked_add(len).ok_or(OutOfBounds)?;
        let is_inside = match (&self.scatter, &self.shared_memory) {
            (Some(scatter), _) => scatter.is_of_len(len),
            (None, Some(memory)) => {
                let end = start.checked_add(len).ok_or(OutOfBounds)?;
                end <= memory.len() as u64
            }
            (None, None) => true,
        };
        is_inside.then_some(()).ok_or(OutOfBounds)
    }
}
