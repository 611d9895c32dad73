//! Messages between the control thread and the workers, exchanged through bounded queues.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use siw_host::netlink::KernelNeighbour;
use siw_iwarp::port_mapper::PortMapperMessage;
use siw_iwarp::{NegotiatedParameters, QpEvent, QpInitAttr};
use siw_memory::Stag;
use siw_net::{DatagramPath, IpCidr, QuotaOwner};
use siw_roce::{MAD_LEN, SidrMessage};
use siw_shm::control::FinalSend;
use siw_shm::{Access, DoorbellConsumer, RqConsumer, SharedMemory, SqConsumer};

use super::completion_queues::{CqModeration, WorkerCq};
use super::drop_reasons::DropCounts;
use super::histogram::{MessageLengths, RoundTripTimes};
use super::new_port::NewPort;
use super::shared_receive_queues::WorkerSrq;
use super::slots::PendingSlot;
use crate::datapath::wire_faults::{ActiveFault, FaultMark, WireFaultCounts};
use crate::frame_taps::FrameTaps;
use crate::ids::{AhId, ClientId, CmListenerId, CommandToken, CqId, Qpn, ResolutionId, SrqId};

/// Mask of the generation in a [`RequestId`]; the worker lies above it, the slot below.
pub(super) const GENERATION_MASK: u32 = 0xFF_FFFF;

/// A connection request at a listener: worker, slot, generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
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
    /// Attributes at creation.
    pub attr: QpInitAttr,
    /// The worker's end of the send queue.
    pub sq: SqConsumer,
    /// The worker's end of the receive queue.
    pub rq: RqConsumer,
    /// Completion queue of send work requests.
    pub send_cq: CqId,
    /// Completion queue of receive work requests.
    pub recv_cq: CqId,
    /// Shared receive queue instead of its own.
    pub srq: Option<SrqId>,
    /// Requests of the shared receive queue that the queue pair may hold; 0 for no bound.
    pub srq_share: u32,
    /// Connected without rdma_cm.
    pub is_paired: bool,
    /// Number of connections of the worker on the device beyond which it gets none.
    pub most_connections: usize,
    /// A message without a receive work request waits for one, even if the device's settings do not
    /// ask for it.
    pub waits_for_receives: bool,
    /// The SEND that ends it if its client departs; present if it is a stream.
    pub final_send: FinalSend,
    /// The report of the end of its connection has the state of the connection.
    pub is_recorded: bool,
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
    /// Destination.
    pub remote: SocketAddr,
    /// The port on which the destination listens, if its port mapper has named one.
    pub mapped_port: Option<u16>,
    /// The source port that the port mapper was told, if `local_port` is absent.
    pub drawn_port: Option<u16>,
    /// The request to the peer's port mapper, after it was given up or answered.
    pub asked_mapper: Option<PortMapperMessage>,
    /// The queue pair is its own peer: `local` is given, and the address of `remote`.
    pub to_itself: bool,
    /// Private data of the MPA request.
    pub private_data: Vec<u8>,
    /// Maximum concurrent inbound RDMA Reads.
    pub ird: u16,
    /// Maximum outstanding RDMA Reads.
    pub ord: u16,
    /// The consumer's choice of CRCs; the device's setting when absent.
    pub crc: Option<bool>,
    /// The consumer's choice of the MPA revision; the device's setting when absent.
    pub revision: Option<u8>,
    /// Time-out of the whole set-up, from the start of the TCP connection to the MPA reply.
    pub timeout_ms: Option<u32>,
    /// Number of retries if the peer has no listener.
    pub refusals: u8,
    /// The connection was in streaming mode: another attempt would lack its bytes.
    pub is_turned: bool,
}

/// An active connect in streaming mode.
#[derive(Debug, Clone)]
pub struct StreamParams {
    /// Comes back with the answer.
    pub token: CommandToken,
    /// Owner that an unresolved neighbour and held buffers are charged to.
    pub owner: QuotaOwner,
    /// Number of connections of the worker on the device beyond which the client gets none.
    pub most_connections: usize,
    /// The device's place in the configuration.
    pub device: usize,
    /// The source address; TCP's choice among the device's when absent.
    pub local: Option<IpAddr>,
    /// Destination.
    pub remote: SocketAddr,
    /// Time-out of the TCP connection.
    pub timeout: Option<Duration>,
    /// Maximum time without bytes in either direction; the device's `accept_timeout_ms` when absent.
    pub idle_timeout: Option<Duration>,
}

