//! One connection: its service, the data it still sends, and the check of received data.

use siw_net::{ConnId, Instant};
use siw_tcp::{Events, Stack};

use crate::pattern::StreamPattern;
use crate::record::StreamRecord;
use crate::service::StreamService;
use siwd::datapath::rx_frame::RxFrame;

/// Records queued for one connection in one batch, before the next connection's turn.
const RECORDS_PER_BATCH: u32 = 64;

/// A connection of the endpoint.
pub(super) struct StreamConnection {
    pub conn: ConnId,
    /// Index of its port.
    pub port: usize,
    pub service: StreamService,
    /// Opened by this endpoint.
    pub is_active: bool,
    /// In the list of ready connections.
    pub is_ready: bool,
    /// Received data stays unread until this time.
    pub unread_until: Instant,
    /// Bytes of the pattern queued so far, and in total.
    sent: u64,
    to_send: Option<u64>,
    /// Expected length of the peer's stream, in bytes.
    expected: Option<u64>,
    read: u64,
    checked: u64,
    /// A wrong byte was found.
    is_bad: bool,
    peer_fin: bool,
    /// Our FIN is queued.
    pub is_closing: bool,
    pub is_aborted: bool,
}

/// Result of processing a connection.
pub(super) struct Progress {
    /// More work can be done at once.
    pub has_more: bool,
    pub read: u64,
    pub checked: u64,
    /// A wrong byte was found in this call.
    pub found_bad: bool,
}

/// Parts of the endpoint that connections use.
pub(super) struct StreamContext<'a> {
    pub stack: &'a mut Stack<RxFrame, StreamRecord>,
    pub pattern: StreamPattern,
    /// Spare blocks for data to echo.
    pub blocks: &'a mut Vec<Vec<u8>>,
    pub now: Instant,
}

impl StreamConnection {
    /// `length`: bytes of the pattern in each direction; `None`: unlimited.
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
            is_closing: false,
            is_aborted: false,
        }
    }

    /// Records TCP's events; [`Self::process_data`] acts on them.
    pub(super) fn note_events(&mut self, events: Events) {
        self.peer_fin |= events.contains(Events::PEER_FIN);
    }

    /// Stops sending the pattern, because the time is over.
    pub(super) fn stop_sending(&mut self) {
        if self.service.sends() {
            self.to_send = Some(self.sent);
        }
    }

    /// Reads and queues as much as is possible now.
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

    /// Echoes received data. Data without room in the send buffer stays in the receive queue, whose
    /// window then stops the peer. Returns true if more can be echoed at once.
    fn echo_received(&mut self, context: &mut StreamContext<'_>) -> bool {
        let emss = context.stack.effective_mss(self.conn);
        let mut room = context.stack.send_room(self.conn);
        for _ in 0..RECORDS_PER_BATCH {
            let Some(rx_queue) = context.stack.receive_queue(self.conn) else {
                return false;
            };
            let len = rx_queue.len_bytes().min(emss);
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
        }
        true
    }

    /// Queues whole segments of the pattern, up to the windows. Returns true if there are more.
    fn send_pattern(&mut self, context: &mut StreamContext<'_>) -> bool {
        if !self.service.sends() {
            return false;
        }
        let emss = context.stack.effective_mss(self.conn);
        let mut room = context.stack.send_room(self.conn);
        for _ in 0..RECORDS_PER_BATCH {
            let left = self.to_send.map_or(u64::MAX, |bytes| bytes - self.sent);
            let len = left.min(emss as u64);
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
        }
        true
    }

    /// Closes the sending direction once all data is queued.
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

    /// Returns true if the stream of an ended connection has the wrong length.
    pub(super) fn has_wrong_length(&self) -> bool {
        let is_expected = |bytes| bytes == self.read;
        self.service.checks() && !self.is_bad && !self.expected.is_none_or(is_expected)
    }
}
