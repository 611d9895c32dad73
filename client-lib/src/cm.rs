//! Connection management: channels that deliver events, listeners, connection requests (rdma_cm(7)
//! without its address resolution steps).

use crate::context::ClientInner;
use crate::high_descriptors::KeptDescriptor;
use crate::streaming::{check_feature, to_milliseconds};
use crate::{
    CmBinding, Context, Error, Failed, Qp, ServiceReply, ServiceRequest, StreamingConnection,
};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use siw_shm::control::{
    self, ANY_DEVICE, Accept, Addr, BY_DEVICE, CM_HOLD_DISCONNECTS, CM_OMIT_CANCELLATIONS,
    CM_REPORT_REMOVALS, CmEventKind, ConnParams, Connect, ControlSocket, CreateCmChannel,
    DestroyCmChannel, KIND_CM_EVENT, LISTEN_STREAMING, Listen, MigrateCm, MpaOptions, PrivateData,
    ProtoError, Reject, UNLISTEN_KEEP_REQUESTS, Unlisten,
};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Options for connecting and accepting.
#[derive(Debug, Clone, Copy)]
pub struct ConnectOptions<'a> {
    /// Device index; None routes by address.
    pub device: Option<u32>,
    /// Local address; None lets the daemon choose.
    pub src: Option<SocketAddr>,
    /// At most 512 bytes.
    pub private_data: &'a [u8],
    /// RDMA Reads this side may have outstanding (initiator_depth), clamped to the device's limit;
    /// the ESTABLISHED event has the negotiated value.
    pub ord: u32,
    /// RDMA Reads the peer may have outstanding (responder_resources), likewise.
    pub ird: u32,
    /// MPA CRC; None for the device's setting. `false` is refused with EPERM by a device with
    /// `crc = "required"`.
    pub crc: Option<bool>,
    /// MPA revision 1 or 2; None for the device's setting.
    pub mpa_rev: Option<u8>,
    /// None for the daemon's default.
    pub timeout: Option<Duration>,
    /// Number of retries, each after a short delay, while the peer refuses the connection.
    pub refusals: u8,
    /// SENDs of the peer wait for a receive work request of this end even if the device is not
    /// configured so (`receive_wait_ms`).
    pub wait_for_receives: bool,
    /// Returned in the events of this connection.
    pub cookie: u64,
}

impl Default for ConnectOptions<'_> {
    fn default() -> Self {
        ConnectOptions {
            device: None,
            src: None,
            private_data: &[],
            ord: 16,
            ird: 16,
            crc: None,
            mpa_rev: None,
            timeout: None,
            refusals: 0,
            wait_for_receives: false,
            cookie: 0,
        }
    }
}

impl ConnectOptions<'_> {
    pub(crate) fn device_index(&self) -> u32 {
        self.device.unwrap_or(ANY_DEVICE)
    }

    pub(crate) fn to_conn_params(self) -> Result<ConnParams, Error> {
        Ok(ConnParams {
            ord: self.ord,
            ird: self.ird,
            crc: self.crc.map_or(BY_DEVICE, u8::from),
            mpa_rev: self.mpa_rev.unwrap_or(BY_DEVICE),
            refusals: self.refusals,
            waits_for_receives: self.wait_for_receives.into(),
            private_data: private_data(self.private_data)?,
        })
    }
}

fn private_data(data: &[u8]) -> Result<PrivateData, Error> {
    PrivateData::new(data).ok_or(Error::Invalid("more than 512 bytes of private data"))
}

/// Connection data of an event. Fields that do not apply are empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConnectionInfo {
    /// Cookie of the connect, accept or listener that the event belongs to.
    pub cookie: u64,
    /// The queue pair, once there is one.
    pub qp_num: u32,
    /// Positive errno; 0 for success.
    pub errno: i32,
    /// Human-readable reason of a failure.
    pub reason: String,
    /// Address of this side.
    pub local: Option<SocketAddr>,
    /// The peer's address.
    pub peer: Option<SocketAddr>,
    /// RDMA Reads that the peer may have outstanding: negotiated, or as the peer offers.
    pub ird: u32,
    /// RDMA Reads that this side may have outstanding, likewise.
    pub ord: u32,
    /// FPDUs have CRCs.
    pub crc: bool,
    /// MPA revision.
    pub mpa_rev: u8,
    /// Private data from the peer.
    pub private_data: Vec<u8>,
}

