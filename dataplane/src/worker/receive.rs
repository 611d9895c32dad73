//! Receive path: a burst from a port goes through TCP, and TCP's events go to the queue pairs.
//!
//! ```text
//! Worker::receive -> WorkerPort::receive -> Stack::next_event      (the steps of a trace: trace.rs)
//!                                                 |
//!                                            on_tcp_event -+- on_stream_event: a queue pair's stream
//!                                                          |- on_connecting_event: connect.rs
//!                                                          '- on_accepted, on_pending_event: listen.rs
//! ```

use std::time::Duration;

use siw_iwarp::{CloseReason, QpEnv, TxRecord};
use siw_net::{ConnId, Instant};
use siw_tcp::Events;

use super::Worker;
use super::conn_owner::ConnOwner;
use super::connections::Connections;
use super::messages::Event;
use super::parked::Wait;
use super::slots::QpSlot;
use super::thresholds::THRESHOLDS;
use super::trace::{StepHook, StepTrace, Untraced, traced};
use crate::datapath::rx_frame::{FrameBytes, TcpByteStream};

/// Events that end a connection for its owner.
pub(super) const CONNECTION_ENDED: Events = Events::CLOSED
    .union(Events::RESET)
    .union(Events::TIMED_OUT)
    .union(Events::REFUSED)
    .union(Events::UNREACHABLE);

/// Events that are held back behind a waiting message. A reset is not.
const HELD_FOR_RECEIVE: Events = Events::CLOSED.union(Events::OUT_OF_ORDER);
/// Events that are processed now for what lies behind the message, and again after it.
const REPEATED_AFTER_RECEIVE: Events = Events::READABLE.union(Events::PEER_FIN);

impl Worker {
    /// Takes a burst from a port, including frames forwarded by other workers and loopback frames, and
    /// processes the resulting TCP events. Returns true if there was anything.
    #[inline]
    pub(super) fn receive(&mut self, now: Instant, port: usize) -> bool {
        let from = &mut self.connections.ports[port];
        let mut has_frames = from.take_burst(&mut self.rx_batch);
        if from.output.faults.is_some() {
            has_frames = self.impair_received(now, port);
        }
        let from = &self.connections.ports[port];
        let has_events = from.stack.has_events() || from.stack.has_port_mapper_events();
        // Copies of datagrams to groups that another worker received.
        let has_events = has_events || from.stack.has_roce_datagrams();
        (has_frames || has_events) && self.process_arrivals(now, port)
    }

    /// Lets the faults of a port happen to its burst, and reports them. Returns true if there are frames.
    #[cold]
    fn impair_received(&mut self, now: Instant, port: usize) -> bool {
        let connections = &mut self.connections;
        let wall_time = connections.clock.wall_time(now);
        let from = &mut connections.ports[port];
        let marks = from.impair_received(&mut self.rx_batch, &mut connections.cache, wall_time);
        let has_others = !from.arrived.is_empty() || from.stack.has_host_frames();
        if let Some(marks) = marks {
            connections.post_event(Event::FaultsInjected { marks });
        }
        has_others || !self.rx_batch.is_empty()
    }

    /// Processes the burst and the other arrivals of a port. Returns true if there was anything.
    #[inline(never)]
    fn process_arrivals(&mut self, now: Instant, port: usize) -> bool {
        match self.connections.ports[port].trace().cloned() {
            None => self.process_in_steps(now, port, Untraced),
            Some(trace) => traced(|| self.process_in_steps(now, port, StepTrace::new(trace, port))),
        }
    }

    /// Passes arrivals to TCP, and TCP's events to the owners of the connections: all at once, or as
    /// many at a time as `hook` leaves to a step.
    #[inline(always)]
    fn process_in_steps(&mut self, now: Instant, port: usize, mut hook: impl StepHook) -> bool {
        let mut any = false;
        loop {
            hook.begin_arrivals(self, now);
            any |= self.receive_burst(now, port);
            hook.on_received(&self.connections);
            if self.connections.ports[port].stack.has_roce_datagrams() {
                self.receive_datagrams(now, port);
            }
            any |= self.connections.handle_events(now, port);
            if hook.end_arrivals(self, now) {
                return any;
            }
        }
    }

    /// Passes the burst to TCP. Returns true if there was anything.
    #[inline(always)]
    fn receive_burst(&mut self, now: Instant, port: usize) -> bool {
        let Connections {
            clock,
            ports,
            cache,
            ..
        } = &mut self.connections;
        let forwarder = &mut self.forwarder;
        let any = ports[port].receive(
            now,
            &mut self.rx_batch,
            clock,
            &mut self.timer_hold,
            |steering, device, mbuf, checksum| {
                forwarder.keep_or_forward(steering, device, mbuf, checksum, cache)
            },
        );
        self.forwarder.wake_receivers();
        any
    }
}

