//! Unreliable datagrams (UD) of RoCEv2: the headers behind UDP, the invariant CRC at their end, and the
//! management datagrams by which rdma_cm finds datagram services.
//!
//! ```text
//!  IP | UDP, port 4791 | BTH 12 | DETH 8 | immediate data 4 | payload | pad 0..3 | ICRC 4
//! ```
//! BTH: base transport header; DETH: datagram extended transport header (InfiniBand Architecture
//! Specification 1.4, chapter 9; annex A17 for RoCEv2). Other operations of RoCE are not served: reliable
//! connections of siwd are iWARP.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod header;
mod icrc;
mod mad;

pub use header::{
    BTH_LEN, DEFAULT_PKEY, HEADERS_MAX, MAX_QPN, MULTICAST_QPN, PKEY_MASK, UDP_PORT, UdError,
    UdHeader, destination_qpn, is_of_reliable_connection, pad_of, path_mtu,
};
pub use icrc::{ICRC_LEN, Icrc};
pub use mad::{
    MAD_LEN, MAD_QKEY, MAD_QPN, MadError, SIDR_REPLY_DATA_MAX, SIDR_REQUEST_DATA_MAX, SidrMessage,
    SidrReply, SidrRequest, SidrStatus,
};
