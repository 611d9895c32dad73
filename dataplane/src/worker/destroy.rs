//! Removal of queue pairs, of clients, and of the worker itself.

use std::sync::atomic::Ordering;
use std::time::Duration;

use siw_memory::Stag;
use siw_tcp::{ConnId, Instant, TcpState};

use super::Worker;
use super::conn_owner::ConnOwner;
use super::lifecycle::{LifecycleState, has_no_data_in_flight};
use super::messages::Event;
use super::slots::QpSlot;
use super::worker_qp::WorkerQp;
use crate::ids::{ClientId, Qpn};

/// Time that a stop allows connections to close gracefully.
const STOP_GRACE: Duration = Duration::from_millis(500);

impl Worker {
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

    /// Removes a client with all its queue pairs and queues.
    pub(super) fn remove_client(&mut self, now: Instant, client: ClientId) {
        for slot in self
            .queue_pairs
            .select(|queue_pair| queue_pair.client == client)
        {
            self.drop_queue_pair(now, slot, true);
        }
        self.context.cqs.remove_client(client);
        self.context.srqs.remove_client(client);
        if let Some(wake_fd) = self.scheduler.remove_client(client) {
            self.wake_sources.unwatch(&wake_fd);
        }
    }

    /// Starts to stop the worker: connections close gracefully within [`STOP_GRACE`].
    pub(super) fn start_stopping(&mut self, now: Instant) {
        if self.stopping.is_some() {
            return;
        }
        self.stopping = Some(now + STOP_GRACE);
        for slot in self.pending.select(|_| true) {
            self.drop_pending(now, slot, true);
        }
        for slot in self
            .queue_pairs
            .select(|queue_pair| queue_pair.state.has_stream())
        {
            self.disconnect_queue_pair(now, slot);
        }
    }

    /// Ends the thread when all connections are closed, or at the deadline.
    pub(super) fn check_stopped(&mut self, now: Instant, deadline: Instant) {
        let open = self
            .queue_pairs
            .select(|queue_pair| queue_pair.conn.is_some());
        if !open.is_empty() && now < deadline {
            return;
        }
        for slot in self.queue_pairs.select(|_| true) {
            self.drop_queue_pair(now, slot, true);
        }
        // The resets have to leave before the thread does.
        for port in 0..self.ports.len() {
            self.poll_port(now, port, true);
        }
        // The control thread gets all events, that of the end last.
        self.deliver_events();
        let stopped = Event::Stopped { worker: self.index };
        if self.outgoing_events.is_empty() && self.mailbox.events.push(stopped).is_ok() {
            // Pairs with the Acquire in `WorkerSet::post_command`.
            self.mailbox.has_ended.store(true, Ordering::Release);
            self.mailbox.wake_control();
            self.is_stopped = true;
        }
    }
}
