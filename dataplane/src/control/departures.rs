//! Departed clients, whose objects are freed after no worker can touch them: memory regions, queues,
//! and the entries in tables of all clients, a part in each turn.

use std::collections::btree_map;
use std::os::fd::AsFd;
use std::vec;

use siw_memory::{KeyTable, Retired, Stag};

use super::connections::Connections;
use super::context::Context;
use super::helpers::{DisposalQueue, LONG_MEMORY};
use super::memory::Memory;
use super::outbox::Outbox;
use super::peers::has_descriptors_waiting;
use super::pending::PendingReply;
use super::quotas::Quota;
use super::regions::MemoryRegion;
use super::reports::HelperReport;
use super::resources::{
    Client, ClientQp, ClientSrq, CompletionQueue, MemoryWindow, ProtectionDomain,
};
use super::turn_times::TurnBudget;
use crate::ids::{
    ClientId, CmChannelId, CmListenerId, CommandToken, ConnectRequestId, CqId, PdId, Qpn, SrqId,
};
use crate::worker::messages::Command;

/// The objects of a client with fewer queue pairs than this are freed directly.
const FEW_QUEUE_PAIRS: u64 = 1024;
/// The objects of a client with fewer descriptors than this are freed directly.
const FEW_DESCRIPTORS: u64 = 256;
/// Number of regions that wait until no worker can access them, above which no more of departed clients
/// are removed: deregistrations of other clients wait for those before them.
const MOST_WAITING_REGIONS: usize = 64;

/// A disconnected client, until no worker refers to it.
pub(super) struct DepartingClient {
    pub client: Client,
    pub token: CommandToken,
    /// Number of workers that have not passed the barrier yet.
    pub left: usize,
    /// Closing its socket may take as long as the client likes.
    pub slow_to_close: bool,
    /// Grace period of the last memory key that was removed.
    pub last_key: Option<Retired>,
    /// Its entries in tables of all clients that are not removed yet.
    pub entries: DepartingEntries,
}

/// Entries of a departed client in tables of all clients, which are removed a part at a time.
pub(super) struct DepartingEntries {
    requests: vec::IntoIter<ConnectRequestId>,
    listeners: vec::IntoIter<CmListenerId>,
    cm_channels: btree_map::IntoValues<CmChannelId, Outbox>,
    mws: btree_map::IntoKeys<Stag, MemoryWindow>,
    mrs: btree_map::IntoIter<Stag, MemoryRegion>,
    qps: btree_map::IntoIter<Qpn, ClientQp>,
    departing_qps: btree_map::IntoIter<Qpn, ClientQp>,
    cqs: btree_map::IntoIter<CqId, CompletionQueue>,
    srqs: btree_map::IntoIter<SrqId, ClientSrq>,
    pds: btree_map::IntoIter<PdId, ProtectionDomain>,
}

/// An entry of a table of all clients.
pub(super) enum DepartingEntry {
    Request(ConnectRequestId),
    Listener(CmListenerId),
    CmChannel(Outbox),
    Key(Stag),
    QueuePair(Qpn),
    CompletionQueue(CqId),
    SharedReceiveQueue(SrqId),
    ProtectionDomain(PdId),
}

impl DepartingEntries {
    /// Takes the entries of a client that is removed.
    fn take(connections: &Connections, client: &mut Client) -> DepartingEntries {
        let requests: Vec<_> = connections.requests.of_client(client.id).collect();
        let listeners: Vec<_> = connections.listeners.of_client(client.id).collect();
        DepartingEntries {
            requests: requests.into_iter(),
            listeners: listeners.into_iter(),
            cm_channels: std::mem::take(&mut client.cm_channels).into_values(),
            mws: std::mem::take(&mut client.mws).into_keys(),
            mrs: std::mem::take(&mut client.mrs).into_iter(),
            qps: std::mem::take(&mut client.qps).into_iter(),
            departing_qps: std::mem::take(&mut client.departing_qps).into_iter(),
            cqs: std::mem::take(&mut client.cqs).into_iter(),
            srqs: std::mem::take(&mut client.srqs).into_iter(),
            pds: std::mem::take(&mut client.pds).into_iter(),
        }
    }

    /// Next entry that no worker uses to reach the client's memory.
    pub fn next_connection(&mut self) -> Option<DepartingEntry> {
        let request = self.requests.next().map(DepartingEntry::Request);
        let listener = || self.listeners.next().map(DepartingEntry::Listener);
        let channel = || self.cm_channels.next().map(DepartingEntry::CmChannel);
        request.or_else(listener).or_else(channel)
    }

    /// Next entry that workers may use until they have passed the client's barrier.
    pub fn next_key(&mut self) -> Option<DepartingEntry> {
        let key = self.mws.next();
        if let Some(key) = key.or_else(|| Some(self.mrs.next()?.0)) {
            return Some(DepartingEntry::Key(key));
        }
        let qp = self.qps.next().or_else(|| self.departing_qps.next());
        qp.map(|(qpn, _)| DepartingEntry::QueuePair(qpn))
    }

