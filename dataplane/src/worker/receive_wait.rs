//! Messages that wait for a receive work request, where the device's `receive_wait_ms` allows it: as
//! programs for InfiniBand expect (its RNR), which there is no answer for in iWARP but to keep the
//! stream. What has arrived stays in TCP's receive queue, whose window closes.
//!
//! Nobody rings a doorbell for a receive: a worker with such queue pairs looks again in each batch,
//! and does not sleep for long.

use siw_tcp::{Events, Instant};

use super::Worker;
use super::worker_qp::QpSlot;

/// Counts for statistics.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ReceiveWaits {
    /// Messages that had to wait.
    pub(super) begun: u64,
    /// Those that waited in vain.
    pub(super) timed_out: u64,
}

/// What waits behind a message: a reset does not.
const HELD: Events = Events::CLOSED
    .union(Events::READABLE)
    .union(Events::OUT_OF_ORDER)
    .union(Events::PEER_FIN);

impl Worker {
    /// The events that can be acted on now.
    #[cold]
    pub(super) fn hold_for_receive(&mut self, slot: QpSlot, events: Events) -> Events {
        match self.queue_pairs.get_mut(slot) {
            Some(queue_pair) if queue_pair.protocol.awaits_receive() => {
                queue_pair.held_events |= Events(events.0 & HELD.0);
                Events(events.0 & !HELD.0)
            }
            _ => events,
        }
    }

    /// Has the queue pairs of waiting messages look again for a receive work request. True when one
    /// went on.
    #[cold]
    pub(super) fn poll_awaited_receives(&mut self, now: Instant) -> bool {
        let mut any = false;
        for qpn in std::mem::take(&mut self.context.awaiting_receives) {
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
            let wait = queue_pair.protocol.receive_wait_ms();
            let end = *queue_pair.receive_wait_end.get_or_insert_with(|| {
                self.receive_waits.begun += 1;
                now + std::time::Duration::from_millis(wait.into())
            });
            if now >= end {
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
