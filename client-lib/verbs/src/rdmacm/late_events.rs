//! Events of a channel that come at a time: the end of TIMEWAIT, and those of a fault plan.

use super::channel::EventChannel;
use super::faulty::end_queue_pair;
use super::queue::{QueuedEvent, RegisteredId};
use crate::abi::RDMA_CM_EVENT_DEVICE_REMOVAL;
use crate::alarm::Alarm;
use crate::status::log_failure;
use rustix::fd::AsFd;
use siw::{Error, ProcessMutex};
use std::collections::VecDeque;
use std::time::Instant;

/// Events whose time has not come.
#[derive(Default)]
pub struct LateEvents(ProcessMutex<State>);

#[derive(Default)]
struct State {
    /// By time; those of one time in the order in which they were added.
    events: VecDeque<(Instant, QueuedEvent)>,
    /// A source of the channel's descriptor from the first event on: readable from the time of the earliest on.
    alarm: Option<Alarm>,
}

impl State {
    fn set_alarm(&self) {
        if let Some(alarm) = &self.alarm {
            alarm.set(self.events.front().map(|(time, _)| *time));
        }
    }
}

impl EventChannel {
    /// Adds an event that comes at a time.
    ///
    /// # Errors
    /// There is no descriptor for a timer.
    pub fn push_at(&self, time: Instant, event: QueuedEvent) -> Result<(), Error> {
        if self.is_inherited() {
            return Ok(());
        }
        let mut late = self.late.0.lock_or_end_call();
        if late.alarm.is_none() {
            let alarm = Alarm::new()?;
            self.descriptor.add_source(alarm.as_fd())?;
            late.alarm = Some(alarm);
        }
        let place = late.events.partition_point(|(other, _)| *other <= time);
        late.events.insert(place, (time, event));
        late.set_alarm();
        Ok(())
    }

    /// Queues the events whose time has come.
    pub(super) fn queue_late_events(&self) {
        let mut late = self.late.0.lock_or_end_call();
        if late.events.is_empty() || self.is_inherited() {
            return;
        }
        let now = Instant::now();
        let due = late.events.partition_point(|(time, _)| *time <= now);
        let due: Vec<_> = late.events.drain(..due).collect();
        drop(late);
        if due.is_empty() {
            return;
        }
        for (_, event) in due {
            if let QueuedEvent::Plain(plain) = &event
                && plain.kind == RDMA_CM_EVENT_DEVICE_REMOVAL
            {
                end_queue_pair(plain.id);
            }
            self.push(event);
        }
        // The descriptor stays readable until they are in the queue.
        self.late.0.lock_or_end_call().set_alarm();
    }

    /// Takes out the late events of an identifier, or of all.
    pub(super) fn take_late_events(&self, of: Option<RegisteredId>) -> Vec<(Instant, QueuedEvent)> {
        let mut late = self.late.0.lock_or_end_call();
        let all = std::mem::take(&mut late.events);
        let is_meant = |event: &QueuedEvent| of.is_none_or(|owner| event.owner() == owner);
        let (taken, kept): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|(_, event)| is_meant(event));
        late.events = kept.into();
        late.set_alarm();
        taken
    }

    /// Moves the late events of an identifier here.
    pub(super) fn adopt_late_events(&self, from: &EventChannel, owner: RegisteredId) {
        for (time, event) in from.take_late_events(Some(owner)) {
            if let Err(error) = self.push_at(time, event) {
                log_failure("rdma_migrate_id", &error);
            }
        }
    }
}
