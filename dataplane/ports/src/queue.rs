//! Queues of a started port. Each belongs to one worker, whose loop uses nothing of a port but these.

use std::os::fd::BorrowedFd;

use dpdk::{RxBatch, TxBatch};

use crate::packet_port::PacketSender;
use crate::xdp_queue::{XdpReceiver, XdpSender};
use crate::{Error, Result};

/// The receiving half of a worker's share of a port.
pub trait ReceiveQueue {
    /// Receives packets and appends them to `batch`, up to its free slots; returns the number
    /// received.
    fn rx_burst(&mut self, batch: &mut RxBatch) -> usize;

    /// Returns true if the queue has no buffer to receive into; the next burst gets some from the
    /// pool. DPDK's drivers do not tell.
    #[inline]
    fn is_out_of_buffers(&self) -> bool {
        false
    }

    /// The descriptor to wait on with poll(2); it becomes readable when a packet arrives after
    /// [`Self::arm_interrupt`]. `None` if the port has no interrupts, or a virtual link has no peer
    /// yet; it may change when a peer connects.
    fn interrupt_source(&self) -> Option<BorrowedFd<'_>>;

    /// Requests an interrupt for the next packet. Poll once more afterwards, then sleep: a packet
    /// may have arrived in between.
    ///
    /// # Errors
    /// The queue has no interrupt, as with uio_pci_generic, or the driver refuses.
    fn arm_interrupt(&mut self) -> Result<()>;

    /// Disarms the interrupt.
    ///
    /// # Errors
    /// The driver refuses.
    fn disarm_interrupt(&mut self) -> Result<()>;
}

/// The sending half of a worker's share of a port.
pub trait TransmitQueue {
    /// Sends from the front of `batch`; returns the number of packets that the port took. The rest
    /// stays in order, except that a packet that the port can never send or that its interface
    /// refuses is dropped when it reaches the front, like a packet lost in the network.
    fn tx_burst(&mut self, batch: &mut TxBatch) -> usize;

    /// Drops the first `count` packets of `batch`, like packets that the port can never send.
    fn refuse_packets(&mut self, batch: &mut TxBatch, count: usize);

    /// Dropped packets that the port can never send or that its interface refused.
    fn refused_packets(&self) -> u64;

    /// Returns true if the kernel has not yet taken all frames of earlier bursts.
    #[inline]
    fn has_backlog(&self) -> bool {
        false
    }

    /// Offers the kernel the frames of earlier bursts that it has not taken yet; called in each
    /// loop turn that sends no burst.
    #[inline]
    fn retry_backlog(&mut self) {}

    /// Has the port free all transmitted packets that it can; for use only when a work request waits
    /// for its buffers. Returns the number freed; 0 also for ports without this function, which free
    /// packets when they send.
    fn done_cleanup(&mut self) -> usize;
}

/// A receive queue of any port: owned, can move to a worker thread, cannot be shared.
pub enum RxQueue {
    /// A queue of DPDK; an AF_PACKET port has one, too.
    Dpdk(dpdk::RxQueue),
    /// Sockets of an AF_XDP port.
    Xdp(Box<XdpReceiver>),
}

/// A transmit queue of any port: owned, can move to a worker thread, cannot be shared.
pub enum TxQueue {
    /// A queue of DPDK.
    Dpdk(dpdk::TxQueue),
    /// The socket of an AF_PACKET port.
    Packet(Box<PacketSender>),
    /// Sockets of an AF_XDP port.
    Xdp(Box<XdpSender>),
}

impl ReceiveQueue for dpdk::RxQueue {
    #[inline]
    fn rx_burst(&mut self, batch: &mut RxBatch) -> usize {
        self.rx_burst(batch)
    }

    fn interrupt_source(&self) -> Option<BorrowedFd<'_>> {
        self.interrupt_source()
    }

    fn arm_interrupt(&mut self) -> Result<()> {
        self.arm_interrupt().map_err(Error::from)
    }

    fn disarm_interrupt(&mut self) -> Result<()> {
        self.disarm_interrupt().map_err(Error::from)
    }
}

