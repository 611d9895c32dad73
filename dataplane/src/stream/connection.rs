//! One connection: what it still sends, what it does with what it reads.

use siw_tcp::{ConnId, Events, Instant, Stack};

use super::pattern::StreamPattern;
use super::record::StreamRecord;
use super::service::StreamService;
use crate::datapath::rx_frame::RxFrame;

/// Records queued for one connection in one batch; then the next has its turn.
const RECORDS_PER_BATCH: u32 = 64;

/// A connection of the endpoint.
pub(super) struct StreamConnection {
    pub conn: ConnId,
    /// The place of its port.
    pub port: usize,
    pub service: StreamService,
    /// It was opened from here.
    pub is_active: bool,
    /// In the list of those that have something to do.
    pub is_ready: bool,
    /// What arrives is left unread until then.
    pub unread_until: Instant,
    /// Bytes of the pattern queued, and how many there are to be.
    sent: u64,
    to_send: Option<u64>,
    /// Bytes that the peer's stream has to have.
    expected: Option<u64>,
    read: u64,
    checked: u64,
    /// A wrong byte was found.
    is_bad: bool,
    peer_fin: bool,
    /// TCP asked for a longer record.
    wants_probe: bool,
    /// Our FIN is queued.
    pub is_closing: bool,
    pub is_aborted: bool,
}

/// What processing a connection did.
pub(super) struct Progress {
    /// There is more to do at once.
    pub has_more: bool,
    pub read: u64,
    pub checked: u64,
    /// A wrong byte was found just now.
    pub found_bad: bool,
}

/// What connections need of the endpoint.
pub(super) struct StreamContext<'a> {
    pub stack: &'a mut Stack<RxFrame, StreamRecord>,
    pub pattern: StreamPattern,
    /// Blocks for what is returned, to be used again.
    pub blocks: &'a mut Vec<Vec<u8>>,
    pub now: Instant,
}

impl StreamConnection {
    /// `length`: bytes of the pattern in each direction; without, it goes on.
    pub(super) fn new(
        conn: ConnId,
        port: usize,
        service: StreamService,
        length: Option<u64>,
    ) -> StreamConnection {
        StreamConnection {
            conn,
            port,
            service,
            is_active: false,
            is_ready: false,
            unread_until: Instant::ZERO,
            sent: 0,
            to_send: length,
            expected: length,
            read: 0,
            checked: 0,
            is_bad: false,
            peer_fin: false,
            wants_probe: false,
            is_closing: false,
            is_aborted: false,
        }
    }

    /// Notes what TCP says; [`Self::process_data`] acts on it.
    pub(super) fn note_events(&mut self, events: Events) {
        self.peer_fin |= events.contains(Events::PEER_FIN);
        self.wants_probe |= events.contains(Events::MTU_PROBE);
    }

    /// No more of the pattern is sent: the time is over.
    pub(super) fn stop_sending(&mut self) {
        if self.service.sends() {
            self.to_send = Some(self.sent);
        }
    }

    /// Reads and queues what can be read and queued now.
    pub(super) fn process_data(&mut self, context: &mut StreamContext<'_>) -> Progress {
        let (read, checked, was_bad) = (self.read, self.checked, self.is_bad);
        let mut has_more = false;
        if self.unread_until <= context.now {
            if self.service == StreamService::Echo {
                has_more |= self.echo_received(context);
            } else {
                self.read_and_check(context);
            }
        }
        if !self.is_closing && !self.is_aborted {
            has_more |= self.send_pattern(context);
            self.close_when_done(context);
        }
        Progress {
            has_more,
            read: self.read - read,
            checked: self.checked - checked,
            found_bad: self.is_bad && !was_bad,
        }
    }