/// A call on a connection in streaming mode.
#[derive(Debug)]
pub enum StreamCall {
    /// Sends bytes, as many as there is room for.
    Send(Box<[u8]>),
    /// Reads at most this many bytes.
    Receive(usize),
    /// Becomes the MPA responder.
    Turn,
}

/// The answer to a [`StreamCall`] or to [`Command::OpenStream`].
#[derive(Debug)]
pub enum StreamAnswer {
    /// The connection is being opened.
    Opening(RequestId),
    /// The connection cannot be opened.
    NotOpened(ConnectFailure),
    /// Number of bytes that were taken.
    Sent(usize),
    /// Bytes that were read.
    Received {
        /// The bytes.
        bytes: Box<[u8]>,
        /// There are no more: the peer has closed its direction.
        is_closed: bool,
    },
    /// The connection awaits the peer's MPA request.
    Turned,
    /// Bytes after the end of the sending direction.
    Closed,
    /// The connection has ended, or is not in streaming mode.
    Gone,
}

/// Request to resolve the neighbour of a destination, and to draw a source port.
#[derive(Debug, Clone)]
pub struct ResolutionRequest {
    /// Its client.
    pub client: ClientId,
    /// The client's user (uid).
    pub user: u32,
    /// Its number.
    pub resolution: ResolutionId,
    /// The device's place in the configuration.
    pub device: usize,
    /// The source address; a port of 0 is drawn.
    pub local: SocketAddr,
    /// Destination.
    pub remote: SocketAddr,
    /// Time after which the neighbour counts as absent.
    pub timeout: Duration,
    /// Recipient of the outcome.
    pub report: ResolutionReport,
}

/// Recipient of the outcome of a resolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResolutionReport {
    /// The client, by an event ([`Event::Resolved`]).
    ToClient,
    /// The request with this token ([`Event::AhResolved`]).
    ToRequest(CommandToken),
}

/// An address handle for a worker, whose neighbour is to be resolved.
#[derive(Debug, Clone)]
pub struct AhRequest {
    /// Its number.
    pub ah: AhId,
    /// Its client.
    pub client: ClientId,
    /// The client's user (uid).
    pub user: u32,
    /// The device's place in the configuration.
    pub device: usize,
    /// Addresses and fields of the IP header; the source port is the queue pair's.
    pub path: DatagramPath,
    /// Number of the resolution.
    pub resolution: ResolutionId,
    /// Time after which the neighbour counts as absent.
    pub timeout: Duration,
    /// Comes back with the outcome.
    pub token: CommandToken,
}

/// A queue pair of datagrams that receives those to a multicast group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Membership {
    /// Its client.
    pub client: ClientId,
    /// The queue pair.
    pub qpn: Qpn,
    /// The device's place in the configuration.
    pub device: usize,
    /// The group.
    pub group: IpAddr,
}

/// Owner of the neighbours of answers that concern no client.
pub const NO_CLIENT: QuotaOwner = QuotaOwner {
    client: 0,
    user: u32::MAX,
};

/// A management datagram from queue pair 1 of a device to that of another host.
#[derive(Debug, Clone)]
pub struct MadToSend {
    /// The device's place in the configuration.
    pub device: usize,
    /// One of the device's addresses.
    pub local: IpAddr,
    /// Destination, of the same family.
    pub remote: IpAddr,
    /// Owner that an unresolved neighbour is charged to.
    pub owner: QuotaOwner,
    /// The MAD.
    pub bytes: [u8; MAD_LEN],
}

