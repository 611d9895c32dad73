//! The structs and constants of `infiniband/verbs.h`, `rdma/rdma_cma.h` and `rdma/rsocket.h`, which
//! bindgen reads from the distribution's headers (build.rs), and the layout that programs compiled
//! against other releases rely on. The rest of this crate uses these definitions.
#![allow(
    non_camel_case_types,
    non_upper_case_globals,
    non_snake_case,
    dead_code,
    missing_docs
)]
#![allow(
    clippy::useless_transmute,
    clippy::missing_safety_doc,
    clippy::ptr_offset_with_cast,
    clippy::undocumented_unsafe_blocks,
    clippy::too_many_arguments
)]

include!(concat!(env!("OUT_DIR"), "/abi.rs"));

use core::mem::{offset_of, size_of};

/// Asserts the sizes and offsets that compiled programs use.
macro_rules! assert_layout {
    ($($type:ident $len:literal { $($field:ident $(. $inner:ident)? = $offset:literal),* })*) => {
        $(
            const _: () = assert!(size_of::<$type>() == $len);
            $(const _: () = assert!(offset_of!($type, $field $(. $inner)?) == $offset);)*
        )*
    };
}

assert_layout! {
    ibv_context 328 { ops.alloc_mw = 64, ops.bind_mw = 72, ops.dealloc_mw = 80, ops.poll_cq = 96,
        ops.req_notify_cq = 104, ops.post_srq_recv = 168, ops.post_send = 208, ops.post_recv = 216,
        abi_compat = 320 }
    ibv_device 664 { name = 24, dev_name = 88, dev_path = 152, ibdev_path = 408 }
    ibv_pd 16 { context = 0 }
    ibv_mr 48 { addr = 16, length = 24, lkey = 36, rkey = 40 }
    ibv_mw 32 { rkey = 16, type_ = 24 }
    ibv_cq 128 { channel = 8, cq_context = 16, cqe = 28 }
    ibv_srq 128 { srq_context = 8, pd = 16 }
    ibv_qp 160 { qp_num = 52, state = 56, qp_type = 60 }
    ibv_ah 24 { pd = 8 }
    ibv_comp_channel 16 { fd = 8 }
    ibv_wc 48 { status = 8, opcode = 12, byte_len = 20, qp_num = 28, wc_flags = 36 }
    ibv_sge 16 { length = 8, lkey = 12 }
    ibv_send_wr 128 { next = 8, sg_list = 16, num_sge = 24, opcode = 28, send_flags = 32, wr = 40 }
    ibv_recv_wr 32 { next = 8, sg_list = 16, num_sge = 24 }
    ibv_qp_init_attr 64 { cap = 32, qp_type = 52 }
    ibv_qp_init_attr_ex 136 { comp_mask = 60, pd = 64, send_ops_flags = 128 }
    ibv_qp_attr 144 { ah_attr = 56 }
    ibv_device_attr 232 { node_guid = 64 }
    ibv_async_event 16 { event_type = 8 }
    ibv_gid_entry 32 { gid_index = 16, port_num = 20, gid_type = 24, ndev_ifindex = 28 }
    ibv_srq_attr 12 { max_sge = 4, srq_limit = 8 }
    ibv_srq_init_attr 24 { attr = 8 }
    ibv_srq_init_attr_ex 64 { comp_mask = 20, srq_type = 24, pd = 32 }
    ibv_mw_bind 48 { send_flags = 8, bind_info = 16 }
    ibv_mw_bind_info 32 { addr = 8, length = 16, mw_access_flags = 24 }
    ibv_modify_cq_attr 8 { moderate = 4 }
    ibv_poll_cq_attr 4 { comp_mask = 0 }
    ibv_cq_init_attr_ex 56 { channel = 16, wc_flags = 32, comp_mask = 40, flags = 44 }
    ibv_ah_attr 32 { dlid = 24, is_global = 29, port_num = 30 }
    ibv_global_route 24 { flow_label = 16, sgid_index = 20 }
    ibv_ece 12 { options = 4, comp_mask = 8 }
    ibv_data_buf 16 { length = 8 }
    rdma_event_channel 4 { fd = 0 }
    rdma_cm_join_mc_attr_ex 16 { addr = 8 }
    ibv_cq_ex 288 { start_poll = 144 }
    rdma_cm_id 416 { qp = 24, route = 32, ps = 344, port_num = 348, event = 352, pd = 400,
        qp_type = 408 }
    rdma_cm_event 80 { param = 24 }
    rdma_conn_param 24 { private_data_len = 8 }
    rdma_addrinfo 96 { ai_family = 4 }
}

/// Zeroes beside a struct that the library hands to programs and that releases lengthen by function pointers:
/// at the end, [`verbs_context`] at its beginning. A program that is compiled against a newer header than this
/// library finds NULL there, as with every provider that lacks the operation.
pub type LaterFields = [usize; 16];
/// See [`LaterFields`].
pub const LATER_FIELDS: LaterFields = [0; 16];

// Structs that have grown at their end in later releases.
const _: () = assert!(size_of::<ibv_qp_ex>() >= 352 && offset_of!(ibv_qp_ex, wr_start) == 320);
const _: () = assert!(size_of::<ibv_device_attr_ex>() >= 400);
const _: () = assert!(size_of::<ibv_port_attr>() >= 52 && offset_of!(ibv_port_attr, lid) == 34);

/// Asserts the distance of a `verbs_context` slot from the context, from which programs count back.
macro_rules! assert_slot {
    ($($field:ident $before:literal),*) => {
        $(const _: () = assert!(
            offset_of!(verbs_context, context) - offset_of!(verbs_context, $field) == $before
        );)*
    };
}

assert_slot! { query_port 320, create_cq_ex 120, query_device_ex 104, create_qp_ex 56,
create_srq_ex 40, sz 8 }
