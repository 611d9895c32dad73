//! Event channels (rdma_create_event_channel(3)) and their queues. The descriptor of a channel
//! has as sources the daemon's socket and an eventfd for events of this library, and keeps the
//! O_NONBLOCK setting of the program. Its third source is a timer, once events come later.
//!
//! The descriptor is readable exactly while rdma_get_cm_event(3) returns an event. The daemon sends
//! only events that the program gets ([`CmChannel::for_rdma_cm`]); before the library discards events
//! of an identifier, it takes them out of the socket ([`EventChannel::drain_daemon`]), and sends those
//! that may follow elsewhere ([`Devices::park_events`]).

use super::devices::Devices;
use super::late_events::LateEvents;
use super::queue::QueuedEvent;
use crate::abi::rdma_event_channel;
use crate::descriptor::EventDescriptor;
use crate::status::pointer_of;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::AsFd;
use siw::{CmChannel, Error, KeptDescriptor, ProcessMutex};
use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, MutexGuard};

/// State of a channel, kept alive by its identifiers.
pub struct EventChannel {
    /// The daemon's event channel.
    pub daemon: CmChannel,
    pub devices: &'static Devices,
    pub(super) descriptor: EventDescriptor,
    pub(super) late: LateEvents,
    /// Readable while the queue is not empty.
    local: KeptDescriptor,
    queue: ProcessMutex<VecDeque<QueuedEvent>>,
    /// The end of the daemon was reported to the identifiers.
    pub(super) gone_reported: AtomicBool,
}

/// A channel as programs see it.
#[repr(C)]
pub struct EventChannelObject {
    abi: rdma_event_channel,
    channel: Arc<EventChannel>,
}

impl EventChannelObject {
    /// # Safety
    /// A channel of this library.
    pub unsafe fn from_abi<'a>(channel: *mut rdma_event_channel) -> &'a EventChannelObject {
        // SAFETY: the struct of the header is the first field.
        unsafe { &*channel.cast() }
    }

    /// State kept by identifiers.
    pub fn channel(&self) -> &Arc<EventChannel> {
        &self.channel
    }

    /// Creates a channel.
    pub fn create() -> Result<Box<EventChannelObject>, Error> {
        let devices = Devices::open()?;
        let daemon = CmChannel::for_rdma_cm(&devices.client)?;
        let local = KeptDescriptor::at_high_number(eventfd(
            0,
            EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK,
        )?)?;
        let descriptor = EventDescriptor::new(&[daemon.as_fd(), local.as_fd()])?;
        Ok(Box::new(EventChannelObject {
            abi: rdma_event_channel {
                fd: descriptor.number(),
            },
            channel: Arc::new(EventChannel {
                daemon,
                devices,
                descriptor,
                late: LateEvents::default(),
                local,
                queue: ProcessMutex::default(),
                gone_reported: AtomicBool::new(false),
            }),
        }))
    }
}

impl EventChannel {
    fn lock_queue(&self) -> MutexGuard<'_, VecDeque<QueuedEvent>> {
        self.queue.lock_or_end_call()
    }

    /// Adds an event.
    pub fn push(&self, event: QueuedEvent) {
        let mut queue = self.lock_queue();
        queue.push_back(event);
        self.show_state(&queue);
    }

    /// Updates the readiness of the descriptor, under the lock of the queue so that it matches the
    /// final state.
    fn show_state(&self, queue: &VecDeque<QueuedEvent>) {
        if self.is_inherited() {
            return;
        }
        if queue.is_empty() {
            let mut count = [0; 8];
            let _ = rustix::io::read(&self.local, &mut count);
        } else {
            let _ = rustix::io::write(&self.local, &1u64.to_ne_bytes());
        }
    }

    /// Takes the first event.
    pub fn pop(&self) -> Option<QueuedEvent> {
        let mut queue = self.lock_queue();
        let event = queue.pop_front();
        self.show_state(&queue);
        event
    }

    /// Takes out events that must not be delivered any more.
    pub fn take_matching(&self, is_meant: impl Fn(&QueuedEvent) -> bool) -> Vec<QueuedEvent> {
        let mut queue = self.lock_queue();
        let (taken, kept): (Vec<_>, Vec<_>) = queue.drain(..).partition(is_meant);
        queue.extend(kept);
        self.show_state(&queue);
        taken
    }

    /// True in a child of fork(2) of the process that created the channel: the descriptors are those of
    /// the parent, whose events and readiness must not change.
    pub fn is_inherited(&self) -> bool {
        !self.devices.client.is_of_this_process()
    }
}

/// rdma_create_event_channel(3)
pub unsafe fn create_event_channel() -> *mut rdma_event_channel {
    pointer_of("rdma_create_event_channel", EventChannelObject::create()).cast()
}
