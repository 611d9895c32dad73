//! System calls of sockets, as what they ask of the stack. Nothing blocks: what would is
//! [`Errno::EAGAIN`], and the caller lets time pass.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use siw_tcp::{ConnId, Error, Keepalive, ListenerId, Stack};

use crate::errno::Errno;
use crate::host::{Condition, Host};
use crate::options::{KEEPALIVE, congestion};

#[derive(Clone, Copy, Debug)]
enum Kind {
    Fresh,
    Listening(ListenerId),
    Conn(ConnId),
}

pub(crate) struct Socket {
    kind: Kind,
    v6: bool,
    bound: Option<SocketAddr>,
    /// SO_LINGER with a time of 0.
    abort: bool,
    /// After SHUT_RD nothing is waited for.
    deaf: bool,
    /// Of a listener: established, not yet accepted.
    pub queue: VecDeque<ConnId>,
}

/// Which direction `shutdown` ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shutdown {
    Read,
    Write,
    Both,
}

/// Socket options that mean something to the engine. Its connections share one configuration:
/// all but `Linger` and `Harmless` must be set before the first `listen` or `connect`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SockOpt {
    /// `close` resets.
    Linger(bool),
    KeepAlive(bool),
    KeepIdle(Duration),
    KeepInterval(Duration),
    KeepCount(u8),
    UserTimeout(Duration),
    Congestion(String),
    /// Bytes of the receive window.
    ReceiveBuffer(u32),
    /// Bytes that `write` takes beyond what is acknowledged.
    SendBuffer(u32),
    SynCount(u8),
    /// What the engine does in any case (no Nagle, addresses are reusable).
    Harmless,
}

/// What `poll` tells of a socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    pub readable: bool,
    pub writable: bool,
    pub error: bool,
    /// The peer closed its direction.
    pub peer_closed: bool,
    pub hung_up: bool,
}

fn errno(e: &Error) -> Errno {
    match e {
        Error::NotOurAddress(_) => Errno::EADDRNOTAVAIL,
        Error::NoSource(_) | Error::NoRoute(_) => Errno::ENETUNREACH,
        Error::AddrInUse(_) => Errno::EADDRINUSE,
        Error::NoPorts => Errno::EADDRNOTAVAIL,
        Error::TooManyConnections(_) => Errno::ENOBUFS,
        Error::BadRemote(_) | Error::Config(_) => Errno::EINVAL,
    }
}

impl Host {
    /// The stack; made now if need be.
    fn stack(&mut self) -> Result<&mut Stack<siw_tcp::VecBuf, Vec<u8>>, Errno> {
        if self.stack.is_none() {
            let s = Stack::new(self.setup.stack_config(), self.now).map_err(|e| errno(&e))?;
            self.stack = Some(s);
        }
        self.stack.as_mut().ok_or(Errno::EINVAL)
    }

    fn find(&mut self, fd: i32) -> Result<&mut Socket, Errno> {
        self.sockets.get_mut(&fd).ok_or(Errno::EBADF)
    }

    fn connection(&mut self, fd: i32) -> Result<ConnId, Errno> {
        match self.find(fd)?.kind {
            Kind::Conn(id) => Ok(id),
            _ => Err(Errno::ENOTCONN),
        }
    }

    fn condition(&mut self, id: ConnId) -> &mut Condition {
        self.conns.entry(id).or_default()
    }

    fn add(&mut self, kind: Kind, v6: bool) -> i32 {
        let mut fd = 3;
        while self.sockets.contains_key(&fd) {
            fd += 1;
        }
        let socket = Socket {
            kind,
            v6,
            bound: None,
            abort: false,
            deaf: false,
            queue: VecDeque::new(),
        };
        self.sockets.insert(fd, socket);
        fd
    }

    /// The lowest free number from 3.
    pub fn socket(&mut self, v6: bool) -> i32 {
        self.add(Kind::Fresh, v6)
    }

    pub fn bind(&mut self, fd: i32, to: SocketAddr) -> Result<(), Errno> {
        let local = self.setup.local;
        let s = self.find(fd)?;
        if s.bound.is_some() || !matches!(s.kind, Kind::Fresh) {
            return Err(Errno::EINVAL);
        }
        if to.is_ipv6() != s.v6 {
            return Err(Errno::EAFNOSUPPORT);
        }
        if !to.ip().is_unspecified() && to.ip() != local {
            return Err(Errno::EADDRNOTAVAIL);
        }
        s.bound = Some(to);
        Ok(())
    }

