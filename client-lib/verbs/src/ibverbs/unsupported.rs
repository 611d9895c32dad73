//! Features that siwd does not have (ECE, dmabuf, import of objects), and the interface between libibverbs and its provider libraries, which exists only so that
//! programs linked with libmlx5 or libefa start. Each call fails with the errno of its manual page.

use crate::abi::*;
use crate::status::{fail_errno, null_with};
use std::ffi::{c_int, c_void};

/// ibv_resolve_eth_l2_from_gid
pub unsafe fn resolve_ethernet_address(
    _context: *mut ibv_context,
    _attr: *mut ibv_ah_attr,
    _mac: *mut u8,
    _vlan: *mut u16,
) -> c_int {
    -fail_errno(libc::EOPNOTSUPP)
}

/// ibv_set_ece(3), ibv_query_ece(3): no options are known.
pub unsafe fn exchange_ece(_qp: *mut ibv_qp, _ece: *mut ibv_ece) -> c_int {
    fail_errno(libc::EOPNOTSUPP)
}

/// ibv_query_qp_data_in_order(3): payload that arrives out of order may be placed out of order.
pub unsafe fn query_data_in_order(_qp: *mut ibv_qp, _opcode: ibv_wr_opcode, _flags: u32) -> c_int {
    0
}

/// ibv_import_device(3)
pub unsafe fn import_device(_cmd_fd: c_int) -> *mut ibv_context {
    null_with(libc::EOPNOTSUPP)
}

/// ibv_import_pd(3), ibv_import_dm(3)
pub unsafe fn import_from_context(_context: *mut ibv_context, _handle: u32) -> *mut c_void {
    null_with(libc::EOPNOTSUPP)
}

/// ibv_import_mr(3)
pub unsafe fn import_mr(_pd: *mut ibv_pd, _handle: u32) -> *mut ibv_mr {
    null_with(libc::EOPNOTSUPP)
}

/// ibv_unimport_pd(3), ibv_unimport_mr(3), ibv_unimport_dm(3): nothing was imported.
pub unsafe fn forget_import(_object: *mut c_void) {}

/// ibv_reg_dmabuf_mr(3)
pub unsafe fn register_dmabuf(
    _pd: *mut ibv_pd,
    _offset: u64,
    _length: usize,
    _iova: u64,
    _fd: c_int,
    _access: c_int,
) -> *mut ibv_mr {
    null_with(libc::EOPNOTSUPP)
}

/// ibv_alloc_dmah(3): hints for caches of processors.
pub unsafe fn create_from_context(_context: *mut ibv_context, _attr: *mut c_void) -> *mut c_void {
    null_with(libc::EOPNOTSUPP)
}

/// ibv_dealloc_dmah(3): there are no such handles.
pub unsafe fn change_object(_object: *mut c_void) -> c_int {
    fail_errno(libc::EOPNOTSUPP)
}

/// ibv_dm_export_dmabuf_fd(3)
pub unsafe fn export_dmabuf(_object: *mut c_void) -> c_int {
    fail_errno(libc::EOPNOTSUPP);
    -1
}

/// ibv_copy_ah_attr_from_kern and similar functions: they are unused, without kernel structs.
pub unsafe fn copy_kernel_struct(_to: *mut c_void, _from: *mut c_void) {}

/// ibv_register_driver, verbs_register_driver_N: registration of provider libraries. Their kernel
/// devices are not listed.
pub unsafe fn register_driver(_driver: *const c_void) {}

/// Kernel interface functions that return an errno.
unsafe fn refuse_call() -> c_int {
    fail_errno(libc::EOPNOTSUPP)
}

/// Kernel interface functions that return a pointer.
unsafe fn refuse_object() -> *mut c_void {
    null_with(libc::EOPNOTSUPP)
}

/// Kernel interface functions without a result.
unsafe fn do_nothing() {}

