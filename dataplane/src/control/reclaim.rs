//! What may be freed only when no worker can touch it: memory regions, completion queues,
//! and everything of a client that is gone.

use super::{Control, Pending, Waiting};
use crate::ids::{ClientId, CommandToken};

impl Control {
    pub(super) fn waits_for_reclaim(&self) -> bool {
        self.dying.iter().any(|d| d.left == 0)
            || self.clients.values().any(|c| {
                c.waiting
                    .as_ref()
                    .is_some_and(|w| matches!(w.what, Pending::Quiet { .. }))
            })
    }

    /// Answers deregistrations and frees clients that no worker can touch any more.
    pub(super) fn reclaim(&mut self) {
        let waits = self.config.keys.try_reclaim();
        let quiet: Vec<ClientId> = self
            .clients
            .iter()
            .filter(|(_, c)| {
                matches!(&c.waiting, Some(Waiting { what: Pending::Quiet { ticket, .. }, .. })
                    if self.config.keys.has_elapsed(*ticket))
            })
            .map(|(id, _)| *id)
            .collect();
        for id in quiet {
            self.finish_quiet(id);
        }
        if self.dying.is_empty() {
            return;
        }
        for d in &mut self.dying {
            if d.left == 0 && !d.client.keys_removed {
                d.client.keys_removed = true;
                for key in d.client.mws.keys().chain(d.client.mrs.keys()) {
                    self.config.keys.remove(*key);
                }
            }
        }
        if waits == 0 && self.config.keys.try_reclaim() == 0 {
            let (done, wait): (Vec<_>, Vec<_>) = std::mem::take(&mut self.dying)
                .into_iter()
                .partition(|d| d.left == 0 && d.client.keys_removed);
            self.dying = wait;
            for d in done {
                for qpn in d.client.qps.keys().chain(d.client.dying_qps.keys()) {
                    self.qpns.give(qpn.0);
                }
                for cq in d.client.cqs.keys() {
                    self.cqs.give(cq.0);
                }
                for srq in d.client.srqs.keys() {
                    self.srqs.give(srq.0);
                }
            }
        }
    }

    pub(super) fn fenced(&mut self, token: CommandToken) {
        for d in &mut self.dying {
            if d.token == token {
                d.left = d.left.saturating_sub(1);
                return;
            }
        }
        let found = self
            .clients
            .iter_mut()
            .find_map(|(id, c)| match &mut c.waiting {
                Some(Waiting {
                    what:
                        Pending::FreeCq { token: t, left, .. }
                        | Pending::FreeSrq { token: t, left, .. }
                        | Pending::ResizeCq { token: t, left, .. },
                    ..
                }) if *t == token => {
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
