//! Client resources: the resource tree (client > PD > MR, QP, SRQ; client > CQ, channel, listener,
//! arena). `memory/client_memory.rs` has the memory of a client. Dropping a client frees its subtree.
//!
//! Maps that clients fill are trees: a hash map moves all of its entries at once when it grows, which
//! takes tens of milliseconds with a million of them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use nix::libc;
use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use siw_host::ports::PortClaim;
use siw_iwarp::QpInitAttr;
use siw_memory::queue_allocator::{QueueAllocator, QueueMemory};
use siw_shm::control::messages as m;
use siw_shm::control::messages::{EVERY_DEVICE, KIND_CM_EVENT};
use siw_shm::control::{
    Addr, AsyncEventKind, CmEventKind, CmEventMessage, ControlSocket, FinalSend, QpState, codec,
    messages,
};
use siw_shm::shared_memory::{HUGE_PAGE, PageSize, SharedMemory};
use siw_shm::work_queue::state_offset;
use siw_shm::{Access, LowWaterMark, QpGeometry, RqConsumer, SqConsumer, SrqGeometry, SrqRing};

use crate::config::LimitsConfig;
use crate::control::account::quotas::{Account, Charge, Charged, Ledger, Quota, QuotaLimits};
use crate::control::client::outbox::{EventBudget, Outbox, TOKEN_OUTBOX};
use crate::control::client::peers::PeerCredentials;
use crate::control::connection::ends::ConnectionEnds;
use crate::control::connection::pair_schedule::{PairAttempt, PairSchedule};
use crate::control::memory::client_memory::ClientMemory;
use crate::control::operator::flight_recorder::{FlightRecorder, NewEvent, Owner};
use crate::control::operator::pieced_text::PiecedText;
use crate::control::request::deferred::DeferredRequest;
use crate::control::request::refusal::Refusal;
use crate::ids::{
    AhId, ClientId, CmChannelId, CompletionChannelId, CqId, PdId, Qpn, ResolutionId, SrqId,
};
use crate::worker::messages::{ConnectionSnapshot, DisconnectReason, QpSetup};

/// Write end of a completion channel, with the number of queues that use it.
pub struct ClientChannel {
    pub writer: Arc<OwnedFd>,
    pub cqs: u32,
}

/// A completion queue: its rings and its users.
pub struct CompletionQueue {
    pub mem: QueueMemory,
    /// Entries of each ring.
    pub entries: u32,
    /// Rings from before a resize, until the client has emptied them.
    pub old: Option<QueueMemory>,
    /// Channel for its events, if any.
    pub channel: Option<CompletionChannelId>,
    pub qps: u32,
}

/// A shared receive queue of a client.
pub struct ClientSrq {
    pub pd: PdId,
    pub qps: u32,
    /// Maximum number of requests that one queue pair may hold; 0: unlimited.
    pub share: u32,
    pub max_wr: u32,
    pub max_sge: u32,
    pub low: Arc<LowWaterMark>,
    /// Rings, newest last; the older ones may still be in use by a worker after a resize.
    pub rings: Vec<(Arc<SrqRing>, QueueMemory)>,
}

impl ClientSrq {
    /// Number of posted receive requests.
    pub fn posted_requests(&self) -> u32 {
        self.rings
            .first()
            .map_or(0, |(ring, _)| ring.count_posted())
    }

    /// Removes the rings that all workers have left; returns their memory.
    pub fn take_left_rings(&mut self) -> Vec<QueueMemory> {
        let mut left = Vec::new();
        // Oldest first: each ring holds its successor.
        while self.rings.len() > 1 && Arc::strong_count(&self.rings[0].0) == 1 {
            left.push(self.rings.remove(0).1);
        }
        left
    }

    /// Reply to the creation or a resize.
    pub fn to_reply(&self, srq: SrqId, geometry: SrqGeometry, mem: m::QueueRef) -> m::SrqReply {
        m::SrqReply {
            srq: srq.0,
            entries: geometry.entries,
            stride: geometry.stride,
            max_wr: self.max_wr,
            max_sge: self.max_sge,
            share: self.share,
            mem,
        }
    }
}

/// Phase of a queue pair: the owner of its rings, which is one worker or, in `Detached`, the control
/// thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QpPhase {
    /// Not in a worker: created, or its connect failed.
    Detached,
    /// In a worker, connecting.
    Connecting,
    /// In a worker, connected or disconnected.
    Attached,
    /// In a worker that was told to release it, for a reset or its destruction. It stays there until the
    /// worker says so, also if its set-up fails meanwhile.
    Leaving,
}

