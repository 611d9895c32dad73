//! Send queues that were posted to a moment ago: the worker looks at them in each batch, as Linux polls a
//! network device whose interrupt it has turned off (NAPI), and their clients ring no doorbells meanwhile.
//!
//! What tells the client is the pending word: it stays set while its queue is polled, as if the doorbell
//! were not taken yet. The word is cleared before the worker stops looking, and the queue looked at once
//! more: who posts after that look rings.

use super::Worker;
use super::worker_qp::{QpSlot, WorkerQp};

/// Queues that are polled at a time. Others ring.
const MAX_POLLED: usize = 8;
/// Looks in vain after which a queue is not polled any more.
const LOOKS_IN_VAIN: u32 = 256;

/// One polled send queue.
#[derive(Debug, Clone, Copy)]
struct PolledQueue {
    slot: QpSlot,
    /// The producer index at the last look.
    seen: u32,
    /// Looks since it changed.
    in_vain: u32,
}

/// The polled queues of a worker.
#[derive(Debug, Default)]
pub(super) struct PolledQueues(Vec<PolledQueue>);

impl PolledQueues {
    /// The client has rung for this queue: polls it from now on, or has the client ring again.
    #[inline]
    pub(super) fn on_doorbell(&mut self, slot: QpSlot, queue_pair: &mut WorkerQp) {
        queue_pair.rings.sq.prefetch_next();
        // A client may ring without need.
        if queue_pair.is_polled {
            return;
        }
        if self.0.len() < MAX_POLLED && queue_pair.is_streaming() {
            queue_pair.is_polled = true;
            self.0.push(PolledQueue {
                slot,
                seen: queue_pair.rings.sq.producer_index(),
                in_vain: 0,
            });
        } else {
            queue_pair.rings.sq.clear_pending();
        }
    }

    /// The queue pair is taken out of its worker.
    pub(super) fn remove(&mut self, slot: QpSlot) {
        self.0.retain(|polled| polled.slot != slot);
    }
}

impl Worker {
    /// Looks at the polled queues. True when something was posted to one.
    #[inline]
    pub(super) fn look_at_polled_queues(&mut self) -> bool {
        let mut any = false;
        let mut place = 0;
        while let Some(polled) = self.polled_queues.0.get_mut(place) {
            let slot = polled.slot;
            let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
                self.polled_queues.0.swap_remove(place);
                continue;
            };
            let posted = queue_pair.rings.sq.producer_index();
            if !queue_pair.is_streaming() || polled.in_vain == LOOKS_IN_VAIN {
                stop_polling(queue_pair);
                self.polled_queues.0.swap_remove(place);
            } else if posted == polled.seen {
                polled.in_vain += 1;
                place += 1;
                continue;
            } else {
                queue_pair.rings.sq.prefetch_next();
                (polled.seen, polled.in_vain) = (posted, 0);
                any = true;
                place += 1;
            }
            self.mark_ready(slot);
        }
        any
    }

    /// The worker is about to sleep: clients have to ring from now on. What they posted before has its
    /// queue pair ready.
    pub(super) fn stop_polling_queues(&mut self) {
        for polled in std::mem::take(&mut self.polled_queues).0 {
            if let Some(queue_pair) = self.queue_pairs.get_mut(polled.slot) {
                stop_polling(queue_pair);
                // One that has failed has its receive queue flushed, too.
                let is_streaming = queue_pair.is_streaming();
                if queue_pair.rings.sq.producer_index() != polled.seen || !is_streaming {
                    self.mark_ready(polled.slot);
                }
            }
        }
    }
}

/// From now on the client has to ring. Whether it has posted since the last look is to be found out
/// afterwards.
#[inline]
fn stop_polling(queue_pair: &mut WorkerQp) {
    queue_pair.is_polled = false;
    queue_pair.rings.sq.clear_pending();
}
