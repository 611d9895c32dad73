//! Names of enumerators (ibv_event_type_str(3), ibv_wc_status_str).

use crate::abi::*;
use std::ffi::{CStr, c_char, c_int};

const UNKNOWN: &CStr = c"unknown";

const NODE_TYPES: [&CStr; 8] = [
    UNKNOWN,
    c"InfiniBand channel adapter",
    c"InfiniBand switch",
    c"InfiniBand router",
    c"iWARP NIC",
    c"usNIC",
    c"usNIC UDP",
    c"unspecified",
];

const PORT_STATES: [&CStr; 6] = [
    c"no state change (NOP)",
    c"down",
    c"init",
    c"armed",
    c"active",
    c"active defer",
];

const EVENT_TYPES: [&CStr; 20] = [
    c"CQ error",
    c"local work queue catastrophic error",
    c"invalid request local work queue error",
    c"local access violation work queue error",
    c"communication established",
    c"send queue drained",
    c"path migrated",
    c"path migration request error",
    c"local catastrophic error",
    c"port active",
    c"port error",
    c"LID change",
    c"P_Key change",
    c"SM change",
    c"SRQ catastrophic error",
    c"SRQ limit reached",
    c"last WQE reached",
    c"client reregistration",
    c"GID table change",
    c"WQ fatal",
];

const COMPLETION_STATUSES: [&CStr; 24] = [
    c"success",
    c"local length error",
    c"local QP operation error",
    c"local EE context operation error",
    c"local protection error",
    c"Work Request Flushed Error",
    c"memory management operation error",
    c"bad response error",
    c"local access error",
    c"remote invalid request error",
    c"remote access error",
    c"remote operation error",
    c"transport retry counter exceeded",
    c"RNR retry counter exceeded",
    c"local RDD violation error",
    c"remote invalid RD request",
    c"aborted error",
    c"invalid EE context number",
    c"invalid EE context state",
    c"fatal error",
    c"response timeout error",
    c"general error",
    c"TM error",
    c"TM software rendezvous",
];

const WORK_REQUESTS: [&CStr; 14] = [
    c"rdma-write",
    c"rdma-write-with-imm",
    c"send",
    c"send-with-imm",
    c"rdma-read",
    c"atomic-cmp-and-swp",
    c"atomic-fetch-and-add",
    c"local-inv",
    c"bind-mw",
    c"send-with-inv",
    c"tso",
    c"driver1",
    c"flush",
    c"atomic-write",
];

fn name_in(names: &[&'static CStr], number: u32) -> *const c_char {
    names.get(number as usize).unwrap_or(&UNKNOWN).as_ptr()
}

/// ibv_node_type_str(3)
pub unsafe fn node_type(number: c_int) -> *const c_char {
    name_in(&NODE_TYPES, number as u32)
}

/// ibv_port_state_str(3)
pub unsafe fn port_state(number: ibv_port_state) -> *const c_char {
    name_in(&PORT_STATES, number)
}

/// ibv_event_type_str(3)
pub unsafe fn event_type(number: ibv_event_type) -> *const c_char {
    name_in(&EVENT_TYPES, number)
}

/// ibv_wc_status_str
pub unsafe fn completion_status(number: ibv_wc_status) -> *const c_char {
    name_in(&COMPLETION_STATUSES, number)
}

/// ibv_wr_opcode_str
pub unsafe fn work_request(number: ibv_wr_opcode) -> *const c_char {
    name_in(&WORK_REQUESTS, number)
}
