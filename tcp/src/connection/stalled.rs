//! Connections that got no answer in time, by the next hop of their path. They send again as soon as
//! that path changes (another Ethernet address of the neighbour, another route, a link that is up
//! again), and not at their next timeout, which backs off.
//!
//! A connection enters when a timeout expires and leaves when its path changes, so that a flood of
//! claims of a neighbour makes a connection send at most twice as often as its timeouts.

use core::net::IpAddr;
use std::collections::{BTreeMap, BTreeSet};

use crate::base::sequence::SeqNr;

/// The next hop of a connection; `None` if no route leads to its peer.
type Hop = Option<IpAddr>;

/// A connection whose path has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReleasedFlow {
    /// Its slot.
    pub index: u32,
    /// SND.UNA at its timeout.
    pub una: SeqNr,
    /// Its timeouts so far say nothing of the new path. Not after a claim of a neighbour, which may be
    /// forged and repeated.
    pub forgets_backoff: bool,
}

/// The stalled connections of a stack, by the index of their slot. Connections whose data was
/// acknowledged since stay until they are released, and are recognised by their SND.UNA.
#[derive(Default)]
pub(crate) struct StalledFlows {
    /// Next hop, and SND.UNA at the timeout.
    connections: BTreeMap<u32, (Hop, SeqNr)>,
    by_hop: BTreeSet<(Hop, u32)>,
    released: Vec<ReleasedFlow>,
}

impl StalledFlows {
    /// Adds the connection in slot `index`, or updates its entry.
    pub(crate) fn insert(&mut self, index: u32, hop: Hop, una: SeqNr) {
        let before = self.connections.insert(index, (hop, una));
        if let Some((former, _)) = before
            && former != hop
        {
            self.by_hop.remove(&(former, index));
        }
        self.by_hop.insert((hop, index));
    }

    /// Removes the connection in slot `index`, if it is stalled.
    pub(crate) fn remove(&mut self, index: u32) {
        if let Some((hop, _)) = self.connections.remove(&index) {
            self.by_hop.remove(&(hop, index));
        }
    }

    /// Releases the connections whose path begins with `hop`, after a claim of that neighbour.
    pub(crate) fn release_behind(&mut self, hop: Hop) {
        while let Some(&(first, index)) = self.by_hop.range((hop, 0)..).next()
            && first == hop
        {
            self.by_hop.remove(&(hop, index));
            let entry = self.connections.remove(&index);
            self.released.extend(entry.map(|(_, una)| ReleasedFlow {
                index,
                una,
                forgets_backoff: false,
            }));
        }
    }

    /// Releases all connections, after a change of routes, addresses or the link.
    pub(crate) fn release_all(&mut self) {
        self.by_hop.clear();
        let all = core::mem::take(&mut self.connections);
        let all = all.into_iter().map(|(index, (_, una))| ReleasedFlow {
            index,
            una,
            forgets_backoff: true,
        });
        self.released.extend(all);
    }

    /// Returns whether released connections have not been taken yet.
    #[inline]
    pub(crate) fn has_released(&self) -> bool {
        !self.released.is_empty()
    }

    /// Takes a released connection.
    #[inline]
    pub(crate) fn next_released(&mut self) -> Option<ReleasedFlow> {
        self.released.pop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_released_once_and_by_their_hop() {
        let hop = |last: u8| Some(IpAddr::from([10, 0, 0, last]));
        let mut stalled = StalledFlows::default();
        for index in 0..6 {
            stalled.insert(index, hop(index as u8 % 2), SeqNr(index));
        }
        stalled.insert(2, hop(1), SeqNr(20));
        stalled.remove(5);
        stalled.insert(7, None, SeqNr(7));
        let mut take_all = |release: &dyn Fn(&mut StalledFlows)| -> Vec<(u32, u32, bool)> {
            release(&mut stalled);
            let mut taken: Vec<_> = core::mem::take(&mut stalled.released)
                .into_iter()
                .map(|flow| (flow.index, flow.una.0, flow.forgets_backoff))
                .collect();
            taken.sort_unstable();
            taken
        };
        let behind = take_all(&|stalled| stalled.release_behind(hop(0)));
        assert_eq!(behind, [(0, 0, false), (4, 4, false)]);
        assert!(take_all(&|stalled| stalled.release_behind(hop(0))).is_empty());
        let all = take_all(&StalledFlows::release_all);
        assert_eq!(
            all,
            [(1, 1, true), (2, 20, true), (3, 3, true), (7, 7, true)]
        );
        assert!(stalled.by_hop.is_empty() && stalled.connections.is_empty());
    }
}
