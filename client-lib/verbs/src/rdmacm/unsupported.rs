//! Features that iWARP does not have: multicast, and enhanced connection establishment.

use super::id::fail;
use crate::abi::*;
use std::ffi::{c_int, c_void};

/// rdma_join_multicast(3)
pub unsafe fn join_multicast(
    _id: *mut rdma_cm_id,
    _addr: *mut sockaddr,
    _context: *mut c_void,
) -> c_int {
    fail(libc::EOPNOTSUPP)
}

/// rdma_join_multicast_ex(3)
pub unsafe fn join_multicast_ex(
    _id: *mut rdma_cm_id,
    _attr: *mut rdma_cm_join_mc_attr_ex,
    _context: *mut c_void,
) -> c_int {
    fail(libc::EOPNOTSUPP)
}

/// rdma_leave_multicast(3): always an error, because no group was joined.
pub unsafe fn leave_multicast(_id: *mut rdma_cm_id, _addr: *mut sockaddr) -> c_int {
    fail(libc::EADDRNOTAVAIL)
}

/// rdma_set_local_ece(3), rdma_get_remote_ece(3)
pub unsafe fn exchange_ece(_id: *mut rdma_cm_id, _ece: *mut ibv_ece) -> c_int {
    fail(libc::EOPNOTSUPP)
}
