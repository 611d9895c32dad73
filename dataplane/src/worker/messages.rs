//! What the control thread and the workers say to each other, through bounded queues.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use siw_iwarp::{NegotiatedParameters, QpEvent, QpInitAttr};
use siw_memory::Stag;
use siw_shm::{Access, DoorbellConsumer, RqConsumer, SharedMemory, SqConsumer};

use super::completion_queues::{CqModeration, WorkerCq};
use super::pending_connections::PendingSlot;
use super::shared_receive_queues::WorkerSrq;
use crate::ids::{ClientId, CmListenerId, CommandToken, CqId, Qpn, SrqId};
use crate::netlink::KernelNeighbour;

/// Bits of a generation in a [`RequestId`]: above the slot, below the worker.
pub(super) const GENERATION_MASK: u32 = 0xFF_FFFF;

/// A connection request at a listener: worker, slot, generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RequestId(pub u64);

impl RequestId {
    pub(super) fn new(worker: u32, slot: PendingSlot, generation: u32) -> RequestId {
        let generation = u64::from(generation & GENERATION_MASK);
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
        (self.0 >> 32) as u32 & GENERATION_MASK
    }
}

/// A queue pair on its way into a worker.
pub struct QpSetup {
    /// The client that owns it.
    pub client: ClientId,
    /// The client's user (uid).
    pub user: u32,
    /// What it was created with.
    pub attr: QpInitAttr,
    /// The worker's end of the send queue.
    pub sq: SqConsumer,
    /// The worker's end of the receive queue.
    pub rq: RqConsumer,
    /// Where send work requests complete.
    pub send_cq: CqId,
    /// Where receive work requests complete.
    pub recv_cq: CqId,
    /// Shared receive queue instead of its own.
    pub srq: Option<SrqId>,
    /// Of it: how many requests the queue pair may hold, 0 for no bound.
    pub srq_share: u32,
    /// It is connected without rdma_cm.
    pub is_paired: bool,
    /// A message without a receive work request waits for one, also where the device does not say so.
    pub waits_for_receives: bool,
}

/// An active connect.
#[derive(Debug, Clone)]
pub struct ConnectParams {
    /// The device's place in the configuration.
    pub device: usize,
    /// The source address; TCP's choice among the device's when absent.
    pub local: Option<IpAddr>,
    /// The source port; drawn when absent.
    pub local_port: Option<u16>,
    /// Where to.
    pub remote: SocketAddr,
    /// Private data of the MPA request.
    pub private_data: Vec<u8>,
    /// Inbound RDMA Reads that the queue pair takes at once.
    pub ird: u16,
    /// RDMA Reads that it may have outstanding.
    pub ord: u16,
    /// The consumer's own choice of CRCs; the device's setting when absent.
    pub crc: Option<bool>,
    /// The consumer's own choice of the MPA revision; the device's setting when absent.
    pub revision: Option<u8>,
    /// For the whole set-up, from the start of the TCP connection to the MPA reply.
    pub timeout_ms: Option<u32>,
    /// How often it is tried again where nobody listens.
    pub refusals: u8,
}

