//! Connections of queue pairs: TCP's events, MPA set-up on both sides, and every way to end.
//!
//! ```text
//! Connect -> SYN ... CONNECTED -> MPA request -> reply -> RTS -> Established
//! SYN ... ACCEPTED -> MPA request -> ConnectRequest -> Accept -> reply -> RTS -> Established
//! FIN, RST, timeout, Terminate, Disconnect -> flush -> Disconnected
//! ```

use siw_iwarp::mpa::{CrcPolicy, Initiator, InitiatorStep, Responder, ResponderStep};
use siw_iwarp::{CloseKind, CloseReason, QpState, TxRecord};
use siw_shm::control;
use siw_tcp::{ConnId, Events, Instant};

use super::frame::Stream;
use super::messages::{Breakdown, ConnectFailure, ConnectParams, Event, RequestId};
use super::queue_pair::{Connecting, Inbound, Phase};
use super::user::User;
use super::{ENDINGS, Worker};

/// How long a graceful close may take before the connection is reset.
const CLOSE_TIMEOUT_MS: u64 = 2_000;

impl Worker {
    /// What happened to one connection, from TCP's list of connections with news.
    #[inline]
    pub(super) fn tcp_event(
        &mut self,
        now: Instant,
        lane: usize,
        conn: ConnId,
        user: User,
        events: Events,
    ) {
        match user {
            User::Qp(slot) => {
                let running = self
                    .qps
                    .get(slot)
                    .filter(|q| q.conn == Some(conn))
                    .map(|q| matches!(q.phase, Phase::Running));
                match running {
                    Some(true) => self.running_event(now, lane, conn, slot, events),
                    Some(false) => self.connecting_event(now, lane, conn, slot, events),
                    None => self.lanes[lane].stack.release(now, conn),
                }
            }
            User::Listener(listener) => self.accepted(now, lane, conn, listener, events),
            User::Inbound(slot) => self.inbound_event(now, lane, conn, slot, events),
            User::Nobody => {
                if events.intersects(ENDINGS) {
                    self.lanes[lane].stack.release(now, conn);
                }
            }
        }
    }

    #[inline]
    fn running_event(
        &mut self,
        now: Instant,
        lane_index: usize,
        conn: ConnId,
        slot: u32,
        events: Events,
    ) {
        if events.contains(Events::READABLE) {
            let Some(qp) = self.qps.get_mut(slot) else {
                return;
            };
            let lane = &mut self.lanes[lane_index];
            let Some(rx) = lane.stack.rx_queue(conn) else {
                return;
            };
            let mut env = super::Env {
                rings: &mut qp.rings,
                keys: &self.keys,
                cqs: &mut self.cqs,
                owners: &mut self.owners,
                scratch: &mut self.scratch,
            };
            qp.qp.receive(&mut env, &mut Stream(rx));
        }
        if events.contains(Events::ACKED) {
            let Some(qp) = self.qps.get_mut(slot) else {
                return;
            };
            let lane = &mut self.lanes[lane_index];
            let mut env = super::Env {
                rings: &mut qp.rings,
                keys: &self.keys,
                cqs: &mut self.cqs,
                owners: &mut self.owners,
                scratch: &mut self.scratch,
            };
            let machine = &mut qp.qp;
            lane.stack.take_acked(conn, |record| {
                if let TxRecord::Fpdu(f) = record {
                    machine.acked(&mut env, &f);
                }
            });
            if machine.awaits_release() && !qp.releasing {
                qp.releasing = true;
                self.releasing.push(slot);
            }
        }
        if events.contains(Events::EMSS_CHANGED) {
            let emss = self.lanes[lane_index].stack.emss(conn);
            if let Some(qp) = self.qps.get_mut(slot) {
                qp.qp.set_emss(emss as u32);
            }
        }
        if events.contains(Events::PEER_FIN) {
            let left = self.lanes[lane_index]
                .stack
                .rx_queue(conn)
                .map_or(0, |q| q.len_bytes());
            self.with_qp(slot, |qp, env| qp.peer_closed(env, left));
        }
        if events.intersects(ENDINGS) {
            let reason = if events.contains(Events::RESET) {
                CloseReason::Reset
            } else if events.contains(Events::TIMED_OUT) {
                CloseReason::TimedOut
            } else {
                CloseReason::Closed
            };
            self.connection_over(now, lane_index, conn, slot, reason);
            return;
        }
        let wakes = events.intersects(Events::WRITABLE | Events::ACKED);
        if wakes || self.qps.get(slot).is_some_and(|q| q.qp.has_work()) {
            self.make_ready(slot);
        }
        self.after(now, slot);
    }

