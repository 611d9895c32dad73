//! The connections of a worker: TCP stacks, the queue pairs above them, and connections that no queue
//! pair has taken yet. The worker's loop calls in with arrived frames, commands and expired deadlines.
//!
//! | file | methods |
//! |---|---|
//! | `connections.rs` | insertion and removal of queue pairs, calls into them and the work that follows: asynchronous events, misused rings, a stream to close |
//! | `receive.rs` | TCP's events, from the stack to the queue pair |
//! | `send.rs` | turns of ready queue pairs, from the rings to the port |
//! | `lifecycle.rs` | the state machine of a queue pair and its connection |
//! | `connect.rs`, `listen.rs` | set-up of connections on either side |
//!
//! Parts with their own state, such as the scheduler and the port mapper, have their methods in their
//! own files.

use std::collections::VecDeque;

use dpdk::MbufCache;
use siw_host::netlink::KernelNeighbour;
use siw_iwarp::{CloseReason, QpEvent, QueuePair, RdmapState, TxRecord};
use siw_memory::Stag;
use siw_net::{ConnId, Instant, IpCidr, LearnedRoutes};
use siw_tcp::{TcpInfo, TcpState};

use super::conn_owner::ConnOwner;
use super::context::{QpView, WorkerContext};
use super::datagrams::Datagrams;
use super::deadlines::Deadlines;
use super::departures::DepartingClients;
use super::drop_reasons::DropCounts;
use super::histogram::{MessageLengths, RoundTripTimes};
use super::lifecycle_state::LifecycleState;
use super::listener_options::PortListeners;
use super::mads::Mads;
use super::messages::{ConnectFailure, ConnectParams, Event, QpSetup};
use super::new_port::NewPort;
use super::pending_connections::PendingConnections;
use super::port_mapper::PortMapper;
use super::qp_rings::RingMisuse;
use super::resolution::{Resolutions, ResolvingWorker};
use super::scheduler::Scheduler;
use super::slots::QpSlot;
use super::thresholds::THRESHOLDS;
use super::traced_counters::TracedCounters;
use super::worker_qp::{QpTable, WorkerQp};
use crate::datapath::clock::TscClock;
use crate::datapath::port::WorkerPort;
use crate::ids::Qpn;

/// Index of no device: that of a removed port's device belongs to another port.
const NO_DEVICE: usize = usize::MAX;

/// The connections of a worker and the state that they share.
pub(super) struct Connections {
    /// The worker's place among all.
    pub(super) index: usize,
    pub(super) clock: TscClock,
    pub(super) ports: Vec<WorkerPort<TxRecord>>,
    /// Listeners on each of `ports`.
    pub(super) port_listeners: Vec<PortListeners>,
    pub(super) queue_pairs: QpTable,
    pub(super) pending: PendingConnections,
    pub(super) context: WorkerContext,
    pub(super) scheduler: Scheduler,
    pub(super) deadlines: Deadlines,
    pub(super) port_mapper: PortMapper,
    pub(super) resolutions: Resolutions,
    pub(super) datagrams: Datagrams,
    pub(super) mads: Mads,
    /// Departed clients that still have objects in the worker.
    pub(super) departing: DepartingClients,
    pub(super) cache: MbufCache,
    /// FPDUs placed out of order.
    pub(super) placed_out_of_order: u64,
    pub(super) receive_waits: ReceiveWaits,
    /// Lengths of the messages handed to TCP: of SENDs, WRITEs and responses to READs.
    pub(super) messages: MessageLengths,
    /// Smoothed round-trip times, one for each burst with acknowledgements.
    pub(super) round_trips: RoundTripTimes,
    /// Refused and lost connections by reason.
    pub(super) drops: DropCounts,
    /// Counters at the last step of a trace, while one runs.
    pub(super) traced: Option<Box<TracedCounters>>,
    /// Events for the control thread: those of this batch, and those that did not fit into the
    /// mailbox.
    pub(super) outgoing_events: VecDeque<Event>,
}

/// Counters of messages that wait for a receive work request.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ReceiveWaits {
    /// Messages that had to wait.
    pub(super) begun: u64,
    /// Messages whose wait timed out.
    pub(super) timed_out: u64,
}

/// True if the peer has acknowledged all data. A FIN in flight is not data.
pub(super) fn has_no_data_in_flight(info: Option<&TcpInfo>) -> bool {
    info.is_none_or(|info| info.unsent == 0 && info.in_flight <= 1)
}