/// Control thread to worker. Executed in order.
pub enum Command {
    /// Records frames in these captures, and this trace, from now on.
    SetTaps(Option<FrameTaps>),
    /// Lets these faults of plans happen from now on, and no others.
    SetFaults(Arc<[ActiveFault]>),
    /// Does nothing for this time, as a fault plan says.
    Stall(Duration),
    /// Allows a client to have queue pairs in this worker.
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
    /// Removes a client and resets its connections. Its objects are removed a part at a time; barriers
    /// that follow for the client wait for the last one.
    RemoveClient {
        /// Its number.
        client: ClientId,
        /// Its streams linger until their posted requests are sent.
        lingers: bool,
    },
    /// Adds a completion queue that queue pairs of this worker complete to.
    AddCq(Box<WorkerCq>),
    /// Forgets a completion queue.
    RemoveCq {
        /// Its number.
        cq: CqId,
    },
    /// Directs completions to a new ring from now on.
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
    /// Adds a shared receive queue from which queue pairs of this worker take requests.
    AddSrq(Box<WorkerSrq>),
    /// Forgets a shared receive queue.
    RemoveSrq {
        /// Its number.
        srq: SrqId,
    },
    /// Reports that a resize appended a new ring to the old one.
    SettleSrq {
        /// The queue.
        srq: SrqId,
    },
    /// Connects a queue pair; answered with [`Event::Established`] or [`Event::ConnectFailed`].
    Connect {
        /// The queue pair.
        setup: Box<QpSetup>,
        /// Destination and options.
        params: Box<ConnectParams>,
    },
    /// Opens a connection in streaming mode; answered with [`Event::StreamAnswer`], then
    /// [`Event::StreamOpened`] or [`Event::RequestGone`].
    OpenStream(Box<StreamParams>),
    /// Executes a call on a connection in streaming mode; answered with [`Event::StreamAnswer`].
    CallStream {
        /// The connection.
        request: RequestId,
        /// Comes back with the answer.
        token: CommandToken,
        /// The call.
        call: StreamCall,
    },
    /// Turns a connection in streaming mode to RDMA, as the MPA initiator; answered like
    /// [`Command::Connect`].
    ConnectStream {
        /// The queue pair.
        setup: Box<QpSetup>,
        /// The connection.
        request: RequestId,
        /// Options; addresses and device are those of the connection.
        params: Box<ConnectParams>,
    },
    /// Closes a connection in streaming mode, or only its sending direction.
    EndStream {
        /// The connection.
        request: RequestId,
        /// By a reset.
        reset: bool,
        /// Only the sending direction.
        only_sending: bool,
    },
    /// Resolves the neighbour of a destination; answered as the request says.
    Resolve(Box<ResolutionRequest>),
    /// Ends a resolution, which is not answered any more.
    EndResolution {
        /// Its client.
        client: ClientId,
        /// Its number.
        resolution: ResolutionId,
    },
    /// Adds an address handle; answered with [`Event::AhResolved`].
    AddAh(Box<AhRequest>),
    /// Forgets an address handle.
    RemoveAh {
        /// Its number.
        ah: AhId,
    },
    /// Takes datagrams to addresses that the kernel has too, from now on.
    TakeSharedDatagrams {
        /// The device's place in the configuration.
        device: usize,
    },
    /// Installs a queue pair of datagrams.
    StartDatagrams {
        /// The queue pair.
        setup: Box<QpSetup>,
        /// The device's place in the configuration.
        device: usize,
        /// The Q_Key.
        qkey: u32,
    },
    /// Changes the Q_Key of a queue pair of datagrams.
    SetQkey {
        /// The queue pair.
        qpn: Qpn,
        /// The Q_Key.
        qkey: u32,
    },
    /// Receives datagrams to a multicast group, or does not any more. To all workers of the device.
    ChangeGroup {
        /// The device's place in the configuration.
        device: usize,
        /// The group.
        group: IpAddr,
        /// False to leave it.
        joins: bool,
    },
    /// Makes a queue pair of datagrams a member of a group, or ends that. To the worker of the queue pair.
    ChangeMembership {
        /// The queue pair and the group.
        membership: Membership,
        /// False to detach it.
        attaches: bool,
    },
    /// Sends a management datagram.
    SendMad(Box<MadToSend>),
    /// Accepts a connection for the application; answered like [`Command::Connect`].
    Accept {
        /// The queue pair that the connection is for.
        setup: Box<QpSetup>,
        /// The connection.
        request: RequestId,
        /// Private data of the MPA reply.
        private_data: Vec<u8>,
        /// Maximum concurrent inbound RDMA Reads.
        ird: u16,
        /// Maximum outstanding RDMA Reads.
        ord: u16,
    },
    /// Rejects a connection for the application.
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
        /// Connections begin in streaming mode.
        is_streaming: bool,
    },
    /// Ends a listener.
    Unlisten {
        /// Its number.
        listener: CmListenerId,
        /// Keeps connection requests that were reported to the application; otherwise they are reset.
        /// Connections without a request are reset in any case.
        keep_requests: bool,
    },
    /// Closes a queue pair's connection gracefully.
    Disconnect {
        /// The queue pair.
        qpn: Qpn,
        /// It ends in ERROR, not in IDLE.
        to_error: bool,
    },
    /// Installs a queue pair without a connection, whose queues are to be flushed.
    InstallQp {
        /// The queue pair.
        setup: Box<QpSetup>,
    },
    /// Moves a queue pair to another state, or only queries it; answered with [`Event::QpInfo`].
    Modify {
        /// The queue pair.
        qpn: Qpn,
        /// Target; `None` only queries.
        to: Option<ModifyTarget>,
        /// Comes back with the answer.
        token: CommandToken,
    },
    /// Removes a queue pair when its last bytes are acknowledged or a short grace period has passed;
    /// answered with [`Event::QpDestroyed`].
    DestroyQp {
        /// The queue pair.
        qpn: Qpn,
    },
    /// Removes a queue pair at once and resets its connection; answered with [`Event::QpDestroyed`].
    ResetQp {
        /// The queue pair.
        qpn: Qpn,
    },
    /// Answered with [`Event::BarrierReached`] when all earlier commands are done.
    Barrier {
        /// Comes back with the answer.
        token: CommandToken,
    },
    /// Answered with [`Event::BarrierReached`] when no port holds a frame that refers to memory of
    /// `regions`.
    AwaitFrames {
        /// Comes back with the answer.
        token: CommandToken,
        /// Memory that gets no new references: its keys or its queue pairs were removed.
        regions: Arc<[Arc<SharedMemory>]>,
        /// Workers that have not answered yet.
        unanswered: Arc<AtomicUsize>,
    },
    /// Replaces the kernel's routes through a device that is shared with it.
    LearnRoutes {
        /// The device's place in the configuration.
        device: usize,
        /// The routes.
        routes: Arc<siw_net::LearnedRoutes>,
    },
    /// Reports the kernel's state of a neighbour on a device that is shared with it.
    LearnNeighbour {
        /// The device's place in the configuration.
        device: usize,
        /// The neighbour.
        neighbour: KernelNeighbour,
    },
    /// Replaces the addresses of a device.
    SetAddresses {
        /// The device's place in the configuration.
        device: usize,
        /// The addresses, at least one.
        addresses: Arc<[IpCidr]>,
    },
    /// Forgets the neighbours of a device.
    FlushNeighbours {
        /// The device's place in the configuration.
        device: usize,
    },
    /// Describes some connections of queue pairs, answered with [`Event::Connections`].
    ListConnections {
        /// Comes back with the answer.
        token: CommandToken,
        /// First slot in the worker's table of queue pairs.
        from: u32,
        /// Only those of this user (uid).
        user: Option<u32>,
    },
    /// Counters as of now, answered with [`Event::Stats`].
    Stats {
        /// Comes back with the answer.
        token: CommandToken,
    },
    /// Adds a worker's part of a device.
    AddPort(Box<NewPort>),
    /// Removes a device: its connections end, and the worker gives its queues of the port back;
    /// answered with [`Event::PortRemoved`].
    RemovePort {
        /// The device's place in the configuration.
        device: usize,
    },
    /// Closes all connections and ends the thread.
    Stop,
}

