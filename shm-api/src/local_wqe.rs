//! Work requests on keys of this side: BIND_MW and FAST_REG. They take one slot; `sge0` holds
//! what has no field of its own in the header.

use crate::access::Access;
use crate::wqe::{Opcode, SendData, SendWr, Sge};

/// Smallest page of a fast registration: 4 KiB.
pub const MIN_PAGE_SHIFT: u8 = 12;
/// Largest: 1 GiB.
pub const MAX_PAGE_SHIFT: u8 = 30;
/// Most pages of a fast registration.
pub const MAX_FAST_PAGES: u32 = 512;

/// Binds a memory window (`struct ibv_mw_bind_info`), or unbinds it with length 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BindMw {
    /// Key of the window as of now.
    pub rkey: u32,
    /// Key from then on: the same window, any low octet (ibv_inc_rkey(3)).
    pub new_rkey: u32,
    /// Of the region.
    pub lkey: u32,
    /// First address in the region.
    pub addr: u64,
    /// Bytes.
    pub length: u64,
    /// Remote access, and ZERO_BASED.
    pub access: Access,
}

impl BindMw {
    /// From the fields of a work request.
    pub fn from_fields(imm: u32, rkey: u32, remote_addr: u64, sge: &Sge) -> BindMw {
        BindMw {
            rkey,
            new_rkey: imm,
            lkey: sge.lkey,
            addr: remote_addr,
            length: sge.addr,
            access: Access(sge.length),
        }
    }
}

/// Registers pages under a key (`struct ib_reg_wr`). The list is in the shared memory that came
/// with the region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FastReg {
    /// Key from then on: the region's, any low octet.
    pub key: u32,
    /// Address of the first byte.
    pub iova: u64,
    /// Bytes.
    pub length: u32,
    /// Of the first byte in the first page.
    pub first_offset: u32,
    /// Pages are of 2^page_shift bytes, 4 KiB at least.
    pub page_shift: u8,
    /// What the key allows.
    pub access: Access,
}

impl FastReg {
    /// From the fields of a work request.
    pub fn from_fields(imm: u32, rkey: u32, remote_addr: u64, sge: &Sge) -> FastReg {
        FastReg {
            key: imm,
            iova: remote_addr,
            length: sge.addr as u32,
            first_offset: (sge.addr >> 32) as u32,
            page_shift: u8::try_from(sge.lkey).unwrap_or(u8::MAX),
            access: Access(if rkey == 0 { sge.length } else { u32::MAX }),
        }
    }
}

impl SendWr<'_> {
    /// BIND_MW, signaled.
    pub fn bind_mw(wr_id: u64, bind: &BindMw) -> Self {
        let sge = Sge {
            addr: bind.length,
            length: bind.access.0,
            lkey: bind.lkey,
        };
        SendWr {
            opcode: Opcode::BindMw,
            imm: bind.new_rkey,
            rkey: bind.rkey,
            remote_addr: bind.addr,
            ..Self::send(wr_id, SendData::Local(sge))
        }
    }

    /// FAST_REG, signaled.
    pub fn fast_reg(wr_id: u64, fast_reg: &FastReg) -> Self {
        let sge = Sge {
            addr: u64::from(fast_reg.first_offset) << 32 | u64::from(fast_reg.length),
            length: fast_reg.access.0,
            lkey: fast_reg.page_shift.into(),
        };
        SendWr {
            opcode: Opcode::RegMr,
            imm: fast_reg.key,
            remote_addr: fast_reg.iova,
            ..Self::send(wr_id, SendData::Local(sge))
        }
    }
}
