//! Asynchronous events of contexts that share one connection, as those of rdma_cm do. Each has a
//! descriptor of its own, of the daemon's stream and an eventfd: it is readable when an event may be
//! pending. The reader of the stream passes each event on to the contexts that it
//! concerns.

use super::async_event::is_of_device;
use super::context::ContextObject;
use crate::descriptor::EventDescriptor;
use crate::status::log_failure;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd};
use siw::{AsyncEvent, AsyncEventKind, Context, Error, KeptDescriptor, ProcessMutex};
use std::collections::VecDeque;
use std::sync::MutexGuard;
use std::time::Duration;

/// The contexts of one connection.
#[derive(Default)]
pub struct EventGroup {
    /// Held while an event is read and passed on, so that events stay in order.
    reading: ProcessMutex<()>,
    members: ProcessMutex<Vec<Member>>,
}

/// A context of the connection, which is never freed.
struct Member(&'static ContextObject);

// SAFETY: a context may be used from any thread.
unsafe impl Send for Member {}

impl EventGroup {
    fn lock_members(&self) -> MutexGuard<'_, Vec<Member>> {
        self.members.lock_or_end_call()
    }

    /// Adds the context of a device.
    pub fn add_member(&self, member: &'static ContextObject) {
        self.lock_members().push(Member(member));
    }

    /// Reads an event and passes it on to the contexts that it concerns.
    fn read_event(&self, client: &Context) -> Result<(), Error> {
        let _reading = self.reading.lock()?;
        let event = client.get_async_event(Some(Duration::ZERO))?;
        log_failure("asynchronous event", &event.reason);
        for Member(context) in self.lock_members().iter() {
            if let (Some(events), true) = (context.shared_events(), concerns(context, &event)) {
                events.push(event.clone());
            }
        }
        Ok(())
    }
}

/// Asynchronous events of a context that shares its connection.
pub struct SharedEvents {
    descriptor: EventDescriptor,
    /// Readable while the queue is not empty.
    local: KeptDescriptor,
    queue: ProcessMutex<VecDeque<AsyncEvent>>,
    group: &'static EventGroup,
}

impl SharedEvents {
    /// Creates the descriptor and the queue of one context. `alarm` makes the descriptor readable, too.
    pub fn new(
        client: &Context,
        group: &'static EventGroup,
        alarm: Option<BorrowedFd<'_>>,
    ) -> Result<SharedEvents, Error> {
        let local = KeptDescriptor::at_high_number(eventfd(
            0,
            EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK,
        )?)?;
        let sources = [client.async_fd(), local.as_fd()].into_iter().chain(alarm);
        let sources: Vec<_> = sources.collect();
        Ok(SharedEvents {
            descriptor: EventDescriptor::new(&sources)?,
            local,
            queue: ProcessMutex::default(),
            group,
        })
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<AsyncEvent>> {
        self.queue.lock_or_end_call()
    }

    fn push(&self, event: AsyncEvent) {
        let mut queue = self.lock();
        queue.push_back(event);
        let _ = rustix::io::write(&self.local, &1u64.to_ne_bytes());
    }

    fn pop(&self) -> Option<AsyncEvent> {
        let mut queue = self.lock();
        let event = queue.pop_front();
        if queue.is_empty() {
            let mut count = [0; 8];
            let _ = rustix::io::read(&self.local, &mut count);
        }
        event
    }

    /// Takes the next event of the context, without waiting.
    pub fn take(&self, client: &Context) -> Result<AsyncEvent, Error> {
        loop {
            if let Some(event) = self.pop() {
                return Ok(event);
            }
            match self.group.read_event(client) {
                Ok(()) => {}
                // Another thread may have passed an event on meanwhile.
                Err(error) => return self.pop().ok_or(error),
            }
        }
    }

    /// The descriptor of the context.
    pub fn descriptor(&self) -> &EventDescriptor {
        &self.descriptor
    }
}

/// Checks whether an event is one of the context: of its objects, or of its device.
fn concerns(context: &ContextObject, event: &AsyncEvent) -> bool {
    use AsyncEventKind::*;
    let objects = context.objects();
    let Some(kind) = event.kind else {
        return false;
    };
    match kind {
        CqErr => objects.cqs.find(event.object, |_| ()).is_some(),
        QpFatal | QpReqErr | QpAccessErr | CommEst | SqDrained | QpLastWqeReached => {
            objects.qps.find(event.object, |_| ()).is_some()
        }
        SrqLimitReached => objects.srqs.find(event.object, |_| ()).is_some(),
        PortActive | PortErr | GidChange | DeviceFatal => is_of_device(context, event),
    }
}
