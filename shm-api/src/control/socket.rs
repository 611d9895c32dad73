//! Packets and file descriptors over a SOCK_SEQPACKET Unix socket. Blocking for clients, non-blocking
//! for the daemon.

use super::codec::{self, CallError, ProtoError};
use super::messages::{Header, ImportMemory, MAGIC, MAX_FDS, MAX_PACKET, Message, VERSION};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::sockopt::Timeout;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use std::cell::RefCell;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::path::Path;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

/// Kernel memory, by the kernel's accounting, that unread events of a completion channel may take.
pub const EVENT_STREAM_BYTES: usize = 1 << 20;

/// A received packet.
#[derive(Debug, Default)]
pub struct ControlPacket {
    /// Header and body.
    pub bytes: Vec<u8>,
    /// Closed when dropped, so none leaks, whatever the packet contains.
    pub fds: Vec<OwnedFd>,
}

/// Reason why nothing was received.
#[derive(Debug, thiserror::Error)]
pub enum RecvError {
    /// The socket is non-blocking and has no packet.
    #[error("no packet is available")]
    WouldBlock,
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// A client sent descriptors, which the daemon does not accept. They are still in the socket.
    #[error("unexpected file descriptors in a packet: requests carry none")]
    Descriptors,
    /// A packet longer than [`MAX_PACKET`].
    #[error("packet of more than {MAX_PACKET} bytes")]
    Truncated,
    /// Descriptors arrived for which this process has no room, or more of them than a packet may
    /// have.
    #[error("file descriptors of a packet were lost: too many, or this process reached its limit")]
    DescriptorsLost,
    /// Any other error of the socket.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// One connected socket.
#[derive(Debug)]
pub struct ControlSocket {
    fd: OwnedFd,
    /// Version of the packets that this side sends.
    version: AtomicU16,
}

impl From<OwnedFd> for ControlSocket {
    fn from(fd: OwnedFd) -> Self {
        ControlSocket {
            fd,
            version: AtomicU16::new(VERSION),
        }
    }
}

impl AsFd for ControlSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl ControlSocket {
    /// Client: connects, blocking.
    pub fn connect_to(path: &Path) -> io::Result<ControlSocket> {
        let fd = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        rustix::net::connect(&fd, &SocketAddrUnix::new(path)?)?;
        Ok(ControlSocket::from(fd))
    }

    /// Variant of [`Self::connect_to`] with a time-out for connecting and for calls
    /// ([`Self::set_call_timeout`]): a stopped daemon accepts no connection once its backlog is full.
    pub fn connect_within(path: &Path, timeout: Duration) -> io::Result<ControlSocket> {
        let fd = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        let socket = ControlSocket::from(fd);
        socket.set_call_timeout(timeout)?;
        match rustix::net::connect(&socket.fd, &SocketAddrUnix::new(path)?) {
            Ok(()) => Ok(socket),
            Err(Errno::AGAIN) => Err(io::ErrorKind::TimedOut.into()),
            Err(error) => Err(error.into()),
        }
    }

    /// Daemon: creates a non-blocking listening socket.
    pub fn listen_at(path: &Path, backlog: i32) -> io::Result<OwnedFd> {
        let fd = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )?;
        // The mode of the socket's file, less the umask: for the owner alone until the daemon sets the
        // configured mode.
        rustix::fs::fchmod(&fd, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)?;
        rustix::net::bind(&fd, &SocketAddrUnix::new(path)?)?;
        rustix::net::listen(&fd, backlog)?;
        Ok(fd)
    }

    /// Daemon: accepts the next client, non-blocking; `None` when none is waiting.
    pub fn accept_client(listener: BorrowedFd<'_>) -> io::Result<Option<ControlSocket>> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(listener, flags) {
            Ok(fd) => Ok(Some(ControlSocket::from(fd))),
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// A connected pair; the first end is non-blocking (daemon), the second blocking.
    pub fn new_pair() -> io::Result<(ControlSocket, ControlSocket)> {
        let (daemon_end, client_end) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        rustix::io::ioctl_fionbio(&daemon_end, true)?;
        Ok((
            ControlSocket::from(daemon_end),
            ControlSocket::from(client_end),
        ))
    }

    /// Sets the negotiated version, which packets carry from now on.
    pub fn set_version(&self, version: u16) {
        self.version.store(version, Ordering::Relaxed);
    }

    /// The version of the packets that this side sends.
    pub fn agreed_version(&self) -> u16 {
        self.version.load(Ordering::Relaxed)
    }

    /// Sends a packet of this side in the negotiated version.
    fn send_versioned(&self, mut packet: Vec<u8>, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        codec::stamp_version(&mut packet, self.agreed_version());
        self.send_packet(&packet, fds)
    }

    /// Makes the peer's sends to this end fail with `EPIPE` from now on.
    pub fn refuse_input(&self) {
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Read);
    }

