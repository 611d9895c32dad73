//! Asynchronous events (ibv_get_async_event(3)): events of the daemon, with the program's object.
//! The descriptor keeps the O_NONBLOCK setting of the program.
//!
//! The contexts of rdma_cm share one connection. Each has a descriptor of its own, an epoll instance
//! with the daemon's stream and an eventfd: it is readable when an event may be pending. The reader
//! of the stream passes each event on to the contexts that it concerns.

use super::context::ContextObject;
use super::cq::CqObject;
use super::port::PORT;
use super::qp::QpObject;
use super::resting::replace_by_quiet;
use super::srq::SrqObject;
use crate::abi::*;
use crate::status::{log_failure, set_errno};
use rustix::event::{EventfdFlags, PollFd, PollFlags, epoll, eventfd, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use siw::{AsyncEvent, AsyncEventKind, Context, Error};
use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// The contexts of one connection.
#[derive(Default)]
pub struct EventGroup {
    /// Held while an event is read and passed on, so that events stay in order.
    reading: Mutex<()>,
    members: OnceLock<Vec<&'static ContextObject>>,
}

impl EventGroup {
    /// Sets the contexts.
    pub fn set_members(&self, members: Vec<&'static ContextObject>) {
        // Called once, right after the contexts were created.
        let _ = self.members.set(members);
    }

    /// Reads an event and passes it on to the contexts that it concerns.
    fn read_event(&self, client: &Context) -> Result<(), Error> {
        let _reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        let event = client.get_async_event(Some(Duration::ZERO))?;
        log_failure("asynchronous event", &event.reason);
        for context in self.members.get().into_iter().flatten() {
            if let (Some(events), true) = (context.shared_events(), concerns(context, &event)) {
                events.push(event.clone());
            }
        }
        Ok(())
    }
}

/// Asynchronous events of a context that shares its connection.
pub struct SharedEvents {
    epoll: OwnedFd,
    /// Readable while the queue is not empty.
    local: OwnedFd,
    queue: Mutex<VecDeque<AsyncEvent>>,
    group: &'static EventGroup,
}

impl SharedEvents {
    /// Creates the descriptor and the queue of one context.
    pub fn new(client: &Context, group: &'static EventGroup) -> Result<SharedEvents, Error> {
        let instance = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let local = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        for fd in [client.async_fd(), local.as_fd()] {
            let data = epoll::EventData::new_u64(0);
            epoll::add(&instance, fd, data, epoll::EventFlags::IN)?;
        }
        Ok(SharedEvents {
            epoll: instance,
            local,
            queue: Mutex::default(),
            group,
        })
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<AsyncEvent>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Waits for the next event of the context, unless `nonblocking`.
    fn get(&self, client: &Context, nonblocking: bool) -> Result<AsyncEvent, Error> {
        loop {
            if let Some(event) = self.pop() {
                return Ok(event);
            }
            match self.group.read_event(client) {
                Ok(()) => continue,
                Err(Error::Timeout) if nonblocking => {
                    // Another thread may have passed an event on meanwhile.
                    return self.pop().ok_or(Error::Timeout);
                }
                Err(Error::Timeout) => {}
                Err(error) => return self.pop().ok_or(error),
            }
            let mut fds = [PollFd::new(&self.epoll, PollFlags::IN)];
            poll(&mut fds, None)?;
        }
    }

    /// Ends the events after the end of the daemon: the descriptor would stay readable.
    fn end(&self, client: &Context) {
        // In a child of fork(2) the instance is that of the parent.
        if !client.is_of_this_process() {
            return;
        }
        // It fails if that was done before.
        let _ = epoll::delete(&self.epoll, client.async_fd());
    }
}

impl AsFd for SharedEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
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
        PortActive | PortErr => event.object == context.device().info().index,
        DeviceFatal => true,
    }
}

type Element = ibv_async_event__bindgen_ty_1;