impl Connections {
    /// Passes TCP's events of a port to the owners of the connections. Returns true if there were any.
    #[inline]
    fn handle_events(&mut self, now: Instant, port: usize) -> bool {
        let (mut any, mut acknowledged) = (false, None);
        if self.ports[port].stack.has_port_mapper_events() {
            self.serve_port_mapper(now, port);
        }
        while let Some((conn, user, events)) = self.ports[port].stack.next_event() {
            any = true;
            if events.contains(Events::ACKED) {
                acknowledged = Some(conn);
            }
            self.prefetch_event(port);
            self.on_tcp_event(now, port, conn, ConnOwner::from(user), events);
        }
        // One sample for each burst costs next to nothing, and busy connections have the most.
        if let Some(conn) = acknowledged
            && let Some(time) = self.ports[port].stack.smoothed_round_trip(conn)
        {
            self.round_trips.add(time, 1);
        }
        any
    }

    /// Prefetches for coming events of the port. The current event has been taken out of the list.
    #[inline]
    fn prefetch_event(&self, port: usize) {
        let stack = &self.ports[port].stack;
        if stack.event_count() < THRESHOLDS.prefetch_from {
            return;
        }
        if let Some((user, events)) = stack.peek_event(THRESHOLDS.queue_pair_ahead)
            && let ConnOwner::QueuePair(slot) = ConnOwner::from(user)
        {
            if events.contains(Events::ACKED) {
                self.queue_pairs.prefetch_send_state(slot);
            } else {
                self.queue_pairs.prefetch_receive_state(slot);
            }
        }
        if let Some((user, events)) = stack.peek_event(THRESHOLDS.connection_ahead)
            && events.contains(Events::ACKED)
            && let ConnOwner::QueuePair(slot) = ConnOwner::from(user)
            && let Some(queue_pair) = self.queue_pairs.get(slot)
        {
            queue_pair.rings.sq.prefetch_to_complete();
            queue_pair.protocol.prefetch_for_completing();
        }
    }

    /// Dispatches the events of one connection to its owner.
    #[inline]
    fn on_tcp_event(
        &mut self,
        now: Instant,
        port: usize,
        conn: ConnId,
        owner: ConnOwner,
        events: Events,
    ) {
        match owner {
            ConnOwner::QueuePair(slot) => {
                let has_stream = self
                    .queue_pairs
                    .get(slot)
                    .filter(|queue_pair| queue_pair.conn == Some(conn))
                    .map(|queue_pair| queue_pair.state.has_stream());
                match has_stream {
                    Some(true) => self.on_stream_event(now, port, conn, slot, events),
                    Some(false) => self.on_connecting_event(now, port, conn, slot, events),
                    None => self.ports[port].stack.release(now, conn),
                }
            }
            ConnOwner::Listener(listener) => self.on_accepted(now, port, conn, listener, events),
            ConnOwner::Pending(slot) => self.on_pending_event(now, port, conn, slot, events),
            ConnOwner::Nobody => {
                if events.intersects(CONNECTION_ENDED) {
                    self.ports[port].stack.release(now, conn);
                }
            }
        }
    }

    /// Returns the events that can be processed now. While a delivery is delayed, or a message waits
    /// for a receive work request, nothing behind it is received, and the end of the stream is held
    /// back.
    #[inline]
    fn hold_events(&mut self, slot: QpSlot, mut events: Events) -> Events {
        if !self.context.parked.is_empty(Wait::Quiescence) {
            events = self.hold_for_delivery(slot, events);
        }
        if !self.context.parked.is_empty(Wait::Receive) {
            events = self.hold_for_receive(slot, events);
        }
        events
    }

    #[cold]
    fn hold_for_delivery(&mut self, slot: QpSlot, events: Events) -> Events {
        const HELD: Events = CONNECTION_ENDED
            .union(Events::READABLE)
            .union(Events::OUT_OF_ORDER)
            .union(Events::PEER_FIN);
        match self.queue_pairs.get_mut(slot) {
            Some(queue_pair)
                if queue_pair.rings.waits.contains(Wait::Quiescence)
                    && queue_pair.protocol.is_delivery_delayed() =>
            {
                queue_pair.held_events |= Events(events.0 & HELD.0);
                Events(events.0 & !HELD.0)
            }
            _ => events,
        }
    }

