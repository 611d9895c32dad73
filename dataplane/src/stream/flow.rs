//! One connection: what it still sends, what it does with what it reads.

use siw_tcp::{ConnId, Events, Instant, Stack};

use super::pattern::StreamPattern;
use super::service::StreamService;
use super::sink::StreamRecord;
use crate::datapath::rx_frame::RxFrame;

/// Records queued for one connection in one turn; then the next has its turn.
const RECORDS: u32 = 64;

pub(super) struct Flow {
    pub conn: ConnId,
    pub port: usize,
    pub service: StreamService,
    /// It was opened from here.
    pub active: bool,
    /// In the list of those that have something to do.
    pub ready: bool,
    /// What arrives is left unread until then.
    pub unread_until: Instant,
    /// Bytes of the pattern queued, and how many there are to be.
    sent: u64,
    bytes: Option<u64>,
    /// Bytes that the peer's stream has to have.
    expected: Option<u64>,
    read: u64,
    checked: u64,
    bad: bool,
    peer_fin: bool,
    /// TCP asked for a longer record.
    probing: bool,
    /// Our FIN is queued.
    pub closing: bool,
    pub aborted: bool,
}

/// What a step of a flow did.
pub(super) struct Step {
    /// There is more to do at once.
    pub more: bool,
    pub read: u64,
    pub checked: u64,
    /// A wrong byte or a wrong length was found just now.
    pub bad: bool,
}

/// What flows need of their surroundings.
pub(super) struct FlowContext<'a> {
    pub stack: &'a mut Stack<RxFrame, StreamRecord>,
    pub pattern: StreamPattern,
    /// Blocks for what is returned, to be used again.
    pub blocks: &'a mut Vec<Vec<u8>>,
    pub now: Instant,
}

impl Flow {
    pub(super) fn new(
        conn: ConnId,
        port: usize,
        service: StreamService,
        bytes: Option<u64>,
    ) -> Flow {
        Flow {
            conn,
            port,
            service,
            active: false,
            ready: false,
            unread_until: Instant::ZERO,
            sent: 0,
            bytes,
            expected: bytes,
            read: 0,
            checked: 0,
            bad: false,
            peer_fin: false,
            probing: false,
            closing: false,
            aborted: false,
        }
    }

    /// Notes what TCP says; `step` acts on it.
    pub(super) fn note(&mut self, events: Events) {
        self.peer_fin |= events.contains(Events::PEER_FIN);
        self.probing |= events.contains(Events::MTU_PROBE);
    }

    /// No more of the pattern is sent: the time is over.
    pub(super) fn stop_sending(&mut self) {
        if self.service.sends() {
            self.bytes = Some(self.sent);
        }
    }

    /// Reads and queues what can be read and queued now.
    pub(super) fn step(&mut self, a: &mut FlowContext<'_>) -> Step {
        let (read, checked, bad) = (self.read, self.checked, self.bad);
        let mut more = false;
        if self.service == StreamService::Echo {
            more |= self.give_back(a);
        } else if self.unread_until <= a.now {
            self.take_in(a);
        }
        if !self.closing && !self.aborted {
            more |= self.send(a);
            self.finish(a);
        }
        Step {
            more,
            read: self.read - read,
            checked: self.checked - checked,
            bad: self.bad && !bad,
        }
    }

    fn take_in(&mut self, a: &mut FlowContext<'_>) {
        let Some(rx) = a.stack.receive_queue(self.conn) else {
            return;
        };
        let n = rx.len_bytes();
        if self.service.checks() && !self.bad {
            let mut at = self.read;
            let (pattern, mut right) = (a.pattern, true);
            rx.for_each_chunk(0, n, |b| {
                right = right && pattern.matching(at, b) == b.len();
                at += b.len() as u64;
            });
            self.bad = !right;
            if right {
                self.checked += n as u64;
            }
        }
        rx.consume(n);
        self.read += n as u64;
        if n > 0 && self.service == StreamService::Reset || self.bad {
            self.abort(a);
        }
    }

    pub(super) fn abort(&mut self, a: &mut FlowContext<'_>) {
        if !self.aborted {
            self.aborted = true;
            a.stack.abort(a.now, self.conn);
        }
    }

    /// What was read goes back; what finds no room stays in the receive queue, whose window
    /// tells the peer to wait.
    fn give_back(&mut self, a: &mut FlowContext<'_>) -> bool {
        if self.unread_until > a.now {
            return false;
        }
        let emss = a.stack.effective_mss(self.conn);
        let (mut size, mut room) = self.sizes(a, emss);
        for _ in 0..RECORDS {
            let Some(rx) = a.stack.receive_queue(self.conn) else {
                return false;
            };
            let n = rx.len_bytes().min(size);
            if n == 0 || n > room {
                return false;
            }
            let mut block = a.blocks.pop().unwrap_or_default();
            block.resize(n, 0);
            rx.copy_to_slice(0, &mut block);
            rx.consume(n);
            self.read += n as u64;
            if let Err(StreamRecord::Block(b)) =
                a.stack
                    .push_record(self.conn, n as u32, StreamRecord::Block(block), true)
            {
                a.blocks.push(b);
                return false;
            }
            room -= n;
            size = emss;
        }
        true
    }

    /// How long the next record may be, and the room for it and what follows: one that probes a
    /// narrow path (RFC 8899) is longer than the others, and may wait for the window.
    fn sizes(&mut self, a: &FlowContext<'_>, emss: usize) -> (usize, usize) {
        let room = a.stack.send_room(self.conn);
        let probe = core::mem::take(&mut self.probing).then(|| a.stack.mtu_probe_len(self.conn));
        match probe.flatten() {
            Some(n) => (n, room.max(n)),
            None => (emss, room),
        }
    }

    /// Queues whole segments of the pattern as far as the windows reach.
    fn send(&mut self, a: &mut FlowContext<'_>) -> bool {
        if !self.service.sends() {
            return false;
        }
        let emss = a.stack.effective_mss(self.conn);
        let (mut size, mut room) = self.sizes(a, emss);
        for _ in 0..RECORDS {
            let left = self.bytes.map_or(u64::MAX, |b| b - self.sent);
            let n = left.min(size as u64);
            if n == 0 || n > room as u64 {
                return false;
            }
            let piece = StreamRecord::Pattern {
                at: self.sent,
                len: n as u32,
            };
            if a.stack
                .push_record(self.conn, n as u32, piece, n == left)
                .is_err()
            {
                return false;
            }
            self.sent += n;
            room -= n as usize;
            size = emss;
        }
        true
    }

    /// Closes our direction once everything is said.
    fn finish(&mut self, a: &mut FlowContext<'_>) {
        let done = if self.service.sends() {
            self.bytes == Some(self.sent)
        } else {
            self.peer_fin
                && a.stack
                    .receive_queue(self.conn)
                    .is_none_or(|r| r.is_empty())
        };
        if done {
            self.closing = true;
            a.stack.close(a.now, self.conn);
        }
    }

    /// The connection is over: whether its stream was too short or too long.
    pub(super) fn wrong_length(&self) -> bool {
        self.service.checks() && !self.bad && self.expected.is_some_and(|b| b != self.read)
    }
}
