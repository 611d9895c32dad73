//! Fixed structs of the control protocol. Every struct is `repr(C)`, without implicit padding, and
//! copied out of packets, never cast.
//!
//! Ids are per client and start at 1; 0 means none, unless stated otherwise. Addresses are [`Addr`],
//! strings are zero-padded UTF-8.
//!
//! # Versions and features
//!
//! The library and the daemon need not be of the same release: an application in a container brings
//! its own library. Both support a range of versions, [`MIN_VERSION`] to [`VERSION`].
//!
//! - HELLO carries the range of the client, in a packet of its lowest version. The daemon answers
//!   with the highest common version, which all later packets carry in their header. Without a common
//!   version HELLO is refused with `EPROTONOSUPPORT`.
//! - HELLO also carries the feature bits that the library knows ([`FEATURES`]); the reply has those
//!   that the daemon knows too. A feature is used only if its bit was in the reply. Feature bits are
//!   for optional extensions: a further request, or another meaning of a field.
//! - Structs grow only at their end, with a feature bit for the new fields. A request of a newer
//!   library may be longer if the excess bytes are zero. The library reads the known part of a longer
//!   reply or event. Once a release has sent a struct, its shorter form stays valid: the missing
//!   fields read as zeros, which therefore must select the previous behavior.
//! - An unknown request is refused with `EOPNOTSUPP`, and the connection stays open.
//! - Every other change of a struct, and every change of the layout of shared memory (rings, work
//!   requests, completions, doorbells), increments [`VERSION`]. [`MIN_VERSION`] follows when the
//!   daemon no longer supports the older versions.

mod completion;
mod connection;
mod datagram;
mod event;
mod extents;
mod inspect;
mod memory;
mod queue_pair;
mod session;
mod shared_receive_queue;
mod stream;
mod values;

pub use completion::*;
pub use connection::*;
pub use datagram::*;
pub use event::*;
pub use extents::*;
pub use inspect::*;
pub use memory::*;
pub use queue_pair::*;
pub use session::*;
pub use shared_receive_queue::*;
pub use stream::*;
pub use values::*;

use bytemuck::{Pod, Zeroable};
use core::mem::size_of;

/// First word of each packet: "siwd".
pub const MAGIC: u32 = u32::from_le_bytes(*b"siwd");
/// Highest protocol version that this side supports; see the rules above.
pub const VERSION: u16 = 7;
/// Lowest protocol version that this side supports.
pub const MIN_VERSION: u16 = VERSION;
/// Feature: [`StartResolution`] and [`EndResolution`], with the events
/// [`CmEventKind::AddressResolved`] and [`CmEventKind::AddressError`].
pub const FEATURE_RESOLUTION: u32 = 1;
/// Feature: a QP's state line has the numbers of requests before the first failed ones
/// ([`SqWatch::sends_before_failure`](crate::work_queue::SqWatch::sends_before_failure)).
pub const FEATURE_FAILURE_MARKS: u32 = 2;
/// Feature: queue pairs that are streams ([`CreateQp::final_send`]).
pub const FEATURE_STREAMS: u32 = 4;
/// Feature: [`ImportOwnFile`].
pub const FEATURE_OWN_FILES: u32 = 8;
/// Feature: the indices of GIDs in [`DeviceReply`], and
/// [`AsyncEventKind::GidChange`].
pub const FEATURE_GIDS: u32 = 16;
/// Feature: [`MODIFY_QUIET_DRAIN`].
pub const FEATURE_QUIET_DRAIN: u32 = 32;
/// Feature: the library waits for a free slot of a doorbell ring, so [`HelloReply::doorbell_capacity`] may
/// be less than the number of doorbells of all its queue pairs.
pub const FEATURE_DOORBELL_WAIT: u32 = 64;
/// Feature: queue pairs of datagrams: [`CreateAh`], [`DestroyAh`], [`StartDatagrams`], and
/// [`Wc::src_qp`](crate::Wc::src_qp).
pub const FEATURE_DATAGRAMS: u32 = 128;
/// Feature: datagram services of rdma_cm: [`BIND_DATAGRAMS`], [`FindService`], [`EndFindService`],
/// [`AnswerFindService`], [`MigrateCm::search`], with the events [`CmEventKind::ServiceRequest`] and
/// [`CmEventKind::ServiceReply`].
pub const FEATURE_SERVICES: u32 = 256;
/// Feature: multicast groups of queue pairs of datagrams: [`AttachGroup`], [`DetachGroup`], and address
/// handles of groups.
pub const FEATURE_MULTICAST: u32 = 512;
/// Feature: connections that begin in streaming mode: [`OpenStream`], [`SendStream`], [`ReceiveStream`],
/// [`TurnStream`], [`EndStream`], [`Connect::stream`], [`Listen::flags`], with the events
/// [`CmEventKind::StreamOpened`] and [`CmEventKind::StreamReady`].
pub const FEATURE_STREAMING: u32 = 1024;
/// The optional features that this side knows.
pub const FEATURES: u32 = FEATURE_RESOLUTION
    | FEATURE_FAILURE_MARKS
    | FEATURE_STREAMS
    | FEATURE_OWN_FILES
    | FEATURE_GIDS
    | FEATURE_QUIET_DRAIN
    | FEATURE_DOORBELL_WAIT
    | FEATURE_DATAGRAMS
    | FEATURE_SERVICES
    | FEATURE_MULTICAST
    | FEATURE_STREAMING;
