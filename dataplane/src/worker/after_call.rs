//! Calls into a queue pair, and the work that follows from them: asynchronous events, misused rings, a
//! stream to close.

use siw_iwarp::{QueuePair, RdmapState};
use siw_tcp::Instant;

use super::Worker;
use super::context::QpView;
use super::messages::Event;
use super::qp_rings::RingMisuse;
use super::worker_qp::{QpSlot, WorkerQp};

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
    /// (RTS, nothing to report) this takes four comparisons.
    #[inline]
    pub(super) fn after_call(&mut self, now: Instant, slot: QpSlot) {
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return;
        };
        let is_quiet = queue_pair.rings.events.is_empty()
            && queue_pair.rings.misuse.is_none()
            && !queue_pair.rings.is_awaiting_release
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
        // Needed after every call: only this list leads to the completion.
        if std::mem::take(&mut queue_pair.rings.is_awaiting_release) && !queue_pair.is_releasing {
            queue_pair.is_releasing = true;
            self.releasing.push(slot);
        }
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

    /// Ends the queue pairs of overflowed completion queues, and no others.
    #[cold]
    pub(super) fn handle_cq_overflows(&mut self, now: Instant) {
        for cq in std::mem::take(&mut self.context.cqs.overflowed) {
            if let Some(client) = self.context.cqs.client(cq) {
                self.post_event(Event::CqOverflow { client, cq });
            }
            for slot in self.queue_pairs.select(|queue_pair| {
                queue_pair.rings.send_cq == cq || queue_pair.rings.recv_cq == cq
            }) {
                self.end_in_error(now, slot);
            }
        }
    }
}
