//! Departed clients, whose objects are freed after no worker can touch them: memory regions, queues,
//! and the entries in tables of all clients, a part in each turn.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque, btree_map};
use std::os::fd::AsFd;
use std::vec;

use siw_memory::{KeyTable, Retired, Stag};

use super::client::outbox::Outbox;
use super::client::peers::has_descriptors_waiting;
use crate::control::account::quotas::{Charge, Charged, Quota};
use crate::control::connection::connections::Connections;
use crate::control::connection::listening::RequestMode;
use crate::control::connection::services::ServiceEntry;
use crate::control::context::Context;
use crate::control::memory::Memory;
use crate::control::memory::client_memory::MemoryEntries;
use crate::control::queues::groups;
use crate::control::request::deferred::Then;
use crate::control::resources::{Client, ClientQp, ClientSrq, CompletionQueue};
use crate::control::threads::helpers::{DisposalQueue, LONG_MEMORY};
use crate::control::threads::reports::HelperReport;
use crate::control::threads::turn_times::TurnBudget;
use crate::ids::{
    AhId, ClientId, CmChannelId, CmListenerId, CommandToken, ConnectRequestId, CqId, PdId, Qpn,
    SrqId,
};
use crate::worker::messages::Command;

/// The objects of a client with fewer descriptors than this are freed directly.
const FEW_DESCRIPTORS: u64 = 256;
/// Number of regions that wait until no worker can access them, above which no more of departed clients
/// are removed: deregistrations of other clients wait for those before them.
const MOST_WAITING_REGIONS: usize = 64;
/// Entries of a client that are removed before the turn of the next one.
const ENTRIES_AT_ONCE: usize = 32;
/// Clients whose grace period is checked in one turn.
const CHECKED_AT_ONCE: usize = 64;

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
    /// Charge of the removed memory keys, whose memory is in use until the last grace period ends.
    pub keys: Option<Charge<2>>,
    /// Why it has departed: it "closed its socket".
    pub why: String,
    /// Its entries in tables of all clients that are not removed yet.
    pub entries: DepartingEntries,
    /// The client waits for a worker or a helper, whose report brings it back to [`Departures::ready`].
    pub is_parked: bool,
}

/// Next step of the removal of a client.
enum Next {
    /// The removal of entries.
    Removal,
    /// The report of a worker or a helper.
    Report,
    /// The end of the grace period of its last memory key.
    GracePeriod,
    /// Nothing: it can be freed.
    Freeing,
}

impl DepartingClient {
    /// Removes some entries from the tables of all clients. `waits`: number of regions that wait until
    /// no worker can access them.
    fn remove_entries(
        &mut self,
        context: &mut Context,
        connections: &mut Connections,
        keys: &KeyTable,
        waits: &mut usize,
    ) {
        for _ in 0..ENTRIES_AT_ONCE {
            let Some(mut entry) = self.next_entry(keys, *waits) else {
                return;
            };
            if let DepartingEntry::Key(_, charge) = &mut entry
                && let Some(charge) = charge.take()
            {
                match &mut self.keys {
                    Some(keys) => keys.absorb(charge),
                    None => self.keys = Some(charge),
                }
            }
            let why = &self.why;
            if let Some(removed) = remove_entry(context, connections, keys, entry, why) {
                self.last_key = Some(removed);
                *waits += 1;
            }
        }
    }

    /// Takes the next entry that can be removed now.
    fn next_entry(&mut self, keys: &KeyTable, waits: usize) -> Option<DepartingEntry> {
        let connection = self.entries.next_connection();
        if connection.is_some() || self.left > 0 {
            return connection;
        }
        if self.entries.has_keys() {
            let has_room = waits < MOST_WAITING_REGIONS;
            return has_room.then(|| self.entries.next_key())?;
        }
        match self.next(keys) {
            Next::Removal => self.entries.next_number(),
            _ => None,
        }
    }

