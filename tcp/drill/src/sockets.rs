//! Socket system calls on the stack. No call blocks: a call that would block fails with
//! [`Errno::EAGAIN`], and the caller advances the time before it retries.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use siw_net::{ConnId, NetError};
use siw_tcp::{Keepalive, ListenerId, Stack, StackError};

use crate::errno::Errno;
use crate::host::{ConnStatus, Host};
use crate::options::{KEEPALIVE, congestion_by_name};

/// State of a socket.
#[derive(Clone, Copy, Debug)]
enum SocketKind {
    Fresh,
    Listening(ListenerId),
    Conn(ConnId),
}

/// A socket: an entry of the table of file descriptors.
pub(crate) struct Socket {
    kind: SocketKind,
    v6: bool,
    bound: Option<SocketAddr>,
    /// SO_LINGER with a time of 0: `close` resets the connection.
    abort: bool,
    /// SHUT_RD: `read` returns 0 instead of blocking.
    read_shut: bool,
    /// Established connections of a listener that were not accepted yet.
    pub accept_queue: VecDeque<ConnId>,
}

/// Direction of a connection that `shutdown` ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shutdown {
    /// SHUT_RD: the application reads no more.
    Read,
    /// SHUT_WR: the application writes no more; a FIN is sent.
    Write,
    /// SHUT_RDWR.
    Both,
}

/// Socket options. The connections of the stack share one configuration: all options except `Linger`,
/// `SendBuffer` and `NoEffect` must be set before the first `listen` or `connect`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SockOpt {
    /// SO_LINGER: whether `close` resets the connection.
    Linger(bool),
    /// SO_KEEPALIVE (RFC 9293 section 3.8.4).
    KeepAlive(bool),
    /// TCP_KEEPIDLE: idle time before the first keepalive probe.
    KeepIdle(Duration),
    /// TCP_KEEPINTVL: time between keepalive probes.
    KeepInterval(Duration),
    /// TCP_KEEPCNT: unanswered keepalive probes after which the connection times out.
    KeepCount(u8),
    /// TCP_USER_TIMEOUT: how long data may stay unacknowledged (RFC 9293 section 3.8.3).
    UserTimeout(Duration),
    /// TCP_CONGESTION: `cubic`, `reno` or `dctcp`.
    Congestion(String),
    /// SO_RCVBUF: receive window in bytes.
    ReceiveBuffer(u32),
    /// SO_SNDBUF: maximum number of unacknowledged bytes that `write` accepts.
    SendBuffer(u32),
    /// TCP_SYNCNT: retransmissions of a SYN before `connect` fails.
    SynCount(u8),
    /// Options whose behaviour the stack always has: TCP_NODELAY, SO_REUSEADDR, SO_REUSEPORT.
    NoEffect,
}

/// Readiness of a socket as reported by poll(2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Readiness {
    /// POLLIN: `read` or `accept` would not block.
    pub readable: bool,
    /// POLLOUT: `write` would not block.
    pub writable: bool,
    /// POLLERR: an error is pending.
    pub error: bool,
    /// POLLRDHUP: the peer closed its direction.
    pub peer_closed: bool,
    /// POLLHUP: the connection is closed, or the socket was never connected.
    pub hung_up: bool,
}

/// Returns the error number of an error of the stack.
fn errno_of(error: &StackError) -> Errno {
    match error {
        StackError::NotOurAddress(_) => Errno::EADDRNOTAVAIL,
        StackError::NoSource(_) | StackError::NoRoute(_) => Errno::ENETUNREACH,
        StackError::AddrInUse(_) => Errno::EADDRINUSE,
        StackError::NoPorts => Errno::EADDRNOTAVAIL,
        StackError::TooManyConnections(_) | StackError::Net(NetError::TooManyUnresolved { .. }) => {
            Errno::ENOBUFS
        }
        StackError::BadRemote(_) | StackError::Config(_) | StackError::Net(NetError::Config(_)) => {
            Errno::EINVAL
        }
    }
}

impl Host {
    /// Returns the stack, which is created by the first call that needs it.
    fn stack_or_new(&mut self) -> Result<&mut Stack<siw_net::VecBuf, Vec<u8>>, Errno> {
        if self.stack.is_none() {
            let stack = Stack::new(self.setup.stack_config(), self.now)
                .map_err(|error| errno_of(&error))?;
            self.stack = Some(stack);
        }
        self.stack.as_mut().ok_or(Errno::EINVAL)
    }

