//! Reclaims objects that may be freed only after no worker can touch them: memory regions,
//! completion queues, and all objects of departed clients.

use std::time::{Duration, Instant};

use siw_memory::Retired;

use super::ControlThread;
use super::helpers::{DisposalQueue, LONG_MEMORY};
use super::pending::PendingReply;
use super::quotas::Quota;
use super::reports::HelperReport;
use super::resources::{DepartingClient, DepartingEntries, DepartingEntry};
use crate::ids::{ClientId, CommandToken};
use crate::worker::messages::Command;

/// The objects of a client with fewer queue pairs than this are freed directly.
const FEW_QUEUE_PAIRS: u64 = 1024;
/// The objects of a client with fewer descriptors than this are freed directly.
const FEW_DESCRIPTORS: u64 = 256;
/// Regions freed at once: each may have thousands of extents.
const REGIONS_AT_ONCE: usize = 8;
/// Number of regions that wait until no worker can access them, above which no more of departed clients
/// are removed: deregistrations of other clients wait for those before them.
const MOST_WAITING_REGIONS: usize = 64;
/// Time spent in one turn on departed clients. Without it, one turn would end all clients that left
/// together, and all objects of a client.
const DEPARTURES_PER_TURN: Duration = Duration::from_micros(200);

/// Bounds work on departed clients.
struct TurnBudget {
    end: Instant,
}

impl TurnBudget {
    fn new() -> TurnBudget {
        TurnBudget {
            end: Instant::now() + DEPARTURES_PER_TURN,
        }
    }

    /// Returns true if more work may be done in this turn.
    fn has_time(&self) -> bool {
        Instant::now() < self.end
    }
}

impl ControlThread {
    /// Returns true if there are entries of departed clients to remove now.
    pub(super) fn has_entries_to_remove(&self) -> bool {
        let mut departing = self.resources.departing.iter();
        departing.any(|departing| {
            let entries = &departing.entries;
            entries.has_connections() || (departing.left == 0 && entries.has_keys())
        })
    }

    pub(super) fn waits_for_reclaim(&self) -> bool {
        let mut departing = self.resources.departing.iter();
        let mut awaiting = self.resources.awaiting_keys.iter();
        departing.any(|departing| departing.left == 0)
            || awaiting.any(|id| match self.awaited_key(*id) {
                Some(PendingReply::QuiescentKey { left, late, .. }) => *left == late.len(),
                _ => false,
            })
    }

    /// Reply of a client that waits until no worker uses a key.
    fn awaited_key(&self, id: ClientId) -> Option<&PendingReply> {
        let what = &self.resources.clients.get(&id)?.waiting.as_ref()?.what;
        matches!(what, PendingReply::QuiescentKey { .. }).then_some(what)
    }

    /// Answers deregistrations and frees departed clients that no worker can touch any more.
    pub(super) fn reclaim_objects(&mut self) {
        let budget = TurnBudget::new();
        let waits = self.reclaim_keys(&budget);
        let awaiting = std::mem::take(&mut self.resources.awaiting_keys);
        for id in awaiting {
            // The client may have left.
            if let Some(PendingReply::QuiescentKey {
                ticket, left, late, ..
            }) = self.awaited_key(id)
            {
                if *left == late.len() && self.config.keys.is_reclaimed(*ticket) {
                    self.finish_quiescent_key(id);
                    self.times.end_work("reclaim");
                } else {
                    self.resources.awaiting_keys.push(id);
                }
            }
        }
        if self.resources.departing.is_empty() {
            return;
        }
        self.remove_entries(&budget, waits);
        self.free_departed_clients(&budget);
    }

    /// Frees memory regions that no worker can access. Returns the number of those that wait.
    fn reclaim_keys(&self, budget: &TurnBudget) -> usize {
        loop {
            let (freed, left) = self.config.keys.reclaim_some(REGIONS_AT_ONCE);
            if freed == 0 || !budget.has_time() {
                return left;
            }
        }
    }

    /// Removes requests, listeners and channels of a client that leaves: all of them, unless they are
    /// many.
    pub(super) fn remove_connections(&mut self, entries: &mut DepartingEntries) {
        let budget = TurnBudget::new();
        while budget.has_time()
            && let Some(entry) = entries.next_connection()
        {
            self.remove_entry(entry);
        }
    }

    /// Removes entries of departed clients from the tables of all clients. `waits`: number of regions
    /// that wait until no worker can access them.
    fn remove_entries(&mut self, budget: &TurnBudget, mut waits: usize) {
        let mut departing = std::mem::take(&mut self.resources.departing);
        for departing in &mut departing {
            while budget.has_time() {
                let entries = &mut departing.entries;
                let next = entries.next_connection().or_else(|| match departing.left {
                    0 if waits < MOST_WAITING_REGIONS => entries.next_key(),
                    _ => None,
                });
                let Some(entry) = next else {
                    break;
                };
                if let Some(removed) = self.remove_entry(entry) {
                    departing.last_key = Some(removed);
                    waits += 1;
                }
            }
        }
        self.resources.departing = departing;
    }

