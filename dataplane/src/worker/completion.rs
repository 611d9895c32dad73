//! The worker's ends of completion queues, and the events that armed ones owe.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use siw_shm::{CqProducer, Cqe};

/// A completion queue as one worker sees it.
pub struct CqEnd {
    /// Daemon-wide number.
    pub id: u32,
    /// Number of the client that owns it.
    pub client: u32,
    pub producer: CqProducer,
    /// Where an armed queue writes its cookie.
    pub channel: Option<Arc<OwnedFd>>,
    /// What the client wants to read there.
    pub cookie: u64,
}

struct Slot {
    end: CqEnd,
    touched: bool,
    overflown: bool,
}

/// All completion queues of one worker, by daemon-wide number.
#[derive(Default)]
pub struct CqTable {
    slots: Vec<Option<Box<Slot>>>,
    /// Queues written since the last [`CqTable::notify`].
    touched: Vec<u32>,
    /// Events that a full channel did not take yet.
    owed: Vec<u32>,
    /// Queues that overflowed and whose queue pairs have to end.
    pub overflows: Vec<u32>,
}

impl CqTable {
    /// Adds a queue.
    pub fn insert(&mut self, end: CqEnd) {
        let at = end.id as usize;
        if self.slots.len() <= at {
            self.slots.resize_with(at + 1, || None);
        }
        self.slots[at] = Some(Box::new(Slot {
            end,
            touched: false,
            overflown: false,
        }));
    }

    /// Forgets a queue.
    pub fn remove(&mut self, id: u32) {
        if let Some(s) = self.slots.get_mut(id as usize) {
            *s = None;
        }
    }

    /// Forgets every queue of a client.
    pub fn remove_client(&mut self, client: u32) {
        for s in &mut self.slots {
            if s.as_ref().is_some_and(|s| s.end.client == client) {
                *s = None;
            }
        }
    }

    /// The client of a queue.
    pub fn client(&self, id: u32) -> Option<u32> {
        self.slots.get(id as usize)?.as_ref().map(|s| s.end.client)
    }

    /// Appends a completion. A full ring breaks the queue (CQ_ERR): its queue pairs end, and
    /// nobody else's.
    #[inline]
    pub fn push(&mut self, id: u32, cqe: &Cqe) {
        let Some(Some(slot)) = self.slots.get_mut(id as usize) else {
            return;
        };
        if slot.end.producer.push(cqe).is_err() {
            if !slot.overflown {
                slot.overflown = true;
                slot.end.producer.set_error(nix::libc::EOVERFLOW as u32);
                self.overflows.push(id);
            }
            return;
        }
        if !slot.touched {
            slot.touched = true;
            self.touched.push(id);
        }
    }

    /// Writes the event channels of queues that are armed and got something. Once a batch.
    #[inline]
    pub fn notify(&mut self) {
        if self.touched.is_empty() && self.owed.is_empty() {
            return;
        }
        self.notify_touched();
    }

    fn notify_touched(&mut self) {
        let mut owed = std::mem::take(&mut self.owed);
        for id in self.touched.drain(..) {
            if let Some(Some(slot)) = self.slots.get_mut(id as usize) {
                slot.touched = false;
                if slot.end.producer.take_event() && slot.end.channel.is_some() {
                    owed.push(id);
                }
            }
        }
        owed.retain(|id| {
            let Some(Some(slot)) = self.slots.get(*id as usize) else {
                return false;
            };
            let Some(fd) = &slot.end.channel else {
                return false;
            };
            // A full channel means that the client has not read thousands of events: try
            // again with the next batch. A closed one wants none.
            nix::unistd::write(fd, &slot.end.cookie.to_le_bytes()) == Err(nix::errno::Errno::EAGAIN)
        });
        self.owed = owed;
    }

    /// Events wait for room in a channel.
    pub fn owes(&self) -> bool {
        !self.owed.is_empty()
    }
}
