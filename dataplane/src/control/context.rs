//! What all parts of the control thread use.

use super::devices::Devices;
use super::helpers::{DisposalQueue, Helpers};
use super::quotas::Quota;
use super::reports::HelperReport;
use super::resources::Resources;
use super::turn_times::TurnTimes;
use super::workers::WorkerSet;
use crate::ids::ClientId;

/// The clients' objects, and the ways to workers, helpers and devices. Each part of the control
/// thread has its own fields besides.
pub(super) struct Context {
    pub resources: Resources,
    pub workers: WorkerSet,
    pub helpers: Helpers,
    pub devices: Devices,
    pub times: TurnTimes,
}

impl Context {
    /// Updates a client's account to its current queue memory. Large freed regions are unmapped by
    /// a helper and stay charged until then.
    pub fn settle_account(&mut self, id: ClientId) {
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
}
