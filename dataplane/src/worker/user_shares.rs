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
    /// Queue pairs that may have something to send.
    ready: VecDeque<QpSlot>,
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
                ready: VecDeque::new(),
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
            self.ready_count -= user.ready.len();
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

    /// The queue pair has its turn after those of its user that wait already.
    #[inline]
    pub(super) fn push_ready(&mut self, slot: UserSlot, queue_pair: QpSlot) {
        if let Some(user) = self.users.get_mut(slot.0 as usize) {
            user.ready.push_back(queue_pair);
            self.ready_count += 1;
        }
    }

    /// Queue pairs of the user that wait.
    #[inline]
    pub(super) fn ready_len(&self, slot: UserSlot) -> usize {
        let user = self.users.get(slot.0 as usize);
        user.map_or(0, |user| user.ready.len())
    }

    /// The user's queue pair whose turn it is.
    #[inline]
    pub(super) fn pop_ready(&mut self, slot: UserSlot) -> Option<QpSlot> {
        let found = self.users.get_mut(slot.0 as usize)?.ready.pop_front()?;
        self.ready_count -= 1;
        Some(found)
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
            shares.push_ready(greedy, QpSlot(number));
        }
        shares.push_ready(honest, QpSlot(200));
        assert_eq!(shares.pop_ready(honest), Some(QpSlot(200)));
        assert_eq!(shares.pop_ready(greedy), Some(QpSlot(0)));
        assert_eq!(
            (shares.ready_len(greedy), shares.ready_len(honest)),
            (99, 0)
        );
        // Its place is the next user's, and nothing in it.
        shares.remove_client(greedy);
        assert!(shares.is_idle());
        assert_eq!(shares.add_client(9), greedy);
        assert_eq!(shares.pop_ready(greedy), None);
    }
}