/// An event of a CM channel.
#[derive(Debug)]
pub enum CmEvent {
    /// A peer wants to connect to a listener.
    ConnectRequest(ConnectionRequest),
    /// The connection exists; work requests may be posted.
    Established(ConnectionInfo),
    /// The peer rejected the connection.
    Rejected(ConnectionInfo),
    /// No answer, or no route.
    Unreachable(ConnectionInfo),
    /// The connection attempt failed for any other reason.
    ConnectError(ConnectionInfo),
    /// The connection has ended, gracefully or by an error (`errno`).
    Disconnected(ConnectionInfo),
    /// The peer of this pending request gave up.
    RequestCancelled {
        /// [`ConnectionRequest::id`].
        request: u32,
    },
    /// The device of a listener was removed.
    DeviceRemoval {
        /// Device index.
        device: u32,
        /// Cookie of the listener.
        cookie: u64,
    },
}

/// An event of a CM channel, including the outcomes of [`AddressResolution`](crate::AddressResolution) and
/// [`ServiceSearch`](crate::ServiceSearch), and requests to datagram services.
#[derive(Debug)]
pub enum RdmaCmEvent {
    /// An event of a connection or listener.
    Connection(CmEvent),
    /// The address was resolved; `local` is the source of a later connect.
    AddressResolved(ConnectionInfo),
    /// The address was not resolved (`errno`).
    AddressError(ConnectionInfo),
    /// A peer asks for the queue pair of a datagram service.
    ServiceRequest(ServiceRequest),
    /// A datagram service has answered, or not in time.
    ServiceReply(ServiceReply),
    /// A connection is in streaming mode: one of a peer to a listener with
    /// [`ListenOptions::streaming`].
    StreamOpened(StreamingConnection),
    /// A call on a connection in streaming mode is to be repeated, or the connection has ended (`errno`);
    /// [`StreamingConnection`] takes these from a channel of its own.
    StreamReady {
        /// Number of the connection.
        stream: u32,
        /// Reason of its end.
        info: ConnectionInfo,
    },
}

impl RdmaCmEvent {
    fn into_connection(self) -> Option<CmEvent> {
        match self {
            RdmaCmEvent::Connection(event) => Some(event),
            RdmaCmEvent::AddressResolved(_)
            | RdmaCmEvent::AddressError(_)
            | RdmaCmEvent::ServiceRequest(_)
            | RdmaCmEvent::ServiceReply(_)
            | RdmaCmEvent::StreamOpened(_)
            | RdmaCmEvent::StreamReady { .. } => None,
        }
    }
}

impl CmEvent {
    /// The data of ESTABLISHED; any other outcome of connecting or accepting is an error.
    pub(crate) fn into_established(
        self,
        peer: Option<SocketAddr>,
    ) -> Result<ConnectionInfo, Error> {
        let (what, info) = match self {
            CmEvent::Established(info) => return Ok(info),
            CmEvent::Rejected(info) => ("rejected by the peer", info),
            CmEvent::Unreachable(info) => ("unreachable", info),
            CmEvent::ConnectError(info) => ("failed", info),
            CmEvent::Disconnected(info) => ("the connection broke", info),
            CmEvent::RequestCancelled { .. } => ("the peer gave up", ConnectionInfo::default()),
            CmEvent::ConnectRequest(_) | CmEvent::DeviceRemoval { .. } => {
                return Err(Error::Invalid("unexpected event while connecting"));
            }
        };
        let peer = peer.or(info.peer);
        let peer = peer.map_or(String::new(), |peer| format!("{peer} "));
        let colon = if info.reason.is_empty() { "" } else { ": " };
        Err(Error::Connect(format!(
            "{peer}{what}{colon}{}",
            info.reason
        )))
    }
}

/// Delivers events of connections and listeners.
pub struct CmChannel {
    ctx: Arc<ClientInner>,
    id: u32,
    conn: KeptDescriptor<ControlSocket>,
}

