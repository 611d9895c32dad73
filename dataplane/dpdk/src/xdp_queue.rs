//! One queue of an AF_XDP port (`xdp_port.rs`): moves packet buffers to and from the sockets'
//! rings.
//!
//! A chunk of a socket's memory is the room of a packet buffer, identified by its offset from the
//! base of the pool's memory. The mbuf lies at a fixed distance before it, so neither direction
//! needs a lookup table.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use dpdk_sys as sys;
use siw_xdp::{Frame, NeighbourCopies, Receiver, Sender};

use crate::mbuf::init_raw;
use crate::{Error, Mbuf, Mempool, Result};

/// Buffers moved to the kernel at once.
const REFILL: usize = 64;

/// The receiving half: one or more sockets.
pub(crate) struct XdpReceiver {
    sockets: Vec<FilledSocket>,
    /// The socket that is polled first.
    first: usize,
    /// Readable while a frame waits; used if there are several sockets.
    epoll: Option<OwnedFd>,
    /// Copies of frames that the kernel receives and this port needs too.
    copies: Option<NeighbourCopies>,
    /// Declared after the sockets, since the kernel writes to the pool's buffers.
    buffers: Arc<QueueBuffers>,
}

/// The pool of a queue, and which of its buffers the kernel has. When both halves have closed their sockets,
/// these are freed: a closed socket returns none.
pub(crate) struct QueueBuffers {
    memory: PoolMemory,
    pool: Mempool,
    /// To receive into, and to send.
    received: ChunkTable,
    sent: ChunkTable,
    /// The NIC may use its buffers for some time after the close: they are not freed.
    is_zero_copy: bool,
}

impl QueueBuffers {
    pub(crate) fn new(memory: PoolMemory, pool: &Mempool, is_zero_copy: bool) -> Arc<QueueBuffers> {
        Arc::new(QueueBuffers {
            memory,
            pool: pool.clone(),
            received: ChunkTable::new(memory.bytes),
            sent: ChunkTable::new(memory.bytes),
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
            let mbuf = self.memory.mbuf_at(chunk);
            // SAFETY: the buffer was taken from the pool and lent to the kernel, which stopped using it when
            // the last socket was closed.
            unsafe {
                init_raw(mbuf, self.pool.buf_len());
                sys::siw_pktmbuf_free_seg(mbuf);
            }
        }
        for chunk in self.sent.chunks() {
            // SAFETY: a single-segment packet that was passed to the kernel, which no longer uses it.
            unsafe { sys::siw_pktmbuf_free_seg(self.memory.mbuf_at(chunk)) };
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
            buffers,
        };
        for socket in &mut receiver.sockets {
            socket.lend_buffers(&receiver.buffers);
        }
        Ok(receiver)
    }

    /// Fills `room` with received packets; returns their number.
    #[inline]
    pub(crate) fn rx_burst(&mut self, room: &mut [*mut sys::rte_mbuf]) -> usize {
        let mut count = 0;
        let QueueBuffers {
            memory,
            pool,
            received,
            ..
        } = &*self.buffers;
        let sockets = self.sockets.len();
        for turn in 0..sockets {
            let index = (self.first + turn) % sockets;
            let socket = &mut self.sockets[index];
            let before = count;
            while let Some(slot) = room.get_mut(count)
                && let Some(frame) = socket.receiver.next_frame()
            {
                received.remove(frame.chunk);
                *slot = memory.adopt_frame(frame, pool.buf_len());
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
            count += take_copies(copies, pool, &mut room[count..]);
        }
        if sockets > 1 {
            self.first = (self.first + 1) % sockets;
        }
        count
    }

    /// Returns true if the kernel has no buffer of one of the sockets.
    pub(crate) fn is_out_of_buffers(&self) -> bool {
        self.sockets.iter().any(|socket| socket.lent == 0)
    }

    /// Readable while a frame waits.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        use std::os::fd::AsFd;
        match &self.epoll {
            Some(epoll) => Some(epoll.as_fd()),
            None => Some(self.sockets.first()?.receiver.socket_fd()),
        }
    }
}

/// Copies frames into buffers of the pool, as long as it has any; returns the number of frames.
#[cold]
fn take_copies(
    copies: &mut NeighbourCopies,
    pool: &Mempool,
    room: &mut [*mut sys::rte_mbuf],
) -> usize {
    let mut count = 0;
    for slot in room {
        if !copies.has_frame() {
            break;
        }
        let Some(mut packet) = Mbuf::alloc(pool) else {
            break;
        };
        copies.take_frame(|frame| {
            packet.append_slice(frame);
        });
        *slot = packet.into_raw().as_ptr();
        count += 1;
    }
    count
}

impl FilledSocket {
    /// Lends buffers to the kernel up to its share; if the pool is exhausted, the rest follows with
    /// the next burst.
    fn lend_buffers(&mut self, of_queue: &QueueBuffers) {
        let mut buffers = [std::ptr::null_mut(); REFILL];
        while self.lent < self.target {
            let want = (self.target - self.lent).min(REFILL);
            // SAFETY: the pool is alive, and the array has room for `want` pointers.
            let result = unsafe {
                let pool = of_queue.pool.as_ptr();
                sys::siw_mempool_get_bulk(pool, buffers.as_mut_ptr(), want as u32)
            };
            if result != 0 {
                break;
            }
            for buffer in &buffers[..want] {
                let chunk = of_queue.memory.chunk_of(*buffer);
                of_queue.received.insert(chunk);
                // The ring has room for the whole share.
                self.receiver.push_chunk(chunk);
            }
            self.lent += want;
        }
        self.receiver.publish_chunks();
    }
}

/// Address range of a pool's buffers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PoolMemory {
    pub base: NonNull<u8>,
    pub bytes: usize,
    /// Distance from the start of a buffer back to its mbuf.
    pub mbuf_distance: usize,
}

