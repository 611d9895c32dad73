//! Messages that wait for a receive work request, if the device's `receive_wait_ms` or the consumer
//! asks for it. Programs for InfiniBand expect this (its RNR). The message stays in TCP's receive queue,
//! whose window closes, and so do the messages behind it, except for responses, a Terminate and the
//! peer's FIN, which are processed.
//!
//! Posting a receive work request rings no doorbell: a worker with these queue pairs polls some of them
//! in each batch, in turn, and does not sleep for long.

use siw_iwarp::QpEnv;
use siw_tcp::{Events, Instant};

use super::Worker;
use super::worker_qp::QpSlot;

/// Queue pairs of waiting messages that check for a receive work request in one batch; the others have
/// their turn in later ones.
const LOOKS_PER_BATCH: usize = 64;

/// Counters for statistics.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ReceiveWaits {
    /// Messages that had to wait.
    pub(super) begun: u64,
    /// Messages whose wait timed out.
    pub(super) timed_out: u64,
}

/// Events that are held back behind a waiting message. A reset is not.
const HELD: Events = Events::CLOSED.union(Events::OUT_OF_ORDER);
/// Events that are processed now for what lies behind the message, and again after it.
const REPEATED: Events = Events::READABLE.union(Events::PEER_FIN);

impl Worker {
    /// Holds events back behind a waiting message, and returns those that can be processed now.
    #[cold]
    pub(super) fn hold_for_receive(&mut self, slot: QpSlot, events: Events) -> Events {
        match self.queue_pairs.get_mut(slot) {
            Some(queue_pair) if queue_pair.protocol.awaits_receive() => {
                queue_pair.held_events |= Events(events.0 & (HELD.0 | REPEATED.0));
                Events(events.0 & !HELD.0)
            }
            _ => events,
        }
    }

    /// Has the queue pairs of waiting messages check for a receive work request. Returns true if one
    /// continued.
    #[cold]
    pub(super) fn poll_awaited_receives(&mut self, now: Instant) -> bool {
        let mut any = false;
        for _ in 0..self.context.awaiting_receives.len().min(LOOKS_PER_BATCH) {
            let Some(qpn) = self.context.awaiting_receives.pop_front() else {
                break;
            };
            let Some(slot) = self.queue_pairs.find(qpn) else {
                continue;
            };
            let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
                continue;
            };
            queue_pair.rings.awaits_receive = false;
            let conn = queue_pair.conn.filter(|_| queue_pair.state.has_stream());
            let Some(conn) = conn else {
                queue_pair.receive_wait_end = None;
                continue;
            };
            let port = queue_pair.port;
            // A Terminate behind the message has ended the stream.
            let is_waiting = queue_pair.protocol.awaits_receive();
            let wait = queue_pair.protocol.receive_wait_ms();
            let end = *queue_pair.receive_wait_end.get_or_insert_with(|| {
                self.receive_waits.begun += 1;
                now + std::time::Duration::from_millis(wait.into())
            });
            if is_waiting && now < end && queue_pair.rings.has_no_receive() {
                self.context
                    .for_rings(&mut queue_pair.rings)
                    .await_receive();
                continue;
            }
            if is_waiting && now >= end {
                self.receive_waits.timed_out += 1;
                queue_pair.protocol.set_receive_wait(0);
            }
            let held = std::mem::take(&mut queue_pair.held_events);
            queue_pair.protocol.stop_awaiting_receive();
            self.on_stream_event(now, port, conn, slot, held | Events::READABLE);
            let queue_pair = self.queue_pairs.get_mut(slot);
            if let Some(queue_pair) = queue_pair
                && !queue_pair.protocol.awaits_receive()
            {
                queue_pair.receive_wait_end = None;
                any = true;
                self.mark_ready(slot);
            }
        }
        any
    }
}
