//! Datagrams: address handles, and queue pairs of unreliable datagrams (UD) on the wire of RoCEv2.

use super::Addr;
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
    /// Destination.
    pub remote: Addr,
}

/// Maximum of [`CreateAh::timeout_ms`].
pub const MAX_AH_TIMEOUT_MS: u32 = 5_000;
/// Maximum number of address handles of one client.
pub const MAX_AH: u32 = 65_536;

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
