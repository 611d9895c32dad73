//! Departures of clients from a worker. A client may leave tens of thousands of objects: a batch
//! removes a bounded number of them, and departing clients take turns.
//!
//! The control thread keeps the rings and the memory of the client, charged to its account, until each
//! worker has passed the barrier that follows [`Command::RemoveClient`]. The worker holds this barrier
//! back until the client's last object is gone. Streams may linger until then (`lingering.rs`).

use std::collections::{HashMap, VecDeque};

use siw_net::Instant;

use super::connections::Connections;
use super::messages::Command;
use super::slots::QpSlot;
use super::thresholds::THRESHOLDS;
use crate::ids::ClientId;

/// Clients of a worker that have departed and still have objects in it.
#[derive(Default)]
pub(super) struct DepartingClients {
    clients: HashMap<ClientId, DepartingClient>,
    /// Clients with objects to remove. The others wait for their lingering streams.
    ready: VecDeque<ClientId>,
    /// Clients whose last object is gone, with their barriers.
    ended: VecDeque<(ClientId, Vec<Command>)>,
}

struct DepartingClient {
    /// Its streams linger until their posted requests are sent.
    lingers: bool,
    /// First slot whose queue pair was neither removed nor left to linger.
    next_slot: QpSlot,
    /// Lingering streams.
    streams: usize,
    /// It is not in [`DepartingClients::ready`].
    awaits_streams: bool,
    /// Barriers that wait for the removal.
    held: Vec<Command>,
}

impl DepartingClients {
    /// Begins to remove a client.
    pub(super) fn start(&mut self, client: ClientId, lingers: bool) {
        let departing = DepartingClient {
            lingers,
            next_slot: QpSlot::FIRST,
            streams: 0,
            awaits_streams: false,
            held: Vec::new(),
        };
        self.clients.insert(client, departing);
        self.ready.push_back(client);
    }

    /// Holds a barrier back that has to wait for the removal of its client; returns any other command.
    pub(super) fn hold(&mut self, command: Command) -> Option<Command> {
        if self.clients.is_empty() {
            return Some(command);
        }
        let client = match &command {
            Command::Barrier { token } | Command::AwaitFrames { token, .. } => token.client,
            _ => None,
        };
        let Some(departing) = client.and_then(|client| self.clients.get_mut(&client)) else {
            return Some(command);
        };
        departing.held.push(command);
        None
    }

    /// True if objects can be removed now.
    #[inline]
    pub(super) fn has_work(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Takes the next client whose last object is gone, with the barriers that waited for it.
    #[inline]
    pub(super) fn pop_ended(&mut self) -> Option<(ClientId, Vec<Command>)> {
        self.ended.pop_front()
    }

    /// Counts a lingering stream.
    fn add_stream(&mut self, client: ClientId) {
        if let Some(departing) = self.clients.get_mut(&client) {
            departing.streams += 1;
        }
    }

    /// Counts the end of a stream.
    pub(super) fn end_stream(&mut self, client: ClientId) {
        let Some(departing) = self.clients.get_mut(&client) else {
            return;
        };
        departing.streams -= 1;
        if departing.streams == 0 && std::mem::take(&mut departing.awaits_streams) {
            self.ready.push_back(client);
        }
    }
}

impl Connections {
    /// Removes some objects of departed clients. Each client loses one after the other, so a client
    /// with few does not wait for one with many.
    #[cold]
    pub(super) fn remove_departing(&mut self, now: Instant) {
        let end = self.clock.now() + THRESHOLDS.removal_time;
        for _ in 0..THRESHOLDS.removals {
            let Some(client) = self.departing.ready.pop_front() else {
                return;
            };
            if self.remove_object(now, client) {
                self.departing.ready.push_back(client);
            }
            if self.clock.now() >= end {
                return;
            }
        }
    }

    /// Removes an object of a departing client. Queue pairs come first: they use the queues. Returns
    /// false if no object can be removed now.
    fn remove_object(&mut self, now: Instant, client: ClientId) -> bool {
        let Some(departing) = self.departing.clients.get_mut(&client) else {
            return false;
        };
        let next = self.queue_pairs.next_of_client(client, departing.next_slot);
        if let Some(slot) = next {
            departing.next_slot = QpSlot(slot.0 + 1);
            if departing.lingers && self.linger(now, slot) {
                self.departing.add_stream(client);
            } else {
                self.drop_queue_pair(now, slot, true);
            }
            return true;
        }
        if departing.streams > 0 {
            departing.awaits_streams = true;
            return false;
        }
        let has_removed = self.context.cqs.remove_next(client)
            || self.context.srqs.remove_next(client)
            || self.resolutions.remove_next(client)
            || self.datagrams.remove_next(client);
        if !has_removed && let Some(departing) = self.departing.clients.remove(&client) {
            self.departing.ended.push_back((client, departing.held));
        }
        has_removed
    }
}

#[cfg(test)]
mod tests {
    use dpdk::Mempool;

