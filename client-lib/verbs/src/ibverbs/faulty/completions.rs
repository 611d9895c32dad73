//! Completions that fail, come late or in another order, and completion queues that overrun.
//!
//! A poll takes all completions from the queue of the client library into a list, and gives the program those
//! whose time has come. The completions of a queue pair stay in order.

use super::{Name, name_of, plan};
use crate::abi::*;
use crate::ibverbs::context::ContextObject;
use crate::ibverbs::cq::{CqObject, poll_into};
use crate::ibverbs::cq_ex;
use crate::ibverbs::qp::QpObject;
use crate::ibverbs::slots;
use siw::{AsyncEvent, AsyncEventKind, Error, ProcessMutex, Qp, Wc, WcOpcode, WcStatus};
use siw_faults::{Decider, Hit, Kind, Operation, Scope, Site};
use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Faults of a completion queue.
pub struct CqFaults(ProcessMutex<State>);

struct State {
    decider: Decider,
    /// Completions that the program has not got.
    held: VecDeque<Held>,
    is_overrun: bool,
    /// The program waits for an event (ibv_req_notify_cq(3)).
    is_armed: bool,
}

struct Held {
    completion: Wc,
    /// Time from which on the program gets it; None: at once.
    due: Option<Instant>,
    /// It may follow the next completion of another queue pair before that time.
    is_passed: bool,
}

static LAST_CQ: AtomicU64 = AtomicU64::new(0);

/// Completions taken from the client library at once.
const BATCH: usize = 16;
/// Completions that are held at most: the others stay in the queue.
const MOST_HELD: usize = 1 << 16;

impl State {
    /// Takes the completions whose time has come.
    fn deliver(&mut self, out: &mut [Wc], now: Instant) -> usize {
        let mut waiting: Vec<u32> = Vec::new();
        let (mut taken, mut index) = (0, 0);
        while taken < out.len() && index < self.held.len() {
            let held = &self.held[index];
            let qp_num = held.completion.qp_num;
            let is_due = held.due.is_none_or(|due| due <= now);
            if !is_due || waiting.contains(&qp_num) {
                waiting.push(qp_num);
                index += 1;
                continue;
            }
            out[taken] = held.completion;
            taken += 1;
            self.held.remove(index);
            for other in &mut self.held {
                if other.is_passed && other.completion.qp_num != qp_num {
                    other.due = None;
                }
            }
        }
        taken
    }

    /// Time at which the program gets the next completion.
    fn next_due(&self, now: Instant) -> Option<Instant> {
        let mut seen: Vec<u32> = Vec::new();
        let mut next = None;
        for held in &self.held {
            let qp_num = held.completion.qp_num;
            // Later ones of a queue pair wait for the first.
            if !seen.contains(&qp_num) {
                seen.push(qp_num);
                let due = held.due.unwrap_or(now);
                next = Some(next.map_or(due, |next: Instant| next.min(due)));
            }
        }
        next
    }
}

/// Outcome of the faults of one completion.
struct Decided {
    hits: Vec<Hit>,
    /// An earlier one has failed by the plan.
    is_failed: bool,
    qp: Qp,
}

/// Counts a completion for its queue pair. None if that has no faults, or was destroyed.
fn decide(context: &ContextObject, completion: &Wc) -> Option<Decided> {
    let operation = match completion.opcode.0 < WcOpcode::RECV.0 {
        true => Operation::Send,
        false => Operation::Receive,
    };
    let of_queue_pair = |qp| {
        // SAFETY: a queue pair of this library, which is not freed meanwhile.
        let queue_pair = unsafe { QpObject::from_abi(qp) };
        let faults = queue_pair.faults()?;
        let is_failed = faults.is_failed();
        let hits = match is_failed {
            true => Vec::new(),
            false => faults.decide_completion(operation),
        };
        for hit in &hits {
            plan().tell(hit, &name_of(queue_pair));
            if matches!(hit.kind, Kind::Completion { .. }) {
                faults.set_failed();
            }
        }
        Some(Decided {
            hits,
            is_failed,
            qp: queue_pair.qp().clone(),
        })
    };
    let qps = &context.objects().qps;
    qps.find(completion.qp_num, of_queue_pair).flatten()
}

