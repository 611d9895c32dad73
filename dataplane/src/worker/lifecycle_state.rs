//! State of a queue pair's life cycle. `lifecycle.rs` has the transitions.

use std::time::Duration;

use siw_iwarp::mpa::{MpaConfig, MpaInitiator};
use siw_iwarp::port_mapper::PortMapperMessage;
use siw_net::Instant;

use super::completion_queues::CqeId;
use super::datagrams::DatagramState;
use super::messages::ConnectParams;
use crate::ids::CqId;

/// State of a queue pair's life cycle; see `lifecycle.rs`.
pub(super) enum LifecycleState {
    /// In the table while the command that inserted it is executed.
    Unconnected,
    MappingPort(Box<MappingQuery>),
    TcpConnecting(Box<ConnectAttempt>),
    MpaNegotiation(Box<ConnectAttempt>),
    AwaitingListener(Box<ConnectAttempt>),
    Running {
        wake: Option<PeerWake>,
    },
    FinishingMessage {
        deadline: Instant,
    },
    Terminating {
        deadline: Instant,
    },
    Closing {
        deadline: Instant,
    },
    Destroying {
        deadline: Instant,
        /// Latest deadline, whatever the progress.
        end: Instant,
    },
    Lingering {
        deadline: Instant,
        /// Latest deadline, whatever the progress.
        end: Instant,
    },
    AwaitingRetries {
        deadline: Instant,
    },
    Datagrams(DatagramState),
    Disconnected,
}

/// A connect that waits for the answer of its peer's port mapper.
pub(super) struct MappingQuery {
    pub(super) params: ConnectParams,
    pub(super) consumer_deadline: Option<Instant>,
    /// The request. The low half of its handle is the slot of the queue pair.
    pub(super) request: PortMapperMessage,
    /// Time of the first request.
    pub(super) sent: Option<Instant>,
    /// Time of the next step.
    pub(super) deadline: Instant,
    /// Pause after the next step.
    pub(super) pause: Duration,
    /// Time at which the connect goes on without an answer.
    pub(super) end: Instant,
}

/// Set-up by the initiator.
pub(super) struct ConnectAttempt {
    pub(super) initiator: MpaInitiator,
    pub(super) params: ConnectParams,
    pub(super) config: MpaConfig,
    /// Deadline of the current state.
    pub(super) deadline: Instant,
    /// Deadline of the whole set-up, if the consumer gave a time-out.
    pub(super) consumer_deadline: Option<Instant>,
}

impl LifecycleState {
    /// Name of the state, for status output.
    pub(super) fn name(&self) -> &'static str {
        match self {
            LifecycleState::Unconnected => "unconnected",
            LifecycleState::MappingPort(_) => "mapping port",
            LifecycleState::TcpConnecting(_) => "connecting",
            LifecycleState::MpaNegotiation(_) => "negotiating",
            LifecycleState::AwaitingListener(_) => "awaiting listener",
            LifecycleState::Running { .. } => "running",
            LifecycleState::FinishingMessage { .. } => "finishing message",
            LifecycleState::Terminating { .. } => "terminating",
            LifecycleState::Closing { .. } => "closing",
            LifecycleState::Destroying { .. } => "destroying",
            LifecycleState::Lingering { .. } => "lingering",
            LifecycleState::AwaitingRetries { .. } => "awaiting retries",
            LifecycleState::Datagrams(_) => "datagrams",
            LifecycleState::Disconnected => "disconnected",
        }
    }

    /// Time at which the state is given up.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self {
            LifecycleState::TcpConnecting(attempt)
            | LifecycleState::MpaNegotiation(attempt)
            | LifecycleState::AwaitingListener(attempt) => Some(attempt.deadline),
            LifecycleState::MappingPort(query) => Some(query.deadline),
            LifecycleState::FinishingMessage { deadline }
            | LifecycleState::Terminating { deadline }
            | LifecycleState::Closing { deadline }
            | LifecycleState::Destroying { deadline, .. }
            | LifecycleState::Lingering { deadline, .. }
            | LifecycleState::AwaitingRetries { deadline } => Some(*deadline),
            LifecycleState::Running { wake } => wake.as_ref().map(|wake| wake.at),
            LifecycleState::Unconnected
            | LifecycleState::Datagrams(_)
            | LifecycleState::Disconnected => None,
        }
    }

    /// True while there is a stream of FPDUs: MPA set-up is complete and the connection is open.
    #[inline]
    pub(super) fn has_stream(&self) -> bool {
        matches!(
            self,
            LifecycleState::Running { .. }
                | LifecycleState::FinishingMessage { .. }
                | LifecycleState::Terminating { .. }
                | LifecycleState::Closing { .. }
                | LifecycleState::Destroying { .. }
                | LifecycleState::Lingering { .. }
        )
    }

    /// True while the stream is brought to its end, with a deadline that progress extends.
    #[inline]
    pub(super) fn is_ending(&self) -> bool {
        matches!(
            self,
            LifecycleState::FinishingMessage { .. }
                | LifecycleState::Terminating { .. }
                | LifecycleState::Closing { .. }
                | LifecycleState::Destroying { .. }
                | LifecycleState::Lingering { .. }
        )
    }

    /// True while this side sets the connection up.
    pub(super) fn is_connecting(&self) -> bool {
        matches!(
            self,
            LifecycleState::MappingPort(_)
                | LifecycleState::TcpConnecting(_)
                | LifecycleState::MpaNegotiation(_)
                | LifecycleState::AwaitingListener(_)
        )
    }
}

/// Next attempt to break the silence of a peer that has not sent an FPDU yet.
pub(super) struct PeerWake {
    pub(super) at: Instant,
    pub(super) pause: Duration,
}

impl PeerWake {
    pub(super) fn after(now: Instant, pause: Duration) -> Option<PeerWake> {
        let at = now + pause;
        (!pause.is_zero()).then_some(PeerWake { at, pause })
    }
}

/// Completions that a client had not polled when the connection of their queue pair ended: the last one
/// of each queue that has any.
pub(super) struct UnpolledCompletions {
    pub(super) queues: [Option<(CqId, CqeId)>; 2],
    pub(super) deadline: Instant,
}