/// A queue pair.
pub struct ClientQp {
    pub attr: QpInitAttr,
    /// Number of connections of its worker on its device that it may not exceed: see
    /// [`Ledger::most_connections`].
    pub most_connections: usize,
    pub geometry: QpGeometry,
    pub mem: QueueMemory,
    pub send_cq: CqId,
    pub recv_cq: CqId,
    /// Shared receive queue, if it has no receive queue of its own.
    pub srq: Option<SrqId>,
    pub phase: QpPhase,
    pub worker: usize,
    pub cookie: u64,
    /// Channel for the events of its connection.
    pub cm_channel: Option<CmChannelId>,
    pub device: usize,
    pub state: QpState,
    pub ird: u16,
    pub ord: u16,
    pub local: Addr,
    pub peer: Addr,
    /// Attempt to connect it without rdma_cm.
    pub pair: Option<PairAttempt>,
    /// The consumer of the current connection wants messages to wait for receive work requests.
    pub waits_for_receives: bool,
    /// The SEND that ends it if its client departs; present if it is a stream.
    pub final_send: FinalSend,
    /// The flight recorder has its events.
    pub is_recorded: bool,
    /// Charge of its connection, with the claim of the local port that its client chose.
    pub connection: Option<Charged<PortClaim, 2>>,
    /// Datagrams are sent and received, or were before an error.
    pub is_of_datagrams: bool,
    /// The end of its connection is among [`Resources::ends`] already.
    pub end_is_recorded: bool,
    /// Reason of the end of its connection, while the report is held.
    pub held_disconnect: Option<Option<DisconnectReason>>,
}

/// An address resolution in progress.
pub struct ClientResolution {
    /// Worker that looks up the neighbour.
    pub worker: usize,
    /// Device of the destination.
    pub device: usize,
    /// Channel that gets the outcome.
    pub cm_channel: CmChannelId,
    /// Cookie of the outcome.
    pub cookie: u64,
    /// Destination.
    pub peer: Addr,
}

/// One connected process.
pub struct Client {
    pub id: ClientId,
    /// The process that connected.
    pub peer: PeerCredentials,
    pub name: String,
    pub conn: ControlSocket,
    pub greeted: bool,
    /// Optional features that both sides know.
    pub features: u32,
    /// The only device whose events it gets.
    pub watched_device: Option<usize>,
    /// Indices of the devices that it has queried.
    pub known_devices: BTreeSet<usize>,
    /// Resources held by the client, by quota.
    pub account: Account,
    /// Budget of queued events over all of the client's outboxes.
    pub events_waiting: EventBudget,
    /// Outbox for asynchronous events.
    pub events: Option<Outbox>,
    pub doorbells: Option<Charged<Arc<SharedMemory>>>,
    /// Protection domains, arenas, regions and windows.
    pub memory: ClientMemory,
    /// Number of descriptors received that were not memory.
    pub bad_imports: u32,
    pub channels: BTreeMap<CompletionChannelId, Charged<ClientChannel, 3>>,
    pub cqs: BTreeMap<CqId, Charged<CompletionQueue>>,
    pub srqs: BTreeMap<SrqId, Charged<ClientSrq>>,
    pub qps: BTreeMap<Qpn, Charged<ClientQp>>,
    /// Queue pairs destroyed without a reply, until their worker has released them.
    pub departing_qps: BTreeMap<Qpn, Charged<ClientQp>>,
    pub cm_channels: BTreeMap<CmChannelId, Charged<Outbox, 3>>,
    /// Address resolutions in progress.
    pub resolutions: BTreeMap<ResolutionId, Charged<ClientResolution>>,
    /// Address handles, which workers have.
    pub ahs: BTreeMap<AhId, Charged<()>>,
    /// Memberships of its queue pairs in multicast groups of devices.
    pub memberships: BTreeMap<(Qpn, usize, IpAddr), Charged<()>>,
    pub queues: QueueAllocator,
    next_id: u32,
    pub(super) waiting: Option<DeferredRequest>,
    /// Commands to workers that its requests caused since workers had executed all earlier ones.
    pub commands_in_flight: u64,
    /// Request that arrived while another one was in progress.
    pub parked: Option<Vec<u8>>,
    /// More requests are in the socket, which epoll does not watch until those in progress are
    /// answered.
    pub more_input: bool,
    /// The next request carries a descriptor and waits until earlier ones of its user are closed.
    pub awaits_room: bool,
    pub stats_text: PiecedText,
    /// Heap of the recordings of its queue pairs, in bytes.
    recorded_bytes: usize,
    /// Queue memory, and heap of what varies in length without a charge of its own.
    varying: Charge<4>,
    /// The connection to the control socket. Last: it is given back when all else is freed.
    #[allow(dead_code, reason = "held until the client is freed")]
    charge: Charge<3>,
}

