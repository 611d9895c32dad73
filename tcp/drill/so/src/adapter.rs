//! What the table's functions act on: a host whose clock follows the machine's.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant as Clock};

use siw_drill::{Errno, Host, Setup};
use siw_tcp::Instant;

/// The host's clock at the start.
const START: Instant = Instant::from_millis(1_000_000);
/// How often a call that waits looks again.
const NAP: Duration = Duration::from_micros(50);
/// `netdev_receive` tells of nothing after so long.
const PATIENCE: Duration = Duration::from_secs(5);
/// epoll descriptors count from here, apart from sockets.
const EPOLL_FIRST: i32 = 10_000;

/// Interest in sockets: events and data of each.
type Interest = BTreeMap<i32, (u32, u64)>;

pub(crate) struct State {
    pub host: Host,
    /// O_NONBLOCK of sockets.
    pub flags: HashMap<i32, i32>,
    pub epolls: HashMap<i32, Interest>,
}

pub(crate) struct Adapter {
    state: Mutex<State>,
    started: Clock,
}

impl Adapter {
    pub fn new(setup: Setup) -> Adapter {
        Adapter {
            state: Mutex::new(State {
                host: Host::new(setup, START),
                flags: HashMap::new(),
                epolls: HashMap::new(),
            }),
            started: Clock::now(),
        }
    }

    /// The host, with what time brought done.
    pub fn lock(&self) -> MutexGuard<'_, State> {
        let mut s = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = START + self.started.elapsed();
        while s.host.step(now) {}
        s
    }

    /// Microseconds since the start, as `gettimeofday` tells them.
    pub fn micros(&self) -> i64 {
        self.started.elapsed().as_micros() as i64
    }

    /// Calls `f` until it does not ask to wait; once, on a non-blocking socket.
    pub fn wait<T>(
        &self,
        fd: i32,
        mut f: impl FnMut(&mut State) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        loop {
            let mut s = self.lock();
            let r = f(&mut s);
            let blocking = s.flags.get(&fd).is_none_or(|f| f & libc::O_NONBLOCK == 0);
            drop(s);
            match r {
                Err(Errno::EAGAIN | Errno::EINPROGRESS | Errno::EALREADY) if blocking => {
                    std::thread::sleep(NAP);
                }
                r => return r,
            }
        }
    }

    /// As `wait`, for at most `millis`; a negative time is for ever. `None`: it passed.
    pub fn wait_for<T>(
        &self,
        millis: i32,
        mut f: impl FnMut(&mut State) -> Result<Option<T>, Errno>,
    ) -> Result<Option<T>, Errno> {
        let limit = u64::try_from(millis).ok().map(Duration::from_millis);
        let begun = Clock::now();
        loop {
            if let Some(v) = f(&mut self.lock())? {
                return Ok(Some(v));
            }
            if limit.is_some_and(|l| begun.elapsed() >= l) {
                return Ok(None);
            }
            std::thread::sleep(NAP);
        }
    }

    /// The next packet and when it left, in microseconds.
    pub fn receive(&self) -> Option<(i64, Vec<u8>)> {
        let begun = Clock::now();
        loop {
            if let Some((at, p)) = self.lock().host.take_packet() {
                return Some((at.since(START).as_micros() as i64, p));
            }
            if begun.elapsed() > PATIENCE {
                return None;
            }
            std::thread::sleep(NAP);
        }
    }

    pub fn epoll_create(&self) -> i32 {
        let mut s = self.lock();
        let fd = s.epolls.keys().max().map_or(EPOLL_FIRST, |last| last + 1);
        s.epolls.insert(fd, Interest::new());
        fd
    }
}

impl State {
    /// poll's events of a socket.
    pub fn events(&mut self, fd: i32) -> Result<i32, Errno> {
        let r = self.host.ready(fd)?;
        let all = [
            (r.readable, libc::POLLIN),
            (r.writable, libc::POLLOUT),
            (r.peer_closed, libc::POLLRDHUP),
            (r.error, libc::POLLERR),
            (r.hung_up, libc::POLLHUP),
        ];
        Ok(all
            .into_iter()
            .map(|(is, bit)| if is { i32::from(bit) } else { 0 })
            .sum())
    }

    /// The address that the script binds to is the stack's, as long as it has none.
    pub fn bind(&mut self, fd: i32, to: SocketAddr) -> Result<(), Errno> {
        if !to.ip().is_unspecified() {
            self.host.set_local(to.ip());
        }
        self.host.bind(fd, to)
    }
}
