//! Polling of recently used send queues: the worker checks them in each batch, as Linux polls a
//! network device whose interrupt it has turned off (NAPI), and their clients ring no doorbells
//! meanwhile.
//!
//! The pending word shows this to the client: it stays set while its queue is polled, as if the
//! doorbell had not been taken yet. To stop, the worker clears the word and then checks the queue once
//! more; a client that posts after that check rings.

use super::Worker;
use super::slots::QpSlot;
use super::worker_qp::WorkerQp;

/// Maximum number of queues polled at a time. Clients of other queues ring doorbells.
const MAX_POLLED: usize = 8;
/// Consecutive empty polls after which a queue is no longer polled.
const LOOKS_IN_VAIN: u32 = 256;

/// One polled send queue.
#[derive(Debug, Clone, Copy)]
struct PolledQueue {
    slot: QpSlot,
    /// Producer index at the last poll.
    seen: u32,
    /// Polls since the index changed.
    in_vain: u32,
}

/// The polled queues of a worker.
#[derive(Debug, Default)]
pub(super) struct PolledQueues(Vec<PolledQueue>);

impl PolledQueues {
    /// Handles a doorbell: polls the queue from now on, or lets the client ring again.
    #[inline]
    pub(super) fn on_doorbell(&mut self, slot: QpSlot, queue_pair: &mut WorkerQp) {
        queue_pair.rings.sq.prefetch_next();
        // A client may ring for a polled queue, though it need not.
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

    /// Removes a queue pair that is removed from its worker.
    pub(super) fn remove(&mut self, slot: QpSlot) {
        self.0.retain(|polled| polled.slot != slot);
    }
}

impl Worker {
    /// Polls the queues. Returns true if a request was posted to one.
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

    /// Stops polling before the worker sleeps: clients have to ring from now on. Marks the queue pairs
    /// with requests posted before as ready.
    pub(super) fn stop_polling_queues(&mut self) {
        for polled in std::mem::take(&mut self.polled_queues).0 {
            if let Some(queue_pair) = self.queue_pairs.get_mut(polled.slot) {
                stop_polling(queue_pair);
                // A failed queue pair is marked, too, to have its receive queue flushed.
                let is_streaming = queue_pair.is_streaming();
                if queue_pair.rings.sq.producer_index() != polled.seen || !is_streaming {
                    self.mark_ready(polled.slot);
                }
            }
        }
    }
}

/// Makes the client ring from now on. The caller has to check afterwards for requests posted since the
/// last poll.
#[inline]
fn stop_polling(queue_pair: &mut WorkerQp) {
    queue_pair.is_polled = false;
    queue_pair.rings.sq.clear_pending();
}
