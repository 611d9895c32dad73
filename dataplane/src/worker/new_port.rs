//! A worker's part of a device, built before the worker gets it: a stack's tables take a while to
//! allocate.

use std::sync::Arc;

use siw_iwarp::TxRecord;
use siw_net::Instant;

use super::listener_options::PortListeners;
use crate::datapath::inbox::{ProxyTx, WorkerInbox};
use crate::datapath::port::{WorkerPort, WorkerPortConfig};

/// A port for one worker, with its stack, and without listeners.
pub struct NewPort {
    pub(super) port: WorkerPort<TxRecord>,
    pub(super) listeners: PortListeners,
}

impl NewPort {
    /// Builds the port. `now`: of the workers' clock; `inboxes`: of all workers.
    ///
    /// # Errors
    /// The stack refuses its configuration, or the worker to send through does not exist.
    pub fn new(
        config: WorkerPortConfig,
        now: Instant,
        inboxes: &[Arc<WorkerInbox>],
    ) -> Result<NewPort, String> {
        let device = config.device;
        let proxy = |worker: usize| {
            let inbox = inboxes.get(worker)?.clone();
            Some(ProxyTx { device, inbox })
        };
        Ok(NewPort {
            listeners: PortListeners::new(&config),
            port: WorkerPort::new(config, now, proxy)?,
        })
    }
}