    /// Next number that workers may find in a memory key until all keys are reclaimed.
    pub fn next_number(&mut self) -> Option<DepartingEntry> {
        if let Some((cq, _)) = self.cqs.next() {
            return Some(DepartingEntry::CompletionQueue(cq));
        }
        if let Some((srq, _)) = self.srqs.next() {
            return Some(DepartingEntry::SharedReceiveQueue(srq));
        }
        let pd = self.pds.next();
        pd.map(|(pd, _)| DepartingEntry::ProtectionDomain(pd))
    }

    /// Returns true if entries of [`Self::next_connection`] are left.
    pub fn has_connections(&self) -> bool {
        self.requests.len() + self.listeners.len() + self.cm_channels.len() > 0
    }

    /// Returns true if entries of [`Self::next_key`] are left.
    pub fn has_keys(&self) -> bool {
        self.mws.len() + self.mrs.len() + self.qps.len() + self.departing_qps.len() > 0
    }
}

/// All departed clients.
#[derive(Default)]
pub(super) struct Departures {
    clients: Vec<DepartingClient>,
}

impl Departures {
    /// Removes a client: its objects in the workers first, then its keys and memory.
    pub fn remove_client(
        &mut self,
        context: &mut Context,
        connections: &mut Connections,
        memory: &Memory,
        id: ClientId,
        why: &str,
    ) {
        let Some(mut client) = context.resources.clients.remove(&id) else {
            return;
        };
        tracing::debug!(
            client = id.0,
            pid = client.peer.pid,
            "client removed: it {why}"
        );
        let _ = context.resources.epoll.delete(client.conn.as_fd());
        if let Some(outbox) = &client.events {
            context.resources.outboxes.remove(&outbox.epoll_token());
        }
        let slow_to_close = has_descriptors_waiting(&client.conn);
        let mut entries = DepartingEntries::take(connections, &mut client);
        remove_connections(context, connections, &memory.keys, &mut entries);
        context
            .workers
            .post_to_all(|| Command::RemoveClient { client: id });
        let regions: Vec<_> = client
            .arenas
            .values()
            .map(|arena| &arena.region)
            .chain(client.held_memory.kept_regions())
            .cloned()
            .collect();
        // Its queue pairs are destroyed before this command: no new frame can refer to its memory.
        let (token, left) = if regions.is_empty() || !memory.sends_by_reference {
            context.workers.post_barrier(Some(id))
        } else {
            context.workers.await_frames(id, regions.into())
        };
        let waiting = client.waiting.as_ref().map(|waiting| &waiting.what);
        let last_key = match waiting {
            Some(PendingReply::QuiescentKey { ticket, .. }) => Some(*ticket),
            _ => None,
        };
        self.clients.push(DepartingClient {
            entries,
            last_key,
            client,
            token,
            left,
            slow_to_close,
        });
    }

    /// Returns true if there are entries of departed clients to remove now.
    pub fn has_entries_to_remove(&self) -> bool {
        let mut departing = self.clients.iter();
        departing.any(|departing| {
            let entries = &departing.entries;
            entries.has_connections() || (departing.left == 0 && entries.has_keys())
        })
    }

    /// Returns true if a client waits only for its memory keys.
    pub fn waits_for_keys(&self) -> bool {
        self.clients.iter().any(|departing| departing.left == 0)
    }

    /// Removes entries of departed clients, and frees those that no worker can touch any more.
    /// `waits`: number of memory regions that wait until no worker can access them.
    pub fn reclaim(
        &mut self,
        context: &mut Context,
        connections: &mut Connections,
        keys: &KeyTable,
        budget: &TurnBudget,
        waits: usize,
    ) {
        self.remove_entries(context, connections, keys, budget, waits);
        self.free_departed_clients(context, connections, keys, budget);
    }

    /// Counts a worker that has passed the barrier of a departed client.
    pub fn on_barrier(&mut self, token: CommandToken) {
        let mut all = self.clients.iter_mut();
        if let Some(departing) = all.find(|departing| departing.token == token) {
            departing.left = departing.left.saturating_sub(1);
        }
    }

    /// A helper has finished an order of a client that has departed.
    pub fn forget_helper(&mut self, id: ClientId, done: CommandToken) {
        let found = self.clients.iter_mut().find(|one| one.client.id == id);
        if let Some(departing) = found {
            departing.client.take_waiting(|what| match what {
                PendingReply::MakeArena { token, .. } | PendingReply::FreeArena { token }
                    if token == done =>
                {
                    Ok(())
                }
                other => Err(other),
            });
        }
    }

    /// Closes the sockets of all departed clients when the daemon ends.
    pub fn let_go(&mut self) {
        for departing in self.clients.drain(..) {
            leave_slow_socket(departing.client);
        }
    }