impl Connections {
    /// Queues an event for the control thread.
    pub(super) fn post_event(&mut self, event: Event) {
        self.outgoing_events.push_back(event);
    }

    /// Reports the faults of plans so far, before the end of a connection that they may have caused.
    pub(super) fn report_faults(&mut self) {
        for port in &mut self.ports {
            if let Some(marks) = port.take_fault_marks() {
                self.outgoing_events
                    .push_back(Event::FaultsInjected { marks });
            }
        }
    }

    /// The resolutions of addresses, and what they use.
    pub(super) fn resolving(&mut self) -> (&mut Resolutions, ResolvingWorker<'_>) {
        let worker = ResolvingWorker {
            ports: &mut self.ports,
            deadlines: &mut self.deadlines,
            events: &mut self.outgoing_events,
        };
        (&mut self.resolutions, worker)
    }

    /// Marks the queue pairs that clients have posted to as ready. Returns true if there were any.
    #[inline]
    pub(super) fn find_posted(&mut self) -> bool {
        let has_posted = self.scheduler.poll_send_queues(&mut self.queue_pairs);
        has_posted | self.scheduler.take_doorbells(&mut self.queue_pairs)
    }

    /// Calls into a queue pair with its view of the worker.
    #[inline]
    pub(super) fn with_queue_pair<T>(
        &mut self,
        slot: QpSlot,
        call: impl FnOnce(&mut QueuePair, &mut QpView<'_>) -> T,
    ) -> Option<T> {
        let WorkerQp {
            protocol, rings, ..
        } = self.queue_pairs.get_mut(slot)?;
        Some(call(protocol, &mut self.context.for_rings(rings)))
    }

    /// Does the work that follows from a call which may have changed a queue pair. On the fast path
    /// (RTS, nothing to report) this takes three comparisons.
    #[inline]
    pub(super) fn after_call(&mut self, now: Instant, slot: QpSlot) {
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return;
        };
        let is_quiet = queue_pair.rings.events.is_empty()
            && queue_pair.rings.misuse.is_none()
            && queue_pair.protocol.state() == RdmapState::Rts;
        if !is_quiet {
            self.report_and_follow(now, slot);
        }
    }

