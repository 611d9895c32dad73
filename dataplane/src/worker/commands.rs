//! What the control thread asks of a worker.

use siw_iwarp::QueuePair;
use siw_shm::control::MpaOptions;
use siw_tcp::Instant;

use super::conn_owner::ConnOwner;
use super::listen::ListenerSetup;
use super::messages::{Command, Event, QpSetup};
use super::worker_qp::{Phase, QpRings, WorkerQp};
use super::{Worker, WorkerClient};
use crate::ids::{ClientId, CmListenerId, Qpn};

/// Commands taken in one turn, so that a burst of them does not stall the data path.
const COMMANDS_PER_BATCH: usize = 16;
/// How long a stop waits for connections to close gracefully.
const STOP_GRACE_NS: u64 = 500_000_000;
/// How long a destroyed queue pair may go on to get its last bytes acknowledged.
const DESTROY_GRACE_NS: u64 = 100_000_000;

impl Worker {
    #[inline]
    pub(super) fn take_commands(&mut self, now: Instant) -> bool {
        if let Some(deadline) = self.stopping {
            self.check_stopped(now, deadline);
        }
        let mut any = false;
        for _ in 0..COMMANDS_PER_BATCH {
            let Some(command) = self.mailbox.commands.pop() else {
                break;
            };
            any = true;
            self.execute(now, command);
        }
        any
    }

    fn execute(&mut self, now: Instant, command: Command) {
        match command {
            Command::AddClient {
                client,
                doorbells,
                wake,
            } => {
                self.idle.watch(&wake);
                self.clients.push(WorkerClient {
                    client,
                    doorbells,
                    wake,
                });
            }
            Command::RemoveClient { client } => self.remove_client(now, client),
            Command::AddCq(end) => self.cqs.insert(*end),
            Command::RemoveCq { cq } => self.cqs.remove(cq),
            Command::ResizeCq { cq, producer } => self.cqs.resize(cq, *producer),
            Command::ModerateCq { cq, moderation } => self.cqs.moderate(cq, moderation),
            Command::RaiseCq { cq } => self.cqs.raise(cq),
            Command::AddSrq(end) => self.srqs.insert(*end),
            Command::RemoveSrq { srq } => self.srqs.remove(srq),
            Command::SettleSrq { srq } => self.srqs.settle(srq),
            Command::Connect { setup, params } => {
                match self.ports.iter().position(|l| l.device == params.device) {
                    Some(port) => {
                        let slot = self.add_qp(*setup, port);
                        self.connect(now, slot, *params);
                    }
                    None => {
                        let slot = self.add_qp(*setup, 0);
                        let why = "this worker has no queue of that device".to_owned();
                        self.connect_failed(now, slot, super::messages::ConnectFailure::Local(why));
                    }
                }
            }
            Command::Accept {
                setup,
                request,
                private_data,
                ird,
                ord,
            } => {
                let slot = self.add_qp(*setup, 0);
                self.accept(now, slot, request, &private_data, (ird, ord));
            }
            Command::Reject {
                request,
                private_data,
            } => self.reject(now, request, &private_data),
            Command::Listen {
                listener,
                device,
                local,
                port,
                backlog,
                mpa,
            } => {
                for worker_port in self.ports.iter_mut().filter(|p| p.device == device) {
                    let user = ConnOwner::Listener(listener).into();
                    match worker_port.stack.listen(local, port, backlog, user) {
                        Ok(id) => {
                            worker_port.listeners.push((listener, id));
                            if mpa != MpaOptions::BY_DEVICE {
                                let setup = ListenerSetup::new(worker_port, &mpa);
                                worker_port.setups.insert(listener, setup);
                            }
                        }
                        Err(e) => {
                            self.backlog.push_back(Event::ListenFailed {
                                listener,
                                reason: e.to_string(),
                            });
                            self.events_waiting = true;
                        }
                    }
                }
            }
            Command::Unlisten { listener } => self.unlisten(now, listener),
            Command::Disconnect { qpn } => {
                if let Some(slot) = self.qps.find(qpn) {
                    self.disconnect(now, slot);
                }
            }
            Command::InstallQp { setup } => {
                let slot = self.add_qp(*setup, 0);
                if let Some(qp) = self.qps.get_mut(slot) {
                    qp.phase = Phase::Over;
                    qp.disconnect_reported = true;
                }
                self.end_in_error(now, slot);
            }
            Command::Modify { qpn, to, token } => self.modify(now, qpn, to, token),
            Command::ResetQp { qpn } => {
                if let Some(slot) = self.qps.find(qpn) {
                    self.drop_qp(now, slot, true);
                }
                self.post_event(Event::QpDestroyed { qpn });
            }
            Command::DestroyQp { qpn } => match self.qps.find(qpn) {
                Some(slot) => self.destroy(now, slot),
                None => self.post_event(Event::QpDestroyed { qpn }),
            },
            Command::Barrier { token } => {
                let worker = self.index;
                self.post_event(Event::BarrierReached { worker, token });
            }
            Command::Stats { token } => {
                let (worker, stats) = (self.index, Box::new(self.stats()));
                self.post_event(Event::Stats {
                    worker,
                    token,
                    stats,
                });
            }
            Command::Stop => self.stop(now),
        }
    }