    /// Limits the data queued in the socket for a peer that does not read, in bytes.
    pub fn limit_send_buffer(&self, bytes: usize) {
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&self.fd, bytes);
    }

    /// Switches non-blocking mode.
    pub fn set_nonblocking(&self, on: bool) -> io::Result<()> {
        Ok(rustix::io::ioctl_fionbio(&self.fd, on)?)
    }

    /// Sends one packet with fds. On a non-blocking socket, a full receive queue of the peer returns
    /// `WouldBlock`.
    pub fn send_packet(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        if fds.len() > MAX_FDS || bytes.len() > MAX_PACKET {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut interrupted = None;
        loop {
            match rustix::net::sendmsg(
                &self.fd,
                &[IoSlice::new(bytes)],
                &mut ancillary,
                SendFlags::NOSIGNAL,
            ) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) if !self.is_overdue(&mut interrupted, Timeout::Send) => {}
                Err(Errno::INTR) => return Err(io::ErrorKind::WouldBlock.into()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Called after a signal interrupted a wait: returns whether the socket's time-out has expired.
    /// The kernel restarts the time-out with each call, so a periodic signal would make it endless.
    #[cold]
    fn is_overdue(&self, first_interruption: &mut Option<Instant>, direction: Timeout) -> bool {
        let since = *first_interruption.get_or_insert_with(Instant::now);
        rustix::net::sockopt::socket_timeout(&self.fd, direction)
            .ok()
            .flatten()
            .is_some_and(|timeout| since.elapsed() >= timeout)
    }

    /// Receives one packet.
    pub fn recv_packet(&self) -> Result<ControlPacket, RecvError> {
        self.recv_flags(RecvFlags::empty())
    }

    /// Receives one packet if one is available, without blocking even on a blocking socket.
    pub fn try_recv_packet(&self) -> Result<ControlPacket, RecvError> {
        self.recv_flags(RecvFlags::DONTWAIT)
    }

    /// Daemon: receives one packet of a client.
    ///
    /// File descriptors in the packet are neither received nor discarded: either would close them,
    /// which may block for long (a lingering socket, a FUSE file). Peeking at the packet leaves them
    /// in the socket.
    ///
    /// # Errors
    /// [`RecvError::Descriptors`] if the packet has descriptors. The socket is then unusable, and
    /// closing it closes them.
    pub fn recv_from_client(&self) -> Result<Vec<u8>, RecvError> {
        loop {
            let peek = rustix::net::recvmsg(
                &self.fd,
                &mut [IoSliceMut::new(&mut [0; 1])],
                &mut RecvAncillaryBuffer::new(&mut []),
                RecvFlags::PEEK,
            );
            return match peek {
                Ok(seen) if seen.flags.contains(ReturnFlags::CTRUNC) => Err(RecvError::Descriptors),
                Ok(_) => Ok(self.recv_packet()?.bytes),
                // A peer that closes with unread input resets the connection, which is reported once:
                // its packets are still in the socket.
                Err(Errno::INTR | Errno::CONNRESET) => continue,
                Err(Errno::AGAIN) => Err(RecvError::WouldBlock),
                Err(Errno::PIPE) => Err(RecvError::Closed),
                Err(error) => Err(RecvError::Io(error.into())),
            };
        }
    }

    /// Daemon: returns whether the next packet is the one request that carries a descriptor
    /// ([`ImportMemory`]), and carries exactly one.
    ///
    /// Peeking duplicates the descriptor into this process; the duplicate is passed to `close`,
    /// because closing it may block for as long as its creator wants.
    pub fn is_import_next(&self, close: impl FnMut(OwnedFd)) -> bool {
        let mut bytes = [0; core::mem::size_of::<Header>()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let seen = rustix::net::recvmsg(
            &self.fd,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut ancillary,
            RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC,
        );
        let Ok(seen) = seen else {
            return false;
        };
        // By alignment, the room for one descriptor holds two.
        let looked_at = take_descriptors(&mut ancillary);
        let is_alone = looked_at.len() == 1;
        looked_at.into_iter().for_each(close);
        let header: Header = bytemuck::pod_read_unaligned(&bytes);
        is_alone
            && !seen.flags.contains(ReturnFlags::CTRUNC)
            && seen.bytes >= bytes.len()
            && header.magic == MAGIC
            && header.kind == ImportMemory::KIND
    }

    fn recv_flags(&self, flags: RecvFlags) -> Result<ControlPacket, RecvError> {
        thread_local! {
            /// Buffer for the longest packet, zeroed once.
            static ROOM: RefCell<Box<[u8; MAX_PACKET]>> = RefCell::new(Box::new([0; MAX_PACKET]));
        }
        // The buffer no longer exists in functions of atexit(3), in static destructors, and in threads
        // that are ending.
        let received = ROOM.try_with(|room| self.recv_into(&mut room.borrow_mut()[..], flags));
        received.unwrap_or_else(|_| self.recv_into(&mut vec![0; MAX_PACKET], flags))
    }

    fn recv_into(&self, room: &mut [u8], flags: RecvFlags) -> Result<ControlPacket, RecvError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut interrupted = None;
        let (got, fds) = loop {
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let received = rustix::net::recvmsg(
                &self.fd,
                &mut [IoSliceMut::new(room)],
                &mut ancillary,
                flags | RecvFlags::CMSG_CLOEXEC,
            );
            match received {
                Ok(got) => {
                    break (got, take_descriptors(&mut ancillary));
                }
                Err(Errno::INTR) if !self.is_overdue(&mut interrupted, Timeout::Recv) => {}
                Err(Errno::AGAIN | Errno::INTR) => return Err(RecvError::WouldBlock),
                Err(Errno::CONNRESET | Errno::PIPE) => return Err(RecvError::Closed),
                Err(error) => return Err(RecvError::Io(error.into())),
            }
        };
        if got.flags.intersects(ReturnFlags::TRUNC) {
            return Err(RecvError::Truncated);
        }
        if got.flags.intersects(ReturnFlags::CTRUNC) {
            return Err(RecvError::DescriptorsLost);
        }
        if got.bytes == 0 {
            return Err(RecvError::Closed);
        }
        let bytes = room.get(..got.bytes).unwrap_or_default().to_vec();
        Ok(ControlPacket { bytes, fds })
    }

    /// Client: encodes a request without a reply ([`codec::UNANSWERED`]) for [`Self::try_send`].
    pub fn encode_unanswered<M: Message>(&self, message: &M) -> Vec<u8> {
        let mut packet = codec::encode_request(codec::UNANSWERED, message);
        codec::stamp_version(&mut packet, self.agreed_version());
        packet
    }

    /// Sends one packet without waiting; returns false if the socket has no room.
    pub fn try_send(&self, packet: &[u8]) -> io::Result<bool> {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        loop {
            match rustix::net::send(&self.fd, packet, flags) {
                Ok(_) => return Ok(true),
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Client: waits until the socket has room, as long as a call may last.
    pub fn await_room(&self) -> Result<(), CallError> {
        let timeout = rustix::net::sockopt::socket_timeout(&self.fd, Timeout::Send);
        let timeout = timeout.ok().flatten().map(|timeout| Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        match poll(
            &mut [PollFd::new(&self.fd, PollFlags::OUT)],
            timeout.as_ref(),
        ) {
            Ok(0) => Err(CallError::TimedOut),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(CallError::Io(error.into())),
        }
    }

    fn send_request<M: Message>(
        &self,
        seq: u32,
        message: &M,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), CallError> {
        self.send_versioned(codec::encode_request(seq, message), fds)
            .map_err(|error| match error.raw_os_error() {
                Some(32 | 104) => CallError::Closed,
                _ if error.kind() == io::ErrorKind::WouldBlock => CallError::TimedOut,
                _ => CallError::Io(error),
            })
    }

    /// Client: sends a request and waits for its reply, on a blocking socket. One caller at a time;
    /// `seq` must not be [`codec::UNANSWERED`].
    ///
    /// The reply of a call that timed out ([`Self::set_call_timeout`]) may still arrive, and the next
    /// call would take it for its own: make no further call then.
    pub fn call_and_wait<M: Message>(
        &self,
        seq: u32,
        message: &M,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(M::Reply, Vec<OwnedFd>), CallError> {
        match self.send_request(seq, message, fds) {
            Err(CallError::Closed) => {
                return Err(self.last_refusal::<M>(seq).unwrap_or(CallError::Closed));
            }
            sent => sent?,
        }
        let packet = self.recv_packet().map_err(|error| match error {
            RecvError::Closed => CallError::Closed,
            RecvError::Io(error) => CallError::Io(error),
            RecvError::WouldBlock => CallError::TimedOut,
            RecvError::Truncated => ProtoError::TooLong.into(),
            // Only the daemon's end refuses descriptors.
            RecvError::Descriptors => CallError::Io(io::ErrorKind::InvalidData.into()),
            RecvError::DescriptorsLost => CallError::Io(Errno::MFILE.into()),
        })?;
        Ok((codec::decode_reply::<M>(seq, &packet.bytes)?, packet.fds))
    }

    /// Client: limits the time that a request waits for room in a blocking socket, and then for its
    /// reply; both are unlimited until this is called.
    pub fn set_call_timeout(&self, timeout: Duration) -> io::Result<()> {
        // Zero would mean no time-out, and the kernel refuses times beyond the range of its clock.
        const LONGEST: Duration = Duration::from_secs(1 << 31);
        let timeout = Some(timeout.clamp(Duration::from_micros(1), LONGEST));
        for direction in [Timeout::Send, Timeout::Recv] {
            rustix::net::sockopt::set_socket_timeout(&self.fd, direction, timeout)?;
        }
        Ok(())
    }

    /// Shuts down the connection in both directions; the descriptor stays open.
    pub fn shut_down(&self) {
        // Fails only if the other side has already done so.
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Both);
    }

    /// Client: the reason that the daemon sent before it closed the connection, if any.
    fn last_refusal<M: Message>(&self, seq: u32) -> Option<CallError> {
        let packet = self.try_recv_packet().ok()?;
        match codec::decode_reply::<M>(seq, &packet.bytes) {
            Err(refusal @ CallError::Refused { .. }) => Some(refusal),
            _ => None,
        }
    }

    /// Daemon: sends the reply to a request of type `M`, if the request expects one.
    pub fn send_reply<M: Message>(
        &self,
        seq: u32,
        reply: &M::Reply,
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        if seq == codec::UNANSWERED {
            return Ok(());
        }
        self.send_versioned(codec::encode_reply::<M>(seq, reply), fds)
    }

    /// Daemon: refuses a request.
    pub fn send_refusal(&self, kind: u16, seq: u32, errno: i32, reason: &str) -> io::Result<()> {
        self.send_versioned(codec::encode_error(kind, seq, errno, reason), &[])
    }
}

fn take_descriptors(ancillary: &mut RecvAncillaryBuffer<'_>) -> Vec<OwnedFd> {
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            fds.extend(received);
        }
    }
    fds
}

/// Daemon: creates a completion channel; returns its write end (non-blocking) and its read end. A
/// stream socket queues some hundred cookies of 8 bytes; when an event does not fit, the reader has
/// that many others to read. Not a pipe: the reader of a pipe holds a lock that a writer waits for,
/// and can be made to read into memory that never becomes available.
pub fn event_stream() -> io::Result<(OwnedFd, OwnedFd)> {
    let (write, read) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    rustix::io::ioctl_fionbio(&write, true)?;
    // Prevents the client from filling the other direction, which is never read.
    rustix::net::shutdown(&write, rustix::net::Shutdown::Read)?;
    let _ = rustix::net::sockopt::set_socket_send_buffer_size(&write, EVENT_STREAM_BYTES);
    Ok((write, read))
}
