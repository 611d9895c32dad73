//! Datagrams: address handles, queue pairs of unreliable datagrams (UD) on the wire of RoCEv2, and datagram
//! services of rdma_cm (RDMA_PS_UDP).

use super::{Addr, PrivateData};
use bytemuck::{Pod, Zeroable};

/// Creates an address handle (ibv_create_ah(3)), the destination of datagrams; the reply carries its
/// number. Waits until the neighbour on the way to `remote` has answered: EHOSTUNREACH without a route,
/// ETIMEDOUT without an answer. With [`FEATURE_DATAGRAMS`](super::FEATURE_DATAGRAMS).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CreateAh {
    /// Index of the device that sends.
    pub device: u32,
    /// TTL or hop limit; 0 for 64.
    pub hop_limit: u8,
    /// DSCP and ECN of the IP header.
    pub traffic_class: u8,
    pub reserved: u16,
    /// Flow label of IPv6, 20 bits.
    pub flow_label: u32,
    /// Maximum time for the neighbour's answer, in milliseconds; 0 for one second. At most
    /// [`MAX_AH_TIMEOUT_MS`].
    pub timeout_ms: u32,
    /// Source address, one of the device's; family 0: chosen for `remote`.
    pub local: Addr,
    /// Destination: a host, or with [`FEATURE_MULTICAST`](super::FEATURE_MULTICAST) a multicast group.
    pub remote: Addr,
}

/// Maximum of [`CreateAh::timeout_ms`].
pub const MAX_AH_TIMEOUT_MS: u32 = 5_000;
/// Maximum number of address handles of one client.
pub const MAX_AH: u32 = 65_536;
/// Maximum number of multicast groups of one device.
pub const MAX_GROUPS: u32 = 64;
/// Maximum number of memberships of one client's queue pairs in multicast groups.
pub const MAX_MEMBERSHIPS: u32 = 256;

/// Destroys an address handle (ibv_destroy_ah(3)). Datagrams posted to it that are not sent yet fail with
/// LOC_QP_OP_ERR.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DestroyAh {
    pub ah: u32,
    pub reserved: u32,
}

/// Makes a queue pair without a connection a queue pair of datagrams, in RTS: it receives datagrams with
/// its number and Q_Key on all addresses of the device, and sends SENDs and SENDs with immediate data. A
/// repetition changes its Q_Key. MODIFY_QP to ERROR or IDLE ends it. With
/// [`FEATURE_DATAGRAMS`](super::FEATURE_DATAGRAMS).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct StartDatagrams {
    pub qp_num: u32,
    /// Index of its device.
    pub device: u32,
    /// The Q_Key; one with [`CONTROLLED_QKEY`] needs an operator.
    pub qkey: u32,
    pub reserved: u32,
}

/// Bit of controlled Q_Keys. In a work request it selects the Q_Key of the queue pair (InfiniBand
/// Architecture Specification 1.4, 10.2.5).
pub const CONTROLLED_QKEY: u32 = 1 << 31;
/// Bytes before the payload in the receive buffer of a datagram: the GRH. It is the IPv6 header; of an
/// IPv4 packet, its last 20 bytes are the IPv4 header, and the first 20 undefined.
pub const GRH_LEN: usize = 40;

/// Asks the peer for the queue pair of a datagram service (rdma_connect(3) with RDMA_PS_UDP), by a SIDR request,
/// which is repeated until there is an answer. Answered at once with the number of the search; the outcome is
/// one event with `cookie`, [`CmEventKind::ServiceReply`](super::CmEventKind::ServiceReply). With
/// [`FEATURE_SERVICES`](super::FEATURE_SERVICES).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct FindService {
    /// Device index.
    pub device: u32,
    pub cm_channel: u32,
    /// Maximum time for the answer, in milliseconds; 0 for 68.7 s, as with Linux. At most
    /// [`MAX_SERVICE_TIMEOUT_MS`].
    pub timeout_ms: u32,
    pub reserved: u32,
    pub cookie: u64,
    /// Address and port of the service.
    pub dst: Addr,
    /// One of the device's addresses; the service is told its port.
    pub src: Addr,
    /// At most [`SERVICE_REQUEST_DATA_MAX`] bytes.
    pub private_data: PrivateData,
    pub reserved2: u32,
}

/// Maximum of [`FindService::timeout_ms`].
pub const MAX_SERVICE_TIMEOUT_MS: u32 = 300_000;
/// Maximum length of private data in a request to a datagram service.
pub const SERVICE_REQUEST_DATA_MAX: usize = 180;
/// Maximum length of private data in the answer.
pub const SERVICE_REPLY_DATA_MAX: usize = 136;

/// Ends a search for a datagram service: once this is answered, no event of it follows. A number that has
/// ended is no error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct EndFindService {
    pub search: u32,
    pub reserved: u32,
}

/// Answers a request to a datagram service
/// ([`CmEventKind::ServiceRequest`](super::CmEventKind::ServiceRequest)): rdma_accept(3), rdma_reject(3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct AnswerFindService {
    pub request: u32,
    /// 1 to name the queue pair, 0 to refuse.
    pub accepts: u32,
    /// A queue pair of the client; 0 in a refusal.
    pub qp_num: u32,
    /// The Q_Key for datagrams to it; 0 in a refusal.
    pub qkey: u32,
    /// At most [`SERVICE_REPLY_DATA_MAX`] bytes.
    pub private_data: PrivateData,
}

/// Makes a queue pair of datagrams a member of a multicast group (ibv_attach_mcast(3)): it receives the
/// datagrams that any host, this one included, sends to the group. A repetition is no error. With
/// [`FEATURE_MULTICAST`](super::FEATURE_MULTICAST).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct AttachGroup {
    pub qp_num: u32,
    pub reserved: u32,
    /// The group; its port is ignored.
    pub group: Addr,
}

/// Ends a membership (ibv_detach_mcast(3)). A reset and the end of the queue pair end it as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DetachGroup {
    pub qp_num: u32,
    pub reserved: u32,
    /// The group; its port is ignored.
    pub group: Addr,
}
