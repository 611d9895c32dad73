//! The listening side: from a TCP connection to an application's answer (RFC 5044 section 7).

use std::time::Duration;

use siw_iwarp::mpa::{CrcPolicy, MarkerPolicy, MpaConfig, Responder, ResponderStep, RtrKinds};
use siw_iwarp::{OutOfOrder, QueuePair, TerminateOrder, TxRecord};
use siw_shm::control::{BY_DEVICE, MpaOptions};
use siw_tcp::{ConnId, Events, Instant};

use super::frame::Stream;
use super::inbound::Inbound;
use super::messages::{ConnectFailure, Event, RequestId};
use super::user::User;
use super::{ENDINGS, Lane, Worker};
use crate::ids::CmListenerId;

/// How a listener sets up its connections, where it differs from its device.
pub(super) struct ListenerSetup {
    mpa: MpaConfig,
    accept_timeout: Duration,
}

impl ListenerSetup {
    pub(super) fn new(lane: &Lane, o: &MpaOptions) -> ListenerSetup {
        let mut mpa = lane.mpa.clone();
        match o.crc {
            0 => mpa.crc = CrcPolicy::IfAsked,
            1 if mpa.crc == CrcPolicy::IfAsked => mpa.crc = CrcPolicy::Asked,
            _ => {}
        }
        if o.mpa_rev != BY_DEVICE {
            mpa.rev = o.mpa_rev;
        }
        match o.markers {
            0 => mpa.markers = MarkerPolicy::Never,
            1 => mpa.markers = MarkerPolicy::Accept,
            2 => mpa.markers = MarkerPolicy::Request,
            _ => {}
        }
        if o.rtr != BY_DEVICE {
            mpa.rtr = RtrKinds {
                send: o.rtr & 1 != 0,
                write: o.rtr & 2 != 0,
                read: o.rtr & 4 != 0,
            };
            mpa.peer_to_peer = o.rtr != 0;
        }
        if o.max_ird != u16::MAX {
            mpa.max_ird = o.max_ird;
        }
        if o.max_ord != u16::MAX {
            mpa.max_ord = o.max_ord;
        }
        if o.request_timeout_ms != 0 {
            mpa.request_timeout_ms = o.request_timeout_ms;
        }
        if o.private_data != u16::MAX {
            mpa.max_private_data = o.private_data;
        }
        match o.terminate {
            0 => mpa.terminate = TerminateOrder::Rfc,
            1 => mpa.terminate = TerminateOrder::Siw,
            _ => {}
        }
        match o.out_of_order {
            0 => mpa.out_of_order = OutOfOrder::Off,
            1 => mpa.out_of_order = OutOfOrder::Markers,
            2 => mpa.out_of_order = OutOfOrder::Aligned,
            _ => {}
        }
        let accept_timeout = match o.accept_timeout_ms {
            0 => lane.accept_timeout,
            ms => Duration::from_millis(ms.into()),
        };
        ListenerSetup {
            mpa,
            accept_timeout,
        }
    }
}

/// What the stream of a queue pair does as its device or listener wants it.
pub(super) fn adopt(qp: &mut QueuePair, config: &MpaConfig) {
    qp.set_out_of_order(config.out_of_order);
    qp.set_terminate_order(config.terminate);
    qp.set_first_msn(config.first_msn);
}

impl Worker {
    pub(super) fn accepted(
        &mut self,
        now: Instant,
        lane: usize,
        conn: ConnId,
        listener: CmListenerId,
        events: Events,
    ) {
        if events.intersects(ENDINGS) {
            return self.lanes[lane].stack.release(now, conn);
        }
        let l = &mut self.lanes[lane];
        let setup = l.setups.get(&listener);
        let mpa = setup.map_or(&l.mpa, |s| &s.mpa);
        let accept_timeout = setup.map_or(l.accept_timeout, |s| s.accept_timeout);
        let deadline = Instant(now.0 + u64::from(mpa.request_timeout_ms) * 1_000_000);
        let slot = self.inbound.insert(Inbound {
            lane,
            conn,
            listener,
            responder: Responder::new(mpa),
            accept_timeout,
            asked: false,
            deadline,
            generation: 0,
        });
        let user = User::Inbound(slot);
        l.stack.set_user(conn, user.into());
        self.timers.insert((deadline, user.into()), ());
        self.inbound_event(now, lane, conn, slot, events);
    }

    pub(super) fn inbound_event(
        &mut self,
        now: Instant,
        lane: usize,
        conn: ConnId,
        slot: u32,
        events: Events,
    ) {
        let worker = self.index as u32;
        let Some(inbound) = self.inbound.get_mut(slot) else {
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
                    inbound.deadline = now + inbound.accept_timeout;
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
        let Some(inbound) = self.inbound.take(slot) else {
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
        let is = |i: &mut Inbound| i.generation == request.generation();
        let there = self.inbound.get_mut(request.slot()).is_some_and(is);
        let found = there.then(|| self.inbound.take(request.slot())).flatten();
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
                if let Some(qp) = self.qps.get_mut(slot) {
                    adopt(&mut qp.qp, responder.config());
                }
                self.established(now, slot, conn, negotiated, Vec::new());
                self.flush_lane(now, lane, conn);
            }
            Err(e) => self.connect_failed(now, slot, ConnectFailure::Protocol(e.to_string())),
        }
    }

    /// The application refused the connection.
    pub(super) fn reject(&mut self, now: Instant, request: RequestId, private_data: &[u8]) {
        let slot = request.slot();
        let Some(inbound) = self.inbound.get_mut(slot) else {
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
}
