//! Snapshots of a worker's counters and connections.

use siw_iwarp::TxRecord;

use super::Worker;
use super::messages::{ConnectionSnapshot, PortStats, SharedLines, WorkerStats};
use super::slots::QpSlot;
use super::worker_qp::{QpTable, WorkerQp};
use crate::datapath::batch_times::thread_time;
use crate::datapath::port::WorkerPort;
// From the C library: rustix looks up the vDSO by itself, which valgrind has removed.
use nix::sched::sched_getcpu;

/// Slots visited for one command, and connections described: a batch is not delayed noticeably.
const SLOTS_PER_COMMAND: u32 = 256;
const SNAPSHOTS_PER_COMMAND: usize = 8;

impl QpTable {
    /// Snapshots of some queue pairs from a slot on, and the slot at which the list continues.
    pub(super) fn snapshots(
        &self,
        ports: &[WorkerPort<TxRecord>],
        from: u32,
        user: Option<u32>,
    ) -> (Vec<ConnectionSnapshot>, Option<u32>) {
        let mut snapshots = Vec::with_capacity(SNAPSHOTS_PER_COMMAND);
        let slots = self.slots();
        for slot in from..slots.min(from.saturating_add(SLOTS_PER_COMMAND)) {
            if snapshots.len() == SNAPSHOTS_PER_COMMAND {
                return (snapshots, Some(slot));
            }
            let Some(queue_pair) = self.get(QpSlot(slot)) else {
                continue;
            };
            if user.is_some_and(|user| user != queue_pair.quota_owner.user) {
                continue;
            }
            snapshots.extend(queue_pair.snapshot(ports, slot));
        }
        let next = from.saturating_add(SLOTS_PER_COMMAND);
        (snapshots, (next < slots).then_some(next))
    }
}

impl WorkerQp {
    /// State of the queue pair and its connection for the report of the connection's end; `None` if nobody
    /// records it.
    pub(super) fn last_snapshot(
        &self,
        ports: &[WorkerPort<TxRecord>],
        slot: u32,
    ) -> Option<ConnectionSnapshot> {
        self.is_recorded
            .then(|| self.snapshot(ports, slot))
            .flatten()
    }

    /// State of the queue pair in this slot, and of its connection; `None` if the worker does not have
    /// the queue pair's port.
    pub(super) fn snapshot(
        &self,
        ports: &[WorkerPort<TxRecord>],
        slot: u32,
    ) -> Option<ConnectionSnapshot> {
        let port = ports.get(self.port)?;
        Some(ConnectionSnapshot {
            slot,
            qpn: self.rings.qpn,
            client: self.client,
            device: port.device,
            phase: self.state.name(),
            rdmap: self.protocol.info(),
            tcp: self.conn.and_then(|conn| port.stack.tcp_info(conn)),
        })
    }
}

impl Worker {
    pub(super) fn statistics(&self) -> WorkerStats {
        WorkerStats {
            queue_pairs: self.connections.queue_pairs.count(),
            iterations: self.batches,
            sleeps: self.wake_sources.sleeps(),
            core: sched_getcpu().unwrap_or_default(),
            cpu_ns: thread_time().as_nanos() as u64,
            longest_batch_ns: self.batch_times.longest().as_nanos() as u64,
            placed_out_of_order: self.connections.placed_out_of_order,
            receive_waits: self.connections.receive_waits.begun,
            receive_wait_timeouts: self.connections.receive_waits.timed_out,
            messages: self.connections.messages.clone(),
            round_trips: self.connections.round_trips.clone(),
            drops: self.connections.drops.clone(),
            shared_lines: SharedLines {
                request_slots: self.connections.context.request_slots,
                request_batches: self.connections.context.request_batches,
                doorbells: self.connections.scheduler.doorbells_taken,
                completions: self.connections.context.cqs.written_entries,
            },
            forward: self.forwarder.stats,
            devices: self
                .connections
                .ports
                .iter()
                .map(|port| PortStats {
                    device: port.device,
                    frames_received: port.frames_received,
                    frames_sent: port.output.frames_sent,
                    frames_linearized: port.output.frames_linearized,
                    frames_refused: port.output.frames_refused(),
                    frames_lost: port.output.frames_lost,
                    faults: port.output.fault_counts(),
                    host_frames_sent: port.output.host_frames_sent,
                    host_frames_dropped: port.output.host_frames_dropped,
                    tcp: port.stack.stats(),
                })
                .collect(),
            buffers_free: self.connections.cache.pool().available_buffers()
                + self.connections.cache.cached_buffers() as u32,
            buffers: self.connections.cache.pool().capacity(),
        }
    }
}
