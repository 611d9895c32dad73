//! Work requests on local keys: BIND_MW and FAST_REG. They take one slot; `sge0` holds the operands
//! that have no field of their own in the header.

use crate::access::Access;
use crate::wqe::{Opcode, SendData, SendWr, Sge};

/// Smallest page of a fast registration, as a power of two: 4 KiB.
pub const MIN_PAGE_SHIFT: u8 = 12;
/// Largest page of a fast registration, as a power of two: 1 GiB.
pub const MAX_PAGE_SHIFT: u8 = 30;
/// Maximum number of pages of a fast registration.
pub const MAX_FAST_PAGES: u32 = 512;

/// Binds a memory window (`struct ibv_mw_bind_info`), or unbinds it with length 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BindMw {
    /// Current key of the window.
    pub rkey: u32,
    /// New key: the same window with any low octet (ibv_inc_rkey(3)).
    pub new_rkey: u32,
    /// Key of the region.
    pub lkey: u32,
    /// First address of the window in the region.
    pub addr: u64,
    /// Length of the window in bytes.
    pub length: u64,
    /// Remote access rights, and ZERO_BASED.
    pub access: Access,
}

impl BindMw {
    /// Decodes the fields of a work request.
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

/// Registers pages under a key (`struct ib_reg_wr`). The page list is in the shared memory that was
/// created with the region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FastReg {
    /// New key: the region's with any low octet.
    pub key: u32,
    /// Address of the first byte.
    pub iova: u64,
    /// Length in bytes.
    pub length: u32,
    /// Offset of the first byte in the first page.
    pub first_offset: u32,
    /// Page size is 2^page_shift bytes, at least 4 KiB.
    pub page_shift: u8,
    /// Access rights of the key.
    pub access: Access,
}

impl FastReg {
    /// Decodes the fields of a work request.
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
    /// A signaled BIND_MW.
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

    /// A signaled FAST_REG.
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
