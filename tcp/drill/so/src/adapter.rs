//! The state behind the function table: a host whose clock follows that of the machine.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant as Clock};

use siw_drill::{Errno, Host, Setup};
use siw_tcp::Instant;

/// The host's clock at the start. Far from zero: the stack computes times before it.
const START: Instant = Instant::from_millis(1_000_000);
/// How long a blocking call sleeps between two attempts.
const RETRY_INTERVAL: Duration = Duration::from_micros(50);
/// `netdev_receive` returns without a packet after this time.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(5);
/// The first epoll descriptor; sockets have lower numbers.
const FIRST_EPOLL: i32 = 10_000;

/// The interest list of an epoll instance: events and user data of each socket.
type Interest = BTreeMap<i32, (u32, u64)>;

/// The host, and the state of descriptors that the stack does not keep.
pub(crate) struct AdapterState {
    pub host: Host,
    /// File status flags of sockets: O_NONBLOCK or 0.
    pub flags: HashMap<i32, i32>,
    /// epoll instances by descriptor.
    pub epolls: HashMap<i32, Interest>,
}

/// A host in real time. Its functions may be called from several threads.
pub(crate) struct Adapter {
    state: Mutex<AdapterState>,
    started: Clock,
}

impl Adapter {
    /// Creates an adapter whose clock starts now.
    pub fn new(setup: Setup) -> Adapter {
        Adapter {
            state: Mutex::new(AdapterState {
                host: Host::new(setup, START),
                flags: HashMap::new(),
                epolls: HashMap::new(),
            }),
            started: Clock::now(),
        }
    }

    /// Locks the host and advances it to the present.
    pub fn lock(&self) -> MutexGuard<'_, AdapterState> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = START + self.started.elapsed();
        while state.host.advance_once(now) {}
        state
    }

    /// Returns microseconds since the start, the time of `gettimeofday`.
    pub fn elapsed_micros(&self) -> i64 {
        self.started.elapsed().as_micros() as i64
    }

    /// Retries `call` while it would block; calls it once if the socket is non-blocking.
    pub fn retry_until_done<T>(
        &self,
        fd: i32,
        mut call: impl FnMut(&mut AdapterState) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        loop {
            let mut state = self.lock();
            let result = call(&mut state);
            let blocking = state
                .flags
                .get(&fd)
                .is_none_or(|flags| flags & libc::O_NONBLOCK == 0);
            drop(state);
            match result {
                Err(Errno::EAGAIN | Errno::EINPROGRESS | Errno::EALREADY) if blocking => {
                    std::thread::sleep(RETRY_INTERVAL);
                }
                result => return result,
            }
        }
    }

    /// Retries `call` until it returns a value or `millis` have passed, which gives `None`. A negative
    /// `millis` means no limit, as for poll(2).
    pub fn wait_until<T>(
        &self,
        millis: i32,
        mut call: impl FnMut(&mut AdapterState) -> Result<Option<T>, Errno>,
    ) -> Result<Option<T>, Errno> {
        let limit = u64::try_from(millis).ok().map(Duration::from_millis);
        let begin = Clock::now();
        loop {
            if let Some(value) = call(&mut self.lock())? {
                return Ok(Some(value));
            }
            if limit.is_some_and(|limit| begin.elapsed() >= limit) {
                return Ok(None);
            }
            std::thread::sleep(RETRY_INTERVAL);
        }
    }

    /// Returns the next packet of the stack and its send time in microseconds; waits for it up to
    /// [`RECEIVE_TIMEOUT`].
    pub fn take_packet(&self) -> Option<(i64, Vec<u8>)> {
        let begin = Clock::now();
        loop {
            if let Some((at, packet)) = self.lock().host.take_packet() {
                return Some((at.duration_since(START).as_micros() as i64, packet));
            }
            if begin.elapsed() > RECEIVE_TIMEOUT {
                return None;
            }
            std::thread::sleep(RETRY_INTERVAL);
        }
    }

    /// Creates an epoll instance.
    pub fn epoll_create(&self) -> i32 {
        let mut state = self.lock();
        let fd = state
            .epolls
            .keys()
            .max()
            .map_or(FIRST_EPOLL, |last| last + 1);
        state.epolls.insert(fd, Interest::new());
        fd
    }
}

impl AdapterState {
    /// Returns the events of a socket, as bits of poll(2).
    pub fn poll_events(&mut self, fd: i32) -> Result<i32, Errno> {
        let readiness = self.host.readiness(fd)?;
        let all = [
            (readiness.readable, libc::POLLIN),
            (readiness.writable, libc::POLLOUT),
            (readiness.peer_closed, libc::POLLRDHUP),
            (readiness.error, libc::POLLERR),
            (readiness.hung_up, libc::POLLHUP),
        ];
        Ok(all
            .into_iter()
            .map(|(present, bit)| if present { i32::from(bit) } else { 0 })
            .sum())
    }

    /// bind(2). Also sets the stack's address unless the stack is already running.
    pub fn bind(&mut self, fd: i32, to: SocketAddr) -> Result<(), Errno> {
        if !to.ip().is_unspecified() {
            self.host.set_local_address(to.ip());
        }
        self.host.bind(fd, to)
    }
}
