//! What the connection of a queue pair costs its client: its place among the connections, and the
//! descriptors that hold its local port against the kernel. `connections.rs` charges it, and it is
//! given back when the connection, or the queue pair, is gone.

use super::quotas::Quota;
use super::requests::Refusal;
use super::resources::{ClientQp, Resources};
use crate::host_ports::PortClaim;
use crate::ids::{ClientId, Qpn};

impl ClientQp {
    /// What its connection costs.
    pub fn connection_amounts(&self) -> [(Quota, u64); 2] {
        [
            (Quota::Connections, self.counts_as_connection.into()),
            (Quota::Descriptors, self.port_claim.descriptors()),
        ]
    }
}

impl Resources {
    /// Puts the connection that a queue pair is about to have on its client's account, with the local
    /// port that was claimed for it.
    ///
    /// # Errors
    /// A limit says no.
    pub fn count_connection(
        &mut self,
        id: ClientId,
        qpn: Qpn,
        port_claim: PortClaim,
    ) -> Result<(), Refusal> {
        let qp = self.qp_mut(id, qpn);
        let is_counted = qp.is_none_or(|qp| qp.counts_as_connection);
        let descriptors = port_claim.descriptors();
        self.charge(
            id,
            &[
                (Quota::Connections, (!is_counted).into()),
                (Quota::Descriptors, descriptors),
            ],
        )?;
        if let Some(qp) = self.qp_mut(id, qpn) {
            qp.counts_as_connection = true;
            qp.port_claim = port_claim;
        }
        Ok(())
    }

    /// A queue pair has no connection any more, and may get another one.
    pub fn forget_connection(&mut self, id: ClientId, qpn: Qpn) {
        let Some(qp) = self.qp_mut(id, qpn) else {
            return;
        };
        let amounts = qp.connection_amounts();
        qp.counts_as_connection = false;
        qp.port_claim = PortClaim::default();
        self.release(id, &amounts);
    }
}
