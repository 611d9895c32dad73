//! An AF_XDP socket on one receive queue of an interface: frames are received and sent through rings
//! of descriptors, in memory that this process provides.
//!
//! In copy mode, which every driver has, the kernel copies each frame between that memory and its
//! own; in zero-copy mode the NIC reads and writes it. Either way the memory is in chunks at any
//! address (`XDP_UMEM_UNALIGNED_CHUNK_FLAG`), since packet buffers have headers between them.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::ring::{ConsumerRing, ProducerRing, RingKind};
use crate::{Error, Result, XdpInterface};

/// Time in which the kernel frees the queue of a closed socket. It does so after close(2) has returned, in a
/// work queue of its own, which other work may hold up.
const QUEUE_FREED_WITHIN: Duration = Duration::from_secs(2);
/// Time between two attempts to bind a socket to a queue that another one has.
const BIND_PAUSE: Duration = Duration::from_millis(2);

/// How frames get into the memory of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyMode {
    /// Zero-copy if the driver supports it.
    Auto,
    /// The kernel copies.
    Copy,
    /// The NIC reads and writes the memory; an error if it cannot.
    ZeroCopy,
}

/// Parameters of a socket.
#[derive(Debug, Clone, Copy)]
pub struct SocketConfig {
    /// Entries of the fill and the RX ring: a power of two.
    pub rx_entries: u32,
    /// Entries of the TX and the completion ring: a power of two.
    pub tx_entries: u32,
    /// Copies by the kernel, or zero-copy.
    pub copy_mode: CopyMode,
}

/// Memory for frames: `bytes` bytes at `base`, given to the kernel in chunks of `chunk_bytes`.
#[derive(Debug, Clone, Copy)]
pub struct Umem {
    base: NonNull<u8>,
    bytes: usize,
    chunk_bytes: u32,
}

// SAFETY: an address and lengths; the contract of `Umem::new` covers accesses to the memory.
unsafe impl Send for Umem {}
// SAFETY: as above.
unsafe impl Sync for Umem {}

impl Umem {
    /// `base` is on a page boundary; `chunk_bytes` is at most a page.
    ///
    /// # Safety
    /// The memory stays mapped and is not used for anything else while a socket of it exists; a chunk
    /// given to the kernel is not accessed until the kernel gives it back.
    pub unsafe fn new(base: NonNull<u8>, bytes: usize, chunk_bytes: u32) -> Umem {
        Umem {
            base,
            bytes,
            chunk_bytes,
        }
    }
}

/// Bytes that the kernel keeps free before a received frame (`XDP_PACKET_HEADROOM`).
pub const PACKET_HEADROOM: u16 = 256;
/// Shift of the upper bits of an address, which are an offset to be added to the lower bits
/// (`XSK_UNALIGNED_BUF_OFFSET_SHIFT`).
const OFFSET_SHIFT: u32 = 48;
const BASE_MASK: u64 = (1 << OFFSET_SHIFT) - 1;

/// Frames that the kernel sends per call, in copy mode (`TX_BATCH_SIZE`).
const FRAMES_A_KICK: u32 = 32;
/// Maximum calls to send one burst, if the kernel asks for more.
const MAX_KICKS: u32 = 8;
/// Limit on the bytes of frames that the kernel holds for a sending socket. The default allows 90
/// frames, at which the second of two successive bursts would stop.
const SEND_BUFFER_BYTES: libc::c_int = 4 << 20;

/// `struct xdp_desc`
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Descriptor {
    address: u64,
    bytes: u32,
    options: u32,
}

/// A frame in the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame {
    /// The chunk as it was given to the kernel, in bytes from the memory's base.
    pub chunk: u64,
    /// Offset of the frame in the chunk.
    pub offset: u16,
    /// Bytes of the frame.
    pub bytes: u32,
}

/// Counters of the kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SocketCounters {
    /// Frames dropped for other reasons than a full ring, for example too long ones.
    pub rx_dropped: u64,
    /// Frames dropped because the RX ring was full.
    pub rx_ring_full: u64,
    /// Frames dropped because the kernel had no chunk to write to.
    pub fill_ring_empty: u64,
    /// Descriptors to send that the kernel refused.
    pub tx_invalid: u64,
}

/// A bound socket. [`Self::split`] makes the two halves that a worker uses.
pub struct XdpSocket {
    descriptor: Arc<OwnedFd>,
    receiver: Receiver,
    sender: Sender,
    is_zero_copy: bool,
}

/// The receiving half.
pub struct Receiver {
    descriptor: Arc<OwnedFd>,
    fill: ProducerRing<u64>,
    ring: ConsumerRing<Descriptor>,
}

/// The sending half.
pub struct Sender {
    descriptor: Arc<OwnedFd>,
    ring: ProducerRing<Descriptor>,
    completion: ConsumerRing<u64>,
    /// The kernel left frames in the ring at the last call.
    has_backlog: bool,
    /// Frames that the interface dropped, not taken yet.
    refused: u64,
}

