//! Counts of finished work requests by kind: [`crate::Qp::start_counting`],
//! [`crate::Qp::finished`].

use crate::Opcode;
use std::collections::VecDeque;

/// Finished work requests of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Outcomes {
    /// Completed with success.
    pub succeeded: u64,
    /// Completed with an error, including flushed ones.
    pub failed: u64,
}

impl Outcomes {
    fn count(&mut self, has_failed: bool) {
        if has_failed {
            self.failed += 1;
        } else {
            self.succeeded += 1;
        }
    }
}

/// Work requests of a queue pair that have finished since [`crate::Qp::start_counting`], whether
/// signaled or not, and whether their completions have been polled or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Finished {
    /// SENDs of all kinds.
    pub sends: Outcomes,
    /// RDMA WRITEs, with and without immediate data.
    pub writes: Outcomes,
    /// RDMA READs.
    pub reads: Outcomes,
    /// Atomics, binds of memory windows and changes of keys.
    pub others: Outcomes,
    /// Receives, also from a shared receive queue.
    pub receives: Outcomes,
}

/// Number of requests that a queue has finished, and that of the successful ones before the first
/// failure; both modulo 2^32.
#[derive(Clone, Copy)]
pub(crate) struct Progress {
    pub done: u32,
    pub before_failure: Option<u32>,
}

impl Progress {
    /// True if request number `index` has failed.
    fn has_failed(self, index: u32) -> bool {
        self.before_failure
            .is_some_and(|before| index.wrapping_sub(before) as i32 >= 0)
    }
}

/// Counts of a send queue: kinds of the unfinished requests, and totals.
pub(crate) struct SendCounts {
    unfinished: VecDeque<Opcode>,
    done: u32,
    pub totals: Finished,
}

impl SendCounts {
    /// Starts at `done` finished requests, without an unfinished one.
    pub fn new(done: u32) -> Box<SendCounts> {
        Box::new(SendCounts {
            unfinished: VecDeque::new(),
            done,
            totals: Finished::default(),
        })
    }

    /// Adds a posted request, of at most `most` unfinished ones.
    pub fn push(&mut self, opcode: Opcode, most: u32, progress: impl FnOnce() -> Progress) {
        if self.unfinished.len() >= most as usize {
            self.advance(progress());
        }
        self.unfinished.push_back(opcode);
    }

    /// Removes the `count` requests posted last.
    pub fn withdraw(&mut self, count: u32) {
        let left = self.unfinished.len().saturating_sub(count as usize);
        self.unfinished.truncate(left);
    }

    /// Counts the requests that have finished meanwhile.
    pub fn advance(&mut self, progress: Progress) {
        // The daemon cannot have finished more requests than were posted.
        let news = progress.done.wrapping_sub(self.done) as usize;
        let news = news.min(self.unfinished.len());
        for opcode in self.unfinished.drain(..news) {
            let outcomes = match opcode {
                Opcode::Send | Opcode::SendWithImm | Opcode::SendWithInv => &mut self.totals.sends,
                Opcode::Write | Opcode::WriteWithImm => &mut self.totals.writes,
                Opcode::Read | Opcode::ReadWithInv => &mut self.totals.reads,
                _ => &mut self.totals.others,
            };
            outcomes.count(progress.has_failed(self.done));
            self.done = self.done.wrapping_add(1);
        }
    }

    /// Forgets the unfinished requests: the queue starts over.
    pub fn restart(mut self: Box<Self>) -> Box<Self> {
        self.unfinished.clear();
        self.done = 0;
        self
    }
}

/// Counts of a receive queue.
pub(crate) struct ReceiveCounts {
    done: u32,
    pub totals: Outcomes,
}

impl ReceiveCounts {
    /// Starts at `done` finished requests.
    pub fn new(done: u32) -> ReceiveCounts {
        ReceiveCounts {
            done,
            totals: Outcomes::default(),
        }
    }

    /// Counts the requests that have finished meanwhile.
    pub fn advance(&mut self, progress: Progress) {
        let news = progress.done.wrapping_sub(self.done);
        let succeeded = match progress.before_failure {
            Some(before) => {
                let before = before.wrapping_sub(self.done);
                // Negative: all of these have failed.
                if (before as i32) < 0 {
                    0
                } else {
                    before.min(news)
                }
            }
            None => news,
        };
        self.totals.succeeded += u64::from(succeeded);
        self.totals.failed += u64::from(news - succeeded);
        self.done = progress.done;
    }

    /// The queue starts over.
    pub fn restart(self) -> Self {
        ReceiveCounts { done: 0, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(done: u32, before_failure: Option<u32>) -> Progress {
        Progress {
            done,
            before_failure,
        }
    }

    #[test]
    fn requests_count_by_kind_and_outcome_across_the_wrap_of_the_index() {
        let start = u32::MAX - 1;
        let mut counts = SendCounts::new(start);
        for opcode in [Opcode::Send, Opcode::Write, Opcode::Read, Opcode::Send] {
            counts.push(opcode, 8, || panic!("the queue is not full"));
        }
        counts.advance(progress(start.wrapping_add(1), None));
        assert_eq!(counts.totals.sends.succeeded, 1);
        // The third request fails, and the fourth with it.
        counts.advance(progress(start.wrapping_add(4), Some(start.wrapping_add(2))));
        let once = |succeeded, failed| Outcomes { succeeded, failed };
        assert_eq!(counts.totals.writes, once(1, 0));
        assert_eq!(counts.totals.reads, once(0, 1));
        assert_eq!(counts.totals.sends, once(1, 1));
    }

    #[test]
    fn a_full_queue_is_counted_and_withdrawn_requests_are_not() {
        let mut counts = SendCounts::new(0);
        counts.push(Opcode::Write, 1, || panic!("the queue is not full"));
        counts.push(Opcode::Send, 1, || progress(1, None));
        assert_eq!(counts.totals.writes.succeeded, 1);
        counts.withdraw(1);
        counts.advance(progress(2, None));
        assert_eq!(counts.totals.sends.succeeded, 0);
        assert_eq!(counts.done, 1);
    }

    #[test]
    fn receives_after_the_first_failure_have_failed() {
        let mut counts = ReceiveCounts::new(u32::MAX);
        counts.advance(progress(2, Some(1)));
        assert_eq!((counts.totals.succeeded, counts.totals.failed), (2, 1));
        counts.advance(progress(4, Some(1)));
        assert_eq!((counts.totals.succeeded, counts.totals.failed), (2, 3));
    }
}
