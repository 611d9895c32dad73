//! What all parts of the control thread use.

use std::time::SystemTime;

use super::devices::Devices;
use super::ends::ConnectionEnd;
use super::helpers::{DisposalQueue, Helpers};
use super::quotas::Quota;
use super::resources::Resources;
use super::turn_times::TurnTimes;
use super::workers::WorkerSet;
use crate::ids::{ClientId, Qpn};

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
    /// Logs the end of a queue pair's connection, or of the attempt to make one, and keeps it for
    /// status output.
    pub fn record_end(&mut self, qpn: Qpn, was_established: bool, reason: Option<&str>) {
        let Some(id) = self.resources.owner_of_qp(qpn) else {
            return;
        };
        let Some(client) = self.resources.clients.get(&id) else {
            return;
        };
        let Some(qp) = client.qps.get(&qpn).filter(|qp| !qp.end_is_recorded) else {
            return;
        };
        let device = self.devices.views.get(qp.device);
        let device = device.map_or(String::new(), |device| device.name.clone());
        let end = ConnectionEnd {
            time: SystemTime::now(),
            qpn,
            client: id,
            pid: client.peer.pid,
            user: client.account.uid(),
            name: client.name.clone(),
            device,
            local: qp.local,
            peer: qp.peer,
            was_established,
            is_orderly: reason.is_none(),
            reason: reason.unwrap_or("one end closed the connection").to_owned(),
        };
        end.log();
        let resources = &mut self.resources;
        resources.record_event(qpn, end.event_name(), Some(&end.reason));
        self.resources.ends.record(end);
    }

    /// Updates a client's account to its current queue memory. Large freed regions are unmapped by
    /// a helper and stay charged until then.
    pub fn settle_account(&mut self, id: ClientId) {
        self.resources.settle_account(id);
        let Some(client) = self.resources.clients.get_mut(&id) else {
            return;
        };
        for region in client.queues.take_long_regions() {
            let amounts = [
                (Quota::Memory, region.len() as u64),
                (Quota::Descriptors, 1),
            ];
            let region = client.account.hold(amounts).of(region);
            let queue = DisposalQueue::Memory(client.account.uid());
            self.helpers.dispose(queue, Box::new(region), None);
        }
    }
}
