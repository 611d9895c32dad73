//! Connections of queue pairs: TCP's events, MPA set-up on both sides, and every way to end.
//!
//! ```text
//! Connect -> SYN ... CONNECTED -> MPA request -> reply -> RTS -> Established
//! SYN ... ACCEPTED -> MPA request -> ConnectRequest -> Accept -> reply -> RTS -> Established
//! FIN, RST, timeout, Terminate, Disconnect -> flush -> Disconnected
//! ```

use siw_iwarp::{CloseKind, CloseReason, RdmapState, TxRecord};
use siw_shm::control;
use siw_tcp::{ConnId, Events, Instant};

use super::conn_owner::ConnOwner;
use super::messages::{ConnectFailure, DisconnectReason, Event};
use super::worker_qp::Phase;
use super::{ENDINGS, Worker};
use crate::datapath::rx_frame::{Held, Stream};

/// How long a graceful close may take before the connection is reset.
const CLOSE_TIMEOUT_MS: u64 = 2_000;

impl Worker {
    /// What happened to one connection, from TCP's list of connections with news.
    #[inline]
    pub(super) fn on_tcp_event(
        &mut self,
        now: Instant,
        port: usize,
        conn: ConnId,
        user: ConnOwner,
        events: Events,
    ) {
        match user {
            ConnOwner::QueuePair(slot) => {
                let running = self
                    .qps
                    .get(slot)
                    .filter(|q| q.conn == Some(conn))
                    .map(|q| matches!(q.phase, Phase::Running));
                match running {
                    Some(true) => self.on_stream_event(now, port, conn, slot, events),
                    Some(false) => self.on_connecting_event(now, port, conn, slot, events),
                    None => self.ports[port].stack.release(now, conn),
                }
            }
            ConnOwner::Listener(listener) => self.on_accepted(now, port, conn, listener, events),
            ConnOwner::Pending(slot) => self.on_pending_event(now, port, conn, slot, events),
            ConnOwner::Nobody => {
                if events.intersects(ENDINGS) {
                    self.ports[port].stack.release(now, conn);
                }
            }
        }
    }

    #[inline]
    pub(super) fn on_stream_event(
        &mut self,
        now: Instant,
        port_index: usize,
        conn: ConnId,
        slot: u32,
        events: Events,
    ) {
        if events.contains(Events::READABLE) {
            let Some(qp) = self.qps.get_mut(slot) else {
                return;
            };
            let port = &mut self.ports[port_index];
            let Some(rx) = port.stack.receive_queue(conn) else {
                return;
            };
            let mut env = super::Env {
                rings: &mut qp.rings,
                keys: &self.keys,
                cqs: &mut self.cqs,
                srqs: &mut self.srqs,
                ext_bufs: &mut self.ext_bufs,
                scratch: &mut self.scratch,
            };
            let progress = qp.qp.receive_in_order(&mut env, &mut Stream(rx));
            // A responder may send from its first FPDU on: what was posted before waits.
            if progress.first_fpdu || progress.has_output {
                self.make_ready(slot);
            }
        }
        if events.contains(Events::OUT_OF_ORDER) {
            self.out_of_order(port_index, conn, slot);
        }
        if events.contains(Events::ACKED) {
            let Some(qp) = self.qps.get_mut(slot) else {
                return;
            };
            let port = &mut self.ports[port_index];
            let mut env = super::Env {
                rings: &mut qp.rings,
                keys: &self.keys,
                cqs: &mut self.cqs,
                srqs: &mut self.srqs,
                ext_bufs: &mut self.ext_bufs,
                scratch: &mut self.scratch,
            };
            let machine = &mut qp.qp;
            port.stack.take_acked(conn, |record| {
                if let TxRecord::Fpdu(f) = record {
                    machine.on_record_acked(&mut env, &f);
                }
            });
            if machine.is_awaiting_release() && !qp.releasing {
                qp.releasing = true;
                self.releasing.push(slot);
            }
        }
        if events.contains(Events::MSS_CHANGED) {
            let emss = self.ports[port_index].stack.effective_mss(conn);
            if let Some(qp) = self.qps.get_mut(slot) {
                qp.qp.set_emss(emss as u32);
            }
        }
        if events.contains(Events::MTU_PROBE) {
            self.mtu_probe(port_index, conn, slot);
        }
        if events.contains(Events::PEER_FIN) {
            let left = self.ports[port_index]
                .stack
                .receive_queue(conn)
                .map_or(0, |q| q.len_bytes());
            self.with_qp(slot, |qp, env| qp.on_peer_fin(env, left));
        }
        if events.intersects(ENDINGS) {
            let reason = if events.contains(Events::RESET) {
                CloseReason::Reset
            } else if events.contains(Events::TIMED_OUT) {
                CloseReason::TimedOut
            } else {
                CloseReason::Closed
            };
            self.connection_over(now, port_index, conn, slot, reason);
            return;
        }
        let wakes = events.intersects(Events::WRITABLE | Events::ACKED);
        if wakes || self.qps.get(slot).is_some_and(|q| q.qp.has_output()) {
            self.make_ready(slot);
        }
        self.after(now, slot);
    }

