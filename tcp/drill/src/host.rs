//! A host: the stack, its clock, its link, and the sockets over it. Time passes only when the
//! caller says so, so that a script sees the same run each time.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use siw_tcp::{ConnId, ConnInfo, Events, FrameInfo, Instant, RxChecksum, Stack, Stats, VecBuf};

use crate::errno::Errno;
use crate::link::{self, Sent, Sink};
use crate::options::Setup;
use crate::sockets::Socket;

/// What the sockets know of a connection.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Condition {
    pub connected: bool,
    /// `connect` has told so.
    pub told: bool,
    pub peer_fin: bool,
    pub closed: bool,
    pub error: Option<Errno>,
}

/// See the module.
pub struct Host {
    pub(crate) setup: Setup,
    /// Made by the first `listen` or `connect`: options that are set before configure it.
    pub(crate) stack: Option<Stack<VecBuf, Vec<u8>>>,
    pub(crate) now: Instant,
    sink: Sink,
    sent: VecDeque<(Instant, Vec<u8>)>,
    pub(crate) sockets: BTreeMap<i32, Socket>,
    pub(crate) conns: HashMap<ConnId, Condition>,
    pub(crate) newest: Option<ConnId>,
    info: Option<ConnInfo>,
}

/// More turns than any burst needs: a stack that always owes something would hang the caller.
const TURNS: usize = 10_000;

impl Host {
    /// A host whose clock shows `now`; use a time far from zero.
    pub fn new(setup: Setup, now: Instant) -> Host {
        Host {
            setup,
            stack: None,
            now,
            sink: Sink::default(),
            sent: VecDeque::new(),
            sockets: BTreeMap::new(),
            conns: HashMap::new(),
            newest: None,
            info: None,
        }
    }

    /// The stack's address; of no effect once the stack is there.
    pub fn set_local(&mut self, local: std::net::IpAddr) {
        if self.stack.is_none() {
            self.setup.local = local;
        }
    }

    pub fn now(&self) -> Instant {
        self.now
    }

    /// The oldest packet that left and was not taken, with the time it left.
    pub fn take_packet(&mut self) -> Option<(Instant, Vec<u8>)> {
        self.sent.pop_front()
    }

    /// When the oldest packet that was not taken left.
    pub fn packet_since(&self) -> Option<Instant> {
        self.sent.front().map(|(at, _)| *at)
    }

    /// The newest connection, or what it was last.
    pub fn newest(&self) -> Option<ConnInfo> {
        self.info
    }

    pub fn stats(&self) -> Stats {
        self.stack
            .as_ref()
            .map_or_else(Stats::default, |s| s.stats().clone())
    }

    /// Connections of the stack, TIME-WAIT included.
    pub fn connections(&self) -> usize {
        self.stack.as_ref().map_or(0, Stack::connections)
    }

    /// An IP packet arrives.
    pub fn receive(&mut self, packet: &[u8]) {
        let frame = link::frame(self.setup.config.mac, packet);
        self.deliver(vec![frame]);
        self.turn();
    }

    fn deliver(&mut self, frames: Vec<Vec<u8>>) {
        let info = FrameInfo {
            checksum: RxChecksum::Unknown,
            rss_hash: 0,
        };
        if let Some(s) = &mut self.stack {
            s.receive(
                self.now,
                frames.into_iter().map(|f| (VecBuf::from(f), info)),
            );
        }
    }

    /// Lets the stack do all that it can do now.
    pub(crate) fn turn(&mut self) {
        for _ in 0..TURNS {
            let Some(stack) = &mut self.stack else { return };
            stack.poll(self.now, &mut self.sink);
            let mut answers = vec![];
            for f in std::mem::take(&mut self.sink.frames) {
                match link::take(f) {
                    Sent::Packet(p) => self.sent.push_back((self.now, p)),
                    Sent::Asked(answer) => answers.push(answer),
                    Sent::Nothing => {}
                }
            }
            let quiet = answers.is_empty() && !stack.owes();
            self.deliver(answers);
            self.events();
            if quiet {
                break;
            }
        }
        if let (Some(s), Some(id)) = (&self.stack, self.newest)
            && let Some(info) = s.conn(id)
        {
            self.info = Some(info);
        }
    }

    fn events(&mut self) {
        let Some(stack) = &mut self.stack else { return };
        while let Some((id, user, e)) = stack.next_event() {
            let c = self.conns.entry(id).or_default();
            if e.contains(Events::ACCEPTED) {
                self.newest = Some(id);
                match self.sockets.get_mut(&(user as i32)) {
                    Some(s) => s.queue.push_back(id),
                    None => stack.release(self.now, id),
                }
            }
            if e.contains(Events::ACKED) {
                stack.take_acked(id, drop);
            }
            c.connected |= e.intersects(Events::CONNECTED | Events::ACCEPTED);
            c.peer_fin |= e.contains(Events::PEER_FIN);
            c.closed |= e.contains(Events::CLOSED);
            for (event, errno) in [
                (Events::RESET, Errno::ECONNRESET),
                (Events::REFUSED, Errno::ECONNREFUSED),
                (Events::TIMED_OUT, Errno::ETIMEDOUT),
                (Events::UNREACHABLE, Errno::EHOSTUNREACH),
            ] {
                if e.contains(event) {
                    c.error = Some(errno);
                }
            }
        }
    }

    /// Goes on to the next moment at which the stack wants to be called, at most to `limit`.
    /// `false`: `limit` is reached.
    pub fn step(&mut self, limit: Instant) -> bool {
        let next = self.stack.as_ref().and_then(Stack::next_deadline);
        match next {
            Some(at) if at <= limit => {
                // A deadline that does not pass must not stop the clock.
                self.now = at.max(self.now + Duration::from_nanos(1)).min(limit);
                self.turn();
                self.now < limit
            }
            _ => {
                self.now = self.now.max(limit);
                false
            }
        }
    }
}