impl XdpSocket {
    /// Opens a socket on receive queue `queue` of the interface. All sockets of an interface after the
    /// first share the memory of `first`. Waits up to two seconds for a queue that has a socket.
    ///
    /// # Errors
    /// A capability is missing, the queue still has a socket, the memory cannot be locked, or the interface
    /// is down.
    pub fn open(
        interface: &XdpInterface,
        queue: u32,
        umem: &Umem,
        config: &SocketConfig,
        first: Option<&XdpSocket>,
    ) -> Result<XdpSocket> {
        let descriptor = open_socket()?;
        set_send_buffer(&descriptor);
        if first.is_none() {
            register_memory(&descriptor, umem)?;
        }
        for (option, entries) in [
            (libc::XDP_UMEM_FILL_RING, config.rx_entries),
            (libc::XDP_UMEM_COMPLETION_RING, config.tx_entries),
            (libc::XDP_RX_RING, config.rx_entries),
            (libc::XDP_TX_RING, config.tx_entries),
        ] {
            set_option(&descriptor, option, &entries)
                .map_err(|source| call_error("creating a ring of an AF_XDP socket", source))?;
        }
        let offsets: libc::xdp_mmap_offsets = read_option(&descriptor, libc::XDP_MMAP_OFFSETS)
            .map_err(|source| call_error("reading the offsets of the rings", source))?;
        let socket = descriptor.as_fd();
        let (rx, tx) = (config.rx_entries, config.tx_entries);
        let fill = ProducerRing::map_ring(socket, RingKind::Fill, rx, &offsets)?;
        let receive = ConsumerRing::map_ring(socket, RingKind::Receive, rx, &offsets)?;
        let transmit = ProducerRing::map_ring(socket, RingKind::Transmit, tx, &offsets)?;
        let completion = ConsumerRing::map_ring(socket, RingKind::Completion, tx, &offsets)?;
        bind_to_freed_queue(&descriptor, interface, queue, config.copy_mode, first)?;
        let options = read_option::<libc::xdp_options>(&descriptor, libc::XDP_OPTIONS)
            .map_or(0, |options| options.flags);
        let descriptor = Arc::new(descriptor);
        Ok(XdpSocket {
            receiver: Receiver {
                descriptor: descriptor.clone(),
                fill,
                ring: receive,
            },
            sender: Sender {
                descriptor: descriptor.clone(),
                ring: transmit,
                completion,
                has_backlog: false,
                refused: 0,
            },
            descriptor,
            is_zero_copy: options & libc::XDP_OPTIONS_ZEROCOPY != 0,
        })
    }

    /// Returns whether the NIC reads and writes the memory itself.
    pub fn is_zero_copy(&self) -> bool {
        self.is_zero_copy
    }

    /// Splits the socket into its two halves, which close it when both are dropped, and a handle for the
    /// counters.
    pub fn split(self) -> (Receiver, Sender, SocketHandle) {
        let handle = SocketHandle(Arc::downgrade(&self.descriptor));
        (self.receiver, self.sender, handle)
    }

    /// Descriptor for the map of sockets.
    pub fn socket_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Handle of an [`XdpSocket`] that was split. It does not keep the socket open: the owner of the halves
/// frees the socket's memory after them.
#[derive(Debug, Clone)]
pub struct SocketHandle(Weak<OwnedFd>);

impl SocketHandle {
    /// Reads the counters of the kernel, which are zero once the socket is closed.
    ///
    /// # Errors
    /// The interface was removed.
    pub fn read_counters(&self) -> Result<SocketCounters> {
        let Some(socket) = self.0.upgrade() else {
            return Ok(SocketCounters::default());
        };
        let counters: libc::xdp_statistics = read_option(&socket, libc::XDP_STATISTICS)
            .map_err(|source| call_error("reading the counters of an AF_XDP socket", source))?;
        Ok(SocketCounters {
            rx_dropped: counters.rx_dropped,
            rx_ring_full: counters.rx_ring_full,
            fill_ring_empty: counters.rx_fill_ring_empty_descs,
            tx_invalid: counters.tx_invalid_descs,
        })
    }
}

impl Receiver {
    /// Returns the next received frame. [`Self::release_frames`] has to follow the last one of a
    /// burst.
    #[inline]
    pub fn next_frame(&mut self) -> Option<Frame> {
        let descriptor = self.ring.pop()?;
        Some(Frame {
            chunk: descriptor.address & BASE_MASK,
            offset: (descriptor.address >> OFFSET_SHIFT) as u16,
            bytes: descriptor.bytes,
        })
    }

    /// Lets the kernel reuse the entries of the RX ring whose frames were read.
    #[inline]
    pub fn release_frames(&mut self) {
        self.ring.release_entries();
    }

