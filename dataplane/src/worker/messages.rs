//! What the control thread and the workers say to each other, through bounded queues.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use siw_iwarp::{NegotiatedParameters, QpEvent, QpInitAttr};
use siw_shm::{DoorbellConsumer, RqConsumer, SqConsumer};

use super::completion_queues::{CqModeration, WorkerCq};
use super::pending_connections::PendingSlot;
use super::shared_receive_queues::WorkerSrq;
use crate::ids::{ClientId, CmListenerId, CommandToken, CqId, Qpn, SrqId};

/// A connection request at a listener: worker, slot, generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RequestId(pub u64);

impl RequestId {
    pub(super) fn new(worker: u32, slot: PendingSlot, generation: u32) -> RequestId {
        let generation = u64::from(generation & 0xFF_FFFF);
        RequestId(u64::from(worker) << 56 | generation << 32 | u64::from(slot.0))
    }

    /// The worker that has the connection.
    pub fn worker(self) -> usize {
        (self.0 >> 56) as usize
    }

    pub(super) fn slot(self) -> PendingSlot {
        PendingSlot(self.0 as u32)
    }

    pub(super) fn generation(self) -> u32 {
        (self.0 >> 32) as u32 & 0xFF_FFFF
    }
}

/// A queue pair on its way into a worker.
pub struct QpSetup {
    pub client: ClientId,
    pub attr: QpInitAttr,
    pub sq: SqConsumer,
    pub rq: RqConsumer,
    pub send_cq: CqId,
    pub recv_cq: CqId,
    /// Shared receive queue instead of its own.
    pub srq: Option<SrqId>,
    /// Of it: how many requests the queue pair may hold, 0 for no bound.
    pub srq_share: u32,
}

/// An active connect.
#[derive(Debug, Clone)]
pub struct ConnectParams {
    pub device: usize,
    pub local: Option<IpAddr>,
    pub local_port: Option<u16>,
    pub remote: SocketAddr,
    pub private_data: Vec<u8>,
    pub ird: u16,
    pub ord: u16,
    /// The device's setting, or the consumer's own.
    pub crc: Option<bool>,
    pub revision: Option<u8>,
    /// For the TCP connection, and again for the MPA reply.
    pub timeout_ms: Option<u32>,
}

/// Control thread to worker. Executed in order.
pub enum Command {
    AddClient {
        client: ClientId,
        doorbells: DoorbellConsumer,
        /// Written by the client when the worker sleeps.
        wake: Arc<OwnedFd>,
    },
    /// Ends everything of a client: its connections are reset.
    RemoveClient {
        client: ClientId,
    },
    AddCq(Box<WorkerCq>),
    RemoveCq {
        cq: CqId,
    },
    /// Completions go to other memory from now on.
    ResizeCq {
        cq: CqId,
        producer: Box<siw_shm::CqProducer>,
    },
    ModerateCq {
        cq: CqId,
        moderation: Option<CqModeration>,
    },
    /// Raises a completion queue's event.
    RaiseCq {
        cq: CqId,
    },
    AddSrq(Box<WorkerSrq>),
    RemoveSrq {
        srq: SrqId,
    },
    /// A resize put a new ring behind the old one.
    SettleSrq {
        srq: SrqId,
    },
    Connect {
        setup: Box<QpSetup>,
        params: Box<ConnectParams>,
    },
    Accept {
        setup: Box<QpSetup>,
        request: RequestId,
        private_data: Vec<u8>,
        ird: u16,
        ord: u16,
    },
    Reject {
        request: RequestId,
        private_data: Vec<u8>,
    },
    Listen {
        listener: CmListenerId,
        device: usize,
        local: Option<IpAddr>,
        port: u16,
        backlog: usize,
        mpa: siw_shm::control::MpaOptions,
    },
    Unlisten {
        listener: CmListenerId,
    },
    Disconnect {
        qpn: Qpn,
    },
    /// A queue pair without a connection whose queues are to be flushed.
    InstallQp {
        setup: Box<QpSetup>,
    },
    /// Moves a queue pair to another state, or nowhere; answered with [`Event::QpInfo`].
    Modify {
        qpn: Qpn,
        to: Option<ModifyTarget>,
        token: CommandToken,
    },
    DestroyQp {
        qpn: Qpn,
    },
    /// Takes a queue pair out at once, its connection is reset; answered with
    /// [`Event::QpDestroyed`].
    ResetQp {
        qpn: Qpn,
    },
    /// Answered with [`Event::BarrierReached`] when all earlier commands are done.
    Barrier {
        token: CommandToken,
    },
    /// Counters as of now, answered with [`Event::Stats`].
    Stats {
        token: CommandToken,
    },
    /// Close all connections and end the thread.
    Stop,
}