/// Maximum queue memory of one client; less if its limits are lower.
const QUEUE_BYTES: usize = 16 << 30;
/// Amounts of [`Client::varying`].
const NOTHING_VARYING: [(Quota, u64); 4] = [
    (Quota::Heap, 0),
    (Quota::Memory, 0),
    (Quota::HugeMemory, 0),
    (Quota::Descriptors, 0),
];

impl Client {
    /// Creates a client that has just connected, with its account and the charge for that.
    pub fn new(
        id: ClientId,
        conn: ControlSocket,
        peer: PeerCredentials,
        (account, charge): (Account, Charge<3>),
        limits: &LimitsConfig,
    ) -> Client {
        let queue_bytes = usize::try_from(limits.memory_per_client.0)
            .unwrap_or(QUEUE_BYTES)
            .min(QUEUE_BYTES);
        Client {
            id,
            peer,
            name: String::new(),
            conn,
            greeted: false,
            features: 0,
            watched_device: None,
            known_devices: BTreeSet::new(),
            varying: account.hold(NOTHING_VARYING),
            charge,
            account,
            events_waiting: EventBudget::new(limits.events_per_client as usize),
            events: None,
            doorbells: None,
            memory: ClientMemory::new(id),
            bad_imports: 0,
            channels: BTreeMap::new(),
            cqs: BTreeMap::new(),
            srqs: BTreeMap::new(),
            qps: BTreeMap::new(),
            departing_qps: BTreeMap::new(),
            cm_channels: BTreeMap::new(),
            resolutions: BTreeMap::new(),
            ahs: BTreeMap::new(),
            memberships: BTreeMap::new(),
            queues: QueueAllocator::new(PageSize::Normal, queue_bytes, id.fault_owner()),
            next_id: 0,
            waiting: None,
            commands_in_flight: 0,
            parked: None,
            more_input: false,
            awaits_room: false,
            stats_text: PiecedText::default(),
            recorded_bytes: 0,
        }
    }

    /// Updates the account to the current queue memory, and to the heap of what varies in length
    /// without a charge of its own: queued events, extents of the next region, statistics, recordings.
    fn settle_account(&mut self) {
        let heap = self.events_waiting.waiting_bytes()
            + self.memory.heap_bytes()
            + self.stats_text.heap_bytes()
            + self.recorded_bytes
            + self.queues.heap_bytes();
        self.varying.set([
            (Quota::Heap, heap as u64),
            (Quota::Memory, self.queues.mapped_bytes() as u64),
            (Quota::HugeMemory, self.queues.huge_bytes() as u64),
            (Quota::Descriptors, self.queues.region_count() as u64),
        ]);
    }

    /// Returns true if a helper allocates or frees memory for the client: its account stays open
    /// until then.
    pub fn waits_for_helper(&self) -> bool {
        let waiting = self.waiting.as_ref();
        waiting.is_some_and(|waiting| waiting.what.awaits_helper())
    }

    /// The worker's ends of a queue pair's rings.
    pub fn worker_setup(&self, qpn: Qpn) -> Result<QpSetup, Refusal> {
        let qp = self
            .qps
            .get(&qpn)
            .ok_or_else(|| Refusal::no_such("queue pair", qpn.0))?;
        let (region, at) = (&qp.mem.region, qp.mem.offset);
        let state_at = at + state_offset(qp.geometry.rq_offset, qp.geometry.rq_slots);
        let sq = SqConsumer::new(region.clone(), at, qp.geometry.sq_slots)
            .and_then(|sq| sq.with_state_line(region.clone(), state_at))
            .map_err(Refusal::outside_memory)?;
        let rq = RqConsumer::new(
            region.clone(),
            at + qp.geometry.rq_offset,
            qp.geometry.rq_slots,
        )
        .map_err(Refusal::outside_memory)?;
        Ok(QpSetup {
            client: self.id,
            user: self.account.uid(),
            attr: qp.attr,
            sq,
            rq,
            send_cq: qp.send_cq,
            recv_cq: qp.recv_cq,
            srq: qp.srq,
            is_paired: qp.pair.is_some(),
            most_connections: qp.most_connections,
            waits_for_receives: qp.waits_for_receives || qp.pair.is_some(),
            final_send: qp.final_send,
            is_recorded: qp.is_recorded,
            srq_share: qp
                .srq
                .and_then(|srq| self.srqs.get(&srq))
                .map_or(0, |srq| srq.share),
        })
    }