    /// Returns the socket with this number.
    fn find_socket(&mut self, fd: i32) -> Result<&mut Socket, Errno> {
        self.sockets.get_mut(&fd).ok_or(Errno::EBADF)
    }

    /// Returns the connection of a socket.
    fn connection_of(&mut self, fd: i32) -> Result<ConnId, Errno> {
        match self.find_socket(fd)?.kind {
            SocketKind::Conn(id) => Ok(id),
            _ => Err(Errno::ENOTCONN),
        }
    }

    /// Returns the status of a connection.
    fn status_of(&mut self, id: ConnId) -> &mut ConnStatus {
        self.conns.entry(id).or_default()
    }

    /// Adds a socket under the lowest free number from 3.
    fn add_socket(&mut self, kind: SocketKind, v6: bool) -> i32 {
        let mut fd = 3;
        while self.sockets.contains_key(&fd) {
            fd += 1;
        }
        let socket = Socket {
            kind,
            v6,
            bound: None,
            abort: false,
            read_shut: false,
            accept_queue: VecDeque::new(),
        };
        self.sockets.insert(fd, socket);
        fd
    }

    /// Creates a TCP socket for IPv6 or IPv4, and returns its number.
    pub fn socket(&mut self, v6: bool) -> i32 {
        self.add_socket(SocketKind::Fresh, v6)
    }

    /// bind(2). The address must be the host's, or unspecified.
    pub fn bind(&mut self, fd: i32, to: SocketAddr) -> Result<(), Errno> {
        let local = self.setup.local;
        let socket = self.find_socket(fd)?;
        if socket.bound.is_some() || !matches!(socket.kind, SocketKind::Fresh) {
            return Err(Errno::EINVAL);
        }
        if to.is_ipv6() != socket.v6 {
            return Err(Errno::EAFNOSUPPORT);
        }
        if !to.ip().is_unspecified() && to.ip() != local {
            return Err(Errno::EADDRNOTAVAIL);
        }
        socket.bound = Some(to);
        Ok(())
    }

    /// listen(2). The socket must be bound.
    pub fn listen(&mut self, fd: i32, backlog: i32) -> Result<(), Errno> {
        let socket = self.find_socket(fd)?;
        let bound = socket.bound.ok_or(Errno::EDESTADDRREQ)?;
        if !matches!(socket.kind, SocketKind::Fresh) {
            return Err(Errno::EINVAL);
        }
        let local = Some(bound.ip()).filter(|address: &IpAddr| !address.is_unspecified());
        let backlog = usize::try_from(backlog).unwrap_or(0);
        let id = self
            .stack_or_new()?
            .listen(local, bound.port(), backlog, fd as u64)
            .map_err(|error| errno_of(&error))?;
        self.find_socket(fd)?.kind = SocketKind::Listening(id);
        Ok(())
    }

    /// accept(2). Returns the new socket and the address of its peer.
    pub fn accept(&mut self, fd: i32) -> Result<(i32, SocketAddr), Errno> {
        let socket = self.find_socket(fd)?;
        if !matches!(socket.kind, SocketKind::Listening(_)) {
            return Err(Errno::EINVAL);
        }
        let id = socket.accept_queue.pop_front().ok_or(Errno::EAGAIN)?;
        let v6 = socket.v6;
        let new = self.add_socket(SocketKind::Conn(id), v6);
        let stack = self.stack_or_new()?;
        stack.set_user(id, new as u64);
        let remote = stack
            .tcp_info(id)
            .map(|conn| conn.remote)
            .ok_or(Errno::EINVAL)?;
        self.status_of(id).connect_reported = true;
        Ok((new, remote))
    }