    /// TCP probes a narrow path with one FPDU that is longer than a segment (RFC 8899): if the next
    /// one can be. It waits for the window in TCP's queue.
    #[cold]
    fn mtu_probe(&mut self, port: usize, conn: ConnId, slot: u32) {
        let stack = &mut self.ports[port].stack;
        let Some(len) = stack.mtu_probe_len(conn) else {
            return;
        };
        let emss = stack.effective_mss(conn) as u32;
        let next = self.with_qp(slot, |qp, env| {
            qp.set_emss(len as u32);
            let next = qp.next_record(env, len);
            qp.set_emss(emss);
            next
        });
        if let Some(Some(fpdu)) = next {
            let push = fpdu.record.is_last;
            let record = TxRecord::Fpdu(fpdu.record);
            let stack = &mut self.ports[port].stack;
            // As in `send_from`: refused only by a connection that is over.
            let _ = stack.push_record(conn, fpdu.wire_len, record, push);
        }
        self.make_ready(slot);
    }

    /// Segments beyond a hole: what may be placed of them is placed now.
    #[cold]
    fn out_of_order(&mut self, port: usize, conn: ConnId, slot: u32) {
        let Some(qp) = self.qps.get_mut(slot) else {
            return;
        };
        let mut env = super::Env {
            rings: &mut qp.rings,
            keys: &self.keys,
            cqs: &mut self.cqs,
            ext_bufs: &mut self.ext_bufs,
            scratch: &mut self.scratch,
            srqs: &mut self.srqs,
        };
        let machine = &mut qp.qp;
        let mut placed = 0;
        self.ports[port]
            .stack
            .for_each_out_of_order(conn, |offset, held| {
                placed += machine.receive_out_of_order(&mut env, offset, &Held(held));
            });
        self.placed_out_of_order += u64::from(placed);
    }

    /// The connection of a running queue pair is gone: everything outstanding completes.
    pub(super) fn connection_over(
        &mut self,
        now: Instant,
        port: usize,
        conn: ConnId,
        slot: u32,
        reason: CloseReason,
    ) {
        self.with_qp(slot, |qp, env| qp.on_tcp_closed(env, reason));
        self.ports[port].stack.release(now, conn);
        if let Some(qp) = self.qps.get_mut(slot) {
            qp.conn = None;
            qp.phase = Phase::Over;
        }
        self.publish_state(slot);
        self.post_disconnected(slot, reason);
        self.after_slow(now, slot);
        self.finish_destroy(now, slot);
    }

    fn post_disconnected(&mut self, slot: u32, reason: CloseReason) {
        if let Some(qp) = self.qps.get_mut(slot)
            && !std::mem::replace(&mut qp.disconnect_reported, true)
        {
            let qpn = qp.rings.qpn;
            let by_reason = match reason {
                CloseReason::Closed => None,
                CloseReason::Reset => Some(DisconnectReason::Reset),
                CloseReason::TimedOut => Some(DisconnectReason::TimedOut),
            };
            let received = qp
                .qp
                .received_terminate()
                .map(DisconnectReason::TerminateReceived);
            let sent = qp.qp.found_error().map(DisconnectReason::TerminateSent);
            let failure = received.or(sent).or(by_reason);
            self.post_event(Event::Disconnected { qpn, failure });
        }
    }

