//! Fixed structs of the control protocol. Every struct is `repr(C)`, without
//! implicit padding, and copied out of packets, never cast.
//!
//! Ids are per client, start at 1, and 0 means none, unless said otherwise.
//! Addresses are [`Addr`], strings are zero-padded UTF-8.

use bytemuck::{Pod, Zeroable};
use core::mem::size_of;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// First word of each packet: "siwd".
pub const MAGIC: u32 = u32::from_le_bytes(*b"siwd");
/// Raised with every change of a struct or layout in this crate.
pub const VERSION: u16 = 1;
/// Longest packet.
pub const MAX_PACKET: usize = 8192;
/// Most fds in one packet.
pub const MAX_FDS: usize = 72;
/// Most private data in MPA (RFC 5044 section 7.1.1).
pub const MAX_PRIVATE_DATA: usize = 512;

/// Before each message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Header {
    pub magic: u32,
    pub version: u16,
    /// [`Message::KIND`]; replies repeat the request's.
    pub kind: u16,
    /// Bytes of the packet, header included.
    pub len: u32,
    /// Chosen by the client, repeated in the reply; 0 in events.
    pub seq: u32,
    /// 0, or the errno of a failed request: then an [`ErrorReply`] follows.
    pub status: i32,
    pub reserved: u32,
}

/// What went wrong, for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ErrorReply {
    pub reason: Text<120>,
}

/// Zero-padded UTF-8.
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct Text<const N: usize>(pub [u8; N])
where
    [u8; N]: Pod;

impl<const N: usize> Text<N> {
    /// Cuts `s` at a character boundary.
    pub fn new(s: &str) -> Self {
        let mut end = s.len().min(N);
        while !s.is_char_boundary(end) {
            end -= 1;
        }
        let mut t = [0; N];
        t[..end].copy_from_slice(&s.as_bytes()[..end]);
        Text(t)
    }

    /// What precedes the first zero; replacement characters for what is not UTF-8.
    pub fn to_text(&self) -> String {
        let end = self.0.iter().position(|b| *b == 0).unwrap_or(N);
        String::from_utf8_lossy(&self.0[..end]).into_owned()
    }
}

impl<const N: usize> std::fmt::Debug for Text<N> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.to_text())
    }
}

/// An IP address and port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Addr {
    /// 0 none, 4, 6.
    pub family: u16,
    /// Host order.
    pub port: u16,
    pub scope_id: u32,
    /// Network order; IPv4 in the first four bytes.
    pub ip: [u8; 16],
}

impl Addr {
    /// No address.
    pub const NONE: Addr = Addr {
        family: 0,
        port: 0,
        scope_id: 0,
        ip: [0; 16],
    };

    /// None for family 0 and unknown families.
    pub fn to_socket_addr(self) -> Option<SocketAddr> {
        match self.family {
            4 => {
                let [a, b, c, d, ..] = self.ip;
                Some(SocketAddrV4::new(Ipv4Addr::new(a, b, c, d), self.port).into())
            }
            6 => {
                let ip = Ipv6Addr::from(self.ip);
                Some(SocketAddrV6::new(ip, self.port, 0, self.scope_id).into())
            }
            _ => None,
        }
    }
}

impl From<SocketAddr> for Addr {
    fn from(a: SocketAddr) -> Addr {
        let mut r = Addr {
            port: a.port(),
            ..Addr::from(a.ip())
        };
        if let SocketAddr::V6(v6) = a {
            r.scope_id = v6.scope_id();
        }
        r
    }
}

impl From<IpAddr> for Addr {
    fn from(a: IpAddr) -> Addr {
        let mut ip = [0; 16];
        let family = match a {
            IpAddr::V4(v4) => {
                ip[..4].copy_from_slice(&v4.octets());
                4
            }
            IpAddr::V6(v6) => {
                ip = v6.octets();
                6
            }
        };
        Addr {
            family,
            port: 0,
            scope_id: 0,
            ip,
        }
    }
}