impl AsFd for CmChannel {
    /// Readable when an event is pending or the daemon has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.conn.as_fd()
    }
}

impl AsRawFd for CmChannel {
    fn as_raw_fd(&self) -> RawFd {
        self.conn.as_fd().as_raw_fd()
    }
}

impl Drop for CmChannel {
    fn drop(&mut self) {
        self.ctx.free_object(&DestroyCmChannel {
            channel: self.id,
            reserved: 0,
        });
    }
}

impl CmChannel {
    /// A new channel.
    pub fn new(ctx: &Context) -> Result<CmChannel, Error> {
        Self::create(&ctx.0, 0)
    }

    /// A new channel for librdmacm, whose descriptor is readable only for events that the program gets:
    /// without [`CmEvent::RequestCancelled`], and with [`CmEvent::Disconnected`] after the completions
    /// that preceded it were polled, or after 10 ms. A device that is removed is reported by
    /// [`CmEvent::DeviceRemoval`] with a cookie of 0.
    pub fn for_rdma_cm(ctx: &Context) -> Result<CmChannel, Error> {
        let flags = CM_OMIT_CANCELLATIONS | CM_HOLD_DISCONNECTS | CM_REPORT_REMOVALS;
        Self::create(&ctx.0, flags)
    }

    pub(crate) fn create(ctx: &Arc<ClientInner>, flags: u64) -> Result<CmChannel, Error> {
        let (reply, fds) = ctx.call_daemon(&CreateCmChannel { flags })?;
        let fd = ctx.place_channel(fds.into_iter().next().ok_or(ProtoError::MissingFd)?);
        Ok(CmChannel {
            ctx: ctx.clone(),
            id: reply.id,
            conn: KeptDescriptor::new(fd.into())?,
        })
    }

    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    pub(crate) fn ctx(&self) -> &ClientInner {
        &self.ctx
    }

    /// The connection to the daemon.
    pub(crate) fn context(&self) -> &Arc<ClientInner> {
        &self.ctx
    }

    /// Waits for the next event. Outcomes of address resolutions, and events of datagram services, are
    /// discarded.
    pub fn get_event(&self, timeout: Option<Duration>) -> Result<CmEvent, Error> {
        loop {
            if let Some(event) = self.get_rdma_cm_event(timeout)?.into_connection() {
                return Ok(event);
            }
        }
    }

    /// As [`Self::get_event`], without waiting: None if no event is pending.
    pub fn try_get_event(&self) -> Result<Option<CmEvent>, Error> {
        while let Some(packet) = self.ctx.try_recv_event(&self.conn)? {
            if let Some(event) = self.parse_event(&packet)?.into_connection() {
                return Ok(Some(event));
            }
        }
        Ok(None)
    }

    /// Waits for the next event of any kind.
    pub fn get_rdma_cm_event(&self, timeout: Option<Duration>) -> Result<RdmaCmEvent, Error> {
        self.parse_event(&self.ctx.recv_event(&self.conn, timeout)?)
    }

