//! Transmit path: ready queue pairs hand FPDUs to TCP as far as the windows allow, and TCP hands
//! frames to the port.

use siw_iwarp::TxRecord;
use siw_net::{ConnId, Instant};

use super::connections::Connections;
use super::fpdu_writer::FpduWriter;
use super::slots::{QpSlot, UserSlot};
use super::thresholds::THRESHOLDS;
use super::trace::{StepHook, StepTrace, Untraced, traced};

impl Connections {
    /// Marks a queue pair that may have data to send.
    #[inline]
    pub(super) fn mark_ready(&mut self, slot: QpSlot) {
        if let Some(queue_pair) = self.queue_pairs.get_mut(slot) {
            self.scheduler.mark_ready(slot, queue_pair);
        }
    }

    /// Gives the ready queue pairs of every user their turns. Returns true if there were any.
    #[inline]
    pub(super) fn send_from_ready(&mut self, now: Instant) -> bool {
        if self.scheduler.users.is_idle() {
            return false;
        }
        let mut lacks_room = None;
        let mut round = self.scheduler.users.start_round();
        while let Some(user) = self.scheduler.users.next_in_round(&mut round) {
            for port in 0..self.ports.len() {
                let count = self.scheduler.users.ready_len(user, port);
                if count > 0
                    && let Some(turns) = self.give_turns(now, (user, port), count)
                {
                    lacks_room = lacks_room.or(Some((user, turns > THRESHOLDS.turns_when_full)));
                }
            }
        }
        if let Some((user, had_room)) = lacks_room {
            self.scheduler.users.note_lack_of_room(user, had_room);
        }
        true
    }

    /// Gives up to `count` queue pairs of a user and port their turn; those that become ready
    /// meanwhile wait for the next batch. Returns the number of turns if the port had no room for all.
    #[inline]
    fn give_turns(
        &mut self,
        now: Instant,
        (user, port): (UserSlot, usize),
        count: usize,
    ) -> Option<usize> {
        match self.ports[port].trace().cloned() {
            None => self.give_hooked_turns(now, (user, port), count, Untraced),
            Some(trace) => traced(|| {
                let hook = StepTrace::new(trace, port);
                self.give_hooked_turns(now, (user, port), count, hook)
            }),
        }
    }

    /// Gives turns as [`Self::give_turns`], each between two calls of `hook`.
    #[inline]
    fn give_hooked_turns(
        &mut self,
        now: Instant,
        (user, port): (UserSlot, usize),
        count: usize,
        mut hook: impl StepHook,
    ) -> Option<usize> {
        let mut flushes_left = THRESHOLDS.flushes;
        let frames_before = self.ports[port].stack.net_stats().frames_out;
        for turn in 0..count.min(THRESHOLDS.turns) {
            if turn >= THRESHOLDS.turns_when_full && self.ports[port].stack.is_output_blocked() {
                return Some(turn);
            }
            if count > THRESHOLDS.frames_of_many {
                let frames = self.ports[port].stack.net_stats().frames_out - frames_before;
                if frames >= THRESHOLDS.frames_of_many as u64 {
                    break;
                }
            }
            let Some(slot) = self.scheduler.users.pop_ready(user, port) else {
                break;
            };
            if count >= THRESHOLDS.prefetch_from {
                let (queue_pairs, ports) = (&mut self.queue_pairs, &mut self.ports);
                self.scheduler
                    .prefetch_ready(queue_pairs, &mut ports[port], user, port);
            }
            hook.begin_turn(self, now, slot);
            self.take_turn(now, (user, port), slot, &mut flushes_left);
            hook.end_step(self, now);
        }
        None
    }

