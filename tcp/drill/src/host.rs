//! A host: the stack, its clock, its link, and its sockets. Time passes only when the caller advances it,
//! so that a script always runs in the same way.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::IpAddr;
use std::time::Duration;

use siw_net::{ConnId, FrameInfo, Instant, RxChecksum, VecBuf};
use siw_tcp::{Events, Stack, StackStats, TcpInfo};

use crate::errno::Errno;
use crate::icmp::{self, IcmpReport};
use crate::link::{self, FrameCollector, SentFrame};
use crate::options::Setup;
use crate::sockets::Socket;

/// State of a connection according to its events.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ConnStatus {
    /// The handshake is complete.
    pub connected: bool,
    /// A call has reported the completed handshake to the application.
    pub connect_reported: bool,
    /// The peer closed its direction.
    pub peer_fin: bool,
    /// The connection is closed.
    pub closed: bool,
    /// The pending error, which the next call returns and clears.
    pub error: Option<Errno>,
}

/// A host with one stack and its sockets. Sockets are numbered from 3, like file descriptors. Calls do
/// not block: they fail with [`Errno::EAGAIN`], and the caller advances the time with
/// [`Host::advance_once`].
pub struct Host {
    pub(crate) setup: Setup,
    /// Created by the first `listen` or `connect`, with the options set before.
    pub(crate) stack: Option<Stack<VecBuf, Vec<u8>>>,
    pub(crate) now: Instant,
    sink: FrameCollector,
    /// Packets that the stack sent, with their times.
    sent: VecDeque<(Instant, Vec<u8>)>,
    pub(crate) sockets: BTreeMap<i32, Socket>,
    pub(crate) conns: HashMap<ConnId, ConnStatus>,
    pub(crate) newest: Option<ConnId>,
    /// The last state of the newest connection, which may no longer exist.
    newest_info: Option<TcpInfo>,
    /// The last ICMP error about each pair of ports and peer.
    icmp_errors: HashMap<(u16, u16, IpAddr), Errno>,
}

/// Limit of rounds per point in time, more than the stack needs for all its output. A stack that always
/// has more output would hang the caller.
const MAX_ROUNDS: usize = 10_000;

impl Host {
    /// Creates a host whose clock shows `now`, which should be far from zero: the stack computes earlier times.
    pub fn new(setup: Setup, now: Instant) -> Host {
        Host {
            setup,
            stack: None,
            now,
            sink: FrameCollector::default(),
            sent: VecDeque::new(),
            sockets: BTreeMap::new(),
            conns: HashMap::new(),
            newest: None,
            newest_info: None,
            icmp_errors: HashMap::new(),
        }
    }

    /// Returns the time on the host's clock.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Takes the oldest IP packet that the stack sent, with the time at which it was sent.
    pub fn take_packet(&mut self) -> Option<(Instant, Vec<u8>)> {
        self.sent.pop_front()
    }

    /// Returns the send time of the packet that [`Host::take_packet`] would return.
    pub fn oldest_packet_time(&self) -> Option<Instant> {
        self.sent.front().map(|(at, _)| *at)
    }

    /// Returns the state of the newest connection, or its last state if it no longer exists.
    pub fn newest_connection(&self) -> Option<TcpInfo> {
        self.newest_info
    }

    /// Returns the counters of the stack.
    pub fn stats(&self) -> StackStats {
        self.stack
            .as_ref()
            .map_or_else(StackStats::default, Stack::stats)
    }

    /// Returns the number of connections of the stack, TIME-WAIT included.
    pub fn connection_count(&self) -> usize {
        self.stack.as_ref().map_or(0, Stack::connection_count)
    }

