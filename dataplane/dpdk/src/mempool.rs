//! Pools of packet buffers. The daemon creates one or two; workers allocate from them through a
//! [`crate::MbufCache`].

use crate::{Eal, Error, Result, eal, error, log};
use dpdk_sys as sys;
use std::ffi::CString;
use std::ptr::NonNull;
use std::sync::Arc;

/// A pool of equally sized buffers. Clones are handles to the same pool.
#[derive(Clone)]
pub struct Mempool(Arc<MempoolInner>);

struct MempoolInner {
    ptr: NonNull<sys::rte_mempool>,
    name: String,
    count: u32,
    buf_len: u16,
    eal_handle: Eal,
}

// SAFETY: DPDK's pools support concurrent use from any thread; the ring below them is
// multi-producer, multi-consumer.
unsafe impl Send for MempoolInner {}
// SAFETY: as above.
unsafe impl Sync for MempoolInner {}

impl Mempool {
    /// Creates a pool of `count` buffers that hold `data_room` bytes each in addition to the
    /// headroom of [`crate::HEADROOM`] bytes. DPDK caches `cache` buffers for each registered
    /// thread, clamped to 512 and to two thirds of `count`. `socket` is a NUMA node, or `None` for
    /// any.
    pub fn new(
        eal: &Eal,
        name: &str,
        count: u32,
        cache: u32,
        data_room: u16,
        socket: Option<u32>,
    ) -> Result<Self> {
        let invalid = |why: &str| Error::Invalid {
            what: "mempool name",
            value: name.to_owned(),
            why: why.to_owned(),
        };
        // The pool's ring is named "MP_<name>" within RTE_RING_NAMESIZE.
        if name.is_empty() || name.len() + 4 > sys::RTE_MEMPOOL_NAMESIZE as usize {
            return Err(invalid("it must have 1 to 22 bytes"));
        }
        let cname = CString::new(name).map_err(|_| invalid("it contains a NUL byte"))?;
        let buf_len = data_room
            .checked_add(crate::HEADROOM)
            .ok_or_else(|| Error::Invalid {
                what: "data room",
                value: data_room.to_string(),
                why: format!("it must not exceed {}", u16::MAX - crate::HEADROOM),
            })?;
        let cache = cache
            .min(sys::RTE_MEMPOOL_CACHE_MAX_SIZE as u32)
            .min((u64::from(count) * 2 / 3) as u32);
        log::forget_lines();
        // SAFETY: the name is a C string, the EAL is initialised.
        let ptr = unsafe {
            sys::rte_pktmbuf_pool_create(
                cname.as_ptr(),
                count,
                cache,
                0,
                buf_len,
                socket.map_or(sys::SOCKET_ID_ANY, |socket| socket as i32),
            )
        };
        let Some(ptr) = NonNull::new(ptr) else {
            let reason = error::errno_text(error::rte_errno());
            let buffer_bytes = size_of::<sys::rte_mbuf>() + usize::from(buf_len) + 64;
            return Err(Error::Mempool {
                name: name.to_owned(),
                count,
                buffer_bytes,
                total_mib: (buffer_bytes * count as usize).div_ceil(1 << 20),
                reason,
                log: log::kept_lines(),
            });
        };
        Ok(Self(Arc::new(MempoolInner {
            ptr,
            name: name.to_owned(),
            count,
            buf_len,
            eal_handle: eal.clone(),
        })))
    }

    /// DPDK's name of the pool.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Total number of buffers.
    pub fn capacity(&self) -> u32 {
        self.0.count
    }

    /// Buffers not allocated at the moment: a sum over the pool and all threads' caches, exact only
    /// while no thread allocates or frees. Not for the fast path.
    pub fn available_buffers(&self) -> u32 {
        // SAFETY: the pool is alive while `self` is.
        unsafe { sys::rte_mempool_avail_count(self.0.ptr.as_ptr()) }
    }

    /// Bytes of one buffer, headroom included.
    #[inline]
    pub fn buf_len(&self) -> u16 {
        self.0.buf_len
    }

    /// Bytes that an empty buffer can hold after its headroom.
    #[inline]
    pub fn data_room(&self) -> u16 {
        self.0.buf_len - crate::HEADROOM
    }

    pub(crate) fn eal_handle(&self) -> &Eal {
        &self.0.eal_handle
    }

    #[inline]
    pub(crate) fn as_ptr(&self) -> *mut sys::rte_mempool {
        self.0.ptr.as_ptr()
    }
}

impl Drop for MempoolInner {
    fn drop(&mut self) {
        // SAFETY: the pool is alive until freed below, which happens once.
        unsafe {
            if sys::rte_mempool_avail_count(self.ptr.as_ptr()) == self.count {
                sys::rte_mempool_free(self.ptr.as_ptr());
            } else {
                // An allocated mbuf still points into the pool.
                eal::leak_environment();
            }
        }
    }
}
