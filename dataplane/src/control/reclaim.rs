//! Reclaims objects that may be freed only after no worker can touch them: memory regions,
//! completion queues, and all objects of departed clients.

use super::ControlThread;
use super::helpers::{DisposalQueue, HelperReport, LONG_MEMORY};
use super::pending::{DeferredRequest, PendingReply};
use super::quotas::Quota;
use super::resources::{DepartingClient, DepartingEntry};
use crate::ids::{ClientId, CommandToken};

/// The objects of a client with fewer queue pairs than this are freed directly.
const FEW_QUEUE_PAIRS: u64 = 1024;
/// Keys and numbers of departed clients removed in one turn.
const ENTRIES_PER_TURN: usize = 512;

impl ControlThread {
    /// Returns true if there are keys or numbers to remove now.
    pub(super) fn has_entries_to_remove(&self) -> bool {
        let mut departing = self.resources.departing.iter();
        departing.any(|departing| departing.left == 0 && !departing.entries_removed)
    }

    pub(super) fn waits_for_reclaim(&self) -> bool {
        self.resources
            .departing
            .iter()
            .any(|departing| departing.left == 0)
            || self.resources.clients.values().any(|client| {
                client.waiting.as_ref().is_some_and(|waiting| {
                    matches!(&waiting.what, PendingReply::QuiescentKey { left, late, .. } if *left == late.len())
                })
            })
    }

    /// Answers deregistrations and frees departed clients that no worker can touch any more.
    pub(super) fn reclaim_objects(&mut self) {
        let waits = self.config.keys.try_reclaim();
        let quiet: Vec<ClientId> = self.resources.clients
            .iter()
            .filter(|(_, client)| {
                matches!(&client.waiting, Some(DeferredRequest { what: PendingReply::QuiescentKey { ticket, left, late, .. }, .. })
                    if *left == late.len() && self.config.keys.has_elapsed(*ticket))
            })
            .map(|(id, _)| *id)
            .collect();
        for id in quiet {
            self.finish_quiescent_key(id);
        }
        if self.resources.departing.is_empty() {
            return;
        }
        self.remove_entries();
        if waits == 0 && self.config.keys.try_reclaim() == 0 {
            let (done, wait): (Vec<_>, Vec<_>) = std::mem::take(&mut self.resources.departing)
                .into_iter()
                .partition(|departing| {
                    let is_quiet = departing.left == 0 && departing.entries_removed;
                    is_quiet && !departing.client.waits_for_helper()
                });
            self.resources.departing = wait;
            for departing in done {
                self.free_client(departing);
            }
        }
    }

    /// Removes keys and numbers of departed clients that no worker uses any more.
    fn remove_entries(&mut self) {
        let mut budget = ENTRIES_PER_TURN;
        for departing in &mut self.resources.departing {
            if departing.left > 0 {
                continue;
            }
            while budget > 0 && !departing.entries_removed {
                budget -= 1;
                match departing.entries.next() {
                    Some(DepartingEntry::Key(key)) => drop(self.config.keys.remove(key)),
                    Some(DepartingEntry::QueuePair(qpn)) => {
                        self.resources.qp_owners.remove(&qpn);
                        self.pairing.forget_attempt(qpn);
                        self.resources.qpns.release_number(qpn.0);
                    }
                    None => departing.entries_removed = true,
                }
            }
        }
    }

    /// Frees a departed client that no worker can touch any more: its numbers at once, and its
    /// memory when a helper has freed it.
    fn free_client(&mut self, departing: DepartingClient) {
        let client = departing.client;
        let resources = &mut self.resources;
        for cq in client.cqs.keys() {
            resources.cqs.release_number(cq.0);
        }
        for srq in client.srqs.keys() {
            resources.srqs.release_number(srq.0);
        }
        for pd in client.pds.keys() {
            resources.pds.release_number(pd.0);
        }
        let account = client.account.clone();
        let is_small = client.account.amount(Quota::Memory) <= LONG_MEMORY
            && client.account.amount(Quota::QueuePairs) < FEW_QUEUE_PAIRS
            // The last descriptor of a file frees all its pages, however little of it was mapped.
            && client.arenas.values().all(|arena| !arena.imported && arena.external.is_none());
        if is_small && !departing.slow_to_close {
            drop((client, departing.entries));
            resources.ledger.close(account);
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
                token: self.workers.next_token(),
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
        for departing in &mut self.resources.departing {
            if departing.token == token {
                departing.left = departing.left.saturating_sub(1);
                return;
            }
        }
        if self.on_held_released(token) {
            return;
        }
        self.forget_late_worker(worker, token);
        let found =
            self.resources
                .clients
                .iter_mut()
                .find_map(|(id, client)| match &mut client.waiting {
                    Some(DeferredRequest {
                        what:
                            PendingReply::FreeCq {
                                token: awaited,
                                left,
                                ..
                            }
                            | PendingReply::FreeSrq {
                                token: awaited,
                                left,
                                ..
                            }
                            | PendingReply::ResizeCq {
                                token: awaited,
                                left,
                                ..
                            }
                            | PendingReply::ResizeSrq {
                                token: awaited,
                                left,
                                ..
                            }
                            | PendingReply::QuiescentKey {
                                token: awaited,
                                left,
                                ..
                            },
                        ..
                    }) if *awaited == token => {
                        *left = left.saturating_sub(1);
                        Some((*id, *left))
                    }
                    _ => None,
                });
        if let Some((id, 0)) = found {
            self.finish_free_cq(id);
            self.finish_free_srq(id);
            self.finish_resize_srq(id);
            self.finish_resize_cq(id);
        }
    }
}