    fn parse_event(&self, packet: &[u8]) -> Result<RdmaCmEvent, Error> {
        let message: control::CmEventMessage = control::decode_event(KIND_CM_EVENT, packet)?;
        let kind = CmEventKind::from_u32(message.kind).ok_or(Error::Invalid("unknown CM event"))?;
        let info = ConnectionInfo {
            cookie: message.cookie,
            qp_num: message.qp_num,
            errno: message.errno as i32,
            reason: message.reason.to_text(),
            local: message.local.to_socket_addr(),
            peer: message.peer.to_socket_addr(),
            ird: message.ird,
            ord: message.ord,
            crc: message.crc != 0,
            mpa_rev: message.mpa_rev,
            private_data: message.private_data.as_bytes().to_vec(),
        };
        Ok(RdmaCmEvent::Connection(match kind {
            CmEventKind::AddressResolved => return Ok(RdmaCmEvent::AddressResolved(info)),
            CmEventKind::AddressError => return Ok(RdmaCmEvent::AddressError(info)),
            CmEventKind::ServiceRequest => {
                return Ok(RdmaCmEvent::ServiceRequest(ServiceRequest::new(
                    self.ctx.clone(),
                    message.request,
                    message.device,
                    info,
                )));
            }
            CmEventKind::ServiceReply => {
                return Ok(RdmaCmEvent::ServiceReply(ServiceReply {
                    info,
                    device: message.device,
                    sidr_status: message.sidr_status,
                    qp_num: message.qp_num,
                    qkey: message.qkey,
                }));
            }
            CmEventKind::StreamOpened => {
                return Ok(RdmaCmEvent::StreamOpened(StreamingConnection::new(
                    self.ctx.clone(),
                    message.request,
                    message.device,
                    info,
                )));
            }
            CmEventKind::StreamReady => {
                let stream = message.request;
                return Ok(RdmaCmEvent::StreamReady { stream, info });
            }
            CmEventKind::ConnectRequest => CmEvent::ConnectRequest(ConnectionRequest {
                ctx: self.ctx.clone(),
                id: message.request,
                device: message.device,
                connection_info: Box::new(info),
                open: true,
            }),
            CmEventKind::Established => CmEvent::Established(info),
            CmEventKind::Rejected => CmEvent::Rejected(info),
            CmEventKind::Unreachable => CmEvent::Unreachable(info),
            CmEventKind::ConnectError => CmEvent::ConnectError(info),
            CmEventKind::Disconnected => CmEvent::Disconnected(info),
            CmEventKind::RequestCancelled => CmEvent::RequestCancelled {
                request: message.request,
            },
            CmEventKind::DeviceRemoval => CmEvent::DeviceRemoval {
                device: message.device,
                cookie: message.cookie,
            },
        }))
    }
}

impl Qp {
    /// Starts to connect; the outcome is an event with `options.cookie` on `channel`: ESTABLISHED,
    /// REJECTED, UNREACHABLE or CONNECT_ERROR.
    pub fn connect(
        &self,
        channel: &CmChannel,
        dst: SocketAddr,
        options: &ConnectOptions<'_>,
    ) -> Result<(), Error> {
        let ctx = self.pd().ctx();
        ctx.check_same(channel.ctx(), "connection event channel")?;
        ctx.call_daemon(&Connect {
            qp_num: self.qp_num(),
            device: options.device_index(),
            cm_channel: channel.id(),
            timeout_ms: to_milliseconds(options.timeout),
            cookie: options.cookie,
            dst: dst.into(),
            src: options.src.map_or(Addr::NONE, Addr::from),
            params: options.to_conn_params()?,
            stream: 0,
            reserved: 0,
        })?;
        Ok(())
    }

    /// Connects and waits for the outcome. The channel later delivers DISCONNECTED.
    pub fn connect_blocking(
        &self,
        dst: SocketAddr,
        options: &ConnectOptions<'_>,
    ) -> Result<(CmChannel, ConnectionInfo), Error> {
        let channel = CmChannel::create(self.pd().ctx(), 0)?;
        self.connect(&channel, dst, options)?;
        // The daemon's timeout expires first, with a more specific error.
        let timeout = options
            .timeout
            .map(|timeout| timeout.saturating_add(Duration::from_secs(2)));
        let info = channel.get_event(timeout)?.into_established(Some(dst))?;
        Ok((channel, info))
    }

    /// Moves the events of its connection to another channel; afterwards the old channel gets none.
    pub fn migrate_events(&self, channel: &CmChannel) -> Result<(), Error> {
        let ctx = self.pd().ctx();
        ctx.check_same(channel.ctx(), "connection event channel")?;
        ctx.call_daemon(&MigrateCm {
            cm_channel: channel.id(),
            qp_num: self.qp_num(),
            listener: 0,
            request: 0,
            search: 0,
        })?;
        Ok(())
    }
}

