//! Calls into a queue pair, and the work that follows from them: asynchronous events, misused rings, a
//! stream to close.

use siw_iwarp::{QueuePair, RdmapState};
use siw_tcp::Instant;

use super::Worker;
use super::context::QpView;
use super::messages::Event;
use super::qp_rings::RingMisuse;
use super::slots::QpSlot;
use super::thresholds::THRESHOLDS;
use super::worker_qp::WorkerQp;

impl Worker {
    /// Calls into a queue pair with its view of the worker.
    #[inline]
    pub(super) fn with_queue_pair<T>(
        &mut self,
        slot: QpSlot,
        call: impl FnOnce(&mut QueuePair, &mut QpView<'_>) -> T,
    ) -> Option<T> {
        let WorkerQp {
            protocol, rings, ..
        } = self.queue_pairs.get_mut(slot)?;
        Some(call(protocol, &mut self.context.for_rings(rings)))
    }

    /// Does the work that follows from a call which may have changed a queue pair. On the fast path
    /// (RTS, nothing to report) this takes three comparisons.
    #[inline]
    pub(super) fn after_call(&mut self, now: Instant, slot: QpSlot) {
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return;
        };
        let is_quiet = queue_pair.rings.events.is_empty()
            && queue_pair.rings.misuse.is_none()
            && queue_pair.protocol.state() == RdmapState::Rts;
        if !is_quiet {
            self.report_and_follow(now, slot);
        }
    }

    /// Posts the queue pair's events and updates its life-cycle state.
    pub(super) fn report_and_follow(&mut self, now: Instant, slot: QpSlot) {
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return;
        };
        let (client, qpn) = (queue_pair.client, queue_pair.rings.qpn);
        let events = std::mem::take(&mut queue_pair.rings.events);
        let misuse = queue_pair.rings.misuse.take();
        for event in events {
            self.post_event(Event::Async { client, qpn, event });
        }
        match misuse {
            Some(RingMisuse::InvalidIndex) => self.post_event(Event::ClientFault { client, qpn }),
            Some(RingMisuse::BadRequest(reason)) => self.post_event(Event::BadRequest {
                client,
                qpn,
                reason,
            }),
            None => {}
        }
        self.follow_protocol(now, slot);
    }

    /// Ends the queue pairs of records that could not be built.
    #[cold]
    pub(super) fn handle_build_failures(&mut self, now: Instant) {
        for failure in std::mem::take(&mut self.context.build_failures) {
            let slot = failure.slot;
            self.with_queue_pair(slot, |protocol, view| {
                protocol.on_build_failure(view, &failure.record, failure.error);
            });
            self.report_and_follow(now, slot);
        }
    }

    /// Ends queue pairs of overflowed completion queues, and no others; some of them in one batch.
    /// Until its turn comes, a queue pair goes on, and its completions are lost, as the queue's state
    /// says.
    #[cold]
    pub(super) fn handle_cq_overflows(&mut self, now: Instant) {
        for _ in 0..THRESHOLDS.ended {
            let cqs = &mut self.context.cqs;
            let Some((cq, is_reported)) = cqs.overflowed.front_mut() else {
                return;
            };
            let cq = *cq;
            let is_new = !std::mem::replace(is_reported, true);
            let queue_pair = cqs.take_queue_pair(cq);
            if let Some(client) = cqs.client(cq).filter(|_| is_new) {
                self.post_event(Event::CqOverflow { client, cq });
            }
            let Some(slot) = queue_pair else {
                self.context.cqs.overflowed.pop_front();
                continue;
            };
            self.end_in_error(now, slot);
        }
    }
}