impl TransmitQueue for dpdk::TxQueue {
    #[inline]
    fn tx_burst(&mut self, batch: &mut TxBatch) -> usize {
        self.tx_burst(batch)
    }

    fn refuse_packets(&mut self, batch: &mut TxBatch, count: usize) {
        self.refuse_packets(batch, count);
    }

    fn refused_packets(&self) -> u64 {
        self.refused_packets()
    }

    fn done_cleanup(&mut self) -> usize {
        self.done_cleanup(0)
    }
}

impl ReceiveQueue for RxQueue {
    #[inline]
    fn rx_burst(&mut self, batch: &mut RxBatch) -> usize {
        match self {
            RxQueue::Dpdk(queue) => queue.rx_burst(batch),
            RxQueue::Xdp(queue) => queue.rx_burst(batch),
        }
    }

    #[inline]
    fn is_out_of_buffers(&self) -> bool {
        match self {
            RxQueue::Dpdk(queue) => queue.is_out_of_buffers(),
            RxQueue::Xdp(queue) => queue.is_out_of_buffers(),
        }
    }

    fn interrupt_source(&self) -> Option<BorrowedFd<'_>> {
        match self {
            RxQueue::Dpdk(queue) => queue.interrupt_source(),
            RxQueue::Xdp(queue) => queue.interrupt_source(),
        }
    }

    fn arm_interrupt(&mut self) -> Result<()> {
        match self {
            RxQueue::Dpdk(queue) => ReceiveQueue::arm_interrupt(queue),
            RxQueue::Xdp(queue) => queue.arm_interrupt(),
        }
    }

    fn disarm_interrupt(&mut self) -> Result<()> {
        match self {
            RxQueue::Dpdk(queue) => ReceiveQueue::disarm_interrupt(queue),
            RxQueue::Xdp(queue) => queue.disarm_interrupt(),
        }
    }
}

impl TransmitQueue for TxQueue {
    #[inline]
    fn tx_burst(&mut self, batch: &mut TxBatch) -> usize {
        match self {
            TxQueue::Dpdk(queue) => queue.tx_burst(batch),
            TxQueue::Packet(queue) => queue.tx_burst(batch),
            TxQueue::Xdp(queue) => queue.tx_burst(batch),
        }
    }

    #[cold]
    fn refuse_packets(&mut self, batch: &mut TxBatch, count: usize) {
        match self {
            TxQueue::Dpdk(queue) => queue.refuse_packets(batch, count),
            TxQueue::Packet(queue) => queue.refuse_packets(batch, count),
            TxQueue::Xdp(queue) => queue.refuse_packets(batch, count),
        }
    }

    fn refused_packets(&self) -> u64 {
        match self {
            TxQueue::Dpdk(queue) => queue.refused_packets(),
            TxQueue::Packet(queue) => queue.refused_packets(),
            TxQueue::Xdp(queue) => queue.refused_packets(),
        }
    }

    #[inline]
    fn has_backlog(&self) -> bool {
        match self {
            TxQueue::Dpdk(queue) => queue.has_backlog(),
            TxQueue::Packet(queue) => queue.has_backlog(),
            TxQueue::Xdp(queue) => queue.has_backlog(),
        }
    }

    #[inline]
    fn retry_backlog(&mut self) {
        match self {
            TxQueue::Dpdk(queue) => queue.retry_backlog(),
            TxQueue::Packet(queue) => queue.retry_backlog(),
            TxQueue::Xdp(queue) => queue.retry_backlog(),
        }
    }

    fn done_cleanup(&mut self) -> usize {
        match self {
            TxQueue::Dpdk(queue) => TransmitQueue::done_cleanup(queue),
            TxQueue::Packet(queue) => queue.done_cleanup(),
            TxQueue::Xdp(queue) => queue.done_cleanup(),
        }
    }
}
