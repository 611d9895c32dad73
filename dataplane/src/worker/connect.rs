//! The connecting side: TCP, then the MPA request and its reply (RFC 5044 section 7, RFC 6581).

use siw_iwarp::TxRecord;
use siw_iwarp::mpa::{InitiatorStep, MpaCrcPolicy, MpaInitiator};
use siw_tcp::{ConnId, Events, Instant};

use super::conn_owner::ConnOwner;
use super::messages::{ConnectFailure, ConnectParams, Event};
use super::worker_qp::{Connecting, Phase};
use super::{ENDINGS, Worker};
use crate::datapath::rx_frame::Stream;

impl Worker {
    /// Starts a connection for a queue pair that is already in the table.
    pub(super) fn connect(&mut self, now: Instant, slot: u32, params: ConnectParams) {
        let Some(qp) = self.qps.get_mut(slot) else {
            return;
        };
        let port = &mut self.ports[qp.port];
        let mut config = port.mpa.clone();
        match params.crc {
            Some(true) if config.crc == MpaCrcPolicy::IfAsked => config.crc = MpaCrcPolicy::Asked,
            Some(false) => config.crc = MpaCrcPolicy::IfAsked,
            _ => {}
        }
        if let Some(ms) = params.timeout_ms {
            config.reply_timeout_ms = ms;
        }
        if let Some(rev) = params.revision {
            config.revision = rev;
        }
        let initiator =
            match MpaInitiator::new(&config, params.ird, params.ord, &params.private_data) {
                Ok(i) => i,
                Err(e) => {
                    return self.connect_failed(now, slot, ConnectFailure::Protocol(e.to_string()));
                }
            };
        let started = port.stack.connect(
            now,
            params.local,
            params.local_port,
            params.remote,
            ConnOwner::QueuePair(slot).into(),
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

    pub(super) fn on_connecting_event(
        &mut self,
        now: Instant,
        port_index: usize,
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
                self.ports[port_index].stack.release(now, conn);
            }
            return;
        };
        let port = &mut self.ports[port_index];
        if events.contains(Events::CONNECTED) && !c.request_sent {
            c.request_sent = true;
            let request = c.initiator.request_frame();
            let len = request.len() as u32;
            let _ = port
                .stack
                .push_record(conn, len, TxRecord::Stream(request), true);
            c.deadline = Instant(now.0 + u64::from(c.config.reply_timeout_ms) * 1_000_000);
            self.timers
                .insert((c.deadline, ConnOwner::QueuePair(slot).into()), ());
            self.flush_connection(now, port_index, conn);
        }
        let port = &mut self.ports[port_index];
        port.stack.take_acked(conn, |_| {});
        let Some(qp) = self.qps.get_mut(slot) else {
            return;
        };
        let Phase::Connecting(c) = &mut qp.phase else {
            return;
        };
        if events.contains(Events::READABLE)
            && let Some(rx) = port.stack.receive_queue(conn)
        {
            match c.initiator.on_stream(&mut Stream(rx)) {
                InitiatorStep::NeedMore => {}
                InitiatorStep::Accepted {
                    negotiated,
                    private_data,
                } => {
                    self.timers
                        .remove(&(c.deadline, ConnOwner::QueuePair(slot).into()));
                    super::listen::adopt(&mut qp.qp, &c.config);
                    self.established(now, slot, conn, negotiated, private_data);
                    // FPDUs may follow the reply in the same batch, and TCP may have ended.
                    let rest = Events(events.0 & !Events::CONNECTED.0);
                    return self.on_stream_event(now, port_index, conn, slot, rest);
                }
                InitiatorStep::Rejected { private_data } => {
                    let failure = ConnectFailure::Rejected(private_data);
                    return self.connect_failed(now, slot, failure);
                }
                InitiatorStep::Failed { error, send } => {
                    if let Some(bytes) = send {
                        let len = bytes.len() as u32;
                        let _ = port
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
                && let Some(config) = c.initiator.fallback_config()
            {
                let mut params = c.params.clone();
                params.revision = Some(config.revision);
                self.timers
                    .remove(&(c.deadline, ConnOwner::QueuePair(slot).into()));
                self.ports[port_index].stack.release(now, conn);
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
            self.timers
                .remove(&(c.deadline, ConnOwner::QueuePair(slot).into()));
        }
        if let Some(conn) = qp.conn.take() {
            let port = qp.port;
            let stack = &mut self.ports[port].stack;
            stack.set_user(conn, ConnOwner::Nobody.into());
            stack.close(now, conn);
            stack.release(now, conn);
        }
        // Back to where a new attempt may start: the control thread hands the rings in again.
        self.qps.remove(slot);
        self.post_event(Event::ConnectFailed { qpn, failure });
    }

    /// MPA is through: the stream is in FPDU mode.
    pub(super) fn established(
        &mut self,
        now: Instant,
        slot: u32,
        conn: ConnId,
        negotiated: siw_iwarp::NegotiatedParameters,
        private_data: Vec<u8>,
    ) {
        let Some(qp) = self.qps.get_mut(slot) else {
            return;
        };
        let stack = &self.ports[qp.port].stack;
        qp.qp.set_rts(negotiated, stack.effective_mss(conn) as u32);
        qp.phase = Phase::Running;
        let qpn = qp.rings.qpn;
        let addresses = stack.tcp_info(conn).map(|c| (c.local, c.remote));
        self.publish_state(slot);
        self.make_ready(slot);
        if let Some((local, remote)) = addresses {
            self.post_event(Event::Established {
                qpn,
                negotiated,
                private_data,
                local,
                remote,
            });
        }
        self.after(now, slot);
    }
}