/// Control thread to worker. Executed in order.
pub enum Command {
    /// A client may have queue pairs here from now on.
    AddClient {
        /// Its number.
        client: ClientId,
        /// Its user (uid).
        user: u32,
        /// The worker's end of its doorbell ring.
        doorbells: DoorbellConsumer,
        /// Written by the client when the worker sleeps.
        wake: Arc<OwnedFd>,
    },
    /// Ends everything of a client: its connections are reset.
    RemoveClient {
        /// Its number.
        client: ClientId,
    },
    /// A completion queue that queue pairs of this worker complete to.
    AddCq(Box<WorkerCq>),
    /// Forgets a completion queue.
    RemoveCq {
        /// Its number.
        cq: CqId,
    },
    /// Completions go to other memory from now on.
    ResizeCq {
        /// The queue.
        cq: CqId,
        /// The worker's end of the new ring.
        producer: Box<siw_shm::CqProducer>,
    },
    /// Sets or ends the moderation of a queue's events.
    ModerateCq {
        /// The queue.
        cq: CqId,
        /// `None`: each completion of an armed queue raises its event.
        moderation: Option<CqModeration>,
    },
    /// Raises a completion queue's event.
    RaiseCq {
        /// The queue.
        cq: CqId,
    },
    /// A shared receive queue that queue pairs of this worker take requests from.
    AddSrq(Box<WorkerSrq>),
    /// Forgets a shared receive queue.
    RemoveSrq {
        /// Its number.
        srq: SrqId,
    },
    /// A resize put a new ring behind the old one.
    SettleSrq {
        /// The queue.
        srq: SrqId,
    },
    /// Connects a queue pair; answered with [`Event::Established`] or [`Event::ConnectFailed`].
    Connect {
        /// The queue pair.
        setup: Box<QpSetup>,
        /// Where to, and how.
        params: Box<ConnectParams>,
    },
    /// The application takes a connection; answered as [`Command::Connect`].
    Accept {
        /// The queue pair that the connection is for.
        setup: Box<QpSetup>,
        /// The connection.
        request: RequestId,
        /// Private data of the MPA reply.
        private_data: Vec<u8>,
        /// Inbound RDMA Reads that the queue pair takes at once.
        ird: u16,
        /// RDMA Reads that it may have outstanding.
        ord: u16,
    },
    /// The application refuses a connection.
    Reject {
        /// The connection.
        request: RequestId,
        /// Private data of the MPA reply.
        private_data: Vec<u8>,
    },
    /// Listens on a device; answered with [`Event::ListenFailed`] if that is not possible.
    Listen {
        /// The listener's number.
        listener: CmListenerId,
        /// The user (uid) of its client.
        user: u32,
        /// The device's place in the configuration.
        device: usize,
        /// One of the device's addresses; all when absent.
        local: Option<IpAddr>,
        /// The TCP port.
        port: u16,
        /// Connections that may wait to be accepted.
        backlog: usize,
        /// Settings that differ from the device's.
        mpa: siw_shm::control::MpaOptions,
    },
    /// Ends a listener.
    Unlisten {
        /// Its number.
        listener: CmListenerId,
        /// Requests that its application has taken live on; else they are reset, as are
        /// connections without a request in any case.
        keep_requests: bool,
    },
    /// Closes a queue pair's connection gracefully.
    Disconnect {
        /// The queue pair.
        qpn: Qpn,
    },
    /// A queue pair without a connection whose queues are to be flushed.
    InstallQp {
        /// The queue pair.
        setup: Box<QpSetup>,
    },
    /// Moves a queue pair to another state, or nowhere; answered with [`Event::QpInfo`].
    Modify {
        /// The queue pair.
        qpn: Qpn,
        /// Where to; `None` asks only.
        to: Option<ModifyTarget>,
        /// Comes back with the answer.
        token: CommandToken,
    },
    /// Takes a queue pair out when its last bytes are acknowledged, or soon; answered with
    /// [`Event::QpDestroyed`].
    DestroyQp {
        /// The queue pair.
        qpn: Qpn,
    },
    /// Takes a queue pair out at once, its connection is reset; answered with
    /// [`Event::QpDestroyed`].
    ResetQp {
        /// The queue pair.
        qpn: Qpn,
    },
    /// Answered with [`Event::BarrierReached`] when all earlier commands are done.
    Barrier {
        /// Comes back with the answer.
        token: CommandToken,
    },
    /// Answered with [`Event::BarrierReached`] when no port holds a frame any more that refers to
    /// the memory as of now.
    AwaitFrames {
        /// Comes back with the answer.
        token: CommandToken,
        /// Memory that nothing refers to anew: its keys are gone, or its queue pairs.
        regions: Arc<[Arc<SharedMemory>]>,
        /// Workers that have not answered yet.
        unanswered: Arc<AtomicUsize>,
    },
    /// Routes of the kernel through a device that it shares, in place of those before.
    LearnRoutes {
        /// The device's place in the configuration.
        device: usize,
        /// The routes.
        routes: Arc<siw_tcp::LearnedRoutes>,
    },
    /// What the kernel knows of a neighbour on a device that it shares.
    LearnNeighbour {
        /// The device's place in the configuration.
        device: usize,
        /// The neighbour.
        neighbour: KernelNeighbour,
    },
    /// Counters as of now, answered with [`Event::Stats`].
    Stats {
        /// Comes back with the answer.
        token: CommandToken,
    },
    /// The device is gone: its connections end, and the worker gives its queues of the port back;
    /// answered with [`Event::PortRemoved`].
    RemovePort {
        /// The device's place in the configuration.
        device: usize,
    },
    /// Close all connections and end the thread.
    Stop,
}

