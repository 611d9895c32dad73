//! Trace of a worker's steps. The loops that receive frames, give queue pairs their turns and poll stacks
//! call a [`StepHook`] before and after each step. Without a trace it is [`Untraced`], whose calls compile
//! to nothing, and a burst is one step. During a trace it is [`StepTrace`]: each received frame is a step,
//! and each step is recorded with the counters that it moved. Drops that commands and deadlines caused in
//! between are recorded before the next step.

use std::collections::VecDeque;

use dpdk::Mbuf;
use siw_net::{FrameInfo, Instant, RecvBuf};

use super::Worker;
use super::conn_owner::ConnOwner;
use super::connections::Connections;
use super::slots::QpSlot;
use super::traced_counters::{PortCounters, TracedCounters, moved};
use crate::datapath::forward::ForwardStats;
use crate::datapath::rx_frame::RxFrame;
use crate::ids::Qpn;
use crate::trace::{TraceEvent, TraceRecord, TraceStep, TraceTap, TracedFrame};

const FORWARD_FULL: &str = "FORWARD_FULL";

/// Counters that a sent frame moves, which has a record of its own.
fn is_of_sent_frame(name: &str) -> bool {
    ["SiwFramesOut", "TcpOutSegs", "SiwTcpOutBytes"].contains(&name)
}

/// Calls of a worker's loops around the steps of one port.
pub(super) trait StepHook {
    /// Begins a step of the port's arrivals, and leaves to the worker those that belong to it.
    fn begin_arrivals(&mut self, worker: &mut Worker, now: Instant);

    /// TCP has received the arrivals of the step, and its events follow.
    fn on_received(&mut self, connections: &Connections);

    /// Ends a step of arrivals. Returns true if it was the last one.
    fn end_arrivals(&mut self, worker: &mut Worker, now: Instant) -> bool;

    /// Begins the turn of a queue pair, which [`Self::end_step`] ends.
    fn begin_turn(&mut self, connections: &mut Connections, now: Instant, slot: QpSlot);

    /// Begins a poll of the port's stack, which [`Self::end_step`] ends.
    fn begin_poll(&mut self, connections: &mut Connections, now: Instant);

    /// Ends a turn or a poll.
    fn end_step(&mut self, connections: &mut Connections, now: Instant);
}

/// The hook without a trace: one step has all arrivals.
pub(super) struct Untraced;

impl StepHook for Untraced {
    #[inline(always)]
    fn begin_arrivals(&mut self, _worker: &mut Worker, _now: Instant) {}

    #[inline(always)]
    fn on_received(&mut self, _connections: &Connections) {}

    #[inline(always)]
    fn end_arrivals(&mut self, _worker: &mut Worker, _now: Instant) -> bool {
        true
    }

    #[inline(always)]
    fn begin_turn(&mut self, _connections: &mut Connections, _now: Instant, _slot: QpSlot) {}

    #[inline(always)]
    fn begin_poll(&mut self, _connections: &mut Connections, _now: Instant) {}

    #[inline(always)]
    fn end_step(&mut self, _connections: &mut Connections, _now: Instant) {}
}

/// Runs a loop with a [`StepTrace`]. Its code lies apart from that of the loop without a trace.
#[cold]
#[inline(never)]
pub(super) fn traced<T>(run: impl FnOnce() -> T) -> T {
    run()
}

/// The hook of a trace, for one run of a loop.
pub(super) struct StepTrace {
    trace: TraceTap,
    port: usize,
    /// The step in progress, if the trace selects it.
    step: Option<TracedStep>,
    /// Arrivals of later steps; `None` before the first step.
    arrivals: Option<Arrivals>,
    /// The step in progress has no arrivals, only events that timers raised.
    is_first: bool,
    /// Counters of the forwarder before the step.
    forwarded: ForwardStats,
}

/// A step to record.
struct TracedStep {
    event: TraceEvent,
    qpn: Option<Qpn>,
    frame: Option<TracedFrame>,
    /// Counters that [`TracedCounters`] does not have.
    steps: Vec<TraceStep>,
}

impl TracedStep {
    fn new(event: TraceEvent) -> TracedStep {
        TracedStep {
            event,
            qpn: None,
            frame: None,
            steps: Vec::new(),
        }
    }
}

/// Arrivals of a port that are not processed yet: its burst, then the other frames.
struct Arrivals {
    burst: VecDeque<Mbuf>,
    others: VecDeque<(RxFrame, FrameInfo)>,
}

impl StepTrace {
    pub(super) fn new(trace: TraceTap, port: usize) -> StepTrace {
        StepTrace {
            trace,
            port,
            step: None,
            arrivals: None,
            is_first: false,
            forwarded: ForwardStats::default(),
        }
    }

    /// Takes all arrivals from the worker, for later steps.
    fn take_arrivals(&mut self, worker: &mut Worker, now: Instant) {
        // No step has a full burst.
        if worker.rx_batch.is_full() {
            worker.timer_hold.hold_timers(now);
        }
        let others = &mut worker.connections.ports[self.port].arrived;
        self.arrivals = Some(Arrivals {
            burst: worker.rx_batch.drain().collect(),
            others: others.drain(..).collect(),
        });
        self.is_first = true;
    }

    /// Begins a step. Drops that commands and deadlines caused before it are recorded first.
    fn begin_step(&mut self, connections: &mut Connections, now: Instant, step: TracedStep) {
        connections.record_other(now, &self.trace);
        self.step = Some(step);
    }

    fn record_step(&mut self, connections: &mut Connections, now: Instant) {
        if let Some(step) = self.step.take() {
            connections.record_step(now, &self.trace, self.port, step);
        }
    }
}