    /// The connection of a running queue pair is gone: everything outstanding completes.
    fn connection_over(
        &mut self,
        now: Instant,
        lane: usize,
        conn: ConnId,
        slot: u32,
        reason: CloseReason,
    ) {
        self.with_qp(slot, |qp, env| qp.tcp_closed(env, reason));
        self.lanes[lane].stack.release(now, conn);
        if let Some(qp) = self.qps.get_mut(slot) {
            qp.conn = None;
            qp.phase = Phase::Over;
        }
        self.publish_state(slot);
        self.tell_disconnected(slot, reason);
        self.after_slow(now, slot);
        self.finish_destroy(now, slot);
    }

    fn tell_disconnected(&mut self, slot: u32, reason: CloseReason) {
        if let Some(qp) = self.qps.get_mut(slot)
            && !std::mem::replace(&mut qp.told_over, true)
        {
            let qpn = qp.rings.qpn;
            let by_reason = match reason {
                CloseReason::Closed => None,
                CloseReason::Reset => Some(Breakdown::Reset),
                CloseReason::TimedOut => Some(Breakdown::TimedOut),
            };
            let received = qp.qp.terminate_received().map(Breakdown::Terminated);
            let sent = qp.qp.terminate_sent().map(Breakdown::Failed);
            let failure = received.or(sent).or(by_reason);
            self.tell(Event::Disconnected { qpn, failure });
        }
    }

    /// Writes the state where the client library looks, and flushes what raced with it.
    pub(super) fn publish_state(&mut self, slot: u32) {
        let Some(qp) = self.qps.get_mut(slot) else {
            return;
        };
        let state = match qp.qp.state() {
            QpState::Idle => control::QpState::Idle,
            QpState::Rts => control::QpState::Rts,
            QpState::Closing => control::QpState::Closing,
            QpState::Terminate => control::QpState::Terminate,
            QpState::Error => control::QpState::Error,
        };
        qp.rings.sq.set_qp_state(state as u32);
        if matches!(qp.qp.state(), QpState::Error) || matches!(qp.phase, Phase::Over) {
            self.with_qp(slot, |qp, env| qp.flush(env));
        }
    }

    /// A doorbell at a queue pair that can only flush.
    pub(super) fn flush_over(&mut self, now: Instant, slot: u32) {
        self.with_qp(slot, |qp, env| qp.flush(env));
        self.after(now, slot);
    }

    /// The queue pair may want its stream closed: after an error, a Terminate, a disconnect.
    pub(super) fn close_if_wanted(&mut self, now: Instant, slot: u32) {
        let Some(qp) = self.qps.get_mut(slot) else {
            return;
        };
        if qp.qp.has_work() {
            // A Terminate, or what precedes a graceful close, still has to go.
            self.make_ready(slot);
        }
        self.publish_state(slot);
        let Some(qp) = self.qps.get_mut(slot) else {
            return;
        };
        let (Some(conn), Some(kind)) = (qp.conn, qp.qp.wants_close()) else {
            return;
        };
        let lane = qp.lane;
        match kind {
            CloseKind::Graceful => {
                if qp.close_deadline.is_none() {
                    let deadline = Instant(now.0 + CLOSE_TIMEOUT_MS * 1_000_000);
                    qp.close_deadline = Some(deadline);
                    self.timers.insert((deadline, User::Qp(slot).into()), ());
                    self.lanes[lane].stack.close(now, conn);
                }
            }
            CloseKind::Abort => {
                self.lanes[lane].stack.abort(now, conn);
                self.connection_over(now, lane, conn, slot, CloseReason::Reset);
            }
        }
    }

    // ---- active side -------------------------------------------------------------------

    /// Starts a connection for a queue pair that is already in the table.
    pub(super) fn connect(&mut self, now: Instant, slot: u32, params: ConnectParams) {
        let Some(qp) = self.qps.get_mut(slot) else {
            return;
        };
        let lane = &mut self.lanes[qp.lane];
        let mut config = lane.mpa.clone();
        if let Some(crc) = params.crc {
            config.crc = if crc {
                CrcPolicy::Required
            } else {
                CrcPolicy::IfAsked
            };
        }
        if let Some(rev) = params.revision {
            config.rev = rev;
        }
        let initiator = match Initiator::new(&config, params.ird, params.ord, &params.private_data)
        {
            Ok(i) => i,
            Err(e) => {
                return self.connect_failed(now, slot, ConnectFailure::Protocol(e.to_string()));
            }
        };
        let started = lane.stack.connect(
            now,
            params.local,
            params.local_port,
            params.remote,
            User::Qp(slot).into(),
        );
        let conn = match started {
            Ok(c) => c,
            Err(e) => return self.connect_failed(now, slot, ConnectFailure::Local(e.to_string())),
        };
        // TCP has its own timer until the connection stands; this one only bounds nonsense.
        let deadline = Instant(now.0 + 200_000_000_000);
        qp.conn = Some(conn);
        qp.phase = Phase::Connecting(Box::new(Connecting {
            initiator,
            params,
            config,
            request_sent: false,
            deadline,
        }));
    }

