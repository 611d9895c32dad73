//! The worker's ends of completion queues, and the events of their completion channels.
//!
//! A completion is visible to the client at once. The event of an armed queue is written once per
//! batch, or later if the queue's moderation delays it.

use std::collections::{BTreeSet, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::owned_objects::OwnedObjects;
use super::slots::QpSlot;
use crate::ids::{ClientId, CqId};
use siw_net::Instant;
use siw_shm::{CqProducer, Wc};

/// Nanoseconds until an event that found its channel full is retried.
const EVENT_RETRY_INTERVAL: u64 = 1_000_000;
/// Maximum retries of events in one batch, which bounds the cost that a client without reads imposes
/// on others.
const EVENT_RETRIES: usize = 64;

/// A completion queue as one worker sees it.
pub struct WorkerCq {
    /// The queue's number.
    pub id: CqId,
    /// The client that owns it.
    pub client: ClientId,
    /// The worker's ring of the queue.
    pub producer: CqProducer,
    /// Channel to which an armed queue writes its cookie.
    pub channel: Option<Arc<OwnedFd>>,
    /// Value that identifies the queue in its channel; chosen by the client.
    pub cookie: u64,
}

/// Condition under which an armed queue raises its event (ibv_modify_cq(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CqModeration {
    /// Number of completions that raise the event.
    pub count: u32,
    /// Nanoseconds from the first completion until the event is raised.
    pub period: u64,
}

/// Identifies a completion in its queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CqeId {
    /// Number of resizes of the queue before this completion.
    ring: u32,
    /// Its number in the ring.
    number: u32,
}

struct CqSlot {
    queue: WorkerCq,
    /// In [`CqTable::written`].
    is_written: bool,
    /// In [`CqTable::unwritten_events`]: one event is pending, regardless of how often it was raised
    /// since.
    is_event_unwritten: bool,
    is_overflowed: bool,
    /// Number of resizes so far; completion numbers start over with each.
    ring: u32,
    moderation: Option<CqModeration>,
    /// Completions since the event was last considered.
    unreported: u32,
    /// Time at which moderated completions raise the event.
    moderated_until: Option<Instant>,
    /// Queue pairs that write to the queue. Those of an overflowed queue are removed as they end.
    queue_pairs: BTreeSet<QpSlot>,
}

/// All completion queues of one worker, by number.
#[derive(Default)]
pub(crate) struct CqTable {
    slots: Vec<Option<Box<CqSlot>>>,
    pub(super) of_clients: OwnedObjects<ClientId>,
    /// Queues written since the last [`CqTable::notify_channels`].
    written: Vec<CqId>,
    /// Queues whose event is to be written with the next [`CqTable::notify_channels`].
    raised: Vec<CqId>,
    /// Queues whose event did not fit into a full channel, each once.
    unwritten_events: VecDeque<CqId>,
    /// Time of the next retry of `unwritten_events`.
    retry_at: Instant,
    /// Queues whose completions are held back by moderation, by the end of the wait.
    moderated: BTreeSet<(Instant, CqId)>,
    /// Queues that overflowed and whose queue pairs have to end, and whether that was reported.
    pub(super) overflowed: VecDeque<(CqId, bool)>,
    /// Total number of completions written.
    pub(super) written_entries: u64,
}

impl CqTable {
    fn slot(&self, id: CqId) -> Option<&CqSlot> {
        self.slots.get(id.index())?.as_deref()
    }

    #[inline]
    fn slot_mut(&mut self, id: CqId) -> Option<&mut CqSlot> {
        self.slots.get_mut(id.index())?.as_deref_mut()
    }

    /// Adds a queue.
    pub(super) fn insert(&mut self, queue: WorkerCq) {
        let index = queue.id.index();
        if self.slots.len() <= index {
            self.slots.resize_with(index + 1, || None);
        }
        self.remove(queue.id);
        self.of_clients.insert(queue.client, queue.id.0);
        self.slots[index] = Some(Box::new(CqSlot {
            queue,
            is_written: false,
            is_event_unwritten: false,
            is_overflowed: false,
            ring: 0,
            moderation: None,
            unreported: 0,
            moderated_until: None,
            queue_pairs: BTreeSet::new(),
        }));
    }

    /// Directs completions to another ring from now on. An event that the old ring was armed for is
    /// preserved.
    pub(super) fn resize(&mut self, id: CqId, producer: CqProducer) {
        let Some(slot) = self.slot_mut(id) else {
            return;
        };
        let raises = slot.queue.producer.take_event() && slot.queue.channel.is_some();
        slot.queue.producer.move_arming(&producer);
        if slot.is_overflowed {
            producer.set_error(nix::libc::EOVERFLOW as u32);
        }
        slot.queue.producer = producer;
        slot.ring = slot.ring.wrapping_add(1);
        if raises {
            self.raised.push(id);
        }
    }