    /// connect(2). The first call fails with [`Errno::EINPROGRESS`], later ones with [`Errno::EALREADY`]
    /// until the handshake has succeeded or failed.
    pub fn connect(&mut self, fd: i32, to: SocketAddr) -> Result<(), Errno> {
        let socket = self.find_socket(fd)?;
        match socket.kind {
            SocketKind::Listening(_) => Err(Errno::EISCONN),
            SocketKind::Conn(id) => {
                let status = self.status_of(id);
                if let Some(error) = status.error.take() {
                    return Err(error);
                }
                match (status.connected, status.connect_reported) {
                    (true, true) => Err(Errno::EISCONN),
                    (true, false) => {
                        status.connect_reported = true;
                        Ok(())
                    }
                    (false, _) => Err(Errno::EALREADY),
                }
            }
            SocketKind::Fresh => {
                let (v6, bound) = (socket.v6, socket.bound);
                if to.is_ipv6() != v6 {
                    return Err(Errno::EAFNOSUPPORT);
                }
                let local = bound
                    .map(|bound_address| bound_address.ip())
                    .filter(|address| !address.is_unspecified());
                let port = bound
                    .map(|bound_address| bound_address.port())
                    .filter(|port| *port != 0);
                let now = self.now;
                let id = self
                    .stack_or_new()?
                    .connect(now, local, port, to, fd as u64)
                    .map_err(|error| errno_of(&error))?;
                self.find_socket(fd)?.kind = SocketKind::Conn(id);
                self.conns.insert(id, ConnStatus::default());
                self.newest = Some(id);
                self.run_stack();
                Err(Errno::EINPROGRESS)
            }
        }
    }

    /// write(2). Accepts as many bytes as fit the send buffer and returns their number. The last segment
    /// carries PSH if [`Setup::push`](crate::options::Setup::push) is set.
    pub fn write(&mut self, fd: i32, data: &[u8]) -> Result<usize, Errno> {
        let id = self.connection_of(fd).map_err(|errno| match errno {
            Errno::ENOTCONN => Errno::EPIPE,
            errno => errno,
        })?;
        let status = self.status_of(id);
        if let Some(errno) = status.error.take() {
            return Err(errno);
        }
        if status.closed {
            return Err(Errno::EPIPE);
        }
        if !status.connected {
            return Err(Errno::EAGAIN);
        }
        let (buffer, push) = (self.setup.send_buffer as usize, self.setup.push);
        let stack = self.stack_or_new()?;
        let info = stack.tcp_info(id).ok_or(Errno::EPIPE)?;
        let room = buffer.saturating_sub((info.unsent + info.in_flight) as usize);
        let count = data.len().min(room);
        if count == 0 && !data.is_empty() {
            return Err(Errno::EAGAIN);
        }
        // Records as long as a segment.
        let mut left = &data[..count];
        while !left.is_empty() {
            let (record, rest) = left.split_at(left.len().min(info.effective_mss));
            stack
                .push_record(
                    id,
                    record.len() as u32,
                    record.to_vec(),
                    push && rest.is_empty(),
                )
                .map_err(|_| Errno::EPIPE)?;
            left = rest;
        }
        self.run_stack();
        Ok(count)
    }

    /// read(2). Returns at most `max` bytes; none if the peer closed its direction.
    pub fn read(&mut self, fd: i32, max: usize) -> Result<Vec<u8>, Errno> {
        let data = self.peek(fd, max)?;
        let id = self.connection_of(fd)?;
        if let Some(queue) = self.stack_or_new()?.receive_queue(id) {
            queue.consume(data.len());
        }
        self.run_stack();
        Ok(data)
    }

    /// recv(2) with MSG_PEEK: returns the same bytes as `read` but leaves them in the queue.
    pub fn peek(&mut self, fd: i32, max: usize) -> Result<Vec<u8>, Errno> {
        let id = self.connection_of(fd)?;
        let read_shut = self.find_socket(fd)?.read_shut;
        let status = *self.status_of(id);
        let mut data = vec![];
        if let Some(queue) = self.stack_or_new()?.receive_queue(id) {
            for chunk in queue.chunks() {
                let count = chunk.len().min(max - data.len());
                data.extend_from_slice(&chunk[..count]);
            }
        }
        if !data.is_empty() || max == 0 {
            return Ok(data);
        }
        let error = self.status_of(id).error.take();
        match error {
            Some(errno) => Err(errno),
            None if status.peer_fin || status.closed || read_shut => Ok(data),
            None => Err(Errno::EAGAIN),
        }
    }

    /// shutdown(2).
    pub fn shutdown(&mut self, fd: i32, how: Shutdown) -> Result<(), Errno> {
        let id = self.connection_of(fd)?;
        let now = self.now;
        self.find_socket(fd)?.read_shut |= how != Shutdown::Write;
        if how != Shutdown::Read {
            self.stack_or_new()?.close(now, id);
            self.run_stack();
        }
        Ok(())
    }

