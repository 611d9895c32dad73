//! Layout of regions that are not contiguous: pages that a work request registered (`PageList`), or
//! extents of several memories ([`Extent`]), which the control thread registered for memory that an
//! application already had. [`crate::registered_memory`] copies through it; contiguous regions, the
//! usual case, do not use it.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use parking_lot::Mutex;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use siw_shm::local_wqe::{MAX_PAGE_SHIFT, MIN_PAGE_SHIFT};
use siw_shm::{OutOfBounds, SharedMemory};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Memory of a process that the daemon has not mapped: every access is a system call that copies.
///
/// The descriptor is one of /proc/PID/mem. It remains bound to the address space that it was opened
/// for: after that is destroyed every access fails, and a later process with the same number is not
/// affected.
#[derive(Debug, Serialize, Deserialize)]
pub struct ProcessMemory {
    #[serde(with = "siw_shm::saved")]
    mem: OwnedFd,
    /// Held while an operation on a word is under way, which none is while it is saved.
    #[serde(skip)]
    word: Mutex<()>,
}

siw_shm::keep_by_serde!(ProcessMemory);

impl ProcessMemory {
    /// Memory accessed through a descriptor of /proc/PID/mem.
    pub fn new(mem: OwnedFd) -> ProcessMemory {
        ProcessMemory {
            mem,
            word: Mutex::new(()),
        }
    }

    /// Copies from `address` of the process.
    ///
    /// # Errors
    /// The process has exited, or has no such memory.
    pub fn read(&self, address: u64, dst: &mut [u8]) -> Result<(), OutOfBounds> {
        let mut done = 0;
        while done < dst.len() {
            match rustix::io::pread(&self.mem, &mut dst[done..], address + done as u64) {
                Ok(0) | Err(_) => return Err(OutOfBounds),
                Ok(got) => done += got,
            }
        }
        Ok(())
    }

    /// Copies to `address` of the process.
    ///
    /// # Errors
    /// The process has exited, or has no such memory.
    pub fn write(&self, address: u64, src: &[u8]) -> Result<(), OutOfBounds> {
        let mut done = 0;
        while done < src.len() {
            match rustix::io::pwrite(&self.mem, &src[done..], address + done as u64) {
                Ok(0) | Err(_) => return Err(OutOfBounds),
                Ok(put) => done += put,
            }
        }
        Ok(())
    }

    /// Runs an operation on a copy of the word at `address` of the process, and copies it back if it has
    /// changed. Operations of this object exclude each other; what the process writes meanwhile may be lost.
    ///
    /// # Errors
    /// The process has exited, or has no such memory; then nothing has changed.
    pub fn update_word<R>(
        &self,
        address: u64,
        operation: impl FnOnce(&AtomicU64) -> R,
    ) -> Result<R, OutOfBounds> {
        let _one = self.word.lock();
        let mut bytes = [0; 8];
        self.read(address, &mut bytes)?;
        let word = AtomicU64::new(u64::from_ne_bytes(bytes));
        let result = operation(&word);
        let after = word.into_inner().to_ne_bytes();
        if after != bytes {
            self.write(address, &after)?;
        }
        Ok(result)
    }
}

