//! The listening side: from a TCP connection to an application's answer (RFC 5044 section 7).

use std::time::Duration;

use siw_iwarp::mpa::{
    MarkerPolicy, MpaConfig, MpaCrcPolicy, MpaResponder, ResponderStep, RtrKinds,
};
use siw_iwarp::{OutOfOrderPolicy, QueuePair, TerminateBitOrder, TxRecord};
use siw_shm::control::{BY_DEVICE, MpaOptions};
use siw_tcp::{ConnId, Events, Instant};

use super::conn_owner::ConnOwner;
use super::messages::{ConnectFailure, Event, RequestId};
use super::pending_connections::PendingConnection;
use super::{ENDINGS, Worker, WorkerPort};
use crate::datapath::rx_frame::Stream;
use crate::ids::CmListenerId;

/// How a listener sets up its connections, where it differs from its device.
pub(super) struct ListenerSetup {
    mpa: MpaConfig,
    accept_timeout: Duration,
}

impl ListenerSetup {
    pub(super) fn new(port: &WorkerPort, o: &MpaOptions) -> ListenerSetup {
        let mut mpa = port.mpa.clone();
        match o.crc {
            0 => mpa.crc = MpaCrcPolicy::IfAsked,
            1 if mpa.crc == MpaCrcPolicy::IfAsked => mpa.crc = MpaCrcPolicy::Asked,
            _ => {}
        }
        if o.mpa_rev != BY_DEVICE {
            mpa.revision = o.mpa_rev;
        }
        match o.markers {
            0 => mpa.markers = MarkerPolicy::Never,
            1 => mpa.markers = MarkerPolicy::Accept,
            2 => mpa.markers = MarkerPolicy::Request,
            _ => {}
        }
        if o.rtr != BY_DEVICE {
            mpa.rtr_kinds = RtrKinds {
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
            0 => mpa.terminate_bit_order = TerminateBitOrder::Rfc,
            1 => mpa.terminate_bit_order = TerminateBitOrder::Siw,
            _ => {}
        }
        match o.out_of_order {
            0 => mpa.out_of_order = OutOfOrderPolicy::Off,
            1 => mpa.out_of_order = OutOfOrderPolicy::Markers,
            2 => mpa.out_of_order = OutOfOrderPolicy::Aligned,
            _ => {}
        }
        let accept_timeout = match o.accept_timeout_ms {
            0 => port.accept_timeout,
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
    qp.set_terminate_bit_order(config.terminate_bit_order);
    qp.set_first_msn(config.first_msn);
}

impl Worker {
    pub(super) fn on_accepted(
        &mut self,
        now: Instant,
        port: usize,
        conn: ConnId,
        listener: CmListenerId,
        events: Events,
    ) {
        if events.intersects(ENDINGS) {
            return self.ports[port].stack.release(now, conn);
        }
        let l = &mut self.ports[port];
        let setup = l.setups.get(&listener);
        let mpa = setup.map_or(&l.mpa, |s| &s.mpa);
        let accept_timeout = setup.map_or(l.accept_timeout, |s| s.accept_timeout);
        let deadline = Instant(now.0 + u64::from(mpa.request_timeout_ms) * 1_000_000);
        let slot = self.pending.insert(PendingConnection {
            port,
            conn,
            listener,
            responder: MpaResponder::new(mpa),
            accept_timeout,
            asked: false,
            deadline,
            generation: 0,
        });
        let user = ConnOwner::Pending(slot);
        l.stack.set_user(conn, user.into());
        self.timers.insert((deadline, user.into()), ());
        self.on_pending_event(now, port, conn, slot, events);
    }

    pub(super) fn on_pending_event(
        &mut self,
        now: Instant,
        port: usize,
        conn: ConnId,
        slot: u32,
        events: Events,
    ) {
        let worker = self.index as u32;
        let Some(pending) = self.pending.get_mut(slot) else {
            return self.ports[port].stack.release(now, conn);
        };
        if pending.conn != conn {
            return;
        }
        let stack = &mut self.ports[port].stack;
        if events.contains(Events::READABLE)
            && let Some(rx) = stack.receive_queue(conn)
        {
            match pending.responder.on_stream(&mut Stream(rx)) {
                ResponderStep::NeedMore => {}
                ResponderStep::Request(request) => {
                    pending.asked = true;
                    let user: u64 = ConnOwner::Pending(slot).into();
                    self.timers.remove(&(pending.deadline, user));
                    pending.deadline = now + pending.accept_timeout;
                    self.timers.insert((pending.deadline, user), ());
                    let id = RequestId::new(worker, slot, pending.generation);
                    let listener = pending.listener;
                    if let Some(info) = self.ports[port].stack.tcp_info(conn) {
                        self.post_event(Event::ConnectRequest {
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
                    return self.drop_pending(now, slot, false);
                }
            }
        }
        if events.intersects(ENDINGS | Events::PEER_FIN) {
            self.drop_pending(now, slot, false);
        }
    }

    /// Closes a connection that no queue pair took.
    pub(super) fn drop_pending(&mut self, now: Instant, slot: u32, reset: bool) {
        let Some(pending) = self.pending.take(slot) else {
            return;
        };
        self.timers
            .remove(&(pending.deadline, ConnOwner::Pending(slot).into()));
        let stack = &mut self.ports[pending.port].stack;
        stack.set_user(pending.conn, ConnOwner::Nobody.into());
        if reset {
            stack.abort(now, pending.conn);
        } else {
            stack.close(now, pending.conn);
        }
        stack.release(now, pending.conn);
        if pending.asked {
            self.post_event(Event::RequestGone {
                request: RequestId::new(self.index as u32, slot, pending.generation),
                listener: pending.listener,
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
        let is = |i: &mut PendingConnection| i.generation == request.generation();
        let there = self.pending.get_mut(request.slot()).is_some_and(is);
        let found = there.then(|| self.pending.take(request.slot())).flatten();
        let Some(pending) = found else {
            return self.connect_failed(now, slot, ConnectFailure::Reset);
        };
        self.timers
            .remove(&(pending.deadline, ConnOwner::Pending(request.slot()).into()));
        let PendingConnection {
            port,
            conn,
            responder,
            ..
        } = pending;
        let reply = responder.accept(depths.0, depths.1, private_data);
        if let Some(qp) = self.qps.get_mut(slot) {
            qp.port = port;
            qp.conn = Some(conn);
        }
        let stack = &mut self.ports[port].stack;
        stack.set_user(conn, ConnOwner::QueuePair(slot).into());
        match reply {
            Ok((frame, negotiated)) => {
                let len = frame.len() as u32;
                let _ = stack.push_record(conn, len, TxRecord::Stream(frame), true);
                if let Some(qp) = self.qps.get_mut(slot) {
                    adopt(&mut qp.qp, responder.config());
                }
                self.established(now, slot, conn, negotiated, Vec::new());
                self.flush_connection(now, port, conn);
            }
            Err(e) => self.connect_failed(now, slot, ConnectFailure::Protocol(e.to_string())),
        }
    }

    /// The application refused the connection.
    pub(super) fn reject(&mut self, now: Instant, request: RequestId, private_data: &[u8]) {
        let slot = request.slot();
        let Some(pending) = self.pending.get_mut(slot) else {
            return;
        };
        if pending.generation != request.generation() {
            return;
        }
        pending.asked = false;
        let (port, conn) = (pending.port, pending.conn);
        match pending.responder.reject(private_data) {
            Ok(frame) => {
                let len = frame.len() as u32;
                let stack = &mut self.ports[port].stack;
                let _ = stack.push_record(conn, len, TxRecord::Stream(frame), true);
            }
            Err(e) => tracing::debug!(error = %e, "no reject frame could be made"),
        }
        self.drop_pending(now, slot, false);
    }
}
