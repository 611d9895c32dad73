//! Hello, devices and limits, statistics.

use super::{Addr, FEATURES, MIN_VERSION, Text, VERSION};
use bytemuck::{Pod, Zeroable};

/// The first request on a connection: identifies the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ClientHello {
    /// Highest version that the client supports.
    pub version: u32,
    /// Not used: the daemon asks the operating system.
    pub pid: u32,
    /// Name for status output.
    pub name: Text<64>,
    /// Lowest version that the client supports.
    pub min_version: u32,
    /// Optional features that the client knows.
    pub features: u32,
}

impl ClientHello {
    /// The hello of this library.
    pub fn new(name: &str) -> ClientHello {
        ClientHello {
            version: VERSION.into(),
            pid: std::process::id(),
            name: Text::new(name),
            min_version: MIN_VERSION.into(),
            features: FEATURES,
        }
    }

    /// The highest version that both sides support.
    pub fn common_version(&self) -> Option<u16> {
        let highest = self.version.min(VERSION.into());
        let lowest = self.min_version.max(MIN_VERSION.into());
        // At most VERSION, so it fits.
        (lowest <= highest).then_some(highest as u16)
    }
}

/// Reply to [`ClientHello`]. Fds in this order: worker state page (to be mapped read-only, `n_workers
/// * 64` bytes), doorbell region (`n_workers` rings of `doorbell_capacity`, see
/// `doorbell::ring_offset`), async event socket, then `n_workers` eventfds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct HelloReply {
    /// The version that both sides use from now on.
    pub version: u32,
    pub client_id: u32,
    pub n_workers: u32,
    pub n_devices: u32,
    /// Entries of each doorbell ring, a power of two.
    pub doorbell_capacity: u32,
    /// Optional features that both the client and the daemon know.
    pub features: u32,
    pub limits: Limits,
    pub daemon: Text<64>,
}

/// Limits of a client's requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Limits {
    pub max_qp: u32,
    pub max_qp_wr: u32,
    pub max_sge: u32,
    /// Maximum number of SGEs on the local side of a READ.
    pub max_sge_rd: u32,
    pub max_inline: u32,
    pub max_cq: u32,
    pub max_cqe: u32,
    pub max_mr: u32,
    pub max_pd: u32,
    pub max_ord: u32,
    pub max_ird: u32,
    pub max_private_data: u32,
    pub max_srq: u32,
    pub max_srq_wr: u32,
    pub max_srq_sge: u32,
    pub max_mw: u32,
    /// Maximum number of pages of a fast registration.
    pub max_fast_pages: u32,
    pub reserved: u32,
    pub max_msg: u64,
    pub max_mr_size: u64,
    pub max_arena: u64,
}

/// Queries device `index`, counted from 0. Those from `n_devices` on were added later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct QueryDevice {
    pub index: u32,
    /// Bits of `QUERY_`; daemons that do not know one ignore it.
    pub flags: u32,
}

/// [`QueryDevice::flags`]: from now on the client gets no asynchronous events of other devices.
pub const QUERY_WATCH: u32 = 1;

/// Immediate data with SEND and WRITE (RFC 7306 section 6).
pub const CAP_IMMEDIATE: u64 = 1;
/// FetchAdd and CmpSwap (RFC 7306 section 5).
pub const CAP_ATOMIC: u64 = 2;
/// MPA markers (RFC 5044 section 4.3).
pub const CAP_MARKERS: u64 = 4;
/// Local invalidate, and READ with invalidate.
pub const CAP_LOCAL_INV: u64 = 8;

/// Memory windows of both types.
pub const CAP_MEM_WINDOW: u64 = 16;
/// Registration by work request.
pub const CAP_FAST_REG: u64 = 32;

/// [`DeviceReply::port_state`]: the link is down.
pub const PORT_DOWN: u32 = 1;
/// [`DeviceReply::port_state`]: the link is up.
pub const PORT_ACTIVE: u32 = 4;

/// Maximum number of addresses of a device that clients see.
pub const MAX_ADDRESSES: usize = 8;

/// Reply to [`QueryDevice`]: a device.
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
    /// 1 when the CRC is requested by default.
    pub crc: u8,
    pub mpa_rev: u8,
    /// 1 for a device that an operator has removed: lists leave it out.
    pub is_deleted: u8,
    /// [`Persona`](crate::persona::Persona) by its number: the kind of device that programs see by default.
    pub persona: u8,
    pub reserved: [u8; 4],
    /// `CAP_` bits: capabilities beyond WRITE, READ, SEND.
    pub caps: u64,
    pub ips: [Addr; MAX_ADDRESSES],
    /// [`FEATURE_GIDS`](super::FEATURE_GIDS): indices of the GIDs of `ips`.
    pub gid_indices: [u8; MAX_ADDRESSES],
    /// [`FEATURE_GIDS`](super::FEATURE_GIDS): index of the GID of `mac`, which is never 0. 0: the GIDs
    /// are those of `ips` and then that of `mac`.
    pub mac_gid_index: u8,
    pub reserved_gids: [u8; 7],
}

/// Reads JSON statistics from byte `offset` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ReadStats {
    pub offset: u32,
    pub reserved: u32,
}

/// A part of the statistics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct StatsReply {
    /// Length of the whole text.
    pub total: u32,
    /// Bytes used in `text`.
    pub len: u32,
    pub text: [u8; 4096],
}
