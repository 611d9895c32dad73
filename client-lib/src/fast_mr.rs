//! Fast registration: a work request registers pages of an arena under one key, in the order of the
//! send queue (ib_alloc_mr, ib_map_mr_sg, IB_WR_REG_MR); LOCAL_INV, or the peer's SEND_WITH_INV,
//! invalidates it.

use crate::memory::Arena;
use crate::{Access, Error, Pd, SendWr};
use siw_shm::control::{AllocFastMr, DEREG_UNBIND_WINDOWS, DeregMr, FastMrReply};
use siw_shm::{FastReg, SharedMemory};
use std::ops::Range;
use std::sync::Arc;

/// A region registered by work requests. Dropping frees it and unbinds the windows that are bound to
/// it.
pub struct FastMr {
    pd: Pd,
    arena: Arc<Arena>,
    list: Arc<SharedMemory>,
    list_at: usize,
    max_pages: u32,
    /// Key from the allocation, which identifies the region to the daemon.
    home: u32,
    key: u32,
    mapped: Option<Mapped>,
}

/// Layout that [`FastMr::map_ranges`] wrote into the page list.
#[derive(Debug, Clone, Copy)]
struct Mapped {
    length: u32,
    first_offset: u32,
    page_shift: u8,
}

impl Pd {
    /// Allocates a region of at most `max_pages` pages of an arena. Its key is valid from the first
    /// REG_MR on.
    pub fn alloc_fast_mr(&self, arena: &Arc<Arena>, max_pages: u32) -> Result<FastMr, Error> {
        let alloc = AllocFastMr {
            pd: self.id(),
            arena: arena.id(),
            max_pages,
            reserved: 0,
        };
        self.ctx().check_same(arena.ctx(), "arena")?;
        let free = |reply: &FastMrReply| DeregMr {
            lkey: reply.lkey,
            flags: 0,
        };
        let (reply, list) =
            self.ctx()
                .create_queue(&alloc, |reply| reply.list, |_, memory| Ok(memory), free)?;
        Ok(FastMr {
            pd: self.clone(),
            arena: arena.clone(),
            list,
            list_at: reply.list.offset as usize,
            max_pages: reply.max_pages,
            home: reply.lkey,
            key: reply.lkey,
            mapped: None,
        })
    }
}

impl FastMr {
    /// The key as of the last [`Self::register_request`]: lkey and rkey are the same.
    pub fn key(&self) -> u32 {
        self.key
    }

    /// Writes the pages of these ranges into the page list, as ib_map_mr_sg does: only the first
    /// may start inside a page of 2^page_shift bytes (12 to 30), and only the last may end inside
    /// one. Returns the number of ranges that fit. Must not be called while a REG_MR is
    /// outstanding.
    pub fn map_ranges(&mut self, ranges: &[Range<usize>], page_shift: u8) -> Result<usize, Error> {
        if !(siw_shm::local_wqe::MIN_PAGE_SHIFT..=siw_shm::local_wqe::MAX_PAGE_SHIFT)
            .contains(&page_shift)
        {
            return Err(Error::Invalid("the page size must be 2^12 to 2^30 bytes"));
        }
        let size = 1usize << page_shift;
        let (mut pages, mut length, mut first_offset, mut used) = (0u32, 0usize, 0usize, 0);
        let mut open = true;
        for range in ranges {
            let len = crate::memory::range_len(&self.arena, range)?;
            let in_page = range.start % size;
            let page_count = (in_page + len).div_ceil(size);
            if !open || (used > 0 && in_page != 0) {
                break;
            }
            let all = pages.saturating_add(u32::try_from(page_count).unwrap_or(u32::MAX));
            let sum = length.saturating_add(len);
            if all > self.max_pages || u32::try_from(sum).is_err() {
                break;
            }
            for (i, page) in (range.start - in_page..)
                .step_by(size)
                .take(page_count)
                .enumerate()
            {
                let to = self.list_at + (pages as usize + i) * 8;
                self.list.write(to, &(page as u64).to_le_bytes())?;
            }
            if used == 0 {
                first_offset = in_page;
            }
            (pages, length) = (all, sum);
            open = range.end.is_multiple_of(size);
            used += 1;
        }
        if used == 0 {
            return Err(Error::Invalid(
                "the first range does not fit into the region's pages",
            ));
        }
        self.mapped = Some(Mapped {
            length: length as u32,
            first_offset: first_offset as u32,
            page_shift,
        });
        Ok(used)
    }

    /// Builds the signaled REG_MR work request for the mapped ranges. From its position in the send
    /// queue on, `key` (the same region, any low octet) addresses the region from `iova` on, or
    /// from 0 with ZERO_BASED. Fails with MW_BIND_ERR while an older key of it is valid.
    pub fn register_request(
        &mut self,
        wr_id: u64,
        key: u32,
        iova: u64,
        access: Access,
    ) -> Result<SendWr<'static>, Error> {
        let mapped = self
            .mapped
            .ok_or(Error::Invalid("no ranges are mapped into the region"))?;
        self.key = key;
        Ok(SendWr::fast_reg(
            wr_id,
            &FastReg {
                key,
                iova,
                length: mapped.length,
                first_offset: mapped.first_offset,
                page_shift: mapped.page_shift,
                access,
            },
        ))
    }

    /// Mapped length in bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.mapped.map_or(0, |mapped| mapped.length as usize)
    }

    /// The arena of its pages.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Memory of the page list, for tests of hostile page lists.
    #[doc(hidden)]
    pub fn list(&self) -> (&Arc<SharedMemory>, usize) {
        (&self.list, self.list_at)
    }
}

impl Drop for FastMr {
    fn drop(&mut self) {
        self.pd.ctx().free_object(&DeregMr {
            lkey: self.home,
            flags: DEREG_UNBIND_WINDOWS,
        });
    }
}