/// Private data of a connection request or answer.
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct PrivateData {
    pub len: u32,
    pub data: [u8; MAX_PRIVATE_DATA],
}

impl PrivateData {
    /// None when it is longer than [`MAX_PRIVATE_DATA`].
    pub fn new(d: &[u8]) -> Option<PrivateData> {
        let mut p = PrivateData {
            len: d.len() as u32,
            data: [0; MAX_PRIVATE_DATA],
        };
        p.data.get_mut(..d.len())?.copy_from_slice(d);
        Some(p)
    }

    /// The bytes; a length out of range counts as the maximum.
    pub fn as_bytes(&self) -> &[u8] {
        &self.data[..(self.len as usize).min(MAX_PRIVATE_DATA)]
    }
}

impl std::fmt::Debug for PrivateData {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PrivateData({:02x?})", self.as_bytes())
    }
}

/// A request and what answers it.
pub trait Message: Pod {
    const KIND: u16;
    type Reply: Pod;
}

macro_rules! message {
    ($($kind:literal $req:ident -> $reply:ty;)*) => {
        $(impl Message for $req {
            const KIND: u16 = $kind;
            type Reply = $reply;
        })*
    };
}

message! {
    1 Hello -> HelloReply;
    2 QueryDevice -> DeviceReply;
    3 AllocPd -> IdReply;
    4 DeallocPd -> Empty;
    5 AllocArena -> ArenaReply;
    6 FreeArena -> Empty;
    7 RegMr -> MrReply;
    8 DeregMr -> Empty;
    9 CreateChannel -> IdReply;
    10 DestroyChannel -> Empty;
    11 CreateCq -> CqReply;
    12 DestroyCq -> Empty;
    13 CreateQp -> QpReply;
    14 ModifyQp -> QpStateReply;
    15 QueryQp -> QpStateReply;
    16 DestroyQp -> Empty;
    17 CreateCmChannel -> IdReply;
    18 DestroyCmChannel -> Empty;
    19 Connect -> Empty;
    20 Listen -> ListenReply;
    21 Unlisten -> Empty;
    22 Accept -> Empty;
    23 Reject -> Empty;
    24 Disconnect -> Empty;
    25 Stats -> StatsReply;
}

/// [`CmEvent`] packets.
pub const KIND_CM_EVENT: u16 = 100;
/// [`AsyncEvent`] packets.
pub const KIND_ASYNC_EVENT: u16 = 101;

/// Nothing to say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Empty {
    pub reserved: u64,
}

/// The id of what was created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct IdReply {
    pub id: u32,
    pub reserved: u32,
}

/// First message of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Hello {
    pub version: u32,
    pub pid: u32,
    /// For status output.
    pub name: Text<64>,
}

/// Reply to [`Hello`]. Fds in this order: worker state page (map read-only,
/// `n_workers * 64` bytes), doorbell region (`n_workers` rings of
/// `doorbell_capacity`, see `doorbell::ring_offset`), async event socket, then
/// `n_workers` eventfds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct HelloReply {
    pub version: u32,
    pub client_id: u32,
    pub n_workers: u32,
    pub n_devices: u32,
    /// Entries of each doorbell ring, a power of two.
    pub doorbell_capacity: u32,
    pub reserved: u32,
    pub limits: Limits,
    pub daemon: Text<64>,
}

/// What a client may ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Limits {
    pub max_qp: u32,
    pub max_qp_wr: u32,
    pub max_sge: u32,
    /// SGEs of a READ's local side.
    pub max_sge_rd: u32,
    pub max_inline: u32,
    pub max_cq: u32,
    pub max_cqe: u32,
    pub max_mr: u32,
    pub max_pd: u32,
    pub max_ord: u32,
    pub max_ird: u32,
    pub max_private_data: u32,
    pub max_msg: u64,
    pub max_mr_size: u64,
    pub max_arena: u64,
}

/// Asks about device `index`, 0-based and below `n_devices`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct QueryDevice {
    pub index: u32,
    pub reserved: u32,
}