/// Maximum length of a packet.
pub const MAX_PACKET: usize = 8192;
/// Maximum number of fds in one packet.
pub const MAX_FDS: usize = 72;
/// Maximum length of private data in MPA (RFC 5044 section 7.1.1).
pub const MAX_PRIVATE_DATA: usize = 512;

/// Header of each packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Header {
    pub magic: u32,
    pub version: u16,
    /// [`Message::KIND`]; replies repeat the request's.
    pub kind: u16,
    /// Bytes of the packet, header included.
    pub len: u32,
    /// Chosen by the client and repeated in the reply; 0 in events.
    pub seq: u32,
    /// 0, or the errno of a failed request, with an [`ErrorReply`] as the body.
    pub status: i32,
    pub reserved: u32,
}

/// Human-readable reason of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ErrorReply {
    pub reason: Text<120>,
}

/// A request, with the type of its reply.
pub trait Message: Pod {
    /// Number in the header.
    const KIND: u16;
    /// Type of the reply.
    type Reply: Pod;
}

/// The only table of requests: number, request, reply. Passes it to the macro `$then`.
macro_rules! for_each_message {
    ($then:ident) => {
        $then! {
            1 ClientHello -> HelloReply;
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
            25 ReadStats -> StatsReply;
            26 Bind -> ListenReply;
            27 Resolve -> ResolveReply;
            28 MigrateCm -> Empty;
            29 PairQp -> Empty;
            30 StartResolution -> IdReply;
            31 EndResolution -> Empty;
            32 CreateAh -> IdReply;
            33 DestroyAh -> Empty;
            34 StartDatagrams -> Empty;
            35 FindService -> IdReply;
            36 EndFindService -> Empty;
            37 AnswerFindService -> Empty;
            38 AttachGroup -> Empty;
            39 DetachGroup -> Empty;
            70 OpenStream -> IdReply;
            71 SendStream -> SendStreamReply;
            72 ReceiveStream -> ReceiveStreamReply;
            73 TurnStream -> Empty;
            74 EndStream -> Empty;
            50 ReregMr -> MrReply;
            51 AllocFastMr -> FastMrReply;
            52 AllocMw -> MwReply;
            53 DeallocMw -> Empty;
            54 AddExtents -> Empty;
            55 RegMemory -> MrReply;
            56 ImportMemory -> IdReply;
            57 ImportOwnFile -> IdReply;
            40 CreateSrq -> SrqReply;
            41 ModifySrq -> SrqReply;
            42 QuerySrq -> SrqStateReply;
            43 DestroySrq -> Empty;
            44 ResizeCq -> CqReply;
            45 FreeCqRing -> Empty;
            46 ModerateCq -> Empty;
            60 ListObjects -> ListReply;
            61 Operate -> OperateReply;
            62 StartCapture -> IdReply;
            63 StartTrace -> IdReply;
            64 LoadFaults -> OperateReply;
        }
    };
}
pub(super) use for_each_message;

macro_rules! message {
    ($($kind:literal $req:ident -> $reply:ty;)*) => {
        $(impl Message for $req {
            const KIND: u16 = $kind;
            type Reply = $reply;
        })*
    };
}
for_each_message!(message);

/// `CmEvent` packets.
pub const KIND_CM_EVENT: u16 = 100;
/// `AsyncEvent` packets.
pub const KIND_ASYNC_EVENT: u16 = 101;

/// A reply without contents.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Empty {
    pub reserved: u64,
}

/// The id of the created object.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct IdReply {
    pub id: u32,
    pub reserved: u32,
}

const _: () = assert!(size_of::<Header>() == 24 && size_of::<Addr>() == 24);
const _: () = assert!(size_of::<ClientHello>() == 80 && size_of::<HelloReply>() == 184);
const _: () = assert!(size_of::<Limits>() == 96 && size_of::<QueueRef>() == 24);
const _: () = assert!(size_of::<CreateAh>() == 64 && size_of::<StartDatagrams>() == 16);
const _: () = assert!(size_of::<FindService>() == 592 && size_of::<AnswerFindService>() == 532);
const _: () = assert!(size_of::<SrqReply>() == 48 && size_of::<ModifySrq>() == 16);
const _: () = assert!(size_of::<QpStateReply>() == 72 && size_of::<CqReply>() == 40);
const _: () = assert!(size_of::<RegMemory>() + size_of::<Header>() <= MAX_PACKET);
const _: () = assert!(size_of::<StatsReply>() + size_of::<Header>() <= MAX_PACKET);
const _: () = assert!(size_of::<ListReply>() + size_of::<Header>() <= MAX_PACKET);
const _: () = assert!(size_of::<OperateReply>() + size_of::<Header>() <= MAX_PACKET);
const _: () = assert!(size_of::<LoadFaults>() == 2904);
const _: () = assert!(size_of::<StartCapture>() == 56 && size_of::<StartTrace>() == 64);
const _: () = assert!(size_of::<Connect>() == 608 && size_of::<CmEventMessage>() == 736);
const _: () = assert!(size_of::<Listen>() == 80 && size_of::<OpenStream>() == 72);
const _: () = assert!(size_of::<SendStream>() + size_of::<Header>() <= MAX_PACKET);