    /// Writes the state where the client library looks, and flushes what raced with it.
    pub(super) fn publish_state(&mut self, slot: u32) {
        let Some(qp) = self.qps.get_mut(slot) else {
            return;
        };
        let state = match qp.qp.state() {
            RdmapState::Idle => control::QpState::Idle,
            RdmapState::Rts => control::QpState::Rts,
            RdmapState::Closing => control::QpState::Closing,
            RdmapState::Terminate => control::QpState::Terminate,
            RdmapState::Error => control::QpState::Error,
        };
        qp.rings.sq.set_qp_state(state as u32);
        if matches!(qp.qp.state(), RdmapState::Error) || matches!(qp.phase, Phase::Over) {
            self.with_qp(slot, |qp, env| qp.flush_queues(env));
            self.post_last_wqe(slot);
        }
    }

    /// A queue pair with a shared receive queue is over: what it had taken is completed.
    fn post_last_wqe(&mut self, slot: u32) {
        let Some(qp) = self.qps.get_mut(slot) else {
            return;
        };
        let events_waiting = qp.rings.srq.is_none() || qp.destroying;
        if !events_waiting && !std::mem::replace(&mut qp.rings.last_wqe_reported, true) {
            let (client, qpn) = (qp.client, qp.rings.qpn);
            self.post_event(Event::LastWqe { client, qpn });
        }
    }

    /// A doorbell at a queue pair that can only flush.
    pub(super) fn flush_over(&mut self, now: Instant, slot: u32) {
        self.with_qp(slot, |qp, env| qp.flush_queues(env));
        self.after(now, slot);
    }

    /// The queue pair may want its stream closed: after an error, a Terminate, a disconnect.
    pub(super) fn close_if_wanted(&mut self, now: Instant, slot: u32) {
        let Some(qp) = self.qps.get_mut(slot) else {
            return;
        };
        if qp.qp.has_output() {
            // A Terminate, or what precedes a graceful close, still has to go.
            self.make_ready(slot);
        }
        self.publish_state(slot);
        let Some(qp) = self.qps.get_mut(slot) else {
            return;
        };
        let (Some(conn), Some(kind)) = (qp.conn, qp.qp.requested_close()) else {
            return;
        };
        let port = qp.port;
        match kind {
            CloseKind::Graceful => {
                if qp.close_deadline.is_none() {
                    let deadline = Instant(now.0 + CLOSE_TIMEOUT_MS * 1_000_000);
                    qp.close_deadline = Some(deadline);
                    self.timers
                        .insert((deadline, ConnOwner::QueuePair(slot).into()), ());
                    self.ports[port].stack.close(now, conn);
                }
            }
            CloseKind::Abort => {
                self.ports[port].stack.abort(now, conn);
                self.connection_over(now, port, conn, slot, CloseReason::Reset);
            }
        }
    }

    #[inline]
    pub(super) fn expire_timers(&mut self, now: Instant) {
        while let Some((&(at, user), ())) = self.timers.first_key_value() {
            if at > now {
                return;
            }
            self.timers.pop_first();
            match ConnOwner::from(user) {
                ConnOwner::Pending(slot) => {
                    tracing::debug!(
                        "a connection was given up: no MPA request, or no answer to it"
                    );
                    self.drop_pending(now, slot, true);
                }
                ConnOwner::QueuePair(slot) => self.qp_timer(now, slot),
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
                    self.ports[qp.port].stack.abort(now, conn);
                }
                self.connect_failed(now, slot, ConnectFailure::TimedOut);
            }
            Phase::Running if qp.close_deadline.is_some_and(|d| d <= now) => {
                if let Some(conn) = qp.conn {
                    let port = qp.port;
                    self.ports[port].stack.abort(now, conn);
                    self.connection_over(now, port, conn, slot, CloseReason::TimedOut);
                }
            }
            _ => self.finish_destroy(now, slot),
        }
    }

    /// Sends what is queued on one connection.
    pub(super) fn flush_connection(&mut self, now: Instant, port: usize, conn: ConnId) {
        let wall = self.clock.wall(now);
        let port = &mut self.ports[port];
        let mut sink = super::Sink::new(
            &mut port.out,
            &mut self.cache,
            &mut self.ext_bufs,
            &self.keys,
            &self.qps,
            &mut self.failures,
            wall,
        );
        port.stack.flush(now, conn, &mut sink);
    }
}