impl StepHook for StepTrace {
    fn begin_arrivals(&mut self, worker: &mut Worker, now: Instant) {
        let Some(arrivals) = &mut self.arrivals else {
            self.take_arrivals(worker, now);
            return;
        };
        self.is_first = false;
        let port = &mut worker.connections.ports[self.port];
        let frame = if let Some(mbuf) = arrivals.burst.pop_front() {
            let frame = TracedFrame::new(mbuf.pkt_len(), mbuf.data());
            // The batch is empty.
            let _ = worker.rx_batch.push(mbuf);
            frame
        } else if let Some((arrived, info)) = arrivals.others.pop_front() {
            let frame = TracedFrame::new(arrived.remaining() as u32, arrived.chunk());
            port.arrived.push((arrived, info));
            frame
        } else {
            return;
        };
        self.forwarded = worker.forwarder.stats;
        let interface = port.output.interface;
        if self.trace.is_wanted() && self.trace.selects_frame(interface, &frame) {
            let step = TracedStep {
                frame: Some(frame),
                ..TracedStep::new(TraceEvent::Received)
            };
            self.begin_step(&mut worker.connections, now, step);
        }
    }

    fn on_received(&mut self, connections: &Connections) {
        if let Some(step) = &mut self.step {
            step.qpn = connections.next_event_qpn(self.port);
        }
    }

    fn end_arrivals(&mut self, worker: &mut Worker, now: Instant) -> bool {
        let connections = &mut worker.connections;
        if let Some(step) = &mut self.step {
            step.steps = forward_steps(self.forwarded, worker.forwarder.stats);
            self.record_step(connections, now);
        } else if self.is_first {
            connections.record_other(now, &self.trace);
        }
        let arrivals = self.arrivals.as_ref();
        arrivals.is_none_or(|left| left.burst.is_empty() && left.others.is_empty())
    }

    fn begin_turn(&mut self, connections: &mut Connections, now: Instant, slot: QpSlot) {
        let interface = connections.ports[self.port].output.interface;
        let ends = connections.ends_of(slot);
        if self.trace.is_wanted() && self.trace.selects_turn(interface, ends) {
            let step = TracedStep {
                qpn: connections.qpn_of(slot),
                ..TracedStep::new(TraceEvent::Turn)
            };
            self.begin_step(connections, now, step);
        }
    }

    fn begin_poll(&mut self, connections: &mut Connections, now: Instant) {
        let interface = connections.ports[self.port].output.interface;
        if self.trace.selects_device(interface) {
            self.begin_step(connections, now, TracedStep::new(TraceEvent::Timers));
        }
    }

    fn end_step(&mut self, connections: &mut Connections, now: Instant) {
        self.record_step(connections, now);
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

/// Parts of the worker that a trace reads and records.
impl Connections {
    fn qpn_of(&self, slot: QpSlot) -> Option<Qpn> {
        let queue_pair = self.queue_pairs.get(slot)?;
        Some(queue_pair.rings.qpn)
    }

    /// Addresses of a queue pair's connection.
    fn ends_of(&self, slot: QpSlot) -> Option<(std::net::SocketAddr, std::net::SocketAddr)> {
        let queue_pair = self.queue_pairs.get(slot)?;
        let info = self.ports[queue_pair.port]
            .stack
            .tcp_info(queue_pair.conn?)?;
        Some((info.local, info.remote))
    }

    /// Queue pair of the next event of a port.
    fn next_event_qpn(&self, port: usize) -> Option<Qpn> {
        let user = self.ports[port].stack.peek_event(0)?.0;
        self.qpn_of(ConnOwner::from(user).queue_pair()?)
    }

    fn traced_counters(&self) -> Box<TracedCounters> {
        let ports = self.ports.iter().map(|port| PortCounters {
            tcp: port.stack.stats(),
            refused: port.output.frames_refused(),
            host_dropped: port.output.host_frames_dropped,
        });
        Box::new(TracedCounters {
            ports: ports.collect(),
            drops: self.drops.clone(),
            work: [
                ("request_slots", self.context.request_slots),
                ("completions", self.context.cqs.written_entries),
                ("placed_out_of_order", self.placed_out_of_order),
                ("receive_waits", self.receive_waits.begun),
                ("receive_wait_timeouts", self.receive_waits.timed_out),
            ],
        })
    }

    /// Records drops since the last step, and begins the next one. Only a trace of everything has them: with
    /// a filter, they may be those of steps that it does not select.
    fn record_other(&mut self, now: Instant, trace: &TraceTap) {
        let counters = self.traced_counters();
        if let Some(before) = &self.traced
            && trace.selects_all()
        {
            for (port, state) in self.ports.iter().enumerate() {
                let mut steps = counters.port_steps(before, port);
                if port == 0 {
                    steps.extend(counters.work_steps(before));
                }
                steps.retain(|step| step.drop.is_some());
                if !steps.is_empty() {
                    trace.add(TraceRecord {
                        time: self.clock.wall_time(now),
                        interface: state.output.interface,
                        event: TraceEvent::Other,
                        qpn: None,
                        frame: None,
                        steps,
                    });
                }
            }
        }
        self.traced = Some(counters);
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
        if let Some(before) = &self.traced {
            steps.extend(counters.port_steps(before, port));
            steps.extend(counters.work_steps(before));
        }
        self.traced = Some(counters);
        let is_notable = frame.is_some() || !steps.iter().all(|step| is_of_sent_frame(step.name));
        if is_notable {
            trace.add(TraceRecord {
                time: self.clock.wall_time(now),
                interface: self.ports[port].output.interface,
                event,
                qpn,
                frame,
                steps,
            });
        }
    }
}
