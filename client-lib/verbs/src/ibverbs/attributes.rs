//! Device attributes (ibv_query_device(3), ibv_query_device_ex(3)): the daemon's limits.

use super::context::ContextObject;
use super::device::copy_text;
use crate::abi::*;
use crate::status::fail_errno;
use siw::Persona;
use siw_shm::control::{
    CAP_ATOMIC, CAP_FAST_REG, CAP_MEM_WINDOW, MAX_AH, MAX_GROUPS, MAX_MEMBERSHIPS,
};
use std::ffi::c_int;

/// Converts unsigned numbers of the daemon to the signed ones of verbs.
fn to_int(number: u32) -> c_int {
    c_int::try_from(number).unwrap_or(c_int::MAX)
}

/// The attributes of a context's device.
pub fn device_attributes(context: &ContextObject) -> ibv_device_attr {
    let (limits, info) = (context.client().limits(), context.device().info());
    // SAFETY: the struct is made of numbers.
    let mut attr: ibv_device_attr = unsafe { std::mem::zeroed() };
    let daemon = context.client().daemon_version();
    copy_text(&mut attr.fw_ver, daemon.rsplit(' ').next().unwrap_or(""));
    attr.node_guid = context.device().guid();
    attr.sys_image_guid = attr.node_guid;
    attr.max_mr_size = limits.max_mr_size;
    // All powers of two from a page up.
    attr.page_size_cap = !0xfff;
    attr.vendor_id = u32::from_be_bytes([0, info.mac[0], info.mac[1], info.mac[2]]);
    attr.max_qp = to_int(limits.max_qp);
    attr.max_qp_wr = to_int(limits.max_qp_wr);
    // `siwrun --self-test` tests every bit. For PORT_ACTIVE_EVENT it would have to take a link
    // down.
    attr.device_cap_flags =
        IBV_DEVICE_SYS_IMAGE_GUID | IBV_DEVICE_SRQ_RESIZE | IBV_DEVICE_CURR_QP_STATE_MOD;
    if info.capabilities & CAP_MEM_WINDOW != 0 {
        attr.device_cap_flags |= IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2B;
        attr.max_mw = to_int(limits.max_mw);
    }
    if info.capabilities & CAP_FAST_REG != 0 {
        attr.device_cap_flags |= IBV_DEVICE_MEM_MGT_EXTENSIONS;
    }
    attr.max_sge = to_int(limits.max_sge);
    attr.max_sge_rd = to_int(limits.max_sge_rd);
    attr.max_cq = to_int(limits.max_cq);
    attr.max_cqe = to_int(limits.max_cqe);
    attr.max_mr = to_int(limits.max_mr);
    attr.max_pd = to_int(limits.max_pd);
    attr.max_qp_rd_atom = to_int(limits.max_ird);
    attr.max_qp_init_rd_atom = to_int(limits.max_ord);
    attr.max_res_rd_atom = to_int(limits.max_ird.saturating_mul(limits.max_qp));
    attr.atomic_cap = match context.device().persona() {
        _ if info.capabilities & CAP_ATOMIC == 0 => IBV_ATOMIC_NONE,
        // The worker uses the processor's own atomic instructions on the shared memory.
        Persona::Iwarp => IBV_ATOMIC_GLOB,
        // What hardware adapters promise; UCX uses atomics only of devices that say just this.
        Persona::Roce | Persona::Ib | Persona::Unspecified => IBV_ATOMIC_HCA,
    };
    attr.max_srq = to_int(limits.max_srq);
    attr.max_srq_wr = to_int(limits.max_srq_wr);
    attr.max_srq_sge = to_int(limits.max_srq_sge);
    if context.device().persona().has_datagrams() {
        attr.max_ah = to_int(MAX_AH);
    }
    if context.device().persona().has_datagrams() && context.client().has_multicast() {
        attr.max_mcast_grp = to_int(MAX_GROUPS);
        // All memberships of a program may be in one group.
        attr.max_mcast_qp_attach = to_int(MAX_MEMBERSHIPS);
        attr.max_total_mcast_qp_attach = to_int(MAX_MEMBERSHIPS);
    }
    attr.max_pkeys = 1;
    attr.phys_port_cnt = 1;
    attr
}

/// ibv_query_device(3)
pub unsafe fn query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    // SAFETY: a context of this library, and a struct to write.
    unsafe { attr.write(device_attributes(ContextObject::from_abi(context))) };
    0
}

/// ibv_query_device_ex(3), which programs call through the context.
pub unsafe fn query_device_ex(
    context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    attr_size: usize,
) -> c_int {
    // SAFETY: NULL or a struct to read.
    if unsafe { input.as_ref() }.is_some_and(|input| input.comp_mask != 0)
        || attr_size < size_of::<ibv_device_attr>()
    {
        return fail_errno(libc::EINVAL);
    }
    // SAFETY: a context of this library.
    let context = unsafe { ContextObject::from_abi(context) };
    // SAFETY: the struct is made of numbers.
    let mut full: ibv_device_attr_ex = unsafe { std::mem::zeroed() };
    full.orig_attr = device_attributes(context);
    full.device_cap_flags_ex = full.orig_attr.device_cap_flags.into();
    full.cq_mod_caps.max_cq_count = u16::MAX;
    full.cq_mod_caps.max_cq_period = u16::MAX;
    full.phys_port_cnt_ex = 1;
    let filled = attr_size.min(size_of::<ibv_device_attr_ex>());
    // SAFETY: the caller's struct has `attr_size` bytes; fields unknown to this release are zeroed.
    unsafe {
        let bytes: *mut u8 = attr.cast();
        bytes.write_bytes(0, attr_size);
        bytes.copy_from_nonoverlapping((&raw const full).cast(), filled);
    }
    0
}
