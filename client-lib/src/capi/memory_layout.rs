//! The structs of `siw.h` about atomics, memory windows and fast registration.

use crate::{Access, Ah, FastMr, Mw, MwBind};

/// `struct siw_mw_bind`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SiwMwBind {
    pub addr: u64,
    pub length: u64,
    pub lkey: u32,
    pub access: u32,
}

impl From<&SiwMwBind> for MwBind {
    fn from(bind: &SiwMwBind) -> MwBind {
        MwBind {
            lkey: bind.lkey,
            addr: bind.addr,
            length: bind.length,
            access: Access(bind.access),
        }
    }
}

/// `struct siw_send_wr`, atomic
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SiwAtomic {
    pub compare_add: u64,
    pub swap: u64,
    pub compare_add_mask: u64,
    pub swap_mask: u64,
}

/// `struct siw_send_wr`, bind_mw
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SiwBind {
    pub mw: *const Mw,
    pub info: SiwMwBind,
    pub rkey: u32,
    pub reserved: u32,
}

/// `struct siw_send_wr`, reg_mr
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SiwReg {
    pub mr: *mut FastMr,
    pub iova: u64,
    pub key: u32,
    pub access: u32,
}

/// `struct siw_send_wr`, ud
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SiwUd {
    pub ah: *const Ah,
    pub remote_qpn: u32,
    pub remote_qkey: u32,
}

/// Part of `struct siw_send_wr` that depends on `opcode`.
#[repr(C)]
#[derive(Clone, Copy)]
pub union SiwWrUnion {
    pub atomic: SiwAtomic,
    pub bind_mw: SiwBind,
    pub reg_mr: SiwReg,
    pub ud: SiwUd,
}

/// `struct siw_range`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SiwRange {
    pub offset: usize,
    pub length: usize,
}