    /// A queue pair that is about to connect, with events in this channel.
    pub fn detached_qp(
        &mut self,
        qpn: Qpn,
        cm_channel: CmChannelId,
    ) -> Result<&mut ClientQp, Refusal> {
        if !self.cm_channels.contains_key(&cm_channel) {
            return Err(Refusal::no_such("CM channel", cm_channel.0));
        }
        let qp = self
            .qps
            .get_mut(&qpn)
            .ok_or_else(|| Refusal::no_such("queue pair", qpn.0))?;
        if qp.phase != QpPhase::Detached {
            return Err(Refusal::new(
                libc::EISCONN,
                "the queue pair is or was connected; create a new one",
            ));
        }
        Ok(qp)
    }

    /// Allocates a client-local object number that no live object of the client has.
    pub fn next_number(&mut self) -> u32 {
        loop {
            self.next_id = self.next_id.wrapping_add(1).max(1);
            let number = self.next_id;
            let taken = self.memory.has_arena(number)
                || self.channels.contains_key(&CompletionChannelId(number))
                || self.cm_channels.contains_key(&CmChannelId(number))
                || self.resolutions.contains_key(&ResolutionId(number));
            if !taken {
                return number;
            }
        }
    }
}

/// Pool of object numbers that data-path messages carry: a freed number is reused only after many
/// others have been freed.
#[derive(Default)]
pub struct NumberPool {
    last: u32,
    free: VecDeque<u32>,
}

/// Minimum number of freed numbers before the oldest is reused.
const RESTING_NUMBERS: usize = 1024;

impl NumberPool {
    /// A pool of the numbers above `reserved`.
    fn after(reserved: u32) -> NumberPool {
        NumberPool {
            last: reserved,
            ..NumberPool::default()
        }
    }

    /// Allocates an unused number, starting at 1.
    ///
    /// # Errors
    /// All numbers are in use.
    pub fn allocate_number(&mut self) -> Result<u32, Refusal> {
        let all_used_once = self.last == u32::MAX - 1;
        if (all_used_once || self.free.len() > RESTING_NUMBERS)
            && let Some(number) = self.free.pop_front()
        {
            return Ok(number);
        }
        if all_used_once {
            return Err(Refusal::new(libc::ENOMEM, "all numbers are in use"));
        }
        self.last += 1;
        Ok(self.last)
    }

    /// Returns the number of a freed object to the pool.
    pub fn release_number(&mut self, number: u32) {
        self.free.push_back(number);
    }
}

/// All objects of all clients, and their number pools.
pub struct Resources {
    pub clients: BTreeMap<ClientId, Client>,
    /// Clients whose deferred request was answered: the loop reads their next ones.
    pub answered: Vec<ClientId>,
    /// Clients to close, and why: they broke the rules, or do not read their events.
    pub faulty: Vec<(ClientId, String)>,
    /// Numbers of queue pairs. InfiniBand gives 0 and 1 a meaning of their own.
    pub qpns: NumberPool,
    pub ahs: NumberPool,
    pub cqs: NumberPool,
    pub srqs: NumberPool,
    pub pds: NumberPool,
    pub ledger: Ledger,
    /// Owner of each queue pair, including those being destroyed.
    pub qp_owners: BTreeMap<Qpn, ClientId>,
    /// Owner of each outbox by epoll token, and its channel; `None` for asynchronous events.
    pub outboxes: BTreeMap<u64, (ClientId, Option<CmChannelId>)>,
    /// Latest ended connections.
    pub(super) ends: ConnectionEnds,
    /// Latest events of queue pairs.
    pub(super) recorder: FlightRecorder,
    /// Times of the attempts to connect queue pairs without rdma_cm.
    pub pair_times: PairSchedule,
    /// Number of members of each multicast group of a device.
    pub groups: BTreeMap<(usize, IpAddr), u32>,
    /// Limits of each client, as reported to its library.
    pub limits: LimitsConfig,
    /// Allocate queues and registered memory from hugepages while some are free.
    pub hugepages: bool,
    /// Watches the sockets of clients.
    pub epoll: Epoll,
    last_client: u64,
    last_outbox: u64,
}

impl Resources {
    /// Creates an empty tree with these limits.
    pub fn new(
        quotas: QuotaLimits,
        limits: LimitsConfig,
        hugepages: bool,
        epoll: Epoll,
    ) -> Resources {
        Resources {
            clients: BTreeMap::new(),
            answered: Vec::new(),
            faulty: Vec::new(),
            qpns: NumberPool::after(1),
            ahs: NumberPool::default(),
            cqs: NumberPool::default(),
            srqs: NumberPool::default(),
            pds: NumberPool::default(),
            ledger: Ledger::new(quotas),
            qp_owners: BTreeMap::new(),
            outboxes: BTreeMap::new(),
            ends: ConnectionEnds::default(),
            recorder: FlightRecorder::default(),
            pair_times: PairSchedule::default(),
            groups: BTreeMap::new(),
            limits,
            hugepages,
            epoll,
            last_client: 0,
            last_outbox: 0,
        }
    }