/// Options of a listener. None takes the setting of its device (`[device.mpa]` of siwd).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ListenOptions {
    /// Device index; None for all devices that the address fits.
    pub device: Option<u32>,
    /// Maximum number of pending connection requests; 0 for 128.
    pub backlog: u32,
    /// Returned in the events of its requests.
    pub cookie: u64,
    /// MPA CRC. `false` is refused with EPERM if a device has `crc = "required"`.
    pub crc: Option<bool>,
    /// Highest MPA revision, 1 or 2.
    pub mpa_rev: Option<u8>,
    /// Markers (RFC 5044 section 4.3).
    pub markers: Option<Markers>,
    /// Ready-to-receive kinds (RFC 6581 section 9).
    pub rtr: Option<ReadyToReceive>,
    /// Maximum number of RDMA Reads that a peer may have outstanding.
    pub max_ird: Option<u16>,
    /// Maximum number of RDMA Reads that this side may have outstanding.
    pub max_ord: Option<u16>,
    /// Time within which a peer has to send its MPA request.
    pub request_timeout: Option<Duration>,
    /// Time within which the application has to answer a connection request.
    pub accept_timeout: Option<Duration>,
    /// Maximum length of a peer's private data, up to 512 bytes.
    pub max_private_data: Option<u16>,
    /// Order of the first octet of Terminates sent to its peers.
    pub terminate: Option<TerminateOrder>,
    /// Streams that place payload received beyond a gap.
    pub out_of_order: Option<OutOfOrder>,
    /// Connections begin in streaming mode: each is an event [`RdmaCmEvent::StreamOpened`]. It counts for
    /// `backlog` until it ends or is accepted.
    pub streaming: bool,
}

/// The order of layer and type in the first octet of a Terminate (RFC 5040 section 4.8).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum TerminateOrder {
    /// Layer in the high half.
    Rfc = 0,
    /// Layer in the low half, as Linux siw sends and reads it.
    Siw = 1,
}

/// Out-of-order placement (RFC 5041 section 5.2). Only FPDUs with a valid CRC are placed out of
/// order; delivery is always in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum OutOfOrder {
    /// Everything is placed in order.
    Off = 0,
    /// Only streams with markers.
    Markers = 1,
    /// Also streams whose peer has sent every FPDU in a segment of its own so far.
    Aligned = 2,
}

/// Peers with known requirements, as `preset` of `[device.mpa]`; Windows peers need a device of their own,
/// with `preset = "windows"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerPreset {
    /// Linux siw: no markers, Terminates in its own octet order.
    Siw,
    /// Chelsio T4 to T6: Read as the only ready-to-receive, no markers, 32 RDMA Reads, 256 bytes of
    /// private data.
    Chelsio,
    /// Intel X722 and E810: Read or Write as ready-to-receive, no markers, 64 and 63 RDMA Reads.
    Intel,
}

/// MPA marker policy of a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Markers {
    /// Refuses peers that request markers.
    Never = 0,
    /// Sends markers to peers that request them.
    Accept = 1,
    /// Also requests markers from the peer.
    Request = 2,
}

/// A set of ready-to-receive kinds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReadyToReceive {
    /// A zero-length Send.
    pub send: bool,
    /// A zero-length RDMA Write.
    pub write: bool,
    /// A zero-length RDMA Read.
    pub read: bool,
}

impl ListenOptions {
    /// Options for peers of this kind; every field may be changed afterwards.
    pub fn for_peer(preset: PeerPreset) -> ListenOptions {
        let plain = ListenOptions {
            markers: Some(Markers::Never),
            ..Default::default()
        };
        let kinds = |write| ReadyToReceive {
            send: false,
            write,
            read: true,
        };
        match preset {
            PeerPreset::Siw => ListenOptions {
                terminate: Some(TerminateOrder::Siw),
                ..plain
            },
            PeerPreset::Chelsio => ListenOptions {
                rtr: Some(kinds(false)),
                max_ird: Some(32),
                max_ord: Some(32),
                max_private_data: Some(256),
                ..plain
            },
            PeerPreset::Intel => ListenOptions {
                rtr: Some(kinds(true)),
                max_ird: Some(64),
                max_ord: Some(63),
                ..plain
            },
        }
    }