    /// Delivers an IP packet of the peer to the stack and runs the stack. Before the first `listen` or
    /// `connect` every port is CLOSED and answers accordingly (RFC 9293 section 3.10.7.1).
    pub fn receive_packet(&mut self, packet: &[u8]) {
        let is_early = self.stack.is_none();
        if is_early {
            // A temporary stack, so that options can still be set.
            self.stack = Stack::new(self.setup.stack_config(), self.now).ok();
        }
        if let Some(IcmpReport {
            ports: (local, remote_port),
            remote,
            errno,
        }) = icmp::read_icmp_error(packet)
        {
            self.icmp_errors.insert((local, remote_port, remote), errno);
        }
        let frame = link::frame_from_peer(self.setup.config.net.mac, packet);
        self.deliver_frames(vec![frame]);
        self.run_stack();
        if is_early {
            self.stack = None;
        }
    }

    /// Delivers Ethernet frames to the stack.
    fn deliver_frames(&mut self, frames: Vec<Vec<u8>>) {
        let info = FrameInfo {
            checksum: RxChecksum::Unknown,
            rss_hash: 0,
        };
        if let Some(stack) = &mut self.stack {
            stack.receive_burst(
                self.now,
                frames.into_iter().map(|frame| (VecBuf::from(frame), info)),
            );
        }
    }

    /// Runs the stack until it has nothing left to do at the current time.
    pub(crate) fn run_stack(&mut self) {
        for _ in 0..MAX_ROUNDS {
            let Some(stack) = &mut self.stack else { return };
            stack.poll(self.now, &mut self.sink);
            let mut answers = vec![];
            for frame in std::mem::take(&mut self.sink.frames) {
                match link::classify_frame(frame) {
                    SentFrame::Packet(packet) => self.sent.push_back((self.now, packet)),
                    SentFrame::Asked(answer) => answers.push(answer),
                    SentFrame::Ignored => {}
                }
            }
            let done = answers.is_empty() && !stack.has_output();
            self.deliver_frames(answers);
            self.handle_events();
            if done {
                break;
            }
        }
        if let (Some(stack), Some(id)) = (&self.stack, self.newest)
            && let Some(info) = stack.tcp_info(id)
        {
            self.newest_info = Some(info);
        }
    }

    /// Records the events of connections, and queues new connections at their listeners.
    fn handle_events(&mut self) {
        let Some(stack) = &mut self.stack else { return };
        while let Some((id, user, events)) = stack.next_event() {
            let conn = self.conns.entry(id).or_default();
            if events.contains(Events::ACCEPTED) {
                self.newest = Some(id);
                match self.sockets.get_mut(&(user as i32)) {
                    Some(socket) => socket.accept_queue.push_back(id),
                    None => stack.release(self.now, id),
                }
            }
            if events.contains(Events::ACKED) {
                stack.take_acked(id, drop);
            }
            conn.connected |= events.intersects(Events::CONNECTED | Events::ACCEPTED);
            conn.peer_fin |= events.contains(Events::PEER_FIN);
            conn.closed |= events.contains(Events::CLOSED);
            // An ICMP error or a reset is the reason why a connection could not be opened.
            let told = stack.tcp_info(id).filter(|_| !conn.connected);
            let told = told.and_then(|info| {
                let key = (info.local.port(), info.remote.port(), info.remote.ip());
                self.icmp_errors.get(&key).copied()
            });
            for (event, errno) in [
                (Events::RESET, Errno::ECONNRESET),
                (Events::REFUSED, Errno::ECONNREFUSED),
                (Events::TIMED_OUT, told.unwrap_or(Errno::ETIMEDOUT)),
                (Events::UNREACHABLE, told.unwrap_or(Errno::EHOSTUNREACH)),
            ] {
                if events.contains(event) {
                    conn.error = Some(errno);
                }
            }
        }
    }

    /// Advances the clock to the stack's next deadline, at most to `limit`, and runs the stack. Returns
    /// `false` when `limit` is reached.
    pub fn advance_once(&mut self, limit: Instant) -> bool {
        let next = self.stack.as_ref().and_then(Stack::next_deadline);
        match next {
            Some(at) if at <= limit => {
                // The clock always advances: a deadline that stays in the past must not stop it.
                self.now = at.max(self.now + Duration::from_nanos(1)).min(limit);
                self.run_stack();
                self.now < limit
            }
            _ => {
                self.now = self.now.max(limit);
                false
            }
        }
    }
}