    /// Charges resources to a client before their allocation.
    ///
    /// # Errors
    /// A limit would be exceeded; nothing is charged then.
    pub fn charge<const N: usize>(
        &self,
        id: ClientId,
        amounts: [(Quota, u64); N],
    ) -> Result<Charge<N>, Refusal> {
        let client = self.clients.get(&id).ok_or_else(no_client)?;
        Ok(self.ledger.charge(&client.account, amounts)?)
    }

    /// Number of connections of a worker on a device beyond which the client gets none.
    ///
    /// # Errors
    /// The client has left.
    pub fn most_connections(&self, id: ClientId) -> Result<usize, Refusal> {
        let client = self.clients.get(&id).ok_or_else(no_client)?;
        Ok(self.ledger.most_connections(&client.account) as usize)
    }

    /// Page size for memory of a client: hugepages within the quota of its user.
    pub fn choose_pages(&self, id: ClientId, len: u64, huge: bool) -> PageSize {
        let may = self.clients.get(&id).is_some_and(|client| {
            let whole = len.next_multiple_of(HUGE_PAGE as u64);
            let held = self.ledger.check(&client.account, Quota::HugeMemory, whole);
            held.is_ok()
        });
        if huge && may {
            PageSize::TryHuge
        } else {
            PageSize::Normal
        }
    }

    /// Allocates `len` bytes of queue memory for a client, charges them, and makes the object in them, with
    /// its number. The memory is freed again if `make` fails.
    ///
    /// # Errors
    /// A limit would be exceeded, or the operating system has no memory; those of `make`.
    pub fn alloc_queue<T>(
        &mut self,
        id: ClientId,
        len: usize,
        make: impl FnOnce(&mut Resources, &QueueMemory) -> Result<T, Refusal>,
    ) -> Result<(QueueMemory, T), Refusal> {
        self.settle_account(id);
        let client = self.clients.get(&id).ok_or_else(no_client)?;
        let needed = client.queues.bytes_needed(len) as u64;
        if needed > 0 {
            self.ledger.check(&client.account, Quota::Memory, needed)?;
            self.ledger.check(&client.account, Quota::Descriptors, 1)?;
        }
        let pages = self.choose_pages(id, needed, self.hugepages);
        let client = self.clients.get_mut(&id).ok_or_else(no_client)?;
        client.queues.set_pages(pages);
        let mem = client.queues.alloc(len);
        self.settle_account(id);
        let mem = mem.map_err(|error| Refusal::new(libc::ENOMEM, error.to_string()))?;
        match make(self, &mem) {
            Ok(made) => Ok((mem, made)),
            Err(refusal) => {
                self.client_mut(id)?.queues.free(mem);
                Err(refusal)
            }
        }
    }

    /// Charges the connection that a queue pair is about to have to its client, and stores the
    /// claim of its local port.
    ///
    /// # Errors
    /// A limit is exceeded.
    pub fn count_connection(
        &mut self,
        id: ClientId,
        qpn: Qpn,
        port_claim: PortClaim,
    ) -> Result<(), Refusal> {
        let Some(client) = self.clients.get_mut(&id) else {
            return Ok(());
        };
        let Some(qp) = client.qps.get_mut(&qpn) else {
            return Ok(());
        };
        qp.connection = None;
        let amounts = [
            (Quota::Connections, 1),
            (Quota::Descriptors, port_claim.descriptors()),
        ];
        let charge = self.ledger.charge(&client.account, amounts)?;
        qp.most_connections = self.ledger.most_connections(&client.account) as usize;
        qp.connection = Some(charge.of(port_claim));
        Ok(())
    }

    /// Sends an asynchronous event to a client; a client that does not read its events loses it.
    pub fn post_async_event(
        &mut self,
        id: ClientId,
        kind: AsyncEventKind,
        object: u32,
        reason: &str,
    ) {
        let may_wait = self.may_queue_events(id);
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        let Some(outbox) = &mut client.events else {
            return;
        };
        let event = messages::AsyncEventMessage::new(kind, object, reason);
        let packet = codec::encode_event(messages::KIND_ASYNC_EVENT, &event);
        if kind == AsyncEventKind::DeviceFatal && object == EVERY_DEVICE {
            outbox.send_last_event(&self.epoll, packet);
        } else if !outbox.send_event(&self.epoll, packet, 0, may_wait) {
            tracing::debug!(client = id.0, "event lost: the client does not read events");
        }
        self.settle_account(id);
    }