    /// close(2).
    pub fn close(&mut self, fd: i32) -> Result<(), Errno> {
        let socket = self.sockets.remove(&fd).ok_or(Errno::EBADF)?;
        let now = self.now;
        match socket.kind {
            SocketKind::Fresh => {}
            SocketKind::Listening(id) => {
                let stack = self.stack_or_new()?;
                stack.stop_listening(now, id);
                for id in socket.accept_queue {
                    stack.abort(now, id);
                    stack.release(now, id);
                }
            }
            SocketKind::Conn(id) => {
                let stack = self.stack_or_new()?;
                if socket.abort {
                    stack.abort(now, id);
                }
                self.run_stack();
                self.stack_or_new()?.release(now, id);
                self.conns.remove(&id);
            }
        }
        self.run_stack();
        Ok(())
    }

    /// Returns and clears the pending error (SO_ERROR).
    pub fn take_error(&mut self, fd: i32) -> Result<Option<Errno>, Errno> {
        match self.find_socket(fd)?.kind {
            SocketKind::Conn(id) => Ok(self.status_of(id).error.take()),
            _ => Ok(None),
        }
    }

    /// setsockopt(2).
    pub fn set_option(&mut self, fd: i32, option: SockOpt) -> Result<(), Errno> {
        let socket = self.find_socket(fd)?;
        match option {
            SockOpt::NoEffect => return Ok(()),
            SockOpt::Linger(abort) => {
                socket.abort = abort;
                return Ok(());
            }
            SockOpt::SendBuffer(value) => {
                self.setup.send_buffer = value;
                return Ok(());
            }
            _ => {}
        }
        if self.stack.is_some() {
            return Err(Errno::EINVAL);
        }
        let config = &mut self.setup.config;
        let keepalive = config.tcp.keepalive.unwrap_or(KEEPALIVE);
        match option {
            SockOpt::KeepAlive(on) => config.tcp.keepalive = on.then_some(keepalive),
            SockOpt::KeepIdle(idle) => config.tcp.keepalive = Some(Keepalive { idle, ..keepalive }),
            SockOpt::KeepInterval(interval) => {
                config.tcp.keepalive = Some(Keepalive {
                    interval,
                    ..keepalive
                });
            }
            SockOpt::KeepCount(probes) => {
                config.tcp.keepalive = Some(Keepalive {
                    probes,
                    ..keepalive
                })
            }
            SockOpt::UserTimeout(timeout) => {
                (config.tcp.user_timeout, config.tcp.orphan_timeout) = (timeout, timeout);
            }
            SockOpt::Congestion(name) => {
                config.tcp.congestion = congestion_by_name(&name).ok_or(Errno::EINVAL)?;
            }
            SockOpt::ReceiveBuffer(value) => config.tcp.recv_window = value,
            SockOpt::SynCount(value) => config.tcp.syn_retries = value,
            SockOpt::NoEffect | SockOpt::Linger(_) | SockOpt::SendBuffer(_) => {}
        }
        Ok(())
    }

    /// Returns the readiness of a socket for poll(2).
    pub fn readiness(&mut self, fd: i32) -> Result<Readiness, Errno> {
        let buffer = self.setup.send_buffer;
        let socket = self.find_socket(fd)?;
        let id = match socket.kind {
            SocketKind::Fresh => {
                return Ok(Readiness {
                    writable: true,
                    hung_up: true,
                    ..Readiness::default()
                });
            }
            SocketKind::Listening(_) => {
                return Ok(Readiness {
                    readable: !socket.accept_queue.is_empty(),
                    ..Readiness::default()
                });
            }
            SocketKind::Conn(id) => id,
        };
        let read_shut = socket.read_shut;
        let status = *self.status_of(id);
        let info = self.stack_or_new()?.tcp_info(id);
        let gone = status.closed || status.error.is_some();
        let room = info.is_some_and(|conn| conn.unsent + conn.in_flight < buffer);
        Ok(Readiness {
            readable: info.is_some_and(|conn| conn.readable > 0)
                || status.peer_fin
                || read_shut
                || gone,
            writable: status.connected && room || gone,
            error: status.error.is_some(),
            peer_closed: status.peer_fin || gone,
            hung_up: gone,
        })
    }
}
