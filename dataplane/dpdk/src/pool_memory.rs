//! Buffers of a pool that the kernel or another owner has for a time, named by their places in the
//! pool's memory.

use crate::mbuf::init_raw;
use crate::{Error, Mbuf, Mempool, Result};
use dpdk_sys as sys;
use std::ptr::NonNull;

/// Size of the pages that the memory begins with.
const PAGE_BYTES: usize = 4096;
/// Buffers taken from the pool in one call.
const BULK: usize = 64;

/// The memory of a pool, in one piece. The *chunk* of a buffer is the offset of its room, which begins
/// with the headroom, from [`Self::base`]. The mbuf lies at a fixed distance before it, so neither
/// direction needs a lookup table.
#[derive(Clone)]
pub struct PoolMemory {
    pool: Mempool,
    base: NonNull<u8>,
    bytes: usize,
    /// Distance from the start of a buffer back to its mbuf.
    mbuf_distance: usize,
}

// SAFETY: an address and lengths; the pool itself is Send.
unsafe impl Send for PoolMemory {}
// SAFETY: as above; the pool is Sync.
unsafe impl Sync for PoolMemory {}

/// Place of a packet that is a single buffer of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferPlace {
    /// Chunk of the buffer.
    pub chunk: u64,
    /// Offset of the data in the chunk.
    pub offset: u16,
    /// Bytes of the data.
    pub bytes: u32,
}

impl PoolMemory {
    /// Finds the memory of a pool.
    ///
    /// # Errors
    /// It is not in one piece.
    pub fn of_pool(pool: &Mempool) -> Result<PoolMemory> {
        let mut start = std::ptr::null_mut();
        let mut bytes = 0;
        // SAFETY: the pool is alive; both are written within the call.
        let chunks = unsafe { sys::siw_pool_memory(pool.as_ptr(), &mut start, &mut bytes) };
        // SAFETY: the pool is alive.
        let private = unsafe { sys::siw_pool_priv_size(pool.as_ptr()) };
        let unusable = |why: String| Error::Invalid {
            what: "memory of packet buffers",
            value: pool.name().to_owned(),
            why,
        };
        if chunks != 1 {
            return Err(unusable(format!(
                "AF_XDP needs it in one piece, and it is in {chunks}: use fewer buffers, or hugepages"
            )));
        }
        let start = start.cast::<u8>();
        let before = start as usize % PAGE_BYTES;
        // SAFETY: the start of the page, in the same mapping.
        let base = unsafe { start.sub(before) };
        Ok(PoolMemory {
            pool: pool.clone(),
            base: NonNull::new(base).ok_or_else(|| unusable("it has none".into()))?,
            bytes: bytes + before,
            mbuf_distance: size_of::<sys::rte_mbuf>() + usize::from(private),
        })
    }

    /// The pool.
    #[inline]
    pub fn pool(&self) -> &Mempool {
        &self.pool
    }

    /// Start of the memory, at a page boundary.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes from [`Self::base`] to the end of the last buffer.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes a free buffer from the pool for each entry of `chunks` (at most 64), and writes its chunk
    /// there. Returns false and takes none if the pool has too few.
    pub fn take_buffers(&self, chunks: &mut [u64]) -> bool {
        let mut buffers = [std::ptr::null_mut(); BULK];
        let count = chunks.len();
        if count > BULK {
            return false;
        }
        // SAFETY: the pool is alive, and the array has room for `count` pointers.
        let result = unsafe {
            sys::siw_mempool_get_bulk(self.pool.as_ptr(), buffers.as_mut_ptr(), count as u32)
        };
        if result != 0 {
            return false;
        }
        for (chunk, buffer) in chunks.iter_mut().zip(buffers) {
            *chunk = buffer as u64 + self.mbuf_distance as u64 - self.base.as_ptr() as u64;
        }
        true
    }

    /// Turns a buffer that [`Self::take_buffers`] took into a packet, whose data another owner has
    /// written.
    ///
    /// # Safety
    /// The buffer of `place` was taken and has not become a packet since, its owner no longer uses it,
    /// and the data lie within the buffer.
    #[inline]
    pub unsafe fn adopt_buffer(&self, place: BufferPlace) -> Mbuf {
        let mbuf = self.mbuf_at(place.chunk);
        // SAFETY: the caller's promise: a free buffer of the pool that nothing else refers to.
        unsafe {
            init_raw(mbuf.as_ptr(), self.pool.buf_len());
            let mut packet = Mbuf::from_raw(mbuf);
            let raw = packet.raw_mbuf_mut();
            raw.data_off = place.offset;
            raw.data_len = place.bytes as u16;
            raw.pkt_len = place.bytes;
            packet
        }
    }

    /// Place of a packet, to lend it to another owner: [`std::mem::forget`] gives it away, and
    /// [`Self::reclaim_packet`] takes it back. `None` if it is not a single buffer of this pool.
    #[inline]
    pub fn place_of(&self, packet: &Mbuf) -> Option<BufferPlace> {
        const NOT_OWN: u64 = sys::RTE_MBUF_F_EXTERNAL | sys::RTE_MBUF_F_INDIRECT;
        let mbuf = packet.raw_mbuf();
        let is_own =
            mbuf.nb_segs == 1 && mbuf.ol_flags & NOT_OWN == 0 && mbuf.pool == self.pool.as_ptr();
        is_own.then(|| BufferPlace {
            chunk: packet.as_ptr() as u64 + self.mbuf_distance as u64 - self.base.as_ptr() as u64,
            offset: mbuf.data_off,
            bytes: mbuf.pkt_len,
        })
    }

    /// Takes back a packet that was lent.
    ///
    /// # Safety
    /// [`Self::place_of`] returned the chunk for a packet that was forgotten and not reclaimed since,
    /// and its owner no longer uses it.
    #[inline]
    pub unsafe fn reclaim_packet(&self, chunk: u64) -> Mbuf {
        // SAFETY: the caller's promise: the packet is valid and has no owner.
        unsafe { Mbuf::from_raw(self.mbuf_at(chunk)) }
    }

    #[inline]
    fn mbuf_at(&self, chunk: u64) -> NonNull<sys::rte_mbuf> {
        // SAFETY: a chunk of a buffer of this pool, by the promise of both callers: it lies in the
        // pool's memory, and an mbuf precedes it at this distance.
        unsafe {
            let room = self.base.add(chunk as usize);
            room.sub(self.mbuf_distance).cast()
        }
    }
}