    /// Sends an event of a connection or listener to its channel. A client that makes connections
    /// without reading their events is closed.
    pub fn post_cm_event(
        &mut self,
        id: ClientId,
        channel: Option<CmChannelId>,
        event: &CmEventMessage,
    ) {
        let may_wait = self.may_queue_events(id);
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        let Some(outbox) = channel.and_then(|channel| client.cm_channels.get_mut(&channel)) else {
            return;
        };
        let packet = codec::encode_event(KIND_CM_EVENT, event);
        // A network failure can end all connections at once, with one event each.
        let connections = client.account.amount(Quota::Connections) as usize;
        let has_room = outbox.send_event(&self.epoll, packet, connections, may_wait);
        self.settle_account(id);
        // Cancelled requests are caused by peers; the client learns of the cancellation when it
        // accepts.
        if !has_room && event.kind != CmEventKind::RequestCancelled as u32 {
            let limit = self.limits.events_per_client;
            let why = format!(
                "the client does not read its queued events, at most {limit}: see [limits] events_per_client and memory_per_client"
            );
            self.faulty.push((id, why));
        }
    }

    /// Sends queued events of the outbox with this epoll token.
    pub fn flush_outbox(&mut self, token: u64) {
        let Some((id, channel)) = self.outboxes.get(&token).copied() else {
            return;
        };
        let found = self.clients.get_mut(&id).and_then(|client| {
            channel.map_or(client.events.as_mut(), |channel| {
                let outbox = client.cm_channels.get_mut(&channel)?;
                Some(&mut **outbox)
            })
        });
        if let Some(outbox) = found {
            outbox.flush_backlog(&self.epoll);
        }
        self.settle_account(id);
    }

    /// Leaves further requests in the client's socket until [`Self::resume_input`].
    pub fn leave_input(&mut self, id: ClientId) {
        let client = self.clients.get_mut(&id);
        if let Some(client) = client.filter(|client| !client.more_input) {
            client.more_input = true;
            // Otherwise epoll would continuously report a peer that has closed its end.
            let once = EpollFlags::EPOLLONESHOT;
            let mut event = EpollEvent::new(once, id.0);
            let _ = self.epoll.modify(client.conn.as_fd(), &mut event);
        }
    }

    /// Reads further requests from the client's socket again.
    pub fn resume_input(&mut self, id: ClientId) {
        let client = self.clients.get_mut(&id);
        if let Some(client) = client.filter(|client| client.more_input) {
            client.more_input = false;
            let mut event = EpollEvent::new(EpollFlags::EPOLLIN, id.0);
            let _ = self.epoll.modify(client.conn.as_fd(), &mut event);
        }
    }

    /// Receives descriptors of a user again, after most of its earlier ones are closed.
    pub fn on_room(&mut self, uid: u32) {
        let clients = self.clients.values_mut();
        let waiting: Vec<ClientId> = clients
            .filter(|client| client.account.uid() == uid)
            .filter_map(|client| std::mem::take(&mut client.awaits_room).then_some(client.id))
            .collect();
        for id in waiting {
            self.resume_input(id);
        }
    }

    /// Frees a queue pair that no worker has.
    pub fn free_qp(&mut self, id: ClientId, qpn: Qpn) {
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        if let Some(qp) = client
            .qps
            .remove(&qpn)
            .or_else(|| client.departing_qps.remove(&qpn))
        {
            for cq in [qp.send_cq, qp.recv_cq] {
                if let Some(cq) = client.cqs.get_mut(&cq) {
                    cq.qps -= 1;
                }
            }
            client.memory.remove_pd_user(PdId(qp.attr.pd));
            if let Some(srq) = qp.srq.and_then(|srq| client.srqs.get_mut(&srq)) {
                srq.qps -= 1;
            }
            client.queues.free(qp.split().0.mem);
            self.forget_qp(qpn, "by its client");
        }
    }

    /// Begins to record the events of a new queue pair.
    pub fn begin_recording(&mut self, id: ClientId, qpn: Qpn) {
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        if self.limits.recorded_events > 0 {
            let owner = Owner {
                client: id,
                pid: client.peer.pid,
                user: client.account.uid(),
                name: client.name.as_str().into(),
            };
            client.recorded_bytes += self.recorder.begin(qpn, owner);
            if let Some(qp) = client.qps.get_mut(&qpn) {
                qp.is_recorded = true;
            }
        }
    }

    /// Records an event of a queue pair.
    pub fn record_event(&mut self, qpn: Qpn, event: &'static str, detail: Option<&str>) {
        let event = NewEvent {
            name: event,
            detail,
            refused: false,
        };
        self.add_to_recording(qpn, &event);
    }