    fn to_mpa_options(self) -> MpaOptions {
        MpaOptions {
            crc: self.crc.map_or(BY_DEVICE, u8::from),
            mpa_rev: self.mpa_rev.unwrap_or(BY_DEVICE),
            markers: self.markers.map_or(BY_DEVICE, |markers| markers as u8),
            rtr: self.rtr.map_or(BY_DEVICE, |reply| {
                u8::from(reply.send) | u8::from(reply.write) << 1 | u8::from(reply.read) << 2
            }),
            max_ird: self.max_ird.unwrap_or(u16::MAX),
            max_ord: self.max_ord.unwrap_or(u16::MAX),
            request_timeout_ms: to_milliseconds(self.request_timeout),
            accept_timeout_ms: to_milliseconds(self.accept_timeout),
            private_data: self.max_private_data.unwrap_or(u16::MAX),
            terminate: self.terminate.map_or(BY_DEVICE, |duration| duration as u8),
            out_of_order: self.out_of_order.map_or(BY_DEVICE, |policy| policy as u8),
            reserved: 0,
        }
    }
}

/// Accepts connections until dropped; its requests arrive on the channel.
pub struct CmListener {
    ctx: Arc<ClientInner>,
    id: u32,
    addr: SocketAddr,
    /// Flags of the UNLISTEN request on drop.
    flags: u32,
}

impl CmListener {
    /// Listens on `addr` (port 0: the daemon chooses) of one device or of all devices.
    pub fn new(
        channel: &CmChannel,
        device: Option<u32>,
        addr: SocketAddr,
        backlog: u32,
        cookie: u64,
    ) -> Result<CmListener, Error> {
        let options = ListenOptions {
            device,
            backlog: backlog.max(1),
            cookie,
            ..Default::default()
        };
        Self::new_with_options(channel, addr, &options)
    }

    /// Listens with the given options.
    pub fn new_with_options(
        channel: &CmChannel,
        addr: SocketAddr,
        options: &ListenOptions,
    ) -> Result<CmListener, Error> {
        Self::listen_with(channel, addr, options, options.to_mpa_options(), 0)
    }

    /// Listens on a bound address, on the devices of the binding.
    pub fn from_binding(
        channel: &CmChannel,
        binding: CmBinding,
        options: &ListenOptions,
    ) -> Result<CmListener, Failed<CmBinding>> {
        let (addr, mpa) = (binding.local_addr(), options.to_mpa_options());
        let listener = channel
            .ctx
            .check_same(binding.ctx(), "binding")
            .and_then(|()| Self::listen_with(channel, addr, options, mpa, binding.id()));
        match listener {
            Ok(listener) => {
                binding.forget();
                Ok(listener)
            }
            Err(error) => Err(Failed {
                object: binding,
                error,
            }),
        }
    }

    pub(crate) fn listen_with(
        channel: &CmChannel,
        addr: SocketAddr,
        options: &ListenOptions,
        mpa: MpaOptions,
        binding: u32,
    ) -> Result<CmListener, Error> {
        if options.streaming {
            check_feature(&channel.ctx)?;
        }
        let (reply, _) = channel.ctx.call_daemon(&Listen {
            device: options.device.unwrap_or(ANY_DEVICE),
            backlog: if options.backlog == 0 {
                128
            } else {
                options.backlog
            },
            cm_channel: channel.id,
            binding,
            cookie: options.cookie,
            mpa,
            addr: Addr::from(addr),
            flags: if options.streaming {
                LISTEN_STREAMING
            } else {
                0
            },
            reserved: 0,
        })?;
        let bound = reply.addr.to_socket_addr().unwrap_or(addr);
        Ok(CmListener {
            ctx: channel.ctx.clone(),
            id: reply.listener,
            addr: bound,
            flags: 0,
        })
    }

    /// Listening address, with the port in use.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Stops listening; requests already taken from the channel can still be answered. Waits for the
    /// daemon: afterwards the channel gets no further requests, and the port is free.
    pub fn close_keeping_requests(mut self) -> Result<(), Error> {
        self.flags = UNLISTEN_KEEP_REQUESTS;
        let context = self.ctx.clone();
        drop(self);
        context.confirm_posted()
    }

    /// Moves its requests to another channel; afterwards the old channel gets none.
    pub fn migrate(&self, channel: &CmChannel) -> Result<(), Error> {
        self.ctx
            .check_same(channel.ctx(), "connection event channel")?;
        self.ctx.call_daemon(&MigrateCm {
            cm_channel: channel.id,
            qp_num: 0,
            listener: self.id,
            request: 0,
            search: 0,
        })?;
        Ok(())
    }
}