    fn connecting_event(
        &mut self,
        now: Instant,
        lane_index: usize,
        conn: ConnId,
        slot: u32,
        events: Events,
    ) {
        let Some(qp) = self.qps.get_mut(slot) else {
            return;
        };
        let Phase::Connecting(c) = &mut qp.phase else {
            // Late news of a connection that is over for its owner.
            if events.intersects(ENDINGS) {
                qp.conn = None;
                self.lanes[lane_index].stack.release(now, conn);
            }
            return;
        };
        let lane = &mut self.lanes[lane_index];
        if events.contains(Events::CONNECTED) && !c.request_sent {
            c.request_sent = true;
            let request = c.initiator.request();
            let len = request.len() as u32;
            let _ = lane
                .stack
                .push_record(conn, len, TxRecord::Stream(request), true);
            c.deadline = Instant(now.0 + u64::from(c.config.reply_timeout_ms) * 1_000_000);
            self.timers.insert((c.deadline, User::Qp(slot).into()), ());
            self.flush_lane(now, lane_index, conn);
        }
        let lane = &mut self.lanes[lane_index];
        lane.stack.take_acked(conn, |_| {});
        let Some(qp) = self.qps.get_mut(slot) else {
            return;
        };
        let Phase::Connecting(c) = &mut qp.phase else {
            return;
        };
        if events.contains(Events::READABLE)
            && let Some(rx) = lane.stack.rx_queue(conn)
        {
            match c.initiator.on_stream(&mut Stream(rx)) {
                InitiatorStep::NeedMore => {}
                InitiatorStep::Accepted {
                    negotiated,
                    private_data,
                } => {
                    self.timers.remove(&(c.deadline, User::Qp(slot).into()));
                    self.established(now, slot, conn, negotiated, private_data);
                    // FPDUs may follow the reply in the same batch, and TCP may have ended.
                    let rest = Events(events.0 & !Events::CONNECTED.0);
                    return self.running_event(now, lane_index, conn, slot, rest);
                }
                InitiatorStep::Rejected { private_data } => {
                    let failure = ConnectFailure::Rejected(private_data);
                    return self.connect_failed(now, slot, failure);
                }
                InitiatorStep::Failed { error, send } => {
                    if let Some(bytes) = send {
                        let len = bytes.len() as u32;
                        let _ = lane
                            .stack
                            .push_record(conn, len, TxRecord::Stream(bytes), true);
                    }
                    let failure = ConnectFailure::Protocol(error.to_string());
                    return self.connect_failed(now, slot, failure);
                }
            }
        }
        if !events.intersects(ENDINGS | Events::PEER_FIN) {
            return;
        }
        let failure = if events.contains(Events::REFUSED) {
            ConnectFailure::Refused
        } else if events.contains(Events::UNREACHABLE) {
            ConnectFailure::Unreachable
        } else if events.contains(Events::TIMED_OUT) {
            ConnectFailure::TimedOut
        } else {
            // RFC 6581 section 10: a revision 1 peer resets what it does not know.
            if events.contains(Events::RESET)
                && c.request_sent
                && let Some(config) = c.initiator.fallback()
            {
                let mut params = c.params.clone();
                params.revision = Some(config.rev);
                self.timers.remove(&(c.deadline, User::Qp(slot).into()));
                self.lanes[lane_index].stack.release(now, conn);
                tracing::debug!(remote = %params.remote, "reset on MPA revision 2: trying revision 1");
                return self.connect(now, slot, params);
            }
            ConnectFailure::Reset
        };
        self.connect_failed(now, slot, failure);
    }

    /// Tells the consumer, and forgets the connection.
    pub(super) fn connect_failed(&mut self, now: Instant, slot: u32, failure: ConnectFailure) {
        let Some(qp) = self.qps.get_mut(slot) else {
            return;
        };
        let qpn = qp.rings.qpn;
        if let Phase::Connecting(c) = std::mem::replace(&mut qp.phase, Phase::Idle) {
            self.timers.remove(&(c.deadline, User::Qp(slot).into()));
        }
        if let Some(conn) = qp.conn.take() {
            let lane = qp.lane;
            let stack = &mut self.lanes[lane].stack;
            stack.set_user(conn, User::Nobody.into());
            stack.close(now, conn);
            stack.release(now, conn);
        }
        // Back to where a new attempt may start: the control thread hands the rings in again.
        self.qps.remove(slot);
        self.tell(Event::ConnectFailed { qpn, failure });
    }

