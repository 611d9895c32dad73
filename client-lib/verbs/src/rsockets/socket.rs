//! An rsocket from creation to end, and waiting in its calls.
//!
//! The descriptor of an rsocket is an epoll instance with the descriptors that report its events: a
//! thread that waits for it to become readable, in poll(2) or in an epoll instance of its own, then
//! checks the rsocket. Of the threads that wait in calls of one rsocket, one waits for these
//! descriptors, and the others wait for that thread.

use super::mappings::Mappings;
use super::options::Options;
use super::stream::Stream;
use super::table;
use super::watchers::Watchers;
use crate::mark::Mark;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use siw::{CmBinding, CmChannel, CmListener, ConnectionRequest, ProcessMutex};
use std::collections::VecDeque;
use std::ffi::c_int;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Spinning time of a waiting call before it sleeps: a peer on the same machine answers within it.
const SPIN: Duration = Duration::from_micros(10);

/// Number of EAGAIN results after which a non-blocking program yields its core.
pub const CALLS_BEFORE_YIELD: u32 = 16;

/// An rsocket; it may have several descriptors.
pub struct Rsocket {
    state: ProcessMutex<RsocketState>,
    /// Mark of the open file of its descriptors.
    pub mark: Mark,
    /// Notified when the thread that waits for events has taken them.
    events_taken: Condvar,
    /// O_NONBLOCK
    pub nonblocking: AtomicBool,
    /// Threads that wait for it in rpoll(3) and similar calls, and take the events.
    pollers: AtomicU32,
    pub watchers: Watchers,
}

/// Mutable state of an rsocket.
pub struct RsocketState {
    pub phase: Phase,
    pub options: Options,
    pub family: c_int,
    pub local: Option<SocketAddr>,
    pub peer: Option<SocketAddr>,
    /// Pending error for SO_ERROR.
    pub error: c_int,
    /// A call of connect(2) has returned the outcome.
    pub is_connect_reported: bool,
    /// Memory that the peer may write to.
    pub mappings: Mappings,
    /// A thread waits for the descriptors.
    has_waiter: bool,
    /// Consecutive non-blocking calls that found nothing to do.
    empty_calls: u32,
}

/// Phase of an rsocket.
pub enum Phase {
    New,
    Bound(CmBinding),
    Listening(Listening),
    Connecting(Connecting),
    Stream(Box<Stream>),
    /// A connect has failed.
    Failed,
}

/// A listener and its pending requests.
pub struct Listening {
    pub _listener: CmListener,
    pub channel: Arc<CmChannel>,
    pub requests: VecDeque<ConnectionRequest>,
    /// Connections accepted before the program calls raccept(3).
    pub early: VecDeque<EarlyConnection>,
    /// A listener of the kernel at the same port, whose connections it accepts too.
    pub kernel: Option<Arc<OwnedFd>>,
    /// An eventfd that becomes readable when the listener is shut down.
    pub end: Arc<OwnedFd>,
    /// Error of accepting connections, once the daemon has ended; 0 before.
    pub error: c_int,
    /// The channel makes the descriptor of the rsocket readable.
    pub is_channel_watched: bool,
}

/// A connection accepted before the program calls raccept(3), with its addresses.
pub struct EarlyConnection {
    pub stream: Box<Stream>,
    pub local: Option<SocketAddr>,
    pub peer: Option<SocketAddr>,
}

/// A connect that has not been answered.
pub struct Connecting {
    pub stream: Box<Stream>,
    pub channel: Arc<CmChannel>,
}

/// Source of events.
enum EventSource {
    Completions(Arc<siw::CompletionChannel>),
    Connections(Arc<CmChannel>),
    /// The channel (None after the daemon has ended), the kernel's listener and the listener's end.
    Requests(Option<Arc<CmChannel>>, Option<Arc<OwnedFd>>, Arc<OwnedFd>),
}

/// Outcome of one attempt of a call that may have to wait.
pub enum Attempt<T> {
    Done(T),
    Wait,
}