    /// Raises the event whether or not the queue is armed.
    pub(super) fn raise_event(&mut self, id: CqId) {
        if self
            .slot(id)
            .is_some_and(|slot| slot.queue.channel.is_some())
        {
            self.raised.push(id);
        }
    }

    /// Sets or ends the moderation of a queue.
    pub(super) fn set_moderation(&mut self, id: CqId, moderation: Option<CqModeration>) {
        let Some(slot) = self.slot_mut(id) else {
            return;
        };
        slot.moderation = moderation;
        let old = slot.moderated_until.take();
        // Held-back completions are considered again.
        let reconsider = slot.queue.producer.has_unflushed() && !slot.is_written;
        slot.is_written |= reconsider;
        if let Some(until) = old {
            self.moderated.remove(&(until, id));
        }
        if reconsider {
            self.written.push(id);
        }
    }

    /// Latest time at which [`Self::notify_channels`] has work to do.
    #[inline]
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let moderated = self.moderated.first().map(|(until, _)| *until);
        if self.unwritten_events.is_empty() {
            return moderated;
        }
        Some(moderated.map_or(self.retry_at, |until| until.min(self.retry_at)))
    }

    /// Forgets a queue.
    pub(super) fn remove(&mut self, id: CqId) {
        let removed = self.slots.get_mut(id.index()).and_then(Option::take);
        let Some(removed) = removed else {
            return;
        };
        self.of_clients.remove(removed.queue.client, id.0);
        if let Some(until) = removed.moderated_until {
            self.moderated.remove(&(until, id));
        }
    }

    /// Forgets a queue of a client. Returns false if the client has none.
    pub(super) fn remove_next(&mut self, client: ClientId) -> bool {
        let next = self.of_clients.next(client, 0).map(CqId);
        if let Some(id) = next {
            self.remove(id);
        }
        next.is_some()
    }

    /// Identifies the completion that was pushed last.
    pub(super) fn last_cqe(&self, id: CqId) -> Option<CqeId> {
        let slot = self.slot(id)?;
        Some(CqeId {
            ring: slot.ring,
            number: slot.queue.producer.last_pushed(),
        })
    }

    /// Returns whether the client has polled a completion of a queue. After a resize it counts as
    /// polled.
    pub(super) fn is_polled(&self, id: CqId, cqe: CqeId) -> bool {
        let Some(slot) = self.slot(id) else {
            return true;
        };
        slot.ring != cqe.ring || slot.queue.producer.is_polled(cqe.number)
    }

    /// The client of a queue.
    pub(super) fn client(&self, id: CqId) -> Option<ClientId> {
        self.slot(id).map(|slot| slot.queue.client)
    }

    /// Adds a queue pair that writes to a queue.
    pub(super) fn add_queue_pair(&mut self, id: CqId, queue_pair: QpSlot) {
        if let Some(slot) = self.slot_mut(id) {
            slot.queue_pairs.insert(queue_pair);
        }
    }

    /// Removes a queue pair that writes to a queue no more.
    pub(super) fn remove_queue_pair(&mut self, id: CqId, queue_pair: QpSlot) {
        if let Some(slot) = self.slot_mut(id) {
            slot.queue_pairs.remove(&queue_pair);
        }
    }

    /// Removes and returns a queue pair that writes to a queue.
    pub(super) fn take_queue_pair(&mut self, id: CqId) -> Option<QpSlot> {
        self.slot_mut(id)?.queue_pairs.pop_first()
    }

    /// Appends a completion. A full ring breaks the queue (CQ_ERR), which ends the queue pairs that
    /// use it and no others.
    #[inline(always)]
    pub(super) fn push(&mut self, id: CqId, cqe: &Wc) {
        let Some(slot) = self
            .slots
            .get_mut(id.index())
            .and_then(Option::as_deref_mut)
        else {
            return;
        };
        if slot.queue.producer.push(cqe).is_err() {
            if !slot.is_overflowed {
                slot.is_overflowed = true;
                slot.queue.producer.set_error(nix::libc::EOVERFLOW as u32);
                self.overflowed.push_back((id, false));
            }
            return;
        }
        self.written_entries += 1;
        slot.unreported = slot.unreported.saturating_add(1);
        if !slot.is_written {
            slot.is_written = true;
            self.written.push(id);
        }
    }

    /// Writes the event channels of armed queues with new completions. Called once per batch.
    #[inline]
    pub(super) fn notify_channels(&mut self, now: Instant) {
        let is_due = self.next_deadline().is_some_and(|until| until <= now);
        if self.written.is_empty() && self.raised.is_empty() && !is_due {
            return;
        }
        self.consider_events(now);
    }

    fn consider_events(&mut self, now: Instant) {
        while let Some(&(until, id)) = self.moderated.first() {
            if until > now {
                break;
            }
            self.written.push(id);
            self.moderated.pop_first();
        }
        if !self.unwritten_events.is_empty() && self.retry_at <= now {
            self.retry_events(now);
        }
        let mut events = std::mem::take(&mut self.raised);
        for id in self.written.drain(..) {
            let slot = self.slots.get_mut(id.index());
            let Some(slot) = slot.and_then(Option::as_deref_mut) else {
                continue;
            };
            slot.is_written = false;
            if let Some(moderation) = slot.moderation
                && slot.unreported < moderation.count
            {
                let end = Instant(now.0 + moderation.period);
                let until = *slot.moderated_until.get_or_insert(end);
                if until > now {
                    self.moderated.insert((until, id));
                    continue;
                }
            }
            if let Some(until) = slot.moderated_until.take() {
                self.moderated.remove(&(until, id));
            }
            slot.unreported = 0;
            if slot.queue.producer.take_event() && slot.queue.channel.is_some() {
                events.push(id);
            }
        }
        for id in events.drain(..) {
            self.write_event(now, id);
        }
        // Kept for its allocation.
        self.raised = events;
    }

    /// Writes the event of a queue. If the channel is full, the client has left hundreds of events
    /// unread: the event is retried later, and events raised meanwhile merge into it. Events for a
    /// closed channel are dropped.
    fn write_event(&mut self, now: Instant, id: CqId) {
        let Some(slot) = self.slot_mut(id) else {
            return;
        };
        let Some(channel) = &slot.queue.channel else {
            return;
        };
        if slot.is_event_unwritten {
            return;
        }
        let cookie = slot.queue.cookie.to_le_bytes();
        if nix::unistd::write(channel, &cookie) == Err(nix::errno::Errno::EAGAIN) {
            slot.is_event_unwritten = true;
            if self.unwritten_events.is_empty() {
                self.retry_at = Instant(now.0 + EVENT_RETRY_INTERVAL);
            }
            self.unwritten_events.push_back(id);
        }
    }

    /// Retries some of the events that found their channel full, in turn.
    #[cold]
    fn retry_events(&mut self, now: Instant) {
        self.retry_at = Instant(now.0 + EVENT_RETRY_INTERVAL);
        for _ in 0..self.unwritten_events.len().min(EVENT_RETRIES) {
            let Some(id) = self.unwritten_events.pop_front() else {
                return;
            };
            if let Some(slot) = self.slot_mut(id) {
                slot.is_event_unwritten = false;
            }
            self.write_event(now, id);
        }
    }

    /// True while events wait for room in a channel.
    pub(super) fn has_unwritten_events(&self) -> bool {
        !self.unwritten_events.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use siw_shm::{CqGeometry, SharedMemory};

    #[test]
    fn a_client_that_reads_no_events_is_owed_one() {
        let geometry = CqGeometry::new(4, 1).unwrap();
        let memory = Arc::new(SharedMemory::new_anonymous(geometry.len).unwrap());
        let (write, read) = siw_shm::control::event_stream().unwrap();
        let id = CqId(1);
        let mut table = CqTable::default();
        table.insert(WorkerCq {
            id,
            client: ClientId(1),
            producer: CqProducer::new(memory, 0, geometry, 0).unwrap(),
            channel: Some(Arc::new(write)),
            cookie: 7,
        });
        let mut now = Instant(0);
        for _ in 0..10_000 {
            table.raise_event(id);
            now = Instant(now.0 + 1000);
            table.notify_channels(now);
            assert!(table.unwritten_events.len() <= 1);
        }
        assert!(table.has_unwritten_events() && table.raised.is_empty());
        assert!(table.next_deadline().is_some_and(|retry| retry > now));
        let mut room = vec![0; 1 << 20];
        let filled = nix::unistd::read(&read, &mut room).unwrap();
        table.notify_channels(Instant(now.0 + EVENT_RETRY_INTERVAL));
        assert!(!table.has_unwritten_events());
        assert!(filled >= 8 * 64, "{filled} bytes of events fit");
        assert_eq!(nix::unistd::read(&read, &mut room), Ok(8));
        assert_eq!(room[..8], 7u64.to_le_bytes());
    }
}
