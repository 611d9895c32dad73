//! Executes the control thread's commands, and ends the worker.

use std::sync::atomic::Ordering;
use std::time::Duration;

use siw_net::Instant;

use super::Worker;
use super::listen::ListenRequest;
use super::messages::{Command, Event};
use super::thresholds::THRESHOLDS;
use crate::ids::ClientId;

/// Time that a stop allows connections to close gracefully.
const STOP_GRACE: Duration = Duration::from_millis(500);

impl Worker {
    /// Executes commands in the order in which they were given. Returns true if there were any.
    #[inline]
    pub(super) fn take_commands(&mut self, now: Instant) -> bool {
        if let Some(deadline) = self.stopping {
            self.check_stopped(now, deadline);
        }
        // Popping from an empty queue costs a fence, which waits until the last batch's stores have
        // reached the clients' cache lines.
        if self.mailbox.commands.is_empty() {
            return false;
        }
        let mut any = false;
        for _ in 0..THRESHOLDS.commands {
            let Some(command) = self.mailbox.commands.pop() else {
                break;
            };
            any = true;
            self.execute_command(now, command);
        }
        any
    }

    fn execute_command(&mut self, now: Instant, command: Command) {
        let connections = &mut self.connections;
        let Some(command) = connections.departing.hold(command) else {
            return;
        };
        match command {
            Command::SetTaps(taps) => {
                let taps = taps.map(|taps| taps.for_worker(self.index));
                connections.traced = None;
                for port in &mut connections.ports {
                    port.output.taps = taps.clone();
                }
            }
            Command::SetFaults(faults) => {
                for port in &mut connections.ports {
                    port.set_faults(&faults, self.index);
                }
            }
            Command::Stall(time) => std::thread::sleep(time),
            Command::AddClient {
                client,
                user,
                doorbells,
                wake,
            } => {
                self.wake_sources.watch(&wake);
                connections
                    .scheduler
                    .add_client(client, user, doorbells, wake);
            }
            Command::RemoveClient { client, lingers } => {
                connections.departing.start(client, lingers);
            }
            Command::AddCq(cq) => connections.context.cqs.insert(*cq),
            Command::RemoveCq { cq } => connections.context.cqs.remove(cq),
            Command::ResizeCq { cq, producer } => connections.context.cqs.resize(cq, *producer),
            Command::ModerateCq { cq, moderation } => {
                connections.context.cqs.set_moderation(cq, moderation);
            }
            Command::RaiseCq { cq } => connections.context.cqs.raise_event(cq),
            Command::AddSrq(srq) => connections.context.srqs.insert(*srq),
            Command::RemoveSrq { srq } => connections.context.srqs.remove(srq),
            Command::SettleSrq { srq } => connections.context.srqs.leave_old_ring(srq),
            Command::Connect { setup, params } => connections.start_connect(now, *setup, *params),
            Command::OpenStream(params) => connections.open_stream(now, *params),
            Command::CallStream {
                request,
                token,
                call,
            } => connections.call_stream(now, request, token, call),
            Command::ConnectStream {
                setup,
                request,
                params,
            } => connections.turn_to_initiator(now, *setup, request, *params),
            Command::EndStream {
                request,
                reset,
                only_sending,
            } => connections.end_stream(now, request, reset, only_sending),
            Command::Resolve(request) => {
                let (resolutions, mut worker) = connections.resolving();
                resolutions.start(now, *request, &mut worker);
            }
            Command::EndResolution { client, resolution } => {
                connections.resolutions.remove(client, resolution);
            }
            Command::AddAh(request) => connections.add_ah(now, *request),
            Command::RemoveAh { ah } => connections.remove_ah(ah),
            Command::TakeSharedDatagrams { device } => connections.take_shared_datagrams(device),
            Command::StartDatagrams {
                setup,
                device,
                qkey,
            } => connections.start_datagrams(now, *setup, device, qkey),
            Command::SetQkey { qpn, qkey } => connections.set_qkey(qpn, qkey),
            Command::ChangeGroup {
                device,
                group,
                joins,
            } => connections.change_group(now, device, group, joins),
            Command::ChangeMembership {
                membership,
                attaches,
            } => connections.change_membership(&membership, attaches),
            Command::SendMad(mad) => connections.send_mad(now, mad),
            Command::Accept {
                setup,
                request,
                private_data,
                ird,
                ord,
            } => {
                let slot = connections.add_queue_pair(*setup, 0);
                connections.accept_pending(now, slot, request, &private_data, ird, ord);
            }
            Command::Reject {
                request,
                private_data,
            } => connections.reject_pending(now, request, &private_data),
            Command::Listen {
                listener,
                user,
                device,
                local,
                port,
                backlog,
                mpa,
                is_streaming,
            } => connections.start_listening(&ListenRequest {
                listener,
                user,
                device,
                local,
                tcp_port: port,
                backlog,
                mpa,
                is_streaming,
            }),
            Command::Unlisten {
                listener,
                keep_requests,
            } => connections.unlisten(now, listener, keep_requests),
            Command::Disconnect { qpn, to_error } => {
                if let Some(slot) = connections.queue_pairs.find(qpn) {
                    if to_error {
                        connections
                            .with_queue_pair(slot, |protocol, view| protocol.end_in_error(view));
                        connections.publish_state(now, slot);
                    }
                    connections.disconnect_queue_pair(now, slot);
                }
            }
            Command::InstallQp { setup } => {
                let slot = connections.add_queue_pair(*setup, 0);
                connections.enter_disconnected(now, slot);
            }
            Command::Modify { qpn, to, token } => {
                connections.modify_queue_pair(now, qpn, to, token)
            }
            Command::ResetQp { qpn } => connections.reset_queue_pair(now, qpn),
            Command::DestroyQp { qpn } => match connections.queue_pairs.find(qpn) {
                Some(slot) => connections.destroy_queue_pair(now, slot),
                None => connections.post_event(Event::QpDestroyed {
                    qpn,
                    windows: Vec::new(),
                }),
            },
            Command::Barrier { token } => {
                let worker = self.index;
                connections.post_event(Event::BarrierReached { worker, token });
            }
            Command::AwaitFrames {
                token,
                regions,
                unanswered,
            } => {
                self.frame_releases
                    .await_frames(now, token, regions, unanswered);
            }
            Command::LearnRoutes { device, routes } => connections.learn_routes(device, &routes),
            Command::LearnNeighbour { device, neighbour } => {
                connections.learn_neighbour(now, device, &neighbour);
            }
            Command::SetAddresses { device, addresses } => {
                connections.set_addresses(now, device, &addresses);
            }
            Command::FlushNeighbours { device } => connections.flush_neighbours(device),
            Command::ListConnections { token, from, user } => {
                let (snapshots, next) =
                    connections
                        .queue_pairs
                        .snapshots(&connections.ports, from, user);
                let worker = self.index;
                connections.post_event(Event::Connections {
                    worker,
                    token,
                    connections: snapshots,
                    next,
                });
            }
            Command::Stats { token } => {
                let event = Event::Stats {
                    worker: self.index,
                    token,
                    stats: Box::new(self.statistics()),
                };
                self.connections.post_event(event);
            }
            Command::AddPort(port) => connections.add_port(*port),
            Command::RemovePort { device } => connections.remove_port(now, device),
            Command::Stop => self.start_stopping(now),
        }
    }