    fn next(&self, keys: &KeyTable) -> Next {
        let entries = &self.entries;
        if entries.has_connections() {
            Next::Removal
        } else if self.left > 0 {
            Next::Report
        } else if entries.has_keys() {
            Next::Removal
        } else if self.last_key.is_some_and(|key| !keys.is_reclaimed(key)) {
            Next::GracePeriod
        } else if self.client.waits_for_helper() {
            Next::Report
        } else if entries.has_numbers() {
            Next::Removal
        } else {
            Next::Freeing
        }
    }
}

/// Entries of a departed client in tables of all clients, which are removed a part at a time.
pub(super) struct DepartingEntries {
    requests: vec::IntoIter<ConnectRequestId>,
    listeners: vec::IntoIter<CmListenerId>,
    services: vec::IntoIter<ServiceEntry>,
    cm_channels: btree_map::IntoValues<CmChannelId, Charged<Outbox, 3>>,
    memory: MemoryEntries,
    qps: btree_map::IntoIter<Qpn, Charged<ClientQp>>,
    departing_qps: btree_map::IntoIter<Qpn, Charged<ClientQp>>,
    cqs: btree_map::IntoIter<CqId, Charged<CompletionQueue>>,
    srqs: btree_map::IntoIter<SrqId, Charged<ClientSrq>>,
    ahs: btree_map::IntoIter<AhId, Charged<()>>,
}

/// An entry of a table of all clients.
pub(super) enum DepartingEntry {
    Request(ConnectRequestId),
    Listener(CmListenerId),
    /// A request for a datagram service, of the client or to it.
    Service(ServiceEntry),
    CmChannel(Charged<Outbox, 3>),
    /// With its charge, which lasts longer.
    Key(Stag, Option<Charge<2>>),
    QueuePair(Qpn),
    CompletionQueue(CqId),
    SharedReceiveQueue(SrqId),
    AddressHandle(AhId),
    ProtectionDomain(PdId),
}

impl DepartingEntries {
    /// Takes the entries of a client that is removed.
    fn take(connections: &Connections, client: &mut Client) -> DepartingEntries {
        let requests: Vec<_> = connections.requests.of_client(client.id).collect();
        let listeners: Vec<_> = connections.listeners.of_client(client.id).collect();
        let services: Vec<_> = connections.services.of_client(client.id).collect();
        DepartingEntries {
            requests: requests.into_iter(),
            listeners: listeners.into_iter(),
            services: services.into_iter(),
            cm_channels: std::mem::take(&mut client.cm_channels).into_values(),
            memory: client.memory.take_entries(),
            qps: std::mem::take(&mut client.qps).into_iter(),
            departing_qps: std::mem::take(&mut client.departing_qps).into_iter(),
            cqs: std::mem::take(&mut client.cqs).into_iter(),
            srqs: std::mem::take(&mut client.srqs).into_iter(),
            ahs: std::mem::take(&mut client.ahs).into_iter(),
        }
    }

    /// Next entry that no worker uses to reach the client's memory.
    pub fn next_connection(&mut self) -> Option<DepartingEntry> {
        let request = self.requests.next().map(DepartingEntry::Request);
        let listener = || self.listeners.next().map(DepartingEntry::Listener);
        let service = || self.services.next().map(DepartingEntry::Service);
        let channel = || self.cm_channels.next().map(DepartingEntry::CmChannel);
        let entry = request.or_else(listener).or_else(service);
        entry.or_else(channel)
    }

