//! One queue of an AF_XDP port (`xdp_port.rs`): moves packet buffers to and from the sockets'
//! rings.
//!
//! A chunk of a socket's memory is the room of a packet buffer ([`PoolMemory`]).

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use dpdk::{BufferPlace, Mbuf, PoolMemory, RxBatch, TxBatch};
use siw_xdp::{Frame, NeighbourCopies, Receiver, Sender};

use crate::queue::{ReceiveQueue, TransmitQueue};
use crate::{Error, Result};

/// Buffers moved to the kernel at once.
const REFILL: usize = 64;

/// The receiving half: one or more sockets.
pub struct XdpReceiver {
    sockets: Vec<FilledSocket>,
    /// The socket that is polled first.
    first: usize,
    /// Readable while a frame waits; used if there are several sockets.
    epoll: Option<OwnedFd>,
    /// Copies of frames that the kernel receives and this port needs too.
    copies: Option<NeighbourCopies>,
    /// Held as long as the port has the queue.
    _port: Arc<AtomicU64>,
    /// Declared after the sockets, since the kernel writes to the pool's buffers.
    buffers: Arc<QueueBuffers>,
}

/// The pool of a queue, and which of its buffers the kernel has. When both halves have closed their sockets,
/// these are freed: a closed socket returns none.
pub(crate) struct QueueBuffers {
    memory: PoolMemory,
    /// To receive into, and to send.
    received: ChunkTable,
    sent: ChunkTable,
    /// The NIC may use its buffers for some time after the close: they are not freed.
    is_zero_copy: bool,
}

impl QueueBuffers {
    pub(crate) fn new(memory: &PoolMemory, is_zero_copy: bool) -> Arc<QueueBuffers> {
        Arc::new(QueueBuffers {
            memory: memory.clone(),
            received: ChunkTable::new(memory.bytes()),
            sent: ChunkTable::new(memory.bytes()),
            is_zero_copy,
        })
    }
}

impl Drop for QueueBuffers {
    fn drop(&mut self) {
        if self.is_zero_copy {
            return;
        }
        for chunk in self.received.chunks() {
            let empty = BufferPlace {
                chunk,
                offset: 0,
                bytes: 0,
            };
            // SAFETY: the buffer was taken from the pool and lent to the kernel, which stopped using it when
            // the last socket was closed.
            drop(unsafe { self.memory.adopt_buffer(empty) });
        }
        for chunk in self.sent.chunks() {
            // SAFETY: a packet that was lent to the kernel, which no longer uses it.
            drop(unsafe { self.memory.reclaim_packet(chunk) });
        }
    }
}

/// A set of chunks: for each stretch of a pool's memory, the place of the chunk that begins there. Only
/// the owner of one half of the queue changes it.
struct ChunkTable(Box<[AtomicU16]>);

/// Chunks are at least this far apart: AF_XDP has none that is shorter.
const CHUNK_SHIFT: u32 = 11;

impl ChunkTable {
    fn new(memory_bytes: usize) -> ChunkTable {
        let stretches = (memory_bytes >> CHUNK_SHIFT) + 1;
        ChunkTable((0..stretches).map(|_| AtomicU16::new(0)).collect())
    }

    #[inline]
    fn insert(&self, chunk: u64) {
        let place = (chunk as u16 & ((1 << CHUNK_SHIFT) - 1)) + 1;
        self.0[(chunk >> CHUNK_SHIFT) as usize].store(place, Ordering::Relaxed);
    }

    #[inline]
    fn remove(&self, chunk: u64) {
        self.0[(chunk >> CHUNK_SHIFT) as usize].store(0, Ordering::Relaxed);
    }

    fn chunks(&self) -> impl Iterator<Item = u64> {
        let places = self.0.iter().enumerate();
        places.filter_map(|(stretch, place)| {
            let place = place.load(Ordering::Relaxed).checked_sub(1)?;
            Some(((stretch as u64) << CHUNK_SHIFT) + u64::from(place))
        })
    }
}

struct FilledSocket {
    receiver: Receiver,
    /// Buffers owned by the kernel at the moment.
    lent: usize,
    /// Number of buffers that the kernel should own.
    target: usize,
}

