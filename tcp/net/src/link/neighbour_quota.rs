//! Limits of the unresolved neighbours that one owner of connections may have requested, so that no
//! single owner fills the neighbour table. The table ([`super::neighbours`]) keeps its counts here.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::config::NeighbourConfig;
use crate::quota_owner::{OwnerScope, QuotaOwner};

/// Unresolved entries of the table by the owner that first requested them.
pub(super) struct UnresolvedCounts {
    of_clients: HashMap<QuotaOwner, usize>,
    of_users: HashMap<u32, usize>,
    max_per_client: usize,
    max_per_user: usize,
}

impl UnresolvedCounts {
    pub(super) fn new(config: &NeighbourConfig) -> Self {
        UnresolvedCounts {
            of_clients: HashMap::new(),
            of_users: HashMap::new(),
            max_per_client: config.max_unresolved_per_client,
            max_per_user: config.max_unresolved_per_user,
        }
    }

    /// Returns the scope and the value of the limit that one more entry would exceed.
    pub(super) fn exceeded_by(&self, owner: QuotaOwner) -> Option<(OwnerScope, usize)> {
        let of_client = self.of_clients.get(&owner).copied().unwrap_or(0);
        let of_user = self.of_users.get(&owner.user).copied().unwrap_or(0);
        if of_client >= self.max_per_client {
            Some((OwnerScope::Client, self.max_per_client))
        } else if of_user >= self.max_per_user {
            Some((OwnerScope::User, self.max_per_user))
        } else {
            None
        }
    }

    pub(super) fn add(&mut self, owner: QuotaOwner) {
        *self.of_clients.entry(owner).or_default() += 1;
        *self.of_users.entry(owner.user).or_default() += 1;
    }

    pub(super) fn remove(&mut self, owner: QuotaOwner) {
        take_one(self.of_clients.entry(owner));
        take_one(self.of_users.entry(owner.user));
    }
}

#[cfg(test)]
impl UnresolvedCounts {
    /// Returns the number of clients and users with a count.
    pub(super) fn owner_count(&self) -> usize {
        self.of_clients.len() + self.of_users.len()
    }
}

/// Decrements a count. Counts that reach 0 are removed, because clients come and go.
fn take_one<K>(entry: Entry<'_, K, usize>) {
    if let Entry::Occupied(mut count) = entry {
        *count.get_mut() = count.get().saturating_sub(1);
        if *count.get() == 0 {
            count.remove();
        }
    }
}
