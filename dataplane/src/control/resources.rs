//! What a client holds: the resource tree (client > PD > MR, QP, SRQ; client > CQ, channel,
//! listener, arena). Dropping a client frees its subtree.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use siw_iwarp::QpInitAttr;
use siw_memory::Stag;
use siw_memory::queue_allocator::{QueueAllocator, QueueMemory};
use siw_shm::QpGeometry;
use siw_shm::control::{Addr, ControlSocket, QpState};
use siw_shm::shared_memory::{PageSize, SharedMemory};

use super::DeferredRequest;
use super::outbox::Outbox;
use super::shared_receive::ClientSrq;
use crate::config::LimitsConfig;
use crate::ids::{ArenaId, ClientId, CmChannelId, CompletionChannelId, CqId, PdId, Qpn, SrqId};

/// Memory that the client may register.
pub struct ClientArena {
    pub region: Arc<SharedMemory>,
    /// Regions registered in it.
    pub mrs: u32,
    /// Known to DPDK for NICs that read it; none where no port needs that.
    #[allow(dead_code, reason = "held for its registration")]
    pub external: Option<dpdk::ExternalRegion>,
}

pub struct MemoryRegion {
    pub pd: PdId,
    pub arena: ArenaId,
    /// Of a fast registration: where its client writes page lists.
    pub list: Option<QueueMemory>,
}

pub struct MemoryWindow {
    pub pd: PdId,
}

pub struct ProtectionDomain {
    pub users: u32,
}

pub struct CompletionChannel {
    pub writer: Arc<OwnedFd>,
    pub cqs: u32,
}

pub struct CompletionQueue {
    pub mem: QueueMemory,
    /// The rings from before a resize, until the client has emptied them.
    pub old: Option<QueueMemory>,
    /// Where its events go, if anywhere.
    pub channel: Option<CompletionChannelId>,
    pub qps: u32,
}

/// How far a queue pair is, as the control thread knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QpPhase {
    /// In no worker: created, or its connect failed.
    Detached,
    /// In a worker, connecting.
    Connecting,
    /// In a worker, connected or over.
    Attached,
}

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
    pub channels: HashMap<CompletionChannelId, CompletionChannel>,
    pub cqs: HashMap<CqId, CompletionQueue>,
    pub srqs: HashMap<SrqId, ClientSrq>,
    pub qps: HashMap<Qpn, ClientQp>,
    /// Destroyed without waiting: their worker has not let them go yet.
    pub departing_qps: HashMap<Qpn, ClientQp>,
    pub cm_channels: HashMap<CmChannelId, Outbox>,
    pub queues: QueueAllocator,
    pub memory: u64,
    pub next_id: u32,
    pub waiting: Option<DeferredRequest>,
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
            queues: QueueAllocator::new(pages, queue_bytes),
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