// SAFETY: an address and lengths.
unsafe impl Send for PoolMemory {}
// SAFETY: as above.
unsafe impl Sync for PoolMemory {}

/// Size of the pages that the kernel pins.
const PAGE_BYTES: usize = 4096;

impl PoolMemory {
    /// Finds the memory of a pool.
    pub(crate) fn of_pool(pool: &Mempool) -> Result<PoolMemory> {
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
            base: NonNull::new(base).ok_or_else(|| unusable("it has none".into()))?,
            bytes: bytes + before,
            mbuf_distance: size_of::<sys::rte_mbuf>() + usize::from(private),
        })
    }

    /// The chunk of a pool buffer.
    #[inline]
    fn chunk_of(&self, mbuf: *mut sys::rte_mbuf) -> u64 {
        mbuf as u64 + self.mbuf_distance as u64 - self.base.as_ptr() as u64
    }

    #[inline]
    fn mbuf_at(&self, chunk: u64) -> *mut sys::rte_mbuf {
        // SAFETY: the kernel returns a chunk that it was given; it lies in the pool's memory, and
        // an mbuf precedes it at this distance.
        unsafe {
            let room = self.base.as_ptr().add(chunk as usize);
            room.sub(self.mbuf_distance).cast()
        }
    }

    /// Turns a frame that the kernel wrote into an owned packet.
    #[inline]
    fn adopt_frame(&self, frame: Frame, buf_len: u16) -> *mut sys::rte_mbuf {
        let mbuf = self.mbuf_at(frame.chunk);
        // SAFETY: the buffer was taken from the pool and lent to the kernel, which returned it. The
        // kernel keeps offset and length within the chunk, which is no longer than the room.
        unsafe {
            init_raw(mbuf, buf_len);
            let mbuf = &mut *mbuf;
            mbuf.data_off = frame.offset;
            mbuf.data_len = frame.bytes as u16;
            mbuf.pkt_len = frame.bytes;
        }
        mbuf
    }
}

