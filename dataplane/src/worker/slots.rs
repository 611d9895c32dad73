//! Indices of a worker's tables.

/// Index of a queue pair in [`QpTable`](super::worker_qp::QpTable).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct QpSlot(pub(super) u32);

impl QpSlot {
    /// The first slot, whether or not it is vacant.
    pub(super) const FIRST: QpSlot = QpSlot(0);
}

/// Index of a connection in [`PendingConnections`](super::pending_connections::PendingConnections).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PendingSlot(pub(super) u32);

/// Index of a user in [`UserShares`](super::user_shares::UserShares).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct UserSlot(pub(super) u32);

impl UserSlot {
    /// Slot for a queue pair whose client is unknown.
    pub(super) const FIRST: UserSlot = UserSlot(0);
}
