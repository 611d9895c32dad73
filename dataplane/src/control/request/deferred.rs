//! Deferred requests, whose reply waits for reports of workers or helpers.
//!
//! ```text
//! handler -- Served::Deferred --> Client::waiting <-- report with its token -- worker, helper
//!    ^                                 |
//!    |                                 | no report is missing
//!    '-- resume.rs ---------------------+--> reply, or deferred again
//! ```

use siw_memory::{KeyTable, Retired, Stag};
use siw_shm::CqGeometry;
use siw_shm::control::messages::ModifySrq;

use super::refusal::Refusal;
use crate::control::account::quotas::Charge;
use crate::control::memory::client_memory::{ArenaOrigin, ClientMemory};
use crate::control::operator::pieced_text::PiecedText;
use crate::control::resources::Resources;
use crate::control::threads::reports::MadeArena;
use crate::ids::{AhId, CmChannelId, CommandToken, ConnectRequestId, CqId, Qpn, SrqId};
use crate::worker::messages::{ConnectionSnapshot, QpInfo, ResolutionFailure, StreamAnswer};

/// A request without a reply so far: its kind, the sequence number of its reply, and what it waits for.
pub(in crate::control) struct DeferredRequest {
    pub kind: u16,
    pub seq: u32,
    pub what: Deferred,
}

/// Reports that a request waits for, and its next step.
pub(in crate::control) struct Deferred {
    /// Token of the reports that it waits for.
    pub token: CommandToken,
    /// Number of missing reports.
    pub left: usize,
    pub then: Then,
}

/// Next step of a request when no report is missing.
pub(in crate::control) enum Then {
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
    /// The workers have the address handle; its neighbour has answered them, or not.
    ReplyAh {
        ah: AhId,
        failure: Option<ResolutionFailure>,
    },
    /// The worker has the queue pair of datagrams, and its Q_Key.
    ReplyDatagrams,
    /// The worker knows the membership in a multicast group, or its end.
    ReplyGroup { attached: bool },
    /// The worker has released the queue pair, which is reset.
    ResetQp(Qpn),
    /// The worker has released the queue pair, which is freed.
    FreeQp(Qpn),
    /// No worker can use the memory key.
    EndKey {
        /// Grace period after which no worker can use the old entry of the key.
        ticket: Retired,
        reply: KeyReply,
    },
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
    /// The worker has answered a request about a connection in streaming mode.
    Stream(StreamStep),
    /// An operator's action has ended.
    ReplyAction,
}

/// A request whose reply waits for the worker of a connection in streaming mode.
#[derive(Debug, Clone, Copy)]
pub(in crate::control) enum StreamStep {
    /// OPEN_STREAM.
    Open {
        channel: CmChannelId,
        cookie: u64,
        device: usize,
    },
    /// SEND_STREAM.
    Send,
    /// RECEIVE_STREAM.
    Receive,
    /// TURN_STREAM.
    Turn {
        stream: ConnectRequestId,
        channel: CmChannelId,
        cookie: u64,
    },
}

/// Reply after the last use of a key.
pub(in crate::control) enum KeyReply {
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
pub(in crate::control) enum Report {
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
    Statistics(PiecedText),
    /// Answer of the worker of a connection in streaming mode.
    Stream(StreamAnswer),
    /// Outcome of an operator's action, as text.
    Action(Result<String, Refusal>),
}

impl Deferred {
    /// Waits for one report, which carries this token.
    pub fn new(token: CommandToken, then: Then) -> Deferred {
        let left = 1;
        Deferred { token, left, then }
    }

    /// Returns true if nothing is missing. For a key, its grace period must have ended, and the frames of its
    /// memory must be freed, except in ports whose driver takes too long.
    pub fn is_ready(&self, memory: &ClientMemory, keys: &KeyTable) -> bool {
        match &self.then {
            Then::EndKey { ticket, .. } => {
                memory.may_answer(self.token) && keys.is_reclaimed(*ticket)
            }
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
    /// The deferred request that waits for reports with this token, and the memory of its client.
    pub(in crate::control) fn deferred_mut(
        &mut self,
        token: CommandToken,
    ) -> Option<(&mut Deferred, &ClientMemory)> {
        let client = self.clients.get_mut(&token.client?)?;
        let what = &mut client.waiting.as_mut()?.what;
        (what.token == token).then_some((what, &client.memory))
    }
}
