//! Turns of a batch by users: each user (uid) whose clients ring doorbells, or whose queue pairs may
//! have something to send, has as much of each batch as any other, however many clients and queue
//! pairs it has. Within a user, queue pairs take turns, and so do clients.

use std::collections::VecDeque;

use super::worker_qp::QpSlot;

/// Doorbells taken from all clients of one user in one batch; the rest wait.
const DOORBELLS_PER_USER: usize = 512;

/// The place of a user in [`UserShares`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct UserSlot(u32);

impl UserSlot {
    /// That of a queue pair whose client is not known.
    pub(super) const FIRST: UserSlot = UserSlot(0);
}

/// What one user has in this batch.
struct UserShare {
    /// `None`: the place is free.
    uid: Option<u32>,
    clients: u32,
    /// Queue pairs that may have something to send, by the place of their port in the worker.
    ready: Vec<VecDeque<QpSlot>>,
    doorbells_left: usize,
    /// The batch that `doorbells_left` belongs to.
    batch: u64,
}

/// The users of one worker.
#[derive(Default)]
pub(super) struct UserShares {
    users: Vec<UserShare>,
    ready_count: usize,
    batch: u64,
}

impl UserShares {
    /// A client of this user is there.
    pub(super) fn add_client(&mut self, uid: u32) -> UserSlot {
        let place = self.users.iter().position(|user| user.uid == Some(uid));
        let place = place.or_else(|| self.users.iter().position(|user| user.uid.is_none()));
        let place = place.unwrap_or_else(|| {
            self.users.push(UserShare {
                uid: None,
                clients: 0,
                ready: Vec::new(),
                doorbells_left: 0,
                batch: 0,
            });
            self.users.len() - 1
        });
        let user = &mut self.users[place];
        user.uid = Some(uid);
        user.clients += 1;
        UserSlot(place as u32)
    }

    /// A client of this user is gone, its queue pairs before it.
    pub(super) fn remove_client(&mut self, slot: UserSlot) {
        let Some(user) = self.users.get_mut(slot.0 as usize) else {
            return;
        };
        user.clients = user.clients.saturating_sub(1);
        if user.clients == 0 {
            user.uid = None;
            self.ready_count -= user.ready.iter().map(VecDeque::len).sum::<usize>();
            user.ready.clear();
        }
    }

    /// How many users there are, gone ones whose places are free among them.
    #[inline]
    pub(super) fn slots(&self) -> impl Iterator<Item = UserSlot> + use<> {
        (0..self.users.len() as u32).map(UserSlot)
    }

    /// No queue pair of any user is ready.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.ready_count == 0
    }

    /// The queue pair has its turn after those of its user and port that wait already.
    #[inline]
    pub(super) fn push_ready(&mut self, slot: UserSlot, port: usize, queue_pair: QpSlot) {
        let Some(user) = self.users.get_mut(slot.0 as usize) else {
            return;
        };
        while user.ready.len() <= port {
            user.ready.push(VecDeque::new());
        }
        user.ready[port].push_back(queue_pair);
        self.ready_count += 1;
    }

    #[inline]
    fn ready(&self, slot: UserSlot, port: usize) -> Option<&VecDeque<QpSlot>> {
        self.users.get(slot.0 as usize)?.ready.get(port)
    }

    /// Queue pairs of the user that wait, of one port.
    #[inline]
    pub(super) fn ready_len(&self, slot: UserSlot, port: usize) -> usize {
        self.ready(slot, port).map_or(0, VecDeque::len)
    }

    /// Queue pairs of the user that wait, of all ports.
    #[inline]
    pub(super) fn total_ready(&self, slot: UserSlot) -> usize {
        self.users
            .get(slot.0 as usize)
            .map_or(0, |user| user.ready.iter().map(VecDeque::len).sum())
    }

    /// The user's queue pair of this port whose turn it is.
    #[inline]
    pub(super) fn pop_ready(&mut self, slot: UserSlot, port: usize) -> Option<QpSlot> {
        let user = self.users.get_mut(slot.0 as usize)?;
        let found = user.ready.get_mut(port)?.pop_front()?;
        self.ready_count -= 1;
        Some(found)
    }

    /// The queue pair that has its turn `ahead` turns from now.
    #[inline]
    pub(super) fn peek_ready(&self, slot: UserSlot, port: usize, ahead: usize) -> Option<QpSlot> {
        self.ready(slot, port)?.get(ahead).copied()
    }

    /// All users have their doorbells of a batch anew.
    #[inline]
    pub(super) fn begin_batch(&mut self) {
        self.batch += 1;
    }

    /// What the user has left of this batch, to be taken from.
    #[inline]
    pub(super) fn doorbells_left(&mut self, slot: UserSlot) -> Option<&mut usize> {
        let user = self.users.get_mut(slot.0 as usize)?;
        if user.batch != self.batch {
            user.batch = self.batch;
            user.doorbells_left = DOORBELLS_PER_USER;
        }
        Some(&mut user.doorbells_left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_has_its_doorbells_once_a_batch_with_all_its_clients() {
        let mut shares = UserShares::default();
        let greedy: Vec<_> = (0..3).map(|_| shares.add_client(7)).collect();
        let honest = shares.add_client(8);
        assert!(greedy.iter().all(|slot| *slot == greedy[0]) && honest != greedy[0]);
        for _ in 0..2 {
            shares.begin_batch();
            *shares.doorbells_left(greedy[1]).unwrap() -= DOORBELLS_PER_USER;
            assert_eq!(shares.doorbells_left(greedy[2]), Some(&mut 0));
            assert_eq!(
                shares.doorbells_left(honest),
                Some(&mut { DOORBELLS_PER_USER })
            );
        }
    }

    #[test]
    fn queue_pairs_wait_for_those_of_their_user_alone() {
        let mut shares = UserShares::default();
        let (greedy, honest) = (shares.add_client(7), shares.add_client(8));
        for number in 0..100 {
            shares.push_ready(greedy, 0, QpSlot(number));
        }
        shares.push_ready(honest, 0, QpSlot(200));
        assert_eq!(shares.pop_ready(honest, 0), Some(QpSlot(200)));
        assert_eq!(shares.pop_ready(greedy, 0), Some(QpSlot(0)));
        assert_eq!(
            (shares.ready_len(greedy, 0), shares.ready_len(honest, 0)),
            (99, 0)
        );
        // Its place is the next user's, and nothing in it.
        shares.remove_client(greedy);
        assert!(shares.is_idle());
        assert_eq!(shares.add_client(9), greedy);
        assert_eq!(shares.pop_ready(greedy, 0), None);
    }

    #[test]
    fn queue_pairs_wait_for_those_of_their_port_alone() {
        let mut shares = UserShares::default();
        let user = shares.add_client(7);
        for number in 0..100 {
            shares.push_ready(user, 1, QpSlot(number));
        }
        shares.push_ready(user, 0, QpSlot(200));
        assert_eq!(shares.peek_ready(user, 1, 6), Some(QpSlot(6)));
        assert_eq!(shares.peek_ready(user, 0, 1), None);
        assert_eq!(shares.total_ready(user), 101);
        assert_eq!(shares.pop_ready(user, 0), Some(QpSlot(200)));
        assert_eq!(shares.pop_ready(user, 2), None);
        shares.remove_client(user);
        assert!(shares.is_idle());
    }
}
