//! The worker's ends of completion queues, and the events that armed ones owe.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use siw_shm::{CqProducer, Wc};
use siw_tcp::Instant;

use crate::ids::{ClientId, CqId};

/// A completion queue as one worker sees it.
pub struct WorkerCq {
    /// Daemon-wide number.
    pub id: CqId,
    /// Number of the client that owns it.
    pub client: ClientId,
    pub producer: CqProducer,
    /// Where an armed queue writes its cookie.
    pub channel: Option<Arc<OwnedFd>>,
    /// What the client wants to read there.
    pub cookie: u64,
}

/// When an armed queue raises its event (ibv_modify_cq(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CqModeration {
    /// Completions that raise it.
    pub count: u32,
    /// Nanoseconds from the first of them.
    pub period: u64,
}

/// A completion in its queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CqeId {
    ring: u32,
    number: u32,
}

struct Slot {
    end: WorkerCq,
    touched: bool,
    overflown: bool,
    /// Resizes so far: numbers of completions start over with each.
    ring: u32,
    moderation: Option<CqModeration>,
    /// Completions since the event was last looked at.
    fresh: u32,
    /// When moderated completions raise the event.
    due: Option<Instant>,
}

/// All completion queues of one worker, by daemon-wide number.
#[derive(Default)]
pub struct CqTable {
    slots: Vec<Option<Box<Slot>>>,
    /// Queues written since the last [`CqTable::notify`].
    touched: Vec<CqId>,
    /// Events that a full channel did not take yet.
    owed: Vec<CqId>,
    /// Queues whose completions wait for more of them, by the end of the wait.
    due: BTreeSet<(Instant, CqId)>,
    /// Queues that overflowed and whose queue pairs have to end.
    pub overflows: Vec<CqId>,
}

impl CqTable {
    /// Adds a queue.
    pub fn insert(&mut self, end: WorkerCq) {
        let at = end.id.index();
        if self.slots.len() <= at {
            self.slots.resize_with(at + 1, || None);
        }
        self.slots[at] = Some(Box::new(Slot {
            end,
            touched: false,
            overflown: false,
            ring: 0,
            moderation: None,
            fresh: 0,
            due: None,
        }));
    }

    /// Completions go to another memory from now on.
    pub fn resize(&mut self, id: CqId, producer: CqProducer) {
        let Some(Some(slot)) = self.slots.get_mut(id.index()) else {
            return;
        };
        if slot.end.producer.take_event() && slot.end.channel.is_some() {
            self.owed.push(id);
        }
        slot.end.producer.move_arming(&producer);
        if slot.overflown {
            producer.set_error(nix::libc::EOVERFLOW as u32);
        }
        slot.end.producer = producer;
        slot.ring = slot.ring.wrapping_add(1);
    }

    /// Raises the event whatever the arming.
    pub fn raise(&mut self, id: CqId) {
        if let Some(Some(slot)) = self.slots.get(id.index())
            && slot.end.channel.is_some()
        {
            self.owed.push(id);
        }
    }

    /// Sets or ends the moderation of a queue.
    pub fn moderate(&mut self, id: CqId, moderation: Option<CqModeration>) {
        let Some(Some(slot)) = self.slots.get_mut(id.index()) else {
            return;
        };
        slot.moderation = moderation;
        if let Some(at) = slot.due.take() {
            self.due.remove(&(at, id));
        }
        // What waits is looked at anew.
        if slot.end.producer.has_unflushed() && !slot.touched {
            slot.touched = true;
            self.touched.push(id);
        }
    }

    /// When [`Self::notify`] has something to do at the latest.
    pub fn next_due(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Forgets a queue.
    pub fn remove(&mut self, id: CqId) {
        let slot = self.slots.get_mut(id.index()).and_then(Option::take);
        if let Some(at) = slot.and_then(|s| s.due) {
            self.due.remove(&(at, id));
        }
    }

    /// Forgets every queue of a client.
    pub fn remove_client(&mut self, client: ClientId) {
        for s in &mut self.slots {
            if s.as_ref().is_some_and(|s| s.end.client == client) {
                *s = None;
            }
        }
        let slots = &self.slots;
        self.due
            .retain(|(_, q)| slots.get(q.index()).is_some_and(Option::is_some));
    }

    /// Names the completion that was pushed last.
    pub fn last(&self, id: CqId) -> Option<CqeId> {
        let slot = self.slots.get(id.index())?.as_ref()?;
        Some(CqeId {
            ring: slot.ring,
            number: slot.end.producer.last_pushed(),
        })
    }

    /// Whether the client has polled a completion of a queue. After a resize it counts as polled.
    pub fn is_polled(&self, id: CqId, pushed: CqeId) -> bool {
        let Some(Some(slot)) = self.slots.get(id.index()) else {
            return true;
        };
        slot.ring != pushed.ring || slot.end.producer.is_polled(pushed.number)
    }

    /// The client of a queue.
    pub fn client(&self, id: CqId) -> Option<ClientId> {
        self.slots.get(id.index())?.as_ref().map(|s| s.end.client)
    }

    /// Appends a completion. A full ring breaks the queue (CQ_ERR): its queue pairs end, and
    /// nobody else's.
    #[inline]
    pub fn push(&mut self, id: CqId, cqe: &Wc) {
        let Some(Some(slot)) = self.slots.get_mut(id.index()) else {
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
        slot.fresh = slot.fresh.saturating_add(1);
        if !slot.touched {
            slot.touched = true;
            self.touched.push(id);
        }
    }

    /// Writes the event channels of queues that are armed and got something. Once a batch.
    #[inline]
    pub fn notify(&mut self, now: Instant) {
        let due = self.next_due().is_some_and(|at| at <= now);
        if self.touched.is_empty() && self.owed.is_empty() && !due {
            return;
        }
        self.notify_touched(now);
    }

    fn notify_touched(&mut self, now: Instant) {
        let mut owed = std::mem::take(&mut self.owed);
        while let Some(&(at, id)) = self.due.first() {
            if at > now {
                break;
            }
            self.touched.push(id);
            self.due.pop_first();
        }
        for id in self.touched.drain(..) {
            let Some(Some(slot)) = self.slots.get_mut(id.index()) else {
                continue;
            };
            slot.touched = false;
            if let Some(m) = slot.moderation
                && slot.fresh < m.count
            {
                let at = *slot.due.get_or_insert(Instant(now.0 + m.period));
                if at > now {
                    self.due.insert((at, id));
                    continue;
                }
            }
            if let Some(at) = slot.due.take() {
                self.due.remove(&(at, id));
            }
            slot.fresh = 0;
            if slot.end.producer.take_event() && slot.end.channel.is_some() {
                owed.push(id);
            }
        }
        owed.retain(|id| {
            let Some(Some(slot)) = self.slots.get(id.index()) else {
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