    /// Forgets a departed client whose last object is gone, and executes the barriers that waited for
    /// that.
    #[cold]
    pub(super) fn end_departure(&mut self, now: Instant, client: ClientId, held: Vec<Command>) {
        if let Some(wake) = self.connections.scheduler.remove_client(client) {
            self.wake_sources.unwatch(&wake);
        }
        for command in held {
            self.execute_command(now, command);
        }
    }

    /// Starts to stop the worker: connections close gracefully within [`STOP_GRACE`].
    pub(super) fn start_stopping(&mut self, now: Instant) {
        if self.stopping.is_some() {
            return;
        }
        self.stopping = Some(now + STOP_GRACE);
        for slot in self.connections.pending.select(|_| true) {
            self.connections.drop_pending(now, slot, true);
        }
        for slot in self
            .connections
            .queue_pairs
            .select(|queue_pair| queue_pair.state.has_stream())
        {
            self.connections.disconnect_queue_pair(now, slot);
        }
    }

    /// Ends the thread when all connections are closed, or at the deadline.
    pub(super) fn check_stopped(&mut self, now: Instant, deadline: Instant) {
        let open = self
            .connections
            .queue_pairs
            .select(|queue_pair| queue_pair.conn.is_some());
        if !open.is_empty() && now < deadline {
            return;
        }
        for slot in self.connections.queue_pairs.select(|_| true) {
            self.connections.drop_queue_pair(now, slot, true);
        }
        // The resets have to leave before the thread does.
        for port in 0..self.connections.ports.len() {
            self.connections.poll_port(now, port, true);
        }
        // The control thread gets all events, that of the end last.
        self.deliver_events();
        let stopped = Event::Stopped { worker: self.index };
        if self.connections.outgoing_events.is_empty() && self.mailbox.events.push(stopped).is_ok()
        {
            // Pairs with the Acquire in `WorkerSet::post_command`.
            self.mailbox.has_ended.store(true, Ordering::Release);
            self.mailbox.wake_control();
            self.is_stopped = true;
        }
    }
}
