//! Registration of a program's memory by mapping an arena in its place, page by page. Only memory
//! that nobody else writes meanwhile can be registered so; the client library is going to have a
//! better way.

use siw::{Access, Arena, Context, Error, Mr, Pd};

const PAGE: usize = 4096;

/// A registered part of the program's memory.
pub struct AppMr(Mr);

/// Registers memory, named from `iova` on.
pub fn reg_memory_iova(
    client: &Context,
    pd: &Pd,
    address: *mut u8,
    len: usize,
    iova: u64,
    access: Access,
) -> Result<AppMr, Error> {
    let in_page = address as usize % PAGE;
    let pages = (in_page + len).next_multiple_of(PAGE);
    let first = address.wrapping_sub(in_page);
    let arena = Arena::alloc(client, pages, false)?;
    // SAFETY: the program's memory, by ibv_reg_mr(3), in whole pages, which keep what they hold.
    let moved = unsafe {
        arena.as_ptr().copy_from_nonoverlapping(first, pages);
        libc::mremap(
            arena.as_ptr().cast(),
            0,
            pages,
            libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED,
            first.cast::<libc::c_void>(),
        )
    };
    if moved == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error().into());
    }
    Ok(AppMr(pd.reg_mr_iova(
        &arena,
        in_page..in_page + len,
        iova,
        access,
    )?))
}

impl AppMr {
    /// What it may be used for.
    pub fn access(&self) -> Access {
        self.0.access()
    }

    /// Key for own work requests.
    pub fn lkey(&self) -> u32 {
        self.0.lkey()
    }

    /// Key to give to the peer.
    pub fn rkey(&self) -> u32 {
        self.0.rkey()
    }

    /// EBUSY, with the region back, while windows are bound to it.
    pub fn dereg(self) -> Result<(), (AppMr, Error)> {
        self.0.dereg().map_err(|(mr, error)| (AppMr(mr), error))
    }
}
