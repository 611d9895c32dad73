//! Event channels (rdma_create_event_channel(3), rdma_get_cm_event(3)). The descriptor of a channel
//! is an epoll instance with the daemon's socket and an eventfd for events of this library, and keeps
//! the O_NONBLOCK setting of the program.
//!
//! The descriptor is readable exactly while rdma_get_cm_event(3) returns an event. The daemon sends
//! only events that the program gets ([`CmChannel::for_rdma_cm`]); before the library discards events
//! of an identifier, it takes them out of the socket ([`EventChannel::drain_daemon`]), and sends those
//! that may follow elsewhere ([`Devices::park_events`]).

use super::devices::Devices;
use super::events::{EventObject, QueuedEvent, deliver, dispatch};
use super::id::IdObject;
use crate::abi::{rdma_cm_event, rdma_event_channel};
use crate::status::{fail_errno, fail_with, pointer_of};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use siw::{CmChannel, CmEvent, Error};
use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// State of a channel, kept alive by its identifiers.
pub struct EventChannel {
    /// The daemon's event channel.
    pub daemon: CmChannel,
    pub devices: &'static Devices,
    epoll: OwnedFd,
    /// Readable while the queue is not empty.
    local: OwnedFd,
    queue: Mutex<VecDeque<QueuedEvent>>,
    /// The end of the daemon was reported to the identifiers.
    gone_reported: AtomicBool,
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
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let local = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        for fd in [daemon.as_fd(), local.as_fd()] {
            epoll::add(
                &epoll,
                fd,
                epoll::EventData::new_u64(0),
                epoll::EventFlags::IN,
            )?;
        }
        Ok(Box::new(EventChannelObject {
            abi: rdma_event_channel {
                fd: epoll.as_raw_fd(),
            },
            channel: Arc::new(EventChannel {
                daemon,
                devices,
                epoll,
                local,
                queue: Mutex::default(),
                gone_reported: AtomicBool::new(false),
            }),
        }))
    }
}

impl EventChannel {
    fn lock_queue(&self) -> MutexGuard<'_, VecDeque<QueuedEvent>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
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
    fn pop(&self) -> Option<QueuedEvent> {
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

    /// Passes all events of the daemon on this channel to their identifiers.
    pub fn drain_daemon(&self) -> Result<(), Error> {
        loop {
            match self.daemon.get_event(Some(Duration::ZERO)) {
                Ok(report) => self.take_report(report),
                Err(Error::Timeout) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    /// Processes an event of the daemon on this channel.
    fn take_report(&self, report: CmEvent) {
        match report {
            // The peer gave up before the program took the request.
            CmEvent::RequestCancelled { request: number } => drop(self.take_matching(|event| {
                matches!(event, QueuedEvent::Request { request, .. } if request.id() == number)
            })),
            report => dispatch(report),
        }
    }

    /// Takes the next event, if there is one.
    fn next_event(&self) -> Result<Option<QueuedEvent>, Error> {
        if let Some(event) = self.pop() {
            return Ok(Some(event));
        }
        match self.daemon.get_event(Some(Duration::ZERO)) {
            Ok(report) => self.take_report(report),
            Err(Error::Timeout) => return Ok(None),
            Err(Error::DaemonGone) if !self.gone_reported.swap(true, Ordering::AcqRel) => {
                IdObject::report_removal(self);
            }
            Err(error) => {
                if matches!(error, Error::DaemonGone) {
                    // Pollers of the descriptor have been told; otherwise it would stay readable.
                    let _ = epoll::delete(&self.epoll, self.daemon.as_fd());
                }
                return Err(error);
            }
        }
        Ok(self.pop())
    }

    /// True in a child of fork(2) of the process that created the channel: the descriptors are those of
    /// the parent, whose events and readiness must not change.
    pub fn is_inherited(&self) -> bool {
        !self.devices.client.is_of_this_process()
    }

    fn is_nonblocking(&self) -> bool {
        rustix::fs::fcntl_getfl(&self.epoll)
            .is_ok_and(|flags| flags.contains(rustix::fs::OFlags::NONBLOCK))
    }

    /// Takes the next event; waits for it unless the program has set O_NONBLOCK.
    pub fn get_event(&self) -> Result<Box<EventObject>, Error> {
        if self.is_inherited() {
            return Err(Error::DaemonGone);
        }
        loop {
            while let Some(event) = self.next_event()? {
                if let Some(event) = deliver(event) {
                    return Ok(event);
                }
            }
            let mut fds = [PollFd::new(&self.epoll, PollFlags::IN)];
            let zero = Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            let timeout = self.is_nonblocking().then_some(&zero);
            if poll(&mut fds, timeout)? == 0 {
                return Err(std::io::Error::from_raw_os_error(libc::EAGAIN).into());
            }
        }
    }
}

/// rdma_create_event_channel(3)
pub unsafe fn create_event_channel() -> *mut rdma_event_channel {
    pointer_of("rdma_create_event_channel", EventChannelObject::create()).cast()
}

/// rdma_destroy_event_channel(3)
pub unsafe fn destroy_event_channel(channel: *mut rdma_event_channel) {
    // SAFETY: `EventChannelObject::create` boxed it; the manual page forbids any later use.
    let object = unsafe { Box::from_raw(channel.cast::<EventChannelObject>()) };
    if !object.channel.is_inherited() {
        // Requests that nobody can take any more are rejected.
        let _ = object.channel.drain_daemon();
        drop(object.channel.take_matching(|_| true));
    }
}

/// rdma_get_cm_event(3)
pub unsafe fn get_cm_event(
    channel: *mut rdma_event_channel,
    event: *mut *mut rdma_cm_event,
) -> c_int {
    if channel.is_null() || event.is_null() {
        fail_errno(libc::EINVAL);
        return -1;
    }
    // Programs destroy channels that another thread waits on. That thread goes on waiting, like a
    // read of a descriptor that is closed meanwhile.
    // SAFETY: a channel of this library.
    let waited_on = unsafe { EventChannelObject::from_abi(channel) }
        .channel
        .clone();
    match waited_on.get_event() {
        Ok(got) => {
            // SAFETY: a pointer to write.
            unsafe { event.write(Box::into_raw(got).cast()) };
            0
        }
        Err(error) => {
            fail_with("rdma_get_cm_event", &error);
            -1
        }
    }
}
