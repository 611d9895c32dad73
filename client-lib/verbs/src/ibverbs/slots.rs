//! Functions that programs call through the structs of a context: `context->ops`, and the slots of
//! `verbs_get_ctx_op`.

use super::{attributes, cq, cq_ex, mr, mw, port, post, qp, srq};
use crate::abi::*;
use crate::export::{c_functions, fast_functions};
use std::ffi::c_int;

c_functions! {
    fn alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw = mw::alloc_mw;
    fn bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> c_int = post::bind_mw;
    fn dealloc_mw(mw: *mut ibv_mw) -> c_int = mw::dealloc_mw;
    fn query_device_ex(
        context: *mut ibv_context, input: *const ibv_query_device_ex_input,
        attr: *mut ibv_device_attr_ex, attr_size: usize,
    ) -> c_int = attributes::query_device_ex;
    fn query_port(
        context: *mut ibv_context, port_num: u8, attr: *mut ibv_port_attr, length: usize,
    ) -> c_int = port::query_port_sized;
    fn create_cq_ex(context: *mut ibv_context, attr: *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex
        = cq_ex::create_cq_ex;
    fn modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int = cq::modify_cq;
    fn create_qp_ex(context: *mut ibv_context, attr: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp
        = qp::create_qp_ex;
    fn create_srq_ex(context: *mut ibv_context, attr: *mut ibv_srq_init_attr_ex) -> *mut ibv_srq
        = srq::create_srq_ex;
    fn get_srq_num(srq: *mut ibv_srq, number: *mut u32) -> c_int = srq::get_srq_num;
    fn advise_mr(
        pd: *mut ibv_pd, advice: ib_uverbs_advise_mr_advice, flags: u32, list: *mut ibv_sge,
        count: u32,
    ) -> c_int = mr::advise_mr;
}

fast_functions! {
    pub(super) fn poll_cq(cq: *mut ibv_cq, count: c_int, out: *mut ibv_wc) -> c_int = cq::poll_cq;
    pub(super) fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int = cq::req_notify_cq;
    pub(super) fn post_srq_recv(
        srq: *mut ibv_srq, list: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr,
    ) -> c_int = post::post_srq_recv;
    pub(super) fn post_send(qp: *mut ibv_qp, list: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int
        = post::post_send;
    pub(super) fn post_recv(qp: *mut ibv_qp, list: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int
        = post::post_recv;
}

/// Fills in the functions of `context->ops`.
pub fn fill_operations(context: &mut ibv_context) {
    let operations = &mut context.ops;
    operations.alloc_mw = Some(alloc_mw);
    operations.bind_mw = Some(bind_mw);
    operations.dealloc_mw = Some(dealloc_mw);
    operations.poll_cq = Some(poll_cq);
    operations.req_notify_cq = Some(req_notify_cq);
    operations.post_srq_recv = Some(post_srq_recv);
    operations.post_send = Some(post_send);
    operations.post_recv = Some(post_recv);
}

/// Fills in the functions of `verbs_get_ctx_op`. Empty slots mean EOPNOTSUPP.
pub fn fill_extended_operations(abi: &mut verbs_context) {
    abi.query_device_ex = Some(query_device_ex);
    abi.query_port = Some(query_port);
    abi.create_cq_ex = Some(create_cq_ex);
    abi.modify_cq = Some(modify_cq);
    abi.create_qp_ex = Some(create_qp_ex);
    abi.create_srq_ex = Some(create_srq_ex);
    abi.get_srq_num = Some(get_srq_num);
    abi.advise_mr = Some(advise_mr);
}
