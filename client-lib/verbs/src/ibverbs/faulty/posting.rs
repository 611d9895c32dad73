//! Posts that fail, and receive requests that the device does not get for a time.

use super::{Name, name_of, plan};
use crate::abi::*;
use crate::ibverbs::context::ContextObject;
use crate::ibverbs::qp::QpObject;
use crate::ibverbs::srq::SrqObject;
use crate::ibverbs::{qp_ex, slots};
use crate::status::fail_errno;
use siw::{ProcessMutex, QpState, Sge};
use siw_faults::{Decider, Hit, Kind, Operation, Scope, Site};
use std::collections::VecDeque;
use std::ffi::c_int;
use std::fmt::Display;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Faults of a queue pair.
pub struct QpFaults {
    decider: ProcessMutex<Decider>,
    /// A completion has failed by the plan; the later ones are flushed until the queue pair is reset.
    is_failed: AtomicBool,
    withheld: ProcessMutex<Withheld>,
}

/// Faults of a shared receive queue.
pub struct SrqFaults {
    decider: ProcessMutex<Decider>,
    withheld: ProcessMutex<Withheld>,
}

/// Receive requests that are posted later, in their order.
#[derive(Default)]
struct Withheld(VecDeque<WithheldRequest>);

struct WithheldRequest {
    wr_id: u64,
    sges: Vec<Sge>,
    due: Due,
}

/// Time at which a withheld request is posted, if those before it are.
#[derive(Clone, Copy)]
enum Due {
    Now,
    At(Instant),
    Never,
}

impl Due {
    fn has_come(self, now: Instant) -> bool {
        match self {
            Due::Now => true,
            Due::At(time) => time <= now,
            Due::Never => false,
        }
    }
}

/// Time between two looks whether a queue pair with withheld requests has ended: it flushes them, and the program may
/// sleep until then.
const LOOK: Duration = Duration::from_millis(50);
/// Time after which a full queue is tried again.
const RETRY: Duration = Duration::from_millis(1);

/// Most requests that a queue withholds: those of the longest receive queue.
const MOST_WITHHELD: usize = 1 << 16;

impl Withheld {
    /// Copies a list of requests.
    ///
    /// # Safety
    /// The contract of ibv_post_recv(3).
    unsafe fn push_list(&mut self, list: *mut ibv_recv_wr, due: Due) {
        let (mut next, mut due) = (list, due);
        // SAFETY: a list that ends with NULL, whose elements have the numbers of elements that they say.
        unsafe {
            while let Some(request) = next.as_ref() {
                let count = usize::try_from(request.num_sge).unwrap_or(0);
                let element = |n| request.sg_list.cast::<Sge>().add(n).read_unaligned();
                self.0.push_back(WithheldRequest {
                    wr_id: request.wr_id,
                    sges: (0..count).map(element).collect(),
                    due,
                });
                // The others follow the first one.
                due = Due::Now;
                next = request.next;
            }
        }
    }