    pub fn listen(&mut self, fd: i32, backlog: i32) -> Result<(), Errno> {
        let s = self.find(fd)?;
        let bound = s.bound.ok_or(Errno::EDESTADDRREQ)?;
        if !matches!(s.kind, Kind::Fresh) {
            return Err(Errno::EINVAL);
        }
        let local = Some(bound.ip()).filter(|a: &IpAddr| !a.is_unspecified());
        let backlog = usize::try_from(backlog).unwrap_or(0);
        let id = self
            .stack()?
            .listen(local, bound.port(), backlog, fd as u64)
            .map_err(|e| errno(&e))?;
        self.find(fd)?.kind = Kind::Listening(id);
        Ok(())
    }

    pub fn accept(&mut self, fd: i32) -> Result<(i32, SocketAddr), Errno> {
        let s = self.find(fd)?;
        if !matches!(s.kind, Kind::Listening(_)) {
            return Err(Errno::EINVAL);
        }
        let id = s.queue.pop_front().ok_or(Errno::EAGAIN)?;
        let v6 = s.v6;
        let new = self.add(Kind::Conn(id), v6);
        let stack = self.stack()?;
        stack.set_user(id, new as u64);
        let remote = stack.conn(id).map(|c| c.remote).ok_or(Errno::EINVAL)?;
        self.condition(id).told = true;
        Ok((new, remote))
    }

    /// Begins with [`Errno::EINPROGRESS`]; called again, tells what came of it.
    pub fn connect(&mut self, fd: i32, to: SocketAddr) -> Result<(), Errno> {
        let s = self.find(fd)?;
        match s.kind {
            Kind::Listening(_) => Err(Errno::EISCONN),
            Kind::Conn(id) => {
                let c = self.condition(id);
                if let Some(e) = c.error.take() {
                    return Err(e);
                }
                match (c.connected, c.told) {
                    (true, true) => Err(Errno::EISCONN),
                    (true, false) => {
                        c.told = true;
                        Ok(())
                    }
                    (false, _) => Err(Errno::EALREADY),
                }
            }
            Kind::Fresh => {
                let (v6, bound) = (s.v6, s.bound);
                if to.is_ipv6() != v6 {
                    return Err(Errno::EAFNOSUPPORT);
                }
                let local = bound.map(|b| b.ip()).filter(|a| !a.is_unspecified());
                let port = bound.map(|b| b.port()).filter(|p| *p != 0);
                let now = self.now;
                let id = self
                    .stack()?
                    .connect(now, local, port, to, fd as u64)
                    .map_err(|e| errno(&e))?;
                self.find(fd)?.kind = Kind::Conn(id);
                self.conns.insert(id, Condition::default());
                self.newest = Some(id);
                self.turn();
                Err(Errno::EINPROGRESS)
            }
        }
    }

    /// Takes what the send buffer has room for; the last byte taken ends a message (PSH), unless
    /// the setup says otherwise.
    pub fn write(&mut self, fd: i32, data: &[u8]) -> Result<usize, Errno> {
        let id = self.connection(fd).map_err(|e| match e {
            Errno::ENOTCONN => Errno::EPIPE,
            e => e,
        })?;
        let c = self.condition(id);
        if let Some(e) = c.error.take() {
            return Err(e);
        }
        if c.closed {
            return Err(Errno::EPIPE);
        }
        if !c.connected {
            return Err(Errno::EAGAIN);
        }
        let (buffer, push) = (self.setup.send_buffer as usize, self.setup.push);
        let stack = self.stack()?;
        let info = stack.conn(id).ok_or(Errno::EPIPE)?;
        let room = buffer.saturating_sub((info.unsent + info.in_flight) as usize);
        let n = data.len().min(room);
        if n == 0 && !data.is_empty() {
            return Err(Errno::EAGAIN);
        }
        // Records as long as segments; of those that probe the path one is longer.
        let mut most = stack.probe_len(id).unwrap_or(info.emss);
        let mut left = &data[..n];
        while !left.is_empty() {
            let (record, rest) = left.split_at(left.len().min(most));
            stack
                .push_record(
                    id,
                    record.len() as u32,
                    record.to_vec(),
                    push && rest.is_empty(),
                )
                .map_err(|_| Errno::EPIPE)?;
            (left, most) = (rest, info.emss);
        }
        self.turn();
        Ok(n)
    }

    /// At most `max` bytes; none: the peer closed its direction.
    pub fn read(&mut self, fd: i32, max: usize) -> Result<Vec<u8>, Errno> {
        let id = self.connection(fd)?;
        let deaf = self.find(fd)?.deaf;
        let c = *self.condition(id);
        let mut out = vec![];
        if let Some(rx) = self.stack()?.rx_queue(id) {
            for chunk in rx.chunks() {
                let n = chunk.len().min(max - out.len());
                out.extend_from_slice(&chunk[..n]);
            }
            rx.consume(out.len());
        }
        self.turn();
        if !out.is_empty() || max == 0 {
            return Ok(out);
        }
        let error = self.condition(id).error.take();
        match error {
            Some(e) => Err(e),
            None if c.peer_fin || c.closed || deaf => Ok(out),
            None => Err(Errno::EAGAIN),
        }
    }

