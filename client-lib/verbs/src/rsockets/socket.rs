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
use crate::waiting::{Call, Held, wake_all};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use siw::{CmBinding, CmChannel, CmListener, ConnectionRequest, ProcessMutex};
use std::collections::VecDeque;
use std::ffi::c_int;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, MutexGuard};
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
    /// O_NONBLOCK
    pub nonblocking: AtomicBool,
    /// Changed when the thread that waits for the events has taken them, and the others have to look again.
    turn: AtomicU32,
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
    /// An eventfd that becomes readable when the listener is shut down, or another thread has queued
    /// requests.
    pub bell: Arc<OwnedFd>,
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
    /// An eventfd that becomes readable when another thread has taken the answer.
    pub bell: Arc<OwnedFd>,
}

/// Source of events.
enum EventSource {
    Completions(Arc<siw::CompletionChannel>),
    Connections(Arc<CmChannel>, Arc<OwnedFd>),
    /// The channel (None after the daemon has ended), the kernel's listener and the listener's bell.
    Requests(Option<Arc<CmChannel>>, Option<Arc<OwnedFd>>, Arc<OwnedFd>),
}

/// Outcome of one attempt of a call that may have to wait.
pub enum Attempt<T> {
    Done(T),
    Wait,
}

/// Time that a call waits.
#[derive(Clone, Copy)]
pub enum Patience {
    None,
    Unlimited,
    /// Limit that the program has set.
    Timeout(Duration),
    /// Limit of one wait of several.
    Interval(Duration),
}

/// The thread that waits for the descriptors of an rsocket, until it is dropped.
pub struct SocketWait {
    /// None while it is dropped.
    socket: Option<Arc<Rsocket>>,
    /// Its descriptors, which stay open.
    _events: Option<EventSource>,
}

impl Drop for SocketWait {
    fn drop(&mut self) {
        let Some(socket) = self.socket.take() else {
            return;
        };
        // A child of fork(2) has no rsockets.
        if let Ok(mut state) = socket.state.lock() {
            state.has_waiter = false;
            socket.end_turn(&mut state);
        }
        // The program may have closed it meanwhile.
        table::end_if_last(socket);
    }
}

/// Makes an eventfd of an rsocket, not readable.
pub fn new_bell() -> Result<Arc<OwnedFd>, c_int> {
    let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    let bell = bell.map_err(rustix::io::Errno::raw_os_error)?;
    Ok(Arc::new(siw::to_high(bell)))
}