/// Immediate data with SEND and WRITE (RFC 7306 section 6).
pub const CAP_IMMEDIATE: u64 = 1;
/// FetchAdd and CmpSwap (RFC 7306 section 5).
pub const CAP_ATOMIC: u64 = 2;
/// MPA markers (RFC 5044 section 4.3).
pub const CAP_MARKERS: u64 = 4;
/// Local invalidate, and READ with it.
pub const CAP_LOCAL_INV: u64 = 8;

/// Port state.
pub const PORT_DOWN: u32 = 1;
/// Port state.
pub const PORT_ACTIVE: u32 = 4;

/// A device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DeviceReply {
    pub index: u32,
    /// [`PORT_ACTIVE`] or [`PORT_DOWN`].
    pub port_state: u32,
    pub name: Text<32>,
    /// DPDK driver name.
    pub driver: Text<32>,
    pub mac: [u8; 6],
    /// Entries used in `ips`.
    pub n_ips: u16,
    pub mtu: u32,
    /// Mb/s, 0 when unknown.
    pub link_mbps: u32,
    /// 1 when CRC is wanted by default.
    pub crc: u8,
    pub mpa_rev: u8,
    pub reserved: [u8; 6],
    /// `CAP_` bits: capabilities beyond WRITE, READ, SEND.
    pub caps: u64,
    pub ips: [Addr; 8],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct AllocPd {
    pub device: u32,
    pub reserved: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DeallocPd {
    pub pd: u32,
    pub reserved: u32,
}

/// Memory from the daemon for registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct AllocArena {
    pub len: u64,
    /// 1: hugepages if there are any.
    pub huge: u32,
    pub reserved: u32,
}

/// One fd: the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ArenaReply {
    pub arena: u32,
    /// 1 when hugepages back it.
    pub huge: u32,
    /// Actual bytes.
    pub len: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct FreeArena {
    pub arena: u32,
    pub reserved: u32,
}

/// Registers part of an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct RegMr {
    pub pd: u32,
    pub arena: u32,
    pub offset: u64,
    pub len: u64,
    /// Address by which work requests and peers name the first byte.
    pub va: u64,
    /// [`crate::key_table::Access`] bits.
    pub access: u32,
    pub reserved: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct MrReply {
    pub lkey: u32,
    pub rkey: u32,
}

/// Answered when no worker can touch the memory any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DeregMr {
    pub lkey: u32,
    pub reserved: u32,
}

/// Completion channel. One fd in the [`IdReply`]: the client reads 8-byte cookies
/// from it (the reading end of [`super::event_pipe`]), one per event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CreateChannel {
    pub reserved: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DestroyChannel {
    pub channel: u32,
    pub reserved: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CreateCq {
    pub cqe: u32,
    /// Completion channel or 0.
    pub channel: u32,
    /// What the channel delivers for this queue.
    pub cookie: u64,
}

/// Where queue memory is. An fd comes with the reply when `fd` is 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct QueueRef {
    pub region: u32,
    /// 1: the fd of this region is in the reply; the client keeps it mapped.
    pub fd: u16,
    /// 1: the region belongs to this queue alone.
    pub dedicated: u16,
    pub region_len: u64,
    pub offset: u64,
}