    /// MPA is through: the stream is in FPDU mode.
    fn established(
        &mut self,
        now: Instant,
        slot: u32,
        conn: ConnId,
        negotiated: siw_iwarp::Negotiated,
        private_data: Vec<u8>,
    ) {
        let Some(qp) = self.qps.get_mut(slot) else {
            return;
        };
        let stack = &self.lanes[qp.lane].stack;
        qp.qp.set_rts(negotiated, stack.emss(conn) as u32);
        qp.phase = Phase::Running;
        let qpn = qp.rings.qpn;
        let addresses = stack.conn(conn).map(|c| (c.local, c.remote));
        self.publish_state(slot);
        self.make_ready(slot);
        if let Some((local, remote)) = addresses {
            self.tell(Event::Established {
                qpn,
                negotiated,
                private_data,
                local,
                remote,
            });
        }
        self.after(now, slot);
    }

    // ---- passive side ------------------------------------------------------------------

    fn accepted(&mut self, now: Instant, lane: usize, conn: ConnId, listener: u32, events: Events) {
        if events.intersects(ENDINGS) {
            return self.lanes[lane].stack.release(now, conn);
        }
        let slot = self
            .inbound
            .iter()
            .position(Option::is_none)
            .unwrap_or_else(|| {
                self.inbound.push(None);
                self.inbound.len() - 1
            });
        let l = &mut self.lanes[lane];
        let deadline = Instant(now.0 + u64::from(l.mpa.request_timeout_ms) * 1_000_000);
        self.inbound_generation = self.inbound_generation.wrapping_add(1) & 0xFF_FFFF;
        self.inbound[slot] = Some(Inbound {
            lane,
            conn,
            listener,
            responder: Responder::new(&l.mpa),
            asked: false,
            deadline,
            generation: self.inbound_generation,
        });
        let user = User::Inbound(slot as u32);
        l.stack.set_user(conn, user.into());
        self.timers.insert((deadline, user.into()), ());
        self.inbound_event(now, lane, conn, slot as u32, events);
    }

    fn inbound_event(
        &mut self,
        now: Instant,
        lane: usize,
        conn: ConnId,
        slot: u32,
        events: Events,
    ) {
        let worker = self.index as u32;
        let Some(Some(inbound)) = self.inbound.get_mut(slot as usize) else {
            return self.lanes[lane].stack.release(now, conn);
        };
        if inbound.conn != conn {
            return;
        }
        let stack = &mut self.lanes[lane].stack;
        if events.contains(Events::READABLE)
            && let Some(rx) = stack.rx_queue(conn)
        {
            match inbound.responder.on_stream(&mut Stream(rx)) {
                ResponderStep::NeedMore => {}
                ResponderStep::Request(request) => {
                    inbound.asked = true;
                    let user: u64 = User::Inbound(slot).into();
                    self.timers.remove(&(inbound.deadline, user));
                    let wait = self.lanes[lane].accept_timeout;
                    inbound.deadline = now + wait;
                    self.timers.insert((inbound.deadline, user), ());
                    let id = RequestId::new(worker, slot, inbound.generation);
                    let listener = inbound.listener;
                    if let Some(info) = self.lanes[lane].stack.conn(conn) {
                        self.tell(Event::ConnectRequest {
                            request: id,
                            listener,
                            local: info.local,
                            remote: info.remote,
                            private_data: request.private_data,
                            peer_ird: request.peer_ird,
                            peer_ord: request.peer_ord,
                        });
                    }
                }
                ResponderStep::Failed { error, send } => {
                    tracing::debug!(%error, "connection refused");
                    if let Some(bytes) = send {
                        let len = bytes.len() as u32;
                        let _ = stack.push_record(conn, len, TxRecord::Stream(bytes), true);
                    }
                    return self.drop_inbound(now, slot, false);
                }
            }
        }
        if events.intersects(ENDINGS | Events::PEER_FIN) {
            self.drop_inbound(now, slot, false);
        }
    }