/// The part of `jitter` that a fault has drawn.
fn jitter_of(hit: &Hit, jitter: Duration) -> Duration {
    jitter.mul_f64((hit.drawn >> 11) as f64 / (1u64 << 53) as f64)
}

/// Lets the faults of a completion happen.
fn change_completion(context: &ContextObject, mut completion: Wc, now: Instant) -> Held {
    let mut held = Held {
        completion,
        due: None,
        is_passed: false,
    };
    if completion.status != WcStatus::SUCCESS {
        return held;
    }
    let Some(decided) = decide(context, &completion) else {
        return held;
    };
    if decided.is_failed {
        completion.status = WcStatus::WR_FLUSH_ERR;
    }
    for hit in &decided.hits {
        match &hit.kind {
            Kind::Completion { status, .. } => {
                completion.status = WcStatus(*status);
                completion.vendor_err = 0;
                // The requests that are left are flushed. It fails if the connection has ended.
                let _ = decided.qp.set_error();
            }
            Kind::Disconnect => {
                let _ = decided.qp.disconnect_for_good();
            }
            Kind::Delay { delay, jitter } => {
                held.due = held.due.max(Some(now + *delay + jitter_of(hit, *jitter)));
            }
            Kind::Reorder { delay } => {
                held.due = held.due.max(Some(now + *delay));
                held.is_passed = decided.hits.len() == 1;
            }
            _ => {}
        }
    }
    held.completion = completion;
    held
}

impl CqFaults {
    /// Faults of a new completion queue of a device.
    pub fn new(device: &str) -> CqFaults {
        let ordinal = LAST_CQ.fetch_add(1, Ordering::Relaxed) + 1;
        let scope = Scope::CompletionQueue;
        CqFaults(ProcessMutex::new(State {
            decider: Decider::of_object(plan().plan(), scope, device, ordinal),
            held: VecDeque::new(),
            is_overrun: false,
            is_armed: false,
        }))
    }

    /// Discards the completions of a queue pair that is reset or destroyed.
    pub fn discard_of(&self, qp_num: u32) {
        let mut state = self.0.lock_or_end_call();
        state.held.retain(|held| held.completion.qp_num != qp_num);
    }

    /// What an armed queue has for the program; None if it is not armed.
    pub fn pending(&self, now: Instant) -> Option<Pending> {
        let state = self.0.lock_or_end_call();
        state.is_armed.then(|| match state.next_due(now) {
            Some(due) if due <= now => Pending::Completion,
            Some(due) => Pending::At(due),
            None => Pending::Nothing,
        })
    }

    /// Notes that the program gets an event.
    pub fn disarm(&self) {
        self.0.lock_or_end_call().is_armed = false;
    }
}

/// What an armed completion queue has for the program.
pub enum Pending {
    /// A completion that was held back and may be polled.
    Completion,
    /// A completion that may be polled from a time on.
    At(Instant),
    /// None that was held back.
    Nothing,
}

/// Overruns the queue, with the effects that [`on_overrun`] has.
fn has_overrun(state: &mut State) -> Option<Hit> {
    let plan = plan();
    let site = Site::CqCompletion;
    let mut hits = state.decider.decide(plan.plan(), site, plan.elapsed());
    state.is_overrun |= !hits.is_empty();
    hits.pop()
}

/// Tells the program of an overrun, and moves the queue pairs of the queue to the error state.
fn on_overrun(queue: &CqObject, context: &ContextObject, hit: &Hit) {
    let name = Name {
        kind: "CQ",
        number: queue.cq().cq_id(),
        context,
    };
    plan().tell(hit, &name);
    if let Some(faults) = context.faults() {
        faults.raise(AsyncEvent {
            kind: Some(AsyncEventKind::CqErr),
            object: queue.cq().cq_id(),
            reason: "injected overrun".into(),
        });
    }
    let mut users = Vec::new();
    context.objects().qps.for_each(|qp| {
        // SAFETY: a queue pair of this library, which is not freed meanwhile.
        let queue_pair = unsafe { QpObject::from_abi(qp) };
        let base = queue_pair.abi();
        if [base.send_cq, base.recv_cq].contains(&queue.as_abi()) {
            users.push(queue_pair.qp().clone());
        }
    });
    for qp in users {
        let _ = qp.set_error();
    }
}