    /// Returns whether a frame waits.
    #[inline]
    pub fn has_frame(&mut self) -> bool {
        self.ring.available_entries() != 0
    }

    /// Gives the kernel a chunk, by its offset from the memory's base; returns false if the ring is
    /// full. [`Self::publish_chunks`] has to follow the last one.
    #[inline]
    pub fn push_chunk(&mut self, chunk: u64) -> bool {
        self.fill.push(chunk)
    }

    /// Makes the pushed chunks available to the kernel.
    #[inline]
    pub fn publish_chunks(&mut self) {
        self.fill.publish_entries();
        self.wake_if_asked();
    }

    /// Wakes a zero-copy driver that has run out of chunks and does not look at the ring by itself. It
    /// may ask at any time: call this whenever no frame waits, too.
    #[inline]
    pub fn wake_if_asked(&self) {
        if self.fill.needs_wakeup() {
            self.wake_driver();
        }
    }

    #[cold]
    fn wake_driver(&self) {
        let mut wait = libc::pollfd {
            fd: self.descriptor.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one entry, written within the call, which does not wait.
        unsafe {
            libc::poll(&mut wait, 1, 0);
        }
    }

    /// Descriptor that is readable while a frame waits.
    pub fn socket_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Sender {
    /// Returns a chunk whose frame was sent. [`Self::release_completed`] has to follow the last one.
    #[inline]
    pub fn next_completed(&mut self) -> Option<u64> {
        self.completion.pop().map(|address| address & BASE_MASK)
    }

    /// Lets the kernel reuse the entries of the completion ring that were read.
    #[inline]
    pub fn release_completed(&mut self) {
        self.completion.release_entries();
    }

    /// Queues a frame; returns false if the ring is full. [`Self::transmit_queued`] has to follow the
    /// last one.
    #[inline]
    pub fn push_frame(&mut self, frame: Frame) -> bool {
        self.ring.push(Descriptor {
            address: frame.chunk | u64::from(frame.offset) << OFFSET_SHIFT,
            bytes: frame.bytes,
            options: 0,
        })
    }

    /// True if the kernel left frames in the ring, which [`Self::transmit_queued`] offers again.
    #[inline]
    pub fn has_backlog(&self) -> bool {
        self.has_backlog
    }

    /// Has the kernel send the queued frames. In copy mode, frames are copied and pass the driver in
    /// this call, so that a call per burst is the price of AF_XDP; the kernel takes 32 frames at a
    /// time.
    #[inline]
    pub fn transmit_queued(&mut self) {
        self.ring.publish_entries();
        if self.ring.needs_wakeup() {
            self.kick_kernel();
        }
    }

    /// Takes the number of frames that the interface dropped since the last call.
    #[inline]
    pub fn take_refused(&mut self) -> u64 {
        std::mem::take(&mut self.refused)
    }

    fn kick_kernel(&mut self) {
        let mut left = self.ring.unconsumed_entries();
        for _ in 0..(left / FRAMES_A_KICK + 1).min(MAX_KICKS) {
            if left == 0 {
                break;
            }
            // SAFETY: sends no bytes, so that the address is not read.
            let result = unsafe {
                libc::sendto(
                    self.descriptor.as_raw_fd(),
                    std::ptr::null(),
                    0,
                    libc::MSG_DONTWAIT,
                    std::ptr::null(),
                    0,
                )
            };
            // The interface dropped a frame, as a veth does whose peer has a smaller MTU; the rest of
            // the ring follows.
            if result < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EBUSY) {
                self.refused += 1;
            }
            let before = left;
            left = self.ring.unconsumed_entries();
            // EAGAIN: the kernel has sent its share and requests another call, or its buffers are
            // full.
            if result < 0 && left == before {
                break;
            }
        }
        self.has_backlog = left != 0;
    }
}

fn call_error(what: &'static str, source: io::Error) -> Error {
    match source.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => Error::Permission { what },
        _ => Error::Call {
            what: what.to_owned(),
            source,
        },
    }
}

fn open_socket() -> Result<OwnedFd> {
    // SAFETY: takes no address; the result is checked.
    let descriptor = unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    if descriptor < 0 {
        let source = io::Error::last_os_error();
        if source.raw_os_error() == Some(libc::EAFNOSUPPORT) {
            return Err(Error::Call {
                what: "opening an AF_XDP socket: this kernel has none (CONFIG_XDP_SOCKETS)".into(),
                source,
            });
        }
        return Err(call_error("opening an AF_XDP socket", source));
    }
    // SAFETY: just opened, and not owned elsewhere.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Enlarges the send buffer. Without the capability, the system's limit applies.
fn set_send_buffer(socket: &OwnedFd) {
    let bytes = SEND_BUFFER_BYTES;
    for option in [libc::SO_SNDBUFFORCE, libc::SO_SNDBUF] {
        // SAFETY: the value lives through the call.
        let result = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                option,
                (&raw const bytes).cast(),
                size_of_val(&bytes) as libc::socklen_t,
            )
        };
        if result == 0 {
            return;
        }
    }
}