impl From<&crate::queue_alloc::QueueMem> for QueueRef {
    fn from(m: &crate::queue_alloc::QueueMem) -> QueueRef {
        QueueRef {
            region: m.region_id,
            fd: m.new_region.into(),
            dedicated: m.dedicated.into(),
            region_len: m.region.len() as u64,
            offset: m.offset as u64,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CqReply {
    pub cq: u32,
    /// Entries of each ring, a power of two.
    pub entries: u32,
    /// Rings.
    pub workers: u32,
    pub reserved: u32,
    pub mem: QueueRef,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DestroyCq {
    pub cq: u32,
    pub reserved: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CreateQp {
    pub pd: u32,
    pub send_cq: u32,
    pub recv_cq: u32,
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline: u32,
    /// 1: every send work request completes with a CQE.
    pub sq_sig_all: u32,
    pub reserved: u32,
}

/// The send queue is at `mem.offset`, the receive queue `rq_offset` after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct QpReply {
    /// Unique in the daemon.
    pub qp_num: u32,
    /// Whose doorbell ring to use; may change when the connection is established.
    pub worker: u32,
    pub sq_slots: u32,
    pub rq_slots: u32,
    pub rq_offset: u32,
    /// Granted, at least what was asked for.
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline: u32,
    pub mem: QueueRef,
}

/// QP states of RFC 5040, numbered as `enum siw_qp_state` is ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum QpState {
    Idle = 0,
    Rtr = 1,
    Rts = 2,
    Closing = 3,
    Terminate = 4,
    Error = 5,
}

impl QpState {
    /// The state with that number.
    pub fn from_u32(v: u32) -> Option<QpState> {
        use QpState::*;
        [Idle, Rtr, Rts, Closing, Terminate, Error]
            .get(v as usize)
            .copied()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ModifyQp {
    pub qp_num: u32,
    /// [`QpState`]: Error and Closing are accepted from clients.
    pub state: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct QueryQp {
    pub qp_num: u32,
    pub reserved: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct QpStateReply {
    /// [`QpState`].
    pub state: u32,
    pub worker: u32,
    pub ird: u32,
    pub ord: u32,
    pub local: Addr,
    pub peer: Addr,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DestroyQp {
    pub qp_num: u32,
    pub reserved: u32,
}

/// One fd in the [`IdReply`]: a SOCK_SEQPACKET socket with [`CmEvent`] packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CreateCmChannel {
    pub reserved: u64,
}

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
    pub reserved: [u8; 2],
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

#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Listen {
    /// Index or [`ANY_DEVICE`].
    pub device: u32,
    pub backlog: u32,
    pub cm_channel: u32,
    pub reserved: u32,
    /// Comes back in each CONNECT_REQUEST.
    pub cookie: u64,
    /// Family 0 or the unspecified address: any. Port 0: the daemon chooses.
    pub addr: Addr,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ListenReply {
    pub listener: u32,
    pub reserved: u32,
    /// With the port in use.
    pub addr: Addr,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Unlisten {
    pub listener: u32,
    pub reserved: u32,
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
    pub fn from_u32(v: u32) -> Option<CmEventKind> {
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
        .get((v as usize).wrapping_sub(1))
        .copied()
    }
}

/// One packet on a CM channel. Fields without meaning for the kind are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CmEvent {
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

/// What happened to an object or to everything; numbers of `enum ibv_event_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum AsyncEventKind {
    CqErr = 0,
    QpFatal = 1,
    QpReqErr = 2,
    QpAccessErr = 3,
    SqDrained = 5,
    /// The daemon ends, or closes this client for the given reason.
    DeviceFatal = 8,
    PortActive = 9,
    PortErr = 10,
}

impl AsyncEventKind {
    /// The kind with that number.
    pub fn from_u32(v: u32) -> Option<AsyncEventKind> {
        use AsyncEventKind::*;
        [
            CqErr,
            QpFatal,
            QpReqErr,
            QpAccessErr,
            SqDrained,
            DeviceFatal,
            PortActive,
            PortErr,
        ]
        .into_iter()
        .find(|k| *k as u32 == v)
    }
}

/// One packet on the async event socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct AsyncEvent {
    /// [`AsyncEventKind`].
    pub kind: u32,
    /// QP number, CQ id or device index.
    pub object: u32,
    pub reason: Text<120>,
}

/// JSON statistics, from byte `offset` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Stats {
    pub offset: u32,
    pub reserved: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct StatsReply {
    /// Of the whole text.
    pub total: u32,
    /// Bytes used in `text`.
    pub len: u32,
    pub text: [u8; 4096],
}

const _: () = assert!(size_of::<Header>() == 24 && size_of::<Addr>() == 24);
const _: () = assert!(size_of::<StatsReply>() + size_of::<Header>() <= MAX_PACKET);
const _: () = assert!(size_of::<Connect>() == 600 && size_of::<CmEvent>() == 736);
