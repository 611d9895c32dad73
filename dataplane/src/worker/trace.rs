//! Batches during a trace: received frames and turns of queue pairs are processed one at a time, and each is
//! recorded with the counters that it moved. Drops that commands and deadlines caused in between are
//! recorded before the next step.

use siw_tcp::{Instant, RecvBuf};

use super::Worker;
use super::conn_owner::ConnOwner;
use super::connections::Connections;
use super::slots::{QpSlot, UserSlot};
use super::thresholds::THRESHOLDS;
use super::traced_counters::{PortCounters, TracedCounters, moved};
use crate::datapath::forward::ForwardStats;
use crate::ids::Qpn;
use crate::trace::{TraceEvent, TraceRecord, TraceStep, TraceTap, TracedFrame};

const FORWARD_FULL: &str = "FORWARD_FULL";

/// Counters that a sent frame moves, which has a record of its own.
fn is_of_sent_frame(name: &str) -> bool {
    ["SiwFramesOut", "TcpOutSegs", "SiwTcpOutBytes"].contains(&name)
}

/// A step to record.
struct TracedStep {
    event: TraceEvent,
    qpn: Option<Qpn>,
    frame: Option<TracedFrame>,
    /// Counters that [`TracedCounters`] does not have.
    steps: Vec<TraceStep>,
}

impl Worker {
    fn traced(&mut self) -> TracedConnections<'_> {
        TracedConnections(&mut self.connections)
    }

    /// Processes the burst and the other arrivals of a port one frame at a time.
    #[cold]
    pub(super) fn trace_arrivals(&mut self, now: Instant, port: usize, trace: &TraceTap) -> bool {
        // Events that timers raised.
        let mut any = self.connections.handle_events(now, port);
        self.traced().record_other(now, trace);
        if self.rx_batch.is_full() {
            self.timer_hold.hold_timers(now);
        }
        let mut burst = std::mem::take(&mut self.rx_batch);
        for mbuf in burst.drain() {
            let frame = TracedFrame::new(mbuf.pkt_len(), mbuf.data());
            // The batch is empty.
            let _ = self.rx_batch.push(mbuf);
            any |= self.trace_arrival(now, port, trace, frame);
        }
        let from = &mut self.connections.ports[port];
        let mut others = std::mem::take(&mut from.forwarded);
        if from.output.has_loopback() {
            others.extend(from.output.take_loopback());
        }
        for (arrived, info) in others {
            let frame = TracedFrame::new(arrived.remaining() as u32, arrived.chunk());
            self.connections.ports[port].forwarded.push((arrived, info));
            any |= self.trace_arrival(now, port, trace, frame);
        }
        if self.connections.ports[port].stack.has_host_frames() {
            any |= self.receive_burst(now, port);
        }
        any
    }

    /// Processes the only frame that has arrived.
    fn trace_arrival(
        &mut self,
        now: Instant,
        port: usize,
        trace: &TraceTap,
        frame: TracedFrame,
    ) -> bool {
        let interface = self.connections.ports[port].output.interface;
        let is_selected = trace.is_wanted() && trace.selects_frame(interface, &frame);
        if is_selected {
            self.traced().record_other(now, trace);
        }
        let before = self.forwarder.stats;
        let received = self.receive_burst(now, port);
        let qpn = self.traced().next_event_qpn(port);
        let any = received | self.connections.handle_events(now, port);
        if is_selected {
            let step = TracedStep {
                event: TraceEvent::Received,
                qpn,
                frame: Some(frame),
                steps: forward_steps(before, self.forwarder.stats),
            };
            self.traced().record_step(now, trace, port, step);
        }
        any
    }
}

/// Frames that went to other workers.
fn forward_steps(before: ForwardStats, after: ForwardStats) -> Vec<TraceStep> {
    let counters = |stats: ForwardStats| {
        [
            ("frames_forwarded", stats.forwarded),
            ("frames_copied", stats.copied),
            (FORWARD_FULL, stats.dropped),
        ]
    };
    let steps = moved(counters(before).into_iter(), counters(after).into_iter());
    let steps = steps.map(|(name, count)| TraceStep {
        name,
        count,
        drop: (name == FORWARD_FULL).then_some("frames whose worker's queue was full"),
    });
    steps.collect()
}

/// The connections of a worker during a trace.
pub(super) struct TracedConnections<'a>(pub &'a mut Connections);

