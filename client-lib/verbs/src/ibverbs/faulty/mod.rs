//! Faults of the plan at verbs: functions that take the place of the fast ones, and the state that they need
//! beside each object. Without a plan there is neither.
//!
//! | file | content |
//! |---|---|
//! | `posting.rs` | posts that fail, receive requests that are withheld |
//! | `completions.rs` | completions that fail, come late or in another order, queues that overrun |
//! | `events.rs` | asynchronous events |

mod completions;
mod events;
mod posting;

pub use completions::{CqFaults, Pending};
pub use events::ContextFaults;
pub use posting::{QpFaults, SrqFaults};

use super::context::ContextObject;
use super::cq_ex::fill_polling;
use super::qp::QpObject;
use crate::abi::*;
use crate::faults::{LoadedPlan, loaded_plan};
use std::ffi::c_int;
use std::fmt;

crate::export::fast_functions! {
    fn poll_cq(cq: *mut ibv_cq, count: c_int, out: *mut ibv_wc) -> c_int = completions::poll_cq;
    fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int
        = completions::req_notify_cq;
    fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int
        = completions::start_poll;
    fn next_poll(cq: *mut ibv_cq_ex) -> c_int = completions::next_poll;
    fn post_srq_recv(
        srq: *mut ibv_srq, list: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr,
    ) -> c_int = posting::post_srq_recv;
    fn post_send(qp: *mut ibv_qp, list: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int
        = posting::post_send;
    fn post_recv(qp: *mut ibv_qp, list: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int
        = posting::post_recv;
    fn wr_complete(qp: *mut ibv_qp_ex) -> c_int = posting::wr_complete;
}

/// Replaces the fast functions of `context->ops`.
pub fn replace_operations(context: &mut ibv_context) {
    let operations = &mut context.ops;
    operations.poll_cq = Some(poll_cq);
    operations.req_notify_cq = Some(req_notify_cq);
    operations.post_srq_recv = Some(post_srq_recv);
    operations.post_send = Some(post_send);
    operations.post_recv = Some(post_recv);
}

/// Replaces the functions of a completion queue that poll.
pub fn replace_polling(abi: &mut ibv_cq_ex) {
    fill_polling(abi, start_poll, next_poll);
}

/// Replaces the function of a queue pair that posts what `ibv_wr_start` began.
pub fn replace_wr_complete(abi: &mut ibv_qp_ex) {
    abi.wr_complete = Some(wr_complete);
}

/// The plan. Objects have faults only if there is one.
fn plan() -> &'static LoadedPlan {
    loaded_plan().unwrap_or_else(|| unreachable!("an object has faults without a plan"))
}

/// Name of an object in messages.
struct Name<'a> {
    kind: &'static str,
    number: u32,
    context: &'a ContextObject,
}

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = &self.context.device().info().name;
        write!(f, "{} {} of {device}", self.kind, self.number)
    }
}

fn name_of(queue_pair: &QpObject) -> Name<'_> {
    Name {
        kind: "QP",
        number: queue_pair.abi().qp_num,
        context: queue_pair.context(),
    }
}