/// Where a consumer moves a queue pair that a worker has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModifyTarget {
    /// From SQD back to RTS.
    ReadyToSend,
    /// SQD: no further send work request starts.
    SendQueueDrain,
    /// As a disconnect.
    Closing,
    /// A Terminate goes out, then the connection closes.
    Terminate,
    /// ERROR: everything is flushed, the connection is reset.
    Error,
    /// Not elsewhere, but from now on its peer may not do this.
    DenyAccess(Access),
}

/// What a worker knows of a queue pair.
#[derive(Debug, Clone)]
pub struct QpInfo {
    /// The state in the consumer's terms.
    pub state: siw_shm::control::QpState,
    /// In SQD: nothing that was started is left.
    pub drained: bool,
    /// Inbound RDMA Reads that the queue pair takes at once.
    pub ird: u16,
    /// RDMA Reads that it may have outstanding.
    pub ord: u16,
    /// Largest ULPDU of an FPDU as of now, bytes (RFC 5044 section 4.1).
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
    /// The responder's application said no, with this private data.
    Rejected(Vec<u8>),
    /// The peer's TCP sent RST in answer to SYN.
    Refused,
    /// No neighbour or router answers, or an ICMP error came.
    Unreachable,
    /// TCP or the MPA reply took too long.
    TimedOut,
    /// The connection ended during the set-up.
    Reset,
    /// The peer's MPA frame, or our own parameters, are wrong.
    Protocol(String),
    /// TCP had no port, route or room.
    Local(String),
    /// The client or its user has too much of something that others need too.
    OverQuota(String),
}

/// Why a connection ended otherwise than by an orderly close.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DisconnectReason {
    /// By RST.
    Reset,
    /// The peer stopped answering, or the close took too long.
    TimedOut,
    /// The peer found an error, with its layer, type and code.
    TerminateReceived(siw_iwarp::TerminateCode),
    /// This side found an error.
    TerminateSent(siw_iwarp::TerminateCode),
}

/// Worker to control thread.
pub enum Event {
    /// A peer wants a connection: the application is asked, and answers by [`Command::Accept`] or
    /// [`Command::Reject`].
    ConnectRequest {
        /// Names the connection in the answer.
        request: RequestId,
        /// The listener that it came to.
        listener: CmListenerId,
        /// This side's address and port.
        local: SocketAddr,
        /// The peer's.
        remote: SocketAddr,
        /// Private data of the MPA request.
        private_data: Vec<u8>,
        /// The peer's IRD, if its request says it (RFC 6581).
        peer_ird: Option<u16>,
        /// The peer's ORD, likewise.
        peer_ord: Option<u16>,
    },
    /// The peer gave up before the application answered.
    RequestGone {
        /// The connection.
        request: RequestId,
    },
    /// A queue pair is in RTS.
    Established {
        /// The queue pair.
        qpn: Qpn,
        /// What MPA agreed on.
        negotiated: NegotiatedParameters,
        /// Private data of the MPA reply, at the initiator.
        private_data: Vec<u8>,
        /// This side's address and port.
        local: SocketAddr,
        /// The peer's.
        remote: SocketAddr,
    },
    /// A set-up failed: the worker does not have the queue pair any more.
    ConnectFailed {
        /// The queue pair.
        qpn: Qpn,
        /// Why.
        failure: ConnectFailure,
    },
    /// A connection ended.
    Disconnected {
        /// The queue pair.
        qpn: Qpn,
        /// Why, if not in order.
        failure: Option<DisconnectReason>,
    },
    /// The worker does not have the queue pair any more.
    QpDestroyed {
        /// The queue pair.
        qpn: Qpn,
        /// Memory windows that may be bound to it, by the keys that they were allocated with.
        windows: Vec<Stag>,
    },
    /// A port still holds frames some time after [`Command::AwaitFrames`];
    /// [`Event::BarrierReached`] comes when it has released them.
    FramesHeld {
        /// The command's.
        token: CommandToken,
    },
    /// The answer to [`Command::Modify`].
    QpInfo {
        /// The queue pair.
        qpn: Qpn,
        /// The command's.
        token: CommandToken,
        /// Its state and attributes.
        info: Box<QpInfo>,
    },
    /// An asynchronous event of a queue pair (ibv_get_async_event(3)).
    Async {
        /// The client that hears of it.
        client: ClientId,
        /// The queue pair.
        qpn: Qpn,
        /// What happened.
        event: QpEvent,
    },
    /// A completion ring was full: the queue is broken.
    CqOverflow {
        /// The client that hears of it.
        client: ClientId,
        /// The queue.
        cq: CqId,
    },
    /// The requests in a shared receive queue fell below its limit.
    SrqLimit {
        /// The client that hears of it.
        client: ClientId,
        /// The queue.
        srq: SrqId,
    },
    /// The queue pair takes nothing more from its shared receive queue.
    LastWqe {
        /// The client that hears of it.
        client: ClientId,
        /// The queue pair.
        qpn: Qpn,
    },
    /// A work request could not be executed.
    BadRequest {
        /// The client that hears of it.
        client: ClientId,
        /// The queue pair.
        qpn: Qpn,
        /// What is wrong with it.
        reason: String,
    },
    /// A ring holds what no client library writes: the client is closed.
    ClientFault {
        /// The client.
        client: ClientId,
        /// The queue pair whose ring it is.
        qpn: Qpn,
    },
    /// A listener could not be started.
    ListenFailed {
        /// The listener.
        listener: CmListenerId,
        /// Why.
        reason: String,
    },
    /// All commands before a [`Command::Barrier`] are done, or the frames of a
    /// [`Command::AwaitFrames`] released.
    BarrierReached {
        /// The worker.
        worker: usize,
        /// The command's.
        token: CommandToken,
    },
    /// The answer to [`Command::RemovePort`].
    PortRemoved {
        /// The device's place in the configuration.
        device: usize,
    },
    /// The answer to [`Command::Stats`].
    Stats {
        /// The worker.
        worker: usize,
        /// The command's.
        token: CommandToken,
        /// Its counters.
        stats: Box<WorkerStats>,
    },
    /// The thread ends.
    Stopped {
        /// The worker.
        worker: usize,
    },
}

