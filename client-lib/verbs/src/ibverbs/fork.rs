//! fork (ibv_fork_init(3)): a child gets copies of registered memory, and the parent's pages never
//! move.

use crate::abi::{IBV_FORK_UNNEEDED, ibv_fork_status};
use std::ffi::{c_int, c_void};

/// ibv_fork_init(3): there is nothing to prepare.
pub unsafe fn init_fork() -> c_int {
    0
}

/// ibv_is_fork_initialized(3)
pub unsafe fn is_fork_initialized() -> ibv_fork_status {
    IBV_FORK_UNNEEDED
}

/// ibv_dontfork_range, of provider libraries.
pub unsafe fn exclude_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}

/// ibv_dofork_range, of provider libraries.
pub unsafe fn include_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}