impl XdpReceiver {
    pub(crate) fn new(
        receivers: Vec<Receiver>,
        copies: Option<NeighbourCopies>,
        buffers: Arc<QueueBuffers>,
        target: usize,
        port: Arc<AtomicU64>,
    ) -> Result<XdpReceiver> {
        let sockets = receivers.iter().map(Receiver::socket_fd);
        let copied = copies.iter().flat_map(NeighbourCopies::descriptors);
        let all: Vec<BorrowedFd<'_>> = sockets.chain(copied).collect();
        let epoll = match all.len() {
            1 => None,
            _ => Some(watch_descriptors(&all)?),
        };
        let mut receiver = XdpReceiver {
            sockets: receivers
                .into_iter()
                .map(|receiver| FilledSocket {
                    receiver,
                    lent: 0,
                    target,
                })
                .collect(),
            first: 0,
            epoll,
            copies,
            _port: port,
            buffers,
        };
        for socket in &mut receiver.sockets {
            socket.lend_buffers(&receiver.buffers);
        }
        Ok(receiver)
    }
}

impl ReceiveQueue for XdpReceiver {
    #[inline]
    fn rx_burst(&mut self, batch: &mut RxBatch) -> usize {
        let mut count = 0;
        let QueueBuffers {
            memory, received, ..
        } = &*self.buffers;
        let sockets = self.sockets.len();
        for turn in 0..sockets {
            let index = (self.first + turn) % sockets;
            let socket = &mut self.sockets[index];
            let before = count;
            while !batch.is_full()
                && let Some(frame) = socket.receiver.next_frame()
            {
                received.remove(frame.chunk);
                let place = BufferPlace {
                    chunk: frame.chunk,
                    offset: frame.offset,
                    bytes: frame.bytes,
                };
                // SAFETY: the buffer was taken from the pool and lent to the kernel, which returned it. The
                // kernel keeps offset and length within the chunk, which is no longer than the room.
                let packet = unsafe { memory.adopt_buffer(place) };
                // There is room.
                let _ = batch.push(packet);
                count += 1;
            }
            if count > before {
                socket.receiver.release_frames();
                socket.lent -= count - before;
            } else {
                socket.receiver.wake_if_asked();
            }
            if socket.target - socket.lent >= REFILL {
                socket.lend_buffers(&self.buffers);
            }
        }
        if let Some(copies) = &mut self.copies
            && copies.has_frame()
        {
            count += take_copies(copies, memory, batch);
        }
        if sockets > 1 {
            self.first = (self.first + 1) % sockets;
        }
        count
    }

    /// Returns true if the kernel has no buffer of one of the sockets.
    fn is_out_of_buffers(&self) -> bool {
        self.sockets.iter().any(|socket| socket.lent == 0)
    }

