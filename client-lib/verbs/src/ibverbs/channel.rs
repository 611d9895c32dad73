//! Completion channels (ibv_create_comp_channel(3), ibv_get_cq_event(3)): a stream that carries the
//! cookie of a completion queue for each event.

use super::context::{ContextObject, is_inherited};
use super::cq::CqObject;
use super::faulty::Pending;
use crate::abi::{ibv_comp_channel, ibv_context, ibv_cq};
use crate::alarm::Alarm;
use crate::descriptor::EventDescriptor;
use crate::status::{errno_of, pointer_of, set_errno, wake_interval};
use crate::waiting::{Call, Held};
use rustix::fd::{AsFd, AsRawFd};
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown, recv, shutdown};
use siw::{CompletionChannel, Error, ProcessMutex};
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

/// Looks at the first event and leaves it in the stream.
const PEEK: RecvFlags = RecvFlags::PEEK.union(RecvFlags::DONTWAIT);

/// A channel as programs see it.
#[repr(C)]
pub struct ChannelObject {
    abi: ibv_comp_channel,
    shared: Arc<SharedChannel>,
}

/// State of a channel that its queues and the threads that wait for its events share.
pub struct SharedChannel {
    channel: Arc<CompletionChannel>,
    descriptor: EventDescriptor,
    /// Makes the descriptor readable when a completion that the plan holds back may be polled; None without a plan.
    alarm: Option<Alarm>,
    queues: ProcessMutex<ChannelQueues>,
    /// The program has destroyed the channel, perhaps while a thread waits.
    is_destroyed: AtomicBool,
}

/// The completion queues that raise events on a channel, by cookie. Cookies are not reused: events
/// of a destroyed queue match no queue.
#[derive(Default)]
struct ChannelQueues {
    last_cookie: u64,
    /// Events of destroyed queues may be in the stream.
    may_have_stale: bool,
    by_cookie: HashMap<u64, QueuePointer>,
    /// Queues whose last event has yet to be delivered; None while the daemon runs.
    last_events: Option<Vec<u64>>,
    /// The queue that [`SharedChannel::next_cookie_in_turn`] chose last.
    last_woken: u64,
}

#[derive(Clone, Copy)]
struct QueuePointer(*const CqObject);

// SAFETY: a completion queue may be used from any thread; it is in the table as long as it exists.
unsafe impl Send for QueuePointer {}

impl ChannelObject {
    /// # Safety
    /// A channel of this library.
    pub unsafe fn from_abi<'a>(channel: *mut ibv_comp_channel) -> &'a ChannelObject {
        // SAFETY: the struct of the header is the first field.
        unsafe { &*channel.cast() }
    }

    /// The state that its queues share.
    pub fn shared(&self) -> &Arc<SharedChannel> {
        &self.shared
    }
}