/// Finds the object of an event; it counts the event as unacknowledged. None if the object was
/// destroyed, or the event is of another device.
fn find_element(context: &ContextObject, event: &AsyncEvent) -> Option<(ibv_event_type, Element)> {
    use AsyncEventKind::*;
    let kind = event.kind?;
    let objects = context.objects();
    let element = match kind {
        CqErr => objects.cqs.find(event.object, |queue| {
            queue.async_events.deliver();
            Element { cq: queue.as_abi() }
        }),
        QpFatal | QpReqErr | QpAccessErr | CommEst | SqDrained | QpLastWqeReached => {
            objects.qps.find(event.object, |queue_pair| {
                queue_pair.async_events.deliver();
                Element {
                    qp: queue_pair.as_abi(),
                }
            })
        }
        SrqLimitReached => objects.srqs.find(event.object, |queue| {
            queue.async_events.deliver();
            Element {
                srq: queue.as_abi(),
            }
        }),
        PortActive | PortErr if event.object != context.device().info().index => None,
        PortActive | PortErr | DeviceFatal => Some(Element {
            port_num: PORT as c_int,
        }),
    }?;
    Some((kind as u32, element))
}

fn is_nonblocking(fd: c_int) -> bool {
    // SAFETY: reading flags does not access memory.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    flags >= 0 && flags & libc::O_NONBLOCK != 0
}

/// ibv_get_async_event(3)
pub unsafe fn get_async_event(context: *mut ibv_context, out: *mut ibv_async_event) -> c_int {
    // SAFETY: a context of this library.
    let (object, fd) = unsafe { (ContextObject::from_abi(context), (*context).async_fd) };
    loop {
        let nonblocking = is_nonblocking(fd);
        let got = match object.shared_events() {
            Some(events) => events.get(object.client(), nonblocking),
            None => {
                let timeout = nonblocking.then_some(Duration::ZERO);
                let got = object.client().get_async_event(timeout);
                got.inspect(|event| log_failure("asynchronous event", &event.reason))
            }
        };
        let found = match got {
            Ok(event) => find_element(object, &event),
            // The end of the daemon is reported once.
            Err(Error::DaemonGone) if !object.fatal_reported.swap(true, Ordering::Relaxed) => {
                let port_num = PORT as c_int;
                Some((IBV_EVENT_DEVICE_FATAL, Element { port_num }))
            }
            Err(Error::Timeout) => {
                set_errno(libc::EAGAIN);
                return -1;
            }
            Err(Error::DaemonGone) => {
                // Pollers of the descriptor have been told.
                match object.shared_events() {
                    Some(events) => events.end(object.client()),
                    None => object.client().end_async_events(replace_by_quiet),
                }
                set_errno(libc::EIO);
                return -1;
            }
            Err(error) => {
                set_errno(error.errno());
                return -1;
            }
        };
        if let Some((event_type, element)) = found {
            if event_type == IBV_EVENT_DEVICE_FATAL {
                object.fatal_reported.store(true, Ordering::Relaxed);
            }
            let event = ibv_async_event {
                element,
                event_type,
            };
            // SAFETY: a struct to write.
            unsafe { out.write(event) };
            return 0;
        }
    }
}

/// ibv_ack_async_event(3)
pub unsafe fn ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: an event of `get_async_event`, whose object waits for this call before it is freed.
    unsafe {
        let element = (*event).element;
        match (*event).event_type {
            IBV_EVENT_CQ_ERR => CqObject::from_abi(element.cq).async_events.acknowledge(1),
            IBV_EVENT_QP_FATAL
            | IBV_EVENT_QP_REQ_ERR
            | IBV_EVENT_QP_ACCESS_ERR
            | IBV_EVENT_COMM_EST
            | IBV_EVENT_SQ_DRAINED
            | IBV_EVENT_QP_LAST_WQE_REACHED => {
                QpObject::from_abi(element.qp).async_events.acknowledge(1)
            }
            IBV_EVENT_SRQ_LIMIT_REACHED | IBV_EVENT_SRQ_ERR => {
                SrqObject::from_abi(element.srq).async_events.acknowledge(1)
            }
            _ => {}
        }
    }
}
