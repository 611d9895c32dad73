//! What may be freed only when no worker can touch it: memory regions, completion queues,
//! and everything of a client that is gone.

use super::ControlThread;
use super::pending::{DeferredRequest, PendingReply};
use crate::ids::{ClientId, CommandToken};

impl ControlThread {
    pub(super) fn waits_for_reclaim(&self) -> bool {
        self.resources
            .departing
            .iter()
            .any(|departing| departing.left == 0)
            || self.resources.clients.values().any(|client| {
                client.waiting.as_ref().is_some_and(|waiting| {
                    matches!(waiting.what, PendingReply::QuiescentKey { .. })
                })
            })
    }

    /// Answers deregistrations and frees clients that no worker can touch any more.
    pub(super) fn reclaim_objects(&mut self) {
        let waits = self.config.keys.try_reclaim();
        let quiet: Vec<ClientId> = self.resources.clients
            .iter()
            .filter(|(_, client)| {
                matches!(&client.waiting, Some(DeferredRequest { what: PendingReply::QuiescentKey { ticket, .. }, .. })
                    if self.config.keys.has_elapsed(*ticket))
            })
            .map(|(id, _)| *id)
            .collect();
        for id in quiet {
            self.finish_quiescent_key(id);
        }
        if self.resources.departing.is_empty() {
            return;
        }
        for departing in &mut self.resources.departing {
            if departing.left == 0 && !departing.client.keys_removed {
                departing.client.keys_removed = true;
                for key in departing
                    .client
                    .mws
                    .keys()
                    .chain(departing.client.mrs.keys())
                {
                    self.config.keys.remove(*key);
                }
            }
        }
        if waits == 0 && self.config.keys.try_reclaim() == 0 {
            let (done, wait): (Vec<_>, Vec<_>) = std::mem::take(&mut self.resources.departing)
                .into_iter()
                .partition(|departing| departing.left == 0 && departing.client.keys_removed);
            self.resources.departing = wait;
            for departing in done {
                for qpn in departing
                    .client
                    .qps
                    .keys()
                    .chain(departing.client.departing_qps.keys())
                {
                    self.resources.qpns.release_number(qpn.0);
                }
                for cq in departing.client.cqs.keys() {
                    self.resources.cqs.release_number(cq.0);
                }
                for srq in departing.client.srqs.keys() {
                    self.resources.srqs.release_number(srq.0);
                }
            }
        }
    }

    pub(super) fn on_barrier_passed(&mut self, token: CommandToken) {
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
            self.finish_resize_cq(id);
        }
    }
}
