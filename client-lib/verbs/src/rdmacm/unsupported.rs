//! A feature that iWARP does not have: enhanced connection establishment.

use super::id::fail;
use crate::abi::*;
use std::ffi::c_int;

/// rdma_set_local_ece(3), rdma_get_remote_ece(3)
pub unsafe fn exchange_ece(_id: *mut rdma_cm_id, _ece: *mut ibv_ece) -> c_int {
    fail(libc::EOPNOTSUPP)
}