/// Where a consumer moves a queue pair that a worker has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModifyTarget {
    /// From SQD back.
    ReadyToSend,
    SendQueueDrain,
    Closing,
    Terminate,
    Error,
}

/// What a worker knows of a queue pair.
#[derive(Debug, Clone)]
pub struct QpInfo {
    pub state: siw_shm::control::QpState,
    /// In SQD: nothing that was started is left.
    pub drained: bool,
    pub ird: u16,
    pub ord: u16,
    pub mulpdu: u16,
    /// Why the queue pair is not where it was asked to go.
    pub refused: Option<&'static str>,
}

impl Default for QpInfo {
    fn default() -> Self {
        QpInfo {
            state: siw_shm::control::QpState::Idle,
            drained: false,
            ird: 0,
            ord: 0,
            mulpdu: 0,
            refused: None,
        }
    }
}

/// Why a connection did not come about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConnectFailure {
    /// The responder's application said no.
    Rejected(Vec<u8>),
    Refused,
    Unreachable,
    TimedOut,
    Reset,
    /// The peer's MPA frame, or our own parameters, are wrong.
    Protocol(String),
    /// TCP had no port, route or room.
    Local(String),
}

/// How a connection broke.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DisconnectReason {
    Reset,
    TimedOut,
    /// Terminate codes: layer, error type, code.
    TerminateReceived(siw_iwarp::TerminateCode),
    /// This side found the error.
    TerminateSent(siw_iwarp::TerminateCode),
}

/// Worker to control thread.
pub enum Event {
    ConnectRequest {
        request: RequestId,
        listener: CmListenerId,
        local: SocketAddr,
        remote: SocketAddr,
        private_data: Vec<u8>,
        peer_ird: Option<u16>,
        peer_ord: Option<u16>,
    },
    /// The peer gave up before the application answered.
    RequestGone {
        request: RequestId,
        listener: CmListenerId,
    },
    Established {
        qpn: Qpn,
        negotiated: NegotiatedParameters,
        private_data: Vec<u8>,
        local: SocketAddr,
        remote: SocketAddr,
    },
    ConnectFailed {
        qpn: Qpn,
        failure: ConnectFailure,
    },
    Disconnected {
        qpn: Qpn,
        failure: Option<DisconnectReason>,
    },
    QpDestroyed {
        qpn: Qpn,
    },
    QpInfo {
        qpn: Qpn,
        token: CommandToken,
        info: Box<QpInfo>,
    },
    Async {
        client: ClientId,
        qpn: Qpn,
        event: QpEvent,
    },
    /// A completion ring was full: the queue is broken.
    CqOverflow {
        client: ClientId,
        cq: CqId,
    },
    /// The stock of a shared receive queue fell below its limit.
    SrqLimit {
        client: ClientId,
        srq: SrqId,
    },
    /// The queue pair takes nothing more from its shared receive queue.
    LastWqe {
        client: ClientId,
        qpn: Qpn,
    },
    /// A work request could not be executed.
    BadRequest {
        client: ClientId,
        qpn: Qpn,
        reason: String,
    },
    /// A ring holds what no client library writes: the client is closed.
    ClientFault {
        client: ClientId,
        qpn: Qpn,
    },
    ListenFailed {
        listener: CmListenerId,
        reason: String,
    },
    BarrierReached {
        worker: usize,
        token: CommandToken,
    },
    Stats {
        worker: usize,
        token: CommandToken,
        stats: Box<WorkerStats>,
    },
    Stopped {
        worker: usize,
    },
}

/// Counters of one worker.
#[derive(Debug, Default, Clone)]
pub struct WorkerStats {
    pub queue_pairs: usize,
    pub iterations: u64,
    pub sleeps: u64,
    pub forward: crate::datapath::forward::ForwardStats,
    /// FPDUs whose payload was placed before a hole in front of them was filled.
    pub placed_out_of_order: u64,
    /// Frames to and from ports, by device.
    pub devices: Vec<(usize, u64, u64, siw_tcp::StackStats)>,
    pub buffers_free: u32,
    pub buffers: u32,
}