/// Makes the eventfd readable.
pub fn ring(bell: &OwnedFd) {
    let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
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
            nonblocking: AtomicBool::new(nonblocking),
            turn: AtomicU32::new(0),
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

    /// Attempts a call: at once, then for a moment, then after each event.
    ///
    /// # Errors
    /// EAGAIN for a non-blocking socket, after the time, and if the call has to wait
    /// ([`Call::must_wait`]); EINTR after a signal.
    pub fn attempt<T>(
        self: &Arc<Self>,
        call: &mut Call,
        patience: Patience,
        mut attempt: impl FnMut(&mut RsocketState) -> Attempt<T>,
    ) -> Result<T, c_int> {
        drop(call.take_held());
        let mut state = self.lock();
        state.progress();
        if let Attempt::Done(done) = attempt(&mut state) {
            state.empty_calls = 0;
            return Ok(done);
        }
        if matches!(patience, Patience::None) {
            return Err(state.try_later());
        }
        let start = call.start();
        while start.elapsed() < SPIN {
            drop(state);
            // The peer may need this core for its answer.
            std::thread::yield_now();
            state = self.lock();
            state.progress();
            if let Attempt::Done(done) = attempt(&mut state) {
                return Ok(done);
            }
        }
        while !state.arm() {
            state.progress();
            if let Attempt::Done(done) = attempt(&mut state) {
                return Ok(done);
            }
        }
        call.check_interrupted()?;
        let (deadline, is_timed) = match patience {
            Patience::None | Patience::Unlimited => (None, false),
            Patience::Timeout(timeout) => (start.checked_add(timeout), true),
            Patience::Interval(interval) => (Instant::now().checked_add(interval), false),
        };
        if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            return Err(libc::EAGAIN);
        }
        if state.has_waiter {
            // Changed under the lock of the state.
            let turn = self.turn.load(Ordering::Relaxed);
            let held = Held::Other(Box::new(self.clone()));
            call.wait_for_change(&self.turn, turn, deadline, held);
            return Err(libc::EAGAIN);
        }
        state.has_waiter = true;
        let events = state.events();
        let (list, is_stream) = events
            .as_ref()
            .map_or(([-1; 3], false), EventSource::descriptors);
        let held = Held::Socket(SocketWait {
            socket: Some(self.clone()),
            _events: events,
        });
        if is_stream && deadline.is_none() {
            call.wait_for_data(list[0], held);
        } else {
            call.wait_for_descriptors(&list, deadline, is_timed, held);
        }
        Err(libc::EAGAIN)
    }

    /// As [`Self::attempt`], of a call that is not a cancellation point: it waits here.
    pub fn attempt_here<T>(
        self: &Arc<Self>,
        patience: Patience,
        mut attempt: impl FnMut(&mut RsocketState) -> Attempt<T>,
    ) -> Result<T, c_int> {
        Call::run_here(|call| self.attempt(call, patience, &mut attempt))
    }

    /// Takes the pending events, unless other threads poll for them; wakes the threads that wait for the
    /// one that did.
    fn end_turn(&self, state: &mut RsocketState) {
        if self.pollers.load(Ordering::Acquire) == 0 {
            state.take_events();
            self.watchers.wake();
        }
        self.turn.fetch_add(1, Ordering::Relaxed);
        wake_all(&self.turn);
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
            self.end_turn(&mut self.lock());
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

    /// Wakes a thread that waits for requests, after another one has taken several from the channel.
    pub fn pass_requests_on(&self, state: &RsocketState) {
        if let Phase::Listening(listening) = &state.phase
            && !listening.requests.is_empty()
            && self.is_awaited(state)
        {
            ring(&listening.bell);
        }
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

    /// Time that a call with these flags and this limit waits.
    pub fn patience(&self, flags: c_int, timeout: Option<Duration>) -> Patience {
        if flags & libc::MSG_DONTWAIT != 0 || self.nonblocking.load(Ordering::Relaxed) {
            return Patience::None;
        }
        timeout.map_or(Patience::Unlimited, Patience::Timeout)
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
        match &mut self.phase {
            Phase::Stream(stream) => stream.take_events(),
            Phase::Listening(listening) => {
                let _ = rustix::io::read(&*listening.bell, &mut [0; 8]);
            }
            _ => {}
        }
    }

    fn events(&self) -> Option<EventSource> {
        match &self.phase {
            Phase::Stream(stream) => Some(EventSource::Completions(stream.channel.clone())),
            Phase::Connecting(connecting) => {
                let (channel, bell) = (connecting.channel.clone(), connecting.bell.clone());
                Some(EventSource::Connections(channel, bell))
            }
            Phase::Listening(listening) => Some(EventSource::Requests(
                (listening.error == 0).then(|| listening.channel.clone()),
                listening.kernel.clone(),
                listening.bell.clone(),
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
        let (descriptors, _) = self.descriptors();
        let is_open = |number| rustix::io::fcntl_getfd(table::borrow(number)).is_ok();
        descriptors.into_iter().all(is_open)
    }

    /// The descriptors; for a listener those of its channel and of the kernel's listener, if they are
    /// there, and of its bell. True if the first is a stream socket, and the only one.
    fn descriptors(&self) -> ([RawFd; 3], bool) {
        match self {
            EventSource::Completions(channel) => ([channel.as_fd().as_raw_fd(); 3], true),
            EventSource::Connections(channel, bell) => {
                let (channel, bell) = (channel.as_fd().as_raw_fd(), bell.as_raw_fd());
                ([channel, bell, bell], false)
            }
            EventSource::Requests(channel, kernel, bell) => {
                let bell = bell.as_raw_fd();
                let channel = channel.as_ref().map(|channel| channel.as_fd().as_raw_fd());
                let kernel = kernel.as_ref().map(|kernel| kernel.as_raw_fd());
                (
                    [channel.unwrap_or(bell), kernel.unwrap_or(bell), bell],
                    false,
                )
            }
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