    fn add_qp(&mut self, setup: QpSetup, port: usize) -> u32 {
        // A doorbell that was rung before any worker knew the queue pair found nobody.
        setup.sq.clear_pending();
        setup.sq.set_worker(self.index as u32);
        self.qps.insert(Box::new(WorkerQp {
            client: setup.client,
            port,
            conn: None,
            qp: QueuePair::new(setup.attr),
            rings: QpRings {
                qpn: Qpn(setup.attr.qpn),
                sq: setup.sq,
                rq: setup.rq,
                send_cq: setup.send_cq,
                recv_cq: setup.recv_cq,
                srq: setup.srq,
                share: setup.share,
                held: std::collections::VecDeque::new(),
                last_wqe_reported: false,
                fault: None,
                abandoning: false,
                events: Vec::new(),
            },
            phase: Phase::Idle,
            ready: false,
            releasing: false,
            disconnect_reported: false,
            destroying: false,
            close_deadline: None,
        }))
    }

    pub(super) fn disconnect(&mut self, now: Instant, slot: u32) {
        let Some(qp) = self.qps.get_mut(slot) else {
            return;
        };
        match qp.phase {
            Phase::Running => {
                qp.qp.disconnect();
                self.make_ready(slot);
                self.after_slow(now, slot);
            }
            Phase::Connecting(_) => {
                if let Some(conn) = qp.conn {
                    self.ports[qp.port].stack.abort(now, conn);
                }
                self.connect_failed(now, slot, super::messages::ConnectFailure::Reset);
            }
            Phase::Idle | Phase::Over => {}
        }
    }

    pub(super) fn end_in_error(&mut self, now: Instant, slot: u32) {
        self.with_qp(slot, |qp, env| qp.modify_to_error(env));
        self.after_slow(now, slot);
    }

    fn destroy(&mut self, now: Instant, slot: u32) {
        let Some(qp) = self.qps.get_mut(slot) else {
            return;
        };
        qp.destroying = true;
        qp.disconnect_reported = true;
        if let (Phase::Running, Some(conn)) = (&qp.phase, qp.conn) {
            let port = qp.port;
            let pending = self.ports[port]
                .stack
                .tcp_info(conn)
                .is_some_and(|c| c.in_flight > 0 || c.unsent > 0);
            if pending {
                // What was posted before the end still arrives when it can.
                let deadline = Instant(now.0 + DESTROY_GRACE_NS);
                qp.close_deadline = Some(deadline);
                self.timers
                    .insert((deadline, ConnOwner::QueuePair(slot).into()), ());
                qp.qp.disconnect();
                self.make_ready(slot);
                self.ports[port].stack.close(now, conn);
                return;
            }
        }
        self.finish_destroy(now, slot);
    }