impl Rsocket {
    /// Creates an rsocket without a descriptor.
    pub fn new(phase: Phase, family: c_int, options: Options, nonblocking: bool) -> Rsocket {
        Rsocket {
            state: ProcessMutex::new(RsocketState {
                phase,
                options,
                family,
                local: None,
                peer: None,
                error: 0,
                is_connect_reported: false,
                mappings: Mappings::default(),
                has_waiter: false,
                empty_calls: 0,
            }),
            mark: Mark::next(),
            events_taken: Condvar::new(),
            nonblocking: AtomicBool::new(nonblocking),
            pollers: AtomicU32::new(0),
            watchers: Watchers::default(),
        }
    }

    /// Takes the phase out of a closed rsocket.
    pub fn into_phase(self) -> Phase {
        self.state.into_inner().phase
    }

    /// Locks the state.
    pub fn lock(&self) -> MutexGuard<'_, RsocketState> {
        self.state.lock_or_end_call()
    }

    /// Repeats an attempt until it is done: at once, then for a moment, then after each event.
    /// EAGAIN for a non-blocking socket or after the timeout, EINTR after a signal.
    pub fn attempt<T>(
        &self,
        blocks: bool,
        timeout: Option<Duration>,
        mut attempt: impl FnMut(&mut RsocketState) -> Attempt<T>,
    ) -> Result<T, c_int> {
        let mut state = self.lock();
        state.progress();
        if let Attempt::Done(done) = attempt(&mut state) {
            state.empty_calls = 0;
            return Ok(done);
        }
        if !blocks {
            return Err(state.try_later());
        }
        drop(state);
        let start = Instant::now();
        while start.elapsed() < SPIN {
            // The peer may need this core for its answer.
            std::thread::yield_now();
            let mut state = self.lock();
            state.progress();
            if let Attempt::Done(done) = attempt(&mut state) {
                return Ok(done);
            }
        }
        let deadline = timeout.map(|timeout| start + timeout);
        let mut state = self.lock();
        loop {
            state.progress();
            if let Attempt::Done(done) = attempt(&mut state) {
                return Ok(done);
            }
            if state.arm() {
                state = self.wait_for_event(state, deadline)?;
            }
        }
    }

    /// Waits until an event has occurred.
    fn wait_for_event<'a>(
        &'a self,
        mut state: MutexGuard<'a, RsocketState>,
        deadline: Option<Instant>,
    ) -> Result<MutexGuard<'a, RsocketState>, c_int> {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Err(libc::EAGAIN);
        }
        if state.has_waiter {
            return Ok(match left {
                Some(left) => {
                    let waited = self.events_taken.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => {
                    let waited = self.events_taken.wait(state);
                    waited.unwrap_or_else(PoisonError::into_inner)
                }
            });
        }
        state.has_waiter = true;
        let events = state.events();
        drop(state);
        let waited = events.map_or(Ok(()), |events| events.wait(left));
        let mut state = self.lock();
        state.has_waiter = false;
        self.take_events(&mut state);
        self.events_taken.notify_all();
        waited.map(|()| state)
    }

    /// Takes the pending events, unless another thread polls for them.
    fn take_events(&self, state: &mut RsocketState) {
        if self.pollers.load(Ordering::Acquire) == 0 {
            state.take_events();
            self.watchers.wake();
        }
    }

    /// Registers a thread that is about to wait for the descriptor. False: check the socket again
    /// first.
    pub fn start_polling(&self) -> bool {
        self.pollers.fetch_add(1, Ordering::AcqRel);
        self.lock().arm()
    }

    /// Unregisters a polling thread.
    pub fn end_polling(&self) {
        if self.pollers.fetch_sub(1, Ordering::AcqRel) == 1 {
            let mut state = self.lock();
            self.take_events(&mut state);
            self.events_taken.notify_all();
        }
    }

    /// Takes the events, for an epoll instance of the program that has seen the descriptor
    /// readable.
    pub fn take_events_of_watcher(&self) {
        if self.pollers.load(Ordering::Acquire) == 0 {
            self.lock().take_events();
        }
    }

    /// Checks whether a thread waits for events of the rsocket.
    pub fn is_awaited(&self, state: &RsocketState) -> bool {
        self.pollers.load(Ordering::Acquire) > 0 || state.has_waiter
    }

    /// Checks that the descriptors of its events have not been closed by the program.
    pub fn has_events(&self) -> bool {
        let events = self.lock().events();
        events.is_none_or(|events| events.is_open())
    }

    /// Current events, as poll(2) would report them.
    pub fn readiness(&self) -> i16 {
        let mut state = self.lock();
        state.progress();
        self.forget_ended_channel(&mut state);
        state.readiness()
    }

    /// Stops watching the channel of an ended daemon beside a listener of the kernel, which alone makes
    /// the descriptor readable then.
    fn forget_ended_channel(&self, state: &mut RsocketState) {
        if let Phase::Listening(listening) = &mut state.phase
            && listening.error != 0
            && listening.kernel.is_some()
            && std::mem::take(&mut listening.is_channel_watched)
            && let Some(descriptor) = table::descriptor_of(self)
        {
            // Duplicates are of the same epoll instance. It fails if the program has closed them.
            let _ = epoll::delete(table::borrow(descriptor), &*listening.channel);
        }
    }

    /// As [`readiness`](Self::readiness), of a socket that is armed: every later change makes an event.
    pub fn armed_readiness(&self) -> i16 {
        let mut state = self.lock();
        let mut ready = 0;
        // The first check may complete a connect, whose stream has other events.
        for _ in 0..2 {
            state.arm();
            state.progress();
            self.forget_ended_channel(&mut state);
            ready = state.readiness();
            if state.arm() {
                break;
            }
        }
        ready
    }

    /// Checks whether a call with these flags blocks.
    pub fn blocks(&self, flags: c_int) -> bool {
        flags & libc::MSG_DONTWAIT == 0 && !self.nonblocking.load(Ordering::Relaxed)
    }
}

