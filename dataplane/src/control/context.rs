//! State that all parts of the control thread use.

use std::time::SystemTime;

use super::resources::Resources;
use crate::control::account::quotas::Quota;
use crate::control::connection::ends::ConnectionEnd;
use crate::control::device::devices::Devices;
use crate::control::threads::helpers::{DisposalQueue, Helpers};
use crate::control::threads::turn_times::TurnTimes;
use crate::control::threads::workers::WorkerSet;
use crate::ids::{ClientId, Qpn};

/// The clients' objects, and the interfaces to workers, helpers and devices. Each part of the control
/// thread has fields of its own in addition.
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
        let mut reason = reason.map(str::to_owned);
        if let Some(reason) = &mut reason
            && self.resources.recorder.has_faults(qpn)
        {
            reason.push_str(" (a fault plan injected faults into this connection)");
        }
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
            reason: reason.unwrap_or_else(|| "one end closed the connection".to_owned()),
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

#[cfg(test)]
pub(super) mod tests {
    use std::os::fd::OwnedFd;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use crossbeam::queue::ArrayQueue;
    use nix::sys::epoll::{Epoll, EpollCreateFlags};
    use nix::sys::eventfd::EventFd;
    use siw_shm::WorkerPage;
    use siw_shm::control::ControlSocket;

    use super::*;
    use crate::config::LimitsConfig;
    use crate::control::account::heap::heap_of_one;
    use crate::control::account::quotas::{HostCapacity, QuotaLimits};
    use crate::control::client::peers::PeerCredentials;
    use crate::control::resources::Client;
    use crate::control::threads::closer::Closer;
    use crate::datapath::inbox::WorkerInbox;
    use crate::worker::Mailbox;

    impl Context {
        /// A context of one worker that executes nothing, without devices.
        pub fn of_one_worker() -> Context {
            let event_descriptor = || -> OwnedFd { EventFd::new().unwrap().into() };
            let page = WorkerPage::create_sealed(2).unwrap();
            let flag = |number| Arc::new(page.sleep_flag(number).unwrap());
            let inbox = WorkerInbox::new(event_descriptor(), page.sleep_flag(0).unwrap());
            let mailbox = Mailbox {
                commands: ArrayQueue::new(64),
                events: ArrayQueue::new(64),
                has_ended: AtomicBool::new(false),
                inbox: Arc::new(inbox),
                control_wake: Arc::new(event_descriptor()),
                control_asleep: flag(1),
            };
            let wake = Arc::new(event_descriptor());
            let helpers = Helpers::start(wake, flag(1), Arc::new(|_| Ok(None)), Closer::start());
            Context {
                resources: resources(),
                workers: WorkerSet::new(Arc::new([Arc::new(mailbox)])),
                helpers: helpers.unwrap(),
                devices: Devices::new(Vec::new()),
                times: TurnTimes::default(),
            }
        }
    }

    /// Resources of a host with 1 GiB of memory.
    pub fn resources() -> Resources {
        let host = HostCapacity {
            memory: 1 << 30,
            hugepages: 0,
            descriptors: 1000,
            workers: 1,
            memory_keys: 1000,
            nic_arenas: None,
        };
        let limits = LimitsConfig::default();
        let quotas = QuotaLimits::new(&limits, &host, heap_of_one);
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
        Resources::new(quotas, limits, false, epoll)
    }

    /// A new client of these resources, with the other end of its socket. It is not in the tree.
    pub fn new_client(resources: &mut Resources) -> (Client, ControlSocket) {
        let (conn, other) = ControlSocket::new_pair().unwrap();
        let account = resources.ledger.open_account(1, false);
        let nothing = [Quota::Clients, Quota::Descriptors, Quota::Memory].map(|quota| (quota, 0));
        let charge = account.hold(nothing);
        let peer = PeerCredentials::of(&conn).unwrap();
        let id = resources.next_client_id();
        let client = Client::new(id, conn, peer, (account, charge), &LimitsConfig::default());
        (client, other)
    }
}