    /// Closes a connection that no queue pair took.
    pub(super) fn drop_inbound(&mut self, now: Instant, slot: u32, reset: bool) {
        let Some(inbound) = self.inbound.get_mut(slot as usize).and_then(Option::take) else {
            return;
        };
        self.timers
            .remove(&(inbound.deadline, User::Inbound(slot).into()));
        let stack = &mut self.lanes[inbound.lane].stack;
        stack.set_user(inbound.conn, User::Nobody.into());
        if reset {
            stack.abort(now, inbound.conn);
        } else {
            stack.close(now, inbound.conn);
        }
        stack.release(now, inbound.conn);
        if inbound.asked {
            self.tell(Event::RequestGone {
                request: RequestId::new(self.index as u32, slot, inbound.generation),
                listener: inbound.listener,
            });
        }
    }

    /// The application took the connection: the reply goes out, the queue pair runs.
    pub(super) fn accept(
        &mut self,
        now: Instant,
        slot: u32,
        request: RequestId,
        private_data: &[u8],
        depths: (u16, u16),
    ) {
        let found = self
            .inbound
            .get_mut(request.slot() as usize)
            .filter(|i| {
                i.as_ref()
                    .is_some_and(|i| i.generation == request.generation())
            })
            .and_then(Option::take);
        let Some(inbound) = found else {
            return self.connect_failed(now, slot, ConnectFailure::Reset);
        };
        self.timers
            .remove(&(inbound.deadline, User::Inbound(request.slot()).into()));
        let Inbound {
            lane,
            conn,
            responder,
            ..
        } = inbound;
        let reply = responder.accept(depths.0, depths.1, private_data);
        if let Some(qp) = self.qps.get_mut(slot) {
            qp.lane = lane;
            qp.conn = Some(conn);
        }
        let stack = &mut self.lanes[lane].stack;
        stack.set_user(conn, User::Qp(slot).into());
        match reply {
            Ok((frame, negotiated)) => {
                let len = frame.len() as u32;
                let _ = stack.push_record(conn, len, TxRecord::Stream(frame), true);
                self.established(now, slot, conn, negotiated, Vec::new());
                self.flush_lane(now, lane, conn);
            }
            Err(e) => self.connect_failed(now, slot, ConnectFailure::Protocol(e.to_string())),
        }
    }

    /// The application refused the connection.
    pub(super) fn reject(&mut self, now: Instant, request: RequestId, private_data: &[u8]) {
        let slot = request.slot();
        let Some(Some(inbound)) = self.inbound.get_mut(slot as usize) else {
            return;
        };
        if inbound.generation != request.generation() {
            return;
        }
        inbound.asked = false;
        let (lane, conn) = (inbound.lane, inbound.conn);
        match inbound.responder.reject(private_data) {
            Ok(frame) => {
                let len = frame.len() as u32;
                let stack = &mut self.lanes[lane].stack;
                let _ = stack.push_record(conn, len, TxRecord::Stream(frame), true);
            }
            Err(e) => tracing::debug!(error = %e, "no reject frame could be made"),
        }
        self.drop_inbound(now, slot, false);
    }

    // ---- timers ------------------------------------------------------------------------

    #[inline]
    pub(super) fn expire_timers(&mut self, now: Instant) {
        while let Some((&(at, user), ())) = self.timers.first_key_value() {
            if at > now {
                return;
            }
            self.timers.pop_first();
            match User::from(user) {
                User::Inbound(slot) => {
                    tracing::debug!(
                        "a connection was given up: no MPA request, or no answer to it"
                    );
                    self.drop_inbound(now, slot, true);
                }
                User::Qp(slot) => self.qp_timer(now, slot),
                _ => {}
            }
        }
    }

    fn qp_timer(&mut self, now: Instant, slot: u32) {
        let Some(qp) = self.qps.get_mut(slot) else {
            return;
        };
        match &qp.phase {
            Phase::Connecting(c) if c.deadline <= now => {
                if let Some(conn) = qp.conn {
                    self.lanes[qp.lane].stack.abort(now, conn);
                }
                self.connect_failed(now, slot, ConnectFailure::TimedOut);
            }
            Phase::Running if qp.close_deadline.is_some_and(|d| d <= now) => {
                if let Some(conn) = qp.conn {
                    let lane = qp.lane;
                    self.lanes[lane].stack.abort(now, conn);
                    self.connection_over(now, lane, conn, slot, CloseReason::TimedOut);
                }
            }
            _ => self.finish_destroy(now, slot),
        }
    }

    /// Sends what is queued on one connection.
    pub(super) fn flush_lane(&mut self, now: Instant, lane: usize, conn: ConnId) {
        let wall = self.clock.wall(now);
        let lane = &mut self.lanes[lane];
        let mut sink = super::Sink::new(
            &mut lane.out,
            &mut self.cache,
            &mut self.owners,
            &self.keys,
            &self.qps,
            &mut self.failures,
            wall,
        );
        lane.stack.flush(now, conn, &mut sink);
    }
}
