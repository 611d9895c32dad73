//! The queues of a started port. Each belongs to one worker, whose loop uses nothing of DPDK but
//! queues and buffers.

use crate::port_inner::PortInner;
use crate::{Error, Result, RxBatch, TxBatch, error};
use dpdk_sys as sys;
use std::cell::Cell;
use std::marker::PhantomData;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;

/// A receive queue: owned, can move to a worker thread, cannot be shared.
pub struct RxQueue {
    port_id: u16,
    queue: u16,
    /// The last interrupt descriptor seen, and whether it is an eventfd.
    known_fd: (RawFd, bool),
    port: Arc<PortInner>,
    _not_sync: PhantomData<Cell<()>>,
}

/// A transmit queue: owned, can move to a worker thread, cannot be shared.
pub struct TxQueue {
    port_id: u16,
    queue: u16,
    /// The port computes checksums or segments packets: each driver requires its own preparation of
    /// the headers of such packets, and reports packets that it cannot send.
    prepare: bool,
    /// Packets that the driver or its interface does not send, counted when they are dropped.
    refused: u64,
    port: Arc<PortInner>,
    _not_sync: PhantomData<Cell<()>>,
}

impl RxQueue {
    pub(crate) fn new(port: &Arc<PortInner>, queue: u16) -> Self {
        port.queue_taken();
        Self {
            port_id: port.id,
            queue,
            known_fd: (-1, false),
            port: port.clone(),
            _not_sync: PhantomData,
        }
    }

    /// DPDK's number of the port.
    pub fn port_id(&self) -> u16 {
        self.port_id
    }

    /// Index of the queue among the port's queues of its direction.
    pub fn queue_index(&self) -> u16 {
        self.queue
    }

    /// Receives packets and appends them to `batch`, up to its free slots; returns the number
    /// received.
    #[inline]
    pub fn rx_burst(&mut self, batch: &mut RxBatch) -> usize {
        let room = batch.spare_slots();
        // SAFETY: the port is started while a queue of it lives, this is the only handle of the
        // queue, and `room` holds that many pointers.
        let received = unsafe {
            sys::siw_rx_burst(
                self.port_id,
                self.queue,
                room.as_mut_ptr(),
                room.len() as u16,
            )
        };
        // SAFETY: the driver filled the first `received` entries.
        unsafe { batch.mark_filled(usize::from(received)) };
        usize::from(received)
    }

    /// The descriptor to wait on; it becomes readable when a packet arrives after
    /// [`Self::arm_interrupt`]. `None` if the port has no interrupts, or a virtual link has no peer
    /// yet; it may change when a peer connects.
    pub fn interrupt_fd(&self) -> Option<RawFd> {
        // SAFETY: the queue exists.
        let fd = unsafe { sys::rte_eth_dev_rx_intr_ctl_q_get_fd(self.port_id, self.queue) };
        (fd >= 0).then_some(fd)
    }