    /// Records that a request to change a queue pair was refused.
    pub fn record_refusal(&mut self, qpn: Qpn, request: &'static str, reason: &str) {
        let event = NewEvent {
            name: request,
            detail: Some(reason),
            refused: true,
        };
        self.add_to_recording(qpn, &event);
    }

    fn add_to_recording(&mut self, qpn: Qpn, event: &NewEvent<'_>) {
        let most = self.limits.recorded_events as usize;
        let changed = self.recorder.record(qpn, most, event);
        self.charge_recording(changed);
    }

    /// Records that a fault plan has injected a fault into the connection of a queue pair `count` times.
    pub fn record_fault(&mut self, qpn: Qpn, fault: &Arc<str>, count: u64) {
        if self.limits.recorded_events == 0 {
            return;
        }
        if self.recorder.is_new_fault(qpn, fault) {
            self.record_event(qpn, "injected fault", Some(fault));
        }
        let changed = self.recorder.record_fault(qpn, fault, count);
        self.charge_recording(changed);
    }

    /// Keeps the state of a queue pair's connection at its end.
    pub fn record_connection(&mut self, qpn: Qpn, last: Option<Box<ConnectionSnapshot>>) {
        if let Some(last) = last {
            let changed = self.recorder.keep_connection(qpn, last);
            self.charge_recording(changed);
        }
    }

    fn charge_recording(&mut self, changed: Option<(ClientId, usize, usize)>) {
        if let Some((id, before, after)) = changed
            && let Some(client) = self.clients.get_mut(&id)
        {
            client.recorded_bytes = client.recorded_bytes + after - before;
        }
    }

    /// Removes a queue pair from the tables of all clients; its number may be reused. `reason`: why it is
    /// destroyed, for its recording.
    pub fn forget_qp(&mut self, qpn: Qpn, reason: &str) {
        let most = self.limits.recorded_events as usize;
        if let Some((id, bytes)) = self.recorder.end(qpn, most, reason)
            && let Some(client) = self.clients.get_mut(&id)
        {
            client.recorded_bytes -= bytes;
        }
        self.pair_times.remove(qpn);
        self.qpns.release_number(qpn.0);
        self.qp_owners.remove(&qpn);
    }

    /// Keeps a client from freeing pages of the queues of its earlier requests. A client maps new
    /// memory of queues before it sends another request, except one that may cross the reply.
    pub fn own_queues(&mut self, id: ClientId) -> std::io::Result<()> {
        let client = self.clients.get_mut(&id);
        client.map_or(Ok(()), |client| client.queues.own_regions())
    }

    /// Updates a client's account to what it holds without charges of their own.
    pub fn settle_account(&mut self, id: ClientId) {
        if let Some(client) = self.clients.get_mut(&id) {
            client.settle_account();
        }
    }

    /// Returns true if the limits leave room for events that the client does not read at once.
    pub fn may_queue_events(&self, id: ClientId) -> bool {
        let room = messages::MAX_PACKET as u64;
        self.clients.get(&id).is_some_and(|client| {
            self.ledger
                .check(&client.account, Quota::Heap, room)
                .is_ok()
        })
    }

    /// Looks up a connected client.
    ///
    /// # Errors
    /// The client is disconnected; the refusal is not sent.
    pub fn client_mut(&mut self, id: ClientId) -> Result<&mut Client, Refusal> {
        self.clients.get_mut(&id).ok_or_else(no_client)
    }

    /// Looks up a connected client, with the limits of all charges.
    ///
    /// # Errors
    /// The client is disconnected; the refusal is not sent.
    pub fn client_and_ledger(&mut self, id: ClientId) -> Result<(&mut Client, &Ledger), Refusal> {
        let client = self.clients.get_mut(&id).ok_or_else(no_client)?;
        Ok((client, &self.ledger))
    }

    /// Client that has a queue pair, or has just destroyed it.
    pub fn owner_of_qp(&self, qpn: Qpn) -> Option<ClientId> {
        let owner = self.qp_owners.get(&qpn).copied();
        owner.filter(|id| self.clients.contains_key(id))
    }

    /// A client's queue pair.
    pub fn qp_mut(&mut self, id: ClientId, qpn: Qpn) -> Option<&mut ClientQp> {
        let qp = self.clients.get_mut(&id)?.qps.get_mut(&qpn)?;
        Some(&mut **qp)
    }

    /// Allocates an id for a new client.
    pub fn next_client_id(&mut self) -> ClientId {
        self.last_client += 1;
        ClientId(self.last_client)
    }