    /// Bytes that `read` would give (SIOCINQ).
    pub fn unread(&mut self, fd: i32) -> Result<usize, Errno> {
        let id = self.connection(fd)?;
        Ok(self.stack()?.conn(id).map_or(0, |c| c.readable))
    }

    pub fn shutdown(&mut self, fd: i32, how: Shutdown) -> Result<(), Errno> {
        let id = self.connection(fd)?;
        let now = self.now;
        self.find(fd)?.deaf |= how != Shutdown::Write;
        if how != Shutdown::Read {
            self.stack()?.close(now, id);
            self.turn();
        }
        Ok(())
    }

    pub fn close(&mut self, fd: i32) -> Result<(), Errno> {
        let s = self.sockets.remove(&fd).ok_or(Errno::EBADF)?;
        let now = self.now;
        match s.kind {
            Kind::Fresh => {}
            Kind::Listening(id) => {
                let stack = self.stack()?;
                stack.unlisten(now, id);
                for id in s.queue {
                    stack.abort(now, id);
                    stack.release(now, id);
                }
            }
            Kind::Conn(id) => {
                let stack = self.stack()?;
                if s.abort {
                    stack.abort(now, id);
                }
                self.turn();
                self.stack()?.release(now, id);
                self.conns.remove(&id);
            }
        }
        self.turn();
        Ok(())
    }

    /// SO_ERROR, which clears it.
    pub fn take_error(&mut self, fd: i32) -> Result<Option<Errno>, Errno> {
        match self.find(fd)?.kind {
            Kind::Conn(id) => Ok(self.condition(id).error.take()),
            _ => Ok(None),
        }
    }

    /// SO_SNDBUF.
    pub fn send_buffer(&self) -> u32 {
        self.setup.send_buffer
    }

    /// TCP_MAXSEG: payload of a segment now.
    pub fn mss(&mut self, fd: i32) -> Result<u16, Errno> {
        let id = self.connection(fd)?;
        Ok(self.stack()?.emss(id) as u16)
    }

    pub fn set_option(&mut self, fd: i32, o: SockOpt) -> Result<(), Errno> {
        let s = self.find(fd)?;
        match o {
            SockOpt::Harmless => return Ok(()),
            SockOpt::Linger(abort) => {
                s.abort = abort;
                return Ok(());
            }
            SockOpt::SendBuffer(n) => {
                self.setup.send_buffer = n;
                return Ok(());
            }
            _ => {}
        }
        if self.stack.is_some() {
            return Err(Errno::EINVAL);
        }
        let c = &mut self.setup.config;
        let keepalive = c.keepalive.unwrap_or(KEEPALIVE);
        match o {
            SockOpt::KeepAlive(on) => c.keepalive = on.then_some(keepalive),
            SockOpt::KeepIdle(idle) => c.keepalive = Some(Keepalive { idle, ..keepalive }),
            SockOpt::KeepInterval(interval) => {
                c.keepalive = Some(Keepalive {
                    interval,
                    ..keepalive
                });
            }
            SockOpt::KeepCount(probes) => {
                c.keepalive = Some(Keepalive {
                    probes,
                    ..keepalive
                })
            }
            SockOpt::UserTimeout(d) => c.user_timeout = d,
            SockOpt::Congestion(name) => {
                c.congestion = congestion(&name).ok_or(Errno::EINVAL)?;
            }
            SockOpt::ReceiveBuffer(n) => c.recv_window = n,
            SockOpt::SynCount(n) => c.syn_retries = n,
            SockOpt::Harmless | SockOpt::Linger(_) | SockOpt::SendBuffer(_) => {}
        }
        Ok(())
    }

    pub fn ready(&mut self, fd: i32) -> Result<Ready, Errno> {
        let buffer = self.setup.send_buffer;
        let s = self.find(fd)?;
        let id = match s.kind {
            Kind::Fresh => {
                return Ok(Ready {
                    writable: true,
                    hung_up: true,
                    ..Ready::default()
                });
            }
            Kind::Listening(_) => {
                return Ok(Ready {
                    readable: !s.queue.is_empty(),
                    ..Ready::default()
                });
            }
            Kind::Conn(id) => id,
        };
        let deaf = s.deaf;
        let c = *self.condition(id);
        let info = self.stack()?.conn(id);
        let over = c.closed || c.error.is_some();
        let room = info.is_some_and(|i| i.unsent + i.in_flight < buffer);
        Ok(Ready {
            readable: info.is_some_and(|i| i.readable > 0) || c.peer_fin || deaf || over,
            writable: c.connected && room || over,
            error: c.error.is_some(),
            peer_closed: c.peer_fin || over,
            hung_up: over,
        })
    }
}