/// Target of a state change that a consumer requests for a queue pair of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModifyTarget {
    /// From SQD back to RTS.
    ReadyToSend,
    /// SQD: no further send work request starts.
    SendQueueDrain {
        /// The client gets no event when the started ones are completed.
        is_quiet: bool,
    },
    /// Like a disconnect.
    Closing,
    /// A Terminate goes out, then the connection closes.
    Terminate,
    /// ERROR: everything is flushed, the connection is reset.
    Error,
    /// No other state: denies the peer this access from now on.
    DenyAccess(Access),
}

/// State and attributes of a queue pair, as reported by its worker.
#[derive(Debug, Clone)]
pub struct QpInfo {
    /// The state in the consumer's terms.
    pub state: siw_shm::control::QpState,
    /// In SQD: every work request that had started is complete.
    pub drained: bool,
    /// Maximum concurrent inbound RDMA Reads.
    pub ird: u16,
    /// Maximum outstanding RDMA Reads.
    pub ord: u16,
    /// Largest ULPDU of an FPDU as of now, bytes (RFC 5044 section 4.1).
    pub mulpdu: u16,
    /// Why the requested change was refused.
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

/// Why a connection set-up failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConnectFailure {
    /// The responder's application rejected the connection, with this private data.
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
    /// The client or its user exceeds a quota of a shared resource.
    OverQuota(String),
}

