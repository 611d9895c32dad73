//! The worker's ends of shared receive queues, by number.

use siw_shm::{RecvWqe, RingError, SrqConsumer};

use super::owned_objects::OwnedObjects;
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
    pub(super) of_clients: OwnedObjects<ClientId>,
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
        self.remove(queue.id);
        self.of_clients.insert(queue.client, queue.id.0);
        self.slots[index] = Some(Box::new(queue));
    }

    /// Forgets a queue.
    pub(super) fn remove(&mut self, id: SrqId) {
        let removed = self.slots.get_mut(id.index()).and_then(Option::take);
        if let Some(removed) = removed {
            self.of_clients.remove(removed.client, id.0);
        }
    }

    /// Forgets a queue of a client. Returns false if the client has none.
    pub(super) fn remove_next(&mut self, client: ClientId) -> bool {
        let next = self.of_clients.next(client, 0).map(SrqId);
        if let Some(id) = next {
            self.remove(id);
        }
        next.is_some()
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
