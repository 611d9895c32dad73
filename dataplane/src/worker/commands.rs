//! Executes the control thread's commands.

use siw_tcp::{Instant, LearnedRoutes};

use super::Worker;
use super::awaited_frames::AwaitedFrames;
use super::listen::ListenRequest;
use super::messages::{Command, ConnectFailure, ConnectParams, Event, QpSetup};
use super::slots::QpSlot;
use super::thresholds::THRESHOLDS;
use super::worker_qp::WorkerQp;
use crate::netlink::KernelNeighbour;

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
        match command {
            Command::AddClient {
                client,
                user,
                doorbells,
                wake,
            } => {
                self.wake_sources.watch(&wake);
                self.scheduler.add_client(client, user, doorbells, wake);
            }
            Command::RemoveClient { client } => self.remove_client(now, client),
            Command::AddCq(cq) => self.context.cqs.insert(*cq),
            Command::RemoveCq { cq } => self.context.cqs.remove(cq),
            Command::ResizeCq { cq, producer } => self.context.cqs.resize(cq, *producer),
            Command::ModerateCq { cq, moderation } => {
                self.context.cqs.set_moderation(cq, moderation);
            }
            Command::RaiseCq { cq } => self.context.cqs.raise_event(cq),
            Command::AddSrq(srq) => self.context.srqs.insert(*srq),
            Command::RemoveSrq { srq } => self.context.srqs.remove(srq),
            Command::SettleSrq { srq } => self.context.srqs.leave_old_ring(srq),
            Command::Connect { setup, params } => self.start_connect(now, *setup, *params),
            Command::Accept {
                setup,
                request,
                private_data,
                ird,
                ord,
            } => {
                let slot = self.add_queue_pair(*setup, 0);
                self.accept_pending(now, slot, request, &private_data, ird, ord);
            }
            Command::Reject {
                request,
                private_data,
            } => self.reject_pending(now, request, &private_data),
            Command::Listen {
                listener,
                user,
                device,
                local,
                port,
                backlog,
                mpa,
            } => self.start_listening(&ListenRequest {
                listener,
                user,
                device,
                local,
                tcp_port: port,
                backlog,
                mpa,
            }),
            Command::Unlisten {
                listener,
                keep_requests,
            } => self.unlisten(now, listener, keep_requests),
            Command::Disconnect { qpn } => {
                if let Some(slot) = self.queue_pairs.find(qpn) {
                    self.disconnect_queue_pair(now, slot);
                }
            }
            Command::InstallQp { setup } => {
                let slot = self.add_queue_pair(*setup, 0);
                self.enter_disconnected(now, slot);
            }
            Command::Modify { qpn, to, token } => self.modify_queue_pair(now, qpn, to, token),
            Command::ResetQp { qpn } => self.reset_queue_pair(now, qpn),
            Command::DestroyQp { qpn } => match self.queue_pairs.find(qpn) {
                Some(slot) => self.destroy_queue_pair(now, slot),
                None => self.post_event(Event::QpDestroyed {
                    qpn,
                    windows: Vec::new(),
                }),
            },
            Command::Barrier { token } => {
                let worker = self.index;
                self.post_event(Event::BarrierReached { worker, token });
            }
            Command::AwaitFrames {
                token,
                regions,
                unanswered,
            } => {
                let held = self.context.ext_bufs.frames_held_of(&regions);
                self.awaited_frames
                    .push(AwaitedFrames::new(token, held, unanswered, now));
            }
            Command::LearnRoutes { device, routes } => self.learn_routes(device, &routes),
            Command::LearnNeighbour { device, neighbour } => {
                self.learn_neighbour(now, device, &neighbour);
            }
            Command::Stats { token } => {
                let event = Event::Stats {
                    worker: self.index,
                    token,
                    stats: Box::new(self.statistics()),
                };
                self.post_event(event);
            }
            Command::RemovePort { device } => self.remove_port(now, device),
            Command::Stop => self.start_stopping(now),
        }
    }

    /// Replaces the kernel's routes through a device.
    fn learn_routes(&mut self, device: usize, routes: &LearnedRoutes) {
        let ports = self.ports.iter_mut();
        for port in ports.filter(|port| port.device == device) {
            port.stack.set_learned_routes(routes.clone());
        }
    }

    /// Takes over the kernel's state of a neighbour.
    fn learn_neighbour(&mut self, now: Instant, device: usize, known: &KernelNeighbour) {
        let ports = self.ports.iter_mut();
        for port in ports.filter(|port| port.device == device) {
            port.stack
                .learn_neighbour(now, known.address, known.mac, known.is_permanent);
        }
    }

    fn start_connect(&mut self, now: Instant, setup: QpSetup, params: ConnectParams) {
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

    fn add_queue_pair(&mut self, setup: QpSetup, port: usize) -> QpSlot {
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
}
