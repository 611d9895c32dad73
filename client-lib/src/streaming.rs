//! Connections in streaming mode (RFC 5044 section 7.1.3): TCP bytes first, and RDMA from an octet on that
//! both programs agree on, as iSER's login phase does.

use crate::cm::{
    CmChannel, CmEvent, ConnectOptions, ConnectionInfo, ConnectionRequest, RdmaCmEvent,
};
use crate::context::ClientInner;
use crate::deadline::Deadline;
use crate::{Context, Error, Failed, Qp};
use rustix::fd::{AsFd, BorrowedFd};
use siw_shm::control::{
    ANY_DEVICE, Addr, Connect, END_RESET, END_SENDING, EndStream, FEATURE_STREAMING, MigrateCm,
    OpenStream, ReceiveStream, STREAM_BYTES, STREAM_CLOSED, SendStream, TurnStream,
};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

/// Fails if the daemon is older than the streaming mode.
pub(crate) fn check_feature(client: &ClientInner) -> Result<(), Error> {
    if client.has_feature(FEATURE_STREAMING) {
        return Ok(());
    }
    Err(Error::Refused {
        errno: libc::EOPNOTSUPP,
        reason: "this siwd has no streaming mode: update it".into(),
    })
}

pub(crate) fn to_milliseconds(time: Option<Duration>) -> u32 {
    let millis = time.map_or(0, |time| time.as_millis().max(1));
    u32::try_from(millis).unwrap_or(u32::MAX)
}

/// Options of [`StreamingConnection::open`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StreamOptions {
    /// Device index; None routes by address.
    pub device: Option<u32>,
    /// Local address; None lets the daemon choose. The port is always drawn.
    pub src: Option<IpAddr>,
    /// Time for the TCP connection; None for the daemon's default.
    pub timeout: Option<Duration>,
    /// Time without a byte in either direction after which the daemon resets the connection; None for the
    /// device's `accept_timeout_ms`.
    pub idle_timeout: Option<Duration>,
}

/// A TCP connection that is being opened in streaming mode. Dropped, the attempt ends.
pub struct OpeningStream {
    ctx: Arc<ClientInner>,
    number: u32,
    /// None after the end of the attempt.
    channel: Option<CmChannel>,
}

impl std::fmt::Debug for OpeningStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpeningStream")
            .field("number", &self.number)
            .finish()
    }
}

impl OpeningStream {
    /// Begins to open a TCP connection to `dst`.
    ///
    /// # Errors
    /// As of [`StreamingConnection::open`].
    pub fn start(
        context: &Context,
        dst: SocketAddr,
        options: &StreamOptions,
    ) -> Result<OpeningStream, Error> {
        let ctx = &context.0;
        check_feature(ctx)?;
        let channel = CmChannel::create(ctx, 0)?;
        let (reply, _) = ctx.call_daemon(&OpenStream {
            device: options.device.unwrap_or(ANY_DEVICE),
            cm_channel: channel.id(),
            timeout_ms: to_milliseconds(options.timeout),
            idle_timeout_ms: to_milliseconds(options.idle_timeout),
            cookie: 0,
            dst: dst.into(),
            src: options.src.map_or(Addr::NONE, Addr::from),
        })?;
        Ok(OpeningStream {
            ctx: ctx.clone(),
            number: reply.id,
            channel: Some(channel),
        })
    }

    /// Waits until the connection is established.
    ///
    /// # Errors
    /// As of [`StreamingConnection::open`], or [`Error::Timeout`].
    pub fn finish(&mut self, timeout: Option<Duration>) -> Result<StreamingConnection, Error> {
        let channel = self.channel.as_ref().ok_or(Error::Invalid(ENDED))?;
        let event = channel.get_rdma_cm_event(timeout)?;
        let channel = self.channel.take();
        self.number = 0;
        match event {
            RdmaCmEvent::StreamOpened(mut opened) => {
                opened.channel = channel;
                Ok(opened)
            }
            event => Err(failure_of(event)),
        }
    }

    /// As [`Self::finish`], without waiting; None: it is not established yet.
    ///
    /// # Errors
    /// As of [`StreamingConnection::open`].
    pub fn try_finish(&mut self) -> Result<Option<StreamingConnection>, Error> {
        match self.finish(Some(Duration::ZERO)) {
            Err(Error::Timeout) => Ok(None),
            finished => finished.map(Some),
        }
    }

    /// A descriptor that is readable when the attempt has ended.
    ///
    /// # Errors
    /// The attempt has ended before.
    pub fn descriptor(&self) -> Result<BorrowedFd<'_>, Error> {
        let channel = self.channel.as_ref();
        Ok(channel.ok_or(Error::Invalid(ENDED))?.as_fd())
    }
}