    /// Ends a queue pair whose owner has let go, once nothing needs it any more.
    pub(super) fn finish_destroy(&mut self, now: Instant, slot: u32) {
        if !self.qps.get(slot).is_some_and(|q| q.destroying) {
            return;
        }
        if let Some(qpn) = self.drop_qp(now, slot, false) {
            self.post_event(Event::QpDestroyed { qpn });
        }
    }

    /// Takes a queue pair out; its connection is closed, or reset.
    fn drop_qp(&mut self, now: Instant, slot: u32, reset: bool) -> Option<Qpn> {
        let conn = self.qps.get(slot)?.conn;
        let port = self.qps.get(slot)?.port;
        if let Some(conn) = conn {
            let stack = &mut self.ports[port].stack;
            let clean = stack
                .tcp_info(conn)
                .is_none_or(|c| c.unsent == 0 && c.in_flight <= 1);
            if reset || !clean {
                stack.abort(now, conn);
            }
            let stack = &mut self.ports[port].stack;
            stack.set_user(conn, ConnOwner::Nobody.into());
            stack.close(now, conn);
            stack.release(now, conn);
        }
        self.with_qp(slot, |qp, env| {
            env.rings.abandoning = true;
            qp.modify_to_error(env);
            qp.poll_releases(env);
        });
        let qp = self.qps.remove(slot)?;
        if let Some(d) = qp.close_deadline {
            self.timers.remove(&(d, ConnOwner::QueuePair(slot).into()));
        }
        if let Phase::Connecting(c) = &qp.phase {
            self.timers
                .remove(&(c.deadline, ConnOwner::QueuePair(slot).into()));
        }
        Some(qp.rings.qpn)
    }

    fn unlisten(&mut self, now: Instant, listener: CmListenerId) {
        for port in &mut self.ports {
            if let Some(at) = port.listeners.iter().position(|(l, _)| *l == listener) {
                let (_, id) = port.listeners.swap_remove(at);
                port.stack.stop_listening(now, id);
                port.setups.remove(&listener);
            }
        }
        for slot in self.pending.select(|i| i.listener == listener) {
            self.drop_pending(now, slot, true);
        }
    }

    fn remove_client(&mut self, now: Instant, client: ClientId) {
        for slot in self.qps.select(|q| q.client == client) {
            self.drop_qp(now, slot, true);
        }
        self.cqs.remove_client(client);
        self.srqs.remove_client(client);
        if let Some(at) = self.clients.iter().position(|c| c.client == client) {
            let end = self.clients.swap_remove(at);
            self.idle.unwatch(&end.wake);
        }
    }

    /// A completion queue overflowed: its queue pairs end, nobody else's.
    #[cold]
    pub(super) fn overflows(&mut self, now: Instant) {
        for cq in std::mem::take(&mut self.cqs.overflows) {
            if let Some(client) = self.cqs.client(cq) {
                self.post_event(Event::CqOverflow { client, cq });
            }
            for slot in self
                .qps
                .select(|q| q.rings.send_cq == cq || q.rings.recv_cq == cq)
            {
                self.end_in_error(now, slot);
            }
        }
    }

    fn stop(&mut self, now: Instant) {
        if self.stopping.is_some() {
            return;
        }
        self.stopping = Some(Instant(now.0 + STOP_GRACE_NS));
        for slot in self.pending.select(|_| true) {
            self.drop_pending(now, slot, true);
        }
        for slot in self.qps.select(|q| matches!(q.phase, Phase::Running)) {
            self.disconnect(now, slot);
        }
    }

    fn check_stopped(&mut self, now: Instant, deadline: Instant) {
        let open = !self.qps.select(|q| q.conn.is_some()).is_empty();
        if open && now < deadline {
            return;
        }
        for slot in self.qps.select(|_| true) {
            self.drop_qp(now, slot, true);
        }
        // The resets have to leave before the thread does.
        for port in 0..self.ports.len() {
            self.poll_port(now, port, true);
        }
        let worker = self.index;
        self.post_event(Event::Stopped { worker });
        self.deliver_events();
        self.stopped = true;
    }
}
