//! The symbols of libibverbs, by version node.

use super::unsupported as not;
use super::{
    address_vector, async_event, attributes, buffer, channel, comp_counter, cq, device, fork, gid,
    mr, multicast, names, open, pd, port, qp, qp_state, rates, srq, sysfs,
};
use crate::abi::*;
use crate::export::{export_symbols, export_waiting_symbols};
use std::ffi::{c_char, c_int, c_void};

export_symbols! { "IBVERBS_1.0":
    fn ibv_get_sysfs_path() -> *const c_char = sysfs::get_sysfs_path;
    fn ibv_read_sysfs_file(
        dir: *const c_char, file: *const c_char, buffer: *mut c_char, size: usize,
    ) -> c_int = sysfs::read_sysfs_file;
    fn ibv_rate_to_mult(rate: ibv_rate) -> c_int = rates::to_mult;
    fn mult_to_ibv_rate(mult: c_int) -> ibv_rate = rates::from_mult;
    fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel
        = channel::create_channel;
    fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int
        = channel::destroy_channel;
    fn ibv_copy_path_rec_from_kern(to: *mut c_void, from: *mut c_void) = not::copy_kernel_struct;
    fn ibv_copy_path_rec_to_kern(to: *mut c_void, from: *mut c_void) = not::copy_kernel_struct;
    fn ibv_copy_qp_attr_from_kern(to: *mut c_void, from: *mut c_void) = not::copy_kernel_struct;
}