    /// Posts the requests whose time has come, or all, by `post`, which has the contract of ibv_post_recv(3).
    fn release(
        &mut self,
        now: Instant,
        all: bool,
        mut post: impl FnMut(*mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int,
    ) {
        while let Some(first) = self.0.front()
            && (all || first.due.has_come(now))
        {
            let mut request = ibv_recv_wr {
                wr_id: first.wr_id,
                next: null_mut(),
                sg_list: first.sges.as_ptr().cast_mut().cast(),
                num_sge: first.sges.len() as c_int,
            };
            // Other errors than that of a full queue would have been those of the program's post.
            if post(&mut request, &mut null_mut()) == libc::ENOMEM {
                return;
            }
            self.0.pop_front();
        }
    }

    /// Time at which the first request is posted.
    fn next_due(&self) -> Option<Instant> {
        match self.0.front()?.due {
            // The queue was full.
            Due::Now => Some(Instant::now() + RETRY),
            Due::At(time) => Some(time),
            Due::Never => None,
        }
    }
}

/// Decides for a post of receive requests: an errno, or the time for which they are withheld.
enum Receives {
    Fail(c_int),
    Withhold(Due),
    Pass,
}

fn decide_receives(decider: &ProcessMutex<Decider>, object: &dyn Display) -> Receives {
    let plan = plan();
    let mut decider = decider.lock_or_end_call();
    let failing = decider.decide(plan.plan(), Site::PostReceive, plan.elapsed());
    if let Some(hit) = failing.first()
        && let Kind::PostReceive { errno } = hit.kind
    {
        plan.tell(hit, object);
        return Receives::Fail(errno);
    }
    let withholding = decider.decide(plan.plan(), Site::Receive, plan.elapsed());
    match withholding.first() {
        Some(hit) => {
            plan.tell(hit, object);
            Receives::Withhold(match hit.kind {
                Kind::Withhold { delay: Some(delay) } => Due::At(Instant::now() + delay),
                _ => Due::Never,
            })
        }
        None => Receives::Pass,
    }
}

/// Posts receive requests, or withholds them.
///
/// # Safety
/// The contract of ibv_post_recv(3).
unsafe fn post_or_withhold(
    decision: Receives,
    withheld: &ProcessMutex<Withheld>,
    context: &ContextObject,
    list: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
    post: impl FnOnce() -> c_int,
) -> c_int {
    let fail = |errno| {
        // SAFETY: a pointer to write.
        unsafe { bad.write(list) };
        fail_errno(errno)
    };
    let mut withheld = withheld.lock_or_end_call();
    let due = match decision {
        Receives::Fail(errno) => return fail(errno),
        Receives::Withhold(due) => due,
        Receives::Pass if !withheld.0.is_empty() => Due::Now,
        Receives::Pass => {
            drop(withheld);
            return post();
        }
    };
    if withheld.0.len() >= MOST_WITHHELD {
        return fail(libc::ENOMEM);
    }
    if withheld.0.is_empty()
        && let Some(faults) = context.faults()
    {
        faults.withholding.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: as the caller promised.
    unsafe { withheld.push_list(list, due) };
    0
}

impl QpFaults {
    /// Faults of a queue pair with this serial number.
    pub fn new(device: &str, number: u32, serial: u64) -> QpFaults {
        QpFaults {
            decider: ProcessMutex::new(Decider::of_queue_pair(
                plan().plan(),
                device,
                number,
                serial,
            )),
            is_failed: AtomicBool::new(false),
            withheld: ProcessMutex::default(),
        }
    }

    /// Forgets the failure of a queue pair that is reset, and its withheld requests.
    pub fn reset(&self, context: &ContextObject) {
        self.is_failed.store(false, Ordering::Release);
        let mut withheld = self.withheld.lock_or_end_call();
        if !withheld.0.is_empty()
            && let Some(faults) = context.faults()
        {
            faults.withholding.fetch_sub(1, Ordering::Relaxed);
        }
        withheld.0.clear();
    }

    /// Makes all later completions flushed ones.
    pub fn set_failed(&self) {
        self.is_failed.store(true, Ordering::Release);
    }

    /// Whether completions are flushed.
    pub fn is_failed(&self) -> bool {
        self.is_failed.load(Ordering::Acquire)
    }

    /// Counts a successful completion; returns the faults that happen.
    pub fn decide_completion(&self, operation: Operation) -> Vec<Hit> {
        let plan = plan();
        let mut decider = self.decider.lock_or_end_call();
        decider.decide_completion(plan.plan(), operation, plan.elapsed())
    }

    /// Posts the withheld requests whose time has come; all of them to a queue pair in the error state, which
    /// flushes them. Returns the time at which to look again.
    pub fn release(&self, queue_pair: &QpObject, now: Instant) -> Option<Instant> {
        let mut withheld = self.withheld.lock_or_end_call();
        if withheld.0.is_empty() {
            return None;
        }
        let has_ended = matches!(
            queue_pair.qp().state(),
            Some(QpState::Closing | QpState::Terminate | QpState::Error)
        ) || queue_pair.verbs_state() == IBV_QPS_ERR;
        let qp = queue_pair.as_abi();
        // SAFETY: a queue pair of this library, and a request.
        let post = |request, bad| unsafe { slots::post_recv(qp, request, bad) };
        withheld.release(now, has_ended, post);
        if withheld.0.is_empty() {
            if let Some(faults) = queue_pair.context().faults() {
                faults.withholding.fetch_sub(1, Ordering::Relaxed);
            }
            return None;
        }
        let look = now + LOOK;
        Some(withheld.next_due().map_or(look, |due| due.min(look)))
    }
}

static LAST_SRQ: AtomicU64 = AtomicU64::new(0);

impl SrqFaults {
    /// Faults of a new shared receive queue.
    pub fn new(device: &str) -> SrqFaults {
        let ordinal = LAST_SRQ.fetch_add(1, Ordering::Relaxed) + 1;
        let scope = Scope::SharedReceiveQueue;
        SrqFaults {
            decider: ProcessMutex::new(Decider::of_object(plan().plan(), scope, device, ordinal)),
            withheld: ProcessMutex::default(),
        }
    }

    /// Forgets the withheld requests of a queue that is destroyed.
    pub fn reset(&self, context: &ContextObject) {
        let mut withheld = self.withheld.lock_or_end_call();
        if !withheld.0.is_empty()
            && let Some(faults) = context.faults()
        {
            faults.withholding.fetch_sub(1, Ordering::Relaxed);
        }
        withheld.0.clear();
    }

    /// Posts the withheld requests whose time has come. Returns the time of the next one.
    pub fn release(
        &self,
        queue: &SrqObject,
        context: &ContextObject,
        now: Instant,
    ) -> Option<Instant> {
        let mut withheld = self.withheld.lock_or_end_call();
        if withheld.0.is_empty() {
            return None;
        }
        let srq = queue.as_abi();
        // SAFETY: a shared receive queue of this library, and a request.
        let post = |request, bad| unsafe { slots::post_srq_recv(srq, request, bad) };
        withheld.release(now, false, post);
        if withheld.0.is_empty()
            && let Some(faults) = context.faults()
        {
            faults.withholding.fetch_sub(1, Ordering::Relaxed);
        }
        withheld.next_due()
    }
}

/// Errno with which a post of send requests has to fail.
fn send_fault(queue_pair: &QpObject) -> Option<c_int> {
    let plan = plan();
    if let Some(faults) = queue_pair.context().faults() {
        faults.count_post(queue_pair.context());
    }
    let faults = queue_pair.faults()?;
    let mut decider = faults.decider.lock_or_end_call();
    let hits = decider.decide(plan.plan(), Site::PostSend, plan.elapsed());
    drop(decider);
    let hit = hits.first()?;
    plan.tell(hit, &name_of(queue_pair));
    match hit.kind {
        Kind::PostSend { errno } => Some(errno),
        _ => None,
    }
}

/// ibv_post_send(3)
pub unsafe fn post_send(
    qp: *mut ibv_qp,
    list: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: a queue pair of this library.
    let queue_pair = unsafe { QpObject::from_abi(qp) };
    if let Some(errno) = send_fault(queue_pair) {
        // SAFETY: a pointer to write.
        unsafe { bad.write(list) };
        return fail_errno(errno);
    }
    // SAFETY: as the caller promised.
    unsafe { slots::post_send(qp, list, bad) }
}

/// The end of ibv_wr_post(3).
pub unsafe fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: a queue pair of this library, whose struct begins with `struct ibv_qp`.
    let fault = send_fault(unsafe { QpObject::from_abi(qp.cast()) });
    // SAFETY: as the caller promised.
    unsafe {
        match fault {
            Some(errno) => {
                qp_ex::slots::abort(qp);
                fail_errno(errno)
            }
            None => qp_ex::slots::complete(qp),
        }
    }
}

/// ibv_post_recv(3)
pub unsafe fn post_recv(
    qp: *mut ibv_qp,
    list: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: a queue pair of this library.
    let queue_pair = unsafe { QpObject::from_abi(qp) };
    let Some(faults) = queue_pair.faults() else {
        // SAFETY: as the caller promised.
        return unsafe { slots::post_recv(qp, list, bad) };
    };
    faults.release(queue_pair, Instant::now());
    let decision = decide_receives(&faults.decider, &name_of(queue_pair));
    // SAFETY: as the caller promised.
    unsafe {
        let post = || slots::post_recv(qp, list, bad);
        let context = queue_pair.context();
        post_or_withhold(decision, &faults.withheld, context, list, bad, post)
    }
}

/// ibv_post_srq_recv(3)
pub unsafe fn post_srq_recv(
    srq: *mut ibv_srq,
    list: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: a shared receive queue of this library, whose context is open.
    let (queue, context) = unsafe {
        (
            SrqObject::from_abi(srq),
            ContextObject::from_abi((*srq).context),
        )
    };
    let Some(faults) = queue.faults() else {
        // SAFETY: as the caller promised.
        return unsafe { slots::post_srq_recv(srq, list, bad) };
    };
    faults.release(queue, context, Instant::now());
    let name = Name {
        kind: "SRQ",
        number: queue.srq().srq_id(),
        context,
    };
    let decision = decide_receives(&faults.decider, &name);
    // SAFETY: as the caller promised.
    unsafe {
        let post = || slots::post_srq_recv(srq, list, bad);
        post_or_withhold(decision, &faults.withheld, context, list, bad, post)
    }
}

impl ContextObject {
    /// Posts the withheld receive requests of all queues whose time has come. Returns the time of the next one.
    pub fn release_withheld(&self, now: Instant) -> Option<Instant> {
        let faults = self.faults()?;
        if faults.withholding.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let mut next: Option<Instant> = None;
        let mut note = |due: Option<Instant>| {
            if let Some(due) = due {
                next = Some(next.map_or(due, |next| next.min(due)));
            }
        };
        self.objects().qps.for_each(|qp| {
            // SAFETY: a queue pair of this library, which is not freed meanwhile.
            let queue_pair = unsafe { QpObject::from_abi(qp) };
            let faults = queue_pair.faults();
            note(faults.and_then(|faults| faults.release(queue_pair, now)));
        });
        self.objects().srqs.for_each(|srq| {
            // SAFETY: as above, a shared receive queue.
            let queue = unsafe { SrqObject::from_abi(srq) };
            let faults = queue.faults();
            note(faults.and_then(|faults| faults.release(queue, self, now)));
        });
        next
    }
}