    /// [`Self::interrupt_fd`] for use with poll(2); it stays open while the port is open.
    pub fn interrupt_source(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the descriptor belongs to the port's driver, which this queue keeps alive; if it
        // changes meanwhile, poll(2) merely looks at another file.
        self.interrupt_fd()
            .map(|fd| unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Requests an interrupt for the next packet. Poll once more afterwards, then sleep: a packet
    /// may have arrived in between.
    ///
    /// # Errors
    /// The queue has no interrupt, as with uio_pci_generic, or the driver refuses.
    pub fn arm_interrupt(&mut self) -> Result<()> {
        // vmxnet3's driver uses the vector's number without checking that there is one.
        if self.interrupt_fd().is_none() {
            return self.check_call("arming the receive interrupt", -libc::ENOTSUP);
        }
        // SAFETY: the queue exists and is ours.
        let rc = unsafe { sys::rte_eth_dev_rx_intr_enable(self.port_id, self.queue) };
        self.check_call("arming the receive interrupt", rc)
    }

    /// Disarms the interrupt, and drains the descriptor if it is an eventfd.
    pub fn disarm_interrupt(&mut self) -> Result<()> {
        if self.interrupt_fd().is_none() {
            return Ok(());
        }
        // SAFETY: the queue exists and is ours.
        let rc = unsafe { sys::rte_eth_dev_rx_intr_disable(self.port_id, self.queue) };
        if let Some(fd) = self.interrupt_fd() {
            if self.known_fd.0 != fd {
                self.known_fd = (fd, is_eventfd(fd));
            }
            if self.known_fd.1 {
                drain_eventfd(fd);
            }
        }
        self.check_call("disarming the receive interrupt", rc)
    }

    fn check_call(&self, what: &'static str, rc: i32) -> Result<()> {
        // A driver without the function always signals, if it has a descriptor.
        if rc == 0 || (error::errno_of(rc) == libc::ENOTSUP && self.interrupt_fd().is_some()) {
            return Ok(());
        }
        Err(Error::Port {
            port: self.port_id.to_string(),
            what,
            errno: error::errno_of(rc),
            reason: error::failure_reason(rc),
            log: String::new(),
        })
    }
}

impl TxQueue {
    pub(crate) fn new(port: &Arc<PortInner>, queue: u16, prepare: bool) -> Self {
        port.queue_taken();
        Self {
            port_id: port.id,
            queue,
            prepare,
            refused: 0,
            port: port.clone(),
            _not_sync: PhantomData,
        }
    }

    /// DPDK's number of the port.
    pub fn port_id(&self) -> u16 {
        self.port_id
    }

    /// Index of the queue among the port's queues of its direction.
    pub fn queue_index(&self) -> u16 {
        self.queue
    }

    /// Dropped packets that the driver can never send or that its interface refused.
    pub fn refused_packets(&self) -> u64 {
        self.refused
    }

    /// Sends from the front of `batch`; returns the number of packets that the port took. The rest
    /// stays in order, except that a packet that the driver can never send or that its interface
    /// refuses is dropped when it reaches the front, like a packet lost in the network.
    #[inline]
    pub fn tx_burst(&mut self, batch: &mut TxBatch) -> usize {
        let pending = batch.pending_packets();
        if pending.is_empty() {
            return 0;
        }
        let mut len = pending.len() as u16;
        if self.prepare {
            // SAFETY: as below; the headers are in writable segments.
            len =
                unsafe { sys::siw_tx_prepare(self.port_id, self.queue, pending.as_mut_ptr(), len) };
            if len == 0 {
                self.refuse_packets(batch, 1);
                return 0;
            }
        }
        // SAFETY: the port is started while a queue of it lives, this is the only handle of the
        // queue, and `pending` holds owned packets.
        let sent =
            unsafe { sys::siw_tx_burst(self.port_id, self.queue, pending.as_mut_ptr(), len) };
        // SAFETY: the driver owns the first `sent` now.
        unsafe { batch.mark_sent(usize::from(sent)) };
        usize::from(sent)
    }

    /// Drops the first `count` packets of `batch`, like packets that the driver can never send.
    #[cold]
    pub fn refuse_packets(&mut self, batch: &mut TxBatch, count: usize) {
        let dropped = (0..count).map_while(|_| batch.pop()).count() as u64;
        self.refused += dropped;
        self.port.count_refused(dropped);
    }

    /// Asks the driver to free up to `limit` transmitted packets (0: all it can); for use only when
    /// a work request waits for its buffers. Returns the number freed; 0 also for drivers without
    /// this function, which free packets when they send.
    pub fn done_cleanup(&mut self, limit: u32) -> usize {
        // SAFETY: the queue exists and is ours.
        let freed = unsafe { sys::rte_eth_tx_done_cleanup(self.port_id, self.queue, limit) };
        usize::try_from(freed).unwrap_or(0)
    }
}

/// Used before draining: a tap's descriptor must not be read, since that would take a packet.
fn is_eventfd(fd: RawFd) -> bool {
    std::fs::read_link(format!("/proc/self/fd/{fd}"))
        .is_ok_and(|target| target.to_string_lossy().contains("[eventfd]"))
}

/// Reads an eventfd empty: while readable, it would wake the sleeper at once.
fn drain_eventfd(fd: RawFd) {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    let mut count = 0u64;
    // SAFETY: poll and read write within the given variables; poll tells whether a read would
    // block.
    unsafe {
        if libc::poll(&mut poll, 1, 0) == 1 && poll.revents & libc::POLLIN != 0 {
            libc::read(fd, (&raw mut count).cast(), size_of::<u64>());
        }
    }
}

impl Drop for RxQueue {
    fn drop(&mut self) {
        self.port.queue_returned();
    }
}

impl Drop for TxQueue {
    fn drop(&mut self) {
        self.port.queue_returned();
    }
}
