//! The C API: header and Rust have the same layouts; NULL is refused.

use siw::capi::*;
use std::mem::{offset_of, size_of};
use std::path::{Path, PathBuf};
use std::process::Command;

fn dir() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A fresh directory, removed when dropped.
struct Temp(PathBuf);

impl Temp {
    fn new(name: &str) -> Temp {
        let p = std::env::temp_dir().join(format!("siw-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&p).unwrap();
        Temp(p)
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn cc() -> Option<Command> {
    let found = Command::new("cc")
        .arg("--version")
        .output()
        .is_ok_and(|o| o.status.success());
    if !found {
        println!("skipped: no C compiler (cc) on this machine");
        return None;
    }
    let mut c = Command::new("cc");
    c.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(dir().join("include"));
    Some(c)
}

macro_rules! layout {
    ($out:ident, $c:literal, $t:ty, { $($rust:ident = $field:literal),* $(,)? }) => {
        $out += &format!("_Static_assert(sizeof(struct {}) == {}, \"size\");\n", $c, size_of::<$t>());
        $($out += &format!(
            "_Static_assert(offsetof(struct {}, {}) == {}, \"{}\");\n",
            $c, $field, offset_of!($t, $rust), $field
        );)*
    };
}

#[test]
fn the_header_has_the_layouts_and_numbers_of_the_library() {
    let Some(mut cc) = cc() else { return };
    let mut c = String::from("#include <siw.h>\n#include <stddef.h>\n");
    layout!(c, "siw_mpa_options", SiwMpaOptions, {
        size = "size", crc = "crc", mpa_rev = "mpa_rev", markers = "markers", rtr = "rtr",
        max_ird = "max_ird", max_ord = "max_ord",
        request_timeout_ms = "request_timeout_ms", accept_timeout_ms = "accept_timeout_ms",
        private_data = "private_data", terminate = "terminate", out_of_order = "out_of_order",
    });
    layout!(c, "siw_sge", siw::Sge, { addr = "addr", length = "length", lkey = "lkey" });
    layout!(c, "siw_send_wr", SiwSendWr, {
        wr_id = "wr_id", sg_list = "sg_list", num_sge = "num_sge", opcode = "opcode",
        flags = "flags", inv_rkey = "inv_rkey", remote_addr = "remote_addr", rkey = "rkey",
        inv_rkey = "imm_data", what = "atomic", what = "bind_mw", what = "reg_mr",
    });
    layout!(c, "siw_mw_bind", SiwMwBind, {
        addr = "addr", length = "length", lkey = "lkey", access = "access",
    });
    layout!(c, "siw_range", SiwRange, { offset = "offset", length = "length" });
    let at = offset_of!(SiwSendWr, what);
    for (field, offset) in [
        ("atomic.compare_add", offset_of!(SiwAtomic, compare_add)),
        ("atomic.swap", offset_of!(SiwAtomic, swap)),
        (
            "atomic.compare_add_mask",
            offset_of!(SiwAtomic, compare_add_mask),
        ),
        ("atomic.swap_mask", offset_of!(SiwAtomic, swap_mask)),
        ("bind_mw.mw", offset_of!(SiwBind, mw)),
        ("bind_mw.info", offset_of!(SiwBind, info)),
        ("bind_mw.rkey", offset_of!(SiwBind, rkey)),
        ("reg_mr.mr", offset_of!(SiwReg, mr)),
        ("reg_mr.iova", offset_of!(SiwReg, iova)),
        ("reg_mr.key", offset_of!(SiwReg, key)),
        ("reg_mr.access", offset_of!(SiwReg, access)),
        ("ud.ah", offset_of!(SiwUd, ah)),
        ("ud.remote_qpn", offset_of!(SiwUd, remote_qpn)),
        ("ud.remote_qkey", offset_of!(SiwUd, remote_qkey)),
    ] {
        c += &format!(
            "_Static_assert(offsetof(struct siw_send_wr, {field}) == {}, \"{field}\");\n",
            at + offset
        );
    }
    layout!(c, "siw_recv_wr", SiwRecvWr, { wr_id = "wr_id", sg_list = "sg_list", num_sge = "num_sge" });
    layout!(c, "siw_wc", SiwWc, {
        wr_id = "wr_id", status = "status", opcode = "opcode", qp_num = "qp_num",
        byte_len = "byte_len", flags = "flags", invalidated_rkey = "invalidated_rkey", invalidated_rkey = "imm_data",
        vendor_err = "vendor_err", src_qp = "src_qp",
    });
    layout!(c, "siw_ah_attr", SiwAhAttr, {
        size = "size", device = "device", remote = "remote", local = "local",
        remote_len = "remote_len", local_len = "local_len", hop_limit = "hop_limit",
        traffic_class = "traffic_class", flow_label = "flow_label", timeout_ms = "timeout_ms",
    });
    layout!(c, "siw_qp_init_attr", SiwQpInitAttr, {
        size = "size",
        send_cq = "send_cq", recv_cq = "recv_cq", max_send_wr = "max_send_wr",
        max_recv_wr = "max_recv_wr", max_send_sge = "max_send_sge",
        max_recv_sge = "max_recv_sge", max_inline_data = "max_inline_data",
        sq_sig_all = "sq_sig_all", srq = "srq",
    });
    layout!(c, "siw_qp_attr", SiwQpAttr, {
        state = "state", verbs_state = "verbs_state", sq_draining = "sq_draining",
        mulpdu = "mulpdu", initiator_depth = "initiator_depth",
        responder_resources = "responder_resources", max_send_wr = "max_send_wr",
        max_recv_wr = "max_recv_wr", max_send_sge = "max_send_sge",
        max_recv_sge = "max_recv_sge", max_inline_data = "max_inline_data",
        local = "local", peer = "peer",
    });
    layout!(c, "siw_srq_attr", SiwSrqAttr, {
        size = "size", max_wr = "max_wr", max_sge = "max_sge", srq_limit = "srq_limit", posted = "posted",
        max_share = "max_share",
    });
    layout!(c, "siw_limits", SiwLimits, {
        max_qp = "max_qp", max_qp_wr = "max_qp_wr", max_sge = "max_sge",
        max_sge_rd = "max_sge_rd", max_inline_data = "max_inline_data", max_cq = "max_cq",
        max_cqe = "max_cqe", max_mr = "max_mr", max_pd = "max_pd", max_srq = "max_srq",
        max_srq_wr = "max_srq_wr", max_srq_sge = "max_srq_sge",
        max_initiator_depth = "max_initiator_depth",
        max_responder_resources = "max_responder_resources",
        max_private_data = "max_private_data", max_mw = "max_mw", max_fast_pages = "max_fast_pages", max_msg = "max_msg", max_mr_size = "max_mr_size",
    });
    layout!(c, "siw_device_attr", SiwDeviceAttr, {
        name = "name", mac = "mac", index = "index", mtu = "mtu", active = "active",
        num_addrs = "num_addrs", capabilities = "capabilities", addrs = "addrs",
    });
    layout!(c, "siw_conn_param", SiwConnParam, {
        size = "size", refusals = "refusals", wait_for_receives = "wait_for_receives",
        source_len = "source_len", source = "source",
        private_data = "private_data", private_data_len = "private_data_len",
        initiator_depth = "initiator_depth", responder_resources = "responder_resources",
        timeout_ms = "timeout_ms", crc = "crc", mpa_rev = "mpa_rev", cookie = "cookie",
    });
    layout!(c, "siw_cm_event", SiwCmEvent, {
        kind = "type", err = "err", cookie = "cookie", request = "request", qp_num = "qp_num",
        request_id = "request_id", device = "device", initiator_depth = "initiator_depth",
        responder_resources = "responder_resources", crc = "crc", mpa_rev = "mpa_rev",
        private_data_len = "private_data_len", local = "local", peer = "peer",
        reason = "reason", private_data = "private_data",
    });
    layout!(c, "siw_service_event", SiwServiceEvent, {
        kind = "type", err = "err", cookie = "cookie", request = "request", device = "device",
        sidr_status = "sidr_status", qp_num = "qp_num", qkey = "qkey",
        private_data_len = "private_data_len", local = "local", peer = "peer", reason = "reason",
        private_data = "private_data",
    });
    layout!(c, "siw_search_param", SiwSearchParam, {
        size = "size", private_data_len = "private_data_len", private_data = "private_data",
        source = "source", source_len = "source_len", timeout_ms = "timeout_ms", cookie = "cookie",
    });
    layout!(c, "siw_async_event", SiwAsyncEvent, { kind = "type", object = "object", reason = "reason" });
    let numbers = [
        ("SIW_WR_RDMA_WRITE", siw::Opcode::Write as u64),
        ("SIW_WR_RDMA_READ", siw::Opcode::Read as u64),
        ("SIW_WR_SEND", siw::Opcode::Send as u64),
        ("SIW_WR_SEND_WITH_INV", siw::Opcode::SendWithInv as u64),
        (
            "SIW_WR_RDMA_WRITE_WITH_IMM",
            siw::Opcode::WriteWithImm as u64,
        ),
        ("SIW_WR_SEND_WITH_IMM", siw::Opcode::SendWithImm as u64),
        ("SIW_WR_ATOMIC_FETCH_AND_ADD", siw::Opcode::FetchAdd as u64),
        ("SIW_WR_ATOMIC_CMP_AND_SWP", siw::Opcode::CmpSwap as u64),
        ("SIW_WR_LOCAL_INV", siw::Opcode::LocalInv as u64),
        ("SIW_WR_REG_MR", siw::Opcode::RegMr as u64),
        ("SIW_WR_BIND_MW", siw::Opcode::BindMw as u64),
        ("SIW_WR_RDMA_READ_WITH_INV", siw::Opcode::ReadWithInv as u64),
        ("SIW_WC_COMP_SWAP", siw::WcOpcode::COMP_SWAP.0.into()),
        ("SIW_WC_FETCH_ADD", siw::WcOpcode::FETCH_ADD.0.into()),
        ("SIW_WC_BIND_MW", siw::WcOpcode::BIND_MW.0.into()),
        ("SIW_WC_LOCAL_INV", siw::WcOpcode::LOCAL_INV.0.into()),
        (
            "SIW_WC_RECV_RDMA_WITH_IMM",
            siw::WcOpcode::RECV_RDMA_WITH_IMM.0.into(),
        ),
        ("SIW_WC_MW_BIND_ERR", siw::WcStatus::MW_BIND_ERR.0.into()),
        ("SIW_WC_BAD_RESP_ERR", siw::WcStatus::BAD_RESP_ERR.0.into()),
        ("SIW_WC_WITH_IMM", siw::WcFlags::WITH_IMM.0.into()),
        (
            "SIW_ACCESS_REMOTE_ATOMIC",
            siw::Access::REMOTE_ATOMIC.0.into(),
        ),
        ("SIW_ACCESS_MW_BIND", siw::Access::MW_BIND.0.into()),
        (
            "SIW_ACCESS_RELAXED_ORDERING",
            siw::Access::RELAXED_ORDERING.0.into(),
        ),
        (
            "SIW_REREG_TRANSLATION",
            siw_shm::control::REREG_TRANSLATION.into(),
        ),
        ("SIW_REREG_PD", siw_shm::control::REREG_PD.into()),
        ("SIW_REREG_ACCESS", siw_shm::control::REREG_ACCESS.into()),
        ("SIW_SEND_SIGNALED", siw::WrFlags::SIGNALED.0.into()),
        ("SIW_SEND_SOLICITED", siw::WrFlags::SOLICITED.0.into()),
        ("SIW_SEND_FENCE", siw::WrFlags::FENCE.0.into()),
        ("SIW_SEND_INLINE", siw::WrFlags::INLINE.0.into()),
        ("SIW_WC_RDMA_READ", siw::WcOpcode::RDMA_READ.0.into()),
        ("SIW_WC_RECV", siw::WcOpcode::RECV.0.into()),
        ("SIW_WC_WR_FLUSH_ERR", siw::WcStatus::WR_FLUSH_ERR.0.into()),
        ("SIW_WC_GENERAL_ERR", siw::WcStatus::GENERAL_ERR.0.into()),
        ("SIW_WC_WITH_INV", siw::WcFlags::WITH_INV.0.into()),
        ("SIW_WC_GRH", siw::WcFlags::GRH.0.into()),
        ("SIW_WC_IPV4", siw::WcFlags::IPV4.0.into()),
        ("SIW_SEND_TO_AH", SEND_TO_AH.into()),
        ("SIW_GRH_LEN", siw::GRH_LEN as u64),
        ("SIW_MULTICAST_QPN", siw::MULTICAST_QPN.into()),
        ("SIW_WC_SOLICITED", siw::WcFlags::SOLICITED.0.into()),
        ("SIW_ACCESS_REMOTE_READ", siw::Access::REMOTE_READ.0.into()),
        (
            "SIW_ACCESS_REMOTE_WRITE",
            siw::Access::REMOTE_WRITE.0.into(),
        ),
        ("SIW_ACCESS_LOCAL_WRITE", siw::Access::LOCAL_WRITE.0.into()),
        ("SIW_ACCESS_ZERO_BASED", siw::Access::ZERO_BASED.0.into()),
        ("SIW_QPS_RTS", siw::QpState::Rts as u64),
        ("SIW_QPS_ERROR", siw::QpState::Error as u64),
        (
            "SIW_CM_DISCONNECTED",
            siw_shm::control::CmEventKind::Disconnected as u64,
        ),
        (
            "SIW_CM_DEVICE_REMOVAL",
            siw_shm::control::CmEventKind::DeviceRemoval as u64,
        ),
        (
            "SIW_EVENT_DEVICE_FATAL",
            siw::AsyncEventKind::DeviceFatal as u64,
        ),
        ("SIW_EVENT_PORT_ERR", siw::AsyncEventKind::PortErr as u64),
        (
            "SIW_EVENT_SRQ_LIMIT_REACHED",
            siw::AsyncEventKind::SrqLimitReached as u64,
        ),
        (
            "SIW_EVENT_QP_LAST_WQE_REACHED",
            siw::AsyncEventKind::QpLastWqeReached as u64,
        ),
        (
            "SIW_EVENT_GID_CHANGE",
            siw::AsyncEventKind::GidChange as u64,
        ),
        ("SIW_QPS_SQD", siw::QpState::Sqd as u64),
        ("SIW_SRQ_MAX_WR", siw_shm::control::SRQ_MAX_WR.into()),
        ("SIW_SRQ_LIMIT", siw_shm::control::SRQ_LIMIT.into()),
        ("SIW_CAP_IMMEDIATE", siw_shm::control::CAP_IMMEDIATE),
        ("SIW_CAP_ATOMIC", siw_shm::control::CAP_ATOMIC),
        ("SIW_CAP_MARKERS", siw_shm::control::CAP_MARKERS),
        ("SIW_CAP_LOCAL_INV", siw_shm::control::CAP_LOCAL_INV),
        ("SIW_CAP_MEM_WINDOW", siw_shm::control::CAP_MEM_WINDOW),
        ("SIW_CAP_FAST_REG", siw_shm::control::CAP_FAST_REG),
        ("SIW_SERVICE_QKEY", siw::SERVICE_QKEY.into()),
        ("SIW_SERVICE_REQUEST", SERVICE_REQUEST.into()),
        ("SIW_SERVICE_REPLY", SERVICE_REPLY.into()),
        ("SIW_VERSION", siw_version().into()),
    ];
    for (name, value) in numbers {
        c += &format!("_Static_assert({name} == {value}, \"{name}\");\n");
    }
    let temp = Temp::new("layout");
    let file = temp.0.join("layout.c");
    std::fs::write(&file, c).unwrap();
    let out = cc.arg("-fsyntax-only").arg(&file).output().unwrap();
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
}

#[test]
fn the_header_suits_old_standards_of_c_and_cpp() {
    let temp = Temp::new("standards");
    let compilers = [
        ("cc", "c", "c99"),
        ("cc", "c", "c11"),
        ("c++", "cc", "c++98"),
        ("c++", "cc", "c++17"),
    ];
    for (compiler, suffix, standard) in compilers {
        if Command::new(compiler).arg("--version").output().is_err() {
            println!("skipped: no {compiler} on this machine");
            continue;
        }
        let file = temp.0.join(format!("header.{suffix}"));
        let text =
            "#include <siw.h>\nint main(void) { return SIW_VERSION - (int)siw_version(); }\n";
        std::fs::write(&file, text).unwrap();
        let out = Command::new(compiler)
            .arg(format!("-std={standard}"))
            .args(["-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"])
            .arg("-I")
            .arg(dir().join("include"))
            .arg(&file)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{standard}: {said}");
    }
}

#[test]
fn null_pointers_are_refused_and_not_followed() {
    use std::ptr::{null, null_mut};
    // SAFETY: the header allows NULL everywhere here.
    unsafe {
        assert_eq!(siw_open(null(), null_mut()), libc::EINVAL);
        assert_eq!(siw_alloc_pd(null(), null_mut()), libc::EINVAL);
        assert_eq!(siw_poll_cq(null(), 1, null_mut()), -libc::EINVAL);
        assert_eq!(siw_post_send(null(), null(), 1, null_mut()), libc::EINVAL);
        assert_eq!(siw_post_recv(null(), null(), 0, null_mut()), libc::EINVAL);
        assert_eq!(siw_accept(null_mut(), null(), null(), null()), libc::EINVAL);
        assert_eq!(siw_get_cm_event(null(), null_mut(), 0), libc::EINVAL);
        assert_eq!(siw_qp_state(null()), -libc::EINVAL);
        assert_eq!(siw_qp_num(null()), 0);
        assert_eq!(siw_create_srq(null(), null(), null_mut()), libc::EINVAL);
        assert_eq!(
            siw_post_srq_recv(null(), null(), 1, null_mut()),
            libc::EINVAL
        );
        assert_eq!(siw_modify_srq(null(), null(), 1), libc::EINVAL);
        assert_eq!(siw_resize_cq(null(), 1), libc::EINVAL);
        assert_eq!(siw_query_qp(null(), null_mut()), libc::EINVAL);
        assert_eq!(siw_drain_sq(null(), None, null_mut(), 0), libc::EINVAL);
        siw_destroy_srq(null_mut());
        assert_eq!(siw_create_ah(null(), null(), null_mut()), libc::EINVAL);
        siw_destroy_ah(null_mut());
        assert_eq!(siw_start_datagrams(null(), 0, 1), libc::EINVAL);
        assert_eq!(siw_attach_group(null(), null(), 0), libc::EINVAL);
        assert_eq!(siw_detach_group(null(), null(), 0), libc::EINVAL);
        assert_eq!(
            siw_listen_service(null(), 0, null(), 0, 1, 0, null_mut()),
            libc::EINVAL
        );
        assert_eq!(
            siw_find_service(null(), 0, null(), 0, null(), null_mut()),
            libc::EINVAL
        );
        assert_eq!(siw_get_service_event(null(), null_mut(), 0), libc::EINVAL);
        assert_eq!(
            siw_accept_service(null_mut(), null(), 1, null(), 0),
            libc::EINVAL
        );
        assert_eq!(siw_reject_service(null_mut(), null(), 0), libc::EINVAL);
        siw_end_search(null_mut());
        assert_eq!(siw_dereg_mr(null_mut()), libc::EINVAL);
        assert_eq!(
            siw_rereg_mr(null_mut(), 4, null(), null(), 0, 0, 1),
            libc::EINVAL
        );
        assert_eq!(siw_alloc_mw(null(), 2, null_mut()), libc::EINVAL);
        assert_eq!(siw_bind_mw(null(), null(), 1, 0, null()), libc::EINVAL);
        assert_eq!(siw_map_fast_mr(null_mut(), null(), 1, 12), -libc::EINVAL);
        siw_dealloc_mw(null_mut());
        siw_free_fast_mr(null_mut());
        siw_free_arena(null_mut());
        assert!(siw_mr_ptr(null()).is_null());
        assert_eq!(
            siw_reg_memory(null(), null_mut(), 1, 1, null_mut()),
            libc::EINVAL
        );
        assert_eq!(
            siw_read_stats(null(), null_mut(), 0),
            -(libc::EINVAL as isize)
        );
        siw_close(null_mut());
        siw_destroy_qp(null_mut());
        let text = std::ffi::CStr::from_ptr(siw_last_error());
        assert!(text.to_str().unwrap().contains("NULL"));
        let text = std::ffi::CStr::from_ptr(siw_wc_status_str(5));
        assert_eq!(text.to_str().unwrap(), "work request flushed");
        siw_wc_status_str(u32::MAX);
    }
}