    /// Posts the queue pair's events and updates its life-cycle state.
    pub(super) fn report_and_follow(&mut self, now: Instant, slot: QpSlot) {
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return;
        };
        let (client, qpn) = (queue_pair.client, queue_pair.rings.qpn);
        let events = std::mem::take(&mut queue_pair.rings.events);
        let misuse = queue_pair.rings.misuse.take();
        let drains_quietly = queue_pair.drains_quietly;
        let is_wanted = |event: &QpEvent| !drains_quietly || *event != QpEvent::SqDrained;
        for event in events.into_iter().filter(is_wanted) {
            self.post_event(Event::Async { client, qpn, event });
        }
        match misuse {
            Some(RingMisuse::InvalidIndex) => self.post_event(Event::ClientFault { client, qpn }),
            Some(RingMisuse::BadRequest(reason)) => self.post_event(Event::BadRequest {
                client,
                qpn,
                reason,
            }),
            None => {}
        }
        self.follow_protocol(now, slot);
    }

    /// Ends the queue pairs of records that could not be built.
    #[cold]
    pub(super) fn handle_build_failures(&mut self, now: Instant) {
        for failure in std::mem::take(&mut self.context.build_failures) {
            let slot = failure.slot;
            self.with_queue_pair(slot, |protocol, view| {
                protocol.on_build_failure(view, &failure.record, failure.error);
            });
            self.report_and_follow(now, slot);
        }
    }

    /// Ends queue pairs of overflowed completion queues, and no others; some of them in one batch.
    /// Until its turn comes, a queue pair goes on, and its completions are lost, as the queue's state
    /// says.
    #[cold]
    pub(super) fn handle_cq_overflows(&mut self, now: Instant) {
        for _ in 0..THRESHOLDS.ended {
            let cqs = &mut self.context.cqs;
            let Some((cq, is_reported)) = cqs.overflowed.front_mut() else {
                return;
            };
            let cq = *cq;
            let is_new = !std::mem::replace(is_reported, true);
            let queue_pair = cqs.take_queue_pair(cq);
            if let Some(client) = cqs.client(cq).filter(|_| is_new) {
                self.post_event(Event::CqOverflow { client, cq });
            }
            let Some(slot) = queue_pair else {
                self.context.cqs.overflowed.pop_front();
                continue;
            };
            self.end_in_error(now, slot);
        }
    }

    /// Replaces the kernel's routes through a device.
    pub(super) fn learn_routes(&mut self, device: usize, routes: &LearnedRoutes) {
        let ports = self.ports.iter_mut();
        for port in ports.filter(|port| port.device == device) {
            port.stack.set_learned_routes(routes.clone());
        }
    }

    /// Replaces the addresses of a device.
    pub(super) fn set_addresses(&mut self, now: Instant, device: usize, addresses: &[IpCidr]) {
        let ports = self.ports.iter_mut();
        for port in ports.filter(|port| port.device == device) {
            // The control thread has checked them.
            if let Err(error) = port.stack.set_addresses(now, addresses.to_vec()) {
                tracing::error!(device, "the addresses cannot be changed: {error}");
            }
        }
    }

    /// Forgets the neighbours of a device.
    pub(super) fn flush_neighbours(&mut self, device: usize) {
        let ports = self.ports.iter_mut();
        for port in ports.filter(|port| port.device == device) {
            port.stack.flush_neighbours();
        }
    }

    /// Takes over the kernel's state of a neighbour.
    pub(super) fn learn_neighbour(&mut self, now: Instant, device: usize, known: &KernelNeighbour) {
        let ports = self.ports.iter_mut();
        for port in ports.filter(|port| port.device == device) {
            port.stack
                .learn_neighbour(now, known.address, known.mac, known.is_permanent);
        }
    }

    pub(super) fn start_connect(&mut self, now: Instant, setup: QpSetup, params: ConnectParams) {
        let port = self
            .ports
            .iter()
            .position(|port| port.device == params.device);
        let slot = self.add_queue_pair(setup, port.unwrap_or(0));
        if port.is_some() {
            self.connect_queue_pair(now, slot, params);
        } else {
            let reason = "this worker has no queue of that device".to_owned();
            self.connect_failed(now, slot, ConnectFailure::Local(reason));
        }
    }

    pub(super) fn add_queue_pair(&mut self, setup: QpSetup, port: usize) -> QpSlot {
        // Doorbells rung before any worker had the queue pair were lost.
        setup.sq.clear_pending();
        setup.sq.set_worker(self.index as u32);
        // The client still exists: see `Command::RemoveClient`.
        let user = self.scheduler.user_of(setup.client);
        let completion_queues = [setup.send_cq, setup.recv_cq];
        let queue_pair = Box::new(WorkerQp::new(setup, user, port));
        let slot = self.queue_pairs.insert(queue_pair);
        for cq in completion_queues {
            self.context.cqs.add_queue_pair(cq, slot);
        }
        slot
    }

    /// Removes a queue pair from the table, and its deadline from the list.
    pub(super) fn take_out(&mut self, slot: QpSlot) -> Option<Box<WorkerQp>> {
        self.enter_state(slot, LifecycleState::Disconnected)?;
        self.context.split_records.remove_queue_pair(slot);
        self.scheduler.remove_queue_pair(slot);
        self.leave_completion_queues(slot);
        self.queue_pairs.remove(slot)
    }

    /// Takes a queue pair from the lists of its completion queues, to which it writes no more.
    pub(super) fn leave_completion_queues(&mut self, slot: QpSlot) {
        if let Some(queue_pair) = self.queue_pairs.get_mut(slot) {
            for cq in [queue_pair.rings.send_cq, queue_pair.rings.recv_cq] {
                self.context.cqs.remove_queue_pair(cq, slot);
            }
            queue_pair.rings.silence_completions();
        }
    }

    /// Leaves a connection without an owner; TCP closes it by itself, within its own limits.
    pub(super) fn give_up_connection(&mut self, now: Instant, port: usize, conn: ConnId) {
        let stack = &mut self.ports[port].stack;
        stack.set_user(conn, ConnOwner::Nobody.into());
        stack.close(now, conn);
        stack.release(now, conn);
    }

    /// Removes a queue pair and flushes everything outstanding. Its connection is closed, or reset if
    /// a close would lose data without notice or `reset` asks for it. Returns the queue pair's number,
    /// and the memory windows that may be bound to it.
    pub(super) fn drop_queue_pair(
        &mut self,
        now: Instant,
        slot: QpSlot,
        reset: bool,
    ) -> Option<(Qpn, Vec<Stag>)> {
        let queue_pair = self.queue_pairs.get(slot)?;
        let port = queue_pair.port;
        if let Some(conn) = queue_pair.conn {
            let stack = &mut self.ports[port].stack;
            let info = stack.tcp_info(conn);
            let is_clean = has_no_data_in_flight(info.as_ref());
            // In FIN-WAIT-2 the peer has everything, and a reset would destroy what it has not read.
            let is_closed = info.is_some_and(|info| info.state == TcpState::FinWait2);
            // Consumers of paired queue pairs do not know of a connection, and the peer's program
            // relies on the acknowledgement of data that has arrived, which a close sends and a reset
            // does not.
            let is_reset = reset && !is_closed && !queue_pair.protocol.is_paired();
            if is_reset || !is_clean {
                stack.abort(now, conn);
            }
            self.give_up_connection(now, port, conn);
        }
        self.with_queue_pair(slot, |protocol, view| protocol.modify_to_error(view));
        let mut queue_pair = self.take_out(slot)?;
        let windows = queue_pair.protocol.take_bound_windows();
        Some((queue_pair.rings.qpn, windows))
    }

    /// Resets a queue pair and its connection for a consumer that gets the queue pair back as new.
    pub(super) fn reset_queue_pair(&mut self, now: Instant, qpn: Qpn) {
        let mut windows = Vec::new();
        if let Some(slot) = self.queue_pairs.find(qpn) {
            self.leave_completion_queues(slot);
            let dropped = self.drop_queue_pair(now, slot, true);
            windows = dropped.map_or(windows, |(_, windows)| windows);
        }
        self.post_event(Event::QpDestroyed { qpn, windows });
    }

    /// Adds a port, in the place of a removed one if there is one without connections.
    pub(super) fn add_port(&mut self, new: NewPort) {
        let NewPort { port, listeners } = new;
        // A deleted device of its name had the same index.
        let mut formers = self.ports.iter_mut();
        if let Some(former) = formers.find(|former| former.device == port.device) {
            former.device = NO_DEVICE;
        }
        let has_connections = |place: usize| {
            let is_on =
                |queue_pair: &WorkerQp| queue_pair.port == place && queue_pair.conn.is_some();
            !self.queue_pairs.select(is_on).is_empty()
        };
        let free = (0..self.ports.len())
            .find(|place| self.ports[*place].is_removed() && !has_connections(*place));
        match free {
            Some(place) => {
                self.port_mapper.forget_port(place);
                self.ports[place] = port;
                self.port_listeners[place] = listeners;
            }
            None => {
                self.ports.push(port);
                self.port_listeners.push(listeners);
                self.scheduler.users.add_port();
            }
        }
    }

    /// Ends the connections of a removed device and gives its queues back to the port.
    pub(super) fn remove_port(&mut self, now: Instant, device: usize) {
        if let Some(port) = self.ports.iter().position(|port| port.device == device) {
            for slot in self.pending.select(|pending| pending.port == port) {
                self.drop_pending(now, slot, true);
            }
            self.stop_listening_on(now, port);
            let (resolutions, mut worker) = self.resolving();
            resolutions.fail_all_on(port, &mut worker);
            let of_datagrams = self
                .queue_pairs
                .select(|queue_pair| queue_pair.port == port && queue_pair.is_of_datagrams());
            for slot in of_datagrams {
                self.fail_datagrams(now, slot);
            }
            let on_port = self
                .queue_pairs
                .select(|queue_pair| queue_pair.port == port && queue_pair.uses_port());
            for slot in on_port {
                let Some(queue_pair) = self.queue_pairs.get(slot) else {
                    continue;
                };
                let (conn, has_stream) = (queue_pair.conn, queue_pair.state.has_stream());
                if let Some(conn) = conn {
                    self.ports[port].stack.abort(now, conn);
                }
                if let Some(conn) = conn.filter(|_| has_stream) {
                    self.on_connection_ended(now, port, conn, slot, CloseReason::Reset);
                } else {
                    let why = "the device was removed".to_owned();
                    self.connect_failed(now, slot, ConnectFailure::Local(why));
                }
            }
            self.ports[port].drop_queues();
        }
        // Buffers that its driver still holds are lost.
        self.post_event(Event::PortRemoved { device });
    }
}
