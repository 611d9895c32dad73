//! What clients hold: the resource tree (client > PD > MR, QP, SRQ; client > CQ, channel,
//! listener, arena). Dropping a client frees its subtree.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use nix::libc;
use siw_iwarp::QpInitAttr;
use siw_memory::Stag;
use siw_memory::queue_allocator::{QueueAllocator, QueueMemory};
use siw_shm::QpGeometry;
use siw_shm::control::{Addr, ControlSocket, QpState};
use siw_shm::shared_memory::{PageSize, SharedMemory};

use super::TOKEN_OUTBOX;
use super::listening::{ConnectRequests, Listeners};
use super::outbox::Outbox;
use super::pending::DeferredRequest;
use super::requests::Refusal;
use super::shared_receive::ClientSrq;
use crate::config::LimitsConfig;
use crate::ids::{
    ArenaId, ClientId, CmChannelId, CmListenerId, CommandToken, CompletionChannelId,
    ConnectRequestId, CqId, PdId, Qpn, SrqId,
};

/// Memory that the client may register.
pub struct ClientArena {
    pub region: Arc<SharedMemory>,
    /// Regions registered in it.
    pub mrs: u32,
    /// Known to DPDK for NICs that read it; none where no port needs that.
    #[allow(dead_code, reason = "held for its registration")]
    pub external: Option<dpdk::ExternalRegion>,
}

/// A memory region of a client.
pub struct MemoryRegion {
    pub pd: PdId,
    pub arena: ArenaId,
    /// Of a fast registration: where its client writes page lists.
    pub list: Option<QueueMemory>,
}

/// A memory window of a client.
pub struct MemoryWindow {
    pub pd: PdId,
}

/// A protection domain, and how many objects are in it.
pub struct ProtectionDomain {
    pub users: u32,
}

/// The writing end of a completion channel, and how many queues use it.
pub struct ClientChannel {
    pub writer: Arc<OwnedFd>,
    pub cqs: u32,
}

/// A completion queue: where its rings lie, and who uses it.
pub struct CompletionQueue {
    pub mem: QueueMemory,
    /// The rings from before a resize, until the client has emptied them.
    pub old: Option<QueueMemory>,
    /// Where its events go, if anywhere.
    pub channel: Option<CompletionChannelId>,
    pub qps: u32,
}

/// Where a queue pair is, as the control thread knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QpPhase {
    /// In no worker: created, or its connect failed.
    Detached,
    /// In a worker, connecting.
    Connecting,
    /// In a worker, connected or over.
    Attached,
}

/// A queue pair as the control thread knows it.
pub struct ClientQp {
    pub attr: QpInitAttr,
    pub geometry: QpGeometry,
    pub mem: QueueMemory,
    pub send_cq: CqId,
    pub recv_cq: CqId,
    /// Shared receive queue instead of its own.
    pub srq: Option<SrqId>,
    pub phase: QpPhase,
    pub worker: usize,
    pub cookie: u64,
    /// Where its connection's events go.
    pub cm_channel: Option<CmChannelId>,
    pub device: usize,
    pub state: QpState,
    pub ird: u16,
    pub ord: u16,
    pub local: Addr,
    pub peer: Addr,
}

/// One connected process.
pub struct Client {
    pub id: ClientId,
    pub pid: u32,
    pub name: String,
    pub conn: ControlSocket,
    pub greeted: bool,
    /// Asynchronous events.
    pub events: Option<Outbox>,
    pub doorbells: Option<Arc<SharedMemory>>,
    pub pds: HashMap<PdId, ProtectionDomain>,
    pub arenas: HashMap<ArenaId, ClientArena>,
    /// By the key of the registration.
    pub mrs: HashMap<Stag, MemoryRegion>,
    /// By the key of the allocation.
    pub mws: HashMap<Stag, MemoryWindow>,
    pub channels: HashMap<CompletionChannelId, ClientChannel>,
    pub cqs: HashMap<CqId, CompletionQueue>,
    pub srqs: HashMap<SrqId, ClientSrq>,
    pub qps: HashMap<Qpn, ClientQp>,
    /// Destroyed by a client that does not wait: their worker has not given them up yet.
    pub departing_qps: HashMap<Qpn, ClientQp>,
    pub cm_channels: HashMap<CmChannelId, Outbox>,
    pub queues: QueueAllocator,
    pub memory: u64,
    pub next_id: u32,
    pub(super) waiting: Option<DeferredRequest>,
    /// A request that came while another was under way.
    pub parked: Option<Vec<u8>>,
    /// Further requests wait in the socket, which is not watched, until those are answered.
    pub more_input: bool,
    pub keys_removed: bool,
    pub stats_text: String,
}

