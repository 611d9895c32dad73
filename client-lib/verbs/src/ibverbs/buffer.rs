//! Buffers that the library allocates for a program (ibv_alloc_buf(3)): ordinary memory in pages of its own,
//! as with the providers of rdma-core that have no memory of another kind.

use super::mr;
use crate::abi::{ibv_mr, ibv_pd};
use crate::status::{fail_errno, null_with};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

/// `struct ibv_buf`, which programs only pass on.
pub struct BufferObject {
    pd: *mut ibv_pd,
    start: *mut c_void,
    length: usize,
}

impl BufferObject {
    /// Checks whether the buffer is of the protection domain and contains a range.
    fn contains(&self, pd: *mut ibv_pd, address: *mut c_void, length: usize) -> bool {
        let offset = address.addr().checked_sub(self.start.addr());
        let end = offset.and_then(|offset| offset.checked_add(length));
        self.pd == pd && end.is_some_and(|end| end <= self.length)
    }
}

/// # Safety
/// NULL or a buffer of this library.
pub unsafe fn holds_range(
    buffer: *const BufferObject,
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
) -> bool {
    // SAFETY: as the caller promised.
    unsafe { buffer.as_ref() }.is_some_and(|buffer| buffer.contains(pd, address, length))
}

/// ibv_alloc_buf(3)
pub unsafe fn alloc_buffer(
    pd: *mut ibv_pd,
    size: usize,
    buffer: *mut *mut BufferObject,
) -> *mut c_void {
    if size == 0 {
        return null_with(libc::EINVAL);
    }
    let mut start: *mut c_void = null_mut();
    // SAFETY: a pointer to write, and the size of a page, which is a power of two.
    let failed = unsafe {
        let page = libc::sysconf(libc::_SC_PAGESIZE) as usize;
        libc::posix_memalign(&raw mut start, page, size)
    };
    if failed != 0 {
        return null_with(failed);
    }
    let made = Box::new(BufferObject {
        pd,
        start,
        length: size,
    });
    // SAFETY: a pointer to write.
    unsafe { buffer.write(Box::into_raw(made)) };
    start
}

/// ibv_free_buf(3)
pub unsafe fn free_buffer(buffer: *mut BufferObject) {
    if buffer.is_null() {
        return;
    }
    // SAFETY: `alloc_buffer` made both; the manual page forbids any later use.
    unsafe {
        let buffer = Box::from_raw(buffer);
        libc::free(buffer.start);
    }
}

/// ibv_reg_buf_mr(3)
pub unsafe fn register_buffer(
    pd: *mut ibv_pd,
    buffer: *mut BufferObject,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: a buffer of this library.
    if !unsafe { holds_range(buffer, pd, address, length) } {
        return null_with(libc::EINVAL);
    }
    // SAFETY: as the caller promised.
    unsafe { mr::reg_mr(pd, address, length, access) }
}

/// ibv_export_buf_dmabuf_fd(3): no buffer is backed by a dmabuf.
pub unsafe fn export_buffer(_buffer: *mut BufferObject) -> c_int {
    fail_errno(libc::ENODATA);
    -1
}