    /// Sends the requests of a ready queue pair, or flushes them if it has no stream. Inlined, so that
    /// the common loop has no call for each turn.
    #[inline(always)]
    fn take_turn(
        &mut self,
        now: Instant,
        (user, port): (UserSlot, usize),
        slot: QpSlot,
        flushes_left: &mut u32,
    ) {
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return;
        };
        if queue_pair.only_flushes() {
            if *flushes_left == 0 {
                self.scheduler.users.push_ready(user, port, slot);
            } else {
                *flushes_left -= 1;
                queue_pair.is_ready = false;
                self.report_and_follow(now, slot);
            }
            return;
        }
        queue_pair.is_ready = false;
        queue_pair.rings.is_sq_drained = false;
        let has_more = if queue_pair.state.has_stream() {
            self.send_from(now, slot)
        } else if queue_pair.is_of_datagrams() {
            self.send_datagrams(now, slot)
        } else {
            false
        };
        if has_more {
            self.mark_ready(slot);
        }
    }

    /// Queues records as far as TCP has room, and sends them. Returns true if more can follow at once.
    #[inline]
    fn send_from(&mut self, now: Instant, slot: QpSlot) -> bool {
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return false;
        };
        let Some(conn) = queue_pair.conn else {
            return false;
        };
        let port = &mut self.ports[queue_pair.port];
        let mut view = self.context.for_rings(&mut queue_pair.rings);
        let room = port.stack.send_room(conn);
        let protocol = &mut queue_pair.protocol;
        let messages = &mut self.messages;
        let has_more = port.stack.push_records(conn, |records| {
            protocol.next_records(&mut view, room, THRESHOLDS.fpdus_per_turn, |run, ended| {
                if let Some(len) = ended {
                    messages.add(len.into(), run.count().into());
                }
                let units = (run.unit_len(), run.count());
                records.push_run(units, TxRecord::Fpdus(run), run.ends_messages());
            })
        });
        let has_more = has_more.unwrap_or(false);
        drop(view);
        let writer = FpduWriter::new(&mut self.context, &self.queue_pairs);
        let wall_time = self.clock.wall_time(now);
        port.flush_connection(now, conn, &mut self.cache, writer, wall_time);
        self.after_call(now, slot);
        has_more
    }

    /// Queues bytes outside of FPDUs (an MPA frame); the send window never cuts them.
    pub(super) fn queue_stream_bytes(&mut self, port: usize, conn: ConnId, bytes: Box<[u8]>) {
        let len = bytes.len() as u32;
        // Fails only on a connection that has ended.
        let stack = &mut self.ports[port].stack;
        let _ = stack.push_record(conn, len, TxRecord::Stream(bytes), true);
    }

    /// Sends the queued data of one connection.
    pub(super) fn flush_connection(&mut self, now: Instant, port: usize, conn: ConnId) {
        let writer = FpduWriter::new(&mut self.context, &self.queue_pairs);
        let wall_time = self.clock.wall_time(now);
        self.ports[port].flush_connection(now, conn, &mut self.cache, writer, wall_time);
    }

    /// Runs acknowledgements, timers and retransmissions of one stack, then sends the burst.
    #[inline]
    pub(super) fn poll_port(&mut self, now: Instant, port: usize, run_timers: bool) -> bool {
        if !self.ports[port].needs_poll(now) {
            return false;
        }
        match self.ports[port].trace().cloned() {
            None => self.poll_stack(now, port, run_timers, Untraced),
            Some(trace) => {
                traced(|| self.poll_stack(now, port, run_timers, StepTrace::new(trace, port)))
            }
        }
    }

    /// Polls a stack that needs it, between two calls of `hook`.
    #[inline]
    fn poll_stack(
        &mut self,
        now: Instant,
        port: usize,
        run_timers: bool,
        mut hook: impl StepHook,
    ) -> bool {
        hook.begin_poll(self, now);
        let writer = FpduWriter::new(&mut self.context, &self.queue_pairs);
        let wall_time = self.clock.wall_time(now);
        let any = self.ports[port].poll_stack(now, run_timers, &mut self.cache, writer, wall_time);
        hook.end_step(self, now);
        any
    }

    /// Takes back the memory of messages whose buffers ports have released, and completes those that
    /// waited for it, as on a ring pair. The thread that frees the last buffer of a message notes its
    /// release, so messages that go on waiting cost nothing. A worker that would sleep looks at least
    /// every millisecond while any wait.
    pub(super) fn complete_released(&mut self, now: Instant) {
        self.context.ext_bufs.reclaim_released(THRESHOLDS.releases);
        while let Some(qpn) = self.context.ext_bufs.pop_released() {
            let Some(slot) = self.queue_pairs.find(qpn) else {
                continue;
            };
            self.with_queue_pair(slot, |protocol, view| protocol.poll_releases(view));
            // Requests that waited for these completions can be sent now.
            self.mark_ready(slot);
            self.after_call(now, slot);
            self.check_lingering(now, slot);
        }
    }
}