    /// Next entry that workers may use until they have passed the client's barrier.
    pub fn next_key(&mut self) -> Option<DepartingEntry> {
        if let Some((key, charge)) = self.memory.next_key() {
            return Some(DepartingEntry::Key(key, Some(charge)));
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
        if let Some((ah, _)) = self.ahs.next() {
            return Some(DepartingEntry::AddressHandle(ah));
        }
        let pd = self.memory.next_pd();
        pd.map(DepartingEntry::ProtectionDomain)
    }

    /// Returns true if entries of [`Self::next_connection`] are left.
    pub fn has_connections(&self) -> bool {
        let of_services = self.services.len();
        self.requests.len() + self.listeners.len() + of_services + self.cm_channels.len() > 0
    }

    /// Returns true if entries of [`Self::next_key`] are left.
    pub fn has_keys(&self) -> bool {
        self.memory.has_keys() || self.qps.len() + self.departing_qps.len() > 0
    }

    /// Returns true if entries of [`Self::next_number`] are left.
    pub fn has_numbers(&self) -> bool {
        self.cqs.len() + self.srqs.len() + self.ahs.len() > 0 || self.memory.has_pds()
    }
}

/// All departed clients. A turn looks only at those that it can do something for: thousands may wait.
#[derive(Default)]
pub(super) struct Departures {
    /// Boxed: thousands may leave at once, and the map moves all of its values when it grows.
    clients: HashMap<ClientId, Box<DepartingClient>>,
    /// Clients with entries to remove, and clients that can be freed. They take turns.
    ready: VecDeque<ClientId>,
    /// Clients whose last key may still be used by a worker, the oldest key first.
    awaiting_keys: VecDeque<ClientId>,
}

impl Departures {
    /// Removes a client: its objects in the workers first, then its keys and memory. With `lingers`,
    /// both stay until its streams have sent their posted requests; until then they are charged to its
    /// account.
    pub fn remove_client(
        &mut self,
        context: &mut Context,
        connections: &mut Connections,
        memory: &Memory,
        id: ClientId,
        (why, lingers): (&str, bool),
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
        let memberships = std::mem::take(&mut client.memberships);
        groups::leave_of_client(context, memberships.into_keys());
        let mut entries = DepartingEntries::take(connections, &mut client);
        remove_connections(context, connections, &memory.keys, &mut entries, why);
        context.workers.post_to_all(|| Command::RemoveClient {
            client: id,
            lingers,
        });
        let regions = client.memory.shared_memory();
        // Its queue pairs are destroyed before this command: no new frame can refer to its memory.
        let (token, left) = if regions.is_empty() || !memory.sends_by_reference {
            context.workers.post_barrier(Some(id))
        } else {
            context.workers.await_frames(id, regions)
        };
        let waiting = client.waiting.as_ref().map(|waiting| &waiting.what.then);
        let last_key = match waiting {
            Some(Then::EndKey { ticket, .. }) => Some(*ticket),
            _ => None,
        };
        let departing = DepartingClient {
            entries,
            why: why.to_owned(),
            last_key,
            keys: None,
            client,
            token,
            left,
            slow_to_close,
            is_parked: false,
        };
        self.clients.insert(id, Box::new(departing));
        self.ready.push_back(id);
    }