impl Drop for OpeningStream {
    fn drop(&mut self) {
        if self.number != 0 {
            self.ctx.free_object(&EndStream {
                stream: self.number,
                flags: END_RESET,
            });
        }
    }
}

const ENDED: &str = "the attempt to open this connection has ended";

/// A connection in streaming mode, opened by [`Self::open`] or accepted from a listener with
/// [`ListenOptions::streaming`](crate::ListenOptions::streaming). Dropped, it is closed in order.
///
/// Bytes that it has not received belong to MPA once it turns to RDMA: receive no more of them than the
/// agreement of the two programs allows. TCP's windows bound the bytes in flight and those that wait here.
///
/// ```no_run
/// use siw::{CmChannel, ConnectOptions, Context, Cq, QpInit, StreamOptions, StreamingConnection};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let context = Context::open(None)?;
/// let peer = "10.0.0.2:3260".parse()?;
/// let mut stream = StreamingConnection::open(&context, peer, &StreamOptions::default())?;
/// stream.send_all(b"login", None)?;
/// let mut answer = [0; 5];
/// stream.receive_exact(&mut answer, None)?;
/// let cq = Cq::new(&context, 64, None)?;
/// let qp = context.alloc_pd()?.create_qp(&cq, &cq, &QpInit::default())?;
/// let channel = CmChannel::new(&context)?;
/// stream.start_initiator(&qp, &channel, &ConnectOptions::default())?;
/// println!("{:?}", channel.get_event(None)?);
/// # Ok(()) }
/// ```
pub struct StreamingConnection {
    ctx: Arc<ClientInner>,
    number: u32,
    device: u32,
    /// Boxed: a connection is also part of errors ([`Failed`]).
    info: Box<ConnectionInfo>,
    /// Delivers its events; none before the first call of a connection from a listener.
    channel: Option<CmChannel>,
}

impl std::fmt::Debug for StreamingConnection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StreamingConnection")
            .field("number", &self.number)
            .field("info", &self.info)
            .finish()
    }
}

impl StreamingConnection {
    pub(crate) fn new(
        ctx: Arc<ClientInner>,
        number: u32,
        device: u32,
        info: ConnectionInfo,
    ) -> StreamingConnection {
        StreamingConnection {
            ctx,
            number,
            device,
            info: Box::new(info),
            channel: None,
        }
    }

    /// Opens a TCP connection to `dst` and waits until it is established.
    ///
    /// # Errors
    /// [`Error::Refused`] with ECONNREFUSED, EHOSTUNREACH, ETIMEDOUT, ENOBUFS (a limit of the user), or
    /// EOPNOTSUPP (the daemon has no streaming mode).
    pub fn open(
        context: &Context,
        dst: SocketAddr,
        options: &StreamOptions,
    ) -> Result<StreamingConnection, Error> {
        let mut opening = OpeningStream::start(context, dst, options)?;
        // The daemon's time-out expires first, with a more specific error.
        let timeout = options.timeout;
        opening.finish(timeout.map(|time| time.saturating_add(Duration::from_secs(2))))
    }