    /// Polls queue pairs whose completions wait until no other worker uses a key. Called once per
    /// batch while there are any; each batch of the other workers brings the wait closer to its end.
    #[cold]
    pub(super) fn poll_quiescing(&mut self, now: Instant) {
        for _ in 0..self.context.parked.turns(Wait::Quiescence) {
            let qpn = self.context.parked.pop(Wait::Quiescence);
            let Some(slot) = qpn.and_then(|qpn| self.queue_pairs.find(qpn)) else {
                continue;
            };
            let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
                continue;
            };
            queue_pair.rings.waits.end(Wait::Quiescence);
            let mut view = self.context.for_rings(&mut queue_pair.rings);
            if queue_pair.protocol.poll_quiescence(&mut view) {
                view.await_quiescence();
                continue;
            }
            drop(view);
            let held = std::mem::take(&mut queue_pair.held_events);
            let (port, conn) = (queue_pair.port, queue_pair.conn);
            let has_stream = queue_pair.state.has_stream();
            self.mark_ready(slot);
            match conn.filter(|_| has_stream) {
                Some(conn) => {
                    self.on_stream_event(now, port, conn, slot, held | Events::READABLE);
                }
                None => self.after_call(now, slot),
            }
        }
    }

    /// Holds events back behind a waiting message, and returns those that can be processed now.
    #[cold]
    fn hold_for_receive(&mut self, slot: QpSlot, events: Events) -> Events {
        match self.queue_pairs.get_mut(slot) {
            Some(queue_pair) if queue_pair.protocol.awaits_receive() => {
                queue_pair.held_events |=
                    Events(events.0 & (HELD_FOR_RECEIVE.0 | REPEATED_AFTER_RECEIVE.0));
                Events(events.0 & !HELD_FOR_RECEIVE.0)
            }
            _ => events,
        }
    }

    /// Begins the wait of a queue pair whose message has found no receive work request: the connection keeps
    /// the message, without taking buffers from others. If there are none left for messages that wait, the
    /// wait ends at once.
    #[cold]
    fn begin_receive_wait(&mut self, now: Instant, conn: ConnId, slot: QpSlot) {
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return;
        };
        if !queue_pair.protocol.awaits_receive() {
            return;
        }
        let wait = queue_pair.protocol.receive_wait_ms();
        let end = queue_pair.receive_wait_end.get_or_insert_with(|| {
            self.receive_waits.begun += 1;
            now + Duration::from_millis(wait.into())
        });
        if !self.ports[queue_pair.port].stack.stop_reading(conn) {
            *end = now;
        }
    }

    /// Has the queue pairs of waiting messages check for a receive work request, if the device's
    /// `receive_wait_ms` or the consumer asks for the wait. Programs for InfiniBand expect it (its
    /// RNR). The message stays in TCP's receive queue, whose window closes, and so do the messages
    /// behind it, except for responses, a Terminate and the peer's FIN, which are processed. Returns
    /// true if one continued.
    #[cold]
    pub(super) fn poll_awaited_receives(&mut self, now: Instant) -> bool {
        let mut any = false;
        for _ in 0..self.context.parked.turns(Wait::Receive) {
            let qpn = self.context.parked.pop(Wait::Receive);
            let Some(slot) = qpn.and_then(|qpn| self.queue_pairs.find(qpn)) else {
                continue;
            };
            let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
                continue;
            };
            queue_pair.rings.waits.end(Wait::Receive);
            let conn = queue_pair.conn.filter(|_| queue_pair.state.has_stream());
            let Some(conn) = conn else {
                queue_pair.receive_wait_end = None;
                continue;
            };
            let port = queue_pair.port;
            // A Terminate behind the message has ended the stream.
            let is_waiting = queue_pair.protocol.awaits_receive();
            let end = queue_pair.receive_wait_end.unwrap_or(now);
            if is_waiting && now < end && queue_pair.rings.has_no_receive() {
                self.context
                    .for_rings(&mut queue_pair.rings)
                    .await_receive();
                continue;
            }
            if is_waiting && now >= end {
                self.receive_waits.timed_out += 1;
                queue_pair.protocol.set_receive_wait(0);
            }
            let held = std::mem::take(&mut queue_pair.held_events);
            queue_pair.protocol.stop_awaiting_receive();
            self.ports[port].stack.resume_reading(conn);
            self.on_stream_event(now, port, conn, slot, held | Events::READABLE);
            let queue_pair = self.queue_pairs.get_mut(slot);
            if let Some(queue_pair) = queue_pair
                && !queue_pair.protocol.awaits_receive()
            {
                queue_pair.receive_wait_end = None;
                any = true;
                self.mark_ready(slot);
            }
        }
        any
    }

    /// Handles events of a queue pair's stream.
    #[inline]
    pub(super) fn on_stream_event(
        &mut self,
        now: Instant,
        port: usize,
        conn: ConnId,
        slot: QpSlot,
        events: Events,
    ) {
        let mut events = self.hold_events(slot, events);
        if events.contains(Events::READABLE) {
            let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
                return;
            };
            let Some(rx_queue) = self.ports[port].stack.receive_queue(conn) else {
                return;
            };
            let mut view = self.context.for_rings(&mut queue_pair.rings);
            let protocol = &mut queue_pair.protocol;
            let mut stream = TcpByteStream(rx_queue);
            let progress = if protocol.awaits_receive() {
                protocol.receive_behind_waiting(&mut view, &mut stream)
            } else {
                protocol.receive_in_order(&mut view, &mut stream)
            };
            drop(view);
            if !self.context.parked.is_empty(Wait::Receive) {
                self.begin_receive_wait(now, conn, slot);
            }
            // A responder may send once its first FPDU has arrived; requests posted earlier wait for
            // it.
            if progress.first_fpdu || progress.has_output {
                self.mark_ready(slot);
            }
            events = self.hold_events(slot, events);
        }
        if events.contains(Events::OUT_OF_ORDER) {
            self.place_out_of_order(port, conn, slot);
        }
        if events.contains(Events::ACKED) {
            self.complete_acked(port, conn, slot);
        }
        if events.contains(Events::MSS_CHANGED) {
            let emss = self.ports[port].stack.effective_mss(conn);
            if let Some(queue_pair) = self.queue_pairs.get_mut(slot) {
                queue_pair.protocol.set_emss(emss as u32);
            }
        }
        if events.contains(Events::PEER_FIN) {
            let rx_queue = self.ports[port].stack.receive_queue(conn);
            let left = rx_queue.map_or(0, |rx_queue| rx_queue.len_bytes());
            self.with_queue_pair(slot, |protocol, view| protocol.on_peer_fin(view, left));
        }
        if events.intersects(CONNECTION_ENDED) {
            let reason = if events.contains(Events::RESET) {
                CloseReason::Reset
            } else if events.contains(Events::TIMED_OUT) {
                CloseReason::TimedOut
            } else {
                CloseReason::Closed
            };
            self.on_connection_ended(now, port, conn, slot, reason);
            return;
        }
        let Some(queue_pair) = self.queue_pairs.get(slot) else {
            return;
        };
        let may_send = events.contains(Events::WRITABLE)
            || events.contains(Events::ACKED) && queue_pair.may_send_after_ack();
        let is_ending = queue_pair.state.is_ending();
        if may_send || queue_pair.protocol.has_output() {
            self.mark_ready(slot);
        }
        if is_ending && events.intersects(Events::ACKED | Events::READABLE) {
            self.extend_deadline(now, slot);
        }
        self.after_call(now, slot);
        if is_ending {
            self.check_lingering(now, slot);
        }
    }

    /// Completes messages whose last byte was acknowledged, unless a port still refers to their
    /// memory.
    #[inline]
    fn complete_acked(&mut self, port: usize, conn: ConnId, slot: QpSlot) {
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return;
        };
        let protocol = &mut queue_pair.protocol;
        let mut view = self.context.for_rings(&mut queue_pair.rings);
        let stack = &mut self.ports[port].stack;
        stack.take_acked_units(conn, |record, units| {
            if let TxRecord::Fpdus(run) = record {
                view.forget_split_records(slot, run, units.clone());
                protocol.on_fpdus_acked(run, units);
            }
        });
        protocol.complete_acked(&mut view);
    }

    /// Places payload of segments that arrived beyond a gap, as far as it may be placed.
    #[cold]
    fn place_out_of_order(&mut self, port: usize, conn: ConnId, slot: QpSlot) {
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return;
        };
        let protocol = &mut queue_pair.protocol;
        let mut view = self.context.for_rings(&mut queue_pair.rings);
        let mut placed = 0;
        self.ports[port]
            .stack
            .for_each_out_of_order(conn, |offset, frame| {
                placed += protocol.receive_out_of_order(&mut view, offset, &FrameBytes(frame));
            });
        self.placed_out_of_order += u64::from(placed);
    }
}