    /// Returns true if there is work for [`Self::reclaim`] now.
    pub fn has_work(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Returns true if a client waits only for its memory keys.
    pub fn waits_for_keys(&self) -> bool {
        !self.awaiting_keys.is_empty()
    }

    /// Removes entries of departed clients, and frees those that no worker can touch any more. Each call
    /// does some work, also without time left.
    /// `waits`: number of memory regions that wait until no worker can access them.
    pub fn reclaim(
        &mut self,
        context: &mut Context,
        connections: &mut Connections,
        keys: &KeyTable,
        budget: &TurnBudget,
        mut waits: usize,
    ) {
        self.check_grace_periods(keys);
        while let Some(id) = self.ready.pop_front() {
            if let Entry::Occupied(mut found) = self.clients.entry(id) {
                let departing = found.get_mut();
                departing.remove_entries(context, connections, keys, &mut waits);
                match departing.next(keys) {
                    Next::Removal => self.ready.push_back(id),
                    Next::Report => departing.is_parked = true,
                    Next::GracePeriod => self.awaiting_keys.push_back(id),
                    Next::Freeing => free_client(context, *found.remove()),
                }
            }
            if waits >= MOST_WAITING_REGIONS || !budget.has_time() {
                return;
            }
        }
    }

    /// Counts a worker that has passed the barrier of a departed client.
    pub fn on_barrier(&mut self, token: CommandToken) {
        let departing = token.client.and_then(|id| self.clients.get_mut(&id));
        if let Some(departing) = departing.filter(|departing| departing.token == token) {
            departing.left = departing.left.saturating_sub(1);
            if departing.left == 0 && std::mem::take(&mut departing.is_parked) {
                self.ready.push_back(departing.client.id);
            }
        }
    }

    /// A helper has finished an order of a client that has departed.
    pub fn forget_helper(&mut self, id: ClientId, done: CommandToken) {
        let Some(departing) = self.clients.get_mut(&id) else {
            return;
        };
        let waiting = &mut departing.client.waiting;
        waiting.take_if(|waiting| waiting.what.token == done);
        if std::mem::take(&mut departing.is_parked) {
            self.ready.push_back(id);
        }
    }

    /// Closes the sockets of all departed clients when the daemon ends.
    pub fn let_go(&mut self) {
        for (_, departing) in self.clients.drain() {
            leave_slow_socket(departing.client);
        }
    }

    /// Makes clients ready whose last key is unused by all workers.
    fn check_grace_periods(&mut self, keys: &KeyTable) {
        for _ in 0..CHECKED_AT_ONCE {
            let Some(id) = self.awaiting_keys.front() else {
                return;
            };
            let waiting = self
                .clients
                .get(id)
                .and_then(|departing| departing.last_key);
            if waiting.is_some_and(|key| !keys.is_reclaimed(key)) {
                return;
            }
            self.ready.extend(self.awaiting_keys.pop_front());
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
    why: &str,
) {
    let budget = TurnBudget::new();
    while budget.has_time()
        && let Some(entry) = entries.next_connection()
    {
        remove_entry(context, connections, keys, entry, why);
    }
}

/// Removes an entry of a client that departs because it `why`; returns the grace period of a memory key.
fn remove_entry(
    context: &mut Context,
    connections: &mut Connections,
    keys: &KeyTable,
    entry: DepartingEntry,
    why: &str,
) -> Option<Retired> {
    match entry {
        DepartingEntry::Request(number) => {
            let waiting = connections.requests.remove(number)?;
            connections.listeners.count_answered(waiting.listener);
            // A worker ends the requests of a listener together with it.
            let is_requested = waiting.mode == RequestMode::Requested;
            if !is_requested || connections.listeners.get(waiting.listener).is_none() {
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
            drop(connections.remove_listener(context, listener, false))
        }
        DepartingEntry::Service(entry) => {
            let Connections {
                services,
                listeners,
                ..
            } = connections;
            services.remove_entry(context, listeners, entry);
        }
        DepartingEntry::CmChannel(outbox) => {
            context.resources.outboxes.remove(&outbox.epoll_token());
        }
        DepartingEntry::Key(key, _) => return keys.remove(key),
        DepartingEntry::QueuePair(qpn) => {
            let reason = format!("its client {why}");
            context.resources.forget_qp(qpn, &reason);
        }
        DepartingEntry::CompletionQueue(cq) => context.resources.cqs.release_number(cq.0),
        DepartingEntry::SharedReceiveQueue(srq) => context.resources.srqs.release_number(srq.0),
        DepartingEntry::AddressHandle(ah) => context.resources.ahs.release_number(ah.0),
        DepartingEntry::ProtectionDomain(pd) => context.resources.pds.release_number(pd.0),
    }
    None
}

/// Frees the memory of a departed client that no worker can touch any more, or has a helper free
/// it.
fn free_client(context: &mut Context, departing: DepartingClient) {
    let client = departing.client;
    let uid = client.account.uid();
    let is_small = client.account.amount(Quota::Memory) <= LONG_MEMORY
        && client.account.amount(Quota::Descriptors) < FEW_DESCRIPTORS
        && client.memory.is_freed_fast();
    if is_small && !departing.slow_to_close {
        drop((client, departing.entries));
        return;
    }
    let (queue, socket) = if departing.slow_to_close {
        let socket = client.conn.as_fd().try_clone_to_owned();
        (DisposalQueue::Descriptors(uid), socket.ok())
    } else {
        (DisposalQueue::Memory(uid), None)
    };
    let report = HelperReport::ClientGone;
    let what = Box::new((client, departing.entries));
    context
        .helpers
        .dispose_with_socket(queue, socket, what, Some(report));
}

/// Releases a client when the daemon ends. A socket with unread descriptors stays open until the
/// process exits: closing it could take as long as the client likes.
pub(super) fn leave_slow_socket(client: Client) {
    if has_descriptors_waiting(&client.conn) {
        std::mem::forget(client.conn);
    }
}