/// Why an address was not resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ResolutionFailure {
    /// No neighbour answered in time.
    TimedOut,
    /// The device was removed.
    NoDevice,
    /// TCP had no route, no port, or no room for another unresolved neighbour.
    Local(siw_tcp::StackError),
}

/// Why a connection ended otherwise than by an orderly close.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DisconnectReason {
    /// By RST.
    Reset,
    /// The peer stopped answering, or the close took too long.
    TimedOut,
    /// The peer reported an error, with its layer, type and code.
    TerminateReceived(siw_iwarp::TerminateCode),
    /// This side found an error.
    TerminateSent(siw_iwarp::TerminateCode),
}

/// Worker to control thread.
pub enum Event {
    /// Faults of plans have happened to frames.
    FaultsInjected {
        /// The faults, by connection.
        marks: Vec<FaultMark>,
    },
    /// A message of the service ID resolution has arrived.
    Sidr {
        /// The device's place in the configuration.
        device: usize,
        /// Address of the device that it was sent to.
        local: IpAddr,
        /// Its sender.
        remote: IpAddr,
        /// The message.
        message: Box<SidrMessage>,
    },
    /// A host has sent RC over RoCE to a queue pair.
    ReliableRocePeer {
        /// The queue pair.
        qpn: Qpn,
        /// The host.
        remote: IpAddr,
    },
    /// A peer requests a connection; the application answers with [`Command::Accept`] or
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
        /// The peer's IRD, if its request contains it (RFC 6581).
        peer_ird: Option<u16>,
        /// The peer's ORD, likewise.
        peer_ord: Option<u16>,
    },
    /// A connection request, or a connection in streaming mode, ended before the application answered.
    RequestGone {
        /// The connection.
        request: RequestId,
        /// Why.
        failure: ConnectFailure,
    },
    /// A connection is in streaming mode.
    StreamOpened {
        /// The connection.
        request: RequestId,
        /// The listener that it came to; 0 if this side opened it.
        listener: CmListenerId,
        /// This side's address and port.
        local: SocketAddr,
        /// The peer's.
        remote: SocketAddr,
    },
    /// A call on a connection in streaming mode that transferred nothing is to be repeated.
    StreamReady {
        /// The connection.
        request: RequestId,
    },
    /// The answer to [`Command::CallStream`] or [`Command::OpenStream`].
    StreamAnswer {
        /// Token of the command.
        token: CommandToken,
        /// The answer.
        answer: StreamAnswer,
    },
    /// A queue pair is in RTS.
    Established {
        /// The queue pair.
        qpn: Qpn,
        /// Parameters that MPA negotiated.
        negotiated: NegotiatedParameters,
        /// Private data of the MPA reply, at the initiator.
        private_data: Vec<u8>,
        /// This side's address and port.
        local: SocketAddr,
        /// The peer's.
        remote: SocketAddr,
    },
    /// A set-up failed.
    ConnectFailed {
        /// The queue pair.
        qpn: Qpn,
        /// Why.
        failure: ConnectFailure,
        /// State at the end.
        last: Option<Box<ConnectionSnapshot>>,
        /// The queue pair was moved to ERROR during the set-up, and the worker keeps it. Otherwise the
        /// worker has removed it, and has not read its rings.
        is_kept: bool,
    },
    /// A resolution ended.
    Resolved {
        /// Its client.
        client: ClientId,
        /// Its number.
        resolution: ResolutionId,
        /// The source address with its port, or why there is none.
        outcome: Result<SocketAddr, ResolutionFailure>,
    },
    /// The neighbour of an address handle has answered, or not.
    AhResolved {
        /// Token of the command.
        token: CommandToken,
        /// Why it is not resolved.
        failure: Option<ResolutionFailure>,
    },
    /// A connection ended.
    Disconnected {
        /// The queue pair.
        qpn: Qpn,
        /// Reason, if the close was not orderly.
        failure: Option<DisconnectReason>,
        /// The client has not polled all completions of its queues; [`Event::CompletionsPolled`]
        /// follows.
        has_unpolled: bool,
        /// State at the end.
        last: Option<Box<ConnectionSnapshot>>,
    },
    /// A connection request was refused without its application.
    RequestRefused {
        /// The listener that it came to.
        listener: CmListenerId,
        /// This side's address and port.
        local: SocketAddr,
        /// The peer's.
        remote: SocketAddr,
        /// Human-readable reason.
        reason: String,
    },
    /// The client has polled the completions from before the end of the connection, or the time for
    /// that is over.
    CompletionsPolled {
        /// The queue pair.
        qpn: Qpn,
    },
    /// The worker has removed the queue pair.
    QpDestroyed {
        /// The queue pair.
        qpn: Qpn,
        /// Memory windows that may be bound to the queue pair, named by the keys of their allocation.
        windows: Vec<Stag>,
    },
    /// A port still holds frames some time after [`Command::AwaitFrames`];
    /// [`Event::BarrierReached`] comes when it has released them.
    FramesHeld {
        /// Token of the command.
        token: CommandToken,
    },
    /// The answer to [`Command::Modify`].
    QpInfo {
        /// The queue pair.
        qpn: Qpn,
        /// Token of the command.
        token: CommandToken,
        /// Its state and attributes.
        info: Box<QpInfo>,
    },
    /// An asynchronous event of a queue pair (ibv_get_async_event(3)).
    Async {
        /// Client that gets the event.
        client: ClientId,
        /// The queue pair.
        qpn: Qpn,
        /// Kind of event.
        event: QpEvent,
    },
    /// A completion ring was full: the queue is broken.
    CqOverflow {
        /// Client that gets the event.
        client: ClientId,
        /// The queue.
        cq: CqId,
    },
    /// The requests in a shared receive queue fell below its limit.
    SrqLimit {
        /// Client that gets the event.
        client: ClientId,
        /// The queue.
        srq: SrqId,
    },
    /// The queue pair takes no more requests from its shared receive queue.
    LastWqe {
        /// Client that gets the event.
        client: ClientId,
        /// The queue pair.
        qpn: Qpn,
    },
    /// A work request could not be executed.
    BadRequest {
        /// Client that gets the event.
        client: ClientId,
        /// The queue pair.
        qpn: Qpn,
        /// Description of the error.
        reason: String,
    },
    /// A ring has contents that no client library writes; the client is closed.
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
        /// Token of the command.
        token: CommandToken,
    },
    /// The answer to [`Command::RemovePort`].
    PortRemoved {
        /// The device's place in the configuration.
        device: usize,
    },
    /// The answer to [`Command::ListConnections`].
    Connections {
        /// The worker.
        worker: usize,
        /// Token of the command.
        token: CommandToken,
        /// The connections.
        connections: Vec<ConnectionSnapshot>,
        /// Slot at which the list continues; `None` at its end.
        next: Option<u32>,
    },
    /// The answer to [`Command::Stats`].
    Stats {
        /// The worker.
        worker: usize,
        /// Token of the command.
        token: CommandToken,
        /// Its counters.
        stats: Box<WorkerStats>,
    },
    /// The worker's thread ends.
    Stopped {
        /// The worker.
        worker: usize,
    },
}