    use super::*;
    use crate::datapath::batch_loop::BatchLoop;
    use crate::datapath::test_environment;
    use crate::ids::{CommandToken, CqId, SrqId};
    use crate::worker::Worker;
    use crate::worker::messages::Event;
    use crate::worker::test_worker::{Queues, new_worker};

    fn token(client: Option<u64>, number: u64) -> CommandToken {
        let client = client.map(ClientId);
        CommandToken { client, number }
    }

    fn barrier(client: Option<u64>, number: u64) -> Command {
        let token = token(client, number);
        Command::Barrier { token }
    }

    /// Gives a client queue pairs, completion queues and shared receive queues: `count` of each, from
    /// number `from` on.
    fn add_objects(worker: &mut Worker, queues: &Queues, client: ClientId, from: u32, count: u32) {
        let connections = &mut worker.connections;
        for number in from..from + count {
            let cq = queues.completion_queue(client, CqId(number));
            connections.context.cqs.insert(cq);
            let srq = queues.shared_receive_queue(client, SrqId(number));
            connections.context.srqs.insert(srq);
            connections.add_queue_pair(queues.queue_pair(client, number), 0);
        }
    }

    /// Removes a client, and has its barrier answered with `number`.
    fn remove(worker: &Worker, client: ClientId, number: u64) {
        let lingers = true;
        let commands = [
            Command::RemoveClient { client, lingers },
            barrier(Some(client.0), number),
        ];
        for command in commands {
            assert!(worker.mailbox.commands.push(command).is_ok());
        }
    }

    fn next_answer(worker: &Worker) -> Option<u64> {
        match worker.mailbox.events.pop()? {
            Event::BarrierReached { token, .. } => Some(token.number),
            _ => panic!("another event"),
        }
    }

    #[test]
    fn a_batch_removes_a_bounded_number_of_objects_of_departed_clients() {
        const MANY: u32 = 2000;
        let pool = Mempool::new(test_environment(), "departed", 63, 0, 2048, None).unwrap();
        let queues = Queues::new();
        let mut worker = new_worker(&pool);
        let [many, few, stays] = [1, 2, 3].map(ClientId);
        add_objects(&mut worker, &queues, many, 1, MANY);
        add_objects(&mut worker, &queues, few, MANY + 1, 2);
        add_objects(&mut worker, &queues, stays, MANY + 3, 1);
        let of_many = |worker: &Worker| {
            let connections = &worker.connections;
            let context = &connections.context;
            connections.queue_pairs.of_clients.count(many)
                + context.cqs.of_clients.count(many)
                + context.srqs.of_clients.count(many)
        };
        remove(&worker, many, 10);
        let mut left = of_many(&worker);
        assert_eq!(left, 3 * MANY as usize);
        let (mut batches, mut answers) = (0, Vec::new());
        while left > 0 {
            assert!(worker.run_batch(Instant::from_millis(1)));
            let now_left = of_many(&worker);
            assert!(now_left < left && left - now_left <= THRESHOLDS.removals);
            left = now_left;
            batches += 1;
            match batches {
                10 => remove(&worker, few, 20),
                _ if left == 0 => {}
                _ => answers.extend(next_answer(&worker)),
            }
        }
        assert_eq!(answers, [20], "the client with few objects does not wait");
        worker.run_batch(Instant::from_millis(1));
        assert_eq!(next_answer(&worker), Some(10));
        assert!(!worker.connections.departing.has_work());
        assert_eq!(
            worker.connections.queue_pairs.count(),
            1,
            "of another client"
        );
    }

    #[test]
    fn the_barrier_of_a_departed_client_waits_for_its_last_stream() {
        let mut departing = DepartingClients::default();
        let client = ClientId(1);
        departing.start(client, true);
        departing.add_stream(client);
        departing.add_stream(client);
        assert!(departing.hold(barrier(Some(1), 10)).is_none());
        let of_others = [barrier(Some(2), 11), barrier(None, 12), Command::Stop];
        for command in of_others {
            assert!(departing.hold(command).is_some());
        }
        // All other queue pairs are removed.
        departing.ready.clear();
        departing.clients.get_mut(&client).unwrap().awaits_streams = true;
        departing.end_stream(client);
        assert!(!departing.has_work());
        departing.end_stream(client);
        assert!(departing.has_work(), "its queues can be removed");
    }
}