impl SharedChannel {
    fn lock_queues(&self) -> MutexGuard<'_, ChannelQueues> {
        self.queues.lock_or_end_call()
    }

    /// The object of the client library.
    pub fn channel(&self) -> &Arc<CompletionChannel> {
        &self.channel
    }

    /// Returns the cookie for a new queue.
    pub fn next_cookie(&self) -> u64 {
        let mut queues = self.lock_queues();
        queues.last_cookie += 1;
        queues.last_cookie
    }

    /// Adds a queue, which gets the events with the cookie.
    pub fn attach(&self, cookie: u64, queue: &CqObject) {
        self.lock_queues()
            .by_cookie
            .insert(cookie, QueuePointer(queue));
    }

    /// Removes a queue, which gets no more events.
    pub fn detach(&self, cookie: u64) {
        let mut queues = self.lock_queues();
        queues.by_cookie.remove(&cookie);
        queues.may_have_stale = true;
    }

    /// Discards events of destroyed queues that are first in the stream: the descriptor is readable
    /// exactly while an event can be taken.
    pub fn drop_stale_events(&self) {
        self.drop_stale(&mut self.lock_queues());
    }

    fn drop_stale(&self, queues: &mut ChannelQueues) {
        while queues.may_have_stale {
            let mut cookie = [0; 8];
            let seen = recv(self.channel.as_fd(), &mut cookie, PEEK);
            match seen.map(|(_, length)| length) {
                Ok(8) if !queues.by_cookie.contains_key(&u64::from_ne_bytes(cookie)) => {
                    let _ = recv(self.channel.as_fd(), &mut cookie, RecvFlags::DONTWAIT);
                }
                Err(Errno::AGAIN) => queues.may_have_stale = false,
                _ => return,
            }
        }
    }

    /// Takes the first event of a queue that exists, without waiting. The length is 0 after the end of
    /// the daemon.
    fn take_event(&self) -> Result<([u8; 8], usize), Errno> {
        let mut queues = self.lock_queues();
        self.drop_stale(&mut queues);
        let mut cookie = [0; 8];
        let (_, length) = recv(self.channel.as_fd(), &mut cookie, RecvFlags::DONTWAIT)?;
        self.drop_stale(&mut queues);
        Ok((cookie, length))
    }

    /// Called when the daemon has ended. Each queue gets one more event, so that a sleeping program
    /// finds its requests flushed, and another each time that the program arms it before it has polled
    /// everything. Returns the cookie of a queue with an event.
    fn next_last_event(&self) -> Option<u64> {
        let mut queues = self.lock_queues();
        let ChannelQueues {
            by_cookie,
            last_events,
            ..
        } = &mut *queues;
        // SAFETY: queues in the table exist; `destroy_cq` takes the table's lock before it frees one.
        let take_event = |queue: &QueuePointer| unsafe { &*queue.0 }.cq().take_event_after_end();
        let all = || by_cookie.keys().copied().collect();
        while let Some(cookie) = last_events.get_or_insert_with(all).pop() {
            if let Some(queue) = by_cookie.get(&cookie) {
                take_event(queue);
                return Some(cookie);
            }
        }
        let mut others = by_cookie.iter();
        others.find_map(|(cookie, queue)| take_event(queue).then_some(*cookie))
    }

    /// The cookies of the queues in turn, for a program that is woken without an event.
    #[cold]
    fn next_cookie_in_turn(&self) -> Option<u64> {
        let mut queues = self.lock_queues();
        let last = queues.last_woken;
        let cookies = queues.by_cookie.keys().copied();
        // Cookies after the last one come first.
        let next = cookies.min_by_key(|cookie| (*cookie <= last, *cookie))?;
        queues.last_woken = next;
        Some(next)
    }

    /// Wakes a thread that waits for an event at that time, for completions that the plan holds back.
    pub fn wake_at(&self, time: Instant) {
        if let Some(alarm) = &self.alarm {
            alarm.set_no_later(time);
        }
    }

    /// When the time of a held back completion has come: the cookie of an armed queue with such a completion. Without
    /// one, that of any armed queue, which gets an event too many: the descriptor was readable, and the program must
    /// not wait.
    #[cold]
    fn take_held_event(&self) -> Option<u64> {
        let alarm = self.alarm.as_ref()?;
        let now = Instant::now();
        if !alarm.is_due(now) {
            return None;
        }
        alarm.set(None);
        let queues = self.lock_queues();
        let (mut due, mut armed) = (Vec::new(), None);
        for (cookie, queue) in &queues.by_cookie {
            // SAFETY: queues in the table exist; `destroy_cq` takes the table's lock before it frees one.
            let queue = unsafe { &*queue.0 };
            if let Some(time) = queue.context().release_withheld(now) {
                alarm.set_no_later(time);
            }
            match queue.faults().and_then(|faults| faults.pending(now)) {
                Some(Pending::Completion) => due.push((*cookie, queue)),
                Some(Pending::At(time)) => alarm.set_no_later(time),
                Some(Pending::Nothing) => armed = Some((*cookie, queue)),
                None => {}
            }
        }
        if due.len() > 1 {
            alarm.set_no_later(now);
        }
        let (cookie, queue) = due.first().copied().or(armed)?;
        if let Some(faults) = queue.faults() {
            faults.disarm();
        }
        Some(cookie)
    }

    fn is_destroyed(&self) -> bool {
        self.is_destroyed.load(Ordering::Acquire)
    }

    fn has_queues(&self) -> bool {
        !self.lock_queues().by_cookie.is_empty()
    }
}

/// ibv_create_comp_channel(3)
pub unsafe fn create_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    // SAFETY: a context of this library.
    let object = unsafe { ContextObject::from_abi(context) };
    let channel = CompletionChannel::new(object.client()).and_then(|channel| {
        let alarm = object.faults().map(|_| Alarm::new()).transpose()?;
        let sources = [channel.as_fd()].into_iter();
        let sources = sources.chain(alarm.as_ref().map(AsFd::as_fd));
        let descriptor = EventDescriptor::new(&sources.collect::<Vec<_>>())?;
        object.hold();
        Ok(Box::new(ChannelObject {
            abi: ibv_comp_channel {
                context,
                fd: descriptor.number(),
                refcnt: 0,
            },
            shared: Arc::new(SharedChannel {
                channel,
                descriptor,
                alarm,
                queues: ProcessMutex::default(),
                is_destroyed: AtomicBool::new(false),
            }),
        }))
    });
    pointer_of("ibv_create_comp_channel", channel).cast()
}

