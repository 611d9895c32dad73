//! Quota accounting of a queue pair's connection: its place among the connections, and the
//! descriptors that hold its local port in the kernel. `connections.rs` charges it; it is released
//! when the connection ends or the queue pair is destroyed.

use super::quotas::Quota;
use super::requests::Refusal;
use super::resources::{ClientQp, Resources};
use crate::host_ports::PortClaim;
use crate::ids::{ClientId, Qpn};

impl ClientQp {
    /// Quota amounts of this queue pair's connection.
    pub fn connection_amounts(&self) -> [(Quota, u64); 2] {
        [
            (Quota::Connections, self.counts_as_connection.into()),
            (Quota::Descriptors, self.port_claim.descriptors()),
        ]
    }
}

impl Resources {
    /// Charges the connection that a queue pair is about to have to its client, and stores the
    /// claim of its local port.
    ///
    /// # Errors
    /// A limit is exceeded.
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
        let client = self.clients.get(&id);
        let most = client.map_or(0, |client| self.ledger.most_connections(&client.account));
        if let Some(qp) = self.qp_mut(id, qpn) {
            qp.most_connections = most as usize;
            qp.counts_as_connection = true;
            qp.port_claim = port_claim;
        }
        Ok(())
    }

    /// Releases the charge of a queue pair's ended connection; the queue pair may connect again.
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