/// verbs_allow_disassociate_destroy: data that libmlx5 reads.
#[unsafe(export_name = "siw_abi_verbs_allow_disassociate_destroy")]
static ALLOW_DISASSOCIATE_DESTROY: u8 = 0;

crate::export::assign_nodes!(verbs_allow_disassociate_destroy: private);

crate::export::export_symbols! { "IBVERBS_PRIVATE_34":
    fn verbs_register_driver_34(driver: *const c_void) = register_driver;
}

crate::export::export_symbols! { "IBVERBS_PRIVATE_57":
    fn verbs_register_driver_57(driver: *const c_void) = register_driver;
}

crate::export::export_symbols! { "IBVERBS_PRIVATE_59":
    fn verbs_register_driver_59(driver: *const c_void) = register_driver;
}

crate::export::export_symbols! { "IBVERBS_PRIVATE_64":
    fn verbs_register_driver_64(driver: *const c_void) = register_driver;
}

crate::export::export_symbols! { "IBVERBS_PRIVATE_65":
    fn verbs_register_driver_65(driver: *const c_void) = register_driver;
}

// Declared without arguments, because these functions ignore them.
crate::export::export_symbols! { private:
    fn __ioctl_final_num_attrs() -> c_int = refuse_call;
    fn __verbs_log() = do_nothing;
    fn _verbs_init_and_alloc_context() -> *mut c_void = refuse_object;
    fn execute_ioctl() -> c_int = refuse_call;
    fn verbs_init_cq() = do_nothing;
    fn verbs_open_device() -> *mut c_void = refuse_object;
    fn verbs_set_ops() = do_nothing;
    fn verbs_uninit_context() = do_nothing;
    fn ibv_cmd_advise_mr() -> c_int = refuse_call;
    fn ibv_cmd_alloc_dm() -> c_int = refuse_call;
    fn ibv_cmd_alloc_dmah() -> c_int = refuse_call;
    fn ibv_cmd_alloc_mw() -> c_int = refuse_call;
    fn ibv_cmd_alloc_pd() -> c_int = refuse_call;
    fn ibv_cmd_attach_mcast() -> c_int = refuse_call;
    fn ibv_cmd_close_xrcd() -> c_int = refuse_call;
    fn ibv_cmd_create_ah() -> c_int = refuse_call;
    fn ibv_cmd_create_comp_cntr() -> c_int = refuse_call;
    fn ibv_cmd_create_counters() -> c_int = refuse_call;
    fn ibv_cmd_create_cq() -> c_int = refuse_call;
    fn ibv_cmd_create_cq_ex() -> c_int = refuse_call;
    fn ibv_cmd_create_cq_ex2() -> c_int = refuse_call;
    fn ibv_cmd_create_flow() -> c_int = refuse_call;
    fn ibv_cmd_create_flow_action_esp() -> c_int = refuse_call;
    fn ibv_cmd_create_qp() -> c_int = refuse_call;
    fn ibv_cmd_create_qp_ex() -> c_int = refuse_call;
    fn ibv_cmd_create_qp_ex2() -> c_int = refuse_call;
    fn ibv_cmd_create_rwq_ind_table() -> c_int = refuse_call;
    fn ibv_cmd_create_srq() -> c_int = refuse_call;
    fn ibv_cmd_create_srq_ex() -> c_int = refuse_call;
    fn ibv_cmd_create_wq() -> c_int = refuse_call;
    fn ibv_cmd_dealloc_mw() -> c_int = refuse_call;
    fn ibv_cmd_dealloc_pd() -> c_int = refuse_call;
    fn ibv_cmd_dereg_mr() -> c_int = refuse_call;
    fn ibv_cmd_destroy_ah() -> c_int = refuse_call;
    fn ibv_cmd_destroy_comp_cntr() -> c_int = refuse_call;
    fn ibv_cmd_destroy_counters() -> c_int = refuse_call;
    fn ibv_cmd_destroy_cq() -> c_int = refuse_call;
    fn ibv_cmd_destroy_flow() -> c_int = refuse_call;
    fn ibv_cmd_destroy_flow_action() -> c_int = refuse_call;
    fn ibv_cmd_destroy_qp() -> c_int = refuse_call;
    fn ibv_cmd_destroy_rwq_ind_table() -> c_int = refuse_call;
    fn ibv_cmd_destroy_srq() -> c_int = refuse_call;
    fn ibv_cmd_destroy_wq() -> c_int = refuse_call;
    fn ibv_cmd_detach_mcast() -> c_int = refuse_call;
    fn ibv_cmd_export_dmabuf_fd() -> c_int = refuse_call;
    fn ibv_cmd_free_dm() -> c_int = refuse_call;
    fn ibv_cmd_free_dmah() -> c_int = refuse_call;
    fn ibv_cmd_get_context() -> c_int = refuse_call;
    fn ibv_cmd_inc_comp_cntr() -> c_int = refuse_call;
    fn ibv_cmd_inc_err_comp_cntr() -> c_int = refuse_call;
    fn ibv_cmd_modify_cq() -> c_int = refuse_call;
    fn ibv_cmd_modify_flow_action_esp() -> c_int = refuse_call;
    fn ibv_cmd_modify_qp() -> c_int = refuse_call;
    fn ibv_cmd_modify_qp_ex() -> c_int = refuse_call;
    fn ibv_cmd_modify_srq() -> c_int = refuse_call;
    fn ibv_cmd_modify_wq() -> c_int = refuse_call;
    fn ibv_cmd_open_qp() -> c_int = refuse_call;
    fn ibv_cmd_open_xrcd() -> c_int = refuse_call;
    fn ibv_cmd_poll_cq() -> c_int = refuse_call;
    fn ibv_cmd_post_recv() -> c_int = refuse_call;
    fn ibv_cmd_post_send() -> c_int = refuse_call;
    fn ibv_cmd_post_srq_recv() -> c_int = refuse_call;
    fn ibv_cmd_qp_attach_comp_cntr() -> c_int = refuse_call;
    fn ibv_cmd_query_comp_cntr_caps() -> c_int = refuse_call;
    fn ibv_cmd_query_context() -> c_int = refuse_call;
    fn ibv_cmd_query_device_any() -> c_int = refuse_call;
    fn ibv_cmd_query_mr() -> c_int = refuse_call;
    fn ibv_cmd_query_port() -> c_int = refuse_call;
    fn ibv_cmd_query_port_speed() -> c_int = refuse_call;
    fn ibv_cmd_query_qp() -> c_int = refuse_call;
    fn ibv_cmd_query_srq() -> c_int = refuse_call;
    fn ibv_cmd_read_comp_cntr() -> c_int = refuse_call;
    fn ibv_cmd_read_counters() -> c_int = refuse_call;
    fn ibv_cmd_read_err_comp_cntr() -> c_int = refuse_call;
    fn ibv_cmd_reg_dm_mr() -> c_int = refuse_call;
    fn ibv_cmd_reg_dmabuf_mr() -> c_int = refuse_call;
    fn ibv_cmd_reg_mr() -> c_int = refuse_call;
    fn ibv_cmd_reg_mr_ex() -> c_int = refuse_call;
    fn ibv_cmd_req_notify_cq() -> c_int = refuse_call;
    fn ibv_cmd_rereg_mr() -> c_int = refuse_call;
    fn ibv_cmd_resize_cq() -> c_int = refuse_call;
    fn ibv_cmd_set_comp_cntr() -> c_int = refuse_call;
    fn ibv_cmd_set_err_comp_cntr() -> c_int = refuse_call;
    fn ibv_dmabuf_heap_alloc() -> *mut c_void = refuse_object;
    fn ibv_dmabuf_heap_cc_shared_init() -> *mut c_void = refuse_object;
    fn ibv_dmabuf_heap_destroy() = do_nothing;
    fn ibv_dmabuf_heap_free() = do_nothing;
}
