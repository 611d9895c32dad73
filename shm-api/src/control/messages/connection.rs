//! Connection management: channels, connects, listeners, and their events.

use super::{Addr, PrivateData, Text};
use bytemuck::{Pod, Zeroable};

/// Creates a channel of connection events. One fd in the `IdReply`: a SOCK_SEQPACKET socket with
/// `CmEvent` packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CreateCmChannel {
    /// Bits of `CM_`; daemons that do not know one ignore it.
    pub flags: u64,
}

/// Flag of [`CreateCmChannel`]: no RequestCancelled events. The consumer learns that the peer has left
/// when it accepts.
pub const CM_OMIT_CANCELLATIONS: u64 = 1;
/// Flag of [`CreateCmChannel`]: a Disconnected event comes once the consumer has polled the completions
/// that preceded it, or after 10 ms.
pub const CM_HOLD_DISCONNECTS: u64 = 2;
/// Flag of [`CreateCmChannel`]: the removal of any device is reported by a DeviceRemoval event with a
/// cookie of 0, in addition to those of listeners.
pub const CM_REPORT_REMOVALS: u64 = 4;

/// Closes a channel of connection events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DestroyCmChannel {
    pub channel: u32,
    pub reserved: u32,
}

/// Any device: the route to the address selects it.
pub const ANY_DEVICE: u32 = u32::MAX;

/// Use the device's setting instead of a per-connection override.
pub const BY_DEVICE: u8 = 0xff;

/// Parameters of a connection; used by [`Connect`] and [`Accept`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ConnParams {
    /// Reads we may have outstanding (initiator_depth).
    pub ord: u32,
    /// Reads the peer may have outstanding (responder_resources).
    pub ird: u32,
    /// 0 off, 1 on, [`BY_DEVICE`].
    pub crc: u8,
    /// 1, 2, [`BY_DEVICE`].
    pub mpa_rev: u8,
    /// Number of times that a refused connect is retried, after a short delay, when no listener
    /// exists yet.
    pub refusals: u8,
    /// 1: a message without a receive work request waits for one, even if the device is configured
    /// otherwise.
    pub waits_for_receives: u8,
    pub private_data: PrivateData,
}

/// Connects a queue pair. Answered at once; the outcome is a CM event with `cookie`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Connect {
    pub qp_num: u32,
    /// Index or [`ANY_DEVICE`].
    pub device: u32,
    pub cm_channel: u32,
    /// Milliseconds; 0 for the default.
    pub timeout_ms: u32,
    pub cookie: u64,
    pub dst: Addr,
    /// Family 0: the daemon chooses.
    pub src: Addr,
    pub params: ConnParams,
    /// A connection in streaming mode, which turns to RDMA with this end as the MPA initiator; 0: a new
    /// connection. `device`, `dst` and `src` are then those of the connection. With
    /// [`FEATURE_STREAMING`](super::FEATURE_STREAMING).
    pub stream: u32,
    pub reserved: u32,
}

/// Connects a queue pair with the one of the peer that the program has named by GID and number
/// (ibv_modify_qp(3) to RTR): both ends send this, in any order. Answered at once; work requests may
/// be posted from then on. A failed connection is reported as an asynchronous event, QP_FATAL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct PairQp {
    pub qp_num: u32,
    pub peer_qp_num: u32,
    /// Device index.
    pub device: u32,
    /// Reads we may have outstanding.
    pub ord: u32,
    /// Reads the peer may have outstanding.
    pub ird: u32,
    /// Rights that the peer is denied: [`crate::Access`] bits of [`crate::Access::REMOTE`].
    pub denied_access: u32,
    /// An address of the device; its port is ignored.
    pub local: Addr,
    /// The peer's address; its port is ignored.
    pub peer: Addr,
}

/// Settings of a listener that differ from those of its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct MpaOptions {
    /// 0 off, 1 on, [`BY_DEVICE`].
    pub crc: u8,
    /// Highest revision: 1, 2, [`BY_DEVICE`].
    pub mpa_rev: u8,
    /// 0 never, 1 accept, 2 request, [`BY_DEVICE`].
    pub markers: u8,
    /// Ready-to-receive kinds: 1 Send, 2 Write, 4 Read, OR-ed; [`BY_DEVICE`].
    pub rtr: u8,
    /// Maximum number of Reads; `u16::MAX`: as the device.
    pub max_ird: u16,
    pub max_ord: u16,
    /// Milliseconds to wait for an MPA request; 0: as the device.
    pub request_timeout_ms: u32,
    /// Milliseconds that an application may take to answer; 0: as the device.
    pub accept_timeout_ms: u32,
    /// Octets of private data accepted from a peer, at most 512; `u16::MAX`: as the device.
    pub private_data: u16,
    /// Bit order of Terminates: 0 as in the RFC, 1 as in Linux siw, [`BY_DEVICE`].
    pub terminate: u8,
    /// Placement beyond gaps: 0 off, 1 with markers, 2 also with aligned segments, [`BY_DEVICE`].
    pub out_of_order: u8,
    pub reserved: u32,
}