    /// Registers a new outbox and returns its epoll token.
    pub fn next_outbox_token(&mut self, id: ClientId, channel: Option<CmChannelId>) -> u64 {
        self.last_outbox += 1;
        let token = TOKEN_OUTBOX | self.last_outbox;
        self.outboxes.insert(token, (id, channel));
        token
    }
}

/// Access rights that a client denies to the peer of a queue pair.
pub(super) fn denied_access(bits: u32) -> Result<Access, Refusal> {
    let denied = Access(bits);
    if !Access::REMOTE.contains(denied) {
        return Err(Refusal::new(
            libc::EINVAL,
            format!("access bits {bits:#x}: remote write, read and atomic can be denied"),
        ));
    }
    Ok(denied)
}

fn no_client() -> Refusal {
    Refusal::new(libc::ENOTCONN, "client is gone")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::account::quotas::channel_amounts;
    use crate::control::context::Context;
    use crate::control::context::tests::{new_client, resources};
    use crate::control::memory::alloc_pd;
    use crate::control::queues::completion_queues::create_cq;
    use crate::control::queues::queue_pairs::create_qp;
    use crate::control::queues::shared_receive::create_srq;

    #[test]
    fn numbers_of_objects_that_exist_are_not_given_again_after_a_wrap() {
        let mut pool = NumberPool {
            last: u32::MAX - 3,
            free: VecDeque::new(),
        };
        let first = pool.allocate_number().unwrap();
        let last = pool.allocate_number().unwrap();
        assert_eq!((first, last), (u32::MAX - 2, u32::MAX - 1));
        assert!(pool.allocate_number().is_err(), "nothing is free");
        pool.release_number(first);
        assert_eq!(pool.allocate_number().unwrap(), first);
        assert!(
            pool.allocate_number().is_err(),
            "and nothing is given twice"
        );
    }

    #[test]
    fn a_client_gives_its_own_objects_different_numbers() {
        let mut all = resources();
        let (mut client, _other) = new_client(&mut all);
        client.next_id = u32::MAX;
        let (read, _write) = nix::unistd::pipe().unwrap();
        let channel = ClientChannel {
            writer: Arc::new(read),
            cqs: 0,
        };
        let charge = client.account.hold(channel_amounts(0));
        let number = CompletionChannelId(1);
        client.channels.insert(number, charge.of(channel));
        assert_eq!(client.next_number(), 2);
        // Client ids do not wrap at 32 bits.
        all.last_client = u64::from(u32::MAX);
        assert_eq!(all.next_client_id(), ClientId(1 << 32));
    }

    /// Queues of a region of their own, which is unmapped when they are freed.
    #[test]
    fn queues_without_a_number_give_their_memory_back() {
        let mut context = Context::of_one_worker();
        let (client, _other) = new_client(&mut context.resources);
        let id = client.id;
        context.resources.clients.insert(id, client);
        alloc_pd(&mut context.resources, id, 0).unwrap();
        let cq = m::CreateCq {
            cqe: 64,
            channel: 0,
            cookie: 0,
        };
        create_cq(&mut context, id, 0, &cq).unwrap();
        let held = mapped_bytes(&context, id);
        let resources = &mut context.resources;
        for pool in [&mut resources.cqs, &mut resources.srqs, &mut resources.qpns] {
            pool.last = u32::MAX - 1;
        }

        let long_cq = m::CreateCq { cqe: 32_768, ..cq };
        assert!(create_cq(&mut context, id, 0, &long_cq).is_err());
        assert_eq!(mapped_bytes(&context, id), held, "completion queue");

        let srq = m::CreateSrq {
            pd: 1,
            max_wr: 8192,
            max_sge: 16,
            limit: 0,
            share: 0,
            reserved: 0,
        };
        assert!(create_srq(&mut context, id, 0, &srq).is_err());
        assert_eq!(mapped_bytes(&context, id), held, "shared receive queue");

        let qp = m::CreateQp {
            pd: 1,
            send_cq: 1,
            recv_cq: 1,
            max_send_wr: 8192,
            max_recv_wr: 8192,
            max_send_sge: 16,
            max_recv_sge: 16,
            max_inline: 0,
            sq_sig_all: 0,
            srq: 0,
            final_send: FinalSend::default(),
        };
        assert!(create_qp(&mut context.resources, id, 0, &qp).is_err());
        assert_eq!(mapped_bytes(&context, id), held, "queue pair");

        let client = &context.resources.clients[&id];
        assert_eq!(client.cqs[&CqId(1)].qps, 0);
        assert_eq!(client.memory.pds()[&PdId(1)].users, 0);
    }

    fn mapped_bytes(context: &Context, id: ClientId) -> usize {
        context.resources.clients[&id].queues.mapped_bytes()
    }
}
