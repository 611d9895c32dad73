//! The worker's ends of shared receive queues, by number.

use siw_shm::{RecvWqe, RingError, SrqConsumer};

use crate::ids::{ClientId, SrqId};

/// A shared receive queue as one worker sees it.
pub struct WorkerSrq {
    /// The queue's number.
    pub id: SrqId,
    /// The client that owns it.
    pub client: ClientId,
    /// The worker's end of the queue; workers share its requests without locks.
    pub consumer: SrqConsumer,
}

/// All shared receive queues of one worker.
#[derive(Default)]
pub(crate) struct SrqTable {
    slots: Vec<Option<Box<WorkerSrq>>>,
    /// Clients and numbers of queues that fell below their limit: events to post.
    pub(super) low: Vec<(ClientId, SrqId)>,
}

impl SrqTable {
    /// Adds a queue.
    pub(super) fn insert(&mut self, queue: WorkerSrq) {
        let index = queue.id.index();
        if self.slots.len() <= index {
            self.slots.resize_with(index + 1, || None);
        }
        self.slots[index] = Some(Box::new(queue));
    }

    /// Forgets a queue.
    pub(super) fn remove(&mut self, id: SrqId) {
        if let Some(place) = self.slots.get_mut(id.index()) {
            *place = None;
        }
    }

    /// Forgets every queue of a client.
    pub(super) fn remove_client(&mut self, client: ClientId) {
        for place in &mut self.slots {
            if place.as_ref().is_some_and(|queue| queue.client == client) {
                *place = None;
            }
        }
    }

    /// Takes the oldest request of a queue into `wqe`. Returns `None` if the queue is empty.
    #[inline]
    pub(super) fn pop(&mut self, id: SrqId, wqe: &mut RecvWqe) -> Result<Option<()>, RingError> {
        let Some(Some(queue)) = self.slots.get_mut(id.index()) else {
            return Ok(None);
        };
        let taken = queue.consumer.pop(wqe)?;
        if taken.is_some_and(|taken| taken.limit_reached) {
            self.low.push((queue.client, id));
        }
        Ok(taken.map(|_| ()))
    }

    /// After a resize: leaves the old ring if it is empty.
    pub(super) fn leave_old_ring(&mut self, id: SrqId) {
        if let Some(Some(queue)) = self.slots.get_mut(id.index()) {
            queue.consumer.leave_old_ring();
        }
    }
}