impl RsocketState {
    /// Returns EAGAIN. A program that retries without waiting yields at times: its peer, or siwd,
    /// may need the core that it uses.
    pub fn try_later(&mut self) -> c_int {
        self.empty_calls += 1;
        if self.empty_calls.is_multiple_of(CALLS_BEFORE_YIELD) {
            std::thread::yield_now();
        }
        libc::EAGAIN
    }

    /// Processes all that has happened since the last call.
    pub fn progress(&mut self) {
        match &mut self.phase {
            Phase::Stream(stream) => stream.progress(),
            Phase::Connecting(_) => self.progress_connect(),
            Phase::Listening(listening) => listening.take_requests(),
            Phase::New | Phase::Bound(_) | Phase::Failed => {}
        }
    }

    /// Arms the next event. False: it was armed just now, check again. True: wait for it.
    pub fn arm(&mut self) -> bool {
        match &mut self.phase {
            Phase::Stream(stream) => stream.arm(),
            // What another thread has taken from the channel makes no event.
            Phase::Listening(listening) => {
                listening.requests.is_empty() && listening.early.is_empty()
            }
            _ => true,
        }
    }

    fn take_events(&mut self) {
        if let Phase::Stream(stream) = &mut self.phase {
            stream.take_events();
        }
    }

    fn events(&self) -> Option<EventSource> {
        match &self.phase {
            Phase::Stream(stream) => Some(EventSource::Completions(stream.channel.clone())),
            Phase::Connecting(connecting) => {
                Some(EventSource::Connections(connecting.channel.clone()))
            }
            Phase::Listening(listening) => Some(EventSource::Requests(
                (listening.error == 0).then(|| listening.channel.clone()),
                listening.kernel.clone(),
                listening.end.clone(),
            )),
            _ => None,
        }
    }

