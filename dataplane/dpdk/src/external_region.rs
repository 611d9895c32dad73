//! External memory registered with DPDK and mapped for ports that read it by DMA.

use crate::iova_space::{IovaRange, IovaSpace};
use crate::pci::too_few_maps;
use crate::{Eal, Error, ExtMemory, ExtSlice, Port, Result, error, log};
use dpdk_sys as sys;
use std::ptr;
use std::sync::Arc;

/// External memory registered with DPDK, so that NICs can read it.
pub struct ExternalRegion {
    slice: ExtSlice,
    len: usize,
    mapped: Vec<Port>,
    /// Declared before the memory: its I/O addresses are freed when no device can use them any
    /// more.
    _range: Option<IovaRange>,
    _memory: Arc<dyn ExtMemory>,
    _eal: Eal,
}

// SAFETY: the addresses are plain numbers here; the memory itself may be shared between threads
// (`ExtMemory` is Send and Sync).
unsafe impl Send for ExternalRegion {}
// SAFETY: as above; no method changes anything through `&self`.
unsafe impl Sync for ExternalRegion {}

impl ExternalRegion {
    /// Registers the first `len` bytes of `memory`, which devices read at addresses of `space`.
    /// Address and length must be multiples of `page_size`, the size of the underlying pages.
    ///
    /// # Errors
    /// DPDK's region table is full, or the space has no free address range.
    pub fn register(
        eal: &Eal,
        memory: Arc<dyn ExtMemory>,
        len: usize,
        page_size: usize,
        space: &IovaSpace,
    ) -> Result<Self> {
        let fail = |addr: usize, reason: String| Error::ExternalMemory {
            addr,
            len,
            what: "registered",
            reason,
            log: log::kept_lines(),
        };
        check_list_free()?;
        log::forget_lines();
        let slice = memory
            .slice(0, len)
            .ok_or_else(|| fail(0, "it is shorter than that".into()))?;
        let addr = slice.ptr.as_ptr() as usize;
        if page_size == 0 || !addr.is_multiple_of(page_size) || !len.is_multiple_of(page_size) {
            return Err(fail(
                addr,
                format!("address and length must be multiples of {page_size}"),
            ));
        }
        let (mut slice, mut range) = (slice, None);
        if !space.translates(addr as u64, len as u64) {
            let full = || fail(addr, "the IOMMU's addresses are all in use".into());
            let new_range = space.allocate(len as u64).ok_or_else(full)?;
            if !memory.set_io_address(new_range.base) {
                return Err(fail(
                    addr,
                    "the IOMMU cannot translate addresses that high".into(),
                ));
            }
            slice.iova = new_range.base;
            range = Some(new_range);
        }
        // SAFETY: DPDK records the addresses; `memory` keeps them mapped until the region is
        // unregistered in `drop`.
        let rc = unsafe {
            sys::rte_extmem_register(
                slice.ptr.as_ptr().cast(),
                len,
                ptr::null_mut(),
                0,
                page_size,
            )
        };
        if rc != 0 {
            return Err(fail(addr, error::failure_reason(rc)));
        }
        Ok(Self {
            slice,
            len,
            mapped: Vec::new(),
            _range: range,
            _memory: memory,
            _eal: eal.clone(),
        })
    }

    /// Maps the memory for DMA by `port`'s device. Virtual links read it with the CPU and need no
    /// mapping, so this returns at once for them.
    pub fn map_for(&mut self, port: &Port) -> Result<()> {
        if !port.needs_dma_map() || self.mapped.iter().any(|mapped| mapped.id() == port.id()) {
            return Ok(());
        }
        check_map_free()?;
        log::forget_lines();
        let addr = self.slice.ptr.as_ptr();
        let mapped = port.with_device(|device| {
            // SAFETY: the device is not removed during the call, and the memory stays mapped until
            // it is unmapped for the device in `drop`.
            unsafe { sys::rte_dev_dma_map(device, addr.cast(), self.slice.iova, self.len) }
        });
        // A removed device needs no mapping.
        let Some(rc) = mapped else { return Ok(()) };
        if rc != 0 {
            return Err(Error::ExternalMemory {
                addr: addr as usize,
                len: self.len,
                what: "mapped for the NIC",
                reason: error::failure_reason(rc),
                log: log::kept_lines(),
            });
        }
        self.mapped.push(port.share());
        Ok(())
    }
}

impl Drop for ExternalRegion {
    fn drop(&mut self) {
        let addr = self.slice.ptr.as_ptr().cast();
        for port in &self.mapped {
            let unmapped = port.with_device(|device| {
                // SAFETY: mapped by `map_for`; the device is not removed during the call.
                unsafe { sys::rte_dev_dma_unmap(device, addr, self.slice.iova, self.len) }
            });
            if let Some(rc) = unmapped.filter(|rc| *rc != 0) {
                tracing::error!(
                    port = port.name(),
                    bytes = self.len,
                    "memory stays mapped for the NIC and is not freed before siwd ends: {}",
                    error::failure_reason(rc)
                );
            }
        }
        // SAFETY: registered by `register`, once.
        unsafe { sys::rte_extmem_unregister(addr, self.len) };
    }
}

/// External memory regions that DPDK can still register ([`ExternalRegion`]).
pub fn external_regions_left() -> u64 {
    // SAFETY: it only counts, under DPDK's own lock.
    let used = unsafe { sys::siw_memseg_lists_used() };
    u64::from(sys::RTE_MAX_MEMSEG_LISTS.saturating_sub(used))
}

/// Reports a full region table as such: DPDK's own error would be "out of memory".
fn check_list_free() -> Result<()> {
    if external_regions_left() > 0 {
        return Ok(());
    }
    Err(Error::TooManyRegions {
        what: "DPDK's lists of memory (RTE_MAX_MEMSEG_LISTS)",
        limit: sys::RTE_MAX_MEMSEG_LISTS.into(),
        remedy: "build DPDK with more of them".into(),
    })
}

/// Reports vfio's mapping limit as such: vfio's own error would be "invalid argument".
fn check_map_free() -> Result<()> {
    // SAFETY: queries the kernel through DPDK's vfio descriptor, if there is one.
    if unsafe { sys::siw_vfio_maps_left() } != 0 {
        return Ok(());
    }
    Err(too_few_maps())
}