/// Counters of one worker's port of a device.
#[derive(Debug, Default, Clone)]
pub struct PortStats {
    /// The device's place in the configuration.
    pub device: usize,
    /// Frames from the port.
    pub frames_received: u64,
    /// Frames that the port took.
    pub frames_sent: u64,
    /// Frames with more segments than the port takes, which were copied into one.
    pub frames_linearized: u64,
    /// Frames that the port can never send, and that were dropped.
    pub frames_refused: u64,
    /// Frames that the kernel sent through the port.
    pub host_frames_sent: u64,
    /// Frames between the port and the kernel, in either direction, for which there was no room.
    pub host_frames_dropped: u64,
    /// TCP's counters.
    pub tcp: siw_tcp::StackStats,
}

impl PortStats {
    /// Adds the counters of another worker's port of the same device.
    pub fn merge(&mut self, other: &PortStats) {
        self.frames_received += other.frames_received;
        self.frames_sent += other.frames_sent;
        self.frames_linearized += other.frames_linearized;
        self.frames_refused += other.frames_refused;
        self.tcp.merge(&other.tcp);
    }
}

/// Cache lines that applications and a worker hand each other through the queues, one way each time:
/// what the queues need, which the CPUs may exceed.
#[derive(Debug, Clone, Copy, Default)]
pub struct SharedLines {
    /// Slots of requests that the worker read.
    pub request_slots: u64,
    /// How often it read them, one or many at once: the words of the queue's header pass, one line each
    /// way.
    pub request_batches: u64,
    /// Doorbells that it took: the pending word is on the line of the queue's header.
    pub doorbells: u64,
    /// Entries that it wrote to completion queues.
    pub completions: u64,
}

/// Counters of one worker.
#[derive(Debug, Default, Clone)]
pub struct WorkerStats {
    /// Queue pairs that it has.
    pub queue_pairs: usize,
    /// Batches that it ran.
    pub iterations: u64,
    /// How often it slept.
    pub sleeps: u64,
    /// The core that it runs on.
    pub core: usize,
    /// Nanoseconds that its thread has run.
    pub cpu_ns: u64,
    /// What applications and this worker handed each other.
    pub shared_lines: SharedLines,
    /// Frames from and to other workers.
    pub forward: crate::datapath::forward::ForwardStats,
    /// FPDUs whose payload was placed before a hole in front of them was filled.
    pub placed_out_of_order: u64,
    /// Messages that had to wait for a receive work request.
    pub receive_waits: u64,
    /// Those that waited longer than `receive_wait_ms`.
    pub receive_wait_timeouts: u64,
    /// Of each device.
    pub devices: Vec<PortStats>,
    /// Packet buffers that are free.
    pub buffers_free: u32,
    /// Packet buffers of all workers.
    pub buffers: u32,
}