    fn read_and_check(&mut self, context: &mut StreamContext<'_>) {
        let Some(rx_queue) = context.stack.receive_queue(self.conn) else {
            return;
        };
        let len = rx_queue.len_bytes();
        if self.service.checks() && !self.is_bad {
            let (pattern, mut position, mut is_right) = (context.pattern, self.read, true);
            rx_queue.for_each_chunk(0, len, |bytes| {
                is_right = is_right && pattern.matching(position, bytes) == bytes.len();
                position += bytes.len() as u64;
            });
            self.is_bad = !is_right;
            if is_right {
                self.checked += len as u64;
            }
        }
        rx_queue.consume(len);
        self.read += len as u64;
        if len > 0 && self.service == StreamService::Reset || self.is_bad {
            self.abort(context);
        }
    }

    pub(super) fn abort(&mut self, context: &mut StreamContext<'_>) {
        if !self.is_aborted {
            self.is_aborted = true;
            context.stack.abort(context.now, self.conn);
        }
    }

    /// What was read goes back; what finds no room stays in the receive queue, whose window
    /// tells the peer to wait. True when there is more.
    fn echo_received(&mut self, context: &mut StreamContext<'_>) -> bool {
        let emss = context.stack.effective_mss(self.conn);
        let (mut size, mut room) = self.record_size_and_room(context, emss);
        for _ in 0..RECORDS_PER_BATCH {
            let Some(rx_queue) = context.stack.receive_queue(self.conn) else {
                return false;
            };
            let len = rx_queue.len_bytes().min(size);
            if len == 0 || len > room {
                return false;
            }
            let mut block = context.blocks.pop().unwrap_or_default();
            block.resize(len, 0);
            rx_queue.copy_to_slice(0, &mut block);
            rx_queue.consume(len);
            self.read += len as u64;
            let record = StreamRecord::Block(block);
            let pushed = context
                .stack
                .push_record(self.conn, len as u32, record, true);
            if let Err(StreamRecord::Block(block)) = pushed {
                context.blocks.push(block);
                return false;
            }
            room -= len;
            size = emss;
        }
        true
    }

    /// How long the next record may be, and the room for it and what follows: one that probes a
    /// narrow path (RFC 8899) is longer than the others, and may wait for the window.
    fn record_size_and_room(&mut self, context: &StreamContext<'_>, emss: usize) -> (usize, usize) {
        let room = context.stack.send_room(self.conn);
        let wants_probe = core::mem::take(&mut self.wants_probe);
        let probe = wants_probe.then(|| context.stack.mtu_probe_len(self.conn));
        match probe.flatten() {
            Some(len) => (len, room.max(len)),
            None => (emss, room),
        }
    }

    /// Queues whole segments of the pattern as far as the windows reach. True when there is more.
    fn send_pattern(&mut self, context: &mut StreamContext<'_>) -> bool {
        if !self.service.sends() {
            return false;
        }
        let emss = context.stack.effective_mss(self.conn);
        let (mut size, mut room) = self.record_size_and_room(context, emss);
        for _ in 0..RECORDS_PER_BATCH {
            let left = self.to_send.map_or(u64::MAX, |bytes| bytes - self.sent);
            let len = left.min(size as u64);
            if len == 0 || len > room as u64 {
                return false;
            }
            let record = StreamRecord::Pattern {
                at: self.sent,
                len: len as u32,
            };
            let is_last = len == left;
            let pushed = context
                .stack
                .push_record(self.conn, len as u32, record, is_last);
            if pushed.is_err() {
                return false;
            }
            self.sent += len;
            room -= len as usize;
            size = emss;
        }
        true
    }

    /// Closes our direction once everything is said.
    fn close_when_done(&mut self, context: &mut StreamContext<'_>) {
        let is_done = if self.service.sends() {
            self.to_send == Some(self.sent)
        } else {
            let rx_queue = context.stack.receive_queue(self.conn);
            self.peer_fin && rx_queue.is_none_or(|rx_queue| rx_queue.is_empty())
        };
        if is_done {
            self.is_closing = true;
            context.stack.close(context.now, self.conn);
        }
    }

    /// The connection is over: whether its stream was too short or too long.
    pub(super) fn has_wrong_length(&self) -> bool {
        let is_expected = |bytes| bytes == self.read;
        self.service.checks() && !self.is_bad && !self.expected.is_none_or(is_expected)
    }
}
