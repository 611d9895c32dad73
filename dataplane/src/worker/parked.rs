//! Queue pairs whose work waits for something that raises no event. The worker looks at a bounded number
//! of them in each batch, in turn.
//!
//! | wait | until | called then |
//! |---|---|---|
//! | `Quiescence` | no other worker uses an invalidated key | `QueuePair::poll_quiescence` |
//! | `Receive` | the client posts a receive work request, which rings no doorbell | `QueuePair::receive_in_order` |

use std::collections::VecDeque;

use super::thresholds::THRESHOLDS;
use crate::ids::Qpn;

/// Reason of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    Quiescence,
    Receive,
}

/// The waits of one queue pair: its memberships in [`ParkedQueuePairs`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WaitSet(u8);

impl WaitSet {
    #[inline]
    fn bit(wait: Wait) -> u8 {
        1 << wait as u8
    }

    /// True while the queue pair has this wait.
    #[inline]
    pub(super) fn contains(self, wait: Wait) -> bool {
        self.0 & Self::bit(wait) != 0
    }

    /// Ends a wait. The caller has taken the queue pair from the list.
    #[inline]
    pub(super) fn end(&mut self, wait: Wait) {
        self.0 &= !Self::bit(wait);
    }
}

/// The parked queue pairs of a worker: one list for each reason, in the order of their turns. A queue
/// pair is in a list at most once; one that is removed meanwhile stays until its turn.
#[derive(Default)]
pub(super) struct ParkedQueuePairs {
    lists: [VecDeque<Qpn>; 2],
}

impl ParkedQueuePairs {
    /// Parks a queue pair, unless it has this wait already.
    #[inline]
    pub(super) fn park(&mut self, wait: Wait, qpn: Qpn, waits: &mut WaitSet) {
        if !waits.contains(wait) {
            waits.0 |= WaitSet::bit(wait);
            self.lists[wait as usize].push_back(qpn);
        }
    }

    /// True if no queue pair has this wait.
    #[inline]
    pub(super) fn is_empty(&self, wait: Wait) -> bool {
        self.lists[wait as usize].is_empty()
    }

    /// Number of turns in this batch: queue pairs parked meanwhile have theirs in the next one.
    pub(super) fn turns(&self, wait: Wait) -> usize {
        self.lists[wait as usize].len().min(THRESHOLDS.parked_looks)
    }

    /// Takes the queue pair whose turn is next. The caller ends its wait or parks it again.
    pub(super) fn pop(&mut self, wait: Wait) -> Option<Qpn> {
        self.lists[wait as usize].pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_pair_is_parked_once_for_each_reason() {
        let mut parked = ParkedQueuePairs::default();
        let mut waits = WaitSet::default();
        for _ in 0..2 {
            parked.park(Wait::Receive, Qpn(7), &mut waits);
            assert!(parked.is_empty(Wait::Quiescence));
        }
        parked.park(Wait::Quiescence, Qpn(7), &mut waits);
        assert_eq!(
            (parked.turns(Wait::Receive), parked.turns(Wait::Quiescence)),
            (1, 1)
        );
        assert_eq!(parked.pop(Wait::Receive), Some(Qpn(7)));
        waits.end(Wait::Receive);
        assert!(!waits.contains(Wait::Receive) && waits.contains(Wait::Quiescence));
        parked.park(Wait::Receive, Qpn(7), &mut waits);
        assert_eq!(parked.pop(Wait::Receive), Some(Qpn(7)));
        assert_eq!(parked.pop(Wait::Receive), None);
    }

    #[test]
    fn a_batch_looks_at_a_bounded_number_of_queue_pairs() {
        let mut parked = ParkedQueuePairs::default();
        for number in 0..1000 {
            parked.park(Wait::Receive, Qpn(number), &mut WaitSet::default());
            parked.park(Wait::Quiescence, Qpn(number), &mut WaitSet::default());
        }
        assert_eq!(parked.turns(Wait::Receive), THRESHOLDS.parked_looks);
        assert_eq!(parked.turns(Wait::Quiescence), THRESHOLDS.parked_looks);
    }
}
