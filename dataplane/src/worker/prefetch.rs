//! Prefetching while very many queue pairs are ready. Then the state of the next one is not in the
//! cache, and the state of several is fetched while one is processed. With few there is nothing to
//! gain.

use super::Worker;
use super::conn_owner::ConnOwner;
use super::slots::UserSlot;

/// Number of ready queue pairs from which prefetching pays.
pub(super) const MANY: usize = 16;
/// Turns ahead at which a queue pair is prefetched.
const QUEUE_PAIR_AHEAD: usize = 6;
/// Turns ahead at which the data that it points to is prefetched: its request and its connection.
const CONNECTION_AHEAD: usize = 3;

impl Worker {
    /// Prefetches for coming turns of a user and port with at least [`MANY`] ready queue pairs. The
    /// current queue pair has been taken out of the list.
    #[inline]
    pub(super) fn prefetch_ready(&mut self, user: UserSlot, port: usize) {
        if let Some(slot) = self.users.peek_ready(user, port, QUEUE_PAIR_AHEAD) {
            self.queue_pairs.prefetch(slot);
        }
        let stack = &mut self.ports[port].stack;
        if let Some(slot) = self.users.peek_ready(user, port, CONNECTION_AHEAD)
            && let Some(queue_pair) = self.queue_pairs.get_mut(slot)
        {
            queue_pair.rings.sq.prefetch_next();
            queue_pair.protocol.prefetch_for_sending();
            if let Some(conn) = queue_pair.conn {
                stack.prefetch_for_sending(conn);
            }
        }
        if let Some(slot) = self.users.peek_ready(user, port, 0)
            && let Some(queue_pair) = self.queue_pairs.get(slot)
            && let Some(conn) = queue_pair.conn
        {
            stack.prefetch_queues_for_sending(conn);
        }
    }

    /// Prefetches for coming events of the port. The current event has been taken out of the list.
    #[inline]
    pub(super) fn prefetch_event(&self, port: usize) {
        let stack = &self.ports[port].stack;
        if stack.event_count() >= MANY
            && let Some(user) = stack.peek_event_user(QUEUE_PAIR_AHEAD)
            && let ConnOwner::QueuePair(slot) = ConnOwner::from(user)
        {
            self.queue_pairs.prefetch(slot);
        }
    }
}