impl Drop for CmListener {
    fn drop(&mut self) {
        self.ctx.free_object(&Unlisten {
            listener: self.id,
            flags: self.flags,
        });
    }
}

/// Connection request of a peer. Rejected when dropped without an answer.
pub struct ConnectionRequest {
    ctx: Arc<ClientInner>,
    id: u32,
    device: u32,
    /// Boxed: a request is also part of errors ([`Failed`]).
    connection_info: Box<ConnectionInfo>,
    open: bool,
}

impl std::fmt::Debug for ConnectionRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConnectRequest")
            .field("id", &self.id)
            .field("info", &self.connection_info)
            .finish()
    }
}

impl ConnectionRequest {
    /// Id of the request, as in [`CmEvent::RequestCancelled`].
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Device index.
    pub fn device(&self) -> u32 {
        self.device
    }

    /// The listener's cookie, addresses, private data, the peer's ird and ord.
    pub fn connection_info(&self) -> &ConnectionInfo {
        &self.connection_info
    }

    /// Accepts with a QP; ESTABLISHED follows on `channel`, or without one on the listener's
    /// channel. Private data, ord, ird and cookie come from `options`.
    ///
    /// # Errors
    /// The request comes back: it can be accepted with other options or another QP, or rejected.
    pub fn accept(
        self,
        qp: &Qp,
        channel: Option<&CmChannel>,
        options: &ConnectOptions<'_>,
    ) -> Result<(), Failed<ConnectionRequest>> {
        let answered = self.call_accept(qp, channel, options);
        self.end_answered(answered)
    }

    /// Ends the request once it is answered, or returns it with the error.
    fn end_answered(
        mut self,
        answered: Result<(), Error>,
    ) -> Result<(), Failed<ConnectionRequest>> {
        match answered {
            Ok(()) => {
                self.open = false;
                Ok(())
            }
            Err(error) => Err(Failed {
                object: self,
                error,
            }),
        }
    }

    fn call_accept(
        &self,
        qp: &Qp,
        channel: Option<&CmChannel>,
        options: &ConnectOptions<'_>,
    ) -> Result<(), Error> {
        self.ctx.check_same(qp.pd().ctx(), "queue pair")?;
        if let Some(channel) = channel {
            self.ctx
                .check_same(channel.ctx(), "connection event channel")?;
        }
        let params = options.to_conn_params()?;
        self.ctx.call_daemon(&Accept {
            request: self.id,
            qp_num: qp.qp_num(),
            cookie: options.cookie,
            cm_channel: channel.map_or(0, CmChannel::id),
            reserved: 0,
            params,
        })?;
        qp.allow_posting();
        Ok(())
    }

    /// Moves further events of the request to another channel: RequestCancelled, and the events
    /// after [`Self::accept`] without a channel.
    pub fn migrate(&self, channel: &CmChannel) -> Result<(), Error> {
        self.ctx
            .check_same(channel.ctx(), "connection event channel")?;
        self.ctx.call_daemon(&MigrateCm {
            cm_channel: channel.id,
            qp_num: 0,
            listener: 0,
            request: self.id,
            search: 0,
        })?;
        Ok(())
    }

    /// Rejects the connection, with private data.
    ///
    /// # Errors
    /// The request comes back: it can be rejected with shorter private data, or accepted.
    pub fn reject(self, private: &[u8]) -> Result<(), Failed<ConnectionRequest>> {
        let answered = self.call_reject(private);
        self.end_answered(answered)
    }

    fn call_reject(&self, private: &[u8]) -> Result<(), Error> {
        self.ctx.call_daemon(&Reject {
            request: self.id,
            private_data: private_data(private)?,
        })?;
        Ok(())
    }
}

impl Drop for ConnectionRequest {
    fn drop(&mut self) {
        if self.open
            && let Some(private_data) = PrivateData::new(&[])
        {
            self.ctx.free_object(&Reject {
                request: self.id,
                private_data,
            });
        }
    }
}
