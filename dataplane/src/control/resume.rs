//! Deferred requests go on when the reports that they wait for have arrived.

use super::ControlThread;
use super::memory;
use super::operator::{lists, operate, statistics};
use super::queues::{completion_queues, datagrams, groups, queue_pairs, shared_receive};
use super::request::deferred::{Deferred, DeferredRequest, Report, Then};
use super::request::refusal::Refusal;
use super::request::replies::{Outcome, Served};
use crate::ids::{ClientId, CommandToken};

impl ControlThread {
    /// Hands a report to the request that awaits it. Returns the report if there is none: its client may
    /// have left.
    pub(super) fn on_report(&mut self, token: CommandToken, report: Report) -> Option<Report> {
        let Some((deferred, memory)) = self.context.resources.deferred_mut(token) else {
            return Some(report);
        };
        deferred.left = deferred.left.saturating_sub(1);
        if deferred.is_ready(memory, &self.memory.keys) {
            self.resume_request(token, report);
        }
        None
    }

    /// Carries on the requests whose keys are unused by all workers.
    pub(super) fn resume_key_requests(&mut self) {
        let mut looked_at = memory::REQUESTS_IN_VAIN.min(self.memory.awaiting.len());
        while looked_at > 0
            && let Some(token) = self.memory.awaiting.pop_front()
        {
            let Some((deferred, memory)) = self.context.resources.deferred_mut(token) else {
                // The client has left, or a report was the last that was missing.
                continue;
            };
            if deferred.is_ready(memory, &self.memory.keys) {
                self.resume_request(token, Report::Done);
                self.context.times.end_work("reclaim");
            } else {
                self.memory.awaiting.push_back(token);
                looked_at -= 1;
            }
        }
    }

    /// Carries on a request without missing reports.
    fn resume_request(&mut self, token: CommandToken, report: Report) {
        let client = token.client.and_then(|id| {
            let client = self.context.resources.clients.get_mut(&id);
            client.map(|client| (id, client))
        });
        let Some((id, client)) = client else {
            return;
        };
        let Some(DeferredRequest { kind, seq, what }) = client.waiting.take() else {
            return;
        };
        let outcome = self.resume(id, seq, what, report);
        let Some(client) = self.context.resources.clients.get_mut(&id) else {
            return;
        };
        match outcome {
            Ok(Served::Deferred(what)) => {
                client.waiting = Some(DeferredRequest { kind, seq, what });
                return;
            }
            Ok(Served::Replied) => {}
            Err(refusal) => refusal.send(&client.conn, kind, seq),
        }
        self.context.resources.answered.push(id);
    }

    fn resume(&mut self, id: ClientId, seq: u32, what: Deferred, report: Report) -> Outcome {
        let context = &mut self.context;
        let resources = &mut context.resources;
        match (what.then, report) {
            (Then::FreeCq(cq), _) => completion_queues::free_cq(resources, id, seq, cq),
            (Then::ResizeCq { cq, geometry }, _) => {
                completion_queues::reply_resized(resources, id, seq, cq, geometry)
            }
            (Then::FreeSrq(srq), _) => shared_receive::free_srq(resources, id, seq, srq),
            (Then::ResizeSrq(request), _) => {
                shared_receive::modify_srq(context, id, seq, &request, false)
            }
            (Then::ReadOn, _) => Ok(Served::Replied),
            (Then::ReplyQpState { qpn, modify }, Report::QpState(info)) => {
                queue_pairs::reply_state(resources, id, seq, (qpn, modify), &info)
            }
            (Then::ReplyAh { ah, failure }, _) => {
                datagrams::reply_ah(context, id, seq, ah, failure)
            }
            (Then::ReplyDatagrams, _) => datagrams::reply_started(resources, id, seq),
            (Then::ReplyGroup { attached }, _) => {
                groups::reply_changed(resources, id, seq, attached)
            }
            (Then::ResetQp(qpn), _) => queue_pairs::reset_qp(resources, id, seq, qpn),
            (Then::FreeQp(qpn), _) => queue_pairs::free_qp(resources, id, seq, qpn),
            (Then::EndKey { reply, .. }, _) => memory::end_key(resources, id, seq, reply),
            (Then::AddArena { charge, origin }, Report::Arena(made)) => {
                self.memory
                    .add_arena(resources, id, seq, (charge, origin), made)
            }
            (Then::ReplyArenaFreed, _) => memory::reply_freed(resources, id, seq),
            (
                Then::ReplyConnections,
                Report::Connections {
                    worker,
                    connections,
                    next,
                },
            ) => lists::reply_connections(context, id, seq, worker, &connections, next),
            (Then::WriteStatistics, _) => {
                let listeners = self.connections.listeners.len();
                Ok(self.statistics.begin(context, listeners, &self.faults, id))
            }
            (Then::ReplyStatistics, Report::Statistics(text)) => {
                statistics::reply_statistics(resources, id, seq, text)
            }
            (Then::Stream(step), Report::Stream(answer)) => {
                self.connections
                    .reply_stream(resources, (id, seq), step, answer)
            }
            (Then::ReplyAction, Report::Action(outcome)) => {
                operate::reply_text(resources, id, seq, &outcome?)
            }
            _ => Err(Refusal::unexpected_report()),
        }
    }
}
