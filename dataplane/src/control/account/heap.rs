//! The daemon's own memory (heap) for the objects of clients, by quota. It is charged to the client
//! with each unit, so that a client's account bounds all memory that the daemon allocates for it.
//! `dataplane/tests/daemon/heap_accounts.rs` measures the daemon against these figures.

use std::sync::Arc;

use siw_heap::ALLOCATION;
use siw_memory::RegisteredMemory;
use siw_shm::control::messages::MAX_PACKET;
use siw_shm::{SharedMemory, SrqRing};

use super::quotas::{ACCOUNT, Charge, Charged, Ledger, Quota};
use crate::control::client::outbox::Outbox;
use crate::control::connection::listening::ClientListener;
use crate::control::connection::pair_schedule::PairAttempt;
use crate::control::memory::arena_files::{ArenaFile, FileId};
use crate::control::memory::client_memory::{
    ClientArena, MemoryRegion, MemoryWindow, ProtectionDomain,
};
use crate::control::operator::flight_recorder::Recording;
use crate::control::resources::{Client, ClientQp, ClientSrq, CompletionQueue};
use crate::control::threads::helpers::Helpers;
use crate::ids::{AhId, ArenaId, ClientId, CmListenerId, CqId, PdId, Qpn, SrqId};
use crate::worker::completion_queues::WorkerCq;
use crate::worker::shared_receive_queues::WorkerSrq;

/// Worker's state of one client: doorbell ring, wake-up, and its places in lists.
const WORKER_CLIENT: usize = 1024;
/// Worker's state of one queue pair with its connection.
const WORKER_QP: usize = 6144;
/// Worker's state of one address handle, whose table doubles when it is full.
const WORKER_AH: usize = 256;
/// Worker's state of one listener.
const WORKER_LISTENER: usize = 512;

/// Heap of an entry of a map: the nodes of a tree are at least half full, and a hash map doubles when
/// seven eighths are full.
const fn map_entry<K, V>() -> usize {
    (size_of::<K>() + size_of::<V>() + 1) * 5 / 2
}

/// Heap of a separate allocation of `T`.
const fn boxed<T>() -> usize {
    size_of::<T>() * 5 / 4 + ALLOCATION
}

/// Heap of one unit of a quota in a daemon with this number of workers.
pub fn heap_of_one(quota: Quota, workers: u64) -> u64 {
    let workers = workers as usize;
    let bytes = match quota {
        Quota::Clients => {
            map_entry::<ClientId, Client>() + ACCOUNT + 2 * MAX_PACKET + workers * WORKER_CLIENT
        }
        Quota::QueuePairs => {
            map_entry::<Qpn, Charged<ClientQp>>()
                + map_entry::<Qpn, ClientId>()
                + map_entry::<Qpn, Recording>()
                + size_of::<PairAttempt>()
                + WORKER_QP
        }
        Quota::SharedReceiveQueues => {
            map_entry::<SrqId, Charged<ClientSrq>>()
                + boxed::<Arc<SrqRing>>()
                + workers * (boxed::<WorkerSrq>() + map_entry::<SrqId, WorkerSrq>())
        }
        Quota::CompletionQueues => {
            map_entry::<CqId, Charged<CompletionQueue>>()
                + workers * (boxed::<WorkerCq>() + map_entry::<CqId, WorkerCq>())
        }
        Quota::ProtectionDomains => map_entry::<PdId, Charged<ProtectionDomain>>() + ALLOCATION,
        Quota::AddressHandles => map_entry::<AhId, Charged<()>>() + workers * WORKER_AH,
        Quota::MemoryKeys => {
            boxed::<RegisteredMemory>()
                + map_entry::<PdId, Charged<MemoryRegion, 2>>()
                    .max(map_entry::<PdId, Charged<MemoryWindow, 2>>())
        }
        Quota::Descriptors => {
            boxed::<SharedMemory>()
                + map_entry::<ArenaId, Charged<ClientArena, 4>>()
                + map_entry::<FileId, ArenaFile>()
                + ALLOCATION
        }
        Quota::Listeners => {
            map_entry::<CmListenerId, ClientListener>()
                + boxed::<[Charge<2>; 4]>()
                + boxed::<[CmListenerId; 4]>()
                + map_entry::<CmListenerId, ()>()
                + workers * WORKER_LISTENER
        }
        Quota::EventChannels => {
            map_entry::<u64, Charged<Outbox, 3>>() + map_entry::<u64, (ClientId, u64)>()
        }
        // A charge of heap is a charge of memory, byte by byte.
        Quota::Heap => 1,
        Quota::Memory | Quota::HugeMemory | Quota::Connections | Quota::NicArenas => 0,
    };
    bytes as u64
}

/// Released heap after which a helper returns free memory to the operating system.
const HEAP_TO_RETURN: u64 = 2 << 20;

/// Has free heap returned to the operating system, so that the daemon's memory follows the accounts of
/// its clients.
#[derive(Default)]
pub(in crate::control) struct FreeHeap {
    /// [`Ledger::released_heap`] at the last order.
    ordered_at: u64,
    is_ordered: bool,
}

impl FreeHeap {
    /// Orders the return if enough heap was released.
    pub fn run(&mut self, ledger: &Ledger, helpers: &Helpers) {
        let released = ledger.released_heap();
        if !self.is_ordered && released - self.ordered_at >= HEAP_TO_RETURN {
            self.is_ordered = helpers.return_heap();
            self.ordered_at = released;
        }
    }

    /// The return that was ordered is done.
    pub fn on_returned(&mut self) {
        self.is_ordered = false;
    }
}
