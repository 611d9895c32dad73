//! Doorbells: clients name the queue pairs that they have posted to, so that no worker looks at all.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use siw_shm::DoorbellConsumer;

use super::Worker;
use crate::ids::{ClientId, Qpn};

/// Doorbells taken from one client in one batch; the rest wait, so that no client delays the others.
const DOORBELLS_PER_BATCH: usize = 64;

/// A client as one worker sees it.
pub(super) struct WorkerClient {
    pub(super) client: ClientId,
    pub(super) doorbells: DoorbellConsumer,
    /// Written by the client when the worker sleeps.
    pub(super) wake_fd: Arc<OwnedFd>,
}

impl Worker {
    /// Queue pairs whose doorbell was rung become ready. True when there were any.
    #[inline]
    pub(super) fn take_doorbells(&mut self) -> bool {
        let mut any = false;
        for index in 0..self.clients.len() {
            let client = self.clients[index].client;
            for _ in 0..DOORBELLS_PER_BATCH {
                let Some(qpn) = self.clients[index].doorbells.pop() else {
                    break;
                };
                any = true;
                let Some(slot) = self.queue_pairs.find(Qpn(qpn)) else {
                    continue;
                };
                // A client rings for its own queue pairs only, whatever number it writes.
                let queue_pair = self.queue_pairs.get_mut(slot);
                let Some(queue_pair) = queue_pair.filter(|found| found.client == client) else {
                    continue;
                };
                queue_pair.rings.sq.clear_pending();
                self.mark_ready(slot);
            }
        }
        any
    }
}
