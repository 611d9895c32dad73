//! The worker's ends of shared receive queues, by daemon-wide number.

use siw_shm::{RecvWqe, RingError, SrqConsumer};

use crate::ids::{ClientId, SrqId};

/// A shared receive queue as one worker sees it.
pub struct WorkerSrq {
    /// Daemon-wide number.
    pub id: SrqId,
    /// Number of the client that owns it.
    pub client: ClientId,
    pub consumer: SrqConsumer,
}

/// All shared receive queues of one worker.
#[derive(Default)]
pub struct SrqTable {
    slots: Vec<Option<Box<WorkerSrq>>>,
    /// Clients and numbers of queues whose low-water mark was passed: events to post.
    pub low: Vec<(ClientId, SrqId)>,
}

impl SrqTable {
    pub fn insert(&mut self, end: WorkerSrq) {
        let at = end.id.index();
        if self.slots.len() <= at {
            self.slots.resize_with(at + 1, || None);
        }
        self.slots[at] = Some(Box::new(end));
    }

    pub fn remove(&mut self, id: SrqId) {
        if let Some(s) = self.slots.get_mut(id.index()) {
            *s = None;
        }
    }

    pub fn remove_client(&mut self, client: ClientId) {
        for s in &mut self.slots {
            if s.as_ref().is_some_and(|s| s.client == client) {
                *s = None;
            }
        }
    }

    /// Takes the oldest request of a queue.
    #[inline]
    pub fn pop(&mut self, id: SrqId, w: &mut RecvWqe) -> Result<Option<()>, RingError> {
        let Some(Some(end)) = self.slots.get_mut(id.index()) else {
            return Ok(None);
        };
        let taken = end.consumer.pop(w)?;
        if taken.is_some_and(|t| t.limit_reached) {
            self.low.push((end.client, id));
        }
        Ok(taken.map(|_| ()))
    }

    /// After a resize: leaves the old ring if it is empty.
    pub fn settle(&mut self, id: SrqId) {
        if let Some(Some(end)) = self.slots.get_mut(id.index()) {
            end.consumer.leave_old_ring();
        }
    }
}