    /// Readable while a frame waits.
    fn interrupt_source(&self) -> Option<BorrowedFd<'_>> {
        use std::os::fd::AsFd;
        match &self.epoll {
            Some(epoll) => Some(epoll.as_fd()),
            None => Some(self.sockets.first()?.receiver.socket_fd()),
        }
    }

    fn arm_interrupt(&mut self) -> Result<()> {
        Ok(())
    }

    fn disarm_interrupt(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Copies frames into buffers of the pool, as long as it has any; returns the number of frames.
#[cold]
fn take_copies(copies: &mut NeighbourCopies, memory: &PoolMemory, batch: &mut RxBatch) -> usize {
    let mut count = 0;
    while !batch.is_full() && copies.has_frame() {
        let Some(mut packet) = Mbuf::alloc(memory.pool()) else {
            break;
        };
        copies.take_frame(|frame| {
            packet.append_slice(frame);
        });
        // There is room.
        let _ = batch.push(packet);
        count += 1;
    }
    count
}

impl FilledSocket {
    /// Lends buffers to the kernel up to its share; if the pool is exhausted, the rest follows with
    /// the next burst.
    fn lend_buffers(&mut self, of_queue: &QueueBuffers) {
        let mut chunks = [0; REFILL];
        while self.lent < self.target {
            let want = (self.target - self.lent).min(REFILL);
            let chunks = &mut chunks[..want];
            if !of_queue.memory.take_buffers(chunks) {
                break;
            }
            for chunk in chunks {
                of_queue.received.insert(*chunk);
                // The ring has room for the whole share.
                self.receiver.push_chunk(*chunk);
            }
            self.lent += want;
        }
        self.receiver.publish_chunks();
    }
}

/// The sending half: the first socket of the queue.
pub struct XdpSender {
    sender: Sender,
    /// Packets of this queue that the interface refused.
    refused: u64,
    /// Those of all queues of the port.
    refused_of_port: Arc<AtomicU64>,
    /// Declared after the socket, which the kernel sends from.
    buffers: Arc<QueueBuffers>,
}

impl XdpSender {
    pub(crate) fn new(
        sender: Sender,
        buffers: Arc<QueueBuffers>,
        refused_of_port: Arc<AtomicU64>,
    ) -> XdpSender {
        XdpSender {
            sender,
            refused: 0,
            refused_of_port,
            buffers,
        }
    }

    #[cold]
    fn note_refused(&mut self, count: u64) {
        self.refused += count;
        self.refused_of_port.fetch_add(count, Ordering::Relaxed);
    }
}

impl TransmitQueue for XdpSender {
    #[inline]
    fn tx_burst(&mut self, batch: &mut TxBatch) -> usize {
        if batch.is_empty() {
            return 0;
        }
        self.done_cleanup();
        let memory = &self.buffers.memory;
        let mut taken = 0;
        while let Some(packet) = batch.packets_mut().first_mut() {
            let Some(place) = memory
                .place_of(packet)
                .or_else(|| copy_into_pool(memory, packet))
            else {
                break;
            };
            let frame = Frame {
                chunk: place.chunk,
                offset: place.offset,
                bytes: place.bytes,
            };
            if !self.sender.push_frame(frame) {
                break;
            }
            self.buffers.sent.insert(place.chunk);
            // The kernel has it until the transmission is completed.
            std::mem::forget(batch.pop());
            taken += 1;
        }
        if taken > 0 || self.sender.has_backlog() {
            self.sender.transmit_queued();
        }
        let refused = self.sender.take_refused();
        if refused > 0 {
            self.note_refused(refused);
        }
        taken
    }

    fn refuse_packets(&mut self, batch: &mut TxBatch, count: usize) {
        let dropped = (0..count).map_while(|_| batch.pop()).count();
        self.note_refused(dropped as u64);
    }

    fn refused_packets(&self) -> u64 {
        self.refused
    }

    #[inline]
    fn has_backlog(&self) -> bool {
        self.sender.has_backlog()
    }

    #[inline]
    fn retry_backlog(&mut self) {
        if self.sender.has_backlog() {
            self.done_cleanup();
            self.sender.transmit_queued();
        }
    }

    /// Frees the buffers of transmitted frames.
    #[inline]
    fn done_cleanup(&mut self) -> usize {
        let mut count = 0;
        while let Some(chunk) = self.sender.next_completed() {
            self.buffers.sent.remove(chunk);
            // SAFETY: a packet that was lent to the kernel, which has sent it and no longer uses it.
            drop(unsafe { self.buffers.memory.reclaim_packet(chunk) });
            count += 1;
        }
        if count > 0 {
            self.sender.release_completed();
        }
        count
    }
}

/// Replaces a packet that is not a single buffer of the pool by a copy, and returns its place. `None` if
/// no buffer is free.
#[cold]
fn copy_into_pool(memory: &PoolMemory, packet: &mut Mbuf) -> Option<BufferPlace> {
    *packet = packet.copy_into(memory.pool())?;
    memory.place_of(packet)
}

/// Creates a descriptor that is readable while any of the given ones is.
fn watch_descriptors(all: &[BorrowedFd<'_>]) -> Result<OwnedFd> {
    let fail = |what: &str| {
        Error::Kernel(siw_xdp::Error::Call {
            what: what.into(),
            source: std::io::Error::last_os_error(),
        })
    };
    // SAFETY: takes no address; the result is checked.
    let descriptor = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    if descriptor < 0 {
        return Err(fail("an epoll descriptor"));
    }
    // SAFETY: just opened, and without another owner.
    let epoll = unsafe { OwnedFd::from_raw_fd(descriptor) };
    for descriptor in all {
        let mut event = libc::epoll_event {
            events: libc::EPOLLIN as u32,
            u64: 0,
        };
        let socket = descriptor.as_raw_fd();
        // SAFETY: the event is read within the call.
        let result =
            unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, socket, &mut event) };
        if result < 0 {
            return Err(fail("watching an AF_XDP socket"));
        }
    }
    Ok(epoll)
}