export_symbols! { "IBVERBS_1.1":
    fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device = device::get_device_list;
    fn ibv_free_device_list(list: *mut *mut ibv_device) = device::free_device_list;
    fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char = device::get_device_name;
    fn ibv_get_device_guid(device: *mut ibv_device) -> u64 = device::get_device_guid;
    fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context = open::open_device;
    fn ibv_close_device(context: *mut ibv_context) -> c_int = open::close_device;
    fn ibv_query_device(
        context: *mut ibv_context, attr: *mut ibv_device_attr,
    ) -> c_int = attributes::query_device;
    fn ibv_query_port(
        context: *mut ibv_context, port_num: u8, attr: *mut _compat_ibv_port_attr,
    ) -> c_int = port::query_port;
    fn ibv_query_gid(
        context: *mut ibv_context, port_num: u8, index: c_int, gid: *mut ibv_gid,
    ) -> c_int = gid::query_gid;
    fn ibv_query_pkey(
        context: *mut ibv_context, port_num: u8, index: c_int, pkey: *mut u16,
    ) -> c_int = port::query_pkey;
    fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd = pd::alloc_pd;
    fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int = pd::dealloc_pd;
    fn ibv_reg_mr(pd: *mut ibv_pd, address: *mut c_void, length: usize, access: c_int)
        -> *mut ibv_mr = mr::reg_mr;
    fn ibv_rereg_mr(
        mr: *mut ibv_mr, flags: c_int, pd: *mut ibv_pd, address: *mut c_void, length: usize,
        access: c_int,
    ) -> c_int = mr::rereg_mr;
    fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int = mr::dereg_mr;
    fn ibv_create_cq(
        context: *mut ibv_context, cqe: c_int, cq_context: *mut c_void,
        channel: *mut ibv_comp_channel, comp_vector: c_int,
    ) -> *mut ibv_cq = cq::create_cq;
    fn ibv_resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int = cq::resize_cq;
    fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int = cq::destroy_cq;
    fn ibv_ack_cq_events(cq: *mut ibv_cq, count: u32) = channel::ack_cq_events;
    fn ibv_ack_async_event(event: *mut ibv_async_event) = async_event::ack_async_event;
    fn ibv_create_srq(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq
        = srq::create_srq;
    fn ibv_modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int
        = srq::modify_srq;
    fn ibv_query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int = srq::query_srq;
    fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int = srq::destroy_srq;
    fn ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp
        = qp::create_qp;
    fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int
        = qp_state::modify_qp;
    fn ibv_query_qp(
        qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int, init: *mut ibv_qp_init_attr,
    ) -> c_int = qp_state::query_qp;
    fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int = qp::destroy_qp;
    fn ibv_fork_init() -> c_int = fork::init_fork;
    fn ibv_dontfork_range(base: *mut c_void, size: usize) -> c_int = fork::exclude_range;
    fn ibv_dofork_range(base: *mut c_void, size: usize) -> c_int = fork::include_range;
    fn ibv_node_type_str(number: c_int) -> *const c_char = names::node_type;
    fn ibv_port_state_str(number: ibv_port_state) -> *const c_char = names::port_state;
    fn ibv_event_type_str(number: ibv_event_type) -> *const c_char = names::event_type;
    fn ibv_wc_status_str(number: ibv_wc_status) -> *const c_char = names::completion_status;
    fn ibv_rate_to_mbps(rate: ibv_rate) -> c_int = rates::to_mbps;
    fn mbps_to_ibv_rate(mbps: c_int) -> ibv_rate = rates::from_mbps;
    fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah = address_vector::create_ah;
    fn ibv_create_ah_from_wc(
        pd: *mut ibv_pd, wc: *mut ibv_wc, grh: *mut ibv_grh, port_num: u8,
    ) -> *mut ibv_ah = address_vector::create_ah_from_wc;
    fn ibv_init_ah_from_wc(
        context: *mut ibv_context, port_num: u8, wc: *mut ibv_wc, grh: *mut ibv_grh,
        ah_attr: *mut ibv_ah_attr,
    ) -> c_int = address_vector::init_ah_from_wc;
    fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int = address_vector::destroy_ah;
    fn ibv_attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int
        = multicast::attach;
    fn ibv_detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int
        = multicast::detach;
    fn ibv_resolve_eth_l2_from_gid(
        context: *mut ibv_context, attr: *mut ibv_ah_attr, mac: *mut u8, vlan: *mut u16,
    ) -> c_int = not::resolve_ethernet_address;
    fn ibv_copy_ah_attr_from_kern(to: *mut c_void, from: *mut c_void) = not::copy_kernel_struct;
    fn ibv_register_driver(driver: *const c_void) = not::register_driver;
}

export_waiting_symbols! { "IBVERBS_1.1":
    fn ibv_get_cq_event(
        channel: *mut ibv_comp_channel, cq: *mut *mut ibv_cq, cq_context: *mut *mut c_void,
    ) -> c_int = channel::get_cq_event;
    fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int
        = async_event::get_async_event;
}

export_symbols! { "IBVERBS_1.5":
    fn ibv_get_pkey_index(context: *mut ibv_context, port_num: u8, pkey: u16) -> c_int
        = port::get_pkey_index;
}

export_symbols! { "IBVERBS_1.6":
    fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex = qp::to_extended;
}

export_symbols! { "IBVERBS_1.7":
    fn ibv_reg_mr_iova(
        pd: *mut ibv_pd, address: *mut c_void, length: usize, iova: u64, access: c_int,
    ) -> *mut ibv_mr = mr::reg_mr_iova;
}

export_symbols! { "IBVERBS_1.8":
    fn ibv_reg_mr_iova2(
        pd: *mut ibv_pd, address: *mut c_void, length: usize, iova: u64, access: u32,
    ) -> *mut ibv_mr = mr::reg_mr_iova2;
}

export_symbols! { "IBVERBS_1.9":
    fn ibv_get_device_index(device: *mut ibv_device) -> c_int = device::get_device_index;
}

export_symbols! { "IBVERBS_1.10":
    fn ibv_query_ece(qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int = not::exchange_ece;
    fn ibv_set_ece(qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int = not::exchange_ece;
    fn ibv_import_device(cmd_fd: c_int) -> *mut ibv_context = not::import_device;
    fn ibv_import_pd(context: *mut ibv_context, handle: u32) -> *mut c_void
        = not::import_from_context;
    fn ibv_import_mr(pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr = not::import_mr;
    fn ibv_unimport_pd(object: *mut c_void) = not::forget_import;
    fn ibv_unimport_mr(object: *mut c_void) = not::forget_import;
}

export_symbols! { "IBVERBS_1.11":
    fn _ibv_query_gid_ex(
        context: *mut ibv_context, port_num: u32, index: u32, entry: *mut ibv_gid_entry,
        flags: u32, entry_size: usize,
    ) -> c_int = gid::query_gid_ex;
    fn _ibv_query_gid_table(
        context: *mut ibv_context, entries: *mut ibv_gid_entry, max_entries: usize, flags: u32,
        entry_size: usize,
    ) -> isize = gid::query_gid_table;
}

export_symbols! { "IBVERBS_1.12":
    fn ibv_reg_dmabuf_mr(
        pd: *mut ibv_pd, offset: u64, length: usize, iova: u64, fd: c_int, access: c_int,
    ) -> *mut ibv_mr = not::register_dmabuf;
}

export_symbols! { "IBVERBS_1.13":
    fn ibv_is_fork_initialized() -> ibv_fork_status = fork::is_fork_initialized;
    fn ibv_import_dm(context: *mut ibv_context, handle: u32) -> *mut c_void
        = not::import_from_context;
    fn ibv_unimport_dm(object: *mut c_void) = not::forget_import;
}

export_symbols! { "IBVERBS_1.14":
    fn ibv_query_qp_data_in_order(qp: *mut ibv_qp, opcode: ibv_wr_opcode, flags: u32) -> c_int
        = not::query_data_in_order;
}

export_symbols! { "IBVERBS_1.15":
    fn ibv_reg_mr_ex(pd: *mut ibv_pd, attr: *mut mr::MrInit) -> *mut ibv_mr = mr::reg_mr_ex;
    fn ibv_alloc_dmah(context: *mut ibv_context, attr: *mut c_void) -> *mut c_void
        = not::create_from_context;
    fn ibv_dealloc_dmah(handle: *mut c_void) -> c_int = not::change_object;
}

export_symbols! { "IBVERBS_1.16":
    fn ibv_query_port_speed(context: *mut ibv_context, port_num: u32, speed: *mut u64) -> c_int
        = port::query_port_speed;
    fn ibv_dm_export_dmabuf_fd(memory: *mut c_void) -> c_int = not::export_dmabuf;
}

export_symbols! { "IBVERBS_1.17":
    fn ibv_alloc_buf(pd: *mut ibv_pd, size: usize, buffer: *mut *mut buffer::BufferObject)
        -> *mut c_void = buffer::alloc_buffer;
    fn ibv_free_buf(buffer: *mut buffer::BufferObject) = buffer::free_buffer;
    fn ibv_reg_buf_mr(
        pd: *mut ibv_pd, buffer: *mut buffer::BufferObject, address: *mut c_void, length: usize,
        access: c_int,
    ) -> *mut ibv_mr = buffer::register_buffer;
}

export_symbols! { "IBVERBS_1.18":
    fn _ibv_query_comp_cntr_caps(
        context: *mut ibv_context, caps: *mut comp_counter::CounterCaps, length: usize,
    ) -> c_int = comp_counter::query_caps;
    fn ibv_create_comp_cntr(context: *mut ibv_context, init: *mut comp_counter::CounterInit)
        -> *mut comp_counter::CompCounterAbi = comp_counter::create;
    fn ibv_destroy_comp_cntr(counter: *mut comp_counter::CompCounterAbi) -> c_int
        = comp_counter::destroy;
    fn ibv_set_comp_cntr(counter: *mut comp_counter::CompCounterAbi, value: u64) -> c_int
        = comp_counter::set_completed;
    fn ibv_set_err_comp_cntr(counter: *mut comp_counter::CompCounterAbi, value: u64) -> c_int
        = comp_counter::set_failed;
    fn ibv_inc_comp_cntr(counter: *mut comp_counter::CompCounterAbi, amount: u64) -> c_int
        = comp_counter::increment_completed;
    fn ibv_inc_err_comp_cntr(counter: *mut comp_counter::CompCounterAbi, amount: u64) -> c_int
        = comp_counter::increment_failed;
    fn ibv_read_comp_cntr(counter: *mut comp_counter::CompCounterAbi, value: *mut u64) -> c_int
        = comp_counter::read_completed;
    fn ibv_read_err_comp_cntr(counter: *mut comp_counter::CompCounterAbi, value: *mut u64) -> c_int
        = comp_counter::read_failed;
    fn ibv_qp_attach_comp_cntr(
        qp: *mut ibv_qp, counter: *mut comp_counter::CompCounterAbi,
        attr: *mut comp_counter::AttachAttr,
    ) -> c_int = qp::attach_counter;
    fn ibv_export_buf_dmabuf_fd(buffer: *mut buffer::BufferObject) -> c_int
        = buffer::export_buffer;
}

export_symbols! { private:
    fn ibv_query_gid_type(
        context: *mut ibv_context, port_num: u8, index: u32, kind: *mut u32,
    ) -> c_int = gid::query_gid_type;
    fn ibv_read_ibdev_sysfs_file(
        buffer: *mut c_char, size: usize, device: *mut ibv_device, format: *const c_char,
    ) -> c_int = sysfs::read_ibdev_sysfs_file;
    fn ibv_wr_opcode_str(opcode: ibv_wr_opcode) -> *const c_char = names::work_request;
}