    /// Address of this side.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.info.local
    }

    /// The peer's address.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.info.peer
    }

    /// Device index.
    pub fn device(&self) -> u32 {
        self.device
    }

    /// Its addresses, and the cookie of the listener that it came from.
    pub fn connection_info(&self) -> &ConnectionInfo {
        &self.info
    }

    /// The channel of its events, which is made at the first call.
    fn events(&mut self) -> Result<&CmChannel, Error> {
        if self.channel.is_none() {
            let channel = CmChannel::create(&self.ctx, 0)?;
            self.ctx.call_daemon(&MigrateCm {
                cm_channel: channel.id(),
                qp_num: 0,
                listener: 0,
                request: self.number,
                search: 0,
            })?;
            self.channel = Some(channel);
        }
        self.channel.as_ref().ok_or(Error::Invalid("no channel"))
    }

    /// A descriptor that is readable when a call which returned None is to be repeated, by
    /// [`Self::take_events`] and the call.
    ///
    /// # Errors
    /// The daemon has no room for another channel.
    pub fn descriptor(&mut self) -> Result<BorrowedFd<'_>, Error> {
        Ok(self.events()?.as_fd())
    }

    /// Takes the events that made the descriptor readable.
    ///
    /// # Errors
    /// The connection has ended: ECONNRESET or ETIMEDOUT.
    pub fn take_events(&mut self) -> Result<(), Error> {
        loop {
            match self.wait_for_event(Some(Duration::ZERO)) {
                Ok(()) => {}
                Err(Error::Timeout) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits until a call that transferred nothing is to be repeated.
    fn wait_for_event(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        match self.events()?.get_rdma_cm_event(timeout)? {
            RdmaCmEvent::StreamReady { info, .. } if info.errno == 0 => Ok(()),
            event => Err(failure_of(event)),
        }
    }

    /// The error of a call on a connection that the daemon does not know any more: the reason of its end, if
    /// no call has returned it yet.
    fn name_end(&mut self, error: Error) -> Error {
        if error.errno() != libc::ENOTCONN {
            return error;
        }
        match self.take_events() {
            Ok(()) => error,
            Err(end) => end,
        }
    }

    /// Sends as many of the bytes as TCP takes at once; None if it takes none.
    ///
    /// # Errors
    /// [`Error::Refused`] with ECONNRESET or ETIMEDOUT (the connection has ended; later calls: ENOTCONN), or
    /// EPIPE ([`Self::close_sending`] was called).
    pub fn try_send(&mut self, bytes: &[u8]) -> Result<Option<usize>, Error> {
        if bytes.is_empty() {
            return Ok(Some(0));
        }
        self.events()?;
        let len = bytes.len().min(STREAM_BYTES);
        let mut request = SendStream {
            stream: self.number,
            len: len as u32,
            bytes: [0; STREAM_BYTES],
        };
        request.bytes[..len].copy_from_slice(&bytes[..len]);
        let called = self.ctx.call_daemon(&request);
        let (reply, _) = called.map_err(|error| self.name_end(error))?;
        Ok((reply.len > 0).then_some(reply.len as usize))
    }

    /// Reads received bytes into `buffer`; `Some(0)`: the peer has closed its direction. None if there are
    /// none.
    ///
    /// # Errors
    /// [`Error::Refused`] with ECONNRESET or ETIMEDOUT: the connection has ended; later calls: ENOTCONN.
    pub fn try_receive(&mut self, buffer: &mut [u8]) -> Result<Option<usize>, Error> {
        if buffer.is_empty() {
            return Ok(Some(0));
        }
        self.events()?;
        let len = buffer.len().min(STREAM_BYTES);
        let called = self.ctx.call_daemon(&ReceiveStream {
            stream: self.number,
            len: len as u32,
        });
        let (reply, _) = called.map_err(|error| self.name_end(error))?;
        let received = reply.bytes.get(..reply.len as usize).unwrap_or(&[]);
        let received = &received[..received.len().min(len)];
        buffer[..received.len()].copy_from_slice(received);
        let is_closed = reply.flags & STREAM_CLOSED != 0;
        Ok((is_closed || !received.is_empty()).then_some(received.len()))
    }

    /// Sends all bytes.
    ///
    /// # Errors
    /// As of [`Self::try_send`], or [`Error::Timeout`]: some of the bytes may have been sent.
    pub fn send_all(&mut self, bytes: &[u8], timeout: Option<Duration>) -> Result<(), Error> {
        let deadline = Deadline::after(timeout);
        let mut rest = bytes;
        while !rest.is_empty() {
            match self.try_send(rest)? {
                Some(sent) => rest = rest.get(sent..).unwrap_or(&[]),
                None => self.wait_for_event(deadline.left())?,
            }
        }
        Ok(())
    }

    /// Waits for bytes and reads at most `buffer.len()` of them; 0: the peer has closed its direction.
    ///
    /// # Errors
    /// As of [`Self::try_receive`], or [`Error::Timeout`].
    pub fn receive(
        &mut self,
        buffer: &mut [u8],
        timeout: Option<Duration>,
    ) -> Result<usize, Error> {
        let deadline = Deadline::after(timeout);
        loop {
            match self.try_receive(buffer)? {
                Some(received) => return Ok(received),
                None => self.wait_for_event(deadline.left())?,
            }
        }
    }

    /// Fills the buffer with received bytes.
    ///
    /// # Errors
    /// As of [`Self::receive`]; ECONNRESET if the peer closes its direction before. Bytes that have arrived by
    /// then are lost.
    pub fn receive_exact(
        &mut self,
        buffer: &mut [u8],
        timeout: Option<Duration>,
    ) -> Result<(), Error> {
        let deadline = Deadline::after(timeout);
        let mut filled = 0;
        while filled < buffer.len() {
            match self.receive(&mut buffer[filled..], deadline.left())? {
                0 => {
                    return Err(Error::Refused {
                        errno: libc::ECONNRESET,
                        reason: "the peer closed the connection before the last byte".into(),
                    });
                }
                received => filled += received,
            }
        }
        Ok(())
    }

    /// Closes the sending direction; bytes of the peer can still be received. It cannot turn to RDMA then.
    ///
    /// # Errors
    /// [`Error::DaemonGone`].
    pub fn close_sending(&mut self) -> Result<(), Error> {
        self.end(END_SENDING)
    }

    /// Resets the connection: bytes that were not sent are lost.
    ///
    /// # Errors
    /// [`Error::DaemonGone`].
    pub fn reset(mut self) -> Result<(), Error> {
        self.end(END_RESET)?;
        self.number = 0;
        Ok(())
    }

    fn end(&self, flags: u32) -> Result<(), Error> {
        let stream = self.number;
        self.ctx.call_daemon(&EndStream { stream, flags })?;
        Ok(())
    }

    /// Turns to RDMA with a queue pair, as the MPA initiator: the MPA request follows the last byte sent. The
    /// outcome is an event on `channel`, as of [`Qp::connect`]. Addresses and `refusals` of the options have no
    /// meaning.
    ///
    /// # Errors
    /// The connection comes back.
    pub fn start_initiator(
        mut self,
        qp: &Qp,
        channel: &CmChannel,
        options: &ConnectOptions<'_>,
    ) -> Result<(), Failed<StreamingConnection>> {
        match self.call_connect(qp, channel, options) {
            Ok(()) => {
                self.number = 0;
                Ok(())
            }
            Err(error) => Err(Failed {
                object: self,
                error,
            }),
        }
    }

    fn call_connect(
        &self,
        qp: &Qp,
        channel: &CmChannel,
        options: &ConnectOptions<'_>,
    ) -> Result<(), Error> {
        self.ctx.check_same(qp.pd().ctx(), "queue pair")?;
        self.ctx
            .check_same(channel.ctx(), "connection event channel")?;
        self.ctx.call_daemon(&Connect {
            qp_num: qp.qp_num(),
            device: self.device,
            cm_channel: channel.id(),
            timeout_ms: to_milliseconds(options.timeout),
            cookie: options.cookie,
            dst: Addr::NONE,
            src: Addr::NONE,
            params: options.to_conn_params()?,
            stream: self.number,
            reserved: 0,
        })?;
        Ok(())
    }

    /// Turns to RDMA as the MPA responder: all bytes that were not received are MPA's. An event with `cookie`
    /// follows on `channel`: [`CmEvent::ConnectRequest`], which is answered as any other, or
    /// [`CmEvent::ConnectError`] if the peer sends no MPA request in time, or another one than its listener or
    /// device accepts.
    ///
    /// # Errors
    /// The connection comes back.
    pub fn start_responder(
        mut self,
        channel: &CmChannel,
        cookie: u64,
    ) -> Result<(), Failed<StreamingConnection>> {
        match self.call_turn(channel, cookie) {
            Ok(()) => {
                self.number = 0;
                Ok(())
            }
            Err(error) => Err(Failed {
                object: self,
                error,
            }),
        }
    }

    fn call_turn(&self, channel: &CmChannel, cookie: u64) -> Result<(), Error> {
        self.ctx
            .check_same(channel.ctx(), "connection event channel")?;
        self.ctx.call_daemon(&TurnStream {
            stream: self.number,
            cm_channel: channel.id(),
            cookie,
        })?;
        Ok(())
    }

    /// As [`Self::start_responder`], and waits for the peer's MPA request. Give
    /// [`ConnectionRequest::accept`] a channel.
    ///
    /// # Errors
    /// The connection has ended.
    pub fn await_request(self, timeout: Option<Duration>) -> Result<ConnectionRequest, Error> {
        let channel = CmChannel::create(&self.ctx, 0)?;
        self.start_responder(&channel, 0)
            .map_err(|failed| failed.error)?;
        match channel.get_rdma_cm_event(timeout)? {
            RdmaCmEvent::Connection(CmEvent::ConnectRequest(request)) => Ok(request),
            event => Err(failure_of(event)),
        }
    }
}

impl Drop for StreamingConnection {
    fn drop(&mut self) {
        if self.number != 0 {
            self.ctx.free_object(&EndStream {
                stream: self.number,
                flags: 0,
            });
        }
    }
}

/// The error of an event that is not the expected one.
fn failure_of(event: RdmaCmEvent) -> Error {
    let info = match event {
        RdmaCmEvent::StreamReady { info, .. } => info,
        RdmaCmEvent::Connection(
            CmEvent::Rejected(info)
            | CmEvent::Unreachable(info)
            | CmEvent::ConnectError(info)
            | CmEvent::Disconnected(info),
        ) => info,
        _ => return Error::Invalid("unexpected event of a connection in streaming mode"),
    };
    Error::Refused {
        errno: info.errno.max(1),
        reason: info.reason,
    }
}

impl CmChannel {
    /// Waits for a connection to a listener with
    /// [`ListenOptions::streaming`](crate::ListenOptions::streaming). Other events are discarded.
    pub fn accept_stream(&self, timeout: Option<Duration>) -> Result<StreamingConnection, Error> {
        let deadline = Deadline::after(timeout);
        loop {
            if let RdmaCmEvent::StreamOpened(stream) = self.get_rdma_cm_event(deadline.left())? {
                return Ok(stream);
            }
        }
    }
}
