//! Streams of departed clients. A program may end, or execute another one, right after its last
//! write; its peer gets all bytes and then the end of the stream, as with sockets of the kernel. So a
//! stream stays in its worker until the requests posted to it and its final SEND are acknowledged.
//! TCP then closes the connection without an owner.
//!
//! The client stays in its worker until its last stream has ended: see `departures.rs`.

use siw_iwarp::RdmapState;
use siw_net::Instant;
use siw_shm::{SendData, SendWqe, SendWr, WrFlags};

use super::connections::Connections;
use super::lifecycle::STALL_TIMEOUT;
use super::lifecycle_state::LifecycleState;
use super::slots::QpSlot;

impl Connections {
    /// Lets a queue pair linger if it is a stream that can still send.
    pub(super) fn linger(&mut self, now: Instant, slot: QpSlot) -> bool {
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return false;
        };
        let is_open = matches!(queue_pair.state, LifecycleState::Running { .. })
            && queue_pair.protocol.state() == RdmapState::Rts;
        let Some(bytes) = queue_pair.final_send.as_bytes().filter(|_| is_open) else {
            return false;
        };
        let request = SendWr::send(0, SendData::Inline(bytes)).with_flags(WrFlags::NONE);
        let Ok(request) = SendWqe::from_wr(&request) else {
            return false;
        };
        queue_pair.rings.final_send = Some(Box::new(request));
        let stack = &self.ports[queue_pair.port].stack;
        let end = now + stack.orphan_timeout();
        let deadline = (now + STALL_TIMEOUT).min(end);
        self.leave_completion_queues(slot);
        self.enter_state(slot, LifecycleState::Lingering { deadline, end });
        self.mark_ready(slot);
        true
    }

    /// Ends a lingering stream whose requests are all acknowledged.
    #[cold]
    pub(super) fn check_lingering(&mut self, now: Instant, slot: QpSlot) {
        if let Some(queue_pair) = self.queue_pairs.get_mut(slot)
            && matches!(queue_pair.state, LifecycleState::Lingering { .. })
            && !queue_pair.has_sends()
        {
            self.finish_lingering(now, slot);
        }
    }

    /// Removes a lingering stream. Its connection is closed, or reset if data is unacknowledged.
    pub(super) fn finish_lingering(&mut self, now: Instant, slot: QpSlot) {
        let client = self
            .queue_pairs
            .get(slot)
            .map(|queue_pair| queue_pair.client);
        self.drop_queue_pair(now, slot, false);
        if let Some(client) = client {
            self.departing.end_stream(client);
        }
    }
}
