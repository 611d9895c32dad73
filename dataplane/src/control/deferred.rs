//! Deferred requests, whose reply waits for reports of workers or helpers.
//!
//! ```text
//! handler -- Served::Deferred --> Client::waiting <-- report with its token -- worker, helper
//!    ^                                 |
//!    |                                 | no report is missing
//!    '-- ControlThread::resume_request +--> reply, or deferred again
//! ```

use std::sync::Arc;

use siw_memory::{KeyTable, Retired, Stag};
use siw_shm::control::messages::ModifySrq;
use siw_shm::{CqGeometry, SharedMemory};

use super::quotas::Charge;
use super::refusal::Refusal;
use super::regions::ArenaOrigin;
use super::replies::{Outcome, Served};
use super::reports::MadeArena;
use super::resources::Resources;
use super::{
    ControlThread, completion_queues, lists, memory, operate, queue_pairs, shared_receive,
    statistics,
};
use crate::ids::{ClientId, CommandToken, CqId, Qpn, SrqId};
use crate::worker::messages::{ConnectionSnapshot, QpInfo};

/// A request without a reply so far: its kind, the sequence number of its reply, and what it waits for.
pub(super) struct DeferredRequest {
    pub kind: u16,
    pub seq: u32,
    pub what: Deferred,
}

/// What a request waits for, and what follows.
pub(super) struct Deferred {
    /// Token of the reports that it waits for.
    pub token: CommandToken,
    /// Number of missing reports.
    pub left: usize,
    pub then: Then,
}

/// What follows when no report is missing.
pub(super) enum Then {
    /// The memory of the completion queue is freed.
    FreeCq(CqId),
    /// The workers write to the new rings of the completion queue.
    ResizeCq { cq: CqId, geometry: CqGeometry },
    /// The memory of the shared receive queue is freed.
    FreeSrq(SrqId),
    /// The workers have left the rings without requests: the shared receive queue is resized.
    ResizeSrq(ModifySrq),
    /// No reply: the commands of earlier requests are executed.
    ReadOn,
    /// The worker has described the queue pair, for MODIFY_QP or QUERY_QP.
    ReplyQpState { qpn: Qpn, modify: bool },
    /// The worker has released the queue pair, which is reset.
    ResetQp(Qpn),
    /// The worker has released the queue pair, which is freed.
    FreeQp(Qpn),
    /// No worker uses the memory key any more.
    EndKey(EndedKey),
    /// The memory of the arena is made or mapped.
    AddArena {
        charge: Charge<4>,
        origin: ArenaOrigin,
    },
    /// The arena is freed.
    ReplyArenaFreed,
    /// A worker has described its connections.
    ReplyConnections,
    /// All workers have reported their counters.
    WriteStatistics,
    /// The statistics are written.
    ReplyStatistics,
    /// An operator's action has ended.
    ReplyAction,
}

/// A memory key that its request has ended, or whose access rights it has changed.
pub(super) struct EndedKey {
    /// Grace period after which no worker can use the old key.
    pub ticket: Retired,
    /// Workers whose ports do not release frames of the memory in time.
    pub late: Vec<usize>,
    /// The memory that the frames refer to.
    pub regions: Vec<Arc<SharedMemory>>,
    pub reply: KeyReply,
}

/// Reply to send when no worker uses a key any more.
pub(super) enum KeyReply {
    Dereg {
        lkey: Stag,
    },
    /// The reply carries the new key.
    Rereg {
        lkey: Stag,
    },
    /// With the charge of the window.
    DeallocMw(Charge<2>),
}

/// A report to a deferred request.
pub(super) enum Report {
    /// The command or order is executed.
    Done,
    QpState(Box<QpInfo>),
    Connections {
        worker: usize,
        connections: Vec<ConnectionSnapshot>,
        /// The worker's slot at which the next page begins.
        next: Option<u32>,
    },
    Arena(Result<MadeArena, Refusal>),
    Statistics(String),
    /// Outcome of an operator's action, as text.
    Action(Result<String, Refusal>),
}

impl Deferred {
    /// Waits for one report, which carries this token.
    pub fn new(token: CommandToken, then: Then) -> Deferred {
        let left = 1;
        Deferred { token, left, then }
    }

    /// Returns true if nothing is missing. For a key, its grace period must have ended, too, but ports
    /// whose driver takes too long to release frames are not waited for.
    fn is_ready(&self, keys: &KeyTable) -> bool {
        match &self.then {
            Then::EndKey(key) => self.left == key.late.len() && keys.is_reclaimed(key.ticket),
            _ => self.left == 0,
        }
    }

    /// Returns true if it waits for the worker's release of this queue pair.
    pub fn awaits_release(&self, qpn: Qpn) -> bool {
        matches!(self.then, Then::ResetQp(of) | Then::FreeQp(of) if of == qpn)
    }

    /// Returns true if a helper makes or frees memory for it.
    pub fn awaits_helper(&self) -> bool {
        matches!(self.then, Then::AddArena { .. } | Then::ReplyArenaFreed)
    }
}

impl Resources {
    /// What the client's request that awaits reports with this token waits for, if there is one.
    pub(super) fn deferred_mut(&mut self, token: CommandToken) -> Option<&mut Deferred> {
        let client = self.clients.get_mut(&token.client?)?;
        let what = &mut client.waiting.as_mut()?.what;
        (what.token == token).then_some(what)
    }
}

impl ControlThread {
    /// Hands a report to the request that awaits it. Returns the report if there is none: its client may
    /// have left.
    pub(super) fn on_report(&mut self, token: CommandToken, report: Report) -> Option<Report> {
        let Some(deferred) = self.context.resources.deferred_mut(token) else {
            return Some(report);
        };
        deferred.left = deferred.left.saturating_sub(1);
        if deferred.is_ready(&self.memory.keys) {
            self.resume_request(token, report);
        }
        None
    }

    /// Carries on the requests whose keys no worker uses any more.
    pub(super) fn resume_key_requests(&mut self) {
        let mut looked_at = memory::REQUESTS_IN_VAIN.min(self.memory.awaiting.len());
        while looked_at > 0
            && let Some(token) = self.memory.awaiting.pop_front()
        {
            let Some(deferred) = self.context.resources.deferred_mut(token) else {
                // The client has left, or a report was the last that was missing.
                continue;
            };
            if deferred.is_ready(&self.memory.keys) {
                self.resume_request(token, Report::Done);
                self.context.times.end_work("reclaim");
            } else {
                self.memory.awaiting.push_back(token);
                looked_at -= 1;
            }
        }
    }

    /// Carries on a request that waits for nothing any more.
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
        let frames = (what.token, what.left);
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
            (Then::ResetQp(qpn), _) => queue_pairs::reset_qp(resources, id, seq, qpn),
            (Then::FreeQp(qpn), _) => queue_pairs::free_qp(resources, id, seq, qpn),
            (Then::EndKey(key), _) => memory::end_key(resources, id, seq, key, frames),
            (Then::AddArena { charge, origin }, Report::Arena(made)) => {
                memory::add_arena(resources, id, seq, charge, origin, made)
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
                Ok(self.statistics.begin(context, listeners, id))
            }
            (Then::ReplyStatistics, Report::Statistics(text)) => {
                statistics::reply_statistics(resources, id, seq, text)
            }
            (Then::ReplyAction, Report::Action(outcome)) => {
                operate::reply_text(resources, id, seq, &outcome?)
            }
            _ => Err(Refusal::unexpected_report()),
        }
    }
}
