//! Prefetching while very many queue pairs have something to do: then nothing of the next one is in the
//! cache, and several of them are fetched while one is worked on. With few there is nothing to gain.

use super::Worker;
use super::conn_owner::ConnOwner;
use super::user_shares::UserSlot;

/// Queue pairs that wait, above which it is worth while.
pub(super) const MANY: usize = 16;
/// How many turns ahead a queue pair is fetched.
const QUEUE_PAIR_AHEAD: usize = 6;
/// How many turns ahead what it points to is: its request, its connection.
const CONNECTION_AHEAD: usize = 3;

impl Worker {
    /// Before one of [`MANY`] ready queue pairs of the user and port has its turn, which is taken out of
    /// the list already.
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

    /// Before an event of the port is acted on, which is taken out of the list already.
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