/// State of a queue pair and its connection, for status output.
pub struct ConnectionSnapshot {
    /// Slot in the worker's table of queue pairs.
    pub slot: u32,
    /// The queue pair.
    pub qpn: Qpn,
    /// The client that owns it.
    pub client: ClientId,
    /// The device's place in the configuration.
    pub device: usize,
    /// Phase of its life cycle.
    pub phase: &'static str,
    /// RDMAP and MPA.
    pub rdmap: siw_iwarp::QueuePairInfo,
    /// TCP, while there is a connection.
    pub tcp: Option<siw_tcp::TcpInfo>,
}

/// Counters of one worker's port of a device.
#[derive(Debug, Default, Clone)]
pub struct PortStats {
    /// The device's place in the configuration.
    pub device: usize,
    /// Frames from the port.
    pub frames_received: u64,
    /// Frames that the port accepted.
    pub frames_sent: u64,
    /// Frames copied into one segment because they had more segments than the port supports.
    pub frames_linearized: u64,
    /// Frames dropped because the port can never send them.
    pub frames_refused: u64,
    /// Frames lost on purpose.
    pub frames_lost: u64,
    /// Faults of plans.
    pub faults: WireFaultCounts,
    /// Frames that the kernel sent through the port.
    pub host_frames_sent: u64,
    /// Frames between port and kernel, in either direction, dropped for lack of room.
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
        self.frames_lost += other.frames_lost;
        self.faults.merge(&other.faults);
        self.host_frames_sent += other.host_frames_sent;
        self.host_frames_dropped += other.host_frames_dropped;
        self.tcp.merge(&other.tcp);
    }
}