fn register_memory(socket: &OwnedFd, umem: &Umem) -> Result<()> {
    // The first version of the structure, which all kernels accept.
    #[repr(C)]
    struct Registration {
        address: u64,
        bytes: u64,
        chunk_bytes: u32,
        headroom: u32,
        flags: u32,
        padding: u32,
    }
    let registration = Registration {
        address: umem.base.as_ptr() as u64,
        bytes: umem.bytes as u64,
        chunk_bytes: umem.chunk_bytes,
        headroom: 0,
        flags: libc::XDP_UMEM_UNALIGNED_CHUNK_FLAG,
        padding: 0,
    };
    set_option(socket, libc::XDP_UMEM_REG, &registration).map_err(|source| {
        match source.raw_os_error() {
            Some(libc::ENOBUFS | libc::ENOMEM) => Error::LockedMemory {
                mib: umem.bytes.div_ceil(1 << 20),
            },
            _ => call_error("giving packet buffers to an AF_XDP socket", source),
        }
    })
}

/// Binds the socket. A queue that another socket has may be one of this process, closed just now.
fn bind_to_freed_queue(
    socket: &OwnedFd,
    interface: &XdpInterface,
    queue: u32,
    copy_mode: CopyMode,
    first: Option<&XdpSocket>,
) -> Result<()> {
    let start = Instant::now();
    loop {
        let bound = bind_socket(socket, interface, queue, copy_mode, first);
        let is_in_use = matches!(bound, Err(Error::QueueInUse { .. }));
        if !is_in_use || start.elapsed() > QUEUE_FREED_WITHIN {
            return bound;
        }
        std::thread::sleep(BIND_PAUSE);
    }
}

fn bind_socket(
    socket: &OwnedFd,
    interface: &XdpInterface,
    queue: u32,
    copy_mode: CopyMode,
    first: Option<&XdpSocket>,
) -> Result<()> {
    // Sockets that share memory inherit the flags of the first.
    let flags = match (first, copy_mode) {
        (Some(_), _) => libc::XDP_SHARED_UMEM,
        (None, CopyMode::Auto) => libc::XDP_USE_NEED_WAKEUP,
        (None, CopyMode::Copy) => libc::XDP_USE_NEED_WAKEUP | libc::XDP_COPY,
        (None, CopyMode::ZeroCopy) => libc::XDP_USE_NEED_WAKEUP | libc::XDP_ZEROCOPY,
    };
    let address = libc::sockaddr_xdp {
        sxdp_family: libc::AF_XDP as u16,
        sxdp_flags: flags,
        sxdp_ifindex: interface.index,
        sxdp_queue_id: queue,
        sxdp_shared_umem_fd: first.map_or(0, |first| first.descriptor.as_raw_fd() as u32),
    };
    // SAFETY: the address lives through the call and has the length given.
    let result = unsafe {
        libc::bind(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            size_of_val(&address) as libc::socklen_t,
        )
    };
    if result == 0 {
        return Ok(());
    }
    let source = io::Error::last_os_error();
    Err(match source.raw_os_error() {
        Some(libc::EBUSY) => Error::QueueInUse {
            interface: interface.name.clone(),
            queue,
        },
        Some(libc::ENETDOWN) => Error::Down(interface.name.clone()),
        Some(libc::EPERM | libc::EACCES) => Error::Permission {
            what: "binding an AF_XDP socket",
        },
        Some(libc::EOPNOTSUPP) if copy_mode == CopyMode::ZeroCopy => Error::Call {
            what: format!(
                "the driver of `{}` has no zero-copy mode; use xdp_copy = \"auto\"",
                interface.name
            ),
            source,
        },
        _ => Error::Call {
            what: format!(
                "binding an AF_XDP socket to queue {queue} of `{}`",
                interface.name
            ),
            source,
        },
    })
}

fn set_option<T>(socket: &OwnedFd, option: libc::c_int, value: &T) -> io::Result<()> {
    // SAFETY: the value lives through the call and has the length given.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_XDP,
            option,
            std::ptr::from_ref(value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// `T` is a C structure of numbers.
fn read_option<T>(socket: &OwnedFd, option: libc::c_int) -> io::Result<T> {
    let mut value = MaybeUninit::<T>::zeroed();
    let mut bytes = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `bytes` bytes, which is the size of the value.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_XDP,
            option,
            value.as_mut_ptr().cast(),
            &mut bytes,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: structures of numbers, for which zeros are valid where the kernel wrote none.
    Ok(unsafe { value.assume_init() })
}
