//! Raw bindings to the part of DPDK that the `dpdk` crate wraps, for that crate only.
//!
//! Functions named `rte_*` are DPDK's own. Functions named `siw_*` live in `shim/shim.c`: they give
//! DPDK's static inline functions a symbol (one call per burst), and hide structures whose layout
//! differs between DPDK versions.
#![no_std]
#![allow(non_camel_case_types, non_upper_case_globals, non_snake_case)]

use core::ffi::c_void;
use core::sync::atomic::AtomicU16;

#[allow(
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    missing_docs,
    unnecessary_transmutes,
    unused,
    unsafe_op_in_unsafe_fn
)]
mod bindings {
    use super::{rte_device, rte_mbuf, rte_mbuf_ext_shared_info, rte_mempool, rte_ring};
    include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
}
pub use bindings::*;

/// Used by pointer only.
#[repr(C)]
pub struct rte_mempool {
    _opaque: [u8; 0],
}

/// Used by pointer only.
#[repr(C)]
pub struct rte_ring {
    _opaque: [u8; 0],
}

/// Used by pointer only.
#[repr(C)]
pub struct rte_device {
    _opaque: [u8; 0],
}

/// `struct rte_mbuf`; `shim.c` asserts every offset at compile time.
#[repr(C, align(64))]
pub struct rte_mbuf {
    pub buf_addr: *mut c_void,
    pub buf_iova: u64,
    pub data_off: u16,
    pub refcnt: AtomicU16,
    pub nb_segs: u16,
    pub port: u16,
    pub ol_flags: u64,
    pub packet_type: u32,
    pub pkt_len: u32,
    pub data_len: u16,
    pub vlan_tci: u16,
    /// First word of `hash`; the second is `hash_hi`.
    pub rss: u32,
    pub hash_hi: u32,
    pub vlan_tci_outer: u16,
    pub buf_len: u16,
    pub pool: *mut rte_mempool,
    pub next: *mut rte_mbuf,
    pub tx_offload: u64,
    pub shinfo: *mut rte_mbuf_ext_shared_info,
    pub priv_size: u16,
    pub timesync: u16,
    pub dynfield1: [u32; 9],
}

/// `struct rte_mbuf_ext_shared_info`; `shim.c` asserts every offset.
#[repr(C)]
pub struct rte_mbuf_ext_shared_info {
    pub free_cb: Option<unsafe extern "C" fn(addr: *mut c_void, opaque: *mut c_void)>,
    pub fcb_opaque: *mut c_void,
    pub refcnt: AtomicU16,
}

const _: () = {
    use core::mem::{offset_of, size_of};
    assert!(size_of::<rte_mbuf>() == 128);
    assert!(offset_of!(rte_mbuf, refcnt) == 18);
    assert!(offset_of!(rte_mbuf, ol_flags) == 24);
    assert!(offset_of!(rte_mbuf, rss) == 44);
    assert!(offset_of!(rte_mbuf, vlan_tci_outer) == 52);
    assert!(offset_of!(rte_mbuf, next) == 64);
    assert!(offset_of!(rte_mbuf, tx_offload) == 72);
    assert!(offset_of!(rte_mbuf, shinfo) == 80);
    assert!(offset_of!(rte_mbuf, dynfield1) == 92);
    assert!(size_of::<rte_mbuf_ext_shared_info>() == 24);
    assert!(offset_of!(rte_mbuf_ext_shared_info, refcnt) == 16);
};
