//! Received buffers that the connections of a stack hold. All stacks take them from one pool, so their number
//! is limited, and the connections whose owners do not read for a while are limited apart from the others:
//! owners who read go on however much the rest of the connections hold.

use std::collections::HashMap;

/// Received buffers that a connection may always hold beyond the common limit, up to an eighth of that.
const FEW: usize = 16;

/// Counts of held buffers.
pub(crate) struct HeldBuffers {
    /// Maximum of all connections together ([`crate::TcpConfig::max_held_buffers`]).
    limit: usize,
    /// Maximum of one connection.
    limit_of_one: usize,
    /// Buffers of connections whose owners read.
    reading: usize,
    /// Buffers of connections whose owners wait before they read on.
    waiting: usize,
    /// `waiting` by user; users who have none are not in it.
    of_users: HashMap<u32, usize>,
}

impl HeldBuffers {
    pub(crate) fn new(limit: usize, limit_of_one: usize) -> HeldBuffers {
        HeldBuffers {
            limit,
            limit_of_one,
            reading: 0,
            waiting: 0,
            of_users: HashMap::new(),
        }
    }

    pub(crate) fn total(&self) -> usize {
        self.reading + self.waiting
    }

    /// Maximum of connections whose owners read: at least half of all.
    #[inline]
    fn reading_limit(&self) -> usize {
        self.limit - self.waiting.min(self.limit / 2)
    }

    /// Buffers that are free for connections whose owners read.
    #[inline]
    pub(crate) fn free(&self) -> usize {
        self.reading_limit().saturating_sub(self.reading)
    }

    /// Follows the count of a connection whose owner reads.
    #[inline]
    pub(crate) fn change(&mut self, from: u32, to: u32) {
        self.reading = (self.reading + to as usize).saturating_sub(from as usize);
    }

    /// Returns whether a connection that holds `own` may hold `more` as well.
    #[inline]
    pub(crate) fn has_room(&self, own: u32, more: u32) -> bool {
        let is_free = more as usize <= self.free() && (own + more) as usize <= self.limit_of_one;
        is_free || more as usize <= self.room(own)
    }

    /// Buffers that a connection that holds `own` may take. Connections that hold few may exceed the common
    /// limit by an eighth, so that owners who read are not blocked by those who do not. One that holds none
    /// may always take one, so that it does not starve: also beyond a gap, where what it holds has the peer
    /// fill the gap before its next timeout (RFC 6675).
    pub(crate) fn room(&self, own: u32) -> usize {
        let own = own as usize;
        let beyond = if own < FEW { self.limit / 8 } else { 0 };
        let most = self.reading_limit().saturating_add(beyond);
        let common = most.saturating_sub(self.reading);
        let least = usize::from(own == 0);
        self.limit_of_one.saturating_sub(own).min(common).max(least)
    }

    /// Returns whether a segment that fills a hole may exceed the limits of a connection that holds `own`, by an
    /// eighth of each.
    pub(crate) fn may_exceed(&self, own: u32) -> bool {
        let limit = self.limit_of_one;
        (own as usize) < limit.saturating_add(limit / 8)
            && self.reading < self.reading_limit().saturating_add(self.limit / 8)
    }

    /// Buffers that a connection of this user, whose owner waits and which holds `own` that are not counted
    /// among the waiting ones, may take. Half of all are for such connections; one user's leave an eighth of
    /// all to those of others.
    pub(crate) fn room_while_waiting(&self, user: u32, own: u32) -> usize {
        let own = own as usize;
        let of_user = self.of_users.get(&user).copied().unwrap_or(0);
        let free = (self.limit / 2).saturating_sub(self.waiting + own);
        free.min((self.limit / 8 * 3).saturating_sub(of_user + own))
            .min(self.limit_of_one.saturating_sub(own))
    }

    /// The owner of a connection that holds `count` stops reading.
    pub(crate) fn begin_wait(&mut self, user: u32, count: u32) {
        self.change(count, 0);
        self.waiting += count as usize;
        *self.of_users.entry(user).or_default() += count as usize;
    }

    /// The owner goes on; `count` as in [`begin_wait`](Self::begin_wait).
    pub(crate) fn end_wait(&mut self, user: u32, count: u32) {
        self.change(0, count);
        self.waiting = self.waiting.saturating_sub(count as usize);
        if let Some(of_user) = self.of_users.get_mut(&user) {
            *of_user = of_user.saturating_sub(count as usize);
            if *of_user == 0 {
                self.of_users.remove(&user);
            }
        }
    }

    /// Returns whether connections whose owners wait hold as many buffers as all may together.
    pub(crate) fn is_full_of_waiting(&self) -> bool {
        self.waiting >= self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_that_wait_leave_half_to_those_that_read() {
        let mut held = HeldBuffers::new(800, 200);
        for connection in 0..10 {
            held.change(0, 50);
            assert!(!held.is_full_of_waiting());
            held.begin_wait(7, 50);
            let left = (300_usize).saturating_sub(50 * (connection + 1));
            assert_eq!(held.room_while_waiting(7, 0), left.min(200));
        }
        // Another user has an eighth of all, less what the first one holds beyond its share.
        assert_eq!(held.room_while_waiting(8, 0), 0);
        assert_eq!((held.total(), held.free()), (500, 400));
        assert!(held.has_room(0, 200) && !held.has_room(0, 201) && !held.has_room(1, 200));
        held.change(0, 400);
        assert_eq!((held.free(), held.room(0), held.room(16)), (0, 100, 0));
        held.change(0, 100);
        assert_eq!((held.room(0), held.room(1)), (1, 0));
        held.change(100, 0);
        assert!(held.may_exceed(16) && !held.may_exceed(225));
        for _ in 0..10 {
            held.end_wait(7, 50);
            held.change(50, 0);
        }
        held.change(400, 0);
        assert_eq!(
            (held.total(), held.free(), held.of_users.len()),
            (0, 800, 0)
        );
    }
}