    /// Removes an entry; returns the grace period of a memory key.
    fn remove_entry(&mut self, entry: DepartingEntry) -> Option<Retired> {
        let resources = &mut self.resources;
        match entry {
            DepartingEntry::Request(number) => {
                let waiting = resources.requests.remove(number)?;
                resources.listeners.count_answered(waiting.listener);
                // A worker ends the requests of a listener together with it.
                if resources.listeners.get(waiting.listener).is_none() {
                    let private_data = Vec::new();
                    let request = waiting.request;
                    let command = Command::Reject {
                        request,
                        private_data,
                    };
                    self.workers.post_command(request.worker(), command);
                }
            }
            DepartingEntry::Listener(listener) => drop(self.remove_listener(listener, false)),
            DepartingEntry::CmChannel(outbox) => {
                resources.outboxes.remove(&outbox.epoll_token());
            }
            DepartingEntry::Key(key) => return self.config.keys.remove(key),
            DepartingEntry::QueuePair(qpn) => {
                resources.qp_owners.remove(&qpn);
                self.pairing.forget_attempt(qpn);
                resources.qpns.release_number(qpn.0);
            }
            DepartingEntry::CompletionQueue(cq) => resources.cqs.release_number(cq.0),
            DepartingEntry::SharedReceiveQueue(srq) => resources.srqs.release_number(srq.0),
            DepartingEntry::ProtectionDomain(pd) => resources.pds.release_number(pd.0),
        }
        None
    }

    /// Frees departed clients that no worker can touch any more.
    fn free_departed_clients(&mut self, budget: &TurnBudget) {
        let mut place = 0;
        while let Some(departing) = self.resources.departing.get_mut(place) {
            let entries = &mut departing.entries;
            let is_used = departing.left > 0 || entries.has_connections() || entries.has_keys();
            let keys = &self.config.keys;
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
                self.remove_entry(entry);
                continue;
            }
            let departing = self.resources.departing.swap_remove(place);
            self.free_client(departing);
        }
    }

    /// Frees the memory of a departed client that no worker can touch any more, or has a helper free
    /// it.
    fn free_client(&mut self, departing: DepartingClient) {
        let client = departing.client;
        let account = client.account.clone();
        let is_small = client.account.amount(Quota::Memory) <= LONG_MEMORY
            && client.account.amount(Quota::QueuePairs) < FEW_QUEUE_PAIRS
            && client.account.amount(Quota::Descriptors) < FEW_DESCRIPTORS
            // The last descriptor of a file frees all its pages, however little of it was mapped.
            && client.arenas.values().all(|arena| !arena.imported && arena.external.is_none());
        if is_small && !departing.slow_to_close {
            drop((client, departing.entries));
            self.resources.ledger.close(account);
            return;
        }
        let queue = if departing.slow_to_close {
            DisposalQueue::Descriptors(account.uid())
        } else {
            DisposalQueue::Memory(account.uid())
        };
        let report = HelperReport::ClientGone { account };
        self.helpers
            .dispose(queue, Box::new((client, departing.entries)), Some(report));
    }

    /// Updates a client's account to its current queue memory. Large freed regions are unmapped by
    /// a helper and stay charged until then.
    pub(super) fn settle_account(&mut self, id: ClientId) {
        self.resources.settle_account(id);
        let Some(client) = self.resources.clients.get_mut(&id) else {
            return;
        };
        for region in client.queues.take_long_regions() {
            let amounts = vec![
                (Quota::Memory, region.len() as u64),
                (Quota::Descriptors, 1),
            ];
            for (quota, amount) in &amounts {
                let account = &mut client.account;
                self.resources.ledger.add(account, *quota, *amount);
            }
            let report = HelperReport::Released {
                client: id,
                token: self.workers.next_token(Some(id)),
                amounts,
            };
            let queue = DisposalQueue::Memory(client.account.uid());
            self.helpers.dispose(queue, Box::new(region), Some(report));
        }
    }

    /// Processes the helpers' reports.
    pub(super) fn take_helper_reports(&mut self) {
        while let Some(report) = self.helpers.next_report() {
            match report {
                HelperReport::MemoryMade {
                    client,
                    token,
                    made,
                } => self.finish_arena(client, token, made),
                HelperReport::HasRoom { uid } => self.on_room(uid),
                HelperReport::Link { device, report } => self.on_link_report(device, &report),
                HelperReport::ClientGone { account } => {
                    self.resources.ledger.close(account);
                }
                HelperReport::Released {
                    client,
                    token,
                    amounts,
                } => {
                    self.resources.release(client, &amounts);
                    self.resources.forget_helper(client, token);
                    self.finish_free_arena(client, token);
                }
            }
            self.times.end_work("report of a helper");
        }
    }

    pub(super) fn on_barrier_passed(&mut self, worker: usize, token: CommandToken) {
        if let Some(watchdog) = &mut self.watchdog
            && watchdog.on_barrier(token)
        {
            return;
        }
        let Some(id) = token.client else {
            return;
        };
        if !self.resources.clients.contains_key(&id) {
            let mut all = self.resources.departing.iter_mut();
            if let Some(departing) = all.find(|departing| departing.token == token) {
                departing.left = departing.left.saturating_sub(1);
            }
            return;
        }
        if self.on_held_released(token) {
            return;
        }
        self.forget_late_worker(worker, token);
        if self.resources.count_answer(id, token) == Some(0) {
            self.finish_free_cq(id);
            self.finish_free_srq(id);
            self.finish_resize_srq(id);
            self.finish_resize_cq(id);
        }
    }
}