impl TracedConnections<'_> {
    /// Gives queue pairs their turns one at a time; see `Connections::give_turns`.
    #[cold]
    pub(super) fn give_turns(
        &mut self,
        now: Instant,
        (user, port): (UserSlot, usize),
        count: usize,
    ) -> Option<usize> {
        for turn in 0..count.min(THRESHOLDS.turns) {
            if turn >= THRESHOLDS.turns_when_full && self.0.ports[port].stack.is_output_blocked() {
                return Some(turn);
            }
            let Some(trace) = self.0.ports[port].trace().cloned() else {
                return self.0.send_from_ready_of(now, (user, port), count - turn);
            };
            let slot = self.0.scheduler.users.peek_ready(user, port, 0)?;
            let interface = self.0.ports[port].output.interface;
            let is_selected = trace.selects_turn(interface, self.ends_of(slot));
            if is_selected {
                self.record_other(now, &trace);
            }
            let qpn = self.qpn_of(slot);
            self.0.send_from_ready_of(now, (user, port), 1);
            if is_selected {
                let step = TracedStep {
                    event: TraceEvent::Turn,
                    qpn,
                    frame: None,
                    steps: Vec::new(),
                };
                self.record_step(now, &trace, port, step);
            }
        }
        None
    }

    /// Polls a stack, and records what its timers did.
    #[cold]
    pub(super) fn poll_port(&mut self, now: Instant, port: usize, run_timers: bool) -> bool {
        let Some(trace) = self.0.ports[port].trace().cloned() else {
            return self.0.poll_stack(now, port, run_timers);
        };
        let is_selected = trace.selects_device(self.0.ports[port].output.interface);
        if is_selected {
            self.record_other(now, &trace);
        }
        let any = self.0.poll_stack(now, port, run_timers);
        if is_selected {
            let step = TracedStep {
                event: TraceEvent::Timers,
                qpn: None,
                frame: None,
                steps: Vec::new(),
            };
            self.record_step(now, &trace, port, step);
        }
        any
    }

    fn qpn_of(&self, slot: QpSlot) -> Option<Qpn> {
        let queue_pair = self.0.queue_pairs.get(slot)?;
        Some(queue_pair.rings.qpn)
    }

    /// Addresses of a queue pair's connection.
    fn ends_of(&self, slot: QpSlot) -> Option<(std::net::SocketAddr, std::net::SocketAddr)> {
        let queue_pair = self.0.queue_pairs.get(slot)?;
        let info = self.0.ports[queue_pair.port]
            .stack
            .tcp_info(queue_pair.conn?)?;
        Some((info.local, info.remote))
    }

    /// Queue pair of the next event of a port.
    fn next_event_qpn(&self, port: usize) -> Option<Qpn> {
        let user = self.0.ports[port].stack.peek_event(0)?.0;
        self.qpn_of(ConnOwner::from(user).queue_pair()?)
    }

    fn traced_counters(&self) -> Box<TracedCounters> {
        let ports = self.0.ports.iter().map(|port| PortCounters {
            tcp: port.stack.stats().clone(),
            refused: port.output.frames_refused(),
            host_dropped: port.output.host_frames_dropped,
        });
        Box::new(TracedCounters {
            ports: ports.collect(),
            drops: self.0.drops.clone(),
            work: [
                ("request_slots", self.0.context.request_slots),
                ("completions", self.0.context.cqs.written_entries),
                ("placed_out_of_order", self.0.placed_out_of_order),
                ("receive_waits", self.0.receive_waits.begun),
                ("receive_wait_timeouts", self.0.receive_waits.timed_out),
            ],
        })
    }

    /// Records drops since the last step, and begins the next one. Only a trace of everything has them: with
    /// a filter, they may be those of steps that it does not select.
    fn record_other(&mut self, now: Instant, trace: &TraceTap) {
        let counters = self.traced_counters();
        if let Some(before) = &self.0.traced
            && trace.selects_all()
        {
            for (port, state) in self.0.ports.iter().enumerate() {
                let mut steps = counters.port_steps(before, port);
                if port == 0 {
                    steps.extend(counters.work_steps(before));
                }
                steps.retain(|step| step.drop.is_some());
                if !steps.is_empty() {
                    trace.add(TraceRecord {
                        time: self.0.clock.wall_time(now),
                        interface: state.output.interface,
                        event: TraceEvent::Other,
                        qpn: None,
                        frame: None,
                        steps,
                    });
                }
            }
        }
        self.0.traced = Some(counters);
    }

    /// Records a step that began with [`Self::record_other`].
    fn record_step(&mut self, now: Instant, trace: &TraceTap, port: usize, step: TracedStep) {
        let TracedStep {
            event,
            qpn,
            frame,
            mut steps,
        } = step;
        let counters = self.traced_counters();
        if let Some(before) = &self.0.traced {
            steps.extend(counters.port_steps(before, port));
            steps.extend(counters.work_steps(before));
        }
        self.0.traced = Some(counters);
        let is_notable = frame.is_some() || !steps.iter().all(|step| is_of_sent_frame(step.name));
        if is_notable {
            trace.add(TraceRecord {
                time: self.0.clock.wall_time(now),
                interface: self.0.ports[port].output.interface,
                event,
                qpn,
                frame,
                steps,
            });
        }
    }
}
