//! State of a port that its handles and queues share.

use crate::tap_interface::TapInterface;
use crate::{DriverTraits, Eal, Mempool, PortCaps, eal};
use dpdk_sys as sys;
use parking_lot::Mutex;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// State of a port, shared by its handles and queues.
pub(crate) struct PortInner {
    pub id: u16,
    pub name: String,
    pub traits: &'static DriverTraits,
    pub rte_device: *mut sys::rte_device,
    /// True for a NIC that reads memory by DMA and needs it mapped.
    pub dma: bool,
    /// [`crate::Port::detach`] has closed the device: DPDK may reuse its port number.
    pub detached: AtomicBool,
    /// Packets that queues dropped because the driver or its interface refused them.
    pub refused: AtomicU64,
    /// Queues handed out to workers: the port cannot be changed while there are any.
    pub queues_out: AtomicUsize,
    /// Declared before `state`: draining the rings requires the pools to be alive.
    pub rings: Option<Arc<PairRings>>,
    /// The interface of the kernel that the driver has made.
    pub tap: Option<TapInterface>,
    pub state: Mutex<PortState>,
    pub _eal: Eal,
}

#[derive(Default)]
pub(crate) struct PortState {
    pub granted_caps: Option<PortCaps>,
    pub rx_queues: u16,
    pub tx_queues: u16,
    pub started: bool,
    /// The requested RSS key.
    pub rss_key: Option<Vec<u8>>,
    /// The driver refills its receive rings from these.
    pub pools: Vec<Mempool>,
}

// SAFETY: the device pointer is only passed back to DPDK, whose control calls are serialised by
// `state`; the rest is Send and Sync by itself.
unsafe impl Send for PortInner {}
// SAFETY: as above.
unsafe impl Sync for PortInner {}

impl PortInner {
    pub(crate) fn count_refused(&self, packets: u64) {
        self.refused.fetch_add(packets, Ordering::Relaxed);
    }

    pub(crate) fn queue_taken(&self) {
        self.queues_out.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn queue_returned(&self) {
        // Release: the queue's last burst comes before the port's stop.
        self.queues_out.fetch_sub(1, Ordering::Release);
    }

    /// Stops and closes the port and releases its device, once. No queue of it is in use.
    pub(crate) fn close_device(&self) {
        let _devices = eal::device_lock();
        if self.detached.swap(true, Ordering::AcqRel) {
            return;
        }
        self.unwatch();
        // SAFETY: neither the port nor any of its queues is in use any more, and `detached` keeps
        // other handles from using its number and its device.
        unsafe {
            sys::rte_eth_dev_stop(self.id);
            sys::rte_eth_dev_close(self.id);
            if !self.rte_device.is_null() {
                sys::rte_dev_remove(self.rte_device);
            }
        }
    }
}

impl Drop for PortInner {
    fn drop(&mut self) {
        self.close_device();
    }
}

/// The rings of a pair; freed when both ports are closed.
pub(crate) struct PairRings {
    pub a_to_b: Vec<NonNull<sys::rte_ring>>,
    pub b_to_a: Vec<NonNull<sys::rte_ring>>,
    /// Pools to which packets left in the rings return.
    pub pools: Mutex<Vec<Mempool>>,
}

impl PairRings {
    pub(crate) fn keep_alive(&self, pools: &[Mempool]) {
        let mut kept = self.pools.lock();
        kept.extend_from_slice(pools);
    }
}

// SAFETY: rings support use from several threads; this value only creates and frees them.
unsafe impl Send for PairRings {}
// SAFETY: as above.
unsafe impl Sync for PairRings {}

impl Drop for PairRings {
    fn drop(&mut self) {
        for ring in self.a_to_b.iter().chain(&self.b_to_a) {
            let mut obj = ptr::null_mut();
            // SAFETY: both ports are closed, so nothing else accesses the rings, and the packets in
            // them have no other owner.
            unsafe {
                while sys::siw_ring_dequeue_burst(ring.as_ptr(), &mut obj, 1) == 1 {
                    sys::siw_pktmbuf_free(obj.cast());
                }
                sys::rte_ring_free(ring.as_ptr());
            }
        }
    }
}
