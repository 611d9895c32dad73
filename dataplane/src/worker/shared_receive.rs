//! The worker's ends of shared receive queues, by daemon-wide number.

use siw_shm::{RecvWqe, RingError, SrqConsumer};

/// A shared receive queue as one worker sees it.
pub struct SrqEnd {
    /// Daemon-wide number.
    pub id: u32,
    /// Number of the client that owns it.
    pub client: u32,
    pub consumer: SrqConsumer,
}

/// All shared receive queues of one worker.
#[derive(Default)]
pub struct SrqTable {
    slots: Vec<Option<Box<SrqEnd>>>,
    /// Owners and numbers of queues whose low-water mark was passed: events to be told.
    pub low: Vec<(u32, u32)>,
}

impl SrqTable {
    pub fn insert(&mut self, end: SrqEnd) {
        let at = end.id as usize;
        if self.slots.len() <= at {
            self.slots.resize_with(at + 1, || None);
        }
        self.slots[at] = Some(Box::new(end));
    }

    pub fn remove(&mut self, id: u32) {
        if let Some(s) = self.slots.get_mut(id as usize) {
            *s = None;
        }
    }

    pub fn remove_client(&mut self, client: u32) {
        for s in &mut self.slots {
            if s.as_ref().is_some_and(|s| s.client == client) {
                *s = None;
            }
        }
    }

    /// Takes the oldest request of a queue.
    #[inline]
    pub fn pop(&mut self, id: u32, w: &mut RecvWqe) -> Result<Option<()>, RingError> {
        let Some(Some(end)) = self.slots.get_mut(id as usize) else {
            return Ok(None);
        };
        let taken = end.consumer.pop(w)?;
        if taken.is_some_and(|t| t.limit_reached) {
            self.low.push((end.client, id));
        }
        Ok(taken.map(|_| ()))
    }

    /// After a resize: leaves the old ring if it is empty.
    pub fn settle(&mut self, id: u32) {
        if let Some(Some(end)) = self.slots.get_mut(id as usize) {
            end.consumer.settle();
        }
    }
}