/// Cache-line transfers between applications and a worker through the queues, counted per direction.
/// These are the transfers that the queues require; the CPUs may make more.
#[derive(Debug, Clone, Copy, Default)]
pub struct SharedLines {
    /// Request slots that the worker read.
    pub request_slots: u64,
    /// Reads of request rings, each of one or several requests: each transfers the words of the
    /// queue's header, one line in each direction.
    pub request_batches: u64,
    /// Doorbells that the worker took: the pending word is on the line of the queue's header.
    pub doorbells: u64,
    /// Entries that the worker wrote to completion queues.
    pub completions: u64,
}

/// Counters of one worker.
#[derive(Debug, Default, Clone)]
pub struct WorkerStats {
    /// Queue pairs in the worker.
    pub queue_pairs: usize,
    /// Batches that the worker ran.
    pub iterations: u64,
    /// Number of times the worker slept.
    pub sleeps: u64,
    /// Core that the worker runs on.
    pub core: usize,
    /// CPU time of the worker's thread, nanoseconds.
    pub cpu_ns: u64,
    /// Longest processor time of a batch since the start, nanoseconds.
    pub longest_batch_ns: u64,
    /// Cache-line transfers between applications and this worker.
    pub shared_lines: SharedLines,
    /// Frames from and to other workers.
    pub forward: crate::datapath::forward::ForwardStats,
    /// FPDUs placed while a gap in front of them was open.
    pub placed_out_of_order: u64,
    /// Messages that waited for a receive work request.
    pub receive_waits: u64,
    /// Messages that waited longer than `receive_wait_ms`.
    pub receive_wait_timeouts: u64,
    /// Lengths of the messages handed to TCP.
    pub messages: MessageLengths,
    /// Smoothed round-trip times, one for each burst with acknowledgements.
    pub round_trips: RoundTripTimes,
    /// Refused and lost connections by reason.
    pub drops: DropCounts,
    /// Counters of each device's port.
    pub devices: Vec<PortStats>,
    /// Free packet buffers.
    pub buffers_free: u32,
    /// Packet buffers of all workers.
    pub buffers: u32,
}