/// ibv_destroy_comp_channel(3)
pub unsafe fn destroy_channel(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: an object of this library, which holds its context.
    let context = unsafe { (*channel).context };
    // SAFETY: as above.
    if unsafe { is_inherited(context) } {
        return 0;
    }
    // SAFETY: a channel of this library.
    let shared = unsafe { ChannelObject::from_abi(channel) }.shared();
    let unused = if shared.has_queues() {
        Err(Error::Refused {
            errno: libc::EBUSY,
            reason: "completion queues still use the channel".into(),
        })
    } else {
        // A thread that waits for events, as one of InfiniStore does, sees the end of the stream.
        shared.is_destroyed.store(true, Ordering::Release);
        let _ = shutdown(shared.channel.as_fd(), Shutdown::Read);
        // SAFETY: `create_channel` boxed it and held the context; the manual page forbids any later use.
        unsafe {
            drop(Box::from_raw(channel.cast::<ChannelObject>()));
            ContextObject::release(context);
        }
        Ok(())
    };
    errno_of("ibv_destroy_comp_channel", unused)
}

/// Time that an ending daemon has between closing a channel and closing the control socket, after which
/// requests are flushed. It takes milliseconds unless the machine is short of processors or memory.
const TIME_TO_END: Duration = Duration::from_secs(10);

/// ibv_get_cq_event(3)
pub unsafe fn get_cq_event(
    call: &mut Call,
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    let object = match call.take_held() {
        // The program may have destroyed the channel meanwhile.
        Some(Held::Channel(object)) => object,
        // SAFETY: a channel of this library, whose context is open.
        _ if unsafe { is_inherited((*channel).context) } => {
            // The events are those of the parent.
            set_errno(libc::EIO);
            return -1;
        }
        // SAFETY: as above.
        _ => unsafe { ChannelObject::from_abi(channel) }.shared().clone(),
    };
    let interval = wake_interval();
    let is_woken = call.has_timed_out();
    let interrupted = call.check_interrupted();
    loop {
        let chosen = match object.take_event() {
            Err(Errno::AGAIN) if is_woken => object.next_cookie_in_turn(),
            Err(Errno::AGAIN) => object.take_held_event(),
            Ok((cookie, 8)) => Some(u64::from_ne_bytes(cookie)),
            Ok(_) if object.is_destroyed() => {
                set_errno(libc::EIO);
                return -1;
            }
            // The daemon has ended.
            Ok(_) => {
                object.channel.await_end(TIME_TO_END);
                let Some(last) = object.next_last_event() else {
                    // Pollers of the descriptor have been told.
                    object.descriptor.silence(object.channel.as_fd());
                    set_errno(libc::EIO);
                    return -1;
                };
                Some(last)
            }
            Err(error) => {
                set_errno(error.raw_os_error());
                return -1;
            }
        };
        let Some(cookie) = chosen else {
            if object.descriptor.is_nonblocking() {
                set_errno(libc::EAGAIN);
            } else if let Err(errno) = interrupted {
                set_errno(errno);
            } else {
                let stream = match &object.alarm {
                    None => object.channel.as_fd().as_raw_fd(),
                    Some(_) => object.descriptor.number(),
                };
                let held = Held::Channel(object.clone());
                match interval {
                    None if object.alarm.is_none() => call.wait_for_data(stream, held),
                    interval => {
                        let deadline =
                            interval.and_then(|interval| Instant::now().checked_add(interval));
                        call.wait_for_descriptors(&[stream], deadline, false, held);
                    }
                }
            }
            return -1;
        };
        let queues = object.lock_queues();
        let Some(found) = queues.by_cookie.get(&cookie) else {
            continue;
        };
        // SAFETY: it is in the table. `destroy_cq` takes the table's lock before it frees the
        // queue, and afterwards waits for the event to be acknowledged.
        let queue = unsafe { &*found.0 };
        queue.events.deliver();
        if let Some(faults) = queue.faults() {
            faults.disarm();
        }
        // SAFETY: two pointers to write.
        unsafe {
            cq.write(queue.as_abi());
            cq_context.write((*queue.as_abi()).cq_context);
        }
        return 0;
    }
}

/// ibv_ack_cq_events(3)
pub unsafe fn ack_cq_events(cq: *mut ibv_cq, count: u32) {
    // SAFETY: a completion queue of this library.
    unsafe { CqObject::from_abi(cq) }.events.acknowledge(count);
}