/// Queue memory of one client: what its limits could need, and no more than this.
const QUEUE_BYTES: usize = 16 << 30;

impl Client {
    /// A client that just connected.
    pub fn new(
        id: ClientId,
        pid: u32,
        conn: ControlSocket,
        pages: PageSize,
        limits: &LimitsConfig,
    ) -> Client {
        let queue_bytes = usize::try_from(limits.memory_per_client.0)
            .unwrap_or(QUEUE_BYTES)
            .min(QUEUE_BYTES);
        Client {
            id,
            pid,
            name: String::new(),
            conn,
            greeted: false,
            events: None,
            doorbells: None,
            pds: HashMap::new(),
            arenas: HashMap::new(),
            mrs: HashMap::new(),
            mws: HashMap::new(),
            channels: HashMap::new(),
            cqs: HashMap::new(),
            srqs: HashMap::new(),
            qps: HashMap::new(),
            departing_qps: HashMap::new(),
            cm_channels: HashMap::new(),
            queues: QueueAllocator::new(pages, queue_bytes, id.fault_owner()),
            memory: 0,
            next_id: 0,
            waiting: None,
            parked: None,
            more_input: false,
            keys_removed: false,
            stats_text: String::new(),
        }
    }

    /// A number for an object that only this client names.
    pub fn next_number(&mut self) -> u32 {
        self.next_id += 1;
        self.next_id
    }
}

/// A client that is gone, until no worker knows it any more.
pub struct DepartingClient {
    pub client: Client,
    pub token: CommandToken,
    /// Workers that have not passed the barrier yet.
    pub left: usize,
}

/// Numbers of objects that messages of the data path name: a number is used again only when many
/// others were freed after it.
#[derive(Default)]
pub struct NumberPool {
    last: u32,
    free: VecDeque<u32>,
}

/// Freed numbers that rest before the oldest of them is used again.
const RESTING_NUMBERS: usize = 1024;

impl NumberPool {
    /// A number from 1 on that no object has.
    pub fn allocate_number(&mut self) -> u32 {
        if self.free.len() > RESTING_NUMBERS
            && let Some(number) = self.free.pop_front()
        {
            return number;
        }
        self.last += 1;
        self.last
    }

    /// Gives the number of an object that is gone back.
    pub fn release_number(&mut self, number: u32) {
        self.free.push_back(number);
    }
}

/// Every object of every client, and the numbers that name them.
#[derive(Default)]
pub struct Resources {
    pub clients: HashMap<ClientId, Client>,
    pub departing: Vec<DepartingClient>,
    pub listeners: Listeners,
    pub requests: ConnectRequests,
    pub qpns: NumberPool,
    pub cqs: NumberPool,
    pub srqs: NumberPool,
    last_client: u32,
    last_pd: u32,
    last_listener: u32,
    last_request: u32,
    last_outbox: u32,
}

impl Resources {
    /// A connected client.
    ///
    /// # Errors
    /// The client is gone: the refusal reaches nobody.
    pub fn client_mut(&mut self, id: ClientId) -> Result<&mut Client, Refusal> {
        self.clients
            .get_mut(&id)
            .ok_or_else(|| Refusal::new(libc::ENOTCONN, "client is gone"))
    }

    /// The client that has, or just destroyed, a queue pair.
    pub fn owner_of_qp(&self, qpn: Qpn) -> Option<ClientId> {
        self.clients
            .iter()
            .find(|(_, client)| {
                client.qps.contains_key(&qpn) || client.departing_qps.contains_key(&qpn)
            })
            .map(|(id, _)| *id)
    }

    /// A client's queue pair.
    pub fn qp_mut(&mut self, id: ClientId, qpn: Qpn) -> Option<&mut ClientQp> {
        self.clients.get_mut(&id)?.qps.get_mut(&qpn)
    }

    /// An id for a client that connects.
    pub fn next_client_id(&mut self) -> ClientId {
        self.last_client += 1;
        ClientId(self.last_client)
    }

    /// An id for a protection domain.
    pub fn next_pd_id(&mut self) -> PdId {
        self.last_pd += 1;
        PdId(self.last_pd)
    }

    /// An id for a listener.
    pub fn next_listener_id(&mut self) -> CmListenerId {
        self.last_listener += 1;
        CmListenerId(self.last_listener)
    }

    /// The id of a connection request: never 0, which would mean none.
    pub fn next_request_id(&mut self) -> ConnectRequestId {
        self.last_request = self.last_request.wrapping_add(1).max(1);
        ConnectRequestId(self.last_request)
    }

    /// The token under which epoll reports a new outbox.
    pub fn next_outbox_token(&mut self) -> u64 {
        self.last_outbox += 1;
        TOKEN_OUTBOX | u64::from(self.last_outbox)
    }
}
