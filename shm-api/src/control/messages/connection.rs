//! Connection management: channels, connects, listeners, and their events.

use super::{Addr, PrivateData, Text};
use bytemuck::{Pod, Zeroable};

/// One fd in the `IdReply`: a SOCK_SEQPACKET socket with `CmEvent` packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CreateCmChannel {
    pub reserved: u64,
}

/// Closes a channel of connection events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DestroyCmChannel {
    pub channel: u32,
    pub reserved: u32,
}

/// Any device: route by address.
pub const ANY_DEVICE: u32 = u32::MAX;

/// Per-connection override of a device setting.
pub const BY_DEVICE: u8 = 0xff;

/// How a connection is made; used by [`Connect`] and [`Accept`].
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
    /// How often a connect that nobody listens for is tried again, a little later. With
    /// [`FEATURE_PAIRS`](super::FEATURE_PAIRS).
    pub refusals: u8,
    /// 1: a message without a receive work request waits for one, also where the device does not say
    /// so. With [`FEATURE_PAIRS`](super::FEATURE_PAIRS).
    pub waits_for_receives: u8,
    pub private_data: PrivateData,
}

/// Answered at once; the outcome is a CM event with `cookie`.
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
    /// Family 0: chosen by the daemon.
    pub src: Addr,
    pub params: ConnParams,
}

/// Connects a queue pair with one that the peer's program has named by its GID and number
/// (ibv_modify_qp(3) to RTR): both ends send this, in any order. Answered at once; work requests may
/// be posted from then on. A connection that comes to nothing is an asynchronous event, QP_FATAL.
/// With [`FEATURE_PAIRS`](super::FEATURE_PAIRS).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct PairQp {
    pub qp_num: u32,
    pub peer_qp_num: u32,
    /// Index.
    pub device: u32,
    /// Reads we may have outstanding.
    pub ord: u32,
    /// Reads the peer may have outstanding.
    pub ird: u32,
    /// What the peer may not do: [`crate::Access`] bits of [`crate::Access::REMOTE`].
    pub denied_access: u32,
    /// An address of the device; its port means nothing.
    pub local: Addr,
    /// The peer's address; its port means nothing.
    pub peer: Addr,
}

/// What a listener does in another way than its device.
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
    /// Reads at most; `u16::MAX` by the device.
    pub max_ird: u16,
    pub max_ord: u16,
    /// Milliseconds to wait for an MPA request; 0 by the device.
    pub request_timeout_ms: u32,
    /// Milliseconds an application may take to answer; 0 by the device.
    pub accept_timeout_ms: u32,
    /// Octets of private data accepted from a peer, 512 at most; `u16::MAX` by the device.
    pub private_data: u16,
    /// How Terminates begin: 0 as in the RFC, 1 as Linux siw has it, [`BY_DEVICE`].
    pub terminate: u8,
    /// Placement beyond holes: 0 off, 1 with markers, 2 also where segments are aligned,
    /// [`BY_DEVICE`].
    pub out_of_order: u8,
    pub reserved: u32,
}

impl MpaOptions {
    /// Everything as the device has it.
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

/// [`Bind::flags`]: other bindings with this flag may have the same port, until one listens.
pub const BIND_REUSE: u32 = 1;
/// [`Bind::flags`]: the unspecified IPv6 address stands for IPv6 addresses alone.
pub const BIND_V6_ONLY: u32 = 2;

/// Reserves an address and port (rdma_bind_addr(3)), answered with [`ListenReply`]. The number in
/// it is that of the binding: [`Listen`] makes it a listener, [`Unlisten`] gives it up. With
/// [`FEATURE_ADDRESSES`](super::FEATURE_ADDRESSES).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Bind {
    /// Index or [`ANY_DEVICE`].
    pub device: u32,
    /// `BIND_` bits.
    pub flags: u32,
    /// 0.0.0.0 stands for IPv4 addresses, `::` for all without [`BIND_V6_ONLY`], family 0 for all.
    /// Port 0: the daemon chooses.
    pub addr: Addr,
}

