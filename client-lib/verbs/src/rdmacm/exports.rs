//! The symbols of librdmacm, and those of siw_rdma.h, by version node.

use super::unsupported as not;
use super::{
    address, addrinfo, channel, connect, devices, endpoint, events, lifecycle, lookup, multicast,
    queues, streaming,
};
use crate::abi::*;
use crate::export::{export_symbols, export_waiting_symbols};
use std::ffi::{c_char, c_int, c_void};

export_symbols! { "RDMACM_1.0":
    fn rdma_create_event_channel() -> *mut rdma_event_channel = channel::create_event_channel;
    fn rdma_destroy_event_channel(channel: *mut rdma_event_channel)
        = events::destroy_event_channel;
    fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int = events::ack_cm_event;
    fn rdma_event_str(kind: rdma_cm_event_type) -> *const c_char = events::event_text;
    fn rdma_create_id(
        channel: *mut rdma_event_channel, id: *mut *mut rdma_cm_id, context: *mut c_void,
        ps: rdma_port_space,
    ) -> c_int = lifecycle::create_id;
    fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int = lifecycle::destroy_id;
    fn rdma_migrate_id(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> c_int
        = lifecycle::migrate_id;
    fn rdma_bind_addr(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int = address::bind_addr;
    fn rdma_set_option(
        id: *mut rdma_cm_id, level: c_int, name: c_int, value: *mut c_void, length: usize,
    ) -> c_int = address::set_option;
    fn rdma_get_src_port(id: *mut rdma_cm_id) -> u16 = address::get_src_port;
    fn rdma_get_dst_port(id: *mut rdma_cm_id) -> u16 = address::get_dst_port;
    fn rdma_create_qp(
        id: *mut rdma_cm_id, pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr,
    ) -> c_int = queues::create_qp;
    fn rdma_create_qp_ex(id: *mut rdma_cm_id, attr: *mut ibv_qp_init_attr_ex) -> c_int
        = queues::create_qp_ex;
    fn rdma_destroy_qp(id: *mut rdma_cm_id) = queues::destroy_qp;
    fn rdma_create_srq(
        id: *mut rdma_cm_id, pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr,
    ) -> c_int = queues::create_srq;
    fn rdma_create_srq_ex(id: *mut rdma_cm_id, attr: *mut ibv_srq_init_attr_ex) -> c_int
        = queues::create_srq_ex;
    fn rdma_destroy_srq(id: *mut rdma_cm_id) = queues::destroy_srq;
    fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int = connect::listen;
    fn rdma_reject(id: *mut rdma_cm_id, data: *const c_void, length: u8) -> c_int
        = connect::reject;
    fn rdma_notify(id: *mut rdma_cm_id, event: ibv_event_type) -> c_int = connect::notify;
    fn rdma_get_devices(count: *mut c_int) -> *mut *mut ibv_context = devices::get_devices;
    fn rdma_free_devices(list: *mut *mut ibv_context) = devices::free_devices;
    fn rdma_getaddrinfo(
        node: *const c_char, service: *const c_char, hints: *const rdma_addrinfo,
        result: *mut *mut rdma_addrinfo,
    ) -> c_int = addrinfo::getaddrinfo;
    fn rdma_freeaddrinfo(info: *mut rdma_addrinfo) = addrinfo::freeaddrinfo;
    fn rdma_create_ep(
        id: *mut *mut rdma_cm_id, info: *mut rdma_addrinfo, pd: *mut ibv_pd,
        init: *mut ibv_qp_init_attr,
    ) -> c_int = endpoint::create_ep;
    fn rdma_destroy_ep(id: *mut rdma_cm_id) = endpoint::destroy_ep;
    fn rdma_leave_multicast(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int
        = multicast::leave_multicast;
}

export_waiting_symbols! { "RDMACM_1.0":
    fn rdma_get_cm_event(
        channel: *mut rdma_event_channel, event: *mut *mut rdma_cm_event,
    ) -> c_int = events::get_cm_event;
    fn rdma_resolve_addr(
        id: *mut rdma_cm_id, src: *mut sockaddr, dst: *mut sockaddr, timeout_ms: c_int,
    ) -> c_int = address::resolve_addr;
    fn rdma_resolve_route(id: *mut rdma_cm_id, timeout_ms: c_int) -> c_int
        = address::resolve_route;
    fn rdma_connect(id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int
        = connect::connect;
    fn rdma_accept(id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int = connect::accept;
    fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int = connect::disconnect;
    fn rdma_get_request(listen: *mut rdma_cm_id, id: *mut *mut rdma_cm_id) -> c_int
        = endpoint::get_request;
    fn rdma_join_multicast(
        id: *mut rdma_cm_id, addr: *mut sockaddr, context: *mut c_void,
    ) -> c_int = multicast::join_multicast;
}

export_waiting_symbols! { "RDMACM_1.1":
    fn rdma_join_multicast_ex(
        id: *mut rdma_cm_id, attr: *mut rdma_cm_join_mc_attr_ex, context: *mut c_void,
    ) -> c_int = multicast::join_multicast_ex;
}

export_symbols! { "RDMACM_1.2":
    fn rdma_establish(id: *mut rdma_cm_id) -> c_int = connect::establish;
    fn rdma_init_qp_attr(
        id: *mut rdma_cm_id, attr: *mut ibv_qp_attr, mask: *mut c_int,
    ) -> c_int = queues::init_qp_attr;
}

export_symbols! { "RDMACM_1.3":
    fn rdma_set_local_ece(id: *mut rdma_cm_id, ece: *mut ibv_ece) -> c_int = not::exchange_ece;
    fn rdma_get_remote_ece(id: *mut rdma_cm_id, ece: *mut ibv_ece) -> c_int = not::exchange_ece;
    fn rdma_reject_ece(id: *mut rdma_cm_id, data: *const c_void, length: u8) -> c_int
        = connect::reject;
}

export_symbols! { "RDMACM_1.4":
    fn rdma_query_addrinfo(id: *mut rdma_cm_id, info: *mut *mut rdma_addrinfo) -> c_int
        = lookup::query_addrinfo;
    fn rdma_write_cm_event(
        id: *mut rdma_cm_id, kind: rdma_cm_event_type, status: c_int, argument: u64,
    ) -> c_int = lookup::write_cm_event;
}

export_waiting_symbols! { "RDMACM_1.4":
    fn rdma_resolve_addrinfo(
        id: *mut rdma_cm_id, node: *const c_char, service: *const c_char,
        hints: *const rdma_addrinfo,
    ) -> c_int = lookup::resolve_addrinfo;
}

export_waiting_symbols! { "SIWD_1.0":
    fn siw_stream_open(id: *mut rdma_cm_id, timeout_ms: c_int) -> c_int = streaming::open;
    fn siw_stream_send(
        id: *mut rdma_cm_id, data: *const c_void, length: usize, timeout_ms: c_int,
    ) -> isize = streaming::send;
    fn siw_stream_recv(
        id: *mut rdma_cm_id, data: *mut c_void, length: usize, timeout_ms: c_int,
    ) -> isize = streaming::recv;
}