/// The sending half: the first socket of the queue.
pub(crate) struct XdpSender {
    sender: Sender,
    /// Declared after the socket, which the kernel sends from.
    buffers: Arc<QueueBuffers>,
}

impl XdpSender {
    pub(crate) fn new(sender: Sender, buffers: Arc<QueueBuffers>) -> XdpSender {
        XdpSender { sender, buffers }
    }

    /// Sends from the front of `pending`; returns the number of packets taken.
    #[inline]
    pub(crate) fn tx_burst(&mut self, pending: &mut [*mut sys::rte_mbuf]) -> usize {
        self.free_completed();
        let mut taken = 0;
        for slot in pending.iter_mut() {
            // SAFETY: a packet that the batch owns.
            let is_plain = unsafe { is_plain_buffer(*slot, self.buffers.pool.as_ptr()) };
            if !is_plain && !self.copy_into_pool(slot) {
                break;
            }
            // SAFETY: as above.
            let mbuf = unsafe { &**slot };
            let frame = Frame {
                chunk: self.buffers.memory.chunk_of(*slot),
                offset: mbuf.data_off,
                bytes: mbuf.pkt_len,
            };
            let chunk = frame.chunk;
            if !self.sender.push_frame(frame) {
                break;
            }
            self.buffers.sent.insert(chunk);
            taken += 1;
        }
        if taken > 0 || self.sender.has_backlog() {
            self.sender.transmit_queued();
        }
        taken
    }

    /// Offers the kernel the frames that it has not taken yet; frees transmitted ones.
    #[cold]
    pub(crate) fn retry_backlog(&mut self) {
        self.free_completed();
        self.sender.transmit_queued();
    }

    /// Takes the number of frames that the interface dropped since the last call.
    #[inline]
    pub(crate) fn take_refused(&mut self) -> u64 {
        self.sender.take_refused()
    }

    /// Returns true if the kernel has not taken all frames.
    #[inline]
    pub(crate) fn has_backlog(&self) -> bool {
        self.sender.has_backlog()
    }

    /// Frees the buffers of transmitted frames; returns their number.
    #[inline]
    pub(crate) fn free_completed(&mut self) -> usize {
        let mut count = 0;
        while let Some(chunk) = self.sender.next_completed() {
            self.buffers.sent.remove(chunk);
            // SAFETY: a single-segment packet that was passed to the kernel, which no longer uses
            // it.
            unsafe { sys::siw_pktmbuf_free_seg(self.buffers.memory.mbuf_at(chunk)) };
            count += 1;
        }
        if count > 0 {
            self.sender.release_completed();
        }
        count
    }

    /// Replaces a packet that is not a single buffer of the pool by a copy. False if no buffer is
    /// free.
    #[cold]
    fn copy_into_pool(&self, slot: &mut *mut sys::rte_mbuf) -> bool {
        // SAFETY: the caller owns the packet, which is freed and replaced by the copy.
        unsafe {
            let copy = sys::siw_pktmbuf_copy(*slot, self.buffers.pool.as_ptr());
            if copy.is_null() {
                return false;
            }
            sys::siw_pktmbuf_free(*slot);
            *slot = copy;
        }
        true
    }
}

/// # Safety
/// `mbuf` is a valid packet.
#[inline]
unsafe fn is_plain_buffer(mbuf: *const sys::rte_mbuf, pool: *mut sys::rte_mempool) -> bool {
    const NOT_OWN: u64 = sys::RTE_MBUF_F_EXTERNAL | sys::RTE_MBUF_F_INDIRECT;
    // SAFETY: the caller's promise.
    let mbuf = unsafe { &*mbuf };
    mbuf.nb_segs == 1 && mbuf.ol_flags & NOT_OWN == 0 && mbuf.pool == pool
}

/// Creates a descriptor that is readable while any of the given ones is.
fn watch_descriptors(all: &[BorrowedFd<'_>]) -> Result<OwnedFd> {
    let fail = |what: &str| {
        Error::Xdp(siw_xdp::Error::Call {
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
