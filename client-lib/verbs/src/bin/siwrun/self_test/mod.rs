//! `siwrun --self-test` exercises every capability, limit and operation that a pair of devices
//! advertises, through the functions of the drop-in library that programs call.
//!
//! | file | what it is |
//! |---|---|
//! | `verbs.rs` | the library's functions, contexts |
//! | `completions.rs`, `memory.rs`, `queue_pair.rs` | its objects, connections |
//! | `capabilities.rs` | bits of `device_cap_flags`, atomics |
//! | `datagrams.rs` | UD queue pairs, address handles |
//! | `limits.rs` | numbers of ibv_query_device(3) and ibv_query_port(3) |
//! | `operations.rs` | work requests, events, states |
//! | `proof.rs` | outcome of a check |

#[path = "../../../abi.rs"]
mod abi;
mod capabilities;
mod completions;
mod datagrams;
mod limits;
mod memory;
mod operations;
mod proof;
mod queue_pair;
mod verbs;

use proof::Proof;
use queue_pair::Bench;
use serde::Serialize;
use std::path::Path;
use std::process::ExitCode;

/// A check and its name, as in verbs.h if there is one.
type Check = (&'static str, fn(&Bench) -> Result<Proof, String>);

const CHECKS: &[Check] = &[
    ("device_cap_flags", capabilities::no_other_bit),
    ("SYS_IMAGE_GUID", capabilities::sys_image_guid),
    ("SRQ_RESIZE", capabilities::srq_resize),
    ("CURR_QP_STATE_MOD", capabilities::current_state),
    ("MEM_WINDOW", capabilities::memory_window),
    ("MEM_WINDOW_TYPE_2B", capabilities::window_of_one_stream),
    ("MEM_MGT_EXTENSIONS", capabilities::memory_management),
    ("atomic_cap", capabilities::check_atomics),
    ("max_qp", limits::max_qp),
    ("max_qp_wr", limits::max_qp_wr),
    ("max_sge, max_sge_rd", limits::max_sge),
    ("max_inline_data", limits::max_inline),
    ("max_qp_rd_atom", limits::max_rd_atom),
    ("max_cq", limits::max_cq),
    ("max_cqe", limits::max_cqe),
    ("cq_mod_caps", limits::cq_moderation),
    ("max_mr", limits::max_mr),
    ("max_mr_size", limits::max_mr_size),
    ("page_size_cap", limits::page_sizes),
    ("max_pd", limits::max_pd),
    ("max_mw", limits::max_mw),
    ("max_srq", limits::max_srq),
    ("max_srq_wr, max_srq_sge", limits::max_srq_wr),
    ("max_msg_sz", limits::max_message),
    ("persona", limits::check_persona),
    ("port", limits::check_port),
    ("SEND", operations::check_send),
    ("RDMA_WRITE", operations::check_write),
    ("RDMA_READ", operations::check_read),
    ("UD, max_ah", datagrams::check_datagrams),
    ("access rights", operations::access_rights),
    ("ibv_wr_*, ibv_cq_ex", operations::extended_interface),
    ("completion channels", operations::completion_events),
    ("states", operations::check_states),
    ("shared receive queues", operations::shared_receives),
    ("registration", operations::check_registration),
    ("ibv_resize_cq", operations::resize_cq),
];

/// Outcome of a check.
#[derive(Serialize)]
struct CheckResult {
    name: &'static str,
    /// `ok`, `not advertised` or `FAILED`.
    result: &'static str,
    detail: String,
}

fn run_check(bench: &Bench, (name, check): Check) -> CheckResult {
    let outcome = check(bench);
    let left = verbs::take_left_objects();
    let (result, detail) = match outcome {
        Err(why) => ("FAILED", why),
        Ok(_) if !left.is_empty() => ("FAILED", format!("not destroyed: {}", left.join(", "))),
        Ok(Proof::Done(what)) => ("ok", what),
        Ok(Proof::NotAdvertised) => ("not advertised", String::new()),
    };
    CheckResult {
        name,
        result,
        detail,
    }
}

/// Checks a pair of devices, by default the first two; the exit code is 0 if nothing failed, else
/// 1.
pub fn run(library: &Path, devices: &[String], json: bool) -> Result<ExitCode, String> {
    verbs::load_library(library)?;
    let known = verbs::device_names()?;
    let (near, far) = match (devices, known.as_slice()) {
        ([], [only]) | ([only], _) => (only, only),
        ([near, far, ..], _) | ([], [near, far, ..]) => (near, far),
        ([], []) => return Err("siwd has no device".into()),
    };
    let open = verbs::LibraryContext::open_device;
    let bench = Bench {
        near: open(near)?,
        far: open(far)?,
    };
    let mut lines = Vec::new();
    for check in CHECKS {
        let line = run_check(&bench, *check);
        if !json {
            println!("{:24} {:14} {}", line.name, line.result, line.detail);
        }
        lines.push(line);
    }
    let failed = lines.iter().filter(|line| line.result == "FAILED").count();
    if json {
        let document = serde_json::json!({
            "devices": [near, far],
            "works": failed == 0,
            "checks": lines,
        });
        println!("{document:#}");
    } else {
        println!("{near} and {far}: {} checks, {failed} failed", lines.len());
    }
    Ok(ExitCode::from(u8::from(failed > 0)))
}
