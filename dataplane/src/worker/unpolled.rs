//! Completions that a client had not polled when the connection of their queue pair ended. Programs take
//! a disconnect for a reason to destroy the queue pair, and its completions with it, so that the report
//! may have to wait until they are polled.

use std::time::Duration;

use siw_tcp::Instant;

use super::Worker;
use super::completion_queues::CqeId;
use super::deadlines::DeadlineOwner;
use super::slots::QpSlot;
use crate::ids::CqId;
use crate::worker::messages::Event;

/// Maximum time that the client has to poll them.
const PATIENCE: Duration = Duration::from_millis(10);
/// Time between two looks at the consumer indices.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// The last completion of each queue that has unpolled ones.
pub(super) struct UnpolledCompletions {
    queues: [Option<(CqId, CqeId)>; 2],
    deadline: Instant,
}

impl Worker {
    /// Finds the unpolled completions of a queue pair's queues, also those of other queue pairs.
    pub(super) fn find_unpolled(&self, now: Instant, slot: QpSlot) -> Option<UnpolledCompletions> {
        let rings = &self.queue_pairs.get(slot)?.rings;
        let cqs = &self.context.cqs;
        let queues = [rings.send_cq, rings.recv_cq].map(|queue| {
            let last = cqs.last_cqe(queue)?;
            (!cqs.is_polled(queue, last)).then_some((queue, last))
        });
        let deadline = now + PATIENCE;
        let has_some = queues.iter().any(Option::is_some);
        has_some.then_some(UnpolledCompletions { queues, deadline })
    }

    /// Watches the completions, and reports when they are polled.
    pub(super) fn await_polls(&mut self, now: Instant, slot: QpSlot, found: UnpolledCompletions) {
        if let Some(queue_pair) = self.queue_pairs.get_mut(slot) {
            queue_pair.unpolled = Some(found);
            self.deadlines
                .insert(now + CHECK_INTERVAL, DeadlineOwner::Polls(slot));
        }
    }

    /// Looks whether the client has polled the completions.
    #[cold]
    pub(super) fn check_polls(&mut self, now: Instant, slot: QpSlot) {
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return;
        };
        let Some(unpolled) = &queue_pair.unpolled else {
            return;
        };
        let cqs = &self.context.cqs;
        let mut queues = unpolled.queues.iter().flatten();
        if now < unpolled.deadline && queues.any(|(queue, last)| !cqs.is_polled(*queue, *last)) {
            let next = now + CHECK_INTERVAL;
            return self.deadlines.insert(next, DeadlineOwner::Polls(slot));
        }
        queue_pair.unpolled = None;
        let qpn = queue_pair.rings.qpn;
        self.post_event(Event::CompletionsPolled { qpn });
    }
}
