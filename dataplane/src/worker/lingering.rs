//! Streams of departed clients. A program may end, or execute another one, right after its last
//! write; its peer gets all bytes and then the end of the stream, as with sockets of the kernel. So a
//! stream stays in its worker until the requests posted to it and its final SEND are acknowledged.
//! TCP then closes the connection without an owner.
//!
//! The control thread keeps the rings and the memory of the client, charged to its account, until each
//! worker has passed the barrier that follows [`Command::RemoveClient`]. The worker holds this barrier
//! back while streams of the client linger.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

use siw_iwarp::RdmapState;
use siw_shm::{SendData, SendWqe, SendWr, WrFlags};
use siw_tcp::Instant;

use super::connections::Connections;
use super::lifecycle::STALL_TIMEOUT;
use super::lifecycle_state::LifecycleState;
use super::messages::Command;
use super::slots::QpSlot;
use crate::ids::ClientId;

/// Departed clients with lingering streams.
#[derive(Default)]
pub(super) struct LingeringClients {
    clients: HashMap<ClientId, LingeringClient>,
    /// Clients whose last stream has ended, with their barriers.
    ended: VecDeque<(ClientId, Vec<Command>)>,
}

#[derive(Default)]
struct LingeringClient {
    streams: usize,
    /// Barriers that wait for the streams.
    held: Vec<Command>,
}

impl LingeringClients {
    /// Holds a barrier back that has to wait for lingering streams; returns any other command.
    pub(super) fn hold(&mut self, command: Command) -> Option<Command> {
        if self.clients.is_empty() {
            return Some(command);
        }
        let client = match &command {
            Command::Barrier { token } | Command::AwaitFrames { token, .. } => token.client,
            _ => None,
        };
        let Some(lingering) = client.and_then(|client| self.clients.get_mut(&client)) else {
            return Some(command);
        };
        lingering.held.push(command);
        None
    }

    /// Takes the next client whose last stream has ended, with the barriers that waited for it.
    #[inline]
    pub(super) fn pop_ended(&mut self) -> Option<(ClientId, Vec<Command>)> {
        self.ended.pop_front()
    }

    /// Counts the end of a stream.
    fn end_stream(&mut self, client: ClientId) {
        let Entry::Occupied(mut found) = self.clients.entry(client) else {
            return;
        };
        let lingering = found.get_mut();
        lingering.streams -= 1;
        if lingering.streams == 0 {
            self.ended.push_back((client, found.remove().held));
        }
    }
}

impl Connections {
    /// Removes the queue pairs of a departed client; with `lingers`, except for connected streams.
    /// Returns true if there are any: the client has to stay until they end.
    pub(super) fn remove_queue_pairs(
        &mut self,
        now: Instant,
        client: ClientId,
        lingers: bool,
    ) -> bool {
        let mut streams = 0;
        let mut from = QpSlot::FIRST;
        while let Some(slot) = self.queue_pairs.next_of_client(client, from) {
            from = QpSlot(slot.0 + 1);
            if lingers && self.linger(now, slot) {
                streams += 1;
            } else {
                self.drop_queue_pair(now, slot, true);
            }
        }
        if streams > 0 {
            let held = Vec::new();
            let lingering = LingeringClient { streams, held };
            self.lingering.clients.insert(client, lingering);
        }
        streams > 0
    }

    /// Lets a queue pair linger if it is a stream that can still send.
    fn linger(&mut self, now: Instant, slot: QpSlot) -> bool {
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return false;
        };
        let is_open = matches!(queue_pair.state, LifecycleState::Running { .. })
            && queue_pair.protocol.state() == RdmapState::Rts;
        let Some(bytes) = queue_pair.final_send.as_bytes().filter(|_| is_open) else {
            return false;
        };
        let request = SendWr::send(0, SendData::Inline(bytes)).with_flags(WrFlags::NONE);
        let Ok(request) = SendWqe::from_wr(&request) else {
            return false;
        };
        queue_pair.rings.final_send = Some(Box::new(request));
        let stack = &self.ports[queue_pair.port].stack;
        let end = now + stack.orphan_timeout();
        let deadline = (now + STALL_TIMEOUT).min(end);
        self.leave_completion_queues(slot);
        self.enter_state(slot, LifecycleState::Lingering { deadline, end });
        self.mark_ready(slot);
        true
    }

    /// Ends a lingering stream whose requests are all acknowledged.
    #[cold]
    pub(super) fn check_lingering(&mut self, now: Instant, slot: QpSlot) {
        if let Some(queue_pair) = self.queue_pairs.get_mut(slot)
            && matches!(queue_pair.state, LifecycleState::Lingering { .. })
            && !queue_pair.has_sends()
        {
            self.finish_lingering(now, slot);
        }
    }

    /// Removes a lingering stream. Its connection is closed, or reset if data is unacknowledged.
    pub(super) fn finish_lingering(&mut self, now: Instant, slot: QpSlot) {
        let client = self
            .queue_pairs
            .get(slot)
            .map(|queue_pair| queue_pair.client);
        self.drop_queue_pair(now, slot, false);
        if let Some(client) = client {
            self.lingering.end_stream(client);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::CommandToken;

    fn barrier(client: Option<u64>, number: u64) -> Command {
        let client = client.map(ClientId);
        let token = CommandToken { client, number };
        Command::Barrier { token }
    }

    fn number_of(command: &Command) -> u64 {
        match command {
            Command::Barrier { token } => token.number,
            _ => panic!("not a barrier"),
        }
    }

    #[test]
    fn the_barrier_of_a_departed_client_waits_for_its_last_stream() {
        let mut lingering = LingeringClients::default();
        let held = Vec::new();
        let two = LingeringClient { streams: 2, held };
        lingering.clients.insert(ClientId(1), two);

        assert!(lingering.hold(barrier(Some(1), 10)).is_none());
        let of_others = [barrier(Some(2), 11), barrier(None, 12), Command::Stop];
        for command in of_others {
            assert!(lingering.hold(command).is_some());
        }
        lingering.end_stream(ClientId(1));
        assert!(lingering.pop_ended().is_none());
        lingering.end_stream(ClientId(1));
        let (client, held) = lingering.pop_ended().unwrap();
        assert_eq!(client, ClientId(1));
        assert_eq!(held.iter().map(number_of).collect::<Vec<_>>(), [10]);
        assert!(lingering.pop_ended().is_none());
        // The client is forgotten.
        lingering.end_stream(ClientId(1));
        assert!(lingering.hold(barrier(Some(1), 13)).is_some());
    }
}