/// Polls a queue with faults.
fn poll(queue: &CqObject, faults: &CqFaults, out: &mut [Wc]) -> Result<usize, Error> {
    let context = queue.context();
    let now = Instant::now();
    let mut next = context.release_withheld(now);
    if let Some(faults) = context.faults() {
        faults.take_due(context, now);
    }
    let mut state = faults.0.lock_or_end_call();
    let mut failure = None;
    let mut overrun = None;
    while !state.is_overrun && state.held.len() < MOST_HELD {
        let mut batch = [Wc::default(); BATCH];
        let found = match queue.cq().poll(&mut batch) {
            Ok(found) => found,
            Err(error) => {
                failure = Some(error);
                break;
            }
        };
        for completion in &batch[..found] {
            if completion.status == WcStatus::SUCCESS && overrun.is_none() {
                overrun = has_overrun(&mut state);
            }
            // What came after the overrun is lost.
            if !state.is_overrun {
                let held = change_completion(context, *completion, now);
                state.held.push_back(held);
            }
        }
        if found < BATCH {
            break;
        }
    }
    let taken = state.deliver(out, now);
    if state.is_overrun && taken == 0 {
        failure = Some(Error::CqOverflow);
    }
    let waits = state.is_armed;
    if let Some(due) = state.next_due(now) {
        next = Some(next.map_or(due, |next| next.min(due)));
    }
    let is_empty = state.held.is_empty();
    drop(state);
    if let Some(hit) = overrun {
        on_overrun(queue, context, &hit);
    }
    if waits && let Some(due) = next {
        queue.wake_at(due);
    }
    match failure {
        Some(error) if taken == 0 && is_empty => Err(error),
        _ => Ok(taken),
    }
}

/// ibv_poll_cq(3)
pub unsafe fn poll_cq(cq: *mut ibv_cq, count: c_int, out: *mut ibv_wc) -> c_int {
    // SAFETY: a completion queue of this library.
    let queue = unsafe { CqObject::from_abi(cq) };
    let Some(faults) = queue.faults() else {
        // SAFETY: as the caller promised.
        return unsafe { slots::poll_cq(cq, count, out) };
    };
    // SAFETY: as the caller promised.
    unsafe { poll_into(queue, count, out, |batch| poll(queue, faults, batch)) }
}

/// ibv_req_notify_cq(3)
pub unsafe fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: as the caller promised.
    let result = unsafe { slots::req_notify_cq(cq, solicited_only) };
    // SAFETY: a completion queue of this library.
    let queue = unsafe { CqObject::from_abi(cq) };
    let Some(faults) = queue.faults() else {
        return result;
    };
    let mut state = faults.0.lock_or_end_call();
    state.is_armed = true;
    let now = Instant::now();
    let held = state.next_due(now);
    drop(state);
    let withheld = queue.context().release_withheld(now);
    if let Some(due) = [held, withheld].into_iter().flatten().min() {
        queue.wake_at(due);
    }
    result
}

/// Takes the next completion into the queue's struct.
///
/// # Safety
/// As for [`cq_ex::take_next_by`].
unsafe fn take_next(cq: *mut ibv_cq_ex) -> c_int {
    let poll_one = |queue: &CqObject, completion: &mut [Wc]| match queue.faults() {
        Some(faults) => poll(queue, faults, completion),
        None => queue.cq().poll(completion),
    };
    // SAFETY: by the caller's contract.
    unsafe { cq_ex::take_next_by(cq, poll_one) }
}

/// ibv_start_poll(3)
pub unsafe fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    // SAFETY: as the caller promised.
    unsafe { cq_ex::start_by(cq, attr, take_next) }
}

/// ibv_next_poll(3)
pub unsafe fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: a completion queue of this library, which `start_poll` locked.
    unsafe { take_next(cq) }
}