    /// Removes entries of departed clients from the tables of all clients. `waits`: number of regions
    /// that wait until no worker can access them.
    fn remove_entries(
        &mut self,
        context: &mut Context,
        connections: &mut Connections,
        keys: &KeyTable,
        budget: &TurnBudget,
        mut waits: usize,
    ) {
        for departing in &mut self.clients {
            while budget.has_time() {
                let entries = &mut departing.entries;
                let next = entries.next_connection().or_else(|| match departing.left {
                    0 if waits < MOST_WAITING_REGIONS => entries.next_key(),
                    _ => None,
                });
                let Some(entry) = next else {
                    break;
                };
                if let Some(removed) = remove_entry(context, connections, keys, entry) {
                    departing.last_key = Some(removed);
                    waits += 1;
                }
            }
        }
    }

    /// Frees departed clients that no worker can touch any more.
    fn free_departed_clients(
        &mut self,
        context: &mut Context,
        connections: &mut Connections,
        keys: &KeyTable,
        budget: &TurnBudget,
    ) {
        let mut place = 0;
        while let Some(departing) = self.clients.get_mut(place) {
            let entries = &mut departing.entries;
            let is_used = departing.left > 0 || entries.has_connections() || entries.has_keys();
            let has_key = |key: Retired| !keys.is_reclaimed(key);
            let is_used = is_used || departing.last_key.is_some_and(has_key);
            if is_used || departing.client.waits_for_helper() {
                place += 1;
                continue;
            }
            if !budget.has_time() {
                return;
            }
            if let Some(entry) = entries.next_number() {
                remove_entry(context, connections, keys, entry);
                continue;
            }
            let departing = self.clients.swap_remove(place);
            free_client(context, departing);
        }
    }
}

/// Removes requests, listeners and channels of a client that leaves: all of them, unless they are
/// many.
fn remove_connections(
    context: &mut Context,
    connections: &mut Connections,
    keys: &KeyTable,
    entries: &mut DepartingEntries,
) {
    let budget = TurnBudget::new();
    while budget.has_time()
        && let Some(entry) = entries.next_connection()
    {
        remove_entry(context, connections, keys, entry);
    }
}

/// Removes an entry; returns the grace period of a memory key.
fn remove_entry(
    context: &mut Context,
    connections: &mut Connections,
    keys: &KeyTable,
    entry: DepartingEntry,
) -> Option<Retired> {
    match entry {
        DepartingEntry::Request(number) => {
            let waiting = connections.requests.remove(number)?;
            connections.listeners.count_answered(waiting.listener);
            // A worker ends the requests of a listener together with it.
            if connections.listeners.get(waiting.listener).is_none() {
                let private_data = Vec::new();
                let request = waiting.request;
                let command = Command::Reject {
                    request,
                    private_data,
                };
                context.workers.post_command(request.worker(), command);
            }
        }
        DepartingEntry::Listener(listener) => {
            drop(connections.remove_listener(&context.workers, listener, false))
        }
        DepartingEntry::CmChannel(outbox) => {
            context.resources.outboxes.remove(&outbox.epoll_token());
        }
        DepartingEntry::Key(key) => return keys.remove(key),
        DepartingEntry::QueuePair(qpn) => {
            context.resources.forget_qp(qpn);
        }
        DepartingEntry::CompletionQueue(cq) => context.resources.cqs.release_number(cq.0),
        DepartingEntry::SharedReceiveQueue(srq) => context.resources.srqs.release_number(srq.0),
        DepartingEntry::ProtectionDomain(pd) => context.resources.pds.release_number(pd.0),
    }
    None
}

/// Frees the memory of a departed client that no worker can touch any more, or has a helper free
/// it.
fn free_client(context: &mut Context, departing: DepartingClient) {
    let client = departing.client;
    let account = client.account.clone();
    let is_small = client.account.amount(Quota::Memory) <= LONG_MEMORY
        && client.account.amount(Quota::QueuePairs) < FEW_QUEUE_PAIRS
        && client.account.amount(Quota::Descriptors) < FEW_DESCRIPTORS
        // The last descriptor of a file frees all its pages, however little of it was mapped.
        && client.arenas.values().all(|arena| !arena.imported && arena.external.is_none());
    if is_small && !departing.slow_to_close {
        drop((client, departing.entries));
        context.resources.ledger.close(account);
        return;
    }
    let queue = if departing.slow_to_close {
        DisposalQueue::Descriptors(account.uid())
    } else {
        DisposalQueue::Memory(account.uid())
    };
    let report = HelperReport::ClientGone { account };
    context
        .helpers
        .dispose(queue, Box::new((client, departing.entries)), Some(report));
}

/// Releases a client when the daemon ends. A socket with unread descriptors stays open until the
/// process exits: closing it could take as long as the client likes.
pub(super) fn leave_slow_socket(client: Client) {
    if has_descriptors_waiting(&client.conn) {
        std::mem::forget(client.conn);
    }
}