    fn readiness(&mut self) -> i16 {
        match &mut self.phase {
            Phase::New | Phase::Bound(_) => libc::POLLOUT | libc::POLLHUP,
            Phase::Failed => libc::POLLIN | libc::POLLOUT | libc::POLLERR | libc::POLLHUP,
            Phase::Connecting(_) => 0,
            Phase::Listening(listening) if !listening.is_empty() => libc::POLLIN,
            Phase::Listening(listening) if listening.has_failed() => libc::POLLIN | libc::POLLERR,
            Phase::Listening(_) => 0,
            Phase::Stream(stream) => {
                let mut ready = 0;
                if stream.can_receive() {
                    ready |= libc::POLLIN;
                }
                if !stream.readable {
                    ready |= libc::POLLRDHUP;
                }
                // A write that fails immediately does not block either.
                if !stream.writable || stream.can_send() {
                    ready |= libc::POLLOUT;
                }
                // Only after all data is read: some programs take POLLHUP for an error.
                if !stream.connected && stream.received() == 0 {
                    ready |= libc::POLLHUP;
                }
                if stream.error != 0 {
                    ready |= libc::POLLERR;
                }
                ready
            }
        }
    }

    /// Returns and clears the pending error.
    pub fn take_error(&mut self) -> c_int {
        self.progress();
        if let Phase::Stream(stream) = &mut self.phase
            && stream.error != 0
        {
            return std::mem::take(&mut stream.error);
        }
        std::mem::take(&mut self.error)
    }
}

impl EventSource {
    fn is_open(&self) -> bool {
        let is_open = |fd| rustix::io::fcntl_getfd(fd).is_ok();
        self.descriptors().into_iter().all(is_open)
    }

    /// The descriptors; for a listener those of its channel and of the kernel's listener, if they are
    /// there, and of its end.
    fn descriptors(&self) -> [BorrowedFd<'_>; 3] {
        match self {
            EventSource::Completions(channel) => [channel.as_fd(); 3],
            EventSource::Connections(channel) => [channel.as_fd(); 3],
            EventSource::Requests(channel, kernel, end) => {
                let channel = channel
                    .as_ref()
                    .map_or(end.as_fd(), |channel| channel.as_fd());
                let kernel = kernel.as_ref().map_or(end.as_fd(), |kernel| kernel.as_fd());
                [channel, kernel, end.as_fd()]
            }
        }
    }

    fn wait(&self, timeout: Option<Duration>) -> Result<(), c_int> {
        let mut fds = self
            .descriptors()
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        let timeout = timeout.map(to_timespec);
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => Ok(()),
            Err(error) => Err(error.raw_os_error()),
        }
    }
}

impl Listening {
    /// Checks that no connection can come any more.
    fn has_failed(&self) -> bool {
        self.error != 0 && self.kernel.is_none()
    }

    /// Checks that no connection waits to be accepted.
    fn is_empty(&self) -> bool {
        let of_kernel = self.kernel.as_ref().is_some_and(|kernel| {
            let mut fds = [PollFd::new(kernel, PollFlags::IN)];
            poll(&mut fds, Some(&to_timespec(Duration::ZERO))).is_ok_and(|ready| ready > 0)
        });
        self.requests.is_empty() && self.early.is_empty() && !of_kernel
    }
}

/// Converts a timeout of poll(2).
pub fn to_timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

/// Adds a source of events to the epoll instance that is the descriptor of the rsocket.
pub fn add_to_descriptor(descriptor: impl AsFd, events: impl AsFd) -> Result<(), c_int> {
    let data = epoll::EventData::new_u64(0);
    epoll::add(descriptor, events, data, epoll::EventFlags::IN)
        .map_err(rustix::io::Errno::raw_os_error)
}

/// Creates the descriptor of a new rsocket.
pub fn new_descriptor() -> Result<OwnedFd, c_int> {
    // CLOEXEC does not matter: the connection does not survive exec(3).
    epoll::create(epoll::CreateFlags::CLOEXEC).map_err(rustix::io::Errno::raw_os_error)
}
