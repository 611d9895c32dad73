//! Asynchronous events of the plan: at a time, or after a number of posts.

use super::plan;
use crate::abi::IBV_EVENT_DEVICE_FATAL;
use crate::alarm::Alarm;
use crate::faults::loaded_plan;
use crate::ibverbs::context::ContextObject;
use crate::ibverbs::qp::QpObject;
use siw::{AsyncEvent, AsyncEventKind, ProcessMutex};
use siw_faults::{AsyncEvent as Wanted, Decider, Hit, Kind, Scope, Site, Timetable};
use siw_shm::control::EVERY_DEVICE;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

/// Faults of a context.
pub struct ContextFaults {
    /// Makes the descriptor of asynchronous events readable.
    alarm: Alarm,
    state: ProcessMutex<State>,
    /// The port is down, by the plan.
    is_port_down: AtomicBool,
    /// Number of queues with withheld receive requests.
    pub withholding: AtomicUsize,
}

struct State {
    timetable: Timetable,
    posts: Decider,
    /// Events of queue pairs or shared receive queues that do not exist yet.
    early: Vec<Hit>,
    /// Events that the program has not taken.
    raised: VecDeque<AsyncEvent>,
}

static LAST_CONTEXT: AtomicU64 = AtomicU64::new(0);

impl ContextFaults {
    /// Faults of a new context of a device; None without a plan.
    pub fn new(device: &str) -> std::io::Result<Option<Box<ContextFaults>>> {
        let Some(loaded) = loaded_plan() else {
            return Ok(None);
        };
        let ordinal = LAST_CONTEXT.fetch_add(1, Ordering::Relaxed) + 1;
        let timetable = Timetable::of_context(loaded.plan(), device, ordinal);
        let alarm = Alarm::new()?;
        alarm.set(timetable.next().map(|time| loaded.at(time)));
        Ok(Some(Box::new(ContextFaults {
            alarm,
            state: ProcessMutex::new(State {
                timetable,
                posts: Decider::of_object(loaded.plan(), Scope::Context, device, ordinal),
                early: Vec::new(),
                raised: VecDeque::new(),
            }),
            is_port_down: AtomicBool::new(false),
            withholding: AtomicUsize::new(0),
        })))
    }

    /// Makes the descriptor of events readable.
    pub fn alarm(&self) -> &Alarm {
        &self.alarm
    }

    /// Whether the port is down, by the plan.
    pub fn is_port_down(&self) -> bool {
        self.is_port_down.load(Ordering::Acquire)
    }

    /// Adds an event for the program.
    pub fn raise(&self, event: AsyncEvent) {
        let mut state = self.state.lock_or_end_call();
        state.raised.push_back(event);
        self.alarm.set_no_later(Instant::now());
    }

    /// Takes the next event for the program.
    pub fn take_raised(&self, context: &ContextObject) -> Option<AsyncEvent> {
        let now = Instant::now();
        self.take_due(context, now);
        let mut state = self.state.lock_or_end_call();
        let event = state.raised.pop_front();
        self.set_alarm(&state, now);
        event
    }

    fn set_alarm(&self, state: &State, now: Instant) {
        self.alarm.set(match state.raised.is_empty() {
            false => Some(now),
            true => state.timetable.next().map(|time| plan().at(time)),
        });
    }

    /// Lets the events happen whose time has come.
    pub fn take_due(&self, context: &ContextObject, now: Instant) {
        if !self.alarm.is_due(now) {
            return;
        }
        let plan = plan();
        let mut state = self.state.lock_or_end_call();
        let due = state.timetable.take_due(plan.plan(), plan.elapsed());
        drop(state);
        self.let_happen(context, due);
        let state = self.state.lock_or_end_call();
        self.set_alarm(&state, now);
    }

    /// Lets the events happen that have waited for an object.
    pub fn on_new_object(&self, context: &ContextObject) {
        let early = std::mem::take(&mut self.state.lock_or_end_call().early);
        self.let_happen(context, early);
    }

    /// Counts a post to a send queue of the context.
    pub fn count_post(&self, context: &ContextObject) {
        let plan = plan();
        let mut state = self.state.lock_or_end_call();
        if state.posts.is_empty() {
            return;
        }
        let hits = state
            .posts
            .decide(plan.plan(), Site::ContextPost, plan.elapsed());
        drop(state);
        self.let_happen(context, hits);
    }

    fn let_happen(&self, context: &ContextObject, hits: Vec<Hit>) {
        for hit in hits {
            let Kind::Event(wanted) = hit.kind else {
                continue;
            };
            match self.prepare(context, wanted) {
                Some((kind, object)) => {
                    plan().tell(&hit, &context.device().info().name);
                    let reason = "injected event".into();
                    let kind = Some(kind);
                    self.raise(AsyncEvent {
                        kind,
                        object,
                        reason,
                    });
                }
                None => self.state.lock_or_end_call().early.push(hit),
            }
        }
    }

    /// Lets the effects of an event happen. Returns its kind and its object; None if no object exists.
    fn prepare(&self, context: &ContextObject, wanted: Wanted) -> Option<(AsyncEventKind, u32)> {
        let objects = context.objects();
        Some(match wanted {
            Wanted::QpFatal => {
                let number = objects.qps.first()?;
                set_errors(context, |qp_num| qp_num == number);
                (AsyncEventKind::QpFatal, number)
            }
            Wanted::SrqLimitReached => (AsyncEventKind::SrqLimitReached, objects.srqs.first()?),
            Wanted::DeviceFatal => {
                set_errors(context, |_| true);
                (AsyncEventKind::DeviceFatal, EVERY_DEVICE)
            }
            Wanted::PortErr => {
                self.is_port_down.store(true, Ordering::Release);
                (AsyncEventKind::PortErr, EVERY_DEVICE)
            }
            Wanted::PortActive => {
                self.is_port_down.store(false, Ordering::Release);
                (AsyncEventKind::PortActive, EVERY_DEVICE)
            }
            Wanted::GidChange => (AsyncEventKind::GidChange, EVERY_DEVICE),
        })
    }
}

// `find_element` converts the kinds by their numbers.
const _: () = assert!(AsyncEventKind::DeviceFatal as u32 == IBV_EVENT_DEVICE_FATAL);

/// Moves queue pairs to the error state. Those without a connection stay as they are.
fn set_errors(context: &ContextObject, is_meant: impl Fn(u32) -> bool) {
    let mut meant = Vec::new();
    context.objects().qps.for_each(|qp| {
        // SAFETY: a queue pair of this library, which is not freed meanwhile.
        let queue_pair = unsafe { QpObject::from_abi(qp) };
        if is_meant(queue_pair.abi().qp_num) {
            meant.push(queue_pair.qp().clone());
        }
    });
    for qp in meant {
        let _ = qp.set_error();
    }
}