impl MpaOptions {
    /// All settings as configured for the device.
    pub const BY_DEVICE: MpaOptions = MpaOptions {
        crc: BY_DEVICE,
        mpa_rev: BY_DEVICE,
        markers: BY_DEVICE,
        rtr: BY_DEVICE,
        max_ird: u16::MAX,
        max_ord: u16::MAX,
        request_timeout_ms: 0,
        accept_timeout_ms: 0,
        private_data: u16::MAX,
        terminate: BY_DEVICE,
        out_of_order: BY_DEVICE,
        reserved: 0,
    };
}

/// [`Bind::flags`]: other bindings with this flag may share the port, until one of them listens.
pub const BIND_REUSE: u32 = 1;
/// [`Bind::flags`]: the unspecified IPv6 address matches IPv6 addresses only.
pub const BIND_V6_ONLY: u32 = 2;
/// [`Bind::flags`]: the port is one of datagram services (RDMA_PS_UDP), whose ports are those of no
/// connections. A listener on the binding gets [`CmEventKind::ServiceRequest`] events. With
/// [`FEATURE_SERVICES`](super::FEATURE_SERVICES).
pub const BIND_DATAGRAMS: u32 = 4;

/// Reserves an address and port (rdma_bind_addr(3)), answered with [`ListenReply`]. The number in the
/// reply is that of the binding: [`Listen`] makes it a listener, [`Unlisten`] releases it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Bind {
    /// Device index or [`ANY_DEVICE`].
    pub device: u32,
    /// `BIND_` bits.
    pub flags: u32,
    /// 0.0.0.0 matches all IPv4 addresses; `::` without [`BIND_V6_ONLY`], and family 0, match all
    /// addresses. Port 0: the daemon chooses.
    pub addr: Addr,
}

/// Resolves an address: the device that leads to it, and the local address of that device
/// (rdma_resolve_addr(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Resolve {
    /// Device index or [`ANY_DEVICE`].
    pub device: u32,
    pub reserved: u32,
    pub dst: Addr,
    /// Family 0 or the unspecified address: the daemon chooses.
    pub src: Addr,
}

/// A device and one of its addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ResolveReply {
    pub device: u32,
    pub reserved: u32,
    /// With the port of the request's `src`.
    pub local: Addr,
}

/// Resolves the neighbour by which a device reaches an address, and draws a source port. Answered at
/// once; the outcome is one event with `cookie`: [`CmEventKind::AddressResolved`] or
/// [`CmEventKind::AddressError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct StartResolution {
    /// Device index.
    pub device: u32,
    pub cm_channel: u32,
    /// Milliseconds after which the neighbour counts as absent.
    pub timeout_ms: u32,
    pub reserved: u32,
    pub cookie: u64,
    pub dst: Addr,
    /// One of the device's addresses. Port 0: the daemon draws one.
    pub src: Addr,
}

/// Ends a resolution: once this is answered, no event of it follows. A number that has ended is no error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct EndResolution {
    pub resolution: u32,
    pub reserved: u32,
}

/// Moves the events of a queue pair, of a listener or binding, of a pending request, or of a search for a
/// datagram service to another channel (rdma_migrate_id(3)); a number of 0 means none. Once it is answered,
/// no further event arrives on the old channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct MigrateCm {
    pub cm_channel: u32,
    pub qp_num: u32,
    pub listener: u32,
    pub request: u32,
    /// Number of a [`FindService`](super::FindService). With [`FEATURE_SERVICES`](super::FEATURE_SERVICES);
    /// a number that has ended is no error.
    pub search: u32,
}

/// Accepts connections at an address (rdma_listen(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Listen {
    /// Device index or [`ANY_DEVICE`].
    pub device: u32,
    /// Maximum number of requests that wait for an answer.
    pub backlog: u32,
    pub cm_channel: u32,
    /// A binding of this client, whose address and devices are used; 0: none.
    pub binding: u32,
    /// Returned in each CONNECT_REQUEST.
    pub cookie: u64,
    pub mpa: MpaOptions,
    /// Family 0 or the unspecified address: any. Port 0: the daemon chooses.
    pub addr: Addr,
    /// `LISTEN_` bits.
    pub flags: u32,
    pub reserved: u32,
}

/// [`Listen::flags`]: connections begin in streaming mode; each is reported by
/// [`CmEventKind::StreamOpened`]. With [`FEATURE_STREAMING`](super::FEATURE_STREAMING).
pub const LISTEN_STREAMING: u32 = 1;