/// Which device leads to an address, and from which of its own (rdma_resolve_addr(3)). With
/// [`FEATURE_ADDRESSES`](super::FEATURE_ADDRESSES).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Resolve {
    /// Index or [`ANY_DEVICE`].
    pub device: u32,
    pub reserved: u32,
    pub dst: Addr,
    /// Family 0 or the unspecified address: chosen by the daemon.
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

/// Has events of a queue pair, a listener or binding, or a waiting request come to another channel
/// (rdma_migrate_id(3)); numbers that are 0 mean none. When it is answered, no further event
/// comes to the old channel. With [`FEATURE_ADDRESSES`](super::FEATURE_ADDRESSES).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct MigrateCm {
    pub cm_channel: u32,
    pub qp_num: u32,
    pub listener: u32,
    pub request: u32,
}

/// Accepts connections at an address (rdma_listen(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Listen {
    /// Index or [`ANY_DEVICE`].
    pub device: u32,
    /// Requests that may wait for an answer.
    pub backlog: u32,
    pub cm_channel: u32,
    /// A binding of this client, whose address and devices are used then; 0: none.
    pub binding: u32,
    /// Comes back in each CONNECT_REQUEST.
    pub cookie: u64,
    pub mpa: MpaOptions,
    /// Family 0 or the unspecified address: any. Port 0: the daemon chooses.
    pub addr: Addr,
}

/// A new listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ListenReply {
    pub listener: u32,
    pub reserved: u32,
    /// With the port in use.
    pub addr: Addr,
}

/// [`Unlisten::flags`]: requests that wait can still be answered.
pub const UNLISTEN_KEEP_REQUESTS: u32 = 1;

/// Ends a listener or a binding; without [`UNLISTEN_KEEP_REQUESTS`], requests that wait are
/// rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Unlisten {
    pub listener: u32,
    /// `UNLISTEN_` bits.
    pub flags: u32,
}

/// Answers a CONNECT_REQUEST with a QP; ESTABLISHED with `cookie` follows on the
/// listener's CM channel, or on `cm_channel` when it is not 0.
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

/// Graceful close; DISCONNECTED follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Disconnect {
    pub qp_num: u32,
    pub reserved: u32,
}

/// What happened to a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum CmEventKind {
    /// `request` waits for [`Accept`] or [`Reject`]; `cookie` is the listener's.
    ConnectRequest = 1,
    Established = 2,
    /// The peer said no, with private data.
    Rejected = 3,
    /// No answer, or no route.
    Unreachable = 4,
    /// Anything else that stops a connect: `errno` and `reason` say what.
    ConnectError = 5,
    /// Either side closed, or the connection broke (`errno` not 0).
    Disconnected = 6,
    /// A pending `request` is gone: its peer gave up.
    RequestCancelled = 7,
    /// The listener's device is gone.
    DeviceRemoval = 8,
}

impl CmEventKind {
    /// The kind with that number.
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
        ]
        .get((number as usize).wrapping_sub(1))
        .copied()
    }
}

/// One packet on a CM channel. Fields without meaning for the kind are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CmEventMessage {
    /// [`CmEventKind`].
    pub kind: u32,
    /// Positive errno.
    pub errno: u32,
    /// Of [`Connect`], [`Accept`], or [`Listen`] for CONNECT_REQUEST.
    pub cookie: u64,
    pub qp_num: u32,
    pub request: u32,
    pub listener: u32,
    pub device: u32,
    /// Whose doorbell ring the QP uses from now on (ESTABLISHED).
    pub worker: u32,
    /// Negotiated (ESTABLISHED) or the peer's offer (CONNECT_REQUEST).
    pub ird: u32,
    pub ord: u32,
    pub crc: u8,
    pub mpa_rev: u8,
    pub reserved: [u8; 2],
    pub local: Addr,
    pub peer: Addr,
    pub reason: Text<120>,
    pub private_data: PrivateData,
    pub reserved2: u32,
}