/// Memory that contains an extent.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum ExtentMemory {
    /// A mapping of the daemon; offsets count from its start.
    Shared(#[serde(with = "siw_shm::saved")] Arc<SharedMemory>),
    /// A process; offsets are its addresses.
    Process(#[serde(with = "siw_shm::saved")] Arc<ProcessMemory>),
}

/// A piece of a region.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Extent {
    /// Memory that contains it.
    pub memory: ExtentMemory,
    /// Offset of its first byte there.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// A part of an extent.
#[derive(Debug)]
pub(crate) enum Piece<'a> {
    Shared(&'a Arc<SharedMemory>, usize),
    Process(&'a ProcessMemory, u64),
}

/// The extents of a region, in order.
#[derive(Debug)]
pub(crate) struct ExtentList {
    /// For each extent, its end in the region.
    ends: Box<[u64]>,
    extents: Box<[Extent]>,
}

impl ExtentList {
    /// Creates a list of extents; they must cover `len` bytes and lie within their memories.
    pub fn new(extents: Vec<Extent>, len: u64) -> Result<ExtentList, OutOfBounds> {
        let mut ends = Vec::with_capacity(extents.len());
        let mut end = 0u64;
        for extent in &extents {
            let last = extent
                .offset
                .checked_add(extent.len)
                .filter(|_| extent.len > 0)
                .ok_or(OutOfBounds)?;
            match &extent.memory {
                ExtentMemory::Shared(memory) if last > memory.len() as u64 => {
                    return Err(OutOfBounds);
                }
                // File offsets are signed.
                ExtentMemory::Process(_) if i64::try_from(last).is_err() => {
                    return Err(OutOfBounds);
                }
                _ => {}
            }
            end = end.checked_add(extent.len).ok_or(OutOfBounds)?;
            ends.push(end);
        }
        if end != len {
            return Err(OutOfBounds);
        }
        Ok(ExtentList {
            ends: ends.into(),
            extents: extents.into(),
        })
    }

    /// Location of byte `offset` of the region, and the number of the `len` bytes that are contiguous
    /// there.
    pub fn piece_at(&self, offset: u64, len: usize) -> Result<(Piece<'_>, usize), OutOfBounds> {
        let index = self.ends.partition_point(|end| *end <= offset);
        let extent = self.extents.get(index).ok_or(OutOfBounds)?;
        let left = self.ends[index] - offset;
        let at = extent.offset + (extent.len - left);
        let piece = match &extent.memory {
            ExtentMemory::Shared(memory) => Piece::Shared(memory, at as usize),
            ExtentMemory::Process(memory) => Piece::Process(memory, at),
        };
        Ok((
            piece,
            usize::try_from(left).map_or(len, |left| left.min(len)),
        ))
    }
}

/// The ends follow from the extents.
impl Serialize for ExtentList {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.extents.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for ExtentList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let extents: Vec<Extent> = Deserialize::deserialize(deserializer)?;
        let add = |sum: u64, extent: &Extent| sum.wrapping_add(extent.len);
        let len = extents.iter().fold(0, add);
        ExtentList::new(extents, len).map_err(de::Error::custom)
    }
}

/// Pages of a fast registration.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct PageList {
    /// Shared memory in which the application writes the list.
    #[serde(with = "siw_shm::saved")]
    pub list: Arc<SharedMemory>,
    pub list_at: usize,
    /// The checked private copy: offsets in the region.
    pub offsets: Box<[AtomicU64]>,
    pub shift: AtomicU32,
}

impl PageList {
    /// Location of octet `offset`, counted from the first page, and the number of contiguous octets
    /// there, at most `len`.
    pub fn piece_at(&self, offset: usize, len: usize) -> Result<(usize, usize), OutOfBounds> {
        let size = 1usize << self.shift.load(Ordering::Relaxed);
        let page = |i: usize| -> Result<usize, OutOfBounds> {
            let page_offset = self.offsets.get(i).ok_or(OutOfBounds)?;
            Ok(page_offset.load(Ordering::Relaxed) as usize)
        };
        let (mut i, at) = (offset / size, offset % size);
        let from = page(i)?;
        let mut piece_len = size - at;
        while piece_len < len && page(i + 1)? == page(i)? + size {
            i += 1;
            piece_len += size;
        }
        Ok((from + at, piece_len.min(len)))
    }
}

/// Layout of a region that is not contiguous.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Scatter {
    Pages(
        PageList,
        #[serde(with = "siw_shm::saved")] Arc<SharedMemory>,
    ),
    Extents(ExtentList),
}

impl Scatter {
    /// Returns whether it is the layout of `len` bytes, all of them inside of their memory.
    pub fn is_of_len(&self, len: u64) -> bool {
        match self {
            Scatter::Extents(extents) => extents.ends.last().copied().unwrap_or(0) == len,
            Scatter::Pages(pages, region) => {
                let list_len = pages.offsets.len().saturating_mul(8);
                let shifts = MIN_PAGE_SHIFT.into()..=MAX_PAGE_SHIFT.into();
                let is_inside = |offset: &AtomicU64| {
                    let offset = offset.load(Ordering::Relaxed);
                    offset <= region.len() as u64
                };
                pages.list.ptr_at(pages.list_at, list_len).is_ok()
                    && shifts.contains(&pages.shift.load(Ordering::Relaxed))
                    && pages.offsets.iter().all(is_inside)
            }
        }
    }

    /// Location of byte `offset`, and the number of the `len` bytes that are contiguous there.
    pub fn piece_at(&self, offset: u64, len: usize) -> Result<(Piece<'_>, usize), OutOfBounds> {
        match self {
            Scatter::Pages(pages, region) => {
                let (at, piece_len) = pages.piece_at(offset as usize, len)?;
                Ok((Piece::Shared(region, at), piece_len))
            }
            Scatter::Extents(extents) => extents.piece_at(offset, len),
        }
    }

    /// Passes the pieces of `len` bytes at `offset` to `visit`, each with its range within those
    /// bytes.
    #[inline(never)]
    pub fn for_each_piece(
        &self,
        offset: u64,
        len: usize,
        mut visit: impl FnMut(Piece<'_>, std::ops::Range<usize>) -> Result<(), OutOfBounds>,
    ) -> Result<(), OutOfBounds> {
        let mut done = 0;
        while done < len {
            let (piece, piece_len) = self.piece_at(offset + done as u64, len - done)?;
            visit(piece, done..done + piece_len)?;
            done += piece_len;
        }
        Ok(())
    }
}