/// A new listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ListenReply {
    pub listener: u32,
    pub reserved: u32,
    /// With the port in use.
    pub addr: Addr,
}

/// [`Unlisten::flags`]: pending requests can still be answered.
pub const UNLISTEN_KEEP_REQUESTS: u32 = 1;

/// Ends a listener or a binding; without [`UNLISTEN_KEEP_REQUESTS`], pending requests are rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Unlisten {
    pub listener: u32,
    /// `UNLISTEN_` bits.
    pub flags: u32,
}

/// Accepts a CONNECT_REQUEST with a QP; ESTABLISHED with `cookie` follows on the listener's CM
/// channel, or on `cm_channel` when it is not 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Accept {
    pub request: u32,
    pub qp_num: u32,
    pub cookie: u64,
    pub cm_channel: u32,
    pub reserved: u32,
    pub params: ConnParams,
}

/// Rejects a connection request (rdma_reject(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Reject {
    pub request: u32,
    pub private_data: PrivateData,
}

/// In [`Disconnect`]: the queue pair ends in ERROR, not in IDLE, so that receives posted after the end are
/// flushed, too. A daemon that does not know it leaves those in the queue.
pub const DISCONNECT_TO_ERROR: u32 = 1;

/// Closes a connection gracefully; DISCONNECTED follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Disconnect {
    pub qp_num: u32,
    /// [`DISCONNECT_TO_ERROR`] or 0.
    pub flags: u32,
}

/// Kind of a connection event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum CmEventKind {
    /// `request` waits for [`Accept`] or [`Reject`]; `cookie` is the listener's.
    ConnectRequest = 1,
    Established = 2,
    /// The peer rejected the connection, with private data.
    Rejected = 3,
    /// No answer, or no route.
    Unreachable = 4,
    /// The connect failed for any other reason, given by `errno` and `reason`.
    ConnectError = 5,
    /// Either side closed, or the connection broke (`errno` not 0).
    Disconnected = 6,
    /// A pending `request` is invalid: its peer gave up.
    RequestCancelled = 7,
    /// The listener's device was removed.
    DeviceRemoval = 8,
    /// A resolution succeeded: `local` is the source address with its port.
    AddressResolved = 9,
    /// A resolution failed (`errno`, `reason`).
    AddressError = 10,
    /// A peer asks for the queue pair of a datagram service, a listener on a binding with
    /// [`BIND_DATAGRAMS`]: `request` waits for [`AnswerFindService`](super::AnswerFindService); `cookie` is
    /// the listener's.
    ServiceRequest = 11,
    /// The outcome of a [`FindService`](super::FindService): `qp_num` and `qkey` of the service, or `errno`
    /// and `reason`, with `sidr_status` if the peer has refused.
    ServiceReply = 12,
    /// The connection `request` is in streaming mode: the outcome of [`OpenStream`](super::OpenStream) with
    /// its `cookie`, or a connection of a peer to a listener with [`LISTEN_STREAMING`] and the listener's.
    StreamOpened = 13,
    /// A call on the connection `request` that did not transfer anything is to be repeated, or the
    /// connection has ended (`errno` not 0).
    StreamReady = 14,
}

impl CmEventKind {
    /// The kind with this number.
    pub fn from_u32(number: u32) -> Option<CmEventKind> {
        use CmEventKind::*;
        [
            ConnectRequest,
            Established,
            Rejected,
            Unreachable,
            ConnectError,
            Disconnected,
            RequestCancelled,
            DeviceRemoval,
            AddressResolved,
            AddressError,
            ServiceRequest,
            ServiceReply,
            StreamOpened,
            StreamReady,
        ]
        .get((number as usize).wrapping_sub(1))
        .copied()
    }
}

/// One packet on a CM channel. Fields without a meaning for the kind are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CmEventMessage {
    /// [`CmEventKind`].
    pub kind: u32,
    /// Positive errno.
    pub errno: u32,
    /// Cookie of [`Connect`], [`Accept`], [`StartResolution`], or, for CONNECT_REQUEST, of [`Listen`].
    pub cookie: u64,
    pub qp_num: u32,
    pub request: u32,
    pub listener: u32,
    pub device: u32,
    /// Worker whose doorbell ring the QP uses from now on (ESTABLISHED).
    pub worker: u32,
    /// Negotiated (ESTABLISHED) or the peer's offer (CONNECT_REQUEST).
    pub ird: u32,
    pub ord: u32,
    pub crc: u8,
    pub mpa_rev: u8,
    /// Status in the peer's answer (SERVICE_REPLY); 0: it has named its queue pair.
    pub sidr_status: u8,
    pub reserved: u8,
    pub local: Addr,
    pub peer: Addr,
    pub reason: Text<120>,
    pub private_data: PrivateData,
    /// Q_Key of the peer's queue pair (SERVICE_REPLY).
    pub qkey: u32,
}
