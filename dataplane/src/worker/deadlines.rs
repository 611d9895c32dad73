//! Deadlines of connections that are being set up or closed. Data transfer has none here: its timers
//! are TCP's.

use std::collections::BTreeSet;

use siw_net::Instant;

use super::slots::{PendingSlot, QpSlot};
use crate::ids::{ClientId, ResolutionId};

/// Owner of a deadline. The owner's state gives the deadline its meaning and also holds it: an owner
/// has at most one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum DeadlineOwner {
    /// A queue pair, see `lifecycle.rs`.
    QueuePair(QpSlot),
    /// A connection that no queue pair has taken yet, see `pending_connections.rs`.
    Pending(PendingSlot),
    /// The next look at completions that preceded the end of a connection, see `lifecycle.rs`. The slot
    /// may belong to another queue pair by then.
    Polls(QpSlot),
    /// The next look at a neighbour, see `resolution.rs`. The resolution may have ended.
    Resolution(ClientId, ResolutionId),
    /// The next attempt to send MADs, see `mads.rs`.
    Mads,
}

/// The deadlines of one worker, earliest first. They are few at any time: only states of set-up and
/// close, and the watch of a silent peer, have one.
#[derive(Default)]
pub(super) struct Deadlines(BTreeSet<(Instant, DeadlineOwner)>);

impl Deadlines {
    pub(super) fn insert(&mut self, deadline: Instant, owner: DeadlineOwner) {
        self.0.insert((deadline, owner));
    }

    pub(super) fn remove(&mut self, deadline: Instant, owner: DeadlineOwner) {
        self.0.remove(&(deadline, owner));
    }

    #[inline]
    pub(super) fn earliest(&self) -> Option<Instant> {
        self.0.first().map(|(deadline, _)| *deadline)
    }

    /// Removes an expired deadline and returns its owner.
    #[inline]
    pub(super) fn pop_expired(&mut self, now: Instant) -> Option<DeadlineOwner> {
        if self.earliest()? > now {
            return None;
        }
        self.0.pop_first().map(|(_, owner)| owner)
    }
}

#[cfg(test)]
mod tests {
    use dpdk::Mempool;

    use super::*;
    use crate::datapath::batch_loop::BatchLoop;
    use crate::datapath::test_environment;
    use crate::worker::test_worker::new_worker;
    use crate::worker::thresholds::THRESHOLDS;

    #[test]
    fn deadlines_expire_in_order_and_not_before_their_time() {
        let (first, second) = (
            DeadlineOwner::QueuePair(QpSlot(1)),
            DeadlineOwner::Pending(PendingSlot(1)),
        );
        let mut deadlines = Deadlines::default();
        deadlines.insert(Instant(20), second);
        deadlines.insert(Instant(10), first);
        deadlines.insert(Instant(15), DeadlineOwner::QueuePair(QpSlot(2)));
        deadlines.remove(Instant(15), DeadlineOwner::QueuePair(QpSlot(2)));
        assert_eq!(deadlines.earliest(), Some(Instant(10)));
        assert_eq!(deadlines.pop_expired(Instant(9)), None);
        assert_eq!(deadlines.pop_expired(Instant(30)), Some(first));
        assert_eq!(deadlines.pop_expired(Instant(30)), Some(second));
        assert_eq!(deadlines.pop_expired(Instant(30)), None);
    }

    #[test]
    fn a_batch_handles_a_bounded_number_of_expired_deadlines() {
        const EXPIRED: usize = 1000;
        let pool = Mempool::new(test_environment(), "deadlines", 63, 0, 2048, None).unwrap();
        let mut worker = new_worker(&pool);
        let now = Instant::from_millis(1000);
        let later = Instant::from_millis(2000);
        let deadlines = &mut worker.connections.deadlines;
        for number in 0..EXPIRED as u32 {
            // The queue pairs are gone.
            deadlines.insert(now, DeadlineOwner::Polls(QpSlot(number)));
        }
        deadlines.insert(later, DeadlineOwner::Polls(QpSlot(0)));
        let mut left = EXPIRED + 1;
        while worker.connections.deadlines.earliest() == Some(now) {
            worker.run_batch(now);
            let now_left = worker.connections.deadlines.0.len();
            assert!(now_left < left && left - now_left <= THRESHOLDS.deadlines);
            left = now_left;
        }
        assert_eq!(left, 1);
    }
}
